//! What the user wrote: read with every problem gathered, and turned into what the engine gets.

mod engine;
mod file;
mod problem;
mod reading;
mod section;
mod sink;
mod sink_kind;
mod tree;
mod warning;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::database::NO_DATABASE;
use crate::exit::{Exit, Stop};

pub(crate) use file::{Config, EPHEMERAL_PREFIX, parse_listen, parse_start};
pub(crate) use problem::Problem;
pub(crate) use sink::{Parts, SinkSettings};

use problem::Problems;
use section::Section;
use tree::{Node, Origin, Value};

/// The file that is read without being named.
const DEFAULT_FILE: &str = "pillarbox.toml";

/// A config with all that is wrong with it.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The file, if there is one.
    pub(crate) file: Option<PathBuf>,
    /// What could be read of it.
    pub(crate) config: Config,
    /// Empty: it is fit to run.
    pub(crate) problems: Vec<Problem>,
    /// What is most likely not meant.
    pub(crate) warnings: Vec<String>,
}

/// Reads the config of a command: the flag's file, else `PILLARBOX_CONFIG`'s, else `./pillarbox.toml`, else none.
pub(crate) fn load(flag: Option<&Path>) -> Result<Loaded> {
    let (file, text) = find(flag)?;
    let (config, problems) = read(&text, environment());
    let mut warnings = warning::warnings(file.as_deref(), &text, environment().map(|(name, _)| name));
    warnings.extend(config.warnings());
    Ok(Loaded { file, config, problems, warnings })
}

/// Names and values that are not UTF-8 cannot be ours.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// The config of a command that cannot work with a broken one.
pub(crate) fn require(flag: Option<&Path>) -> Result<Config> {
    let loaded = load(flag)?;
    refuse(loaded.file.as_deref(), &loaded.problems)?;
    loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(loaded.config)
}

/// The config of a command that needs nothing but its retention. A key that is unknown is a problem all the same: it may be
/// a misspelt `retention`, and what is removed by a default that was not meant does not come back.
pub(crate) fn require_for_retention(flag: Option<&Path>) -> Result<Config> {
    let mut loaded = load(flag)?;
    loaded.problems.retain(|problem| !APART_FROM_RETENTION.contains(&problem.section()));
    refuse(loaded.file.as_deref(), &loaded.problems)?;
    Ok(loaded.config)
}

/// The sections that have nothing to do with retention.
const APART_FROM_RETENTION: [&str; 5] = ["database", "relay", "recovery", "http", "subscription"];

/// The `database` of the config file; nothing else of it is looked at, unless it names none: then what is wrong there may be why.
pub(crate) fn database(flag: Option<&Path>) -> Result<Option<String>> {
    let (file, text) = find(flag)?;
    let problems = Problems::default();
    // Where the file is not TOML, a value that can be read may still not be the one that was meant.
    let root = tree::parse(&text, &problems);
    let database = Section::new("", &root, &problems).value::<String>("database");
    refuse(file.as_deref(), &problems.into_vec())?;
    if database.is_none() {
        let (_, problems) = read(&text, environment());
        refuse_without_database(file.as_deref(), &problems)?;
    }
    Ok(database)
}

/// The config file and its text.
fn find(flag: Option<&Path>) -> Result<(Option<PathBuf>, String)> {
    let named = flag
        .map(Path::to_path_buf)
        .or_else(|| std::env::var_os("PILLARBOX_CONFIG").filter(|value| !value.is_empty()).map(PathBuf::from));
    let file = named.or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()));
    let text = match &file {
        Some(path) => fs::read_to_string(path)
            .map_err(|error| Stop::usage(format!("cannot read the config file {}: {error}", path.display())))?,
        None => String::new(),
    };
    Ok((file, text))
}

fn refuse(file: Option<&Path>, problems: &[Problem]) -> Result<()> {
    if problems.is_empty() {
        return Ok(());
    }
    let message = format!("the config in {} cannot be used:", place(file));
    Err(Stop::with_details(Exit::Failed, message, lines(problems)))
}

/// A misspelt `database`, or one below the heading of a section, is not found.
fn refuse_without_database(file: Option<&Path>, problems: &[Problem]) -> Result<()> {
    if problems.is_empty() {
        return Ok(());
    }
    let why = "this may be why (`pillarbox config check` shows it, too)";
    let message = format!("{NO_DATABASE}; the config in {} is wrong, and {why}:", place(file));
    Err(Stop::with_details(Exit::Usage, message, lines(problems)))
}

fn place(file: Option<&Path>) -> String {
    file.map_or_else(|| "the environment".to_owned(), |path| path.display().to_string())
}

fn lines(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// Reads the text of a config under an environment.
fn read(text: &str, environment: impl IntoIterator<Item = (String, String)>) -> (Config, Vec<Problem>) {
    let problems = Problems::default();
    let mut root = match text.is_empty() {
        true => Node::new(Value::Table(Default::default()), Origin::Nowhere),
        false => tree::parse(text, &problems),
    };
    tree::overlay(&mut root, environment, &problems);
    let config = Config::read(&root, &problems);
    (config, problems.into_vec())
}

#[cfg(test)]
mod tests;
