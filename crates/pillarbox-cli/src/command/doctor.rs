use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pillarbox::Failure;
use pillarbox::admin::{Check, HealthLimits, Level, Operator, Problem, ProblemKind, Status, problems};
use tokio::sync::Semaphore;
use tokio::task::JoinError;

use super::Scope;
use crate::config::{Config, Loaded, SinkSettings};
use crate::exit::{Exit, chain};
use crate::output::{Output, Style};
use crate::sink::{self, Answer};

/// How long a receiver may take to answer, while the user waits.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// How many receivers are asked at once.
const ASKED_AT_ONCE_MAX: usize = 16;

/// Checks every prerequisite and every receiver; each finding says how to fix it. What every other command would refuse is among
/// them.
pub(super) async fn run(scope: &Scope) -> Result<Exit> {
    let database = scope.database()?;
    let log = database.open_unexamined().await?;
    let mut checks = log.doctor().await.map_err(|error| database.explain(error))?;
    // What the checks have refused may have no status.
    let paused = log.status().await.map(|status| paused_by_receiver(&status)).unwrap_or_default();
    match scope.load_config() {
        Ok(Loaded { config, mut problems, warnings, .. }) => {
            problems.extend(sink::into_the_log(&config, &database));
            checks.extend(warnings.into_iter().map(config_warning));
            checks.extend(problems.iter().map(|problem| wrong_config(problem.to_string())));
            let asked = ask_receivers(&scope.output, &config).await;
            checks.extend(asked.into_iter().map(|check| then_resume(check, &paused)));
        }
        // What was found until here is told all the same.
        Err(error) => checks.push(wrong_config(chain(&error))),
    }
    checks.extend(paused.into_iter().map(|(name, problem)| Check {
        name: format!("subscription '{name}'"),
        level: problem.level,
        finding: problem.message,
        fix: Some(problem.advice),
    }));
    print(&scope.output, &checks)?;
    scope.output.say_where_terms_are();
    let mut failed = checks.iter().filter(|check| check.level == Level::Failed);
    Ok(match failed.next() {
        None => Exit::Done,
        // As every other command ends that is refused for these.
        Some(check) if ["schema", "home"].contains(&check.name.as_str()) => Exit::Schema,
        Some(_) => Exit::Failed,
    })
}

/// The subscriptions that wait for an operator since their receivers accept no more events.
fn paused_by_receiver(status: &Status) -> Vec<(String, Problem)> {
    let is_meant = |problem: &Problem| problem.kind == ProblemKind::Paused && problem.level == Level::Failed;
    let found = problems(status, &HealthLimits::default()).into_iter().filter(is_meant);
    found.filter_map(|problem| Some((problem.subscription.clone()?, problem))).collect()
}

/// A subscription that its receiver has paused does not go on by itself when the receiver is well again.
fn then_resume(check: Check, paused: &[(String, Problem)]) -> Check {
    let is_meant = |(name, _): &&(String, Problem)| check.name == sink_of(name);
    match (paused.iter().find(is_meant), &check.fix) {
        (Some((name, _)), Some(fix)) => {
            let fix = format!("{fix}; its receiver has paused it, so run `pillarbox resume {name}` then");
            Check { fix: Some(fix), ..check }
        }
        _ => check,
    }
}

/// The name of what was found out about the receiver of a subscription.
fn sink_of(subscription: &str) -> String {
    format!("sink of '{subscription}'")
}

fn wrong_config(finding: String) -> Check {
    Check {
        name: "config".to_owned(),
        level: Level::Failed,
        finding,
        fix: Some("change it; `pillarbox config check` says when all is well".to_owned()),
    }
}

fn config_warning(finding: String) -> Check {
    Check { name: "config".to_owned(), level: Level::Warning, finding, fix: None }
}

fn print(output: &Output, checks: &[Check]) -> Result<()> {
    if output.json {
        return output.json(&checks);
    }
    for check in checks {
        let mark = match check.level {
            Level::Ok => (Style::Green, "ok     "),
            Level::Warning => (Style::Yellow, "warning"),
            Level::Failed => (Style::Red, "failed "),
        };
        output.styled(mark.0, mark.1, &format!("  {}: {}", check.name, check.finding))?;
        if let Some(fix) = &check.fix {
            output.line(format!("         fix: {fix}"))?;
        }
    }
    Ok(())
}

/// Asks the receiver of every subscription whether it would take events; none is delivered.
async fn ask_receivers(output: &Output, config: &Config) -> Vec<Check> {
    let bar = output.progress(Some(config.subscriptions.len() as u64), "asking receivers");
    let turns = Arc::new(Semaphore::new(ASKED_AT_ONCE_MAX));
    let ask_in_turn = |settings: &SinkSettings| {
        let (settings, turns) = (settings.clone(), turns.clone());
        tokio::spawn(async move {
            let _turn = turns.acquire_owned().await;
            ask(&settings).await
        })
    };
    let asked: Vec<_> = config.subscriptions.iter().map(|one| (one, ask_in_turn(&one.sink))).collect();
    let mut checks = Vec::new();
    for (subscription, answer) in asked {
        let check = unless_panicked(&place_of(&subscription.sink), answer.await);
        let name = sink_of(&subscription.name);
        checks.extend(check.map(|check| Check { name, ..check }));
        bar.inc(1);
    }
    bar.finish_and_clear();
    checks
}

/// None: the sink cannot be built, which is a problem of the config and said there.
async fn ask(settings: &SinkSettings) -> Option<Check> {
    let place = place_of(settings);
    let answer = tokio::time::timeout(ANSWER_TIME_MAX, sink::ask(settings)).await;
    Some(match answer {
        Ok(answer) => judge(&place, answer.ok()?),
        Err(_) => failed(
            &place,
            &format!("no answer within {} s", ANSWER_TIME_MAX.as_secs()),
            "see whether the address is right and whether a firewall drops the packets, then run `pillarbox doctor` again; \
             until then its events wait, and no attempt is counted",
        ),
    })
}

/// Where a sink delivers to, with its kind.
fn place_of(settings: &SinkSettings) -> String {
    format!("{} {}", settings.kind.name, settings.destination()).trim_end().to_owned()
}

fn judge(place: &str, answer: Result<Answer, Failure>) -> Check {
    let finding = match answer {
        Ok(Answer::Takes) => "takes events".to_owned(),
        Ok(Answer::Status(status)) => {
            format!("answers ({status} to OPTIONS); whether it takes events is not known")
        }
        Err(failure) => {
            return failed(
                place,
                &failure.message,
                "make it reachable or change the sink, then run `pillarbox doctor` again; until then its events wait, and no \
                 attempt is counted",
            );
        }
    };
    Check { name: String::new(), level: Level::Ok, finding: format!("{place}: {finding}"), fix: None }
}

/// A receiver that could not be asked is not one that is well. What a panic says may contain anything, and is not repeated.
fn unless_panicked(place: &str, answer: Result<Option<Check>, JoinError>) -> Option<Check> {
    answer.unwrap_or_else(|_| {
        let fix = "this is a mistake in the sink; report it with what was said on standard error";
        Some(failed(place, "the sink panicked when it was asked", fix))
    })
}

fn failed(place: &str, message: &str, fix: &str) -> Check {
    Check {
        name: String::new(),
        level: Level::Failed,
        finding: format!("{place}: {message}"),
        fix: Some(fix.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_that_paused_its_subscription_needs_a_resume() {
        let problem = Problem {
            subscription: Some("hook".to_owned()),
            kind: ProblemKind::Paused,
            level: Level::Failed,
            message: String::new(),
            advice: String::new(),
        };
        let paused = [("hook".to_owned(), problem)];
        let fix_of = |name: &str| {
            let check = Check { name: sink_of(name), ..failed("http https://h/…", "410 Gone", "make it reachable") };
            then_resume(check, &paused).fix.unwrap()
        };
        assert!(fix_of("hook").starts_with("make it reachable; ") && fix_of("hook").contains("pillarbox resume hook"));
        assert_eq!(fix_of("other"), "make it reachable");
    }

    #[tokio::test]
    async fn a_sink_that_panics_is_a_finding() {
        let answer = tokio::spawn(async { panic!("canary") }).await;
        let check = unless_panicked("http https://h/…", answer).unwrap();
        assert_eq!(check.level, Level::Failed);
        assert_eq!(check.finding, "http https://h/…: the sink panicked when it was asked");
        assert!(unless_panicked("", Ok(None)).is_none());
    }
}
