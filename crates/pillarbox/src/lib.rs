//! A transactional outbox engine: an application writes an [`Event`] in the same database transaction as its business data,
//! and a [`Relay`] delivers it, once that transaction is durable, to every [`Subscription`] that wants it.
//!
//! - No committed event is ever skipped silently: it is delivered, or listed as waiting or dead.
//! - First arrivals of a key come in log order. After a crash an event may come again, with the same id.
//! - A failure holds back only its own key.
//!
//! This crate is the engine and its seams; it talks to no database itself. Publishing and the [`Store`] come from a database's
//! own crate (`pillarbox-sqlite`), sinks to other systems from `pillarbox-sinks`. A relay is built from both:
//!
//! ```
//! use std::sync::Arc;
//! use pillarbox::{Event, Failure, Operator, Relay, Store, Subscription};
//!
//! async fn run(store: impl Store + Operator) -> pillarbox::Result<Relay> {
//!     Relay::builder(store)
//!         .handle(Subscription::new("mailer").topics(["orders"]), |event: Arc<Event>| async move {
//!             println!("{} {}", event.r#type, event.id);
//!             Ok::<(), Failure>(())
//!         })
//!         .start()
//!         .await
//! }
//! ```
//!
//! The decisions of a relay are in [`engine`]: state, time and what happened, to what is to be done, without any IO.
mod attempt_log;
mod audit;
mod breaker;
mod cloud_event;
mod counted;
mod database_clock;
pub mod decode;
mod definition;
mod dispatcher;
/// The decisions of a relay, without IO: for simulations and for those who bring their own shell.
pub mod engine;
mod error;
mod event;
mod failpoint;
mod flood_guard;
mod grace;
mod handler;
mod health;
mod holes;
mod lane;
pub mod metric;
mod operator;
mod ownership;
mod queue;
mod range_set;
mod relay;
mod retry;
mod schema_state;
mod sink;
mod store;
mod subscription;
pub mod testing;
mod token;
mod transact;
mod visible;
mod why;
mod work;
pub mod world;

pub use attempt_log::{ATTEMPTS_LOGGED_INTERVAL, ATTEMPTS_LOGGED_MAX, DeliveredAttempt, FailedAttempt, NextTry};
pub use audit::{Audit, Auditor, MISSING_LISTED_MAX, Missing, MissingReason, SubscriptionAudit};
pub use breaker::{
    BREAKER_ALONE_MAX, BREAKER_BASE, BREAKER_CAP, BREAKER_KEYS_MAX, BREAKER_OTHER_WAIT, BREAKER_SUSPECT_AFTER,
    BREAKER_SUSPECTS_MAX, RETRY_AFTER_MAX,
};
pub use cloud_event::{BinaryEvent, CLOUD_EVENT_START, CloudEvents, EXTENSION_NAME_MAX, received_id};
#[doc(hidden)]
pub use counted::counted;
pub use definition::{Definition, FORMER_FILTERS_MAX, FormerFilter, FormerFilters, PassedUnder};
pub use dispatcher::BatchId;
pub use engine::Now;
pub use error::{Advice, Error, ErrorKind, Result};
pub use event::{
    CONTENT_TYPE_BYTES_MAX, Event, HEADER_CORRELATION_ID, HEADERS_BYTES_MAX, Headers, KeyHash, NAME_BYTES_MAX,
    NewEvent, PAYLOAD_BYTES_MAX, Payload, Position, Timestamp, lane_of,
};
pub use failpoint::Failpoint;
pub use flood_guard::{FLOOD_DEAD_MAX, FLOOD_DEAD_WITHIN, FLOOD_KEYS};
pub use grace::Grace;
pub use handler::{Handler, heartbeat};
pub use health::{HealthLimits, Problem, ProblemKind, is_unhealthy, problems};
pub use operator::{
    Books, Change, Changed, Check, ClaimRecord, DeliveryRecord, EventRecord, Fate, InstanceStatus, LaneBook, Level,
    ListQuery, ListRow, LogStatus, Operator, Pause, PausedBy, PrunePolicy, Pruned, REASON_DEAD, REASON_HOLD,
    RecoveredCount, Selection, SettledBy, State, Status, SubscriptionStatus,
};
pub use queue::{
    CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Failed, KEYS_TOLD_MAX, QUEUED_KEYS_MAX, Queued,
    RecoverRequest, Recovered, RecoveryCause, SUSPECT_AFTER, WAITING_COUNTED, recount_after, recovered, tell_keys,
};
pub use range_set::RangeSet;
pub use relay::{RETENTION_INTERVAL, Relay, RelayBuilder, RelayConfig};
pub use retry::RetryPolicy;
pub use schema_state::SchemaState;
pub use sink::{Attempt, Batch, BoxFuture, Failure, Fault, Origin, Outcome, Sink, SinkFeatures};
pub use store::{
    AttemptError, BreakerReport, Cursor, DEAD_HEADS_MAX, Delivery, ERROR_BYTES_MAX, ERRORS_KEPT_MAX, Epoch, Fleet,
    Hello, InstanceId, InstanceView, Joined, LaneRef, LaneState, LaneView, LaneWrite, Lock, Page, PollRequest, Report,
    Scan, ScanRequest, Settlement, Store, StoreFeatures, SubscriptionId, SubscriptionReport, SubscriptionView, Take,
    TakeCause, Wake, Writer,
};
pub use subscription::{Filter, LANES_MAX, Mode, OnDead, Start, Subscription};
pub use token::ResumeToken;
pub use transact::{Abort, ClaimPlace, Transact};
#[doc(hidden)]
pub use visible::{visible, visible_json};
pub use why::{Cause, Why, why};
