use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::runtime::Runtime;
use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::Result;
use crate::database::{TOPICS, connect, migrated, wal_bytes};
use crate::process::{Figures, peak_mib};

/// What the engine reads at once by default; the plain scan does the same.
const PAGE_SIZE: i64 = 2_000;
const LANES: u32 = 8;

/// One subscription of all events with a handler that does nothing, from the relay's start until all is delivered and settled.
pub(crate) async fn one(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let before = wal_bytes(&client).await?;
    let subscription = Subscription { lanes: LANES, ..Subscription::new(format!("drain-{}", Uuid::now_v7())) };
    let updates = updates(&client).await?;
    let elapsed = drain(url, vec![subscription], count).await?;
    let after = wal_bytes(&client).await?;
    let after_updates = self::updates(&client).await?;
    let hot = (after_updates.1 - updates.1) / (after_updates.0 - updates.0).max(1.0);
    let dead = dead_rows(&client, count).await?;
    Ok(Figures::default()
        .with("rate", count as f64 / elapsed.as_secs_f64())
        .with("wal", (after - before) / count as f64)
        .with("dead_rows", dead)
        .with("not_hot_percent", (1.0 - hot) * 100.0)
        .with("peak_mib", peak_mib()?))
}

/// A publisher's transaction that was there before every event and does not end: all that is drained lies above its hole.
pub(crate) struct Hole {
    _holder: Client,
    /// Keeps the connection going.
    _runtime: Runtime,
}

impl Hole {
    /// Makes the log and opens the transaction.
    pub(crate) fn open(url: &str) -> Result<Hole> {
        let runtime = Runtime::new()?;
        let holder = runtime.block_on(async {
            let holder = migrated(url).await?;
            holder.batch_execute("begin; insert into pillarbox.event (topic, type) values ('never', 'y')").await?;
            Result::Ok(holder)
        })?;
        Ok(Hole { _holder: holder, _runtime: runtime })
    }
}

/// Ten subscriptions, one a topic.
pub(crate) async fn ten(url: &str, count: usize) -> Result<Figures> {
    let name = Uuid::now_v7();
    let subscription = |topic| {
        let name = format!("drain-{name}-{topic}");
        Subscription { lanes: LANES, ..Subscription::new(name) }.topics([format!("orders{topic}")])
    };
    let elapsed = drain(url, (0..TOPICS).map(subscription).collect(), count).await?;
    Ok(Figures::default().with("rate", count as f64 / elapsed.as_secs_f64()))
}

async fn drain(url: &str, subscriptions: Vec<Subscription>, count: usize) -> Result<Duration> {
    let handled = Arc::new(AtomicUsize::new(0));
    let store = PostgresStore::open(url).await?;
    let started = Instant::now();
    let mut builder = Relay::builder(store);
    for subscription in subscriptions {
        let seen = handled.clone();
        builder = builder.handle(subscription, move |_event| {
            seen.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok(()))
        });
    }
    let relay = builder.start().await?;
    relay.until_idle().await?;
    let elapsed = started.elapsed();
    relay.drain().await?;
    let handled = handled.load(Ordering::Relaxed);
    if handled != count {
        return Err(format!("{handled} events were handled instead of {count}").into());
    }
    Ok(elapsed)
}

/// The updates of cursors so far, and how many of them were HOT.
async fn updates(client: &tokio_postgres::Client) -> Result<(f64, f64)> {
    client.execute("select pg_stat_clear_snapshot()", &[]).await?;
    let sql = "select n_tup_upd::float8, n_tup_hot_upd::float8 from pg_stat_user_tables
        where schemaname = 'pillarbox' and relname = 'cursor'";
    let row = client.query_one(sql, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

/// The dead rows of the log beyond those of inserts that were rolled back.
async fn dead_rows(client: &tokio_postgres::Client, count: usize) -> Result<f64> {
    let sql = "select coalesce(sum(s.n_dead_tup), 0)::float8, coalesce(sum(s.n_tup_ins), 0)::float8
        from pillarbox.leaf as l join pg_stat_user_tables as s on s.schemaname = 'pillarbox' and s.relname = l.name";
    let row = client.query_one(sql, &[]).await?;
    let aborted = row.get::<_, f64>(1) - count as f64;
    Ok((row.get::<_, f64>(0) - aborted.max(0.0)).max(0.0))
}

/// JSON as its text, as a program that passes it on would take it.
#[allow(dead_code, reason = "the scan makes it, nobody reads it")]
struct Text(String);

impl<'a> FromSql<'a> for Text {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> std::result::Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        let raw = if *ty == Type::JSONB { &raw[1..] } else { raw };
        Ok(Text(std::str::from_utf8(raw)?.to_owned()))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON || *ty == Type::JSONB
    }
}

/// The columns of an event as plain Rust values.
#[allow(dead_code, reason = "the scan makes them, nobody reads them")]
pub(crate) struct Plain {
    pub(crate) position: i64,
    id: Option<Uuid>,
    topic: String,
    key: Option<String>,
    r#type: String,
    payload: Option<Text>,
    payload_bytes: Option<Vec<u8>>,
    content_type: Option<String>,
    headers: Option<Text>,
    stream_version: Option<i64>,
    deliver_at: Option<SystemTime>,
    created_at: SystemTime,
}

/// The statement that reads a page of a table.
pub(crate) fn page_of(table: &str) -> String {
    format!(
        "select position, id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version, deliver_at, \
         created_at from {table} where position > $1 order by position limit $2"
    )
}

/// A page after a position, a Rust value of each row.
pub(crate) async fn read_page(client: &Client, statement: &Statement, after: i64) -> Result<Vec<Plain>> {
    let rows = client.query(statement, &[&after, &PAGE_SIZE]).await?;
    Ok(black_box(rows.iter().map(plain).collect()))
}

/// A plain keyset-paged read of the same table that makes a Rust value of each row.
pub(crate) async fn bare(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let started = Instant::now();
    let statement = client.prepare(&page_of("pillarbox.event")).await?;
    let (mut after, mut seen) = (0_i64, 0);
    loop {
        let page = read_page(&client, &statement, after).await?;
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

fn plain(row: &tokio_postgres::Row) -> Plain {
    Plain {
        position: row.get(0),
        id: row.get(1),
        topic: row.get(2),
        key: row.get(3),
        r#type: row.get(4),
        payload: row.get(5),
        payload_bytes: row.get(6),
        content_type: row.get(7),
        headers: row.get(8),
        stream_version: row.get(9),
        deliver_at: row.get(10),
        created_at: row.get(11),
    }
}
