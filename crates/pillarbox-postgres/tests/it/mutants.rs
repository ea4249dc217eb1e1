//! Deliberately broken stores: what finds each of them, and lets the sound one pass. Polls in another order, in one snapshot or
//! without a barrier are found by the conformance suite, a doorbell that forgets its writers among the tests of waking up.
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pillarbox::admin::State;
use pillarbox::sink::BoxFuture;
use pillarbox::store::{DeliveryRow, LaneRef, LaneWrite, Scan, Store, TakeCause};
use pillarbox::testing::Capture;
use pillarbox::{Position, Relay, Subscription};
use pillarbox_postgres::{
    BEFORE_TAKE, BETWEEN_STATEMENTS, HORIZON_GATE, Hook, Mutant, PostgresStore, SETTLE_STEPS, set_doorbell,
};
use pillarbox_testkit::postgres::Server;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_postgres::Client;

use crate::fixture::{Database, delivery, join, one_lane, own, poll_tail, settle, tail, take, write};
use crate::ownership::until;
use crate::waking::ASLEEP;

const INSERT: &str = "insert into pillarbox.event (topic, key, type) values ('t', 'a', 'y')";

/// The steps of a poll, and of a settlement.
const STEPS: usize = 3;

/// Does something once, when a hook is called with this number.
fn once(at: usize, act: impl Future<Output = ()> + Send + 'static) -> Hook {
    let act: Mutex<Option<BoxFuture<'static, ()>>> = Mutex::new(Some(Box::pin(act)));
    Arc::new(move |step| {
        let due = if step == at { act.lock().unwrap().take() } else { None };
        due.unwrap_or_else(|| Box::pin(async {}))
    })
}

/// What a poll shows in the middle of which an event becomes visible.
async fn commit_during_a_poll(mutant: Option<Mutant>, at: usize) -> Scan {
    let database = Database::new().await;
    let store = database.store().await;
    let client = database.client().await;
    client.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
    let commit = async move { client.batch_execute("commit").await.unwrap() };
    store.experiment(mutant, Some(once(at, commit))).await;
    let scan = poll_tail(&store, 0).await;
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 1, "it was committed meanwhile");
    scan
}

fn positions(scan: &Scan) -> (Vec<Position>, Vec<Position>) {
    let visible = scan.visible.iter().flatten().collect();
    (visible, scan.events.iter().map(|event| event.position).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_poll_shows_comes_with_its_content() {
    for steps in 1..=STEPS {
        let (visible, wanted) = positions(&commit_during_a_poll(None, steps).await);
        assert_eq!(visible, wanted, "committed after {steps} steps");
        assert_eq!(visible.is_empty(), steps == STEPS, "the rows are read last, after {steps} steps");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wanted_and_what_is_visible_read_apart_lose_or_repeat_an_event() {
    let lost = commit_during_a_poll(Some(Mutant::WantedApart), BETWEEN_STATEMENTS).await;
    assert_eq!(positions(&lost), (vec![1], vec![]), "shown and not wanted: it would be settled");
    let repeated = commit_during_a_poll(Some(Mutant::VisibleApart), BETWEEN_STATEMENTS).await;
    assert_eq!(positions(&repeated), (vec![], vec![1]), "delivered and still a hole: it would come again");
}

/// A record of the server's log that takes a while to be copied, since it is many times larger than its buffers.
const BULKY_BYTES: i64 = 256 * 1024 * 1024;

/// One is enough, unless this process does not get to run while that record is copied.
const ATTEMPTS_MAX: usize = 5;

fn execute(client: &Arc<Client>, sql: String) -> JoinHandle<()> {
    let client = client.clone();
    tokio::spawn(async move { client.batch_execute(&sql).await.unwrap() })
}

async fn pid(client: &Client) -> i32 {
    client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0)
}

/// The horizon of a poll that was stopped before it looked into the sequence's row, and went on while a writer drew a position:
/// a server draws a position by writing one that is 32 higher into the row, logging that, and writing the right one. The
/// record that it logs has to wait here for a bulky one. Returns the horizon, and the next position to be handed out.
async fn poll_while_a_position_is_drawn(mutant: Option<Mutant>) -> (Position, Position) {
    let server = Server::builder().setting("wal_buffers", "32kB").start().unwrap();
    let database = Database::on(&server).await;
    // Else the writer tidies the catalogue's pages as it reads them, and its records of that have to wait before it draws a position.
    database.execute("vacuum").await;
    let store = database.store().await;
    store.experiment(mutant, None).await;
    let (gate, watcher) = (database.client().await, database.client().await);
    let (bulky, writer) = (Arc::new(database.client().await), Arc::new(database.client().await));
    gate.execute("select pg_advisory_lock($1)", &[&HORIZON_GATE]).await.unwrap();
    let poll = tokio::spawn(async move { store.poll(&tail(0, 1_000)).await.unwrap() });
    until(&watcher, "select count(*) from pg_locks where locktype = 'advisory' and not granted", 1).await;

    writer.batch_execute("begin").await.unwrap();
    let writer_pid = pid(&writer).await;
    let logged = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn";
    let before = database.number(&format!("select ({logged})::bigint")).await;
    let copied = execute(&bulky, format!("select pg_logical_emit_message(false, '', repeat('x', {BULKY_BYTES}))"));
    until(&watcher, &format!("select (({logged}) >= {})::integer::bigint", before + BULKY_BYTES), 1).await;
    let inserted = execute(&writer, INSERT.into());
    // Or has got through already: then the bulky record was too quick.
    let waits = "state = 'active' and wait_event_type = 'LWLock' and wait_event like 'WAL%' \
        or state <> 'active' and query like 'insert%'";
    until(&watcher, &format!("select count(*) from pg_stat_activity where pid = {writer_pid} and ({waits})"), 1).await;
    gate.execute("select pg_advisory_unlock($1)", &[&HORIZON_GATE]).await.unwrap();
    let page = poll.await.unwrap();
    inserted.await.unwrap();
    copied.await.unwrap();
    // Whoever was writing at the time of the poll has gone now: its horizon is final.
    writer.batch_execute("commit").await.unwrap();
    database.publish_keys(&["a"]).await;
    (page.horizon, database.number("select max(position) from pillarbox.event").await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_position_at_or_below_a_horizon_is_handed_out_after_it() {
    assert_eq!(poll_while_a_position_is_drawn(None).await, (1, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_value_of_a_sequence_is_ahead_of_what_was_handed_out() {
    for _ in 0..ATTEMPTS_MAX {
        if poll_while_a_position_is_drawn(Some(Mutant::SelectLastValue)).await == (33, 2) {
            return;
        }
    }
    panic!("a horizon that is read without a lock was right {ATTEMPTS_MAX} times");
}

/// Two instances, of which the first owns a lane with one event, and the second will take it.
struct Duel {
    database: Database,
    zombie: Arc<PostgresStore>,
    taker: Arc<PostgresStore>,
    lane: LaneRef,
    /// The zombie parks the event of position 1.
    parks: LaneWrite,
    /// Sessions of the taker that wait for a row's lock.
    taker_waits: String,
}

impl Duel {
    async fn new() -> Duel {
        let database = Database::new().await;
        database.publish_keys(&["a"]).await;
        let zombie = Arc::new(database.store().await);
        let (lane, epoch) = own(&*zombie, "s").await;
        let taker = Arc::new(database.store().await);
        let id = join(&*taker, [one_lane("s")]).await.instance;
        let parks = LaneWrite { put: vec![delivery(1, "a", State::Retrying)], ..write(lane, epoch, 1) };
        Duel { database, zombie, taker, lane, parks, taker_waits: waits_of(&format!("relay {} writer", id.0)) }
    }

    /// Takes the lane and loads its deliveries at once.
    fn take_over(&self) -> watch::Receiver<Option<Vec<DeliveryRow>>> {
        let (sender, loaded) = watch::channel(None);
        let (taker, lane) = (self.taker.clone(), self.lane);
        tokio::spawn(async move {
            let epoch = take(&*taker, lane, TakeCause::Lock).await.unwrap();
            let state = taker.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
            sender.send_replace(Some(state.deliveries));
        });
        loaded
    }

    async fn parked(&self) -> usize {
        self.database.number("select count(*) from pillarbox.delivery").await as usize
    }
}

/// How many sessions of this name wait for a row that another holds.
fn waits_of(name: &str) -> String {
    format!(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'pillarbox {name}' \
         and wait_event_type = 'Lock'"
    )
}

async fn outcome(mut loaded: watch::Receiver<Option<Vec<DeliveryRow>>>) -> Vec<DeliveryRow> {
    loaded.wait_for(Option::is_some).await.unwrap().clone().unwrap()
}

/// A lane is taken over after so many steps of a settlement by its former owner. How many deliveries the taker knows, and how
/// many there are.
async fn take_over_during_a_settlement(mutant: Option<Mutant>, steps: usize) -> (usize, usize) {
    let duel = Arc::new(Duel::new().await);
    let (sender, begun) = watch::channel(None);
    let (seen, watcher) = (duel.clone(), duel.database.client().await);
    let takes_over = async move {
        let mut loaded = seen.take_over();
        sender.send_replace(Some(loaded.clone()));
        tokio::select! {
            _ = loaded.wait_for(Option::is_some) => {}
            () = until(&watcher, &seen.taker_waits, 1) => {}
        }
    };
    duel.zombie.experiment_with_lanes(mutant, Some(once(SETTLE_STEPS + steps, takes_over)));
    assert!(settle(&*duel.zombie, duel.parks.clone()).await, "it had not been taken over when it began");
    let loaded = begun.borrow().clone().unwrap();
    (outcome(loaded).await.len(), duel.parked().await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_takes_a_lane_over_waits_for_a_settlement_that_has_begun() {
    for steps in 1..=STEPS {
        assert_eq!(take_over_during_a_settlement(None, steps).await, (1, 1), "after {steps} steps");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_in_a_sub_select_lets_a_delivery_appear_behind_the_back_of_the_new_owner() {
    // After its deliveries, before its cursor; whatever comes later sees the new epoch by itself.
    let (known, there) = take_over_during_a_settlement(Some(Mutant::FenceInSubselect), 2).await;
    assert_eq!((known, there), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_is_stopped_half_way_is_waited_for_by_whoever_takes_over() {
    let duel = Duel::new().await;
    assert!(settle(&*duel.zombie, duel.parks.clone()).await);
    let (holder, watcher) = (duel.database.client().await, duel.database.client().await);
    holder.batch_execute("begin; select from pillarbox.delivery for update").await.unwrap();
    let (zombie, mut parks) = (duel.zombie.clone(), duel.parks.clone());
    parks.put[0].attempts = 2;
    let settles = tokio::spawn(async move { settle(&*zombie, parks).await });
    until(&watcher, &waits_of("relay 1 writer"), 1).await;
    let loaded = duel.take_over();
    until(&watcher, &duel.taker_waits, 1).await;
    holder.batch_execute("rollback").await.unwrap();
    assert!(settles.await.unwrap());
    assert_eq!(outcome(loaded).await[0].attempts, 2);
    assert!(!settle(&*duel.zombie, duel.parks.clone()).await, "the lane is another's now");
    assert_eq!(duel.database.number("select attempts::bigint from pillarbox.delivery").await, 2);
}

/// The former owner settles while another is about to take its lane. How many deliveries the taker knows, and how many there
/// are.
async fn settle_during_a_take_over(mutant: Option<Mutant>) -> (usize, usize) {
    let duel = Duel::new().await;
    let (zombie, parks) = (duel.zombie.clone(), duel.parks.clone());
    let settles = async move { assert!(settle(&*zombie, parks).await, "the lane is its own still") };
    duel.taker.experiment_with_lanes(mutant, Some(once(BEFORE_TAKE, settles)));
    let known = outcome(duel.take_over()).await.len();
    assert!(!settle(&*duel.zombie, duel.parks.clone()).await, "the lane is another's now");
    (known, duel.parked().await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_taken_a_lane_over_knows_all_that_was_settled() {
    assert_eq!(settle_during_a_take_over(None).await, (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_that_is_loaded_before_it_is_taken_is_not_known_as_it_is() {
    assert_eq!(settle_during_a_take_over(Some(Mutant::LoadBeforeCommit)).await, (0, 1));
}

/// As long as any session of a relay may keep a snapshot, which keeps the whole database from being vacuumed.
const KEPT_MAX: Duration = Duration::from_secs(5);

/// Writers at once; more than a relay lets ring.
const WRITERS: usize = 8;

/// Looks again and again, so often that no snapshot is missed, who keeps one.
struct Watch {
    client: Client,
    since: HashMap<(String, i64, String), Instant>,
}

impl Watch {
    async fn new(database: &Database) -> Watch {
        Watch { client: database.client().await, since: HashMap::new() }
    }

    /// Who has kept a snapshot for longer than may be; asked until it gives somebody or the time is over.
    async fn offender(&mut self, time: Duration) -> Option<String> {
        let started = Instant::now();
        while started.elapsed() < time {
            let kept = "select application_name, (extract(epoch from xact_start) * 1e6)::bigint, backend_xmin::text \
                from pg_stat_activity where application_name like 'pillarbox%' and datname = current_database() \
                and backend_xmin is not null and xact_start is not null";
            let rows = self.client.query(kept, &[]).await.unwrap();
            let now = Instant::now();
            let before = std::mem::take(&mut self.since);
            for row in &rows {
                let snapshot = (row.get(0), row.get(1), row.get(2));
                let at = before.get(&snapshot).copied().unwrap_or(now);
                if now - at > KEPT_MAX {
                    return Some(snapshot.0);
                }
                self.since.insert(snapshot, at);
            }
            self.client.batch_execute("select pg_sleep(0.02)").await.unwrap();
        }
        None
    }
}

/// Publishes in short transactions for as long as the receiver lives.
async fn publish_for_long(client: Client, open: watch::Sender<()>) {
    while !open.is_closed() {
        client.batch_execute(&format!("begin; {INSERT}; select pg_sleep(0.01); commit")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_of_relays_that_wake_up_and_fall_asleep_keeps_a_snapshot_for_long() {
    let database = Database::new().await;
    set_doorbell(&database.url().parse().unwrap(), true).await.unwrap();
    let capture = Capture::new();
    let mut relays = Vec::new();
    for _ in 0..2 {
        let sink = Arc::new(capture.clone());
        let relay = Relay::builder(database.store().await).subscribe(Subscription::new("s"), sink);
        relays.push(relay.start().await.unwrap());
    }
    let waiting = "select count(*) from pg_stat_activity where application_name like 'pillarbox relay%waiter' \
        and wait_event_type = 'Lock' and datname = current_database()";
    let mut watch = Watch::new(&database).await;
    until(&watch.client, waiting, 2).await;
    until(&watch.client, ASLEEP, 1).await;
    let (open, writing) = watch::channel(());
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        writers.spawn(publish_for_long(database.client().await, open.clone()));
    }
    until(&watch.client, ASLEEP, 0).await;
    assert_eq!(watch.offender(KEPT_MAX + Duration::from_secs(1)).await, None);
    until(&watch.client, ASLEEP, 0).await;
    drop(writing);
    writers.join_all().await;
    until(&watch.client, ASLEEP, 1).await;
    assert_eq!(watch.offender(KEPT_MAX + Duration::from_secs(1)).await, None);
    assert!(!capture.events().is_empty());
    drop(relays);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_waits_for_a_lock_without_a_bound_keeps_a_snapshot_for_long() {
    let database = Database::new().await;
    let (holder, waiter) = (database.client().await, database.client().await);
    holder.batch_execute("select pg_advisory_lock(1)").await.unwrap();
    waiter.batch_execute("set application_name = 'pillarbox without a bound'").await.unwrap();
    let waits = tokio::spawn(async move { waiter.batch_execute("select pg_advisory_lock(1)").await });
    let offender = Watch::new(&database).await.offender(2 * KEPT_MAX).await;
    assert_eq!(offender.as_deref(), Some("pillarbox without a bound"));
    waits.abort();
}
