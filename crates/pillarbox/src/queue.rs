use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    AttemptError, DeliveryRow, Epoch, Event, Failure, InstanceId, KeyHash, LaneRef, LaneState, Position, RetryPolicy,
    State, SubscriptionId, TakeCause, Timestamp, lane_of,
};

/// How many rows of a subscription that could be claimed are counted.
pub const WAITING_COUNTED: usize = 10_000;

/// How many keys of a subscription with rows in its queue are told at once, at least, if there are more.
pub const KEYS_TOLD_MAX: usize = 1_000;

/// How many keys of a queue with rows its lanes are loaded with at most. With more, every event of theirs gets a row until the keys have been
/// asked for.
pub const QUEUED_KEYS_MAX: usize = 10_000;

/// So many rows of a subscription are counted in a second, at most.
const ROWS_COUNTED_A_SECOND: u64 = 10_000;

/// When the rows of a subscription are counted again of which there were so many.
pub fn recount_after(rows: u64) -> Duration {
    if rows < ROWS_COUNTED_A_SECOND {
        return Duration::ZERO;
    }
    Duration::from_millis(rows.saturating_mul(1_000) / ROWS_COUNTED_A_SECOND).min(RECOUNT_AFTER_MAX)
}

/// Even a million rows are counted again after this time.
const RECOUNT_AFTER_MAX: Duration = Duration::from_secs(100);

/// Of deliveries that were recovered from this many crashes an instance works on one at a time: one may be what kills the process.
pub const SUSPECT_AFTER: u32 = 2;

/// The kind of the error that a recovery leaves with a delivery whose process ended.
pub const CRASH: &str = "crash";

/// A claim's number; with the instance that made it, it is never used twice. Whoever does not have the current claim of a delivery
/// cannot change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimId(pub i64);

/// An event that leaves the log for the queue: a row that instances compete for.
#[derive(Debug, Clone, PartialEq)]
pub struct Queued {
    /// The row; its place among those of its key (`arrival`) is given by the store, in the order in which they are handed over.
    /// With a claim it is processing; otherwise pending, delayed, retrying or dead.
    pub delivery: DeliveryRow,
    /// This instance works on it already.
    pub claim: Option<ClaimId>,
    /// The error to be kept with it.
    pub error: Option<AttemptError>,
}

/// Asks for deliveries to work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Of this subscription.
    pub subscription: SubscriptionId,
    /// At most so many; 0: only the figures.
    pub limit: usize,
    /// The claims are numbered from here on.
    pub first: ClaimId,
    /// One that was recovered from [`SUSPECT_AFTER`] crashes may be among them.
    pub suspect: bool,
    /// Whether [`Claims::keys`] and [`Claims::rows`] are of use, and above which key; an empty text: from the first on.
    pub tell: Option<Box<str>>,
    /// The same was asked for before and was not answered: what it claimed then and still has is told now, and if there is nothing
    /// it is asked for anew.
    pub again: bool,
}

/// The answer to a [`ClaimRequest`].
#[derive(Debug, Clone, Default)]
pub struct Claims {
    /// What is this instance's to work on now, in the order in which it became ready.
    pub claimed: Vec<Claimed>,
    /// How many more could have been claimed, counted up to [`WAITING_COUNTED`].
    pub waiting: usize,
    /// When the next becomes due of those that are not yet.
    pub next_due: Option<Timestamp>,
    /// If asked for: the next keys with a row of whatever state, in the store's order. Fewer than [`KEYS_TOLD_MAX`]: there are no more.
    pub keys: Option<Vec<Box<str>>>,
    /// If asked for and known: how many rows there are that are neither dead nor delayed, or were when they were last counted; many are
    /// counted less often.
    pub rows: Option<u64>,
}

/// A delivery that is this instance's to work on.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// Names the claim when it ends.
    pub claim: ClaimId,
    /// The row, processing.
    pub delivery: DeliveryRow,
    /// Its event; None: it is neither in the log nor kept aside.
    pub event: Option<Arc<Event>>,
    /// It was recovered from [`SUSPECT_AFTER`] crashes or more.
    pub suspect: bool,
}

/// A claim that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimEnd {
    /// Of this subscription.
    pub subscription: SubscriptionId,
    /// Which delivery.
    pub position: Position,
    /// The claim.
    pub claim: ClaimId,
    /// What becomes of the delivery.
    pub fate: ClaimFate,
}

/// What becomes of a delivery whose claim is over.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimFate {
    /// It is done; its row goes.
    Done,
    /// The attempt failed.
    Failed(Failed),
    /// It was not tried: it is pending again (retrying, if it was tried before), due at once, and no attempt is counted.
    Back,
}

/// What the failure of an attempt makes of a delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct Failed {
    /// Retrying or dead.
    pub state: State,
    /// How many attempts are counted now.
    pub attempts: u32,
    /// Not to be tried before.
    pub due_at: Timestamp,
    /// To be kept with it.
    pub error: AttemptError,
}

/// Asks for the claims of those who will not end them any more.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecoverRequest {
    /// Instances that were seen to be dead, how, and for [`RecoveryCause::Lease`] the beat at which they stood still: one that has
    /// beaten since keeps its claims.
    pub dead: Vec<(InstanceId, RecoveryCause, Option<i64>)>,
    /// Also every claim whose owner has no row any more, and every one whose owner has given no sign of life for the
    /// `processing_timeout` of the subscription, by the database's clock.
    pub sweep: bool,
}

/// Why claims were taken from their owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecoveryCause {
    /// The owner's lock came free, or its row is gone: the process ended.
    Crash,
    /// The owner has not beaten for the lease's time.
    Lease,
    /// No sign of life for the subscription's `processing_timeout`.
    Timeout,
    /// An operator said so.
    Operator,
}

impl RecoveryCause {
    /// The name in counters, logs and the database.
    pub fn name(self) -> &'static str {
        match self {
            RecoveryCause::Crash => "crash",
            RecoveryCause::Lease => "lease",
            RecoveryCause::Timeout => "timeout",
            RecoveryCause::Operator => "operator",
        }
    }
}

impl From<TakeCause> for RecoveryCause {
    fn from(cause: TakeCause) -> Self {
        match cause {
            TakeCause::Lease => RecoveryCause::Lease,
            TakeCause::Free | TakeCause::Lock => RecoveryCause::Crash,
        }
    }
}

/// What was recovered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// How many claims, by subscription and cause.
    pub claims: Vec<(SubscriptionId, RecoveryCause, u64)>,
}

/// What a recovery makes of a delivery that somebody was working on: an attempt is counted, so that an event which kills its process
/// ends as dead. The first time it is due at once, later after the policy's wait.
pub fn recovered(policy: &RetryPolicy, delivery: &DeliveryRow, cause: RecoveryCause, now: Timestamp) -> Failed {
    let attempts = delivery.attempts + 1;
    let message = match cause {
        RecoveryCause::Crash => "the process ended while it worked on this event",
        RecoveryCause::Lease => "the process could not be reached for lease_ttl while it worked on this event",
        RecoveryCause::Timeout => {
            "the process gave no sign of life for processing_timeout while it worked on this event"
        }
        RecoveryCause::Operator => "an operator took it from the process that worked on this event",
    };
    let failure = Failure { kind: CRASH, ..Failure::event(message) };
    let dead = policy.is_dead(attempts, now.since(delivery.since));
    let wait = attempts.checked_sub(1).filter(|&before| before > 0).map(|before| policy.delay(before, 0.0));
    Failed {
        state: if dead { State::Dead } else { State::Retrying },
        attempts,
        due_at: now.plus(wait.unwrap_or_default()),
        error: AttemptError { at: now, attempt: attempts, kind: failure.kind.into(), message: failure.message },
    }
}

/// Tells lanes which of their keys have rows, of the keys of whole queues, or that these are too many to be told (`left_out` or more than
/// [`QUEUED_KEYS_MAX`]); `counts` says how many lanes each has.
pub fn tell_keys(
    lanes: &[(LaneRef, Epoch)],
    counts: &HashMap<SubscriptionId, u32>,
    states: &mut [Option<LaneState>],
    keys: HashMap<SubscriptionId, Vec<Box<str>>>,
    mut left_out: HashSet<SubscriptionId>,
) {
    left_out.extend(keys.iter().filter(|(_, keys)| keys.len() > QUEUED_KEYS_MAX).map(|(id, _)| *id));
    let mut of_lanes: HashMap<LaneRef, Vec<Box<str>>> = HashMap::new();
    for (subscription, keys) in keys {
        let Some(&count) = counts.get(&subscription).filter(|_| !left_out.contains(&subscription)) else { continue };
        for key in keys {
            let lane = LaneRef { subscription, lane: lane_of(Some(KeyHash::of(&key)), 0, count) };
            of_lanes.entry(lane).or_default().push(key);
        }
    }
    for ((lane, _), state) in lanes.iter().zip(states) {
        let Some(state) = state else { continue };
        state.queued_keys_left_out = left_out.contains(&lane.subscription);
        state.queued_keys = of_lanes.get(lane).cloned().unwrap_or_default();
    }
}
