use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use pillarbox::Event;
use pillarbox::sink::Sink;
use pillarbox_sinks::{RedisConfig, RedisPubSub, RedisStream};
use redis::aio::MultiplexedConnection;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::Result;
use crate::latency;
use crate::process::Figures;
use crate::throughput::{SOURCE, binary, events, pipelined, structured};

const STREAM: &str = "bench-stream";
const CHANNEL: &str = "bench-channel";

/// What `XREAD` answers: of each stream its entries, of each entry its id and its fields.
type Entries = Vec<(String, Vec<(String, Vec<redis::Value>)>)>;

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Stream,
    PubSub,
}

pub(crate) fn stream(url: &str) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(RedisStream::new(RedisConfig::new(url), STREAM.parse()?, SOURCE)?))
}

pub(crate) fn pubsub(url: &str) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(RedisPubSub::new(RedisConfig::new(url), CHANNEL.parse()?, SOURCE)?))
}

/// Forgets what an earlier measurement has left.
pub(crate) async fn clear(url: &str) -> Result<()> {
    let _: redis::Value = redis::cmd("FLUSHALL").query_async(&mut connect(url).await?).await?;
    Ok(())
}

/// What is sent of an event, made before.
enum Message {
    Entry(Vec<(String, String)>, Vec<u8>),
    Published(Vec<u8>),
}

impl Message {
    fn of(event: &Event, kind: Kind) -> Message {
        match kind {
            Kind::Stream => {
                let (fields, data) = binary(event, "ce_");
                Message::Entry(fields, data)
            }
            Kind::PubSub => Message::Published(structured(event)),
        }
    }

    fn command(&self) -> redis::Cmd {
        match self {
            Message::Entry(fields, data) => {
                let mut command = redis::cmd("XADD");
                command.arg(STREAM).arg("*");
                for (name, value) in fields {
                    command.arg(name).arg(value);
                }
                command.arg("data").arg(data);
                command
            }
            Message::Published(message) => {
                let mut command = redis::cmd("PUBLISH");
                command.arg(CHANNEL).arg(message);
                command
            }
        }
    }
}

fn messages(count: usize, kind: Kind) -> Vec<Message> {
    events(count).map(|event| Message::of(&event, kind)).collect()
}

async fn connect(url: &str) -> Result<MultiplexedConnection> {
    Ok(redis::Client::open(url)?.get_multiplexed_async_connection().await?)
}

pub(crate) async fn bare(url: &str, count: usize, kind: Kind) -> Result<Figures> {
    let connection = connect(url).await?;
    pipelined(messages(count, kind), move |batch| {
        let mut connection = connection.clone();
        async move {
            let mut pipeline = redis::Pipeline::with_capacity(batch.len());
            for message in &batch {
                pipeline.add_command(message.command());
            }
            let _: Vec<redis::Value> = pipeline.query_async(&mut connection).await?;
            Ok(())
        }
    })
    .await
}

pub(crate) async fn latency(url: &str, samples: usize, kind: Kind) -> Result<Figures> {
    let arrivals = consume(url, kind).await?;
    let sink = match kind {
        Kind::Stream => stream(url)?,
        Kind::PubSub => pubsub(url)?,
    };
    latency::relay(sink, arrivals, samples).await
}

pub(crate) async fn latency_bare(url: &str, samples: usize, kind: Kind) -> Result<Figures> {
    let arrivals = consume(url, kind).await?;
    let connection = connect(url).await?;
    let mut messages = messages(samples + 1_000, kind).into_iter();
    latency::sample(samples, arrivals, |_| {
        let (mut connection, message) = (connection.clone(), messages.next());
        async move {
            let began = Instant::now();
            let message = message.ok_or("there are no more messages")?;
            let _: redis::Value = message.command().query_async(&mut connection).await?;
            Ok(began)
        }
    })
    .await
}

/// A consumer that tells when something came.
async fn consume(url: &str, kind: Kind) -> Result<UnboundedReceiver<Instant>> {
    let (sender, arrivals) = unbounded_channel();
    let client = redis::Client::open(url)?;
    match kind {
        Kind::PubSub => {
            let mut subscriber = client.get_async_pubsub().await?;
            subscriber.subscribe(CHANNEL).await?;
            tokio::spawn(async move {
                let mut messages = subscriber.on_message();
                while messages.next().await.is_some() {
                    // Nobody listens after the last sample.
                    let _ = sender.send(Instant::now());
                }
            });
        }
        Kind::Stream => {
            let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            tokio::spawn(async move {
                let mut last = "0".to_owned();
                loop {
                    let mut read = redis::cmd("XREAD");
                    read.arg(&["BLOCK", "0", "STREAMS", STREAM, &last]);
                    let read: redis::RedisResult<Entries> = read.query_async(&mut connection).await;
                    let Ok(entries) = read else { return };
                    for (id, _) in entries.into_iter().flat_map(|(_, entries)| entries) {
                        let _ = sender.send(Instant::now());
                        last = id;
                    }
                }
            });
        }
    }
    Ok(arrivals)
}
