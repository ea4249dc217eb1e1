use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{FutureExt, future};
use pillarbox::sink::{Attempt, BoxFuture, Outcome};
use pillarbox::store::{Abort, ClaimPlace, Transact};
use pillarbox::{Event, Failure, Position, Result};
use tokio_postgres::error::Severity;
use tokio_postgres::{Client, IsolationLevel, Row, Statement, Transaction};

use crate::connection::PgConfig;
use crate::error::{Db, DbError};
use crate::ownership::{Role, session_name};

/// How much longer than this process the server waits. It ends the transaction of a process that stands still.
const SERVER_GRACE: Duration = Duration::from_secs(1);

/// How long the end of a transaction may take before its connection is given up.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Compiling a statement of ours takes longer than it takes.
const NO_COMPILING: &str = "set jit = off";

/// Ends a statement whose client has gone; not every server's system can tell.
const CHECK_CLIENT: &str = "set client_connection_check_interval = '2s'";

type Function =
    dyn for<'a> Fn(&'a Transaction<'a>, &'a Event) -> BoxFuture<'a, std::result::Result<(), Failure>> + Send + Sync;

/// A function that handles events of a queue in a transaction of the log's own database, for
/// [`RelayBuilder::transact`](pillarbox::RelayBuilder::transact): what it writes there, the events that it publishes and the settlement
/// are committed together, so that each effect happens exactly once.
///
/// The function gets the transaction (read committed) and must not end it. An error or a panic rolls it back and is retried by the
/// subscription's policy. So is a transaction that takes longer than `processing_timeout`: the function is cancelled and its statement
/// too. What it does elsewhere (a mail, a call of another service) is not part of the transaction and may happen again.
///
/// Connections are made when they are needed, as many as functions run at once (the subscription's `workers`), with the application's own
/// settings but `jit = off`: the URL's role needs its grants on the application's tables and those of a relay.
///
/// ```
/// use pillarbox::{Event, Failure, Mode, NewEvent, Relay, Subscription};
/// use pillarbox::admin::Operator;
/// use pillarbox::store::Store;
/// use pillarbox_postgres::{Transactional, publish};
/// use tokio_postgres::Transaction;
///
/// async fn book(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
///     let order = event.key.as_deref().unwrap_or_default();
///     transaction.execute("insert into invoice (order_number) values ($1)", &[&order]).await?;
///     publish(transaction, &NewEvent::new("invoices", "invoice.booked").key(order)).await?;
///     Ok(())
/// }
///
/// async fn run(store: impl Store + Operator, url: &str) -> pillarbox::Result<Relay> {
///     let bookkeeping = Subscription { mode: Mode::Queue, ..Subscription::new("bookkeeping").topics(["orders"]) };
///     Relay::builder(store)
///         .transact(bookkeeping, Transactional::new(url, |transaction, event| Box::pin(book(transaction, event)))?)
///         .start()
///         .await
/// }
/// ```
pub struct Transactional {
    config: Arc<PgConfig>,
    function: Box<Function>,
    batch_size: usize,
    idle: Mutex<Vec<Connection>>,
}

impl Transactional {
    /// For the log at `postgres://…`, which is that of the relay.
    pub fn new<F>(url: &str, function: F) -> Result<Self>
    where
        F: for<'a> Fn(&'a Transaction<'a>, &'a Event) -> BoxFuture<'a, std::result::Result<(), Failure>>
            + Send
            + Sync
            + 'static,
    {
        Ok(Self::with_config(url.parse()?, function))
    }

    /// As [`new`](Transactional::new), with what the URL means.
    pub fn with_config<F>(config: PgConfig, function: F) -> Self
    where
        F: for<'a> Fn(&'a Transaction<'a>, &'a Event) -> BoxFuture<'a, std::result::Result<(), Failure>>
            + Send
            + Sync
            + 'static,
    {
        Transactional { config: Arc::new(config), function: Box::new(function), batch_size: 1, idle: Mutex::default() }
    }

    /// So many events share a transaction, at most. Default: 1. When one of several fails, each is handled again in a transaction of its
    /// own, so that it holds back nobody but its key.
    #[must_use]
    pub fn batch_size(mut self, events: usize) -> Self {
        self.batch_size = events.max(1);
        self
    }

    /// None: it took too long.
    async fn run(
        &self,
        connection: &mut Connection,
        place: ClaimPlace,
        events: &[Attempt],
        limit: Duration,
    ) -> std::result::Result<Option<Ended>, Abort> {
        let (client, statements) = (&mut connection.client, &connection.statements);
        let work = async {
            let transaction = begin(client).await?;
            let ended = self.work(&transaction, statements, place, events, limit).await?;
            Ok((transaction, ended))
        };
        let Ok(worked) = tokio::time::timeout(limit, work).await else { return Ok(None) };
        let (transaction, ended) = worked?;
        commit(transaction).await?;
        Ok(Some(ended))
    }

    /// Everything between BEGIN and COMMIT. The claims are ended last: if one was taken away meanwhile, nothing is committed, and a
    /// statement whose failure the function ignored shows at the latest now.
    async fn work(
        &self,
        transaction: &Transaction<'_>,
        statements: &Statements,
        place: ClaimPlace,
        events: &[Attempt],
        limit: Duration,
    ) -> std::result::Result<Ended, Abort> {
        let held = statements.claims(transaction, place, events, limit).await.map_err(unreachable)?;
        let ours: Vec<&Attempt> = events.iter().filter(|attempt| held.contains(&attempt.event.position)).collect();
        for attempt in &ours {
            if let Err(failure) = self.call(transaction, &attempt.event).await {
                return Err(blame(transaction.client(), failure).await);
            }
        }
        let rows = match statements.end(transaction, place, &ours).await {
            Ok(rows) => rows,
            Err(error) => return Err(blame(transaction.client(), error.into()).await),
        };
        if rows.len() < ours.len() {
            return Err(Abort::NotTried);
        }
        let outcome = |attempt: &Attempt| match held.contains(&attempt.event.position) {
            true => Outcome::Delivered,
            false => Outcome::NotTried,
        };
        let keys = rows.iter().filter_map(|row| row.get(0)).collect();
        Ok(Ended { outcomes: events.iter().map(outcome).collect(), keys })
    }

    async fn call(&self, transaction: &Transaction<'_>, event: &Event) -> std::result::Result<(), Failure> {
        // The future is made inside, so that a function that panics before its first await is caught too.
        let guarded = AssertUnwindSafe(async { (self.function)(transaction, event).await });
        guarded.catch_unwind().await.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into());
            Err(Failure { kind: "panic", ..Failure::event(format!("the handler panicked: {text}")) })
        })
    }

    async fn connection(&self, limit: Duration) -> std::result::Result<Connection, Abort> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while let Some(connection) = idle() {
            if !connection.client.is_closed() {
                return Ok(connection);
            }
        }
        let connecting = tokio::time::timeout(limit, Connection::open(&self.config)).await;
        let silent = |_| Abort::Unreachable(Failure::sink("PostgreSQL did not answer to a new connection"));
        connecting.map_err(silent)?.map_err(unreachable)
    }

    fn give_back(&self, mut connection: Connection) {
        connection.busy = false;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }

    /// Waits until the dropped transaction is rolled back, so that whoever writes the claim next need not. A connection of which a
    /// statement was cancelled is not used again: the cancel may come late and hit the next one.
    async fn roll_back(&self, mut connection: Connection, cancelled: bool) {
        if cancelled {
            connection.cancel().await;
        }
        let answered = tokio::time::timeout(END_TIMEOUT, connection.client.simple_query("")).await;
        connection.busy = answered.is_err();
        if matches!(answered, Ok(Ok(_))) && !cancelled {
            self.give_back(connection);
        }
    }
}

impl Transact for Transactional {
    fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// On a connection of its own.
    fn attempt<'a>(
        &'a self,
        place: ClaimPlace,
        events: &'a [Attempt],
        limit: Duration,
    ) -> BoxFuture<'a, std::result::Result<Vec<Outcome>, Abort>> {
        Box::pin(async move {
            let mut connection = self.connection(limit).await?;
            connection.busy = true;
            match self.run(&mut connection, place, events, limit).await {
                Ok(Some(ended)) => {
                    if ended.keys.is_empty() || connection.promote(place, &ended.keys).await {
                        self.give_back(connection);
                    }
                    Ok(ended.outcomes)
                }
                Ok(None) => {
                    self.roll_back(connection, true).await;
                    Err(Abort::too_long(limit))
                }
                Err(abort) => {
                    self.roll_back(connection, false).await;
                    Err(abort)
                }
            }
        })
    }
}

/// What a transaction made of its events.
struct Ended {
    outcomes: Vec<Outcome>,
    /// The keys whose next event may be claimed now.
    keys: Vec<String>,
}

fn unreachable(error: impl Into<DbError>) -> Abort {
    Abort::Unreachable(Failure::sink(pillarbox::Error::from(error.into()).to_string()))
}

/// A failure with which the connection was lost may have nothing to do with the event. The client itself notices a little later.
async fn blame(client: &Client, failure: Failure) -> Abort {
    if client.simple_query("").await.is_err() {
        return Abort::Failed(Failure::unclear("connection", failure.message));
    }
    Abort::Failed(failure)
}

async fn begin(client: &mut Client) -> std::result::Result<Transaction<'_>, Abort> {
    let builder = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).read_only(false);
    builder.start().await.map_err(unreachable)
}

/// An error that PostgreSQL reports in place of a commit has rolled back; a connection that is lost says nothing.
async fn commit(transaction: Transaction<'_>) -> std::result::Result<(), Abort> {
    let Ok(committed) = tokio::time::timeout(END_TIMEOUT, transaction.commit()).await else {
        return Err(Abort::NotTried);
    };
    committed.map_err(|error| match error.as_db_error().and_then(|said| said.parsed_severity()) {
        Some(Severity::Error) => Abort::Failed(error.into()),
        _ => Abort::NotTried,
    })
}

/// A connection with what it has prepared. Dropped in the middle of a transaction, it cancels what the server is doing for it.
struct Connection {
    client: Client,
    statements: Statements,
    backend: i32,
    busy: bool,
    config: Arc<PgConfig>,
}

impl Connection {
    async fn open(config: &Arc<PgConfig>) -> Db<Self> {
        let client = connect(config).await?;
        if let Err(error) = client.batch_execute(CHECK_CLIENT).await {
            tracing::debug!(%error, "the server cannot tell when a client has gone");
        }
        let statements = Statements::prepare(&client, config).await?;
        let backend = client.query_one("select pg_backend_pid()", &[]).await?.try_get(0)?;
        Ok(Connection { client, statements, backend, busy: false, config: config.clone() })
    }

    async fn cancel(&self) {
        cancel(self.config.clone(), self.backend).await;
    }

    /// Lets the next event of each key be claimed. After the commit: whoever adds an event to a key at the same time does the same after
    /// his, and the later one sees the other. Whether it was done; if not, the store finds the key by itself a little later.
    async fn promote(&self, place: ClaimPlace, keys: &[String]) -> bool {
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&place.subscription.0, &keys];
        let promoted = self.client.execute(&self.statements.promote, &values);
        matches!(tokio::time::timeout(END_TIMEOUT, promoted).await, Ok(Ok(_)))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.busy || self.client.is_closed() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(cancel(self.config.clone(), self.backend));
        }
    }
}

async fn connect(config: &PgConfig) -> Db<Client> {
    let client = config.connect("pillarbox transaction").await?;
    client.batch_execute(NO_COMPILING).await?;
    Ok(client)
}

/// Ends the statement of a session by another one, which need not know how the first is encrypted.
async fn cancel(config: Arc<PgConfig>, backend: i32) {
    let cancel = async {
        let client = connect(&config).await?;
        client.execute("select pg_cancel_backend($1)", &[&backend]).await.map_err(DbError::from)?;
        Ok::<(), pillarbox::Error>(())
    };
    if let Ok(Err(error)) = tokio::time::timeout(END_TIMEOUT, cancel).await {
        tracing::debug!(%error, "a statement could not be cancelled; the server ends it when it is over time");
    }
}

struct Statements {
    config: Arc<PgConfig>,
    begin: Statement,
    claims: Statement,
    end: Statement,
    promote: Statement,
}

impl Statements {
    async fn prepare(client: &Client, config: &Arc<PgConfig>) -> Db<Self> {
        let fill_in = |sql: &str| sql.replace("@schema@", config.schema());
        Ok(Statements {
            config: config.clone(),
            begin: client.prepare(include_str!("sql/transaction_begin.sql")).await?,
            claims: client.prepare(&fill_in(include_str!("sql/transaction_claims.sql"))).await?,
            end: client.prepare(&fill_in(include_str!("sql/transaction_end.sql"))).await?,
            promote: client.prepare(&fill_in(include_str!("sql/transaction_promote.sql"))).await?,
        })
    }

    /// Which events are still this instance's to handle, in a transaction that the server ends if it takes too long.
    async fn claims(
        &self,
        transaction: &Transaction<'_>,
        place: ClaimPlace,
        events: &[Attempt],
        limit: Duration,
    ) -> Db<HashSet<Position>> {
        let server_limit = (limit + SERVER_GRACE).as_millis().min(i32::MAX as u128).to_string();
        let name = session_name(&self.config, place.instance, Role::Transaction);
        let (positions, claims) = claims_of(events.iter());
        let settings: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&server_limit, &name];
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
            [&place.subscription.0, &place.instance.0, &positions, &claims];
        let set = transaction.execute(&self.begin, &settings);
        let (_, rows) = future::try_join(set, transaction.query(&self.claims, &values)).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// Ends the claims; a row for each that was still there.
    async fn end(
        &self,
        transaction: &Transaction<'_>,
        place: ClaimPlace,
        events: &[&Attempt],
    ) -> std::result::Result<Vec<Row>, tokio_postgres::Error> {
        let (positions, claims) = claims_of(events.iter().copied());
        transaction.query(&self.end, &[&place.subscription.0, &place.instance.0, &positions, &claims]).await
    }
}

/// Positions and claims; one without a claim is nobody's.
fn claims_of<'a>(events: impl Iterator<Item = &'a Attempt>) -> (Vec<Position>, Vec<i64>) {
    events.filter_map(|attempt| Some((attempt.event.position, attempt.claim?.0))).unzip()
}
