use std::time::{Duration, Instant};

/// Ringing is serial across the whole server: each ring holds a lock through a commit. This part of the time it may.
const RING_BUDGET: f64 = 0.4;

/// An awake relay goes to sleep below this part of the budget, so that it does not go to and fro.
const SLEEP_BELOW: f64 = 0.5;

/// How long a relay stays awake after the last reason to be.
const AWAKE_MIN: Duration = Duration::from_secs(1);

/// With so many writers at a ring they would wait for each other.
const WRITERS_MAX: usize = 4;

/// How long a commit takes until one was measured, and at least: a measurement of nothing is one of the clock.
const COMMIT_ASSUMED: Duration = Duration::from_millis(1);
const COMMIT_MIN: Duration = Duration::from_micros(100);

/// The time over which rates are averaged.
const RATE_TIME: Duration = Duration::from_secs(1);

/// Decides whether writers may ring or the relay has to stay awake, by what ringing would cost them.
#[derive(Debug)]
pub(super) struct Governor {
    commit: Duration,
    rings: Rate,
    /// What would have rung, seen by polls while awake.
    moves: Rate,
    demanded_at: Option<Instant>,
    awake_min: Duration,
    /// Every ring is a reason to be awake.
    #[cfg(feature = "mutants")]
    restless: bool,
}

impl Governor {
    pub(super) fn new(now: Instant) -> Self {
        Governor {
            commit: COMMIT_ASSUMED,
            rings: Rate::new(now),
            moves: Rate::new(now),
            demanded_at: None,
            awake_min: AWAKE_MIN,
            #[cfg(feature = "mutants")]
            restless: false,
        }
    }

    /// Wakes with every ring, and stays awake for another time than [`AWAKE_MIN`], so that a test sees many falls asleep.
    #[cfg(feature = "mutants")]
    pub(super) fn doze_after(&mut self, awake_min: Duration) {
        (self.awake_min, self.restless) = (awake_min, true);
    }

    /// A commit of the relay's own took this long.
    pub(super) fn committed(&mut self, took: Duration) {
        // A slow one may have waited for a processor: it takes many of them to count.
        let mean = if took < self.commit { (self.commit + took) / 2 } else { (self.commit * 7 + took) / 8 };
        self.commit = mean.max(COMMIT_MIN);
    }

    /// A writer rang.
    pub(super) fn rang(&mut self, now: Instant) {
        self.rings.add(now);
        #[cfg(feature = "mutants")]
        let restless = self.restless;
        #[cfg(not(feature = "mutants"))]
        let restless = false;
        if restless || self.rings.at(now) * self.commit.as_secs_f64() >= RING_BUDGET {
            self.demanded_at = Some(now);
        }
    }

    /// A poll showed that something was written, and how many were writing.
    pub(super) fn moved(&mut self, now: Instant, writers: usize) {
        self.moves.add(now);
        if writers >= WRITERS_MAX {
            self.demanded_at = Some(now);
        }
    }

    /// A writer waits for the lock that every ring takes.
    pub(super) fn contended(&mut self, now: Instant) {
        self.demanded_at = Some(now);
    }

    /// Whether to be awake.
    pub(super) fn wants_awake(&self, now: Instant, awake: bool) -> bool {
        if self.demanded_at.is_some_and(|at| now.saturating_duration_since(at) < self.awake_min) {
            return true;
        }
        let rate = self.rings.at(now).max(self.moves.at(now));
        awake && rate * self.commit.as_secs_f64() >= RING_BUDGET * SLEEP_BELOW
    }
}

/// Events a second, averaged over [`RATE_TIME`].
#[derive(Debug)]
struct Rate {
    value: f64,
    since: Instant,
}

impl Rate {
    fn new(now: Instant) -> Self {
        Rate { value: 0.0, since: now }
    }

    fn add(&mut self, now: Instant) {
        self.value = self.at(now) + 1.0 / RATE_TIME.as_secs_f64();
        self.since = now;
    }

    fn at(&self, now: Instant) -> f64 {
        let past = now.saturating_duration_since(self.since).as_secs_f64() / RATE_TIME.as_secs_f64();
        self.value * (-past).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rings so often a second for three seconds; whether the governor wants to be awake afterwards.
    fn awake_at(rate: u32, commit: Duration) -> bool {
        let start = Instant::now();
        let mut governor = Governor::new(start);
        (0..60).for_each(|_| governor.committed(commit));
        let mut now = start;
        for _ in 0..rate * 3 {
            now += Duration::from_secs(1) / rate;
            governor.rang(now);
        }
        governor.wants_awake(now, false)
    }

    #[test]
    fn ringing_may_take_two_fifths_of_the_time() {
        assert!(!awake_at(320, Duration::from_millis(1)));
        assert!(awake_at(480, Duration::from_millis(1)));
        assert!(awake_at(30, Duration::from_millis(20)), "a slow disk makes few rings dear");
        assert!(!awake_at(10, Duration::from_millis(20)));
        assert!(!awake_at(2400, Duration::from_micros(100)), "a fast one makes many cheap");
    }

    #[test]
    fn several_writers_or_a_queue_mean_awake_for_a_second() {
        let start = Instant::now();
        for reason in [|governor: &mut Governor, now| governor.moved(now, WRITERS_MAX), Governor::contended] {
            let mut governor = Governor::new(start);
            governor.moved(start, 1);
            assert!(!governor.wants_awake(start, false));
            reason(&mut governor, start);
            assert!(governor.wants_awake(start, false));
            assert!(governor.wants_awake(start + AWAKE_MIN - Duration::from_millis(1), true));
            assert!(!governor.wants_awake(start + AWAKE_MIN, true));
        }
    }

    #[test]
    fn stays_awake_while_sleeping_would_cost_too_much_and_no_longer() {
        let start = Instant::now();
        let mut governor = Governor::new(start);
        (0..20).for_each(|_| governor.committed(Duration::from_millis(1)));
        governor.contended(start);
        let mut now = start;
        for _ in 0..900 {
            now += Duration::from_millis(3);
            governor.moved(now, 1);
        }
        assert!(governor.wants_awake(now, true), "three hundred would ring a second");
        assert!(!governor.wants_awake(now, false), "but none did, as far as one asleep knows");
        assert!(!governor.wants_awake(now + Duration::from_secs(2), true));
    }
}
