use pillarbox::admin::{Operator, State};
use pillarbox::store::{
    AttemptError, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, DeliveryRow, Epoch, Failed, Hello, InstanceId,
    LaneRef, LaneState, LaneWrite, Queued, RecoverRequest, RecoveryCause, Settlement, Store, SubscriptionId, Take,
    TakeCause,
};
use pillarbox::{Mode, NewEvent, Position, Subscription, Timestamp};

/// Where [`call_about_many`] has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// It begins; nothing has a delivery yet.
    Begun,
    /// There are deliveries of two subscriptions, two of each key.
    Filled,
    /// This call was made. It was about all that was asked for, or twice as much.
    Called(&'static str),
}

/// Makes the calls that a relay makes about deliveries, each about `count` of them or twice as many. `then` hears what was done.
pub async fn call_about_many<S: Store + Operator>(store: &S, count: usize, mut then: impl AsyncFnMut(Point)) {
    let key = |number: Position| format!("k{}", number / 2);
    let events: Vec<NewEvent> =
        (0..2 * count as Position).map(|number| NewEvent::new("t", "y").key(key(number))).collect();
    store.publish(&events).await.expect("it publishes");
    let mut caller = Caller::new(store).await;
    let positions = || 1..=2 * count as Position;
    let delivery = |position: Position, state: State| {
        let (now, key) = (Timestamp::now(), Some(key(position - 1).into()));
        DeliveryRow { position, key, arrival: position, state, attempts: 0, due_at: now, since: now }
    };
    let error = AttemptError { at: Timestamp::now(), attempt: 1, kind: "k".into(), message: "m".into() };
    then(Point::Begun).await;

    let queued = |position| Queued { delivery: delivery(position, State::Pending), claim: None, error: None };
    caller.settle(LaneWrite { queue: positions().map(queued).collect(), ..caller.write(0) }).await;
    then(Point::Called("settle queued")).await;
    let put: Vec<DeliveryRow> = positions().map(|position| delivery(position, State::Retrying)).collect();
    caller.settle(LaneWrite { put: put.clone(), ..caller.write(1) }).await;
    then(Point::Called("settle put")).await;
    then(Point::Filled).await;

    let change = put.iter().map(|row| (row.clone(), Some(error.clone()))).collect();
    caller.settle(LaneWrite { change, ..caller.write(1) }).await;
    then(Point::Called("settle change")).await;
    caller.settle(LaneWrite { finish: positions().collect(), ..caller.write(1) }).await;
    then(Point::Called("settle finish")).await;

    let claimed = caller.claim(count).await;
    then(Point::Called("claim")).await;
    let due_at = Timestamp::now();
    let failed = Failed { state: State::Retrying, attempts: 1, due_at, error };
    caller.finish(&claimed, ClaimFate::Failed(failed)).await;
    then(Point::Called("finish failed")).await;
    let claimed = caller.claim(count).await;
    then(Point::Called("claim what failed")).await;
    caller.finish(&claimed, ClaimFate::Done).await;
    then(Point::Called("finish done")).await;
    caller.claim(count).await;
    then(Point::Called("claim the second of each key")).await;
    caller.recover(count).await;
    then(Point::Called("recover")).await;
}

/// An instance that owns the lane of a queue and that of a stream, beside many others.
struct Caller<'a, S> {
    store: &'a S,
    instance: InstanceId,
    lanes: Vec<(LaneRef, Epoch, LaneState)>,
    next_claim: i64,
}

impl<'a, S: Store> Caller<'a, S> {
    async fn new(store: &'a S) -> Self {
        let queue = Subscription { mode: Mode::Queue, lanes: 1, ..Subscription::new("queue") };
        let stream = Subscription { lanes: 1, ..Subscription::new("stream") };
        let others = (0..8).map(|number| Subscription { lanes: 256, ..Subscription::new(format!("other-{number}")) });
        let subscriptions = [queue, stream].into_iter().chain(others).collect();
        let joined = store.join(Hello { subscriptions, ..Hello::default() }).await.expect("the log is empty");
        let lane = |index: usize| LaneRef { subscription: joined.subscriptions[index].id, lane: 0 };
        let take = |lane| Take { lane, expected: 0, cause: TakeCause::Free, beat: None };
        let epochs = store.take(&[take(lane(0)), take(lane(1))]).await.expect("it takes");
        let taken: Vec<(LaneRef, Epoch)> = epochs
            .into_iter()
            .zip([lane(0), lane(1)])
            .map(|(epoch, lane)| (lane, epoch.expect("it is free")))
            .collect();
        let loaded = store.load(&taken).await.expect("it loads");
        let own = |((lane, epoch), state): (_, Option<LaneState>)| (lane, epoch, state.expect("it was taken"));
        let lanes = taken.into_iter().zip(loaded).map(own).collect();
        Caller { store, instance: joined.instance, lanes, next_claim: 1 }
    }

    /// Says of a lane what it said when it was loaded.
    fn write(&self, lane: usize) -> LaneWrite {
        let (lane, epoch, LaneState { cursor, revision, .. }) = self.lanes[lane].clone();
        super::walk::nothing_new(lane, epoch, revision, cursor)
    }

    async fn settle(&self, write: LaneWrite) {
        let settled = self.store.settle(&Settlement { lanes: vec![write], ..Settlement::default() }).await;
        assert_eq!(settled.expect("it settles"), [true], "the lane is this instance's");
    }

    fn queue(&self) -> SubscriptionId {
        self.lanes[0].0.subscription
    }

    /// On a busy machine a claim may take too long, and the next one is for fewer.
    async fn claim(&mut self, count: usize) -> Vec<Claimed> {
        let mut all = Vec::new();
        while all.len() < count {
            let (first, limit) = (ClaimId(self.next_claim), count - all.len());
            self.next_claim += limit as i64;
            let request =
                ClaimRequest { subscription: self.queue(), limit, first, suspect: true, tell: None, again: false };
            all.extend(self.store.claim(&[request]).await.expect("it claims").remove(0).claimed);
        }
        all
    }

    async fn finish(&self, claimed: &[Claimed], fate: ClaimFate) {
        let end = |claimed: &Claimed| {
            let (position, claim) = (claimed.delivery.position, claimed.claim);
            ClaimEnd { subscription: self.queue(), position, claim, fate: fate.clone() }
        };
        let ends: Vec<ClaimEnd> = claimed.iter().map(end).collect();
        let ended = self.store.finish(&ends).await.expect("it finishes");
        assert_eq!(ended, vec![true; claimed.len()], "the claims are this instance's");
    }

    async fn recover(&self, count: usize) {
        let ended = vec![(self.instance, RecoveryCause::Crash, None)];
        let recovered = self.store.recover(&RecoverRequest { ended, ..RecoverRequest::default() }).await;
        let claims = recovered.expect("it recovers").claims;
        assert_eq!(claims.iter().map(|(.., count)| count).sum::<u64>(), count as u64);
    }
}
