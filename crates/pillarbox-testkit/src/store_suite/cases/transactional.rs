//! Transactional handlers: effects, published events and the settlement are committed together, or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pillarbox::admin::{ListQuery, Operator, State};
use pillarbox::sink::{BoxFuture, Outcome as Handled};
use pillarbox::store::{
    Abort, ClaimId, ClaimPlace, ClaimRequest, Claimed, ClaimedDelivery, LaneWrite, Queued, Store, TakeCause, Transact,
};
use pillarbox::{Delivery, Failure, Mode, Position, Relay, RetryPolicy, Subscription, Timestamp};

use super::{LIMIT, Member, PATIENCE, TRANSACT, join_with, of_keys, one_lane, parked, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried, Verdict};

cases! {
    TRANSACT:
        effect_published_event_and_settlement_are_committed_together,
        a_failed_transaction_leaves_nothing_and_the_claim_stays,
        one_that_fails_holds_back_no_other_of_its_batch,
        a_transactional_queue_handles_each_event_once_and_in_order;
}

/// Far longer than a transaction takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A queue with one row for each key, and the claims of those whose turn it is.
struct Ground<F: Fixture> {
    member: Member<F::Store>,
    at: Vec<Position>,
    deliveries: Vec<ClaimedDelivery>,
}

impl<F: Fixture> Ground<F> {
    async fn new(fixture: &F, keys: &[&str]) -> Tried<Self> {
        let member = join_with(fixture, Subscription { mode: Mode::Queue, ..one_lane("s") }).await?;
        let lane = member.first_lane();
        let epoch = member.take(lane, TakeCause::Free).await?;
        let at = fixture.publish(of_keys(keys)).await?;
        let row = |(position, key): (&Position, &&str)| {
            let delivery = parked(*position, key, State::Pending, Timestamp(0));
            Queued { delivery, claim: None, error: None }
        };
        let queue = at.iter().zip(keys).map(row).collect();
        let last = at.last().copied().unwrap_or(0);
        ensure!(member.settle(LaneWrite { queue, ..write(lane, epoch, last) }).await?, "could not settle");
        let mut ground = Ground { member, at, deliveries: Vec::new() };
        ground.deliveries = ground.claim(1).await?;
        Ok(ground)
    }

    /// Claims all whose turn it is, numbered from `first`.
    async fn claim(&self, first: i64) -> Tried<Vec<ClaimedDelivery>> {
        let subscription = self.member.joined.subscriptions[0].id;
        let (limit, first) = (LIMIT, ClaimId(first));
        let request = ClaimRequest { subscription, limit, first, suspect: true, tell: None, again: false };
        let mut claimed = self.member.store.claim(&[request]).await?.remove(0).claimed;
        claimed.sort_by_key(|claimed| claimed.delivery.position);
        let delivery = |claimed: Claimed| {
            let event = claimed.event.ok_or("a claimed row comes without its event")?;
            Ok(ClaimedDelivery { delivery: Delivery::first(event, "s"), claim: Some(claimed.claim) })
        };
        claimed.into_iter().map(delivery).collect()
    }

    async fn transact(&self, handler: &Arc<dyn Transact>) -> Vec<Handled> {
        let (subscription, instance) = (self.member.joined.subscriptions[0].id, self.member.joined.instance);
        handler.transact(ClaimPlace { subscription, instance }, self.deliveries.clone(), TIMEOUT).await
    }
}

/// A handler that is made by the fixture, as a relay takes it.
struct Shared(Arc<dyn Transact>);

impl Transact for Shared {
    fn batch_size(&self) -> usize {
        self.0.batch_size()
    }

    fn attempt<'a>(
        &'a self,
        place: ClaimPlace,
        events: &'a [ClaimedDelivery],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Handled>, Abort>> {
        self.0.attempt(place, events, limit)
    }
}

/// Effects, published events and rows of the queue.
async fn counts<F: Fixture>(fixture: &F) -> Tried<(usize, usize, usize)> {
    let operator = fixture.operator().await?;
    let published = ListQuery { topic: Some("effects".into()), limit: LIMIT, ..ListQuery::default() };
    let rows: u64 = operator.books().await?.lanes.iter().map(|book| book.deliveries.count()).sum();
    Ok((fixture.effects().await.len(), operator.list(&published).await?.len(), rows as usize))
}

/// Each event fails for which there is a failure.
fn verdict(failure: impl Fn(Position) -> Option<Failure> + Send + Sync + 'static) -> Verdict {
    Arc::new(move |event| failure(event.position).map_or(Ok(()), Err))
}

async fn effect_published_event_and_settlement_are_committed_together<F: Fixture>(fixture: &F) -> Outcome {
    let ground = Ground::new(fixture, &["a", "a", "a"]).await?;
    ensure_eq!(ground.deliveries.len(), 1, "claims of one key");
    let handler = fixture.transactional(1, verdict(|_| None)).await;
    ensure_eq!(ground.transact(&handler).await, [Handled::Delivered]);
    ensure_eq!(counts(fixture).await?, (1, 1, 2));
    let next: Vec<_> = ground.claim(10).await?.iter().map(|claimed| claimed.delivery.position).collect();
    ensure_eq!(next, ground.at[1..2], "it is the turn of the key's next, and of no other");
    Ok(())
}

async fn a_failed_transaction_leaves_nothing_and_the_claim_stays<F: Fixture>(fixture: &F) -> Outcome {
    let ground = Ground::new(fixture, &["a"]).await?;
    let handler = fixture.transactional(1, verdict(|_| Some(Failure::permanent("no")))).await;
    for _ in 0..3 {
        ensure_eq!(ground.transact(&handler).await, [Handled::Failed(Failure::permanent("no"))]);
        ensure_eq!(counts(fixture).await?, (0, 0, 1));
    }
    ensure!(ground.claim(10).await?.is_empty(), "the claim is gone");
    Ok(())
}

async fn one_that_fails_holds_back_no_other_of_its_batch<F: Fixture>(fixture: &F) -> Outcome {
    let ground = Ground::new(fixture, &["a", "b", "c"]).await?;
    let second = ground.at[1];
    let fails = verdict(move |position| (position == second).then(|| Failure::event("two")));
    let handler = fixture.transactional(3, fails).await;
    let outcomes = ground.transact(&handler).await;
    ensure_eq!(outcomes, [Handled::Delivered, Handled::Failed(Failure::event("two")), Handled::Delivered]);
    ensure_eq!(counts(fixture).await?, (2, 2, 1));
    Ok(())
}

async fn a_transactional_queue_handles_each_event_once_and_in_order<F: Fixture>(fixture: &F) -> Outcome {
    fixture.run_clock();
    let keys: Vec<String> = (0..60).map(|number| format!("k{}", number % 7)).collect();
    let at = fixture.publish(of_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>())).await?;
    let calls = AtomicUsize::new(0);
    let fails =
        verdict(move |_| (calls.fetch_add(1, Ordering::Relaxed) % 5 == 3).then(|| Failure::event("now and then")));
    let handler = fixture.transactional(4, fails).await;
    let retry = RetryPolicy { base: Duration::from_millis(1), jitter: false, ..RetryPolicy::handler() };
    let wish = Subscription { mode: Mode::Queue, retry, ..Subscription::new("s").topics(["t"]) };
    let relay = Relay::builder(fixture.open().await?).transact(wish, Shared(handler)).start().await?;
    let all = async {
        // A relay is idle while only retries are left.
        while fixture.effects().await.len() < 60 {
            relay.until_idle().await?;
        }
        Ok::<(), pillarbox::Error>(())
    };
    tokio::time::timeout(PATIENCE, all).await??;
    relay.drain().await?;
    let effects = fixture.effects().await;
    ensure_eq!(counts(fixture).await?, (60, 60, 0));
    ensure_eq!(effects.iter().copied().collect::<BTreeSet<_>>(), at.iter().copied().collect(), "each once");
    let key: BTreeMap<Position, &String> = at.iter().copied().zip(&keys).collect();
    let mut last: BTreeMap<&String, Position> = BTreeMap::new();
    for position in effects {
        let before = last.insert(key[&position], position);
        ensure!(before.is_none_or(|before| before < position), "{position} was handled after {before:?} of its key");
    }
    Ok(())
}
