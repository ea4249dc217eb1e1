use std::time::Duration;

use anyhow::Result;
use pillarbox::{ErrorKind, Operator, PrunePolicy, Pruned, Status};
use serde_json::json;

use super::Scope;
use crate::args::PruneArgs;
use crate::exit::Exit;
use crate::log::Log;
use crate::output::{Output, count, dash};

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

/// Applies retention now, in slices. Asks nothing: it is what every relay does by itself.
pub(super) async fn run(scope: &Scope, args: &PruneArgs) -> Result<Exit> {
    let store = scope.open().await?;
    let mut policy = scope.prune_policy()?;
    policy.keep = args.keep.or(policy.keep);
    if args.dry_run {
        let status = store.status().await?;
        let would = describe(&status, &policy);
        if scope.output.json {
            let floor = lowest_floor(&status);
            scope.output.json(&json!({ "dry_run": true, "floor": floor, "message": would }))?;
        } else {
            scope.output.line(format!("dry run: {would}"))?;
        }
        return Ok(Exit::Done);
    }
    let mut pruned = all_slices(&store, &policy, &scope.output).await?;
    if lay_leaves(&store, &policy, &scope.output).await? {
        let more = all_slices(&store, &policy, &scope.output).await?;
        pruned.events += more.events;
        pruned.kept += more.kept;
        pruned.dead += more.dead;
        pruned.dedup += more.dedup;
        pruned.inbox += more.inbox;
        pruned.held_by = more.held_by;
    }
    print(scope, &pruned)
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
        total.dedup += slice.dedup;
        total.inbox += slice.inbox;
        total.held_by = slice.held_by;
        bar.set_position(total.events);
        if !slice.more {
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
    let others: Vec<String> = removed.iter().map(|(number, noun)| count(*number, noun)).collect();
    let (events, kept) = (count(pruned.events, "event"), pruned.kept);
    scope
        .output
        .line(format!("removed {events} ({kept} copied for deliveries that need them), {}", others.join(", ")))?;
    if let Some(name) = &pruned.held_by {
        scope.output.say(format!("subscription '{name}' holds the rest back; see `pillarbox status`"));
    }
    Ok(Exit::Done)
}

fn lowest_floor(status: &Status) -> Option<i64> {
    status.subscriptions.iter().map(|subscription| subscription.floor).min()
}

fn describe(status: &Status, policy: &PrunePolicy) -> String {
    match policy.keep {
        None => "would remove no events, since retention.keep is \"forever\"".to_owned(),
        Some(keep) => format!(
            "would remove events inserted more than {} ago, at most up to position {} (log: {} to {})",
            crate::output::age(keep.as_secs_f64()),
            dash(lowest_floor(status)),
            status.log.log_start,
            status.log.horizon
        ),
    }
}
