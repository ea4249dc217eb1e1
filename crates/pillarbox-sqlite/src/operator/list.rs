use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow};
use pillarbox::admin::{BacklogRow, ListQuery, ListRow, State};
use pillarbox::sink::HEADER_CORRELATION_ID;
use pillarbox::{Filter, Headers, Timestamp};
use rusqlite::{Connection, Row, params};

use super::claim_record;
use super::status::backlog_row;
use crate::error::Db;
use crate::reader::{id_at, text};
use crate::settle::parse_errors;
use crate::store::Desk;

/// The events of the log, or without naming one: what each subscription has not finished.
pub(super) fn list(tx: &Connection, desk: &Desk, query: &ListQuery) -> Db<Vec<ListRow>> {
    let matcher = Matcher::new(query);
    if query.subscription.is_none() && query.state.is_none() {
        return events(tx, &matcher, query.limit);
    }
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let subscriptions: Vec<&SubscriptionRow> = match &query.subscription {
        Some(name) => vec![snapshot.subscription(name)?],
        None => snapshot.subscriptions.iter().collect(),
    };
    let mut rows = Vec::new();
    for subscription in subscriptions {
        rows.extend(deliveries(tx, subscription, query, &matcher)?);
        if matches!(query.state, None | Some(State::Pending | State::Delayed)) {
            rows.extend(unsettled(tx, &snapshot, subscription, query, &matcher)?);
        }
    }
    rows.sort_by(|a, b| (a.position, &a.subscription).cmp(&(b.position, &b.subscription)));
    rows.truncate(query.limit);
    Ok(rows)
}

/// The parts of a query that concern the event itself.
struct Matcher<'a> {
    key: Option<&'a str>,
    topic: Option<Filter>,
    correlation_id: Option<&'a str>,
}

impl<'a> Matcher<'a> {
    fn new(query: &'a ListQuery) -> Self {
        let topic = query.topic.as_ref().map(|topic| Filter { topics: vec![topic.clone()], types: Vec::new() });
        Matcher { key: query.key.as_deref(), topic, correlation_id: query.correlation_id.as_deref() }
    }

    fn matches(&self, topic: &str, key: Option<&str>, headers: impl FnOnce() -> Headers) -> bool {
        self.key.is_none_or(|wanted| key == Some(wanted))
            && self.topic.as_ref().is_none_or(|filter| filter.matches(topic, ""))
            && self.correlation_id.is_none_or(|id| headers().get(HEADER_CORRELATION_ID).as_deref() == Some(id))
    }

    /// A row that begins as the `backlog` of `sql/event.sql`, if it matches.
    fn line<'r>(&self, row: &'r Row<'_>) -> Db<Option<BacklogRow<'r>>> {
        let line = backlog_row(row)?;
        let headers = || row.get_ref("headers").map(|headers| Headers::from_json(&text(headers))).unwrap_or_default();
        Ok(self.matches(&line.topic, line.key, headers).then_some(line))
    }
}

fn events(tx: &Connection, matcher: &Matcher<'_>, limit: usize) -> Db<Vec<ListRow>> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([0, i64::MAX])?;
    let mut list = Vec::new();
    while list.len() < limit
        && let Some(row) = rows.next()?
    {
        if let Some(line) = matcher.line(row)? {
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
    matcher: &Matcher<'_>,
) -> Db<Vec<ListRow>> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([subscription.floor(), i64::MAX])?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(row) = rows.next()?
    {
        let Some(line) = matcher.line(row)? else { continue };
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
fn deliveries(
    tx: &Connection,
    subscription: &SubscriptionRow,
    query: &ListQuery,
    matcher: &Matcher<'_>,
) -> Db<Vec<ListRow>> {
    let sql = sql!(delivery, "list").replace("@rows@", looked_at(query));
    let mut statement = tx.prepare_cached(&sql)?;
    let mut rows = statement.query(params![subscription.id.0, query.state.map(State::name), query.key])?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(row) = rows.next()?
    {
        let Some(line) = matcher.line(row)? else { continue };
        let entry = line.list_row(id_at(row, "id")?);
        list.push(ListRow {
            subscription: Some(subscription.name.clone()),
            state: State::from_name(&row.get::<_, String>("state")?),
            attempts: Some(row.get("attempts")?),
            due_at: Some(Timestamp(row.get("due_at")?)),
            claim: claim_record(row)?,
            error: parse_errors(&row.get::<_, String>("errors")?).pop().map(|error| error.message),
            ..entry
        });
    }
    Ok(list)
}
