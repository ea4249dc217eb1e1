use std::time::Duration;

use super::retention::time_to_store;
use crate::{Error, ErrorKind, Result};

/// The largest `payload_bytes_max` that a log may be given.
pub const PAYLOAD_BYTES_MAX_HIGHEST: usize = 256 * 1024 * 1024;

/// Changes the log's limits for everybody, in whatever language publishers are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// The largest payload, up to [`PAYLOAD_BYTES_MAX_HIGHEST`]; on PostgreSQL only the log's owner may change it. None: as it is.
    pub payload_bytes_max: Option<usize>,
    /// How long a `dedup_key` is remembered. None: as it is.
    pub dedup_window: Option<Duration>,
    /// Events are kept at least this long, whatever a call of [`prune`](super::Operator::prune) asks for; `Some(None)`: for ever. None: as
    /// it is, at first no minimum.
    pub retention_keep: Option<Option<Duration>>,
    /// The same for dead deliveries, from their death.
    pub retention_dead: Option<Option<Duration>>,
    /// The same for what inboxes have accepted.
    pub retention_inbox: Option<Option<Duration>>,
}

/// Limits as a database stores them. None: as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the field of the same name of `Limits`, times in milliseconds")]
pub struct StoredLimits {
    pub payload_bytes_max: Option<i32>,
    pub dedup_window_ms: Option<i64>,
    pub retention_keep_ms: Option<i64>,
    pub retention_dead_ms: Option<i64>,
    pub retention_inbox_ms: Option<i64>,
}

impl Limits {
    /// What is stored; refuses a payload limit that no log may be given.
    pub fn to_store(&self) -> Result<StoredLimits> {
        let outside = |bytes: &usize| !(1..=PAYLOAD_BYTES_MAX_HIGHEST).contains(bytes);
        if let Some(bytes) = self.payload_bytes_max.filter(outside) {
            let message = format!("payload_bytes_max = {bytes} is outside 1 to {PAYLOAD_BYTES_MAX_HIGHEST}");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(StoredLimits {
            payload_bytes_max: self.payload_bytes_max.map(|bytes| i32::try_from(bytes).expect("checked above")),
            dedup_window_ms: self.dedup_window.map(|window| time_to_store(Some(window))),
            retention_keep_ms: self.retention_keep.map(time_to_store),
            retention_dead_ms: self.retention_dead.map(time_to_store),
            retention_inbox_ms: self.retention_inbox.map(time_to_store),
        })
    }
}
