use pillarbox::admin::BacklogRow;
use pillarbox::admin::retention::{DEAD_RANGES_LOOKED_AT_MAX, DeadLook, Late, RISEN_MAX, log_risen};
use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow};
use pillarbox::store::RangeSet;
use pillarbox::{Mode, Position, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};

use super::books;
use super::change::{judge_again, touch_lanes};
use super::status::backlog_row;
use crate::connection::{raise_queue_revision, raise_revision, set_meta};
use crate::error::Db;
use crate::queue::promote;

/// Looks for events at positions that were closed: a premise was broken, for instance by an insert that named its
/// position. They are delivered late, with an alarm, and are closed no more. Goes on where the last run has stopped, from the newest ranges
/// to the oldest and over again.
pub(super) fn deliver_risen(tx: &Transaction<'_>, snapshot: &Snapshot) -> Db<()> {
    let below = tx.prepare_cached(sql!(dead_range, "looked_at"))?.query_row([], |row| row.get("value")).optional()?;
    let below = below.unwrap_or(Position::MAX);
    let look = tx.prepare_cached(sql!(dead_range, "look"))?.query_row([below, DEAD_RANGES_LOOKED_AT_MAX], |row| {
        Ok(DeadLook { ranges: row.get("ranges")?, first: row.get("first")? })
    })?;
    let risen = match look.first {
        Some(first) => deliver_between(tx, snapshot, first, below)?,
        None => 0,
    };
    let next = look.next(below, risen);
    if next != below {
        set_meta(tx, "dead_looked_at", next)?;
    }
    Ok(())
}

/// Delivers what has appeared in the dead ranges that begin at `first` or above, and below `below`. How many events.
fn deliver_between(tx: &Transaction<'_>, snapshot: &Snapshot, first: Position, below: Position) -> Db<u64> {
    let mut statement = tx.prepare_cached(sql!(dead_range, "risen"))?;
    let mut rows = statement.query([RISEN_MAX, first, below])?;
    let mut risen = RangeSet::new();
    while let Some(row) = rows.next()? {
        let line = backlog_row(row)?;
        for subscription in &snapshot.subscriptions {
            deliver(tx, snapshot.now, subscription, &line)?;
        }
        risen.insert(line.position);
    }
    if risen.is_empty() {
        return Ok(0);
    }
    risen.iter().try_for_each(|range| bring_back(tx, *range.start(), *range.end()))?;
    raise_revision(tx)?;
    raise_queue_revision(tx)?;
    log_risen(&risen);
    Ok(risen.count())
}

fn deliver(tx: &Transaction<'_>, now: Timestamp, subscription: &SubscriptionRow, line: &BacklogRow<'_>) -> Db<()> {
    let (lane, state, due_at) = match subscription.late(line, now) {
        None => return Ok(()),
        Some(Late::Forget) => {
            return judge_again(tx, subscription.id, |formers| formers.forget(line.key_hash, line.position));
        }
        Some(Late::ReadAgain(lane)) => {
            tx.prepare_cached(sql!(cursor, "raise_epoch"))?.execute(params![subscription.id.0, lane.lane])?;
            return Ok(());
        }
        Some(Late::Deliver { lane, state, due_at }) => (lane.lane, state, due_at),
    };
    if books::before_start(tx, subscription.id, lane)?.contains(line.position) {
        return Ok(());
    }
    tx.prepare_cached(sql!(delivery, "put_risen"))?.execute(params![
        subscription.id.0,
        line.position,
        lane,
        line.key,
        state.name(),
        due_at.0,
        now.0,
    ])?;
    if subscription.mode == Mode::Queue {
        promote(tx, subscription.id, line.position, line.key, now)?;
    }
    judge_again(tx, subscription.id, |formers| {
        formers.replay(line.key_hash, line.position, &line.topic, &line.r#type);
    })?;
    touch_lanes(tx, subscription.id, [lane].into_iter())
}

/// Takes `low..=high` out of the dead ranges.
fn bring_back(tx: &Transaction<'_>, low: Position, high: Position) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(dead_range, "take_out"))?;
    let rows =
        statement.query_map([low, high], |row| Ok((row.get("low")?, row.get("high")?, row.get("closed_at")?)))?;
    let ranges: Vec<(Position, Position, i64)> = rows.collect::<Result<_, _>>()?;
    let sql = sql!(dead_range, "put");
    for (from, to, closed_at) in ranges {
        for (from, to) in [(from, low - 1), (high + 1, to)] {
            if from <= to {
                tx.prepare_cached(sql)?.execute(params![from, to, closed_at])?;
            }
        }
    }
    Ok(())
}
