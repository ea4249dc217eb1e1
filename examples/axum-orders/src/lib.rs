//! A web service with axum and sqlx. `POST /orders` writes an order and an event in one transaction of the service's pool. A relay in the
//! same process calls two handlers: one books an invoice for each order, exactly once, in a transaction of the same pool; one confirms
//! what was booked. On SIGTERM the service answers the requests that it has begun, then drains the relay.
//!
//! ```sh
//! cargo run -p pillarbox-example-axum-orders -- postgres://user@host/database 127.0.0.1:3000
//! curl -d '{"customer": "ada@example.org", "cents": 4200}' -H 'content-type: application/json' 127.0.0.1:3000/orders
//! ```
mod confirmation;
mod invoice;
mod order;
mod service;

pub use confirmation::Mailbox;
pub use service::Service;
