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
/// **Order.** The engine never has two batches with the same key under way. Within a batch, the events of a key are in
/// order. A sink with `ordered_batch` stops a key at its first failure: its outcome for later events of that key in the
/// batch is [`Outcome::NotTried`]. Any other sink gets at most one event of a key at a time.
///
/// **Duplicates.** Delivery is at least once; `event.id` is the same each time.
///
/// **Cancellation.** The future may be dropped at any await (time-out, shutdown, a lost lane); the events of
/// that batch come again.
///
/// **What the result means.** There is one [`Outcome`] per event, in the batch's order. `Delivered` means that the
/// receiver has the event durably, as far as the protocol can tell. A missing outcome counts as `NotTried`.
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

    /// Checks for `doctor` whether the receiver can be reached and would accept events, without delivering one.
    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }
}

/// What a sink can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SinkFeatures {
    /// Whether a batch may contain several events of a key: see [`Sink`].
    pub ordered_batch: bool,
    /// Whether a batch is processed event by event, so that a few events are better distributed over all workers.
    pub one_by_one: bool,
    /// Whether it settles what it delivers itself, in the same transaction: see [`Transact`](crate::Transact).
    pub settles: bool,
    /// Whether all events go to one receiver. If it refuses several different keys in a row, it is considered to be
    /// failing, and the subscription waits as if it were down.
    pub one_receiver: bool,
}

/// Events handed to a sink together.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The origin of the events, for sinks that can fence.
    pub origin: Origin,
    /// The events.
    pub events: Vec<Attempt>,
}

/// The subscription of a log. Lanes and epochs can be compared only within one origin; a later incarnation, and then a
/// later number of the subscription, supersedes an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The log.
    pub log_id: Uuid,
    /// The incarnation of the log.
    pub incarnation: i64,
    /// The subscription's number.
    pub subscription: SubscriptionId,
}

/// One attempt to deliver one event.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// The event.
    pub event: Arc<Event>,
    /// Number of the attempt, from 1; only failures caused by the event count.
    pub number: u32,
    /// The lane, if its owner delivers the event. None: the event was claimed from a queue.
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
    /// Nothing was sent, or it is unknown whether it was; the event comes again, and no attempt is counted.
    NotTried,
}

/// Why a delivery failed, and whose fault it was. `?` turns any error into a failure of the event.
///
/// ```
/// use pillarbox::{Delivery, Failure};
///
/// async fn charge(delivery: Delivery) -> Result<(), Failure> {
///     let cents: i64 = delivery.json()?;
///     if cents <= 0 {
///         return Err(Failure::permanent("nothing to charge"));
///     }
///     bank(cents).await.map_err(|error| Failure::sink(format!("the bank cannot be reached: {error}")))
/// }
/// # async fn bank(cents: i64) -> std::io::Result<()> { Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// The side at fault.
    pub fault: Fault,
    /// Whether no retry can help; the event is then dead at once.
    pub permanent: bool,
    /// The minimum wait before the next try, if the receiver requested one.
    pub retry_after: Option<Duration>,
    /// Whether nothing was sent. A failure of the event then says nothing about the receiver, and a failure of the sink
    /// (it could not be reached) says nothing about the event.
    pub unsent: bool,
    /// Whether the receiver accepts no more events. The subscription is then paused, with this failure as the reason,
    /// until it is resumed.
    pub pause: bool,
    /// A short constant name for counters, like `timeout`.
    pub kind: &'static str,
    /// What happened, for people; without secrets and payload.
    pub message: String,
}

/// The side at fault for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The event: the receiver refused this event; an attempt is counted.
    Event,
    /// The receiver: it is down; the subscription waits, and no attempt is counted.
    Sink,
    /// Unknown: it counts as the event's fault only if other events succeed there meanwhile.
    Unclear,
    /// Neither: the event cannot be delivered yet. It and the later events of its key wait; no attempt is counted, and
    /// other keys go on.
    Neither,
}

impl Failure {
    /// The event's fault; retried by the retry policy.
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

    /// The receiver could not be reached, so the failure says nothing about the event.
    pub fn unreachable(kind: &'static str, message: impl Into<String>) -> Self {
        Failure { unsent: true, kind, ..Failure::sink(message) }
    }

    /// The receiver accepts no more events: the subscription is paused.
    pub fn gone(message: impl Into<String>) -> Self {
        Failure { pause: true, kind: "gone", ..Failure::sink(message) }
    }

    /// It is not this event's turn yet, for example because another process works on what it belongs to. It comes again after
    /// this time; no attempt is counted, and the receiver is not considered down.
    pub fn later(after: Duration, message: impl Into<String>) -> Self {
        Failure { fault: Fault::Neither, retry_after: Some(after), kind: "later", ..Failure::event(message) }
    }

    /// The side at fault is unknown.
    pub fn unclear(kind: &'static str, message: impl Into<String>) -> Self {
        Failure { fault: Fault::Unclear, kind, ..Failure::event(message) }
    }
}

/// Any error of a handler is the event's fault, including an error of `anyhow`. Use [`Failure::sink`] for failures of
/// the receiver.
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
