//! What operations cost as a log grows: counts, never times.
//!
//! A [`Ground`] is a log with a little of everything. Each operation is carried out there, and again where there is [`FACTOR`] times as
//! much of one thing. [`allowed`] is the promise: what an operation does not return costs it nothing.

use pillarbox::{
    Change, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Cursor, Epoch, LaneRef, LaneWrite, ListQuery,
    Operator, PausedBy, PollRequest, Position, PrunePolicy, RecoverRequest, Report, ScanRequest, Selection, Settlement,
    Start, State, Store, SubscriptionId,
};
use uuid::Uuid;

/// How many times as much there is at the larger ground.
pub const FACTOR: usize = 8;

/// How much there is at the smaller ground.
pub const SMALL: usize = 1_000;

/// Events of every ground.
pub const EVENTS: usize = 8_000;

/// A few more steps are always allowed: an index is a level deeper, a page is split.
const SLACK: u64 = 150;

/// A store may look at its fleet or listen meanwhile.
const STATEMENTS_SLACK: u64 = 6;

/// The names of a ground's subscriptions, of one lane each.
pub const QUEUE: &str = "queue";
/// See [`QUEUE`].
pub const STREAM: &str = "stream";

/// What a ground has more of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dimension {
    /// Events that everybody has passed.
    Log,
    /// Dead deliveries, one a key, of both subscriptions.
    Dead,
    /// Deliveries that are not due, one a key, of both subscriptions.
    Delayed,
    /// Deliveries of one key of the queue that were delayed and are due.
    Due,
    /// Deliveries of one key of the queue that wait for their turn.
    Waiting,
    /// Gaps of the log that were proven dead.
    DeadRanges,
    /// Events that the stream, which is paused, has not read.
    Backlog,
    /// Dead deliveries of the stream, all settled above a hole that is open.
    AboveHole,
    /// Subscriptions that nobody runs, a fiftieth of the number.
    Subscriptions,
}

impl Dimension {
    /// All of them.
    pub const ALL: [Dimension; 9] = [
        Dimension::Log,
        Dimension::Dead,
        Dimension::Delayed,
        Dimension::Due,
        Dimension::Waiting,
        Dimension::DeadRanges,
        Dimension::Backlog,
        Dimension::AboveHole,
        Dimension::Subscriptions,
    ];
}

/// What is carried out: what a relay does all the time, then what people do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after what is called")]
pub enum Operation {
    Observe,
    Poll,
    Load,
    Settle,
    Claim,
    Tell,
    Finish,
    Recover,
    Sweep,
    Status,
    ListEvents,
    ListDead,
    ListDelayed,
    ListRetrying,
    ListOfKey,
    Show,
    Books,
    RequeueOne,
    RequeueKey,
    RequeueAll,
    Skip,
    Pause,
    Rewind,
    Prune,
    Doctor,
}

impl Operation {
    /// All of them, in the order in which they are carried out.
    pub const ALL: [Operation; 25] = [
        Operation::Observe,
        Operation::Poll,
        Operation::Load,
        Operation::Settle,
        Operation::Claim,
        Operation::Tell,
        Operation::Finish,
        Operation::Recover,
        Operation::Sweep,
        Operation::Status,
        Operation::ListEvents,
        Operation::ListDead,
        Operation::ListDelayed,
        Operation::ListRetrying,
        Operation::ListOfKey,
        Operation::Show,
        Operation::Books,
        Operation::RequeueOne,
        Operation::RequeueKey,
        Operation::RequeueAll,
        Operation::Skip,
        Operation::Pause,
        Operation::Rewind,
        Operation::Prune,
        Operation::Doctor,
    ];
}

/// How the work of an operation may grow with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// Not at all.
    Constant,
    /// As that grows, and no faster.
    Linear,
}

/// The promise. Whatever is not named here is [`Growth::Constant`].
pub fn allowed(operation: Operation, dimension: Dimension) -> Growth {
    use Dimension::{AboveHole, Backlog, Dead, DeadRanges, Delayed, Due, Log, Subscriptions, Waiting};
    use Operation::{
        Books, Claim, Doctor, Finish, ListDelayed, ListRetrying, Load, Poll, Prune, Recover, RequeueAll, Rewind,
        Status, Sweep, Tell,
    };
    match (operation, dimension) {
        // The fleet is looked at as a whole; so is the world of every command, and what it says is said for each subscription.
        (_, Subscriptions) if !matches!(operation, Poll | Load | Claim | Tell | Finish | Recover | Sweep) => {
            Growth::Linear
        }
        // What waits is counted and the oldest is looked for: of rows in line all, of the log at most PENDING_COUNT_MAX events.
        (Status, Waiting | Due | Backlog) => Growth::Linear,
        // Rows are counted, at most 10,000 a second.
        (Tell, Dead | AboveHole | Delayed | Due | Waiting) => Growth::Linear,
        // What is in line is put into log order; the state of each is derived.
        (ListRetrying, Waiting) => Growth::Linear,
        // Events of the log that were not read are looked through for what is delayed.
        (ListDelayed, Backlog | Due) => Growth::Linear,
        // Every row and every range is compared.
        (Books, Dead | AboveHole | Delayed | Due | Waiting | DeadRanges) => Growth::Linear,
        // What it returns: of a stream its rows, of a queue the keys that have rows, at most QUEUED_KEYS_MAX.
        (Load, Delayed | Dead) => Growth::Linear,
        // What it returns.
        (RequeueAll, Dead) => Growth::Linear,
        // What it removes: the deliveries above the place.
        (Rewind, Dead | AboveHole | Delayed | Due | Waiting) => Growth::Linear,
        // It checks that every delivery has its event, and every closed gap.
        (Doctor, Dead | AboveHole | Delayed | Due | Waiting | DeadRanges | Log) => Growth::Linear,
        // Retention looks through what it may remove, in slices and leaf by leaf, away from the delivery path.
        (Prune, _) => Growth::Linear,
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
    let (steps, statements) = match growth {
        // Another plan may look at twice as much.
        Growth::Constant => (small.steps * 5 / 2 + SLACK, small.statements + STATEMENTS_SLACK),
        Growth::Linear => {
            let factor = FACTOR as u64 * 3 / 2;
            ((small.steps + SLACK) * factor, (small.statements + STATEMENTS_SLACK) * factor)
        }
    };
    (large.steps > steps || large.statements > statements).then(|| {
        format!("{operation:?} must be {growth:?} in {dimension:?}: {small:?} became {large:?} (at most {steps} steps)")
    })
}

/// A log to carry operations out on.
#[expect(async_fn_in_trait, reason = "used by tests alone")]
pub trait Ground {
    /// The store, which has joined with [`QUEUE`] and [`STREAM`] and owns both lanes.
    type Store: Store + Operator;

    /// See [`Ground::Store`].
    fn store(&self) -> &Self::Store;

    /// Of [`QUEUE`] and [`STREAM`].
    fn lanes(&self) -> [(LaneRef, Epoch); 2];

    /// Forgets what was counted.
    async fn begin(&self);

    /// What was done since.
    async fn work(&self) -> Work;
}

/// Carries everything out, one operation after the other, and says what each did.
pub async fn measure<G: Ground>(ground: &G) -> Vec<(Operation, Work)> {
    let mut walk = Walk::new(ground).await;
    let mut all = Vec::new();
    for operation in Operation::ALL {
        // The first time prepares statements and fills caches.
        walk.carry_out(operation).await;
        ground.begin().await;
        walk.carry_out(operation).await;
        all.push((operation, ground.work().await));
    }
    all
}

/// One pass over a ground.
struct Walk<'a, G: Ground> {
    ground: &'a G,
    claimed: Vec<Claimed>,
    next_claim: i64,
    horizon: Position,
    dead: Uuid,
}

impl<'a, G: Ground> Walk<'a, G> {
    async fn new(ground: &'a G) -> Self {
        let subscription = Some(QUEUE.into());
        let query = ListQuery { subscription, state: Some(State::Dead), limit: 1, ..ListQuery::default() };
        let dead = ground.store().list(&query).await.expect("it lists")[0].id;
        let horizon = ground.store().status().await.expect("it tells").log.horizon;
        Walk { ground, claimed: Vec::new(), next_claim: 1, horizon, dead }
    }

    async fn carry_out(&mut self, operation: Operation) {
        let done = match operation {
            Operation::Observe => self.ground.store().observe(&Report::default()).await.map(drop),
            Operation::Poll => self.poll().await,
            Operation::Load => self.load().await,
            Operation::Settle => self.settle().await,
            Operation::Claim => self.claim(10, None).await,
            Operation::Tell => self.claim(0, Some("".into())).await,
            Operation::Finish => self.finish().await,
            Operation::Recover => self.recover(false).await,
            Operation::Sweep => self.recover(true).await,
            Operation::Status => self.ground.store().status().await.map(drop),
            Operation::ListEvents => self.list(ListQuery::default()).await,
            Operation::ListDead => self.list_state(State::Dead).await,
            Operation::ListDelayed => self.list_state(State::Delayed).await,
            Operation::ListRetrying => self.list_state(State::Retrying).await,
            Operation::ListOfKey => {
                let (state, key) = (Some(State::Dead), Some("seed".into()));
                self.list(ListQuery { subscription: Some(QUEUE.into()), state, key, ..ListQuery::default() }).await
            }
            Operation::Show => self.ground.store().show(self.dead).await.map(drop),
            Operation::Books => self.ground.store().books().await.map(drop),
            Operation::RequeueOne => self.requeue(Selection::Event(self.dead)).await,
            Operation::RequeueKey => self.requeue(Selection::Key("seed".into())).await,
            Operation::RequeueAll => self.requeue(Selection::All).await,
            Operation::Skip => {
                let (subscription, event, reason) = (QUEUE.into(), self.dead, "r".into());
                self.change(Change::Skip { subscription, event, reason }).await
            }
            Operation::Pause => {
                let (subscription, by) = (QUEUE.into(), PausedBy::Operator);
                self.change(Change::Pause { subscription, by, reason: None }).await
            }
            Operation::Rewind => {
                let to = Start::Position(self.horizon - 10);
                self.change(Change::Rewind { subscription: STREAM.into(), to, key: None }).await
            }
            Operation::Prune => self.ground.store().prune(&PrunePolicy::default()).await.map(drop),
            Operation::Doctor => self.ground.store().doctor().await.map(drop),
        };
        done.unwrap_or_else(|error| panic!("{operation:?}: {error}"));
    }

    async fn poll(&self) -> pillarbox::Result<()> {
        let scans = vec![ScanRequest { after: self.horizon - 10, to: Position::MAX, limit: 100 }];
        let request = PollRequest { scans, wanted: vec![Default::default()], ..PollRequest::default() };
        self.ground.store().poll(&request).await.map(drop)
    }

    async fn load(&self) -> pillarbox::Result<()> {
        let loaded = self.ground.store().load(&self.ground.lanes()).await?;
        assert!(loaded.iter().all(Option::is_some), "the ground owns its lanes");
        Ok(())
    }

    async fn settle(&self) -> pillarbox::Result<()> {
        let (lane, epoch) = self.ground.lanes()[1];
        let cursor = Cursor { floor: self.horizon, ..Cursor::default() };
        let write = LaneWrite {
            lane,
            epoch,
            revision: 0,
            cursor,
            queue: Vec::new(),
            put: Vec::new(),
            change: Vec::new(),
            finish: Vec::new(),
            calm: false,
            release: false,
        };
        self.ground.store().settle(&Settlement { lanes: vec![write], ..Settlement::default() }).await.map(drop)
    }

    fn queue(&self) -> SubscriptionId {
        self.ground.lanes()[0].0.subscription
    }

    async fn claim(&mut self, limit: usize, tell: Option<Box<str>>) -> pillarbox::Result<()> {
        let first = ClaimId(self.next_claim);
        self.next_claim += limit as i64;
        let request = ClaimRequest { subscription: self.queue(), limit, first, suspect: true, tell, again: false };
        let claims = self.ground.store().claim(&[request]).await?.remove(0);
        assert_eq!(claims.claimed.len(), limit, "the ground has enough to be claimed");
        self.claimed.extend(claims.claimed);
        Ok(())
    }

    async fn finish(&mut self) -> pillarbox::Result<()> {
        let subscription = self.queue();
        let end = |claimed: Claimed| {
            let (position, claim) = (claimed.delivery.position, claimed.claim);
            ClaimEnd { subscription, position, claim, fate: ClaimFate::Done }
        };
        let ends: Vec<ClaimEnd> = self.claimed.drain(..10).map(end).collect();
        self.ground.store().finish(&ends).await.map(drop)
    }

    async fn recover(&self, sweep: bool) -> pillarbox::Result<()> {
        let dead = vec![(pillarbox::InstanceId(i64::from(i32::MAX)), pillarbox::RecoveryCause::Crash, None)];
        let dead = if sweep { Vec::new() } else { dead };
        self.ground.store().recover(&RecoverRequest { dead, sweep }).await.map(drop)
    }

    async fn list_state(&self, state: State) -> pillarbox::Result<()> {
        self.list(ListQuery { state: Some(state), ..ListQuery::default() }).await
    }

    async fn list(&self, query: ListQuery) -> pillarbox::Result<()> {
        self.ground.store().list(&ListQuery { limit: 50, ..query }).await.map(drop)
    }

    async fn requeue(&self, which: Selection) -> pillarbox::Result<()> {
        self.change(Change::Requeue { subscription: QUEUE.into(), which, limit: usize::MAX }).await
    }

    async fn change(&self, change: Change) -> pillarbox::Result<()> {
        self.ground.store().change(&change, true).await.map(drop)
    }
}
