//! Queues: what instances compete for, who gets what, and what becomes of it when they die.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::{Change, Operator, PrunePolicy, Selection, State};
use pillarbox::limit::PAYLOAD_BYTES_MAX;
use pillarbox::store::{
    AttemptError, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, DeliveryRow, Epoch, Failed, InstanceId,
    LaneRef, LaneWrite, Queued, RecoverRequest, RecoveryCause, Report, SUSPECT_AFTER, Store, SubscriptionId, TakeCause,
    Wake,
};
use pillarbox::{ErrorKind, Mode, NewEvent, OnDead, Position, RetryPolicy, Subscription, Timestamp};
use pillarbox_postgres::{PAGE_BYTES_MAX, PostgresStore};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::fixture::{Database, join, lane, one_lane, pages, poll_tail, settle, take, write};
use crate::ownership::until;
use crate::retention;

/// Far longer than any of these tests.
const LONG: Duration = Duration::from_secs(20);

/// Long enough for a false wake-up to show.
const SHORT: Duration = Duration::from_millis(150);

/// The advisory lock that holds a transaction back at its commit.
const GATE: i64 = 4_242;

fn queue() -> Subscription {
    let retry = RetryPolicy { base: Duration::ZERO, jitter: false, ..RetryPolicy::handler() };
    Subscription { mode: Mode::Queue, retry, ..one_lane("s") }
}

/// An instance of the queue `s`.
struct Worker {
    store: PostgresStore,
    id: InstanceId,
    subscription: SubscriptionId,
}

impl Worker {
    async fn join(database: &Database, wish: Subscription) -> Self {
        let store = database.store().await;
        let joined = join(&store, [wish]).await;
        Worker { store, id: joined.instance, subscription: joined.subscriptions[0].id }
    }

    fn request(&self, limit: usize, first: i64) -> ClaimRequest {
        let first = ClaimId(first);
        ClaimRequest { subscription: self.subscription, limit, first, suspect: false, tell: None, again: false }
    }

    async fn ask(&self, request: ClaimRequest) -> Claims {
        self.store.claim(&[request]).await.unwrap().remove(0)
    }

    async fn claim(&self, limit: usize, first: i64) -> Vec<Claimed> {
        self.ask(self.request(limit, first)).await.claimed
    }

    async fn end(&self, claimed: &[Claimed], fate: ClaimFate) -> Vec<bool> {
        let subscription = self.subscription;
        let end = |claimed: &Claimed| {
            let (position, claim, fate) = (claimed.delivery.position, claimed.claim, fate.clone());
            ClaimEnd { subscription, position, claim, fate }
        };
        self.store.finish(&claimed.iter().map(end).collect::<Vec<_>>()).await.unwrap()
    }

    async fn done(&self, claimed: &[Claimed]) {
        assert_eq!(self.end(claimed, ClaimFate::Done).await, vec![true; claimed.len()]);
    }

    async fn recover(
        &self,
        dead: &[(InstanceId, RecoveryCause, Option<i64>)],
        sweep: bool,
    ) -> Vec<(&'static str, u64)> {
        let request = RecoverRequest { ended: dead.to_vec(), sweep, ..RecoverRequest::default() };
        let recovered = self.store.recover(&request).await.unwrap();
        recovered.claims.into_iter().map(|(_, cause, count)| (cause.name(), count)).collect()
    }

    async fn beat_of(&self, id: InstanceId) -> i64 {
        let fleet = self.store.observe(&Report::default()).await.unwrap();
        fleet.instances.iter().find(|instance| instance.id == id).unwrap().beat
    }
}

/// The owner of the queue's only lane.
struct Feeder {
    worker: Worker,
    lane: LaneRef,
    epoch: Epoch,
}

impl Feeder {
    async fn new(database: &Database, wish: Subscription) -> Self {
        let worker = Worker::join(database, wish).await;
        let lane = lane(worker.subscription);
        let epoch = take(&worker.store, lane, TakeCause::Free).await.unwrap();
        Feeder { worker, lane, epoch }
    }

    /// Publishes one event a key (none: `-`), and gives each a pending row.
    async fn feed(&self, database: &Database, keys: &[&str]) -> Vec<Position> {
        let at = self.publish(database, keys).await;
        self.queue(at.iter().zip(keys).map(|(at, key)| pending(*at, key)).collect()).await;
        at
    }

    async fn publish(&self, database: &Database, keys: &[&str]) -> Vec<Position> {
        let event = |key: &&str| match *key {
            "-" => NewEvent::new("t", "y"),
            key => NewEvent::new("t", "y").key(key),
        };
        database.publish(&keys.iter().map(event).collect::<Vec<_>>()).await;
        let last = database.number("select max(position) from pillarbox.event").await;
        (last - keys.len() as i64 + 1..=last).collect()
    }

    async fn queue(&self, queue: Vec<Queued>) {
        let floor = queue.iter().map(|queued| queued.delivery.position).max().unwrap();
        assert!(settle(&self.worker.store, LaneWrite { queue, ..write(self.lane, self.epoch, floor) }).await);
    }
}

fn pending(position: Position, key: &str) -> Queued {
    let key = Some(key).filter(|key| *key != "-").map(Into::into);
    let (due_at, since) = (Timestamp(0), Timestamp::now());
    let delivery = DeliveryRow { position, key, arrival: 0, state: State::Pending, attempts: 0, due_at, since };
    Queued { delivery, claim: None, error: None }
}

fn delayed(position: Position, key: &str, due_at: Timestamp) -> Queued {
    let mut queued = pending(position, key);
    (queued.delivery.state, queued.delivery.due_at) = (State::Delayed, due_at);
    queued
}

fn failed(state: State, attempts: u32) -> ClaimFate {
    let error = AttemptError { at: Timestamp(1), attempt: attempts, kind: "k".into(), message: "no".into() };
    ClaimFate::Failed(Failed { state, attempts, due_at: Timestamp(0), error })
}

fn positions(claimed: &[Claimed]) -> Vec<Position> {
    claimed.iter().map(|claimed| claimed.delivery.position).collect()
}

const UNREADY: &str = "select count(*) from pillarbox.delivery where ready_at is null";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_stores_compete_and_no_row_is_claimed_twice() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.feed(&database, &["-"; 200]).await;
    let other = Worker::join(&database, queue()).await;
    let drain = async |worker: &Worker| {
        let (mut all, mut first) = (Vec::new(), 1);
        loop {
            let claims = worker.ask(worker.request(7, first)).await;
            first += 7;
            all.extend(positions(&claims.claimed));
            if claims.claimed.is_empty() && claims.waiting == 0 {
                return all;
            }
        }
    };
    let (one, two) = tokio::join!(drain(&feeder.worker), drain(&other));
    assert!(!one.is_empty() && !two.is_empty(), "{} and {} were claimed", one.len(), two.len());
    let mut all = [one, two].concat();
    all.sort_unstable();
    assert_eq!(all, at);
    assert_eq!(database.number("select count(distinct (owner, claim)) from pillarbox.delivery").await, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_comes_one_at_a_time_and_in_order_though_four_compete() {
    const KEYS: [&str; 5] = ["a", "b", "c", "d", "e"];
    const ROWS: usize = 100;
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let keys: Vec<&str> = KEYS.iter().cycle().take(ROWS).copied().collect();
    feeder.feed(&database, &keys).await;
    let seen: Arc<Mutex<BTreeMap<String, Vec<Position>>>> = Arc::default();
    let busy: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let worker = Worker::join(&database, queue()).await;
        let (seen, busy) = (seen.clone(), busy.clone());
        tasks.spawn(async move {
            let mut first = 1;
            while seen.lock().unwrap().values().map(Vec::len).sum::<usize>() < ROWS {
                let claimed = worker.claim(2, first).await;
                first += 2;
                for claimed in &claimed {
                    let key = claimed.delivery.key.as_deref().unwrap().to_owned();
                    assert!(busy.lock().unwrap().insert(key.clone()), "{key} is being worked on");
                    seen.lock().unwrap().entry(key).or_default().push(claimed.delivery.position);
                }
                tokio::task::yield_now().await;
                for claimed in &claimed {
                    assert!(busy.lock().unwrap().remove(claimed.delivery.key.as_deref().unwrap()));
                }
                worker.done(&claimed).await;
            }
        });
    }
    tokio::time::timeout(LONG * 3, tasks.join_all()).await.expect("no row is stuck");
    let seen = seen.lock().unwrap();
    assert!(seen.values().all(|positions| positions.len() == ROWS / KEYS.len() && positions.is_sorted()), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_many_rows_does_not_keep_others_waiting() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    feeder.feed(&database, &vec!["big"; 10_000]).await;
    let small: Vec<String> = (0..990).map(|number| format!("k{}", number % 99)).collect();
    feeder.feed(&database, &small.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let (mut left, mut of_big, mut first) = (small.len(), 0, 1);
    while left > 0 {
        let claimed = feeder.worker.claim(30, first).await;
        assert!(!claimed.is_empty(), "{left} rows of small keys are left, and none can be claimed");
        first += 30;
        feeder.worker.done(&claimed).await;
        let big = claimed.iter().filter(|claimed| claimed.delivery.key.as_deref() == Some("big")).count();
        (of_big, left) = (of_big + big, left - (claimed.len() - big));
    }
    assert!(of_big < 1_000, "the big key has run {of_big} times");
}

/// Lets transactions that insert or delete rows wait at their commit as long as the returned client holds the gate.
async fn gate(database: &Database, when: &str) -> Client {
    database
        .execute(&format!(
            "create function pillarbox.gate() returns trigger language plpgsql as
            $$ begin perform pg_advisory_xact_lock_shared({GATE}); return null; end $$;
            create constraint trigger gate after {when} on pillarbox.delivery deferrable initially deferred
            for each row execute function pillarbox.gate()"
        ))
        .await;
    let client = database.client().await;
    client.execute("select pg_advisory_lock($1)", &[&GATE]).await.unwrap();
    client
}

async fn someone_waits_at(gate: &Client) {
    let sql = "select count(*) from pg_locks where locktype = 'advisory' and objid = 4242 and objsubid = 1 and not granted \
               and database = (select oid from pg_database where datname = current_database())";
    until(gate, sql, 1).await;
}

async fn open(gate: &Client) {
    gate.execute("select pg_advisory_unlock($1)", &[&GATE]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_added_while_its_keys_head_is_being_finished_is_found() {
    // Whoever commits last, the row behind the head is ready when both have returned, without any claim having mended it.
    for when in ["insert", "delete"] {
        let database = Database::new().await;
        let feeder = Feeder::new(&database, queue()).await;
        let at = feeder.feed(&database, &["k"]).await;
        let other = Worker::join(&database, queue()).await;
        let head = other.claim(1, 1).await;
        assert_eq!(positions(&head), at);
        let next = feeder.publish(&database, &["k"]).await;
        let gate = gate(&database, when).await;
        let add = feeder.queue(vec![pending(next[0], "k")]);
        let finish = other.done(&head);
        match when {
            "insert" => {
                let finish = async {
                    someone_waits_at(&gate).await;
                    finish.await;
                    open(&gate).await;
                };
                tokio::join!(add, finish);
            }
            _ => {
                let add = async {
                    someone_waits_at(&gate).await;
                    add.await;
                    open(&gate).await;
                };
                tokio::join!(finish, add);
            }
        }
        assert_eq!(database.number(UNREADY).await, 0, "the {when} was committed last");
        assert_eq!(positions(&other.claim(1, 2).await), next);
    }
}

#[tokio::test]
async fn a_head_that_nobody_promoted_is_found_by_a_claim() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.feed(&database, &["k", "k", "j"]).await;
    database.execute("update pillarbox.delivery set ready_at = null").await;
    let claims = feeder.worker.ask(feeder.worker.request(10, 1)).await;
    assert_eq!((claims.claimed.len(), claims.waiting), (0, 2), "two keys have a head");
    let mut found = positions(&feeder.worker.claim(10, 1).await);
    found.sort_unstable();
    assert_eq!(found, [at[0], at[2]]);
}

#[tokio::test]
async fn a_row_that_is_not_its_keys_head_is_not_claimed_whatever_the_hint_says() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.feed(&database, &["k", "k", "k"]).await;
    database.execute("update pillarbox.delivery set ready_at = now() - position * interval '1 minute'").await;
    let head = feeder.worker.claim(10, 1).await;
    assert_eq!(positions(&head), at[..1]);
    assert_eq!(database.number(UNREADY).await, 2, "the hints were taken back");
    feeder.worker.done(&head).await;
    assert_eq!(positions(&feeder.worker.claim(10, 2).await), at[1..2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_taken_back_in_every_way_and_late_ends_are_refused() {
    let database = Database::new().await;
    let wish = Subscription { processing_timeout: Duration::from_millis(100), ..queue() };
    let feeder = Feeder::new(&database, wish.clone()).await;
    let at = feeder.feed(&database, &["k", "-"]).await;
    let victim = Worker::join(&database, wish).await;
    let me = &feeder.worker;
    let recover = |silent_for| Change::Recover { subscription: None, instance: Some(victim.id), silent_for };
    for (way, attempts) in [("crash", 1), ("timeout", 2), ("operator", 3), ("lease", 4)] {
        let request = ClaimRequest { suspect: true, ..victim.request(1, i64::from(attempts)) };
        let claimed = victim.ask(request).await.claimed;
        assert_eq!(claimed.len(), 1, "{way}");
        match way {
            "crash" => assert_eq!(me.recover(&[(victim.id, RecoveryCause::Crash, None)], false).await, [(way, 1)]),
            "lease" => {
                let seen = me.beat_of(victim.id).await;
                victim.store.observe(&Report::default()).await.unwrap();
                assert_eq!(me.recover(&[(victim.id, RecoveryCause::Lease, Some(seen))], false).await, []);
                let seen = me.beat_of(victim.id).await;
                assert_eq!(me.recover(&[(victim.id, RecoveryCause::Lease, Some(seen))], false).await, [(way, 1)]);
            }
            "timeout" => {
                assert_eq!(me.recover(&[], false).await, [], "it was not to look");
                assert_eq!(me.recover(&[], true).await, [], "nothing says that it is silent");
                let silent = vec![(victim.id, me.beat_of(victim.id).await, Duration::from_millis(100))];
                let request = RecoverRequest { sweep: true, silent, ..RecoverRequest::default() };
                let recovered = me.store.recover(&request).await.unwrap().claims;
                assert_eq!(recovered, [(me.subscription, RecoveryCause::Timeout, 1)]);
            }
            _ => {
                let hour = me.store.change(&recover(Duration::from_secs(3600)), false).await.unwrap();
                assert_eq!(hour.count, 0, "{hour:?}");
                assert_eq!(me.store.change(&recover(Duration::ZERO), true).await.unwrap().count, 1);
                assert_eq!(me.store.change(&recover(Duration::ZERO), false).await.unwrap().count, 1);
            }
        }
        if way == "lease" {
            // Its sessions were ended too.
            while victim.store.observe(&Report::default()).await.is_ok() {}
            continue;
        }
        for fate in [ClaimFate::Done, ClaimFate::Back, failed(State::Dead, 9)] {
            assert_eq!(victim.end(&claimed, fate).await, [false], "{way}");
        }
    }
    let status = me.store.status().await.unwrap();
    let counts: Vec<_> = status.subscriptions[0].recovered.iter().map(|it| (it.cause.name(), it.count)).collect();
    assert_eq!(counts, [("crash", 1), ("lease", 1), ("operator", 1), ("timeout", 1)]);
    assert!(status.log.recovery_at.is_some());
    let sql = "select sum(attempts), sum(crashes) from pillarbox.delivery";
    let row = database.client().await.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (4, 4));
    assert_eq!(database.number("select count(*) from pillarbox.delivery where ready_at is null").await, 0, "{at:?}");
}

#[tokio::test]
async fn a_row_whose_process_dies_each_time_is_a_suspect_and_then_dead() {
    let database = Database::new().await;
    let wish = Subscription { retry: RetryPolicy { max_attempts: 3, ..queue().retry }, ..queue() };
    let feeder = Feeder::new(&database, wish.clone()).await;
    let at = feeder.feed(&database, &["k", "k", "j"]).await;
    let me = &feeder.worker;
    for crash in 0..3 {
        let victim = Worker::join(&database, wish.clone()).await;
        if crash >= SUSPECT_AFTER {
            assert_eq!(victim.claim(10, 1).await.len(), 0, "the suspects were not asked for");
        }
        let claims = victim.ask(ClaimRequest { suspect: true, ..victim.request(10, 1) }).await;
        let expected = if crash >= SUSPECT_AFTER { 1 } else { 2 };
        assert_eq!(claims.claimed.len(), expected, "crash {crash}");
        assert!(claims.claimed.iter().all(|claimed| claimed.suspect == (crash >= SUSPECT_AFTER)));
        assert_eq!(me.recover(&[(victim.id, RecoveryCause::Crash, None)], false).await, [("crash", expected as u64)]);
    }
    assert_eq!(database.number("select position from pillarbox.delivery where state = 'dead'").await, at[0]);
    let left = me.ask(ClaimRequest { suspect: true, ..me.request(10, 50) }).await.claimed;
    assert_eq!(positions(&left), at[2..], "a dead one blocks its key");
}

#[tokio::test]
async fn an_instance_with_claims_is_not_buried_before_they_are_recovered() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    feeder.feed(&database, &["-"]).await;
    let victim = Worker::join(&database, queue()).await;
    victim.claim(1, 1).await;
    let (id, me) = (victim.id, &feeder.worker);
    me.store.observe(&Report::default()).await.unwrap();
    drop(victim);
    let (client, alive) =
        (database.client().await, format!("select count(*) from pillarbox.instance where id = {}", id.0));
    until(&client, &crate::ownership::sessions_of(id, "control"), 0).await;
    for _ in 0..3 {
        me.store.observe(&Report::default()).await.unwrap();
    }
    assert_eq!(database.number(&alive).await, 1, "its claims are found by its row");
    assert_eq!(me.recover(&[(id, RecoveryCause::Crash, None)], false).await, [("crash", 1)]);
    while database.number(&alive).await > 0 {
        me.store.observe(&Report::default()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_row_waits_until_nobody_adds_to_its_lane() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.publish(&database, &["k", "k"]).await;
    feeder.queue(vec![delayed(at[0], "k", Timestamp(1))]).await;
    let gate = gate(&database, "insert").await;
    let other = Worker::join(&database, queue()).await;
    let add = feeder.queue(vec![pending(at[1], "k")]);
    let claim = async {
        someone_waits_at(&gate).await;
        let early = other.claim(10, 1).await;
        open(&gate).await;
        early
    };
    let ((), early) = tokio::join!(add, claim);
    assert_eq!(positions(&early), [0; 0], "nobody knows what stands before it");
    for (next, first) in at.iter().rev().zip(10..) {
        let claimed = other.claim(10, first).await;
        assert_eq!(positions(&claimed), [*next], "the delayed one stands behind what its key had");
        other.done(&claimed).await;
    }
}

#[tokio::test]
async fn figures_tell_what_waits_and_when_the_next_is_due() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let me = &feeder.worker;
    let soon = Timestamp::now().plus(Duration::from_secs(3600));
    let at = feeder.publish(&database, &["k", "k", "-"]).await;
    feeder.queue(vec![pending(at[0], "k"), delayed(at[1], "k", soon.plus(LONG)), delayed(at[2], "-", soon)]).await;
    let claims = me.ask(ClaimRequest { tell: Some("".into()), ..me.request(0, 1) }).await;
    assert_eq!((claims.claimed.len(), claims.waiting, claims.next_due, claims.rows), (0, 1, Some(soon), Some(1)));
    assert_eq!(claims.keys.unwrap(), ["k".into()]);
    let many = 2_500;
    feeder.feed(&database, &vec!["-"; many]).await;
    for (claimed, first) in [(0, 1), (100, 1), (100, 101), (100, 201)] {
        let claims = me.ask(me.request(claimed, first)).await;
        let taken = if claimed == 0 { 0 } else { first as usize - 1 + claimed };
        assert_eq!((claims.claimed.len(), claims.waiting), (claimed, many + 1 - taken));
    }
}

#[tokio::test]
async fn a_claim_survives_that_the_leaf_of_its_event_is_emptied() {
    let database = retention::database(4).await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.feed(&database, &["k", "k", "-", "-", "-"]).await;
    let me = &feeder.worker;
    let held = me.claim(1, 1).await;
    retention::age(&database, 4).await;
    let pruned = retention::prune_all(&me.store, &PrunePolicy { inbox: None, ..PrunePolicy::default() }).await;
    assert_eq!((pruned.events, pruned.kept), (4, 4));
    me.done(&held).await;
    let claimed = me.claim(10, 10).await;
    assert_eq!(claimed.len(), 4);
    assert!(claimed.iter().all(|it| it.event.as_ref().unwrap().position == it.delivery.position), "{at:?}");
    me.done(&claimed).await;
    retention::prune_all(&me.store, &PrunePolicy::default()).await;
    assert_eq!(database.number("select count(*) from pillarbox.event_kept").await, 0);
}

/// How often the server is asked for a figure, and how often all is done again when it has lost some: up to version 14 a busy one does.
const FIGURE_LOOKS_MAX: usize = 2_000;
const FIGURE_TRIES_MAX: usize = 10;

/// A figure of the delivery table, once the server tells of `at_least` operations of a kind. `ended` are claims that have ended.
async fn figure(
    database: &Database,
    worker: &Worker,
    ended: &[Claimed],
    (kind, at_least): (&str, i64),
    figure: &str,
) -> Option<i64> {
    let client = database.client().await;
    let sql = format!("select {kind}, {figure} from pg_stat_user_tables where relname = 'delivery'");
    for _ in 0..FIGURE_LOOKS_MAX {
        let row = client.query_one(&sql, &[]).await.unwrap();
        if row.get::<_, i64>(0) >= at_least {
            return Some(row.get(1));
        }
        // Up to version 14 a session tells what it did when it has something to do again: claims have a session, and ends another.
        worker.claim(0, 1).await;
        worker.end(ended, ClaimFate::Done).await;
    }
    None
}

/// Does what is counted in a database of its own until the server has lost nothing of it.
async fn counted(count: impl AsyncFn() -> Option<i64>) -> i64 {
    for _ in 0..FIGURE_TRIES_MAX {
        if let Some(figure) = count().await {
            return figure;
        }
    }
    panic!("the server tells no figures");
}

#[tokio::test]
async fn a_claim_writes_one_version_of_each_row() {
    let versions = counted(async || {
        let database = Database::new().await;
        let feeder = Feeder::new(&database, queue()).await;
        let keys: Vec<String> = (0..200).map(|number| format!("k{number}")).collect();
        feeder.feed(&database, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let me = &feeder.worker;
        assert_eq!(me.claim(200, 1).await.len(), 200);
        figure(&database, me, &[], ("n_tup_upd", 200), "n_tup_upd").await
    });
    assert_eq!(versions.await, 200);
}

#[tokio::test]
async fn a_slow_claim_keeps_no_settlement_waiting() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.publish(&database, &["k", "-"]).await;
    feeder.queue(vec![delayed(at[0], "k", Timestamp(0))]).await;
    let (me, client) = (&feeder.worker, database.client().await);
    // The claim is held up by a table that it needs and a settlement does not; rows that somebody has locked it leaves out.
    let holder = database.client().await;
    holder.batch_execute("begin; lock table pillarbox.subscription in access exclusive mode").await.unwrap();
    let waits = format!(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = 'pillarbox relay {} claimer' \
         and datname = current_database()",
        me.id.0
    );
    let requests = [me.request(10, 1)];
    let claim = me.store.claim(&requests);
    let settling = async {
        until(&client, &waits, 1).await;
        let cursors = LaneWrite { queue: Vec::new(), ..write(feeder.lane, feeder.epoch, at[1]) };
        assert!(settle(&me.store, cursors).await, "the writer has a session of its own");
        client.query_one(&waits, &[]).await.unwrap().get::<_, i64>(0)
    };
    let (claimed, still_waits) = tokio::join!(claim, settling);
    assert_eq!(still_waits, 1, "the claim was still waiting when the settlement had returned");
    // By its own time limit, for nobody has let it go.
    let claims = claimed.unwrap().remove(0);
    assert!(claims.claimed.is_empty() && claims.waiting > 0, "{claims:?}");
    holder.batch_execute("rollback").await.unwrap();
    assert_eq!(positions(&me.claim(10, 11).await), at[..1]);
}

#[tokio::test]
async fn a_claim_that_cannot_do_less_gets_more_time() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.publish(&database, &["k"]).await;
    feeder.queue(vec![pending(at[0], "k")]).await;
    // Longer than a claim has by default.
    let sql = "create function sleep() returns trigger language plpgsql as 'begin perform pg_sleep(1.2); return new; end'; \
               create trigger sleep before update on pillarbox.delivery for each row \
                   when (new.owner is not null) execute function sleep()";
    database.execute(sql).await;
    let mut tries = 0;
    while feeder.worker.claim(1, tries + 1).await.is_empty() {
        tries += 1;
        assert!(tries < 20, "nothing is ever claimed");
    }
    assert!(tries > 1, "the first claims took too long");
}

#[tokio::test]
async fn a_queue_whose_claims_take_too_long_keeps_no_other_waiting() {
    let database = Database::new().await;
    let store = database.store().await;
    let named = |name: &str| Subscription { name: name.into(), ..queue() };
    let joined = join(&store, [named("slow"), named("quick")]).await;
    let [slow, quick] = [0, 1].map(|index: usize| joined.subscriptions[index].id);
    database
        .execute(&format!(
            "insert into pillarbox.delivery \
                 (subscription, position, lane, arrival, state, attempts, due_at, since, queued, ready_at) \
             select s.id, g, 0, g, 'pending', 0, now(), now(), true, now() \
             from pillarbox.subscription as s, generate_series(1, 100) as g; \
             create function sleep() returns trigger language plpgsql as 'begin perform pg_sleep(60); return new; end'; \
             create trigger sleep before update on pillarbox.delivery for each row \
                 when (new.owner is not null and new.subscription = {}) execute function sleep()",
            slow.0
        ))
        .await;
    let of = |subscription, limit, first, again| {
        let first = ClaimId(first);
        ClaimRequest { subscription, limit, first, suspect: false, tell: None, again }
    };
    let counts = async |requests: [ClaimRequest; 2]| {
        let claims = store.claim(&requests).await?;
        Ok::<_, pillarbox::Error>([0, 1].map(|index: usize| (claims[index].claimed.len(), claims[index].waiting)))
    };
    let [first, second] = counts([of(slow, 40, 1, false), of(quick, 40, 41, false)]).await.unwrap();
    assert_eq!((first, second), ((0, 100), (40, 60)), "one has got nothing, the other all that it asked for");
    // Whether it had got something the time before is not known: both are asked again, and what the other got is told again.
    let again = async |again| counts([of(slow, 40, 101, true), of(quick, 40, 141, again)]).await;
    assert_eq!(again(false).await.unwrap_err().kind(), ErrorKind::Busy);
    database.execute("drop trigger sleep on pillarbox.delivery").await;
    let [first, second] = again(true).await.unwrap();
    // Two claims of 40 took too long: a quarter of a quarter.
    assert_eq!(
        (first, second),
        ((2, 98), (40, 20)),
        "what takes too long is done in smaller parts, of that queue alone"
    );
    assert_eq!(database.number("select count(*) from pillarbox.delivery where owner is not null").await, 82);
}

/// A queue of four lanes, of which lane 0 has had so many rows due for an hour, and lane 1 ten for a minute.
async fn due_rows(database: &Database, rows: usize) {
    Worker::join(database, Subscription { lanes: 4, ..queue() }).await;
    let sql = format!(
        "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued) \
         select s.id, g, (g > {rows})::integer, g, 'k' || g, 'delayed', 0, \
             case when g > {rows} then now() - interval '1 minute' else now() - interval '1 hour' end, now(), true \
         from pillarbox.subscription as s, generate_series(1, {rows} + 10) as g"
    );
    // What the server learns of the table, and when, would be chance.
    database.execute("alter table pillarbox.delivery set (autovacuum_enabled = false)").await;
    database.execute(&sql).await;
}

/// How many rows take their places, a hundred at most, while somebody holds lanes that match; and how many pages that looks at.
async fn place(database: &Database, held: &str) -> (i64, i64) {
    let (holder, client) = (database.client().await, database.client().await);
    let hold = format!("begin; select from pillarbox.cursor where {held} for update");
    holder.batch_execute(&hold).await.unwrap();
    client.batch_execute("begin").await.unwrap();
    let pages = pages(&client, "select pillarbox.place_delayed(id, now(), 100) from pillarbox.subscription").await;
    let placed = "select count(*) from pillarbox.delivery where state = 'pending'";
    let placed = client.query_one(placed, &[]).await.unwrap().get(0);
    client.batch_execute("rollback").await.unwrap();
    (placed, pages)
}

#[tokio::test]
async fn placing_delayed_rows_costs_no_more_where_lanes_are_held() {
    let (small, large) = (Database::new().await, Database::new().await);
    due_rows(&small, 2_000).await;
    due_rows(&large, 20_000).await;
    let check = async |held: &str, expected: i64| {
        let ((few, pages), (many, more_pages)) = (place(&small, held).await, place(&large, held).await);
        assert_eq!((few, many), (expected, expected), "placed while {held} is held");
        // An index may be a level deeper.
        let none_more = more_pages < pages + 100;
        assert!(none_more, "{more_pages} pages and not {pages} for ten times the rows while {held} is held");
    };
    check("false", 100).await;
    check("lane = 0", 10).await;
    check("true", 0).await;
    small.execute("analyze pillarbox.delivery").await;
    large.execute("analyze pillarbox.delivery").await;
    check("false", 100).await;
    check("lane = 0", 10).await;
    check("true", 0).await;
    // One of them has been due for the longest.
    let first = "update pillarbox.delivery set due_at = now() - interval '1 day' where position in \
                 (select max(position) from pillarbox.delivery)";
    small.execute(first).await;
    large.execute(first).await;
    check("lane = 0", 1).await;
}

#[tokio::test]
async fn many_delayed_rows_of_one_key_take_their_places_in_order() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let keys = vec!["k"; 2_500];
    let at = feeder.publish(&database, &keys).await;
    let (late, soon) = (Timestamp(2), Timestamp(1));
    // The later half is due first.
    let due = |index: usize| if index < keys.len() / 2 { late } else { soon };
    feeder.queue(at.iter().enumerate().map(|(index, at)| delayed(*at, "k", due(index))).collect()).await;
    let me = &feeder.worker;
    let expected: Vec<Position> = at[keys.len() / 2..].iter().chain(&at[..keys.len() / 2]).copied().collect();
    for (next, first) in expected.iter().take(5).zip(1..) {
        let claimed = me.claim(10, first).await;
        assert_eq!(positions(&claimed), [*next]);
        me.done(&claimed).await;
    }
    let order = "select array_agg(position order by arrival) from pillarbox.delivery where state <> 'delayed'";
    let placed: Vec<Position> = database.client().await.query_one(order, &[]).await.unwrap().get(0);
    assert_eq!(placed, expected[5..], "in the order in which they were due");
}

#[tokio::test]
async fn two_who_place_delayed_rows_of_one_key_keep_their_order() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.publish(&database, &["k", "k"]).await;
    feeder.queue(at.iter().map(|at| delayed(*at, "k", Timestamp(1))).collect()).await;
    let me = &feeder.worker;
    let mut other = database.client().await;
    let placing = other.transaction().await.unwrap();
    let place = "select pillarbox.place_delayed(id, now(), 1) from pillarbox.subscription";
    placing.execute(place, &[]).await.unwrap();
    assert!(me.claim(10, 1).await.is_empty(), "the first of the key is being placed by somebody else");
    placing.commit().await.unwrap();
    for (next, first) in at.iter().zip([11, 21]) {
        let claimed = me.claim(10, first).await;
        assert_eq!(positions(&claimed), [*next]);
        me.done(&claimed).await;
    }
}

#[tokio::test]
async fn claims_and_ends_use_indexes_however_the_table_grew() {
    let read = counted(rows_read_without_an_index).await;
    assert!(read < 2_000, "{read} rows were read without an index");
}

async fn rows_read_without_an_index() -> Option<i64> {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let me = &feeder.worker;
    // The plans are made while the table is as good as empty.
    for round in 0..10 {
        feeder.feed(&database, &["k"]).await;
        let claimed = me.claim(10, round).await;
        me.done(&claimed).await;
    }
    let keys: Vec<String> = (0..2_000).map(|number| format!("k{}", number % 500)).collect();
    feeder.feed(&database, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut ended = Vec::new();
    for round in 1..=3 {
        ended = me.claim(50, 1_000 * round).await;
        assert_eq!(ended.len(), 50);
        me.done(&ended).await;
    }
    figure(&database, me, &ended, ("n_tup_del", 160), "seq_tup_read").await
}

#[tokio::test]
async fn a_dead_row_that_is_called_back_waits_for_the_one_that_its_key_works_on() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, Subscription { on_dead: OnDead::Skip, ..queue() }).await;
    let at = feeder.feed(&database, &["k", "k", "k"]).await;
    let me = &feeder.worker;
    let first = me.claim(1, 1).await;
    let id = first[0].event.as_ref().unwrap().id;
    assert_eq!(me.end(&first, failed(State::Dead, 8)).await, [true]);
    let second = me.claim(10, 2).await;
    assert_eq!(positions(&second), at[1..2]);
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::Event(id), limit: 1 };
    me.store.change(&requeue, false).await.unwrap();
    assert_eq!(me.claim(10, 3).await.len(), 0, "its key is being worked on");
    me.done(&second).await;
    for (next, first) in [at[2], at[0]].into_iter().zip(10..) {
        let claimed = me.claim(10, first).await;
        assert_eq!(positions(&claimed), [next]);
        me.done(&claimed).await;
    }
}

#[tokio::test]
async fn a_rewind_of_a_key_takes_its_claim_away_and_brings_all_of_it_again() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.feed(&database, &["k", "k", "other", "k"]).await;
    let me = &feeder.worker;
    let done = me.claim(1, 1).await;
    me.done(&done).await;
    let held = me.claim(10, 2).await;
    let of_k: Vec<_> = held.iter().filter(|claimed| claimed.delivery.position == at[1]).cloned().collect();
    let rewind = Change::Rewind { subscription: "s".into(), to: pillarbox::Start::Beginning, key: Some("k".into()) };
    assert_eq!(me.store.change(&rewind, false).await.unwrap().count, 3);
    assert_eq!(me.end(&of_k, ClaimFate::Done).await, [false]);
    for (next, first) in [at[0], at[1], at[3]].into_iter().zip(10..) {
        let claimed = me.claim(10, first).await;
        assert_eq!(positions(&claimed), [next]);
        me.done(&claimed).await;
    }
}

#[tokio::test]
async fn large_events_are_claimed_a_page_at_a_time() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let large = NewEvent::new("t", "y").bytes(vec![0; PAYLOAD_BYTES_MAX], "application/x");
    database.publish(&vec![large; 40]).await;
    feeder.queue((1..=40).map(|at| pending(at, "-")).collect()).await;
    let me = &feeder.worker;
    let fit = PAGE_BYTES_MAX / PAYLOAD_BYTES_MAX;
    // How large they are is known when the first are here.
    assert_eq!(me.claim(12, 1).await.len(), 12);
    for first in [13, 25] {
        assert_eq!(me.claim(12, first).await.len(), fit - 1, "each is a little larger than its payload");
    }
    // So little has come that more are claimed again.
    assert_eq!(me.claim(2, 37).await.len(), 2);
    assert_eq!(me.claim(12, 39).await.len(), 12);
}

/// What relays tell each other of rows that can be claimed.
async fn told_of_rows(database: &Database) -> (Client, mpsc::UnboundedReceiver<String>) {
    let (client, mut connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    let (sender, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message
                && notification.payload().starts_with("ready ")
            {
                // The test may be over.
                let _ = sender.send(notification.payload().to_owned());
            }
        }
    });
    client.batch_execute("listen pillarbox").await.unwrap();
    (client, told)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_can_be_claimed_ring_the_others() {
    let database = Database::new().await;
    let feeder = Feeder::new(&database, queue()).await;
    let at = feeder.publish(&database, &["-", "k", "k"]).await;
    let other = Worker::join(&database, queue()).await;
    for worker in [&feeder.worker, &other] {
        worker.store.observe(&Report::default()).await.unwrap();
    }
    let (_client, mut told) = told_of_rows(&database).await;
    let mut next = async || tokio::time::timeout(LONG, told.recv()).await.expect("they are told").unwrap();
    poll_tail(&other.store, 0).await;
    while other.store.wait(SHORT).await.unwrap() != Wake::Timeout {
        poll_tail(&other.store, 0).await;
    }
    let ready = format!("ready {}", feeder.worker.id.0);
    feeder.queue(vec![pending(at[0], "-"), pending(at[1], "k"), pending(at[2], "k")]).await;
    assert_eq!(next().await, ready, "there are rows");
    assert_ne!(other.store.wait(LONG).await.unwrap(), Wake::Timeout);
    let claimed = feeder.worker.claim(10, 1).await;
    let (keyed, free): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|claimed| claimed.delivery.key.is_some());
    feeder.worker.done(&free).await;
    feeder.worker.done(&keyed).await;
    assert_eq!(next().await, ready, "the next of a key is ready");
}
