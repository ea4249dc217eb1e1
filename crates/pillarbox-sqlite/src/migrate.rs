use std::path::Path;

use pillarbox::store::{Migration, SchemaState};
use pillarbox::{ErrorKind, Result, Timestamp};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};

use crate::connection::{begin, meta_number};
use crate::error::{Db, DbError};
use crate::home;

const MIGRATIONS: [Migration; 6] = [
    Migration { version: 1, name: "init", sql: include_str!("../migrations/001_init.sql") },
    Migration { version: 2, name: "dead_deliveries", sql: include_str!("../migrations/002_dead_deliveries.sql") },
    Migration { version: 3, name: "aside", sql: include_str!("../migrations/003_aside.sql") },
    Migration { version: 4, name: "limits", sql: include_str!("../migrations/004_limits.sql") },
    Migration { version: 5, name: "definitions", sql: include_str!("../migrations/005_definitions.sql") },
    Migration { version: 6, name: "journal", sql: include_str!("../migrations/006_journal.sql") },
];

/// Between these lines a migration writes into the definition of a table, in the way that SQLite's manual gives.
const REWRITE_BEGIN: &str = "pragma writable_schema = on;\n";
const REWRITE_END: &str = "pragma writable_schema = reset;\n";

/// The schema version that this build is made for.
pub const SCHEMA_VERSION: i64 = MIGRATIONS[MIGRATIONS.len() - 1].version;

/// The step with its record, as it is run and printed.
fn script(step: &Migration) -> String {
    let mut script = format!("{}\n{}\n", step.sql, sql!(schema, "record"));
    if step.is_breaking() {
        script += &format!("{}\n", sql!(schema, "record_breaking"));
    }
    let breaking = if step.is_breaking() { "1" } else { "0" };
    script.replace("@version@", &step.version.to_string()).replace("@name@", step.name).replace("@breaking@", breaking)
}

/// What a script writes into the definition of a table.
struct Rewrite<'a> {
    before: &'a str,
    old: &'a str,
    new: &'a str,
    after: &'a str,
}

impl<'a> Rewrite<'a> {
    fn of(script: &'a str) -> Option<Self> {
        let (before, rest) = script.split_once(REWRITE_BEGIN)?;
        let (rewrite, after) = rest.split_once(REWRITE_END)?;
        let mut quoted = rewrite.split('\'').skip(1).step_by(2);
        Some(Rewrite { before, old: quoted.next()?, new: quoted.next()?, after })
    }
}

/// What [`migrate`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// The file was created.
    pub created: bool,
    /// The steps that were applied, as `1 init`.
    pub applied: Vec<String>,
}

/// Creates the database file if there is none, and creates or upgrades the schema in it. Turns on write-ahead logging,
/// which stays on with the file. Several may run at once.
pub fn migrate(path: impl AsRef<Path>) -> Result<Migrated> {
    let path = path.as_ref();
    let created = !path.exists();
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(DbError::from)?;
    connection.busy_timeout(crate::connection::WRITE_WAIT_MAX).map_err(DbError::from)?;
    home::refuse_network(path)?;
    turn_on_wal(&connection)?;
    let applied = migrate_connection(&connection)?;
    home::move_in(&connection, path)?;
    Ok(Migrated { created, applied })
}

/// Creates or upgrades the schema on an open connection, for example to `:memory:` in a test; the steps applied. Refuses a connection
/// in SQLite's defensive mode if a step changes the definition of a table.
pub fn migrate_connection(connection: &Connection) -> Result<Vec<String>> {
    let tx = begin(connection)?;
    // Looked at under the write lock: another process may have been faster.
    let from = match state_of(&tx)? {
        SchemaState::Missing => 0,
        SchemaState::Old { from, .. } => from,
        state => {
            state.refuse_newer(SCHEMA_VERSION)?;
            return Ok(Vec::new());
        }
    };
    let mut applied = Vec::new();
    for migration in MIGRATIONS.iter().filter(|migration| migration.version > from) {
        let script = script(migration);
        if Rewrite::of(&script).is_some() {
            refuse_defensive(&tx)?;
        }
        tx.execute_batch(&script).map_err(DbError::from)?;
        applied.push(format!("{} {}", migration.version, migration.name));
    }
    tx.commit().map_err(DbError::from)?;
    Ok(applied)
}

/// How the schema at `path` stands; changes nothing and creates nothing.
pub fn check(path: impl AsRef<Path>) -> Result<SchemaState> {
    let path = path.as_ref();
    if !path.exists() {
        return Ok(SchemaState::Missing);
    }
    let connection = crate::connection::open(path, crate::connection::Purpose::Read)?;
    Ok(state_of(&connection)?)
}

/// How the schema of an open database stands.
pub(crate) fn state_of(connection: &Connection) -> Db<SchemaState> {
    if connection.query_row(sql!(schema, "exists"), [], |_| Ok(())).optional()?.is_none() {
        return Ok(SchemaState::Missing);
    }
    let version = meta_number(connection, "schema_version")?;
    let breaking = meta_number(connection, "breaking_version")?;
    Ok(SchemaState::of(version, breaking, SCHEMA_VERSION))
}

/// Refuses a schema that this build cannot work with; warns about one that is newer but compatible.
pub(crate) fn require(connection: &Connection) -> Db<()> {
    Ok(state_of(connection)?.require(SCHEMA_VERSION, "the database has no Pillarbox schema")?)
}

/// Turns on write-ahead logging; the switch is part of the file.
fn turn_on_wal(connection: &Connection) -> Db<()> {
    let mode: String = connection.query_row(sql!(connection, "turn_on_wal"), [], |row| row.get(0))?;
    if mode.eq_ignore_ascii_case("wal") {
        return Ok(());
    }
    Err(DbError::own(
        ErrorKind::Invalid,
        format!("the database stays in journal mode '{mode}'; Pillarbox needs write-ahead logging on a local disk"),
    ))
}

/// SQLite refuses changes of a table's definition there, with an error that does not say so.
fn refuse_defensive(connection: &Connection) -> Db<()> {
    if !connection.db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE)? {
        return Ok(());
    }
    Err(DbError::own(
        ErrorKind::Invalid,
        "the schema cannot be upgraded on a connection in SQLite's defensive mode, which refuses changes of a table's definition; \
         run `pillarbox migrate`, or turn SQLITE_DBCONFIG_DEFENSIVE off for the migration",
    ))
}

/// The SQL that creates the schema of [`migrate`] in an empty database. It runs in the `sqlite3` shell and on other connections in
/// SQLite's defensive mode too: what later steps write into the definition of a table is there from the start.
pub fn print_sql() -> String {
    let mut sql = format!("{};\nbegin immediate;\n", sql!(connection, "turn_on_wal"));
    for migration in &MIGRATIONS {
        let script = script(migration);
        match Rewrite::of(&script) {
            Some(Rewrite { before, old, new, after }) => sql = format!("{}{before}{after}", sql.replace(old, new)),
            None => sql += &script,
        }
    }
    sql + "commit;\n"
}

/// The schema as the database has it, sorted, for comparing with the committed `schema.sql`.
pub fn dump_schema(connection: &Connection) -> Result<String> {
    let dump = || -> Db<String> {
        let mut statement = connection.prepare(sql!(schema, "dump"))?;
        let parts = statement.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()?;
        Ok(parts.iter().map(|part| format!("{part};\n")).collect::<Vec<_>>().join("\n"))
    };
    Ok(dump()?)
}

/// When each step was applied, for `doctor`.
pub(crate) fn applied_at(connection: &Connection) -> Db<Option<Timestamp>> {
    Ok(connection.query_row(sql!(schema, "applied_at"), [], |row| row.get::<_, Option<i64>>(0))?.map(Timestamp))
}
