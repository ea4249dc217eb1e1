use std::collections::HashSet;

use ::sqlx::pool::PoolConnection;
use ::sqlx::postgres::{PgDatabaseError, PgSeverity};
use ::sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Postgres, Row, Transaction};
use pillarbox::sink::BoxFuture;
use pillarbox::store::{Abort, ClaimedDelivery, TransactionHandler};
use pillarbox::{Delivery, Failure, Position};

use super::attempt::{CANCEL, Job, Session, Source};
use super::client::claims_of;
use super::pool::CANCELLER_TIMEOUT;
use crate::Schema;
use crate::publish::on_sqlx::failed;

const BEGIN: &str = "begin isolation level read committed read write";

/// A handler of any type.
trait Function: Send + Sync + 'static {
    fn call<'a>(&'a self, connection: &'a mut PgConnection, delivery: Delivery) -> BoxFuture<'a, Result<(), Failure>>;
}

impl<H: for<'a> TransactionHandler<&'a mut PgConnection>> Function for H {
    fn call<'a>(&'a self, connection: &'a mut PgConnection, delivery: Delivery) -> BoxFuture<'a, Result<(), Failure>> {
        Box::pin(self.handle(connection, delivery))
    }
}

/// Connections of the application's own pool.
pub(super) struct SqlxPool {
    pool: PgPool,
    function: Box<dyn Function>,
}

impl SqlxPool {
    pub(super) fn new<H>(pool: PgPool, handler: H) -> Self
    where
        H: for<'a> TransactionHandler<&'a mut PgConnection>,
    {
        SqlxPool { pool, function: Box::new(handler) }
    }
}

/// A transaction of `sqlx`.
pub(super) struct SqlxSession<'a> {
    transaction: Transaction<'a, Postgres>,
    function: &'a dyn Function,
}

impl SqlxSession<'_> {
    async fn held(&mut self, job: &Job<'_>) -> Result<(i32, HashSet<Position>), ::sqlx::Error> {
        let set = ::sqlx::query_scalar(sql!(transaction, "begin"));
        let process = set.bind(job.server_limit()).bind(job.name()).fetch_one(&mut *self.transaction).await?;
        let (positions, claims) = claims_of(job.events.iter());
        let sql = job.schema.fill_in(sql!(transaction, "claims"));
        let held = ::sqlx::query_scalar(AssertSqlSafe(sql)).bind(job.place.subscription.0).bind(job.place.instance.0);
        let held: Vec<Position> = held.bind(positions).bind(claims).fetch_all(&mut *self.transaction).await?;
        Ok((process, held.into_iter().collect()))
    }
}

impl Session for SqlxSession<'_> {
    async fn claims(&mut self, job: &Job<'_>) -> Result<(i32, HashSet<Position>), Failure> {
        self.held(job).await.map_err(unreachable)
    }

    async fn call(&mut self, delivery: Delivery) -> Result<(), Failure> {
        self.function.call(&mut self.transaction, delivery).await
    }

    async fn end(&mut self, job: &Job<'_>, ours: &[&ClaimedDelivery]) -> Result<Vec<Option<String>>, Failure> {
        let (positions, claims) = claims_of(ours.iter().copied());
        let sql = job.schema.fill_in(sql!(transaction, "end"));
        let end = ::sqlx::query(AssertSqlSafe(sql)).bind(job.place.subscription.0).bind(job.place.instance.0);
        let rows = end.bind(positions).bind(claims).fetch_all(&mut *self.transaction).await?;
        Ok(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
    }

    async fn lives(&mut self) -> bool {
        self.transaction.ping().await.is_ok()
    }

    /// An error that PostgreSQL reports in place of a commit has rolled back; a connection that is lost says nothing.
    async fn commit(self) -> Result<(), Abort> {
        self.transaction.commit().await.map_err(|error| {
            let said = error.as_database_error().and_then(|said| said.try_downcast_ref::<PgDatabaseError>());
            match said.map(PgDatabaseError::severity) {
                Some(PgSeverity::Error) => Abort::Failed(error.into()),
                _ => Abort::NotTried,
            }
        })
    }
}

impl Source for SqlxPool {
    type Lent = PoolConnection<Postgres>;
    type Session<'a> = SqlxSession<'a>;

    async fn lend(&self, _: &Schema) -> Result<PoolConnection<Postgres>, Failure> {
        self.pool.acquire().await.map_err(unreachable)
    }

    async fn begin<'a>(&'a self, lent: &'a mut PoolConnection<Postgres>) -> Result<SqlxSession<'a>, Failure> {
        let transaction = (**lent).begin_with(BEGIN).await.map_err(unreachable)?;
        Ok(SqlxSession { transaction, function: &*self.function })
    }

    async fn promote(&self, lent: &mut PoolConnection<Postgres>, job: &Job<'_>, keys: &[String]) -> bool {
        let sql = job.schema.fill_in(sql!(transaction, "promote"));
        let promote = ::sqlx::query(AssertSqlSafe(sql)).bind(job.place.subscription.0).bind(keys.to_vec());
        promote.execute(&mut **lent).await.is_ok()
    }

    async fn settle(&self, lent: &mut PoolConnection<Postgres>) -> bool {
        lent.ping().await.is_ok()
    }

    fn is_closed(_: &PoolConnection<Postgres>) -> bool {
        false
    }

    async fn cancel(&self, backend: i32, name: &str) {
        let canceller = tokio::time::timeout(CANCELLER_TIMEOUT, self.pool.acquire()).await;
        let Ok(Ok(mut canceller)) = canceller else {
            tracing::debug!(
                "the pool has no connection to cancel a statement by; the server ends it when it is over time"
            );
            return;
        };
        let cancel = ::sqlx::query(CANCEL).bind(backend).bind(name.to_owned()).persistent(false);
        if let Err(error) = cancel.execute(&mut *canceller).await {
            tracing::debug!(%error, "a statement could not be cancelled; the server ends it when it is over time");
        }
    }

    /// The pool takes it back when it is dropped.
    fn give_back(&self, lent: PoolConnection<Postgres>, _: bool) {
        drop(lent);
    }
}

fn unreachable(error: ::sqlx::Error) -> Failure {
    Failure::sink(failed(error).to_string())
}
