use pillarbox::NewEvent;
use pillarbox_postgres::{PgConfig, migrate, publish_all};
use tokio_postgres::Client;

use crate::Result;
use crate::process::Figures;

/// How many keys and topics the events are spread over.
const KEYS: usize = 1_000;
pub(crate) const TOPICS: usize = 10;

const FILL_BATCH: usize = 5_000;

/// The columns and indexes of the log without its checks, defaults, triggers and leaves.
pub(crate) const BARE_COLUMNS: &str = "(
    position bigint generated always as identity primary key, id uuid not null, topic text not null, key text,
    type text not null, payload json, payload_bytes bytea, content_type text, headers jsonb not null,
    stream_version bigint, deliver_at timestamptz, created_at timestamptz not null
)";

/// The `number`-th event: about 200 bytes of JSON.
pub(crate) fn event(number: usize) -> NewEvent {
    NewEvent::new(format!("orders{}", number % TOPICS), "order.placed")
        .key(format!("order-{}", number % KEYS))
        .json_text(payload(number))
}

pub(crate) fn payload(number: usize) -> String {
    format!(
        r#"{{"order":{number},"customer":"c-{:08}","total":{},"currency":"EUR","note":"an ordinary small event, as they are published by the million every day by shops, banks and railways: some names, some numbers"}}"#,
        number * 7 % 99_999_999,
        number % 10_000,
    )
}

pub(crate) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

pub(crate) async fn migrated(url: &str) -> Result<Client> {
    migrate(&url.parse::<PgConfig>()?).await?;
    connect(url).await
}

/// Publishes `count` events.
pub(crate) async fn fill_more(url: &str, count: usize) -> Result<()> {
    let mut client = connect(url).await?;
    let mut number = 0;
    while number < count {
        let events: Vec<NewEvent> = (number..count.min(number + FILL_BATCH)).map(event).collect();
        let transaction = client.transaction().await?;
        publish_all(&transaction, &events).await?;
        transaction.commit().await?;
        number += events.len();
    }
    Ok(())
}

/// Makes a log with `count` events.
pub(crate) async fn fill(url: &str, count: usize) -> Result<Figures> {
    let client = migrated(url).await?;
    fill_more(url, count).await?;
    client.batch_execute("vacuum analyze pillarbox.event").await?;
    client.batch_execute("checkpoint").await?;
    Ok(Figures::default().with("events", count as f64))
}
