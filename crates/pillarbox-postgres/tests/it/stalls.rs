//! Whatever stays open, events of others are delivered while it is still open: no timing, only causes.
use std::sync::Arc;
use std::time::Duration;

use pillarbox::engine::EngineConfig;
use pillarbox::testing::Capture;
use pillarbox::{Relay, RelayConfig, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio_postgres::Client;

use pillarbox_testkit::postgres::Server;

use crate::fixture::{Database, connect};
use crate::ownership::until;

/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

async fn relay(database: &Database, capture: &Capture) -> Relay {
    relay_on(database.store().await, capture).await
}

async fn relay_on(store: PostgresStore, capture: &Capture) -> Relay {
    let engine = EngineConfig { poll_interval: Duration::from_millis(200), ..EngineConfig::default() };
    Relay::builder(store)
        .config(RelayConfig { engine, ..RelayConfig::default() })
        .subscribe(Subscription::new("s"), Arc::new(capture.clone()))
        .start()
        .await
        .unwrap()
}

async fn arrive(capture: &Capture, count: usize) {
    let arrived = tokio::time::timeout(PATIENCE, capture.wait_for(count)).await;
    assert!(arrived.is_ok(), "only {} of {count} arrived while the blocker was open", capture.events().len());
}

/// Publishes while the blocker is open, waits for the arrival, and only then lets the blocker end.
async fn delivered_beside(database: &Database, blocker: &Client, end: &str) {
    let capture = Capture::new();
    let relay = relay(database, &capture).await;
    database.publish_keys(&["a", "b", "c"]).await;
    arrive(&capture, 3).await;
    blocker.batch_execute(end).await.unwrap();
    // Its own events come after all, if it has any.
    database.publish_keys(&["d"]).await;
    let committed = database.number("select count(*) from pillarbox.event").await as usize;
    arrive(&capture, committed).await;
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let floors = "select count(*) from pillarbox.cursor, pillarbox.event where floor < position";
    assert_eq!(database.number(floors).await, 0, "with the blocker gone the floor passes everything");
}

#[tokio::test]
async fn an_unrelated_transaction_of_the_same_database() {
    let database = Database::new().await;
    let blocker = database.client().await;
    blocker.batch_execute("create table t (); begin; insert into t default values").await.unwrap();
    delivered_beside(&database, &blocker, "commit").await;
}

#[tokio::test]
async fn an_unrelated_transaction_of_another_database() {
    let database = Database::new().await;
    let other = Server::shared().create_database().unwrap();
    let blocker = connect(other.url()).await;
    blocker.batch_execute("create table t (); begin; insert into t default values").await.unwrap();
    delivered_beside(&database, &blocker, "commit").await;
}

#[tokio::test]
async fn an_idle_writer_of_the_log_that_commits_in_the_end() {
    let database = Database::new().await;
    let blocker = database.client().await;
    blocker
        .batch_execute("begin; insert into pillarbox.event (topic, type, key) values ('t', 'y', 'late')")
        .await
        .unwrap();
    delivered_beside(&database, &blocker, "commit").await;
}

#[tokio::test]
async fn an_idle_writer_of_the_log_that_aborts_in_the_end() {
    let database = Database::new().await;
    let blocker = database.client().await;
    blocker.batch_execute("begin; insert into pillarbox.event (topic, type) values ('t', 'y')").await.unwrap();
    delivered_beside(&database, &blocker, "rollback").await;
    assert_eq!(database.number("select count(*) from pillarbox.dead_range").await, 1);
}

#[tokio::test]
async fn a_prepared_transaction_that_was_forgotten() {
    let database = Database::new().await;
    let blocker = database.client().await;
    let name: String = blocker.query_one("select current_database()::text", &[]).await.unwrap().get(0);
    let sql = format!(
        "begin; insert into pillarbox.event (topic, type, key) values ('t', 'y', 'prepared'); prepare transaction '{name}'"
    );
    blocker.batch_execute(&sql).await.unwrap();
    delivered_beside(&database, &blocker, &format!("commit prepared '{name}'")).await;
}

#[tokio::test]
async fn a_writer_that_aborted() {
    let database = Database::new().await;
    let blocker = database.client().await;
    blocker
        .batch_execute("begin; insert into pillarbox.event (topic, type) values ('t', 'y'); rollback")
        .await
        .unwrap();
    delivered_beside(&database, &blocker, "select 1").await;
}

/// A long reader holds the horizon of vacuum, and nothing of ours.
#[tokio::test]
async fn a_long_reader() {
    let database = Database::new().await;
    let blocker = database.client().await;
    blocker.batch_execute("begin isolation level repeatable read; select count(*) from pillarbox.event").await.unwrap();
    delivered_beside(&database, &blocker, "commit").await;
}

/// An idle writer holds its own position; what others abort after it is closed all the same, so that holes do not pile up.
#[tokio::test]
async fn what_others_abort_beside_an_idle_writer_is_closed() {
    let database = Database::new().await;
    let blocker = database.client().await;
    let name: String = blocker.query_one("select current_database()::text", &[]).await.unwrap().get(0);
    let sql = format!(
        "begin; insert into pillarbox.event (topic, type, key) values ('t', 'y', 'late'); prepare transaction '{name}'"
    );
    blocker.batch_execute(&sql).await.unwrap();
    let capture = Capture::new();
    let store = database.store().await;
    store.experiment_with_idle_writers(Duration::ZERO).await;
    let relay = relay_on(store, &capture).await;
    for round in 1..=20 {
        blocker
            .batch_execute("begin; insert into pillarbox.event (topic, type) values ('t', 'y'); rollback")
            .await
            .unwrap();
        database.publish_keys(&["a"]).await;
        arrive(&capture, round).await;
    }
    let closed = async {
        while database.number("select coalesce(sum(high - low + 1), 0)::bigint from pillarbox.dead_range").await < 15 {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, closed).await.is_ok(), "what was aborted waits for the idle writer");
    blocker.batch_execute(&format!("commit prepared '{name}'")).await.unwrap();
    arrive(&capture, 21).await;
    relay.drain().await.unwrap();
    let wrong = "select count(*) from pillarbox.event, pillarbox.dead_range where position between low and high";
    assert_eq!(database.number(wrong).await, 0, "what the idle writer held was not closed");
}

/// What a publisher did not wait for, or stopped waiting for, can be seen here and is lost with a failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_synchronous_standby_has_is_not_delivered() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let capture = Capture::new();
    let relay = relay(&database, &capture).await;
    database.publish_keys(&["a"]).await;
    arrive(&capture, 1).await;
    let require = |standby: &str| {
        server.psql("postgres", &format!("alter system set synchronous_standby_names = '{standby}'")).unwrap();
        server.psql("postgres", "select pg_reload_conf()").unwrap();
    };
    require("nobody");
    let (publisher, observer) = (database.client().await, database.client().await);
    let publish = "insert into pillarbox.event (topic, type, key) values ('t', 'y', 'b')";
    publisher.batch_execute(&format!("set synchronous_commit = local; {publish}")).await.unwrap();
    let held = "select count(*) from pg_stat_activity where application_name like '%reader' and wait_event = 'SyncRep'";
    until(&observer, held, 1).await;
    assert_eq!(capture.events().len(), 1);
    require("");
    arrive(&capture, 2).await;
    relay.drain().await.unwrap();
}
