use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow};
use pillarbox::admin::{BacklogRow, ListQuery, ListRow, ListedDelivery, State};
use pillarbox::store::AttemptError;
use pillarbox::{Headers, Timestamp};
use rusqlite::{Connection, Row, params};

use super::claim_record;
use super::status::backlog_row;
use crate::error::Db;
use crate::reader::{id_at, text};
use crate::store::Desk;

/// The events of the log, or without naming one: what each subscription has not finished.
pub(super) fn list(tx: &Connection, desk: &Desk, query: &ListQuery) -> Db<Vec<ListRow>> {
    if query.lists_the_log() {
        return events(tx, query);
    }
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let mut rows = Vec::new();
    for subscription in snapshot.listed(query)? {
        rows.extend(deliveries(tx, subscription, query)?);
        if query.lists_unsettled() {
            rows.extend(unsettled(tx, &snapshot, subscription, query)?);
        }
    }
    Ok(query.in_order(rows))
}

/// A row that begins as the `backlog` of `sql/event.sql`, if the query asks for its event.
fn matching<'r>(query: &ListQuery, row: &'r Row<'_>) -> Db<Option<BacklogRow<'r>>> {
    let line = backlog_row(row)?;
    let headers = || row.get_ref("headers").map(|headers| Headers::from_json(&text(headers))).unwrap_or_default();
    Ok(query.matches(&line.topic, line.key, headers).then_some(line))
}

fn events(tx: &Connection, query: &ListQuery) -> Db<Vec<ListRow>> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([0, i64::MAX])?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(row) = rows.next()?
    {
        if let Some(line) = matching(query, row)? {
            list.push(line.list_row(id_at(row, "id")?));
        }
    }
    Ok(list)
}

/// What the subscription's cursors have not settled.
fn unsettled(
    tx: &Connection,
    snapshot: &Snapshot,
    subscription: &SubscriptionRow,
    query: &ListQuery,
) -> Db<Vec<ListRow>> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([subscription.floor(), i64::MAX])?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(row) = rows.next()?
    {
        let Some(line) = matching(query, row)? else { continue };
        list.extend(line.unsettled_row(id_at(row, "id")?, subscription, query.state, snapshot.now));
    }
    Ok(list)
}

/// The positions of rows that can be in the state that is asked for, or have the key. Which index serves is said: SQLite prefers the
/// primary key, and with it every row of the subscription.
fn looked_at(query: &ListQuery) -> &'static str {
    match (query.state, &query.key) {
        (_, Some(_)) => {
            sql!(delivery, "rows_of_key")
        }
        (Some(State::Dead), None) => {
            sql!(delivery, "rows_dead")
        }
        (Some(State::Delayed), None) => {
            sql!(delivery, "rows_delayed")
        }
        (Some(State::Processing | State::Retrying | State::Blocked), None) => {
            sql!(delivery, "rows_in_line")
        }
        (Some(State::Pending), None) => {
            sql!(delivery, "rows_in_line_or_due")
        }
        (None, None) => sql!(delivery, "rows_all"),
    }
}

/// The subscription's rows of the slow path.
fn deliveries(tx: &Connection, subscription: &SubscriptionRow, query: &ListQuery) -> Db<Vec<ListRow>> {
    let sql = sql!(delivery, "list").replace("@rows@", looked_at(query));
    let mut statement = tx.prepare_cached(&sql)?;
    let mut rows = statement.query(params![subscription.id.0, query.state.map(State::name), query.key])?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(row) = rows.next()?
    {
        let Some(line) = matching(query, row)? else { continue };
        let delivery = ListedDelivery {
            state: State::from_name(&row.get::<_, String>("state")?),
            attempts: row.get("attempts")?,
            due_at: Timestamp(row.get("due_at")?),
            claim: claim_record(row)?,
            errors: AttemptError::stored(&row.get::<_, String>("errors")?),
        };
        list.push(line.delivery_row(id_at(row, "id")?, subscription, delivery));
    }
    Ok(list)
}
