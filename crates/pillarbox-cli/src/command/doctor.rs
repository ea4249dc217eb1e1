use anyhow::Result;
use pillarbox::{Level, Operator};

use super::Scope;
use crate::exit::Exit;
use crate::output::Style;

/// Checks every premise; each finding says how to mend it.
pub(super) async fn run(scope: &Scope) -> Result<Exit> {
    let checks = scope.open().await?.doctor().await?;
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
    let failed = checks.iter().any(|check| check.level == Level::Failed);
    Ok(if failed { Exit::Failed } else { Exit::Done })
}
