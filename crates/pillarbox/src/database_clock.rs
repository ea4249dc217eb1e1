use std::time::Duration;

use crate::Timestamp;

/// The database's time of day, by a clock that never jumps and what the database has told.
///
/// What several instances have to agree on is kept in the database's time: `deliver_at`, when a retry is due, since when an event fails. The
/// clock of this process's machine has no say, so that one that is wrong delivers nothing early.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DatabaseClock {
    /// How many milliseconds the time of day is ahead of `mono`: the most that is certain.
    ahead: i64,
}

impl DatabaseClock {
    /// The database said `time`, at `mono` or before.
    pub(crate) fn new(time: Timestamp, mono: Duration) -> Self {
        DatabaseClock { ahead: time.0 - ceil(mono) }
    }

    /// The database said `time`, somewhere between `asked` and `mono`. What is believed stays as long as that allows it: then nothing that
    /// waits for a time comes before it.
    pub(crate) fn learn(&mut self, time: Timestamp, asked: Duration, mono: Duration) {
        let (least, most) = (time.0 - ceil(mono), time.0 + 1 - floor(asked));
        if !(least..=most).contains(&self.ahead) {
            self.ahead = least;
        }
    }

    /// The time of day.
    pub(crate) fn at(&self, mono: Duration) -> Timestamp {
        Timestamp(self.ahead + floor(mono))
    }
}

fn floor(mono: Duration) -> i64 {
    mono.as_millis() as i64
}

fn ceil(mono: Duration) -> i64 {
    mono.as_micros().div_ceil(1_000) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_quicker_answer_tells_more_and_a_slower_one_nothing() {
        let mut clock = DatabaseClock::new(Timestamp(1_000), ms(50));
        assert_eq!(clock.at(ms(150)), Timestamp(1_100));
        clock.learn(Timestamp(1_190), ms(195), ms(205));
        assert_eq!(clock.at(ms(205)), Timestamp(1_190), "by what it believed it was 1,155");
        clock.learn(Timestamp(1_300), ms(300), ms(900));
        assert_eq!(clock.at(ms(900)), Timestamp(1_885), "the answer may have been under way for long");
    }

    #[test]
    fn a_clock_that_was_set_back_is_followed() {
        let mut clock = DatabaseClock::new(Timestamp(10_000), ms(0));
        clock.learn(Timestamp(4_000), ms(998), ms(1_000));
        assert_eq!(clock.at(ms(1_000)), Timestamp(4_000));
    }

    #[test]
    fn fractions_of_a_millisecond_bring_nothing_early() {
        let clock = DatabaseClock::new(Timestamp(1_000), Duration::from_micros(1_900));
        assert_eq!(clock.at(Duration::from_micros(2_899)), Timestamp(1_000));
    }
}
