use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::{Batch, BoxFuture, CloudEvents, Outcome, Sink, SinkFeatures};
use pillarbox::{Error, ErrorKind, Failure, Result};
use serde::Deserialize;
use tokio::time::Instant;

use crate::config::{ConfigFault, DeliveryTime, SinkConfig};
use crate::{Secret, Template, duration};

mod failure;
mod producer;
mod properties;
mod record;

use failure::{Place, Verdict};
use producer::{Abandon, Producer, Slot};

/// How [`KafkaSink`] writes, and what a user writes for it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaConfig {
    /// The brokers to begin with, `host:port` with commas between.
    pub brokers: String,
    /// The topic.
    pub topic: Template,
    /// How long a batch may take until its acknowledgements, at least [`KAFKA_TIMEOUT_MIN`]. Default: 30 s.
    #[serde(default = "default_timeout", with = "duration::positive")]
    pub timeout: Duration,
    /// Further properties of librdkafka, for example `security.protocol`. Those that would break a promise are refused.
    #[serde(default, deserialize_with = "properties::deserialize")]
    pub properties: BTreeMap<String, Secret>,
}

/// The shortest [`KafkaConfig::timeout`].
pub const KAFKA_TIMEOUT_MIN: Duration = Duration::from_secs(3);

/// The longest [`KafkaConfig::timeout`].
pub const KAFKA_TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// The longest name of a topic, in bytes.
pub const KAFKA_TOPIC_BYTES_MAX: usize = 249;

const TIMEOUT: Duration = Duration::from_secs(30);

fn default_timeout() -> Duration {
    TIMEOUT
}

/// How often a batch is sent again because another one, given up, took the producer with it.
const SENDS_MAX: usize = 3;

/// How long `check` waits for the brokers.
const CHECK_WAIT_MAX: Duration = Duration::from_secs(5);

impl KafkaConfig {
    /// All defaults.
    pub fn new(brokers: impl Into<String>, topic: Template) -> Self {
        KafkaConfig { brokers: brokers.into(), topic, timeout: TIMEOUT, properties: BTreeMap::new() }
    }
}

impl SinkConfig for KafkaConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("brokers", "localhost:9092"), ("topic", "{topic}")]
    }

    fn faults(&self) -> Vec<ConfigFault> {
        let mut faults = Vec::new();
        let keys = [
            ("timeout", check_timeout(self.timeout)),
            ("topic", check_constant_topic(&self.topic)),
            ("brokers", properties::check_brokers(&self.brokers)),
        ];
        faults.extend(keys.into_iter().filter_map(|(key, check)| Some(ConfigFault::new(key, check.err()?))));
        // librdkafka is asked about the properties alone.
        let sound = KafkaConfig { brokers: "localhost".to_owned(), timeout: TIMEOUT, ..self.clone() };
        let properties = properties::faults(sound).into_iter();
        faults.extend(properties.map(|error| ConfigFault::new("properties", error)));
        faults
    }

    fn delivery_time(&self, _batch_size: usize) -> Option<DeliveryTime> {
        let why = format!("kafka waits timeout = \"{}\" for its acknowledgements", duration::format(self.timeout));
        Some(DeliveryTime { max: self.timeout, why })
    }

    fn build(&self, source: String) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(KafkaSink::new(self.clone(), source)?))
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn check_timeout(timeout: Duration) -> Result<()> {
    if (KAFKA_TIMEOUT_MIN..=KAFKA_TIMEOUT_MAX).contains(&timeout) {
        return Ok(());
    }
    let (min, max) = (KAFKA_TIMEOUT_MIN.as_secs(), KAFKA_TIMEOUT_MAX.as_secs());
    Err(invalid(format!("the kafka sink's timeout is {} ms; it must be {min} to {max} s", timeout.as_millis())))
}

/// A constant template needs no event to be rendered; its text may have doubled braces, which no topic can have.
fn check_constant_topic(topic: &Template) -> Result<()> {
    if !topic.is_constant() {
        return Ok(());
    }
    check_topic(topic.as_str()).map_err(|why| invalid(format!("'{}' is no topic: {why}", topic.as_str())))
}

/// Writes each event as one record, as the Kafka binding of CloudEvents says it in binary mode.
///
/// - The record's key is the event's key, its value the payload; without a payload it is a tombstone. The attributes are headers
///   `ce_…`, beside `content-type`, `traceparent`, `tracestate`, `pillarbox-subscription` and `pillarbox-attempt`.
/// - The producer is idempotent and asks for the acknowledgement of all in-sync replicas; `Delivered` means that it came.
/// - One event of a key is under way at a time: librdkafka may fail one record and still send the next. A batch holds one
///   record each of many keys, and they are all sent at once.
/// - A batch that is given up takes back what was not sent yet, so that an old record does not appear behind newer ones.
pub struct KafkaSink {
    brokers: String,
    topic: Template,
    timeout: Duration,
    format: CloudEvents,
    /// Sends many records in one request.
    together: Slot,
    /// Sends each record in a request of its own.
    alone: Slot,
}

impl KafkaSink {
    /// A sink for events of this `source`, a URI like `urn:pillarbox:<log_id>`. Checks the config and connects to nothing yet.
    pub fn new(config: KafkaConfig, source: impl Into<String>) -> Result<Self> {
        check_timeout(config.timeout)?;
        check_constant_topic(&config.topic)?;
        let together = properties::settings(&config)?;
        let alone = together.alone();
        let sink = KafkaSink {
            brokers: config.brokers,
            topic: config.topic,
            timeout: config.timeout,
            format: CloudEvents::new(source),
            together: Slot::new(together),
            alone: Slot::new(alone),
        };
        sink.together.check().map_err(invalid)?;
        Ok(sink)
    }

    async fn send(&self, batch: &Batch) -> Vec<Outcome> {
        let deadline = Instant::now() + self.timeout;
        let mut outcomes = vec![Outcome::NotTried; batch.events.len()];
        let mut open = self.addressed(batch, &mut outcomes);
        let mut refused = Vec::new();
        for _ in 0..SENDS_MAX {
            let verdicts = self.round(&self.together, batch, &open, deadline).await;
            let mut again = Vec::new();
            for (target, verdict) in open.into_iter().zip(verdicts) {
                match verdict {
                    Verdict::Over(outcome) => outcomes[target.index] = outcome,
                    Verdict::Purged => again.push(target),
                    Verdict::Refused(_) => refused.push(target),
                }
            }
            open = again;
            if open.is_empty() {
                break;
            }
        }
        // Brokers refuse requests, not records: one record too many, or one that is wrong, fails all that were sent with it.
        // Sent alone, each gets an answer of its own.
        let verdicts = self.round(&self.alone, batch, &refused, deadline).await;
        for (target, verdict) in refused.into_iter().zip(verdicts) {
            match verdict {
                Verdict::Over(outcome) => outcomes[target.index] = outcome,
                Verdict::Refused(failure) => outcomes[target.index] = Outcome::Failed(failure),
                Verdict::Purged => {}
            }
        }
        outcomes
    }

    /// The events with their topics; the outcomes of those that can have none are set.
    fn addressed<'a>(&'a self, batch: &'a Batch, outcomes: &mut [Outcome]) -> Vec<Target<'a>> {
        let mut targets = Vec::with_capacity(batch.events.len());
        for (index, attempt) in batch.events.iter().enumerate() {
            let topic = self.topic.render(&attempt.event).and_then(|topic| match check_topic(&topic) {
                Ok(()) => Ok(topic),
                Err(why) => Err(failure::no_topic(&self.topic, why)),
            });
            match topic {
                Ok(topic) => targets.push(Target { index, topic }),
                Err(failure) => outcomes[index] = Outcome::Failed(failure),
            }
        }
        targets
    }

    /// Sends all targets and waits for their reports.
    async fn round(&self, slot: &Slot, batch: &Batch, targets: &[Target<'_>], deadline: Instant) -> Vec<Verdict> {
        if targets.is_empty() {
            return Vec::new();
        }
        let producer = match slot.producer() {
            Ok(producer) => producer,
            Err(failure) => return vec![Verdict::Over(Outcome::Failed(failure)); targets.len()],
        };
        let abandon = Abandon::new(slot, &producer);
        let mut sent = Vec::with_capacity(targets.len());
        for target in targets {
            let attempt = &batch.events[target.index];
            let headers = record::headers(&self.format, &batch.subscription, attempt);
            sent.push(producer.send(&target.topic, &attempt.event, headers, deadline).await);
        }
        let mut verdicts = Vec::with_capacity(targets.len());
        let mut missing = false;
        for (target, sent) in targets.iter().zip(sent) {
            let place = |local| self.place(&producer, batch, target, local);
            verdicts.push(match sent {
                Err(code) => failure::verdict(code, &place(true)),
                Ok(report) => match tokio::time::timeout_at(deadline, report).await {
                    Ok(Ok(Ok(()))) => Verdict::Over(Outcome::Delivered),
                    Ok(Ok(Err(code))) => failure::verdict(code, &place(false)),
                    // The record may still be on its way: the producer is taken out of service.
                    Ok(Err(_)) | Err(_) => {
                        missing = true;
                        Verdict::Over(Outcome::Failed(failure::no_report(&place(false))))
                    }
                },
            });
        }
        if !missing {
            abandon.all_reported();
        }
        verdicts
    }

    fn place<'a>(&self, producer: &Producer, batch: &Batch, target: &'a Target<'_>, local: bool) -> Place<'a> {
        Place {
            topic: &target.topic,
            is_only_topic: self.topic.is_constant(),
            bytes: batch.events[target.index].event.payload.len(),
            local,
            trouble: producer.trouble(),
            fatal: producer.fatal(),
        }
    }
}

impl Sink for KafkaSink {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move { self.send(&batch).await })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let producers = [self.together.close(), self.alone.close()];
            let wait = self.timeout;
            // To flush and to end a client blocks; both are bounded.
            let ended = tokio::task::spawn_blocking(move || {
                producers.into_iter().flatten().for_each(|producer| Producer::end(producer, wait));
            });
            if let Err(error) = ended.await {
                tracing::warn!(%error, "the kafka producer was not closed cleanly");
            }
        })
    }

    /// Asks the brokers for the topic, or for the cluster if the topic depends on the event. Where brokers create topics by
    /// themselves they do it here, as the first event would make them.
    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async {
            let producer = self.together.producer()?;
            let topic = self.topic.is_constant().then(|| self.topic.as_str().to_owned());
            let wait = self.timeout.min(CHECK_WAIT_MAX);
            let looked = tokio::task::spawn_blocking(move || producer.look(topic.as_deref(), wait)).await;
            looked.unwrap_or_else(|ended| {
                Err(Failure::unclear("panic", format!("the check ended without an answer: {ended}")))
            })
        })
    }
}

impl fmt::Debug for KafkaSink {
    /// Without the properties, which hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSink")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic.as_str())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// One event of a batch and where it goes.
struct Target<'a> {
    index: usize,
    topic: Cow<'a, str>,
}

/// What brokers ask of a topic's name; known here, so that a wrong one is refused without a round trip.
fn check_topic(name: &str) -> std::result::Result<(), &'static str> {
    if name.is_empty() || name.len() > KAFKA_TOPIC_BYTES_MAX {
        return Err("it must have 1 to kafka_topic_bytes_max = 249 characters");
    }
    if name == "." || name == ".." {
        return Err("'.' and '..' are not allowed");
    }
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if !name.bytes().all(fits) {
        return Err("only ASCII letters, digits, '.', '_' and '-' are allowed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_topics_are_checked_as_brokers_do() {
        let longest = "x".repeat(KAFKA_TOPIC_BYTES_MAX);
        for name in ["orders", "a.b_c-D9", "...", &longest] {
            assert_eq!(check_topic(name), Ok(()), "{name}");
        }
        for name in ["", ".", "..", "a b", "a/b", "ö", "a\0", &format!("{longest}x")] {
            assert!(check_topic(name).is_err(), "{name}");
        }
    }
}
