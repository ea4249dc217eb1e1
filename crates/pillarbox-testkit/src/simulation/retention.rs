use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::{Event, InstanceId, PrunePolicy};
use uuid::Uuid;

use super::{FAULTS_UNTIL, SUBSCRIPTIONS, Step, World};

impl World {
    /// Retention runs, and removes nothing that somebody still needs.
    pub(super) fn prune(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(150_000, 900_000, Step::Prune);
        let keep = Duration::from_millis(self.random.below(1_500));
        let policy =
            PrunePolicy { keep: Some(keep), slice: self.random.between(1, 200) as usize, ..PrunePolicy::default() };
        let before = self.log.visible();
        let given_up: HashSet<(usize, Uuid)> =
            self.skipped.iter().copied().filter(|it| self.is_given_up(*it)).collect();
        let pruned = self.log.prune(&policy);
        self.note(&format!("prune {pruned:?}"));
        self.run.pruned += pruned.events as usize;
        let left: HashSet<Uuid> = self.log.visible().iter().map(|event| event.id).collect();
        for event in before.iter().filter(|event| !left.contains(&event.id)) {
            self.pruned.insert(event.id);
            self.check_pruned(event, &given_up);
        }
    }

    fn is_given_up(&self, (sub, id): (usize, Uuid)) -> bool {
        self.log.fate(id, SUBSCRIPTIONS[sub]).is_some_and(|fate| fate.skipped.is_some())
    }

    /// What is removed has arrived, was given up, or waits in the delivery table, with a copy kept aside.
    fn check_pruned(&mut self, event: &Arc<Event>, given_up: &HashSet<(usize, Uuid)>) {
        for (sub, name) in SUBSCRIPTIONS.into_iter().enumerate() {
            if given_up.contains(&(sub, event.id)) {
                // For good: nobody can rewind to it any more.
                self.blocked.insert((sub, event.id));
                continue;
            }
            let wanted = self.wants(sub, event);
            let has_row = self.log.fate(event.id, name).is_some_and(|fate| fate.delivery.is_some());
            if wanted && !has_row && !self.arrived[sub].contains(&event.id) {
                self.violation(format!("retention removed {}, which subscription {sub} had not got", event.position));
            }
        }
    }

    /// Every other one that is frozen stands in the middle of a transaction, where silence alone lets others take over.
    pub(super) fn hold(&mut self, instance: InstanceId) {
        if !self.features.lock_proves_life && self.random.chance(50) {
            self.run.holding += 1;
            self.log.hold(instance);
        }
    }
}
