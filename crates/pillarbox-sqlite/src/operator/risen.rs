use pillarbox::admin::BacklogRow;
use pillarbox::admin::snapshot::{LaneRow, Snapshot, SubscriptionRow};
use pillarbox::store::RangeSet;
use pillarbox::{Mode, Position, Timestamp};
use rusqlite::{Transaction, params};

use super::books;
use super::change::{judge_again, touch_lanes};
use super::status::backlog_row;
use crate::connection::{raise_queue_revision, raise_revision};
use crate::error::Db;
use crate::queue::promote;

/// How many are looked after at once; the next run finds the others.
const RISEN_MAX: i64 = 1000;

/// Looks for events at positions that were closed: a premise was broken, for instance by an insert that named its
/// position. They are delivered late, with an alarm, and are dead no more.
pub(super) fn deliver_risen(tx: &Transaction<'_>, snapshot: &Snapshot) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(dead_range, "risen"))?;
    let mut rows = statement.query([RISEN_MAX])?;
    let mut risen = RangeSet::new();
    while let Some(row) = rows.next()? {
        let line = backlog_row(row)?;
        for subscription in &snapshot.subscriptions {
            deliver(tx, snapshot.now, subscription, &line)?;
        }
        risen.insert(line.position);
    }
    if risen.is_empty() {
        return Ok(());
    }
    risen.iter().try_for_each(|range| bring_back(tx, *range.start(), *range.end()))?;
    raise_revision(tx)?;
    raise_queue_revision(tx)?;
    tracing::error!(
        events = risen.count(),
        positions = %risen,
        "events appeared at positions that were closed and are delivered late; nobody may insert a position"
    );
    Ok(())
}

fn deliver(tx: &Transaction<'_>, now: Timestamp, subscription: &SubscriptionRow, line: &BacklogRow<'_>) -> Db<()> {
    let Some(lane) = subscription.lane_of(line.key, line.position) else { return Ok(()) };
    if !subscription.filter.matches(&line.topic, &line.r#type) {
        // It was never sent, also where a former filter had passed its position and would have wanted it.
        return judge_again(tx, subscription.id, |formers| formers.forget(line.key_hash, line.position));
    }
    if !lane.has_settled(line.position) {
        return read_again(tx, subscription, lane);
    }
    if books::before_start(tx, subscription.id, lane.lane)?.contains(line.position) {
        return Ok(());
    }
    let due_at = line.delayed_until(now);
    let state = if due_at.is_some() { "delayed" } else { "pending" };
    tx.prepare_cached(sql!(delivery, "put_risen"))?.execute(params![
        subscription.id.0,
        line.position,
        lane.lane,
        line.key,
        state,
        due_at.unwrap_or(now).0,
        now.0,
    ])?;
    if subscription.mode == Mode::Queue {
        promote(tx, subscription.id, line.position, line.key, now)?;
    }
    judge_again(tx, subscription.id, |formers| {
        formers.replay(line.key_hash, line.position, &line.topic, &line.r#type);
    })?;
    touch_lanes(tx, subscription.id, [lane.lane].into_iter())
}

/// The owner may have closed the hole in memory already: it is made to load the lane anew, where the hole is open.
fn read_again(tx: &Transaction<'_>, subscription: &SubscriptionRow, lane: &LaneRow) -> Db<()> {
    tx.prepare_cached(sql!(cursor, "raise_epoch"))?.execute(params![subscription.id.0, lane.lane])?;
    Ok(())
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
