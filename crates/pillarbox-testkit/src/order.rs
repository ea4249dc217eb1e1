//! One test for every store: a thousand keys, eight lanes, two relays, one event in twenty failing.
use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::store::{Store, lane_of};
use pillarbox::{Delivery, Event, Failure, NewEvent, Relay, RetryPolicy, Subscription};
use tokio::sync::watch;
use uuid::Uuid;

use crate::{Committed, Verdict};

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
    async fn handle(self: Arc<Self>, relay: usize, event: Delivery) -> Result<(), Failure> {
        let running = self.running[relay].fetch_add(1, Ordering::SeqCst) + 1;
        self.running_max[relay].send_if_modified(|most| std::mem::replace(most, running.max(*most)) < running);
        let key = event.key.as_deref().expect("every event has a key").to_owned();
        if !self.busy.lock().expect("no handler panics").insert(key.clone()) {
            // Not a panic: the engine would take that for a failure of the event.
            self.breaches.lock().expect("no handler panics").push(key.clone());
        }
        // Nobody goes on before two handlers of this relay have run at once: without parallelism this ends by time-out.
        let mut most = self.running_max[relay].subscribe();
        drop(tokio::time::timeout(PATIENCE, most.wait_for(|most| *most > 1)).await);
        self.busy.lock().expect("no handler panics").remove(&key);
        let result = self.settle(relay, &event);
        self.running[relay].fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn settle(&self, relay: usize, event: &Event) -> Result<(), Failure> {
        if event.id.as_u128().is_multiple_of(FAILS_ONE_IN)
            && self.failed.lock().expect("no handler panics").insert(event.id)
        {
            return Err(Failure::event("fails the first time"));
        }
        self.lanes.lock().expect("no handler panics")[relay].insert(lane_of(event.key_hash(), event.position, LANES));
        let mut taken = self.taken.lock().expect("no handler panics");
        taken.push((event.id, relay));
        self.count.send_replace(taken.len());
        Ok(())
    }

    async fn wait_for(&self, count: usize) {
        let mut arrived = self.count.subscribe();
        let waited = tokio::time::timeout(PATIENCE, arrived.wait_for(|arrived| *arrived >= count)).await;
        assert!(waited.is_ok(), "only {} of {count} arrived", self.taken.lock().expect("no handler panics").len());
    }
}

/// What the test needs of a log.
pub trait OrderedLog: Send + Sync + 'static {
    /// The store of a relay.
    type Store: Store + Operator;

    /// Another store on the log.
    fn store(&self) -> impl Future<Output = Self::Store> + Send;

    /// Publishes in one transaction.
    fn publish(&self, events: Vec<NewEvent>) -> impl Future<Output = ()> + Send;

    /// How many instances own lanes.
    fn owners(&self) -> impl Future<Output = usize> + Send;

    /// Everything that is in the log.
    fn committed(&self) -> impl Future<Output = Vec<Committed>> + Send;
}

async fn relay<L: OrderedLog>(log: &L, arrivals: &Arc<Arrivals>, number: usize) -> Relay {
    let mut subscription = Subscription { lanes: LANES, ..Subscription::new("s") };
    subscription.retry = RetryPolicy { base: Duration::from_millis(5), jitter: false, ..RetryPolicy::handler() };
    let arrivals = arrivals.clone();
    let handler = move |event| arrivals.clone().handle(number, event);
    Relay::builder(log.store().await).handle(subscription, handler).start().await.expect("the relay starts")
}

/// Publishes round after round, in small transactions, while the second relay joins and then some more; how many events.
async fn publish<L: OrderedLog>(log: Arc<L>) -> usize {
    let (mut rounds, mut left) = (0, ROUNDS);
    while left > 0 {
        let event = |key: usize| NewEvent::new("t", "y").key(format!("key-{}", (key * 7 + rounds) % KEYS));
        let events: Vec<NewEvent> = (0..KEYS).map(event).collect();
        for chunk in events.chunks(100) {
            log.publish(chunk.to_vec()).await;
        }
        rounds += 1;
        if left < ROUNDS || log.owners().await == 2 {
            left -= 1;
        }
        assert!(rounds < ROUNDS_JOINING_MAX, "the second relay got no lanes");
    }
    rounds * KEYS
}

/// The second relay joins while the first works, so that half of the lanes change hands with their keys in flight. Run it on a
/// runtime with several threads.
///
/// # Panics
/// If a key was out of order, something was lost or came twice, or the work was not done in parallel.
pub async fn check<L: OrderedLog>(log: L) {
    let (log, arrivals) = (Arc::new(log), Arc::new(Arrivals::default()));
    let first = relay(&*log, &arrivals, 0).await;
    let publisher = tokio::spawn(publish(log.clone()));
    arrivals.wait_for(KEYS / 2).await;
    let second = relay(&*log, &arrivals, 1).await;
    let published = publisher.await.expect("publishing goes through");
    arrivals.wait_for(published).await;
    // Nothing comes again: no relay ended and each lane was given over once it was quiet.
    first.drain().await.expect("the first relay drains");
    second.drain().await.expect("the second relay drains");
    let taken = arrivals.taken.lock().expect("no handler panics").clone();
    let received: Vec<Uuid> = taken.iter().map(|(id, _)| *id).collect();
    let verdict = Verdict::of(&log.committed().await, &received);
    assert_eq!(verdict.committed, published);
    verdict.assert_sound(0);
    let breaches = arrivals.breaches.lock().expect("no handler panics").clone();
    assert_eq!(breaches, [""; 0], "two events of these keys were handled at once");
    let failed = arrivals.failed.lock().expect("no handler panics").len();
    assert!(failed > verdict.committed / 30, "only {failed} of {} failed", verdict.committed);
    for number in [0, 1] {
        let delivered = taken.iter().filter(|(_, relay)| *relay == number).count();
        let lanes = arrivals.lanes.lock().expect("no handler panics")[number].len();
        let most = *arrivals.running_max[number].borrow();
        println!("relay {number}: {delivered} delivered, {lanes} lanes, {most} handlers at once");
        assert!(delivered > KEYS && lanes > 1 && most > 1, "relay {number}: {delivered}, {lanes}, {most}");
    }
}
