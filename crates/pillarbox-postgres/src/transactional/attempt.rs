use std::collections::HashSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use pillarbox::sink::Outcome;
use pillarbox::store::{Abort, ClaimPlace, ClaimedDelivery};
use pillarbox::{Delivery, Failure, Position};

use crate::Schema;
use crate::ownership::transaction_name;

/// How much longer than this process the server waits. It ends the transaction of a process that stands still.
const SERVER_GRACE: Duration = Duration::from_secs(1);

/// How long the end of a transaction may take before its connection is given up.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Ends the statement of a session, unless that has gone on to something else.
pub(super) const CANCEL: &str = sql!(transaction, "cancel");

/// One transaction that is to be made.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) schema: &'a Schema,
    pub(super) place: ClaimPlace,
    pub(super) events: &'a [ClaimedDelivery],
    pub(super) limit: Duration,
}

impl Job<'_> {
    /// How long a statement, and the handler between two, may take, in milliseconds.
    pub(super) fn server_limit(&self) -> String {
        (self.limit + SERVER_GRACE).as_millis().min(i32::MAX as u128).to_string()
    }

    /// The `application_name` of the transaction.
    pub(super) fn name(&self) -> String {
        transaction_name(self.schema.name(), self.place.instance)
    }
}

/// Where connections for transactions come from, and which function is called in them.
pub(super) trait Source: Send + Sync + 'static {
    /// A connection that is used for nothing else until it is dropped.
    type Lent: Send + 'static;
    /// A transaction on it.
    type Session<'a>: Session
    where
        Self: 'a;

    fn lend(&self, schema: &Schema) -> impl Future<Output = Result<Self::Lent, Failure>> + Send;

    /// Begins a transaction that may write and is read committed.
    fn begin<'a>(&'a self, lent: &'a mut Self::Lent)
    -> impl Future<Output = Result<Self::Session<'a>, Failure>> + Send;

    /// Lets the next event of each key be claimed; whether it was done.
    fn promote(&self, lent: &mut Self::Lent, job: &Job<'_>, keys: &[String]) -> impl Future<Output = bool> + Send;

    /// Waits until the server has answered everything; whether the connection still works.
    fn settle(&self, lent: &mut Self::Lent) -> impl Future<Output = bool> + Send;

    /// Whether the connection is known to be lost.
    fn is_closed(lent: &Self::Lent) -> bool;

    /// Ends the statement that a session works on, by another one.
    fn cancel(&self, backend: i32, name: &str) -> impl Future<Output = ()> + Send;

    /// Takes back a connection that works and has no transaction open. `cancelled`: a statement on it was.
    fn give_back(&self, lent: Self::Lent, cancelled: bool);
}

/// An open transaction.
pub(super) trait Session: Send {
    /// Sets what ends with the transaction, and asks which events are still this instance's to handle; with the server's process.
    fn claims(&mut self, job: &Job<'_>) -> impl Future<Output = Result<(i32, HashSet<Position>), Failure>> + Send;

    /// Calls the handler.
    fn call(&mut self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ends the claims; the key of each that was still there.
    fn end(
        &mut self,
        job: &Job<'_>,
        ours: &[&ClaimedDelivery],
    ) -> impl Future<Output = Result<Vec<Option<String>>, Failure>> + Send;

    /// Whether the connection still works.
    fn lives(&mut self) -> impl Future<Output = bool> + Send;

    fn commit(self) -> impl Future<Output = Result<(), Abort>> + Send;
}

/// What a transaction made of its events.
struct Ended {
    outcomes: Vec<Outcome>,
    /// The keys whose next event may be claimed now.
    keys: Vec<String>,
}

/// One transaction, from taking a connection to giving it back.
pub(super) async fn attempt<S: Source>(source: &Arc<S>, job: Job<'_>) -> Result<Vec<Outcome>, Abort> {
    let silent = |_| Abort::Unreachable(Failure::sink("PostgreSQL did not answer to a new connection"));
    let lent = tokio::time::timeout(job.limit, source.lend(job.schema)).await.map_err(silent)?;
    let lent = Some(lent.map_err(Abort::Unreachable)?);
    let mut loan = Loan { lent, backend: 0, name: job.name(), source: source.clone() };
    match run(&mut loan, &**source, &job).await {
        Ok(Some(ended)) => {
            if ended.keys.is_empty() || loan.promote(&job, &ended.keys).await {
                loan.give_back(false);
            }
            Ok(ended.outcomes)
        }
        Ok(None) => {
            loan.roll_back(true).await;
            Err(Abort::too_long(job.limit))
        }
        Err(abort) => {
            loan.roll_back(false).await;
            Err(abort)
        }
    }
}

/// None: it took too long.
async fn run<S: Source>(loan: &mut Loan<S>, source: &S, job: &Job<'_>) -> Result<Option<Ended>, Abort> {
    let Loan { lent, backend, .. } = loan;
    let lent = lent.as_mut().expect("it is lent until the attempt is over");
    let work = async {
        let mut session = source.begin(lent).await.map_err(Abort::Unreachable)?;
        let ended = work(&mut session, backend, job).await?;
        Ok((session, ended))
    };
    let Ok(worked) = tokio::time::timeout(job.limit, work).await else { return Ok(None) };
    let (session, ended) = worked?;
    // Without an answer nobody knows.
    tokio::time::timeout(END_TIMEOUT, session.commit()).await.unwrap_or(Err(Abort::NotTried))?;
    Ok(Some(ended))
}

/// Everything between BEGIN and COMMIT. The claims are ended last: if one was taken away meanwhile, nothing is committed, and a
/// statement whose failure the function ignored shows at the latest now.
async fn work<S: Session>(session: &mut S, backend: &mut i32, job: &Job<'_>) -> Result<Ended, Abort> {
    let (process, held) = session.claims(job).await.map_err(Abort::Unreachable)?;
    *backend = process;
    let is_held = |claimed: &ClaimedDelivery| held.contains(&claimed.delivery.position);
    let ours: Vec<&ClaimedDelivery> = job.events.iter().filter(|claimed| is_held(claimed)).collect();
    for claimed in &ours {
        if let Err(failure) = call(session, claimed.delivery.clone()).await {
            return Err(blame(session, failure).await);
        }
    }
    let keys = match session.end(job, &ours).await {
        Ok(keys) => keys,
        Err(failure) => return Err(blame(session, failure).await),
    };
    if keys.len() < ours.len() {
        return Err(Abort::NotTried);
    }
    let outcome = |claimed| if is_held(claimed) { Outcome::Delivered } else { Outcome::NotTried };
    Ok(Ended { outcomes: job.events.iter().map(outcome).collect(), keys: keys.into_iter().flatten().collect() })
}

async fn call<S: Session>(session: &mut S, delivery: Delivery) -> Result<(), Failure> {
    // The future is made inside, so that a function that panics before its first await is caught too.
    let guarded = AssertUnwindSafe(async { session.call(delivery).await });
    let called = guarded.catch_unwind().await;
    called.unwrap_or_else(|panic| Err(pillarbox::handler_panicked(pillarbox::panic_text(&*panic))))
}

/// A failure with which the connection was lost may have nothing to do with the event. The client itself notices a little later.
async fn blame<S: Session>(session: &mut S, failure: Failure) -> Abort {
    if session.lives().await {
        return Abort::Failed(failure);
    }
    Abort::Failed(Failure::unclear("connection", failure.message))
}

/// A connection that is lent for one transaction. Dropped in the middle of it, it cancels what the server is doing for it, and waits
/// until that is rolled back before anything else may use the connection.
struct Loan<S: Source> {
    lent: Option<S::Lent>,
    /// The server's process. 0: not known yet, and no statement of the handler has begun.
    backend: i32,
    name: String,
    source: Arc<S>,
}

impl<S: Source> Loan<S> {
    /// After the commit: a transaction that adds an event to a key at the same time does the same after its own, and the later one sees the
    /// other. Whether it was done; if not, the store finds the key by itself a little later.
    async fn promote(&mut self, job: &Job<'_>, keys: &[String]) -> bool {
        let Some(lent) = &mut self.lent else { return false };
        let promoted = self.source.promote(lent, job, keys);
        matches!(tokio::time::timeout(END_TIMEOUT, promoted).await, Ok(true))
    }

    fn give_back(mut self, cancelled: bool) {
        if let Some(lent) = self.lent.take() {
            self.source.give_back(lent, cancelled);
        }
    }

    /// Waits until the dropped transaction is rolled back, so that the next write of the claim does not have to.
    async fn roll_back(mut self, cancelled: bool) {
        if cancelled && self.backend != 0 {
            cancel(&*self.source, self.backend, &self.name).await;
        }
        let Some(lent) = &mut self.lent else { return };
        match tokio::time::timeout(END_TIMEOUT, self.source.settle(lent)).await {
            Ok(true) => self.give_back(cancelled),
            Ok(false) => drop(self.lent.take()),
            Err(_) => {}
        }
    }
}

impl<S: Source> Drop for Loan<S> {
    fn drop(&mut self) {
        let Some(mut lent) = self.lent.take() else { return };
        if S::is_closed(&lent) {
            return;
        }
        let (source, backend, name) = (self.source.clone(), self.backend, std::mem::take(&mut self.name));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if backend != 0 {
                    cancel(&*source, backend, &name).await;
                }
                let settled = tokio::time::timeout(END_TIMEOUT, source.settle(&mut lent)).await;
                tracing::debug!(?settled, "a transaction was given up");
            });
        }
    }
}

async fn cancel<S: Source>(source: &S, backend: i32, name: &str) {
    if tokio::time::timeout(END_TIMEOUT, source.cancel(backend, name)).await.is_err() {
        tracing::debug!("a statement could not be cancelled; the server ends it when it is over time");
    }
}
