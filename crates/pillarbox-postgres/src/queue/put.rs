use std::collections::HashSet;

use pillarbox::{Queued, State};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Statement, Transaction};

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::settle::{Write, with_errors};
use crate::types::Time;

/// Prepared before the settlement begins.
pub(crate) async fn put_statement(session: &Session) -> Db<Statement> {
    session.statement(include_str!("../sql/queue_put.sql")).await
}

/// Writes the rows of queues of a settlement for instance `me`. The keys of which some are behind others.
pub(crate) async fn put(
    tx: &Transaction<'_>,
    statement: &Statement,
    writes: &[Write<'_>],
    me: Option<i32>,
) -> Db<Option<Keys>> {
    let rows = new_rows(writes)?;
    if rows.is_empty() {
        return Ok(None);
    }
    let subscriptions: Vec<i64> = rows.iter().map(|(subscription, ..)| *subscription).collect();
    let lanes: Vec<i32> = rows.iter().map(|(_, lane, _)| *lane).collect();
    let deliveries = || rows.iter().map(|(.., queued)| &queued.delivery);
    let positions: Vec<i64> = deliveries().map(|delivery| delivery.position).collect();
    let keys: Vec<Option<&str>> = deliveries().map(|delivery| delivery.key.as_deref()).collect();
    let states: Vec<&str> = deliveries().map(|delivery| delivery.state.name()).collect();
    let attempts: Vec<i32> = deliveries().map(|delivery| delivery.attempts as i32).collect();
    let due_at: Vec<Time> = deliveries().map(|delivery| Time(delivery.due_at)).collect();
    let since: Vec<Time> = deliveries().map(|delivery| Time(delivery.since)).collect();
    let errors: Vec<String> = rows.iter().map(|(.., queued)| with_errors("[]", queued.error.as_slice())).collect();
    let claims: Vec<Option<i64>> = rows.iter().map(|(.., queued)| queued.claim.map(|claim| claim.0)).collect();
    let firsts = firsts(&rows);
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
        &firsts,
    ];
    let mut behind = Keys::default();
    for row in tx.query(statement, &values).await? {
        behind.note(row.try_get(0)?, row.try_get(1)?);
    }
    Ok(Some(behind))
}

/// What the stored cursors have not settled. The owner repeats a settlement that was not answered; by then its rows may be done.
fn new_rows<'a>(writes: &[Write<'a>]) -> Db<Vec<(i64, i32, &'a Queued)>> {
    let mut rows = Vec::new();
    for (write, held) in writes.iter().filter(|(write, _)| !write.queue.is_empty()) {
        let has_settled = held.has_settled()?;
        let new = write.queue.iter().filter(|queued| !has_settled(queued.delivery.position));
        rows.extend(new.map(|queued| (write.lane.subscription.0, write.lane.lane as i32, queued)));
    }
    Ok(rows)
}

/// Which rows have none of their key before them among these; what is delayed stands outside the order.
fn firsts(rows: &[(i64, i32, &Queued)]) -> Vec<bool> {
    let mut seen: HashSet<(i64, &str)> = HashSet::new();
    let mut firsts = Vec::with_capacity(rows.len());
    for (subscription, _, queued) in rows {
        let key = queued.delivery.key.as_deref().filter(|_| queued.delivery.state != State::Delayed);
        firsts.push(key.is_some_and(|key| seen.insert((*subscription, key))));
    }
    firsts
}
