use std::collections::HashMap;
use std::time::Duration;

use super::slot::Slot;
use super::subscriber::Subscriber;
use super::{Action, Engine, Mutant};
use crate::budget::Reservation;
use crate::dispatcher::Item;
use crate::lane::{Lane, Phase};
use crate::work::looked_at;
use crate::{ClaimId, Cursor, LaneWrite, Now, Position, RangeSet, Settlement, State};

/// When what has changed is written, and what of it is being written.
#[derive(Debug)]
pub(super) struct Settler {
    slot: Slot<Pending>,
    /// How long writes are gathered.
    interval: Duration,
    last_settle: Option<Duration>,
    /// Positions that were proven to be closed and are not written as such.
    closed: RangeSet,
}

/// The settlement under way.
#[derive(Debug)]
struct Pending {
    lanes: Vec<PendingWrite>,
    closed: RangeSet,
}

/// A lane's part of the settlement under way.
#[derive(Debug)]
struct PendingWrite {
    write: LaneWrite,
    /// The room that its events take until it is written.
    done: Reservation,
    /// Attempts that may begin once it is written.
    recorded: Vec<Position>,
}

impl Settler {
    pub(super) fn new(interval: Duration) -> Self {
        Settler { slot: Slot::default(), interval, last_settle: None, closed: RangeSet::new() }
    }

    /// Whether a settlement is under way.
    pub(super) fn is_calling(&self) -> bool {
        self.slot.is_busy()
    }

    /// When a settlement that failed may be tried again.
    pub(super) fn retry_at(&self) -> Option<Duration> {
        self.slot.retry_at()
    }

    /// Until when writes are gathered.
    pub(super) fn next_at(&self) -> Option<Duration> {
        self.last_settle.map(|last| last + self.interval)
    }

    /// What is being written.
    pub(super) fn writes(&self) -> impl Iterator<Item = &LaneWrite> {
        self.slot.in_flight().into_iter().flat_map(|pending| &pending.lanes).map(|pending| &pending.write)
    }

    /// For how many lanes something is being written.
    pub(super) fn lanes(&self) -> usize {
        self.slot.in_flight().map_or(0, |pending| pending.lanes.len())
    }

    /// These positions will never be filled.
    pub(super) fn close(&mut self, closed: &RangeSet) {
        self.closed.union(closed);
    }
}

impl Engine {
    pub(super) fn has_writes(&self) -> bool {
        !self.settler.closed.is_empty() || self.subscribers.awake().flat_map(Subscriber::lanes).any(Lane::has_writes)
    }

    pub(super) fn settled(&mut self, now: Now, written: Vec<bool>) {
        let mut over: HashMap<usize, Vec<u32>> = HashMap::new();
        let lanes = self.settler.slot.succeed().map_or_else(Vec::new, |pending| pending.lanes);
        for (pending, written) in lanes.into_iter().zip(written) {
            let PendingWrite { write, done, recorded } = pending;
            let (number, epoch) = (write.lane.lane, write.epoch);
            if !write.queue.is_empty() {
                let claims: Vec<ClaimId> = write.queue.iter().filter_map(|queued| queued.claim).collect();
                let added = write.queue.iter().filter(|queued| written && queued.delivery.state != State::Delayed);
                self.rows_settled(now, write.lane.subscription, &claims, added.count());
            }
            drop(done);
            let Some(index) = self.subscribers.index_of(write.lane.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            let Some(lane) = sub.lane_at(number, epoch) else { continue };
            if !written || write.release {
                self.member.observe_soon();
                over.entry(index).or_default().push(number);
                continue;
            }
            lane.note_written(&write, now.mono);
            self.reader.try_again();
            if sub.recorded.is_empty() {
                continue;
            }
            let begin = |item: &mut Item| item.lane == number && recorded.contains(&item.event.position);
            for item in sub.recorded.extract_if(.., begin).collect::<Vec<_>>() {
                sub.dispatcher.push(item);
            }
        }
        over.into_iter().for_each(|(index, lanes)| self.subscribers[index].drop_lanes(lanes));
    }

    pub(super) fn settle(&mut self, now: Now) {
        if !self.settler.slot.is_free(now) || !self.settle_is_due(now) {
            return;
        }
        let mut lanes = Vec::new();
        for sub in self.subscribers.awake_mut() {
            looked_at(sub.lanes.len());
            for lane in sub.lanes.iter_mut().flatten().filter(|lane| lane.phase != Phase::Waiting) {
                let releasing = lane.phase == Phase::Releasing && sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
                let floor_is_old = lane.has_old_floor(now.mono, self.config.floor_interval);
                if !lane.has_writes() && !releasing && !floor_is_old {
                    continue;
                }
                // What is left out comes again; in a queue that would be beside its row, or after it.
                let ranges_max = if sub.queue.is_some() { usize::MAX } else { self.config.ranges_max };
                let (mut write, done, recorded) = lane.take_write(ranges_max);
                break_cursor(self.config.mutant, lane.cursor.top(), &mut write.cursor);
                if releasing {
                    write.release = true;
                    lane.phase = Phase::Waiting;
                }
                lanes.push(PendingWrite { write, done, recorded });
            }
        }
        if lanes.is_empty() && self.settler.closed.is_empty() {
            return;
        }
        lanes.sort_by_key(|pending| pending.write.lane);
        self.settler.last_settle = Some(now.mono);
        let closed = std::mem::take(&mut self.settler.closed);
        let writes = lanes.iter().map(|pending| pending.write.clone()).collect();
        self.settler.slot.begin(Pending { lanes, closed: closed.clone() });
        self.actions.push(Action::Settle(Settlement { lanes: writes, closed }));
    }

    /// Writes are gathered for a while, unless the window fills up or a lane waits for them to be given back or loaded again.
    pub(super) fn settle_is_due(&self, now: Now) -> bool {
        let gathered = self.settler.next_at().is_none_or(|at| now.mono >= at);
        let pressed =
            |sub: &Subscriber| sub.lanes().map(Lane::done_unwritten).sum::<usize>() * 2 > self.config.in_flight;
        let awaited = |sub: &Subscriber, lane: &Lane| {
            let waits = lane.phase == Phase::Releasing || (lane.phase == Phase::Reloading && lane.has_writes());
            waits && sub.dispatcher.in_flight_of(lane.reference.lane) == 0
        };
        gathered || self.subscribers.awake().any(|sub| pressed(sub) || sub.lanes().any(|lane| awaited(sub, lane)))
    }

    /// Puts back what could not be written.
    pub(super) fn settle_failed(&mut self, now: Now) {
        let Some(Pending { lanes, closed }) = self.settler.slot.fail(now) else { return };
        self.settler.close(&closed);
        for PendingWrite { write, done, recorded } in lanes {
            let Some(sub) = self.subscribers.find_mut(write.lane.subscription) else { continue };
            match sub.lane_at(write.lane.lane, write.epoch) {
                Some(lane) => {
                    if write.release {
                        lane.phase = Phase::Releasing;
                    }
                    lane.restore_write(write, done, recorded);
                }
                None => drop(done),
            }
        }
    }
}

/// What a deliberately broken variant writes instead of the truth.
fn break_cursor(mutant: Option<Mutant>, top: Position, cursor: &mut Cursor) {
    match mutant {
        Some(Mutant::CursorAtHighestVisible) => cursor.floor = top,
        Some(Mutant::OneRangeAboveFloor) => {
            let ends = cursor.settled.first().zip(cursor.settled.last());
            return ends.into_iter().for_each(|(low, high)| cursor.settled.insert_range(low, high));
        }
        Some(Mutant::NoRangesAboveFloor) => return cursor.settled = RangeSet::new(),
        Some(Mutant::AbsoluteCursor) => {
            cursor.floor = cursor.anchor.map_or(cursor.floor, |anchor| anchor.0.max(cursor.floor))
        }
        _ => return,
    }
    cursor.settled.remove_range(0, cursor.floor);
}
