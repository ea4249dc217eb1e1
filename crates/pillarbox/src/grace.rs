use crate::{Page, Position, RangeSet, Scan, Writer};

/// Decides which positions are dead: handed out to transactions that have ended without showing them.
///
/// A position is drawn before its row is visible, so a gap may still fill. The poll reads the horizon, then the
/// writers, then the rows. Once every writer seen beside a horizon has ended, whatever a *later or the same* poll's
/// rows do not show up to that horizon never comes. New writers never extend an old grace period.
#[derive(Debug, Default)]
pub struct Grace {
    /// All writers that drew a position at or below have ended.
    proven: Position,
    /// A horizon and those of the writers seen beside it that have not ended yet.
    open: Option<(Position, Vec<Writer>)>,
    /// The session that saw the writers.
    session: u64,
}

impl Grace {
    /// Takes the horizon and writers of a poll into account. Call it before asking [`Grace::dead`] about its scans.
    pub fn observe(&mut self, page: &Page) {
        let Some(seen) = &page.writers else { return };
        if self.session != page.session {
            *self = Grace { session: page.session, ..Grace::default() };
        }
        if seen.is_empty() {
            self.proven = self.proven.max(page.horizon);
            self.open = None;
            return;
        }
        if let Some((horizon, writers)) = &mut self.open {
            writers.retain(|writer| seen.contains(writer));
            if !writers.is_empty() {
                return;
            }
            self.proven = self.proven.max(*horizon);
        }
        self.open = Some((page.horizon, seen.clone()));
    }

    /// The positions that this scan proves dead. A full page proves nothing beyond its last position, and nothing
    /// below `log_start` is ever dead: retention took it.
    pub fn dead(&self, scan: &Scan, log_start: Position) -> RangeSet {
        let low = (scan.after + 1).max(log_start);
        scan.visible.missing(low, scan.covered_to.min(self.proven))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(horizon: Position, writers: &[u64]) -> Page {
        Page { horizon, writers: Some(writers.iter().copied().map(Writer).collect()), ..Page::default() }
    }

    fn dead(grace: &Grace, visible: &[Position], covered_to: Position) -> String {
        let visible = visible.iter().map(|&position| position..=position).collect();
        grace.dead(&Scan { after: 0, covered_to, visible, events: Vec::new() }, 1).to_string()
    }

    #[test]
    fn without_writers_a_gap_is_dead_at_once() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[]));
        assert_eq!(dead(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn a_gap_waits_for_the_writers_seen_with_it_and_for_no_others() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[7, 8]));
        assert_eq!(dead(&grace, &[1, 3], 3), "");
        grace.observe(&page(5, &[8, 9]));
        assert_eq!(dead(&grace, &[1, 3], 5), "");
        grace.observe(&page(6, &[9]));
        assert_eq!(dead(&grace, &[1, 3], 6), "2", "8 has ended; 9 began later");
    }

    #[test]
    fn a_writer_of_another_session_is_not_known_to_have_ended() {
        let mut grace = Grace::default();
        grace.observe(&page(3, &[7]));
        grace.observe(&Page { session: 1, ..page(5, &[9]) });
        assert_eq!(dead(&grace, &[1, 3], 3), "", "9 may be what was 7");
        grace.observe(&Page { session: 1, writers: None, ..page(6, &[]) });
        assert_eq!(dead(&grace, &[1, 3], 3), "", "nobody looked");
        grace.observe(&Page { session: 1, ..page(6, &[]) });
        assert_eq!(dead(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn a_full_page_proves_nothing_beyond_its_last_position() {
        let mut grace = Grace::default();
        grace.observe(&page(9, &[]));
        assert_eq!(dead(&grace, &[1, 3], 3), "2");
    }

    #[test]
    fn retention_is_not_death() {
        let mut grace = Grace::default();
        grace.observe(&page(9, &[]));
        let scan = Scan { after: 0, covered_to: 9, visible: RangeSet::new(), events: Vec::new() };
        assert_eq!(grace.dead(&scan, 6).to_string(), "6-9");
    }
}
