use std::future::Future;
use std::time::Duration;

use crate::handler::{Fits, NeverFits, NoType};
use crate::{BoxFuture, ClaimId, Delivery, Failure, InstanceId, Outcome, SubscriptionId};

/// Handles claimed events of a queue and ends their claims in one transaction of the store's database: what the handler writes there,
/// the events that it publishes and the settlement are committed together, so that every effect happens exactly once.
///
/// Made by a store's crate around a function of the user's.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transactional handler",
    label = "expected the `Transactional` of a store's crate",
    note = "put your function into `pillarbox_postgres::Transactional` or `pillarbox_sqlite::Transactional`: they give it the transaction",
    note = "for a handler without a transaction use `handle` instead of `transact`"
)]
pub trait Transact: Send + Sync + 'static {
    /// How many events share a transaction, at most.
    fn batch_size(&self) -> usize {
        1
    }

    /// One transaction for events that each have a claim; it may take as long as `limit`. The answer is one [`Outcome`] per event, in
    /// order. `Delivered`: committed, the claim's row is gone, and the next of its key may be claimed. `NotTried`: the claim was taken
    /// away before. With an error nothing of it is left, unless the outcome is unknown.
    fn attempt<'a>(
        &'a self,
        place: ClaimPlace,
        events: &'a [ClaimedDelivery],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Outcome>, Abort>>;

    /// Handles events in transactions of [`Transact::batch_size`]. When one of several fails, each is handled again in a transaction of
    /// its own, so that it holds back its key and nothing else.
    fn transact(
        &self,
        place: ClaimPlace,
        events: Vec<ClaimedDelivery>,
        limit: Duration,
    ) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let mut outcomes = Vec::with_capacity(events.len());
            for together in events.chunks(self.batch_size().max(1)) {
                match self.attempt(place, together, limit).await {
                    Ok(settled) => outcomes.extend(settled),
                    Err(Abort::Failed(_)) if together.len() > 1 => {
                        for alone in together.chunks(1) {
                            let settled = self.attempt(place, alone, limit).await;
                            outcomes.extend(settled.unwrap_or_else(|abort| vec![abort.into()]));
                        }
                    }
                    Err(abort) => outcomes.resize(outcomes.len() + together.len(), abort.into()),
                }
            }
            outcomes
        })
    }
}

/// An event at a transactional handler, and the claim that its transaction ends.
#[derive(Debug, Clone)]
pub struct ClaimedDelivery {
    /// What the handler gets.
    pub delivery: Delivery,
    /// The claim. None: the event has no row in the queue, and is not tried.
    pub claim: Option<ClaimId>,
}

/// An async function of the user's that handles one event in a transaction of type `T`, for the store's crate that makes a [`Transact`]
/// of it.
///
/// It is implemented for `async fn book(transaction: T, delivery: Delivery) -> Result<(), Failure>`, for async closures with the same
/// arguments (their types written out) that capture nothing, and for what [`with_state`](crate::with_state) makes of a function that
/// takes a state first.
pub trait TransactionHandler<T>: Send + Sync + 'static {
    /// Handles one event in the transaction.
    fn handle(&self, transaction: T, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<T, F, Fut> TransactionHandler<T> for F
where
    F: Fn(T, Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, transaction: T, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        self(transaction, delivery)
    }
}

/// Every [`TransactionHandler`]: the bound that says in words what one is where a type is none. Nobody implements it. A store's crate
/// demands it before [`TransactionHandler`], with a `Kind` of its function's own, which the compiler finds out.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transactional handler for `{T}`",
    label = "expected an async function of the transaction and a `Delivery`",
    note = "a transactional handler is an `async fn` that takes a `{T}` and a `pillarbox::Delivery` and returns `Result<(), pillarbox::Failure>`; `?` turns any error into a `Failure`",
    note = "its future must be `Send`: hold no `Rc`, `RefCell` borrow or `MutexGuard` across an `.await`",
    note = "a handler that needs a state takes it first and is made by `pillarbox::with_state(state, function)`"
)]
pub trait IsTransactionHandler<T, Kind> {}

impl<T, H: TransactionHandler<T>> IsTransactionHandler<T, Fits> for H {}

// For no type; why it is here says `IsHandler`.
impl<T, H: NoType> IsTransactionHandler<T, NeverFits> for H {}

/// Whose claims they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimPlace {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The instance that made the claims.
    pub instance: InstanceId,
}

/// Why nothing of a transaction was committed.
#[derive(Debug, Clone, PartialEq)]
pub enum Abort {
    /// An event's handler failed, what it wrote was refused, or it all took too long.
    Failed(Failure),
    /// The database could not be asked or written.
    Unreachable(Failure),
    /// A claim was taken away, the caller no longer waits for it, or it is unknown whether it was committed. The engine gives the claim back,
    /// which does nothing if its row is gone.
    NotTried,
}

impl Abort {
    /// The transaction took longer than it may.
    pub fn too_long(limit: Duration) -> Self {
        let message = format!("the transaction took longer than {limit:?} and was rolled back");
        Abort::Failed(Failure { kind: "timeout", ..Failure::event(message) })
    }
}

impl From<Abort> for Outcome {
    fn from(abort: Abort) -> Self {
        match abort {
            Abort::Failed(failure) | Abort::Unreachable(failure) => Outcome::Failed(failure),
            Abort::NotTried => Outcome::NotTried,
        }
    }
}
