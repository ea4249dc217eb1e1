//! What operations cost as a log grows, in steps of SQLite's virtual machine.

use pillarbox::store::RangeSet;
use pillarbox::{Delivery, Failure, NewEvent, Position, Timestamp};
use pillarbox_sqlite::{SqliteStore, Transactional, accept, counted, publish};
use pillarbox_testkit::growth::{
    BEYOND, Dimension, EVENTS, FACTOR, Ground, OLD, OLD_AGE, OTHER_INSTANCE, PASSED_AGE, Point, SEEDED, SMALL, STEADY,
    TAIL, Work, call_about_many, create, former_filters, judge, judge_steady, measure, measure_beyond, measure_steady,
};
use rusqlite::Transaction;
use tokio::sync::Mutex;

use crate::fixture::Database;

/// Steps of the virtual machine that count as one: about what one row takes to be looked at.
const STEPS: u64 = 10;

/// There is one count in a process.
static ALONE: Mutex<()> = Mutex::const_new(());

struct Log {
    database: Database,
    store: SqliteStore,
    transact: Transactional,
}

impl Ground for Log {
    type Store = SqliteStore;
    type Transact = Transactional;

    fn store(&self) -> &SqliteStore {
        &self.store
    }

    async fn another_store(&self) -> SqliteStore {
        self.database.store()
    }

    fn transact(&self) -> &Transactional {
        &self.transact
    }

    async fn begin(&self) {
        counted::take();
    }

    async fn work(&self) -> Work {
        let mut counted: Vec<_> = counted::take().into_iter().collect();
        counted.sort_by_key(|(_, counted)| -counted.steps);
        // For whoever looks for what broke a promise.
        for (sql, counted) in counted.iter().take(2) {
            eprintln!("    {} x {} {:.200}", counted.runs, counted.steps, sql.replace('\n', " "));
        }
        let statements = counted.iter().map(|(_, counted)| counted.runs).sum();
        let steps: i64 = counted.iter().map(|(_, counted)| counted.steps).sum();
        Work { statements, steps: steps.max(0) as u64 / STEPS }
    }
}

impl Log {
    async fn new(dimension: Dimension, size: usize) -> Log {
        let database = Database::new();
        let count = dimension.count(size);
        create(&database.store(), dimension).await;
        let now = Timestamp::now().0;
        let values = [
            ("$events", EVENTS.to_string()),
            ("$first", (EVENTS - SEEDED).to_string()),
            ("$tail", TAIL.to_string()),
            ("$other", OTHER_INSTANCE.0.to_string()),
            ("$old_at", (now - OLD_AGE.as_millis() as i64).to_string()),
            ("$passed_at", (now - PASSED_AGE.as_millis() as i64).to_string()),
            ("$old", OLD.to_string()),
            ("$now", now.to_string()),
            ("$settled", settled(dimension, count).to_string()),
            ("$n", count.to_string()),
            ("$formers", former_filters(Dimension::FormerFilters.count(size))),
        ];
        let sql = [NUMBERS, SEED, grow(dimension), END].join(";\n");
        database.execute(&values.iter().fold(sql, |sql, (name, value)| sql.replace(name, value)));
        counted::count(&database.path);
        let transact = Transactional::new(&database.path, handle).unwrap();
        Log { store: database.store(), transact, database }
    }
}

fn handle(transaction: &Transaction<'_>, event: Delivery) -> Result<(), Failure> {
    assert!(accept(transaction, "consumer", event.id).unwrap());
    publish(transaction, &NewEvent::new("handled", "y")).unwrap();
    Ok(())
}

/// What the stream has settled above its floor.
fn settled(dimension: Dimension, count: usize) -> RangeSet {
    let first = (EVENTS - SEEDED) as Position;
    match dimension {
        Dimension::Holes => {
            (1..=count as Position).map(|number| first - 2 * number + 1..=first - 2 * number + 1).collect()
        }
        _ => RangeSet::from_iter([(OLD + 10) as Position..=EVENTS as Position]),
    }
}

/// The numbers from 1 on, as many as any other statement needs.
const NUMBERS: &str = "
    create temp table number (g integer primary key);
    with recursive more (g) as (select 1 union all select g + 1 from more where g < max($n, $events))
    insert into number select g from more";

/// A little of everything: events that all have passed, and rows of the queue at the last of them. Half of what can be claimed has a key,
/// and another row of that key behind it. A few deliveries have been dead for long.
const SEED: &str = "
    insert into pillarbox_event (topic, key, type, payload, created_at)
    select 't', 'k' || g, 'y', '{}', case when g <= $old then $old_at else $passed_at end from number where g <= $events;
    update pillarbox_cursor set floor = $events;
    update pillarbox_subscription set paused = 1, paused_by = 'operator' where name = 'idle';
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, ready_at)
    select s.id, $first + g, 0, $first + g, case when g % 2 = 0 then 'c' || ((g - 1) / 4) end, 'pending', 0, $now, $now,
        case when g % 4 <> 0 then $now - 60000 + g end
    from pillarbox_subscription as s, number
    where s.name = 'queue' and g <= 300;
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, $first + 301, 0, $first + 301, 'seed', 'dead', 3, $now, $now, $now
    from pillarbox_subscription as s where s.name = 'queue'
    union all
    select s.id, $first + 302, 0, $first + 302, 'seed', 'delayed', 0, $now + 86400000, $now, null
    from pillarbox_subscription as s where s.name = 'queue';
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, $first + 302 + g, 0, $first + 302 + g, 'long ' || g, 'dead', 3, $passed_at, $passed_at, $passed_at
    from pillarbox_subscription as s, number where s.name in ('queue', 'stream') and g <= 10";

/// The end of the log: an event that all have settled, and some that nobody has read.
const END: &str = "
    insert into pillarbox_event (topic, key, type, payload) values ('t', 'last', 'y', '{}');
    update pillarbox_cursor set floor = (select max(position) from pillarbox_event) where floor >= $events;
    insert into pillarbox_event (topic, key, type, payload) select 't', 'u' || g, 'y', '{}' from number where g <= $tail;
    update pillarbox_cursor set floor = (select max(position) from pillarbox_event)
    where subscription in (select id from pillarbox_subscription where name like 'other %');
    update pillarbox_cursor set anchor_position = (
        select max(position) from pillarbox_event
        where position <= case when settled = '' then floor else $events end
    );
    update pillarbox_cursor set anchor_id = (select id from pillarbox_event where position = anchor_position)";

/// What makes a ground have more of something.
fn grow(dimension: Dimension) -> &'static str {
    match dimension {
        Dimension::Log => LOG,
        Dimension::Records => RECORDS,
        Dimension::Dead => DEAD,
        Dimension::DeadHeads => DEAD_HEADS,
        Dimension::DeadKeys => DEAD_KEYS,
        Dimension::Delayed => DELAYED,
        Dimension::Due => DUE,
        Dimension::DuePairs => DUE_PAIRS,
        Dimension::Waiting => WAITING,
        Dimension::Pairs => PAIRS,
        Dimension::Claims => CLAIMS,
        Dimension::Working => WORKING,
        Dimension::DeadRanges => DEAD_RANGES,
        Dimension::Backlog => BACKLOG,
        Dimension::Holes => HOLES,
        Dimension::AboveHole => ABOVE_HOLE,
        Dimension::Subscriptions => SUBSCRIPTIONS,
        Dimension::Lanes => LANES,
        Dimension::FormerFilters => FORMER_FILTERS,
        Dimension::Leaves => unreachable!("the log is one table"),
    }
}

const LOG: &str = "
    insert into pillarbox_event (topic, key, type, payload, created_at)
    select 't', 'k' || g, 'y', '{}', $passed_at from number where g <= $n;
    update pillarbox_cursor set floor = $events + $n";

const RECORDS: &str = "
    insert into pillarbox_progress (subscription, lane, epoch, floor_from, floor_to, started_at, ended_at)
    select s.id, 0, 1, g - 1, g, $now - 60000, $now - 60000 from pillarbox_subscription as s, number where s.name <> 'held' and g <= $n;
    insert into pillarbox_skip (subscription, position, position_to, reason, at)
    select s.id, g, g, 'r', $now from pillarbox_subscription as s, number where s.name <> 'held' and g <= $n;
    insert into pillarbox_inbox (consumer, id) select 'consumer', printf('%036d', g) from number where g <= $n;
    insert into pillarbox_dedup (topic, key, dedup_key, id, created_at)
    select 't', 'once', g, printf('%036d', g), $now from number where g <= $n";

const DEAD: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, g, 0, g, 'd' || g, 'dead', 3, $now, $now, $now from pillarbox_subscription as s, number where s.name <> 'held' and g <= $n;
    insert into pillarbox_event_kept select * from pillarbox_event where position <= $n";

const DEAD_HEADS: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, g, 0, g, 'd' || g, 'dead', 3, $now, $now, $now from pillarbox_subscription as s, number where s.name in ('queue', 'stream') and g <= $n;
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
    select s.id, 1000000 + g, 0, 1000000 + g, 'd' || g, 'pending', 0, $now, $now
    from pillarbox_subscription as s, number where s.name = 'queue' and g <= $n";

const DEAD_KEYS: &str = "
    insert into pillarbox_event (topic, key, type, payload, created_at)
    select 't', 'd' || g, 'y', '{}', $passed_at from number where g <= $n;
    update pillarbox_cursor set floor = $events + $n;
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, $events + g, 0, $events + g, 'd' || g, 'dead', 3, $now, $now, $now
    from pillarbox_subscription as s, number where s.name in ('queue', 'stream') and g <= $n";

const DELAYED: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
    select s.id, g, 0, g, 'd' || g, 'delayed', 0, $now + 86400000, $now
    from pillarbox_subscription as s, number where s.name <> 'held' and g <= $n";

const DUE: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
    select s.id, 1000000 + g, 0, $events + g, 'one', 'delayed', 0, $now - 1000, $now
    from pillarbox_subscription as s, number where s.name = 'queue' and g <= $n";

const DUE_PAIRS: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
    select s.id, g + 1000000 * (t + 1), 0, $events + 1000000 * t + g, 'p' || g, 'delayed', 0, $now - 1000, $now
    from pillarbox_subscription as s, (select 0 as t union all select 1), number where s.name = 'queue' and g <= $n / 2";

const WAITING: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, ready_at)
    select s.id, g, 0, $events + g, 'one', 'pending', 0, $now, $now, case when g = 1 then $now end
    from pillarbox_subscription as s, number where s.name = 'queue' and g <= $n";

const PAIRS: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, ready_at)
    select s.id, g + 1000000 * t, 0, $events + 1000000 * t + g, 'p' || g, 'pending', 0, $now, $now,
        case when t = 0 then $now end
    from pillarbox_subscription as s, (select 0 as t union all select 1), number where s.name = 'queue' and g <= $n";

const CLAIMS: &str = "
    insert into pillarbox_instance (id, host, pid, version, started_at, beat_at, subscriptions)
    select $other, 'there', 1, '0', $now, $now + 86400000, '[' || id || ']' from pillarbox_subscription where name = 'queue';
    insert into pillarbox_delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, owner, claim, claimed_at)
    select s.id, g, 0, $events + g, 'o' || g, 'processing', 0, $now, $now, $other, g, $now
    from pillarbox_subscription as s, number where s.name = 'queue' and g <= $n";

const WORKING: &str = "
    insert into pillarbox_delivery (subscription, position, lane, arrival, state, attempts, due_at, since, ready_at)
    select s.id, g, 0, $events + g, 'pending', 0, $now, $now, $now - 3600000
    from pillarbox_subscription as s, number where s.name = 'queue' and g <= $n";

const DEAD_RANGES: &str = "
    update sqlite_sequence set seq = $events + 3 * $n where name = 'pillarbox_event';
    insert into pillarbox_dead_range (low, high, closed_at)
    select $events + 3 * g, $events + 3 * g, $now from number where g <= $n;
    update pillarbox_cursor set floor = $events + 3 * $n";

const BACKLOG: &str = "
    update pillarbox_cursor set floor = $first - $n
    where subscription = (select id from pillarbox_subscription where name = 'stream');
    update pillarbox_subscription set paused = 1, paused_by = 'operator' where name = 'stream'";

const HOLES: &str = "
    update pillarbox_cursor set floor = $first - 2 * $n, settled = '$settled'
    where subscription = (select id from pillarbox_subscription where name = 'stream')";

const ABOVE_HOLE: &str = "
    update pillarbox_cursor set floor = $old + 8, settled = '$settled'
    where subscription = (select id from pillarbox_subscription where name = 'stream');
    insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
    select s.id, $old + 10 + g, 0, g, 'd' || g, 'dead', 3, $now, $now, $now
    from pillarbox_subscription as s, number where s.name = 'stream' and g <= $n";

const SUBSCRIPTIONS: &str = "
    insert into pillarbox_subscription
        (name, filter, mode, lanes, on_dead, retry, processing_timeout_ms, defined_by, created_at)
    select 'other ' || g, s.filter, 'stream', 1, s.on_dead, s.retry, s.processing_timeout_ms, s.defined_by, s.created_at
    from pillarbox_subscription as s, number where s.name = 'stream' and g <= $n;
    insert into pillarbox_cursor (subscription, lane, floor)
    select id, 0, $events from pillarbox_subscription where name like 'other %'";

const LANES: &str = "
    update pillarbox_subscription set lanes = $n / 4 + 1;
    insert into pillarbox_cursor (subscription, lane, floor)
    select s.id, g, $events from pillarbox_subscription as s, number where g <= $n / 4";

const FORMER_FILTERS: &str =
    "update pillarbox_subscription set definition = definition + $n, former_filters = '$formers'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_operation_costs_more_than_is_promised_as_the_log_grows() {
    let _alone = ALONE.lock().await;
    let mut broken = Vec::new();
    for dimension in Dimension::ALL.into_iter().filter(|dimension| *dimension != Dimension::Leaves) {
        // One after the other: see [`ALONE`].
        let small = measure(&Log::new(dimension, SMALL).await, dimension, SMALL).await;
        let large = measure(&Log::new(dimension, SMALL * FACTOR).await, dimension, SMALL * FACTOR).await;
        for ((operation, small), (_, large)) in small.into_iter().zip(large) {
            eprintln!("{dimension:?} {operation:?} {small:?} {large:?}");
            broken.extend(judge(operation, dimension, small, large));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_relay_does_costs_no_more_for_eighty_thousand_dead_keys_than_for_twenty_thousand() {
    let _alone = ALONE.lock().await;
    let dimension = Dimension::DeadKeys;
    let small = measure_beyond(&Log::new(dimension, SMALL).await, SMALL).await;
    let large = measure_beyond(&Log::new(dimension, BEYOND).await, BEYOND).await;
    let mut broken = Vec::new();
    for ((operation, small), (_, large)) in small.into_iter().zip(large) {
        eprintln!("{dimension:?} {operation:?} {small:?} {large:?}");
        broken.extend(judge(operation, dimension, small, large));
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_only_runs_does_no_more_as_the_log_grows() {
    let _alone = ALONE.lock().await;
    let mut broken = Vec::new();
    for dimension in STEADY {
        let small = measure_steady(&Log::new(dimension, SMALL).await, dimension).await;
        let large = measure_steady(&Log::new(dimension, SMALL * FACTOR).await, dimension).await;
        eprintln!("{dimension:?} {small:?} {large:?}");
        broken.extend(judge_steady(dimension, small, large));
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Calls about `count` deliveries or twice as many, two of each key, and their steps.
async fn steps_of_calls(count: usize) -> Vec<(&'static str, u64)> {
    let database = Database::new();
    counted::count(&database.path);
    let store = database.store();
    let mut calls = Vec::new();
    call_about_many(&store, count, async |point| {
        let steps: i64 = counted::take().values().map(|counted| counted.steps).sum();
        if let Point::Called(call) = point {
            calls.push((call, steps.max(0) as u64 / STEPS));
        }
    })
    .await;
    calls
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_about_many_deliveries_looks_at_each_a_few_times() {
    const FEW: usize = 100;
    const MANY: usize = 2_000;
    const EACH_MAX: usize = 60;
    let _alone = ALONE.lock().await;
    let (few, many) = (steps_of_calls(FEW).await, steps_of_calls(MANY).await);
    for ((call, few), (_, many)) in few.into_iter().zip(many) {
        eprintln!("{call}: {few} steps for {FEW}, {many} for {MANY}");
        assert!(few as usize >= FEW, "{call}: {few} steps for {FEW}: what is counted?");
        assert!(
            many as usize <= few as usize + (MANY - FEW) * EACH_MAX,
            "{call}: {many} steps for {MANY}, {few} for {FEW}"
        );
    }
}
