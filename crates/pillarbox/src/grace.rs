use crate::{Page, Position, RangeSet, Scan, Writer};

/// Maximum number of stretches that are kept apart; beyond it, the two highest are merged.
const STRETCHES_MAX: usize = 64;

/// Decides which positions are closed: drawn by transactions that have ended without showing them.
///
/// A position is drawn before its row is visible, so a hole may still be filled. The poll reads the horizon, then the
/// writers, then the rows. Once every writer that was read with a horizon has ended, a position up to that horizon that
/// the rows of the *same or a later* poll do not show will never be filled. New writers never extend an old grace
/// period, and a writer that has been idle since before the horizon was last read has drawn nothing above it.
#[derive(Debug, Default)]
pub struct Grace {
    /// Positions of which every possible writer has ended.
    proven: RangeSet,
    /// The stretches above them, lowest first.
    open: Vec<Stretch>,
    /// The horizon when the writers were last read, and the database's clock before that.
    horizon: Position,
    clock: i64,
    /// The session that read the writers.
    session: u64,
}

/// Positions from `low` to `high`, and the writers that may have drawn them and have not ended.
#[derive(Debug)]
struct Stretch {
    low: Position,
    high: Position,
    writers: Vec<Writer>,
}

impl Grace {
    /// Takes the horizon and writers of a poll into account. Call it before [`Grace::closed`] for the scans of that poll.
    pub fn observe(&mut self, page: &Page) {
        let Some(seen) = &page.writers else { return };
        if self.session != page.session || page.clock < self.clock {
            *self = Grace { session: page.session, ..Grace::default() };
        }
        for mut stretch in std::mem::take(&mut self.open) {
            stretch.writers.retain(|writer| seen.contains(writer));
            self.keep(stretch);
        }
        if page.horizon > self.horizon {
            let idle = |writer: &Writer| page.idle.iter().any(|(idle, since)| idle == writer && *since < self.clock);
            let writers = seen.iter().copied().filter(|writer| !idle(writer)).collect();
            self.keep(Stretch { low: self.horizon + 1, high: page.horizon, writers });
        }
        (self.horizon, self.clock) = (self.horizon.max(page.horizon), page.clock);
    }

    fn keep(&mut self, stretch: Stretch) {
        if stretch.writers.is_empty() {
            return self.proven.insert_range(stretch.low, stretch.high);
        }
        let full = self.open.len() >= STRETCHES_MAX;
        match self.open.last_mut() {
            Some(last) if full => {
                last.high = stretch.high;
                let more = stretch.writers.into_iter().filter(|writer| !last.writers.contains(writer));
                let more: Vec<Writer> = more.collect();
                last.writers.extend(more);
            }
            _ => self.open.push(stretch),
        }
    }

    /// The positions that this scan proves to be closed. A full page proves nothing beyond its last position, and no
    /// position below `log_start` is ever closed: retention removed it.
    pub fn closed(&self, scan: &Scan, log_start: Position) -> RangeSet {
        let low = (scan.after + 1).max(log_start);
        let high = scan.covered_to.min(self.proven.last().unwrap_or(0));
        let mut closed = scan.visible.missing(low, high);
        closed.subtract(&self.proven.missing(low, high));
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(horizon: Position, writers: &[u64]) -> Page {
        Page { horizon, writers: Some(writers.iter().copied().map(Writer).collect()), ..Page::default() }
    }

    fn closed(grace: &Grace, visible: &[Position], covered_to: Position) -> String {
        let visible = visible.iter().map(|&position| position..=position).collect();
        grace.closed(&Scan { after: 0, covered_to, visible, events: Vec::new() }, 1).to_string()
    }

    #[test]
    fn without_writers_a_gap_is_closed_at_once() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[]));
        assert_eq!(closed(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn a_gap_waits_for_the_writers_seen_with_it_and_for_no_others() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[7, 8]));
        assert_eq!(closed(&grace, &[1, 3], 3), "");
        grace.observe(&page(5, &[8, 9]));
        assert_eq!(closed(&grace, &[1, 3], 5), "");
        grace.observe(&page(6, &[9]));
        assert_eq!(closed(&grace, &[1, 3], 6), "2", "8 has ended; 9 began later");
    }

    #[test]
    fn a_writer_of_another_session_is_not_known_to_have_ended() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[7]));
        grace.observe(&Page { session: 1, ..page(5, &[9]) });
        assert_eq!(closed(&grace, &[1, 3], 3), "", "9 may be what was 7");
        grace.observe(&Page { session: 1, writers: None, ..page(6, &[]) });
        assert_eq!(closed(&grace, &[1, 3], 3), "", "nobody looked");
        grace.observe(&Page { session: 1, ..page(6, &[]) });
        assert_eq!(closed(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn an_idle_writer_holds_only_what_it_may_have_drawn() {
        let mut grace = Grace::default();
        let idle = vec![(Writer(7), 5)];
        grace.observe(&Page { clock: 10, ..page(3, &[7]) });
        assert_eq!(closed(&grace, &[1, 3], 3), "", "2 may be 7's");
        grace.observe(&Page { clock: 20, idle: idle.clone(), ..page(6, &[7, 8]) });
        assert_eq!(closed(&grace, &[1, 3, 6], 6), "", "4 and 5 may be 8's");
        grace.observe(&Page { clock: 30, idle: idle.clone(), ..page(6, &[7]) });
        assert_eq!(
            closed(&grace, &[1, 3, 6], 6),
            "4-5",
            "7 has been idle since before 4 was drawn, and 2 may still be its own"
        );
        let woken = Page { clock: 40, idle: vec![(Writer(7), 31)], ..page(9, &[7]) };
        grace.observe(&woken);
        assert_eq!(closed(&grace, &[1, 3, 6, 9], 9), "4-5", "it was at work when 7 and 8 were drawn");
        grace.observe(&Page { clock: 35, ..page(9, &[7]) });
        assert_eq!(closed(&grace, &[1, 3, 6, 9], 9), "", "a clock that was set back proves nothing");
        grace.observe(&Page { clock: 50, ..page(9, &[]) });
        assert_eq!(closed(&grace, &[1, 3, 6, 9], 9), "2,4-5,7-8", "it has ended");
    }

    #[test]
    fn many_stretches_become_one() {
        let mut grace = Grace::default();
        for horizon in 1..=200 {
            grace.observe(&page(horizon, &[7, 1000 + horizon as u64]));
        }
        assert!(grace.open.len() <= STRETCHES_MAX);
        let writers: usize = grace.open.iter().map(|stretch| stretch.writers.len()).sum();
        assert!(writers <= 2 * STRETCHES_MAX, "one that stays is noted once: {writers}");
        grace.observe(&page(201, &[]));
        assert_eq!(closed(&grace, &[201], 201), "1-200");
    }

    #[test]
    fn a_full_page_proves_nothing_beyond_its_last_position() {
        let mut grace = Grace::default();
        grace.observe(&page(9, &[]));
        assert_eq!(closed(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn retention_is_not_death() {
        let mut grace = Grace::default();
        grace.observe(&page(9, &[]));
        let scan = Scan { after: 0, covered_to: 9, visible: RangeSet::new(), events: Vec::new() };
        assert_eq!(grace.closed(&scan, 6).to_string(), "6-9");
    }
}
