use pillarbox::admin::snapshot::{Recorded, SubscriptionRow};
use pillarbox::admin::{DeliveryRecord, EventRecord, SettledBy, State};
use pillarbox::store::{AttemptError, SubscriptionId};
use pillarbox::{Event, Position, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::{books, claim_record, positions_of};
use crate::error::Db;
use crate::ownership::former_filters;
use crate::reader::{Decoder, id_at};
use crate::store::Desk;

pub(super) fn show(tx: &Connection, desk: &Desk, id: Uuid) -> Db<Option<EventRecord>> {
    let Some(position) = positions_of(tx, id)?.into_iter().next() else { return Ok(None) };
    let mut statement = tx.prepare_cached(sql!(event, "fetch"))?;
    let mut rows = statement.query([position])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let event = Decoder::default().event(row)?;
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let mut subscriptions = Vec::new();
    for row in &snapshot.subscriptions {
        subscriptions.extend(snapshot.fate(row, &event, recorded(tx, row, &event)?));
    }
    Ok(Some(EventRecord { event, subscriptions }))
}

/// What is recorded of one event for one subscription.
fn recorded(tx: &Connection, row: &SubscriptionRow, event: &Event) -> Db<Recorded> {
    let lane = row.lane_of(event.key.as_deref(), event.position).map_or(0, |lane| lane.lane);
    Ok(Recorded {
        former_filters: former_filters(tx, row.id)?,
        settled_by: settled_by(tx, row.id, lane, event.position)?,
        before_start: books::before_start(tx, row.id, lane)?.contains(event.position),
        in_dead_range: tx.prepare_cached(sql!(dead_range, "has"))?.exists([event.position])?,
        delivery: delivery(tx, row.id, event.position)?,
        skipped: skipped(tx, row.id, event.position)?,
    })
}

fn settled_by(tx: &Connection, id: SubscriptionId, lane: u32, position: Position) -> Db<Option<SettledBy>> {
    let mut statement = tx.prepare_cached(sql!(progress, "settled_by"))?;
    let found = statement.query_row(params![id.0, lane, position], |row| {
        Ok(SettledBy {
            epoch: row.get("epoch")?,
            after: Timestamp(row.get("started_at")?),
            before: Timestamp(row.get("ended_at")?),
        })
    });
    Ok(found.optional()?)
}

fn skipped(tx: &Connection, id: SubscriptionId, position: Position) -> Db<Option<(String, Timestamp)>> {
    let mut statement = tx.prepare_cached(sql!(skip, "skipped"))?;
    let found = statement.query_row(params![id.0, position], |row| Ok((row.get("reason")?, Timestamp(row.get("at")?))));
    Ok(found.optional()?)
}

fn delivery(tx: &Connection, id: SubscriptionId, position: Position) -> Db<Option<DeliveryRecord>> {
    let mut statement = tx.prepare_cached(sql!(delivery, "show"))?;
    let found = statement.query_row(params![id.0, position], |row| {
        Ok(DeliveryRecord {
            state: state(&row.get::<_, String>("state")?),
            attempts: row.get("attempts")?,
            due_at: Timestamp(row.get("due_at")?),
            since: Timestamp(row.get("since")?),
            claim: claim_record(row)?,
            errors: AttemptError::stored(&row.get::<_, String>("errors")?),
            head: None,
        })
    });
    let Some(mut record) = found.optional()? else { return Ok(None) };
    if record.state == State::Blocked {
        record.head = head(tx, id, position)?;
    }
    Ok(Some(record))
}

/// The delivery that a blocked one waits for.
pub(super) fn head(tx: &Connection, id: SubscriptionId, position: Position) -> Db<Option<(Uuid, Position, State)>> {
    let mut statement = tx.prepare_cached(sql!(delivery, "head"))?;
    let found = statement.query_row(params![id.0, position], |row| {
        Ok((id_at(row, "id")?, row.get("position")?, state(&row.get::<_, String>("state")?)))
    });
    Ok(found.optional()?)
}

fn state(name: &str) -> State {
    State::from_name(name).unwrap_or(State::Pending)
}
