use pillarbox::{Headers, NewEvent, Result};

use super::{bytes_of, check_names, headers_of, id_of, json_of};
use crate::schema::{DEFAULT, Schema};

/// Publishing by whatever client the application has: the statement and its parameters.
pub trait EventSql {
    /// The statement that publishes this event into the schema `pillarbox`, to be run in the caller's own transaction.
    fn to_sql(&self) -> Result<PublishStatement>;
}

impl EventSql for NewEvent {
    fn to_sql(&self) -> Result<PublishStatement> {
        DEFAULT.to_sql(self)
    }
}

/// A statement that publishes one event. It returns one row with one column `id`, a text: the event's id, or that of the
/// first event with the same `dedup_key`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishStatement {
    /// The text, with parameters `$1` to `$9`, and `$10` if the event has a `dedup_key`.
    pub sql: String,
    /// The values, in order.
    pub parameters: Vec<Parameter>,
}

/// A value to be bound. A client needs to know no other types than these two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parameter {
    /// As `text`.
    Text(Option<String>),
    /// As `bytea`.
    Bytes(Option<Vec<u8>>),
}

impl Schema {
    /// The statement that publishes `event`, for any client.
    pub fn to_sql(&self, event: &NewEvent) -> Result<PublishStatement> {
        check_names(event)?;
        let text = |value: Option<&str>| Parameter::Text(value.map(str::to_owned));
        let mut parameters = vec![
            Parameter::Text(id_of(event, event.dedup_key.is_some()).map(|id| id.to_string())),
            text(Some(&event.topic)),
            text(event.key.as_deref()),
            text(Some(&event.r#type)),
            text(json_of(event).map(|json| json.0)),
            Parameter::Bytes(bytes_of(event).map(<[u8]>::to_vec)),
            text(event.content_type.as_deref()),
            text(headers_of(event).as_ref().map(Headers::as_json)),
            Parameter::Text(event.deliver_at.map(|at| at.to_string())),
        ];
        let sql = match &event.dedup_key {
            None => sql!(publish, "text"),
            Some(dedup_key) => {
                parameters.push(text(Some(dedup_key)));
                sql!(publish, "text_once")
            }
        };
        Ok(PublishStatement { sql: self.fill_in(sql), parameters })
    }
}
