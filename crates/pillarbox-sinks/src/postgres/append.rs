use std::collections::BTreeMap;
use std::error::Error;

use pillarbox::sink::{Attempt, Batch};
use pillarbox::store::Epoch;
use pillarbox::{Event, Payload, Timestamp};
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

type Column<'a> = Box<dyn ToSql + Send + Sync + 'a>;

/// Microseconds from 1970 to 2000, where PostgreSQL counts from.
const EPOCH_US: i64 = 946_684_800_000_000;

/// The lane of an event with an older epoch than another one of its lane: it is never written.
const NOBODYS_LANE: i32 = -1;

/// The values of the statement that appends some events of a batch.
pub(super) struct Append<'a> {
    values: Vec<Column<'a>>,
}

impl<'a> Append<'a> {
    /// `lanes`: each lane of the events with the epoch of its owner.
    pub(super) fn new(batch: &'a Batch, source: &'a str, lanes: &BTreeMap<u32, Epoch>, events: &[&'a Attempt]) -> Self {
        let origin = batch.origin;
        let lane_of = |attempt: &Attempt| {
            attempt.lane.map(|lane| if lanes.get(&lane) == Some(&attempt.epoch) { lane as i32 } else { NOBODYS_LANE })
        };
        let mut append = Append {
            values: vec![
                Box::new(lanes.keys().map(|lane| *lane as i32).collect::<Vec<_>>()),
                Box::new(lanes.values().copied().collect::<Vec<_>>()),
                Box::new(origin.log_id),
                Box::new(&*batch.subscription),
                Box::new(origin.incarnation),
                Box::new(origin.subscription.0),
                Box::new(source),
            ],
        };
        append.add(events, lane_of);
        append.add(events, |attempt| attempt.event.id);
        append.add(events, |attempt| &*attempt.event.topic);
        append.add(events, |attempt| &*attempt.event.r#type);
        append.add(events, |attempt| attempt.event.key.as_deref());
        append.add(events, |attempt| attempt.event.position);
        append.add(events, |attempt| attempt.event.stream_version);
        append.add(events, |attempt| Time(attempt.event.created_at));
        append.add(events, |attempt| content_type(&attempt.event));
        append.add(events, |attempt| json(&attempt.event));
        append.add(events, |attempt| bytes(&attempt.event));
        append.add(events, |attempt| attempt.event.headers.as_json());
        append
    }

    pub(super) fn values(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.values.iter().map(|value| &**value as &(dyn ToSql + Sync)).collect()
    }

    fn add<T: ToSql + Send + Sync + 'a>(&mut self, events: &[&'a Attempt], value: impl Fn(&'a Attempt) -> T) {
        self.values.push(Box::new(events.iter().map(|attempt| value(attempt)).collect::<Vec<T>>()));
    }
}

/// The part of an event that has a NUL character in its text, which PostgreSQL cannot store.
pub(super) fn unstorable(event: &Event) -> Option<&'static str> {
    let texts = [
        ("topic", Some(&*event.topic)),
        ("type", Some(&*event.r#type)),
        ("key", event.key.as_deref()),
        ("content type", event.content_type.as_deref()),
        ("JSON payload", json(event)),
        ("headers", Some(event.headers.as_json())),
    ];
    let has_nul = |text: Option<&str>| text.is_some_and(|text| text.as_bytes().contains(&0));
    texts.into_iter().find(|(_, text)| has_nul(*text)).map(|(name, _)| name)
}

fn json(event: &Event) -> Option<&str> {
    match &event.payload {
        // As in a CloudEvent, no text at all is no payload.
        Payload::Json(text) => Some(&**text).filter(|text| !text.is_empty()),
        _ => None,
    }
}

fn bytes(event: &Event) -> Option<&[u8]> {
    if let Payload::Bytes(bytes) = &event.payload { Some(bytes) } else { None }
}

fn content_type(event: &Event) -> Option<&str> {
    let default = match (json(event), bytes(event)) {
        (Some(_), _) => "application/json",
        (None, Some(_)) => "application/octet-stream",
        (None, None) => return None,
    };
    Some(event.content_type.as_deref().unwrap_or(default))
}

/// A [`Timestamp`] as `timestamptz`.
#[derive(Debug)]
struct Time(Timestamp);

impl ToSql for Time {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        let us = self.0.0.saturating_mul(1000).saturating_sub(EPOCH_US);
        out.extend_from_slice(&us.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}
