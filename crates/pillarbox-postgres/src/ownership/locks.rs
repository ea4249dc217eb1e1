use std::collections::HashSet;

use pillarbox::store::{InstanceId, Lock};

/// What one unbroken control session has seen of the liveness locks of others.
///
/// A lock that is not held proves an end only to an instance that saw it held: after a restart of the database no lock is held, and
/// an instance that only lost its control connection is still at work elsewhere.
#[derive(Debug, Default)]
pub(super) struct LockBook {
    held: HashSet<InstanceId>,
    ended: HashSet<InstanceId>,
}

impl LockBook {
    /// Notes who holds a lock now; returns those that held one before and have backends left to be looked for.
    pub(super) fn note(&mut self, rows: &HashSet<InstanceId>, held: &HashSet<InstanceId>) -> Vec<InstanceId> {
        self.held.extend(rows.intersection(held));
        self.held.retain(|id| rows.contains(id));
        self.ended.retain(|id| rows.contains(id));
        let mut lost: Vec<InstanceId> = self.held.difference(held).copied().collect();
        lost.sort_unstable();
        lost
    }

    /// The state of a lock. `working` are those of the lost that still have a backend.
    pub(super) fn state(&self, id: InstanceId, held: &HashSet<InstanceId>, working: &HashSet<InstanceId>) -> Lock {
        if held.contains(&id) {
            Lock::Held
        } else if self.held.contains(&id) && !working.contains(&id) {
            Lock::Free
        } else {
            Lock::Unknown
        }
    }

    /// Whether the end of this instance was not announced from here yet.
    pub(super) fn is_news(&self, id: InstanceId) -> bool {
        !self.ended.contains(&id)
    }

    /// All relays were told.
    pub(super) fn told(&mut self, ids: &[InstanceId]) {
        self.ended.extend(ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids<const N: usize>(numbers: [i64; N]) -> HashSet<InstanceId> {
        numbers.map(InstanceId).into()
    }

    #[test]
    fn only_who_saw_a_lock_held_knows_that_it_came_free() {
        let mut book = LockBook::default();
        let rows = ids([1, 2, 3]);
        assert!(book.note(&rows, &ids([1, 2])).is_empty());
        assert_eq!(book.note(&rows, &ids([1])), [InstanceId(2)]);
        let state = |id, working| book.state(InstanceId(id), &ids([1]), &working);
        assert_eq!(state(1, ids([])), Lock::Held);
        assert_eq!(state(2, ids([])), Lock::Free);
        assert_eq!(state(2, ids([2])), Lock::Unknown, "it works on without its control connection");
        assert_eq!(state(3, ids([])), Lock::Unknown, "nobody here saw it held");
        assert!(book.is_news(InstanceId(2)));
        book.told(&[InstanceId(2)]);
        assert!(!book.is_news(InstanceId(2)), "news once");
        assert!(book.note(&ids([1, 3]), &ids([1])).is_empty(), "buried and forgotten");
    }
}
