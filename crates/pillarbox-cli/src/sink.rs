mod discreet;
mod into_the_log;
mod panic;
mod stdout;

use std::fmt;
use std::sync::Arc;

use pillarbox::sink::Sink;
use pillarbox::{Error, Failure};
use pillarbox_sinks::{Chain, StdoutConfig};
#[cfg(feature = "http")]
use pillarbox_sinks::{HttpConfig, HttpSink};
use tokio::sync::Notify;

use crate::config::{Parts, SinkSettings};
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
    if let Some(config) = settings.config_of::<HttpConfig>() {
        let redactions = settings.redactions();
        panic::hide(&redactions);
        let sink = HttpSink::new(config.clone(), ANY_SOURCE)?;
        let redacted = |failure: Failure| Failure { message: redactions.apply(&failure.message), ..failure };
        return Ok(sink.ask().await.map(Answer::Status).map_err(redacted));
    }
    let sink = build(settings, ANY_SOURCE, &Arc::new(Notify::new()))?;
    Ok(sink.check().await.map(|()| Answer::Takes))
}

fn build_bare(settings: &SinkSettings, source: &str, closed: &Arc<Notify>) -> Built {
    let source = settings.source.as_deref().unwrap_or(source).to_owned();
    if settings.config_of::<StdoutConfig>().is_some() {
        return Ok(Arc::new(stdout::WatchedStdout::new(source, closed)));
    }
    match (&settings.parts, settings.config()) {
        (Parts::Chain(steps), _) => build_chain(steps, &source, closed),
        (_, Some(config)) => Ok(config.build(source)?),
        (Parts::Own(_), None) => Err(Refusal("a key that it needs is missing or cannot be read".to_owned())),
        (Parts::Unknown, None) => Err(Refusal(settings.kind.absence())),
    }
}

/// Whether the sink could be built, for those who will not use it.
pub(crate) fn try_to_build(settings: &SinkSettings) -> Result<(), Refusal> {
    build(settings, ANY_SOURCE, &Arc::new(Notify::new())).map(drop)
}

/// The source of sinks that never deliver.
pub(crate) const ANY_SOURCE: &str = "urn:pillarbox:none";

fn build_chain(steps: &[SinkSettings], source: &str, closed: &Arc<Notify>) -> Built {
    let step = |step: &SinkSettings| build_bare(step, source, closed).map(|sink| (step.kind.name.to_owned(), sink));
    let steps = steps.iter().map(step).collect::<Result<Vec<_>, Refusal>>()?;
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
        Refusal(text_of(error))
    }
}

/// An error with its causes.
pub(crate) fn text_of(error: Error) -> String {
    chain(&error.into())
}
