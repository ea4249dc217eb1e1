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
    /// Instances compete for rows of the delivery table.
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
