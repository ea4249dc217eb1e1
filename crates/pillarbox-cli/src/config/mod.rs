//! What the user wrote: read with every problem gathered, and turned into what the engine gets.

mod duration;
mod engine;
mod file;
mod problem;
mod section;
mod sink;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::exit::{Exit, Stop};

pub(crate) use duration::parse as parse_duration;
pub(crate) use file::{Config, parse_listen, parse_start};
pub(crate) use problem::Problem;
pub(crate) use sink::SinkSettings;

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
}

/// Reads the config of a command: the flag's file, else `PILLARBOX_CONFIG`'s, else `./pillarbox.toml`, else none.
pub(crate) fn load(flag: Option<&Path>) -> Result<Loaded> {
    let named = flag
        .map(Path::to_path_buf)
        .or_else(|| std::env::var_os("PILLARBOX_CONFIG").filter(|value| !value.is_empty()).map(PathBuf::from));
    let file = named.or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()));
    let text = match &file {
        Some(path) => fs::read_to_string(path)
            .map_err(|error| Stop::usage(format!("cannot read the config file {}: {error}", path.display())))?,
        None => String::new(),
    };
    // Names and values that are not UTF-8 cannot be ours.
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let (config, problems) = read(&text, environment);
    Ok(Loaded { file, config, problems })
}

/// The config of a command that cannot work with a broken one.
pub(crate) fn require(flag: Option<&Path>) -> Result<Config> {
    let loaded = load(flag)?;
    if loaded.problems.is_empty() {
        return Ok(loaded.config);
    }
    let file = loaded.file.map_or_else(|| "the environment".to_owned(), |path| path.display().to_string());
    let lines: Vec<String> = loaded.problems.iter().map(|problem| format!("\n  {problem}")).collect();
    Err(Stop::with(Exit::Failed, format!("the config in {file} cannot be used:{}", lines.concat())))
}

/// Reads the text of a config under an environment.
fn read(text: &str, environment: impl IntoIterator<Item = (String, String)>) -> (Config, Vec<Problem>) {
    let problems = Problems::default();
    let mut root = match text.is_empty() {
        true => Node { value: Value::Table(Default::default()), origin: Origin::Nowhere },
        false => tree::parse(text, &problems),
    };
    tree::overlay(&mut root, environment, &problems);
    let config = Config::read(Section::new("", Some(root), &problems));
    (config, problems.into_vec())
}

#[cfg(test)]
mod tests;
