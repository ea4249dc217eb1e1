//! Publishing by sqlx.

use ::sqlx::{AssertSqlSafe, PgConnection};
use pillarbox::{Error, ErrorKind, NewEvent, Result};
use uuid::Uuid;

use super::{EventSql, Parameter, PublishStatement, Publisher};

/// As [`publish`](crate::publish()), by sqlx: `publish(&mut *transaction, &event)`. It knows the schema `pillarbox` alone; for another
/// see [`publish_in`].
pub async fn publish(transaction: &mut PgConnection, event: &NewEvent) -> Result<Uuid> {
    run(transaction, event.to_sql()?).await
}

/// As [`Publisher::publish`], by sqlx: `publish_in(&store.publisher(), &mut *transaction, &event)`.
pub async fn publish_in(publisher: &Publisher, transaction: &mut PgConnection, event: &NewEvent) -> Result<Uuid> {
    run(transaction, publisher.to_sql(event)?).await
}

async fn run(transaction: &mut PgConnection, statement: PublishStatement) -> Result<Uuid> {
    // The text is ours; every value is a parameter. Prepared without a name: the next transaction may be on another server
    // connection, where a pooler such as PgBouncer before 1.21 knows nothing of that name.
    let mut query = ::sqlx::query_scalar::<_, String>(AssertSqlSafe(statement.sql)).persistent(false);
    for parameter in statement.parameters {
        query = match parameter {
            Parameter::Text(text) => query.bind(text),
            Parameter::Bytes(bytes) => query.bind(bytes),
        };
    }
    let id = query.fetch_one(transaction).await.map_err(failed)?;
    Ok(id.parse().expect("PostgreSQL returns the id that it was given"))
}

fn failed(source: ::sqlx::Error) -> Error {
    let Some(said) = source.as_database_error() else {
        return Error::with_source(ErrorKind::Unavailable, format!("PostgreSQL is not reachable: {source}"), source);
    };
    let code = said.code().unwrap_or_default().into_owned();
    let kind = crate::error::kind_of_code(&code);
    let message = crate::error::message_for(kind, &code, said.message());
    Error::with_source(kind, message, source)
}
