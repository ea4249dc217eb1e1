use std::ops::{Bound, RangeBounds};

use pillarbox::journal::{Append, Appended, Expected, StreamHead};
use pillarbox::{Event, NewEvent, Result};
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::doorbell::expect_commit;
use crate::error::Db;
use crate::publish::insert;
use crate::reader::Decoder;

/// Appends events to a stream of the journal in the caller's own transaction: they are there, and delivered, if and only if that commits.
///
/// The name of the stream becomes the key of its events, and their versions are dense: 1, 2, 3 and so on. A stream that is not at the
/// expected version is [`ErrorKind::Conflict`](pillarbox::ErrorKind::Conflict), and nothing is written; the transaction may go on. All
/// events of a stream have one topic. Journal events are never pruned.
///
/// A transaction that reads before it appends should be `BEGIN IMMEDIATE`: SQLite fails a deferred one at once, without waiting, if
/// another connection has written since its first read.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("app.db");
/// # pillarbox_sqlite::migrate(&path)?;
/// # let mut connection = rusqlite::Connection::open(&path)?;
/// use pillarbox::NewEvent;
/// use pillarbox::journal::Expected;
/// use rusqlite::TransactionBehavior;
///
/// let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
/// let past = pillarbox_sqlite::read(&transaction, "campaign-7", 1..)?;
/// let rolled = NewEvent::new("campaigns", "dice.rolled").json_text(r#"{"sum": 9}"#);
/// let appended =
///     pillarbox_sqlite::append(&transaction, "campaign-7", Expected::Version(past.len() as i64), &[rolled])?;
/// pillarbox_sqlite::commit(transaction)?;
/// assert_eq!(appended.version, 1);
/// # Ok(())
/// # }
/// ```
pub fn append(
    transaction: &Connection,
    stream: &str,
    expected: impl Into<Expected>,
    events: &[NewEvent],
) -> Result<Appended> {
    let append = Append::new(stream, expected.into(), events)?;
    let before = append.check(find(transaction, stream)?.as_ref())?;
    let appended = append.appended(before);
    write(transaction, &append, appended)?;
    Ok(appended)
}

fn write(transaction: &Connection, append: &Append<'_>, appended: Appended) -> Db<()> {
    let mut made = None;
    for (version, event) in (appended.first..).zip(append.events) {
        made = insert(transaction, event, Some((append.stream, version)))?.made;
    }
    let mut statement = transaction.prepare_cached(sql!(journal, "raise"))?;
    statement.execute(params![append.stream, append.topic, appended.version])?;
    expect_commit(transaction, made);
    Ok(())
}

/// The events of a stream whose versions are in a range, in order: `1..` for all.
pub fn read(connection: &Connection, stream: &str, versions: impl RangeBounds<i64>) -> Result<Vec<Event>> {
    let from = match versions.start_bound() {
        Bound::Included(from) => *from,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 1,
    };
    let to = match versions.end_bound() {
        Bound::Included(to) => *to,
        Bound::Excluded(end) => end.saturating_sub(1),
        Bound::Unbounded => i64::MAX,
    };
    Ok(select(connection, stream, from, to, i64::MAX)?)
}

/// The version of a stream: how many events it has.
pub fn head(connection: &Connection, stream: &str) -> Result<i64> {
    Ok(find(connection, stream)?.map_or(0, |head| head.version))
}

fn find(connection: &Connection, stream: &str) -> Db<Option<StreamHead>> {
    let mut statement = connection.prepare_cached(sql!(journal, "head"))?;
    Ok(statement.query_row([stream], stream_head).optional()?)
}

fn stream_head(row: &Row<'_>) -> rusqlite::Result<StreamHead> {
    Ok(StreamHead { stream: row.get("name")?, topic: row.get("topic")?, version: row.get("version")? })
}

pub(crate) fn select(connection: &Connection, stream: &str, from: i64, to: i64, limit: i64) -> Db<Vec<Event>> {
    let mut statement = connection.prepare_cached(sql!(journal, "read"))?;
    let mut rows = statement.query(params![stream, from, to, limit])?;
    let (mut decoder, mut events) = (Decoder::default(), Vec::new());
    while let Some(row) = rows.next()? {
        events.push(decoder.event(row)?);
    }
    Ok(events)
}

pub(crate) fn streams(connection: &Connection, prefix: &str, after: &str, limit: i64) -> Db<Vec<StreamHead>> {
    let mut statement = connection.prepare_cached(sql!(journal, "streams"))?;
    Ok(statement.query_map(params![prefix, after, limit], stream_head)?.collect::<rusqlite::Result<_>>()?)
}
