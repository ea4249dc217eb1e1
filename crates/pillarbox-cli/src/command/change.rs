use anyhow::Result;
use pillarbox::admin::{Change, Changed, Operator, PausedBy, Selection, Status, SubscriptionStatus};
use pillarbox::store::InstanceId;
use pillarbox::{Position, Start, counted};
use serde_json::json;

use super::Scope;
use crate::args::{ConfirmArgs, NameArgs, PauseArgs, RecoverArgs, RequeueArgs, RewindArgs, SkipArgs};
use crate::exit::Exit;

/// The limit of a requeue that names none.
const REQUEUE_LIMIT: usize = u32::MAX as usize;

/// What taking claims from processes that are well can do.
const RECOVER_ALL_RISK: &str =
    "processes that are well do not stop working on an event that is taken from them: it is handled twice";

pub(super) async fn requeue(scope: &Scope, args: RequeueArgs) -> Result<Exit> {
    let which = match (args.event, args.stream, args.version, args.key) {
        (Some(id), ..) => Selection::Event(id),
        (_, Some(stream), Some(version), _) => Selection::Version(stream, version),
        (.., Some(key)) => Selection::Key(key),
        _ => Selection::All,
    };
    let limit = args.limit.map_or(REQUEUE_LIMIT, |limit| limit as usize);
    let (of_key, all) = (matches!(which, Selection::Key(_)), which == Selection::All);
    let subscription = args.subscription;
    let change = Change::Requeue { subscription: subscription.clone(), which: which.clone(), limit };
    if of_key
        && !args.confirm.yes
        && !args.confirm.dry_run
        && scope.open().await?.change(&change, true).await?.count == 1
    {
        // One delivery is no more than `--event` sets back without a question. Should another have died meanwhile, it stays.
        return carry_out(scope, &Change::Requeue { subscription, which, limit: 1 }, false).await;
    }
    if of_key || all {
        confirmed(scope, &change, &args.confirm).await
    } else {
        carry_out(scope, &change, args.confirm.dry_run).await
    }
}

/// Meant for a monitor that runs it again and again: with nothing to do it is done.
pub(super) async fn recover(scope: &Scope, args: RecoverArgs) -> Result<Exit> {
    let RecoverArgs { subscription, instance, silent_for, confirm } = args;
    if silent_for.is_zero() && confirm.yes {
        scope.output.say(format!("--silent-for 0s: {RECOVER_ALL_RISK}"));
    }
    let change = Change::Recover { subscription, instance: instance.map(InstanceId), silent_for };
    confirmed(scope, &change, &confirm).await
}

pub(super) async fn skip(scope: &Scope, args: SkipArgs) -> Result<Exit> {
    let change = Change::Skip { subscription: args.subscription, event: args.event, reason: args.reason };
    carry_out(scope, &change, args.dry_run).await
}

pub(super) async fn pause(scope: &Scope, args: PauseArgs) -> Result<Exit> {
    let store = scope.open().await?;
    let before = store.status().await?.subscriptions.into_iter().find(|one| one.name == args.name && one.paused);
    let said = before.as_ref().map(|before| taken_over(before, args.reason.as_deref()));
    let change = Change::Pause { subscription: args.name, by: PausedBy::Operator, reason: args.reason };
    let mut changed = store.change(&change, false).await?;
    // It may have been resumed meanwhile, and then it was paused as any other.
    if let (Some(said), 0) = (said, changed.count) {
        changed.message = format!("{}{said}", changed.message);
    }
    print(scope, &changed, false)
}

/// What an operator's pause changes of one that is there already.
fn taken_over(before: &SubscriptionStatus, reason: Option<&str>) -> String {
    let by = match before.paused_by {
        Some(PausedBy::Receiver) => "; it was paused by its receiver, and now by you, so that it is no longer an alarm",
        _ => "",
    };
    let because = match (&before.paused_reason, reason) {
        (Some(before), Some(now)) if before != now => format!("; the reason is now: {now} (it was: {before})"),
        (None, Some(now)) => format!("; the reason is now: {now}"),
        (Some(before), _) => format!("; the reason stays: {before}"),
        (None, None) => String::new(),
    };
    format!("{by}{because}")
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
    let store = scope.open().await?;
    let mut changed = store.change(change, dry_run).await?;
    if dry_run {
        changed.message = would(change, &changed, &store.status().await?);
    }
    print(scope, &changed, dry_run)
}

/// Carries out what concerns many things, after saying what it would do and asking.
pub(super) async fn confirmed(scope: &Scope, change: &Change, confirm: &ConfirmArgs) -> Result<Exit> {
    if confirm.dry_run {
        return carry_out(scope, change, true).await;
    }
    let store = scope.open().await?;
    if !confirm.yes {
        let changed = store.change(change, true).await?;
        if changed.count == 0 {
            return print(scope, &changed, false);
        }
        let question = would(change, &changed, &store.status().await?);
        if !scope.output.confirm(false, &question)? {
            scope.output.say("nothing was changed");
            return Ok(Exit::Failed);
        }
    }
    let mut changed = store.change(change, false).await?;
    if let Change::Rewind { to: Start::Position(asked), .. } = change {
        changed.message.push_str(&beyond(*asked, store.status().await?.log.horizon));
    }
    print(scope, &changed, false)
}

/// What to say of a place that the log has not reached.
fn beyond(asked: Position, horizon: Position) -> String {
    if asked > horizon { format!(" (the log ends at position {horizon})") } else { String::new() }
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

/// What a change would do, told before it is done: a [`Changed`] tells what was done.
fn would(change: &Change, changed: &Changed, status: &Status) -> String {
    let number = changed.count;
    let deliveries = counted(number, "delivery");
    let one = |name: &str| status.subscriptions.iter().find(|subscription| subscription.name == name);
    match change {
        _ if number == 0 => format!("would change nothing: {}", changed.message),
        Change::Requeue { subscription, .. } => match note(&changed.message) {
            "" => format!("would set {deliveries} of '{subscription}' back to due now, with attempts 0"),
            waits => format!("would set {deliveries} of '{subscription}' back to attempts 0{waits}"),
        },
        Change::Recover { subscription, instance, silent_for } => {
            let of = subscription.as_ref().map(|name| format!(" of '{name}'")).unwrap_or_default();
            let whom = match instance {
                Some(instance) => format!("instance {}", instance.0),
                None => "instances".to_owned(),
            };
            let (silent, risk) = match silent_for.is_zero() {
                true => ("whether they live or not".to_owned(), format!("; {RECOVER_ALL_RISK}")),
                false => (format!("silent for {}", pillarbox_sinks::duration::format(*silent_for)), String::new()),
            };
            format!("would take {deliveries}{of} from {whom}, {silent}, each counted as an attempt{risk}")
        }
        Change::Skip { subscription, event, .. } => {
            format!("would give event {event} up for '{subscription}' and let its key go on")
        }
        Change::Pause { subscription, .. } => format!("would pause '{subscription}'"),
        Change::Resume(name) => format!("would let '{name}' go on"),
        Change::Rewind { subscription, to, key } => {
            let what = match key {
                Some(key) => format!("{} of key '{key}'", counted(number, "event")),
                None => "the events".to_owned(),
            };
            let (place, note) = (place(to), note(&changed.message));
            let end =
                if key.is_none() { replayed_at_most(&changed.message, status.log.horizon) } else { String::new() };
            format!("would replay {what} {place} to '{subscription}'{note}{end}")
        }
        Change::Delete(name) => {
            let (unread, deliveries) = one(name).map_or((0, 0), |one| (one.unread(), one.deliveries));
            let (unread, deliveries) = (counted(unread, "event"), counted(deliveries, "delivery"));
            format!(
                "would delete '{name}' with its position in the log and {deliveries}; {unread} that it has not read yet would \
                 never be delivered to it"
            )
        }
        Change::Rename { from, to } => format!("would rename '{from}' to '{to}'"),
        Change::Relane { subscription, lanes } => {
            let had = one(subscription).map_or(0, |one| one.lanes);
            format!("would change the lanes of '{subscription}' from {had} to {lanes}")
        }
    }
}

fn place(to: &Start) -> String {
    match to {
        Start::Beginning => "from the start of the log on".to_owned(),
        Start::Now => "that come from now on".to_owned(),
        Start::Position(position) => format!("above position {position}"),
        Start::Time(time) => format!("inserted since {time}"),
    }
}

/// How much lies between the place that the store has found and the end of the log. Positions are counted, which is cheap: some of
/// them may hold nothing, or nothing that the subscription wants.
fn replayed_at_most(message: &str, horizon: Position) -> String {
    let digits = message.split("above position ").nth(1).unwrap_or_default();
    let digits = digits.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    let Ok(above) = digits.parse::<Position>() else { return String::new() };
    match horizon - above {
        ..=0 => format!("; the log ends at position {horizon}, so there is none"),
        count => format!("; the log ends at position {horizon}, so that is {} at most", counted(count, "event")),
    }
}

/// The remark at the end of a message, like how far back the log goes.
fn note(message: &str) -> &str {
    match message.rfind(" (") {
        Some(at) if message.ends_with(')') => &message[at..],
        _ => "",
    }
}
