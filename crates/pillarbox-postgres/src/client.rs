use std::future::Future;

use pillarbox::journal::Append;
use pillarbox::{Event, NewEvent, Result};
use tokio_postgres::GenericClient;
use uuid::Uuid;

use crate::Schema;
use crate::journal::Stretch;

/// What an application publishes and accepts on: its own connection, best inside a transaction.
///
/// | client | what to pass |
/// |---|---|
/// | `tokio-postgres`, `deadpool-postgres`, `bb8-postgres` | `&transaction`, a `tokio_postgres::Transaction` or `Client` (`&*transaction` if the pool has a type of its own around it) |
/// | `sqlx`, with the feature `sqlx` | `&mut *transaction`, a `sqlx::PgConnection`; `&mut transaction` does too |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a connection or transaction that `pillarbox_postgres` can publish on",
    label = "expected `&tokio_postgres::Transaction` or, with the feature `sqlx`, `&mut sqlx::PgConnection`",
    note = "for tokio-postgres pass `&transaction`, for deadpool-postgres `&*transaction`",
    note = "for sqlx turn on the feature `sqlx` of `pillarbox-postgres` and pass `&mut *transaction`",
    note = "for any other client use `EventSql::to_sql`"
)]
pub trait PgClient: sealed::Sealed + Send {
    #[doc(hidden)]
    fn publish(self, schema: &Schema, event: &NewEvent) -> impl Future<Output = Result<Uuid>> + Send;

    #[doc(hidden)]
    fn publish_all(self, schema: &Schema, events: &[NewEvent]) -> impl Future<Output = Result<Vec<Uuid>>> + Send;

    #[doc(hidden)]
    fn accept(self, schema: &Schema, consumer: &str, id: Uuid) -> impl Future<Output = Result<bool>> + Send;

    #[doc(hidden)]
    fn append(self, schema: &Schema, append: Append<'_>) -> impl Future<Output = Result<i64>> + Send;

    #[doc(hidden)]
    fn read_stream(self, schema: &Schema, stretch: Stretch<'_>) -> impl Future<Output = Result<Vec<Event>>> + Send;

    #[doc(hidden)]
    fn stream_version(self, schema: &Schema, stream: &str) -> impl Future<Output = Result<i64>> + Send;
}

mod sealed {
    pub trait Sealed {}
}

impl<C: GenericClient + Sync> sealed::Sealed for &C {}

impl<C: GenericClient + Sync> PgClient for &C {
    async fn publish(self, schema: &Schema, event: &NewEvent) -> Result<Uuid> {
        crate::publish::on_client::publish(self, schema, event).await
    }

    async fn publish_all(self, schema: &Schema, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        crate::publish::on_client::publish_all(self, schema, events).await
    }

    async fn accept(self, schema: &Schema, consumer: &str, id: Uuid) -> Result<bool> {
        Ok(crate::inbox::insert(self, schema, consumer, id).await?)
    }

    async fn append(self, schema: &Schema, append: Append<'_>) -> Result<i64> {
        crate::journal::on_client::append(self, schema, append).await
    }

    async fn read_stream(self, schema: &Schema, stretch: Stretch<'_>) -> Result<Vec<Event>> {
        Ok(crate::journal::on_client::read(self, schema, stretch).await?)
    }

    async fn stream_version(self, schema: &Schema, stream: &str) -> Result<i64> {
        Ok(crate::journal::on_client::version(self, schema, stream).await?)
    }
}

#[cfg(feature = "sqlx")]
mod on_sqlx {
    use ::sqlx::pool::PoolConnection;
    use ::sqlx::{PgConnection, Postgres, Transaction};
    use pillarbox::journal::Append;
    use pillarbox::{Event, NewEvent, Result};
    use uuid::Uuid;

    use super::{PgClient, sealed};
    use crate::Schema;
    use crate::journal::{Stretch, on_sqlx as journal};
    use crate::publish::on_sqlx;

    macro_rules! client {
        ($($kind:ty),*) => {$(
            impl sealed::Sealed for &mut $kind {}

            impl PgClient for &mut $kind {
                async fn publish(self, schema: &Schema, event: &NewEvent) -> Result<Uuid> {
                    on_sqlx::publish(self, schema, event).await
                }

                async fn publish_all(self, schema: &Schema, events: &[NewEvent]) -> Result<Vec<Uuid>> {
                    on_sqlx::publish_all(self, schema, events).await
                }

                async fn accept(self, schema: &Schema, consumer: &str, id: Uuid) -> Result<bool> {
                    on_sqlx::accept(self, schema, consumer, id).await
                }

                async fn append(self, schema: &Schema, append: Append<'_>) -> Result<i64> {
                    journal::append(self, schema, append).await
                }

                async fn read_stream(self, schema: &Schema, stretch: Stretch<'_>) -> Result<Vec<Event>> {
                    journal::read(self, schema, stretch).await
                }

                async fn stream_version(self, schema: &Schema, stream: &str) -> Result<i64> {
                    journal::version(self, schema, stream).await
                }
            }
        )*};
    }

    client!(PgConnection, Transaction<'_, Postgres>, PoolConnection<Postgres>);
}
