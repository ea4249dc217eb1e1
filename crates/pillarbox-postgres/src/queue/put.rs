use pillarbox::store::{LaneWrite, Queued};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::settle::with_errors;
use crate::types::Time;

/// Prepared before the settlement begins.
pub(crate) async fn put_statement(session: &Session) -> Db<Statement> {
    session.statement(sql!(queue, "put")).await
}

/// Writes the rows of queues of a settlement for instance `me`. The keys of which some are behind others; none if it has no rows.
pub(crate) async fn put(
    client: &Client,
    statement: &Statement,
    writes: &[LaneWrite],
    me: Option<i32>,
) -> Db<Option<Keys>> {
    let rows: Vec<(&LaneWrite, &Queued)> =
        writes.iter().flat_map(|write| write.queue.iter().map(move |queued| (write, queued))).collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let subscriptions: Vec<i64> = rows.iter().map(|(write, _)| write.lane.subscription.0).collect();
    let lanes: Vec<i32> = rows.iter().map(|(write, _)| write.lane.lane as i32).collect();
    let epochs: Vec<i64> = rows.iter().map(|(write, _)| write.epoch).collect();
    let deliveries = || rows.iter().map(|(_, queued)| &queued.delivery);
    let positions: Vec<i64> = deliveries().map(|delivery| delivery.position).collect();
    let keys: Vec<Option<&str>> = deliveries().map(|delivery| delivery.key.as_deref()).collect();
    let states: Vec<&str> = deliveries().map(|delivery| delivery.state.name()).collect();
    let attempts: Vec<i32> = deliveries().map(|delivery| delivery.attempts as i32).collect();
    let due_at: Vec<Time> = deliveries().map(|delivery| Time(delivery.due_at)).collect();
    let since: Vec<Time> = deliveries().map(|delivery| Time(delivery.since)).collect();
    let errors: Vec<String> = rows.iter().map(|(_, queued)| with_errors("[]", queued.error.as_slice())).collect();
    let claims: Vec<Option<i64>> = rows.iter().map(|(_, queued)| queued.claim.map(|claim| claim.0)).collect();
    let values: [&(dyn ToSql + Sync); 12] = [
        &me,
        &subscriptions,
        &positions,
        &lanes,
        &keys,
        &states,
        &attempts,
        &due_at,
        &since,
        &errors,
        &claims,
        &epochs,
    ];
    let mut behind = Keys::default();
    for row in client.query(statement, &values).await? {
        behind.note(row.try_get("subscription")?, row.try_get("key")?);
    }
    Ok(Some(behind))
}
