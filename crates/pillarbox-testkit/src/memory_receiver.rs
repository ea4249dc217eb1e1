use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pillarbox::sink::{Attempt, Batch, BoxFuture, CloudEvents, Outcome, Sink, SinkFeatures};
use pillarbox::{Event, Failure, Headers, Payload};
use uuid::Uuid;

use crate::sink_suite::{Received, ReceiverFeatures, ServerControl, SinkFixture};

const SOURCE: &str = "urn:pillarbox:memory";

/// What [`BrokenSink::AcknowledgesEarly`] has acknowledged and not written, at most.
const LYING_MAX: usize = 100;

/// The ways to the receiver are of so many lengths, so that a crash finds calls everywhere.
const WAYS: i64 = 7;

/// A way in which the sink of a [`MemoryReceiver`] can be deliberately wrong. The sink suite must notice each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BrokenSink {
    /// An empty batch is answered with an outcome.
    AnswersEmptyBatch,
    /// One event in seven is acknowledged and dropped.
    DropsAnEvent,
    /// The last event of a batch has no outcome.
    TooFewOutcomes,
    /// The events of a batch arrive from last to first.
    ReordersAKey,
    /// JSON is parsed and written anew.
    ParsesPayload,
    /// No payload arrives as the JSON value null.
    TombstoneIsNull,
    /// No key arrives as an empty one.
    NoKeyIsEmpty,
    /// The topic is left out.
    ForgetsTopic,
    /// Only headers that are extensions travel.
    LosesHeaders,
    /// Of two calls under way at once, one is lost.
    LosesConcurrent,
    /// Every delivery has an id of its own.
    NewIdEachTime,
    /// A call that was dropped holds the only connection for ever.
    DroppedCallHoldsConnection,
    /// The check always fails.
    CheckFails,
    /// The check never asks the receiver.
    CheckPasses,
    /// While the receiver is down everything is acknowledged.
    DeliversWhileDown,
    /// While the receiver is down it is the events that fail.
    BlamesTheEvent,
    /// While the receiver is down calls never end.
    HangsWhileDown,
    /// While the receiver is down nothing says why.
    SaysNothing,
    /// The failure tells the payload.
    TellsThePayload,
    /// A connection that was lost is not made again.
    NeverReconnects,
    /// Events are acknowledged before the receiver has them.
    AcknowledgesEarly,
    /// After a failure later events of the key are delivered all the same.
    GoesOnAfterFailure,
    /// After a failure later events of the key are said to have failed too, as if each had been tried.
    FailsWholeKeys,
}

impl BrokenSink {
    /// All of them.
    pub const ALL: [BrokenSink; 23] = [
        BrokenSink::AnswersEmptyBatch,
        BrokenSink::DropsAnEvent,
        BrokenSink::TooFewOutcomes,
        BrokenSink::ReordersAKey,
        BrokenSink::ParsesPayload,
        BrokenSink::TombstoneIsNull,
        BrokenSink::NoKeyIsEmpty,
        BrokenSink::ForgetsTopic,
        BrokenSink::LosesHeaders,
        BrokenSink::LosesConcurrent,
        BrokenSink::NewIdEachTime,
        BrokenSink::DroppedCallHoldsConnection,
        BrokenSink::CheckFails,
        BrokenSink::CheckPasses,
        BrokenSink::DeliversWhileDown,
        BrokenSink::BlamesTheEvent,
        BrokenSink::HangsWhileDown,
        BrokenSink::SaysNothing,
        BrokenSink::TellsThePayload,
        BrokenSink::NeverReconnects,
        BrokenSink::AcknowledgesEarly,
        BrokenSink::GoesOnAfterFailure,
        BrokenSink::FailsWholeKeys,
    ];
}

/// A receiver in memory whose server can die, with a sink that is sound or deliberately broken: what the sink suite and the chaos
/// suite are tested with themselves.
#[derive(Debug, Clone)]
pub struct MemoryReceiver {
    broken: Option<BrokenSink>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    down: bool,
    /// How often it was killed: a call that began before has lost its connection.
    kills: u64,
    stored: Vec<Received>,
    /// What a crash loses.
    unwritten: Vec<Received>,
    /// Calls under way.
    calls: usize,
    /// Events that came, for those who count.
    counted: usize,
}

impl MemoryReceiver {
    /// A receiver that is up and has nothing.
    pub fn new(broken: Option<BrokenSink>) -> Self {
        MemoryReceiver { broken, state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is(&self, broken: BrokenSink) -> bool {
        self.broken == Some(broken)
    }

    /// What arrives of an event.
    fn transport(&self, event: &Event) -> Received {
        let mut event = event.clone();
        match (self.broken, &event.payload) {
            (Some(BrokenSink::ParsesPayload), Payload::Json(text)) => {
                let value: serde_json::Result<serde_json::Value> = serde_json::from_str(text);
                event.payload =
                    Payload::Json(value.map_or_else(|_| "null".to_owned(), |value| value.to_string()).into());
            }
            (Some(BrokenSink::TombstoneIsNull), Payload::None) => event.payload = Payload::Json("null".into()),
            (Some(BrokenSink::NewIdEachTime), _) => event.id = Uuid::new_v4(),
            (Some(BrokenSink::LosesHeaders), _) => {
                let mut headers = event.headers.to_map();
                headers.retain(|name, _| name.bytes().all(|byte| byte.is_ascii_lowercase()));
                event.headers = Headers::from_map(&headers);
            }
            _ => {}
        }
        let mut line = Vec::new();
        CloudEvents::new(SOURCE).write(&event, &mut line);
        let line = String::from_utf8(line).expect("JSON is text");
        let mut received = Received::from_cloud_event(&line).expect("a CloudEvent can be read");
        if self.is(BrokenSink::ForgetsTopic) {
            received.attributes.remove("topic");
        }
        if self.is(BrokenSink::NoKeyIsEmpty) {
            received.key.get_or_insert_default();
        }
        received
    }

    /// Takes events in order.
    fn store(&self, events: &[Attempt]) {
        let mut arriving: Vec<Received> = events.iter().map(|attempt| self.transport(&attempt.event)).collect();
        if self.is(BrokenSink::ReordersAKey) {
            arriving.reverse();
        }
        let mut state = self.state();
        for received in arriving {
            state.counted += 1;
            if self.is(BrokenSink::DropsAnEvent) && state.counted.is_multiple_of(7) {
                continue;
            }
            state.unwritten.push(received);
        }
        // The broken one leaves the last ones lying, for ever if the server is killed.
        let lying = if self.is(BrokenSink::AcknowledgesEarly) { LYING_MAX } else { 0 };
        let written = state.unwritten.len().saturating_sub(lying);
        let written: Vec<Received> = state.unwritten.drain(..written).collect();
        state.stored.extend(written);
    }

    /// What a call is answered with while the server is down.
    fn refused(&self, batch: &Batch) -> Vec<Outcome> {
        let message = "the receiver in memory is down; start it again";
        let outcome = |attempt: &Attempt| match self.broken {
            Some(BrokenSink::SaysNothing) => Outcome::NotTried,
            Some(BrokenSink::BlamesTheEvent) => Outcome::Failed(Failure::event(message)),
            Some(BrokenSink::TellsThePayload) => {
                Outcome::Failed(Failure::sink(format!("{message}; the payload was {:?}", attempt.event.payload)))
            }
            _ => Outcome::Failed(Failure::sink(message)),
        };
        match self.broken {
            Some(BrokenSink::DeliversWhileDown) => vec![Outcome::Delivered; batch.events.len()],
            Some(BrokenSink::FailsWholeKeys) => batch.events.iter().map(outcome).collect(),
            _ => first_of_each_key(batch, outcome),
        }
    }
}

impl SinkFixture for MemoryReceiver {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(MemorySink { receiver: self.clone(), held: AtomicBool::new(false), lost: AtomicBool::new(false) })
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        Box::pin(async {
            let state = self.state();
            // What was not written by a crash is still coming.
            state.stored.iter().chain(&state.unwritten).cloned().collect()
        })
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { source: Some(SOURCE), ..ReceiverFeatures::default() }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        Some(self)
    }
}

impl ServerControl for MemoryReceiver {
    fn kill(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let mut state = self.state();
            state.down = true;
            state.kills += 1;
            state.unwritten.clear();
        })
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.state().down = false })
    }
}

/// A sink with one connection.
struct MemorySink {
    receiver: MemoryReceiver,
    /// A call has the connection, for the variant that does not give it back.
    held: AtomicBool,
    /// The connection was lost, for the variant that does not make another.
    lost: AtomicBool,
}

/// A call under way; it is over when this is dropped.
struct Calling<'a>(&'a MemoryReceiver);

impl<'a> Calling<'a> {
    fn begin(receiver: &'a MemoryReceiver) -> (Self, usize) {
        let mut state = receiver.state();
        state.calls += 1;
        (Calling(receiver), state.calls)
    }
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.state().calls -= 1;
    }
}

impl MemorySink {
    async fn send(&self, batch: &Batch) -> Vec<Outcome> {
        let receiver = &self.receiver;
        let (_calling, calls) = Calling::begin(receiver);
        let kills = receiver.state().kills;
        for _ in 0..=batch.events[0].event.position % WAYS {
            tokio::task::yield_now().await;
        }
        if self.is_down() {
            if receiver.is(BrokenSink::HangsWhileDown) {
                std::future::pending::<()>().await;
            }
            return receiver.refused(batch);
        }
        // The first half arrives before the second, so that a crash can come between them.
        let half = batch.events.len() / 2;
        for part in [&batch.events[..half], &batch.events[half..]] {
            if receiver.state().kills > kills {
                return self.cut_off(batch);
            }
            if !(receiver.is(BrokenSink::LosesConcurrent) && calls > 1) {
                receiver.store(part);
            }
            tokio::task::yield_now().await;
        }
        if receiver.state().kills > kills {
            return self.cut_off(batch);
        }
        vec![Outcome::Delivered; batch.events.len()]
    }

    fn is_down(&self) -> bool {
        let down = self.receiver.state().down;
        if down && self.receiver.is(BrokenSink::NeverReconnects) {
            self.lost.store(true, Ordering::SeqCst);
        }
        down || self.lost.load(Ordering::SeqCst)
    }

    /// The connection was lost while events were under way.
    fn cut_off(&self, batch: &Batch) -> Vec<Outcome> {
        let failure = || Failure::unclear("lost", "the connection was lost; nothing needs to be done");
        let mut outcomes = first_of_each_key(batch, |_| Outcome::Failed(failure()));
        if self.receiver.is(BrokenSink::GoesOnAfterFailure) {
            outcomes[batch.events.len() / 2..].fill(Outcome::Delivered);
        }
        outcomes
    }
}

/// The outcome for the first event of each key; the others are not tried.
fn first_of_each_key(batch: &Batch, outcome: impl Fn(&Attempt) -> Outcome) -> Vec<Outcome> {
    let mut stopped = HashSet::new();
    let mut first = |attempt: &Attempt| attempt.event.key.as_deref().is_none_or(|key| stopped.insert(key.to_owned()));
    batch.events.iter().map(|attempt| if first(attempt) { outcome(attempt) } else { Outcome::NotTried }).collect()
}

impl Sink for MemorySink {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            if batch.events.is_empty() {
                let answered = self.receiver.is(BrokenSink::AnswersEmptyBatch);
                return vec![Outcome::Delivered; usize::from(answered)];
            }
            if self.receiver.is(BrokenSink::DroppedCallHoldsConnection) && self.held.swap(true, Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            let mut outcomes = self.send(&batch).await;
            self.held.store(false, Ordering::SeqCst);
            if self.receiver.is(BrokenSink::TooFewOutcomes) {
                outcomes.pop();
            }
            outcomes
        })
    }

    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        let fails = match self.receiver.broken {
            Some(BrokenSink::CheckFails) => true,
            Some(BrokenSink::CheckPasses) => false,
            _ => self.is_down(),
        };
        let failure = || Failure::sink("the receiver in memory is down; start it again");
        Box::pin(async move { if fails { Err(failure()) } else { Ok(()) } })
    }
}
