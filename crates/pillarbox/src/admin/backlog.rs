//! Rows of the log, as operators' commands and retention judge them.
use std::borrow::Cow;

use super::snapshot::SubscriptionRow;
use crate::{FormerFilters, KeyHash, Position, Timestamp};

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
}
