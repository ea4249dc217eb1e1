use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use super::kind::Kind;
use super::situation::Situation;
use crate::Result;
use crate::database::{connect, fill_more};
use crate::drain;
use crate::process::CHILD;
use crate::slow::Slow;

/// The process that runs a relay meanwhile.
pub(crate) const RELAY: &str = "publish_relay";

/// The process that runs a relay that is far behind.
pub(crate) const SLOW_RELAY: &str = "publish_slow_relay";

/// The process that runs the plain reader meanwhile.
pub(crate) const READER: &str = "publish_reader";

/// How long the plain reader waits when there is nothing: as long as an awake relay.
const READER_PAUSE: Duration = Duration::from_millis(10);

/// How many events a relay is behind at first. Together with [`SLOW_WORKERS`] and [`SLOW_BATCH_SIZE`] more than it delivers meanwhile.
const BACKLOG_EVENTS: usize = 200_000;

/// How many batches a relay with a backlog has under way. Each takes 50 ms: it delivers at most 8,000 events a second.
const SLOW_WORKERS: usize = 16;

/// How many events a batch of a relay with a backlog has.
const SLOW_BATCH_SIZE: usize = 25;

/// What works beside the publishers until it is dropped.
pub(super) struct Beside {
    _processes: Vec<Child>,
    _listener: Option<Client>,
}

impl Beside {
    /// Starts what a situation and its kinds need; comes back when all of it is ready.
    pub(super) async fn start(situation: Situation, kinds: &[Kind], url: &str) -> Result<Beside> {
        if situation == Situation::Backlog {
            fill_more(url, BACKLOG_EVENTS).await?;
        }
        let relay = match situation {
            Situation::Alone | Situation::Batch => None,
            Situation::Asleep | Situation::Awake => Some(RELAY),
            Situation::Backlog => Some(SLOW_RELAY),
        };
        let reader = kinds.contains(&Kind::Watched).then_some(READER);
        let mut processes = Vec::new();
        for name in [relay, reader].into_iter().flatten() {
            processes.push(spawn(name, url).await?);
        }
        let listener = if kinds.contains(&Kind::Ringing) { Some(listen(url).await?) } else { None };
        Ok(Beside { _processes: processes, _listener: listener })
    }
}

/// A process of this program; comes back when it is ready.
async fn spawn(name: &str, url: &str) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .args([CHILD, name, url, "0"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("it has no output")?).lines();
    lines.next_line().await?.ok_or_else(|| format!("{name} did not start"))?;
    Ok(child)
}

/// A session that hears every notification of [`Kind::Ringing`].
async fn listen(url: &str) -> Result<Client> {
    let client = connect(url).await?;
    client.batch_execute("listen ringing").await?;
    Ok(client)
}

/// A relay with a handler that does nothing, until it is killed.
pub(crate) async fn relay(url: &str) -> Result<()> {
    let handler = |_event| std::future::ready(Ok(()));
    let store = PostgresStore::open(url).await?;
    let relay = Relay::builder(store).handle(Subscription::new("publish"), handler).start().await?;
    relay.until_idle().await?;
    println!("ready");
    Err(relay.failed().await.into())
}

/// A relay whose receiver is too slow for it to come to the end of a backlog, until it is killed.
pub(crate) async fn slow_relay(url: &str) -> Result<()> {
    let subscription =
        Subscription { workers: SLOW_WORKERS, batch_size: SLOW_BATCH_SIZE, ..Subscription::new("publish") };
    let (store, sink) = (PostgresStore::open(url).await?, Arc::new(Slow::default()));
    let relay = Relay::builder(store).subscribe(subscription, sink.clone()).start().await?;
    sink.delivered.notified().await;
    println!("ready");
    Err(relay.failed().await.into())
}

/// A plain reader of [`Kind::Watched`]: a page after the other, and a short wait when there is nothing.
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
