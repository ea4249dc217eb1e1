use std::time::Duration;

use pillarbox::NewEvent;
use pillarbox::admin::Operator;
use pillarbox::engine::{EngineConfig, Input};
use pillarbox::sink::SinkFeatures;

use super::{Dimension, FACTOR, Ground, SLACK, SMALL, STATEMENTS_SLACK, STREAM, TAIL, Work, hello};
use crate::Driver;

/// What the cost of a relay that only runs does not grow with.
pub const STEADY: [Dimension; 7] = [
    Dimension::Log,
    Dimension::Records,
    Dimension::Dead,
    Dimension::Delayed,
    Dimension::DeadRanges,
    Dimension::Subscriptions,
    Dimension::FormerFilters,
];

/// For so long the relay has nothing to do, by its own clock.
const IDLE_FOR: Duration = Duration::from_secs(10);

/// So many events are delivered then, which are published so many at once.
const DELIVERED: usize = 1_000;
const PUBLISHED_AT_ONCE: usize = 100;

/// Statements of a relay per second in which it has nothing to do. A look at the fleet and a poll are some; where they
/// begin and commit counts too.
const IDLE_STATEMENTS_MAX: u64 = 12;

/// Statements of a relay per thousand events that it delivers, beside those that it makes anyway.
const DELIVERED_STATEMENTS_MAX: u64 = 40;

/// What a relay of the stream has done.
#[derive(Debug, Clone, Copy)]
pub struct Steady {
    idle: Work,
    delivering: Work,
}

/// Runs a relay of the stream that has nothing to do, and then delivers events.
pub async fn measure_steady<G: Ground>(ground: &G, dimension: Dimension) -> Steady {
    let sink = SinkFeatures { ordered_batch: true, ..SinkFeatures::default() };
    let subscriptions = hello(&[STREAM], dimension).subscriptions.into_iter().map(|spec| (spec, sink)).collect();
    let relay = Driver::start(ground.another_store().await, EngineConfig::default(), subscriptions).await;
    let mut relay = relay.expect("nobody owns the lane");
    assert_eq!(deliver_all(&mut relay).await, TAIL, "what nobody has read");
    ground.begin().await;
    relay.pass(IDLE_FOR).await.expect("it runs");
    let idle = ground.work().await;
    let events: Vec<NewEvent> =
        (0..PUBLISHED_AT_ONCE).map(|key| NewEvent::new("t", "y").key(key.to_string())).collect();
    let publisher = ground.another_store().await;
    for _ in 0..DELIVERED / PUBLISHED_AT_ONCE {
        publisher.publish(&events).await.expect("it publishes");
    }
    ground.begin().await;
    relay.go_on(Input::Published).await.expect("it runs");
    assert_eq!(deliver_all(&mut relay).await, DELIVERED, "what was published");
    Steady { idle, delivering: ground.work().await }
}

/// The sink takes everything until nothing comes any more; how many events it took.
async fn deliver_all<S: pillarbox::store::Store>(relay: &mut Driver<S>) -> usize {
    let mut taken = 0;
    loop {
        while !relay.at_sink().is_empty() {
            taken += relay.deliver(0).await.expect("it runs").len();
        }
        relay.pass(Duration::from_secs(1)).await.expect("it runs");
        if relay.at_sink().is_empty() {
            return taken;
        }
    }
}

/// Says in which way a relay does more than it may.
pub fn judge_steady(dimension: Dimension, small: Steady, large: Steady) -> Vec<String> {
    let mut broken = Vec::new();
    let idle_max = IDLE_STATEMENTS_MAX * IDLE_FOR.as_secs() + STATEMENTS_SLACK;
    let delivering_max = DELIVERED_STATEMENTS_MAX + STATEMENTS_SLACK;
    for (what, small, large, most) in
        [("idle", small.idle, large.idle, idle_max), ("delivering", small.delivering, large.delivering, delivering_max)]
    {
        // Each look at the fleet reads every subscription.
        let more =
            if dimension == Dimension::Subscriptions { dimension.count(SMALL * FACTOR) as u64 * 25 * 10 } else { 0 };
        let steps = small.steps * 3 / 2 + SLACK + more;
        let statements = (small.statements + STATEMENTS_SLACK).min(most);
        if large.steps > steps || large.statements > statements {
            broken.push(format!(
                "a relay that is {what} must not do more with more {dimension:?}: {small:?} became {large:?} (at most {steps} steps, \
                 {statements} statements)"
            ));
        }
    }
    broken
}
