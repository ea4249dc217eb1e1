//! For tests of applications that publish.

use pillarbox::{Event, Result};
use tokio_postgres::GenericClient;

use crate::connection::SCHEMA;
use crate::error::Db;
use crate::publish::Publisher;
use crate::reader::Decoder;

/// The events that the open transaction has published and not committed, in order, in the schema `pillarbox`.
///
/// A test publishes in a transaction, looks, and rolls back.
pub async fn published<C: GenericClient>(transaction: &C) -> Result<Vec<Event>> {
    published_in(transaction, SCHEMA).await
}

/// As [`published`], in another schema.
pub async fn published_in<C: GenericClient>(transaction: &C, schema: &str) -> Result<Vec<Event>> {
    let sql = Publisher::new(schema)?.fill_in(sql!(event, "published"));
    let read = async || -> Db<Vec<Event>> {
        let mut decoder = Decoder::default();
        let rows = transaction.query_typed(&sql, &[]).await?;
        rows.iter().map(|row| decoder.event(row)).collect()
    };
    Ok(read().await?)
}
