//! A transactional outbox engine: an application writes an [`Event`] in the same database transaction as its business data,
//! and a [`Relay`] delivers it, once that transaction is durable, to every [`Subscription`] that wants it.
//!
//! - No committed event is ever skipped silently: it is delivered, or listed as waiting or dead.
//! - First arrivals of a key come in log order. After a crash an event may come again, with the same id.
//! - A failure holds back only its own key.
//!
//! This crate is the engine; it talks to no database itself. Publishing and the store come from a database's own crate
//! (`pillarbox-sqlite`, `pillarbox-postgres`), sinks to other systems from `pillarbox-sinks`. A relay is built from a store and
//! subscriptions, each with a handler or a sink:
//!
//! ```
//! use pillarbox::{Delivery, Relay, Subscription};
//! # use pillarbox::{admin::Operator, store::Store};
//!
//! # async fn run(store: impl Store + Operator) -> pillarbox::Result<Relay> {
//! let mailer = |delivery: Delivery| async move {
//!     println!("attempt {} of event {} ({})", delivery.attempt(), delivery.id, delivery.r#type);
//!     Ok(())
//! };
//! let subscription = Subscription::stream("mailer").topics(["orders"]).max_attempts(5);
//! Relay::builder(store).handle(subscription, mailer).start().await
//! # }
//! ```
//!
//! | you want to | see |
//! |---|---|
//! | describe an event to publish | [`NewEvent`] |
//! | say which events go where, how often they are tried, in which order they wait | [`Subscription`], [`RetryPolicy`] |
//! | handle events in your process | [`Handler`], [`Delivery`], [`Failure`], [`with_state`] |
//! | run, drain and stop | [`Relay`], [`RelayConfig`] |
//! | set the lease, limits and recovery of a relay | [`config`] |
//! | ask and change what operators ask and change | [`admin`] |
//! | keep an application's state as streams of events | [`journal`] |
//! | deliver to another system | [`sink`] |
//! | test your publishing and your handlers | [`testing`] |
//! | bring another database | [`store`] |
//! | look up a limit | [`limit`] |
/// What operators do and ask: status, the deliveries, why an event waits, audits, retention.
pub mod admin;
mod attempt_log;
mod audit;
mod backoff;
mod breaker;
mod budget;
mod cloud_event;
/// The intervals and limits of a relay, and how it recovers what others were working on: what is in
/// [`RelayConfig::engine`].
pub mod config;
mod counted;
mod database_clock;
mod definition;
mod dispatcher;
/// The decisions of a relay, without IO: for simulations and for those who bring their own shell. Its configuration is in [`config`].
#[doc(hidden)]
pub mod engine;
mod error;
mod event;
mod failpoint;
mod flood_guard;
mod grace;
mod handler;
mod health;
mod holes;
/// The journal: streams of events with dense versions, for event-sourced applications. Appending and reading are in the crate of a
/// store.
pub mod journal;
mod lane;
/// The limits of events, subscriptions and relays, each with its name.
pub mod limit;
pub mod metric;
mod operator;
mod ownership;
mod panic;
mod queue;
mod range_set;
mod relay;
mod retry;
mod schema_state;
/// For those who deliver to another system: the seam, and CloudEvents.
pub mod sink;
mod stateful;
/// For those who bring another database: what a relay needs of it.
pub mod store;
mod subscription;
pub mod testing;
mod token;
mod transact;
mod visible;
mod why;
mod work;

#[doc(hidden)]
pub use counted::counted;
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, Headers, NewEvent, Payload, Position, Timestamp};
pub use handler::{Delivery, Handler, heartbeat};
#[doc(hidden)]
pub use handler::{Fits, IsHandler, NeverFits, NoType};
#[doc(hidden)]
pub use panic::{handler_panicked, panic_text};
pub use relay::{Relay, RelayBuilder, RelayConfig};
pub use retry::RetryPolicy;
pub use sink::Failure;
pub use stateful::with_state;
pub use subscription::{Filter, Mode, OnDead, Start, Subscription};
#[doc(hidden)]
pub use visible::{visible, visible_json};

// What the modules of this crate know each other by.
pub(crate) use admin::*;
pub(crate) use attempt_log::{DeliveredAttempt, FailedAttempt, NextTry};
pub(crate) use engine::Now;
pub(crate) use limit::*;
pub(crate) use sink::*;
pub(crate) use store::*;
