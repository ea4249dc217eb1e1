use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use crate::journal::{Appended, Expected, StreamHead};
use crate::{
    AttemptError, ERROR_BYTES_MAX, Event, Filter, FormerFilters, InstanceId, Mode, NewEvent, OnDead, PassedUnder,
    Position, RangeSet, RecoveryCause, Report, Result, RetryPolicy, Start, SubscriptionId, Timestamp,
};

/// What people and scripts do with a log, independently of a relay. No call needs a running instance.
///
/// Commands never touch what an owner has in memory: a rewind raises epochs; all other commands change rows that only
/// the owner processes, and raise the lane's revision.
pub trait Operator: Send + Sync + 'static {
    /// Everything that `status` shows.
    fn status(&self) -> impl Future<Output = Result<Status>> + Send;

    /// Events or deliveries, by filter, in log order.
    fn list(&self, query: &ListQuery) -> impl Future<Output = Result<Vec<ListRow>>> + Send;

    /// One event with everything known about its deliveries; None if the log does not have it.
    fn show(&self, id: Uuid) -> impl Future<Output = Result<Option<EventRecord>>> + Send;

    /// Carries out a command in one transaction and reports what it did; with `dry_run` it only reports what it would
    /// do.
    fn change(&self, change: &Change, dry_run: bool) -> impl Future<Output = Result<Changed>> + Send;

    /// Publishes events in one transaction and returns their ids; for a duplicate, the id of the first event.
    fn publish(&self, events: &[NewEvent]) -> impl Future<Output = Result<Vec<Uuid>>> + Send;

    /// Appends events to a stream of the journal in one transaction. A stream that is not at the expected version is
    /// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict), and nothing is written.
    fn append(
        &self,
        stream: &str,
        expected: Expected,
        events: &[NewEvent],
    ) -> impl Future<Output = Result<Appended>> + Send;

    /// At most `limit` events of a stream from a version on, in order.
    fn read_stream(&self, stream: &str, from: i64, limit: usize) -> impl Future<Output = Result<Vec<Event>>> + Send;

    /// At most `limit` streams whose names begin with `prefix` and come behind `after`, by name.
    fn streams(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<StreamHead>>> + Send;

    /// The ledger of each lane, for `audit`.
    fn books(&self) -> impl Future<Output = Result<Books>> + Send;

    /// Removes one slice of what is no longer needed; call it until `more` is false.
    fn prune(&self, policy: &PrunePolicy) -> impl Future<Output = Result<Pruned>> + Send;

    /// Checks every prerequisite; each finding includes its fix.
    fn doctor(&self) -> impl Future<Output = Result<Vec<Check>>> + Send;

    /// Empties everything and raises the incarnation. For tests.
    fn reset(&self) -> impl Future<Output = Result<()>> + Send;
}

/// The states of an event for one subscription; there are no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Waits for its turn.
    Pending,
    /// Waits for its delivery time.
    Delayed,
    /// Is being delivered.
    Processing,
    /// Failed, and waits for its next attempt.
    Retrying,
    /// Waits for an earlier event of its key.
    Blocked,
    /// Given up until an operator acts.
    Dead,
}

impl State {
    /// All states.
    pub const ALL: [State; 6] =
        [State::Pending, State::Delayed, State::Processing, State::Retrying, State::Blocked, State::Dead];

    /// The name, the same everywhere.
    pub fn name(self) -> &'static str {
        match self {
            State::Pending => "pending",
            State::Delayed => "delayed",
            State::Processing => "processing",
            State::Retrying => "retrying",
            State::Blocked => "blocked",
            State::Dead => "dead",
        }
    }

    /// The state of this name.
    pub fn from_name(name: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// Everything that `status` shows.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// The time at which the status was read.
    pub at: Timestamp,
    /// The log.
    pub log: LogStatus,
    /// The subscriptions, by name.
    pub subscriptions: Vec<SubscriptionStatus>,
    /// The instances.
    pub instances: Vec<InstanceStatus>,
}

/// Figures of the log.
#[derive(Debug, Clone, Serialize)]
pub struct LogStatus {
    /// The identity of the log.
    pub log_id: Uuid,
    /// The incarnation, raised when the log is not the continuation of its own history.
    pub incarnation: i64,
    /// The version of the schema.
    pub schema_version: i64,
    /// The lowest position that retention has not removed.
    pub log_start: Position,
    /// The highest position.
    pub horizon: Position,
    /// Number of events in the log (exact, or estimated from positions where counting would take long).
    pub events: i64,
    /// Size of the database on disk.
    pub bytes: i64,
    /// Number of events that are kept for deliveries although their range was removed.
    pub kept: i64,
    /// The transactions that hold the horizon or the write-ahead log back, with age and the command that ends each.
    pub holders: Vec<String>,
    /// The time for which the oldest of them has done so; None: unknown, and too long.
    pub held_seconds: Option<f64>,
    /// The time of the last check of all claims for owners that give no sign of life.
    pub recovery_at: Option<Timestamp>,
    /// What needs attention before it becomes a problem, each with what to do.
    pub alarms: Vec<String>,
}

/// Figures of one subscription.
#[derive(Debug, Clone, Serialize)]
pub struct SubscriptionStatus {
    /// Its number.
    pub id: SubscriptionId,
    /// Its name.
    pub name: String,
    /// Stream or queue.
    pub mode: Mode,
    /// The filter.
    pub filter: Filter,
    /// The number of its definition, raised by every change.
    pub definition: i64,
    /// Number of lanes.
    pub lanes: u32,
    /// What a dead event does to its key.
    pub on_dead: OnDead,
    /// The retry policy.
    #[serde(skip)]
    pub retry: RetryPolicy,
    /// Whether it is paused until it is resumed.
    pub paused: bool,
    /// The side that paused it, if it is paused.
    pub paused_by: Option<PausedBy>,
    /// The reason of the pause, if one was given.
    pub paused_reason: Option<String>,
    /// Whether no living instance can run it.
    pub orphaned: bool,
    /// Number of events that wait for their turn.
    pub pending: u64,
    /// Number of events that wait for their time.
    pub delayed: u64,
    /// Number of events that are being delivered.
    pub processing: u64,
    /// Number of events that wait for their next attempt.
    pub retrying: u64,
    /// Number of events that wait behind the head of their key.
    pub blocked: u64,
    /// Number of dead events.
    pub dead: u64,
    /// Number of these events that have a delivery; the subscription has not read the others yet.
    pub deliveries: u64,
    /// The age of the oldest event that is not delivered, without delayed and dead events.
    pub oldest_age_seconds: Option<f64>,
    /// The earliest time at which a retrying delivery is or was due.
    pub oldest_due: Option<Timestamp>,
    /// Number of positions between its lowest floor and the horizon.
    pub lag: i64,
    /// Number of its lanes that have a living owner.
    pub lanes_owned: u32,
    /// The instances that own its lanes.
    pub owners: Vec<InstanceId>,
    /// The lowest floor; retention goes no further.
    pub floor: Position,
    /// Approximate size of the log above its floor, without what a subscription with a relay also holds back, in bytes.
    pub holds_bytes: i64,
    /// The time for which the longest-running delivery of its queue has been worked on.
    pub oldest_processing_seconds: Option<f64>,
    /// Number of recovered claims of its queue, by cause.
    pub recovered: Vec<RecoveredCount>,
    /// The combined reports of its owners.
    pub report: crate::SubscriptionReport,
}

impl SubscriptionStatus {
    /// Number of events that are neither delivered nor dead, whether or not they are due.
    pub fn undelivered(&self) -> u64 {
        self.pending + self.delayed + self.processing + self.retrying + self.blocked
    }

    /// Number of events that are not delivered and that the subscription has not read yet.
    pub fn unread(&self) -> u64 {
        (self.undelivered() + self.dead).saturating_sub(self.deliveries)
    }
}

/// Number of claims recovered for one cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecoveredCount {
    /// The cause.
    pub cause: RecoveryCause,
    /// Number since the subscription was created.
    pub count: u64,
    /// The time of the last one.
    pub last_at: Timestamp,
}

/// One instance.
#[derive(Debug, Clone, Serialize)]
pub struct InstanceStatus {
    /// Its number.
    pub id: InstanceId,
    /// The host's name.
    pub host: String,
    /// The process id on that host.
    pub pid: u32,
    /// The version of the software.
    pub version: String,
    /// The time at which it joined.
    pub started_at: Timestamp,
    /// The time of its last beat, by the database's clock.
    pub beat_at: Timestamp,
    /// Whether its liveness lock is held.
    pub alive: bool,
    /// Number of lanes that it owns.
    pub lanes: u32,
    /// Its report about its work.
    pub report: Report,
}

/// The events or deliveries to list.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    /// Only deliveries of this subscription; None: the events of the log, whatever became of them.
    pub subscription: Option<String>,
    /// Only in this state (of any subscription, if none is named).
    pub state: Option<State>,
    /// Only this key.
    pub key: Option<String>,
    /// Only this topic, or prefix with `*`.
    pub topic: Option<String>,
    /// Only with this correlation id.
    pub correlation_id: Option<String>,
    /// Maximum number.
    pub limit: usize,
}

/// One line of a list.
#[derive(Debug, Clone, Serialize)]
pub struct ListRow {
    /// The event's id.
    pub id: Uuid,
    /// Its position.
    pub position: Position,
    /// Its topic.
    pub topic: String,
    /// Its type.
    pub r#type: String,
    /// Its key.
    pub key: Option<String>,
    /// The time of the insert.
    pub created_at: Timestamp,
    /// The subscription, if the list contains deliveries.
    pub subscription: Option<String>,
    /// The state for that subscription.
    pub state: Option<State>,
    /// Number of counted attempts.
    pub attempts: Option<u32>,
    /// The time of the next attempt.
    pub due_at: Option<Timestamp>,
    /// The claim on it, if it is claimed in a queue.
    pub claim: Option<ClaimRecord>,
    /// The last error.
    pub error: Option<String>,
}

/// An event and what became of it.
#[derive(Debug, Clone)]
pub struct EventRecord {
    /// The event.
    pub event: Event,
    /// What became of it, one entry per subscription.
    pub subscriptions: Vec<Fate>,
}

/// What became of an event for one subscription: the facts from which [`why`](crate::why) draws its conclusion.
#[derive(Debug, Clone, Serialize)]
pub struct Fate {
    /// The subscription's name.
    pub subscription: String,
    /// Whether the filter that judges it wants it: the filter in force when it was settled; until then, the current
    /// one.
    pub wanted: bool,
    /// The former filter by which it was judged; None: the current one.
    pub passed_under: Option<PassedUnder>,
    /// The event's lane.
    pub lane: u32,
    /// The lane's owner, and whether that instance is alive.
    pub owner: Option<(InstanceId, bool)>,
    /// The lane's floor.
    pub floor: Position,
    /// Whether the cursor counts the event as settled.
    pub settled: bool,
    /// The epoch under which it was settled, and the times between which this happened, as far as known.
    pub settled_by: Option<SettledBy>,
    /// Whether it is before the start of the subscription, or was in the log when the log was declared a fresh copy.
    pub before_start: bool,
    /// Whether it appeared in a range that had been closed; see `audit`.
    pub in_dead_range: bool,
    /// Its delivery, if it took the slow path.
    pub delivery: Option<DeliveryRecord>,
    /// The reason why it was skipped, and the time.
    pub skipped: Option<(String, Timestamp)>,
}

/// The epoch under which an event was settled, and the time.
#[derive(Debug, Clone, Serialize)]
pub struct SettledBy {
    /// The lane's epoch.
    pub epoch: i64,
    /// The earliest time.
    pub after: Timestamp,
    /// The latest time.
    pub before: Timestamp,
}

/// A delivery as operators see it.
#[derive(Debug, Clone, Serialize)]
pub struct DeliveryRecord {
    /// The state, including `blocked`.
    pub state: State,
    /// Number of counted attempts.
    pub attempts: u32,
    /// The time of the next attempt.
    pub due_at: Timestamp,
    /// The time at which it became a delivery.
    pub since: Timestamp,
    /// The claim on it, if it is claimed in a queue.
    pub claim: Option<ClaimRecord>,
    /// The last errors, oldest first.
    pub errors: Vec<AttemptError>,
    /// If blocked, the event that it waits for: id, position and state of the key's head.
    pub head: Option<(Uuid, Position, State)>,
}

/// The claim on a delivery.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClaimRecord {
    /// The instance.
    pub instance: InstanceId,
    /// The time of the claim.
    pub since: Timestamp,
    /// The time of the instance's last sign of life, by the database's clock; None: its row no longer exists.
    pub beat_at: Option<Timestamp>,
}

/// A change requested by an operator.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Makes deliveries due now with attempts 0, in log order.
    Requeue {
        /// The subscription.
        subscription: String,
        /// The deliveries.
        which: Selection,
        /// Maximum number.
        limit: usize,
    },
    /// Takes claims of queues from their owners, alive or not; each counts as an attempt with the cause `operator`.
    Recover {
        /// Only of this subscription.
        subscription: Option<String>,
        /// Only claims of this instance.
        instance: Option<InstanceId>,
        /// Only claims whose owner has given no sign of life for this long, by the database's clock; zero: any owner.
        silent_for: Duration,
    },
    /// Gives up one delivery and unblocks its key.
    Skip {
        /// The subscription.
        subscription: String,
        /// The event.
        event: Uuid,
        /// The reason, which is stored.
        reason: String,
    },
    /// Stops a subscription; see [`Pause::over`] for a subscription that is already paused.
    Pause {
        /// The subscription.
        subscription: String,
        /// The side that requests it.
        by: PausedBy,
        /// The reason, stored until the subscription is resumed, at most [`ERROR_BYTES_MAX`] bytes.
        reason: Option<String>,
    },
    /// Continues a paused subscription.
    Resume(String),
    /// Replays a subscription or a key.
    Rewind {
        /// The subscription.
        subscription: String,
        /// The place; the events above it are replayed.
        to: Start,
        /// Only this key.
        key: Option<String>,
    },
    /// Removes a subscription that no living instance runs, with its deliveries.
    Delete(String),
    /// Renames a subscription that no living instance runs.
    Rename {
        /// The old name.
        from: String,
        /// The new name.
        to: String,
    },
    /// Changes the number of lanes of a subscription that is paused and has nothing in flight.
    Relane {
        /// The subscription.
        subscription: String,
        /// The new number.
        lanes: u32,
    },
}

impl Change {
    /// A pause by an operator, without a reason.
    pub fn pause(subscription: impl Into<String>) -> Self {
        Change::Pause { subscription: subscription.into(), by: PausedBy::Operator, reason: None }
    }
}

/// The side that paused a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PausedBy {
    /// An operator, who knows about it.
    Operator,
    /// The receiver, which accepts no more events ([`Failure::pause`](crate::Failure::pause)): unhealthy until an
    /// operator resumes the subscription, or pauses it too.
    Receiver,
}

impl PausedBy {
    /// The name, the same everywhere.
    pub fn name(self) -> &'static str {
        match self {
            PausedBy::Operator => "operator",
            PausedBy::Receiver => "receiver",
        }
    }
}

/// The pause of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// The side that paused it.
    pub by: PausedBy,
    /// The reason, if one was given.
    pub reason: Option<String>,
}

impl Pause {
    /// The pause from its stored columns: whether the subscription is paused, by which side, and the reason.
    pub fn stored(paused: bool, by: Option<&str>, reason: Option<String>) -> Option<Pause> {
        let by = if by == Some(PausedBy::Receiver.name()) { PausedBy::Receiver } else { PausedBy::Operator };
        paused.then_some(Pause { by, reason })
    }

    /// The pause to store when a subscription that may already be paused is paused. If it is paused, a pause by the
    /// receiver changes nothing: either it is a repetition, by this relay or another, or an operator's pause takes
    /// precedence. A pause by an operator replaces the existing one, and keeps its reason if the operator gives none.
    pub fn over(self, before: Option<Pause>) -> Pause {
        let reason = self.reason.map(|reason| {
            // Not every database can hold this character in a text.
            let mut reason = reason.replace('\0', "\u{fffd}");
            reason.truncate(reason.floor_char_boundary(ERROR_BYTES_MAX));
            reason
        });
        match before {
            Some(before) if self.by == PausedBy::Receiver => before,
            Some(before) => Pause { by: self.by, reason: reason.or(before.reason) },
            None => Pause { by: self.by, reason },
        }
    }
}

/// The deliveries that a requeue selects.
#[derive(Debug, Clone, PartialEq)]
pub enum Selection {
    /// One event.
    Event(Uuid),
    /// One version of a journal stream.
    Version(String, i64),
    /// All dead deliveries of a key.
    Key(String),
    /// All dead deliveries.
    All,
}

/// What a change did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Changed {
    /// Number of deliveries, lanes or subscriptions.
    pub count: u64,
    /// The events concerned, for requeue and skip.
    pub events: Vec<Uuid>,
    /// One sentence for people.
    pub message: String,
}

/// What retention may remove.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrunePolicy {
    /// Age from which events are removed that every subscription has passed. None: keep all.
    pub keep: Option<Duration>,
    /// Time after which dead deliveries are removed. None: keep all.
    pub dead: Option<Duration>,
    /// Age from which deduplication keys are removed.
    pub dedup_window: Duration,
    /// Age from which ids in inboxes are removed; an event that comes again after that counts as new. None: keep all.
    pub inbox: Option<Duration>,
    /// Maximum number of events per slice.
    pub slice: usize,
    /// Whether events are removed from a log without subscriptions, where no event has been received. If false, nothing
    /// of such a log is removed.
    pub unreceived: bool,
    /// Whether events are removed that a subscription has not received and its expired `hold` no longer keeps. If
    /// false, they are kept as if the hold had not expired. Default: true, as in every relay.
    pub held: bool,
    /// Whether nothing is removed and only counted what all slices together would remove. Copies that deliveries would
    /// need, deduplication keys and entries of inboxes are not counted.
    pub dry_run: bool,
}

impl PrunePolicy {
    /// Whether events may be removed, given whether the log has a subscription.
    pub fn takes_events(&self, has_subscription: bool) -> bool {
        has_subscription || self.unreceived
    }
}

impl Default for PrunePolicy {
    fn default() -> Self {
        PrunePolicy {
            keep: Some(Duration::from_secs(7 * 86_400)),
            dead: None,
            dedup_window: Duration::from_secs(86_400),
            inbox: Some(Duration::from_secs(30 * 86_400)),
            slice: 5_000,
            unreceived: false,
            held: true,
            dry_run: false,
        }
    }
}

/// What one slice of retention removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Pruned {
    /// Number of removed events.
    pub events: u64,
    /// Number of events copied because a delivery needs them.
    pub kept: u64,
    /// Number of removed dead deliveries.
    pub dead: u64,
    /// Number of events dropped for subscriptions that had not received them and whose `hold` had expired; an event
    /// counts once per subscription.
    pub undelivered: u64,
    /// Number of removed deduplication keys.
    pub dedup: u64,
    /// Number of removed entries of inboxes.
    pub inbox: u64,
    /// Whether there is more to remove.
    pub more: bool,
    /// Whether copies of events are left that were not looked at; the next slice continues there. A relay does so at its
    /// next turn, since most copies are needed. Call prune until this is false too to remove all unneeded copies.
    #[serde(skip)]
    pub unlooked: bool,
    /// Number of events that are old enough and that every subscription has passed, but that lie in the table in use:
    /// on PostgreSQL events are removed table by table. Only a dry run counts them.
    pub in_use: u64,
    /// The subscription that prevents retention from going further, if any.
    pub held_by: Option<String>,
}

/// One finding of `doctor`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// The result.
    pub level: Level,
    /// What was found.
    pub finding: String,
    /// What to do, if something is wrong.
    pub fix: Option<String>,
}

/// The result of a check, or the severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The precondition holds.
    Ok,
    /// The precondition holds, with a risk.
    Warning,
    /// The precondition does not hold.
    Failed,
}

/// The ledger: the engine's record of what it settled.
#[derive(Debug, Clone, Default)]
pub struct Books {
    /// The incarnation.
    pub incarnation: i64,
    /// The lowest position that retention has not removed.
    pub log_start: Position,
    /// The highest position that retention has looked at. Above `log_start` if events of a journal are below.
    pub pruned_to: Position,
    /// The highest position when the ledger was read.
    pub horizon: Position,
    /// The closed positions.
    pub closed: RangeSet,
    /// The ledger of each lane.
    pub lanes: Vec<LaneBook>,
    /// The former filters, by subscription name.
    pub former_filters: HashMap<String, FormerFilters>,
}

/// The reason recorded for events that a subscription lost because its `hold` had expired.
pub const REASON_HOLD: &str = "dropped by retention: the subscription's hold was over";

/// The reason recorded for dead deliveries that retention removed.
pub const REASON_DEAD: &str = "dropped by retention: dead for longer than retention.dead";

/// The ledger of one lane.
#[derive(Debug, Clone)]
pub struct LaneBook {
    /// The subscription's name.
    pub subscription: String,
    /// The filter.
    pub filter: Filter,
    /// Number of lanes of the subscription.
    pub lanes: u32,
    /// The lane.
    pub lane: u32,
    /// The cursor's floor.
    pub floor: Position,
    /// The cursor's ranges above it.
    pub settled: RangeSet,
    /// The positions that the settlements themselves report as covered.
    pub covered: RangeSet,
    /// The positions that the lane was never meant to deliver: those before the subscription's start, those in the log
    /// when it was declared a fresh copy, and those dropped because the subscription's `hold` had expired.
    pub before_start: RangeSet,
    /// The positions in the delivery table.
    pub deliveries: RangeSet,
    /// The positions given up by an operator or by retention, each with a reason.
    pub skipped: RangeSet,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause(by: PausedBy, reason: &str) -> Pause {
        Pause { by, reason: Some(reason.to_owned()).filter(|reason| !reason.is_empty()) }
    }

    #[test]
    fn an_operator_makes_a_pause_their_own_and_a_receiver_does_not() {
        use PausedBy::{Operator, Receiver};
        assert_eq!(pause(Receiver, "gone").over(None), pause(Receiver, "gone"));
        assert_eq!(pause(Receiver, "gone again").over(Some(pause(Receiver, "gone"))), pause(Receiver, "gone"));
        assert_eq!(pause(Receiver, "gone").over(Some(pause(Operator, "moving"))), pause(Operator, "moving"));
        assert_eq!(pause(Operator, "").over(Some(pause(Receiver, "gone"))), pause(Operator, "gone"));
        assert_eq!(pause(Operator, "seen").over(Some(pause(Receiver, "gone"))), pause(Operator, "seen"));
    }

    #[test]
    fn a_reason_is_cut_at_the_limit_and_can_be_stored() {
        let kept = |reason: &str| pause(PausedBy::Operator, reason).over(None).reason.unwrap();
        let longest = "x".repeat(ERROR_BYTES_MAX);
        assert_eq!(kept(&longest), longest);
        assert_eq!(kept(&format!("{longest}x")), longest);
        assert_eq!(kept(&format!("{}é", &longest[1..])), longest[1..], "never within a character");
        assert_eq!(kept("a\0b"), "a\u{fffd}b");
    }

    #[test]
    fn what_is_stored_is_read_back() {
        for by in [PausedBy::Operator, PausedBy::Receiver] {
            let pause = pause(by, "why");
            assert_eq!(Pause::stored(true, Some(by.name()), pause.reason.clone()), Some(pause));
            assert_eq!(serde_json::to_value(by).unwrap(), by.name());
        }
        assert_eq!(Pause::stored(true, None, None), Some(pause(PausedBy::Operator, "")));
        assert_eq!(Pause::stored(false, None, None), None);
    }
}
