use std::error::Error as StdError;
use std::fmt;

/// A failure. Its [`ErrorKind`] says what a caller can do about it.
///
/// `Display` is one clause. The cause is kept as the source and is not part of `Display`.
///
/// ```
/// use pillarbox::{ErrorKind, Timestamp};
///
/// let error = "tomorrow".parse::<Timestamp>().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Invalid);
/// assert_eq!(error.to_string(), "'tomorrow' is not a time; write it like 2026-01-31T12:00:00Z");
/// ```
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
    /// The database is locked or overloaded; the same call may succeed later.
    Busy,
    /// The database cannot be reached, or the connection was lost.
    Unavailable,
    /// The database has no free space. Nothing was written; the call may succeed once there is space.
    Full,
    /// The caller's input was refused; the same call fails again.
    Invalid,
    /// A stream of the journal is not at the version that an append expected. Nothing was written.
    Conflict,
    /// A named subscription, event or other object does not exist.
    NotFound,
    /// The schema is missing, old, or newer than this version can work with.
    Schema,
    /// The log does not belong to this database: it is a copy or a restored backup.
    Foreign,
    /// A precondition of the engine does not hold; the relay stops.
    Fatal,
    /// This instance has ended: its connection was lost, or another instance removed its row. Join again under a new
    /// number.
    Ended,
}

/// What a caller can do about an [`ErrorKind`].
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
    /// What the caller can do: retry, change the call, stop, or join again.
    pub fn retryability(self) -> Retryability {
        match self {
            ErrorKind::Busy | ErrorKind::Unavailable | ErrorKind::Full => Retryability::Retry,
            ErrorKind::Invalid | ErrorKind::Conflict | ErrorKind::NotFound => Retryability::Change,
            ErrorKind::Schema | ErrorKind::Foreign | ErrorKind::Fatal => Retryability::Stop,
            ErrorKind::Ended => Retryability::Rejoin,
        }
    }
}

impl Error {
    /// An error without a cause.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), source: None }
    }

    /// An error with its cause.
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

/// That the log was replaced by another state of it, with what to do.
pub fn not_itself(what: &str) -> Error {
    Error::new(
        ErrorKind::Foreign,
        format!(
            "the log is not the continuation of itself: {what}; if this is a restored backup run \
             `pillarbox migrate --adopt` to go on with what it holds, or `--fresh` to deliver nothing old"
        ),
    )
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
