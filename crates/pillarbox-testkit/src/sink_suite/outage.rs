use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::sink::{Fault, Outcome, Sink};
use pillarbox::{Event, Payload};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::cases::assert_in_order;
use super::{ServerControl, SinkCase, SinkFixture, batch_of, numbered, sink_event};

/// What a sink promises when its receiver's server dies.
pub(super) const ALL: &[SinkCase] = &[
    case("while the receiver is down nothing is delivered and no event is blamed", |fixture| Box::pin(down(fixture))),
    case("the check fails while the receiver is down", |fixture| Box::pin(check_fails(fixture))),
    case("a sink that is made while the receiver is down delivers once it is up", |fixture| {
        Box::pin(born_down(fixture))
    }),
    case("what was acknowledged survives crashes, and keys stay in order", |fixture| Box::pin(crashes(fixture))),
];

/// How long one call may take, whatever the receiver does: longer than any sink's own limit by default.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// How long a sink may take until it delivers to a receiver that is back.
const RECOVERY_MAX: Duration = Duration::from_secs(60);

/// Between two tries, so that a sink that refuses at once is not asked in a busy loop.
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// What no failure may tell.
const CANARY: &str = "canary in the payload";

const fn case(name: &'static str, run: fn(&dyn SinkFixture) -> pillarbox::sink::BoxFuture<'_, ()>) -> SinkCase {
    SinkCase { name, needs_server: true, run }
}

fn server(fixture: &dyn SinkFixture) -> &dyn ServerControl {
    fixture.server().expect("the case is run only with a server")
}

/// One event a key.
fn secrets(keys: i64) -> Vec<Event> {
    let payload = || Payload::Json(format!("\"{CANARY}\"").into());
    (1..=keys).map(|position| sink_event(position, Some(&format!("k{position}")), payload())).collect()
}

/// Delivers a batch and holds the answer against the contract.
async fn tried(sink: &dyn Sink, events: &[Event]) -> Vec<Outcome> {
    let outcomes = tokio::time::timeout(PATIENCE, sink.deliver(batch_of(events.iter().cloned()))).await;
    let outcomes = outcomes.unwrap_or_else(|_| panic!("the sink gave no answer in {PATIENCE:?}"));
    assert_eq!(outcomes.len(), events.len(), "one outcome an event: {outcomes:?}");
    let mut stopped = HashSet::new();
    for (event, outcome) in events.iter().zip(&outcomes) {
        if event.key.is_some() && stopped.contains(&event.key) {
            assert_eq!(*outcome, Outcome::NotTried, "key {:?} went on after a failure", event.key);
            continue;
        }
        if *outcome != Outcome::Delivered {
            stopped.insert(event.key.clone());
        }
        if let Outcome::Failed(failure) = outcome {
            assert!(failure.fault != Fault::Event && !failure.permanent, "an outage is no event's fault: {failure:?}");
            assert!(!failure.pause, "an outage pauses nothing: {failure:?}");
            assert!(!failure.message.is_empty() && !failure.kind.is_empty(), "it does not say what happened");
            assert!(!failure.message.contains(CANARY), "it tells the payload: {}", failure.message);
        }
    }
    outcomes
}

/// Delivers until everything is acknowledged, as the engine does: what was not comes again, in order.
async fn insist(sink: &dyn Sink, events: &[Event]) {
    let given_up = Instant::now() + RECOVERY_MAX;
    let mut left = events.to_vec();
    loop {
        let outcomes = tried(sink, &left).await;
        let failed = outcomes.iter().find(|outcome| **outcome != Outcome::Delivered).cloned();
        let Some(failed) = failed else { return };
        assert!(Instant::now() < given_up, "the receiver is up, but: {failed:?}");
        let again = left.into_iter().zip(outcomes).filter(|(_, outcome)| *outcome != Outcome::Delivered);
        left = again.map(|(event, _)| event).collect();
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

async fn received_ids(fixture: &dyn SinkFixture) -> BTreeSet<Uuid> {
    fixture.received().await.iter().map(|received| received.id).collect()
}

async fn down(fixture: &dyn SinkFixture) {
    const KEYS: i64 = 20;
    let sink = fixture.sink();
    let before = numbered(1_000, "before");
    insist(&*sink, std::slice::from_ref(&before)).await;
    server(fixture).kill().await;
    let events = secrets(KEYS);
    for _ in 0..2 {
        let outcomes = tried(&*sink, &events).await;
        assert!(!outcomes.contains(&Outcome::Delivered), "nobody is there to take it: {outcomes:?}");
        assert!(outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed(_))), "no outcome says why");
    }
    server(fixture).restart().await;
    insist(&*sink, &events).await;
    let expected: BTreeSet<Uuid> = events.iter().map(|event| event.id).collect();
    let received = received_ids(fixture).await;
    let lost: Vec<&Uuid> = expected.difference(&received).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    assert!(fixture.features().forgets || received.contains(&before.id), "what came before the crash is lost");
}

async fn check_fails(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let check = || async { tokio::time::timeout(PATIENCE, sink.check()).await.expect("an answer in time") };
    assert_eq!(check().await, Ok(()), "before the outage");
    server(fixture).kill().await;
    let failure = check().await.expect_err("nobody is there");
    assert_ne!(failure.fault, Fault::Event, "{failure:?}");
    assert!(!failure.message.is_empty() && !failure.kind.is_empty(), "it does not say what happened");
    server(fixture).restart().await;
    let given_up = Instant::now() + RECOVERY_MAX;
    while let Err(failure) = check().await {
        assert!(Instant::now() < given_up, "the receiver is up, but: {failure:?}");
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

async fn born_down(fixture: &dyn SinkFixture) {
    server(fixture).kill().await;
    let sink = fixture.sink();
    let events = secrets(3);
    let outcomes = tried(&*sink, &events).await;
    assert!(!outcomes.contains(&Outcome::Delivered), "nobody is there to take it: {outcomes:?}");
    server(fixture).restart().await;
    insist(&*sink, &events).await;
    assert_eq!(received_ids(fixture).await, events.iter().map(|event| event.id).collect());
}

/// Batches under way at once, each task with keys of its own.
const TASKS: i64 = 4;
/// Keys of a task; each has one event in every batch, or several where the sink keeps their order.
const KEYS: i64 = 10;
/// Events of a key in one batch, where the sink keeps their order.
const EVENTS_OF_KEY: i64 = 3;
/// How often the server is killed.
const CRASHES: usize = 3;
/// So many acknowledgements come before each crash, and after the last.
const BETWEEN_CRASHES: usize = 500;
/// Batches of a task, far more than are needed until somebody notices that the server has died.
const BATCHES_MAX: i64 = 2_000;

/// What the tasks have seen.
#[derive(Default)]
struct Progress {
    acknowledged: Mutex<Vec<Uuid>>,
    counts: watch::Sender<Counts>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    acknowledged: usize,
    /// Batches of which something was not acknowledged.
    failed: usize,
    /// No new batch is begun.
    over: bool,
}

impl Progress {
    fn note(&self, events: &[Event], outcomes: &[Outcome]) {
        let acknowledged = events.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Delivered);
        let ids: Vec<Uuid> = acknowledged.map(|(event, _)| event.id).collect();
        self.counts.send_modify(|counts| {
            counts.acknowledged += ids.len();
            counts.failed += usize::from(ids.len() < events.len());
        });
        self.acknowledged.lock().expect("no task panics with it").extend(ids);
    }

    fn counts(&self) -> Counts {
        *self.counts.borrow()
    }

    async fn wait(&self, what: &str, condition: impl FnMut(&Counts) -> bool) {
        let mut counts = self.counts.subscribe();
        let waited = tokio::time::timeout(PATIENCE, counts.wait_for(condition)).await.map(drop);
        assert!(waited.is_ok(), "waited in vain for {what}: {:?}", self.counts());
    }

    async fn wait_for_more(&self) {
        let wanted = self.counts().acknowledged + BETWEEN_CRASHES;
        self.wait("deliveries", |counts| counts.acknowledged >= wanted).await;
    }
}

/// The server dies three times while batches are under way, and comes back once somebody has noticed.
async fn crashes(fixture: &dyn SinkFixture) {
    let progress = Arc::new(Progress::default());
    let sinks = [fixture.sink(), fixture.sink()];
    let tasks: Vec<_> =
        (0..TASKS).map(|task| tokio::spawn(busy(sinks[task as usize % 2].clone(), progress.clone(), task))).collect();
    for _ in 0..CRASHES {
        progress.wait_for_more().await;
        let failed = progress.counts().failed;
        server(fixture).kill().await;
        progress.wait("somebody to notice the crash", |counts| counts.failed > failed).await;
        server(fixture).restart().await;
    }
    progress.wait_for_more().await;
    progress.counts.send_modify(|counts| counts.over = true);
    for task in tasks {
        task.await.expect("every batch is delivered in the end");
    }
    let received = fixture.received().await;
    assert_in_order(&received);
    if !fixture.features().forgets {
        let ids: HashSet<Uuid> = received.iter().map(|received| received.id).collect();
        let acknowledged = progress.acknowledged.lock().expect("no task panics with it").clone();
        let lost: Vec<Uuid> = acknowledged.into_iter().filter(|id| !ids.contains(id)).collect();
        assert!(lost.is_empty(), "{} acknowledged events are lost, the first is {}", lost.len(), lost[0]);
    }
}

/// One of those that deliver meanwhile: the next batch goes only when all of the one before was acknowledged.
async fn busy(sink: Arc<dyn Sink>, progress: Arc<Progress>, task: i64) {
    let of_key = if sink.features().ordered_batch { EVENTS_OF_KEY } else { 1 };
    for batch in 0.. {
        if progress.counts().over {
            return;
        }
        assert!(batch < BATCHES_MAX, "{batch} batches were delivered and nobody has noticed a crash");
        let first = (batch * TASKS + task) * KEYS * of_key + 1;
        let event = |step: i64| numbered(first + step, &format!("{task}/{}", step % KEYS));
        let mut left: Vec<Event> = (0..KEYS * of_key).map(event).collect();
        let given_up = Instant::now() + RECOVERY_MAX;
        while !left.is_empty() {
            let outcomes = tried(&*sink, &left).await;
            progress.note(&left, &outcomes);
            let again = left.into_iter().zip(&outcomes).filter(|(_, outcome)| **outcome != Outcome::Delivered);
            left = again.map(|(event, _)| event).collect();
            if !left.is_empty() {
                assert!(
                    Instant::now() < given_up,
                    "batch {batch} of task {task} does not get through: {:?}",
                    outcomes[0]
                );
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        }
    }
}
