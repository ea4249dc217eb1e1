//! Each cause that `why` knows, reached with a real relay on a real file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::admin::{Cause, Change, Operator, PrunePolicy, Why};
use pillarbox::engine::EngineConfig;
use pillarbox::store::Store;
use pillarbox::testing::{Capture, run_until_idle};
use pillarbox::{Failure, NewEvent, Relay, RelayBuilder, RelayConfig, RetryPolicy, Start, Subscription, Timestamp};
use pillarbox_sqlite::SqliteStore;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::fixture::{Database, hello, one_lane};

/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

const HOUR: Duration = Duration::from_secs(3600);

/// A subscription of one lane whose retries are far away.
fn subscription() -> Subscription {
    let retry = RetryPolicy { base: HOUR, cap: HOUR, jitter: false, ..RetryPolicy::handler() };
    Subscription { retry, ..one_lane("s") }
}

/// A relay that tells of itself often.
fn builder(database: &Database) -> RelayBuilder<SqliteStore> {
    builder_with(database, EngineConfig::default())
}

fn builder_with(database: &Database, engine: EngineConfig) -> RelayBuilder<SqliteStore> {
    let engine = EngineConfig { beat_interval: Duration::from_millis(20), ..engine };
    Relay::builder(database.store()).config(RelayConfig { engine, ..RelayConfig::default() })
}

async fn start(database: &Database, subscription: Subscription, sink: Capture) -> Relay {
    builder(database).subscribe(subscription, Arc::new(sink)).start().await.unwrap()
}

/// Delivers all that can be delivered and ends cleanly.
async fn deliver(database: &Database, subscription: Subscription, sink: Capture) {
    run_until_idle(builder(database).subscribe(subscription, Arc::new(sink))).await.unwrap();
}

/// Refuses events of this type.
fn refusing(r#type: &'static str, failure: Failure) -> Capture {
    Capture::refusing(move |event| (&*event.r#type == r#type).then(|| failure.clone()))
}

async fn why(operator: &SqliteStore, id: Uuid, subscription: &str) -> Why {
    let record = operator.show(id).await.unwrap().expect("the log has the event");
    let fate = record.subscriptions.iter().find(|fate| fate.subscription == subscription);
    pillarbox::admin::why(&record, fate.expect("the subscription is there"), &operator.status().await.unwrap())
}

/// Waits until the cause is `cause` and message and advice name each of `parts`: a relay may report before it has written its rows.
async fn check(database: &Database, id: Uuid, cause: Cause, parts: &[&str]) {
    check_of(database, id, "s", cause, parts).await;
}

async fn check_of(database: &Database, id: Uuid, subscription: &str, cause: Cause, parts: &[&str]) {
    let (operator, deadline) = (database.store(), Instant::now() + PATIENCE);
    loop {
        let found = why(&operator, id, subscription).await;
        let more = [&found.advice, &found.detail].map(|text| text.clone().unwrap_or_default());
        let text = format!("{} {}", found.message, more.join(" "));
        if found.cause == cause && parts.iter().all(|part| text.contains(part)) {
            return;
        }
        assert!(Instant::now() < deadline, "not {cause:?} with {parts:?}, but {found:?}");
        tokio::task::yield_now().await;
    }
}

/// A handler that never returns, and tells when it was called.
fn hanging(called: &Arc<Notify>) -> impl pillarbox::Handler {
    let called = called.clone();
    move |_| {
        called.notify_one();
        std::future::pending()
    }
}

#[test]
fn no_cause_is_forgotten() {
    for cause in Cause::ALL {
        let test = format!("async fn {}()", cause.name());
        assert!(include_str!("why.rs").contains(&test), "there is no `{test}`");
    }
}

#[tokio::test]
async fn delivered() {
    let database = Database::new();
    let id = database.publish_keys(&["a"])[0];
    deliver(&database, subscription(), Capture::new()).await;
    check(&database, id, Cause::Delivered, &["it was delivered by ", "settled by lane 0 in epoch 1 between"]).await;
}

#[tokio::test]
async fn not_matched() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("billing", "invoice.sent")])[0];
    deliver(&database, subscription().topics(["orders"]), Capture::new()).await;
    check(&database, id, Cause::NotMatched, &["'billing'", "'invoice.sent'"]).await;
}

#[tokio::test]
async fn before_start() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "b"]);
    deliver(&database, Subscription { start: Start::Now, ..subscription() }, Capture::new()).await;
    check(&database, ids[1], Cause::BeforeStart, &["position 2", "pillarbox rewind s --to 1"]).await;
}

#[tokio::test]
async fn behind_key_head() {
    let database = Database::new();
    let events = ["bad", "good"].map(|r#type| NewEvent::new("t", r#type).key("k"));
    let ids = database.publish(&events);
    let _relay = start(&database, subscription(), refusing("bad", Failure::event("no"))).await;
    let head = format!("event {} of its key (position 1), which is retrying", ids[0]);
    check(&database, ids[1], Cause::BehindKeyHead, &[&head, &format!("pillarbox why {}", ids[0])]).await;
}

#[tokio::test]
async fn retry_at() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    let _relay = start(&database, subscription(), refusing("bad", Failure::event("the total is negative"))).await;
    check(&database, id, Cause::RetryAt, &["attempt 1 of ", "next try at", "the total is negative"]).await;
}

#[tokio::test]
async fn sink_down() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    let refused = Failure { retry_after: Some(HOUR), ..Failure::sink("broker.example:9092 refused the connection") };
    let _relay = start(&database, subscription(), refusing("bad", refused)).await;
    check(&database, id, Cause::SinkDown, &["broker.example:9092 refused", "next try at"]).await;
}

#[tokio::test]
async fn paused() {
    let database = Database::new();
    let capture = Capture::new();
    let relay = start(&database, subscription(), capture.clone()).await;
    database.store().change(&Change::pause("s"), false).await.unwrap();
    // Until the relay has seen it, it may deliver.
    relay.until_idle().await.unwrap();
    let id = database.publish_keys(&["a"])[0];
    check(&database, id, Cause::Paused, &["an operator paused", "pillarbox resume s"]).await;
}

#[tokio::test]
async fn flood_guard() {
    let database = Database::new();
    let bad = |key: usize| NewEvent::new("t", "bad").key(format!("k{key}"));
    let ids = database.publish(&(0..pillarbox::limit::FLOOD_KEYS).map(bad).collect::<Vec<_>>());
    let _relay = start(&database, subscription(), refusing("bad", Failure::event("no such column"))).await;
    check(&database, ids[0], Cause::FloodGuard, &["a bad deploy is suspected", "next try at"]).await;
}

#[tokio::test]
async fn no_owner() {
    let database = Database::new();
    let called = Arc::new(Notify::new());
    let relay = builder(&database).handle(subscription(), hanging(&called)).start().await.unwrap();
    let id = database.publish_keys(&["a"])[0];
    called.notified().await;
    drop(relay);
    check(&database, id, Cause::NoOwner, &["no living instance runs the subscription", "start a relay"]).await;
    // Another one could run it and has not looked yet.
    let other = database.store();
    other.join(hello([subscription()])).await.unwrap();
    check(&database, id, Cause::NoOwner, &["instance 1, which owns its lane 0, is gone"]).await;
    drop(other);
    deliver(&database, subscription(), Capture::new()).await;
    let id = database.publish_keys(&["b"])[0];
    let other = database.store();
    other.join(hello([subscription()])).await.unwrap();
    check(&database, id, Cause::NoOwner, &["its lane 0 has no owner"]).await;
}

#[tokio::test]
async fn delayed() {
    let database = Database::new();
    let until = Timestamp::now().plus(HOUR);
    let id = database.publish(&[NewEvent::new("t", "y").deliver_at(until)])[0];
    let relay = start(&database, subscription(), Capture::new()).await;
    relay.until_idle().await.unwrap();
    check(&database, id, Cause::Delayed, &[&format!("not to be delivered before {until}")]).await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery where state = 'delayed'"), 1);
}

#[tokio::test]
async fn dead() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    let _relay = start(&database, subscription(), refusing("bad", Failure::permanent("no such customer"))).await;
    let advice = format!("pillarbox requeue --subscription s --event {id}");
    check(&database, id, Cause::Dead, &["after 1 attempt;", "no such customer", &advice]).await;
}

#[tokio::test]
async fn skipped() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    deliver(&database, subscription(), refusing("bad", Failure::permanent("no"))).await;
    let skip = Change::Skip { subscription: "s".into(), event: id, reason: "a test order of QA".into() };
    database.store().change(&skip, false).await.unwrap();
    check(&database, id, Cause::Skipped, &["an operator gave it up", "a test order of QA"]).await;
}

#[tokio::test]
async fn pruned() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    // Kept aside for the subscription that it is dead for; gone for one that is made later.
    deliver(&database, subscription(), refusing("bad", Failure::permanent("no"))).await;
    let policy = PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() };
    let (operator, deadline) = (database.store(), Instant::now() + PATIENCE);
    while operator.prune(&policy).await.unwrap().events == 0 {
        assert!(Instant::now() < deadline, "the event does not grow older");
    }
    deliver(&database, Subscription { name: "late".into(), ..subscription() }, Capture::new()).await;
    check_of(&database, id, "late", Cause::Pruned, &["the log begins at position 2"]).await;
    check(&database, id, Cause::Dead, &[]).await;
}

#[tokio::test]
async fn stopped() {
    let database = Database::new();
    database.publish(&[NewEvent::new("t", "bad").key("k")]);
    let sink = Arc::new(refusing("bad", Failure::event("no")));
    let engine = EngineConfig { parked_max: 1, ..EngineConfig::default() };
    let relay = builder_with(&database, engine).subscribe(subscription(), sink).start().await.unwrap();
    relay.until_idle().await.unwrap();
    let id = database.publish(&[NewEvent::new("t", "good").key("other")])[0];
    check(&database, id, Cause::Stopped, &["1 key is failing", "max_parked", "key 'k'"]).await;
}

#[tokio::test]
async fn processing() {
    let database = Database::new();
    let id = database.publish_keys(&["a"])[0];
    let called = Arc::new(Notify::new());
    // Two instances end while they work on the event; the third one writes its attempt down before it begins.
    for _ in 0..2 {
        let relay = builder(&database).handle(subscription(), hanging(&called)).start().await.unwrap();
        called.notified().await;
        drop(relay);
    }
    let relay = builder(&database).handle(subscription(), hanging(&called)).start().await.unwrap();
    called.notified().await;
    let by = format!("it is being delivered by instance {} on lane 0", relay.instance().0);
    check(&database, id, Cause::Processing, &[&by]).await;
}

#[tokio::test]
async fn pending() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "a"]);
    let called = Arc::new(Notify::new());
    let _relay = builder(&database).handle(subscription(), hanging(&called)).start().await.unwrap();
    called.notified().await;
    check(&database, ids[1], Cause::Pending, &["by instance 1 on lane 0"]).await;
}

#[tokio::test]
async fn a_filter_that_changed_while_a_relay_ran_skips_nothing_and_everybody_says_so() {
    let database = Database::new();
    pillarbox_testkit::check_widened_filter([database.store(), database.store(), database.store()]).await;
}

#[tokio::test]
async fn not_recorded() {
    let database = Database::new();
    let id = database.publish_keys(&["a"])[0];
    deliver(&database, subscription(), Capture::new()).await;
    check(&database, id, Cause::Delivered, &[]).await;
    // As after very many changes of the filter.
    let forgotten = r#"[{"definition":1,"filter":null,"until":0,"passed":["1-9"]}]"#;
    database.execute(&format!("update pillarbox_subscription set former_filters = '{forgotten}'"));
    check(&database, id, Cause::NotRecorded, &["not recorded any more"]).await;
}

#[tokio::test]
async fn what_retention_gave_up_is_not_said_of_an_operator() {
    let database = Database::new();
    let id = database.publish(&[NewEvent::new("t", "bad")])[0];
    deliver(&database, subscription(), refusing("bad", Failure::permanent("no"))).await;
    let policy = PrunePolicy { keep: None, dead: Some(Duration::ZERO), ..PrunePolicy::default() };
    let (operator, deadline) = (database.store(), Instant::now() + PATIENCE);
    while operator.prune(&policy).await.unwrap().dead == 0 {
        assert!(Instant::now() < deadline, "the delivery does not grow older");
    }
    check(&database, id, Cause::Pruned, &["retention gave it up", "retention.dead"]).await;
}

#[tokio::test]
async fn in_dead_range() {
    let database = Database::new();
    database.publish_keys(&["a"]);
    // A publisher who chooses positions, which nothing but SQLite allows, leaves a gap and fills it when it is closed.
    let insert = |position: i64, id: Uuid| {
        let sql = "insert into pillarbox_event (position, id, topic, type) values (?1, ?2, 't', 'y')";
        database.connect().execute(sql, (position, id.to_string())).unwrap();
    };
    insert(9, Uuid::now_v7());
    let relay = start(&database, subscription(), Capture::new()).await;
    relay.until_idle().await.unwrap();
    let late = Uuid::now_v7();
    insert(5, late);
    check(&database, late, Cause::InDeadRange, &["position 5 had been closed as dead", "pillarbox audit"]).await;
}
