use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::store::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Epoch, Failed, InstanceId, KEYS_TOLD_MAX, KeyHash,
    LaneRef, Queued, RecoverRequest, Recovered, RecoveredAttempt, RecoveryCause, SUSPECT_AFTER, SubscriptionId,
    WAITING_COUNTED, recovered,
};
use pillarbox::{Event, Mode, OnDead, Position, Result, RetryPolicy, Timestamp};

use crate::memory_lane::{Lane, Row};
use crate::memory_log::{Inner, SubscriptionRow};
use crate::{Broken, MemoryLog};

/// Who works on a row of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) owner: InstanceId,
    pub(crate) claim: ClaimId,
    pub(crate) since: Timestamp,
}

/// From when on a row that is its key's head can be claimed; those of one time in the order in which they became so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    pub(crate) at: Timestamp,
    pub(crate) number: u64,
}

/// What is known of an owner of claims: its beat, and when that was.
type Beats = BTreeMap<InstanceId, (i64, Timestamp)>;

/// Queues. What is named like a function of [`Store`](pillarbox::store::Store) keeps its contract.
impl MemoryLog {
    /// See [`Store::claim`](pillarbox::store::Store::claim). Also for an instance that is not there any more: what a process has sent may be
    /// carried out after its end.
    pub fn claim(&self, instance: InstanceId, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        let mut inner = self.inner();
        inner.flush();
        Ok(requests.iter().map(|request| inner.claim(instance, request)).collect())
    }

    /// See [`Store::finish`](pillarbox::store::Store::finish).
    pub fn finish(&self, instance: InstanceId, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        let mut inner = self.inner();
        let ended = ends.iter().map(|end| inner.end_claim(instance, end)).collect();
        inner.promote();
        Ok(ended)
    }

    /// See [`Store::recover`](pillarbox::store::Store::recover).
    pub fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        let recovered = self.inner().recover(request);
        if !recovered.claims.is_empty() {
            self.ring();
        }
        Ok(recovered)
    }

    /// Whether an instance owns a lane at this epoch; for auditors.
    pub fn owns(&self, instance: InstanceId, lane: LaneRef, epoch: Epoch) -> bool {
        self.inner().lane(lane).is_some_and(|row| row.owner == Some(instance) && row.epoch == epoch)
    }

    /// Who works on what: subscription, position, owner and claim; for auditors.
    pub fn claims(&self) -> Vec<(SubscriptionId, Position, InstanceId, ClaimId)> {
        let inner = self.inner();
        let of_lane = |(lane, row): (LaneRef, &Lane)| {
            let held = row.deliveries.iter().filter_map(|(position, row)| Some((*position, row.claim?)));
            let named = held.map(|(position, held)| (lane.subscription, position, held.owner, held.claim));
            named.collect::<Vec<_>>()
        };
        inner.lanes().flat_map(of_lane).collect()
    }
}

impl Inner {
    fn claim(&mut self, instance: InstanceId, request: &ClaimRequest) -> Claims {
        let (now, broken) = (self.now, self.options.broken);
        let Some(row) = self.subscriptions.iter_mut().find(|row| row.id == request.subscription) else {
            return Claims::default();
        };
        let woken = row.lanes.iter_mut().map(|lane| lane.wake_delayed(now, broken)).sum::<usize>();
        if woken > 0 {
            self.promote();
        }
        let Some(row) = self.subscriptions.iter_mut().find(|row| row.id == request.subscription) else {
            return Claims::default();
        };
        let mut ready = row.ready(now, broken);
        let waiting = ready.len();
        let told = row.told_before(instance, request, broken);
        let is_new = told.is_empty();
        let chosen = if is_new { row.choose(&mut ready, request, broken) } else { told };
        let mut claimed = Vec::with_capacity(chosen.len());
        for (number, (lane, position)) in (request.first.0..).zip(chosen) {
            let Some(found) = row.lanes[lane].deliveries.get_mut(&position) else { continue };
            let held = Held { owner: instance, claim: ClaimId(number), since: now };
            let claim = if is_new { *found.claim.insert(held) } else { found.claim.unwrap_or(held) }.claim;
            found.delivery.state = State::Processing;
            let suspect = found.crashes >= SUSPECT_AFTER;
            claimed.push(Claimed { claim, delivery: found.delivery.clone(), event: None, suspect });
        }
        let new = if is_new { claimed.len() } else { 0 };
        let mut claims = Claims {
            waiting: (waiting - new).min(WAITING_COUNTED),
            next_due: row.next_due(now),
            keys: request.tell.as_deref().map(|after| row.queued_keys(after)),
            rows: request
                .tell
                .is_some()
                .then(|| row.rows().filter(|found| !is_aside(found.delivery.state)).count() as u64),
            claimed,
        };
        claims.claimed.iter_mut().for_each(|claimed| claimed.event = self.event_at(claimed.delivery.position));
        claims
    }

    pub(crate) fn event_at(&self, position: Position) -> Option<Arc<Event>> {
        self.rows.get(&position).or_else(|| self.kept.get(&position)).cloned()
    }

    fn end_claim(&mut self, instance: InstanceId, end: &ClaimEnd) -> bool {
        let (now, broken) = (self.now, self.options.broken);
        let row = self.subscriptions.iter_mut().find(|row| row.id == end.subscription);
        let Some(lane) = row.and_then(|row| row.lane_with(end.position)) else { return false };
        let Some(row) = lane.deliveries.get_mut(&end.position) else { return false };
        let current = row.claim.is_some_and(|held| held.owner == instance && held.claim == end.claim);
        if !current && broken != Some(Broken::FinishIgnoresClaim) {
            return false;
        }
        match &end.fate {
            ClaimFate::Done => _ = lane.deliveries.remove(&end.position),
            ClaimFate::Failed(failed) if broken == Some(Broken::FailedIsDueAtOnce) => {
                row.fail(Failed { due_at: now, ..failed.clone() }, now);
            }
            ClaimFate::Failed(failed) => row.fail(failed.clone(), now),
            ClaimFate::Back => {
                row.delivery.attempts += u32::from(broken == Some(Broken::BackCountsAttempt));
                row.give_back();
            }
        }
        true
    }

    fn recover(&mut self, request: &RecoverRequest) -> Recovered {
        let (now, broken) = (self.now, self.options.broken);
        let beats = self.beats();
        let recovered = self.recover_where(|row, held| {
            let beat = beats.get(&held.owner);
            let dead = request.ended.iter().filter(|(owner, ..)| *owner == held.owner).find(|(_, cause, seen)| {
                let moved = seen.is_some_and(|seen| beat.is_some_and(|(beat, _)| *beat != seen));
                *cause != RecoveryCause::Lease || !moved || broken == Some(Broken::RecoverFromTheLiving)
            });
            let timeout = row.definition.processing_timeout;
            let silent = |(beat, beat_at): &(i64, Timestamp)| {
                let same = |(owner, seen, time): &(InstanceId, i64, Duration)| {
                    *owner == held.owner && seen == beat && *time >= timeout
                };
                let by_clock = broken == Some(Broken::SweepByDatabaseClock) && now.since(*beat_at) >= timeout;
                by_clock || request.silent.iter().any(same)
            };
            match (dead, beat) {
                (Some((_, cause, _)), _) => Some(*cause),
                (None, None) if request.sweep && broken != Some(Broken::SweepForgetsTheBuried) => {
                    Some(RecoveryCause::Crash)
                }
                (None, Some(beat)) if request.sweep && silent(beat) => Some(RecoveryCause::Timeout),
                _ => None,
            }
        });
        if request.sweep {
            self.recovery_at = Some(now);
        }
        recovered
    }

    /// Takes the claims away for which there is a cause, and counts them.
    pub(crate) fn recover_where(
        &mut self,
        cause: impl Fn(&SubscriptionRow, &Held) -> Option<RecoveryCause>,
    ) -> Recovered {
        let (now, broken) = (self.now, self.options.broken);
        let mut counts: BTreeMap<(SubscriptionId, RecoveryCause), u64> = BTreeMap::new();
        let mut attempts = Vec::new();
        for row in &mut self.subscriptions {
            let held = row.rows().filter_map(|found| Some((found.delivery.position, found.claim?)));
            let caused = held.filter_map(|(position, held)| Some((position, cause(row, &held)?)));
            let caused: Vec<(Position, RecoveryCause)> = caused.collect();
            for (position, cause) in caused {
                *counts.entry((row.id, cause)).or_default() += 1;
                attempts.extend(row.recover(position, cause, now, broken));
            }
        }
        self.promote();
        let claims = counts.into_iter().map(|((subscription, cause), count)| (subscription, cause, count));
        Recovered { claims: claims.collect(), attempts }
    }

    pub(crate) fn beats(&self) -> Beats {
        self.instances.iter().map(|(id, instance)| (*id, (instance.beat, instance.beat_at))).collect()
    }

    /// The claims of an instance that ends by itself go back, as if they had never been made.
    pub(crate) fn give_back_claims(&mut self, instance: InstanceId) {
        if self.options.broken == Some(Broken::LeaveStrandsClaims) {
            return;
        }
        let lanes = self.subscriptions.iter_mut().flat_map(|row| &mut row.lanes);
        let rows = lanes.flat_map(|lane| lane.deliveries.values_mut());
        rows.filter(|row| row.claim.is_some_and(|held| held.owner == instance)).for_each(Row::give_back);
    }

    /// Gives every row of a queue that has become its key's head its turn.
    pub(crate) fn promote(&mut self) {
        let (now, broken) = (self.now, self.options.broken);
        let Inner { subscriptions, turn_next, .. } = self;
        for row in subscriptions.iter_mut().filter(|row| row.mode == Mode::Queue) {
            let on_dead = if broken == Some(Broken::DeadNeverBlocks) { OnDead::Skip } else { row.definition.on_dead };
            row.lanes.iter_mut().for_each(|lane| lane.promote(on_dead, now, turn_next, broken));
        }
    }
}

impl SubscriptionRow {
    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.lanes.iter().flat_map(|lane| lane.deliveries.values())
    }

    fn lane_with(&mut self, position: Position) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.deliveries.contains_key(&position))
    }

    /// What can be claimed now, by lane and position, in the order in which it became ready.
    fn ready(&self, now: Timestamp, broken: Option<Broken>) -> Vec<(usize, Position)> {
        let free = |row: &&Row| row.claim.is_none() || broken == Some(Broken::ClaimsWhatIsTaken);
        let due = |turn: &Turn| turn.at <= now || broken == Some(Broken::ClaimsBeforeDue);
        let mut ready = Vec::new();
        for (number, lane) in self.lanes.iter().enumerate() {
            for row in lane.deliveries.values().filter(free) {
                ready.extend(row.turn.filter(due).map(|turn| (turn, row.delivery.arrival, number, row)));
            }
        }
        match broken {
            Some(Broken::KeysTakeNoTurns) => ready.sort_by_key(|(_, arrival, ..)| *arrival),
            _ => ready.sort_by_key(|(turn, ..)| *turn),
        }
        ready.into_iter().map(|(.., lane, row)| (lane, row.delivery.position)).collect()
    }

    /// What the same request has claimed before, if it was not answered.
    fn told_before(
        &self,
        instance: InstanceId,
        request: &ClaimRequest,
        broken: Option<Broken>,
    ) -> Vec<(usize, Position)> {
        if !request.again || broken == Some(Broken::UnansweredClaimsAreLost) {
            return Vec::new();
        }
        let numbers = request.first.0..request.first.0 + request.limit as i64;
        let its_own = |held: &Held| held.owner == instance && numbers.contains(&held.claim.0);
        let mut told = Vec::new();
        for (number, lane) in self.lanes.iter().enumerate() {
            let held =
                lane.deliveries.iter().filter_map(|(position, row)| Some((row.claim.filter(its_own)?, *position)));
            told.extend(held.map(|(held, position)| (held.claim, number, position)));
        }
        told.sort_unstable();
        told.into_iter().map(|(_, lane, position)| (lane, position)).collect()
    }

    /// At most one that may be what kills its process, and only if that is asked for.
    fn choose(
        &self,
        ready: &mut Vec<(usize, Position)>,
        request: &ClaimRequest,
        broken: Option<Broken>,
    ) -> Vec<(usize, Position)> {
        let mut suspects = usize::from(request.suspect);
        ready.retain(|(lane, position)| {
            let row = self.lanes[*lane].deliveries.get(position);
            let suspect = row.is_some_and(|row| row.crashes >= SUSPECT_AFTER);
            if !suspect || broken == Some(Broken::SuspectsTogether) {
                return true;
            }
            std::mem::replace(&mut suspects, 0) > 0
        });
        ready.truncate(request.limit);
        std::mem::take(ready)
    }

    fn next_due(&self, now: Timestamp) -> Option<Timestamp> {
        let due = |row: &Row| match row.delivery.state {
            State::Delayed => Some(row.delivery.due_at),
            _ => row.turn.map(|turn| turn.at),
        };
        self.rows().filter(|row| row.claim.is_none()).filter_map(due).filter(|at| *at > now).min()
    }

    /// The next keys above this one with a row.
    fn queued_keys(&self, after: &str) -> Vec<Box<str>> {
        let keys: BTreeSet<&Box<str>> = self.rows().filter_map(|row| row.delivery.key.as_ref()).collect();
        keys.into_iter().filter(|key| &***key > after).take(KEYS_TOLD_MAX).cloned().collect()
    }

    fn recover(
        &mut self,
        position: Position,
        cause: RecoveryCause,
        now: Timestamp,
        broken: Option<Broken>,
    ) -> Option<RecoveredAttempt> {
        let (id, retry) = (self.id, self.definition.retry);
        let counted = self.recovered.entry(cause).or_insert((0, now));
        *counted = (counted.0 + 1, now);
        let row = self.lane_with(position)?.deliveries.get_mut(&position)?;
        let delivery = row.delivery.clone();
        let failed = row.recover(&retry, cause, now, broken);
        Some(RecoveredAttempt::new(id, &delivery, failed))
    }
}

impl Lane {
    /// What was delayed and is due takes its place behind what its key has now; how many did.
    fn wake_delayed(&mut self, now: Timestamp, broken: Option<Broken>) -> usize {
        let delayed = |row: &&Row| row.delivery.state == State::Delayed && row.delivery.due_at <= now;
        let mut due: Vec<_> =
            self.deliveries.values().filter(delayed).map(|row| (row.delivery.due_at, row.delivery.position)).collect();
        due.sort_unstable();
        let mut arrival = self.next_arrival();
        for (_, position) in &due {
            let Some(row) = self.deliveries.get_mut(position) else { continue };
            row.delivery.state = State::Pending;
            if broken != Some(Broken::DelayedKeepsItsPlace) {
                row.delivery.arrival = arrival;
                arrival += 1;
            }
        }
        due.len()
    }

    fn promote(&mut self, on_dead: OnDead, now: Timestamp, turn_next: &mut u64, broken: Option<Broken>) {
        let claimed = self.deliveries.values().filter(|row| row.claim.is_some());
        let mut taken: HashSet<KeyHash> = claimed.filter_map(|row| row.delivery.key_hash()).collect();
        let mut waiting: Vec<&mut Row> = self.deliveries.values_mut().filter(|row| row.claim.is_none()).collect();
        waiting.sort_by_key(|row| (row.delivery.arrival, row.delivery.position));
        for row in waiting {
            let key = row.delivery.key_hash();
            let free = key.is_none_or(|key| !taken.contains(&key));
            let waits = matches!(row.delivery.state, State::Pending | State::Retrying);
            if !waits || !(free || broken == Some(Broken::ClaimsBehindTheHead)) {
                row.turn = None;
            } else if row.turn.is_none() {
                row.turn = Some(Turn { at: row.delivery.due_at.max(now), number: *turn_next });
                *turn_next += 1;
            }
            if waits || (row.delivery.state == State::Dead && on_dead == OnDead::Block) {
                taken.extend(key);
            }
        }
    }

    /// What has no row and is not settled yet: a settlement that is repeated brings nothing back that was done meanwhile.
    pub(crate) fn unqueued(&self, queue: &[Queued], broken: Option<Broken>) -> Vec<Queued> {
        let new = |queued: &&Queued| {
            let position = queued.delivery.position;
            match (self.deliveries.contains_key(&position), self.settled(position)) {
                (true, _) => broken == Some(Broken::QueueReplaces),
                (false, true) => broken == Some(Broken::QueueRepeats),
                (false, false) => true,
            }
        };
        queue.iter().filter(new).cloned().collect()
    }

    /// Gives events of a queue their rows, behind those that their keys have.
    pub(crate) fn write_queue(&mut self, queue: Vec<Queued>, instance: InstanceId, now: Timestamp) {
        for Queued { mut delivery, claim, error } in queue {
            delivery.arrival = self.next_arrival();
            let mut row = Row::new(delivery, now);
            row.claim = claim.map(|claim| Held { owner: instance, claim, since: now });
            row.errors.extend(error);
            self.deliveries.insert(row.delivery.position, row);
        }
    }

    pub(crate) fn queued_keys(&self, broken: Option<Broken>) -> Vec<Box<str>> {
        let told = |row: &&Row| row.claim.is_none() || broken != Some(Broken::LoadForgetsClaimedKeys);
        let keys: BTreeSet<&Box<str>> =
            self.deliveries.values().filter(told).filter_map(|row| row.delivery.key.as_ref()).collect();
        keys.into_iter().cloned().collect()
    }
}

impl Row {
    fn fail(&mut self, failed: Failed, now: Timestamp) {
        let Failed { state, attempts, due_at, error } = failed;
        self.set(pillarbox::store::DeliveryRow { state, attempts, due_at, ..self.delivery.clone() }, now);
        self.note(error);
        self.free();
    }

    fn recover(
        &mut self,
        policy: &RetryPolicy,
        cause: RecoveryCause,
        now: Timestamp,
        broken: Option<Broken>,
    ) -> Failed {
        let mut failed = recovered(policy, &self.delivery, cause, now);
        if broken == Some(Broken::RecoveryCountsNoAttempt) {
            failed.attempts = self.delivery.attempts;
        }
        self.crashes += 1;
        self.fail(failed.clone(), now);
        failed
    }

    fn give_back(&mut self) {
        self.claim = None;
        self.delivery.state = if self.delivery.attempts > 0 { State::Retrying } else { State::Pending };
    }

    /// Nobody's any more, and its turn is to be given anew.
    pub(crate) fn free(&mut self) {
        (self.claim, self.turn) = (None, None);
    }
}

/// Whether a delivery waits for something else than its turn.
fn is_aside(state: State) -> bool {
    matches!(state, State::Dead | State::Delayed)
}
