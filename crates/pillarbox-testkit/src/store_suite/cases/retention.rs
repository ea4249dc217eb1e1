use std::time::Duration;

use pillarbox::admin::{Auditor, Cause, Change, Level, Operator, PrunePolicy, Pruned, State, why};
use pillarbox::limit::{CONTENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use pillarbox::store::{Cursor, DeliveryRow, LaneWrite, RangeSet, Report, Settlement, Store, Take, TakeCause};
use pillarbox::{ErrorKind, NewEvent, Position, Start, Subscription, Timestamp};
use uuid::Uuid;

use super::{
    DAY, FILL, HOLD, HOUR, INBOX, Member, NOTHING, STORED_POLICY, delivery, events, ids_of, join, join_with, of_keys,
    one_lane, owner, owner_of_all, parked, positions, set, states, write,
};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        what_is_too_large_is_refused,
        what_nobody_has_received_stays_unless_told,
        a_dry_run_counts_and_removes_nothing,
        what_a_subscription_has_not_passed_stays,
        a_dry_run_names_who_holds_back_what_is_old,
        a_hold_that_is_over_is_a_fence_and_is_recorded,
        a_hold_gives_up_nothing_that_was_delivered_under_a_former_filter,
        a_skip_outlives_a_settlement_that_is_repeated,
        only_what_is_old_and_passed_by_all_is_removed,
        what_a_delivery_needs_is_kept_aside_as_long_as_it_needs_it,
        a_hold_that_is_over_gives_way_and_is_recorded,
        a_hold_that_is_over_drops_only_what_was_awaited,
        a_dry_run_counts_no_delivery_that_a_cut_cursor_does_not_show,
        a_delivery_that_was_dead_for_long_is_given_up,
        a_hold_that_is_nearly_over_is_an_alarm,
        a_delivery_is_no_reason_for_the_alarm_of_a_hold;
    STORED_POLICY:
        no_call_prunes_more_than_the_stored_policy_allows,
        a_hold_below_the_stored_policy_is_no_alarm;
    FILL:
        an_event_in_a_dead_range_is_a_finding_of_doctor_until_retention_delivers_it;
    INBOX:
        retention_forgets_what_was_accepted_long_ago_in_slices;
    HOLD:
        a_silent_owner_that_holds_its_lock_is_not_waited_for;
}

/// Longer ago than that.
const MOMENT: Duration = Duration::from_millis(20);

/// Everything that may go goes, however young.
fn at_once() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() }
}

async fn what_is_too_large_is_refused<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let event = || NewEvent::new("t", "y");
    // Counted in bytes, two a character.
    let payload = |bytes: usize| event().json_text(format!("\"{}\"", "\u{e9}".repeat((bytes - 2) / 2)));
    let large = [
        ("payload_bytes_max", payload(PAYLOAD_BYTES_MAX + 2)),
        ("headers", event().header("a", "x".repeat(HEADERS_BYTES_MAX))),
        ("content type", NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX + 1)), ..event() }),
        ("key", event().key("x".repeat(NAME_BYTES_MAX + 1))),
    ];
    for (what, large) in large {
        match operator.publish(&[event(), large]).await {
            Err(error) => {
                ensure_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
                ensure!(error.to_string().contains(what), "{what}: {error}");
            }
            Ok(ids) => return Err(format!("{what}: {ids:?} were published").into()),
        }
    }
    let edge = NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX)), ..event() };
    let edge = edge.header("a", "x".repeat(HEADERS_BYTES_MAX - 100));
    operator.publish(&[edge, payload(PAYLOAD_BYTES_MAX)]).await?;
    let events = operator.status().await?.log.events;
    ensure!(events == 2, "{events} events are there");
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

async fn a_dry_run_names_who_holds_back_what_is_old<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a"; 4])).await?;
    fixture.age(at[2], 10 * DAY).await;
    let slow = join_with(fixture, one_lane("slow")).await?;
    let lane = slow.first_lane();
    let epoch = slow.take(lane, TakeCause::Free).await?;
    let operator = fixture.operator().await?;
    let dry = PrunePolicy { dry_run: true, ..weekly() };
    for (floor, held_by) in [(at[0], Some("slow".to_owned())), (at[2], None)] {
        ensure!(slow.settle(write(lane, epoch, floor)).await?, "could not settle");
        ensure_eq!(operator.prune(&dry).await?.held_by, held_by, "with its floor at {floor}");
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

/// Events go that are older than a week, also those that nobody has received.
pub(super) fn weekly() -> PrunePolicy {
    PrunePolicy { keep: Some(7 * DAY), unreceived: true, ..PrunePolicy::default() }
}

/// Calls retention until there is nothing more to do; what it removed in all.
pub(super) async fn prune_all<O: Operator>(operator: &O, policy: &PrunePolicy) -> Tried<Pruned> {
    let mut all = Pruned::default();
    loop {
        let pruned = operator.prune(policy).await?;
        all.events += pruned.events;
        all.kept += pruned.kept;
        all.dead += pruned.dead;
        all.undelivered += pruned.undelivered;
        all.dedup += pruned.dedup;
        if !pruned.more {
            return Ok(Pruned { held_by: pruned.held_by, ..all });
        }
    }
}

async fn only_what_is_old_and_passed_by_all_is_removed<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(4).await;
    let at = fixture.publish(of_keys(&["a"; 20])).await?;
    fixture.age(at[15], 10 * DAY).await;
    let fast = join_with(fixture, one_lane("fast")).await?;
    let lane = fast.first_lane();
    let epoch = fast.take(lane, TakeCause::Free).await?;
    ensure!(fast.settle(write(lane, epoch, at[19])).await?, "could not settle");
    let slow = join_with(fixture, Subscription { start: Start::Position(at[7]), ..one_lane("slow") }).await?;
    slow.store.leave().await?;

    let operator = fixture.operator().await?;
    let small = PrunePolicy { slice: 3, ..weekly() };
    let pruned = prune_all(&operator, &small).await?;
    let held_by = Some("slow".to_owned());
    ensure_eq!((pruned.events, pruned.held_by), (8, held_by), "a subscription that nobody runs holds it");
    let (page, _) = fast.poll_from(0).await?;
    ensure_eq!((page.log_start, page.horizon), (at[8], at[19]));
    operator.change(&Change::Delete("slow".into()), false).await?;
    let pruned = prune_all(&operator, &small).await?;
    ensure_eq!((pruned.events, pruned.held_by), (8, None), "the rest is too young");
    ensure_eq!(positions(&fast.poll_from(0).await?.1.events), at[16..], "what is left");
    ensure_eq!(prune_all(&operator, &PrunePolicy { keep: None, ..weekly() }).await?.events, 0);
    Ok(())
}

async fn what_a_delivery_needs_is_kept_aside_as_long_as_it_needs_it<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(3).await;
    let at = fixture.publish(of_keys(&["a", "b", "c"])).await?;
    let ids = ids_of(fixture).await?;
    fixture.age(at[2], 10 * DAY).await;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let operator = fixture.operator().await?;
    let put = vec![parked(at[1], "b", State::Dead, operator.status().await?.at)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[2]) }).await?, "could not settle");
    let pruned = prune_all(&operator, &weekly()).await?;
    ensure_eq!((pruned.events, pruned.kept), (3, 1));
    ensure!(member.poll_from(0).await?.1.visible.is_empty(), "something is left in the log");
    ensure_eq!(member.store.fetch(&at).await?[0].id, ids[1]);
    let shown = operator.show(ids[1]).await?.ok_or("what is kept aside is not shown")?;
    ensure!(shown.subscriptions[0].delivery.is_some(), "its delivery is not shown: {shown:?}");
    ensure!(operator.show(ids[0]).await?.is_none(), "what is gone is shown");
    ensure_eq!(operator.status().await?.log.kept, 1);
    member.load(lane, epoch).await?;

    let done = LaneWrite { finish: vec![at[1]], ..write(lane, epoch, at[2]) };
    ensure!(member.settle(done).await?, "could not settle");
    prune_all(&operator, &weekly()).await?;
    ensure_eq!(operator.status().await?.log.kept, 0);
    let new = join_with(fixture, one_lane("new")).await?;
    let floor = new.load(new.first_lane(), 0).await?.cursor.floor;
    ensure_eq!(floor, at[2], "a new subscription begins where the log does");
    Ok(())
}

async fn a_hold_that_is_over_gives_way_and_is_recorded<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(3).await;
    let at = fixture.publish(of_keys(&["a"; 4])).await?;
    let ids = ids_of(fixture).await?;
    fixture.age(at[2], 10 * DAY).await;
    let held = |days: u32| Subscription { hold: Some(days * DAY), ..one_lane("s") };
    let member = join_with(fixture, held(11)).await?;
    let operator = fixture.operator().await?;
    ensure_eq!(prune_all(&operator, &weekly()).await?.held_by, Some("s".to_owned()));
    join_with(fixture, held(9)).await?;
    ensure_eq!(prune_all(&operator, &weekly()).await?.events, 3);
    let lane = member.first_lane();
    ensure!(member.store.load(&[(lane, 0)]).await?[0].is_none(), "the owner is not made to load again");
    let book = operator.books().await?.lanes.remove(0);
    let dropped = set(&at[..3]);
    ensure_eq!((book.floor, book.skipped, book.before_start), (at[2], dropped.clone(), dropped));
    let young = operator.show(ids[3]).await?.ok_or("the event is not shown")?;
    ensure!(young.subscriptions[0].skipped.is_none(), "a young one was dropped: {young:?}");
    Ok(())
}

async fn a_hold_that_is_over_drops_only_what_was_awaited<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(10).await;
    let topics = ["wanted", "wanted", "other", "wanted", "wanted", "wanted"];
    let at = fixture.publish(topics.map(|topic| NewEvent::new(topic, "y").key("a")).into()).await?;
    let ids = ids_of(fixture).await?;
    fixture.age(at[4], 10 * DAY).await;
    // Another subscription keeps the events in the log, so that they can be asked about.
    let _keeper = join_with(fixture, one_lane("keeper")).await?;
    let wish = Subscription { hold: Some(9 * DAY), ..one_lane("s").topics(["wanted"]) };
    let member = join_with(fixture, wish).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let cursor = Cursor { floor: at[0], settled: set(&at[3..4]), anchor: None };
    ensure!(member.settle(LaneWrite { cursor, ..write(lane, epoch, 0) }).await?, "could not settle");
    let operator = fixture.operator().await?;
    let would = operator.prune(&PrunePolicy { dry_run: true, ..weekly() }).await?;
    let held_by = Some("keeper".to_owned());
    let figures = (would.undelivered, would.events, would.held_by);
    ensure_eq!(figures, (2, 0, held_by.clone()), "it would drop the second and the fifth");
    let pruned = prune_all(&operator, &weekly()).await?;
    ensure_eq!((pruned.undelivered, pruned.events), (2, 0), "what it drops");
    // Where whole tables go, it is the one in use that stays.
    ensure!(pruned.held_by == held_by || fixture.features().whole_tables, "{pruned:?} holds the rest back");

    let books = operator.books().await?;
    let book = books.lanes.iter().find(|book| book.subscription == "s").ok_or("the lane has no books")?;
    let numbered = |numbers: &[usize]| numbers.iter().map(|number| at[*number - 1]..=at[*number - 1]).collect();
    let (skipped, covered, before): (RangeSet, RangeSet, RangeSet) =
        (numbered(&[2, 5]), numbered(&[1, 4]), numbered(&[2, 3, 5]));
    ensure_eq!((book.floor, &book.skipped), (at[4], &skipped));
    ensure_eq!((&book.covered, &book.before_start), (&covered, &before));
    let mut auditor = Auditor::new(books).only("s")?.expect_receipts("s")?;
    member.poll_from(0).await?.1.events.iter().for_each(|event| auditor.event(event));
    [0, 3].iter().for_each(|index| auditor.line(&ids[*index].to_string()));
    let audit = auditor.finish().subscriptions.remove(0);
    ensure_eq!((audit.delivered, audit.skipped, audit.waiting, audit.missing), (2, 2, 1, 0), "{audit:?}");
    Ok(())
}

async fn a_dry_run_counts_no_delivery_that_a_cut_cursor_does_not_show<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(10).await;
    let at = fixture.publish(of_keys(&["a", "b", "c"])).await?;
    fixture.age(at[2], 10 * DAY).await;
    let member = join_with(fixture, Subscription { hold: Some(9 * DAY), ..one_lane("s") }).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let operator = fixture.operator().await?;
    // The row is there, and the cursor says nothing of its position.
    let put = vec![parked(at[1], "b", State::Retrying, operator.status().await?.at)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[0]) }).await?, "could not settle");
    let would = operator.prune(&PrunePolicy { dry_run: true, ..weekly() }).await?;
    ensure_eq!(would.undelivered, 1, "it would drop the third");
    ensure_eq!(prune_all(&operator, &weekly()).await?.undelivered, 1, "what it drops");
    Ok(())
}

async fn a_delivery_that_was_dead_for_long_is_given_up<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a", "a"])).await?;
    let ids = ids_of(fixture).await?;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let operator = fixture.operator().await?;
    let now = operator.status().await?.at;
    let since = Timestamp(now.0 - 3 * DAY.as_millis() as i64);
    let failing = |index: usize| DeliveryRow { since, ..parked(at[index], "a", State::Retrying, now) };
    let put = vec![failing(0), failing(1)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let died = LaneWrite {
        change: vec![(DeliveryRow { state: State::Dead, ..failing(0) }, None)],
        ..write(lane, epoch, at[1])
    };
    let dead = PrunePolicy { dead: Some(2 * DAY), ..weekly() };
    ensure!(member.settle(died.clone()).await?, "could not settle a death");
    let young = prune_all(&operator, &dead).await?.dead;
    ensure_eq!(young, 0, "it has failed for long, but died just now");
    fixture.age_deaths(3 * DAY).await;
    // It stays dead: the second settlement does not make it younger.
    ensure!(member.settle(died).await?, "could not settle a death again");
    ensure_eq!(prune_all(&operator, &weekly()).await?.dead, 0, "for ever by default");
    ensure_eq!(prune_all(&operator, &dead).await?.dead, 1);
    let shown = operator.show(ids[0]).await?.ok_or("the event is not shown")?;
    let reason = shown.subscriptions[0].skipped.as_ref().map(|skipped| skipped.0.as_str()).unwrap_or_default();
    ensure!(reason.contains("retention"), "the reason is {reason:?}");
    Ok(())
}

async fn alarms<O: Operator>(operator: &O) -> Tried<Vec<String>> {
    Ok(operator.status().await?.log.alarms)
}

/// A subscription `s` with a hold of an hour, and two events that are 50 minutes old.
async fn nearly_lost<F: Fixture>(fixture: &F) -> Tried<(Member<F::Store>, F::Operator, Vec<Position>)> {
    let at = fixture.publish(of_keys(&["a", "b"])).await?;
    let member = join_with(fixture, Subscription { hold: Some(HOUR), ..one_lane("s") }).await?;
    let operator = fixture.operator().await?;
    ensure_eq!(alarms(&operator).await?, Vec::<String>::new(), "alarms about what is young");
    fixture.age(at[1], Duration::from_secs(50 * 60)).await;
    Ok((member, operator, at))
}

async fn a_hold_that_is_nearly_over_is_an_alarm<F: Fixture>(fixture: &F) -> Outcome {
    let (_member, operator, _) = nearly_lost(fixture).await?;
    let alarms = alarms(&operator).await?;
    let expected = "'s' is about to lose events: its oldest one is 50 min old";
    ensure!(alarms.len() == 1 && alarms[0].contains(expected), "the alarms are {alarms:?}");
    Ok(())
}

async fn a_hold_below_the_stored_policy_is_no_alarm<F: Fixture>(fixture: &F) -> Outcome {
    let (_member, operator, _) = nearly_lost(fixture).await?;
    // Nothing is dropped that is younger than what everybody keeps.
    for (limit, count) in [(Some(2 * HOUR), 0), (None, 0), (Some(HOUR), 1)] {
        fixture.allow_retention(limit).await;
        ensure_eq!(alarms(&operator).await?.len(), count, "alarms with {limit:?}");
    }
    Ok(())
}

async fn a_delivery_is_no_reason_for_the_alarm_of_a_hold<F: Fixture>(fixture: &F) -> Outcome {
    let (member, operator, at) = nearly_lost(fixture).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let put = vec![parked(at[0], "a", State::Retrying, operator.status().await?.at)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let age = operator.status().await?.subscriptions[0].oldest_age_seconds;
    ensure!(age.is_some_and(|age| age > 2_900.0), "the oldest is {age:?} old");
    ensure_eq!(alarms(&operator).await?, Vec::<String>::new(), "a delivery stays, however old it is");
    Ok(())
}

async fn no_call_prunes_more_than_the_stored_policy_allows<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(2).await;
    let at = fixture.publish(of_keys(&["a"; 3])).await?;
    fixture.age(at[1], 10 * DAY).await;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let operator = fixture.operator().await?;
    let put = vec![parked(at[2], "a", State::Dead, operator.status().await?.at)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[2]) }).await?, "could not settle");
    fixture.age_deaths(10 * DAY).await;
    let eager = PrunePolicy { dead: Some(Duration::from_secs(1)), ..weekly() };
    for (limit, events, dead) in [(Some(11 * DAY), 0, 0), (None, 0, 0), (Some(9 * DAY), 2, 1)] {
        fixture.allow_retention(limit).await;
        let pruned = prune_all(&operator, &eager).await?;
        ensure_eq!((pruned.events, pruned.dead), (events, dead), "removed with {limit:?}");
    }
    Ok(())
}

async fn an_event_in_a_dead_range_is_a_finding_of_doctor_until_retention_delivers_it<F: Fixture>(
    fixture: &F,
) -> Outcome {
    fixture.publish(of_keys(&["a"])).await?;
    let gap = fixture.leave_gap().await;
    let at = fixture.publish(of_keys(&["a"])).await?;
    let (member, lane, epoch) = owner_of_all(fixture).await?;
    let settlement = Settlement { lanes: vec![write(lane, epoch, at[0])], closed: set(&[gap]) };
    ensure_eq!(member.store.settle(&settlement).await?, [true], "the settlement");
    let operator = fixture.operator().await?;
    let found = async || -> Tried<_> {
        let found = operator.doctor().await?.into_iter().find(|check| check.name == "dead ranges");
        Ok(found.ok_or("doctor does not look at dead ranges")?)
    };
    let sound = found().await?;
    let finding = "no event has appeared at a position that was proven empty";
    ensure_eq!((sound.level, &*sound.finding, sound.fix), (Level::Ok, finding, None));
    fixture.fill(gap).await;
    let risen = found().await?;
    let finding = "1 event appeared at positions that had been closed";
    let fix = "let no publisher set the position; retention (`pillarbox prune`) delivers them late".to_owned();
    ensure_eq!((risen.level, &*risen.finding, risen.fix), (Level::Failed, finding, Some(fix)));
    let revision = member.lane(lane).await?.revision;
    prune_all(&operator, &PrunePolicy { keep: None, ..weekly() }).await?;
    ensure_eq!(states(&operator).await?, [(gap, State::Pending)].into());
    ensure!(operator.books().await?.closed.is_empty(), "the range is still called closed");
    ensure!(member.lane(lane).await?.revision > revision, "the owner does not load it");
    ensure_eq!(found().await?.level, Level::Ok, "once it is delivered");
    Ok(())
}

async fn retention_forgets_what_was_accepted_long_ago_in_slices<F: Fixture>(fixture: &F) -> Outcome {
    let young = Uuid::now_v7();
    for id in (0..5).map(|_| Uuid::now_v7()).chain([young]) {
        ensure!(fixture.accept("billing", id).await?, "a new id is not accepted");
    }
    fixture.age_inbox(young, 31 * DAY).await;
    let operator = fixture.operator().await?;
    let never = PrunePolicy { inbox: None, ..PrunePolicy::default() };
    ensure_eq!(operator.prune(&never).await?.inbox, 0, "without an age");
    let policy = PrunePolicy { slice: 3, ..PrunePolicy::default() };
    let (first, second) = (operator.prune(&policy).await?, operator.prune(&policy).await?);
    ensure_eq!((first.inbox, first.more, second.inbox), (3, true, 2), "two slices");
    ensure!(!fixture.accept("billing", young).await?, "what is young was forgotten");
    fixture.pass(MOMENT).await;
    let all = PrunePolicy { inbox: Some(Duration::ZERO), ..PrunePolicy::default() };
    ensure_eq!(operator.prune(&all).await?.inbox, 1, "however young");
    ensure!(fixture.accept("billing", young).await?, "what was forgotten is not accepted again");
    Ok(())
}
