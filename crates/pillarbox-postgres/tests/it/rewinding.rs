use pillarbox::admin::{Operator, State};
use pillarbox::{NewEvent, Start, Timestamp};

use crate::fixture::{Database, own, settle, write};
use crate::operating::{change, rewind, states};

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
