//! What operations cost as a log grows, in pages that PostgreSQL looks at.

use std::sync::OnceLock;

use pillarbox::{Epoch, LaneRef, Mode, OnDead, RetryPolicy, Store, Subscription, Take, TakeCause};
use pillarbox_postgres::PostgresStore;
use pillarbox_testkit::growth::{Dimension, EVENTS, FACTOR, Ground, QUEUE, SMALL, STREAM, Work, judge, measure};
use pillarbox_testkit::postgres::Server;
use tokio_postgres::Client;

use crate::fixture::{Database, connect, join, lane, take};

/// Counts what statements do. Nothing runs beside the tests there: they look at one thing at a time.
fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let builder = Server::builder().setting("shared_preload_libraries", "pg_stat_statements");
        let builder = builder.setting("pg_stat_statements.max", 10_000).setting("autovacuum", "off");
        builder.start().expect("the tests need a PostgreSQL server with its contrib modules")
    })
}

struct Log {
    /// Dropped with the value.
    _database: Database,
    store: PostgresStore,
    lanes: [(LaneRef, Epoch); 2],
    counter: Client,
}

impl Ground for Log {
    type Store = PostgresStore;

    fn store(&self) -> &PostgresStore {
        &self.store
    }

    fn lanes(&self) -> [(LaneRef, Epoch); 2] {
        self.lanes
    }

    async fn begin(&self) {
        self.counter.batch_execute("select pg_stat_statements_reset()").await.unwrap();
    }

    async fn work(&self) -> Work {
        let sql = "select sum(calls)::bigint, sum(shared_blks_hit + shared_blks_read)::bigint from pg_stat_statements \
                   where query not like '%pg_stat_statements%'";
        let row = self.counter.query_one(sql, &[]).await.unwrap();
        // For whoever looks for what broke a promise.
        let most = "select (shared_blks_hit + shared_blks_read)::text || ' ' || regexp_replace(query, '\\s+', ' ', 'g') \
                    from pg_stat_statements order by shared_blks_hit + shared_blks_read desc limit 2";
        for row in self.counter.query(most, &[]).await.unwrap() {
            eprintln!("    {:.300}", row.get::<_, String>(0));
        }
        let count = |index| row.get::<_, Option<i64>>(index).unwrap_or_default() as u64;
        Work { statements: count(0), steps: count(1) }
    }
}

impl Log {
    async fn new(dimension: Dimension, size: usize) -> Log {
        let database = Database::on(server()).await;
        database.execute("create extension pg_stat_statements").await;
        // A bell is watched from time to time, also while something else is counted.
        database.execute("alter table pillarbox.event disable trigger doorbell").await;
        let store = database.store().await;
        let retry = RetryPolicy::handler();
        let wish =
            |name: &str, mode| Subscription { mode, lanes: 1, on_dead: OnDead::Skip, retry, ..Subscription::new(name) };
        let joined = join(&store, [wish(QUEUE, Mode::Queue), wish(STREAM, Mode::Stream)]).await;
        let mut lanes = Vec::new();
        for subscription in &joined.subscriptions {
            let lane = lane(subscription.id);
            lanes.push((lane, take(&store, lane, TakeCause::Free).await.unwrap()));
        }
        database.execute(SEED).await;
        let grown = if dimension == Dimension::Subscriptions { size / 50 } else { size };
        database.execute(&grow(dimension).replace("$n", &grown.to_string())).await;
        // As retention and the server do all the time.
        database.execute("select pillarbox.add_up_aside()").await;
        database.execute("analyze").await;
        let counter = connect(database.url()).await;
        Log { _database: database, store, lanes: lanes.try_into().unwrap(), counter }
    }
}

/// A little of everything: events that all have passed, and rows of the queue at the last of them.
const SEED: &str = "
    insert into pillarbox.event (topic, key, type, payload)
    select 't', 'k' || g, 'y', '{}' from generate_series(1, 8000) as g;
    update pillarbox.cursor set floor = 8000;
    insert into pillarbox.delivery
        (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued, ready_at)
    select s.id, 8000 - g, 0, nextval('pillarbox.delivery_arrival_seq'), case when g > 60 then 'seed' end,
        case when g <= 60 then 'pending' when g = 61 then 'dead' else 'delayed' end, 0,
        case when g = 62 then now() + interval '1 day' else now() end, now(), case when g = 61 then now() end, true,
        case when g <= 60 then now() - interval '1 minute' end
    from pillarbox.subscription as s, generate_series(1, 62) as g
    where s.name = 'queue';";

fn grow(dimension: Dimension) -> &'static str {
    match dimension {
        Dimension::Log => {
            "insert into pillarbox.event (topic, key, type, payload)
             select 't', 'k' || g, 'y', '{}' from generate_series(1, $n * 8) as g;
             update pillarbox.cursor set floor = 8000 + $n * 8"
        }
        Dimension::Dead => {
            "insert into pillarbox.delivery
                 (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
             select s.id, g, 0, g, 'd' || g, 'dead', 3, now(), now(), now(), s.mode = 'queue'
             from pillarbox.subscription as s, generate_series(1, $n * 7 / 8) as g"
        }
        Dimension::Delayed => {
            "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
             select s.id, g, 0, g, 'd' || g, 'delayed', 0, now() + interval '1 day', now(), s.mode = 'queue'
             from pillarbox.subscription as s, generate_series(1, $n * 7 / 8) as g"
        }
        Dimension::Due => {
            "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
             select s.id, 100000 + g, 0, g, 'one', 'delayed', 0, now() - interval '1 second', now(), true
             from pillarbox.subscription as s, generate_series(1, $n * 4) as g where s.name = 'queue'"
        }
        Dimension::Waiting => {
            "insert into pillarbox.delivery
                 (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
             select s.id, g, 0, nextval('pillarbox.delivery_arrival_seq'), 'one', 'pending', 0, now(), now(), true,
                 case when g = 1 then now() end
             from pillarbox.subscription as s, generate_series(1, $n * 7 / 8) as g where s.name = 'queue'"
        }
        Dimension::DeadRanges => {
            "select setval('pillarbox.event_position_seq', 8000 + 3 * $n);
             insert into pillarbox.dead_range (low, high) select 8000 + 3 * g, 8000 + 3 * g from generate_series(1, $n) as g;
             update pillarbox.cursor set floor = 8000 + 3 * $n"
        }
        Dimension::Backlog => {
            "update pillarbox.cursor set floor = 8000 - ($n * 7 / 8)
             where subscription = (select id from pillarbox.subscription where name = 'stream');
             update pillarbox.subscription set paused = true, paused_by = 'operator' where name = 'stream'"
        }
        Dimension::AboveHole => {
            "update pillarbox.cursor set floor = 8, settled = int8multirange(int8range(10, 8001))
             where subscription = (select id from pillarbox.subscription where name = 'stream');
             insert into pillarbox.delivery
                 (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
             select s.id, g + 10, 0, g, 'd' || g, 'dead', 3, now(), now(), now(), false
             from pillarbox.subscription as s, generate_series(1, $n * 7 / 8) as g where s.name = 'stream'"
        }
        Dimension::Subscriptions => {
            "insert into pillarbox.subscription (name, filter, mode, lanes, on_dead, retry, processing_timeout_ms, defined_by)
             select 'other ' || g, s.filter, 'stream', 1, s.on_dead, s.retry, s.processing_timeout_ms, s.defined_by
             from pillarbox.subscription as s, generate_series(1, $n) as g where s.name = 'stream';
             insert into pillarbox.cursor (subscription, lane, floor)
             select id, 0, 8000 from pillarbox.subscription where name like 'other %'"
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_operation_costs_more_than_is_promised_as_the_log_grows() {
    assert_eq!(EVENTS, 8_000, "the ground says so");
    let mut broken = Vec::new();
    for dimension in Dimension::ALL {
        let ground = Log::new(dimension, SMALL).await;
        let small = measure(&ground).await;
        drop(ground);
        let ground = Log::new(dimension, SMALL * FACTOR).await;
        let large = measure(&ground).await;
        for ((operation, small), (_, large)) in small.into_iter().zip(large) {
            eprintln!("{dimension:?} {operation:?} {small:?} {large:?}");
            broken.extend(judge(operation, dimension, small, large));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Statements that joining with so many subscriptions takes, taking their lanes and loading them.
async fn statements_of_a_start(database: &Database, counter: &Client, subscriptions: usize, lanes: u32) -> i64 {
    counter.batch_execute("select pg_stat_statements_reset()").await.unwrap();
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
    let sql = "select sum(calls)::bigint from pg_stat_statements where query not like '%pg_stat_statements%'";
    counter.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_takes_as_many_statements_for_many_subscriptions_and_lanes_as_for_one() {
    let database = Database::on(server()).await;
    database.execute("create extension pg_stat_statements").await;
    database.execute("alter table pillarbox.event disable trigger doorbell").await;
    let counter = connect(database.url()).await;
    let one = statements_of_a_start(&database, &counter, 1, 1).await;
    for (subscriptions, lanes) in [(1_000, 2), (20, 256)] {
        let many = statements_of_a_start(&database, &counter, subscriptions, lanes).await;
        assert!(many <= one + 6, "{subscriptions} x {lanes}: {many} statements, {one} for one");
    }
}
