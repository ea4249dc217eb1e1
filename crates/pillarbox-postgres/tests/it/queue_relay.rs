//! Queues with whole relays: handlers that hang, panic or take long, and a relay that loses its network.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::engine::{EngineConfig, Recovery, RecoveryProfile};
use pillarbox::store::RecoveryCause;
use pillarbox::{Delivery, Failure, Mode, NewEvent, Relay, RelayConfig, RetryPolicy, Subscription, heartbeat};
use pillarbox_postgres::PostgresStore;
use pillarbox_testkit::postgres::Server;
use pillarbox_testkit::proxy::Proxy;
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;

use crate::fixture::Database;

const LEASE: Duration = Duration::from_secs(1);
const PULSE: Duration = Duration::from_millis(300);

fn queue() -> Subscription {
    let retry = RetryPolicy { base: Duration::from_millis(10), jitter: false, ..RetryPolicy::handler() };
    Subscription { mode: Mode::Queue, retry, ..Subscription::new("q") }
}

fn config() -> RelayConfig {
    RelayConfig { engine: EngineConfig { lease_ttl: LEASE, ..EngineConfig::default() }, ..RelayConfig::default() }
}

/// What a handler does when it is first called.
#[derive(Clone, Copy)]
enum First {
    Hangs,
    Panics,
}

/// Runs a handler whose first call goes wrong; what is kept of that while the second one runs.
async fn kept_of(first: First) -> (u32, String) {
    let database = Database::new().await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let (calls, may_end) = (Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
    let end = may_end.clone();
    let handler = move |_event: Delivery| {
        let (begun, calls, may_end) = (begun.clone(), calls.clone(), may_end.clone());
        async move {
            if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                match first {
                    First::Hangs => std::future::pending::<()>().await,
                    First::Panics => panic!("at its first call"),
                }
            }
            begun.send(()).unwrap();
            while tokio::time::timeout(PULSE / 10, may_end.acquire()).await.is_err() {
                heartbeat();
            }
            Ok::<(), Failure>(())
        }
    };
    let subscription = Subscription { heartbeat_timeout: Some(PULSE), ..queue() };
    let store = PostgresStore::open(database.url()).await.unwrap();
    let relay = Relay::builder(store).config(config()).handle(subscription, handler).start().await.unwrap();
    let id = database.publish(&[NewEvent::new("t", "y").key("k")]).await[0];
    begins.recv().await.unwrap();
    let kept = first_error(&database, id).await;
    end.add_permits(1);
    relay.until_idle().await.unwrap();
    assert_eq!(database.number("select count(*) from pillarbox.delivery").await, 0, "it ended well");
    relay.drain().await.unwrap();
    kept
}

async fn first_error(database: &Database, id: Uuid) -> (u32, String) {
    let record = database.store().await.show(id).await.unwrap().unwrap();
    let delivery = record.subscriptions[0].delivery.clone().unwrap();
    (delivery.attempts, delivery.errors[0].kind.clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_handler_is_cancelled_and_its_event_comes_again() {
    assert_eq!(kept_of(First::Hangs).await, (1, "timeout".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_panics_fails_its_event_and_nothing_else() {
    assert_eq!(kept_of(First::Panics).await, (1, "panic".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_shows_signs_of_life_is_not_cancelled() {
    let database = Database::new().await;
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let handler = move |_event: Delivery| {
        counted.fetch_add(1, Ordering::SeqCst);
        async {
            // What takes twice as long as it may be silent.
            let mut steps = tokio::time::interval(PULSE / 10);
            for _ in 0..20 {
                steps.tick().await;
                assert!(heartbeat(), "it is called in the handler's task");
            }
            Ok::<(), Failure>(())
        }
    };
    let subscription = Subscription { heartbeat_timeout: Some(PULSE), ..queue() };
    let store = PostgresStore::open(database.url()).await.unwrap();
    let relay = Relay::builder(store).config(config()).handle(subscription, handler).start().await.unwrap();
    database.publish(&[NewEvent::new("t", "y")]).await;
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

/// Tells when it is dropped.
struct Guard(mpsc::UnboundedSender<&'static str>);

impl Drop for Guard {
    fn drop(&mut self) {
        // Nobody may be listening any more.
        let _ = self.0.send("cancelled");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_without_network_cancels_its_handler_and_another_takes_its_event() {
    let database = Database::new().await;
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let (told, mut news) = mpsc::unbounded_channel();
    let far = told.clone();
    let handler = move |_event: Delivery| {
        let guard = Guard(far.clone());
        async move {
            guard.0.send("begun").unwrap();
            std::future::pending::<()>().await;
            drop(guard);
            Ok::<(), Failure>(())
        }
    };
    let store = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    let cut_off = Relay::builder(store).config(config()).handle(queue(), handler).start().await.unwrap();
    database.publish(&[NewEvent::new("t", "y").key("k")]).await;
    assert_eq!(news.recv().await, Some("begun"));
    while database.number("select count(*) from pillarbox.delivery where claim is not null").await == 0 {}
    let near = told.clone();
    let handler = move |_event: Delivery| {
        near.send("taken").unwrap();
        std::future::ready(Ok::<(), Failure>(()))
    };
    let relay = Relay::builder(database.store().await).config(config()).handle(queue(), handler).start().await.unwrap();
    relay.until_idle().await.unwrap();
    proxy.stall().unwrap();
    assert_eq!(news.recv().await, Some("cancelled"), "it stops by itself before its lease is over");
    assert_eq!(news.recv().await, Some("taken"));
    relay.until_idle().await.unwrap();
    let status = database.store().await.status().await.unwrap();
    let [recovered] = &status.subscriptions[0].recovered[..] else { panic!("{:?}", status.subscriptions[0].recovered) };
    // Whoever takes its lanes for its silence ends its sessions, which frees its lock.
    assert!(matches!(recovered.cause, RecoveryCause::Lease | RecoveryCause::Crash), "{recovered:?}");
    assert_eq!(recovered.count, 1);
    proxy.resume().unwrap();
    drop(cut_off);
    relay.drain().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn until_idle_waits_for_every_row_of_a_key() {
    const KEYS: usize = 200;
    const EACH: usize = 10;
    let database = Database::new().await;
    let handled = Arc::new(AtomicU32::new(0));
    let count = handled.clone();
    let handler = move |_event: Delivery| {
        count.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Ok::<(), Failure>(()))
    };
    let event = |number: usize| NewEvent::new("t", "y").key(format!("k{}", number % KEYS));
    database.publish(&(0..KEYS * EACH).map(event).collect::<Vec<_>>()).await;
    // Every event gets a row, and of a key one is worked on at a time.
    let recovery = Recovery { profile: RecoveryProfile::Conservative, ..Recovery::default() };
    let engine = EngineConfig { recovery, ..EngineConfig::default() };
    let config = RelayConfig { engine, ..RelayConfig::default() };
    let store = PostgresStore::open(database.url()).await.unwrap();
    let relay = Relay::builder(store).config(config).handle(queue(), handler).start().await.unwrap();
    relay.until_idle().await.unwrap();
    assert_eq!(handled.load(Ordering::SeqCst) as usize, KEYS * EACH);
    relay.drain().await.unwrap();
}
