use crate::{Error, ErrorKind, Result};

/// One step of the schema. Steps are only ever added.
#[derive(Debug)]
pub struct Migration {
    /// What the schema is at afterwards.
    pub version: i64,
    /// What it is about.
    pub name: &'static str,
    /// Its statements.
    pub sql: &'static str,
}

impl Migration {
    /// Whether older versions of Pillarbox cannot work with what it changes; the first line says so.
    pub fn is_breaking(&self) -> bool {
        self.sql.starts_with("-- breaking: yes")
    }
}

/// How a database's schema stands to this build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaState {
    /// There is no schema, or no database.
    Missing,
    /// It needs to be migrated.
    Old {
        /// What it is at.
        from: i64,
        /// What this build is made for.
        to: i64,
    },
    /// It is the one that this build is made for.
    Current,
    /// It is newer, in ways that this build can work with.
    NewerCompatible {
        /// What it is at.
        version: i64,
    },
    /// It is newer, in ways that this build cannot work with.
    NewerBreaking {
        /// What it is at.
        version: i64,
    },
}

impl SchemaState {
    /// The state of a schema at `version` with which no build for less than `breaking` can work.
    pub fn of(version: i64, breaking: i64, made_for: i64) -> Self {
        match version {
            from if from < made_for => SchemaState::Old { from, to: made_for },
            version if version == made_for => SchemaState::Current,
            version if breaking > made_for => SchemaState::NewerBreaking { version },
            version => SchemaState::NewerCompatible { version },
        }
    }

    /// Refuses one that this build cannot work with; warns about one that is newer but compatible. `missing` is said where there is
    /// none.
    pub fn require(self, made_for: i64, missing: &str) -> Result<()> {
        let refuse = |message: String| Err(Error::new(ErrorKind::Schema, message));
        match self {
            SchemaState::Missing => refuse(format!("{missing}; run `pillarbox migrate`")),
            SchemaState::Old { from, to } => {
                refuse(format!("the schema is at version {from} and this build needs {to}; run `pillarbox migrate`"))
            }
            state => state.refuse_newer(made_for),
        }
    }

    /// Refuses one that is newer in ways that this build cannot work with; warns about one that is newer but compatible.
    pub fn refuse_newer(self, made_for: i64) -> Result<()> {
        match self {
            SchemaState::NewerBreaking { version } => Err(Error::new(
                ErrorKind::Schema,
                format!(
                    "the schema is at version {version}, which this build (made for {made_for}) cannot work with; upgrade \
                     pillarbox"
                ),
            )),
            SchemaState::NewerCompatible { version } => {
                tracing::warn!(version, made_for, "the schema is newer than this build; upgrade pillarbox");
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
