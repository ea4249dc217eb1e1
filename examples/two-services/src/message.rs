use anyhow::Result;
use pillarbox::{Event, Failure};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What the shop tells billing: one line of JSON. The answer is a line with the id, sent when billing has committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The event's id: the same each time it is sent.
    pub id: Uuid,
    /// The order's number.
    pub order: i64,
    /// The price.
    pub cents: i64,
}

/// The payload of an event of the shop.
#[derive(Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) order: i64,
    pub(crate) cents: i64,
}

impl Message {
    /// What is sent for an event.
    pub fn of(event: &Event) -> Result<Self, Failure> {
        let Order { order, cents } = event.json()?;
        Ok(Message { id: event.id, order, cents })
    }

    pub(crate) fn line(&self) -> Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }
}
