use super::change::delete_subscription;
use super::{load_snapshot, ring};
use crate::connection::Session;
use crate::error::Db;
use crate::leaves::{Removes, empty_leaf, leaves};

/// Empties the log. Positions go on where they were, as the sequence is not restarted: no receiver can take a new event for an
/// old one. What a living instance runs stays, with nothing to deliver.
pub(super) async fn reset(session: &mut Session) -> Db<()> {
    let tx = session.begin().await?;
    tx.query_typed(sql!(meta, "lock"), &[]).await?;
    // Nobody is between drawing a position and committing it, so that none can appear below the new start.
    tx.batch_execute(sql!(home, "lock_log")).await?;
    tx.query_typed(sql!(subscription, "lock_all"), &[]).await?;
    tx.query_typed(sql!(cursor, "lock_all"), &[]).await?;
    let snapshot = load_snapshot(&tx).await?;
    tx.batch_execute(sql!(home, "empty")).await?;
    for subscription in snapshot.subscriptions.iter().filter(|subscription| !snapshot.is_run(subscription.id)) {
        delete_subscription(&tx, subscription.id).await?;
    }
    tx.execute(sql!(home, "begin_above"), &[&snapshot.horizon]).await?;
    tx.execute(sql!(home, "start_over"), &[&snapshot.horizon]).await?;
    // Now that nobody needs any of them.
    for leaf in leaves(&tx).await? {
        empty_leaf(&tx, &leaf, Removes::Everything).await?;
    }
    ring(&tx).await?;
    Ok(tx.commit().await?)
}
