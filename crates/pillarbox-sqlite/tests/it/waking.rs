use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::engine::EngineConfig;
use pillarbox::store::{Store, Wake};
use pillarbox::testing::Capture;
use pillarbox::{NewEvent, Relay, RelayConfig};
use pillarbox_sqlite::{commit, publish};

use crate::fixture::{Database, join, one_lane, own, poll_tail, settle, write};

/// Far longer than any of these tests; reached only if a wake-up is lost.
const LONG: Duration = Duration::from_secs(20);

/// So long that it cannot be what ended a wait.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Long enough for a false wake-up to show.
const SHORT: Duration = Duration::from_millis(150);

#[tokio::test]
async fn a_commit_before_the_wait_counts_until_a_poll_has_seen_it() {
    let database = Database::new();
    let store = database.store();
    database.publish_keys(&["a"]);
    assert_eq!(store.wait(Duration::ZERO).await.unwrap(), Wake::Rang);
    assert_eq!(store.wait(LONG).await.unwrap(), Wake::Rang, "nobody has polled");
    poll_tail(&store, 0).await;
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
    assert_eq!(store.wait(Duration::ZERO).await.unwrap(), Wake::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_during_the_wait_rings() {
    let database = Database::new();
    let store = database.store();
    for round in 0..20 {
        let publisher = async {
            tokio::task::yield_now().await;
            let mut connection = database.connect();
            let tx = connection.transaction().unwrap();
            match round % 2 {
                0 => drop(publish(&tx, &NewEvent::new("t", "y")).unwrap()),
                _ => drop(tx.execute("insert into pillarbox_event (topic, type) values ('t', 'y')", []).unwrap()),
            }
            // In every order: who commits in one way may commit in the other.
            match round % 3 {
                0 => tx.commit().unwrap(),
                _ => commit(tx).unwrap(),
            }
        };
        let (wake, ()) = tokio::join!(store.wait(LONG), publisher);
        assert_eq!(wake.unwrap(), Wake::Rang);
        poll_tail(&store, 0).await;
    }
}

#[tokio::test]
async fn a_commit_without_new_events_does_not_ring() {
    let database = Database::new();
    let store = database.store();
    let mut connection = database.connect();
    let tx = connection.transaction().unwrap();
    publish(&tx, &NewEvent::new("t", "y")).unwrap();
    tx.rollback().unwrap();
    let tx = connection.transaction().unwrap();
    tx.execute_batch("create table business (x); insert into business values (1)").unwrap();
    commit(tx).unwrap();
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
}

/// Names the database in the second run of a test, which only publishes.
const PUBLISH_TO: &str = "PILLARBOX_TEST_PUBLISH_TO";

/// Publishes one event by plain INSERT from a process of its own.
async fn publish_elsewhere(database: &Database) {
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "waking::a_commit_of_another_process_rings"]).env(PUBLISH_TO, &database.path);
    let output = tokio::task::spawn_blocking(move || again.output()).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_another_process_rings() {
    if let Some(path) = std::env::var_os(PUBLISH_TO) {
        let connection = rusqlite::Connection::open(path).unwrap();
        connection.busy_timeout(LONG).unwrap();
        connection.execute("insert into pillarbox_event (topic, type) values ('t', 'y')", []).unwrap();
        return;
    }
    let database = Database::new();
    let store = database.store();
    poll_tail(&store, 0).await;
    let (wake, ()) = tokio::join!(store.wait(WATCHDOG), publish_elsewhere(&database));
    assert_eq!(wake.unwrap(), Wake::Rang);

    // The same with a whole relay, whose watchdog comes too late to be the one who found the event.
    let capture = Capture::new();
    let engine = EngineConfig { poll_interval: WATCHDOG, ..EngineConfig::default() };
    let relay = Relay::builder(database.store())
        .config(RelayConfig { engine, ..RelayConfig::default() })
        .subscribe(one_lane("s"), Arc::new(capture.clone()))
        .start()
        .await
        .unwrap();
    relay.until_idle().await.unwrap();
    assert_eq!(capture.events().len(), 1);
    let asleep = Instant::now();
    tokio::join!(capture.wait_for(2), publish_elsewhere(&database));
    assert!(asleep.elapsed() < WATCHDOG / 2, "{:?}", asleep.elapsed());
    relay.drain().await.unwrap();
}

#[tokio::test]
async fn a_store_does_not_wake_itself() {
    let database = Database::new();
    let store = database.store();
    database.publish_keys(&["a", "b"]);
    let (lane, epoch) = own(&store, "s").await;
    poll_tail(&store, 0).await;
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout, "joining and taking were its own doing");
    assert!(settle(&store, write(lane, epoch, 2)).await);
    store.observe(&Default::default()).await.unwrap();
    database.execute("create table business (x); insert into business values (1)");
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
}

#[tokio::test]
async fn an_operators_change_rings_until_it_was_observed() {
    use pillarbox::admin::{Change, Operator};
    let database = Database::new();
    let store = database.store();
    join(&store, [one_lane("s")]).await;
    store.observe(&Default::default()).await.unwrap();
    database.store().change(&Change::pause("s"), false).await.unwrap();
    assert_eq!(store.wait(LONG).await.unwrap(), Wake::Rang);
    let fleet = store.observe(&Default::default()).await.unwrap();
    assert!(fleet.subscriptions[0].paused);
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_another_instance_rings() {
    let database = Database::new();
    let (store, other) = (database.store(), database.store());
    join(&store, [one_lane("s")]).await;
    own(&other, "s").await;
    store.observe(&Default::default()).await.unwrap();
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
    let end = async {
        tokio::task::yield_now().await;
        drop(other);
        Instant::now()
    };
    let (wake, ended) = tokio::join!(store.wait(LONG), end);
    assert_eq!(wake.unwrap(), Wake::Rang);
    assert!(ended.elapsed() < Duration::from_secs(2), "{:?}", ended.elapsed());
}
