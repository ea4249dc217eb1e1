//! Rows of the log, as operators' commands and retention judge them.
use std::borrow::Cow;

use uuid::Uuid;

use super::snapshot::SubscriptionRow;
use crate::{FormerFilters, KeyHash, ListRow, Position, State, Timestamp};

/// What decides about an event of the log that was not read as a whole.
#[derive(Debug, Clone)]
pub struct BacklogRow<'a> {
    /// Its position.
    pub position: Position,
    /// Its topic.
    pub topic: Cow<'a, str>,
    /// Its type.
    pub r#type: Cow<'a, str>,
    /// Its key; None also where that is no text, as in [`Event::malformed`](crate::Event::malformed).
    pub key: Option<&'a str>,
    /// The hash of the key.
    pub key_hash: Option<KeyHash>,
    /// When it is to be delivered, if that was said.
    pub deliver_at: Option<Timestamp>,
    /// When it was inserted.
    pub created_at: Timestamp,
}

impl BacklogRow<'_> {
    /// When it is due, if that is later than now.
    pub fn delayed_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.deliver_at.filter(|at| *at > now)
    }

    /// Whether the subscription wants the event and has not settled it.
    pub fn awaits(&self, subscription: &SubscriptionRow) -> bool {
        subscription.lane_at(self.key_hash, self.position).is_some_and(|lane| !lane.has_settled(self.position))
            && subscription.filter.matches(&self.topic, &self.r#type)
    }

    /// The same, and it had not settled the event when a filter ended: else it was received, also where the cursor was cut since.
    pub fn is_lost_to(&self, subscription: &SubscriptionRow, former_filters: &FormerFilters) -> bool {
        self.awaits(subscription) && former_filters.judge_of(self.key_hash, self.position).is_none()
    }

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
