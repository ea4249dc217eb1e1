//! Pillarbox: a transactional outbox engine.
mod error;
mod event;
mod operator;
mod range_set;
mod retry;
mod sink;
mod store;
mod subscription;

pub use error::{Advice, Error, ErrorKind, Result};
pub use event::{
    Event, HEADER_CORRELATION_ID, Headers, KeyHash, NAME_BYTES_MAX, NewEvent, PAYLOAD_BYTES_MAX, Payload, Position,
    Timestamp, lane_of,
};
pub use operator::{
    Books, Change, Changed, Check, DeliveryRecord, EventRecord, Fate, InstanceStatus, LaneBook, Level, ListQuery,
    ListRow, LogStatus, Operator, PrunePolicy, Pruned, Selection, SettledBy, State, Status, SubscriptionStatus,
};
pub use range_set::RangeSet;
pub use retry::RetryPolicy;
pub use sink::{Attempt, Batch, BoxFuture, Failure, Fault, Outcome, Sink, SinkFeatures};
pub use store::{
    AttemptError, BreakerReport, Cursor, Delivery, ERROR_BYTES_MAX, ERRORS_KEPT_MAX, Epoch, Fleet, Hello, InstanceId,
    InstanceView, Joined, LaneRef, LaneState, LaneView, LaneWrite, Lock, Page, PollRequest, Report, Scan, ScanRequest,
    Settlement, Store, StoreFeatures, SubscriptionId, SubscriptionReport, SubscriptionView, Take, TakeCause, Wake,
    Writer,
};
pub use subscription::{Filter, LANES_MAX, Mode, OnDead, Start, Subscription};
