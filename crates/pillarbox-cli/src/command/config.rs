use anyhow::Result;
use pillarbox::counted;
use serde_json::json;

use super::Scope;
use crate::args::ConfigCommand;
use crate::config::Config;
use crate::database::NO_DATABASE;
use crate::exit::{Exit, chain};
use crate::sink;

/// Checks or prints the config.
pub(super) fn run(scope: &Scope, command: ConfigCommand) -> Result<Exit> {
    match command {
        ConfigCommand::Check => check(scope),
        ConfigCommand::Print => print(scope),
    }
}

fn check(scope: &Scope) -> Result<Exit> {
    let mut loaded = scope.load_config()?;
    if let Ok(database) = scope.database() {
        loaded.problems.extend(sink::into_the_log(&loaded.config, &database));
    }
    let file = loaded.file.as_ref().map(|path| path.display().to_string());
    if scope.output.json {
        scope.output.json(&json!({ "file": file, "ok": loaded.problems.is_empty(), "problems": loaded.problems,
            "warnings": loaded.warnings }))?;
    } else {
        for problem in &loaded.problems {
            scope.output.line(problem.to_string())?;
        }
        for warning in &loaded.warnings {
            scope.output.line(format!("warning: {warning}"))?;
        }
        let name = file.as_deref().unwrap_or("no config file");
        match loaded.problems.len() {
            0 => say_sound(scope, name, &loaded.config)?,
            count => scope.output.say(format!("{name}: {}", counted(count, "problem"))),
        }
    }
    Ok(if loaded.problems.is_empty() { Exit::Done } else { Exit::Failed })
}

/// A config without a problem may still be less than a relay needs, or than its user believes to have written.
fn say_sound(scope: &Scope, name: &str, config: &Config) -> Result<()> {
    let count = config.subscriptions.len();
    scope.output.line(format!("{name}: {}, no problems", counted(count, "subscription")))?;
    match scope.database().map_err(|error| chain(&error)) {
        Ok(_) => {}
        // It may be given where the relay starts: nothing is wrong with the file.
        Err(error) if error == NO_DATABASE => scope.output.line(
            "neither the file nor the environment names a database here; `pillarbox run` needs one, by --database URL, by DATABASE_URL \
             or by `database = \"URL\"` in the file",
        )?,
        Err(error) => scope.output.line(format!("`pillarbox run` needs a database: {error}"))?,
    }
    if count == 0 {
        scope.output.line(
            "without a [[subscription]] `pillarbox run` refuses to start; `pillarbox run --stdout` prints all events",
        )?;
    }
    Ok(())
}

fn print(scope: &Scope) -> Result<Exit> {
    let mut config = scope.config()?;
    if let Ok(database) = scope.database() {
        config.database = Some(database.url().into());
    }
    if scope.output.json {
        scope.output.json(&config)?;
    } else {
        scope.output.write(toml::to_string(&config)?.as_bytes())?;
    }
    Ok(Exit::Done)
}
