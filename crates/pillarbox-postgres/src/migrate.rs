use std::sync::Arc;
use std::time::Duration;

use pillarbox::store::{Migration, SchemaState};
use pillarbox::{ErrorKind, Result, Timestamp};
use tokio_postgres::GenericClient;

use crate::connection::{PgConfig, Session, lock_class};
use crate::error::{Db, DbError};
use crate::home;
use crate::types::Time;

/// The oldest server that has what the schema needs, as `server_version_num`.
const SERVER_VERSION_MIN: i32 = 140_000;

/// Added to the first half of the lock keys: the lock under which the schema is changed.
const MIGRATION_LOCK: i32 = 3;

/// How long publishers may wait behind a change of the doorbell, how often it is tried, and how long they are left alone
/// meanwhile.
const DOORBELL_LOCK_MS: u32 = 100;
const DOORBELL_TRIES: u32 = 30;
const DOORBELL_PAUSE: Duration = Duration::from_millis(200);

const MIGRATIONS: [Migration; 11] = [
    Migration { version: 1, name: "init", sql: include_str!("../migrations/001_init.sql") },
    Migration { version: 2, name: "leaves", sql: include_str!("../migrations/002_leaves.sql") },
    Migration { version: 3, name: "dead_deliveries", sql: include_str!("../migrations/003_dead_deliveries.sql") },
    Migration { version: 4, name: "queue_cost", sql: include_str!("../migrations/004_queue_cost.sql") },
    Migration { version: 5, name: "removal", sql: include_str!("../migrations/005_removal.sql") },
    Migration { version: 6, name: "limits", sql: include_str!("../migrations/006_limits.sql") },
    Migration { version: 7, name: "definitions", sql: include_str!("../migrations/007_definitions.sql") },
    Migration { version: 8, name: "doorbell", sql: include_str!("../migrations/008_doorbell.sql") },
    Migration { version: 9, name: "lookups", sql: include_str!("../migrations/009_lookups.sql") },
    Migration { version: 10, name: "row", sql: include_str!("../migrations/010_row.sql") },
    Migration { version: 11, name: "journal", sql: include_str!("../migrations/011_journal.sql") },
];

/// PostgreSQL does not check the text of such a database: it holds bytes that are no characters.
pub(crate) const UNCHECKED_ENCODING: &str = "SQL_ASCII";

/// What to do about such a database.
pub(crate) const CREATE_UTF8: &str =
    "make one with `create database … encoding 'UTF8' template template0`, and move what is in this one by pg_dump";

/// Refuses a new log in a database that does not check text. A log that exists continues: `doctor` reports it.
async fn refuse_encoding(client: &impl GenericClient) -> Db<()> {
    let encoding: String = client.query_one(sql!(schema, "encoding"), &[]).await?.try_get(0)?;
    if encoding != UNCHECKED_ENCODING {
        return Ok(());
    }
    let message = format!("the database has the encoding {encoding}, so that any bytes pass for text; {CREATE_UTF8}");
    Err(DbError::own(ErrorKind::Invalid, message))
}

/// The schema version that this build is made for.
pub const SCHEMA_VERSION: i64 = MIGRATIONS[MIGRATIONS.len() - 1].version;

/// The step with its record, as it is run and printed.
fn script(step: &Migration, schema: &str) -> String {
    let mut record = format!("{}\n", sql!(schema, "record"));
    if step.is_breaking() {
        record += &format!("{}\n", sql!(schema, "record_breaking"));
    }
    let record = record
        .replace("@version@", &step.version.to_string())
        .replace("@name@", step.name)
        .replace("@breaking@", &step.is_breaking().to_string());
    fill_in(&format!("{}\n{record}", step.sql), schema)
}

/// Puts the schema's name and what follows from it in the place of the tokens.
fn fill_in(sql: &str, schema: &str) -> String {
    let class = lock_class(schema).to_string();
    sql.replace("@schema@", schema).replace("@channel@", schema).replace("@class@", &class)
}

/// What [`migrate`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// The schema was created.
    pub created: bool,
    /// The steps that were applied, as `1 init`.
    pub applied: Vec<String>,
    /// Whether publishing rings the doorbell. A new log's does not where the server allows prepared transactions: one that
    /// rang cannot be prepared.
    pub doorbell: bool,
}

/// Creates or upgrades the schema, in one transaction. Several may run at once. Needs no superuser: the owner of the database,
/// or of the schema if that is there already. Creates no roles; see [`print_roles`].
pub async fn migrate(config: &PgConfig) -> Result<Migrated> {
    let mut session = connect(config).await?;
    let schema = config.schema();
    let migrated = migrate_session(&mut session, schema).await?;
    home::move_in(&session).await?;
    Ok(migrated)
}

async fn migrate_session(session: &mut Session, schema: &str) -> Db<Migrated> {
    let tx = session.begin().await?;
    let lock = lock_class(schema) + MIGRATION_LOCK;
    tx.execute(sql!(schema, "lock"), &[&lock]).await?;
    // Looked at under the lock: another process may have been faster.
    let state = state_in(&tx, schema).await?;
    state.refuse_newer(SCHEMA_VERSION)?;
    if state == SchemaState::Missing {
        refuse_encoding(&tx).await?;
    }
    let from = match state {
        SchemaState::Missing => 0,
        SchemaState::Old { from, .. } => from,
        _ => SCHEMA_VERSION,
    };
    if (1..SCHEMA_VERSION).contains(&from) {
        prepare_upgrade(&tx, schema).await?;
    }
    let mut applied = Vec::new();
    for migration in MIGRATIONS.iter().filter(|migration| migration.version > from) {
        let step = format!("{} {}", migration.version, migration.name);
        tracing::info!(step, schema, "changing the schema");
        tx.batch_execute(&script(migration, schema)).await?;
        applied.push(step);
    }
    let created = state == SchemaState::Missing;
    if created && allows_prepared_transactions(&tx).await? {
        tx.batch_execute(&doorbell_sql(schema, false)).await?;
        tracing::warn!(
            "the doorbell is off: max_prepared_transactions is above 0, and a transaction that rang cannot be prepared; \
             relays look for events every 50 to 500 ms instead; if no application prepares transactions that publish, run \
             `pillarbox migrate --doorbell on`"
        );
    }
    let doorbell = has_doorbell(&tx).await?;
    tx.commit().await?;
    Ok(Migrated { created, applied, doorbell })
}

/// What is made belongs to the owner of what is there, also if a member of that role, or a superuser, migrates: functions that run as their
/// owner use it. The log is locked before anything else: a transaction that has published holds that lock already and may ask for others,
/// and what is copied out of the log is to be complete.
async fn prepare_upgrade(tx: &impl GenericClient, schema: &str) -> Db<()> {
    for row in tx.query(sql!(schema, "become_owner"), &[&format!("{schema}.meta")]).await? {
        tx.batch_execute(row.try_get(0)?).await?;
    }
    Ok(tx.batch_execute(&fill_in(sql!(schema, "lock_log"), schema)).await?)
}

/// How the schema stands; changes nothing.
pub async fn check(config: &PgConfig) -> Result<SchemaState> {
    let session = connect(config).await?;
    Ok(state_of(&session).await?)
}

async fn connect(config: &PgConfig) -> Db<Session> {
    let session = Session::connect(&Arc::new(config.clone()), "pillarbox migrate", None).await?;
    let row = session.query_one(sql!(schema, "server_version"), &[]).await?;
    let version: i32 = row.get(0);
    if version < SERVER_VERSION_MIN {
        return Err(DbError::own(
            ErrorKind::Invalid,
            format!("the server is PostgreSQL {}; Pillarbox needs 14 or newer", version / 10_000),
        ));
    }
    Ok(session)
}

/// How the schema of a session stands.
pub(crate) async fn state_of(session: &Session) -> Db<SchemaState> {
    state_in(&**session, session.config().schema()).await
}

/// How the schema of the database stands that a client is connected to.
async fn state_in(client: &impl GenericClient, schema: &str) -> Db<SchemaState> {
    let row = client.query_one(sql!(schema, "privilege"), &[&schema]).await?;
    let (usable, user): (Option<bool>, String) = (row.get("usable"), row.get("role"));
    if usable == Some(false) {
        let grants = "give it its grants, as `pillarbox migrate --print-roles` prints them";
        let message = format!("the role {user} may not use the schema {schema}; {grants}");
        return Err(DbError::own(ErrorKind::Invalid, message));
    }
    let exists = client.query_one(sql!(schema, "exists"), &[&schema]).await?;
    if !exists.get::<_, bool>(0) {
        return Ok(SchemaState::Missing);
    }
    let row = client.query_one(&fill_in(sql!(schema, "versions"), schema), &[]).await?;
    let (version, breaking): (i64, i64) =
        (row.get::<_, i32>("schema_version").into(), row.get::<_, i32>("breaking_version").into());
    Ok(SchemaState::of(version, breaking, SCHEMA_VERSION))
}

/// Refuses a schema that this build cannot work with; warns about one that is newer but compatible.
pub(crate) async fn require(session: &Session) -> Db<()> {
    let schema = session.config().schema();
    let missing = format!("the database has no Pillarbox schema {schema}");
    Ok(state_in(&**session, schema).await?.require(SCHEMA_VERSION, &missing)?)
}

/// The SQL that [`migrate`] runs on a database without the schema, for other tools; needs no connection.
pub fn print_sql(schema: &str, doorbell: bool) -> String {
    let mut sql = String::from("begin;\n");
    MIGRATIONS.iter().for_each(|migration| sql += &script(migration, schema));
    if !doorbell {
        sql += &doorbell_sql(schema, false);
    }
    sql + "commit;\n"
}

/// The SQL that gives roles for publishers, relays and viewers the least that they need; needs no connection.
pub fn print_roles(schema: &str) -> String {
    fill_in(include_str!("sql/roles.sql"), schema)
}

/// Turns the ringing at publishing on or off. Without it a relay looks for events by itself, every 50 ms while some come and every
/// 500 ms at the longest.
pub async fn set_doorbell(config: &PgConfig, on: bool) -> Result<()> {
    let session = connect(config).await?;
    require(&session).await?;
    let row = session.query_one(sql!(meta, "publishing"), &[]).await.map_err(DbError::from)?;
    if (row.get::<_, bool>("doorbell"), row.get::<_, bool>("rings")) == (on, on) {
        return Ok(());
    }
    // Publishers wait behind us while we wait: never for long, but again and again.
    let sql = format!("set lock_timeout = {}; {}", DOORBELL_LOCK_MS, doorbell_sql(config.schema(), on));
    for _ in 1..DOORBELL_TRIES {
        match session.batch_execute(&sql).await.map_err(DbError::from) {
            Err(error) if error.kind() == ErrorKind::Busy => tokio::time::sleep(DOORBELL_PAUSE).await,
            other => return Ok(other?),
        }
    }
    Ok(session.batch_execute(&sql).await.map_err(DbError::from).map_err(|error| match error.kind() {
        ErrorKind::Busy => DbError::own(
            ErrorKind::Busy,
            "the doorbell could not be changed: a transaction that has published is still open; end it (see `pillarbox \
             status`) and try again",
        ),
        _ => error,
    })?)
}

fn doorbell_sql(schema: &str, on: bool) -> String {
    format!("{}\n", fill_in(sql!(doorbell, "set"), schema).replace("@on@", &on.to_string()))
}

/// Whether publishing rings the doorbell. The session's search path must lead to the schema.
async fn has_doorbell(client: &impl GenericClient) -> Db<bool> {
    Ok(client.query_one(sql!(doorbell, "is_on"), &[]).await?.get(0))
}

async fn allows_prepared_transactions(client: &impl GenericClient) -> Db<bool> {
    Ok(client.query_one(sql!(doorbell, "allows_prepared"), &[]).await?.get(0))
}

/// The schema as the database has it, for comparing with the committed `schema.sql`. The leaves are only counted: they look
/// like the log, and there are more of them as it grows.
pub async fn dump_schema(config: &PgConfig) -> Result<String> {
    let session = connect(config).await?;
    let rows = session.query(sql!(schema, "dump"), &[&config.schema()]).await.map_err(DbError::from)?;
    let parts: Vec<String> = rows.iter().map(|row| format!("{}\n", row.get::<_, String>(0).trim_end())).collect();
    Ok(parts.join("\n"))
}

/// When the last step was applied, for `doctor`.
pub(crate) async fn applied_at(client: &impl GenericClient) -> Db<Option<Timestamp>> {
    let row = client.query_one(sql!(schema, "applied_at"), &[]).await?;
    Ok(row.get::<_, Option<Time>>(0).map(|time| time.0))
}
