use pillarbox::admin::snapshot::{Recorded, SubscriptionRow};
use pillarbox::admin::{DeliveryRecord, EventRecord, SettledBy, State};
use pillarbox::store::{AttemptError, FormerFilters, SubscriptionId};
use pillarbox::{Event, Position};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use super::{claim_record, load_snapshot, positions_of};
use crate::error::Db;
use crate::reader::Decoder;
use crate::types::Time;

pub(super) async fn show(tx: &Transaction<'_>, id: Uuid) -> Db<Option<EventRecord>> {
    let Some(position) = positions_of(tx, id).await?.into_iter().next() else { return Ok(None) };
    let row = tx.query_typed_opt(sql!(event, "fetch"), &[(&[position].as_slice(), Type::INT8_ARRAY)]).await?;
    let Some(row) = row else { return Ok(None) };
    let event = Decoder::default().event(&row)?;
    let snapshot = load_snapshot(tx).await?;
    let mut subscriptions = Vec::new();
    for row in &snapshot.subscriptions {
        subscriptions.extend(snapshot.fate(row, &event, recorded(tx, row, &event).await?));
    }
    Ok(Some(EventRecord { event, subscriptions }))
}

/// What is recorded of one event for one subscription.
async fn recorded(tx: &Transaction<'_>, row: &SubscriptionRow, event: &Event) -> Db<Recorded> {
    let position = event.position;
    let number = row.lane_of(event.key.as_deref(), position).map_or(0, |lane| lane.lane as i32);
    let of_lane = [(&row.id.0 as _, Type::INT8), (&number as _, Type::INT4), (&position as _, Type::INT8)];
    let of_event = [(&row.id.0 as _, Type::INT8), (&position as _, Type::INT8)];
    let of_log = [(&position as _, Type::INT8)];
    let in_dead_range = sql!(dead_range, "has");
    let former_filters = sql!(subscription, "former_filters");
    let (settled_by, before_start, in_dead_range, delivery, skipped, former_filters) = tokio::try_join!(
        tx.query_typed_opt(sql!(progress, "settled_by"), &of_lane),
        tx.query_typed_one(sql!(progress, "is_before_start"), &of_lane),
        tx.query_typed_one(in_dead_range, &of_log),
        tx.query_typed_opt(sql!(delivery, "show"), &of_event),
        tx.query_typed_opt(sql!(skip, "skipped"), &of_event),
        tx.query_typed_one(former_filters, &of_event[..1]),
    )?;
    let former_filters = FormerFilters::parse(former_filters.try_get(0)?);
    let delivery = match delivery {
        Some(found) => Some(record(tx, row.id, position, &found).await?),
        None => None,
    };
    let settled_by = settled_by.map(|row| {
        Db::Ok(SettledBy {
            epoch: row.try_get("epoch")?,
            after: row.try_get::<_, Time>("started_at")?.0,
            before: row.try_get::<_, Time>("ended_at")?.0,
        })
    });
    Ok(Recorded {
        former_filters,
        settled_by: settled_by.transpose()?,
        before_start: before_start.try_get(0)?,
        in_dead_range: in_dead_range.try_get(0)?,
        delivery,
        skipped: skipped.map(|row| Db::Ok((row.try_get("reason")?, row.try_get::<_, Time>("at")?.0))).transpose()?,
    })
}

async fn record(tx: &Transaction<'_>, id: SubscriptionId, position: Position, row: &Row) -> Db<DeliveryRecord> {
    let state = state(row.try_get("state")?);
    Ok(DeliveryRecord {
        state,
        attempts: row.try_get::<_, i32>("attempts")? as u32,
        due_at: row.try_get::<_, Time>("due_at")?.0,
        since: row.try_get::<_, Time>("since")?.0,
        claim: claim_record(row)?,
        errors: AttemptError::stored(row.try_get("errors")?),
        head: if state == State::Blocked { head(tx, id, position).await? } else { None },
    })
}

/// The delivery that a blocked one waits for.
pub(super) async fn head(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    position: Position,
) -> Db<Option<(Uuid, Position, State)>> {
    let parameters = [(&id.0 as _, Type::INT8), (&position as _, Type::INT8)];
    let row = tx.query_typed_opt(sql!(delivery, "head"), &parameters).await?;
    let head = |row: Row| {
        let id = row.try_get::<_, Option<Uuid>>("id")?.unwrap_or_default();
        Db::Ok((id, row.try_get("position")?, state(row.try_get("state")?)))
    };
    row.map(head).transpose()
}

fn state(name: &str) -> State {
    State::from_name(name).unwrap_or(State::Pending)
}
