use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::holes::Holes;
use crate::work::looked_at;
use crate::{Cursor, Position, RangeSet};

/// How far a lane has been read, and which positions are settled.
#[derive(Debug)]
pub(crate) struct LaneCursor {
    /// Everything up to here has been shown to the lane, but for the holes.
    top: Position,
    /// Positions up to `top` that no read has shown yet.
    holes: Holes,
    /// The poll under way was asked for this lane too.
    asked: bool,
    /// The lowest hole that the poll being looked at did not ask for, or [`Position::MAX`].
    bound: Position,
    /// Positions that were handed on and are not settled.
    open: BTreeSet<Position>,
    /// What is settled above the floor, from the first to the last position of each range. Nothing in a range is open or a hole; what
    /// else lies in it is another lane's, not wanted or dead.
    ahead: BTreeMap<Position, Position>,
    /// Settled by the scan that is being looked at, before the holes and the top say what is around them.
    early: Vec<Position>,
    /// The highest position that was settled, and its event.
    anchor: Option<(Position, Uuid)>,
}

/// What lies above everything open is written as settled only if it is so long that it is worth a range: the rest is read again.
const TAIL_MIN: Position = 1_000;

impl LaneCursor {
    /// As it was written.
    pub(crate) fn load(cursor: Cursor) -> Self {
        let Cursor { floor, settled, anchor } = cursor;
        let top = settled.last().unwrap_or(floor).max(floor);
        LaneCursor {
            top,
            holes: settled.missing(floor + 1, top).into(),
            asked: false,
            bound: Position::MAX,
            open: BTreeSet::new(),
            ahead: settled.iter().map(|range| (*range.start(), *range.end())).filter(|range| range.1 > floor).collect(),
            early: Vec::new(),
            anchor,
        }
    }

    /// Everything up to here has been shown to the lane, but for the holes.
    pub(crate) fn top(&self) -> Position {
        self.top
    }

    /// Everything up to here was shown.
    pub(crate) fn rise(&mut self, top: Position) {
        self.top = top;
    }

    /// Positions up to the top that no read has shown yet.
    pub(crate) fn holes(&self) -> &Holes {
        &self.holes
    }

    /// Shares the holes of another lane if they are the same.
    pub(crate) fn share_holes(&mut self, other: &Holes) {
        self.holes.share(other);
    }

    /// A poll begins, for this lane too or not; or what it was asked for does not hold any more.
    pub(crate) fn ask(&mut self, asked: bool) {
        self.asked = asked;
    }

    /// Whether the poll under way was asked for this lane too.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked
    }

    /// The lowest hole that the poll being looked at did not ask for, or [`Position::MAX`].
    pub(crate) fn bound(&self) -> Position {
        self.bound
    }

    /// From here on nothing is taken that the poll being looked at has shown.
    pub(crate) fn set_bound(&mut self, bound: Position) {
        self.bound = bound;
    }

    /// The lowest position that may be shown again.
    pub(crate) fn lowest_unread(&self) -> Position {
        self.holes.first().unwrap_or(self.top + 1)
    }

    /// Whether nothing is open and everything up to the horizon was shown.
    pub(crate) fn is_done(&self, horizon: Position) -> bool {
        self.is_read(horizon) && self.open.is_empty()
    }

    /// Whether everything up to the horizon was shown.
    pub(crate) fn is_read(&self, horizon: Position) -> bool {
        self.top >= horizon && self.holes.is_empty()
    }

    /// An event of the lane is handed on.
    pub(crate) fn admit(&mut self, position: Position) {
        self.open.insert(position);
    }

    /// An event is settled; whether it was open.
    pub(crate) fn settle(&mut self, position: Position, id: Uuid) -> bool {
        if !self.open.remove(&position) {
            return false;
        }
        if self.anchor.is_none_or(|anchor| anchor.0 < position) {
            self.anchor = Some((position, id));
        }
        if position > self.top || (!self.holes.is_empty() && self.holes.contains(position)) {
            self.early.push(position);
        } else {
            self.pass(position);
        }
        true
    }

    /// Notes a settled position: the floor has passed it, or it belongs to a range above the floor.
    fn pass(&mut self, position: Position) {
        let floor = self.floor();
        if position <= floor {
            return self.drop_passed(floor);
        }
        let below = self.unsettled_below(position).unwrap_or(floor);
        let above = [self.open.range(position..).next().copied(), self.holes.after(position)];
        let above = above.into_iter().flatten().min().unwrap_or(Position::MAX);
        let (mut low, mut high) = (position, position);
        if let Some((&from, &to)) = self.ahead.range(..=position).next_back().filter(|range| *range.1 > below) {
            (low, high) = (from, high.max(to));
        }
        if let Some((&from, &to)) = self.ahead.range(position + 1..).next().filter(|range| *range.0 < above) {
            self.ahead.remove(&from);
            high = to;
        }
        self.ahead.insert(low, high);
    }

    fn drop_passed(&mut self, floor: Position) {
        while self.ahead.first_entry().is_some_and(|range| *range.get() <= floor) {
            self.ahead.pop_first();
        }
    }

    /// A scan was looked at: these are the holes that it left up to the top, and these it has closed. Ranges that a hole divided become
    /// one when it closes.
    pub(crate) fn scanned(&mut self, holes: Holes, closed: &RangeSet) {
        self.holes = holes;
        std::mem::take(&mut self.early).into_iter().for_each(|position| self.pass(position));
        if closed.is_empty() {
            return;
        }
        looked_at(closed.len());
        self.drop_passed(self.floor());
        closed.iter().for_each(|hole| self.join_at(*hole.start()));
    }

    /// Makes one of the ranges on both sides of a position that is settled, if all between them is.
    fn join_at(&mut self, position: Position) {
        let Some((&low, &end)) = self.ahead.range(..position).next_back() else { return };
        let Some((&start, &high)) = self.ahead.range(position..).next() else { return };
        if self.unsettled_below(start).is_none_or(|below| below < end) {
            self.ahead.remove(&start);
            self.ahead.insert(low, high);
        }
    }

    /// The highest position below this one that is open or a hole.
    fn unsettled_below(&self, position: Position) -> Option<Position> {
        let open = self.open.range(..position).next_back().copied();
        [open, self.holes.before(position)].into_iter().flatten().max()
    }

    /// Unsettled positions that were handed on.
    pub(crate) fn open_count(&self) -> usize {
        self.open.len()
    }

    /// Everything up to here is settled.
    pub(crate) fn floor(&self) -> Position {
        let lowest = [self.holes.first(), self.open.first().copied()].into_iter().flatten().min();
        lowest.map_or(self.top, |position| position - 1)
    }

    /// Whether the lane may go higher.
    pub(crate) fn may_rise(&self, ranges_max: usize) -> bool {
        self.ahead.len() < ranges_max && self.holes.len() < ranges_max
    }

    /// The cursor as it would be written now. Above the floor only those ranges are written that hold an event of the lane's own which
    /// came out of turn: the rest is read again after a crash, and costs nothing. Beyond `ranges_max` ranges the highest are left out:
    /// they would come again after a crash, nothing more.
    pub(crate) fn cursor(&self, ranges_max: usize) -> Cursor {
        let floor = self.floor();
        looked_at(self.ahead.len());
        let mut settled: RangeSet = self.ahead.iter().take(ranges_max).map(|(low, high)| *low..=*high).collect();
        let highest = [self.holes.last(), self.open.last().copied()].into_iter().flatten().max();
        if let Some(highest) = highest.filter(|highest| self.top - highest >= TAIL_MIN && settled.len() < ranges_max) {
            settled.insert_range(highest + 1, self.top);
        }
        Cursor { floor, settled, anchor: self.anchor }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    fn settled(cursor: &Cursor, position: Position) -> bool {
        position <= cursor.floor || cursor.settled.contains(position)
    }

    /// What a position of the log is to the lane.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Hole,
        /// Another lane's, or not wanted.
        Other,
        Open,
        Done,
    }

    /// Shows the lane a page that ends at its last position.
    fn show(lane: &mut LaneCursor, kinds: &[Kind]) {
        for (index, kind) in kinds.iter().enumerate() {
            let position = index as Position + 1;
            match kind {
                Kind::Open => lane.admit(position),
                Kind::Done => {
                    lane.admit(position);
                    lane.settle(position, Uuid::nil());
                }
                Kind::Hole | Kind::Other => {}
            }
        }
        lane.top = kinds.len() as Position;
        let holes = kinds.iter().enumerate().filter(|(_, kind)| **kind == Kind::Hole);
        let holes: RangeSet = holes.map(|(index, _)| index as Position + 1..=index as Position + 1).collect();
        lane.scanned(holes.into(), &RangeSet::new());
    }

    fn close(lane: &mut LaneCursor, closed: &RangeSet) {
        let mut holes = RangeSet::clone(&lane.holes);
        holes.subtract(closed);
        lane.scanned(holes.into(), closed);
    }

    /// What is the lane's own and done is settled, what is open or a hole is not, and whatever the cursor leaves out is asked for again.
    fn check_cursor(lane: &LaneCursor, kinds: &[Kind]) {
        let cursor = lane.cursor(1000);
        let again = LaneCursor::load(cursor.clone());
        for (index, kind) in kinds.iter().enumerate() {
            let position = index as Position + 1;
            match kind {
                Kind::Done => assert!(settled(&cursor, position), "{position} is done: {cursor:?}"),
                Kind::Open | Kind::Hole => {
                    assert!(!settled(&cursor, position), "{position} is not settled: {cursor:?}")
                }
                Kind::Other => {}
            }
            let asked = position > again.top || again.holes.contains(position);
            assert_eq!(asked, !settled(&cursor, position));
        }
        assert!(!settled(&cursor, lane.top + 1));
        // No range is there for nothing, and none could be one with its neighbour.
        let of = |range: std::ops::RangeInclusive<Position>| &kinds[*range.start() as usize - 1..*range.end() as usize];
        let ranges: Vec<_> = cursor.settled.iter().collect();
        assert!(ranges.iter().all(|range| of(range.clone()).contains(&Kind::Done)), "for nothing: {cursor:?}");
        for pair in ranges.windows(2) {
            let between = of(pair[0].end() + 1..=pair[1].start() - 1);
            assert!(between.iter().any(|kind| matches!(kind, Kind::Open | Kind::Hole)), "not joined: {cursor:?}");
        }
    }

    fn kinds() -> impl Strategy<Value = Vec<Kind>> {
        let kind = prop_oneof![Just(Kind::Hole), Just(Kind::Other), Just(Kind::Open), Just(Kind::Done)];
        prop::collection::vec(kind, 1..80)
    }

    proptest! {
        /// Model: each position is a hole, another lane's, open, or done. Events finish and holes close in any order.
        #[test]
        fn the_cursor_says_what_came_out_of_turn_and_nothing_else(
            mut kinds in kinds(),
            steps in prop::collection::vec((any::<prop::sample::Index>(), 0u8..3, 1usize..8), 0..80),
        ) {
            let mut lane = LaneCursor::load(Cursor::default());
            show(&mut lane, &kinds);
            check_cursor(&lane, &kinds);
            for (index, step, length) in steps {
                let index = index.index(kinds.len());
                if kinds[index] == Kind::Open {
                    lane.settle(index as Position + 1, Uuid::nil());
                    kinds[index] = Kind::Done;
                }
                // Of the lane's own events that appear some are settled at once, as one that has a row is.
                let becomes = [Kind::Other, Kind::Done, Kind::Open][usize::from(step)];
                let mut closed = RangeSet::new();
                let near = kinds.iter_mut().enumerate().skip(index).take(length);
                for (index, kind) in near.filter(|(_, kind)| **kind == Kind::Hole) {
                    let position = index as Position + 1;
                    if becomes != Kind::Other {
                        lane.admit(position);
                    }
                    if becomes == Kind::Done {
                        lane.settle(position, Uuid::nil());
                    }
                    closed.insert(position);
                    *kind = becomes;
                }
                close(&mut lane, &closed);
                check_cursor(&lane, &kinds);
            }
        }

        #[test]
        fn a_cursor_cut_at_its_limit_never_claims_more(kinds in kinds(), limit in 1usize..5) {
            let mut lane = LaneCursor::load(Cursor::default());
            show(&mut lane, &kinds);
            let cursor = lane.cursor(limit);
            prop_assert!(cursor.settled.len() <= limit);
            for (index, kind) in kinds.iter().enumerate() {
                prop_assert!(*kind == Kind::Done || *kind == Kind::Other || !settled(&cursor, index as Position + 1));
            }
        }
    }

    #[test]
    fn what_lies_above_a_hole_and_is_long_is_not_read_again() {
        let mut lane = LaneCursor::load(Cursor::default());
        lane.holes = RangeSet::from_iter([5..=5]).into();
        lane.top = 5 + TAIL_MIN - 1;
        assert_eq!(lane.cursor(10).settled, RangeSet::new());
        lane.top = 5 + TAIL_MIN;
        let cursor = lane.cursor(10);
        assert_eq!((cursor.floor, cursor.settled.to_string()), (4, format!("6-{}", lane.top)));
        assert_eq!(LaneCursor::load(cursor).top, lane.top);
    }
}
