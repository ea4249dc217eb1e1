//! Two services with a database each. The shop places orders and publishes them in its own transaction; a relay in the same
//! process sends them over a socket; billing accepts each once and writes the invoice in its own transaction. Either may be
//! killed at any moment, any number of times: there is one invoice for each order.
//!
//! ```sh
//! cargo run -p pillarbox-example-two-services --bin billing -- billing.db 127.0.0.1:7070
//! cargo run -p pillarbox-example-two-services --bin shop -- shop.db 127.0.0.1:7070 100
//! ```
//!
//! In place of a file, a database may be `postgres://…`.
mod billing;
mod message;
mod shop;

pub use billing::Billing;
pub use message::Message;
pub use shop::{Sender, Shop};

/// The examples of the guide, compiled with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/exactly-once.md")]
struct Guide;

/// The example of the first guide on PostgreSQL, compiled with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/getting-started.md")]
struct FirstGuide;
