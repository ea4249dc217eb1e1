use std::sync::mpsc::{Sender, channel};
use std::thread;

use rusqlite::fallible_iterator::FallibleIterator;
use rusqlite::types::ValueRef;
use tokio_postgres::SimpleQueryMessage;

use crate::place::PATIENCE;

/// A plain client of the database, as an application's would be: no part of the engine takes part. Statements name the
/// tables as they are called on SQLite; everything comes back as text.
pub(crate) enum Sql {
    Sqlite(rusqlite::Connection),
    Postgres(Sender<Question>),
}

/// A row as text.
pub(crate) type Row = Vec<Option<String>>;

type Question = (String, Sender<Result<Vec<Row>, String>>);

impl Sql {
    pub(crate) fn sqlite(path: &std::path::Path) -> Self {
        let connection = rusqlite::Connection::open(path).unwrap();
        connection.busy_timeout(PATIENCE).unwrap();
        Sql::Sqlite(connection)
    }

    /// Works on a thread of its own, so that it can be asked inside and outside of a runtime.
    pub(crate) fn postgres(url: &str) -> Self {
        let (questions, asked) = channel::<Question>();
        let url = url.to_owned();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let client = runtime.block_on(pillarbox_testkit::postgres::connect(&url)).unwrap();
            while let Ok((sql, answer)) = asked.recv() {
                let messages = runtime.block_on(client.simple_query(&sql)).map_err(said);
                // Whoever asked may have failed meanwhile.
                let _ = answer.send(messages.map(|messages| messages.iter().filter_map(row).collect()));
            }
        });
        Sql::Postgres(questions)
    }

    /// Runs statements as they are.
    pub(crate) fn raw(&self, sql: &str) -> Result<Vec<Row>, String> {
        match self {
            Sql::Sqlite(connection) => sqlite_rows(connection, sql).map_err(|error| error.to_string()),
            Sql::Postgres(questions) => {
                let (answer, answered) = channel();
                questions.send((sql.to_owned(), answer)).unwrap();
                answered.recv().unwrap()
            }
        }
    }

    /// Runs statements with the tables of the log under the names that they have here; the rows of them all.
    pub(crate) fn try_rows(&self, sql: &str) -> Result<Vec<Row>, String> {
        match self {
            Sql::Sqlite(_) => self.raw(sql),
            Sql::Postgres(_) => self.raw(&sql.replace("pillarbox_", "pillarbox.")),
        }
    }

    pub(crate) fn rows(&self, sql: &str) -> Vec<Row> {
        self.try_rows(sql).unwrap_or_else(|error| panic!("{error}: {sql}"))
    }

    pub(crate) fn execute(&self, sql: &str) {
        self.rows(sql);
    }

    /// The one number that is asked for.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        self.rows(sql)[0][0].as_deref().unwrap().parse().unwrap()
    }

    /// A time in milliseconds since 1970, as the columns have it.
    pub(crate) fn time(&self, milliseconds: i64) -> String {
        match self {
            Sql::Sqlite(_) => milliseconds.to_string(),
            Sql::Postgres(_) => format!("to_timestamp({milliseconds} / 1000.0)"),
        }
    }
}

fn sqlite_rows(connection: &rusqlite::Connection, sql: &str) -> rusqlite::Result<Vec<Row>> {
    let mut batch = rusqlite::Batch::new(connection, sql);
    let mut all = Vec::new();
    while let Some(mut statement) = batch.next()? {
        let columns = statement.column_count();
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            all.push((0..columns).map(|at| row.get_ref(at).map(text)).collect::<Result<_, _>>()?);
        }
    }
    Ok(all)
}

fn text(value: ValueRef<'_>) -> Option<String> {
    match value {
        ValueRef::Null => None,
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
    }
}

fn row(message: &SimpleQueryMessage) -> Option<Row> {
    match message {
        SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|at| row.get(at).map(str::to_owned)).collect()),
        _ => None,
    }
}

fn said(error: tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}
