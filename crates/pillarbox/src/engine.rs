use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::breaker::{Breaker, Charge, Permit};
use crate::dispatcher::{BatchId, Dispatcher, Item};
use crate::flood_guard::FloodGuard;
use crate::grace::Grace;
use crate::lane::{ChainKey, Failed, Lane, Phase};
use crate::ownership::Ownership;
use crate::{
    Attempt, AttemptError, Delivery, ERROR_BYTES_MAX, Epoch, Event, Failure, Fault, Filter, Fleet, InstanceId, Joined, KeyHash, LaneRef, LaneState,
    LaneWrite, Outcome, Page, PollRequest, Position, RangeSet, Report, Scan, ScanRequest, Settlement, SinkFeatures, State,
    StoreFeatures, Subscription, SubscriptionId, SubscriptionReport, Take, TakeCause, Timestamp, lane_of,
};

/// The two clocks of a step: `mono` never jumps and measures waits; `wall` is what due times are kept in.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Since the engine started.
    pub mono: Duration,
    /// The time of day.
    pub wall: Timestamp,
}

/// The limits and intervals of an engine. Each is documented with its default.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// How long an owner may be silent before its lanes are taken, where no lock proves its life. Default: 10 s.
    pub lease_ttl: Duration,
    /// How often this instance beats and looks at the fleet. Default: 1 s, at most a third of the lease.
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
    /// Holes asked for in one poll; beyond it neighbours are asked for as one. Default: 256.
    pub hole_scans_max: usize,
    /// Ranges of one cursor; with more holes than this a lane goes no higher until some close. Default: 1,000.
    pub ranges_max: usize,
    /// Failing keys of one subscription; at the limit it stops and says so. Default: 10,000.
    pub parked_max: usize,
    /// Deliveries of one subscription that wait behind failing keys; at the limit it stops and says so. Default: 1,000,000.
    pub blocked_max: usize,
    /// An idle lane's floor is written at least this often. Default: 5 s.
    pub floor_interval: Duration,
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
            hole_scans_max: 256,
            ranges_max: 1_000,
            parked_max: 10_000,
            blocked_max: 1_000_000,
            floor_interval: Duration::from_secs(5),
            seed: 1,
            mutant: None,
        }
    }
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
    /// A batch is over.
    Delivered {
        /// Which one.
        batch: (usize, BatchId),
        /// One an event.
        outcomes: Vec<Outcome>,
    },
    /// A worker is held up by the last of the first `kept` events of its batch and gives the rest back.
    HandedBack {
        /// Which batch.
        batch: (usize, BatchId),
        /// How many it keeps.
        kept: usize,
    },
    /// The doorbell.
    Rang,
    /// A call to the store failed; nothing is known about it having happened.
    CallFailed(Call),
    /// The connection to the database was lost and made again.
    Reconnected,
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
    /// Hand a batch to the sink of the subscription with this index.
    Deliver {
        /// To be given back with the outcomes.
        batch: (usize, BatchId),
        /// The events.
        events: Vec<Attempt>,
    },
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
    ownership: Ownership,
    subs: Vec<Sub>,
    grace: Grace,
    /// The highest position that any poll has told of.
    horizon: Position,
    actions: Vec<Action>,
    figures: Figures,
    random: u64,
    draining: bool,
    left: bool,

    rang_at: Option<Duration>,
    observe_now: bool,
    taking: Option<Vec<Take>>,
    loading: Option<Vec<(LaneRef, Epoch)>>,
    to_take: Vec<Take>,
    to_load: Vec<(LaneRef, Epoch)>,
    polling: Option<PollPlan>,
    fetching: Option<Vec<Claim>>,
    settling: Option<Vec<PendingWrite>>,
    /// The last poll brought no lane further, so that asking again at once is no use.
    stuck: bool,
    observing: bool,
    /// At least one look at the fleet has come back.
    seen_fleet: bool,
    dead: RangeSet,
    dead_settling: RangeSet,
    last_observe: Option<Duration>,
    last_poll: Option<Duration>,
    last_settle: Option<Duration>,
    hole_polls: u32,
    polls: u64,
    /// Failed calls in a row, and not before when the next may be tried.
    backoff: HashMap<Call, (u32, Duration)>,
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
    /// The scans before this index ask for holes.
    hole_scans: usize,
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

/// One subscription of the engine.
#[derive(Debug)]
struct Sub {
    spec: Subscription,
    name: Arc<str>,
    id: SubscriptionId,
    filter: Filter,
    lane_count: u32,
    paused: bool,
    lanes: Vec<Option<Lane>>,
    dispatcher: Dispatcher,
    breaker: Breaker,
    flood_guard: FloodGuard,
    /// Events read and not yet settled in the database.
    window: usize,
    bytes: usize,
    delivered: u64,
    delivered_at: Option<Timestamp>,
    stopped: Option<String>,
    /// Events of careful lanes whose attempt is being written down first.
    announced: Vec<Item>,
    /// Delayed deliveries that are due while an event of their key is at the sink: they take their place when that is over.
    due_behind: HashMap<KeyHash, Vec<(u32, Delivery)>>,
}

/// The shortest and the longest wait between polls while a hole is open.
const HOLE_POLL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// The shortest and the longest wait after a failed call.
const CALL_BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));
/// After a ring the fleet is looked at too, but not more often than this.
const OBSERVE_MIN: Duration = Duration::from_millis(50);
/// Delayed rows made due in one step, and deliveries fetched at once.
const PROMOTE_MAX: usize = 1_000;
/// A lane seized this often without progress is careful.
const CAREFUL_AFTER: u32 = 2;
/// A careful lane moves at most this many events into the delivery table ahead.
const CAREFUL_ROWS_MAX: usize = 100;

impl Engine {
    /// An engine that has joined. `sinks` says what the sink of each subscription can do, in the order of the hello.
    pub fn new(
        config: EngineConfig,
        joined: &Joined,
        features: StoreFeatures,
        subscriptions: Vec<(Subscription, SinkFeatures)>,
    ) -> Self {
        let subs = subscriptions
            .into_iter()
            .zip(&joined.subscriptions)
            .map(|((spec, sink), view)| Sub {
                name: spec.name.as_str().into(),
                id: view.id,
                filter: view.filter.clone(),
                lane_count: view.lanes,
                paused: view.paused,
                lanes: (0..view.lanes).map(|_| None).collect(),
                dispatcher: Dispatcher::new(spec.workers, spec.batch_size, sink.ordered_batch, sink.one_by_one),
                spec,
                breaker: Breaker::default(),
                flood_guard: FloodGuard::default(),
                window: 0,
                bytes: 0,
                delivered: 0,
                delivered_at: None,
                stopped: None,
                announced: Vec::new(),
                due_behind: HashMap::new(),
            })
            .collect();
        Engine {
            me: joined.instance,
            settle_interval: features.settle_interval,
            ownership: Ownership::new(joined.instance, config.lease_ttl, features),
            subs,
            grace: Grace::default(),
            horizon: 0,
            actions: Vec::new(),
            figures: Figures::default(),
            random: config.seed | 1,
            draining: false,
            left: false,
            rang_at: None,
            observe_now: true,
            taking: None,
            loading: None,
            to_take: Vec::new(),
            to_load: Vec::new(),
            polling: None,
            fetching: None,
            settling: None,
            stuck: false,
            observing: false,
            seen_fleet: false,
            dead: RangeSet::new(),
            dead_settling: RangeSet::new(),
            last_observe: None,
            last_poll: None,
            last_settle: None,
            hole_polls: 0,
            polls: 0,
            backoff: HashMap::new(),
            config,
        }
    }

    /// Takes in what happened and returns what is to be done.
    pub fn step(&mut self, now: Now, input: Input) -> Vec<Action> {
        match input {
            Input::Observed(fleet) => self.observed(now, fleet),
            Input::Taken(epochs) => self.taken(epochs),
            Input::Loaded(states) => self.loaded(now, states),
            Input::Polled(page) => self.polled(now, page),
            Input::Fetched(events) => self.fetched(now, events),
            Input::Settled(written) => self.settled(now, written),
            Input::Delivered { batch, outcomes } => self.delivered(now, batch, outcomes),
            Input::HandedBack { batch, kept } => self.subs[batch.0].dispatcher.hand_back(batch.1, kept),
            Input::Rang => {
                self.rang_at.get_or_insert(now.mono);
                self.observe_now = true;
            }
            Input::CallFailed(call) => self.call_failed(now, call),
            Input::Reconnected => {
                self.grace.reset();
                self.ownership.reconnected();
                self.observe_now = true;
                self.rang_at.get_or_insert(now.mono);
            }
            Input::Drain => self.drain(),
            Input::Tick => {}
        }
        self.advance(now);
        std::mem::take(&mut self.actions)
    }

    /// When to step with [`Input::Tick`] if nothing else happens before. Always later than now: what is due now was done by the
    /// last step, or waits for an answer.
    pub fn deadline(&self, now: Now) -> Duration {
        let mut deadline = now.mono + self.config.beat_interval;
        let mut sooner = |at: Option<Duration>| deadline = at.filter(|&at| at > now.mono).map_or(deadline, |at| at.min(deadline));
        sooner(self.last_observe.map(|last| last + self.observe_wait()));
        sooner(self.last_poll.map(|last| last + self.poll_wait()));
        sooner(self.rang_at.map(|at| at + self.config.debounce));
        if self.has_writes() {
            sooner(self.last_settle.map(|last| last + self.settle_interval));
        }
        self.backoff.values().for_each(|entry| sooner(Some(entry.1)));
        for sub in &self.subs {
            sooner(sub.breaker.deadline());
            let due = sub.active().filter_map(|lane| lane.next_due_after(now.wall)).min();
            sooner(due.map(|due| now.mono + due.since(now.wall)));
        }
        deadline
    }

    /// Nothing is under way and nothing can be delivered now: what is left waits for its time, for an operator or for another instance.
    pub fn is_idle(&self, now: Now) -> bool {
        let calls = self.polling.is_some() || self.fetching.is_some() || self.settling.is_some() || self.taking.is_some() || self.loading.is_some();
        if calls || self.rang_at.is_some() || self.last_poll.is_none() || !self.to_take.is_empty() || !self.to_load.is_empty() {
            return false;
        }
        self.seen_fleet && !self.has_writes() && self.subs.iter().all(|sub| sub.is_idle(now, self.horizon))
    }

    /// Whether nothing is left to be read now, so that only the doorbell or time can bring more.
    pub fn is_asleep(&self) -> bool {
        self.polling.is_none() && self.rang_at.is_none() && (self.stuck || !self.is_behind())
    }

    /// How many polls have begun.
    pub fn polls(&self) -> u64 {
        self.polls
    }

    /// The drain is over.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// This instance.
    pub fn instance(&self) -> InstanceId {
        self.me
    }

    /// Takes the figures since the last call.
    pub fn take_figures(&mut self) -> Figures {
        std::mem::take(&mut self.figures)
    }

    /// What this instance says of its work.
    pub fn report(&self) -> Report {
        let subscriptions = self.subs.iter().map(|sub| {
            let report = SubscriptionReport {
                in_flight: sub.dispatcher.in_flight() as u64,
                delivered: sub.delivered,
                delivered_at: sub.delivered_at,
                breaker: sub.breaker.report(),
                flood_guard: sub.flood_guard.is_open(),
                stopped: sub.stopped.clone(),
            };
            (sub.spec.name.clone(), report)
        });
        Report { subscriptions: subscriptions.collect(), draining: self.draining }
    }

    // --- ownership ---

    fn observed(&mut self, now: Now, fleet: Fleet) {
        self.observing = false;
        self.seen_fleet = true;
        self.call_succeeded(Call::Observe);
        self.adopt_subscriptions(&fleet);
        let views: HashMap<LaneRef, (Option<InstanceId>, Epoch, i64)> =
            fleet.lanes.iter().map(|view| (view.lane, (view.owner, view.epoch, view.revision))).collect();
        let mut mine = HashMap::new();
        for sub in &mut self.subs {
            let mut lost = Vec::new();
            for lane in sub.lanes.iter_mut().flatten() {
                match views.get(&lane.reference) {
                    Some(&(owner, epoch, revision)) if epoch == lane.epoch && owner == Some(self.me) => {
                        mine.insert(lane.reference, epoch);
                        if revision != lane.revision && matches!(lane.phase, Phase::Active | Phase::Paused) {
                            lane.phase = Phase::Reloading;
                        }
                    }
                    // A view may be older than what this instance has since taken; only a newer epoch is a loss.
                    Some(&(_, epoch, _)) if epoch <= lane.epoch => {
                        mine.insert(lane.reference, epoch.max(lane.epoch));
                    }
                    _ => lost.push(lane.reference.lane),
                }
            }
            lost.into_iter().for_each(|lane| sub.drop_lane(lane));
        }
        if self.draining {
            return;
        }
        let running: Vec<SubscriptionId> = self.subs.iter().map(|sub| sub.id).collect();
        let plan = self.ownership.plan(&fleet, &mine, &running, now.mono);
        for lane in plan.release {
            if let Some(lane) = self.lane_mut(lane).filter(|lane| matches!(lane.phase, Phase::Active | Phase::Paused)) {
                lane.phase = Phase::Releasing;
            }
        }
        let loading = self.loading.iter().flatten().chain(&self.to_load).map(|entry| entry.0);
        let taking = self.taking.iter().flatten().map(|take| take.lane);
        let under_way: HashSet<LaneRef> = loading.chain(taking).collect();
        let unknown = |take: &Take| !mine.contains_key(&take.lane) && !under_way.contains(&take.lane);
        self.to_take = plan.take.into_iter().filter(unknown).collect();
    }

    /// The newest started instance's filter wins; pauses are the operator's.
    fn adopt_subscriptions(&mut self, fleet: &Fleet) {
        for sub in &mut self.subs {
            let Some(view) = fleet.subscriptions.iter().find(|view| view.id == sub.id) else { continue };
            if view.filter != sub.filter {
                self.figures.warnings.push(format!("subscription '{}': a newer instance changed its filter; using that one", sub.name));
                sub.filter = view.filter.clone();
                // A poll under way was asked with the old filter.
                sub.lanes.iter_mut().flatten().for_each(|lane| lane.asked = false);
            }
            if view.lanes != sub.lane_count {
                (0..sub.lane_count).for_each(|lane| sub.drop_lane(lane));
                sub.lane_count = view.lanes;
                sub.lanes = (0..view.lanes).map(|_| None).collect();
            }
            if view.paused != sub.paused {
                sub.paused = view.paused;
                let (from, to) = if sub.paused { (Phase::Active, Phase::Paused) } else { (Phase::Paused, Phase::Reloading) };
                sub.lanes.iter_mut().flatten().filter(|lane| lane.phase == from).for_each(|lane| lane.phase = to);
            }
        }
    }

    fn taken(&mut self, epochs: Vec<Option<Epoch>>) {
        self.call_succeeded(Call::Take);
        let takes = self.taking.take().unwrap_or_default();
        for (take, epoch) in takes.iter().zip(epochs) {
            if let Some(epoch) = epoch {
                if take.cause != TakeCause::Free {
                    *self.figures.takeovers.entry(take.cause.name()).or_default() += 1;
                }
                self.to_load.push((take.lane, epoch));
            }
        }
        self.observe_now = true;
    }

    fn loaded(&mut self, now: Now, states: Vec<Option<LaneState>>) {
        self.call_succeeded(Call::Load);
        let lanes = self.loading.take().unwrap_or_default();
        for ((reference, epoch), state) in lanes.into_iter().zip(states) {
            let Some(index) = self.subs.iter().position(|sub| sub.id == reference.subscription) else { continue };
            let sub = &mut self.subs[index];
            sub.drop_lane(reference.lane);
            let Some(state) = state else { continue };
            let mut lane = Lane::load(reference, epoch, state, sub.spec.on_dead, CAREFUL_AFTER);
            lane.written.1 = now.mono;
            if self.draining {
                lane.phase = Phase::Releasing;
            } else if sub.paused {
                lane.phase = Phase::Paused;
            }
            if self.config.mutant == Some(Mutant::JoinWithoutRereading) && lane.top < self.horizon {
                lane.top = self.horizon;
            }
            let interrupted = lane.interrupted();
            sub.lanes[reference.lane as usize] = Some(lane);
            for row in interrupted {
                let failure = Failure { kind: "crash", ..Failure::event("the process ended while it worked on this event") };
                let failed = self.failed(index, now, row.attempts, row.since, &failure);
                let (on_dead, key) = (self.subs[index].spec.on_dead, row.key_hash());
                let lane = self.lane_mut(reference).expect("just loaded");
                lane.fail(row.position, key, failed, on_dead);
                lane.careful = true;
            }
        }
        self.rang_at.get_or_insert(now.mono);
    }

    fn drain(&mut self) {
        self.draining = true;
        self.to_take.clear();
        for lane in self.subs.iter_mut().flat_map(|sub| sub.lanes.iter_mut().flatten()) {
            if lane.phase != Phase::Waiting {
                lane.phase = Phase::Releasing;
            }
        }
    }

    fn lane_mut(&mut self, lane: LaneRef) -> Option<&mut Lane> {
        self.subs.iter_mut().find(|sub| sub.id == lane.subscription)?.lanes.get_mut(lane.lane as usize)?.as_mut()
    }

    // --- reading ---

    fn polled(&mut self, now: Now, page: Page) {
        self.call_succeeded(Call::Poll);
        let Some(plan) = self.polling.take() else { return };
        self.horizon = self.horizon.max(page.horizon);
        self.grace.observe(&page);
        let before = self.progress();
        let mut covered_holes = RangeSet::new();
        for scan in &page.scans[..plan.hole_scans.min(page.scans.len())] {
            covered_holes.insert_range(scan.after + 1, scan.covered_to);
        }
        self.subs.iter_mut().for_each(|sub| sub.set_bounds(&covered_holes));
        for (index, scan) in page.scans.iter().enumerate() {
            let mut dead = self.grace.dead(scan, page.log_start);
            if self.config.mutant == Some(Mutant::CloseHolesBeforeReading) {
                dead = scan.visible.missing((scan.after + 1).max(page.log_start), scan.covered_to);
            }
            self.horizon = self.horizon.max(scan.visible.last().unwrap_or(0));
            let hole_scan = index < plan.hole_scans;
            let mut used = false;
            for sub in 0..self.subs.len() {
                let may_rise = !hole_scan && plan.room.contains(&sub);
                used |= self.apply(now, sub, scan, &dead, page.log_start, may_rise);
            }
            if used {
                self.dead.union(&dead);
            }
        }
        let holes = self.subs.iter().flat_map(Sub::active).any(|lane| !lane.holes.is_empty());
        self.hole_polls = if holes { self.hole_polls.saturating_add(1) } else { 0 };
        self.stuck = self.progress() == before;
    }

    /// A figure that rises when a lane is shown something new.
    fn progress(&self) -> i64 {
        self.subs.iter().flat_map(Sub::active).map(|lane| lane.top - lane.holes.count() as i64).sum()
    }

    /// Whether a lane with room lies behind what is known to be there.
    fn is_behind(&self) -> bool {
        let behind = |lane: &Lane| lane.top < self.horizon && lane.holes.len() < self.config.ranges_max;
        self.subs.iter().any(|sub| sub.has_room(&self.config) && sub.active().any(behind))
    }

    /// Shows one scan to the lanes of a subscription; with `may_rise` they may go higher. What is visible together is handed on in
    /// order, so a lane takes nothing from above a hole of its own that this poll did not look at.
    fn apply(&mut self, now: Now, index: usize, scan: &Scan, dead: &RangeSet, log_start: Position, may_rise: bool) -> bool {
        let extends = |lane: &Lane| {
            let fits = scan.after <= lane.top && scan.covered_to > lane.top;
            may_rise && fits && lane.holes.len() < self.config.ranges_max && lane.bound == Position::MAX
        };
        let sub = &self.subs[index];
        let higher: Vec<bool> = sub.lanes.iter().map(|lane| lane.as_ref().is_some_and(|lane| takes_part(lane) && extends(lane))).collect();
        let touches = |lane: &Lane| !lane.holes.is_empty() && takes_part(lane);
        if !higher.contains(&true) && !sub.lanes.iter().flatten().any(touches) {
            return false;
        }
        let stop = self.admit_events(now, index, scan, &higher);
        let sub = &mut self.subs[index];
        let mut pruned = 0;
        for (lane, higher) in sub.lanes.iter_mut().zip(higher) {
            let Some(lane) = lane.as_mut().filter(|lane| takes_part(lane)) else { continue };
            if higher {
                let top = stop.min(scan.covered_to).max(lane.top);
                pruned += (log_start.min(top + 1) - (lane.top + 1)).max(0);
                let missing = scan.visible.missing((lane.top + 1).max(log_start), top);
                lane.top = top;
                lane.holes.union(&missing);
            }
            if !lane.holes.is_empty() {
                // What was shown has been handed on, or is not this lane's.
                let shown = scan.visible.within(scan.after + 1, scan.covered_to.min(lane.top).min(lane.bound - 1));
                lane.holes.subtract(&shown);
                lane.holes.subtract(dead);
                if lane.holes.first().is_some_and(|first| first < log_start) {
                    pruned += lane.holes.within(0, log_start - 1).count() as i64;
                    lane.holes.remove_range(0, log_start - 1);
                }
            }
            if self.config.mutant == Some(Mutant::CursorAtHighestVisible) {
                lane.holes = RangeSet::new();
            }
        }
        if pruned > 0 {
            let name = sub.name.clone();
            self.figures.warnings.push(format!("subscription '{name}': retention removed {pruned} positions before this subscription had passed them"));
            *self.figures.pruned.entry(name).or_default() += pruned as u64;
        }
        true
    }

    /// Hands the events of a scan on; returns the position that the lanes may go up to.
    fn admit_events(&mut self, now: Now, index: usize, scan: &Scan, higher: &[bool]) -> Position {
        let mut stop = scan.covered_to;
        let sub = &mut self.subs[index];
        let mut room = sub.room(&self.config);
        let all = sub.filter.is_all();
        for event in &scan.events {
            if !all && !sub.filter.wants(event) {
                continue;
            }
            let key = event.key_hash();
            let number = lane_of(key, event.position, sub.lane_count);
            let Some(lane) = sub.lanes[number as usize].as_mut().filter(|lane| takes_part(lane)) else { continue };
            if event.position <= lane.top {
                if event.position >= lane.bound || lane.holes.is_empty() || !lane.holes.contains(event.position) {
                    continue;
                }
            } else if !higher[number as usize] || event.position > stop {
                continue;
            } else if room == 0 || sub.bytes >= self.config.in_flight_bytes_max || (lane.careful && lane.runnable() >= CAREFUL_ROWS_MAX) {
                stop = event.position - 1;
                continue;
            }
            room = room.saturating_sub(1);
            sub.admit(now, number, key, event, self.config.mutant);
        }
        stop
    }

    fn poll_request(&self) -> Option<(PollRequest, PollPlan)> {
        let mut holes = RangeSet::new();
        let mut tops: Vec<Position> = Vec::new();
        let mut room = HashSet::new();
        for (index, sub) in self.subs.iter().enumerate() {
            sub.active().for_each(|lane| holes.union(&lane.holes));
            if sub.has_room(&self.config) {
                room.insert(index);
                tops.extend(sub.active().filter(|lane| lane.holes.len() < self.config.ranges_max).map(|lane| lane.top));
            }
        }
        let mut scans: Vec<ScanRequest> = coalesce(&holes, self.config.hole_scans_max);
        scans.iter_mut().for_each(|scan| scan.limit = self.config.page_size.max(1_000));
        let hole_scans = scans.len();
        let limit = self.config.page_size;
        let (lowest, highest) = (tops.iter().min().copied(), tops.iter().max().copied());
        if let (Some(lowest), Some(highest)) = (lowest, highest) {
            scans.push(ScanRequest { after: lowest, to: Position::MAX, limit });
            if highest > lowest {
                scans.push(ScanRequest { after: highest, to: Position::MAX, limit });
            }
        }
        if scans.is_empty() {
            return None;
        }
        let wanted = self.subs.iter().filter(|sub| sub.active().next().is_some()).map(|sub| sub.filter.clone()).collect();
        Some((PollRequest { scans, wanted }, PollPlan { hole_scans, room }))
    }

    // --- delivering ---

    fn delivered(&mut self, now: Now, (index, batch): (usize, BatchId), outcomes: Vec<Outcome>) {
        let items = self.subs[index].dispatcher.finish(batch);
        let freed: usize = items.iter().map(|item| item.event.size()).sum();
        self.subs[index].bytes -= freed;
        let mut back = Vec::new();
        let mut outcomes = outcomes.into_iter();
        let mut delivered = 0;
        for item in &items {
            match outcomes.next().unwrap_or(Outcome::NotTried) {
                Outcome::Delivered => {
                    delivered += 1;
                    self.subs[index].succeed(item);
                }
                Outcome::Failed(failure) => {
                    if !self.charge(now, index, item, failure) {
                        back.push(item.clone());
                    }
                }
                Outcome::NotTried => back.push(item.clone()),
            }
        }
        let sub = &mut self.subs[index];
        if delivered > 0 {
            sub.delivered += delivered;
            sub.delivered_at = Some(now.wall);
            *self.figures.delivered.entry(sub.name.clone()).or_default() += delivered;
        }
        sub.breaker.probe_lost(now);
        let back = sub.take_back(now, back);
        for item in &items {
            sub.release_key(now, item);
        }
        sub.dispatcher.push_front(back);
    }

    /// Deals with a failure; false if the event is to be tried again as if nothing had happened.
    fn charge(&mut self, now: Now, index: usize, item: &Item, failure: Failure) -> bool {
        let sub = &mut self.subs[index];
        let position = item.event.position;
        *self.figures.failed.entry((sub.name.clone(), failure.kind)).or_default() += 1;
        let charge = match failure.fault {
            Fault::Event => {
                sub.breaker.answered();
                Charge::Event
            }
            Fault::Sink => {
                sub.breaker.failure(now, &failure.message, failure.retry_after);
                Charge::Sink
            }
            Fault::Unclear => sub.breaker.unclear(now, position, &failure.message, failure.retry_after),
        };
        let key = item.key.map_or(position as u64, |key| key.0);
        if charge == Charge::Sink {
            return false;
        }
        sub.flood_guard.note(key, true);
        let valid = sub.lane(item.lane).is_some_and(|lane| lane.epoch == item.epoch);
        if !valid {
            return true;
        }
        let row = sub.lane(item.lane).and_then(|lane| lane.row(item.key, position));
        let since = row.map_or(now.wall, |row| row.since);
        // An attempt that was announced is counted already.
        let counted = row.is_some_and(|row| row.state == State::Processing);
        let attempts = item.attempts + u32::from(!counted);
        let failed = self.failed(index, now, attempts, since, &failure);
        let sub = &mut self.subs[index];
        let on_dead = sub.spec.on_dead;
        let lane = sub.lane_at(item.lane, item.epoch).expect("checked above");
        if item.parked {
            lane.fail(position, item.key, failed, on_dead);
        } else {
            lane.park(&item.event, failed, now.wall, on_dead);
        }
        true
    }

    /// What the failure of an event's `attempts`-th attempt makes of it.
    fn failed(&mut self, index: usize, now: Now, attempts: u32, since: Timestamp, failure: &Failure) -> Failed {
        let noise = self.noise();
        let sub = &self.subs[index];
        let policy = &sub.spec.retry;
        let dead = failure.permanent || policy.is_dead(attempts, now.wall.since(since));
        let state = if dead && !sub.flood_guard.is_open() { State::Dead } else { State::Retrying };
        if state == State::Dead {
            *self.figures.dead.entry(sub.name.clone()).or_default() += 1;
        }
        let wait = policy.delay(attempts, noise).max(failure.retry_after.unwrap_or_default());
        let mut message = failure.message.clone();
        message.truncate(message.floor_char_boundary(ERROR_BYTES_MAX));
        let error = AttemptError { at: now.wall, attempt: attempts, kind: failure.kind.into(), message };
        Failed { state, attempts, due_at: now.wall.plus(wait), error }
    }

    fn fetched(&mut self, now: Now, events: Vec<Arc<Event>>) {
        self.call_succeeded(Call::Fetch);
        let claims = self.fetching.take().unwrap_or_default();
        let events: HashMap<Position, Arc<Event>> = events.into_iter().map(|event| (event.position, event)).collect();
        for claim in claims {
            let Claim { sub: index, lane: number, epoch, position, key } = claim;
            let sub = &mut self.subs[index];
            let Some(lane) = sub.lane_at(number, epoch) else { continue };
            let Some(row) = lane.row(key, position) else { continue };
            let (attempts, since) = (row.attempts, row.since);
            if lane.phase != Phase::Active {
                lane.unclaim(position, key);
                continue;
            }
            let Some(event) = events.get(&position) else {
                let failure = Failure::permanent("the event is neither in the log nor kept aside");
                let failed = self.failed(index, now, attempts + 1, since, &failure);
                let sub = &mut self.subs[index];
                let on_dead = sub.spec.on_dead;
                sub.lane_at(number, epoch).expect("checked above").fail(position, key, failed, on_dead);
                continue;
            };
            let careful = lane.careful;
            if careful {
                lane.announce(position, key);
            }
            let item = Item { event: event.clone(), key, lane: number, epoch, attempts, parked: true };
            sub.bytes += event.size();
            if careful { sub.announced.push(item) } else { sub.dispatcher.push(item) }
        }
    }

    // --- settling ---

    fn has_writes(&self) -> bool {
        !self.dead.is_empty() || self.subs.iter().flat_map(Sub::lanes).any(Lane::has_writes)
    }

    fn settled(&mut self, now: Now, written: Vec<bool>) {
        self.call_succeeded(Call::Settle);
        self.dead_settling = RangeSet::new();
        for (pending, written) in self.settling.take().unwrap_or_default().into_iter().zip(written) {
            let PendingWrite { write, done, announced } = pending;
            let (number, epoch) = (write.lane.lane, write.epoch);
            let Some(sub) = self.subs.iter_mut().find(|sub| sub.id == write.lane.subscription) else { continue };
            sub.window -= done;
            let Some(lane) = sub.lane_at(number, epoch) else { continue };
            if !written || write.release {
                self.observe_now = true;
                sub.drop_lane(number);
                continue;
            }
            lane.written = (write.cursor.floor, now.mono);
            let begin = |item: &mut Item| item.lane == number && announced.contains(&item.event.position);
            for item in sub.announced.extract_if(.., begin).collect::<Vec<_>>() {
                sub.dispatcher.push(item);
            }
        }
    }

    fn settle(&mut self, now: Now) {
        let due = self.last_settle.is_none_or(|last| now.mono >= last + self.settle_interval);
        let pressed = self.subs.iter().any(|sub| {
            let unwritten: usize = sub.lanes().map(|lane| lane.done_unwritten).sum();
            unwritten * 2 > self.config.in_flight_max
        });
        let quiet = |lane: &Lane, sub: &Sub| sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
        let leaving = |sub: &Sub| {
            sub.lanes().any(|lane| matches!(lane.phase, Phase::Releasing | Phase::Reloading) && (lane.phase == Phase::Releasing || lane.has_writes()) && quiet(lane, sub))
        };
        let leaving = self.subs.iter().any(leaving);
        if self.settling.is_some() || !self.may_call(now, Call::Settle) || !(due || pressed || leaving) {
            return;
        }
        let mut lanes = Vec::new();
        for sub in &mut self.subs {
            for lane in sub.lanes.iter_mut().flatten() {
                let releasing = lane.phase == Phase::Releasing && sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
                let idle_floor = lane.phase == Phase::Active
                    && now.mono >= lane.written.1 + self.config.floor_interval
                    && lane.written.0 < lane.top
                    && lane.open_count() == 0
                    && lane.holes.is_empty();
                if lane.phase == Phase::Waiting || !(lane.has_writes() || releasing || idle_floor) {
                    continue;
                }
                let (mut write, done) = lane.take_write(self.config.ranges_max);
                let announced = std::mem::take(&mut lane.announced);
                match self.config.mutant {
                    Some(Mutant::CursorAtHighestVisible) => {
                        write.cursor.floor = lane.top;
                        write.cursor.settled = RangeSet::new();
                    }
                    Some(Mutant::AbsoluteCursor) => {
                        write.cursor.floor = write.cursor.anchor.map_or(write.cursor.floor, |anchor| anchor.0.max(write.cursor.floor));
                        write.cursor.settled.remove_range(0, write.cursor.floor);
                    }
                    _ => {}
                }
                if releasing {
                    write.release = true;
                    lane.phase = Phase::Waiting;
                }
                lanes.push(PendingWrite { write, done, announced });
            }
        }
        if lanes.is_empty() && self.dead.is_empty() {
            return;
        }
        lanes.sort_by_key(|pending| pending.write.lane);
        self.last_settle = Some(now.mono);
        self.dead_settling = std::mem::take(&mut self.dead);
        let settlement = Settlement { lanes: lanes.iter().map(|pending| pending.write.clone()).collect(), dead: self.dead_settling.clone() };
        self.settling = Some(lanes);
        self.actions.push(Action::Settle(settlement));
    }

    // --- moving on ---

    fn advance(&mut self, now: Now) {
        if self.left {
            return;
        }
        self.quiesce();
        self.update_stopped();
        for index in 0..self.subs.len() {
            self.subs[index].promote(now);
            self.dispatch(now, index);
        }
        self.call_fleet(now);
        self.call_poll(now);
        self.call_fetch(now);
        self.settle(now);
        let empty = self.subs.iter().all(|sub| sub.lanes().next().is_none() && sub.dispatcher.in_flight() == 0);
        let calls = self.settling.is_some() || self.taking.is_some() || self.loading.is_some() || self.observing;
        if self.draining && empty && !calls && self.to_load.is_empty() {
            self.left = true;
            self.actions.push(Action::Leave);
        }
    }

    /// Lanes that are to be given up, loaded anew or paused drop what is not at the sink; once quiet they are loaded.
    fn quiesce(&mut self) {
        for (index, sub) in self.subs.iter_mut().enumerate() {
            for number in 0..sub.lanes.len() {
                let Some(lane) = &sub.lanes[number] else { continue };
                let (phase, epoch, reference) = (lane.phase, lane.epoch, lane.reference);
                if phase == Phase::Active {
                    continue;
                }
                sub.bytes -= sub.dispatcher.purge(number as u32);
                let lane = sub.lanes[number].as_mut().expect("checked above");
                let busy = sub.dispatcher.in_flight_of(number as u32) > 0 || lane.has_writes();
                let settling = self.settling.iter().flatten().any(|pending| pending.write.lane == reference);
                // A reload keeps the epoch, so nothing of the lane's life before may come back after it.
                let fetching = self.fetching.iter().flatten().any(|claim| claim.sub == index && claim.lane == number as u32);
                if phase == Phase::Reloading && !busy && !settling && !fetching {
                    lane.phase = Phase::Waiting;
                    self.to_load.push((reference, epoch));
                }
            }
        }
    }

    fn update_stopped(&mut self) {
        for sub in &mut self.subs {
            let chains: usize = sub.lanes().map(Lane::chains).sum();
            let rows: usize = sub.lanes().map(Lane::rows).sum();
            sub.stopped = if chains >= self.config.parked_max {
                Some(format!("{chains} keys are failing, as many as max_parked allows; requeue or skip some, or mend the receiver"))
            } else if rows - chains.min(rows) >= self.config.blocked_max {
                Some(format!("{rows} deliveries wait behind failing keys, as many as max_blocked allows"))
            } else if sub.lanes().any(|lane| lane.holes.len() >= self.config.ranges_max) {
                Some(format!("more than max_ranges = {} holes are open: a transaction with very many events has not ended", self.config.ranges_max))
            } else {
                None
            };
        }
    }

    fn dispatch(&mut self, now: Now, index: usize) {
        let sub = &mut self.subs[index];
        if sub.paused {
            return;
        }
        while sub.dispatcher.has_idle_worker() && sub.dispatcher.has_ready() {
            let breaker = &sub.breaker;
            let batch = match breaker.permit(now) {
                Permit::Nothing => return,
                Permit::All => sub.dispatcher.cut(|position| breaker.suspects(position)),
                Permit::Probe => {
                    let batch = sub.dispatcher.cut_probe(|position| breaker.suspects(position));
                    if batch.is_some() {
                        sub.breaker.probing();
                    }
                    batch
                }
            };
            let Some(batch) = batch else { return };
            let items = sub.dispatcher.batch(batch);
            let attempt = |item: &Item| Attempt { event: item.event.clone(), number: attempt_number(item), epoch: item.epoch };
            let events = items.iter().map(attempt).collect();
            if self.config.mutant == Some(Mutant::SettleBeforeDeliver) {
                let early: Vec<(u32, Position, uuid::Uuid)> =
                    items.iter().map(|item| (item.lane, item.event.position, item.event.id)).collect();
                for (lane, position, id) in early {
                    sub.lanes[lane as usize].iter_mut().for_each(|lane| lane.done(position, id));
                }
            }
            self.actions.push(Action::Deliver { batch: (index, batch), events });
        }
    }

    fn observe_wait(&self) -> Duration {
        if self.observe_now { OBSERVE_MIN } else { self.config.beat_interval.min(self.config.lease_ttl / 3) }
    }

    fn call_fleet(&mut self, now: Now) {
        let due = self.last_observe.is_none_or(|last| now.mono >= last + self.observe_wait());
        let leaving = self.draining && self.subs.iter().all(|sub| sub.lanes().next().is_none());
        if due && !leaving && !self.observing && self.may_call(now, Call::Observe) {
            self.observing = true;
            self.observe_now = false;
            self.last_observe = Some(now.mono);
            self.actions.push(Action::Observe(self.report()));
        }
        if self.taking.is_none() && !self.to_take.is_empty() && self.may_call(now, Call::Take) {
            let takes = std::mem::take(&mut self.to_take);
            self.taking = Some(takes.clone());
            self.actions.push(Action::Take(takes));
        }
        if self.loading.is_none() && !self.to_load.is_empty() && self.may_call(now, Call::Load) {
            let lanes = std::mem::take(&mut self.to_load);
            self.loading = Some(lanes.clone());
            self.actions.push(Action::Load(lanes));
        }
    }

    fn poll_wait(&self) -> Duration {
        if self.hole_polls > 0 {
            return HOLE_POLL.0.saturating_mul(self.hole_polls).min(HOLE_POLL.1).min(self.config.poll_interval);
        }
        self.config.poll_interval
    }

    fn call_poll(&mut self, now: Now) {
        let rang = self.rang_at.is_some_and(|at| now.mono >= at + self.config.debounce);
        let due = self.last_poll.is_none_or(|last| now.mono >= last + self.poll_wait());
        let behind = !self.stuck && self.polling.is_none() && self.is_behind();
        if self.polling.is_some() || !(rang || due || behind) || !self.may_call(now, Call::Poll) {
            return;
        }
        self.rang_at = None;
        self.stuck = false;
        self.last_poll = Some(now.mono);
        if let Some((request, plan)) = self.poll_request() {
            for lane in self.subs.iter_mut().flat_map(|sub| sub.lanes.iter_mut().flatten()) {
                lane.asked = lane.phase == Phase::Active;
            }
            self.polling = Some(plan);
            self.polls += 1;
            self.actions.push(Action::Poll(request));
        }
    }

    fn call_fetch(&mut self, now: Now) {
        if self.fetching.is_some() || !self.may_call(now, Call::Fetch) {
            return;
        }
        let mut claims = Vec::new();
        for (index, sub) in self.subs.iter_mut().enumerate() {
            if sub.paused || sub.breaker.permit(now) == Permit::Nothing || sub.bytes >= self.config.in_flight_bytes_max {
                continue;
            }
            let limit = (sub.spec.batch_size * sub.spec.workers).min(PROMOTE_MAX);
            let dispatcher = &sub.dispatcher;
            let free = |chain| matches!(chain, ChainKey::Alone(_)) || matches!(chain, ChainKey::Key(key) if !dispatcher.is_busy(key));
            for lane in sub.lanes.iter_mut().flatten().filter(|lane| lane.phase == Phase::Active) {
                if lane.careful && (!lane.announced.is_empty() || dispatcher.in_flight_of(lane.reference.lane) > 0) {
                    continue;
                }
                let (number, epoch) = (lane.reference.lane, lane.epoch);
                let due = lane.take_due(now.wall, limit, free);
                claims.extend(due.into_iter().map(|(position, key)| Claim { sub: index, lane: number, epoch, position, key }));
            }
        }
        if claims.is_empty() {
            return;
        }
        let mut positions: Vec<Position> = claims.iter().map(|claim| claim.position).collect();
        positions.sort_unstable();
        positions.dedup();
        self.fetching = Some(claims);
        self.actions.push(Action::Fetch(positions));
    }

    // --- calls that fail ---

    fn may_call(&self, now: Now, call: Call) -> bool {
        self.backoff.get(&call).is_none_or(|entry| now.mono >= entry.1)
    }

    fn call_succeeded(&mut self, call: Call) {
        self.backoff.remove(&call);
    }

    fn call_failed(&mut self, now: Now, call: Call) {
        let entry = self.backoff.entry(call).or_insert((0, now.mono));
        entry.0 += 1;
        let wait = CALL_BACKOFF.0.saturating_mul(1 << entry.0.min(16)).min(CALL_BACKOFF.1);
        entry.1 = now.mono + wait;
        match call {
            Call::Observe => {
                self.observing = false;
                self.observe_now = true;
            }
            // It may have happened: the next look at the fleet tells.
            Call::Take => {
                self.taking = None;
                self.observe_now = true;
            }
            Call::Load => self.to_load.append(&mut self.loading.take().unwrap_or_default()),
            Call::Poll => {
                self.polling = None;
                self.rang_at.get_or_insert(now.mono);
            }
            Call::Fetch => {
                for claim in self.fetching.take().unwrap_or_default() {
                    if let Some(lane) = self.subs[claim.sub].lane_at(claim.lane, claim.epoch) {
                        lane.unclaim(claim.position, claim.key);
                    }
                }
            }
            Call::Settle => self.restore_settling(),
        }
    }

    fn restore_settling(&mut self) {
        let dead = std::mem::take(&mut self.dead_settling);
        self.dead.union(&dead);
        for PendingWrite { write, done, announced } in self.settling.take().unwrap_or_default() {
            let Some(sub) = self.subs.iter_mut().find(|sub| sub.id == write.lane.subscription) else { continue };
            match sub.lane_at(write.lane.lane, write.epoch) {
                Some(lane) => {
                    if write.release {
                        lane.phase = Phase::Releasing;
                    }
                    lane.announced.splice(..0, announced);
                    lane.restore_write(write, done);
                }
                None => sub.window -= done,
            }
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

/// Whether a lane may use the answer to the poll under way: it was there, with this filter, when the poll was asked.
fn takes_part(lane: &Lane) -> bool {
    lane.phase == Phase::Active && lane.asked
}

fn attempt_number(item: &Item) -> u32 {
    item.attempts + 1
}

/// Scans that cover all holes, at most `limit`: beyond it the nearest neighbours are asked for as one.
fn coalesce(holes: &RangeSet, limit: usize) -> Vec<ScanRequest> {
    let mut ranges: Vec<(Position, Position)> = holes.iter().map(|range| (*range.start(), *range.end())).collect();
    if ranges.len() > limit {
        let mut gaps: Vec<(Position, usize)> = ranges.windows(2).enumerate().map(|(index, pair)| (pair[1].0 - pair[0].1, index)).collect();
        gaps.sort_unstable();
        let joined: HashSet<usize> = gaps.iter().take(ranges.len() - limit).map(|gap| gap.1).collect();
        let mut merged: Vec<(Position, Position)> = Vec::with_capacity(limit);
        for (index, range) in ranges.into_iter().enumerate() {
            match merged.last_mut() {
                Some(last) if index > 0 && joined.contains(&(index - 1)) => last.1 = range.1,
                _ => merged.push(range),
            }
        }
        ranges = merged;
    }
    ranges.into_iter().map(|(low, high)| ScanRequest { after: low - 1, to: high, limit: 0 }).collect()
}

impl Sub {
    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    fn active(&self) -> impl Iterator<Item = &Lane> {
        self.lanes().filter(|lane| lane.phase == Phase::Active)
    }

    fn lane(&self, number: u32) -> Option<&Lane> {
        self.lanes.get(number as usize)?.as_ref()
    }

    /// The lane, if it is still held under that epoch.
    fn lane_at(&mut self, number: u32, epoch: Epoch) -> Option<&mut Lane> {
        self.lanes.get_mut(number as usize)?.as_mut().filter(|lane| lane.epoch == epoch)
    }

    /// Notes for each lane the lowest of its holes that a poll did not look at.
    fn set_bounds(&mut self, covered: &RangeSet) {
        for lane in self.lanes.iter_mut().flatten() {
            let mut unseen = lane.holes.clone();
            unseen.subtract(covered);
            lane.bound = unseen.first().unwrap_or(Position::MAX);
        }
    }

    /// How many more events may be read.
    fn room(&self, config: &EngineConfig) -> usize {
        if self.stopped.is_some() || self.paused { 0 } else { config.in_flight_max.saturating_sub(self.window) }
    }

    /// Whether reading is worth a poll: a part of the window is free.
    fn has_room(&self, config: &EngineConfig) -> bool {
        self.room(config) > config.in_flight_max / 4 && self.bytes < config.in_flight_bytes_max
    }

    fn is_idle(&self, now: Now, horizon: Position) -> bool {
        let lane_idle = |lane: &Lane| {
            let read = lane.top >= horizon && lane.holes.is_empty() && lane.open_count() == 0;
            (read && lane.phase == Phase::Active && lane.next_due().is_none_or(|due| due > now.wall)) || lane.phase == Phase::Paused
        };
        let given_up = self.breaker.is_down() || self.stopped.is_some();
        let quiet = self.dispatcher.in_flight() == 0 && self.announced.is_empty();
        quiet && (given_up || (self.dispatcher.is_empty() && self.lanes().all(lane_idle)))
    }

    /// Takes an event that a scan showed.
    fn admit(&mut self, now: Now, number: u32, key: Option<crate::KeyHash>, event: &Arc<Event>, mutant: Option<Mutant>) {
        let lane = self.lanes[number as usize].as_mut().expect("the caller found the lane");
        debug_assert!(mutant.is_some() || event.position > lane.top || lane.holes.contains(event.position));
        lane.admit(event.position);
        self.window += 1;
        if lane.is_parked(event.position) {
            return lane.done(event.position, event.id);
        }
        if let Some(until) = event.deliver_at.filter(|&at| at > now.wall) {
            return lane.delay(event, until, now.wall);
        }
        if lane.careful || lane.has_chain(ChainKey::of(key, event.position)) {
            return lane.enqueue(event, now.wall);
        }
        self.bytes += event.size();
        self.dispatcher.push(Item { event: event.clone(), key, lane: number, epoch: lane.epoch, attempts: 0, parked: false });
    }

    fn succeed(&mut self, item: &Item) {
        self.breaker.success(item.event.position);
        self.flood_guard.note(item.key.map_or(item.event.position as u64, |key| key.0), false);
        let Some(lane) = self.lane_at(item.lane, item.epoch) else { return };
        if item.parked {
            lane.succeed(item.event.position, item.key);
        } else {
            lane.done(item.event.position, item.event.id);
        }
    }

    /// Of the events that were not tried, those that are to be sent again before anything else of their keys. Those of a failing
    /// key go behind its head; those of a lane that is gone or leaving are dropped.
    fn take_back(&mut self, now: Now, items: Vec<Item>) -> Vec<Item> {
        let mut front = Vec::new();
        let gated = &self.due_behind;
        for item in items {
            let position = item.event.position;
            let Some(lane) = self.lanes[item.lane as usize].as_mut().filter(|lane| lane.epoch == item.epoch) else {
                self.breaker.forget(position);
                continue;
            };
            if item.parked {
                lane.unclaim(position, item.key);
            } else if lane.has_chain(ChainKey::of(item.key, position)) || item.key.is_some_and(|key| gated.contains_key(&key)) {
                lane.enqueue(&item.event, now.wall);
            } else if lane.phase == Phase::Active {
                self.bytes += item.event.size();
                front.push(item);
            }
        }
        front
    }

    /// A key of a batch that is over is no longer under way. What waits for it is sent, or goes behind the key's failing head if
    /// there is one now: after what came back from the batch itself.
    fn release_key(&mut self, now: Now, item: &Item) {
        let Some(key) = item.key else { return };
        let delayed = self.due_behind.remove(&key).unwrap_or_default();
        let failing = self.lane_at(item.lane, item.epoch).is_some_and(|lane| lane.has_chain(ChainKey::Key(key)));
        let mut waiting = if failing || !delayed.is_empty() { self.dispatcher.extract(key) } else { Vec::new() };
        waiting.extend(self.dispatcher.release(key));
        let (mut head_is_sent, mut front) = (false, Vec::new());
        for item in waiting {
            let position = item.event.position;
            let (size, event) = (item.event.size(), item.event.clone());
            let Some(lane) = self.lanes[item.lane as usize].as_mut().filter(|lane| lane.epoch == item.epoch) else {
                self.bytes -= size;
                continue;
            };
            head_is_sent |= item.parked && lane.is_head(key, position);
            if if item.parked { head_is_sent } else { delayed.is_empty() && !lane.has_chain(ChainKey::Key(key)) } {
                front.push(item);
                continue;
            }
            self.bytes -= size;
            if item.parked { lane.unclaim(position, Some(key)) } else { lane.enqueue(&event, now.wall) }
        }
        // They are older than anything of the key that is ready.
        self.dispatcher.push_front(front);
        for (number, row) in delayed {
            if let Some(lane) = &mut self.lanes[number as usize] {
                lane.promote(row);
            }
        }
    }

    /// Delayed deliveries that are due take their place behind what their key has waiting.
    fn promote(&mut self, now: Now) {
        if self.paused || self.active().all(|lane| lane.next_due().is_none_or(|due| due > now.wall)) {
            return;
        }
        let ready = self.dispatcher.ready_keys();
        for number in 0..self.lanes.len() {
            let Some(lane) = self.lanes[number].as_mut().filter(|lane| lane.phase == Phase::Active) else { continue };
            for row in lane.take_delayed(now.wall, PROMOTE_MAX) {
                if let Some(key) = row.key_hash().filter(|&key| self.dispatcher.is_busy(key)) {
                    self.due_behind.entry(key).or_default().push((number as u32, row));
                    continue;
                }
                let key = row.key_hash().filter(|key| ready.contains(key));
                let waiting = key.map(|key| self.dispatcher.extract(key)).unwrap_or_default();
                let lane = self.lanes[number].as_mut().expect("checked above");
                for item in waiting {
                    self.bytes -= item.event.size();
                    if item.parked { lane.unclaim(item.event.position, item.key) } else { lane.enqueue(&item.event, now.wall) }
                }
                lane.promote(row);
            }
        }
    }

    /// Forgets a lane: it is another's now, or loaded anew.
    fn drop_lane(&mut self, number: u32) {
        let Some(lane) = self.lanes[number as usize].take() else { return };
        self.bytes -= self.dispatcher.purge(number);
        self.due_behind.values_mut().for_each(|rows| rows.retain(|row| row.0 != number));
        for item in self.announced.extract_if(.., |item| item.lane == number) {
            self.bytes -= item.event.size();
        }
        // Whatever is in a write under way leaves the window with that.
        self.window -= lane.window;
    }
}
