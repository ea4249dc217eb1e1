use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::delivering::FailedTry;
use super::slot::Slot;
use super::subscriber::Subscriber;
use super::{Action, Call, Engine, EngineConfig, Mutant};
use crate::breaker::Charge;
use crate::database_clock::DatabaseClock;
use crate::lane::{Lane, Phase};
use crate::ownership::{Ownership, QUARANTINE_AFTER};
use crate::work::looked_at;
use crate::{
    Definition, Epoch, Failure, Fleet, InstanceId, Joined, LaneRef, LaneState, Lock, Mode, Now, StoreFeatures,
    SubscriptionId, SubscriptionView, Take, TakeCause, Timestamp,
};

/// This instance as a member of its fleet: its signs of life, and the lanes that it takes and loads.
#[derive(Debug)]
pub(super) struct Member {
    id: InstanceId,
    lease_ttl: Duration,
    beat_interval: Duration,
    /// No lease can overrule this instance as long as it lives.
    lock_proves_life: bool,
    ownership: Ownership,
    clock: DatabaseClock,
    observe: Slot<()>,
    take: Slot<Vec<Take>>,
    load: Slot<Vec<(LaneRef, Epoch)>>,
    to_take: Vec<Take>,
    to_load: Vec<(LaneRef, Epoch)>,
    /// Lanes with an attempt of this process at the sink that was recorded under an epoch which is over: loaded when it is.
    to_load_later: Vec<(LaneRef, Epoch)>,
    /// The fleet is to be looked at before the next beat is due.
    observe_soon: bool,
    /// How many looks at the fleet have begun.
    looks: u64,
    last_look: Option<Duration>,
    /// When the last look at the fleet began that came back: others count this instance's lease from then on or later.
    confirmed: Option<Duration>,
    /// At least one look at the fleet has come back.
    seen_fleet: bool,
    /// A lane that this instance could run has an owner that is gone, and waits for its lease to end.
    orphaned: bool,
    /// The lease may be over: nothing is sent until a look at the fleet has come back.
    expired: bool,
    draining: bool,
    left: bool,
}

/// After a ring the fleet is looked at too, but not more often than this.
const OBSERVE_MIN: Duration = Duration::from_millis(50);
/// One part in this many of a lease is left to others' clocks and to the calls that have to be given up.
const LEASE_MARGIN: u32 = 5;

impl Member {
    /// A member that has joined, at `mono` or before.
    pub(super) fn new(config: &EngineConfig, mono: Duration, joined: &Joined, features: StoreFeatures) -> Self {
        Member {
            id: joined.instance,
            lease_ttl: config.lease_ttl,
            beat_interval: config.beat_interval,
            lock_proves_life: features.lock_proves_life,
            ownership: Ownership::new(joined.instance, config.lease_ttl, features),
            clock: DatabaseClock::new(joined.time, mono),
            observe: Slot::default(),
            take: Slot::default(),
            load: Slot::default(),
            to_take: Vec::new(),
            to_load: Vec::new(),
            to_load_later: Vec::new(),
            observe_soon: true,
            looks: 0,
            last_look: None,
            confirmed: None,
            seen_fleet: false,
            orphaned: false,
            expired: false,
            draining: false,
            left: false,
        }
    }

    pub(super) fn id(&self) -> InstanceId {
        self.id
    }

    pub(super) fn now(&self, mono: Duration) -> Now {
        Now { mono, wall: self.clock.at(mono) }
    }

    /// Takes in the database's time, as the look at the fleet that is answered now has read it.
    pub(super) fn learn_time(&mut self, mono: Duration, time: Timestamp, mutant: Option<Mutant>) {
        let asked = self.last_look.unwrap_or(mono);
        match mutant {
            Some(Mutant::EarlyClock) => self.clock = DatabaseClock::new(time, asked),
            _ => self.clock.learn(time, asked, mono),
        }
    }

    /// The other instances, the last beat seen of each, and for how long no other was seen: up to the beginning of the last look, since
    /// after a pause of this relay the others may have beaten and not been looked at.
    pub(super) fn silent(&self) -> Vec<(InstanceId, i64, Duration)> {
        self.ownership.silent(self.confirmed.unwrap_or_default())
    }

    /// How often to beat.
    pub(super) fn beat_interval(&self) -> Duration {
        self.beat_interval
    }

    /// Beats often enough for the claims of a queue: they live by the beats of their instance.
    pub(super) fn beat_for(&mut self, sub: &Subscriber) {
        if sub.spec.mode == Mode::Queue {
            self.beat_interval = self.beat_interval.min(sub.definition.processing_timeout / 3);
        }
    }

    /// Looks at the fleet soon.
    pub(super) fn observe_soon(&mut self) {
        self.observe_soon = true;
    }

    /// How many looks at the fleet have begun.
    pub(super) fn looks(&self) -> u64 {
        self.looks
    }

    /// Whether a look at the fleet has come back.
    pub(super) fn has_seen_fleet(&self) -> bool {
        self.seen_fleet
    }

    /// Whether the lease may be over, so that nothing may be sent.
    pub(super) fn is_expired(&self) -> bool {
        self.expired
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether what is not at a sink is to be given up: nothing more is sent.
    pub(super) fn is_stopping(&self) -> bool {
        self.draining || self.expired
    }

    pub(super) fn has_left(&self) -> bool {
        self.left
    }

    pub(super) fn leave(&mut self) {
        self.left = true;
    }

    /// Whether a lane waits to be loaded.
    pub(super) fn has_loads(&self) -> bool {
        !self.to_load.is_empty() || !self.to_load_later.is_empty()
    }

    /// Whether a call is under way.
    pub(super) fn is_calling(&self) -> bool {
        self.observe.is_busy() || self.take.is_busy() || self.load.is_busy()
    }

    /// Whether the fleet is known, and no lane is about to be taken or loaded.
    pub(super) fn is_settled(&self) -> bool {
        let wants = self.observe_soon || !self.to_take.is_empty() || !self.to_load.is_empty();
        self.seen_fleet && !wants && !self.orphaned && !self.expired
    }

    /// Until when no other instance can have taken a lane of this one for want of a sign of life.
    pub(super) fn good_until(&self, mutant: Option<Mutant>) -> Option<Duration> {
        let endless = self.lock_proves_life || mutant == Some(Mutant::NoOwnDeadline);
        let lease = self.lease_ttl;
        self.confirmed.filter(|_| !endless).map(|begun| begun + (lease - lease / LEASE_MARGIN))
    }

    fn observe_wait(&self) -> Duration {
        if self.observe_soon { OBSERVE_MIN } else { self.beat_interval.min(self.lease_ttl / 3) }
    }

    /// When to look at the fleet again: regularly, and as soon as a lease is over.
    fn observe_at(&self) -> Option<Duration> {
        let last = self.last_look?;
        let regular = last + self.observe_wait();
        Some(self.ownership.lease_end().filter(|end| *end > last).map_or(regular, |end| end.min(regular)))
    }

    /// When something is to be done.
    pub(super) fn deadlines(&self, mutant: Option<Mutant>) -> [Option<Duration>; 5] {
        let retries = [self.observe.retry_at(), self.take.retry_at(), self.load.retry_at()];
        [self.observe_at(), self.good_until(mutant), retries[0], retries[1], retries[2]]
    }

    pub(super) fn call_failed(&mut self, now: Now, call: Call) {
        match call {
            // It may have happened: the next look at the fleet tells.
            Call::Take => {
                self.take.fail(now);
                self.observe_soon = true;
            }
            Call::Load => self.to_load.append(&mut self.load.fail(now).unwrap_or_default()),
            _ => {
                self.observe.fail(now);
                self.observe_soon = true;
            }
        }
    }

    /// What is planned for the lanes of a subscription is over: their number has changed.
    fn forget_lanes(&mut self, subscription: SubscriptionId) {
        self.to_load.retain(|load| load.0.subscription != subscription);
        self.to_load_later.retain(|load| load.0.subscription != subscription);
        self.to_take.retain(|take| take.lane.subscription != subscription);
    }

    /// Lanes that are about to be taken or loaded.
    fn lanes_to_come(&self) -> HashSet<LaneRef> {
        let loading = self.load.in_flight().into_iter().flatten();
        let loading = loading.chain(&self.to_load).chain(&self.to_load_later).map(|entry| entry.0);
        let taking = self.take.in_flight().into_iter().flatten().map(|take| take.lane);
        loading.chain(taking).collect()
    }
}

impl Engine {
    pub(super) fn observed(&mut self, now: Now, fleet: Fleet) {
        self.member.observe.succeed();
        self.member.seen_fleet = true;
        self.member.confirmed = self.member.last_look;
        self.adopt_subscriptions(&fleet);
        let mine = self.compare_lanes(now, &fleet);
        if self.member.draining {
            return;
        }
        let running: Vec<SubscriptionId> = self.subscribers.iter().map(|sub| sub.id).collect();
        let seen: Vec<InstanceId> = fleet.instances.iter().map(|instance| instance.id).collect();
        self.member.orphaned = orphaned(&fleet, &running, self.member.id);
        let plan = self.member.ownership.plan(&fleet, &mine, &running, now.mono);
        self.queues.note_ended(plan.ended, &seen);
        for lane in plan.release {
            if let Some(lane) =
                self.subscribers.lane_mut(lane).filter(|lane| matches!(lane.phase, Phase::Active | Phase::Paused))
            {
                lane.phase = Phase::Releasing;
            }
        }
        let under_way = self.member.lanes_to_come();
        let unknown = |take: &Take| !mine.contains_key(&take.lane) && !under_way.contains(&take.lane);
        self.member.to_take = plan.take.into_iter().filter(unknown).collect();
    }

    /// Drops lanes that are not this instance's any more, and lets those load again that an operator has changed. The lanes that are its
    /// own, with their epochs.
    fn compare_lanes(&mut self, now: Now, fleet: &Fleet) -> HashMap<LaneRef, Epoch> {
        let views: HashMap<LaneRef, (Option<InstanceId>, Epoch, i64)> =
            fleet.lanes.iter().map(|view| (view.lane, (view.owner, view.epoch, view.revision))).collect();
        let me = self.member.id;
        let mut mine = HashMap::new();
        for sub in self.subscribers.iter_mut() {
            let (mut lost, mut anothers) = (Vec::new(), Vec::new());
            for lane in sub.lanes.iter_mut().flatten() {
                match views.get(&lane.reference) {
                    Some(&(owner, epoch, revision)) if epoch == lane.epoch && owner == Some(me) => {
                        mine.insert(lane.reference, epoch);
                        if revision != lane.revision && matches!(lane.phase, Phase::Active | Phase::Paused) {
                            lane.phase = Phase::Reloading;
                        }
                    }
                    // A view may be older than what this instance has since taken; only a newer epoch is a loss.
                    Some(&(_, epoch, _)) if epoch <= lane.epoch => {
                        mine.insert(lane.reference, epoch.max(lane.epoch));
                    }
                    view => {
                        lost.push(lane.reference.lane);
                        let is_anothers = view.is_some_and(|(owner, ..)| owner.is_some_and(|owner| owner != me));
                        anothers.extend(is_anothers.then_some(lane.reference.lane));
                    }
                }
            }
            sub.drop_lanes(lost);
            // Who has had the lane since may have died of the same attempt.
            sub.own_attempts.retain(|(lane, _), _| !anothers.contains(lane));
            if sub.adopt_keys(self.member.looks) {
                self.reader.try_again();
                self.reader.ring(now);
            }
        }
        mine
    }

    /// The newest started instance's definition wins; pauses are the operator's.
    pub(super) fn adopt_subscriptions(&mut self, fleet: &Fleet) {
        let views: HashMap<SubscriptionId, &SubscriptionView> =
            fleet.subscriptions.iter().map(|view| (view.id, view)).collect();
        looked_at(fleet.subscriptions.len());
        for sub in self.subscribers.iter_mut() {
            let Some(view) = views.get(&sub.id).copied() else { continue };
            self.journal.figures().warnings.extend(sub.config_drift(view));
            if sub.adopt(&view.definition) {
                self.reader.try_again();
                self.member.beat_for(sub);
                break_filter(self.config.mutant, sub);
            }
            if view.lanes != sub.lane_count {
                self.member.forget_lanes(sub.id);
                sub.drop_lanes(0..sub.lane_count);
                sub.lane_count = view.lanes;
                sub.lanes = (0..view.lanes).map(|_| None).collect();
            }
            if view.paused != sub.paused {
                sub.paused = view.paused;
                let (from, to) =
                    if sub.paused { (Phase::Active, Phase::Paused) } else { (Phase::Paused, Phase::Reloading) };
                sub.lanes.iter_mut().flatten().filter(|lane| lane.phase == from).for_each(|lane| lane.phase = to);
            }
        }
    }

    pub(super) fn taken(&mut self, epochs: Vec<Option<Epoch>>) {
        let takes = self.member.take.succeed().unwrap_or_default();
        for (take, epoch) in takes.iter().zip(epochs) {
            if let Some(epoch) = epoch {
                if take.cause != TakeCause::Free {
                    *self.journal.figures().takeovers.entry(take.cause.name()).or_default() += 1;
                }
                self.member.to_load.push((take.lane, epoch));
            }
        }
        self.member.observe_soon = true;
    }

    pub(super) fn loaded(&mut self, now: Now, states: Vec<Option<LaneState>>) {
        let lanes = self.member.load.succeed().unwrap_or_default();
        for ((reference, epoch), state) in lanes.into_iter().zip(states) {
            let Some(index) = self.subscribers.index_of(reference.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            sub.drop_lane(reference.lane);
            let Some(state) = state.filter(|_| reference.lane < sub.lane_count) else {
                // Somebody has raised the epoch: what became of the lane is seen with the fleet.
                self.member.observe_soon = true;
                continue;
            };
            if sub.adopt(&state.definition) {
                self.member.beat_for(sub);
                break_filter(self.config.mutant, sub);
            }
            if state.definition.number < sub.definition.number {
                // Read before the definition that is known by now: the epoch may be over.
                self.member.to_load.push((reference, epoch));
                continue;
            }
            self.begin_lane(now, index, (reference, epoch), state);
        }
        self.reader.ring(now);
    }

    /// Begins to work on a lane that was loaded, unless an attempt that was recorded under an epoch which is over is still at the sink.
    fn begin_lane(&mut self, now: Now, index: usize, (reference, epoch): (LaneRef, Epoch), state: LaneState) {
        let mut lane = self.new_lane(now, index, (reference, epoch), state);
        let sub = &mut self.subscribers[index];
        let (interrupted, own): (Vec<_>, Vec<_>) =
            lane.queues.interrupted().into_iter().partition(|row| !sub.is_own_attempt(reference.lane, row));
        if own.iter().any(|row| sub.dispatcher.is_at_sink(reference.lane, row.position)) {
            self.member.to_load_later.push((reference, epoch));
            return;
        }
        sub.own_attempts.retain(|(lane, _), _| *lane != reference.lane);
        // Nobody has died of what this process was about to do, or has done, when the lane's epoch was raised.
        own.iter().for_each(|row| lane.cancel_attempt(row.position, row.key_hash()));
        sub.lanes[reference.lane as usize] = Some(lane);
        sub.lane_loaded(reference.lane);
        for row in interrupted {
            let failure =
                Failure { kind: "crash", ..Failure::event("the process ended while it worked on this event") };
            let failed = self.failed(index, now, FailedTry::unread(&row, row.attempts), &failure, Charge::Event);
            let on_dead = self.subscribers[index].definition.on_dead;
            let lane = self.subscribers.lane_mut(reference).expect("just loaded");
            lane.fail_interrupted(&row, failed, on_dead);
            lane.quarantine();
        }
        self.subscribers.lane_mut(reference).expect("just loaded").begin_probation(now.wall);
    }

    fn new_lane(&self, now: Now, index: usize, (reference, epoch): (LaneRef, Epoch), state: LaneState) -> Lane {
        let sub = &self.subscribers[index];
        let (on_dead, mode) = (sub.definition.on_dead, sub.spec.mode);
        let mut lane = Lane::load(reference, epoch, state, on_dead, mode, QUARANTINE_AFTER, &sub.window);
        lane.note_loaded(now.mono);
        if self.member.draining {
            lane.phase = Phase::Releasing;
        } else if sub.paused || lane.overfull {
            lane.phase = Phase::Paused;
        }
        lane.quiet = lane.phase != Phase::Active;
        if self.config.mutant == Some(Mutant::JoinWithoutRereading) && lane.cursor.top() < self.reader.horizon() {
            lane.cursor.rise(self.reader.horizon());
        }
        if self.config.mutant == Some(Mutant::PromoteBeforeReading) {
            lane.queues.forget_reads();
        }
        lane
    }

    pub(super) fn drain(&mut self) {
        self.member.draining = true;
        self.member.observe_soon = true;
        self.member.to_take.clear();
        for lane in self.subscribers.lanes_mut() {
            if lane.phase != Phase::Waiting {
                lane.phase = Phase::Releasing;
            }
        }
    }

    /// Stops sending when the lease may be over, and goes on when it is known not to be.
    pub(super) fn expire(&mut self, now: Now) {
        let over = self.good_until().is_some_and(|end| now.mono >= end);
        if over == self.member.expired {
            return;
        }
        self.member.expired = over;
        let at_sink = self.subscribers.iter().any(|sub| sub.dispatcher.in_flight() > 0);
        if over && at_sink && self.config.mutant != Some(Mutant::CallsOutliveDeadline) {
            self.actions.push(Action::Abort);
        }
        if over {
            self.journal.warn(format!(
                "the database has not answered for most of lease_ttl = {:?}, and others may take this relay to have ended: nothing is \
                 delivered until it answers",
                self.member.lease_ttl
            ));
        }
    }

    /// Lanes that are to be given up, loaded again or paused drop what is not at the sink; once quiet they are loaded.
    pub(super) fn quiesce(&mut self) {
        let subscribers = &self.subscribers;
        let is_quiet = |load: &mut (LaneRef, Epoch)| {
            let sub = subscribers.find(load.0.subscription);
            sub.is_none_or(|sub| sub.dispatcher.in_flight_of(load.0.lane) == 0)
        };
        self.member.to_load.extend(self.member.to_load_later.extract_if(.., is_quiet));
        let mut reloading: Vec<(usize, usize)> = Vec::new();
        for (index, sub) in self.subscribers.iter_mut().enumerate() {
            if sub.resting {
                continue;
            }
            looked_at(sub.lanes.len());
            let stops = |lane: &&Lane| !lane.quiet && !matches!(lane.phase, Phase::Active | Phase::Waiting);
            let stopping: Vec<u32> = sub.lanes().filter(stops).map(|lane| lane.reference.lane).collect();
            sub.quiesce_lanes(stopping);
            let idle = |lane: &&Lane| sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
            let reload = sub.lanes().filter(|lane| lane.phase == Phase::Reloading).filter(idle);
            reloading.extend(reload.map(|lane| (index, lane.reference.lane as usize)));
        }
        if reloading.is_empty() {
            return;
        }
        // A reload keeps the epoch, so nothing of the lane's life before may come back after it.
        let settling: HashSet<LaneRef> = self.settler.writes().map(|write| write.lane).collect();
        let fetching = self.fetcher.lanes();
        looked_at(settling.len() + fetching.len());
        for (index, number) in reloading {
            let lane = self.subscribers[index].lanes[number].as_mut().expect("seen above");
            let under_way = settling.contains(&lane.reference) || fetching.contains(&(index, number as u32));
            if !under_way && !lane.has_writes() {
                lane.phase = Phase::Waiting;
                self.member.to_load.push((lane.reference, lane.epoch));
            }
        }
    }

    pub(super) fn call_fleet(&mut self, now: Now) {
        let due = self.member.observe_at().is_none_or(|at| now.mono >= at);
        let leaving = self.member.draining && self.is_empty();
        if due && !leaving && self.member.observe.is_free(now) {
            self.member.observe.begin(());
            self.member.looks += 1;
            self.member.observe_soon = false;
            self.member.last_look = Some(now.mono);
            self.actions.push(Action::Observe(self.report()));
        }
        let Member { take, load, to_take, to_load, .. } = &mut self.member;
        if !to_take.is_empty() && take.is_free(now) {
            let takes = std::mem::take(to_take);
            take.begin(takes.clone());
            self.actions.push(Action::Take(takes));
        }
        if !to_load.is_empty() && load.is_free(now) {
            let lanes = std::mem::take(to_load);
            load.begin(lanes.clone());
            self.actions.push(Action::Load(lanes));
        }
    }
}

/// Whether a lane of these subscriptions belongs to an instance that shows no sign of life: it is not worked on, and it is taken
/// over in a while.
fn orphaned(fleet: &Fleet, running: &[SubscriptionId], me: InstanceId) -> bool {
    let running: HashSet<&SubscriptionId> = running.iter().collect();
    looked_at(fleet.lanes.len());
    let lives = |owner| fleet.instances.iter().any(|instance| instance.id == owner && instance.lock == Lock::Held);
    let mut owned = fleet.lanes.iter().filter(|view| running.contains(&view.lane.subscription));
    owned.any(|view| view.owner.is_some_and(|owner| owner != me && !lives(owner)))
}

/// What a deliberately broken variant goes by instead of the definition.
fn break_filter(mutant: Option<Mutant>, sub: &mut Subscriber) {
    if mutant == Some(Mutant::ReloadWithOldFilter) {
        let filter = sub.spec.filter.clone();
        sub.definition = Arc::new(Definition { filter, ..(*sub.definition).clone() });
    }
}
