//! For tests of applications that publish.

use pillarbox::{Event, Result};
use rusqlite::Connection;

use crate::connection::{Purpose, horizon, open};
use crate::error::{Db, DbError};
use crate::reader::Decoder;

/// The events that the open transaction has published and not committed, in order.
///
/// They are those above what a second connection sees in the same file. A `:memory:` database has no second
/// connection: there it is every event.
pub fn published(transaction: &Connection) -> Result<Vec<Event>> {
    Ok(uncommitted(transaction)?)
}

fn uncommitted(transaction: &Connection) -> Db<Vec<Event>> {
    let committed = match transaction.path() {
        Some(path) if !path.is_empty() => horizon(&open(path.as_ref(), Purpose::Read)?)?,
        _ => 0,
    };
    let mut statement = transaction.prepare_cached(sql!(event, "scan")).map_err(DbError::from)?;
    let mut rows = statement.query([committed, i64::MAX, i64::MAX])?;
    let mut decoder = Decoder::default();
    let mut events = Vec::new();
    while let Some(row) = rows.next()? {
        events.push(decoder.event(row)?);
    }
    Ok(events)
}
