use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::{Error, ErrorKind, Result};
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::KafkaConfig;
use super::producer::Slot;
use crate::Secret;

/// How much earlier than the sink librdkafka gives a record up.
///
/// It looks for expired records about once a second. With this margin its report arrives before the sink's own limit passes, so
/// that a record is never sent after it was answered for.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(2);

/// How long a topic that the brokers do not know may take to appear, as one that they create by themselves does.
const TOPIC_WAIT_MAX: Duration = Duration::from_secs(10);

/// The largest record that is handed to the brokers: far more than an event can be, so that their limit is the one that counts.
const RECORD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The most that waits in librdkafka, in KiB; a batch waits for room.
const QUEUE_KIB_MAX: usize = 64 * 1024;

/// What is set unless the user says otherwise.
///
/// A batch is handed over at once and its last report awaited, so that waiting for company only makes it slower: not at all instead of
/// librdkafka's 5 ms. What is handed over while a request is under way goes together with the next: one request at a time to a broker
/// is enough then, and none can be taken before an earlier one that failed.
const DEFAULTS: [(&str, &str); 5] = [
    ("client.id", "pillarbox"),
    ("queue.buffering.max.ms", "0"),
    ("max.in.flight.requests.per.connection", "1"),
    ("partitioner", "murmur2_random"),
    ("reconnect.backoff.max.ms", "2000"),
];

/// Other names that librdkafka has for a property.
const ALIASES: [(&str, &str); 8] = [
    ("acks", "request.required.acks"),
    ("bootstrap.servers", "metadata.broker.list"),
    ("compression.type", "compression.codec"),
    ("delivery.timeout.ms", "message.timeout.ms"),
    ("linger.ms", "queue.buffering.max.ms"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("retries", "message.send.max.retries"),
    ("sasl.mechanism", "sasl.mechanisms"),
];

/// Properties whose values are no secrets, which may be shown when a mistake is looked for. Every other value is hidden where the
/// configuration is printed, and in what librdkafka says if it is no number and no flag.
const HARMLESS: [&str; 22] = [
    "acks",
    "api.version.request",
    "batch.num.messages",
    "batch.size",
    "broker.address.family",
    "broker.version.fallback",
    "client.id",
    "compression.codec",
    "compression.level",
    "compression.type",
    "debug",
    "enable.ssl.certificate.verification",
    "linger.ms",
    "message.max.bytes",
    "partitioner",
    "sasl.mechanism",
    "sasl.mechanisms",
    "security.protocol",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
];

/// Properties that carry a promise of the sink.
const GUARDED: [(&str, Allowed, &str); 12] = [
    ("metadata.broker.list", Allowed::Never, "the brokers stand in `brokers`"),
    (
        "message.timeout.ms",
        Allowed::Never,
        "it follows from `timeout`, so that no record is sent after it was given up",
    ),
    ("transactional.id", Allowed::Never, "a producer with transactions delivers nothing until one is committed"),
    ("test.mock.num.brokers", Allowed::Never, "records would go to brokers that are not there"),
    ("enable.idempotence", Allowed::One(&["true"]), "without it a retry reorders and repeats records"),
    (
        "request.required.acks",
        Allowed::One(&["all", "-1"]),
        "with fewer acknowledgements a delivered record can be lost",
    ),
    ("message.send.max.retries", Allowed::From(1), "without retries each change of a partition's leader is a failure"),
    ("max.in.flight.requests.per.connection", Allowed::To(5), "brokers keep the order of at most five"),
    ("delivery.report.only.error", Allowed::One(&["false"]), "the sink would never learn that a record was delivered"),
    ("enable.gapless.guarantee", Allowed::One(&["false"]), "each record that is refused would stop the producer"),
    (
        "partitioner",
        Allowed::One(&["consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random"]),
        "the events of a key must stay in one partition",
    ),
    ("queuing.strategy", Allowed::One(&["fifo"]), "newer records would overtake older ones"),
];

#[derive(Clone, Copy)]
enum Allowed {
    Never,
    One(&'static [&'static str]),
    From(u32),
    To(u32),
}

/// All that makes a producer.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) client: ClientConfig,
    pub(super) secrets: Arc<[Secret]>,
}

impl Settings {
    /// The same with one record a request.
    pub(super) fn alone(&self) -> Self {
        let mut alone = self.clone();
        alone.client.set("batch.num.messages", "1");
        alone
    }

    /// The same for a client that can be made and connects to nothing.
    pub(super) fn without_brokers(&self) -> Self {
        let mut without = self.clone();
        without.client.remove("metadata.broker.list");
        // That there are no brokers is worth a warning otherwise.
        without.client.set_log_level(RDKafkaLogLevel::Critical);
        without
    }

    /// What librdkafka says against the properties, without a secret.
    pub(super) fn describe(&self, error: &KafkaError) -> String {
        let text = match error {
            KafkaError::ClientConfig(_, text, name, value) => {
                let text = text.replace(&format!("\"{value}\""), "\"***\"");
                let text = text.strip_suffix(value.as_str()).map_or(text.clone(), |text| format!("{text}***"));
                format!("property '{name}': {text}")
            }
            KafkaError::ClientCreation(text) => text.clone(),
            KafkaError::Nul(_) => "a property has a zero byte".to_owned(),
            other => other.to_string(),
        };
        format!("the kafka sink cannot be made: {}", redact(&self.secrets, &text))
    }
}

fn is_secret(name: &str, value: &str) -> bool {
    let named = ["password", "secret", "token", ".key", "pem", "jaas"].iter().any(|word| name.contains(word));
    let plain = value.parse::<i64>().is_ok() || value.parse::<bool>().is_ok();
    !HARMLESS.contains(&name) && (named || !plain)
}

/// The text without any of the secrets.
pub(super) fn redact(secrets: &[Secret], text: &str) -> String {
    secrets.iter().fold(text.to_owned(), |text, secret| secret.redact(&text))
}

/// What librdkafka is told; refuses what would break a promise.
pub(super) fn settings(config: &KafkaConfig) -> Result<Settings> {
    check_brokers(&config.brokers)?;
    let given = given(&config.properties)?;
    let mut client = ClientConfig::new();
    client.set_log_level(if given.contains_key("debug") { RDKafkaLogLevel::Debug } else { RDKafkaLogLevel::Info });
    for (name, value) in DEFAULTS {
        client.set(name, value);
    }
    let record_wait = config.timeout.saturating_sub(TIMEOUT_MARGIN);
    let topic_wait = (record_wait / 2).min(TOPIC_WAIT_MAX);
    client.set("message.max.bytes", RECORD_BYTES_MAX.to_string());
    client.set("queue.buffering.max.kbytes", QUEUE_KIB_MAX.to_string());
    client.set("topic.metadata.propagation.max.ms", topic_wait.as_millis().to_string());
    for (first, (name, value)) in &given {
        // Under the name that the user knows; librdkafka would take both names, in no certain order.
        client.remove(first);
        client.set(*name, value.expose());
    }
    client.set("metadata.broker.list", config.brokers.as_str());
    client.set("enable.idempotence", "true");
    if !given.contains_key("request.required.acks") {
        client.set("request.required.acks", "all");
    }
    client.set("message.timeout.ms", record_wait.as_millis().to_string());
    let secrets = config.properties.iter().filter(|(name, value)| is_secret(name, value.expose()));
    let secrets = secrets.map(|(_, value)| value.clone());
    let mut secrets: Vec<Secret> = secrets.collect();
    // The longest first: one may be part of another.
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.expose().len()));
    Ok(Settings { client, secrets: secrets.into() })
}

/// What is wrong with each of the properties; nothing is connected to.
pub(super) fn faults(mut config: KafkaConfig) -> Vec<Error> {
    let mut faults = Vec::new();
    config.properties.retain(|name, value| match check(name, first_name(name), value) {
        Ok(()) => true,
        Err(error) => {
            faults.push(error);
            false
        }
    });
    // librdkafka tells the first property that it refuses.
    loop {
        let settings = match settings(&config) {
            Ok(settings) => settings,
            Err(error) => break faults.push(error),
        };
        let Err(error) = Slot::new(settings.clone()).try_to_make() else { break };
        let refused = match &error {
            KafkaError::ClientConfig(_, _, name, _) => config.properties.remove(name),
            _ => None,
        };
        // What is said of one property has the secrets of no other.
        let secrets = refused.clone().map_or(settings.secrets.clone(), |secret| vec![secret].into());
        let settings = Settings { secrets, ..settings };
        faults.push(Error::new(ErrorKind::Invalid, settings.describe(&error)));
        if refused.is_none() {
            break;
        }
    }
    faults
}

/// Reads properties; those that are not known to be harmless are secrets.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<BTreeMap<String, Secret>, D::Error> {
    struct Properties;

    impl<'de> Visitor<'de> for Properties {
        type Value = BTreeMap<String, Secret>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
            let mut properties = BTreeMap::new();
            while let Some(name) = map.next_key::<String>()? {
                let value = match HARMLESS.contains(&name.as_str()) {
                    true => Secret::new(map.next_value::<String>()?),
                    false => map.next_value()?,
                };
                properties.insert(name, value);
            }
            Ok(properties)
        }
    }

    deserializer.deserialize_map(Properties)
}

/// The user's properties by their first names, each once, with the name that the user gave it.
fn given(properties: &BTreeMap<String, Secret>) -> Result<BTreeMap<&str, (&str, &Secret)>> {
    let mut given = BTreeMap::new();
    for (name, value) in properties {
        let first = first_name(name);
        check(name, first, value)?;
        if given.insert(first, (name.as_str(), value)).is_some() {
            let message = format!("the kafka sink's property '{name}' is there twice, once as '{first}'; keep one");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
    }
    Ok(given)
}

fn first_name(name: &str) -> &str {
    let resolve = |name: &str| ALIASES.iter().find(|(alias, _)| *alias == name).map(|(_, first)| *first);
    // librdkafka takes properties of topics with this prefix, too.
    let plain = name
        .strip_prefix("topic.")
        .filter(|plain| resolve(plain).is_some() || GUARDED.iter().any(|(guarded, ..)| guarded == plain));
    let name = plain.unwrap_or(name);
    resolve(name).unwrap_or(name)
}

fn check(name: &str, first: &str, value: &Secret) -> Result<()> {
    let Some((_, allowed, why)) = GUARDED.iter().find(|(guarded, ..)| *guarded == first) else { return Ok(()) };
    let number = value.expose().trim().parse::<u32>().ok();
    let (fits, rule) = match allowed {
        Allowed::Never => (false, "cannot be set".to_owned()),
        Allowed::One(values) => (values.contains(&value.expose()), format!("must be {}", values.join(" or "))),
        Allowed::From(min) => (number.is_some_and(|number| number >= *min), format!("must be at least {min}")),
        Allowed::To(max) => (number.is_some_and(|number| (1..=*max).contains(&number)), format!("must be 1 to {max}")),
    };
    if fits {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Invalid, format!("the kafka sink's property '{name}' {rule}: {why}")))
}

/// librdkafka would only log what it cannot read, and then wait for ever.
pub(super) fn check_brokers(brokers: &str) -> Result<()> {
    for broker in brokers.split(',') {
        let address = broker.trim();
        let address = address.split_once("://").map_or(address, |(_, address)| address);
        let (host, port) = match address.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse::<u16>().ok()),
            _ => (address, Some(0)),
        };
        if host.is_empty() || port.is_none() || address.contains(char::is_whitespace) {
            let message = format!("'{brokers}' names no brokers: write `host:port`, several with commas between");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(properties: &[(&str, &str)]) -> KafkaConfig {
        let mut config = KafkaConfig::new("localhost:9092", "orders".parse().unwrap());
        config.properties = properties.iter().map(|(name, value)| ((*name).to_owned(), Secret::new(*value))).collect();
        config
    }

    fn refused(name: &str, value: &str, why: &str) {
        let error = settings(&config(&[(name, value)])).map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("'{name}'")) && error.contains(why), "{name}: {error}");
    }

    #[test]
    fn what_would_break_a_promise_is_refused_with_the_reason() {
        refused("enable.idempotence", "false", "reorders");
        refused("acks", "1", "all or -1");
        refused("request.required.acks", "0", "can be lost");
        refused("topic.acks", "1", "can be lost");
        refused("topic.request.required.acks", "1", "can be lost");
        refused("retries", "0", "at least 1");
        refused("message.send.max.retries", "0", "leader");
        refused("max.in.flight", "6", "1 to 5");
        refused("max.in.flight.requests.per.connection", "many", "at most five");
        refused("transactional.id", "x", "cannot be set");
        refused("message.timeout.ms", "1", "`timeout`");
        refused("delivery.timeout.ms", "1", "`timeout`");
        refused("bootstrap.servers", "x:1", "`brokers`");
        refused("delivery.report.only.error", "true", "delivered");
        refused("enable.gapless.guarantee", "true", "refused");
        refused("queuing.strategy", "lifo", "overtake");
        refused("partitioner", "random", "one partition");
        refused("test.mock.num.brokers", "1", "not there");
    }

    #[test]
    fn what_keeps_the_promises_is_taken_over_the_defaults() {
        let settings = settings(&config(&[
            ("acks", "-1"),
            ("retries", "7"),
            ("max.in.flight", "5"),
            ("linger.ms", "20"),
            ("topic.metadata.refresh.interval.ms", "1000"),
        ]))
        .unwrap();
        let get = |name| settings.client.get(name);
        assert_eq!((get("acks"), get("request.required.acks")), (Some("-1"), None));
        assert_eq!((get("linger.ms"), get("queue.buffering.max.ms")), (Some("20"), None), "one of two names");
        assert_eq!(get("topic.metadata.refresh.interval.ms"), Some("1000"));
        assert_eq!(get("message.timeout.ms"), Some("28000"));
        assert_eq!(get("batch.num.messages"), None);
        assert_eq!(settings.alone().client.get("batch.num.messages"), Some("1"));
    }

    #[test]
    fn a_property_under_both_its_names_is_refused() {
        let error = settings(&config(&[("linger.ms", "1"), ("queue.buffering.max.ms", "2")])).map(drop).unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }

    #[test]
    fn brokers_that_cannot_be_read_are_refused() {
        for brokers in
            ["h:9092", "h", "a:1,b:2", "a:1, b:2", "SASL_SSL://h:9092", "[::1]:9092", "[::1]", "10.0.0.1:9092"]
        {
            assert!(check_brokers(brokers).is_ok(), "{brokers}");
        }
        for brokers in ["", "a:1,", ":9092", "h:port", "h:99999", "a b"] {
            assert!(check_brokers(brokers).is_err(), "{brokers}");
        }
    }

    #[test]
    fn what_may_be_a_secret_is_taken_for_one() {
        let config = config(&[
            ("sasl.password", "canary"),
            ("ssl.key.pem", "canary-key"),
            ("ssl.key.password", "12345678"),
            ("ssl.ca.location", "/ca"),
            ("linger.ms", "5"),
            ("socket.keepalive.enable", "true"),
        ]);
        let settings = settings(&config).unwrap();
        assert_eq!(redact(&settings.secrets, "/ca canary-key canary 12345678 5 true"), "/ca *** *** *** 5 true");
    }
}
