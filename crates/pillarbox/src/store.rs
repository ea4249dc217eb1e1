use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Event, Filter, Position, Result, State, Subscription, Timestamp};

pub use crate::definition::{Definition, FORMER_FILTERS_MAX, FormerFilter, FormerFilters, PassedUnder};
pub use crate::error::{Retryability, not_itself};
pub use crate::event::{KeyHash, lane_of};
pub use crate::failpoint::Failpoint;
pub use crate::grace::Grace;
pub use crate::ownership::neighbour_of;
pub use crate::queue::{
    CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Failed, KEYS_TOLD_MAX, QUEUED_KEYS_MAX, Queued,
    RecoverRequest, Recovered, RecoveredAttempt, RecoveryCause, SUSPECT_AFTER, WAITING_COUNTED, recount_after,
    recovered, tell_keys,
};
pub use crate::range_set::RangeSet;
pub use crate::schema_state::{Migration, SchemaState};
pub use crate::stateful::Stateful;
pub use crate::token::ResumeToken;
pub use crate::transact::{Abort, ClaimPlace, ClaimedDelivery, IsTransactionHandler, Transact, TransactionHandler};

pub mod decode;
mod failure;
#[doc(hidden)]
pub mod sql;

/// Number of a lane's ownership, raised by every change of the lane's owner, of the subscription's filter and by an
/// operator's rewind. It fences every write.
pub type Epoch = i64;

/// What a relay needs from a database. There is one implementation per database; all pass the conformance suite.
///
/// A store value is one instance of a relay at a time. All calls may run concurrently. Each call is one transaction (or
/// several, where documented) and is atomic. If a call fails, it may or may not have taken effect, but never partially.
/// Every call has a time limit.
///
/// An instance ends when it can no longer prove that it is alive: its connection was lost, or another instance removed
/// its row. From then on calls fail with `ErrorKind::Ended` (`observe` and `take` always), until the relay has given up
/// all its work and joined again.
pub trait Store: Send + Sync + 'static {
    /// What this store can do.
    fn features(&self) -> StoreFeatures;

    /// Makes this process an instance: takes its liveness lock, then writes its row, then creates or updates the
    /// subscriptions. The database's `lanes` and `start` take precedence over the given ones; after [`Hello::rejoin`]
    /// all settings of the database do. If a filter has changed, the epochs of all lanes are raised in the same
    /// transaction, and what they have settled is kept with the former filter ([`FormerFilters`]). Refuses, with a
    /// reason, a schema or log that cannot be used, and a subscription that was created with another `mode`.
    ///
    /// May be called again. The instance that this store was before has then ended: its lock is free, and its lanes
    /// have no owner, or one that every other instance can recognise as ended.
    fn join(&self, hello: Hello) -> impl Future<Output = Result<Joined>> + Send;

    /// Beats once (the only sign of life that a lease considers), stores the report, and then reads the fleet: what it
    /// returns is not older than the beat. Fails with `ErrorKind::Ended` if another instance has removed the row of
    /// this one, and with `ErrorKind::Foreign` if the anchor of one of its own lanes is no longer in the log, because
    /// the log was replaced.
    fn observe(&self, report: &Report) -> impl Future<Output = Result<Fleet>> + Send;

    /// Makes this instance the owner of each lane whose epoch is still the expected one, raises the epoch, and commits
    /// before it returns. None: another instance was faster, or the owner has beaten since [`Take::beat`]. Taking a
    /// lane from another owner counts in `takeovers`.
    fn take(&self, lanes: &[Take]) -> impl Future<Output = Result<Vec<Option<Epoch>>>> + Send;

    /// Loads lanes at the given epochs, after the take was committed; None where the epoch has changed. Checks each
    /// anchor: fails with `ErrorKind::Foreign` if the log was replaced or set back.
    fn load(&self, lanes: &[(LaneRef, Epoch)]) -> impl Future<Output = Result<Vec<Option<LaneState>>>> + Send;

    /// Reads the horizon, then the writers, then all scans in one snapshot, in this order. Everything it returns is
    /// durable: no crash of the database can undo a returned event.
    fn poll(&self, request: &PollRequest) -> impl Future<Output = Result<Page>> + Send;

    /// Returns the events at exactly these positions, from the log or from the copies kept for deliveries, ascending
    /// and without missing ones. Of large events it returns the first ones in the order of the request, [`PAGE_BYTES_MAX`] bytes together
    /// at most but one event at least: the caller requests again those that it named after the last returned one.
    fn fetch(&self, positions: &[Position]) -> impl Future<Output = Result<Vec<Arc<Event>>>> + Send;

    /// Writes what became of events, in one transaction that first locks each lane's cursor at the given epoch. The
    /// answer for a lane whose epoch has changed, or which no longer exists, is false, and nothing of that lane is
    /// written; the other lanes are written.
    fn settle(&self, settlement: &Settlement) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Claims deliveries of queues, one answer per request. A delivery can be claimed if it is due, is not claimed, and
    /// no other delivery of its key is before it (delayed ones do not count, dead ones only where they block). When a
    /// delayed delivery becomes due, it is placed behind those that its key has by then. The delivery that has waited
    /// longest for its turn comes first, so no key delays the others. Its event is durable. A request that takes too
    /// long may be answered with nothing claimed and something waiting. For a repeated request this is not possible,
    /// because what it claimed the time before is not known: the call fails.
    fn claim(&self, requests: &[ClaimRequest]) -> impl Future<Output = Result<Vec<Claims>>> + Send;

    /// Ends claims of this instance, in one transaction. False: the claim was taken away from this instance meanwhile,
    /// and nothing of it is written.
    fn finish(&self, ends: &[ClaimEnd]) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Recovers claims from owners that will no longer end them. Each counts as an attempt by [`recovered`], with the
    /// retry policy that the database has for its subscription. The database counts what was recovered.
    fn recover(&self, request: &RecoverRequest) -> impl Future<Output = Result<Recovered>> + Send;

    /// Waits until any session may have committed something, an instance may have ended, or the time is over. A commit
    /// before the call counts if no poll that began after it has seen it.
    fn wait(&self, timeout: Duration) -> impl Future<Output = Result<Wake>> + Send;

    /// Ends this instance: its lanes no longer have an owner, its claims are given back without counting an attempt,
    /// its row is removed and its lock is freed.
    fn leave(&self) -> impl Future<Output = Result<()>> + Send;
}

/// What a store can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreFeatures {
    /// Whether a held liveness lock proves life, so that no lease overrides it (true for a local file lock, false for a
    /// session lock over a network). Where it does not, an instance that could not beat for most of its lease stops by
    /// itself.
    pub lock_proves_life: bool,
    /// Minimum time between two settlements, unless much has to be written.
    pub settle_interval: Duration,
}

/// Number of an instance; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InstanceId(pub i64);

/// Number of a subscription; a rename keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SubscriptionId(pub i64);

/// One lane of one subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneRef {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The lane, from 0.
    pub lane: u32,
}

/// What an instance reports about itself when it joins.
#[derive(Debug, Clone, Default)]
pub struct Hello {
    /// The host's name, for people.
    pub host: String,
    /// The process id, for people; never compared.
    pub pid: u32,
    /// The version of the software.
    pub version: String,
    /// The subscriptions that it can run.
    pub subscriptions: Vec<Subscription>,
    /// Whether it ran before and ended without a new start. Then the definitions in the database stay; otherwise an old
    /// configuration would become the newest.
    pub rejoin: bool,
}

/// The answer to [`Store::join`].
#[derive(Debug, Clone)]
pub struct Joined {
    /// This instance.
    pub instance: InstanceId,
    /// The identity of the log.
    pub log_id: Uuid,
    /// The incarnation of the log.
    pub incarnation: i64,
    /// The subscriptions as the database has them, in the order of the request.
    pub subscriptions: Vec<SubscriptionView>,
    /// The database's time of day, at some moment of the call.
    pub time: Timestamp,
}

/// A subscription as the database has it.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriptionView {
    /// Its number.
    pub id: SubscriptionId,
    /// Its name.
    pub name: String,
    /// The definition, from the instance that was started last.
    pub definition: Definition,
    /// Number of its lanes.
    pub lanes: u32,
    /// Whether it is paused until it is resumed.
    pub paused: bool,
    /// Whether this join created it (only in [`Joined`]).
    pub created: bool,
}

/// The fleet: all instances, subscriptions and lanes of a log.
#[derive(Debug, Clone, Default)]
pub struct Fleet {
    /// All instances with a row, this one included.
    pub instances: Vec<InstanceView>,
    /// All subscriptions.
    pub subscriptions: Vec<SubscriptionView>,
    /// All lanes.
    pub lanes: Vec<LaneView>,
    /// The database's time of day, at some moment of the call.
    pub time: Timestamp,
}

/// An instance as another one sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct InstanceView {
    /// Its number.
    pub id: InstanceId,
    /// Number of its beats so far.
    pub beat: i64,
    /// Its liveness lock.
    pub lock: Lock,
    /// Whether it is about to leave and takes no more lanes, by its last report.
    pub draining: bool,
    /// The subscriptions that it can run.
    pub subscriptions: Vec<SubscriptionId>,
}

/// The state of an instance's liveness lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// The lock is held.
    Held,
    /// The lock came free: the process has ended.
    Free,
    /// The lock cannot be observed from here.
    Unknown,
}

/// A lane as every instance sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct LaneView {
    /// The lane.
    pub lane: LaneRef,
    /// The owner.
    pub owner: Option<InstanceId>,
    /// Its epoch.
    pub epoch: Epoch,
    /// Number of the lane's deliveries, raised when an operator changes them; the owner then loads them again.
    pub revision: i64,
    /// Number of take-overs since an owner was last calm: see [`LaneWrite::calm`].
    pub takeovers: u32,
}

/// A lane to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// The lane.
    pub lane: LaneRef,
    /// The epoch that was observed.
    pub expected: Epoch,
    /// The reason why it may be taken.
    pub cause: TakeCause,
    /// With [`TakeCause::Lease`], the last observed beat of the owner: if the owner has beaten since, it keeps the
    /// lane.
    pub beat: Option<i64>,
}

/// The reason why a lane may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TakeCause {
    /// It has no owner, or this instance owns it at another epoch.
    Free,
    /// Its owner's lock came free.
    Lock,
    /// Its owner has not beaten for the time of the lease.
    Lease,
}

impl TakeCause {
    /// The name in counters and logs.
    pub fn name(self) -> &'static str {
        match self {
            TakeCause::Free => "free",
            TakeCause::Lock => "lock",
            TakeCause::Lease => "lease",
        }
    }
}

/// What a lane has settled: everything up to `floor`, and `settled` above it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The position up to which everything is settled.
    pub floor: Position,
    /// The settled ranges above the floor.
    pub settled: RangeSet,
    /// The last settled event, which makes it possible to detect a log that was replaced or set back.
    pub anchor: Option<(Position, Uuid)>,
}

impl Cursor {
    /// All positions that are settled.
    pub fn positions(&self) -> RangeSet {
        let mut positions = self.settled.clone();
        positions.insert_range(1, self.floor);
        positions
    }

    /// All positions that are not settled, including those still to come.
    pub fn open(&self) -> RangeSet {
        self.settled.missing(self.floor + 1, Position::MAX)
    }
}

/// The state of a lane that its owner loads.
#[derive(Debug, Clone, Default)]
pub struct LaneState {
    /// The cursor.
    pub cursor: Cursor,
    /// The deliveries of the lane that its owner needs, in order of arrival; none for a queue. These are: all that are
    /// not dead; the dead ones that are not settled, because their range was left out of the cursor; and, where dead
    /// events hold their key back, the first dead one of each key, up to [`DEAD_HEADS_MAX`] keys. Further dead
    /// deliveries cost nothing.
    pub deliveries: Vec<DeliveryRow>,
    /// Whether dead events hold back more than [`DEAD_HEADS_MAX`] keys, so that `deliveries` does not contain all of
    /// them.
    pub dead_heads_left_out: bool,
    /// The highest arrival of all deliveries of the lane, dead ones included; none of a queue.
    pub last_arrival: i64,
    /// For a queue: every key of the lane that has a row, in any state.
    pub queued_keys: Vec<Box<str>>,
    /// Whether more than [`QUEUED_KEYS_MAX`] keys of the queue have rows, in which case `queued_keys` does not contain
    /// them.
    pub queued_keys_left_out: bool,
    /// Number of take-overs since an owner was last calm: see [`LaneWrite::calm`].
    pub takeovers: u32,
    /// See [`LaneView::revision`].
    pub revision: i64,
    /// The definition of the subscription, read in one snapshot with the cursor. Under this epoch the lane is read only
    /// with its filter.
    pub definition: Arc<Definition>,
}

/// Maximum number of keys of one lane that are loaded because a dead event holds them back. A lane with more is stopped
/// until some are requeued or skipped.
pub const DEAD_HEADS_MAX: usize = 10_000;

/// A row of the delivery table.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliveryRow {
    /// The position of the event.
    pub position: Position,
    /// The event's key.
    pub key: Option<Box<str>>,
    /// The place among the deliveries of the lane.
    pub arrival: i64,
    /// Pending, delayed, processing, retrying or dead; `blocked` is derived, never stored.
    pub state: State,
    /// Number of counted attempts.
    pub attempts: u32,
    /// The time before which it is not tried.
    pub due_at: Timestamp,
    /// The time at which it became a delivery.
    pub since: Timestamp,
}

impl DeliveryRow {
    /// The hash of the key.
    pub fn key_hash(&self) -> Option<KeyHash> {
        self.key.as_deref().map(KeyHash::of)
    }
}

/// A failed attempt, kept with its delivery.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptError {
    /// The time of the failure.
    pub at: Timestamp,
    /// The number of the attempt.
    pub attempt: u32,
    /// The failure's kind.
    pub kind: String,
    /// The failure's message, at most [`ERROR_BYTES_MAX`] bytes.
    pub message: String,
}

impl AttemptError {
    /// The errors that are kept with a delivery, oldest first, from their stored text.
    pub fn stored(text: &str) -> Vec<AttemptError> {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// The text that stores these errors: the last few, each as it is stored.
    pub fn to_store(errors: impl IntoIterator<Item = AttemptError>) -> String {
        let mut errors: Vec<_> = errors.into_iter().map(AttemptError::storable).collect();
        errors.drain(..errors.len().saturating_sub(ERRORS_KEPT_MAX));
        serde_json::to_string(&errors).expect("errors are JSON")
    }

    /// The error as it is stored: not too long, and without the character that PostgreSQL's text cannot hold.
    pub fn storable(mut self) -> AttemptError {
        self.message.truncate(self.message.floor_char_boundary(ERROR_BYTES_MAX));
        self.message = self.message.replace('\0', "\u{fffd}");
        self
    }
}

/// Maximum length of a stored error message, in bytes.
pub const ERROR_BYTES_MAX: usize = 2048;

/// Maximum number of errors kept with a delivery.
pub const ERRORS_KEPT_MAX: usize = 5;

/// The most bytes of events that one answer of a store holds, beyond the first event: of each scan of a poll, and of a fetch.
pub const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// What a poll reads.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PollRequest {
    /// The stretches of the log to read, in one snapshot.
    pub scans: Vec<ScanRequest>,
    /// The filters; an event that matches none of them is reported as visible but not returned.
    pub wanted: Vec<Filter>,
    /// Whether the writers are left out, because they would prove nothing useful now.
    pub without_writers: bool,
}

/// One stretch of the log: `after < position <= to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRequest {
    /// The position before the stretch (exclusive).
    pub after: Position,
    /// The last position (inclusive); [`Position::MAX`] for the tail.
    pub to: Position,
    /// Maximum number of positions to examine.
    pub limit: usize,
}

/// The answer to a poll.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The highest position that had been drawn when the poll began.
    pub horizon: Position,
    /// The transactions that were writing events when the poll began, read after the horizon. None: not read.
    pub writers: Option<Vec<Writer>>,
    /// The database's clock, read before the horizon, in the database's own unit.
    pub clock: i64,
    /// The writers that are known to have been idle since a time by that clock.
    pub idle: Vec<(Writer, i64)>,
    /// The database session that read the writers. Results of two polls may be compared only within one session.
    pub session: u64,
    /// The lowest position from which retention has removed nothing, read with the scans or after them. No position
    /// below it is ever closed: what a scan does not show there was removed, what it shows there was kept.
    pub log_start: Position,
    /// One result per scan.
    pub scans: Vec<Scan>,
}

/// A transaction that may still commit events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Writer(pub u64);

/// The result of one scan.
#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// The position before the stretch, as requested.
    pub after: Position,
    /// The position up to which the scan is complete: every position in `after < position <= covered_to` that the
    /// snapshot shows is in `visible`.
    pub covered_to: Position,
    /// The positions that the snapshot shows.
    pub visible: RangeSet,
    /// The wanted events among them, ascending.
    pub events: Vec<Arc<Event>>,
}

/// What became of events.
#[derive(Debug, Clone, Default)]
pub struct Settlement {
    /// At most one write per lane, in lane order.
    pub lanes: Vec<LaneWrite>,
    /// Positions that are proven to be closed, for `dead_range`.
    pub closed: RangeSet,
}

/// One lane's part of a settlement.
#[derive(Debug, Clone)]
pub struct LaneWrite {
    /// The lane.
    pub lane: LaneRef,
    /// The epoch that fences the write.
    pub epoch: Epoch,
    /// The revision that was loaded. If it has changed, an operator has changed deliveries meanwhile. Then `change` is
    /// not written, and `put` neither replaces existing rows nor restores deliveries that the stored cursor counts as
    /// settled, because the owner repeats a write that was not answered. The answer for a write that
    /// [announces](LaneWrite::announces) attempts is then false, and the rest of it may or may not be written.
    pub revision: i64,
    /// The new cursor.
    pub cursor: Cursor,
    /// The deliveries to insert or replace.
    pub put: Vec<DeliveryRow>,
    /// The events of a queue that get a row for which instances compete, unless they have one or the stored cursor
    /// counts them as settled: the owner repeats a write that was not answered, and by then their rows may be done.
    /// Each is placed behind the existing rows of its key, and they keep their order among themselves.
    pub queue: Vec<Queued>,
    /// The deliveries to change if they still exist, with the error to add to their list.
    pub change: Vec<(DeliveryRow, Option<AttemptError>)>,
    /// The deliveries that are done.
    pub finish: Vec<Position>,
    /// Whether the owner has survived what may have ended its predecessors; `takeovers` is then reset to 0.
    pub calm: bool,
    /// Whether the lane is given back.
    pub release: bool,
}

impl LaneWrite {
    /// Whether it records attempts that begin once it is written. If the revision has changed, the answer to such a
    /// write is false, because an attempt that was not counted must not begin.
    pub fn announces(&self) -> bool {
        self.change.iter().any(|(delivery, _)| delivery.state == State::Processing)
    }
}

/// The reason why [`Store::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something may have been committed, or an instance may have ended.
    Rang,
    /// Events may have been committed, and nothing is known to have changed in the fleet.
    Published,
    /// The time is over.
    Timeout,
}

/// The report of an instance about its work, for operators; stored with each beat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The reports on its subscriptions, by name.
    pub subscriptions: BTreeMap<String, SubscriptionReport>,
    /// Whether it is stopping and finishes what is in flight.
    #[serde(default)]
    pub draining: bool,
}

/// The report of an instance about one subscription.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SubscriptionReport {
    /// Number of events at the sink now.
    pub in_flight: u64,
    /// Number of events delivered since the instance started.
    pub delivered: u64,
    /// The time of the last delivery.
    #[serde(default)]
    pub delivered_at: Option<Timestamp>,
    /// The state of the breaker, while the sink is considered down.
    #[serde(default)]
    pub breaker: Option<BreakerReport>,
    /// Whether more than half of the last keys failed, so that a bad deploy is suspected and nothing becomes dead.
    #[serde(default)]
    pub flood_guard: bool,
    /// The reason, if a limit stopped the subscription.
    #[serde(default)]
    pub stopped: Option<String>,
    /// The number of the definition that the instance uses; 0: not reported.
    #[serde(default)]
    pub definition: i64,
    /// Whether the instance's own configuration differs from that definition.
    #[serde(default)]
    pub differs: bool,
}

/// The report of an instance about a sink that is down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BreakerReport {
    /// The time since which it is down.
    pub since: Timestamp,
    /// The time of the next try.
    pub next_try: Timestamp,
    /// The last error.
    pub error: String,
}
