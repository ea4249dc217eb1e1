use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    AttemptError, DeliveryRow, Epoch, Event, Failure, InstanceId, KeyHash, LaneRef, LaneState, Position, RetryPolicy,
    State, SubscriptionId, TakeCause, Timestamp, lane_of,
};

/// Maximum number of claimable rows of a subscription that are counted.
pub const WAITING_COUNTED: usize = 10_000;

/// Minimum number of keys with rows in a queue that one answer contains, if there are more.
pub const KEYS_TOLD_MAX: usize = 1_000;

/// Maximum number of keys with rows with which the lanes of a queue are loaded. If there are more, every event with a
/// key gets a row until the keys have been requested.
pub const QUEUED_KEYS_MAX: usize = 10_000;

/// Maximum number of rows of a subscription that are counted per second.
const ROWS_COUNTED_A_SECOND: u64 = 10_000;

/// Time until the rows of a subscription are counted again, given their last count.
pub fn recount_after(rows: u64) -> Duration {
    if rows < ROWS_COUNTED_A_SECOND {
        return Duration::ZERO;
    }
    Duration::from_millis(rows.saturating_mul(1_000) / ROWS_COUNTED_A_SECOND).min(RECOUNT_AFTER_MAX)
}

/// Maximum time until rows are counted again, however many there are.
const RECOUNT_AFTER_MAX: Duration = Duration::from_secs(100);

/// Number of crashes after which a delivery is a suspect. An instance works on one suspect at a time, because it may be
/// the cause of the crashes.
pub const SUSPECT_AFTER: u32 = 2;

/// The kind of the error that a recovery leaves with a delivery whose process ended.
pub const CRASH: &str = "crash";

/// Number of a claim; together with the instance that made it, it is never used twice. Only the holder of the current
/// claim of a delivery can change the delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimId(pub i64);

/// An event that moves from the log to the queue, as a row for which instances compete.
#[derive(Debug, Clone, PartialEq)]
pub struct Queued {
    /// The row. The store assigns its place among the rows of its key (`arrival`), in the order in which they are
    /// passed. With a claim it is processing; otherwise pending, delayed, retrying or dead.
    pub delivery: DeliveryRow,
    /// The claim, if this instance already works on it.
    pub claim: Option<ClaimId>,
    /// The error to store with it.
    pub error: Option<AttemptError>,
}

/// A request for deliveries to work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// Maximum number of deliveries; 0: only the figures.
    pub limit: usize,
    /// The number of the first claim; the others follow.
    pub first: ClaimId,
    /// Whether a delivery that was recovered from [`SUSPECT_AFTER`] crashes may be among them.
    pub suspect: bool,
    /// The key above which [`Claims::keys`] begins; an empty text: from the first key. None: neither [`Claims::keys`]
    /// nor [`Claims::rows`] is needed.
    pub tell: Option<Box<str>>,
    /// Whether this repeats a request that was not answered. The answer then contains what that request claimed and
    /// this instance still has; if there is nothing, new deliveries are claimed.
    pub again: bool,
}

/// The answer to a [`ClaimRequest`].
#[derive(Debug, Clone, Default)]
pub struct Claims {
    /// The deliveries that this instance has to work on now, in the order in which they became ready.
    pub claimed: Vec<Claimed>,
    /// Number of further deliveries that could have been claimed, counted up to [`WAITING_COUNTED`].
    pub waiting: usize,
    /// The earliest time at which a delivery that is not due yet becomes due.
    pub next_due: Option<Timestamp>,
    /// If requested: the next keys with a row of any state, in the store's order. If there are fewer than
    /// [`KEYS_TOLD_MAX`], there are no more.
    pub keys: Option<Vec<Box<str>>>,
    /// If requested and known: the number of rows that are neither dead nor delayed, as of the last count; large
    /// numbers are counted less often.
    pub rows: Option<u64>,
}

/// A delivery that this instance has claimed.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The number that identifies the claim when it ends.
    pub claim: ClaimId,
    /// The row, in state processing.
    pub delivery: DeliveryRow,
    /// The event; None: it is neither in the log nor among the kept copies.
    pub event: Option<Arc<Event>>,
    /// Whether it was recovered from [`SUSPECT_AFTER`] crashes or more.
    pub suspect: bool,
}

/// The end of a claim.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimEnd {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The position of the delivery.
    pub position: Position,
    /// The claim.
    pub claim: ClaimId,
    /// What becomes of the delivery.
    pub fate: ClaimFate,
}

/// What becomes of a delivery whose claim ends.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimFate {
    /// It is done; its row is removed.
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
    /// Number of attempts, including this one.
    pub attempts: u32,
    /// The time before which it is not tried.
    pub due_at: Timestamp,
    /// The error to store with it.
    pub error: AttemptError,
}

/// A request to recover claims from owners that will no longer end them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecoverRequest {
    /// Instances that were found to have ended, the evidence, and for [`RecoveryCause::Lease`] the last observed beat:
    /// an instance that has beaten since keeps its claims.
    pub ended: Vec<(InstanceId, RecoveryCause, Option<i64>)>,
    /// Whether to recover also every claim whose owner no longer has a row, and every claim whose owner has been
    /// [silent](RecoverRequest::silent) for the `processing_timeout` of the subscription.
    pub sweep: bool,
    /// Other instances, the last observed beat of each, and for how long the caller has observed no other, by its own clock. An
    /// instance that has beaten since keeps its claims. No clock of the database is asked: it may jump, and then every instance
    /// would seem to be silent.
    pub silent: Vec<(InstanceId, i64, Duration)>,
}

/// The reason why claims were taken from their owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecoveryCause {
    /// The owner's lock came free, or its row is gone: the process ended.
    Crash,
    /// The owner has not beaten for the time of the lease.
    Lease,
    /// No sign of life for the subscription's `processing_timeout`.
    Timeout,
    /// An operator requested it.
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
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Recovered {
    /// Number of claims, by subscription and cause.
    pub claims: Vec<(SubscriptionId, RecoveryCause, u64)>,
    /// The attempts that ended so, for the log.
    pub attempts: Vec<RecoveredAttempt>,
}

/// An attempt that ended because its claim was recovered.
#[derive(Debug, Clone, PartialEq)]
pub struct RecoveredAttempt {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The position of the event.
    pub position: Position,
    /// The event's key.
    pub key: Option<Box<str>>,
    /// The result, by [`recovered`].
    pub failed: Failed,
}

impl RecoveredAttempt {
    /// The attempt of this delivery.
    pub fn new(subscription: SubscriptionId, delivery: &DeliveryRow, failed: Failed) -> Self {
        RecoveredAttempt { subscription, position: delivery.position, key: delivery.key.clone(), failed }
    }
}

/// The result of recovering a delivery that was being worked on: an attempt is counted, so that an event which kills
/// its process ends as dead. The first time it is due at once, later after the policy's wait.
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

/// Distributes the keys with rows of whole queues to their lanes, or records that there are too many (`left_out`, or
/// more than [`QUEUED_KEYS_MAX`]); `counts` has the number of lanes of each subscription.
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
