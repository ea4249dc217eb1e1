//! What retention gives up, and what it finds where nothing was to be, whatever the database.
use std::time::Duration;

use super::BacklogRow;
use super::snapshot::{LaneRow, SubscriptionRow};
use crate::{Cursor, Epoch, FormerFilters, Position, PrunePolicy, RangeSet, State, Timestamp};

/// What is stored for a time that never ends.
pub const FOREVER_MS: i64 = i64::MAX;

/// The retention that a log itself demands, in milliseconds or [`FOREVER_MS`].
#[derive(Debug, Clone, Copy)]
pub struct StoredRetention {
    /// For events.
    pub keep_ms: i64,
    /// For dead deliveries.
    pub dead_ms: i64,
    /// For the ids in inboxes.
    pub inbox_ms: i64,
}

impl PrunePolicy {
    /// What was asked for, but nothing is kept for less time than the log demands.
    pub fn at_least(&self, stored: StoredRetention) -> PrunePolicy {
        PrunePolicy {
            keep: at_least(self.keep, stored.keep_ms),
            dead: at_least(self.dead, stored.dead_ms),
            inbox: at_least(self.inbox, stored.inbox_ms),
            ..*self
        }
    }
}

/// What was asked for, but not less than the log's own policy; None: for ever.
pub fn at_least(asked: Option<Duration>, stored_ms: i64) -> Option<Duration> {
    asked.and_then(|asked| Some(asked.max(stored_time(stored_ms)?)))
}

/// A stored time; None: for ever.
pub fn stored_time(stored_ms: i64) -> Option<Duration> {
    (stored_ms != FOREVER_MS).then(|| Duration::from_millis(stored_ms.max(0) as u64))
}

/// A time as it is stored; None: for ever.
pub fn time_to_store(time: Option<Duration>) -> i64 {
    time.map_or(FOREVER_MS, |time| i64::try_from(time.as_millis()).unwrap_or(FOREVER_MS))
}

/// The events above the floor of a subscription that its hold no longer keeps, taken one by one in log order.
#[derive(Debug)]
pub struct ExpiringHold<'a> {
    subscription: &'a SubscriptionRow,
    former_filters: &'a FormerFilters,
    oldest: Timestamp,
    taken: RangeSet,
    lost: RangeSet,
}

impl<'a> ExpiringHold<'a> {
    /// None if the subscription keeps everything.
    pub fn new(
        subscription: &'a SubscriptionRow,
        former_filters: &'a FormerFilters,
        keep: Duration,
        now: Timestamp,
    ) -> Option<Self> {
        let oldest = subscription.kept_since(keep, now)?;
        Some(ExpiringHold { subscription, former_filters, oldest, taken: RangeSet::new(), lost: RangeSet::new() })
    }

    /// Takes the next event above the floor; false: the hold still keeps it, and all that come after it.
    pub fn take(&mut self, line: &BacklogRow<'_>) -> bool {
        if line.created_at >= self.oldest {
            return false;
        }
        self.taken.insert(line.position);
        if line.is_lost_to(self.subscription, self.former_filters) {
            self.lost.insert(line.position);
        }
        true
    }

    /// The position of the last event that was taken: every lane moves there. None: the subscription loses nothing.
    pub fn end(&self) -> Option<Position> {
        self.taken.last()
    }

    /// The positions up to the end that show no event, are not `closed`, and that some lane has not settled: an event may yet appear there.
    pub fn unknown(&self, closed: &RangeSet) -> RangeSet {
        let (low, high) = (self.subscription.floor() + 1, self.end().unwrap_or(0));
        let mut unknown = self.taken.missing(low, high);
        unknown.subtract(closed);
        let mut unsettled = RangeSet::new();
        for lane in &self.subscription.lanes {
            unsettled.union(&lane.cursor.settled.missing(lane.cursor.floor + 1, high));
        }
        unknown.subtract(&unsettled.missing(low, high));
        unknown
    }

    /// The lanes that are moved.
    pub fn lanes(&self) -> impl Iterator<Item = &'a LaneRow> + use<'a> {
        let end = self.end().unwrap_or(0);
        self.subscription.lanes.iter().filter(move |lane| lane.cursor.floor < end)
    }

    /// What has a delivery is not lost: a cursor that was cut at its limit does not count all that have one.
    pub fn keep_deliveries(&mut self, deliveries: &RangeSet) {
        self.lost.subtract(deliveries);
    }

    /// How one of them is moved, which has these `deliveries` between its floor and the end.
    pub fn jump(&mut self, lane: &LaneRow, deliveries: &RangeSet) -> Jump {
        self.keep_deliveries(deliveries);
        let (floor, end) = (lane.cursor.floor, self.end().unwrap_or(0));
        let passed = self.former_filters.passed_by(lane.lane, self.subscription.lanes.len());
        let mut covered = lane.cursor.settled.within(floor + 1, end);
        covered.union(&passed.within(floor + 1, end));
        covered.union(&deliveries.within(floor + 1, end));
        let left_out = covered.missing(floor + 1, end);
        let mut settled = lane.cursor.settled.clone();
        settled.remove_range(0, end);
        Jump { cursor: Cursor { floor: end, settled, ..lane.cursor.clone() }, covered, left_out }
    }

    /// The events that the subscription wanted and does not receive, once the deliveries of every lane are known.
    pub fn lost(&self) -> &RangeSet {
        &self.lost
    }

    /// Says in the log what was lost, with the positions that were given up while somebody may still publish there.
    pub fn log(&self, unknown: &RangeSet) {
        let events = self.lost.count() + unknown.count();
        if events > 0 {
            tracing::error!(
                subscription = self.subscription.name,
                events,
                to = self.end().unwrap_or(0),
                "events were dropped undelivered: the subscription's hold is over"
            );
        }
    }
}

/// How a lane goes past what its subscription's hold no longer keeps. Its owner loads it again.
#[derive(Debug, PartialEq)]
pub struct Jump {
    /// The cursor from then on.
    pub cursor: Cursor,
    /// What is recorded as settled under the lane's epoch: by now, or when a filter ended.
    pub covered: RangeSet,
    /// What is recorded as left out, under epoch 0.
    pub left_out: RangeSet,
}

impl Jump {
    /// The records of progress, for a lane of this epoch.
    pub fn records(&self, epoch: Epoch) -> [(Epoch, &RangeSet); 2] {
        [(epoch, &self.covered), (0, &self.left_out)]
    }
}

/// What a subscription does about an event that appeared at a closed position.
#[derive(Debug)]
pub enum Late<'a> {
    /// It does not want the event, which was never sent, also where a former filter had passed the position and would have wanted it.
    Forget,
    /// The lane has not settled the position. Its owner may have closed the hole in memory already: it has to load the lane again, where
    /// the hole is open.
    ReadAgain(&'a LaneRow),
    /// The lane has passed the position. The event becomes a delivery, unless the lane was never to deliver it.
    Deliver {
        /// Whose.
        lane: &'a LaneRow,
        /// Pending or delayed.
        state: State,
        /// The time of the first attempt.
        due_at: Timestamp,
    },
}

impl SubscriptionRow {
    /// The age that an event needs for the hold not to keep it: it is older than this. None: everything is kept. Nothing is dropped that
    /// retention would `keep`.
    pub fn kept_since(&self, keep: Duration, now: Timestamp) -> Option<Timestamp> {
        self.hold.map(|hold| now.minus(hold.max(keep)))
    }

    /// What to do about this event, which appeared at a closed position. None: the subscription has no lanes.
    pub fn late(&self, line: &BacklogRow<'_>, now: Timestamp) -> Option<Late<'_>> {
        let lane = self.lane_at(line.key_hash, line.position)?;
        if !self.filter.matches(&line.topic, &line.r#type) {
            return Some(Late::Forget);
        }
        if !lane.has_settled(line.position) {
            return Some(Late::ReadAgain(lane));
        }
        let due_at = line.delayed_until(now);
        let state = if due_at.is_some() { State::Delayed } else { State::Pending };
        Some(Late::Deliver { lane, state, due_at: due_at.unwrap_or(now) })
    }
}

/// How many events at closed positions are delivered late by one run of retention; the next run finds the others.
pub const RISEN_MAX: i64 = 1000;

/// How many ranges of closed positions one run of retention looks at; the next one goes on from there, from the newest to the oldest and over again.
pub const DEAD_RANGES_LOOKED_AT_MAX: i64 = 10_000;

/// The next ranges of closed positions, as one run of retention has found them.
#[derive(Debug, Clone, Copy)]
pub struct DeadLook {
    /// How many there are, at most [`DEAD_RANGES_LOOKED_AT_MAX`].
    pub ranges: i64,
    /// Where the oldest of them begins.
    pub first: Option<Position>,
}

impl DeadLook {
    /// The ranges below this position come next. `below`: where this run began; `risen`: how many events it delivered, at most
    /// [`RISEN_MAX`], after which the same ranges come again.
    pub fn next(&self, below: Position, risen: u64) -> Position {
        if risen >= RISEN_MAX as u64 {
            return below;
        }
        self.first.filter(|_| self.ranges >= DEAD_RANGES_LOOKED_AT_MAX).unwrap_or(Position::MAX)
    }
}

/// Says in the log that events appeared where none was to be.
pub fn log_risen(risen: &RangeSet) {
    tracing::error!(
        events = risen.count(),
        positions = %risen,
        "events appeared at closed positions and are delivered late; applications must not insert positions"
    );
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::{Filter, KeyHash, Mode, OnDead, RetryPolicy, SubscriptionId};

    const NOW: Timestamp = Timestamp(1_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn set(ranges: &str) -> RangeSet {
        ranges.parse().unwrap()
    }

    fn subscription(floor: Position, settled: &str) -> SubscriptionRow {
        let cursor = Cursor { floor, settled: set(settled), ..Cursor::default() };
        SubscriptionRow {
            id: SubscriptionId(1),
            name: "s".to_owned(),
            filter: Filter { topics: vec!["wanted".to_owned()], types: Vec::new() },
            definition: 1,
            mode: Mode::Stream,
            on_dead: OnDead::Block,
            hold: Some(10 * SECOND),
            retry: RetryPolicy::sink(),
            pause: None,
            lanes: vec![LaneRow { lane: 0, cursor, owner: None, epoch: 7, revision: 1 }],
        }
    }

    fn line(position: Position, topic: &'static str, age: Duration) -> BacklogRow<'static> {
        BacklogRow {
            position,
            topic: Cow::Borrowed(topic),
            r#type: Cow::Borrowed("t"),
            key: Some("k"),
            key_hash: Some(KeyHash::of("k")),
            deliver_at: None,
            created_at: NOW.minus(age),
        }
    }

    #[test]
    fn nothing_is_kept_for_less_than_the_log_demands() {
        let stored = StoredRetention { keep_ms: 5_000, dead_ms: FOREVER_MS, inbox_ms: -1 };
        let asked =
            PrunePolicy { keep: Some(SECOND), dead: Some(SECOND), inbox: Some(SECOND), ..PrunePolicy::default() };
        let policy = asked.at_least(stored);
        assert_eq!((policy.keep, policy.dead, policy.inbox), (Some(5 * SECOND), None, Some(SECOND)));
        let policy = PrunePolicy { keep: None, ..asked }.at_least(stored);
        assert_eq!(policy.keep, None, "for ever is longer than any demand");
        assert_eq!(stored_time(time_to_store(Some(SECOND))), Some(SECOND));
        assert_eq!(stored_time(time_to_store(None)), None);
    }

    #[test]
    fn a_hold_that_is_over_gives_up_what_is_wanted_not_settled_and_no_delivery() {
        let (row, formers) = (subscription(1, "3,9"), FormerFilters::default());
        let mut hold = ExpiringHold::new(&row, &formers, SECOND, NOW).unwrap();
        for position in 2..=5 {
            assert!(hold.take(&line(position, "wanted", 11 * SECOND)));
        }
        assert!(hold.take(&line(7, "other", 11 * SECOND)));
        assert!(!hold.take(&line(8, "wanted", 10 * SECOND)), "it is exactly as old as the hold");
        assert_eq!(hold.end(), Some(7));
        assert_eq!((hold.unknown(&RangeSet::new()), hold.unknown(&set("6"))), (set("6"), RangeSet::new()));
        let lanes: Vec<_> = hold.lanes().collect();
        let jump = hold.jump(lanes[0], &set("4"));
        let cursor = Cursor { floor: 7, settled: set("9"), ..row.lanes[0].cursor.clone() };
        assert_eq!(jump, Jump { cursor, covered: set("3-4"), left_out: set("2,5-7") });
        assert_eq!(jump.records(7), [(7, &set("3-4")), (0, &set("2,5-7"))]);
        assert_eq!(hold.lost(), &set("2,5"));
    }

    #[test]
    fn a_hold_drops_nothing_that_retention_keeps() {
        let (row, formers) = (subscription(0, ""), FormerFilters::default());
        let mut hold = ExpiringHold::new(&row, &formers, 20 * SECOND, NOW).unwrap();
        assert!(!hold.take(&line(1, "wanted", 20 * SECOND)));
        assert_eq!((hold.end(), hold.lanes().count()), (None, 0));
        let row = SubscriptionRow { hold: None, ..row };
        assert!(ExpiringHold::new(&row, &formers, SECOND, NOW).is_none());
    }

    #[test]
    fn closed_ranges_are_looked_at_in_rotation() {
        let full = DeadLook { ranges: DEAD_RANGES_LOOKED_AT_MAX, first: Some(40) };
        assert_eq!(full.next(Position::MAX, 999), 40);
        assert_eq!(full.next(90, RISEN_MAX as u64), 90, "there may be more events in the same");
        assert_eq!(DeadLook { ranges: 3, first: Some(4) }.next(40, 0), Position::MAX, "those were the last");
        assert_eq!(DeadLook { ranges: 0, first: None }.next(40, 0), Position::MAX);
    }

    #[test]
    fn an_event_at_a_closed_position_is_read_again_delivered_late_or_forgotten() {
        let row = subscription(5, "");
        assert!(matches!(row.late(&line(5, "other", SECOND), NOW), Some(Late::Forget)));
        assert!(matches!(row.late(&line(6, "wanted", SECOND), NOW), Some(Late::ReadAgain(_))));
        let at = |deliver_at| match row.late(&BacklogRow { deliver_at, ..line(5, "wanted", SECOND) }, NOW) {
            Some(Late::Deliver { state, due_at, .. }) => (state, due_at),
            other => panic!("{other:?}"),
        };
        assert_eq!(at(None), (State::Pending, NOW));
        assert_eq!(at(Some(NOW.plus(SECOND))), (State::Delayed, NOW.plus(SECOND)));
    }
}
