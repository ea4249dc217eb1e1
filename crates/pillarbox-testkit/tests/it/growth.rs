//! What a step of the engine costs, counted in what it looks at: no cost grows with rows, events or holes that it has nothing to do with.
//! A constant for each lane that the instance owns is what a step may cost.

use std::time::Duration;

use pillarbox::admin::{Change, PausedBy};
use pillarbox::engine::{EngineConfig, Input};
use pillarbox::sink::SinkFeatures;
use pillarbox::{Failure, Mode, NewEvent, OnDead, RetryPolicy, Subscription, Timestamp};
use pillarbox_testkit::{Driver, MemoryLog, MemoryOptions, MemoryStore, Tx};

/// A step may look at each lane that the instance owns so often.
const LOOKS_A_LANE: u64 = 12;

fn log() -> MemoryLog {
    MemoryLog::with(MemoryOptions { settle_interval: Duration::from_millis(20), ..MemoryOptions::default() })
}

fn subscription(name: &str) -> Subscription {
    let retry = RetryPolicy { max_attempts: 1, min_dead_age: Duration::ZERO, ..RetryPolicy::handler() };
    Subscription { lanes: 2, workers: 1, batch_size: 1, retry, ..Subscription::new(name).topics([name]) }
}

fn publish(log: &MemoryLog, topic: &str, count: usize, key: impl Fn(usize) -> String) {
    let tx = log.begin();
    for index in 0..count {
        log.insert(tx, NewEvent::new(topic, "happened").key(key(index)));
    }
    log.commit(tx);
}

async fn start(log: &MemoryLog, subscriptions: Vec<Subscription>, config: EngineConfig) -> Driver<MemoryStore> {
    let sink = SinkFeatures { one_by_one: true, ..SinkFeatures::default() };
    let subscriptions = subscriptions.into_iter().map(|spec| (spec, sink)).collect();
    let mut driver = Driver::start(MemoryStore::new(log), config, subscriptions).await.unwrap();
    driver.pass(Duration::from_millis(200)).await.unwrap();
    driver
}

/// What steps look at.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// The most that nine of ten do.
    usual: u64,
    /// The most that any does.
    most: u64,
    /// All together.
    sum: u64,
    /// Events that they moved to the delivery table.
    moved: u64,
}

fn cost_of(mut steps: Vec<u64>, moved: usize) -> Cost {
    steps.sort_unstable();
    let (usual, most) = (steps[steps.len() * 9 / 10], steps[steps.len() - 1]);
    Cost { usual, most, sum: steps.iter().sum(), moved: moved as u64 }
}

/// What the steps look at while `others` events of another subscription are delivered.
async fn deliver_others(log: &MemoryLog, driver: &mut Driver<MemoryStore>, others: usize) -> Cost {
    driver.take_steps();
    driver.take_settlements();
    publish(log, "other", others, |index| format!("o{index}"));
    driver.go_on(Input::Published).await.unwrap();
    for _ in 0..others {
        let index = driver.at_sink().iter().position(|(_, events)| &*events[0].event.topic == "other");
        driver.deliver(index.expect("an event of the other subscription is at the sink")).await.unwrap();
    }
    driver.pass(Duration::from_millis(100)).await.unwrap();
    let moved = rows_put(driver);
    cost_of(driver.take_steps(), moved)
}

/// The cost of a step is no higher with many than with few, of any step, and all together cost about the same; but a step that moves what
/// waits to the delivery table, once, looks at it.
fn check_growth(what: &str, few: Cost, many: Cost) {
    println!("{what}: {few:?} with few, {many:?} with many");
    let usual = many.usual <= few.usual + 16;
    let most = many.most <= few.most + many.moved + 16;
    let sum = many.sum <= few.sum + few.sum / 4 + many.moved;
    let grown = !(usual && most && sum);
    assert!(!grown, "{what}: steps look at {few:?} with few and at {many:?} with many");
}

/// One key whose first event is dead, with many behind it.
async fn with_blocked(log: &MemoryLog, rows: usize) -> Driver<MemoryStore> {
    let blocks = Subscription { on_dead: OnDead::Block, ..subscription("blocked") };
    let mut driver = start(log, vec![blocks, subscription("other")], EngineConfig::default()).await;
    publish(log, "blocked", rows, |_| "k".to_owned());
    driver.go_on(Input::Published).await.unwrap();
    driver.fail(0, &Failure::permanent("no")).await.unwrap();
    driver.pass(Duration::from_secs(4)).await.unwrap();
    assert_eq!(rows_put(&mut driver), rows, "each has a row");
    driver
}

/// How many rows were written.
fn rows_put(driver: &mut Driver<MemoryStore>) -> usize {
    let settlements = driver.take_settlements();
    let writes = settlements.iter().flat_map(|settlement| &settlement.lanes);
    writes.map(|write| write.put.len() + write.queue.len()).sum()
}

#[tokio::test]
async fn a_step_does_not_look_at_the_rows_behind_a_dead_event() {
    let mut costs = Vec::new();
    for rows in [100, 5_000] {
        let log = log();
        let mut driver = with_blocked(&log, rows).await;
        costs.push(deliver_others(&log, &mut driver, 20).await);
    }
    check_growth("blocked rows", costs[0], costs[1]);
}

#[tokio::test]
async fn a_step_does_not_look_at_the_rows_of_a_paused_subscription() {
    let mut costs = Vec::new();
    for rows in [100, 5_000] {
        let log = log();
        let mut driver = with_blocked(&log, rows).await;
        let pause = Change::Pause { subscription: "blocked".into(), by: PausedBy::Operator, reason: None };
        log.change(&pause, false).unwrap();
        driver.go_on(Input::Rang).await.unwrap();
        driver.pass(Duration::from_secs(2)).await.unwrap();
        costs.push(deliver_others(&log, &mut driver, 20).await);
    }
    check_growth("rows of a paused subscription", costs[0], costs[1]);
}

#[tokio::test]
async fn a_step_does_not_look_at_what_waits_for_a_sink_that_is_down() {
    for mode in [Mode::Stream, Mode::Queue] {
        let mut costs = Vec::new();
        for waiting in [100, 5_000] {
            let log = log();
            let down = Subscription { mode, ..subscription("down") };
            let mut driver = start(&log, vec![down, subscription("other")], EngineConfig::default()).await;
            // One of them has a row and is due.
            publish(&log, "down", 1, |_| "first".to_owned());
            driver.go_on(Input::Published).await.unwrap();
            driver.fail(0, &Failure::event("refused")).await.unwrap();
            publish(&log, "down", waiting, |index| format!("d{index}"));
            driver.go_on(Input::Published).await.unwrap();
            while driver.report().subscriptions["down"].breaker.is_none() {
                assert!(!driver.at_sink().is_empty(), "nothing is sent and nobody is down");
                driver.fail(0, &Failure::sink("down")).await.unwrap();
            }
            driver.pass(Duration::from_millis(500)).await.unwrap();
            costs.push(deliver_others(&log, &mut driver, 20).await);
        }
        check_growth(&format!("events that wait for a sink, {mode:?}"), costs[0], costs[1]);
    }
}

#[tokio::test]
async fn a_step_does_not_look_at_what_waits_behind_an_event_that_may_be_poison() {
    for mode in [Mode::Stream, Mode::Queue] {
        let mut costs = Vec::new();
        for waiting in [100, 5_000] {
            let log = log();
            let poisoned = Subscription { mode, workers: 2, ..subscription("poisoned") };
            let mut driver = start(&log, vec![poisoned, subscription("other")], EngineConfig::default()).await;
            publish(&log, "poisoned", waiting, |_| "k".to_owned());
            driver.go_on(Input::Published).await.unwrap();
            for _ in 0..4 {
                driver.fail(0, &Failure::sink("down")).await.unwrap();
                driver.pass(Duration::from_secs(5)).await.unwrap();
            }
            costs.push(deliver_others(&log, &mut driver, 20).await);
        }
        check_growth(&format!("events behind one that may be poison, {mode:?}"), costs[0], costs[1]);
    }
}

#[tokio::test]
async fn a_step_does_not_look_at_delayed_rows() {
    let mut costs = Vec::new();
    for rows in [100, 5_000] {
        let log = log();
        let mut driver = start(&log, vec![subscription("later"), subscription("other")], EngineConfig::default()).await;
        let tx = log.begin();
        for index in 0..rows {
            let at = Timestamp::now().plus(Duration::from_secs(3600 + index as u64));
            log.insert(tx, NewEvent::new("later", "happened").key(format!("l{index}")).deliver_at(at));
        }
        log.commit(tx);
        driver.go_on(Input::Published).await.unwrap();
        driver.pass(Duration::from_secs(2)).await.unwrap();
        assert_eq!(rows_put(&mut driver), rows, "each has a row");
        costs.push(deliver_others(&log, &mut driver, 20).await);
    }
    check_growth("delayed rows", costs[0], costs[1]);
}

/// Every other position is an open transaction's.
fn leave_holes(log: &MemoryLog, holes: usize) -> Vec<Tx> {
    let leave = |index| {
        let open = log.begin();
        log.insert(open, NewEvent::new("hole", "happened"));
        publish(log, "other", 1, |_| format!("k{index}"));
        open
    };
    (0..holes).map(leave).collect()
}

#[tokio::test]
async fn a_step_does_not_look_at_each_hole_for_each_lane() {
    let mut costs = Vec::new();
    let lanes = 20 * 8;
    for holes in [10, 500] {
        let log = log();
        let subscriptions = (0..20)
            .map(|number| Subscription { lanes: 8, ..Subscription::new(format!("s{number}")).topics(["nothing"]) });
        let mut driver = start(&log, subscriptions.collect(), EngineConfig::default()).await;
        leave_holes(&log, holes);
        driver.go_on(Input::Published).await.unwrap();
        driver.pass(Duration::from_secs(1)).await.unwrap();
        driver.take_steps();
        driver.pass(Duration::from_secs(5)).await.unwrap();
        costs.push(driver.take_steps().into_iter().max().unwrap_or(0));
    }
    println!("holes: {costs:?} in {lanes} lanes");
    // Each hole is asked for, shown and not found once, not once a lane.
    assert!(
        costs[1] <= costs[0] + 490 * 8,
        "a poll looks at {} things with 10 holes and at {} with 500",
        costs[0],
        costs[1]
    );
}

/// How much the steps look at, at most, while ten of so many holes close one after the other; each lane has settled events between them.
async fn close_holes(holes: usize, subscriptions: usize) -> u64 {
    let log = log();
    let wants = |number| Subscription { lanes: 8, ..Subscription::new(format!("s{number}")).topics(["other"]) };
    let mut driver = start(&log, (0..subscriptions).map(wants).collect(), EngineConfig::default()).await;
    let mut open = leave_holes(&log, holes);
    driver.go_on(Input::Published).await.unwrap();
    while !driver.at_sink().is_empty() {
        driver.deliver(0).await.unwrap();
    }
    driver.pass(Duration::from_millis(500)).await.unwrap();
    driver.take_steps();
    for _ in 0..10 {
        log.commit(open.remove(open.len() / 2));
        driver.go_on(Input::Published).await.unwrap();
    }
    driver.take_steps().into_iter().max().unwrap_or(0)
}

#[tokio::test]
async fn a_hole_that_closes_costs_no_look_at_the_others_for_each_lane() {
    let (few, many) = (close_holes(20, 10).await, close_holes(500, 10).await);
    println!("a hole that closes: {few} with 20 holes, {many} with 500, in 80 lanes");
    // Each of the others is asked for, shown and kept once, not once a lane.
    assert!(many <= few + 480 * 4, "a step looks at {few} things with 20 holes and at {many} with 500");
    let one = close_holes(500, 1).await;
    println!("with 500 holes: {one} in 8 lanes, {many} in 80");
    assert!(many <= one + 72 * LOOKS_A_LANE, "a step looks at {one} things with 8 lanes and at {many} with 80");
}

#[tokio::test]
async fn idle_subscriptions_cost_nothing_when_another_delivers() {
    for mode in [Mode::Stream, Mode::Queue] {
        let mut costs = Vec::new();
        for count in [10, 200] {
            let log = log();
            let idle = |number| Subscription { mode, ..subscription(&format!("s{number}")) };
            let mut subscriptions: Vec<_> = (0..count).map(idle).collect();
            subscriptions.push(Subscription { mode, ..subscription("other") });
            let mut driver = start(&log, subscriptions, EngineConfig::default()).await;
            driver.pass(Duration::from_secs(2)).await.unwrap();
            publish(&log, "other", 20, |index| format!("o{index}"));
            driver.go_on(Input::Published).await.unwrap();
            let (mut answers, mut most) = (Vec::new(), 0);
            while !driver.at_sink().is_empty() {
                driver.take_steps();
                driver.deliver(0).await.unwrap();
                // The first step is the sink's answer, the others are those of the store.
                let steps = driver.take_steps();
                answers.push(steps[0]);
                most = most.max(steps.into_iter().max().unwrap_or(0));
            }
            let lanes = 2 * (count as u64 + 1);
            println!("{count} idle subscriptions, {mode:?}: {most} looks a step, {lanes} lanes");
            assert!(most <= LOOKS_A_LANE * lanes + 100, "a step looks at {most} things with {lanes} lanes");
            costs.push(cost_of(answers, 0));
        }
        check_growth(&format!("idle subscriptions, {mode:?}"), costs[0], costs[1]);
    }
}

/// What the steps look at that read `hot` events of a key of a queue which is at work, while `waiting` others are in line.
async fn read_hot_key(waiting: usize, hot: usize) -> Cost {
    let log = log();
    let queue = Subscription { mode: Mode::Queue, workers: 2, ..subscription("q") };
    let mut driver = start(&log, vec![queue], EngineConfig::default()).await;
    publish(&log, "q", 1, |_| "hot".to_owned());
    driver.go_on(Input::Published).await.unwrap();
    // It takes so long that it gets a row, and then it is known that no other has one.
    driver.pass(Duration::from_secs(2)).await.unwrap();
    driver.take_settlements();
    publish(&log, "q", waiting, |index| format!("w{index}"));
    driver.go_on(Input::Published).await.unwrap();
    assert_eq!((driver.at_sink().len(), rows_put(&mut driver)), (2, 0), "the others are in memory");
    driver.take_steps();
    publish(&log, "q", hot, |_| "hot".to_owned());
    driver.go_on(Input::Published).await.unwrap();
    let cost = cost_of(driver.take_steps(), 0);
    driver.pass(Duration::from_millis(40)).await.unwrap();
    assert_eq!(rows_put(&mut driver), hot, "each goes behind the one at work");
    cost
}

#[tokio::test]
async fn an_event_of_a_hot_key_costs_no_look_at_what_waits() {
    check_growth("events in line", read_hot_key(50, 500).await, read_hot_key(5_000, 500).await);
    let (few, many) = (read_hot_key(1_000, 100).await, read_hot_key(1_000, 1_500).await);
    println!("events of a hot key: {few:?} for 100, {many:?} for 1,500");
    assert!(many.most <= few.most + 1_400 * 4, "an event costs a constant: {few:?}, {many:?}");
}

/// How much all steps of a drain look at, with so many subscriptions that have something to write.
async fn drain(count: usize) -> u64 {
    let log = log();
    let names: Vec<String> = (0..count).map(|number| format!("s{number}")).collect();
    let mut driver = start(&log, names.iter().map(|name| subscription(name)).collect(), EngineConfig::default()).await;
    names.iter().for_each(|name| publish(&log, name, 3, |index| format!("k{index}")));
    driver.go_on(Input::Published).await.unwrap();
    while !driver.at_sink().is_empty() {
        driver.deliver(0).await.unwrap();
    }
    driver.take_steps();
    driver.go_on(Input::Drain).await.unwrap();
    for _ in 0..100 {
        driver.pass(Duration::from_millis(20)).await.unwrap();
    }
    assert!(driver.has_left(), "the drain is over");
    driver.take_steps().into_iter().sum()
}

#[tokio::test]
async fn a_drain_costs_in_proportion_to_the_subscriptions() {
    let (few, many) = (drain(25).await, drain(200).await);
    println!("a drain looks at {few} things with 25 subscriptions and at {many} with 200");
    assert!(many <= few * 8 * 2, "eight times as many subscriptions cost {few} and {many}");
}

/// What the steps of a drain look at, of one subscription with so many lanes and events at the sink.
async fn drain_lanes(lanes: u32, workers: usize) -> u64 {
    let log = log();
    let wide = Subscription { lanes, workers, batch_size: 10, ..Subscription::new("wide") };
    let mut driver = start(&log, vec![wide], EngineConfig::default()).await;
    publish(&log, "wide", workers * 20, |index| format!("k{index}"));
    driver.go_on(Input::Published).await.unwrap();
    assert_eq!(driver.at_sink().len(), workers);
    driver.take_steps();
    driver.go_on(Input::Drain).await.unwrap();
    driver.take_steps().into_iter().max().unwrap_or(0)
}

#[tokio::test]
async fn a_drain_does_not_look_at_what_is_here_for_each_lane() {
    let (lanes, events) = (drain_lanes(128, 5).await, drain_lanes(8, 100).await);
    let both = drain_lanes(128, 100).await;
    println!("a step of a drain looks at {lanes} things with many lanes, {events} with many events, {both} with both");
    assert!(both <= lanes + events, "many lanes cost {lanes}, many events {events}, both {both}");
}

#[tokio::test]
async fn a_slow_sink_with_a_backlog_writes_few_ranges() {
    let log = log();
    let slow = Subscription { lanes: 8, workers: 4, ..subscription("slow") };
    let mut driver = start(&log, vec![slow], EngineConfig::default()).await;
    publish(&log, "slow", 20_000, |index| format!("k{}", index % 5_000));
    driver.go_on(Input::Published).await.unwrap();
    driver.take_settlements();
    for turn in 0..400 {
        // They come back in any order.
        driver.deliver(turn * 7 % driver.at_sink().len()).await.unwrap();
        driver.pass(Duration::from_millis(20)).await.unwrap();
    }
    let settlements = driver.take_settlements();
    let cursors = || settlements.iter().flat_map(|settlement| &settlement.lanes).map(|write| &write.cursor);
    let (written, ranges) = (cursors().count(), cursors().map(|cursor| cursor.settled.len()).max().unwrap_or(0));
    let bytes: usize = cursors().map(|cursor| cursor.settled.to_string().len()).sum();
    println!("{written} cursors, at most {ranges} ranges, {} bytes a cursor", bytes / written);
    assert!(written >= 100, "cursors are written: {written}");
    assert!(ranges <= 4, "as many ranges as events are at the sink, not {ranges}");
    assert!(bytes / written <= 40, "{} bytes a cursor", bytes / written);
}
