use pillarbox::{Error, ErrorKind};
use rusqlite::ErrorCode;

pillarbox::store_failure!(Sql(rusqlite::Error), explain);

impl DbError {
    /// A failure of the file system.
    pub(crate) fn io(message: impl Into<String>, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::StorageFull => ErrorKind::Full,
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Invalid,
            _ => ErrorKind::Unavailable,
        };
        DbError::Own(Error::with_source(kind, message, source))
    }

    /// Whether another connection holds the lock that was wanted.
    pub(crate) fn is_busy(&self) -> bool {
        match self {
            DbError::Sql(error) => {
                matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
            }
            DbError::Own(error) => error.kind() == ErrorKind::Busy,
        }
    }
}

/// The kind of SQLite's error, with what happened, why, and what to do.
fn explain(error: &rusqlite::Error) -> (ErrorKind, String) {
    let rusqlite::Error::SqliteFailure(code, text) = error else {
        return (
            ErrorKind::Fatal,
            format!("the database holds something unexpected ({error}); run `pillarbox doctor`"),
        );
    };
    let text = text.as_deref().unwrap_or("no further text");
    match code.code {
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => (
            ErrorKind::Busy,
            "the database is locked by another writer; keep write transactions short and try again".into(),
        ),
        ErrorCode::DiskFull => {
            (ErrorKind::Full, "the database has no room left, nothing was written; free space and try again".into())
        }
        ErrorCode::SystemIoFailure if code.extended_code == rusqlite::ffi::SQLITE_IOERR_WRITE => {
            (ErrorKind::Full, format!("the database could not be written ({text}); check the disk's space and health"))
        }
        ErrorCode::SystemIoFailure => {
            (ErrorKind::Unavailable, format!("the disk failed under the database ({text}); check the disk"))
        }
        ErrorCode::ReadOnly => (
            ErrorKind::Invalid,
            "the database is read-only; give this process write access to it and its folder".into(),
        ),
        ErrorCode::CannotOpen => (
            ErrorKind::Unavailable,
            "the database cannot be opened; check that the file, its folder and their permissions are there".into(),
        ),
        ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
            (ErrorKind::Fatal, format!("the file is not a sound SQLite database ({text}); restore it from a backup"))
        }
        ErrorCode::ConstraintViolation => {
            let kind = if text.starts_with("pillarbox: PB409") { ErrorKind::Conflict } else { ErrorKind::Invalid };
            (kind, refused(text))
        }
        _ if text.starts_with("no such table: pillarbox_") || text.starts_with("no such column") => {
            (ErrorKind::Schema, format!("the schema is not there or not current ({text}); run `pillarbox migrate`"))
        }
        _ => (ErrorKind::Fatal, format!("the database refused a statement ({text}); run `pillarbox doctor`")),
    }
}

/// The words for a violated constraint: its name says what must hold.
fn refused(text: &str) -> String {
    if let Some(text) = text.strip_prefix("pillarbox: ") {
        return text.to_string();
    }
    match text.strip_prefix("CHECK constraint failed: ") {
        Some("payload_is_json_text_or_a_blob") => {
            "the payload is not JSON; publish valid JSON text, or bytes with a content type".into()
        }
        Some("payload_has_at_most_payload_bytes_max_bytes") => {
            "the payload has more bytes than payload_bytes_max; store it elsewhere and publish a reference".into()
        }
        Some("headers_has_at_most_65536_bytes") => {
            "the headers have more than 65536 bytes (headers_bytes_max); put it into the payload".into()
        }
        Some("content_type_has_at_most_255_bytes") => {
            "the content type has more than 255 bytes (content_type_bytes_max)".into()
        }
        Some(name) => format!("the event was refused because it must hold that {}", name.replace('_', " ")),
        None => format!("the database refused the row ({text}); change what it names"),
    }
}
