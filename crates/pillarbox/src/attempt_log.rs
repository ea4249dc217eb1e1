use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use crate::{Event, Position, Timestamp};

/// Failed attempts of one subscription that are logged within [`ATTEMPTS_LOGGED_INTERVAL`]; the rest is counted.
pub const ATTEMPTS_LOGGED_MAX: u32 = 10;
/// How long such a count is kept before it is logged.
pub const ATTEMPTS_LOGGED_INTERVAL: Duration = Duration::from_secs(10);

/// An attempt that failed, for the log. It never holds a payload.
#[derive(Debug, Clone)]
pub struct FailedAttempt {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The event's position.
    pub position: Position,
    /// Its id, if the event could be read.
    pub event: Option<Uuid>,
    /// Its key.
    pub key: Option<Box<str>>,
    /// Which attempt it was, from 1 on.
    pub attempt: u32,
    /// How many there are.
    pub max_attempts: u32,
    /// The failure's kind.
    pub kind: &'static str,
    /// What happened.
    pub error: String,
    /// What becomes of the event.
    pub next: NextTry,
}

/// What becomes of an event that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTry {
    /// It is tried again at this time.
    At(Timestamp),
    /// No attempt was counted: it is tried again at this time; where the sink is considered down, before if another event shows that it is not.
    Uncounted(Timestamp),
    /// No attempt was counted, and the receiver wants nothing more: it is tried again when the subscription is resumed.
    Resumed,
    /// It is dead.
    Never,
}

/// An event that was delivered, for the log.
#[derive(Debug, Clone)]
pub struct DeliveredAttempt {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The event.
    pub event: Arc<Event>,
    /// Which attempt it was, from 1 on.
    pub attempt: u32,
}

/// Limits how many lines of one kind are logged.
#[derive(Debug, Default)]
pub(crate) struct LineLimit {
    /// When the interval began, and the lines in it.
    began: Option<Duration>,
    logged: u32,
    suppressed: u64,
}

impl LineLimit {
    /// Whether another line may be logged; if not it is counted.
    pub(crate) fn admits(&mut self, now: Duration) -> bool {
        self.began.get_or_insert(now);
        let admitted = self.logged < ATTEMPTS_LOGGED_MAX;
        self.logged += u32::from(admitted);
        self.suppressed += u64::from(!admitted);
        admitted
    }

    /// Whether an interval has begun that is not over.
    pub(crate) fn is_counting(&self) -> bool {
        self.began.is_some()
    }

    /// The lines that were left out until now, if any were.
    pub(crate) fn close(&mut self) -> Option<u64> {
        let LineLimit { suppressed, .. } = std::mem::take(self);
        Some(suppressed).filter(|count| *count > 0)
    }

    /// The interval may be over: the lines that were left out in it, if any were.
    pub(crate) fn tell(&mut self, now: Duration) -> Option<u64> {
        self.began.take_if(|began| now >= *began + ATTEMPTS_LOGGED_INTERVAL)?;
        self.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_are_logged_and_the_rest_is_told_when_the_interval_is_over() {
        let mut limit = LineLimit::default();
        let at = Duration::from_secs(100);
        assert_eq!((0..25).filter(|_| limit.admits(at)).count(), ATTEMPTS_LOGGED_MAX as usize);
        assert_eq!(limit.tell(at + ATTEMPTS_LOGGED_INTERVAL - Duration::from_millis(1)), None);
        assert_eq!(limit.tell(at + ATTEMPTS_LOGGED_INTERVAL), Some(15));
        assert_eq!(limit.tell(at + ATTEMPTS_LOGGED_INTERVAL * 2), None, "once");
        assert!(limit.admits(at + ATTEMPTS_LOGGED_INTERVAL));
        assert_eq!(limit.tell(at + ATTEMPTS_LOGGED_INTERVAL * 3), None, "nothing was left out");
        assert_eq!(
            (0..12).filter(|_| limit.admits(at + ATTEMPTS_LOGGED_INTERVAL * 4)).count(),
            ATTEMPTS_LOGGED_MAX as usize
        );
        assert_eq!((limit.close(), limit.close()), (Some(2), None), "also before the interval is over");
    }
}
