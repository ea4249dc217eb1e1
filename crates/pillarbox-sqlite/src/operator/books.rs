use pillarbox::Position;
use pillarbox::admin::Books;
use pillarbox::admin::snapshot::{LaneLedger, Ledger};
use pillarbox::store::{Epoch, RangeSet, SubscriptionId};
use rusqlite::{Connection, Transaction, params};

use crate::error::Db;
use crate::ownership::{former_filters, record_progress};
use crate::store::Desk;

pub(super) fn books(tx: &Connection, desk: &Desk) -> Db<Books> {
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let mut ledger = Ledger { closed: ranges(tx, sql!(dead_range, "ranges"), params![])?, ..Ledger::default() };
    for row in &snapshot.subscriptions {
        ledger.skipped.insert(row.id, ranges(tx, sql!(skip, "ranges"), params![row.id.0])?);
        ledger.former_filters.insert(row.id, former_filters(tx, row.id)?);
        for lane in &row.lanes {
            let place = (row.id, lane.lane);
            ledger.lanes.insert(place, lane_ledger(tx, row.id, lane.lane)?);
            let deliveries = ranges(tx, sql!(delivery, "ranges"), params![row.id.0, lane.lane])?;
            ledger.deliveries.insert(place, deliveries);
        }
    }
    Ok(snapshot.books(ledger))
}

/// What the settlements of a lane have recorded.
pub(super) fn lane_ledger(tx: &Connection, id: SubscriptionId, lane: u32) -> Db<LaneLedger> {
    let covered = ranges(tx, sql!(progress, "covered"), params![id.0, lane])?;
    Ok(LaneLedger { covered, before_start: before_start(tx, id, lane)? })
}

/// What a lane was never to deliver.
pub(super) fn before_start(tx: &Connection, id: SubscriptionId, lane: u32) -> Db<RangeSet> {
    ranges(tx, sql!(progress, "before_start"), params![id.0, lane])
}

/// Positions that a lane was never to deliver are delivered after all: from this epoch on its settlements account for them.
pub(super) fn account(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lane: u32,
    epoch: Epoch,
    positions: &RangeSet,
) -> Db<()> {
    let (Some(first), Some(last)) = (positions.first(), positions.last()) else { return Ok(()) };
    let mut statement = tx.prepare_cached(sql!(progress, "before_start_within"))?;
    let rows = statement.query_map(params![id.0, lane, first, last], |row| {
        Ok((row.get::<_, i64>("id")?, row.get::<_, Position>("floor_from")?, row.get::<_, Position>("floor_to")?))
    })?;
    for (number, from, to) in rows.collect::<Result<Vec<_>, _>>()? {
        let replayed = positions.within(from + 1, to);
        tx.execute(sql!(progress, "remove"), [number])?;
        for (epoch, ranges) in [(0, replayed.missing(from + 1, to)), (epoch, replayed)] {
            for range in ranges.iter() {
                record_progress(tx, id, lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
    }
    Ok(())
}

/// The ranges that a statement gives, by the columns `low` and `high`.
pub(super) fn ranges(tx: &Connection, sql: &str, values: &[&dyn rusqlite::ToSql]) -> Db<RangeSet> {
    let mut statement = tx.prepare_cached(sql)?;
    let mut rows = statement.query(values)?;
    let mut set = RangeSet::new();
    while let Some(row) = rows.next()? {
        set.insert_range(row.get::<_, Position>("low")?, row.get("high")?);
    }
    Ok(set)
}
