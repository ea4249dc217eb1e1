use std::sync::Arc;

use pillarbox::{Batch, BoxFuture, Failure, Outcome, Sink, SinkFeatures};

use crate::secret::Redactions;

/// A sink whose failures tell no secret: a server may repeat in its answer what it was told.
pub(super) struct Discreet {
    inner: Arc<dyn Sink>,
    redactions: Redactions,
}

impl Discreet {
    pub(super) fn new(inner: Arc<dyn Sink>, redactions: Redactions) -> Self {
        Discreet { inner, redactions }
    }

    fn redacted(&self, failure: Failure) -> Failure {
        Failure { message: self.redactions.apply(&failure.message), ..failure }
    }
}

impl Sink for Discreet {
    fn features(&self) -> SinkFeatures {
        self.inner.features()
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let outcomes = self.inner.deliver(batch).await.into_iter();
            let discreet = |outcome| match outcome {
                Outcome::Failed(failure) => Outcome::Failed(self.redacted(failure)),
                other => other,
            };
            outcomes.map(discreet).collect()
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }

    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { self.inner.check().await.map_err(|failure| self.redacted(failure)) })
    }
}

#[cfg(test)]
mod tests {
    use pillarbox::Payload;
    use pillarbox_testkit::sink_suite::{batch_of, sink_event};

    use super::*;

    /// Says what it should not.
    struct Blabber;

    impl Sink for Blabber {
        fn features(&self) -> SinkFeatures {
            SinkFeatures { one_receiver: true, ..SinkFeatures::default() }
        }

        fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
            let failed = Outcome::Failed(Failure::permanent("wrong password canary"));
            let outcomes = batch.events.iter().map(|_| failed.clone()).chain([Outcome::Delivered]).collect();
            Box::pin(async { outcomes })
        }

        fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
            Box::pin(async { Err(Failure::sink("wrong password canary")) })
        }
    }

    #[tokio::test]
    async fn a_failure_keeps_its_meaning_and_loses_the_secret() {
        let sink = Discreet::new(Arc::new(Blabber), Redactions::new([("canary".to_owned(), "***".to_owned())]));
        assert!(sink.features().one_receiver);
        let outcomes = sink.deliver(batch_of([sink_event(1, None, Payload::None)])).await;
        assert_eq!(outcomes, [Outcome::Failed(Failure::permanent("wrong password ***")), Outcome::Delivered]);
        assert_eq!(sink.check().await, Err(Failure::sink("wrong password ***")));
    }
}
