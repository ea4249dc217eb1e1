//! A log that is copied, restored, reset or moved is refused or goes on correctly; nothing is skipped in silence.

use pillarbox::admin::Operator;
use pillarbox::store::{LaneRef, Store};
use pillarbox::{ErrorKind, NewEvent, Subscription};
use pillarbox_postgres::{PgConfig, PostgresStore, adopt, fresh, migrate, publish_all};
use pillarbox_testkit::postgres::Server;
use uuid::Uuid;

use crate::fixture::{connect, events, one_lane, own, poll_tail, settle, tail, write};

fn config(url: &str) -> PgConfig {
    url.parse().unwrap()
}

async fn publish(url: &str, count: usize) -> Vec<Uuid> {
    let new: Vec<NewEvent> = (0..count).map(|_| NewEvent::new("t", "y").key("k")).collect();
    publish_all(&connect(url).await, &new).await.unwrap()
}

async fn incarnation(url: &str) -> i64 {
    connect(url).await.query_one("select incarnation from pillarbox.meta", &[]).await.unwrap().get(0)
}

/// Opening it is refused, with the way out.
async fn is_foreign(url: &str, how: &str) {
    let error = PostgresStore::open(url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    let said = error.to_string();
    assert!(said.contains("--adopt") && said.contains("--fresh") && said.contains(how), "{said}");
}

/// A log with ten events of which subscription `s` has settled six, left cleanly.
async fn settled_six(url: &str) -> Vec<Uuid> {
    migrate(&config(url)).await.unwrap();
    let store = PostgresStore::open(url).await.unwrap();
    let ids = publish(url, 10).await;
    let (lane, epoch) = own(&store, "s").await;
    let mut six = write(lane, epoch, 6);
    six.cursor.anchor = Some((6, ids[5]));
    assert!(settle(&store, six).await);
    store.leave().await.unwrap();
    ids
}

/// What subscription `s` would be given now.
async fn waiting(url: &str) -> Vec<Uuid> {
    let store = PostgresStore::open(url).await.unwrap();
    let (lane, epoch) = own(&store, "s").await;
    let cursor = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap().cursor;
    let events = events(&store).await;
    let waits = events.iter().filter(|event| event.position > cursor.floor && !cursor.settled.contains(event.position));
    let ids = waits.map(|event| event.id).collect();
    store.leave().await.unwrap();
    ids
}

/// Goes on as the production log, and then as a copy.
async fn both_ways(url: &str, ids: &[Uuid]) {
    let before = incarnation(url).await;
    adopt(&config(url)).await.unwrap();
    assert!(incarnation(url).await > before);
    assert_eq!(waiting(url).await, ids[6..], "adopted: it goes on where it was");

    let log_id = async || connect(url).await.query_one("select log_id from pillarbox.meta", &[]).await.unwrap().get(0);
    let before: Uuid = log_id().await;
    let id_of_one = async || {
        let sql = "select pillarbox.event_id(1, 'epoch')";
        connect(url).await.query_one(sql, &[]).await.unwrap().get::<_, Uuid>(0)
    };
    let id_before = id_of_one().await;
    fresh(&config(url)).await.unwrap();
    assert_ne!(log_id().await, before);
    assert_ne!(id_of_one().await, id_before, "events of the copy and of the original have different ids");
    assert!(waiting(url).await.is_empty(), "fresh: nothing old");
    let store = PostgresStore::open(url).await.unwrap();
    let later = store.join(crate::fixture::hello([one_lane("later")])).await.unwrap();
    let lane = LaneRef { subscription: later.subscriptions[0].id, lane: 0 };
    let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let cursor = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap().cursor;
    assert!(cursor.floor >= 10, "nor to a subscription that is made later");
    store.leave().await.unwrap();
    let new = publish(url, 1).await;
    assert_eq!(waiting(url).await, new);
}

#[tokio::test]
async fn a_dump_restored_into_another_database_is_refused() {
    let server = Server::builder().with_dump().start().unwrap();
    let (from, to) = (server.create_database().unwrap(), server.create_database().unwrap());
    let ids = settled_six(from.url()).await;
    server.restore(to.name(), &server.dump(from.name()).unwrap()).unwrap();
    is_foreign(to.url(), from.name()).await;
    assert_eq!(waiting(from.url()).await, ids[6..], "the original is where it was");
    both_ways(to.url(), &ids).await;

    let other = Server::builder().with_dump().start().unwrap();
    other.restore("postgres", &server.dump(from.name()).unwrap()).unwrap();
    is_foreign(&other.url("postgres"), "another cluster").await;
}

#[tokio::test]
async fn a_dump_restored_in_the_place_of_the_log_is_refused() {
    let server = Server::builder().with_dump().start().unwrap();
    let database = server.create_database().unwrap();
    let ids = settled_six(database.url()).await;
    let dump = server.dump(database.name()).unwrap();
    publish(database.url(), 5).await;
    database.psql("drop schema pillarbox cascade").unwrap();
    server.restore(database.name(), &dump).unwrap();
    is_foreign(database.url(), "dump").await;
    both_ways(database.url(), &ids).await;
}

#[tokio::test]
async fn a_copied_cluster_is_refused() {
    let server = Server::builder().start().unwrap();
    let ids = settled_six(&server.url("postgres")).await;
    let copy = server.backup().unwrap().start().unwrap();
    is_foreign(&copy.url("postgres"), &server.port().to_string()).await;
    assert_eq!(waiting(&server.url("postgres")).await, ids[6..]);
    both_ways(&copy.url("postgres"), &ids).await;
}

#[tokio::test]
async fn a_backup_restored_under_a_running_store_is_noticed_by_its_next_poll() {
    let server = Server::builder().start().unwrap();
    let url = server.url("postgres");
    let ids = settled_six(&url).await;
    let backup = server.backup().unwrap();
    let lost = publish(&url, 5).await;
    let store = PostgresStore::open(&url).await.unwrap();
    assert_eq!(events(&store).await.len(), 15);
    server.restore_backup(&backup).unwrap();
    // The connection is lost with the server, and the next one leads to the older log.
    let error = loop {
        match store.poll(&tail(15, 100)).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    assert!(error.to_string().contains("--adopt"), "{error}");
    drop(store);
    both_ways(&url, &ids).await;
    assert!(!poll_tail(&PostgresStore::open(&url).await.unwrap(), 0).await.events.iter().any(|e| lost.contains(&e.id)));
}

#[tokio::test]
async fn a_sequence_that_was_set_back_is_noticed_before_and_after_events_have_grown_over_it() {
    let server = Server::builder().start().unwrap();
    let url = server.url("postgres");
    let ids = settled_six(&url).await;
    let running = PostgresStore::open(&url).await.unwrap();
    assert_eq!(events(&running).await.len(), 10);
    server.psql("postgres", "select setval('pillarbox.event_position_seq', 3)").unwrap();
    assert_eq!(running.poll(&tail(10, 100)).await.unwrap_err().kind(), ErrorKind::Foreign);
    // Positions that are taken cannot be given again.
    let client = connect(&url).await;
    let error = client.execute("select pillarbox.publish('t', 'y')", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "23505");
    drop(running);
    assert_eq!(refused_at_work(&url).await, ErrorKind::Foreign);
    adopt(&config(&url)).await.unwrap();
    assert_eq!(waiting(&url).await, ids[6..]);
    let new = publish(&url, 1).await;
    assert_eq!(waiting(&url).await, [&ids[6..], &new].concat(), "and the sequence is right again");
}

#[tokio::test]
async fn an_adopted_log_can_be_published_into_though_its_first_leaves_are_used_again() {
    let database = crate::retention::database(5).await;
    let url = database.url();
    publish(url, 62).await;
    let store = PostgresStore::open(url).await.unwrap();
    let keep = Some(std::time::Duration::ZERO);
    let policy = pillarbox::admin::PrunePolicy { keep, unreceived: true, ..Default::default() };
    crate::retention::prune_all(&store, &policy).await;
    let none_below = "select count(*) from pillarbox.leaf where low = 1";
    assert_eq!(database.number(none_below).await, 0, "the first leaf lies elsewhere now");
    database.execute("set session_replication_role = replica; truncate pillarbox.event restart identity").await;
    let refused = publish_all(&connect(url).await, &[NewEvent::new("t", "y")]).await.unwrap_err();
    assert!(refused.to_string().contains("no partition"), "{refused}");
    assert_eq!(PostgresStore::open(url).await.unwrap_err().kind(), ErrorKind::Foreign);
    let alarms = pillarbox::admin::Operator::status(&store).await.unwrap().log.alarms.join("\n");
    assert!(alarms.contains("no leaf holds position") && alarms.contains("--adopt"), "{alarms}");
    drop(store);
    adopt(&config(url)).await.unwrap();
    publish(url, 100).await;
    let store = PostgresStore::open(url).await.unwrap();
    assert_eq!(events(&store).await.len(), 100);
    let alarms = pillarbox::admin::Operator::status(&store).await.unwrap().log.alarms.join("\n");
    assert!(!alarms.contains("leaf"), "{alarms}");
}

/// Joins and works as a relay does until something is refused.
async fn refused_at_work(url: &str) -> ErrorKind {
    let work = async || {
        let store = PostgresStore::open(url).await?;
        let joined = store.join(crate::fixture::hello([Subscription { lanes: 1, ..Subscription::new("s") }])).await?;
        let lane = LaneRef { subscription: joined.subscriptions[0].id, lane: 0 };
        let fleet = store.observe(&Default::default()).await?;
        let expected = fleet.lanes.iter().find(|view| view.lane == lane).unwrap().epoch;
        let epoch = store
            .take(&[pillarbox::store::Take { lane, expected, cause: pillarbox::store::TakeCause::Free, beat: None }])
            .await?[0];
        store.load(&[(lane, epoch.unwrap())]).await.map(drop)
    };
    work().await.expect_err("a log that was reset is not gone on with").kind()
}

#[tokio::test]
async fn a_truncated_and_restarted_log_is_noticed_though_new_events_have_grown_over_it() {
    let server = Server::builder().start().unwrap();
    let url = server.url("postgres");
    settled_six(&url).await;
    let error = server.psql("postgres", "truncate pillarbox.event restart identity").unwrap_err();
    assert!(format!("{error:#}").contains("retention"), "{error:#}");
    // Whoever insists can.
    let insists = "set session_replication_role = replica; truncate pillarbox.event restart identity";
    server.psql("postgres", insists).unwrap();
    assert_eq!(refused_at_work(&url).await, ErrorKind::Foreign, "the floor lies beyond the horizon");
    let new = publish(&url, 15).await;
    assert_eq!(refused_at_work(&url).await, ErrorKind::Foreign, "another event lies where the anchor was");
    adopt(&config(&url)).await.unwrap();
    // Which of the new events lie where settled ones lay cannot be known: they count as settled, and `rewind` brings them back.
    assert_eq!(waiting(&url).await, new[6..]);
}

#[tokio::test]
async fn an_adopted_log_judges_new_events_by_the_filter_of_now() {
    let server = Server::builder().start().unwrap();
    let url = server.url("postgres");
    settled_six(&url).await;
    // Positions that were passed are handed out again.
    let former =
        r#"[{"definition": 1, "filter": {"topics": ["other"], "types": []}, "until": 5, "passed": ["1-100"]}]"#;
    let insists = "set session_replication_role = replica; truncate pillarbox.event restart identity";
    server
        .psql("postgres", &format!("update pillarbox.subscription set former_filters = '{former}'; {insists}"))
        .unwrap();
    let before = publish(&url, 3).await;
    adopt(&config(&url)).await.unwrap();
    let after = publish(&url, 1).await;
    let store = PostgresStore::open(&url).await.unwrap();
    for (id, wanted) in [(before[2], false), (after[0], true)] {
        let record = store.show(id).await.unwrap().expect("it is in the log");
        assert_eq!(record.subscriptions[0].wanted, wanted, "{id}");
    }
}

#[tokio::test]
async fn a_standby_is_refused_with_its_reason() {
    let primary = Server::builder().start().unwrap();
    let standby = primary.standby().unwrap();
    settled_six(&primary.url("postgres")).await;
    standby.wait_until_replayed(&primary).unwrap();
    let error = PostgresStore::open(&standby.url("postgres")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let said = error.to_string();
    assert!(said.contains("is a standby") && said.contains("name the primary"), "{said}");
}

#[tokio::test]
async fn a_promoted_standby_goes_on_under_its_name_as_another_incarnation() {
    let primary = Server::builder().start().unwrap();
    let standby = primary.standby().unwrap();
    let both = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?target_session_attrs=read-write",
        primary.port(),
        standby.port()
    );
    let ids = settled_six(&both).await;
    standby.wait_until_replayed(&primary).unwrap();
    // What the standby has not got is lost with the primary.
    primary.stop(pillarbox_testkit::postgres::Mode::Immediate).unwrap();
    standby.promote().unwrap();
    assert_eq!(incarnation(&both).await, 1);
    assert_eq!(waiting(&both).await, ids[6..]);
    assert_eq!(incarnation(&both).await, 2, "raised once, by the first to see it");
    // The same server under a name of its own, now that it is known to be home.
    assert_eq!(waiting(&standby.url("postgres")).await, ids[6..]);
    assert_eq!(incarnation(&both).await, 2);
}

#[tokio::test]
async fn a_promoted_standby_under_another_name_could_be_a_copy_and_is_refused() {
    let primary = Server::builder().start().unwrap();
    let standby = primary.standby().unwrap();
    let ids = settled_six(&primary.url("postgres")).await;
    standby.wait_until_replayed(&primary).unwrap();
    standby.promote().unwrap();
    is_foreign(&standby.url("postgres"), &primary.port().to_string()).await;
    both_ways(&standby.url("postgres"), &ids).await;
}

#[tokio::test]
async fn a_renamed_database_and_a_restarted_server_are_still_home() {
    let server = Server::builder().start().unwrap();
    server.psql("postgres", "create database before").unwrap();
    let ids = settled_six(&server.url("before")).await;
    server.restart(pillarbox_testkit::postgres::Mode::Immediate).unwrap();
    assert_eq!(waiting(&server.url("before")).await, ids[6..]);
    let alone = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = 'before'";
    server.psql("postgres", alone).unwrap();
    server.psql("postgres", "alter database before rename to after").unwrap();
    assert_eq!(waiting(&server.url("after")).await, ids[6..]);
    let socket = format!("postgres://postgres@/after?host={}&port={}", server.socket_dir().display(), server.port());
    assert_eq!(waiting(&socket).await, ids[6..], "also by its socket");
    assert_eq!(incarnation(&server.url("after")).await, 1);
}

#[tokio::test]
async fn a_log_whose_function_makes_other_ids_than_its_relays_is_refused() {
    let database = crate::fixture::Database::new().await;
    database.execute("update pillarbox.meta set id_salt = id_salt + 1").await;
    let error = PostgresStore::open(database.url()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("set_id_salt"), "{error}");
}
