use std::cell::Cell;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use crate::{BoxFuture, Event, Failure, Outcome};

/// A function that is called for each event of a subscription, in the same process.
///
/// `Ok` settles the event. An error is the event's own fault and is retried by the policy, holding back its key and
/// nothing else; say [`Failure::sink`] if something that all events need is down. A panic is a failure. In a stream a call that takes
/// longer than `processing_timeout` is cancelled at its next await; in a queue it may take as long as it likes, unless the subscription
/// has a `heartbeat_timeout`: then it must call [`heartbeat`] at least that often. It may be called again with the same event (same id).
pub trait Handler: Send + Sync + 'static {
    /// Handles one event.
    fn handle(&self, event: Arc<Event>) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<F, Fut> Handler for F
where
    F: Fn(Arc<Event>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, event: Arc<Event>) -> impl Future<Output = Result<(), Failure>> + Send {
        self(event)
    }
}

/// A [`Handler`] of any type.
pub(crate) trait AnyHandler: Send + Sync + 'static {
    fn call(&self, event: Arc<Event>) -> BoxFuture<'_, Result<(), Failure>>;
}

impl<H: Handler> AnyHandler for H {
    fn call(&self, event: Arc<Event>) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(self.handle(event))
    }
}

tokio::task_local! {
    /// When the handler that runs in this task last gave a sign of life.
    static PULSE: Cell<Instant>;
}

/// Says that the handler which calls this makes progress, so that it is not cancelled for another `heartbeat_timeout`. Costs next to
/// nothing and writes nothing. False: no handler runs in this task; call it from the handler's own task.
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
pub(crate) async fn call(handler: &dyn AnyHandler, event: Arc<Event>, patience: Patience) -> Outcome {
    // The future is made inside, so that a handler that panics before its first await is caught too.
    let guarded = CatchUnwind(Box::pin(async move { handler.call(event).await }));
    match patient(patience, guarded).await {
        Ok(Ok(Ok(()))) => Outcome::Delivered,
        Ok(Ok(Err(failure))) => Outcome::Failed(failure),
        Ok(Err(panic)) => {
            Outcome::Failed(Failure { kind: "panic", ..Failure::event(format!("the handler panicked: {panic}")) })
        }
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
            Err(panic) => Poll::Ready(Err(panic_message(&*panic))),
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
