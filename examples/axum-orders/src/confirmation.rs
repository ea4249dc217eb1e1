use std::sync::{Arc, Mutex, PoisonError};

use pillarbox::{Delivery, Failure};

use crate::invoice::InvoiceBooked;

/// Where confirmations go. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Mailbox(Arc<Mutex<Vec<String>>>);

impl Mailbox {
    /// What was sent.
    pub fn sent(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Confirms an invoice. A mail cannot be rolled back, so this is no transactional handler: after a crash it may be sent again.
pub(crate) async fn confirm(mailbox: Mailbox, delivery: Delivery) -> Result<(), Failure> {
    let InvoiceBooked { invoice, customer } = delivery.json()?;
    let text = format!("to {customer}: invoice {invoice}");
    println!("{text}");
    mailbox.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    Ok(())
}
