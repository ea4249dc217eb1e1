//! Commits that are slow, that publishers do not wait for, or that are no longer waited for.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::engine::EngineConfig;
use pillarbox::store::{PollRequest, ScanRequest, Store};
use pillarbox::testing::Capture;
use pillarbox::{Delivery, Relay, RelayBuilder, RelayConfig, Subscription};
use pillarbox_postgres::{Mutant, PostgresStore};
use pillarbox_testkit::postgres::{Mode, Server};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::fixture::{Database, connect, poll_tail, tail};
use crate::ownership::until;
use crate::waking::{ASLEEP, KEEPER, listener, stands_still};

/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many publishers write at once where their commits are slow, and how many transactions each of them commits.
const PUBLISHERS: usize = 16;
const COMMITS: usize = 40;

fn builder(store: PostgresStore) -> RelayBuilder<PostgresStore> {
    let engine = EngineConfig { poll_interval: Duration::from_millis(200), ..EngineConfig::default() };
    Relay::builder(store).config(RelayConfig { engine, ..RelayConfig::default() })
}

async fn relay(database: &Database, capture: &Capture) -> Relay {
    let sink = Arc::new(capture.clone());
    builder(database.store().await).subscribe(Subscription::new("s"), sink).start().await.unwrap()
}

async fn arrive(capture: &Capture, count: usize) {
    let arrived = tokio::time::timeout(PATIENCE, capture.wait_for(count)).await;
    assert!(arrived.is_ok(), "only {} of {count} arrived", capture.events().len());
}

fn insert(key: &str) -> String {
    format!("insert into pillarbox.event (topic, type, key) values ('t', 'y', '{key}')")
}

/// Sessions that wait for a synchronous standby.
fn waiting(which: &str) -> String {
    format!("select count(*) from pg_stat_activity where wait_event = 'SyncRep' and {which}")
}

/// Makes commits wait for the standby; returns when they do, with the standby stopped.
async fn require_the_standby(primary: &Server, standby: &Server, observer: &Client) {
    standby.stop(Mode::Fast).unwrap();
    primary.psql("postgres", "alter system set synchronous_standby_names = '*'").unwrap();
    primary.psql("postgres", "select pg_reload_conf()").unwrap();
    let probe = connect(&primary.url("postgres")).await;
    let probes = tokio::spawn(async move {
        while probe.batch_execute("select pg_logical_emit_message(true, 'probe', '')").await.is_ok() {}
    });
    until(observer, &waiting("datname = 'postgres'"), 1).await;
    observer
        .batch_execute("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'")
        .await
        .unwrap();
    probes.await.unwrap();
}

/// Publishes, and cancels the wait for the standby: the event is committed and visible here, and may never reach the standby.
async fn publish_and_cancel(database: &Database, observer: &Client, key: &str) {
    let publisher = database.client().await;
    let pid: i32 = publisher.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let cancel = async {
        until(observer, &waiting(&format!("pid = {pid}")), 1).await;
        observer.execute("select pg_cancel_backend($1)", &[&pid]).await.unwrap();
    };
    let publish = insert(key);
    let (published, ()) = tokio::join!(publisher.batch_execute(&publish), cancel);
    published.unwrap();
    let count = format!("select count(*) from pillarbox.event where key = '{key}'");
    assert_eq!(database.number(&count).await, 1, "the event is visible");
}

/// The reader waits for the standby, is cancelled as its publisher was, and waits again.
async fn cancel_the_reader(observer: &Client) {
    let reader = "application_name like '%reader'";
    until(observer, &waiting(reader), 1).await;
    let cancelled = observer
        .query_one(
            &format!(
                "select query_start::text, pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep' and {reader}"
            ),
            &[],
        )
        .await
        .unwrap();
    let before: String = cancelled.get(0);
    until(observer, &waiting(&format!("{reader} and query_start > '{before}'")), 1).await;
}

/// [A9]: such an event is visible on the primary, and its position is used again after a failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_wait_for_the_standby_was_cancelled_is_delivered_only_when_the_standby_has_it() {
    let primary = Server::builder().start().unwrap();
    let database = Database::on(&primary).await;
    let standby = primary.standby().unwrap();
    let observer = database.client().await;
    let capture = Capture::new();
    let relay = relay(&database, &capture).await;
    database.publish_keys(&["a"]).await;
    arrive(&capture, 1).await;
    relay.until_idle().await.unwrap();

    require_the_standby(&primary, &standby, &observer).await;
    publish_and_cancel(&database, &observer, "b").await;
    for _ in 0..2 {
        cancel_the_reader(&observer).await;
        assert_eq!(capture.events().len(), 1, "the standby does not have it");
    }
    standby.start().unwrap();
    arrive(&capture, 2).await;
    relay.until_idle().await.unwrap();

    standby.stop(Mode::Fast).unwrap();
    publish_and_cancel(&database, &observer, "c").await;
    cancel_the_reader(&observer).await;
    primary.stop(Mode::Immediate).unwrap();
    relay.stop().await;
    standby.start().unwrap();
    standby.promote().unwrap();
    let name = database.url().rsplit('/').next().unwrap();
    let promoted = connect(&standby.url(name)).await;
    let rows = promoted.query("select id from pillarbox.event_view order by position", &[]).await.unwrap();
    let kept: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let delivered: Vec<Uuid> = capture.events().iter().map(|event| event.id).collect();
    assert_eq!(delivered, kept, "what was delivered is what the failover kept");
}

/// A server that writes asynchronous commits to disk only with a commit that waits for it, or with a full page.
fn lazy() -> Server {
    Server::builder().setting("wal_writer_delay", "10s").start().unwrap()
}

async fn asynchronous(database: &Database) -> Client {
    let publisher = database.client().await;
    // The log writer is also woken when a page of the write-ahead log is full: what follows lies in one.
    publisher.batch_execute("select pg_switch_wal(); set synchronous_commit = off").await.unwrap();
    publisher
}

/// [E10]: a commit of the relay for a page, whatever the page holds and however many subscriptions it is read for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_what_publishers_did_not_wait_for_costs_one_commit() {
    let server = lazy();
    let database = Database::on(&server).await;
    let store = database.store().await;
    let publisher = asynchronous(&database).await;
    for key in ["a", "b", "c", "d"] {
        publisher.batch_execute(&insert(key)).await.unwrap();
    }
    let before = store.barriers();
    let scans = [0, 1, 2].map(|after| ScanRequest { after, to: i64::MAX, limit: 100 });
    let page = store.poll(&PollRequest { scans: scans.into(), ..tail(0, 0) }).await.unwrap();
    assert_eq!(page.scans.iter().map(|scan| scan.events.len()).collect::<Vec<_>>(), [4, 3, 2]);
    assert_eq!(store.barriers() - before, 1);
}

/// The same where single events are read, for a delivery that is due: what was read, and what of it is there after the crash.
async fn fetch_before_a_crash(mutant: Option<Mutant>) -> [usize; 2] {
    let server = lazy();
    let database = Database::on(&server).await;
    let store = database.store().await;
    if mutant.is_some() {
        store.experiment(mutant, None).await;
    }
    let publisher = asynchronous(&database).await;
    publisher.batch_execute(&insert("a")).await.unwrap();
    let fetched = store.fetch(&[1]).await.unwrap();
    server.restart(Mode::Immediate).unwrap();
    let survived = poll_tail(&database.store().await, 0).await.events;
    [fetched.len(), survived.len()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_fetched_survives_a_crash_of_the_server() {
    assert_eq!(fetch_before_a_crash(None).await, [1, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_barrier_a_crash_takes_back_what_was_fetched() {
    assert_eq!(fetch_before_a_crash(Some(Mutant::NoBarrierAtAGlance)).await, [1, 0]);
}

/// [E10]: the server crashes at the moment at which an event is delivered, before the relay has written anything about it. How many events
/// were delivered, and how many of them are there after the crash.
async fn deliver_at_a_crash(mutant: Option<Mutant>) -> [usize; 2] {
    let server = Arc::new(lazy());
    let database = Database::on(&server).await;
    let store = database.store().await;
    if mutant.is_some() {
        store.experiment(mutant, None).await;
    }
    let (delivered, crashed) = (Arc::<Mutex<Vec<Uuid>>>::default(), Arc::new(Notify::new()));
    let (seen, told, crashing) = (delivered.clone(), crashed.clone(), server.clone());
    let handler = move |event: Delivery| {
        seen.lock().unwrap().push(event.id);
        tokio::task::block_in_place(|| crashing.stop(Mode::Immediate)).unwrap();
        told.notify_one();
        async { Ok(()) }
    };
    let relay = builder(store).handle(Subscription::new("s"), handler).start().await.unwrap();
    relay.until_idle().await.unwrap();
    // The relay may be faster than the answer to this.
    let _ = asynchronous(&database).await.batch_execute(&insert("a")).await;
    tokio::time::timeout(PATIENCE, crashed.notified()).await.unwrap();
    relay.stop().await;
    server.start().unwrap();
    let survived = poll_tail(&database.store().await, 0).await.events;
    let delivered = delivered.lock().unwrap();
    [delivered.len(), survived.iter().filter(|event| delivered.contains(&event.id)).count()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_delivered_survives_a_crash_of_the_server() {
    assert_eq!(deliver_at_a_crash(None).await, [1, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_barrier_a_crash_takes_back_what_was_delivered() {
    assert_eq!(deliver_at_a_crash(Some(Mutant::NoBarrier)).await, [1, 0]);
}

/// While others commit, a commit takes 20 ms more, and those that ring wait for each other.
fn slow() -> Server {
    let builder = Server::builder().durable().setting("commit_delay", 20_000).setting("commit_siblings", 1);
    builder.start().unwrap()
}

/// Publishes at once, each with this many commits, and a rollback after every fourth; how many of the commits rang.
async fn publish_at_once(database: &Database, commits: usize) -> usize {
    let (client, rings) = listener(database).await;
    let mut publishers = JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let client = database.client().await;
        publishers.spawn(async move {
            for round in 0..commits {
                client.batch_execute(&insert(&publisher.to_string())).await.unwrap();
                if round % 4 == 0 {
                    client.batch_execute(&format!("begin; {}; rollback", insert("r"))).await.unwrap();
                }
            }
        });
    }
    publishers.join_all().await;
    client.batch_execute("select 1").await.unwrap();
    let rung = *rings.lock().unwrap();
    rung as usize
}

/// [C4]: the relay has to stay awake, which ends the ringing; and what is rolled back meanwhile leaves holes, in which nothing that is
/// still being committed may be taken for dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_whose_commits_are_slow_do_not_go_on_ringing() {
    let server = slow();
    let database = Database::on(&server).await;
    let watcher = database.client().await;
    let capture = Capture::new();
    let relay = relay(&database, &capture).await;
    until(&watcher, ASLEEP, 1).await;
    let rung = publish_at_once(&database, COMMITS).await;
    assert!(rung <= PUBLISHERS * COMMITS / 4, "{rung} of {} commits rang", PUBLISHERS * COMMITS);
    arrive(&capture, PUBLISHERS * COMMITS).await;
    until(&watcher, ASLEEP, 1).await;
    relay.drain().await.unwrap();
    let wrong = "select count(*) from pillarbox.event, pillarbox.dead_range where position between low and high";
    assert_eq!(database.number(wrong).await, 0);
    assert_eq!(capture.events().len(), PUBLISHERS * COMMITS);
}

/// What the test above would find where the keeper never wakes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_ring_with_every_commit_while_the_keeper_sleeps() {
    const FEW: usize = 4;
    let server = slow();
    let database = Database::on(&server).await;
    let _asleep = stands_still(&database, &[KEEPER, 0]).await;
    assert_eq!(publish_at_once(&database, FEW).await, PUBLISHERS * FEW);
}
