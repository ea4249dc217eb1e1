use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::Result;
use pillarbox::sink::Sink;
use serde::Deserialize;

use super::{RedisConfig, RedisPubSub, RedisStream, TIMEOUT, route};
use crate::config::{ConfigFault, DeliveryTime, SinkConfig, maybe_count};
use crate::{Secret, Template, duration};

/// The longest stream that can be asked for, in entries.
const MAXLEN_MAX: u64 = 1_000_000_000_000;

/// Which server stands in the same keys for all kinds; `deny_unknown_fields` does not go with `flatten`.
macro_rules! redis_config {
    ($(#[$about:meta])* $name:ident, $($own:tt)*) => {
        $(#[$about])*
        #[derive(Debug, Clone, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($own)*
            /// See [`RedisConfig::url`].
            #[serde(deserialize_with = "crate::config::url")]
            pub url: Secret,
            /// See [`RedisConfig::sentinels`].
            #[serde(default)]
            pub sentinels: Vec<String>,
            /// See [`RedisConfig::master`].
            #[serde(default)]
            pub master: Option<String>,
            /// See [`RedisConfig::sentinel_password`].
            #[serde(default)]
            pub sentinel_password: Option<Secret>,
            /// See [`RedisConfig::ca_file`].
            #[serde(default)]
            pub ca_file: Option<PathBuf>,
            /// See [`RedisConfig::timeout`].
            #[serde(default = "default_timeout", with = "duration::positive")]
            pub timeout: Duration,
        }

        impl $name {
            fn server(&self) -> RedisConfig {
                RedisConfig {
                    url: self.url.clone(),
                    sentinels: self.sentinels.clone(),
                    master: self.master.clone(),
                    sentinel_password: self.sentinel_password.clone(),
                    ca_file: self.ca_file.clone(),
                    timeout: self.timeout,
                }
            }
        }
    };
}

redis_config! {
    /// What a user writes for a [`RedisPubSub`].
    RedisPubSubConfig,
    /// The channel.
    pub channel: Template,
    /// Whether to wait while the channel has no subscriber, see [`RedisPubSub::require_receivers`]. Default: off.
    #[serde(default)]
    pub require_receivers: bool,
}

redis_config! {
    /// What a user writes for a [`RedisStream`].
    RedisStreamConfig,
    /// The stream.
    pub stream: Template,
    /// About how many entries each stream keeps, see [`RedisStream::maxlen`]. Default: all.
    #[serde(default, deserialize_with = "maybe_count::<MAXLEN_MAX, _>")]
    pub maxlen: Option<usize>,
}

fn default_timeout() -> Duration {
    TIMEOUT
}

fn delivery_time(kind: &str, timeout: Duration) -> Option<DeliveryTime> {
    let written = duration::format(timeout);
    let why = format!("{kind} may take timeout = \"{written}\" to connect and as long again for the answer");
    Some(DeliveryTime { max: timeout.saturating_mul(2), why })
}

impl SinkConfig for RedisPubSubConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("url", "redis://localhost"), ("channel", "{topic}")]
    }

    fn faults(&self) -> Vec<ConfigFault> {
        route::faults(&self.server())
    }

    fn delivery_time(&self, _batch_size: usize) -> Option<DeliveryTime> {
        delivery_time("redis_pubsub", self.timeout)
    }

    fn build(&self, source: String) -> Result<Arc<dyn Sink>> {
        let sink = RedisPubSub::new(self.server(), self.channel.clone(), source)?;
        Ok(Arc::new(sink.require_receivers(self.require_receivers)))
    }
}

impl SinkConfig for RedisStreamConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("url", "redis://localhost"), ("stream", "{topic}")]
    }

    fn faults(&self) -> Vec<ConfigFault> {
        route::faults(&self.server())
    }

    fn delivery_time(&self, _batch_size: usize) -> Option<DeliveryTime> {
        delivery_time("redis_stream", self.timeout)
    }

    fn build(&self, source: String) -> Result<Arc<dyn Sink>> {
        let sink = RedisStream::new(self.server(), self.stream.clone(), source)?;
        Ok(Arc::new(sink.maxlen(self.maxlen.map(|entries| entries as u64))))
    }
}
