use pillarbox::NewEvent;
use pillarbox_sqlite::SqliteStore;
use pillarbox_testkit::{Committed, order};

use crate::fixture::Database;

impl order::OrderedLog for Database {
    type Store = SqliteStore;

    async fn store(&self) -> SqliteStore {
        Database::store(self)
    }

    async fn publish(&self, events: Vec<NewEvent>) {
        // It waits for the one writer of the file.
        tokio::task::block_in_place(|| drop(Database::publish(self, &events)));
    }

    async fn owners(&self) -> usize {
        self.number("select count(distinct owner) from pillarbox_cursor") as usize
    }

    async fn committed(&self) -> Vec<Committed> {
        let connection = self.connect();
        let mut statement = connection.prepare("select id, key, position from pillarbox_event").unwrap();
        let event = |row: &rusqlite::Row<'_>| {
            let id = row.get::<_, String>(0)?.parse().expect("an id is a uuid");
            Ok(Committed { id, key: row.get(1)?, position: row.get(2)? })
        };
        statement.query_map([], event).unwrap().map(Result::unwrap).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_key_stays_in_order_across_relays_lanes_and_failures() {
    order::check(Database::new()).await;
}
