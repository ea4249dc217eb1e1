use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use uuid::Uuid;

use crate::holes::Holes;
use crate::work::looked_at;
use crate::{
    AttemptError, ClaimId, Cursor, DeliveryRow, Epoch, Event, Failed, KeyHash, LaneRef, LaneState, LaneWrite, Mode,
    OnDead, Position, Queued, RangeSet, State, Timestamp,
};

/// What an owner knows of one lane: which positions are settled, and the deliveries of its failing keys.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) reference: LaneRef,
    pub(crate) epoch: Epoch,
    pub(crate) revision: i64,
    /// The number of the definition that it was loaded under: only with that filter may it be read.
    pub(crate) definition: i64,
    pub(crate) phase: Phase,
    /// Everything up to here has been shown to the lane, but for the holes.
    pub(crate) top: Position,
    /// Positions up to `top` that no read has shown yet.
    pub(crate) holes: Holes,
    /// The poll under way was asked for this lane too.
    pub(crate) asked: bool,
    /// The lowest hole that the poll being looked at did not ask for, or [`Position::MAX`].
    pub(crate) bound: Position,
    /// Positions that were handed on and are not settled.
    open: BTreeSet<Position>,
    /// What is settled above the floor, from the first to the last position of each range. Nothing in a range is open or a hole; what
    /// else lies in it is another lane's, not wanted or dead.
    ahead: BTreeMap<Position, Position>,
    /// Settled by the scan that is being looked at, before the holes and the top say what is around them.
    early: Vec<Position>,
    /// Handed on, and neither written as settled nor in a write under way.
    pub(crate) window: usize,
    /// Settled in memory since the last write was built.
    pub(crate) done_unwritten: usize,
    anchor: Option<(Position, Uuid)>,
    /// The floor of the last write, and when it was written.
    pub(crate) written: (Position, Duration),
    chains: HashMap<ChainKey, Chain>,
    /// Heads by due time; an entry may be stale and is checked when it comes up.
    due: BTreeSet<(Timestamp, ChainKey)>,
    delayed: BTreeSet<(Timestamp, Position)>,
    delayed_rows: HashMap<Position, DeliveryRow>,
    /// Until everything up to here has been read again that the owner before had read and not settled, no delayed row takes its place
    /// behind what its key has waiting: not all of that is known.
    pub(crate) reads_again_to: Option<Position>,
    rows: usize,
    /// Chains whose head has failed.
    failing: usize,
    /// The last chain whose head was seen to have failed, and the last that became the longest.
    failing_chain: Option<ChainKey>,
    longest_chain: Option<ChainKey>,
    /// At this time so many heads were due that no delayed row need join them, and none has gone since.
    crowded: Option<Timestamp>,
    /// It has stopped and has dropped what is not at the sink.
    pub(crate) quiet: bool,
    /// Positions that were not settled and have a row in the delivery table, dead ones included: a cursor that was cut at its limit shows
    /// them again.
    parked: HashSet<Position>,
    next_arrival: i64,
    put: Vec<DeliveryRow>,
    queue: Vec<Queued>,
    /// Of a queue: the keys that have rows, or may have.
    queued_keys: Option<HashSet<KeyHash>>,
    /// Every key may have rows: which do is not known yet.
    pub(crate) keys_unknown: bool,
    keys_given: KeysGiven,
    change: Vec<(DeliveryRow, Option<AttemptError>)>,
    finish: Vec<Position>,
    /// Seized twice without progress: one event at a time, its attempt written first, until some have gone well.
    pub(crate) careful: bool,
    careful_left: u32,
    /// Attempts that are written first and not yet sent: the settle that writes them must come back before.
    pub(crate) announced: Vec<Position>,
    /// The attempts that this owner has announced, by number. A delivery that is still shown to be at one of them was not ended by a crash.
    own_attempts: HashMap<Position, u32>,
    /// How often the lane was seized, as it is in the database.
    pub(crate) takeovers: u32,
    /// Not all keys are known that a dead event holds back: nothing is sent and nothing is read.
    pub(crate) overfull: bool,
    trial: Trial,
}

/// What those who were seized may have died of, until this owner has come through it.
#[derive(Debug, Default)]
struct Trial {
    /// The lowest event that this owner has read and not yet settled.
    first: Option<Position>,
    /// What has been due for longest when the lane was loaded, until it comes back from the sink.
    due: Option<Position>,
    /// The lowest event is settled, or there is none.
    passed: bool,
    /// A delivery came back from the sink.
    returned: bool,
    /// A poll that may have begun before the lane was loaded has been answered.
    polled: bool,
}

/// What lies above everything open is written as settled only if it is so long that it is worth a range: the rest is read again.
const TAIL_MIN: Position = 1_000;

/// A careful lane that has delivered this many events goes on at full speed.
const CAREFUL_EVENTS: u32 = 20;

/// A careful lane of a queue that has given this many events a row, more than can have been in memory, handles some from memory again.
const CAREFUL_ROWS: u32 = 20_000;

/// The keys that were given rows since a look for keys with rows began.
#[derive(Debug, Default)]
struct KeysGiven {
    look: Option<u64>,
    keys: HashSet<KeyHash>,
}

/// What the owner does with a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Works.
    Active,
    /// Finishes what is at the sink, then gives the lane back.
    Releasing,
    /// Finishes what is at the sink, then loads the lane anew.
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

/// Lower than or equal to every other, for ranges by time.
const FIRST_CHAIN: ChainKey = ChainKey::Key(KeyHash(0));
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

/// Whether a delivery stays in its chain: a dead one does if it holds others of its key back.
fn holds_its_place(state: State, has_key: bool, on_dead: OnDead) -> bool {
    state != State::Dead || (has_key && on_dead == OnDead::Block)
}

impl ChainKey {
    pub(crate) fn of(key: Option<KeyHash>, position: Position) -> Self {
        key.map_or(ChainKey::Alone(position), ChainKey::Key)
    }
}

#[derive(Debug, Default)]
struct Chain {
    rows: VecDeque<DeliveryRow>,
    /// How many rows from the head are on their way to the sink.
    busy: usize,
}

impl Chain {
    fn is_failing(&self) -> bool {
        self.rows.front().is_some_and(|head| head.attempts > 0 || head.state == State::Dead)
    }
}

impl Lane {
    pub(crate) fn load(
        reference: LaneRef,
        epoch: Epoch,
        state: LaneState,
        on_dead: OnDead,
        mode: Mode,
        careful_after: u32,
    ) -> Self {
        let Cursor { floor, settled, anchor } = state.cursor;
        let top = settled.last().unwrap_or(floor).max(floor);
        let settled_at = |position: Position| position <= floor || settled.contains(position);
        let mut lane = Lane {
            reference,
            epoch,
            revision: state.revision,
            definition: state.definition.number,
            phase: Phase::Active,
            top,
            holes: settled.missing(floor + 1, top).into(),
            asked: false,
            bound: Position::MAX,
            open: BTreeSet::new(),
            ahead: settled.iter().map(|range| (*range.start(), *range.end())).filter(|range| range.1 > floor).collect(),
            early: Vec::new(),
            window: 0,
            done_unwritten: 0,
            anchor,
            written: (floor, Duration::ZERO),
            chains: HashMap::new(),
            due: BTreeSet::new(),
            delayed: BTreeSet::new(),
            delayed_rows: HashMap::new(),
            reads_again_to: None,
            rows: 0,
            failing: 0,
            failing_chain: None,
            longest_chain: None,
            crowded: None,
            quiet: false,
            parked: state.deliveries.iter().map(|delivery| delivery.position).filter(|at| !settled_at(*at)).collect(),
            next_arrival: state.last_arrival + 1,
            put: Vec::new(),
            queue: Vec::new(),
            queued_keys: (mode == Mode::Queue).then(|| state.queued_keys.iter().map(|key| KeyHash::of(key)).collect()),
            keys_unknown: state.queued_keys_left_out,
            keys_given: KeysGiven::default(),
            change: Vec::new(),
            finish: Vec::new(),
            careful: state.takeovers >= careful_after,
            careful_left: if mode == Mode::Queue { CAREFUL_ROWS } else { CAREFUL_EVENTS },
            announced: Vec::new(),
            own_attempts: HashMap::new(),
            takeovers: state.takeovers,
            overfull: state.dead_heads_left_out && on_dead == OnDead::Block,
            trial: Trial::default(),
        };
        for delivery in state.deliveries {
            lane.next_arrival = lane.next_arrival.max(delivery.arrival + 1);
            if delivery.state == State::Delayed {
                lane.keep_delayed(delivery);
            } else if holds_its_place(delivery.state, delivery.key.is_some(), on_dead) {
                lane.append(delivery);
            }
        }
        let lowest = lane.holes.first().unwrap_or(lane.top + 1);
        lane.reads_again_to = lane.delayed_rows.keys().max().copied().filter(|highest| lowest < *highest);
        lane
    }

    // --- the cursor ---

    /// An event of this lane is handed on.
    pub(crate) fn admit(&mut self, position: Position) {
        self.window += 1;
        self.trial.first = Some(self.trial.first.map_or(position, |first| first.min(position)));
        self.open.insert(position);
    }

    /// An event is settled: delivered, or moved to the delivery table by the same write.
    pub(crate) fn done(&mut self, position: Position, id: Uuid) {
        if !self.open.remove(&position) {
            return;
        }
        self.done_unwritten += 1;
        self.trial.passed |= self.trial.first == Some(position);
        if self.anchor.is_none_or(|anchor| anchor.0 < position) {
            self.anchor = Some((position, id));
        }
        if position > self.top || (!self.holes.is_empty() && self.holes.contains(position)) {
            self.early.push(position);
        } else {
            self.pass(position);
        }
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

    /// What is due now may be what the last owner died of.
    pub(crate) fn begin_trial(&mut self, now: Timestamp) {
        let first = self.due.first().filter(|entry| entry.0 <= now);
        let chain = first.and_then(|entry| self.chains.get(&entry.1));
        self.trial.due = chain.and_then(|chain| chain.rows.front()).map(|row| row.position);
        self.trial.returned = false;
    }

    /// A poll was answered. Where nothing is left up to the horizon, nobody dies of it.
    pub(crate) fn note_poll(&mut self, horizon: Position) {
        let all_shown = self.asked && self.bound == Position::MAX;
        self.reads_again_to = self.reads_again_to.filter(|&to| !all_shown || self.top < to);
        let nothing = self.trial.first.is_none() && self.holes.is_empty() && self.top >= horizon;
        self.trial.passed |= self.trial.polled && nothing;
        self.trial.polled = true;
    }

    /// Whether this owner has come through what those before it may have died of. The lowest event and what was due first will do:
    /// whatever is left has moved up by one for the next owner. In a careful lane every attempt is counted before it begins: there it
    /// will do that something was parked or came back.
    fn is_calm(&self) -> bool {
        let Trial { due, passed, returned, .. } = self.trial;
        if self.careful { passed || returned } else { passed && due.is_none() }
    }

    fn came_back(&mut self, position: Position) {
        self.trial.returned = true;
        self.trial.due.take_if(|due| *due == position);
    }

    /// Everything up to the horizon is read, settled and written, but for the floor.
    pub(crate) fn is_done(&self, horizon: Position) -> bool {
        self.top >= horizon && self.holes.is_empty() && self.open.is_empty() && !self.has_writes()
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

    // --- deliveries ---

    /// Whether an event that is read again was in the delivery table already when the lane was loaded.
    pub(crate) fn was_parked(&mut self, position: Position) -> bool {
        !self.parked.is_empty() && self.parked.remove(&position)
    }

    /// Whether the key has deliveries, so that its events have to go behind them.
    pub(crate) fn has_chain(&self, chain: ChainKey) -> bool {
        let queued =
            |keys: &HashSet<KeyHash>| matches!(chain, ChainKey::Key(key) if self.keys_unknown || keys.contains(&key));
        (!self.chains.is_empty() && self.chains.contains_key(&chain)) || self.queued_keys.as_ref().is_some_and(queued)
    }

    /// Somebody begins to look which keys of a queue have rows, under this number. What is `unwritten` may escape that look, and so may
    /// whatever is given a row while it lasts.
    pub(crate) fn begin_look(&mut self, number: u64, unwritten: impl Iterator<Item = KeyHash>) {
        looked_at(self.queue.len());
        let written_later = self.queue.iter().filter_map(|queued| queued.delivery.key_hash());
        self.keys_given = KeysGiven { look: Some(number), keys: unwritten.chain(written_later).collect() };
    }

    /// The look of this number is over: these are the only keys that have rows, besides those that were given some meanwhile. Says
    /// nothing to a lane that was loaded after the look had begun.
    pub(crate) fn end_look(&mut self, number: u64, mut found: HashSet<KeyHash>) {
        if self.keys_given.look == Some(number) {
            looked_at(self.keys_given.keys.len());
            found.extend(&self.keys_given.keys);
            self.queued_keys = Some(found);
            self.keys_unknown = false;
        }
    }

    /// Gives an event a row in the queue.
    pub(crate) fn give_row(&mut self, event: &Event, row: Row, now: Timestamp) {
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
        self.careful_left = self.careful_left.saturating_sub(1);
        self.careful &= self.careful_left > 0;
        self.queue.push(Queued { delivery, claim, error });
        if let (Some(keys), Some(key)) = (&mut self.queued_keys, event.key_hash()) {
            keys.insert(key);
            if self.keys_given.look.is_some() {
                self.keys_given.keys.insert(key);
            }
        }
        self.done(event.position, event.id);
    }

    /// Failing keys.
    pub(crate) fn chains(&self) -> usize {
        self.chains.len()
    }

    /// Keys whose head is due, counted up to `most`.
    pub(crate) fn runnable(&self, now: Timestamp, most: usize) -> usize {
        let next = (Timestamp(now.0 + 1), FIRST_CHAIN);
        let count = self.due.range(..next).take(most).count();
        looked_at(count);
        count
    }

    /// Keys whose head has failed.
    pub(crate) fn failing(&self) -> usize {
        self.failing
    }

    /// The head of a key that is failing, if one is.
    pub(crate) fn failing_head(&mut self) -> Option<&DeliveryRow> {
        if self.failing == 0 {
            return None;
        }
        let is_failing = |key: &ChainKey| self.chains.get(key).is_some_and(Chain::is_failing);
        if !self.failing_chain.as_ref().is_some_and(is_failing) {
            looked_at(self.chains.len());
            self.failing_chain = self.chains.iter().find(|entry| entry.1.is_failing()).map(|entry| *entry.0);
        }
        self.chains.get(&self.failing_chain?)?.rows.front()
    }

    /// How many deliveries wait behind the head of a long chain, and that head. It was the longest when a row was last added to it.
    pub(crate) fn longest_chain(&self) -> Option<(usize, &DeliveryRow)> {
        let chain = self.chains.get(&self.longest_chain?)?;
        Some((chain.rows.len() - 1, chain.rows.front()?))
    }

    /// Changes the chain of a key; one that is empty afterwards is none any more.
    fn change_chain<R>(&mut self, key: ChainKey, change: impl FnOnce(&mut Chain) -> R) -> Option<R> {
        let chain = self.chains.get_mut(&key)?;
        self.failing -= usize::from(chain.is_failing());
        let result = change(chain);
        self.failing += usize::from(chain.is_failing());
        if chain.is_failing() {
            self.failing_chain = Some(key);
        }
        if chain.rows.is_empty() {
            self.chains.remove(&key);
        }
        Some(result)
    }

    /// Changes the row of a delivery in its chain; what it is now.
    fn change_row(
        &mut self,
        key: Option<KeyHash>,
        position: Position,
        change: impl FnOnce(&mut DeliveryRow),
    ) -> Option<DeliveryRow> {
        let changed = self.change_chain(ChainKey::of(key, position), |chain| {
            let row = chain.rows.iter_mut().find(|row| row.position == position)?;
            change(row);
            Some(row.clone())
        });
        changed.flatten()
    }

    /// Deliveries in chains.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    fn append(&mut self, delivery: DeliveryRow) {
        let chain = ChainKey::of(delivery.key_hash(), delivery.position);
        self.rows += 1;
        self.chains.entry(chain).or_default();
        let count = self.change_chain(chain, |chain| {
            chain.rows.push_back(delivery);
            chain.rows.len()
        });
        if count == Some(1) {
            self.schedule(chain);
        }
        let longest = self.longest_chain.and_then(|key| self.chains.get(&key)).map_or(0, |chain| chain.rows.len());
        if count.is_some_and(|count| count > longest) {
            self.longest_chain = Some(chain);
        }
    }

    fn schedule(&mut self, chain: ChainKey) {
        let Some(entry) = self.chains.get(&chain) else { return };
        let head = entry.rows.front().filter(|head| entry.busy == 0 && head.state != State::Dead);
        if let Some(head) = head {
            self.due.insert((head.due_at, chain));
        }
    }

    fn delivery(&mut self, event: &Event, state: State, due_at: Timestamp, now: Timestamp) -> DeliveryRow {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        DeliveryRow {
            position: event.position,
            key: event.key.clone(),
            arrival,
            state,
            attempts: 0,
            due_at,
            since: now,
        }
    }

    /// Moves an event behind its key's failing head.
    pub(crate) fn enqueue(&mut self, event: &Event, now: Timestamp) {
        if self.queued_keys.is_some() {
            return self.give_row(event, Row::new(State::Pending, now), now);
        }
        let row = self.delivery(event, State::Pending, now, now);
        self.put.push(row.clone());
        self.append(row);
        self.done(event.position, event.id);
    }

    /// Moves an event aside until it is due.
    pub(crate) fn delay(&mut self, event: &Event, until: Timestamp, now: Timestamp) {
        if self.queued_keys.is_some() {
            return self.give_row(event, Row::new(State::Delayed, until), now);
        }
        let row = self.delivery(event, State::Delayed, until, now);
        self.put.push(row.clone());
        self.keep_delayed(row);
        self.done(event.position, event.id);
    }

    /// Moves an event that failed on the fast path to the delivery table, as the head of its key.
    pub(crate) fn park(&mut self, event: &Event, failed: Failed, now: Timestamp, on_dead: OnDead) {
        if self.queued_keys.is_some() {
            let Failed { state, attempts, due_at, error } = failed;
            return self.give_row(event, Row { state, due_at, attempts, claim: None, error: Some(error) }, now);
        }
        let mut row = self.delivery(event, failed.state, failed.due_at, now);
        row.attempts = failed.attempts;
        self.put.push(row.clone());
        self.change.push((row.clone(), Some(failed.error)));
        if holds_its_place(failed.state, row.key.is_some(), on_dead) {
            self.append(row);
        }
        self.done(event.position, event.id);
    }

    /// Takes out delayed rows that are due, so many that no more than `most` heads are due with them; each goes back in by
    /// [`Lane::promote`].
    pub(crate) fn take_delayed(&mut self, now: Timestamp, most: usize) -> Vec<DeliveryRow> {
        let mut rows = Vec::new();
        let crowded = self.crowded.is_some_and(|at| at <= now);
        if crowded || self.reads_again_to.is_some() || self.delayed.first().is_none_or(|entry| entry.0 > now) {
            return rows;
        }
        let limit = most - self.runnable(now, most);
        self.crowded = (limit == 0).then_some(now);
        while let Some(entry) = self.delayed.first().copied().filter(|entry| entry.0 <= now && rows.len() < limit) {
            self.delayed.remove(&entry);
            rows.extend(self.delayed_rows.remove(&entry.1));
        }
        rows
    }

    /// A delayed row that was taken out stays where it was.
    pub(crate) fn keep_delayed(&mut self, row: DeliveryRow) {
        self.delayed.insert((row.due_at, row.position));
        self.delayed_rows.insert(row.position, row);
    }

    /// A delayed row that is due goes behind what its key has waiting now.
    pub(crate) fn promote(&mut self, mut row: DeliveryRow) {
        row.state = State::Pending;
        row.arrival = self.next_arrival;
        self.next_arrival += 1;
        self.change.push((row.clone(), None));
        self.append(row);
    }

    /// When [`Lane::take_delayed`] or [`Lane::take_due`] has something to do.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        [self.due.first().map(|entry| entry.0), self.delayed.first().map(|entry| entry.0)].into_iter().flatten().min()
    }

    /// When more becomes due than is now.
    pub(crate) fn next_due_after(&self, now: Timestamp) -> Option<Timestamp> {
        let first = (Timestamp(now.0 + 1), FIRST_CHAIN);
        let due = self.due.range(first..).next().map(|entry| entry.0);
        let delayed = self.delayed.range((first.0, Position::MIN)..).next().map(|entry| entry.0);
        [due, delayed].into_iter().flatten().min()
    }

    /// Chains whose head is due and that `free` allows: up to `limit` rows each from the head on are marked as on their way.
    /// A chain that is not free stays scheduled.
    pub(crate) fn take_due(
        &mut self,
        now: Timestamp,
        limit: usize,
        free: impl Fn(ChainKey) -> bool,
    ) -> Vec<(Position, Option<KeyHash>)> {
        let mut positions = Vec::new();
        let mut held = Vec::new();
        while let Some(entry) = self.due.first().copied().filter(|entry| entry.0 <= now) {
            if positions.len() >= limit || (self.careful && !positions.is_empty()) {
                break;
            }
            self.due.remove(&entry);
            let careful = self.careful;
            let Some(chain) = self.chains.get_mut(&entry.1) else {
                self.crowded = None;
                continue;
            };
            let stale = chain.busy > 0
                || chain.rows.front().is_none_or(|head| head.due_at != entry.0 || head.state == State::Dead);
            if stale {
                self.crowded = None;
                continue;
            }
            if !free(entry.1) {
                held.push(entry);
                continue;
            }
            self.crowded = None;
            let ready = |row: &&DeliveryRow| row.due_at <= now && row.state != State::Dead;
            let length = if careful { 1 } else { limit - positions.len() };
            positions
                .extend(chain.rows.iter().take(length).take_while(ready).map(|row| (row.position, row.key_hash())));
            chain.busy = chain.rows.iter().take(length).take_while(ready).count();
        }
        self.due.extend(held);
        positions
    }

    /// The row of a delivery in its chain.
    pub(crate) fn row(&self, key: Option<KeyHash>, position: Position) -> Option<&DeliveryRow> {
        self.chains.get(&ChainKey::of(key, position))?.rows.iter().find(|row| row.position == position)
    }

    /// Whether a delivery is the first of its key.
    pub(crate) fn is_head(&self, key: KeyHash, position: Position) -> bool {
        let chain = self.chains.get(&ChainKey::Key(key));
        chain.and_then(|chain| chain.rows.front()).is_some_and(|head| head.position == position)
    }

    /// Writes down that an attempt is about to begin.
    pub(crate) fn announce(&mut self, position: Position, key: Option<KeyHash>) {
        let announced = self.change_row(key, position, |row| {
            row.state = State::Processing;
            row.attempts += 1;
        });
        if let Some(row) = announced {
            self.own_attempts.insert(position, row.attempts);
            self.change.push((row, None));
            self.announced.push(position);
        }
    }

    /// See the field.
    pub(crate) fn own_attempts(&self) -> impl Iterator<Item = (Position, u32)> {
        self.own_attempts.iter().map(|(position, attempt)| (*position, *attempt))
    }

    /// An attempt that was announced and not made does not count.
    pub(crate) fn withdraw(&mut self, position: Position, key: Option<KeyHash>) {
        if self.row(key, position).is_none_or(|row| row.state != State::Processing) {
            return;
        }
        let withdrawn = self.change_row(key, position, |row| {
            row.attempts -= 1;
            row.state = if row.attempts > 0 { State::Retrying } else { State::Pending };
        });
        self.change.extend(withdrawn.map(|row| (row, None)));
        self.announced.retain(|announced| *announced != position);
    }

    /// A delivery succeeded.
    pub(crate) fn succeed(&mut self, position: Position, key: Option<KeyHash>) {
        self.came_back(position);
        self.finish.push(position);
        self.remove(position, key);
        self.careful_left = self.careful_left.saturating_sub(1);
        self.careful &= self.careful_left > 0;
    }

    fn remove(&mut self, position: Position, key: Option<KeyHash>) {
        let chain_key = ChainKey::of(key, position);
        let removed = self.change_chain(chain_key, |chain| {
            let index = chain.rows.iter().position(|row| row.position == position)?;
            chain.rows.remove(index);
            chain.busy -= usize::from(index < chain.busy);
            Some(())
        });
        if removed.flatten().is_some() {
            self.rows -= 1;
            self.crowded = None;
            self.schedule(chain_key);
        }
    }

    /// A delivery failed again.
    pub(crate) fn fail(&mut self, position: Position, key: Option<KeyHash>, failed: Failed, on_dead: OnDead) {
        self.came_back(position);
        let row = self.change_row(key, position, |row| {
            row.state = failed.state;
            row.attempts = failed.attempts;
            row.due_at = failed.due_at;
        });
        let Some(row) = row else { return };
        self.change.push((row, Some(failed.error)));
        if holds_its_place(failed.state, key.is_some(), on_dead) {
            self.unclaim(position, key);
        } else {
            self.remove(position, key);
        }
    }

    /// A delivery comes back untried: it leaves the window (by as many as returned) and waits for its turn again.
    pub(crate) fn give_back(&mut self, position: Position, key: Option<KeyHash>) -> usize {
        self.window -= 1;
        self.withdraw(position, key);
        self.unclaim(position, key);
        1
    }

    /// A delivery comes back from its way to the sink, whatever became of it. The rows behind it stay claimed until
    /// they come back themselves; the chain is scheduled when none is left.
    pub(crate) fn unclaim(&mut self, position: Position, key: Option<KeyHash>) {
        let chain_key = ChainKey::of(key, position);
        let Some(chain) = self.chains.get_mut(&chain_key) else { return };
        chain.busy = chain.busy.saturating_sub(1);
        if chain.busy == 0 {
            self.schedule(chain_key);
        }
    }

    /// Attempts that were under way when the last owner died: each counts as failed.
    pub(crate) fn interrupted(&self) -> Vec<DeliveryRow> {
        looked_at(self.rows);
        let rows = self.chains.values().flat_map(|chain| &chain.rows).filter(|row| row.state == State::Processing);
        let mut rows: Vec<DeliveryRow> = rows.cloned().collect();
        rows.sort_by_key(|row| row.position);
        rows
    }

    // --- writing ---

    pub(crate) fn has_writes(&self) -> bool {
        self.done_unwritten > 0
            || (self.takeovers > 0 && self.is_calm())
            || !self.queue.is_empty()
            || !self.put.is_empty()
            || !self.change.is_empty()
            || !self.finish.is_empty()
    }

    /// Takes everything that is to be written.
    pub(crate) fn take_write(&mut self, ranges_max: usize) -> (LaneWrite, usize) {
        let write = LaneWrite {
            lane: self.reference,
            epoch: self.epoch,
            revision: self.revision,
            cursor: self.cursor(ranges_max),
            put: std::mem::take(&mut self.put),
            queue: std::mem::take(&mut self.queue),
            change: std::mem::take(&mut self.change),
            finish: std::mem::take(&mut self.finish),
            calm: self.takeovers > 0 && self.is_calm(),
            release: false,
        };
        let done = std::mem::take(&mut self.done_unwritten);
        self.window -= done;
        (write, done)
    }

    /// Puts back what could not be written, before anything that came since.
    pub(crate) fn restore_write(&mut self, mut write: LaneWrite, done: usize) {
        write.put.append(&mut self.put);
        write.queue.append(&mut self.queue);
        write.change.append(&mut self.change);
        write.finish.append(&mut self.finish);
        (self.put, self.queue) = (write.put, write.queue);
        (self.change, self.finish) = (write.change, write.finish);
        self.done_unwritten += done;
        self.window += done;
    }
}

#[cfg(test)]
mod tests {

    use proptest::prelude::*;

    use super::*;
    use crate::SubscriptionId;

    fn lane(cursor: Cursor) -> Lane {
        let reference = LaneRef { subscription: SubscriptionId(1), lane: 0 };
        let state = LaneState { cursor, ..LaneState::default() };
        Lane::load(reference, 1, state, OnDead::Block, Mode::Stream, 2)
    }

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
    fn show(lane: &mut Lane, kinds: &[Kind]) {
        for (index, kind) in kinds.iter().enumerate() {
            let position = index as Position + 1;
            match kind {
                Kind::Open => lane.admit(position),
                Kind::Done => {
                    lane.admit(position);
                    lane.done(position, Uuid::nil());
                }
                Kind::Hole | Kind::Other => {}
            }
        }
        lane.top = kinds.len() as Position;
        let holes = kinds.iter().enumerate().filter(|(_, kind)| **kind == Kind::Hole);
        let holes: RangeSet = holes.map(|(index, _)| index as Position + 1..=index as Position + 1).collect();
        lane.scanned(holes.into(), &RangeSet::new());
    }

    fn close(lane: &mut Lane, closed: &RangeSet) {
        let mut holes = RangeSet::clone(&lane.holes);
        holes.subtract(closed);
        lane.scanned(holes.into(), closed);
    }

    /// What is the lane's own and done is settled, what is open or a hole is not, and whatever the cursor leaves out is asked for again.
    fn check_cursor(lane: &Lane, kinds: &[Kind]) {
        let cursor = lane.cursor(1000);
        let again = self::lane(cursor.clone());
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
            let mut lane = lane(Cursor::default());
            show(&mut lane, &kinds);
            check_cursor(&lane, &kinds);
            for (index, step, length) in steps {
                let index = index.index(kinds.len());
                if kinds[index] == Kind::Open {
                    lane.done(index as Position + 1, Uuid::nil());
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
                        lane.done(position, Uuid::nil());
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
            let mut lane = lane(Cursor::default());
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
        let mut lane = lane(Cursor::default());
        lane.holes = RangeSet::from_iter([5..=5]).into();
        lane.top = 5 + TAIL_MIN - 1;
        assert_eq!(lane.cursor(10).settled, RangeSet::new());
        lane.top = 5 + TAIL_MIN;
        let cursor = lane.cursor(10);
        assert_eq!((cursor.floor, cursor.settled.to_string()), (4, format!("6-{}", lane.top)));
        assert_eq!(self::lane(cursor).top, lane.top);
    }
}
