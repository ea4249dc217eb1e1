mod shell;
mod task;

use std::error::Error as StdError;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::shell::{LEAVE_TIMEOUT, Shell, rejoin_wait};
use crate::engine::EngineConfig;
use crate::handler::{AnyHandler, IsHandler, LastErrors};
use crate::{
    Delivery, Error, ErrorKind, Failpoint, Failure, Handler, Hello, InstanceId, Joined, Mode, Operator, PrunePolicy,
    Report, Result, Sink, SinkFeatures, Store, Subscription, SubscriptionView, Timestamp, Transact, with_state,
};

/// How often a relay removes what retention allows and lets the store look after its files.
pub const RETENTION_INTERVAL: Duration = Duration::from_secs(30);

/// One part in this many of a drain's time is left for giving the lanes back.
const LEAVE_PART: u32 = 5;

/// How often a relay that starts tries again to join because another session holds a lock that it needs.
const BUSY_JOINS_MAX: u32 = 2;

/// How a relay runs; its intervals and limits are those of [`EngineConfig`].
///
/// ```
/// use std::time::Duration;
/// use pillarbox::{Relay, RelayConfig, Subscription};
/// # use pillarbox::{admin::Operator, store::Store};
///
/// # async fn run(store: impl Store + Operator) -> pillarbox::Result<Relay> {
/// let mut config = RelayConfig { shutdown_grace: Duration::from_secs(10), ..RelayConfig::default() };
/// config.engine.lease_ttl = Duration::from_secs(5);
/// let print = async |delivery: pillarbox::Delivery| Ok(println!("{}", delivery.id));
/// Relay::builder(store).config(config).handle(Subscription::stream("print"), print).start().await
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// Intervals and limits.
    pub engine: EngineConfig,
    /// How long a drain may take. What is still at a sink when a fifth of it is left, or 5 s if that is less, is cancelled, so that there is
    /// time to give the lanes back. Default: 25 s.
    pub shutdown_grace: Duration,
    /// What is removed from the log once no subscription needs it; looked at every [`RETENTION_INTERVAL`]. Default: events of 7 days ago that
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

/// A running relay: an instance that owns lanes, reads the log and delivers. Dropping it stops it at once, as a crash
/// would: nothing is lost, what was at a sink comes again.
///
/// When it loses the database for so long that others may take it for dead, it gives up what is at its sinks and comes back by itself,
/// as another instance; what it gave up comes again.
///
/// ```
/// use pillarbox::{Delivery, Relay, Subscription};
/// # use pillarbox::{admin::Operator, store::Store};
///
/// # async fn run(store: impl Store + Operator, stop: impl Future<Output = ()>) -> Result<(), Box<dyn std::error::Error>> {
/// let print = async |delivery: Delivery| Ok(println!("{}", delivery.id));
/// let relay = Relay::builder(store).handle(Subscription::stream("print"), print).start().await?;
/// tokio::select! {
///     () = stop => relay.drain().await?,
///     error = relay.failed() => return Err(error.into()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Relay {
    subscriptions: Vec<SubscriptionView>,
    commands: mpsc::UnboundedSender<Command>,
    state: Arc<Mutex<RelayState>>,
    end: watch::Receiver<Option<End>>,
    shutdown_grace: Duration,
    /// Aborts the relay's task when the relay is dropped.
    _task: JoinSet<()>,
}

/// What can be seen of a relay from outside.
#[derive(Debug)]
struct RelayState {
    instance: InstanceId,
    /// It is that instance still, and not about to become another.
    joined: bool,
    /// When the database last answered its beat.
    heard_at: Instant,
    report: Report,
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

/// Builds a [`Relay`]: a store, and for each subscription the handler or sink that it delivers to.
///
/// ```
/// use pillarbox::{Delivery, RelayBuilder, Subscription};
/// # use pillarbox::{admin::Operator, store::Store};
///
/// /// Adds what every service of ours delivers.
/// fn with_audit<S: Store + Operator>(builder: RelayBuilder<S>) -> RelayBuilder<S> {
///     builder.handle(Subscription::stream("audit"), async |delivery: Delivery| Ok(println!("{}", delivery.id)))
/// }
/// ```
pub struct RelayBuilder<S> {
    store: S,
    config: RelayConfig,
    targets: Vec<(Subscription, Target)>,
}

#[derive(Clone)]
enum Target {
    Sink(Arc<dyn Sink>),
    Handler(Arc<dyn AnyHandler>, Arc<LastErrors>),
    Transact(Arc<dyn Transact>, Arc<LastErrors>),
}

impl Target {
    fn features(&self) -> SinkFeatures {
        match self {
            Target::Sink(sink) => sink.features(),
            Target::Handler(..) => SinkFeatures { ordered_batch: true, one_by_one: true, ..SinkFeatures::default() },
            Target::Transact(..) => SinkFeatures { one_by_one: true, settles: true, ..SinkFeatures::default() },
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

    /// Calls a [`Handler`] for each event of a subscription: an async function, a closure, or a type of your own.
    pub fn handle<Kind>(mut self, subscription: Subscription, handler: impl IsHandler<Kind> + Handler) -> Self {
        self.targets.push((subscription, Target::Handler(Arc::new(handler), Arc::default())));
        self
    }

    /// As [`handle`](RelayBuilder::handle), for a function that needs a state: each call gets a clone of it. Put what is no cheap
    /// clone into an `Arc`.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use pillarbox::{Relay, Subscription};
    /// # use pillarbox::{admin::Operator, store::Store};
    ///
    /// struct Mailer { from: String }
    ///
    /// # async fn run(store: impl Store + Operator) -> pillarbox::Result<Relay> {
    /// let mailer = Arc::new(Mailer { from: "shop@example.org".into() });
    /// Relay::builder(store)
    ///     .handle_with(Subscription::stream("mailer").topics(["orders"]), mailer, |mailer, delivery| async move {
    ///         let order: u64 = delivery.json()?;
    ///         println!("{} confirms order {order}", mailer.from);
    ///         Ok(())
    ///     })
    ///     .start()
    ///     .await
    /// # }
    /// ```
    pub fn handle_with<T, F, Fut>(self, subscription: Subscription, state: T, function: F) -> Self
    where
        T: Clone + Send + Sync + 'static,
        F: Fn(T, Delivery) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        self.handle(subscription, with_state(state, function))
    }

    /// Calls a function for each event of a queue in a transaction of the store's own database; made by the `Transactional` of the
    /// store's crate.
    pub fn transact(mut self, mut subscription: Subscription, handler: impl Transact) -> Self {
        subscription.batch_size = handler.batch_size();
        self.targets.push((subscription, Target::Transact(Arc::new(handler), Arc::default())));
        self
    }

    /// Joins the fleet and begins to work in the background.
    pub async fn start(self) -> Result<Relay> {
        for (subscription, target) in &self.targets {
            subscription.validate()?;
            if matches!(target, Target::Transact(..)) && subscription.mode != Mode::Queue {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!("subscription '{}': a transactional handler needs mode = \"queue\"", subscription.name),
                ));
            }
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
            rejoin: false,
        };
        let joined = first_join(&self.store, &hello).await?;
        Failpoint::Joined.hit();
        let (commands, inbox) = mpsc::unbounded_channel();
        let (end_sender, end) = watch::channel(None);
        let shell = Shell::new(self.store, self.config.engine, hello, self.targets, &joined);
        let state = shell.state();
        let retention = self.config.retention;
        let mut task = JoinSet::new();
        task.spawn(async move {
            let end = shell.run(inbox, retention).await;
            end_sender.send_replace(Some(end));
        });
        Ok(Relay {
            subscriptions: joined.subscriptions,
            commands,
            state,
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

    /// The number of the instance that this relay is, or was until it lost the database.
    pub fn instance(&self) -> InstanceId {
        self.state().instance
    }

    fn state(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The subscriptions as the database had them when this relay first joined.
    pub fn subscriptions(&self) -> &[SubscriptionView] {
        &self.subscriptions
    }

    /// What this relay says of its work.
    pub fn report(&self) -> Report {
        self.state().report.clone()
    }

    /// Whether it works: not draining, not ended, and not about to join the fleet again.
    pub fn ready(&self) -> bool {
        let state = self.state();
        self.end.borrow().is_none() && state.joined && !state.report.draining
    }

    /// For how long the database has not answered this relay's beat, which comes about every second.
    pub fn silence(&self) -> Duration {
        self.state().heard_at.elapsed()
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

    /// Stops reading, finishes what is at the sinks, settles it and gives the lanes back: nothing comes again. What is still at a sink
    /// shortly before `shutdown_grace` is over is cancelled, and comes again. Never takes longer than that.
    pub async fn drain(mut self) -> Result<()> {
        let _ = self.commands.send(Command::Drain);
        let grace = self.shutdown_grace;
        let leave = LEAVE_TIMEOUT.min(grace / LEAVE_PART);
        let ended = tokio::time::timeout(grace - leave, self.end.wait_for(Option::is_some)).await.is_ok();
        if !ended {
            tracing::warn!(?grace, "the drain took too long; stopping, what is in flight comes again");
            self.stop_within(leave).await;
            return Ok(());
        }
        let end = self.end.borrow().clone();
        match end {
            Some(End::Failed(error)) => Err(shared(&error)),
            _ => Ok(()),
        }
    }

    /// Stops at once: calls to sinks are cancelled, their events come again.
    pub async fn stop(self) {
        self.stop_within(LEAVE_TIMEOUT).await;
    }

    async fn stop_within(mut self, time: Duration) {
        let _ = self.commands.send(Command::Stop);
        let _ = tokio::time::timeout(time, self.end.wait_for(Option::is_some)).await;
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

/// Joins; another who joins or operates at the same moment is waited for.
async fn first_join(store: &impl Store, hello: &Hello) -> Result<Joined> {
    let mut failures = 0;
    loop {
        match store.join(hello.clone()).await {
            Err(error) if error.kind() == ErrorKind::Busy && failures < BUSY_JOINS_MAX => {
                tracing::warn!(%error, "could not join; retrying");
                failures += 1;
                tokio::time::sleep(rejoin_wait(failures)).await;
            }
            joined => return joined,
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
