use std::sync::{Arc, Mutex, PoisonError};

use pillarbox::{Delivery, Failure, Handler};

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

/// The handler that confirms orders. A customer without an address can never be written to, so that event is dead at once.
pub fn confirmations(mailbox: Mailbox) -> impl Handler {
    move |event: Delivery| {
        let mailbox = mailbox.clone();
        async move {
            let placed: OrderPlaced = event.payload.json()?;
            if !placed.customer.contains('@') {
                return Err(Failure::permanent("the customer has no mail address"));
            }
            mailbox.send(format!("to {}: thank you for order {}", placed.customer, placed.order));
            Ok(())
        }
    }
}
