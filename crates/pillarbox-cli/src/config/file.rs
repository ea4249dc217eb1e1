use std::net::SocketAddr;
use std::time::Duration;

use pillarbox::engine::RecoveryProfile;
use pillarbox::{LANES_MAX, Mode, OnDead, RetryPolicy, Start};
use pillarbox_sinks::Secret;
use serde::{Serialize, Serializer};

use super::duration;
use super::section::Section;
use super::sink::SinkSettings;
use crate::secret::{MASK, masked_database};

/// The most that any limit of the relay can be set to.
const LIMIT_MAX: i64 = 100_000_000;
/// The most workers of one subscription.
const WORKERS_MAX: i64 = 1_024;
/// The most events that are handed to a sink at once.
const BATCH_SIZE_MAX: i64 = 10_000;
/// The most attempts before an event is dead.
const ATTEMPTS_MAX: i64 = 1_000_000;
/// The shortest time that a delivery may take, or that the process which works on it may be silent for.
const PROCESSING_TIMEOUT_MIN: Duration = Duration::from_secs(1);
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
        let database = root.text("database").map(|text| Secret::new(text.value));
        let relay = Relay::read(root.section("relay"));
        let recovery = Recovery::read(root.section("recovery"));
        let http = Http::read(root.section("http"));
        let retention = Retention::read(root.section("retention"));
        let dedup = Dedup::read(root.section("dedup"));
        let mut subscriptions: Vec<SubscriptionSettings> = Vec::new();
        for section in root.sections("subscription") {
            if let Some(subscription) = SubscriptionSettings::read(section, &relay, &subscriptions) {
                subscriptions.push(subscription);
            }
        }
        root.finish();
        Config { database, relay, recovery, http, retention, dedup, subscriptions }
    }
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
        if relay.poll_interval.is_zero() || relay.lease_ttl.is_zero() {
            section.problem("poll_interval and lease_ttl must be longer than 0");
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
            section.problem(format!(
                "check_interval = \"{given}\" would look at the database all the time; write at least \"{least}\", or \
                 enabled = false to turn recovery off"
            ));
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
            section.problem("an empty token lets everybody in; give it a value");
        }
        let http = Http { listen, tokens };
        if let Err(message) = http.check() {
            section.problem(message);
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
    /// None: what is wrong was said.
    fn read(mut section: Section<'_>, relay: &Relay, earlier: &[SubscriptionSettings]) -> Option<Self> {
        let name = section.text("name").map(|text| text.value);
        if let Some(name) = &name {
            section.rename(format!("subscription '{name}'"));
        } else {
            section.problem("a subscription needs a name, for example name = \"orders-to-file\"");
        }
        if earlier.iter().any(|other| Some(&other.name) == name.as_ref()) {
            section.problem("there are two subscriptions of this name; each needs its own");
        }
        let texts = |list: Option<Vec<super::section::Text>>| {
            list.unwrap_or_default().into_iter().map(|text| text.value).collect::<Vec<String>>()
        };
        let subscription = SubscriptionSettings {
            topics: texts(section.texts("topics")),
            types: texts(section.texts("types")),
            mode: section.one_of("mode", &[("stream", Mode::Stream), ("queue", Mode::Queue)]).unwrap_or(Mode::Stream),
            lanes: section.count("lanes", 1..=i64::from(LANES_MAX)).unwrap_or(8) as u32,
            on_dead: section
                .one_of("on_dead", &[("block", OnDead::Block), ("skip", OnDead::Skip)])
                .unwrap_or(OnDead::Block),
            start: section.parsed("start", parse_start).unwrap_or(Start::Beginning),
            hold: section.duration_or_forever("hold").unwrap_or(None),
            processing_timeout: section.duration("processing_timeout").unwrap_or(Duration::from_secs(300)),
            heartbeat_timeout: section.duration("heartbeat_timeout"),
            workers: section.count("workers", 1..=WORKERS_MAX).map_or(relay.workers, |count| count as usize),
            batch_size: section
                .count("batch_size", 1..=BATCH_SIZE_MAX)
                .map_or(relay.batch_size, |count| count as usize),
            poll_interval: section.duration("poll_interval").unwrap_or(relay.poll_interval),
            retry: read_retry(section.section("retry")),
            sink: SinkSettings::stdout(),
            name: name.clone().unwrap_or_default(),
        };
        let sink = match section.has("sink") {
            true => SinkSettings::read(section.section("sink")),
            false => {
                section.section("sink");
                section.problem(
                    "a subscription needs a sink, for example sink = { kind = \"file\", path = \"out.ndjson\" }",
                );
                None
            }
        };
        subscription.check_times(&section);
        if name.is_some()
            && let Err(error) = subscription.engine().validate()
        {
            let text = error.to_string();
            let said = format!("subscription '{}': ", subscription.name);
            section.problem(text.strip_prefix(&said).unwrap_or(&text));
        }
        section.finish();
        name?;
        Some(SubscriptionSettings { sink: sink?, ..subscription })
    }

    /// Says which times no delivery could keep to.
    fn check_times(&self, section: &Section<'_>) {
        if self.processing_timeout < PROCESSING_TIMEOUT_MIN {
            let what = match self.mode {
                Mode::Stream => "every delivery would be cancelled before its receiver could answer",
                Mode::Queue => "processes that are well would be taken for dead",
            };
            let (given, least) = (duration::format(self.processing_timeout), duration::format(PROCESSING_TIMEOUT_MIN));
            section
                .problem(format!("processing_timeout = \"{given}\" is too short: {what}; write at least \"{least}\""));
        }
        if self.heartbeat_timeout.is_some_and(|time| time.is_zero()) {
            section.problem(
                "heartbeat_timeout = 0 would cancel every handler; write how long one may go without a sign of \
                 progress, like \"30s\", or leave it out",
            );
        }
    }
}

fn read_retry(mut section: Section<'_>) -> RetryPolicy {
    let default = RetryPolicy::sink();
    let retry = RetryPolicy {
        max_attempts: section
            .count("max_attempts", 1..=ATTEMPTS_MAX)
            .map_or(default.max_attempts, |count| count as u32),
        base: section.duration("base").unwrap_or(default.base),
        cap: section.duration("cap").unwrap_or(default.cap),
        jitter: section.flag("jitter").unwrap_or(default.jitter),
        min_dead_age: section.duration("min_dead_age").unwrap_or(default.min_dead_age),
    };
    if retry.cap < retry.base {
        section.problem("cap is the longest wait and cannot be shorter than base, the first one");
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
