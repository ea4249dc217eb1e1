use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "postgres")]
use anyhow::Context;
use anyhow::Result;
use rusqlite::Connection;
#[cfg(feature = "postgres")]
use tokio_postgres::{Client, error::SqlState};

use crate::database::Database;
#[cfg(feature = "postgres")]
use crate::database::Postgres;
use crate::exit::Stop;

/// The schema that the demo makes for itself in a PostgreSQL database, and removes again. It touches no other.
#[cfg(feature = "postgres")]
pub(super) const SCHEMA: &str = "pillarbox_demo";

/// How long the demo waits for the writer's turn.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// What the demo stands on: a database or a schema that was not there before it.
pub(super) enum Ground {
    /// A file, in the demo's own directory or where the command line says.
    Sqlite(PathBuf),
    /// A schema, with the connection that made it and removes it.
    #[cfg(feature = "postgres")]
    Postgres(Box<Postgres>, Client),
}

impl Ground {
    /// Makes it, with the log and the application's own table. `DATABASE_URL` is never used: it may be production.
    pub(super) async fn make(named: Option<Database>, directory: &Path) -> Result<Self> {
        let ground = match named {
            None => Ground::Sqlite(directory.join("demo.db")),
            Some(Database::Sqlite(path)) if path.exists() => {
                return Err(Stop::usage(format!(
                    "{} exists already; the demo works on a database of its own: name a new file",
                    path.display()
                )));
            }
            Some(Database::Sqlite(path)) => Ground::Sqlite(path),
            #[cfg(feature = "postgres")]
            Some(Database::Postgres(postgres)) => make_schema(&postgres).await?,
        };
        if let Err(error) = ground.furnish().await {
            ground.remove().await?;
            return Err(error);
        }
        Ok(ground)
    }

    pub(super) fn database(&self) -> Database {
        match self {
            Ground::Sqlite(path) => Database::at(path),
            #[cfg(feature = "postgres")]
            Ground::Postgres(postgres, _) => Database::Postgres(postgres.clone()),
        }
    }

    /// What it is, for people.
    pub(super) fn describe(&self) -> String {
        match self {
            Ground::Sqlite(_) => format!("a new database, {}", self.database().url()),
            #[cfg(feature = "postgres")]
            Ground::Postgres(postgres, _) => {
                format!("a schema of its own, {SCHEMA}, in {}; it goes with the demo", postgres.config().place())
            }
        }
    }

    async fn furnish(&self) -> Result<()> {
        self.database().migrate().await?;
        match self {
            Ground::Sqlite(path) => open(path)?.execute_batch(
                "create table demo_order (id integer primary key, customer text not null, cents integer not null)",
            )?,
            #[cfg(feature = "postgres")]
            Ground::Postgres(_, client) => client
                .batch_execute(&format!(
                    "create table {SCHEMA}.demo_order (id bigint generated always as identity primary key, \
                     customer text not null, cents bigint not null)"
                ))
                .await
                .context("cannot make the application's own table")?,
        }
        Ok(())
    }

    /// How many lanes an instance owns.
    pub(super) async fn lanes_of(&self, instance: i64) -> Result<i64> {
        match self {
            Ground::Sqlite(path) => {
                let sql = "select count(*) from pillarbox_cursor where owner is ?1";
                Ok(open(path)?.query_row(sql, [instance], |row| row.get(0))?)
            }
            #[cfg(feature = "postgres")]
            Ground::Postgres(_, client) => {
                let sql = format!("select count(*) from {SCHEMA}.cursor where owner = $1");
                Ok(client.query_one(&sql, &[&instance]).await?.get(0))
            }
        }
    }

    /// Takes away what the demo made and nothing else. A named file stays: it is what the user asked for.
    pub(super) async fn remove(self) -> Result<()> {
        match self {
            Ground::Sqlite(_) => Ok(()),
            #[cfg(feature = "postgres")]
            Ground::Postgres(postgres, client) => drop_schema(&postgres, client).await,
        }
    }
}

/// Opens the file, for an application.
pub(super) fn open(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

#[cfg(feature = "postgres")]
async fn make_schema(postgres: &Postgres) -> Result<Ground> {
    let postgres = Box::new(postgres.with_schema(SCHEMA)?);
    let client = connect(&postgres).await?;
    // Whoever makes it may remove it: `if not exists` would take over what is somebody else's.
    let made = client.batch_execute(&format!("create schema {SCHEMA}")).await;
    match made.as_ref().map_err(tokio_postgres::Error::code) {
        Err(Some(code)) if *code == SqlState::DUPLICATE_SCHEMA => Err(Stop::usage(format!(
            "the schema {SCHEMA} is in {} already: another demo works there, or one was killed; if none does, remove it \
             with `drop schema {SCHEMA} cascade`",
            postgres.config().place()
        ))),
        _ => {
            made.with_context(|| format!("cannot make the schema {SCHEMA}; the demo needs CREATE on the database"))?;
            Ok(Ground::Postgres(postgres, client))
        }
    }
}

/// A connection of the application's own.
#[cfg(feature = "postgres")]
pub(super) async fn connect(postgres: &Postgres) -> Result<Client> {
    let connected = postgres.config().connect("pillarbox demo").await;
    connected.map_err(|error| Database::Postgres(Box::new(postgres.clone())).explain(error))
}

#[cfg(feature = "postgres")]
async fn drop_schema(postgres: &Postgres, client: Client) -> Result<()> {
    // The demo may have failed because the connection did.
    let client = if client.is_closed() { connect(postgres).await? } else { client };
    let sql = format!("set lock_timeout = '2s'; drop schema {SCHEMA} cascade");
    let mut dropped = client.batch_execute(&sql).await;
    for _ in 1..DROP_TRIES_MAX {
        // The server may not have noticed yet that a killed relay is gone, whose transaction is then in the way.
        let in_the_way = [SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE];
        if !dropped.as_ref().is_err_and(|error| error.code().is_some_and(|code| in_the_way.contains(code))) {
            break;
        }
        tokio::time::sleep(DROP_PAUSE).await;
        dropped = client.batch_execute(&sql).await;
    }
    dropped.with_context(|| format!("cannot remove the schema {SCHEMA}; do it with `drop schema {SCHEMA} cascade`"))
}

/// How often, and how far apart, it is tried to remove the schema.
#[cfg(feature = "postgres")]
const DROP_TRIES_MAX: usize = 10;
#[cfg(feature = "postgres")]
const DROP_PAUSE: std::time::Duration = std::time::Duration::from_millis(200);
