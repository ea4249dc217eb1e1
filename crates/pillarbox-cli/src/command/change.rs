use anyhow::Result;
use pillarbox::{Change, Changed, Operator, Selection};
use serde_json::json;

use super::Scope;
use crate::args::{ConfirmArgs, NameArgs, RequeueArgs, RewindArgs, SkipArgs};
use crate::exit::Exit;

/// The limit of a requeue that names none.
const REQUEUE_LIMIT: usize = u32::MAX as usize;

pub(super) async fn requeue(scope: &Scope, args: RequeueArgs) -> Result<Exit> {
    let which = match (args.event, args.stream, args.version, args.key) {
        (Some(id), ..) => Selection::Event(id),
        (_, Some(stream), Some(version), _) => Selection::Version(stream, version),
        (.., Some(key)) => Selection::Key(key),
        _ => Selection::All,
    };
    let limit = args.limit.map_or(REQUEUE_LIMIT, |limit| limit as usize);
    let mass = matches!(which, Selection::Key(_) | Selection::All);
    let change = Change::Requeue { subscription: args.subscription, which, limit };
    if mass {
        confirmed(scope, &change, &args.confirm).await
    } else {
        carry_out(scope, &change, args.confirm.dry_run).await
    }
}

pub(super) async fn skip(scope: &Scope, args: SkipArgs) -> Result<Exit> {
    let change = Change::Skip { subscription: args.subscription, event: args.event, reason: args.reason };
    carry_out(scope, &change, args.dry_run).await
}

pub(super) async fn pause(scope: &Scope, args: NameArgs) -> Result<Exit> {
    carry_out(scope, &Change::Pause(args.name), false).await
}

pub(super) async fn resume(scope: &Scope, args: NameArgs) -> Result<Exit> {
    carry_out(scope, &Change::Resume(args.name), false).await
}

pub(super) async fn rewind(scope: &Scope, args: RewindArgs) -> Result<Exit> {
    let change = Change::Rewind { subscription: args.name, to: args.to, key: args.key };
    confirmed(scope, &change, &args.confirm).await
}

/// Carries out what concerns one thing.
pub(super) async fn carry_out(scope: &Scope, change: &Change, dry_run: bool) -> Result<Exit> {
    let changed = scope.open()?.change(change, dry_run).await?;
    print(scope, &changed, dry_run)
}

/// Carries out what concerns many things, after saying what it would do and asking.
pub(super) async fn confirmed(scope: &Scope, change: &Change, confirm: &ConfirmArgs) -> Result<Exit> {
    let store = scope.open()?;
    if confirm.dry_run || !confirm.yes {
        let would = store.change(change, true).await?;
        if confirm.dry_run {
            return print(scope, &would, true);
        }
        if !scope.output.confirm(false, &sentence(&would.message))? {
            scope.output.say("nothing was changed");
            return Ok(Exit::Failed);
        }
    }
    let changed = store.change(change, false).await?;
    print(scope, &changed, false)
}

fn print(scope: &Scope, changed: &Changed, dry_run: bool) -> Result<Exit> {
    if scope.output.json {
        let Changed { count, events, message } = changed;
        scope.output.json(&json!({ "count": count, "events": events, "message": message, "dry_run": dry_run }))?;
    } else {
        let prefix = if dry_run { "dry run: " } else { "" };
        scope.output.line(format!("{prefix}{}", changed.message))?;
    }
    Ok(Exit::Done)
}

fn sentence(text: &str) -> String {
    if text.ends_with(['.', '!', '?']) { text.to_owned() } else { format!("{text}.") }
}
