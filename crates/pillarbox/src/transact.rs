use std::time::Duration;

use crate::{Attempt, BoxFuture, InstanceId, Outcome, SubscriptionId};

/// Handles claimed events of a queue and ends their claims in one transaction of the store's database: what the handler writes there,
/// the events that it publishes and the settlement are committed together, so that every effect happens exactly once.
///
/// Made by a store's crate around a function of the user's.
///
/// **What the answer means.** One [`Outcome`] an event, in order. `Delivered`: committed, the claim's row is gone, and the next of its
/// key may be claimed. `Failed`: rolled back. `NotTried`: rolled back because of another event of the same transaction or because the
/// claim was taken away, or nobody knows whether it was committed; the engine gives the claim back, which does nothing if the row is gone.
pub trait Transact: Send + Sync + 'static {
    /// How many events share a transaction, at most.
    fn batch_size(&self) -> usize {
        1
    }

    /// Handles events; each has a claim. `limit` is how long a transaction may take.
    fn transact(&self, place: ClaimPlace, events: Vec<Attempt>, limit: Duration) -> BoxFuture<'_, Vec<Outcome>>;
}

/// Whose claims they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimPlace {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The instance that made the claims.
    pub instance: InstanceId,
}
