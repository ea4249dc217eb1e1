use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;

use pillarbox::sink::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::{Failure, panic_text};

use crate::secret::Redactions;

/// A sink whose failures tell no secret: a server may repeat in its answer what it was told, and a library that panics what it was
/// given.
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
            let count = batch.events.len();
            // The future is made inside, so that a panic before its first await is caught too.
            let delivered = caught(Box::pin(async move { self.inner.deliver(batch).await })).await;
            let outcomes = delivered.unwrap_or_else(|panic| vec![Outcome::Failed(panicked(&panic)); count]);
            let discreet = |outcome| match outcome {
                Outcome::Failed(failure) => Outcome::Failed(self.redacted(failure)),
                other => other,
            };
            outcomes.into_iter().map(discreet).collect()
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }

    /// A panic goes on to `doctor`, which repeats nothing of it.
    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { self.inner.check().await.map_err(|failure| self.redacted(failure)) })
    }
}

/// What the future comes to, or what it said when it panicked.
async fn caught<T>(mut future: BoxFuture<'_, T>) -> Result<T, String> {
    poll_fn(move |context| {
        // After a panic the future is dropped and never looked at again.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic_text(&*panic).to_owned())),
        }
    })
    .await
}

/// As the relay would call it.
fn panicked(said: &str) -> Failure {
    Failure::unclear("panic", format!("the sink panicked: {said}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pillarbox::admin::Operator;
    use pillarbox::{NewEvent, Payload, Relay, Subscription};
    use pillarbox_sqlite::SqliteStore;
    use pillarbox_testkit::eventually;
    use pillarbox_testkit::sink_suite::{batch_of, sink_event};

    use super::*;

    fn discreet(sink: impl Sink) -> Discreet {
        Discreet::new(Arc::new(sink), Redactions::new([("canary".to_owned(), "***".to_owned())]))
    }

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
        let sink = discreet(Blabber);
        assert!(sink.features().one_receiver);
        let outcomes = sink.deliver(batch_of([sink_event(1, None, Payload::None)])).await;
        assert_eq!(outcomes, [Outcome::Failed(Failure::permanent("wrong password ***")), Outcome::Delivered]);
        assert_eq!(sink.check().await, Err(Failure::sink("wrong password ***")));
    }

    /// Panics with what it should not say, before its first await or after it.
    struct Panics {
        at_once: bool,
    }

    impl Sink for Panics {
        fn features(&self) -> SinkFeatures {
            SinkFeatures { one_receiver: true, ..SinkFeatures::default() }
        }

        fn deliver(&self, _: Batch) -> BoxFuture<'_, Vec<Outcome>> {
            assert!(!self.at_once, "cannot log in with canary");
            Box::pin(async {
                tokio::task::yield_now().await;
                panic!("cannot log in with canary")
            })
        }
    }

    #[tokio::test]
    async fn a_panic_is_a_failure_of_each_event_without_the_secret() {
        for at_once in [true, false] {
            let events = [1, 2].map(|position| sink_event(position, None, Payload::None));
            let outcomes = discreet(Panics { at_once }).deliver(batch_of(events)).await;
            let failure = Failure::unclear("panic", "the sink panicked: cannot log in with ***");
            assert_eq!(outcomes, vec![Outcome::Failed(failure); 2], "at once: {at_once}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_relay_stores_of_a_panic_has_no_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("app.db");
        pillarbox_sqlite::migrate(&path).unwrap();
        let store = SqliteStore::open(&path).unwrap();
        store.publish(&[NewEvent::new("orders", "order.placed").key("k")]).await.unwrap();
        let subscription = Subscription { processing_timeout: Duration::from_secs(30), ..Subscription::new("out") };
        let sink = Arc::new(discreet(Panics { at_once: false }));
        let relay = Relay::builder(SqliteStore::open(&path).unwrap()).subscribe(subscription, sink);
        let relay = relay.start().await.unwrap();
        let told = eventually("the panic is told", async || {
            let status = format!("{:?}", store.status().await.unwrap());
            status.contains("the sink panicked").then_some(status)
        });
        let status = told.await;
        assert!(status.contains("cannot log in with ***") && !status.contains("canary"), "{status}");
        relay.drain().await.unwrap();
    }
}
