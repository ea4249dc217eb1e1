use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::{Epoch, Fleet, InstanceId, InstanceView, LaneRef, Lock, StoreFeatures, SubscriptionId, Take, TakeCause};

/// Decides which lanes this instance takes and which it gives back. Every instance decides alike from the same view; where
/// views differ for a moment, the epoch lets only one of them win.
#[derive(Debug)]
pub(crate) struct Ownership {
    me: InstanceId,
    lease_ttl: Duration,
    features: StoreFeatures,
    /// The last beat seen of each instance, and when it was first seen on this instance's own clock.
    beats: HashMap<InstanceId, (i64, Duration)>,
}

/// What to do about lanes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Plan {
    /// Lanes to take.
    pub(crate) take: Vec<Take>,
    /// Own lanes that another instance should have.
    pub(crate) release: Vec<LaneRef>,
}

impl Ownership {
    /// For this instance.
    pub(crate) fn new(me: InstanceId, lease_ttl: Duration, features: StoreFeatures) -> Self {
        Ownership { me, lease_ttl, features, beats: HashMap::new() }
    }

    /// After a reconnect no beat counts as seen: nobody is seized within one lease of it.
    pub(crate) fn reconnected(&mut self) {
        self.beats.clear();
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
        let mut plan = Plan::default();
        for subscription in fleet.subscriptions.iter().filter(|subscription| running.contains(&subscription.id)) {
            let mut able: Vec<InstanceId> = fleet
                .instances
                .iter()
                .filter(|instance| {
                    deaths[&instance.id].is_none()
                        && !instance.draining
                        && instance.subscriptions.contains(&subscription.id)
                })
                .map(|instance| instance.id)
                .collect();
            able.sort();
            for view in fleet.lanes.iter().filter(|view| view.lane.subscription == subscription.id) {
                let target = able.get(view.lane.lane as usize * able.len() / subscription.lanes.max(1) as usize);
                let held = mine.get(&view.lane) == Some(&view.epoch);
                if target != Some(&self.me) {
                    if held && target.is_some() {
                        plan.release.push(view.lane);
                    } else if !held && view.owner == Some(self.me) {
                        // Its own by name only, since an operator raised the epoch: only who holds a lane can give it back.
                        plan.take.push(Take { lane: view.lane, expected: view.epoch, cause: TakeCause::Free });
                    }
                    continue;
                }
                let cause = match view.owner {
                    None => Some(TakeCause::Free),
                    Some(owner) if owner == self.me => (!held).then_some(TakeCause::Free),
                    // An owner without a row has left or was buried.
                    Some(owner) => deaths.get(&owner).copied().unwrap_or(Some(TakeCause::Lock)),
                };
                if let Some(cause) = cause {
                    plan.take.push(Take { lane: view.lane, expected: view.epoch, cause });
                }
            }
        }
        plan
    }

    fn note_beats(&mut self, fleet: &Fleet, now: Duration) {
        let seen: HashSet<InstanceId> = fleet.instances.iter().map(|instance| instance.id).collect();
        self.beats.retain(|id, _| seen.contains(id));
        for instance in &fleet.instances {
            let entry = self.beats.entry(instance.id).or_insert((instance.beat, now));
            if entry.0 != instance.beat {
                *entry = (instance.beat, now);
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Filter, LaneView, SubscriptionView};

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
        });
        Fleet {
            instances: instances.iter().map(view).collect(),
            subscriptions: vec![SubscriptionView {
                id: SUBSCRIPTION,
                name: "s".into(),
                filter: Filter::default(),
                lanes: owners.len() as u32,
                paused: false,
                created: false,
            }],
            lanes: lanes.collect(),
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
    fn a_silent_owner_is_seized_after_the_lease_and_not_within_one_of_a_reconnect() {
        let mut ownership = ownership(false);
        let view = fleet(&[(1, 1, Lock::Held), (2, 9, Lock::Held)], &[Some(2), Some(2)]);
        let mut at =
            |seconds| taken(&ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_secs(seconds)));
        assert_eq!(at(0), []);
        assert_eq!(at(9), []);
        assert_eq!(at(10), [(0, TakeCause::Lease), (1, TakeCause::Lease)]);
        ownership.reconnected();
        assert!(ownership.plan(&view, &HashMap::new(), &[SUBSCRIPTION], Duration::from_secs(11)).take.is_empty());
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
