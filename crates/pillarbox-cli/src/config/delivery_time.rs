use std::time::Duration;

use super::duration;
use super::sink::SinkSettings;

/// How long one delivery may take by the time-outs of its sink, and why.
#[derive(Debug, PartialEq)]
pub(super) struct DeliveryTime {
    /// At most.
    pub(super) max: Duration,
    /// How that comes about, for people.
    pub(super) why: String,
}

impl SinkSettings {
    /// None: it has no time-outs, or nobody can say because they could not be read.
    pub(super) fn delivery_time(&self, batch_size: usize) -> Option<DeliveryTime> {
        if !self.chain().is_empty() {
            let steps: Vec<DeliveryTime> =
                self.chain().iter().filter_map(|step| step.delivery_time(batch_size)).collect();
            let why = steps.iter().map(|step| step.why.as_str()).collect::<Vec<_>>().join(", then ");
            return (!steps.is_empty()).then(|| DeliveryTime { max: steps.iter().map(|step| step.max).sum(), why });
        }
        let timeout = self.timeout()?;
        let (kind, written) = (self.kind.name, duration::format(timeout));
        let (more, why) = match kind {
            "http" => self.http_time(timeout, batch_size),
            "redis_pubsub" | "redis_stream" => (
                timeout,
                format!("{kind} may take timeout = \"{written}\" to connect and as long again for the answer"),
            ),
            _ => (Duration::ZERO, format!("{kind} waits timeout = \"{written}\" for its acknowledgements")),
        };
        Some(DeliveryTime { max: timeout.saturating_add(more), why })
    }

    /// The `timeout` that is in force.
    fn timeout(&self) -> Option<Duration> {
        if self.unread.iter().any(|key| key.name == "timeout") {
            return None;
        }
        self.duration("timeout").or_else(|| default_timeout(self.kind.name))
    }

    /// The time until the last request of a batch begins. All of its events may be of one key, and go one after the other.
    #[cfg(feature = "http")]
    fn http_time(&self, timeout: Duration, batch_size: usize) -> (Duration, String) {
        use pillarbox_sinks::HTTP_BATCH_TIME_MAX;
        let written = duration::format(timeout);
        // A batch that is refused is halved until the event is found which the receiver does not want.
        let requests = if self.text("mode") == Some("batched") { 2 * batch_size - 1 } else { batch_size };
        let earlier = timeout.saturating_mul(u32::try_from(requests - 1).unwrap_or(u32::MAX));
        if earlier < HTTP_BATCH_TIME_MAX {
            return (
                earlier,
                format!("http may send {requests} requests one after the other, timeout = \"{written}\" each"),
            );
        }
        let begins = duration::format(HTTP_BATCH_TIME_MAX);
        let why =
            format!("http begins requests of a batch for {begins}, and the last may take timeout = \"{written}\"");
        (HTTP_BATCH_TIME_MAX, why)
    }

    #[cfg(not(feature = "http"))]
    fn http_time(&self, _timeout: Duration, _batch_size: usize) -> (Duration, String) {
        (Duration::ZERO, String::new())
    }
}

/// The `timeout` of a sink that does not say it; none if this build does not have the kind.
fn default_timeout(kind: &str) -> Option<Duration> {
    match kind {
        #[cfg(feature = "http")]
        "http" => Some(pillarbox_sinks::HttpConfig::new("x".parse().ok()?).timeout),
        #[cfg(feature = "kafka")]
        "kafka" => Some(pillarbox_sinks::KafkaConfig::new("x", "x".parse().ok()?).timeout),
        #[cfg(feature = "redis")]
        "redis_pubsub" | "redis_stream" => Some(pillarbox_sinks::RedisConfig::new("x").timeout),
        #[cfg(feature = "postgres")]
        "postgres" => Some(pillarbox_sinks::PostgresSinkConfig::new("x", "x").timeout),
        _ => None,
    }
}
