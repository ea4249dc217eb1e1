use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Event, Position, Result, RetryPolicy, Timestamp};

/// The most lanes of one subscription.
pub const LANES_MAX: u32 = 256;

/// What the `processing_timeout` of a queue may be: processes that live give signs of life three times as often.
const PROCESSING_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(100 * 365 * 86_400);

/// A named durable reader of the log: which events it wants and how they are processed. The [`Sink`](crate::Sink) that
/// it delivers to is given separately.
///
/// ```
/// use pillarbox::{RetryPolicy, Start, Subscription};
///
/// let index = Subscription {
///     retry: RetryPolicy::sink(),
///     lanes: 16,
///     ..Subscription::stream("search-index").topics(["orders", "billing.*"]).start(Start::Now)
/// };
/// assert!(index.filter.matches("billing.invoices", "invoice.booked"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Subscription {
    /// The name under which its cursor is stored.
    pub name: String,
    /// The filter. Default: all events.
    pub filter: Filter,
    /// Stream (the default) or queue.
    pub mode: Mode,
    /// Number of lanes into which its keys are divided; fixed when the subscription is created. Default: 8.
    pub lanes: u32,
    /// What a dead event does to its key. Default: block.
    pub on_dead: OnDead,
    /// Where it begins when it is created. Default: the beginning of the log.
    pub start: Start,
    /// The time for which it may hold retention back; None: for ever.
    pub hold: Option<Duration>,
    /// The retry policy.
    pub retry: RetryPolicy,
    /// In a stream: the time after which a delivery is cancelled. In a queue: the time without a sign of life after
    /// which the claims of a process are recovered. Default: 5 min.
    pub processing_timeout: Duration,
    /// In a queue: the time without a call of [`heartbeat`](crate::heartbeat) after which a handler is cancelled.
    /// Default: none; a handler may then take any length of time.
    pub heartbeat_timeout: Option<Duration>,
    /// Number of batches that are delivered at once. Default: 4.
    pub workers: usize,
    /// Number of events that are handed to the sink at once. Default: 100.
    pub batch_size: usize,
}

impl Subscription {
    /// A stream: events in order per key, and only failures cost a row. Same as [`Subscription::new`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use pillarbox::{OnDead, Subscription};
    ///
    /// let mailer = Subscription::stream("mailer")
    ///     .topics(["orders", "billing.*"])
    ///     .max_attempts(5)
    ///     .on_dead(OnDead::Skip)
    ///     .processing_timeout(Duration::from_secs(30));
    /// ```
    pub fn stream(name: impl Into<String>) -> Self {
        Subscription::new(name)
    }

    /// A queue, for handlers that take minutes or hours, and for transactional handlers. All relays compete for its
    /// events.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pillarbox::Subscription;
    ///
    /// let renderer = Subscription::queue("renderer").topics(["videos"]).workers(2).heartbeat_timeout(Duration::from_secs(60));
    /// ```
    pub fn queue(name: impl Into<String>) -> Self {
        Subscription { mode: Mode::Queue, ..Subscription::new(name) }
    }

    /// All topics, stream mode, from the beginning, with the retry policy of handlers.
    pub fn new(name: impl Into<String>) -> Self {
        Subscription {
            name: name.into(),
            filter: Filter::default(),
            mode: Mode::Stream,
            lanes: 8,
            on_dead: OnDead::Block,
            start: Start::Beginning,
            hold: None,
            retry: RetryPolicy::handler(),
            processing_timeout: Duration::from_secs(300),
            heartbeat_timeout: None,
            workers: 4,
            batch_size: 100,
        }
    }

    /// Only these topics: exact names, or prefixes like `billing.*`.
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.filter.topics = topics.into_iter().map(Into::into).collect();
        self
    }

    /// Only these types.
    pub fn types<T: Into<String>>(mut self, types: impl IntoIterator<Item = T>) -> Self {
        self.filter.types = types.into_iter().map(Into::into).collect();
        self
    }

    /// Sets where it begins when it is created. Default: the beginning of the log.
    #[must_use]
    pub fn start(self, start: Start) -> Self {
        Subscription { start, ..self }
    }

    /// Sets the number of lanes into which its keys are divided when it is created. Default: 8.
    #[must_use]
    pub fn lanes(self, lanes: u32) -> Self {
        Subscription { lanes, ..self }
    }

    /// Sets how many events are handled at once. Default: 4.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Subscription { workers, ..self }
    }

    /// Sets how many events are handed to a sink at once. Default: 100.
    #[must_use]
    pub fn batch_size(self, batch_size: usize) -> Self {
        Subscription { batch_size, ..self }
    }

    /// Sets what a dead event does to its key. Default: block.
    #[must_use]
    pub fn on_dead(self, on_dead: OnDead) -> Self {
        Subscription { on_dead, ..self }
    }

    /// Sets when a failed event is retried, and when it is dead.
    #[must_use]
    pub fn retry(self, retry: RetryPolicy) -> Self {
        Subscription { retry, ..self }
    }

    /// Sets the number of failed attempts after which an event is dead, whatever time they take. Default: 8.
    #[must_use]
    pub fn max_attempts(self, max_attempts: u32) -> Self {
        Subscription { retry: self.retry.attempts(max_attempts), ..self }
    }

    /// Sets the field `processing_timeout`. Default: 5 min.
    #[must_use]
    pub fn processing_timeout(self, processing_timeout: Duration) -> Self {
        Subscription { processing_timeout, ..self }
    }

    /// Sets, for a queue, the time without a call of [`heartbeat`](crate::heartbeat) after which a handler is
    /// cancelled. Default: none.
    #[must_use]
    pub fn heartbeat_timeout(self, heartbeat_timeout: Duration) -> Self {
        Subscription { heartbeat_timeout: Some(heartbeat_timeout), ..self }
    }

    /// Sets the time for which it may hold retention back; after that, events that it has not received are dropped.
    /// Default: for ever.
    #[must_use]
    pub fn hold(self, hold: Duration) -> Self {
        Subscription { hold: Some(hold), ..self }
    }

    /// Refuses settings that cannot work; the message says what to change.
    pub fn validate(&self) -> Result<()> {
        let invalid =
            |message: String| Err(Error::new(ErrorKind::Invalid, format!("subscription '{}': {message}", self.name)));
        let valid_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || self.name.len() > 128 || !self.name.chars().all(valid_name) {
            return invalid("a name has 1 to 128 letters, digits, '-', '_' or '.'".into());
        }
        if self.lanes == 0 || self.lanes > LANES_MAX {
            return invalid(format!("lanes = {} is outside 1 to lanes_max = {LANES_MAX}", self.lanes));
        }
        if self.workers == 0 || self.batch_size == 0 {
            return invalid("workers and batch_size are at least 1".into());
        }
        if self.mode == Mode::Queue && !PROCESSING_TIMEOUT.contains(&self.processing_timeout) {
            let (min, max) = (PROCESSING_TIMEOUT.start(), PROCESSING_TIMEOUT.end());
            return invalid(format!(
                "processing_timeout = {:?} of a queue is outside {min:?} to {max:?}",
                self.processing_timeout
            ));
        }
        if self.mode == Mode::Stream && self.heartbeat_timeout.is_some() {
            return invalid("heartbeat_timeout is for queues; set mode = \"queue\", or use processing_timeout".into());
        }
        self.filter.validate().or_else(|error| invalid(error.to_string()))
    }
}

/// The events that a subscription wants: those that match one of the topics and one of the types.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Filter {
    /// Exact topics or prefixes that end in `*`; empty: all.
    #[serde(default)]
    pub topics: Vec<String>,
    /// Exact types or prefixes that end in `*`; empty: all.
    #[serde(default)]
    pub types: Vec<String>,
}

impl Filter {
    /// A filter from its stored text. One that cannot be read wants everything: too much is delivered rather than too little.
    pub fn stored(text: &str) -> Self {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// Refuses patterns that cannot match as they are meant; the message says what to change.
    pub fn validate(&self) -> Result<()> {
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        let mut patterns = self.topics.iter().chain(&self.types);
        if patterns.clone().any(String::is_empty) {
            return invalid("an empty topic or type matches no event; remove it".into());
        }
        let lone_star = |pattern: &&String| pattern.find('*').is_some_and(|at| at + 1 != pattern.len());
        match patterns.find(lone_star) {
            Some(pattern) => invalid(format!("'{pattern}': a '*' may only stand at the end, as in 'billing.*'")),
            None => Ok(()),
        }
    }

    /// Whether every event is wanted.
    pub fn is_all(&self) -> bool {
        let all = |patterns: &[String]| patterns.is_empty() || patterns.iter().any(|pattern| pattern == "*");
        all(&self.topics) && all(&self.types)
    }

    /// Whether an event of this topic and type is wanted.
    pub fn matches(&self, topic: &str, r#type: &str) -> bool {
        fn any(patterns: &[String], value: &str) -> bool {
            patterns.is_empty()
                || patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
                    Some(prefix) => value.starts_with(prefix),
                    None => pattern == value,
                })
        }
        any(&self.topics, topic) && any(&self.types, r#type)
    }

    /// Whether `event` is wanted.
    pub fn wants(&self, event: &Event) -> bool {
        self.matches(&event.topic, &event.r#type)
    }
}

/// How the instances share the events of a subscription.
///
/// ```
/// use pillarbox::{Mode, Subscription};
///
/// assert_eq!(Subscription::stream("mailer").mode, Mode::Stream);
/// assert_eq!(Subscription::queue("renderer").mode, Mode::Queue);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The owner of a lane delivers its events in order; only failures cost a row.
    Stream,
    /// Quick events are handled from memory as in a stream. An event that takes longer gets a row in the delivery
    /// table, and all instances compete for these rows.
    Queue,
}

/// What a dead event does to its key.
///
/// ```
/// use pillarbox::{OnDead, Subscription};
///
/// // Each measurement stands for itself: one that cannot be stored holds back no other.
/// let meter = Subscription::stream("meter").topics(["measurements"]).on_dead(OnDead::Skip);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDead {
    /// Later events of the key wait for an operator.
    Block,
    /// Later events of the key continue.
    Skip,
}

/// Where a new subscription begins.
///
/// ```
/// use pillarbox::{Start, Subscription};
///
/// let alerts = Subscription::stream("alerts").start(Start::Now);
/// let january = Subscription::stream("report").start(Start::Time("2026-01-01T00:00:00Z".parse()?));
/// # Ok::<(), pillarbox::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The first event that is still in the log.
    Beginning,
    /// After the creation of the subscription: only events committed later.
    Now,
    /// The events above this position.
    Position(Position),
    /// The events inserted at or after this time.
    Time(Timestamp),
}
