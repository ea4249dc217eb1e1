use std::process::Command;

use crate::Result;
use crate::database::connect;
use crate::peer;
use crate::process::Figures;

const PROGRAM: &str = include_str!("graphile.js");

/// An error says why it cannot be measured.
pub(crate) fn installed() -> Result<()> {
    let package = peer::folder()?.join("node_modules/graphile-worker/package.json");
    if package.exists() { Ok(()) } else { Err(format!("{} is not there", package.display()).into()) }
}

/// Makes its schema with the events as jobs in it.
pub(crate) async fn fill(url: &str, count: usize) -> Result<Figures> {
    run(url, 0)?;
    let client = connect(url).await?;
    let insert = "select count(*) from graphile_worker.add_jobs(array(
        select row('event', payload::json, null, null, null, null, null, null)::graphile_worker.job_spec
        from unnest($1::text[]) as payload))";
    peer::fill(&client, insert, "graphile_worker._private_jobs", count).await?;
    Ok(Figures::default().with("events", count as f64))
}

/// From the start of a worker with a local queue until its task, which does nothing, has had the last event. That it has not
/// deleted them all by then is to its advantage.
pub(crate) fn drain(url: &str, count: usize) -> Result<Figures> {
    let milliseconds: f64 = run(url, count)?.trim().parse()?;
    Ok(Figures::default().with("rate", count as f64 / milliseconds * 1e3))
}

/// What the program prints; with no event to wait for it only makes the schema.
fn run(url: &str, count: usize) -> Result<String> {
    let folder = peer::folder()?;
    let mut command = Command::new(folder.join("node_modules/.bin/node"));
    command.args(["--eval", PROGRAM, "--", url, &count.to_string()]).current_dir(&folder);
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("its worker failed ({})", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
