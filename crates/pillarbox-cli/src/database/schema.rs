use anyhow::Result;
use pillarbox::store::SchemaState;

use super::Database;
use crate::exit::Exit;

/// What was done to a schema.
#[derive(Debug)]
pub(crate) struct Schema {
    /// It, or its file, was made.
    pub(crate) created: bool,
    /// The steps that were applied.
    pub(crate) applied: Vec<String>,
}

/// What the user says a restored or copied database is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Declaration {
    /// The log itself.
    Adopt,
    /// A copy.
    Fresh,
}

impl Database {
    /// Creates or upgrades the schema.
    pub(crate) async fn migrate(&self) -> Result<Schema> {
        let migrated = match self {
            Database::Sqlite(path) => pillarbox_sqlite::migrate(path)
                .map(|migrated| Schema { created: migrated.created, applied: migrated.applied }),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => pillarbox_postgres::migrate(postgres.config())
                .await
                .map(|migrated| Schema { created: migrated.created, applied: migrated.applied })
                .map_err(|error| postgres.explain(error)),
        };
        Ok(migrated?)
    }

    /// How the schema stands: a name, a sentence, and what that means to a script.
    pub(crate) async fn check(&self) -> Result<(&'static str, String, Exit)> {
        let state = match self {
            Database::Sqlite(path) => pillarbox_sqlite::check(path),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => pillarbox_postgres::check(postgres.config()).await,
        };
        let state = state.map_err(|error| self.explain(error))?;
        let command = format!("run `pillarbox migrate --database {}`", self.shell_url());
        Ok(match state {
            SchemaState::Current => ("current", "the schema is current".to_owned(), Exit::Done),
            SchemaState::Missing => ("missing", format!("there is no schema; {command}"), Exit::Schema),
            SchemaState::Old { from, to } => {
                ("old", format!("the schema is of version {from}, this build needs {to}; {command}"), Exit::Schema)
            }
            SchemaState::NewerCompatible { .. } => (
                "newer_compatible",
                "the schema is newer than this build and compatible with it".to_owned(),
                Exit::Done,
            ),
            SchemaState::NewerBreaking { .. } => (
                "newer_breaking",
                "the schema is newer than this build can work with; upgrade pillarbox".to_owned(),
                Exit::Schema,
            ),
        })
    }

    /// Declares what a restored or copied database is.
    pub(crate) async fn declare(&self, declaration: Declaration) -> Result<()> {
        let declared = match (self, declaration) {
            (Database::Sqlite(path), Declaration::Adopt) => pillarbox_sqlite::adopt(path),
            (Database::Sqlite(path), Declaration::Fresh) => pillarbox_sqlite::fresh(path),
            #[cfg(feature = "postgres")]
            (Database::Postgres(postgres), Declaration::Adopt) => pillarbox_postgres::adopt(postgres.config()).await,
            #[cfg(feature = "postgres")]
            (Database::Postgres(postgres), Declaration::Fresh) => pillarbox_postgres::fresh(postgres.config()).await,
        };
        declared.map_err(|error| self.explain(error))
    }

    /// Lets publishing ring for a sleeping relay, or not; what there is to say of it.
    pub(crate) async fn set_doorbell(&self, on: bool) -> Result<String> {
        match self {
            Database::Sqlite(_) => Ok(format!(
                "SQLite has no doorbell to turn on or off: a relay notices commits by itself; nothing to turn {}",
                if on { "on" } else { "off" }
            )),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => {
                let set = pillarbox_postgres::set_doorbell(postgres.config(), on).await;
                set.map_err(|error| self.explain(error))?;
                Ok(match on {
                    true => "the doorbell is on: publishing wakes a sleeping relay".to_owned(),
                    false => {
                        "the doorbell is off: a sleeping relay looks by itself, every 500 ms at the longest".to_owned()
                    }
                })
            }
        }
    }

    /// The SQL of the whole schema.
    pub(crate) fn print_sql(&self, doorbell: bool) -> String {
        match self {
            Database::Sqlite(_) => {
                // Nothing rings there, so nothing can be left out.
                let _ = doorbell;
                pillarbox_sqlite::print_sql()
            }
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => pillarbox_postgres::print_sql(postgres.config().schema(), doorbell),
        }
    }

    /// The SQL of the roles and their grants.
    pub(crate) fn print_roles(&self) -> String {
        match self {
            Database::Sqlite(_) => {
                "-- SQLite has no roles: every user who may write the file may publish; grant that by the file's \
                                    permissions\n"
                    .to_owned()
            }
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => pillarbox_postgres::print_roles(postgres.config().schema()),
        }
    }
}
