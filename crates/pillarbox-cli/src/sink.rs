use std::sync::Arc;

use anyhow::Result;
use pillarbox::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox_sinks::{FileSink, Stdout};
use tokio::sync::Notify;

use crate::config::SinkSettings;
use crate::exit::{Exit, Stop};

/// The kind of failure that the standard output sink gives when nobody reads it any more.
const BROKEN_PIPE: &str = "broken_pipe";

/// Builds the sink that the user described. `closed` is told when standard output has no reader any more.
pub(crate) fn build(settings: &SinkSettings, source: &str, closed: &Arc<Notify>) -> Result<Arc<dyn Sink>> {
    let source = settings.text("source").unwrap_or(source).to_owned();
    match (settings.kind, settings.text("path")) {
        ("stdout", _) => Ok(Arc::new(WatchedStdout { inner: Stdout::new(source), closed: closed.clone() })),
        ("file", Some(path)) => {
            let sink = FileSink::new(path, source);
            Ok(Arc::new(sink.fsync(settings.flag("fsync").unwrap_or(true))))
        }
        (kind, _) => Err(Stop::with(Exit::Failed, format!("sink kind '{kind}' is not in this build"))),
    }
}

/// Standard output, watched for the end of its reader: `pillarbox run | head` is done, not failed.
struct WatchedStdout {
    inner: Stdout,
    closed: Arc<Notify>,
}

impl Sink for WatchedStdout {
    fn features(&self) -> SinkFeatures {
        self.inner.features()
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let outcomes = self.inner.deliver(batch).await;
            let gone = |outcome: &Outcome| matches!(outcome, Outcome::Failed(failure) if failure.kind == BROKEN_PIPE);
            if outcomes.iter().any(gone) {
                self.closed.notify_one();
            }
            outcomes
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}
