use anyhow::Result;
use pillarbox::{Why, why};
use serde_json::{Value, json};

use super::Scope;
use super::show::{find, why_json};
use crate::args::WhyArgs;
use crate::exit::{Exit, Stop};
use crate::output::Style;

/// Says for each subscription why an event has or has not been delivered.
pub(super) async fn run(scope: &Scope, args: &WhyArgs) -> Result<Exit> {
    let (record, status) = find(scope, args.id).await?;
    let wanted = |name: &str| args.subscription.as_deref().is_none_or(|only| only == name);
    let answers: Vec<Why> = record
        .subscriptions
        .iter()
        .filter(|fate| wanted(&fate.subscription))
        .map(|fate| why(&record, fate, &status))
        .collect();
    if let (Some(name), true) = (&args.subscription, answers.is_empty()) {
        return Err(Stop::with(
            Exit::Failed,
            format!("there is no subscription '{name}'; see `pillarbox subscription list`"),
        ));
    }
    if scope.output.json {
        let subscriptions: Vec<Value> = answers.iter().map(why_json).collect();
        let event = &record.event;
        scope.output.json(&json!({ "id": event.id, "position": event.position, "subscriptions": subscriptions }))?;
        return Ok(Exit::Done);
    }
    if answers.is_empty() {
        scope.output.line("no subscription has been made yet; a relay makes those of its config when it starts")?;
    }
    for answer in &answers {
        let name = scope.output.paint(Style::Bold, &answer.subscription);
        scope.output.line(format!("{name}: {}: {}", answer.cause.name(), answer.message))?;
        if let Some(advice) = &answer.advice {
            scope.output.line(format!("  {advice}"))?;
        }
    }
    Ok(Exit::Done)
}
