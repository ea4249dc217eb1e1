//! The names of all metrics; `docs/metrics.md` lists them.

/// Counter, by `subscription`: events that a sink or handler accepted.
pub const DELIVERED: &str = "pillarbox_delivered_total";
/// Counter, by `subscription` and `kind`: failed attempts.
pub const FAILURES: &str = "pillarbox_failures_total";
/// Counter, by `subscription`: events that became dead.
pub const DIED: &str = "pillarbox_died_total";
/// Counter, by `cause`: lanes taken from another instance.
pub const TAKEOVERS: &str = "pillarbox_takeovers_total";
/// Counter: how often this relay has ended as an instance and joined again under a new number.
pub const REJOINS: &str = "pillarbox_rejoins_total";
/// Counter, by `subscription`: positions that retention removed before they were delivered. Should be 0.
pub const PRUNED_UNDELIVERED: &str = "pillarbox_pruned_undelivered_total";
/// Counter, by `call`: failed calls to the database.
pub const STORE_ERRORS: &str = "pillarbox_store_errors_total";
/// Gauge, by `subscription`: the age of the oldest event not yet delivered, in seconds.
pub const OLDEST_AGE: &str = "pillarbox_oldest_undelivered_age_seconds";
/// Gauge, by `subscription`: events that wait to be delivered.
pub const BACKLOG: &str = "pillarbox_backlog";
/// Gauge, by `subscription` and `state`: deliveries of the slow path.
pub const DELIVERIES: &str = "pillarbox_deliveries";
/// Gauge, by `subscription`: 1 while the sink is considered down.
pub const BREAKER_OPEN: &str = "pillarbox_breaker_open";
/// Gauge, by `subscription` and `by`: 1 while it is paused by an operator, or by its receiver.
pub const PAUSED: &str = "pillarbox_paused";
/// Gauge: the age of the gauges that the listener has read from the database, in seconds.
pub const STATUS_AGE: &str = "pillarbox_status_age_seconds";
/// Gauge, by `version`: 1.
pub const BUILD_INFO: &str = "pillarbox_build_info";
/// Counter, by `subscription` and `cause`: claims of queues that were recovered from owners that would no longer end
/// them.
pub const RECOVERED: &str = "pillarbox_recovered_total";
/// Counter, by `subscription`: claims that this relay ended after they had been taken from it.
pub const REFUSED: &str = "pillarbox_claims_refused_total";
/// Gauge, by `subscription`: for how long the longest-running delivery of the queue has been worked on, in seconds.
pub const OLDEST_PROCESSING_AGE: &str = "pillarbox_oldest_processing_age_seconds";
