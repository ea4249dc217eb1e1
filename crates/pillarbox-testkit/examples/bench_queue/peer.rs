use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_postgres::{Client, Row, Statement};

use crate::Result;
use crate::database::connect;

/// How many workers a peer has: as many as a subscription by default. It takes 100 events at once, as that does.
pub(crate) const WORKERS: usize = 4;

/// How many events are written at once before a measurement.
const FILL_BATCH: usize = 5_000;

/// How long a worker waits that found nothing while others are not done.
const PAUSE: Duration = Duration::from_millis(5);

/// The environment variable that names the folder with the installed peers.
const FOLDER_VARIABLE: &str = "PILLARBOX_BENCH_PEERS";

/// Where `cargo xtask bench --queue` has installed the peers.
pub(crate) fn folder() -> Result<PathBuf> {
    let folder = std::env::var_os(FOLDER_VARIABLE).ok_or("not installed; `cargo xtask bench --queue` installs it")?;
    Ok(folder.into())
}

/// A consumer that is nothing but SQL.
#[derive(Clone, Copy)]
pub(crate) struct Consumer {
    /// The number and the payload's text of a batch.
    pub(crate) take: &'static str,
    /// Removes what was handled, by its numbers.
    pub(crate) delete: &'static str,
    /// Takes, handles and deletes in one transaction.
    pub(crate) in_transaction: bool,
    /// How long each event takes.
    pub(crate) handler: Option<Duration>,
    pub(crate) workers: usize,
}

impl Consumer {
    /// How long it takes to handle and delete `count` events, each worker on a connection of its own.
    pub(crate) async fn drain(self, url: &str, count: usize) -> Result<Duration> {
        let mut workers = Vec::new();
        for _ in 0..self.workers {
            workers.push(Worker::connect(url, self).await?);
        }
        let done = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        let started = Instant::now();
        for worker in workers {
            tasks.spawn(worker.run(done.clone(), count));
        }
        let mut last = started;
        while let Some(ended) = tasks.join_next().await {
            last = last.max(ended??.unwrap_or(started));
        }
        let done = done.load(Ordering::Relaxed);
        if done != count {
            return Err(format!("{done} events were handled instead of {count}").into());
        }
        Ok(last - started)
    }
}

struct Worker {
    client: Client,
    take: Statement,
    delete: Statement,
    in_transaction: bool,
    handler: Option<Duration>,
}

impl Worker {
    async fn connect(url: &str, consumer: Consumer) -> Result<Worker> {
        let client = connect(url).await?;
        let (take, delete) = (client.prepare(consumer.take).await?, client.prepare(consumer.delete).await?);
        let Consumer { in_transaction, handler, .. } = consumer;
        Ok(Worker { client, take, delete, in_transaction, handler })
    }

    /// One batch after the other until all workers together have done `count`; when its own last batch was done.
    async fn run(mut self, done: Arc<AtomicUsize>, count: usize) -> Result<Option<Instant>> {
        let mut last = None;
        while done.load(Ordering::Relaxed) < count {
            let batch = if self.in_transaction { self.together().await? } else { self.apart().await? };
            if batch == 0 {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            done.fetch_add(batch, Ordering::Relaxed);
            last = Some(Instant::now());
        }
        Ok(last)
    }

    async fn together(&mut self) -> Result<usize> {
        let transaction = self.client.transaction().await?;
        let rows = transaction.query(&self.take, &[]).await?;
        let numbers = handle(&rows, self.handler).await;
        if !numbers.is_empty() {
            transaction.execute(&self.delete, &[&numbers]).await?;
        }
        transaction.commit().await?;
        Ok(numbers.len())
    }

    async fn apart(&self) -> Result<usize> {
        let rows = self.client.query(&self.take, &[]).await?;
        let numbers = handle(&rows, self.handler).await;
        if !numbers.is_empty() {
            self.client.query(&self.delete, &[&numbers]).await?;
        }
        Ok(numbers.len())
    }
}

/// Looks at each event; their numbers.
async fn handle(rows: &[Row], pause: Option<Duration>) -> Vec<i64> {
    let mut numbers = Vec::with_capacity(rows.len());
    for row in rows {
        black_box(row.get::<_, String>(1));
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        numbers.push(row.get(0));
    }
    numbers
}

/// Writes the payloads of the events by `insert`, which takes an array of texts; then the table is as after a while of quiet.
pub(crate) async fn fill(client: &Client, insert: &str, table: &str, count: usize) -> Result<()> {
    let statement = client.prepare(insert).await?;
    let numbers: Vec<usize> = (0..count).collect();
    for batch in numbers.chunks(FILL_BATCH) {
        let payloads: Vec<String> = batch.iter().map(|number| crate::database::payload(*number)).collect();
        client.query(&statement, &[&payloads]).await?;
    }
    client.batch_execute(&format!("vacuum analyze {table}")).await?;
    client.batch_execute("checkpoint").await?;
    Ok(())
}
