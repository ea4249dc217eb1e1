use pillarbox::{Delivery, Failure, NewEvent};
use pillarbox_postgres::publish;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

use crate::order::OrderPlaced;

pub(crate) const TOPIC: &str = "invoices";

/// The event of an invoice.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InvoiceBooked {
    pub(crate) invoice: i64,
    pub(crate) customer: String,
}

/// Books the invoice of an order. The invoice, its event and the end of the order's event are committed together: nothing in the table
/// keeps an order from having two invoices, and none gets two.
pub(crate) async fn book(connection: &mut PgConnection, delivery: Delivery) -> Result<(), Failure> {
    let OrderPlaced { order, customer, cents } = delivery.json()?;
    let insert = sqlx::query_scalar("insert into invoice (order_id, cents) values ($1, $2) returning id");
    let invoice: i64 = insert.bind(order).bind(cents).fetch_one(&mut *connection).await?;
    let event = NewEvent::new(TOPIC, "invoice.booked")
        .key(&customer)
        .json(&InvoiceBooked { invoice, customer: customer.clone() });
    publish(&mut *connection, &event).await?;
    Ok(())
}
