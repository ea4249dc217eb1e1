use pillarbox::NewEvent;
use pillarbox_postgres::{PgConfig, migrate, publish_all};
use tokio_postgres::Client;

use crate::Result;
use crate::process::Figures;

/// How many keys and topics the events are spread over.
pub(crate) const KEYS: usize = 1_000;
pub(crate) const TOPICS: usize = 10;

const FILL_BATCH: usize = 5_000;

/// The columns and the primary key of the log without its check, its bell, its other indexes and its leaves.
pub(crate) const BARE_COLUMNS: &str = "(
    position bigint generated always as identity primary key, id uuid, topic text not null, key text,
    type text not null, payload json, payload_bytes bytea, content_type text, headers jsonb,
    stream_version bigint, deliver_at timestamptz, created_at timestamptz not null default now()
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

/// How many bytes the server has written to its WAL so far.
pub(crate) async fn wal_bytes(client: &Client) -> Result<f64> {
    let sql = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::float8";
    Ok(client.query_one(sql, &[]).await?.get(0))
}

/// The statement for how many events the slowest lane still has before it.
pub(crate) const BACKLOG: &str = "select s.last_value - min(c.floor) \
     from pillarbox.event_position_seq as s, pillarbox.cursor as c group by s.last_value";

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
