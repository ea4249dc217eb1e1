use pillarbox::admin::{Change, Selection, State};
use pillarbox::engine::Input;
use pillarbox::store::{DeliveryRow, InstanceId, LaneRef, RangeSet, Settlement};
use pillarbox::{Position, Result};
use uuid::Uuid;

use super::{SUBSCRIPTIONS, Ticket, World};

/// How likely an operator requeues what is about to be tried, and skips what has just died, in percent.
const REQUEUED: u64 = 30;
const SKIPPED: u64 = 50;

/// Settlements, and operators who act just before one, or before its answer has arrived.
impl World {
    pub(super) fn settle(
        &mut self,
        ticket: Ticket,
        instance: InstanceId,
        settlement: &Settlement,
        is_answered: bool,
    ) -> Result<Input> {
        self.requeue_announced(settlement);
        let before = self.settled_before(settlement);
        let given_up = self.given_up_again(settlement, &before);
        let answer = self.log.settle(instance, settlement);
        if let Ok(written) = &answer {
            self.judge(settlement, &before, written);
            self.check_announced(settlement, written);
            self.check_given_up(&given_up);
        }
        self.check_floors();
        self.check_releases(ticket.node, settlement);
        if answer.is_ok() && !is_answered {
            self.skip_dead(settlement);
        }
        answer.map(Input::Settled)
    }

    /// An operator requeues an event whose attempt is about to be written down: its row has changed by then.
    fn requeue_announced(&mut self, settlement: &Settlement) {
        if self.plan.calm || self.healed {
            return;
        }
        let announced = settlement.lanes.iter().find_map(|write| {
            let (row, _) = write.change.iter().find(|(row, _)| row.state == State::Processing)?;
            Some((write.lane, row.position))
        });
        let Some((sub, event)) = announced.and_then(|(lane, position)| self.event_at(lane, position)) else { return };
        if self.random.chance(REQUEUED) {
            let (subscription, which) = (SUBSCRIPTIONS[sub].to_owned(), Selection::Event(event));
            self.change(sub, &Change::Requeue { subscription, which, limit: 1 });
        }
    }

    /// An operator skips what has died in a settlement whose writer does not know that it was written, and writes it again.
    fn skip_dead(&mut self, settlement: &Settlement) {
        let dead = settlement.lanes.iter().find_map(|write| {
            let row = write.put.iter().find(|row| row.state == State::Dead)?;
            Some((write.lane, row.position))
        });
        let Some((sub, event)) = dead.and_then(|(lane, position)| self.event_at(lane, position)) else { return };
        if self.random.chance(SKIPPED) {
            let subscription = SUBSCRIPTIONS[sub].to_owned();
            self.change(sub, &Change::Skip { subscription, event, reason: "simulated".into() });
        }
    }

    /// An attempt that is answered as written down is in the database: it would not count if it ended its process.
    fn check_announced(&mut self, settlement: &Settlement, written: &[bool]) {
        let mut missing = Vec::new();
        for (write, _) in settlement.lanes.iter().zip(written).filter(|(_, written)| **written) {
            for (row, _) in write.change.iter().filter(|(row, _)| row.state == State::Processing) {
                let last = write.change.iter().rfind(|(other, _)| other.position == row.position);
                let is_last = last.is_some_and(|(last, _)| last == row) && !write.finish.contains(&row.position);
                let stored = self.row_at(write.lane, row.position);
                let counts = stored.is_some_and(|stored| (stored.state, stored.attempts) == (row.state, row.attempts));
                if is_last && !counts {
                    missing.push(row.position);
                }
            }
        }
        if !missing.is_empty() {
            self.violation(format!("attempts of {missing:?} were announced and answered, and are not written"));
        }
    }

    /// What a settlement puts though it was passed before and an operator has given it up since.
    fn given_up_again(&self, settlement: &Settlement, before: &[RangeSet]) -> Vec<(LaneRef, Position)> {
        let mut again = Vec::new();
        for (write, passed) in settlement.lanes.iter().zip(before) {
            for row in write.put.iter().filter(|row| passed.contains(row.position)) {
                let event = self.event_at(write.lane, row.position);
                if event.is_some_and(|it| self.skips.contains(&it)) && self.row_at(write.lane, row.position).is_none() {
                    again.push((write.lane, row.position));
                }
            }
        }
        again
    }

    fn check_given_up(&mut self, given_up: &[(LaneRef, Position)]) {
        for (lane, position) in given_up {
            if self.row_at(*lane, *position).is_some() {
                self.violation(format!("{position} of {lane:?} was skipped, and has a row again"));
            }
        }
    }

    /// The subscription and the event at a position of a lane.
    fn event_at(&self, lane: LaneRef, position: Position) -> Option<(usize, Uuid)> {
        let sub = self.ids.iter().position(|id| *id == lane.subscription)?;
        Some((sub, self.log.inner().event_at(position)?.id))
    }

    fn row_at(&self, lane: LaneRef, position: Position) -> Option<DeliveryRow> {
        Some(self.log.inner().lane(lane)?.deliveries.get(&position)?.delivery.clone())
    }
}
