use std::collections::HashSet;

use uuid::Uuid;

use super::subscriber::Subscriber;
use super::{Action, Engine, Mutant};
use crate::breaker::{Charge, Permit, RETRY_AFTER_MAX};
use crate::dispatcher::{BatchId, Item};
use crate::{
    Attempt, AttemptError, ClaimFate, DeliveryRow, ERROR_BYTES_MAX, Event, Failed, FailedAttempt, Failure, Fault,
    KeyHash, NextTry, Now, Outcome, Position, State, Timestamp,
};

/// An attempt that failed.
#[derive(Debug, Clone, Copy)]
pub(super) struct FailedTry<'a> {
    pub(super) position: Position,
    /// None: the event was not read.
    pub(super) id: Option<Uuid>,
    pub(super) key: Option<&'a str>,
    /// Which attempt it was.
    pub(super) attempts: u32,
    /// When it first failed, or became a delivery.
    pub(super) since: Timestamp,
    /// Something of the event is no text: see [`Event::malformed`].
    pub(super) malformed: bool,
}

impl<'a> FailedTry<'a> {
    /// The attempt that an event came back from.
    pub(super) fn of(item: &'a Item, since: Timestamp) -> Self {
        let Event { position, id, ref key, ref malformed, .. } = *item.event;
        let malformed = malformed.is_some();
        FailedTry { position, id: Some(id), key: key.as_deref(), attempts: item.attempts + 1, since, malformed }
    }

    /// An attempt whose event was not read.
    pub(super) fn unread(row: &'a DeliveryRow, attempts: u32) -> Self {
        let (key, since) = (row.key.as_deref(), row.since);
        FailedTry { position: row.position, id: None, key, attempts, since, malformed: false }
    }
}

impl Engine {
    pub(super) fn delivered(&mut self, now: Now, (index, batch): (usize, BatchId), outcomes: Vec<Outcome>) {
        let items = self.finish_batch(index, batch);
        let back = self.judge(now, index, &items, outcomes);
        self.subscribers[index].breaker.over(batch);
        self.batch_over(now, index, &items, back, None);
    }

    /// Takes in what became of events; returns those that are to be sent again.
    fn judge<'a>(&mut self, now: Now, index: usize, items: &'a [Item], outcomes: Vec<Outcome>) -> Vec<&'a Item> {
        let mut back = Vec::new();
        let mut outcomes = outcomes.into_iter();
        let (mut delivered, mut tried) = (0, false);
        let mut undelivered: HashSet<KeyHash> = HashSet::new();
        // Of claimed events: keys that failed in this batch.
        let mut stopped: HashSet<KeyHash> = HashSet::new();
        for item in items {
            let outcome = match outcomes.next() {
                // Not its turn: what failed behind an event that comes again may go through behind it.
                Some(Outcome::Failed(_)) if item.key.is_some_and(|key| undelivered.contains(&key)) => Outcome::NotTried,
                outcome => outcome.unwrap_or(Outcome::NotTried),
            };
            if outcome != Outcome::Delivered {
                undelivered.extend(item.key);
            }
            tried |= outcome != Outcome::NotTried;
            delivered += u64::from(outcome == Outcome::Delivered);
            if outcome == Outcome::Delivered {
                self.journal.delivered(&self.subscribers[index], item);
            }
            let again = match (item.claim, outcome) {
                (Some(claim), Outcome::NotTried) if item.key.is_some_and(|key| stopped.contains(&key)) => {
                    let sub = &mut self.subscribers[index];
                    let id = sub.id;
                    sub.queue.iter_mut().for_each(|queue| queue.end(id, claim, ClaimFate::Back));
                    false
                }
                (Some(claim), outcome) => {
                    let failed = matches!(outcome, Outcome::Failed(_));
                    let again = self.claim_over(now, index, item, claim, outcome);
                    if let Some(key) = item.key.filter(|_| failed && !again) {
                        stopped.insert(key);
                        self.subscribers[index].return_claims_of(key);
                    }
                    again
                }
                (None, Outcome::NotTried) => true,
                (None, Outcome::Failed(failure)) => !self.charge(now, index, item, failure),
                (None, Outcome::Delivered) => {
                    self.subscribers[index].succeed(now, item);
                    self.subscribers[index].note_served(item.key);
                    false
                }
            };
            if again {
                back.push(item);
            }
        }
        let sub = &mut self.subscribers[index];
        if delivered > 0 {
            sub.delivered += delivered;
            sub.delivered_at = Some(now.wall);
            *self.journal.figures().delivered.entry(sub.name.clone()).or_default() += delivered;
        }
        if !tried && !items.is_empty() {
            // Calling again at once would be a busy loop, and a flood of duplicates if it did send something.
            sub.breaker.failure(now, "the sink answered for no event of a batch", None);
        }
        back
    }

    /// A batch was given up. Whatever of it has reached the sink, all of it comes again before anything else of its keys: what
    /// arrived first of a key was in order, and so is what comes now.
    pub(super) fn aborted(&mut self, now: Now, (index, batch): (usize, BatchId)) {
        let items = self.finish_batch(index, batch);
        self.subscribers[index].breaker.over(batch);
        self.batch_over(now, index, &items, items.iter().collect(), None);
    }

    fn finish_batch(&mut self, index: usize, batch: BatchId) -> Vec<Item> {
        let sub = &mut self.subscribers[index];
        let items = sub.dispatcher.finish(batch);
        sub.queue.iter_mut().for_each(|queue| queue.over(batch));
        items
    }

    /// Frees the keys of events that are over, but for `busy`; `back` of them comes again.
    fn batch_over(&mut self, now: Now, index: usize, items: &[Item], back: Vec<&Item>, busy: Option<KeyHash>) {
        if items.is_empty() {
            return;
        }
        let (stopping, behind) = (self.member.is_stopping(), self.is_behind_of(index));
        let sub = &mut self.subscribers[index];
        let back = sub.recover_untried(now, back, stopping);
        for item in items.iter().filter(|item| item.key.is_none() || item.key != busy) {
            sub.release_key(now, item);
            if behind {
                sub.throttle_if_served(item.key);
            }
        }
        sub.dispatcher.push_front(back);
        self.reader.try_again();
    }

    /// A worker is held up: what it has done of its batch is over, and the rest is taken back. What belongs to a lane that was lost
    /// meanwhile is dropped.
    pub(super) fn handed_back(&mut self, now: Now, (index, batch): (usize, BatchId), outcomes: Vec<Outcome>) {
        let sub = &mut self.subscribers[index];
        let lanes = &sub.lanes;
        let held = |item: &Item| {
            let lane = lanes.get(item.lane as usize).and_then(Option::as_ref);
            item.claim.is_some() || lane.is_some_and(|lane| lane.epoch == item.epoch && !lane.quiet)
        };
        for item in sub.dispatcher.hand_back(batch, outcomes.len() + 1, held) {
            if let Some(lane) = sub.lane_at(item.lane, item.epoch).filter(|_| item.parked) {
                lane.return_delivery(item.event.position, item.key);
            }
        }
        let items = sub.dispatcher.finish_first(batch, outcomes.len());
        sub.queue.iter_mut().for_each(|queue| queue.begin(batch, now));
        let busy = sub.dispatcher.batch(batch).first().and_then(|item| item.key);
        let back = self.judge(now, index, &items, outcomes);
        self.batch_over(now, index, &items, back, busy);
    }

    /// Deals with a failure; false if the event is to be tried again as if nothing had happened.
    pub(super) fn charge(&mut self, now: Now, index: usize, item: &Item, failure: Failure) -> bool {
        let charge = self.blame(now, index, item, &failure);
        if charge == Charge::Sink {
            return false;
        }
        let sub = &mut self.subscribers[index];
        let position = item.event.position;
        let valid = sub.lane(item.lane).is_some_and(|lane| lane.epoch == item.epoch);
        if !valid {
            sub.breaker.forget(position);
            return true;
        }
        let row = sub.lane(item.lane).and_then(|lane| lane.queues.row(item.key, position));
        let since = row.map_or(now.wall, |row| row.since);
        // An announcement has counted the attempt in the row already; the item knows what was before.
        let failed = self.failed(index, now, FailedTry::of(item, since), &failure, charge);
        let sub = &mut self.subscribers[index];
        let on_dead = sub.definition.on_dead;
        let lane = sub.lane_at(item.lane, item.epoch).expect("checked above");
        if item.parked {
            lane.fail(position, item.key, failed, on_dead);
        } else {
            lane.park(&item.event, failed, now.wall, on_dead);
        }
        true
    }

    /// Whose fault a failure was.
    pub(super) fn blame(&mut self, now: Now, index: usize, item: &Item, failure: &Failure) -> Charge {
        let sub = &mut self.subscribers[index];
        *self.journal.figures().failed.entry((sub.name.clone(), failure.kind)).or_default() += 1;
        if failure.pause {
            sub.breaker.gone(now, &failure.message, failure.retry_after);
            self.pause(index, format!("{} (event {})", failure.message, item.event.id));
            self.tell_failed(now, index, FailedTry::of(item, now.wall), failure, NextTry::Resumed);
            return Charge::Sink;
        }
        let charge = match failure.fault {
            Fault::Event if failure.unsent => Charge::Event,
            Fault::Event => {
                sub.breaker.refused(now, item.key_id(), item.attempts == 0, &failure.message);
                Charge::Event
            }
            Fault::Neither => Charge::Nobody(failure.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX)),
            Fault::Sink | Fault::Unclear => {
                let charge = sub.breaker.suspect(now, item, failure);
                sub.charge_in_a_crowd(now, &self.config, item, charge)
            }
        };
        // What cannot be read says nothing of whoever made the others.
        if charge == Charge::Event && item.event.malformed.is_none() {
            sub.flood_guard.note(now.mono, item.key_id(), true);
        }
        if charge == Charge::Sink {
            let next = NextTry::Uncounted(sub.breaker.next_try(now));
            self.tell_failed(now, index, FailedTry::of(item, now.wall), failure, next);
        }
        charge
    }

    /// The receiver wants nothing more. If pausing fails, the next probe asks for it again.
    fn pause(&mut self, index: usize, reason: String) {
        let asked = |action: &Action| matches!(action, Action::Pause { subscription, .. } if *subscription == index);
        if !self.actions.iter().any(asked) {
            self.actions.push(Action::Pause { subscription: index, reason });
        }
    }

    /// What the failure of an attempt makes of its event. If no attempt is charged, it is the same attempt next time.
    pub(super) fn failed(
        &mut self,
        index: usize,
        now: Now,
        failed_try: FailedTry<'_>,
        failure: &Failure,
        charge: Charge,
    ) -> Failed {
        let FailedTry { attempts, since, malformed, .. } = failed_try;
        let noise = self.noise.next();
        let sub = &mut self.subscribers[index];
        let policy = &sub.definition.retry;
        let counts = charge == Charge::Event;
        let dead = counts && (failure.permanent || policy.is_dead(attempts, now.wall.since(since)));
        let state = if dead && (malformed || !sub.flood_guard.is_open()) { State::Dead } else { State::Retrying };
        if state == State::Dead {
            if !malformed {
                sub.flood_guard.note_dead(now.mono);
            }
            *self.journal.figures().dead.entry(sub.name.clone()).or_default() += 1;
        }
        let asked = failure.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX);
        let wait = match charge {
            Charge::Nobody(wait) if failure.fault == Fault::Neither => wait,
            Charge::Nobody(wait) => policy.delay(attempts, noise).max(asked).max(wait),
            Charge::Event | Charge::Sink => policy.delay(attempts, noise).max(asked),
        };
        let due_at = now.wall.plus(wait);
        let next = match state {
            State::Dead => NextTry::Never,
            _ if counts => NextTry::At(due_at),
            _ => NextTry::Uncounted(due_at),
        };
        self.tell_failed(now, index, failed_try, failure, next);
        let message = match counts {
            true => cut_error(&failure.message),
            false => cut(&failure.message, ERROR_BYTES_MAX - NOT_COUNTED.len()) + NOT_COUNTED,
        };
        let error = AttemptError { at: now.wall, attempt: attempts, kind: failure.kind.into(), message };
        Failed { state, attempts: attempts - u32::from(!counts), due_at, error }
    }

    /// Notes a failed attempt for the log, if there have not been too many.
    pub(super) fn tell_failed(
        &mut self,
        now: Now,
        index: usize,
        failed_try: FailedTry<'_>,
        failure: &Failure,
        next: NextTry,
    ) {
        let attempt = |sub: &Subscriber| FailedAttempt {
            subscription: sub.name.clone(),
            position: failed_try.position,
            event: failed_try.id,
            key: failed_try.key.map(Box::from),
            attempt: failed_try.attempts,
            max_attempts: sub.definition.retry.max_attempts,
            kind: failure.kind,
            error: cut_error(&failure.message),
            next,
        };
        self.journal.failed(now, index, &mut self.subscribers[index], next, attempt);
    }

    pub(super) fn dispatch(&mut self, now: Now, index: usize) {
        if self.subscribers[index].paused || self.member.is_expired() {
            return;
        }
        loop {
            let sub = &mut self.subscribers[index];
            if !sub.dispatcher.has_idle_worker() || !sub.dispatcher.has_ready() {
                return;
            }
            let breaker = &sub.breaker;
            let permit = breaker.permit(now);
            let batch = match permit {
                Permit::Nothing => return,
                Permit::Other if self.config.mutant == Some(Mutant::SuspectStopsAll) => return,
                Permit::All => sub.dispatcher.cut(|position| breaker.suspects(position)),
                // What was not fit is not looked through again before something has changed.
                Permit::Probe | Permit::Other if sub.fruitless == Some((permit, sub.dispatcher.changes())) => return,
                Permit::Probe | Permit::Other => sub.dispatcher.cut_probe(|item| {
                    breaker.unfitness(permit, item.event.position, item.key_id(), item.attempts == 0)
                }),
            };
            sub.fruitless = batch.is_none().then(|| (permit, sub.dispatcher.changes()));
            let Some(batch) = batch else { return };
            sub.breaker.begin(permit, batch);
            sub.queue.iter_mut().for_each(|queue| queue.begin(batch, now));
            let items = sub.dispatcher.batch(batch);
            // It is alone.
            if let Some(what) = items.first().and_then(|item| item.event.malformed.as_deref()) {
                let outcome = Outcome::Failed(Failure::unsendable("malformed", what));
                self.delivered(now, (index, batch), vec![outcome]);
                continue;
            }
            let events = items.iter().map(attempt_at).collect();
            if self.config.mutant == Some(Mutant::SettleBeforeDeliver) {
                sub.settle_early(batch);
            }
            self.actions.push(Action::Deliver { batch: (index, batch), events });
        }
    }
}

/// What the sink is given of an event.
fn attempt_at(item: &Item) -> Attempt {
    Attempt {
        event: item.event.clone(),
        number: item.attempts + 1,
        lane: item.claim.is_none().then_some(item.lane),
        epoch: item.epoch,
        claim: item.claim,
    }
}

impl Subscriber {
    /// What a deliberately broken variant does: the events of a batch count as settled when they are handed to the sink.
    fn settle_early(&mut self, batch: BatchId) {
        for item in self.dispatcher.batch(batch).iter().filter(|item| item.claim.is_none()) {
            let lane = self.lanes[item.lane as usize].as_mut();
            lane.into_iter().for_each(|lane| lane.done(item.event.position, item.event.id));
        }
    }
}

/// An error message of the length that is kept.
fn cut_error(message: &str) -> String {
    cut(message, ERROR_BYTES_MAX)
}

fn cut(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max)].to_owned()
}

/// Stands behind the error of an attempt that does not count.
const NOT_COUNTED: &str = " (not counted as an attempt)";
