use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pillarbox::Failure;
use pillarbox::sink::Fault;

/// After this time no further request of a batch is begun, so that the answer reaches the engine before it gives the batch up and
/// forgets what was delivered: give it this time and one [`HttpConfig::timeout`](crate::HttpConfig::timeout).
pub const HTTP_BATCH_TIME_MAX: Duration = Duration::from_secs(60);

/// So many requests in a row without an answer, and the receiver is left alone.
const NO_ANSWER_MAX: u32 = 3;

/// What the requests of one batch have learned about their receiver.
pub(super) struct Course {
    began: Instant,
    down: AtomicBool,
    no_answer: AtomicU32,
}

impl Course {
    pub(super) fn new(began: Instant) -> Self {
        Course { began, down: AtomicBool::new(false), no_answer: AtomicU32::new(0) }
    }

    /// Whether a further request makes sense.
    pub(super) fn goes_on(&self, now: Instant) -> bool {
        let in_time = now.saturating_duration_since(self.began) < HTTP_BATCH_TIME_MAX;
        in_time && !self.down.load(Ordering::Relaxed) && self.no_answer.load(Ordering::Relaxed) < NO_ANSWER_MAX
    }

    pub(super) fn learn(&self, result: &Result<(), Failure>) {
        match result.as_ref().map_err(|failure| failure.fault) {
            Ok(()) | Err(Fault::Event) => self.no_answer.store(0, Ordering::Relaxed),
            Err(Fault::Neither) => {}
            Err(Fault::Sink) => self.down.store(true, Ordering::Relaxed),
            Err(Fault::Unclear) => {
                self.no_answer.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unclear() -> Result<(), Failure> {
        Err(Failure::unclear("timeout", "no answer"))
    }

    #[test]
    fn a_receiver_that_is_down_is_left_alone() {
        let began = Instant::now();
        let course = Course::new(began);
        course.learn(&Err(Failure::permanent("this one")));
        assert!(course.goes_on(began));
        course.learn(&Err(Failure::sink("down")));
        course.learn(&Ok(()));
        assert!(!course.goes_on(began));
    }

    #[test]
    fn one_event_that_makes_it_hang_does_not_stop_the_others() {
        let began = Instant::now();
        let course = Course::new(began);
        for _ in 0..5 {
            (1..NO_ANSWER_MAX).for_each(|_| course.learn(&unclear()));
            assert!(course.goes_on(began));
            course.learn(&Ok(()));
        }
        (0..NO_ANSWER_MAX).for_each(|_| course.learn(&unclear()));
        assert!(!course.goes_on(began));
    }

    #[test]
    fn a_batch_ends_in_time() {
        let began = Instant::now();
        let course = Course::new(began);
        assert!(course.goes_on(began + HTTP_BATCH_TIME_MAX - Duration::from_nanos(1)));
        assert!(!course.goes_on(began + HTTP_BATCH_TIME_MAX));
    }
}
