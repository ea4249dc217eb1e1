use std::time::Duration;

use pillarbox::ErrorKind;
use tokio_postgres::GenericClient;

use crate::error::{Db, DbError};

/// The largest `payload_bytes_max` that a log may be given.
pub const PAYLOAD_BYTES_MAX_HIGHEST: usize = 256 * 1024 * 1024;

/// What is stored for a time that never ends.
pub(crate) const FOREVER_MS: i64 = i64::MAX;

/// Changes the limits of the log, for all its publishers in all languages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// The largest payload, up to [`PAYLOAD_BYTES_MAX_HIGHEST`]. Only the log's owner may change it. None: as it is.
    pub payload_bytes_max: Option<usize>,
    /// How long a `dedup_key` is remembered. None: as it is.
    pub dedup_window: Option<Duration>,
    /// Events are kept at least this long, whatever a call of [`prune`](pillarbox::admin::Operator::prune) asks for; `Some(None)`:
    /// for ever. None: as it is, at first no minimum.
    pub retention_keep: Option<Option<Duration>>,
    /// The same for dead deliveries, from their death.
    pub retention_dead: Option<Option<Duration>>,
    /// The same for what inboxes have accepted.
    pub retention_inbox: Option<Option<Duration>>,
}

impl Limits {
    /// Writes them, in the caller's transaction on a session of this crate.
    pub(crate) async fn store(&self, tx: &impl GenericClient) -> Db<()> {
        let milliseconds = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(FOREVER_MS);
        let forever = |time: Option<Duration>| time.map_or(FOREVER_MS, milliseconds);
        let [keep, dead, inbox] =
            [self.retention_keep, self.retention_dead, self.retention_inbox].map(|limit| limit.map(forever));
        tx.execute(sql!(meta, "set_retention"), &[&keep, &dead, &inbox]).await?;
        if let Some(bytes) = self.payload_bytes_max {
            set_payload_bytes_max(tx, bytes).await?;
        }
        if let Some(window) = self.dedup_window {
            set_dedup_window(tx, milliseconds(window)).await?;
        }
        Ok(())
    }
}

/// Old events are not looked at: the limit is for new ones.
async fn set_payload_bytes_max(tx: &impl GenericClient, bytes: usize) -> Db<()> {
    if !(1..=PAYLOAD_BYTES_MAX_HIGHEST).contains(&bytes) {
        return Err(DbError::own(
            ErrorKind::Invalid,
            format!("payload_bytes_max = {bytes} is outside 1 to {PAYLOAD_BYTES_MAX_HIGHEST}"),
        ));
    }
    let bytes = i32::try_from(bytes).expect("checked above");
    tx.execute(sql!(meta, "set_payload_bytes_max"), &[&bytes]).await?;
    Ok(())
}

/// The window decides which table is the current one. Keys stay where they are, and for a while are looked for everywhere: no
/// publisher waits for the change.
async fn set_dedup_window(tx: &impl GenericClient, window_ms: i64) -> Db<()> {
    tx.execute(sql!(meta, "set_dedup_window"), &[&window_ms]).await?;
    Ok(())
}
