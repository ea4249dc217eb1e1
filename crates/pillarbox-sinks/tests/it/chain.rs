use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use pillarbox::sink::{Batch, BoxFuture, Fault, Outcome, Sink, SinkFeatures};
use pillarbox::{Event, Failure, Payload};
use pillarbox_sinks::{CHAIN_STEPS_MAX, Chain};
use pillarbox_testkit::sink_suite::{batch_of, sink_event};

/// A step that writes down what it gets and fails what it is told to. It stops a key at its first failure.
struct Step {
    features: SinkFeatures,
    /// Failures by position; each happens once.
    failures: Mutex<HashMap<i64, Failure>>,
    got: Mutex<Vec<i64>>,
    calls: Mutex<Vec<&'static str>>,
}

impl Step {
    fn new(failures: impl IntoIterator<Item = (i64, Failure)>) -> Arc<Self> {
        Step::with(SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }, failures)
    }

    fn with(features: SinkFeatures, failures: impl IntoIterator<Item = (i64, Failure)>) -> Arc<Self> {
        let failures = Mutex::new(failures.into_iter().collect());
        Arc::new(Step { features, failures, got: Mutex::default(), calls: Mutex::default() })
    }

    fn got(&self) -> Vec<i64> {
        self.got.lock().unwrap().clone()
    }

    fn answer(&self, batch: &Batch) -> Vec<Outcome> {
        let mut stopped = HashSet::new();
        let mut answer = |event: &Event| {
            if event.key.as_ref().is_some_and(|key| stopped.contains(key)) {
                return Outcome::NotTried;
            }
            if let Some(failure) = self.failures.lock().unwrap().remove(&event.position) {
                stopped.extend(event.key.clone());
                return Outcome::Failed(failure);
            }
            self.got.lock().unwrap().push(event.position);
            Outcome::Delivered
        };
        batch.events.iter().map(|attempt| answer(&attempt.event)).collect()
    }
}

impl Sink for Step {
    fn features(&self) -> SinkFeatures {
        self.features
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        self.calls.lock().unwrap().push("deliver");
        Box::pin(async move { self.answer(&batch) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.calls.lock().unwrap().push("close");
        Box::pin(async {})
    }

    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        self.calls.lock().unwrap().push("check");
        let failure = self.failures.lock().unwrap().remove(&0);
        Box::pin(async move { failure.map_or(Ok(()), Err) })
    }
}

/// A chain of these steps, named a, b, c.
fn chain(steps: &[Arc<Step>]) -> Chain {
    let named = |(step, name): (&Arc<Step>, &str)| (name.to_owned(), step.clone() as Arc<dyn Sink>);
    Chain::new(steps.iter().zip(["a", "b", "c"]).map(named).collect()).unwrap()
}

/// Events with positions from 1 and these keys.
fn events(keys: &[&str]) -> Batch {
    let event = |(at, key): (usize, &&str)| sink_event(at as i64 + 1, Some(key), Payload::None);
    batch_of(keys.iter().enumerate().map(event))
}

fn told(outcomes: &[Outcome]) -> Vec<&str> {
    let told = |outcome: &Outcome| match outcome {
        Outcome::Delivered => "delivered",
        Outcome::NotTried => "not tried",
        Outcome::Failed(_) => "failed",
    };
    outcomes.iter().map(told).collect()
}

#[test]
fn a_chain_has_a_few_steps_that_do_not_settle() {
    let refusal = |steps: Vec<Arc<Step>>| {
        let steps = steps.into_iter().map(|step| ("x".to_owned(), step as Arc<dyn Sink>)).collect();
        Chain::new(steps).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let some = |count| (0..count).map(|_| Step::new([])).collect::<Vec<_>>();
    assert!(refusal(some(0)).contains("at least one"));
    assert_eq!(refusal(some(CHAIN_STEPS_MAX)), "");
    assert!(refusal(some(CHAIN_STEPS_MAX + 1)).contains(&CHAIN_STEPS_MAX.to_string()));
    let settles = Step::with(SinkFeatures { settles: true, ..SinkFeatures::default() }, []);
    assert!(refusal(vec![Step::new([]), settles]).starts_with("step 2 (x) settles"));
}

#[test]
fn a_chain_can_do_what_its_steps_can() {
    let plain = SinkFeatures::default();
    let ordered = SinkFeatures { ordered_batch: true, ..plain };
    let of = |features: [SinkFeatures; 2]| chain(&features.map(|features| Step::with(features, []))).features();
    assert!(of([ordered, ordered]).ordered_batch);
    assert!(!of([ordered, plain]).ordered_batch);
    assert!(of([plain, SinkFeatures { one_by_one: true, ..plain }]).one_by_one);
    assert!(of([plain, SinkFeatures { one_receiver: true, ..plain }]).one_receiver);
    assert_eq!(of([plain, plain]), plain);
}

#[tokio::test]
async fn what_a_step_refused_goes_no_further_and_holds_back_its_key_alone() {
    let steps = [Step::new([(1, Failure::event("no"))]), Step::new([]), Step::new([])];
    let outcomes = chain(&steps).deliver(events(&["a", "b", "a", "b"])).await;
    assert_eq!(told(&outcomes), ["failed", "delivered", "not tried", "delivered"]);
    assert!(steps.iter().all(|step| step.got() == [2, 4]));
}

#[tokio::test]
async fn a_later_step_fails_by_its_name_and_nothing_else_is_changed() {
    let failure = Failure {
        retry_after: Some(std::time::Duration::from_secs(7)),
        kind: "overloaded",
        ..Failure::gone("the broker has gone")
    };
    let steps = [Step::new([]), Step::new([(1, failure.clone())]), Step::new([])];
    let outcomes = chain(&steps).deliver(events(&["a", "b", "a"])).await;
    assert_eq!(told(&outcomes), ["failed", "delivered", "not tried"]);
    let message = "step 2 (b): the broker has gone".to_owned();
    assert_eq!(outcomes[0], Outcome::Failed(Failure { message, ..failure }));
    assert_eq!((steps[0].got(), steps[1].got(), steps[2].got()), (vec![1, 2, 3], vec![2], vec![2]));
}

#[tokio::test]
async fn what_comes_again_goes_through_all_steps_in_order() {
    let steps = [Step::new([]), Step::new([(1, Failure::unclear("timeout", "no answer"))])];
    let chain = chain(&steps);
    assert_eq!(told(&chain.deliver(events(&["a", "a"])).await), ["failed", "not tried"]);
    assert_eq!(told(&chain.deliver(events(&["a", "a"])).await), ["delivered", "delivered"]);
    assert_eq!((steps[0].got(), steps[1].got()), (vec![1, 2, 1, 2], vec![1, 2]));
}

#[tokio::test]
async fn failures_in_two_steps_are_told_each_by_its_own() {
    let steps = [Step::new([(1, Failure::permanent("bad"))]), Step::new([(2, Failure::event("worse"))])];
    let outcomes = chain(&steps).deliver(events(&["a", "b", "a", "b", "c"])).await;
    assert_eq!(told(&outcomes), ["failed", "failed", "not tried", "not tried", "delivered"]);
    let message = |at: usize| match &outcomes[at] {
        Outcome::Failed(failure) => failure.message.as_str(),
        other => panic!("{other:?}"),
    };
    assert_eq!((message(0), message(1)), ("step 1 (a): bad", "step 2 (b): worse"));
    assert_eq!(steps[1].got(), [5]);
}

/// Answers too little, and lets a key go on behind an event for which it did not answer.
struct Careless;

impl Sink for Careless {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, _: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async { vec![Outcome::NotTried, Outcome::Delivered, Outcome::Delivered] })
    }
}

#[tokio::test]
async fn a_careless_step_does_not_break_the_order() {
    let last = Step::new([]);
    let steps: Vec<(String, Arc<dyn Sink>)> =
        vec![("careless".to_owned(), Arc::new(Careless)), ("last".to_owned(), last.clone())];
    let outcomes = Chain::new(steps).unwrap().deliver(events(&["a", "a", "b", "c"])).await;
    assert_eq!(told(&outcomes), ["not tried", "not tried", "delivered", "not tried"]);
    assert_eq!(last.got(), [3]);
}

#[tokio::test]
async fn no_step_is_called_for_nothing() {
    let steps = [Step::new([(1, Failure::sink("down"))]), Step::new([])];
    let chain = chain(&steps);
    assert!(chain.deliver(batch_of([])).await.is_empty());
    assert!(steps[0].calls.lock().unwrap().is_empty());
    assert_eq!(told(&chain.deliver(events(&["a", "a"])).await), ["failed", "not tried"]);
    assert!(steps[1].calls.lock().unwrap().is_empty());
}

#[tokio::test]
async fn all_steps_are_checked_and_closed() {
    let steps = [Step::new([]), Step::new([(0, Failure::sink("down"))])];
    let chain = chain(&steps);
    let failure = chain.check().await.unwrap_err();
    assert_eq!((failure.fault, failure.message.as_str()), (Fault::Sink, "step 2 (b): down"));
    assert_eq!(chain.check().await, Ok(()));
    chain.close().await;
    assert!(steps.iter().all(|step| *step.calls.lock().unwrap() == ["check", "check", "close"]));
}

#[cfg(all(feature = "file", feature = "postgres"))]
mod stores {
    use pillarbox_sinks::FileSink;
    use pillarbox_testkit::sink_suite::{Received, ReceiverFeatures, SinkFixture, check_sink};
    use tempfile::TempDir;
    use tokio::sync::Notify;

    use super::*;
    use crate::postgres::{Place, SOURCE};

    /// An event store, then a second one, then a file.
    struct Fixture {
        place: Place,
        directory: TempDir,
        /// Whose events are looked at.
        looks_at: &'static str,
    }

    impl Fixture {
        fn new(looks_at: &'static str) -> Self {
            Fixture { place: Place::new(), directory: tempfile::tempdir().unwrap(), looks_at }
        }

        fn chain(&self) -> Chain {
            let file = FileSink::new(self.directory.path().join("events.jsonl"), SOURCE);
            let steps: Vec<(String, Arc<dyn Sink>)> = vec![
                ("postgres".to_owned(), Arc::new(self.place.open_table("events"))),
                ("postgres".to_owned(), Arc::new(self.place.open_table("copies"))),
                ("file".to_owned(), Arc::new(file)),
            ];
            Chain::new(steps).unwrap()
        }

        fn lines(&self) -> Vec<Received> {
            let text = std::fs::read_to_string(self.directory.path().join("events.jsonl")).unwrap_or_default();
            text.lines().map(|line| Received::from_cloud_event(line).unwrap()).collect()
        }
    }

    impl SinkFixture for Fixture {
        fn sink(&self) -> Arc<dyn Sink> {
            Arc::new(self.chain())
        }

        fn received(&self) -> BoxFuture<'_, Vec<Received>> {
            match self.looks_at {
                "file" => Box::pin(async { self.lines() }),
                table => Box::pin(self.place.received_in(table)),
            }
        }

        fn features(&self) -> ReceiverFeatures {
            ReceiverFeatures { forgets: false, source: Some(SOURCE) }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_chain_conforms_at_each_of_its_steps() {
        for step in ["events", "copies", "file"] {
            check_sink(|| Fixture::new(step)).await;
        }
    }

    #[tokio::test]
    async fn a_failure_between_two_steps_is_repeated_without_a_second_row() {
        let fixture = Fixture::new("events");
        let chain = fixture.chain();
        assert_eq!(told(&chain.deliver(events(&["a"])).await), ["delivered"]);
        fixture.place.sql("alter table copies add constraint later check (sequence <> 2)");
        let batch = || events(&["a", "b", "b", "c"]);
        let outcomes = chain.deliver(batch()).await;
        assert_eq!(told(&outcomes), ["delivered", "failed", "not tried", "delivered"]);
        assert!(matches!(&outcomes[1], Outcome::Failed(failure) if failure.message.starts_with("step 2 (postgres): ")));
        assert_eq!(fixture.place.positions_in("events"), [1, 2, 3, 4]);
        assert_eq!(fixture.place.positions_in("copies"), [1, 4]);
        fixture.place.sql("alter table copies drop constraint later");
        assert_eq!(told(&chain.deliver(batch()).await), ["delivered"; 4]);
        assert_eq!(fixture.place.positions_in("events"), [1, 2, 3, 4]);
        assert_eq!(fixture.place.positions_in("copies"), [1, 4, 2, 3]);
    }

    /// A relay that is killed after the first step has acknowledged leaves as much as a call that is dropped there.
    #[tokio::test]
    async fn a_crash_between_two_steps_is_repeated_without_a_second_row() {
        struct Never(Notify);
        impl Sink for Never {
            fn features(&self) -> SinkFeatures {
                SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
            }

            fn deliver(&self, _: Batch) -> BoxFuture<'_, Vec<Outcome>> {
                self.0.notify_one();
                Box::pin(std::future::pending())
            }
        }
        let fixture = Fixture::new("events");
        let (first, never) = (Arc::new(fixture.place.open_table("events")), Arc::new(Never(Notify::new())));
        let crashed = Chain::new(vec![("store".to_owned(), first), ("never".to_owned(), never.clone())]).unwrap();
        tokio::select! {
            outcomes = crashed.deliver(events(&["a", "a"])) => panic!("the second step never answers: {outcomes:?}"),
            () = never.0.notified() => {}
        }
        assert_eq!(fixture.place.positions_in("events"), [1, 2]);
        assert_eq!(told(&fixture.chain().deliver(events(&["a", "a"])).await), ["delivered"; 2]);
        assert_eq!(fixture.place.positions_in("events"), [1, 2]);
        assert_eq!(fixture.lines().len(), 2);
    }
}
