//! Relays that are frozen or cut off inside a transaction: the server finishes what was sent, and who takes over waits for nobody.

use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::admin::{Change, Level, Operator, PausedBy, PrunePolicy, Selection, State};
use pillarbox::store::{
    AttemptError, InstanceId, LaneRef, LaneWrite, RecoverRequest, RecoveryCause, Report, Store, Take, TakeCause,
};
use pillarbox::{Start, Timestamp};
use pillarbox_postgres::PostgresStore;
use pillarbox_testkit::postgres::Server;
use pillarbox_testkit::proxy::Proxy;
use tokio_postgres::Client;

use crate::fixture::{Database, connect, delivery, hello, join, one_lane, own, settle, write};
use crate::ownership::{sessions_of, until};

/// Far longer than the second after which the server ends a transaction of ours that stands still.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many wait for a lock on a table.
const AT_GATE: &str = "select count(*) from pg_locks where not granted and locktype = 'relation' and database = \
                       (select oid from pg_database where datname = current_database())";

/// An owner of a lane that will not be heard of again, and somebody who takes it over.
struct Frozen {
    database: Database,
    owner: PostgresStore,
    id: InstanceId,
    heir: PostgresStore,
    lane: LaneRef,
}

impl Frozen {
    async fn new() -> Frozen {
        let database = Database::new().await;
        database.publish_keys(&["a"]).await;
        let (owner, heir) = (database.store().await, database.store().await);
        let (lane, _) = own(&owner, "s").await;
        let id = owner.observe(&Report::default()).await.unwrap().instances[0].id;
        join(&heir, [one_lane("s")]).await;
        Frozen { database, owner, id, heir, lane }
    }

    /// A session of the owner in the middle of a transaction. No time limit ends it.
    async fn session(&self, role: &str, sql: &str) -> Client {
        let client = self.database.client().await;
        let name = format!("pillarbox relay {} {role}", self.id.0);
        client.batch_execute(&format!("set application_name = '{name}'; begin; {sql}")).await.unwrap();
        client
    }

    /// What the heir asks for when the owner's beat has stood still for a lease.
    async fn seize(&self) -> Take {
        let fleet = self.heir.observe(&Report::default()).await.unwrap();
        let beat = fleet.instances.iter().find(|instance| instance.id == self.id).map(|instance| instance.beat);
        Take { lane: self.lane, expected: fleet.lanes[0].epoch, cause: TakeCause::Lease, beat }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_is_finished_by_the_server_alone() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b", "c", "d"]).await;
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let store = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    let (lane, epoch) = own(&store, "s").await;
    // Everything is prepared after this.
    let parks = LaneWrite { put: vec![delivery(1, "a", State::Retrying)], ..write(lane, epoch, 1) };
    assert!(settle(&store, parks).await);
    proxy.mute().unwrap();
    let error = AttemptError { at: Timestamp::now(), attempt: 1, kind: "sink".into(), message: "no".into() };
    let everything = LaneWrite {
        put: vec![delivery(2, "b", State::Retrying)],
        change: vec![
            (delivery(1, "a", State::Dead), Some(error.clone())),
            (delivery(2, "b", State::Dead), Some(error)),
        ],
        ..write(lane, epoch, 3)
    };
    let unanswered = tokio::spawn(async move { settle(&store, everything).await });
    let client = database.client().await;
    until(&client, "select floor from pillarbox.cursor", 3).await;
    let dead = "select count(*) from pillarbox.delivery where state = 'dead' and errors like '%no%'";
    assert_eq!(database.number(dead).await, 2);
    let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'";
    until(&client, open, 0).await;
    proxy.resume().unwrap();
    assert!(unanswered.await.unwrap(), "it hears of it later");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_is_taken_from_one_that_is_frozen_in_a_transaction() {
    let moments = [
        ("writer", "select from pillarbox.cursor for update"),
        ("writer", "update pillarbox.cursor set floor = 1"),
        ("control", "update pillarbox.instance set beat_at = now()"),
        ("operator", "select from pillarbox.cursor for share"),
        ("transaction", "select from pillarbox.cursor for update"),
    ];
    for (role, sql) in moments {
        let frozen = Frozen::new().await;
        let take = frozen.seize().await;
        let _session = frozen.session(role, sql).await;
        let taken = frozen.heir.take(&[take]).await.unwrap();
        assert!(taken[0].is_some(), "{role}: {sql}");
        until(&frozen.database.client().await, &sessions_of(frozen.id, "%"), 0).await;
    }
}

/// Somebody who owns no lane and is cut off inside a transaction that has locked lanes. Whoever takes these does not wait for long.
async fn nobody_waits_for<W, F>(table: &str, work: W)
where
    W: FnOnce(PostgresStore) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let frozen = Frozen::new().await;
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let other = PostgresStore::open(&proxy.url(frozen.database.url())).await.unwrap();
    frozen.database.execute("update pillarbox.subscription set hold_ms = 0").await;
    let dead = "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at) \
                select id, 1, 0, 1, 'a', 'dead', 1, now(), now(), now() from pillarbox.subscription";
    frozen.database.execute(dead).await;
    // It locks the lanes, and is held up at the next table.
    let (gate, client) = (frozen.database.client().await, frozen.database.client().await);
    gate.batch_execute(&format!("begin; lock table pillarbox.{table} in share mode")).await.unwrap();
    let working = tokio::spawn(work(other));
    until(&client, AT_GATE, 1).await;
    proxy.stall().unwrap();
    gate.batch_execute("commit").await.unwrap();
    let taken = tokio::time::timeout(PATIENCE, async { frozen.heir.take(&[frozen.seize().await]).await });
    let taken = taken.await.unwrap_or_else(|_| panic!("the heir waits for one that is held up at {table}")).unwrap();
    assert!(taken[0].is_some(), "nothing was committed by one that is held up at {table}");
    drop(proxy);
    working.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_relay_that_is_cut_off_while_it_joins_with_another_filter() {
    let join = |other: PostgresStore| async move {
        let joined = other.join(hello([one_lane("s").topics(["other"])])).await;
        assert!(joined.is_err());
    };
    nobody_waits_for("instance", join).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_retention_that_is_cut_off() {
    let prune = |other: PostgresStore| async move {
        let policy = PrunePolicy { keep: Some(Duration::ZERO), ..PrunePolicy::default() };
        assert!(other.prune(&policy).await.is_err());
    };
    nobody_waits_for("skip", prune).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_command_that_is_cut_off() {
    let rewind = |other: PostgresStore| async move {
        let change = Change::Rewind { subscription: "s".into(), to: Start::Beginning, key: None };
        assert!(other.change(&change, false).await.is_err());
    };
    nobody_waits_for("progress", rewind).await;
}

/// Commands about many rows, which may stand still for longer than others: whoever takes their lanes over ends them.
async fn nobody_waits_for_change(change: Change) {
    nobody_waits_for("delivery", |other: PostgresStore| async move {
        assert!(other.change(&change, false).await.is_err());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_requeue_of_all_that_is_cut_off() {
    let (subscription, which, limit) = ("s".into(), Selection::All, usize::MAX);
    nobody_waits_for_change(Change::Requeue { subscription, which, limit }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_requeue_of_a_key_that_is_cut_off() {
    let (subscription, which, limit) = ("s".into(), Selection::Key("a".into()), usize::MAX);
    nobody_waits_for_change(Change::Requeue { subscription, which, limit }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_rewind_of_a_key_that_is_cut_off() {
    let (subscription, to, key) = ("s".into(), Start::Beginning, Some("a".into()));
    nobody_waits_for_change(Change::Rewind { subscription, to, key }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_relane_that_is_cut_off() {
    let relane = |other: PostgresStore| async move {
        let pause = Change::Pause { subscription: "s".into(), by: PausedBy::Operator, reason: None };
        other.change(&pause, false).await.unwrap();
        let relane = Change::Relane { subscription: "s".into(), lanes: 2 };
        assert!(other.change(&relane, false).await.is_err());
    };
    nobody_waits_for("delivery", relane).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_has_beaten_meanwhile_keeps_its_sessions_and_its_lane() {
    let frozen = Frozen::new().await;
    let take = frozen.seize().await;
    frozen.owner.observe(&Report::default()).await.unwrap();
    let client = frozen.database.client().await;
    // One that waits for its neighbour opens a session of its own when it has seen it: there may be more of them later.
    let pids = sessions_of(frozen.id, "%").replace("count(*)", "pid");
    let sessions =
        async || -> BTreeSet<i32> { client.query(&pids, &[]).await.unwrap().iter().map(|row| row.get(0)).collect() };
    let before = sessions().await;
    assert_eq!(frozen.heir.take(&[take]).await.unwrap(), [None]);
    assert!(!before.is_empty() && sessions().await.is_superset(&before));
    frozen.owner.observe(&Report::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_taken_from_one_that_is_frozen_in_a_transaction() {
    let frozen = Frozen::new().await;
    let beat = frozen.seize().await.beat;
    frozen
        .database
        .execute(&format!(
            "insert into pillarbox.delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, \
             owner, claim, claimed_at) select id, 1, 0, 1, 'a', 'processing', 0, now(), now(), true, {}, 1, now() \
             from pillarbox.subscription",
            frozen.id.0
        ))
        .await;
    let _session = frozen.session("transaction", "select from pillarbox.delivery for update").await;
    let request = RecoverRequest { ended: vec![(frozen.id, RecoveryCause::Lease, beat)], ..RecoverRequest::default() };
    let recovered = frozen.heir.recover(&request).await.unwrap();
    assert_eq!(recovered.claims.iter().map(|(.., count)| count).sum::<u64>(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_comes_back_does_not_wait_for_what_it_has_left_behind() {
    let frozen = Frozen::new().await;
    let _session = frozen.session("writer", "select from pillarbox.cursor for update").await;
    let end = sessions_of(frozen.id, "control").replace("count(*)", "pg_terminate_backend(pid)");
    frozen.database.execute(&end).await;
    while frozen.owner.observe(&Report::default()).await.is_ok() {}
    join(&frozen.owner, [one_lane("s")]).await;
    let fleet = frozen.owner.observe(&Report::default()).await.unwrap();
    assert_eq!(fleet.lanes[0].owner, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_end_the_sessions_of_others_is_told_so() {
    let frozen = Frozen::new().await;
    let roles = ["heir", "owner"].map(|name| format!("{name}_{}", std::process::id()));
    for role in &roles {
        frozen.database.execute(&format!("create role {role} login")).await;
    }
    let doctor = async || {
        let checks = frozen.database.store().await.doctor().await.unwrap();
        checks.into_iter().find(|check| check.name == "heirs").unwrap()
    };
    assert_eq!(doctor().await.level, Level::Ok);
    let mut sessions = Vec::new();
    for (number, role) in roles.iter().enumerate() {
        let client = connect(&frozen.database.url().replacen("postgres@", &format!("{role}@"), 1)).await;
        let name = format!("pillarbox relay {} writer", 100 + number);
        client.batch_execute(&format!("set application_name = '{name}'")).await.unwrap();
        sessions.push(client);
    }
    let check = doctor().await;
    assert_eq!(check.level, Level::Warning);
    assert!(check.finding.contains(&format!("{} may not end sessions of {}", roles[0], roles[1])), "{check:?}");
    drop(sessions);
    for role in &roles {
        frozen.database.execute(&format!("drop role {role}")).await;
    }
}

/// It is ended between two statements, as by the instance that takes the lanes over, and learns of it with the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_was_ended_says_so_and_what_to_do() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b"]).await;
    let owner = database.store().await;
    let (lane, epoch) = own(&owner, "s").await;
    let dead = vec![delivery(1, "a", State::Dead), delivery(2, "b", State::Dead)];
    assert!(settle(&owner, LaneWrite { put: dead, ..write(lane, epoch, 2) }).await);
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let operator = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::All, limit: usize::MAX };
    let (gate, client) = (database.client().await, database.client().await);
    gate.batch_execute("begin; lock table pillarbox.delivery in access exclusive mode").await.unwrap();
    let working = {
        let requeue = requeue.clone();
        tokio::spawn(async move { (operator.change(&requeue, false).await, operator) })
    };
    until(&client, AT_GATE, 1).await;
    proxy.stall().unwrap();
    gate.batch_execute("commit").await.unwrap();
    let idle = "from pg_stat_activity where datname = current_database() and application_name = 'pillarbox operator' \
                and state = 'idle in transaction'";
    until(&client, &format!("select count(*) {idle}"), 1).await;
    client.batch_execute(&format!("select pg_terminate_backend(pid) {idle}")).await.unwrap();
    proxy.resume().unwrap();
    let (ended, operator) = working.await.unwrap();
    let said = ended.unwrap_err().to_string();
    assert!(said.contains("PostgreSQL ended this session: terminating connection"), "{said}");
    assert!(said.ends_with("repeat the command") && !said.contains("not reachable"), "{said}");
    assert_eq!(operator.change(&requeue, false).await.unwrap().count, 2);
}

/// As over a slow line: what the command has looked up is still on its way when the server has said it all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_about_many_rows_may_stand_still_for_more_than_a_second() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b"]).await;
    let owner = database.store().await;
    let (lane, epoch) = own(&owner, "s").await;
    let dead = vec![delivery(1, "a", State::Dead), delivery(2, "b", State::Dead)];
    assert!(settle(&owner, LaneWrite { put: dead, ..write(lane, epoch, 2) }).await);
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let operator = PostgresStore::open(&proxy.url(database.url())).await.unwrap();
    // It has locked the lanes, and is held up at the next table.
    let (gate, client) = (database.client().await, database.client().await);
    gate.batch_execute("begin; lock table pillarbox.delivery in access exclusive mode").await.unwrap();
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::All, limit: usize::MAX };
    let working = tokio::spawn(async move { operator.change(&requeue, false).await });
    until(&client, AT_GATE, 1).await;
    proxy.stall().unwrap();
    gate.batch_execute("commit").await.unwrap();
    let stands_still = "select count(*) from pg_stat_activity where datname = current_database() \
                        and state = 'idle in transaction' and clock_timestamp() - state_change > interval '1.5 seconds'";
    until(&client, stands_still, 1).await;
    proxy.resume().unwrap();
    assert_eq!(working.await.unwrap().unwrap().count, 2);
}
