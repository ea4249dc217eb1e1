use std::fmt;
use std::ops::RangeInclusive;

use crate::{Error, ErrorKind, Position, Result};

/// A set of positions, kept as sorted disjoint ranges that do not touch.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: Vec<(Position, Position)>,
}

impl RangeSet {
    /// The empty set.
    pub const fn new() -> Self {
        RangeSet { ranges: Vec::new() }
    }

    /// Whether no position is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many ranges there are.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// How many positions there are.
    pub fn count(&self) -> u64 {
        self.ranges
            .iter()
            .fold(0, |count: u64, (low, high)| count.saturating_add(high.abs_diff(*low)).saturating_add(1))
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = RangeInclusive<Position>> + '_ {
        self.ranges.iter().map(|&(low, high)| low..=high)
    }

    /// The lowest position.
    pub fn first(&self) -> Option<Position> {
        self.ranges.first().map(|range| range.0)
    }

    /// The highest position.
    pub fn last(&self) -> Option<Position> {
        self.ranges.last().map(|range| range.1)
    }

    /// Whether `position` is in the set.
    pub fn contains(&self, position: Position) -> bool {
        let index = self.ranges.partition_point(|range| range.1 < position);
        self.ranges.get(index).is_some_and(|range| range.0 <= position)
    }

    /// The highest position of the set below `position`.
    pub fn before(&self, position: Position) -> Option<Position> {
        let index = self.ranges.partition_point(|range| range.0 < position);
        self.ranges[..index].last().map(|range| range.1.min(position - 1))
    }

    /// The lowest position of the set above `position`.
    pub fn after(&self, position: Position) -> Option<Position> {
        let index = self.ranges.partition_point(|range| range.1 <= position);
        self.ranges.get(index).map(|range| range.0.max(position + 1))
    }

    /// Adds one position; cheap when it is the highest so far.
    pub fn insert(&mut self, position: Position) {
        self.insert_range(position, position);
    }

    /// Adds `low..=high`; nothing if `low > high`.
    pub fn insert_range(&mut self, low: Position, high: Position) {
        if low > high {
            return;
        }
        match self.ranges.last_mut() {
            None => return self.ranges.push((low, high)),
            Some(last) if low > last.1.saturating_add(1) => return self.ranges.push((low, high)),
            Some(last) if low >= last.0 => return last.1 = last.1.max(high),
            Some(_) => {}
        }
        let start = self.ranges.partition_point(|range| range.1.saturating_add(1) < low);
        let end = self.ranges.partition_point(|range| range.0 <= high.saturating_add(1));
        if start == end {
            return self.ranges.insert(start, (low, high));
        }
        let merged = (low.min(self.ranges[start].0), high.max(self.ranges[end - 1].1));
        self.ranges.splice(start..end, [merged]);
    }

    /// Removes one position.
    pub fn remove(&mut self, position: Position) {
        self.remove_range(position, position);
    }

    /// Removes `low..=high`.
    pub fn remove_range(&mut self, low: Position, high: Position) {
        if low > high {
            return;
        }
        let start = self.ranges.partition_point(|range| range.1 < low);
        let end = self.ranges.partition_point(|range| range.0 <= high);
        if start >= end {
            return;
        }
        // Nothing lies below the lowest position or above the highest.
        let left = low.checked_sub(1).map(|below| (self.ranges[start].0, below));
        let right = high.checked_add(1).map(|above| (above, self.ranges[end - 1].1));
        let kept = [left, right].into_iter().flatten().filter(|range| range.0 <= range.1);
        self.ranges.splice(start..end, kept);
    }

    /// Adds every position of `other`.
    pub fn union(&mut self, other: &RangeSet) {
        other.ranges.iter().for_each(|&(low, high)| self.insert_range(low, high));
    }

    /// Removes every position of `other`.
    pub fn subtract(&mut self, other: &RangeSet) {
        other.ranges.iter().for_each(|&(low, high)| self.remove_range(low, high));
    }

    /// The lowest position of the set that is not in `other`.
    pub(crate) fn first_outside(&self, other: &RangeSet) -> Option<Position> {
        let mut others = other.ranges.iter().peekable();
        for &(low, high) in &self.ranges {
            while others.next_if(|range| range.1 < low).is_some() {}
            match others.peek() {
                Some(range) if range.0 <= low && range.1 >= high => {}
                Some(range) if range.0 <= low => return Some(range.1 + 1),
                _ => return Some(low),
            }
        }
        None
    }

    /// The positions of `low..=high` that are in the set.
    pub fn within(&self, low: Position, high: Position) -> RangeSet {
        if low > high {
            return RangeSet::new();
        }
        let start = self.ranges.partition_point(|range| range.1 < low);
        let cut = |range: &(Position, Position)| (range.0.max(low), range.1.min(high));
        let ranges = self.ranges[start..].iter().take_while(|range| range.0 <= high).map(cut).collect();
        RangeSet { ranges }
    }

    /// The positions of `low..=high` that are not in the set.
    pub fn missing(&self, low: Position, high: Position) -> RangeSet {
        let mut missing = RangeSet::new();
        missing.insert_range(low, high);
        missing.subtract(&self.within(low, high));
        missing
    }
}

impl FromIterator<RangeInclusive<Position>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = RangeInclusive<Position>>>(ranges: I) -> Self {
        let mut set = RangeSet::new();
        ranges.into_iter().for_each(|range| set.insert_range(*range.start(), *range.end()));
        set
    }
}

/// `5,7-9`: what cursors and resume tokens store.
impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (low, high)) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if low == high { write!(f, "{comma}{low}")? } else { write!(f, "{comma}{low}-{high}")? }
        }
        Ok(())
    }
}

impl fmt::Debug for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl std::str::FromStr for RangeSet {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || Error::new(ErrorKind::Invalid, format!("'{text}' is not a list of ranges like 5,7-9"));
        let number = |text: &str| text.parse::<Position>().map_err(|_| invalid());
        let mut set = RangeSet::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            let (low, high) = (number(low)?, number(high)?);
            if low > high {
                return Err(invalid());
            }
            set.insert_range(low, high);
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn positions(set: &RangeSet) -> BTreeSet<Position> {
        set.iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn behaves_like_a_set_of_positions(steps in prop::collection::vec((any::<bool>(), 0i64..60, 0i64..12), 0..60)) {
            let mut set = RangeSet::new();
            let mut model = BTreeSet::new();
            for (add, low, length) in steps {
                let range = low..=low + length;
                if add {
                    set.insert_range(low, low + length);
                    model.extend(range);
                } else {
                    set.remove_range(low, low + length);
                    range.for_each(|position| { model.remove(&position); });
                }
                prop_assert_eq!(positions(&set), model.clone());
                prop_assert!(set.ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0), "ranges touch: {:?}", set);
                prop_assert_eq!(set.count(), model.len() as u64);
                prop_assert_eq!(set.to_string().parse::<RangeSet>().unwrap(), set.clone());
                let missing: BTreeSet<_> = (10..=40).filter(|position| !model.contains(position)).collect();
                prop_assert_eq!(positions(&set.missing(10, 40)), missing);
                prop_assert!((0..80).all(|position| set.contains(position) == model.contains(&position)));
                prop_assert!((0..80).all(|position| set.before(position) == model.range(..position).next_back().copied()));
                prop_assert!((0..80).all(|position| set.after(position) == model.range(position + 1..).next().copied()));
            }
        }
    }

    #[test]
    fn holds_at_the_lowest_and_the_highest_position() {
        const ALL: (Position, Position) = (Position::MIN, Position::MAX);
        let all: RangeSet = [ALL.0..=ALL.1].into_iter().collect();
        let without = |low, high| {
            let mut set = all.clone();
            set.remove_range(low, high);
            set.iter().collect::<Vec<_>>()
        };
        assert_eq!(without(ALL.0, ALL.1), []);
        assert_eq!(without(ALL.0, 4), [5..=ALL.1]);
        assert_eq!(without(5, ALL.1), [ALL.0..=4]);
        assert_eq!(without(ALL.0, ALL.0), [ALL.0 + 1..=ALL.1]);
        assert_eq!(without(ALL.1, ALL.1), [ALL.0..=ALL.1 - 1]);
        assert_eq!(all.missing(ALL.0, ALL.1), RangeSet::new());
        assert_eq!(RangeSet::new().missing(ALL.0, ALL.1), all);
        assert_eq!(all.count(), u64::MAX, "as many as can be said");
    }

    #[test]
    fn finds_the_first_position_that_another_set_lacks() {
        let first = |own: &str, other: &str| {
            own.parse::<RangeSet>().unwrap().first_outside(&other.parse::<RangeSet>().unwrap())
        };
        assert_eq!(first("", "1"), None);
        assert_eq!(first("2-3,7", "1-4,6-9"), None);
        assert_eq!(first("2-3,7", "1-4"), Some(7));
        assert_eq!(first("2-5,7", "1-3,5"), Some(4));
        assert_eq!(first("2-5", "3-9"), Some(2));
        assert_eq!(first("5", "1-2,4,6"), Some(5));
    }

    #[test]
    fn refuses_text_that_is_no_list_of_ranges() {
        for text in ["x", "3-1", "1-", "1;2"] {
            assert!(text.parse::<RangeSet>().is_err(), "{text}");
        }
    }
}
