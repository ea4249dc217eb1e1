use std::process::Stdio;
use std::time::{Duration, Instant};

use pillarbox::admin::Operator;
use pillarbox::store::Store;
use pillarbox::{Delivery, Mode, Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use pillarbox_sqlite::SqliteStore;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};

use crate::Result;
use crate::database::event;
use crate::distribution::kill_name;
use crate::place::Place;
use crate::process::{CHILD, Figures};

/// The process that is killed.
pub(crate) const RELAY: &str = "recovery_relay";

/// What a relay prints when it waits for events.
const READY: &str = "ready";
/// Between two looks at what is claimed.
const PAUSE: Duration = Duration::from_millis(10);
/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A relay whose handler prints the event's id and does not end before a line comes in. It ends with its input.
pub(crate) async fn relay(place: &str) -> Result<()> {
    match Place::of(place) {
        Place::Postgres(url) => hold(PostgresStore::open(url).await?).await,
        Place::Sqlite(path) => hold(SqliteStore::open(path)?).await,
    }
}

async fn hold<S: Store + Operator>(store: S) -> Result<()> {
    let (release, released) = watch::channel(());
    let handler = move |event: Delivery| {
        let mut released = released.clone();
        released.mark_unchanged();
        println!("{}", event.id);
        async move {
            let _ = released.changed().await;
            Ok(())
        }
    };
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(|line| line.ok()).for_each(|_| {
            release.send_replace(());
        });
        std::process::exit(0);
    });
    let queue = Subscription { mode: Mode::Queue, ..Subscription::new("recovery") };
    let relay = Relay::builder(store).handle(queue, handler).start().await?;
    relay.until_idle().await?;
    println!("{READY}");
    Err(relay.failed().await.into())
}

/// Kills the one of two relays that has claimed an event, again and again: from the kill until the other's handler has the event.
pub(crate) async fn kills(place: &str, count: usize) -> Result<Figures> {
    Place::of(place).migrate().await?;
    match Place::of(place) {
        Place::Postgres(url) => kill_holders(PostgresStore::open(url).await?, place, count).await,
        Place::Sqlite(path) => kill_holders(SqliteStore::open(path)?, place, count).await,
    }
}

async fn kill_holders<S: Operator>(store: S, place: &str, count: usize) -> Result<Figures> {
    let mut pair = Pair::start(place).await?;
    let mut figures = Figures::default();
    for number in 0..count {
        let id = store.publish(&[event(number)]).await?[0].to_string();
        let holder = pair.hear(&id, None).await?.relay;
        until_processing(&store, 1).await?;
        let killed = Instant::now();
        pair.kill(holder).await?;
        let other = pair.hear(&id, Some(holder)).await?;
        let milliseconds = other.at.duration_since(killed).as_secs_f64() * 1e3;
        figures = figures.with(&kill_name(number), milliseconds);
        pair.release().await?;
        until_processing(&store, 0).await?;
        pair.add().await?;
    }
    Ok(figures)
}

/// Waits until so many claims are in the database.
async fn until_processing<S: Operator>(store: &S, count: u64) -> Result<()> {
    let asked = Instant::now();
    while store.status().await?.subscriptions.iter().map(|queue| queue.processing).sum::<u64>() != count {
        if asked.elapsed() > PATIENCE {
            return Err(format!("there are never {count} claims").into());
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Something that a relay printed.
struct Said {
    relay: usize,
    text: String,
    at: Instant,
}

/// Two relays, and one while one is being replaced.
struct Pair {
    place: String,
    relays: Vec<Holder>,
    started: usize,
    sender: mpsc::UnboundedSender<Said>,
    said: mpsc::UnboundedReceiver<Said>,
}

struct Holder {
    number: usize,
    child: Child,
    input: ChildStdin,
}

impl Pair {
    async fn start(place: &str) -> Result<Pair> {
        let (sender, said) = mpsc::unbounded_channel();
        let mut pair = Pair { place: place.into(), relays: Vec::new(), started: 0, sender, said };
        pair.add().await?;
        pair.add().await?;
        Ok(pair)
    }

    /// Starts another relay and waits until it waits for events.
    async fn add(&mut self) -> Result<()> {
        self.started += 1;
        let number = self.started;
        let mut child = Command::new(std::env::current_exe()?)
            .args([CHILD, RELAY, &self.place, "0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = child.stdin.take().ok_or("the relay has no input")?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("the relay has no output")?).lines();
        let sender = self.sender.clone();
        tokio::spawn(async move {
            while let Ok(Some(text)) = lines.next_line().await {
                let _ = sender.send(Said { relay: number, text, at: Instant::now() });
            }
        });
        self.relays.push(Holder { number, child, input });
        self.hear(READY, None).await.map(drop)
    }

    /// Waits until a relay, not this one, says so.
    async fn hear(&mut self, text: &str, not: Option<usize>) -> Result<Said> {
        let first = async {
            loop {
                let said = self.said.recv().await?;
                if said.text == text && Some(said.relay) != not {
                    return Some(said);
                }
            }
        };
        let heard = tokio::time::timeout(PATIENCE, first).await.ok().flatten();
        heard.ok_or_else(|| format!("no relay said '{text}'").into())
    }

    async fn kill(&mut self, number: usize) -> Result<()> {
        let index = self.relays.iter().position(|relay| relay.number == number).ok_or("it is dead already")?;
        let mut relay = self.relays.remove(index);
        relay.child.start_kill()?;
        relay.child.wait().await?;
        Ok(())
    }

    /// Lets the handlers end.
    async fn release(&mut self) -> Result<()> {
        for relay in &mut self.relays {
            relay.input.write_all(b"\n").await?;
        }
        Ok(())
    }
}
