mod discreet;
#[cfg(feature = "http")]
mod http;
mod into_the_log;
#[cfg(feature = "kafka")]
mod kafka;
mod panic;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod stdout;

use std::fmt;
use std::sync::Arc;

use pillarbox::sink::Sink;
use pillarbox::{Error, Failure};
use pillarbox_sinks::{Chain, FileSink};
use tokio::sync::Notify;

use crate::config::SinkSettings;
use crate::exit::chain;
use discreet::Discreet;
pub(crate) use into_the_log::into_the_log;
pub(crate) use panic::log_panics;

/// A sink, or why there can be none.
pub(crate) type Built = Result<Arc<dyn Sink>, Refusal>;

/// Builds the sink that the user described; nothing is connected to. `closed` is told when standard output has no reader any
/// more.
///
/// What the sink says of a failure is shown and stored: whatever a receiver or a library has put into it, no secret is in it.
pub(crate) fn build(settings: &SinkSettings, source: &str, closed: &Arc<Notify>) -> Built {
    let redactions = settings.redactions();
    panic::hide(&redactions);
    let sink = build_bare(settings, source, closed)?;
    Ok(if redactions.is_empty() { sink } else { Arc::new(Discreet::new(sink, redactions)) })
}

/// What a receiver has answered that was asked whether it would take events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It would.
    Takes,
    /// It is there, and has answered `OPTIONS` with this status; most answer that with anything.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only http receivers answer so"))]
    Status(u16),
}

/// Asks the receiver whether it would take events; none is delivered.
pub(crate) async fn ask(settings: &SinkSettings) -> Result<Result<Answer, Failure>, Refusal> {
    #[cfg(feature = "http")]
    if settings.kind.name == "http" {
        let redactions = settings.redactions();
        panic::hide(&redactions);
        let sink = http::sink(settings, ANY_SOURCE.to_owned())?;
        let redacted = |failure: Failure| Failure { message: redactions.apply(&failure.message), ..failure };
        return Ok(sink.ask().await.map(Answer::Status).map_err(redacted));
    }
    let sink = build(settings, ANY_SOURCE, &Arc::new(Notify::new()))?;
    Ok(sink.check().await.map(|()| Answer::Takes))
}

fn build_bare(settings: &SinkSettings, source: &str, closed: &Arc<Notify>) -> Built {
    let source = || settings.text("source").unwrap_or(source).to_owned();
    match settings.kind.name {
        "stdout" => Ok(Arc::new(stdout::WatchedStdout::new(source(), closed))),
        "file" => {
            let sink = FileSink::new(required(settings, "path")?, source());
            Ok(Arc::new(sink.fsync(settings.flag("fsync").unwrap_or(true))))
        }
        #[cfg(feature = "http")]
        "http" => http::build(settings, source()),
        #[cfg(feature = "kafka")]
        "kafka" => kafka::build(settings, source()),
        #[cfg(feature = "redis")]
        "redis_pubsub" => redis::build_pubsub(settings, source()),
        #[cfg(feature = "redis")]
        "redis_stream" => redis::build_stream(settings, source()),
        #[cfg(feature = "postgres")]
        "postgres" => postgres::build(settings, source()),
        "chain" => build_chain(settings, &source(), closed),
        _ => Err(Refusal(settings.kind.absence())),
    }
}

/// Whether the sink could be built, for those who will not use it.
pub(crate) fn try_to_build(settings: &SinkSettings) -> Result<(), Refusal> {
    build(settings, ANY_SOURCE, &Arc::new(Notify::new())).map(drop)
}

/// The source of sinks that never deliver.
pub(crate) const ANY_SOURCE: &str = "urn:pillarbox:none";

fn build_chain(settings: &SinkSettings, source: &str, closed: &Arc<Notify>) -> Built {
    let step = |step: &SinkSettings| build_bare(step, source, closed).map(|sink| (step.kind.name.to_owned(), sink));
    let steps = settings.chain().iter().map(step).collect::<Result<Vec<_>, Refusal>>()?;
    Ok(Arc::new(Chain::new(steps)?))
}

/// Why a sink cannot be built, and what to do.
#[derive(Debug)]
pub(crate) struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal(chain(&error.into()))
    }
}

fn required<'a>(settings: &'a SinkSettings, key: &'static str) -> Result<&'a str, Refusal> {
    settings.text(key).ok_or_else(|| Refusal(format!("`{key}` is missing")))
}

#[cfg(any(feature = "http", feature = "kafka", feature = "redis"))]
fn template(settings: &SinkSettings, key: &'static str) -> Result<pillarbox_sinks::Template, Refusal> {
    Ok(required(settings, key)?.parse::<pillarbox_sinks::Template>()?)
}
