//! What operations cost as a log grows: counts, never times.
//!
//! A [`Ground`] is a log with a little of everything. Each operation is carried out there, and again where there is [`FACTOR`] times as
//! much of one thing. [`allowed`] is the promise: what an operation does not return costs it nothing.

mod calls;
mod steady;
mod walk;

use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::store::{Hello, RangeSet, Store, Transact, WAITING_COUNTED};
use pillarbox::{Filter, Mode, OnDead, Position, RetryPolicy, Subscription};

pub use self::calls::{Point, call_about_many};
pub use self::steady::{STEADY, Steady, judge_steady, measure_steady};
pub use self::walk::OTHER_INSTANCE;
use self::walk::Walk;

/// How many times as much there is at the larger ground.
pub const FACTOR: usize = 8;

/// How much there is at the smaller ground.
pub const SMALL: usize = 1_000;

/// How much there is at the larger ground where both are beyond what is counted and loaded at most, which is 10,000 of anything.
pub const BEYOND: usize = 4 * SMALL;

/// Events of every ground that all subscriptions have passed. The first [`OLD`] of them can be removed. The rows that a ground has of
/// everything are at the last [`SEEDED`] of them, what it has more of is at the others.
pub const EVENTS: usize = OLD + SMALL * FACTOR + SEEDED;

/// Events at the beginning of the log that are [`OLD_AGE`] old; the others that all have passed are [`PASSED_AGE`] old. A store that removes
/// its log table by table has [`PRUNED_AT_ONCE`] of them in each.
pub const OLD: usize = 4 * PRUNED_AT_ONCE;

/// Old events that one run of retention removes.
pub const PRUNED_AT_ONCE: usize = 100;

/// See [`OLD`]. The default policy of retention keeps them.
pub const OLD_AGE: Duration = Duration::from_secs(3 * 86_400);

/// See [`OLD`]. Far longer than clocks may be set back.
pub const PASSED_AGE: Duration = Duration::from_secs(3_600);

/// See [`EVENTS`].
pub const SEEDED: usize = 400;

/// Events behind all others that nobody has read.
pub const TAIL: usize = 40;

/// A few more steps are always allowed: an index is a level deeper, a page is split.
const SLACK: u64 = 50;

/// A store may listen meanwhile.
const STATEMENTS_SLACK: u64 = 6;

/// Steps and statements that a claim may take more because more waits: what waits and what is due is counted, each up to
/// [`WAITING_COUNTED`]. A claim that looks at each row that is due takes more than that.
const WAITING_STEPS_MAX: u64 = 2 * WAITING_COUNTED as u64;

/// The names of a ground's subscriptions, of one lane each.
pub const QUEUE: &str = "queue";
/// See [`QUEUE`].
pub const STREAM: &str = "stream";
/// See [`QUEUE`]. Nobody runs it, and it is paused.
pub const IDLE: &str = "idle";
/// See [`QUEUE`]. Nobody runs it, and it holds events for [`HOLD`] only.
pub const HELD: &str = "held";

/// How long [`HELD`] holds events that it has not received: less than [`PASSED_AGE`].
pub const HOLD: Duration = Duration::from_secs(60);

/// What a ground has more of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dimension {
    /// Events that everybody has passed.
    Log,
    /// Records of what was settled and of what was given up, of each subscription but [`HELD`]; of what an inbox has accepted, and of what was published
    /// once.
    Records,
    /// Dead deliveries, one a key, of each subscription but [`HELD`], with their events kept aside.
    Dead,
    /// Dead deliveries, one per key, of the stream and the queue, where a dead one holds its key back; in the queue another one waits behind
    /// each.
    DeadHeads,
    /// The same without what waits behind them, more than any limit counts: see [`BEYOND`]. Only for [`measure_beyond`].
    DeadKeys,
    /// Deliveries that are not due, one a key, of each subscription but [`HELD`].
    Delayed,
    /// Deliveries of one key of the queue that were delayed and are due.
    Due,
    /// Deliveries of the queue that were delayed and are due, two of each key.
    DuePairs,
    /// Deliveries of one key of the queue that wait for their turn.
    Waiting,
    /// Keys of the queue with two deliveries each that wait for their turn.
    Pairs,
    /// Deliveries of the queue that another instance works on.
    Claims,
    /// Deliveries of the queue that the instance itself works on.
    Working,
    /// Gaps of the log that are closed.
    DeadRanges,
    /// Events that the stream, which is paused, has not read.
    Backlog,
    /// Holes of the stream's cursor, with a range between each two of them.
    Holes,
    /// Dead deliveries of the stream, all settled above a hole that is open.
    AboveHole,
    /// Subscriptions that nobody runs.
    Subscriptions,
    /// Lanes without an owner, an equal share of each subscription.
    Lanes,
    /// Filters that each subscription has had.
    FormerFilters,
    /// Tables that the events which all have passed lie in. Only where a store divides its log.
    Leaves,
}

impl Dimension {
    /// All of them.
    pub const ALL: [Dimension; 19] = [
        Dimension::Log,
        Dimension::Records,
        Dimension::Dead,
        Dimension::DeadHeads,
        Dimension::Delayed,
        Dimension::Due,
        Dimension::DuePairs,
        Dimension::Waiting,
        Dimension::Pairs,
        Dimension::Claims,
        Dimension::Working,
        Dimension::DeadRanges,
        Dimension::Backlog,
        Dimension::Holes,
        Dimension::AboveHole,
        Dimension::Subscriptions,
        Dimension::Lanes,
        Dimension::FormerFilters,
        Dimension::Leaves,
    ];

    /// What a dead delivery does at its grounds.
    fn on_dead(self) -> OnDead {
        if matches!(self, Dimension::DeadHeads | Dimension::DeadKeys) { OnDead::Block } else { OnDead::Skip }
    }

    /// How many there are at a ground of this size.
    pub fn count(self, size: usize) -> usize {
        match self {
            Dimension::Log => size * 4,
            // Each claim lets a thousand of them take their place; also the smaller ground has some left for the last one.
            Dimension::Due | Dimension::DuePairs => size * 7,
            Dimension::Holes => size / 2,
            Dimension::Subscriptions => size / 50,
            // Each subscription has fewer than LANES_MAX.
            Dimension::Lanes => size / 8,
            // Below FORMER_FILTERS_MAX.
            Dimension::FormerFilters | Dimension::Leaves => size / 100,
            Dimension::DeadKeys => size * 20,
            _ => size,
        }
    }
}

/// What is carried out: what a relay does all the time, then what people do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after what is called")]
pub enum Operation {
    Observe,
    Poll,
    Fetch,
    Load,
    LoadStream,
    Settle,
    SettleRows,
    SettleQueued,
    ClaimFirst,
    Claim,
    Tell,
    FinishDone,
    FinishFailed,
    Transact,
    RecoverNothing,
    Sweep,
    TakeBack,
    Start,
    StartChanged,
    PruneDry,
    Prune,
    PruneDead,
    Status,
    ListEvents,
    ListCorrelated,
    ListAll,
    ListDead,
    ListDeadOfTopic,
    ListDeadOfKey,
    ListDelayed,
    ListPending,
    ListRetrying,
    ListBlocked,
    ListProcessing,
    Show,
    Books,
    RequeueOne,
    RequeueKey,
    RequeueAll,
    Skip,
    Pause,
    Resume,
    Rewind,
    RewindTime,
    RewindKey,
    Delete,
    Rename,
    Relane,
    RecoverAll,
    Doctor,
    Publish,
    PruneEvents,
    PruneHeld,
    StartAtTime,
    Reset,
}

impl Operation {
    /// All of them, in the order in which they are carried out.
    pub const ALL: [Operation; 55] = [
        Operation::Observe,
        Operation::Poll,
        Operation::Fetch,
        Operation::Load,
        Operation::LoadStream,
        Operation::Settle,
        Operation::SettleRows,
        Operation::SettleQueued,
        Operation::ClaimFirst,
        Operation::Claim,
        Operation::Tell,
        Operation::FinishDone,
        Operation::FinishFailed,
        Operation::Transact,
        Operation::RecoverNothing,
        Operation::Sweep,
        Operation::TakeBack,
        Operation::Start,
        // Like PruneDead before all that is taken back. From here on nobody owns the lanes.
        Operation::StartChanged,
        Operation::PruneDry,
        Operation::Prune,
        // Before all that is taken back, which leaves rows behind until the server has cleaned up.
        Operation::PruneDead,
        Operation::Status,
        Operation::ListEvents,
        Operation::ListCorrelated,
        Operation::ListAll,
        Operation::ListDead,
        Operation::ListDeadOfTopic,
        Operation::ListDeadOfKey,
        Operation::ListDelayed,
        Operation::ListPending,
        Operation::ListRetrying,
        Operation::ListBlocked,
        Operation::ListProcessing,
        Operation::Show,
        Operation::Books,
        Operation::RequeueOne,
        Operation::RequeueKey,
        Operation::RequeueAll,
        Operation::Skip,
        Operation::Pause,
        Operation::Resume,
        Operation::Rewind,
        Operation::RewindTime,
        Operation::RewindKey,
        Operation::Delete,
        Operation::Rename,
        Operation::Relane,
        Operation::RecoverAll,
        Operation::Doctor,
        Operation::Publish,
        Operation::PruneEvents,
        Operation::PruneHeld,
        Operation::StartAtTime,
        Operation::Reset,
    ];

    /// Whether only the first time is of interest. Otherwise that prepares statements and fills caches, and the second time counts.
    fn is_once(self) -> bool {
        matches!(self, Operation::ClaimFirst | Operation::RecoverAll | Operation::Reset)
    }

    /// How often it is counted; the least is what it takes. A claim does more when the last one was a while ago, and the first one does all
    /// of that.
    fn tries(self) -> usize {
        if self == Operation::Claim { 3 } else { 1 }
    }
}

/// How the work of an operation may grow with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// Not at all.
    Constant,
    /// A look at each.
    Counted,
    /// A look at each, until a limit is reached.
    CountedToLimit,
    /// Each is read, with what belongs to it.
    Read,
    /// Each is changed.
    Written,
}

impl Growth {
    /// Steps and statements that so many more things may take.
    fn allowance(self, more: u64) -> u64 {
        match self {
            Growth::Constant => 0,
            Growth::Counted => more * 2,
            Growth::CountedToLimit => (more * 2).min(WAITING_STEPS_MAX),
            Growth::Read => more * 25,
            Growth::Written => more * 100,
        }
    }
}

/// The promise. Whatever is not named here is [`Growth::Constant`].
pub fn allowed(operation: Operation, dimension: Dimension) -> Growth {
    use Dimension::{
        AboveHole, Backlog, Claims, Dead, DeadHeads, DeadRanges, Delayed, Due, DuePairs, Holes, Lanes, Leaves, Log,
        Pairs, Records, Subscriptions, Waiting, Working,
    };
    use Operation::{
        Books, Claim, ClaimFirst, Delete, Doctor, Fetch, FinishDone, FinishFailed, ListBlocked, ListCorrelated,
        ListDelayed, ListPending, ListProcessing, ListRetrying, Load, LoadStream, Poll, Prune, PruneDead, PruneDry,
        PruneEvents, PruneHeld, Publish, RecoverAll, RecoverNothing, Relane, RequeueAll, Reset, Rewind, RewindKey,
        RewindTime, Settle, SettleQueued, SettleRows, Show, Start, StartAtTime, Status, Sweep, TakeBack, Tell,
    };
    match (operation, dimension) {
        // It empties everything. For tests.
        (Reset, _) => Growth::Written,
        // What a relay does all the time is about its own subscriptions.
        (
            Poll | Fetch | Load | LoadStream | Settle | SettleRows | SettleQueued | Publish,
            Subscriptions | Lanes | Leaves,
        ) => Growth::Constant,
        // Its first run in a session is planned, which reads the catalogue for each table.
        (ClaimFirst, Leaves) => Growth::Written,
        (
            ClaimFirst | Claim | Tell | FinishDone | FinishFailed | Operation::Transact,
            Subscriptions | Lanes | Leaves,
        ) => Growth::Constant,
        (RecoverNothing | Sweep, Subscriptions | Lanes | Leaves) => Growth::Constant,
        // The fleet is looked at as a whole; so is the world of every command, and what it says is said for each subscription.
        (_, Subscriptions) => Growth::Read,
        // What it returns: of a stream its rows that are not dead, of a queue the keys that have rows, at most QUEUED_KEYS_MAX.
        (Load | Start, Delayed | Dead | DeadHeads | DuePairs | Pairs | Claims) => Growth::Read,
        // Not its dead rows: they are kept for ever, and nobody sends them. But those that hold a key back, at most DEAD_HEADS_MAX.
        (LoadStream, Delayed | DeadHeads) => Growth::Read,
        // Each hole is looked through for what is dead in it.
        (Load | LoadStream | Start, Holes) => Growth::Counted,
        // What a filter has judged is kept: all that its lanes have settled.
        (Operation::StartChanged, Holes) => Growth::Counted,
        // The cursor is written whole.
        (Settle | SettleRows | SettleQueued, Holes) => Growth::Counted,
        // What waits is counted, at most WAITING_COUNTED rows each time.
        (ClaimFirst | Claim, Due | DuePairs | Pairs | DeadHeads) => Growth::CountedToLimit,
        // Rows are read for KEYS_TOLD_MAX keys or a few more, and what is in line is counted: at most 10,000 a second.
        (Tell, Dead | DeadHeads | Delayed | Due | DuePairs | Waiting | Pairs | Claims | Working) => Growth::Counted,
        // All claims are looked through; a relay has at most as many as it can work on.
        (RecoverNothing | Sweep | Relane, Claims | Working) | (TakeBack, Claims) => Growth::Read,
        // What it takes back, and what an instance gives back when it ends.
        (TakeBack | Start | StartAtTime, Working) => Growth::Written,
        // What it takes from ended instances.
        (RecoverAll, Claims) => Growth::Written,
        // Rows in line are counted one by one, each with its state, and the oldest is looked for.
        (Status, Waiting | Pairs | DeadHeads | Claims | Working) => Growth::Read,
        // Events that were not read are counted, at most PENDING_COUNT_MAX of them; so are delayed rows that are due, copies of events, and the
        // newest of what was given up.
        (Status, Backlog | Holes | Due | DuePairs | Dead | Records) => Growth::Counted,
        // The log has no index for it.
        (ListCorrelated, Log) => Growth::Counted,
        // What is in line is put into log order; the state of each is derived.
        (
            ListPending | ListRetrying | ListBlocked | ListProcessing,
            Waiting | Due | DuePairs | Pairs | DeadHeads | Claims | Working,
        ) => Growth::Read,
        // Events that were not read, and rows that are due, are looked through for what is delayed.
        (ListDelayed, Backlog | Holes | Due | DuePairs) => Growth::Counted,
        // Records are looked through for what they say about an event.
        (Show | Books, Records) => Growth::Read,
        (Rewind | RewindTime | RewindKey, Records) => Growth::Counted,
        // Every row and every range is compared.
        (
            Books,
            Dead | DeadHeads | AboveHole | Delayed | Due | DuePairs | Waiting | Pairs | Claims | Working | DeadRanges,
        ) => Growth::Counted,
        // What they change.
        (RequeueAll, Dead | DeadHeads) => Growth::Written,
        (Delete | Relane, Dead | Delayed | Records) => Growth::Written,
        // It checks that every delivery has its event, and every closed gap.
        (
            Doctor,
            Dead | DeadHeads | AboveHole | Delayed | Due | DuePairs | Waiting | Pairs | Claims | Working | DeadRanges,
        ) => Growth::Read,
        // Retention looks for events in closed gaps, at most 10,000 of these, and for records of events that are gone: both go with the log.
        (Prune | PruneDead | PruneEvents | PruneHeld, DeadRanges | Records) => Growth::Counted,
        // Each lane of each subscription is asked for its rows and its records.
        (Books, Lanes) => Growth::Written,
        (_, Lanes) => Growth::Read,
        // Each table is looked at that may be old enough.
        (PruneDry | Prune | PruneDead | PruneEvents | PruneHeld, Leaves) => Growth::Read,
        // It looks whether the next copies of events are still needed, at most 500.
        (Prune | PruneDead | PruneEvents | PruneHeld, Dead) => Growth::CountedToLimit,
        _ => Growth::Constant,
    }
}

/// What an operation did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Round trips, or what comes nearest.
    pub statements: u64,
    /// What was looked at: pages of tables and indexes, or steps of the virtual machine, in units of which `SLACK` are nothing.
    pub steps: u64,
}

/// Says in which way an operation grew more than it may.
pub fn judge(operation: Operation, dimension: Dimension, small: Work, large: Work) -> Option<String> {
    let growth = allowed(operation, dimension);
    let more = growth.allowance((dimension.count(SMALL * FACTOR) - dimension.count(SMALL)) as u64);
    let (steps, statements) = (small.steps * 3 / 2 + SLACK + more, small.statements + STATEMENTS_SLACK + more);
    (large.steps > steps || large.statements > statements).then(|| {
        format!(
            "{operation:?} must be {growth:?} in {dimension:?}: {small:?} became {large:?} (at most {steps} steps, {statements} statements)"
        )
    })
}

/// A log to carry operations out on.
#[expect(async_fn_in_trait, reason = "used by tests alone")]
pub trait Ground {
    /// The store. Nobody has joined.
    type Store: Store + Operator;

    /// Handles events in transactions; for each event its inbox accepts it, and another one is published.
    type Transact: Transact;

    /// See [`Ground::Store`].
    fn store(&self) -> &Self::Store;

    /// Another store of the same log, whose work counts too.
    async fn another_store(&self) -> Self::Store;

    /// See [`Ground::Transact`].
    fn transact(&self) -> &Self::Transact;

    /// Forgets what was counted.
    async fn begin(&self);

    /// What was done since.
    async fn work(&self) -> Work;
}

/// As it is stored: so many filters, under each of which something was passed.
pub fn former_filters(count: usize) -> String {
    let filter = |number: usize| {
        let passed = RangeSet::from_iter([1..=(OLD + number) as Position]).to_string();
        let filter = Filter { topics: vec![format!("t{number}"), "t".into()], types: Vec::new() };
        serde_json::json!({ "definition": number, "filter": filter, "until": 0, "passed": [passed] })
    };
    serde_json::Value::from_iter((1..=count).map(filter)).to_string()
}

/// Makes the subscriptions of a ground. Nobody runs them afterwards.
pub async fn create(store: &impl Store, dimension: Dimension) {
    store.join(hello(&[QUEUE, STREAM, IDLE, HELD], dimension)).await.expect("the log is empty");
    store.leave().await.expect("it has joined");
}

fn hello(names: &[&str], dimension: Dimension) -> Hello {
    let subscription = |name: &&str| {
        let mode = if *name == QUEUE { Mode::Queue } else { Mode::Stream };
        let hold = (*name == HELD).then_some(HOLD);
        let (on_dead, retry) = (dimension.on_dead(), RetryPolicy::handler());
        Subscription { mode, lanes: 1, on_dead, retry, hold, ..Subscription::new(*name) }
    };
    Hello { subscriptions: names.iter().map(subscription).collect(), ..Hello::default() }
}

/// What a relay does all the time, and what it begins with, where there is more than any limit counts: nothing grows any more.
pub async fn measure_beyond<G: Ground>(ground: &G, size: usize) -> Vec<(Operation, Work)> {
    let operations = [
        Operation::Observe,
        Operation::Poll,
        Operation::Load,
        Operation::LoadStream,
        Operation::Settle,
        Operation::SettleRows,
        Operation::SettleQueued,
        Operation::ClaimFirst,
        Operation::Claim,
        Operation::Tell,
        Operation::FinishDone,
        Operation::Start,
    ];
    measure_each(ground, Dimension::DeadKeys, size, &operations).await
}

/// Carries everything out, one operation after the other, and says what each did.
pub async fn measure<G: Ground>(ground: &G, dimension: Dimension, size: usize) -> Vec<(Operation, Work)> {
    measure_each(ground, dimension, size, &Operation::ALL).await
}

async fn measure_each<G: Ground>(
    ground: &G,
    dimension: Dimension,
    size: usize,
    operations: &[Operation],
) -> Vec<(Operation, Work)> {
    let mut walk = Walk::new(ground, dimension).await;
    if dimension == Dimension::Working {
        walk.begin_work(dimension.count(size)).await;
    }
    let mut all = Vec::new();
    for &operation in operations {
        if !operation.is_once() {
            walk.prepare(operation).await;
            // All operations together do not fit on the stack of a test.
            Box::pin(walk.carry_out(operation)).await;
        }
        let mut least = Work { statements: u64::MAX, steps: u64::MAX };
        for _ in 0..operation.tries() {
            walk.prepare(operation).await;
            ground.begin().await;
            Box::pin(walk.carry_out(operation)).await;
            let work = ground.work().await;
            least = if work.steps < least.steps { work } else { least };
        }
        all.push((operation, least));
    }
    all
}

#[cfg(test)]
mod tests {
    use pillarbox::store::{DEAD_HEADS_MAX, QUEUED_KEYS_MAX};

    use super::*;

    fn at(steps: u64) -> Work {
        Work { statements: 1, steps }
    }

    #[test]
    fn a_claim_may_count_to_the_limit_and_not_look_at_everything_that_is_due() {
        for operation in [Operation::ClaimFirst, Operation::Claim] {
            let most = 150 + SLACK + WAITING_STEPS_MAX;
            assert_eq!(judge(operation, Dimension::Due, at(100), at(most)), None);
            assert!(judge(operation, Dimension::Due, at(100), at(most + 1)).is_some());
            let all = Dimension::Due.count(SMALL * FACTOR) as u64;
            assert!(all > most, "the ground has more that is due than a claim may count: {all}");
        }
    }

    #[test]
    fn beyond_the_limits_nothing_may_grow() {
        let few = Dimension::DeadKeys.count(SMALL);
        assert!(few > QUEUED_KEYS_MAX.max(DEAD_HEADS_MAX).max(WAITING_COUNTED), "{few} are beyond all limits");
        let all = Dimension::DeadKeys.count(BEYOND) as u64;
        for operation in Operation::ALL.into_iter().filter(|operation| *operation != Operation::Reset) {
            assert!(judge(operation, Dimension::DeadKeys, at(100), at(100 + all)).is_some(), "{operation:?}");
        }
    }

    #[test]
    fn a_load_of_a_stream_may_not_look_at_its_dead_rows() {
        let all = Dimension::Dead.count(SMALL * FACTOR) as u64;
        assert!(judge(Operation::LoadStream, Dimension::Dead, at(100), at(100 + all)).is_some());
    }
}
