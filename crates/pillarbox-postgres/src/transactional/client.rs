use std::collections::HashSet;

use futures_util::future;
use pillarbox::sink::BoxFuture;
use pillarbox::store::{Abort, ClaimedDelivery, TransactionHandler};
use pillarbox::{Delivery, Failure, Position};
use tokio_postgres::error::Severity;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient, IsolationLevel, Row, Statement, Transaction};

use super::attempt::{Job, Session};
use crate::Schema;
use crate::error::{Db, DbError};

/// A handler of any type.
pub(super) trait Function: Send + Sync + 'static {
    fn call<'a>(&'a self, transaction: &'a Transaction<'a>, delivery: Delivery) -> BoxFuture<'a, Result<(), Failure>>;
}

impl<H: for<'a> TransactionHandler<&'a Transaction<'a>>> Function for H {
    fn call<'a>(&'a self, transaction: &'a Transaction<'a>, delivery: Delivery) -> BoxFuture<'a, Result<(), Failure>> {
        Box::pin(self.handle(transaction, delivery))
    }
}

/// A statement with the types of its parameters.
struct Sql {
    text: String,
    types: &'static [Type],
    /// None on a connection that may be behind a pooler, where a prepared statement may be another server's.
    prepared: Option<Statement>,
}

impl Sql {
    async fn query(
        &self,
        client: &impl GenericClient,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        match &self.prepared {
            Some(statement) => client.query(statement, values).await,
            None => {
                let typed: Vec<_> = values.iter().copied().zip(self.types.iter().cloned()).collect();
                client.query_typed(&self.text, &typed).await
            }
        }
    }
}

/// The statements around a handler.
pub(super) struct Statements {
    begin: Sql,
    claims: Sql,
    end: Sql,
    promote: Sql,
}

impl Statements {
    /// For any connection.
    pub(super) fn unprepared(schema: &Schema) -> Self {
        let sql = |text, types| Sql { text: schema.fill_in(text), types, prepared: None };
        const CLAIMS: &[Type] = &[Type::INT8, Type::INT8, Type::INT8_ARRAY, Type::INT8_ARRAY];
        Statements {
            begin: sql(sql!(transaction, "begin"), &[Type::TEXT, Type::TEXT]),
            claims: sql(sql!(transaction, "claims"), CLAIMS),
            end: sql(sql!(transaction, "end"), CLAIMS),
            promote: sql(sql!(transaction, "promote"), &[Type::INT8, Type::TEXT_ARRAY]),
        }
    }

    /// For this connection, which leads to the server itself.
    pub(super) async fn prepared(schema: &Schema, client: &Client) -> Db<Self> {
        let mut statements = Statements::unprepared(schema);
        let Statements { begin, claims, end, promote } = &mut statements;
        for sql in [begin, claims, end, promote] {
            sql.prepared = Some(client.prepare_typed(&sql.text, sql.types).await?);
        }
        Ok(statements)
    }

    pub(super) async fn promote(&self, client: &Client, job: &Job<'_>, keys: &[String]) -> bool {
        self.promote.query(client, &[&job.place.subscription.0, &keys]).await.is_ok()
    }
}

/// A transaction of `tokio-postgres`.
pub(super) struct ClientSession<'a> {
    transaction: Transaction<'a>,
    statements: &'a Statements,
    function: &'a dyn Function,
}

impl<'a> ClientSession<'a> {
    pub(super) async fn begin(
        client: &'a mut Client,
        statements: &'a Statements,
        function: &'a dyn Function,
    ) -> Result<Self, Failure> {
        let builder = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).read_only(false);
        let transaction = builder.start().await.map_err(unreachable)?;
        Ok(ClientSession { transaction, statements, function })
    }

    async fn held(&self, job: &Job<'_>) -> Db<(i32, HashSet<Position>)> {
        let (positions, claims) = claims_of(job.events.iter());
        let (server_limit, name) = (job.server_limit(), job.name());
        let settings: [&(dyn ToSql + Sync); 2] = [&server_limit, &name];
        let values: [&(dyn ToSql + Sync); 4] = [&job.place.subscription.0, &job.place.instance.0, &positions, &claims];
        let set = self.statements.begin.query(&self.transaction, &settings);
        let (begun, rows) = future::try_join(set, self.statements.claims.query(&self.transaction, &values)).await?;
        let process = begun.first().map(|row| row.try_get(0)).transpose()?.unwrap_or_default();
        let held = rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Db<_>>()?;
        Ok((process, held))
    }
}

impl Session for ClientSession<'_> {
    async fn claims(&mut self, job: &Job<'_>) -> Result<(i32, HashSet<Position>), Failure> {
        self.held(job).await.map_err(unreachable)
    }

    async fn call(&mut self, delivery: Delivery) -> Result<(), Failure> {
        self.function.call(&self.transaction, delivery).await
    }

    async fn end(&mut self, job: &Job<'_>, ours: &[&ClaimedDelivery]) -> Result<Vec<Option<String>>, Failure> {
        let (positions, claims) = claims_of(ours.iter().copied());
        let place = job.place;
        let values: [&(dyn ToSql + Sync); 4] = [&place.subscription.0, &place.instance.0, &positions, &claims];
        let rows = self.statements.end.query(&self.transaction, &values).await?;
        Ok(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
    }

    async fn lives(&mut self) -> bool {
        self.transaction.client().simple_query("").await.is_ok()
    }

    /// An error that PostgreSQL reports in place of a commit has rolled back; a connection that is lost says nothing.
    async fn commit(self) -> Result<(), Abort> {
        self.transaction.commit().await.map_err(|error| {
            match error.as_db_error().and_then(|said| said.parsed_severity()) {
                Some(Severity::Error) => Abort::Failed(error.into()),
                _ => Abort::NotTried,
            }
        })
    }
}

pub(super) async fn settle(client: &Client) -> bool {
    client.simple_query("").await.is_ok()
}

pub(super) fn unreachable(error: impl Into<DbError>) -> Failure {
    Failure::sink(pillarbox::Error::from(error.into()).to_string())
}

/// Positions and claims; one without a claim belongs to no instance.
pub(super) fn claims_of<'a>(events: impl Iterator<Item = &'a ClaimedDelivery>) -> (Vec<Position>, Vec<i64>) {
    events.filter_map(|claimed| Some((claimed.delivery.position, claimed.claim?.0))).unzip()
}
