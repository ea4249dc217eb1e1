use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    Cursor, Event, Filter, KeyHash, OnDead, Position, RangeSet, RetryPolicy, Subscription, Timestamp, lane_of,
};

/// Maximum number of former filters of a subscription that are kept. Of older ones, only what was passed under them is
/// known.
pub const FORMER_FILTERS_MAX: usize = 100;

/// Maximum number of ranges of positions in the former filters of a subscription. Beyond it, the oldest filters are
/// dropped.
pub(crate) const FORMER_RANGES_MAX: usize = 10_000;

/// The settings of a subscription as stored in the database, written by the relay that was started last. Every relay
/// that runs the subscription uses them, whatever its own configuration says.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The number, raised by every change. A change of the filter raises the epochs of all lanes in the same
    /// transaction: under one epoch a lane is read with one filter.
    pub number: i64,
    /// The filter.
    pub filter: Filter,
    /// What a dead event does to its key.
    pub on_dead: OnDead,
    /// The retry policy.
    pub retry: RetryPolicy,
    /// See [`Subscription::processing_timeout`].
    pub processing_timeout: Duration,
}

impl Definition {
    /// The definition of a configured subscription, with this number.
    pub fn of(subscription: &Subscription, number: i64) -> Self {
        Definition {
            number,
            filter: subscription.filter.clone(),
            on_dead: subscription.on_dead,
            retry: subscription.retry,
            processing_timeout: whole_milliseconds(subscription.processing_timeout),
        }
    }

    /// Whether another definition is equal, apart from the number.
    pub fn says_the_same_as(&self, other: &Definition) -> bool {
        *self == Definition { number: self.number, ..other.clone() }
    }
}

/// As databases keep it: else a definition would differ from itself.
fn whole_milliseconds(time: Duration) -> Duration {
    Duration::from_millis(i64::try_from(time.as_millis()).unwrap_or(i64::MAX) as u64)
}

impl Default for Definition {
    fn default() -> Self {
        Definition::of(&Subscription::new(""), 0)
    }
}

/// A filter that was replaced, with what the lanes had settled by then.
#[derive(Debug, Clone, PartialEq)]
pub struct FormerFilter {
    /// The number of the last definition with this filter.
    pub definition: i64,
    /// The filter; None: too many have followed, and it is no longer known.
    pub filter: Option<Filter>,
    /// The time at which it was replaced.
    pub until: Timestamp,
    /// The positions settled by then, one set per lane: passed under this filter or an earlier one.
    pub passed: Vec<RangeSet>,
}

impl FormerFilter {
    fn has_passed(&self, key: Option<KeyHash>, position: Position) -> bool {
        let lane = lane_of(key, position, self.passed.len() as u32);
        self.passed.get(lane as usize).is_some_and(|passed| passed.contains(position))
    }
}

/// The filters that a subscription had before the current one, oldest first. They tell which filter judged an event.
///
/// A position is judged once, by the filter in force when it is settled. Positions that were settled when a filter was
/// replaced were judged by it or by an earlier one; all others are read again, with the new filter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FormerFilters(Vec<FormerFilter>);

#[derive(Serialize, Deserialize)]
struct Stored {
    definition: i64,
    filter: Option<Filter>,
    until: i64,
    passed: Vec<String>,
}

impl FormerFilters {
    /// Parses the stored text. A filter that cannot be read, for example of a newer version, counts as unknown; what
    /// was passed under it is kept.
    pub fn parse(text: &str) -> Self {
        let stored: Vec<serde_json::Value> = serde_json::from_str(text).unwrap_or_default();
        let read = |mut stored: serde_json::Value| {
            let known = Stored::deserialize(&stored).ok();
            let stored = known.or_else(|| {
                stored.as_object_mut()?.insert("filter".to_owned(), serde_json::Value::Null);
                Stored::deserialize(&stored).ok()
            })?;
            Some(FormerFilter {
                definition: stored.definition,
                filter: stored.filter,
                until: Timestamp(stored.until),
                passed: stored.passed.iter().map(|passed| passed.parse().unwrap_or_default()).collect(),
            })
        };
        FormerFilters(stored.into_iter().filter_map(read).collect())
    }

    /// The text to store.
    pub fn to_text(&self) -> String {
        let write = |former: &FormerFilter| Stored {
            definition: former.definition,
            filter: former.filter.clone(),
            until: former.until.0,
            passed: former.passed.iter().map(RangeSet::to_string).collect(),
        };
        serde_json::to_string(&self.0.iter().map(write).collect::<Vec<_>>()).expect("plain data is JSON")
    }

    /// Records that a filter was replaced; `cursors` are those of all lanes, in order. A filter under which nothing was
    /// passed is not recorded.
    pub fn end<'a>(&mut self, ended: &Definition, until: Timestamp, cursors: impl IntoIterator<Item = &'a Cursor>) {
        let passed: Vec<RangeSet> = cursors.into_iter().map(Cursor::positions).collect();
        let nothing_since = match self.0.last() {
            Some(last) => last.passed == passed,
            None => passed.iter().all(RangeSet::is_empty),
        };
        if nothing_since {
            return;
        }
        self.0.push(FormerFilter { definition: ended.number, filter: Some(ended.filter.clone()), until, passed });
        self.limit();
    }

    /// Keeps to the limits. What was passed under the oldest filters is still known, and no longer by which of them.
    fn limit(&mut self) {
        let ranges = |former: &FormerFilter| former.passed.iter().map(RangeSet::len).sum::<usize>();
        let mut total: usize = self.0.iter().map(ranges).sum();
        while self.0.len() > FORMER_FILTERS_MAX || (self.0.len() > 1 && total > FORMER_RANGES_MAX) {
            total -= ranges(&self.0.remove(0));
            self.0[0].filter = None;
        }
        if let [last] = &mut self.0[..]
            && total > FORMER_RANGES_MAX
        {
            last.filter = None;
            for passed in &mut last.passed {
                let (first, end) = (passed.first().unwrap_or(1), passed.last().unwrap_or(0));
                passed.insert_range(first, end);
            }
        }
    }

    /// The filter under which a position was passed; None: the current filter judges it.
    pub fn judge_of(&self, key: Option<KeyHash>, position: Position) -> Option<&FormerFilter> {
        self.0.iter().find(|former| former.has_passed(key, position))
    }

    /// The positions that a current lane had settled when any of the filters was replaced, even if its cursor was set
    /// back since.
    pub fn passed_by(&self, lane: u32, lanes: usize) -> RangeSet {
        let mut passed = RangeSet::new();
        for former in self.0.iter().filter(|former| former.passed.len() == lanes) {
            passed.union(&former.passed[lane as usize]);
        }
        passed
    }

    /// Records that the subscription was rewound: positions outside `kept` are read again and judged by the current
    /// filter.
    pub fn rewind(&mut self, kept: &RangeSet) {
        let undone = kept.missing(1, Position::MAX - 1);
        self.0.iter_mut().flat_map(|former| &mut former.passed).for_each(|passed| passed.subtract(&undone));
    }

    /// Records that a settled event is to be delivered again, or delivered late, because the current filter wants it.
    pub fn replay(&mut self, key: Option<KeyHash>, position: Position, topic: &str, r#type: &str) {
        let wanted = |former: &FormerFilter| former.filter.as_ref().is_some_and(|filter| filter.matches(topic, r#type));
        if !self.judge_of(key, position).is_none_or(wanted) {
            self.forget(key, position);
        }
    }

    /// Makes the current filter judge a position, whatever it was passed under.
    pub fn forget(&mut self, key: Option<KeyHash>, position: Position) {
        for former in &mut self.0 {
            let lane = lane_of(key, position, former.passed.len() as u32) as usize;
            former.passed.get_mut(lane).into_iter().for_each(|passed| passed.remove(position));
        }
        self.limit();
    }

    /// Drops filters that concern no event from `log_start` on. Returns whether it dropped any.
    pub fn prune(&mut self, log_start: Position) -> bool {
        let before = self.0.len();
        self.0.retain(|former| former.passed.iter().any(|passed| passed.last().is_some_and(|last| last >= log_start)));
        self.0.len() < before
    }

    /// Whether there are no former filters.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of former filters.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the filter that judges an event wants it, where `filter` is the current one; None: that filter is no
    /// longer known.
    pub fn wants(&self, filter: &Filter, event: &Event) -> Option<bool> {
        match self.judge_of(event.key_hash(), event.position) {
            None => Some(filter.wants(event)),
            Some(former) => former.filter.as_ref().map(|filter| filter.wants(event)),
        }
    }

    /// The former filter that judged an event; None: the current one judges it.
    pub fn passed_under(&self, event: &Event) -> Option<PassedUnder> {
        let FormerFilter { definition, filter, until, .. } = self.judge_of(event.key_hash(), event.position)?;
        Some(PassedUnder { definition: *definition, until: *until, filter: filter.clone() })
    }
}

/// A former filter of a subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PassedUnder {
    /// The number of the last definition with this filter.
    pub definition: i64,
    /// The time at which it was replaced.
    pub until: Timestamp,
    /// The filter; None: too many have followed, and it is no longer known.
    pub filter: Option<Filter>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Option<KeyHash> = Some(KeyHash(0));

    fn cursor(floor: Position, settled: &[Position]) -> Cursor {
        Cursor { floor, settled: settled.iter().map(|&position| position..=position).collect(), anchor: None }
    }

    fn definition(number: i64, topic: &str) -> Definition {
        Definition { number, filter: Filter { topics: vec![topic.into()], types: Vec::new() }, ..Definition::default() }
    }

    fn judge(formers: &FormerFilters, position: Position) -> Option<i64> {
        formers.judge_of(KEY, position).map(|former| former.definition)
    }

    #[test]
    fn a_position_is_judged_by_the_filter_under_which_it_was_settled() {
        let mut formers = FormerFilters::default();
        formers.end(&definition(1, "a"), Timestamp(10), [&cursor(5, &[8])]);
        formers.end(&definition(2, "b"), Timestamp(20), [&cursor(5, &[8])]);
        formers.end(&definition(3, "c"), Timestamp(30), [&cursor(9, &[])]);
        assert_eq!(formers.len(), 2, "nothing was passed under the second");
        let judges: Vec<_> = [1, 5, 6, 8, 9, 10].map(|position| judge(&formers, position)).into();
        assert_eq!(judges, [Some(1), Some(1), Some(3), Some(1), Some(3), None]);
        assert_eq!(formers.passed_by(0, 1), RangeSet::from_iter([1..=9]));
        assert!(formers.passed_by(0, 2).is_empty(), "of other lanes it says nothing as a whole");
        assert_eq!(FormerFilters::parse(&formers.to_text()), formers);
        assert_eq!(FormerFilters::parse("not what was written"), FormerFilters::default());
    }

    #[test]
    fn a_rewind_undoes_judgements_and_a_replay_that_of_an_event_that_was_not_wanted() {
        let mut formers = FormerFilters::default();
        formers.end(&definition(1, "a"), Timestamp(10), [&cursor(9, &[])]);
        formers.replay(KEY, 3, "a", "y");
        assert_eq!(judge(&formers, 3), Some(1), "it was wanted and delivered");
        formers.replay(KEY, 4, "b", "y");
        assert_eq!([3, 4, 5].map(|position| judge(&formers, position)), [Some(1), None, Some(1)]);
        formers.rewind(&RangeSet::from_iter([1..=4, 7..=7]));
        assert_eq!([3, 4, 5, 7, 8].map(|position| judge(&formers, position)), [Some(1), None, None, Some(1), None]);
        assert!(!formers.prune(7) && formers.prune(8) && formers.is_empty());
    }

    #[test]
    fn of_too_many_filters_the_oldest_are_not_known_any_more() {
        let mut formers = FormerFilters::default();
        for number in 1..=FORMER_FILTERS_MAX as i64 + 2 {
            formers.end(&definition(number, "a"), Timestamp(number), [&cursor(number, &[])]);
        }
        assert_eq!(formers.len(), FORMER_FILTERS_MAX);
        let known = |position| formers.judge_of(KEY, position).map(|former| former.filter.is_some());
        assert_eq!([1, 3, 4, 200].map(known), [Some(false), Some(false), Some(true), None]);
    }

    #[test]
    fn the_ranges_have_a_limit() {
        let mut formers = FormerFilters::default();
        let last = FORMER_RANGES_MAX as Position * 2;
        formers.end(&definition(1, "a"), Timestamp(10), [&cursor(last, &[])]);
        formers.end(&definition(2, "b"), Timestamp(20), [&cursor(last * 2, &[])]);
        (1..last / 2).step_by(2).for_each(|position| formers.forget(KEY, position));
        let known = |formers: &FormerFilters, position| formers.judge_of(KEY, position).map(|it| it.filter.is_some());
        assert_eq!([2, 3, last + 1].map(|position| known(&formers, position)), [Some(true), None, Some(true)]);
        (last / 2 + 1..last * 2).step_by(2).for_each(|position| formers.forget(KEY, position));
        assert_eq!(known(&formers, last + 2), Some(false), "by which of them is not known any more");
        assert!(formers.to_text().len() < FORMER_RANGES_MAX * 20, "{} bytes", formers.to_text().len());
    }

    #[test]
    fn lanes_are_those_of_the_time() {
        let mut formers = FormerFilters::default();
        formers.end(&definition(1, "a"), Timestamp(10), [&cursor(5, &[]), &cursor(9, &[])]);
        let keys: Vec<KeyHash> = (0..100u64).map(|number| KeyHash::of(&format!("k{number}"))).collect();
        for key in keys {
            let passed = if lane_of(Some(key), 7, 2) == 1 { Some(1) } else { None };
            assert_eq!(formers.judge_of(Some(key), 7).map(|former| former.definition), passed);
        }
    }
}
