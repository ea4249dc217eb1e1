use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pillarbox::{Check, Level, Operator};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use super::Scope;
use crate::config::{Config, Loaded, SinkSettings};
use crate::exit::Exit;
use crate::output::{Output, Style};
use crate::sink::{self, ANY_SOURCE};

/// How long a receiver may take to answer. Whoever runs this is waiting.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// How many receivers are asked at once.
const ASKED_AT_ONCE_MAX: usize = 16;

/// Checks every premise and every receiver; each finding says how to mend it. What every other command would refuse is among
/// them.
pub(super) async fn run(scope: &Scope) -> Result<Exit> {
    let database = scope.database()?;
    let mut checks = database.open_unexamined().await?.doctor().await.map_err(|error| database.explain(error))?;
    let Loaded { config, problems, .. } = scope.load_config()?;
    checks.extend(problems.iter().map(|problem| Check {
        name: "config".to_owned(),
        level: Level::Failed,
        finding: problem.to_string(),
        fix: Some("change it; `pillarbox config check` says when all is well".to_owned()),
    }));
    checks.extend(ask_receivers(&scope.output, &config).await);
    print(&scope.output, &checks)?;
    let mut failed = checks.iter().filter(|check| check.level == Level::Failed);
    Ok(match failed.next() {
        None => Exit::Done,
        // As every other command ends that is refused for these.
        Some(check) if ["schema", "home"].contains(&check.name.as_str()) => Exit::Schema,
        Some(_) => Exit::Failed,
    })
}

fn print(output: &Output, checks: &[Check]) -> Result<()> {
    if output.json {
        return output.json(&checks);
    }
    for check in checks {
        let mark = match check.level {
            Level::Ok => output.paint(Style::Green, "ok     "),
            Level::Warning => output.paint(Style::Yellow, "warning"),
            Level::Failed => output.paint(Style::Red, "failed "),
        };
        output.line(format!("{mark}  {}: {}", check.name, check.finding))?;
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
    let mut asked = JoinSet::new();
    for (index, subscription) in config.subscriptions.iter().enumerate() {
        let (name, settings, turns) = (subscription.name.clone(), subscription.sink.clone(), turns.clone());
        asked.spawn(async move {
            let _turn = turns.acquire_owned().await;
            ask(&settings).await.map(|check| (index, Check { name: format!("sink of '{name}'"), ..check }))
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = asked.join_next().await {
        bar.inc(1);
        answers.extend(answer.ok().flatten());
    }
    bar.finish_and_clear();
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, check)| check).collect()
}

/// None: the sink cannot be built, which is a problem of the config and said there.
async fn ask(settings: &SinkSettings) -> Option<Check> {
    let sink = sink::build(settings, ANY_SOURCE, &Arc::new(Notify::new())).ok()?;
    let answer = tokio::time::timeout(ANSWER_TIME_MAX, sink.check()).await;
    let place = format!("{} {}", settings.kind.name, settings.destination());
    let place = place.trim_end();
    let failed = |message: &str, fix: &str| Check {
        name: String::new(),
        level: Level::Failed,
        finding: format!("{place}: {message}"),
        fix: Some(fix.to_owned()),
    };
    Some(match answer {
        Ok(Ok(())) => {
            Check { name: String::new(), level: Level::Ok, finding: format!("{place}: takes events"), fix: None }
        }
        Ok(Err(failure)) => failed(
            &failure.message,
            "make it reachable or change the sink, then run `pillarbox doctor` again; until then its events wait, and no \
             attempt is counted",
        ),
        Err(_) => failed(
            &format!("no answer within {} s", ANSWER_TIME_MAX.as_secs()),
            "see whether the address is right and whether a firewall drops the packets, then run `pillarbox doctor` again; \
             until then its events wait, and no attempt is counted",
        ),
    })
}
