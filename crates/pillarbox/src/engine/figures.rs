use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{BreakerReport, DeliveredAttempt, FailedAttempt};

/// What happened since the figures were last taken, for counters.
#[derive(Debug, Default)]
pub struct Figures {
    /// Delivered, by subscription.
    pub delivered: BTreeMap<Arc<str>, u64>,
    /// Failed attempts, by subscription and kind.
    pub failed: BTreeMap<(Arc<str>, &'static str), u64>,
    /// Became dead, by subscription.
    pub dead: BTreeMap<Arc<str>, u64>,
    /// Lanes taken, by cause.
    pub takeovers: BTreeMap<&'static str, u64>,
    /// Positions that retention removed before they were delivered, by subscription.
    pub pruned: BTreeMap<Arc<str>, u64>,
    /// Claims taken from others, by subscription and cause.
    pub recovered: BTreeMap<(Arc<str>, &'static str), u64>,
    /// Claims that were ended too late: they had been taken from this instance, by subscription.
    pub refused: BTreeMap<Arc<str>, u64>,
    /// Sinks that are considered down from now on, or (without a report) no longer, by subscription.
    pub sinks: BTreeMap<Arc<str>, Option<BreakerReport>>,
    /// Attempts that failed, as many as are to be logged.
    pub failed_attempts: Vec<FailedAttempt>,
    /// How many more failed, by subscription.
    pub failed_unlogged: BTreeMap<Arc<str>, u64>,
    /// Events that were delivered, if [`Engine::tell_deliveries`](crate::engine::Engine::tell_deliveries) was asked for them.
    pub deliveries: Vec<DeliveredAttempt>,
    /// What people should be told.
    pub warnings: Vec<String>,
}
