use std::time::Duration;

use serde::{Deserialize, Serialize};

/// When a failed event is tried again, and when it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// After this many failures that were the event's fault it is dead.
    pub max_attempts: u32,
    /// The wait after the first failure; it doubles with each further one.
    pub base: Duration,
    /// The longest wait.
    pub cap: Duration,
    /// Adds up to a tenth of the wait, so that retries of many events spread. Off: exact waits.
    pub jitter: bool,
    /// An event younger than this (since its first failure) is not dead yet, however often it failed.
    pub min_dead_age: Duration,
}

impl RetryPolicy {
    /// For functions and projections: 8 attempts, 1 s doubling up to 5 min.
    pub const fn handler() -> Self {
        RetryPolicy {
            max_attempts: 8,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(300),
            jitter: true,
            min_dead_age: Duration::ZERO,
        }
    }

    /// For sinks: 20 attempts, 1 s doubling up to 1 h, dead after an hour at the earliest.
    pub const fn sink() -> Self {
        RetryPolicy {
            max_attempts: 20,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(3600),
            jitter: true,
            min_dead_age: Duration::from_secs(3600),
        }
    }

    /// The wait after the `attempts`-th failure. `noise` is a random number in 0..=1; jitter only adds.
    pub fn delay(&self, attempts: u32, noise: f64) -> Duration {
        let doublings = attempts.saturating_sub(1).min(63);
        let exact = self.base.saturating_mul(1u32.checked_shl(doublings.min(31)).unwrap_or(u32::MAX));
        let exact = if doublings > 31 { self.cap } else { exact.min(self.cap) };
        if self.jitter { exact + exact.mul_f64(noise.clamp(0.0, 1.0) * 0.1) } else { exact }
    }

    /// Whether an event that has failed `attempts` times over `age` is dead.
    pub fn is_dead(&self, attempts: u32, age: Duration) -> bool {
        attempts >= self.max_attempts && age >= self.min_dead_age
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_from_the_base_to_the_cap() {
        let policy = RetryPolicy { jitter: false, ..RetryPolicy::handler() };
        let waits: Vec<u64> = (1..=10).map(|attempt| policy.delay(attempt, 1.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(policy.delay(u32::MAX, 0.0), policy.cap);
    }

    #[test]
    fn jitter_only_adds_and_at_most_a_tenth() {
        let policy = RetryPolicy::handler();
        for noise in [0.0, 0.3, 1.0, 7.0] {
            let wait = policy.delay(3, noise);
            assert!(wait >= Duration::from_secs(4) && wait <= Duration::from_millis(4400), "{wait:?}");
        }
    }

    #[test]
    fn dead_needs_attempts_and_age() {
        let policy = RetryPolicy::sink();
        assert!(!policy.is_dead(19, Duration::from_secs(9999)));
        assert!(!policy.is_dead(20, Duration::from_secs(3599)));
        assert!(policy.is_dead(20, Duration::from_secs(3600)));
    }
}
