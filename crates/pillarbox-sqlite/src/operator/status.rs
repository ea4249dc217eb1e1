use std::collections::HashMap;

use pillarbox::Timestamp;
use pillarbox::admin::snapshot::{Figures, LOST_LOOKED_AT_MAX, LOST_SPOKEN_OF, Lost, Snapshot, SubscriptionRow};
use pillarbox::admin::{BacklogRow, LogStatus, REASON_HOLD, RecoveredCount, State, Status};
use pillarbox::store::{KeyHash, RecoveryCause, SubscriptionId};
use rusqlite::{Connection, Row, params};

use super::maintain::{WAL_BYTES_MAX, wal_bytes};
use crate::error::Db;
use crate::reader::{text, whole_key};
use crate::store::Desk;

/// How many events are looked at to count what is pending; beyond it the rest is estimated from their share.
pub const PENDING_COUNT_MAX: usize = 1_000_000;

/// Events kept aside are counted up to this number.
const KEPT_COUNT_MAX: i64 = 100_000;

pub(super) fn status(tx: &Connection, desk: &Desk) -> Db<Status> {
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let mut log = log_status(tx, desk, &snapshot)?;
    let mut figures = deliveries(tx, snapshot.now)?;
    backlog(tx, &snapshot, &mut figures)?;
    log.alarms.extend(snapshot.hold_alarms(&figures));
    log.alarms.extend(lost(tx, snapshot.now)?.iter().map(Lost::alarm));
    let bytes_each = log.bytes / log.events.max(1);
    let (subscriptions, instances) =
        (snapshot.subscription_statuses(&figures, bytes_each), snapshot.instance_statuses());
    Ok(Status { at: snapshot.now, log, subscriptions, instances })
}

fn log_status(tx: &Connection, desk: &Desk, snapshot: &Snapshot) -> Db<LogStatus> {
    let positions = snapshot.horizon - snapshot.log_start + 1;
    let events = if positions <= PENDING_COUNT_MAX as i64 {
        tx.query_row(sql!(event, "count"), [], |row| row.get(0))?
    } else {
        positions
    };
    let wal = wal_bytes(&desk.path);
    let mut holders = Vec::new();
    if wal > WAL_BYTES_MAX {
        holders.push(format!(
            "the write-ahead log has {} MiB: a transaction that has been reading for long keeps it from being written \
             back; end it (run `pillarbox doctor`)",
            wal / 1024 / 1024
        ));
    }
    Ok(LogStatus {
        log_id: snapshot.log_id,
        incarnation: snapshot.incarnation,
        schema_version: snapshot.schema_version,
        log_start: snapshot.log_start,
        horizon: snapshot.horizon,
        events,
        bytes: tx.query_row(sql!(connection, "file_bytes"), [], |row| row.get::<_, i64>(0))? + wal as i64,
        kept: tx.query_row(sql!(event, "kept_count"), [KEPT_COUNT_MAX], |row| row.get(0))?,
        holders,
        held_seconds: None,
        recovery_at: snapshot.recovery_at,
        alarms: Vec::new(),
    })
}

/// Which subscriptions have lost events because their hold was over.
fn lost(tx: &Connection, now: Timestamp) -> Db<Vec<Lost>> {
    let since = now.0 - LOST_SPOKEN_OF.as_millis() as i64;
    let mut statement = tx.prepare_cached(sql!(skip, "lost"))?;
    let lost = statement.query_map(params![REASON_HOLD, since, LOST_LOOKED_AT_MAX], |row| {
        let (to, at) = (row.get("upto")?, Timestamp(row.get("last_at")?));
        Ok(Lost { subscription: row.get("name")?, events: row.get("events")?, more: row.get("more")?, to, at })
    })?;
    Ok(lost.collect::<rusqlite::Result<_>>()?)
}

/// The figures of the slow path.
fn deliveries(tx: &Connection, now: Timestamp) -> Db<HashMap<SubscriptionId, Figures>> {
    let mut figures = HashMap::<_, Figures>::new();
    let mut statement = tx.prepare_cached(sql!(delivery, "figures"))?;
    let mut rows = statement.query([now.0])?;
    while let Some(row) = rows.next()? {
        let of = figures.entry(SubscriptionId(row.get("subscription")?)).or_default();
        if let Some(state) = State::from_name(&row.get::<_, String>("state")?) {
            let count = of.by_state.entry(state).or_default();
            *count = count.saturating_add_signed(row.get::<_, i64>("count")?);
        }
    }
    let mut statement = tx.prepare_cached(sql!(delivery, "oldest"))?;
    let mut rows = statement.query([now.0])?;
    while let Some(row) = rows.next()? {
        let of = figures.entry(SubscriptionId(row.get("id")?)).or_default();
        let time = |name| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(name)?.map(Timestamp));
        let due = time("delayed_due_at")?;
        of.oldest = [time("oldest")?, due].into_iter().flatten().min();
        of.oldest_due = [time("due_at")?, due].into_iter().flatten().min();
    }
    claims(tx, &mut figures)?;
    Ok(figures)
}

/// The figures of claims.
fn claims(tx: &Connection, figures: &mut HashMap<SubscriptionId, Figures>) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(queue, "processing_since"))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let since = row.get::<_, Option<i64>>("since")?.map(Timestamp);
        figures.entry(SubscriptionId(row.get("subscription")?)).or_default().processing_since = since;
    }
    let causes = [RecoveryCause::Crash, RecoveryCause::Lease, RecoveryCause::Timeout, RecoveryCause::Operator];
    let mut statement = tx.prepare_cached(sql!(queue, "recovered"))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let name: String = row.get("cause")?;
        let Some(cause) = causes.into_iter().find(|cause| cause.name() == name) else { continue };
        let counted = RecoveredCount {
            cause,
            count: row.get::<_, i64>("count")? as u64,
            last_at: Timestamp(row.get("last_at")?),
        };
        figures.entry(SubscriptionId(row.get("subscription")?)).or_default().recovered.push(counted);
    }
    Ok(())
}

/// Counts the events of the log that no cursor has settled.
fn backlog(tx: &Connection, snapshot: &Snapshot, figures: &mut HashMap<SubscriptionId, Figures>) -> Db<()> {
    let Some(lowest) = snapshot.subscriptions.iter().map(SubscriptionRow::floor).min() else { return Ok(()) };
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([lowest, PENDING_COUNT_MAX as i64])?;
    let (mut looked_at, mut last) = (0, lowest);
    while let Some(row) = rows.next()? {
        looked_at += 1;
        let line = backlog_row(row)?;
        last = line.position;
        for subscription in snapshot.subscriptions.iter().filter(|subscription| line.awaits(subscription)) {
            figures.entry(subscription.id).or_default().take(line.created_at, line.deliver_at, snapshot.now);
        }
    }
    if looked_at == PENDING_COUNT_MAX {
        let share = (snapshot.horizon - last) as f64 / (last - lowest).max(1) as f64;
        figures.values_mut().for_each(|of| of.log_pending += (of.log_pending as f64 * share) as u64);
    }
    Ok(())
}

/// A row that begins as the `backlog` of `sql/event.sql`. By position, as an event is decoded: there may be a million of them.
pub(super) fn backlog_row<'a>(row: &'a Row<'_>) -> Db<BacklogRow<'a>> {
    let key = whole_key(row.get_ref(3)?);
    Ok(BacklogRow {
        position: row.get(0)?,
        topic: text(row.get_ref(1)?),
        r#type: text(row.get_ref(2)?),
        key_hash: key.map(KeyHash::of),
        key,
        deliver_at: row.get::<_, Option<i64>>(4)?.map(Timestamp),
        created_at: Timestamp(row.get(5)?),
    })
}
