//! The log replaced by an older state of itself, while a store is open or between two starts: a backup restored into the file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pillarbox::ErrorKind;
use pillarbox::admin::{Operator, State};
use pillarbox::store::{Cursor, Epoch, LaneRef, RangeSet, Settlement, Store};
use pillarbox_sqlite::{SqliteStore, adopt, fresh, migrate};
use rusqlite::Connection;

use crate::fixture::{Database, delivery, join, one_lane, own, poll_tail, settle, tail, write};

/// Copies one database into another with SQLite's backup interface, as `.backup` and `.restore` do.
fn copy(from: &Path, to: &Path) {
    let mut target = Connection::open(to).unwrap();
    target.restore("main", from, None::<fn(_)>).unwrap();
}

/// A store that owns a lane, has seen ten events and finds itself with the three of the backup.
async fn restored(database: &Database) -> (SqliteStore, LaneRef, Epoch) {
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    database.publish_keys(&["a"; 3]);
    let backup = database.folder.path().join("backup.db");
    copy(&database.path, &backup);
    database.publish_keys(&["a"; 7]);
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "1-10");
    copy(&backup, &database.path);
    (store, lane, epoch)
}

#[tokio::test]
async fn a_restore_under_a_running_store_is_noticed_by_its_next_poll() {
    let database = Database::new();
    let (store, ..) = restored(&database).await;
    let error = store.poll(&tail(10, 100)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    assert!(error.to_string().contains("up to 10") && error.to_string().contains("--adopt"), "{error}");
    assert_eq!(store.poll(&tail(10, 100)).await.unwrap_err().kind(), ErrorKind::Foreign, "and by every other");
    adopt(&database.path).unwrap();
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "1-3");
    database.publish_keys(&["a"]);
    let wake = store.wait(std::time::Duration::from_secs(60)).await.unwrap();
    assert_eq!(wake, pillarbox::store::Wake::Rang, "new events ring though their positions are old");
    assert_eq!(poll_tail(&store, 3).await.visible.to_string(), "4");
}

#[tokio::test]
async fn an_adopted_log_judges_new_events_by_the_filter_of_now() {
    let database = Database::new();
    let (store, ..) = restored(&database).await;
    // A relay that ran on has passed positions that are handed out again.
    let former =
        r#"[{"definition": 1, "filter": {"topics": ["other"], "types": []}, "until": 5, "passed": ["1-100"]}]"#;
    let connection = Connection::open(&database.path).unwrap();
    connection.execute("update pillarbox_subscription set former_filters = ?1", [former]).unwrap();
    adopt(&database.path).unwrap();
    database.publish_keys(&["a"]);
    let events = store.fetch(&[3, 4]).await.unwrap();
    for (event, wanted) in events.iter().zip([false, true]) {
        let record = store.show(event.id).await.unwrap().expect("it is in the log");
        assert_eq!(record.subscriptions[0].wanted, wanted, "position {}", event.position);
    }
}

#[tokio::test]
async fn a_restore_under_a_running_store_is_noticed_by_its_next_settlement() {
    let database = Database::new();
    let (store, lane, epoch) = restored(&database).await;
    let mut above = write(lane, epoch, 3);
    above.cursor.settled.insert(10);
    for late in [write(lane, epoch, 10), above] {
        // The epoch is still that of the backup: no fence keeps it out.
        let error = store.settle(&Settlement { lanes: vec![late], ..Settlement::default() }).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    }
    assert!(settle(&store, write(lane, epoch, 3)).await, "nothing was written");
}

#[tokio::test]
async fn a_restore_that_other_events_have_grown_over_is_noticed_by_the_next_beat() {
    let database = Database::new();
    let (store, lane, epoch) = restored(&database).await;
    database.publish_keys(&["a"; 7]);
    let mut late = write(lane, epoch, 10);
    late.cursor.anchor = Some((10, uuid::Uuid::now_v7()));
    assert!(settle(&store, late).await);
    let error = store.observe(&Default::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
}

#[tokio::test]
async fn adopting_a_log_forgets_what_is_said_about_positions_beyond_it() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 3);
    parked.put = vec![delivery(2, "a", State::Dead), delivery(9, "a", State::Dead)];
    let mut dead = RangeSet::new();
    dead.insert_range(3, 7);
    store.settle(&Settlement { lanes: vec![parked], closed: dead }).await.unwrap();
    drop(store);
    database.execute("update pillarbox_cursor set floor = 8, settled = '10'");
    adopt(&database.path).unwrap();
    database.publish_keys(&["a"; 7]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert_eq!(state.cursor, Cursor { floor: 3, ..Cursor::default() }, "positions 4 to 10 are new events");
    assert_eq!(state.deliveries.iter().map(|row| row.position).collect::<Vec<_>>(), [2]);
    assert_eq!(store.books().await.unwrap().closed.to_string(), "3");
}

/// A relay's life: it beats, and is drained or killed.
async fn live(database: &Database, drained: bool) {
    let store = database.store();
    join(&store, [one_lane("s")]).await;
    store.observe(&Default::default()).await.unwrap();
    if drained {
        store.leave().await.unwrap();
    }
}

/// A database of ten events that a relay has seen, overwritten in place by its backup of three.
async fn overwritten(drained: bool) -> Database {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    live(&database, true).await;
    let backup = database.folder.path().join("backup.db");
    copy(&database.path, &backup);
    database.publish_keys(&["a"; 7]);
    live(&database, drained).await;
    let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
    let before = inode(&database.path);
    std::fs::copy(&backup, &database.path).unwrap();
    assert_eq!(inode(&database.path), before, "it looks like the original");
    database
}

fn refused(database: &Database) -> String {
    let error = SqliteStore::open(&database.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    error.to_string()
}

#[tokio::test]
async fn a_file_overwritten_by_its_backup_is_refused_at_the_next_start() {
    for drained in [true, false] {
        let database = overwritten(drained).await;
        let text = refused(&database);
        assert!(text.contains("up to 10") && text.contains("up to 3"), "{text}");
        assert!(text.contains("--adopt") && text.contains("--fresh"), "{text}");
        refused(&database);
        adopt(&database.path).unwrap();
        live(&database, drained).await;
        database.publish_keys(&["a"]);
        live(&database, drained).await;
        assert_eq!(poll_tail(&database.store(), 3).await.visible.to_string(), "4");
    }
}

#[tokio::test]
async fn a_copy_that_was_declared_fresh_has_a_witness_of_its_own() {
    let database = overwritten(true).await;
    refused(&database);
    fresh(&database.path).unwrap();
    live(&database, true).await;
    copy(&database.folder.path().join("backup.db"), &database.path);
    assert!(refused(&database).contains("log"), "the backup is of the log that was here before");
}

#[tokio::test]
async fn a_backup_of_before_an_adoption_is_refused_though_it_has_come_as_far() {
    let database = overwritten(true).await;
    adopt(&database.path).unwrap();
    live(&database, true).await;
    copy(&database.folder.path().join("backup.db"), &database.path);
    assert!(refused(&database).contains("incarnation"));
}

#[tokio::test]
async fn a_log_moved_without_its_folder_is_recognised_by_what_it_left_behind() {
    let mut database = Database::new();
    database.publish_keys(&["a"; 3]);
    live(&database, true).await;
    let moved = database.folder.path().join("moved.db");
    std::fs::rename(&database.path, &moved).unwrap();
    database.path = moved;
    live(&database, true).await;
    std::fs::remove_dir_all(database.folder.path().join("app.db-pillarbox")).unwrap();
    live(&database, true).await;
}

#[tokio::test]
async fn a_log_without_the_witness_that_it_had_is_refused_until_somebody_says_what_it_is() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    live(&database, true).await;
    std::fs::remove_dir_all(database.folder.path().join("app.db-pillarbox")).unwrap();
    let text = refused(&database);
    assert!(text.contains("app.db-pillarbox") && text.contains("--adopt"), "{text}");
    adopt(&database.path).unwrap();
    live(&database, true).await;
}

#[tokio::test]
async fn a_new_log_at_the_place_of_an_old_one_is_at_home() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    live(&database, true).await;
    std::fs::remove_file(&database.path).unwrap();
    migrate(&database.path).unwrap();
    live(&database, true).await;
}

#[tokio::test]
async fn a_log_that_was_emptied_is_still_itself() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    live(&database, true).await;
    database.store().reset().await.unwrap();
    live(&database, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_see_the_log_grow_side_by_side_do_not_accuse_it() {
    let database = Database::new();
    let rounds = || async {
        for _ in 0..10 {
            database.publish_keys(&["a"]);
            live(&database, true).await;
        }
    };
    tokio::join!(rounds(), rounds(), rounds());
}
