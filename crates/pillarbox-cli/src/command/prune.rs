use std::time::Duration;

use anyhow::Result;
use pillarbox::admin::{Operator, PrunePolicy, Pruned, Status};
use pillarbox::{ErrorKind, counted};
use serde_json::json;

use super::Scope;
use crate::args::PruneArgs;
use crate::exit::{Exit, Stop};
use crate::log::Log;
use crate::output::Output;

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// Applies retention now, in slices. It is what every relay does by itself, so that nothing is asked; but for events of a log without
/// subscriptions, which no relay removes, and for what a subscription has not received and its `hold` keeps no longer.
pub(super) async fn run(scope: &Scope, args: &PruneArgs) -> Result<Exit> {
    let store = scope.open().await?;
    let mut policy = scope.prune_policy()?;
    policy.keep = args.keep.or(policy.keep);
    let status = store.status().await?;
    let unreceived = status.subscriptions.is_empty();
    let would = async || store.prune(&PrunePolicy { dry_run: true, unreceived: true, ..policy }).await;
    if args.dry_run {
        return say_would(scope, &status, &would().await?, &policy);
    }
    if !args.yes {
        refuse_undelivered(&would().await?, unreceived)?;
    }
    // Without the word, nothing of it goes: not what has become old since it was counted either.
    (policy.unreceived, policy.held) = (unreceived && args.yes, args.yes);
    let mut pruned = all_slices(&store, &policy, &scope.output).await?;
    let laid = lay_leaves(&store, &policy, &scope.output).await?;
    if laid {
        let more = all_slices(&store, &policy, &scope.output).await?;
        pruned.events += more.events;
        pruned.kept += more.kept;
        pruned.dead += more.dead;
        pruned.undelivered += more.undelivered;
        pruned.dedup += more.dedup;
        pruned.inbox += more.inbox;
        pruned.held_by = more.held_by;
    }
    let left = store.prune(&PrunePolicy { dry_run: true, ..policy }).await?;
    pruned.held_by = pruned.held_by.or(left.held_by);
    // A table that should have ended, and could not, would have gone.
    pruned.in_use = left.in_use + if laid { 0 } else { left.events };
    print(scope, &pruned)
}

/// Why old events stay that all subscriptions have passed.
fn stay(in_use: u64) -> String {
    let (events, verb) = (counted(in_use, "old event"), if in_use == 1 { "stays" } else { "stay" });
    format!(
        "{events} {verb} in the table in use, since events go table by table: it ends when it is full, or has been in use for an eighth \
         of retention.keep and at least 10 minutes"
    )
}

/// Refuses to remove what a subscription has not received, or what no subscription has received.
fn refuse_undelivered(would: &Pruned, unreceived: bool) -> Result<()> {
    let what = match would {
        Pruned { events: 1.., .. } if unreceived => {
            format!(
                "remove {} that no subscription has received, since the log has none",
                counted(would.events, "event")
            )
        }
        Pruned { undelivered: 1.., .. } => format!("drop {}", dropped(would.undelivered)),
        _ => return Ok(()),
    };
    Err(Stop::usage(format!("prune would {what}; pass --yes to do it")))
}

/// What holds that are over drop.
fn dropped(undelivered: u64) -> String {
    format!("{} by `hold`, for subscriptions that have not received them", counted(undelivered, "undelivered event"))
}

/// What relays leave alone because publishers would wait for too long: the table in use ends here, if it is due, and can be
/// emptied from now on. Whether the tables are as they should be; what keeps them from that passes, so it is only said.
async fn lay_leaves(store: &Log, policy: &PrunePolicy, output: &Output) -> Result<bool> {
    let bar = output.progress(None, "laying leaves");
    bar.enable_steady_tick(TICK);
    let laid = store.lay_leaves(policy.keep).await;
    bar.finish_and_clear();
    match laid {
        Err(error) if error.kind() == ErrorKind::Busy => {
            output.say(error.to_string());
            Ok(false)
        }
        other => Ok(other.map(|()| true)?),
    }
}

/// Prunes until nothing is left to remove, and adds the slices up.
async fn all_slices(store: &Log, policy: &PrunePolicy, output: &Output) -> Result<Pruned> {
    let bar = output.progress(None, "pruning");
    let mut total = Pruned::default();
    loop {
        let slice = store.prune(policy).await?;
        total.events += slice.events;
        total.kept += slice.kept;
        total.dead += slice.dead;
        total.undelivered += slice.undelivered;
        total.dedup += slice.dedup;
        total.inbox += slice.inbox;
        total.held_by = slice.held_by;
        bar.set_position(total.events);
        if !slice.more && !slice.unlooked {
            bar.finish_and_clear();
            return Ok(total);
        }
    }
}

fn print(scope: &Scope, pruned: &Pruned) -> Result<Exit> {
    if scope.output.json {
        scope.output.json(pruned)?;
        return Ok(Exit::Done);
    }
    let removed = [(pruned.dead, "dead delivery"), (pruned.dedup, "deduplication key"), (pruned.inbox, "inbox entry")];
    let others: Vec<String> = removed.iter().map(|(number, noun)| counted(*number, noun)).collect();
    let (events, kept) = (counted(pruned.events, "event"), pruned.kept);
    scope
        .output
        .line(format!("removed {events} ({kept} copied for deliveries that need them), {}", others.join(", ")))?;
    if pruned.undelivered > 0 {
        scope.output.line(format!("dropped {}; see `pillarbox status`", dropped(pruned.undelivered)))?;
    }
    if let Some(name) = &pruned.held_by {
        scope.output.say(format!("subscription '{name}' holds the rest back; see `pillarbox status`"));
    }
    if pruned.in_use > 0 {
        scope.output.say(stay(pruned.in_use));
    }
    Ok(Exit::Done)
}

fn lowest_floor(status: &Status) -> Option<i64> {
    status.subscriptions.iter().map(|subscription| subscription.floor).min()
}

fn say_would(scope: &Scope, status: &Status, would: &Pruned, policy: &PrunePolicy) -> Result<Exit> {
    let message = describe(status, would, policy);
    if !scope.output.json {
        scope.output.line(format!("dry run: {message}"))?;
        return Ok(Exit::Done);
    }
    scope.output.json(&json!({
        "dry_run": true,
        "events": would.events,
        "dead": would.dead,
        "undelivered": would.undelivered,
        "in_use": would.in_use,
        "unreceived": status.subscriptions.is_empty(),
        "held_by": would.held_by,
        "floor": lowest_floor(status),
        "message": message,
    }))?;
    Ok(Exit::Done)
}

fn describe(status: &Status, would: &Pruned, policy: &PrunePolicy) -> String {
    let (events, dead) = (counted(would.events, "event"), counted(would.dead, "dead delivery"));
    let mut message = match policy.keep {
        None => format!("would remove no events, since retention.keep is \"forever\", and {dead}"),
        Some(keep) => {
            let old = match keep {
                Duration::ZERO => String::new(),
                keep => format!(" inserted more than {} ago", crate::output::age(keep.as_secs_f64())),
            };
            let log = match (status.log.log_start, status.log.horizon) {
                (start, end) if start > end => "the log is empty".to_owned(),
                (start, end) => format!("log: {start} to {end}"),
            };
            format!("would remove {events}{old} ({log}) and {dead}")
        }
    };
    if status.subscriptions.is_empty() && would.events > 0 {
        message += "; no subscription has received these events, since the log has none: prune needs --yes for that";
    }
    if would.undelivered > 0 {
        message += &format!("; would drop {}: prune needs --yes for that", dropped(would.undelivered));
    }
    if let Some(name) = &would.held_by {
        message += &format!("; subscription '{name}' holds the rest back");
    }
    if would.in_use > 0 {
        message += &format!("; {}", stay(would.in_use));
    }
    message
}
