//! Transactional handlers: effects, published events and the settlement are committed together, or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::sink::{Fault, Outcome};
use pillarbox::store::{ClaimId, ClaimPlace, ClaimedDelivery, Transact};
use pillarbox::{Delivery, Event, Failure, Mode, NewEvent, Subscription};
use pillarbox_sqlite::{SqliteStore, Transactional, publish};
use rusqlite::{Transaction, TransactionBehavior};

use crate::fixture::{Database, events, join, one_lane};

const LIMIT: Duration = Duration::from_secs(60);

/// A database with a table for effects and a queue whose rows this instance has claimed; claims have the number of the position.
struct Ground {
    database: Database,
    place: ClaimPlace,
    deliveries: Vec<ClaimedDelivery>,
    _store: SqliteStore,
}

impl Ground {
    /// With an event of each key, all claimed.
    async fn new(keys: &[&str]) -> Self {
        let database = Database::new();
        database.execute("create table effect (position integer not null)");
        database.publish_keys(keys);
        let store = database.store();
        let joined = join(&store, [Subscription { mode: Mode::Queue, ..one_lane("s") }]).await;
        let place = ClaimPlace { subscription: joined.subscriptions[0].id, instance: joined.instance };
        let delivery = |event: Arc<Event>| {
            let claim = Some(ClaimId(event.position));
            ClaimedDelivery { delivery: Delivery::first(event, "s"), claim }
        };
        let deliveries: Vec<_> = events(&store).await.into_iter().map(delivery).collect();
        let ground = Ground { database, place, deliveries, _store: store };
        for ClaimedDelivery { delivery, .. } in &ground.deliveries {
            ground.put(delivery.position, delivery.key.as_deref().unwrap());
            ground.claim(delivery.position, delivery.position);
        }
        ground
    }

    /// A row of the queue that is nobody's.
    fn put(&self, position: i64, key: &str) {
        let subscription = self.place.subscription.0;
        self.database.execute(&format!(
            "insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
             values ({subscription}, {position}, 0, {position}, '{key}', 'pending', 0, 0, 0)"
        ));
    }

    fn claim(&self, position: i64, claim: i64) {
        let owner = self.place.instance.0;
        let set = format!("state = 'processing', owner = {owner}, claim = {claim}, claimed_at = 1, ready_at = null");
        self.database.execute(&format!("update pillarbox_delivery set {set} where position = {position}"));
    }

    fn handler<F>(&self, function: F) -> Transactional
    where
        F: Fn(&Transaction<'_>, Delivery) -> Result<(), Failure> + Send + Sync + 'static,
    {
        Transactional::new(&self.database.path, function).unwrap()
    }

    async fn transact(&self, handler: &Transactional, limit: Duration) -> Vec<Outcome> {
        handler.transact(self.place, self.deliveries.clone(), limit).await
    }

    /// Effects, published events and rows of the queue.
    fn counts(&self) -> (i64, i64, i64) {
        let count = |sql: &str| self.database.number(sql);
        (
            count("select count(*) from effect"),
            count("select count(*) from pillarbox_event where topic = 'effects'"),
            count("select count(*) from pillarbox_delivery"),
        )
    }
}

/// Writes the effect of an event and publishes another.
fn effect(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
    transaction.execute("insert into effect (position) values (?1)", [event.position])?;
    publish(transaction, &NewEvent::new("effects", "effect.happened"))?;
    Ok(())
}

fn each_effect(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    effect(transaction, &delivery)
}

fn failure(outcome: &Outcome) -> &Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_applications_own_connection_keeps_what_it_has_and_commits_durably() {
    let ground = Ground::new(&["a"]).await;
    let connection = ground.database.connect();
    connection.execute_batch("create temp table rate as select 19 as vat; pragma synchronous = off").unwrap();
    let handler = Transactional::with_connection(connection, |transaction, event| {
        effect(transaction, &event)?;
        let vat: i64 = transaction.query_row("select vat from temp.rate", [], |row| row.get(0))?;
        let synchronous: i64 = transaction.query_row("pragma synchronous", [], |row| row.get(0))?;
        assert_eq!((vat, synchronous), (19, 2));
        Ok(())
    });
    assert_eq!(ground.transact(&handler.unwrap(), LIMIT).await, [Outcome::Delivered]);
    assert_eq!(ground.counts(), (1, 1, 0));
}

#[tokio::test]
async fn a_claim_that_was_taken_away_before_the_transaction_could_begin_is_not_tried() {
    let ground = Ground::new(&["a", "b"]).await;
    let handler = ground.handler(each_effect).batch_size(2);
    let mut connection = ground.database.connect();
    let writer = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let mut waiting = handler.transact(ground.place, ground.deliveries.clone(), LIMIT);
    // Asked for, and behind the writer that takes the claim away.
    assert!(poll_once(&mut waiting).is_none());
    writer.execute("update pillarbox_delivery set claim = 77 where position = 1", []).unwrap();
    writer.commit().unwrap();
    assert_eq!(waiting.await, [Outcome::NotTried, Outcome::Delivered]);
    assert_eq!(ground.counts(), (1, 1, 1));
    assert_eq!(ground.database.number("select position from effect"), 2);

    let again = ClaimedDelivery { claim: Some(ClaimId(77)), ..ground.deliveries[0].clone() };
    assert_eq!(handler.transact(ground.place, vec![again.clone()], LIMIT).await, [Outcome::Delivered]);
    assert_eq!(handler.transact(ground.place, vec![again], LIMIT).await, [Outcome::NotTried]);
    assert_eq!(ground.counts(), (2, 2, 0));
}

/// Polls a future once.
fn poll_once<T>(future: &mut pillarbox::sink::BoxFuture<'_, T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

#[tokio::test]
async fn nobody_takes_a_claim_while_its_handler_runs() {
    let ground = Ground::new(&["a"]).await;
    let database = ground.database.path.clone();
    let handler = ground.handler(move |transaction, event| {
        effect(transaction, &event)?;
        let other = rusqlite::Connection::open(&database)?;
        other.busy_timeout(Duration::ZERO)?;
        let refused = other.execute("update pillarbox_delivery set owner = null, claim = null", []).unwrap_err();
        assert_eq!(refused.sqlite_error_code(), Some(rusqlite::ErrorCode::DatabaseBusy));
        Ok(())
    });
    assert_eq!(ground.transact(&handler, LIMIT).await, [Outcome::Delivered]);
    assert_eq!(ground.counts(), (1, 1, 0));
}

#[tokio::test]
async fn a_batch_is_one_transaction() {
    let ground = Ground::new(&["a", "b", "c"]).await;
    let path = ground.database.path.clone();
    let handler = ground.handler(move |transaction, event| {
        let visible: i64 =
            rusqlite::Connection::open(&path)?.query_row("select count(*) from effect", [], |row| row.get(0))?;
        assert_eq!(visible, 0, "nothing is committed before all of it");
        effect(transaction, &event)
    });
    assert_eq!(ground.transact(&handler.batch_size(3), LIMIT).await, vec![Outcome::Delivered; 3]);
    assert_eq!(ground.counts(), (3, 3, 0));
}

#[tokio::test]
async fn a_transaction_over_its_limit_is_interrupted_and_rolled_back() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(|transaction, event| {
        effect(transaction, &event)?;
        let endless = "with recursive n (i) as (select 1 union all select i + 1 from n) select count(*) from n";
        transaction.query_row(endless, [], |_| Ok(()))?;
        Ok(())
    });
    let outcomes = ground.transact(&handler, Duration::from_millis(200)).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("timeout", Fault::Event), "{outcomes:?}");
    assert_eq!(ground.counts(), (0, 0, 1));
}

#[tokio::test]
async fn code_that_is_over_the_limit_is_waited_for_and_rolled_back() {
    let ground = Ground::new(&["a"]).await;
    let limit = Duration::from_millis(50);
    let handler = ground.handler(move |transaction, event| {
        effect(transaction, &event)?;
        // Code that nothing can interrupt.
        let begun = Instant::now();
        while begun.elapsed() < limit * 2 {
            std::hint::spin_loop();
        }
        Ok(())
    });
    let outcomes = ground.transact(&handler, limit).await;
    assert_eq!(failure(&outcomes[0]).kind, "timeout", "{outcomes:?}");
    assert_eq!(ground.counts(), (0, 0, 1));
}

#[tokio::test]
async fn a_panic_is_a_failure_and_the_next_transaction_works() {
    let ground = Ground::new(&["a", "b"]).await;
    let handler = ground.handler(|transaction, event| {
        effect(transaction, &event)?;
        assert_ne!(event.position, 1, "at the disco");
        Ok(())
    });
    let outcomes = ground.transact(&handler, LIMIT).await;
    let failure = failure(&outcomes[0]);
    assert_eq!((failure.kind, failure.message.contains("at the disco")), ("panic", true), "{failure:?}");
    assert_eq!((&outcomes[1], ground.counts()), (&Outcome::Delivered, (1, 1, 1)));
}

#[tokio::test]
async fn a_handler_that_ends_its_transaction_has_failed() {
    let ground = Ground::new(&["a"]).await;
    let handler = ground.handler(|transaction, event| {
        effect(transaction, &event)?;
        transaction.execute_batch("rollback")?;
        Ok(())
    });
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert!(failure(&outcomes[0]).message.contains("inside the handler"), "{outcomes:?}");
    assert_eq!(ground.counts(), (0, 0, 1));
}

#[tokio::test]
async fn what_the_commit_refuses_has_failed() {
    let ground = Ground::new(&["a", "b"]).await;
    ground.database.execute(
        "create table account (id integer primary key);
         create table booking (account integer references account (id) deferrable initially deferred)",
    );
    let handler = ground.handler(|transaction, event| {
        effect(transaction, &event)?;
        if event.position == 1 {
            transaction.execute("insert into booking values (42)", [])?;
        }
        Ok(())
    });
    let outcomes = ground.transact(&handler, LIMIT).await;
    assert!(failure(&outcomes[0]).message.contains("FOREIGN KEY"), "{outcomes:?}");
    assert_eq!((&outcomes[1], ground.counts()), (&Outcome::Delivered, (1, 1, 1)));
}

#[tokio::test]
async fn a_database_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Transactional::new(folder.path().join("none.db"), |_, _| Ok(())).is_err());
}
