use anyhow::Result;
use pillarbox::admin::Operator;
use pillarbox::{Error, counted};
use serde_json::json;

use super::Scope;
use crate::args::ResetArgs;
use crate::exit::{Exit, Stop};

/// Empties everything. Never asks: a script says `--yes`, and a person who has to type it has thought about it.
pub(super) async fn run(scope: &Scope, args: &ResetArgs) -> Result<Exit> {
    let database = scope.database()?;
    let store = database.open().await?;
    let events = store.status().await?.log.events;
    let message = format!("{}: {}, with all cursors and deliveries", database.url(), counted(events, "event"));
    if !args.yes && !args.dry_run {
        return Err(Stop::usage(format!("reset would empty {message}; pass --yes to do it")));
    }
    if args.yes {
        store.reset().await.map_err(owners_alone)?;
    }
    if scope.output.json {
        scope.output.json(&json!({ "events": events, "dry_run": args.dry_run }))?;
    } else {
        scope.output.line(format!("{}{message}", if args.dry_run { "dry run: would empty " } else { "emptied " }))?;
    }
    Ok(Exit::Done)
}

/// No grants of a relay allow it, so those are not the fix.
fn owners_alone(error: Error) -> Error {
    match error.to_string().split_once("; give this role its grants") {
        Some((said, _)) => Error::new(error.kind(), format!("{said}; run it as the role that owns the schema")),
        None => error,
    }
}
