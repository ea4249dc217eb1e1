//! What operations cost as a log grows, in pages that PostgreSQL looks at.

use std::sync::OnceLock;
use std::time::Duration;

use pillarbox::engine::{EngineConfig, Input};
use pillarbox::sink::SinkFeatures;
use pillarbox::store::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, LaneRef, Store, SubscriptionId, Take, TakeCause,
};
use pillarbox::{Delivery, Failure, Mode, NewEvent, Subscription};
use pillarbox_postgres::{PostgresStore, Transactional, accept, publish};
use pillarbox_testkit::growth::{
    BEYOND, Dimension, EVENTS, FACTOR, Ground, OLD, OLD_AGE, OTHER_INSTANCE, PASSED_AGE, PRUNED_AT_ONCE, Point, SEEDED,
    SMALL, STEADY, TAIL, Work, call_about_many, create, former_filters, judge, judge_steady, measure, measure_beyond,
    measure_steady,
};
use pillarbox_testkit::postgres::Server;
use pillarbox_testkit::{Driver, eventually};
use tokio_postgres::{Client, Transaction};

use crate::fixture::{Database, connect, join, one_lane};

/// Counts what statements do, and does nothing else by itself.
fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let builder = Server::builder().setting("shared_preload_libraries", "pg_stat_statements");
        let builder = builder.setting("pg_stat_statements.max", 10_000).setting("autovacuum", "off");
        builder.start().expect("the tests need a PostgreSQL server with its contrib modules")
    })
}

/// A database in which no bell is watched from time to time, also while something else is counted.
async fn quiet_database() -> Database {
    let database = Database::on(server()).await;
    database.execute("create extension pg_stat_statements").await;
    database.execute("select pillarbox.set_doorbell(false)").await;
    database
}

/// Counts what is done in one database; others are used at the same time.
struct Counter(Client);

impl Counter {
    async fn of(database: &Database) -> Counter {
        Counter(connect(database.url()).await)
    }

    async fn begin(&self) {
        self.settle_down().await;
        let sql = "select pg_stat_statements_reset(0, oid, 0) from pg_database where datname = current_database()";
        self.0.execute(sql, &[]).await.unwrap();
    }

    /// Returns when nothing is under way. A transaction that has only read is given up after its answer, and what it read counts then.
    async fn settle_down(&self) {
        let sql = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() \
                   and state <> 'idle' and wait_event_type is distinct from 'Lock'";
        let is_quiet = async || (self.0.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0).then_some(());
        eventually("nothing is under way", is_quiet).await;
    }

    async fn work(&self) -> Work {
        self.settle_down().await;
        let sql = "select calls, shared_blks_hit + shared_blks_read, regexp_replace(query, '\\s+', ' ', 'g') \
                   from pg_stat_statements as s join pg_database as d on d.oid = s.dbid \
                   where d.datname = current_database() and query not like '%pg_stat_%' order by 2 desc";
        let mut work = Work::default();
        for (index, row) in self.0.query(sql, &[]).await.unwrap().iter().enumerate() {
            let (calls, pages) = (row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64);
            work.statements += calls;
            work.steps += pages;
            // For whoever looks for what broke a promise.
            if index < 2 {
                eprintln!("    {calls} x {pages} {:.300}", row.get::<_, &str>(2));
            }
        }
        work
    }
}

struct Log {
    database: Database,
    store: PostgresStore,
    transact: Transactional,
    counter: Counter,
}

impl Ground for Log {
    type Store = PostgresStore;
    type Transact = Transactional;

    fn store(&self) -> &PostgresStore {
        &self.store
    }

    async fn another_store(&self) -> PostgresStore {
        self.database.store().await
    }

    fn transact(&self) -> &Transactional {
        &self.transact
    }

    async fn begin(&self) {
        self.counter.begin().await;
    }

    async fn work(&self) -> Work {
        self.counter.work().await
    }
}

impl Log {
    async fn new(dimension: Dimension, size: usize) -> Log {
        let database = quiet_database().await;
        let store = database.store().await;
        create(&store, dimension).await;
        let age = |age: Duration| format!("(now() - interval '{} seconds')", age.as_secs());
        let values = [
            ("$events", EVENTS.to_string()),
            ("$first", (EVENTS - SEEDED).to_string()),
            ("$tail", TAIL.to_string()),
            ("$leaf", PRUNED_AT_ONCE.to_string()),
            ("$other", OTHER_INSTANCE.0.to_string()),
            ("$old_at", age(OLD_AGE)),
            ("$passed_at", age(PASSED_AGE)),
            ("$old", OLD.to_string()),
            ("$n", dimension.count(size).to_string()),
            ("$step", (100_000 / if dimension == Dimension::Leaves { dimension.count(size) } else { 10 }).to_string()),
            ("$formers", former_filters(Dimension::FormerFilters.count(size))),
        ];
        let fill_in = |sql: &str| values.iter().fold(sql.to_owned(), |sql, (name, value)| sql.replace(name, value));
        for sql in [LEAVES, SEED, grow(dimension), END].into_iter().chain(TIDY) {
            database.execute(&fill_in(sql)).await;
        }
        let counter = Counter::of(&database).await;
        let transact = Transactional::new(database.url(), handle);
        Log { store, transact: transact.unwrap(), counter, database }
    }
}

async fn handle(transaction: &Transaction<'_>, event: Delivery) -> Result<(), Failure> {
    assert!(accept(transaction, "consumer", event.id).await.unwrap());
    publish(transaction, &NewEvent::new("handled", "y")).await.unwrap();
    Ok(())
}

/// The old events are in leaves of their own.
const LEAVES: &str = "
    select pillarbox.arrange_leaves(array(
        select low from generate_series(1, $old, $leaf) as low
        union all
        select $old + 1 + $step * n from generate_series(0, 100000 / $step) as n
    ))";

/// A little of everything: events that all have passed, and rows of the queue at the last of them. Half of what can be claimed has a key,
/// and another row of that key behind it. A few deliveries have been dead for long.
const SEED: &str = "
    insert into pillarbox.event (topic, key, type, payload, created_at)
    select 't', 'k' || g, 'y', '{}', case when g <= $old then $old_at else $passed_at end from generate_series(1, $events) as g;
    update pillarbox.cursor set floor = $events;
    update pillarbox.subscription set paused = true, paused_by = 'operator' where name = 'idle';
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
    select s.id, $first + g, 0, nextval('pillarbox.delivery_arrival_seq'), case when g % 2 = 0 then 'c' || (g - 1) / 4 end,
        'pending', 0, now(), now(), true,
        case when g % 4 <> 0 then now() - interval '1 minute' + interval '1 millisecond' * g end
    from pillarbox.subscription as s, generate_series(1, 300) as g
    where s.name = 'queue';
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, $first + 301, 0, nextval('pillarbox.delivery_arrival_seq'), 'seed', 'dead', 3, now(), now(), now(), true
    from pillarbox.subscription as s where s.name = 'queue'
    union all
    select s.id, $first + 302, 0, nextval('pillarbox.delivery_arrival_seq'), 'seed', 'delayed', 0, now() + interval '1 day', now(),
        null, true
    from pillarbox.subscription as s where s.name = 'queue';
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, $first + 302 + g, 0, $first + 302 + g, 'long ' || g, 'dead', 3, $passed_at, $passed_at, $passed_at, s.mode = 'queue'
    from pillarbox.subscription as s, generate_series(1, 10) as g where s.name in ('queue', 'stream')";

/// The end of the log: an event that all have settled, and some that nobody has read.
const END: &str = "
    insert into pillarbox.event (topic, key, type, payload) values ('t', 'last', 'y', '{}');
    update pillarbox.cursor set floor = (select max(position) from pillarbox.event) where floor >= $events;
    insert into pillarbox.event (topic, key, type, payload)
    select 't', 'u' || g, 'y', '{}' from generate_series(1, $tail) as g;
    update pillarbox.cursor set floor = (select max(position) from pillarbox.event)
    where subscription in (select id from pillarbox.subscription where name like 'other %');
    update pillarbox.cursor as c
    set anchor_position = e.position, anchor_id = coalesce(e.id, pillarbox.event_id(e.position, e.created_at))
    from pillarbox.event as e
    where e.position = (select max(position) from pillarbox.event where position <= greatest(c.floor, upper(c.settled) - 1))";

/// What retention and the server do all the time. Twice, so that nothing is left of what there was before.
const TIDY: [&str; 4] =
    ["select pillarbox.add_up_aside()", "vacuum", "select pillarbox.add_up_aside()", "vacuum (analyze)"];

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
        // See [`LEAVES`].
        Dimension::Leaves => "select",
    }
}

const LOG: &str = "
    insert into pillarbox.event (topic, key, type, payload, created_at)
    select 't', 'k' || g, 'y', '{}', $passed_at from generate_series(1, $n) as g;
    update pillarbox.cursor set floor = $events + $n";

const RECORDS: &str = "
    insert into pillarbox.progress (subscription, lane, epoch, floor_from, floor_to, started_at, ended_at)
    select s.id, 0, 1, g - 1, g, now() - interval '1 minute', now() - interval '1 minute'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name <> 'held';
    insert into pillarbox.skip (subscription, position, position_to, reason)
    select s.id, g, g, 'r' from pillarbox.subscription as s, generate_series(1, $n) as g where s.name <> 'held';
    insert into pillarbox.inbox (consumer, id) select 'consumer', gen_random_uuid() from generate_series(1, $n);
    insert into pillarbox.dedup_0 (digest, id, created_at)
    select sha256(g::text::bytea), gen_random_uuid(), now() from generate_series(1, $n) as g";

const DEAD: &str = "
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, g, 0, g, 'd' || g, 'dead', 3, now(), now(), now(), s.mode = 'queue'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name <> 'held';
    insert into pillarbox.event_kept (position, id, topic, key, type, payload, headers, created_at)
    select position, id, topic, key, type, payload::json, headers, created_at from pillarbox.event_view where position <= $n";

const DEAD_HEADS: &str = "
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, g, 0, g, 'd' || g, 'dead', 3, now(), now(), now(), s.mode = 'queue'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name in ('queue', 'stream');
    insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
    select s.id, 1000000 + g, 0, 1000000 + g, 'd' || g, 'pending', 0, now(), now(), true
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'queue'";

const DEAD_KEYS: &str = "
    insert into pillarbox.event (topic, key, type, payload, created_at)
    select 't', 'd' || g, 'y', '{}', $passed_at from generate_series(1, $n) as g;
    update pillarbox.cursor set floor = $events + $n;
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, $events + g, 0, $events + g, 'd' || g, 'dead', 3, now(), now(), now(), s.mode = 'queue'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name in ('queue', 'stream')";

const DELAYED: &str = "
    insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
    select s.id, g, 0, g, 'd' || g, 'delayed', 0, now() + interval '1 day', now(), s.mode = 'queue'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name <> 'held'";

const DUE: &str = "
    insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
    select s.id, 1000000 + g, 0, g, 'one', 'delayed', 0, now() - interval '1 second', now(), true
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'queue'";

const DUE_PAIRS: &str = "
    insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
    select s.id, g + 1000000 * (t + 1), 0, g, 'p' || g, 'delayed', 0, now() - interval '1 second', now(), true
    from pillarbox.subscription as s, generate_series(0, 1) as t, generate_series(1, $n / 2) as g where s.name = 'queue'";

const WAITING: &str = "
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
    select s.id, g, 0, nextval('pillarbox.delivery_arrival_seq'), 'one', 'pending', 0, now(), now(), true,
        case when g = 1 then now() end
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'queue'";

const PAIRS: &str = "
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
    select s.id, g + 1000000 * t, 0, nextval('pillarbox.delivery_arrival_seq'), 'p' || g, 'pending', 0, now(), now(), true,
        case when t = 0 then now() end
    from pillarbox.subscription as s, generate_series(0, 1) as t, generate_series(1, $n) as g where s.name = 'queue'";

const CLAIMS: &str = "
    insert into pillarbox.instance (id, host, pid, version, beat_at, subscriptions) overriding system value
    select $other, 'there', 1, '0', now() + interval '1 day', array_agg(id) from pillarbox.subscription where name = 'queue';
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at, owner, claim, claimed_at)
    select s.id, g, 0, nextval('pillarbox.delivery_arrival_seq'), 'o' || g, 'processing', 0, now(), now(), true, now(),
        $other, g, now()
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'queue'";

const WORKING: &str = "
    insert into pillarbox.delivery (subscription, position, lane, arrival, state, attempts, due_at, since, queued, ready_at)
    select s.id, g, 0, nextval('pillarbox.delivery_arrival_seq'), 'pending', 0, now(), now(), true, now() - interval '1 hour'
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'queue'";

const DEAD_RANGES: &str = "
    select setval('pillarbox.event_position_seq', $events + 3 * $n);
    insert into pillarbox.dead_range (low, high) select $events + 3 * g, $events + 3 * g from generate_series(1, $n) as g;
    update pillarbox.cursor set floor = $events + 3 * $n";

const BACKLOG: &str = "
    update pillarbox.cursor set floor = $first - $n
    where subscription = (select id from pillarbox.subscription where name = 'stream');
    update pillarbox.subscription set paused = true, paused_by = 'operator' where name = 'stream'";

const HOLES: &str = "
    update pillarbox.cursor
    set floor = $first - 2 * $n,
        settled = (select range_agg(int8range($first - 2 * g + 1, $first - 2 * g + 2)) from generate_series(1, $n) as g)
    where subscription = (select id from pillarbox.subscription where name = 'stream')";

const ABOVE_HOLE: &str = "
    update pillarbox.cursor set floor = $old + 8, settled = int8multirange(int8range($old + 10, $events + 1))
    where subscription = (select id from pillarbox.subscription where name = 'stream');
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
    select s.id, $old + 10 + g, 0, g, 'd' || g, 'dead', 3, now(), now(), now(), false
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'stream'";

const SUBSCRIPTIONS: &str = "
    insert into pillarbox.subscription (name, filter, mode, lanes, on_dead, retry, processing_timeout_ms, defined_by)
    select 'other ' || g, s.filter, 'stream', 1, s.on_dead, s.retry, s.processing_timeout_ms, s.defined_by
    from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'stream';
    insert into pillarbox.cursor (subscription, lane, floor)
    select id, 0, $events from pillarbox.subscription where name like 'other %'";

const LANES: &str = "
    update pillarbox.subscription set lanes = $n / 4 + 1;
    insert into pillarbox.cursor (subscription, lane, floor)
    select s.id, g, $events from pillarbox.subscription as s, generate_series(1, $n / 4) as g";

const FORMER_FILTERS: &str =
    "update pillarbox.subscription set definition = definition + $n, former_filters = '$formers'";

/// What an operation costs more than is promised as one dimension grows.
async fn broken_promises(dimension: Dimension) -> Vec<String> {
    let work_at = async |size| measure(&Log::new(dimension, size).await, dimension, size).await;
    let (small, large) = tokio::join!(work_at(SMALL), work_at(SMALL * FACTOR));
    let pairs = small.into_iter().zip(large);
    pairs
        .filter_map(|((operation, small), (_, large))| {
            eprintln!("{dimension:?} {operation:?} {small:?} {large:?}");
            judge(operation, dimension, small, large)
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_operation_costs_more_than_is_promised_as_the_log_grows() {
    let mut broken = Vec::new();
    for dimension in Dimension::ALL {
        if !broken_promises(dimension).await.is_empty() {
            // A claim that a busy machine let run into its time-out is made again, and counts twice: what is wrong is wrong again.
            broken.extend(broken_promises(dimension).await);
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// The same where there is more than any limit counts.
async fn broken_promises_beyond() -> Vec<String> {
    let dimension = Dimension::DeadKeys;
    let work_at = async |size| measure_beyond(&Log::new(dimension, size).await, size).await;
    let (small, large) = tokio::join!(work_at(SMALL), work_at(BEYOND));
    let pairs = small.into_iter().zip(large);
    pairs
        .filter_map(|((operation, small), (_, large))| {
            eprintln!("{dimension:?} {operation:?} {small:?} {large:?}");
            judge(operation, dimension, small, large)
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_relay_does_costs_no_more_for_eighty_thousand_dead_keys_than_for_twenty_thousand() {
    let mut broken = broken_promises_beyond().await;
    if !broken.is_empty() {
        broken = broken_promises_beyond().await;
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_only_runs_does_no_more_as_the_log_grows() {
    let mut broken = Vec::new();
    for dimension in STEADY {
        let small = measure_steady(&Log::new(dimension, SMALL).await, dimension).await;
        let large = measure_steady(&Log::new(dimension, SMALL * FACTOR).await, dimension).await;
        eprintln!("{dimension:?} {small:?} {large:?}");
        broken.extend(judge_steady(dimension, small, large));
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[tokio::test]
async fn an_append_costs_no_more_for_a_long_stream_than_for_a_short_one() {
    let database = quiet_database().await;
    let client = database.client().await;
    client
        .batch_execute(
            "do $$ begin
                 for number in 1..5000 loop
                     perform pillarbox.append('long', null, '[{\"type\": \"y\"}]');
                     commit;
                 end loop;
             end $$",
        )
        .await
        .unwrap();
    client.batch_execute("select pillarbox.append('short', null, '[{\"type\": \"y\"}]')").await.unwrap();
    let append = |stream: &str| format!("select pillarbox.append('{stream}', null, '[{{\"type\": \"y\"}}]')");
    // Once for what a session looks up before.
    crate::fixture::pages(&client, &append("short")).await;
    let (short, long) =
        (crate::fixture::pages(&client, &append("short")).await, crate::fixture::pages(&client, &append("long")).await);
    assert!(long <= short + 4, "{long} pages for a stream of 5,000 events, {short} for one of two");

    // As the guide to publishing says it.
    client.batch_execute("analyze").await.unwrap();
    let read = "select j.version, e.id, e.type, e.payload, e.headers from pillarbox.journal as j
        join pillarbox.event_view as e using (position) where j.stream = 'short' and j.version > 0 order by j.version";
    crate::fixture::pages(&client, read).await;
    let looked_at = crate::fixture::pages(&client, read).await;
    assert!(looked_at < 80, "{looked_at} pages for a stream of four events in a log of 5,000");
}

/// Statements that joining with so many subscriptions takes, taking their lanes and loading them.
async fn statements_of_a_start(database: &Database, counter: &Counter, subscriptions: usize, lanes: u32) -> u64 {
    counter.begin().await;
    let store = database.store().await;
    let wish = |number| Subscription { lanes, ..Subscription::new(format!("{lanes}-lanes-{number}")) };
    let joined = join(&store, (0..subscriptions).map(wish)).await;
    let lanes = joined
        .subscriptions
        .iter()
        .flat_map(|view| (0..view.lanes).map(|lane| LaneRef { subscription: view.id, lane }));
    let takes: Vec<Take> = lanes.map(|lane| Take { lane, expected: 0, cause: TakeCause::Free, beat: None }).collect();
    let epochs = store.take(&takes).await.unwrap();
    let taken: Vec<_> =
        takes.iter().zip(epochs).map(|(take, epoch)| (take.lane, epoch.expect("nobody else takes it"))).collect();
    assert!(store.load(&taken).await.unwrap().iter().all(Option::is_some));
    counter.work().await.statements
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_takes_as_many_statements_for_many_subscriptions_and_lanes_as_for_one() {
    let database = quiet_database().await;
    let counter = Counter::of(&database).await;
    let one = statements_of_a_start(&database, &counter, 1, 1).await;
    for (subscriptions, lanes) in [(1_000, 2), (20, 256)] {
        let many = statements_of_a_start(&database, &counter, subscriptions, lanes).await;
        assert!(many <= one + 6, "{subscriptions} x {lanes}: {many} statements, {one} for one");
    }
}

/// So many relays run all of these subscriptions, with a lane of each. An event of each is delivered once; then the statements that a relay makes
/// per second while there is nothing to do.
async fn idle_statements_of_relays(relays: usize, subscriptions: usize) -> u64 {
    const IDLE_SECONDS: u64 = 10;
    const BALANCED_MAX: usize = 60;
    let database = quiet_database().await;
    let wishes = || {
        let wish = |number| Subscription { lanes: relays as u32, ..Subscription::new(format!("s{number}")) };
        let wish = |number| wish(number).topics([format!("t{number}")]);
        (0..subscriptions).map(|number| (wish(number), SinkFeatures::default())).collect::<Vec<_>>()
    };
    let mut drivers = Vec::new();
    for _ in 0..relays {
        drivers.push(Driver::start(database.store().await, EngineConfig::default(), wishes()).await.unwrap());
    }
    // All pass the same second, one after the other.
    let second = async |drivers: &mut Vec<Driver<PostgresStore>>| {
        for driver in drivers {
            driver.pass(Duration::from_secs(1)).await.unwrap();
        }
    };
    let fewest = "select coalesce(min(n), 0) from (
            select count(c.lane) as n
            from pillarbox.instance as i left join pillarbox.cursor as c on c.owner = i.id group by i.id
        ) as owned";
    let mut seconds = 0;
    while database.number(fewest).await < subscriptions as i64 {
        assert!(seconds < BALANCED_MAX, "the lanes are shared");
        second(&mut drivers).await;
        seconds += 1;
    }
    let events: Vec<NewEvent> = (0..subscriptions).map(|number| NewEvent::new(format!("t{number}"), "y")).collect();
    database.publish(&events).await;
    let mut delivered = Vec::new();
    for _ in 0..3 {
        for driver in &mut drivers {
            driver.go_on(Input::Published).await.unwrap();
            while !driver.at_sink().is_empty() {
                delivered.extend(driver.deliver(0).await.unwrap());
            }
        }
        second(&mut drivers).await;
    }
    delivered.sort_unstable();
    assert_eq!(delivered, (1..=subscriptions as i64).collect::<Vec<_>>(), "each is delivered once");
    let counter = Counter::of(&database).await;
    counter.begin().await;
    for _ in 0..IDLE_SECONDS {
        second(&mut drivers).await;
    }
    counter.work().await.statements / IDLE_SECONDS / relays as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_with_many_subscriptions_do_no_more_each_second_than_with_few() {
    let (few, many) = (idle_statements_of_relays(3, 10).await, idle_statements_of_relays(3, 1_000).await);
    eprintln!("statements of one of three idle relays per second: {few} with 10 subscriptions, {many} with 1,000");
    assert!(many <= few + 2, "{many} statements per relay and second with 1,000 subscriptions, {few} with 10");
}

/// Logs the plan of every statement, with the rows that each of its nodes looked at.
fn explaining_server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let mut builder = Server::builder().setting("shared_preload_libraries", "auto_explain");
        for (name, value) in [("min_duration", "0"), ("analyze", "on"), ("timing", "off"), ("nested_statements", "on")]
        {
            builder = builder.setting(&format!("auto_explain.log_{name}"), value);
        }
        let builder = builder.setting("auto_explain.log_format", "json").setting("autovacuum", "off");
        builder.start().expect("the tests need a PostgreSQL server with its contrib modules")
    })
}

/// The rows that a node and what is below it have returned and dropped.
fn rows_looked_at(node: &serde_json::Value) -> u64 {
    let count = |name: &str| node[name].as_f64().unwrap_or(0.0);
    let own = ["Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter"].map(count);
    let below = node["Plans"].as_array().into_iter().flatten().map(rows_looked_at);
    (own.iter().sum::<f64>() * count("Actual Loops")) as u64 + below.sum::<u64>()
}

/// The rows that all statements in a database have looked at.
fn rows_of_log(log: &str, database: &str) -> u64 {
    let mut plans = Vec::new();
    let mut is_plan = false;
    for line in log.lines() {
        match line.strip_prefix('\t') {
            Some(json) if is_plan => plans.last_mut().map_or((), |plan: &mut String| plan.push_str(json)),
            Some(_) => {}
            None => {
                is_plan = line.contains(&format!(" {database} LOG:")) && line.ends_with("plan:");
                plans.extend(is_plan.then(String::new));
            }
        }
    }
    let plan = |text: &String| {
        serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    plans.iter().map(|text| rows_looked_at(&plan(text)["Plan"])).sum()
}

/// When the server last looked at what its tables have: its plans depend on that.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Analyzed {
    Never,
    Empty,
    /// When many rows had just been removed.
    Emptied,
    Filled,
}

/// Counts the rows that the statements of each call look at.
struct Calls {
    counter: Counter,
    database: String,
    before: u64,
    all: Vec<(&'static str, u64)>,
}

impl Calls {
    async fn of(database: &Database) -> Calls {
        let name = database.url().rsplit('/').next().unwrap().to_owned();
        let counter = Counter::of(database).await;
        Calls { counter, database: name, before: 0, all: Vec::new() }
    }

    async fn begin(&mut self) {
        self.counter.settle_down().await;
        self.before = rows_of_log(&explaining_server().log(), &self.database);
    }

    async fn note(&mut self, call: &'static str) {
        let before = self.before;
        self.begin().await;
        self.all.push((call, self.before - before));
    }
}

async fn claim(store: &PostgresStore, subscription: SubscriptionId, limit: usize, first: i64) -> Vec<Claimed> {
    let mut all = Vec::new();
    // On a busy machine a claim may take too long, and the next one is for fewer.
    while all.len() < limit {
        let (first, limit) = (ClaimId(first + all.len() as i64), limit - all.len());
        let request = ClaimRequest { subscription, limit, first, suspect: true, tell: None, again: false };
        all.extend(store.claim(&[request]).await.unwrap().remove(0).claimed);
    }
    all
}

async fn finish(store: &PostgresStore, subscription: SubscriptionId, claimed: &[Claimed], fate: ClaimFate) {
    let end = |claimed: &Claimed| {
        let (position, claim) = (claimed.delivery.position, claimed.claim);
        ClaimEnd { subscription, position, claim, fate: fate.clone() }
    };
    let ends: Vec<ClaimEnd> = claimed.iter().map(end).collect();
    assert_eq!(store.finish(&ends).await.unwrap(), vec![true; claimed.len()]);
}

/// The index entries of rows that are done lie before the first row of their key until the server has cleaned up. A look passes them page
/// by page, and reads none of these rows again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_a_key_reads_none_of_its_rows_that_are_done() {
    const DONE: i64 = 2_000;
    // Each page counts twice for the statement and for the function that it calls, and for the claim and for the look after its end.
    const ROWS_PER_PAGE: i64 = 10;
    let database = quiet_database().await;
    let store = database.store().await;
    let queue = Subscription { mode: Mode::Queue, ..one_lane("queue") };
    let subscription = join(&store, [queue]).await.subscriptions[0].id;
    database.execute(&WAITING.replace("$n", &(2 * DONE).to_string())).await;
    let counter = Counter::of(&database).await;
    let one = async |number| {
        let claimed = claim(&store, subscription, 1, number).await;
        finish(&store, subscription, &claimed, ClaimFate::Done).await;
    };
    let pages_of_next = async |number: i64| {
        let mut pages = u64::MAX;
        // Some do more: what there is in all is counted from time to time.
        for try_number in 0..3 {
            counter.begin().await;
            one(number + try_number).await;
            pages = pages.min(counter.work().await.steps);
        }
        pages as i64
    };
    for number in 1..=20 {
        one(number).await;
    }
    let early = pages_of_next(21).await;
    for number in 24..=DONE {
        one(number).await;
    }
    let late = pages_of_next(DONE + 1).await;
    let most = early + DONE / ROWS_PER_PAGE;
    assert!(late <= most, "{late} pages for a claim after {DONE} rows, {early} at first, and {most} are allowed");
}

/// Calls about `count` deliveries or twice as many, two of each key, and the rows that they look at.
async fn rows_of_calls(count: usize, analyzed: Analyzed) -> Vec<(&'static str, u64)> {
    let database = Database::on(explaining_server()).await;
    let store = database.store().await;
    let mut calls = Calls::of(&database).await;
    call_about_many(&store, count, async |point| match point {
        Point::Begun => {
            if analyzed == Analyzed::Emptied {
                database.execute(EMPTIED).await;
            }
            if matches!(analyzed, Analyzed::Empty | Analyzed::Emptied) {
                database.execute("analyze").await;
            }
            calls.begin().await;
        }
        Point::Filled => {
            if analyzed == Analyzed::Filled {
                database.execute("analyze").await;
            }
            calls.begin().await;
        }
        Point::Called(call) => calls.note(call).await,
    })
    .await;
    calls.all
}

const EMPTIED: &str = "
    insert into pillarbox.delivery (subscription, position, lane, arrival, state, attempts, due_at, since, queued)
    select s.id, g, 0, g, 'pending', 0, now(), now(), true from pillarbox.subscription as s, generate_series(1, 200) as g;
    delete from pillarbox.delivery";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_about_many_deliveries_looks_at_each_a_few_times() {
    const FEW: usize = 100;
    const MANY: usize = 500;
    const EACH_MAX: usize = 60;
    const SLACK: usize = 3_000;
    for analyzed in [Analyzed::Never, Analyzed::Empty, Analyzed::Emptied, Analyzed::Filled] {
        let (few, many) = (rows_of_calls(FEW, analyzed).await, rows_of_calls(MANY, analyzed).await);
        for ((call, few), (_, many)) in few.into_iter().zip(many) {
            eprintln!("{analyzed:?}, {call}: {few} rows for {FEW}, {many} for {MANY}");
            for (rows, deliveries) in [(few, FEW), (many, MANY)] {
                assert!(
                    rows as usize >= deliveries,
                    "{analyzed:?}, {call}: {rows} rows for {deliveries}: what is counted?"
                );
                assert!(
                    rows as usize <= deliveries * EACH_MAX + SLACK,
                    "{analyzed:?}, {call}: {rows} rows for {deliveries}"
                );
            }
        }
    }
}
