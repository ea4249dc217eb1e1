use std::collections::{BTreeSet, HashMap, VecDeque};

use super::ChainKey;
use crate::work::looked_at;
use crate::{DeliveryRow, Event, KeyHash, OnDead, Position, State, Timestamp};

/// The deliveries of a lane: a queue for each key that has some, and those that are delayed.
#[derive(Debug)]
pub(crate) struct KeyQueues {
    chains: HashMap<ChainKey, Chain>,
    /// Heads by due time; an entry may be stale and is checked when it comes up.
    due: BTreeSet<(Timestamp, ChainKey)>,
    delayed: BTreeSet<(Timestamp, Position)>,
    delayed_rows: HashMap<Position, DeliveryRow>,
    /// Until everything up to here has been read again that the owner before had read and not settled, no delayed row takes its place
    /// behind what its key has waiting: not all of that is known.
    reads_again_to: Option<Position>,
    /// Deliveries in chains.
    rows: usize,
    /// Chains whose head has failed.
    failing: usize,
    /// The last chain whose head was seen to have failed, and the last that became the longest.
    failing_chain: Option<ChainKey>,
    longest_chain: Option<ChainKey>,
    /// At this time so many heads were due that no delayed row need join them, and none has gone since.
    crowded: Option<Timestamp>,
    next_arrival: i64,
}

/// Lower than or equal to every other, for ranges by time.
const FIRST_CHAIN: ChainKey = ChainKey::Key(KeyHash(0));

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

/// Whether a delivery stays in its chain: a dead one does if it holds others of its key back.
pub(super) fn holds_its_place(state: State, has_key: bool, on_dead: OnDead) -> bool {
    state != State::Dead || (has_key && on_dead == OnDead::Block)
}

impl KeyQueues {
    /// As they were written. The lane is read from `lowest_unread` on.
    pub(super) fn load(
        deliveries: Vec<DeliveryRow>,
        last_arrival: i64,
        on_dead: OnDead,
        lowest_unread: Position,
    ) -> Self {
        let mut queues = KeyQueues {
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
            next_arrival: last_arrival + 1,
        };
        for delivery in deliveries {
            queues.next_arrival = queues.next_arrival.max(delivery.arrival + 1);
            if delivery.state == State::Delayed {
                queues.keep_delayed(delivery);
            } else if holds_its_place(delivery.state, delivery.key.is_some(), on_dead) {
                queues.append(delivery);
            }
        }
        let highest = queues.delayed_rows.keys().max().copied();
        queues.reads_again_to = highest.filter(|highest| lowest_unread < *highest);
        queues
    }

    /// The lane was shown everything up to here.
    pub(super) fn note_read(&mut self, top: Position) {
        self.reads_again_to.take_if(|to| top >= *to);
    }

    /// For tests of the tests: what was read before is not waited for.
    pub(crate) fn forget_reads(&mut self) {
        self.reads_again_to = None;
    }

    /// Whether the key has deliveries.
    pub(super) fn has_chain(&self, chain: ChainKey) -> bool {
        !self.chains.is_empty() && self.chains.contains_key(&chain)
    }

    /// What has been due for longest.
    pub(super) fn first_due(&self, now: Timestamp) -> Option<Position> {
        let first = self.due.first().filter(|entry| entry.0 <= now);
        let chain = first.and_then(|entry| self.chains.get(&entry.1));
        chain.and_then(|chain| chain.rows.front()).map(|row| row.position)
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
            // The least, so that one seed is one run: a map has no order.
            self.failing_chain = self.chains.iter().filter(|entry| entry.1.is_failing()).map(|entry| *entry.0).min();
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
    pub(super) fn change_row(
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

    /// A delivery goes behind what its key has waiting.
    pub(super) fn append(&mut self, delivery: DeliveryRow) {
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

    /// A new delivery, which is in no chain yet.
    pub(super) fn delivery(&mut self, event: &Event, state: State, due_at: Timestamp, now: Timestamp) -> DeliveryRow {
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

    /// Takes out delayed rows that are due, so many that no more than `most` heads are due with them; each goes back in by
    /// [`KeyQueues::promote`].
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

    /// A delayed row waits for its time.
    pub(crate) fn keep_delayed(&mut self, row: DeliveryRow) {
        self.delayed.insert((row.due_at, row.position));
        self.delayed_rows.insert(row.position, row);
    }

    /// A delayed row that is due goes behind what its key has waiting now; the row as it is then.
    pub(super) fn promote(&mut self, mut row: DeliveryRow) -> DeliveryRow {
        row.state = State::Pending;
        row.arrival = self.next_arrival;
        self.next_arrival += 1;
        self.append(row.clone());
        row
    }

    /// When [`KeyQueues::take_delayed`] or [`KeyQueues::take_due`] has something to do.
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
    pub(super) fn take_due(
        &mut self,
        now: Timestamp,
        limit: usize,
        quarantined: bool,
        free: impl Fn(ChainKey) -> bool,
    ) -> Vec<(Position, Option<KeyHash>)> {
        let mut positions = Vec::new();
        let mut held = Vec::new();
        while let Some(entry) = self.due.first().copied().filter(|entry| entry.0 <= now) {
            if positions.len() >= limit || (quarantined && !positions.is_empty()) {
                break;
            }
            self.due.remove(&entry);
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
            let length = if quarantined { 1 } else { limit - positions.len() };
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

    /// A delivery leaves its chain.
    pub(super) fn remove(&mut self, position: Position, key: Option<KeyHash>) {
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

    /// A delivery comes back from its way to the sink, whatever became of it. The rows behind it stay claimed until
    /// they come back themselves; the chain is scheduled when none is left.
    pub(super) fn unclaim(&mut self, position: Position, key: Option<KeyHash>) {
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
}
