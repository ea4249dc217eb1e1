use pillarbox::NewEvent;
use pillarbox_postgres::PostgresStore;
use pillarbox_testkit::{Committed, order};

use crate::fixture::Database;

impl order::OrderedLog for Database {
    type Store = PostgresStore;

    async fn store(&self) -> PostgresStore {
        Database::store(self).await
    }

    async fn publish(&self, events: Vec<NewEvent>) {
        Database::publish(self, &events).await;
    }

    async fn owners(&self) -> usize {
        self.number("select count(distinct owner) from pillarbox.cursor").await as usize
    }

    async fn committed(&self) -> Vec<Committed> {
        let rows = self.client().await.query("select id, key, position from pillarbox.event_view", &[]).await.unwrap();
        rows.iter().map(|row| Committed { id: row.get(0), key: row.get(1), position: row.get(2) }).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_key_stays_in_order_across_relays_lanes_and_failures() {
    order::check(Database::new().await).await;
}
