use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::{Operator, State};
use pillarbox::engine::EngineConfig;
use pillarbox::store::{AttemptError, ERRORS_KEPT_MAX, Lock, RangeSet, Settlement, Store, Take, TakeCause};
use pillarbox::testing::Capture;
use pillarbox::{ErrorKind, Relay, RelayConfig, Start, Subscription, Timestamp};

use crate::fixture::{Database, delivery, join, lane, one_lane, own, settle, tail, take, write};

/// A time is looked for by halves: where clocks were set back, and where retention or a rollback left gaps, too.
#[tokio::test]
async fn a_time_is_found_where_reading_the_log_from_its_beginning_finds_it() {
    let database = Database::new();
    database.publish_keys(&["a"; 300]);
    database.execute(
        "drop trigger pillarbox_event_is_never_changed;
         update pillarbox_event set created_at = position * 20000 - case when position % 7 = 0 then 59000 else 0 end",
    );
    database.delete_event("position between 100 and 180 or position % 5 = 0");
    let store = database.store();
    let times: Vec<i64> = (0..=6_020_000).step_by(70_001).collect();
    let named = |(index, time): (usize, &i64)| Subscription {
        start: Start::Time(Timestamp(*time)),
        ..one_lane(&format!("s{index}"))
    };
    let joined = join(&store, times.iter().enumerate().map(named)).await;
    for (view, time) in joined.subscriptions.iter().zip(times) {
        let first = format!("select coalesce(min(position) - 1, 300) from pillarbox_event where created_at >= {time}");
        let state = store.load(&[(lane(view.id), 0)]).await.unwrap().remove(0).unwrap();
        assert_eq!(state.cursor.floor, database.number(&first), "{time}");
    }
}

#[tokio::test]
async fn a_store_that_is_dropped_is_seen_as_ended_and_one_that_leaves_is_gone() {
    let database = Database::new();
    let (a, b, c) = (database.store(), database.store(), database.store());
    let (lane, _) = own(&a, "s").await;
    let b_id = join(&b, [one_lane("s")]).await.instance;
    let c_id = join(&c, [one_lane("s")]).await.instance;
    let locks = async |store: &pillarbox_sqlite::SqliteStore| -> Vec<Lock> {
        let fleet = store.observe(&Default::default()).await.unwrap();
        fleet.instances.iter().map(|instance| instance.lock).collect()
    };
    assert_eq!(locks(&b).await, [Lock::Held; 3]);
    drop(a);
    assert_eq!(locks(&b).await, [Lock::Free, Lock::Held, Lock::Held]);
    assert_eq!(locks(&b).await.len(), 3, "it still owns a lane");
    take(&b, lane, TakeCause::Lock).await.unwrap();
    locks(&b).await;
    assert_eq!(locks(&b).await, [Lock::Held, Lock::Held], "buried");

    b.leave().await.unwrap();
    let fleet = c.observe(&Default::default()).await.unwrap();
    assert_eq!(fleet.instances.iter().map(|instance| instance.id).collect::<Vec<_>>(), [c_id]);
    assert_eq!((fleet.lanes[0].owner, b_id < c_id), (None, true));
    assert_eq!(b.observe(&Default::default()).await.unwrap_err().kind(), ErrorKind::Fatal);
    let files = std::fs::read_dir(database.path.with_file_name("app.db-pillarbox")).unwrap();
    let names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(names.iter().filter(|name| name.ends_with(".lock")).count(), 1, "{names:?}");
}

#[tokio::test]
async fn a_buried_instance_is_told() {
    let database = Database::new();
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    database.execute("delete from pillarbox_instance");
    assert_eq!(store.observe(&Default::default()).await.unwrap_err().kind(), ErrorKind::Ended);
    let take = Take { lane, expected: epoch, cause: TakeCause::Free, beat: None };
    assert_eq!(store.take(&[take]).await.unwrap_err().kind(), ErrorKind::Ended);
}

#[tokio::test]
async fn a_settlement_writes_cursor_and_deliveries_together() {
    let database = Database::new();
    let ids = database.publish_keys(&["a"; 6]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut first = write(lane, epoch, 2);
    first.cursor.settled = [4..=5].into_iter().collect();
    first.cursor.anchor = Some((5, ids[4]));
    first.put = vec![delivery(1, "a", State::Retrying), delivery(4, "a", State::Pending)];
    assert!(settle(&store, first.clone()).await);
    let load = async || store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert_eq!((load().await.cursor, load().await.deliveries), (first.cursor.clone(), first.put.clone()));

    for attempt in 1..=ERRORS_KEPT_MAX as u32 + 2 {
        let error = AttemptError { at: Timestamp(0), attempt, kind: "k".into(), message: format!("no {attempt}") };
        let mut next = write(lane, epoch, 2);
        next.cursor = first.cursor.clone();
        let changed = pillarbox::store::DeliveryRow { attempts: attempt, ..delivery(1, "a", State::Retrying) };
        next.change = vec![(changed, Some(error.clone())), (delivery(3, "a", State::Dead), Some(error))];
        assert!(settle(&store, next).await);
    }
    let deliveries = load().await.deliveries;
    assert_eq!(deliveries.len(), 2, "what is not there is not changed into being");
    assert_eq!(deliveries[0].attempts, ERRORS_KEPT_MAX as u32 + 2);
    let shown = store.show(ids[0]).await.unwrap().unwrap();
    let errors = &shown.subscriptions[0].delivery.as_ref().unwrap().errors;
    assert_eq!(errors.iter().map(|error| error.attempt).collect::<Vec<_>>(), [3, 4, 5, 6, 7]);

    let mut last = write(lane, epoch, 6);
    last.finish = vec![1, 4];
    last.release = true;
    assert!(settle(&store, last).await);
    assert!(load().await.deliveries.is_empty());
    assert_eq!(store.observe(&Default::default()).await.unwrap().lanes[0].owner, None);
}

#[tokio::test]
async fn the_books_show_what_settlements_covered_and_not_what_was_moved_by_hand() {
    let database = Database::new();
    database.publish_keys(&["a"; 30]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 5)).await);
    assert!(settle(&store, write(lane, epoch, 10)).await);
    assert_eq!(database.number("select count(*) from pillarbox_progress where epoch > 0"), 1, "one record a while");
    database.execute("update pillarbox_cursor set floor = 20");
    let mut after = write(lane, epoch, 25);
    after.cursor.settled.insert(28);
    assert!(settle(&store, after).await);
    let mut dead = RangeSet::new();
    dead.insert_range(40, 42);
    store.settle(&Settlement { closed: dead, ..Settlement::default() }).await.unwrap();
    let books = store.books().await.unwrap();
    assert_eq!((books.horizon, books.closed.to_string().as_str()), (30, "40-42"));
    assert_eq!((books.lanes[0].floor, books.lanes[0].covered.to_string().as_str()), (25, "1-10,21-25,28"));
}

#[tokio::test]
async fn what_lies_before_the_start_is_in_the_books_as_such() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    let store = database.store();
    join(&store, [Subscription { start: Start::Now, ..one_lane("s") }]).await;
    let book = store.books().await.unwrap().lanes.remove(0);
    assert_eq!((book.before_start.to_string().as_str(), book.covered.is_empty()), ("1-3", true));
}

#[tokio::test]
async fn a_lock_file_that_was_removed_is_no_proof_of_death() {
    let database = Database::new();
    let (a, b) = (database.store(), database.store());
    let a_id = join(&a, [one_lane("s")]).await.instance;
    join(&b, [one_lane("s")]).await;
    let file = database.path.with_file_name("app.db-pillarbox").join(format!("{}.lock", a_id.0));
    std::fs::remove_file(&file).unwrap();
    let seen = async || {
        let fleet = b.observe(&Default::default()).await.unwrap();
        fleet.instances.iter().find(|instance| instance.id == a_id).map(|instance| instance.lock)
    };
    assert_eq!(seen().await, Some(Lock::Unknown));
    assert_eq!(seen().await, Some(Lock::Unknown), "it was not buried");
    assert!(b.status().await.unwrap().instances[0].alive, "it has just beaten");
    let delete = pillarbox::admin::Change::Delete("s".into());
    b.leave().await.unwrap();
    assert_eq!(b.change(&delete, true).await.unwrap_err().kind(), ErrorKind::Invalid, "it is run");

    let error = a.observe(&Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Ended);
    assert!(error.to_string().contains("lock file was removed"), "{error}");
    std::fs::write(&file, "").unwrap();
    let error = a.observe(&Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Ended, "another file under its name is not its lock: {error}");

    std::fs::remove_file(&file).unwrap();
    let beat = |seconds: i64| {
        let at = Timestamp::now().0 - seconds * 1000;
        database.execute(&format!("update pillarbox_instance set beat_at = {at} where id = {}", a_id.0));
    };
    beat(31);
    assert!(!b.status().await.unwrap().instances[0].alive, "nobody has heard of it for long");
    join(&b, [one_lane("s")]).await;
    seen().await;
    assert!(seen().await.is_some(), "not long enough to be forgotten");
    beat(601);
    seen().await;
    assert_eq!(seen().await, None, "forgotten");
}

#[tokio::test]
async fn the_write_ahead_log_is_not_left_behind_by_a_clean_end() {
    let database = Database::new();
    let store = database.store();
    own(&store, "s").await;
    database.publish_keys(&["a"; 2000]);
    store.status().await.unwrap();
    let wal = database.path.with_file_name("app.db-wal");
    assert!(wal.exists());
    store.leave().await.unwrap();
    // Asked for and not waited for: the reader is busy when the end comes.
    for _ in 0..10 {
        drop(tokio::time::timeout(std::time::Duration::ZERO, store.poll(&tail(0, 1_000_000))).await);
    }
    drop(store);
    assert!(!wal.exists(), "a connection was still open when the drop returned");
}

#[tokio::test]
async fn a_relay_that_was_buried_or_lost_its_lock_file_comes_back_as_another_instance() {
    let database = Database::new();
    let capture = Capture::new();
    let engine = EngineConfig { beat_interval: Duration::from_millis(10), ..EngineConfig::default() };
    let relay = Relay::builder(database.store())
        .config(RelayConfig { engine, ..RelayConfig::default() })
        .subscribe(one_lane("s"), Arc::new(capture.clone()))
        .start()
        .await
        .unwrap();
    let locks = database.path.with_file_name("app.db-pillarbox");
    for (round, bury) in [true, false, true].into_iter().enumerate() {
        database.publish_keys(&["k"; 3]);
        relay.until_idle().await.unwrap();
        let before = relay.instance();
        if bury {
            database.execute("delete from pillarbox_instance");
        } else {
            std::fs::remove_file(locks.join(format!("{}.lock", before.0))).unwrap();
        }
        database.publish_keys(&["k"; 2]);
        capture.wait_for(5 * (round + 1)).await;
        while relay.instance() == before || !relay.ready() {
            tokio::task::yield_now().await;
        }
        relay.until_idle().await.unwrap();
    }
    let arrived: Vec<i64> = capture.events().iter().map(|event| event.position).collect();
    let mut in_order = arrived.clone();
    in_order.sort_unstable();
    in_order.dedup();
    assert_eq!(in_order, (1..=15).collect::<Vec<_>>(), "{arrived:?}");
    relay.drain().await.unwrap();
    let is_lock = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".lock");
    let left = std::fs::read_dir(&locks).unwrap().map(Result::unwrap).filter(is_lock).count();
    assert_eq!(left, 0, "a lock file was left behind");
    assert_eq!(database.number("select count(*) from pillarbox_instance"), 0);
}
