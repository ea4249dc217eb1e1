use crate::dispatcher::BatchId;
use crate::{
    Attempt, ClaimEnd, ClaimRequest, Epoch, LaneRef, PollRequest, Position, RecoverRequest, Report, Settlement, Take,
};

/// What to do. At most one of each store call is under way.
#[derive(Debug)]
pub enum Action {
    /// [`Store::observe`](crate::Store::observe)
    Observe(Report),
    /// [`Store::take`](crate::Store::take)
    Take(Vec<Take>),
    /// [`Store::load`](crate::Store::load)
    Load(Vec<(LaneRef, Epoch)>),
    /// [`Store::poll`](crate::Store::poll)
    Poll(PollRequest),
    /// [`Store::fetch`](crate::Store::fetch)
    Fetch(Vec<Position>),
    /// [`Store::settle`](crate::Store::settle)
    Settle(Settlement),
    /// [`Store::claim`](crate::Store::claim)
    Claim(Vec<ClaimRequest>),
    /// [`Store::finish`](crate::Store::finish)
    Finish(Vec<ClaimEnd>),
    /// [`Store::recover`](crate::Store::recover)
    Recover(RecoverRequest),
    /// Hand a batch to the sink of the subscription with this index.
    Deliver {
        /// To be given back with the outcomes.
        batch: (usize, BatchId),
        /// The events.
        events: Vec<Attempt>,
    },
    /// Pause a subscription since its receiver wants nothing more. Nothing is answered: the pause is seen with the fleet.
    Pause {
        /// The subscription's index.
        subscription: usize,
        /// What the receiver said.
        reason: String,
    },
    /// Give up every batch that is at a sink: this instance cannot be sure any more that its lanes are its own. Each is answered
    /// with [`Input::Aborted`](super::Input::Aborted) once its call is over, unless it was answered already.
    Abort,
    /// The drain is over: leave.
    Leave,
}
