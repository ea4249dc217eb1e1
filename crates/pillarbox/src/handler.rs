use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use crate::{Attempt, BoxFuture, Event, Failure, Outcome, Position, RetryPolicy, handler_panicked, panic_text};

/// A function that is called for each event of a subscription, in the same process.
///
/// `Ok` settles the event. An error is the event's own fault and is retried by the policy, holding back its key and
/// nothing else; return [`Failure::sink`] if something that all events need is down. A panic is a failure. In a stream a call that takes
/// longer than `processing_timeout` is cancelled at its next await; in a queue it may take as long as it likes, unless the subscription
/// has a `heartbeat_timeout`: then it must call [`heartbeat`] at least that often. It may be called again with the same event (same id).
///
/// ```
/// use pillarbox::{Delivery, Failure};
///
/// async fn mail(delivery: Delivery) -> Result<(), Failure> {
///     let total: u64 = delivery.json()?;
///     if delivery.is_last() {
///         println!("order {:?} over {total} cannot be mailed: {:?}", delivery.key, delivery.previous_error());
///     }
///     Ok(())
/// }
/// ```
pub trait Handler: Send + Sync + 'static {
    /// Handles one event.
    fn handle(&self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<F, Fut> Handler for F
where
    F: Fn(Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self(delivery)
    }
}

/// Every [`Handler`]: the bound that says in words what a handler is where a type is none. Nobody implements it.
///
/// The compiler shows the text of a bound only if several implementations come into question. With one, it shows which requirement of that
/// one is not met. So there is a second one, for no type.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler of events",
    label = "expected an async function or closure of one `Delivery`",
    note = "a handler takes a `pillarbox::Delivery` and returns `Result<(), pillarbox::Failure>`; `?` turns any error into a `Failure`",
    note = "its future must be `Send`: hold no `Rc`, `RefCell` borrow or `MutexGuard` across an `.await`"
)]
pub trait IsHandler<Kind> {}

impl<H: Handler> IsHandler<Fits> for H {}

impl<H: NoType> IsHandler<NeverFits> for H {}

/// The kind of all handlers.
#[doc(hidden)]
#[derive(Debug)]
pub enum Fits {}

/// The kind of none: see [`IsHandler`].
#[doc(hidden)]
#[derive(Debug)]
pub enum NeverFits {}

/// Implemented by no type.
#[doc(hidden)]
pub trait NoType {}

/// What the compiler refuses: a function in place of a transactional handler, and a sink that is none. For functions that are no handlers
/// see the test `compile_errors` of the testkit.
///
/// ```compile_fail,E0277
/// fn is_transact(_: impl pillarbox::store::Transact) {}
/// async fn book(delivery: pillarbox::Delivery) -> Result<(), pillarbox::Failure> { Ok(()) }
/// is_transact(book);
/// ```
///
/// ```compile_fail,E0277
/// struct Mailer;
/// let _: std::sync::Arc<dyn pillarbox::sink::Sink> = std::sync::Arc::new(Mailer);
/// ```
#[cfg(doctest)]
struct Mistakes;

/// An event at a handler, and which attempt it is. It dereferences to the [`Event`].
///
/// ```
/// use pillarbox::{Delivery, Failure};
///
/// async fn ship(delivery: Delivery) -> Result<(), Failure> {
///     println!("{} of key {:?}: attempt {} of {}", delivery.id, delivery.key, delivery.attempt(), delivery.max_attempts());
///     let weight: u32 = delivery.json()?;
///     if weight > 1_000 {
///         return Err(Failure::permanent("too heavy to be shipped"));
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Delivery {
    event: Arc<Event>,
    subscription: Arc<str>,
    attempt: u32,
    max_attempts: u32,
    previous_error: Option<Arc<str>>,
}

impl Delivery {
    /// The first attempt of an event for a subscription with this name and the policy of handlers; for tests of handlers.
    pub fn first(event: impl Into<Arc<Event>>, subscription: &str) -> Self {
        Delivery {
            event: event.into(),
            subscription: subscription.into(),
            attempt: 1,
            max_attempts: RetryPolicy::handler().max_attempts,
            previous_error: None,
        }
    }

    /// The event, to keep it for longer than the call.
    pub fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// The name of the subscription.
    pub fn subscription(&self) -> &str {
        &self.subscription
    }

    /// 1 for the first attempt. Only failures that were the event's fault count.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// After how many failed attempts the event is dead, by the subscription's policy.
    pub fn max_attempts(&self) -> u32 {
        self.max_attempts
    }

    /// Whether the event is dead if this attempt fails; a `min_dead_age` that is not over gives it further ones.
    pub fn is_last(&self) -> bool {
        self.attempt >= self.max_attempts
    }

    /// What the attempt before failed with, as this relay remembers it. None: this is the first attempt, another relay or an earlier run made
    /// the one before, or more than 1,000 newer events of the subscription have failed since. The errors that are stored with a delivery
    /// are not read for it, because every load and every claim would carry them; `pillarbox show` and `why` print them.
    pub fn previous_error(&self) -> Option<&str> {
        self.previous_error.as_deref()
    }
}

impl Deref for Delivery {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.event
    }
}

/// What the handler of a subscription knows of its attempts besides their events.
#[derive(Debug, Clone)]
pub(crate) struct Handling {
    pub(crate) subscription: Arc<str>,
    pub(crate) max_attempts: u32,
    pub(crate) last_errors: Arc<LastErrors>,
}

impl Handling {
    pub(crate) fn delivery(&self, attempt: &Attempt) -> Delivery {
        Delivery {
            event: attempt.event.clone(),
            subscription: self.subscription.clone(),
            attempt: attempt.number,
            max_attempts: self.max_attempts,
            previous_error: self.last_errors.of(attempt.event.position),
        }
    }
}

/// Of how many events a relay remembers what their last attempt failed with, for each subscription.
pub(crate) const LAST_ERRORS_MAX: usize = 1_000;

/// What the last attempts of events failed with, those of the newest positions.
#[derive(Debug, Default)]
pub(crate) struct LastErrors(Mutex<BTreeMap<Position, Arc<str>>>);

impl LastErrors {
    pub(crate) fn of(&self, position: Position) -> Option<Arc<str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&position).cloned()
    }

    /// Notes how an attempt ended.
    pub(crate) fn note(&self, position: Position, outcome: &Outcome) {
        let mut errors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Outcome::Failed(failure) => {
                errors.insert(position, failure.message.as_str().into());
                if errors.len() > LAST_ERRORS_MAX {
                    errors.pop_first();
                }
            }
            Outcome::Delivered => _ = errors.remove(&position),
            Outcome::NotTried => {}
        }
    }
}

/// A [`Handler`] of any type.
pub(crate) trait AnyHandler: Send + Sync + 'static {
    fn call(&self, delivery: Delivery) -> BoxFuture<'_, Result<(), Failure>>;
}

impl<H: Handler> AnyHandler for H {
    fn call(&self, delivery: Delivery) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(self.handle(delivery))
    }
}

tokio::task_local! {
    /// When the handler that runs in this task last gave a sign of life.
    static PULSE: Cell<Instant>;
}

/// Says that the handler which calls this makes progress, so that it is not cancelled for another `heartbeat_timeout`. Costs next to
/// nothing and writes nothing. False: no handler runs in this task; call it from the handler's own task.
///
/// ```
/// use pillarbox::{Delivery, Failure, heartbeat};
///
/// async fn render(delivery: Delivery) -> Result<(), Failure> {
///     let frames: u32 = delivery.json()?;
///     for frame in 0..frames {
///         render_frame(frame).await?;
///         heartbeat();
///     }
///     Ok(())
/// }
/// # async fn render_frame(frame: u32) -> std::io::Result<()> { Ok(()) }
/// ```
pub fn heartbeat() -> bool {
    PULSE.try_with(|pulse| pulse.set(Instant::now())).is_ok()
}

/// How long a handler may go on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    /// So long in all.
    Total(Duration),
    /// So long since its last sign of life.
    Pulse(Duration),
    /// As long as the process lives.
    Endless,
}

/// Calls a handler as the engine does: a panic and a time-out are failures.
pub(crate) async fn call(handler: &dyn AnyHandler, delivery: Delivery, patience: Patience) -> Outcome {
    // The future is made inside, so that a handler that panics before its first await is caught too.
    let guarded = CatchUnwind(Box::pin(async move { handler.call(delivery).await }));
    match patient(patience, guarded).await {
        Ok(Ok(Ok(()))) => Outcome::Delivered,
        Ok(Ok(Err(failure))) => Outcome::Failed(failure),
        Ok(Err(panic)) => Outcome::Failed(handler_panicked(&panic)),
        Err(message) => Outcome::Failed(Failure { kind: "timeout", ..Failure::event(message) }),
    }
}

/// Waits for a future as long as it may go on; with an error it was cancelled.
async fn patient<F: Future>(patience: Patience, future: F) -> Result<F::Output, String> {
    match patience {
        Patience::Endless => Ok(future.await),
        Patience::Total(limit) => tokio::time::timeout(limit, future)
            .await
            .map_err(|_| format!("the handler did not return within {limit:?} and was cancelled")),
        Patience::Pulse(limit) => {
            let work = async {
                let mut future = std::pin::pin!(future);
                loop {
                    let until = PULSE.with(Cell::get) + limit;
                    match tokio::time::timeout_at(until, &mut future).await {
                        Ok(output) => return Ok(output),
                        Err(_) if PULSE.with(Cell::get) + limit > until => {}
                        Err(_) => {
                            return Err(format!(
                                "the handler did not call heartbeat() for {limit:?} and was cancelled"
                            ));
                        }
                    }
                }
            };
            PULSE.scope(Cell::new(Instant::now()), work).await
        }
    }
}

/// Turns a panic of the inner future into its message.
pub(crate) struct CatchUnwind<'a, T>(pub(crate) BoxFuture<'a, T>);

impl<T> Future for CatchUnwind<'_, T> {
    type Output = Result<T, String>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // The future is dropped after a panic and never looked at again.
        match std::panic::catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic_text(&*panic).to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_errors_of_the_newest_positions_are_remembered_until_they_are_delivered() {
        let errors = LastErrors::default();
        for position in 1..=LAST_ERRORS_MAX as Position + 1 {
            errors.note(position, &Outcome::Failed(Failure::event(format!("error {position}"))));
        }
        assert_eq!(errors.of(1), None, "there are too many");
        assert_eq!(errors.of(2).as_deref(), Some("error 2"));
        errors.note(2, &Outcome::NotTried);
        assert!(errors.of(2).is_some());
        errors.note(2, &Outcome::Delivered);
        assert_eq!(errors.of(2), None);
    }
}
