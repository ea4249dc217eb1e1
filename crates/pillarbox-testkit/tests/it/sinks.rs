use std::collections::BTreeSet;
use std::sync::Mutex;

use pillarbox::admin::Operator;
use pillarbox::{NewEvent, Position};
use pillarbox_testkit::order::OrderedLog;
use pillarbox_testkit::sink_chaos::{ChaosRun, EVENTS, run_chaos};
use pillarbox_testkit::sink_suite::{examine_sink, sink_cases};
use pillarbox_testkit::store_suite::SuiteReport;
use pillarbox_testkit::{BrokenSink, Committed, MemoryLog, MemoryReceiver, MemoryStore};

async fn examine(broken: Option<BrokenSink>) -> SuiteReport {
    examine_sink(|| MemoryReceiver::new(broken)).await
}

#[tokio::test(start_paused = true)]
async fn the_sound_sink_passes_every_case() {
    let report = examine(None).await;
    report.assert_sound();
    assert_eq!(report.skipped, Vec::<&str>::new());
}

#[tokio::test(start_paused = true)]
async fn every_broken_sink_fails_and_every_case_can_fail() {
    let mut noticed = BTreeSet::new();
    for broken in BrokenSink::ALL {
        let report = examine(Some(broken)).await;
        println!("{broken:?}: {report}");
        assert!(!report.failed.is_empty(), "the suite does not notice {broken:?}");
        noticed.extend(report.failed.iter().map(|(name, _)| *name));
    }
    let idle: Vec<&str> = sink_cases().map(|case| case.name).filter(|name| !noticed.contains(name)).collect();
    assert_eq!(idle, Vec::<&str>::new(), "no broken sink fails these");
}

/// A log in memory, and where its events are.
#[derive(Default)]
struct Log {
    log: MemoryLog,
    published: Mutex<Vec<Position>>,
}

impl OrderedLog for Log {
    type Store = MemoryStore;

    async fn store(&self) -> MemoryStore {
        MemoryStore::new(&self.log)
    }

    async fn publish(&self, events: Vec<NewEvent>) {
        let positions = self.log.publish(events);
        self.published.lock().unwrap().extend(positions);
    }

    async fn owners(&self) -> usize {
        let status = MemoryStore::new(&self.log).status().await.unwrap();
        status.subscriptions.first().map_or(0, |subscription| subscription.owners.len())
    }

    async fn committed(&self) -> Vec<Committed> {
        let events = self.log.fetch(&self.published.lock().unwrap()).unwrap();
        let committed = |event: &std::sync::Arc<pillarbox::Event>| Committed {
            id: event.id,
            key: event.key.as_deref().map(str::to_owned),
            position: event.position,
        };
        events.iter().map(committed).collect()
    }
}

async fn chaos(broken: Option<BrokenSink>) -> ChaosRun {
    let run = run_chaos(&MemoryReceiver::new(broken), Log::default(), EVENTS, 1).await;
    println!("{broken:?}: {run}");
    run
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn chaos_loses_nothing_with_a_sound_sink() {
    chaos(None).await.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn chaos_notices_what_was_acknowledged_too_early() {
    let verdict = chaos(Some(BrokenSink::AcknowledgesEarly)).await.verdict;
    assert!(!verdict.lost.is_empty(), "{verdict}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn chaos_notices_what_was_dropped() {
    let verdict = chaos(Some(BrokenSink::DropsAnEvent)).await.verdict;
    assert!(!verdict.lost.is_empty(), "{verdict}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn chaos_notices_what_was_turned_round() {
    let verdict = chaos(Some(BrokenSink::ReordersAKey)).await.verdict;
    assert!(!verdict.out_of_order.is_empty(), "{verdict}");
}
