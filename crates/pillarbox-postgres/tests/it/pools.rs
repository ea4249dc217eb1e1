//! Transactional handlers, publishing and inboxes on the application's own pools: the guarantees of connections of our own, and sessions
//! that are given back as they were.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::sink::{Fault, Outcome};
use pillarbox::{Delivery, ErrorKind, Failure, NewEvent, Payload, Timestamp, with_state};
use pillarbox_postgres::{PgConfig, PostgresStore, Schema, Transactional, accept, migrate, publish, publish_all};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::sync::Notify;
use tokio_postgres::Transaction;
use uuid::Uuid;

use crate::fixture::{Database, events};
use crate::transactional::{Ground, LIMIT, PUBLISHED, failure};

pub(crate) fn deadpool(url: &str, size: usize) -> deadpool_postgres::Pool {
    let manager = deadpool_postgres::Manager::new(url.parse().unwrap(), tokio_postgres::NoTls);
    deadpool_postgres::Pool::builder(manager).max_size(size).build().unwrap()
}

pub(crate) fn sqlx_pool(url: &str, size: u32) -> PgPool {
    PgPoolOptions::new().max_connections(size).connect_lazy(url).unwrap()
}

/// What a handler does after it has written the effect of its event.
#[derive(Clone)]
enum Deed {
    Nothing,
    Fail,
    Panic,
    /// Ignores that a statement has failed.
    Ignore,
    /// Works on a statement for ever.
    Sleep,
    /// Says that it has written, and goes on when it is told to.
    Wait(Arc<Notify>, Arc<Notify>),
    /// Loses its connection, once.
    Lose(Arc<AtomicBool>),
}

const EFFECT: &str = "insert into effect (position) values ($1)";
const LOSE: &str = "select pg_terminate_backend(pg_backend_pid())";

async fn act(deed: Deed, transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    transaction.execute(EFFECT, &[&delivery.position]).await?;
    publish(transaction, &NewEvent::new("effects", "effect.happened")).await?;
    match &deed {
        Deed::Ignore => drop(transaction.execute("select 1 / 0", &[]).await),
        Deed::Sleep => drop(transaction.execute("select pg_sleep(600)", &[]).await),
        Deed::Lose(lost) if !lost.swap(true, Ordering::Relaxed) => drop(transaction.execute(LOSE, &[]).await?),
        _ => {}
    }
    finish(deed).await
}

async fn act_by_sqlx(deed: Deed, connection: &mut PgConnection, delivery: Delivery) -> Result<(), Failure> {
    sqlx::query(EFFECT).bind(delivery.position).execute(&mut *connection).await?;
    publish(&mut *connection, &NewEvent::new("effects", "effect.happened")).await?;
    match &deed {
        Deed::Ignore => drop(sqlx::query("select 1 / 0").execute(&mut *connection).await),
        Deed::Sleep => drop(sqlx::query("select pg_sleep(600)").execute(&mut *connection).await),
        Deed::Lose(lost) if !lost.swap(true, Ordering::Relaxed) => {
            sqlx::query(LOSE).execute(&mut *connection).await?;
        }
        _ => {}
    }
    finish(deed).await
}

async fn finish(deed: Deed) -> Result<(), Failure> {
    match deed {
        Deed::Fail => Err(Failure::permanent("no")),
        Deed::Panic => panic!("at the disco"),
        Deed::Wait(written, go) => {
            written.notify_one();
            go.notified().await;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A pool of so many connections, of each client.
#[derive(Clone)]
enum Pool {
    Deadpool(deadpool_postgres::Pool),
    Sqlx(PgPool),
}

impl Pool {
    fn each(url: &str, size: usize) -> [Pool; 2] {
        [Pool::Deadpool(deadpool(url, size)), Pool::Sqlx(sqlx_pool(url, size as u32))]
    }

    fn handler(&self, deed: Deed) -> Transactional {
        match self.clone() {
            Pool::Deadpool(pool) => {
                Transactional::with_clients(pool, |pool| async move { pool.get().await }, with_state(deed, act))
            }
            Pool::Sqlx(pool) => Transactional::with_sqlx(pool, with_state(deed, act_by_sqlx)),
        }
    }

    /// What a session of the pool says.
    async fn ask(&self, sql: &'static str) -> String {
        match self {
            Pool::Deadpool(pool) => pool.get().await.unwrap().query_one(sql, &[]).await.unwrap().get(0),
            Pool::Sqlx(pool) => sqlx::query_scalar(sql).fetch_one(pool).await.unwrap(),
        }
    }
}

/// What a transaction might leave on a session.
const SETTINGS: &str =
    "select concat_ws(' ', current_setting('application_name'), current_setting('statement_timeout'),
    current_setting('idle_in_transaction_session_timeout'), current_setting('jit'), pg_current_xact_id_if_assigned())";

/// Runs a deed on each pool; what came of it, with effects, published events and rows of the queue.
async fn check(deed: Deed, size: usize, limit: Duration, expected: impl Fn(&Outcome) -> bool, counts: (i64, i64, i64)) {
    for which in 0..2 {
        let ground = Ground::new(&["a"]).await;
        let pool = &Pool::each(ground.database.url(), size)[which];
        let before = pool.ask(SETTINGS).await;
        let outcomes = ground.transact(&pool.handler(deed.clone()), limit).await;
        assert!(outcomes.len() == 1 && expected(&outcomes[0]), "{outcomes:?}");
        // Nothing of it is in anybody's way when that is told.
        ground.database.execute("begin; lock table effect in access exclusive mode nowait; rollback").await;
        let published = ground.database.number(PUBLISHED).await;
        assert_eq!((ground.effects().await, published, ground.rows().await), counts);
        assert_eq!(pool.ask(SETTINGS).await, before, "the session is given back as it was");
    }
}

#[tokio::test]
async fn effect_published_event_and_settlement_are_committed_together() {
    check(Deed::Nothing, 1, LIMIT, |outcome| *outcome == Outcome::Delivered, (1, 1, 0)).await;
}

#[tokio::test]
async fn a_failure_and_a_panic_leave_nothing_and_the_claim_stays() {
    check(Deed::Fail, 1, LIMIT, |outcome| *outcome == Outcome::Failed(Failure::permanent("no")), (0, 0, 1)).await;
    check(Deed::Panic, 1, LIMIT, |outcome| failure(outcome).message.contains("at the disco"), (0, 0, 1)).await;
    check(Deed::Ignore, 1, LIMIT, |outcome| failure(outcome).message.contains("aborted"), (0, 0, 1)).await;
}

#[tokio::test]
async fn a_transaction_over_its_limit_is_cancelled_and_rolled_back() {
    let timeout = |outcome: &Outcome| (failure(outcome).kind, failure(outcome).fault) == ("timeout", Fault::Event);
    check(Deed::Sleep, 2, Duration::from_millis(300), timeout, (0, 0, 1)).await;
    // Where the pool has no other connection to cancel by, the server ends the statement itself.
    check(Deed::Sleep, 1, Duration::from_millis(300), timeout, (0, 0, 1)).await;
    let (written, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    check(Deed::Wait(written, go), 1, Duration::from_millis(300), timeout, (0, 0, 1)).await;
}

#[tokio::test]
async fn what_is_recovered_while_its_handler_runs_is_not_committed() {
    for which in 0..2 {
        let ground = Arc::new(Ground::new(&["a"]).await);
        let (written, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let handler = Pool::each(ground.database.url(), 1)[which].handler(Deed::Wait(written.clone(), go.clone()));
        let late = tokio::spawn({
            let ground = ground.clone();
            async move { ground.transact(&handler, LIMIT).await }
        });
        written.notified().await;
        ground.take_away(1).await;
        go.notify_one();
        assert_eq!(late.await.unwrap(), [Outcome::NotTried]);
        assert_eq!((ground.effects().await, ground.database.number(PUBLISHED).await, ground.rows().await), (0, 0, 1));
    }
}

#[tokio::test]
async fn what_is_given_up_in_the_middle_is_cancelled_before_its_session_is_used_again() {
    for which in 0..2 {
        let ground = Arc::new(Ground::new(&["a"]).await);
        let pool = Pool::each(ground.database.url(), 2)[which].clone();
        let (handler, sleeping) = (pool.handler(Deed::Sleep), ground.sleeping());
        let running = tokio::spawn({
            let ground = ground.clone();
            async move { ground.transact(&handler, LIMIT).await }
        });
        ground.until(&sleeping, 1).await;
        running.abort();
        ground.until(&sleeping, 0).await;
        let both = tokio::join!(pool.ask(SETTINGS), pool.ask(SETTINGS));
        assert_eq!(both.0, both.1, "both sessions are as they were");
        assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
    }
}

#[tokio::test]
async fn a_lost_connection_is_not_the_events_fault_and_the_pool_makes_another() {
    for which in 0..2 {
        let ground = Ground::new(&["a"]).await;
        let handler = Pool::each(ground.database.url(), 1)[which].handler(Deed::Lose(Arc::default()));
        let outcomes = ground.transact(&handler, LIMIT).await;
        let failure = failure(&outcomes[0]);
        assert_eq!((failure.kind, failure.fault), ("connection", Fault::Unclear), "{outcomes:?}");
        assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::Delivered]);
        assert_eq!((ground.effects().await, ground.rows().await), (1, 0));
    }
}

#[tokio::test]
async fn a_pool_without_a_connection_stops_the_subscription_and_counts_no_attempt() {
    let ground = Ground::new(&["a"]).await;
    for pool in Pool::each("postgres://nobody@127.0.0.1:1/none", 1) {
        let outcomes = ground.transact(&pool.handler(Deed::Nothing), Duration::from_secs(2)).await;
        assert_eq!(failure(&outcomes[0]).fault, Fault::Sink, "{outcomes:?}");
    }
    let pool = deadpool(ground.database.url(), 1);
    let _held = pool.get().await.unwrap();
    let outcomes = ground.transact(&Pool::Deadpool(pool).handler(Deed::Nothing), Duration::from_millis(300)).await;
    assert_eq!(failure(&outcomes[0]).fault, Fault::Sink, "{outcomes:?}");
}

#[tokio::test]
async fn a_claim_in_another_schema_is_ended_there() {
    let ground = Ground::new(&["a"]).await;
    migrate(&format!("{}?schema=other_log", ground.database.url()).parse::<PgConfig>().unwrap()).await.unwrap();
    for pool in Pool::each(ground.database.url(), 1) {
        let handler = pool.handler(Deed::Nothing).schema(Schema::new("other_log").unwrap());
        assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::NotTried], "the other log knows no such claim");
        assert_eq!(ground.rows().await, 1);
    }
}

/// Events with everything that an event can have, and what it can lack.
fn various() -> Vec<NewEvent> {
    let full = NewEvent::new("t", "full").key("k").json_text(r#"{"a": [1, 2.50], "b": "\u0000'\"\\"}"#);
    let full = full.header("x", "1").deliver_at(Timestamp::now().plus(Duration::from_secs(60))).id(Uuid::now_v7());
    let bytes = NewEvent::new("t", "bytes").bytes(vec![0, 255, 10], "image/png");
    vec![full, bytes, NewEvent::new("t", "bare"), NewEvent::new("t", "null").json_text("null")]
}

#[tokio::test]
async fn what_sqlx_publishes_is_what_tokio_postgres_publishes() {
    let database = Database::new().await;
    let pool = sqlx_pool(database.url(), 1);
    let mut transaction = pool.begin().await.unwrap();
    let mut ids = publish_all(&mut *transaction, &various()[1..]).await.unwrap();
    let one = &various()[0];
    ids.push(publish(&mut transaction, one).await.unwrap());
    transaction.commit().await.unwrap();
    ids.extend(publish_all(&database.client().await, &various()).await.unwrap());
    let events = events(&database.store().await).await;
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), ids);
    let order = [1, 2, 3, 0];
    for (event, like) in events[..4].iter().zip(order) {
        let like = &events[4 + like];
        assert_eq!((&event.r#type, &event.key, &event.payload), (&like.r#type, &like.key, &like.payload));
        assert_eq!((&event.headers, &event.content_type), (&like.headers, &like.content_type));
        assert_eq!(event.deliver_at.is_some(), like.deliver_at.is_some());
    }
    assert_eq!(events[0].payload, Payload::Bytes([0, 255, 10].into()));
    assert!(publish_all(&mut *pool.acquire().await.unwrap(), &[]).await.unwrap().is_empty());
}

#[tokio::test]
async fn sqlx_publishes_what_has_a_deduplication_key_once_also_within_a_call() {
    let database = Database::new().await;
    let mut connection = sqlx_pool(database.url(), 1).acquire().await.unwrap();
    let event = |key: &str| NewEvent::new("t", "y").dedup_key(key);
    let ids = publish_all(&mut connection, &[event("a"), NewEvent::new("t", "y"), event("a"), event("b")]).await;
    let ids = ids.unwrap();
    assert_eq!(ids[0], ids[2]);
    assert_eq!(publish(&mut connection, &event("b")).await.unwrap(), ids[3]);
    assert_eq!(events(&database.store().await).await.len(), 3);
}

#[tokio::test]
async fn sqlx_is_refused_what_others_are_and_all_or_none_is_published() {
    let database = Database::new().await;
    let mut connection = sqlx_pool(database.url(), 1).acquire().await.unwrap();
    let bad = NewEvent::new("t", "y").json_text("{");
    let error = publish_all(&mut connection, &[NewEvent::new("t", "y"), bad]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(publish_all(&mut connection, &[NewEvent::new("", "y")]).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(accept(&mut connection, "", Uuid::now_v7()).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(events(&database.store().await).await.is_empty());
}

#[tokio::test]
async fn sqlx_accepts_an_id_once_and_in_the_schema_that_is_named() {
    let database = Database::new().await;
    let url = format!("{}?schema=other_log", database.url());
    migrate(&url.parse::<PgConfig>().unwrap()).await.unwrap();
    let (pool, id, other) = (sqlx_pool(database.url(), 1), Uuid::now_v7(), Schema::new("other_log").unwrap());
    for (commit, expected) in [(false, true), (true, true), (true, false)] {
        let mut transaction = pool.begin().await.unwrap();
        assert_eq!(accept(&mut *transaction, "billing", id).await.unwrap(), expected);
        assert_eq!(other.accept(&mut *transaction, "billing", id).await.unwrap(), expected);
        other.publish_all(&mut *transaction, &[NewEvent::new("t", "y")]).await.unwrap();
        if commit { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
    }
    let store = PostgresStore::open(&url).await.unwrap();
    assert_eq!((events(&store).await.len(), store.schema()), (2, other));
    assert!(events(&database.store().await).await.is_empty());
}
