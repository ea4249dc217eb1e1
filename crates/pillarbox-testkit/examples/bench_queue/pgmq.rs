use std::path::PathBuf;

use crate::Result;
use crate::database::connect;
use crate::peer::{self, Consumer, WORKERS};
use crate::process::Figures;

/// The SQL of the package, which makes the schema.
fn sql_file() -> Result<PathBuf> {
    Ok(peer::folder()?.join("pgmq/pgmq/sql/pgmq.sql"))
}

/// An error says why it cannot be measured.
pub(crate) fn installed() -> Result<()> {
    let file = sql_file()?;
    if file.exists() { Ok(()) } else { Err(format!("{} is not there", file.display()).into()) }
}

/// Makes a queue with the events in it.
pub(crate) async fn fill(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    client.batch_execute("create schema if not exists pgmq").await?;
    client.batch_execute(&std::fs::read_to_string(sql_file()?)?).await?;
    client.batch_execute("select pgmq.create('events')").await?;
    let insert = "select count(*) from pgmq.send_batch('events',
        array(select payload::jsonb from unnest($1::text[]) as payload))";
    peer::fill(&client, insert, "pgmq.q_events", count).await?;
    Ok(Figures::default().with("events", count as f64))
}

/// Reads with a visibility time-out of 30 s, does nothing, deletes.
pub(crate) async fn drain(url: &str, count: usize) -> Result<Figures> {
    let consumer = Consumer {
        take: "select msg_id, message::text from pgmq.read('events', 30, 100)",
        delete: "select count(*) from pgmq.delete('events', $1::bigint[])",
        in_transaction: false,
        handler: None,
        workers: WORKERS,
    };
    let elapsed = consumer.drain(url, count).await?;
    Ok(Figures::default().with("rate", count as f64 / elapsed.as_secs_f64()))
}
