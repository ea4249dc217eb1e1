use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pillarbox::{Delivery, Mode, NewEvent, Relay, RelayBuilder, Subscription};
use pillarbox_postgres::{PostgresStore, publish_all};

use crate::Result;
use crate::database::{event, migrated};
use crate::process::Figures;
use crate::wear::Wear;

/// How long a slow handler takes, and how many of them run at once, here and in the hand-written loop.
pub(crate) const SLOW: Duration = Duration::from_millis(1);
pub(crate) const SLOW_WORKERS: usize = 64;

/// How long the first event stalls its handler: long enough to get a row, and whatever waits then too.
const STALL: Duration = Duration::from_millis(200);

const FILL_BATCH: usize = 5_000;

/// What the handler does with an event.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// Nothing; 4 workers.
    Instant,
    /// Takes [`SLOW`]; [`SLOW_WORKERS`] workers.
    Slow,
    /// The same, but the first takes [`STALL`]. What waits meanwhile moves into the rows of the queue, and what is read later goes
    /// behind them.
    Stalled,
}

/// Makes a log with `count` events without keys.
pub(crate) async fn fill(url: &str, count: usize) -> Result<Figures> {
    let mut client = migrated(url).await?;
    let numbers: Vec<usize> = (0..count).collect();
    for batch in numbers.chunks(FILL_BATCH) {
        let events: Vec<NewEvent> = batch.iter().map(|number| NewEvent { key: None, ..event(*number) }).collect();
        let transaction = client.transaction().await?;
        publish_all(&transaction, &events).await?;
        transaction.commit().await?;
    }
    client.batch_execute("vacuum analyze pillarbox.event").await?;
    client.batch_execute("checkpoint").await?;
    Ok(Figures::default().with("events", count as f64))
}

/// A queue of all events, from the relay's start until all is delivered and settled.
pub(crate) async fn drain(url: &str, count: usize, pace: Pace) -> Result<Figures> {
    let wear = Wear::begin(url).await?;
    let progress = Arc::new(Progress { count, ..Progress::default() });
    let builder = Relay::builder(PostgresStore::open(url).await?);
    let builder = subscribe(builder, pace, progress.clone());
    let started = Instant::now();
    let relay = builder.start().await?;
    relay.until_idle().await?;
    let elapsed = started.elapsed();
    relay.drain().await?;
    let handled = progress.handled.load(Ordering::Relaxed);
    let (Some(first), Some(last), true) = (progress.first.get(), progress.last.get(), handled == count) else {
        return Err(format!("{handled} events were handled instead of {count}").into());
    };
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let figures = Figures::default()
        .with("rate", count as f64 / elapsed.as_secs_f64())
        .with("first_ms", milliseconds(first.duration_since(started)))
        .with("settled_ms", milliseconds(elapsed.saturating_sub(last.duration_since(started))));
    wear.end(count, figures).await
}

fn subscribe(builder: RelayBuilder<PostgresStore>, pace: Pace, seen: Arc<Progress>) -> RelayBuilder<PostgresStore> {
    let queue = Subscription { mode: Mode::Queue, ..Subscription::new("queue") };
    match pace {
        Pace::Instant => builder.handle(queue, move |_event| {
            seen.note();
            std::future::ready(Ok(()))
        }),
        Pace::Slow | Pace::Stalled => {
            let queue = Subscription { workers: SLOW_WORKERS, ..queue };
            builder.handle(queue, move |_event: Delivery| {
                let wait = if seen.note() == 1 && pace == Pace::Stalled { STALL } else { SLOW };
                async move {
                    tokio::time::sleep(wait).await;
                    Ok(())
                }
            })
        }
    }
}

/// What a handler has seen.
#[derive(Default)]
struct Progress {
    count: usize,
    handled: AtomicUsize,
    first: OnceLock<Instant>,
    last: OnceLock<Instant>,
}

impl Progress {
    /// Notes that another event is being handled; how many that makes.
    fn note(&self) -> usize {
        let handled = self.handled.fetch_add(1, Ordering::Relaxed) + 1;
        if handled == 1 {
            self.first.get_or_init(Instant::now);
        }
        if handled == self.count {
            self.last.get_or_init(Instant::now);
        }
        handled
    }
}
