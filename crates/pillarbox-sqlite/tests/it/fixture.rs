use std::path::PathBuf;
use std::sync::Arc;

use pillarbox::admin::State;
use pillarbox::store::{
    Cursor, DeliveryRow, Epoch, Hello, Joined, LaneRef, LaneWrite, Page, PollRequest, Scan, ScanRequest, Settlement,
    Store, SubscriptionId, Take, TakeCause,
};
use pillarbox::{Event, NewEvent, Position, Subscription, Timestamp};
use pillarbox_sqlite::{SqliteStore, migrate};
use rusqlite::Connection;
use tempfile::TempDir;
use uuid::Uuid;

/// A migrated database in a folder of its own.
pub(crate) struct Database {
    pub(crate) folder: TempDir,
    pub(crate) path: PathBuf,
}

impl Database {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("app.db");
        migrate(&path).unwrap();
        Database { folder, path }
    }

    pub(crate) fn connect(&self) -> Connection {
        let connection = Connection::open(&self.path).unwrap();
        connection.busy_timeout(std::time::Duration::from_secs(10)).unwrap();
        connection
    }

    pub(crate) fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.path).unwrap()
    }

    pub(crate) fn publish(&self, events: &[NewEvent]) -> Vec<Uuid> {
        let mut connection = self.connect();
        let tx = connection.transaction().unwrap();
        let ids = pillarbox_sqlite::publish_all(&tx, events).unwrap();
        tx.commit().unwrap();
        ids
    }

    /// Events of topic `t`, one a key given.
    pub(crate) fn publish_keys(&self, keys: &[&str]) -> Vec<Uuid> {
        self.publish(&keys.iter().map(|key| NewEvent::new("t", "y").key(*key)).collect::<Vec<_>>())
    }

    pub(crate) fn execute(&self, sql: &str) {
        self.connect().execute_batch(sql).unwrap();
    }

    /// Removes events that the schema would not let go.
    pub(crate) fn delete_event(&self, condition: &str) {
        self.execute(&format!(
            "drop trigger if exists pillarbox_event_is_only_removed_by_retention;
             delete from pillarbox_event where {condition}"
        ));
    }

    pub(crate) fn number(&self, sql: &str) -> i64 {
        self.connect().query_row(sql, [], |row| row.get(0)).unwrap()
    }
}

/// One lane, so that tests can say which.
pub(crate) fn one_lane(name: &str) -> Subscription {
    Subscription { lanes: 1, ..Subscription::new(name) }
}

pub(crate) fn hello(subscriptions: impl IntoIterator<Item = Subscription>) -> Hello {
    let subscriptions = subscriptions.into_iter().collect();
    Hello { host: "here".into(), pid: std::process::id(), version: "0".into(), subscriptions, rejoin: false }
}

pub(crate) async fn join(store: &SqliteStore, subscriptions: impl IntoIterator<Item = Subscription>) -> Joined {
    store.join(hello(subscriptions)).await.unwrap()
}

/// Joins with one subscription of one lane and takes that lane.
pub(crate) async fn own(store: &SqliteStore, name: &str) -> (LaneRef, Epoch) {
    let joined = join(store, [one_lane(name)]).await;
    let lane = lane(joined.subscriptions[0].id);
    (lane, take(store, lane, TakeCause::Free).await.unwrap())
}

pub(crate) fn lane(subscription: SubscriptionId) -> LaneRef {
    LaneRef { subscription, lane: 0 }
}

/// Takes a lane at whatever epoch it has now.
pub(crate) async fn take(store: &SqliteStore, lane: LaneRef, cause: TakeCause) -> Option<Epoch> {
    let fleet = store.observe(&Default::default()).await.unwrap();
    let expected = fleet.lanes.iter().find(|view| view.lane == lane).unwrap().epoch;
    store.take(&[Take { lane, expected, cause, beat: None }]).await.unwrap()[0]
}

pub(crate) fn write(lane: LaneRef, epoch: Epoch, floor: Position) -> LaneWrite {
    LaneWrite {
        lane,
        epoch,
        revision: 0,
        cursor: Cursor { floor, ..Cursor::default() },
        queue: Vec::new(),
        put: Vec::new(),
        change: Vec::new(),
        finish: Vec::new(),
        calm: false,
        release: false,
    }
}

pub(crate) async fn settle(store: &SqliteStore, write: LaneWrite) -> bool {
    store.settle(&Settlement { lanes: vec![write], ..Settlement::default() }).await.unwrap()[0]
}

pub(crate) fn delivery(position: Position, key: &str, state: State) -> DeliveryRow {
    let now = Timestamp::now();
    DeliveryRow { position, key: Some(key.into()), arrival: position, state, attempts: 1, due_at: now, since: now }
}

/// The tail above `after`, for everybody.
pub(crate) fn tail(after: Position, limit: usize) -> PollRequest {
    PollRequest {
        scans: vec![ScanRequest { after, to: Position::MAX, limit }],
        wanted: vec![Default::default()],
        ..Default::default()
    }
}

pub(crate) async fn poll_tail(store: &SqliteStore, after: Position) -> Scan {
    one_scan(store.poll(&tail(after, 1_000_000)).await.unwrap())
}

pub(crate) fn one_scan(mut page: Page) -> Scan {
    assert_eq!(page.scans.len(), 1);
    page.scans.remove(0)
}

pub(crate) async fn events(store: &SqliteStore) -> Vec<Arc<Event>> {
    poll_tail(store, 0).await.events
}
