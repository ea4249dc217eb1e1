use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use super::delivering::Trial;
use super::subscriber::Subscriber;
use super::{Action, Call, Engine, RecoveryProfile};
use crate::backoff::Backoff;
use crate::breaker::{Charge, Permit};
use crate::dispatcher::{BatchId, Item, NO_LANE};
use crate::lane::{Lane, Phase, Row};
use crate::work::looked_at;
use crate::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Epoch, Failure, InstanceId, KEYS_TOLD_MAX, KeyHash,
    Now, Outcome, Position, RecoverRequest, Recovered, RecoveryCause, SinkFeatures, State, SubscriptionId, Timestamp,
    WAITING_COUNTED, lane_of,
};

/// How many claims are ended by one call: settlements wait for it.
const FINISHED_AT_ONCE_MAX: usize = 500;

/// An event that has been at the sink for this long gets a row in the queue, and whatever waits then too.
const ROW_AFTER: Duration = Duration::from_millis(50);
/// After a call that took so long, no more is claimed than there are idle workers, for this long.
const SLOW_FOR: Duration = Duration::from_secs(5);
/// While there is more to read, a key has this many turns before others that may come have theirs.
const KEY_TURNS: u32 = 500;
/// Claimed at once, at most.
const CLAIMS_MAX: usize = 1_000;
/// The wait before asking again when nothing was there to be claimed.
const CLAIM_BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
/// The shortest wait for something that is due.
const CLAIM_WAIT_MIN: Duration = Duration::from_millis(5);
/// As long as a dead instance is seen its claims are asked for this often: some may have been locked when they first were.
const RECOVER_AGAIN: Duration = Duration::from_secs(1);
/// What an event is taken to need at least, when it is not known how large those are that could be claimed.
const EVENT_BYTES_MIN: usize = 1024;
/// How often the keys with rows are asked for, from the first on; and how long after one slice of them the next is.
const TELL_INTERVAL: Duration = Duration::from_secs(1);
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
    /// How many rows there were when they were last counted.
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
    told_at: Option<Duration>,
    telling: Option<Telling>,
    /// A lane was loaded without the keys that have rows.
    keys_unknown: bool,
    /// A backlog waits until they are known.
    held: bool,
    told: Option<Told>,
    /// How often all keys with rows were looked for.
    looks: u64,
    /// How many events of a key have been handled from memory since all keys were last given their turn.
    turns: HashMap<KeyHash, u32>,
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
struct Telling {
    look: u64,
    /// By lane.
    keys: Vec<HashSet<KeyHash>>,
    /// The last key that was told.
    to: Box<str>,
    /// How many slices the last answer made up for.
    slices: u32,
}

/// The keys that have rows, of a look that is over.
#[derive(Debug)]
struct Told {
    look: u64,
    /// By lane.
    keys: Vec<HashSet<KeyHash>>,
    /// How many looks at the fleet had begun.
    observes: u64,
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Asked {
    sub: usize,
    request: ClaimRequest,
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
            told_at: None,
            telling: None,
            keys_unknown: false,
            held: false,
            told: None,
            looks: 0,
            turns: HashMap::new(),
            suspect: None,
        }
    }

    /// Whether nothing more is to be read for now.
    pub(super) fn is_full(&self) -> bool {
        self.full || self.held
    }

    /// Whether keys with rows are to be asked for.
    fn wants_keys(&self, now: Now) -> bool {
        let wait = match &self.telling {
            _ if self.keys_unknown && self.told.is_none() => SLICE_INTERVAL_UNKNOWN,
            // A store may tell more at once.
            Some(telling) => SLICE_INTERVAL * telling.slices.max(1),
            None => TELL_INTERVAL,
        };
        self.told_at.is_none_or(|told| now.mono >= told + wait)
    }

    /// Whether a lane waits for the next slice of the keys with rows.
    fn must_be_told(&self, now: Now) -> bool {
        self.keys_unknown && self.told.is_none() && self.wants_keys(now)
    }

    /// Takes in a slice of the keys with rows.
    fn hear(&mut self, keys: &[Box<str>], observes: u64) {
        let Some(mut telling) = self.telling.take() else { return };
        looked_at(keys.len());
        let lanes = telling.keys.len() as u32;
        for key in keys.iter().map(|key| KeyHash::of(key)) {
            telling.keys[lane_of(Some(key), 0, lanes) as usize].insert(key);
        }
        telling.slices = (keys.len() / KEYS_TOLD_MAX).max(1) as u32;
        match keys.last() {
            Some(last) if keys.len() >= KEYS_TOLD_MAX => self.telling = Some(Telling { to: last.clone(), ..telling }),
            _ => self.told = Some(Told { look: telling.look, keys: telling.keys, observes }),
        }
    }

    /// Whether an event that was read gets a row at once.
    pub(super) fn takes_all(&self) -> bool {
        self.rows_for_all || self.congested
    }

    /// Something may be there to be claimed.
    pub(super) fn wake(&mut self, now: Now) {
        self.claim_at = now.mono;
        self.empty_answers = 0;
    }

    /// There is something to be claimed that a request under way may have missed.
    fn made_ready(&mut self, now: Now) {
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
        waits && self.is_quiet() && self.begun.is_empty() && self.turns.is_empty()
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
        let told = self.told_at.filter(|_| self.keys_unknown).map(|at| at + SLICE_INTERVAL_UNKNOWN);
        [slow, due, told, Some(self.claim_at)].into_iter().flatten().filter(|at| *at > now.mono).min()
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

    fn forget(&mut self, claim: ClaimId) {
        self.working.remove(&claim);
        if self.suspect == Some(claim) {
            self.suspect = None;
        }
    }

    /// The row of a claim was written, or may have been.
    fn written(&mut self, subscription: SubscriptionId, claim: ClaimId) {
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
    /// nobody else may work on a key that is at work here.
    fn give_rows(&mut self, now: Now, next_claim: &mut i64) {
        let Some(queue) = &mut self.queue else { return };
        let waiting = self.dispatcher.take(|item| item.claim.is_none());
        let keys: HashSet<KeyHash> = waiting.iter().filter_map(|item| item.key).collect();
        let lanes = &mut self.lanes;
        self.dispatcher.claim_running(|batch, items, item| {
            let slow = is_slow(queue, batch, items, now);
            let picked = slow || item.key.is_some_and(|key| keys.contains(&key));
            if picked { claim_at_sink(queue, lanes, now, next_claim, item) } else { None }
        });
        self.enqueue_all(now, waiting);
    }

    /// The same for the events of one key.
    fn give_rows_of(&mut self, now: Now, next_claim: &mut i64, key: KeyHash) {
        let Some(queue) = &mut self.queue else { return };
        let waiting = self.dispatcher.take_of(key, |item| item.claim.is_none());
        let lanes = &mut self.lanes;
        self.dispatcher.claim_running_of(key, |item| claim_at_sink(queue, lanes, now, next_claim, item));
        self.enqueue_all(now, waiting);
    }

    /// Gives rows to events that were waiting.
    fn enqueue_all(&mut self, now: Now, waiting: Vec<Item>) {
        for item in waiting {
            self.bytes -= item.event.size();
            if let Some(lane) = self.lane_at(item.lane, item.epoch) {
                lane.enqueue(&item.event, now.wall);
            }
        }
    }

    /// Gives an event that was read a row, behind whatever of its key is here.
    pub(super) fn give_row(&mut self, now: Now, next_claim: &mut i64, number: u32, item: &Item) {
        if let Some(key) = item.key.filter(|&key| self.dispatcher.has_key(key)) {
            self.give_rows_of(now, next_claim, key);
        }
        let Some(Some(lane)) = self.lanes.get_mut(number as usize) else { return };
        match item.event.deliver_at.filter(|&at| at > now.wall) {
            Some(until) => lane.delay(&item.event, until, now.wall),
            None => lane.enqueue(&item.event, now.wall),
        }
    }

    /// Claimed events that are not at the sink go back to the others.
    fn give_back(&mut self) {
        let items = self.dispatcher.take(|item| item.claim.is_some());
        self.end_claims(items);
        self.dispatcher.holds_no_claims();
    }

    /// The same for those of one key.
    pub(super) fn give_back_of(&mut self, key: KeyHash) {
        let items = self.dispatcher.take_of(key, |item| item.claim.is_some());
        self.end_claims(items);
    }

    fn end_claims(&mut self, items: Vec<Item>) {
        for item in items {
            self.bytes -= item.event.size();
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
    fn note_slow(&mut self, now: Now) -> bool {
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
    pub(super) fn note_turn(&mut self, key: Option<KeyHash>) {
        if let (Some(queue), Some(key)) = (&mut self.queue, key) {
            *queue.turns.entry(key).or_default() += 1;
        }
    }

    /// Lets a key that is not at the sink any more wait for others that may come, if it has had its turns.
    pub(super) fn hold_if_served(&mut self, key: Option<KeyHash>) {
        let (Some(queue), Some(key)) = (&self.queue, key) else { return };
        if queue.turns.get(&key).is_some_and(|turns| *turns >= KEY_TURNS) && !self.dispatcher.is_busy(key) {
            self.dispatcher.hold(key);
        }
    }

    /// Lets every key have its turn again, when all has been read that is there or nothing more fits. A key that takes more than half
    /// of what fits moves aside.
    fn turn_over(&mut self, now: Now, next_claim: &mut i64, behind: bool, full: bool, most: usize) {
        let Some(queue) = &mut self.queue else { return };
        let many = queue.turns.len() > most && !self.dispatcher.has_held();
        let due = if behind { many || (full && self.dispatcher.has_held()) } else { !queue.turns.is_empty() };
        if !due {
            return;
        }
        queue.turns.clear();
        self.dispatcher.release_held();
        // It keeps nobody from being read where all has been read.
        let hog = if full && behind { self.dispatcher.largest_key() } else { None };
        if let Some((key, _)) = hog.filter(|hog| hog.1 > most / 2) {
            self.give_rows_of(now, next_claim, key);
        }
    }
}

/// Gives a row to an event at the sink, if it is its lane's still; the claim that goes with it.
fn claim_at_sink(
    queue: &mut Queue,
    lanes: &mut [Option<Lane>],
    now: Now,
    next_claim: &mut i64,
    item: &Item,
) -> Option<ClaimId> {
    let lane = lanes.get_mut(item.lane as usize)?.as_mut().filter(|lane| is_held(lane, item))?;
    let claim = ClaimId(*next_claim);
    *next_claim += 1;
    let row = Row { claim: Some(claim), attempts: item.attempts, ..Row::new(State::Processing, now.wall) };
    lane.give_row(&item.event, row, now.wall);
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
fn is_slow(queue: &Queue, batch: BatchId, items: &[Item], now: Now) -> bool {
    let long = queue.begun.get(&batch).is_some_and(|begun| now.mono >= begun.at + ROW_AFTER);
    long && (items.len() == 1 || !queue.one_by_one)
}

impl Engine {
    /// What is slow gets a row, and what waits behind it: then all instances can work on it.
    pub(super) fn tend_queue(&mut self, now: Now, index: usize) {
        if self.subscribers[index].queue.is_none() {
            return;
        }
        let behind = self.is_behind_of(index);
        let sub = &mut self.subscribers[index];
        let down = sub.breaker.is_down() && sub.breaker.permit(now) == Permit::Nothing;
        let stopping = self.draining || self.expired || sub.paused || down;
        let full = !sub.has_room(&self.config);
        sub.turn_over(now, &mut self.next_claim, behind, full, self.config.in_flight_max);
        let slow = sub.note_slow(now);
        let Some(queue) = &mut sub.queue else { return };
        // What was read while every worker was at something slow is nobody's turn here.
        let waits = sub.dispatcher.idle_workers() == 0 && sub.dispatcher.has_ready();
        let stuck = waits && sub.dispatcher.running().all(|(batch, items)| is_slow(queue, batch, items, now));
        if slow || stuck {
            queue.slow_until = now.mono + SLOW_FOR;
            queue.congested = true;
            sub.give_rows(now, &mut self.next_claim);
        }
        if sub.dispatcher.may_hold_claims() && (slow || stuck || stopping) {
            sub.give_back();
        }
    }

    pub(super) fn is_behind_of(&self, index: usize) -> bool {
        let sub = &self.subscribers[index];
        let behind = |lane: &Lane| lane.top < self.horizon && lane.may_rise(self.config.ranges_max);
        sub.stopped.is_none() && sub.active().any(behind)
    }

    /// A claimed event came back from the sink; whether it is to be sent again.
    pub(super) fn claim_over(&mut self, now: Now, index: usize, item: &Item, claim: ClaimId, outcome: Outcome) -> bool {
        let failure = match outcome {
            Outcome::NotTried => return true,
            Outcome::Failed(failure) => failure,
            Outcome::Delivered => {
                let sub = &mut self.subscribers[index];
                sub.succeed(now, item);
                let Some(queue) = &mut sub.queue else { return false };
                if queue.settles {
                    queue.forget(claim);
                    queue.made_ready(now);
                } else {
                    queue.end(sub.id, claim, ClaimFate::Done);
                }
                return false;
            }
        };
        let charge = self.blame(now, index, item, &failure);
        if charge == Charge::Sink {
            return true;
        }
        let working = self.subscribers[index].queue.as_ref().and_then(|queue| queue.working.get(&claim));
        let since = working.map_or(now.wall, |working| working.since);
        self.claim_failed(now, index, claim, Trial::of(item, since), &failure, charge);
        false
    }

    fn claim_failed(
        &mut self,
        now: Now,
        index: usize,
        claim: ClaimId,
        trial: Trial<'_>,
        failure: &Failure,
        charge: Charge,
    ) {
        let queue = self.subscribers[index].queue.as_ref();
        if !queue.is_some_and(|queue| queue.working.contains_key(&claim)) {
            return;
        }
        if matches!(charge, Charge::Nobody(_)) {
            self.subscribers[index].breaker.give_away(trial.position);
        }
        let failed = self.failed(index, now, trial, failure, charge);
        let sub = &mut self.subscribers[index];
        if let Some(queue) = &mut sub.queue {
            queue.end(sub.id, claim, ClaimFate::Failed(failed));
        }
    }

    /// The rows of these claims were written with a lane's cursor. If the lane was lost they may have been written by a call that was
    /// not answered: ending the claims tells.
    pub(super) fn rows_settled(&mut self, now: Now, subscription: SubscriptionId, claims: &[ClaimId]) {
        let sub = self.index_of(subscription).map(|index| &mut self.subscribers[index]);
        let Some(queue) = sub.and_then(|sub| sub.queue.as_mut()) else { return };
        claims.iter().for_each(|claim| queue.written(subscription, *claim));
        queue.made_ready(now);
    }

    pub(super) fn claimed(&mut self, now: Now, answers: Vec<Claims>) {
        let asked = self.claiming.succeed().unwrap_or_default();
        let observes = self.observes;
        for (asked, answer) in asked.into_iter().zip(answers) {
            let Claims { claimed, waiting, next_due, keys, rows } = answer;
            let index = asked.sub;
            let sub = &mut self.subscribers[index];
            let Some(queue) = &mut sub.queue else { continue };
            let all_taken = asked.request.limit > 0 && claimed.len() < asked.request.limit;
            queue.congested = waiting > 0 || (queue.congested && !all_taken);
            queue.rows = rows.unwrap_or(queue.rows);
            let full = waiting >= WAITING_COUNTED || queue.rows >= self.config.blocked_max as u64;
            if std::mem::replace(&mut queue.full, full) && !full {
                self.rang_at.get_or_insert(now.mono);
            }
            (queue.waiting, queue.next_due) = (waiting, next_due);
            if asked.request.limit > 0 {
                queue.answered(now, claimed.is_empty());
            }
            if asked.request.tell.is_some() {
                queue.told_at = Some(now.mono);
            }
            keys.iter().for_each(|keys| queue.hear(keys, observes));
            // What was told is taken in with the next look at the fleet.
            self.observe_now |= queue.keys_unknown && queue.told.is_some();
            claimed.into_iter().for_each(|claimed| self.begin_claim(now, index, claimed));
        }
        self.stuck = false;
    }

    fn begin_claim(&mut self, now: Now, index: usize, claimed: Claimed) {
        let Claimed { claim, delivery, event, suspect } = claimed;
        let sub = &mut self.subscribers[index];
        let Some(queue) = &mut sub.queue else { return };
        let working = Working { position: delivery.position, since: delivery.since, moving: None, fate: None };
        queue.working.insert(claim, working);
        if suspect {
            queue.suspect = Some(claim);
        }
        let Some(event) = event else {
            let failure = Failure::permanent("the event is neither in the log nor kept aside");
            let trial = Trial::unread(&delivery, delivery.attempts + 1);
            return self.claim_failed(now, index, claim, trial, &failure, Charge::Event);
        };
        sub.bytes += event.size();
        queue.event_bytes = event.size().max(queue.event_bytes - queue.event_bytes / 16);
        sub.dispatcher.push(Item {
            key: event.key_hash(),
            event,
            lane: NO_LANE,
            epoch: 0,
            attempts: delivery.attempts,
            parked: false,
            claim: Some(claim),
        });
    }

    pub(super) fn finished(&mut self, now: Now, written: Vec<bool>) {
        let again = self.finishing.has_failed();
        for (end, written) in self.finishing.succeed().unwrap_or_default().into_iter().zip(written) {
            let Some(index) = self.index_of(end.subscription) else { continue };
            let sub = &mut self.subscribers[index];
            // An end that was not answered may have been written, and is refused the second time.
            if !written && !again && end.fate != ClaimFate::Back {
                *self.figures.refused.entry(sub.name.clone()).or_default() += 1;
            }
            sub.queue.iter_mut().for_each(|queue| queue.made_ready(now));
        }
    }

    /// Restores what a failed call was about.
    pub(super) fn queue_call_failed(&mut self, now: Now, call: Call) {
        match call {
            // What it claimed, if anything, is told when the same is asked for again.
            Call::Claim => {
                for asked in self.claiming.fail(now).unwrap_or_default() {
                    let Asked { sub, request } = asked;
                    self.claims_unknown.push(Asked { sub, request: ClaimRequest { again: true, ..request } });
                }
            }
            Call::Finish => {
                for end in self.finishing.fail(now).unwrap_or_default() {
                    let sub = self.index_of(end.subscription).map(|index| &mut self.subscribers[index]);
                    let queue = sub.and_then(|sub| sub.queue.as_mut());
                    queue.into_iter().for_each(|queue| queue.ends.push(end.clone()));
                }
            }
            _ => _ = self.recovering.fail(now),
        }
    }

    pub(super) fn call_claim(&mut self, now: Now) {
        if !self.claiming.is_free(now) || self.expired || !self.seen_fleet {
            return;
        }
        let mut asked = std::mem::take(&mut self.claims_unknown);
        if asked.is_empty() && !self.draining {
            let awake = (0..self.subscribers.len()).filter(|index| !self.subscribers[*index].resting);
            let awake: Vec<usize> = awake.collect();
            asked = awake.into_iter().filter_map(|index| self.claim_request(now, index)).collect();
        }
        if !asked.is_empty() {
            self.actions.push(Action::Claim(asked.iter().map(|asked| asked.request.clone()).collect()));
            self.claiming.begin(asked);
        }
    }

    fn claim_request(&mut self, now: Now, index: usize) -> Option<Asked> {
        let sub = &self.subscribers[index];
        let queue = sub.queue.as_ref()?;
        looked_at(1);
        let permit = sub.breaker.permit(now);
        let early = now.mono < queue.claim_at;
        if sub.paused || permit == Permit::Nothing || (early && !queue.must_be_told(now)) {
            return None;
        }
        let each = if now.mono < queue.slow_until { 1 } else { sub.spec.batch_size };
        let bytes_left = self.config.in_flight_bytes_max.saturating_sub(sub.bytes);
        let fit = (bytes_left / queue.event_bytes.max(EVENT_BYTES_MIN)).max(1);
        let limit =
            (sub.dispatcher.idle_workers() * each).min(CLAIMS_MAX).saturating_sub(sub.dispatcher.ready_len()).min(fit);
        let limit = if permit == Permit::All { limit } else { limit.min(1) };
        let limit = if early { 0 } else { limit };
        let tell = queue.wants_keys(now);
        if limit == 0 && !tell {
            return None;
        }
        let (subscription, suspect) = (sub.id, queue.suspect.is_none());
        if limit > 0 {
            self.subscribers[index].queue.iter_mut().for_each(|queue| queue.missed = false);
        }
        let first = ClaimId(self.next_claim);
        self.next_claim += limit as i64;
        let tell = tell.then(|| self.next_slice(index));
        Some(Asked { sub: index, request: ClaimRequest { subscription, limit, first, suspect, tell, again: false } })
    }

    /// Above which key the next slice of keys with rows begins. A new look makes the lanes note what it may miss.
    fn next_slice(&mut self, index: usize) -> Box<str> {
        let sub = &mut self.subscribers[index];
        let Some(queue) = &mut sub.queue else { return Box::default() };
        if let Some(telling) = &queue.telling {
            return telling.to.clone();
        }
        // What was told is taken in before it is looked for again; until then the figures are of use.
        if queue.told.is_some() {
            return Box::default();
        }
        queue.looks += 1;
        let keys = vec![HashSet::new(); sub.lane_count as usize];
        queue.telling = Some(Telling { look: queue.looks, keys, ..Telling::default() });
        looked_at(self.settling.in_flight().map_or(0, Vec::len) + sub.lanes.len());
        let settling = self.settling.in_flight().into_iter().flatten().map(|pending| &pending.write);
        let mut unwritten: HashMap<u32, Vec<KeyHash>> = HashMap::new();
        for write in settling.filter(|write| write.lane.subscription == sub.id && !write.queue.is_empty()) {
            let keys = write.queue.iter().filter_map(|queued| queued.delivery.key_hash());
            looked_at(write.queue.len());
            unwritten.entry(write.lane.lane).or_default().extend(keys);
        }
        for lane in sub.lanes.iter_mut().flatten() {
            let keys = unwritten.remove(&lane.reference.lane).unwrap_or_default();
            lane.begin_look(queue.looks, keys.into_iter());
        }
        Box::default()
    }

    pub(super) fn call_finish(&mut self, now: Now) {
        if !self.finishing.is_free(now) {
            return;
        }
        let queues = self.subscribers.iter_mut().filter(|sub| !sub.resting).filter_map(|sub| sub.queue.as_mut());
        let mut ends: Vec<ClaimEnd> = Vec::new();
        for queue in queues {
            let room = FINISHED_AT_ONCE_MAX - ends.len();
            ends.extend(queue.ends.drain(..room.min(queue.ends.len())));
        }
        if !ends.is_empty() {
            self.actions.push(Action::Finish(ends.clone()));
            self.finishing.begin(ends);
        }
    }

    pub(super) fn call_recover(&mut self, now: Now) {
        let recovery = self.config.recovery;
        let runs_queues = self.subscribers.iter().any(|sub| sub.queue.is_some());
        if !recovery.enabled || !runs_queues || self.draining || !self.seen_fleet {
            return;
        }
        if !self.recovering.is_free(now) {
            return;
        }
        let sweep = self.last_sweep.is_none_or(|last| now.mono >= last + recovery.check_interval);
        let mut dead = std::mem::take(&mut self.dead_instances);
        let asked = |id: &InstanceId| self.recovered.get(id).is_some_and(|at| now.mono < *at + RECOVER_AGAIN);
        dead.retain(|entry| recovery.profile == RecoveryProfile::Fast && !asked(&entry.0));
        if sweep || !dead.is_empty() {
            let request = RecoverRequest { dead, sweep };
            self.actions.push(Action::Recover(request.clone()));
            self.recovering.begin((request, now.mono));
        }
    }

    pub(super) fn recovered(&mut self, now: Now, recovered: Recovered) {
        let Some((request, asked_at)) = self.recovering.succeed() else { return };
        if request.sweep {
            self.last_sweep = Some(asked_at);
        }
        self.recovered.extend(request.dead.iter().map(|entry| (entry.0, asked_at)));
        for (subscription, cause, count) in recovered.claims {
            let sub = self.index_of(subscription).map(|index| &self.subscribers[index]);
            let name = sub.map_or_else(|| subscription.0.to_string().into(), |sub| sub.name.clone());
            *self.figures.recovered.entry((name, cause.name())).or_default() += count;
        }
        for queue in self.subscribers.iter_mut().filter_map(|sub| sub.queue.as_mut()) {
            queue.wake(now);
        }
    }

    /// Notes who was seen to be dead, for [`Engine::call_recover`].
    pub(super) fn note_dead(&mut self, dead: Vec<(InstanceId, RecoveryCause, Option<i64>)>, seen: &[InstanceId]) {
        self.recovered.retain(|instance, _| seen.contains(instance));
        self.dead_instances = dead;
    }

    /// When something is to be done about queues that do not rest.
    pub(super) fn queue_deadline(&self, now: Now) -> Option<Duration> {
        let queues = self.awake().filter_map(|sub| sub.queue.as_ref());
        let sweep = self.last_sweep.map(|last| last + self.config.recovery.check_interval);
        queues.filter_map(|queue| queue.deadline(now)).chain(sweep).filter(|at| *at > now.mono).min()
    }
}

impl Subscriber {
    /// Notes whether a lane waits to be told which keys have rows.
    fn note_unknown_keys(&mut self) {
        let unknown = self.lanes().any(|lane| lane.keys_unknown);
        self.queue.iter_mut().for_each(|queue| (queue.keys_unknown, queue.held) = (unknown, queue.held && unknown));
    }

    /// Reads nothing of a backlog until it is known which keys have rows: what is read before gets a row, and whatever comes later goes
    /// behind it.
    pub(super) fn hold_backlog(&mut self, horizon: Position) {
        let long = |lane: &Lane| horizon - lane.top > UNKNOWN_BACKLOG_MAX;
        let held = self.queue.as_ref().is_some_and(|queue| queue.keys_unknown) && self.active().any(long);
        self.queue.iter_mut().for_each(|queue| queue.held = held);
    }

    /// A lane was loaded. If it has to be told which keys have rows, that is asked for at once; a look that is under way says nothing of it, and
    /// another one follows.
    pub(super) fn lane_loaded(&mut self, number: u32) {
        self.note_unknown_keys();
        let unknown = self.lane(number).is_some_and(|lane| lane.keys_unknown);
        for queue in self.queue.iter_mut().filter(|_| unknown) {
            queue.told_at = None;
        }
    }

    /// Takes in which keys have rows, once a look at the fleet that began later has shown that the lanes were this instance's still: a
    /// rewind removes rows, and their events come again to whoever has the lane then.
    /// Whether a backlog waited for it.
    pub(super) fn adopt_keys(&mut self, observes: u64) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let held = queue.held;
        let Some(told) = queue.told.take_if(|told| told.observes < observes) else { return false };
        looked_at(told.keys.len());
        for (lane, keys) in self.lanes.iter_mut().zip(told.keys) {
            // Where the number of lanes has changed meanwhile, all have been loaded since.
            if let Some(lane) = lane {
                lane.end_look(told.look, keys);
            }
        }
        self.note_unknown_keys();
        held && self.queue.as_ref().is_some_and(|queue| !queue.held)
    }
}
