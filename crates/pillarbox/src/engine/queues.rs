use std::collections::HashMap;
use std::time::Duration;

use super::delivering::FailedTry;
use super::queue::{Queue, Slice, is_slow};
use super::slot::Slot;
use super::{Action, Engine, RecoveryProfile};
use crate::attempt_log::NextTry;
use crate::breaker::{Charge, Permit};
use crate::dispatcher::{Item, NO_LANE};
use crate::lane::Lane;
use crate::queue::{CRASH, RecoveredAttempt};
use crate::work::looked_at;
use crate::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Failure, InstanceId, KeyHash, Now, Outcome,
    RecoverRequest, Recovered, RecoveryCause, State, SubscriptionId,
};

/// How many claims are ended by one call: settlements wait for it.
const FINISHED_AT_ONCE_MAX: usize = 500;
/// Claimed at once, at most.
const CLAIMS_MAX: usize = 1_000;
/// As long as an ended instance is seen its claims are asked for this often: some may have been locked when they first were.
const RECOVER_AGAIN: Duration = Duration::from_secs(1);

/// The claims of all queues: those that are asked for, ended, or taken from ended instances.
#[derive(Debug, Default)]
pub(super) struct Queues {
    ids: ClaimIds,
    claim: Slot<Vec<Asked>>,
    /// Requests with an unknown outcome.
    unknown: Vec<Asked>,
    finish: Slot<Vec<ClaimEnd>>,
    /// What is to be recovered, and when that was asked for.
    recover: Slot<(RecoverRequest, Duration)>,
    last_sweep: Option<Duration>,
    /// Instances whose claims are to be recovered, as last seen.
    ended: Vec<(InstanceId, RecoveryCause, Option<i64>)>,
    /// When the claims of ended instances were last recovered.
    recovered: HashMap<InstanceId, Duration>,
}

/// A request under way.
#[derive(Debug)]
struct Asked {
    sub: usize,
    request: ClaimRequest,
}

/// The numbers of this instance's claims, from 1.
#[derive(Debug)]
pub(super) struct ClaimIds {
    next: i64,
}

impl Default for ClaimIds {
    fn default() -> Self {
        ClaimIds { next: 1 }
    }
}

impl ClaimIds {
    /// The first of the next `count` numbers.
    pub(super) fn draw(&mut self, count: usize) -> ClaimId {
        let first = ClaimId(self.next);
        self.next += count as i64;
        first
    }
}

impl Queues {
    /// The numbers of this instance's claims.
    pub(super) fn ids(&mut self) -> &mut ClaimIds {
        &mut self.ids
    }

    /// Whether a call is under way.
    pub(super) fn is_calling(&self) -> bool {
        self.claim.is_busy() || self.finish.is_busy() || self.recover.is_busy()
    }

    /// Whether claims may be this instance's that no queue knows of.
    pub(super) fn has_claims(&self) -> bool {
        self.claim.is_busy() || self.finish.is_busy() || !self.unknown.is_empty()
    }

    /// When calls that failed may be made again.
    pub(super) fn deadlines(&self) -> [Option<Duration>; 3] {
        [self.claim.retry_at(), self.finish.retry_at(), self.recover.retry_at()]
    }

    /// What a claim that was not answered has claimed, if anything, is told when the same is asked for again.
    pub(super) fn claim_failed(&mut self, now: Now) {
        let asked = self.claim.fail(now).unwrap_or_default().into_iter();
        self.unknown.extend(asked.map(|Asked { sub, request }| {
            let request = ClaimRequest { again: true, ..request };
            Asked { sub, request }
        }));
    }

    pub(super) fn recover_failed(&mut self, now: Now) {
        self.recover.fail(now);
    }

    /// Notes who was seen to have ended, for [`Engine::call_recover`].
    pub(super) fn note_ended(&mut self, ended: Vec<(InstanceId, RecoveryCause, Option<i64>)>, seen: &[InstanceId]) {
        self.recovered.retain(|instance, _| seen.contains(instance));
        self.ended = ended;
    }
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
        let stopping = self.member.is_stopping() || sub.paused || down;
        let full = !sub.has_room(&self.config);
        sub.reset_quota(now, self.queues.ids(), behind, full, self.config.in_flight);
        let slow = sub.note_slow(now);
        let Some(queue) = &mut sub.queue else { return };
        // What was read while every worker was at something slow is nobody's turn here.
        let waits = sub.dispatcher.idle_workers() == 0 && sub.dispatcher.has_ready();
        let stuck = waits && sub.dispatcher.running().all(|(batch, items)| is_slow(queue, batch, items, now));
        if slow || stuck {
            queue.note_congestion(now);
            sub.spill_all(now, self.queues.ids());
        }
        if sub.dispatcher.may_hold_claims() && (slow || stuck || stopping) {
            sub.return_claims();
        }
    }

    pub(super) fn is_behind_of(&self, index: usize) -> bool {
        let sub = &self.subscribers[index];
        let behind =
            |lane: &Lane| lane.cursor.top() < self.reader.horizon() && lane.cursor.may_rise(self.config.ranges_max);
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
                if queue.settles() {
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
        let queue = self.subscribers[index].queue.as_ref();
        let since = queue.and_then(|queue| queue.since(claim)).unwrap_or(now.wall);
        self.claim_failed(now, index, claim, FailedTry::of(item, since), &failure, charge);
        false
    }

    fn claim_failed(
        &mut self,
        now: Now,
        index: usize,
        claim: ClaimId,
        failed_try: FailedTry<'_>,
        failure: &Failure,
        charge: Charge,
    ) {
        let queue = self.subscribers[index].queue.as_ref();
        if !queue.is_some_and(|queue| queue.works_on(claim)) {
            return;
        }
        if matches!(charge, Charge::Nobody(_)) {
            self.subscribers[index].breaker.note_returned(failed_try.position);
        }
        let failed = self.failed(index, now, failed_try, failure, charge);
        let sub = &mut self.subscribers[index];
        if let Some(queue) = &mut sub.queue {
            queue.end(sub.id, claim, ClaimFate::Failed(failed));
        }
    }

    /// The rows of these claims were written with a lane's cursor. If the lane was lost they may have been written by a call that was
    /// not answered: ending the claims tells.
    pub(super) fn rows_settled(&mut self, now: Now, subscription: SubscriptionId, claims: &[ClaimId], added: usize) {
        let Some(sub) = self.subscribers.find_mut(subscription) else { return };
        let Some(queue) = &mut sub.queue else { return };
        claims.iter().for_each(|claim| queue.written(subscription, *claim));
        // While all may be claimed, each claim's answer counts them; what has ended since is not added up here.
        if sub.breaker.permit(now) != Permit::All {
            queue.add_rows(added as u64);
        }
        queue.made_ready(now);
    }

    pub(super) fn claimed(&mut self, now: Now, answers: Vec<Claims>) {
        let asked = self.queues.claim.succeed().unwrap_or_default();
        let looks = self.member.looks();
        for (asked, answer) in asked.into_iter().zip(answers) {
            let Asked { sub: index, request } = asked;
            let Some(queue) = &mut self.subscribers[index].queue else { continue };
            if queue.claimed(now, &request, &answer, self.config.max_blocked as u64) {
                self.reader.ring(now);
            }
            answer.keys.iter().for_each(|keys| queue.add_keys(keys, looks));
            // What was told is taken in with the next look at the fleet.
            if queue.knows_keys() {
                self.member.observe_soon();
            }
            answer.claimed.into_iter().for_each(|claimed| self.begin_claim(now, index, claimed));
        }
        self.reader.try_again();
    }

    fn begin_claim(&mut self, now: Now, index: usize, claimed: Claimed) {
        let Claimed { claim, delivery, event, suspect } = claimed;
        let sub = &mut self.subscribers[index];
        let Some(queue) = &mut sub.queue else { return };
        queue.work_on(claim, &delivery, suspect);
        let Some(event) = event else {
            let failure = Failure::permanent("the event is neither in the log nor kept aside");
            let failed_try = FailedTry::unread(&delivery, delivery.attempts + 1);
            return self.claim_failed(now, index, claim, failed_try, &failure, Charge::Event);
        };
        queue.note_size(event.size());
        sub.dispatcher.push(Item {
            key: event.key_hash(),
            room: sub.bytes.reserve(event.size()),
            event,
            lane: NO_LANE,
            epoch: 0,
            attempts: delivery.attempts,
            parked: false,
            claim: Some(claim),
        });
    }

    pub(super) fn finished(&mut self, now: Now, written: Vec<bool>) {
        let again = self.queues.finish.has_failed();
        for (end, written) in self.queues.finish.succeed().unwrap_or_default().into_iter().zip(written) {
            let Some(sub) = self.subscribers.find_mut(end.subscription) else { continue };
            // An end that was not answered may have been written, and is refused the second time.
            if !written && !again && end.fate != ClaimFate::Back {
                *self.journal.figures().refused.entry(sub.name.clone()).or_default() += 1;
            }
            sub.queue.iter_mut().for_each(|queue| queue.made_ready(now));
        }
    }

    /// Claims that could not be ended are ended again.
    pub(super) fn finish_failed(&mut self, now: Now) {
        for end in self.queues.finish.fail(now).unwrap_or_default() {
            let sub = self.subscribers.find_mut(end.subscription);
            let queue = sub.and_then(|sub| sub.queue.as_mut());
            queue.into_iter().for_each(|queue| queue.restore_end(end.clone()));
        }
    }

    pub(super) fn call_claim(&mut self, now: Now) {
        if !self.queues.claim.is_free(now) || self.member.is_expired() || !self.member.has_seen_fleet() {
            return;
        }
        let mut asked = std::mem::take(&mut self.queues.unknown);
        if asked.is_empty() && !self.member.is_draining() {
            let awake = (0..self.subscribers.len()).filter(|index| !self.subscribers[*index].resting);
            let awake: Vec<usize> = awake.collect();
            asked = awake.into_iter().filter_map(|index| self.claim_request(now, index)).collect();
        }
        if !asked.is_empty() {
            self.actions.push(Action::Claim(asked.iter().map(|asked| asked.request.clone()).collect()));
            self.queues.claim.begin(asked);
        }
    }

    fn claim_request(&mut self, now: Now, index: usize) -> Option<Asked> {
        let sub = &self.subscribers[index];
        let queue = sub.queue.as_ref()?;
        looked_at(1);
        let permit = sub.breaker.permit(now);
        let early = queue.is_early(now);
        if sub.paused || permit == Permit::Nothing || (early && !queue.must_know_keys(now)) {
            return None;
        }
        let each = if queue.is_slow(now) { 1 } else { sub.spec.batch_size };
        let bytes_left = self.config.in_flight_bytes_max.saturating_sub(sub.bytes.used());
        let limit = (sub.dispatcher.idle_workers() * each).min(CLAIMS_MAX).saturating_sub(sub.dispatcher.ready_len());
        let limit = limit.min(queue.fitting(bytes_left));
        let limit = if permit == Permit::All { limit } else { limit.min(1) };
        let limit = if early { 0 } else { limit };
        let tell = queue.wants_keys(now);
        if limit == 0 && !tell {
            return None;
        }
        let (subscription, suspect) = (sub.id, queue.may_suspect());
        let first = self.queues.ids.draw(limit);
        let sub = &mut self.subscribers[index];
        sub.queue.iter_mut().filter(|_| limit > 0).for_each(Queue::ask);
        let tell = tell.then(|| self.next_slice(index));
        Some(Asked { sub: index, request: ClaimRequest { subscription, limit, first, suspect, tell, again: false } })
    }

    /// Above which key the next slice of keys with rows begins. A new look makes the lanes note what it may miss.
    fn next_slice(&mut self, index: usize) -> Box<str> {
        let sub = &mut self.subscribers[index];
        let Some(queue) = &mut sub.queue else { return Box::default() };
        let look = match queue.next_slice(sub.lane_count) {
            Slice::From(key) => return key,
            Slice::First(look) => look,
        };
        looked_at(self.settler.lanes() + sub.lanes.len());
        let mut unwritten: HashMap<u32, Vec<KeyHash>> = HashMap::new();
        for write in self.settler.writes().filter(|write| write.lane.subscription == sub.id && !write.queue.is_empty())
        {
            let keys = write.queue.iter().filter_map(|queued| queued.delivery.key_hash());
            looked_at(write.queue.len());
            unwritten.entry(write.lane.lane).or_default().extend(keys);
        }
        for lane in sub.lanes.iter_mut().flatten() {
            let keys = unwritten.remove(&lane.reference.lane).unwrap_or_default();
            lane.begin_look(look, keys.into_iter());
        }
        Box::default()
    }

    pub(super) fn call_finish(&mut self, now: Now) {
        if !self.queues.finish.is_free(now) {
            return;
        }
        let queues = self.subscribers.awake_mut().filter_map(|sub| sub.queue.as_mut());
        let mut ends: Vec<ClaimEnd> = Vec::new();
        for queue in queues {
            let room = FINISHED_AT_ONCE_MAX - ends.len();
            ends.extend(queue.take_ends(room));
        }
        if !ends.is_empty() {
            self.actions.push(Action::Finish(ends.clone()));
            self.queues.finish.begin(ends);
        }
    }

    pub(super) fn call_recover(&mut self, now: Now) {
        let recovery = self.config.recovery;
        let runs_queues = self.subscribers.iter().any(|sub| sub.queue.is_some());
        if !recovery.enabled || !runs_queues || self.member.is_draining() || !self.member.has_seen_fleet() {
            return;
        }
        if !self.queues.recover.is_free(now) {
            return;
        }
        let sweep = self.queues.last_sweep.is_none_or(|last| now.mono >= last + recovery.check_interval);
        let mut ended = std::mem::take(&mut self.queues.ended);
        let asked = |id: &InstanceId| self.queues.recovered.get(id).is_some_and(|at| now.mono < *at + RECOVER_AGAIN);
        ended.retain(|entry| recovery.profile == RecoveryProfile::Fast && !asked(&entry.0));
        if sweep || !ended.is_empty() {
            let silent = if sweep { self.member.silent() } else { Vec::new() };
            let request = RecoverRequest { ended, sweep, silent };
            self.actions.push(Action::Recover(request.clone()));
            self.queues.recover.begin((request, now.mono));
        }
    }

    pub(super) fn recovered(&mut self, now: Now, recovered: Recovered) {
        let Some((request, asked_at)) = self.queues.recover.succeed() else { return };
        if request.sweep {
            self.queues.last_sweep = Some(asked_at);
        }
        self.queues.recovered.extend(request.ended.iter().map(|entry| (entry.0, asked_at)));
        for (subscription, cause, count) in recovered.claims {
            let sub = self.subscribers.find(subscription);
            let name = sub.map_or_else(|| subscription.0.to_string().into(), |sub| sub.name.clone());
            *self.journal.figures().recovered.entry((name, cause.name())).or_default() += count;
        }
        recovered.attempts.iter().for_each(|attempt| self.tell_recovered(now, attempt));
        for queue in self.subscribers.iter_mut().filter_map(|sub| sub.queue.as_mut()) {
            queue.wake(now);
        }
    }

    /// An attempt of another process has failed with it; only this instance knows.
    fn tell_recovered(&mut self, now: Now, attempt: &RecoveredAttempt) {
        let RecoveredAttempt { subscription, position, key, failed } = attempt;
        let Some(index) = self.subscribers.index_of(*subscription) else { return };
        let next = if failed.state == State::Dead { NextTry::Never } else { NextTry::At(failed.due_at) };
        let failed_try = FailedTry {
            position: *position,
            id: None,
            key: key.as_deref(),
            attempts: failed.attempts,
            since: now.wall,
            malformed: false,
        };
        let failure = Failure { kind: CRASH, ..Failure::event(failed.error.message.clone()) };
        self.tell_failed(now, index, failed_try, &failure, next);
    }

    /// When something is to be done about queues that do not rest.
    pub(super) fn queue_deadline(&self, now: Now) -> Option<Duration> {
        let queues = self.subscribers.awake().filter_map(|sub| sub.queue.as_ref());
        let sweep = self.queues.last_sweep.map(|last| last + self.config.recovery.check_interval);
        queues.filter_map(|queue| queue.deadline(now)).chain(sweep).filter(|at| *at > now.mono).min()
    }
}
