use std::path::Path;

use pillarbox::Result;

use crate::error::Db;
use crate::store::{Desk, SqliteStore};

/// Above this the write-ahead log is cut back, and `status` warns if it cannot be.
pub const WAL_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What [`SqliteStore::maintain`] found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maintained {
    /// The size of the write-ahead log afterwards.
    pub wal_bytes: u64,
    /// It was cut back to nothing.
    pub truncated: bool,
    /// A transaction that has been reading for long keeps this many pages from being written back.
    pub pages_held: u64,
}

impl Maintained {
    /// Whether a long reader lets the write-ahead log grow; worth a warning.
    pub fn is_starved(&self) -> bool {
        self.pages_held > 0 && self.wal_bytes > WAL_BYTES_MAX
    }
}

impl SqliteStore {
    /// Writes the write-ahead log back into the database, without waiting for others or making them wait, and cuts it back when it
    /// has grown beyond [`WAL_BYTES_MAX`]. Every relay does so with its retention.
    pub async fn maintain(&self) -> Result<Maintained> {
        let maintained = self.operate(maintain).await?;
        if maintained.is_starved() {
            tracing::warn!(
                wal_bytes = maintained.wal_bytes,
                pages_held = maintained.pages_held,
                "a long reading transaction keeps the write-ahead log from being written back; end it"
            );
        }
        Ok(maintained)
    }
}

fn maintain(desk: &Desk) -> Db<Maintained> {
    let pages_held = checkpoint(desk, sql!(connection, "checkpoint"))?.unwrap_or(0);
    let mut truncated = false;
    // With pages held it could not succeed, and would only make writers wait.
    if pages_held == 0 && wal_bytes(&desk.path) > WAL_BYTES_MAX {
        truncated = checkpoint(desk, sql!(connection, "checkpoint_and_truncate"))?.is_some();
    }
    Ok(Maintained { wal_bytes: wal_bytes(&desk.path), truncated, pages_held })
}

/// How many pages could not be written back; None if another connection was in the way.
pub(super) fn checkpoint(desk: &Desk, sql: &str) -> Db<Option<u64>> {
    let row = |row: &rusqlite::Row<'_>| Ok((row.get("busy")?, row.get("log")?, row.get("checkpointed")?));
    let (busy, pages, done): (bool, i64, i64) = desk.connection.query_row(sql, [], row)?;
    Ok((!busy).then(|| pages.saturating_sub(done).max(0) as u64))
}

/// The size of the write-ahead log.
pub(super) fn wal_bytes(path: &Path) -> u64 {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    std::fs::metadata(wal).map_or(0, |metadata| metadata.len())
}
