mod outlet;
#[cfg(feature = "postgres")]
mod postgres;
mod schema;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pillarbox::Error;
use pillarbox::store::Retryability;
use pillarbox_sqlite::SqliteStore;

use crate::exit::{Exit, Stop};
use crate::log::Log;
use crate::secret::scheme_of;

pub(crate) use outlet::Outlet;
#[cfg(feature = "postgres")]
pub(crate) use postgres::Postgres;
pub(crate) use schema::Declaration;

/// Where the log is.
#[derive(Debug, Clone)]
pub(crate) enum Database {
    /// In a file.
    Sqlite(PathBuf),
    /// In a schema of a server's database.
    #[cfg(feature = "postgres")]
    Postgres(Box<Postgres>),
}

/// What to do where no database was given.
pub(crate) const NO_DATABASE: &str = "no database was given; name it by --database URL, by the environment variable DATABASE_URL, \
     or by `database = \"URL\"` in the config file (for example sqlite:app.db or postgres://user@host/database)";

/// How the URLs are written that this build can read.
const WRITE_IT: &str = if cfg!(feature = "postgres") {
    "write sqlite:PATH or postgres://user@host:5432/database"
} else {
    "write sqlite:PATH, for example sqlite:app.db"
};

impl Database {
    /// The database of a command: its flag, else the environment's, else the config file's, which is only then looked at.
    pub(crate) fn locate(flag: Option<&str>, file: impl FnOnce() -> Result<Option<String>>) -> Result<Self> {
        if let Some(url) = flag {
            return Database::parse(url).context("--database");
        }
        for name in [ENVIRONMENT, "DATABASE_URL"] {
            if let Some(url) = std::env::var(name).ok().filter(|value| !value.is_empty()) {
                return Database::parse(&url).context(name);
            }
        }
        match file()? {
            Some(url) => Database::parse(&url).context("database, in the config file"),
            None => Err(Stop::usage(NO_DATABASE)),
        }
    }

    /// The database of a URL. A failure never repeats what was given: it may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            return parse_postgres(url);
        }
        let Some(path) = url.strip_prefix("sqlite:") else {
            let what = match scheme_of(url) {
                Some(scheme) => format!("no database is known by the scheme '{scheme}'"),
                None => "this is not a database URL".to_owned(),
            };
            return Err(Stop::usage(format!("{what}; {WRITE_IT}")));
        };
        // `sqlite://PATH` is what other tools write; an absolute path then has three slashes.
        let (path, authority) = match path.strip_prefix("//") {
            Some(path) => (path, path.split('/').next().unwrap_or_default()),
            None => (path, ""),
        };
        if path.contains('?') || authority.contains('@') {
            return Err(Stop::usage(
                "a SQLite database is a file and has neither a user nor parameters: write sqlite:PATH alone, for example \
                 sqlite:app.db",
            ));
        }
        if path.is_empty() || path == ":memory:" {
            return Err(Stop::usage(
                "a relay and its publishers share a file: write sqlite:PATH, for example sqlite:app.db",
            ));
        }
        Ok(Database::at(path))
    }

    /// The database of a path.
    pub(crate) fn at(path: impl Into<PathBuf>) -> Self {
        Database::Sqlite(path.into())
    }

    /// The URL for people, config files and commands, with its password masked.
    pub(crate) fn url(&self) -> String {
        match self {
            Database::Sqlite(path) => format!("sqlite:{}", path.display()),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => postgres.masked(),
        }
    }

    /// Where it is, for people: no user, no password.
    pub(crate) fn place(&self) -> String {
        match self {
            Database::Sqlite(_) => self.url(),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => postgres.place(),
        }
    }

    /// What makes another process of this program find the database: a variable of its environment, since every user can read
    /// a command line.
    pub(crate) fn environment(&self) -> (&'static str, String) {
        let url = match self {
            Database::Sqlite(_) => self.url(),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => postgres.secret_url().to_owned(),
        };
        (ENVIRONMENT, url)
    }

    /// Opens the log; a schema that is not current says which command makes it so.
    pub(crate) async fn open(&self) -> Result<Log> {
        let opened = match self {
            Database::Sqlite(path) => SqliteStore::open(path).map(|store| Log::Sqlite(Box::new(store))),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => postgres.open().await.map(|store| Log::Postgres(Box::new(store))),
        };
        opened.map_err(|error| self.explain(error))
    }

    /// Opens the log for a look at what is wrong with it: PostgreSQL is not asked yet.
    pub(crate) async fn open_unexamined(&self) -> Result<Log> {
        match self {
            Database::Sqlite(_) => self.open().await,
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => Ok(Log::Postgres(Box::new(postgres.unexamined()))),
        }
    }

    /// Adds to a failure what resolves it.
    pub(crate) fn explain(&self, error: Error) -> anyhow::Error {
        let command = format!("pillarbox migrate --database {}", self.shell_url());
        let error = match self {
            Database::Sqlite(path) if !path.exists() => return missing(path, &command),
            Database::Sqlite(_) => error,
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => postgres.explain(error),
        };
        let text = error.to_string();
        let named = match text.contains("`pillarbox migrate`") {
            true => text.replace("`pillarbox migrate`", &format!("`{command}`")),
            false => text.replace("`pillarbox migrate --adopt`", &format!("`{command} --adopt`")),
        };
        // The text already is the whole sentence of its cause, so that the cause is not said twice.
        if named == text { error.into() } else { Error::new(error.kind(), named).into() }
    }

    /// The URL as a shell reads it.
    fn shell_url(&self) -> String {
        let url = self.url();
        let plain = |c: char| c.is_alphanumeric() || "-_./:@%+,=".contains(c);
        if url.chars().all(plain) { url } else { format!("'{}'", url.replace('\'', r"'\''")) }
    }
}

/// The variable that names the database of Pillarbox alone.
const ENVIRONMENT: &str = "PILLARBOX__DATABASE";

/// Whether the same may go through later: the database could not be reached, or was busy.
pub(crate) fn is_passing(error: &anyhow::Error) -> bool {
    let retryability = error.downcast_ref::<Error>().map(|error| error.kind().retryability());
    matches!(retryability, Some(Retryability::Retry | Retryability::Rejoin))
}

fn missing(path: &Path, command: &str) -> anyhow::Error {
    // A relative path is one thing in one directory and another in the next.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    Stop::with(Exit::Schema, format!("there is no database at {}; create it with `{command}`", path.display()))
}

#[cfg(feature = "postgres")]
fn parse_postgres(url: &str) -> Result<Database> {
    Ok(Database::Postgres(Box::new(Postgres::parse(url)?)))
}

#[cfg(not(feature = "postgres"))]
fn parse_postgres(_url: &str) -> Result<Database> {
    Err(Stop::usage("this build has no PostgreSQL support; build it with the feature `postgres`, or use sqlite:PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_file() {
        for (url, path) in [("sqlite:a.db", "a.db"), ("sqlite:/x/a.db", "/x/a.db"), ("sqlite:///x/a.db", "/x/a.db")] {
            assert!(
                matches!(Database::parse(url).unwrap(), Database::Sqlite(found) if found == Path::new(path)),
                "{url}"
            );
        }
        for url in ["a.db", "sqlite:", "sqlite::memory:", "mysql://h", "postgres:h"] {
            assert!(Database::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_repeated() {
        for url in [
            "canary",
            "u:canary@h/d",
            "mysql://u:canary@h/d",
            "mysql://h/d?password=canary",
            "host=h password=canary",
            "postgres:u:canary@h/d",
            "postgres://u:canary@h:port/d",
            "postgres://u:x?canary=canary@h/d?canary",
            "postgres://u:x?sslmode=canary@h/d",
            "postgres://u:x?schema=canary@h/d",
            "postgres://u@h/d?password=canary&sslmode=none",
            "sqlite://u:canary@h/app.db",
            "sqlite:app.db?key=canary",
        ] {
            // A password with a question mark in it can be read, as libpq does; what is shown of it has none of that.
            let said = match Database::parse(url) {
                Ok(database) => format!("{database:?} {} {}", database.url(), database.place()),
                Err(error) => format!("{error:?}"),
            };
            assert!(!said.contains("canary"), "{url}: {said}");
        }
        assert!(Database::parse("mysql://h").unwrap_err().to_string().contains("'mysql'"));
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_password_is_in_nothing_but_what_a_child_is_given() {
        let database = Database::parse("postgresql://u:canary@h:5433/d?schema=s&application_name=x").unwrap();
        for text in [database.url(), database.place(), format!("{database:?}"), format!("{database:#?}")] {
            assert!(!text.contains("canary"), "{text}");
        }
        assert_eq!(database.place(), "postgres://h:5433/d?schema=s");
        assert!(database.environment().1.contains("canary"));
    }
}
