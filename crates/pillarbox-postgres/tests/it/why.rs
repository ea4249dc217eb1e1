//! What `why` says on PostgreSQL alone; every cause is a case of the store suite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::admin::{Cause, Operator};
use pillarbox::{Delivery, Failure, NewEvent, Relay};
use tokio::sync::Notify;

use crate::fixture::{Database, one_lane};

/// Far longer than anything here takes; only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test]
async fn held_by_a_pid() {
    let database = Database::new().await;
    let id = database.publish_keys(&["a"]).await[0];
    let writer = database.client().await;
    writer.batch_execute("begin").await.unwrap();
    pillarbox_postgres::publish(&writer, &NewEvent::new("t", "y")).await.unwrap();
    let pid: i32 = writer.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let called = Arc::new(Notify::new());
    let calls = called.clone();
    let hanging = move |_: Delivery| {
        calls.notify_one();
        std::future::pending::<Result<(), Failure>>()
    };
    let _relay = Relay::builder(database.store().await).handle(one_lane("s"), hanging).start().await.unwrap();
    called.notified().await;
    let end = format!("select pg_terminate_backend({pid})");
    let parts = ["held back by", &format!("pid {pid}"), "idle in transaction", &end];
    let (operator, deadline) = (database.store().await, Instant::now() + PATIENCE);
    loop {
        let record = operator.show(id).await.unwrap().unwrap();
        let why = pillarbox::admin::why(&record, &record.subscriptions[0], &operator.status().await.unwrap());
        let more = [&why.advice, &why.detail].map(|text| text.clone().unwrap_or_default());
        let text = format!("{} {}", why.message, more.join(" "));
        if why.cause == Cause::Pending && parts.iter().all(|part| text.contains(part)) {
            return;
        }
        assert!(Instant::now() < deadline, "{why:?}");
        tokio::task::yield_now().await;
    }
}
