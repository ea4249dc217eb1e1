use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use super::queues::ClaimIds;
use super::subscriber::Subscriber;
use crate::backoff::Backoff;
use crate::dispatcher::{BatchId, Item};
use crate::lane::{Lane, Phase, Row};
use crate::work::looked_at;
use crate::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claims, DeliveryRow, Epoch, Event, KEYS_TOLD_MAX, KeyHash, Now,
    Position, SinkFeatures, State, SubscriptionId, Timestamp, WAITING_COUNTED, lane_of,
};

/// An event that has been at the sink for this long gets a row in the queue, and whatever waits then too.
const ROW_AFTER: Duration = Duration::from_millis(50);
/// After a call that took so long, no more is claimed than there are idle workers, for this long.
const SLOW_FOR: Duration = Duration::from_secs(5);
/// What an event is taken to need at least, when it is not known how large those are that could be claimed.
const EVENT_BYTES_MIN: usize = 1024;
/// While there is more to read, a key has this many served before others that may come have theirs.
const KEY_QUOTA: u32 = 500;
/// The wait before asking again when nothing was there to be claimed.
const CLAIM_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
/// The shortest wait for something that is due.
const CLAIM_WAIT_MIN: Duration = Duration::from_millis(5);
/// How often the keys with rows are asked for, from the first on; and how long after one slice of them the next is.
const KEYS_INTERVAL: Duration = Duration::from_secs(1);
const SLICE_INTERVAL: Duration = Duration::from_millis(100);
/// The same while a lane waits to be told.
const SLICE_INTERVAL_UNKNOWN: Duration = Duration::from_millis(5);
/// Until it is known which keys have rows, every event gets one; a longer backlog waits for that.
const UNKNOWN_BACKLOG_MAX: Position = 500;

/// What an instance knows of a queue: what it has claimed, and how much is waiting in the database.
#[derive(Debug)]
pub(super) struct Queue {
    /// The handler settles by itself.
    settles: bool,
    /// Every event gets a row before it is worked on.
    pub(super) rows_for_all: bool,
    one_by_one: bool,
    /// The claims that are not over.
    working: BTreeMap<ClaimId, Working>,
    /// Claims that are over and not yet written.
    ends: Vec<ClaimEnd>,
    /// Rows wait to be claimed, or may wait: whatever is read goes behind them.
    congested: bool,
    /// So much is waiting that nothing more is read; also before it is known how much is waiting.
    full: bool,
    /// How many rows there were when they were last counted, and how many were added since while the sink was down, when they are not counted.
    pub(super) rows: u64,
    /// Not before this time is anything claimed.
    claim_at: Duration,
    /// How many could be claimed when it was last looked for.
    waiting: usize,
    /// Answers in a row without a claim, since something may have changed.
    empty_answers: u32,
    /// Something has become ready since the last request was made.
    missed: bool,
    next_due: Option<Timestamp>,
    begun: HashMap<BatchId, Begun>,
    slow_until: Duration,
    /// The size of the largest event that was claimed lately.
    event_bytes: usize,
    keys_at: Option<Duration>,
    scan: Option<KeyScan>,
    /// A lane was loaded without the keys that have rows.
    keys_unknown: bool,
    /// A backlog waits until they are known.
    held: bool,
    known: Option<KnownKeys>,
    /// How often all keys with rows were looked for.
    looks: u64,
    /// How many events of a key have been handled from memory since all keys were last given their turn.
    served: HashMap<KeyHash, u32>,
    /// The claim that is worked on alone.
    suspect: Option<ClaimId>,
}

/// A claim that is not over.
#[derive(Debug)]
struct Working {
    position: Position,
    since: Timestamp,
    /// Its row is being written, by this lane.
    moving: Option<(u32, Epoch)>,
    /// It was over before its row was written.
    fate: Option<ClaimFate>,
}

/// A call to the sink.
#[derive(Debug)]
struct Begun {
    /// When it began, or gave the rest of its batch back.
    at: Duration,
    /// It has taken too long, and what can have a row of its batch has one.
    seen: bool,
}

/// A look for all keys that have rows, slice by slice.
#[derive(Debug, Default)]
struct KeyScan {
    look: u64,
    /// The keys of each lane.
    keys: Vec<HashSet<KeyHash>>,
    /// The last key that was told.
    to: Box<str>,
    /// How many slices the last answer made up for.
    slices: u32,
}

/// A slice of a look for all keys that have rows.
pub(super) enum Slice {
    /// The keys above this one.
    From(Box<str>),
    /// The first slice of the look of this number.
    First(u64),
}

/// The keys that have rows, of a look that is over.
#[derive(Debug)]
struct KnownKeys {
    look: u64,
    /// The keys of each lane.
    keys: Vec<HashSet<KeyHash>>,
    /// How many looks at the fleet had begun.
    looks: u64,
}

impl Queue {
    pub(super) fn new(sink: SinkFeatures) -> Self {
        Queue {
            settles: sink.settles,
            rows_for_all: sink.settles,
            one_by_one: sink.one_by_one,
            working: BTreeMap::new(),
            ends: Vec::new(),
            congested: true,
            full: true,
            rows: 0,
            waiting: 0,
            claim_at: Duration::ZERO,
            empty_answers: 0,
            missed: false,
            next_due: None,
            begun: HashMap::new(),
            slow_until: Duration::ZERO,
            event_bytes: 0,
            keys_at: None,
            scan: None,
            keys_unknown: false,
            held: false,
            known: None,
            looks: 0,
            served: HashMap::new(),
            suspect: None,
        }
    }

    /// Whether nothing more is to be read for now.
    pub(super) fn is_full(&self) -> bool {
        self.full || self.held
    }

    /// Whether keys with rows are to be asked for.
    pub(super) fn wants_keys(&self, now: Now) -> bool {
        let wait = match &self.scan {
            _ if self.keys_unknown && self.known.is_none() => SLICE_INTERVAL_UNKNOWN,
            // A store may tell more at once.
            Some(scan) => SLICE_INTERVAL * scan.slices.max(1),
            None => KEYS_INTERVAL,
        };
        self.keys_at.is_none_or(|at| now.mono >= at + wait)
    }

    /// Whether a lane waits for the next slice of the keys with rows.
    pub(super) fn must_know_keys(&self, now: Now) -> bool {
        self.keys_unknown && self.known.is_none() && self.wants_keys(now)
    }

    /// Takes in a slice of the keys with rows.
    pub(super) fn add_keys(&mut self, keys: &[Box<str>], looks: u64) {
        let Some(mut scan) = self.scan.take() else { return };
        looked_at(keys.len());
        let lanes = scan.keys.len() as u32;
        for key in keys.iter().map(|key| KeyHash::of(key)) {
            scan.keys[lane_of(Some(key), 0, lanes) as usize].insert(key);
        }
        scan.slices = (keys.len() / KEYS_TOLD_MAX).max(1) as u32;
        match keys.last() {
            Some(last) if keys.len() >= KEYS_TOLD_MAX => self.scan = Some(KeyScan { to: last.clone(), ..scan }),
            _ => self.known = Some(KnownKeys { look: scan.look, keys: scan.keys, looks }),
        }
    }

    /// Whether an event that was read gets a row at once.
    pub(super) fn takes_all(&self) -> bool {
        self.rows_for_all || self.congested
    }

    /// The handler settles by itself.
    pub(super) fn settles(&self) -> bool {
        self.settles
    }

    /// Whether it is too early to claim anything.
    pub(super) fn is_early(&self, now: Now) -> bool {
        now.mono < self.claim_at
    }

    /// Whether a call was slow lately.
    pub(super) fn is_slow(&self, now: Now) -> bool {
        now.mono < self.slow_until
    }

    /// A call was slow, or all workers are held up: whatever is read goes behind the rows.
    pub(super) fn note_congestion(&mut self, now: Now) {
        self.slow_until = now.mono + SLOW_FOR;
        self.congested = true;
    }

    /// How many events that can be claimed fit into so many bytes; at least one.
    pub(super) fn fitting(&self, bytes: usize) -> usize {
        (bytes / self.event_bytes.max(EVENT_BYTES_MIN)).max(1)
    }

    /// Notes the size of an event that was claimed.
    pub(super) fn note_size(&mut self, bytes: usize) {
        self.event_bytes = bytes.max(self.event_bytes - self.event_bytes / 16);
    }

    /// Whether an event may be claimed that is to be worked on alone.
    pub(super) fn may_suspect(&self) -> bool {
        self.suspect.is_none()
    }

    /// A request is made.
    pub(super) fn ask(&mut self) {
        self.missed = false;
    }

    /// Takes in what a request has found. Whether there is room for more to be read now, and was not before.
    pub(super) fn claimed(&mut self, now: Now, request: &ClaimRequest, answer: &Claims, rows_max: u64) -> bool {
        let Claims { claimed, waiting, next_due, rows, .. } = answer;
        let all_taken = request.limit > 0 && claimed.len() < request.limit;
        self.congested = *waiting > 0 || (self.congested && !all_taken);
        // Where they cannot be counted, those that were added are over at the latest when none can be claimed, now or later.
        let none_found = all_taken && claimed.is_empty() && *waiting == 0 && next_due.is_none();
        let none_left = none_found && self.working.is_empty() && !self.missed;
        self.rows = rows.unwrap_or(if none_left { 0 } else { self.rows });
        let full = *waiting >= WAITING_COUNTED || self.rows >= rows_max;
        let frees = std::mem::replace(&mut self.full, full) && !full;
        (self.waiting, self.next_due) = (*waiting, *next_due);
        if request.limit > 0 {
            self.answered(now, claimed.is_empty());
        }
        if request.tell.is_some() {
            self.keys_at = Some(now.mono);
        }
        frees
    }

    /// So many rows were added.
    pub(super) fn add_rows(&mut self, rows: u64) {
        self.rows += rows;
    }

    /// Whether a lane waits to be told which keys have rows, and that is known now.
    pub(super) fn knows_keys(&self) -> bool {
        self.keys_unknown && self.known.is_some()
    }

    /// A claim begins.
    pub(super) fn work_on(&mut self, claim: ClaimId, delivery: &DeliveryRow, suspect: bool) {
        let working = Working { position: delivery.position, since: delivery.since, moving: None, fate: None };
        self.working.insert(claim, working);
        if suspect {
            self.suspect = Some(claim);
        }
    }

    /// Whether a claim is not over.
    pub(super) fn works_on(&self, claim: ClaimId) -> bool {
        self.working.contains_key(&claim)
    }

    /// When the event of a claim first failed, or got its row.
    pub(super) fn since(&self, claim: ClaimId) -> Option<Timestamp> {
        self.working.get(&claim).map(|working| working.since)
    }

    /// Takes claims that are over and not yet written, at most so many.
    pub(super) fn take_ends(&mut self, most: usize) -> impl Iterator<Item = ClaimEnd> {
        self.ends.drain(..most.min(self.ends.len()))
    }

    /// An end could not be written.
    pub(super) fn restore_end(&mut self, end: ClaimEnd) {
        self.ends.push(end);
    }

    /// Where the next slice of the keys with rows begins.
    pub(super) fn next_slice(&mut self, lanes: u32) -> Slice {
        if let Some(scan) = &self.scan {
            return Slice::From(scan.to.clone());
        }
        // What was told is taken in before it is looked for again; until then the figures are of use.
        if self.known.is_some() {
            return Slice::From(Box::default());
        }
        self.looks += 1;
        let keys = vec![HashSet::new(); lanes as usize];
        self.scan = Some(KeyScan { look: self.looks, keys, ..KeyScan::default() });
        Slice::First(self.looks)
    }

    /// Something may be there to be claimed.
    pub(super) fn wake(&mut self, now: Now) {
        self.claim_at = now.mono;
        self.empty_answers = 0;
    }

    /// There is something to be claimed that a request under way may have missed.
    pub(super) fn made_ready(&mut self, now: Now) {
        self.missed = true;
        self.wake(now);
    }

    /// A request was answered, by something to work on or by nothing.
    fn answered(&mut self, now: Now, empty: bool) {
        if empty && self.missed {
            return self.wake(now);
        }
        self.empty_answers = if empty { self.empty_answers.saturating_add(1) } else { 0 };
        let wait = CLAIM_BACKOFF.doubled(self.empty_answers);
        // What is known of the database's clock may be behind it.
        let due = self.next_due.map_or(Duration::MAX, |due| due.since(now.wall).max(CLAIM_WAIT_MIN));
        self.claim_at = if empty { now.mono + wait.min(due) } else { now.mono };
    }

    /// Nothing is claimed, nothing is to be written, and nothing was there to be claimed when it was last looked for.
    pub(super) fn is_idle(&self, now: Now) -> bool {
        self.is_quiet() && self.waiting == 0 && self.empty_answers > 0 && self.next_due.is_none_or(|due| due > now.wall)
    }

    /// Whether nothing is to be done about it before its deadline.
    pub(super) fn may_rest(&self, now: Now, paused: bool) -> bool {
        let waits = paused || (self.claim_at > now.mono && !self.keys_unknown);
        waits && self.is_quiet() && self.begun.is_empty() && self.served.is_empty()
    }

    /// Nothing is claimed and nothing is to be written.
    pub(super) fn is_quiet(&self) -> bool {
        self.working.is_empty() && self.ends.is_empty()
    }

    /// A call to the sink begins, or goes on with one event of its batch.
    pub(super) fn begin(&mut self, batch: BatchId, now: Now) {
        self.begun.insert(batch, Begun { at: now.mono, seen: false });
    }

    pub(super) fn over(&mut self, batch: BatchId) {
        self.begun.remove(&batch);
    }

    /// When something is to be done.
    pub(super) fn deadline(&self, now: Now) -> Option<Duration> {
        looked_at(1 + self.begun.len());
        let slow = self.begun.values().map(|begun| begun.at + ROW_AFTER).filter(|at| *at > now.mono).min();
        let due = self.next_due.filter(|due| *due > now.wall).map(|due| now.mono + due.since(now.wall));
        let keys = self.keys_at.filter(|_| self.keys_unknown).map(|at| at + SLICE_INTERVAL_UNKNOWN);
        [slow, due, keys, Some(self.claim_at)].into_iter().flatten().filter(|at| *at > now.mono).min()
    }

    /// A claim is over. If its row is being written the end waits for that.
    pub(super) fn end(&mut self, subscription: SubscriptionId, claim: ClaimId, fate: ClaimFate) {
        let Some(working) = self.working.get_mut(&claim) else { return };
        if working.moving.is_some() {
            working.fate = Some(fate);
            return;
        }
        let position = working.position;
        self.forget(claim);
        self.ends.push(ClaimEnd { subscription, position, claim, fate });
    }

    pub(super) fn forget(&mut self, claim: ClaimId) {
        self.working.remove(&claim);
        if self.suspect == Some(claim) {
            self.suspect = None;
        }
    }

    /// The row of a claim was written, or may have been.
    pub(super) fn written(&mut self, subscription: SubscriptionId, claim: ClaimId) {
        let Some(working) = self.working.get_mut(&claim) else { return };
        working.moving = None;
        if let Some(fate) = working.fate.take() {
            self.end(subscription, claim, fate);
        }
    }

    /// A lane is gone: the rows that it was writing may be there or not. Ending their claims tells.
    pub(super) fn lane_gone(&mut self, subscription: SubscriptionId, lane: u32) {
        let moving = |working: &Working| working.moving.is_some_and(|moving| moving.0 == lane);
        let claims: Vec<ClaimId> = self.working.iter().filter(|entry| moving(entry.1)).map(|entry| *entry.0).collect();
        claims.into_iter().for_each(|claim| self.written(subscription, claim));
    }
}

impl Subscriber {
    /// Gives rows to what waits, and to what has been at the sink for too long or is of the same keys: rows of a key stand in order, and
    /// no other instance may work on a key that is at work here.
    pub(super) fn spill_all(&mut self, now: Now, ids: &mut ClaimIds) {
        let Some(queue) = &mut self.queue else { return };
        let waiting = self.dispatcher.take(|item| item.claim.is_none());
        let keys: HashSet<KeyHash> = waiting.iter().filter_map(|item| item.key).collect();
        let lanes = &mut self.lanes;
        self.dispatcher.claim_running(|batch, items, item| {
            let slow = is_slow(queue, batch, items, now);
            let picked = slow || item.key.is_some_and(|key| keys.contains(&key));
            if picked { spill_at_sink(queue, lanes, now, ids, item) } else { None }
        });
        self.enqueue_all(now, waiting);
    }

    /// The same for the events of one key.
    fn spill_key(&mut self, now: Now, ids: &mut ClaimIds, key: KeyHash) {
        let Some(queue) = &mut self.queue else { return };
        let waiting = self.dispatcher.take_of(key, |item| item.claim.is_none());
        let lanes = &mut self.lanes;
        self.dispatcher.claim_running_of(key, |item| spill_at_sink(queue, lanes, now, ids, item));
        self.enqueue_all(now, waiting);
    }

    /// Gives rows to events that were waiting.
    fn enqueue_all(&mut self, now: Now, waiting: Vec<Item>) {
        for item in waiting {
            if let Some(lane) = self.lane_at(item.lane, item.epoch) {
                lane.enqueue(&item.event, now.wall);
            }
        }
    }

    /// Gives an event that was read a row, behind whatever of its key is here.
    pub(super) fn spill(&mut self, now: Now, ids: &mut ClaimIds, number: u32, event: &Event) {
        if let Some(key) = event.key_hash().filter(|&key| self.dispatcher.has_key(key)) {
            self.spill_key(now, ids, key);
        }
        let Some(Some(lane)) = self.lanes.get_mut(number as usize) else { return };
        match event.deliver_at.filter(|&at| at > now.wall) {
            Some(until) => lane.delay(event, until, now.wall),
            None => lane.enqueue(event, now.wall),
        }
    }

    /// Claimed events that are not at the sink go back to the others.
    pub(super) fn return_claims(&mut self) {
        let items = self.dispatcher.take(|item| item.claim.is_some());
        self.end_claims(items);
        self.dispatcher.holds_no_claims();
    }

    /// The same for those of one key.
    pub(super) fn return_claims_of(&mut self, key: KeyHash) {
        let items = self.dispatcher.take_of(key, |item| item.claim.is_some());
        self.end_claims(items);
    }

    fn end_claims(&mut self, items: Vec<Item>) {
        for item in items {
            self.breaker.forget(item.event.position);
            if let (Some(queue), Some(claim)) = (&mut self.queue, item.claim) {
                queue.end(self.id, claim, ClaimFate::Back);
            }
        }
    }

    /// A claimed event was not tried: whether it is sent again by this instance; if not it goes back to the others.
    pub(super) fn keeps_claim(&mut self, claim: ClaimId, stopping: bool) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let keeps = !stopping && !self.paused && !queue.settles && !self.breaker.is_down();
        if !keeps {
            queue.working.get(&claim).into_iter().for_each(|working| self.breaker.forget(working.position));
            queue.end(self.id, claim, ClaimFate::Back);
        }
        keeps && queue.working.contains_key(&claim)
    }

    /// Whether a call has become slow that has events without a row. Each is looked through once: what has no row then gets none later.
    pub(super) fn note_slow(&mut self, now: Now) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let lane_of = |item: &Item| self.lanes.get(item.lane as usize).and_then(Option::as_ref);
        let fresh = |item: &Item| lane_of(item).is_some_and(|lane| is_held(lane, item));
        let (mut any, mut seen) = (false, Vec::new());
        for (batch, items) in self.dispatcher.running() {
            looked_at(1);
            let known = queue.begun.get(&batch).is_none_or(|begun| begun.seen);
            if !known && is_slow(queue, batch, items, now) {
                looked_at(items.len());
                any |= items.iter().any(fresh);
                seen.push(batch);
            }
        }
        for batch in seen {
            queue.begun.get_mut(&batch).into_iter().for_each(|begun| begun.seen = true);
        }
        any
    }

    /// Notes that an event was handled from memory.
    pub(super) fn note_served(&mut self, key: Option<KeyHash>) {
        if let (Some(queue), Some(key)) = (&mut self.queue, key) {
            *queue.served.entry(key).or_default() += 1;
        }
    }

    /// Lets a key that is not at the sink any more wait for others that may come, if it has had its served.
    pub(super) fn throttle_if_served(&mut self, key: Option<KeyHash>) {
        let (Some(queue), Some(key)) = (&self.queue, key) else { return };
        if queue.served.get(&key).is_some_and(|served| *served >= KEY_QUOTA) && !self.dispatcher.is_busy(key) {
            self.dispatcher.hold(key);
        }
    }

    /// Lets every key have its turn again, when all has been read that is there or nothing more fits. A key that takes more than half
    /// of what fits moves aside.
    pub(super) fn reset_quota(&mut self, now: Now, ids: &mut ClaimIds, behind: bool, full: bool, most: usize) {
        let Some(queue) = &mut self.queue else { return };
        let many = queue.served.len() > most && !self.dispatcher.has_held();
        let due = if behind { many || (full && self.dispatcher.has_held()) } else { !queue.served.is_empty() };
        if !due {
            return;
        }
        queue.served.clear();
        self.dispatcher.release_held();
        // It keeps nobody from being read where all has been read.
        let heaviest = if full && behind { self.dispatcher.largest_key() } else { None };
        if let Some((key, _)) = heaviest.filter(|heaviest| heaviest.1 > most / 2) {
            self.spill_key(now, ids, key);
        }
    }
}

/// Gives a row to an event at the sink, if it is its lane's still; the claim that goes with it.
fn spill_at_sink(
    queue: &mut Queue,
    lanes: &mut [Option<Lane>],
    now: Now,
    ids: &mut ClaimIds,
    item: &Item,
) -> Option<ClaimId> {
    let lane = lanes.get_mut(item.lane as usize)?.as_mut().filter(|lane| is_held(lane, item))?;
    let claim = ids.draw(1);
    let row = Row { claim: Some(claim), attempts: item.attempts, ..Row::new(State::Processing, now.wall) };
    lane.spill(&item.event, row, now.wall);
    let moving = Some((item.lane, item.epoch));
    let working = Working { position: item.event.position, since: now.wall, moving, fate: None };
    queue.working.insert(claim, working);
    Some(claim)
}

/// Whether an event without a claim is this lane's still.
fn is_held(lane: &Lane, item: &Item) -> bool {
    item.claim.is_none() && lane.epoch == item.epoch && lane.phase != Phase::Waiting
}

/// Whether a call has been at the sink for too long. Of a batch that is worked event by event the rest is given back first.
pub(super) fn is_slow(queue: &Queue, batch: BatchId, items: &[Item], now: Now) -> bool {
    let long = queue.begun.get(&batch).is_some_and(|begun| now.mono >= begun.at + ROW_AFTER);
    long && (items.len() == 1 || !queue.one_by_one)
}

impl Subscriber {
    /// Notes whether a lane waits to be told which keys have rows.
    fn note_unknown_keys(&mut self) {
        let unknown = self.lanes().any(|lane| lane.has_unknown_keys());
        self.queue.iter_mut().for_each(|queue| (queue.keys_unknown, queue.held) = (unknown, queue.held && unknown));
    }

    /// Reads nothing of a backlog until it is known which keys have rows: what is read before gets a row, and whatever comes later goes
    /// behind it.
    pub(super) fn hold_backlog(&mut self, horizon: Position) {
        let long = |lane: &Lane| horizon - lane.cursor.top() > UNKNOWN_BACKLOG_MAX;
        let held = self.queue.as_ref().is_some_and(|queue| queue.keys_unknown) && self.active().any(long);
        self.queue.iter_mut().for_each(|queue| queue.held = held);
    }

    /// A lane was loaded. If it has to be told which keys have rows, that is asked for at once; a look that is under way says nothing of it, and
    /// another one follows.
    pub(super) fn lane_loaded(&mut self, number: u32) {
        self.note_unknown_keys();
        let unknown = self.lane(number).is_some_and(|lane| lane.has_unknown_keys());
        for queue in self.queue.iter_mut().filter(|_| unknown) {
            queue.keys_at = None;
        }
    }

    /// Takes in which keys have rows, once a look at the fleet that began later has shown that the lanes were this instance's still: a
    /// rewind removes rows, and their events come again to the owner of the lane then.
    /// Whether a backlog waited for it.
    pub(super) fn adopt_keys(&mut self, looks: u64) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let held = queue.held;
        let Some(known) = queue.known.take_if(|known| known.looks < looks) else { return false };
        looked_at(known.keys.len());
        for (lane, keys) in self.lanes.iter_mut().zip(known.keys) {
            // Where the number of lanes has changed meanwhile, all have been loaded since.
            if let Some(lane) = lane {
                lane.end_look(known.look, keys);
            }
        }
        self.note_unknown_keys();
        held && self.queue.as_ref().is_some_and(|queue| !queue.held)
    }
}
