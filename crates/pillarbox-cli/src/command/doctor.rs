use anyhow::Result;
use pillarbox::{Level, Operator};

use super::Scope;
use crate::exit::Exit;
use crate::output::Style;

/// Checks every premise; each finding says how to mend it. What every other command would refuse is among them.
pub(super) async fn run(scope: &Scope) -> Result<Exit> {
    let database = scope.database()?;
    let checks = database.open_unexamined().await?.doctor().await.map_err(|error| database.explain(error))?;
    let output = &scope.output;
    if output.json {
        output.json(&checks)?;
    } else {
        for check in &checks {
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
    }
    let mut failed = checks.iter().filter(|check| check.level == Level::Failed);
    Ok(match failed.next() {
        None => Exit::Done,
        // As every other command ends that is refused for these.
        Some(check) if ["schema", "home"].contains(&check.name.as_str()) => Exit::Schema,
        Some(_) => Exit::Failed,
    })
}
