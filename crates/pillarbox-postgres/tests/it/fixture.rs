use std::sync::Arc;

use pillarbox::admin::State;
use pillarbox::store::{
    Cursor, DeliveryRow, Epoch, Hello, Joined, LaneRef, LaneWrite, Page, PollRequest, Scan, ScanRequest, Settlement,
    Store, SubscriptionId, Take, TakeCause,
};
use pillarbox::{Event, NewEvent, Position, Subscription, Timestamp};
use pillarbox_postgres::{PgConfig, PostgresStore, migrate};
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

/// One lane, so that tests can say which.
pub(crate) fn one_lane(name: &str) -> Subscription {
    Subscription { lanes: 1, ..Subscription::new(name) }
}

pub(crate) fn hello(subscriptions: impl IntoIterator<Item = Subscription>) -> Hello {
    let subscriptions = subscriptions.into_iter().collect();
    Hello { host: "here".into(), pid: std::process::id(), version: "0".into(), subscriptions, ..Hello::default() }
}

pub(crate) async fn join(store: &PostgresStore, subscriptions: impl IntoIterator<Item = Subscription>) -> Joined {
    store.join(hello(subscriptions)).await.unwrap()
}

/// Joins with one subscription of one lane and takes that lane.
pub(crate) async fn own(store: &PostgresStore, name: &str) -> (LaneRef, Epoch) {
    let joined = join(store, [one_lane(name)]).await;
    let lane = lane(joined.subscriptions[0].id);
    (lane, take(store, lane, TakeCause::Free).await.unwrap())
}

pub(crate) fn lane(subscription: SubscriptionId) -> LaneRef {
    LaneRef { subscription, lane: 0 }
}

/// Takes a lane at whatever epoch it has now.
pub(crate) async fn take(store: &PostgresStore, lane: LaneRef, cause: TakeCause) -> Option<Epoch> {
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

pub(crate) async fn settle(store: &PostgresStore, write: LaneWrite) -> bool {
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

pub(crate) async fn poll_tail(store: &PostgresStore, after: Position) -> Scan {
    one_scan(store.poll(&tail(after, 1_000_000)).await.unwrap())
}

pub(crate) fn one_scan(mut page: Page) -> Scan {
    assert_eq!(page.scans.len(), 1);
    page.scans.remove(0)
}

pub(crate) async fn events(store: &PostgresStore) -> Vec<Arc<Event>> {
    poll_tail(store, 0).await.events
}
