use std::sync::Arc;

use pillarbox_sinks::{KafkaConfig, KafkaSink};

use super::{Built, required, template};
use crate::config::SinkSettings;

pub(super) fn build(settings: &SinkSettings, source: String) -> Built {
    let mut config = KafkaConfig::new(required(settings, "brokers")?, template(settings, "topic")?);
    config.timeout = settings.duration("timeout").unwrap_or(config.timeout);
    config.properties = settings.map("properties").map(|(name, value)| (name.to_owned(), value.into())).collect();
    Ok(Arc::new(KafkaSink::new(config, source)?))
}
