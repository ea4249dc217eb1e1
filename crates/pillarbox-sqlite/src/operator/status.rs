use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use pillarbox::admin::world::{Figures, LOST_LOOKED_AT_MAX, LOST_SPOKEN_OF, Lost, SubscriptionRow, World};
use pillarbox::admin::{LogStatus, REASON_HOLD, RecoveredCount, State, Status};
use pillarbox::store::{FormerFilters, KeyHash, RecoveryCause, SubscriptionId};
use pillarbox::{Position, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::maintain::{WAL_BYTES_MAX, wal_bytes};
use crate::connection::meta_number;
use crate::error::Db;
use crate::home::log_id;
use crate::publish::FOREVER_MS;
use crate::reader::{text, whole_key};
use crate::store::Desk;

/// How many events are looked at to count what is pending; beyond it the rest is estimated from their share.
pub const PENDING_COUNT_MAX: usize = 1_000_000;

/// Events kept aside are counted up to this number.
const KEPT_COUNT_MAX: i64 = 100_000;

pub(super) fn status(tx: &Connection, desk: &Desk) -> Db<Status> {
    let world = super::load_world(tx, &desk.folder)?;
    let mut log = log_status(tx, desk, &world)?;
    let mut figures = deliveries(tx, world.now)?;
    backlog(tx, &world, &mut figures)?;
    log.alarms.extend(world.hold_alarms(retention_keep(tx)?, &figures));
    log.alarms.extend(lost(tx, world.now)?.iter().map(Lost::alarm));
    let bytes_each = log.bytes / log.events.max(1);
    let (subscriptions, instances) = (world.subscription_statuses(&figures, bytes_each), world.instance_statuses());
    Ok(Status { at: world.now, log, subscriptions, instances })
}

fn log_status(tx: &Connection, desk: &Desk, world: &World) -> Db<LogStatus> {
    let positions = world.horizon - world.log_start + 1;
    let events = if positions <= PENDING_COUNT_MAX as i64 {
        tx.query_row("select count(*) from pillarbox_event", [], |row| row.get(0))?
    } else {
        positions
    };
    let sql = "select page_count * page_size from pragma_page_count, pragma_page_size";
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
        log_id: log_id(tx)?,
        incarnation: meta_number(tx, "incarnation")?,
        schema_version: meta_number(tx, "schema_version")?,
        log_start: world.log_start,
        horizon: world.horizon,
        events,
        bytes: tx.query_row(sql, [], |row| row.get::<_, i64>(0))? + wal as i64,
        kept: tx.query_row(include_str!("../sql/kept_count.sql"), [KEPT_COUNT_MAX], |row| row.get(0))?,
        holders,
        held_seconds: None,
        recovery_at: recovery_at(tx)?,
        alarms: Vec::new(),
    })
}

/// Nobody's retention removes what is younger; None: it removes nothing.
fn retention_keep(tx: &Connection) -> Db<Option<Duration>> {
    let keep = meta_number(tx, "retention_keep_ms")?;
    Ok((keep != FOREVER_MS).then(|| Duration::from_millis(keep.max(0) as u64)))
}

/// Which subscriptions have lost events because their hold was over.
fn lost(tx: &Connection, now: Timestamp) -> Db<Vec<Lost>> {
    let since = now.0 - LOST_SPOKEN_OF.as_millis() as i64;
    let mut statement = tx.prepare_cached(include_str!("../sql/lost.sql"))?;
    let lost = statement.query_map(params![REASON_HOLD, since, LOST_LOOKED_AT_MAX], |row| {
        let (to, at) = (row.get(2)?, Timestamp(row.get(3)?));
        Ok(Lost { subscription: row.get(0)?, events: row.get(1)?, more: row.get(4)?, to, at })
    })?;
    Ok(lost.collect::<rusqlite::Result<_>>()?)
}

/// When claims were last looked through.
fn recovery_at(tx: &Connection) -> Db<Option<Timestamp>> {
    let sql = "select value from pillarbox_meta where name = 'recovery_at'";
    Ok(tx.query_row(sql, [], |row| row.get(0)).optional()?.map(Timestamp))
}

/// The figures of the slow path.
fn deliveries(tx: &Connection, now: Timestamp) -> Db<HashMap<SubscriptionId, Figures>> {
    let mut figures = HashMap::<_, Figures>::new();
    let mut statement = tx.prepare_cached(include_str!("../sql/delivery_figures.sql"))?;
    let mut rows = statement.query([now.0])?;
    while let Some(row) = rows.next()? {
        let of = figures.entry(SubscriptionId(row.get(0)?)).or_default();
        if let Some(state) = State::from_name(&row.get::<_, String>(1)?) {
            let count = of.by_state.entry(state).or_default();
            *count = count.saturating_add_signed(row.get::<_, i64>(2)?);
        }
    }
    let mut statement = tx.prepare_cached(include_str!("../sql/delivery_oldest.sql"))?;
    let mut rows = statement.query([now.0])?;
    while let Some(row) = rows.next()? {
        let of = figures.entry(SubscriptionId(row.get(0)?)).or_default();
        let time = |index| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(index)?.map(Timestamp));
        let due = time(3)?;
        of.oldest = [time(1)?, due].into_iter().flatten().min();
        of.oldest_due = [time(2)?, due].into_iter().flatten().min();
    }
    claims(tx, &mut figures)?;
    Ok(figures)
}

/// The figures of claims.
fn claims(tx: &Connection, figures: &mut HashMap<SubscriptionId, Figures>) -> Db<()> {
    let mut statement = tx.prepare_cached(include_str!("../sql/delivery_processing.sql"))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let since = row.get::<_, Option<i64>>(1)?.map(Timestamp);
        figures.entry(SubscriptionId(row.get(0)?)).or_default().processing_since = since;
    }
    let causes = [RecoveryCause::Crash, RecoveryCause::Lease, RecoveryCause::Timeout, RecoveryCause::Operator];
    let mut statement = tx.prepare_cached(include_str!("../sql/recovery_counts.sql"))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let name: String = row.get(1)?;
        let Some(cause) = causes.into_iter().find(|cause| cause.name() == name) else { continue };
        let counted = RecoveredCount { cause, count: row.get::<_, i64>(2)? as u64, last_at: Timestamp(row.get(3)?) };
        figures.entry(SubscriptionId(row.get(0)?)).or_default().recovered.push(counted);
    }
    Ok(())
}

/// Counts the events of the log that no cursor has settled.
fn backlog(tx: &Connection, world: &World, figures: &mut HashMap<SubscriptionId, Figures>) -> Db<()> {
    let Some(lowest) = world.subscriptions.iter().map(SubscriptionRow::floor).min() else { return Ok(()) };
    let mut statement = tx.prepare_cached(include_str!("../sql/backlog.sql"))?;
    let mut rows = statement.query([lowest, PENDING_COUNT_MAX as i64])?;
    let (mut looked_at, mut last) = (0, lowest);
    while let Some(row) = rows.next()? {
        looked_at += 1;
        last = row.get(0)?;
        let line = Line::of(row)?;
        for subscription in world.subscriptions.iter().filter(|subscription| line.awaits(subscription)) {
            figures.entry(subscription.id).or_default().take(line.created_at, line.deliver_at, world.now);
        }
    }
    if looked_at == PENDING_COUNT_MAX {
        let share = (world.horizon - last) as f64 / (last - lowest).max(1) as f64;
        figures.values_mut().for_each(|of| of.log_pending += (of.log_pending as f64 * share) as u64);
    }
    Ok(())
}

/// What decides about a row of `sql/backlog.sql`.
pub(super) struct Line<'a> {
    pub(super) position: Position,
    pub(super) topic: Cow<'a, str>,
    pub(super) r#type: Cow<'a, str>,
    /// None also where it is no text, as in [`pillarbox::Event::malformed`].
    pub(super) key: Option<&'a str>,
    pub(super) deliver_at: Option<Timestamp>,
    pub(super) created_at: Timestamp,
    hash: Option<KeyHash>,
}

impl<'a> Line<'a> {
    pub(super) fn of(row: &'a Row<'_>) -> Db<Self> {
        let key = whole_key(row.get_ref(3)?);
        Ok(Line {
            position: row.get(0)?,
            topic: text(row.get_ref(1)?),
            r#type: text(row.get_ref(2)?),
            hash: key.map(KeyHash::of),
            key,
            deliver_at: row.get::<_, Option<i64>>(4)?.map(Timestamp),
            created_at: Timestamp(row.get(5)?),
        })
    }

    /// Whether the subscription wants the event and has not settled it.
    pub(super) fn awaits(&self, subscription: &SubscriptionRow) -> bool {
        subscription.awaits(self.position, self.hash, &self.topic, &self.r#type)
    }

    /// The same, and it had not settled it when a filter ended: else it was received, also where the cursor was cut since.
    pub(super) fn is_lost_to(&self, subscription: &SubscriptionRow, formers: &FormerFilters) -> bool {
        self.awaits(subscription) && formers.judge_of(self.hash, self.position).is_none()
    }
}
