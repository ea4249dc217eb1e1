use std::sync::Arc;
use std::time::Duration;

use pillarbox::{Batch, BoxFuture, Outcome, Relay, Sink, SinkFeatures, Subscription};
use pillarbox_postgres::PostgresStore;
use uuid::Uuid;

use crate::Result;
use crate::database::connect;
use crate::process::Figures;

/// How long the receiver takes for a batch.
const ANSWER: Duration = Duration::from_millis(50);

struct Slow;

impl Sink for Slow {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            tokio::time::sleep(ANSWER).await;
            vec![Outcome::Delivered; batch.events.len()]
        })
    }
}

/// A backlog and a receiver that takes 50 ms for a batch of 10 events: what is written for each of them.
pub(crate) async fn sink(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let sql = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::float8";
    let before: f64 = client.query_one(sql, &[]).await?.get(0);
    let name = format!("slow-{}", Uuid::now_v7());
    let subscription = Subscription { lanes: 8, workers: 16, batch_size: 10, ..Subscription::new(name) };
    let relay = Relay::builder(PostgresStore::open(url).await?).subscribe(subscription, Arc::new(Slow)).start().await?;
    relay.until_idle().await?;
    relay.drain().await?;
    let after: f64 = client.query_one(sql, &[]).await?.get(0);
    Ok(Figures::default().with("wal", (after - before) / count as f64))
}
