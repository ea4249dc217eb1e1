use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::admin::Operator;
use pillarbox::store::{Hello, InstanceId, Lock, Report, Store, Take, TakeCause, Wake};
use pillarbox::testing::Capture;
use pillarbox::{ErrorKind, NewEvent, Relay, Start, Subscription, Timestamp};
use pillarbox_postgres::PostgresStore;
use pillarbox_testkit::eventually;
use pillarbox_testkit::postgres::{Mode, Server};
use pillarbox_testkit::proxy::Proxy;
use tokio_postgres::Client;

use crate::fixture::{Database, hello, join, lane, one_lane, own, pages, settle, take, write};

/// Far longer than any of these tests; reached only if something is lost.
const LONG: Duration = Duration::from_secs(20);

/// Returns once `sql` gives this number.
pub(crate) async fn until(client: &Client, sql: &str, number: i64) {
    let found = async || client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == number;
    eventually(&format!("{sql} is {number}"), async || found().await.then_some(())).await;
}

/// Counts the sessions of an instance.
pub(crate) fn sessions_of(id: InstanceId, role: &str) -> String {
    let name = format!("pillarbox relay {} {role}", id.0);
    format!(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name like '{name}'"
    )
}

/// Ends a store as a crash would, and returns when the server has noticed.
pub(crate) async fn kill(database: &Database, store: PostgresStore, id: InstanceId) {
    drop(store);
    until(&database.client().await, &sessions_of(id, "%"), 0).await;
}

async fn locks(store: &PostgresStore) -> Vec<Lock> {
    let fleet = store.observe(&Report::default()).await.unwrap();
    fleet.instances.iter().map(|instance| instance.lock).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_comes_back_keeps_the_definition_of_a_newer_instance() {
    let database = Database::new().await;
    let (old, new) = (database.store().await, database.store().await);
    join(&old, [one_lane("s").topics(["old"])]).await;
    join(&new, [one_lane("s").topics(["new"])]).await;
    let again = Hello { rejoin: true, ..hello([one_lane("s").topics(["old"]), one_lane("r")]) };
    let joined = old.join(again).await.unwrap();
    assert_eq!(joined.subscriptions[0].definition.filter.topics, ["new"]);
    assert!(joined.subscriptions[1].created, "what is not there is made");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starting_now_settles_what_is_visible_and_leaves_open_what_is_not() {
    let database = Database::new().await;
    database.publish_keys(&["a"; 3]).await;
    let open = database.client().await;
    let insert = "insert into pillarbox.event (topic, type) values ('t', 'y')";
    open.batch_execute(&format!("begin; {insert}")).await.unwrap();
    database.publish_keys(&["a"; 2]).await;
    database.execute(&format!("begin; {insert}; rollback")).await;
    database.publish_keys(&["a"]).await;
    database.execute("insert into pillarbox.dead_range (low, high) values (7, 7)").await;
    let store = database.store().await;
    let starts = [(Start::Now, "5-8"), (Start::Position(6), "5-6"), (Start::Position(2), "")];
    for (index, (start, settled)) in starts.into_iter().enumerate() {
        let joined = join(&store, [Subscription { start, ..one_lane(&format!("s{index}")) }]).await;
        let state = store.load(&[(lane(joined.subscriptions[0].id), 0)]).await.unwrap().remove(0).unwrap();
        let floor = if settled.is_empty() { 2 } else { 3 };
        assert_eq!((state.cursor.floor, state.cursor.settled.to_string().as_str()), (floor, settled), "{start:?}");
    }
    let covered = "select count(*) from pillarbox.progress where floor_from = 4 and floor_to = 8 and epoch = 0";
    assert_eq!(database.number(covered).await, 1, "what was never asked for is in the books");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_take_at_once_share_the_lanes_without_waiting_in_a_circle() {
    let database = Database::new().await;
    let (a, b) = (database.store().await, database.store().await);
    let many = Subscription { lanes: 32, ..Subscription::new("s") };
    join(&a, [many.clone()]).await;
    join(&b, [many]).await;
    let fleet = a.observe(&Report::default()).await.unwrap();
    let takes: Vec<Take> = fleet
        .lanes
        .iter()
        .map(|view| Take { lane: view.lane, expected: view.epoch, cause: TakeCause::Free, beat: None })
        .collect();
    let backwards: Vec<Take> = takes.iter().rev().copied().collect();
    let (first, second) = tokio::join!(a.take(&takes), b.take(&backwards));
    let (first, mut second) = (first.unwrap(), second.unwrap());
    second.reverse();
    let once = |(a, b): (&Option<i64>, &Option<i64>)| a.is_some() != b.is_some();
    assert!(first.iter().zip(&second).all(once), "{first:?} {second:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_instance_rings_its_neighbour_at_once_and_is_seen_as_ended() {
    let database = Database::new().await;
    let (a, b, c) = (database.store().await, database.store().await, database.store().await);
    let a_id = join(&a, [one_lane("s")]).await.instance;
    let a_lane = {
        let fleet = a.observe(&Report::default()).await.unwrap();
        fleet.lanes[0].lane
    };
    take(&a, a_lane, TakeCause::Free).await.unwrap();
    let b_id = join(&b, [one_lane("s")]).await.instance;
    let c_id = join(&c, [one_lane("s")]).await.instance;
    assert_eq!(locks(&c).await, [Lock::Held; 3]);
    assert_eq!(locks(&b).await, [Lock::Held; 3]);
    let client = database.client().await;
    // c is the neighbour of a in the ring: it waits for that lock.
    let waits = format!(
        "select count(*) from pg_locks where locktype = 'advisory' and objid = {} and not granted \
         and pid in (select pid from pg_stat_activity where application_name = 'pillarbox relay {} waiter' \
         and datname = current_database())",
        a_id.0, c_id.0
    );
    until(&client, &waits, 1).await;
    pillarbox_polls(&c).await;
    let started = Instant::now();
    drop(a);
    loop {
        assert_eq!(c.wait(LONG).await.unwrap(), Wake::Rang);
        let fleet = c.observe(&Report::default()).await.unwrap();
        pillarbox_polls(&c).await;
        if fleet.instances[0].lock == Lock::Free {
            break;
        }
    }
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(locks(&b).await, [Lock::Free, Lock::Held, Lock::Held]);
    take(&b, a_lane, TakeCause::Lock).await.unwrap();
    locks(&b).await;
    assert_eq!(locks(&b).await, [Lock::Held, Lock::Held], "buried");

    b.leave().await.unwrap();
    let fleet = c.observe(&Report::default()).await.unwrap();
    assert_eq!(fleet.instances.iter().map(|instance| instance.id).collect::<Vec<_>>(), [c_id]);
    assert_eq!((fleet.lanes[0].owner, b_id < c_id), (None, true));
}

async fn pillarbox_polls(store: &PostgresStore) {
    crate::fixture::poll_tail(store, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_buried_instance_is_told() {
    let database = Database::new().await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    database.execute("delete from pillarbox.instance").await;
    let take = Take { lane, expected: epoch, cause: TakeCause::Free, beat: None };
    assert_eq!(store.take(&[take]).await.unwrap_err().kind(), ErrorKind::Ended);
    assert_eq!(store.observe(&Report::default()).await.unwrap_err().kind(), ErrorKind::Ended);
    let next = join(&store, [one_lane("s")]).await;
    assert_eq!(store.observe(&Report::default()).await.unwrap().instances[0].id, next.instance);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_control_connection_ends_the_instance_and_others_wait_while_it_works() {
    let database = Database::new().await;
    let (a, b) = (database.store().await, database.store().await);
    let (lane, epoch) = own(&a, "s").await;
    let a_id = a.observe(&Report::default()).await.unwrap().instances[0].id;
    join(&b, [one_lane("s")]).await;
    assert_eq!(locks(&b).await, [Lock::Held; 2]);
    assert!(settle(&a, write(lane, epoch, 0)).await, "its writer is connected");
    let client = database.client().await;
    let end = format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'pillarbox relay {} control' \
         and datname = current_database()",
        a_id.0
    );
    let ended: i64 = client.query_one(&end, &[]).await.unwrap().get(0);
    assert_eq!(ended, 1);
    until(&client, &sessions_of(a_id, "control"), 0).await;
    assert_eq!(locks(&b).await, [Lock::Unknown, Lock::Held], "it may still be at work");
    assert_eq!(a.wait(LONG).await.unwrap_err().kind(), ErrorKind::Ended);
    assert_eq!(a.observe(&Report::default()).await.unwrap_err().kind(), ErrorKind::Ended);
    assert_eq!(a.poll(&crate::fixture::tail(0, 1)).await.unwrap_err().kind(), ErrorKind::Ended);
    kill(&database, a, a_id).await;
    assert_eq!(locks(&b).await, [Lock::Free, Lock::Held]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_instance_is_not_at_work_because_its_retention_still_counts() {
    let database = Database::new().await;
    let (a, b) = (database.store().await, database.store().await);
    let (lane, _) = own(&a, "s").await;
    let a_id = a.observe(&Report::default()).await.unwrap().instances[0].id;
    join(&b, [one_lane("s")]).await;
    assert_eq!(locks(&b).await, [Lock::Held; 2]);
    kill(&database, a, a_id).await;
    // A statement that the server goes on with: it has not noticed that nobody waits for it any more.
    let counting = database.client().await;
    counting.batch_execute(&format!("set application_name = 'pillarbox relay {} operator'", a_id.0)).await.unwrap();
    let counted = tokio::spawn(async move { counting.batch_execute("select pg_sleep(600)").await });
    let client = database.client().await;
    until(&client, &sessions_of(a_id, "operator"), 1).await;
    assert_eq!(locks(&b).await, [Lock::Free, Lock::Held]);
    take(&b, lane, TakeCause::Lock).await.unwrap();
    until(&client, &sessions_of(a_id, "operator"), 0).await;
    assert!(counted.await.unwrap().is_err(), "it was ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_of_the_database_nobody_is_taken_for_dead() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let (a, b) = (database.store().await, database.store().await);
    own(&a, "s").await;
    join(&b, [one_lane("s")]).await;
    assert_eq!(locks(&b).await, [Lock::Held; 2]);
    server.restart(Mode::Fast).unwrap();
    assert_eq!(b.observe(&Report::default()).await.unwrap_err().kind(), ErrorKind::Ended);
    join(&b, [one_lane("s")]).await;
    // The other has not come back yet, and the lane is still its own: only its silence shows, after a lease.
    assert_eq!(locks(&b).await, [Lock::Unknown, Lock::Held]);
    assert_eq!(locks(&b).await, [Lock::Unknown, Lock::Held]);
    join(&a, [one_lane("s")]).await;
    let fleet = b.observe(&Report::default()).await.unwrap();
    assert_eq!((fleet.instances.len(), fleet.lanes[0].owner), (2, None), "who comes back gives back what it had");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_instance_keeps_its_lock_until_its_silence_is_acted_on() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let proxy = Proxy::start(server.port()).unwrap();
    let frozen = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    let b = database.store().await;
    let (lane, _) = own(&frozen, "s").await;
    let id = frozen.observe(&Report::default()).await.unwrap().instances[0].id;
    join(&b, [one_lane("s")]).await;
    proxy.stall().unwrap();
    assert_eq!(locks(&b).await, [Lock::Held; 2], "only its beats tell");
    take(&b, lane, TakeCause::Lease).await.unwrap();
    let client = database.client().await;
    until(&client, &sessions_of(id, "%"), 0).await;
    assert_eq!(locks(&b).await, [Lock::Free, Lock::Held], "its sessions were ended");
    proxy.resume().unwrap();
    let given_up = Instant::now() + LONG;
    let error = loop {
        assert!(Instant::now() < given_up, "it goes on");
        // What it had not polled rings until then.
        if let Err(error) = frozen.wait(LONG).await {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Ended);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_anchor_that_is_not_in_the_log_is_noticed_with_a_beat() {
    let database = Database::new().await;
    let ids = database.publish_keys(&["a"; 2]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let mut settled = write(lane, epoch, 2);
    settled.cursor.anchor = Some((2, ids[1]));
    assert!(settle(&store, settled).await);
    store.observe(&Report::default()).await.unwrap();
    database
        .execute(
            "alter table pillarbox.event disable trigger is_never_changed;
             update pillarbox.event set id = gen_random_uuid() where position = 2",
        )
        .await;
    let error = store.observe(&Report::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    assert_eq!(store.load(&[(lane, epoch)]).await.unwrap_err().kind(), ErrorKind::Foreign);
    database.execute("update pillarbox.meta set log_start = 3, pruned_to = 2").await;
    store.observe(&Report::default()).await.unwrap();
    assert!(store.load(&[(lane, epoch)]).await.unwrap()[0].is_some(), "retention has passed it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_sessions_of_a_relay_carry_its_number_and_there_are_at_most_four() {
    let database = Database::new().await;
    let (a, b) = (database.store().await, database.store().await);
    join(&b, [one_lane("s")]).await;
    let (lane, epoch) = own(&a, "s").await;
    let id = InstanceId(database.number("select max(id)::bigint from pillarbox.instance").await);
    pillarbox_polls(&a).await;
    assert!(settle(&a, write(lane, epoch, 0)).await);
    let client = database.client().await;
    until(&client, &sessions_of(id, "waiter"), 1).await;
    assert_eq!(client.query_one(&sessions_of(id, "%"), &[]).await.unwrap().get::<_, i64>(0), 4);
}

#[tokio::test]
async fn anchors_are_looked_up_one_by_one_however_the_planner_is_misled() {
    let database = Database::new().await;
    let publish = "insert into pillarbox.event (topic, type, payload) select 't', 'y', '\"some text\"' \
                   from generate_series(1, 30000)";
    database.execute(publish).await;
    let store = database.store().await;
    let joined = join(&store, [Subscription { lanes: 4, ..Subscription::new("s") }]).await;
    let anchors = format!(
        "update pillarbox.cursor set owner = {}, floor = 10000 + lane, anchor_position = 10000 + lane, \
         anchor_id = (select id from pillarbox.event_view where position = 10000 + lane); analyze",
        joined.instance.0
    );
    database.execute(&anchors).await;
    store.observe(&Report::default()).await.unwrap();
    let size = "select sum(pg_relation_size('pillarbox.' || name) / 8192)::bigint from pillarbox.leaf";
    assert!(database.number(size).await > 200);
    let sql = include_str!("../../src/sql/own_anchors.sql").replace("$1", &joined.instance.0.to_string());
    let client = database.client().await;
    for misled in ["set enable_nestloop = off", "set enable_hashjoin = off", "set enable_mergejoin = off"] {
        client.batch_execute(&format!("reset all; set search_path = pillarbox; {misled}")).await.unwrap();
        let pages = pages(&client, &sql).await;
        assert!(pages < 100, "{pages} pages for four anchors with {misled}");
    }
}

/// Lets the clock of a database be an hour ahead of ours.
const CLOCK: &str = "
    alter function pg_catalog.clock_timestamp() rename to clock_of_the_server;
    create function pg_catalog.clock_timestamp() returns timestamptz language sql volatile
        as $$ select pg_catalog.clock_of_the_server() + interval '1 hour' $$";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_databases_clock_is_the_one_that_counts() {
    let database = Database::new().await;
    let minutes = |minutes: u64| Timestamp::now().plus(Duration::from_secs(60 * minutes));
    let due = |at| NewEvent::new("t", "y").deliver_at(at);
    let ids = database.publish(&[due(minutes(30)), due(minutes(120))]).await;
    database.execute(CLOCK).await;
    let is_ahead = |time: Timestamp| time > minutes(55) && time < minutes(65);
    let store = database.store().await;
    let joined = join(&store, [one_lane("s")]).await;
    assert!(is_ahead(joined.time), "{}", joined.time);
    let fleet = store.observe(&Report::default()).await.unwrap();
    assert!(is_ahead(fleet.time), "{}", fleet.time);
    store.leave().await.unwrap();

    let capture = Capture::new();
    let relay = Relay::builder(database.store().await).subscribe(one_lane("s"), Arc::new(capture.clone()));
    let relay = relay.start().await.unwrap();
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let sent: Vec<_> = capture.events().iter().map(|event| event.id).collect();
    assert_eq!(sent, ids[..1], "the first is due by the database's clock, the second is not");
}

#[tokio::test]
async fn changes_of_what_is_dead_or_delayed_are_added_up_by_a_beat() {
    let database = Database::new().await;
    let store = database.store().await;
    join(&store, [one_lane("s")]).await;
    let die = async |from: usize, to: usize| {
        let sql = format!(
            "insert into pillarbox.delivery \
                 (subscription, position, lane, arrival, state, attempts, due_at, since, died_at, queued) \
             select id, g, 0, g, 'dead', 1, now(), now(), now(), false \
             from pillarbox.subscription, generate_series({from}, {to}) as g"
        );
        database.execute(&sql).await;
    };
    let changes = async || database.number("select count(*) from pillarbox.aside_count").await;
    die(1, 999).await;
    store.observe(&Report::default()).await.unwrap();
    assert_eq!(changes().await, 999, "so few are left alone");
    die(1_000, 12_500).await;
    store.observe(&Report::default()).await.unwrap();
    assert_eq!(changes().await, 2_501, "the sum, and what was too much for one beat");
    store.observe(&Report::default()).await.unwrap();
    assert_eq!(changes().await, 1);
    assert_eq!(store.status().await.unwrap().subscriptions[0].dead, 12_500);
}

/// Their rows stay for a while, and nobody has seen their locks come free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_died_long_ago_keep_no_lane_from_who_starts() {
    let database = Database::new().await;
    let wish = || Subscription { lanes: 6, ..Subscription::new("s") };
    for _ in 0..3 {
        join(&database.store().await, [wish()]).await;
    }
    let keys: Vec<String> = (0..24).map(|number| format!("k{number}")).collect();
    database.publish_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let capture = Capture::new();
    let mut config = pillarbox::RelayConfig::default();
    config.engine.lease_ttl = Duration::from_secs(3600);
    let builder = Relay::builder(database.store().await).config(config);
    let relay = builder.subscribe(wish(), Arc::new(capture.clone())).start().await.unwrap();
    tokio::time::timeout(Duration::from_secs(60), relay.until_idle()).await.expect("no lease is waited for").unwrap();
    assert_eq!(capture.events().len(), 24);
    relay.drain().await.unwrap();
    let checks = database.store().await.doctor().await.unwrap();
    let check = checks.iter().find(|check| check.name == "instances").unwrap();
    assert_eq!(check.finding, "0 alive; 3 ended and own nothing");
}
