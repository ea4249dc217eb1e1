//! Each cause that `why` knows, reached with a real relay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::admin::{Cause, Change, Operator, PrunePolicy, Why};
use pillarbox::engine::EngineConfig;
use pillarbox::store::{Cursor, FORMER_FILTERS_MAX, LaneWrite, Store, TakeCause};
use pillarbox::testing::{Capture, run_until_idle};
use pillarbox::{
    Delivery, Failure, Handler, NewEvent, Position, Relay, RelayBuilder, RelayConfig, RetryPolicy, Start, Subscription,
};
use tokio::sync::Notify;
use uuid::Uuid;

use super::{FILL, HOUR, NOTHING, PATIENCE, change, clock, hello, ids_of, join_with, killed, of_keys, one_lane, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        why_says_delivered,
        why_says_not_matched,
        why_says_before_start,
        why_says_behind_key_head,
        why_says_retry_at,
        why_says_sink_down,
        why_says_paused,
        why_says_flood_guard,
        why_says_no_owner,
        why_says_delayed,
        why_says_dead,
        why_says_skipped,
        why_says_pruned,
        why_says_stopped,
        why_says_processing,
        why_says_pending,
        why_says_not_recorded,
        what_retention_gave_up_is_not_said_of_an_operator,
        a_filter_that_changed_while_a_relay_ran_skips_nothing_and_everybody_says_so;
    FILL:
        why_says_in_dead_range;
}

/// What one that ended without a watcher leaves behind is taken over so soon.
const LEASE: Duration = Duration::from_secs(2);

/// A subscription of one lane whose retries are far away.
fn subscription() -> Subscription {
    let retry = RetryPolicy { base: HOUR, cap: HOUR, jitter: false, ..RetryPolicy::handler() };
    Subscription { retry, ..one_lane("s") }
}

/// A relay that tells of itself often, and does not wait long for one that is gone.
async fn builder<F: Fixture>(fixture: &F) -> Tried<RelayBuilder<F::Store>> {
    builder_with(fixture, EngineConfig::default()).await
}

async fn builder_with<F: Fixture>(fixture: &F, engine: EngineConfig) -> Tried<RelayBuilder<F::Store>> {
    fixture.run_clock();
    let engine = EngineConfig { beat_interval: Duration::from_millis(20), lease_ttl: LEASE, ..engine };
    Ok(Relay::builder(fixture.open().await?).config(RelayConfig { engine, ..RelayConfig::default() }))
}

async fn start<F: Fixture>(fixture: &F, subscription: Subscription, sink: Capture) -> Tried<Relay> {
    Ok(builder(fixture).await?.subscribe(subscription, Arc::new(sink)).start().await?)
}

/// Delivers all that can be delivered and ends cleanly.
async fn deliver<F: Fixture>(fixture: &F, subscription: Subscription, sink: Capture) -> Outcome {
    Ok(run_until_idle(builder(fixture).await?.subscribe(subscription, Arc::new(sink))).await?)
}

/// Starts a relay whose handler never returns, and waits until it was called.
async fn start_hanging<F: Fixture>(fixture: &F) -> Tried<Relay> {
    let called = Arc::new(Notify::new());
    let relay = builder(fixture).await?.handle(subscription(), hanging(&called)).start().await?;
    tokio::time::timeout(PATIENCE, called.notified()).await?;
    Ok(relay)
}

/// A handler that never returns, and tells when it was called.
fn hanging(called: &Arc<Notify>) -> impl Handler {
    let called = called.clone();
    move |_: Delivery| {
        called.notify_one();
        std::future::pending::<Result<(), Failure>>()
    }
}

/// Refuses events of this type.
fn refusing(r#type: &'static str, failure: Failure) -> Capture {
    Capture::refusing(move |event| (&*event.r#type == r#type).then(|| failure.clone()))
}

/// Publishes; the positions. The events are as old as the relay takes them for.
async fn place<F: Fixture>(fixture: &F, events: Vec<NewEvent>) -> Tried<Vec<Position>> {
    fixture.run_clock();
    Ok(fixture.publish(events).await?)
}

/// Publishes; the ids.
async fn publish<F: Fixture>(fixture: &F, events: Vec<NewEvent>) -> Tried<Vec<Uuid>> {
    let count = events.len();
    place(fixture, events).await?;
    let ids = ids_of(fixture).await?;
    Ok(ids[ids.len() - count..].to_vec())
}

async fn publish_bad<F: Fixture>(fixture: &F) -> Tried<Uuid> {
    Ok(publish(fixture, vec![NewEvent::new("t", "bad")]).await?[0])
}

async fn why<O: Operator>(operator: &O, id: Uuid, subscription: &str) -> Tried<Why> {
    let record = operator.show(id).await?.ok_or("the event is not shown")?;
    let fate = record.subscriptions.iter().find(|fate| fate.subscription == subscription);
    Ok(pillarbox::admin::why(&record, fate.ok_or("the subscription is not shown")?, &operator.status().await?))
}

/// Waits until the cause is `cause` and message and advice name each of `parts`: a relay may report before it has written its rows.
async fn check<F: Fixture>(fixture: &F, id: Uuid, cause: Cause, parts: &[&str]) -> Outcome {
    check_of(fixture, id, "s", cause, parts).await
}

async fn check_of<F: Fixture>(fixture: &F, id: Uuid, subscription: &str, cause: Cause, parts: &[&str]) -> Outcome {
    let (operator, deadline) = (fixture.operator().await?, Instant::now() + PATIENCE);
    loop {
        let found = why(&operator, id, subscription).await?;
        let more = [&found.advice, &found.detail].map(|text| text.clone().unwrap_or_default());
        let text = format!("{} {}", found.message, more.join(" "));
        if found.cause == cause && parts.iter().all(|part| text.contains(part)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not {cause:?} with {parts:?}, but {found:?}");
        tokio::task::yield_now().await;
    }
}

async fn why_says_delivered<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish(fixture, of_keys(&["a"])).await?[0];
    deliver(fixture, subscription(), Capture::new()).await?;
    check(fixture, id, Cause::Delivered, &["it was delivered by ", "settled by lane 0 in epoch 1 between"]).await
}

async fn why_says_not_matched<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish(fixture, vec![NewEvent::new("billing", "invoice.sent")]).await?[0];
    deliver(fixture, subscription().topics(["orders"]), Capture::new()).await?;
    check(fixture, id, Cause::NotMatched, &["'billing'", "'invoice.sent'"]).await
}

async fn why_says_before_start<F: Fixture>(fixture: &F) -> Outcome {
    let at = place(fixture, of_keys(&["a", "b"])).await?;
    let id = ids_of(fixture).await?[1];
    deliver(fixture, Subscription { start: Start::Now, ..subscription() }, Capture::new()).await?;
    let parts = [format!("position {}", at[1]), format!("pillarbox rewind s --to {}", at[1] - 1)];
    check(fixture, id, Cause::BeforeStart, &parts.each_ref().map(String::as_str)).await
}

async fn why_says_behind_key_head<F: Fixture>(fixture: &F) -> Outcome {
    let at = place(fixture, ["bad", "good"].map(|r#type| NewEvent::new("t", r#type).key("k")).into()).await?;
    let ids = ids_of(fixture).await?;
    let _relay = start(fixture, subscription(), refusing("bad", Failure::event("no"))).await?;
    let head = format!("event {} of its key (position {}), which is retrying", ids[0], at[0]);
    check(fixture, ids[1], Cause::BehindKeyHead, &[&head, &format!("pillarbox why {}", ids[0])]).await
}

async fn why_says_retry_at<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish_bad(fixture).await?;
    let _relay = start(fixture, subscription(), refusing("bad", Failure::event("the total is negative"))).await?;
    check(fixture, id, Cause::RetryAt, &["attempt 1 of ", "next try at", "the total is negative"]).await
}

async fn why_says_sink_down<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish_bad(fixture).await?;
    let refused = Failure { retry_after: Some(HOUR), ..Failure::sink("broker.example:9092 refused the connection") };
    let _relay = start(fixture, subscription(), refusing("bad", refused)).await?;
    check(fixture, id, Cause::SinkDown, &["broker.example:9092 refused", "next try at"]).await
}

async fn why_says_paused<F: Fixture>(fixture: &F) -> Outcome {
    let relay = start(fixture, subscription(), Capture::new()).await?;
    fixture.operator().await?.change(&Change::pause("s"), false).await?;
    // Until the relay has seen it, it may deliver.
    relay.until_idle().await?;
    let id = publish(fixture, of_keys(&["a"])).await?[0];
    check(fixture, id, Cause::Paused, &["an operator paused", "pillarbox resume s"]).await
}

async fn why_says_flood_guard<F: Fixture>(fixture: &F) -> Outcome {
    let bad = |key: usize| NewEvent::new("t", "bad").key(format!("k{key}"));
    let ids = publish(fixture, (0..pillarbox::limit::FLOOD_KEYS).map(bad).collect()).await?;
    let _relay = start(fixture, subscription(), refusing("bad", Failure::event("no such column"))).await?;
    check(fixture, ids[0], Cause::FloodGuard, &["a bad deploy is suspected", "next try at"]).await
}

async fn why_says_no_owner<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish(fixture, of_keys(&["a"])).await?[0];
    let relay = start_hanging(fixture).await?;
    let owner = relay.instance().0;
    fixture.end(relay).await;
    check(fixture, id, Cause::NoOwner, &["no living instance runs the subscription", "start a relay"]).await?;
    // Another one could run it and has not looked yet.
    let other = join_with(fixture, subscription()).await?;
    let gone = format!("instance {owner}, which owns its lane 0, is gone");
    check(fixture, id, Cause::NoOwner, &[&gone]).await?;
    killed(fixture, other).await?;
    let relay = start(fixture, subscription(), Capture::new()).await?;
    check(fixture, id, Cause::Delivered, &[]).await?;
    relay.drain().await?;
    let id = publish(fixture, of_keys(&["b"])).await?[0];
    let _other = join_with(fixture, subscription()).await?;
    check(fixture, id, Cause::NoOwner, &["its lane 0 has no owner"]).await
}

async fn why_says_delayed<F: Fixture>(fixture: &F) -> Outcome {
    fixture.run_clock();
    let until = clock(fixture).await?.plus(HOUR);
    let id = publish(fixture, vec![NewEvent::new("t", "y").deliver_at(until)]).await?[0];
    let relay = start(fixture, subscription(), Capture::new()).await?;
    relay.until_idle().await?;
    check(fixture, id, Cause::Delayed, &[&format!("not to be delivered before {until}")]).await?;
    let shown = fixture.operator().await?.show(id).await?.ok_or("the event is not shown")?;
    ensure!(shown.subscriptions[0].delivery.is_some(), "it has no row: {shown:?}");
    Ok(())
}

async fn why_says_dead<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish_bad(fixture).await?;
    let _relay = start(fixture, subscription(), refusing("bad", Failure::permanent("no such customer"))).await?;
    let advice = format!("pillarbox requeue --subscription s --event {id}");
    check(fixture, id, Cause::Dead, &["after 1 attempt;", "no such customer", &advice]).await
}

async fn why_says_skipped<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish_bad(fixture).await?;
    deliver(fixture, subscription(), refusing("bad", Failure::permanent("no"))).await?;
    let skip = Change::Skip { subscription: "s".into(), event: id, reason: "a test order of QA".into() };
    change(&fixture.operator().await?, skip).await?;
    check(fixture, id, Cause::Skipped, &["an operator gave it up", "a test order of QA"]).await
}

async fn why_says_pruned<F: Fixture>(fixture: &F) -> Outcome {
    // Where retention removes whole tables, the last event is in another one.
    fixture.divide(2).await;
    let good = NewEvent::new("t", "good");
    let id = publish(fixture, vec![NewEvent::new("t", "bad"), good.clone(), good]).await?[0];
    // Kept aside for the subscription that it is dead for; gone for one that is made later.
    deliver(fixture, subscription(), refusing("bad", Failure::permanent("no"))).await?;
    let policy = PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() };
    let (operator, deadline) = (fixture.operator().await?, Instant::now() + PATIENCE);
    while operator.prune(&policy).await?.events == 0 {
        ensure!(Instant::now() < deadline, "the event does not grow older");
    }
    let log_start = operator.status().await?.log.log_start;
    deliver(fixture, Subscription { name: "late".into(), ..subscription() }, Capture::new()).await?;
    let begins = format!("the log begins at position {log_start}");
    check_of(fixture, id, "late", Cause::Pruned, &[&begins]).await?;
    check(fixture, id, Cause::Dead, &[]).await
}

async fn why_says_stopped<F: Fixture>(fixture: &F) -> Outcome {
    place(fixture, vec![NewEvent::new("t", "bad").key("k")]).await?;
    let sink = Arc::new(refusing("bad", Failure::event("no")));
    let engine = EngineConfig { max_parked: 1, ..EngineConfig::default() };
    let relay = builder_with(fixture, engine).await?.subscribe(subscription(), sink).start().await?;
    relay.until_idle().await?;
    let id = publish(fixture, vec![NewEvent::new("t", "good").key("other")]).await?[0];
    check(fixture, id, Cause::Stopped, &["1 key is failing", "max_parked", "key 'k'"]).await
}

async fn why_says_processing<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish(fixture, of_keys(&["a"])).await?[0];
    // Two instances end while they work on the event; the third one writes its attempt down before it begins.
    for _ in 0..2 {
        let relay = start_hanging(fixture).await?;
        fixture.end(relay).await;
    }
    let relay = start_hanging(fixture).await?;
    let by = format!("it is being delivered by instance {} on lane 0", relay.instance().0);
    check(fixture, id, Cause::Processing, &[&by]).await
}

async fn why_says_pending<F: Fixture>(fixture: &F) -> Outcome {
    let ids = publish(fixture, of_keys(&["a", "a"])).await?;
    let relay = start_hanging(fixture).await?;
    let by = format!("by instance {} on lane 0", relay.instance().0);
    check(fixture, ids[1], Cause::Pending, &[&by]).await
}

async fn a_filter_that_changed_while_a_relay_ran_skips_nothing_and_everybody_says_so<F: Fixture>(
    fixture: &F,
) -> Outcome {
    fixture.run_clock();
    let (first, second) = (fixture.open().await?, fixture.open().await?);
    crate::blindfold::check_widened_filter(first, second, fixture.operator().await?).await;
    Ok(())
}

/// More filters have followed than are recorded, each of which something was passed under.
async fn why_says_not_recorded<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish(fixture, of_keys(&["a"])).await?[0];
    deliver(fixture, subscription(), Capture::new()).await?;
    check(fixture, id, Cause::Delivered, &[]).await?;
    let at = place(fixture, of_keys(&["a"; FORMER_FILTERS_MAX + 1])).await?;
    let member = join_with(fixture, subscription()).await?;
    for position in at {
        let lane = member.first_lane();
        let epoch = member.take(lane, TakeCause::Free).await?;
        let cursor = Cursor { floor: position, ..Cursor::default() };
        ensure!(member.settle(LaneWrite { cursor, release: true, ..write(lane, epoch, 0) }).await?, "could not settle");
        member.store.join(hello(subscription().topics([format!("t{position}")]))).await?;
    }
    check(fixture, id, Cause::NotRecorded, &["no longer recorded"]).await
}

async fn what_retention_gave_up_is_not_said_of_an_operator<F: Fixture>(fixture: &F) -> Outcome {
    let id = publish_bad(fixture).await?;
    deliver(fixture, subscription(), refusing("bad", Failure::permanent("no"))).await?;
    let policy = PrunePolicy { keep: None, dead: Some(Duration::ZERO), ..PrunePolicy::default() };
    let (operator, deadline) = (fixture.operator().await?, Instant::now() + PATIENCE);
    while operator.prune(&policy).await?.dead == 0 {
        ensure!(Instant::now() < deadline, "the delivery does not grow older");
    }
    check(fixture, id, Cause::Pruned, &["retention gave it up", "retention.dead"]).await
}

async fn why_says_in_dead_range<F: Fixture>(fixture: &F) -> Outcome {
    place(fixture, of_keys(&["a"])).await?;
    let gap = fixture.leave_gap().await;
    place(fixture, of_keys(&["b"])).await?;
    let relay = start(fixture, subscription(), Capture::new()).await?;
    relay.until_idle().await?;
    let late = fixture.fill(gap).await;
    let closed = format!("position {gap} had been closed before");
    check(fixture, late, Cause::InDeadRange, &[&closed, "pillarbox audit"]).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFixture;

    #[test]
    fn no_cause_is_forgotten() {
        let cases = all::<MemoryFixture>();
        for cause in Cause::ALL {
            let name = format!("why_says_{}", cause.name());
            assert!(cases.iter().any(|case| case.name == name), "there is no `{name}`");
        }
    }
}
