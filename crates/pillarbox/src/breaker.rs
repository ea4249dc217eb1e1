use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::backoff::Backoff;
use crate::dispatcher::{BatchId, Item};
use crate::{BreakerReport, Failure, Fault, Now, Position, Timestamp};

/// Time after which an unclear failure is charged to the event, if no other event can show whose fault it is.
pub const BREAKER_SUSPECT_AFTER: Duration = Duration::from_secs(15 * 60);
/// The first wait for a sink that is down; it doubles.
pub const BREAKER_BASE: Duration = Duration::from_millis(500);
/// The longest wait for a sink that is down.
pub const BREAKER_CAP: Duration = Duration::from_secs(30);
const BACKOFF: Backoff = Backoff::new(BREAKER_BASE, BREAKER_CAP);

/// Number of different keys that fail in a row, at which the sink counts as down; and number of keys whose first tries
/// are refused in a row, at which a sink with one receiver counts as failing.
pub const BREAKER_KEYS_MAX: usize = 5;

/// While two or more keys fail, but fewer than [`BREAKER_KEYS_MAX`]: time after the last of them began to fail until an
/// event of another key is tried.
pub const BREAKER_OTHER_WAIT: Duration = Duration::from_secs(1);

/// Number of failures in a row after which a sink that fails for one key alone counts as down, if there is no other
/// event to test it with.
pub const BREAKER_ALONE_MAX: u32 = 3;

/// Maximum number of events that the breaker remembers because their failures may or may not be their own fault.
pub const BREAKER_SUSPECTS_MAX: usize = 1_000;

/// The longest wait that a receiver can request.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Prevents a sink that is down from using up attempts, and a single poison event from looking like an outage.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: State,
    /// The probe under way.
    probe: Option<BatchId>,
    /// The event of another key under way, while few keys fail.
    other: Option<BatchId>,
    /// From when on such an event may be sent.
    other_at: Duration,
    doubt: Doubt,
    /// Consecutive failures that were not an event's fault.
    failures: u32,
    since: Timestamp,
    next_try: Timestamp,
    error: String,
    /// The receiver has said how long to wait: what it takes of batches that were under way does not shorten it.
    asked: bool,
    /// Whether people were told that the sink is down.
    reported: bool,
    /// The last failure pauses the subscription: there is no next try that people could be told of.
    pauses: bool,
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
}

/// Who has failed since the sink last took an event.
#[derive(Debug, Default)]
enum Doubt {
    #[default]
    Nobody,
    /// Events of these few keys alone: it may be their fault, so that others are not held back.
    Keys(Vec<u64>),
    /// Many keys, or no receiver was there: it is the sink's fault.
    Sink,
}

#[derive(Debug, Clone, Copy)]
struct Suspect {
    lane: u32,
    /// When it first failed, or was last charged.
    since: Duration,
    /// When it last failed.
    seen: Duration,
    /// Its claim was given back: another instance may be working on it, or be done with it.
    away: bool,
    /// Events taken when it first failed, or last failed after its guilt was known.
    successes: u64,
    /// Failures after another event had succeeded.
    again: u32,
    /// Others succeeded while it failed: it is the event's fault, and opens the breaker no more.
    guilty: bool,
    /// Failures in a row without a success of others between, since its guilt is known.
    waits: u32,
}

/// What may be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// Any event.
    All,
    /// One event, the most suitable, to test whether the sink is back.
    Probe,
    /// One event of a key that does not fail: it shows whether the sink is down, and must not wait if it is not.
    Other,
    /// Nothing.
    Nothing,
}

/// What a failure is charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charge {
    /// The event: an attempt is counted.
    Event,
    /// The sink: the event waits, no attempt is counted.
    Sink,
    /// Neither: the event is known to fail where others succeed, but none has been sent since it last failed. It waits
    /// alone for this time, and no attempt is counted.
    Nobody(Duration),
}

impl Breaker {
    /// For a sink all of whose events go to one receiver, or not.
    pub(crate) fn new(one_receiver: bool) -> Self {
        Breaker { one_receiver, ..Breaker::default() }
    }

    /// What may be sent now.
    pub(crate) fn permit(&self, now: Now) -> Permit {
        let State::Open { until } = self.state else { return Permit::All };
        if self.other.is_some() {
            Permit::Nothing
        } else if self.probe.is_none() && now.mono >= until {
            Permit::Probe
        } else if self.other_deadline().is_some_and(|at| now.mono >= at) {
            Permit::Other
        } else {
            Permit::Nothing
        }
    }

    /// When the answer of [`Breaker::permit`] changes by itself.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        if let State::Open { until } = self.state { Some(until) } else { None }
    }

    /// For how long nothing but an event of another key is sent.
    pub(crate) fn wait(&self, now: Now) -> Duration {
        self.deadline().unwrap_or_default().saturating_sub(now.mono)
    }

    /// From when on an event of another key than the few that fail may be sent.
    pub(crate) fn other_deadline(&self) -> Option<Duration> {
        let few = matches!(self.doubt, Doubt::Keys(_)) && self.is_open() && !self.asked;
        few.then_some(self.other_at)
    }

    /// What was permitted is on its way.
    pub(crate) fn begin(&mut self, permit: Permit, batch: BatchId) {
        match permit {
            Permit::Probe => self.probe = Some(batch),
            Permit::Other => self.other = Some(batch),
            Permit::All | Permit::Nothing => {}
        }
    }

    /// A batch came back. If it was the probe and its outcome said nothing about the sink, another may go at once.
    pub(crate) fn over(&mut self, batch: BatchId) {
        self.probe.take_if(|probe| *probe == batch);
        self.other.take_if(|other| *other == batch);
    }

    /// The sink took an event.
    pub(crate) fn success(&mut self, position: Position) {
        self.successes += 1;
        self.refused.clear();
        self.doubt = Doubt::Nobody;
        self.answered();
        self.forget(position);
    }

    /// The sink said something about one event: it is up, unless it refuses all keys.
    fn answered(&mut self) {
        if self.refuses_all() {
            self.wary |= self.probe.is_some();
            return;
        }
        if self.asked && self.is_open() && self.probe.is_none() {
            return;
        }
        self.state = State::Closed;
        self.doubt = Doubt::Nobody;
        self.asked = false;
        self.failures = 0;
        self.wary = false;
        (self.probe, self.other) = (None, None);
    }

    /// The receiver refused an event of this key. Where all events go to one receiver and it refuses the first tries of many keys in a
    /// row, that is no fault of theirs alone.
    pub(crate) fn refused(&mut self, now: Now, key: u64, first_try: bool, error: &str) {
        if first_try && self.one_receiver {
            if !self.refuses_all() && !self.refused.contains(&key) {
                self.refused.push(key);
            }
            if self.refuses_all() {
                self.retry_next = self.probe.is_some();
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

    /// How unsuitable an event is for what is permitted: 0 is best, [`u8::MAX`] is unsuitable. A suspect says least
    /// about the sink. If many keys were refused, the first try of another key shows whether this continues; after
    /// that, an event that was refused before is next.
    pub(crate) fn unfitness(&self, permit: Permit, position: Position, key: u64, first_try: bool) -> u8 {
        let refused_before = !first_try || self.refused.contains(&key);
        match permit {
            Permit::Other if self.suspects(position) || self.doubts(key) => u8::MAX,
            _ if self.suspects(position) => 2,
            _ => u8::from(self.refuses_all() && refused_before != self.retry_next),
        }
    }

    /// The sink is down.
    pub(crate) fn failure(&mut self, now: Now, error: &str, retry_after: Option<Duration>) {
        self.doubt = Doubt::Sink;
        self.open(now, error, retry_after);
    }

    /// The receiver wants nothing more, and the subscription is to be paused.
    pub(crate) fn gone(&mut self, now: Now, error: &str, retry_after: Option<Duration>) {
        self.failure(now, error, retry_after);
        self.pauses = true;
    }

    fn open(&mut self, now: Now, error: &str, retry_after: Option<Duration>) {
        if self.state == State::Closed {
            self.since = now.wall;
        }
        // Several batches may fail in one breath; that is one failure of the sink.
        if !matches!(self.state, State::Open { until } if until > now.mono) {
            self.failures += 1;
        }
        let wait = BACKOFF.after(self.failures);
        let wait = retry_after.map_or(wait, |asked| asked.clamp(wait, RETRY_AFTER_MAX.max(wait)));
        let asked_until = self.deadline().filter(|_| self.asked);
        let until = asked_until.unwrap_or_default().max(now.mono + wait);
        self.asked = retry_after.is_some() || asked_until.is_some_and(|asked| asked > now.mono);
        self.state = State::Open { until };
        self.wary = false;
        self.pauses = false;
        self.next_try = now.wall.plus(until - now.mono);
        self.error = error.to_owned();
    }

    /// The sink did not blame this event. The failure is still charged to the event if other events succeed while it
    /// keeps failing. If the failure is `unclear` and no other event can show whose fault it is, it is charged to the
    /// event after a while.
    pub(crate) fn suspect(&mut self, now: Now, item: &Item, failure: &Failure) -> Charge {
        let position = item.event.position;
        if failure.unsent {
            // Nobody was there to be given it.
            self.failure(now, &failure.message, failure.retry_after);
            return Charge::Sink;
        }
        let (successes, is_open) = (self.successes, self.is_open());
        let is_old = |since: Duration| now.mono.saturating_sub(since) >= BREAKER_SUSPECT_AFTER;
        let mut others = self.suspects.iter().filter(|(other, suspect)| **other != position && !suspect.guilty);
        let alone = others.all(|(_, suspect)| suspect.away && is_old(suspect.seen));
        let (since, seen) = (now.mono, now.mono);
        let fresh = Suspect { lane: item.lane, since, seen, away: false, successes, again: 0, guilty: false, waits: 0 };
        let suspect = self.suspects.entry(position).or_insert(fresh);
        (suspect.seen, suspect.away) = (now.mono, false);
        let told_by_time = alone && is_old(suspect.since) && failure.fault == Fault::Unclear;
        let told_by_others = successes > suspect.successes;
        if suspect.guilty {
            suspect.successes = successes;
            // While the sink is down, what it took before does not count against the event.
            if told_by_time || (told_by_others && !is_open) {
                (suspect.since, suspect.waits) = (now.mono, 0);
                return Charge::Event;
            }
            suspect.waits = suspect.waits.saturating_add(1);
            let wait = BACKOFF.after(suspect.waits);
            if is_open {
                self.open(now, &failure.message, None);
            }
            return Charge::Nobody(wait);
        }
        if told_by_others {
            suspect.again += 1;
            if suspect.again < 2 {
                if failure.retry_after.is_some() {
                    self.failure(now, &failure.message, failure.retry_after);
                }
                return Charge::Sink;
            }
            *suspect = Suspect { since: now.mono, successes, guilty: true, ..fresh };
        } else if told_by_time {
            self.suspects.remove(&position);
        } else {
            self.limit_suspects(position);
            self.doubt(now, item.key_id());
            self.open(now, &failure.message, failure.retry_after);
            return Charge::Sink;
        }
        self.answered();
        Charge::Event
    }

    /// An event of this key has failed, and it is not known whose fault that was.
    fn doubt(&mut self, now: Now, key: u64) {
        match &mut self.doubt {
            Doubt::Nobody => {
                self.doubt = Doubt::Keys(vec![key]);
                self.other_at = now.mono;
            }
            Doubt::Keys(keys) if !keys.contains(&key) => {
                // How often the first failed alone says nothing of how long the sink is down.
                if keys.len() == 1 && !self.asked {
                    self.failures = 0;
                    self.state = State::Open { until: now.mono };
                }
                keys.push(key);
                self.other_at = now.mono + BREAKER_OTHER_WAIT;
                if keys.len() >= BREAKER_KEYS_MAX {
                    self.doubt = Doubt::Sink;
                }
            }
            Doubt::Keys(_) | Doubt::Sink => {}
        }
    }

    /// Whether this is one of the few keys that fail.
    fn doubts(&self, key: u64) -> bool {
        matches!(&self.doubt, Doubt::Keys(keys) if keys.contains(&key))
    }

    /// Forgets the oldest suspect when there are too many, but not this one.
    fn limit_suspects(&mut self, newest: Position) {
        if self.suspects.len() > BREAKER_SUSPECTS_MAX {
            let others = self.suspects.iter().filter(|entry| *entry.0 != newest);
            let oldest = others.min_by_key(|entry| (entry.1.since, *entry.0)).map(|entry| *entry.0);
            oldest.into_iter().for_each(|oldest| self.forget(oldest));
        }
    }

    /// Whether this event failed before for an unknown reason; such an event is sent alone.
    pub(crate) fn suspects(&self, position: Position) -> bool {
        !self.suspects.is_empty() && self.suspects.contains_key(&position)
    }

    /// The claim of an event is given back: it says nothing of others any more once it has not been seen for long.
    pub(crate) fn note_returned(&mut self, position: Position) {
        self.suspects.get_mut(&position).into_iter().for_each(|suspect| suspect.away = true);
    }

    /// Forgets an event that is no longer this instance's.
    pub(crate) fn forget(&mut self, position: Position) {
        if !self.suspects.is_empty() {
            self.suspects.remove(&position);
        }
    }

    /// Forgets the events of lanes that are no longer this instance's.
    pub(crate) fn forget_lanes(&mut self, lanes: &HashSet<u32>) {
        if !self.suspects.is_empty() {
            self.suspects.retain(|_, suspect| !lanes.contains(&suspect.lane));
        }
    }

    /// Whether one key alone fails, so that it may be the fault of its event.
    fn is_in_doubt(&self) -> bool {
        matches!(&self.doubt, Doubt::Keys(keys) if keys.len() == 1)
    }

    /// Whether sending has failed so often in a row that a caller with little time should not wait.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.is_open() && !self.wary && self.failures >= 3
    }

    /// The same, and it is the sink's fault: others may have more luck with what this instance has claimed.
    pub(crate) fn is_down(&self) -> bool {
        self.is_hopeless() && !self.is_in_doubt()
    }

    /// When the sink is tried again, whatever else happens.
    pub(crate) fn next_try(&self, now: Now) -> Timestamp {
        if self.is_open() { self.next_try } else { now.wall }
    }

    /// What to tell operators; None while all is well.
    pub(crate) fn report(&self) -> Option<BreakerReport> {
        let report = || BreakerReport { since: self.since, next_try: self.next_try, error: self.error.clone() };
        self.is_said_down().then(report)
    }

    /// Whether it is said to be down since this was last asked, or no longer. That a subscription is paused is said elsewhere.
    pub(crate) fn has_news(&mut self) -> bool {
        let is_down = self.is_said_down();
        if is_down && self.pauses {
            return false;
        }
        std::mem::replace(&mut self.reported, is_down) != is_down
    }

    /// Whether the sink is said to be down. As long as it is as likely that one event is at fault, and others go, it is not.
    fn is_said_down(&self) -> bool {
        let alone = self.is_in_doubt() && !self.asked && self.failures < BREAKER_ALONE_MAX;
        self.is_open() && !self.wary && !alone
    }

    fn is_open(&self) -> bool {
        self.state != State::Closed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::budget::Reservation;
    use crate::{Event, Headers, Payload};

    /// An event of a key of its own, in lane 0.
    fn item(position: Position) -> Item {
        let event = Event {
            position,
            id: uuid::Uuid::nil(),
            topic: "t".into(),
            key: None,
            r#type: "y".into(),
            payload: Payload::None,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(0),
            malformed: None,
        };
        let room = Reservation::default();
        Item { event: Arc::new(event), key: None, lane: 0, epoch: 1, attempts: 0, parked: false, claim: None, room }
    }

    /// The only probe under way.
    fn probing(breaker: &mut Breaker) {
        breaker.begin(Permit::Probe, 1);
    }

    fn at(seconds: u64) -> Now {
        Now { mono: Duration::from_secs(seconds), wall: Timestamp(seconds as i64 * 1000) }
    }

    #[test]
    fn opens_and_lets_one_probe_through_after_the_wait() {
        let mut breaker = Breaker::default();
        breaker.failure(at(10), "refused", None);
        assert_eq!(breaker.permit(at(10)), Permit::Nothing);
        assert_eq!(breaker.permit(at(11)), Permit::Probe);
        probing(&mut breaker);
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
            assert_eq!(breaker.suspect(at(0), &item(7), &failure), Charge::Sink);
            assert_eq!(breaker.permit(at(0)), Permit::Other, "another key does not wait");
            assert_eq!(breaker.unfitness(Permit::Other, 7, 7, true), u8::MAX, "the other is another event");
            breaker.begin(Permit::Other, 2);
            assert_eq!(breaker.permit(at(600)), Permit::Nothing, "one at a time");
            breaker.success(8);
            breaker.over(2);
            assert_eq!(breaker.suspect(at(2), &item(7), &failure), Charge::Sink);
            assert_eq!(breaker.permit(at(2)), Permit::All, "others are not held back");
            assert_eq!(breaker.suspect(at(3), &item(7), &failure), Charge::Event);
            for (round, seconds) in [(1, 1), (2, 2), (3, 4)] {
                let charge = breaker.suspect(at(10 * round), &item(7), &failure);
                assert_eq!(charge, Charge::Nobody(Duration::from_millis(seconds * 500)), "no other was sent since");
                assert_eq!((breaker.permit(at(10 * round)), breaker.report()), (Permit::All, None), "it opens nothing");
            }
            breaker.success(9);
            assert_eq!(breaker.suspect(at(50), &item(7), &failure), Charge::Event, "another was taken since");
            breaker.success(7);
            assert!(!breaker.suspects(7));
        }
    }

    #[test]
    fn one_key_alone_holds_nobody_back_and_a_second_one_for_a_second() {
        let down = Failure::sink("500");
        let mut breaker = Breaker::default();
        for second in 0..20 {
            breaker.suspect(at(second * 60), &item(7), &down);
            assert_eq!(breaker.permit(at(second * 60)), Permit::Other);
            assert_eq!(breaker.report().is_some(), second >= 2, "said to be down after {second}");
        }
        probing(&mut breaker);
        assert_eq!(breaker.permit(at(1200)), Permit::Other, "also while the suspect is at the sink");
        breaker.begin(Permit::Other, 2);
        breaker.suspect(at(1201), &item(8), &down);
        breaker.over(2);
        breaker.over(1);
        assert_eq!(breaker.permit(at(1201)), Permit::Nothing, "two keys: the sink may be down");
        assert_eq!(breaker.deadline(), Some(at(1201).mono + BREAKER_BASE), "its wait begins anew");
        assert_eq!(breaker.other_deadline(), Some(at(1201).mono + BREAKER_OTHER_WAIT));
        assert!(breaker.report().is_some());
        breaker.suspect(at(1203), &item(9), &down);
        assert_eq!(breaker.deadline(), Some(at(1203).mono + BREAKER_BASE * 2));
        breaker.success(10);
        assert_eq!((breaker.permit(at(1203)), breaker.report()), (Permit::All, None));
        assert_eq!(breaker.other_deadline(), None);
    }

    #[test]
    fn another_key_is_tried_each_second_until_so_many_have_failed_that_the_sink_is_down() {
        let down = Failure::sink("500");
        let mut breaker = Breaker::default();
        for key in 1..BREAKER_KEYS_MAX as i64 {
            breaker.suspect(at(10), &item(key), &down);
            // As the probe it fails again and again; the wait for the next one is the longest.
            (11..50).for_each(|second| _ = breaker.suspect(at(second * 60), &item(key), &down));
            assert_eq!(breaker.permit(at(49 * 60 + 1)), Permit::Other, "{key} keys fail, and another does not wait");
            for failing in 1..=key {
                assert_eq!(breaker.unfitness(Permit::Other, 1000, failing as u64, true), u8::MAX, "{failing} fails");
            }
            assert_eq!(breaker.unfitness(Permit::Other, 1000, 1000, true), 0);
        }
        let last = BREAKER_KEYS_MAX as i64;
        breaker.suspect(at(3000), &item(last), &down);
        assert_eq!((breaker.permit(at(3001)), breaker.other_deadline()), (Permit::Nothing, None), "it is down");
        breaker.success(last);
        breaker.suspect(at(4000), &item(1), &down);
        assert_eq!(breaker.permit(at(4000)), Permit::All, "it counts from the start");
    }

    #[test]
    fn a_receiver_that_says_how_long_to_wait_is_not_tried_with_another_key() {
        let throttled = Failure { retry_after: Some(Duration::from_secs(60)), ..Failure::sink("429") };
        let mut breaker = Breaker::default();
        breaker.suspect(at(0), &item(7), &throttled);
        breaker.suspect(at(0), &item(8), &throttled);
        assert_eq!((breaker.permit(at(59)), breaker.other_deadline()), (Permit::Nothing, None));
    }

    #[test]
    fn who_cannot_be_reached_is_down_whatever_was_to_be_sent() {
        let mut breaker = Breaker::default();
        let refused = Failure::unreachable("connect", "connection refused");
        assert_eq!(breaker.suspect(at(0), &item(7), &refused), Charge::Sink);
        assert_eq!(breaker.permit(at(0)), Permit::Nothing);
        assert!(breaker.report().is_some() && !breaker.suspects(7));
    }

    #[test]
    fn a_guilty_event_pays_nothing_while_the_sink_is_down() {
        let down = Failure::sink("500");
        let mut breaker = Breaker::default();
        breaker.suspect(at(0), &item(7), &down);
        breaker.success(8);
        breaker.suspect(at(1), &item(7), &down);
        assert_eq!(breaker.suspect(at(1), &item(7), &down), Charge::Event);
        breaker.success(9);
        breaker.suspect(at(2), &item(10), &down);
        breaker.suspect(at(2), &item(11), &down);
        let until = breaker.deadline();
        for second in [10, 20, 30] {
            assert!(matches!(breaker.suspect(at(second), &item(7), &down), Charge::Nobody(_)));
            assert!(breaker.deadline() > until, "as the probe it says that the sink is still down");
        }
    }

    #[test]
    fn what_is_remembered_has_a_limit_and_goes_with_the_lane() {
        let mut breaker = Breaker::default();
        let last = BREAKER_SUSPECTS_MAX as i64 + 5;
        (1..=last).for_each(|n| _ = breaker.suspect(at(n as u64), &item(n), &unclear()));
        assert_eq!(breaker.suspects.len(), BREAKER_SUSPECTS_MAX);
        assert!(!breaker.suspects(5) && breaker.suspects(6) && breaker.suspects(last));
        let elsewhere = Item { lane: 1, ..item(last + 1) };
        breaker.suspect(at(5000), &elsewhere, &unclear());
        breaker.forget_lanes(&HashSet::from([0]));
        assert_eq!(breaker.suspects.keys().copied().collect::<Vec<_>>(), [last + 1]);
        assert_eq!(breaker.suspect(at(5900), &elsewhere, &unclear()), Charge::Event, "it is alone again");
    }

    #[test]
    fn a_receiver_that_says_how_long_to_wait_is_left_alone_for_so_long() {
        let throttled = Failure { retry_after: Some(Duration::from_secs(60)), ..Failure::sink("429") };
        let mut breaker = Breaker::default();
        for round in 0..2 {
            let began = 100 * round;
            assert_eq!(breaker.suspect(at(began), &item(7), &throttled), Charge::Sink, "round {round}");
            assert!(breaker.report().is_some(), "nothing is sent meanwhile, so people are told");
            breaker.success(8);
            breaker.failure(at(began + 1), "reset", None);
            assert_eq!(breaker.permit(at(began + 59)), Permit::Nothing, "what it took meanwhile does not shorten it");
            assert_eq!(breaker.report().map(|report| report.next_try), Some(at(began + 60).wall));
            assert_eq!(breaker.permit(at(began + 60)), Permit::Probe);
            probing(&mut breaker);
            breaker.success(9);
            assert_eq!(breaker.permit(at(began + 60)), Permit::All);
        }
        assert_eq!(breaker.suspect(at(200), &item(7), &throttled), Charge::Event, "it takes others and not this one");
        assert_eq!(breaker.permit(at(200)), Permit::All);
    }

    #[test]
    fn opening_and_closing_are_told_once() {
        let mut breaker = Breaker::default();
        assert!(!breaker.has_news());
        breaker.failure(at(0), "down", None);
        breaker.failure(at(1), "down", None);
        assert!(breaker.has_news() && !breaker.has_news());
        probing(&mut breaker);
        assert!(!breaker.has_news());
        breaker.success(1);
        assert!(breaker.has_news() && !breaker.has_news());
    }

    #[test]
    fn a_failure_that_pauses_is_not_told_as_one_with_a_next_try() {
        let mut breaker = Breaker::default();
        breaker.gone(at(0), "gone", None);
        assert!(breaker.report().is_some() && !breaker.has_news());
        // Somebody has resumed the subscription too early.
        breaker.failure(at(100), "down", None);
        assert!(breaker.has_news());
        breaker.gone(at(200), "gone", None);
        assert!(!breaker.has_news(), "neither down once more nor back");
        breaker.success(1);
        assert!(breaker.has_news());
    }

    #[test]
    fn a_suspect_that_is_the_probe_does_not_end_probing_for_ever() {
        let mut breaker = Breaker::default();
        assert_eq!(breaker.suspect(at(0), &item(7), &unclear()), Charge::Sink);
        breaker.success(8);
        breaker.failure(at(1), "down", None);
        probing(&mut breaker);
        assert_eq!(breaker.suspect(at(2), &item(7), &unclear()), Charge::Sink);
        breaker.over(1);
        assert_eq!(breaker.permit(at(2)), Permit::Probe);
    }

    #[test]
    fn alone_with_a_suspect_it_is_charged_after_the_limit() {
        let mut breaker = Breaker::default();
        assert_eq!(breaker.suspect(at(0), &item(7), &unclear()), Charge::Sink);
        assert_eq!(breaker.suspect(at(899), &item(7), &unclear()), Charge::Sink);
        assert_eq!(breaker.suspect(at(900), &item(7), &unclear()), Charge::Event);
    }

    #[test]
    fn a_long_outage_charges_nobody() {
        let mut breaker = Breaker::default();
        for hour in 0..24 {
            for position in [7, 8] {
                assert_eq!(breaker.suspect(at(hour * 3600), &item(position), &unclear()), Charge::Sink);
            }
            let mut one = Breaker::default();
            assert_eq!(one.suspect(at(hour * 3600), &item(7), &Failure::sink("down")), Charge::Sink);
        }
    }

    #[test]
    fn a_suspect_that_was_given_away_long_ago_is_no_company() {
        let mut breaker = Breaker::default();
        breaker.suspect(at(0), &item(7), &unclear());
        breaker.note_returned(7);
        assert_eq!(breaker.suspect(at(1), &item(8), &unclear()), Charge::Sink);
        assert_eq!(breaker.suspect(at(899), &item(8), &unclear()), Charge::Sink, "that one may come back");
        assert_eq!(breaker.suspect(at(901), &item(8), &unclear()), Charge::Event);
        // In an outage both come again and again.
        let mut breaker = Breaker::default();
        for minute in 0..60 {
            for position in [7, 8] {
                assert_eq!(breaker.suspect(at(minute * 60), &item(position), &unclear()), Charge::Sink);
                breaker.note_returned(position);
            }
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
        probing(&mut breaker);
        breaker.refused(at(1), 6, true, "422");
        breaker.over(1);
        assert_eq!((breaker.permit(at(1)), first), (Permit::Nothing, BREAKER_BASE));
        assert_eq!(breaker.deadline(), Some(Duration::from_secs(1) + BREAKER_BASE * 2));
        assert_eq!(breaker.report().expect("open").since, at(0).wall);
        probing(&mut breaker);
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
        probing(&mut breaker);
        breaker.refused(at(1), 1, false, "422");
        breaker.over(1);
        assert_eq!(breaker.permit(at(1)), Permit::Probe, "the next may go at once, alone");
        assert_eq!((breaker.report(), breaker.is_down()), (None, false));
        probing(&mut breaker);
        assert_eq!((breaker.permit(at(1)), breaker.report()), (Permit::Nothing, None));
        breaker.refused(at(1), 6, true, "422");
        assert_eq!(breaker.permit(at(1)), Permit::Nothing);
        assert_eq!(breaker.report().expect("open again").since, at(0).wall, "nothing was taken meanwhile");
    }

    #[test]
    fn the_fittest_probe_is_the_first_try_of_a_key_that_was_not_refused() {
        let mut breaker = refusing(BREAKER_KEYS_MAX - 1);
        assert_eq!(
            (breaker.unfitness(Permit::Probe, 1, 1, false), breaker.unfitness(Permit::Probe, 6, 6, true)),
            (0, 0),
            "all alike"
        );
        breaker.refused(at(0), 5, true, "422");
        breaker.suspect(at(0), &item(9), &unclear());
        let unfitness = [(6, 6, true), (7, 5, true), (8, 6, false), (9, 9, true)]
            .map(|(position, key, first_try)| breaker.unfitness(Permit::Probe, position, key, first_try));
        assert_eq!(unfitness, [0, 1, 1, 2]);
    }

    #[test]
    fn after_a_refused_first_try_it_is_the_turn_of_a_retry() {
        let mut breaker = refusing(BREAKER_KEYS_MAX);
        assert!(!breaker.wants_retry(), "another key tells more at first");
        probing(&mut breaker);
        breaker.refused(at(1), 6, true, "422");
        assert!(breaker.wants_retry());
        assert_eq!(
            (breaker.unfitness(Permit::Probe, 1, 1, false), breaker.unfitness(Permit::Probe, 7, 7, true)),
            (0, 1)
        );
        probing(&mut breaker);
        breaker.refused(at(2), 1, false, "422");
        breaker.over(1);
        assert!(!breaker.wants_retry());
        assert_eq!(
            (breaker.unfitness(Permit::Probe, 1, 1, false), breaker.unfitness(Permit::Probe, 7, 7, true)),
            (1, 0)
        );
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
