use std::path::Path;

use crate::Result;
use crate::database::migrated;

/// Where a log is: the argument of a measurement that works on both stores.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// At `postgres://…`.
    Postgres(&'a str),
    /// In this file.
    Sqlite(&'a Path),
}

impl<'a> Place<'a> {
    pub(crate) fn of(text: &'a str) -> Place<'a> {
        if text.starts_with("postgres://") { Place::Postgres(text) } else { Place::Sqlite(Path::new(text)) }
    }

    /// Makes the log.
    pub(crate) async fn migrate(self) -> Result<()> {
        match self {
            Place::Postgres(url) => drop(migrated(url).await?),
            Place::Sqlite(path) => drop(pillarbox_sqlite::migrate(path)?),
        }
        Ok(())
    }
}
