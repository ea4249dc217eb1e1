use pillarbox::journal::{Append, StreamHead};
use pillarbox::{Event, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

use super::{StreamRow, Stretch, conflict_of, stream_head};
use crate::Schema;
use crate::error::{Db, DbError};
use crate::publish::{bytes_of, check_names, column, headers_of, json_of};
use crate::types::Json;

/// The version of the stream with the appended events.
pub(crate) async fn append<C: GenericClient>(transaction: &C, schema: &Schema, append: Append<'_>) -> Result<i64> {
    append.events.iter().try_for_each(check_names)?;
    insert(transaction, schema, append).await.map_err(|error| {
        let code = error.code().map(|code| code.code());
        conflict_of(append.stream, code).unwrap_or_else(|| error.into())
    })
}

async fn insert<C: GenericClient>(transaction: &C, schema: &Schema, append: Append<'_>) -> Db<i64> {
    let events = append.events;
    let headers = column(events, headers_of);
    let headers: Vec<_> =
        headers.iter().map(|headers| headers.as_ref().map(|headers| Json(headers.as_json()))).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
        (&append.stream, Type::TEXT),
        (&append.expected, Type::INT8),
        (&append.topic, Type::TEXT),
        (&column(events, |event| event.id), Type::UUID_ARRAY),
        (&column(events, |event| event.r#type.as_str()), Type::TEXT_ARRAY),
        (&column(events, json_of), Type::JSON_ARRAY),
        (&column(events, bytes_of), Type::BYTEA_ARRAY),
        (&column(events, |event| event.content_type.as_deref()), Type::TEXT_ARRAY),
        (&headers, Type::JSONB_ARRAY),
    ];
    let sql = schema.fill_in(sql!(journal, "append"));
    Ok(transaction.query_typed_one(&sql, &parameters).await?.try_get(0)?)
}

pub(crate) async fn version<C: GenericClient>(client: &C, schema: &Schema, stream: &str) -> Db<i64> {
    let sql = schema.fill_in(sql!(journal, "head"));
    let rows = client.query_typed(&sql, &[(&stream, Type::TEXT)]).await?;
    rows.first().map_or(Ok(0), |row| Ok(row.try_get(0)?))
}

pub(crate) async fn read<C: GenericClient>(client: &C, schema: &Schema, stretch: Stretch<'_>) -> Db<Vec<Event>> {
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&stretch.stream, Type::TEXT),
        (&stretch.from, Type::INT8),
        (&stretch.to, Type::INT8),
        (&stretch.limit, Type::INT8),
    ];
    let rows = client.query_typed(&schema.fill_in(sql!(journal, "read")), &parameters).await?;
    rows.iter().map(|row| Ok(stream_row(row)?.into_event())).collect()
}

fn stream_row(row: &Row) -> Result<StreamRow, DbError> {
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

pub(crate) async fn streams<C: GenericClient>(
    client: &C,
    schema: &Schema,
    prefix: &str,
    after: &str,
    limit: i64,
) -> Db<Vec<StreamHead>> {
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&prefix, Type::TEXT), (&after, Type::TEXT), (&limit, Type::INT8)];
    let rows = client.query_typed(&schema.fill_in(sql!(journal, "streams")), &parameters).await?;
    let head = |row: &Row| Ok(stream_head(row.try_get("name")?, row.try_get("topic")?, row.try_get("version")?));
    rows.iter().map(head).collect()
}
