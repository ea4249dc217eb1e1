use pillarbox::limit::NAME_BYTES_MAX;
use pillarbox::{Error, ErrorKind, Headers, NewEvent, Payload, Result};
use uuid::Uuid;

use crate::client::PgClient;
use crate::schema::{DEFAULT, Schema};
use crate::types::Json;

pub(crate) use limits::store_limits;
pub use statement::{EventSql, Parameter, PublishStatement};

mod limits;
pub(crate) mod on_client;
#[cfg(feature = "sqlx")]
pub(crate) mod on_sqlx;
mod statement;

/// Publishes an event in the caller's own transaction: it is delivered if and only if that commits.
///
/// Returns the event's id, or with a `dedup_key` that was seen inside its window the id of the first event, and then
/// publishes nothing. One round trip without a prepared statement, so that it works through any pooler.
///
/// As after every failed statement, PostgreSQL lets a transaction do nothing more once an event was refused by the database,
/// for example because its payload is not JSON; use a savepoint if it should go on.
///
/// It publishes into the schema `pillarbox`. For a log whose URL says `?schema=…` use [`Schema::publish`].
///
/// ```
/// # async fn place(transaction: tokio_postgres::Transaction<'_>) -> pillarbox::Result<()> {
/// use pillarbox::NewEvent;
/// use pillarbox_postgres::publish;
///
/// publish(&transaction, &NewEvent::new("orders", "order.placed").key("o-1")).await?;
/// # Ok(())
/// # }
/// ```
///
/// With sqlx (feature `sqlx`), pass `&mut *transaction`:
///
/// ```
/// # #[cfg(feature = "sqlx")]
/// # async fn place(mut transaction: sqlx::Transaction<'_, sqlx::Postgres>) -> pillarbox::Result<()> {
/// # use pillarbox::NewEvent;
/// # use pillarbox_postgres::publish;
/// publish(&mut *transaction, &NewEvent::new("orders", "order.placed").key("o-1")).await?;
/// # Ok(())
/// # }
/// ```
pub async fn publish<C: PgClient>(transaction: C, event: &NewEvent) -> Result<Uuid> {
    DEFAULT.publish(transaction, event).await
}

/// Publishes events in order, as [`publish`] does, by one statement: all or none.
pub async fn publish_all<C: PgClient>(transaction: C, events: &[NewEvent]) -> Result<Vec<Uuid>> {
    DEFAULT.publish_all(transaction, events).await
}

impl Schema {
    /// See [`publish()`].
    pub async fn publish<C: PgClient>(&self, transaction: C, event: &NewEvent) -> Result<Uuid> {
        transaction.publish(self, event).await
    }

    /// See [`publish_all()`].
    pub async fn publish_all<C: PgClient>(&self, transaction: C, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        transaction.publish_all(self, events).await
    }
}

pub(crate) fn column<'a, T>(events: &'a [NewEvent], of: impl Fn(&'a NewEvent) -> T) -> Vec<T> {
    events.iter().map(of).collect()
}

/// The id that an event brings. Where there is a `dedup_key` it needs one before it is published; any other gets its id from its place
/// in the log.
fn id_of(event: &NewEvent, once: bool) -> Option<Uuid> {
    event.id.or_else(|| once.then(Uuid::now_v7))
}

/// None where there are none: such a row is smaller.
pub(crate) fn headers_of(event: &NewEvent) -> Option<Headers> {
    (!event.headers.is_empty()).then(|| Headers::from_map(&event.headers))
}

pub(crate) fn json_of(event: &NewEvent) -> Option<Json<'_>> {
    match &event.payload {
        Payload::Json(text) => Some(Json(text)),
        _ => None,
    }
}

pub(crate) fn bytes_of(event: &NewEvent) -> Option<&[u8]> {
    match &event.payload {
        Payload::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}

/// The cheap half of [`NewEvent::validate`]; the other half are the table's checks, which hold for all publishers alike.
pub(crate) fn check_names(event: &NewEvent) -> Result<()> {
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
