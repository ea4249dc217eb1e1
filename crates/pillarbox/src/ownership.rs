use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::backoff::Backoff;
use crate::work::looked_at;
use crate::{
    Epoch, Fleet, InstanceId, InstanceView, LaneRef, LaneView, Lock, RecoveryCause, StoreFeatures, SubscriptionId,
    Take, TakeCause,
};

/// A lane seized this often without progress is in quarantine.
pub(crate) const QUARANTINE_AFTER: u32 = 2;
/// How long a lane in quarantine is left alone after its owner's death, at first and at most; it doubles with each seizure. An event that
/// kills the process that works on it must not end a whole fleet at once.
const SEIZE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// Decides which lanes this instance takes and which it gives back. Every instance decides alike from the same view; where
/// views differ for a moment, the epoch lets only one of them win.
#[derive(Debug)]
pub(crate) struct Ownership {
    me: InstanceId,
    lease_ttl: Duration,
    features: StoreFeatures,
    /// The last beat seen of each instance, and when it was first seen on this instance's own clock.
    beats: HashMap<InstanceId, (i64, Duration)>,
    /// Instances that have beaten since this one first saw them.
    beating: HashSet<InstanceId>,
    /// When each owner that has ended was first seen to be.
    ended_since: HashMap<InstanceId, Duration>,
    /// When the first of the living counts as ended unless it beats.
    lease_end: Option<Duration>,
}

/// The instance whose lock is watched by `me`: the next higher one, the lowest after the highest.
pub fn neighbour_of(me: InstanceId, instances: impl IntoIterator<Item = InstanceId>) -> Option<InstanceId> {
    let mut others: Vec<_> = instances.into_iter().filter(|other| *other != me).collect();
    others.sort_unstable();
    others.iter().find(|other| **other > me).or(others.first()).copied()
}

/// What to do about lanes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Plan {
    /// Lanes to take.
    pub(crate) take: Vec<Take>,
    /// Own lanes that another instance should have.
    pub(crate) release: Vec<LaneRef>,
    /// Instances that have ended, why, and if it was their lease, at which beat.
    pub(crate) ended: Vec<(InstanceId, RecoveryCause, Option<i64>)>,
}

impl Ownership {
    /// For this instance.
    pub(crate) fn new(me: InstanceId, lease_ttl: Duration, features: StoreFeatures) -> Self {
        Ownership {
            me,
            lease_ttl,
            features,
            beats: HashMap::new(),
            beating: HashSet::new(),
            ended_since: HashMap::new(),
            lease_end: None,
        }
    }

    /// When to look again, besides regularly: the lease of one that has not beaten since is over then.
    pub(crate) fn lease_end(&self) -> Option<Duration> {
        self.lease_end
    }

    /// The other instances, the last beat seen of each, and for how long no other was seen.
    pub(crate) fn silent(&self, now: Duration) -> Vec<(InstanceId, i64, Duration)> {
        let others = self.beats.iter().filter(|(id, _)| **id != self.me);
        let mut silent: Vec<_> = others.map(|(id, (beat, since))| (*id, *beat, now.saturating_sub(*since))).collect();
        silent.sort_unstable();
        silent
    }

    /// Plans from what can be seen. `mine` are the lanes in memory with their epochs.
    pub(crate) fn plan(
        &mut self,
        fleet: &Fleet,
        mine: &HashMap<LaneRef, Epoch>,
        running: &[SubscriptionId],
        now: Duration,
    ) -> Plan {
        self.note_beats(fleet, now);
        let deaths: HashMap<InstanceId, Option<TakeCause>> =
            fleet.instances.iter().map(|instance| (instance.id, self.death(instance, now))).collect();
        self.note_deaths(fleet, &deaths, now);
        let others = fleet.instances.iter().filter(|other| other.id != self.me && deaths[&other.id].is_none());
        let ends = others.filter_map(|other| Some(self.beats.get(&other.id)?.1 + self.lease_ttl));
        self.lease_end = ends.min().filter(|_| !self.features.lock_proves_life);
        let mut plan = Plan::default();
        for (instance, cause) in &deaths {
            let Some(cause) = *cause else { continue };
            let beat = self.beats.get(instance).map(|seen| seen.0).filter(|_| cause == TakeCause::Lease);
            plan.ended.push((*instance, cause.into(), beat));
        }
        plan.ended.sort_by_key(|entry| entry.0);
        let running: HashSet<&SubscriptionId> = running.iter().collect();
        let runs: HashSet<(InstanceId, SubscriptionId)> = fleet
            .instances
            .iter()
            .flat_map(|instance| instance.subscriptions.iter().map(|subscription| (instance.id, *subscription)))
            .collect();
        let mut lanes: HashMap<SubscriptionId, Vec<&LaneView>> = HashMap::new();
        fleet.lanes.iter().for_each(|view| lanes.entry(view.lane.subscription).or_default().push(view));
        looked_at(runs.len() + fleet.lanes.len());
        for subscription in fleet.subscriptions.iter().filter(|subscription| running.contains(&subscription.id)) {
            looked_at(fleet.instances.len());
            let mut able: Vec<InstanceId> = fleet
                .instances
                .iter()
                .filter(|instance| {
                    deaths[&instance.id].is_none()
                        && self.gives_signs(instance)
                        && !instance.draining
                        && runs.contains(&(instance.id, subscription.id))
                })
                .map(|instance| instance.id)
                .collect();
            able.sort();
            for &view in lanes.get(&subscription.id).into_iter().flatten() {
                let target = able.get(view.lane.lane as usize * able.len() / subscription.lanes.max(1) as usize);
                let held = mine.get(&view.lane) == Some(&view.epoch);
                if target != Some(&self.me) {
                    if held && target.is_some() {
                        plan.release.push(view.lane);
                    } else if !held && view.owner == Some(self.me) {
                        // Its own by name only, since an operator raised the epoch: only who holds a lane can give it back.
                        plan.take.push(self.take(view, TakeCause::Free));
                    }
                    continue;
                }
                plan.take.extend(self.cause(view, held, &deaths, now).map(|cause| self.take(view, cause)));
            }
        }
        plan
    }

    /// Why this instance may take a lane that it should have; None: not yet, or it is its own already.
    fn cause(
        &self,
        view: &LaneView,
        held: bool,
        deaths: &HashMap<InstanceId, Option<TakeCause>>,
        now: Duration,
    ) -> Option<TakeCause> {
        let owner = match view.owner {
            None => return Some(TakeCause::Free),
            Some(owner) if owner == self.me => return (!held).then_some(TakeCause::Free),
            Some(owner) => owner,
        };
        // An owner without a row has left, or was removed by another.
        let cause = deaths.get(&owner).copied().unwrap_or(Some(TakeCause::Lock))?;
        let since = self.ended_since.get(&owner).copied().unwrap_or(now);
        (now >= since + seize_wait(view.takeovers)).then_some(cause)
    }

    fn take(&self, view: &LaneView, cause: TakeCause) -> Take {
        let seen = view.owner.and_then(|owner| self.beats.get(&owner)).map(|seen| seen.0);
        Take { lane: view.lane, expected: view.epoch, cause, beat: seen.filter(|_| cause == TakeCause::Lease) }
    }

    fn note_deaths(&mut self, fleet: &Fleet, deaths: &HashMap<InstanceId, Option<TakeCause>>, now: Duration) {
        let owners = fleet.lanes.iter().filter_map(|view| view.owner).filter(|owner| *owner != self.me);
        let ended: HashSet<InstanceId> = owners.filter(|owner| deaths.get(owner).is_none_or(Option::is_some)).collect();
        self.ended_since.retain(|id, _| ended.contains(id));
        ended.into_iter().for_each(|id| _ = self.ended_since.entry(id).or_insert(now));
    }

    fn note_beats(&mut self, fleet: &Fleet, now: Duration) {
        let seen: HashSet<InstanceId> = fleet.instances.iter().map(|instance| instance.id).collect();
        self.beats.retain(|id, _| seen.contains(id));
        self.beating.retain(|id| seen.contains(id));
        for instance in &fleet.instances {
            let entry = self.beats.entry(instance.id).or_insert((instance.beat, now));
            if entry.0 != instance.beat {
                *entry = (instance.beat, now);
                self.beating.insert(instance.id);
            }
        }
    }

    /// Whether an instance gets lanes: the row of one that died long ago says nothing else than that of one which has just joined. What it
    /// owns stays its own until its lease is over.
    fn gives_signs(&self, instance: &InstanceView) -> bool {
        instance.id == self.me || instance.lock == Lock::Held || self.beating.contains(&instance.id)
    }

    fn death(&self, instance: &InstanceView, now: Duration) -> Option<TakeCause> {
        if instance.id == self.me {
            return None;
        }
        match instance.lock {
            Lock::Free => Some(TakeCause::Lock),
            Lock::Held if self.features.lock_proves_life => None,
            Lock::Held | Lock::Unknown => {
                let silent =
                    self.beats.get(&instance.id).is_some_and(|seen| now.saturating_sub(seen.1) >= self.lease_ttl);
                silent.then_some(TakeCause::Lease)
            }
        }
    }
}

/// How long a lane is left alone after its owner's death.
fn seize_wait(takeovers: u32) -> Duration {
    takeovers.checked_sub(QUARANTINE_AFTER).map_or(Duration::ZERO, |doublings| SEIZE_BACKOFF.doubled(doublings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instance_is_watched_by_exactly_one_other() {
        let all = [3, 5, 9].map(InstanceId);
        let watched: Vec<_> = all.iter().filter_map(|me| neighbour_of(*me, all)).collect();
        assert_eq!(watched, [5, 9, 3].map(InstanceId));
        assert_eq!(neighbour_of(InstanceId(3), [InstanceId(3)]), None);
    }
    use crate::{Definition, LaneView, SubscriptionView};

    const SUBSCRIPTION: SubscriptionId = SubscriptionId(1);

    fn lane(number: u32) -> LaneRef {
        LaneRef { subscription: SUBSCRIPTION, lane: number }
    }

    fn fleet(instances: &[(i64, i64, Lock)], owners: &[Option<i64>]) -> Fleet {
        let view = |&(id, beat, lock): &(i64, i64, Lock)| InstanceView {
            id: InstanceId(id),
            draining: false,
            beat,
            lock,
            subscriptions: vec![SUBSCRIPTION],
        };
        let lanes = owners.iter().enumerate().map(|(number, owner)| LaneView {
            lane: lane(number as u32),
            owner: owner.map(InstanceId),
            epoch: 5,
            revision: 0,
            takeovers: 0,
        });
        Fleet {
            instances: instances.iter().map(view).collect(),
            subscriptions: vec![SubscriptionView {
                id: SUBSCRIPTION,
                name: "s".into(),
                definition: Definition::default(),
                lanes: owners.len() as u32,
                paused: false,
                created: false,
            }],
            lanes: lanes.collect(),
            time: crate::Timestamp(0),
        }
    }

    fn ownership(lock_proves_life: bool) -> Ownership {
        let features = StoreFeatures { lock_proves_life, settle_interval: Duration::ZERO };
        Ownership::new(InstanceId(1), Duration::from_secs(10), features)
    }

    fn taken(plan: &Plan) -> Vec<(u32, TakeCause)> {
        plan.take.iter().map(|take| (take.lane.lane, take.cause)).collect()
    }

    #[test]
    fn a_row_that_somebody_left_behind_gets_no_lanes() {
        let mut ownership = ownership(false);
        let ghosts = [(1, 1, Lock::Held), (2, 7, Lock::Unknown), (3, 7, Lock::Unknown)];
        let plan = ownership.plan(&fleet(&ghosts, &[None; 6]), &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(taken(&plan).len(), 6, "nobody else takes lanes that are free");
        let beating = [(1, 2, Lock::Held), (2, 8, Lock::Unknown), (3, 7, Lock::Unknown)];
        let plan = ownership.plan(&fleet(&beating, &[None; 6]), &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(taken(&plan).len(), 3, "one of the others lives");
        let owned = [(1, 2, Lock::Held), (3, 7, Lock::Unknown)];
        let plan = ownership.plan(&fleet(&owned, &[Some(3); 6]), &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(taken(&plan), [], "what it owns is its own until its lease is over");
    }

    #[test]
    fn shares_lanes_evenly_and_gives_back_what_is_not_its_own() {
        let mut ownership = ownership(true);
        let alone = fleet(&[(1, 1, Lock::Held)], &[None, None, None, None]);
        assert_eq!(taken(&ownership.plan(&alone, &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO)).len(), 4);
        let mine: HashMap<LaneRef, Epoch> = (0..4).map(|number| (lane(number), 5)).collect();
        let joined = fleet(&[(1, 1, Lock::Held), (2, 1, Lock::Held)], &[Some(1); 4]);
        let plan = ownership.plan(&joined, &mine, &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(plan.release, [lane(2), lane(3)]);
        assert!(plan.take.is_empty());
    }

    #[test]
    fn a_lane_that_is_its_own_by_name_only_is_taken_so_that_it_can_be_given_back() {
        let mut ownership = ownership(true);
        let view = fleet(&[(1, 1, Lock::Held), (2, 1, Lock::Held)], &[Some(1), Some(1)]);
        let plan = ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(taken(&plan), [(0, TakeCause::Free), (1, TakeCause::Free)]);
    }

    #[test]
    fn a_freed_lock_is_seized_at_once() {
        let mut ownership = ownership(false);
        let view = fleet(&[(1, 1, Lock::Held), (2, 9, Lock::Free)], &[Some(2), Some(2)]);
        let plan = ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::ZERO);
        assert_eq!(taken(&plan), [(0, TakeCause::Lock), (1, TakeCause::Lock)]);
    }

    #[test]
    fn a_silent_owner_is_seized_after_the_lease_unless_it_beats_meanwhile() {
        let mut ownership = ownership(false);
        let view = fleet(&[(1, 1, Lock::Held), (2, 9, Lock::Held)], &[Some(2), Some(2)]);
        let mut at = |view: &Fleet, seconds| {
            ownership.plan(view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_secs(seconds))
        };
        assert_eq!(taken(&at(&view, 0)), []);
        assert_eq!(taken(&at(&view, 9)), []);
        let plan = at(&view, 10);
        assert_eq!(taken(&plan), [(0, TakeCause::Lease), (1, TakeCause::Lease)]);
        assert!(plan.take.iter().all(|take| take.beat == Some(9)), "the store is told which beat stood still");
        let beaten = fleet(&[(1, 1, Lock::Held), (2, 10, Lock::Held)], &[Some(2), Some(2)]);
        assert_eq!(taken(&at(&beaten, 11)), []);
        assert_eq!(taken(&at(&beaten, 20)), []);
        assert_eq!(taken(&at(&beaten, 21)).len(), 2);
    }

    #[test]
    fn the_end_of_a_lease_is_known_in_advance() {
        for (lock_proves_life, end) in [(false, Some(Duration::from_secs(13))), (true, None)] {
            let mut ownership = ownership(lock_proves_life);
            let mut at = |beat, seconds| {
                let view = fleet(&[(1, 1, Lock::Held), (2, beat, Lock::Held)], &[Some(2), Some(2)]);
                ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_secs(seconds));
                ownership.lease_end()
            };
            at(8, 0);
            at(9, 3);
            assert_eq!(at(9, 4), end, "ten seconds after the beat was first seen");
            assert_eq!(at(9, 13), None, "it is over");
        }
    }

    #[test]
    fn a_careful_lane_is_left_alone_for_longer_with_each_seizure() {
        for (takeovers, wait) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (u32::MAX, 60)] {
            let mut ownership = ownership(true);
            let mut view = fleet(&[(1, 1, Lock::Held), (2, 9, Lock::Free)], &[Some(2), Some(3)]);
            view.lanes.iter_mut().for_each(|lane| lane.takeovers = takeovers);
            let mut at = |view: &Fleet, milliseconds| {
                let plan = ownership.plan(view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_millis(milliseconds));
                taken(&plan).len()
            };
            let first = 500;
            assert_eq!(at(&view, first), if wait == 0 { 2 } else { 0 }, "{takeovers}");
            if wait > 0 {
                assert_eq!(at(&view, first + wait * 1000 - 1), 0, "{takeovers}");
            }
            assert_eq!(at(&view, first + wait * 1000), 2, "{takeovers}: ended, or without a row");
            view.lanes.iter_mut().for_each(|lane| lane.owner = None);
            assert_eq!(at(&view, first), 2, "nobody died here");
        }
    }

    #[test]
    fn a_held_file_lock_is_never_overruled() {
        let mut ownership = ownership(true);
        let view = fleet(&[(1, 1, Lock::Held), (2, 9, Lock::Held)], &[Some(2), Some(2)]);
        for seconds in [0, 1000] {
            let plan = ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_secs(seconds));
            assert!(plan.take.is_empty());
        }
    }
}
