//! Transactional handlers: effects, published events and the settlement are committed together, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pillarbox::sink::{Fault, Outcome};
use pillarbox::store::{ClaimId, ClaimPlace, ClaimedDelivery, Transact, TransactionHandler};
use pillarbox::{Delivery, Event, Failure, Mode, NewEvent, Relay, RetryPolicy, Subscription, with_state};
use pillarbox_postgres::{PostgresStore, Transactional, publish};
use sqlx::PgConnection;
use tokio::sync::Notify;
use tokio_postgres::Transaction;

use crate::fixture::{Database, events, join, one_lane};
use crate::pools::{deadpool, sqlx_pool};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A database with a table for effects and a queue whose rows this instance has claimed; claims have the number of the position.
pub(crate) struct Ground {
    pub(crate) database: Database,
    place: ClaimPlace,
    deliveries: Vec<ClaimedDelivery>,
    _store: PostgresStore,
}

impl Ground {
    /// With an event of each key, all claimed.
    pub(crate) async fn new(keys: &[&str]) -> Self {
        let database = Database::new().await;
        database.execute("create table effect (position bigint not null)").await;
        database.publish_keys(keys).await;
        let store = database.store().await;
        let joined = join(&store, [Subscription { mode: Mode::Queue, ..one_lane("s") }]).await;
        let place = ClaimPlace { subscription: joined.subscriptions[0].id, instance: joined.instance };
        let delivery = |event: Arc<Event>| {
            let claim = Some(ClaimId(event.position));
            ClaimedDelivery { delivery: Delivery::first(event, "s"), claim }
        };
        let deliveries: Vec<_> = events(&store).await.into_iter().map(delivery).collect();
        let ground = Ground { database, place, deliveries, _store: store };
        for ClaimedDelivery { delivery, .. } in &ground.deliveries {
            ground.put(delivery.position, delivery.key.as_deref().unwrap(), "processing").await;
            ground.claim(delivery.position, delivery.position).await;
        }
        ground
    }

    /// A row of the queue that is nobody's.
    async fn put(&self, position: i64, key: &str, state: &str) {
        let subscription = self.place.subscription.0;
        let sql = format!(
            "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
             values ({subscription}, {position}, 0, {position}, '{key}', '{state}', 0, now(), now())"
        );
        self.database.execute(&sql).await;
    }

    async fn claim(&self, position: i64, claim: i64) {
        let owner = self.place.instance.0;
        let set =
            format!("state = 'processing', owner = {owner}, claim = {claim}, claimed_at = now(), ready_at = now()");
        self.database.execute(&format!("update pillarbox.delivery set {set} where position = {position}")).await;
    }

    /// What a recovery does to a claim.
    pub(crate) async fn take_away(&self, position: i64) {
        let set = "state = 'retrying', owner = null, claim = null, claimed_at = null, crashes = crashes + 1";
        self.database.execute(&format!("update pillarbox.delivery set {set} where position = {position}")).await;
    }

    fn handler<H>(&self, handler: H) -> Transactional
    where
        H: for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        Transactional::new(self.database.url(), handler).unwrap()
    }

    pub(crate) async fn transact(&self, handler: &Transactional, limit: Duration) -> Vec<Outcome> {
        handler.transact(self.place, self.deliveries.clone(), limit).await
    }

    pub(crate) async fn effects(&self) -> i64 {
        self.database.number("select count(*) from effect").await
    }

    pub(crate) async fn rows(&self) -> i64 {
        self.database.number("select count(*) from pillarbox.delivery").await
    }

    /// Counts the handlers of this instance that wait for `select pg_sleep(600)`.
    pub(crate) fn sleeping(&self) -> String {
        let instance = self.place.instance.0;
        format!(
            "select count(*) from pg_stat_activity where query like 'select pg_sleep(600)%' and state = 'active'
             and datname = current_database() and application_name = 'pillarbox relay {instance} transaction'"
        )
    }

    /// Waits until a query counts so many.
    pub(crate) async fn until(&self, sql: &str, count: i64) {
        let reached = async { while self.database.number(sql).await != count {} };
        tokio::time::timeout(LIMIT, reached).await.unwrap_or_else(|_| panic!("never {count}: {sql}"));
    }
}

/// Writes the effect of an event and publishes another.
async fn effect(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
    transaction.execute("insert into effect (position) values ($1)", &[&event.position]).await?;
    publish(transaction, &NewEvent::new("effects", "effect.happened")).await?;
    Ok(())
}

async fn each_effect(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    effect(transaction, &delivery).await
}

pub(crate) fn failure(outcome: &Outcome) -> &Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

pub(crate) const PUBLISHED: &str = "select count(*) from pillarbox.event where topic = 'effects'";
const CONNECTIONS: &str = "select count(*) from pg_stat_activity where application_name = 'pillarbox transaction'
    and datname = current_database()";

#[tokio::test]
async fn one_connection_does_for_one_at_a_time() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(async |transaction: &Transaction<'_>, delivery: Delivery| {
        effect(transaction, &delivery).await?;
        Err(Failure::permanent("no"))
    });
    for _ in 0..3 {
        assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::Failed(Failure::permanent("no"))]);
    }
    assert_eq!(ground.database.number(CONNECTIONS).await, 1, "each attempt was rolled back on the same one");
}

#[tokio::test]
async fn a_claim_that_is_gone_is_not_tried() {
    let ground = Ground::new(&["a", "b", "c"]).await;
    ground.take_away(1).await;
    ground.claim(3, 77).await;
    let handler = ground.handler(each_effect).batch_size(3);
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert_eq!(outcomes, [Outcome::NotTried, Outcome::Delivered, Outcome::NotTried]);
    assert_eq!(ground.database.number("select sum(position)::bigint from effect").await, 2);
    assert_eq!(ground.rows().await, 2);
}

async fn waiting(
    (written, go): (Arc<Notify>, Arc<Notify>),
    transaction: &Transaction<'_>,
    delivery: Delivery,
) -> Result<(), Failure> {
    effect(transaction, &delivery).await?;
    written.notify_one();
    go.notified().await;
    Ok(())
}

#[tokio::test]
async fn what_is_recovered_while_its_handler_runs_is_not_committed_and_happens_once() {
    let ground = Arc::new(Ground::new(&["a"]).await);
    let (written, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = ground.handler(with_state((written.clone(), go.clone()), waiting));
    let late = tokio::spawn({
        let ground = ground.clone();
        async move { ground.transact(&slow, LIMIT).await }
    });
    written.notified().await;
    // Nothing that the handler holds is in the way of whoever recovers.
    ground.take_away(1).await;
    ground.claim(1, 2).await;
    let quick = ground.handler(each_effect);
    let again = ClaimedDelivery { claim: Some(ClaimId(2)), ..ground.deliveries[0].clone() };
    assert_eq!(quick.transact(ground.place, vec![again], LIMIT).await, [Outcome::Delivered]);
    go.notify_one();
    assert_eq!(late.await.unwrap(), [Outcome::NotTried]);
    assert_eq!((ground.effects().await, ground.database.number(PUBLISHED).await, ground.rows().await), (1, 1, 0));
}

#[tokio::test]
async fn a_batch_is_one_transaction() {
    let ground = Ground::new(&["a", "b", "c"]).await;
    let handler = ground.handler(each_effect).batch_size(3);
    assert_eq!(Transact::batch_size(&handler), 3);
    assert_eq!(ground.transact(&handler, LIMIT).await, vec![Outcome::Delivered; 3]);
    assert_eq!(ground.database.number("select count(distinct xmin::text) from effect").await, 1);
    assert_eq!((ground.effects().await, ground.rows().await), (3, 0));
}

/// Never returns: for a statement, or for nothing.
async fn endless(
    statement: Option<&'static str>,
    transaction: &Transaction<'_>,
    delivery: Delivery,
) -> Result<(), Failure> {
    effect(transaction, &delivery).await?;
    match statement {
        Some(statement) => drop(transaction.execute(statement, &[]).await),
        None => std::future::pending().await,
    }
    Ok(())
}

/// A handler that is over time leaves nothing, and nothing of it is in anybody's way when that is told.
async fn check_time_limit(statement: Option<&'static str>) {
    let ground = Ground::new(&["a"]).await;
    let outcomes = ground.transact(&ground.handler(with_state(statement, endless)), Duration::from_millis(300)).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("timeout", Fault::Event), "{outcomes:?}");
    ground.database.execute("begin; lock table effect in access exclusive mode nowait; rollback").await;
    assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
}

#[tokio::test]
async fn a_transaction_over_its_limit_is_rolled_back() {
    check_time_limit(Some("select pg_sleep(600)")).await;
    check_time_limit(None).await;
}

#[tokio::test]
async fn a_panic_is_a_failure() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(async |transaction: &Transaction<'_>, delivery: Delivery| {
        effect(transaction, &delivery).await?;
        panic!("at the disco")
    });
    let outcomes = ground.transact(&handler, LIMIT).await;
    let failure = failure(&outcomes[0]);
    assert_eq!((failure.kind, failure.message.contains("at the disco")), ("panic", true), "{failure:?}");
    assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
}

#[tokio::test]
async fn a_failed_statement_that_the_handler_ignores_is_a_failure() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(async |transaction: &Transaction<'_>, delivery: Delivery| {
        effect(transaction, &delivery).await?;
        drop(transaction.execute("select 1 / 0", &[]).await);
        Ok(())
    });
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert!(failure(&outcomes[0]).message.contains("aborted"), "{outcomes:?}");
    assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
}

#[tokio::test]
async fn what_the_commit_refuses_has_failed() {
    let ground = Ground::new(&["a"]).await;
    let sql = "alter table effect add constraint once unique (position) deferrable initially deferred";
    ground.database.execute(&format!("{sql}; insert into effect values (1)")).await;
    let handler = ground.handler(each_effect);
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert!(failure(&outcomes[0]).message.contains("once"), "{outcomes:?}");
    assert_eq!((ground.effects().await, ground.rows().await), (1, 1));
}

#[tokio::test]
async fn a_commit_without_an_answer_is_not_tried() {
    let ground = Ground::new(&["a"]).await;
    let sql = "create function vanish() returns trigger language plpgsql as
            'begin perform pg_terminate_backend(pg_backend_pid()); return null; end';
        create constraint trigger vanish after insert on effect deferrable initially deferred
            for each row execute function vanish()";
    ground.database.execute(sql).await;
    let handler = ground.handler(each_effect);
    assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::NotTried]);
    assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
}

/// Loses its connection at the first call.
async fn losing(calls: Arc<AtomicUsize>, transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    effect(transaction, &delivery).await?;
    if calls.fetch_add(1, Ordering::Relaxed) == 0 {
        transaction.execute("select pg_terminate_backend(pg_backend_pid())", &[]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_connection_is_not_the_events_fault_and_is_made_again() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(with_state(Arc::default(), losing));
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert_eq!(
        (failure(&outcomes[0]).kind, failure(&outcomes[0]).fault),
        ("connection", Fault::Unclear),
        "{outcomes:?}"
    );
    assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::Delivered]);
    assert_eq!((ground.effects().await, ground.rows().await), (1, 0));
}

#[tokio::test]
async fn a_database_that_cannot_be_reached_stops_the_subscription_and_counts_no_attempt() {
    let ground = Ground::new(&["a", "b"]).await;
    let nowhere = Transactional::new("postgres://127.0.0.1:1/none", each_effect).unwrap();
    let outcomes = ground.transact(&nowhere.batch_size(2), LIMIT).await;
    assert_eq!(outcomes.len(), 2);
    assert!(outcomes.iter().all(|outcome| failure(outcome).fault == Fault::Sink), "{outcomes:?}");
    assert!(Transactional::new("mysql://", each_effect).is_err());
}

#[tokio::test]
async fn what_is_given_up_in_the_middle_is_cancelled_on_the_server() {
    let ground = Arc::new(Ground::new(&["a"]).await);
    let handler = ground.handler(with_state(Some("select pg_sleep(600)"), endless));
    let sleeping = ground.sleeping();
    let running = tokio::spawn({
        let ground = ground.clone();
        async move { ground.transact(&handler, LIMIT).await }
    });
    ground.until(&sleeping, 1).await;
    running.abort();
    ground.until(&sleeping, 0).await;
    ground.until(CONNECTIONS, 0).await;
    assert_eq!((ground.effects().await, ground.rows().await), (0, 1));
}

/// Fails at every fifth call.
async fn now_and_then(calls: Arc<AtomicUsize>, transaction: &Transaction<'_>, event: Delivery) -> Result<(), Failure> {
    let fails = calls.fetch_add(1, Ordering::Relaxed) % 5 == 3;
    let sql = "insert into effect (position, key) values ($1, $2)";
    transaction.execute(sql, &[&event.position, &event.key.as_deref()]).await?;
    publish(transaction, &NewEvent::new("effects", "effect.happened")).await?;
    if fails { Err(Failure::event("now and then")) } else { Ok(()) }
}

/// The same by sqlx. What is told of the attempt before is what that failed with.
async fn now_and_then_by_sqlx(
    calls: Arc<AtomicUsize>,
    connection: &mut PgConnection,
    event: Delivery,
) -> Result<(), Failure> {
    let fails = calls.fetch_add(1, Ordering::Relaxed) % 5 == 3;
    let insert = sqlx::query("insert into effect (position, key) values ($1, $2)");
    insert.bind(event.position).bind(event.key.as_deref()).execute(&mut *connection).await?;
    publish(&mut *connection, &NewEvent::new("effects", "effect.happened")).await?;
    assert_eq!(event.previous_error().is_some(), event.attempt() > 1);
    if fails { Err(Failure::event("now and then")) } else { Ok(()) }
}

#[tokio::test]
async fn a_relay_on_a_pool_of_the_applications_handles_each_event_once_and_in_order() {
    let pool = |database: &Database| {
        Transactional::with_clients(
            deadpool(database.url(), 6),
            |pool| async move { pool.get().await },
            with_state(Arc::default(), now_and_then),
        )
    };
    check_relay(pool).await;
    let sqlx = |database: &Database| {
        Transactional::with_sqlx(sqlx_pool(database.url(), 6), with_state(Arc::default(), now_and_then_by_sqlx))
    };
    check_relay(sqlx).await;
}

async fn check_relay(handler: impl Fn(&Database) -> Transactional) {
    let database = Database::new().await;
    database
        .execute("create table effect (number bigint generated always as identity, position bigint, key text)")
        .await;
    let keys: Vec<String> = (0..60).map(|number| format!("k{}", number % 7)).collect();
    database.publish_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let handler = handler(&database);
    let retry = RetryPolicy { base: Duration::from_millis(1), jitter: false, ..RetryPolicy::handler() };
    let subscription = Subscription { mode: Mode::Queue, retry, ..Subscription::new("s").topics(["t"]) };
    let builder = Relay::builder(database.store().await).transact(subscription, handler.batch_size(4));
    let relay = builder.start().await.unwrap();
    let all = async {
        // A relay is idle while only retries are left.
        while database.number("select count(*) from effect").await < 60 {
            relay.until_idle().await.unwrap();
        }
    };
    tokio::time::timeout(LIMIT, all).await.unwrap();
    relay.drain().await.unwrap();
    assert_eq!(database.number("select count(*) from effect").await, 60);
    assert_eq!(database.number("select count(distinct position) from effect").await, 60);
    assert_eq!(database.number(PUBLISHED).await, 60);
    let disordered = "select count(*) from effect as a join effect as b using (key) where a.number < b.number
        and a.position > b.position";
    assert_eq!(database.number(disordered).await, 0);
    assert_eq!(database.number("select count(*) from pillarbox.delivery").await, 0);
}
