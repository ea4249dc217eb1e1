use super::change::delete_subscription;
use super::{load_snapshot, ring};
use crate::connection::Session;
use crate::error::Db;
use crate::leaves::{Removes, empty_leaf, leaves};

/// Empties the log. Positions go on where they were, as the sequence is not restarted: nobody outside can take a new event for an
/// old one. What a living instance runs stays, with nothing to deliver.
pub(super) async fn reset(session: &mut Session) -> Db<()> {
    let tx = session.begin().await?;
    tx.query_typed("select from meta for update", &[]).await?;
    // Nobody is between drawing a position and committing it, so that none can appear below the new start.
    tx.batch_execute("lock table event in share row exclusive mode").await?;
    tx.query_typed("select from subscription order by name collate \"C\" for update", &[]).await?;
    tx.query_typed("select from cursor order by subscription, lane for update", &[]).await?;
    let snapshot = load_snapshot(&tx).await?;
    for table in ["event_kept", "delivery", "dead_range", "dedup_0", "dedup_1", "dedup_2", "skip", "stream", "recovery"]
    {
        tx.execute(&format!("delete from {table}"), &[]).await?;
    }
    for subscription in snapshot.subscriptions.iter().filter(|subscription| !snapshot.is_run(subscription.id)) {
        delete_subscription(&tx, subscription.id).await?;
    }
    let sql = "update meta set incarnation = incarnation + 1, log_start = $1::bigint + 1, pruned_to = $1";
    tx.execute(sql, &[&snapshot.horizon]).await?;
    tx.execute(include_str!("../sql/start_over.sql"), &[&snapshot.horizon]).await?;
    // Now that nobody needs any of them.
    for leaf in leaves(&tx).await? {
        empty_leaf(&tx, &leaf, Removes::Everything).await?;
    }
    ring(&tx).await?;
    Ok(tx.commit().await?)
}
