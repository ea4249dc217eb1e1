use pillarbox::NewEvent;
use pillarbox_postgres::{PgConfig, PostgresStore, migrate};
pub(crate) use pillarbox_testkit::by_hand::{
    delivery, events, hello, join, lane, one_lane, one_scan, own, poll_tail, settle, tail, take, write,
};
use pillarbox_testkit::postgres::{self, Server};
use tokio_postgres::{Client, SimpleQueryMessage};
use uuid::Uuid;

/// A migrated database of its own on the shared server.
pub(crate) struct Database {
    url: String,
    /// Dropped with the value.
    _database: postgres::Database,
}

impl Database {
    pub(crate) async fn new() -> Self {
        Self::on(Server::shared()).await
    }

    pub(crate) async fn on(server: &Server) -> Self {
        let database = server.create_database().unwrap();
        let url = database.url().to_owned();
        migrate(&url.parse::<PgConfig>().unwrap()).await.unwrap();
        Database { url, _database: database }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A client of an application.
    pub(crate) async fn client(&self) -> Client {
        connect(&self.url).await
    }

    pub(crate) async fn store(&self) -> PostgresStore {
        PostgresStore::open(&self.url).await.unwrap()
    }

    pub(crate) async fn publish(&self, events: &[NewEvent]) -> Vec<Uuid> {
        let mut client = self.client().await;
        let tx = client.transaction().await.unwrap();
        let ids = pillarbox_postgres::publish_all(&tx, events).await.unwrap();
        tx.commit().await.unwrap();
        ids
    }

    /// Events of topic `t`, one a key given.
    pub(crate) async fn publish_keys(&self, keys: &[&str]) -> Vec<Uuid> {
        self.publish(&keys.iter().map(|key| NewEvent::new("t", "y").key(*key)).collect::<Vec<_>>()).await
    }

    pub(crate) async fn execute(&self, sql: &str) {
        self.client().await.batch_execute(sql).await.unwrap();
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        self.client().await.query_one(sql, &[]).await.unwrap().get(0)
    }
}

/// A plain client; its connection ends with it.
pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// How many pages a statement looks at.
pub(crate) async fn pages(client: &Client, sql: &str) -> i64 {
    let said = client.simple_query(&format!("explain (analyze, buffers, format json) {sql}")).await.unwrap();
    let text = said.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let plan = &serde_json::from_str::<serde_json::Value>(text.unwrap()).unwrap()[0]["Plan"];
    plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap()
}
