//! Counts what SQLite does for the stores of one database, for tests of what operations cost.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use rusqlite::trace::{TraceEvent, TraceEventCodes};
use rusqlite::{Connection, StatementStatus};

use crate::doorbell::DOORBELL_THREAD;

/// A tracer knows nothing but the statement, so that there is one count in a process.
static COUNT: Mutex<Option<Count>> = Mutex::new(None);

struct Count {
    database: PathBuf,
    statements: HashMap<String, Counted>,
}

/// What one statement did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// How often it ran.
    pub runs: u64,
    /// Steps of the virtual machine.
    pub steps: i64,
}

/// Counts what is done over connections that are opened to this database from now on, and nothing of any other. What the doorbell does
/// is not counted: how often it looks is a matter of time.
pub fn count(database: &Path) {
    *lock() = Some(Count { database: absolute(database), statements: HashMap::new() });
}

/// What was counted since the last time, by statement.
pub fn take() -> HashMap<String, Counted> {
    lock().as_mut().map(|count| std::mem::take(&mut count.statements)).unwrap_or_default()
}

pub(crate) fn watch(connection: &Connection, database: &Path) {
    let database = absolute(database);
    if lock().as_ref().is_some_and(|count| count.database == database) {
        let events = TraceEventCodes::SQLITE_TRACE_STMT | TraceEventCodes::SQLITE_TRACE_PROFILE;
        connection.trace_v2(events, Some(trace));
    }
}

/// A statement has one number of steps for all its runs: what it was before a run is taken away, what it is after it is added.
fn trace(event: TraceEvent<'_>) {
    if std::thread::current().name() == Some(DOORBELL_THREAD) {
        return;
    }
    match event {
        // A trigger that begins has another text.
        TraceEvent::Stmt(statement, text) if statement.sql() == text => {
            add(&statement.sql(), 1, -i64::from(statement.get_status(StatementStatus::VmStep)));
        }
        TraceEvent::Profile(statement, _) => {
            add(&statement.sql(), 0, statement.get_status(StatementStatus::VmStep).into());
        }
        _ => {}
    }
}

fn add(sql: &str, runs: u64, steps: i64) {
    if let Some(count) = lock().as_mut() {
        let counted = count.statements.entry(sql.to_owned()).or_default();
        counted.runs += runs;
        counted.steps += steps;
    }
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn lock() -> MutexGuard<'static, Option<Count>> {
    COUNT.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
