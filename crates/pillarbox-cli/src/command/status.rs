use anyhow::Result;
use pillarbox::admin::{
    HealthLimits, InstanceStatus, Level, LogStatus, Operator, Problem, Status, SubscriptionStatus, is_unhealthy,
    problems,
};
use pillarbox::{Mode, counted};
use serde_json::Value;

use super::Scope;
use super::subscription::condition;
use crate::args::StatusArgs;
use crate::exit::{Exit, Stop};
use crate::output::{Output, Style, age, bytes};

/// What `status --json` prints: the status with what is wrong, whether that is unhealthy, and each subscription's condition.
fn status_json(status: &Status, problems: &[Problem]) -> Result<Value> {
    let mut shown = serde_json::to_value(status)?;
    shown["problems"] = serde_json::to_value(problems)?;
    shown["healthy"] = (!is_unhealthy(problems)).into();
    let conditions = status.subscriptions.iter().map(condition);
    let subscriptions = shown["subscriptions"].as_array_mut().into_iter().flatten();
    subscriptions.zip(conditions).for_each(|(one, condition)| one["condition"] = condition.into());
    Ok(shown)
}

/// Shows the log, its subscriptions and instances, and what is wrong.
pub(super) async fn run(scope: &Scope, args: &StatusArgs) -> Result<Exit> {
    let status = scope.open().await?.status().await?;
    let problems = problems(&status, &HealthLimits::default());
    if scope.output.json {
        scope.output.json(&status_json(&status, &problems)?)?;
    } else {
        print(&scope.output, &status, &problems)?;
    }
    let serious = || problems.iter().filter(|problem| problem.level == Level::Failed);
    let told: Vec<String> = serious().map(sentence).collect();
    if args.check && !told.is_empty() {
        let advice: Vec<&str> =
            serious().map(|problem| problem.advice.as_str()).filter(|advice| !advice.is_empty()).collect();
        return Err(Stop::with_fix(Exit::Unhealthy, format!("unhealthy: {}", told.join("; ")), advice.join("; ")));
    }
    Ok(Exit::Done)
}

/// A problem in one sentence.
pub(crate) fn sentence(problem: &Problem) -> String {
    let Problem { message, advice, .. } = problem;
    let advice = if advice.is_empty() { String::new() } else { format!(" ({advice})") };
    match &problem.subscription {
        Some(name) => format!("subscription '{name}': {message}{advice}"),
        None => format!("{message}{advice}"),
    }
}

fn print(output: &Output, status: &Status, problems: &[Problem]) -> Result<()> {
    let LogStatus { log_id, incarnation, log_start, horizon, events, .. } = &status.log;
    let (events, size) = (counted(*events, "event"), bytes(status.log.bytes));
    let positions = match horizon < log_start {
        true => format!("no positions in use (the next one is {log_start})"),
        false => format!("positions {log_start} to {horizon}"),
    };
    output.line(format!("log {log_id}, incarnation {incarnation}: {events}, {positions}, {size}"))?;
    output.line("")?;
    let headings = [
        "SUBSCRIPTION",
        "CONDITION",
        "PENDING",
        "DELAYED",
        "PROCESSING",
        "RETRYING",
        "BLOCKED",
        "DEAD",
        "OLDEST",
        "LAG",
        "OWNERS",
        "DEFINITION",
    ];
    output.table(&headings, status.subscriptions.iter().map(|one| subscription(one, status)).collect())?;
    output.line("")?;
    print_queues(output, status)?;
    if status.instances.is_empty() {
        output.line("no instance is running")?;
    } else {
        let rows = status.instances.iter().map(|one| instance(one, status)).collect();
        output.table(&["INSTANCE", "HOST", "PID", "VERSION", "LANES", "UP", "BEAT", "ALIVE"], rows)?;
    }
    for disagreement in disagreements(status) {
        output.styled(Style::Yellow, &disagreement, "")?;
    }
    if !problems.is_empty() {
        output.line("")?;
    }
    for problem in problems {
        let style = if problem.level == Level::Failed { Style::Red } else { Style::Yellow };
        output.styled(style, &sentence(problem), "")?;
    }
    output.say_where_terms_are();
    Ok(())
}

/// Who does not run what the database or its own configuration says.
fn disagreements(status: &Status) -> Vec<String> {
    let mut said = Vec::new();
    for instance in status.instances.iter().filter(|instance| instance.alive) {
        for (name, report) in &instance.report.subscriptions {
            let Some(newest) = status.subscriptions.iter().find(|one| one.name == *name).map(|one| one.definition)
            else {
                continue;
            };
            let (id, runs) = (instance.id.0, report.definition);
            if runs > 0 && runs < newest {
                said.push(format!("instance {id} still runs definition {runs} of '{name}'; the newest is {newest}"));
            } else if report.differs {
                said.push(format!(
                    "instance {id} runs definition {runs} of '{name}', which another relay brought; its own configuration differs"
                ));
            }
        }
    }
    said
}

/// What is worked on in the queues, and what was taken back from whom.
fn print_queues(output: &Output, status: &Status) -> Result<()> {
    let queues: Vec<&SubscriptionStatus> =
        status.subscriptions.iter().filter(|subscription| subscription.mode == Mode::Queue).collect();
    if queues.is_empty() {
        return Ok(());
    }
    let rows = queues.iter().map(|one| queue(one, status)).collect();
    output.table(&["QUEUE", "PROCESSING", "OLDEST", "RECOVERED", "BY CAUSE", "LAST"], rows)?;
    output.line(match status.log.recovery_at {
        Some(at) => format!("recovery last looked {} ago", age(status.at.since(at).as_secs_f64())),
        None => "recovery has not looked yet".to_owned(),
    })?;
    output.line("")
}

fn queue(one: &SubscriptionStatus, status: &Status) -> Vec<String> {
    let causes: Vec<String> = one.recovered.iter().map(|by| format!("{} {}", by.cause.name(), by.count)).collect();
    let last = one.recovered.iter().map(|by| by.last_at).max();
    vec![
        one.name.clone(),
        one.processing.to_string(),
        one.oldest_processing_seconds.map_or_else(|| "-".to_owned(), age),
        one.recovered.iter().map(|by| by.count).sum::<u64>().to_string(),
        if causes.is_empty() { "-".to_owned() } else { causes.join(", ") },
        last.map_or_else(|| "-".to_owned(), |at| format!("{} ago", age(status.at.since(at).as_secs_f64()))),
    ]
}

/// The number of a subscription's definition, and that of each relay which runs another one.
fn definition(one: &SubscriptionStatus, status: &Status) -> String {
    let other = |instance: &InstanceStatus| {
        let runs = instance.report.subscriptions.get(&one.name).filter(|_| instance.alive)?.definition;
        (runs > 0 && runs != one.definition).then(|| format!("instance {}: {runs}", instance.id.0))
    };
    let others: Vec<String> = status.instances.iter().filter_map(other).collect();
    if others.is_empty() { one.definition.to_string() } else { format!("{} ({})", one.definition, others.join(", ")) }
}

fn subscription(one: &SubscriptionStatus, status: &Status) -> Vec<String> {
    let owners: Vec<String> = one.owners.iter().map(|owner| owner.0.to_string()).collect();
    vec![
        one.name.clone(),
        condition(one).to_owned(),
        one.pending.to_string(),
        one.delayed.to_string(),
        one.processing.to_string(),
        one.retrying.to_string(),
        one.blocked.to_string(),
        one.dead.to_string(),
        one.oldest_age_seconds.map_or_else(|| "-".to_owned(), age),
        one.lag.to_string(),
        if owners.is_empty() { "-".to_owned() } else { owners.join(",") },
        definition(one, status),
    ]
}

fn instance(one: &InstanceStatus, status: &Status) -> Vec<String> {
    let ago = |time| age(status.at.since(time).as_secs_f64());
    vec![
        one.id.0.to_string(),
        one.host.clone(),
        one.pid.to_string(),
        one.version.clone(),
        one.lanes.to_string(),
        ago(one.started_at),
        format!("{} ago", ago(one.beat_at)),
        if one.alive { "yes" } else { "no" }.to_owned(),
    ]
}
