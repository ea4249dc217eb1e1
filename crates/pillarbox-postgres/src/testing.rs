//! For tests of applications that publish.

use pillarbox::{Event, Result};
use tokio_postgres::GenericClient;

use crate::error::Db;
use crate::reader::Decoder;
use crate::schema::{DEFAULT, Schema};

/// The events that the open transaction has published and not committed, in order, in the schema `pillarbox`.
///
/// A test publishes in a transaction, looks, and rolls back.
pub async fn published<C: GenericClient>(transaction: &C) -> Result<Vec<Event>> {
    DEFAULT.published(transaction).await
}

impl Schema {
    /// See [`published()`].
    pub async fn published<C: GenericClient>(&self, transaction: &C) -> Result<Vec<Event>> {
        let sql = self.fill_in(sql!(event, "published"));
        let read = async || -> Db<Vec<Event>> {
            let mut decoder = Decoder::default();
            let rows = transaction.query_typed(&sql, &[]).await?;
            rows.iter().map(|row| decoder.event(row)).collect()
        };
        Ok(read().await?)
    }
}
