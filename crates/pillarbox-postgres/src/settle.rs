use std::collections::{HashMap, HashSet};

use futures_util::future;
use pillarbox::{
    AttemptError, Delivery, ERROR_BYTES_MAX, ERRORS_KEPT_MAX, LaneRef, LaneWrite, Position, RangeSet, Settlement,
    SubscriptionId,
};
use tokio_postgres::Transaction;
use uuid::Uuid;

use crate::connection::Session;
use crate::doorbell::announce;
use crate::error::Db;
use crate::types::{Time, multirange, range_set};
use crate::{home, queue};

/// A row of `progress` grows for this long before another begins; so exactly `show` can say when an event was settled.
const PROGRESS_SPAN_MS: f64 = 60_000.0;

/// What the fence found of a lane that is still at its epoch.
pub(crate) struct Held {
    floor: Position,
    revision: i64,
    /// The ranges above the floor, as PostgreSQL prints them.
    settled: String,
}

impl Held {
    /// Whether the stored cursor counts a position as settled.
    pub(crate) fn has_settled(&self) -> Db<impl Fn(Position) -> bool> {
        let (floor, settled) = (self.floor, range_set(&self.settled)?);
        Ok(move |position| position <= floor || settled.contains(position))
    }
}

/// A lane's write and what was found of it.
pub(crate) type Write<'a> = (&'a LaneWrite, Held);

/// Names a delivery.
type DeliveryRef = (i64, Position);

/// What a settlement led to.
pub(crate) struct Settled {
    /// Which lanes were still at their epoch.
    pub(crate) answers: Vec<bool>,
    /// There are new rows of queues.
    pub(crate) queued: bool,
}

/// Writes a settlement of instance `me` in one transaction.
pub(crate) async fn settle(session: &mut Session, settlement: &Settlement, me: Option<i32>) -> Db<Settled> {
    let lock = session.statement(include_str!("sql/settle_lock.sql")).await?;
    let statements = Statements::prepare(session).await?;
    let tx = session.begin().await?;
    let writes = fence(&tx, &lock, settlement).await?;
    check_horizon(&tx, &statements, &writes).await?;
    write_cursors(&tx, &statements, &writes).await?;
    write_deliveries(&tx, &statements, &writes).await?;
    let behind = queue::put(&tx, &statements.queue, &writes, me).await?;
    close_dead(&tx, &statements, &settlement.dead).await?;
    if writes.iter().any(|(write, _)| write.release) {
        // Whoever should have the lane takes it at once, and not when it next looks.
        announce(&tx, "fleet").await?;
    }
    let answers = answers(settlement, &writes);
    tx.commit().await?;
    let queued = behind.is_some();
    behind.unwrap_or_default().promote_or_leave(session).await;
    Ok(Settled { answers, queued })
}

/// The writes of those lanes that are still at their epoch, and stay there until the transaction ends.
pub(crate) async fn fence<'a>(
    tx: &Transaction<'_>,
    lock: &tokio_postgres::Statement,
    settlement: &'a Settlement,
) -> Db<Vec<Write<'a>>> {
    let subscriptions: Vec<i64> = settlement.lanes.iter().map(|write| write.lane.subscription.0).collect();
    let lanes: Vec<i32> = settlement.lanes.iter().map(|write| write.lane.lane as i32).collect();
    let epochs: Vec<i64> = settlement.lanes.iter().map(|write| write.epoch).collect();
    let mut held: HashMap<LaneRef, Held> = HashMap::new();
    for row in tx.query(lock, &[&subscriptions, &lanes, &epochs]).await? {
        let lane = LaneRef { subscription: SubscriptionId(row.try_get(0)?), lane: row.try_get::<_, i32>(1)? as u32 };
        held.insert(lane, Held { floor: row.try_get(2)?, revision: row.try_get(3)?, settled: row.try_get(4)? });
    }
    Ok(settlement.lanes.iter().filter_map(|write| Some((write, held.remove(&write.lane)?))).collect())
}

/// Which lanes of a settlement are among those to be written.
pub(crate) fn answers(settlement: &Settlement, writes: &[Write<'_>]) -> Vec<bool> {
    settlement.lanes.iter().map(|write| writes.iter().any(|(own, _)| own.lane == write.lane)).collect()
}

/// Everything that a settlement may send, prepared before its transaction begins.
pub(crate) struct Statements {
    horizon: tokio_postgres::Statement,
    cursor: tokio_postgres::Statement,
    progress: tokio_postgres::Statement,
    put: tokio_postgres::Statement,
    add: tokio_postgres::Statement,
    errors: tokio_postgres::Statement,
    change: tokio_postgres::Statement,
    finish: tokio_postgres::Statement,
    pub(crate) queue: tokio_postgres::Statement,
    dead: tokio_postgres::Statement,
}

impl Statements {
    pub(crate) async fn prepare(session: &Session) -> Db<Self> {
        Ok(Statements {
            horizon: session.statement(include_str!("sql/horizon.sql")).await?,
            cursor: session.statement(include_str!("sql/settle_cursor.sql")).await?,
            progress: session.statement(include_str!("sql/progress_advance.sql")).await?,
            put: session.statement(include_str!("sql/delivery_put.sql")).await?,
            add: session.statement(include_str!("sql/delivery_add.sql")).await?,
            errors: session.statement(include_str!("sql/delivery_errors.sql")).await?,
            change: session.statement(include_str!("sql/delivery_change.sql")).await?,
            finish: session.statement(include_str!("sql/delivery_finish.sql")).await?,
            queue: queue::put_statement(session).await?,
            dead: session.statement(include_str!("sql/close_dead.sql")).await?,
        })
    }
}

/// Written, a cursor above the horizon would skip the events that get these positions next.
pub(crate) async fn check_horizon(tx: &Transaction<'_>, statements: &Statements, writes: &[Write<'_>]) -> Db<()> {
    let highest = |write: &LaneWrite| write.cursor.settled.last().unwrap_or(0).max(write.cursor.floor);
    let highest = writes.iter().map(|(write, _)| highest(write)).max().unwrap_or(0);
    let horizon: Position = tx.query_one(&statements.horizon, &[]).await?.try_get(0)?;
    if highest > horizon {
        let what = format!("position {highest} was read, and only those up to {horizon} have been handed out");
        return Err(home::not_itself(&what));
    }
    Ok(())
}

pub(crate) async fn write_cursors(tx: &Transaction<'_>, statements: &Statements, writes: &[Write<'_>]) -> Db<()> {
    if writes.is_empty() {
        return Ok(());
    }
    let subscriptions: Vec<i64> = writes.iter().map(|(write, _)| write.lane.subscription.0).collect();
    let lanes: Vec<i32> = writes.iter().map(|(write, _)| write.lane.lane as i32).collect();
    let floors: Vec<i64> = writes.iter().map(|(write, _)| write.cursor.floor).collect();
    let settled: Vec<String> = writes.iter().map(|(write, _)| multirange(&write.cursor.settled)).collect();
    let anchors = || writes.iter().map(|(write, _)| write.cursor.anchor);
    let anchor_positions: Vec<Option<i64>> = anchors().map(|anchor| anchor.map(|anchor| anchor.0)).collect();
    let anchor_ids: Vec<Option<Uuid>> = anchors().map(|anchor| anchor.map(|anchor| anchor.1)).collect();
    let releases: Vec<bool> = writes.iter().map(|(write, _)| write.release).collect();
    let calm: Vec<bool> = writes.iter().map(|(write, _)| write.calm).collect();
    let cursor_values: [&(dyn tokio_postgres::types::ToSql + Sync); 8] =
        [&subscriptions, &lanes, &floors, &settled, &anchor_positions, &anchor_ids, &releases, &calm];
    let risen: Vec<&Write<'_>> = writes.iter().filter(|(write, held)| write.cursor.floor > held.floor).collect();
    let subscriptions: Vec<i64> = risen.iter().map(|(write, _)| write.lane.subscription.0).collect();
    let lanes: Vec<i32> = risen.iter().map(|(write, _)| write.lane.lane as i32).collect();
    let epochs: Vec<i64> = risen.iter().map(|(write, _)| write.epoch).collect();
    let from: Vec<i64> = risen.iter().map(|(_, held)| held.floor).collect();
    let to: Vec<i64> = risen.iter().map(|(write, _)| write.cursor.floor).collect();
    let progress_values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
        [&subscriptions, &lanes, &epochs, &from, &to, &PROGRESS_SPAN_MS];
    future::try_join(
        tx.execute(&statements.cursor, &cursor_values),
        tx.execute(&statements.progress, &progress_values),
    )
    .await?;
    Ok(())
}

/// Puts, then changes, then finishes. Where an operator has changed deliveries since they were loaded, only those that
/// are put now are changed: what the operator said is newer than what the attempts in flight have to say.
pub(crate) async fn write_deliveries(tx: &Transaction<'_>, statements: &Statements, writes: &[Write<'_>]) -> Db<()> {
    let (mut put, mut add) = (Vec::new(), Vec::new());
    for (write, held) in writes {
        let into = if held.revision == write.revision { &mut put } else { &mut add };
        into.extend(write.put.iter().map(|delivery| (write.lane, delivery)));
    }
    if !put.is_empty() {
        put_rows(tx, &statements.put, &put).await?;
    }
    let mut own: HashSet<DeliveryRef> = HashSet::new();
    if !add.is_empty() {
        for row in put_rows(tx, &statements.add, &add).await? {
            own.insert((row.try_get(0)?, row.try_get(1)?));
        }
    }
    let mut changes = Vec::new();
    for (write, held) in writes {
        let subscription = write.lane.subscription.0;
        let may =
            |delivery: &Delivery| held.revision == write.revision || own.contains(&(subscription, delivery.position));
        let own = write.change.iter().filter(|(delivery, _)| may(delivery));
        changes.extend(own.map(|(delivery, error)| (subscription, delivery, error.as_ref())));
    }
    if !changes.is_empty() {
        change_rows(tx, statements, &changes).await?;
    }
    let finish: Vec<DeliveryRef> = writes
        .iter()
        .flat_map(|(write, _)| write.finish.iter().map(|position| (write.lane.subscription.0, *position)))
        .collect();
    if !finish.is_empty() {
        let (subscriptions, positions): (Vec<i64>, Vec<Position>) = finish.into_iter().unzip();
        tx.execute(&statements.finish, &[&subscriptions, &positions]).await?;
    }
    Ok(())
}

/// Inserts deliveries; the rows that the statement returns.
async fn put_rows(
    tx: &Transaction<'_>,
    statement: &tokio_postgres::Statement,
    rows: &[(LaneRef, &Delivery)],
) -> Db<Vec<tokio_postgres::Row>> {
    let subscriptions: Vec<i64> = rows.iter().map(|(lane, _)| lane.subscription.0).collect();
    let positions: Vec<i64> = rows.iter().map(|(_, delivery)| delivery.position).collect();
    let lanes: Vec<i32> = rows.iter().map(|(lane, _)| lane.lane as i32).collect();
    let arrivals: Vec<i64> = rows.iter().map(|(_, delivery)| delivery.arrival).collect();
    let keys: Vec<Option<&str>> = rows.iter().map(|(_, delivery)| delivery.key.as_deref()).collect();
    let states: Vec<&str> = rows.iter().map(|(_, delivery)| delivery.state.name()).collect();
    let attempts: Vec<i32> = rows.iter().map(|(_, delivery)| delivery.attempts as i32).collect();
    let due_at: Vec<Time> = rows.iter().map(|(_, delivery)| Time(delivery.due_at)).collect();
    let since: Vec<Time> = rows.iter().map(|(_, delivery)| Time(delivery.since)).collect();
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 9] =
        [&subscriptions, &positions, &lanes, &arrivals, &keys, &states, &attempts, &due_at, &since];
    Ok(tx.query(statement, &values).await?)
}

/// Changes deliveries that are still there: an operator may have skipped one in the meantime.
async fn change_rows(
    tx: &Transaction<'_>,
    statements: &Statements,
    rows: &[(i64, &Delivery, Option<&AttemptError>)],
) -> Db<()> {
    let rows = one_a_delivery(rows);
    let failed: Vec<DeliveryRef> = rows
        .iter()
        .filter(|(.., errors)| !errors.is_empty())
        .map(|(subscription, delivery, _)| (*subscription, delivery.position))
        .collect();
    let mut kept: HashMap<DeliveryRef, String> = HashMap::new();
    if !failed.is_empty() {
        let (subscriptions, positions): (Vec<i64>, Vec<Position>) = failed.into_iter().unzip();
        for row in tx.query(&statements.errors, &[&subscriptions, &positions]).await? {
            kept.insert((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?);
        }
    }
    let errors: Vec<Option<String>> = rows
        .iter()
        .map(|(subscription, delivery, errors)| {
            let kept = kept.get(&(*subscription, delivery.position))?;
            (!errors.is_empty()).then(|| with_errors(kept, errors.iter().copied()))
        })
        .collect();
    let subscriptions: Vec<i64> = rows.iter().map(|(subscription, ..)| *subscription).collect();
    let positions: Vec<i64> = rows.iter().map(|(_, delivery, _)| delivery.position).collect();
    let arrivals: Vec<i64> = rows.iter().map(|(_, delivery, _)| delivery.arrival).collect();
    let states: Vec<&str> = rows.iter().map(|(_, delivery, _)| delivery.state.name()).collect();
    let attempts: Vec<i32> = rows.iter().map(|(_, delivery, _)| delivery.attempts as i32).collect();
    let due_at: Vec<Time> = rows.iter().map(|(_, delivery, _)| Time(delivery.due_at)).collect();
    let since: Vec<Time> = rows.iter().map(|(_, delivery, _)| Time(delivery.since)).collect();
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 8] =
        [&subscriptions, &positions, &arrivals, &states, &attempts, &due_at, &since, &errors];
    tx.execute(&statements.change, &values).await?;
    Ok(())
}

/// A delivery's last change, with the errors of all of them.
type Merged<'a> = (i64, &'a Delivery, Vec<&'a AttemptError>);

/// Several attempts may have failed since the last settlement. An UPDATE would take any one of several changes of a row: they are made
/// one, which has the last state and all errors.
fn one_a_delivery<'a>(rows: &[(i64, &'a Delivery, Option<&'a AttemptError>)]) -> Vec<Merged<'a>> {
    let mut merged: Vec<Merged<'a>> = Vec::with_capacity(rows.len());
    let mut places: HashMap<DeliveryRef, usize> = HashMap::new();
    for (subscription, delivery, error) in rows {
        let place = *places.entry((*subscription, delivery.position)).or_insert(merged.len());
        if place == merged.len() {
            merged.push((*subscription, delivery, Vec::new()));
        }
        merged[place].1 = delivery;
        merged[place].2.extend(error);
    }
    merged
}

/// The stored errors with some more, the oldest beyond the limit left out.
pub(crate) fn with_errors<'a>(kept: &str, more: impl IntoIterator<Item = &'a AttemptError>) -> String {
    let mut errors = parse_errors(kept);
    errors.extend(more.into_iter().map(storable));
    errors.drain(..errors.len().saturating_sub(ERRORS_KEPT_MAX));
    serde_json::to_string(&errors).expect("errors are JSON")
}

/// An error as it is kept.
pub(crate) fn storable(error: &AttemptError) -> AttemptError {
    let mut error = error.clone();
    error.message.truncate(error.message.floor_char_boundary(ERROR_BYTES_MAX));
    // PostgreSQL's text cannot hold it.
    error.message = error.message.replace('\0', "\u{fffd}");
    error
}

/// The stored errors of a delivery, oldest first.
pub(crate) fn parse_errors(text: &str) -> Vec<AttemptError> {
    serde_json::from_str(text).unwrap_or_default()
}

pub(crate) async fn close_dead(tx: &Transaction<'_>, statements: &Statements, dead: &RangeSet) -> Db<()> {
    if dead.is_empty() {
        return Ok(());
    }
    let low: Vec<Position> = dead.iter().map(|range| *range.start()).collect();
    let high: Vec<Position> = dead.iter().map(|range| *range.end()).collect();
    tx.execute(&statements.dead, &[&low, &high]).await?;
    Ok(())
}
