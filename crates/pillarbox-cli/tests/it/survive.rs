use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::limit::PAYLOAD_BYTES_MAX;
use pillarbox::{Delivery, Event, Failure, Handler, Relay, RetryPolicy, Subscription};
use pillarbox_postgres::PostgresStore;
use pillarbox_sqlite::{SqliteStore, WAL_BYTES_MAX};
use rusqlite::ErrorCode;
use tokio::sync::{Semaphore, watch};

use crate::ledger::{Ledger, until};
use crate::place::{On, PATIENCE, Place, on_each, stderr};
use crate::sql::Sql;

const INSERT: &str = "insert into pillarbox_event (topic, key, type, payload) values ('t', ?1, 'y', ?2)";

/// Publishes one event a key, in one transaction.
fn publish(place: &Place, keys: &[&str]) {
    let event = |key: &&str| {
        format!("insert into pillarbox_event (topic, key, type, payload) values ('t', '{key}', 'y', '{{}}');")
    };
    let events: String = keys.iter().map(event).collect();
    place.sql().execute(&format!("begin; {events} commit"));
}

/// How often each key was handled, and a signal when that changes.
#[derive(Default)]
struct Calls {
    by_key: Mutex<HashMap<String, usize>>,
    total: watch::Sender<usize>,
}

impl Calls {
    fn note(&self, event: &Event) {
        *self.by_key.lock().unwrap().entry(event.key.as_deref().unwrap().to_owned()).or_default() += 1;
        self.total.send_modify(|total| *total += 1);
    }

    fn of(&self, key: &str) -> usize {
        self.by_key.lock().unwrap().get(key).copied().unwrap_or(0)
    }

    async fn wait_for(&self, met: impl Fn(&Calls) -> bool) {
        let mut total = self.total.subscribe();
        let waited = tokio::time::timeout(PATIENCE, total.wait_for(|_| met(self))).await;
        assert!(waited.is_ok(), "still {:?}", self.by_key.lock().unwrap());
    }
}

fn subscription(max_attempts: u32) -> Subscription {
    let retry = RetryPolicy { max_attempts, base: Duration::from_millis(1), jitter: false, ..RetryPolicy::handler() };
    Subscription { retry, ..Subscription::new("handler") }
}

/// A relay in this process.
pub(crate) async fn start(place: &Place, subscription: Subscription, handler: impl Handler) -> Relay {
    let started = match place.url().strip_prefix("sqlite:") {
        Some(file) => {
            let store = SqliteStore::open(place.path(file)).unwrap();
            Relay::builder(store).handle(subscription, handler).start().await
        }
        None => {
            let store = PostgresStore::open(place.url()).await.unwrap();
            Relay::builder(store).handle(subscription, handler).start().await
        }
    };
    started.unwrap()
}

/// The states and errors of the slow path, in log order.
fn deliveries(sql: &Sql) -> Vec<(String, String)> {
    let rows = sql.rows("select state, errors from pillarbox_delivery order by position");
    rows.into_iter().map(|mut row| (row[0].take().unwrap(), row[1].take().unwrap())).collect()
}

async fn a_handler_that_panics_is_a_failure_and_the_relay_lives(on: On) {
    let place = Place::new(on);
    let calls = Arc::new(Calls::default());
    let handler = {
        let calls = calls.clone();
        move |event: Delivery| {
            let calls = calls.clone();
            async move {
                calls.note(&event);
                assert_ne!(event.key.as_deref(), Some("bad"), "on purpose");
                Ok::<(), Failure>(())
            }
        }
    };
    publish(&place, &["bad", "good", "bad", "fine"]);
    let relay = start(&place, subscription(3), handler).await;
    calls.wait_for(|calls| calls.of("bad") == 3 && calls.of("good") == 1 && calls.of("fine") == 1).await;
    let sql = place.sql();
    until("the event is dead", || deliveries(&sql).iter().any(|(state, _)| state == "dead"));
    publish(&place, &["good"]);
    calls.wait_for(|calls| calls.of("good") == 2).await;
    assert!(relay.ready());
    relay.drain().await.unwrap();
    let found = deliveries(&sql);
    assert_eq!(found.len(), 2, "its key waits behind it: {found:?}");
    assert!(found[0].1.contains("\"panic\"") && found[0].1.contains("on purpose"), "{found:?}");
    assert_eq!(calls.of("bad"), 3);
}

/// Says when it is dropped: what a cancelled handler looks like from inside.
struct Cancelled(watch::Sender<usize>);

impl Drop for Cancelled {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count += 1);
    }
}

async fn a_handler_that_never_returns_is_cancelled_and_others_flow(on: On) {
    let place = Place::new(on);
    let calls = Arc::new(Calls::default());
    let cancelled = watch::Sender::new(0);
    let handler = {
        let (calls, cancelled) = (calls.clone(), cancelled.clone());
        move |event: Delivery| {
            let (calls, cancelled) = (calls.clone(), cancelled.clone());
            async move {
                calls.note(&event);
                if event.key.as_deref() == Some("stuck") {
                    let _guard = Cancelled(cancelled);
                    std::future::pending::<()>().await;
                }
                Ok::<(), Failure>(())
            }
        }
    };
    publish(&place, &["stuck", "a", "b", "stuck", "c"]);
    let mut subscription = subscription(1);
    subscription.workers = 2;
    subscription.processing_timeout = Duration::from_secs(3);
    let relay = start(&place, subscription, handler).await;
    let mut count = cancelled.subscribe();
    calls.wait_for(|calls| ["stuck", "a", "b", "c"].iter().all(|key| calls.of(key) == 1)).await;
    assert_eq!(*count.borrow(), 0, "the others waited for the time-out");
    tokio::time::timeout(PATIENCE, count.wait_for(|count| *count == 1)).await.expect("it is cancelled").unwrap();
    let sql = place.sql();
    until("the event is dead", || deliveries(&sql).iter().any(|(state, _)| state == "dead"));
    relay.drain().await.unwrap();
    let found = deliveries(&sql);
    assert_eq!(found.len(), 2, "its key waits behind it: {found:?}");
    assert!(found[0].1.contains("\"timeout\""), "{found:?}");
    assert_eq!((calls.of("stuck"), calls.of("a"), calls.of("b"), calls.of("c")), (1, 1, 1, 1));
}

async fn a_drain_in_the_middle_of_a_batch_repeats_nothing(on: On) {
    // More than fit into the batches of all workers.
    const EVENTS: usize = 1_000;
    let place = Place::new(on);
    let calls = Arc::new(Calls::default());
    let gate = Arc::new(Semaphore::new(0));
    let handler = {
        let (calls, gate) = (calls.clone(), gate.clone());
        move |event: Delivery| {
            let (calls, gate) = (calls.clone(), gate.clone());
            async move {
                calls.note(&event);
                gate.acquire().await.unwrap().forget();
                Ok::<(), Failure>(())
            }
        }
    };
    let keys: Vec<String> = (0..EVENTS).map(|number| format!("key-{number}")).collect();
    publish(&place, &keys.iter().map(String::as_str).collect::<Vec<_>>());
    let relay = start(&place, subscription(1), handler.clone()).await;
    // One is done, and its worker is inside the next: what follows is the middle of a batch.
    gate.add_permits(1);
    let workers = Subscription::new("x").workers;
    calls.wait_for(|calls| *calls.total.borrow() > workers).await;
    let drain = tokio::spawn(relay.drain());
    let report = "select count(*) from pillarbox_instance where report like '%\"draining\":true%'";
    let sql = place.sql();
    until("it is draining", || sql.number(report) == 1);
    assert!(!drain.is_finished(), "it waits for what is inside the handler");
    gate.add_permits(EVENTS);
    drain.await.unwrap().unwrap();
    let before = *calls.total.borrow();
    assert!(before < EVENTS, "nothing was left to do: {before}");
    let relay = start(&place, subscription(1), handler).await;
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    assert_eq!(*calls.total.borrow(), EVENTS, "lost or repeated");
    assert!(keys.iter().all(|key| calls.of(key) == 1));
}

fn sigterm_while_the_sink_writes_repeats_nothing(on: On) {
    const EVENTS: usize = 500;
    let place = Place::with_file_sink(on);
    let held = std::fs::File::create(place.path("out.ndjson")).unwrap();
    held.lock().unwrap();
    let keys: Vec<String> = (0..EVENTS).map(|number| format!("key-{}", number % 20)).collect();
    publish(&place, &keys.iter().map(String::as_str).collect::<Vec<_>>());
    let mut relay = place.start(&["run", "--listen", "off"]);
    let report = match on {
        On::Sqlite => "json_extract(report, '$.subscriptions.out.in_flight') > 0",
        On::Postgres => "(report::json #>> '{subscriptions,out,in_flight}')::bigint > 0",
    };
    let report = format!("select count(*) from pillarbox_instance where {report}");
    let sql = place.sql();
    until("a batch is at the sink", || sql.number(&report) == 1);
    relay.signal("-TERM");
    relay.wait_for("draining");
    held.unlock().unwrap();
    relay.wait_for("drained");
    assert_eq!(relay.end(), Some(0));
    let before = Ledger::new(&place, "out").arrivals();
    assert!(0 < before && before < EVENTS, "not in the middle: {before}");
    place.ok(&["run", "--until-idle"]);
    let verdict = Ledger::new(&place, "out").verdict();
    assert_eq!(verdict.received, EVENTS);
    verdict.assert_sound(0);
}

#[test]
fn a_full_disk_is_the_publishers_error_and_the_relay_goes_on() {
    let place = Place::with_file_sink(On::Sqlite);
    let mut relay = place.start(&["run", "--listen", "off"]);
    let sql = place.rusqlite();
    let pages: i64 = sql.query_row("pragma page_count", [], |row| row.get(0)).unwrap();
    sql.pragma_update(None, "max_page_count", pages + 20).unwrap();
    let payload = format!("\"{}\"", "x".repeat(5_000));
    let mut committed = 0;
    let error = loop {
        match sql.execute(INSERT, ("k", &payload)) {
            Ok(_) => committed += 1,
            Err(error) => break error,
        }
        assert!(committed < 1_000, "the disk is never full");
    };
    assert_eq!(error.sqlite_error_code(), Some(ErrorCode::DiskFull), "{error}");
    let mut ledger = Ledger::new(&place, "out");
    assert!(committed > 0);
    until("what was committed arrives", || ledger.arrivals() == committed);
    sql.pragma_update(None, "max_page_count", i64::from(u32::MAX - 1)).unwrap();
    sql.execute(INSERT, ("k", &payload)).unwrap();
    until("it goes on once there is room", || ledger.arrivals() == committed + 1);
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
    ledger.verdict().assert_sound(0);
}

/// A limit on the size of files is what a process sees of a disk on which nothing fits any more.
#[cfg(target_os = "linux")]
#[test]
fn a_relay_that_can_write_nothing_waits_and_goes_on_once_there_is_room() {
    const EVENTS: usize = 300;
    let place = Place::with_file_sink(On::Sqlite);
    // Without this the kernel ends a process that writes beyond the limit.
    let mut relay = place.start_after("trap '' XFSZ", &["run", "--listen", "off"]);
    let limit = |bytes: &str| {
        let pid = format!("--pid={}", relay.id());
        let status = std::process::Command::new("prlimit").args([&pid, &format!("--fsize={bytes}:")]).status();
        assert!(status.expect("prlimit is part of util-linux").success());
    };
    let mut ledger = Ledger::new(&place, "out");
    publish(&place, &["first"]);
    until("the first event is settled", || ledger.arrivals() == 1 && ledger.is_settled());
    limit("0");
    let keys: Vec<String> = (0..EVENTS).map(|number| format!("key-{}", number % 20)).collect();
    publish(&place, &keys.iter().map(String::as_str).collect::<Vec<_>>());
    let warning = relay.wait_for("the database did not take a call");
    assert!(warning.contains("disk"), "{warning}");
    limit("unlimited");
    until("it goes on once there is room", || ledger.arrivals() == EVENTS + 1 && ledger.is_settled());
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
    ledger.verdict().assert_sound(0);
}

fn a_payload_over_the_limit_by_plain_insert_stops_nobody_else(on: On) {
    let place = Place::with_file_sink(on);
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let sql = place.sql();
    let insert = |payload: &str| {
        format!("insert into pillarbox_event (topic, key, type, payload) values ('t', 'k', 'y', '{payload}')")
    };
    let over = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX - 1));
    let edge = format!("{}\"", &over[..over.len() - 2]);
    sql.execute(&format!("begin; {}; savepoint s", insert("1")));
    let error = sql.try_rows(&insert(&over)).unwrap_err();
    assert!(error.contains("payload_bytes_max"), "{error}");
    sql.execute(&format!("rollback to s; {}; commit", insert(&edge)));
    publish(&place, &["other"]);
    let mut ledger = Ledger::new(&place, "out");
    until("the others arrive", || ledger.arrivals() == 3);
    ledger.verdict().assert_sound(0);
}

#[test]
fn a_long_reader_is_warned_of_in_the_log_in_status_and_by_the_doctor() {
    let place = Place::with_file_sink(On::Sqlite);
    let reader = place.rusqlite();
    reader.execute_batch("begin; select count(*) from pillarbox_event").unwrap();
    let sql = place.rusqlite();
    sql.pragma_update(None, "synchronous", "off").unwrap();
    let payload = vec![b'x'; PAYLOAD_BYTES_MAX];
    for _ in 0..=WAL_BYTES_MAX / PAYLOAD_BYTES_MAX as u64 {
        sql.execute(INSERT, ("k", &payload)).unwrap();
    }
    // What every relay does from time to time.
    let output = place.command(&["prune", "--yes"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let log = stderr(&output);
    assert!(log.contains("WARN") && log.contains("long reading transaction"), "{log}");
    let output = place.command(&["status", "--check"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains("write-ahead log"), "{}", stderr(&output));
    let output = place.command(&["doctor", "--json"]).output().unwrap();
    let checks: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let check = checks.as_array().unwrap().iter().find(|check| check["name"] == "write-ahead log").unwrap();
    assert_eq!(check["level"], "failed", "{check}");
    reader.execute_batch("rollback").unwrap();
}

on_each!(
    sigterm_while_the_sink_writes_repeats_nothing,
    a_payload_over_the_limit_by_plain_insert_stops_nobody_else;
    a_handler_that_panics_is_a_failure_and_the_relay_lives,
    a_handler_that_never_returns_is_cancelled_and_others_flow,
    a_drain_in_the_middle_of_a_batch_repeats_nothing
);
