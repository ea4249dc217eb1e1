use std::time::Duration;

use crate::Now;
use crate::backoff::Backoff;

/// The wait before a call that failed is made again.
const CALL_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));

/// One kind of call to the store: at most one is under way, and after a failure the next one waits.
#[derive(Debug)]
pub(super) struct Slot<T> {
    /// What the call under way is about.
    in_flight: Option<T>,
    /// Failed calls in a row.
    failures: u32,
    /// The next call begins no earlier.
    not_before: Duration,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Slot { in_flight: None, failures: 0, not_before: Duration::ZERO }
    }
}

impl<T> Slot<T> {
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }

    /// What the call under way is about.
    pub(super) fn in_flight(&self) -> Option<&T> {
        self.in_flight.as_ref()
    }

    /// Whether the last call failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// Whether a call may begin.
    pub(super) fn is_free(&self, now: Now) -> bool {
        self.in_flight.is_none() && now.mono >= self.not_before
    }

    pub(super) fn begin(&mut self, call: T) {
        self.in_flight = Some(call);
    }

    /// The call was answered; what it was about.
    pub(super) fn succeed(&mut self) -> Option<T> {
        (self.failures, self.not_before) = (0, Duration::ZERO);
        self.in_flight.take()
    }

    /// The call failed; what it was about.
    pub(super) fn fail(&mut self, now: Now) -> Option<T> {
        self.failures = self.failures.saturating_add(1);
        self.not_before = now.mono + CALL_BACKOFF.doubled(self.failures);
        self.in_flight.take()
    }

    /// When the next call may begin, after one that failed.
    pub(super) fn retry_at(&self) -> Option<Duration> {
        self.has_failed().then_some(self.not_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;

    fn at(millis: u64) -> Now {
        Now { mono: Duration::from_millis(millis), wall: Timestamp(0) }
    }

    #[test]
    fn a_call_that_failed_is_not_made_again_at_once_and_one_that_succeeded_is() {
        let mut slot = Slot::default();
        assert!(slot.is_free(at(0)));
        slot.begin("call");
        assert!(slot.is_busy() && !slot.is_free(at(0)));
        assert_eq!(slot.fail(at(0)), Some("call"));
        assert!(slot.has_failed() && !slot.is_free(at(39)) && slot.is_free(at(40)));
        slot.begin("again");
        slot.fail(at(40));
        assert_eq!(slot.retry_at(), Some(Duration::from_millis(120)), "the wait doubles");
        slot.begin("third");
        assert_eq!(slot.succeed(), Some("third"));
        assert!(slot.is_free(at(40)) && !slot.has_failed() && slot.retry_at().is_none());
    }
}
