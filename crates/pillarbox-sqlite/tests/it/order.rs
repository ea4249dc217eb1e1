use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::{Event, Failure, NewEvent, Relay, RetryPolicy, Subscription, lane_of};
use pillarbox_testkit::{Committed, Verdict};
use tokio::sync::watch;
use uuid::Uuid;

use crate::fixture::Database;

const KEYS: usize = 1_000;
/// One event of every key is a round. So many are published once both relays own lanes.
const ROUNDS: usize = 4;
/// So many at most while the second relay joins.
const ROUNDS_JOINING_MAX: usize = 100;
const LANES: u32 = 8;
/// One event in so many fails the first time: 5 %.
const FAILS_ONE_IN: u128 = 20;
/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the handlers of both relays saw.
#[derive(Default)]
struct Arrivals {
    /// Successful calls in order, with the relay that made them.
    taken: Mutex<Vec<(Uuid, usize)>>,
    count: watch::Sender<usize>,
    failed: Mutex<HashSet<Uuid>>,
    /// Handlers that are running, by relay, and the most there ever were.
    running: [AtomicUsize; 2],
    running_max: [watch::Sender<usize>; 2],
    /// The lanes that each relay worked on.
    lanes: Mutex<[HashSet<u32>; 2]>,
    /// Keys with a handler running: two at once would be a breach of order.
    busy: Mutex<HashSet<String>>,
    breaches: Mutex<Vec<String>>,
}

impl Arrivals {
    async fn handle(self: Arc<Self>, relay: usize, event: Arc<Event>) -> Result<(), Failure> {
        let running = self.running[relay].fetch_add(1, Ordering::SeqCst) + 1;
        self.running_max[relay].send_if_modified(|most| std::mem::replace(most, running.max(*most)) < running);
        let key = event.key.as_deref().unwrap().to_owned();
        if !self.busy.lock().unwrap().insert(key.clone()) {
            // Not a panic: the engine would take that for a failure of the event.
            self.breaches.lock().unwrap().push(key.clone());
        }
        // Nobody goes on before two handlers of this relay have run at once: without parallelism this ends by time-out.
        let mut most = self.running_max[relay].subscribe();
        drop(tokio::time::timeout(PATIENCE, most.wait_for(|most| *most > 1)).await);
        self.busy.lock().unwrap().remove(&key);
        let result = self.settle(relay, &event);
        self.running[relay].fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn settle(&self, relay: usize, event: &Event) -> Result<(), Failure> {
        if event.id.as_u128().is_multiple_of(FAILS_ONE_IN) && self.failed.lock().unwrap().insert(event.id) {
            return Err(Failure::event("fails the first time"));
        }
        self.lanes.lock().unwrap()[relay].insert(lane_of(event.key_hash(), event.position, LANES));
        let mut taken = self.taken.lock().unwrap();
        taken.push((event.id, relay));
        self.count.send_replace(taken.len());
        Ok(())
    }

    async fn wait_for(&self, count: usize) {
        let mut arrived = self.count.subscribe();
        let waited = tokio::time::timeout(PATIENCE, arrived.wait_for(|arrived| *arrived >= count)).await;
        assert!(waited.is_ok(), "only {} of {count} arrived", self.taken.lock().unwrap().len());
    }
}

async fn relay(database: &Database, arrivals: &Arc<Arrivals>, number: usize) -> Relay {
    let mut subscription = Subscription { lanes: LANES, ..Subscription::new("s") };
    subscription.retry = RetryPolicy { base: Duration::from_millis(5), jitter: false, ..RetryPolicy::handler() };
    let arrivals = arrivals.clone();
    let handler = move |event| arrivals.clone().handle(number, event);
    Relay::builder(database.store()).handle(subscription, handler).start().await.unwrap()
}

/// Publishes round after round, in small transactions, while the second relay joins and then some more; how many events.
fn publish(database: &Database) -> usize {
    let (mut rounds, mut left) = (0, ROUNDS);
    while left > 0 {
        let event = |key: usize| NewEvent::new("t", "y").key(format!("key-{}", (key * 7 + rounds) % KEYS));
        let events: Vec<NewEvent> = (0..KEYS).map(event).collect();
        events.chunks(100).for_each(|chunk| drop(database.publish(chunk)));
        rounds += 1;
        if left < ROUNDS || database.number("select count(distinct owner) from pillarbox_cursor") == 2 {
            left -= 1;
        }
        assert!(rounds < ROUNDS_JOINING_MAX, "the second relay got no lanes");
    }
    rounds * KEYS
}

fn committed(database: &Database) -> Vec<Committed> {
    let connection = database.connect();
    let mut statement = connection.prepare("select id, key, position from pillarbox_event").unwrap();
    let event = |row: &rusqlite::Row<'_>| {
        let id = row.get::<_, String>(0)?.parse().expect("an id is a uuid");
        Ok(Committed { id, key: row.get(1)?, position: row.get(2)? })
    };
    statement.query_map([], event).unwrap().map(Result::unwrap).collect()
}

/// The second relay joins while the first works, so that half of the lanes change hands with their keys in flight.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_key_stays_in_order_across_relays_lanes_and_failures() {
    let database = Arc::new(Database::new());
    let arrivals = Arc::new(Arrivals::default());
    let first = relay(&database, &arrivals, 0).await;
    let publisher = tokio::task::spawn_blocking({
        let database = database.clone();
        move || publish(&database)
    });
    arrivals.wait_for(KEYS / 2).await;
    let second = relay(&database, &arrivals, 1).await;
    let published = publisher.await.unwrap();
    arrivals.wait_for(published).await;
    // Nothing comes again: no relay ended and each lane was given over once it was quiet.
    first.drain().await.unwrap();
    second.drain().await.unwrap();
    let taken = arrivals.taken.lock().unwrap().clone();
    let received: Vec<Uuid> = taken.iter().map(|(id, _)| *id).collect();
    let verdict = Verdict::of(&committed(&database), &received);
    assert_eq!(verdict.committed, published);
    verdict.assert_sound(0);
    assert_eq!(*arrivals.breaches.lock().unwrap(), [""; 0], "two events of these keys were handled at once");
    let failed = arrivals.failed.lock().unwrap().len();
    assert!(failed > verdict.committed / 30, "only {failed} of {} failed", verdict.committed);
    for number in [0, 1] {
        let delivered = taken.iter().filter(|(_, relay)| *relay == number).count();
        let lanes = arrivals.lanes.lock().unwrap()[number].len();
        let most = *arrivals.running_max[number].borrow();
        println!("relay {number}: {delivered} delivered, {lanes} lanes, {most} handlers at once");
        assert!(delivered > KEYS && lanes > 1 && most > 1, "relay {number}: {delivered}, {lanes}, {most}");
    }
}
