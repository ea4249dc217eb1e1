use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::admin::{Change, Level, ListQuery, Operator, Selection, State};
use pillarbox::store::{
    DeliveryRow, Epoch, LaneRef, LaneWrite, RangeSet, Report, Store, SubscriptionReport, TakeCause,
};
use pillarbox::{ErrorKind, NewEvent, OnDead, Position, Start, Subscription, Timestamp};
use uuid::Uuid;

use super::{
    DEDUP, HOUR, LIMIT, Member, NOTHING, change, ids_of, join_with, killed, lane_of, of_keys, one_lane, owner_of_all,
    parked, positions, refused, set, states, write,
};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        blocked_is_derived_from_the_keys_head,
        status_counts_every_state_once,
        lists_filter_and_stay_in_log_order,
        what_was_settled_is_shown_with_its_epoch,
        requeue_takes_dead_ones_in_log_order_or_one_in_any_state,
        a_requeued_event_that_is_blocked_is_said_to_wait_for_its_head,
        status_tells_deliveries_from_what_was_not_read,
        relane_to_the_same_number_changes_nothing,
        skip_gives_one_up_and_unblocks_its_key,
        pause_and_resume_are_kept_in_the_database,
        delete_and_rename_are_refused_while_a_living_instance_runs_it,
        relane_needs_quiet_and_keeps_each_keys_order,
        relane_keeps_what_lay_before_the_start_and_a_gap_of_one_lane,
        reset_empties_everything_and_positions_go_on,
        a_publication_of_an_operator_is_one_transaction,
        a_delayed_delivery_that_is_due_counts_as_pending_though_nobody_noticed;
    DEDUP:
        an_operator_publishes_a_deduplication_key_once;
}

/// The clock of no log begins later.
const MOMENT: Duration = Duration::from_millis(20);

/// Keys a a b c a a: the first of a is dead, b retries, c is delayed, the last of a is in the log.
pub(super) struct Mixed<F: Fixture> {
    pub(super) member: Member<F::Store>,
    pub(super) operator: F::Operator,
    pub(super) lane: LaneRef,
    pub(super) epoch: Epoch,
    pub(super) at: Vec<Position>,
    pub(super) ids: Vec<Uuid>,
}

pub(super) async fn mixed<F: Fixture>(fixture: &F, on_dead: OnDead) -> Tried<Mixed<F>> {
    fixture.pass(MOMENT).await;
    let at = fixture.publish(of_keys(&["a", "a", "b", "c", "a", "a"])).await?;
    let ids = ids_of(fixture).await?;
    let member = join_with(fixture, Subscription { on_dead, ..one_lane("s") }).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let operator = fixture.operator().await?;
    let now = operator.status().await?.at;
    let put = vec![
        parked(at[0], "a", State::Dead, now),
        parked(at[1], "a", State::Pending, now),
        DeliveryRow { due_at: Timestamp(7), ..parked(at[2], "b", State::Retrying, now) },
        DeliveryRow { due_at: now.plus(HOUR), ..parked(at[3], "c", State::Delayed, now) },
        parked(at[4], "a", State::Pending, now),
    ];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[4]) }).await?, "could not settle");
    Ok(Mixed { member, operator, lane, epoch, at, ids })
}

fn requeue(which: Selection, limit: usize) -> Change {
    Change::Requeue { subscription: "s".into(), which, limit }
}

/// The state of each position.
fn each(at: &[Position], states: impl IntoIterator<Item = State>) -> BTreeMap<Position, State> {
    at.iter().copied().zip(states).collect()
}

async fn blocked_is_derived_from_the_keys_head<F: Fixture>(fixture: &F) -> Outcome {
    use State::*;
    let Mixed { member, operator, at, ids, .. } = mixed(fixture, OnDead::Block).await?;
    ensure_eq!(states(&operator).await?, each(&at, [Dead, Blocked, Retrying, Delayed, Blocked, Pending]));
    let shown = operator.show(ids[4]).await?.ok_or("the event is not shown")?;
    let record = shown.subscriptions[0].delivery.as_ref().ok_or("its delivery is not shown")?;
    ensure_eq!((record.state, record.head), (Blocked, Some((ids[0], at[0], Dead))));

    let joined = member.store.join(super::hello(Subscription { on_dead: OnDead::Skip, ..one_lane("s") })).await?;
    ensure!(!joined.subscriptions[0].created, "the subscription was created again");
    ensure_eq!(states(&operator).await?, each(&at, [Dead, Pending, Retrying, Delayed, Blocked, Pending]));
    Ok(())
}

async fn status_counts_every_state_once<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, at, .. } = mixed(fixture, OnDead::Block).await?;
    let later = operator.status().await?.at.plus(HOUR);
    let more = fixture.publish(vec![NewEvent::new("t", "y").deliver_at(later), NewEvent::new("t", "y")]).await?;
    let report = SubscriptionReport { in_flight: 1, delivered: 9, ..SubscriptionReport::default() };
    let report = Report { subscriptions: [("s".to_string(), report)].into(), draining: false };
    member.store.observe(&report).await?;
    let status = operator.status().await?;
    let s = &status.subscriptions[0];
    let figures = (s.pending, s.delayed, s.processing, s.retrying, s.blocked, s.dead);
    ensure_eq!(figures, (1, 2, 1, 1, 2, 1), "eight events, each counted once");
    ensure_eq!((s.lag, s.floor, s.lanes_owned, s.owners.len(), s.orphaned), (3, at[4], 1, 1, false));
    ensure_eq!((s.oldest_due, s.report.delivered), (Some(Timestamp(7)), 9));
    ensure!(s.oldest_age_seconds.is_some_and(|age| age < 60.0), "the oldest is {:?} old", s.oldest_age_seconds);
    ensure_eq!((status.log.events, status.log.horizon, status.instances[0].lanes), (8, more[1], 1));
    ensure!(status.instances[0].alive && status.log.bytes > 0, "{status:?}");

    drop(operator);
    let status = killed(fixture, member).await?.status().await?;
    let s = &status.subscriptions[0];
    ensure_eq!((s.pending, s.processing, s.lanes_owned, s.orphaned), (2, 0, 0, true));
    ensure!(!status.instances[0].alive, "the instance is called alive");
    Ok(())
}

async fn lists_filter_and_stay_in_log_order<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { operator, mut at, .. } = mixed(fixture, OnDead::Block).await?;
    let other = NewEvent::new("other.x", "y").key("z").header("correlationid", "c1");
    at.extend(fixture.publish(vec![other]).await?);
    let list = async |query: ListQuery, expected: &[usize]| -> Outcome {
        let query = ListQuery { limit: if query.limit == 0 { LIMIT } else { query.limit }, ..query };
        let listed: Vec<Position> = operator.list(&query).await?.iter().map(|row| row.position).collect();
        let expected: Vec<Position> = expected.iter().map(|number| at[*number - 1]).collect();
        ensure_eq!(listed, expected, "{query:?}");
        Ok(())
    };
    let all = ListQuery::default;
    list(all(), &[1, 2, 3, 4, 5, 6, 7]).await?;
    list(ListQuery { limit: 2, ..all() }, &[1, 2]).await?;
    list(ListQuery { key: Some("a".into()), ..all() }, &[1, 2, 5, 6]).await?;
    list(ListQuery { topic: Some("other.*".into()), ..all() }, &[7]).await?;
    list(ListQuery { correlation_id: Some("c1".into()), ..all() }, &[7]).await?;
    list(ListQuery { state: Some(State::Blocked), ..all() }, &[2, 5]).await?;
    list(ListQuery { state: Some(State::Pending), key: Some("a".into()), ..all() }, &[6]).await?;
    let missing = ListQuery { subscription: Some("none".into()), limit: LIMIT, ..all() };
    let kind = operator.list(&missing).await.err().map(|error| error.kind());
    ensure_eq!(kind, Some(ErrorKind::NotFound), "a list of a subscription that is not there");
    Ok(())
}

async fn what_was_settled_is_shown_with_its_epoch<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member: _member, operator, epoch, ids, .. } = mixed(fixture, OnDead::Block).await?;
    ensure!(operator.show(Uuid::new_v4()).await?.is_none(), "an event that is not there is shown");
    let fate = async |id| -> Tried<_> {
        Ok(operator.show(id).await?.ok_or("the event is not shown")?.subscriptions.remove(0))
    };
    let open = fate(ids[5]).await?;
    let is_open = open.wanted && !open.settled && open.delivery.is_none() && open.settled_by.is_none();
    ensure!(is_open, "an event that was not settled: {open:?}");
    let settled = fate(ids[0]).await?;
    ensure!(settled.settled && settled.owner.is_some_and(|(_, alive)| alive), "one that was: {settled:?}");
    ensure_eq!(settled.settled_by.map(|by| by.epoch), Some(epoch));
    Ok(())
}

async fn requeue_takes_dead_ones_in_log_order_or_one_in_any_state<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, lane, at, ids, .. } = mixed(fixture, OnDead::Block).await?;
    let before = member.lane(lane).await?.revision;
    ensure_eq!(change(&operator, requeue(Selection::Key("b".into()), 10)).await?.count, 0, "none of b is dead");
    ensure_eq!(change(&operator, requeue(Selection::All, 0)).await?.count, 0, "at most none");
    ensure_eq!(change(&operator, requeue(Selection::All, 10)).await?.events, [ids[0]]);
    ensure_eq!(states(&operator).await?[&at[0]], State::Pending);
    ensure!(member.lane(lane).await?.revision > before, "the owner does not load again");
    ensure_eq!(change(&operator, requeue(Selection::Event(ids[2]), 10)).await?.count, 1);
    let shown = operator.show(ids[2]).await?.ok_or("the event is not shown")?.subscriptions.remove(0);
    let record = shown.delivery.ok_or("its delivery is not shown")?;
    ensure_eq!((record.state, record.attempts), (State::Pending, 0));
    for (which, kind) in [
        (Selection::Event(ids[5]), ErrorKind::Invalid),
        (Selection::Event(Uuid::new_v4()), ErrorKind::NotFound),
        (Selection::Version("a".into(), 1), ErrorKind::NotFound),
    ] {
        ensure_eq!(refused(&operator, requeue(which.clone(), 10)).await?.kind(), kind, "{which:?}");
    }
    Ok(())
}

async fn a_requeued_event_that_is_blocked_is_said_to_wait_for_its_head<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { operator, at, ids, .. } = mixed(fixture, OnDead::Block).await?;
    let changed = change(&operator, requeue(Selection::Event(ids[1]), 10)).await?;
    let waits = format!("waits for event {} of its key, at position {}, which is dead", ids[0], at[0]);
    ensure!(changed.count == 1 && changed.message.contains(&waits), "{changed:?}");
    let changed = change(&operator, requeue(Selection::Event(ids[2]), 10)).await?;
    ensure!(changed.message.contains("due now"), "it waits for none: {changed:?}");
    Ok(())
}

async fn status_tells_deliveries_from_what_was_not_read<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { operator, .. } = mixed(fixture, OnDead::Block).await?;
    let later = operator.status().await?.at.plus(HOUR);
    fixture.publish(vec![NewEvent::new("t", "y").deliver_at(later)]).await?;
    let s = operator.status().await?.subscriptions.remove(0);
    ensure_eq!((s.deliveries, s.unread()), (5, 2), "the last of a and a delayed event were not read");
    ensure_eq!((s.undelivered(), s.dead), (6, 1));
    Ok(())
}

async fn skip_gives_one_up_and_unblocks_its_key<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { operator, at, ids, .. } = mixed(fixture, OnDead::Block).await?;
    let skip = |event, reason: &str| Change::Skip { subscription: "s".into(), event, reason: reason.into() };
    ensure_eq!(refused(&operator, skip(ids[0], " ")).await?.kind(), ErrorKind::Invalid, "a skip without a reason");
    let error = refused(&operator, skip(ids[5], "r")).await?;
    ensure!(error.to_string().contains("nothing to skip"), "{error}");
    change(&operator, skip(ids[0], "poison")).await?;
    ensure_eq!(states(&operator).await?[&at[1]], State::Pending);
    let fate = operator.show(ids[0]).await?.ok_or("the event is not shown")?.subscriptions.remove(0);
    ensure_eq!((fate.skipped.map(|skipped| skipped.0), fate.delivery.is_none()), (Some("poison".to_owned()), true));
    ensure_eq!(operator.books().await?.lanes[0].skipped, set(&at[..1]));
    Ok(())
}

async fn pause_and_resume_are_kept_in_the_database<F: Fixture>(fixture: &F) -> Outcome {
    let _member = join_with(fixture, one_lane("s")).await?;
    let operator = fixture.operator().await?;
    let is_paused = async || -> Tried<bool> { Ok(fixture.operator().await?.status().await?.subscriptions[0].paused) };
    operator.change(&Change::pause("s"), true).await?;
    ensure!(!is_paused().await?, "a dry run has paused it");
    change(&operator, Change::pause("s")).await?;
    join_with(fixture, one_lane("s")).await?;
    ensure!(is_paused().await?, "joining has resumed it");
    ensure_eq!(change(&operator, Change::Resume("s".into())).await?.count, 1);
    ensure!(!is_paused().await?, "it is still paused");
    ensure_eq!(refused(&operator, Change::pause("none")).await?.kind(), ErrorKind::NotFound);
    Ok(())
}

async fn delete_and_rename_are_refused_while_a_living_instance_runs_it<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, .. } = mixed(fixture, OnDead::Block).await?;
    let rename = |to: &str| Change::Rename { from: "s".into(), to: to.into() };
    let runner = format!("instance {}", member.joined.instance.0);
    for change in [Change::Delete("s".into()), rename("r")] {
        let error = refused(&operator, change).await?;
        ensure!(error.to_string().contains(&runner), "{error}");
    }
    drop(operator);
    let operator = killed(fixture, member).await?;
    ensure_eq!(refused(&operator, rename("no spaces")).await?.kind(), ErrorKind::Invalid);
    ensure_eq!(refused(&operator, rename("s")).await?.kind(), ErrorKind::Invalid);
    change(&operator, rename("r")).await?;
    ensure_eq!(operator.status().await?.subscriptions[0].dead, 1, "a rename keeps everything");
    change(&operator, Change::Delete("r".into())).await?;
    ensure!(operator.status().await?.subscriptions.is_empty(), "it is not deleted");
    ensure_eq!(fixture.rows().await, 0, "rows about subscriptions");
    Ok(())
}

fn relane(lanes: u32) -> Change {
    Change::Relane { subscription: "s".into(), lanes }
}

async fn relane_needs_quiet_and_keeps_each_keys_order<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, lane, epoch, at, .. } = mixed(fixture, OnDead::Block).await?;
    let error = refused(&operator, relane(3)).await?;
    ensure!(error.to_string().contains("pause"), "{error}");
    change(&operator, Change::pause("s")).await?;
    ensure_eq!(refused(&operator, relane(0)).await?.kind(), ErrorKind::Invalid);
    let busy = SubscriptionReport { in_flight: 1, ..SubscriptionReport::default() };
    let busy = Report { subscriptions: [("s".to_string(), busy)].into(), draining: false };
    member.store.observe(&busy).await?;
    let error = refused(&operator, relane(3)).await?;
    ensure!(error.to_string().contains("in flight"), "{error}");
    member.fleet().await?;
    let covered = operator.books().await?.lanes[0].covered.clone();
    change(&operator, relane(3)).await?;

    ensure!(!member.settle(write(lane, epoch, at[5])).await?, "the old owner is not fenced");
    let fleet = member.fleet().await?;
    ensure_eq!((fleet.lanes.len(), fleet.subscriptions[0].lanes), (3, 3));
    let books = operator.books().await?.lanes;
    let are_equal = books.iter().all(|book| book.covered == covered && book.floor == at[4]);
    ensure!(are_equal && books.iter().all(|book| book.before_start.is_empty()), "the books say {books:?}");
    let mut moved = Vec::new();
    for view in &fleet.lanes {
        let rows = member.load(view.lane, view.epoch).await?.deliveries;
        let are_here = rows.iter().all(|row| lane_of(row.key_hash(), row.position, 3) == view.lane.lane);
        ensure!(are_here, "{:?} has {rows:?}", view.lane);
        moved.extend(rows.iter().map(|row| row.position));
        let mut of_a = rows.iter().filter(|row| row.key.as_deref() == Some("a"));
        ensure!(of_a.by_ref().is_sorted_by_key(|row| row.position), "the order of a key was lost: {rows:?}");
    }
    moved.sort_unstable();
    ensure_eq!(moved, at[..5], "what was moved");
    let ahead = member.lane_ref(1);
    let epoch = member.take(ahead, TakeCause::Free).await?;
    ensure!(member.settle(write(ahead, epoch, at[5])).await?, "could not settle");
    let error = refused(&operator, relane(2)).await?;
    ensure!(error.to_string().contains("same place"), "{error}");
    Ok(())
}

async fn relane_to_the_same_number_changes_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, lane, epoch, at, .. } = mixed(fixture, OnDead::Block).await?;
    let changed = change(&operator, relane(1)).await?;
    ensure_eq!((changed.count, &*changed.message), (0, "'s' already has 1 lane"));
    ensure!(member.settle(write(lane, epoch, at[5])).await?, "the owner was fenced");
    Ok(())
}

async fn relane_keeps_what_lay_before_the_start_and_a_gap_of_one_lane<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a"; 9])).await?;
    let wish = Subscription { lanes: 2, start: Start::Position(at[3]), ..Subscription::new("s") };
    let member = join_with(fixture, wish).await?;
    for number in 0..2 {
        let lane = member.lane_ref(number);
        let epoch = member.take(lane, TakeCause::Free).await?;
        ensure!(member.settle(write(lane, epoch, at[5])).await?, "could not settle");
        if number == 1 {
            fixture.move_floor("s", number, at[6]).await;
        }
        ensure!(member.settle(write(lane, epoch, at[8])).await?, "could not settle to the end");
    }
    let operator = fixture.operator().await?;
    change(&operator, Change::pause("s")).await?;
    change(&operator, relane(3)).await?;
    let sets: Vec<(RangeSet, RangeSet)> =
        operator.books().await?.lanes.into_iter().map(|book| (book.before_start, book.covered)).collect();
    let covered: Vec<Position> = [&at[4..6], &at[7..9]].concat();
    ensure_eq!(sets, vec![(set(&at[..4]), set(&covered)); 3]);
    Ok(())
}

async fn reset_empties_everything_and_positions_go_on<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, at, .. } = mixed(fixture, OnDead::Block).await?;
    operator.reset().await?;
    let status = operator.status().await?;
    ensure_eq!((status.log.events, status.log.log_start, status.log.incarnation), (0, at[5] + 1, 2));
    ensure_eq!((status.subscriptions.len(), status.subscriptions[0].dead), (1, 0), "it is being run");
    let next = fixture.publish(of_keys(&["a"])).await?;
    ensure_eq!(next, [at[5] + 1]);
    ensure_eq!(positions(&member.poll_from(at[5]).await?.1.events), next);
    drop(operator);
    let operator = killed(fixture, member).await?;
    operator.reset().await?;
    ensure!(operator.status().await?.subscriptions.is_empty(), "a subscription that nobody runs is left");
    let failed = operator.doctor().await?.into_iter().find(|check| check.level == Level::Failed);
    ensure_eq!(failed, None);
    Ok(())
}

async fn a_publication_of_an_operator_is_one_transaction<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let ids = operator.publish(&[NewEvent::new("t", "y"), NewEvent::new("t", "y")]).await?;
    ensure_eq!(ids_of(fixture).await?, ids);
    let bad = [NewEvent::new("t", "y"), NewEvent::new("t", "y").json_text("{")];
    let kind = operator.publish(&bad).await.err().map(|error| error.kind());
    ensure_eq!(kind, Some(ErrorKind::Invalid), "what is no JSON");
    ensure_eq!(operator.status().await?.log.events, 2);
    Ok(())
}

async fn an_operator_publishes_a_deduplication_key_once<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let ids = operator.publish(&[NewEvent::new("t", "y"), NewEvent::new("t", "y").dedup_key("d")]).await?;
    ensure_eq!(operator.publish(&[NewEvent::new("t", "y").dedup_key("d")]).await?, [ids[1]]);
    ensure_eq!(operator.status().await?.log.events, 2);
    Ok(())
}

async fn a_delayed_delivery_that_is_due_counts_as_pending_though_nobody_noticed<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a", "b"])).await?;
    let ids = ids_of(fixture).await?;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let operator = fixture.operator().await?;
    let now = operator.status().await?.at;
    let due_at = Timestamp(now.0 - 600_000);
    let put = vec![
        DeliveryRow { due_at, ..parked(at[0], "a", State::Delayed, now) },
        DeliveryRow { due_at: now.plus(HOUR), ..parked(at[1], "b", State::Delayed, now) },
    ];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let s = operator.status().await?.subscriptions.remove(0);
    ensure_eq!((s.pending, s.delayed, s.oldest_due), (1, 1, Some(due_at)));
    let age = s.oldest_age_seconds.unwrap_or_default();
    ensure!((600.0..660.0).contains(&age), "{age} s, and it became due 600 s ago");
    ensure_eq!(states(&operator).await?, each(&at, [State::Pending, State::Delayed]));
    let shown = operator.show(ids[0]).await?.ok_or("the event is not shown")?;
    ensure_eq!(shown.subscriptions[0].delivery.as_ref().map(|delivery| delivery.state), Some(State::Pending));
    Ok(())
}
