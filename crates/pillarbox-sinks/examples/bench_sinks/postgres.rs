use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pillarbox::sink::Sink;
use pillarbox::{Event, Payload};
use pillarbox_sinks::{PostgresSink, PostgresSinkConfig};
use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls, Statement};
use uuid::Uuid;

use crate::Result;
use crate::process::Figures;
use crate::throughput::{SOURCE, WORKERS, events, pipelined};

const TABLE: &str = "store";

/// What somebody would write who appends a batch by hand.
const INSERT: &str = "insert into store (id, source, topic, type, key, sequence, time, content_type, data, headers) \
    select id, $1, topic, type, key, sequence, time, 'application/json', data::json, '{}'::jsonb \
    from unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::timestamptz[], $8::text[]) \
        as event (id, topic, type, key, sequence, time, data) \
    on conflict (id) do nothing";

pub(crate) fn sink(url: &str) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(PostgresSink::new(PostgresSinkConfig::new(url, TABLE), SOURCE)?))
}

/// One connection a worker, like the sink.
pub(crate) async fn bare(url: &str, count: usize) -> Result<Figures> {
    let mut connections = Vec::new();
    for _ in 0..WORKERS {
        connections.push(connect(url).await?);
    }
    connections[0].0.batch_execute(&PostgresSinkConfig::schema_sql(TABLE)?).await?;
    for (client, statement) in &mut connections {
        *statement = Some(client.prepare(INSERT).await?);
    }
    let connections = Arc::new(Mutex::new(connections));
    pipelined(events(count).collect(), move |batch| {
        let connections = connections.clone();
        async move {
            let connection = connections.lock().await.pop().ok_or("there are as many connections as workers")?;
            append(&connection, &batch).await?;
            connections.lock().await.push(connection);
            Ok(())
        }
    })
    .await
}

type Connection = (Client, Option<Statement>);

async fn connect(url: &str) -> Result<Connection> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok((client, None))
}

async fn append((client, statement): &Connection, batch: &[Event]) -> Result<()> {
    let statement = statement.as_ref().ok_or("the statement is prepared")?;
    let ids: Vec<Uuid> = batch.iter().map(|event| event.id).collect();
    let topics: Vec<&str> = batch.iter().map(|event| &*event.topic).collect();
    let types: Vec<&str> = batch.iter().map(|event| &*event.r#type).collect();
    let keys: Vec<Option<&str>> = batch.iter().map(|event| event.key.as_deref()).collect();
    let positions: Vec<i64> = batch.iter().map(|event| event.position).collect();
    let time = |event: &Event| SystemTime::UNIX_EPOCH + Duration::from_millis(event.created_at.0 as u64);
    let times: Vec<SystemTime> = batch.iter().map(time).collect();
    let data = |event: &Event| match &event.payload {
        Payload::Json(text) => Some(text.to_string()),
        _ => None,
    };
    let data: Vec<Option<String>> = batch.iter().map(data).collect();
    client.execute(statement, &[&SOURCE, &ids, &topics, &types, &keys, &positions, &times, &data]).await?;
    Ok(())
}
