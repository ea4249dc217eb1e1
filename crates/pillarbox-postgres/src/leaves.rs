//! The tables that the log consists of. Each leaf holds a range of positions. Ahead of the horizon lie leaves of the size that
//! suits retention, then ever larger ones, then an open-ended one: no insert can fail for want of a leaf, however long no relay
//! adds any, and what is found in a large one then is no larger than what was published meanwhile.
mod plan;

use std::collections::HashSet;
use std::sync::atomic::AtomicI64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::{ErrorKind, Position, Result, Timestamp};
use tokio_postgres::types::Type;
use tokio_postgres::{GenericClient, Transaction};

use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::store::PostgresStore;
use crate::types::Time;

use plan::{Plan, View};

/// How long publishers may wait because we wait for a lock.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// How long the leaves may take to be laid again once the log is locked.
pub(crate) const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A leaf that is cut is read from end to end while publishers wait. It is read once beforehand, beside them: it is cut only if
/// that took less than this, and is in memory then. A million events of 230 MB took 0.2 s.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_millis(500);

/// The largest leaf of which that is tried.
pub(crate) const CUT_BYTES_MAX: i64 = 1024 * 1024 * 1024;

/// A leaf that took too long is tried again after this.
const CUT_PAUSE: Duration = Duration::from_secs(600);

/// A transaction that uses the log for longer than this is not waited for.
const HOLDER_AGE_MAX: Duration = Duration::from_millis(200);

/// What is waited for instead, by us and by publishers, when the leaves have been due for [`DUE_MAX`].
const HOLDER_AGE_MAX_WHEN_DUE: Duration = Duration::from_millis(500);

/// Leaves that have been due for longer are worth an alarm.
pub(crate) const DUE_MAX: Duration = Duration::from_secs(600);

/// How often an operator's command tries to lay the leaves before it gives up.
const TRIES: usize = 20;

/// A leaf that is cut gets room for so many times what was published while it was looked who uses the log.
const MARGIN_OF_WATCH: i64 = 4;

/// Where retention is, from one run to the next. It lives as long as the store, whose sessions come and go.
pub(crate) struct Upkeep {
    /// The dead ranges from here on have been looked at in this round.
    pub(crate) dead_looked_at: AtomicI64,
    /// The copies of events up to here have been looked at in this round.
    pub(crate) kept_looked_at: AtomicI64,
    /// Not before then is it tried again whether the leaf in use can be cut quickly.
    cut_again_at: Mutex<Option<Instant>>,
}

impl Default for Upkeep {
    fn default() -> Self {
        Upkeep {
            dead_looked_at: AtomicI64::new(Position::MAX),
            kept_looked_at: AtomicI64::new(0),
            cut_again_at: Mutex::default(),
        }
    }
}

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
    let rows = client.query(sql!(leaf, "leaves"), &[]).await?;
    let leaf = |row: &tokio_postgres::Row| {
        let oldest = row.try_get::<_, Option<Time>>("oldest")?.map(|time| time.0);
        Ok(Leaf {
            name: row.try_get("name")?,
            low: row.try_get("low")?,
            high: row.try_get("high")?,
            emptied: row.try_get("emptied")?,
            oldest,
        })
    };
    rows.iter().map(leaf).collect()
}

/// What may be taken out of a leaf; see the function `empty_leaf` of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removes {
    /// What every subscription has passed, and there is one.
    Received,
    /// The same, and everything where there is no subscription.
    Unreceived,
    /// Also young events and those of journals.
    Everything,
}

impl Removes {
    fn name(self) -> &'static str {
        match self {
            Removes::Received => "received",
            Removes::Unreceived => "unreceived",
            Removes::Everything => "everything",
        }
    }
}

/// Takes all events out of a leaf. Waits for those who use that leaf for [`LOCK_TIMEOUT`] at most; no publisher waits.
pub(crate) async fn empty_leaf(tx: &Transaction<'_>, leaf: &Leaf, removes: Removes) -> Db<()> {
    Ok(tx.batch_execute(&empty_sql(leaf, removes)).await?)
}

/// As [`empty_leaf`], with the commit in the same message: if we are stopped in between, readers of the log wait for us.
pub(crate) async fn empty_leaf_and_commit(tx: Transaction<'_>, leaf: &Leaf, removes: Removes) -> Db<()> {
    tx.batch_execute(&format!("{}; commit", empty_sql(leaf, removes))).await?;
    // There is no transaction any more; this lets the client know.
    Ok(tx.commit().await?)
}

fn empty_sql(leaf: &Leaf, removes: Removes) -> String {
    sql!(leaf, "empty")
        .replace("@timeout@", &LOCK_TIMEOUT.as_millis().to_string())
        .replace("@removes@", removes.name())
        .replace("@leaf@", &leaf.name.replace('\'', "''"))
}

/// Keeps enough leaves ahead of the horizon, of a size that suits `keep`, using emptied ones again. Publishers wait for a few
/// hundredths of a second when leaves are laid, which is once in several leaves; if a transaction uses the log for longer, the next
/// call tries again. What keeps us from it is written down, for [`warning`].
pub(crate) async fn maintain(session: &mut Session, upkeep: &Upkeep, keep: Option<Duration>) -> Db<()> {
    let obstacle = attempt(session, upkeep, keep).await?;
    if let Some(obstacle) = &obstacle {
        tracing::debug!(obstacle, "the leaves of the log are not laid now; tried again later");
    }
    note(session, obstacle.as_deref()).await
}

/// Writes a failure of retention down, for [`warning`]: nothing goes and no leaf is laid as long as it comes back.
pub(crate) async fn note_failure(session: &Session, error: DbError) -> DbError {
    let error = pillarbox::Error::from(error);
    // A session that was lost can write nothing down; what is to be told is the failure itself.
    if let Err(unnoted) = note(session, Some(&error.to_string())).await {
        tracing::debug!(error = %pillarbox::Error::from(unnoted), "a failure of retention was not written down");
    }
    error.into()
}

/// Lays leaves if they are due. What was in the way of all that is wanted, if anything.
async fn attempt(session: &mut Session, upkeep: &Upkeep, keep: Option<Duration>) -> Db<Option<String>> {
    let obstacle = match cut(session, keep).await? {
        Some(leaf) => obstacle_to_cutting(session, upkeep, &leaf).await?,
        None => None,
    };
    let may_cut = obstacle.is_none();
    if due(session, keep, 0, may_cut).await?.is_none() {
        return Ok(obstacle);
    }
    let patience = patience(session).await?;
    let Some(margin) = watch(session, patience).await? else {
        return Ok(Some(
            obstacle.unwrap_or_else(|| "there is always a transaction that has used the log for long".into()),
        ));
    };
    let Some(plan) = due(session, keep, margin, may_cut).await? else { return Ok(obstacle) };
    // At first that is LOCK_TIMEOUT.
    match lay(session, &plan, patience / 2, Some(CUT_TIMEOUT)).await {
        Err(error) if passes(&error) => {
            tracing::debug!(error = %pillarbox::Error::from(error), "the leaves could not be laid");
            Ok(Some(obstacle.unwrap_or_else(|| "others use the log all the time".into())))
        }
        other => other.map(|()| obstacle),
    }
}

/// The leaf in use that should end here.
pub(crate) async fn cut(session: &Session, keep: Option<Duration>) -> Db<Option<Leaf>> {
    let leaves = leaves(&**session).await?;
    let (horizon, size, now) = figures(&**session).await?;
    let view = View { leaves: &leaves, horizon, now, keep, size, margin: 0 };
    Ok(view.cut().map(|(leaf, _)| leaf.clone()))
}

/// Why a leaf is not cut while publishers wait: reading it takes too long.
async fn obstacle_to_cutting(session: &Session, upkeep: &Upkeep, leaf: &Leaf) -> Db<Option<String>> {
    let name = &leaf.name;
    let too_large = || Some(format!("leaf {name} should end here, and is too large to be cut while publishers wait"));
    let again_at = *upkeep.cut_again_at.lock().unwrap_or_else(PoisonError::into_inner);
    if again_at.is_some_and(|at| at > Instant::now()) {
        return Ok(too_large());
    }
    let quick = reads_quickly(session, leaf).await?;
    let next = (!quick).then(|| Instant::now() + CUT_PAUSE);
    *upkeep.cut_again_at.lock().unwrap_or_else(PoisonError::into_inner) = next;
    Ok(if quick { None } else { too_large() })
}

async fn reads_quickly(session: &Session, leaf: &Leaf) -> Db<bool> {
    let row = session.query_one(sql!(leaf, "size"), &[&leaf.name]).await?;
    if row.try_get::<_, i64>(0)? > CUT_BYTES_MAX {
        return Ok(false);
    }
    // Through the log: a relay's role may read that, and none of the leaves that were made since its grants. Alone and from end
    // to end, as the table is read when it is attached.
    let sql = if leaf.high.is_some() { sql!(leaf, "read") } else { sql!(leaf, "read_open") };
    let sql = sql
        .replace("@timeout@", &READ_TIMEOUT.as_millis().to_string())
        .replace("@low@", &leaf.low.to_string())
        .replace("@high@", &leaf.high.unwrap_or_default().to_string());
    match session.batch_execute(&sql).await.map_err(DbError::from) {
        Err(error) if error.kind() == ErrorKind::Busy => Ok(false),
        other => other.map(|()| true),
    }
}

/// Writes down what is in the way, or that nothing is any more.
async fn note(session: &Session, obstacle: Option<&str>) -> Db<()> {
    session.execute_typed(sql!(leaf, "note"), &[(&obstacle, Type::TEXT)]).await?;
    Ok(())
}

/// How long who uses the log may have done so, to be waited for.
async fn patience(session: &Session) -> Db<Duration> {
    let due: Option<f64> = session.query_one(sql!(leaf, "due_for"), &[]).await?.try_get(0)?;
    let long = due.is_some_and(|seconds| seconds > DUE_MAX.as_secs_f64());
    Ok(if long { HOLDER_AGE_MAX_WHEN_DUE } else { HOLDER_AGE_MAX })
}

/// What should be said about the leaves, if anything, with what to do.
pub(crate) async fn warning(client: &impl GenericClient) -> Db<Option<String>> {
    let (leaves, (horizon, _, now)) = (leaves(client).await?, figures(client).await?);
    let open = leaves.iter().find(|leaf| leaf.high.is_none());
    let holds = |leaf: &&Leaf| leaf.low <= horizon + 1 && leaf.high.is_none_or(|high| high > horizon + 1);
    if !leaves.iter().any(|leaf| holds(&leaf)) {
        return Ok(Some(format!(
            "no leaf holds position {}, which is the next one: publishing fails; the sequence was set back: run `pillarbox \
             migrate --adopt`",
            horizon + 1
        )));
    }
    let row = client.query_one(sql!(leaf, "due"), &[]).await?;
    let due = row.try_get::<_, Option<String>>("leaves_due")?.zip(row.try_get::<_, Option<Time>>("leaves_due_since")?);
    Ok(match (open, due) {
        (None, _) => Some("the log has no open-ended leaf, so that publishing will fail; run `pillarbox prune`".into()),
        (_, Some((obstacle, since))) if now.since(since.0) >= DUE_MAX => Some(format!(
            "since {} the leaves of the log could not be laid as retention wants them, so that old events stay for longer: \
             {obstacle}; run `pillarbox prune` when publishers can wait for a few seconds",
            since.0
        )),
        (Some(leaf), _) if leaf.low <= horizon => Some(format!(
            "events are published into the open-ended leaf {}, which retention cannot empty; run `pillarbox prune` when \
             publishers can wait for a few seconds",
            leaf.name
        )),
        _ => None,
    })
}

impl PostgresStore {
    /// Lays the leaves of the log as retention wants them, however long publishers wait for that: a leaf in use is read from
    /// end to end if it has to be cut. Relays do this by themselves as long as it takes a moment only.
    pub async fn lay_leaves(&self, keep: Option<Duration>) -> Result<()> {
        let mut session = self.desk().await?;
        for _ in 0..TRIES {
            if due(&session, keep, 0, true).await?.is_none() {
                return Ok(note(&session, None).await?);
            }
            let Some(margin) = watch(&session, HOLDER_AGE_MAX_WHEN_DUE).await? else { continue };
            let Some(plan) = due(&session, keep, margin, true).await? else { continue };
            match lay(&mut session, &plan, HOLDER_AGE_MAX_WHEN_DUE, None).await {
                Err(error) if passes(&error) => {}
                other => {
                    other?;
                    return Ok(note(&session, None).await?);
                }
            }
        }
        Err(pillarbox::Error::new(
            ErrorKind::Busy,
            "the leaves could not be laid: a transaction that has used the log is still open; end it (see `pillarbox \
             status`) and try again",
        ))
    }
}

/// What is to be done about the leaves now.
async fn due(session: &Session, keep: Option<Duration>, margin: i64, may_cut: bool) -> Db<Option<Plan>> {
    let leaves = leaves(&**session).await?;
    let (horizon, size, now) = figures(&**session).await?;
    let view = View { leaves: &leaves, horizon, now, keep, size, margin };
    let cut = view.cut().filter(|_| may_cut).map(|(_, plan)| plan);
    Ok(cut.or_else(|| view.lay()))
}

/// The horizon, the wanted size of a leaf, and the time.
async fn figures(client: &impl GenericClient) -> Db<(Position, i64, Timestamp)> {
    let row = client.query_one(sql!(leaf, "figures"), &[]).await?;
    Ok((row.try_get("horizon")?, row.try_get("leaf_size")?, row.try_get::<_, Time>("now")?.0))
}

/// How many positions a leaf that is cut must still have room for; None if a transaction uses the log for longer than `age`, so
/// that waiting for it would only make publishers wait.
async fn watch(session: &Session, age: Duration) -> Db<Option<i64>> {
    let look = async || -> Db<(HashSet<String>, Position)> {
        let rows = session.query(sql!(leaf, "log_holders"), &[]).await?;
        Ok((rows.iter().map(|row| row.get(0)).collect(), figures(&**session).await?.0))
    };
    let (holders, horizon) = look().await?;
    tokio::time::sleep(age).await;
    let (later_holders, later_horizon) = look().await?;
    let published = later_horizon - horizon;
    Ok(holders.is_disjoint(&later_holders).then_some(published * MARGIN_OF_WATCH))
}

/// In one message, which is one transaction: publishers do not wait for us if we are stopped in the middle.
async fn lay(session: &mut Session, plan: &Plan, lock_timeout: Duration, timeout: Option<Duration>) -> Db<()> {
    let bounds: Vec<String> = plan.bounds.iter().map(ToString::to_string).collect();
    let sql = sql!(leaf, "arrange")
        .replace("@lock_timeout@", &lock_timeout.as_millis().to_string())
        .replace("@timeout@", &timeout.unwrap_or_default().as_millis().to_string())
        .replace("@bounds@", &bounds.join(","));
    session.batch_execute(&sql).await?;
    tracing::info!(
        from = plan.bounds[0],
        leaves = plan.bounds.len(),
        size = plan.size,
        "new leaves lie ahead of the log"
    );
    Ok(())
}

/// Whether the failure means no more than "not now".
pub(crate) fn passes(error: &DbError) -> bool {
    // Besides locks and time-outs: somebody published into a leaf that was to be laid anew (55006), or beyond a cut (23514).
    error.kind() == ErrorKind::Busy || error.code().is_some_and(|code| matches!(code.code(), "55006" | "23514"))
}
