use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::sink::{BoxFuture, Outcome};
use pillarbox::store::{Abort, ClaimEnd, ClaimFate, ClaimPlace, ClaimedDelivery, Transact};
use pillarbox::{Delivery, Error, ErrorKind, Failure, Result, Timestamp};
use rusqlite::{Connection, InterruptHandle, Transaction};
use tokio::sync::oneshot;

use crate::connection::{Purpose, begin, open, prepare};
use crate::error::{Db, DbError};
use crate::publish::commit;
use crate::queue::end_claim;
use crate::worker::Worker;

/// How often a statement that runs over time is interrupted: the next one of the same transaction need not have begun before.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(10);

type Function = dyn Fn(&Transaction<'_>, Delivery) -> std::result::Result<(), Failure> + Send + Sync;

/// A function that handles events of a queue in a transaction of the log's own database, for
/// [`RelayBuilder::transact`](pillarbox::RelayBuilder::transact): what it writes there, the events that it publishes and the settlement
/// are committed together, so that each effect happens exactly once.
///
/// The function gets the transaction (`BEGIN IMMEDIATE`, `synchronous = full`) and must not end it. It runs on a thread of its own, one
/// transaction after the other, and no other connection can write to the file meanwhile: keep it short. An error or a panic rolls it back and is
/// retried by the subscription's policy. So is a transaction that takes longer than `processing_timeout`: its statements are
/// interrupted, but code that is busy with something else cannot be stopped and is waited for.
///
/// ```
/// use pillarbox::{Delivery, Failure, NewEvent, Relay, Subscription};
/// use pillarbox_sqlite::{SqliteStore, Transactional, publish};
/// use rusqlite::Transaction;
///
/// fn book(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
///     transaction.execute("insert into invoice (order_number) values (?1)", [&delivery.key])?;
///     publish(transaction, &NewEvent::new("invoices", "invoice.booked"))?;
///     Ok(())
/// }
///
/// async fn run(path: &str) -> pillarbox::Result<Relay> {
///     let bookkeeping = Subscription::queue("bookkeeping").topics(["orders"]);
///     Relay::builder(SqliteStore::open(path)?).transact(bookkeeping, Transactional::new(path, book)?).start().await
/// }
/// ```
pub struct Transactional {
    writer: Worker<Writer>,
    interrupt: InterruptHandle,
    batch_size: usize,
}

impl Transactional {
    /// For the log in the file at `path`, which is that of the relay.
    pub fn new<F>(path: impl AsRef<Path>, function: F) -> Result<Self>
    where
        F: Fn(&Transaction<'_>, Delivery) -> std::result::Result<(), Failure> + Send + Sync + 'static,
    {
        Self::run_on(open(path.as_ref(), Purpose::Durable)?, function)
    }

    /// On a connection of the application's own, opened on the relay's file: with its functions, its attached databases, its encryption.
    /// It is the handler's alone from now on. It gets a busy timeout, `synchronous = full`, a cache of prepared statements, and query plans
    /// that do not depend on bound values.
    ///
    /// ```
    /// use pillarbox::{Delivery, Failure};
    /// use pillarbox_sqlite::Transactional;
    /// use rusqlite::{Connection, Transaction};
    ///
    /// fn book(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    ///     transaction.execute("insert into invoices.invoice (order_number) values (?1)", [&delivery.key])?;
    ///     Ok(())
    /// }
    ///
    /// fn bookkeeping() -> Result<Transactional, Box<dyn std::error::Error>> {
    ///     let connection = Connection::open("app.db")?;
    ///     connection.execute("attach 'invoices.db' as invoices", [])?;
    ///     Ok(Transactional::with_connection(connection, book)?)
    /// }
    /// ```
    ///
    /// A transaction over attached files in WAL mode is atomic for each file alone if the power fails in the middle of its commit; keep the
    /// effects that must happen exactly once in the file of the log.
    pub fn with_connection<F>(connection: Connection, function: F) -> Result<Self>
    where
        F: Fn(&Transaction<'_>, Delivery) -> std::result::Result<(), Failure> + Send + Sync + 'static,
    {
        prepare(&connection, Purpose::Durable)?;
        Self::run_on(connection, function)
    }

    fn run_on<F>(connection: Connection, function: F) -> Result<Self>
    where
        F: Fn(&Transaction<'_>, Delivery) -> std::result::Result<(), Failure> + Send + Sync + 'static,
    {
        let interrupt = connection.get_interrupt_handle();
        let writer = Writer { connection, function: Box::new(function) };
        Ok(Transactional { writer: Worker::spawn("pillarbox transactions", writer)?, interrupt, batch_size: 1 })
    }

    /// So many events share a transaction, at most. Default: 1. When one of several fails, each is handled again in a transaction of its
    /// own, so that it holds back its key and nothing else.
    #[must_use]
    pub fn batch_size(mut self, events: usize) -> Self {
        self.batch_size = events.max(1);
        self
    }

    /// Interrupts a transaction that takes too long, until it has ended.
    async fn watch(&self, run: &Run, has_begun: oneshot::Receiver<()>, limit: Duration) -> std::convert::Infallible {
        if has_begun.await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(limit).await;
        loop {
            run.interrupt(&self.interrupt);
            tokio::time::sleep(INTERRUPT_INTERVAL).await;
        }
    }
}

impl Transact for Transactional {
    fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Behind those that were asked for earlier.
    fn attempt<'a>(
        &'a self,
        place: ClaimPlace,
        events: &'a [ClaimedDelivery],
        limit: Duration,
    ) -> BoxFuture<'a, std::result::Result<Vec<Outcome>, Abort>> {
        Box::pin(async move {
            let (begun, has_begun) = oneshot::channel();
            let (events, run) = (events.to_vec(), Arc::new(Run::default()));
            let running = run.clone();
            let job = self.writer.run(move |writer| Ok(writer.attempt(place, &events, limit, begun, &running)));
            tokio::select! {
                answer = job => answer.unwrap_or_else(|error| Err(unreachable(error))),
                never = self.watch(&run, has_begun, limit) => match never {},
            }
        })
    }
}

/// Whether a transaction is running. The next one cannot begin before this says that it is not, so no interrupt meets another.
#[derive(Default)]
struct Run(Mutex<bool>);

impl Run {
    fn running(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn interrupt(&self, handle: &InterruptHandle) {
        let running = self.running();
        if *running {
            handle.interrupt();
        }
    }
}

/// What runs on the thread.
struct Writer {
    connection: Connection,
    function: Box<Function>,
}

impl Writer {
    fn attempt(
        &self,
        place: ClaimPlace,
        events: &[ClaimedDelivery],
        limit: Duration,
        begun: oneshot::Sender<()>,
        run: &Run,
    ) -> std::result::Result<Vec<Outcome>, Abort> {
        let transaction = begin(&self.connection).map_err(unreachable)?;
        let started = Instant::now();
        *run.running() = true;
        // Whoever asked has gone: the relay stops, or what it claimed is another's now.
        let worked = match begun.send(()) {
            Ok(()) => self.work(&transaction, place, events),
            Err(()) => Err(Abort::NotTried),
        };
        *run.running() = false;
        if started.elapsed() >= limit {
            return Err(Abort::too_long(limit));
        }
        let outcomes = worked?;
        commit(transaction).map_err(refused_commit)?;
        Ok(outcomes)
    }

    /// Everything between BEGIN and COMMIT. No other connection can write: a claim that is there at the beginning is there at the end.
    fn work(
        &self,
        transaction: &Transaction<'_>,
        place: ClaimPlace,
        events: &[ClaimedDelivery],
    ) -> std::result::Result<Vec<Outcome>, Abort> {
        let mut outcomes = Vec::with_capacity(events.len());
        for claimed in events {
            if !end(transaction, place, claimed).map_err(unreachable)? {
                outcomes.push(Outcome::NotTried);
                continue;
            }
            self.call(transaction, claimed.delivery.clone()).map_err(Abort::Failed)?;
            // SQLite itself rolls back after some errors; what the function did after that was not in the transaction.
            if transaction.is_autocommit() {
                let message =
                    "the transaction has ended inside the handler; it must neither end it nor ignore an error";
                return Err(Abort::Failed(Failure::event(message)));
            }
            outcomes.push(Outcome::Delivered);
        }
        Ok(outcomes)
    }

    fn call(&self, transaction: &Transaction<'_>, delivery: Delivery) -> std::result::Result<(), Failure> {
        let called = std::panic::catch_unwind(AssertUnwindSafe(|| (self.function)(transaction, delivery)));
        called.unwrap_or_else(|panic| Err(pillarbox::handler_panicked(pillarbox::panic_text(&*panic))))
    }
}

fn unreachable(error: impl Into<DbError>) -> Abort {
    Abort::Unreachable(Failure::sink(Error::from(error.into()).to_string()))
}

fn refused_commit(error: Error) -> Abort {
    match error.kind() {
        ErrorKind::Invalid => Abort::Failed(error.into()),
        // If it was committed all the same, the claim is gone, and giving it back does nothing.
        _ => Abort::Unreachable(Failure::sink(error.to_string())),
    }
}

/// Ends a claim, if it is still this instance's, and lets the next event of its key be claimed.
fn end(transaction: &Transaction<'_>, place: ClaimPlace, claimed: &ClaimedDelivery) -> Db<bool> {
    let Some(claim) = claimed.claim else { return Ok(false) };
    let (subscription, position) = (place.subscription, claimed.delivery.position);
    let end = ClaimEnd { subscription, position, claim, fate: ClaimFate::Done };
    end_claim(transaction, place.instance, &end, Timestamp::now())
}
