use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use pillarbox::sink::Sink;
use pillarbox_sinks::{KafkaConfig, KafkaSink};
use rdkafka::ClientConfig;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{DefaultProducerContext, FutureProducer, FutureRecord};
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::Result;
use crate::latency;
use crate::process::Figures;
use crate::throughput::{SOURCE, binary, events, pipelined};

const PARTITIONS: i32 = 8;
const PATIENCE: Duration = Duration::from_secs(30);

/// librdkafka's mock cluster, in this process; or the broker that `PILLARBOX_TEST_KAFKA` names.
pub(crate) struct Cluster {
    mock: Option<MockCluster<'static, DefaultProducerContext>>,
    brokers: String,
    topics: AtomicUsize,
}

impl Cluster {
    pub(crate) fn start() -> Result<Cluster> {
        if let Ok(brokers) = std::env::var("PILLARBOX_TEST_KAFKA") {
            return Ok(Cluster { mock: None, brokers, topics: AtomicUsize::new(0) });
        }
        let mock = MockCluster::new(3)?;
        Ok(Cluster { brokers: mock.bootstrap_servers(), mock: Some(mock), topics: AtomicUsize::new(0) })
    }

    /// A topic of its own, `BROKERS/TOPIC`.
    pub(crate) fn place(&self) -> Result<String> {
        let topic = format!("bench-{}-{}", std::process::id(), self.topics.fetch_add(1, Ordering::Relaxed));
        self.mock.iter().try_for_each(|mock| mock.create_topic(&topic, PARTITIONS, 1))?;
        Ok(format!("{}/{topic}", self.brokers))
    }
}

fn parts(place: &str) -> Result<(&str, &str)> {
    place.split_once('/').ok_or_else(|| "the place is BROKERS/TOPIC".into())
}

pub(crate) fn sink(place: &str) -> Result<Arc<dyn Sink>> {
    let (brokers, topic) = parts(place)?;
    Ok(Arc::new(KafkaSink::new(KafkaConfig::new(brokers, topic.parse()?), SOURCE)?))
}

/// A producer with the same promises.
fn producer(brokers: &str) -> Result<FutureProducer> {
    Ok(ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("linger.ms", "0")
        .create()?)
}

struct Message {
    key: String,
    headers: OwnedHeaders,
    payload: Vec<u8>,
}

fn messages(count: usize) -> Vec<Message> {
    let message = |event| {
        let (fields, payload) = binary(&event, "ce_");
        let header = |headers: OwnedHeaders, (key, value): &(String, String)| {
            headers.insert(Header { key, value: Some(value.as_bytes()) })
        };
        let headers = fields.iter().fold(OwnedHeaders::new(), header);
        Message { key: event.key.as_deref().unwrap_or_default().to_owned(), headers, payload }
    };
    events(count).map(message).collect()
}

async fn send(producer: &FutureProducer, topic: &str, message: Message) -> Result<()> {
    let record = FutureRecord::to(topic).key(&message.key).payload(&message.payload).headers(message.headers);
    producer.send(record, PATIENCE).await.map_err(|(error, _)| error)?;
    Ok(())
}

pub(crate) async fn bare(place: &str, count: usize) -> Result<Figures> {
    let (brokers, topic) = parts(place)?;
    let (producer, topic) = (producer(brokers)?, topic.to_owned());
    pipelined(messages(count), move |batch| {
        let (producer, topic) = (producer.clone(), topic.clone());
        async move { try_join_all(batch.into_iter().map(|message| send(&producer, &topic, message))).await.map(drop) }
    })
    .await
}

pub(crate) async fn latency(place: &str, samples: usize) -> Result<Figures> {
    let arrivals = consume(place)?;
    latency::relay(sink(place)?, arrivals, samples).await
}

pub(crate) async fn latency_bare(place: &str, samples: usize) -> Result<Figures> {
    let arrivals = consume(place)?;
    let (brokers, topic) = parts(place)?;
    let producer = producer(brokers)?;
    let mut messages = messages(samples + 1_000).into_iter();
    latency::sample(samples, arrivals, |_| {
        let (producer, message) = (producer.clone(), messages.next());
        async move {
            let began = Instant::now();
            send(&producer, topic, message.ok_or("there are no more messages")?).await?;
            Ok(began)
        }
    })
    .await
}

/// A consumer that tells when something came.
fn consume(place: &str) -> Result<UnboundedReceiver<Instant>> {
    let (brokers, topic) = parts(place)?;
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "bench")
        .set("fetch.wait.max.ms", "5")
        .set("fetch.error.backoff.ms", "5")
        .create()?;
    let mut partitions = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        partitions.add_partition_offset(topic, partition, Offset::Beginning)?;
    }
    consumer.assign(&partitions)?;
    let (sender, arrivals) = unbounded_channel();
    tokio::spawn(async move {
        while consumer.recv().await.is_ok() {
            // Nobody listens after the last sample.
            let _ = sender.send(Instant::now());
        }
    });
    Ok(arrivals)
}
