mod cursor;
mod key_queues;
mod probation;
mod row_keys;
mod write_buffer;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use uuid::Uuid;

pub(crate) use self::cursor::LaneCursor;
pub(crate) use self::key_queues::KeyQueues;
use self::key_queues::holds_its_place;
use self::probation::Probation;
use self::row_keys::RowKeys;
use self::write_buffer::WriteBuffer;
use crate::budget::{Budget, Reservation};
use crate::work::looked_at;
use crate::{
    AttemptError, ClaimId, DeliveryRow, Epoch, Event, Failed, KeyHash, LaneRef, LaneState, LaneWrite, Mode, OnDead,
    Position, Queued, State, Timestamp,
};

/// What an owner knows of one lane: which positions are settled, the deliveries of its failing keys, and what of it is not written.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) reference: LaneRef,
    pub(crate) epoch: Epoch,
    pub(crate) revision: i64,
    /// The number of the definition that it was loaded under: only with that filter may it be read.
    pub(crate) definition: i64,
    pub(crate) phase: Phase,
    /// It has stopped and has dropped what is not at the sink.
    pub(crate) quiet: bool,
    /// Not all keys are known that a dead event holds back: nothing is sent and nothing is read.
    pub(crate) overfull: bool,
    /// How far it has been read, and what is settled.
    pub(crate) cursor: LaneCursor,
    /// Its deliveries, key by key.
    pub(crate) queues: KeyQueues,
    /// What is to be written.
    writes: WriteBuffer,
    /// Of a queue: the keys that have rows.
    row_keys: Option<RowKeys>,
    probation: Probation,
    /// Positions that were not settled and have a row in the delivery table, dead ones included: a cursor that was cut at its limit shows
    /// them again.
    parked: HashSet<Position>,
    /// Attempts that are written first and not yet sent: the settle that writes them must come back before.
    recorded: Vec<Position>,
    /// The attempts that this owner has recorded, by number. A delivery that is still shown to be at one of them was not ended by a crash.
    own_attempts: HashMap<Position, u32>,
}

/// What the owner does with a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Works.
    Active,
    /// Finishes what is at the sink, then gives the lane back.
    Releasing,
    /// Finishes what is at the sink, then loads the lane again.
    Reloading,
    /// Waits for an answer of the database.
    Waiting,
    /// Paused by an operator; finishes what is at the sink.
    Paused,
}

/// The key of a chain of deliveries; an event without a key is a chain of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ChainKey {
    Key(KeyHash),
    Alone(Position),
}

/// What is to be written of an event that gets a row in the queue.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) state: State,
    pub(crate) due_at: Timestamp,
    pub(crate) attempts: u32,
    pub(crate) claim: Option<ClaimId>,
    pub(crate) error: Option<AttemptError>,
}

impl Row {
    pub(crate) fn new(state: State, due_at: Timestamp) -> Self {
        Row { state, due_at, attempts: 0, claim: None, error: None }
    }
}

impl ChainKey {
    pub(crate) fn of(key: Option<KeyHash>, position: Position) -> Self {
        key.map_or(ChainKey::Alone(position), ChainKey::Key)
    }
}

impl Lane {
    pub(crate) fn load(
        reference: LaneRef,
        epoch: Epoch,
        state: LaneState,
        on_dead: OnDead,
        mode: Mode,
        quarantine_after: u32,
        window: &Budget,
    ) -> Self {
        let floor = state.cursor.floor;
        let settled_at = |position: Position| position <= floor || state.cursor.settled.contains(position);
        let parked = state.deliveries.iter().map(|delivery| delivery.position).filter(|at| !settled_at(*at)).collect();
        let cursor = LaneCursor::load(state.cursor);
        let keys = || state.queued_keys.iter().map(|key| KeyHash::of(key)).collect();
        Lane {
            reference,
            epoch,
            revision: state.revision,
            definition: state.definition.number,
            phase: Phase::Active,
            quiet: false,
            overfull: state.dead_heads_left_out && on_dead == OnDead::Block,
            row_keys: (mode == Mode::Queue).then(|| RowKeys::new(keys(), state.queued_keys_left_out)),
            queues: KeyQueues::load(state.deliveries, state.last_arrival, on_dead, cursor.lowest_unread()),
            cursor,
            writes: WriteBuffer::new(floor, window),
            probation: Probation::new(state.takeovers, quarantine_after, mode),
            parked,
            recorded: Vec::new(),
            own_attempts: HashMap::new(),
        }
    }

    /// The lane was loaded now: what is due may be what the last owner died of.
    pub(crate) fn begin_probation(&mut self, now: Timestamp) {
        self.probation.begin(self.queues.first_due(now));
    }

    /// Seized twice without progress: one event at a time, its attempt written first, until some have gone well.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.probation.is_quarantined()
    }

    /// An attempt was under way when the last owner died.
    pub(crate) fn quarantine(&mut self) {
        self.probation.quarantine();
    }

    // --- reading ---

    /// An event of this lane is handed on.
    pub(crate) fn admit(&mut self, position: Position) {
        self.writes.admit(1);
        self.probation.admit(position);
        self.cursor.admit(position);
    }

    /// An event is settled: delivered, or moved to the delivery table by the same write.
    pub(crate) fn done(&mut self, position: Position, id: Uuid) {
        if self.cursor.settle(position, id) {
            self.writes.note_done();
            self.probation.settle(position);
        }
    }

    /// A poll was answered.
    pub(crate) fn note_poll(&mut self, horizon: Position) {
        if self.cursor.is_asked() && self.cursor.bound() == Position::MAX {
            self.queues.note_read(self.cursor.top());
        }
        self.probation.note_poll(self.cursor.is_read(horizon));
    }

    /// Everything up to the horizon is read, settled and written, but for the floor.
    pub(crate) fn is_done(&self, horizon: Position) -> bool {
        self.cursor.is_done(horizon) && !self.has_writes()
    }

    // --- deliveries ---

    /// Whether an event that is read again was in the delivery table already when the lane was loaded.
    pub(crate) fn was_parked(&mut self, position: Position) -> bool {
        !self.parked.is_empty() && self.parked.remove(&position)
    }

    /// Whether the key has deliveries, so that its events have to go behind them.
    pub(crate) fn has_chain(&self, chain: ChainKey) -> bool {
        let queued = |keys: &RowKeys| matches!(chain, ChainKey::Key(key) if keys.may_have(key));
        self.queues.has_chain(chain) || self.row_keys.as_ref().is_some_and(queued)
    }

    /// Whether it is not known yet which keys have rows.
    pub(crate) fn has_unknown_keys(&self) -> bool {
        self.row_keys.as_ref().is_some_and(RowKeys::is_unknown)
    }

    /// A look begins which keys of a queue have rows, under this number. What is `unwritten` may escape that look, and so may
    /// whatever is given a row while it lasts.
    pub(crate) fn begin_look(&mut self, number: u64, unwritten: impl Iterator<Item = KeyHash>) {
        let queued = self.writes.queued();
        looked_at(queued.len());
        let written_later = queued.iter().filter_map(|queued| queued.delivery.key_hash());
        if let Some(keys) = &mut self.row_keys {
            keys.begin_look(number, unwritten.chain(written_later));
        }
    }

    /// The look of this number is over, and has found these keys.
    pub(crate) fn end_look(&mut self, number: u64, found: HashSet<KeyHash>) {
        if let Some(keys) = &mut self.row_keys {
            keys.end_look(number, found);
        }
    }

    /// Gives an event a row in the queue.
    pub(crate) fn spill(&mut self, event: &Event, row: Row, now: Timestamp) {
        let Row { state, due_at, attempts, claim, error } = row;
        let delivery = DeliveryRow {
            position: event.position,
            key: event.key.clone(),
            arrival: 0,
            state,
            attempts,
            due_at,
            since: now,
        };
        self.probation.note_success();
        self.writes.enqueue(Queued { delivery, claim, error });
        if let (Some(keys), Some(key)) = (&mut self.row_keys, event.key_hash()) {
            keys.insert(key);
        }
        self.done(event.position, event.id);
    }

    /// Moves an event behind its key's failing head.
    pub(crate) fn enqueue(&mut self, event: &Event, now: Timestamp) {
        if self.row_keys.is_some() {
            return self.spill(event, Row::new(State::Pending, now), now);
        }
        let row = self.queues.delivery(event, State::Pending, now, now);
        self.writes.put(row.clone());
        self.queues.append(row);
        self.done(event.position, event.id);
    }

    /// Moves an event aside until it is due.
    pub(crate) fn delay(&mut self, event: &Event, until: Timestamp, now: Timestamp) {
        if self.row_keys.is_some() {
            return self.spill(event, Row::new(State::Delayed, until), now);
        }
        let row = self.queues.delivery(event, State::Delayed, until, now);
        self.writes.put(row.clone());
        self.queues.keep_delayed(row);
        self.done(event.position, event.id);
    }

    /// Moves an event that failed on the fast path to the delivery table, as the head of its key.
    pub(crate) fn park(&mut self, event: &Event, failed: Failed, now: Timestamp, on_dead: OnDead) {
        if self.row_keys.is_some() {
            let Failed { state, attempts, due_at, error } = failed;
            return self.spill(event, Row { state, due_at, attempts, claim: None, error: Some(error) }, now);
        }
        let mut row = self.queues.delivery(event, failed.state, failed.due_at, now);
        row.attempts = failed.attempts;
        self.writes.put(row.clone());
        self.writes.change(row.clone(), Some(failed.error));
        if holds_its_place(failed.state, row.key.is_some(), on_dead) {
            self.queues.append(row);
        }
        self.done(event.position, event.id);
    }

    /// A delayed row that is due goes behind what its key has waiting now.
    pub(crate) fn promote(&mut self, row: DeliveryRow) {
        let row = self.queues.promote(row);
        self.writes.change(row, None);
    }

    /// Marks deliveries as on their way that are due and that `free` allows: at most `limit`, and one in quarantine. They enter the
    /// window.
    pub(crate) fn take_due(
        &mut self,
        now: Timestamp,
        limit: usize,
        free: impl Fn(ChainKey) -> bool,
    ) -> Vec<(Position, Option<KeyHash>)> {
        let due = self.queues.take_due(now, limit, self.probation.is_quarantined(), free);
        self.writes.admit(due.len());
        due
    }

    /// Writes down that an attempt is about to begin.
    pub(crate) fn record_attempt(&mut self, position: Position, key: Option<KeyHash>) {
        let recorded = self.queues.change_row(key, position, |row| {
            row.state = State::Processing;
            row.attempts += 1;
        });
        if let Some(row) = recorded {
            self.own_attempts.insert(position, row.attempts);
            self.writes.change(row, None);
            self.recorded.push(position);
        }
    }

    /// See the field.
    pub(crate) fn own_attempts(&self) -> impl Iterator<Item = (Position, u32)> {
        self.own_attempts.iter().map(|(position, attempt)| (*position, *attempt))
    }

    /// An attempt that was recorded and not made does not count.
    pub(crate) fn cancel_attempt(&mut self, position: Position, key: Option<KeyHash>) {
        if self.queues.row(key, position).is_none_or(|row| row.state != State::Processing) {
            return;
        }
        let cancelled = self.queues.change_row(key, position, |row| {
            row.attempts -= 1;
            row.state = if row.attempts > 0 { State::Retrying } else { State::Pending };
        });
        cancelled.into_iter().for_each(|row| self.writes.change(row, None));
        self.recorded.retain(|recorded| *recorded != position);
    }

    /// A delivery succeeded.
    pub(crate) fn succeed(&mut self, position: Position, key: Option<KeyHash>) {
        self.writes.note_done();
        self.probation.note_return(position);
        self.writes.finish(position);
        self.queues.remove(position, key);
        self.probation.note_success();
    }

    /// A delivery that was on its way failed again.
    pub(crate) fn fail(&mut self, position: Position, key: Option<KeyHash>, failed: Failed, on_dead: OnDead) {
        self.writes.note_done();
        self.end_attempt(position, key, failed, on_dead);
    }

    /// An attempt that was under way when the last owner died has failed: it is in no window.
    pub(crate) fn fail_interrupted(&mut self, row: &DeliveryRow, failed: Failed, on_dead: OnDead) {
        self.end_attempt(row.position, row.key_hash(), failed, on_dead);
    }

    fn end_attempt(&mut self, position: Position, key: Option<KeyHash>, failed: Failed, on_dead: OnDead) {
        self.probation.note_return(position);
        let row = self.queues.change_row(key, position, |row| {
            row.state = failed.state;
            row.attempts = failed.attempts;
            row.due_at = failed.due_at;
        });
        let Some(row) = row else { return };
        self.writes.change(row, Some(failed.error));
        if holds_its_place(failed.state, key.is_some(), on_dead) {
            self.queues.unclaim(position, key);
        } else {
            self.queues.remove(position, key);
        }
    }

    /// A delivery comes back untried: it leaves the window and waits for its turn again.
    pub(crate) fn return_delivery(&mut self, position: Position, key: Option<KeyHash>) {
        self.writes.release();
        self.cancel_attempt(position, key);
        self.queues.unclaim(position, key);
    }

    // --- writing ---

    pub(crate) fn has_writes(&self) -> bool {
        !self.writes.is_empty() || self.probation.resets_takeovers()
    }

    /// Events that are settled and not written as such.
    pub(crate) fn done_unwritten(&self) -> usize {
        self.writes.done()
    }

    /// Whether the floor was not written for so long that it is to be written for its own sake.
    pub(crate) fn has_old_floor(&self, now: Duration, interval: Duration) -> bool {
        self.writes.is_old(self.cursor.floor(), now, interval)
    }

    /// The lane was loaded now, with its floor.
    pub(crate) fn note_loaded(&mut self, now: Duration) {
        self.writes.note_loaded(now);
    }

    /// Takes everything that is to be written, with the room that its events take until it is, and the attempts that may begin then.
    pub(crate) fn take_write(&mut self, ranges_max: usize) -> (LaneWrite, Reservation, Vec<Position>) {
        let mut write = LaneWrite {
            lane: self.reference,
            epoch: self.epoch,
            revision: self.revision,
            cursor: self.cursor.cursor(ranges_max),
            put: Vec::new(),
            queue: Vec::new(),
            change: Vec::new(),
            finish: Vec::new(),
            calm: self.probation.resets_takeovers(),
            release: false,
        };
        let done = self.writes.fill(&mut write);
        (write, done, std::mem::take(&mut self.recorded))
    }

    /// A write of this lane is in the database.
    pub(crate) fn note_written(&mut self, write: &LaneWrite, now: Duration) {
        self.writes.note_written(write.cursor.floor, now);
        if write.calm {
            self.probation.end();
        }
    }

    /// Puts back what could not be written, before anything that came since.
    pub(crate) fn restore_write(&mut self, write: LaneWrite, done: Reservation, recorded: Vec<Position>) {
        self.recorded.splice(..0, recorded);
        self.writes.restore(write, done);
    }
}
