//! What `list` shows, whatever the database.
use uuid::Uuid;

use super::BacklogRow;
use super::snapshot::{Snapshot, SubscriptionRow};
use crate::sink::HEADER_CORRELATION_ID;
use crate::{AttemptError, ClaimRecord, Filter, Headers, ListQuery, ListRow, Result, State, Timestamp};

impl ListQuery {
    /// Whether the events of the log are listed, whatever became of them; else what subscriptions have not finished.
    pub fn lists_the_log(&self) -> bool {
        self.subscription.is_none() && self.state.is_none()
    }

    /// Whether events can be listed that are neither settled nor a delivery.
    pub fn lists_unsettled(&self) -> bool {
        matches!(self.state, None | Some(State::Pending | State::Delayed))
    }

    /// Whether an event is listed, as far as the event itself decides.
    pub fn matches(&self, topic: &str, key: Option<&str>, headers: impl FnOnce() -> Headers) -> bool {
        let topics = Filter { topics: self.topic.iter().cloned().collect(), types: Vec::new() };
        self.key.as_deref().is_none_or(|wanted| key == Some(wanted))
            && topics.matches(topic, "")
            && self
                .correlation_id
                .as_deref()
                .is_none_or(|id| headers().get(HEADER_CORRELATION_ID).as_deref() == Some(id))
    }

    /// The list of what was found: by position, then by subscription, and not more than asked for.
    pub fn in_order(&self, mut rows: Vec<ListRow>) -> Vec<ListRow> {
        rows.sort_by(|a, b| (a.position, &a.subscription).cmp(&(b.position, &b.subscription)));
        rows.truncate(self.limit);
        rows
    }
}

impl Snapshot {
    /// The subscriptions whose events are listed; fails if the named one does not exist.
    pub fn listed(&self, query: &ListQuery) -> Result<Vec<&SubscriptionRow>> {
        match &query.subscription {
            Some(name) => Ok(vec![self.subscription(name)?]),
            None => Ok(self.subscriptions.iter().collect()),
        }
    }
}

/// What a list says of a delivery.
#[derive(Debug)]
pub struct ListedDelivery {
    /// Its state.
    pub state: Option<State>,
    /// Number of counted attempts.
    pub attempts: u32,
    /// The time of the next attempt.
    pub due_at: Timestamp,
    /// The claim on it.
    pub claim: Option<ClaimRecord>,
    /// Its errors, oldest first.
    pub errors: Vec<AttemptError>,
}

impl BacklogRow<'_> {
    /// The line of a list about the log.
    pub fn list_row(&self, id: Uuid) -> ListRow {
        ListRow {
            id,
            position: self.position,
            topic: self.topic.to_string(),
            r#type: self.r#type.to_string(),
            key: self.key.map(str::to_owned),
            created_at: self.created_at,
            subscription: None,
            state: None,
            attempts: None,
            due_at: None,
            claim: None,
            error: None,
        }
    }

    /// The line of a list about a subscription that has a delivery of it.
    pub fn delivery_row(&self, id: Uuid, subscription: &SubscriptionRow, mut delivery: ListedDelivery) -> ListRow {
        ListRow {
            subscription: Some(subscription.name.clone()),
            state: delivery.state,
            attempts: Some(delivery.attempts),
            due_at: Some(delivery.due_at),
            claim: delivery.claim,
            error: delivery.errors.pop().map(|error| error.message),
            ..self.list_row(id)
        }
    }

    /// The line of a list about a subscription that has no delivery of it, if it awaits the event in this state, or in any.
    pub fn unsettled_row(
        &self,
        id: Uuid,
        subscription: &SubscriptionRow,
        wanted: Option<State>,
        now: Timestamp,
    ) -> Option<ListRow> {
        let due_at = self.delayed_until(now);
        let state = if due_at.is_some() { State::Delayed } else { State::Pending };
        (wanted.is_none_or(|wanted| wanted == state) && self.awaits(subscription)).then(|| ListRow {
            subscription: Some(subscription.name.clone()),
            state: Some(state),
            attempts: Some(0),
            due_at,
            ..self.list_row(id)
        })
    }
}
