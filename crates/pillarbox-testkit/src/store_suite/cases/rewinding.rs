use pillarbox::admin::{Change, Operator, PrunePolicy, State};
use pillarbox::store::{Cursor, LaneWrite, RangeSet, TakeCause};
use pillarbox::{OnDead, Position, Start, Subscription};
use uuid::Uuid;

use super::operating::{Mixed, mixed};
use super::retention::prune_all;
use super::{
    DAY, HOUR, NOTHING, change, ids_of, join_with, of_keys, one_lane, owner_of_all, parked, rewind, set, states, write,
};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        a_rewind_fences_the_owner_and_replays,
        a_rewind_to_what_was_not_reached_says_that_nothing_is_replayed,
        a_rewind_of_a_key_replays_its_settled_events_as_a_chain,
        a_rewind_ends_what_was_given_up_above_its_place,
        a_rewind_replays_what_retention_has_only_kept_aside,
        a_rewind_of_a_key_replays_what_retention_has_only_kept_aside;
}

async fn a_rewind_fences_the_owner_and_replays<F: Fixture>(fixture: &F) -> Outcome {
    use State::{Blocked, Dead, Pending};
    let Mixed { member, operator, lane, epoch, at, .. } = mixed(fixture, OnDead::Block).await?;
    change(&operator, rewind(Start::Position(at[1]), None)).await?;
    ensure!(!member.settle(write(lane, epoch, at[5])).await?, "the owner can write over it");
    let expected = at.iter().copied().zip([Dead, Blocked, Pending, Pending, Pending, Pending]).collect();
    ensure_eq!(states(&operator).await?, expected, "what was parked above the target comes from the log");
    let epoch = member.take(lane, TakeCause::Free).await?;
    ensure_eq!(member.load(lane, epoch).await?.cursor.floor, at[1]);
    change(&operator, rewind(Start::Now, None)).await?;
    let floor = operator.status().await?.subscriptions[0].floor;
    ensure_eq!(floor, at[1], "never forwards: nothing is left out silently");
    Ok(())
}

async fn a_rewind_to_what_was_not_reached_says_that_nothing_is_replayed<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { operator, at, .. } = mixed(fixture, OnDead::Block).await?;
    for to in [at[4], at[5]] {
        let changed = change(&operator, rewind(Start::Position(to), None)).await?;
        ensure!(changed.count == 0 && changed.message.starts_with("nothing to replay"), "above {to}: {changed:?}");
        ensure_eq!(operator.status().await?.subscriptions[0].floor, at[4]);
    }
    let changed = change(&operator, rewind(Start::Position(at[3]), None)).await?;
    ensure!(changed.count == 1 && changed.message.contains("replays the events"), "{changed:?}");
    Ok(())
}

async fn a_rewind_of_a_key_replays_its_settled_events_as_a_chain<F: Fixture>(fixture: &F) -> Outcome {
    let Mixed { member, operator, lane, at, ids, .. } = mixed(fixture, OnDead::Block).await?;
    let done = change(&operator, rewind(Start::Position(at[0]), Some("a"))).await?;
    ensure_eq!(done.events, [ids[1], ids[4]], "the last one of the key was not read yet");
    let view = member.lane(lane).await?;
    ensure!(view.revision > 0, "the owner does not load again");
    let state = member.load(lane, view.epoch).await?;
    let order: Vec<_> = state.deliveries.iter().map(|row| row.position).collect();
    ensure_eq!(order, [at[0], at[2], at[3], at[1], at[4]], "fresh arrivals, in log order");
    ensure_eq!(state.cursor.floor, at[4]);
    let none = change(&operator, rewind(Start::Beginning, Some("zzz"))).await?;
    ensure_eq!(none.count, 0, "a key without events");
    Ok(())
}

async fn a_rewind_ends_what_was_given_up_above_its_place<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a", "b", "c", "d", "e", "f"])).await?;
    let ids = ids_of(fixture).await?;
    // Another subscription keeps the events in the log.
    let _keeper = join_with(fixture, one_lane("keeper")).await?;
    let member = join_with(fixture, Subscription { hold: Some(9 * DAY), ..one_lane("s") }).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let operator = fixture.operator().await?;
    // The fourth is given up alone, and the cursor that says that it was passed is cut.
    let put = vec![parked(at[3], "d", State::Dead, operator.status().await?.at)];
    let cursor = Cursor { floor: at[0], settled: set(&at[3..4]), anchor: None };
    let first = LaneWrite { put, cursor: cursor.clone(), ..write(lane, epoch, 0) };
    ensure!(member.settle(first).await?, "could not settle");
    let skip = Change::Skip { subscription: "s".into(), event: ids[3], reason: "alone".into() };
    change(&operator, skip).await?;
    let revision = member.lane(lane).await?.revision;
    let cut = Cursor { settled: RangeSet::new(), ..cursor };
    ensure!(member.settle(LaneWrite { cursor: cut, revision, ..write(lane, epoch, 0) }).await?, "could not cut it");
    fixture.age(at[4], 10 * DAY).await;
    operator.prune(&PrunePolicy { keep: Some(7 * DAY), ..PrunePolicy::default() }).await?;

    let check = async |left: &[usize]| -> Outcome {
        let books = operator.books().await?.lanes.into_iter().find(|book| book.subscription == "s");
        let left: Vec<_> = left.iter().map(|number| at[*number - 1]).collect();
        ensure_eq!(books.ok_or("the lane has no books")?.skipped, set(&left), "what is given up");
        Ok(())
    };
    check(&[2, 3, 4, 5]).await?;
    change(&operator, rewind(Start::Beginning, Some("c"))).await?;
    // Of one key its own event alone.
    check(&[2, 4, 5]).await?;
    change(&operator, rewind(Start::Position(at[3]), None)).await?;
    check(&[2, 4]).await?;
    change(&operator, rewind(Start::Position(at[0]), None)).await?;
    check(&[]).await
}

/// Six events, of which retention has removed the first three, and kept two aside for deliveries that are dead.
async fn kept_aside<F: Fixture>(fixture: &F) -> Tried<(F::Operator, Vec<Position>, Vec<Uuid>)> {
    fixture.divide(3).await;
    let at = fixture.publish(of_keys(&["a", "b", "b", "a", "b", "c"])).await?;
    let ids = ids_of(fixture).await?;
    fixture.age(at[2], 10 * DAY).await;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let operator = fixture.operator().await?;
    let now = operator.status().await?.at;
    let put = vec![parked(at[0], "a", State::Dead, now), parked(at[1], "b", State::Dead, now)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[5]) }).await?, "could not settle");
    let policy = PrunePolicy { keep: Some(HOUR), ..PrunePolicy::default() };
    let pruned = prune_all(&operator, &policy).await?;
    ensure_eq!((pruned.events, pruned.kept), (3, 2), "what retention removed and kept");
    Ok((operator, at, ids))
}

async fn check_below<F: Fixture>(operator: &F::Operator, at: &[Position], key: Option<&str>) -> Outcome {
    change(operator, rewind(Start::Position(at[1]), key)).await?;
    let below = states(operator).await?;
    ensure_eq!((below[&at[0]], below[&at[1]]), (State::Dead, State::Dead), "they lie below");
    Ok(())
}

async fn a_rewind_replays_what_retention_has_only_kept_aside<F: Fixture>(fixture: &F) -> Outcome {
    let (operator, at, _) = kept_aside(fixture).await?;
    check_below::<F>(&operator, &at, None).await?;
    change(&operator, rewind(Start::Beginning, None)).await?;
    let states = states(&operator).await?;
    ensure_eq!((states[&at[0]], states[&at[1]]), (State::Pending, State::Pending));
    Ok(())
}

async fn a_rewind_of_a_key_replays_what_retention_has_only_kept_aside<F: Fixture>(fixture: &F) -> Outcome {
    let (operator, at, ids) = kept_aside(fixture).await?;
    check_below::<F>(&operator, &at, Some("a")).await?;
    let done = change(&operator, rewind(Start::Beginning, Some("a"))).await?;
    let states = states(&operator).await?;
    ensure_eq!((states[&at[0]], states[&at[1]], states[&at[3]]), (State::Pending, State::Dead, State::Blocked));
    ensure_eq!((done.count, done.events), (2, vec![ids[0], ids[3]]));
    Ok(())
}
