use ::sqlx::postgres::PgRow;
use ::sqlx::{AssertSqlSafe, PgConnection, Row};
use pillarbox::journal::Append;
use pillarbox::{Event, Headers, Result};

use super::{StreamRow, Stretch, conflict_of};
use crate::Schema;
use crate::publish::on_sqlx::{failed, unnamed};
use crate::publish::{bytes_of, check_names, column, headers_of, json_of};

/// The version of the stream with the appended events.
pub(crate) async fn append(connection: &mut PgConnection, schema: &Schema, append: Append<'_>) -> Result<i64> {
    append.events.iter().try_for_each(check_names)?;
    let events = append.events;
    let query = unnamed::<i64>(schema.fill_in(sql!(journal, "append_text")))
        .bind(append.stream.to_owned())
        .bind(append.expected)
        .bind(append.topic.to_owned())
        .bind(column(events, |event| event.id.map(|id| id.to_string())))
        .bind(column(events, |event| event.r#type.clone()))
        .bind(column(events, |event| json_of(event).map(|json| json.0.to_owned())))
        .bind(column(events, |event| bytes_of(event).map(<[u8]>::to_vec)))
        .bind(column(events, |event| event.content_type.clone()))
        .bind(column(events, |event| headers_of(event).as_ref().map(Headers::as_json).map(str::to_owned)));
    query.fetch_one(connection).await.map_err(|source| {
        let code = source.as_database_error().and_then(|said| said.code().map(|code| code.into_owned()));
        conflict_of(append.stream, code.as_deref()).unwrap_or_else(|| failed(source))
    })
}

pub(crate) async fn version(connection: &mut PgConnection, schema: &Schema, stream: &str) -> Result<i64> {
    let query = unnamed::<i64>(schema.fill_in(sql!(journal, "head"))).bind(stream.to_owned());
    Ok(query.fetch_optional(connection).await.map_err(failed)?.unwrap_or_default())
}

pub(crate) async fn read(connection: &mut PgConnection, schema: &Schema, stretch: Stretch<'_>) -> Result<Vec<Event>> {
    // Prepared without a name, as every statement here.
    let query = ::sqlx::query(AssertSqlSafe(schema.fill_in(sql!(journal, "read"))))
        .persistent(false)
        .bind(stretch.stream.to_owned())
        .bind(stretch.from)
        .bind(stretch.to)
        .bind(stretch.limit);
    let rows = query.fetch_all(connection).await.map_err(failed)?;
    rows.iter().map(|row| Ok(stream_row(row).map_err(failed)?.into_event())).collect()
}

fn stream_row(row: &PgRow) -> ::sqlx::Result<StreamRow> {
    Ok(StreamRow {
        position: row.try_get(0)?,
        topic: row.try_get(1)?,
        r#type: row.try_get(2)?,
        id: row.try_get(3)?,
        key: row.try_get(4)?,
        json: row.try_get(5)?,
        bytes: row.try_get(6)?,
        content_type: row.try_get(7)?,
        headers: row.try_get(8)?,
        version: row.try_get(9)?,
        created_at: row.try_get(10)?,
    })
}
