use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Event, Position, Result, RetryPolicy, Timestamp};

/// The most lanes of one subscription.
pub const LANES_MAX: u32 = 256;

/// What the `processing_timeout` of a queue may be: processes that live give signs of life three times as often.
const PROCESSING_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(100 * 365 * 86_400);

/// A named durable reader of the log: what it wants and how it is treated. Where it delivers to is a
/// [`Sink`](crate::Sink) beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscription {
    /// The name that its cursor is kept under.
    pub name: String,
    /// Which events it wants. Default: all.
    pub filter: Filter,
    /// Stream (the default) or queue.
    pub mode: Mode,
    /// How many slices its keys are cut into; fixed when the subscription is created. Default: 8.
    pub lanes: u32,
    /// What a dead event does to its key. Default: block.
    pub on_dead: OnDead,
    /// Where it begins, when it is created. Default: the beginning of the log.
    pub start: Start,
    /// How long it may hold retention back; None: for ever.
    pub hold: Option<Duration>,
    /// When a failed event is tried again, and when it is dead.
    pub retry: RetryPolicy,
    /// In a stream: how long one delivery may take before it is cancelled. In a queue: for how long the process that works on a
    /// delivery may give no sign of life before others take it. Default: 5 min.
    pub processing_timeout: Duration,
    /// In a queue: a handler that has not called [`heartbeat`](crate::heartbeat) for this long is cancelled. Default: none, it may take as
    /// long as it likes.
    pub heartbeat_timeout: Option<Duration>,
    /// How many batches are being delivered at once. Default: 4.
    pub workers: usize,
    /// How many events are handed to the sink at once. Default: 100.
    pub batch_size: usize,
}

impl Subscription {
    /// A stream: events in the order of their keys, and only failures cost a row. What [`Subscription::new`] makes too.
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

    /// A queue: for handlers of minutes and hours, and for transactional ones. All relays compete for its events.
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

    /// Where it begins, when it is created. Default: the beginning of the log.
    #[must_use]
    pub fn start(self, start: Start) -> Self {
        Subscription { start, ..self }
    }

    /// How many slices its keys are cut into, when it is created. Default: 8.
    #[must_use]
    pub fn lanes(self, lanes: u32) -> Self {
        Subscription { lanes, ..self }
    }

    /// How many events are handled at once. Default: 4.
    #[must_use]
    pub fn workers(self, workers: usize) -> Self {
        Subscription { workers, ..self }
    }

    /// How many events are handed to a sink at once. Default: 100.
    #[must_use]
    pub fn batch_size(self, batch_size: usize) -> Self {
        Subscription { batch_size, ..self }
    }

    /// What a dead event does to its key. Default: block.
    #[must_use]
    pub fn on_dead(self, on_dead: OnDead) -> Self {
        Subscription { on_dead, ..self }
    }

    /// When a failed event is tried again, and when it is dead.
    #[must_use]
    pub fn retry(self, retry: RetryPolicy) -> Self {
        Subscription { retry, ..self }
    }

    /// After how many failed attempts an event is dead, whatever time they take. Default: 8.
    #[must_use]
    pub fn max_attempts(self, max_attempts: u32) -> Self {
        Subscription { retry: self.retry.attempts(max_attempts), ..self }
    }

    /// See the field of this name. Default: 5 min.
    #[must_use]
    pub fn processing_timeout(self, processing_timeout: Duration) -> Self {
        Subscription { processing_timeout, ..self }
    }

    /// In a queue: a handler that has not called [`heartbeat`](crate::heartbeat) for this long is cancelled. Default: none.
    #[must_use]
    pub fn heartbeat_timeout(self, heartbeat_timeout: Duration) -> Self {
        Subscription { heartbeat_timeout: Some(heartbeat_timeout), ..self }
    }

    /// For how long it may hold retention back; after that, events that it has not received are dropped. Default: for ever.
    #[must_use]
    pub fn hold(self, hold: Duration) -> Self {
        Subscription { hold: Some(hold), ..self }
    }

    /// Refuses what cannot run; the message says what to change.
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
        if self.filter.topics.iter().chain(&self.filter.types).any(String::is_empty) {
            return invalid("an empty topic or type matches no event; remove it".into());
        }
        let lone_star = |pattern: &String| pattern.find('*').is_some_and(|at| at + 1 != pattern.len());
        if let Some(pattern) = self.filter.topics.iter().chain(&self.filter.types).find(|pattern| lone_star(pattern)) {
            return invalid(format!("'{pattern}': a '*' may only stand at the end, as in 'billing.*'"));
        }
        Ok(())
    }
}

/// Which events a subscription wants: those that match one of the topics and one of the types.
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

/// How events reach their instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The lane's owner reads the log; only failures cost a row.
    Stream,
    /// What is quick is handled from memory like a stream; what takes longer becomes a row of the delivery table, and instances compete
    /// for rows.
    Queue,
}

/// What a dead event does to its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDead {
    /// Later events of the key wait for an operator.
    Block,
    /// Later events of the key go on.
    Skip,
}

/// Where a new subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Everything the log still has.
    Beginning,
    /// Only what is committed after the subscription was made.
    Now,
    /// The events above this position.
    Position(Position),
    /// The events inserted at or after this time.
    Time(Timestamp),
}
