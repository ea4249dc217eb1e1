use std::path::PathBuf;

use pillarbox::NewEvent;
use pillarbox_sqlite::{SqliteStore, migrate};
pub(crate) use pillarbox_testkit::by_hand::{
    delivery, events, hello, join, lane, one_lane, one_scan, own, poll_tail, settle, tail, take, write,
};
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
