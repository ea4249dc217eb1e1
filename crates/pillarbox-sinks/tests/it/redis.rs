//! Against real servers: Redis 7 as Debian has it.
mod consumer;
mod faults;
mod login;
mod receivers;
mod sentinel;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pillarbox::sink::{BoxFuture, Outcome, Sink};
use pillarbox::{Event, Failure, Payload};
use pillarbox_sinks::{RedisConfig, RedisPubSub, RedisStream};
use pillarbox_testkit::eventually;
use pillarbox_testkit::redis::Server;
use pillarbox_testkit::sink_suite::{
    Received, ReceiverFeatures, ServerControl, SinkFixture, batch_of, check_sink, sink_event,
};
use receivers::{Subscriber, entries};

const SOURCE: &str = "urn:pillarbox:test";

/// How long something that must happen may take. Only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server that keeps what it acknowledges, and a stream.
pub(crate) struct StreamFixture {
    server: Server,
}

impl StreamFixture {
    pub(crate) fn new() -> Self {
        StreamFixture { server: Server::builder().durable().start().unwrap() }
    }
}

impl SinkFixture for StreamFixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(stream(&self.server.url(), "events"))
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        Box::pin(entries(self.server.url(), "events"))
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { source: Some(SOURCE), ..ReceiverFeatures::default() }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        Some(self)
    }
}

impl ServerControl for StreamFixture {
    fn kill(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.kill() })
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.start().unwrap() })
    }
}

/// A server, and who is subscribed to a channel of it before anything is published.
pub(crate) struct PubSubFixture {
    server: Server,
    subscriber: Subscriber,
}

impl PubSubFixture {
    pub(crate) fn new() -> Self {
        let server = Server::builder().start().unwrap();
        let subscriber = Subscriber::start(&server.url(), "events");
        let subscribed = tokio::runtime::Handle::current();
        tokio::task::block_in_place(|| subscribed.block_on(subscriber.until_subscribed(1)));
        PubSubFixture { server, subscriber }
    }
}

impl SinkFixture for PubSubFixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(pubsub(&self.server.url(), "events"))
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        Box::pin(async {
            let messages = self.subscriber.received(&self.server).await;
            messages.iter().map(|message| Received::from_cloud_event(message).unwrap()).collect()
        })
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { forgets: true, source: Some(SOURCE) }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        Some(self)
    }
}

impl ServerControl for PubSubFixture {
    fn kill(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.kill() })
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.server.start().unwrap();
            self.subscriber.subscribe_again().await;
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_sink_conforms() {
    check_sink(StreamFixture::new).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pubsub_sink_conforms() {
    check_sink(PubSubFixture::new).await;
}

fn stream(url: &str, name: &str) -> RedisStream {
    stream_of(RedisConfig::new(url), name)
}

fn stream_of(config: RedisConfig, name: &str) -> RedisStream {
    RedisStream::new(config, name.parse().unwrap(), SOURCE).unwrap()
}

fn pubsub(url: &str, channel: &str) -> RedisPubSub {
    RedisPubSub::new(RedisConfig::new(url), channel.parse().unwrap(), SOURCE).unwrap()
}

/// A name that no other test uses on the shared server.
fn own_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// An event with a key and a payload of its own.
fn event(position: i64) -> Event {
    sink_event(position, Some(&format!("k{position}")), Payload::Json(format!("{{\"n\":{position}}}").into()))
}

/// An event for a stream or a channel of its own.
fn event_for(position: i64, topic: &str) -> Event {
    Event { topic: topic.into(), ..event(position) }
}

async fn deliver(sink: &dyn Sink, events: impl IntoIterator<Item = Event>) -> Vec<Outcome> {
    let delivering = sink.deliver(batch_of(events));
    tokio::time::timeout(PATIENCE, delivering).await.expect("the sink answers in time")
}

async fn deliver_one(sink: &dyn Sink, event: Event) -> Outcome {
    deliver(sink, [event]).await.remove(0)
}

/// The failure of the only event.
async fn refused(sink: &dyn Sink, event: Event) -> Failure {
    match deliver_one(sink, event).await {
        Outcome::Failed(failure) => failure,
        other => panic!("it should have failed: {other:?}"),
    }
}

/// Delivers an event until it is acknowledged.
async fn insist(sink: &dyn Sink, event: Event) {
    let delivered = async || (deliver_one(sink, event.clone()).await == Outcome::Delivered).then_some(());
    eventually("it is delivered", delivered).await;
}

/// Waits until it is so.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    eventually(what, async || is_so().then_some(())).await;
}

/// The positions of the events in a stream of a server without a login.
async fn positions(server: &Server, name: &str) -> Vec<i64> {
    entries(server.url(), name).await.iter().map(|received| received.id.as_u64_pair().1 as i64).collect()
}
