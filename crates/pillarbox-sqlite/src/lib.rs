//! The SQLite store of [Pillarbox](pillarbox): the log lives in the application's own database file.
//!
//! [`migrate()`] creates the schema, [`publish()`] writes an event in the caller's own transaction (or insert into
//! `pillarbox_event` from any language), and a [`SqliteStore`] is what a relay and the operators' commands work on.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("app.db");
//! pillarbox_sqlite::migrate(&path)?;
//! let mut connection = rusqlite::Connection::open(&path)?;
//! connection.execute("create table orders (id integer primary key, total integer)", [])?;
//!
//! let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
//! transaction.execute("insert into orders (total) values (42)", [])?;
//! let event = pillarbox::NewEvent::new("orders", "order.placed").key("1").json_text(r#"{"total": 42}"#);
//! pillarbox_sqlite::publish(&transaction, &event)?;
//! // Or the transaction's own commit; this one tells a relay in the same process at once.
//! pillarbox_sqlite::commit(transaction)?;
//! # Ok(())
//! # }
//! ```
#[macro_use]
mod sql;

mod connection;
#[cfg(feature = "counted")]
pub mod counted;
mod doorbell;
mod error;
mod home;
mod inbox;
mod journal;
mod migrate;
mod operator;
mod ownership;
mod publish;
mod queue;
mod reader;
mod recovery;
mod settle;
mod store;
pub mod testing;
mod transactional;
mod witness;
mod worker;

pub use doorbell::DOORBELL_INTERVAL;
pub use home::{adopt, fresh};
pub use inbox::accept;
pub use journal::{append, head, read};
pub use migrate::{Migrated, SCHEMA_VERSION, check, dump_schema, migrate, migrate_connection, print_sql};
pub use operator::{Maintained, PENDING_COUNT_MAX, WAL_BYTES_MAX};
pub use pillarbox::admin::{Limits, PAYLOAD_BYTES_MAX_HIGHEST};
pub use pillarbox::store::PAGE_BYTES_MAX;
pub use pillarbox::store::SchemaState;
pub use publish::{commit, publish, publish_all};
pub use store::SqliteStore;
pub use transactional::Transactional;
