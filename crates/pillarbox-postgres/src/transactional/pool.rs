use std::error::Error as StdError;
use std::future::Future;
use std::marker::PhantomData;
use std::ops::DerefMut;
use std::time::Duration;

use pillarbox::Failure;
use pillarbox::sink::BoxFuture;
use pillarbox::store::TransactionHandler;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use super::attempt::{CANCEL, Job, Source};
use super::client::{ClientSession, Function, Statements, settle};
use crate::Schema;

/// How long a cancel waits for another client of the pool. Where all are in use, the server ends the statement when it is over time.
pub(super) const CANCELLER_TIMEOUT: Duration = Duration::from_secs(1);

/// A client that a pool lends: anything that dereferences to `tokio_postgres::Client`, at once (`bb8-postgres`, `Box<Client>`) or by a
/// type of the pool's between them (`deadpool-postgres`). `M` says which, and is inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a client of `tokio-postgres`",
    label = "expected what dereferences mutably to `tokio_postgres::Client`",
    note = "a pool of `sqlx` goes to `Transactional::with_sqlx`"
)]
pub trait PooledClient<M>: Send + 'static {
    /// The client itself.
    fn client(&mut self) -> &mut Client;
}

/// Marks what dereferences to a client.
#[doc(hidden)]
#[derive(Debug)]
pub enum AtOnce {}

/// Marks what dereferences to what dereferences to a client.
#[doc(hidden)]
#[derive(Debug)]
pub enum Wrapped {}

impl<C> PooledClient<AtOnce> for C
where
    C: DerefMut<Target = Client> + Send + 'static,
{
    fn client(&mut self) -> &mut Client {
        self
    }
}

impl<C> PooledClient<Wrapped> for C
where
    C: DerefMut + Send + 'static,
    C::Target: DerefMut<Target = Client>,
{
    fn client(&mut self) -> &mut Client {
        self
    }
}

type Get<C> = dyn Fn() -> BoxFuture<'static, Result<C, Failure>> + Send + Sync;

/// Clients of the application's own pool.
pub(super) struct Pool<C, M> {
    get: Box<Get<C>>,
    function: Box<dyn Function>,
    marker: PhantomData<fn() -> M>,
}

impl<C: PooledClient<M>, M: 'static> Pool<C, M> {
    pub(super) fn new<G, Fut, E, H>(get: G, handler: H) -> Self
    where
        G: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<C, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>>,
        H: for<'a> TransactionHandler<&'a Transaction<'a>>,
    {
        let get = move || -> BoxFuture<'static, Result<C, Failure>> {
            let lent = get();
            Box::pin(async move { lent.await.map_err(|error| refused(Failure::from(error))) })
        };
        Pool { get: Box::new(get), function: Box::new(handler), marker: PhantomData }
    }
}

/// What a pool says when it lends nothing: no event's fault.
fn refused(said: Failure) -> Failure {
    Failure::sink(format!("the pool gave no connection: {}", said.message))
}

/// A client and what is said around a handler, in the log's schema.
pub(super) struct Lent<C> {
    client: C,
    statements: Statements,
}

impl<C: PooledClient<M>, M: 'static> Source for Pool<C, M> {
    type Lent = Lent<C>;
    type Session<'a> = ClientSession<'a>;

    async fn lend(&self, schema: &Schema) -> Result<Lent<C>, Failure> {
        let client = (self.get)().await?;
        Ok(Lent { client, statements: Statements::unprepared(schema) })
    }

    async fn begin<'a>(&'a self, lent: &'a mut Lent<C>) -> Result<ClientSession<'a>, Failure> {
        ClientSession::begin(lent.client.client(), &lent.statements, &*self.function).await
    }

    async fn promote(&self, lent: &mut Lent<C>, job: &Job<'_>, keys: &[String]) -> bool {
        lent.statements.promote(lent.client.client(), job, keys).await
    }

    async fn settle(&self, lent: &mut Lent<C>) -> bool {
        settle(lent.client.client()).await
    }

    fn is_closed(_: &Lent<C>) -> bool {
        false
    }

    async fn cancel(&self, backend: i32, name: &str) {
        let canceller = tokio::time::timeout(CANCELLER_TIMEOUT, (self.get)()).await;
        let Ok(Ok(mut canceller)) = canceller else {
            tracing::debug!("the pool has no client to cancel a statement by; the server ends it when it is over time");
            return;
        };
        let values = [(&backend as &(dyn tokio_postgres::types::ToSql + Sync), Type::INT4), (&name, Type::TEXT)];
        if let Err(error) = canceller.client().query_typed(CANCEL, &values).await {
            tracing::debug!(%error, "a statement could not be cancelled; the server ends it when it is over time");
        }
    }

    /// The pool takes it back when it is dropped.
    fn give_back(&self, lent: Lent<C>, _: bool) {
        drop(lent);
    }
}
