use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::PrunePolicy;
use pillarbox::store::{InstanceId, LaneRef, RangeSet, lane_of};
use pillarbox::{Event, Filter, Position};
use uuid::Uuid;

use super::definition::Judgement;
use super::{FAULTS_UNTIL, SUBSCRIPTIONS, Step, World};

/// What a lane has passed because a hold was over, and the filter then.
#[derive(Debug)]
pub(super) struct Jump {
    sub: usize,
    lanes: u32,
    lane: u32,
    passed: RangeSet,
    filter: Filter,
}

impl World {
    /// Retention runs, and removes nothing that somebody still needs.
    pub(super) fn prune(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(150_000, 900_000, Step::Prune);
        let keep = Duration::from_millis(self.random.below(1_500));
        let dead = self.random.chance(20).then(|| Duration::from_millis(self.random.below(3_000)));
        let slice = self.random.between(1, 200) as usize;
        let policy = PrunePolicy { keep: Some(keep), dead, slice, ..PrunePolicy::default() };
        let (before, settled, dead) = (self.log.visible(), self.settled_by_lane(), self.dead());
        let given_up: HashSet<(usize, Uuid)> =
            self.skipped.iter().copied().filter(|it| self.is_given_up(*it)).collect();
        let pruned = self.log.prune(&policy);
        self.note(format_args!("prune {pruned:?}"));
        self.run.pruned += pruned.events as usize;
        self.note_holds(keep, &before, settled);
        self.note_dead_gone(policy.dead, dead);
        let left: HashSet<Uuid> = self.log.visible().iter().map(|event| event.id).collect();
        for event in before.iter().filter(|event| !left.contains(&event.id)) {
            if event.stream_version.is_some() {
                self.violation(format!("retention removed {}, which is of a journal", event.position));
            }
            self.pruned.insert(event.id);
            self.check_pruned(event, &given_up);
        }
    }

    /// What each lane of each subscription has settled.
    fn settled_by_lane(&self) -> Vec<Vec<RangeSet>> {
        let inner = self.log.inner();
        let of = |name: &&str| {
            let row = inner.subscriptions.iter().find(|row| row.name == **name);
            row.map(|row| row.lanes.iter().map(|lane| lane.cursor.positions()).collect()).unwrap_or_default()
        };
        SUBSCRIPTIONS.iter().map(of).collect()
    }

    /// Only a hold that is over moves a floor: what was passed so was old enough, and is judged by the filter of now.
    fn note_holds(&mut self, keep: Duration, before: &[Arc<Event>], settled: Vec<Vec<RangeSet>>) {
        let now = self.log.time();
        for (sub, (was, is)) in settled.into_iter().zip(self.settled_by_lane()).enumerate() {
            let lanes = is.len() as u32;
            for (lane, (was, is)) in (0..).zip(was.into_iter().zip(is)) {
                let mut passed = is;
                passed.subtract(&was);
                if passed.is_empty() {
                    continue;
                }
                let hold = self.in_force[sub].hold.map(|hold| hold.max(keep));
                let of_lane = |event: &&Arc<Event>| {
                    lane_of(event.key_hash(), event.position, lanes) == lane && passed.contains(event.position)
                };
                for event in before.iter().filter(of_lane) {
                    if hold.is_none_or(|hold| now.since(event.created_at) <= hold) {
                        self.violation(format!("subscription {sub} lost {}, and its hold is not over", event.position));
                    }
                    self.drop_by_hold(sub, event, self.in_force[sub].filter.wants(event));
                }
                self.note(format_args!("the hold of {sub} is over: lane {lane} passes {passed}"));
                let filter = self.in_force[sub].filter.clone();
                self.jumps.push(Jump { sub, lanes, lane, passed, filter });
            }
        }
    }

    fn drop_by_hold(&mut self, sub: usize, event: &Event, wanted: bool) {
        // What a former filter had passed was delivered, or not wanted, whatever the cursor remembers of it.
        let judgement = *self.judged.entry((sub, event.id)).or_insert(Judgement { wanted, sealed: false });
        if wanted && !judgement.sealed && !self.has_row(sub, event) {
            self.run.held += 1;
            self.drop_event(sub, event.id);
        }
    }

    /// What becomes visible where a hold that was over has moved floors past it was given up before it was there.
    pub(super) fn note_late(&mut self, event: &Arc<Event>) {
        let passed = |jump: &&Jump| {
            lane_of(event.key_hash(), event.position, jump.lanes) == jump.lane && jump.passed.contains(event.position)
        };
        let late: Vec<(usize, bool)> =
            self.jumps.iter().filter(passed).map(|jump| (jump.sub, jump.filter.wants(event))).collect();
        for (sub, wanted) in late {
            self.judged.entry((sub, event.id)).or_insert(Judgement { wanted, sealed: true });
            self.drop_event(sub, event.id);
        }
    }

    /// A rewind reads again what was passed above the place.
    pub(super) fn forget_jumps(&mut self, sub: usize, to: Position) {
        for jump in self.jumps.iter_mut().filter(|jump| jump.sub == sub) {
            jump.passed.remove_range(to.saturating_add(1), Position::MAX);
        }
    }

    /// What is dead.
    fn dead(&self) -> Vec<(usize, Uuid)> {
        let inner = self.log.inner();
        let mut dead = Vec::new();
        for (sub, name) in SUBSCRIPTIONS.iter().enumerate() {
            let rows = inner.subscriptions.iter().filter(|row| row.name == *name).flat_map(|row| row.rows());
            let positions = rows.filter(|row| row.died_at.is_some()).map(|row| row.delivery.position);
            let event = |position| inner.rows.get(&position).or_else(|| inner.kept.get(&position));
            dead.extend(positions.filter_map(event).map(|event| (sub, event.id)));
        }
        dead
    }

    /// Dead deliveries that retention has removed are given up for good.
    fn note_dead_gone(&mut self, age: Option<Duration>, dead: Vec<(usize, Uuid)>) {
        let gone = |(sub, id): &(usize, Uuid)| {
            self.log.fate(*id, SUBSCRIPTIONS[*sub]).is_none_or(|fate| fate.delivery.is_none())
        };
        let gone: Vec<_> = dead.into_iter().filter(gone).collect();
        if age.is_none() && !gone.is_empty() {
            self.violation(format!("retention removed {} dead deliveries that are kept for ever", gone.len()));
        }
        self.run.dead_gone += gone.len();
        // Nobody can rewind to what is not in the log any more.
        self.blocked.extend(gone.iter().filter(|(_, id)| self.pruned.contains(id)));
        gone.into_iter().for_each(|(sub, id)| self.drop_event(sub, id));
    }

    fn drop_event(&mut self, sub: usize, id: Uuid) {
        self.dropped.insert((sub, id));
        self.ever_dropped.insert((sub, id));
    }

    fn is_given_up(&self, (sub, id): (usize, Uuid)) -> bool {
        self.log.fate(id, SUBSCRIPTIONS[sub]).is_some_and(|fate| fate.skipped.is_some())
    }

    /// Whether an event has a row in the delivery table.
    fn has_row(&self, sub: usize, event: &Event) -> bool {
        let Some(&subscription) = self.ids.get(sub) else { return false };
        let lane = lane_of(event.key_hash(), event.position, self.lane_count(sub));
        let inner = self.log.inner();
        let lane = inner.lane(LaneRef { subscription, lane });
        lane.is_some_and(|lane| lane.deliveries.contains_key(&event.position))
    }

    /// What is removed has arrived, was given up, or waits in the delivery table, with a copy kept aside.
    fn check_pruned(&mut self, event: &Arc<Event>, given_up: &HashSet<(usize, Uuid)>) {
        for sub in 0..SUBSCRIPTIONS.len() {
            if given_up.contains(&(sub, event.id)) || self.dropped.contains(&(sub, event.id)) {
                // For good: nobody can rewind to it any more.
                self.blocked.insert((sub, event.id));
                continue;
            }
            let arrived = self.arrived[sub].contains(&event.id);
            if self.wants(sub, event) && !arrived && !self.has_row(sub, event) {
                self.violation(format!("retention removed {}, which subscription {sub} had not got", event.position));
            }
        }
    }

    /// Every other one that is frozen or cut off stands in the middle of a transaction, where silence alone lets others take over.
    pub(super) fn hold(&mut self, instance: InstanceId) {
        if !self.features.lock_proves_life && self.random.chance(50) {
            self.run.holding += 1;
            self.log.hold(instance);
        }
    }
}
