//! Real writers that do everything that writers do, real relays that are killed meanwhile, and an auditor that shares nothing
//! with the engine.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::engine::EngineConfig;
use pillarbox::testing::Capture;
use pillarbox::{Relay, RelayConfig, RetryPolicy, Subscription};
use pillarbox_postgres::{Mutant, PostgresStore};
use pillarbox_testkit::{Committed, Verdict};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::fixture::Database;
use crate::ownership::until;

const WRITERS: usize = 12;
/// Transactions of each writer.
const TRANSACTIONS: usize = 120;
/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(120);

/// A small generator: a run can be repeated as far as threads can be.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// What one writer does in one transaction. Its keys are its own, so that the order of positions is that of its commits.
async fn transaction(client: &Client, writer: usize, number: usize, dice: &mut Dice) {
    let insert = |rows: u64| {
        format!(
            "insert into pillarbox.event (topic, key, type, payload)
             select 't' || n % 3, 'writer-{writer}-' || n % 4, 'y', json_build_object('n', n) from generate_series(1, {rows}) as n;"
        )
    };
    let sync = if dice.roll(2) == 0 { "on" } else { "off" };
    let begin = format!("begin; set local synchronous_commit = {sync};");
    let (one, many) = (insert(1), insert(1 + dice.roll(12)));
    let sql = match dice.roll(10) {
        0 => format!("{begin} {one} rollback"),
        1 => format!("{begin} {one} savepoint s; {many} rollback to s; {one} commit"),
        2 => format!("{begin} savepoint s; {many} release s; {one} commit"),
        3 => format!("{begin} {one} select pg_sleep({}); {many} commit", dice.roll(60) as f64 / 1000.0),
        4 => format!("{begin} {many} select pg_sleep({}); rollback", dice.roll(40) as f64 / 1000.0),
        5 => {
            let name = format!("{writer}-{number}-{}", Uuid::new_v4());
            let end = if dice.roll(3) == 0 { "rollback" } else { "commit" };
            format!("{begin} {many} prepare transaction '{name}'; {end} prepared '{name}'")
        }
        6 => format!("{begin} {many} select 1/0"),
        7 => format!("select pillarbox.publish(topic => 't1', type => 'y', key => 'writer-{writer}-1')"),
        _ => format!("{begin} {many} commit"),
    };
    // An error inside is one of the things that writers do.
    if client.batch_execute(&sql).await.is_err() {
        client.batch_execute("rollback").await.unwrap();
    }
}

async fn write(database: Arc<Database>, writer: usize, seed: u64) {
    let client = database.client().await;
    let mut dice = Dice(seed * 1_000 + writer as u64 + 1);
    for number in 0..TRANSACTIONS {
        transaction(&client, writer, number, &mut dice).await;
    }
}

async fn start(database: &Database, capture: &Capture, mutant: Option<Mutant>) -> Relay {
    let store = database.store().await;
    if mutant.is_some() {
        store.experiment(mutant, None).await;
    }
    builder(store, capture).start().await.unwrap()
}

fn builder(store: PostgresStore, capture: &Capture) -> pillarbox::RelayBuilder<PostgresStore> {
    let engine = EngineConfig {
        poll_interval: Duration::from_millis(100),
        lease_ttl: Duration::from_secs(2),
        beat_interval: Duration::from_millis(200),
        ..EngineConfig::default()
    };
    let sink = Arc::new(capture.clone());
    let retry = RetryPolicy { base: Duration::from_millis(1), cap: Duration::from_millis(10), ..RetryPolicy::sink() };
    Relay::builder(store)
        .config(RelayConfig { engine, ..RelayConfig::default() })
        .subscribe(Subscription { retry, ..Subscription::new("all") }, sink)
}

/// Two relays; one after the other is dropped as a crash drops it, or loses its backends.
async fn harass(
    database: Arc<Database>,
    capture: Capture,
    mutant: Option<Mutant>,
    done: Arc<AtomicBool>,
) -> Vec<Relay> {
    let mut relays = vec![start(&database, &capture, mutant).await, start(&database, &capture, mutant).await];
    let client = database.client().await;
    let mut dice = Dice(7);
    let mut arrived = 0;
    while !done.load(Ordering::Relaxed) {
        // Something has to be delivered between two blows.
        let more = tokio::time::timeout(Duration::from_secs(1), capture.wait_for(arrived + 50)).await;
        arrived = more.map_or(arrived, |events| events.len());
        match dice.roll(3) {
            0 => {
                drop(relays.remove(0));
                relays.push(start(&database, &capture, mutant).await);
            }
            1 => {
                let sql =
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()
                    and application_name like 'pillarbox relay%' and random() < 0.3";
                client.execute(sql, &[]).await.unwrap();
            }
            _ => {}
        }
    }
    relays
}

async fn committed(database: &Database) -> Vec<Committed> {
    let sql = "select id, key, position from pillarbox.event_view";
    let rows = database.client().await.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| Committed { id: row.get(0), key: row.get(1), position: row.get(2) }).collect()
}

async fn come_to_rest(relays: &[Relay]) {
    for relay in relays {
        let idle = tokio::time::timeout(PATIENCE, relay.until_idle()).await;
        assert!(idle.is_ok(), "the relays did not come to rest");
    }
}

/// Runs everything; the verdict, and how many rows lie inside what was closed.
async fn run(mutant: Option<Mutant>, seed: u64) -> (Verdict, i64) {
    let database = Arc::new(Database::new().await);
    let capture = Capture::new();
    let done = Arc::new(AtomicBool::new(false));
    let relays = tokio::spawn(harass(database.clone(), capture.clone(), mutant, done.clone()));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        writers.spawn(write(database.clone(), writer, seed));
    }
    while let Some(writer) = writers.join_next().await {
        writer.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    let relays = relays.await.unwrap();
    come_to_rest(&relays).await;
    if mutant.is_none() {
        // A relay that joins again after the last blow may give lanes to one that was found at rest before; and an attempt that was
        // cut off while its lane was careful is made again in a moment.
        until(&database.client().await, "select count(*) from pillarbox.delivery", 0).await;
        come_to_rest(&relays).await;
    }
    let wrongly_closed =
        "select count(*) from pillarbox.event, pillarbox.dead_range where position between low and high";
    let wrongly_closed = database.number(wrongly_closed).await;
    for relay in relays {
        let _ = tokio::time::timeout(PATIENCE, relay.drain()).await;
    }
    let received: Vec<Uuid> = capture.events().iter().map(|event| event.id).collect();
    (Verdict::of(&committed(&database).await, &received), wrongly_closed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_invented_closed_or_out_of_order() {
    let (verdict, wrongly_closed) = run(None, 1).await;
    println!("{verdict:?}");
    assert!(verdict.committed > WRITERS * TRANSACTIONS, "only {} events", verdict.committed);
    assert!(verdict.is_sound(), "{verdict:?}");
    assert_eq!(wrongly_closed, 0);
}
