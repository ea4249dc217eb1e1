use pillarbox::sink::{Batch, BoxFuture, CloudEvents, Outcome, Sink, SinkFeatures};
use pillarbox::{Event, Failure, Result};
use redis::{Cmd, Value};

use super::RedisConfig;
use super::exchange::{Command, deliver};
use super::refusal::{refusal, strange};
use super::server::Server;
use crate::Template;

/// Publishes to Redis channels: one message per event, a CloudEvents JSON object.
///
/// Redis passes a message on to who is subscribed at that moment and forgets it. `Delivered` means that Redis has done so; a subscriber
/// that is away gets nothing, and Redis does not report this. See [`require_receivers`](RedisPubSub::require_receivers) for the least of it, and
/// [`RedisStream`](crate::RedisStream) for a receiver that may be away.
#[derive(Debug)]
pub struct RedisPubSub {
    server: Server,
    channel: Template,
    require_receivers: bool,
    format: CloudEvents,
}

impl RedisPubSub {
    /// A sink whose events are of this `source`, a URI like `urn:pillarbox:<log_id>`. Checks the configuration and connects to nothing.
    pub fn new(config: RedisConfig, channel: Template, source: impl Into<String>) -> Result<Self> {
        let format = CloudEvents::new(source);
        Ok(RedisPubSub { server: Server::new(&config)?, channel, require_receivers: false, format })
    }

    /// Waits while the channel has no subscriber: the event is not delivered, and no attempt is counted. With placeholders in the channel's
    /// name, the event's key waits alone, and is tried again by the retry policy. Default: off.
    pub fn require_receivers(mut self, require: bool) -> Self {
        self.require_receivers = require;
        self
    }

    /// `message` is room to write in.
    fn publish(&self, event: &Event, message: &mut Vec<u8>) -> std::result::Result<Command, Failure> {
        let channel = self.channel.render(event)?;
        message.clear();
        self.format.write(event, message);
        let mut command = Cmd::with_capacity(3, channel.len() + message.len() + 8);
        command.arg("PUBLISH").arg(&*channel).arg(&*message);
        Ok(Command { command, longest: message.len() })
    }

    fn judge(&self, reply: Value) -> Outcome {
        match reply {
            Value::Int(0) if self.require_receivers => Outcome::Failed(self.no_receivers()),
            Value::Int(_) => Outcome::Delivered,
            Value::ServerError(error) => Outcome::Failed(refusal(&error, &self.channel)),
            _ => strange(&self.channel),
        }
    }

    fn no_receivers(&self) -> Failure {
        let message = format!("there is no subscriber to '{}'; start one", self.channel.as_str());
        // Where events choose their channel, one without a subscriber says nothing of the others.
        let failure = if self.channel.is_constant() { Failure::sink(message) } else { Failure::event(message) };
        Failure { kind: "no_receivers", ..failure }
    }

    /// Whether there is a subscriber. A user who may not ask is let through, and so is a server with subscribers to
    /// patterns: it does not say which patterns.
    async fn check_receivers(&self) -> std::result::Result<(), Failure> {
        let mut subscribers = redis::cmd("PUBSUB");
        subscribers.arg("NUMSUB").arg(self.channel.literal_start());
        match self.server.command(subscribers).await? {
            Value::Array(told) if told.last() == Some(&Value::Int(0)) => {}
            Value::ServerError(error) if error.code() != "NOPERM" => return Err(refusal(&error, &self.channel)),
            _ => return Ok(()),
        }
        let mut patterns = redis::cmd("PUBSUB");
        patterns.arg("NUMPAT");
        match self.server.command(patterns).await? {
            Value::Int(0) => Err(self.no_receivers()),
            _ => Ok(()),
        }
    }
}

impl Sink for RedisPubSub {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let mut message = Vec::new();
            let publish = |event: &Event| self.publish(event, &mut message);
            deliver(&self.server, &batch, publish, |reply| self.judge(reply)).await
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.close() })
    }

    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async {
            self.server.ping().await?;
            if self.require_receivers && self.channel.is_constant() { self.check_receivers().await } else { Ok(()) }
        })
    }
}
