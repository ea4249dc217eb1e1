use pillarbox::sink::{Batch, BoxFuture, CloudEvents, Outcome, Sink, SinkFeatures};
use pillarbox::{Event, Failure, Payload, Result};
use redis::{Cmd, Value};

use super::RedisConfig;
use super::exchange::{Command, deliver};
use super::refusal::{refusal, strange};
use super::server::Server;
use crate::Template;

/// What begins the name of a field that is a CloudEvents attribute.
const PREFIX: &str = "ce_";

/// The field of the payload.
const DATA: &str = "data";

/// What an entry takes beside its payload, roughly; only to reserve room.
const ENTRY_BYTES: usize = 500;
const ENTRY_ARGUMENTS: usize = 32;

/// Appends to Redis streams: one entry an event.
///
/// The fields are the CloudEvents attributes with the prefix `ce_`, then headers under their own names, then `data` with the payload,
/// byte for byte; a tombstone has no `data`. A header whose name is not that of an attribute and cannot be a field (`data`, `ce_…`) is in
/// `ce_headers`, the JSON text of one object. `Delivered` means that the server has added the entry; how safe it is there, its settings
/// for `appendfsync` and replication say.
#[derive(Debug)]
pub struct RedisStream {
    server: Server,
    stream: Template,
    maxlen: Option<u64>,
    format: CloudEvents,
}

impl RedisStream {
    /// A sink whose events are of this `source`, a URI like `urn:pillarbox:<log_id>`. Checks the configuration and connects to nothing.
    pub fn new(config: RedisConfig, stream: Template, source: impl Into<String>) -> Result<Self> {
        Ok(RedisStream { server: Server::new(&config)?, stream, maxlen: None, format: CloudEvents::new(source) })
    }

    /// Keeps about this many entries in each stream, at least 1, and lets Redis delete the oldest, read or not (`MAXLEN ~`). Default:
    /// none, and consumers delete.
    pub fn maxlen(mut self, maxlen: Option<u64>) -> Self {
        self.maxlen = maxlen.map(|maxlen| maxlen.max(1));
        self
    }

    fn add(&self, event: &Event) -> std::result::Result<Command, Failure> {
        let stream = self.stream.render(event)?;
        let mut command = Cmd::with_capacity(ENTRY_ARGUMENTS, event.payload.len() + stream.len() + ENTRY_BYTES);
        command.arg("XADD").arg(&*stream);
        if let Some(maxlen) = self.maxlen {
            command.arg("MAXLEN").arg("~").arg(maxlen);
        }
        command.arg("*");
        let longest = self.add_fields(event, &mut command);
        Ok(Command { command, longest })
    }

    /// Returns the length of the longest.
    fn add_fields(&self, event: &Event, command: &mut Cmd) -> usize {
        let binary = self.format.binary(event, is_field);
        let mut longest = 0;
        let mut field = |name: &[&str], value: &[u8]| {
            command.arg(name.concat()).arg(value);
            longest = longest.max(value.len());
        };
        binary.attributes.iter().for_each(|(name, value)| field(&[PREFIX, name], value.as_bytes()));
        if let Some(content_type) = &binary.content_type {
            field(&[PREFIX, "datacontenttype"], content_type.as_bytes());
        }
        binary.headers.iter().for_each(|(name, value)| field(&[name], value.as_bytes()));
        match &event.payload {
            Payload::Json(text) if text.is_empty() => {}
            Payload::Json(text) => field(&[DATA], text.as_bytes()),
            Payload::Bytes(bytes) => field(&[DATA], bytes),
            Payload::None => {}
        }
        longest
    }

    fn judge(&self, reply: Value) -> Outcome {
        match reply {
            Value::BulkString(_) | Value::SimpleString(_) => Outcome::Delivered,
            Value::ServerError(error) => Outcome::Failed(refusal(&error, &self.stream)),
            _ => strange(&self.stream),
        }
    }

    /// Whether a stream lies under the name, or nothing. A user who may not ask is let through.
    async fn check_type(&self) -> std::result::Result<(), Failure> {
        let mut command = redis::cmd("TYPE");
        command.arg(self.stream.literal_start());
        match self.server.command(command).await? {
            Value::SimpleString(found) if found != "none" && found != "stream" => {
                let name = self.stream.as_str();
                let message = format!("a {found} lies under the key '{name}', no stream; delete it or choose another");
                Err(Failure { kind: "wrong_type", ..Failure::sink(message) })
            }
            Value::ServerError(error) if error.code() != "NOPERM" => Err(refusal(&error, &self.stream)),
            _ => Ok(()),
        }
    }

    /// Whether the server can be written to. A user who may not ask is let through.
    async fn check_role(&self) -> std::result::Result<(), Failure> {
        match self.server.command(redis::cmd("ROLE")).await? {
            Value::Array(role) if role.first() == Some(&Value::BulkString(b"slave".to_vec())) => {
                let message = "this Redis is a replica and takes no writes; name its master, or sentinels that know it";
                Err(Failure { kind: "read_only", ..Failure::sink(message) })
            }
            _ => Ok(()),
        }
    }
}

impl Sink for RedisStream {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move { deliver(&self.server, &batch, |event| self.add(event), |reply| self.judge(reply)).await })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.close() })
    }

    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async {
            self.server.ping().await?;
            self.check_role().await?;
            if self.stream.is_constant() { self.check_type().await } else { Ok(()) }
        })
    }
}

/// Whether a header can be a field under its own name.
fn is_field(name: &str) -> bool {
    !name.is_empty() && name != DATA && !name.starts_with(PREFIX)
}
