use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use pillarbox::engine::RecoveryProfile;
use pillarbox::limit::LANES_MAX;
use pillarbox::{Mode, OnDead, RetryPolicy, Start, Subscription};
use pillarbox_sinks::Secret;
use serde::{Serialize, Serializer};

use super::duration;
use super::section::Section;
use super::sink::SinkSettings;
use crate::database::Database;
use crate::exit::chain;
use crate::secret::{MASK, masked_database};

/// The most that any limit of the relay can be set to.
const LIMIT_MAX: i64 = 100_000_000;
/// The most workers of one subscription.
const WORKERS_MAX: i64 = 1_024;
/// The most events that are handed to a sink at once.
const BATCH_SIZE_MAX: i64 = 10_000;
/// The most attempts before an event is dead.
const ATTEMPTS_MAX: i64 = 1_000_000;
/// What the names of subscriptions begin with that end with their process.
pub(crate) const EPHEMERAL_PREFIX: &str = "ephemeral.";
/// The time that a delivery may take unless the user says otherwise.
const PROCESSING_TIMEOUT: Duration = Duration::from_secs(300);
/// The shortest time that a delivery may take, or that the process which works on it may be silent for.
const PROCESSING_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// The most connections of the listener.
const HTTP_CONNECTIONS_MAX: i64 = 65_536;
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
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Relay {
    /// Concurrent batches per subscription. Default: 4.
    pub(crate) workers: usize,
    /// Events handed to a sink at once. Default: 100.
    pub(crate) batch_size: usize,
    /// The watchdog: the log is read at least this often. Default: 5 s.
    #[serde(serialize_with = "in_words")]
    pub(crate) poll_interval: Duration,
    /// Wake-ups are gathered for this long. Default: 0.
    #[serde(serialize_with = "in_words")]
    pub(crate) debounce: Duration,
    /// An instance that has not beaten for this long is taken over. Default: 10 s.
    #[serde(serialize_with = "in_words")]
    pub(crate) lease_ttl: Duration,
    /// How long a clean stop may take. Default: 25 s.
    #[serde(serialize_with = "in_words")]
    pub(crate) shutdown_grace: Duration,
    /// Events of a subscription that are read and not yet settled; what a crash can deliver twice. Default: 10,000.
    pub(crate) in_flight: usize,
    /// Failing keys of a subscription at which it stops. Default: 10,000.
    pub(crate) max_parked: usize,
    /// Deliveries of a subscription behind failing keys at which it stops. Default: 1,000,000.
    pub(crate) max_blocked: usize,
}

/// How what other processes were working on in queues is taken back.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Recovery {
    /// Default: true.
    pub(crate) enabled: bool,
    /// How soon. Default: fast.
    #[serde(serialize_with = "profile_in_words")]
    pub(crate) profile: RecoveryProfile,
    /// How often claims are looked through for owners that give no sign of life. Default: 1 min.
    #[serde(serialize_with = "in_words")]
    pub(crate) check_interval: Duration,
}

/// The listener.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Http {
    /// None: no listener. Default: 127.0.0.1:7070.
    #[serde(serialize_with = "or_off")]
    pub(crate) listen: Option<SocketAddr>,
    /// Connections that are open at once; one more closes the oldest idle one. Default: 128.
    pub(crate) connections_max: usize,
    /// Who may use more than the health checks.
    #[serde(serialize_with = "hidden")]
    pub(crate) tokens: Vec<Secret>,
}

/// What is kept.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Retention {
    /// Events, after every subscription has passed; None: for ever. Default: 7 d.
    #[serde(serialize_with = "or_forever")]
    pub(crate) keep: Option<Duration>,
    /// Dead deliveries; None (the default): for ever.
    #[serde(serialize_with = "or_forever")]
    pub(crate) dead: Option<Duration>,
    /// What inboxes have accepted; None: for ever. Default: 30 d.
    #[serde(serialize_with = "or_forever")]
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
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Dedup {
    /// Default: 24 h.
    #[serde(serialize_with = "in_words")]
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
    #[serde(serialize_with = "or_forever")]
    pub(crate) hold: Option<Duration>,
    #[serde(serialize_with = "in_words")]
    pub(crate) processing_timeout: Duration,
    #[serde(serialize_with = "maybe_in_words", skip_serializing_if = "Option::is_none")]
    pub(crate) heartbeat_timeout: Option<Duration>,
    pub(crate) workers: usize,
    pub(crate) batch_size: usize,
    #[serde(serialize_with = "in_words")]
    pub(crate) poll_interval: Duration,
    #[serde(serialize_with = "retry_in_words")]
    pub(crate) retry: RetryPolicy,
    pub(crate) sink: SinkSettings,
}

impl Config {
    /// Reads the whole file; what is wrong with it goes to the section's problems.
    pub(crate) fn read(mut root: Section<'_>) -> Self {
        let database = read_database(&mut root);
        let relay = Relay::read(root.section("relay"));
        let recovery = Recovery::read(root.section("recovery"));
        let http = Http::read(root.section("http"));
        let retention = Retention::read(root.section("retention"));
        let dedup = Dedup::read(root.section("dedup"));
        let mut names = HashSet::new();
        let sections = root.sections("subscription").into_iter();
        let subscriptions =
            sections.filter_map(|section| SubscriptionSettings::read(section, &relay, &mut names)).collect();
        root.finish();
        Config { database, relay, recovery, http, retention, dedup, subscriptions }
    }
}

/// The URL as it was written; one that names no database is a problem.
fn read_database(root: &mut Section<'_>) -> Option<Secret> {
    let url = root.text("database")?.value;
    if let Err(error) = Database::parse(&url) {
        root.problem_of("database", chain(&error));
    }
    Some(Secret::new(url))
}

impl Relay {
    fn read(mut section: Section<'_>) -> Self {
        let relay = Relay {
            workers: section.count("workers", 1..=WORKERS_MAX).unwrap_or(4) as usize,
            batch_size: section.count("batch_size", 1..=BATCH_SIZE_MAX).unwrap_or(100) as usize,
            poll_interval: section.duration("poll_interval").unwrap_or(Duration::from_secs(5)),
            debounce: section.duration("debounce").unwrap_or(Duration::ZERO),
            lease_ttl: section.duration("lease_ttl").unwrap_or(Duration::from_secs(10)),
            shutdown_grace: section.duration("shutdown_grace").unwrap_or(Duration::from_secs(25)),
            in_flight: section.count("in_flight", 1..=LIMIT_MAX).unwrap_or(10_000) as usize,
            max_parked: section.count("max_parked", 1..=LIMIT_MAX).unwrap_or(10_000) as usize,
            max_blocked: section.count("max_blocked", 1..=LIMIT_MAX).unwrap_or(1_000_000) as usize,
        };
        for (key, time) in [("poll_interval", relay.poll_interval), ("lease_ttl", relay.lease_ttl)] {
            if time.is_zero() {
                section.problem_of(key, "must be longer than 0");
            }
        }
        section.finish();
        relay
    }
}

/// The profiles by name.
const PROFILES: [(&str, RecoveryProfile); 2] =
    [("fast", RecoveryProfile::Fast), ("conservative", RecoveryProfile::Conservative)];

impl Recovery {
    fn read(mut section: Section<'_>) -> Self {
        let recovery = Recovery {
            enabled: section.flag("enabled").unwrap_or(true),
            profile: section.one_of("profile", &PROFILES).unwrap_or(RecoveryProfile::Fast),
            check_interval: section.duration("check_interval").unwrap_or(Duration::from_secs(60)),
        };
        if recovery.check_interval < CHECK_INTERVAL_MIN {
            let (given, least) = (duration::format(recovery.check_interval), duration::format(CHECK_INTERVAL_MIN));
            section.problem_of(
                "check_interval",
                format!(
                    "\"{given}\" would look at the database all the time; write at least \"{least}\", or \
                 enabled = false to turn recovery off"
                ),
            );
        }
        section.finish();
        recovery
    }
}

impl Http {
    /// Where the listener is unless the user says otherwise.
    pub(crate) const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);

    fn read(mut section: Section<'_>) -> Self {
        let listen = section.parsed("listen", parse_listen).unwrap_or(Some(Http::LISTEN));
        let tokens: Vec<Secret> =
            section.texts("tokens").unwrap_or_default().into_iter().map(|token| Secret::new(token.value)).collect();
        if tokens.iter().any(|token| token.expose().is_empty()) {
            section.problem_of("tokens", "an empty token lets everybody in; give it a value");
        }
        let connections_max = section.count("connections_max", 1..=HTTP_CONNECTIONS_MAX).unwrap_or(128) as usize;
        let http = Http { listen, connections_max, tokens };
        if let Err(message) = http.check() {
            section.problem_of("listen", message);
        }
        section.finish();
        http
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

impl Retention {
    fn read(mut section: Section<'_>) -> Self {
        let days = |count: u64| Some(Duration::from_secs(count * 86_400));
        let retention = Retention {
            keep_written: section.has("keep"),
            dead_written: section.has("dead"),
            inbox_written: section.has("inbox"),
            keep: section.duration_or_forever("keep").unwrap_or(days(7)),
            dead: section.duration_or_forever("dead").unwrap_or(None),
            inbox: section.duration_or_forever("inbox").unwrap_or(days(30)),
        };
        section.finish();
        retention
    }
}

impl Dedup {
    fn read(mut section: Section<'_>) -> Self {
        let written = section.has("window");
        let dedup = Dedup { window: section.duration("window").unwrap_or(Duration::from_secs(86_400)), written };
        section.finish();
        dedup
    }
}

impl SubscriptionSettings {
    /// None: what is wrong was said. `names` are those of the subscriptions before this one.
    fn read(mut section: Section<'_>, relay: &Relay, names: &mut HashSet<String>) -> Option<Self> {
        let name = read_name(&mut section, names);
        let times = Times::read(&mut section);
        let texts = |list: Option<Vec<super::section::Text>>| {
            list.unwrap_or_default().into_iter().map(|text| text.value).collect::<Vec<String>>()
        };
        let subscription = SubscriptionSettings {
            topics: texts(section.texts("topics")),
            types: texts(section.texts("types")),
            mode: times.mode,
            lanes: section.count("lanes", 1..=i64::from(LANES_MAX)).unwrap_or(8) as u32,
            on_dead: section
                .one_of("on_dead", &[("block", OnDead::Block), ("skip", OnDead::Skip)])
                .unwrap_or(OnDead::Block),
            start: section.parsed("start", parse_start).unwrap_or(Start::Beginning),
            hold: section.duration_or_forever("hold").unwrap_or(None),
            processing_timeout: times.processing,
            heartbeat_timeout: times.heartbeat,
            workers: section.count("workers", 1..=WORKERS_MAX).map_or(relay.workers, |count| count as usize),
            batch_size: section
                .count("batch_size", 1..=BATCH_SIZE_MAX)
                .map_or(relay.batch_size, |count| count as usize),
            poll_interval: section.duration("poll_interval").unwrap_or(relay.poll_interval),
            retry: read_retry(section.section("retry")),
            sink: SinkSettings::stdout(),
            name: name.clone().unwrap_or_default(),
        };
        let sink = read_sink(&mut section);
        subscription.check_times(&section);
        subscription.check_parts(&section);
        if let (Some(sink), true) = (&sink, times.are_sound()) {
            subscription.check_delivery_time(sink, &section);
        }
        section.finish();
        name?;
        Some(SubscriptionSettings { sink: sink?, ..subscription })
    }

    /// Says which times nothing could keep to.
    fn check_times(&self, section: &Section<'_>) {
        if self.processing_timeout < PROCESSING_TIMEOUT_MIN {
            let what = match self.mode {
                Mode::Stream => "every delivery would be cancelled before its receiver could answer",
                Mode::Queue => "processes that are well would be taken for dead",
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
        if self.poll_interval.is_zero() && section.is_written("poll_interval") {
            section.problem_of("poll_interval", "must be longer than 0");
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
        let (default, place) = if section.is_written(key) { ("", key) } else { (" (the default)", "sink") };
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

/// How long a delivery may take, and by what.
struct Times {
    mode: Mode,
    processing: Duration,
    heartbeat: Option<Duration>,
    /// Something else stands there, which could not be read.
    are_unread: bool,
}

impl Times {
    fn read(section: &mut Section<'_>) -> Self {
        let mode = section.one_of("mode", &[("stream", Mode::Stream), ("queue", Mode::Queue)]);
        let (processing, heartbeat) = (section.duration("processing_timeout"), section.duration("heartbeat_timeout"));
        // A mode that cannot be read is believed to be one that goes with the rest.
        let is_queue = section.is_unread("mode", &mode) && heartbeat.is_some();
        Times {
            mode: mode.unwrap_or(if is_queue { Mode::Queue } else { Mode::Stream }),
            processing: processing.unwrap_or(PROCESSING_TIMEOUT),
            heartbeat,
            are_unread: section.is_unread("processing_timeout", &processing)
                || section.is_unread("heartbeat_timeout", &heartbeat),
        }
    }

    /// Whether it makes sense to compare them with others.
    fn are_sound(&self) -> bool {
        let is_zero = self.heartbeat.is_some_and(|time| time.is_zero());
        !self.are_unread && !is_zero && self.processing >= PROCESSING_TIMEOUT_MIN
    }
}

/// The next round time above this one: nobody wants to be told to write 91s.
fn rounded_up(time: Duration) -> Duration {
    let step = if time.as_secs() < 60 { 10 } else { 60 };
    Duration::from_secs((time.as_secs() / step + 1).saturating_mul(step))
}

/// The name, which no other subscription has.
fn read_name(section: &mut Section<'_>, names: &mut HashSet<String>) -> Option<String> {
    let name = section.text("name").map(|text| text.value);
    match &name {
        Some(name) => {
            section.rename(format!("subscription '{name}'"));
            say_invalid(section, "name", &Subscription::new(name));
            if name.starts_with(EPHEMERAL_PREFIX) {
                let message = format!("names that begin with `{EPHEMERAL_PREFIX}` belong to `pillarbox run --stdout`");
                section.problem_of("name", message);
            }
            if !names.insert(name.clone()) {
                section.problem_of("name", "there are two subscriptions of this name; each needs its own");
            }
        }
        None if section.is_written("name") => {}
        None => section.problem("a subscription needs a name, for example name = \"orders-to-file\""),
    }
    name
}

/// What the engine has against it.
fn say_invalid(section: &Section<'_>, key: &str, subscription: &Subscription) {
    if let Err(error) = subscription.validate() {
        let text = error.to_string();
        let said = format!("subscription '{}': ", subscription.name);
        section.problem_of(key, text.strip_prefix(&said).unwrap_or(&text));
    }
}

fn read_sink(section: &mut Section<'_>) -> Option<SinkSettings> {
    let is_there = section.has("sink");
    let sink = section.section("sink");
    if !is_there {
        section.problem("a subscription needs a sink, for example sink = { kind = \"file\", path = \"out.ndjson\" }");
        return None;
    }
    SinkSettings::read(sink)
}

fn read_retry(mut section: Section<'_>) -> RetryPolicy {
    let default = RetryPolicy::sink();
    let max_attempts = section.count("max_attempts", 1..=ATTEMPTS_MAX);
    let (base, cap) = (section.duration("base"), section.duration("cap"));
    let is_unread = section.is_unread("base", &base) || section.is_unread("cap", &cap);
    let default = if max_attempts.is_some() { default.attempts(default.max_attempts) } else { default };
    let retry = RetryPolicy {
        max_attempts: max_attempts.map_or(default.max_attempts, |count| count as u32),
        base: base.unwrap_or(default.base),
        cap: cap.unwrap_or(default.cap),
        jitter: section.flag("jitter").unwrap_or(default.jitter),
        min_dead_age: section.duration("min_dead_age").unwrap_or(default.min_dead_age),
    };
    if retry.cap < retry.base && !is_unread {
        section.problem_of("cap", "is the longest wait and cannot be shorter than base, the first one");
    }
    section.finish();
    retry
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

fn in_words<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&duration::format(*value))
}

fn maybe_in_words<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&duration::format(value.unwrap_or_default()))
}

fn profile_in_words<S: Serializer>(value: &RecoveryProfile, serializer: S) -> Result<S::Ok, S::Error> {
    let named = PROFILES.iter().find(|(_, profile)| profile == value);
    serializer.serialize_str(named.map_or("", |(name, _)| name))
}

fn or_forever<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.map_or_else(|| "forever".to_owned(), duration::format))
}

fn or_off<S: Serializer>(value: &Option<SocketAddr>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.map_or_else(|| "off".to_owned(), |address| address.to_string()))
}

fn hidden<S: Serializer>(value: &[Secret], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(value.iter().map(|_| MASK))
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
