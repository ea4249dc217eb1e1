//! One file a command.

mod audit;
mod change;
mod completions;
mod config;
mod doctor;
mod explain;
mod journal;
mod list;
mod migrate;
mod prune;
mod publish;
mod reset;
mod run;
mod show;
mod status;
mod subscription;
mod tail;
mod why;

pub(crate) use status::sentence;

use std::path::PathBuf;

use anyhow::Result;
use pillarbox::admin::PrunePolicy;

use crate::args::{Args, Command};
use crate::config::{self as settings, Config};
use crate::database::Database;
use crate::demo;
use crate::exit::Exit;
use crate::log::Log;
use crate::output::Output;

/// What every command is given: how to print, and where the config and the log are.
#[derive(Debug)]
pub(crate) struct Scope {
    /// How to print.
    pub(crate) output: Output,
    /// Whether what concerns the inside of the engine is printed too.
    pub(crate) verbose: bool,
    database: Option<String>,
    config: Option<PathBuf>,
}

impl Scope {
    /// The log of this command. The config file is read only if nothing else names the log, and nothing but that is read
    /// of it: what else is wrong there is no reason to leave an operator without an answer.
    pub(crate) fn database(&self) -> Result<Database> {
        Database::locate(self.database.as_deref(), || settings::database(self.config.as_deref()))
    }

    /// The log that the command line itself names.
    pub(crate) fn database_flag(&self) -> Result<Option<Database>> {
        self.database.as_deref().map(Database::parse).transpose()
    }

    /// Opens the log.
    pub(crate) async fn open(&self) -> Result<Log> {
        self.database()?.open().await
    }

    /// The config, without problems.
    pub(crate) fn config(&self) -> Result<Config> {
        settings::require(self.config.as_deref())
    }

    /// What retention may remove, whatever is wrong with the rest of the config.
    pub(crate) fn prune_policy(&self) -> Result<PrunePolicy> {
        Ok(settings::require_for_retention(self.config.as_deref())?.prune_policy())
    }

    /// The config with its problems.
    pub(crate) fn load_config(&self) -> Result<settings::Loaded> {
        settings::load(self.config.as_deref())
    }
}

/// Carries out the command.
pub(crate) async fn run(args: Args) -> Result<Exit> {
    let output = Output::new(args.json, args.quiet);
    let scope = Scope { output, verbose: args.verbose > 0, database: args.database, config: args.config };
    match args.command {
        Command::Demo(args) => demo::run(&scope, &args).await,
        Command::DemoRelay { directory } => demo::relay::run(&scope, &directory).await,
        Command::Migrate(args) => migrate::run(&scope, &args).await,
        Command::Run(args) => run::run(&scope, &args).await,
        Command::Publish(args) => publish::run(&scope, &args).await,
        Command::Journal(command) => journal::run(&scope, command).await,
        Command::Status(args) => status::run(&scope, &args).await,
        Command::List(args) => list::run(&scope, args).await,
        Command::Show(args) => show::run(&scope, &args).await,
        Command::Why(args) => why::run(&scope, &args).await,
        Command::Requeue(args) => change::requeue(&scope, args).await,
        Command::Recover(args) => change::recover(&scope, args).await,
        Command::Skip(args) => change::skip(&scope, args).await,
        Command::Pause(args) => change::pause(&scope, args).await,
        Command::Resume(args) => change::resume(&scope, args).await,
        Command::Rewind(args) => change::rewind(&scope, args).await,
        Command::Subscription(command) => subscription::run(&scope, command).await,
        Command::Tail(args) => tail::run(&scope, &args).await,
        Command::Audit(args) => audit::run(&scope, &args).await,
        Command::Prune(args) => prune::run(&scope, &args).await,
        Command::Reset(args) => reset::run(&scope, &args).await,
        Command::Doctor => doctor::run(&scope).await,
        Command::Config(command) => config::run(&scope, command),
        Command::Explain(args) => explain::run(&scope, &args),
        Command::Completions { shell } => completions::run(&scope, shell),
    }
}
