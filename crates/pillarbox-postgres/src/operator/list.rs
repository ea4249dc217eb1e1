use pillarbox::Position;
use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow};
use pillarbox::admin::{ListQuery, ListRow, ListedDelivery, State};
use pillarbox::store::AttemptError;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use super::status::{Pages, backlog_row};
use super::{IN_ORDER, claim_record, load_snapshot};
use crate::error::Db;
use crate::types::Time;

/// The events of the log, or without naming one: what each subscription has not finished.
pub(super) async fn list(tx: &Transaction<'_>, query: &ListQuery) -> Db<Vec<ListRow>> {
    let matcher = Matcher::new(query);
    if query.lists_the_log() {
        return events(tx, &matcher, query.limit).await;
    }
    let snapshot = load_snapshot(tx).await?;
    let mut rows = Vec::new();
    for subscription in snapshot.listed(query)? {
        rows.extend(deliveries(tx, subscription, query, &matcher).await?);
        if query.lists_unsettled() {
            rows.extend(unsettled(tx, &snapshot, subscription, query, &matcher).await?);
        }
    }
    Ok(query.in_order(rows))
}

/// The parts of a query that concern the event itself, as `ListQuery::matches` compares them, for the server.
#[derive(Default)]
pub(super) struct Matcher<'a> {
    pub(super) key: Option<&'a str>,
    pub(super) topic: Option<&'a str>,
    pub(super) topic_prefix: Option<&'a str>,
    pub(super) correlation_id: Option<&'a str>,
}

impl<'a> Matcher<'a> {
    fn new(query: &'a ListQuery) -> Self {
        let topic = query.topic.as_deref();
        let topic_prefix = topic.and_then(|topic| topic.strip_suffix('*'));
        Matcher {
            key: query.key.as_deref(),
            topic: topic.filter(|_| topic_prefix.is_none()),
            topic_prefix,
            correlation_id: query.correlation_id.as_deref(),
        }
    }
}

fn id_of(row: &Row) -> Db<Uuid> {
    Ok(row.try_get::<_, Option<Uuid>>("id")?.unwrap_or_default())
}

async fn events(tx: &Transaction<'_>, matcher: &Matcher<'_>, limit: usize) -> Db<Vec<ListRow>> {
    let mut pages = Pages::open(tx, matcher, 0, limit).await?;
    let mut list = Vec::new();
    while let Some(rows) = pages.next().await? {
        for row in &rows {
            list.push(backlog_row(row)?.list_row(id_of(row)?));
        }
    }
    Ok(list)
}

/// What the subscription's cursors have not settled.
async fn unsettled(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    subscription: &SubscriptionRow,
    query: &ListQuery,
    matcher: &Matcher<'_>,
) -> Db<Vec<ListRow>> {
    let mut pages = Pages::open(tx, matcher, subscription.floor(), usize::MAX).await?;
    let mut list = Vec::new();
    while list.len() < query.limit
        && let Some(rows) = pages.next().await?
    {
        for row in &rows {
            let line = backlog_row(row)?;
            list.extend(line.unsettled_row(id_of(row)?, subscription, query.state, snapshot.now));
        }
    }
    Ok(list)
}

/// Whether an index has what [`looked_at`] says in log order: as soon as enough is found, nothing more is looked at.
fn is_in_order(query: &ListQuery) -> bool {
    query.key.is_none() && matches!(query.state, None | Some(State::Dead | State::Delayed))
}

/// Whether [`looked_at`] says everything, so that no more rows are looked at than are wanted.
fn is_exact(query: &ListQuery) -> bool {
    is_in_order(query) && query.topic.is_none() && query.correlation_id.is_none()
}

/// Which rows can be in the state that is asked for, or have the key, in the words of an index.
fn looked_at(query: &ListQuery) -> String {
    let key = if query.key.is_some() { sql!(delivery, "rows_with_key") } else { "" };
    let rows = match query.state {
        Some(State::Dead) => sql!(delivery, "rows_dead"),
        Some(State::Delayed) => sql!(delivery, "rows_delayed"),
        Some(State::Processing | State::Retrying | State::Blocked) => {
            sql!(delivery, "rows_in_line")
        }
        None | Some(State::Pending) if query.key.is_some() => {
            sql!(delivery, "rows_of_key")
        }
        // As positions that are gathered first: for two indexes together the server has no plan but to look at every row.
        Some(State::Pending) => {
            sql!(delivery, "rows_in_line_or_due")
        }
        None => "",
    };
    format!("{rows} {key}")
}

/// The subscription's rows of the slow path.
async fn deliveries(
    tx: &Transaction<'_>,
    subscription: &SubscriptionRow,
    query: &ListQuery,
    matcher: &Matcher<'_>,
) -> Db<Vec<ListRow>> {
    let limit = Position::try_from(query.limit).unwrap_or(Position::MAX);
    let looked_at_max = if is_exact(query) { limit } else { i64::MAX };
    tx.batch_execute(if is_in_order(query) { IN_ORDER } else { sql!(session, "sorted") }).await?;
    let parameters = [
        (&subscription.id.0 as _, Type::INT8),
        (&query.state.map(State::name) as _, Type::TEXT),
        (&matcher.key as _, Type::TEXT),
        (&matcher.topic as _, Type::TEXT),
        (&matcher.topic_prefix as _, Type::TEXT),
        (&matcher.correlation_id as _, Type::TEXT),
        (&limit as _, Type::INT8),
        (&looked_at_max as _, Type::INT8),
    ];
    let sql = sql!(delivery, "list").replace("@rows@", &looked_at(query));
    let rows = tx.query_typed(&sql, &parameters).await?;
    let entry = |row: &Row| {
        let delivery = ListedDelivery {
            state: State::from_name(row.try_get("state")?),
            attempts: row.try_get::<_, i32>("attempts")? as u32,
            due_at: row.try_get::<_, Time>("due_at")?.0,
            claim: claim_record(row)?,
            errors: AttemptError::stored(row.try_get("errors")?),
        };
        Ok(backlog_row(row)?.delivery_row(id_of(row)?, subscription, delivery))
    };
    rows.iter().map(entry).collect()
}
