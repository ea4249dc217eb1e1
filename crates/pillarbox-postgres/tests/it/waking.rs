use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pillarbox::store::{Report, Store, Wake};
use pillarbox_postgres::{Mutant, PostgresStore, set_doorbell};
use pillarbox_testkit::postgres::Server;
use pillarbox_testkit::proxy::Proxy;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_postgres::{AsyncMessage, Client, NoTls};
use uuid::Uuid;

use crate::fixture::{Database, join, one_lane, own, poll_tail, settle, write};
use crate::ownership::until;

/// Far longer than any of these tests; reached only if a wake-up is lost.
const LONG: Duration = Duration::from_secs(20);

/// So long that it cannot be what ended a wait.
const WATCHDOG: Duration = Duration::from_secs(600);

/// Long enough for a false wake-up to show.
const SHORT: Duration = Duration::from_millis(150);

/// What a wake-up may take, on a machine that does other things too.
const LATE: Duration = Duration::from_secs(1);

const INSERT: &str = "insert into pillarbox.event (topic, type) values ('t', 'y')";

/// How many relays have the bell's lock: 1 asleep, or none.
pub(crate) const ASLEEP: &str = "select count(*) from pg_locks where locktype = 'advisory' and objid = 0 and objsubid = 2 \
    and mode = 'ExclusiveLock' and database = (select oid from pg_database where datname = current_database())";

/// A database whose writers ring, also where the server allows prepared transactions.
async fn ringing() -> Database {
    let database = Database::new().await;
    set_doorbell(&database.url().parse().unwrap(), true).await.unwrap();
    database
}

/// Waits and polls as an engine does, but for the holes: only the doorbell tells it of what comes late.
struct Follower {
    store: Arc<PostgresStore>,
    seen: watch::Receiver<HashMap<Uuid, Instant>>,
    _task: JoinSet<()>,
}

impl Follower {
    fn start(store: PostgresStore) -> Self {
        let store = Arc::new(store);
        let (sender, seen) = watch::channel(HashMap::new());
        let mut task = JoinSet::new();
        let follower = store.clone();
        task.spawn(async move {
            loop {
                assert_ne!(follower.wait(WATCHDOG).await.unwrap(), Wake::Timeout, "only rings wake it");
                let scan = poll_tail(&*follower, 0).await;
                let now = Instant::now();
                sender.send_modify(|seen| {
                    for event in &scan.events {
                        seen.entry(event.id).or_insert(now);
                    }
                });
            }
        });
        Follower { store, seen, _task: task }
    }

    /// Whether so many events have been seen in time.
    async fn sees(&self, count: usize, within: Duration) -> bool {
        let mut seen = self.seen.clone();
        tokio::time::timeout(within, seen.wait_for(|seen| seen.len() >= count)).await.is_ok()
    }
}

/// A store that has joined, with what it was told of the fleet.
async fn joined(database: &Database) -> PostgresStore {
    let store = database.store().await;
    join(&store, [one_lane("s")]).await;
    store.observe(&Report::default()).await.unwrap();
    store
}

/// Polls as often as it is rung, until it is not; what rang at first is no news then.
async fn falls_silent(store: &PostgresStore) -> bool {
    for _ in 0..10 {
        poll_tail(store, 0).await;
        if store.wait(SHORT).await.unwrap() == Wake::Timeout {
            return true;
        }
    }
    false
}

/// Transactions that have rung and stay open: as many as let a relay stay awake.
async fn several_writers(database: &Database) -> [Client; 4] {
    let client = || database.client();
    let clients = [client().await, client().await, client().await, client().await];
    for client in &clients {
        client.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
    }
    clients
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_before_the_wait_counts_until_a_poll_has_seen_it() {
    let database = ringing().await;
    let store = joined(&database).await;
    assert_ne!(store.wait(LONG).await.unwrap(), Wake::Timeout, "nobody has polled");
    assert!(falls_silent(&store).await);
    database.publish_keys(&["a"]).await;
    assert_ne!(store.wait(LONG).await.unwrap(), Wake::Timeout);
    assert_ne!(store.wait(LONG).await.unwrap(), Wake::Timeout, "nobody has polled");
    poll_tail(&store, 0).await;
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_during_the_wait_rings() {
    let database = ringing().await;
    let store = joined(&database).await;
    assert!(falls_silent(&store).await);
    let client = database.client().await;
    for round in 0..20 {
        let publisher = async {
            tokio::task::yield_now().await;
            client.batch_execute(INSERT).await.unwrap();
        };
        let started = Instant::now();
        let (wake, ()) = tokio::join!(store.wait(WATCHDOG), publisher);
        assert_ne!(wake.unwrap(), Wake::Timeout);
        assert!(started.elapsed() < LATE, "round {round}: {:?}", started.elapsed());
        poll_tail(&store, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_does_not_wake_itself() {
    let database = ringing().await;
    let store = database.store().await;
    database.publish_keys(&["a", "b"]).await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(falls_silent(&store).await, "joining and taking were its own doing");
    assert!(settle(&store, write(lane, epoch, 2)).await);
    store.observe(&Report::default()).await.unwrap();
    database.execute("create table business (x integer); insert into business values (1)").await;
    assert_eq!(store.wait(SHORT).await.unwrap(), Wake::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_joins_or_leaves_rings_the_others() {
    let database = ringing().await;
    let store = joined(&database).await;
    assert!(falls_silent(&store).await);
    let other = joined(&database).await;
    assert_ne!(store.wait(LONG).await.unwrap(), Wake::Timeout);
    assert!(falls_silent(&store).await);
    other.leave().await.unwrap();
    assert_ne!(store.wait(LONG).await.unwrap(), Wake::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_doorbell_it_looks_by_itself() {
    let database = Database::new().await;
    set_doorbell(&database.url().parse().unwrap(), false).await.unwrap();
    let follower = Follower::start(joined(&database).await);
    database.publish_keys(&["a"]).await;
    assert!(follower.sees(1, LATE).await);
}

/// A writer saw the relay awake, so it does not ring; the relay falls asleep before that writer commits.
async fn a_writer_outlasts_the_awake_relay(mutant: Option<Mutant>) -> bool {
    let database = ringing().await;
    let store = joined(&database).await;
    store.experiment_at_the_doorbell(mutant, None);
    let follower = Follower::start(store);
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    let writers = several_writers(&database).await;
    watcher.batch_execute(INSERT).await.unwrap();
    until(&watcher, ASLEEP, 0).await;
    let late = database.client().await;
    late.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
    for writer in &writers {
        writer.batch_execute("commit").await.unwrap();
    }
    until(&watcher, ASLEEP, 1).await;
    assert!(follower.sees(5, LONG).await);
    // Whatever else rang has been answered.
    while follower.store.wait(SHORT).await.unwrap() != Wake::Timeout {
        tokio::task::yield_now().await;
    }
    late.batch_execute("commit").await.unwrap();
    follower.sees(6, LATE).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_falls_asleep_watches_the_writers_that_saw_it_awake() {
    assert!(a_writer_outlasts_the_awake_relay(None).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_does_not_watch_them_loses_a_wake_up() {
    assert!(!a_writer_outlasts_the_awake_relay(Some(Mutant::SleepWithoutWriters)).await);
}

/// A client that counts the rings of writers.
pub(crate) async fn listener(database: &Database) -> (Client, Arc<Mutex<u64>>) {
    let (client, mut connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    let rings = Arc::<Mutex<u64>>::default();
    let counter = rings.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if matches!(&message, AsyncMessage::Notification(notification) if notification.payload().is_empty()) {
                *counter.lock().unwrap() += 1;
            }
        }
    });
    client.batch_execute("listen pillarbox").await.unwrap();
    (client, rings)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_do_not_ring_an_awake_relay() {
    let database = ringing().await;
    let follower = Follower::start(joined(&database).await);
    let (client, rings) = listener(&database).await;
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    let writers = several_writers(&database).await;
    watcher.batch_execute(INSERT).await.unwrap();
    until(&watcher, ASLEEP, 0).await;
    client.batch_execute("select 1").await.unwrap();
    let before = *rings.lock().unwrap();
    assert!(before >= 1, "it was woken by a ring");
    for _ in 0..50 {
        watcher.batch_execute(INSERT).await.unwrap();
    }
    client.batch_execute("select 1").await.unwrap();
    assert_eq!(*rings.lock().unwrap(), before);
    assert!(follower.sees(51, LATE).await, "it looks by itself");
    drop(writers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_rings_where_nobody_sleeps() {
    let database = ringing().await;
    let (client, rings) = listener(&database).await;
    let watcher = database.client().await;
    let rung = async || {
        watcher.batch_execute(INSERT).await.unwrap();
        client.batch_execute("select 1").await.unwrap();
        std::mem::take(&mut *rings.lock().unwrap())
    };
    assert_eq!(rung().await, 0, "no relay runs");
    let store = joined(&database).await;
    until(&watcher, ASLEEP, 1).await;
    assert_eq!(rung().await, 1, "one sleeps");
    drop(store);
    until(&watcher, ASLEEP, 0).await;
    assert_eq!(rung().await, 0, "it has ended");
    let store = joined(&database).await;
    until(&watcher, ASLEEP, 1).await;
    store.leave().await.unwrap();
    assert_eq!(rung().await, 0, "it has left");
}

/// A session that holds these locks of the doorbell, as that of a relay does that stands still.
pub(crate) async fn stands_still(database: &Database, locks: &[i32]) -> Client {
    let relay = joined(database).await;
    let client = database.client().await;
    until(&client, ASLEEP, 1).await;
    let class = "select classid::bigint::integer from pg_locks where locktype = 'advisory' and objid = 0 and objsubid = 2 \
        and database = (select oid from pg_database where datname = current_database())";
    let class: i32 = client.query_one(class, &[]).await.unwrap().get(0);
    relay.leave().await.unwrap();
    for number in locks {
        client.execute("select pg_advisory_lock($1, $2)", &[&class, number]).await.unwrap();
    }
    client
}

/// The key of the keeper's lock.
pub(crate) const KEEPER: i32 = i32::MAX;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keeper_that_stands_still_asleep_silences_nobody() {
    let database = ringing().await;
    let _still = stands_still(&database, &[KEEPER, 0]).await;
    let guest = Follower::start(joined(&database).await);
    database.client().await.batch_execute(INSERT).await.unwrap();
    assert!(guest.sees(1, LATE).await);
}

/// The queue is that of the whole server: once it is full, every commit that notifies fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_of_notifications_that_fills_up_is_not_filled_by_publishers() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    set_doorbell(&database.url().parse().unwrap(), true).await.unwrap();
    let _still = stands_still(&database, &[KEEPER, 0]).await;
    let (client, listener) = (database.client().await, database.client().await);
    let usage = async || client.query_one("select pg_notification_queue_usage()", &[]).await.unwrap().get::<_, f64>(0);
    // Who listens and stands still inside a transaction keeps all of it.
    listener.batch_execute("listen other").await.unwrap();
    listener.batch_execute("begin; select 1").await.unwrap();
    let empty = usage().await;
    for _ in 0..1_000 {
        client.batch_execute(INSERT).await.unwrap();
    }
    let rung = usage().await;
    assert!(rung > empty, "each of them rang: {empty}, {rung}");
    let fill = "select pg_notify('other', g || repeat('x', 7900)) from generate_series(1, 5000) as g";
    while usage().await <= 0.1 {
        client.batch_execute(fill).await.unwrap();
    }
    let full = usage().await;
    for _ in 0..1_000 {
        client.batch_execute(INSERT).await.unwrap();
    }
    assert_eq!(usage().await, full, "publishers ring no more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_keeper_that_stood_still_awake_makes_another_the_keeper() {
    let database = ringing().await;
    let still = stands_still(&database, &[KEEPER]).await;
    let guest = Follower::start(joined(&database).await);
    let watcher = database.client().await;
    while guest.store.wait(SHORT).await.unwrap() != Wake::Timeout {
        tokio::task::yield_now().await;
    }
    watcher.batch_execute(INSERT).await.unwrap();
    assert!(!guest.sees(1, SHORT).await, "nobody rings, and nobody passes it on");
    drop(still);
    // As whoever takes its lanes would say.
    watcher.batch_execute("notify pillarbox, 'ended 4711'").await.unwrap();
    assert!(guest.sees(1, LATE).await);
}

/// A keeper that stands still with something to pass on, behind a proxy that forwards nothing any more: the server ends its session, and
/// another relay becomes the keeper.
async fn another_becomes_the_keeper(how: impl AsyncFnOnce(&Database, &Client)) {
    let database = ringing().await;
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let keeper = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    join(&keeper, [one_lane("s")]).await;
    keeper.observe(&Report::default()).await.unwrap();
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    let guest = Follower::start(joined(&database).await);
    keeper.observe(&Report::default()).await.unwrap();
    let keeper = Follower::start(keeper);
    let of_first = format!("select max(pid) from pg_locks where {KEEPERS}");
    let first: i32 = watcher.query_one(&of_first, &[]).await.unwrap().get(0);
    how(&database, &watcher).await;
    proxy.stall().unwrap();
    let of_another = format!("select count(*) from pg_locks where {KEEPERS} and pid <> {first}");
    until(&watcher, &of_another, 1).await;
    watcher.batch_execute(INSERT).await.unwrap();
    let published = database.number("select count(*) from pillarbox.event").await;
    assert!(guest.sees(published as usize, LONG).await);
    drop(keeper);
}

const KEEPERS: &str = "locktype = 'advisory' and objid = 2147483647 and objsubid = 2 \
    and database = (select oid from pg_database where datname = current_database())";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keeper_that_stands_still_awake_is_replaced() {
    let mut open = Vec::new();
    another_becomes_the_keeper(async |database, watcher| {
        open.extend(several_writers(database).await);
        watcher.batch_execute(INSERT).await.unwrap();
        until(watcher, ASLEEP, 0).await;
    })
    .await;
}

/// The writer was found writing when the keeper fell asleep, and may have looked before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keeper_that_stands_still_while_it_watches_a_writer_is_replaced() {
    let mut open = Vec::new();
    another_becomes_the_keeper(async |database, watcher| {
        let writers = several_writers(database).await;
        watcher.batch_execute(INSERT).await.unwrap();
        until(watcher, ASLEEP, 0).await;
        let late = database.client().await;
        late.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
        for writer in &writers {
            writer.batch_execute("commit").await.unwrap();
        }
        until(watcher, ASLEEP, 1).await;
        open.push(late);
    })
    .await;
}

/// A writer whose snapshot is older than the relay's sleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_snapshot_does_not_keep_a_writer_from_ringing() {
    let database = ringing().await;
    let writer = database.client().await;
    writer.batch_execute("begin isolation level repeatable read; select count(*) from pillarbox.event").await.unwrap();
    let follower = Follower::start(joined(&database).await);
    until(&database.client().await, ASLEEP, 1).await;
    writer.batch_execute(&format!("{INSERT}; commit")).await.unwrap();
    assert!(follower.sees(1, LATE).await);
}

/// A transaction that was prepared when no relay ran, and is committed while one sleeps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepared_transaction_is_watched_until_it_ends() {
    let server = Server::builder().setting("max_prepared_transactions", 2).start().unwrap();
    let database = Database::on(&server).await;
    set_doorbell(&database.url().parse().unwrap(), true).await.unwrap();
    let late = database.client().await;
    late.batch_execute(&format!("begin; {INSERT}; prepare transaction 'late'")).await.unwrap();
    let follower = Follower::start(joined(&database).await);
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    while follower.store.wait(SHORT).await.unwrap() != Wake::Timeout {
        tokio::task::yield_now().await;
    }
    watcher.batch_execute("commit prepared 'late'").await.unwrap();
    assert!(follower.sees(1, LATE).await);
}

/// The keeper does not poll though events move: who polls becomes the keeper.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keeper_that_does_not_poll_gives_way() {
    let database = ringing().await;
    let keeper = joined(&database).await;
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    let follower = Follower::start(joined(&database).await);
    keeper.observe(&Report::default()).await.unwrap();
    let pid = format!(
        "select coalesce(max(pid), 0) from pg_locks where locktype = 'advisory' and objid = {KEEPER} and objsubid = 2 \
         and database = (select oid from pg_database where datname = current_database())"
    );
    let first: i32 = watcher.query_one(&pid, &[]).await.unwrap().get(0);
    // So many that they wait for each other to ring.
    let mut writers = JoinSet::new();
    for _ in 0..8 {
        let client = database.client().await;
        writers.spawn(async move { while client.batch_execute(INSERT).await.is_ok() {} });
    }
    until(&watcher, &format!("select count(*) from ({pid}) as k (pid) where pid not in (0, {first})"), 1).await;
    writers.shutdown().await;
    let published = database.number("select count(*) from pillarbox.event").await;
    // It reads the whole log at every poll.
    assert!(follower.sees(published as usize, 3 * LONG).await);
}

/// A number that looks random and is the same in every run.
fn noise(seed: u64) -> u64 {
    let mut value = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value ^ (value >> 27)
}

/// Publishes now and then, in transactions of up to 50 ms of which a tenth is rolled back; what was committed, and when.
async fn sparse_writer(client: Client, seed: u64, count: u64) -> Vec<(Uuid, Instant)> {
    let mut committed = Vec::new();
    for round in 0..count {
        let number = noise(seed * 1_000 + round);
        let server_side = |ms: u64| format!("select pg_sleep({})", ms as f64 / 1000.0);
        client.batch_execute(&server_side(number % 150)).await.unwrap();
        client.batch_execute("begin").await.unwrap();
        let id: Uuid = client
            .query_one(&format!("{INSERT} returning pillarbox.event_id(position, created_at)"), &[])
            .await
            .unwrap()
            .get(0);
        client.batch_execute(&server_side((number >> 8) % 50)).await.unwrap();
        if (number >> 16).is_multiple_of(10) {
            client.batch_execute("rollback").await.unwrap();
        } else {
            client.batch_execute("commit").await.unwrap();
            committed.push((id, Instant::now()));
        }
    }
    committed
}

async fn sparse_writers(database: &Database, count: u64) -> Vec<(Uuid, Instant)> {
    let mut writers = JoinSet::new();
    for seed in 0..4 {
        writers.spawn(sparse_writer(database.client().await, seed, count));
    }
    writers.join_all().await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_lost_among_relays_that_fall_asleep_all_the_time() {
    let database = ringing().await;
    let (a, b) = (joined(&database).await, joined(&database).await);
    for store in [&a, &b] {
        store.observe(&Report::default()).await.unwrap();
        store.experiment_at_the_doorbell(None, Some(Duration::from_millis(20)));
    }
    let followers = [Follower::start(a), Follower::start(b)];
    let committed = sparse_writers(&database, 40).await;
    let sleeps: usize = followers.iter().map(|follower| follower.store.sleeps()).sum();
    assert!(sleeps >= 20, "they fell asleep {sleeps} times");
    for follower in followers {
        assert!(follower.sees(committed.len(), LATE).await, "{} of {}", follower.seen.borrow().len(), committed.len());
        let seen = follower.seen.borrow();
        let late = committed.iter().map(|(id, at)| seen[id].saturating_duration_since(*at)).max().unwrap();
        assert!(late < LATE, "an event came after {late:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_relay_that_held_the_bell_is_heard_by_those_who_sleep() {
    let database = ringing().await;
    let holder = joined(&database).await;
    let sleeper = joined(&database).await;
    holder.observe(&Report::default()).await.unwrap();
    let holder = Follower::start(holder);
    let watcher = database.client().await;
    until(&watcher, ASLEEP, 1).await;
    let writers = several_writers(&database).await;
    watcher.batch_execute(INSERT).await.unwrap();
    until(&watcher, ASLEEP, 0).await;
    let sleeper = Follower::start(sleeper);
    let late = database.client().await;
    late.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
    for writer in &writers {
        writer.batch_execute("commit").await.unwrap();
    }
    assert!(sleeper.sees(5, LATE).await, "the ring was passed on");
    drop(holder);
    // As its engine would on the ring for the freed lock.
    let ended = async {
        while sleeper.store.observe(&Report::default()).await.unwrap().instances[0].lock != pillarbox::store::Lock::Free
        {
        }
    };
    tokio::time::timeout(LONG, ended).await.unwrap();
    late.batch_execute("commit").await.unwrap();
    assert!(sleeper.sees(6, LATE).await, "whoever saw the dead one awake rings nobody");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_of_a_fleet_keeps_a_snapshot_for_long() {
    const KEPT_MAX: Duration = Duration::from_secs(5);
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let stores = [joined(&database).await, joined(&database).await];
    stores[0].observe(&Report::default()).await.unwrap();
    let watcher = database.client().await;
    let waits =
        "select count(*) from pg_stat_activity where application_name like '%waiter' and wait_event_type = 'Lock'";
    until(&watcher, waits, 2).await;
    let kept = "select pid, backend_xmin::text from pg_stat_activity where application_name like 'pillarbox%' \
        and backend_xmin is not null";
    let mut since: HashMap<(i32, String), Instant> = HashMap::new();
    let started = Instant::now();
    while started.elapsed() < KEPT_MAX + Duration::from_secs(1) {
        watcher.batch_execute("select txid_current()").await.unwrap();
        let now = Instant::now();
        let rows = watcher.query(kept, &[]).await.unwrap();
        let mut seen = HashMap::new();
        for row in &rows {
            let holder = (row.get(0), row.get(1));
            let at = since.get(&holder).copied().unwrap_or(now);
            assert!(now - at < KEPT_MAX, "{holder:?} has been kept for {:?}", now - at);
            seen.insert(holder, at);
        }
        since = seen;
        watcher.batch_execute("select pg_sleep(0.02)").await.unwrap();
    }
    assert!(!server.log().contains("ERROR"), "waiting is no error: {}", server.log());
}
