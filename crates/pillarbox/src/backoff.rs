use std::time::Duration;

/// A wait that doubles with each failure in a row, up to a longest one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
}

/// Beyond so many doublings every wait is the longest.
const DOUBLINGS_MAX: u32 = 16;

impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Backoff { first, longest }
    }

    /// The first wait after so many doublings.
    pub(crate) fn doubled(&self, times: u32) -> Duration {
        self.first.saturating_mul(1 << times.min(DOUBLINGS_MAX)).min(self.longest)
    }

    /// The wait after so many failures in a row: the first one after the first failure.
    pub(crate) fn after(&self, failures: u32) -> Duration {
        self.doubled(failures.saturating_sub(1))
    }

    /// The longest wait.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_from_the_first_to_the_longest() {
        let backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
        let waits: Vec<u128> = (0..8).map(|failures| backoff.after(failures).as_millis()).collect();
        assert_eq!(waits, [20, 20, 40, 80, 160, 320, 640, 1000]);
        assert_eq!((backoff.doubled(1).as_millis(), backoff.doubled(u32::MAX)), (40, backoff.longest()));
    }
}
