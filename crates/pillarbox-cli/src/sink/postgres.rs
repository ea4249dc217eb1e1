use std::sync::Arc;

use pillarbox_sinks::{PostgresSink, PostgresSinkConfig};

use super::{Built, required};
use crate::config::SinkSettings;

pub(super) fn build(settings: &SinkSettings, source: String) -> Built {
    let mut config = PostgresSinkConfig::new(required(settings, "url")?, required(settings, "table")?);
    config.create = settings.flag("create").unwrap_or(config.create);
    config.timeout = settings.duration("timeout").unwrap_or(config.timeout);
    Ok(Arc::new(PostgresSink::new(config, source)?))
}
