use std::error::Error as StdError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::engine::{Action, Call, Engine, EngineConfig, Figures, Input};
use crate::handler::{AnyHandler, CatchUnwind, call};
use crate::{
    Advice, Attempt, Batch, BatchId, Error, ErrorKind, Failpoint, Failure, Handler, Hello, InstanceId, Now, Operator,
    Outcome, PrunePolicy, Pruned, Report, Result, Sink, SinkFeatures, Store, Subscription, SubscriptionView, Timestamp,
    Wake, metric,
};

/// A worker that is held up by one event of its batch for longer than this gives the rest back to others.
const HAND_BACK_AFTER: Duration = Duration::from_millis(20);
/// The shortest time between two rings of the doorbell that lead to no poll.
const RING_MIN: Duration = Duration::from_millis(5);
/// How long a stop waits for the database to be told.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a relay removes what retention allows and lets the store look after its files.
pub const RETENTION_INTERVAL: Duration = Duration::from_secs(30);

/// How a relay runs; the limits are those of [`EngineConfig`].
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// Intervals and limits.
    pub engine: EngineConfig,
    /// How long a drain may take before what is still at a sink is cancelled. Default: 25 s.
    pub shutdown_grace: Duration,
    /// What is removed from the log once nobody needs it; looked at every [`RETENTION_INTERVAL`]. Default: events of 7 days ago that
    /// every subscription has passed. None: nothing is ever removed.
    pub retention: Option<PrunePolicy>,
    /// The host's name as operators see it. Default: from the environment.
    pub host: String,
}

impl Default for RelayConfig {
    fn default() -> Self {
        let host = std::env::var("HOSTNAME").ok().or_else(|| std::fs::read_to_string("/etc/hostname").ok());
        RelayConfig {
            engine: EngineConfig {
                seed: u64::from(std::process::id()) ^ Timestamp::now().0 as u64,
                ..EngineConfig::default()
            },
            shutdown_grace: Duration::from_secs(25),
            retention: Some(PrunePolicy::default()),
            host: host.map_or_else(|| "localhost".into(), |host| host.trim().to_owned()),
        }
    }
}

/// A running relay: one instance that owns lanes, reads the log and delivers. Dropping it stops it at once, as a crash
/// would: nothing is lost, what was at a sink comes again.
#[derive(Debug)]
pub struct Relay {
    instance: InstanceId,
    subscriptions: Vec<SubscriptionView>,
    commands: mpsc::UnboundedSender<Command>,
    report: Arc<Mutex<Report>>,
    end: watch::Receiver<Option<End>>,
    shutdown_grace: Duration,
    /// Aborts the relay's task when the relay is dropped.
    _task: JoinSet<()>,
}

/// How a relay ended.
#[derive(Debug, Clone)]
enum End {
    Drained,
    Stopped,
    Failed(Arc<Error>),
}

enum Command {
    Drain,
    Stop,
    Idle(oneshot::Sender<()>),
}

/// Builds a [`Relay`].
pub struct RelayBuilder<S> {
    store: S,
    config: RelayConfig,
    targets: Vec<(Subscription, Target)>,
}

#[derive(Clone)]
enum Target {
    Sink(Arc<dyn Sink>),
    Handler(Arc<dyn AnyHandler>),
}

impl Target {
    fn features(&self) -> SinkFeatures {
        match self {
            Target::Sink(sink) => sink.features(),
            Target::Handler(_) => SinkFeatures { ordered_batch: true, one_by_one: true },
        }
    }
}

impl<S: Store + Operator> RelayBuilder<S> {
    /// How to run.
    pub fn config(mut self, config: RelayConfig) -> Self {
        self.config = config;
        self
    }

    /// Delivers a subscription to a sink.
    pub fn subscribe(mut self, subscription: Subscription, sink: Arc<dyn Sink>) -> Self {
        self.targets.push((subscription, Target::Sink(sink)));
        self
    }

    /// Calls a function for each event of a subscription.
    pub fn handle(mut self, subscription: Subscription, handler: impl Handler) -> Self {
        self.targets.push((subscription, Target::Handler(Arc::new(handler))));
        self
    }

    /// Joins the fleet and begins to work in the background.
    pub async fn start(self) -> Result<Relay> {
        for (subscription, _) in &self.targets {
            subscription.validate()?;
            if self.targets.iter().filter(|other| other.0.name == subscription.name).count() > 1 {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!("two subscriptions are named '{}'; give each its own name", subscription.name),
                ));
            }
        }
        let hello = Hello {
            host: self.config.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            subscriptions: self.targets.iter().map(|target| target.0.clone()).collect(),
        };
        let joined = self.store.join(hello).await?;
        Failpoint::Joined.hit();
        let features =
            self.targets.iter().map(|(subscription, target)| (subscription.clone(), target.features())).collect();
        let engine = Engine::new(self.config.engine.clone(), &joined, self.store.features(), features);
        let (commands, inbox) = mpsc::unbounded_channel();
        let (end_sender, end) = watch::channel(None);
        let report = Arc::new(Mutex::new(engine.report()));
        let shell = Shell::new(self.store, engine, self.targets, self.config.engine.poll_interval, report.clone());
        let retention = self.config.retention;
        let mut task = JoinSet::new();
        task.spawn(async move {
            let end = shell.run(inbox, retention).await;
            end_sender.send_replace(Some(end));
        });
        Ok(Relay {
            instance: joined.instance,
            subscriptions: joined.subscriptions,
            commands,
            report,
            end,
            shutdown_grace: self.config.shutdown_grace,
            _task: task,
        })
    }
}

impl Relay {
    /// A relay on this store.
    pub fn builder<S: Store + Operator>(store: S) -> RelayBuilder<S> {
        RelayBuilder { store, config: RelayConfig::default(), targets: Vec::new() }
    }

    /// This instance's number.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// The subscriptions as the database had them when this relay joined.
    pub fn subscriptions(&self) -> &[SubscriptionView] {
        &self.subscriptions
    }

    /// What this relay says of its work.
    pub fn report(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it works: not draining and not ended.
    pub fn ready(&self) -> bool {
        self.end.borrow().is_none() && !self.report().draining
    }

    /// Waits until nothing can be delivered now that was committed before the call. What waits for a retry, its time, an operator,
    /// another instance or a sink that is down does not count.
    pub async fn until_idle(&self) -> Result<()> {
        let (sender, receiver) = oneshot::channel();
        let _ = self.commands.send(Command::Idle(sender));
        match receiver.await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.failed().await),
        }
    }

    /// Stops reading, finishes what is at the sinks, settles it and gives the lanes back: nothing comes again. After
    /// `shutdown_grace` what is still at a sink is cancelled.
    pub async fn drain(mut self) -> Result<()> {
        let _ = self.commands.send(Command::Drain);
        let ended = tokio::time::timeout(self.shutdown_grace, self.end.wait_for(Option::is_some)).await.is_ok();
        if !ended {
            tracing::warn!(grace = ?self.shutdown_grace, "the drain took too long; stopping, what is in flight comes again");
            self.stop().await;
            return Ok(());
        }
        let end = self.end.borrow().clone();
        match end {
            Some(End::Failed(error)) => Err(shared(&error)),
            _ => Ok(()),
        }
    }

    /// Stops at once: calls to sinks are cancelled, their events come again.
    pub async fn stop(mut self) {
        let _ = self.commands.send(Command::Stop);
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, self.end.wait_for(Option::is_some)).await;
    }

    /// Waits until the relay has ended by itself, and says why.
    pub async fn failed(&self) -> Error {
        let mut end = self.end.clone();
        let ended = end.wait_for(Option::is_some).await.map(|end| end.clone());
        match ended {
            Ok(Some(End::Failed(error))) => shared(&error),
            Ok(_) => Error::new(ErrorKind::Unavailable, "the relay was stopped"),
            Err(_) => Error::new(ErrorKind::Fatal, "the relay's task panicked"),
        }
    }
}

/// The same error once more, with its causes if it has any.
fn shared(error: &Arc<Error>) -> Error {
    match StdError::source(&**error) {
        None => Error::new(error.kind(), error.to_string()),
        Some(_) => Error::with_source(error.kind(), error.to_string(), SharedSource(error.clone())),
    }
}

/// Stands for the cause of an error that several hold.
#[derive(Debug)]
struct SharedSource(Arc<Error>);

impl SharedSource {
    fn cause(&self) -> &(dyn StdError + 'static) {
        StdError::source(&*self.0).expect("only an error that has a cause is shared like this")
    }
}

impl std::fmt::Display for SharedSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self.cause(), f)
    }
}

impl StdError for SharedSource {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause().source()
    }
}

/// Carries out what the engine decides.
struct Shell<S> {
    store: Arc<S>,
    engine: Engine,
    targets: Vec<(Arc<str>, Duration, Target)>,
    started: Instant,
    watchdog: Duration,
    report: Arc<Mutex<Report>>,
    inputs: mpsc::UnboundedReceiver<Answer>,
    answers: mpsc::UnboundedSender<Answer>,
    calls: JoinSet<()>,
    idle: Vec<oneshot::Sender<()>>,
    doorbell: watch::Sender<Doorbell>,
    rings: u64,
}

/// What the listener at the doorbell knows of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Doorbell {
    /// Rings that the engine has taken in.
    rings: u64,
    /// Polls that it has begun.
    polls: u64,
    asleep: bool,
}

/// What comes back from a task.
enum Answer {
    Input(Input),
    Failed(Call, Error),
    Left(Result<()>),
}

impl<S: Store + Operator> Shell<S> {
    fn new(
        store: S,
        engine: Engine,
        targets: Vec<(Subscription, Target)>,
        watchdog: Duration,
        report: Arc<Mutex<Report>>,
    ) -> Self {
        let (answers, inputs) = mpsc::unbounded_channel();
        let target = |(subscription, target): (Subscription, Target)| {
            (subscription.name.as_str().into(), subscription.processing_timeout, target)
        };
        Shell {
            store: Arc::new(store),
            engine,
            targets: targets.into_iter().map(target).collect(),
            started: Instant::now(),
            watchdog,
            report,
            inputs,
            answers,
            calls: JoinSet::new(),
            idle: Vec::new(),
            doorbell: watch::channel(Doorbell::default()).0,
            rings: 0,
        }
    }

    fn now(&self) -> Now {
        Now { mono: self.started.elapsed(), wall: Timestamp::now() }
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>, retention: Option<PrunePolicy>) -> End {
        self.calls.spawn(listen(self.store.clone(), self.doorbell.subscribe(), self.answers.clone(), self.watchdog));
        if let Some(policy) = retention {
            self.calls.spawn(retain(self.store.clone(), policy));
        }
        let mut input = Input::Tick;
        loop {
            self.rings += u64::from(matches!(input, Input::Rang));
            let now = self.now();
            let actions = self.engine.step(now, input);
            actions.into_iter().for_each(|action| self.act(action));
            self.publish_figures(now);
            let deadline = self.started + self.engine.deadline(now);
            input = tokio::select! {
                biased;
                answer = self.inputs.recv() => match answer.expect("the shell keeps a sender") {
                    Answer::Input(input) => input,
                    Answer::Failed(call, error) => match self.failed(call, error) {
                        Ok(input) => input,
                        Err(error) => return End::Failed(Arc::new(error)),
                    },
                    Answer::Left(result) => return self.left(result).await,
                },
                command = commands.recv() => match command {
                    Some(Command::Drain) => Input::Drain,
                    Some(Command::Idle(sender)) => {
                        self.idle.push(sender);
                        Input::Rang
                    }
                    Some(Command::Stop) | None => return self.stop().await,
                },
                () = tokio::time::sleep_until(deadline) => Input::Tick,
            };
            while self.calls.try_join_next().is_some() {}
        }
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
            Action::Deliver { batch, events } => self.deliver(batch, events),
            Action::Leave => {
                let answers = self.answers.clone();
                self.calls.spawn(async move {
                    Failpoint::Leave.hit();
                    let _ = answers.send(Answer::Left(store.leave().await));
                });
            }
        }
    }

    fn call(&mut self, call: Call, future: impl Future<Output = Result<Input>> + Send + 'static) {
        let answers = self.answers.clone();
        self.calls.spawn(async move {
            let answer = future.await.map_or_else(|error| Answer::Failed(call, error), Answer::Input);
            // The shell may have ended meanwhile.
            let _ = answers.send(answer);
        });
    }

    fn deliver(&mut self, batch: (usize, BatchId), events: Vec<Attempt>) {
        let (name, timeout, target) = self.targets[batch.0].clone();
        let answers = self.answers.clone();
        self.calls.spawn(async move {
            Failpoint::Deliver.hit();
            let outcomes = match target {
                Target::Sink(sink) => deliver_to_sink(&*sink, Batch { subscription: name, events }, timeout).await,
                Target::Handler(handler) => handle_one_by_one(&*handler, events, timeout, batch, &answers).await,
            };
            Failpoint::Delivered.hit();
            let _ = answers.send(Answer::Input(Input::Delivered { batch, outcomes }));
        });
    }

    fn publish_figures(&mut self, now: Now) {
        let Figures { delivered, failed, dead, takeovers, pruned, warnings } = self.engine.take_figures();
        for (subscription, count) in delivered {
            metrics::counter!(metric::DELIVERED, "subscription" => subscription.to_string()).increment(count);
        }
        for ((subscription, kind), count) in failed {
            metrics::counter!(metric::FAILURES, "subscription" => subscription.to_string(), "kind" => kind)
                .increment(count);
        }
        for (subscription, count) in dead {
            tracing::warn!(%subscription, count, "events are dead; see them by `pillarbox list --state dead`");
            metrics::counter!(metric::DIED, "subscription" => subscription.to_string()).increment(count);
        }
        for (cause, count) in takeovers {
            tracing::info!(cause, count, "took lanes over");
            metrics::counter!(metric::TAKEOVERS, "cause" => cause).increment(count);
        }
        for (subscription, count) in pruned {
            metrics::counter!(metric::PRUNED_UNDELIVERED, "subscription" => subscription.to_string()).increment(count);
        }
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.report();
        if !self.idle.is_empty() && self.engine.is_idle(now) {
            self.idle.drain(..).for_each(|sender| {
                // Nobody may be waiting any more.
                let _ = sender.send(());
            });
        }
        let state = Doorbell { rings: self.rings, polls: self.engine.polls(), asleep: self.engine.is_asleep() };
        self.doorbell.send_if_modified(|old| std::mem::replace(old, state) != state);
    }

    /// A call that may go through later is the engine's to repeat; anything else ends the relay.
    fn failed(&mut self, call: Call, error: Error) -> Result<Input> {
        metrics::counter!(metric::STORE_ERRORS, "call" => format!("{call:?}").to_lowercase()).increment(1);
        if error.kind().advice() != Advice::Retry {
            return Err(error);
        }
        let source = std::error::Error::source(&error).map(ToString::to_string);
        tracing::warn!(?call, %error, source, "the database did not take a call; trying again");
        Ok(Input::CallFailed(call))
    }

    async fn left(mut self, result: Result<()>) -> End {
        self.calls.shutdown().await;
        for (_, _, target) in &self.targets {
            if let Target::Sink(sink) = target {
                sink.close().await;
            }
        }
        result.map_or_else(|error| End::Failed(Arc::new(error)), |()| End::Drained)
    }

    async fn stop(mut self) -> End {
        self.calls.shutdown().await;
        let _ = tokio::time::timeout(LEAVE_TIMEOUT, self.store.leave()).await;
        End::Stopped
    }
}

/// Rings the engine whenever the store says that something may have happened while the engine sleeps.
async fn listen<S: Store>(
    store: Arc<S>,
    mut doorbell: watch::Receiver<Doorbell>,
    answers: mpsc::UnboundedSender<Answer>,
    watchdog: Duration,
) {
    let mut rings = 0;
    loop {
        // Not before the engine has taken the last ring in, or this one would be for the same thing.
        if doorbell.wait_for(|state| state.rings >= rings && state.asleep).await.is_err() {
            return;
        }
        Failpoint::Wait.hit();
        match store.wait(watchdog).await {
            Ok(Wake::Rang) => {
                let before = *doorbell.borrow();
                rings = before.rings + 1;
                if answers.send(Answer::Input(Input::Rang)).is_err() {
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
            // The watchdog goes on polling; so a bell that is out of order costs latency only.
            Err(error) => {
                tracing::warn!(%error, "the doorbell is out of order; polling instead");
                tokio::time::sleep(watchdog.min(Duration::from_secs(1))).await;
            }
        }
    }
}

/// Removes what retention allows, slice by slice, for as long as the relay runs.
async fn retain<S: Operator>(store: Arc<S>, policy: PrunePolicy) {
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

async fn deliver_to_sink(sink: &dyn Sink, batch: Batch, timeout: Duration) -> Vec<Outcome> {
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
async fn handle_one_by_one(
    handler: &dyn AnyHandler,
    events: Vec<Attempt>,
    timeout: Duration,
    batch: (usize, BatchId),
    answers: &mpsc::UnboundedSender<Answer>,
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
        let mut running = std::pin::pin!(call(handler, attempt.event, timeout));
        let held_up = index + 1 < count;
        let outcome = match tokio::time::timeout(HAND_BACK_AFTER, &mut running).await {
            Ok(outcome) => outcome,
            Err(_) if held_up => {
                let _ = answers.send(Answer::Input(Input::HandedBack { batch, kept: index + 1 }));
                outcomes.push(running.await);
                return outcomes;
            }
            Err(_) => running.await,
        };
        if matches!(outcome, Outcome::Failed(_)) {
            failed.extend(key);
        }
        outcomes.push(outcome);
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(error: &Error) -> Vec<String> {
        let causes = std::iter::successors(Some(error as &(dyn StdError + 'static)), |error| (*error).source());
        causes.map(ToString::to_string).collect()
    }

    #[test]
    fn a_shared_error_tells_its_causes_and_no_others() {
        let alone = Arc::new(Error::new(ErrorKind::Fatal, "buried by another"));
        assert_eq!(chain(&shared(&alone)), ["buried by another"]);
        let disk = Error::with_source(ErrorKind::Full, "cannot write", std::io::Error::other("disk full"));
        let whole = Arc::new(Error::with_source(ErrorKind::Full, "cannot settle", disk));
        let again = shared(&whole);
        assert_eq!(chain(&again), ["cannot settle", "cannot write", "disk full"]);
        assert_eq!((again.kind(), chain(&whole)), (ErrorKind::Full, chain(&again)));
    }
}
