use std::os::unix::fs::MetadataExt;

use pillarbox::admin::world::{SubscriptionRow, World};
use pillarbox::admin::{Check, Level};
use pillarbox::counted;
use rusqlite::Connection;

use super::maintain::{WAL_BYTES_MAX, checkpoint, wal_bytes};
use crate::SchemaState;
use crate::connection::read;
use crate::error::{Db, DbError};
use crate::migrate::{SCHEMA_VERSION, state_of};
use crate::ownership::check_anchor;
use crate::store::Desk;

/// Checks every prerequisite, each with its fix.
pub(super) fn doctor(desk: &Desk) -> Db<Vec<Check>> {
    // Outside the snapshot: a reader of its own would hold the checkpoint back.
    let mut checks = vec![schema(desk)?, journal_mode(desk)?, file_system(desk), permissions(desk)?, home(desk)];
    checks.push(write_ahead_log(desk)?);
    checks.extend(read(&desk.connection, |tx| {
        let world = super::load_world(tx, &desk.folder)?;
        Ok([anchors(tx, &world), dead_ranges(tx)?, deliveries(tx)?, orphans(&world), world.check_instances()])
    })?);
    checks.push(ok("publishers", "publishers that read before they publish should use BEGIN IMMEDIATE".into()));
    Ok(checks)
}

fn ok(name: &str, finding: String) -> Check {
    Check { name: name.into(), level: Level::Ok, finding, fix: None }
}

fn bad(name: &str, level: Level, finding: String, fix: &str) -> Check {
    Check { name: name.into(), level, finding, fix: Some(fix.into()) }
}

fn schema(desk: &Desk) -> Db<Check> {
    let name = "schema";
    Ok(match state_of(&desk.connection)? {
        SchemaState::Current => {
            let when = crate::migrate::applied_at(&desk.connection)?;
            let when = when.map_or(String::new(), |at| format!(", since {at}"));
            ok(name, format!("version {SCHEMA_VERSION}{when}"))
        }
        SchemaState::NewerCompatible { version } => {
            let finding = format!("version {version} is newer than this build's {SCHEMA_VERSION}, but compatible");
            bad(name, Level::Warning, finding, "upgrade pillarbox")
        }
        SchemaState::NewerBreaking { version } => {
            let finding = format!("version {version} is newer than this build's {SCHEMA_VERSION}");
            bad(name, Level::Failed, finding, "upgrade pillarbox")
        }
        SchemaState::Missing | SchemaState::Old { .. } => {
            bad(name, Level::Failed, "the schema is not current".into(), "run `pillarbox migrate`")
        }
    })
}

fn journal_mode(desk: &Desk) -> Db<Check> {
    let mode: String = desk.connection.query_row("pragma journal_mode", [], |row| row.get(0))?;
    Ok(match mode.eq_ignore_ascii_case("wal") {
        true => ok("journal mode", "write-ahead logging".into()),
        false => bad(
            "journal mode",
            Level::Failed,
            format!("'{mode}': every read blocks every publisher"),
            "run `pillarbox migrate`, which turns on write-ahead logging",
        ),
    })
}

fn file_system(desk: &Desk) -> Check {
    match crate::home::network_file_system(&desk.path) {
        None => ok("file system", "local".into()),
        Some(kind) => bad(
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
        return Ok(bad(name, Level::Failed, "the file is read-only".into(), "give this process write access to it"));
    }
    let mode = std::fs::metadata(&desk.path).map_or(0, |metadata| metadata.mode());
    let fix = "run `chmod o-rwx` on it, and let its processes create files with umask 027";
    Ok(match mode & 0o006 {
        0 => ok(name, format!("readable and writable, mode {:o}", mode & 0o777)),
        0o004 => bad(name, Level::Warning, "anybody on this host can read the file, payloads included".into(), fix),
        _ => bad(name, Level::Warning, "anybody on this host can write the file".into(), fix),
    })
}

fn home(desk: &Desk) -> Check {
    match crate::home::check(&desk.connection, &desk.path) {
        Ok(()) => ok("home", "the log is where it belongs".into()),
        Err(error) => bad("home", Level::Failed, text(error), "run `pillarbox migrate --adopt` or `--fresh`"),
    }
}

fn text(error: DbError) -> String {
    pillarbox::Error::from(error).to_string()
}

/// A long reader keeps the write-ahead log from being written back, and it grows.
fn write_ahead_log(desk: &Desk) -> Db<Check> {
    let name = "write-ahead log";
    let held = checkpoint(desk, "pragma wal_checkpoint(passive)")?.unwrap_or(0);
    let size = wal_bytes(&desk.path);
    let finding = format!("{} KiB, {} held back by a reader", size / 1024, counted(held, "page"));
    Ok(match (held, size) {
        (0, _) => ok(name, finding),
        (_, size) => bad(
            name,
            if size > WAL_BYTES_MAX { Level::Failed } else { Level::Warning },
            finding,
            "find the transaction that has been reading for long (an open cursor, a backup, a shell) and end it",
        ),
    })
}

fn anchors(tx: &Connection, world: &World) -> Check {
    let lanes = world.subscriptions.iter().flat_map(|subscription| &subscription.lanes);
    let broken = lanes.filter_map(|lane| check_anchor(tx, lane.cursor.anchor, world.pruned_to).err()).next();
    match broken {
        None => ok("anchors", "the last event that each lane has settled is still at its position".into()),
        Some(error) => bad("anchors", Level::Failed, text(error), "run `pillarbox migrate --adopt` or `--fresh`"),
    }
}

/// A row inside a range that was closed as dead is one that no subscription will read.
fn dead_ranges(tx: &Connection) -> Db<Check> {
    let sql = "select count(*) from pillarbox_dead_range as d join pillarbox_event as e on e.position between d.low and d.high";
    let count: i64 = tx.query_row(sql, [], |row| row.get(0))?;
    Ok(match count {
        0 => ok("dead ranges", "no event has appeared at a position that was proven empty".into()),
        _ => bad(
            "dead ranges",
            Level::Failed,
            format!("{} appeared at positions that had been closed", counted(count, "event")),
            "let no publisher set the position; deliver them with `pillarbox rewind`",
        ),
    })
}

fn deliveries(tx: &Connection) -> Db<Check> {
    let count: i64 = tx.query_row(include_str!("../sql/deliveries_without_event.sql"), [], |row| row.get(0))?;
    Ok(match count {
        0 => ok("deliveries", "each has its event".into()),
        _ => bad(
            "deliveries",
            Level::Failed,
            format!("{} without an event: somebody deleted rows of the log by hand", counted(count, "delivery")),
            "give them up with `pillarbox skip`, and let only `pillarbox prune` remove events",
        ),
    })
}

fn orphans(world: &World) -> Check {
    let orphaned = |subscription: &&SubscriptionRow| !world.is_run(subscription.id);
    let names: Vec<_> =
        world.subscriptions.iter().filter(orphaned).map(|orphan| format!("'{}'", orphan.name)).collect();
    match names.is_empty() {
        true => ok("subscriptions", "each is run by a living instance".into()),
        false => bad(
            "subscriptions",
            Level::Warning,
            format!(
                "no living instance runs {}; the log keeps every event that was not delivered there",
                names.join(", ")
            ),
            "start a relay whose config names each, or run `pillarbox subscription delete NAME`",
        ),
    }
}
