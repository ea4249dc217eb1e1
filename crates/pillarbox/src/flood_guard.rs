use std::collections::VecDeque;

/// How many distinct keys the guard looks back.
pub const FLOOD_KEYS: usize = 50;

/// Suspects a bad deploy when more than half of the last [`FLOOD_KEYS`] distinct keys failed; while it does, nothing becomes dead.
#[derive(Debug, Default)]
pub(crate) struct FloodGuard {
    /// The last keys, newest at the back, and whether they failed. Successes are noted only while a failure is in sight.
    keys: VecDeque<(u64, bool)>,
    failed: usize,
}

impl FloodGuard {
    /// Notes how the newest event of a key ended.
    pub(crate) fn note(&mut self, key: u64, failed: bool) {
        if !failed && self.failed == 0 {
            return;
        }
        if let Some(index) = self.keys.iter().position(|entry| entry.0 == key) {
            let (_, was) = self.keys.remove(index).expect("the index was just found");
            self.failed -= usize::from(was);
        }
        self.keys.push_back((key, failed));
        self.failed += usize::from(failed);
        if self.keys.len() > FLOOD_KEYS {
            let (_, was) = self.keys.pop_front().expect("more than none");
            self.failed -= usize::from(was);
        }
    }

    /// Whether a bad deploy is suspected.
    pub(crate) fn is_open(&self) -> bool {
        self.failed > FLOOD_KEYS / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_past_half_of_the_distinct_keys_and_closes_when_they_recover() {
        let mut guard = FloodGuard::default();
        (0..25).for_each(|key| guard.note(key, true));
        (0..25).for_each(|key| guard.note(key, true));
        assert!(!guard.is_open(), "25 of 50 is not more than half");
        guard.note(25, true);
        assert!(guard.is_open());
        guard.note(3, false);
        assert!(!guard.is_open());
    }

    #[test]
    fn failures_leave_with_the_window() {
        let mut guard = FloodGuard::default();
        (0..30).for_each(|key| guard.note(key, true));
        (100..150).for_each(|key| guard.note(key, false));
        assert!(!guard.is_open());
        assert_eq!(guard.failed, 0);
    }
}
