//! Sinks of Pillarbox: where a subscription delivers to. One file and one feature each.
//!
//! | feature | sink | |
//! |---|---|---|
//! | `stdout` (default) | `Stdout` | CloudEvents, one JSON object per line |
//! | `file` (default) | `FileSink` | the same, appended to a file that several relays may share |
//! | `http` | `HttpSink` | webhooks, signed as Standard Webhooks |
//! | `kafka` | `KafkaSink` | Kafka and what speaks its protocol |
//! | `redis` | `RedisPubSub`, `RedisStream` | Redis channels and streams |
//! | `postgres` | `PostgresSink` | a table of events in another database |
//! | | [`Chain`] | several of them, one after the other |
mod chain;
pub mod config;
pub mod duration;
#[cfg(feature = "file")]
mod file;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(any(feature = "file", feature = "stdout"))]
mod lines;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod secret;
#[cfg(feature = "stdout")]
mod stdout;
mod template;

pub use chain::{CHAIN_STEPS_MAX, Chain};
pub use config::{ConfigFault, DeliveryTime, SinkConfig};
#[cfg(feature = "file")]
pub use file::{FileConfig, FileSink, LOCK_WAIT_MAX, TAIL_BYTES_MAX};
#[cfg(feature = "http")]
pub use http::{HTTP_BATCH_TIME_MAX, HttpConfig, HttpMode, HttpSink};
#[cfg(feature = "kafka")]
pub use kafka::{KAFKA_TIMEOUT_MAX, KAFKA_TIMEOUT_MIN, KAFKA_TOPIC_BYTES_MAX, KafkaConfig, KafkaSink};
#[cfg(feature = "postgres")]
pub use postgres::{POSTGRES_CONNECTIONS_MAX, PostgresSink, PostgresSinkConfig, TABLE_NAME_BYTES_MAX};
#[cfg(feature = "redis")]
pub use redis::{RedisConfig, RedisPubSub, RedisPubSubConfig, RedisStream, RedisStreamConfig};
pub use secret::Secret;
#[cfg(feature = "stdout")]
pub use stdout::{Stdout, StdoutConfig};
pub use template::{TEMPLATE_BYTES_MAX, Template};

/// Calls a macro with the kinds of sinks that the command offers as features: the name that a user writes, the feature, and the type of
/// the configuration.
#[macro_export]
macro_rules! sink_kinds {
    ($call:ident) => {
        $call! {
            "http" "http" HttpConfig,
            "kafka" "kafka" KafkaConfig,
            "redis_pubsub" "redis" RedisPubSubConfig,
            "redis_stream" "redis" RedisStreamConfig,
            "postgres" "postgres" PostgresSinkConfig,
        }
    };
}
