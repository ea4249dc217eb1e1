use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::budget::Reservation;
use crate::work::looked_at;
use crate::{ClaimId, Epoch, Event, KeyHash, Position};

/// Keeps the events of a key in order and lets all other events go at once: at most one batch under way holds a key.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    batch_size: usize,
    workers: usize,
    /// The sink stops a key at its first failure, so a batch may hold several events of it.
    ordered_batch: bool,
    /// The sink works a batch event by event, so few events are spread over all workers.
    one_by_one: bool,
    ready: Line,
    /// An event with a claim may be here that is not at the sink.
    claims: bool,
    /// Keys under way, and what waits behind them.
    keys: HashMap<u64, Busy, BuildHasherDefault<PassThrough>>,
    batches: BTreeMap<BatchId, Vec<Item>>,
    next_batch: BatchId,
    /// How often something came, ended or was freed.
    changes: u64,
    in_flight: usize,
    /// The state of each lane, by its number.
    lanes: Vec<OfLane>,
    /// Keys that are held.
    held: usize,
}

/// How many events of a lane are here, and how many of them at the sink.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct OfLane {
    here: usize,
    at_sink: usize,
}

/// A batch's number within one engine, from 1.
pub type BatchId = u64;

/// Stands for the batch of a key that is held.
const HELD: BatchId = 0;

/// The lane of an event that belongs to no lane any more: it has a row in a queue.
pub(crate) const NO_LANE: u32 = u32::MAX;

/// An event on its way to the sink.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) event: Arc<Event>,
    pub(crate) key: Option<KeyHash>,
    pub(crate) lane: u32,
    pub(crate) epoch: Epoch,
    /// Attempts counted so far.
    pub(crate) attempts: u32,
    /// It has a row in the delivery table, and the lane's owner works it.
    pub(crate) parked: bool,
    /// It has a row in a queue, or gets one, and this instance has claimed it.
    pub(crate) claim: Option<ClaimId>,
    /// The room that it takes, until it is over at the sink.
    pub(crate) room: Reservation,
}

impl Item {
    /// The same once more, to be sent again.
    pub(crate) fn again(&self, room: Reservation) -> Item {
        Item { event: self.event.clone(), room, ..*self }
    }

    /// What tells its key from others; an event without a key is one of its own.
    pub(crate) fn key_id(&self) -> u64 {
        self.key.map_or(self.event.position as u64, |key| key.0)
    }
}

#[derive(Debug)]
struct Busy {
    batch: BatchId,
    waiting: VecDeque<Item>,
    /// Its events at the sink were all asked whether they get a claim.
    claimed: bool,
}

impl Busy {
    fn new(batch: BatchId) -> Self {
        Busy { batch, waiting: VecDeque::new(), claimed: false }
    }
}

impl Dispatcher {
    pub(crate) fn new(workers: usize, batch_size: usize, ordered_batch: bool, one_by_one: bool) -> Self {
        Dispatcher {
            batch_size,
            workers,
            ordered_batch,
            one_by_one,
            ready: Line::default(),
            claims: false,
            keys: HashMap::default(),
            batches: BTreeMap::new(),
            next_batch: 1,
            changes: 0,
            in_flight: 0,
            lanes: Vec::new(),
            held: 0,
        }
    }

    /// An event came in.
    fn came(lanes: &mut Vec<OfLane>, item: &Item) {
        if item.lane == NO_LANE {
            return;
        }
        let number = item.lane as usize;
        if number >= lanes.len() {
            lanes.resize(number + 1, OfLane::default());
        }
        lanes[number].here += 1;
    }

    /// Events that were not at the sink went.
    fn went<'a>(lanes: &mut [OfLane], items: impl IntoIterator<Item = &'a Item>) {
        for item in items {
            lanes.get_mut(item.lane as usize).into_iter().for_each(|lane| lane.here -= 1);
        }
    }

    /// Events that were at the sink are not any more, and went.
    fn left_sink(&mut self, items: &[Item]) {
        self.changes += 1;
        self.in_flight -= items.len();
        for item in items {
            if let Some(lane) = self.lanes.get_mut(item.lane as usize) {
                lane.at_sink -= 1;
                lane.here -= 1;
            }
        }
    }

    /// Differs from before if an event may be fit to be sent that was not.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Events at the sink.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Nothing is at the sink and nothing could be sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.ready.is_empty() && self.keys.values().all(|busy| busy.waiting.is_empty())
    }

    /// Events that could be sent and are not.
    pub(crate) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// Workers that have nothing to do.
    pub(crate) fn idle_workers(&self) -> usize {
        self.workers.saturating_sub(self.batches.len())
    }

    /// Keeps a key that has no event at the sink from being sent, until [`Dispatcher::release_held`].
    pub(crate) fn hold(&mut self, key: KeyHash) {
        self.keys.entry(key.0).or_insert_with(|| {
            self.held += 1;
            Busy::new(HELD)
        });
    }

    /// Whether a key is held.
    pub(crate) fn has_held(&self) -> bool {
        self.held > 0
    }

    /// Lets all held keys go.
    pub(crate) fn release_held(&mut self) {
        let held: Vec<u64> = self.keys.iter().filter(|entry| entry.1.batch == HELD).map(|entry| *entry.0).collect();
        for key in held {
            let waiting = self.release(KeyHash(key));
            self.push_front(waiting.into());
        }
        self.held = 0;
    }

    /// Takes out what is not at the sink and `pick` names; of each key the oldest first.
    pub(crate) fn take(&mut self, pick: impl Fn(&Item) -> bool) -> Vec<Item> {
        let mut taken = Vec::new();
        looked_at(self.keys.len());
        for busy in self.keys.values_mut() {
            let (picked, kept) = std::mem::take(&mut busy.waiting).into_iter().partition(&pick);
            taken.extend::<Vec<Item>>(picked);
            busy.waiting = Vec::into(kept);
        }
        taken.extend(self.ready.take(pick));
        Dispatcher::went(&mut self.lanes, &taken);
        taken
    }

    /// Takes out what is not at the sink and `pick` names among the events of a key; the oldest first.
    pub(crate) fn take_of(&mut self, key: KeyHash, pick: impl Fn(&Item) -> bool) -> Vec<Item> {
        let mut taken = Vec::new();
        // What waits was cut from the line, so it is older than what is in line still.
        if let Some(busy) = self.keys.get_mut(&key.0).filter(|busy| !busy.waiting.is_empty()) {
            looked_at(busy.waiting.len());
            let (picked, kept) = std::mem::take(&mut busy.waiting).into_iter().partition::<Vec<Item>, _>(&pick);
            taken = picked;
            busy.waiting = kept.into();
        }
        taken.extend(self.ready.take_of(key, pick));
        Dispatcher::went(&mut self.lanes, &taken);
        taken
    }

    /// What is at the sink, batch by batch.
    pub(crate) fn running(&self) -> impl Iterator<Item = (BatchId, &[Item])> {
        self.batches.iter().map(|(batch, items)| (*batch, items.as_slice()))
    }

    /// Gives claims to events at the sink, as `claim` says for each; they belong to no lane any more.
    pub(crate) fn claim_running(&mut self, mut claim: impl FnMut(BatchId, &[Item], &Item) -> Option<ClaimId>) {
        looked_at(self.in_flight);
        for (batch, items) in &mut self.batches {
            for index in 0..items.len() {
                if let Some(claim) = claim(*batch, items, &items[index]) {
                    give_claim(&mut self.lanes, &mut items[index], claim);
                }
            }
        }
    }

    /// The same for the events of one key. Each is asked for once.
    pub(crate) fn claim_running_of(&mut self, key: KeyHash, mut claim: impl FnMut(&Item) -> Option<ClaimId>) {
        let Some(busy) = self.keys.get_mut(&key.0).filter(|busy| !busy.claimed) else { return };
        busy.claimed = true;
        let Some(items) = self.batches.get_mut(&busy.batch) else { return };
        looked_at(items.len());
        for item in items.iter_mut().filter(|item| item.key == Some(key)) {
            if let Some(claim) = claim(item) {
                give_claim(&mut self.lanes, item, claim);
            }
        }
    }

    /// The first `count` events of a batch are over, the rest goes on. Their keys stay under way until [`Dispatcher::release`].
    pub(crate) fn finish_first(&mut self, batch: BatchId, count: usize) -> Vec<Item> {
        let Some(items) = self.batches.get_mut(&batch) else { return Vec::new() };
        let rest = items.split_off(count.min(items.len()));
        let mut first = std::mem::replace(items, rest);
        self.left_sink(&first);
        free_room(&mut first);
        first
    }

    /// The key that has most events here that are not at the sink, and how many.
    pub(crate) fn largest_key(&self) -> Option<(KeyHash, usize)> {
        let mut counts: HashMap<KeyHash, usize> = HashMap::new();
        looked_at(self.ready.len() + self.keys.len());
        let waiting = self.keys.values().flat_map(|busy| &busy.waiting);
        for key in self.ready.iter().chain(waiting).filter_map(|item| item.key) {
            *counts.entry(key).or_default() += 1;
        }
        counts.into_iter().max_by_key(|entry| (entry.1, entry.0))
    }

    /// Whether events of this key are at the sink.
    pub(crate) fn is_busy(&self, key: KeyHash) -> bool {
        self.keys.contains_key(&key.0)
    }

    /// Whether events of this key are here, at the sink or not.
    pub(crate) fn has_key(&self, key: KeyHash) -> bool {
        self.is_busy(key) || self.ready.has_key(key)
    }

    /// Whether an event with a claim may be here that is not at the sink.
    pub(crate) fn may_hold_claims(&self) -> bool {
        self.claims
    }

    /// All events with a claim that are not at the sink were taken out.
    pub(crate) fn holds_no_claims(&mut self) {
        self.claims = false;
    }

    /// Takes out everything of a key that is not at the sink, oldest first.
    pub(crate) fn extract(&mut self, key: KeyHash) -> Vec<Item> {
        self.take_of(key, |_| true)
    }

    /// Whether an event that was refused before could be sent and is not.
    pub(crate) fn has_ready_retry(&self) -> bool {
        self.ready.retries > 0
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(crate) fn has_idle_worker(&self) -> bool {
        self.batches.len() < self.workers
    }

    /// The newest of its key. It waits in line even if its key is under way: what waits for a key was cut from the line, so it is
    /// older than anything of that key that is in line.
    pub(crate) fn push(&mut self, item: Item) {
        self.changes += 1;
        self.claims |= item.claim.is_some();
        Dispatcher::came(&mut self.lanes, &item);
        self.ready.push_back(item);
    }

    /// Older than all others of their keys, none of which may be at the sink.
    pub(crate) fn push_front(&mut self, items: Vec<Item>) {
        self.changes += 1;
        self.claims |= items.iter().any(|item| item.claim.is_some());
        items.iter().for_each(|item| Dispatcher::came(&mut self.lanes, item));
        items.into_iter().rev().for_each(|item| self.ready.push_front(item));
    }

    /// Cuts the next batch. An event that `alone` names travels alone, and so does one that cannot be sent.
    pub(crate) fn cut(&mut self, alone: impl Fn(Position) -> bool) -> Option<BatchId> {
        let idle = self.workers.saturating_sub(self.batches.len());
        if idle == 0 || self.ready.is_empty() {
            return None;
        }
        let share = if self.one_by_one { self.ready.len().div_ceil(idle) } else { self.batch_size };
        let size = share.clamp(1, self.batch_size);
        let batch = self.next_batch;
        let mut items = Vec::with_capacity(size.min(self.ready.len()));
        while items.len() < size {
            let Some(item) = self.ready.pop_front() else { break };
            let lonely = item.event.malformed.is_some() || alone(item.event.position);
            if lonely && !items.is_empty() {
                self.ready.push_front(item);
                break;
            }
            items.extend(self.occupy(batch, item));
            if lonely && !items.is_empty() {
                break;
            }
        }
        self.start(items)
    }

    /// Cuts a batch of one event: the first of the least `unfitness`.
    pub(crate) fn cut_probe(&mut self, unfitness: impl Fn(&Item) -> u8) -> Option<BatchId> {
        let mut passed = HashSet::new();
        let mut best: Option<(u8, i64)> = None;
        for (number, item) in self.ready.numbered() {
            looked_at(1);
            let first_of_key = item.key.is_none_or(|key| !self.keys.contains_key(&key.0) && passed.insert(key));
            let least = best.map_or(u8::MAX, |best| best.0);
            if first_of_key && unfitness(item) < least {
                best = Some((unfitness(item), number));
            }
            if best.is_some_and(|best| best.0 == 0) {
                break;
            }
        }
        let item = self.ready.remove(best?.1)?;
        let items = self.occupy(self.next_batch, item).into_iter().collect();
        self.start(items)
    }

    /// Marks the key as under way in this batch; None if the event has to wait for it.
    fn occupy(&mut self, batch: BatchId, item: Item) -> Option<Item> {
        let Some(key) = item.key else { return Some(item) };
        match self.keys.get_mut(&key.0) {
            None => {
                self.keys.insert(key.0, Busy::new(batch));
                Some(item)
            }
            // Once one of the key waits, all later ones do.
            Some(busy) if busy.batch == batch && self.ordered_batch && busy.waiting.is_empty() => Some(item),
            Some(busy) => {
                busy.waiting.push_back(item);
                None
            }
        }
    }

    fn start(&mut self, items: Vec<Item>) -> Option<BatchId> {
        if items.is_empty() {
            return None;
        }
        let batch = self.next_batch;
        self.next_batch += 1;
        self.in_flight += items.len();
        for item in &items {
            self.lanes.get_mut(item.lane as usize).into_iter().for_each(|lane| lane.at_sink += 1);
        }
        self.batches.insert(batch, items);
        Some(batch)
    }

    /// What a batch holds.
    pub(crate) fn batch(&self, batch: BatchId) -> &[Item] {
        self.batches.get(&batch).map_or(&[], Vec::as_slice)
    }

    /// A batch is over. Its keys stay under way until [`Dispatcher::release`].
    pub(crate) fn finish(&mut self, batch: BatchId) -> Vec<Item> {
        let mut items = self.batches.remove(&batch).unwrap_or_default();
        self.left_sink(&items);
        free_room(&mut items);
        items
    }

    /// A key is no longer under way; what waited behind it.
    pub(crate) fn release(&mut self, key: KeyHash) -> VecDeque<Item> {
        self.changes += 1;
        let waiting = self.keys.remove(&key.0).map(|busy| busy.waiting).unwrap_or_default();
        Dispatcher::went(&mut self.lanes, &waiting);
        waiting
    }

    /// A worker that is held up by event `kept - 1` of its batch gives the rest back, as far as `keep` wants it; returns what is dropped.
    pub(crate) fn hand_back(&mut self, batch: BatchId, kept: usize, keep: impl Fn(&Item) -> bool) -> Vec<Item> {
        let Some(items) = self.batches.get_mut(&batch) else { return Vec::new() };
        if kept >= items.len() {
            return Vec::new();
        }
        let rest = items.split_off(kept);
        let held: HashSet<KeyHash> = items.iter().filter_map(|item| item.key).collect();
        self.left_sink(&rest);
        let (rest, dropped): (Vec<Item>, Vec<Item>) = rest.into_iter().partition(keep);
        let mut waited: Vec<Item> = Vec::new();
        for key in dropped.iter().filter_map(|item| item.key).filter(|key| !held.contains(key)) {
            waited.extend(self.release(key));
        }
        let (behind, free): (Vec<Item>, Vec<Item>) =
            rest.into_iter().partition(|item| item.key.is_some_and(|key| held.contains(&key)));
        for item in behind.into_iter().rev() {
            let key = item.key.expect("only items with a key are behind one");
            Dispatcher::came(&mut self.lanes, &item);
            self.keys.get_mut(&key.0).expect("the key is under way").waiting.push_front(item);
        }
        // What waited for their keys comes behind them, in the order in which it waited.
        free.iter().filter_map(|item| item.key).for_each(|key| waited.extend(self.release(key)));
        self.push_front(waited);
        self.push_front(free);
        dropped
    }

    /// Drops what is not at the sink yet, for lanes that are given up or loaded again; returns it.
    pub(crate) fn purge(&mut self, lanes: &HashSet<u32>) -> Vec<Item> {
        let waiting = |lane: &u32| self.lanes.get(*lane as usize).is_some_and(|lane| lane.here > lane.at_sink);
        if !lanes.iter().any(waiting) {
            return Vec::new();
        }
        self.take(|item| lanes.contains(&item.lane))
    }

    /// Whether a lane has events here, at the sink or not.
    pub(crate) fn holds(&self, lane: u32) -> bool {
        self.lanes.get(lane as usize).is_some_and(|lane| lane.here > 0)
    }

    /// Whether this event of a lane is at the sink.
    pub(crate) fn is_at_sink(&self, lane: u32, position: Position) -> bool {
        let at_sink = |item: &Item| item.lane == lane && item.event.position == position;
        if self.in_flight_of(lane) == 0 {
            return false;
        }
        looked_at(self.in_flight);
        self.batches.values().flatten().any(at_sink)
    }

    /// How many events of a lane are at the sink.
    pub(crate) fn in_flight_of(&self, lane: u32) -> usize {
        self.lanes.get(lane as usize).map_or(0, |lane| lane.at_sink)
    }
}

/// Events that are over take no room any more, whatever is made of them.
fn free_room(items: &mut [Item]) {
    items.iter_mut().for_each(|item| item.room = Reservation::default());
}

/// An event at the sink belongs to its claim from now on, and to no lane.
fn give_claim(lanes: &mut [OfLane], item: &mut Item, claim: ClaimId) {
    if let Some(lane) = lanes.get_mut(item.lane as usize) {
        lane.here -= 1;
        lane.at_sink -= 1;
    }
    (item.claim, item.lane) = (Some(claim), NO_LANE);
}

/// What could be sent, in order, and where the events of each key are in it: those of a key can be taken out without a look at others.
#[derive(Debug, Default)]
struct Line {
    /// The slots in the order of their numbers, without gaps. A slot is empty where an event was taken from the middle; the first one never is.
    slots: VecDeque<Slot>,
    /// The number of the first slot.
    first: i64,
    len: usize,
    keys: HashMap<u64, OfKey, BuildHasherDefault<PassThrough>>,
    /// Events that were refused before.
    retries: usize,
}

#[derive(Debug)]
struct Slot {
    item: Option<Item>,
    /// The number of the next one of its key.
    next: Option<i64>,
}

/// The numbers of the first and the last event of a key.
#[derive(Debug)]
struct OfKey {
    first: i64,
    last: i64,
}

/// A line is made again without its empty slots when there are more of them than events, and than this.
const EMPTY_SLOTS_MIN: usize = 64;

impl Line {
    fn len(&self) -> usize {
        self.len
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn iter(&self) -> impl Iterator<Item = &Item> {
        self.slots.iter().filter_map(|slot| slot.item.as_ref())
    }

    /// With the number of each.
    fn numbered(&self) -> impl Iterator<Item = (i64, &Item)> {
        (self.first..).zip(&self.slots).filter_map(|(number, slot)| Some((number, slot.item.as_ref()?)))
    }

    fn has_key(&self, key: KeyHash) -> bool {
        self.keys.contains_key(&key.0)
    }

    fn slot(&mut self, number: i64) -> &mut Slot {
        &mut self.slots[(number - self.first) as usize]
    }

    fn push_back(&mut self, item: Item) {
        let number = self.first + self.slots.len() as i64;
        let key = self.came(&item);
        self.slots.push_back(Slot { item: Some(item), next: None });
        let Some(key) = key else { return };
        match self.keys.entry(key.0) {
            Entry::Vacant(entry) => _ = entry.insert(OfKey { first: number, last: number }),
            Entry::Occupied(mut entry) => {
                let last = std::mem::replace(&mut entry.get_mut().last, number);
                self.slot(last).next = Some(number);
            }
        }
    }

    fn push_front(&mut self, item: Item) {
        self.first -= 1;
        let number = self.first;
        let key = self.came(&item);
        let of_key = key.map(|key| self.keys.entry(key.0).or_insert(OfKey { first: number, last: number }));
        let next = of_key.map(|of_key| std::mem::replace(&mut of_key.first, number)).filter(|next| *next != number);
        self.slots.push_front(Slot { item: Some(item), next });
    }

    fn came(&mut self, item: &Item) -> Option<KeyHash> {
        self.len += 1;
        self.retries += usize::from(item.attempts > 0);
        item.key
    }

    fn pop_front(&mut self) -> Option<Item> {
        self.remove(self.first)
    }

    /// Takes out an event that is the first of its key, or has none.
    fn remove(&mut self, number: i64) -> Option<Item> {
        let index = usize::try_from(number - self.first).ok()?;
        let Slot { item, next } = self.slots.get_mut(index)?;
        let (item, next) = (item.take()?, *next);
        if let Some(Entry::Occupied(mut of_key)) = item.key.map(|key| self.keys.entry(key.0)) {
            assert_eq!(of_key.get().first, number, "only the first of a key is taken out alone");
            match next {
                Some(next) => of_key.get_mut().first = next,
                None => _ = of_key.remove(),
            }
        }
        self.went(std::slice::from_ref(&item));
        Some(item)
    }

    /// Events were taken out.
    fn went(&mut self, items: &[Item]) {
        self.len -= items.len();
        self.retries -= items.iter().filter(|item| item.attempts > 0).count();
        while self.slots.front().is_some_and(|slot| slot.item.is_none()) {
            self.slots.pop_front();
            self.first += 1;
        }
        if self.slots.len() > 2 * self.len + EMPTY_SLOTS_MIN {
            looked_at(self.slots.len());
            let slots = std::mem::take(self).slots;
            slots.into_iter().filter_map(|slot| slot.item).for_each(|item| self.push_back(item));
        }
    }

    /// Takes out what `pick` names.
    fn take(&mut self, pick: impl Fn(&Item) -> bool) -> Vec<Item> {
        looked_at(self.len);
        let items = std::mem::take(self).slots.into_iter().filter_map(|slot| slot.item);
        let (taken, kept): (Vec<Item>, Vec<Item>) = items.partition(pick);
        kept.into_iter().for_each(|item| self.push_back(item));
        taken
    }

    /// Takes out what `pick` names of the events of a key.
    fn take_of(&mut self, key: KeyHash, pick: impl Fn(&Item) -> bool) -> Vec<Item> {
        let (mut taken, mut kept) = (Vec::new(), Vec::new());
        let mut next = self.keys.remove(&key.0).map(|of_key| of_key.first);
        while let Some(number) = next {
            let slot = self.slot(number);
            next = slot.next.take();
            match slot.item.take_if(|item| pick(item)) {
                Some(item) => taken.push(item),
                None => kept.push(number),
            }
        }
        looked_at(taken.len() + kept.len());
        kept.windows(2).for_each(|pair| self.slot(pair[0]).next = Some(pair[1]));
        if let (Some(&first), Some(&last)) = (kept.first(), kept.last()) {
            self.keys.insert(key.0, OfKey { first, last });
        }
        self.went(&taken);
        taken
    }
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(crate) struct PassThrough(u64);

impl Hasher for PassThrough {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("only u64 keys are hashed");
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{Headers, Payload, Timestamp};

    impl Dispatcher {
        /// Counts again what is counted as it comes and goes.
        fn check_counts(&self) {
            let mut lanes = vec![OfLane::default(); self.lanes.len()];
            let waiting = self.keys.values().flat_map(|busy| &busy.waiting);
            for item in self.ready.iter().chain(waiting).filter(|item| item.lane != NO_LANE) {
                lanes[item.lane as usize].here += 1;
            }
            for item in self.batches.values().flatten().filter(|item| item.lane != NO_LANE) {
                lanes[item.lane as usize].here += 1;
                lanes[item.lane as usize].at_sink += 1;
            }
            assert_eq!(lanes, self.lanes);
            assert_eq!(self.ready.iter().count(), self.ready.len());
            assert!(self.ready.slots.len() <= 2 * self.ready.len() + EMPTY_SLOTS_MIN, "empty slots have a limit");
            let mut keys: BTreeMap<u64, Vec<i64>> = BTreeMap::new();
            for (number, item) in self.ready.numbered() {
                item.key.into_iter().for_each(|key| keys.entry(key.0).or_default().push(number));
            }
            assert_eq!(keys.len(), self.ready.keys.len());
            for (key, numbers) in keys {
                let next = |number: &i64| self.ready.slots[(*number - self.ready.first) as usize].next;
                let linked: Vec<i64> = std::iter::successors(Some(self.ready.keys[&key].first), next).collect();
                assert_eq!((&linked, linked.last()), (&numbers, Some(&self.ready.keys[&key].last)));
            }
        }
    }

    /// Each key has a lane of its own.
    fn item(position: Position, key: Option<u8>) -> Item {
        let lane = key.map_or(9, u32::from);
        let key = key.map(|key| format!("k{key}").into_boxed_str());
        let event = Event {
            position,
            id: uuid::Uuid::from_u128(position as u128),
            topic: "t".into(),
            key,
            r#type: "y".into(),
            payload: Payload::None,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(0),
            malformed: None,
        };
        let (key, event) = (event.key_hash(), Arc::new(event));
        Item { key, event, lane, epoch: 1, attempts: 0, parked: false, claim: None, room: Reservation::default() }
    }

    fn key_hash(key: u8) -> KeyHash {
        KeyHash::of(&format!("k{key}"))
    }

    /// What happens next in a run of the model.
    #[derive(Debug, Clone)]
    enum Step {
        Push(Option<u8>),
        Cut,
        Probe,
        /// A batch ends; from the given share on nothing was tried.
        Finish(prop::sample::Index, u8),
        HandBack(prop::sample::Index, u8),
        /// Some of the events of a key are taken out.
        TakeOf(u8, Position),
        /// What is at the sink of a key gets a claim.
        Claim(u8),
        Purge(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            4 => prop::option::weighted(0.9, 0u8..4).prop_map(Step::Push),
            3 => Just(Step::Cut),
            1 => Just(Step::Probe),
            3 => (index(), 0u8..6).prop_map(|(batch, tried)| Step::Finish(batch, tried)),
            1 => (index(), 1u8..4).prop_map(|(batch, kept)| Step::HandBack(batch, kept)),
            1 => (0u8..4, 1i64..4).prop_map(|(key, every)| Step::TakeOf(key, every)),
            1 => (0u8..4).prop_map(Step::Claim),
            1 => (0u32..10).prop_map(Step::Purge),
        ]
    }

    /// Ends a batch as the engine does: what was not tried comes first again, then what waited for the keys.
    fn finish(
        dispatcher: &mut Dispatcher,
        batch: BatchId,
        tried: usize,
        sent: &mut BTreeMap<KeyHash, Vec<Position>>,
    ) -> usize {
        let items = dispatcher.finish(batch);
        let mut stopped: HashSet<KeyHash> = HashSet::new();
        let mut back = Vec::new();
        let mut done = 0;
        for (index, item) in items.iter().enumerate() {
            if index >= tried || item.key.is_some_and(|key| stopped.contains(&key)) {
                stopped.extend(item.key);
                back.push(item.again(Reservation::default()));
                continue;
            }
            done += 1;
            if let Some(key) = item.key {
                sent.entry(key).or_default().push(item.event.position);
            }
        }
        for key in items.iter().filter_map(|item| item.key) {
            let waiting = dispatcher.release(key);
            dispatcher.push_front(waiting.into());
        }
        dispatcher.push_front(back);
        done
    }

    proptest! {
        /// Model: a queue a key. Whatever is cut, fails, comes back and is handed back: a key is in one batch at a time, its events
        /// are delivered in the order they were pushed, and none is lost.
        #[test]
        fn every_key_stays_in_order(steps in prop::collection::vec(step(), 1..120), ordered in any::<bool>(), one_by_one in any::<bool>()) {
            let mut dispatcher = Dispatcher::new(3, 4, ordered, one_by_one);
            let mut sent: BTreeMap<KeyHash, Vec<Position>> = BTreeMap::new();
            let mut open: Vec<BatchId> = Vec::new();
            let (mut pushed, mut done) = (0, 0);
            for step in steps {
                match step {
                    Step::Push(key) => {
                        pushed += 1;
                        dispatcher.push(item(pushed, key));
                    }
                    Step::Cut => open.extend(dispatcher.cut(|position| position % 7 == 0)),
                    Step::Probe if dispatcher.has_idle_worker() => {
                        open.extend(dispatcher.cut_probe(|item| (item.event.position % 7 == 0).into()));
                    }
                    Step::Finish(index, tried) if !open.is_empty() => {
                        let batch = open.swap_remove(index.index(open.len()));
                        done += finish(&mut dispatcher, batch, tried.into(), &mut sent);
                    }
                    Step::HandBack(index, kept) if !open.is_empty() => {
                        dispatcher.hand_back(*index.get(&open), kept.into(), |_| true);
                    }
                    Step::TakeOf(key, every) => {
                        let taken = dispatcher.take_of(key_hash(key), |item| item.event.position % every == 0);
                        prop_assert!(taken.iter().all(|item| item.key == Some(key_hash(key))));
                        prop_assert!(taken.is_sorted_by_key(|item| item.event.position), "the oldest first");
                        done += taken.len();
                    }
                    Step::Claim(key) => dispatcher.claim_running_of(key_hash(key), |item| item.claim.is_none().then_some(ClaimId(1))),
                    Step::Purge(lane) => done += dispatcher.purge(&HashSet::from([lane])).len(),
                    _ => {}
                }
                let mut holders: BTreeMap<KeyHash, usize> = BTreeMap::new();
                for &batch in &open {
                    let keys: Vec<KeyHash> = dispatcher.batch(batch).iter().filter_map(|item| item.key).collect();
                    let distinct: HashSet<KeyHash> = keys.iter().copied().collect();
                    prop_assert!(ordered || distinct.len() == keys.len(), "two of a key in a batch");
                    distinct.into_iter().for_each(|key| *holders.entry(key).or_default() += 1);
                }
                prop_assert!(holders.values().all(|&holders| holders == 1), "a key in two batches");
                prop_assert!(open.len() <= 3);
                dispatcher.check_counts();
            }
            while !open.is_empty() || dispatcher.has_ready() {
                open.extend(dispatcher.cut(|_| false));
                if let Some(batch) = open.pop() {
                    done += finish(&mut dispatcher, batch, usize::MAX, &mut sent);
                }
            }
            prop_assert!(sent.values().all(|positions| positions.is_sorted()), "out of order: {:?}", sent);
            prop_assert_eq!(done, pushed as usize, "lost");
        }
    }

    #[test]
    fn taking_out_a_key_costs_what_it_has() {
        const KEYS: u64 = 200;
        let mut dispatcher = Dispatcher::new(1, 10, true, true);
        (1..=KEYS as i64 * 3)
            .for_each(|position| dispatcher.push(item(position, Some((position % KEYS as i64) as u8))));
        let before = crate::work::work();
        for key in 0..KEYS as u8 {
            assert_eq!(dispatcher.take_of(key_hash(key), |_| true).len(), 3);
        }
        let cost = crate::work::work() - before;
        assert!(cost <= KEYS * 3 * 4, "{cost} for {} events in line", KEYS * 3);
        assert!(dispatcher.is_empty());
    }

    #[test]
    fn few_events_are_spread_over_all_workers_if_they_are_worked_one_by_one() {
        let mut dispatcher = Dispatcher::new(4, 100, true, true);
        (1..=8).for_each(|position| dispatcher.push(item(position, None)));
        for _ in 0..4 {
            let batch = dispatcher.cut(|_| false).expect("ready");
            assert_eq!(dispatcher.batch(batch).len(), 2);
        }
        let mut dispatcher = Dispatcher::new(4, 100, true, false);
        (1..=8).for_each(|position| dispatcher.push(item(position, None)));
        let batch = dispatcher.cut(|_| false).expect("ready");
        assert_eq!(dispatcher.batch(batch).len(), 8);
    }
}
