use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use crate::work::looked_at;
use crate::{Position, RangeSet, Scan};

/// Positions up to a lane's top that no read has shown yet. Lanes that were shown the same share them, so that a thousand lanes with the
/// same holes cost what one does.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holes(Option<Arc<RangeSet>>);

static NO_HOLES: RangeSet = RangeSet::new();

impl Deref for Holes {
    type Target = RangeSet;

    fn deref(&self) -> &RangeSet {
        self.0.as_deref().unwrap_or(&NO_HOLES)
    }
}

impl From<RangeSet> for Holes {
    fn from(ranges: RangeSet) -> Self {
        Holes((!ranges.is_empty()).then(|| Arc::new(ranges)))
    }
}

impl Holes {
    /// Whether they are known to be the same without being looked at.
    pub(crate) fn is_shared_with(&self, other: &Holes) -> bool {
        self.address() == other.address()
    }

    /// Shares those of another lane if they are the same.
    pub(crate) fn share(&mut self, other: &Holes) {
        if self.is_shared_with(other) || self.len() != other.len() {
            return;
        }
        looked_at(self.len());
        if **self == **other {
            *self = other.clone();
        }
    }

    fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |ranges| Arc::as_ptr(ranges) as usize)
    }
}

/// What was read, and what it makes of holes: worked out once for all lanes that have the same.
pub(crate) struct Shown<'a> {
    pub(crate) scan: &'a Scan,
    dead: &'a RangeSet,
    /// Retention has removed these, unless they were kept for a delivery: only what was looked for says which.
    gone: &'a RangeSet,
    log_start: Position,
    /// For tests of the tests: every hole counts as closed.
    closes_all: bool,
    made: HashMap<Before, (Holes, Made)>,
}

/// What a lane had before: the address of its holes, from where to where its top rises, and from where on nothing is taken.
type Before = (usize, Option<(Position, Position)>, Position);

/// What became of a lane's holes.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) holes: Holes,
    /// Those that are none any more.
    pub(crate) closed: RangeSet,
    /// The lane has got on.
    pub(crate) moved: bool,
    /// How many positions retention has removed.
    pub(crate) pruned: u64,
}

impl<'a> Shown<'a> {
    pub(crate) fn new(scan: &'a Scan, dead: &'a RangeSet, gone: &'a RangeSet, log_start: Position) -> Self {
        Shown { scan, dead, gone, log_start, closes_all: false, made: HashMap::new() }
    }

    /// The same in a deliberately broken engine, where every hole counts as closed.
    pub(crate) fn closing_all(self, closes_all: bool) -> Self {
        Shown { closes_all, ..self }
    }

    /// What becomes of the holes of a lane whose top rises `from` one position `to` another, if it does, and that takes nothing from
    /// `bound` on.
    pub(crate) fn apply(&mut self, holes: &Holes, rise: Option<(Position, Position)>, bound: Position) -> &Made {
        let before = (holes.address(), rise, bound);
        if !self.made.contains_key(&before) {
            let made = self.make(holes, rise, bound);
            // It keeps the holes too, so that no others get their address.
            self.made.insert(before, (holes.clone(), made));
        }
        &self.made[&before].1
    }

    fn make(&self, holes: &Holes, rise: Option<(Position, Position)>, bound: Position) -> Made {
        let Scan { after, covered_to, visible, .. } = self.scan;
        let mut missing = rise.map_or_else(RangeSet::new, |(from, to)| visible.missing(from + 1, to));
        let mut pruned = missing.within(0, self.log_start - 1).count();
        missing.remove_range(0, self.log_start - 1);
        let mut moved = rise.is_some_and(|(from, to)| (to - from) as u64 > missing.count());
        looked_at(visible.len() + self.dead.len() + self.gone.len() + holes.len() + missing.len());
        let mut left = RangeSet::clone(holes);
        left.union(&missing);
        // What was shown has been handed on, or is not the lane's.
        let shown = visible.within(after + 1, *covered_to.min(&(bound - 1)));
        let mut closed = common(&left, &shown);
        closed.union(&common(&left, self.dead));
        let mut gone = common(&left, self.gone);
        gone.subtract(&closed);
        pruned += gone.count();
        closed.union(&gone);
        if self.closes_all {
            closed = left.clone();
        }
        moved |= !closed.is_empty();
        let unchanged = closed.is_empty() && missing.is_empty();
        left.subtract(&closed);
        let holes = if unchanged { holes.clone() } else { left.into() };
        Made { holes, closed, moved, pruned }
    }
}

/// What is in both.
fn common(all: &RangeSet, other: &RangeSet) -> RangeSet {
    if all.is_empty() {
        return RangeSet::new();
    }
    let mut common = RangeSet::new();
    other.iter().for_each(|range| common.union(&all.within(*range.start(), *range.end())));
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(text: &str) -> RangeSet {
        text.parse().expect("ranges")
    }

    #[test]
    fn what_was_shown_is_worked_out_once_for_all_lanes_that_share_their_holes() {
        let scan = Scan { after: 0, covered_to: 30, visible: ranges("3,10-12,21-29"), events: Vec::new() };
        let (dead, gone) = (ranges("5"), ranges("1-2"));
        let mut shown = Shown::new(&scan, &dead, &gone, 3);
        let first = Holes::from(ranges("1,3-7,9"));
        let made = shown.apply(&first, None, Position::MAX);
        assert_eq!((made.holes.to_string(), made.closed.to_string()), ("4,6-7,9".into(), "1,3,5".into()));
        assert_eq!((made.moved, made.pruned), (true, 1));
        let other = shown.apply(&first.clone(), None, Position::MAX).holes.clone();
        assert!(other.is_shared_with(&shown.apply(&first, None, Position::MAX).holes));
        assert_eq!(shown.apply(&first, None, 3).closed.to_string(), "1,5", "3 was not looked for");
        let risen = shown.apply(&first, Some((20, 30)), Position::MAX);
        assert_eq!((risen.holes.to_string(), risen.moved), ("4,6-7,9,30".into(), true));
        let mut equal = Holes::from(ranges("4,6-7,9"));
        assert!(!equal.is_shared_with(&other));
        equal.share(&other);
        assert!(equal.is_shared_with(&other));
        equal.share(&first);
        assert!(equal.is_shared_with(&other), "others are not the same");
    }

    #[test]
    fn holes_that_stay_are_shared_with_what_they_were_before() {
        let (scan, none) = (Scan { after: 0, covered_to: 9, ..Scan::default() }, RangeSet::new());
        let holes = Holes::from(ranges("2,4"));
        let mut shown = Shown::new(&scan, &none, &none, 1);
        let made = shown.apply(&holes, None, Position::MAX);
        assert!(made.holes.is_shared_with(&holes) && !made.moved && made.closed.is_empty());
        assert!(Holes::default().is_shared_with(&Holes::from(RangeSet::new())), "no holes are no holes");
    }
}
