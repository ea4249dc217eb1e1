use std::collections::HashMap;

use pillarbox::Position;
use pillarbox::admin::Books;
use pillarbox::admin::snapshot::{LaneLedger, Ledger};
use pillarbox::store::{Epoch, FormerFilters, RangeSet, SubscriptionId};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use super::load_snapshot;
use crate::error::Db;
use crate::ownership::record_progress;

pub(super) async fn books(tx: &Transaction<'_>) -> Db<Books> {
    let snapshot = load_snapshot(tx).await?;
    let lanes = ledgers(tx, None).await?;
    let (skipped, deliveries, closed) = tokio::try_join!(
        tx.query_typed(sql!(skip, "ranges"), &[]),
        tx.query_typed(sql!(delivery, "ranges"), &[]),
        tx.query_typed(sql!(dead_range, "ranges"), &[]),
    )?;
    let former_filters = tx.query_typed(sql!(subscription, "former_filters_of_all"), &[]).await?;
    let former_filters = former_filters
        .iter()
        .map(|row| Ok((SubscriptionId(row.try_get("id")?), FormerFilters::parse(row.try_get("former_filters")?))));
    Ok(snapshot.books(Ledger {
        lanes,
        deliveries: by_lane(&deliveries)?,
        skipped: by_lane(&skipped)?.into_iter().map(|((id, _), ranges)| (id, ranges)).collect(),
        closed: by_lane(&closed)?.into_values().next().unwrap_or_default(),
        former_filters: former_filters.collect::<Db<_>>()?,
    }))
}

/// Ranges of positions by lane.
type ByLane = HashMap<(SubscriptionId, u32), RangeSet>;

/// What settlements have recorded, by lane; of one subscription or of all.
pub(super) async fn ledgers(
    tx: &Transaction<'_>,
    id: Option<SubscriptionId>,
) -> Db<HashMap<(SubscriptionId, u32), LaneLedger>> {
    let id = id.map(|id| id.0);
    let of = [(&id as _, Type::INT8)];
    let (covered, before_start) = tokio::try_join!(
        tx.query_typed(sql!(progress, "ranges"), &of),
        tx.query_typed(sql!(progress, "ranges_before_start"), &of),
    )?;
    let mut ledgers = HashMap::<_, LaneLedger>::new();
    for (place, ranges) in by_lane(&covered)? {
        ledgers.entry(place).or_default().covered = ranges;
    }
    for (place, ranges) in by_lane(&before_start)? {
        ledgers.entry(place).or_default().before_start = ranges;
    }
    Ok(ledgers)
}

/// Positions that a lane was never to deliver are delivered after all: from this epoch on its settlements account for them.
pub(super) async fn account(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lane: u32,
    epoch: Epoch,
    positions: &RangeSet,
) -> Db<()> {
    let (Some(first), Some(last)) = (positions.first(), positions.last()) else { return Ok(()) };
    for row in tx.query(sql!(progress, "take_before_start"), &[&id.0, &(lane as i32), &first, &last]).await? {
        let (from, to): (Position, Position) = (row.try_get("floor_from")?, row.try_get("floor_to")?);
        let replayed = positions.within(from + 1, to);
        for (epoch, ranges) in [(0, replayed.missing(from + 1, to)), (epoch, replayed)] {
            record_progress(tx, id, lane, epoch, &ranges).await?;
        }
    }
    Ok(())
}

/// Reads the columns `subscription`, `lane`, `low` and `high`.
fn by_lane(rows: &[Row]) -> Db<ByLane> {
    let mut ranges = ByLane::new();
    for row in rows {
        let place = (SubscriptionId(row.try_get("subscription")?), row.try_get::<_, i32>("lane")? as u32);
        ranges.entry(place).or_default().insert_range(row.try_get::<_, Position>("low")?, row.try_get("high")?);
    }
    Ok(ranges)
}
