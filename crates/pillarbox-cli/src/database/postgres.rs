use std::error::Error as _;
use std::fmt;

use anyhow::Result;
use pillarbox::{Error, ErrorKind};
use pillarbox_postgres::{PgConfig, PostgresStore};
use tokio_postgres::error::SqlState;

use crate::exit::Stop;
use crate::secret::masked_database;

/// The schema of a log unless the URL names another.
const SCHEMA: &str = "pillarbox";

/// A PostgreSQL database with the schema that the log is in.
#[derive(Clone)]
pub(crate) struct Postgres {
    /// As it was given, with its password; never printed.
    url: String,
    config: PgConfig,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Postgres").field(&self.place()).finish()
    }
}

impl Postgres {
    /// Reads a URL. A failure says what is wrong with it, unless that could be a part of a password.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Stop::usage(format!(
                "the database URL cannot be read{why}; write it like postgres://user@host:5432/database"
            ))
        };
        let Some((_, rest)) = url.split_once("://") else { return Err(refuse("")) };
        let config = url.parse::<PgConfig>().map_err(|error| {
            // With an `@` behind the `?`, the question mark belongs to a password that should have been escaped.
            let ambiguous = rest.split_once('?').is_some_and(|(_, query)| query.contains('@'));
            match ambiguous {
                true => refuse(" (write the characters : / ? # @ % of a user or password as %3A %2F %3F %23 %40 %25)"),
                false => Stop::usage(error.to_string()),
            }
        })?;
        Ok(Postgres { url: url.to_owned(), config })
    }

    /// The same database, with the log in another schema.
    pub(crate) fn with_schema(&self, schema: &str) -> Result<Self> {
        let (base, query) = self.url.split_once('?').unwrap_or((&self.url, ""));
        let others = query.split('&').filter(|parameter| !parameter.is_empty() && !parameter.starts_with("schema="));
        let query: Vec<String> = others.map(str::to_owned).chain([format!("schema={schema}")]).collect();
        Postgres::parse(&format!("{base}?{}", query.join("&")))
    }

    /// How to get there.
    pub(crate) fn config(&self) -> &PgConfig {
        &self.config
    }

    /// The URL with its password masked.
    pub(super) fn masked(&self) -> String {
        masked_database(&self.url)
    }

    /// The URL as it was given.
    pub(super) fn secret_url(&self) -> &str {
        &self.url
    }

    /// Server, database, and schema if it is not the usual one.
    pub(super) fn place(&self) -> String {
        match self.config.schema() {
            SCHEMA => self.config.place(),
            schema => format!("{}?schema={schema}", self.config.place()),
        }
    }

    pub(super) async fn open(&self) -> pillarbox::Result<PostgresStore> {
        PostgresStore::open_with(self.config.clone()).await
    }

    pub(super) fn unexamined(&self) -> PostgresStore {
        PostgresStore::unexamined(self.config.clone())
    }

    /// What PostgreSQL said, with what to do about it.
    pub(super) fn explain(&self, error: Error) -> Error {
        let (kind, place) = (error.kind(), self.place());
        let said = error.to_string();
        let advice = match code_of(&error) {
            Some(SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION) => {
                "check the user and the password of the URL, and what the server's pg_hba.conf allows that user"
            }
            Some(SqlState::UNDEFINED_DATABASE) => "create that database (`createdb NAME`), or name another in the URL",
            Some(SqlState::TOO_MANY_CONNECTIONS) => {
                "a relay needs up to 6 connections; raise max_connections, or end what holds the others"
            }
            Some(SqlState::CANNOT_CONNECT_NOW) => "the server is starting or stopping; try again",
            None if kind == ErrorKind::Unavailable => {
                "check that the server runs and listens there, and the host, port and sslmode of the URL"
            }
            _ => return error,
        };
        Error::new(kind, format!("{place}: {said}; {advice}"))
    }
}

/// PostgreSQL's code of a failure, if it was PostgreSQL that refused.
fn code_of(error: &Error) -> Option<SqlState> {
    let source = error.source()?.downcast_ref::<tokio_postgres::Error>()?;
    source.code().cloned()
}
