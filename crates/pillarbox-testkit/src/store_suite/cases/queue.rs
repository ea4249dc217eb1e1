use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::admin::{
    Change, DeliveryRecord, ListQuery, Operator, PrunePolicy, Selection, State, SubscriptionStatus,
};
use pillarbox::store::{
    AttemptError, CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, DeliveryRow, Epoch, Failed,
    Hello, InstanceId, KEYS_TOLD_MAX, KeyHash, LaneRef, LaneWrite, QUEUED_KEYS_MAX, Queued, RecoverRequest,
    RecoveredAttempt, RecoveryCause, SUSPECT_AFTER, Store, TakeCause, lane_of,
};
use pillarbox::{ErrorKind, Mode, NewEvent, OnDead, Position, RetryPolicy, Start, Subscription, Timestamp};

use super::{BURY, FAIL_SETTLE, LIMIT, Member, NOTHING, clock, hello, join_with, refused, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        a_row_is_claimed_once,
        a_claimed_row_comes_with_its_event,
        a_claim_that_was_not_answered_is_told_again,
        a_key_is_claimed_one_at_a_time_and_in_order,
        nothing_is_claimed_before_it_is_due,
        a_delayed_row_takes_its_place_when_it_is_due,
        what_was_delayed_is_as_old_as_it_is_due,
        keys_take_turns,
        a_claim_that_is_not_the_current_one_ends_nothing,
        what_is_given_back_counts_no_attempt,
        a_failed_row_waits_for_its_time_and_blocks_its_key,
        a_dead_row_blocks_its_key_or_not,
        rows_that_are_claimed_from_the_start_are_nobody_elses,
        an_old_epoch_queues_nothing,
        an_event_that_has_a_row_gets_no_other,
        a_repeated_settlement_brings_nothing_back,
        a_load_of_a_queue_tells_its_keys,
        a_load_of_a_queue_tells_no_more_keys_than_the_limit,
        a_claim_tells_figures,
        keys_are_told_in_slices,
        a_dead_instances_claims_are_recovered,
        a_dead_instances_claims_outlive_the_loss_of_its_lanes,
        an_instance_that_has_beaten_since_keeps_its_claims,
        a_sweep_recovers_from_the_silent,
        a_sweep_takes_nothing_by_the_databases_clock,
        what_is_recovered_too_often_is_dead,
        suspects_are_claimed_one_at_a_time,
        leaving_gives_claims_back,
        joining_again_gives_claims_back,
        a_requeue_and_a_skip_take_the_claim_away,
        a_rewind_takes_claims_away,
        an_operator_recovers,
        lanes_are_not_changed_while_a_delivery_is_claimed,
        operators_see_who_works_on_what,
        retention_keeps_what_a_queue_needs,
        dead_rows_that_retention_removes_let_their_key_go_on,
        a_mode_is_fixed;
    FAIL_SETTLE:
        rows_and_cursor_are_written_together;
    BURY:
        a_sweep_recovers_from_the_buried;
}

/// Long enough that a store is not slower by accident.
const SOON: Duration = Duration::from_millis(100);

/// No test lives to see it.
const NEVER: Timestamp = Timestamp(9_999_999_999_999);

fn queue() -> Subscription {
    let retry = RetryPolicy { base: Duration::ZERO, jitter: false, ..RetryPolicy::handler() };
    Subscription { mode: Mode::Queue, lanes: 1, retry, ..Subscription::new("s") }
}

/// The owner of a queue's only lane.
struct Feeder<S> {
    member: Member<S>,
    lane: LaneRef,
    epoch: Epoch,
}

async fn feeder<F: Fixture>(fixture: &F, wish: Subscription) -> Tried<Feeder<F::Store>> {
    let member = join_with(fixture, wish).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    Ok(Feeder { member, lane, epoch })
}

impl<S: Store> Feeder<S> {
    /// Publishes one event a key and gives each a pending row.
    async fn feed<F: Fixture>(&self, fixture: &F, keys: &[Option<&str>]) -> Tried<Vec<Position>> {
        let at = publish(fixture, keys).await?;
        self.queue(at.iter().zip(keys).map(|(position, key)| queued(*position, *key)).collect()).await?;
        Ok(at)
    }

    async fn queue(&self, queue: Vec<Queued>) -> Outcome {
        let floor = queue.iter().map(|queued| queued.delivery.position).max().unwrap_or(0);
        let settled = self.member.settle(LaneWrite { queue, ..write(self.lane, self.epoch, floor) }).await?;
        if settled { Ok(()) } else { Err("the owner of the lane could not settle".into()) }
    }
}

impl<S: Store> Member<S> {
    async fn claims(&self, request: ClaimRequest) -> Tried<Claims> {
        let mut answers = self.store.claim(&[request]).await?;
        ensure!(answers.len() == 1, "one request has {} answers", answers.len());
        Ok(answers.remove(0))
    }

    fn request(&self, limit: usize, first: i64) -> ClaimRequest {
        let subscription = self.joined.subscriptions[0].id;
        ClaimRequest { subscription, limit, first: ClaimId(first), suspect: true, tell: None, again: false }
    }

    /// Claims up to `limit` rows, numbered from `first`.
    async fn claim(&self, limit: usize, first: i64) -> Tried<Vec<Claimed>> {
        Ok(self.claims(self.request(limit, first)).await?.claimed)
    }

    async fn end(&self, claimed: &Claimed, fate: ClaimFate) -> Tried<bool> {
        let subscription = self.joined.subscriptions[0].id;
        let end = ClaimEnd { subscription, position: claimed.delivery.position, claim: claimed.claim, fate };
        let ended = self.store.finish(&[end]).await?;
        ensure!(ended.len() == 1, "one end has {} answers", ended.len());
        Ok(ended[0])
    }

    async fn done(&self, claimed: &Claimed) -> Outcome {
        ensure!(self.end(claimed, ClaimFate::Done).await?, "its own claim of {claimed:?} could not be ended");
        Ok(())
    }

    /// Whether a claim that is not this one's any more is refused: by a no, or because its instance has ended.
    async fn is_refused(&self, claimed: &Claimed, fate: ClaimFate) -> Tried<bool> {
        match self.end(claimed, fate).await {
            Ok(ended) => Ok(!ended),
            Err(error) => {
                let kind = error.downcast_ref::<pillarbox::Error>().map(pillarbox::Error::kind);
                if kind == Some(ErrorKind::Ended) { Ok(true) } else { Err(error) }
            }
        }
    }

    async fn recover(&self, dead: &[(InstanceId, RecoveryCause, Option<i64>)]) -> Tried<Vec<(RecoveryCause, u64)>> {
        self.recover_by(RecoverRequest { ended: dead.to_vec(), ..RecoverRequest::default() }).await
    }

    async fn sweep(&self) -> Tried<Vec<(RecoveryCause, u64)>> {
        self.sweep_seeing(&[]).await
    }

    /// A sweep of one that has seen these instances stand still at a beat for so long.
    async fn sweep_seeing(&self, silent: &[(InstanceId, i64, Duration)]) -> Tried<Vec<(RecoveryCause, u64)>> {
        let silent = silent.to_vec();
        self.recover_by(RecoverRequest { sweep: true, silent, ..RecoverRequest::default() }).await
    }

    async fn recover_by(&self, request: RecoverRequest) -> Tried<Vec<(RecoveryCause, u64)>> {
        let recovered = self.store.recover(&request).await?;
        let own = self.joined.subscriptions[0].id;
        ensure!(recovered.claims.iter().all(|(id, ..)| *id == own), "{recovered:?} is not of {own:?} alone");
        let count: u64 = recovered.claims.iter().map(|(.., count)| count).sum();
        let named: BTreeSet<Position> = recovered.attempts.iter().map(|attempt| attempt.position).collect();
        let is_told = |attempt: &RecoveredAttempt| {
            attempt.subscription == own && attempt.failed.attempts > 0 && attempt.failed.error.kind == CRASH
        };
        ensure!(named.len() as u64 == count && recovered.attempts.iter().all(is_told), "{recovered:?} names not each");
        Ok(recovered.claims.into_iter().map(|(_, cause, count)| (cause, count)).collect())
    }
}

async fn publish<F: Fixture>(fixture: &F, keys: &[Option<&str>]) -> pillarbox::Result<Vec<Position>> {
    let event = |key: &Option<&str>| {
        let event = NewEvent::new("a", "t");
        if let Some(key) = key { event.key(*key) } else { event }
    };
    fixture.publish(keys.iter().map(event).collect()).await
}

/// A pending row that is due.
fn queued(position: Position, key: Option<&str>) -> Queued {
    let delivery = DeliveryRow {
        position,
        key: key.map(Into::into),
        arrival: 0,
        state: State::Pending,
        attempts: 0,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    Queued { delivery, claim: None, error: None }
}

fn failed(state: State, attempts: u32, due_at: Timestamp) -> ClaimFate {
    let error = AttemptError { at: Timestamp(1), attempt: attempts, kind: "k".into(), message: "no".into() };
    ClaimFate::Failed(Failed { state, attempts, due_at, error })
}

fn positions(claimed: &[Claimed]) -> Vec<Position> {
    claimed.iter().map(|claimed| claimed.delivery.position).collect()
}

fn sorted(claimed: &[Claimed]) -> Vec<Position> {
    let mut positions = positions(claimed);
    positions.sort_unstable();
    positions
}

async fn shown<F: Fixture>(fixture: &F, member: &Member<F::Store>, position: Position) -> Tried<DeliveryRecord> {
    shown_in(fixture, member, "s", position).await
}

async fn shown_in<F: Fixture>(
    fixture: &F,
    member: &Member<F::Store>,
    subscription: &str,
    position: Position,
) -> Tried<DeliveryRecord> {
    let event = member.store.fetch(&[position]).await?.pop().ok_or("the event is not in the log")?;
    let record = fixture.operator().await?.show(event.id).await?.ok_or("the event is not shown")?;
    let fate = record.subscriptions.into_iter().find(|fate| fate.subscription == subscription);
    let delivery = fate.and_then(|fate| fate.delivery);
    delivery.ok_or_else(|| format!("no delivery of {position} is shown").into())
}

async fn status<F: Fixture>(fixture: &F) -> Tried<SubscriptionStatus> {
    let status = fixture.operator().await?.status().await?;
    let found = status.subscriptions.into_iter().find(|row| row.name == "s");
    found.ok_or_else(|| "the subscription has no status".into())
}

async fn a_row_is_claimed_once<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let second = join_with(fixture, queue()).await?;
    let at = first.feed(fixture, &[None; 20]).await?;
    let (one, other) = tokio::join!(first.member.claim(13, 1), second.claim(13, 1));
    let (mut all, mut other) = (one?, other?);
    for (numbers, claims) in [(1.., &all), (1.., &other)] {
        let right = claims.iter().zip(numbers).all(|(claimed, number)| claimed.claim == ClaimId(number));
        ensure!(right, "claims from 1 on are numbered {claims:?}");
    }
    all.append(&mut other);
    // Whoever was kept from a row by the other finds it now.
    all.append(&mut second.claim(LIMIT, 100).await?);
    ensure!(sorted(&all) == at, "{at:?} were queued, claimed were {:?}", sorted(&all));
    let again = first.member.claim(LIMIT, 200).await?;
    ensure!(again.is_empty(), "everything was claimed, and {again:?} could be claimed again");
    let processing = all.iter().all(|claimed| claimed.delivery.state == State::Processing && !claimed.suspect);
    ensure!(processing, "not everything that is claimed is processing: {all:?}");
    Ok(())
}

async fn a_claimed_row_comes_with_its_event<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let at = feeder.feed(fixture, &[Some("k"), None]).await?;
    let claimed = feeder.member.claim(LIMIT, 7).await?;
    ensure!(sorted(&claimed) == at, "{:?} of {at:?} were claimed", sorted(&claimed));
    for claimed in &claimed {
        let event = feeder.member.store.fetch(&[claimed.delivery.position]).await?.pop();
        ensure!(event.is_some() && claimed.event == event, "{claimed:?} came with another event than {event:?}");
        let key = claimed.event.as_ref().and_then(|event| event.key.clone());
        ensure!(claimed.delivery.key == key, "{claimed:?} has another key than its event");
    }
    Ok(())
}

async fn a_claim_that_was_not_answered_is_told_again<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let second = join_with(fixture, queue()).await?;
    let at = first.feed(fixture, &[None, Some("k"), Some("k"), None, None]).await?;
    let others = second.claim(1, 5).await?;
    let request = first.member.request(2, 5);
    let told = |claims: &[Claimed]| claims.iter().map(|claimed| (claimed.claim, claimed.delivery.position)).collect();
    let claimed: Vec<(ClaimId, Position)> = told(&first.member.claims(request.clone()).await?.claimed);
    for _ in 0..2 {
        let again = first.member.claims(ClaimRequest { again: true, ..request.clone() }).await?;
        let again: Vec<(ClaimId, Position)> = told(&again.claimed);
        ensure!(again == claimed, "{claimed:?} of {at:?} were claimed, asked again {again:?} are told");
    }
    let left = second.claim(LIMIT, 6).await?;
    ensure!(left.len() == 1, "of {at:?} another claimed {others:?} and then {left:?}");
    Ok(())
}

async fn a_key_is_claimed_one_at_a_time_and_in_order<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let second = join_with(fixture, queue()).await?;
    let at = first.feed(fixture, &[Some("k"), Some("k"), Some("other")]).await?;
    let late = first.feed(fixture, &[Some("k")]).await?;
    let mut claimed = first.member.claim(LIMIT, 1).await?;
    ensure!(sorted(&claimed) == [at[0], at[2]], "{:?} were claimed of {at:?}", sorted(&claimed));
    for next in [at[1], late[0]] {
        let early = second.claim(LIMIT, 1).await?;
        ensure!(early.is_empty(), "{early:?} was claimed while its key is being worked on");
        let head = claimed.iter().position(|claimed| claimed.delivery.key.as_deref() == Some("k"));
        let head = claimed.swap_remove(head.ok_or("the key has no head")?);
        first.member.done(&head).await?;
        claimed.extend(first.member.claim(LIMIT, next).await?);
        let last = claimed.last().map(|claimed| claimed.delivery.position);
        ensure!(last == Some(next), "after {:?} came {last:?} instead of {next}", head.delivery.position);
    }
    Ok(())
}

async fn nothing_is_claimed_before_it_is_due<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let at = publish(fixture, &[Some("k"), Some("k"), Some("other"), None]).await?;
    let mut rows: Vec<Queued> =
        at.iter().zip([Some("k"), Some("k"), Some("other"), None]).map(|(at, key)| queued(*at, key)).collect();
    for (row, state) in [(0, State::Retrying), (2, State::Delayed), (3, State::Retrying)] {
        let attempts = u32::from(state == State::Retrying);
        rows[row].delivery = DeliveryRow { state, attempts, due_at: NEVER, ..rows[row].delivery.clone() };
    }
    feeder.queue(rows).await?;
    let claims = feeder.member.claims(feeder.member.request(LIMIT, 1)).await?;
    ensure!(claims.claimed.is_empty(), "nothing is due, and {:?} were claimed", claims.claimed);
    ensure!(claims.waiting == 0, "nothing is due, and {} could be claimed", claims.waiting);
    ensure!(claims.next_due == Some(NEVER), "the next is due at {:?} instead of {NEVER:?}", claims.next_due);
    Ok(())
}

async fn a_delayed_row_takes_its_place_when_it_is_due<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = publish(fixture, &[Some("k"); 4]).await?;
    let mut delayed = queued(at[0], Some("k"));
    delayed.delivery.state = State::Delayed;
    delayed.delivery.due_at = clock(fixture).await?.plus(SOON);
    feeder.queue(vec![delayed, queued(at[1], Some("k")), queued(at[2], Some("k"))]).await?;
    let first = member.claim(LIMIT, 1).await?;
    ensure!(positions(&first) == [at[1]], "{:?} were claimed while {} is delayed", positions(&first), at[0]);
    fixture.pass(SOON * 2).await;
    let early = member.claim(LIMIT, 2).await?;
    ensure!(early.is_empty(), "{early:?} was claimed while its key is being worked on");
    feeder.queue(vec![queued(at[3], Some("k"))]).await?;
    member.done(&first[0]).await?;
    for (next, number) in [at[2], at[0], at[3]].into_iter().zip(3..) {
        let claimed = member.claim(LIMIT, number).await?;
        ensure!(positions(&claimed) == [next], "{:?} were claimed instead of {next} of {at:?}", positions(&claimed));
        member.done(&claimed[0]).await?;
    }
    Ok(())
}

async fn what_was_delayed_is_as_old_as_it_is_due<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let due = clock(fixture).await?.plus(SOON * 3);
    let at = fixture.publish(vec![NewEvent::new("a", "t").key("k").deliver_at(due)]).await?;
    let mut delayed = queued(at[0], Some("k"));
    (delayed.delivery.state, delayed.delivery.due_at) = (State::Delayed, due);
    feeder.queue(vec![delayed]).await?;
    fixture.pass(SOON * 4).await;
    let claimed = feeder.member.claim(LIMIT, 1).await?;
    ensure!(positions(&claimed) == at, "{claimed:?} were claimed instead of {at:?}");
    let row = fixture.operator().await?.status().await?.subscriptions.remove(0);
    let age = row.oldest_age_seconds.ok_or("nothing is said to wait")?;
    let (age, due_for) = (Duration::from_secs_f64(age), clock(fixture).await?.since(due));
    ensure!(age <= due_for, "it has been due for {due_for:?}, and the oldest is said to wait for {age:?}");
    Ok(())
}

async fn keys_take_turns<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let small = ["k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8", "k9"];
    // More than any store looks through for one claim.
    feeder.feed(fixture, &[Some("big"); 1_000]).await?;
    let keys: Vec<Option<&str>> = small.iter().cycle().take(4 * small.len()).map(|key| Some(*key)).collect();
    feeder.feed(fixture, &keys).await?;
    let (mut left, mut of_big, mut number) = (keys.len(), 0, 1);
    while left > 0 {
        let claimed = feeder.member.claim(2, number).await?;
        ensure!(!claimed.is_empty(), "{left} rows of small keys are left, and none can be claimed");
        number += 2;
        for claimed in &claimed {
            feeder.member.done(claimed).await?;
            let is_big = claimed.delivery.key.as_deref() == Some("big");
            of_big += usize::from(is_big);
            left -= usize::from(!is_big);
        }
    }
    ensure!(of_big <= keys.len() / 2, "the big key has run {of_big} times before the last of the small ones");
    Ok(())
}

async fn a_claim_that_is_not_the_current_one_ends_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let second = join_with(fixture, queue()).await?;
    let at = first.feed(fixture, &[Some("k"), Some("k")]).await?;
    let old = first.member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    ensure!(first.member.end(&old, ClaimFate::Back).await?, "a claim could not be given back");
    let current = first.member.claim(1, 2).await?.pop().ok_or("what was given back cannot be claimed")?;
    ensure!(current.delivery.position == at[0], "{current:?} was claimed instead of {}", at[0]);
    let before = shown(fixture, &first.member, at[0]).await?;
    for fate in [ClaimFate::Done, ClaimFate::Back, failed(State::Dead, 9, Timestamp(0))] {
        ensure!(!first.member.end(&old, fate.clone()).await?, "an old claim was ended by {fate:?}");
        ensure!(!second.end(&current, fate.clone()).await?, "another's claim was ended by {fate:?}");
        let now = shown(fixture, &first.member, at[0]).await?;
        let same = now.state == before.state && now.attempts == before.attempts && now.claim == before.claim;
        ensure!(same && now.errors == before.errors, "{fate:?} made {now:?} of {before:?}");
    }
    let early = second.claim(LIMIT, 3).await?;
    ensure!(early.is_empty(), "{early:?} was claimed while its key is being worked on");
    first.member.done(&current).await?;
    ensure!(!first.member.end(&current, ClaimFate::Done).await?, "a claim was ended twice");
    Ok(())
}

async fn what_is_given_back_counts_no_attempt<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), None]).await?;
    for (attempts, state) in [(0, State::Pending), (3, State::Retrying)] {
        let claimed = member.claim(LIMIT, 10 * i64::from(attempts)).await?;
        ensure!(sorted(&claimed) == at, "{:?} of {at:?} were claimed", sorted(&claimed));
        for claimed in &claimed {
            ensure!(claimed.delivery.attempts == attempts, "{attempts} attempts were counted, and not {claimed:?}");
            ensure!(member.end(claimed, ClaimFate::Back).await?, "a claim could not be given back");
            let record = shown(fixture, member, claimed.delivery.position).await?;
            ensure!((record.state, record.attempts) == (state, attempts), "given back, it is {record:?}");
            ensure!(record.claim.is_none(), "given back, it is still claimed: {record:?}");
        }
        let again = member.claim(LIMIT, 100 + i64::from(attempts)).await?;
        ensure!(sorted(&again) == at, "{:?} of {at:?} could be claimed again", sorted(&again));
        for claimed in &again {
            let failed = failed(State::Retrying, 3, Timestamp(0));
            ensure!(member.end(claimed, failed).await?, "an attempt could not be counted");
        }
    }
    Ok(())
}

async fn a_failed_row_waits_for_its_time_and_blocks_its_key<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k"), Some("other")]).await?;
    let claimed = member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    let due_at = clock(fixture).await?.plus(SOON);
    ensure!(member.end(&claimed, failed(State::Retrying, 1, due_at)).await?, "its own claim could not be ended");
    let other = member.claim(LIMIT, 2).await?;
    if clock(fixture).await? < due_at {
        ensure!(positions(&other) == [at[2]], "{:?} were claimed while {} waits", positions(&other), at[0]);
    }
    let record = shown(fixture, member, at[0]).await?;
    let kept: Vec<(&str, u32)> = record.errors.iter().map(|error| (&*error.kind, error.attempt)).collect();
    ensure!(record.due_at == due_at && kept == [("k", 1)], "failed once, it is {record:?}");
    fixture.pass(SOON * 2).await;
    let again = member.claim(LIMIT, 4).await?;
    let found: Vec<(Position, u32)> =
        other.iter().chain(&again).map(|claimed| (claimed.delivery.position, claimed.delivery.attempts)).collect();
    let late = found.contains(&(at[0], 1)) && !found.iter().any(|(position, _)| *position == at[1]);
    ensure!(late, "{found:?} were claimed when {} was due", at[0]);
    Ok(())
}

async fn a_dead_row_blocks_its_key_or_not<F: Fixture>(fixture: &F) -> Outcome {
    for (name, on_dead) in [("s", OnDead::Block), ("t", OnDead::Skip)] {
        let feeder = feeder(fixture, Subscription { name: name.into(), on_dead, ..queue() }).await?;
        let member = &feeder.member;
        let at = feeder.feed(fixture, &[Some("k"), Some("k")]).await?;
        let claimed = member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
        let died = failed(State::Dead, 8, Timestamp(0));
        ensure!(member.end(&claimed, died).await?, "its own claim could not be ended");
        let from_the_start = publish(fixture, &[Some("j"); 2]).await?;
        let mut rows: Vec<Queued> = from_the_start.iter().map(|at| queued(*at, Some("j"))).collect();
        rows[0].delivery = DeliveryRow { state: State::Dead, attempts: 8, ..rows[0].delivery.clone() };
        feeder.queue(rows).await?;
        for (dead, next) in [(at[0], at[1]), (from_the_start[0], from_the_start[1])] {
            let record = shown_in(fixture, member, name, dead).await?;
            ensure!((record.state, record.attempts) == (State::Dead, 8), "a dead row is shown as {record:?}");
            let record = shown_in(fixture, member, name, next).await?;
            let expected = if on_dead == OnDead::Block { State::Blocked } else { State::Pending };
            ensure!(record.state == expected, "with {on_dead:?} the next is shown as {record:?}");
        }
        let went = sorted(&member.claim(LIMIT, 10).await?);
        let expected = if on_dead == OnDead::Block { vec![] } else { vec![at[1], from_the_start[1]] };
        ensure!(went == expected, "with {on_dead:?} {went:?} were claimed instead of {expected:?}");
    }
    Ok(())
}

async fn rows_that_are_claimed_from_the_start_are_nobody_elses<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let second = join_with(fixture, queue()).await?;
    let at = publish(fixture, &[Some("k"), Some("k"), Some("other")]).await?;
    let mut head = queued(at[0], Some("k"));
    (head.claim, head.delivery.state) = (Some(ClaimId(5)), State::Processing);
    let mut tried = queued(at[2], Some("other"));
    tried.delivery = DeliveryRow { state: State::Retrying, attempts: 1, ..tried.delivery };
    tried.error = Some(AttemptError { at: Timestamp(1), attempt: 1, kind: "k".into(), message: "no".into() });
    first.queue(vec![head.clone(), queued(at[1], Some("k")), tried]).await?;
    let claimed = second.claim(LIMIT, 5).await?;
    ensure!(positions(&claimed) == [at[2]], "{:?} of {at:?} were claimed by another", positions(&claimed));
    ensure!(claimed[0].delivery.attempts == 1, "its attempt was forgotten: {claimed:?}");
    let errors = shown(fixture, &second, at[2]).await?.errors;
    ensure!(errors.len() == 1, "its error was not kept: {errors:?}");
    let own = Claimed { claim: ClaimId(5), delivery: head.delivery, event: None, suspect: false };
    ensure!(second.is_refused(&own, ClaimFate::Done).await?, "another ended a claim that was made with the row");
    first.member.done(&own).await?;
    let next = second.claim(LIMIT, 6).await?;
    ensure!(positions(&next) == [at[1]], "{:?} were claimed after the head", positions(&next));
    Ok(())
}

async fn an_old_epoch_queues_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let old = feeder(fixture, queue()).await?;
    let at = old.feed(fixture, &[None]).await?;
    let second = join_with(fixture, queue()).await?;
    let epoch = second.take(old.lane, TakeCause::Lease).await?;
    let late = publish(fixture, &[Some("late")]).await?;
    let stale = LaneWrite { queue: vec![queued(late[0], Some("late"))], ..write(old.lane, old.epoch, late[0]) };
    match old.member.settle(stale).await {
        Err(error) if error.kind() == ErrorKind::Ended => {}
        answer => ensure!(!answer?, "the old owner was told that it settled"),
    }
    let state = second.load(old.lane, epoch).await?;
    ensure!(state.cursor.floor == at[0], "the cursor moved to {}", state.cursor.floor);
    ensure!(state.queued_keys.is_empty(), "the old owner queued {:?}", state.queued_keys);
    let claimed = second.claim(LIMIT, 1).await?;
    ensure!(positions(&claimed) == at, "{:?} can be claimed, {at:?} were queued in time", positions(&claimed));
    Ok(())
}

async fn rows_and_cursor_are_written_together<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let at = publish(fixture, &[Some("k")]).await?;
    fixture.fail_next_settle();
    let queue = vec![queued(at[0], Some("k"))];
    let failing = feeder.member.settle(LaneWrite { queue, ..write(feeder.lane, feeder.epoch, at[0]) }).await;
    ensure!(failing.is_err(), "the settlement did not fail");
    let state = feeder.member.load(feeder.lane, feeder.epoch).await?;
    let found = (state.cursor.floor == at[0], state.queued_keys.len());
    ensure!(found == (true, 1) || found == (false, 0), "half of it was written: {state:?}");
    Ok(())
}

async fn an_event_that_has_a_row_gets_no_other<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k")]).await?;
    let claimed = member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    let again = at.iter().map(|at| queued(*at, Some("k"))).collect();
    feeder.queue(again).await?;
    let early = member.claim(LIMIT, 2).await?;
    ensure!(early.is_empty(), "{early:?} was claimed while its key is being worked on");
    ensure!(member.end(&claimed, failed(State::Retrying, 4, Timestamp(0))).await?, "the claim was lost");
    let mut other = queued(at[0], Some("k"));
    (other.delivery.state, other.claim) = (State::Processing, Some(ClaimId(77)));
    feeder.queue(vec![other]).await?;
    let next = member.claim(LIMIT, 3).await?;
    let found: Vec<(Position, u32)> =
        next.iter().map(|claimed| (claimed.delivery.position, claimed.delivery.attempts)).collect();
    ensure!(found == [(at[0], 4)], "queued again, {found:?} were claimed");
    member.done(&next[0]).await?;
    let last = member.claim(LIMIT, 4).await?;
    ensure!(positions(&last) == [at[1]], "{:?} were claimed after that", positions(&last));
    Ok(())
}

async fn a_repeated_settlement_brings_nothing_back<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[None, None]).await?;
    let done = member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    member.done(&done).await?;
    // The owner does not know that the first one was written.
    feeder.queue(at.iter().map(|at| queued(*at, None)).collect()).await?;
    let left = member.claim(LIMIT, 2).await?;
    let right = left.len() == 1 && left[0].delivery.position != done.delivery.position;
    ensure!(right, "{} of {at:?} is done, and {:?} can be claimed", done.delivery.position, positions(&left));
    Ok(())
}

async fn a_load_of_a_queue_tells_its_keys<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let keys = [Some("claimed"), Some("dead"), Some("delayed"), Some("pending"), Some("pending"), None];
    let at = publish(fixture, &keys).await?;
    let mut rows: Vec<Queued> = at.iter().zip(keys).map(|(at, key)| queued(*at, key)).collect();
    (rows[0].delivery.state, rows[0].claim) = (State::Processing, Some(ClaimId(1)));
    (rows[1].delivery.state, rows[1].delivery.attempts) = (State::Dead, 8);
    (rows[2].delivery.state, rows[2].delivery.due_at) = (State::Delayed, NEVER);
    feeder.queue(rows).await?;
    let mut state = feeder.member.load(feeder.lane, feeder.epoch).await?;
    state.queued_keys.sort_unstable();
    let told: Vec<&str> = state.queued_keys.iter().map(|key| &**key).collect();
    ensure!(told == ["claimed", "dead", "delayed", "pending"], "a load tells the keys {told:?}");
    ensure!(state.deliveries.is_empty(), "a load of a queue has the rows {:?}", state.deliveries);
    Ok(())
}

async fn a_load_of_a_queue_tells_no_more_keys_than_the_limit<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let names: Vec<String> = (0..QUEUED_KEYS_MAX).map(|number| format!("k{number}")).collect();
    let keys: Vec<Option<&str>> = names.iter().map(|name| Some(name.as_str())).collect();
    for slice in keys.chunks(KEYS_TOLD_MAX) {
        feeder.feed(fixture, slice).await?;
    }
    let state = feeder.member.load(feeder.lane, feeder.epoch).await?;
    let told = (state.queued_keys.len(), state.queued_keys_left_out);
    ensure!(told == (QUEUED_KEYS_MAX, false), "of {QUEUED_KEYS_MAX} keys are told, and whether some are not: {told:?}");
    feeder.feed(fixture, &[Some("one more")]).await?;
    let state = feeder.member.load(feeder.lane, feeder.epoch).await?;
    let told = (state.queued_keys.len(), state.queued_keys_left_out);
    ensure!(told == (0, true), "of one more are told, and whether some are not: {told:?}");
    Ok(())
}

async fn a_claim_tells_figures<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    feeder.feed(fixture, &[None, None, None, Some("k"), Some("k"), Some("k"), Some("j")]).await?;
    let figures = member.claims(member.request(0, 1)).await?;
    let found = (figures.claimed.len(), figures.waiting, figures.next_due);
    ensure!(found == (0, 5, None), "claimed, waiting and next due are {found:?}");
    ensure!(figures.keys.is_none() && figures.rows.is_none(), "nobody asked for keys and rows: {figures:?}");
    let claims = member.claims(ClaimRequest { tell: Some("".into()), ..member.request(2, 1) }).await?;
    ensure!((claims.claimed.len(), claims.waiting) == (2, 3), "two claimed, {} are waiting", claims.waiting);
    let mut keys = claims.keys.ok_or("the keys were asked for")?;
    keys.sort_unstable();
    ensure!(keys == ["j".into(), "k".into()], "the keys are {keys:?}");
    ensure!(claims.rows == Some(7), "there are 7 rows, told are {:?}", claims.rows);
    let left = member.claims(ClaimRequest { tell: Some("".into()), ..member.request(LIMIT, 3) }).await?;
    ensure!((left.claimed.len(), left.waiting, left.rows) == (3, 0, Some(7)), "the rest is {left:?}");
    let at = publish(fixture, &[Some("dead"), Some("delayed")]).await?;
    let mut aside: Vec<Queued> = vec![queued(at[0], Some("dead")), queued(at[1], Some("delayed"))];
    (aside[0].delivery.state, aside[0].delivery.attempts) = (State::Dead, 8);
    (aside[1].delivery.state, aside[1].delivery.due_at) = (State::Delayed, NEVER);
    feeder.queue(aside).await?;
    let beside = member.claims(ClaimRequest { tell: Some("".into()), ..member.request(0, 9) }).await?;
    ensure!(beside.rows.is_none_or(|rows| rows == 7), "what is dead or delayed does not wait: {:?}", beside.rows);
    let answers = member.store.claim(&[member.request(0, 9), member.request(0, 9)]).await?;
    ensure!(answers.len() == 2, "two requests have {} answers", answers.len());
    Ok(())
}

async fn keys_are_told_in_slices<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let names: Vec<String> = (0..KEYS_TOLD_MAX).map(|number| format!("k{number}")).collect();
    let keys: Vec<Option<&str>> = names.iter().map(|name| Some(name.as_str())).collect();
    feeder.feed(fixture, &keys).await?;
    let tell = |after: &str| ClaimRequest { tell: Some(after.into()), ..member.request(0, 1) };
    let told = member.claims(tell("")).await?.keys.map(|keys| keys.into_iter().collect::<BTreeSet<_>>().len());
    ensure!(told == Some(KEYS_TOLD_MAX), "of {KEYS_TOLD_MAX} keys {told:?} are told");
    feeder.feed(fixture, &[Some("one more"), Some("and another")]).await?;
    let claims = member.claims(tell("")).await?;
    let mut told = claims.keys.unwrap_or_default();
    ensure!(told.len() >= KEYS_TOLD_MAX, "{} keys are told at once", told.len());
    let left = KEYS_TOLD_MAX + 2 - told.len();
    ensure!(claims.rows == Some(KEYS_TOLD_MAX as u64 + 2), "rows: {:?}", claims.rows);
    let rest = member.claims(tell(told.last().map_or("", |key| key))).await?.keys.unwrap_or_default();
    ensure!(rest.len() == left, "after {} keys {rest:?} are told", told.len());
    told.extend(rest);
    let different = told.into_iter().collect::<BTreeSet<_>>().len();
    ensure!(different == KEYS_TOLD_MAX + 2, "{different} different keys are told");
    Ok(())
}

async fn a_dead_instances_claims_are_recovered<F: Fixture>(fixture: &F) -> Outcome {
    let second = feeder(fixture, queue()).await?;
    let (first, member) = (join_with(fixture, queue()).await?, &second.member);
    let at = second.feed(fixture, &[Some("k"), Some("k"), None, None]).await?;
    let lost = first.claim(2, 1).await?;
    let kept = member.claim(LIMIT, 1).await?;
    ensure!(lost.len() == 2 && kept.len() == 1, "{lost:?} and {kept:?} were claimed");
    let dead = first.joined.instance;
    fixture.kill(first.store).await;
    let recovered = member.recover(&[(dead, RecoveryCause::Crash, None)]).await?;
    ensure!(recovered == [(RecoveryCause::Crash, 2)], "two claims were lost, recovered were {recovered:?}");
    let again = member.claim(LIMIT, 10).await?;
    ensure!(sorted(&again) == sorted(&lost), "{:?} were lost, {:?} came back", sorted(&lost), sorted(&again));
    ensure!(again.iter().all(|claimed| claimed.delivery.attempts == 1), "no attempt was counted: {again:?}");
    let record = shown(fixture, member, at[0]).await?;
    let error = record.errors.last().ok_or("a recovery leaves an error")?;
    ensure!((&*error.kind, error.attempt) == (CRASH, 1), "a recovery leaves the error {error:?}");
    let counted = status(fixture).await?.recovered;
    let counts: Vec<(RecoveryCause, u64)> = counted.iter().map(|counted| (counted.cause, counted.count)).collect();
    ensure!(counts == [(RecoveryCause::Crash, 2)], "counted are {counted:?}");
    let twice = member.recover(&[(dead, RecoveryCause::Crash, None)]).await?;
    ensure!(twice.is_empty(), "recovered twice: {twice:?}");
    for claimed in kept.iter().chain(&again) {
        member.done(claimed).await?;
    }
    Ok(())
}

async fn a_dead_instances_claims_outlive_the_loss_of_its_lanes<F: Fixture>(fixture: &F) -> Outcome {
    let first = feeder(fixture, queue()).await?;
    let at = first.feed(fixture, &[Some("k")]).await?;
    first.member.claim(LIMIT, 1).await?;
    let second = join_with(fixture, queue()).await?;
    let dead = first.member.joined.instance;
    fixture.kill(first.member.store).await;
    second.fleet().await?;
    second.take(first.lane, TakeCause::Lock).await?;
    second.fleet().await?;
    let dead = vec![(dead, RecoveryCause::Crash, None)];
    second.recover_by(RecoverRequest { ended: dead, sweep: true, ..RecoverRequest::default() }).await?;
    let claimed = second.claim(LIMIT, 1).await?;
    let found: Vec<(Position, u32)> =
        claimed.iter().map(|claimed| (claimed.delivery.position, claimed.delivery.attempts)).collect();
    ensure!(found == [(at[0], 1)], "{found:?} came back of the claims of one that lost its lanes too");
    Ok(())
}

async fn an_instance_that_has_beaten_since_keeps_its_claims<F: Fixture>(fixture: &F) -> Outcome {
    let second = feeder(fixture, queue()).await?;
    let (first, member) = (join_with(fixture, queue()).await?, &second.member);
    let at = second.feed(fixture, &[Some("k")]).await?;
    let claimed = first.claim(LIMIT, 1).await?.pop().ok_or("nothing was claimed")?;
    let id = first.joined.instance;
    let seen = member.beat_of(id).await?;
    first.fleet().await?;
    let recovered = member.recover(&[(id, RecoveryCause::Lease, Some(seen))]).await?;
    ensure!(recovered.is_empty(), "one that has beaten since lost its claim: {recovered:?}");
    ensure!(member.claim(LIMIT, 1).await?.is_empty(), "and it can be claimed by another");
    let seen = member.beat_of(id).await?;
    let recovered = member.recover(&[(id, RecoveryCause::Lease, Some(seen))]).await?;
    ensure!(recovered == [(RecoveryCause::Lease, 1)], "one that has not beaten since keeps its claim: {recovered:?}");
    let before = shown(fixture, member, at[0]).await?;
    ensure!(before.attempts == 1 && before.claim.is_none(), "recovered, it is {before:?}");
    for fate in [ClaimFate::Done, ClaimFate::Back, failed(State::Dead, 9, Timestamp(0))] {
        ensure!(first.is_refused(&claimed, fate.clone()).await?, "a late {fate:?} was not refused");
    }
    let again = member.claim(LIMIT, 1).await?;
    let found: Vec<(Position, u32)> =
        again.iter().map(|claimed| (claimed.delivery.position, claimed.delivery.attempts)).collect();
    ensure!(found == [(at[0], 1)], "{found:?} can be claimed after a late end");
    ensure!(first.is_refused(&claimed, ClaimFate::Done).await?, "a late end was not refused");
    member.done(&again[0]).await?;
    Ok(())
}

async fn a_sweep_recovers_from_the_silent<F: Fixture>(fixture: &F) -> Outcome {
    let timeout = Duration::from_secs(1);
    let wish = Subscription { processing_timeout: timeout, ..queue() };
    let second = feeder(fixture, wish.clone()).await?;
    let (first, member) = (join_with(fixture, wish).await?, &second.member);
    let at = second.feed(fixture, &[None, None]).await?;
    first.fleet().await?;
    member.fleet().await?;
    let silent = first.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    let own = member.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    let id = first.joined.instance;
    let seen = member.beat_of(id).await?;
    let short = timeout - Duration::from_millis(1);
    let recovered = member.sweep_seeing(&[(id, seen, short)]).await?;
    ensure!(recovered.is_empty(), "a sweep recovered from one that was silent for {short:?} of {timeout:?}");
    first.fleet().await?;
    let recovered = member.sweep_seeing(&[(id, seen, timeout)]).await?;
    ensure!(recovered.is_empty(), "a sweep recovered from one that has beaten since: {recovered:?}");
    let seen = member.beat_of(id).await?;
    let before = clock(fixture).await?;
    let recovered = member.sweep_seeing(&[(id, seen, timeout)]).await?;
    ensure!(recovered == [(RecoveryCause::Timeout, 1)], "silent for {timeout:?}: {recovered:?}");
    member.done(&own).await?;
    ensure!(first.is_refused(&silent, ClaimFate::Done).await?, "a late end was not refused");
    let again = member.claim(LIMIT, 2).await?;
    ensure!(positions(&again) == positions(&[silent]), "{:?} came back of {at:?}", positions(&again));
    let swept = fixture.operator().await?.status().await?.log.recovery_at;
    ensure!(swept.is_some_and(|swept| swept >= before), "a sweep after {before:?} is told as of {swept:?}");
    Ok(())
}

/// As when the server's clock is set forward: by that clock everybody has been silent for a long time.
async fn a_sweep_takes_nothing_by_the_databases_clock<F: Fixture>(fixture: &F) -> Outcome {
    let timeout = Duration::from_secs(1);
    let wish = Subscription { processing_timeout: timeout, ..queue() };
    let second = feeder(fixture, wish.clone()).await?;
    let (first, member) = (join_with(fixture, wish).await?, &second.member);
    second.feed(fixture, &[None]).await?;
    let claimed = first.claim(1, 1).await?.pop().ok_or("nothing was claimed")?;
    let id = first.joined.instance;
    let seen = member.beat_of(id).await?;
    fixture.pass(timeout + SOON).await;
    for silent in [vec![], vec![(id, seen, SOON)]] {
        let recovered = member.sweep_seeing(&silent).await?;
        ensure!(
            recovered.is_empty(),
            "observed as {silent:?}, it lost its claim by the database's clock: {recovered:?}"
        );
    }
    first.done(&claimed).await
}

async fn a_sweep_recovers_from_the_buried<F: Fixture>(fixture: &F) -> Outcome {
    let second = feeder(fixture, queue()).await?;
    let first = join_with(fixture, queue()).await?;
    let at = second.feed(fixture, &[Some("k")]).await?;
    let lost = first.claim(LIMIT, 1).await?.pop().ok_or("nothing was claimed")?;
    fixture.bury(first.joined.instance).await;
    let recovered = second.member.sweep().await?;
    ensure!(recovered == [(RecoveryCause::Crash, 1)], "the claim of a buried one was left: {recovered:?}");
    let again = second.member.claim(LIMIT, 1).await?;
    ensure!(positions(&again) == at, "{:?} came back of {at:?}", positions(&again));
    ensure!(first.is_refused(&lost, ClaimFate::Done).await?, "a late end was not refused");
    Ok(())
}

/// A process claims everything and dies.
async fn crash<F: Fixture>(fixture: &F, member: &Member<F::Store>, wish: &Subscription, limit: usize) -> Tried<u64> {
    let victim = join_with(fixture, wish.clone()).await?;
    victim.claim(limit, 1).await?;
    let dead = victim.joined.instance;
    fixture.kill(victim.store).await;
    let recovered = member.recover(&[(dead, RecoveryCause::Crash, None)]).await?;
    Ok(recovered.iter().map(|(_, count)| count).sum())
}

async fn what_is_recovered_too_often_is_dead<F: Fixture>(fixture: &F) -> Outcome {
    let retry = RetryPolicy { max_attempts: 2, ..queue().retry };
    let wish = Subscription { retry, ..queue() };
    let feeder = feeder(fixture, wish.clone()).await?;
    let at = feeder.feed(fixture, &[Some("k"), Some("k")]).await?;
    for (attempts, state) in [(1, State::Retrying), (2, State::Dead)] {
        let recovered = crash(fixture, &feeder.member, &wish, 1).await?;
        ensure!(recovered == 1, "crash {attempts}: {recovered} recovered");
        let record = shown(fixture, &feeder.member, at[0]).await?;
        ensure!((record.attempts, record.state) == (attempts, state), "after crash {attempts} it is {record:?}");
    }
    let left = feeder.member.claim(LIMIT, 1).await?;
    ensure!(left.is_empty(), "{left:?} was claimed behind a dead one");
    let dead = status(fixture).await?.dead;
    ensure!(dead == 1, "{dead} are dead");
    Ok(())
}

async fn suspects_are_claimed_one_at_a_time<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let suspects = feeder.feed(fixture, &[None, None]).await?;
    for number in 1..=SUSPECT_AFTER {
        let recovered = crash(fixture, member, &queue(), LIMIT).await?;
        ensure!(recovered == 2, "crash {number}: {recovered} recovered");
    }
    let healthy = feeder.feed(fixture, &[None, None]).await?;
    let without = member.claim_without_suspects(LIMIT).await?;
    ensure!(sorted(&without) == healthy, "{:?} were claimed without suspects", sorted(&without));
    ensure!(without.iter().all(|claimed| !claimed.suspect), "the healthy are suspects: {without:?}");
    let mut seen = Vec::new();
    for number in [10, 20] {
        let one = member.claim(LIMIT, number).await?;
        ensure!(one.len() == 1 && one[0].suspect, "one suspect may be claimed, and {one:?} were");
        seen.extend(positions(&one));
    }
    seen.sort_unstable();
    ensure!(seen == suspects, "{seen:?} were claimed of the suspects {suspects:?}");
    Ok(())
}

impl<S: Store> Member<S> {
    async fn claim_without_suspects(&self, limit: usize) -> Tried<Vec<Claimed>> {
        Ok(self.claims(ClaimRequest { suspect: false, ..self.request(limit, 1) }).await?.claimed)
    }
}

async fn leaving_gives_claims_back<F: Fixture>(fixture: &F) -> Outcome {
    let second = feeder(fixture, queue()).await?;
    let (first, member) = (join_with(fixture, queue()).await?, &second.member);
    let at = second.feed(fixture, &[Some("k"), None]).await?;
    let tried = first.claim(1, 1).await?;
    ensure_eq!(positions(&tried), at[..1]);
    ensure!(first.end(&tried[0], failed(State::Retrying, 5, Timestamp(0))).await?, "its own claim could not be ended");
    let claimed = first.claim(LIMIT, 2).await?;
    ensure!(claimed.len() == 2, "{claimed:?} were claimed");
    first.store.leave().await?;
    check_given_back(fixture, member, &[(at[0], 5), (at[1], 0)]).await
}

async fn joining_again_gives_claims_back<F: Fixture>(fixture: &F) -> Outcome {
    let second = feeder(fixture, queue()).await?;
    let (mut first, member) = (join_with(fixture, queue()).await?, &second.member);
    let at = second.feed(fixture, &[Some("k"), None]).await?;
    let claimed = first.claim(LIMIT, 1).await?;
    ensure!(claimed.len() == 2, "{claimed:?} were claimed");
    first.joined = first.store.join(Hello { rejoin: true, ..hello(queue()) }).await?;
    ensure!(!first.end(&claimed[0], ClaimFate::Done).await?, "the new instance ended a claim of the old one");
    check_given_back(fixture, member, &[(at[0], 0), (at[1], 0)]).await
}

/// Rows that are free again, each after as many attempts as before.
async fn check_given_back<F: Fixture>(fixture: &F, member: &Member<F::Store>, rows: &[(Position, u32)]) -> Outcome {
    for (position, attempts) in rows {
        let record = shown(fixture, member, *position).await?;
        let state = if *attempts == 0 { State::Pending } else { State::Retrying };
        let free = record.state == state && record.claim.is_none() && record.attempts == *attempts;
        ensure!(free && record.errors.is_empty() == (*attempts == 0), "given back, {position} is {record:?}");
    }
    let at: Vec<Position> = rows.iter().map(|(position, _)| *position).collect();
    let again = member.claim(LIMIT, 1).await?;
    ensure!(sorted(&again) == at, "{:?} of {at:?} can be claimed again", sorted(&again));
    let counted = status(fixture).await?.recovered;
    ensure!(counted.is_empty(), "a clean end counts as recovered: {counted:?}");
    Ok(())
}

async fn a_requeue_and_a_skip_take_the_claim_away<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k"), Some("j"), Some("j")]).await?;
    let claimed = member.claim(LIMIT, 1).await?;
    ensure!(sorted(&claimed) == [at[0], at[2]], "{:?} of {at:?} were claimed", sorted(&claimed));
    let id = |claimed: &Claimed| claimed.event.as_ref().map(|event| event.id).ok_or("a claim without its event");
    let (requeued, skipped) = match &claimed[..] {
        [one, other] if one.delivery.position == at[0] => (one, other),
        [other, one] => (one, other),
        _ => return Err("two were claimed".into()),
    };
    let operator = fixture.operator().await?;
    let which = Selection::Event(id(requeued)?);
    operator.change(&Change::Requeue { subscription: "s".into(), which, limit: 1 }, false).await?;
    let skip = Change::Skip { subscription: "s".into(), event: id(skipped)?, reason: "suite".into() };
    operator.change(&skip, false).await?;
    for claimed in &claimed {
        for fate in [ClaimFate::Done, failed(State::Dead, 9, Timestamp(0))] {
            ensure!(!member.end(claimed, fate.clone()).await?, "{claimed:?} was ended by {fate:?}");
        }
    }
    let again = member.claim(LIMIT, 10).await?;
    ensure!(sorted(&again) == [at[0], at[3]], "{:?} of {at:?} were claimed after that", sorted(&again));
    ensure!(again.iter().all(|claimed| claimed.delivery.attempts == 0), "an attempt was counted: {again:?}");
    let last = again.iter().find(|claimed| claimed.delivery.position == at[3]).ok_or("it was claimed")?;
    ensure!(member.end(last, failed(State::Dead, 9, Timestamp(0))).await?, "its own claim could not be ended");
    let all = Change::Requeue { subscription: "s".into(), which: Selection::All, limit: LIMIT };
    ensure_eq!(operator.change(&all, false).await?.count, 1, "only one is dead");
    ensure_eq!(positions(&member.claim(LIMIT, 20).await?), at[3..]);
    Ok(())
}

async fn a_rewind_takes_claims_away<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("low"), Some("k"), Some("k")]).await?;
    let claimed = member.claim(LIMIT, 1).await?;
    ensure!(sorted(&claimed) == at[..2], "{:?} of {at:?} were claimed", sorted(&claimed));
    let rewind = Change::Rewind { subscription: "s".into(), to: Start::Position(at[0]), key: None };
    fixture.operator().await?.change(&rewind, false).await?;
    for claimed in &claimed {
        let above = claimed.delivery.position > at[0];
        let ended = member.end(claimed, ClaimFate::Done).await?;
        ensure!(ended != above, "rewound to {}, the end of {claimed:?} was answered with {ended}", at[0]);
    }
    let epoch = member.take(feeder.lane, TakeCause::Free).await?;
    let keys = member.load(feeder.lane, epoch).await?.queued_keys;
    ensure!(keys.is_empty(), "the keys {keys:?} have rows after the rewind");
    ensure!(member.claim(LIMIT, 10).await?.is_empty(), "a row above the rewind can be claimed");
    let again = vec![queued(at[1], Some("k")), queued(at[2], Some("k"))];
    ensure!(
        member.settle(LaneWrite { queue: again, ..write(feeder.lane, epoch, at[2]) }).await?,
        "could not queue what came again"
    );
    let next = member.claim(LIMIT, 20).await?;
    ensure!(positions(&next) == [at[1]], "{:?} were claimed of what came again", positions(&next));
    Ok(())
}

async fn an_operator_recovers<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let (first, member) = (join_with(fixture, queue()).await?, &feeder.member);
    feeder.feed(fixture, &[None, None, None]).await?;
    let lost = first.claim(2, 1).await?;
    let kept = member.claim(LIMIT, 1).await?;
    let operator = fixture.operator().await?;
    let recover = |silent_for| Change::Recover {
        subscription: Some("s".into()),
        instance: Some(first.joined.instance),
        silent_for,
    };
    let hour = Duration::from_secs(3600);
    let changed = operator.change(&recover(hour), false).await?;
    ensure!(changed.count == 0, "nobody was silent for an hour: {changed:?}");
    ensure_eq!(changed.message, "nothing to recover: no matching deliveries are in progress");
    let changed = operator.change(&recover(Duration::ZERO), true).await?;
    ensure!(changed.count == 2, "a dry run says {changed:?}");
    ensure!(member.claim(LIMIT, 10).await?.is_empty(), "a dry run took claims away");
    let changed = operator.change(&recover(Duration::ZERO), false).await?;
    ensure!(changed.count == 2, "two claims are one's, taken were {changed:?}");
    let message = "2 deliveries were taken from the instances that worked on them; each counts as an attempt";
    ensure_eq!(changed.message, message);
    for claimed in &lost {
        ensure!(first.is_refused(claimed, ClaimFate::Done).await?, "a claim that was taken away was ended");
    }
    for claimed in &kept {
        member.done(claimed).await?;
    }
    let again = member.claim(LIMIT, 20).await?;
    ensure!(sorted(&again) == sorted(&lost), "{:?} were taken away, {:?} came back", sorted(&lost), sorted(&again));
    ensure!(again.iter().all(|claimed| claimed.delivery.attempts == 1), "no attempt was counted: {again:?}");
    let counted = status(fixture).await?.recovered;
    let counts: Vec<(RecoveryCause, u64)> = counted.iter().map(|counted| (counted.cause, counted.count)).collect();
    ensure!(counts == [(RecoveryCause::Operator, 2)], "counted are {counted:?}");
    let unknown = Change::Recover { subscription: Some("unknown".into()), instance: None, silent_for: Duration::ZERO };
    let kind = operator.change(&unknown, false).await.err().map(|error| error.kind());
    ensure!(kind == Some(ErrorKind::NotFound), "recovering what is not there: {kind:?}");
    Ok(())
}

async fn lanes_are_not_changed_while_a_delivery_is_claimed<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let keys = ["a", "b", "a"];
    let at = feeder.feed(fixture, &keys.map(Some)).await?;
    let operator = fixture.operator().await?;
    operator.change(&Change::pause("s"), false).await?;
    let claimed = feeder.member.claim(LIMIT, 1).await?;
    ensure_eq!(claimed.len(), 2, "claims");
    let relane = Change::Relane { subscription: "s".into(), lanes: 3 };
    let error = refused(&operator, relane.clone()).await?;
    ensure_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    ensure!(error.to_string().contains("deliveries are being worked on; wait until they are done"), "{error}");
    ensure!(error.to_string().contains("`pillarbox recover`"), "{error}");
    for claimed in &claimed {
        ensure!(feeder.member.end(claimed, ClaimFate::Back).await?, "its own claim could not be ended");
    }
    operator.change(&relane, false).await?;
    ensure_eq!(feeder.member.fleet().await?.lanes.len(), 3, "lanes");
    let books = operator.books().await?;
    for (position, key) in at.iter().zip(keys) {
        let lane = lane_of(Some(KeyHash::of(key)), *position, 3);
        let book = books.lanes.iter().find(|book| book.lane == lane).ok_or("a lane without books")?;
        ensure!(book.deliveries.contains(*position), "{position} is not in lane {lane}: {books:?}");
    }
    Ok(())
}

async fn operators_see_who_works_on_what<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k"), None]).await?;
    let before = clock(fixture).await?;
    ensure!(status(fixture).await?.oldest_processing_seconds.is_none(), "nobody works, and something is processing");
    member.claim(1, 1).await?;
    let expected = [(at[0], State::Processing), (at[1], State::Blocked), (at[2], State::Pending)];
    let operator = fixture.operator().await?;
    let query = ListQuery { subscription: Some("s".into()), limit: LIMIT, ..ListQuery::default() };
    let listed = operator.list(&query).await?;
    let found: Vec<_> = listed.iter().filter_map(|row| Some((row.position, row.state?))).collect();
    ensure!(found == expected, "{found:?} are listed instead of {expected:?}");
    for (row, (position, state)) in listed.iter().zip(expected) {
        let record = shown(fixture, member, position).await?;
        ensure!(record.state == state, "{position} is shown as {record:?}");
        ensure!(row.claim == record.claim, "listed is {:?}, shown {:?}", row.claim, record.claim);
        let owner = record.claim.as_ref().map(|claim| claim.instance);
        let expected = (state == State::Processing).then_some(member.joined.instance);
        ensure!(owner == expected, "{position} is worked on by {owner:?} instead of {expected:?}");
        if let Some(claim) = record.claim {
            ensure!(claim.since >= before && claim.beat_at.is_some(), "claimed after {before:?}: {claim:?}");
        }
    }
    let figures = status(fixture).await?;
    let counts = (figures.mode, figures.processing, figures.blocked, figures.pending);
    ensure!(counts == (Mode::Queue, 1, 1, 1), "processing, blocked and pending are {counts:?}");
    ensure!(figures.oldest_processing_seconds.is_some_and(|age| age >= 0.0), "nothing is told of what is processing");
    Ok(())
}

async fn retention_keeps_what_a_queue_needs<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k")]).await?;
    let events = member.store.fetch(&at).await?;
    fixture.pass(SOON).await;
    let policy = PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() };
    while fixture.operator().await?.prune(&policy).await?.more {}
    for (event, number) in events.iter().zip(1..) {
        let claimed = member.claim(1, number).await?.pop().ok_or("nothing was claimed")?;
        ensure!(claimed.event.as_ref() == Some(event), "{claimed:?} came without {event:?}");
        member.done(&claimed).await?;
    }
    Ok(())
}

async fn dead_rows_that_retention_removes_let_their_key_go_on<F: Fixture>(fixture: &F) -> Outcome {
    let feeder = feeder(fixture, queue()).await?;
    let member = &feeder.member;
    let at = feeder.feed(fixture, &[Some("k"), Some("k")]).await?;
    let first = member.claim(1, 1).await?;
    ensure!(member.end(&first[0], failed(State::Dead, 8, Timestamp(0))).await?, "its own claim could not be ended");
    ensure!(member.claim(LIMIT, 2).await?.is_empty(), "the key goes on past its dead event");
    fixture.age_deaths(Duration::from_secs(10)).await;
    let policy = PrunePolicy { dead: Some(Duration::from_secs(1)), keep: None, ..PrunePolicy::default() };
    ensure_eq!(fixture.operator().await?.prune(&policy).await?.dead, 1, "removed");
    ensure_eq!(positions(&member.claim(LIMIT, 3).await?), at[1..]);
    Ok(())
}

async fn a_mode_is_fixed<F: Fixture>(fixture: &F) -> Outcome {
    for (name, mode, other) in [("s", Mode::Queue, Mode::Stream), ("t", Mode::Stream, Mode::Queue)] {
        let wish = Subscription { name: name.into(), mode, ..queue() };
        let first = join_with(fixture, wish.clone()).await?;
        let error = join_with(fixture, Subscription { mode: other, ..wish.clone() }).await.err();
        let error = error.ok_or_else(|| format!("a {mode:?} was joined as a {other:?}"))?;
        ensure_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        ensure!(error.to_string().contains(&format!("pillarbox subscription delete {name}")), "{error}");
        let again = join_with(fixture, wish).await?;
        ensure!(again.joined.subscriptions[0].id == first.joined.subscriptions[0].id, "it is another one now");
        let status = fixture.operator().await?.status().await?;
        let found = status.subscriptions.iter().find(|row| row.name == name).map(|row| row.mode);
        ensure!(found == Some(mode), "a {mode:?} became {found:?}");
    }
    Ok(())
}
