use std::collections::HashMap;

use super::subscriber::Subscriber;
use super::{Action, Engine, Mutant, PendingWrite};
use crate::dispatcher::Item;
use crate::lane::{Lane, Phase};
use crate::work::looked_at;
use crate::{ClaimId, Cursor, Now, Position, RangeSet, Settlement};

impl Engine {
    pub(super) fn has_writes(&self) -> bool {
        !self.dead.is_empty() || self.awake().flat_map(Subscriber::lanes).any(Lane::has_writes)
    }

    pub(super) fn settled(&mut self, now: Now, written: Vec<bool>) {
        self.dead_settling = RangeSet::new();
        let mut over: HashMap<usize, Vec<u32>> = HashMap::new();
        for (pending, written) in self.settling.succeed().unwrap_or_default().into_iter().zip(written) {
            let PendingWrite { write, done, announced } = pending;
            let (number, epoch) = (write.lane.lane, write.epoch);
            if !write.queue.is_empty() {
                let claims: Vec<ClaimId> = write.queue.iter().filter_map(|queued| queued.claim).collect();
                self.rows_settled(now, write.lane.subscription, &claims);
            }
            let Some(index) = self.index_of(write.lane.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            sub.window -= done;
            let Some(lane) = sub.lane_at(number, epoch) else { continue };
            if !written || write.release {
                self.observe_now = true;
                over.entry(index).or_default().push(number);
                continue;
            }
            lane.written = (write.cursor.floor, now.mono);
            if write.calm {
                lane.takeovers = 0;
            }
            self.stuck = false;
            if sub.announced.is_empty() {
                continue;
            }
            let begin = |item: &mut Item| item.lane == number && announced.contains(&item.event.position);
            for item in sub.announced.extract_if(.., begin).collect::<Vec<_>>() {
                sub.dispatcher.push(item);
            }
        }
        over.into_iter().for_each(|(index, lanes)| self.subscribers[index].drop_lanes(lanes));
    }

    pub(super) fn settle(&mut self, now: Now) {
        if !self.settling.is_free(now) || !self.settle_is_due(now) {
            return;
        }
        let mut lanes = Vec::new();
        for sub in self.subscribers.iter_mut().filter(|sub| !sub.resting) {
            looked_at(sub.lanes.len());
            for lane in sub.lanes.iter_mut().flatten().filter(|lane| lane.phase != Phase::Waiting) {
                let releasing = lane.phase == Phase::Releasing && sub.dispatcher.in_flight_of(lane.reference.lane) == 0;
                let floor_is_old =
                    now.mono >= lane.written.1 + self.config.floor_interval && lane.written.0 < lane.floor();
                if !lane.has_writes() && !releasing && !floor_is_old {
                    continue;
                }
                // What is left out comes again; in a queue that would be beside its row, or after it.
                let ranges_max = if sub.queue.is_some() { usize::MAX } else { self.config.ranges_max };
                let (mut write, done) = lane.take_write(ranges_max);
                break_cursor(self.config.mutant, lane.top, &mut write.cursor);
                if releasing {
                    write.release = true;
                    lane.phase = Phase::Waiting;
                }
                lanes.push(PendingWrite { write, done, announced: std::mem::take(&mut lane.announced) });
            }
        }
        if lanes.is_empty() && self.dead.is_empty() {
            return;
        }
        lanes.sort_by_key(|pending| pending.write.lane);
        self.last_settle = Some(now.mono);
        self.dead_settling = std::mem::take(&mut self.dead);
        let writes = lanes.iter().map(|pending| pending.write.clone()).collect();
        self.settling.begin(lanes);
        self.actions.push(Action::Settle(Settlement { lanes: writes, dead: self.dead_settling.clone() }));
    }

    /// Writes are gathered for a while, unless the window fills up or a lane waits for them to be given back or loaded anew.
    pub(super) fn settle_is_due(&self, now: Now) -> bool {
        let gathered = self.last_settle.is_none_or(|last| now.mono >= last + self.settle_interval);
        let pressed = |sub: &Subscriber| {
            sub.lanes().map(|lane| lane.done_unwritten).sum::<usize>() * 2 > self.config.in_flight_max
        };
        let awaited = |sub: &Subscriber, lane: &Lane| {
            let waits = lane.phase == Phase::Releasing || (lane.phase == Phase::Reloading && lane.has_writes());
            waits && sub.dispatcher.in_flight_of(lane.reference.lane) == 0
        };
        gathered || self.awake().any(|sub| pressed(sub) || sub.lanes().any(|lane| awaited(sub, lane)))
    }

    pub(super) fn restore_settling(&mut self, now: Now) {
        let dead = std::mem::take(&mut self.dead_settling);
        self.dead.union(&dead);
        for PendingWrite { write, done, announced } in self.settling.fail(now).unwrap_or_default() {
            let Some(index) = self.index_of(write.lane.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            match sub.lane_at(write.lane.lane, write.epoch) {
                Some(lane) => {
                    if write.release {
                        lane.phase = Phase::Releasing;
                    }
                    lane.announced.splice(..0, announced);
                    lane.restore_write(write, done);
                }
                None => sub.window -= done,
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
