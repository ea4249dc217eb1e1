use pillarbox::limit::LANES_MAX;

use super::*;
use crate::operator::books::{self, ByLane};
use crate::ownership::record_progress;

/// Changes the number of lanes. Only when nothing is between the lanes: equal floors, nothing settled above, nobody working.
pub(super) async fn relane(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow, lanes: u32) -> Db<Changed> {
    if lanes == 0 || lanes > LANES_MAX {
        return Err(invalid(format!("lanes = {lanes} is outside 1 to lanes_max = {LANES_MAX}")));
    }
    refuse_unquiet(tx, world, row).await?;
    let floor = row.floor();
    let epoch = row.lanes.iter().map(|lane| lane.epoch).max().unwrap_or(0) + 1;
    let revision = row.lanes.iter().map(|lane| lane.revision).max().unwrap_or(0) + 1;
    let (covered, before_start) = books::progress(tx, Some(row.id)).await?;
    let accounted = in_all(row, floor, &[&covered, &before_start]);
    let before_start = in_all(row, floor, &[&before_start]);
    // What lies before the start of some lanes only was covered by the others.
    let mut covered = accounted;
    covered.subtract(&before_start);
    tx.execute("delete from cursor where subscription = $1", &[&row.id.0]).await?;
    tx.execute("delete from progress where subscription = $1", &[&row.id.0]).await?;
    let sql = "insert into cursor (subscription, lane, floor, epoch, revision) \
               select $1, lane, $3, $4, $5 from generate_series(0, $2::integer - 1) as lane";
    tx.execute(sql, &[&row.id.0, &(lanes as i32), &floor, &epoch, &revision]).await?;
    for lane in 0..lanes {
        for (epoch, ranges) in [(0, &before_start), (epoch, &covered)] {
            record_progress(tx, row.id, lane, epoch, ranges).await?;
        }
    }
    tx.execute("update subscription set lanes = $2 where id = $1", &[&row.id.0, &(lanes as i32)]).await?;
    let deliveries = relane_deliveries(tx, row.id, lanes).await?;
    Ok(row.tell_relaned(lanes, deliveries))
}

async fn refuse_unquiet(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow) -> Db<()> {
    let refuse = |why: &str| Err(invalid(format!("the lanes of '{}' cannot be changed now: {why}", row.name)));
    if row.pause.is_none() {
        return refuse("it is running; pause it first");
    }
    if row.lanes.iter().any(|lane| lane.cursor.floor != row.floor() || !lane.cursor.settled.is_empty()) {
        return refuse("its lanes are not at the same place; resume it until it is idle, pause it and try again");
    }
    let working = |id: InstanceId| {
        let instance = world.instances.iter().find(|instance| instance.alive && instance.id == id);
        let report = instance.and_then(|instance| instance.report.subscriptions.get(&row.name));
        report.is_some_and(|report| report.in_flight > 0)
    };
    if row.lanes.iter().filter_map(|lane| lane.owner).any(working) {
        return refuse("events are still in flight; wait until they are done");
    }
    let sql = "select exists (select from delivery where owner is not null and subscription = $1)";
    if tx.query_one(sql, &[&row.id.0]).await?.try_get(0)? {
        return refuse(
            "deliveries are being worked on; wait until they are done, or take them back with `pillarbox recover`",
        );
    }
    Ok(())
}

/// What is in one of the sets of every lane: a gap in one lane stays a gap.
fn in_all(row: &SubscriptionRow, floor: Position, sets: &[&ByLane]) -> RangeSet {
    let mut all = RangeSet::new();
    all.insert_range(1, floor);
    for lane in &row.lanes {
        let mut known = RangeSet::new();
        sets.iter().filter_map(|set| set.get(&(row.id, lane.lane))).for_each(|ranges| known.union(ranges));
        all.subtract(&known.missing(1, floor));
    }
    all
}

/// Gives each delivery its new lane, keeping the order of arrival within each key. In a queue that is the same for all lanes.
async fn relane_deliveries(tx: &Transaction<'_>, id: SubscriptionId, lanes: u32) -> Db<u64> {
    let sql = "select position, key from delivery where subscription = $1 order by arrival, lane, position";
    let rows = tx.query(sql, &[&id.0]).await?;
    let (mut positions, mut new_lanes) = (Vec::<Position>::new(), Vec::<i32>::new());
    for row in &rows {
        let (position, key): (Position, Option<&str>) = (row.try_get(0)?, row.try_get(1)?);
        positions.push(position);
        new_lanes.push(lane_of(key.map(KeyHash::of), position, lanes) as i32);
    }
    let sql = "update delivery as d set lane = n.lane, arrival = case when d.queued then d.arrival else n.arrival end \
               from unnest($2::bigint[], $3::integer[]) with ordinality as n (position, lane, arrival) \
               where d.subscription = $1 and d.position = n.position";
    Ok(tx.execute(sql, &[&id.0, &positions, &new_lanes]).await?)
}
