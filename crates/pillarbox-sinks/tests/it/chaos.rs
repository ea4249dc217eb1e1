//! Two relays over SQLite, a thousand keys, one event in twenty refused, and every receiver's server killed three times meanwhile:
//! nothing is lost and every key stays in order. How many events is told by `PILLARBOX_CHAOS_EVENTS`.
use std::path::PathBuf;
use std::time::Duration;

use pillarbox::NewEvent;
#[cfg(feature = "http")]
use pillarbox_sinks::HttpMode;
use pillarbox_sqlite::{SqliteStore, migrate, publish_all};
use pillarbox_testkit::Committed;
use pillarbox_testkit::order::OrderedLog;
use pillarbox_testkit::sink_chaos::{ChaosRun, events_wanted, run_chaos};
use pillarbox_testkit::sink_suite::SinkFixture;
use rusqlite::{Connection, Row};
use tempfile::TempDir;
#[cfg(all(feature = "postgres", any(feature = "kafka", feature = "redis")))]
use uuid::Uuid;

/// A partition of the mock keeps 5 MB; so many have room for every run.
#[cfg(feature = "kafka")]
const KAFKA_PARTITIONS: i32 = 32;

/// A database file in a folder of its own.
struct Log {
    path: PathBuf,
    _folder: TempDir,
}

impl Log {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("app.db");
        migrate(&path).unwrap();
        Log { path, _folder: folder }
    }

    fn connect(&self) -> Connection {
        let connection = Connection::open(&self.path).unwrap();
        connection.busy_timeout(Duration::from_secs(30)).unwrap();
        connection
    }
}

impl OrderedLog for Log {
    type Store = SqliteStore;

    async fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.path).unwrap()
    }

    async fn publish(&self, events: Vec<NewEvent>) {
        // It waits for the one writer of the file.
        tokio::task::block_in_place(|| {
            let mut connection = self.connect();
            let transaction = connection.transaction().unwrap();
            publish_all(&transaction, &events).unwrap();
            transaction.commit().unwrap();
        });
    }

    async fn owners(&self) -> usize {
        let sql = "select count(distinct owner) from pillarbox_cursor";
        self.connect().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap() as usize
    }

    async fn committed(&self) -> Vec<Committed> {
        let connection = self.connect();
        let mut statement = connection.prepare("select id, key, position from pillarbox_event").unwrap();
        let event = |row: &Row<'_>| {
            let id = row.get::<_, String>(0)?.parse().expect("an id is a uuid");
            Ok(Committed { id, key: row.get(1)?, position: row.get(2)? })
        };
        statement.query_map([], event).unwrap().map(Result::unwrap).collect()
    }
}

/// Another seed for each sink, so that they die at other moments.
pub(crate) async fn run(name: &str, fixture: &dyn SinkFixture, seed: u64) -> ChaosRun {
    let run = run_chaos(fixture, Log::new(), events_wanted(), seed).await;
    println!("{name}: {run}");
    run
}

#[cfg(feature = "http")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn http_loses_nothing() {
    run("http", &crate::http::Fixture::new(HttpMode::Structured), 1).await.assert_sound();
}

#[cfg(feature = "http")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batched_http_loses_nothing() {
    run("http, batched", &crate::http::Fixture::new(HttpMode::Batched), 2).await.assert_sound();
}

/// By librdkafka's mock of a broker, which goes down and comes up; real brokers, if some are named, are not killed.
#[cfg(feature = "kafka")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn kafka_loses_nothing() {
    run("kafka", &crate::kafka::Fixture::with_partitions(KAFKA_PARTITIONS), 3).await.assert_sound();
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn postgres_loses_nothing_and_has_nothing_twice() {
    let run = run("postgres", &crate::postgres::Fixture::new(), 4).await;
    run.assert_sound();
    assert_eq!(run.verdict.duplicates, 0, "the table is unique by id");
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_stream_loses_nothing() {
    run("redis_stream", &crate::redis::StreamFixture::new(), 5).await.assert_sound();
}

/// Pub/sub keeps nothing: what was on its way to the subscriber when the server was killed is gone, and is only counted here. That every
/// event was acknowledged once before the relay settled it, that nothing is invented and that keys stay in order is looked at.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_pubsub_publishes_everything_in_order() {
    run("redis_pubsub", &crate::redis::PubSubFixture::new(), 6).await.assert_relayed();
}

/// PostgreSQL first, then a Redis stream; they are killed in turn.
#[cfg(all(feature = "postgres", feature = "redis"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_chain_to_redis_loses_nothing_in_any_of_its_steps() {
    check_chain("chain to redis_stream", chain::Fixture::new(crate::redis::StreamFixture::new()), 7).await;
}

/// An event store first, then Kafka: whatever a consumer of the topic has seen is in the store. They are killed in turn, or, with real
/// brokers, the store alone.
#[cfg(all(feature = "postgres", feature = "kafka"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_chain_to_kafka_loses_nothing_in_any_of_its_steps() {
    let kafka = crate::kafka::Fixture::with_partitions(KAFKA_PARTITIONS);
    // Seeds 8 to 15 leave out two of the thousand keys.
    check_chain("chain to kafka", chain::Fixture::new(kafka), 16).await;
}

/// Both steps have everything, the store each event once.
#[cfg(all(feature = "postgres", any(feature = "kafka", feature = "redis")))]
async fn check_chain<L: SinkFixture>(name: &str, fixture: chain::Fixture<L>, seed: u64) {
    let run = run(name, &fixture, seed).await;
    run.assert_sound();
    let mut first: Vec<Uuid> = fixture.first.received().await.iter().map(|received| received.id).collect();
    let mut last: Vec<Uuid> = fixture.received().await.iter().map(|received| received.id).collect();
    first.sort_unstable();
    last.sort_unstable();
    last.dedup();
    assert_eq!(first.len(), run.verdict.committed);
    assert_eq!(first, last);
}

#[cfg(all(feature = "postgres", any(feature = "kafka", feature = "redis")))]
mod chain {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use pillarbox::sink::{BoxFuture, Sink};
    use pillarbox_sinks::Chain;
    use pillarbox_testkit::sink_suite::{Received, ServerControl, SinkFixture};

    /// A chain of PostgreSQL and something else.
    pub(super) struct Fixture<L> {
        pub(super) first: crate::postgres::Fixture,
        last: L,
        /// How often one of them was killed.
        kills: AtomicUsize,
    }

    impl<L: SinkFixture> Fixture<L> {
        pub(super) fn new(last: L) -> Self {
            Fixture { first: crate::postgres::Fixture::new(), last, kills: AtomicUsize::new(0) }
        }

        /// The server of the `kill`-th kill.
        fn victim(&self, kill: usize) -> &dyn ServerControl {
            let last = self.last.server().filter(|_| !kill.is_multiple_of(2));
            last.unwrap_or(&self.first)
        }
    }

    impl<L: SinkFixture> SinkFixture for Fixture<L> {
        fn sink(&self) -> Arc<dyn Sink> {
            let steps = vec![("first".to_owned(), self.first.sink()), ("last".to_owned(), self.last.sink())];
            Arc::new(Chain::new(steps).unwrap())
        }

        fn received(&self) -> BoxFuture<'_, Vec<Received>> {
            self.last.received()
        }

        fn server(&self) -> Option<&dyn ServerControl> {
            Some(self)
        }
    }

    impl<L: SinkFixture> ServerControl for Fixture<L> {
        fn kill(&self) -> BoxFuture<'_, ()> {
            self.victim(self.kills.load(Ordering::SeqCst)).kill()
        }

        fn restart(&self) -> BoxFuture<'_, ()> {
            self.victim(self.kills.fetch_add(1, Ordering::SeqCst)).restart()
        }
    }
}
