use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::store::{Cursor, LaneWrite, Store, Take, TakeCause};
use pillarbox::{ErrorKind, Start, Subscription, Timestamp};

use super::{NOTHING, hello, join, join_with, of_keys, one_lane, owner_of_all, parked, write};
use crate::store_suite::{Case, Fixture, Outcome};

cases! {
    NOTHING:
        joining_creates_subscriptions_where_they_start,
        only_one_of_two_takes_a_lane_and_the_other_is_fenced;
}

async fn joining_creates_subscriptions_where_they_start<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a"; 5])).await?;
    let last = join(fixture).await?.store.fetch(&at[4..]).await?[0].created_at;
    // Each is ten seconds younger than the one before.
    for position in &at[..4] {
        fixture.age(*position, Duration::from_secs(10)).await;
    }
    let seconds = |before: i64| Start::Time(Timestamp(last.0 - before * 1000));
    let starts = [
        (Start::Beginning, at[0] - 1),
        (Start::Now, at[4]),
        (Start::Position(at[2]), at[2]),
        (Start::Position(at[4] + 94), at[4]),
        (seconds(25), at[1]),
        (seconds(-9), at[4]),
    ];
    for (index, (start, floor)) in starts.into_iter().enumerate() {
        let wish = Subscription { start, lanes: 2, ..Subscription::new(format!("s{index}")) };
        let member = join_with(fixture, wish).await?;
        let view = &member.joined.subscriptions[0];
        ensure!(view.created && view.lanes == 2, "{view:?}");
        let cursor = member.load(member.first_lane(), 0).await?.cursor;
        // Where a store anchors what it has never settled, that is the event at the floor.
        let anchor = cursor.anchor.filter(|anchor| anchor.0 == floor);
        ensure_eq!(cursor, Cursor { floor, anchor, ..Cursor::default() }, "{start:?}");
    }
    let again = join_with(fixture, Subscription { lanes: 7, ..Subscription::new("s1").topics(["x"]) }).await?;
    let view = &again.joined.subscriptions[0];
    ensure!(!view.created, "{view:?}");
    ensure_eq!((view.lanes, &*view.definition.filter.topics[0]), (2, "x"));
    let kind = again.store.join(hello(Subscription::new(""))).await.err().map(|error| error.kind());
    ensure_eq!(kind, Some(ErrorKind::Invalid), "a subscription without a name");
    Ok(())
}

async fn only_one_of_two_takes_a_lane_and_the_other_is_fenced<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(of_keys(&["a"; 4])).await?;
    let (first, lane, epoch) = owner_of_all(fixture).await?;
    let second = join_with(fixture, one_lane("s")).await?;
    let stale = Take { lane, expected: epoch - 1, cause: TakeCause::Free, beat: None };
    ensure_eq!(second.store.take(&[stale]).await?, [None], "a take at an epoch that is over");
    ensure!(first.settle(write(lane, epoch, at[0])).await?, "could not settle");

    let seized = second.take(lane, TakeCause::Lease).await?;
    ensure_eq!(seized, epoch + 1);
    let put = vec![parked(at[1], "a", State::Dead, Timestamp(1))];
    let late = LaneWrite { put, ..write(lane, epoch, at[3]) };
    // The one whose lanes were all taken may have been buried.
    ensure!(!first.settle(late).await.unwrap_or(false), "the old owner is not fenced");
    let loaded = first.store.load(&[(lane, epoch)]).await;
    ensure!(loaded.is_err() || loaded.is_ok_and(|loaded| loaded[0].is_none()), "the old owner loads it");
    let state = second.load(lane, seized).await?;
    ensure_eq!((state.cursor.floor, state.deliveries.len(), state.takeovers), (at[0], 0, 1));
    let calm = LaneWrite { calm: true, ..write(lane, seized, at[1]) };
    ensure!(second.settle(calm).await?, "could not settle");
    ensure_eq!(second.load(lane, seized).await?.takeovers, 0, "the owner is calm");
    Ok(())
}
