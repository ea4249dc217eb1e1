use super::problem::nearest;

/// A kind of sink: a new one is a row in [`KINDS`] and a function in `sink.rs`.
#[derive(Debug)]
pub(crate) struct SinkKind {
    /// As it is written in the config.
    pub(crate) name: &'static str,
    /// All its keys, in the order in which they are told.
    pub(super) keys: &'static [Key],
    home: Home,
}

/// Where a kind can be found.
#[derive(Debug)]
enum Home {
    /// In every build.
    Always,
    /// In builds with this feature.
    Feature { name: &'static str, built: bool },
    /// In a later version.
    Later,
}

/// One key of a sink.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) shape: Shape,
    /// The key has to be there; this is how it could look.
    pub(super) example: Option<&'static str>,
    /// What may stand there where another key needs it. Of a key that cannot be read it is believed, so that the other one is not
    /// blamed.
    pub(super) helpful: Option<&'static str>,
    shown: Shown,
}

/// What a key holds.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    Text,
    Texts,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A whole number from 1 to this one.
    Count(i64),
    Duration,
    Flag,
    /// Strings with names of the user's choice.
    Map,
    /// The sinks of a chain.
    Sinks,
}

/// How much of a key is shown.
#[derive(Debug, Clone, Copy)]
enum Shown {
    /// All but the passwords in URLs.
    Masked,
    /// Nothing.
    Never,
    /// Of a table, the values of these names.
    Only(&'static [&'static str]),
}

impl Key {
    /// Whether all of it is a secret.
    pub(super) fn is_hidden(&self) -> bool {
        matches!(self.shown, Shown::Never)
    }

    /// Whether the value of this name in its table is a secret.
    pub(super) fn hides(&self, name: &str) -> bool {
        match self.shown {
            Shown::Masked => false,
            Shown::Never => true,
            Shown::Only(names) => !names.contains(&name),
        }
    }
}

const fn key(name: &'static str, shape: Shape) -> Key {
    Key { name, shape, example: None, helpful: None, shown: Shown::Masked }
}

const fn required(name: &'static str, example: &'static str) -> Key {
    Key { example: Some(example), ..key(name, Shape::Text) }
}

const fn secret(name: &'static str, shape: Shape) -> Key {
    Key { shown: Shown::Never, ..key(name, shape) }
}

/// The CloudEvents source; none given: `urn:pillarbox:<log_id>`.
const SOURCE: Key = key("source", Shape::Text);
const TIMEOUT: Key = key("timeout", Shape::Duration);
const CA_FILE: Key = key("ca_file", Shape::Text);

/// The most requests of one batch that are under way at once.
const CONCURRENCY_MAX: i64 = 1_024;
/// The most that is read of an answer, in bytes.
const RESPONSE_BYTES_MAX: i64 = 16 * 1024 * 1024;
/// The longest stream that can be asked for, in entries.
const MAXLEN_MAX: i64 = 1_000_000_000_000;

/// The properties of librdkafka that are no secret, so that somebody who looks for a mistake can see them.
const HARMLESS_PROPERTIES: [&str; 16] = [
    "acks",
    "api.version.request",
    "batch.num.messages",
    "batch.size",
    "broker.version.fallback",
    "client.id",
    "compression.codec",
    "compression.level",
    "compression.type",
    "enable.ssl.certificate.verification",
    "linger.ms",
    "message.max.bytes",
    "sasl.mechanism",
    "sasl.mechanisms",
    "security.protocol",
    "ssl.endpoint.identification.algorithm",
];

const HTTP: &[Key] = &[
    required("url", "https://example.com/events"),
    secret("secret", Shape::Text),
    secret("secrets", Shape::Texts),
    secret("headers", Shape::Map),
    key("mode", Shape::Word(&["structured", "binary", "batched"])),
    TIMEOUT,
    key("connect_timeout", Shape::Duration),
    key("concurrency", Shape::Count(CONCURRENCY_MAX)),
    key("response_bytes_max", Shape::Count(RESPONSE_BYTES_MAX)),
    key("block_private_addresses", Shape::Flag),
    CA_FILE,
    SOURCE,
];

const KAFKA: &[Key] = &[
    required("brokers", "localhost:9092"),
    required("topic", "{topic}"),
    TIMEOUT,
    Key { shown: Shown::Only(&HARMLESS_PROPERTIES), ..key("properties", Shape::Map) },
    SOURCE,
];

const REDIS_PUBSUB: [Key; 9] = redis(required("channel", "{topic}"), key("require_receivers", Shape::Flag));

const REDIS_STREAM: [Key; 9] = redis(required("stream", "{topic}"), key("maxlen", Shape::Count(MAXLEN_MAX)));

/// The keys of a kind that delivers to Redis.
const fn redis(destination: Key, option: Key) -> [Key; 9] {
    [
        // Certificates are for TLS alone, sentinels watch a master by name.
        Key { helpful: Some("rediss://localhost"), ..required("url", "redis://localhost") },
        destination,
        option,
        Key { helpful: Some("localhost:26379"), ..key("sentinels", Shape::Texts) },
        Key { helpful: Some("master"), ..key("master", Shape::Text) },
        secret("sentinel_password", Shape::Text),
        CA_FILE,
        TIMEOUT,
        SOURCE,
    ]
}

const POSTGRES: &[Key] = &[
    required("url", "postgres://localhost/app"),
    required("table", "event_store"),
    key("create", Shape::Flag),
    TIMEOUT,
    SOURCE,
];

/// All kinds of the contract, whether or not this build has them.
static KINDS: [SinkKind; 12] = [
    SinkKind { name: "stdout", keys: &[SOURCE], home: Home::Always },
    SinkKind {
        name: "file",
        keys: &[required("path", "out.ndjson"), key("fsync", Shape::Flag), SOURCE],
        home: Home::Always,
    },
    SinkKind { name: "http", keys: HTTP, home: Home::Feature { name: "http", built: cfg!(feature = "http") } },
    SinkKind { name: "kafka", keys: KAFKA, home: Home::Feature { name: "kafka", built: cfg!(feature = "kafka") } },
    SinkKind {
        name: "redis_pubsub",
        keys: &REDIS_PUBSUB,
        home: Home::Feature { name: "redis", built: cfg!(feature = "redis") },
    },
    SinkKind {
        name: "redis_stream",
        keys: &REDIS_STREAM,
        home: Home::Feature { name: "redis", built: cfg!(feature = "redis") },
    },
    SinkKind {
        name: "postgres",
        keys: POSTGRES,
        home: Home::Feature { name: "postgres", built: cfg!(feature = "postgres") },
    },
    SinkKind {
        name: "nats",
        keys: &[required("url", "nats://localhost"), required("subject", "{topic}"), SOURCE],
        home: Home::Later,
    },
    SinkKind {
        name: "rabbitmq",
        keys: &[
            required("url", "amqp://localhost"),
            required("exchange", "events"),
            required("routing_key", "{topic}"),
            SOURCE,
        ],
        home: Home::Later,
    },
    SinkKind {
        name: "sqs",
        keys: &[required("queue_url", "https://sqs.eu-west-1.amazonaws.com/1/events"), SOURCE],
        home: Home::Later,
    },
    SinkKind { name: "websocket", keys: &[required("room", "{topic}"), SOURCE], home: Home::Later },
    SinkKind {
        name: "chain",
        keys: &[Key { example: Some("[{ kind = \"…\" }, …]"), ..key("sinks", Shape::Sinks) }],
        home: Home::Always,
    },
];

impl SinkKind {
    /// The kind of this name; else what to say.
    pub(super) fn named(name: &str) -> Result<&'static SinkKind, String> {
        KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
            let near = nearest(name, KINDS.iter().map(|kind| kind.name));
            let hint = near.map(|near| format!("; did you mean \"{near}\"?")).unwrap_or_default();
            format!("there is no sink kind '{name}'{hint}")
        })
    }

    /// The names of all kinds, with commas between.
    pub(super) fn names() -> String {
        names(|_| true)
    }

    /// The sink of a relay without a config.
    pub(super) fn stdout() -> &'static SinkKind {
        &KINDS[0]
    }

    /// Whether it consists of other sinks.
    pub(super) fn is_chain(&self) -> bool {
        self.keys.iter().any(|key| matches!(key.shape, Shape::Sinks))
    }

    /// Whether this build has it.
    pub(super) fn is_built(&self) -> bool {
        match self.home {
            Home::Always => true,
            Home::Feature { built, .. } => built,
            Home::Later => false,
        }
    }

    /// Why this build does not have it, and what to do.
    pub(crate) fn absence(&self) -> String {
        let name = self.name;
        match self.home {
            Home::Feature { name: feature, .. } => format!(
                "sink kind '{name}' is not in this build, which was made without the feature `{feature}`: \
                 cargo build --release --features {feature}"
            ),
            Home::Always | Home::Later => {
                let built = names(SinkKind::is_built);
                format!(
                    "sink kind '{name}' is not in this version of pillarbox; a later one will have it. This build has {built}"
                )
            }
        }
    }
}

fn names(wanted: impl Fn(&SinkKind) -> bool) -> String {
    let names: Vec<&str> = KINDS.iter().filter(|kind| wanted(kind)).map(|kind| kind.name).collect();
    names.join(", ")
}
