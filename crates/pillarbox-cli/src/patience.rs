use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{info, warn};

use crate::database::is_passing;
use crate::exit::chain;

/// The first wait after a failure; it doubles.
const WAIT_FIRST: Duration = Duration::from_millis(100);
/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Tries again what failed because the database could not be reached or was busy, for a time.
#[derive(Debug)]
pub(crate) struct Patience {
    until: Option<Instant>,
    wait: Duration,
}

impl Patience {
    /// For this long.
    pub(crate) fn new(time: Duration) -> Self {
        Patience { until: Some(Instant::now() + time), wait: WAIT_FIRST }
    }

    /// For ever.
    pub(crate) fn endless() -> Self {
        Patience { until: None, wait: WAIT_FIRST }
    }

    /// Calls `attempt` until it succeeds, fails for another reason, or the time is over; says on standard error that it waits.
    pub(crate) async fn while_passing<T>(mut self, mut attempt: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let mut failed = false;
        loop {
            let error = match attempt().await {
                Ok(done) => {
                    if failed {
                        info!("the database answers again");
                    }
                    return Ok(done);
                }
                Err(error) => error,
            };
            let over = self.until.is_some_and(|until| Instant::now() + self.wait > until);
            if over || !is_passing(&error) {
                return Err(error);
            }
            failed = true;
            warn!(error = chain(&error), again_in = ?self.wait, "the database does not answer; trying again");
            tokio::time::sleep(self.wait).await;
            self.wait = (self.wait * 2).min(WAIT_MAX);
        }
    }
}
