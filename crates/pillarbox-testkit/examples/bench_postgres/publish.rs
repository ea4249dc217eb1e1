use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio_postgres::Statement;
use uuid::Uuid;

use crate::Result;
use crate::database::{BARE_COLUMNS, connect, migrated, payload};
use crate::drain;
use crate::process::{CHILD, Figures};

/// The process that runs the relay meanwhile.
pub(crate) const RELAY: &str = "publish_relay";

/// The process that runs the plain reader meanwhile.
pub(crate) const READER: &str = "publish_reader";

/// How long the plain reader waits when there is nothing: as long as an awake relay.
const READER_PAUSE: Duration = Duration::from_millis(10);

/// How long one kind publishes before the next has its turn.
const TURN: Duration = Duration::from_millis(500);

const VALUES: &str = "values ($1, 'orders', $2, 'order.placed', $3::text::json, '{}', clock_timestamp())";

/// How many ways to publish there are.
const KINDS: usize = 5;

/// The ways to publish, and the statement of each.
fn kinds() -> [(&'static str, String); KINDS] {
    let columns = "(id, topic, key, type, payload, headers, created_at)";
    let function = "select pillarbox.publish(topic => 'orders', type => 'order.placed', payload => $3::text::jsonb, \
                    key => $2, id => $1)";
    [
        ("bare", format!("insert into bare {columns} {VALUES}")),
        ("watched", format!("insert into watched {columns} {VALUES}")),
        ("insert", format!("insert into pillarbox.event {columns} {VALUES}")),
        ("function", function.into()),
        ("notify", format!("insert into ringing {columns} {VALUES}")),
    ]
}

/// Who reads meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// A relay in another process delivers what is Pillarbox's, and a plain reader reads what is `watched`.
    Both,
    /// Nobody.
    Nobody,
}

/// One event a transaction from `connections` at once, each kind in short turns.
pub(crate) async fn compare(url: &str, connections: usize, seconds: usize, reads: Reads) -> Result<Figures> {
    let client = migrated(url).await?;
    client
        .batch_execute(&format!(
            "create table bare {BARE_COLUMNS}; create index on bare (id);
        create table watched {BARE_COLUMNS}; create index on watched (id);
        create table ringing {BARE_COLUMNS}; create index on ringing (id);
        create function ring() returns trigger language plpgsql as
            $$ begin perform pg_notify('bare', ''); return null; end $$;
        create trigger ring after insert on ringing for each statement execute function ring()"
        ))
        .await?;
    let listening = connect(url).await?;
    listening.batch_execute("listen bare").await?;
    let mut readers = Vec::new();
    for name in [RELAY, READER].into_iter().filter(|_| reads == Reads::Both) {
        readers.push(beside(name, url).await?);
    }
    let kinds = kinds();
    let mut workers = Vec::new();
    for _ in 0..connections {
        let client = connect(url).await?;
        let mut statements: Vec<Statement> = Vec::new();
        for (_, sql) in &kinds {
            statements.push(client.prepare(sql).await?);
        }
        workers.push(Arc::new((client, statements)));
    }
    let mut done = [0_u64; KINDS];
    let mut spent = [Duration::ZERO; KINDS];
    let turns = seconds * 1000 / TURN.as_millis() as usize;
    for turn in 0..turns {
        // Each turn begins with another kind.
        for kind in (0..kinds.len()).map(|index| (index + turn) % kinds.len()) {
            let (count, elapsed) = one_turn(&workers, kind).await?;
            done[kind] += count;
            spent[kind] += elapsed;
        }
    }
    let figures = kinds.iter().enumerate().fold(Figures::default(), |figures, (kind, (name, _))| {
        figures.with(name, done[kind] as f64 / spent[kind].as_secs_f64())
    });
    Ok(figures)
}

/// A process of this program that works beside the publishers until it is dropped; comes back when it is ready.
async fn beside(name: &str, url: &str) -> Result<tokio::process::Child> {
    let mut child = tokio::process::Command::new(std::env::current_exe()?)
        .args([CHILD, name, url, "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("it has no output")?).lines();
    lines.next_line().await?.ok_or_else(|| format!("{name} did not start"))?;
    Ok(child)
}

async fn one_turn(workers: &[Arc<(tokio_postgres::Client, Vec<Statement>)>], kind: usize) -> Result<(u64, Duration)> {
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for worker in workers {
        let (worker, stop, count) = (worker.clone(), stop.clone(), count.clone());
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let number = count.fetch_add(1, Ordering::Relaxed) as usize;
                let (key, payload) = (format!("order-{}", number % 1000), payload(number));
                worker.0.execute(&worker.1[kind], &[&Uuid::now_v7(), &key, &payload]).await?;
            }
            Ok::<_, tokio_postgres::Error>(())
        });
    }
    tokio::time::sleep(TURN).await;
    stop.store(true, Ordering::Relaxed);
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    Ok((count.load(Ordering::Relaxed), started.elapsed()))
}

/// A relay with a handler that does nothing, until its input ends.
pub(crate) async fn relay(url: &str) -> Result<()> {
    let handler = |_event| std::future::ready(Ok(()));
    let store = PostgresStore::open(url).await?;
    let relay = Relay::builder(store).handle(Subscription::new("publish"), handler).start().await?;
    relay.until_idle().await?;
    println!("ready");
    Err(relay.failed().await.into())
}

/// A plain reader of the table `watched`: a page after the other, and a short wait when there is nothing.
pub(crate) async fn read(url: &str) -> Result<()> {
    let client = connect(url).await?;
    let statement = client.prepare(&drain::page_of("watched")).await?;
    println!("ready");
    let mut after = 0_i64;
    loop {
        match drain::read_page(&client, &statement, after).await?.last() {
            Some(last) => after = last.position,
            None => tokio::time::sleep(READER_PAUSE).await,
        }
    }
}
