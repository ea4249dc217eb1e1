mod address;
mod answer;
mod course;
mod header;
mod message;
mod signature;
mod target;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt};
use pillarbox::sink::{Attempt, Batch, BoxFuture, CloudEvents, Fault, Outcome, Sink, SinkFeatures};
use pillarbox::{Error, ErrorKind, Failure, Result};
use reqwest::{Certificate, Client, Method, Response, StatusCode, Url, redirect, retry};
use serde::Deserialize;

use crate::config::{ConfigFault, DeliveryTime, SinkConfig, count};
use crate::{Secret, Template, duration};
use address::PublicOnly;
use answer::{judge, no_answer};
use course::Course;
pub use course::HTTP_BATCH_TIME_MAX;
use message::{Message, Writer};
use signature::Signer;
use target::{Target, shown};

/// The most requests that one batch may have under way.
const CONCURRENCY_MAX: usize = 1024;

/// The most that is read of an answer, in bytes.
const RESPONSE_BYTES_MAX: u64 = 16 * 1024 * 1024;

const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CONCURRENCY: usize = 16;
const RESPONSE_BYTES: usize = 64 * 1024;

/// How long the rest of an answer is waited for. What the answer means is known by then; only the connection is at stake.
const DRAIN_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long an idle connection is kept: less than the 5 s after which common servers close theirs.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// How [`HttpSink`] sends, and what a user writes for it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Where to. Placeholders are allowed after the host only, and what fills them is escaped.
    pub url: Template,
    /// A secret of Standard Webhooks (`whsec_…`), the first of all. Default: none.
    #[serde(default)]
    pub secret: Option<Secret>,
    /// Further secrets; each makes one signature, so that a receiver can change from one to the next. Without any secret, nothing is
    /// signed.
    #[serde(default)]
    pub secrets: Vec<Secret>,
    /// Headers of every request, for example `Authorization`. Their values are never shown.
    #[serde(default, deserialize_with = "header::deserialize")]
    pub headers: Vec<(String, Secret)>,
    /// How an event is written. Default: structured.
    #[serde(default)]
    pub mode: HttpMode,
    /// How long one request may take, with its answer. Default: 30 s.
    #[serde(default = "timeout", with = "duration::positive")]
    pub timeout: Duration,
    /// How long connecting may take. Default: 10 s.
    #[serde(default = "connect_timeout", with = "duration::positive")]
    pub connect_timeout: Duration,
    /// Requests under way at once for one batch, 1 to 1,024; a batched sink has one. Default: 16.
    #[serde(default = "concurrency", deserialize_with = "count::<{ CONCURRENCY_MAX as u64 }, _>")]
    pub concurrency: usize,
    /// What of an answer is read, at most, in bytes; only so that its connection can be used again. Default: 64 KiB.
    #[serde(default = "response_bytes", deserialize_with = "count::<RESPONSE_BYTES_MAX, _>")]
    pub response_bytes_max: usize,
    /// Refuses to connect to addresses that are not public, for URLs that users of an application enter. Default: off.
    #[serde(default)]
    pub block_private_addresses: bool,
    /// A file of certificates (PEM) that are trusted beside the system's.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

fn timeout() -> Duration {
    TIMEOUT
}

fn connect_timeout() -> Duration {
    CONNECT_TIMEOUT
}

fn concurrency() -> usize {
    CONCURRENCY
}

fn response_bytes() -> usize {
    RESPONSE_BYTES
}

/// How an event is written into a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HttpMode {
    /// One request an event, with all of it as JSON in the body: a signature covers everything.
    #[default]
    Structured,
    /// One request an event, with the payload as the body and the attributes as `ce-` headers.
    Binary,
    /// One request a batch, with a JSON array of events.
    Batched,
}

impl HttpConfig {
    /// Unsigned structured events to this URL.
    pub fn new(url: Template) -> Self {
        HttpConfig {
            url,
            secret: None,
            secrets: Vec::new(),
            headers: Vec::new(),
            mode: HttpMode::default(),
            timeout: TIMEOUT,
            connect_timeout: CONNECT_TIMEOUT,
            concurrency: CONCURRENCY,
            response_bytes_max: RESPONSE_BYTES,
            block_private_addresses: false,
            ca_file: None,
        }
    }

    /// All its secrets, in the order in which they sign.
    fn all_secrets(&self) -> Vec<Secret> {
        self.secret.iter().chain(&self.secrets).cloned().collect()
    }

    fn limit_faults(&self) -> Vec<ConfigFault> {
        let mut faults = Vec::new();
        let mut invalid = |key, message: String| {
            faults.push(ConfigFault::new(key, Error::new(ErrorKind::Invalid, message)));
        };
        if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            let concurrency = self.concurrency;
            let message = format!("concurrency = {concurrency} of an http sink is outside 1 to {CONCURRENCY_MAX}");
            invalid("concurrency", message);
        }
        for (key, time) in [("timeout", self.timeout), ("connect_timeout", self.connect_timeout)] {
            if time.is_zero() {
                invalid(key, format!("{key} of an http sink must be more than 0"));
            }
        }
        faults
    }

    fn secret_faults(&self) -> Vec<ConfigFault> {
        let (first, count) = (usize::from(self.secret.is_some()), self.all_secrets().len());
        let check = |at: usize, secret: &Secret| signature::check(secret, at + 1, count);
        let of_first = self.secret.iter().filter_map(|secret| check(0, secret).err());
        let of_others = ConfigFault::of_list("secrets", &self.secrets, |at, secret| check(at + first, secret));
        of_first.map(|error| ConfigFault::new("secret", error)).chain(of_others).collect()
    }

    fn place_faults(&self) -> Vec<ConfigFault> {
        let mut faults = Vec::new();
        if let Err(error) = Target::new(self.url.clone(), self.block_private_addresses) {
            faults.push(ConfigFault::new("url", error));
        }
        if self.mode == HttpMode::Batched && !self.url.is_constant() {
            let message =
                "mode = \"batched\" of an http sink needs a url without placeholders: one request has many events";
            faults.push(ConfigFault::new("mode", Error::new(ErrorKind::Invalid, message)).beside("url"));
        }
        if let Some(Err(error)) = self.ca_file.as_deref().map(certificates) {
            faults.push(ConfigFault::new("ca_file", error));
        }
        faults
    }
}

impl SinkConfig for HttpConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("url", "https://example.com/events")]
    }

    fn faults(&self) -> Vec<ConfigFault> {
        let headers = header::faults(&self.headers).into_iter().map(|error| ConfigFault::new("headers", error));
        let mut faults = self.limit_faults();
        faults.extend(self.secret_faults());
        faults.extend(headers);
        faults.extend(self.place_faults());
        faults
    }

    /// The time until the last request of a batch begins, and that request's. All events of a batch may be of one key, and go one after
    /// the other.
    fn delivery_time(&self, batch_size: usize) -> Option<DeliveryTime> {
        let written = duration::format(self.timeout);
        // A batch that is refused is halved until the event is found which the receiver does not want.
        let requests = if self.mode == HttpMode::Batched { 2 * batch_size - 1 } else { batch_size };
        let earlier = self.timeout.saturating_mul(u32::try_from(requests - 1).unwrap_or(u32::MAX));
        let (earlier, why) = if earlier < HTTP_BATCH_TIME_MAX {
            let why = format!("http may send {requests} requests one after the other, timeout = \"{written}\" each");
            (earlier, why)
        } else {
            let begins = duration::format(HTTP_BATCH_TIME_MAX);
            let why =
                format!("http begins requests of a batch for {begins}, and the last may take timeout = \"{written}\"");
            (HTTP_BATCH_TIME_MAX, why)
        };
        Some(DeliveryTime { max: self.timeout.saturating_add(earlier), why })
    }

    fn build(&self, source: String) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(HttpSink::new(self.clone(), source)?))
    }
}

impl fmt::Debug for HttpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpConfig")
            .field("url", &shown(&self.url))
            .field("secret", &self.secret)
            .field("secrets", &self.secrets)
            .field("headers", &self.headers)
            .field("mode", &self.mode)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("concurrency", &self.concurrency)
            .field("response_bytes_max", &self.response_bytes_max)
            .field("block_private_addresses", &self.block_private_addresses)
            .field("ca_file", &self.ca_file)
            .finish()
    }
}

/// Posts CloudEvents to an HTTP endpoint, signed as Standard Webhooks.
///
/// `Delivered` means that the receiver answered with a status from 200 to 299. The events of a key are sent one after the
/// other, different keys at once. Redirects are not followed and proxies of the environment are not used. A receiver that
/// answered and whose answer was lost gets the event again, with the same `webhook-id`.
pub struct HttpSink {
    client: Client,
    target: Target,
    writer: Writer,
    mode: HttpMode,
    timeout: Duration,
    concurrency: usize,
    response_bytes_max: usize,
}

impl HttpSink {
    /// A sink whose events are of this `source`, a URI like `urn:pillarbox:<log_id>`. Nothing is connected to yet.
    pub fn new(config: HttpConfig, source: impl Into<String>) -> Result<Self> {
        if let Some(fault) = config.faults().into_iter().next() {
            return Err(fault.error);
        }
        let writer = Writer {
            format: CloudEvents::new(source),
            configured: header::configured(&config.headers)?,
            signer: Signer::new(&config.all_secrets())?,
        };
        Ok(HttpSink {
            client: client(&config)?,
            target: Target::new(config.url, config.block_private_addresses)?,
            writer,
            mode: config.mode,
            timeout: config.timeout,
            concurrency: config.concurrency,
            response_bytes_max: config.response_bytes_max,
        })
    }

    /// Each event in a request of its own: keys at once, the events of a key in order until one fails.
    async fn deliver_singly(&self, batch: &Batch) -> Vec<Outcome> {
        let course = &Course::new(Instant::now());
        let keys = stream::iter(by_key(&batch.events));
        let mut tried = keys.map(|key| self.deliver_key(batch, key, course)).buffer_unordered(self.concurrency);
        let mut outcomes = vec![Outcome::NotTried; batch.events.len()];
        while let Some(key) = tried.next().await {
            key.into_iter().for_each(|(index, outcome)| outcomes[index] = outcome);
        }
        outcomes
    }

    async fn deliver_key(&self, batch: &Batch, key: Vec<usize>, course: &Course) -> Vec<(usize, Outcome)> {
        let mut outcomes = Vec::with_capacity(key.len());
        for index in key {
            if !course.goes_on(Instant::now()) {
                break;
            }
            let result = self.deliver_one(&batch.subscription, &batch.events[index]).await;
            if !matches!(&result, Err(failure) if failure.unsent && failure.fault == Fault::Event) {
                course.learn(&result);
            }
            match result {
                Ok(()) => outcomes.push((index, Outcome::Delivered)),
                Err(failure) => {
                    outcomes.push((index, Outcome::Failed(failure)));
                    break;
                }
            }
        }
        outcomes
    }

    async fn deliver_one(&self, subscription: &str, attempt: &Attempt) -> std::result::Result<(), Failure> {
        let url = self.target.url(&attempt.event)?;
        let message = match self.mode {
            HttpMode::Binary => self.writer.binary(subscription, attempt)?,
            _ => self.writer.structured(subscription, attempt),
        };
        self.post(url, message).await
    }

    /// Many events in one request. When it is refused for what is in it, its halves go one after the other, until the event
    /// is found that the receiver does not want.
    async fn deliver_batched(&self, batch: &Batch) -> Vec<Outcome> {
        let course = Course::new(Instant::now());
        let mut outcomes = vec![Outcome::NotTried; batch.events.len()];
        let mut stopped: HashSet<&str> = HashSet::new();
        let mut parts = VecDeque::from([(0..batch.events.len()).collect::<Vec<usize>>()]);
        while let Some(mut part) = parts.pop_front().filter(|_| course.goes_on(Instant::now())) {
            part.retain(|index| key_of(batch, *index).is_none_or(|key| !stopped.contains(key)));
            if part.is_empty() {
                continue;
            }
            let events: Vec<&Attempt> = part.iter().map(|index| &batch.events[*index]).collect();
            let (message, count) = self.writer.batched(&batch.subscription, &events);
            if count < part.len() {
                parts.push_front(part.split_off(count));
            }
            let result = self.post(self.target.base().clone(), message).await;
            course.learn(&result);
            match result {
                Ok(()) => part.iter().for_each(|index| outcomes[*index] = Outcome::Delivered),
                Err(failure) if failure.fault == Fault::Event && part.len() > 1 => {
                    parts.push_front(part.split_off(part.len() / 2));
                    parts.push_front(part);
                }
                Err(failure) => fail_first_of_keys(batch, &part, &failure, &mut stopped, &mut outcomes),
            }
        }
        outcomes
    }

    async fn post(&self, url: Url, message: Message) -> std::result::Result<(), Failure> {
        let Message { headers, body } = message;
        let request = self.client.post(url.clone()).headers(headers).body(body);
        let response = request.send().await.map_err(|error| self.no_answer(error))?;
        let judged = judge(&url, response.status(), response.headers());
        self.drain(response).await;
        judged.map_err(|failure| self.of_this_place(failure))
    }

    /// Where events choose their path, one that has gone says nothing of the others.
    fn of_this_place(&self, failure: Failure) -> Failure {
        match failure.kind {
            _ if self.target.is_constant() => failure,
            "gone" => Failure {
                kind: "gone",
                ..Failure::permanent(format!("{} answered 410 Gone where this event goes", self.target.origin()))
            },
            "not_found" => Failure { fault: Fault::Event, ..failure },
            _ => failure,
        }
    }

    /// Reads what is left of an answer, so that the connection can be used again; one that is too long or too slow is cut.
    async fn drain(&self, mut response: Response) {
        if response.content_length().is_some_and(|length| length > self.response_bytes_max as u64) {
            return;
        }
        let mut left = self.response_bytes_max;
        let all = async {
            while let Ok(Some(chunk)) = response.chunk().await {
                match left.checked_sub(chunk.len()) {
                    Some(less) => left = less,
                    None => return,
                }
            }
        };
        // Whether it came to its end does not matter: the receiver has said what it had to say.
        let _ = tokio::time::timeout(DRAIN_WAIT_MAX, all).await;
    }

    /// Asks with `OPTIONS`, which delivers nothing: the status of the answer. A receiver that does not know it is fine; without a fixed
    /// path, so is one that has nothing there. Whether it takes events only an event can tell.
    pub async fn ask(&self) -> std::result::Result<u16, Failure> {
        let url = self.target.base();
        let request = self.client.request(Method::OPTIONS, url.clone()).headers(self.writer.configured.clone());
        let response = request.send().await.map_err(|error| self.no_answer(error))?;
        let (status, judged) = (response.status(), judge(url, response.status(), response.headers()));
        self.drain(response).await;
        let fine = match status {
            StatusCode::NOT_IMPLEMENTED => true,
            StatusCode::NOT_FOUND => !self.target.is_constant(),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => false,
            StatusCode::GONE => !self.target.is_constant(),
            status => !status.is_server_error() && !status.is_redirection(),
        };
        if fine { Ok(status.as_u16()) } else { judged.map(|()| status.as_u16()) }
    }

    fn no_answer(&self, error: reqwest::Error) -> Failure {
        no_answer(self.target.origin(), self.timeout, error)
    }
}

impl Sink for HttpSink {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            match self.mode {
                HttpMode::Structured | HttpMode::Binary => self.deliver_singly(&batch).await,
                HttpMode::Batched => self.deliver_batched(&batch).await,
            }
        })
    }

    /// As [`ask`](HttpSink::ask).
    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async move { self.ask().await.map(drop) })
    }
}

impl fmt::Debug for HttpSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSink")
            .field("origin", &self.target.origin())
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

fn client(config: &HttpConfig) -> Result<Client> {
    let mut builder = Client::builder()
        .user_agent(concat!("pillarbox/", env!("CARGO_PKG_VERSION")))
        .timeout(config.timeout)
        .connect_timeout(config.connect_timeout.min(config.timeout))
        .pool_idle_timeout(IDLE_MAX)
        .redirect(redirect::Policy::none())
        .retry(retry::never())
        .no_proxy()
        .http1_only();
    if config.block_private_addresses {
        builder = builder.dns_resolver(PublicOnly::new());
    }
    let extra = config.ca_file.as_deref().map(certificates).transpose()?.unwrap_or_default();
    builder = if is_https(config) {
        builder.tls_certs_merge(extra)
    } else {
        // The system's certificates are not needed, and may be missing.
        builder.tls_certs_only(extra)
    };
    builder.build().map_err(|error| {
        let message =
            "an http sink cannot be set up; are certificates installed? (`apt-get install -y ca-certificates`)";
        Error::with_source(ErrorKind::Invalid, message, error)
    })
}

fn is_https(config: &HttpConfig) -> bool {
    Url::parse(config.url.literal_start()).is_ok_and(|url| url.scheme() == "https")
}

fn certificates(path: &Path) -> Result<Vec<Certificate>> {
    let invalid = |why: &str| format!("ca_file '{}' of an http sink {why}", path.display());
    let text = std::fs::read(path)
        .map_err(|error| Error::with_source(ErrorKind::Invalid, invalid("cannot be read"), error))?;
    let certificates = Certificate::from_pem_bundle(&text).map_err(|error| {
        Error::with_source(ErrorKind::Invalid, invalid("is not a file of certificates (PEM)"), error)
    })?;
    if certificates.is_empty() {
        return Err(Error::new(ErrorKind::Invalid, invalid("holds no certificate (PEM)")));
    }
    Ok(certificates)
}

fn key_of(batch: &Batch, index: usize) -> Option<&str> {
    batch.events[index].event.key.as_deref()
}

/// The places of the events of each key in the batch, in order; an event without a key stands alone.
fn by_key(events: &[Attempt]) -> Vec<Vec<usize>> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut keys: Vec<Vec<usize>> = Vec::new();
    for (index, attempt) in events.iter().enumerate() {
        let new = keys.len();
        let place = attempt.event.key.as_deref().map_or(new, |key| *places.entry(key).or_insert(new));
        if place == new {
            keys.push(Vec::new());
        }
        keys[place].push(index);
    }
    keys
}

/// The first event of each key failed; those behind it were not tried.
fn fail_first_of_keys<'a>(
    batch: &'a Batch,
    part: &[usize],
    failure: &Failure,
    stopped: &mut HashSet<&'a str>,
    outcomes: &mut [Outcome],
) {
    for index in part {
        if key_of(batch, *index).is_none_or(|key| stopped.insert(key)) {
            outcomes[*index] = Outcome::Failed(failure.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use pillarbox::Payload;
    use pillarbox_testkit::sink_suite::{batch_of, sink_event};

    use super::*;

    fn config(url: &str) -> HttpConfig {
        HttpConfig::new(url.parse().unwrap())
    }

    fn check_invalid(config: HttpConfig, why: &str) {
        let error = HttpSink::new(config, "urn:x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(why), "{error}");
    }

    #[test]
    fn events_are_grouped_by_key_in_order() {
        let event = |(index, key): (usize, &Option<&str>)| sink_event(index as i64, *key, Payload::None);
        let keys = [Some("a"), None, Some("b"), Some("a"), None, Some("b")];
        let batch = batch_of(keys.iter().enumerate().map(event));
        assert_eq!(by_key(&batch.events), [vec![0, 3], vec![1], vec![2, 5], vec![4]]);
    }

    #[test]
    fn what_cannot_work_is_refused_before_connecting() {
        let fine = || config("http://h/");
        assert!(HttpSink::new(fine(), "urn:x").is_ok());
        assert!(HttpSink::new(HttpConfig { concurrency: CONCURRENCY_MAX, ..fine() }, "urn:x").is_ok());
        check_invalid(HttpConfig { concurrency: 0, ..fine() }, "concurrency = 0");
        check_invalid(HttpConfig { concurrency: CONCURRENCY_MAX + 1, ..fine() }, "outside 1 to");
        check_invalid(HttpConfig { timeout: Duration::ZERO, ..fine() }, "more than 0");
        check_invalid(HttpConfig { mode: HttpMode::Batched, ..config("http://h/{key}") }, "without placeholders");
        check_invalid(HttpConfig { secrets: vec!["x".into()], ..fine() }, "secret 1 of 1");
        check_invalid(HttpConfig { headers: vec![("a b".into(), "x".into())], ..fine() }, "not a name");
        check_invalid(HttpConfig { ca_file: Some("/does/not/exist".into()), ..fine() }, "'/does/not/exist'");
        check_invalid(HttpConfig { ca_file: Some("/dev/null".into()), ..fine() }, "holds no certificate");
        check_invalid(HttpConfig { block_private_addresses: true, ..config("http://10.0.0.1/") }, "not public");
        check_invalid(config("amqp://h/"), "http://");
        for url in ["http://h/a/../{key}", "http://h/./{key}", "http://h/{key|..}", "http://h/%2e%2E/x"] {
            check_invalid(config(url), "'.' or '..'");
        }
    }

    #[test]
    fn neither_debug_nor_the_path_shows_a_secret() {
        let config = HttpConfig {
            secrets: vec!["whsec_Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5".into()],
            headers: vec![("Authorization".into(), "Bearer canary".into())],
            ..config("https://h/canary/{key}?token=canary")
        };
        let shown = format!("{config:?} {:?}", HttpSink::new(config.clone(), "urn:x").unwrap());
        assert!(shown.contains("https://h"), "{shown}");
        assert!(!shown.contains("canary") && !shown.contains("Y2FuYXJ5"), "{shown}");
    }
}
