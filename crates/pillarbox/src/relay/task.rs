use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::RETENTION_INTERVAL;
use super::shell::Answer;
use crate::engine::Input;
use crate::handler::{AnyHandler, CatchUnwind, Handling, Patience, call};
use crate::{
    Attempt, Batch, BatchId, ClaimPlace, ClaimedDelivery, Failpoint, Failure, Operator, Outcome, PrunePolicy, Pruned,
    Result, Retryability, Sink, Store, Transact, Wake,
};

/// A worker that is held up by one event of its batch for longer than this gives the rest back to others.
const HAND_BACK_AFTER: Duration = Duration::from_millis(20);
/// The shortest time between two rings of the doorbell that lead to no poll.
const RING_MIN: Duration = Duration::from_millis(5);
/// The shortest time between two rings while the engine is awake: it reads by itself, and only the fleet may be news.
const RING_AWAKE_MIN: Duration = Duration::from_millis(50);

/// What the listener at the doorbell knows of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Doorbell {
    /// Rings that the engine has taken in.
    pub(super) rings: u64,
    /// Polls that it has begun.
    pub(super) polls: u64,
    pub(super) asleep: bool,
}

/// A batch that is at a sink. Dropped before it is over, it tells the engine that it was given up: only then is its call over
/// for good.
pub(super) struct Running {
    batch: (usize, BatchId),
    answers: Option<mpsc::UnboundedSender<Answer>>,
}

impl Running {
    pub(super) fn new(batch: (usize, BatchId), answers: mpsc::UnboundedSender<Answer>) -> Self {
        Running { batch, answers: Some(answers) }
    }

    pub(super) fn over(mut self, outcomes: Vec<Outcome>) {
        self.send(Input::Delivered { batch: self.batch, outcomes });
        self.answers = None;
    }

    fn send(&self, input: Input) {
        if let Some(answers) = &self.answers {
            // The shell may have ended meanwhile.
            let _ = answers.send(Answer::Input(input));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.send(Input::Aborted { batch: self.batch });
    }
}

/// How long this instance may call its lanes its own without being told again.
pub(super) struct Lease {
    pub(super) started: Instant,
    /// In microseconds since then.
    pub(super) good_until: Arc<AtomicU64>,
}

impl Lease {
    fn is_over(&self) -> bool {
        self.started.elapsed().as_micros() as u64 >= self.good_until.load(Ordering::Relaxed)
    }
}

/// Rings the engine whenever the store says that something may have happened: of events while it sleeps, of the fleet always, so that
/// one that works off a backlog takes over as fast as one at rest.
pub(super) async fn listen<S: Store>(
    store: Arc<S>,
    mut doorbell: watch::Receiver<Doorbell>,
    answers: mpsc::UnboundedSender<Answer>,
    watchdog: Duration,
) {
    let mut rings = 0;
    let mut rung_awake = None;
    loop {
        // Not before the engine has taken the last ring in, or this one would be for the same thing.
        if doorbell.wait_for(|state| state.rings >= rings).await.is_err() {
            return;
        }
        Failpoint::Wait.hit();
        match next_ring(&*store, &mut doorbell, watchdog, &mut rung_awake).await {
            Ok(wake @ (Wake::Rang | Wake::Published)) => {
                let before = *doorbell.borrow();
                rings = before.rings + 1;
                let input = if wake == Wake::Rang { Input::Rang } else { Input::Published };
                if answers.send(Answer::Input(input)).is_err() {
                    return;
                }
                let Ok(after) = doorbell.wait_for(|state| state.rings >= rings).await.map(|state| *state) else {
                    return;
                };
                // A ring that the engine has no use for now, for example while all is paused, must not become a busy loop.
                if after.polls == before.polls {
                    tokio::time::sleep(RING_MIN).await;
                }
            }
            Ok(Wake::Timeout) => {}
            Err(error) if error.kind().retryability() == Retryability::Rejoin => {
                let _ = answers.send(Answer::Ended(error));
                return;
            }
            // The watchdog goes on polling; so a bell that is out of order costs latency only.
            Err(error) => {
                tracing::warn!(%error, "the doorbell is out of order; polling instead");
                tokio::time::sleep(watchdog.min(Duration::from_secs(1))).await;
            }
        }
    }
}

/// The next ring that the engine has a use for. `rung_awake` is when one last got through to an engine that was awake.
async fn next_ring<S: Store>(
    store: &S,
    doorbell: &mut watch::Receiver<Doorbell>,
    watchdog: Duration,
    rung_awake: &mut Option<Instant>,
) -> Result<Wake> {
    let mut published = false;
    loop {
        let woken = tokio::select! {
            biased;
            // What was published while it was awake may have come after its last look.
            state = doorbell.wait_for(|state| state.asleep), if published => {
                return Ok(if state.is_ok() { Wake::Published } else { Wake::Timeout });
            }
            woken = store.wait(watchdog) => woken?,
        };
        if doorbell.borrow().asleep || woken == Wake::Timeout {
            return Ok(woken);
        }
        published |= woken == Wake::Published;
        // Awake it reads by itself: it is not to be rung for every event.
        let next =
            if published { Instant::now() } else { rung_awake.unwrap_or_else(|| Instant::now() - RING_AWAKE_MIN) };
        tokio::select! {
            _ = doorbell.wait_for(|state| state.asleep) => {}
            () = tokio::time::sleep_until(next + RING_AWAKE_MIN) => {}
        }
        if woken == Wake::Rang {
            *rung_awake = Some(Instant::now());
            return Ok(Wake::Rang);
        }
    }
}

/// Removes what retention allows, slice by slice, for as long as the relay runs.
pub(super) async fn retain<S: Operator>(store: Arc<S>, policy: PrunePolicy) {
    loop {
        let mut events = 0;
        let mut more = true;
        while more {
            let slice = store.prune(&policy).await.unwrap_or_else(|error| {
                tracing::warn!(%error, "retention failed; it is tried again");
                Pruned::default()
            });
            events += slice.events;
            more = slice.more;
            // Publishers and settlements get their turn between two slices.
            tokio::task::yield_now().await;
        }
        if events > 0 {
            tracing::info!(events, "retention removed events");
        }
        tokio::time::sleep(RETENTION_INTERVAL).await;
    }
}

pub(super) async fn deliver_to_sink(sink: &dyn Sink, batch: Batch, timeout: Duration) -> Vec<Outcome> {
    let count = batch.events.len();
    let all = |failure: Failure| vec![Outcome::Failed(failure); count];
    let guarded = CatchUnwind(Box::pin(async move { sink.deliver(batch).await }));
    match tokio::time::timeout(timeout, guarded).await {
        Ok(Ok(outcomes)) => outcomes,
        Ok(Err(panic)) => all(Failure::unclear("panic", format!("the sink panicked: {panic}"))),
        Err(_) => all(Failure::unclear("timeout", format!("the sink did not answer within {timeout:?}"))),
    }
}

/// Calls a handler for one event after the other. A key stops at its first failure. Held up by one event, the rest goes back to other workers.
pub(super) async fn handle_one_by_one(
    handler: &dyn AnyHandler,
    handling: &Handling,
    events: Vec<Attempt>,
    patience: Patience,
    lease: &Lease,
    running: &Running,
) -> Vec<Outcome> {
    let count = events.len();
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(count);
    let mut failed: Vec<Box<str>> = Vec::new();
    for (index, attempt) in events.into_iter().enumerate() {
        let key = attempt.event.key.clone();
        if !failed.is_empty() && key.as_ref().is_some_and(|key| failed.contains(key)) {
            outcomes.push(Outcome::NotTried);
            continue;
        }
        if index > 0 && lease.is_over() {
            // A process that stood still for long: the engine has not noticed yet, and the rest may be another's now.
            return outcomes;
        }
        let position = attempt.event.position;
        let called = async {
            let outcome = call(handler, handling.delivery(&attempt), patience).await;
            handling.last_errors.note(position, &outcome);
            outcome
        };
        let mut calling = std::pin::pin!(called);
        let outcome = match tokio::time::timeout(HAND_BACK_AFTER, &mut calling).await {
            Ok(outcome) => outcome,
            Err(_) if count > 1 => {
                running.send(Input::HandedBack { batch: running.batch, outcomes });
                return vec![calling.await];
            }
            Err(_) => calling.await,
        };
        if matches!(outcome, Outcome::Failed(_)) {
            failed.extend(key);
        }
        outcomes.push(outcome);
    }
    outcomes
}

/// Calls a transactional handler for events that each have a claim.
pub(super) async fn transact(
    handler: &dyn Transact,
    handling: &Handling,
    place: ClaimPlace,
    events: Vec<Attempt>,
    limit: Duration,
) -> Vec<Outcome> {
    let claimed = |attempt: &Attempt| ClaimedDelivery { delivery: handling.delivery(attempt), claim: attempt.claim };
    let outcomes = handler.transact(place, events.iter().map(claimed).collect(), limit).await;
    for (attempt, outcome) in events.iter().zip(&outcomes) {
        handling.last_errors.note(attempt.event.position, outcome);
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        ClaimEnd, ClaimRequest, Claims, Epoch, Event, Fleet, Hello, Joined, LaneRef, LaneState, Page, PollRequest,
        Position, RecoverRequest, Recovered, Report, Settlement, StoreFeatures, Take,
    };

    /// A store of which nothing is used but the doorbell, which rings as the test says.
    struct Bell(Mutex<mpsc::UnboundedReceiver<Wake>>);

    impl Store for Bell {
        fn features(&self) -> StoreFeatures {
            unreachable!()
        }

        async fn join(&self, _: Hello) -> Result<Joined> {
            unreachable!()
        }

        async fn observe(&self, _: &Report) -> Result<Fleet> {
            unreachable!()
        }

        async fn take(&self, _: &[Take]) -> Result<Vec<Option<Epoch>>> {
            unreachable!()
        }

        async fn load(&self, _: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
            unreachable!()
        }

        async fn poll(&self, _: &PollRequest) -> Result<Page> {
            unreachable!()
        }

        async fn fetch(&self, _: &[Position]) -> Result<Vec<Arc<Event>>> {
            unreachable!()
        }

        async fn settle(&self, _: &Settlement) -> Result<Vec<bool>> {
            unreachable!()
        }

        async fn claim(&self, _: &[ClaimRequest]) -> Result<Vec<Claims>> {
            unreachable!()
        }

        async fn finish(&self, _: &[ClaimEnd]) -> Result<Vec<bool>> {
            unreachable!()
        }

        async fn recover(&self, _: &RecoverRequest) -> Result<Recovered> {
            unreachable!()
        }

        async fn wait(&self, _: Duration) -> Result<Wake> {
            std::future::poll_fn(|context| self.0.lock().unwrap().poll_recv(context))
                .await
                .map_or_else(|| Ok(Wake::Timeout), Ok)
        }

        async fn leave(&self) -> Result<()> {
            unreachable!()
        }
    }

    /// Listens for an engine that is awake for ever; its bell, what it is told, and what it says of itself.
    fn listening() -> (mpsc::UnboundedSender<Wake>, mpsc::UnboundedReceiver<Answer>, watch::Sender<Doorbell>) {
        let (bell, rings) = mpsc::unbounded_channel();
        let (answers, told) = mpsc::unbounded_channel();
        let (engine, doorbell) = watch::channel(Doorbell::default());
        tokio::spawn(listen(Arc::new(Bell(Mutex::new(rings))), doorbell, answers, Duration::from_secs(3600)));
        (bell, told, engine)
    }

    fn is_rang(answer: Option<Answer>) -> bool {
        matches!(answer, Some(Answer::Input(Input::Rang)))
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_works_off_a_backlog_hears_of_the_fleet() {
        let (bell, mut told, engine) = listening();
        for ring in 1..=3 {
            bell.send(Wake::Published).unwrap();
            bell.send(Wake::Rang).unwrap();
            assert!(is_rang(told.recv().await), "ring {ring}: of events it knows");
            engine.send_modify(|state| (state.rings, state.polls) = (ring, ring));
        }
        assert!(told.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_published_while_it_was_awake_is_told_when_it_falls_asleep() {
        let (bell, mut told, engine) = listening();
        bell.send(Wake::Published).unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(told.try_recv().is_err(), "it reads by itself");
        engine.send_modify(|state| state.asleep = true);
        assert!(matches!(told.recv().await, Some(Answer::Input(Input::Published))));
    }
}
