use std::path::Path;
use std::time::{Duration, Instant};

use pillarbox::ErrorKind;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior, params};

use crate::error::{Db, DbError};

/// How long SQLite itself waits for a lock before the call is tried again.
const LOCK_WAIT: Duration = Duration::from_millis(200);

/// How long a write waits for other writers before it gives up with `Busy`.
pub(crate) const WRITE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Prepared statements kept by each connection.
const STATEMENTS_KEPT_MAX: usize = 64;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Reads only.
    Read,
    /// Writes that must outlive a power cut: operators' changes, ownership, events.
    Durable,
    /// Writes whose loss in a power cut only causes duplicates: settlements, claims and their ends, beats. They survive a
    /// crash of the process all the same, and sparing their fsync halves what a busy relay asks of the disk.
    Relaxed,
}

/// Opens an existing database; never creates one.
pub(crate) fn open(path: &Path, purpose: Purpose) -> Db<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    prepare(&connection, purpose)?;
    #[cfg(feature = "counted")]
    crate::counted::watch(&connection, path);
    Ok(connection)
}

/// Settings of every connection of this crate.
pub(crate) fn prepare(connection: &Connection, purpose: Purpose) -> Db<()> {
    connection.busy_timeout(LOCK_WAIT)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_KEPT_MAX);
    // Without this promise SQLite prepares a statement anew for each value that is bound to its limit: that took half of a
    // poll's time.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    let synchronous = if purpose == Purpose::Relaxed { "normal" } else { "full" };
    connection.pragma_update(None, "synchronous", synchronous)?;
    if purpose == Purpose::Read {
        connection.pragma_update(None, "query_only", true)?;
    }
    Ok(())
}

/// Runs `work` in one immediate transaction: the lock is taken first, so nothing in it can fail for being late.
pub(crate) fn write<T>(connection: &Connection, work: impl FnOnce(&Transaction<'_>) -> Db<T>) -> Db<T> {
    let transaction = begin(connection)?;
    let value = work(&transaction)?;
    transaction.commit()?;
    Ok(value)
}

/// An immediate transaction, waiting for other writers up to [`WRITE_WAIT_MAX`].
pub(crate) fn begin(connection: &Connection) -> Db<Transaction<'_>> {
    let started = Instant::now();
    loop {
        match Transaction::new_unchecked(connection, TransactionBehavior::Immediate).map_err(DbError::from) {
            Err(error) if error.is_busy() && started.elapsed() < WRITE_WAIT_MAX => {}
            Err(error) if error.is_busy() => {
                return Err(DbError::own(
                    ErrorKind::Busy,
                    format!(
                        "another writer has held the database for more than {} s; end its transaction, or try again",
                        WRITE_WAIT_MAX.as_secs()
                    ),
                ));
            }
            other => return other,
        }
    }
}

/// Runs `work` in one read transaction.
pub(crate) fn read<T>(connection: &Connection, work: impl FnOnce(&Transaction<'_>) -> Db<T>) -> Db<T> {
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
    let value = work(&transaction)?;
    transaction.commit()?;
    Ok(value)
}

/// One number of `pillarbox_meta`.
pub(crate) fn meta_number(connection: &Connection, name: &str) -> Db<i64> {
    let mut statement = connection.prepare_cached(sql!(meta, "get"))?;
    Ok(statement.query_row([name], |row| row.get(0))?)
}

/// Sets one value of `pillarbox_meta`.
pub(crate) fn set_meta(connection: &Connection, name: &str, value: impl rusqlite::ToSql) -> Db<()> {
    let mut statement = connection.prepare_cached(sql!(meta, "set"))?;
    statement.execute(params![name, value])?;
    Ok(())
}

/// Tells every doorbell that more than the log has changed; the new number.
pub(crate) fn raise_revision(connection: &Connection) -> Db<i64> {
    raise(connection, "revision")
}

/// Tells the doorbells of those who claim that there is something to claim; the new number.
pub(crate) fn raise_queue_revision(connection: &Connection) -> Db<i64> {
    raise(connection, "queue_revision")
}

fn raise(connection: &Connection, name: &str) -> Db<i64> {
    Ok(connection.prepare_cached(sql!(meta, "raise"))?.query_row([name], |row| row.get(0))?)
}

/// The highest position handed out; a pruned log keeps it.
pub(crate) fn horizon(connection: &Connection) -> Db<i64> {
    let mut statement = connection.prepare_cached(sql!(event, "horizon"))?;
    Ok(statement.query_row([], |row| row.get(0))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_not_prepared_anew_for_every_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("app.db");
        crate::migrate(&path).unwrap();
        let connection = open(&path, Purpose::Read).unwrap();
        let mut scan = connection.prepare(sql!(event, "scan")).unwrap();
        for limit in 1..=10 {
            assert!(!scan.exists([0, i64::MAX, limit]).unwrap());
        }
        assert_eq!(scan.get_status(rusqlite::StatementStatus::RePrepare), 0);
    }
}
