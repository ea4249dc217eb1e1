use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pillarbox_testkit::sink_suite::Received;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::{Message, Offset, TopicPartitionList};
use uuid::Uuid;

/// Names the brokers of a real cluster, `host:port`, to run the tests against it instead of the mock.
const BROKERS_VARIABLE: &str = "PILLARBOX_TEST_KAFKA";

/// How long something may take that needs no time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What the topics of the tests take, more than Kafka's default: an event may have a megabyte.
const MESSAGE_BYTES_MAX: &str = "4194304";

/// Brokers to deliver to.
pub(crate) struct Cluster {
    brokers: String,
    mock: Option<Mock>,
}

impl Cluster {
    /// The real brokers if some are named, or else a mock.
    pub(crate) fn any() -> Self {
        match std::env::var(BROKERS_VARIABLE) {
            Ok(brokers) if !brokers.is_empty() => Cluster { brokers, mock: None },
            _ => Cluster::mock(),
        }
    }

    /// librdkafka's mock of one broker: in this process, but behind a real socket. Real brokers do not fail on demand.
    pub(crate) fn mock() -> Self {
        let mock = Mock::start();
        Cluster { brokers: mock.run(|mock| mock.bootstrap_servers()), mock: Some(mock) }
    }

    pub(crate) fn brokers(&self) -> &str {
        &self.brokers
    }

    pub(crate) fn mocked(&self) -> Option<&Mock> {
        self.mock.as_ref()
    }

    /// Does something with the mock.
    pub(crate) fn on_mock<T: Send + 'static>(&self, job: impl FnOnce(&MockOf) -> T + Send + 'static) -> T {
        self.mock.as_ref().expect("a test of the mock alone").run(job)
    }

    /// A new topic with a name of its own.
    pub(crate) fn create_topic(&self, partitions: i32) -> String {
        let name = format!("pillarbox-test.{}", Uuid::new_v4().simple());
        match &self.mock {
            Some(mock) => {
                let name = name.clone();
                mock.run(move |mock| mock.create_topic(&name, partitions, 1)).unwrap();
            }
            None => self.create_real_topic(&name, partitions),
        }
        name
    }

    fn create_real_topic(&self, name: &str, partitions: i32) {
        let brokers = self.brokers.clone();
        let name = name.to_owned();
        // The tests are async already; a runtime of its own may block.
        let created = std::thread::spawn(move || {
            let admin: AdminClient<DefaultClientContext> =
                ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap();
            let topic = NewTopic::new(&name, partitions, TopicReplication::Fixed(1))
                .set("max.message.bytes", MESSAGE_BYTES_MAX);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
            let results = runtime.block_on(admin.create_topics([&topic], &options)).unwrap();
            assert!(results.iter().all(Result::is_ok), "the topic cannot be created: {results:?}");
        });
        created.join().unwrap();
    }

    /// Everything in a topic, partition by partition.
    pub(crate) fn records(&self, topic: &str) -> Vec<Record> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", "pillarbox-test")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "10")
            .set("fetch.message.max.bytes", MESSAGE_BYTES_MAX)
            .create()
            .unwrap();
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).unwrap();
        let partitions = metadata.topics()[0].partitions().len() as i32;
        assert!(partitions > 0, "{topic} has no partitions");
        let mut assignment = TopicPartitionList::new();
        for partition in 0..partitions {
            assignment.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&assignment).unwrap();
        let mut records = Vec::new();
        let mut left = partitions;
        let given_up = Instant::now() + PATIENCE;
        while left > 0 {
            assert!(Instant::now() < given_up, "{topic} cannot be read to its end");
            match consumer.poll(Duration::from_millis(200)) {
                Some(Ok(message)) => records.push(Record::of(&message)),
                Some(Err(KafkaError::PartitionEOF(_))) => left -= 1,
                Some(Err(error)) => eprintln!("reading {topic}: {error}"),
                None => {}
            }
        }
        records.sort_by_key(|record| (record.partition, record.offset));
        records
    }

    /// The positions of a topic's events, in the order of their partitions.
    pub(crate) fn positions(&self, topic: &str) -> Vec<i64> {
        self.records(topic).iter().map(|record| record.headers["ce_sequence"].parse().unwrap()).collect()
    }
}

/// A record as a consumer gets it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) value: Option<Vec<u8>>,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Record {
    fn of(message: &BorrowedMessage<'_>) -> Self {
        let mut headers = BTreeMap::new();
        for header in message.headers().into_iter().flat_map(|headers| headers.iter()) {
            let value = String::from_utf8(header.value.unwrap().to_vec()).unwrap();
            let before = headers.insert(header.key.to_owned(), value);
            assert!(before.is_none(), "header {} is there twice", header.key);
        }
        Record {
            partition: message.partition(),
            offset: message.offset(),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers,
        }
    }

    /// Puts the event together again.
    pub(crate) fn event(&self) -> Received {
        const TRACING: [&str; 2] = ["traceparent", "tracestate"];
        let (mut attributes, mut others) = (Vec::new(), Vec::new());
        for (name, value) in self.headers.clone() {
            match name.strip_prefix("ce_") {
                Some(attribute) => attributes.push((attribute.to_owned(), value)),
                None if name == "content-type" => attributes.push(("datacontenttype".to_owned(), value)),
                None if name.starts_with("pillarbox-") => {}
                None if TRACING.contains(&name.as_str()) => assert_eq!(self.headers[&format!("ce_{name}")], value),
                None => others.push((name, value)),
            }
        }
        let received = Received::from_binary(attributes, others, self.value.clone()).unwrap();
        assert_eq!(received.key.as_deref().map(str::as_bytes), self.key.as_deref().filter(|key| !key.is_empty()));
        received
    }
}

pub(crate) type MockOf = MockCluster<'static, DefaultProducerContext>;

type Job = Box<dyn FnOnce(&MockOf) + Send>;

/// A mock of brokers, on a thread of its own since it cannot be sent to another.
pub(crate) struct Mock {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Mock {
    fn start() -> Self {
        let (jobs, received) = mpsc::channel::<Job>();
        let thread = std::thread::spawn(move || {
            let mock = MockCluster::new(1).unwrap();
            received.into_iter().for_each(|job| job(&mock));
        });
        Mock { jobs: Some(jobs), thread: Some(thread) }
    }

    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce(&MockOf) -> T + Send + 'static) -> T {
        let (answer, answered) = mpsc::channel();
        let job: Job = Box::new(move |mock| answer.send(job(mock)).unwrap());
        self.jobs.as_ref().unwrap().send(job).unwrap();
        answered.recv_timeout(PATIENCE).expect("the mock answers")
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
