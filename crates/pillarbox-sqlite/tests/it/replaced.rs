//! The log replaced by an older state of itself while a store is open: a backup restored into the live file.

use std::path::Path;

use pillarbox::{Cursor, Epoch, ErrorKind, LaneRef, Operator, RangeSet, Settlement, State, Store};
use pillarbox_sqlite::{SqliteStore, adopt};
use rusqlite::Connection;

use crate::fixture::{Database, delivery, own, poll_tail, settle, tail, write};

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
    assert_eq!(wake, pillarbox::Wake::Rang, "new events ring though their positions are old");
    assert_eq!(poll_tail(&store, 3).await.visible.to_string(), "4");
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
    store.settle(&Settlement { lanes: vec![parked], dead }).await.unwrap();
    drop(store);
    database.execute("update pillarbox_cursor set floor = 8, settled = '10'");
    adopt(&database.path).unwrap();
    database.publish_keys(&["a"; 7]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert_eq!(state.cursor, Cursor { floor: 3, ..Cursor::default() }, "positions 4 to 10 are new events");
    assert_eq!(state.deliveries.iter().map(|row| row.position).collect::<Vec<_>>(), [2]);
    assert_eq!(store.books().await.unwrap().dead.to_string(), "3");
}
