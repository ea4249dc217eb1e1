use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::{Change, ListQuery, Operator, PrunePolicy, Selection, State};
use pillarbox::engine::EngineConfig;
use pillarbox::store::{
    AttemptError, CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, DeliveryRow, Epoch, Failed,
    InstanceId, LaneRef, Lock, Queued, RecoverRequest, RecoveryCause, SUSPECT_AFTER, Store, SubscriptionId, TakeCause,
    Wake,
};
use pillarbox::{
    Delivery, ErrorKind, Mode, NewEvent, OnDead, Position, Relay, RelayConfig, RetryPolicy, Start, Subscription,
    Timestamp,
};
use pillarbox_sqlite::{PAGE_BYTES_MAX, SqliteStore};
use tokio::sync::{Semaphore, mpsc};

use crate::fixture::{Database, join, lane, one_lane, poll_tail, settle, take, write};

/// Long enough for a false wake-up to show.
const SHORT: Duration = Duration::from_millis(150);

/// Far longer than any of these tests.
const LONG: Duration = Duration::from_secs(20);

const HOUR_MS: i64 = 3_600_000;

fn queue() -> Subscription {
    Subscription { mode: Mode::Queue, ..one_lane("q") }
}

/// A queue with a store that owns its only lane.
struct Ground {
    database: Database,
    store: SqliteStore,
    instance: InstanceId,
    lane: LaneRef,
    epoch: Epoch,
}

impl Ground {
    async fn new() -> Self {
        Ground::of(queue()).await
    }

    async fn of(subscription: Subscription) -> Self {
        let database = Database::new();
        let store = database.store();
        let joined = join(&store, [subscription]).await;
        let lane = lane(joined.subscriptions[0].id);
        let epoch = take(&store, lane, TakeCause::Free).await.unwrap();
        Ground { database, store, instance: joined.instance, lane, epoch }
    }

    fn subscription(&self) -> SubscriptionId {
        self.lane.subscription
    }

    /// Another instance that runs the same subscription.
    async fn other(&self) -> (SqliteStore, InstanceId) {
        let store = self.database.store();
        let instance = join(&store, [queue()]).await.instance;
        (store, instance)
    }

    /// Publishes an event a key ("" is none) and puts each into the queue.
    async fn fill(&self, keys: &[&str]) {
        let event = |key: &&str| NewEvent::new("t", "y").key(*key);
        let unkeyed = |key: &&str| if key.is_empty() { NewEvent::new("t", "y") } else { event(key) };
        let before = poll_tail(&self.store, 0).await.visible.last().unwrap_or(0);
        self.database.publish(&keys.iter().map(unkeyed).collect::<Vec<_>>());
        self.put((before + 1..).zip(keys).map(|(position, key)| pending(position, key)).collect()).await;
    }

    async fn put(&self, queue: Vec<Queued>) {
        // The cursor passes what gets a row, and nothing else.
        let floor = queue.iter().map(|queued| queued.delivery.position).max().unwrap_or(0);
        assert!(
            settle(&self.store, pillarbox::store::LaneWrite { queue, ..write(self.lane, self.epoch, floor) }).await
        );
    }

    fn request(&self, limit: usize) -> ClaimRequest {
        ClaimRequest {
            subscription: self.subscription(),
            limit,
            first: ClaimId(1),
            suspect: true,
            tell: Some("".into()),
            again: false,
        }
    }

    async fn ask(&self, store: &SqliteStore, limit: usize) -> Claims {
        store.claim(&[self.request(limit)]).await.unwrap().remove(0)
    }

    async fn claim(&self, limit: usize) -> Vec<Claimed> {
        self.ask(&self.store, limit).await.claimed
    }

    async fn claim_positions(&self, limit: usize) -> Vec<Position> {
        positions(&self.claim(limit).await)
    }

    fn end(&self, claimed: &Claimed, fate: ClaimFate) -> ClaimEnd {
        let position = claimed.delivery.position;
        ClaimEnd { subscription: self.subscription(), position, claim: claimed.claim, fate }
    }

    async fn finish(&self, claimed: &[Claimed], fate: ClaimFate) -> Vec<bool> {
        let ends: Vec<_> = claimed.iter().map(|claimed| self.end(claimed, fate.clone())).collect();
        self.store.finish(&ends).await.unwrap()
    }

    fn row(&self, position: Position, columns: &str) -> String {
        let sql = format!("select concat_ws(' ', {columns}) from pillarbox_delivery where position = {position}");
        self.database.connect().query_row(&sql, [], |row| row.get(0)).unwrap()
    }

    async fn recovered(&self) -> BTreeMap<RecoveryCause, u64> {
        let status = self.database.store().status().await.unwrap();
        status.subscriptions[0].recovered.iter().map(|counted| (counted.cause, counted.count)).collect()
    }

    /// Makes an instance look as if it had last beaten an hour ago.
    fn silence(&self, instance: InstanceId) {
        let at = Timestamp::now().0 - HOUR_MS;
        self.database.execute(&format!("update pillarbox_instance set beat_at = {at} where id = {}", instance.0));
    }
}

fn positions(claimed: &[Claimed]) -> Vec<Position> {
    claimed.iter().map(|claimed| claimed.delivery.position).collect()
}

fn pending(position: Position, key: &str) -> Queued {
    let now = Timestamp::now();
    let key = (!key.is_empty()).then(|| key.into());
    let delivery =
        DeliveryRow { position, key, arrival: 0, state: State::Pending, attempts: 0, due_at: now, since: now };
    Queued { delivery, claim: None, error: None }
}

fn delayed(position: Position, key: &str, due_at: Timestamp) -> Queued {
    let queued = pending(position, key);
    Queued { delivery: DeliveryRow { state: State::Delayed, due_at, ..queued.delivery }, ..queued }
}

fn failed(state: State, attempts: u32, due_at: Timestamp) -> ClaimFate {
    let error = AttemptError { at: Timestamp::now(), attempt: attempts, kind: "event".into(), message: "no".into() };
    ClaimFate::Failed(Failed { state, attempts, due_at, error })
}

fn dead(instance: InstanceId, cause: RecoveryCause, beat: Option<i64>) -> RecoverRequest {
    RecoverRequest { ended: vec![(instance, cause, beat)], ..RecoverRequest::default() }
}

const SWEEP: RecoverRequest = RecoverRequest { ended: Vec::new(), sweep: true, silent: Vec::new() };

/// Claims and ends what it can until nothing is left; what it got, in order.
async fn work(ground: &Ground, store: &SqliteStore, busy: &Mutex<HashSet<Box<str>>>) -> Vec<(Box<str>, Position)> {
    let mut done = Vec::new();
    let mut first = 1;
    loop {
        let request = ClaimRequest { first: ClaimId(first), ..ground.request(7) };
        let claims = store.claim(&[request]).await.unwrap().remove(0);
        first += claims.claimed.len() as i64;
        for claimed in &claims.claimed {
            let key = claimed.delivery.key.clone().unwrap();
            assert!(busy.lock().unwrap().insert(key.clone()), "two work on key {key} at once");
            done.push((key, claimed.delivery.position));
        }
        tokio::task::yield_now().await;
        for claimed in &claims.claimed {
            busy.lock().unwrap().remove(claimed.delivery.key.as_ref().unwrap());
        }
        let ends: Vec<_> = claims.claimed.iter().map(|claimed| ground.end(claimed, ClaimFate::Done)).collect();
        assert!(store.finish(&ends).await.unwrap().iter().all(|ended| *ended));
        if claims.rows == Some(0) {
            return done;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_stores_compete_and_each_row_is_claimed_once_in_the_order_of_its_key() {
    let ground = Ground::new().await;
    let keys: Vec<String> = (0..200).map(|index| format!("k{}", index % 23)).collect();
    ground.fill(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let (b, c, d) = (ground.other().await.0, ground.other().await.0, ground.other().await.0);
    let busy = Mutex::default();
    let got = tokio::join!(
        work(&ground, &ground.store, &busy),
        work(&ground, &b, &busy),
        work(&ground, &c, &busy),
        work(&ground, &d, &busy),
    );
    let mut all: Vec<Position> = [&got.0, &got.1, &got.2, &got.3].into_iter().flatten().map(|(_, at)| *at).collect();
    for one in [&got.0, &got.1, &got.2, &got.3] {
        let mut last = HashMap::new();
        for (key, position) in one {
            assert!(last.insert(key, position).is_none_or(|before| before < position), "{key} is out of order");
        }
    }
    all.sort_unstable();
    assert_eq!(all, (1..=200).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_keys_rows_come_one_at_a_time_and_those_without_a_key_at_once() {
    let ground = Ground::new().await;
    ground.fill(&["a", "", "a", "", "b", "a"]).await;
    let first = ground.claim(10).await;
    assert_eq!(positions(&first), [1, 2, 4, 5]);
    assert!(first.iter().all(|claimed| claimed.delivery.state == State::Processing && !claimed.suspect));
    assert_eq!(first[0].event.as_ref().unwrap().position, 1);
    assert_eq!(ground.claim_positions(10).await, [0; 0]);
    assert_eq!(ground.finish(&first[..1], ClaimFate::Done).await, [true]);
    let second = ground.claim(10).await;
    assert_eq!(positions(&second), [3]);
    let later = Timestamp(Timestamp::now().0 + HOUR_MS);
    assert_eq!(ground.finish(&second, failed(State::Retrying, 1, later)).await, [true]);
    let claims = ground.ask(&ground.store, 10).await;
    assert!(claims.claimed.is_empty(), "it waits, and its key with it");
    assert_eq!(claims.next_due, Some(later));
    assert_eq!(ground.row(3, "state, attempts, json_extract(errors, '$[0].message')"), "retrying 1 no");
}

#[tokio::test]
async fn what_is_given_back_counts_no_attempt_and_comes_again_before_the_rest_of_its_key() {
    let ground = Ground::new().await;
    ground.fill(&["a", "a", ""]).await;
    let claimed = ground.claim(10).await;
    assert_eq!(positions(&claimed), [1, 3]);
    assert_eq!(ground.finish(&claimed, ClaimFate::Back).await, [true, true]);
    assert_eq!(ground.row(1, "state, attempts, owner, claim, claimed_at"), "pending 0");
    let again = ground.claim(10).await;
    assert_eq!(positions(&again), [1, 3]);
    assert!(ground.finish(&again[..1], failed(State::Retrying, 1, Timestamp(0))).await[0]);
    let third = ground.claim(10).await;
    assert!(ground.finish(&third, ClaimFate::Back).await[0]);
    assert_eq!((positions(&third), &*ground.row(1, "state, attempts")), (vec![1], "retrying 1"));
}

#[tokio::test]
async fn dead_ones_block_their_key_or_not_and_that_can_be_changed() {
    for (on_dead, next) in [(OnDead::Block, None), (OnDead::Skip, Some(2))] {
        let ground = Ground::of(Subscription { on_dead, ..queue() }).await;
        ground.fill(&["a", "a"]).await;
        let claimed = ground.claim(1).await;
        ground.finish(&claimed, failed(State::Dead, 1, Timestamp::now())).await;
        let claimed = ground.claim(10).await;
        assert_eq!(positions(&claimed).first().copied(), next);
        ground.finish(&claimed, ClaimFate::Back).await;
        let other = if on_dead == OnDead::Block { OnDead::Skip } else { OnDead::Block };
        join(&ground.database.store(), [Subscription { on_dead: other, ..queue() }]).await;
        assert_eq!(ground.claim(10).await.len(), usize::from(next.is_none()));
    }
}

#[tokio::test]
async fn delayed_ones_take_their_place_when_they_are_due() {
    let ground = Ground::new().await;
    ground.database.publish_keys(&["a", "a", "b", "a"]);
    let soon = Timestamp(Timestamp::now().0 + 300);
    let later = Timestamp(Timestamp::now().0 + HOUR_MS);
    ground.put(vec![delayed(1, "a", soon), pending(2, "a"), delayed(3, "b", later)]).await;
    let claims = ground.ask(&ground.store, 10).await;
    assert_eq!((positions(&claims.claimed), claims.next_due, claims.waiting), (vec![2], Some(soon), 0));
    let mut claims = ground.ask(&ground.store, 10).await;
    while claims.next_due != Some(later) {
        claims = ground.ask(&ground.store, 10).await;
    }
    assert!(Timestamp::now() >= soon, "not before it is due");
    ground.put(vec![pending(4, "a")]).await;
    assert_eq!(ground.claim_positions(10).await, [0; 0], "one of its key is worked on");
    let two = [Claimed { claim: ClaimId(1), delivery: pending(2, "a").delivery, event: None, suspect: false }];
    assert_eq!(ground.finish(&two, ClaimFate::Done).await, [true]);
    let next = ground.claim(10).await;
    assert_eq!(positions(&next), [1], "behind what its key had when it was due, before what came later");
    ground.finish(&next, ClaimFate::Done).await;
    assert_eq!(ground.claim_positions(10).await, [4]);
}

#[tokio::test]
async fn the_figures_tell_what_waits() {
    let ground = Ground::new().await;
    ground.fill(&["a", "a", "b", "", ""]).await;
    let claims = ground.ask(&ground.store, 0).await;
    let mut keys = claims.keys.unwrap();
    keys.sort_unstable();
    assert_eq!((claims.claimed.len(), claims.waiting, claims.rows, claims.next_due), (0, 4, Some(5), None));
    assert_eq!(keys, [Box::from("a"), Box::from("b")]);
    let claims = ground.ask(&ground.store, 1).await;
    assert_eq!((claims.claimed.len(), claims.waiting), (1, 3));
    let quiet = ClaimRequest { tell: None, ..ground.request(0) };
    let claims = ground.store.claim(&[quiet]).await.unwrap().remove(0);
    assert_eq!((claims.keys, claims.rows), (None, None));
    let many: Vec<String> = (0..pillarbox::store::KEYS_TOLD_MAX).map(|index| format!("k{index}")).collect();
    ground.fill(&many.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let claims = ground.ask(&ground.store, 0).await;
    let told = claims.keys.unwrap();
    assert_eq!(
        (told.len(), claims.rows),
        (pillarbox::store::KEYS_TOLD_MAX, Some(pillarbox::store::KEYS_TOLD_MAX as u64 + 5)),
        "a slice is told"
    );
    let rest = ClaimRequest { tell: told.last().cloned(), ..ground.request(0) };
    let rest = ground.store.claim(&[rest]).await.unwrap().remove(0).keys.unwrap();
    assert_eq!(rest.len(), 2, "and then the rest");
}

#[tokio::test]
async fn rows_are_written_with_the_cursor_and_a_row_that_is_there_stays() {
    let ground = Ground::new().await;
    ground.database.publish_keys(&["a", "b", "c"]);
    let stale = pillarbox::store::LaneWrite { queue: vec![pending(1, "a")], ..write(ground.lane, ground.epoch - 1, 3) };
    assert!(!settle(&ground.store, stale).await);
    assert_eq!(ground.ask(&ground.store, 0).await.rows, Some(0), "fenced by the epoch");

    let error = AttemptError { at: Timestamp::now(), attempt: 1, kind: "event".into(), message: "first".into() };
    let mut worked_on = pending(1, "a");
    worked_on.delivery.state = State::Processing;
    worked_on.claim = Some(ClaimId(7));
    let mut failing = pending(2, "b");
    failing.delivery = DeliveryRow { state: State::Retrying, attempts: 1, ..failing.delivery };
    failing.error = Some(error);
    ground.put(vec![worked_on, failing]).await;
    ground.put(vec![pending(1, "a"), pending(2, "b")]).await;
    assert_eq!(ground.row(1, "state, owner, claim"), format!("processing {} 7", ground.instance.0));
    assert_eq!(ground.row(2, "state, attempts, json_extract(errors, '$[0].message')"), "retrying 1 first");
    let state = ground.store.load(&[(ground.lane, ground.epoch)]).await.unwrap().remove(0).unwrap();
    let mut keys = state.queued_keys;
    keys.sort_unstable();
    assert_eq!((state.deliveries.len(), keys), (0, vec!["a".into(), "b".into()]));
    assert_eq!(ground.claim_positions(10).await, [2]);
    let one = [Claimed { claim: ClaimId(7), delivery: pending(1, "a").delivery, event: None, suspect: false }];
    assert_eq!(ground.finish(&one, ClaimFate::Done).await, [true]);
}

#[tokio::test]
async fn only_who_has_the_claim_can_end_it() {
    let ground = Ground::new().await;
    ground.fill(&["a", "a"]).await;
    let claimed = ground.claim(1).await;
    let (other, _) = ground.other().await;
    let mut old = ground.end(&claimed[0], ClaimFate::Done);
    assert_eq!(other.finish(&[old.clone()]).await.unwrap(), [false], "a foreign claim");
    old.claim = ClaimId(99);
    assert_eq!(ground.store.finish(&[old]).await.unwrap(), [false], "an old claim");
    assert_eq!(ground.row(1, "state, claim"), "processing 1");
    assert_eq!(ground.finish(&claimed, ClaimFate::Done).await, [true]);
    assert_eq!(ground.finish(&claimed, ClaimFate::Done).await, [false], "it is over");
}

#[tokio::test]
async fn the_claims_of_a_dead_process_come_back_as_an_attempt() {
    let ground = Ground::new().await;
    ground.fill(&["a", "a", ""]).await;
    let (other, other_id) = ground.other().await;
    assert_eq!(ground.ask(&other, 10).await.claimed.len(), 2);
    drop(other);
    let fleet = ground.store.observe(&Default::default()).await.unwrap();
    let lock = fleet.instances.iter().find(|instance| instance.id == other_id).map(|instance| instance.lock);
    assert_eq!(lock, Some(Lock::Free));
    let fleet = ground.store.observe(&Default::default()).await.unwrap();
    assert_eq!(fleet.instances.len(), 2, "not buried while it has claims");
    assert_eq!(fleet.instances[1].lock, Lock::Free, "the proof of its end is still there");
    assert_eq!(ground.claim_positions(10).await, [0; 0]);

    let recovered = ground.store.recover(&dead(other_id, RecoveryCause::Crash, None)).await.unwrap();
    assert_eq!(recovered.claims, [(ground.subscription(), RecoveryCause::Crash, 2)]);
    assert_eq!(ground.recovered().await, BTreeMap::from([(RecoveryCause::Crash, 2)]));
    let again = ground.claim(10).await;
    assert_eq!(positions(&again), [1, 3], "due at once");
    assert_eq!(again[0].delivery.attempts, 1);
    assert_eq!(ground.row(1, "crashes, json_extract(errors, '$[0].kind')"), format!("1 {CRASH}"));
    ground.store.observe(&Default::default()).await.unwrap();
    assert_eq!(ground.store.observe(&Default::default()).await.unwrap().instances.len(), 1, "now it is buried");
}

#[tokio::test]
async fn an_event_that_kills_its_process_ends_as_dead_and_is_a_suspect_before() {
    let retry = RetryPolicy { max_attempts: 3, base: Duration::ZERO, ..RetryPolicy::handler() };
    let ground = Ground::of(Subscription { retry, ..queue() }).await;
    ground.fill(&["a", "b"]).await;
    for crash in 1..=3u32 {
        let claimed = ground.claim(10).await;
        let suspect = crash > SUSPECT_AFTER;
        assert_eq!(claimed.len(), if suspect { 1 } else { 2 }, "suspects are worked on alone");
        assert_eq!(claimed[0].suspect, suspect);
        let cautious = ClaimRequest { suspect: false, ..ground.request(10) };
        assert!(ground.store.claim(&[cautious]).await.unwrap()[0].claimed.is_empty());
        ground.store.recover(&dead(ground.instance, RecoveryCause::Crash, None)).await.unwrap();
    }
    assert_eq!(ground.row(1, "state, attempts, crashes, died_at > 0"), "dead 3 3 1");
    assert_eq!(ground.row(2, "state, attempts, crashes"), "retrying 2 2");
    assert_eq!(ground.recovered().await[&RecoveryCause::Crash], 5);
    assert_eq!(ground.claim_positions(10).await, [2]);
}

#[tokio::test]
async fn a_claim_that_was_not_answered_is_told_again() {
    let ground = Ground::new().await;
    ground.fill(&["", "", "", ""]).await;
    let request = ClaimRequest { first: ClaimId(5), ..ground.request(2) };
    let again = ClaimRequest { again: true, ..request.clone() };
    for request in [again.clone(), again, request] {
        let claimed = ground.store.claim(std::slice::from_ref(&request)).await.unwrap().remove(0).claimed;
        assert!(claimed.iter().all(|claimed| claimed.event.is_some()));
        let expected: [Position; 2] = if request.again { [1, 2] } else { [3, 4] };
        assert_eq!((positions(&claimed), claimed[0].claim), (expected.to_vec(), ClaimId(5)));
    }
}

#[tokio::test]
async fn a_lease_takes_claims_only_from_who_stood_still() {
    let ground = Ground::new().await;
    ground.fill(&["a"]).await;
    let (other, other_id) = ground.other().await;
    let late = ground.ask(&other, 10).await.claimed;
    other.observe(&Default::default()).await.unwrap();
    let beat = ground.database.number(&format!("select beat from pillarbox_instance where id = {}", other_id.0));
    let recover = async |beat| ground.store.recover(&dead(other_id, RecoveryCause::Lease, Some(beat))).await.unwrap();
    assert_eq!(recover(beat - 1).await.claims, [], "it has beaten since");
    assert_eq!(recover(beat).await.claims, [(ground.subscription(), RecoveryCause::Lease, 1)]);
    let claimed = ground.claim(10).await;
    assert_eq!(other.finish(&[ground.end(&late[0], ClaimFate::Done)]).await.unwrap(), [false], "too late");
    assert_eq!(ground.finish(&claimed, ClaimFate::Done).await, [true]);
}

#[tokio::test]
async fn a_sweep_takes_claims_from_the_silent_and_the_vanished() {
    let ground = Ground::new().await;
    ground.fill(&["a", "b", "c", "d"]).await;
    let (silent, silent_id) = ground.other().await;
    let (gone, gone_id) = ground.other().await;
    let (alive, _) = ground.other().await;
    for store in [&silent, &gone, &alive, &ground.store] {
        assert_eq!(ground.ask(store, 1).await.claimed.len(), 1);
    }
    assert_eq!(ground.store.status().await.unwrap().log.recovery_at, None);
    ground.database.execute(&format!("delete from pillarbox_instance where id = {}", gone_id.0));
    let seen = ground.store.observe(&Default::default()).await.unwrap().instances;
    let silent = [silent_id, ground.instance].map(|id| {
        let beat = seen.iter().find(|instance| instance.id == id).unwrap().beat;
        (id, beat, Duration::from_millis(HOUR_MS as u64))
    });
    let sweep = RecoverRequest { silent: silent.to_vec(), ..SWEEP };
    let mut recovered = ground.store.recover(&sweep).await.unwrap().claims;
    recovered.sort_unstable();
    let id = ground.subscription();
    assert_eq!(recovered, [(id, RecoveryCause::Crash, 1), (id, RecoveryCause::Timeout, 1)]);
    assert_eq!(ground.row(4, "state"), "processing", "whoever looks lives");
    assert!(ground.store.status().await.unwrap().log.recovery_at.is_some());
    assert_eq!(gone.claim(&[ground.request(1)]).await.unwrap_err().kind(), ErrorKind::Ended);
    assert_eq!(ground.store.recover(&SWEEP).await.unwrap().claims, []);
}

#[tokio::test]
async fn an_operator_takes_claims_from_whom_he_names() {
    let ground = Ground::new().await;
    ground.fill(&["a", "b"]).await;
    let (other, other_id) = ground.other().await;
    let late = ground.ask(&other, 1).await.claimed;
    assert_eq!(ground.claim(1).await.len(), 1);
    let change = async |subscription: Option<&str>, instance, silent_for, dry_run| {
        let subscription = subscription.map(str::to_owned);
        let change = Change::Recover { subscription, instance, silent_for };
        ground.store.change(&change, dry_run).await.unwrap().count
    };
    assert_eq!(change(None, None, LONG, false).await, 0, "both live");
    assert_eq!(change(Some("q"), None, Duration::ZERO, true).await, 2);
    assert_eq!(ground.recovered().await, BTreeMap::new(), "that was a dry run");
    assert_eq!(change(None, Some(other_id), Duration::ZERO, false).await, 1);
    assert_eq!(other.finish(&[ground.end(&late[0], ClaimFate::Done)]).await.unwrap(), [false]);
    ground.silence(ground.instance);
    assert_eq!(change(None, None, LONG, false).await, 1);
    assert_eq!(ground.recovered().await, BTreeMap::from([(RecoveryCause::Operator, 2)]));
    assert_eq!(ground.claim_positions(10).await, [1, 2]);
}

#[tokio::test]
async fn the_event_of_a_row_is_there_after_its_range_was_pruned() {
    let ground = Ground::new().await;
    ground.fill(&["a", "b"]).await;
    let claimed = ground.claim(1).await;
    ground.finish(&claimed, ClaimFate::Back).await;
    ground.database.execute("drop trigger pillarbox_event_is_never_changed; update pillarbox_event set created_at = 0");
    let pruned = ground.store.prune(&PrunePolicy::default()).await.unwrap();
    assert_eq!((pruned.events, pruned.kept), (2, 2));
    let claimed = ground.claim(10).await;
    assert_eq!(claimed.len(), 2);
    assert!(claimed.iter().all(|claimed| claimed.event.is_some()));
    ground.database.execute("delete from pillarbox_event_kept");
    ground.finish(&claimed, ClaimFate::Back).await;
    assert!(ground.claim(1).await[0].event.is_none(), "somebody removed it by hand");
}

#[tokio::test]
async fn rows_that_are_left_ring_for_others_who_claim_and_for_nobody_else() {
    let ground = Ground::new().await;
    let (other, _) = ground.other().await;
    let stream = ground.database.store();
    join(&stream, [one_lane("stream")]).await;
    ground.ask(&ground.store, 10).await;
    let settle_down = async || {
        for store in [&ground.store, &other, &stream] {
            poll_tail(store, 0).await;
            store.observe(&Default::default()).await.unwrap();
        }
        ground.ask(&other, 10).await
    };
    ground.database.publish_keys(&["a", "a"]);
    settle_down().await;
    ground.put(vec![pending(1, "a"), pending(2, "a")]).await;
    assert_eq!(other.wait(LONG).await.unwrap(), Wake::Rang, "there is something to claim");
    assert_eq!(stream.wait(SHORT).await.unwrap(), Wake::Timeout, "it does not claim");
    assert_eq!(ground.store.wait(SHORT).await.unwrap(), Wake::Timeout, "it was its own doing");

    let claimed = settle_down().await.claimed;
    assert_eq!(positions(&claimed), [1]);
    assert_eq!(other.wait(SHORT).await.unwrap(), Wake::Timeout, "answered");
    let end = |fate| [ground.end(&claimed[0], fate)];
    assert_eq!(other.finish(&end(ClaimFate::Back)).await.unwrap(), [true]);
    assert_eq!(ground.store.wait(LONG).await.unwrap(), Wake::Rang, "somebody gave it back");
    assert_eq!(other.wait(SHORT).await.unwrap(), Wake::Timeout);
    let claimed = ground.claim(10).await;
    ground.finish(&claimed, ClaimFate::Done).await;
    assert_eq!(other.wait(SHORT).await.unwrap(), Wake::Timeout, "claims and their ends ring for nobody");
    assert_eq!(ground.store.wait(SHORT).await.unwrap(), Wake::Timeout);

    ground.ask(&other, 0).await;
    ground.put(vec![pending(1, "a")]).await;
    assert_eq!(other.wait(SHORT).await.unwrap(), Wake::Timeout, "it has no room");
}

#[tokio::test]
async fn a_requeued_one_waits_for_a_later_one_of_its_key_that_is_worked_on() {
    let ground = Ground::of(Subscription { on_dead: OnDead::Skip, ..queue() }).await;
    ground.fill(&["a", "a", "a"]).await;
    let first = ground.claim(1).await;
    ground.finish(&first, failed(State::Dead, 8, Timestamp::now())).await;
    let second = ground.claim(10).await;
    assert_eq!(positions(&second), [2]);
    let all = Change::Requeue { subscription: "q".into(), which: Selection::All, limit: 10 };
    ground.store.change(&all, false).await.unwrap();
    assert_eq!(ground.claim_positions(10).await, [0; 0]);
    ground.finish(&second, ClaimFate::Done).await;
    assert_eq!(ground.claim_positions(10).await, [1], "and comes before the rest of it");
}

#[tokio::test]
async fn a_rewind_takes_rows_and_claims_away_or_brings_a_key_back() {
    let ground = Ground::new().await;
    ground.fill(&["a", "b", "a", "b"]).await;
    let claimed = ground.claim(10).await;
    assert_eq!(positions(&claimed), [1, 2]);
    let rewind = |key: Option<&str>, to| {
        let key = key.map(str::to_owned);
        Change::Rewind { subscription: "q".into(), to: Start::Position(to), key }
    };
    ground.store.change(&rewind(Some("a"), 0), false).await.unwrap();
    assert_eq!(ground.finish(&claimed, ClaimFate::Done).await, [false, true], "only that of the key is taken away");
    let again = ground.claim(10).await;
    assert_eq!(positions(&again), [1, 4]);

    ground.store.change(&rewind(None, 1), false).await.unwrap();
    assert_eq!(ground.finish(&again, ClaimFate::Back).await, [true, false], "rows of the range are gone");
    assert_eq!(ground.ask(&ground.store, 0).await.rows, Some(1));
    let stale = pillarbox::store::LaneWrite { queue: vec![pending(3, "a")], ..write(ground.lane, ground.epoch, 4) };
    assert!(!settle(&ground.store, stale).await, "the epoch has risen");
    assert_eq!(ground.claim_positions(10).await, [1]);
}

#[tokio::test]
async fn status_list_and_show_say_who_works_on_what() {
    let ground = Ground::new().await;
    ground.fill(&["a", "a"]).await;
    ground.claim(1).await;
    let status = ground.store.status().await.unwrap().subscriptions.remove(0);
    assert_eq!((status.processing, status.blocked, status.mode), (1, 1, Mode::Queue));
    assert!(status.oldest_processing_seconds.is_some_and(|seconds| seconds < LONG.as_secs_f64()));
    let query = ListQuery { subscription: Some("q".into()), limit: 10, ..ListQuery::default() };
    let rows = ground.store.list(&query).await.unwrap();
    let claim = rows[0].claim.as_ref().unwrap();
    assert_eq!((claim.instance, claim.beat_at.is_some()), (ground.instance, true));
    assert!(rows[1].claim.is_none() && rows[1].state == Some(State::Blocked));
    let shown = ground.store.show(rows[0].id).await.unwrap().unwrap().subscriptions.remove(0).delivery.unwrap();
    assert_eq!((shown.state, shown.claim.as_ref()), (State::Processing, Some(claim)));
    let book = ground.store.books().await.unwrap().lanes.remove(0);
    assert_eq!(book.deliveries.to_string(), "1-2");
}

#[tokio::test]
async fn a_queue_that_is_deleted_leaves_no_row() {
    let ground = Ground::new().await;
    ground.fill(&["a", "b", "a"]).await;
    ground.claim(1).await;
    ground.store.recover(&dead(ground.instance, RecoveryCause::Crash, None)).await.unwrap();
    ground.store.leave().await.unwrap();
    let left = "select (select count(*) from pillarbox_delivery) + (select count(*) from pillarbox_recovery)";
    assert_eq!(ground.database.number(left), 4);
    ground.store.change(&Change::Delete("q".into()), false).await.unwrap();
    assert_eq!(ground.database.number(left), 0);
}

/// A relay whose handler notes the event and then waits until there is a permit.
async fn relay(database: &Database, gate: &Arc<Semaphore>) -> (Relay, mpsc::UnboundedReceiver<Position>) {
    let (begun, begins) = mpsc::unbounded_channel();
    let gate = gate.clone();
    let handler = move |event: Delivery| {
        let (begun, gate) = (begun.clone(), gate.clone());
        async move {
            begun.send(event.position).unwrap();
            gate.acquire().await.unwrap().forget();
            Ok(())
        }
    };
    let engine = EngineConfig { poll_interval: LONG, ..EngineConfig::default() };
    let relay = Relay::builder(database.store())
        .config(RelayConfig { engine, ..RelayConfig::default() })
        .handle(Subscription { workers: 1, ..queue() }, handler)
        .start()
        .await
        .unwrap();
    (relay, begins)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_behind_a_slow_handler_is_worked_on_by_another_relay() {
    let database = Database::new();
    let (shut, open) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(1_000)));
    let (slow, mut slow_begins) = relay(&database, &shut).await;
    slow.until_idle().await.unwrap();
    let (fast, mut fast_begins) = relay(&database, &open).await;
    database.publish_keys(&["a", "b", "a", "c"]);
    assert_eq!(slow_begins.recv().await, Some(1), "it owns the only lane");
    let mut elsewhere = [fast_begins.recv().await.unwrap(), fast_begins.recv().await.unwrap()];
    elsewhere.sort_unstable();
    assert_eq!(elsewhere, [2, 4], "the key of the slow one waits");
    shut.add_permits(1_000);
    let last = tokio::select! {
        position = slow_begins.recv() => position,
        position = fast_begins.recv() => position,
    };
    assert_eq!(last, Some(3));
    slow.until_idle().await.unwrap();
    slow.drain().await.unwrap();
    fast.drain().await.unwrap();
    assert_eq!(slow_begins.recv().await.or(fast_begins.recv().await), None, "nothing came twice");
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 0);
}

#[tokio::test]
async fn one_claim_holds_a_page_of_payload_at_most() {
    let ground = Ground::new().await;
    const EACH: usize = 1024 * 1024;
    let count = (PAGE_BYTES_MAX / EACH + 1) as i64;
    let event = || NewEvent::new("t", "y").bytes(vec![0; EACH], "application/octet-stream");
    ground.database.publish(&(0..count).map(|_| event()).collect::<Vec<_>>());
    ground.put((1..=count).map(|position| pending(position, "")).collect()).await;
    let claims = ground.ask(&ground.store, 100).await;
    assert_eq!((claims.claimed.len() as i64, claims.waiting), (count - 1, 1));
}

#[tokio::test]
async fn many_that_are_due_at_once_take_their_place_with_several_claims() {
    let ground = Ground::new().await;
    let keys = vec!["k"; 1_001];
    ground.database.publish_keys(&keys);
    ground.put((1..=1_001).map(|position| delayed(position, "", Timestamp(position))).collect()).await;
    let claims = ground.ask(&ground.store, 0).await;
    assert_eq!((claims.waiting, claims.next_due), (1_000, Some(Timestamp(1_001))), "the last one is due already");
    let claims = ground.ask(&ground.store, 2).await;
    assert_eq!((positions(&claims.claimed), claims.waiting, claims.next_due), (vec![1, 2], 999, None));
}
