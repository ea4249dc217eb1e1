use pillarbox::{NewEvent, Result};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::{bytes_of, check_names, column, headers_of, id_of, json_of};
use crate::Schema;
use crate::error::Db;
use crate::types::{Json, Time};

pub(crate) async fn publish<C: GenericClient>(transaction: &C, schema: &Schema, event: &NewEvent) -> Result<Uuid> {
    if event.dedup_key.is_some() {
        let ids = publish_all(transaction, schema, std::slice::from_ref(event)).await?;
        return Ok(ids[0]);
    }
    check_names(event)?;
    Ok(insert(transaction, schema, event).await?)
}

async fn insert<C: GenericClient>(transaction: &C, schema: &Schema, event: &NewEvent) -> Db<Uuid> {
    let headers = headers_of(event);
    let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
        (&event.id, Type::UUID),
        (&event.topic, Type::TEXT),
        (&event.key, Type::TEXT),
        (&event.r#type, Type::TEXT),
        (&json_of(event), Type::JSON),
        (&bytes_of(event), Type::BYTEA),
        (&event.content_type, Type::TEXT),
        (&headers.as_ref().map(|headers| Json(headers.as_json())), Type::JSONB),
        (&event.deliver_at.map(Time), Type::TIMESTAMPTZ),
    ];
    let sql = schema.fill_in(sql!(publish, "typed"));
    Ok(transaction.query_typed_one(&sql, &parameters).await?.try_get(0)?)
}

pub(crate) async fn publish_all<C: GenericClient>(
    transaction: &C,
    schema: &Schema,
    events: &[NewEvent],
) -> Result<Vec<Uuid>> {
    events.iter().try_for_each(check_names)?;
    if events.is_empty() {
        return Ok(Vec::new());
    }
    Ok(insert_all(transaction, schema, events).await?)
}

async fn insert_all<C: GenericClient>(transaction: &C, schema: &Schema, events: &[NewEvent]) -> Db<Vec<Uuid>> {
    let headers = column(events, headers_of);
    let dedup_keys = column(events, |event| event.dedup_key.as_deref());
    let once = dedup_keys.iter().any(Option::is_some);
    let mut parameters: Vec<(Box<dyn ToSql + Sync + Send + '_>, Type)> = vec![
        (Box::new(column(events, |event| id_of(event, once))), Type::UUID_ARRAY),
        (Box::new(column(events, |event| event.topic.as_str())), Type::TEXT_ARRAY),
        (Box::new(column(events, |event| event.key.as_deref())), Type::TEXT_ARRAY),
        (Box::new(column(events, |event| event.r#type.as_str())), Type::TEXT_ARRAY),
        (Box::new(column(events, json_of)), Type::JSON_ARRAY),
        (Box::new(column(events, bytes_of)), Type::BYTEA_ARRAY),
        (Box::new(column(events, |event| event.content_type.as_deref())), Type::TEXT_ARRAY),
        (
            Box::new(
                headers
                    .iter()
                    .map(|headers| headers.as_ref().map(|headers| Json(headers.as_json())))
                    .collect::<Vec<_>>(),
            ),
            Type::JSONB_ARRAY,
        ),
        (Box::new(column(events, |event| event.deliver_at.map(Time))), Type::TIMESTAMPTZ_ARRAY),
    ];
    if once {
        parameters.push((Box::new(dedup_keys), Type::TEXT_ARRAY));
    }
    let parameters: Vec<(&(dyn ToSql + Sync), Type)> =
        parameters.iter().map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone())).collect();
    let sql = if once { sql!(publish, "typed_once") } else { sql!(publish, "typed_all") };
    let rows = transaction.query_typed(&schema.fill_in(sql), &parameters).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}
