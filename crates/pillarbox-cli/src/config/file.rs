use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use pillarbox::config::RecoveryProfile;
use pillarbox::limit::LANES_MAX;
use pillarbox::{Mode, OnDead, RetryPolicy, Start, Subscription};
use pillarbox_sinks::config::{count, maybe_count, parsed};
use pillarbox_sinks::{Secret, duration};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::problem::Problems;
use super::reading::not_one_of;
use super::section::Section;
use super::sink::SinkSettings;
use super::tree::Node;
use crate::database::Database;
use crate::exit::chain;
use crate::secret::masked_database;

/// The most that any limit of the relay can be set to.
const LIMIT_MAX: u64 = 100_000_000;
/// The most workers of one subscription.
const WORKERS_MAX: u64 = 1_024;
/// The most events that are handed to a sink at once.
const BATCH_SIZE_MAX: u64 = 10_000;
/// The lanes of a subscription that does not say.
const LANES: u32 = 8;
/// The most attempts before an event is dead.
const ATTEMPTS_MAX: u64 = 1_000_000;
/// What the names of subscriptions begin with that end with their process.
pub(crate) const EPHEMERAL_PREFIX: &str = "ephemeral.";
/// The time that a delivery may take unless the user says otherwise.
const PROCESSING_TIMEOUT: Duration = Duration::from_secs(300);
/// The shortest time that a delivery may take, or that the process which works on it may be silent for.
const PROCESSING_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// The most connections of the listener.
const HTTP_CONNECTIONS_MAX: u64 = 65_536;
/// The shortest time between two looks at the claims of all queues.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// What the user wrote, with the defaults filled in. What the engine gets of it is in `engine`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Config {
    /// Where the log is.
    #[serde(serialize_with = "masked_url", skip_serializing_if = "Option::is_none")]
    pub(crate) database: Option<Secret>,
    pub(crate) relay: Relay,
    pub(crate) recovery: Recovery,
    pub(crate) http: Http,
    pub(crate) retention: Retention,
    pub(crate) dedup: Dedup,
    #[serde(rename = "subscription", skip_serializing_if = "Vec::is_empty")]
    pub(crate) subscriptions: Vec<SubscriptionSettings>,
}

/// How this relay works.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Relay {
    /// Concurrent batches per subscription. Default: 4.
    #[serde(deserialize_with = "count::<WORKERS_MAX, _>")]
    pub(crate) workers: usize,
    /// Events handed to a sink at once. Default: 100.
    #[serde(deserialize_with = "count::<BATCH_SIZE_MAX, _>")]
    pub(crate) batch_size: usize,
    /// The watchdog: the log is read at least this often. Default: 5 s.
    #[serde(with = "duration::positive")]
    pub(crate) poll_interval: Duration,
    /// Wake-ups are gathered for this long. Default: 0.
    #[serde(with = "duration")]
    pub(crate) debounce: Duration,
    /// An instance that has not beaten for this long is taken over. Default: 10 s.
    #[serde(with = "duration::positive")]
    pub(crate) lease_ttl: Duration,
    /// How long a clean stop may take. Default: 25 s.
    #[serde(with = "duration")]
    pub(crate) shutdown_grace: Duration,
    /// Events of a subscription that are read and not yet settled; what a crash can deliver twice. Default: 10,000.
    #[serde(deserialize_with = "count::<LIMIT_MAX, _>")]
    pub(crate) in_flight: usize,
    /// Failing keys of a subscription at which it stops. Default: 10,000.
    #[serde(deserialize_with = "count::<LIMIT_MAX, _>")]
    pub(crate) max_parked: usize,
    /// Deliveries of a subscription behind failing keys at which it stops. Default: 1,000,000.
    #[serde(deserialize_with = "count::<LIMIT_MAX, _>")]
    pub(crate) max_blocked: usize,
}

/// How what other processes were working on in queues is taken back.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Recovery {
    /// Default: true.
    pub(crate) enabled: bool,
    /// How soon. Default: fast.
    #[serde(serialize_with = "profile_in_words", deserialize_with = "read_profile")]
    pub(crate) profile: RecoveryProfile,
    /// How often claims are looked through for owners that give no sign of life. Default: 1 min.
    #[serde(with = "duration")]
    pub(crate) check_interval: Duration,
}

/// The listener.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Http {
    /// None: no listener. Default: 127.0.0.1:7070.
    #[serde(serialize_with = "or_off", deserialize_with = "read_listen")]
    pub(crate) listen: Option<SocketAddr>,
    /// Connections that are open at once; one more closes the oldest idle one. Default: 128.
    #[serde(deserialize_with = "count::<HTTP_CONNECTIONS_MAX, _>")]
    pub(crate) connections_max: usize,
    /// Who may use more than the health checks.
    pub(crate) tokens: Vec<Secret>,
}

/// What is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Retention {
    /// Events, after every subscription has passed; None: for ever. Default: 7 d.
    #[serde(with = "duration::or_forever")]
    pub(crate) keep: Option<Duration>,
    /// Dead deliveries; None (the default): for ever.
    #[serde(with = "duration::or_forever")]
    pub(crate) dead: Option<Duration>,
    /// What inboxes have accepted; None: for ever. Default: 30 d.
    #[serde(with = "duration::or_forever")]
    pub(crate) inbox: Option<Duration>,
    /// Whether the file says so: then it holds for the log, and not only for this relay.
    #[serde(skip)]
    pub(crate) keep_written: bool,
    /// The same for `dead`.
    #[serde(skip)]
    pub(crate) dead_written: bool,
    /// See `keep_written`.
    #[serde(skip)]
    pub(crate) inbox_written: bool,
}

/// Deduplication of what is published.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Dedup {
    /// Default: 24 h.
    #[serde(with = "duration")]
    pub(crate) window: Duration,
    /// The user wrote it, so that it replaces what the log was set to.
    #[serde(skip)]
    pub(crate) written: bool,
}

/// One subscription.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SubscriptionSettings {
    pub(crate) name: String,
    pub(crate) topics: Vec<String>,
    pub(crate) types: Vec<String>,
    pub(crate) mode: Mode,
    pub(crate) lanes: u32,
    pub(crate) on_dead: OnDead,
    #[serde(serialize_with = "start_in_words")]
    pub(crate) start: Start,
    #[serde(serialize_with = "duration::or_forever::serialize")]
    pub(crate) hold: Option<Duration>,
    #[serde(serialize_with = "duration::serialize")]
    pub(crate) processing_timeout: Duration,
    #[serde(serialize_with = "maybe_in_words", skip_serializing_if = "Option::is_none")]
    pub(crate) heartbeat_timeout: Option<Duration>,
    pub(crate) workers: usize,
    pub(crate) batch_size: usize,
    #[serde(serialize_with = "duration::serialize")]
    pub(crate) poll_interval: Duration,
    #[serde(serialize_with = "retry_in_words")]
    pub(crate) retry: RetryPolicy,
    pub(crate) sink: SinkSettings,
}

/// The file as it is written, apart from what inherits from other sections.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    database: Option<String>,
    relay: Relay,
    recovery: Recovery,
    http: Http,
    retention: Retention,
    dedup: Dedup,
    #[serde(rename = "subscription")]
    _subscription: IgnoredAny,
}

impl Config {
    /// Reads the whole file, and says all that is wrong with it.
    pub(super) fn read(root: &Node, problems: &Problems) -> Self {
        let section = Section::new("", root, problems);
        let Written { database, relay, recovery, http, mut retention, mut dedup, .. } =
            section.read().unwrap_or_default();
        if let Some(Err(error)) = database.as_deref().map(Database::parse) {
            section.problem_of("database", chain(&error));
        }
        recovery.check(&section);
        http.check_written(&section);
        let has = |table: &str, key: &str| root.get(table).is_some_and(|table| table.get(key).is_some());
        retention.keep_written = has("retention", "keep");
        retention.dead_written = has("retention", "dead");
        retention.inbox_written = has("retention", "inbox");
        dedup.written = has("dedup", "window");
        let mut names = HashSet::new();
        let read =
            |(path, node): (String, &Node)| SubscriptionSettings::read(&path, node, problems, &relay, &mut names);
        let subscriptions = section.tables("subscription").into_iter().filter_map(read).collect();
        Config { database: database.map(Secret::new), relay, recovery, http, retention, dedup, subscriptions }
    }
}

impl Default for Relay {
    fn default() -> Self {
        Relay {
            workers: 4,
            batch_size: 100,
            poll_interval: Duration::from_secs(5),
            debounce: Duration::ZERO,
            lease_ttl: Duration::from_secs(10),
            shutdown_grace: Duration::from_secs(25),
            in_flight: 10_000,
            max_parked: 10_000,
            max_blocked: 1_000_000,
        }
    }
}

/// The profiles by name.
const PROFILES: [(&str, RecoveryProfile); 2] =
    [("fast", RecoveryProfile::Fast), ("conservative", RecoveryProfile::Conservative)];

impl Default for Recovery {
    fn default() -> Self {
        Recovery { enabled: true, profile: RecoveryProfile::Fast, check_interval: Duration::from_secs(60) }
    }
}

impl Recovery {
    fn check(&self, root: &Section<'_>) {
        if self.check_interval < CHECK_INTERVAL_MIN {
            let (given, least) = (duration::format(self.check_interval), duration::format(CHECK_INTERVAL_MIN));
            root.problem_of(
                "recovery.check_interval",
                format!(
                    "\"{given}\" would look at the database all the time; write at least \"{least}\", or \
                 enabled = false to turn recovery off"
                ),
            );
        }
    }
}

fn read_profile<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RecoveryProfile, D::Error> {
    parsed(deserializer, |text| {
        let named = PROFILES.iter().find(|(name, _)| *name == text);
        named.map(|(_, profile)| *profile).ok_or_else(|| not_one_of(text, &PROFILES.map(|(name, _)| name)))
    })
}

impl Default for Http {
    fn default() -> Self {
        Http { listen: Some(Http::LISTEN), connections_max: 128, tokens: Vec::new() }
    }
}

fn read_listen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(deserializer, parse_listen)
}

impl Http {
    /// Where the listener is unless the user says otherwise.
    pub(crate) const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);

    fn check_written(&self, root: &Section<'_>) {
        if self.tokens.iter().any(|token| token.expose().is_empty()) {
            root.problem_of("http.tokens", "an empty token lets every client in; give it a value");
        }
        if let (Err(message), false) = (self.check(), root.is_unread("http.tokens")) {
            root.problem_of("http.listen", message);
        }
    }

    /// Refuses to be reached by others without a token.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.listen {
            Some(address) if !address.ip().is_loopback() && self.tokens.is_empty() => Err(format!(
                "listening on {address} lets other hosts in and needs tokens: add \
                 tokens = [{{ env = \"PILLARBOX_TOKEN\" }}] to [http], or listen on 127.0.0.1"
            )),
            _ => Ok(()),
        }
    }
}

/// An address to listen on, or `off`.
pub(crate) fn parse_listen(text: &str) -> Result<Option<SocketAddr>, String> {
    match text {
        "off" => Ok(None),
        _ => text
            .replace("localhost:", "127.0.0.1:")
            .parse()
            .map(Some)
            .map_err(|_| format!("'{text}' is not an address; write it like 127.0.0.1:7070, or \"off\"")),
    }
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for Retention {
    fn default() -> Self {
        Retention {
            keep: Some(7 * DAY),
            dead: None,
            inbox: Some(30 * DAY),
            keep_written: false,
            dead_written: false,
            inbox_written: false,
        }
    }
}

impl Default for Dedup {
    fn default() -> Self {
        Dedup { window: DAY, written: false }
    }
}

/// A subscription as it is written.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WrittenSubscription {
    name: Option<String>,
    topics: Vec<String>,
    types: Vec<String>,
    mode: Option<Mode>,
    #[serde(deserialize_with = "maybe_count::<{ LANES_MAX as u64 }, _>")]
    lanes: Option<usize>,
    on_dead: Option<OnDead>,
    #[serde(deserialize_with = "read_start")]
    start: Option<Start>,
    #[serde(with = "duration::or_forever")]
    hold: Option<Duration>,
    #[serde(with = "duration::maybe")]
    processing_timeout: Option<Duration>,
    #[serde(with = "duration::maybe")]
    heartbeat_timeout: Option<Duration>,
    #[serde(deserialize_with = "maybe_count::<WORKERS_MAX, _>")]
    workers: Option<usize>,
    #[serde(deserialize_with = "maybe_count::<BATCH_SIZE_MAX, _>")]
    batch_size: Option<usize>,
    #[serde(deserialize_with = "duration::positive::deserialize_some")]
    poll_interval: Option<Duration>,
    retry: WrittenRetry,
    #[serde(rename = "sink")]
    _sink: IgnoredAny,
}

/// A retry policy as it is written.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WrittenRetry {
    #[serde(deserialize_with = "maybe_count::<ATTEMPTS_MAX, _>")]
    max_attempts: Option<usize>,
    #[serde(with = "duration::maybe")]
    base: Option<Duration>,
    #[serde(with = "duration::maybe")]
    cap: Option<Duration>,
    jitter: Option<bool>,
    #[serde(with = "duration::maybe")]
    min_dead_age: Option<Duration>,
}

impl WrittenRetry {
    /// With the defaults; a config that limits the attempts and does not set the age means the attempts.
    fn policy(self) -> RetryPolicy {
        let default = RetryPolicy::sink();
        let default = if self.max_attempts.is_some() { default.attempts(default.max_attempts) } else { default };
        RetryPolicy {
            max_attempts: self.max_attempts.map_or(default.max_attempts, |count| count as u32),
            base: self.base.unwrap_or(default.base),
            cap: self.cap.unwrap_or(default.cap),
            jitter: self.jitter.unwrap_or(default.jitter),
            min_dead_age: self.min_dead_age.unwrap_or(default.min_dead_age),
        }
    }
}

fn read_start<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Start>, D::Error> {
    parsed(deserializer, parse_start).map(Some)
}

impl SubscriptionSettings {
    /// None: what is wrong was said. `names` are those of the subscriptions before this one.
    fn read(path: &str, node: &Node, problems: &Problems, relay: &Relay, names: &mut HashSet<String>) -> Option<Self> {
        // The name by which the others call it is read with a section of its own.
        let name = Section::new(path, node, &Problems::default()).value::<String>("name");
        let path = name.as_ref().map_or_else(|| path.to_owned(), |name| format!("subscription '{name}'"));
        let section = Section::new(&path, node, problems);
        let written: WrittenSubscription = section.read()?;
        check_name(&section, written.name.as_deref(), names);
        let subscription = SubscriptionSettings::with_defaults(written, &section, relay);
        let sink = read_sink(&path, node, &section, problems);
        subscription.check_times(&section);
        subscription.check_parts(&section);
        if let (Some(sink), true) = (&sink, subscription.has_sound_times(&section)) {
            subscription.check_delivery_time(sink, &section);
        }
        name?;
        Some(SubscriptionSettings { sink: sink?, ..subscription })
    }

    /// What was written, with the defaults and without its sink.
    fn with_defaults(written: WrittenSubscription, section: &Section<'_>, relay: &Relay) -> Self {
        // A mode that cannot be read is believed to be one that goes with the rest.
        let is_queue = section.is_unread("mode") && written.heartbeat_timeout.is_some();
        SubscriptionSettings {
            name: written.name.unwrap_or_default(),
            topics: written.topics,
            types: written.types,
            mode: written.mode.unwrap_or(if is_queue { Mode::Queue } else { Mode::Stream }),
            lanes: written.lanes.map_or(LANES, |count| count as u32),
            on_dead: written.on_dead.unwrap_or(OnDead::Block),
            start: written.start.unwrap_or(Start::Beginning),
            hold: written.hold,
            processing_timeout: written.processing_timeout.unwrap_or(PROCESSING_TIMEOUT),
            heartbeat_timeout: written.heartbeat_timeout,
            workers: written.workers.unwrap_or(relay.workers),
            batch_size: written.batch_size.unwrap_or(relay.batch_size),
            poll_interval: written.poll_interval.unwrap_or(relay.poll_interval),
            retry: written.retry.policy(),
            sink: SinkSettings::stdout(),
        }
    }

    /// Whether its times could be read and make sense by themselves, so that they can be compared with others.
    fn has_sound_times(&self, section: &Section<'_>) -> bool {
        let are_unread = section.is_unread("processing_timeout") || section.is_unread("heartbeat_timeout");
        let is_zero = self.heartbeat_timeout.is_some_and(|time| time.is_zero());
        !are_unread && !is_zero && self.processing_timeout >= PROCESSING_TIMEOUT_MIN
    }

    /// Says which times nothing could keep to.
    fn check_times(&self, section: &Section<'_>) {
        if self.processing_timeout < PROCESSING_TIMEOUT_MIN {
            let what = match self.mode {
                Mode::Stream => "every delivery would be cancelled before its receiver could answer",
                Mode::Queue => "processes that are well would be taken to have ended",
            };
            let (given, least) = (duration::format(self.processing_timeout), duration::format(PROCESSING_TIMEOUT_MIN));
            let message = format!("\"{given}\" is too short: {what}; write at least \"{least}\"");
            section.problem_of("processing_timeout", message);
        }
        if self.heartbeat_timeout.is_some_and(|time| time.is_zero()) {
            section.problem_of(
                "heartbeat_timeout",
                "0 would cancel every handler; write how long one may go without a sign of progress, like \"30s\", or \
                 leave it out",
            );
        }
        let is_read = !section.is_unread("retry.base") && !section.is_unread("retry.cap");
        if is_read && self.retry.cap < self.retry.base {
            section.problem_of("retry.cap", "is the longest wait and cannot be shorter than base, the first one");
        }
    }

    /// Asks the engine about each part by itself: of the whole it tells no more than the first thing that is wrong.
    fn check_parts(&self, section: &Section<'_>) {
        let sound = || Subscription::new("name");
        let mut parts = vec![(
            "heartbeat_timeout",
            Subscription { mode: self.mode, heartbeat_timeout: self.heartbeat_timeout, ..sound() },
        )];
        if self.processing_timeout >= PROCESSING_TIMEOUT_MIN {
            let (mode, processing_timeout) = (self.mode, self.processing_timeout);
            parts.push(("processing_timeout", Subscription { mode, processing_timeout, ..sound() }));
        }
        parts.extend(self.topics.iter().map(|topic| ("topics", sound().topics([topic]))));
        parts.extend(self.types.iter().map(|r#type| ("types", sound().types([r#type]))));
        for (key, part) in parts {
            say_invalid(section, key, &part);
        }
    }

    /// Refuses a sink that may take longer than it is given: it would be cut off with its acknowledgements unread, so that what it has
    /// delivered would come again, and again.
    fn check_delivery_time(&self, sink: &SinkSettings, section: &Section<'_>) {
        let (key, given) = match (self.mode, self.heartbeat_timeout) {
            (Mode::Queue, Some(time)) => ("heartbeat_timeout", time),
            _ => ("processing_timeout", self.processing_timeout),
        };
        let Some(needed) = sink.delivery_time(self.batch_size).filter(|needed| given <= needed.max) else { return };
        let (default, place) = if section.has(key) { ("", key) } else { (" (the default)", "sink") };
        section.problem_of(
            place,
            format!(
                "{key} = \"{}\"{default} is not longer than one delivery may take, {}: {}. What was acknowledged by then would \
                 be sent again: write {key} = \"{}\" or more, or a shorter timeout for the sink",
                duration::format(given),
                duration::format(needed.max),
                needed.why,
                duration::format(rounded_up(needed.max)),
            ),
        );
    }
}

/// The next round time above this one: a message does not ask for 91s.
fn rounded_up(time: Duration) -> Duration {
    let step = if time.as_secs() < 60 { 10 } else { 60 };
    Duration::from_secs((time.as_secs() / step + 1).saturating_mul(step))
}

/// The name, which no other subscription has.
fn check_name(section: &Section<'_>, name: Option<&str>, names: &mut HashSet<String>) {
    let Some(name) = name else {
        if !section.has("name") {
            section.problem("a subscription needs a name, for example name = \"orders-to-file\"");
        }
        return;
    };
    say_invalid(section, "name", &Subscription::new(name));
    if name.starts_with(EPHEMERAL_PREFIX) {
        let message = format!("names that begin with `{EPHEMERAL_PREFIX}` belong to `pillarbox run --stdout`");
        section.problem_of("name", message);
    }
    if !names.insert(name.to_owned()) {
        section.problem_of("name", "there are two subscriptions of this name; each needs its own");
    }
}

/// What the engine has against it.
fn say_invalid(section: &Section<'_>, key: &str, subscription: &Subscription) {
    if let Err(error) = subscription.validate() {
        let text = error.to_string();
        let said = format!("subscription '{}': ", subscription.name);
        section.problem_of(key, text.strip_prefix(&said).unwrap_or(&text));
    }
}

fn read_sink(path: &str, node: &Node, section: &Section<'_>, problems: &Problems) -> Option<SinkSettings> {
    let Some(sink) = node.get("sink") else {
        section.problem("a subscription needs a sink, for example sink = { kind = \"file\", path = \"out.ndjson\" }");
        return None;
    };
    SinkSettings::read(&format!("{path}.sink"), sink, problems)
}

/// Where a subscription begins: `beginning`, `now`, a position or a time.
pub(crate) fn parse_start(text: &str) -> Result<Start, String> {
    match text {
        "beginning" | "start" => Ok(Start::Beginning),
        "now" => Ok(Start::Now),
        _ => match text.parse::<i64>() {
            Ok(position) if position >= 0 => Ok(Start::Position(position)),
            _ => text.parse().map(Start::Time).map_err(|_| {
                format!(
                    "'{text}' is not a place in the log; write beginning, now, a position, or a time like \
                     2026-01-31T12:00:00Z"
                )
            }),
        },
    }
}

fn maybe_in_words<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&duration::format(value.unwrap_or_default()))
}

fn profile_in_words<S: Serializer>(value: &RecoveryProfile, serializer: S) -> Result<S::Ok, S::Error> {
    let named = PROFILES.iter().find(|(_, profile)| profile == value);
    serializer.serialize_str(named.map_or("", |(name, _)| name))
}

fn or_off<S: Serializer>(value: &Option<SocketAddr>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.map_or_else(|| "off".to_owned(), |address| address.to_string()))
}

fn masked_url<S: Serializer>(value: &Option<Secret>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&masked_database(value.as_ref().map_or("", Secret::expose)))
}

fn start_in_words<S: Serializer>(value: &Start, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Start::Beginning => serializer.serialize_str("beginning"),
        Start::Now => serializer.serialize_str("now"),
        Start::Position(position) => serializer.serialize_i64(*position),
        Start::Time(time) => serializer.collect_str(time),
    }
}

fn retry_in_words<S: Serializer>(value: &RetryPolicy, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Words {
        max_attempts: u32,
        base: String,
        cap: String,
        jitter: bool,
        min_dead_age: String,
    }
    let words = Words {
        max_attempts: value.max_attempts,
        base: duration::format(value.base),
        cap: duration::format(value.cap),
        jitter: value.jitter,
        min_dead_age: duration::format(value.min_dead_age),
    };
    words.serialize(serializer)
}
