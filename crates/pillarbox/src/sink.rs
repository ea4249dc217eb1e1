use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::{ClaimId, Epoch, Event, SubscriptionId};

pub use crate::cloud_event::{BinaryEvent, CLOUD_EVENT_START, CloudEvents, EXTENSION_NAME_MAX, received_id};
pub use crate::dispatcher::BatchId;
pub use crate::event::HEADER_CORRELATION_ID;

/// A future that can be sent and boxed.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where a subscription delivers to.
///
/// **Order.** The engine never has two batches with the same key under way. Within a batch the events of a
/// key stand in order. A sink that says `ordered_batch` stops a key at its first failure: later events of
/// that key in the batch are answered with [`Outcome::NotTried`]. To any other sink the engine hands at most
/// one event of a key at a time.
///
/// **Duplicates.** Delivery is at least once; `event.id` is the same each time.
///
/// **Cancellation.** The future may be dropped at any await (time-out, shutdown, a lost lane); the events of
/// that batch come again.
///
/// **What the answer means.** One [`Outcome`] an event, in the batch's order. `Delivered` means that the
/// receiver has it durably, as far as that protocol can say. A missing outcome is taken as `NotTried`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a sink",
    label = "expected a type that implements `pillarbox::sink::Sink`",
    note = "sinks to other systems are in `pillarbox-sinks`; a function that is called for each event goes to `RelayBuilder::handle`"
)]
pub trait Sink: Send + Sync + 'static {
    /// What this sink can do.
    fn features(&self) -> SinkFeatures;

    /// Delivers a batch.
    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>>;

    /// Flushes and closes; called once, after the last batch of a clean stop.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Whether the receiver can be reached and would take events, without delivering one; what `doctor` asks.
    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }
}

/// What a sink can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SinkFeatures {
    /// See [`Sink`]: a batch may hold several events of a key.
    pub ordered_batch: bool,
    /// A batch is worked event by event, so that a few events are better spread over all workers.
    pub one_by_one: bool,
    /// What it delivers it settles itself, in the same transaction: see [`Transact`](crate::Transact).
    pub settles: bool,
    /// All events go to one receiver: when several different keys are refused in a row, it is considered unwell and the
    /// subscription waits as for one that is down.
    pub one_receiver: bool,
}

/// Events on their way to a sink.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// Where they come from, for sinks that can fence.
    pub origin: Origin,
    /// The events.
    pub events: Vec<Attempt>,
}

/// The subscription of one log. Lanes and epochs compare within the same one; a later incarnation, and then a later number of the
/// subscription, supersedes an earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The log.
    pub log_id: Uuid,
    /// Of the log.
    pub incarnation: i64,
    /// The subscription's number.
    pub subscription: SubscriptionId,
}

/// One try to deliver one event.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// The event.
    pub event: Arc<Event>,
    /// 1 for the first try; only failures that were the event's fault count.
    pub number: u32,
    /// The lane, if its owner delivers the event. None: it was claimed from a queue, where no lane owns it.
    pub lane: Option<u32>,
    /// The lane's epoch, for sinks that can fence.
    pub epoch: Epoch,
    /// The claim under which it is tried, if it has a row in a queue.
    pub claim: Option<ClaimId>,
}

/// What became of one event of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The receiver has it.
    Delivered,
    /// It failed.
    Failed(Failure),
    /// Nothing was sent, or nobody knows; it comes again, and no attempt is counted.
    NotTried,
}

/// Why a delivery failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// Whose fault it was.
    pub fault: Fault,
    /// No retry can help; the event is dead at once.
    pub permanent: bool,
    /// Not before this wait, if the receiver asked for one.
    pub retry_after: Option<Duration>,
    /// Nothing was sent. An event's failure then says nothing of the receiver; a sink's (it could not be reached) says nothing of the event.
    pub unsent: bool,
    /// The receiver accepts no more events: the subscription is paused, with this failure as the reason, until somebody resumes it.
    pub pause: bool,
    /// A short constant name for counters, like `timeout`.
    pub kind: &'static str,
    /// What happened, for people. No secret, no payload.
    pub message: String,
}

/// Whose fault a failure was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The receiver said so about this event: an attempt is counted.
    Event,
    /// The receiver is down: the subscription waits, no attempt is counted.
    Sink,
    /// Nobody can say: it is the event's only if other events succeed there meanwhile.
    Unclear,
}

impl Failure {
    /// The event's fault; tried again by the retry policy.
    pub fn event(message: impl Into<String>) -> Self {
        Failure {
            fault: Fault::Event,
            permanent: false,
            retry_after: None,
            unsent: false,
            pause: false,
            kind: "event",
            message: message.into(),
        }
    }

    /// The event's fault, and no retry can help.
    pub fn permanent(message: impl Into<String>) -> Self {
        Failure { permanent: true, kind: "permanent", ..Failure::event(message) }
    }

    /// The event cannot be sent, whatever the receiver would say, and no retry can help.
    pub fn unsendable(kind: &'static str, message: impl Into<String>) -> Self {
        Failure { unsent: true, kind, ..Failure::permanent(message) }
    }

    /// The receiver is down or overloaded.
    pub fn sink(message: impl Into<String>) -> Self {
        Failure { fault: Fault::Sink, kind: "sink", ..Failure::event(message) }
    }

    /// The receiver could not be reached, so that this is no event's fault.
    pub fn unreachable(kind: &'static str, message: impl Into<String>) -> Self {
        Failure { unsent: true, kind, ..Failure::sink(message) }
    }

    /// The receiver has gone for good: the subscription is paused.
    pub fn gone(message: impl Into<String>) -> Self {
        Failure { pause: true, kind: "gone", ..Failure::sink(message) }
    }

    /// Nobody can say whose fault it was.
    pub fn unclear(kind: &'static str, message: impl Into<String>) -> Self {
        Failure { fault: Fault::Unclear, kind, ..Failure::event(message) }
    }
}

/// Any error of a handler is the event's fault, also one of `anyhow`; tell others with [`Failure::sink`].
impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Failure::event(message)
    }
}
