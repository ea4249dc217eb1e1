use ::sqlx::postgres::PgArguments;
use ::sqlx::query::QueryScalar;
use ::sqlx::{AssertSqlSafe, PgConnection, Postgres};
use pillarbox::{Error, ErrorKind, Headers, NewEvent, Result};
use uuid::Uuid;

use super::{Parameter, bytes_of, check_names, column, headers_of, id_of, json_of};
use crate::Schema;

pub(crate) async fn publish(connection: &mut PgConnection, schema: &Schema, event: &NewEvent) -> Result<Uuid> {
    let statement = schema.to_sql(event)?;
    let mut query = unnamed::<String>(statement.sql);
    for parameter in statement.parameters {
        query = match parameter {
            Parameter::Text(text) => query.bind(text),
            Parameter::Bytes(bytes) => query.bind(bytes),
        };
    }
    Ok(id_from(query.fetch_one(connection).await.map_err(failed)?))
}

pub(crate) async fn publish_all(
    connection: &mut PgConnection,
    schema: &Schema,
    events: &[NewEvent],
) -> Result<Vec<Uuid>> {
    events.iter().try_for_each(check_names)?;
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let dedup_keys = column(events, |event| event.dedup_key.clone());
    let once = dedup_keys.iter().any(Option::is_some);
    let sql = match once {
        true => sql!(publish, "text_all_once"),
        false => sql!(publish, "text_all"),
    };
    let mut query = unnamed::<String>(schema.fill_in(sql))
        .bind(column(events, |event| id_of(event, once).map(|id| id.to_string())))
        .bind(column(events, |event| event.topic.clone()))
        .bind(column(events, |event| event.key.clone()))
        .bind(column(events, |event| event.r#type.clone()))
        .bind(column(events, |event| json_of(event).map(|json| json.0.to_owned())))
        .bind(column(events, |event| bytes_of(event).map(<[u8]>::to_vec)))
        .bind(column(events, |event| event.content_type.clone()))
        .bind(column(events, |event| headers_of(event).as_ref().map(Headers::as_json).map(str::to_owned)))
        .bind(column(events, |event| event.deliver_at.map(|at| at.to_string())));
    if once {
        query = query.bind(dedup_keys);
    }
    let ids = query.fetch_all(connection).await.map_err(failed)?;
    Ok(ids.into_iter().map(id_from).collect())
}

pub(crate) async fn accept(connection: &mut PgConnection, schema: &Schema, consumer: &str, id: Uuid) -> Result<bool> {
    let sql = schema.fill_in(sql!(inbox, "accept_text"));
    let query = unnamed::<bool>(sql).bind(consumer.to_owned()).bind(id.to_string());
    query.fetch_one(connection).await.map_err(failed)
}

/// The text is ours; every value is a parameter. Prepared without a name: the next transaction may be on another server connection,
/// where a pooler such as PgBouncer before 1.21 knows nothing of that name.
pub(crate) fn unnamed<T>(sql: String) -> QueryScalar<'static, Postgres, T, PgArguments>
where
    (T,): for<'r> ::sqlx::FromRow<'r, ::sqlx::postgres::PgRow>,
{
    ::sqlx::query_scalar(AssertSqlSafe(sql)).persistent(false)
}

fn id_from(text: String) -> Uuid {
    text.parse().expect("PostgreSQL returns the id that it was given")
}

pub(crate) fn failed(source: ::sqlx::Error) -> Error {
    let Some(said) = source.as_database_error() else {
        return Error::with_source(ErrorKind::Unavailable, format!("PostgreSQL is not reachable: {source}"), source);
    };
    let code = said.code().unwrap_or_default().into_owned();
    let kind = crate::error::kind_of_code(&code);
    let message = crate::error::message_for(kind, &code, said.message());
    Error::with_source(kind, message, source)
}
