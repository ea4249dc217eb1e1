use std::sync::Arc;

use pillarbox_sinks::{RedisConfig, RedisPubSub, RedisStream};

use super::{Built, Refusal, required, template};
use crate::config::SinkSettings;

pub(super) fn build_pubsub(settings: &SinkSettings, source: String) -> Built {
    let sink = RedisPubSub::new(server(settings)?, template(settings, "channel")?, source)?;
    Ok(Arc::new(sink.require_receivers(settings.flag("require_receivers").unwrap_or(false))))
}

pub(super) fn build_stream(settings: &SinkSettings, source: String) -> Built {
    let sink = RedisStream::new(server(settings)?, template(settings, "stream")?, source)?;
    Ok(Arc::new(sink.maxlen(settings.count("maxlen"))))
}

fn server(settings: &SinkSettings) -> Result<RedisConfig, Refusal> {
    let mut config = RedisConfig::new(required(settings, "url")?);
    config.sentinels = settings.texts("sentinels").map(str::to_owned).collect();
    config.master = settings.text("master").map(str::to_owned);
    config.sentinel_password = settings.text("sentinel_password").map(Into::into);
    config.ca_file = settings.text("ca_file").map(Into::into);
    config.timeout = settings.duration("timeout").unwrap_or(config.timeout);
    Ok(config)
}
