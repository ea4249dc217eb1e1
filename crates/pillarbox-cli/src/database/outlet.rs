use std::path::PathBuf;

use anyhow::Result;
use pillarbox::NewEvent;
use pillarbox::admin::Operator;
use pillarbox::journal::{Appended, Expected};
use pillarbox::store::sql::statement;
use rusqlite::{Connection, OpenFlags};
use uuid::Uuid;

use super::Database;
use crate::log::Log;

const SQL: &str = include_str!("outlet.sql");
const LIMIT_ON_SQLITE: &str = statement(SQL, "limit_on_sqlite");
#[cfg(feature = "postgres")]
const LIMIT_ON_POSTGRES: &str = statement(SQL, "limit_on_postgres");

/// Where events are published.
pub(crate) enum Outlet {
    /// An opened log, in this file.
    Log(Log, PathBuf),
    /// A connection, as an application has one, and the schema of the log: a role that may publish and nothing else could not open the log.
    #[cfg(feature = "postgres")]
    Postgres(Box<tokio_postgres::Client>, pillarbox_postgres::Schema),
}

impl Database {
    pub(crate) async fn outlet(&self) -> Result<Outlet> {
        match self {
            Database::Sqlite(path) => Ok(Outlet::Log(self.open().await?, path.clone())),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => {
                let client = postgres.config().connect("pillarbox publish").await;
                let schema = pillarbox_postgres::Schema::new(postgres.config().schema())?;
                let client = Box::new(client.map_err(|error| self.explain(error))?);
                Ok(Outlet::Postgres(client, schema))
            }
        }
    }
}

impl Outlet {
    /// The largest payload that the log takes. Where that cannot be read there is no limit here: the log itself refuses.
    pub(crate) async fn payload_bytes_max(&self) -> usize {
        let limit: Option<i64> = match self {
            Outlet::Log(_, path) => {
                let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
                let connection = Connection::open_with_flags(path, flags).ok();
                connection.and_then(|connection| connection.query_row(LIMIT_ON_SQLITE, [], |row| row.get(0)).ok())
            }
            #[cfg(feature = "postgres")]
            Outlet::Postgres(client, schema) => {
                let sql = LIMIT_ON_POSTGRES.replace("@schema@", &schema.to_string());
                client.query_one(&sql, &[]).await.and_then(|row| row.try_get(0)).ok()
            }
        };
        limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
    }

    /// Publishes events in one transaction; the ids, of the first event where one was a duplicate.
    pub(crate) async fn publish(&mut self, events: &[NewEvent]) -> pillarbox::Result<Vec<Uuid>> {
        match self {
            Outlet::Log(log, _) => log.publish(events).await,
            #[cfg(feature = "postgres")]
            Outlet::Postgres(client, schema) => {
                let transaction = client.transaction().await.map_err(failed)?;
                let ids = schema.publish_all(&transaction, events).await?;
                transaction.commit().await.map_err(failed)?;
                Ok(ids)
            }
        }
    }

    /// Appends events to a stream of the journal in one transaction.
    pub(crate) async fn append(
        &mut self,
        stream: &str,
        expected: Expected,
        events: &[NewEvent],
    ) -> pillarbox::Result<Appended> {
        match self {
            Outlet::Log(log, _) => log.append(stream, expected, events).await,
            #[cfg(feature = "postgres")]
            Outlet::Postgres(client, schema) => {
                let transaction = client.transaction().await.map_err(failed)?;
                let appended = schema.append(&transaction, stream, expected, events).await?;
                transaction.commit().await.map_err(failed)?;
                Ok(appended)
            }
        }
    }
}

#[cfg(feature = "postgres")]
fn failed(error: tokio_postgres::Error) -> pillarbox::Error {
    pillarbox::Error::with_source(pillarbox::ErrorKind::Unavailable, "the events could not be committed", error)
}
