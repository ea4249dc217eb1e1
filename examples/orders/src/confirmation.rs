use std::sync::{Arc, Mutex, PoisonError};

use pillarbox::{Delivery, Failure, Handler, with_state};

use crate::OrderPlaced;

/// Where confirmations go; a stand-in for a mail server. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Mailbox(Arc<Mutex<Vec<String>>>);

impl Mailbox {
    /// What was sent so far.
    pub fn sent(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn send(&self, text: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }
}

/// The handler that confirms orders.
pub fn confirmations(mailbox: Mailbox) -> impl Handler {
    with_state(mailbox, confirm)
}

/// A customer without an address can never be written to, so that event is dead at once.
async fn confirm(mailbox: Mailbox, delivery: Delivery) -> Result<(), Failure> {
    let placed: OrderPlaced = delivery.json()?;
    if !placed.customer.contains('@') {
        return Err(Failure::permanent("the customer has no mail address"));
    }
    mailbox.send(format!("to {}: thank you for order {}", placed.customer, placed.order));
    Ok(())
}
