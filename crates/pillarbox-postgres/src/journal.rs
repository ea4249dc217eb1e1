use std::ops::{Bound, RangeBounds};

use pillarbox::journal::{Append, Appended, Expected, StreamHead};
use pillarbox::{Error, Event, Headers, NewEvent, Payload, Result, Timestamp};

use crate::client::PgClient;
use crate::schema::{DEFAULT, Schema};

pub(crate) mod on_client;
#[cfg(feature = "sqlx")]
pub(crate) mod on_sqlx;

/// Appends events to a stream of the journal in the caller's own transaction: they are there, and delivered, if and only if that commits.
///
/// The name of the stream becomes the key of its events, and their versions are dense: 1, 2, 3 and so on. A stream that is not at the
/// expected version is [`ErrorKind::Conflict`](pillarbox::ErrorKind::Conflict), and so is a serialisation failure under repeatable read or
/// serializable. As after every failed statement, PostgreSQL lets the transaction do nothing more: roll back and begin a new one. All events
/// of a stream have one topic. Journal events are never pruned.
///
/// An append waits for a transaction that has appended to the same stream and has not ended. To append to several streams in one
/// transaction, take them in the order of their names; else two such transactions may wait for each other, and PostgreSQL ends one.
///
/// With sqlx (feature `sqlx`), pass `&mut *transaction`. For a log that is not in the schema `pillarbox` use [`Schema::append`].
///
/// ```no_run
/// # async fn roll(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use pillarbox::NewEvent;
/// use pillarbox::journal::Expected;
/// use pillarbox_postgres::{append, read};
///
/// let transaction = client.transaction().await?;
/// let past = read(&transaction, "campaign-7", 1..).await?;
/// let rolled = NewEvent::new("campaigns", "dice.rolled").json_text(r#"{"sum": 9}"#);
/// append(&transaction, "campaign-7", Expected::Version(past.len() as i64), &[rolled]).await?;
/// transaction.commit().await?;
/// # Ok(())
/// # }
/// ```
pub async fn append<C: PgClient>(
    transaction: C,
    stream: &str,
    expected: impl Into<Expected>,
    events: &[NewEvent],
) -> Result<Appended> {
    DEFAULT.append(transaction, stream, expected, events).await
}

/// The events of a stream whose versions are in a range, in order: `1..` for all.
///
/// The role needs the grants of `pillarbox_journal`, as `pillarbox migrate --print-roles` prints them.
pub async fn read<C: PgClient>(connection: C, stream: &str, versions: impl RangeBounds<i64>) -> Result<Vec<Event>> {
    DEFAULT.read(connection, stream, versions).await
}

/// The version of a stream: how many events it has. Needs the same grants as [`read`].
pub async fn head<C: PgClient>(connection: C, stream: &str) -> Result<i64> {
    DEFAULT.head(connection, stream).await
}

impl Schema {
    /// See [`append()`].
    pub async fn append<C: PgClient>(
        &self,
        transaction: C,
        stream: &str,
        expected: impl Into<Expected>,
        events: &[NewEvent],
    ) -> Result<Appended> {
        let append = Append::new(stream, expected.into(), events)?;
        let version = transaction.append(self, append).await?;
        Ok(append.appended(version - events.len() as i64))
    }

    /// See [`read()`].
    pub async fn read<C: PgClient>(
        &self,
        connection: C,
        stream: &str,
        versions: impl RangeBounds<i64>,
    ) -> Result<Vec<Event>> {
        let from = match versions.start_bound() {
            Bound::Included(from) => *from,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 1,
        };
        let to = match versions.end_bound() {
            Bound::Included(to) => *to,
            Bound::Excluded(end) => end.saturating_sub(1),
            Bound::Unbounded => i64::MAX,
        };
        connection.read_stream(self, Stretch { stream, from, to, limit: i64::MAX }).await
    }

    /// See [`head()`].
    pub async fn head<C: PgClient>(&self, connection: C, stream: &str) -> Result<i64> {
        connection.stream_version(self, stream).await
    }
}

/// A stretch of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Stretch<'a> {
    pub(crate) stream: &'a str,
    pub(crate) from: i64,
    pub(crate) to: i64,
    pub(crate) limit: i64,
}

/// A row of `read` in `sql/journal.sql`.
pub(crate) struct StreamRow {
    pub(crate) position: i64,
    pub(crate) topic: String,
    pub(crate) r#type: String,
    pub(crate) id: String,
    pub(crate) key: Option<String>,
    pub(crate) json: Option<String>,
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Option<String>,
    pub(crate) version: i64,
    pub(crate) created_at: i64,
}

impl StreamRow {
    pub(crate) fn into_event(self) -> Event {
        let payload = match (self.json, self.bytes) {
            (Some(json), _) => Payload::Json(json.into()),
            (None, Some(bytes)) => Payload::Bytes(bytes.into()),
            (None, None) => Payload::None,
        };
        Event {
            position: self.position,
            id: self.id.parse().expect("PostgreSQL returns an id"),
            topic: self.topic.into(),
            key: self.key.map(Into::into),
            r#type: self.r#type.into(),
            payload,
            content_type: self.content_type.map(Into::into),
            headers: self.headers.as_deref().map_or_else(Headers::default, Headers::from_json),
            stream_version: Some(self.version),
            deliver_at: None,
            created_at: Timestamp(self.created_at),
            malformed: None,
        }
    }
}

/// Two transactions that append to one stream under a snapshot: the second learns of the first by this code alone.
const SERIALIZATION_FAILURE: &str = "40001";

/// What an append failed by, where another append to the stream is the cause.
pub(crate) fn conflict_of(stream: &str, code: Option<&str>) -> Option<Error> {
    (code == Some(SERIALIZATION_FAILURE)).then(|| {
        pillarbox::journal::conflict(&format!(
            "another transaction has changed stream \"{stream}\" since this one began"
        ))
    })
}

pub(crate) fn stream_head(stream: String, topic: String, version: i64) -> StreamHead {
    StreamHead { stream, topic, version }
}
