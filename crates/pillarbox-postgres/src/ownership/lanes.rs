use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::future::{try_join, try_join4};
use pillarbox::Position;
use pillarbox::admin::State;
use pillarbox::store::{
    Cursor, DEAD_HEADS_MAX, Definition, DeliveryRow, Epoch, InstanceId, LaneRef, LaneState, QUEUED_KEYS_MAX,
    SubscriptionId, Take, tell_keys,
};
use tokio_postgres::Row;
use uuid::Uuid;

use super::subscriptions::subscription_view;
use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::operator::{BY_INDEX, IN_ORDER};
use crate::ownership::name_endings;
use crate::types::{Time, range_set};

/// Loads lanes at the given epochs in one snapshot; one round trip.
pub(crate) async fn load(session: &mut Session, lanes: &[(LaneRef, Epoch)]) -> Db<Vec<Option<LaneState>>> {
    let subscriptions: Vec<i64> = lanes.iter().map(|(lane, _)| lane.subscription.0).collect();
    let numbers: Vec<i32> = lanes.iter().map(|(lane, _)| lane.lane as i32).collect();
    let epochs: Vec<i64> = lanes.iter().map(|(_, epoch)| *epoch).collect();
    let cursors = session.statement(sql!(cursor, "load")).await?;
    let deliveries = session.statement(sql!(delivery, "load")).await?;
    let queued_keys = session.statement(sql!(queue, "keys_of_queues")).await?;
    let definitions = session.statement(sql!(subscription, "load")).await?;
    let after = session.statement(sql!(meta, "after_look")).await?;
    let begin = format!("{}; {BY_INDEX}; {IN_ORDER}", sql!(session, "begin_snapshot"));
    let begin = session.batch_execute(&begin);
    let (_, (cursors, deliveries, queued_keys, definitions), _, after) = try_join4(
        begin,
        try_join4(
            session.query(&cursors, &[&subscriptions, &numbers, &epochs]),
            session.query(&deliveries, &[&subscriptions, &numbers, &(DEAD_HEADS_MAX as i64)]),
            session.query(&queued_keys, &[&subscriptions, &(QUEUED_KEYS_MAX as i32)]),
            session.query(&definitions, &[&subscriptions]),
        ),
        session.batch_execute(sql!(session, "commit")),
        session.query_one(&after, &[]),
    )
    .await?;
    let lane_counts = lane_counts(&definitions)?;
    let definitions = definitions_of(&definitions)?;
    let mut states: Vec<Option<LaneState>> = lanes.iter().map(|_| None).collect();
    let mut missing = Vec::new();
    for row in cursors {
        let (index, state) = lane_state(&row)?;
        let found: Option<Uuid> = row.try_get("found_id")?;
        missing.extend(state.cursor.anchor.filter(|anchor| found != Some(anchor.1)).map(|anchor| (anchor, found)));
        // A cursor without a subscription is that of one which is being deleted.
        let definition = definitions.get(&lanes[index].0.subscription);
        states[index] = definition.map(|definition| LaneState { definition: definition.clone(), ..state });
    }
    check_anchors(&missing, after.try_get("kept_from")?)?;
    for row in deliveries {
        let index = row.try_get::<_, i64>("ordinal")? as usize - 1;
        let Some(state) = &mut states[index] else { continue };
        if row.try_get::<_, i64>("number")? > DEAD_HEADS_MAX as i64 {
            state.dead_heads_left_out = true;
            continue;
        }
        let delivery = delivery_of(&row)?;
        // One that is not settled may be the first of its key too.
        if state.deliveries.last().is_none_or(|last| last.position != delivery.position) {
            state.deliveries.push(delivery);
        }
    }
    let (mut keys, mut left_out): (HashMap<SubscriptionId, Vec<Box<str>>>, _) = (HashMap::new(), HashSet::new());
    for row in queued_keys {
        let id = SubscriptionId(row.try_get("id")?);
        keys.entry(id).or_default().push(row.try_get::<_, &str>("key")?.into());
        left_out.extend(row.try_get::<_, bool>("more")?.then_some(id));
    }
    tell_keys(lanes, &lane_counts, &mut states, keys, left_out);
    Ok(states)
}

fn definitions_of(rows: &[Row]) -> Db<HashMap<SubscriptionId, Arc<Definition>>> {
    let of = |row: &Row| subscription_view(row).map(|view| (view.id, Arc::new(view.definition)));
    rows.iter().map(of).collect()
}

/// How many lanes each subscription has.
fn lane_counts(rows: &[Row]) -> Db<HashMap<SubscriptionId, u32>> {
    let of = |row: &Row| subscription_view(row).map(|view| (view.id, view.lanes));
    rows.iter().map(of).collect()
}

fn lane_state(row: &Row) -> Db<(usize, LaneState)> {
    let anchor =
        row.try_get::<_, Option<Position>>("anchor_position")?.zip(row.try_get::<_, Option<Uuid>>("anchor_id")?);
    let cursor = Cursor { floor: row.try_get("floor")?, settled: range_set(row.try_get("settled")?)?, anchor };
    let takeovers = row.try_get::<_, i32>("takeovers")? as u32;
    let last_arrival = row.try_get::<_, Option<i64>>("last_arrival")?.unwrap_or(0);
    let state =
        LaneState { cursor, takeovers, revision: row.try_get("revision")?, last_arrival, ..LaneState::default() };
    Ok((row.try_get::<_, i64>("ordinal")? as usize - 1, state))
}

fn delivery_of(row: &Row) -> Db<DeliveryRow> {
    Ok(DeliveryRow {
        position: row.try_get("position")?,
        key: row.try_get::<_, Option<String>>("key")?.map(Into::into),
        arrival: row.try_get("arrival")?,
        state: State::from_name(row.try_get("state")?).unwrap_or(State::Pending),
        attempts: row.try_get::<_, i32>("attempts")? as u32,
        due_at: row.try_get::<_, Time>("due_at")?.0,
        since: row.try_get::<_, Time>("since")?.0,
    })
}

/// An anchor, and the event that is there instead.
pub(super) type Missing = ((Position, Uuid), Option<Uuid>);

/// The event at an anchor must still be the one that was settled, unless retention has passed it. `kept_from`, the lowest
/// position that retention has not been at, is read after the anchors were looked at.
pub(super) fn check_anchors(missing: &[Missing], kept_from: Position) -> Db<()> {
    let Some(((position, id), found)) = missing.iter().find(|((position, _), _)| *position >= kept_from) else {
        return Ok(());
    };
    let now = found.map_or("there is none now".into(), |other| format!("event {other} is now"));
    Err(DbError::not_itself(&format!("event {id} was settled at position {position}, where {now}")))
}

/// What taking lanes led to.
pub(super) struct Taken {
    /// The new epochs, in the order that was asked.
    pub(super) epochs: Vec<Option<Epoch>>,
    /// From whom each was taken.
    pub(super) owners: Vec<Option<InstanceId>>,
    /// The instance has a row.
    pub(super) alive: bool,
}

/// Takes each lane whose epoch is still the expected one; committed when it returns.
pub(super) async fn take(writer: &Session, me: InstanceId, lanes: &[Take]) -> Db<Taken> {
    let subscriptions: Vec<i64> = lanes.iter().map(|take| take.lane.subscription.0).collect();
    let numbers: Vec<i32> = lanes.iter().map(|take| take.lane.lane as i32).collect();
    let expected: Vec<i64> = lanes.iter().map(|take| take.expected).collect();
    let beats: Vec<Option<i64>> = lanes.iter().map(|take| take.beat).collect();
    let number = me.0 as i32;
    if beats.iter().any(Option::is_some) {
        let end = writer.statement(sql!(cursor, "take_end")).await?;
        let endings = name_endings(writer.config());
        writer.query(&end, &[&subscriptions, &numbers, &expected, &beats, &endings]).await?;
    }
    let statement = writer.statement(sql!(cursor, "take")).await?;
    let alive = writer.statement(sql!(instance, "exists")).await?;
    let (rows, alive) = try_join(
        writer.query(&statement, &[&number, &subscriptions, &numbers, &expected, &beats]),
        writer.query_one(&alive, &[&number]),
    )
    .await?;
    let mut taken =
        Taken { epochs: vec![None; lanes.len()], owners: vec![None; lanes.len()], alive: alive.try_get(0)? };
    for row in rows {
        let index = row.try_get::<_, i64>("ordinal")? as usize - 1;
        taken.epochs[index] = Some(row.try_get("epoch")?);
        taken.owners[index] = row.try_get::<_, Option<i64>>("owner")?.map(InstanceId);
    }
    Ok(taken)
}
