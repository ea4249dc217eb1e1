use std::sync::Arc;

use pillarbox::Failure;
use pillarbox::sink::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox_sinks::Stdout;
use tokio::sync::Notify;

/// The kind of failure that the standard output sink gives when its reader has ended.
const BROKEN_PIPE: &str = "broken_pipe";

/// Standard output, watched for the end of its reader: `pillarbox run | head` is done, not failed.
pub(super) struct WatchedStdout {
    inner: Stdout,
    closed: Arc<Notify>,
}

impl WatchedStdout {
    pub(super) fn new(source: String, closed: &Arc<Notify>) -> Self {
        WatchedStdout { inner: Stdout::new(source), closed: closed.clone() }
    }
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

    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        self.inner.check()
    }
}
