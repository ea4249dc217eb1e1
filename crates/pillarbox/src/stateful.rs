use std::future::Future;

use crate::{Delivery, Failure, Handler, TransactionHandler};

/// A function with a state that it gets a clone of at each call; made by [`with_state`].
#[derive(Debug, Clone)]
pub struct Stateful<S, F> {
    state: S,
    function: F,
}

/// A handler from a state and an async function that takes the state first: a pool, a client, or your own struct in an `Arc`. Each call
/// gets a clone.
///
/// What it makes is a [`Handler`] if the function takes the state and a [`Delivery`], and fits a store's `Transactional` if the
/// function takes the state, the transaction and a [`Delivery`]. For closures that are no transactional handlers,
/// [`RelayBuilder::handle_with`](crate::RelayBuilder::handle_with) is shorter.
///
/// ```
/// use std::sync::Arc;
/// use pillarbox::{Delivery, Failure, Handler, with_state};
///
/// struct Mailer { from: String }
///
/// async fn mail(mailer: Arc<Mailer>, delivery: Delivery) -> Result<(), Failure> {
///     let order: u64 = delivery.json()?;
///     println!("{} confirms order {order}", mailer.from);
///     Ok(())
/// }
///
/// fn mailing(mailer: Arc<Mailer>) -> impl Handler {
///     with_state(mailer, mail)
/// }
/// ```
pub fn with_state<S, F>(state: S, function: F) -> Stateful<S, F> {
    Stateful { state, function }
}

impl<S, F, Fut> Handler for Stateful<S, F>
where
    S: Clone + Send + Sync + 'static,
    F: Fn(S, Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        (self.function)(self.state.clone(), delivery)
    }
}

impl<T, S, F, Fut> TransactionHandler<T> for Stateful<S, F>
where
    S: Clone + Send + Sync + 'static,
    F: Fn(S, T, Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send,
{
    fn handle(&self, transaction: T, delivery: Delivery) -> impl Future<Output = Result<(), Failure>> + Send {
        (self.function)(self.state.clone(), transaction, delivery)
    }
}
