use std::sync::Arc;

use crate::dispatcher::BatchId;
use crate::{Claims, Epoch, Event, Fleet, LaneState, Outcome, Page, Recovered};

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// The answer to [`Action::Observe`](super::Action::Observe).
    Observed(Fleet),
    /// The answer to [`Action::Take`](super::Action::Take).
    Taken(Vec<Option<Epoch>>),
    /// The answer to [`Action::Load`](super::Action::Load).
    Loaded(Vec<Option<LaneState>>),
    /// The answer to [`Action::Poll`](super::Action::Poll).
    Polled(Page),
    /// The answer to [`Action::Fetch`](super::Action::Fetch).
    Fetched(Vec<Arc<Event>>),
    /// The answer to [`Action::Settle`](super::Action::Settle).
    Settled(Vec<bool>),
    /// The answer to [`Action::Claim`](super::Action::Claim).
    Claimed(Vec<Claims>),
    /// The answer to [`Action::Finish`](super::Action::Finish).
    Finished(Vec<bool>),
    /// The answer to [`Action::Recover`](super::Action::Recover).
    Recovered(Recovered),
    /// A batch is over.
    Delivered {
        /// Which one.
        batch: (usize, BatchId),
        /// One per event.
        outcomes: Vec<Outcome>,
    },
    /// A batch was given up after [`Action::Abort`](super::Action::Abort); its outcome is unknown. Its call is over for good.
    Aborted {
        /// Which one.
        batch: (usize, BatchId),
    },
    /// A worker is held up by an event of its batch: those before it are over, those after it are given back.
    HandedBack {
        /// Which batch.
        batch: (usize, BatchId),
        /// One per event before the one that holds it up.
        outcomes: Vec<Outcome>,
    },
    /// The doorbell: events may be there, and the fleet may have changed.
    Rang,
    /// The doorbell: events may be there.
    Published,
    /// A call to the store failed; nothing is known about it having happened.
    CallFailed(Call),
    /// Finish what is at the sink, settle, give everything back.
    Drain,
    /// Time went on.
    Tick,
}

/// The calls to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the action of the same name")]
pub enum Call {
    Observe,
    Take,
    Load,
    Poll,
    Fetch,
    Settle,
    Claim,
    Finish,
    Recover,
}

impl Input {
    /// Its name, for the log: it holds payloads, which are never logged.
    pub fn name(&self) -> &'static str {
        match self {
            Input::Observed(_) => "observed",
            Input::Taken(_) => "taken",
            Input::Loaded(_) => "loaded",
            Input::Polled(_) => "polled",
            Input::Fetched(_) => "fetched",
            Input::Settled(_) => "settled",
            Input::Claimed(_) => "claimed",
            Input::Finished(_) => "finished",
            Input::Recovered(_) => "recovered",
            Input::Delivered { .. } => "delivered",
            Input::Aborted { .. } => "aborted",
            Input::HandedBack { .. } => "handed_back",
            Input::Rang => "rang",
            Input::Published => "published",
            Input::CallFailed(_) => "call_failed",
            Input::Drain => "drain",
            Input::Tick => "tick",
        }
    }
}
