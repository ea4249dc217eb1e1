//! A small shop. Placing an order writes the order and an event in one transaction of the shop's own database; a relay
//! in the same process calls two handlers for it: one sends a confirmation, one keeps the revenue.
mod confirmation;
mod order;
mod revenue;
mod shop;

pub use confirmation::{Mailbox, confirmations};
pub use order::{NewOrder, OrderPlaced, PLACED, TOPIC, place_order};
pub use revenue::{Revenue, revenue};
pub use shop::{connect, prepare, relay};

/// The example of the README, compiled with the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
