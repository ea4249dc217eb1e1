use std::time::Duration;

use pillarbox::admin::{Auditor, Cause, Change, Fate, Operator, PrunePolicy, SubscriptionAudit, why};
use pillarbox::store::{Cursor, Definition, FormerFilters, LaneRef, LaneWrite, RangeSet, Store, TakeCause};
use pillarbox::{Event, Filter, OnDead, Position, RetryPolicy, Start, Subscription};

use super::{Member, NOTHING, event, first_lane_key, join_with, owner, set, subscription, topics, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        another_filter_is_a_fence_for_every_lane,
        the_same_definition_changes_nothing,
        what_is_no_filter_raises_the_number_alone,
        what_was_passed_is_judged_by_the_filter_of_then,
        a_rewind_judges_by_the_filter_of_now,
        a_replayed_key_is_judged_by_the_filter_of_now,
        retention_forgets_filters_with_their_events,
        a_filter_under_which_nothing_was_passed_is_forgotten;
}

fn wanting(topics: &[&str]) -> Subscription {
    subscription().topics(topics.iter().copied())
}

async fn definition<S: Store>(member: &Member<S>) -> Tried<Definition> {
    let found = member.fleet().await?.subscriptions.into_iter().find(|view| view.name == "s");
    Ok(found.ok_or("the subscription is not in the fleet")?.definition)
}

async fn another_filter_is_a_fence_for_every_lane<F: Fixture>(fixture: &F) -> Outcome {
    let (old, lane, epoch) = owner(fixture).await?;
    let other = old.lane_ref(1);
    let (before, other_before) = (definition(&old).await?, old.lane(other).await?.epoch);
    ensure!(old.load(lane, epoch).await?.definition.number == before.number, "the lane has another number");
    let new = join_with(fixture, wanting(&["b"])).await?;
    let at = fixture.publish(vec![event("b", 0)]).await?;
    ensure!(!old.settle(write(lane, epoch, at[0])).await?, "what was read with the old filter was settled");
    ensure!(old.store.load(&[(lane, epoch)]).await?[0].is_none(), "the old epoch can be loaded");
    let view = old.lane(lane).await?;
    ensure!(view.owner == Some(old.joined.instance), "the lane has another owner: {view:?}");
    ensure!(old.lane(other).await?.epoch > other_before, "the epoch of a lane without an owner was not raised");
    let number = definition(&old).await?.number;
    ensure!(number > before.number, "the number is {number} and was {}", before.number);
    ensure!(new.joined.subscriptions[0].definition.number == number, "who joined was told another number");
    let epoch = old.take(lane, TakeCause::Free).await?;
    let loaded = old.load(lane, epoch).await?.definition;
    ensure!(loaded.filter == topics("b") && loaded.number == number, "loaded with {loaded:?}");
    ensure!(old.settle(write(lane, epoch, at[0])).await?, "could not settle with the new filter");
    Ok(())
}

async fn the_same_definition_changes_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let before = definition(&member).await?;
    join_with(fixture, subscription()).await?;
    ensure!(definition(&member).await? == before, "the definition changed");
    ensure!(member.settle(write(lane, epoch, 0)).await?, "the lane was fenced");
    Ok(())
}

async fn what_is_no_filter_raises_the_number_alone<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let mut before = definition(&member).await?;
    let mut wish = Subscription { on_dead: OnDead::Skip, ..subscription() };
    for step in 0..3 {
        match step {
            0 => {}
            1 => wish.retry = RetryPolicy { max_attempts: 99, ..wish.retry },
            _ => wish.processing_timeout = Duration::from_secs(77),
        }
        join_with(fixture, wish.clone()).await?;
        let now = definition(&member).await?;
        ensure!(now == Definition::of(&wish, before.number + 1), "step {step}: {now:?} after {before:?}");
        let loaded = member.load(lane, epoch).await?.definition;
        ensure!(*loaded == now, "step {step}: loaded with {loaded:?}");
        before = now;
    }
    join_with(fixture, Subscription { hold: Some(Duration::from_secs(3600)), ..wish }).await?;
    let now = definition(&member).await?.number;
    ensure!(now == before.number + 1, "the hold: number {now} after {before:?}");
    ensure!(member.settle(write(lane, epoch, 0)).await?, "the lane was fenced");
    Ok(())
}

/// Of topics a and b by turns; all of one key of the first lane.
async fn publish<F: Fixture>(fixture: &F, count: usize) -> Tried<Vec<Position>> {
    let key = first_lane_key();
    let event = |number: usize| event(if number.is_multiple_of(2) { "a" } else { "b" }, number).key(key.as_str());
    Ok(fixture.publish((0..count).map(event).collect()).await?)
}

async fn fate<F: Fixture>(fixture: &F, member: &Member<F::Store>, position: Position) -> Tried<(Event, Fate, Cause)> {
    let event = member.store.fetch(&[position]).await?.pop().ok_or("the event is gone")?;
    let operator = fixture.operator().await?;
    let record = operator.show(event.id).await?.ok_or("the event is not shown")?;
    let fate = record.subscriptions.iter().find(|fate| fate.subscription == "s").ok_or("no fate")?.clone();
    let cause = why(&record, &fate, &operator.status().await?).cause;
    Ok((record.event, fate, cause))
}

async fn audit<F: Fixture>(fixture: &F, member: &Member<F::Store>, positions: &[Position]) -> Tried<SubscriptionAudit> {
    let mut auditor = Auditor::new(fixture.operator().await?.books().await?);
    member.store.fetch(positions).await?.iter().for_each(|event| auditor.event(event));
    Ok(auditor.finish().subscriptions.remove(0))
}

/// Six events: under a filter that wants topic a, the first two and the fourth are settled. Then topic b is wanted too.
async fn widened<F: Fixture>(fixture: &F) -> Tried<(Member<F::Store>, LaneRef, Vec<Position>)> {
    let old = join_with(fixture, wanting(&["a"])).await?;
    let lane = old.first_lane();
    let epoch = old.take(lane, TakeCause::Free).await?;
    let at = publish(fixture, 6).await?;
    let cursor = Cursor { floor: at[1], settled: set(&at[3..4]), anchor: None };
    ensure!(old.settle(LaneWrite { cursor, ..write(lane, epoch, 0) }).await?, "could not settle");
    let new = join_with(fixture, wanting(&["a", "b"])).await?;
    Ok((new, lane, at))
}

async fn what_was_passed_is_judged_by_the_filter_of_then<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, at) = widened(fixture).await?;
    let check = async |position: usize, wanted: bool, then: bool, cause: Cause| -> Outcome {
        let (_, fate, found) = fate(fixture, &member, at[position]).await?;
        ensure!(fate.wanted == wanted && fate.passed_under.is_some() == then, "event {position}: {fate:?}");
        ensure!(found == cause, "event {position} is called {found:?}");
        Ok(())
    };
    check(0, true, true, Cause::Delivered).await?;
    check(1, false, true, Cause::NotMatched).await?;
    check(3, false, true, Cause::NotMatched).await?;
    for waiting in [2, 4, 5] {
        let (_, fate, _) = fate(fixture, &member, at[waiting]).await?;
        ensure!(fate.wanted && fate.passed_under.is_none() && !fate.settled, "event {waiting}: {fate:?}");
    }
    let epoch = member.take(lane, TakeCause::Free).await?;
    ensure!(member.settle(write(lane, epoch, at[5])).await?, "could not settle with the new filter");
    check(1, false, true, Cause::NotMatched).await?;
    check(3, false, true, Cause::NotMatched).await?;
    check(5, true, false, Cause::Delivered).await?;
    let audit = audit(fixture, &member, &at).await?;
    let figures = (audit.expected, audit.delivered, audit.passed_unwanted, audit.missing);
    ensure!(figures == (4, 4, 2, 0), "the audit says {audit:?}");
    join_with(fixture, wanting(&["c"])).await?;
    check(5, true, true, Cause::Delivered).await?;
    check(1, false, true, Cause::NotMatched).await?;
    Ok(())
}

async fn a_rewind_judges_by_the_filter_of_now<F: Fixture>(fixture: &F) -> Outcome {
    let (member, _, at) = widened(fixture).await?;
    let rewind = Change::Rewind { subscription: "s".into(), to: Start::Position(at[2]), key: None };
    fixture.operator().await?.change(&rewind, false).await?;
    let (_, below, _) = fate(fixture, &member, at[1]).await?;
    ensure!(!below.wanted, "what lies below the place was not read again: {below:?}");
    let (_, above, _) = fate(fixture, &member, at[3]).await?;
    ensure!(above.wanted && !above.settled, "what lies above it is read again: {above:?}");
    Ok(())
}

async fn a_replayed_key_is_judged_by_the_filter_of_now<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, at) = widened(fixture).await?;
    let rewind =
        Change::Rewind { subscription: "s".into(), to: Start::Position(at[0] - 1), key: Some(first_lane_key()) };
    let replayed = fixture.operator().await?.change(&rewind, false).await?.count;
    ensure!(replayed == 3, "{replayed} were replayed, and not those that are settled");
    let epoch = member.take(lane, TakeCause::Free).await?;
    let state = member.load(lane, epoch).await?;
    let finish = vec![at[0], at[1], at[3]];
    let done = LaneWrite { finish, cursor: state.cursor, revision: state.revision, ..write(lane, epoch, 0) };
    ensure!(member.settle(done).await?, "could not settle");
    for position in [0, 1, 3] {
        let (_, fate, cause) = fate(fixture, &member, at[position]).await?;
        ensure!(cause == Cause::Delivered, "event {position} was delivered after all: {cause:?} {fate:?}");
    }
    Ok(())
}

async fn retention_forgets_filters_with_their_events<F: Fixture>(fixture: &F) -> Outcome {
    let (member, _, at) = widened(fixture).await?;
    let operator = fixture.operator().await?;
    let keep = Some(Duration::ZERO);
    while operator.prune(&PrunePolicy { keep, ..PrunePolicy::default() }).await?.more {}
    let books = operator.books().await?;
    let known = books.former_filters.get("s").map_or(0, FormerFilters::len);
    ensure!(known == 1 && books.log_start <= at[3], "it was forgotten while event {} is there", at[3]);
    for number in 0..2 {
        let lane = member.lane_ref(number);
        let epoch = member.take(lane, TakeCause::Free).await?;
        ensure!(member.settle(write(lane, epoch, at[5])).await?, "could not settle");
    }
    fixture.pass(Duration::from_millis(2)).await;
    while operator.prune(&PrunePolicy { keep, ..PrunePolicy::default() }).await?.more {}
    let books = operator.books().await?;
    let known = books.former_filters.get("s").map_or(0, FormerFilters::len);
    // Not every store removes so few events.
    ensure!(
        (known == 0) == (books.log_start > at[3]),
        "{known} former filters, and the log begins at {}",
        books.log_start
    );
    Ok(())
}

async fn a_filter_under_which_nothing_was_passed_is_forgotten<F: Fixture>(fixture: &F) -> Outcome {
    let (member, _, at) = widened(fixture).await?;
    for _ in 0..5 {
        join_with(fixture, wanting(&["c"])).await?;
        join_with(fixture, wanting(&["d"])).await?;
    }
    let books = fixture.operator().await?.books().await?;
    let known = books.former_filters.get("s").map_or(0, FormerFilters::len);
    ensure!(known == 1, "{known} former filters are kept");
    let all = Filter::default();
    let (event, ..) = fate(fixture, &member, at[1]).await?;
    let wants = books.former_filters["s"].wants(&all, &event);
    ensure!(wants == Some(false), "the first filter is not the one that judged: {wants:?}");
    let nothing: RangeSet = books.lanes[0].settled.clone();
    ensure!(nothing == set(&at[3..4]), "the ranges above the floor changed: {nothing:?}");
    Ok(())
}
