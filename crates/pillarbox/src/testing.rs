//! Helpers for the tests of applications that publish or handle events.
//!
//! The crate of each store shows what an open transaction has published, for example
//! `pillarbox_sqlite::testing::published`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::handler::{Patience, call};
use crate::{
    Batch, BoxFuture, Delivery, Event, Failure, Handler, Operator, Outcome, Relay, RelayBuilder, Result, Sink,
    SinkFeatures, Store,
};

/// A sink that keeps the events that it gets. Clones share them.
#[derive(Clone)]
pub struct Capture {
    events: Arc<Mutex<Vec<Arc<Event>>>>,
    count: Arc<watch::Sender<usize>>,
    #[allow(clippy::type_complexity, reason = "a function from an event to the failure to answer with")]
    refuse: Arc<dyn Fn(&Event) -> Option<Failure> + Send + Sync>,
}

impl Default for Capture {
    fn default() -> Self {
        Capture::refusing(|_| None)
    }
}

impl Capture {
    /// A sink that accepts every event.
    pub fn new() -> Self {
        Capture::default()
    }

    /// A sink that fails an event with the failure that `refuse` returns for it.
    pub fn refusing(refuse: impl Fn(&Event) -> Option<Failure> + Send + Sync + 'static) -> Self {
        Capture { events: Arc::default(), count: Arc::new(watch::channel(0).0), refuse: Arc::new(refuse) }
    }

    /// The events that have arrived, in order of arrival.
    pub fn events(&self) -> Vec<Arc<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until at least `count` events have arrived.
    pub async fn wait_for(&self, count: usize) -> Vec<Arc<Event>> {
        let mut arrived = self.count.subscribe();
        arrived.wait_for(|arrived| *arrived >= count).await.expect("the capture holds the sender");
        self.events()
    }
}

impl Sink for Capture {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        let mut failed: Vec<Option<Box<str>>> = Vec::new();
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = |event: &Arc<Event>| {
            if event.key.is_some() && failed.contains(&event.key) {
                return Outcome::NotTried;
            }
            match (self.refuse)(event) {
                Some(failure) => {
                    failed.push(event.key.clone());
                    Outcome::Failed(failure)
                }
                None => {
                    events.push(event.clone());
                    Outcome::Delivered
                }
            }
        };
        let outcomes = batch.events.iter().map(|attempt| &attempt.event).map(outcome).collect();
        self.count.send_replace(events.len());
        Box::pin(async { outcomes })
    }
}

/// Runs a relay until nothing more can be delivered now, then drains it. Call it in a test between publishing and
/// checking.
pub async fn run_until_idle<S: Store + Operator>(relay: RelayBuilder<S>) -> Result<()> {
    let relay: Relay = relay.start().await?;
    relay.until_idle().await?;
    relay.drain().await
}

/// Calls a handler with one event as the engine would: a panic or a time-out is a failure and does not end the test.
pub async fn run_handler(handler: &impl Handler, event: Event, timeout: Duration) -> Outcome {
    call(handler, Delivery::first(event, "test"), Patience::Total(timeout)).await
}
