use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_postgres::{Client, Statement};

use super::kind::Kind;
use super::situation::{Pace, Situation};
use crate::Result;
use crate::database::{KEYS, connect, payload, wal_bytes};
use crate::processor_time;

/// How long one kind publishes before the next has its turn.
const SLICE: Duration = Duration::from_millis(800);

/// How long each kind publishes before anything counts: until every session has its generic plan, which takes it six transactions, also at
/// [`Pace::Steady`]; and until what a checkpoint makes the first change of each page write is written.
const WARM_UP: Duration = Duration::from_millis(500);

/// Before each slice, for what the last one left to do.
const BREATH: Duration = Duration::from_millis(50);

/// Between two events of [`Pace::Steady`], whichever connection they are of.
const PAUSE: Duration = Duration::from_millis(2);

/// Connections that publish at once, and one that looks on.
pub(super) struct Crew {
    publishers: Vec<Arc<Publisher>>,
    observer: Client,
}

struct Publisher {
    client: Client,
    /// The server's process for it.
    backend: i32,
    statements: Vec<(Kind, Statement)>,
}

/// What one kind did in its turn.
pub(super) struct Slice {
    pub(super) kind: Kind,
    pub(super) transactions: u64,
    pub(super) elapsed: Duration,
    /// For commits, of all connections together.
    pub(super) waited: Duration,
    /// Of the publishing backends.
    pub(super) processor_seconds: f64,
    /// Of the whole server.
    pub(super) wal_bytes: f64,
}

/// When events are published.
#[derive(Clone, Copy)]
struct Schedule {
    began: Instant,
    duration: Duration,
    pace: Pace,
    /// How many publish at once.
    connections: usize,
}

#[derive(Default)]
struct Published {
    transactions: u64,
    waited: Duration,
}

impl Crew {
    pub(super) async fn assemble(url: &str, connections: usize, kinds: &[Kind]) -> Result<Crew> {
        let mut publishers = Vec::new();
        for _ in 0..connections {
            publishers.push(Arc::new(Publisher::connect(url, kinds).await?));
        }
        Ok(Crew { publishers, observer: connect(url).await? })
    }

    /// Each kind for a while that does not count, after a checkpoint.
    pub(super) async fn warm_up(&self, kinds: &[Kind], pace: Pace) -> Result<()> {
        self.observer.batch_execute("checkpoint").await?;
        for kind in kinds {
            self.publish(*kind, pace, WARM_UP).await?;
        }
        Ok(())
    }

    /// A turn of one kind.
    pub(super) async fn slice(&self, kind: Kind, situation: Situation) -> Result<Slice> {
        let pace = situation.pace();
        if kind.is_ours() && !situation.lead_in().is_zero() {
            self.publish(kind, pace, situation.lead_in()).await?;
        }
        tokio::time::sleep(BREATH).await;
        let (processor_before, wal_before) = (self.processor_seconds()?, wal_bytes(&self.observer).await?);
        let began = Instant::now();
        let Published { transactions, waited } = self.publish(kind, pace, SLICE).await?;
        let elapsed = began.elapsed();
        let (processor_after, wal_after) = (self.processor_seconds()?, wal_bytes(&self.observer).await?);
        let processor_seconds = processor_after - processor_before;
        Ok(Slice { kind, transactions, elapsed, waited, processor_seconds, wal_bytes: wal_after - wal_before })
    }

    async fn publish(&self, kind: Kind, pace: Pace, duration: Duration) -> Result<Published> {
        let schedule = Schedule { began: Instant::now(), duration, pace, connections: self.publishers.len() };
        let mut tasks = JoinSet::new();
        for (number, publisher) in self.publishers.iter().enumerate() {
            let publisher = publisher.clone();
            tasks.spawn(async move { publisher.publish(kind, number, schedule).await });
        }
        let mut all = Published::default();
        while let Some(published) = tasks.join_next().await {
            let published = published??;
            all.transactions += published.transactions;
            all.waited += published.waited;
        }
        Ok(all)
    }

    /// The processor time of the publishing backends so far.
    fn processor_seconds(&self) -> Result<f64> {
        self.publishers.iter().map(|publisher| processor_time::seconds(publisher.backend)).sum()
    }
}

impl Publisher {
    async fn connect(url: &str, kinds: &[Kind]) -> Result<Publisher> {
        let client = connect(url).await?;
        let backend = client.query_one("select pg_backend_pid()", &[]).await?.try_get(0)?;
        let mut statements = Vec::new();
        for kind in kinds {
            statements.push((*kind, client.prepare(&kind.sql()).await?));
        }
        Ok(Publisher { client, backend, statements })
    }

    /// Publishes the `number`-th event and then every one that is this connection's turn.
    async fn publish(&self, kind: Kind, mut number: usize, schedule: Schedule) -> Result<Published> {
        let (_, statement) = self.statements.iter().find(|(known, _)| *known == kind).ok_or("it is not prepared")?;
        let mut published = Published::default();
        loop {
            if schedule.pace == Pace::Steady {
                tokio::time::sleep_until(schedule.began + PAUSE * number as u32).await;
            }
            if schedule.began.elapsed() >= schedule.duration {
                return Ok(published);
            }
            let (key, payload) = (format!("order-{}", number % KEYS), payload(number));
            let sent = Instant::now();
            self.client.execute(statement, &[&key, &payload]).await?;
            published.waited += sent.elapsed();
            published.transactions += 1;
            number += schedule.connections;
        }
    }
}
