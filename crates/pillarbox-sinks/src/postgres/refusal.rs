use pillarbox::Failure;
use tokio_postgres::error::{DbError, Severity};

use super::table::Table;

/// How much of what a trigger raised is kept, in bytes.
const RAISED_BYTES_MAX: usize = 300;

/// Why a statement failed, by what is to be done about it.
#[derive(Debug, PartialEq)]
pub(super) enum Refusal {
    /// An event of the statement was refused; which one, only a smaller statement can tell.
    Event(Failure),
    /// Two were in each other's way; the same statement may go through now.
    Again(Failure),
    /// The connection was lost. Unless the server said why, it is unknown whether the statement was carried out.
    Lost(Failure),
    /// Nothing of this batch can be appended now.
    Sink(Failure),
}

impl Refusal {
    pub(super) fn of(error: &tokio_postgres::Error, table: &Table) -> Self {
        match error.as_db_error() {
            // The server ends the session, and with it what was not committed.
            Some(said) if matches!(said.parsed_severity(), Some(Severity::Fatal | Severity::Panic)) => {
                Refusal::Lost(match Refusal::of_code(said, table) {
                    Refusal::Sink(failure) => failure,
                    _ => sink("postgres", said, "it is tried again"),
                })
            }
            Some(said) => Refusal::of_code(said, table),
            None => Refusal::Lost(Failure::unclear(
                "connection_lost",
                format!("the connection to PostgreSQL was lost before it answered: {}", cause_of(error)),
            )),
        }
    }

    /// What a code means: about an event speaks what depends on its values, everything else is about the receiver.
    fn of_code(said: &DbError, table: &Table) -> Self {
        let code = said.code().code();
        match (code, code.get(..2).unwrap_or_default()) {
            ("40001" | "40P01" | "55P03", _) => Refusal::Again(sink("busy", said, BUSY)),
            // Of these the message may quote the payload, so the code has to do.
            ("2200H", _) => {
                Refusal::Sink(sink("full", said, "the table's sequence has no numbers left; make it a bigint"))
            }
            (_, "22" | "54") => Refusal::Event(Failure {
                kind: "not_storable",
                permanent: NEVER_STORABLE.contains(&code),
                ..Failure::event(format!(
                    "PostgreSQL cannot store a value of this event in {} (SQLSTATE {code}); its log says which",
                    table.name()
                ))
            }),
            (_, "23" | "44") => Refusal::Event(refused(&violation(said, code, table))),
            (_, "42" | "3F") => Refusal::Sink(of_table(said, code, table)),
            ("25006", _) => {
                Refusal::Sink(sink("read_only", said, "connect to the primary, or wait for the failover to end"))
            }
            ("53100", _) => Refusal::Sink(sink("full", said, "make room there; it is tried again")),
            (_, "28") => {
                Refusal::Sink(sink("login", said, "see the user and password in the sink's url, and pg_hba.conf"))
            }
            (_, "3D") => Refusal::Sink(sink("database", said, "create the database, or correct the sink's url")),
            (_, class) if RECEIVER.contains(&class) => Refusal::Sink(sink("postgres", said, "it is tried again")),
            // What is left is raised by triggers, in their own words or codes.
            _ => Refusal::Event(refused(&format!("a trigger of {} refused it: {}", table.name(), raised(said, code)))),
        }
    }
}

const BUSY: &str = "another transaction was in the way; see who in pg_stat_activity";

/// What no change of the table or of its triggers mends: characters, texts, times and depths that the types of columns do not have.
const NEVER_STORABLE: [&str; 5] = ["22008", "22021", "22P02", "22P05", "54001"];

/// Classes of codes that say nothing about a row: connection, transaction, features, resources, operators, the system, itself.
const RECEIVER: [&str; 14] = ["08", "0A", "24", "25", "26", "2D", "34", "40", "53", "55", "57", "58", "F0", "XX"];

fn refused(message: &str) -> Failure {
    Failure { kind: "refused", ..Failure::event(message) }
}

fn sink(kind: &'static str, said: &DbError, to_do: &str) -> Failure {
    Failure { kind, ..Failure::sink(format!("PostgreSQL says: {}; {to_do}", said.message())) }
}

fn of_table(said: &DbError, code: &str, table: &Table) -> Failure {
    if code == "42501" {
        return sink("denied", said, &grants(table));
    }
    let to_do = format!("{} is not as this sink needs it: {}", table.name(), repair(table));
    sink("table", said, &to_do)
}

/// What makes the table right.
pub(super) fn repair(table: &Table) -> String {
    format!(
        "create {} and {} with the SQL of the sink's guide, or set create = true if they are not there at all",
        table.name(),
        table.fence()
    )
}

/// What the sink's role needs.
pub(super) fn grants(table: &Table) -> String {
    format!(
        "run: grant select, insert on {} to <role>; grant select, insert, update on {} to <role>",
        table.name(),
        table.fence()
    )
}

/// Which constraint it was; the values are in the details, which are not shown.
fn violation(said: &DbError, code: &str, table: &Table) -> String {
    match (said.constraint(), said.column()) {
        (Some(constraint), _) => {
            format!("{} refuses it by the constraint {constraint} (SQLSTATE {code})", table.name())
        }
        (None, Some(column)) => format!("{} refuses it because of the column {column} (SQLSTATE {code})", table.name()),
        (None, None) => format!("{} refuses it by a constraint (SQLSTATE {code})", table.name()),
    }
}

/// The words of a `raise`, which are for people; of other codes the message may quote anything.
fn raised(said: &DbError, code: &str) -> String {
    if code != "P0001" {
        return format!("SQLSTATE {code}");
    }
    let words = said.message();
    words[..words.floor_char_boundary(RAISED_BYTES_MAX)].to_owned()
}

/// The innermost cause in words; the outer ones only say that there was an error.
pub(super) fn cause_of(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
