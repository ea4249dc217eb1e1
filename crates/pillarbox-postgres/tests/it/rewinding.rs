use pillarbox::admin::{Operator, PrunePolicy, State};
use pillarbox::store::Store;
use pillarbox::{NewEvent, OnDead, Start, Timestamp};

use crate::fixture::{Database, delivery, own, settle, write};
use crate::operating::{HOUR, change, mixed, rewind, states};

#[tokio::test]
async fn rewind_fences_the_owner_and_replays() {
    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Block).await;
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    change(&store, rewind(Start::Position(2), None)).await.unwrap();
    assert!(!settle(&store, write(view.lane, view.epoch, 6)).await, "the owner cannot write over it");
    let expected =
        [(1, State::Dead), (3, State::Pending), (4, State::Pending), (5, State::Pending), (6, State::Pending)];
    let expected = [(2, State::Blocked)].into_iter().chain(expected).collect();
    assert_eq!(states(&store).await, expected, "what was parked above the target comes from the log");
    let epoch = crate::fixture::take(&store, view.lane, pillarbox::store::TakeCause::Free).await.unwrap();
    assert_eq!(store.load(&[(view.lane, epoch)]).await.unwrap().remove(0).unwrap().cursor.floor, 2);
    change(&store, rewind(Start::Now, None)).await.unwrap();
    assert_eq!(store.status().await.unwrap().subscriptions[0].floor, 2, "never forwards: nothing is left out silently");
}

#[tokio::test]
async fn rewind_of_a_key_replays_its_settled_events_as_a_chain() {
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let done = change(&store, rewind(Start::Position(1), Some("a"))).await.unwrap();
    assert_eq!(done.events, [ids[1], ids[4]], "the last one of the key was not read yet");
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    assert!(view.revision > 0);
    let state = store.load(&[(view.lane, view.epoch)]).await.unwrap().remove(0).unwrap();
    let order: Vec<_> = state.deliveries.iter().map(|delivery| delivery.position).collect();
    assert_eq!(order, [1, 3, 4, 2, 5], "fresh arrivals, in log order");
    assert!(state.cursor.floor == 5);

    database.publish(&[NewEvent::new("unwanted", "y").key("a")]).await;
    assert_eq!(change(&store, rewind(Start::Beginning, Some("zzz"))).await.unwrap().count, 0);
}

#[tokio::test]
async fn a_rewind_leaves_open_what_is_not_committed_yet() {
    let database = Database::new().await;
    database.publish_keys(&["a"]).await;
    let mut writer = database.client().await;
    let open = writer.transaction().await.unwrap();
    pillarbox_postgres::publish(&open, &NewEvent::new("t", "y").key("late")).await.unwrap();
    database.publish_keys(&["b", "c"]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let mut settled = write(lane, epoch, 1);
    settled.cursor.settled = [3..=4].into_iter().collect();
    assert!(settle(&store, settled).await);
    let done = change(&store, rewind(Start::Position(3), None)).await.unwrap();
    assert!(done.message.contains("above position 3"), "{}", done.message);
    open.commit().await.unwrap();
    assert_eq!(states(&store).await, [(2, State::Pending), (4, State::Pending)].into());
    change(&store, rewind(Start::Now, None)).await.unwrap();
    assert_eq!(states(&store).await.len(), 2, "never forwards");
    let book = store.books().await.unwrap().lanes.remove(0);
    assert_eq!((book.floor, book.settled.to_string(), book.covered.to_string()), (1, "3".into(), "1,3".into()));
}

#[tokio::test]
async fn a_rewind_to_a_time_goes_by_the_time_of_insert() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b", "c"]).await;
    database
        .execute(
            "alter table pillarbox.event disable trigger is_never_changed;
             update pillarbox.event set created_at = '2020-01-01 00:00:00Z' where position = 1;
             update pillarbox.event set created_at = '2020-01-03 00:00:00Z' where position = 2",
        )
        .await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 3)).await);
    let january_2nd = Timestamp(1_577_923_200_000);
    change(&store, rewind(Start::Time(january_2nd), None)).await.unwrap();
    assert_eq!(states(&store).await.into_keys().collect::<Vec<_>>(), [2, 3]);
}

#[tokio::test]
async fn a_rewind_ends_what_was_given_up_above_its_place() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b", "c", "d", "e", "f"]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 6)).await);
    let skip = "insert into pillarbox.skip (subscription, position, position_to, reason) \
                select id, low, high, 'r' from pillarbox.subscription, (values (2, 5), (4, 4)) as r (low, high)";
    database.execute(skip).await;
    let skipped = async || store.books().await.unwrap().lanes[0].skipped.to_string();
    change(&store, rewind(Start::Beginning, Some("c"))).await.unwrap();
    assert_eq!(skipped().await, "2,4-5", "of one key its own event alone");
    change(&store, rewind(Start::Position(4), None)).await.unwrap();
    assert_eq!(skipped().await, "2,4");
    change(&store, rewind(Start::Position(1), None)).await.unwrap();
    assert_eq!(skipped().await, "");
}

#[tokio::test]
async fn a_rewind_replays_what_retention_has_only_kept_aside() {
    for key in [Some("a"), None] {
        let database = crate::retention::database(3).await;
        let ids = database.publish_keys(&["a", "b", "b", "a", "b", "c"]).await;
        crate::retention::age(&database, 3).await;
        let store = database.store().await;
        let (lane, epoch) = own(&store, "s").await;
        let mut parked = write(lane, epoch, 6);
        parked.put = vec![delivery(1, "a", State::Dead), delivery(2, "b", State::Dead)];
        assert!(settle(&store, parked).await);
        let policy = PrunePolicy { keep: Some(HOUR), ..PrunePolicy::default() };
        assert_eq!(crate::retention::prune_all(&store, &policy).await.kept, 2);
        // Above it, the dead ones stay.
        store.change(&rewind(Start::Position(2), key), false).await.unwrap();
        assert_eq!(states(&store).await[&1], State::Dead);
        let done = store.change(&rewind(Start::Beginning, key), false).await.unwrap();
        let states = states(&store).await;
        match key {
            Some(_) => {
                assert_eq!((states[&1], states[&2], states[&4]), (State::Pending, State::Dead, State::Blocked));
                assert_eq!((done.count, done.events), (2, vec![ids[0], ids[3]]));
            }
            None => assert_eq!((states[&1], states[&2]), (State::Pending, State::Pending)),
        }
    }
}

#[tokio::test]
async fn the_place_of_a_time_is_found_among_many_leaves_and_holes() {
    let database = crate::retention::database(50).await;
    // A second apart, but for a stretch that was never committed and a clock that was set back by half a minute.
    database
        .execute(
            "insert into pillarbox.event (topic, type) select 't', 'y' from generate_series(1, 400);
             begin; insert into pillarbox.event (topic, type) select 't', 'y' from generate_series(1, 120); rollback;
             insert into pillarbox.event (topic, type) select 't', 'y' from generate_series(1, 400);
             alter table pillarbox.event disable trigger is_never_changed;
             update pillarbox.event set created_at = '2020-01-01 00:00:00Z'::timestamptz
                 + (position - case when position > 700 then 30 else 0 end) * interval '1 second'",
        )
        .await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 920)).await);
    let midnight = Timestamp(1_577_836_800_000);
    for second in [1000, 890, 889, 700, 699, 690, 671, 670, 521, 520, 450, 401, 400, 200, 51, 50, 2, 1, 0] {
        let at = Timestamp(midnight.0 + second * 1000);
        let first = format!(
            "select coalesce((select min(position) from pillarbox.event where created_at >= \
             '2020-01-01 00:00:00Z'::timestamptz + {second} * interval '1 second'), 921)"
        );
        let first = database.number(&first).await;
        let done = store.change(&rewind(Start::Time(at), None), true).await.unwrap();
        assert!(done.message.contains(&format!("above position {}", first - 1)), "{second} s: {}", done.message);
    }
}
