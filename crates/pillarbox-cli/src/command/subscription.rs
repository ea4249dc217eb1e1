use anyhow::Result;
use pillarbox::admin::{Change, Operator, SubscriptionStatus};
use serde_json::Value;

use super::{Scope, change};
use crate::args::SubscriptionCommand;
use crate::exit::Exit;
use crate::output::bytes;

/// Lists and changes subscriptions.
pub(super) async fn run(scope: &Scope, command: SubscriptionCommand) -> Result<Exit> {
    match command {
        SubscriptionCommand::List => list(scope).await,
        SubscriptionCommand::Delete { name, confirm } => {
            change::confirmed(scope, &Change::Delete(name.name), &confirm).await
        }
        SubscriptionCommand::Rename { from, to } => change::carry_out(scope, &Change::Rename { from, to }, false).await,
        SubscriptionCommand::Relane { name, lanes, confirm } => {
            change::confirmed(scope, &Change::Relane { subscription: name.name, lanes }, &confirm).await
        }
    }
}

async fn list(scope: &Scope) -> Result<Exit> {
    let subscriptions = scope.open().await?.status().await?.subscriptions;
    if scope.output.json {
        let with_condition = |one: &SubscriptionStatus| {
            let mut shown = serde_json::to_value(one)?;
            shown["condition"] = condition(one).into();
            Ok(shown)
        };
        scope.output.json(&subscriptions.iter().map(with_condition).collect::<Result<Vec<Value>>>()?)?;
        return Ok(Exit::Done);
    }
    let headings = ["NAME", "CONDITION", "MODE", "TOPICS", "TYPES", "LANES", "FLOOR", "HOLDS"];
    scope.output.table(&headings, subscriptions.iter().map(row).collect())?;
    for pause in subscriptions.iter().filter_map(paused) {
        scope.output.line(pause)?;
    }
    Ok(Exit::Done)
}

/// Who paused a subscription and why, where there is something to say.
fn paused(subscription: &SubscriptionStatus) -> Option<String> {
    let (name, by) = (&subscription.name, subscription.paused_by?.name());
    let reason = subscription.paused_reason.as_ref()?;
    Some(format!("{name}: paused by the {by}: {reason}"))
}

fn row(subscription: &SubscriptionStatus) -> Vec<String> {
    let all = |patterns: &[String]| if patterns.is_empty() { "*".to_owned() } else { patterns.join(",") };
    let mode = match subscription.mode {
        pillarbox::Mode::Stream => "stream",
        pillarbox::Mode::Queue => "queue",
    };
    vec![
        subscription.name.clone(),
        condition(subscription).to_owned(),
        mode.to_owned(),
        all(&subscription.filter.topics),
        all(&subscription.filter.types),
        subscription.lanes.to_string(),
        subscription.floor.to_string(),
        bytes(subscription.holds_bytes),
    ]
}

/// How a subscription stands, in a word or two.
pub(super) fn condition(subscription: &SubscriptionStatus) -> &'static str {
    let report = &subscription.report;
    match subscription {
        SubscriptionStatus { paused: true, .. } => "paused",
        // As after every clean stop of its last relay: nothing is kept for it.
        SubscriptionStatus { orphaned: true, holds_bytes: ..=0, .. } if subscription.undelivered() == 0 => "no relay",
        SubscriptionStatus { orphaned: true, .. } => "orphaned",
        _ if report.stopped.is_some() => "stopped",
        _ if report.breaker.is_some() => "sink down",
        _ => "running",
    }
}
