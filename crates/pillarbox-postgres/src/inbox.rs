use std::time::Duration;

use pillarbox::Result;
use pillarbox::admin::retention::at_least;
use pillarbox::admin::{PrunePolicy, Pruned};
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::client::PgClient;
use crate::connection::Session;
use crate::error::Db;
use crate::schema::{DEFAULT, Schema};

/// The longest age: a hundred years, which means for ever.
const AGE_MAX: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Accepts an event in the receiver's own transaction: true the first time, and then the effect belongs in the same transaction;
/// false if `consumer` has accepted this id before.
///
/// A second transaction that accepts the same id at the same time waits for the first to end, and accepts it if that was rolled back.
/// Under repeatable read or serializable it fails with a serialization failure instead if the first commits.
/// Ids are remembered for [`PrunePolicy::inbox`], 30 days by default.
///
/// With sqlx (feature `sqlx`), pass `&mut *transaction`. For a log that is not in the schema `pillarbox` use [`Schema::accept`].
///
/// ```no_run
/// # async fn receive(client: &mut tokio_postgres::Client, id: uuid::Uuid) -> Result<(), Box<dyn std::error::Error>> {
/// let transaction = client.transaction().await?;
/// if pillarbox_postgres::accept(&transaction, "billing", id).await? {
///     transaction.execute("update account set balance = balance + 1", &[]).await?;
/// }
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
pub async fn accept<C: PgClient>(transaction: C, consumer: &str, id: Uuid) -> Result<bool> {
    DEFAULT.accept(transaction, consumer, id).await
}

impl Schema {
    /// See [`accept()`].
    pub async fn accept<C: PgClient>(&self, transaction: C, consumer: &str, id: Uuid) -> Result<bool> {
        transaction.accept(self, consumer, id).await
    }
}

pub(crate) async fn insert<C: GenericClient>(transaction: &C, schema: &Schema, consumer: &str, id: Uuid) -> Db<bool> {
    let sql = schema.fill_in(sql!(inbox, "accept"));
    let rows = transaction.query_typed(&sql, &[(&consumer, Type::TEXT), (&id, Type::UUID)]).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.unwrap_or_default())
}

/// Removes a slice of what was accepted long ago.
pub(crate) async fn prune(session: &Session, policy: &PrunePolicy, pruned: &mut Pruned) -> Db<()> {
    let limit = session.query_one(sql!(inbox, "keep"), &[]).await?;
    let Some(age) = at_least(policy.inbox, limit.try_get(0)?) else { return Ok(()) };
    let age_ms = age.min(AGE_MAX).as_millis() as f64;
    let slice = i64::try_from(policy.slice.max(1)).unwrap_or(i64::MAX);
    let sql = session.statement(sql!(inbox, "prune")).await?;
    pruned.inbox = session.execute(&sql, &[&age_ms, &slice]).await?;
    pruned.more |= pruned.inbox as i64 == slice;
    Ok(())
}
