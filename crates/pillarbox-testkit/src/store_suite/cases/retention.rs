use std::time::Duration;

use pillarbox::admin::{Cause, Change, Operator, PrunePolicy, why};
use pillarbox::limit::{CONTENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, NAME_BYTES_MAX};
use pillarbox::store::{Cursor, Epoch, LaneRef, LaneWrite, RangeSet, Report, Store, Take, TakeCause};
use pillarbox::{ErrorKind, NewEvent, Subscription};

use super::{HOLD, Member, NOTHING, delivery, events, join, join_with, owner, set, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        what_is_too_large_is_refused,
        what_nobody_has_received_stays_unless_told,
        a_dry_run_counts_and_removes_nothing,
        what_a_subscription_has_not_passed_stays,
        a_hold_that_is_over_is_a_fence_and_is_recorded,
        a_hold_gives_up_nothing_that_was_delivered_under_a_former_filter,
        a_skip_outlives_a_settlement_that_is_repeated;
    HOLD:
        a_silent_owner_that_holds_its_lock_is_not_waited_for;
}

/// Longer ago than that.
const MOMENT: Duration = Duration::from_millis(20);

/// Joins with a single lane and takes it.
async fn owner_of_all<F: Fixture>(fixture: &F) -> Tried<(Member<F::Store>, LaneRef, Epoch)> {
    let member = join_with(fixture, Subscription { lanes: 1, ..Subscription::new("s") }).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    Ok((member, lane, epoch))
}

/// Everything that may go goes, however young.
fn at_once() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() }
}

async fn what_is_too_large_is_refused<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let event = || NewEvent::new("t", "y");
    let large = [
        ("headers", event().header("a", "x".repeat(HEADERS_BYTES_MAX))),
        ("content type", NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX + 1)), ..event() }),
        ("key", event().key("x".repeat(NAME_BYTES_MAX + 1))),
    ];
    for (what, large) in large {
        match operator.publish(&[event(), large]).await {
            Err(error) => ensure!(error.kind() == ErrorKind::Invalid, "{what}: {error}"),
            Ok(ids) => return Err(format!("{what}: {ids:?} were published").into()),
        }
    }
    let edge = NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX)), ..event() };
    operator.publish(&[edge.header("a", "x".repeat(HEADERS_BYTES_MAX - 100))]).await?;
    let events = operator.status().await?.log.events;
    ensure!(events == 1, "{events} events are there");
    Ok(())
}

async fn what_nobody_has_received_stays_unless_told<F: Fixture>(fixture: &F) -> Outcome {
    fixture.publish(events("a", 3)).await?;
    fixture.pass(MOMENT).await;
    let operator = fixture.operator().await?;
    let dry = PrunePolicy { dry_run: true, ..at_once() };
    let would = operator.prune(&dry).await?;
    ensure!(would.events == 0, "untold, it would remove {would:?}");
    // Where whole tables go, the one in use does not.
    let would = operator.prune(&PrunePolicy { unreceived: true, ..dry }).await?;
    ensure!(would.events == 3 || fixture.features().whole_tables, "told, it would remove {would:?}");
    let pruned = operator.prune(&at_once()).await?;
    ensure!(pruned.events == 0, "{pruned:?} was removed");
    let left = operator.status().await?.log.events;
    ensure!(left == 3, "{left} events are left");
    Ok(())
}

async fn a_dry_run_counts_and_removes_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    ensure!(member.settle(write(lane, epoch, at[2])).await?, "could not settle");
    fixture.pass(MOMENT).await;
    let operator = fixture.operator().await?;
    for _ in 0..2 {
        let would = operator.prune(&PrunePolicy { dry_run: true, ..at_once() }).await?;
        let counted = would.events == 3 || fixture.features().whole_tables;
        ensure!(counted && would.held_by.is_none(), "it would remove {would:?}");
        ensure!(member.store.fetch(&at).await?.len() == 3, "a dry run removed events");
    }
    let hour = PrunePolicy { keep: Some(Duration::from_secs(3600)), dry_run: true, ..PrunePolicy::default() };
    let would = operator.prune(&hour).await?;
    ensure!(would.events == 0, "of what is young it would remove {would:?}");
    Ok(())
}

async fn what_a_subscription_has_not_passed_stays<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    ensure!(member.settle(write(lane, epoch, at[0])).await?, "could not settle");
    fixture.pass(MOMENT).await;
    let operator = fixture.operator().await?;
    for policy in [PrunePolicy { dry_run: true, ..at_once() }, at_once()] {
        let pruned = operator.prune(&PrunePolicy { unreceived: true, ..policy }).await?;
        ensure!(pruned.events <= 1, "{pruned:?} with an owner at the first of three");
        ensure!(member.store.fetch(&at[1..]).await?.len() == 2, "what was not passed is gone");
    }
    Ok(())
}

async fn a_hold_that_is_over_is_a_fence_and_is_recorded<F: Fixture>(fixture: &F) -> Outcome {
    let wish = Subscription { lanes: 1, hold: Some(Duration::from_millis(1)), ..Subscription::new("s") };
    let member = join_with(fixture, wish).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let ids: Vec<_> = member.store.fetch(&at).await?.iter().map(|event| event.id).collect();
    ensure!(member.settle(write(lane, epoch, at[0])).await?, "could not settle");
    fixture.pass(MOMENT).await;
    let operator = fixture.operator().await?;
    let kept = operator.prune(&PrunePolicy { held: false, ..at_once() }).await?;
    ensure!(kept.undelivered == 0, "untold, it dropped {kept:?}");
    ensure!(member.settle(write(lane, epoch, at[0])).await?, "what is not told to drop anything fences the owner");
    let alarms = operator.status().await?.log.alarms;
    ensure!(!alarms.iter().any(|alarm| alarm.contains("has lost")), "the alarms are {alarms:?}");
    let dropped = operator.prune(&at_once()).await?;
    ensure!(dropped.undelivered == 2, "told, it dropped {dropped:?}");
    ensure!(!member.settle(write(lane, epoch, at[0])).await?, "the owner settled over what was dropped");
    let alarms = operator.status().await?.log.alarms;
    ensure!(alarms.iter().any(|alarm| alarm.contains("'s' has lost 2 events")), "the alarms are {alarms:?}");
    let books = operator.books().await?.lanes.remove(0);
    ensure!(books.floor >= at[2] && books.skipped == set(&at[1..]), "the books say {books:?}");
    // Where retention has removed the event too, there is nothing to tell.
    if let Some(record) = operator.show(ids[1]).await? {
        let cause = why(&record, &record.subscriptions[0], &operator.status().await?).cause;
        ensure!(cause == Cause::Pruned, "what was dropped is called {cause:?}");
    }
    Ok(())
}

/// A cursor is cut where it has more ranges than it may; the record of the former filter still says what had been settled.
async fn a_hold_gives_up_nothing_that_was_delivered_under_a_former_filter<F: Fixture>(fixture: &F) -> Outcome {
    let wish = Subscription { lanes: 1, hold: Some(Duration::from_millis(1)), ..Subscription::new("s") };
    let old = join_with(fixture, wish.clone()).await?;
    let lane = old.first_lane();
    let epoch = old.take(lane, TakeCause::Free).await?;
    let at = fixture.publish(events("a", 4)).await?;
    let ids: Vec<_> = old.store.fetch(&at).await?.iter().map(|event| event.id).collect();
    let cursor = Cursor { floor: at[0], settled: set(&at[2..3]), anchor: None };
    ensure!(old.settle(LaneWrite { cursor: cursor.clone(), ..write(lane, epoch, 0) }).await?, "could not settle");
    let new = join_with(fixture, wish.topics(["a", "b"])).await?;
    let epoch = new.take(lane, TakeCause::Free).await?;
    let cut = Cursor { settled: RangeSet::new(), ..cursor };
    ensure!(new.settle(LaneWrite { cursor: cut, ..write(lane, epoch, 0) }).await?, "could not settle the cut cursor");
    fixture.pass(MOMENT).await;
    let operator = fixture.operator().await?;
    let dropped = operator.prune(&at_once()).await?;
    ensure!(dropped.undelivered == 2, "it dropped {dropped:?}");
    let books = operator.books().await?.lanes.remove(0);
    ensure!(books.skipped == [at[1], at[3]].map(|at| at..=at).into_iter().collect(), "the books say {books:?}");
    for (id, expected) in ids.iter().zip([Cause::Delivered, Cause::Pruned, Cause::Delivered, Cause::Pruned]) {
        // Where retention has removed the event too, there is nothing to tell.
        let Some(record) = operator.show(*id).await? else { continue };
        let cause = why(&record, &record.subscriptions[0], &operator.status().await?).cause;
        ensure!(cause == expected, "an event that is {expected:?} is called {cause:?}");
    }
    Ok(())
}

async fn a_silent_owner_that_holds_its_lock_is_not_waited_for<F: Fixture>(fixture: &F) -> Outcome {
    let (silent, lane, epoch) = owner(fixture).await?;
    let heir = join(fixture).await?;
    let id = silent.joined.instance;
    let fleet = heir.store.observe(&Report::default()).await?;
    let beat = fleet.instances.iter().find(|instance| instance.id == id).map(|instance| instance.beat);
    fixture.hold(id).await;
    let take = Take { lane, expected: epoch, cause: TakeCause::Lease, beat };
    let taken = heir.store.take(&[take]).await?;
    ensure!(taken == [Some(epoch + 1)], "{taken:?} was taken");
    Ok(())
}

async fn a_skip_outlives_a_settlement_that_is_repeated<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let id = member.store.fetch(&at).await?[0].id;
    let parks = LaneWrite { put: vec![delivery(at[0], 0)], ..write(lane, epoch, at[0]) };
    ensure!(member.settle(parks.clone()).await?, "could not settle");
    let skip = Change::Skip { subscription: "s".into(), event: id, reason: "suite".into() };
    fixture.operator().await?.change(&skip, false).await?;
    // The answer was lost: the owner does not know that it was written, nor of the skip.
    ensure!(member.settle(parks).await?, "could not settle again");
    let left = member.load(lane, epoch).await?.deliveries;
    ensure!(left.is_empty(), "{left:?} came back");
    Ok(())
}
