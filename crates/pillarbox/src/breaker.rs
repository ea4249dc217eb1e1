use std::collections::HashMap;
use std::time::Duration;

use crate::{BreakerReport, Failure, Fault, Now, Position, Timestamp};

/// An event that fails where nobody can say whose fault it is, with no other event at hand to tell, is charged after this time.
pub const BREAKER_SUSPECT_AFTER: Duration = Duration::from_secs(15 * 60);
/// The first wait for a sink that is down; it doubles.
pub const BREAKER_BASE: Duration = Duration::from_millis(500);
/// The longest wait for a sink that is down.
pub const BREAKER_CAP: Duration = Duration::from_secs(30);

/// A sink with one receiver is taken to be unwell when the first tries of so many different keys were refused in a row.
pub const BREAKER_KEYS_MAX: usize = 5;

/// The longest wait that a receiver can ask for.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Keeps a sink that is down from burning attempts, and one poison event from looking like an outage.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: State,
    /// Consecutive failures that were not an event's fault.
    failures: u32,
    since: Timestamp,
    next_try: Timestamp,
    error: String,
    /// The receiver has said how long to wait: what it takes of batches that were under way does not shorten it.
    asked: bool,
    /// Whether people were told that the sink is down.
    told: bool,
    successes: u64,
    suspects: HashMap<Position, Suspect>,
    /// All events go to one receiver.
    one_receiver: bool,
    /// The keys whose first tries one receiver has refused since it last took an event, at most [`BREAKER_KEYS_MAX`]. When there are so
    /// many, only an event that it takes closes the breaker.
    refused: Vec<u64>,
    /// The last probe was an event that had been refused before, and was again. That says nothing new: the receiver is not said to be
    /// down, but what it has not seen yet is sent one by one until it takes something.
    wary: bool,
    /// The last probe was the first try of another key, and was refused too. The next is one that was refused before, if there is one: it
    /// may be taken now.
    retry_next: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum State {
    #[default]
    Closed,
    Open {
        until: Duration,
    },
    Probing,
}

#[derive(Debug, Clone, Copy)]
struct Suspect {
    first: Duration,
    successes: u64,
    /// Failures after another event had succeeded.
    again: u32,
}

/// What may be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// Anything.
    All,
    /// One event, to see whether the sink is back; the fittest that there is.
    Probe,
    /// Nothing.
    Nothing,
}

/// Who pays for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charge {
    /// The event: an attempt is counted.
    Event,
    /// The sink: the event waits, no attempt is counted.
    Sink,
}

impl Breaker {
    /// For a sink all of whose events go to one receiver, or not.
    pub(crate) fn new(one_receiver: bool) -> Self {
        Breaker { one_receiver, ..Breaker::default() }
    }

    /// What may be sent now.
    pub(crate) fn permit(&self, now: Now) -> Permit {
        match self.state {
            State::Closed => Permit::All,
            State::Open { until } if now.mono >= until => Permit::Probe,
            State::Open { .. } | State::Probing => Permit::Nothing,
        }
    }

    /// When the answer of [`Breaker::permit`] changes by itself.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        if let State::Open { until } = self.state { Some(until) } else { None }
    }

    /// A probe is on its way.
    pub(crate) fn probing(&mut self) {
        self.state = State::Probing;
    }

    /// A probe came back. If its outcome said nothing about the sink, another may go at once.
    pub(crate) fn probe_over(&mut self, now: Now) {
        if self.state == State::Probing {
            self.state = State::Open { until: now.mono };
        }
    }

    /// The sink took an event.
    pub(crate) fn success(&mut self, position: Position) {
        self.successes += 1;
        self.refused.clear();
        self.answered();
        if !self.suspects.is_empty() {
            self.suspects.remove(&position);
        }
    }

    /// The sink said something about one event: it is up, unless it refuses everybody.
    fn answered(&mut self) {
        if self.refuses_all() {
            self.wary |= self.state == State::Probing;
            return;
        }
        if self.asked && matches!(self.state, State::Open { .. }) {
            return;
        }
        self.state = State::Closed;
        self.asked = false;
        self.failures = 0;
        self.wary = false;
    }

    /// The receiver refused an event of this key. Where all events go to one receiver and it refuses the first tries of many keys in a
    /// row, that is no fault of theirs alone.
    pub(crate) fn refused(&mut self, now: Now, key: u64, first_try: bool, error: &str) {
        if first_try && self.one_receiver {
            if !self.refuses_all() && !self.refused.contains(&key) {
                self.refused.push(key);
            }
            if self.refuses_all() {
                self.retry_next = self.state == State::Probing;
                let error = format!("{BREAKER_KEYS_MAX} different keys failed in a row; the last: {error}");
                return self.failure(now, &error, None);
            }
        }
        self.retry_next &= first_try;
        self.answered();
    }

    fn refuses_all(&self) -> bool {
        self.refused.len() >= BREAKER_KEYS_MAX
    }

    /// Whether an event that was refused before is to be the next probe.
    pub(crate) fn wants_retry(&self) -> bool {
        self.retry_next && self.refuses_all()
    }

    /// How little an event is fit to be the probe: 0 is best. One under suspicion tells least. Where many keys were refused, the first
    /// try of another tells whether that goes on; then it is the turn of one that was refused before.
    pub(crate) fn unfitness(&self, position: Position, key: u64, first_try: bool) -> u8 {
        let refused_before = !first_try || self.refused.contains(&key);
        if self.suspects(position) { 2 } else { u8::from(self.refuses_all() && refused_before != self.retry_next) }
    }

    /// The sink is down.
    pub(crate) fn failure(&mut self, now: Now, error: &str, retry_after: Option<Duration>) {
        if self.state == State::Closed {
            self.since = now.wall;
        }
        // Several batches may fail in one breath; that is one failure of the sink.
        if !matches!(self.state, State::Open { until } if until > now.mono) {
            self.failures += 1;
        }
        let wait = BREAKER_BASE.saturating_mul(1 << (self.failures.saturating_sub(1)).min(16)).min(BREAKER_CAP);
        let wait = retry_after.map_or(wait, |asked| asked.clamp(wait, RETRY_AFTER_MAX.max(wait)));
        let asked_until = self.deadline().filter(|_| self.asked);
        let until = asked_until.unwrap_or_default().max(now.mono + wait);
        self.asked = retry_after.is_some() || asked_until.is_some_and(|asked| asked > now.mono);
        self.state = State::Open { until };
        self.wary = false;
        self.next_try = now.wall.plus(until - now.mono);
        self.error = error.to_owned();
    }

    /// The failure of this event was not said to be its own fault: it is all the same, once others succeed and it does not. If it was
    /// not said to be the sink's either (`unclear`) and no other event is at hand to tell, it is the event's after a while.
    pub(crate) fn suspect(&mut self, now: Now, position: Position, failure: &Failure) -> Charge {
        let successes = self.successes;
        let alone = self.suspects.is_empty() || (self.suspects.len() == 1 && self.suspects.contains_key(&position));
        let suspect = self.suspects.entry(position).or_insert(Suspect { first: now.mono, successes, again: 0 });
        let old = now.mono.saturating_sub(suspect.first) >= BREAKER_SUSPECT_AFTER;
        if successes > suspect.successes {
            suspect.again += 1;
            if suspect.again < 2 {
                if failure.retry_after.is_some() {
                    self.failure(now, &failure.message, failure.retry_after);
                }
                return Charge::Sink;
            }
        } else if !(alone && old && failure.fault == Fault::Unclear) {
            self.failure(now, &failure.message, failure.retry_after);
            return Charge::Sink;
        }
        self.suspects.remove(&position);
        self.answered();
        Charge::Event
    }

    /// Whether this event failed before in a way that nobody could explain; such an event travels alone.
    pub(crate) fn suspects(&self, position: Position) -> bool {
        !self.suspects.is_empty() && self.suspects.contains_key(&position)
    }

    /// Forgets an event that is no longer this instance's.
    pub(crate) fn forget(&mut self, position: Position) {
        if !self.suspects.is_empty() {
            self.suspects.remove(&position);
        }
    }

    /// Whether the sink failed so often in a row that waiting for it is no use to somebody in a hurry.
    pub(crate) fn is_down(&self) -> bool {
        self.is_open() && self.failures >= 3
    }

    /// What to tell operators; None while all is well.
    pub(crate) fn report(&self) -> Option<BreakerReport> {
        let report = || BreakerReport { since: self.since, next_try: self.next_try, error: self.error.clone() };
        self.is_open().then(report)
    }

    /// Whether it has opened or closed since this was last asked.
    pub(crate) fn has_news(&mut self) -> bool {
        let is_open = self.is_open();
        std::mem::replace(&mut self.told, is_open) != is_open
    }

    /// Whether the sink is said to be down.
    fn is_open(&self) -> bool {
        self.state != State::Closed && !self.wary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Now {
        Now { mono: Duration::from_secs(seconds), wall: Timestamp(seconds as i64 * 1000) }
    }

    #[test]
    fn opens_and_lets_one_probe_through_after_the_wait() {
        let mut breaker = Breaker::default();
        breaker.failure(at(10), "refused", None);
        assert_eq!(breaker.permit(at(10)), Permit::Nothing);
        assert_eq!(breaker.permit(at(11)), Permit::Probe);
        breaker.probing();
        assert_eq!(breaker.permit(at(11)), Permit::Nothing);
        breaker.success(1);
        assert_eq!(breaker.permit(at(11)), Permit::All);
        assert!(breaker.report().is_none());
    }

    #[test]
    fn waits_longer_each_time_up_to_the_cap() {
        let mut breaker = Breaker::default();
        let mut now = at(0);
        for _ in 0..20 {
            breaker.failure(now, "refused", None);
            now.mono = breaker.deadline().expect("open");
        }
        let before = now.mono;
        breaker.failure(now, "refused", None);
        assert_eq!(breaker.deadline().expect("open") - before, BREAKER_CAP);
    }

    fn unclear() -> Failure {
        Failure::unclear("reset", "connection reset")
    }

    #[test]
    fn poison_that_looks_like_an_outage_is_charged_once_others_succeed() {
        for failure in [unclear(), Failure::sink("down")] {
            let mut breaker = Breaker::default();
            assert_eq!(breaker.suspect(at(0), 7, &failure), Charge::Sink);
            assert_eq!(breaker.permit(at(0)), Permit::Nothing);
            assert!(breaker.suspects(7), "the probe is another event");
            breaker.probing();
            breaker.success(8);
            assert_eq!(breaker.suspect(at(2), 7, &failure), Charge::Sink);
            assert_eq!(breaker.permit(at(2)), Permit::All, "others are not held back");
            assert_eq!(breaker.suspect(at(3), 7, &failure), Charge::Event);
        }
    }

    #[test]
    fn a_receiver_that_says_how_long_to_wait_is_left_alone_for_so_long() {
        let throttled = Failure { retry_after: Some(Duration::from_secs(60)), ..Failure::sink("429") };
        let mut breaker = Breaker::default();
        for round in 0..2 {
            let began = 100 * round;
            assert_eq!(breaker.suspect(at(began), 7, &throttled), Charge::Sink, "round {round}");
            breaker.success(8);
            breaker.failure(at(began + 1), "reset", None);
            assert_eq!(breaker.permit(at(began + 59)), Permit::Nothing, "what it took meanwhile does not shorten it");
            assert_eq!(breaker.report().map(|report| report.next_try), Some(at(began + 60).wall));
            assert_eq!(breaker.permit(at(began + 60)), Permit::Probe);
            breaker.probing();
            breaker.success(9);
            assert_eq!(breaker.permit(at(began + 60)), Permit::All);
        }
        assert_eq!(breaker.suspect(at(200), 7, &throttled), Charge::Event, "it takes others and not this one");
        assert_eq!(breaker.permit(at(200)), Permit::All);
    }

    #[test]
    fn opening_and_closing_are_told_once() {
        let mut breaker = Breaker::default();
        assert!(!breaker.has_news());
        breaker.failure(at(0), "down", None);
        breaker.failure(at(1), "down", None);
        assert!(breaker.has_news() && !breaker.has_news());
        breaker.probing();
        assert!(!breaker.has_news());
        breaker.success(1);
        assert!(breaker.has_news() && !breaker.has_news());
    }

    #[test]
    fn a_suspect_that_is_the_probe_does_not_end_probing_for_ever() {
        let mut breaker = Breaker::default();
        assert_eq!(breaker.suspect(at(0), 7, &unclear()), Charge::Sink);
        breaker.success(8);
        breaker.failure(at(1), "down", None);
        breaker.probing();
        assert_eq!(breaker.suspect(at(2), 7, &unclear()), Charge::Sink);
        breaker.probe_over(at(2));
        assert_eq!(breaker.permit(at(2)), Permit::Probe);
    }

    #[test]
    fn alone_with_a_suspect_it_is_charged_after_the_limit() {
        let mut breaker = Breaker::default();
        assert_eq!(breaker.suspect(at(0), 7, &unclear()), Charge::Sink);
        assert_eq!(breaker.suspect(at(899), 7, &unclear()), Charge::Sink);
        assert_eq!(breaker.suspect(at(900), 7, &unclear()), Charge::Event);
    }

    #[test]
    fn a_long_outage_charges_nobody() {
        let mut breaker = Breaker::default();
        for hour in 0..24 {
            for position in [7, 8] {
                assert_eq!(breaker.suspect(at(hour * 3600), position, &unclear()), Charge::Sink);
            }
            let mut one = Breaker::default();
            assert_eq!(one.suspect(at(hour * 3600), 7, &Failure::sink("down")), Charge::Sink);
        }
    }

    /// First tries of keys 1, 2, … that one receiver refuses at second 0.
    fn refusing(keys: usize) -> Breaker {
        let mut breaker = Breaker::new(true);
        (1..=keys as u64).for_each(|key| breaker.refused(at(0), key, true, "422"));
        breaker
    }

    #[test]
    fn as_many_keys_as_the_limit_open_it_and_one_less_does_not() {
        assert_eq!(refusing(BREAKER_KEYS_MAX - 1).permit(at(0)), Permit::All);
        let breaker = refusing(BREAKER_KEYS_MAX);
        assert_eq!(breaker.permit(at(0)), Permit::Nothing);
        assert_eq!(breaker.report().expect("open").error, "5 different keys failed in a row; the last: 422");
        assert_eq!(breaker.permit(at(1)), Permit::Probe);
    }

    #[test]
    fn only_first_tries_of_different_keys_of_one_receiver_in_a_row_count() {
        let mut several = Breaker::default();
        (1..100).for_each(|key| several.refused(at(0), key, true, "422"));
        assert_eq!(several.permit(at(0)), Permit::All, "several receivers");
        let mut breaker = refusing(BREAKER_KEYS_MAX - 1);
        breaker.refused(at(0), 1, true, "422");
        assert_eq!(breaker.permit(at(0)), Permit::All, "the same key again");
        (100..200).for_each(|key| breaker.refused(at(0), key, false, "422"));
        assert_eq!(breaker.permit(at(0)), Permit::All, "retries");
        breaker.success(7);
        (11..15).for_each(|key| breaker.refused(at(0), key, true, "422"));
        assert_eq!(breaker.permit(at(0)), Permit::All, "not in a row");
        breaker.refused(at(0), 15, true, "422");
        assert_eq!(breaker.permit(at(0)), Permit::Nothing);
    }

    #[test]
    fn a_probe_that_is_refused_as_a_first_try_doubles_the_wait_and_one_that_is_taken_ends_it() {
        let mut breaker = refusing(BREAKER_KEYS_MAX);
        let first = breaker.deadline().expect("open");
        breaker.probing();
        breaker.refused(at(1), 6, true, "422");
        breaker.probe_over(at(1));
        assert_eq!((breaker.permit(at(1)), first), (Permit::Nothing, BREAKER_BASE));
        assert_eq!(breaker.deadline(), Some(Duration::from_secs(1) + BREAKER_BASE * 2));
        assert_eq!(breaker.report().expect("open").since, at(0).wall);
        breaker.probing();
        breaker.success(7);
        assert_eq!((breaker.permit(at(2)), breaker.report()), (Permit::All, None));
        breaker.refused(at(2), 8, true, "422");
        assert_eq!(breaker.permit(at(2)), Permit::All, "it counts from the start");
    }

    #[test]
    fn a_retry_that_is_refused_says_nothing_new() {
        let mut breaker = refusing(BREAKER_KEYS_MAX);
        breaker.refused(at(0), 1, false, "422");
        assert_eq!(breaker.permit(at(0)), Permit::Nothing, "it was at the sink before");
        breaker.probing();
        breaker.refused(at(1), 1, false, "422");
        breaker.probe_over(at(1));
        assert_eq!(breaker.permit(at(1)), Permit::Probe, "the next may go at once, alone");
        assert_eq!((breaker.report(), breaker.is_down()), (None, false));
        breaker.probing();
        assert_eq!((breaker.permit(at(1)), breaker.report()), (Permit::Nothing, None));
        breaker.refused(at(1), 6, true, "422");
        assert_eq!(breaker.permit(at(1)), Permit::Nothing);
        assert_eq!(breaker.report().expect("open again").since, at(0).wall, "nothing was taken meanwhile");
    }

    #[test]
    fn the_fittest_probe_is_the_first_try_of_a_key_that_was_not_refused() {
        let mut breaker = refusing(BREAKER_KEYS_MAX - 1);
        assert_eq!((breaker.unfitness(1, 1, false), breaker.unfitness(6, 6, true)), (0, 0), "all alike");
        breaker.refused(at(0), 5, true, "422");
        breaker.suspect(at(0), 9, &unclear());
        let unfitness = [(6, 6, true), (7, 5, true), (8, 6, false), (9, 9, true)]
            .map(|(position, key, first_try)| breaker.unfitness(position, key, first_try));
        assert_eq!(unfitness, [0, 1, 1, 2]);
    }

    #[test]
    fn after_a_refused_first_try_it_is_the_turn_of_a_retry() {
        let mut breaker = refusing(BREAKER_KEYS_MAX);
        assert!(!breaker.wants_retry(), "another key tells more at first");
        breaker.probing();
        breaker.refused(at(1), 6, true, "422");
        assert!(breaker.wants_retry());
        assert_eq!((breaker.unfitness(1, 1, false), breaker.unfitness(7, 7, true)), (0, 1));
        breaker.probing();
        breaker.refused(at(2), 1, false, "422");
        breaker.probe_over(at(2));
        assert!(!breaker.wants_retry());
        assert_eq!((breaker.unfitness(1, 1, false), breaker.unfitness(7, 7, true)), (1, 0));
    }

    #[test]
    fn a_receiver_cannot_make_us_hurry_nor_wait_for_ever() {
        let mut breaker = Breaker::default();
        breaker.failure(at(0), "busy", Some(Duration::ZERO));
        assert_eq!(breaker.permit(at(0)), Permit::Nothing);
        breaker.failure(at(0), "busy", Some(Duration::MAX));
        assert_eq!(breaker.deadline(), Some(RETRY_AFTER_MAX));
    }
}
