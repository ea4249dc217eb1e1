use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pillarbox::Error;
use pillarbox_sqlite::SqliteStore;

use crate::exit::{Exit, Stop};
use crate::secret::scheme_of;

/// Where the log is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Database {
    path: PathBuf,
}

const THREE_WAYS: &str = "no database was given; name it by --database URL, by the environment variable DATABASE_URL, \
     or by `database = \"URL\"` in the config file (for example sqlite:app.db)";

impl Database {
    /// The database of a command: its flag, else the environment's, else the config file's, which is only then looked at.
    pub(crate) fn locate(flag: Option<&str>, file: impl FnOnce() -> Result<Option<String>>) -> Result<Self> {
        if let Some(url) = flag {
            return Database::parse(url).context("--database");
        }
        if let Some(url) = environment("PILLARBOX__DATABASE") {
            return Database::parse(&url).context("PILLARBOX__DATABASE");
        }
        if let Some(url) = environment("DATABASE_URL") {
            return Database::parse(&url).context("DATABASE_URL");
        }
        match file()? {
            Some(url) => Database::parse(&url).context("database, in the config file"),
            None => Err(Stop::usage(THREE_WAYS)),
        }
    }

    /// The database of a URL. A failure never repeats what was given: it may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            return Err(Stop::usage("this build has no PostgreSQL support yet; use sqlite:PATH"));
        }
        let Some(path) = url.strip_prefix("sqlite:") else {
            let what = match scheme_of(url) {
                Some(scheme) => format!("no database is known by the scheme '{scheme}'"),
                None => "this is not a database URL".to_owned(),
            };
            return Err(Stop::usage(format!("{what}; write sqlite:PATH, for example sqlite:app.db")));
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
        Ok(Database { path: path.into() })
    }

    /// The database of a path.
    pub(crate) fn at(path: impl Into<PathBuf>) -> Self {
        Database { path: path.into() }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The URL, for people and commands.
    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path.display())
    }

    /// Opens the log; a schema that is not current says which command makes it so.
    pub(crate) fn open(&self) -> Result<SqliteStore> {
        SqliteStore::open(&self.path).map_err(|error| self.explain(error))
    }

    /// Adds to a failure what resolves it.
    pub(crate) fn explain(&self, error: Error) -> anyhow::Error {
        let command = format!("pillarbox migrate --database {}", self.url());
        if !self.path.exists() {
            return Stop::with(
                Exit::Schema,
                format!("there is no database at {}; create it with `{command}`", self.path.display()),
            );
        }
        let text = error.to_string();
        let named = match text.contains("`pillarbox migrate`") {
            true => text.replace("`pillarbox migrate`", &format!("`{command}`")),
            false => text.replace("`pillarbox migrate --adopt`", &format!("`{command} --adopt`")),
        };
        // The text already is the whole sentence of its cause, so that the cause is not said twice.
        if named == text { error.into() } else { Error::new(error.kind(), named).into() }
    }
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_file() {
        for (url, path) in [("sqlite:a.db", "a.db"), ("sqlite:/x/a.db", "/x/a.db"), ("sqlite:///x/a.db", "/x/a.db")] {
            assert_eq!(Database::parse(url).unwrap().path(), Path::new(path), "{url}");
        }
        for url in ["a.db", "sqlite:", "sqlite::memory:", "postgres://u:p@h/d", "mysql://h"] {
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
            "postgres://u:canary@h/d",
            "sqlite://u:canary@h/app.db",
            "sqlite:app.db?key=canary",
        ] {
            let error = format!("{:?}", Database::parse(url).unwrap_err());
            assert!(!error.contains("canary"), "{url}: {error}");
        }
        assert!(Database::parse("mysql://h").unwrap_err().to_string().contains("'mysql'"));
    }
}
