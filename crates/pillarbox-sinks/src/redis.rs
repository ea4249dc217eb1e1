mod config;
mod exchange;
mod pubsub;
mod refusal;
mod route;
mod server;
mod stream;

use std::path::PathBuf;
use std::time::Duration;

use crate::Secret;

pub use config::{RedisPubSubConfig, RedisStreamConfig};
pub use pubsub::RedisPubSub;
pub use stream::RedisStream;

/// Which Redis, and how to reach it.
///
/// A connection is made when the first batch comes, is shared by all batches, and is made again when it is broken. Redis Cluster is not
/// supported, nor are certificates of clients.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// `redis://[user:password@]host[:port][/database]`, `rediss://` with TLS, `unix:///path?db=0&user=…&pass=…` for a unix socket. What
    /// is special in a user or a password is percent-encoded. With sentinels, the host does not matter and is left out by writing
    /// `redis://user:password@/0`.
    pub url: Secret,
    /// Sentinels, `host:port` each; none: the server of the URL is talked to. They are spoken to with TLS if the URL says `rediss://`.
    pub sentinels: Vec<String>,
    /// The name of the master that the sentinels watch; needed with sentinels, refused without.
    pub master: Option<String>,
    /// The password of the sentinels themselves. Default: none.
    pub sentinel_password: Option<Secret>,
    /// A file of certificates (PEM) that are trusted instead of the system's; only with `rediss://`.
    pub ca_file: Option<PathBuf>,
    /// How long connecting may take, with all that sentinels are asked, and then the answer to one pipeline of commands. Default: 10 s.
    pub timeout: Duration,
}

/// See [`RedisConfig::timeout`].
const TIMEOUT: Duration = Duration::from_secs(10);

impl RedisConfig {
    /// The server of this URL, with the defaults for all else.
    pub fn new(url: impl Into<Secret>) -> Self {
        RedisConfig {
            url: url.into(),
            sentinels: Vec::new(),
            master: None,
            sentinel_password: None,
            ca_file: None,
            timeout: TIMEOUT,
        }
    }
}
