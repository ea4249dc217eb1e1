use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::{Event, Failure};
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{DeliveryResult, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, PurgeConfig, ThreadedProducer};
use rdkafka::statistics::Statistics;
use tokio::sync::oneshot;

use super::failure::{self, Place, Trouble, TroubleKind, Verdict};
use super::properties::{Settings, redact};
use super::record;
use crate::Secret;

/// What became of a record that was handed to librdkafka.
pub(super) type Report = Result<(), Code>;

/// The wait before a full queue is tried again.
const QUEUE_FULL_WAIT: Duration = Duration::from_millis(5);

/// How long trouble explains a time-out. While it lasts librdkafka tells the same again every 30 s, once it tries to connect again,
/// which it does every 10 s.
const TROUBLE_KEPT: Duration = Duration::from_secs(60);

/// How often, and after which wait, a topic that is not there yet is asked for again: brokers that create it need a moment.
const LOOKS_MAX: usize = 5;
const LOOK_WAIT: Duration = Duration::from_millis(200);

/// The place of a producer, which is made when it is needed and replaced when it can no longer be used.
pub(super) struct Slot {
    settings: Settings,
    state: Mutex<State>,
}

enum State {
    Idle,
    Open(Arc<Producer>),
    Closed,
}

impl Slot {
    pub(super) fn new(settings: Settings) -> Self {
        Slot { settings, state: Mutex::new(State::Idle) }
    }

    /// What librdkafka has against the settings, without a secret. Connects to nothing.
    pub(super) fn check(&self) -> Result<(), String> {
        self.try_to_make().map_err(|error| self.settings.describe(&error))
    }

    /// Makes a producer that connects to nothing, and ends it.
    pub(super) fn try_to_make(&self) -> Result<(), KafkaError> {
        Producer::new(&self.settings.without_brokers()).map(drop)
    }

    /// The producer; a new one if the last can no longer be used.
    pub(super) fn producer(&self) -> Result<Arc<Producer>, Failure> {
        let mut state = self.state();
        match &*state {
            State::Closed => return Err(Failure { kind: "closed", ..Failure::sink("the kafka sink was closed") }),
            State::Open(producer) if producer.fatal().is_none() => return Ok(producer.clone()),
            State::Open(producer) => {
                let code = producer.fatal().unwrap_or(Code::Fatal);
                tracing::warn!(error = %code, "the kafka producer stopped and is replaced");
            }
            State::Idle => {}
        }
        let producer = Producer::new(&self.settings)
            .map_err(|error| Failure { kind: "config", ..Failure::sink(self.settings.describe(&error)) })?;
        let producer = Arc::new(producer);
        *state = State::Open(producer.clone());
        Ok(producer)
    }

    /// Takes the producer out for good.
    pub(super) fn close(&self) -> Option<Arc<Producer>> {
        match std::mem::replace(&mut *self.state(), State::Closed) {
            State::Open(producer) => Some(producer),
            State::Idle | State::Closed => None,
        }
    }

    fn discard(&self, producer: &Arc<Producer>) {
        let mut state = self.state();
        if matches!(&*state, State::Open(open) if Arc::ptr_eq(open, producer)) {
            *state = State::Idle;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here is left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a producer out of service when a batch is given up while reports are missing.
///
/// Otherwise its records would stay in the queue until their time is over, and could appear behind newer ones that another relay
/// has sent meanwhile. An idempotent producer cannot leave out records and go on, so that all its records are taken back; other
/// batches send theirs again.
pub(super) struct Abandon<'a> {
    slot: &'a Slot,
    producer: &'a Arc<Producer>,
    missing: bool,
}

impl<'a> Abandon<'a> {
    pub(super) fn new(slot: &'a Slot, producer: &'a Arc<Producer>) -> Self {
        Abandon { slot, producer, missing: true }
    }

    /// All reports have come.
    pub(super) fn all_reported(mut self) {
        self.missing = false;
    }
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        if self.missing {
            self.slot.discard(self.producer);
            self.producer.purge();
        }
    }
}

/// An idempotent producer and its thread.
pub(super) struct Producer {
    /// Only taken when it ends.
    client: Option<ThreadedProducer<Context>>,
    health: Arc<Health>,
    /// Its records were taken back; others must not be sent after the gap they leave.
    purged: AtomicBool,
}

impl Producer {
    fn new(settings: &Settings) -> Result<Self, KafkaError> {
        let health = Arc::new(Health { secrets: settings.secrets.clone(), trouble: Mutex::new(None) });
        let client = ThreadedProducer::from_config_and_context(&settings.client, Context { health: health.clone() })?;
        Ok(Producer { client: Some(client), health, purged: AtomicBool::new(false) })
    }

    /// Hands a record over; waits for room in the queue until the deadline. The receiver gets its report.
    pub(super) async fn send(
        &self,
        topic: &str,
        event: &Event,
        headers: OwnedHeaders,
        deadline: tokio::time::Instant,
    ) -> Result<oneshot::Receiver<Report>, Code> {
        let (report, receiver) = oneshot::channel();
        let mut record: BaseRecord<'_, [u8], [u8], Box<oneshot::Sender<Report>>> =
            BaseRecord::with_opaque_to(topic, Box::new(report)).headers(headers);
        record.key = event.key.as_deref().map(str::as_bytes);
        record.payload = record::value(&event.payload);
        loop {
            if self.purged.load(Ordering::Relaxed) {
                return Err(Code::PurgeQueue);
            }
            match self.client().send(record) {
                Ok(()) => return Ok(receiver),
                Err((KafkaError::MessageProduction(Code::QueueFull), back))
                    if tokio::time::Instant::now() < deadline =>
                {
                    record = back;
                    tokio::time::sleep(QUEUE_FULL_WAIT).await;
                }
                Err((KafkaError::MessageProduction(code), _)) => return Err(code),
                Err(_) => return Err(Code::InvalidArgument),
            }
        }
    }

    /// Why this producer can no longer be used, if so.
    pub(super) fn fatal(&self) -> Option<Code> {
        self.client().client().fatal_error().map(|(code, _)| code)
    }

    /// What keeps it from its brokers.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        let trouble = self.health.trouble();
        trouble.as_ref().filter(|(since, _)| since.elapsed() < TROUBLE_KEPT).map(|(_, trouble)| trouble.clone())
    }

    /// Asks the brokers for a topic, or for the cluster. Blocks.
    pub(super) fn look(&self, topic: Option<&str>, wait: Duration) -> Result<(), Failure> {
        let until = Instant::now() + wait;
        let mut looks = 0;
        loop {
            looks += 1;
            let code = match self.ask(topic, until.saturating_duration_since(Instant::now())) {
                Ok(()) => return Ok(()),
                Err(code) => code,
            };
            let may_appear = matches!(code, Code::LeaderNotAvailable | Code::UnknownTopicOrPartition);
            if !may_appear || looks == LOOKS_MAX || Instant::now() + LOOK_WAIT > until {
                return Err(self.refusal(code, topic));
            }
            std::thread::sleep(LOOK_WAIT);
        }
    }

    fn ask(&self, topic: Option<&str>, wait: Duration) -> Result<(), Code> {
        let metadata = self.client().client().fetch_metadata(topic, wait);
        let metadata = metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(Code::Unknown))?;
        let Some(name) = topic else { return Ok(()) };
        match metadata.topics().iter().find(|topic| topic.name() == name) {
            Some(topic) => topic.error().map_or(Ok(()), |error| Err(error.into())),
            None => Err(Code::UnknownTopicOrPartition),
        }
    }

    fn refusal(&self, code: Code, topic: Option<&str>) -> Failure {
        let trouble = self.trouble();
        if let (Some(trouble), Code::BrokerTransportFailure | Code::OperationTimedOut) = (&trouble, code) {
            return trouble.failure();
        }
        let name = topic.unwrap_or("*");
        let place = Place { topic: name, is_only_topic: true, bytes: 0, local: true, trouble, fatal: self.fatal() };
        match failure::verdict(code, &place) {
            Verdict::Over(pillarbox::sink::Outcome::Failed(failure)) | Verdict::Refused(failure) => failure,
            _ => Failure::unclear("kafka", format!("the brokers did not say anything of topic '{name}': {code}")),
        }
    }

    /// Flushes and ends a producer. Blocks.
    pub(super) fn end(producer: Arc<Self>, wait: Duration) {
        if let Err(error) = producer.client().flush(wait) {
            tracing::warn!(%error, "the kafka producer was closed before all its records were acknowledged");
        }
        if let Some(mut producer) = Arc::into_inner(producer) {
            drop(producer.client.take());
        }
    }

    fn purge(&self) {
        self.purged.store(true, Ordering::Relaxed);
        self.client().purge(PurgeConfig::default().queue().inflight().non_blocking());
    }

    fn client(&self) -> &ThreadedProducer<Context> {
        self.client.as_ref().expect("it is only taken when the producer ends")
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        // To end a client joins its threads, which takes up to a second: not on a thread that runs futures.
        let ended = std::thread::Builder::new().name("kafka-producer-end".to_owned()).spawn(move || drop(client));
        if let Err(error) = ended {
            tracing::warn!(%error, "no thread to end a kafka producer with");
        }
    }
}

/// What librdkafka says of its connections.
struct Health {
    secrets: Arc<[Secret]>,
    trouble: Mutex<Option<(Instant, Trouble)>>,
}

impl Health {
    fn trouble(&self) -> MutexGuard<'_, Option<(Instant, Trouble)>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what explains most: that a login failed rather than that the connection is gone, and a reason rather than a number.
    fn note(&self, code: Code, reason: String) {
        let Some(kind) = TroubleKind::of(code) else { return };
        let mut trouble = self.trouble();
        let reason = match &*trouble {
            Some((since, known)) if since.elapsed() < TROUBLE_KEPT && known.kind > kind => return,
            Some((_, known)) if code == Code::AllBrokersDown && known.kind == kind => known.reason.clone(),
            _ => reason,
        };
        *trouble = Some((Instant::now(), Trouble { kind, reason }));
    }

    fn is_well(&self) {
        *self.trouble() = None;
    }
}

struct Context {
    health: Arc<Health>,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        let detail = redact(&self.health.secrets, text);
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!(facility, detail, "librdkafka");
            }
            RDKafkaLogLevel::Error | RDKafkaLogLevel::Warning => tracing::warn!(facility, detail, "librdkafka"),
            RDKafkaLogLevel::Notice => tracing::info!(facility, detail, "librdkafka"),
            RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => tracing::debug!(facility, detail, "librdkafka"),
        }
    }

    fn stats(&self, _: Statistics) {}

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let reason = redact(&self.health.secrets, reason);
        tracing::debug!(%error, detail = %reason, "librdkafka");
        if let Some(code) = error.rdkafka_error_code() {
            self.health.note(code, reason);
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<oneshot::Sender<Report>>;

    fn delivery(&self, result: &DeliveryResult<'_>, report: Self::DeliveryOpaque) {
        let outcome = match result {
            Ok(_) => {
                self.health.is_well();
                Ok(())
            }
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(Code::Unknown)),
        };
        // Nobody waits for the reports of a batch that was given up.
        let _ = report.send(outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trouble_that_explains_most_is_kept_until_a_record_is_delivered() {
        let health = Health { secrets: Arc::new([Secret::new("canary")]), trouble: Mutex::new(None) };
        let reason = || health.trouble().as_ref().map(|(_, trouble)| trouble.reason.clone());
        health.note(Code::BrokerTransportFailure, "connection refused".to_owned());
        health.note(Code::AllBrokersDown, "1/1 brokers are down".to_owned());
        assert_eq!(reason().as_deref(), Some("connection refused"));
        health.note(Code::Authentication, "no such user".to_owned());
        health.note(Code::BrokerTransportFailure, "disconnected".to_owned());
        assert_eq!(reason().as_deref(), Some("no such user"));
        health.note(Code::MessageTimedOut, "no trouble".to_owned());
        assert_eq!(reason().as_deref(), Some("no such user"));
        health.is_well();
        assert_eq!(reason(), None);
    }
}
