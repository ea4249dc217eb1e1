use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::{Change, PausedBy};
use pillarbox::engine::EngineConfig;
use pillarbox::sink::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::testing::Capture;
use pillarbox::{Delivery, ErrorKind, Failure, NewEvent, Relay, RelayConfig, RetryPolicy, Subscription};
use pillarbox_testkit::{MemoryLog, MemoryOptions, MemoryStore};
use tokio::sync::watch;
use tokio::time::Instant;

/// A sink whose calls take until the test lets them through, and that knows how many are under way.
#[derive(Clone)]
struct Gate {
    capture: Capture,
    open: Arc<watch::Sender<bool>>,
    calls: Arc<watch::Sender<(usize, usize)>>,
}

impl Gate {
    fn closed() -> Self {
        Gate {
            capture: Capture::new(),
            open: Arc::new(watch::channel(false).0),
            calls: Arc::new(watch::channel((0, 0)).0),
        }
    }

    /// Waits for so many calls to have begun and so many to be under way.
    async fn until(&self, begun: usize, under_way: usize) {
        let mut calls = self.calls.subscribe();
        calls.wait_for(|calls| *calls == (begun, under_way)).await.unwrap();
    }
}

/// A call under way; it is over when this is dropped.
struct Calling<'a>(&'a Gate);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.calls.send_modify(|calls| calls.1 -= 1);
    }
}

impl Sink for Gate {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            self.calls.send_modify(|calls| *calls = (calls.0 + 1, calls.1 + 1));
            let _calling = Calling(self);
            self.open.subscribe().wait_for(|open| *open).await.unwrap();
            self.capture.deliver(batch).await
        })
    }
}

const LEASE: Duration = Duration::from_secs(10);

/// Leases count, as on a server.
fn log() -> MemoryLog {
    MemoryLog::with(MemoryOptions { lock_proves_life: false, ..MemoryOptions::default() })
}

async fn start(log: &MemoryLog, sink: impl Sink) -> Relay {
    let engine = EngineConfig { lease_ttl: LEASE, ..EngineConfig::default() };
    let subscription = Subscription { lanes: 2, ..Subscription::new("s") };
    let config = RelayConfig { engine, retention: None, ..RelayConfig::default() };
    Relay::builder(MemoryStore::new(log)).config(config).subscribe(subscription, Arc::new(sink)).start().await.unwrap()
}

fn publish(log: &MemoryLog, numbers: std::ops::Range<u64>) {
    log.publish(numbers.map(|number| NewEvent::new("a", "t").key("k").json(&number)));
}

fn positions(capture: &Capture) -> Vec<i64> {
    capture.events().iter().map(|event| event.position).collect()
}

async fn joins(log: &MemoryLog, at_least: u64) {
    while log.joins() < at_least {
        tokio::time::advance(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_has_ended_as_an_instance_goes_on_as_another() {
    let (log, capture) = (log(), Capture::new());
    let relay = start(&log, capture.clone()).await;
    publish(&log, 0..3);
    relay.until_idle().await.unwrap();
    let first = relay.instance();
    for round in 1..=3 {
        let before = relay.instance();
        log.kill(before);
        publish(&log, 0..2);
        relay.until_idle().await.unwrap();
        assert!(relay.instance() > before && relay.ready());
        assert_eq!(relay.report().subscriptions["s"].delivered, 2, "in this life");
        assert_eq!(positions(&capture), (1..=3 + 2 * round).collect::<Vec<_>>(), "each once, in order");
    }
    log.bury(relay.instance());
    publish(&log, 0..1);
    relay.until_idle().await.unwrap();
    assert_eq!((positions(&capture).len(), relay.instance() > first), (10, true));
    assert_eq!(log.status().instances.len(), 1, "what it was before is gone");
    relay.drain().await.unwrap();
    assert!(log.status().instances.is_empty());
}

#[tokio::test(start_paused = true)]
async fn calls_at_the_sink_are_given_up_before_joining_again_and_come_again() {
    let (log, gate) = (log(), Gate::closed());
    let relay = start(&log, gate.clone()).await;
    publish(&log, 0..2);
    gate.until(1, 1).await;
    log.fail_joins(Some(ErrorKind::Unavailable));
    log.kill(relay.instance());
    gate.until(1, 0).await;
    joins(&log, 4).await;
    assert!(!relay.ready(), "it is nobody now");
    log.fail_joins(None);
    gate.until(2, 1).await;
    gate.open.send_replace(true);
    relay.until_idle().await.unwrap();
    assert_eq!(positions(&gate.capture), [1, 2]);
    assert!(relay.ready());
}

#[tokio::test(start_paused = true)]
async fn a_drain_or_stop_while_joining_again_ends_cleanly() {
    for drain in [true, false] {
        let (log, capture) = (log(), Capture::new());
        let relay = start(&log, capture.clone()).await;
        log.fail_joins(Some(ErrorKind::Busy));
        log.kill(relay.instance());
        joins(&log, 3).await;
        let began = Instant::now();
        if drain {
            relay.drain().await.unwrap();
        } else {
            relay.stop().await;
        }
        assert!(began.elapsed() < Duration::from_secs(1), "it did not wait for the database");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_takes_no_longer_than_its_grace_whatever_the_sink_and_the_database_do() {
    let grace = RelayConfig::default().shutdown_grace;
    for frozen in [false, true] {
        let (log, gate) = (log(), Gate::closed());
        let relay = start(&log, gate.clone()).await;
        publish(&log, 0..1);
        gate.until(1, 1).await;
        if frozen {
            log.freeze(relay.instance());
        }
        let began = Instant::now();
        relay.drain().await.unwrap();
        let took = began.elapsed();
        assert!(took >= grace / 2 && took <= grace, "frozen: {frozen}: it took {took:?} of {grace:?}");
        gate.until(1, 0).await;
        assert_eq!(log.status().instances.len(), usize::from(frozen), "it says that it leaves if somebody answers");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_under_way_ends_with_the_instance() {
    let (log, gate) = (log(), Gate::closed());
    let relay = start(&log, gate.clone()).await;
    publish(&log, 0..1);
    gate.until(1, 1).await;
    let instance = relay.instance();
    let lose = async {
        tokio::task::yield_now().await;
        log.kill(instance);
    };
    let (drained, ()) = tokio::join!(relay.drain(), lose);
    drained.unwrap();
    gate.until(1, 0).await;
    assert_eq!(log.joins(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_may_not_join_again_ends_and_says_why() {
    let (log, capture) = (log(), Capture::new());
    let relay = start(&log, capture.clone()).await;
    log.fail_joins(Some(ErrorKind::Schema));
    log.kill(relay.instance());
    assert_eq!(relay.failed().await.kind(), ErrorKind::Schema);
    assert!(relay.until_idle().await.is_err() && !relay.ready());
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_cannot_beat_gives_its_calls_up_in_time_and_goes_on_later() {
    let (log, gate) = (log(), Gate::closed());
    let relay = start(&log, gate.clone()).await;
    publish(&log, 0..2);
    gate.until(1, 1).await;
    let instance = relay.instance();
    let cut_off = Instant::now();
    log.freeze(instance);
    gate.until(1, 0).await;
    let waited = cut_off.elapsed();
    assert!(waited > LEASE / 2 && waited < LEASE, "given up after {waited:?}");
    publish(&log, 2..3);
    tokio::time::advance(LEASE * 5).await;
    assert_eq!(*gate.calls.borrow(), (1, 0), "nothing is sent meanwhile");
    log.thaw(instance);
    gate.until(2, 1).await;
    gate.open.send_replace(true);
    relay.until_idle().await.unwrap();
    assert_eq!(positions(&gate.capture), [1, 2, 3], "nobody took its lanes, so it is still the same");
    assert_eq!(relay.instance(), instance);
}

#[tokio::test(start_paused = true)]
async fn where_a_lock_proves_life_a_call_may_take_as_long_as_it_likes() {
    let (log, gate) = (MemoryLog::new(), Gate::closed());
    let relay = start(&log, gate.clone()).await;
    publish(&log, 0..1);
    gate.until(1, 1).await;
    log.freeze(relay.instance());
    tokio::time::advance(LEASE * 5).await;
    gate.open.send_replace(true);
    gate.capture.wait_for(1).await;
    log.thaw(relay.instance());
    relay.until_idle().await.unwrap();
    assert_eq!(*gate.calls.borrow(), (1, 0));
}

/// A sink that wants nothing more until it is mended.
#[derive(Clone)]
struct Gone {
    capture: Capture,
    mended: Arc<watch::Sender<bool>>,
}

impl Sink for Gone {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            if *self.mended.borrow() {
                return self.capture.deliver(batch).await;
            }
            batch.events.iter().map(|_| Outcome::Failed(Failure::gone("410 Gone"))).collect()
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_receiver_that_wants_nothing_more_pauses_the_subscription_until_somebody_resumes_it() {
    let (log, mended) = (log(), Arc::new(watch::channel(false).0));
    let sink = Gone { capture: Capture::new(), mended: mended.clone() };
    let relay = start(&log, sink.clone()).await;
    publish(&log, 0..3);
    relay.until_idle().await.unwrap();
    let status = log.status().subscriptions.remove(0);
    assert_eq!((status.paused, status.paused_by), (true, Some(PausedBy::Receiver)));
    let reason = status.paused_reason.unwrap();
    assert!(reason.starts_with("410 Gone (event "), "it says which event: {reason}");
    assert_eq!((status.pending, status.retrying, status.dead), (3, 0, 0), "no attempt is counted");

    mended.send_replace(true);
    publish(&log, 3..4);
    for _ in 0..100 {
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert!(sink.capture.events().is_empty(), "it does not go on by itself");
    log.change(&Change::Resume("s".into()), false).unwrap();
    sink.capture.wait_for(4).await;
    relay.until_idle().await.unwrap();
    assert_eq!(positions(&sink.capture), [1, 2, 3, 4]);
    let status = log.status().subscriptions.remove(0);
    assert_eq!((status.paused, status.paused_by, status.paused_reason), (false, None, None));
}

/// What a handler is told of each attempt: number, most, whether it is the last, subscription, what the one before failed with.
type Told = (u32, u32, bool, String, Option<String>);

#[tokio::test]
async fn a_handler_is_told_which_attempt_it_is_and_what_the_one_before_failed_with() {
    let log = log();
    log.publish(vec![NewEvent::new("t", "y").key("k").json(&7)]);
    let told = Arc::<std::sync::Mutex<Vec<Told>>>::default();
    let handler = {
        let told = told.clone();
        move |delivery: Delivery| {
            let told = told.clone();
            async move {
                let previous = delivery.previous_error().map(str::to_owned);
                let attempt = delivery.attempt();
                told.lock().unwrap().push((
                    attempt,
                    delivery.max_attempts(),
                    delivery.is_last(),
                    delivery.subscription().to_owned(),
                    previous,
                ));
                // Errors of both kinds become failures.
                let number: u32 = delivery.payload.json()?;
                if attempt == 2 {
                    Err(anyhow::anyhow!("attempt {attempt} of {number}"))?;
                }
                Err(std::io::Error::other("first"))?
            }
        }
    };
    let retry = RetryPolicy { base: Duration::ZERO, jitter: false, ..RetryPolicy::handler() };
    let subscription = Subscription::stream("mailer").lanes(1).retry(retry).max_attempts(3);
    let relay = Relay::builder(MemoryStore::new(&log)).handle(subscription, handler).start().await.unwrap();
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let at =
        |attempt, last, previous: Option<&str>| (attempt, 3, last, "mailer".to_owned(), previous.map(str::to_owned));
    let expected = [at(1, false, None), at(2, false, Some("first")), at(3, true, Some("attempt 2 of 7"))];
    assert_eq!(*told.lock().unwrap(), expected);
}
