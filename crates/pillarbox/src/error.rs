use std::error::Error as StdError;
use std::fmt;

/// What went wrong, and by its [`ErrorKind`] what a caller may do about it.
///
/// `Display` is one clause; the cause is kept as the source and never formatted in.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The kinds of failure of a store, an operator's command or a publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The database is locked or overloaded; the same call may go through later.
    Busy,
    /// The database cannot be reached, or the connection was lost.
    Unavailable,
    /// The database has no room left. Nothing was written; the call may go through once there is room.
    Full,
    /// The caller's input was refused; the same call fails again.
    Invalid,
    /// What was named does not exist.
    NotFound,
    /// The schema is missing, old, or newer than this version can work with.
    Schema,
    /// The log is not the one that this database was made for: a copy, or a restored backup.
    Foreign,
    /// A premise of the engine does not hold; the relay stops.
    Fatal,
    /// This instance has ended: its connection was lost, or another instance has removed its row. Join again under a new number.
    Ended,
}

/// What a caller may do about an [`ErrorKind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retryability {
    /// Try the same call again, later.
    Retry,
    /// The same call fails again; change it.
    Change,
    /// Stop and tell an operator.
    Stop,
    /// Drop all work and join the fleet again.
    Rejoin,
}

impl ErrorKind {
    /// Whether to retry, to change the call, or to stop.
    pub fn retryability(self) -> Retryability {
        match self {
            ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::Full => Retryability::Retry,
            ErrorKind::Invalid | ErrorKind::NotFound => Retryability::Change,
            ErrorKind::Schema | ErrorKind::Foreign | ErrorKind::Fatal => Retryability::Stop,
            ErrorKind::Ended => Retryability::Rejoin,
        }
    }
}

impl Error {
    /// An error without a cause of its own.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), source: None }
    }

    /// An error that keeps its cause.
    pub fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Error { kind, message: message.into(), source: Some(source.into()) }
    }

    /// The kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// The result of most calls of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;
