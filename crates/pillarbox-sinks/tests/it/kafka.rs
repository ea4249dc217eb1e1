//! Against librdkafka's mock of a cluster, or against real brokers if `PILLARBOX_TEST_KAFKA` names some. Tests whose names end in
//! `on_the_mock` need brokers that fail on demand, and always use it.
mod cluster;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cluster::{Cluster, PATIENCE, Record};
use pillarbox::sink::{Batch, BoxFuture, Fault, Outcome, Sink};
use pillarbox::{Event, Failure, Headers, Payload};
use pillarbox_sinks::{KAFKA_TIMEOUT_MIN, KafkaConfig, KafkaSink, Secret};
use pillarbox_testkit::eventually;
use pillarbox_testkit::sink_suite::{
    Received, ReceiverFeatures, ServerControl, SinkFixture, batch_of, check_sink, sink_event,
};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tracing::field::{Field, Visit};

const SOURCE: &str = "urn:pillarbox:test";

/// Short, so that a test of an outage is; long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(4);

fn config(cluster: &Cluster, topic: &str) -> KafkaConfig {
    KafkaConfig { timeout: TIMEOUT, ..KafkaConfig::new(cluster.brokers(), topic.parse().unwrap()) }
}

fn open(cluster: &Cluster, topic: &str) -> KafkaSink {
    KafkaSink::new(config(cluster, topic), SOURCE).unwrap()
}

fn with(mut config: KafkaConfig, properties: &[(&str, &str)]) -> pillarbox::Result<KafkaSink> {
    config.properties = properties.iter().map(|(name, value)| ((*name).to_owned(), Secret::new(*value))).collect();
    KafkaSink::new(config, SOURCE)
}

fn event(position: i64, key: &str) -> Event {
    sink_event(position, Some(key), Payload::Json(format!("{{\"n\":{position}}}").into()))
}

/// Events each with a key of its own.
fn events(positions: std::ops::RangeInclusive<i64>) -> Batch {
    batch_of(positions.map(|position| event(position, &format!("k{position}"))))
}

async fn delivered(sink: &KafkaSink, batch: Batch) {
    let count = batch.events.len();
    let outcomes = tokio::time::timeout(PATIENCE, sink.deliver(batch)).await.expect("an answer in time");
    assert_eq!(outcomes, vec![Outcome::Delivered; count]);
}

#[track_caller]
fn failure(outcome: &Outcome) -> &Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("it should have failed: {other:?}"),
    }
}

fn fail(cluster: &Cluster, api: RDKafkaApiKey, errors: Vec<RDKafkaRespErr>) {
    cluster.on_mock(move |mock| mock.request_errors(api, &errors));
}

fn set_topic_error(cluster: &Cluster, topic: &str, error: RDKafkaRespErr) {
    let topic = topic.to_owned();
    cluster.on_mock(move |mock| mock.topic_error(&topic, error)).unwrap();
}

pub(crate) struct Fixture {
    cluster: Cluster,
    topic: String,
}

impl Fixture {
    fn new() -> Self {
        Fixture::with_partitions(3)
    }

    pub(crate) fn with_partitions(partitions: i32) -> Self {
        let cluster = Cluster::any();
        let topic = cluster.create_topic(partitions);
        Fixture { cluster, topic }
    }
}

impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(open(&self.cluster, &self.topic))
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        let records = tokio::task::block_in_place(|| self.cluster.records(&self.topic));
        Box::pin(async move { records.iter().map(Record::event).collect() })
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { source: Some(SOURCE), ..ReceiverFeatures::default() }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        self.cluster.mocked().map(|_| self as &dyn ServerControl)
    }
}

/// Only the mock can be killed; it keeps its records, as brokers do.
impl ServerControl for Fixture {
    fn kill(&self) -> BoxFuture<'_, ()> {
        self.cluster.on_mock(|mock| mock.broker_down(-1)).unwrap();
        Box::pin(async {})
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        self.cluster.on_mock(|mock| mock.broker_up(-1)).unwrap();
        Box::pin(async {})
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kafka_sink_conforms() {
    check_sink(Fixture::new).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_has_the_key_the_payload_and_the_headers_of_its_event() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(1);
    let names = ["traceparent", "tenantid", "X-Tenant", "ce_id", "Content-Type", "pillarbox-attempt"];
    let headers = names.iter().map(|name| ((*name).to_owned(), format!("of {name}"))).collect();
    let mut batch = batch_of([Event { headers: Headers::from_map(&headers), ..event(7, "order-7") }]);
    batch.events[0].number = 3;
    delivered(&open(&cluster, &topic), batch).await;
    let records = cluster.records(&topic);
    let [record] = &records[..] else { panic!("{records:?}") };
    assert_eq!(record.key.as_deref(), Some(&b"order-7"[..]));
    assert_eq!(record.value.as_deref(), Some(&b"{\"n\":7}"[..]));
    let expected = [
        (
            "ce_headers",
            "{\"Content-Type\":\"of Content-Type\",\"ce_id\":\"of ce_id\",\"pillarbox-attempt\":\"of pillarbox-attempt\"}",
        ),
        ("ce_id", "00000000-0000-0001-0000-000000000007"),
        ("ce_partitionkey", "order-7"),
        ("ce_sequence", "7"),
        ("ce_source", SOURCE),
        ("ce_specversion", "1.0"),
        ("ce_subject", "order-7"),
        ("ce_tenantid", "of tenantid"),
        ("ce_time", "1970-01-01T00:00:01.000Z"),
        ("ce_topic", "orders"),
        ("ce_traceparent", "of traceparent"),
        ("ce_type", "order.placed"),
        ("content-type", "application/json"),
        ("X-Tenant", "of X-Tenant"),
        ("traceparent", "of traceparent"),
        ("pillarbox-attempt", "3"),
        ("pillarbox-subscription", "suite"),
    ];
    let expected: BTreeMap<String, String> =
        expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect();
    assert_eq!(record.headers, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_null_and_what_is_empty_is_not() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(1);
    let sink = open(&cluster, &topic);
    let bytes = |bytes: &[u8]| Payload::Bytes(bytes.into());
    for (position, key, payload) in
        [(1, None, bytes(b"1")), (2, Some(""), bytes(b"")), (3, Some("k"), Payload::None), (4, None, Payload::None)]
    {
        delivered(&sink, batch_of([sink_event(position, key, payload)])).await;
    }
    let records: Vec<_> = cluster.records(&topic).into_iter().map(|record| (record.key, record.value)).collect();
    let some = |bytes: &[u8]| Some(bytes.to_vec());
    assert_eq!(records, [(None, some(b"1")), (some(b""), some(b"")), (some(b"k"), None), (None, None)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_go_to_the_partitions_that_the_java_client_chooses() {
    // The values of murmur2 are those in the tests of librdkafka and of the Java client.
    let hashes: [(&str, u32); 3] = [("kafka", 0xd067_cf64), ("1234", 0x9fc9_7b14), ("giberish123456789", 0x8f55_2b0c)];
    let cluster = Cluster::any();
    let topic = cluster.create_topic(7);
    delivered(
        &open(&cluster, &topic),
        batch_of(hashes.iter().zip(1..).map(|((key, _), position)| event(position, key))),
    )
    .await;
    let records = cluster.records(&topic);
    assert_eq!(records.len(), hashes.len());
    for (key, hash) in hashes {
        let record = records.iter().find(|record| record.key.as_deref() == Some(key.as_bytes())).unwrap();
        assert_eq!(record.partition, ((hash & 0x7fff_ffff) % 7) as i32, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_topic_can_depend_on_the_event() {
    let cluster = Cluster::any();
    let topics = [cluster.create_topic(1), cluster.create_topic(1)];
    let to = |position, topic: &str| Event { topic: topic.into(), ..event(position, &format!("k{position}")) };
    let sink = open(&cluster, "{topic}");
    let outcomes = sink.deliver(batch_of([to(1, &topics[0]), to(2, "no topic"), to(3, &topics[1])])).await;
    assert_eq!((&outcomes[0], &outcomes[2]), (&Outcome::Delivered, &Outcome::Delivered));
    let failure = failure(&outcomes[1]);
    assert!(failure.permanent && failure.kind == "destination", "{failure:?}");
    assert_eq!((cluster.positions(&topics[0]), cluster.positions(&topics[1])), (vec![1], vec![3]));
    assert_eq!(sink.check().await, Ok(()), "the cluster is there, whatever the topics are");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_larger_than_the_queue_waits_for_room() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(3);
    let sink = with(config(&cluster, &topic), &[("queue.buffering.max.messages", "7"), ("linger.ms", "0")]).unwrap();
    delivered(&sink, events(1..=200)).await;
    let positions: BTreeSet<i64> = cluster.positions(&topic).into_iter().collect();
    assert_eq!(positions, (1..=200).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_larger_than_the_producer_takes_is_refused_and_the_others_are_delivered() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(1);
    let sink = with(config(&cluster, &topic), &[("message.max.bytes", "10000"), ("batch.size", "10000")]).unwrap();
    let large = sink_event(2, Some("large"), Payload::Bytes(vec![0; 20_000].into()));
    let outcomes = sink.deliver(batch_of([event(1, "a"), large, event(3, "b")])).await;
    let failure = failure(&outcomes[1]);
    assert!(failure.permanent && failure.kind == "too_large" && failure.message.contains("20000"), "{failure:?}");
    assert_eq!(cluster.positions(&topic), [1, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_too_large_is_sent_anew_record_by_record_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let sink = with(config(&cluster, &topic), &[("linger.ms", "100")]).unwrap();
    delivered(&sink, events(1..=1)).await;
    // The request with all three, and then one of those with a single record.
    let too_large = RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE;
    fail(&cluster, RDKafkaApiKey::Produce, vec![too_large, too_large]);
    let outcomes = sink.deliver(events(2..=4)).await;
    assert_eq!(outcomes[1..], [Outcome::Delivered, Outcome::Delivered]);
    let failure = failure(&outcomes[0]);
    assert!(failure.permanent && failure.kind == "too_large" && failure.fault == Fault::Event, "{failure:?}");
    assert_eq!(cluster.positions(&topic), [1, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_invalid_record_does_not_fail_those_that_were_sent_with_it_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let sink = open(&cluster, &topic);
    delivered(&sink, events(1..=1)).await;
    fail(&cluster, RDKafkaApiKey::Produce, vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD]);
    delivered(&sink, events(2..=4)).await;
    assert_eq!(cluster.positions(&topic).into_iter().collect::<BTreeSet<_>>(), BTreeSet::from([1, 2, 3, 4]));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_that_pass_lose_nothing_and_keep_the_order_of_a_key_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(2);
    let patient = KafkaConfig { timeout: PATIENCE, ..config(&cluster, &topic) };
    let sink = with(patient, &[("retry.backoff.ms", "10"), ("retry.backoff.max.ms", "50")]).unwrap();
    let passing = [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR__TRANSPORT,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ];
    for round in 0..10 {
        if round % 2 == 0 {
            let errors = (0..=round % 3).flat_map(|_| passing).collect();
            fail(&cluster, RDKafkaApiKey::Produce, errors);
        }
        delivered(&sink, batch_of((0..5).map(|key| event(round * 5 + key + 1, &format!("k{key}"))))).await;
    }
    let mut of_key: HashMap<Vec<u8>, Vec<i64>> = HashMap::new();
    for record in cluster.records(&topic) {
        of_key.entry(record.key.unwrap()).or_default().push(record.headers["ce_sequence"].parse().unwrap());
    }
    assert_eq!(of_key.len(), 5);
    // Brokers know a retry by its number: nothing is there twice.
    assert!(of_key.values().all(|positions| positions.is_sorted_by(|before, after| before < after)), "{of_key:?}");
    let all: BTreeSet<i64> = of_key.into_values().flatten().collect();
    assert_eq!(all, (1..=50).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_stopped_is_replaced_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let sink = open(&cluster, &topic);
    delivered(&sink, events(1..=1)).await;
    fail(&cluster, RDKafkaApiKey::Produce, vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER]);
    // One event: of two, the second may wait for its turn, and then it goes out by the next producer.
    let outcomes = sink.deliver(events(2..=2)).await;
    let failure = failure(&outcomes[0]);
    assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "fatal"), "{failure:?}");
    delivered(&sink, events(2..=3)).await;
    assert_eq!(cluster.positions(&topic), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_does_not_let_the_producer_in_is_the_receivers_fault_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let refused = vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED; 20];
    fail(&cluster, RDKafkaApiKey::InitProducerId, refused);
    let sink = open(&cluster, &topic);
    let outcomes = sink.deliver(events(1..=2)).await;
    for outcome in &outcomes {
        let failure = failure(outcome);
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "unauthorized"), "{failure:?}");
    }
    cluster.on_mock(|mock| mock.clear_request_errors(RDKafkaApiKey::InitProducerId));
    until_delivered(&sink, || events(1..=2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_topic_of_several_that_fails_is_the_fault_of_its_events_on_the_mock() {
    for (error, kind) in [
        (RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART, "unknown_topic"),
        (RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, "topic_unauthorized"),
    ] {
        let cluster = Cluster::mock();
        let (good, bad) = (cluster.create_topic(1), cluster.create_topic(1));
        set_topic_error(&cluster, &bad, error);
        let to = |position, topic: &str| Event { topic: topic.into(), ..event(position, &format!("k{position}")) };
        let sink = open(&cluster, "{topic}");
        for position in [1, 3] {
            let outcomes = sink.deliver(batch_of([to(position, &bad), to(position + 1, &good)])).await;
            let failure = failure(&outcomes[0]);
            assert!(failure.fault == Fault::Event && !failure.permanent && failure.kind == kind, "{failure:?}");
            assert_eq!(outcomes[1], Outcome::Delivered);
        }
        set_topic_error(&cluster, &bad, RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR);
        until_delivered(&sink, || batch_of([to(1, &bad)])).await;
        assert_eq!((cluster.positions(&good), cluster.positions(&bad)), (vec![2, 4], vec![1]));
    }
}

/// Delivers again and again; librdkafka asks for the topic again once a second.
async fn until_delivered(sink: &KafkaSink, batch: impl Fn() -> Batch) {
    let delivered = |outcomes: Vec<Outcome>| outcomes.iter().all(|outcome| *outcome == Outcome::Delivered);
    eventually("it is delivered", async || delivered(sink.deliver(batch()).await).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_topic_that_fails_is_the_receivers_fault_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    set_topic_error(&cluster, &topic, RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    let sink = open(&cluster, &topic);
    let outcomes = sink.deliver(events(1..=1)).await;
    let failed = failure(&outcomes[0]);
    assert_eq!((failed.fault, failed.kind), (Fault::Sink, "unknown_topic"));
    assert!(failed.message.contains(&topic) && failed.message.contains("create it"), "{}", failed.message);
    let checked = sink.check().await.unwrap_err();
    assert_eq!((checked.fault, checked.kind), (Fault::Sink, "unknown_topic"));
    set_topic_error(&cluster, &topic, RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR);
    assert_eq!(sink.check().await, Ok(()));
    until_delivered(&sink, || events(1..=1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_that_are_away_are_the_receivers_fault_and_named() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config =
        KafkaConfig { timeout: KAFKA_TIMEOUT_MIN, ..KafkaConfig::new(nobody.to_string(), "orders".parse().unwrap()) };
    let sink = KafkaSink::new(config, SOURCE).unwrap();
    let began = Instant::now();
    let outcomes = sink.deliver(events(1..=2)).await;
    assert!(began.elapsed() < KAFKA_TIMEOUT_MIN + Duration::from_secs(5), "{:?}", began.elapsed());
    for outcome in &outcomes {
        let failure = failure(outcome);
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "unreachable"), "{failure:?}");
        assert!(failure.message.contains(&nobody.port().to_string()), "{}", failure.message);
    }
    let checked = sink.check().await.unwrap_err();
    assert_eq!((checked.fault, checked.kind), (Fault::Sink, "unreachable"));
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_that_do_not_answer_in_time_are_unclear_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let sink = open(&cluster, &topic);
    delivered(&sink, events(1..=1)).await;
    cluster.on_mock(|mock| mock.broker_round_trip_time(-1, PATIENCE)).unwrap();
    let began = Instant::now();
    let outcomes = sink.deliver(events(2..=3)).await;
    assert!(began.elapsed() < TIMEOUT + Duration::from_secs(1), "{:?}", began.elapsed());
    for outcome in &outcomes {
        let failure = failure(outcome);
        assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "timeout"), "{failure:?}");
    }
    cluster.on_mock(|mock| mock.broker_round_trip_time(-1, Duration::ZERO)).unwrap();
    until_delivered(&sink, || events(2..=3)).await;
}

/// Goes as far as it can without waiting.
fn poll_once<T>(future: &mut BoxFuture<'_, T>) -> Poll<T> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_given_up_takes_back_what_was_not_sent_on_the_mock() {
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let sink = KafkaSink::new(KafkaConfig { timeout: PATIENCE, ..config(&cluster, &topic) }, SOURCE).unwrap();
    delivered(&sink, events(1..=1)).await;
    cluster.on_mock(|mock| mock.broker_down(-1)).unwrap();
    // Another batch shares the producer; it must arrive all the same.
    let mut other = sink.deliver(events(3..=5));
    assert!(poll_once(&mut other).is_pending());
    let mut given_up = sink.deliver(batch_of([event(2, "k")]));
    assert!(poll_once(&mut given_up).is_pending(), "the record is with the producer now");
    drop(given_up);
    cluster.on_mock(|mock| mock.broker_up(-1)).unwrap();
    assert_eq!(tokio::time::timeout(PATIENCE, other).await.unwrap(), vec![Outcome::Delivered; 3]);
    delivered(&sink, batch_of([event(6, "k")])).await;
    assert_eq!(cluster.positions(&topic), [1, 3, 4, 5, 6], "the second one was never sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_sink_has_delivered_everything_and_takes_no_more() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(1);
    let sink = open(&cluster, &topic);
    delivered(&sink, events(1..=3)).await;
    sink.close().await;
    let outcomes = sink.deliver(events(4..=4)).await;
    assert_eq!((failure(&outcomes[0]).fault, failure(&outcomes[0]).kind), (Fault::Sink, "closed"));
    assert_eq!(cluster.positions(&topic), [1, 2, 3]);
}

#[test]
fn what_cannot_work_is_refused_when_the_sink_is_made() {
    let config = || KafkaConfig::new("localhost:9092", "orders".parse().unwrap());
    let refused = |name: &str, value: &str, why: &str| {
        let error = with(config(), &[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(why), "{name}: {error}");
    };
    refused("no.such.property", "1", "No such configuration property");
    refused("linger.ms", "soon", "Invalid value");
    refused("compression.codec", "canary", "\"***\"");
    refused("partitioner", "random", "one partition");
    refused("enable.idempotence", "false", "must be true");
    refused("acks", "1", "must be all or -1");
    refused("compression.type", "zstd", "compression");
    refused("sasl.oauthbearer.method", "oidc", "not supported in this build");
    let kerberos = with(config(), &[("security.protocol", "SASL_SSL"), ("sasl.mechanism", "GSSAPI")]);
    assert!(kerberos.unwrap_err().to_string().contains("GSSAPI"));
    let tls = [("security.protocol", "SASL_SSL"), ("sasl.mechanism", "SCRAM-SHA-512"), ("sasl.username", "u")];
    with(config(), &[&tls[..], &[("sasl.password", "p"), ("compression.type", "lz4")]].concat()).unwrap();
    let wrong = |config: KafkaConfig, why: &str| {
        let error = KafkaSink::new(config, SOURCE).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    wrong(KafkaConfig { timeout: Duration::from_millis(2_999), ..config() }, "2999 ms");
    wrong(KafkaConfig { topic: "no topic".parse().unwrap(), ..config() }, "'no topic' is no topic");
    wrong(KafkaConfig { brokers: String::new(), ..config() }, "names no brokers");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_is_made_connects_to_nothing_yet() {
    let broker = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    broker.set_nonblocking(true).unwrap();
    let config = KafkaConfig::new(broker.local_addr().unwrap().to_string(), "orders".parse().unwrap());
    let sink = KafkaSink::new(KafkaConfig { timeout: KAFKA_TIMEOUT_MIN, ..config }, SOURCE).unwrap();
    sink.close().await;
    assert_eq!(broker.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

/// Keeps what is logged, by all threads: librdkafka has its own.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// The log of this process.
    fn of_process() -> &'static Log {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Log::default();
            tracing::subscriber::set_global_default(log.clone()).unwrap();
            log
        })
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl Visit for Line {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{field}={value:?} "));
            }
        }
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_and_no_payload_is_told_on_the_mock() {
    const PASSWORD: &str = "canary-password";
    const KEY: &str = "canary-private-key";
    const PAYLOAD: &str = "canary-payload";
    let log = Log::of_process();
    let cluster = Cluster::mock();
    let topic = cluster.create_topic(1);
    let properties = [
        ("debug", "all"),
        ("security.protocol", "SASL_PLAINTEXT"),
        ("sasl.mechanism", "PLAIN"),
        ("sasl.username", "canary-user"),
        ("sasl.password", PASSWORD),
    ];
    // The mock knows no SASL: the login fails.
    let sink = with(config(&cluster, &topic), &properties).unwrap();
    let secret = sink_event(1, Some("k"), Payload::Json(format!("\"{PAYLOAD}\"").into()));
    let outcomes = sink.deliver(batch_of([secret])).await;
    let failure = failure(&outcomes[0]);
    assert_eq!(failure.fault, Fault::Sink, "{failure:?}");
    let mut told = vec![format!("{failure:?} {sink:?} {:?}", sink.check().await)];
    let mut config = config(&cluster, &topic);
    config.properties = properties.map(|(name, value)| (name.to_owned(), Secret::new(value))).into_iter().collect();
    told.push(format!("{config:?} {config:#?}"));
    told.push(with(config, &[("ssl.key.pem", KEY), ("security.protocol", "ssl")]).unwrap_err().to_string());
    sink.close().await;
    let log = log.0.lock().unwrap().clone();
    assert!(log.iter().any(|line| line.contains("librdkafka") && line.contains("SASL")), "{log:#?}");
    for line in told.iter().chain(&log) {
        for canary in [PASSWORD, KEY, PAYLOAD, "canary-user"] {
            assert!(!line.contains(canary), "{canary}: {line}");
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the example's consumer to the end of a topic; what it says.
fn consume(cluster: &Cluster, topic: &str, database: &Path) -> String {
    let python = root().join("target/venv/bin/python3");
    let mut command = Command::new(&python);
    command.arg(root().join("examples/python/kafka_consumer.py")).args([cluster.brokers(), topic]);
    let output = command.arg(database).arg("--until-end").output();
    let output = output.unwrap_or_else(|error| panic!("{} cannot be run: {error}", python.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the example failed; `cargo xtask tools` installs what it needs\n{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// What stands in the example's table.
fn orders(database: &Path) -> String {
    let query = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('select key, content from orders order by key'))";
    let output = Command::new("python3").args(["-c", query]).arg(database).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_takes_each_event_once_and_goes_on_where_it_was() {
    let cluster = Cluster::any();
    let topic = cluster.create_topic(2);
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("orders.db");
    let sink = open(&cluster, &topic);
    delivered(&sink, batch_of([event(1, "a"), event(2, "b")])).await;
    delivered(&sink, batch_of([event(3, "a")])).await;
    // A second delivery, as after a crash of the relay.
    delivered(&sink, batch_of([event(2, "b")])).await;
    assert_eq!(consume(&cluster, &topic, &database), "new events: 3, events that were there already: 1\n");
    assert_eq!(orders(&database), "('a', b'{\"n\":3}') ('b', b'{\"n\":2}')");
    delivered(&sink, batch_of([sink_event(4, Some("a"), Payload::None), event(1, "c")])).await;
    let said = consume(&cluster, &topic, &database);
    assert_eq!(
        said, "new events: 1, events that were there already: 1\n",
        "it goes on at its offsets, and knows the first event"
    );
    assert_eq!(orders(&database), "('b', b'{\"n\":2}')", "the tombstone has deleted a key");
}
