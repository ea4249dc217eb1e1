//! The tables that the log consists of. Each leaf holds a range of positions. Ahead of the horizon lie leaves of the size that
//! suits retention, then ever larger ones, then an open-ended one: no insert can fail for want of a leaf, however long nobody
//! looks after them, and what is found in a large one then is no larger than what was published meanwhile.
mod plan;

use std::collections::HashSet;
use std::time::Duration;

use pillarbox::{ErrorKind, Position, Result, Timestamp};
use tokio_postgres::GenericClient;

use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::store::PostgresStore;
use crate::types::Time;

use plan::{Plan, View};

/// How long publishers may wait because we wait for a lock.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// How long the leaves may take to be laid anew once the log is locked.
pub(crate) const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// The largest leaf that is cut while publishers wait: all of it is read for that. A million events of 230 MB took 0.2 s.
pub(crate) const CUT_BYTES_MAX: i64 = 64 * 1024 * 1024;

/// Whoever uses the log for longer than this is not waited for.
const HOLDER_AGE_MAX: Duration = Duration::from_millis(200);

/// A leaf that is cut gets room for so many times what was published during [`HOLDER_AGE_MAX`].
const MARGIN_OF_WATCH: i64 = 4;

/// A table of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leaf {
    pub(crate) name: String,
    pub(crate) low: Position,
    /// The first position that is not in it any more; None: open-ended.
    pub(crate) high: Option<Position>,
    /// Retention took its events.
    pub(crate) emptied: bool,
    /// When its first event was published, if it has any.
    pub(crate) oldest: Option<Timestamp>,
}

/// The leaves, by position.
pub(crate) async fn leaves(client: &impl GenericClient) -> Db<Vec<Leaf>> {
    let rows = client.query(include_str!("sql/leaves.sql"), &[]).await?;
    let leaf = |row: &tokio_postgres::Row| {
        let oldest = row.try_get::<_, Option<Time>>(4)?.map(|time| time.0);
        Ok(Leaf {
            name: row.try_get(0)?,
            low: row.try_get(1)?,
            high: row.try_get(2)?,
            emptied: row.try_get(3)?,
            oldest,
        })
    };
    rows.iter().map(leaf).collect()
}

/// Takes all events out of a leaf. Waits for those who use that leaf for [`LOCK_TIMEOUT`] at most; no publisher waits.
pub(crate) async fn empty_leaf(tx: &tokio_postgres::Transaction<'_>, leaf: &Leaf) -> Db<()> {
    set_local(tx, "lock_timeout", LOCK_TIMEOUT).await?;
    tx.execute("select empty_leaf($1)", &[&leaf.name]).await?;
    Ok(())
}

/// Keeps enough leaves ahead of the horizon, of a size that suits `keep`, using emptied ones again. Publishers wait for a few
/// hundredths of a second when leaves are laid, which is once in several leaves; if somebody uses the log for longer, the next
/// call tries again.
pub(crate) async fn maintain(session: &mut Session, keep: Option<Duration>) -> Db<()> {
    if due(session, keep, 0, Some(CUT_BYTES_MAX)).await?.is_none() {
        return Ok(());
    }
    let Some(margin) = watch(session).await? else {
        tracing::debug!("a transaction has used the log for long; its leaves are laid once it is over");
        return Ok(());
    };
    let Some(plan) = due(session, keep, margin, Some(CUT_BYTES_MAX)).await? else { return Ok(()) };
    match lay(session, &plan, Some(CUT_TIMEOUT)).await {
        Err(error) if passes(&error) => {
            tracing::debug!(error = %pillarbox::Error::from(error), "the leaves could not be laid now; tried again later");
            Ok(())
        }
        other => other,
    }
}

/// What should be said about the leaves, if anything, with what to do.
pub(crate) async fn warning(client: &impl GenericClient) -> Db<Option<String>> {
    let (leaves, (horizon, _, _)) = (leaves(client).await?, figures(client).await?);
    let open = leaves.iter().find(|leaf| leaf.high.is_none());
    Ok(match open {
        None => Some("the log has no open-ended leaf, so that publishing will fail; run `pillarbox prune`".into()),
        Some(leaf) if leaf.low <= horizon => Some(format!(
            "events are published into the open-ended leaf {}, which retention cannot empty; run `pillarbox prune` when \
             publishers can wait for a few seconds",
            leaf.name
        )),
        Some(_) => None,
    })
}

impl PostgresStore {
    /// Lays the leaves of the log as retention wants them, however long publishers wait for that: a leaf in use is read from
    /// end to end if it has to be cut. Relays do this by themselves as long as it takes a moment only.
    pub async fn lay_leaves(&self, keep: Option<Duration>) -> Result<()> {
        let mut session = self.desk().await?;
        let margin = watch(&session).await?.unwrap_or_default();
        let Some(plan) = due(&session, keep, margin, None).await? else { return Ok(()) };
        lay(&mut session, &plan, None).await.map_err(|error| match passes(&error) {
            true => DbError::own(
                ErrorKind::Busy,
                "the leaves could not be laid: a transaction that has used the log is still open; end it (see `pillarbox \
                 status`) and try again",
            ),
            false => error,
        })?;
        Ok(())
    }
}

/// What is to be done about the leaves now. A leaf of more than `bytes_max` is not cut.
async fn due(session: &Session, keep: Option<Duration>, margin: i64, bytes_max: Option<i64>) -> Db<Option<Plan>> {
    let leaves = leaves(&**session).await?;
    let (horizon, size, now) = figures(&**session).await?;
    let view = View { leaves: &leaves, horizon, now, keep, size, margin };
    if let Some((name, plan)) = view.cut() {
        let sql = "select pg_relation_size($1::text::regclass)";
        let bytes: i64 = session.query_one(sql, &[&name]).await?.get(0);
        if bytes_max.is_none_or(|max| bytes <= max) {
            return Ok(Some(plan));
        }
    }
    Ok(view.lay())
}

/// The horizon, the size of a leaf that somebody wished for, and the time.
async fn figures(client: &impl GenericClient) -> Db<(Position, i64, Timestamp)> {
    let sql = "select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0), leaf_size, clock_timestamp() \
               from meta";
    let row = client.query_one(sql, &[]).await?;
    Ok((row.try_get(0)?, row.try_get(1)?, row.try_get::<_, Time>(2)?.0))
}

/// How many positions a leaf that is cut must still have room for; None if a transaction uses the log for so long that waiting
/// for it would only make publishers wait.
async fn watch(session: &Session) -> Db<Option<i64>> {
    let look = async || -> Db<(HashSet<String>, Position)> {
        let rows = session.query(include_str!("sql/log_holders.sql"), &[]).await?;
        Ok((rows.iter().map(|row| row.get(0)).collect(), figures(&**session).await?.0))
    };
    let (holders, horizon) = look().await?;
    tokio::time::sleep(HOLDER_AGE_MAX).await;
    let (later_holders, later_horizon) = look().await?;
    let published = later_horizon - horizon;
    Ok(holders.is_disjoint(&later_holders).then_some(published * MARGIN_OF_WATCH))
}

async fn lay(session: &mut Session, plan: &Plan, timeout: Option<Duration>) -> Db<()> {
    let tx = session.begin().await?;
    set_local(&tx, "lock_timeout", LOCK_TIMEOUT).await?;
    set_local(&tx, "statement_timeout", timeout.unwrap_or_default()).await?;
    tx.execute("select arrange_leaves($1)", &[&plan.bounds]).await?;
    tx.commit().await?;
    tracing::info!(
        from = plan.bounds[0],
        leaves = plan.bounds.len(),
        size = plan.size,
        "new leaves lie ahead of the log"
    );
    Ok(())
}

async fn set_local(tx: &tokio_postgres::Transaction<'_>, name: &str, value: Duration) -> Db<()> {
    tx.execute("select set_config($1, $2, true)", &[&name, &value.as_millis().to_string()]).await?;
    Ok(())
}

/// Whether the failure means no more than "not now".
pub(crate) fn passes(error: &DbError) -> bool {
    // Besides locks and time-outs: somebody published into a leaf that was to be laid anew (55006), or beyond a cut (23514).
    error.kind() == ErrorKind::Busy || error.code().is_some_and(|code| matches!(code.code(), "55006" | "23514"))
}
