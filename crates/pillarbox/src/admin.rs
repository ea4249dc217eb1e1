mod backlog;
mod check;
mod list;
mod log_limits;
pub mod plan;
pub mod retention;
pub mod snapshot;

pub use backlog::BacklogRow;
pub use list::ListedDelivery;
pub use log_limits::{Limits, PAYLOAD_BYTES_MAX_HIGHEST, StoredLimits};

pub use crate::audit::{Audit, Auditor, MISSING_LISTED_MAX, Missing, MissingReason, SubscriptionAudit};
pub use crate::health::{HealthLimits, Problem, ProblemKind, is_unhealthy, problems};
pub use crate::operator::{
    Books, Change, Changed, Check, ClaimRecord, DeliveryRecord, EventRecord, Fate, InstanceStatus, LaneBook, Level,
    ListQuery, ListRow, LogStatus, Operator, Pause, PausedBy, PrunePolicy, Pruned, REASON_DEAD, REASON_HOLD,
    RecoveredCount, Selection, SettledBy, State, Status, SubscriptionStatus,
};
pub use crate::why::{Cause, Why, why};
