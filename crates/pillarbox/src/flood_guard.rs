use std::collections::VecDeque;
use std::time::Duration;

/// Number of distinct keys that the guard looks back.
pub const FLOOD_KEYS: usize = 50;
/// If there are few keys: number of events that may become dead while most keys fail. Fewer may be single bad events
/// and not a bad deploy.
pub const FLOOD_DEAD_MAX: usize = 10;
/// The period for [`FLOOD_DEAD_MAX`], and the time after which a failure is forgotten.
pub const FLOOD_DEAD_WITHIN: Duration = Duration::from_secs(3600);

/// Suspects a bad deploy when more than half of the last [`FLOOD_KEYS`] distinct keys failed. If there are fewer keys,
/// more than half of them must fail, and [`FLOOD_DEAD_MAX`] events must have died within [`FLOOD_DEAD_WITHIN`]. While a
/// bad deploy is suspected, nothing becomes dead.
#[derive(Debug, Default)]
pub(crate) struct FloodGuard {
    /// The last keys, newest at the back. Successes are recorded only while a failure is among them.
    keys: VecDeque<Ended>,
    failed: usize,
    /// The times at which the last events died.
    dead: VecDeque<Duration>,
    /// Whether too many events have died, and most keys have failed since.
    flooded: bool,
}

/// How the newest event of a key ended.
#[derive(Debug, Clone, Copy)]
struct Ended {
    key: u64,
    failed: bool,
    at: Duration,
}

impl FloodGuard {
    /// Records how the newest event of a key ended. A key whose event died may never come again: after
    /// [`FLOOD_DEAD_WITHIN`] it says nothing about the other keys.
    pub(crate) fn note(&mut self, now: Duration, key: u64, failed: bool) {
        if !failed && self.failed == 0 {
            return;
        }
        if let Some(index) = self.keys.iter().position(|entry| entry.key == key) {
            let before = self.keys.remove(index).expect("the index was just found");
            self.failed -= usize::from(before.failed);
        }
        self.keys.push_back(Ended { key, failed, at: now });
        self.failed += usize::from(failed);
        let is_old = |first: &mut Ended| now.saturating_sub(first.at) > FLOOD_DEAD_WITHIN;
        while self.keys.len() > FLOOD_KEYS || self.keys.front_mut().is_some_and(is_old) {
            let first = self.keys.pop_front().expect("more than none");
            self.failed -= usize::from(first.failed);
        }
        self.flooded &= self.most_fail();
    }

    /// Notes that an event has died.
    pub(crate) fn note_dead(&mut self, now: Duration) {
        self.dead.push_back(now);
        if self.dead.len() > FLOOD_DEAD_MAX {
            self.dead.pop_front();
        }
        let many = self.dead.len() == FLOOD_DEAD_MAX;
        let lately = self.dead.front().is_some_and(|first| now.saturating_sub(*first) <= FLOOD_DEAD_WITHIN);
        self.flooded |= many && lately && self.most_fail();
    }

    /// Whether a bad deploy is suspected.
    pub(crate) fn is_open(&self) -> bool {
        self.failed > FLOOD_KEYS / 2 || self.flooded
    }

    fn most_fail(&self) -> bool {
        self.failed * 2 > self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn opens_past_half_of_the_distinct_keys_and_closes_when_they_recover() {
        let mut guard = FloodGuard::default();
        (0..25).for_each(|key| guard.note(NOW, key, true));
        (0..25).for_each(|key| guard.note(NOW, key, true));
        assert!(!guard.is_open(), "25 of 50 is not more than half");
        guard.note(NOW, 25, true);
        assert!(guard.is_open());
        guard.note(NOW, 3, false);
        assert!(!guard.is_open());
    }

    #[test]
    fn failures_leave_with_the_window() {
        let mut guard = FloodGuard::default();
        (0..30).for_each(|key| guard.note(NOW, key, true));
        (100..150).for_each(|key| guard.note(NOW, key, false));
        assert!(!guard.is_open());
        assert_eq!(guard.failed, 0);
    }

    /// An event of this key dies; whether the guard is open then.
    fn die(guard: &mut FloodGuard, key: u64, second: u64) -> bool {
        let now = Duration::from_secs(second);
        guard.note(now, key, true);
        if !guard.is_open() {
            guard.note_dead(now);
        }
        guard.is_open()
    }

    #[test]
    fn few_keys_lose_no_more_than_the_limit_however_few_they_are() {
        for keys in [1, 3, 25] {
            let mut guard = FloodGuard::default();
            let dead = (0..800).take_while(|n| !die(&mut guard, n % keys, *n)).count() + 1;
            assert_eq!(dead, FLOOD_DEAD_MAX, "{keys} keys");
            let now = Duration::from_secs(800);
            guard.note(now, 0, true);
            assert!(guard.is_open(), "as long as they fail");
            (0..keys).for_each(|key| guard.note(now, key, false));
            assert!(!guard.is_open());
        }
    }

    #[test]
    fn a_key_that_fails_beside_others_that_do_not_is_no_flood() {
        let mut guard = FloodGuard::default();
        for round in 0..100 {
            assert!(!die(&mut guard, 1, round), "round {round}");
            (2..5).for_each(|key| guard.note(Duration::from_secs(round), key, false));
        }
    }

    #[test]
    fn what_died_long_ago_does_not_count() {
        let mut guard = FloodGuard::default();
        let hour = FLOOD_DEAD_WITHIN.as_secs();
        assert!((0..100).all(|n| !die(&mut guard, 1, n * hour / 8)));
    }

    #[test]
    fn keys_whose_events_have_died_do_not_keep_it_open_for_ever() {
        let mut guard = FloodGuard::default();
        (0..5).for_each(|key| guard.note(NOW, 100 + key, false));
        assert!((0..FLOOD_DEAD_MAX as u64).any(|key| die(&mut guard, key, key)), "it opens");
        let mut second = 0;
        while guard.is_open() {
            second += 60;
            assert!(second < 2 * FLOOD_DEAD_WITHIN.as_secs(), "healthy keys go on, and it stays open");
            (0..5).for_each(|key| guard.note(Duration::from_secs(second), 100 + key, false));
        }
        assert!(second > FLOOD_DEAD_WITHIN.as_secs(), "not before the failures are an hour old");
    }
}
