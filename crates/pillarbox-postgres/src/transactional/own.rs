use std::sync::{Arc, Mutex, PoisonError};

use pillarbox::Failure;
use pillarbox::store::TransactionHandler;
use tokio_postgres::{Client, Transaction};

use super::attempt::{CANCEL, Job, Source};
use super::client::{ClientSession, Function, Statements, settle, unreachable};
use crate::Schema;
use crate::connection::PgConfig;
use crate::error::{Db, DbError};

/// Compiling a statement of ours takes longer than it takes.
const NO_COMPILING: &str = "set jit = off";

/// Ends a statement whose client has gone; not every server's system can tell.
const CHECK_CLIENT: &str = "set client_connection_check_interval = '2s'";

/// Connections of a handler's own, by its log's URL.
pub(super) struct Own {
    config: Arc<PgConfig>,
    function: Box<dyn Function>,
    idle: Mutex<Vec<Connection>>,
}

impl Own {
    pub(super) fn new<H>(config: PgConfig, handler: H) -> Self
    where
        H: for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        Own { config: Arc::new(config), function: Box::new(handler), idle: Mutex::default() }
    }

    fn idle(&self) -> Option<Connection> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// A connection with what it has prepared.
pub(super) struct Connection {
    client: Client,
    statements: Statements,
}

impl Connection {
    async fn open(config: &PgConfig, schema: &Schema) -> Db<Self> {
        let client = connect(config).await?;
        if let Err(error) = client.batch_execute(CHECK_CLIENT).await {
            tracing::debug!(%error, "the server cannot tell when a client has gone");
        }
        let statements = Statements::prepared(schema, &client).await?;
        Ok(Connection { client, statements })
    }
}

async fn connect(config: &PgConfig) -> Db<Client> {
    let client = config.connect("pillarbox transaction").await?;
    client.batch_execute(NO_COMPILING).await?;
    Ok(client)
}

impl Source for Own {
    type Lent = Connection;
    type Session<'a> = ClientSession<'a>;

    async fn lend(&self, schema: &Schema) -> Result<Connection, Failure> {
        while let Some(connection) = self.idle() {
            if !connection.client.is_closed() {
                return Ok(connection);
            }
        }
        Connection::open(&self.config, schema).await.map_err(unreachable)
    }

    async fn begin<'a>(&'a self, lent: &'a mut Connection) -> Result<ClientSession<'a>, Failure> {
        ClientSession::begin(&mut lent.client, &lent.statements, &*self.function).await
    }

    async fn promote(&self, lent: &mut Connection, job: &Job<'_>, keys: &[String]) -> bool {
        lent.statements.promote(&lent.client, job, keys).await
    }

    async fn settle(&self, lent: &mut Connection) -> bool {
        settle(&lent.client).await
    }

    fn is_closed(lent: &Connection) -> bool {
        lent.client.is_closed()
    }

    /// Uses a new connection, which need not know how the first is encrypted.
    async fn cancel(&self, backend: i32, name: &str) {
        let cancelled = async {
            let client = connect(&self.config).await?;
            client.execute(CANCEL, &[&backend, &name]).await.map_err(DbError::from)
        };
        if let Err(error) = cancelled.await {
            let error = pillarbox::Error::from(error);
            tracing::debug!(%error, "a statement could not be cancelled; the server ends it when it is over time");
        }
    }

    /// A connection of which a statement was cancelled is not used again: the cancel may come late and hit the next one.
    fn give_back(&self, lent: Connection, cancelled: bool) {
        if !cancelled {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(lent);
        }
    }
}
