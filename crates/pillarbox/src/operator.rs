use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use crate::{
    AttemptError, ERROR_BYTES_MAX, Event, Filter, FormerFilters, InstanceId, Mode, NewEvent, OnDead, PassedUnder,
    Position, RangeSet, RecoveryCause, Report, Result, RetryPolicy, Start, SubscriptionId, Timestamp,
};

/// What people and scripts do with a log, beside the relay. None of it needs a running instance.
///
/// Commands never touch what an owner has in memory: a rewind raises epochs, everything else changes rows that
/// the owner alone executes and raises the lane's revision.
pub trait Operator: Send + Sync + 'static {
    /// Everything that `status` shows.
    fn status(&self) -> impl Future<Output = Result<Status>> + Send;

    /// Events or deliveries, by filter, in log order.
    fn list(&self, query: &ListQuery) -> impl Future<Output = Result<Vec<ListRow>>> + Send;

    /// One event with all that is known of its deliveries; None if the log does not have it.
    fn show(&self, id: Uuid) -> impl Future<Output = Result<Option<EventRecord>>> + Send;

    /// Carries out a command in one transaction and says what it did; with `dry_run` only says it.
    fn change(&self, change: &Change, dry_run: bool) -> impl Future<Output = Result<Changed>> + Send;

    /// Publishes events in one transaction; the ids, of the first event where one was a duplicate.
    fn publish(&self, events: &[NewEvent]) -> impl Future<Output = Result<Vec<Uuid>>> + Send;

    /// The books of each lane, for `audit`.
    fn books(&self) -> impl Future<Output = Result<Books>> + Send;

    /// Removes one slice of what nobody needs any more; call it until `more` is false.
    fn prune(&self, policy: &PrunePolicy) -> impl Future<Output = Result<Pruned>> + Send;

    /// Checks every prerequisite; each finding says how to fix it.
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
    /// Waits for the time it is to be delivered at.
    Delayed,
    /// Is being delivered.
    Processing,
    /// Failed; waits for its next attempt.
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

    /// The name, everywhere.
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
    /// When this was read.
    pub at: Timestamp,
    /// The log.
    pub log: LogStatus,
    /// The subscriptions, by name.
    pub subscriptions: Vec<SubscriptionStatus>,
    /// The instances.
    pub instances: Vec<InstanceStatus>,
}

/// The log in figures.
#[derive(Debug, Clone, Serialize)]
pub struct LogStatus {
    /// Its identity.
    pub log_id: Uuid,
    /// Raised when the log is not the continuation of itself.
    pub incarnation: i64,
    /// The version of the schema.
    pub schema_version: i64,
    /// The lowest position that retention has left.
    pub log_start: Position,
    /// The highest position.
    pub horizon: Position,
    /// How many events it holds (exact, or by positions where counting would be long).
    pub events: i64,
    /// What the database takes on disk.
    pub bytes: i64,
    /// Events kept aside for deliveries after their range has gone.
    pub kept: i64,
    /// Who holds the horizon or the write-ahead log back, with age and the command that ends it.
    pub holders: Vec<String>,
    /// For how long the longest of them has done so; None: not known, and for too long.
    pub held_seconds: Option<f64>,
    /// When claims were last looked through for owners that give no sign of life.
    pub recovery_at: Option<Timestamp>,
    /// What needs somebody's attention before it becomes a problem, each with what to do.
    pub alarms: Vec<String>,
}

/// One subscription in figures.
#[derive(Debug, Clone, Serialize)]
pub struct SubscriptionStatus {
    /// Its number.
    pub id: SubscriptionId,
    /// Its name.
    pub name: String,
    /// Stream or queue.
    pub mode: Mode,
    /// What it wants.
    pub filter: Filter,
    /// The number of its definition, raised by every change.
    pub definition: i64,
    /// How many lanes.
    pub lanes: u32,
    /// What a dead event does.
    pub on_dead: OnDead,
    /// When what fails is tried again, and when it is dead.
    #[serde(skip)]
    pub retry: RetryPolicy,
    /// It stands still until somebody resumes it.
    pub paused: bool,
    /// Who paused it, if it is paused.
    pub paused_by: Option<PausedBy>,
    /// Why it was paused, if that was said.
    pub paused_reason: Option<String>,
    /// No living instance can run it.
    pub orphaned: bool,
    /// Waiting for their turn.
    pub pending: u64,
    /// Waiting for their time.
    pub delayed: u64,
    /// Being delivered.
    pub processing: u64,
    /// Waiting for the next attempt.
    pub retrying: u64,
    /// Waiting behind their key's head.
    pub blocked: u64,
    /// Given up.
    pub dead: u64,
    /// The age of the oldest event not yet delivered, delayed and dead ones left out.
    pub oldest_age_seconds: Option<f64>,
    /// The oldest time at which a retrying entry is or was due.
    pub oldest_due: Option<Timestamp>,
    /// Positions between its lowest floor and the horizon.
    pub lag: i64,
    /// How many of its lanes have a living owner.
    pub lanes_owned: u32,
    /// The instances that own its lanes.
    pub owners: Vec<InstanceId>,
    /// The lowest floor; retention goes no further.
    pub floor: Position,
    /// Roughly the bytes of the log above its floor that no subscription with a relay holds back too.
    pub holds_bytes: i64,
    /// For how long the longest-running delivery of its queue has been worked on.
    pub oldest_processing_seconds: Option<f64>,
    /// How many claims of its queue were recovered, by cause.
    pub recovered: Vec<RecoveredCount>,
    /// What its owners say of it, put together.
    pub report: crate::SubscriptionReport,
}

/// How many claims were recovered for one cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecoveredCount {
    /// Why.
    pub cause: RecoveryCause,
    /// How many, since the subscription was made.
    pub count: u64,
    /// When last.
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
    /// When it joined.
    pub started_at: Timestamp,
    /// When it last beat, by the database's clock.
    pub beat_at: Timestamp,
    /// Whether its liveness lock is held.
    pub alive: bool,
    /// How many lanes it owns.
    pub lanes: u32,
    /// What it says of its work.
    pub report: Report,
}

/// Which events or deliveries to list.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    /// Only as seen by this subscription; None: the events of the log, whatever became of them.
    pub subscription: Option<String>,
    /// Only in this state (of any subscription, if none is named).
    pub state: Option<State>,
    /// Only this key.
    pub key: Option<String>,
    /// Only this topic, or prefix with `*`.
    pub topic: Option<String>,
    /// Only with this correlation id.
    pub correlation_id: Option<String>,
    /// At most this many.
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
    /// When it was inserted.
    pub created_at: Timestamp,
    /// The subscription, if the list is about deliveries.
    pub subscription: Option<String>,
    /// The state there.
    pub state: Option<State>,
    /// Attempts counted.
    pub attempts: Option<u32>,
    /// When it is tried next.
    pub due_at: Option<Timestamp>,
    /// Who works on it, if it is claimed in a queue.
    pub claim: Option<ClaimRecord>,
    /// The last error.
    pub error: Option<String>,
}

/// One event and what became of it.
#[derive(Debug, Clone)]
pub struct EventRecord {
    /// The event.
    pub event: Event,
    /// What became of it, by subscription.
    pub subscriptions: Vec<Fate>,
}

/// What became of an event for one subscription: facts, from which [`why`](crate::why) concludes.
#[derive(Debug, Clone, Serialize)]
pub struct Fate {
    /// The subscription's name.
    pub subscription: String,
    /// Whether the filter wants it by which it was judged: that in force when it was settled, or that of now until then.
    pub wanted: bool,
    /// The former filter by which it was judged; None: that of now.
    pub passed_under: Option<PassedUnder>,
    /// The event's lane.
    pub lane: u32,
    /// The lane's owner and whether that instance lives.
    pub owner: Option<(InstanceId, bool)>,
    /// The lane's floor.
    pub floor: Position,
    /// Whether the cursor counts the event as settled.
    pub settled: bool,
    /// The epoch under which it was settled, and the times between which that happened, as far as known.
    pub settled_by: Option<SettledBy>,
    /// It lies before the place where the subscription began, or was in the log when that was declared a fresh copy.
    pub before_start: bool,
    /// It lies in a range that was closed as dead before it appeared; see `audit`.
    pub in_dead_range: bool,
    /// Its delivery, if it took the slow path.
    pub delivery: Option<DeliveryRecord>,
    /// The reason it was skipped for, and when.
    pub skipped: Option<(String, Timestamp)>,
}

/// When and under which epoch an event was settled.
#[derive(Debug, Clone, Serialize)]
pub struct SettledBy {
    /// The lane's epoch.
    pub epoch: i64,
    /// Not before.
    pub after: Timestamp,
    /// Not later.
    pub before: Timestamp,
}

/// A delivery as operators see it.
#[derive(Debug, Clone, Serialize)]
pub struct DeliveryRecord {
    /// The state, `blocked` included.
    pub state: State,
    /// Attempts counted.
    pub attempts: u32,
    /// When it is tried next.
    pub due_at: Timestamp,
    /// When it became a delivery.
    pub since: Timestamp,
    /// Who works on it since when, if it is claimed in a queue.
    pub claim: Option<ClaimRecord>,
    /// The last errors, oldest first.
    pub errors: Vec<AttemptError>,
    /// The event it waits for, if blocked: id, position and state of the key's head.
    pub head: Option<(Uuid, Position, State)>,
}

/// Who works on a delivery.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClaimRecord {
    /// The instance.
    pub instance: InstanceId,
    /// Since when.
    pub since: Timestamp,
    /// When the instance last gave a sign of life, by the database's clock; None: it has no row any more.
    pub beat_at: Option<Timestamp>,
}

/// What an operator asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Deliveries back to due now with attempts 0, in log order.
    Requeue {
        /// The subscription.
        subscription: String,
        /// Which of them.
        which: Selection,
        /// At most this many.
        limit: usize,
    },
    /// Takes claims of queues from their owners, whether those live or not; each counts as an attempt with the cause `operator`.
    Recover {
        /// Only of this subscription.
        subscription: Option<String>,
        /// Only what this instance works on.
        instance: Option<InstanceId>,
        /// Only where the owner has given no sign of life for this long, by the database's clock; no time at all: any owner.
        silent_for: Duration,
    },
    /// Gives one delivery up and unblocks its key.
    Skip {
        /// The subscription.
        subscription: String,
        /// The event.
        event: Uuid,
        /// Why; kept.
        reason: String,
    },
    /// Stops a subscription; see [`Pause::over`] for one that is paused already.
    Pause {
        /// The subscription.
        subscription: String,
        /// Who wants it.
        by: PausedBy,
        /// Why; kept until it is resumed, and at most [`ERROR_BYTES_MAX`] bytes of it.
        reason: Option<String>,
    },
    /// Continues it.
    Resume(String),
    /// Replays.
    Rewind {
        /// The subscription.
        subscription: String,
        /// To the events above this place.
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
    /// Changes the number of lanes of a subscription that is paused and quiet.
    Relane {
        /// The subscription.
        subscription: String,
        /// The new number.
        lanes: u32,
    },
}

impl Change {
    /// An operator's pause without a reason.
    pub fn pause(subscription: impl Into<String>) -> Self {
        Change::Pause { subscription: subscription.into(), by: PausedBy::Operator, reason: None }
    }
}

/// Who paused a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PausedBy {
    /// Somebody who knows about it.
    Operator,
    /// The receiver, which said that it accepts no more events ([`Failure::pause`](crate::Failure::pause)): unhealthy until somebody resumes
    /// the subscription, or pauses it too.
    Receiver,
}

impl PausedBy {
    /// The name, everywhere.
    pub fn name(self) -> &'static str {
        match self {
            PausedBy::Operator => "operator",
            PausedBy::Receiver => "receiver",
        }
    }
}

/// Why a subscription stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// Who paused it.
    pub by: PausedBy,
    /// Why, if that was said.
    pub reason: Option<String>,
}

impl Pause {
    /// What a database says: whether it is paused, by whom, and why.
    pub fn stored(paused: bool, by: Option<&str>, reason: Option<String>) -> Option<Pause> {
        let by = if by == Some(PausedBy::Receiver.name()) { PausedBy::Receiver } else { PausedBy::Operator };
        paused.then_some(Pause { by, reason })
    }

    /// What is kept when a subscription that may be paused already is paused. The receiver's word changes nothing then: it was said
    /// before, by this relay or another, or an operator knows better. An operator makes the pause their own, and the reason stays if
    /// they give none.
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

/// Which deliveries a requeue means.
#[derive(Debug, Clone, PartialEq)]
pub enum Selection {
    /// One event.
    Event(Uuid),
    /// One version of a journal stream.
    Version(String, i64),
    /// All dead ones of a key.
    Key(String),
    /// All dead ones.
    All,
}

/// What a change did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Changed {
    /// How many deliveries, lanes or subscriptions.
    pub count: u64,
    /// The events concerned, for requeue and skip.
    pub events: Vec<Uuid>,
    /// One sentence for people.
    pub message: String,
}

/// What may be removed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrunePolicy {
    /// Events older than this that every subscription has passed. None: keep all.
    pub keep: Option<Duration>,
    /// Deliveries that have been dead for longer than this. None: keep all.
    pub dead: Option<Duration>,
    /// Deduplication keys older than this.
    pub dedup_window: Duration,
    /// What inboxes have accepted longer ago than this; whatever comes again later counts as new. None: keep all.
    pub inbox: Option<Duration>,
    /// At most this many events a slice.
    pub slice: usize,
    /// Also events of a log that has no subscription, which nobody has received. Otherwise nothing of such a log is removed.
    pub unreceived: bool,
    /// Also what a subscription has not received and its `hold` keeps no longer. Otherwise it is kept as if the hold were not over. Default:
    /// true, as every relay does it.
    pub held: bool,
    /// Remove nothing; count what all slices together would remove. What a delivery would keep aside is not looked for, nor what
    /// publishers and inboxes have left.
    pub dry_run: bool,
}

impl PrunePolicy {
    /// Whether events of a log may be removed that has subscriptions, or none.
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

/// What one slice of pruning removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Pruned {
    /// Events removed.
    pub events: u64,
    /// Events copied aside because a delivery needs them.
    pub kept: u64,
    /// Dead deliveries removed.
    pub dead: u64,
    /// Events that were dropped for a subscription which had not received them, since its `hold` was over; each once a subscription.
    pub undelivered: u64,
    /// Deduplication keys removed.
    pub dedup: u64,
    /// Entries of inboxes removed.
    pub inbox: u64,
    /// There is more to do.
    pub more: bool,
    /// Copies of events are left that were not looked at; the next slice goes on there. A relay does so at its next turn, since most of them
    /// are needed. Call it until this is false too to remove all that nobody needs.
    #[serde(skip)]
    pub unlooked: bool,
    /// Events that are old enough and that every subscription has passed, but lie in the table in use: on PostgreSQL events go table by
    /// table. Only a dry run counts them.
    pub in_use: u64,
    /// The subscription that stops pruning from going further, if one does.
    pub held_by: Option<String>,
}

/// One finding of `doctor`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: String,
    /// How it stands.
    pub level: Level,
    /// What was found.
    pub finding: String,
    /// What to do, unless all is well.
    pub fix: Option<String>,
}

/// How a premise stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// It holds.
    Ok,
    /// It holds, with a risk.
    Warning,
    /// It does not hold.
    Failed,
}

/// The engine's own record of what it settled.
#[derive(Debug, Clone, Default)]
pub struct Books {
    /// The incarnation.
    pub incarnation: i64,
    /// The lowest position that retention has left.
    pub log_start: Position,
    /// The highest position when the books were read.
    pub horizon: Position,
    /// Positions closed as dead.
    pub dead: RangeSet,
    /// One page a lane.
    pub lanes: Vec<LaneBook>,
    /// By which filters events were judged before, by subscription name.
    pub former_filters: HashMap<String, FormerFilters>,
}

/// The reason recorded for what a subscription lost because its `hold` was over.
pub const REASON_HOLD: &str = "dropped by retention: the subscription's hold was over";

/// The reason recorded for dead deliveries that retention removed.
pub const REASON_DEAD: &str = "dropped by retention: dead for longer than retention.dead";

/// The record of one lane.
#[derive(Debug, Clone)]
pub struct LaneBook {
    /// The subscription's name.
    pub subscription: String,
    /// What it wants.
    pub filter: Filter,
    /// How many lanes the subscription has.
    pub lanes: u32,
    /// The lane.
    pub lane: u32,
    /// The cursor's floor.
    pub floor: Position,
    /// The cursor's ranges above it.
    pub settled: RangeSet,
    /// What the settlements themselves say they covered.
    pub covered: RangeSet,
    /// What the lane was never to deliver: what lay before the subscription's start, what was in the log when it was declared a
    /// fresh copy, and what was dropped because the subscription's `hold` was over.
    pub before_start: RangeSet,
    /// Positions in the delivery table.
    pub deliveries: RangeSet,
    /// Positions given up, by an operator or by retention, each with a reason.
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
