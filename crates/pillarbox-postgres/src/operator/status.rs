use std::collections::HashMap;

use pillarbox::Position;
use pillarbox::admin::snapshot::{Figures, LOST_LOOKED_AT_MAX, LOST_SPOKEN_OF, Lost, Snapshot, SubscriptionRow};
use pillarbox::admin::{BacklogRow, LogStatus, REASON_HOLD, RecoveredCount, State, Status};
use pillarbox::store::{KeyHash, SubscriptionId};
use tokio_postgres::types::Type;
use tokio_postgres::{Portal, Row, Transaction};

use super::list::Matcher;
use super::{holders, load_snapshot};
use crate::error::Db;
use crate::queue::cause_of;
use crate::types::{Text, Time};

/// How many events above a subscription's floor are looked at to count what is pending; beyond it the rest is estimated
/// from their share.
pub const PENDING_COUNT_MAX: usize = 100_000;

/// A log of so many positions is counted; of a larger one the positions are, less those that are closed.
const EVENTS_COUNT_MAX: i64 = 10_000;

/// How many rows travel at once.
const PAGE_ROWS: i32 = 5_000;

pub(super) async fn status(tx: &Transaction<'_>) -> Db<Status> {
    let snapshot = load_snapshot(tx).await?;
    let mut log = log_status(tx, &snapshot).await?;
    let mut figures = deliveries(tx).await?;
    backlog(tx, &snapshot, &mut figures).await?;
    log.alarms.extend(snapshot.hold_alarms(&figures));
    log.alarms.extend(lost(tx).await?.iter().map(Lost::alarm));
    let bytes_each = log.bytes / log.events.max(1);
    let (subscriptions, instances) =
        (snapshot.subscription_statuses(&figures, bytes_each), snapshot.instance_statuses());
    Ok(Status { at: snapshot.now, log, subscriptions, instances })
}

async fn log_status(tx: &Transaction<'_>, snapshot: &Snapshot) -> Db<LogStatus> {
    let parameters = [
        (&snapshot.log_start as _, Type::INT8),
        (&snapshot.horizon as _, Type::INT8),
        (&EVENTS_COUNT_MAX as _, Type::INT8),
    ];
    let (figures, held) = tokio::join!(tx.query_typed_one(sql!(event, "figures"), &parameters), holders::of_floor(tx));
    let (figures, held) = (figures?, held?);
    let mut alarms: Vec<String> = crate::leaves::warning(tx).await?.into_iter().collect();
    alarms.extend(holders::alarms(tx).await?);
    let is_checked: bool = tx.query_typed_one(sql!(meta, "publishing"), &[]).await?.try_get("is_checked")?;
    if !is_checked {
        alarms.push("events are not checked when they are published: see `pillarbox doctor`".to_owned());
    }
    if !held.is_empty() {
        alarms.extend(holders::holes(tx, snapshot).await?);
    }
    // Where an age is hidden from this role, nobody knows which is the highest.
    let seconds = held.iter().try_fold(0.0, |oldest: f64, holder| Some(oldest.max(holder.seconds?)));
    Ok(LogStatus {
        log_id: snapshot.log_id,
        incarnation: snapshot.incarnation,
        schema_version: snapshot.schema_version,
        log_start: snapshot.log_start,
        horizon: snapshot.horizon,
        events: figures.try_get("events")?,
        bytes: figures.try_get("bytes")?,
        kept: figures.try_get("kept")?,
        held_seconds: seconds,
        holders: held.iter().map(holders::Holder::of_floor).collect(),
        recovery_at: snapshot.recovery_at,
        alarms,
    })
}

/// Which subscriptions have lost events because their hold was over.
async fn lost(tx: &Transaction<'_>) -> Db<Vec<Lost>> {
    let seconds = LOST_SPOKEN_OF.as_secs_f64();
    let parameters =
        [(&REASON_HOLD as _, Type::TEXT), (&seconds as _, Type::FLOAT8), (&LOST_LOOKED_AT_MAX as _, Type::INT8)];
    let lost = |row: &Row| {
        Ok(Lost {
            subscription: row.try_get("name")?,
            events: row.try_get("events")?,
            to: row.try_get("upto")?,
            at: row.try_get::<_, Time>("last_at")?.0,
            more: row.try_get("more")?,
        })
    };
    tx.query_typed(sql!(skip, "lost"), &parameters).await?.iter().map(lost).collect()
}

/// The figures of the slow path.
async fn deliveries(tx: &Transaction<'_>) -> Db<HashMap<SubscriptionId, Figures>> {
    let (counts, oldest, recovered) = tokio::try_join!(
        tx.query_typed(sql!(delivery, "figures"), &[]),
        tx.query_typed(sql!(delivery, "oldest"), &[]),
        tx.query_typed(sql!(queue, "recovered"), &[]),
    )?;
    let mut figures = HashMap::<_, Figures>::new();
    for row in &counts {
        let of = figures.entry(SubscriptionId(row.try_get("subscription")?)).or_default();
        if let Some(state) = State::from_name(row.try_get("state")?) {
            let count = of.by_state.entry(state).or_default();
            *count = count.saturating_add_signed(row.try_get::<_, i64>("count")?);
        }
    }
    for row in &oldest {
        let of = figures.entry(SubscriptionId(row.try_get("id")?)).or_default();
        of.oldest = row.try_get::<_, Option<Time>>("oldest")?.map(|time| time.0);
        of.oldest_due = row.try_get::<_, Option<Time>>("oldest_due")?.map(|time| time.0);
        of.processing_since = row.try_get::<_, Option<Time>>("processing_since")?.map(|time| time.0);
    }
    for row in &recovered {
        let of = figures.entry(SubscriptionId(row.try_get("subscription")?)).or_default();
        of.recovered.push(RecoveredCount {
            cause: cause_of(row.try_get("cause")?),
            count: row.try_get::<_, i64>("count")? as u64,
            last_at: row.try_get::<_, Time>("last_at")?.0,
        });
    }
    Ok(figures)
}

/// Counts the events of the log that no cursor has settled. Subscriptions that stand near each other are counted in one go;
/// for each at least half of `PENDING_COUNT_MAX` events are looked at, or all.
async fn backlog(tx: &Transaction<'_>, snapshot: &Snapshot, figures: &mut HashMap<SubscriptionId, Figures>) -> Db<()> {
    let mut todo: Vec<&SubscriptionRow> = snapshot.subscriptions.iter().collect();
    todo.sort_by_key(|subscription| subscription.floor());
    while let Some(first) = todo.first() {
        let lowest = first.floor();
        let mut pages = Pages::open(tx, &Matcher::default(), lowest, PENDING_COUNT_MAX).await?;
        let (mut looked_at, mut middle, mut last) = (0, lowest, lowest);
        let mut counted: Vec<Figures> = todo.iter().map(|_| Figures::default()).collect();
        while let Some(rows) = pages.next().await? {
            for row in &rows {
                let line = backlog_row(row)?;
                looked_at += 1;
                last = line.position;
                if looked_at == PENDING_COUNT_MAX / 2 {
                    middle = last;
                }
                let waiting = todo.iter().zip(&mut counted).filter(|(subscription, _)| line.awaits(subscription));
                waiting.for_each(|(_, of)| of.take(line.created_at, line.deliver_at, snapshot.now));
            }
        }
        let whole = looked_at < PENDING_COUNT_MAX;
        let mut left = Vec::new();
        for (subscription, of) in todo.into_iter().zip(counted) {
            if !whole && subscription.floor() > middle {
                left.push(subscription);
                continue;
            }
            let looked_through = (last - subscription.floor()).max(1) as f64;
            let beyond = if whole { 0.0 } else { (snapshot.horizon - last).max(0) as f64 / looked_through };
            let into = figures.entry(subscription.id).or_default();
            into.log_pending = of.log_pending + (of.log_pending as f64 * beyond) as u64;
            into.log_delayed = of.log_delayed;
            into.unsettled_since = of.unsettled_since;
            into.oldest = [into.oldest, of.oldest].into_iter().flatten().min();
        }
        todo = left;
    }
    Ok(())
}

/// The rows of `backlog` in `sql/event.sql`, a page at a time.
pub(super) struct Pages<'a> {
    tx: &'a Transaction<'a>,
    portal: Portal,
    ended: bool,
}

impl<'a> Pages<'a> {
    /// At most `limit` events above `after`, in log order.
    pub(super) async fn open(
        tx: &'a Transaction<'_>,
        matcher: &Matcher<'_>,
        after: Position,
        limit: usize,
    ) -> Db<Pages<'a>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let statement = tx.prepare(sql!(event, "backlog")).await?;
        let Matcher { key, topic, topic_prefix, correlation_id } = matcher;
        let portal = tx.bind(&statement, &[&after, key, topic, topic_prefix, correlation_id, &limit]).await?;
        Ok(Pages { tx, portal, ended: false })
    }

    /// The next page; None when there is none.
    pub(super) async fn next(&mut self) -> Db<Option<Vec<Row>>> {
        if self.ended {
            return Ok(None);
        }
        let rows = self.tx.query_portal(&self.portal, PAGE_ROWS).await?;
        self.ended = rows.len() < PAGE_ROWS as usize;
        Ok((!rows.is_empty()).then_some(rows))
    }
}

/// A row that has the columns of `backlog` in `sql/event.sql`.
pub(super) fn backlog_row(row: &Row) -> Db<BacklogRow<'_>> {
    // As whoever reads the log sees it.
    let key = row.try_get::<_, Option<Text<'_>>>("key")?.and_then(Text::whole);
    Ok(BacklogRow {
        position: row.try_get("position")?,
        topic: row.try_get::<_, Text<'_>>("topic")?.0,
        r#type: row.try_get::<_, Text<'_>>("type")?.0,
        key_hash: key.map(KeyHash::of),
        key,
        deliver_at: row.try_get::<_, Option<Time>>("deliver_at")?.map(|time| time.0),
        created_at: row.try_get::<_, Time>("created_at")?.0,
    })
}
