use anyhow::Result;
use pillarbox::admin::snapshot::unknown_subscription;
use pillarbox::admin::{Fate, Why, why};
use serde_json::{Value, json};

use super::Scope;
use super::show::{find, print_delivery, why_json};
use crate::args::WhyArgs;
use crate::exit::Exit;
use crate::output::Style;

/// Says for each subscription why an event has or has not been delivered.
pub(super) async fn run(scope: &Scope, args: &WhyArgs) -> Result<Exit> {
    let (record, status) = find(scope, args.id).await?;
    let wanted = |name: &str| args.subscription.as_deref().is_none_or(|only| only == name);
    let answers: Vec<(&Fate, Why)> = record
        .subscriptions
        .iter()
        .filter(|fate| wanted(&fate.subscription))
        .map(|fate| (fate, why(&record, fate, &status)))
        .collect();
    if let (Some(name), true) = (&args.subscription, answers.is_empty()) {
        return Err(
            unknown_subscription(name, record.subscriptions.iter().map(|fate| fate.subscription.as_str())).into()
        );
    }
    if scope.output.json {
        let subscriptions: Vec<Value> =
            answers.iter().map(|(fate, why)| answer_json(fate, why)).collect::<Result<_>>()?;
        let event = &record.event;
        scope.output.json(&json!({ "id": event.id, "position": event.position, "subscriptions": subscriptions }))?;
        return Ok(Exit::Done);
    }
    if answers.is_empty() {
        scope.output.line("no subscription has been made yet; a relay makes those of its config when it starts")?;
    }
    for (fate, answer) in &answers {
        let rest = format!(": {}: {}", answer.cause.name(), answer.message);
        scope.output.styled(Style::Bold, &answer.subscription, &rest)?;
        let detail = answer.detail.as_ref().filter(|_| scope.verbose);
        for more in [&answer.advice, &detail.cloned()].into_iter().flatten() {
            scope.output.line(format!("  {more}"))?;
        }
        if let Some(delivery) = &fate.delivery {
            print_delivery(&scope.output, delivery)?;
        }
    }
    scope.output.say_where_terms_are();
    Ok(Exit::Done)
}

/// The answer with what is known of the delivery: state, owner, next attempt, last errors.
fn answer_json(fate: &Fate, why: &Why) -> Result<Value> {
    let mut answer = why_json(why);
    answer["delivery"] = serde_json::to_value(&fate.delivery)?;
    Ok(answer)
}
