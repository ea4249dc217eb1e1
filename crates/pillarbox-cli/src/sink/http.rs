use std::sync::Arc;

use pillarbox_sinks::{HttpConfig, HttpMode, HttpSink};

use super::{Built, Refusal, template};
use crate::config::SinkSettings;

pub(super) fn build(settings: &SinkSettings, source: String) -> Built {
    Ok(Arc::new(sink(settings, source)?))
}

/// The sink itself, for those who ask more of it than every sink can tell.
pub(super) fn sink(settings: &SinkSettings, source: String) -> Result<HttpSink, Refusal> {
    let mut config = HttpConfig::new(template(settings, "url")?);
    config.secrets = settings.text("secret").into_iter().chain(settings.texts("secrets")).map(Into::into).collect();
    config.headers = settings.map("headers").map(|(name, value)| (name.to_owned(), value.into())).collect();
    config.mode = match settings.text("mode") {
        Some("binary") => HttpMode::Binary,
        Some("batched") => HttpMode::Batched,
        _ => HttpMode::Structured,
    };
    config.timeout = settings.duration("timeout").unwrap_or(config.timeout);
    config.connect_timeout = settings.duration("connect_timeout").unwrap_or(config.connect_timeout);
    config.concurrency = settings.count("concurrency").map_or(config.concurrency, |count| count as usize);
    let response_bytes_max = settings.count("response_bytes_max");
    config.response_bytes_max = response_bytes_max.map_or(config.response_bytes_max, |count| count as usize);
    config.block_private_addresses = settings.flag("block_private_addresses").unwrap_or(false);
    config.ca_file = settings.text("ca_file").map(Into::into);
    Ok(HttpSink::new(config, source)?)
}
