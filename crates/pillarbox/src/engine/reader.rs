use std::collections::HashSet;
use std::time::Duration;

use super::slot::Slot;
use super::subscriber::Subscriber;
use super::{Action, Engine, EngineConfig, Mutant};
use crate::grace::Grace;
use crate::holes::{Holes, Shown};
use crate::lane::{Lane, Phase};
use crate::work::looked_at;
use crate::{Now, Page, PollRequest, Position, RangeSet, Scan, ScanRequest, lane_of};

/// How far the log was read, which gaps in it will never be filled, and when it is read again.
#[derive(Debug, Default)]
pub(super) struct Reader {
    grace: Grace,
    /// The highest position that any poll has told of.
    horizon: Position,
    poll: Slot<PollPlan>,
    /// The first ring since the last poll.
    rang_at: Option<Duration>,
    last_poll: Option<Duration>,
    /// When a poll last looked at the writers.
    last_writers: Option<Duration>,
    /// The last poll brought no lane further, so that asking again at once is no use.
    stuck: bool,
    /// The poll being looked at has brought a lane further.
    moved: bool,
    /// The last poll showed many events.
    busy: bool,
    /// Polls since the newest hole appeared.
    hole_polls: u32,
    newest_hole: Option<Position>,
    polls: u64,
}

/// What a poll was asked for.
#[derive(Debug)]
pub(super) struct PollPlan {
    /// Where the scans end that ask for holes; they come first.
    hole_ends: Vec<Position>,
    /// Subscriptions whose holes were asked for.
    asked: HashSet<usize>,
    /// Subscriptions that had room.
    room: HashSet<usize>,
}

/// The shortest and the longest wait between polls while a hole is open and nothing rings. It grows with each poll, so that a writer which has
/// been open for ten seconds is looked at five times a second, and one that was forgotten costs next to nothing.
const HOLE_POLL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));
/// The shortest wait after a poll that showed so many events. Where many publish at once there is always a hole, and a relay that polls for
/// it takes the processors from them.
const BUSY_HOLE_POLL: Duration = Duration::from_millis(10);
const BUSY_EVENTS: usize = 8;
/// How often the writers are looked at. Most holes are filled by a commit, which a poll shows without it; and the look holds
/// locks that every publisher needs.
const WRITERS_INTERVAL: Duration = Duration::from_millis(20);
/// Lanes far from each other are read for in so many places at once, and at the highest top.
const TAIL_SCANS_MAX: usize = 8;
/// A lane in quarantine moves at most this many events into the delivery table ahead.
const QUARANTINE_ROWS_MAX: usize = 100;

impl Reader {
    /// The highest position that any poll has told of.
    pub(super) fn horizon(&self) -> Position {
        self.horizon
    }

    /// How many polls have begun.
    pub(super) fn polls(&self) -> u64 {
        self.polls
    }

    /// Something may be there to be read.
    pub(super) fn ring(&mut self, now: Now) {
        self.rang_at.get_or_insert(now.mono);
    }

    /// A poll may bring a lane further that the last one did not.
    pub(super) fn try_again(&mut self) {
        self.stuck = false;
    }

    /// Whether the last poll brought no lane further.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// Whether a poll is under way.
    pub(super) fn is_calling(&self) -> bool {
        self.poll.is_busy()
    }

    /// Whether no poll is under way and none is asked for.
    pub(super) fn is_waiting(&self) -> bool {
        !self.poll.is_busy() && self.rang_at.is_none()
    }

    /// Whether the log was read since the last ring.
    pub(super) fn is_settled(&self) -> bool {
        self.rang_at.is_none() && self.last_poll.is_some()
    }

    /// When something is to be done.
    pub(super) fn deadlines(&self, config: &EngineConfig) -> [Option<Duration>; 3] {
        let regular = self.last_poll.map(|last| last + self.wait(config));
        [regular, self.rang_at.map(|at| at + config.debounce), self.poll.retry_at()]
    }

    pub(super) fn poll_failed(&mut self, now: Now) {
        self.poll.fail(now);
        self.ring(now);
    }

    /// How long after a poll the next one is due, if nothing rings.
    fn wait(&self, config: &EngineConfig) -> Duration {
        if self.hole_polls == 0 {
            return config.poll_interval;
        }
        let shortest = if self.busy { BUSY_HOLE_POLL } else { HOLE_POLL.0 };
        HOLE_POLL.0.saturating_mul(self.hole_polls).max(shortest).min(HOLE_POLL.1).min(config.poll_interval)
    }

    /// Notes the newest hole that is left after a poll.
    fn note_newest_hole(&mut self, newest: Option<Position>) {
        self.hole_polls = match newest {
            None => 0,
            Some(hole) if self.newest_hole.is_none_or(|before| before < hole) => 1,
            Some(_) => self.hole_polls.saturating_add(1),
        };
        self.newest_hole = newest;
    }

    /// What a scan proves to be closed. Notes how far the log reaches.
    fn closed_in(&mut self, scan: &Scan, log_start: Position, mutant: Option<Mutant>) -> RangeSet {
        self.horizon = self.horizon.max(scan.visible.last().unwrap_or(0));
        if mutant == Some(Mutant::CloseHolesBeforeReading) {
            return scan.visible.missing((scan.after + 1).max(log_start), scan.covered_to);
        }
        self.grace.closed(scan, log_start)
    }
}

impl Engine {
    pub(super) fn polled(&mut self, now: Now, page: Page) {
        let Some(plan) = self.reader.poll.succeed() else { return };
        self.reader.horizon = self.reader.horizon.max(page.horizon);
        self.reader.grace.observe(&page);
        self.reader.moved = false;
        self.reader.busy = page.scans.iter().map(|scan| scan.events.len()).sum::<usize>() >= BUSY_EVENTS;
        let horizon = self.reader.horizon;
        self.subscribers.iter_mut().for_each(|sub| sub.hold_backlog(horizon));
        let (hole_scans, tail_scans) = page.scans.split_at(plan.hole_ends.len().min(page.scans.len()));
        self.set_bounds(&plan, hole_scans);
        self.close_holes(now, hole_scans, page.log_start);
        for scan in tail_scans {
            let dead = self.reader.closed_in(scan, page.log_start, self.config.mutant);
            let gone = gone_in(scan, page.log_start);
            let mut shown = self.shown(scan, &dead, &gone, page.log_start);
            let mut used = false;
            for sub in 0..self.subscribers.len() {
                used |= self.apply(now, sub, &mut shown, plan.room.contains(&sub));
            }
            if used {
                self.settler.close(&dead);
            }
        }
        self.note_poll(horizon);
        let newest =
            self.subscribers.iter().flat_map(Subscriber::active).filter_map(|lane| lane.cursor.holes().last()).max();
        self.reader.note_newest_hole(newest);
        self.reader.stuck = !self.reader.moved;
    }

    /// Tells the lanes that a poll was answered. Those that have the same holes by now share them.
    fn note_poll(&mut self, horizon: Position) {
        let mut before = Holes::default();
        for lane in self.subscribers.lanes_mut() {
            lane.note_poll(horizon);
            if !lane.cursor.holes().is_empty() {
                lane.cursor.share_holes(&before);
                before = lane.cursor.holes().clone();
            }
        }
    }

    fn shown<'a>(&self, scan: &'a Scan, dead: &'a RangeSet, gone: &'a RangeSet, log_start: Position) -> Shown<'a> {
        let closes_all = self.config.mutant == Some(Mutant::CursorAtHighestVisible);
        Shown::new(scan, dead, gone, log_start).closing_all(closes_all)
    }

    /// Notes for each lane the lowest of its holes that a poll did not look at.
    fn set_bounds(&mut self, plan: &PollPlan, scans: &[Scan]) {
        let complete = plan.hole_ends.iter().zip(scans).all(|(end, scan)| scan.covered_to >= *end);
        let covered: RangeSet = scans.iter().map(|scan| scan.after + 1..=scan.covered_to).collect();
        let mut before: (Holes, Option<Position>) = (Holes::default(), None);
        for (index, sub) in self.subscribers.iter_mut().enumerate() {
            looked_at(sub.lanes.len());
            let asked = complete && plan.asked.contains(&index);
            for lane in sub.lanes.iter_mut().flatten() {
                let all = lane.cursor.holes().is_empty() || (asked && lane.cursor.is_asked());
                if !all && !lane.cursor.holes().is_shared_with(&before.0) {
                    looked_at(lane.cursor.holes().len());
                    before = (lane.cursor.holes().clone(), lane.cursor.holes().first_outside(&covered));
                }
                let unseen = if all { None } else { before.1 };
                lane.cursor.set_bound(unseen.unwrap_or(Position::MAX));
            }
        }
    }

    /// Takes in what the scans for holes have shown, all at once: most of them show nothing, and then no lane is looked at.
    fn close_holes(&mut self, now: Now, scans: &[Scan], log_start: Position) {
        let (mut visible, mut dead, mut gone) = (RangeSet::new(), RangeSet::new(), RangeSet::new());
        looked_at(scans.len());
        for scan in scans {
            dead.union(&self.reader.closed_in(scan, log_start, self.config.mutant));
            visible.union(&scan.visible);
            gone.union(&gone_in(scan, log_start));
        }
        let breaks = self.config.mutant == Some(Mutant::CursorAtHighestVisible);
        if visible.is_empty() && dead.is_empty() && gone.is_empty() && !breaks {
            return;
        }
        let events = scans.iter().flat_map(|scan| &scan.events).cloned().collect();
        let (after, covered_to) =
            (scans.first().map_or(0, |scan| scan.after), scans.last().map_or(0, |scan| scan.covered_to));
        let scan = Scan { after, covered_to, visible, events };
        let mut shown = self.shown(&scan, &dead, &gone, log_start);
        let mut used = false;
        for index in 0..self.subscribers.len() {
            used |= self.close_holes_of(now, index, &mut shown);
        }
        if used {
            self.settler.close(&dead);
        }
    }

    fn close_holes_of(&mut self, now: Now, index: usize, shown: &mut Shown<'_>) -> bool {
        let sub = &self.subscribers[index];
        looked_at(sub.lanes.len());
        if !sub.lanes().any(|lane| takes_part(lane) && !lane.cursor.holes().is_empty()) {
            return false;
        }
        let nowhere = vec![false; sub.lanes.len()];
        self.admit_events(now, index, shown.scan, &nowhere);
        let mut pruned = 0;
        let sub = &mut self.subscribers[index];
        for lane in sub.lanes.iter_mut().flatten().filter(|lane| takes_part(lane) && !lane.cursor.holes().is_empty()) {
            let made = shown.apply(lane.cursor.holes(), None, lane.cursor.bound());
            pruned += made.pruned;
            self.reader.moved |= made.moved;
            lane.cursor.scanned(made.holes.clone(), &made.closed);
        }
        self.note_pruned(index, pruned);
        true
    }

    fn note_pruned(&mut self, index: usize, pruned: u64) {
        if pruned == 0 {
            return;
        }
        let name = self.subscribers[index].name.clone();
        self.journal.warn(format!(
            "subscription '{name}': retention removed {pruned} positions before this subscription had passed them"
        ));
        *self.journal.figures().pruned.entry(name).or_default() += pruned;
    }

    /// Whether a lane with room lies behind what is known to be there.
    pub(super) fn is_behind(&self) -> bool {
        let behind =
            |lane: &Lane| lane.cursor.top() < self.reader.horizon && lane.cursor.may_rise(self.config.ranges_max);
        self.subscribers.awake().any(|sub| {
            looked_at(sub.lanes.len());
            sub.stopped.is_none() && sub.has_room(&self.config) && sub.active().any(behind)
        })
    }

    /// Shows one scan to the lanes of a subscription; with `may_rise` they may go higher. What is visible together is handed on in
    /// order, so a lane takes nothing from above a hole of its own that this poll did not look at.
    fn apply(&mut self, now: Now, index: usize, shown: &mut Shown<'_>, may_rise: bool) -> bool {
        let scan = shown.scan;
        let extends = |lane: &Lane| {
            let fits = scan.after <= lane.cursor.top() && scan.covered_to > lane.cursor.top();
            may_rise && fits && lane.cursor.may_rise(self.config.ranges_max) && lane.cursor.bound() == Position::MAX
        };
        let sub = &self.subscribers[index];
        let higher: Vec<bool> =
            sub.lanes.iter().map(|lane| lane.as_ref().is_some_and(|lane| takes_part(lane) && extends(lane))).collect();
        let in_scan = |lane: &Lane| lane.cursor.holes().after(scan.after).is_some_and(|hole| hole <= scan.covered_to);
        let touches = |lane: &Lane| takes_part(lane) && in_scan(lane);
        looked_at(sub.lanes.len());
        if !higher.contains(&true) && !sub.lanes.iter().flatten().any(touches) {
            return false;
        }
        let stops = self.admit_events(now, index, scan, &higher);
        let sub = &mut self.subscribers[index];
        let mut pruned = 0;
        for ((lane, higher), stop) in sub.lanes.iter_mut().zip(higher).zip(stops) {
            let Some(lane) = lane.as_mut().filter(|lane| takes_part(lane)) else { continue };
            if !higher && !in_scan(lane) {
                continue;
            }
            let rise = higher.then(|| (lane.cursor.top(), stop.max(lane.cursor.top())));
            let made = shown.apply(lane.cursor.holes(), rise, lane.cursor.bound());
            pruned += made.pruned;
            self.reader.moved |= made.moved;
            if let Some((_, top)) = rise {
                lane.cursor.rise(top);
            }
            lane.cursor.scanned(made.holes.clone(), &made.closed);
        }
        self.note_pruned(index, pruned);
        true
    }

    /// Hands the events of a scan on; returns the position that each lane may go up to.
    pub(super) fn admit_events(&mut self, now: Now, index: usize, scan: &Scan, higher: &[bool]) -> Vec<Position> {
        let mut stops = vec![scan.covered_to; self.subscribers[index].lanes.len()];
        let mut stop = scan.covered_to;
        let sub = &mut self.subscribers[index];
        let mut room = sub.free(&self.config);
        let definition = sub.definition.clone();
        let filter = &definition.filter;
        let all = filter.is_all();
        looked_at(scan.events.len());
        for event in &scan.events {
            if !all && !filter.wants(event) {
                continue;
            }
            let key = event.key_hash();
            let number = lane_of(key, event.position, sub.lane_count);
            let Some(lane) = sub.lanes[number as usize].as_mut().filter(|lane| takes_part(lane)) else { continue };
            let full = room == 0 || sub.bytes.used() >= self.config.in_flight_bytes_max;
            let held =
                lane.is_quarantined() && lane.queues.runnable(now.wall, QUARANTINE_ROWS_MAX) >= QUARANTINE_ROWS_MAX;
            if event.position <= lane.cursor.top() {
                if event.position >= lane.cursor.bound()
                    || lane.cursor.holes().is_empty()
                    || !lane.cursor.holes().contains(event.position)
                {
                    continue;
                }
                if full || held {
                    // It stays a hole, and nothing above it is taken before it.
                    lane.cursor.set_bound(event.position);
                    continue;
                }
            } else if !higher[number as usize] || event.position > stop.min(stops[number as usize]) {
                continue;
            } else if full {
                stop = event.position - 1;
                continue;
            } else if held {
                stops[number as usize] = event.position - 1;
                continue;
            }
            room = room.saturating_sub(1);
            sub.admit(now, number, key, event, self.queues.ids());
        }
        stops.iter_mut().for_each(|own| *own = (*own).min(stop));
        stops
    }

    pub(super) fn poll_request(&self, now: Now) -> Option<(PollRequest, PollPlan)> {
        let mut holes = RangeSet::new();
        let mut tops: Vec<Position> = Vec::new();
        let (mut room, mut asked) = (HashSet::new(), HashSet::new());
        let mut before = &Holes::default();
        for (index, sub) in self.subscribers.iter().enumerate() {
            looked_at(sub.lanes.len());
            if !sub.has_room(&self.config) {
                continue;
            }
            asked.insert(index);
            // Holes are asked for also when a limit has stopped the subscription: it may be their number. Most lanes have the same.
            for lane in sub.active().filter(|lane| !lane.cursor.holes().is_empty()) {
                if !lane.cursor.holes().is_shared_with(before) {
                    looked_at(lane.cursor.holes().len());
                    holes.union(lane.cursor.holes());
                    before = lane.cursor.holes();
                }
            }
            if sub.stopped.is_none() {
                room.insert(index);
                tops.extend(
                    sub.active()
                        .filter(|lane| lane.cursor.may_rise(self.config.ranges_max))
                        .map(|lane| lane.cursor.top()),
                );
            }
        }
        let mut scans: Vec<ScanRequest> =
            coalesce(&holes, self.config.hole_scans_max, self.config.page_size.max(1_000));
        let hole_ends: Vec<Position> = scans.iter().map(|scan| scan.to).collect();
        // With little room a long page would be read for nothing; not all of it is wanted, though.
        let largest = room.iter().map(|&index: &usize| self.subscribers[index].free(&self.config)).max().unwrap_or(0);
        let limit = self.config.page_size.min(largest.saturating_mul(4).max(1));
        scans.extend(tail_scans(tops, limit).into_iter().map(|after| ScanRequest { after, to: Position::MAX, limit }));
        if scans.is_empty() {
            return None;
        }
        let wanted = self
            .subscribers
            .iter()
            .filter(|sub| sub.active().next().is_some())
            .map(|sub| &sub.definition.filter)
            .cloned()
            .collect();
        // Without a hole there is nothing to close; if this poll finds one, the next one looks.
        let lately = self.reader.last_writers.is_some_and(|last| now.mono < last + WRITERS_INTERVAL);
        let without_writers = hole_ends.is_empty() || lately;
        Some((PollRequest { scans, wanted, without_writers }, PollPlan { hole_ends, room, asked }))
    }

    pub(super) fn call_poll(&mut self, now: Now) {
        let Reader { rang_at, last_poll, stuck, poll, .. } = &self.reader;
        let rang = rang_at.is_some_and(|at| now.mono >= at + self.config.debounce);
        let due = last_poll.is_none_or(|last| now.mono >= last + self.reader.wait(&self.config));
        let behind = !stuck && !poll.is_busy() && self.is_behind();
        if !(rang || due || behind) || !poll.is_free(now) {
            return;
        }
        self.reader.rang_at = None;
        self.reader.stuck = false;
        self.reader.last_poll = Some(now.mono);
        if let Some((request, plan)) = self.poll_request(now) {
            if !request.without_writers {
                self.reader.last_writers = Some(now.mono);
            }
            for lane in self.subscribers.lanes_mut() {
                lane.cursor.ask(lane.phase == Phase::Active);
            }
            self.reader.poll.begin(plan);
            self.reader.polls += 1;
            self.actions.push(Action::Poll(request));
        }
    }
}

/// What retention has removed of what a scan looked for: what it kept for deliveries is visible.
fn gone_in(scan: &Scan, log_start: Position) -> RangeSet {
    scan.visible.missing(scan.after + 1, scan.covered_to.min(log_start - 1))
}

/// Whether a lane may use the answer to the poll under way: it was there, with this filter, when the poll was asked. An active lane
/// was loaded under the definition that its subscription goes by.
fn takes_part(lane: &Lane) -> bool {
    lane.phase == Phase::Active && lane.cursor.is_asked()
}

/// Where to read on from so that the lanes with these tops get on: all of them where they are near each other, and never only the
/// lowest or only the highest.
fn tail_scans(mut tops: Vec<Position>, limit: usize) -> Vec<Position> {
    tops.sort_unstable();
    let highest = tops.last().copied();
    let mut scans: Vec<Position> = Vec::new();
    for top in tops {
        let reached = scans.last().is_some_and(|after| top < after.saturating_add(limit as Position));
        if scans.is_empty() || (!reached && scans.len() < TAIL_SCANS_MAX) {
            scans.push(top);
        }
    }
    scans.extend(highest.filter(|highest| scans.last() != Some(highest)));
    scans
}

/// Scans that cover all holes, at most `limit`: beyond it the nearest neighbours are asked for as one.
fn coalesce(holes: &RangeSet, limit: usize, page_size: usize) -> Vec<ScanRequest> {
    let mut ranges: Vec<(Position, Position)> = holes.iter().map(|range| (*range.start(), *range.end())).collect();
    if ranges.len() > limit {
        let mut gaps: Vec<(Position, usize)> =
            ranges.windows(2).enumerate().map(|(index, pair)| (pair[1].0 - pair[0].1, index)).collect();
        gaps.sort_unstable();
        let joined: HashSet<usize> = gaps.iter().take(ranges.len() - limit).map(|gap| gap.1).collect();
        let mut merged: Vec<(Position, Position)> = Vec::with_capacity(limit);
        for (index, range) in ranges.into_iter().enumerate() {
            match merged.last_mut() {
                Some(last) if index > 0 && joined.contains(&(index - 1)) => last.1 = range.1,
                _ => merged.push(range),
            }
        }
        ranges = merged;
    }
    let scan = |(low, high): (Position, Position)| {
        // What lies between joined holes has been seen, and must not use the page up.
        let seen = (high - low + 1) as u64 - holes.within(low, high).count();
        ScanRequest { after: low - 1, to: high, limit: page_size + seen as usize }
    };
    ranges.into_iter().map(scan).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_are_far_apart_all_get_on() {
        assert!(tail_scans(vec![], 100).is_empty());
        assert_eq!(tail_scans(vec![5, 5, 5], 100), [5]);
        assert_eq!(tail_scans(vec![5, 60, 90], 100), [5, 90], "the highest never waits for the lowest");
        assert_eq!(tail_scans(vec![1_000_000, 5, 500_000, 500_050], 100), [5, 500_000, 1_000_000]);
        let many = tail_scans((0..100).map(|n| n * 1_000).collect(), 100);
        assert_eq!((many.len(), many.last()), (TAIL_SCANS_MAX + 1, Some(&99_000)));
    }
}
