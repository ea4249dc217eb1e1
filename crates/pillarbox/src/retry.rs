use std::time::Duration;

use serde::{Deserialize, Serialize};

/// When a failed event is tried again, and when it is given up.
///
/// ```
/// use std::time::Duration;
/// use pillarbox::{RetryPolicy, Subscription};
///
/// // Three attempts, after 10 s and 20 s.
/// let policy = RetryPolicy { base: Duration::from_secs(10), jitter: false, ..RetryPolicy::handler().attempts(3) };
/// assert_eq!(policy.attempts_take(), Duration::from_secs(30));
/// let mailer = Subscription::stream("mailer").retry(policy);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// Number of failures caused by the event after which it is dead.
    pub max_attempts: u32,
    /// The wait after the first failure; it doubles with each further one.
    pub base: Duration,
    /// The longest wait.
    pub cap: Duration,
    /// Whether up to a tenth is added to each wait, which spreads the retries of many events. False: exact waits.
    pub jitter: bool,
    /// Time since the first failure before which an event is not dead, however often it failed: it is retried beyond
    /// `max_attempts`. See [`RetryPolicy::attempts`].
    pub min_dead_age: Duration,
}

impl RetryPolicy {
    /// The default for handlers: 8 attempts, 1 s doubling up to 5 min.
    pub const fn handler() -> Self {
        RetryPolicy {
            max_attempts: 8,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(300),
            jitter: true,
            min_dead_age: Duration::ZERO,
        }
    }

    /// The default for sinks: 20 attempts, 1 s doubling up to 1 h, dead after an hour at the earliest.
    pub const fn sink() -> Self {
        RetryPolicy {
            max_attempts: 20,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(3600),
            jitter: true,
            min_dead_age: Duration::from_secs(3600),
        }
    }

    /// The same policy, but dead after this number of attempts, whatever time they take: `min_dead_age` becomes zero.
    /// To use both limits, set `min_dead_age` afterwards.
    pub const fn attempts(self, max_attempts: u32) -> Self {
        RetryPolicy { max_attempts, min_dead_age: Duration::ZERO, ..self }
    }

    /// The policy from its stored text; if it cannot be read, [`RetryPolicy::sink`].
    pub fn stored(text: &str) -> Self {
        serde_json::from_str(text).unwrap_or(RetryPolicy::sink())
    }

    /// Shortest time from the first failure to the failure of the last attempt, without jitter and without the time of
    /// the attempts themselves.
    pub fn attempts_take(&self) -> Duration {
        let exact = RetryPolicy { jitter: false, ..*self };
        // From here on each wait is the longest.
        let doubling = self.max_attempts.clamp(1, 64);
        let first = (1..doubling).fold(Duration::ZERO, |sum, attempt| sum.saturating_add(exact.delay(attempt, 0.0)));
        first.saturating_add(self.cap.saturating_mul(self.max_attempts.saturating_sub(doubling)))
    }

    /// Whether events are retried beyond `max_attempts`, because `min_dead_age` is not over by then.
    pub fn outlasts_attempts(&self) -> bool {
        self.attempts_take() < self.min_dead_age
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
    fn whoever_says_how_many_attempts_gets_no_more() {
        let three = RetryPolicy::sink().attempts(3);
        assert!(!three.is_dead(2, Duration::ZERO) && three.is_dead(3, Duration::ZERO));
        assert!(!three.outlasts_attempts() && !RetryPolicy::sink().outlasts_attempts());
        assert_eq!((three.cap, three.base), (RetryPolicy::sink().cap, RetryPolicy::sink().base));
    }

    #[test]
    fn tells_when_the_age_outlasts_the_attempts() {
        let quick = |max_attempts| RetryPolicy {
            max_attempts,
            base: Duration::from_millis(200),
            cap: Duration::from_secs(1),
            ..RetryPolicy::sink()
        };
        assert_eq!(quick(1).attempts_take(), Duration::ZERO);
        assert_eq!(quick(4).attempts_take(), Duration::from_millis(200 + 400 + 800));
        assert_eq!(quick(1004).attempts_take(), Duration::from_millis(1_400 + 1_000_000));
        assert!(quick(3).outlasts_attempts() && !quick(4000).outlasts_attempts());
        assert!(quick(u32::MAX).attempts_take() > RetryPolicy::sink().min_dead_age);
    }

    #[test]
    fn dead_needs_attempts_and_age() {
        let policy = RetryPolicy::sink();
        assert!(!policy.is_dead(19, Duration::from_secs(9999)));
        assert!(!policy.is_dead(20, Duration::from_secs(3599)));
        assert!(policy.is_dead(20, Duration::from_secs(3600)));
    }
}
