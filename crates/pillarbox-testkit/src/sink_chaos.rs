//! Real relays, a receiver whose server is killed again and again, and an auditor that compares what was committed with what was received.
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pillarbox::admin::Operator;
use pillarbox::sink::{Attempt, Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::{Failure, NewEvent, Relay, RetryPolicy, Subscription};
use tokio::sync::watch;
use uuid::Uuid;

use crate::order::OrderedLog;
use crate::sink_suite::{ServerControl, SinkFixture};
use crate::{Committed, Verdict};

/// How many events a test publishes, if somebody wants another number than [`EVENTS`].
pub const EVENTS_VARIABLE: &str = "PILLARBOX_CHAOS_EVENTS";

/// How many events a test publishes.
pub const EVENTS: usize = 5_000;

/// The keys.
pub const KEYS: usize = 1_000;

const LANES: u32 = 8;
const RELAYS: usize = 2;
const WORKERS: usize = 4;
const BATCH_SIZE: usize = 100;
/// How often the server is killed.
const KILLS: usize = 3;
/// One event in so many is refused at its first attempt: 5 %.
const REFUSED_ONE_IN: u64 = 20;
/// Events of one of the publisher's transactions.
const TRANSACTION: usize = 50;
/// The publisher is at most this part of all events ahead of the relays, so that it still writes at the last kill.
const AHEAD: usize = 5;
/// One event in so many is of a hot key, so that a key often has several events under way.
const HOT_ONE_IN: u64 = 4;
const HOT_KEYS: u64 = 50;
const SUBSCRIPTION: &str = "chaos";

/// How long nothing may happen: twice the longest wait for a sink that is down. Only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a condition that nobody signals is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What a run showed.
#[derive(Debug, Clone, Default)]
pub struct ChaosRun {
    /// What was received, compared with what was committed.
    pub verdict: Verdict,
    /// How many keys there were.
    pub keys: usize,
    /// Committed and never acknowledged by the sink; the relay must know of each.
    pub unacknowledged: Vec<Uuid>,
    /// How many events were refused at their first attempt.
    pub refused: usize,
    /// How often the server was to be killed: not at all if there is none that can be.
    pub kills_planned: usize,
    /// When it was killed: after so many acknowledgements each.
    pub kills: Vec<usize>,
    /// How many events each relay got acknowledged.
    pub by_relay: [usize; RELAYS],
    /// How long it took.
    pub took: Duration,
}

impl ChaosRun {
    /// Nothing lost, nothing invented, every key in order, all that was planned has happened, and no more duplicates than could be under
    /// way at the kills.
    ///
    /// # Panics
    /// If not.
    #[track_caller]
    pub fn assert_sound(&self) {
        self.assert_happened();
        self.verdict.assert_sound(KILLS * RELAYS * WORKERS * BATCH_SIZE);
    }

    /// For a receiver that forgets: every event was acknowledged by it, nothing is invented, what it has is in order. What it lost is
    /// only counted.
    ///
    /// # Panics
    /// If not.
    #[track_caller]
    pub fn assert_relayed(&self) {
        self.assert_happened();
        let Verdict { phantom, out_of_order, .. } = &self.verdict;
        assert!(phantom.is_empty() && out_of_order.is_empty(), "{self}: {:?}", self.verdict);
    }

    #[track_caller]
    fn assert_happened(&self) {
        let committed = self.verdict.committed;
        assert!(self.keys >= KEYS, "{self}: only {} keys", self.keys);
        assert!(self.unacknowledged.is_empty(), "{self}: settled, but never acknowledged: {:?}", self.unacknowledged);
        assert!(self.refused > committed / 30, "{self}: too few were refused");
        assert_eq!(self.kills.len(), self.kills_planned, "{self}");
        assert!(self.by_relay.iter().all(|count| *count > committed / 20), "{self}: not both relays have worked");
    }
}

impl fmt::Display for ChaosRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ChaosRun { verdict, refused, kills, by_relay, took, .. } = self;
        write!(f, "{verdict}; {refused} refused first; killed after {kills:?}; by relay {by_relay:?}; {took:.1?}")
    }
}

/// How many events to publish: [`EVENTS`], or what [`EVENTS_VARIABLE`] says.
///
/// # Panics
/// If the variable is not a number.
pub fn events_wanted() -> usize {
    let Ok(text) = std::env::var(EVENTS_VARIABLE) else { return EVENTS };
    text.parse().unwrap_or_else(|_| panic!("{EVENTS_VARIABLE} = '{text}' is not a number"))
}

/// Publishes events in small transactions while two relays deliver them and the receiver's server, if it can be, is killed three
/// times, at moments that the seed draws. Run it on a runtime with several threads.
///
/// # Panics
/// If it does not come to an end.
pub async fn run_chaos<L: OrderedLog>(fixture: &dyn SinkFixture, log: L, events: usize, seed: u64) -> ChaosRun {
    let begun = Instant::now();
    let (log, tally) = (Arc::new(log), Arc::new(Tally::default()));
    let mut relays = Vec::new();
    for number in 0..RELAYS {
        relays.push(relay(&*log, fixture.sink(), &tally, number, seed).await);
    }
    owned_by_all(&*log).await;
    let publisher = tokio::spawn(publish(log.clone(), tally.clone(), events, seed));
    let kills = match fixture.server() {
        Some(server) => tally.kill_at(server, moments(events, seed)).await,
        None => Vec::new(),
    };
    publisher.await.expect("publishing goes through");
    tally.wait("all events to be acknowledged", |acknowledged| acknowledged >= events).await;
    for relay in relays {
        relay.until_idle().await.expect("the relay works");
        relay.drain().await.expect("the relay drains");
    }
    nothing_left(&log.store().await).await;
    let received: Vec<Uuid> = fixture.received().await.iter().map(|received| received.id).collect();
    let run = tally.judge(&log.committed().await, &received);
    let kills_planned = if fixture.server().is_some() { KILLS } else { 0 };
    ChaosRun { kills_planned, kills, took: begun.elapsed(), ..run }
}

async fn relay<L: OrderedLog>(log: &L, sink: Arc<dyn Sink>, tally: &Arc<Tally>, number: usize, seed: u64) -> Relay {
    let mut subscription = Subscription { lanes: LANES, ..Subscription::new(SUBSCRIPTION) };
    subscription.workers = WORKERS;
    subscription.batch_size = BATCH_SIZE;
    subscription.retry = RetryPolicy { base: Duration::from_millis(5), ..RetryPolicy::handler() };
    let flaky = Arc::new(Flaky { inner: sink, tally: tally.clone(), relay: number, seed });
    Relay::builder(log.store().await).subscribe(subscription, flaky).start().await.expect("the relay starts")
}

/// Waits until every relay owns lanes.
async fn owned_by_all<L: OrderedLog>(log: &L) {
    let given_up = Instant::now() + PATIENCE;
    while log.owners().await < RELAYS {
        assert!(Instant::now() < given_up, "not every relay got lanes");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Publishes round after round of the keys, with more of the hot ones between.
async fn publish<L: OrderedLog>(log: Arc<L>, tally: Arc<Tally>, events: usize, seed: u64) {
    let key = |number: usize| match mixed(seed ^ number as u64) {
        drawn if drawn.is_multiple_of(HOT_ONE_IN) => format!("key-{}", mixed(drawn) % HOT_KEYS),
        _ => format!("key-{}", number * 7 % KEYS),
    };
    let event = |number: usize| NewEvent::new("chaos", "tried").key(key(number)).json(&number);
    let numbers: Vec<usize> = (0..events).collect();
    for chunk in numbers.chunks(TRANSACTION) {
        log.publish(chunk.iter().map(|number| event(*number)).collect()).await;
        let behind = chunk[chunk.len() - 1].saturating_sub(events / AHEAD);
        tally.wait("the relays to come after", |acknowledged| acknowledged >= behind).await;
    }
}

/// One moment in each third of the time for which the publisher surely writes, in acknowledgements.
fn moments(events: usize, seed: u64) -> [usize; KILLS] {
    let part = (events - events / AHEAD) / KILLS;
    std::array::from_fn(|number| part * number + (mixed(seed ^ number as u64) as usize) % part.max(1))
}

/// Asks the log whether every event is settled.
async fn nothing_left(operator: &impl Operator) {
    let status = operator.status().await.expect("the log can be asked");
    let subscription = status.subscriptions.into_iter().find(|subscription| subscription.name == SUBSCRIPTION);
    let s = subscription.expect("the subscription is there");
    let left = [s.pending, s.delayed, s.processing, s.retrying, s.blocked, s.dead];
    assert_eq!(left, [0; 6], "pending, delayed, processing, retrying, blocked, dead");
}

/// What the sinks of both relays have seen.
#[derive(Default)]
struct Tally {
    acknowledged: Mutex<HashSet<Uuid>>,
    refused: Mutex<HashSet<Uuid>>,
    by_relay: [AtomicUsize; RELAYS],
    /// How many events were acknowledged.
    count: watch::Sender<usize>,
    /// How many batches ended without one.
    outages: watch::Sender<usize>,
}

impl Tally {
    fn note(&self, relay: usize, events: &[Attempt], outcomes: &[Outcome]) {
        let acknowledged = events.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Delivered);
        let ids: Vec<Uuid> = acknowledged.map(|(attempt, _)| attempt.event.id).collect();
        if ids.is_empty() && !events.is_empty() {
            self.outages.send_modify(|outages| *outages += 1);
        }
        self.by_relay[relay].fetch_add(ids.len(), Ordering::SeqCst);
        let mut all = self.acknowledged.lock().expect("nobody panics with it");
        all.extend(ids);
        self.count.send_replace(all.len());
    }

    fn refuse(&self, id: Uuid) -> Outcome {
        self.refused.lock().expect("nobody panics with it").insert(id);
        Outcome::Failed(Failure::event("refused at its first attempt"))
    }

    /// Waits for a number of acknowledgements, as long as there are any.
    async fn wait(&self, what: &str, enough: impl Fn(usize) -> bool) {
        let mut count = self.count.subscribe();
        while !enough(*count.borrow_and_update()) {
            let changed = tokio::time::timeout(PATIENCE, count.changed()).await;
            let reached = *count.borrow();
            assert!(changed.is_ok(), "waited for {what}; nothing was acknowledged after the first {reached} events");
        }
    }

    /// Kills the server at these moments, each time until somebody has noticed; the moments as they were.
    async fn kill_at(&self, server: &dyn ServerControl, moments: [usize; KILLS]) -> Vec<usize> {
        let mut killed = Vec::new();
        for moment in moments {
            self.wait("the next kill", |acknowledged| acknowledged >= moment).await;
            let mut outages = self.outages.subscribe();
            let before = *outages.borrow_and_update();
            server.kill().await;
            killed.push(*self.count.borrow());
            let noticed = tokio::time::timeout(PATIENCE, outages.wait_for(|outages| *outages > before)).await.map(drop);
            assert!(noticed.is_ok(), "nobody noticed that the server was killed");
            server.restart().await;
        }
        killed
    }

    fn judge(&self, committed: &[Committed], received: &[Uuid]) -> ChaosRun {
        let acknowledged = self.acknowledged.lock().expect("nobody panics with it");
        let missing = committed.iter().map(|event| event.id).filter(|id| !acknowledged.contains(id));
        ChaosRun {
            verdict: Verdict::of(committed, received),
            keys: committed.iter().filter_map(|event| event.key.as_deref()).collect::<HashSet<&str>>().len(),
            unacknowledged: missing.collect(),
            refused: self.refused.lock().expect("nobody panics with it").len(),
            by_relay: std::array::from_fn(|relay| self.by_relay[relay].load(Ordering::SeqCst)),
            ..ChaosRun::default()
        }
    }
}

/// A sink in front of another that refuses some events at their first attempt, as a receiver would.
struct Flaky {
    inner: Arc<dyn Sink>,
    tally: Arc<Tally>,
    relay: usize,
    seed: u64,
}

impl Flaky {
    fn refuses(&self, attempt: &Attempt) -> bool {
        attempt.number == 1 && mixed(self.seed ^ attempt.event.position as u64).is_multiple_of(REFUSED_ONE_IN)
    }

    async fn deliver_some(&self, batch: Batch) -> Vec<Outcome> {
        let plan = plan(&batch.events, |attempt| self.refuses(attempt));
        let passed = batch.events.iter().zip(&plan).filter(|(_, planned)| **planned == Planned::Pass);
        let passed: Vec<Attempt> = passed.map(|(attempt, _)| attempt.clone()).collect();
        let mut answers = Vec::new();
        if !passed.is_empty() {
            answers = self.inner.deliver(Batch { events: passed.clone(), ..batch.clone() }).await;
            self.tally.note(self.relay, &passed, &answers);
        }
        // A receiver that is down refuses nothing.
        let silent = plan.contains(&Planned::Refuse) && !answers.contains(&Outcome::Delivered);
        let down = if silent { self.inner.check().await.err() } else { None };
        let mut answers = answers.into_iter();
        let outcome = |(attempt, planned): (&Attempt, &Planned)| match (planned, &down) {
            (Planned::Pass, _) => answers.next().unwrap_or(Outcome::NotTried),
            (Planned::Refuse, None) => self.tally.refuse(attempt.event.id),
            (Planned::Refuse, Some(failure)) => Outcome::Failed(failure.clone()),
            (Planned::Behind, _) => Outcome::NotTried,
        };
        let outcomes = batch.events.iter().zip(&plan).map(outcome).collect();
        stop_keys(&batch.events, outcomes)
    }
}

/// A key stops at its first failure, whoever answered it.
fn stop_keys(events: &[Attempt], mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
    let mut stopped: HashSet<&str> = HashSet::new();
    for (attempt, outcome) in events.iter().zip(&mut outcomes) {
        let Some(key) = attempt.event.key.as_deref() else { continue };
        if stopped.contains(key) {
            *outcome = Outcome::NotTried;
        } else if *outcome != Outcome::Delivered {
            stopped.insert(key);
        }
    }
    outcomes
}

/// What becomes of an event of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Planned {
    Pass,
    Refuse,
    /// An earlier event of its key is refused.
    Behind,
}

fn plan(events: &[Attempt], refuses: impl Fn(&Attempt) -> bool) -> Vec<Planned> {
    let mut stopped: HashSet<&str> = HashSet::new();
    let mut plan = Vec::with_capacity(events.len());
    for attempt in events {
        let key = attempt.event.key.as_deref();
        plan.push(if key.is_some_and(|key| stopped.contains(key)) {
            Planned::Behind
        } else if refuses(attempt) {
            stopped.extend(key);
            Planned::Refuse
        } else {
            Planned::Pass
        });
    }
    plan
}

impl Sink for Flaky {
    fn features(&self) -> SinkFeatures {
        self.inner.features()
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(self.deliver_some(batch))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }

    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        self.inner.check()
    }
}

/// splitmix64
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
