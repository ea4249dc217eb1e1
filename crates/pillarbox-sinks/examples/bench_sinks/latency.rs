use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::sink::Sink;
use pillarbox::{Relay, Subscription};
use pillarbox_sqlite::SqliteStore;
use rusqlite::TransactionBehavior::Immediate;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::Result;
use crate::database::{connect, event};
use crate::process::Figures;
use crate::throughput::folder;

/// Between two samples, so that each finds everybody asleep.
const PAUSE: Duration = Duration::from_millis(3);
/// The first samples are not counted.
const WARM_UP: usize = 30;
const PATIENCE: Duration = Duration::from_secs(10);

/// From the return of a commit until a consumer has the event, by a relay with this sink.
pub(crate) async fn relay(
    sink: Arc<dyn Sink>,
    arrivals: UnboundedReceiver<Instant>,
    samples: usize,
) -> Result<Figures> {
    let folder = folder()?;
    let path = folder.path().join("log.db");
    pillarbox_sqlite::migrate(&path)?;
    let relay = Relay::builder(SqliteStore::open(&path)?).subscribe(Subscription::new("bench"), sink).start().await?;
    relay.until_idle().await?;
    let mut connection = connect(&path)?;
    let figures = sample(samples, arrivals, |number| {
        let published = tokio::task::block_in_place(|| {
            let transaction = connection.transaction_with_behavior(Immediate)?;
            pillarbox_sqlite::publish(&transaction, &event(number))?;
            pillarbox_sqlite::commit(transaction)?;
            Ok(Instant::now())
        });
        std::future::ready(published)
    })
    .await?;
    relay.drain().await?;
    Ok(figures)
}

/// The same, where `send` returns when it began to send.
pub(crate) async fn sample<F: Future<Output = Result<Instant>>>(
    samples: usize,
    mut arrivals: UnboundedReceiver<Instant>,
    mut send: impl FnMut(usize) -> F,
) -> Result<Figures> {
    let mut times = Vec::with_capacity(samples);
    for number in 0..WARM_UP + samples {
        let began = send(number).await?;
        let arrived = tokio::time::timeout(PATIENCE, arrivals.recv()).await?.ok_or("the consumer has gone")?;
        if number >= WARM_UP {
            times.push(arrived.saturating_duration_since(began));
        }
        tokio::time::sleep(PAUSE).await;
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    Ok(Figures::default().with("p50", at(50)).with("p99", at(99)))
}
