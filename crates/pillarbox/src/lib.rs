//! Pillarbox: a transactional outbox engine.
mod audit;
mod breaker;
mod cloud_event;
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
mod lane;
pub mod metric;
mod operator;
mod ownership;
mod range_set;
mod relay;
mod retry;
mod sink;
mod store;
mod subscription;
pub mod testing;
mod token;
mod why;

pub use audit::{Audit, Auditor, MISSING_LISTED_MAX, Missing, MissingReason, SubscriptionAudit};
pub use breaker::{BREAKER_BASE, BREAKER_CAP, BREAKER_SUSPECT_AFTER};
pub use cloud_event::{CLOUD_EVENT_START, CloudEvents, EXTENSION_NAME_MAX, received_id};
pub use dispatcher::BatchId;
pub use engine::Now;
pub use error::{Advice, Error, ErrorKind, Result};
pub use event::{
    Event, HEADER_CORRELATION_ID, Headers, KeyHash, NAME_BYTES_MAX, NewEvent, PAYLOAD_BYTES_MAX, Payload, Position,
    Timestamp, lane_of,
};
pub use failpoint::Failpoint;
pub use flood_guard::FLOOD_KEYS;
pub use handler::Handler;
pub use health::{HealthLimits, Problem, ProblemKind, is_unhealthy, problems};
pub use operator::{
    Books, Change, Changed, Check, DeliveryRecord, EventRecord, Fate, InstanceStatus, LaneBook, Level, ListQuery,
    ListRow, LogStatus, Operator, PrunePolicy, Pruned, Selection, SettledBy, State, Status, SubscriptionStatus,
};
pub use range_set::RangeSet;
pub use relay::{Relay, RelayBuilder, RelayConfig};
pub use retry::RetryPolicy;
pub use sink::{Attempt, Batch, BoxFuture, Failure, Fault, Outcome, Sink, SinkFeatures};
pub use store::{
    AttemptError, BreakerReport, Cursor, Delivery, ERROR_BYTES_MAX, ERRORS_KEPT_MAX, Epoch, Fleet, Hello, InstanceId,
    InstanceView, Joined, LaneRef, LaneState, LaneView, LaneWrite, Lock, Page, PollRequest, Report, Scan, ScanRequest,
    Settlement, Store, StoreFeatures, SubscriptionId, SubscriptionReport, SubscriptionView, Take, TakeCause, Wake,
    Writer,
};
pub use subscription::{Filter, LANES_MAX, Mode, OnDead, Start, Subscription};
pub use token::ResumeToken;
pub use why::{Cause, Why, why};
