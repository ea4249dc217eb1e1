mod delivering;
mod fleet;
mod queue;
mod reading;
mod settling;
mod slot;
mod subscriber;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use self::fleet::beat_interval;
use self::queue::{Asked, Queue};
use self::slot::Slot;
use self::subscriber::Subscriber;
use crate::database_clock::DatabaseClock;
use crate::dispatcher::BatchId;
use crate::grace::Grace;
use crate::ownership::Ownership;
use crate::work::looked_at;
#[doc(hidden)]
pub use crate::work::work;
use crate::{
    Attempt, BreakerReport, ClaimEnd, ClaimRequest, Claims, Definition, Epoch, Event, Fleet, InstanceId, Joined,
    KeyHash, LaneRef, LaneState, LaneWrite, Outcome, Page, PollRequest, Position, RangeSet, RecoverRequest, Recovered,
    RecoveryCause, Report, Settlement, SinkFeatures, StoreFeatures, Subscription, SubscriptionId, Take, Timestamp,
};

pub use crate::attempt_log::{DeliveredAttempt, FailedAttempt, NextTry};

/// The two clocks of a step: `mono` never jumps and measures waits; `wall` is the database's time of day, which due times are kept in.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Since the engine started.
    pub mono: Duration,
    /// The time of day by the database's clock.
    pub wall: Timestamp,
}

/// The limits and intervals of an engine. Each is documented with its default.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// How long an owner may be silent before its lanes are taken, where no lock proves its life; it stops by itself a fifth of
    /// that time earlier. Default: 10 s.
    pub lease_ttl: Duration,
    /// How often this instance beats and looks at the fleet. Default: 1 s, at most a third of the lease and of the
    /// `processing_timeout` of a queue.
    pub beat_interval: Duration,
    /// The watchdog: a poll happens at least this often, whatever the doorbell does. Default: 5 s.
    pub poll_interval: Duration,
    /// Gathers wake-ups for this long before a poll. Default: 0.
    pub debounce: Duration,
    /// How many positions one scan looks at. Default: 2,000.
    pub page_size: usize,
    /// Events of one subscription that are read and not yet settled in the database, at most; what a crash can deliver twice. Default: 10,000.
    pub in_flight_max: usize,
    /// The same in bytes held in memory. Default: 32 MiB.
    pub in_flight_bytes_max: usize,
    /// Holes asked for in one poll; beyond it neighbours are asked for as one. Default: 1,000, as many as a cursor may have.
    pub hole_scans_max: usize,
    /// Ranges of one cursor; with more holes than this a lane goes no higher until some close. Default: 1,000.
    pub ranges_max: usize,
    /// Failing keys of one subscription; at the limit it stops and says so. Default: 10,000.
    pub parked_max: usize,
    /// Deliveries of one subscription that wait behind failing keys; at the limit it stops and says so. Default: 1,000,000.
    pub blocked_max: usize,
    /// An idle lane's floor is written at least this often. Default: 5 s.
    pub floor_interval: Duration,
    /// Whether and how this instance takes back what others were working on in queues.
    pub recovery: Recovery,
    /// The seed of the jitter.
    pub seed: u64,
    /// For tests of the tests: a deliberately broken variant.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            lease_ttl: Duration::from_secs(10),
            beat_interval: Duration::from_secs(1),
            poll_interval: Duration::from_secs(5),
            debounce: Duration::ZERO,
            page_size: 2_000,
            in_flight_max: 10_000,
            in_flight_bytes_max: 32 * 1024 * 1024,
            hole_scans_max: 1_000,
            ranges_max: 1_000,
            parked_max: 10_000,
            blocked_max: 1_000_000,
            floor_interval: Duration::from_secs(5),
            recovery: Recovery::default(),
            seed: 1,
            mutant: None,
        }
    }
}

/// How an instance takes back what others were working on in queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    /// Off: what a dead process was working on stays as it is until an operator or an outside monitor says `pillarbox recover`.
    /// Default: on.
    pub enabled: bool,
    /// How soon. Default: fast.
    pub profile: RecoveryProfile,
    /// How often claims are looked through for owners that have given no sign of life for `processing_timeout`. Default: 1 min.
    pub check_interval: Duration,
}

impl Default for Recovery {
    fn default() -> Self {
        Recovery { enabled: true, profile: RecoveryProfile::Fast, check_interval: Duration::from_secs(60) }
    }
}

/// How soon claims are recovered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryProfile {
    /// As soon as the owner's lock is free or its lease is over: in milliseconds when a process dies. A process that was only cut
    /// off from the database may still be working then.
    Fast,
    /// Only after `processing_timeout` without a sign of life: for those to whom a duplicate is worse than a delay. Every event gets
    /// a row before it is worked on.
    Conservative,
}

/// Deliberately broken variants of the engine; the simulation must find each.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// The cursor jumps to the highest visible position.
    CursorAtHighestVisible,
    /// A gap is closed without waiting for the writers seen with it.
    CloseHolesBeforeReading,
    /// An event counts as settled when it is handed to the sink.
    SettleBeforeDeliver,
    /// A lane that joins behind the tail goes on at the tail.
    JoinWithoutRereading,
    /// The floor is written as the highest position delivered.
    AbsoluteCursor,
    /// What came out of turn is written as one range, with what is open between.
    OneRangeAboveFloor,
    /// What came out of turn is not written.
    NoRangesAboveFloor,
    /// An instance that cannot beat any more goes on delivering until somebody tells it.
    NoOwnDeadline,
    /// It sends nothing more, but lets what is at the sinks go on.
    CallsOutliveDeadline,
    /// One event that the sink fails to take holds every key back.
    SuspectStopsAll,
    /// The database's time counts as read when it was asked for.
    EarlyClock,
    /// A delayed event takes its place before what the owner before had read is read again.
    PromoteBeforeReading,
    /// A lane that is loaded anew is read with the filter that the relay was started with.
    ReloadWithOldFilter,
}

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// The answer to [`Action::Observe`].
    Observed(Fleet),
    /// The answer to [`Action::Take`].
    Taken(Vec<Option<Epoch>>),
    /// The answer to [`Action::Load`].
    Loaded(Vec<Option<LaneState>>),
    /// The answer to [`Action::Poll`].
    Polled(Page),
    /// The answer to [`Action::Fetch`].
    Fetched(Vec<Arc<Event>>),
    /// The answer to [`Action::Settle`].
    Settled(Vec<bool>),
    /// The answer to [`Action::Claim`].
    Claimed(Vec<Claims>),
    /// The answer to [`Action::Finish`].
    Finished(Vec<bool>),
    /// The answer to [`Action::Recover`].
    Recovered(Recovered),
    /// A batch is over.
    Delivered {
        /// Which one.
        batch: (usize, BatchId),
        /// One an event.
        outcomes: Vec<Outcome>,
    },
    /// A batch was given up after [`Action::Abort`]; nobody knows what became of it. Its call is over for good.
    Aborted {
        /// Which one.
        batch: (usize, BatchId),
    },
    /// A worker is held up by an event of its batch: those before it are over, those after it are given back.
    HandedBack {
        /// Which batch.
        batch: (usize, BatchId),
        /// One an event before the one that holds it up.
        outcomes: Vec<Outcome>,
    },
    /// The doorbell: events may be there, and the fleet may have changed.
    Rang,
    /// The doorbell: events may be there.
    Published,
    /// A call to the store failed; nothing is known about it having happened.
    CallFailed(Call),
    /// Finish what is at the sink, settle, give everything back.
    Drain,
    /// Time went on.
    Tick,
}

/// The calls to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the action of the same name")]
pub enum Call {
    Observe,
    Take,
    Load,
    Poll,
    Fetch,
    Settle,
    Claim,
    Finish,
    Recover,
}

impl Input {
    /// Its name, for the log: it holds payloads, which are never logged.
    pub fn name(&self) -> &'static str {
        match self {
            Input::Observed(_) => "observed",
            Input::Taken(_) => "taken",
            Input::Loaded(_) => "loaded",
            Input::Polled(_) => "polled",
            Input::Fetched(_) => "fetched",
            Input::Settled(_) => "settled",
            Input::Claimed(_) => "claimed",
            Input::Finished(_) => "finished",
            Input::Recovered(_) => "recovered",
            Input::Delivered { .. } => "delivered",
            Input::Aborted { .. } => "aborted",
            Input::HandedBack { .. } => "handed_back",
            Input::Rang => "rang",
            Input::Published => "published",
            Input::CallFailed(_) => "call_failed",
            Input::Drain => "drain",
            Input::Tick => "tick",
        }
    }
}

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
    /// with [`Input::Aborted`] once its call is over, unless it was answered already.
    Abort,
    /// The drain is over: leave.
    Leave,
}

/// What happened since the figures were last taken, for counters.
#[derive(Debug, Default)]
pub struct Figures {
    /// Delivered, by subscription.
    pub delivered: BTreeMap<Arc<str>, u64>,
    /// Failed attempts, by subscription and kind.
    pub failed: BTreeMap<(Arc<str>, &'static str), u64>,
    /// Became dead, by subscription.
    pub dead: BTreeMap<Arc<str>, u64>,
    /// Lanes taken, by cause.
    pub takeovers: BTreeMap<&'static str, u64>,
    /// Positions that retention removed before they were delivered, by subscription.
    pub pruned: BTreeMap<Arc<str>, u64>,
    /// Claims taken from others, by subscription and cause.
    pub recovered: BTreeMap<(Arc<str>, &'static str), u64>,
    /// Claims that were ended too late: they had been taken from this instance, by subscription.
    pub refused: BTreeMap<Arc<str>, u64>,
    /// Sinks that are considered down from now on, or (without a report) no longer, by subscription.
    pub sinks: BTreeMap<Arc<str>, Option<BreakerReport>>,
    /// Attempts that failed, as many as are to be logged.
    pub failed_attempts: Vec<FailedAttempt>,
    /// How many more failed, by subscription.
    pub failed_unlogged: BTreeMap<Arc<str>, u64>,
    /// Events that were delivered, if [`Engine::tell_deliveries`] was asked for them.
    pub deliveries: Vec<DeliveredAttempt>,
    /// What people should be told.
    pub warnings: Vec<String>,
}

/// The decisions of a relay: state, time and what happened, to what is to be done. No IO, no clock, no randomness of its own.
///
/// `reader → dispatcher → workers → settler`: a poll's page is handed to the lanes ([`Engine::step`] with `Polled`), which keep
/// the books of what is settled; per subscription a dispatcher keeps each key in order; outcomes settle positions or park
/// events in the delivery table; one settlement writes all that has changed.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    me: InstanceId,
    settle_interval: Duration,
    /// No lease can overrule this instance as long as it lives.
    lock_proves_life: bool,
    ownership: Ownership,
    subscribers: Vec<Subscriber>,
    /// Where each subscription is among the subscribers.
    indexes: HashMap<SubscriptionId, usize>,
    /// When something is to be done for a queue that rests, at the earliest.
    rest_until: Duration,
    grace: Grace,
    clock: DatabaseClock,
    /// The highest position that any poll has told of.
    horizon: Position,
    actions: Vec<Action>,
    figures: Figures,
    tells_deliveries: bool,
    /// Subscriptions of which failed attempts were logged lately.
    logged: Vec<usize>,
    random: u64,
    draining: bool,
    left: bool,

    rang_at: Option<Duration>,
    observe_now: bool,
    taking: Slot<Vec<Take>>,
    loading: Slot<Vec<(LaneRef, Epoch)>>,
    to_take: Vec<Take>,
    to_load: Vec<(LaneRef, Epoch)>,
    /// Lanes with an attempt of this process at the sink that was announced under an epoch which is over: loaded when it is.
    to_load_later: Vec<(LaneRef, Epoch)>,
    polling: Slot<PollPlan>,
    fetching: Slot<Vec<Claim>>,
    settling: Slot<Vec<PendingWrite>>,
    next_claim: i64,
    claiming: Slot<Vec<Asked>>,
    /// Requests of which nobody knows what became.
    claims_unknown: Vec<Asked>,
    finishing: Slot<Vec<ClaimEnd>>,
    recovering: Slot<(RecoverRequest, Duration)>,
    last_sweep: Option<Duration>,
    /// Instances whose claims are to be recovered, as last seen.
    dead_instances: Vec<(InstanceId, RecoveryCause, Option<i64>)>,
    /// When the claims of dead instances were last recovered.
    recovered: HashMap<InstanceId, Duration>,
    /// The last poll brought no lane further, so that asking again at once is no use.
    stuck: bool,
    /// The poll being looked at has brought a lane further.
    moved: bool,
    observing: Slot<()>,
    /// How many looks at the fleet have begun.
    observes: u64,
    /// At least one look at the fleet has come back.
    seen_fleet: bool,
    /// A lane that this instance could run has an owner that is gone, and waits for its lease to end.
    orphaned: bool,
    dead: RangeSet,
    dead_settling: RangeSet,
    last_observe: Option<Duration>,
    /// When the last look at the fleet began that came back: others count this instance's lease from then on or later.
    confirmed: Option<Duration>,
    /// The lease may be over: nothing is sent until a look at the fleet has come back.
    expired: bool,
    last_poll: Option<Duration>,
    last_settle: Option<Duration>,
    /// Polls since the newest hole appeared.
    hole_polls: u32,
    newest_hole: Option<Position>,
    /// When a poll last looked at the writers.
    last_writers: Option<Duration>,
    /// The last poll showed many events.
    busy: bool,
    polls: u64,
}

/// A lane's part of the settlement under way.
#[derive(Debug)]
struct PendingWrite {
    write: LaneWrite,
    /// Events that leave the window once it is written.
    done: usize,
    /// Attempts that may begin once it is written.
    announced: Vec<Position>,
}

#[derive(Debug)]
struct PollPlan {
    /// Where the scans end that ask for holes; they come first.
    hole_ends: Vec<Position>,
    /// Subscriptions whose holes were asked for.
    asked: HashSet<usize>,
    /// Subscriptions that had room.
    room: HashSet<usize>,
}

/// A delivery whose event is being fetched.
#[derive(Debug, Clone, Copy)]
struct Claim {
    sub: usize,
    lane: u32,
    epoch: Epoch,
    position: Position,
    key: Option<KeyHash>,
}

/// One part in this many of a lease is left to others' clocks and to the calls that have to be given up.
const LEASE_MARGIN: u32 = 5;
/// Delayed rows made due in one step, and deliveries fetched at once.
const PROMOTE_MAX: usize = 1_000;

impl Engine {
    /// An engine that has joined, at `mono` or before. Each subscription comes with what its sink can do, in the order of the hello.
    pub fn new(
        config: EngineConfig,
        mono: Duration,
        joined: &Joined,
        features: StoreFeatures,
        subscriptions: Vec<(Subscription, SinkFeatures)>,
    ) -> Self {
        let mut figures = Figures::default();
        let subscriber = |((spec, sink), view)| {
            let mut sub = Subscriber::new(spec, sink, view);
            figures.warnings.extend(sub.difference(view));
            sub
        };
        let mut config = config;
        let mut subscribers: Vec<Subscriber> =
            subscriptions.into_iter().zip(&joined.subscriptions).map(subscriber).collect();
        for sub in &subscribers {
            config.beat_interval = beat_interval(&config, sub);
        }
        let conservative = config.recovery.profile == RecoveryProfile::Conservative;
        for queue in subscribers.iter_mut().filter_map(|sub| sub.queue.as_mut()) {
            queue.rows_for_all |= conservative;
        }
        Engine {
            me: joined.instance,
            settle_interval: features.settle_interval,
            lock_proves_life: features.lock_proves_life,
            ownership: Ownership::new(joined.instance, config.lease_ttl, features),
            indexes: subscribers.iter().enumerate().map(|(index, sub)| (sub.id, index)).collect(),
            subscribers,
            rest_until: Duration::MAX,
            grace: Grace::default(),
            clock: DatabaseClock::new(joined.time, mono),
            horizon: 0,
            actions: Vec::new(),
            figures,
            tells_deliveries: false,
            logged: Vec::new(),
            random: config.seed | 1,
            draining: false,
            left: false,
            rang_at: None,
            observe_now: true,
            taking: Slot::default(),
            loading: Slot::default(),
            to_take: Vec::new(),
            to_load: Vec::new(),
            to_load_later: Vec::new(),
            polling: Slot::default(),
            fetching: Slot::default(),
            settling: Slot::default(),
            next_claim: 1,
            claiming: Slot::default(),
            claims_unknown: Vec::new(),
            finishing: Slot::default(),
            recovering: Slot::default(),
            last_sweep: None,
            dead_instances: Vec::new(),
            recovered: HashMap::new(),
            stuck: false,
            moved: false,
            observing: Slot::default(),
            observes: 0,
            seen_fleet: false,
            orphaned: false,
            dead: RangeSet::new(),
            dead_settling: RangeSet::new(),
            last_observe: None,
            confirmed: None,
            expired: false,
            last_poll: None,
            last_settle: None,
            hole_polls: 0,
            newest_hole: None,
            last_writers: None,
            busy: false,
            polls: 0,
            config,
        }
    }

    /// Takes in what happened and returns what is to be done.
    pub fn step(&mut self, mono: Duration, input: Input) -> Vec<Action> {
        if let Input::Observed(fleet) = &input {
            self.learn_time(mono, fleet.time);
        }
        let now = self.now(mono);
        self.rouse(now, &input);
        match input {
            Input::Observed(fleet) => self.observed(now, fleet),
            Input::Taken(epochs) => self.taken(epochs),
            Input::Loaded(states) => self.loaded(now, states),
            Input::Polled(page) => self.polled(now, page),
            Input::Fetched(events) => self.fetched(now, events),
            Input::Settled(written) => self.settled(now, written),
            Input::Delivered { batch, outcomes } => self.delivered(now, batch, outcomes),
            Input::Aborted { batch } => self.aborted(now, batch),
            Input::HandedBack { batch, outcomes } => self.handed_back(now, batch, outcomes),
            Input::Claimed(answers) => self.claimed(now, answers),
            Input::Finished(written) => self.finished(now, written),
            Input::Recovered(recovered) => self.recovered(now, recovered),
            Input::Rang => {
                self.rang(now);
                self.observe_now = true;
            }
            Input::Published => self.rang(now),
            Input::CallFailed(call) => self.call_failed(now, call),
            Input::Drain => self.drain(),
            Input::Tick => {}
        }
        self.advance(now);
        std::mem::take(&mut self.actions)
    }

    fn learn_time(&mut self, mono: Duration, time: Timestamp) {
        let asked = self.last_observe.unwrap_or(mono);
        match self.config.mutant {
            Some(Mutant::EarlyClock) => self.clock = DatabaseClock::new(time, asked),
            _ => self.clock.learn(time, asked, mono),
        }
    }

    fn now(&self, mono: Duration) -> Now {
        Now { mono, wall: self.clock.at(mono) }
    }

    /// Subscriptions that rest are not looked at until an input concerns them, or the time has come to look for rows of a queue.
    fn rouse(&mut self, now: Now, input: &Input) {
        let concerns_all = match input {
            Input::Delivered { batch, .. } | Input::Aborted { batch } | Input::HandedBack { batch, .. } => {
                self.subscribers[batch.0].resting = false;
                false
            }
            Input::Rang | Input::Published => false,
            _ => true,
        };
        if concerns_all || now.mono >= self.rest_until {
            self.subscribers.iter_mut().for_each(|sub| sub.resting = false);
            self.rest_until = Duration::MAX;
        }
    }

    /// Subscriptions for which nothing is to be done rest.
    fn lay_to_rest(&mut self, now: Now) {
        for sub in self.subscribers.iter_mut().filter(|sub| !sub.resting) {
            looked_at(sub.lanes.len());
            sub.resting = sub.may_rest(now, self.horizon);
            if let Some(queue) = sub.queue.as_ref().filter(|_| sub.resting) {
                self.rest_until = queue.deadline(now).map_or(self.rest_until, |at| at.min(self.rest_until));
            }
        }
    }

    /// The subscriptions that do not rest.
    fn awake(&self) -> impl Iterator<Item = &Subscriber> {
        self.subscribers.iter().filter(|sub| !sub.resting)
    }

    fn rang(&mut self, now: Now) {
        self.rang_at.get_or_insert(now.mono);
        for sub in &mut self.subscribers {
            let Some(queue) = &mut sub.queue else { continue };
            queue.wake(now);
            sub.resting = false;
        }
    }

    /// When to step with [`Input::Tick`] if nothing else happens before. Always later than now: what is due now was done by the
    /// last step, or waits for an answer.
    pub fn deadline(&self, mono: Duration) -> Duration {
        let now = self.now(mono);
        let mut deadline = now.mono + self.config.beat_interval;
        let mut sooner =
            |at: Option<Duration>| deadline = at.filter(|&at| at > now.mono).map_or(deadline, |at| at.min(deadline));
        sooner(self.observe_at());
        sooner(self.good_until());
        sooner(self.last_poll.map(|last| last + self.poll_wait()));
        sooner(self.rang_at.map(|at| at + self.config.debounce));
        if self.has_writes() {
            sooner(self.last_settle.map(|last| last + self.settle_interval));
        }
        self.retries().into_iter().for_each(&mut sooner);
        sooner(self.queue_deadline(now));
        sooner(Some(self.rest_until));
        for sub in self.awake() {
            looked_at(sub.lanes.len());
            sooner(sub.breaker.deadline());
            sooner(sub.breaker.other_deadline());
            let due = sub.active().filter_map(|lane| lane.next_due_after(now.wall)).min();
            sooner(due.map(|due| now.mono + due.since(now.wall)));
        }
        deadline
    }

    /// Until when no other instance can have taken a lane of this one for want of a sign of life; None: for ever, or nothing is its own
    /// yet. No call to a sink may outlive it.
    pub fn good_until(&self) -> Option<Duration> {
        let endless = self.lock_proves_life || self.config.mutant == Some(Mutant::NoOwnDeadline);
        let lease = self.config.lease_ttl;
        self.confirmed.filter(|_| !endless).map(|begun| begun + (lease - lease / LEASE_MARGIN))
    }

    /// Nothing is under way and nothing can be delivered now: what is left waits for its time, for an operator or for another instance.
    pub fn is_idle(&self, mono: Duration) -> bool {
        let now = self.now(mono);
        let calls = [
            self.polling.is_busy(),
            self.fetching.is_busy(),
            self.settling.is_busy(),
            self.taking.is_busy(),
            self.loading.is_busy(),
            self.observing.is_busy(),
            self.claiming.is_busy(),
            self.finishing.is_busy(),
            self.recovering.is_busy(),
        ];
        let wanted = [self.observe_now, self.rang_at.is_some(), !self.to_take.is_empty(), !self.to_load.is_empty()];
        if calls.contains(&true)
            || wanted.contains(&true)
            || !self.seen_fleet
            || self.orphaned
            || self.last_poll.is_none()
            || self.expired
        {
            return false;
        }
        !self.has_writes() && self.subscribers.iter().all(|sub| sub.is_idle(now, self.horizon))
    }

    /// Whether nothing is left to be read now, so that only the doorbell or time can bring more.
    pub fn is_asleep(&self) -> bool {
        !self.polling.is_busy() && self.rang_at.is_none() && (self.stuck || !self.is_behind())
    }

    /// What the subscription with this index goes by.
    pub fn definition(&self, subscription: usize) -> &Definition {
        &self.subscribers[subscription].definition
    }

    /// How many polls have begun.
    pub fn polls(&self) -> u64 {
        self.polls
    }

    /// Whether the figures are to name every event that is delivered.
    pub fn tell_deliveries(&mut self, tell: bool) {
        self.tells_deliveries = tell;
    }

    /// This instance.
    pub fn instance(&self) -> InstanceId {
        self.me
    }

    /// Takes the figures since the last call.
    pub fn take_figures(&mut self) -> Figures {
        for sub in &mut self.subscribers {
            if sub.breaker.has_news() {
                self.figures.sinks.insert(sub.name.clone(), sub.breaker.report());
            }
        }
        std::mem::take(&mut self.figures)
    }

    /// What this instance says of its work.
    pub fn report(&self) -> Report {
        let subscriptions = self.subscribers.iter().map(|sub| (sub.spec.name.clone(), sub.report())).collect();
        Report { subscriptions, draining: self.draining }
    }

    /// Brings a report up to date that this engine has made.
    pub fn update_report(&mut self, report: &mut Report) {
        report.draining = self.draining;
        looked_at(self.subscribers.len());
        for sub in self.subscribers.iter_mut() {
            if sub.has_changed() {
                report.subscriptions.insert(sub.spec.name.clone(), sub.report());
            }
        }
    }

    fn advance(&mut self, now: Now) {
        if self.left {
            return;
        }
        self.expire(now);
        self.quiesce();
        self.update_stopped();
        for index in 0..self.subscribers.len() {
            if self.subscribers[index].resting {
                continue;
            }
            self.subscribers[index].promote(now);
            self.tend_queue(now, index);
            self.dispatch(now, index);
        }
        self.call_fleet(now);
        self.call_poll(now);
        self.call_fetch(now);
        self.call_claim(now);
        self.call_finish(now);
        self.call_recover(now);
        self.settle(now);
        self.lay_to_rest(now);
        let calls =
            self.settling.is_busy() || self.taking.is_busy() || self.loading.is_busy() || self.observing.is_busy();
        let loads = !self.to_load.is_empty() || !self.to_load_later.is_empty();
        let leaves = self.draining && self.is_empty() && !calls && !loads;
        self.tell_unlogged(now, leaves);
        if leaves {
            self.left = true;
            self.actions.push(Action::Leave);
        }
    }

    /// Nothing is this instance's any more: no lane, no claim, nothing at a sink.
    fn is_empty(&self) -> bool {
        let claims = self.claiming.is_busy() || self.finishing.is_busy() || !self.claims_unknown.is_empty();
        let empty = |sub: &Subscriber| {
            let quiet = sub.queue.as_ref().is_none_or(Queue::is_quiet);
            quiet && sub.lanes().next().is_none() && sub.dispatcher.in_flight() == 0
        };
        !claims && self.subscribers.iter().all(empty)
    }

    /// Stops sending when the lease may be over, and goes on when it is known not to be.
    fn expire(&mut self, now: Now) {
        let over = self.good_until().is_some_and(|end| now.mono >= end);
        if over == self.expired {
            return;
        }
        self.expired = over;
        let at_sink = self.subscribers.iter().any(|sub| sub.dispatcher.in_flight() > 0);
        if over && at_sink && self.config.mutant != Some(Mutant::CallsOutliveDeadline) {
            self.actions.push(Action::Abort);
        }
        if over {
            self.figures.warnings.push(format!(
                "the database has not answered for most of lease_ttl = {:?}, and others may take this relay for dead: nothing is \
                 delivered until it answers",
                self.config.lease_ttl
            ));
        }
    }

    fn update_stopped(&mut self) {
        for sub in self.subscribers.iter_mut().filter(|sub| !sub.resting) {
            sub.stopped = sub.stop_reason(&self.config);
            sub.overfull = sub.overfull_reason();
        }
    }

    fn index_of(&self, subscription: SubscriptionId) -> Option<usize> {
        self.indexes.get(&subscription).copied()
    }

    /// When calls that failed may be made again.
    fn retries(&self) -> [Option<Duration>; 9] {
        [
            self.observing.retry_at(),
            self.taking.retry_at(),
            self.loading.retry_at(),
            self.polling.retry_at(),
            self.fetching.retry_at(),
            self.settling.retry_at(),
            self.claiming.retry_at(),
            self.finishing.retry_at(),
            self.recovering.retry_at(),
        ]
    }

    fn call_failed(&mut self, now: Now, call: Call) {
        match call {
            Call::Observe => {
                self.observing.fail(now);
                self.observe_now = true;
            }
            // It may have happened: the next look at the fleet tells.
            Call::Take => {
                self.taking.fail(now);
                self.observe_now = true;
            }
            Call::Load => self.to_load.append(&mut self.loading.fail(now).unwrap_or_default()),
            Call::Poll => {
                self.polling.fail(now);
                self.rang_at.get_or_insert(now.mono);
            }
            Call::Fetch => {
                for claim in self.fetching.fail(now).unwrap_or_default() {
                    let sub = &mut self.subscribers[claim.sub];
                    if let Some(lane) = sub.lane_at(claim.lane, claim.epoch) {
                        sub.window -= lane.give_back(claim.position, claim.key);
                    }
                }
            }
            Call::Settle => self.restore_settling(now),
            Call::Claim | Call::Finish | Call::Recover => self.queue_call_failed(now, call),
        }
    }

    /// A number in 0..1 from the engine's own sequence.
    fn noise(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}
