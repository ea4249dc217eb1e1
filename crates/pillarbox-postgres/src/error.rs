use pillarbox::ErrorKind;
use pillarbox::journal::conflict;
use tokio_postgres::error::SqlState;

pillarbox::store_failure!(Postgres(tokio_postgres::Error), explain);

/// The session was ended by somebody, or with the server.
const ENDED: &str = "57P01";

/// The session was ended since its transaction stood still.
const ENDED_IDLE: &str = "25P03";

/// What a command says that the server has ended in its middle.
pub(crate) fn message_of_ended(code: &str, said: &str) -> String {
    let message = message_for(kind_of_code(code), code, said);
    if ![ENDED, ENDED_IDLE].contains(&code) {
        return message;
    }
    format!(
        "{message}; that happens to a command that stands still and keeps others waiting, and when the server shuts down; what was not \
         committed was undone: repeat the command"
    )
}

impl DbError {
    /// PostgreSQL's code of the failure.
    pub(crate) fn code(&self) -> Option<&SqlState> {
        match self {
            DbError::Postgres(error) => error.code(),
            DbError::Own(_) => None,
        }
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            DbError::Postgres(error) => kind_of(error),
            DbError::Own(error) => error.kind(),
        }
    }
}

/// The kind of PostgreSQL's error, with what happened, why, and what to do.
fn explain(error: &tokio_postgres::Error) -> (ErrorKind, String) {
    let kind = kind_of(error);
    (kind, message_of(kind, error))
}

fn kind_of(error: &tokio_postgres::Error) -> ErrorKind {
    let Some(code) = error.code() else {
        // Without a code it is the client library's: a connection that broke, or a value that does not fit its type.
        let broken = error.is_closed() || std::error::Error::source(error).is_some_and(|s| s.is::<std::io::Error>());
        return if broken || !is_conversion(error) { ErrorKind::Unavailable } else { ErrorKind::Fatal };
    };
    kind_of_code(code.code())
}

/// What a code of PostgreSQL means for the caller.
pub(crate) fn kind_of_code(code: &str) -> ErrorKind {
    match code {
        // Serialisation failure, deadlock, lock timeout, cancelled.
        "40001" | "40P01" | "55P03" | "57014" => ErrorKind::Busy,
        "53100" => ErrorKind::Full,
        "53300" | "53200" | "53000" | "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04" => {
            ErrorKind::Unavailable
        }
        // A standby, in the middle of a failover: the primary is elsewhere, or about to be here. One that is asked for by name is
        // refused when it is opened.
        "25006" | "55000" => ErrorKind::Unavailable,
        "PB409" => ErrorKind::Conflict,
        "42P01" | "3F000" | "42703" | "42883" => ErrorKind::Schema,
        "3D000" | "28000" | "28P01" | "42501" => ErrorKind::Invalid,
        code if code.starts_with("08") || code.starts_with("58") || code.starts_with("XX") => ErrorKind::Unavailable,
        code if code.starts_with("22") || code.starts_with("23") => ErrorKind::Invalid,
        _ => ErrorKind::Fatal,
    }
}

fn is_conversion(error: &tokio_postgres::Error) -> bool {
    let text = error.to_string();
    text.starts_with("error serializing parameter") || text.starts_with("error deserializing column")
}

fn message_of(kind: ErrorKind, error: &tokio_postgres::Error) -> String {
    match (kind, error.as_db_error()) {
        (kind, Some(said)) => message_for(kind, said.code().code(), said.message()),
        (_, None) if cause_of(error).contains("password missing") => {
            "PostgreSQL asks for a password, and none is given: name it in the URL, in PGPASSWORD or in a password file"
                .to_owned()
        }
        (ErrorKind::Unavailable, None) => format!("PostgreSQL is not reachable: {}", cause_of(error)),
        (_, None) => cause_of(error),
    }
}

/// What PostgreSQL said, with what to do about it.
pub(crate) fn message_for(kind: ErrorKind, code: &str, said: &str) -> String {
    match (kind, code) {
        (ErrorKind::Conflict, _) => conflict(said.strip_prefix("pillarbox: ").unwrap_or(said)).to_string(),
        (ErrorKind::Schema, _) => format!("{said}; run `pillarbox migrate`"),
        // Grants of the roles do not help with these two.
        (_, "42501") if said.starts_with("permission denied for database") => format!(
            "{said}, and `migrate` needs a role that may create a schema; run `grant create on database NAME to ROLE`, or run it as the \
             database's owner"
        ),
        (_, "42501") if said.starts_with("must be owner of") => {
            format!("{said}; run it as the role that owns the schema, the one that ran `pillarbox migrate`")
        }
        (_, "42501") => format!("{said}; give this role its grants, as `pillarbox migrate --print-roles` prints them"),
        (_, "28000" | "28P01") => format!("PostgreSQL refused the login: {said}"),
        (ErrorKind::Full, _) => format!("PostgreSQL has no room left: {said}"),
        (_, "25006") => format!(
            "PostgreSQL takes no writes here: {said} (it is a standby, or default_transaction_read_only is on for this role or database); \
             name the primary, or turn that setting off"
        ),
        (_, ENDED | ENDED_IDLE) => format!("PostgreSQL ended this session: {said}"),
        (_, "55000") => format!("PostgreSQL cannot do this now: {said}"),
        (ErrorKind::Unavailable, _) => format!("PostgreSQL is not reachable: {said}"),
        (_, "55P03" | "57014") => {
            format!("{said}: another transaction was in the way; see who in `pillarbox status`, and try again")
        }
        (ErrorKind::Busy, _) => format!("{said}: two were in each other's way, and this one was taken back; try again"),
        _ => said.to_owned(),
    }
}

/// The innermost cause in words; the outer ones only say that there was an error.
fn cause_of(error: &tokio_postgres::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_reached_and_refuses_is_not_called_unreachable() {
        let said = message_for(kind_of_code("25006"), "25006", "cannot execute INSERT in a read-only transaction");
        assert!(said.contains("default_transaction_read_only") && !said.contains("not reachable"), "{said}");
        for said in ["permission denied for database app", "must be owner of table event"] {
            let message = message_for(kind_of_code("42501"), "42501", said);
            assert!(message.starts_with(said) && !message.contains("print-roles"), "{message}");
        }
    }

    #[test]
    fn whoever_was_in_the_way_of_another_is_told_what_to_do() {
        for (code, said) in [
            ("55P03", "canceling statement due to lock timeout"),
            ("57014", "canceling statement due to statement timeout"),
            ("40P01", "deadlock detected"),
            ("40001", "could not serialize access"),
        ] {
            assert_eq!(kind_of_code(code), ErrorKind::Busy);
            let message = message_for(ErrorKind::Busy, code, said);
            assert!(message.starts_with(said) && message.ends_with("try again"), "{message}");
            let waited = code == "55P03" || code == "57014";
            assert_eq!(message.contains("`pillarbox status`"), waited, "{message}");
        }
    }
}
