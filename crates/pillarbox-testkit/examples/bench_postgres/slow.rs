use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::Result;
use crate::database::{connect, wal_bytes};
use crate::process::Figures;

/// How long the receiver takes for a batch.
const ANSWER: Duration = Duration::from_millis(50);

/// A receiver that takes [`ANSWER`] for a batch, however large.
#[derive(Default)]
pub(crate) struct Slow {
    /// Told of each batch that it has taken.
    pub(crate) delivered: Notify,
}

impl Sink for Slow {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            tokio::time::sleep(ANSWER).await;
            self.delivered.notify_one();
            vec![Outcome::Delivered; batch.events.len()]
        })
    }
}

/// A backlog and a receiver that takes 50 ms for a batch of 10 events: what is written for each of them.
pub(crate) async fn sink(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let before = wal_bytes(&client).await?;
    let name = format!("slow-{}", Uuid::now_v7());
    let subscription = Subscription { lanes: 8, workers: 16, batch_size: 10, ..Subscription::new(name) };
    let store = PostgresStore::open(url).await?;
    let relay = Relay::builder(store).subscribe(subscription, Arc::new(Slow::default())).start().await?;
    relay.until_idle().await?;
    relay.drain().await?;
    let after = wal_bytes(&client).await?;
    Ok(Figures::default().with("wal", (after - before) / count as f64))
}
