use pillarbox::Position;
use pillarbox::admin::world::{LaneRow, SubscriptionRow};
use pillarbox::admin::{Books, LaneBook};
use pillarbox::store::{RangeSet, SubscriptionId};
use rusqlite::{Connection, Transaction, params};

use crate::connection::meta_number;
use crate::error::Db;
use crate::ownership::{former_filters, record_progress};
use crate::store::Desk;

pub(super) fn books(tx: &Connection, desk: &Desk) -> Db<Books> {
    let world = super::load_world(tx, &desk.folder)?;
    let mut lanes = Vec::new();
    for subscription in &world.subscriptions {
        let sql = "select position, position_to from pillarbox_skip where subscription = ?1";
        let skipped = ranges(tx, sql, params![subscription.id.0])?;
        for lane in &subscription.lanes {
            lanes.push(lane_book(tx, subscription, lane, skipped.clone())?);
        }
    }
    Ok(Books {
        incarnation: meta_number(tx, "incarnation")?,
        log_start: world.log_start,
        horizon: world.horizon,
        dead: ranges(tx, "select low, high from pillarbox_dead_range order by low", params![])?,
        lanes,
        former_filters: world
            .subscriptions
            .iter()
            .map(|row| Ok((row.name.clone(), former_filters(tx, row.id)?)))
            .collect::<Db<_>>()?,
    })
}

fn lane_book(tx: &Connection, subscription: &SubscriptionRow, lane: &LaneRow, skipped: RangeSet) -> Db<LaneBook> {
    let mut covered = covered(tx, subscription.id, lane.lane)?;
    let before_start = before_start(tx, subscription.id, lane.lane)?;
    // Ranges above the floor are written by settlements alone; they vouch for themselves.
    covered.union(&lane.cursor.settled);
    let sql = "select position, position from pillarbox_delivery where subscription = ?1 and lane = ?2 order by 1";
    Ok(LaneBook {
        subscription: subscription.name.clone(),
        filter: subscription.filter.clone(),
        lanes: subscription.lanes.len() as u32,
        lane: lane.lane,
        floor: lane.cursor.floor,
        settled: lane.cursor.settled.clone(),
        covered,
        before_start,
        deliveries: ranges(tx, sql, params![subscription.id.0, lane.lane])?,
        skipped,
    })
}

/// What the settlements of a lane say they covered.
pub(super) fn covered(tx: &Connection, id: SubscriptionId, lane: u32) -> Db<RangeSet> {
    let sql = "select floor_from + 1, floor_to from pillarbox_progress \
               where subscription = ?1 and lane = ?2 and epoch > 0";
    ranges(tx, sql, params![id.0, lane])
}

/// What a lane was never to deliver.
pub(super) fn before_start(tx: &Connection, id: SubscriptionId, lane: u32) -> Db<RangeSet> {
    let sql = "select floor_from + 1, floor_to from pillarbox_progress \
               where subscription = ?1 and lane = ?2 and epoch = 0";
    ranges(tx, sql, params![id.0, lane])
}

/// Positions that a lane was never to deliver are delivered after all: from now on its settlements account for them.
pub(super) fn replay(tx: &Transaction<'_>, id: SubscriptionId, lane: &LaneRow, positions: &RangeSet) -> Db<()> {
    let (Some(first), Some(last)) = (positions.first(), positions.last()) else { return Ok(()) };
    let sql = "select id, floor_from, floor_to from pillarbox_progress \
               where subscription = ?1 and lane = ?2 and epoch = 0 and floor_from < ?4 and floor_to >= ?3";
    let mut statement = tx.prepare_cached(sql)?;
    let rows = statement.query_map(params![id.0, lane.lane, first, last], |row| {
        Ok((row.get::<_, i64>(0)?, row.get::<_, Position>(1)?, row.get::<_, Position>(2)?))
    })?;
    for (number, from, to) in rows.collect::<Result<Vec<_>, _>>()? {
        let replayed = positions.within(from + 1, to);
        tx.execute("delete from pillarbox_progress where id = ?1", [number])?;
        for (epoch, ranges) in [(0, replayed.missing(from + 1, to)), (lane.epoch + 1, replayed)] {
            for range in ranges.iter() {
                record_progress(tx, id, lane.lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
    }
    Ok(())
}

/// The ranges that a statement of two columns gives.
pub(super) fn ranges(tx: &Connection, sql: &str, values: &[&dyn rusqlite::ToSql]) -> Db<RangeSet> {
    let mut statement = tx.prepare_cached(sql)?;
    let mut rows = statement.query(values)?;
    let mut set = RangeSet::new();
    while let Some(row) = rows.next()? {
        set.insert_range(row.get::<_, Position>(0)?, row.get(1)?);
    }
    Ok(set)
}
