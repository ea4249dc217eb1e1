use std::sync::LazyLock;

use pillarbox::limit::NAME_BYTES_MAX;
use pillarbox::{Error, ErrorKind, Headers, NewEvent, Payload, Result};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::connection::{PgConfig, SCHEMA, check_schema};
use crate::error::Db;
use crate::types::{Json, Time};

pub(crate) use limits::FOREVER_MS;
pub use limits::{Limits, PAYLOAD_BYTES_MAX_HIGHEST};
pub use statement::{EventSql, Parameter, PublishStatement};

mod limits;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod statement;

static DEFAULT: LazyLock<Publisher> = LazyLock::new(|| Publisher { schema: SCHEMA.to_owned() });

/// Publishes an event in the caller's own transaction: it is delivered if and only if that commits.
///
/// Returns the event's id, or with a `dedup_key` that was seen inside its window the id of the first event, and then
/// publishes nothing. One round trip without a prepared statement, so that it works through any pooler.
///
/// As after every failed statement, PostgreSQL lets a transaction do nothing more once an event was refused by the database,
/// for example because its payload is not JSON; use a savepoint if it should go on.
///
/// It publishes into the schema `pillarbox`. For a log whose URL says `?schema=…` use
/// [`PostgresStore::publisher`](crate::PostgresStore::publisher) or [`Publisher::new`].
pub async fn publish<C: GenericClient>(transaction: &C, event: &NewEvent) -> Result<Uuid> {
    DEFAULT.publish(transaction, event).await
}

/// Publishes events in order, as [`publish`] does, by one statement: all or none.
pub async fn publish_all<C: GenericClient>(transaction: &C, events: &[NewEvent]) -> Result<Vec<Uuid>> {
    DEFAULT.publish_all(transaction, events).await
}

/// Publishes into the log of one schema: made by [`PostgresStore::publisher`](crate::PostgresStore::publisher), or by its name where an
/// application has no store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publisher {
    schema: String,
}

impl Publisher {
    /// For the log in `schema`.
    pub fn new(schema: &str) -> Result<Self> {
        check_schema(schema)?;
        Ok(Publisher { schema: schema.to_owned() })
    }

    pub(crate) fn of(config: &PgConfig) -> Self {
        Publisher { schema: config.schema.clone() }
    }

    /// See [`publish()`].
    pub async fn publish<C: GenericClient>(&self, transaction: &C, event: &NewEvent) -> Result<Uuid> {
        if event.dedup_key.is_some() {
            let ids = self.publish_all(transaction, std::slice::from_ref(event)).await?;
            return Ok(ids[0]);
        }
        check_names(event)?;
        Ok(self.insert(transaction, event).await?)
    }

    async fn insert<C: GenericClient>(&self, transaction: &C, event: &NewEvent) -> Db<Uuid> {
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
        let sql = self.fill_in(include_str!("sql/publish.sql"));
        Ok(transaction.query_typed_one(&sql, &parameters).await?.try_get(0)?)
    }

    /// See [`publish_all()`].
    pub async fn publish_all<C: GenericClient>(&self, transaction: &C, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        events.iter().try_for_each(check_names)?;
        if events.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.insert_all(transaction, events).await?)
    }

    async fn insert_all<C: GenericClient>(&self, transaction: &C, events: &[NewEvent]) -> Db<Vec<Uuid>> {
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
        let sql = if once { include_str!("sql/publish_once.sql") } else { include_str!("sql/publish_all.sql") };
        let rows = transaction.query_typed(&self.fill_in(sql), &parameters).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    pub(crate) fn fill_in(&self, sql: &str) -> String {
        sql.replace("@schema@", &self.schema)
    }
}

fn column<'a, T>(events: &'a [NewEvent], of: impl Fn(&'a NewEvent) -> T) -> Vec<T> {
    events.iter().map(of).collect()
}

/// The id that an event brings. Where there is a `dedup_key` it needs one before it is published; any other gets its id from its place
/// in the log.
fn id_of(event: &NewEvent, once: bool) -> Option<Uuid> {
    event.id.or_else(|| once.then(Uuid::now_v7))
}

/// None where there are none: such a row is smaller.
fn headers_of(event: &NewEvent) -> Option<Headers> {
    (!event.headers.is_empty()).then(|| Headers::from_map(&event.headers))
}

fn json_of(event: &NewEvent) -> Option<Json<'_>> {
    match &event.payload {
        Payload::Json(text) => Some(Json(text)),
        _ => None,
    }
}

fn bytes_of(event: &NewEvent) -> Option<&[u8]> {
    match &event.payload {
        Payload::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}

/// The cheap half of [`NewEvent::validate`]; the other half are the table's checks, which hold for all publishers alike.
fn check_names(event: &NewEvent) -> Result<()> {
    let names = [
        ("topic", Some(&event.topic)),
        ("type", Some(&event.r#type)),
        ("key", event.key.as_ref()),
        ("dedup_key", event.dedup_key.as_ref()),
    ];
    for (name, value) in names {
        let Some(value) = value else { continue };
        if !(1..=NAME_BYTES_MAX).contains(&value.len()) {
            let length = value.len();
            let message = format!("the {name} has {length} bytes, which is not 1 to name_bytes_max = {NAME_BYTES_MAX}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        if value.contains('\0') {
            let message = format!("the {name} contains the character 0, which PostgreSQL cannot store; leave it out");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
    }
    Ok(())
}
