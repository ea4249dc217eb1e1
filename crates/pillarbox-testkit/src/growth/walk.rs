use std::time::{Duration, Instant};

use pillarbox::admin::{Change, ListQuery, Operator, PausedBy, PrunePolicy, Selection, State};
use pillarbox::sink::Outcome;
use pillarbox::store::{
    AttemptError, ClaimEnd, ClaimFate, ClaimId, ClaimPlace, ClaimRequest, Claimed, ClaimedDelivery, Cursor,
    DeliveryRow, Epoch, Failed, InstanceId, LaneRef, LaneState, LaneWrite, PollRequest, Queued, RecoverRequest,
    RecoveryCause, Report, ScanRequest, Settlement, Store, Take, TakeCause, Transact,
};
use pillarbox::{Delivery, NewEvent, Position, Result, Start, Subscription, Timestamp};
use uuid::Uuid;

use super::{
    Dimension, EVENTS, Ground, HELD, IDLE, OLD_AGE, Operation, PASSED_AGE, PRUNED_AT_ONCE, QUEUE, STREAM, TAIL, hello,
};

/// Rows that are finished or settled at once.
const AT_ONCE: usize = 10;

/// Rows that are claimed at once: some are left when others are finished.
const CLAIMED_AT_ONCE: usize = 20;

/// The same before anything is measured.
const WORK_CLAIMED_AT_ONCE: usize = 500;

/// After so long without a claim, the next one does all that the first one does.
const CLAIM_REST: Duration = Duration::from_millis(1_100);

/// The instance that the claims of a ground belong to, if it has some; it has a row and beats in the future.
pub const OTHER_INSTANCE: InstanceId = InstanceId(1_000);

/// One pass over a ground.
pub(super) struct Walk<'a, G: Ground> {
    store: &'a G::Store,
    transact: &'a G::Transact,
    dimension: Dimension,
    instance: InstanceId,
    /// Of [`QUEUE`] and [`STREAM`], with what was loaded of them.
    lanes: Vec<(LaneRef, Epoch, LaneState)>,
    claimed: Vec<Claimed>,
    next_claim: i64,
    /// Events that got a row.
    queued: Position,
    horizon: Position,
    dead: Uuid,
    /// Subscriptions that were made.
    made: usize,
    /// When the work had begun that is there before anything is measured.
    begun_at: Option<Instant>,
}

impl<'a, G: Ground> Walk<'a, G> {
    pub(super) async fn new(ground: &'a G, dimension: Dimension) -> Self {
        let store = ground.store();
        let mut walk = Walk {
            store,
            transact: ground.transact(),
            dimension,
            instance: InstanceId(0),
            lanes: Vec::new(),
            claimed: Vec::new(),
            next_claim: 1,
            queued: 0,
            horizon: 0,
            dead: Uuid::default(),
            made: 0,
            begun_at: None,
        };
        walk.join().await.expect("nobody owns the lanes");
        let subscription = Some(QUEUE.into());
        let key = Some("seed".into());
        let query = ListQuery { subscription, key, state: Some(State::Dead), limit: 1, ..ListQuery::default() };
        walk.dead = store.list(&query).await.expect("it lists")[0].id;
        walk.horizon = store.status().await.expect("it tells").log.horizon;
        walk
    }

    /// What has to be there for an operation, and is not counted.
    pub(super) async fn prepare(&self, operation: Operation) {
        match (operation, self.begun_at) {
            // On a fast machine it would do less than on a slow one.
            (Operation::ClaimFirst, Some(begun_at)) => {
                tokio::time::sleep(CLAIM_REST.saturating_sub(begun_at.elapsed())).await;
            }
            (Operation::PruneHeld, _) => {
                let change = Change::Rewind { subscription: HELD.into(), to: Start::Beginning, key: None };
                self.store.change(&change, false).await.expect("it goes back");
            }
            _ => {}
        }
    }

    pub(super) async fn carry_out(&mut self, operation: Operation) {
        let done = match operation {
            Operation::Observe
            | Operation::Poll
            | Operation::Fetch
            | Operation::Load
            | Operation::LoadStream
            | Operation::Settle
            | Operation::SettleRows
            | Operation::SettleQueued
            | Operation::ClaimFirst
            | Operation::Claim
            | Operation::Tell
            | Operation::FinishDone
            | Operation::FinishFailed
            | Operation::Transact
            | Operation::RecoverNothing
            | Operation::Sweep
            | Operation::Start
            | Operation::StartAtTime
            | Operation::StartChanged
            | Operation::RecoverAll => self.relay(operation).await,
            Operation::TakeBack
            | Operation::RequeueOne
            | Operation::RequeueKey
            | Operation::RequeueAll
            | Operation::Skip
            | Operation::Pause
            | Operation::Resume
            | Operation::Rewind
            | Operation::RewindTime
            | Operation::RewindKey
            | Operation::Delete
            | Operation::Rename
            | Operation::Relane => self.change(operation).await,
            Operation::Status => self.store.status().await.map(drop),
            Operation::Show => self.store.show(self.dead).await.map(drop),
            Operation::Books => self.store.books().await.map(drop),
            Operation::PruneDry => {
                self.store.prune(&PrunePolicy { dry_run: true, ..PrunePolicy::default() }).await.map(drop)
            }
            Operation::Prune | Operation::PruneDead | Operation::PruneEvents | Operation::PruneHeld => {
                self.prune(operation).await
            }
            Operation::Doctor => self.store.doctor().await.map(drop),
            Operation::Publish => self.publish().await,
            Operation::Reset => self.store.reset().await,
            _ => self.list(operation).await,
        };
        done.unwrap_or_else(|error| panic!("{operation:?}: {error}"));
    }

    /// What a relay does.
    async fn relay(&mut self, operation: Operation) -> Result<()> {
        match operation {
            Operation::Observe => self.store.observe(&Report::default()).await.map(drop),
            Operation::Poll => self.poll().await,
            Operation::Fetch => self.fetch().await,
            Operation::Load => self.load(0).await,
            Operation::LoadStream => self.load(1).await,
            Operation::Settle => self.settle(self.write(1)).await,
            Operation::SettleRows => self.settle(self.write_rows()).await,
            Operation::SettleQueued => {
                let write = self.write_queued();
                self.settle(write).await
            }
            Operation::ClaimFirst | Operation::Claim => self.claim(CLAIMED_AT_ONCE, None).await,
            Operation::Tell => self.claim(0, Some("".into())).await,
            Operation::FinishDone => self.finish(|_| ClaimFate::Done).await,
            Operation::FinishFailed => self.finish(failed).await,
            Operation::Transact => self.transact().await,
            Operation::RecoverNothing => self.recover(Some(InstanceId(i64::from(i32::MAX))), false).await,
            Operation::Sweep => self.recover(None, true).await,
            Operation::RecoverAll => self.recover(Some(OTHER_INSTANCE), false).await,
            Operation::StartAtTime => self.start_at_time().await,
            Operation::StartChanged => self.start_changed().await,
            _ => self.start().await,
        }
    }

    /// The end of the log, and holes below it.
    async fn poll(&self) -> Result<()> {
        let hole = |number| {
            let position = self.horizon - 100 - 2 * number;
            ScanRequest { after: position - 1, to: position, limit: 1 }
        };
        let mut scans: Vec<ScanRequest> = (0..AT_ONCE as Position).rev().map(hole).collect();
        scans.push(ScanRequest { after: self.horizon - 10, to: Position::MAX, limit: 100 });
        let request = PollRequest { scans, wanted: vec![Default::default()], ..PollRequest::default() };
        self.store.poll(&request).await.map(drop)
    }

    async fn fetch(&self) -> Result<()> {
        // From one end to the other of what all have passed.
        let positions: Vec<Position> = (1..=AT_ONCE).map(|number| (number * EVENTS / AT_ONCE) as Position).collect();
        let events = self.store.fetch(&positions).await?;
        assert_eq!(events.len(), AT_ONCE, "the ground has them");
        Ok(())
    }

    /// The lanes from this one on.
    async fn load(&mut self, first: usize) -> Result<()> {
        let own = &mut self.lanes[first..];
        let lanes: Vec<(LaneRef, Epoch)> = own.iter().map(|(lane, epoch, _)| (*lane, *epoch)).collect();
        for (loaded, (.., state)) in self.store.load(&lanes).await?.into_iter().zip(own) {
            *state = loaded.expect("the lane is this instance's");
        }
        Ok(())
    }

    /// Says of a lane what it said when it was loaded.
    fn write(&self, lane: usize) -> LaneWrite {
        let (lane, epoch, LaneState { cursor, revision, .. }) = self.lanes[lane].clone();
        nothing_new(lane, epoch, revision, cursor)
    }

    /// The first of what nobody has read.
    fn unread(&self, number: Position) -> DeliveryRow {
        let (position, now) = (self.horizon - TAIL as Position + 1 + number, Timestamp::now());
        let key = Some(format!("unread {position}").into());
        DeliveryRow { position, key, arrival: position, state: State::Retrying, attempts: 1, due_at: now, since: now }
    }

    /// Deliveries of the stream that fail, and are done after all.
    fn write_rows(&self) -> LaneWrite {
        let rows: Vec<DeliveryRow> = (0..AT_ONCE as Position).map(|number| self.unread(number)).collect();
        let change = rows.iter().map(|row| (row.clone(), Some(error()))).collect();
        let finish = rows.iter().map(|row| row.position).collect();
        LaneWrite { put: rows, change, finish, ..self.write(1) }
    }

    /// Rows of the queue, the last of them behind all that their key has.
    fn write_queued(&mut self) -> LaneWrite {
        let mut queue = Vec::new();
        for number in self.queued..self.queued + AT_ONCE as Position {
            let delivery = DeliveryRow { state: State::Pending, attempts: 0, ..self.unread(number) };
            queue.push(Queued { delivery, claim: None, error: None });
        }
        self.queued += AT_ONCE as Position;
        if let Some(last) = queue.last_mut() {
            last.delivery.key = Some("one".into());
        }
        LaneWrite { queue, ..self.write(0) }
    }

    async fn settle(&self, write: LaneWrite) -> Result<()> {
        let settled = self.store.settle(&Settlement { lanes: vec![write], ..Settlement::default() }).await?;
        assert_eq!(settled, [true], "the lane is this instance's");
        Ok(())
    }

    async fn claim(&mut self, limit: usize, tell: Option<Box<str>>) -> Result<()> {
        let (subscription, first) = (self.lanes[0].0.subscription, ClaimId(self.next_claim));
        self.next_claim += limit as i64;
        let request = ClaimRequest { subscription, limit, first, suspect: true, tell, again: false };
        let claims = self.store.claim(&[request]).await?.remove(0);
        assert_eq!(claims.claimed.len(), limit, "the ground has enough to be claimed");
        self.claimed.extend(claims.claimed);
        Ok(())
    }

    /// Claims so many deliveries, and never ends them.
    pub(super) async fn begin_work(&mut self, count: usize) {
        for _ in 0..count.div_ceil(WORK_CLAIMED_AT_ONCE) {
            self.claim(WORK_CLAIMED_AT_ONCE, None).await.expect("the ground has enough to be claimed");
        }
        self.claimed.clear();
        self.begun_at = Some(Instant::now());
    }

    async fn finish(&mut self, fate: impl Fn(&Claimed) -> ClaimFate) -> Result<()> {
        let subscription = self.lanes[0].0.subscription;
        let end = |claimed: Claimed| {
            let (position, claim, fate) = (claimed.delivery.position, claimed.claim, fate(&claimed));
            ClaimEnd { subscription, position, claim, fate }
        };
        let ends: Vec<ClaimEnd> = self.claimed.drain(..AT_ONCE).map(end).collect();
        assert_eq!(self.store.finish(&ends).await?, [true; AT_ONCE], "the claims are this instance's");
        Ok(())
    }

    async fn transact(&mut self) -> Result<()> {
        let place = ClaimPlace { subscription: self.lanes[0].0.subscription, instance: self.instance };
        let delivery = |claimed: Claimed| ClaimedDelivery {
            delivery: Delivery::first(claimed.event.expect("the log has it"), QUEUE),
            claim: Some(claimed.claim),
        };
        let deliveries = self.claimed.drain(..AT_ONCE).map(delivery).collect();
        let outcomes = self.transact.transact(place, deliveries, Duration::from_secs(60)).await;
        assert_eq!(outcomes, [const { Outcome::Delivered }; AT_ONCE], "the claims are this instance's");
        Ok(())
    }

    async fn recover(&self, instance: Option<InstanceId>, sweep: bool) -> Result<()> {
        let dead = instance.into_iter().map(|dead| (dead, RecoveryCause::Crash, None)).collect();
        self.store.recover(&RecoverRequest { ended: dead, sweep, ..RecoverRequest::default() }).await.map(drop)
    }

    /// The end of an instance, and the start of the next one.
    async fn start(&mut self) -> Result<()> {
        self.store.leave().await?;
        self.claimed.clear();
        self.join().await
    }

    async fn join(&mut self) -> Result<()> {
        let joined = self.store.join(hello(&[QUEUE, STREAM], self.dimension)).await?;
        self.instance = joined.instance;
        let fleet = self.store.observe(&Report::default()).await?;
        let mut takes = Vec::new();
        for subscription in &joined.subscriptions {
            let lane = LaneRef { subscription: subscription.id, lane: 0 };
            let view = fleet.lanes.iter().find(|view| view.lane == lane).expect("it has one lane");
            takes.push(Take { lane, expected: view.epoch, cause: TakeCause::Free, beat: None });
        }
        let taken = takes.iter().zip(self.store.take(&takes).await?);
        let own = |(take, epoch): (&Take, Option<Epoch>)| {
            (take.lane, epoch.expect("nobody else takes it"), LaneState::default())
        };
        self.lanes = taken.map(own).collect();
        self.load(0).await
    }

    /// A subscription is made that begins near the end of the log. Nobody runs it.
    async fn start_at_time(&mut self) -> Result<()> {
        self.made += 1;
        let name = format!("made-{}", self.made);
        let mut hello = hello(&[], self.dimension);
        hello.subscriptions = vec![Subscription { lanes: 1, start: near_the_end(), ..Subscription::new(name) }];
        self.store.join(hello).await.map(drop)
    }

    /// The end of an instance, and the next one says another filter of the stream.
    async fn start_changed(&mut self) -> Result<()> {
        self.store.leave().await?;
        self.made += 1;
        let mut hello = hello(&[STREAM], self.dimension);
        hello.subscriptions[0].filter.topics = vec![format!("t{}", self.made), "t".into()];
        self.store.join(hello).await.map(drop)
    }

    async fn list(&self, operation: Operation) -> Result<()> {
        let state = match operation {
            Operation::ListDead | Operation::ListDeadOfTopic | Operation::ListDeadOfKey => Some(State::Dead),
            Operation::ListDelayed => Some(State::Delayed),
            Operation::ListPending => Some(State::Pending),
            Operation::ListRetrying => Some(State::Retrying),
            Operation::ListBlocked => Some(State::Blocked),
            Operation::ListProcessing => Some(State::Processing),
            _ => None,
        };
        let query = ListQuery { state, limit: 50, ..ListQuery::default() };
        let query = match operation {
            Operation::ListAll => ListQuery { subscription: Some(QUEUE.into()), ..query },
            Operation::ListCorrelated => ListQuery { correlation_id: Some("none".into()), ..query },
            Operation::ListDeadOfTopic => ListQuery { topic: Some("t*".into()), ..query },
            Operation::ListDeadOfKey => ListQuery { key: Some("seed".into()), ..query },
            _ => query,
        };
        self.store.list(&query).await.map(drop)
    }

    /// Commands are carried out whole and taken back, so that each finds the same.
    async fn change(&self, operation: Operation) -> Result<()> {
        let queue = || QUEUE.to_owned();
        let requeue = |which| Change::Requeue { subscription: queue(), which, limit: usize::MAX };
        let to = Start::Position(self.horizon - TAIL as Position - 10);
        let change = match operation {
            Operation::TakeBack => {
                let silent_for = Duration::ZERO;
                Change::Recover { subscription: Some(queue()), instance: Some(self.instance), silent_for }
            }
            Operation::RequeueOne => requeue(Selection::Event(self.dead)),
            Operation::RequeueKey => requeue(Selection::Key("seed".into())),
            Operation::RequeueAll => requeue(Selection::All),
            Operation::Skip => Change::Skip { subscription: queue(), event: self.dead, reason: "r".into() },
            Operation::Pause => Change::Pause { subscription: queue(), by: PausedBy::Operator, reason: None },
            Operation::Resume => Change::Resume(IDLE.into()),
            Operation::Rewind => Change::Rewind { subscription: STREAM.into(), to, key: None },
            Operation::RewindTime => Change::Rewind { subscription: STREAM.into(), to: near_the_end(), key: None },
            Operation::RewindKey => Change::Rewind { subscription: queue(), to, key: Some("last".into()) },
            Operation::Delete => Change::Delete(IDLE.into()),
            Operation::Rename => Change::Rename { from: IDLE.into(), to: "renamed".into() },
            _ => Change::Relane { subscription: IDLE.into(), lanes: 2 },
        };
        let changed = self.store.change(&change, true).await?;
        // A stream with a backlog has not reached the place; the rewind is carried out all the same.
        let is_rewind = matches!(operation, Operation::Rewind | Operation::RewindTime);
        assert!(is_rewind || changed.count > 0, "{operation:?} has something to change");
        Ok(())
    }

    /// Nothing is old enough to be removed, or a few dead deliveries or events are.
    async fn prune(&self, operation: Operation) -> Result<()> {
        let (none, slice) = (PrunePolicy::default(), PRUNED_AT_ONCE);
        let policy = match operation {
            Operation::Prune => none,
            Operation::PruneDead => PrunePolicy { dead: Some(Duration::ZERO), slice: AT_ONCE, ..none },
            _ => PrunePolicy { keep: Some((OLD_AGE + PASSED_AGE) / 2), slice, ..none },
        };
        let pruned = self.store.prune(&policy).await?;
        let events = slice as u64;
        let expected = match operation {
            Operation::Prune => (0, 0, 0),
            Operation::PruneDead => (AT_ONCE as u64, 0, 0),
            Operation::PruneHeld => (0, events, events),
            _ => (0, events, 0),
        };
        assert_eq!((pruned.dead, pruned.events, pruned.undelivered), expected, "{operation:?}");
        Ok(())
    }

    async fn publish(&self) -> Result<()> {
        let event = |key: &str| NewEvent::new("t", "y").key(key);
        let mut once = event("once");
        once.dedup_key = Some(Uuid::now_v7().to_string());
        self.store.publish(&[event("a"), event("b"), once]).await.map(drop)
    }
}

/// A write that changes nothing.
pub(super) fn nothing_new(lane: LaneRef, epoch: Epoch, revision: i64, cursor: Cursor) -> LaneWrite {
    LaneWrite {
        lane,
        epoch,
        revision,
        cursor,
        queue: Vec::new(),
        put: Vec::new(),
        change: Vec::new(),
        finish: Vec::new(),
        calm: false,
        release: false,
    }
}

/// The first events that are young are the last of the log.
fn near_the_end() -> Start {
    let age = PASSED_AGE / 2;
    Start::Time(Timestamp(Timestamp::now().0 - age.as_millis() as i64))
}

fn error() -> AttemptError {
    AttemptError { at: Timestamp::now(), attempt: 1, kind: "k".into(), message: "m".into() }
}

/// Every second one is dead, the others are tried again later.
fn failed(claimed: &Claimed) -> ClaimFate {
    let state = if claimed.claim.0 % 2 == 0 { State::Dead } else { State::Retrying };
    let due_at = Timestamp::now().plus(Duration::from_secs(3_600));
    ClaimFate::Failed(Failed { state, attempts: 1, due_at, error: error() })
}
