use pillarbox::admin::Limits;
use tokio_postgres::GenericClient;

use crate::error::Db;

/// Writes limits, in the caller's transaction on a session of this crate.
pub(crate) async fn store_limits(tx: &impl GenericClient, limits: &Limits) -> Db<()> {
    let limits = limits.to_store()?;
    let times = [limits.retention_keep_ms, limits.retention_dead_ms, limits.retention_inbox_ms];
    tx.execute(sql!(meta, "set_retention"), &[&times[0], &times[1], &times[2]]).await?;
    if let Some(bytes) = limits.payload_bytes_max {
        // Old events are not looked at: the limit is for new ones.
        tx.execute(sql!(meta, "set_payload_bytes_max"), &[&bytes]).await?;
    }
    if let Some(window_ms) = limits.dedup_window_ms {
        set_dedup_window(tx, window_ms).await?;
    }
    Ok(())
}

/// The window decides which table is the current one. Keys stay where they are, and for a while are looked for everywhere: no
/// publisher waits for the change.
async fn set_dedup_window(tx: &impl GenericClient, window_ms: i64) -> Db<()> {
    tx.execute(sql!(meta, "set_dedup_window"), &[&window_ms]).await?;
    Ok(())
}
