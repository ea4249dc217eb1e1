use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::{BoxFuture, Event, Failure, Outcome};

/// A function that is called for each event of a subscription, in the same process.
///
/// `Ok` settles the event. An error is the event's own fault and is retried by the policy, holding back its key and
/// nothing else; say [`Failure::sink`] if something that all events need is down. A panic is a failure; a call that takes
/// longer than `processing_timeout` is cancelled at its next await. It may be called again with the same event (same id).
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

/// Calls a handler as the engine does: a panic and a time-out are failures.
pub(crate) async fn call(handler: &dyn AnyHandler, event: Arc<Event>, timeout: Duration) -> Outcome {
    // The future is made inside, so that a handler that panics before its first await is caught too.
    let guarded = CatchUnwind(Box::pin(async move { handler.call(event).await }));
    match tokio::time::timeout(timeout, guarded).await {
        Ok(Ok(Ok(()))) => Outcome::Delivered,
        Ok(Ok(Err(failure))) => Outcome::Failed(failure),
        Ok(Err(panic)) => {
            Outcome::Failed(Failure { kind: "panic", ..Failure::event(format!("the handler panicked: {panic}")) })
        }
        Err(_) => Outcome::Failed(Failure {
            kind: "timeout",
            ..Failure::event(format!("the handler did not return within {timeout:?} and was cancelled"))
        }),
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
