use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Event, Filter, Position, Result, State, Subscription, Timestamp};

pub use crate::definition::{Definition, FORMER_FILTERS_MAX, FormerFilter, FormerFilters, PassedUnder};
pub use crate::error::Advice;
pub use crate::event::{KeyHash, lane_of};
pub use crate::failpoint::Failpoint;
pub use crate::grace::Grace;
pub use crate::queue::{
    CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Failed, KEYS_TOLD_MAX, QUEUED_KEYS_MAX, Queued,
    RecoverRequest, Recovered, RecoveryCause, SUSPECT_AFTER, WAITING_COUNTED, recount_after, recovered, tell_keys,
};
pub use crate::range_set::RangeSet;
pub use crate::schema_state::SchemaState;
pub use crate::token::ResumeToken;
pub use crate::transact::{Abort, ClaimPlace, Transact};

pub mod decode;
#[doc(hidden)]
pub mod sql;

/// Raised by every change of a lane's owner, of the subscription's filter and by an operator's rewind; every write is fenced by it.
pub type Epoch = i64;

/// What a relay needs of a database. One implementation a database; all pass the conformance suite.
///
/// A store value is one instance of a relay at a time. All calls may run at once; each is one transaction (or more
/// where it says so) and either happens whole or not at all. After an error nothing may be assumed about
/// it having happened, except that it happened whole or not at all. No call waits without a bound.
///
/// An instance ends when it cannot prove its life any more: its connection was lost, or another has buried it. From then
/// on calls fail with `ErrorKind::Ended`, `observe` and `take` always, until the relay has given up all its work and
/// joined again.
pub trait Store: Send + Sync + 'static {
    /// What this store can do.
    fn features(&self) -> StoreFeatures;

    /// Makes this process an instance: takes its liveness lock first, then writes its row, then creates or
    /// updates the subscriptions (the database's `lanes` and `start` win over what is given; after [`Hello::rejoin`] everything
    /// of the database does). Where the filter is another than before, the epochs of all lanes are raised in the same transaction, and
    /// what they have settled is kept with the former filter ([`FormerFilters`]). Refuses with a reason when the schema or the log is not fit to be worked on, and a subscription
    /// that was made with another `mode`.
    ///
    /// May be called again. The instance that this store was before is then over: its lock is free, and its lanes have no
    /// owner or one that everybody can see to be dead.
    fn join(&self, hello: Hello) -> impl Future<Output = Result<Joined>> + Send;

    /// Beats once (the only sign of life that a lease looks at), stores the report, and then looks: what it returns of
    /// the fleet is not older than the beat. Fails with `ErrorKind::Ended` if this instance has been buried by another, and with
    /// `ErrorKind::Foreign` if the anchor of a lane of its own is not in the log any more: it was replaced underneath.
    fn observe(&self, report: &Report) -> impl Future<Output = Result<Fleet>> + Send;

    /// Makes this instance the owner of each lane whose epoch is still the expected one, raising the epoch, and
    /// commits before it returns. None: somebody was faster, or the owner has beaten since [`Take::beat`]. Taking from a
    /// named owner counts in `takeovers`.
    fn take(&self, lanes: &[Take]) -> impl Future<Output = Result<Vec<Option<Epoch>>>> + Send;

    /// Loads lanes at the given epochs, after the take was committed; None where the epoch has moved on.
    /// Checks each anchor: fails with `ErrorKind::Foreign` if the log is not the continuation of itself.
    fn load(&self, lanes: &[(LaneRef, Epoch)]) -> impl Future<Output = Result<Vec<Option<LaneState>>>> + Send;

    /// Reads the horizon, then the writers, then all scans in one snapshot: in this order. Everything it returns is
    /// durable: no crash of the database can take a returned event back.
    fn poll(&self, request: &PollRequest) -> impl Future<Output = Result<Page>> + Send;

    /// The events at exactly these positions, from the log or kept aside for deliveries; ascending, missing ones left out. Where events
    /// are large a store may also leave out those that were asked for last, but never all that there are: what was asked for after the
    /// last one that it returns is asked for again.
    fn fetch(&self, positions: &[Position]) -> impl Future<Output = Result<Vec<Arc<Event>>>> + Send;

    /// Writes what became of events, in one transaction that first locks each lane's cursor at the given epoch.
    /// A lane whose epoch has moved on, or which is not there any more, is answered with false and nothing of it is written; the
    /// others are.
    fn settle(&self, settlement: &Settlement) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Claims deliveries of queues, one answer a request. What can be claimed is due, has no other of its key before it (delayed ones
    /// do not count, dead ones only where they block) and is nobody's. A delayed one takes its place behind what its key has when it is
    /// due. What has waited longest for its turn comes first, so that no key keeps others waiting. Its event is durable. A request that
    /// takes too long may be answered by nothing claimed and something waiting; one that is asked again is not, for what it claimed the time
    /// before is not known: the call fails.
    fn claim(&self, requests: &[ClaimRequest]) -> impl Future<Output = Result<Vec<Claims>>> + Send;

    /// Ends claims of this instance, in one transaction. False: the claim was taken from this instance meanwhile, and nothing of it is
    /// written.
    fn finish(&self, ends: &[ClaimEnd]) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Takes claims from those who will not end them any more; each counts as an attempt by [`recovered`], with the
    /// retry policy that the database has of its subscription. What was recovered is counted in the database.
    fn recover(&self, request: &RecoverRequest) -> impl Future<Output = Result<Recovered>> + Send;

    /// Waits until something may have been committed by anybody, an instance may have ended, or the time is over.
    /// What was committed before the call counts if no poll that began later has seen it.
    fn wait(&self, timeout: Duration) -> impl Future<Output = Result<Wake>> + Send;

    /// Ends this instance: its lanes have no owner any more, its claims are given back and no attempt is counted, its row goes, its
    /// lock is freed.
    fn leave(&self) -> impl Future<Output = Result<()>> + Send;
}

/// What a store can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreFeatures {
    /// A held liveness lock proves life, and no lease overrules it (a local file lock does; a session lock over a network
    /// does not). Where it does not, an instance that could not beat for most of its lease stops by itself.
    pub lock_proves_life: bool,
    /// At least this long between two settles, unless much has to be written.
    pub settle_interval: Duration,
}

/// An instance's number; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InstanceId(pub i64);

/// A subscription's number; a rename keeps it.
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

/// What an instance says of itself when it joins.
#[derive(Debug, Clone, Default)]
pub struct Hello {
    /// The host's name, for people.
    pub host: String,
    /// The process id, for people; never compared.
    pub pid: u32,
    /// The version of the software.
    pub version: String,
    /// What it can run.
    pub subscriptions: Vec<Subscription>,
    /// It ran before and has ended without having been started anew: what the database says of a subscription stays, or an
    /// old configuration would become the newest.
    pub rejoin: bool,
}

/// The answer to [`Store::join`].
#[derive(Debug, Clone)]
pub struct Joined {
    /// This instance.
    pub instance: InstanceId,
    /// The identity of the log.
    pub log_id: Uuid,
    /// Its incarnation.
    pub incarnation: i64,
    /// The subscriptions as the database has them, in the order of the hello.
    pub subscriptions: Vec<SubscriptionView>,
    /// The database's time of day, at some moment of the call.
    pub time: Timestamp,
}

/// What the database says of a subscription.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriptionView {
    /// Its number.
    pub id: SubscriptionId,
    /// Its name.
    pub name: String,
    /// What the newest started instance said of it.
    pub definition: Definition,
    /// How many lanes it has.
    pub lanes: u32,
    /// Whether it stands still until somebody resumes it.
    pub paused: bool,
    /// Made by this join (only in [`Joined`]).
    pub created: bool,
}

/// What can be seen of the fleet.
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

/// One instance as another sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct InstanceView {
    /// Its number.
    pub id: InstanceId,
    /// How often it has beaten.
    pub beat: i64,
    /// Its liveness lock.
    pub lock: Lock,
    /// It is about to leave and takes no lane any more, by its last report.
    pub draining: bool,
    /// The subscriptions that it can run.
    pub subscriptions: Vec<SubscriptionId>,
}

/// The state of an instance's liveness lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// It is held.
    Held,
    /// It came free: the process is gone.
    Free,
    /// It cannot be seen from here.
    Unknown,
}

/// One lane as everybody sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct LaneView {
    /// Which lane.
    pub lane: LaneRef,
    /// Who owns it.
    pub owner: Option<InstanceId>,
    /// Its epoch.
    pub epoch: Epoch,
    /// Raised when an operator changed the lane's deliveries; the owner loads them again.
    pub revision: i64,
    /// How often the lane was seized since an owner was last calm: see [`LaneWrite::calm`].
    pub takeovers: u32,
}

/// A lane to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// Which lane.
    pub lane: LaneRef,
    /// The epoch that was seen.
    pub expected: Epoch,
    /// Why it may be taken.
    pub cause: TakeCause,
    /// With [`TakeCause::Lease`], the beat at which the owner was seen to stand still: one that has beaten since keeps the lane.
    pub beat: Option<i64>,
}

/// Why a lane may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TakeCause {
    /// It has no owner, or is this instance's own at another epoch.
    Free,
    /// Its owner's lock came free.
    Lock,
    /// Its owner has not beaten for the lease's time.
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
    /// Everything at or below is settled.
    pub floor: Position,
    /// Ranges above the floor that are settled.
    pub settled: RangeSet,
    /// The newest event settled, to notice a log that is not the continuation of itself.
    pub anchor: Option<(Position, Uuid)>,
}

impl Cursor {
    /// All positions that are settled.
    pub fn positions(&self) -> RangeSet {
        let mut positions = self.settled.clone();
        positions.insert_range(1, self.floor);
        positions
    }

    /// All positions that are not settled, known or to come.
    pub fn open(&self) -> RangeSet {
        self.settled.missing(self.floor + 1, Position::MAX)
    }
}

/// What an owner loads of a lane.
#[derive(Debug, Clone, Default)]
pub struct LaneState {
    /// What is settled.
    pub cursor: Cursor,
    /// The deliveries of the lane that its owner needs, in order of arrival; none of a queue. Those that are not dead; those that are dead
    /// and not settled, since their range was left out of the cursor; and where dead events hold their key back, the first dead one of each key, up to
    /// [`DEAD_HEADS_MAX`] keys. How many are dead besides costs nothing.
    pub deliveries: Vec<DeliveryRow>,
    /// More keys than [`DEAD_HEADS_MAX`] are held back by a dead event, and `deliveries` does not name them all.
    pub dead_heads_left_out: bool,
    /// The highest arrival of all deliveries of the lane, dead ones included; none of a queue.
    pub last_arrival: i64,
    /// Of a queue: every key of the lane with a row, whatever its state.
    pub queued_keys: Vec<Box<str>>,
    /// More keys of the queue than [`QUEUED_KEYS_MAX`] have rows, and `queued_keys` does not name them.
    pub queued_keys_left_out: bool,
    /// How often the lane was seized since an owner was last calm: see [`LaneWrite::calm`].
    pub takeovers: u32,
    /// See [`LaneView::revision`].
    pub revision: i64,
    /// What the subscription is defined as, read in one snapshot with the cursor: with its filter and no other the lane is read under
    /// this epoch.
    pub definition: Arc<Definition>,
}

/// Keys of one lane that are held back by a dead event and are loaded; a lane with more stands still until some are requeued or skipped.
pub const DEAD_HEADS_MAX: usize = 10_000;

/// A row of the slow path.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliveryRow {
    /// Which event.
    pub position: Position,
    /// The event's key.
    pub key: Option<Box<str>>,
    /// Its place among the deliveries of the lane.
    pub arrival: i64,
    /// Pending, delayed, processing, retrying or dead; `blocked` is derived, never stored.
    pub state: State,
    /// How many attempts were counted.
    pub attempts: u32,
    /// Not to be tried before.
    pub due_at: Timestamp,
    /// When it first became a delivery.
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
    /// When.
    pub at: Timestamp,
    /// Which attempt.
    pub attempt: u32,
    /// The failure's kind.
    pub kind: String,
    /// The failure's message, at most [`ERROR_BYTES_MAX`] bytes.
    pub message: String,
}

/// The longest error message that is kept.
pub const ERROR_BYTES_MAX: usize = 2048;

/// How many errors are kept with a delivery.
pub const ERRORS_KEPT_MAX: usize = 5;

/// What to read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PollRequest {
    /// The stretches of the log to be read, in one snapshot.
    pub scans: Vec<ScanRequest>,
    /// Events that match none of these are reported as visible without being returned.
    pub wanted: Vec<Filter>,
    /// The writers need not be looked up: the answer would prove nothing of use now.
    pub without_writers: bool,
}

/// One stretch of the log: `after < position <= to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRequest {
    /// Exclusive.
    pub after: Position,
    /// Inclusive; [`Position::MAX`] for the tail.
    pub to: Position,
    /// At most this many positions are looked at.
    pub limit: usize,
}

/// The answer to a poll.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The highest position handed out when the poll began.
    pub horizon: Position,
    /// The transactions that were writing events when the poll began, after the horizon was read. None: not looked up.
    pub writers: Option<Vec<Writer>>,
    /// The database's clock, read before the horizon, in units of its own.
    pub clock: i64,
    /// Those of the writers that are known to have done nothing since a time by that clock.
    pub idle: Vec<(Writer, i64)>,
    /// Names the session with the database that saw the writers: what two polls saw may only be compared within one.
    pub session: u64,
    /// The lowest position that retention has left whole, read with the scans or after them. Nothing below it is ever dead:
    /// what a scan does not show there was removed, what it shows there was kept.
    pub log_start: Position,
    /// One answer a scan.
    pub scans: Vec<Scan>,
}

/// A transaction that may still commit events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Writer(pub u64);

/// What one scan showed.
#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// As asked.
    pub after: Position,
    /// Every position in `after < position <= covered_to` that the snapshot shows is in `visible`.
    pub covered_to: Position,
    /// The positions that the snapshot shows.
    pub visible: RangeSet,
    /// Those of them that are wanted, ascending.
    pub events: Vec<Arc<Event>>,
}

/// What became of events.
#[derive(Debug, Clone, Default)]
pub struct Settlement {
    /// At most one write a lane, in lane order.
    pub lanes: Vec<LaneWrite>,
    /// Positions that are proven dead, for `dead_range`.
    pub dead: RangeSet,
}

/// One lane's part of a settlement.
#[derive(Debug, Clone)]
pub struct LaneWrite {
    /// Which lane.
    pub lane: LaneRef,
    /// The fence.
    pub epoch: Epoch,
    /// The revision that was loaded: where it has moved on, an operator changed deliveries meanwhile, and `change` is not
    /// written, nor does `put` replace what is there, or bring back what the stored cursor counts as settled: the owner repeats a
    /// write that was not answered. A write that [announces](LaneWrite::announces) attempts is answered with false then, and what else it says
    /// may be written or not.
    pub revision: i64,
    /// The new cursor.
    pub cursor: Cursor,
    /// Deliveries to insert or replace.
    pub put: Vec<DeliveryRow>,
    /// Events of a queue that get a row which instances compete for, if they have none and the stored cursor does not count them as
    /// settled: the owner repeats a write that was not answered, and by then their rows may be done. Each is behind those of its
    /// key that have one, and they are in order among themselves.
    pub queue: Vec<Queued>,
    /// Deliveries to change if they are still there, with the error to be added to their list.
    pub change: Vec<(DeliveryRow, Option<AttemptError>)>,
    /// Deliveries that are done.
    pub finish: Vec<Position>,
    /// The owner has come through what those before it may have died of: `takeovers` begins anew.
    pub calm: bool,
    /// Give the lane back.
    pub release: bool,
}

impl LaneWrite {
    /// Whether it writes down attempts that begin once it is written. Where the revision has moved on, such a write is answered with false:
    /// an attempt that nobody has counted must not begin.
    pub fn announces(&self) -> bool {
        self.change.iter().any(|(delivery, _)| delivery.state == State::Processing)
    }
}

/// Why [`Store::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something may have been committed, or an instance may have ended.
    Rang,
    /// Events may have been committed, and nothing is known to have changed in the fleet.
    Published,
    /// The time is over.
    Timeout,
}

/// What an instance says of its work, for operators; stored with each beat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// By subscription name.
    pub subscriptions: BTreeMap<String, SubscriptionReport>,
    /// Stops on SIGTERM, finishing what is in flight.
    #[serde(default)]
    pub draining: bool,
}

/// What an instance says of one subscription.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SubscriptionReport {
    /// Events at the sink now.
    pub in_flight: u64,
    /// Events delivered since the instance started.
    pub delivered: u64,
    /// When something was last delivered.
    #[serde(default)]
    pub delivered_at: Option<Timestamp>,
    /// Set while the sink is considered down.
    #[serde(default)]
    pub breaker: Option<BreakerReport>,
    /// More than half of the last keys failed: a bad deploy is suspected and nothing becomes dead.
    #[serde(default)]
    pub flood_guard: bool,
    /// Why the subscription does not go on, if a limit stopped it.
    #[serde(default)]
    pub stopped: Option<String>,
    /// The number of the definition that the instance goes by; 0: it does not say.
    #[serde(default)]
    pub definition: i64,
    /// The instance's own configuration says something else.
    #[serde(default)]
    pub differs: bool,
}

/// What an instance says of a sink that is down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BreakerReport {
    /// Since when.
    pub since: Timestamp,
    /// When it is tried again.
    pub next_try: Timestamp,
    /// The last error.
    pub error: String,
}
