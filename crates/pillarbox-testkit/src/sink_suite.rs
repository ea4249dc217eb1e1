use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;

use pillarbox::sink::{Attempt, Batch, BoxFuture, Origin, Sink};
use pillarbox::store::SubscriptionId;
use pillarbox::{Event, Headers, Payload, Timestamp, panic_text};
use uuid::Uuid;

use crate::store_suite::SuiteReport;

mod cases;
mod outage;
mod received;

pub use received::Received;

/// What the suite needs of a sink under test: a receiver of its own that nothing was delivered to yet.
pub trait SinkFixture: Send + Sync {
    /// A sink that delivers to the receiver; several may be open at once.
    fn sink(&self) -> Arc<dyn Sink>;

    /// What the receiver has got so far, in order of arrival. Not asked while the receiver is down.
    fn received(&self) -> BoxFuture<'_, Vec<Received>>;

    /// What the receiver is like.
    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures::default()
    }

    /// The server behind the receiver, if it can be killed. None: the cases about an outage are not applicable.
    fn server(&self) -> Option<&dyn ServerControl> {
        None
    }
}

/// A server that can die. The address stays the same.
pub trait ServerControl: Send + Sync {
    /// Ends it as a crash would, by SIGKILL where it is a process. Returns when nobody answers any more.
    fn kill(&self) -> BoxFuture<'_, ()>;

    /// Starts it again. Returns when it takes events.
    fn restart(&self) -> BoxFuture<'_, ()>;
}

/// What the receiver of a fixture is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiverFeatures {
    /// The protocol keeps nothing: what was acknowledged can be gone after a crash of the server, as with Redis pub/sub.
    pub forgets: bool,
    /// What the fixture's sinks were given as the source; None: only that there is one is looked at.
    pub source: Option<&'static str>,
}

/// One behaviour that every sink has.
pub struct SinkCase {
    /// What is promised.
    pub name: &'static str,
    /// Whether it is about a server that dies.
    pub needs_server: bool,
    run: fn(&dyn SinkFixture) -> BoxFuture<'_, ()>,
}

/// All cases.
pub fn sink_cases() -> impl Iterator<Item = &'static SinkCase> {
    cases::ALL.iter().chain(outage::ALL)
}

/// Runs every case that the fixture can try, each with a fixture of its own.
///
/// # Panics
/// If the sink does not behave.
pub async fn check_sink<F: SinkFixture>(fixture: impl Fn() -> F) {
    let report = examine_sink(fixture).await;
    for name in &report.skipped {
        println!("not applicable, this receiver has no server that dies: {name}");
    }
    report.assert_sound();
}

/// Like [`check_sink`], and says what it found.
pub async fn examine_sink<F: SinkFixture>(fixture: impl Fn() -> F) -> SuiteReport {
    let mut report = SuiteReport::default();
    for case in sink_cases() {
        println!("sink case: {}", case.name);
        let fixture = fixture();
        if case.needs_server && fixture.server().is_none() {
            report.skipped.push(case.name);
            continue;
        }
        match caught((case.run)(&fixture)).await {
            Ok(()) => report.passed.push(case.name),
            Err(how) => report.failed.push((case.name, how)),
        }
    }
    report
}

/// A case says by a panic that a promise was broken.
async fn caught(mut case: BoxFuture<'_, ()>) -> Result<(), String> {
    let step = |context: &mut std::task::Context<'_>| {
        // After a panic the case is not looked at again.
        match catch_unwind(AssertUnwindSafe(|| case.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic_text(&*panic).to_owned())),
        }
    };
    std::future::poll_fn(step).await
}

/// An event to be delivered to a sink under test.
pub fn sink_event(position: i64, key: Option<&str>, payload: Payload) -> Event {
    Event {
        position,
        id: Uuid::from_u64_pair(1, position as u64),
        topic: "orders".into(),
        key: key.map(Into::into),
        r#type: "order.placed".into(),
        payload,
        content_type: None,
        headers: Headers::default(),
        stream_version: None,
        deliver_at: None,
        created_at: Timestamp(1_000),
        malformed: None,
    }
}

/// Where the batches of the suite come from.
pub const ORIGIN: Origin = Origin { log_id: Uuid::from_u128(1), incarnation: 1, subscription: SubscriptionId(1) };

/// A batch of these events, each at its first attempt.
pub fn batch_of(events: impl IntoIterator<Item = Event>) -> Batch {
    let attempt = |event| Attempt { event: Arc::new(event), number: 1, lane: Some(0), epoch: 1, claim: None };
    Batch { subscription: "suite".into(), origin: ORIGIN, events: events.into_iter().map(attempt).collect() }
}

/// An event with a small JSON payload of its own.
fn numbered(position: i64, key: &str) -> Event {
    sink_event(position, Some(key), Payload::Json(format!("{{\"n\":{position}}}").into()))
}
