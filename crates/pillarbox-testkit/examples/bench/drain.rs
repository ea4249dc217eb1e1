use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pillarbox::{Relay, Subscription};
use pillarbox_sqlite::SqliteStore;
use rusqlite::Connection;
use uuid::Uuid;

use crate::Result;
use crate::process::{Figures, peak_mib};

/// What the engine reads at once by default; the plain scan does the same.
const PAGE_SIZE: i64 = 2_000;
const LANES: u32 = 8;

/// A relay with a handler that does nothing, from its start until all is delivered and settled.
pub(crate) fn pillarbox(path: &Path, count: usize) -> Result<Figures> {
    let runtime = tokio::runtime::Runtime::new()?;
    let handled = Arc::new(AtomicUsize::new(0));
    let seen = handled.clone();
    let handler = move |_event| {
        seen.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok(()))
    };
    // A subscription of its own each time, so that every round reads the whole log.
    let name = format!("drain-{}", Uuid::now_v7());
    let store = SqliteStore::open(path)?;
    let elapsed = runtime.block_on(async {
        let started = Instant::now();
        let subscription = Subscription { lanes: LANES, ..Subscription::new(name) };
        let relay = Relay::builder(store).handle(subscription, handler).start().await?;
        relay.until_idle().await?;
        let elapsed = started.elapsed();
        relay.drain().await?;
        Ok::<_, pillarbox::Error>(elapsed)
    })?;
    let handled = handled.load(Ordering::Relaxed);
    if handled != count {
        return Err(format!("{handled} events were handled instead of {count}").into());
    }
    Ok(Figures::default().with("rate", count as f64 / elapsed.as_secs_f64()).with("peak_mib", peak_mib()?))
}

/// The columns of an event as plain Rust values.
#[allow(dead_code, reason = "the scan makes them, nobody reads them")]
struct Plain {
    position: i64,
    id: String,
    topic: String,
    key: Option<String>,
    r#type: String,
    payload: Option<String>,
    content_type: Option<String>,
    headers: String,
    stream_version: Option<i64>,
    deliver_at: Option<i64>,
    created_at: i64,
}

/// A plain keyset scan of the same table that makes a Rust value of each row.
pub(crate) fn bare(path: &Path, count: usize) -> Result<Figures> {
    let connection = Connection::open(path)?;
    let sql = "select position, id, topic, key, type, payload, content_type, headers, stream_version, deliver_at, \
               created_at from pillarbox_event where position > ?1 order by position limit ?2";
    let started = Instant::now();
    let mut statement = connection.prepare(sql)?;
    let (mut after, mut seen) = (0, 0);
    loop {
        let rows = statement.query_map([after, PAGE_SIZE], |row| {
            Ok(Plain {
                position: row.get(0)?,
                id: row.get(1)?,
                topic: row.get(2)?,
                key: row.get(3)?,
                r#type: row.get(4)?,
                payload: row.get(5)?,
                content_type: row.get(6)?,
                headers: row.get(7)?,
                stream_version: row.get(8)?,
                deliver_at: row.get(9)?,
                created_at: row.get(10)?,
            })
        })?;
        let page = black_box(rows.collect::<rusqlite::Result<Vec<Plain>>>()?);
        let Some(last) = page.last() else { break };
        after = last.position;
        seen += page.len();
    }
    let elapsed = started.elapsed();
    if seen != count {
        return Err(format!("{seen} events were scanned instead of {count}").into());
    }
    Ok(Figures::default().with("rate", count as f64 / elapsed.as_secs_f64()).with("peak_mib", peak_mib()?))
}
