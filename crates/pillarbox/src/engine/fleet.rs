use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::delivering::Trial;
use super::subscriber::Subscriber;
use super::{Action, Engine, EngineConfig, Mutant};
use crate::breaker::Charge;
use crate::lane::{Lane, Phase};
use crate::ownership::CAREFUL_AFTER;
use crate::work::looked_at;
use crate::{
    Definition, Epoch, Failure, Fleet, InstanceId, LaneRef, LaneState, Lock, Mode, Now, SubscriptionId,
    SubscriptionView, Take, TakeCause,
};

/// After a ring the fleet is looked at too, but not more often than this.
const OBSERVE_MIN: Duration = Duration::from_millis(50);

/// Whether a lane of these subscriptions belongs to an instance that nobody can see to live: nobody works on it, and it is taken
/// over in a while.
fn orphaned(fleet: &Fleet, running: &[SubscriptionId], me: InstanceId) -> bool {
    let running: HashSet<&SubscriptionId> = running.iter().collect();
    looked_at(fleet.lanes.len());
    let lives = |owner| fleet.instances.iter().any(|instance| instance.id == owner && instance.lock == Lock::Held);
    let mut owned = fleet.lanes.iter().filter(|view| running.contains(&view.lane.subscription));
    owned.any(|view| view.owner.is_some_and(|owner| owner != me && !lives(owner)))
}

/// How often to beat: a claim lives by the beats of its instance.
pub(super) fn beat_interval(config: &EngineConfig, sub: &Subscriber) -> Duration {
    let claims = (sub.spec.mode == Mode::Queue).then_some(sub.definition.processing_timeout / 3);
    claims.map_or(config.beat_interval, |claims| config.beat_interval.min(claims))
}

/// What a deliberately broken variant goes by instead of the definition.
fn break_filter(mutant: Option<Mutant>, sub: &mut Subscriber) {
    if mutant == Some(Mutant::ReloadWithOldFilter) {
        let filter = sub.spec.filter.clone();
        sub.definition = Arc::new(Definition { filter, ..(*sub.definition).clone() });
    }
}

impl Engine {
    pub(super) fn observed(&mut self, now: Now, fleet: Fleet) {
        self.observing.succeed();
        self.seen_fleet = true;
        self.confirmed = self.last_observe;
        self.adopt_subscriptions(&fleet);
        let views: HashMap<LaneRef, (Option<InstanceId>, Epoch, i64)> =
            fleet.lanes.iter().map(|view| (view.lane, (view.owner, view.epoch, view.revision))).collect();
        let mut mine = HashMap::new();
        for sub in &mut self.subscribers {
            let (mut lost, mut anothers) = (Vec::new(), Vec::new());
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
                    view => {
                        lost.push(lane.reference.lane);
                        let is_anothers = view.is_some_and(|(owner, ..)| owner.is_some_and(|owner| owner != self.me));
                        anothers.extend(is_anothers.then_some(lane.reference.lane));
                    }
                }
            }
            sub.drop_lanes(lost);
            // Who has had the lane since may have died of the same attempt.
            sub.own_attempts.retain(|(lane, _), _| !anothers.contains(lane));
            if sub.adopt_keys(self.observes) {
                self.stuck = false;
                self.rang_at.get_or_insert(now.mono);
            }
        }
        if self.draining {
            return;
        }
        let running: Vec<SubscriptionId> = self.subscribers.iter().map(|sub| sub.id).collect();
        let seen: Vec<InstanceId> = fleet.instances.iter().map(|instance| instance.id).collect();
        self.orphaned = orphaned(&fleet, &running, self.me);
        let plan = self.ownership.plan(&fleet, &mine, &running, now.mono);
        self.note_dead(plan.dead, &seen);
        for lane in plan.release {
            if let Some(lane) = self.lane_mut(lane).filter(|lane| matches!(lane.phase, Phase::Active | Phase::Paused)) {
                lane.phase = Phase::Releasing;
            }
        }
        let loading = self
            .loading
            .in_flight()
            .into_iter()
            .flatten()
            .chain(&self.to_load)
            .chain(&self.to_load_later)
            .map(|entry| entry.0);
        let taking = self.taking.in_flight().into_iter().flatten().map(|take| take.lane);
        let under_way: HashSet<LaneRef> = loading.chain(taking).collect();
        let unknown = |take: &Take| !mine.contains_key(&take.lane) && !under_way.contains(&take.lane);
        self.to_take = plan.take.into_iter().filter(unknown).collect();
    }

    /// The newest started instance's definition wins; pauses are the operator's.
    pub(super) fn adopt_subscriptions(&mut self, fleet: &Fleet) {
        let views: HashMap<SubscriptionId, &SubscriptionView> =
            fleet.subscriptions.iter().map(|view| (view.id, view)).collect();
        looked_at(fleet.subscriptions.len());
        for sub in &mut self.subscribers {
            let Some(view) = views.get(&sub.id).copied() else { continue };
            self.figures.warnings.extend(sub.difference(view));
            if sub.adopt(&view.definition) {
                self.stuck = false;
                self.config.beat_interval = beat_interval(&self.config, sub);
                break_filter(self.config.mutant, sub);
            }
            if view.lanes != sub.lane_count {
                self.to_load.retain(|load| load.0.subscription != sub.id);
                self.to_load_later.retain(|load| load.0.subscription != sub.id);
                self.to_take.retain(|take| take.lane.subscription != sub.id);
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
        let takes = self.taking.succeed().unwrap_or_default();
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

    pub(super) fn loaded(&mut self, now: Now, states: Vec<Option<LaneState>>) {
        let lanes = self.loading.succeed().unwrap_or_default();
        for ((reference, epoch), state) in lanes.into_iter().zip(states) {
            let Some(index) = self.index_of(reference.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            sub.drop_lane(reference.lane);
            let Some(state) = state.filter(|_| reference.lane < sub.lane_count) else {
                // Somebody has raised the epoch: what became of the lane is seen with the fleet.
                self.observe_now = true;
                continue;
            };
            if sub.adopt(&state.definition) {
                self.config.beat_interval = beat_interval(&self.config, sub);
                break_filter(self.config.mutant, sub);
            }
            if state.definition.number < sub.definition.number {
                // Read before the definition that is known by now: the epoch may be over.
                self.to_load.push((reference, epoch));
                continue;
            }
            let mut lane = Lane::load(reference, epoch, state, sub.definition.on_dead, sub.spec.mode, CAREFUL_AFTER);
            lane.written.1 = now.mono;
            if self.draining {
                lane.phase = Phase::Releasing;
            } else if sub.paused || lane.overfull {
                lane.phase = Phase::Paused;
            }
            lane.quiet = lane.phase != Phase::Active;
            if self.config.mutant == Some(Mutant::JoinWithoutRereading) && lane.top < self.horizon {
                lane.top = self.horizon;
            }
            if self.config.mutant == Some(Mutant::PromoteBeforeReading) {
                lane.reads_again_to = None;
            }
            let (interrupted, own): (Vec<_>, Vec<_>) =
                lane.interrupted().into_iter().partition(|row| !sub.is_own_attempt(reference.lane, row));
            if own.iter().any(|row| sub.dispatcher.is_at_sink(reference.lane, row.position)) {
                self.to_load_later.push((reference, epoch));
                continue;
            }
            sub.own_attempts.retain(|(lane, _), _| *lane != reference.lane);
            // Nobody has died of what this process was about to do, or has done, when the lane's epoch was raised.
            own.iter().for_each(|row| lane.withdraw(row.position, row.key_hash()));
            sub.lanes[reference.lane as usize] = Some(lane);
            sub.lane_loaded(reference.lane);
            for row in interrupted {
                let failure =
                    Failure { kind: "crash", ..Failure::event("the process ended while it worked on this event") };
                let failed = self.failed(index, now, Trial::unread(&row, row.attempts), &failure, Charge::Event);
                let (on_dead, key) = (self.subscribers[index].definition.on_dead, row.key_hash());
                let lane = self.lane_mut(reference).expect("just loaded");
                lane.fail(row.position, key, failed, on_dead);
                lane.careful = true;
            }
            self.lane_mut(reference).expect("just loaded").begin_trial(now.wall);
        }
        self.rang_at.get_or_insert(now.mono);
    }

    pub(super) fn drain(&mut self) {
        self.draining = true;
        self.observe_now = true;
        self.to_take.clear();
        for lane in self.subscribers.iter_mut().flat_map(|sub| sub.lanes.iter_mut().flatten()) {
            if lane.phase != Phase::Waiting {
                lane.phase = Phase::Releasing;
            }
        }
    }

    pub(super) fn lane_mut(&mut self, lane: LaneRef) -> Option<&mut Lane> {
        let index = self.index_of(lane.subscription)?;
        self.subscribers[index].lanes.get_mut(lane.lane as usize)?.as_mut()
    }

    /// Lanes that are to be given up, loaded anew or paused drop what is not at the sink; once quiet they are loaded.
    pub(super) fn quiesce(&mut self) {
        let (subscribers, indexes) = (&self.subscribers, &self.indexes);
        let is_quiet = |load: &mut (LaneRef, Epoch)| {
            let sub = indexes.get(&load.0.subscription).map(|index| &subscribers[*index]);
            sub.is_none_or(|sub| sub.dispatcher.in_flight_of(load.0.lane) == 0)
        };
        self.to_load.extend(self.to_load_later.extract_if(.., is_quiet));
        let mut reloading: Vec<(usize, usize)> = Vec::new();
        for (index, sub) in self.subscribers.iter_mut().enumerate() {
            if sub.resting {
                continue;
            }
            looked_at(sub.lanes.len());
            let stops = |lane: &&Lane| !lane.quiet && !matches!(lane.phase, Phase::Active | Phase::Waiting);
            let stopping: Vec<u32> = sub.lanes().filter(stops).map(|lane| lane.reference.lane).collect();
            sub.settle_down(stopping);
            let idle = |lane: &&Lane| sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
            let reload = sub.lanes().filter(|lane| lane.phase == Phase::Reloading).filter(idle);
            reloading.extend(reload.map(|lane| (index, lane.reference.lane as usize)));
        }
        if reloading.is_empty() {
            return;
        }
        // A reload keeps the epoch, so nothing of the lane's life before may come back after it.
        let settling: HashSet<LaneRef> =
            self.settling.in_flight().into_iter().flatten().map(|pending| pending.write.lane).collect();
        let fetching: HashSet<(usize, u32)> =
            self.fetching.in_flight().into_iter().flatten().map(|claim| (claim.sub, claim.lane)).collect();
        looked_at(settling.len() + fetching.len());
        for (index, number) in reloading {
            let lane = self.subscribers[index].lanes[number].as_mut().expect("seen above");
            let under_way = settling.contains(&lane.reference) || fetching.contains(&(index, number as u32));
            if !under_way && !lane.has_writes() {
                lane.phase = Phase::Waiting;
                self.to_load.push((lane.reference, lane.epoch));
            }
        }
    }

    pub(super) fn observe_wait(&self) -> Duration {
        if self.observe_now { OBSERVE_MIN } else { self.config.beat_interval.min(self.config.lease_ttl / 3) }
    }

    /// When to look at the fleet again: regularly, and as soon as somebody's lease is over.
    pub(super) fn observe_at(&self) -> Option<Duration> {
        let last = self.last_observe?;
        let regular = last + self.observe_wait();
        Some(self.ownership.lease_end().filter(|end| *end > last).map_or(regular, |end| end.min(regular)))
    }

    pub(super) fn call_fleet(&mut self, now: Now) {
        let due = self.observe_at().is_none_or(|at| now.mono >= at);
        let leaving = self.draining && self.is_empty();
        if due && !leaving && self.observing.is_free(now) {
            self.observing.begin(());
            self.observes += 1;
            self.observe_now = false;
            self.last_observe = Some(now.mono);
            self.actions.push(Action::Observe(self.report()));
        }
        if !self.to_take.is_empty() && self.taking.is_free(now) {
            let takes = std::mem::take(&mut self.to_take);
            self.taking.begin(takes.clone());
            self.actions.push(Action::Take(takes));
        }
        if !self.to_load.is_empty() && self.loading.is_free(now) {
            let lanes = std::mem::take(&mut self.to_load);
            self.loading.begin(lanes.clone());
            self.actions.push(Action::Load(lanes));
        }
    }
}
