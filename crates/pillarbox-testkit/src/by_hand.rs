//! A store driven by hand, as a relay of one subscription would call it: for the tests of the stores.
use std::sync::Arc;

use pillarbox::admin::{Operator, PrunePolicy, Pruned, State};
use pillarbox::store::{
    Cursor, DeliveryRow, Epoch, Hello, Joined, LaneRef, LaneWrite, Page, PollRequest, Scan, ScanRequest, Settlement,
    Store, SubscriptionId, Take, TakeCause,
};
use pillarbox::{Event, Position, Subscription, Timestamp};

/// One lane, so that tests can say which.
pub fn one_lane(name: &str) -> Subscription {
    Subscription { lanes: 1, ..Subscription::new(name) }
}

/// What joins with these subscriptions.
pub fn hello(subscriptions: impl IntoIterator<Item = Subscription>) -> Hello {
    let subscriptions = subscriptions.into_iter().collect();
    Hello { host: "here".into(), pid: std::process::id(), version: "0".into(), subscriptions, rejoin: false }
}

/// Joins with these subscriptions.
pub async fn join(store: &impl Store, subscriptions: impl IntoIterator<Item = Subscription>) -> Joined {
    store.join(hello(subscriptions)).await.expect("the store answers")
}

/// Joins with one subscription of one lane and takes that lane.
pub async fn own(store: &impl Store, name: &str) -> (LaneRef, Epoch) {
    let joined = join(store, [one_lane(name)]).await;
    let lane = lane(joined.subscriptions[0].id);
    (lane, take(store, lane, TakeCause::Free).await.expect("the store answers"))
}

/// The first lane of a subscription.
pub fn lane(subscription: SubscriptionId) -> LaneRef {
    LaneRef { subscription, lane: 0 }
}

/// Takes a lane at whatever epoch it has now.
pub async fn take(store: &impl Store, lane: LaneRef, cause: TakeCause) -> Option<Epoch> {
    let fleet = store.observe(&Default::default()).await.expect("the store answers");
    let expected = fleet.lanes.iter().find(|view| view.lane == lane).expect("the store answers").epoch;
    store.take(&[Take { lane, expected, cause, beat: None }]).await.expect("the store answers")[0]
}

/// A settlement of a lane that moves its floor and nothing else.
pub fn write(lane: LaneRef, epoch: Epoch, floor: Position) -> LaneWrite {
    LaneWrite {
        lane,
        epoch,
        revision: 0,
        cursor: Cursor { floor, ..Cursor::default() },
        queue: Vec::new(),
        put: Vec::new(),
        change: Vec::new(),
        finish: Vec::new(),
        calm: false,
        release: false,
    }
}

/// Settles a lane; false if its epoch has changed.
pub async fn settle(store: &impl Store, write: LaneWrite) -> bool {
    store.settle(&Settlement { lanes: vec![write], ..Settlement::default() }).await.expect("the store answers")[0]
}

/// A delivery that was tried once and is due.
pub fn delivery(position: Position, key: &str, state: State) -> DeliveryRow {
    let now = Timestamp::now();
    DeliveryRow { position, key: Some(key.into()), arrival: position, state, attempts: 1, due_at: now, since: now }
}

/// The tail above `after`, for everybody.
pub fn tail(after: Position, limit: usize) -> PollRequest {
    PollRequest {
        scans: vec![ScanRequest { after, to: Position::MAX, limit }],
        wanted: vec![Default::default()],
        ..Default::default()
    }
}

/// What a poll shows above `after`.
pub async fn poll_tail(store: &impl Store, after: Position) -> Scan {
    one_scan(store.poll(&tail(after, 1_000_000)).await.expect("the store answers"))
}

/// The only scan of a page.
pub fn one_scan(mut page: Page) -> Scan {
    assert_eq!(page.scans.len(), 1);
    page.scans.remove(0)
}

/// All events of the log.
pub async fn events(store: &impl Store) -> Vec<Arc<Event>> {
    poll_tail(store, 0).await.events
}

/// Prunes slice by slice until nothing is left to remove; what all slices removed.
pub async fn prune_all(store: &impl Operator, policy: &PrunePolicy) -> Pruned {
    let mut all = Pruned::default();
    loop {
        let pruned = store.prune(policy).await.expect("the store answers");
        all.events += pruned.events;
        all.kept += pruned.kept;
        all.dead += pruned.dead;
        all.undelivered += pruned.undelivered;
        all.dedup += pruned.dedup;
        if !pruned.more {
            return Pruned { held_by: pruned.held_by, ..all };
        }
    }
}
