use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, ErrorKind, Result};

/// The place of an event in the log. Valid within one incarnation; never deduplicate on it.
pub type Position = i64;

/// The largest payload that publishing accepts unless the log was set up otherwise.
pub const PAYLOAD_BYTES_MAX: usize = 1024 * 1024;

/// The largest headers, as the store keeps them: JSON text on SQLite, `jsonb` on PostgreSQL.
pub const HEADERS_BYTES_MAX: usize = 64 * 1024;

/// The longest content type.
pub const CONTENT_TYPE_BYTES_MAX: usize = 255;

/// The longest topic, type, key or deduplication key, in bytes.
pub const NAME_BYTES_MAX: usize = 1024;

/// The header that carries the correlation id.
pub const HEADER_CORRELATION_ID: &str = "correlationid";

/// One immutable row of the log.
///
/// ```
/// use pillarbox::{Event, Payload};
///
/// fn describe(event: &Event) -> String {
///     let bytes = match &event.payload {
///         Payload::None => 0,
///         Payload::Json(text) => text.len(),
///         Payload::Bytes(bytes) => bytes.len(),
///     };
///     let tenant = event.headers.get("tenant").unwrap_or_default();
///     format!("{} of {} ({tenant}), {bytes} bytes, inserted {}", event.r#type, event.topic, event.created_at)
/// }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The place in the log.
    pub position: Position,
    /// The identity for receivers; the same on every redelivery.
    pub id: Uuid,
    /// What the event is about, for example `orders`; subscriptions filter by it.
    pub topic: Arc<str>,
    /// What order is kept by. None: no order.
    pub key: Option<Box<str>>,
    /// What happened, for example `order.placed`.
    pub r#type: Arc<str>,
    /// The content, never parsed by the relay.
    pub payload: Payload,
    /// The media type of a payload of bytes.
    pub content_type: Option<Arc<str>>,
    /// Further attributes.
    pub headers: Headers,
    /// The dense version within a journal stream (whose name is the key).
    pub stream_version: Option<i64>,
    /// Not to be delivered before this time.
    pub deliver_at: Option<Timestamp>,
    /// When the row was inserted (not when it was committed).
    pub created_at: Timestamp,
    /// What of the row could not be read as it is, for people: such an event is never sent, and dead at once. None: nothing.
    pub malformed: Option<Box<str>>,
}

impl Event {
    /// The payload as JSON of type `T`. An error is [`ErrorKind::Invalid`] and says why it does not fit.
    ///
    /// ```
    /// use pillarbox::{Delivery, Failure};
    ///
    /// #[derive(serde::Deserialize)]
    /// struct OrderPlaced { order: u64, cents: i64 }
    ///
    /// async fn count(delivery: Delivery) -> Result<(), Failure> {
    ///     let placed: OrderPlaced = delivery.json()?;
    ///     println!("order {} of {} cents", placed.order, placed.cents);
    ///     Ok(())
    /// }
    /// ```
    pub fn json<T: for<'de> Deserialize<'de>>(&self) -> Result<T> {
        self.payload.json()
    }

    /// The hash of the key that decides the lane; None without a key.
    pub fn key_hash(&self) -> Option<KeyHash> {
        self.key.as_deref().map(KeyHash::of)
    }

    /// Roughly what this event costs in memory.
    pub fn size(&self) -> usize {
        const FIXED: usize = 160;
        let texts = [self.key.as_deref(), self.content_type.as_deref()];
        FIXED
            + self.payload.len()
            + self.headers.as_json().len()
            + texts.into_iter().flatten().map(str::len).sum::<usize>()
    }

    /// The correlation id, if the publisher gave one.
    pub fn correlation_id(&self) -> Option<String> {
        self.headers.get(HEADER_CORRELATION_ID)
    }
}

/// The hash of a key: xxh3-64, seed 0, of its UTF-8 bytes. Every store computes lanes from it, in Rust only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub u64);

impl KeyHash {
    /// The hash of `key`.
    pub fn of(key: &str) -> Self {
        KeyHash(xxh3_64(key.as_bytes()))
    }
}

/// The lane of an event: by its key, or without one by its position.
pub fn lane_of(key: Option<KeyHash>, position: Position, lanes: u32) -> u32 {
    let hash = key.map_or(position as u64, |key| key.0);
    (hash % u64::from(lanes.max(1))) as u32
}

/// The content of an event.
///
/// ```
/// use pillarbox::Payload;
///
/// let payload = Payload::Json("[1, 2]".into());
/// assert_eq!(payload.json::<Vec<u32>>()?, [1, 2]);
/// # Ok::<(), pillarbox::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Nothing; a tombstone where the receiving protocol has one.
    None,
    /// JSON text, exactly as it was published.
    Json(Box<str>),
    /// Bytes of the event's content type.
    Bytes(Box<[u8]>),
}

impl Payload {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Payload::None => 0,
            Payload::Json(text) => text.len(),
            Payload::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether there is no content at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload as JSON of type `T`. For handlers; the relay itself never calls it.
    pub fn json<T: for<'de> Deserialize<'de>>(&self) -> Result<T> {
        let text = match self {
            Payload::Json(text) => text.as_bytes(),
            Payload::Bytes(bytes) => bytes,
            Payload::None => b"null",
        };
        serde_json::from_slice(text)
            .map_err(|source| Error::with_source(ErrorKind::Invalid, "the payload is not the expected JSON", source))
    }
}

/// The headers of an event, kept as the JSON object that was published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(Option<Box<str>>);

impl Headers {
    /// Headers from the JSON text of an object, unchecked; what is not an object reads as empty.
    pub fn from_json(text: &str) -> Self {
        if text.is_empty() || text == "{}" { Headers(None) } else { Headers(Some(text.into())) }
    }

    /// Headers from names and values.
    pub fn from_map(map: &BTreeMap<String, String>) -> Self {
        if map.is_empty() {
            return Headers(None);
        }
        Headers(Some(serde_json::to_string(map).expect("a map of strings is JSON").into()))
    }

    /// The JSON object.
    pub fn as_json(&self) -> &str {
        self.0.as_deref().unwrap_or("{}")
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// All headers. A value that is not a string is given as its JSON text.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        let Some(text) = &self.0 else { return BTreeMap::new() };
        let Ok(object) = serde_json::from_str::<BTreeMap<String, serde_json::Value>>(text) else {
            return BTreeMap::new();
        };
        let as_text = |value: serde_json::Value| match value {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        object.into_iter().map(|(name, value)| (name, as_text(value))).collect()
    }

    /// One header.
    pub fn get(&self, name: &str) -> Option<String> {
        self.0.as_ref()?;
        self.to_map().remove(name)
    }
}

/// An event to be published: the part of an [`Event`] that an application decides. The crate of a store publishes it in your own
/// transaction.
///
/// ```
/// use std::time::Duration;
/// use pillarbox::{NewEvent, Timestamp};
///
/// #[derive(serde::Serialize)]
/// struct OrderPlaced { order: u64, cents: i64 }
///
/// let event = NewEvent::new("orders", "order.placed")
///     .key("customer-7")
///     .json(&OrderPlaced { order: 42, cents: 1_999 })
///     .header("tenant", "acme")
///     .deliver_at(Timestamp::now().plus(Duration::from_secs(3600)));
/// ```
#[derive(Debug, Clone)]
pub struct NewEvent {
    /// See [`Event::topic`].
    pub topic: String,
    /// See [`Event::type`].
    pub r#type: String,
    /// See [`Event::key`].
    pub key: Option<String>,
    /// See [`Event::payload`].
    pub payload: Payload,
    /// See [`Event::content_type`].
    pub content_type: Option<String>,
    /// See [`Event::headers`].
    pub headers: BTreeMap<String, String>,
    /// See [`Event::deliver_at`].
    pub deliver_at: Option<Timestamp>,
    /// A second event with the same topic, key and deduplication key inside the window is not published.
    pub dedup_key: Option<String>,
    /// The event's id; None: a new time-ordered one.
    pub id: Option<Uuid>,
}

impl NewEvent {
    /// An event without key and payload.
    pub fn new(topic: impl Into<String>, r#type: impl Into<String>) -> Self {
        NewEvent {
            topic: topic.into(),
            r#type: r#type.into(),
            key: None,
            payload: Payload::None,
            content_type: None,
            headers: BTreeMap::new(),
            deliver_at: None,
            dedup_key: None,
            id: None,
        }
    }

    /// Events of one key stay in order.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// A payload that is serialised to JSON.
    ///
    /// # Panics
    /// If `payload` cannot be JSON (a map with keys that are not strings).
    pub fn json<T: Serialize + ?Sized>(self, payload: &T) -> Self {
        self.json_text(serde_json::to_string(payload).expect("the payload serialises to JSON"))
    }

    /// A payload that is JSON text already; it arrives byte for byte.
    pub fn json_text(mut self, text: impl Into<String>) -> Self {
        self.payload = Payload::Json(text.into().into());
        self
    }

    /// A payload of bytes with its media type.
    pub fn bytes(mut self, bytes: impl Into<Vec<u8>>, content_type: impl Into<String>) -> Self {
        self.payload = Payload::Bytes(bytes.into().into());
        self.content_type = Some(content_type.into());
        self
    }

    /// One further header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Not before this time.
    pub fn deliver_at(mut self, at: Timestamp) -> Self {
        self.deliver_at = Some(at);
        self
    }

    /// See [`NewEvent::dedup_key`].
    pub fn dedup_key(mut self, key: impl Into<String>) -> Self {
        self.dedup_key = Some(key.into());
        self
    }

    /// An id of the application's own.
    pub fn id(mut self, id: Uuid) -> Self {
        self.id = Some(id);
        self
    }

    /// Refuses what no store would take; the message names the limit.
    pub fn validate(&self, payload_bytes_max: usize) -> Result<()> {
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        for (name, value) in [
            ("topic", Some(&self.topic)),
            ("type", Some(&self.r#type)),
            ("key", self.key.as_ref()),
            ("dedup_key", self.dedup_key.as_ref()),
        ] {
            let Some(value) = value else { continue };
            if value.is_empty() {
                return invalid(format!("the {name} must not be empty"));
            }
            if value.len() > NAME_BYTES_MAX {
                return invalid(format!(
                    "the {name} has {} bytes, more than name_bytes_max = {NAME_BYTES_MAX}",
                    value.len()
                ));
            }
        }
        if let Some(bytes) = self.content_type.as_ref().map(String::len).filter(|bytes| *bytes > CONTENT_TYPE_BYTES_MAX)
        {
            return invalid(format!(
                "the content type has {bytes} bytes, more than content_type_bytes_max = {CONTENT_TYPE_BYTES_MAX}"
            ));
        }
        let headers = Headers::from_map(&self.headers).as_json().len();
        if headers > HEADERS_BYTES_MAX {
            return invalid(format!(
                "the headers have {headers} bytes, more than headers_bytes_max = {HEADERS_BYTES_MAX}; put it into the payload"
            ));
        }
        if self.payload.len() > payload_bytes_max {
            return invalid(format!(
                "the payload has {} bytes, more than payload_bytes_max = {payload_bytes_max}; store it elsewhere and publish a reference",
                self.payload.len()
            ));
        }
        if let Payload::Json(text) = &self.payload {
            serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|source| {
                Error::with_source(
                    ErrorKind::Invalid,
                    format!("the payload is not JSON ({source}); publish it as bytes with a content type"),
                    source,
                )
            })?;
        }
        Ok(())
    }
}

/// Milliseconds since 1970-01-01 UTC; shown and read as RFC 3339.
///
/// ```
/// use pillarbox::Timestamp;
///
/// let time: Timestamp = "2026-01-31T12:00:00Z".parse()?;
/// assert_eq!(time.to_string(), "2026-01-31T12:00:00.000Z");
/// # Ok::<(), pillarbox::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The time of the system's clock.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp(since.as_millis() as i64)
    }

    /// The time `after` this one.
    pub fn plus(self, after: Duration) -> Self {
        Timestamp(self.0.saturating_add(i64::try_from(after.as_millis()).unwrap_or(i64::MAX)))
    }

    /// The time `before` this one.
    pub fn minus(self, before: Duration) -> Self {
        Timestamp(self.0.saturating_sub(i64::try_from(before.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0).max(0) as u64)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(time) => write!(f, "{time:.3}"),
            Err(_) => write!(f, "{} ms", self.0),
        }
    }
}

impl FromStr for Timestamp {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let time: jiff::Timestamp = text.parse().map_err(|source| {
            Error::with_source(
                ErrorKind::Invalid,
                format!("'{text}' is not a time; write it like 2026-01-31T12:00:00Z"),
                source,
            )
        })?;
        Ok(Timestamp(time.as_millisecond()))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
