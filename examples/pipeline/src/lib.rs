//! A chat in which one event leads to the next. Whoever posts a message writes it and publishes `message.posted` in one
//! transaction; a handler finds the mentions in it and publishes `mention.created` for each; the next puts them into the list of
//! the person and publishes `activity.created`; the last tells the person over their socket. Each handler works in a transaction
//! of its own, together with what it publishes: whatever crashes when, nothing is lost and nothing is done twice.
//!
//! ```sh
//! cargo run -p pillarbox-example-pipeline                # in a temporary SQLite file
//! cargo run -p pillarbox-example-pipeline -- chat.db     # in this one
//! cargo run -p pillarbox-example-pipeline -- postgres://user@host/database
//! ```
mod chat;
mod crowd;
mod message;
pub mod postgres;
mod socket;
mod sql;
pub mod sqlite;
mod stage;
mod tally;

pub use chat::Chat;
pub use crowd::{PEOPLE, post_at_once};
pub use message::{Activity, Mention, Message};
pub use socket::{Client, Figures, Sockets};
pub use tally::Tally;
