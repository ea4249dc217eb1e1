use std::collections::HashMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use pillarbox::{Delivery, Relay, RelayConfig, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::Result;
use crate::database::{BACKLOG, connect, migrated};
use crate::distribution::kill_name;
use crate::process::{CHILD, Figures};

/// The process that is killed.
pub(crate) const RELAY: &str = "takeover_relay";

/// Enough keys that each of the 8 lanes has several.
const KEYS: usize = 64;
/// Between two events.
const PAUSE: Duration = Duration::from_millis(2);
/// More than relays have in flight.
const BACKLOG_MAX: i64 = 50_000;
/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(30);

/// A relay that prints the key of each event.
pub(crate) async fn relay(url: &str) -> Result<()> {
    deliver(url, RelayConfig::default()).await
}

/// Prints the key of each event, as this configuration says.
pub(crate) async fn deliver(url: &str, config: RelayConfig) -> Result<()> {
    let store = PostgresStore::open(url).await?;
    let handler = |event: Delivery| {
        println!("{}", event.key.as_deref().unwrap_or(""));
        std::future::ready(Ok(()))
    };
    let relay = Relay::builder(store).config(config).handle(Subscription::new("takeover"), handler).start().await?;
    Err(relay.failed().await.into())
}

/// What came from a relay.
pub(crate) struct Arrival {
    pub(crate) relay: usize,
    pub(crate) key: String,
    at: Instant,
}

/// How events are published meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// One every [`PAUSE`].
    Steady,
    /// More than the relays deliver, up to [`BACKLOG_MAX`]: both always have a backlog.
    Flood,
}

/// Kills one of two relays again and again; from the kill until the other has delivered an event of a key that was the killed one's.
pub(crate) async fn kills(url: &str, count: usize, pace: Pace) -> Result<Figures> {
    let client = migrated(url).await?;
    let (sender, mut arrivals) = mpsc::unbounded_channel();
    let mut next = 0;
    let mut start = || -> Result<(usize, Child)> {
        next += 1;
        Ok((next, spawn(RELAY, url, next, sender.clone())?))
    };
    let mut relays = vec![start()?, start()?];
    drop(client);
    let publisher = match pace {
        Pace::Steady => tokio::spawn(publish(url.to_owned())),
        Pace::Flood => tokio::spawn(flood(url.to_owned())),
    };
    let mut figures = Figures::default();
    for number in 0..count {
        let numbers: Vec<usize> = relays.iter().map(|(number, _)| *number).collect();
        let owners = both_deliver(&mut arrivals, &numbers).await?;
        let (relay, mut victim) = relays.remove(0);
        let killed = Instant::now();
        victim.start_kill()?;
        let taken_over = first_of_others(&mut arrivals, &owners, (relay, killed)).await?.duration_since(killed);
        figures = figures.with(&kill_name(number), taken_over.as_secs_f64() * 1e3);
        victim.wait().await?;
        relays.push(start()?);
    }
    publisher.abort();
    Ok(figures)
}

pub(crate) fn spawn(name: &str, url: &str, relay: usize, arrivals: mpsc::UnboundedSender<Arrival>) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .args([CHILD, name, url, "0"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("the relay has no output")?).lines();
    tokio::spawn(async move {
        while let Ok(Some(key)) = lines.next_line().await {
            let _ = arrivals.send(Arrival { relay, key, at: Instant::now() });
        }
    });
    Ok(child)
}

/// Publishes for ever, one event every [`PAUSE`].
pub(crate) async fn publish(url: String) -> Result<()> {
    let client = connect(&url).await?;
    let statement = client.prepare("insert into pillarbox.event (topic, key, type) values ('t', $1, 'y')").await?;
    let mut ticks = tokio::time::interval(PAUSE);
    for number in 0.. {
        ticks.tick().await;
        client.execute(&statement, &[&format!("key-{}", number % KEYS)]).await?;
    }
    Ok(())
}

/// Publishes for ever, without a pause but where the backlog is long enough.
async fn flood(url: String) -> Result<()> {
    let client = connect(&url).await?;
    let sql = "insert into pillarbox.event (topic, key, type) \
               select 't', 'key-' || g % 64, 'y' from generate_series(1, 2000) as g";
    let backlog = client.prepare(BACKLOG).await?;
    loop {
        if client.query_one(&backlog, &[]).await?.try_get::<_, i64>(0)? < BACKLOG_MAX {
            client.batch_execute(sql).await?;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Waits until every key is delivered by one of the two, and each of them has its half; who delivers what.
pub(crate) async fn both_deliver(
    arrivals: &mut mpsc::UnboundedReceiver<Arrival>,
    relays: &[usize],
) -> Result<HashMap<String, usize>> {
    let mut owners: HashMap<String, usize> = HashMap::new();
    let all = async {
        while let Some(Arrival { relay, key, .. }) = arrivals.recv().await {
            owners.insert(key, relay);
            let share = |number: usize| owners.values().filter(|owner| **owner == number).count();
            if owners.len() == KEYS && relays.iter().all(|number| share(*number) > KEYS / 4) {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, all).await.map_err(|_| "the two relays did not share the lanes")?;
    Ok(owners)
}

pub(crate) async fn first_of_others(
    arrivals: &mut mpsc::UnboundedReceiver<Arrival>,
    owners: &HashMap<String, usize>,
    (killed, at): (usize, Instant),
) -> Result<Instant> {
    let first = async {
        loop {
            let arrival = arrivals.recv().await?;
            if arrival.at > at && arrival.relay != killed && owners.get(&arrival.key) == Some(&killed) {
                return Some(arrival.at);
            }
        }
    };
    tokio::time::timeout(PATIENCE, first).await.ok().flatten().ok_or_else(|| "nobody took the lanes over".into())
}
