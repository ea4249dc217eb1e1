//! One key whose event always fails and of which there is so much that it leaves no room in memory: other keys go on all the same.

use std::time::Duration;

use pillarbox::engine::{EngineConfig, Input, Recovery, RecoveryProfile};
use pillarbox::sink::SinkFeatures;
use pillarbox::{Failure, Mode, NewEvent, Subscription, Timestamp};
use pillarbox_testkit::{Driver, MemoryLog, MemoryOptions, MemoryStore};

/// A good event of another key arrives within so much time on the clock of the test, which no load of the machine slows down: while one key
/// alone fails, others are tried at once, and while a few do, one each second.
const SOON: Duration = Duration::from_secs(2);

/// Goes on until the sink is given the event of key `good`, while everything of key `poison` fails with this.
async fn until_good(log: &MemoryLog, driver: &mut Driver<MemoryStore>, failure: &Failure) {
    let mut passed = Duration::ZERO;
    loop {
        log.set_time(Timestamp(1_000).plus(passed));
        while let Some((_, events)) = driver.at_sink().front() {
            if events.iter().any(|attempt| attempt.event.key.as_deref() == Some("good")) {
                return;
            }
            driver.fail(0, failure).await.unwrap();
        }
        assert!(passed < SOON, "the good event has not come after {passed:?}");
        let moment = Duration::from_millis(100);
        driver.pass(moment).await.unwrap();
        passed += moment;
    }
}

async fn check(spec: Subscription, config: EngineConfig, failure: Failure) {
    let log = MemoryLog::with(MemoryOptions { settle_interval: Duration::from_millis(20), ..MemoryOptions::default() });
    let sink = SinkFeatures { one_by_one: true, one_receiver: true, ..SinkFeatures::default() };
    let spec = Subscription { lanes: 1, workers: 1, batch_size: 1, ..spec };
    let mut driver = Driver::start(MemoryStore::new(&log), config, vec![(spec, sink)]).await.unwrap();
    driver.pass(Duration::from_millis(200)).await.unwrap();
    log.publish((0..200).map(|_| NewEvent::new("t", "y").key("poison")));
    log.publish([NewEvent::new("t", "y").key("good")]);
    driver.go_on(Input::Published).await.unwrap();
    until_good(&log, &mut driver, &failure).await;
}

#[tokio::test]
async fn a_poison_key_that_fills_the_window_of_a_stream_holds_no_other_key_back() {
    let config = EngineConfig { in_flight: 20, ..EngineConfig::default() };
    for failure in [Failure::sink("500"), Failure::unclear("timeout", "no answer")] {
        check(Subscription::new("s"), config.clone(), failure).await;
    }
}

#[tokio::test]
async fn a_poison_key_that_fills_the_window_of_a_queue_holds_no_other_key_back() {
    let config = EngineConfig { in_flight: 20, ..EngineConfig::default() };
    for failure in [Failure::sink("500"), Failure::unclear("timeout", "no answer")] {
        check(Subscription { mode: Mode::Queue, ..Subscription::new("s") }, config.clone(), failure).await;
    }
}

#[tokio::test]
async fn a_poison_claim_leaves_the_only_worker_of_a_queue_to_others() {
    // Every event has a row.
    let recovery = Recovery { profile: RecoveryProfile::Conservative, ..EngineConfig::default().recovery };
    let config = EngineConfig { recovery, ..EngineConfig::default() };
    for failure in [Failure::sink("500"), Failure::unclear("timeout", "no answer")] {
        check(Subscription { mode: Mode::Queue, ..Subscription::new("s") }, config.clone(), failure).await;
    }
}
