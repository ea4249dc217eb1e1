mod attempt;
mod client;
mod own;
mod pool;
#[cfg(feature = "sqlx")]
mod sqlx_pool;

use std::error::Error as StdError;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::Result;
use pillarbox::sink::{BoxFuture, Outcome};
use pillarbox::store::{Abort, ClaimPlace, ClaimedDelivery, IsTransactionHandler, Transact, TransactionHandler};
use tokio_postgres::Transaction;

use self::attempt::{Job, Source};
use self::own::Own;
use self::pool::Pool;
pub use self::pool::PooledClient;
use crate::Schema;
use crate::connection::PgConfig;

/// A function that handles events of a queue in a transaction of the log's own database, for
/// [`RelayBuilder::transact`](pillarbox::RelayBuilder::transact): what it writes there, the events that it publishes and the settlement
/// are committed together, so that each effect happens exactly once.
///
/// | where transactions run | made by | the function gets |
/// |---|---|---|
/// | a pool of `sqlx` | [`with_sqlx`](Transactional::with_sqlx) | `&mut sqlx::PgConnection` |
/// | a pool of `deadpool-postgres` or `bb8-postgres`, any `tokio_postgres::Client` | [`with_clients`](Transactional::with_clients) | `&tokio_postgres::Transaction<'_>` |
/// | connections of its own | [`new`](Transactional::new) | `&tokio_postgres::Transaction<'_>` |
///
/// The function gets the transaction (read committed) and must not end it. An error or a panic rolls it back and is retried by the
/// subscription's policy. So is a transaction that takes longer than `processing_timeout`: the function is cancelled and its statement
/// too. What it does elsewhere (a mail, a call of another service) is not part of the transaction and may happen again.
///
/// An `async fn` fits as it is. One that needs a state takes it first and is wrapped by [`with_state`](pillarbox::with_state). An async
/// closure fits if the types of its arguments are written out and it captures nothing.
///
/// ```
/// use pillarbox::admin::Operator;
/// use pillarbox::store::Store;
/// use pillarbox::{Delivery, Failure, NewEvent, Relay, Subscription, with_state};
/// use pillarbox_postgres::{Transactional, publish};
/// use tokio_postgres::Transaction;
///
/// #[derive(Clone)]
/// struct Rates { vat: i64 }
///
/// async fn book(rates: Rates, transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
///     let cents: i64 = delivery.json()?;
///     let sql = "insert into invoice (order_number, vat) values ($1, $2)";
///     transaction.execute(sql, &[&delivery.key, &(cents * rates.vat / 100)]).await?;
///     publish(transaction, &NewEvent::new("invoices", "invoice.booked")).await?;
///     Ok(())
/// }
///
/// async fn count(transaction: &Transaction<'_>, _: Delivery) -> Result<(), Failure> {
///     transaction.execute("update shop set orders = orders + 1", &[]).await?;
///     Ok(())
/// }
///
/// async fn run(store: impl Store + Operator, url: &str) -> pillarbox::Result<Relay> {
///     Relay::builder(store)
///         .transact(
///             Subscription::queue("bookkeeping").topics(["orders"]),
///             Transactional::new(url, with_state(Rates { vat: 19 }, book))?,
///         )
///         .transact(Subscription::queue("counting").topics(["orders"]), Transactional::new(url, count)?)
///         .start()
///         .await
/// }
/// ```
pub struct Transactional {
    runner: Box<dyn Runner>,
    schema: Schema,
    batch_size: usize,
}

impl Transactional {
    /// For the log at `postgres://…`, which is that of the relay, on connections of its own.
    ///
    /// They are made when they are needed, as many as functions run at once (the subscription's `workers`), with the application's own
    /// settings but `jit = off`: the URL's role needs its grants on the application's tables and those of a relay.
    pub fn new<H, Kind>(url: &str, handler: H) -> Result<Self>
    where
        H: for<'a> IsTransactionHandler<&'a Transaction<'a>, Kind> + for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        Ok(Self::with_config(url.parse()?, handler))
    }

    /// As [`new`](Transactional::new), with what the URL means.
    pub fn with_config<H, Kind>(config: PgConfig, handler: H) -> Self
    where
        H: for<'a> IsTransactionHandler<&'a Transaction<'a>, Kind> + for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        let schema = Schema::of(&config);
        Self::on(Own::new(config, handler), schema)
    }

    /// On clients of the application's own pool, which leads to the relay's database. `get` takes a client out of the pool; dropping
    /// that client gives it back. Keep as many clients free as the subscription has `workers`.
    ///
    /// The settings of the session stay as they are: what a transaction needs (its time limit and its name) ends with it. The role needs
    /// its grants on the application's tables and those of a relay.
    ///
    /// ```
    /// use pillarbox::{Delivery, Failure};
    /// use pillarbox_postgres::Transactional;
    /// use tokio_postgres::Transaction;
    ///
    /// async fn book(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    ///     transaction.execute("insert into invoice (order_number) values ($1)", &[&delivery.key]).await?;
    ///     Ok(())
    /// }
    ///
    /// fn bookkeeping(pool: deadpool_postgres::Pool) -> Transactional {
    ///     Transactional::with_clients(pool, |pool| async move { pool.get().await }, book)
    /// }
    /// ```
    pub fn with_clients<P, G, Fut, C, E, M, H, Kind>(pool: P, get: G, handler: H) -> Self
    where
        P: Clone + Send + Sync + 'static,
        G: Fn(P) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = std::result::Result<C, E>> + Send + 'static,
        C: PooledClient<M>,
        E: Into<Box<dyn StdError + Send + Sync>>,
        M: 'static,
        H: for<'a> IsTransactionHandler<&'a Transaction<'a>, Kind> + for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        Self::on(Pool::new(move || get(pool.clone()), handler), Schema::default())
    }

    /// On connections of the application's own pool, which leads to the relay's database. Keep as many connections free as the
    /// subscription has `workers`.
    ///
    /// The settings of the session stay as they are: what a transaction needs (its time limit and its name) ends with it. The role needs
    /// its grants on the application's tables and those of a relay.
    ///
    /// ```
    /// use pillarbox::{Delivery, Failure, NewEvent};
    /// use pillarbox_postgres::{Transactional, publish};
    /// use sqlx::{PgConnection, PgPool};
    ///
    /// async fn book(connection: &mut PgConnection, delivery: Delivery) -> Result<(), Failure> {
    ///     let insert = sqlx::query("insert into invoice (order_number) values ($1)").bind(delivery.key.as_deref());
    ///     insert.execute(&mut *connection).await?;
    ///     publish(&mut *connection, &NewEvent::new("invoices", "invoice.booked")).await?;
    ///     Ok(())
    /// }
    ///
    /// fn bookkeeping(pool: PgPool) -> Transactional {
    ///     Transactional::with_sqlx(pool, book)
    /// }
    /// ```
    #[cfg(feature = "sqlx")]
    pub fn with_sqlx<H, Kind>(pool: ::sqlx::PgPool, handler: H) -> Self
    where
        H: for<'a> IsTransactionHandler<&'a mut ::sqlx::PgConnection, Kind>
            + for<'a> TransactionHandler<&'a mut ::sqlx::PgConnection>,
    {
        Self::on(sqlx_pool::SqlxPool::new(pool, handler), Schema::default())
    }

    fn on<S: Source>(source: S, schema: Schema) -> Self {
        Transactional { runner: Box::new(Arc::new(source)), schema, batch_size: 1 }
    }

    /// The schema of the log, where the application's own pool leads to it. Default: `pillarbox`, or that of the URL.
    #[must_use]
    pub fn schema(mut self, schema: Schema) -> Self {
        self.schema = schema;
        self
    }

    /// So many events share a transaction, at most. Default: 1. When one of several fails, each is handled again in a transaction of its
    /// own, so that it holds back its key and nothing else.
    #[must_use]
    pub fn batch_size(mut self, events: usize) -> Self {
        self.batch_size = events.max(1);
        self
    }
}

impl Transact for Transactional {
    fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// On a connection that nothing else uses meanwhile.
    fn attempt<'a>(
        &'a self,
        place: ClaimPlace,
        events: &'a [ClaimedDelivery],
        limit: Duration,
    ) -> BoxFuture<'a, std::result::Result<Vec<Outcome>, Abort>> {
        self.runner.attempt(Job { schema: &self.schema, place, events, limit })
    }
}

/// What the compiler refuses: a function of another transaction, and a connection that nothing can be published on.
///
/// ```compile_fail,E0277
/// async fn book(_: &mut sqlx::PgConnection, _: pillarbox::Delivery) -> Result<(), pillarbox::Failure> { Ok(()) }
/// pillarbox_postgres::Transactional::new("postgres://localhost", book);
/// ```
///
/// ```compile_fail,E0277
/// async fn place(pool: sqlx::PgPool, event: pillarbox::NewEvent) {
///     pillarbox_postgres::publish(&pool, &event).await;
/// }
/// ```
#[cfg(doctest)]
struct Mistakes;

/// A [`Source`] of any type.
trait Runner: Send + Sync {
    fn attempt<'a>(&'a self, job: Job<'a>) -> BoxFuture<'a, std::result::Result<Vec<Outcome>, Abort>>;
}

impl<S: Source> Runner for Arc<S> {
    fn attempt<'a>(&'a self, job: Job<'a>) -> BoxFuture<'a, std::result::Result<Vec<Outcome>, Abort>> {
        Box::pin(attempt::attempt(self, job))
    }
}
