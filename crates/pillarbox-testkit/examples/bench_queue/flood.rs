use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::{Delivery, Failure, Mode, Relay, RetryPolicy, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::sync::watch;
use tokio_postgres::Client;

use crate::Result;
use crate::database::connect;
use crate::process::Figures;

/// Between two looks at how many rows there are.
const PAUSE: Duration = Duration::from_millis(100);
/// The copy is made anew when there are so many times as many rows as in the last.
const GROWTH: f64 = 1.1;
/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Every one of `count` events fails once and succeeds at its second attempt. The size of the delivery table in the end, vacuumed, beside
/// that of a fresh table with as many rows as there were at once: nothing is left of the flood, and a table without rows is no measure.
pub(crate) async fn retries(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let empty = size(&client, "pillarbox.delivery").await?;
    let mut sampler = Sampler::new(url).await?;
    let elapsed = tokio::select! {
        elapsed = flood(url, count) => elapsed?,
        error = sampler.run() => return Err(error),
    };
    let before = size(&client, "pillarbox.delivery").await?;
    client.batch_execute("vacuum pillarbox.delivery").await?;
    let after = size(&client, "pillarbox.delivery").await?;
    let left: i64 = client.query_one("select count(*) from pillarbox.delivery", &[]).await?.get(0);
    if left > 0 {
        return Err(format!("{left} deliveries are left").into());
    }
    Ok(Figures::default()
        .with("rate", count as f64 / elapsed.as_secs_f64())
        .with("rows", sampler.rows as f64)
        .with("empty", empty)
        .with("before", before)
        .with("after", after)
        .with("copy", sampler.size))
}

async fn flood(url: &str, count: usize) -> Result<Duration> {
    let retry = RetryPolicy { base: Duration::from_millis(10), jitter: false, ..RetryPolicy::handler() };
    let queue = Subscription { mode: Mode::Queue, retry, ..Subscription::new("flood") };
    let failed = Arc::new(Mutex::new(HashSet::new()));
    let (succeeded, mut all_succeeded) = watch::channel(0);
    let handler = move |event: Delivery| {
        let first = failed.lock().unwrap_or_else(PoisonError::into_inner).insert(event.position);
        if !first {
            succeeded.send_modify(|succeeded| *succeeded += 1);
        }
        std::future::ready(if first { Err(Failure::event("the first attempt fails")) } else { Ok(()) })
    };
    let started = Instant::now();
    let relay = Relay::builder(PostgresStore::open(url).await?).handle(queue, handler).start().await?;
    let wait = tokio::time::timeout(PATIENCE, all_succeeded.wait_for(|succeeded| *succeeded >= count)).await;
    wait.map_err(|_| "the flood does not end")??;
    relay.until_idle().await?;
    let elapsed = started.elapsed();
    relay.drain().await?;
    Ok(elapsed)
}

/// Looks at the delivery table again and again, and copies it into a fresh one when it has more rows than before.
struct Sampler {
    client: Client,
    rows: i64,
    size: f64,
}

impl Sampler {
    async fn new(url: &str) -> Result<Sampler> {
        let client = connect(url).await?;
        let options =
            "select array_to_string(reloptions, ', ') from pg_class where oid = 'pillarbox.delivery'::regclass";
        let options: String = client.query_one(options, &[]).await?.get(0);
        let copy = format!("create table fresh (like pillarbox.delivery including all) with ({options})");
        client.batch_execute(&copy).await?;
        Ok(Sampler { client, rows: 0, size: 0.0 })
    }

    /// Until it fails.
    async fn run(&mut self) -> Box<dyn std::error::Error + Send + Sync> {
        loop {
            tokio::time::sleep(PAUSE).await;
            if let Err(error) = self.sample().await {
                return error;
            }
        }
    }

    async fn sample(&mut self) -> Result<()> {
        let rows: i64 = self.client.query_one("select count(*) from pillarbox.delivery", &[]).await?.get(0);
        if rows == 0 || (rows as f64) < self.rows as f64 * GROWTH {
            return Ok(());
        }
        self.client.batch_execute("truncate fresh; insert into fresh select * from pillarbox.delivery").await?;
        self.rows = self.client.query_one("select count(*) from fresh", &[]).await?.get(0);
        self.size = size(&self.client, "fresh").await?;
        Ok(())
    }
}

/// With its indexes, in KiB.
async fn size(client: &Client, table: &str) -> Result<f64> {
    let sql = format!("select (pg_total_relation_size('{table}') / 1024)::float8");
    Ok(client.query_one(&sql, &[]).await?.get(0))
}
