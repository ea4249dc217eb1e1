use std::collections::HashSet;

use pillarbox::store::{AttemptError, DeliveryRow, LaneRef, LaneWrite, Queued, RangeSet, Settlement, SubscriptionId};
use pillarbox::{Position, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};

use crate::connection::{horizon, meta_number, raise_queue_revision, raise_revision, write};
use crate::error::{Db, DbError};
use crate::ownership::{Writer, record_progress};
use crate::queue::put_queued;

/// A record of progress is extended by later settlements until it is this old.
const PROGRESS_SPAN_MS: i64 = 10_000;

impl Writer {
    /// Writes what became of events; false for a lane whose epoch has moved on.
    pub(crate) fn settle(&self, settlement: &Settlement) -> Db<Vec<bool>> {
        let claims = settlement.lanes.iter().flat_map(|lane| &lane.queue).any(|queued| queued.claim.is_some());
        let me = claims.then(|| self.me()).transpose()?;
        let (answers, revision, queue_revision) = write(&self.relaxed, |tx| {
            let mut answers = Vec::with_capacity(settlement.lanes.len());
            let horizon = horizon(tx)?;
            let mut claimable = false;
            for lane in &settlement.lanes {
                let queue = new_rows(tx, lane)?;
                let written = settle_lane(tx, lane, horizon)?;
                claimable |= written && put_queued(tx, me, lane.lane, &queue)?;
                answers.push(written);
            }
            close_dead(tx, &settlement.closed)?;
            let released = settlement.lanes.iter().zip(&answers).any(|(lane, written)| lane.release && *written);
            let revision = released.then(|| raise_revision(tx)).transpose()?;
            Ok((answers, revision, claimable.then(|| raise_queue_revision(tx)).transpose()?))
        })?;
        revision.into_iter().for_each(|revision| self.bell.raised(revision));
        queue_revision.into_iter().for_each(|revision| self.bell.filled(revision));
        Ok(answers)
    }
}

/// What the stored cursor has not settled. The owner repeats a settlement that was not answered; by then its rows may be done.
fn new_rows<'a>(tx: &Transaction<'_>, write: &'a LaneWrite) -> Db<Vec<&'a Queued>> {
    if write.queue.is_empty() {
        return Ok(Vec::new());
    }
    let lane = params![write.lane.subscription.0, write.lane.lane];
    let found = tx
        .prepare_cached(sql!(cursor, "settled_of"))?
        .query_row(lane, |row| Ok((row.get("floor")?, row.get("settled")?)))
        .optional()?;
    // A lane that is gone is refused.
    let Some((floor, settled)): Option<(Position, String)> = found else { return Ok(Vec::new()) };
    let settled: RangeSet = settled.parse()?;
    let new = |queued: &&Queued| {
        let position = queued.delivery.position;
        position > floor && !settled.contains(position)
    };
    Ok(write.queue.iter().filter(new).collect())
}

fn settle_lane(tx: &Transaction<'_>, write: &LaneWrite, horizon: Position) -> Db<bool> {
    let LaneRef { subscription, lane } = write.lane;
    // The transaction holds the write lock already, so the epoch cannot move between this read and the writes.
    let fence = params![subscription.0, lane, write.epoch];
    let mut statement = tx.prepare_cached(sql!(cursor, "at_epoch"))?;
    let found = statement
        .query_row(fence, |row| Ok((row.get("floor")?, row.get("revision")?, row.get("settled")?)))
        .optional()?;
    let Some((floor, revision, settled)): Option<(Position, i64, String)> = found else { return Ok(false) };
    let changed_meanwhile = revision != write.revision;
    if changed_meanwhile && write.announces() {
        return Ok(false);
    }
    let cursor = &write.cursor;
    let highest = cursor.settled.last().unwrap_or(0).max(cursor.floor);
    if highest > horizon {
        // Written, it would skip the events that get these positions next.
        let what = format!("position {highest} was read, and only those up to {horizon} have been handed out");
        return Err(DbError::not_itself(&what));
    }
    let (anchor_position, anchor_id) = cursor.anchor.map(|(position, id)| (position, id.to_string())).unzip();
    tx.prepare_cached(sql!(cursor, "settle"))?.execute(params![
        subscription.0,
        lane,
        write.epoch,
        cursor.floor,
        cursor.settled.to_string(),
        anchor_position,
        anchor_id,
        write.release,
        write.calm,
    ])?;
    if cursor.floor > floor {
        advance(tx, write, floor)?;
    }
    let mut settled: RangeSet = settled.parse()?;
    settled.insert_range(0, floor);
    settle_deliveries(tx, write, changed_meanwhile.then_some(&settled))?;
    Ok(true)
}

/// Puts, then changes, then finishes. Where an operator has changed deliveries since they were loaded, only those that
/// are put now are changed: what the operator said is newer than what the attempts in flight have to say. `changed_meanwhile` is what
/// the stored cursor had settled then: that was put before, by a settlement that was not answered, and may have been given up since.
fn settle_deliveries(tx: &Transaction<'_>, write: &LaneWrite, changed_meanwhile: Option<&RangeSet>) -> Db<()> {
    let mut own = HashSet::new();
    let settled = changed_meanwhile;
    let is_new = |delivery: &&DeliveryRow| settled.is_none_or(|settled| !settled.contains(delivery.position));
    let changed_meanwhile = changed_meanwhile.is_some();
    for delivery in write.put.iter().filter(is_new) {
        if put(tx, write.lane, delivery, !changed_meanwhile)? && changed_meanwhile {
            own.insert(delivery.position);
        }
    }
    for (delivery, error) in &write.change {
        if !changed_meanwhile || own.contains(&delivery.position) {
            change(tx, write.lane, delivery, error.as_ref())?;
        }
    }
    let mut finish = tx.prepare_cached(sql!(delivery, "remove"))?;
    for position in &write.finish {
        finish.execute(params![write.lane.subscription.0, position])?;
    }
    Ok(())
}

/// Records what the floor passed, from the floor as it was stored: one that was moved by hand leaves a gap that the
/// books show.
fn advance(tx: &Transaction<'_>, write: &LaneWrite, floor: Position) -> Db<()> {
    let LaneRef { subscription, lane } = write.lane;
    let now = Timestamp::now().0;
    let mut extend = tx.prepare_cached(sql!(progress, "extend"))?;
    let values = params![subscription.0, lane, write.epoch, floor, write.cursor.floor, now, PROGRESS_SPAN_MS];
    if extend.execute(values)? == 0 {
        record_progress(tx, subscription, lane, write.epoch, (floor, write.cursor.floor))?;
    }
    Ok(())
}

/// Inserts a delivery, or replaces one if it may; whether it was written.
fn put(tx: &Transaction<'_>, lane: LaneRef, delivery: &DeliveryRow, replace: bool) -> Db<bool> {
    let written = tx.prepare_cached(sql!(delivery, "put"))?.execute(params![
        lane.subscription.0,
        delivery.position,
        lane.lane,
        delivery.arrival,
        delivery.key,
        delivery.state.name(),
        delivery.attempts,
        delivery.due_at.0,
        delivery.since.0,
        Timestamp::now().0,
        replace,
    ])?;
    Ok(written > 0)
}

/// Changes a delivery that is still there: an operator may have skipped it in the meantime.
fn change(tx: &Transaction<'_>, lane: LaneRef, delivery: &DeliveryRow, error: Option<&AttemptError>) -> Db<()> {
    let changed = tx.prepare_cached(sql!(delivery, "change"))?.execute(params![
        lane.subscription.0,
        delivery.position,
        delivery.arrival,
        delivery.state.name(),
        delivery.attempts,
        delivery.due_at.0,
        delivery.since.0,
        Timestamp::now().0,
    ])?;
    match error {
        Some(error) if changed > 0 => add_error(tx, lane.subscription, delivery.position, error),
        _ => Ok(()),
    }
}

/// Adds an error to those that are kept with a delivery.
pub(crate) fn add_error(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    position: Position,
    error: &AttemptError,
) -> Db<()> {
    let kept: String =
        tx.prepare_cached(sql!(delivery, "errors"))?.query_row(params![subscription.0, position], |row| row.get(0))?;
    let errors = AttemptError::to_store(AttemptError::stored(&kept).into_iter().chain([error.clone()]));
    tx.prepare_cached(sql!(delivery, "set_errors"))?.execute(params![subscription.0, position, errors])?;
    Ok(())
}

/// What retention has removed is not dead. Between the events of a journal, which stay, it looks alike to a reader.
fn close_dead(tx: &Transaction<'_>, dead: &RangeSet) -> Db<()> {
    if dead.is_empty() {
        return Ok(());
    }
    let mut dead = dead.clone();
    dead.remove_range(0, meta_number(tx, "pruned_to")?);
    let sql = sql!(dead_range, "put");
    for range in dead.iter() {
        tx.prepare_cached(sql)?.execute(params![range.start(), range.end(), Timestamp::now().0])?;
    }
    Ok(())
}
