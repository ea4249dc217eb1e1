use anyhow::Result;
use pillarbox::{Operator, PrunePolicy, Pruned, Status};
use serde_json::json;

use super::Scope;
use crate::args::PruneArgs;
use crate::exit::Exit;
use crate::log::Log;
use crate::output::{Output, dash};

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
    let pruned = all_slices(&store, &policy, &scope.output).await?;
    print(scope, &pruned)
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
    let Pruned { events, kept, dead, dedup, .. } = pruned;
    scope.output.line(format!(
        "removed {events} events ({kept} kept aside for deliveries), {dead} dead deliveries, {dedup} deduplication keys"
    ))?;
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
