use std::os::unix::fs::MetadataExt;

use pillarbox::admin::snapshot::{LaneRow, Snapshot};
use pillarbox::admin::{Check, Level};
use pillarbox::{Error, counted};
use rusqlite::Connection;

use super::maintain::{WAL_BYTES_MAX, checkpoint, wal_bytes};
use crate::SchemaState;
use crate::connection::read;
use crate::error::Db;
use crate::migrate::{SCHEMA_VERSION, applied_at, state_of};
use crate::ownership::check_anchor;
use crate::store::Desk;

/// Checks every prerequisite, each with its fix.
pub(super) fn doctor(desk: &Desk) -> Db<Vec<Check>> {
    // Outside the snapshot: a reader of its own would hold the checkpoint back.
    let mut checks = vec![schema(desk)?, journal_mode(desk)?, file_system(desk), permissions(desk)?, home(desk)];
    checks.push(write_ahead_log(desk)?);
    checks.extend(read(&desk.connection, |tx| {
        let snapshot = super::load_snapshot(tx, &desk.folder)?;
        Ok([
            anchors(tx, &snapshot),
            dead_ranges(tx)?,
            deliveries(tx)?,
            snapshot.check_subscriptions(),
            snapshot.check_instances(),
        ])
    })?);
    checks.push(Check::ok("publishers", "publishers that read before they publish should use BEGIN IMMEDIATE"));
    Ok(checks)
}

fn schema(desk: &Desk) -> Db<Check> {
    let state = state_of(&desk.connection)?;
    let since = match state {
        SchemaState::Current => applied_at(&desk.connection)?,
        _ => None,
    };
    Ok(Check::schema(state, SCHEMA_VERSION, since.map(|at| at.to_string())))
}

fn journal_mode(desk: &Desk) -> Db<Check> {
    let mode: String = desk.connection.query_row(sql!(connection, "journal_mode"), [], |row| row.get(0))?;
    Ok(match mode.eq_ignore_ascii_case("wal") {
        true => Check::ok("journal mode", "write-ahead logging"),
        false => Check::bad(
            "journal mode",
            Level::Failed,
            format!("'{mode}': every read blocks every publisher"),
            "run `pillarbox migrate`, which turns on write-ahead logging",
        ),
    })
}

fn file_system(desk: &Desk) -> Check {
    match crate::home::network_file_system(&desk.path) {
        None => Check::ok("file system", "local"),
        Some(kind) => Check::bad(
            "file system",
            Level::Failed,
            format!("{kind} is a network file system"),
            "move the file to a local disk",
        ),
    }
}

/// The file, its folder and the folder of locks must be writable for this process.
fn permissions(desk: &Desk) -> Db<Check> {
    let name = "permissions";
    if desk.connection.is_readonly("main")? {
        return Ok(Check::bad(name, Level::Failed, "the file is read-only", "give this process write access to it"));
    }
    let mode = std::fs::metadata(&desk.path).map_or(0, |metadata| metadata.mode());
    let fix = "run `chmod o-rwx` on it, and let its processes create files with umask 027";
    Ok(match mode & 0o006 {
        0 => Check::ok(name, format!("readable and writable, mode {:o}", mode & 0o777)),
        0o004 => Check::bad(name, Level::Warning, "every user of this host can read the file, payloads included", fix),
        _ => Check::bad(name, Level::Warning, "every user of this host can write the file", fix),
    })
}

fn home(desk: &Desk) -> Check {
    Check::home(crate::home::check(&desk.connection, &desk.path).map_err(Error::from))
}

/// A long reader keeps the write-ahead log from being written back, and it grows.
fn write_ahead_log(desk: &Desk) -> Db<Check> {
    let name = "write-ahead log";
    let held = checkpoint(desk, sql!(connection, "checkpoint"))?.unwrap_or(0);
    let size = wal_bytes(&desk.path);
    let finding = format!("{} KiB, {} held back by a reader", size / 1024, counted(held, "page"));
    Ok(match (held, size) {
        (0, _) => Check::ok(name, finding),
        (_, size) => Check::bad(
            name,
            if size > WAL_BYTES_MAX { Level::Failed } else { Level::Warning },
            finding,
            "find the transaction that has been reading for long (an open cursor, a backup, a shell) and end it",
        ),
    })
}

fn anchors(tx: &Connection, snapshot: &Snapshot) -> Check {
    let check = |lane: &LaneRow| check_anchor(tx, lane.cursor.anchor, snapshot.pruned_to);
    Check::anchors(snapshot.lanes().try_for_each(check).map_err(Error::from))
}

fn dead_ranges(tx: &Connection) -> Db<Check> {
    Ok(Check::dead_ranges(tx.query_row(sql!(diagnosis, "events_in_dead_ranges"), [], |row| row.get(0))?))
}

fn deliveries(tx: &Connection) -> Db<Check> {
    Ok(Check::deliveries(tx.query_row(sql!(diagnosis, "deliveries_without_event"), [], |row| row.get(0))?))
}
