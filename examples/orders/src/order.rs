use anyhow::Result;
use pillarbox::NewEvent;
use rusqlite::{Transaction, params};
use serde::{Deserialize, Serialize};

/// The topic of all events about orders.
pub const TOPIC: &str = "orders";
/// The type of the event that says that an order was placed.
pub const PLACED: &str = "order.placed";

/// What a customer asks for.
#[derive(Debug, Clone)]
pub struct NewOrder {
    /// The customer's mail address.
    pub customer: String,
    /// The price.
    pub cents: i64,
}

/// The payload of [`PLACED`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderPlaced {
    /// The order's number.
    pub order: i64,
    /// The customer's mail address.
    pub customer: String,
    /// The price.
    pub cents: i64,
}

/// Writes an order and publishes that it was placed, in the caller's own transaction: both happen or neither does.
pub fn place_order(transaction: &Transaction<'_>, new: &NewOrder) -> Result<i64> {
    transaction.execute("insert into orders (customer, cents) values (?1, ?2)", params![new.customer, new.cents])?;
    let order = transaction.last_insert_rowid();
    let payload = OrderPlaced { order, customer: new.customer.clone(), cents: new.cents };
    // The customer is the key: what happens to one customer is told in order.
    let event = NewEvent::new(TOPIC, PLACED).key(&new.customer).json(&payload);
    pillarbox_sqlite::publish(transaction, &event)?;
    Ok(order)
}
