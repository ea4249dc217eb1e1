use std::path::Path;
use std::time::Duration;

use pillarbox::NewEvent;
use rusqlite::Connection;
use uuid::Uuid;

use crate::Result;
use crate::process::Figures;

/// The columns and indexes of the log without its checks, defaults and triggers: what an insert by hand would go into.
pub(crate) const BARE_TABLE: &str = "
    create table bare_event (
        position integer primary key autoincrement, id text not null, topic text not null, key text, type text not null,
        payload any, content_type text, headers text not null, stream_version integer, deliver_at any,
        created_at integer not null
    ) strict;
    create index bare_event_id on bare_event (id);";

/// How many keys the events are spread over.
const KEYS: usize = 1_000;

const FILL_BATCH: usize = 10_000;

/// The `number`-th event: about 100 bytes of JSON.
pub(crate) fn event(number: usize) -> NewEvent {
    NewEvent::new("orders", "order.placed").key(format!("order-{}", number % KEYS)).json_text(format!(
        r#"{{"order":{number},"customer":"c-{:08}","total":{},"currency":"EUR","note":"an ordinary small event"}}"#,
        number * 7 % 99_999_999,
        number % 10_000,
    ))
}

/// The values of a row that is inserted by hand.
pub(crate) struct BareRow {
    pub(crate) id: String,
    pub(crate) event: NewEvent,
    pub(crate) payload: String,
    pub(crate) created_at: i64,
}

pub(crate) fn bare_row(number: usize) -> BareRow {
    let event = event(number);
    let pillarbox::Payload::Json(payload) = &event.payload else { unreachable!("the events are JSON") };
    let payload = payload.to_string();
    let created_at = pillarbox::Timestamp::now().0;
    BareRow { id: Uuid::now_v7().to_string(), event, payload, created_at }
}

pub(crate) fn insert_bare(connection: &Connection, row: &BareRow) -> rusqlite::Result<()> {
    let sql = "insert into bare_event (id, topic, key, type, payload, content_type, headers, deliver_at, created_at) \
               values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
    connection.prepare_cached(sql)?.execute(rusqlite::params![
        row.id,
        row.event.topic,
        row.event.key,
        row.event.r#type,
        row.payload,
        None::<&str>,
        "{}",
        None::<i64>,
        row.created_at,
    ])?;
    Ok(())
}

/// A connection as an application would have it, every commit on disk.
pub(crate) fn connect(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

/// Makes a log with `count` events.
pub(crate) fn fill(path: &Path, count: usize) -> Result<Figures> {
    pillarbox_sqlite::migrate(path)?;
    let mut connection = connect(path)?;
    connection.pragma_update(None, "synchronous", "off")?;
    let mut number = 0;
    while number < count {
        let events: Vec<NewEvent> = (number..count.min(number + FILL_BATCH)).map(event).collect();
        let transaction = connection.transaction()?;
        pillarbox_sqlite::publish_all(&transaction, &events)?;
        transaction.commit()?;
        number += events.len();
    }
    connection.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(()))?;
    Ok(Figures::default().with("events", count as f64))
}
