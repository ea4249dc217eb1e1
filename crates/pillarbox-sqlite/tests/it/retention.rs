use std::time::Duration;

use pillarbox::admin::{Operator, PrunePolicy, State};
use pillarbox::store::Store;
use pillarbox::{NewEvent, Start, Subscription, Timestamp};
use pillarbox_testkit::by_hand::prune_all;

use crate::fixture::{Database, delivery, join, one_lane, own, settle, write};

const DAY_MS: i64 = 86_400_000;

fn policy() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::from_secs(7 * 86_400)), unreceived: true, ..PrunePolicy::default() }
}

/// Makes the events up to `position` ten days old.
fn age(database: &Database, position: i64) {
    let at = Timestamp::now().0 - 10 * DAY_MS;
    database.execute(&format!(
        "drop trigger if exists pillarbox_event_is_never_changed;
         update pillarbox_event set created_at = {at} where position <= {position}"
    ));
}

#[tokio::test]
async fn a_copy_that_nobody_needs_is_found_among_many_that_are_needed() {
    let database = Database::new();
    database.publish_keys(&["a"; 600]);
    let store = database.store();
    own(&store, "s").await;
    database.execute(
        "insert into pillarbox_event_kept select * from pillarbox_event;
         insert into pillarbox_delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at)
         select s.id, e.position, 0, e.position, 'dead', 1, 0, 0, 0
         from pillarbox_subscription as s, pillarbox_event as e where e.position < 600",
    );
    let mut kept = Vec::new();
    for _ in 0..3 {
        assert!(!store.prune(&policy()).await.unwrap().more);
        kept.push(store.status().await.unwrap().log.kept);
    }
    assert_eq!(kept, [600, 599, 599], "a run looks at a part of them, and the next one at the rest");
    database.execute("delete from pillarbox_delivery where position <= 550");
    store.prune(&policy()).await.unwrap();
    prune_all(&store, &policy()).await;
    assert_eq!(store.status().await.unwrap().log.kept, 49, "it does not stop as long as it finds some");
}

#[tokio::test]
async fn journal_events_stay() {
    let database = Database::new();
    database.publish_keys(&["a"; 4]);
    database.execute("drop trigger pillarbox_event_is_never_changed");
    database.execute("update pillarbox_event set stream_version = 1 where position = 2");
    age(&database, 4);
    let store = database.store();
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    let page = store.poll(&crate::fixture::tail(0, 10)).await.unwrap();
    assert_eq!((page.log_start, page.scans[0].visible.to_string().as_str()), (2, "2"));
}

#[tokio::test]
async fn old_dedup_keys_go() {
    let database = Database::new();
    database.publish(&[NewEvent::new("t", "y").key("a").dedup_key("d")]);
    let store = database.store();
    assert_eq!(prune_all(&store, &policy()).await.dedup, 0);
    database.execute(&format!("update pillarbox_dedup set created_at = {}", Timestamp::now().0 - DAY_MS - 1000));
    let short = PrunePolicy { dedup_window: Duration::ZERO, ..policy() };
    assert_eq!(prune_all(&store, &short).await.dedup, 1);
}

#[tokio::test]
async fn records_of_progress_are_merged_without_a_gap() {
    let database = Database::new();
    database.publish_keys(&["a"; 30]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    for floor in [5, 10, 12] {
        assert!(settle(&store, write(lane, epoch, floor)).await);
        database.execute("update pillarbox_progress set started_at = 1000 * id, ended_at = 1000 * id");
    }
    database.execute("update pillarbox_cursor set floor = 20");
    assert!(settle(&store, write(lane, epoch, 30)).await);
    let covered = store.books().await.unwrap().lanes[0].covered.clone();
    let before = database.number("select count(*) from pillarbox_progress");
    prune_all(&store, &policy()).await;
    assert_eq!(store.books().await.unwrap().lanes[0].covered, covered);
    assert!(database.number("select count(*) from pillarbox_progress") < before);
}

#[tokio::test]
async fn an_event_is_not_removed_by_hand() {
    let database = Database::new();
    database.publish_keys(&["a"; 4]);
    database.execute("insert into pillarbox_event (topic, type, stream_version) values ('t', 'y', 1)");
    age(&database, 3);
    let store = database.store();
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    for position in [4, 5] {
        let sql = format!("delete from pillarbox_event where position = {position}");
        let error = database.connect().execute(&sql, []).unwrap_err();
        assert!(error.to_string().contains("only removed by retention"), "{error}");
    }
    age(&database, 5);
    assert_eq!(prune_all(&store, &policy()).await.events, 1, "the journal's stays");
    let error = database.connect().execute("delete from pillarbox_event", []).unwrap_err();
    assert!(error.to_string().contains("only removed by retention"), "{error}");
    store.reset().await.unwrap();
    assert_eq!(database.number("select count(*) from pillarbox_event"), 0);
    let error =
        database.connect().execute("insert into pillarbox_event (position, topic, type) values (0, 't', 'y')", []);
    assert!(error.unwrap_err().to_string().contains("position_is_above_0"));
}

#[tokio::test]
async fn an_event_in_a_dead_range_is_delivered_late() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    database.execute("insert into pillarbox_event (position, topic, key, type) values (9, 't', 'a', 'y')");
    let (store, other) = (database.store(), database.store());
    let (lane, epoch) = own(&store, "s").await;
    let wishes = [one_lane("behind"), one_lane("elsewhere").topics(["x"])];
    let later = Subscription { start: Start::Now, ..one_lane("later") };
    let others = join(&other, wishes.into_iter().chain([later])).await.subscriptions;
    let mut dead = pillarbox::store::RangeSet::new();
    dead.insert_range(4, 8);
    let lanes = vec![write(lane, epoch, 9)];
    store.settle(&pillarbox::store::Settlement { lanes, closed: dead }).await.unwrap();
    let prune = async || store.prune(&policy()).await.unwrap();
    prune().await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 0);

    database.execute("insert into pillarbox_event (position, topic, key, type) values (6, 't', 'a', 'y')");
    let revision = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap().revision;
    prune().await;
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert!(state.revision > revision, "the owner loads again");
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    assert_eq!(rows, [(6, State::Pending, 0)]);
    let behind = crate::fixture::lane(others[0].id);
    assert!(other.load(&[(behind, 0)]).await.unwrap()[0].is_none(), "one that has not settled it reads again");
    for untouched in &others[1..] {
        let state = other.load(&[(crate::fixture::lane(untouched.id), 0)]).await.unwrap().remove(0).unwrap();
        assert!(state.deliveries.is_empty(), "{}", untouched.name);
    }
    assert_eq!(store.books().await.unwrap().closed.to_string(), "4-5,7-8");
    prune().await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 1, "once");
}

#[tokio::test]
async fn events_in_dead_ranges_are_found_in_rotation() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    database.execute("insert into pillarbox_event (position, topic, key, type) values (30003, 't', 'a', 'y')");
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 30_003)).await);
    database.execute(
        "with recursive n (n) as (values (4) union all select n + 2 from n where n < 30002)
        insert into pillarbox_dead_range (low, high, closed_at) select n, n, 0 from n",
    );
    let insert = |at: i64| {
        database
            .execute(&format!("insert into pillarbox_event (position, topic, key, type) values ({at}, 't', 'a', 'y')"));
    };
    let delivered = || database.number("select coalesce(min(position), 0) from pillarbox_delivery");
    insert(6_000);
    insert(24_000);
    let prune = async || store.prune(&PrunePolicy { keep: None, ..policy() }).await.unwrap();
    prune().await;
    assert_eq!(delivered(), 24_000, "those were the newest ten thousand ranges");
    prune().await;
    assert_eq!(delivered(), 6_000, "it goes on where it stopped");
    assert_eq!(database.number("select count(*) from pillarbox_dead_range where low in (6000, 24000)"), 0);
    insert(30_000);
    prune().await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 3, "and then over again");
}

#[tokio::test]
async fn what_retention_removed_between_a_journals_events_is_not_dead_and_its_deliveries_outlive_a_rewind() {
    let database = Database::new();
    database.publish_keys(&["a"; 5]);
    database.execute("drop trigger pillarbox_event_is_never_changed");
    database.execute("update pillarbox_event set stream_version = 1 where position = 2");
    age(&database, 4);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 5);
    parked.put = [2, 3, 5].map(|position| delivery(position, "a", State::Dead)).into();
    assert!(settle(&store, parked).await);
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    let mut dead = pillarbox::store::RangeSet::new();
    dead.insert_range(3, 4);
    dead.insert_range(7, 8);
    store.settle(&pillarbox::store::Settlement { closed: dead, ..Default::default() }).await.unwrap();
    assert_eq!(store.books().await.unwrap().closed.to_string(), "7-8");

    let rewind = pillarbox::admin::Change::Rewind { subscription: "s".into(), to: Start::Beginning, key: None };
    store.change(&rewind, false).await.unwrap();
    let state = store.load(&[(lane, epoch + 1)]).await.unwrap().remove(0).unwrap();
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    assert_eq!(rows, [(3, State::Pending, 0)], "2 and 5 are read again, 3 is only kept aside");
    assert_eq!(store.fetch(&[3]).await.unwrap().len(), 1);
}
