use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use pillarbox::admin::retention::Jump;
use pillarbox::admin::{REASON_HOLD, State};
use pillarbox::store::{
    AttemptError, Cursor, DEAD_HEADS_MAX, DeliveryRow, ERRORS_KEPT_MAX, Epoch, InstanceId, LaneState, LaneWrite,
    RangeSet,
};
use pillarbox::{Mode, OnDead, Position, Timestamp};

use crate::Broken;
use crate::memory_queue::{Held, Turn};

/// The row of one lane, with its deliveries and its books.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lane {
    pub(crate) cursor: Cursor,
    pub(crate) owner: Option<InstanceId>,
    pub(crate) epoch: Epoch,
    pub(crate) takeovers: u32,
    pub(crate) revision: i64,
    pub(crate) deliveries: BTreeMap<Position, Row>,
    pub(crate) skipped: BTreeMap<Position, (String, Timestamp)>,
    /// What lay before the subscription's start.
    pub(crate) before_start: RangeSet,
    /// One entry a settlement that moved the cursor.
    pub(crate) entries: Vec<Covered>,
    /// When the lane was last written.
    pub(crate) wrote_at: Timestamp,
}

/// A delivery with its last errors.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) delivery: DeliveryRow,
    pub(crate) errors: Vec<AttemptError>,
    /// When it became dead, if it is.
    pub(crate) died_at: Option<Timestamp>,
    /// Who works on it, if it is a queue's.
    pub(crate) claim: Option<Held>,
    /// When it can be claimed, if it is its key's head in a queue.
    pub(crate) turn: Option<Turn>,
    /// How often it was recovered.
    pub(crate) crashes: u32,
}

impl Row {
    pub(crate) fn new(delivery: DeliveryRow, now: Timestamp) -> Self {
        let died_at = (delivery.state == State::Dead).then_some(now);
        Row { delivery, errors: Vec::new(), died_at, claim: None, turn: None, crashes: 0 }
    }

    /// One that stays dead has died when it first did.
    pub(crate) fn set(&mut self, delivery: DeliveryRow, now: Timestamp) {
        self.died_at = (delivery.state == State::Dead).then(|| self.died_at.unwrap_or(now));
        self.delivery = delivery;
    }

    /// Keeps an error with the last ones.
    pub(crate) fn note(&mut self, error: AttemptError) {
        self.errors.push(error);
        let surplus = self.errors.len().saturating_sub(ERRORS_KEPT_MAX);
        self.errors.drain(..surplus);
    }
}

/// What one settlement covered.
#[derive(Debug, Clone)]
pub(crate) struct Covered {
    pub(crate) covered: RangeSet,
    pub(crate) epoch: Epoch,
    pub(crate) after: Timestamp,
    pub(crate) before: Timestamp,
}

impl Lane {
    pub(crate) fn starting_at(cursor: Cursor, now: Timestamp) -> Self {
        let before_start = cursor.positions();
        Lane { cursor, before_start, wrote_at: now, ..Lane::default() }
    }

    pub(crate) fn state(
        &self,
        mode: Mode,
        on_dead: OnDead,
        queued_keys_max: usize,
        broken: Option<Broken>,
    ) -> LaneState {
        let (cursor, takeovers, revision) = (self.cursor.clone(), self.takeovers, self.revision);
        let state = LaneState { cursor, takeovers, revision, ..LaneState::default() };
        if mode == Mode::Queue {
            let queued_keys = self.queued_keys(broken);
            let queued_keys_left_out = queued_keys.len() > queued_keys_max;
            let queued_keys = if queued_keys_left_out { Vec::new() } else { queued_keys };
            return LaneState { queued_keys, queued_keys_left_out, ..state };
        }
        let mut deliveries: Vec<DeliveryRow> = self.deliveries.values().map(|row| row.delivery.clone()).collect();
        deliveries.sort_by_key(|delivery| (delivery.arrival, delivery.position));
        let last_arrival = deliveries.last().map_or(0, |last| last.arrival);
        let mut heads: BTreeSet<Option<Box<str>>> = BTreeSet::new();
        let open = self.cursor.open();
        deliveries.retain(|delivery| {
            let dead = delivery.state == State::Dead && broken != Some(Broken::LoadsAllDead);
            let blocks = on_dead == OnDead::Block && broken != Some(Broken::LoadForgetsDeadHeads);
            let first = dead && blocks && delivery.key.is_some() && heads.insert(delivery.key.clone());
            !dead || open.contains(delivery.position) || (first && heads.len() <= DEAD_HEADS_MAX)
        });
        let dead_heads_left_out = heads.len() > DEAD_HEADS_MAX;
        LaneState { deliveries, last_arrival, dead_heads_left_out, ..state }
    }

    /// Makes `instance` the owner. Only a lane that another instance still owned counts as seized.
    pub(crate) fn take(&mut self, instance: InstanceId) -> Epoch {
        if self.owner.is_some_and(|owner| owner != instance) {
            self.takeovers += 1;
        }
        self.owner = Some(instance);
        self.epoch += 1;
        self.epoch
    }

    pub(crate) fn release(&mut self) {
        self.owner = None;
        self.epoch += 1;
    }

    pub(crate) fn write_cursor(&mut self, write: &LaneWrite, now: Timestamp) {
        let mut covered = write.cursor.positions();
        covered.subtract(&self.cursor.positions());
        if !covered.is_empty() {
            self.entries.push(Covered { covered, epoch: write.epoch, after: self.wrote_at, before: now });
        }
        if write.calm {
            self.takeovers = 0;
        }
        self.cursor = write.cursor.clone();
        self.wrote_at = now;
    }

    /// Puts, then changes, then finishes, so that one settlement can put a delivery and record its first error.
    /// `settled` is what the cursor counted as such before this settlement.
    pub(crate) fn write_deliveries(
        &mut self,
        write: &LaneWrite,
        settled: &RangeSet,
        now: Timestamp,
        broken: Option<Broken>,
    ) {
        let changed_meanwhile = self.revision != write.revision && broken != Some(Broken::RevisionIgnored);
        let mut found = BTreeSet::new();
        for delivery in &write.put {
            // Put before, by a settlement that was not answered; an operator may have given it up since.
            let repeated = settled.contains(delivery.position) && broken != Some(Broken::SkipUndone);
            match self.deliveries.entry(delivery.position) {
                Entry::Vacant(_) if changed_meanwhile && repeated => _ = found.insert(delivery.position),
                Entry::Vacant(entry) => _ = entry.insert(Row::new(delivery.clone(), now)),
                Entry::Occupied(_) if changed_meanwhile => _ = found.insert(delivery.position),
                Entry::Occupied(mut entry) => entry.get_mut().set(delivery.clone(), now),
            }
        }
        let put: BTreeSet<Position> = write.put.iter().map(|delivery| delivery.position).collect();
        // An operator cannot have changed what was put just now.
        let own = |position: Position| !changed_meanwhile || put.contains(&position) && !found.contains(&position);
        for (delivery, error) in write.change.iter().filter(|(delivery, _)| own(delivery.position)) {
            if broken == Some(Broken::ChangeResurrects) {
                self.deliveries.entry(delivery.position).or_insert(Row::new(delivery.clone(), now));
            }
            let Some(row) = self.deliveries.get_mut(&delivery.position) else { continue };
            row.set(delivery.clone(), now);
            error.iter().for_each(|error| row.note(error.clone()));
        }
        for position in &write.finish {
            self.deliveries.remove(position);
        }
    }

    /// What the settlements say they covered.
    pub(crate) fn covered(&self) -> RangeSet {
        let mut covered = RangeSet::new();
        self.entries.iter().for_each(|entry| covered.union(&entry.covered));
        covered
    }

    pub(crate) fn settled(&self, position: Position) -> bool {
        position <= self.cursor.floor || self.cursor.settled.contains(position)
    }

    /// The positions of its deliveries.
    pub(crate) fn positions(&self) -> RangeSet {
        self.deliveries.keys().map(|position| *position..=*position).collect()
    }

    /// Goes past what the subscription's hold no longer keeps.
    pub(crate) fn jump(&mut self, jump: Jump, now: Timestamp, broken: Option<Broken>) {
        let Jump { cursor, covered, left_out } = jump;
        self.entries.push(Covered { covered, epoch: self.epoch, after: self.wrote_at, before: now });
        self.before_start.union(&left_out);
        self.cursor = cursor;
        self.epoch += Epoch::from(broken != Some(Broken::HoldWithoutFence));
    }

    /// Records that the event at this position was given up because the subscription's hold was over.
    pub(crate) fn give_up(&mut self, position: Position, now: Timestamp, broken: Option<Broken>) {
        if broken != Some(Broken::HoldLeavesNoRecord) {
            self.skipped.insert(position, (REASON_HOLD.to_owned(), now));
        }
    }

    pub(crate) fn next_arrival(&self) -> i64 {
        self.deliveries.values().map(|row| row.delivery.arrival + 1).max().unwrap_or(0)
    }
}
