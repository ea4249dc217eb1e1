use std::time::Duration;

use pillarbox::{Position, Timestamp};

use super::Leaf;

/// How many leaves of the right size lie ahead after they were laid.
pub(crate) const LEAVES_AHEAD: usize = 10;

/// New ones are made when fewer than this are left.
pub(crate) const LEAVES_AHEAD_MIN: usize = 5;

/// After them come leaves of which each is so many times as large as the one before.
pub(crate) const GROWTH: i64 = 8;

/// How many of those, before the open-ended one.
pub(crate) const GROWING_LEAVES: usize = 6;

/// How few positions a leaf has.
pub(crate) const LEAF_SIZE_MIN: i64 = 10_000;

/// How many it has at most, unless it was one of the larger ones ahead.
pub(crate) const LEAF_SIZE_MAX: i64 = 20_000_000;

/// The largest size that can be wished for.
const LEAF_SIZE_WISH_MAX: i64 = 1_000_000_000_000;

/// About so many leaves hold what is to be kept: that much more is kept on average at most.
const LEAVES_OF_KEEP: u32 = 8;

/// The shortest time that a leaf is made for.
const LEAF_TIME_MIN: Duration = Duration::from_secs(600);

/// What is to be kept if everything is.
const KEEP_DEFAULT: Duration = Duration::from_secs(7 * 86_400);

/// The lower bounds of the leaves from the first one on; the last one is open-ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) bounds: Vec<Position>,
    pub(super) size: i64,
}

/// What a decision about the leaves is made from.
pub(super) struct View<'a> {
    pub(super) leaves: &'a [Leaf],
    pub(super) horizon: Position,
    pub(super) now: Timestamp,
    pub(super) keep: Option<Duration>,
    /// The wanted size; 0: none.
    pub(super) size: i64,
    /// How much is published between a decision and what it brings about.
    pub(super) margin: i64,
}

impl View<'_> {
    /// Leaves to be laid above those that are in use.
    pub(super) fn lay(&self) -> Option<Plan> {
        let size = self.size();
        let ahead: Vec<&Leaf> = self.leaves.iter().filter(|leaf| leaf.low > self.horizon).collect();
        let fits = |leaf: &&&Leaf| leaf.high.is_some_and(|high| (size / 2..=size * 2).contains(&(high - leaf.low)));
        let fitting = ahead.iter().take_while(fits).count();
        if fitting >= LEAVES_AHEAD_MIN {
            return None;
        }
        let first = ahead.get(fitting)?;
        Some(plan(first.low, LEAVES_AHEAD - fitting, size))
    }

    /// The leaf in use that should end here, and what comes after it: when it is open-ended, far too large for what is
    /// published now, or has lasted for too long.
    pub(super) fn cut(&self) -> Option<(&Leaf, Plan)> {
        let size = self.size();
        let contains = |leaf: &&Leaf| leaf.low <= self.horizon && leaf.high.is_none_or(|high| high > self.horizon);
        let leaf = self.leaves.iter().find(contains)?;
        let too_large = leaf.high.is_none_or(|high| high - leaf.low > size.saturating_mul(GROWTH / 2));
        let too_old = leaf.oldest.is_some_and(|oldest| oldest < self.before(self.leaf_time()));
        let end = self.horizon + 1 + self.margin;
        let ends_anyway = leaf.high.is_some_and(|high| high <= end);
        ((too_large || too_old) && !ends_anyway).then(|| (leaf, plan(end, LEAVES_AHEAD, size)))
    }

    /// The size of a leaf: what is published in the time that one is made for.
    fn size(&self) -> i64 {
        if self.size > 0 {
            return self.size.min(LEAF_SIZE_WISH_MAX);
        }
        let published = self.published_within(self.leaf_time());
        let mut size = LEAF_SIZE_MIN;
        while size < published {
            size *= 2;
        }
        size.min(LEAF_SIZE_MAX)
    }

    fn leaf_time(&self) -> Duration {
        (self.keep.unwrap_or(KEEP_DEFAULT) / LEAVES_OF_KEEP).max(LEAF_TIME_MIN)
    }

    fn before(&self, age: Duration) -> Timestamp {
        Timestamp(self.now.0.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX)))
    }

    /// Roughly how many positions were handed out within `time`, from when each leaf began. Nothing is expected of a log that
    /// is younger: a burst at its beginning says little.
    fn published_within(&self, time: Duration) -> i64 {
        let since = self.before(time).0;
        let begun = self.leaves.iter().filter_map(|leaf| Some((leaf.oldest?.0, leaf.low)));
        let points: Vec<(i64, Position)> = begun.chain([(self.now.0, self.horizon + 1)]).collect();
        let after = points.iter().position(|(at, _)| *at > since).unwrap_or(points.len() - 1);
        let (next_at, next) = points[after];
        let from = match after.checked_sub(1).map(|index| points[index]) {
            None => next,
            Some((at, low)) => {
                let share = (since - at) as f64 / (next_at - at).max(1) as f64;
                low + ((next - low) as f64 * share.clamp(0.0, 1.0)) as i64
            }
        };
        (self.horizon + 1 - from).max(0)
    }
}

/// `count` leaves of one size from `low` on, then the growing ones.
fn plan(low: Position, count: usize, size: i64) -> Plan {
    let growing = (1..=GROWING_LEAVES as u32).map(|step| size.saturating_mul(GROWTH.saturating_pow(step)));
    let sizes = std::iter::repeat_n(size, count).chain(growing);
    let bounds = sizes.scan(low, |at, size| {
        *at = at.saturating_add(size);
        Some(*at)
    });
    Plan { bounds: std::iter::once(low).chain(bounds).collect(), size }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: i64 = 86_400_000;
    const NOW: Timestamp = Timestamp(1_000 * DAY_MS);

    /// Leaves with these lower bounds, the last one open-ended, those up to the horizon begun so many days ago.
    fn leaves(bounds: &[Position], days: &[f64]) -> Vec<Leaf> {
        let ends = bounds.iter().skip(1).map(|bound| Some(*bound)).chain([None]);
        let begun = days.iter().map(|days| Some(Timestamp(NOW.0 - (days * DAY_MS as f64) as i64)));
        let begun = begun.chain(std::iter::repeat(None));
        let leaf = |((low, high), oldest)| Leaf { name: format!("event_{low}"), low, high, emptied: false, oldest };
        bounds.iter().copied().zip(ends).zip(begun).map(leaf).collect()
    }

    fn view(leaves: &[Leaf], horizon: Position) -> View<'_> {
        View { leaves, horizon, now: NOW, keep: Some(Duration::from_secs(8 * 86_400)), size: 0, margin: 0 }
    }

    fn sizes(plan: &Plan) -> Vec<i64> {
        plan.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    #[test]
    fn a_new_log_gets_its_leaves_and_then_rests() {
        let first = leaves(&[1], &[]);
        let plan = view(&first, 0).lay().unwrap();
        let growing = [80_000, 640_000, 5_120_000, 40_960_000, 327_680_000, 2_621_440_000];
        assert_eq!((plan.bounds[0], &sizes(&plan)[..10], &sizes(&plan)[10..]), (1, &[10_000; 10][..], &growing[..]));
        let laid = leaves(&plan.bounds, &[4.5, 3.5, 2.5, 1.5, 0.5]);
        for (horizon, due) in [(0, false), (1, false), (50_000, false), (50_001, true)] {
            assert_eq!(view(&laid, horizon).lay().is_some(), due, "{horizon}");
        }
        let next = view(&laid, 50_001).lay().unwrap();
        assert_eq!(
            (next.bounds[0], sizes(&next)[..7].to_vec()),
            (100_001, [[20_000; 6].to_vec(), vec![160_000]].concat())
        );
        let faster = leaves(&plan.bounds, &[0.1; 5]);
        let next = view(&faster, 50_000).lay().unwrap();
        assert_eq!(
            (next.bounds[0], next.size, next.bounds.len()),
            (50_001, 80_000, 17),
            "the others are too small now"
        );
    }

    #[test]
    fn a_leaf_is_made_for_what_is_published_in_its_time() {
        // A leaf is made for one day here.
        let check = |bounds: &[Position], days: &[f64], horizon, size| {
            let leaves = leaves(bounds, days);
            assert_eq!(view(&leaves, horizon).size(), size, "{days:?}");
        };
        check(&[1], &[], 0, LEAF_SIZE_MIN);
        check(&[1], &[0.001], 150_000, 160_000);
        check(&[1], &[10.0], 150_000, 20_000);
        check(&[1, 100_001], &[10.0, 9.0], 100_001, LEAF_SIZE_MIN);
        check(&[1, 100_001], &[1.5, 0.5], 139_000, 160_000);
        check(&[1], &[1.0], 1_000_000_000, LEAF_SIZE_MAX);
        // Clocks may go backwards.
        check(&[1, 101], &[-1.0, 2.0], 200, LEAF_SIZE_MIN);
    }

    #[test]
    fn the_leaf_in_use_is_cut_if_it_is_open_ended_too_large_or_too_old() {
        let check = |bounds: &[Position], days: &[f64], horizon, end: Option<Position>| {
            let leaves = leaves(bounds, days);
            let cut = view(&leaves, horizon).cut().map(|(_, plan)| plan.bounds[0]);
            assert_eq!(cut, end, "{bounds:?} {days:?} {horizon}");
        };
        check(&[1], &[0.01], 50, Some(51));
        check(&[1, 40_001], &[0.01], 50, None);
        check(&[1, 40_002], &[0.01], 50, Some(51));
        check(&[1, 10_001], &[0.9], 50, None);
        check(&[1, 10_001], &[1.1], 50, Some(51));
        check(&[1, 10_001], &[1.1], 10_000, None);
        let leaves = leaves(&[1, 40_002], &[0.01]);
        let hurried = |margin| View { margin, ..view(&leaves, 50) }.cut().map(|(_, plan)| plan.bounds[0]);
        assert_eq!((hurried(7), hurried(40_000)), (Some(58), None));
    }

    #[test]
    fn a_size_that_was_wished_for_holds() {
        let laid = leaves(&[1, 10_001], &[1.0]);
        let wish = View { size: 10, ..view(&laid, 100_000) };
        let (leaf, plan) = wish.cut().unwrap();
        assert_eq!((leaf.name.as_str(), plan.size), ("event_10001", 10));
        let absurd = View { size: i64::MAX, ..view(&laid, 100_000) };
        assert!(absurd.cut().unwrap().1.bounds.is_sorted());
    }

    #[test]
    fn after_an_outage_a_leaf_is_no_larger_than_what_was_published() {
        let first = leaves(&[1], &[]);
        let plan = view(&first, 0).lay().unwrap();
        let laid = leaves(&plan.bounds, &[]);
        for horizon in [100_001, 1_000_000, 50_000_000, 1_000_000_000] {
            let leaf = laid.iter().find(|leaf| leaf.high.is_some_and(|high| high > horizon)).unwrap();
            assert!(leaf.high.unwrap() - leaf.low <= GROWTH * horizon, "{leaf:?}");
        }
    }
}
