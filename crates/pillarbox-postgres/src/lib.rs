//! The PostgreSQL store of [Pillarbox](pillarbox): the log lives in the application's own database.
//!
//! `migrate` creates the schema, `publish` writes an event in the caller's own transaction (or call the function
//! `pillarbox.publish`, or insert into `pillarbox.event`, from any language), and a `PostgresStore` is what a relay and the
//! operators' commands work on.
#[macro_use]
mod sql;

mod client;
mod connection;
mod doorbell;
mod error;
mod event_id;
mod home;
mod inbox;
mod journal;
mod leaves;
mod migrate;
#[cfg(feature = "mutants")]
mod mutant;
mod operator;
mod ownership;
mod publish;
mod queue;
mod reader;
mod schema;
mod settle;
mod store;
pub mod testing;
mod transactional;
mod types;

pub use client::PgClient;
pub use connection::{PgConfig, SslMode, Unreplicated};
pub use home::{adopt, fresh};
pub use inbox::accept;
pub use journal::{append, head, read};
pub use migrate::{Migrated, SCHEMA_VERSION, check, dump_schema, migrate, print_roles, print_sql, set_doorbell};
#[cfg(feature = "mutants")]
pub use mutant::{BEFORE_TAKE, BETWEEN_STATEMENTS, HORIZON_GATE, Hook, Mutant, SETTLE_STEPS};
pub use operator::PENDING_COUNT_MAX;
pub use pillarbox::admin::{Limits, PAYLOAD_BYTES_MAX_HIGHEST};
pub use pillarbox::store::PAGE_BYTES_MAX;
pub use pillarbox::store::SchemaState;
pub use publish::{EventSql, Parameter, PublishStatement, publish, publish_all};
pub use schema::Schema;
pub use store::PostgresStore;
pub use transactional::{PooledClient, Transactional};
