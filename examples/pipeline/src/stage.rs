use std::time::Duration;

use pillarbox::{Mode, RetryPolicy, Subscription};

pub(crate) const MESSAGES: &str = "messages";
pub(crate) const MENTIONS: &str = "mentions";
pub(crate) const ACTIVITIES: &str = "activities";
pub(crate) const AUTHORS: &str = "authors";

/// Somebody who is not there may be back at any moment, or in an hour; until then only their own events wait.
const RETRY: RetryPolicy = RetryPolicy {
    max_attempts: 10_000,
    base: Duration::from_millis(100),
    cap: Duration::from_secs(1),
    ..RetryPolicy::handler()
};

/// Finds the mentions in messages.
pub(crate) fn finding() -> Subscription {
    queue("finding", MESSAGES)
}

/// Puts mentions into people's lists.
pub(crate) fn listing() -> Subscription {
    queue("listing", MENTIONS)
}

/// Tells people what is new in their list.
pub(crate) fn telling() -> Subscription {
    Subscription { retry: RETRY, ..queue("telling", ACTIVITIES) }
}

/// Counts what each author has written.
pub(crate) fn counting() -> Subscription {
    queue("counting", AUTHORS)
}

/// A stage of the pipeline: one topic in; what its handler publishes is the next stage's.
fn queue(name: &str, topic: &str) -> Subscription {
    Subscription { mode: Mode::Queue, ..Subscription::new(name).topics([topic]) }
}
