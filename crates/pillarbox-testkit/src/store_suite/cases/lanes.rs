use std::sync::Arc;

use pillarbox::admin::{Cause, Change, Operator, State, why};
use pillarbox::store::{DeliveryRow, KeyHash, LaneRef, LaneWrite, Store, TakeCause, lane_of};
use pillarbox::{Event, NewEvent, Start, Subscription, Timestamp};

use super::{Member, NOTHING, delivery, events, first_lane_key, join, join_with, owner, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        lanes_are_changed_in_number_only_when_nobody_works,
        changed_lanes_take_their_deliveries_along_and_fence_their_owners,
        a_replayed_key_is_a_fence,
        a_row_whose_range_was_left_out_of_the_cursor_goes_behind_what_is_replayed_before_it,
        a_replayed_event_whose_time_has_not_come_waits_for_it,
        a_key_of_which_nothing_is_replayed_is_no_fence,
        a_key_that_is_replayed_from_before_the_start_is_accounted_for,
        the_status_counts_what_is_dead;
}

/// How many lanes there are afterwards.
const LANES: u32 = 5;

async fn relane<F: Fixture>(fixture: &F) -> Tried<pillarbox::Result<pillarbox::admin::Changed>> {
    let change = Change::Relane { subscription: "s".into(), lanes: LANES };
    Ok(fixture.operator().await?.change(&change, false).await)
}

async fn lanes_are_changed_in_number_only_when_nobody_works<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    ensure!(relane(fixture).await?.is_err(), "the lanes of a subscription that runs were changed");
    fixture.operator().await?.change(&Change::pause("s"), false).await?;
    ensure!(member.settle(write(lane, epoch, at[0])).await?, "could not settle");
    ensure!(relane(fixture).await?.is_err(), "lanes that are not at the same place were changed");
    let lanes = member.fleet().await?.lanes.len();
    ensure!(lanes == 2, "there are {lanes} lanes");
    Ok(())
}

/// Pauses, and settles everything with a row for each of these events.
async fn settle_all<S: Store>(member: &Member<S>, events: &[Arc<Event>]) -> Tried<Vec<LaneWrite>> {
    let last = events.last().map_or(0, |event| event.position);
    let mut writes = Vec::new();
    for number in 0..2 {
        let lane = member.lane_ref(number);
        let epoch = member.take(lane, TakeCause::Free).await?;
        let own = events.iter().filter(|event| lane_of(event.key_hash(), event.position, 2) == number);
        let row = |(arrival, event): (i64, &Arc<Event>)| DeliveryRow {
            key: event.key.clone(),
            ..delivery(event.position, arrival)
        };
        let put = (1..).zip(own).map(row).collect();
        let write = LaneWrite { put, ..write(lane, epoch, last) };
        ensure!(member.settle(write.clone()).await?, "could not settle {lane:?}");
        writes.push(write);
    }
    Ok(writes)
}

async fn changed_lanes_take_their_deliveries_along_and_fence_their_owners<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let keys: Vec<String> = (0..12).map(|number| format!("key {}", number % 6)).collect();
    let published = keys.iter().map(|key| NewEvent::new("a", "t").key(key.clone())).collect();
    let at = fixture.publish(published).await?;
    let before = settle_all(&member, &member.store.fetch(&at).await?).await?;
    fixture.operator().await?.change(&Change::pause("s"), false).await?;
    relane(fixture).await??;
    for write in before {
        ensure!(!member.settle(LaneWrite { put: Vec::new(), ..write }).await?, "an owner of before settled its lane");
    }
    let mut found = Vec::new();
    for number in 0..LANES {
        let lane = member.lane_ref(number);
        let epoch = member.take(lane, TakeCause::Free).await?;
        for row in member.load(lane, epoch).await?.deliveries {
            let of_key = lane_of(row.key.as_deref().map(KeyHash::of), row.position, LANES);
            ensure!(of_key == number, "{row:?} lies in lane {number}");
            found.push(row);
        }
    }
    for key in keys {
        let of_key = found.iter().filter(|row| row.key.as_deref() == Some(&*key));
        let positions: Vec<_> = of_key.map(|row| row.position).collect();
        ensure!(positions.len() == 2 && positions.is_sorted(), "key {key} has its deliveries at {positions:?}");
    }
    Ok(())
}

fn replay_from(position: i64) -> Change {
    Change::Rewind { subscription: "s".into(), to: Start::Position(position), key: Some(first_lane_key()) }
}

async fn a_replayed_key_is_a_fence<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    ensure!(member.settle(write(lane, epoch, at[1])).await?, "could not settle");
    let changed = fixture.operator().await?.change(&replay_from(0), false).await?;
    ensure!(changed.count == 2, "{changed:?} for two settled events");
    // Put behind what the owner knows, it would stand before what is replayed.
    let put = LaneWrite { put: vec![delivery(at[2], 1)], ..write(lane, epoch, at[2]) };
    ensure!(!member.settle(put).await?, "who does not know of the replay put a delivery of its key");
    Ok(())
}

async fn a_row_whose_range_was_left_out_of_the_cursor_goes_behind_what_is_replayed_before_it<F: Fixture>(
    fixture: &F,
) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    // Where a cursor has as many ranges as it may, it does not say that what has a row is settled.
    let put = LaneWrite { put: vec![delivery(at[2], 1)], ..write(lane, epoch, at[1]) };
    ensure!(member.settle(put).await?, "could not settle");
    let changed = fixture.operator().await?.change(&replay_from(0), false).await?;
    ensure!(changed.count == 3, "{changed:?} for two settled events and a row");
    let epoch = member.take(lane, TakeCause::Free).await?;
    let state = member.load(lane, epoch).await?;
    let order: Vec<_> = state.deliveries.iter().map(|row| row.position).collect();
    ensure!(order == at, "{at:?} are delivered in the order {order:?}");
    Ok(())
}

async fn a_replayed_event_whose_time_has_not_come_waits_for_it<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let later = Timestamp(9_999_999_999_999);
    let [now, delayed] = [events("a", 1)[0].clone(), events("a", 1)[0].clone().deliver_at(later)];
    let at = fixture.publish(vec![now, delayed]).await?;
    // As where a filter did not want them.
    ensure!(member.settle(write(lane, epoch, at[1])).await?, "could not settle");
    fixture.operator().await?.change(&replay_from(0), false).await?;
    let epoch = member.take(lane, TakeCause::Free).await?;
    let rows = member.load(lane, epoch).await?.deliveries;
    let states: Vec<_> = rows.iter().map(|row| (row.position, row.state)).collect();
    ensure!(states == [(at[0], State::Pending), (at[1], State::Delayed)], "{states:?}");
    ensure!(rows[1].due_at == later, "it is due at {}", rows[1].due_at);
    Ok(())
}

async fn a_key_of_which_nothing_is_replayed_is_no_fence<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    ensure!(member.settle(write(lane, epoch, at[0])).await?, "could not settle");
    let changed = fixture.operator().await?.change(&replay_from(at[0]), false).await?;
    ensure!(changed.count == 0, "{changed:?} with nothing settled above");
    ensure!(member.settle(write(lane, epoch, at[1])).await?, "the owner lost its lane for nothing");
    Ok(())
}

async fn a_key_that_is_replayed_from_before_the_start_is_accounted_for<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(events("a", 2)).await?;
    let member = join_with(fixture, Subscription { lanes: 2, start: Start::Now, ..Subscription::new("s") }).await?;
    let operator = fixture.operator().await?;
    let id = member.store.fetch(&at).await?[1].id;
    operator.change(&replay_from(at[0]), false).await?;
    let lane: LaneRef = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let state = member.load(lane, epoch).await?;
    ensure!(state.deliveries.iter().map(|row| row.position).eq([at[1]]), "{:?} is to be replayed", state.deliveries);
    let done = LaneWrite { finish: vec![at[1]], revision: state.revision, ..write(lane, epoch, state.cursor.floor) };
    ensure!(member.settle(done).await?, "could not settle");
    let record = operator.show(id).await?.ok_or("the event is not in the log")?;
    let cause = why(&record, &record.subscriptions[0], &operator.status().await?).cause;
    ensure!(cause == Cause::Delivered, "what was delivered after all is called {cause:?}");
    let book = operator.books().await?.lanes.remove(lane.lane as usize);
    ensure!(book.before_start.contains(at[0]) && !book.before_start.contains(at[1]), "the books say {book:?}");
    ensure!(book.covered.contains(at[1]), "nobody accounts for it: {book:?}");
    Ok(())
}

async fn the_status_counts_what_is_dead<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let dead = |position| DeliveryRow { state: State::Dead, ..delivery(position, position) };
    let put = at.iter().map(|position| dead(*position)).collect();
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let status = fixture.operator().await?.status().await?;
    let row = status.subscriptions.iter().find(|row| row.name == "s").ok_or("it is not in the status")?;
    // Where the first one blocks its key, the second one waits behind it.
    ensure!(row.dead + row.blocked == 2 && row.dead >= 1, "{} dead, {} blocked", row.dead, row.blocked);
    Ok(())
}
