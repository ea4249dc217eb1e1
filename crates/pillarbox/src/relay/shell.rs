use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::task::{Doorbell, Lease, Running, deliver_to_sink, handle_one_by_one, listen, retain, transact};
use super::{Command, End, RelayState, Target};
use crate::backoff::Backoff;
use crate::engine::{Action, Call, Engine, EngineConfig, Figures, Input};
use crate::handler::{Handling, Patience};
use crate::{
    Attempt, Batch, BatchId, BreakerReport, Change, ClaimPlace, DeliveredAttempt, Error, FailedAttempt, Failpoint,
    Hello, Joined, Mode, NextTry, Operator, Origin, PausedBy, PrunePolicy, Result, Retryability, Store, Subscription,
    SubscriptionView, metric,
};

/// How long a stop waits for the database to be told.
pub(super) const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The wait before joining again, after an attempt that failed or an instance that did not last for long.
const REJOIN_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));

/// Carries out what the engine decides, in as many sessions as an instance as it takes.
pub(super) struct Shell<S> {
    store: Arc<S>,
    config: EngineConfig,
    hello: Hello,
    targets: Vec<(Subscription, Target)>,
    /// Of the subscriptions, as batches carry them.
    names: Vec<Arc<str>>,
    started: Instant,
    state: Arc<Mutex<RelayState>>,
    idle: Vec<oneshot::Sender<()>>,
    draining: bool,
    session: Session,
    /// What goes on whichever instance this is.
    background: JoinSet<()>,
}

/// One session as an instance. Nothing of it reaches the next one: not the engine, no call, no answer.
struct Session {
    engine: Engine,
    /// Of the subscriptions.
    origins: Vec<Origin>,
    began: Instant,
    inputs: mpsc::UnboundedReceiver<Answer>,
    answers: mpsc::UnboundedSender<Answer>,
    calls: JoinSet<()>,
    deliveries: JoinSet<()>,
    doorbell: watch::Sender<Doorbell>,
    rings: u64,
    /// See [`Engine::good_until`]: in microseconds since the relay started.
    good_until: Arc<AtomicU64>,
}

/// What comes back from a task.
pub(super) enum Answer {
    Input(Input),
    Failed(Call, Error),
    /// The doorbell found out that the instance has ended.
    Ended(Error),
    Left(Result<()>),
}

/// What there is to be dealt with.
enum Next {
    /// None: none can be sent any more.
    Command(Option<Command>),
    Answer(Answer),
    Time,
}

/// Waits for the next thing to deal with. Commands first: they are few, and while there is more to do than can be done answers never run
/// out.
async fn next(
    commands: &mut mpsc::UnboundedReceiver<Command>,
    inputs: &mut mpsc::UnboundedReceiver<Answer>,
    deadline: Instant,
) -> Next {
    tokio::select! {
        biased;
        command = commands.recv() => Next::Command(command),
        answer = inputs.recv() => Next::Answer(answer.expect("the shell keeps a sender")),
        () = tokio::time::sleep_until(deadline) => Next::Time,
    }
}

/// What became of an attempt to join again.
enum Attempted {
    Join(Result<Joined>),
    Drain,
    Stop,
}

impl Session {
    /// A session that begins so long after the relay was started.
    fn new(
        config: &EngineConfig,
        mono: Duration,
        joined: &Joined,
        store: &impl Store,
        targets: &[(Subscription, Target)],
    ) -> Self {
        let features = targets.iter().map(|(subscription, target)| (subscription.clone(), target.features())).collect();
        let (answers, inputs) = mpsc::unbounded_channel();
        Session {
            engine: Engine::new(config.clone(), mono, joined, store.features(), features),
            origins: origins(joined),
            began: Instant::now(),
            inputs,
            answers,
            calls: JoinSet::new(),
            deliveries: JoinSet::new(),
            doorbell: watch::channel(Doorbell::default()).0,
            rings: 0,
            good_until: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    /// Gives up all calls, and waits until they are over.
    async fn end(&mut self) {
        self.deliveries.shutdown().await;
        self.calls.shutdown().await;
    }
}

fn origins(joined: &Joined) -> Vec<Origin> {
    let Joined { log_id, incarnation, .. } = *joined;
    let origin = |view: &SubscriptionView| Origin { log_id, incarnation, subscription: view.id };
    joined.subscriptions.iter().map(origin).collect()
}

impl<S: Store + Operator> Shell<S> {
    pub(super) fn new(
        store: S,
        config: EngineConfig,
        hello: Hello,
        targets: Vec<(Subscription, Target)>,
        joined: &Joined,
    ) -> Self {
        let started = Instant::now();
        let session = Session::new(&config, started.elapsed(), joined, &store, &targets);
        let state = RelayState {
            instance: joined.instance,
            joined: true,
            heard_at: Instant::now(),
            report: session.engine.report(),
        };
        Shell {
            store: Arc::new(store),
            config,
            hello: Hello { rejoin: true, ..hello },
            names: targets.iter().map(|target| target.0.name.as_str().into()).collect(),
            targets,
            started,
            state: Arc::new(Mutex::new(state)),
            idle: Vec::new(),
            draining: false,
            session,
            background: JoinSet::new(),
        }
    }

    /// What others may see of the relay.
    pub(super) fn state(&self) -> Arc<Mutex<RelayState>> {
        self.state.clone()
    }

    fn lock_state(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        retention: Option<PrunePolicy>,
    ) -> End {
        if let Some(policy) = retention {
            self.background.spawn(retain(self.store.clone(), policy));
        }
        let mut failures = 0;
        loop {
            let ended = match self.run_session(&mut commands).await {
                Ok(end) => return end,
                Err(ended) => ended,
            };
            if self.session.began.elapsed() >= REJOIN_BACKOFF.longest() {
                failures = 0;
            }
            if let Some(end) = self.rejoin(&mut commands, ended, &mut failures).await {
                return end;
            }
        }
    }

    /// One session as an instance: until the relay is over, or with an error the instance.
    async fn run_session(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>) -> Result<End> {
        let (doorbell, answers) = (self.session.doorbell.subscribe(), self.session.answers.clone());
        self.session.calls.spawn(listen(self.store.clone(), doorbell, answers, self.config.poll_interval));
        let mut input = Input::Tick;
        loop {
            self.session.rings += u64::from(matches!(input, Input::Rang | Input::Published));
            let now = self.started.elapsed();
            let name = input.name();
            self.session.engine.tell_deliveries(tracing::enabled!(tracing::Level::DEBUG));
            let actions = self.session.engine.step(now, input);
            tracing::trace!(input = name, actions = actions.len(), "step");
            actions.into_iter().for_each(|action| self.act(action));
            self.publish(now);
            let deadline = self.started + self.session.engine.deadline(now);
            input = match next(commands, &mut self.session.inputs, deadline).await {
                Next::Command(Some(Command::Drain)) => {
                    self.draining = true;
                    Input::Drain
                }
                Next::Command(Some(Command::Idle(sender))) => {
                    self.idle.push(sender);
                    Input::Rang
                }
                Next::Command(Some(Command::Stop) | None) => return Ok(self.stop().await),
                Next::Answer(Answer::Input(input)) => {
                    if matches!(input, Input::Observed(_)) {
                        self.lock_state().heard_at = Instant::now();
                    }
                    input
                }
                Next::Answer(Answer::Failed(call, error)) => match self.failed(call, error) {
                    Ok(input) => input,
                    Err(error) => return over(error),
                },
                Next::Answer(Answer::Ended(error)) => return over(error),
                Next::Answer(Answer::Left(result)) => return Ok(self.left(result).await),
                Next::Time => Input::Tick,
            };
            while self.session.calls.try_join_next().is_some() {}
            while self.session.deliveries.try_join_next().is_some() {}
        }
    }

    /// Gives up everything that was done as the instance that has ended, then joins again. Some: the relay is over.
    async fn rejoin(
        &mut self,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        ended: Error,
        failures: &mut u32,
    ) -> Option<End> {
        let instance = self.session.engine.instance().0;
        tracing::warn!(instance, error = %ended, source = cause(&ended), "ended as an instance; joining again");
        self.lock_state().joined = false;
        self.session.end().await;
        if self.draining {
            // There is nothing to be given back: all that it owned is others' to take.
            return Some(self.left(Ok(())).await);
        }
        loop {
            let attempt = self.join(commands, rejoin_wait(*failures)).await;
            *failures = failures.saturating_add(1);
            match attempt {
                Attempted::Drain => {
                    self.leave().await;
                    return Some(self.left(Ok(())).await);
                }
                Attempted::Stop => return Some(self.stop().await),
                Attempted::Join(Ok(joined)) => {
                    self.begin(&joined);
                    return None;
                }
                Attempted::Join(Err(error)) if may_join_later(&error) => {
                    tracing::warn!(%error, source = cause(&error), "could not rejoin; retrying");
                }
                Attempted::Join(Err(error)) => return Some(End::Failed(Arc::new(error))),
            }
        }
    }

    /// Tries to join after a wait, unless the relay is to end. Whatever is left of the attempt is gone when this returns.
    async fn join(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>, wait: Duration) -> Attempted {
        let (store, hello) = (self.store.clone(), self.hello.clone());
        let attempt = async move {
            tokio::time::sleep(wait).await;
            store.join(hello).await
        };
        let mut attempt = std::pin::pin!(attempt);
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Command::Idle(sender)) => self.idle.push(sender),
                    Some(Command::Drain) => return Attempted::Drain,
                    Some(Command::Stop) | None => return Attempted::Stop,
                },
                joined = &mut attempt => return Attempted::Join(joined),
            }
        }
    }

    /// Begins a new session as an instance.
    fn begin(&mut self, joined: &Joined) {
        tracing::info!(instance = joined.instance.0, "joined again");
        metrics::counter!(metric::REJOINS).increment(1);
        self.session = Session::new(&self.config, self.started.elapsed(), joined, &*self.store, &self.targets);
        let report = self.session.engine.report();
        *self.lock_state() = RelayState { instance: joined.instance, joined: true, heard_at: Instant::now(), report };
    }

    fn act(&mut self, action: Action) {
        let store = self.store.clone();
        match action {
            Action::Observe(report) => self.call(Call::Observe, async move {
                let fleet = store.observe(&report).await?;
                Failpoint::Observed.hit();
                Ok(Input::Observed(fleet))
            }),
            Action::Take(lanes) => self.call(Call::Take, async move {
                Failpoint::Take.hit();
                let epochs = store.take(&lanes).await?;
                Failpoint::Taken.hit();
                Ok(Input::Taken(epochs))
            }),
            Action::Load(lanes) => self.call(Call::Load, async move {
                let states = store.load(&lanes).await?;
                Failpoint::Loaded.hit();
                Ok(Input::Loaded(states))
            }),
            Action::Poll(request) => self.call(Call::Poll, async move {
                let page = store.poll(&request).await?;
                Failpoint::Polled.hit();
                Ok(Input::Polled(page))
            }),
            Action::Fetch(positions) => self.call(Call::Fetch, async move {
                let events = store.fetch(&positions).await?;
                Failpoint::Fetched.hit();
                Ok(Input::Fetched(events))
            }),
            Action::Settle(settlement) => self.call(Call::Settle, async move {
                Failpoint::Settle.hit();
                let written = store.settle(&settlement).await?;
                Failpoint::Settled.hit();
                Ok(Input::Settled(written))
            }),
            Action::Claim(requests) => self.call(Call::Claim, async move {
                let claims = store.claim(&requests).await?;
                Failpoint::Claimed.hit();
                Ok(Input::Claimed(claims))
            }),
            Action::Finish(ends) => self.call(Call::Finish, async move {
                Failpoint::Finish.hit();
                let written = store.finish(&ends).await?;
                Failpoint::Finished.hit();
                Ok(Input::Finished(written))
            }),
            Action::Recover(request) => self.call(Call::Recover, async move {
                let recovered = store.recover(&request).await?;
                Ok(Input::Recovered(recovered))
            }),
            Action::Deliver { batch, events } => self.deliver(batch, events),
            Action::Pause { subscription, reason } => {
                let pause = pause(store, self.names[subscription].clone(), reason, self.session.answers.clone());
                self.session.calls.spawn(pause);
            }
            // Each answers for itself once it is over.
            Action::Abort => self.session.deliveries.abort_all(),
            Action::Leave => {
                let answers = self.session.answers.clone();
                self.session.calls.spawn(async move {
                    Failpoint::Leave.hit();
                    let _ = answers.send(Answer::Left(store.leave().await));
                });
            }
        }
    }

    fn call(&mut self, call: Call, future: impl Future<Output = Result<Input>> + Send + 'static) {
        let answers = self.session.answers.clone();
        self.session.calls.spawn(async move {
            let answer = future.await.map_or_else(|error| Answer::Failed(call, error), Answer::Input);
            // The shell may have ended meanwhile.
            let _ = answers.send(answer);
        });
    }

    fn deliver(&mut self, batch: (usize, BatchId), events: Vec<Attempt>) {
        let (subscription, target) = &self.targets[batch.0];
        let definition = self.session.engine.definition(batch.0);
        let max_attempts = definition.retry.max_attempts;
        let timeout = subscription.heartbeat_timeout.unwrap_or(definition.processing_timeout);
        let (target, name) = (target.clone(), self.names[batch.0].clone());
        let patience = match (subscription.mode, subscription.heartbeat_timeout) {
            (Mode::Stream, _) => Patience::Total(timeout),
            (Mode::Queue, Some(pulse)) => Patience::Pulse(pulse),
            (Mode::Queue, None) => Patience::Endless,
        };
        let origin = self.session.origins[batch.0];
        let place = ClaimPlace { subscription: origin.subscription, instance: self.session.engine.instance() };
        let lease = Lease { started: self.started, good_until: self.session.good_until.clone() };
        let running = Running::new(batch, self.session.answers.clone());
        self.session.deliveries.spawn(async move {
            Failpoint::Deliver.hit();
            let outcomes = match target {
                Target::Sink(sink) => {
                    deliver_to_sink(&*sink, Batch { subscription: name, origin, events }, timeout).await
                }
                Target::Handler(handler, last_errors) => {
                    let handling = Handling { subscription: name, max_attempts, last_errors };
                    handle_one_by_one(&*handler, &handling, events, patience, &lease, &running).await
                }
                Target::Transact(handler, last_errors) => {
                    let handling = Handling { subscription: name, max_attempts, last_errors };
                    transact(&*handler, &handling, place, events, timeout).await
                }
            };
            Failpoint::Delivered.hit();
            running.over(outcomes);
        });
    }

    /// Publishes what the last step has changed.
    fn publish(&mut self, now: Duration) {
        publish_figures(self.session.engine.take_figures());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.session.engine.update_report(&mut state.report);
        drop(state);
        let engine = &self.session.engine;
        let good_until = engine.good_until().map_or(u64::MAX, |end| end.as_micros() as u64);
        self.session.good_until.store(good_until, Ordering::Relaxed);
        if !self.idle.is_empty() && engine.is_idle(now) {
            self.idle.drain(..).for_each(|sender| {
                // Nobody may be waiting any more.
                let _ = sender.send(());
            });
        }
        let state = Doorbell { rings: self.session.rings, polls: engine.polls(), asleep: engine.is_asleep() };
        self.session.doorbell.send_if_modified(|old| std::mem::replace(old, state) != state);
    }

    /// A call that may go through later is the engine's to repeat; anything else ends the instance or the relay.
    fn failed(&mut self, call: Call, error: Error) -> Result<Input> {
        metrics::counter!(metric::STORE_ERRORS, "call" => format!("{call:?}").to_lowercase()).increment(1);
        if error.kind().retryability() != Retryability::Retry {
            return Err(error);
        }
        tracing::warn!(?call, %error, source = cause(&error), "the database did not take a call; trying again");
        Ok(Input::CallFailed(call))
    }

    async fn left(&mut self, result: Result<()>) -> End {
        self.session.end().await;
        self.background.shutdown().await;
        for (_, target) in &self.targets {
            if let Target::Sink(sink) = target {
                sink.close().await;
            }
        }
        match result {
            // An instance that has ended has nothing left to give back.
            Err(error) if error.kind().retryability() != Retryability::Rejoin => End::Failed(Arc::new(error)),
            _ => End::Drained,
        }
    }

    async fn stop(&mut self) -> End {
        self.session.end().await;
        self.background.shutdown().await;
        self.leave().await;
        End::Stopped
    }

    /// Tells the database that this instance is over, if that is still to be told and can be.
    async fn leave(&self) {
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, self.store.leave()).await;
    }
}

/// Pauses a subscription whose receiver wants nothing more.
async fn pause<S: Operator>(
    store: Arc<S>,
    subscription: Arc<str>,
    reason: String,
    answers: mpsc::UnboundedSender<Answer>,
) {
    let by = PausedBy::Receiver;
    let change = Change::Pause { subscription: subscription.to_string(), by, reason: Some(reason.clone()) };
    match store.change(&change, false).await {
        Ok(changed) if changed.count > 0 => {
            tracing::warn!(%subscription, reason, "the receiver has gone; the subscription is paused until `pillarbox resume` is run");
        }
        // Somebody was faster.
        Ok(_) => {}
        Err(error) => {
            let source = cause(&error);
            tracing::warn!(%subscription, reason, %error, source, "the receiver has gone, and pausing the subscription failed; retrying");
            return;
        }
    }
    // The shell may have ended meanwhile.
    let _ = answers.send(Answer::Input(Input::Rang));
}

/// What an error that no call can be repeated after is the end of: of the instance (an error), or of the relay.
fn over(error: Error) -> Result<End> {
    if error.kind().retryability() == Retryability::Rejoin { Err(error) } else { Ok(End::Failed(Arc::new(error))) }
}

/// Whether the same join may go through later.
fn may_join_later(error: &Error) -> bool {
    matches!(error.kind().retryability(), Retryability::Retry | Retryability::Rejoin)
}

fn cause(error: &Error) -> Option<String> {
    std::error::Error::source(error).map(ToString::to_string)
}

pub(super) fn rejoin_wait(failures: u32) -> Duration {
    if failures == 0 { Duration::ZERO } else { REJOIN_BACKOFF.after(failures) }
}

fn log_delivered(delivered: &DeliveredAttempt) {
    let DeliveredAttempt { subscription, event, attempt } = delivered;
    tracing::debug!(%subscription, event = %event.id, key = event.key.as_deref(), attempt, "delivered");
}

fn log_failed(failed: &FailedAttempt) {
    let FailedAttempt { subscription, position, attempt, max_attempts, kind, error, .. } = failed;
    let (event, key) = (failed.event.map(tracing::field::display), failed.key.as_deref());
    match failed.next {
        NextTry::At(next_try) => {
            tracing::warn!(%subscription, event, position, key, attempt, max_attempts, kind, error, %next_try, "delivery failed");
        }
        NextTry::Uncounted(next_try) => tracing::warn!(
            %subscription, event, position, key, attempt, max_attempts, kind, error, %next_try,
            "delivery failed; it does not count as an attempt"
        ),
        NextTry::Resumed => tracing::warn!(
            %subscription, event, position, key, attempt, max_attempts, kind, error,
            "delivery failed; it does not count as an attempt, and the event is tried again once the subscription is resumed"
        ),
        NextTry::Never => tracing::warn!(
            %subscription, event, position, key, attempt, max_attempts, kind, error,
            "delivery failed and the event is dead; `pillarbox requeue` or `skip` it"
        ),
    }
}

fn publish_figures(figures: Figures) {
    let Figures { delivered, failed, dead, takeovers, pruned, recovered, refused, sinks, warnings, .. } = figures;
    figures.deliveries.iter().for_each(log_delivered);
    figures.failed_attempts.iter().for_each(log_failed);
    for (subscription, count) in figures.failed_unlogged {
        tracing::warn!(%subscription, count, "more deliveries failed than are logged; see them by `pillarbox list`");
    }
    for (subscription, count) in delivered {
        metrics::counter!(metric::DELIVERED, "subscription" => subscription.to_string()).increment(count);
    }
    for ((subscription, kind), count) in failed {
        metrics::counter!(metric::FAILURES, "subscription" => subscription.to_string(), "kind" => kind)
            .increment(count);
    }
    for (subscription, count) in dead {
        metrics::counter!(metric::DIED, "subscription" => subscription.to_string()).increment(count);
    }
    for (cause, count) in takeovers {
        tracing::info!(cause, count, "took lanes over");
        metrics::counter!(metric::TAKEOVERS, "cause" => cause).increment(count);
    }
    for (subscription, count) in pruned {
        metrics::counter!(metric::PRUNED_UNDELIVERED, "subscription" => subscription.to_string()).increment(count);
    }
    for ((subscription, cause), count) in recovered {
        tracing::warn!(%subscription, cause, count, "took back what others were working on");
        metrics::counter!(metric::RECOVERED, "subscription" => subscription.to_string(), "cause" => cause)
            .increment(count);
    }
    for (subscription, count) in refused {
        tracing::warn!(%subscription, count, "work was finished after it had been taken from this relay; it is done again");
        metrics::counter!(metric::REFUSED, "subscription" => subscription.to_string()).increment(count);
    }
    for (subscription, down) in sinks {
        match down {
            Some(BreakerReport { next_try, error, .. }) => {
                tracing::warn!(%subscription, %next_try, error, "the sink is considered down (circuit open); its events wait");
            }
            None => tracing::info!(%subscription, "the sink takes events again"),
        }
    }
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_command_is_looked_at_while_answers_never_run_out() {
        let (commands, mut inbox) = mpsc::unbounded_channel();
        let (answers, mut inputs) = mpsc::unbounded_channel();
        (0..3).for_each(|_| _ = answers.send(Answer::Input(Input::Rang)));
        let past = Instant::now();
        assert!(matches!(next(&mut inbox, &mut inputs, past).await, Next::Answer(Answer::Input(Input::Rang))));
        commands.send(Command::Drain).unwrap_or_else(|_| panic!("somebody listens"));
        assert!(matches!(next(&mut inbox, &mut inputs, past).await, Next::Command(Some(Command::Drain))));
        assert_eq!(inputs.len(), 2, "before the answers that were there");
        inputs.recv().await;
        inputs.recv().await;
        assert!(matches!(next(&mut inbox, &mut inputs, past).await, Next::Time));
        drop(commands);
        assert!(matches!(next(&mut inbox, &mut inputs, past).await, Next::Command(None)), "the relay was dropped");
    }

    #[test]
    fn joining_again_is_tried_at_once_and_then_ever_less_often() {
        let waits: Vec<u128> = (0..5).map(|failures| rejoin_wait(failures).as_millis()).collect();
        assert_eq!(waits, [0, 20, 40, 80, 160]);
        assert_eq!((rejoin_wait(9), rejoin_wait(u32::MAX)), (REJOIN_BACKOFF.longest(), REJOIN_BACKOFF.longest()));
    }
}
