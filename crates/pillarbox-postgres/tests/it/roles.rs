//! What the roles that `migrate --print-roles` prints may do, and what they may not.

use pillarbox::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, LaneWrite, Mode, NewEvent, Queued, RecoverRequest, RecoveryCause,
    State, Store, Subscription, TakeCause,
};
use pillarbox_postgres::{PgConfig, PostgresStore, migrate, print_roles, publish, publish_all};
use pillarbox_testkit::postgres::{Database, Server};
use tokio_postgres::Client;

use crate::fixture::{self, connect};

/// A server of its own, for roles belong to the whole cluster, with a database whose owner is no superuser.
struct Roles {
    server: Server,
    name: String,
    _database: Database,
}

impl Roles {
    async fn new() -> Self {
        let server = Server::builder().start().unwrap();
        let database = server.create_database().unwrap();
        let name = database.name().to_owned();
        let roles = "create role owner login; create role app login; create role relay login; create role viewer login;
            create role stranger login";
        server.psql("postgres", &format!("{roles}; alter database {name} owner to owner")).unwrap();
        migrate(&server.url_as("owner", &name).parse::<PgConfig>().unwrap()).await.unwrap();
        database.psql(&print_roles("pillarbox")).unwrap();
        let grants =
            "grant pillarbox_publisher to app; grant pillarbox_relay to relay; grant pillarbox_viewer to viewer";
        database.psql(grants).unwrap();
        Roles { server, name, _database: database }
    }

    fn url(&self, role: &str) -> String {
        self.server.url_as(role, &self.name)
    }

    async fn client(&self, role: &str) -> Client {
        connect(&self.url(role)).await
    }
}

/// Every way to publish that is documented.
const WAYS: [&str; 6] = [
    "insert into pillarbox.event (topic, key, type, payload) values ('t', 'k', 'y', '{}')",
    "select pillarbox.publish('t', 'y', '{}')",
    "select pillarbox.publish(topic => 't', type => 'y', key => 'k', dedup_key => 'd', ordered => true)",
    "select pillarbox.publish_bytes('t', 'y', '\\x00ff', 'application/x', key => 'k', ordered => true)",
    "select pillarbox.append('s', null, '[{\"type\": \"y\"}]')",
    "copy pillarbox.event (topic, type) from stdin",
];

#[tokio::test]
async fn a_publisher_publishes_in_every_way_and_can_do_nothing_else() {
    let roles = Roles::new().await;
    let client = roles.client("app").await;
    for sql in WAYS.iter().filter(|sql| !sql.starts_with("copy")) {
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
    publish(&client, &NewEvent::new("t", "y").dedup_key("e")).await.unwrap();
    publish_all(&client, &[NewEvent::new("t", "y"), NewEvent::new("t", "y")]).await.unwrap();
    for sql in [
        "select * from pillarbox.event",
        "insert into pillarbox.event (position, topic, type) overriding system value values (1, 't', 'y')",
        "insert into pillarbox.event (topic, type, stream_version) values ('t', 'y', 1)",
        "insert into pillarbox.event_1 (topic, type) values ('t', 'y')",
        "copy pillarbox.event (position, topic, type) from stdin",
        "select nextval('pillarbox.event_position_seq')",
        "select setval('pillarbox.event_position_seq', 1)",
        "delete from pillarbox.event",
        "truncate pillarbox.event_1",
        "select * from pillarbox.dedup_0",
        "update pillarbox.stream set version = 0",
        "update pillarbox.cursor set floor = 0",
        "update pillarbox.meta set log_start = 1",
        "select pillarbox.empty_leaf('event_1')",
        "select nextval('pillarbox.delivery_arrival_seq')",
        "select pillarbox.claim_deliveries(1, 1, 1, 1, false, 2, now(), false)",
        "select pillarbox.promote('{1}', '{k}')",
    ] {
        refused(&client, sql).await;
    }
}

async fn refused(client: &Client, sql: &str) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    assert_eq!(error.code().map(|code| code.code()), Some("42501"), "{sql}: {error:?}");
}

#[tokio::test]
async fn a_viewer_reads_and_writes_nothing() {
    let roles = Roles::new().await;
    roles.client("app").await.batch_execute(WAYS[0]).await.unwrap();
    let client = roles.client("viewer").await;
    for sql in ["select * from pillarbox.event_view", "select * from pillarbox.delivery_state"] {
        client.batch_execute(sql).await.unwrap();
    }
    for sql in WAYS {
        refused(&client, sql).await;
    }
    refused(&client, "update pillarbox.subscription set paused = true").await;
    let store = PostgresStore::open(&roles.url("viewer")).await.unwrap();
    assert_eq!(fixture::events(&store).await.len(), 1);
}

#[tokio::test]
async fn a_relay_works_on_a_queue() {
    let roles = Roles::new().await;
    roles.client("app").await.batch_execute(WAYS[0]).await.unwrap();
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let wish = Subscription { mode: Mode::Queue, ..fixture::one_lane("s") };
    let joined = fixture::join(&store, [wish]).await;
    let lane = fixture::lane(joined.subscriptions[0].id);
    let epoch = fixture::take(&store, lane, TakeCause::Free).await.unwrap();
    let queued = Queued { delivery: fixture::delivery(1, "k", State::Delayed), claim: None, error: None };
    let write = LaneWrite { queue: vec![queued], ..fixture::write(lane, epoch, 1) };
    assert!(fixture::settle(&store, write).await);
    let (subscription, first) = (lane.subscription, ClaimId(1));
    let request = ClaimRequest { subscription, limit: 1, first, suspect: false, tell: true, again: true };
    let claims = store.claim(&[request]).await.unwrap();
    assert_eq!((claims[0].claimed.len(), claims[0].rows), (1, Some(1)));
    let dead = vec![(joined.instance, RecoveryCause::Crash, None)];
    assert_eq!(store.recover(&RecoverRequest { dead, sweep: true }).await.unwrap().claims.len(), 1);
    let end = ClaimEnd { subscription, position: 1, claim: first, fate: ClaimFate::Done };
    assert_eq!(store.finish(&[end]).await.unwrap(), [false]);
    store.leave().await.unwrap();
}

#[tokio::test]
async fn a_relay_works_without_owning_anything_and_cannot_write_the_log() {
    let roles = Roles::new().await;
    roles.client("app").await.batch_execute(WAYS[0]).await.unwrap();
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let (lane, epoch) = fixture::own(&store, "s").await;
    assert_eq!(fixture::events(&store).await.len(), 1);
    assert!(fixture::settle(&store, fixture::write(lane, epoch, 1)).await);
    let policy = pillarbox::PrunePolicy { keep: Some(std::time::Duration::ZERO), ..Default::default() };
    pillarbox::Operator::prune(&store, &policy).await.unwrap();
    let client = roles.client("relay").await;
    for sql in [
        "truncate pillarbox.event_1",
        "select setval('pillarbox.event_position_seq', 1)",
        "insert into pillarbox.leaf (name, low) values ('trap', 1)",
        "update pillarbox.leaf set name = 'trap'",
        "delete from pillarbox.leaf",
        WAYS[0],
        WAYS[4],
    ] {
        refused(&client, sql).await;
    }
    let window = Some(std::time::Duration::from_secs(3600));
    store.set_limits(pillarbox_postgres::Limits { dedup_window: window, ..Default::default() }).await.unwrap();
}

#[tokio::test]
async fn a_relay_cannot_make_the_owner_run_its_code() {
    let roles = Roles::new().await;
    let relay = roles.client("relay").await;
    relay
        .batch_execute(
            "create function pg_temp.act() returns boolean language plpgsql as $$
            begin
                execute 'grant owner to relay';
                return true;
            end $$;
            create temporary view trap as select pg_temp.act();
            create temporary view leaf as select 'trap' as name, pg_temp.act() as emptied, 1 as low, 2 as high;
            create temporary view meta as select pg_temp.act() as x",
        )
        .await
        .unwrap();
    // Even if its name stood among the leaves.
    roles.client("owner").await.batch_execute("update pillarbox.leaf set name = 'trap' where low = 1").await.unwrap();
    for sql in ["select pillarbox.arrange_leaves(array[1, 100])", "select pillarbox.empty_leaf('trap')"] {
        let error = relay.batch_execute(sql).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "42P01", "{sql}: {error:?}");
        assert!(error.as_db_error().unwrap().message().contains("pillarbox.trap"), "{error:?}");
    }
    relay.batch_execute("select pillarbox.dedup_rotate()").await.unwrap();
    refused(&relay, "set role owner").await;
}

#[tokio::test]
async fn one_role_may_own_migrate_publish_and_relay() {
    let roles = Roles::new().await;
    let client = roles.client("owner").await;
    for sql in WAYS.iter().filter(|sql| !sql.starts_with("copy")) {
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
    let store = PostgresStore::open(&roles.url("owner")).await.unwrap();
    fixture::own(&store, "s").await;
    assert_eq!(fixture::events(&store).await.len(), 5);
}

#[tokio::test]
async fn the_owner_of_a_schema_alone_may_migrate_and_others_are_told_what_they_lack() {
    let roles = Roles::new().await;
    let admin = roles.client("owner").await;
    admin.batch_execute("create schema theirs; grant all on schema theirs to stranger").await.unwrap();
    let theirs = format!("{}?schema=theirs", roles.url("stranger"));
    assert!(migrate(&theirs.parse::<PgConfig>().unwrap()).await.unwrap().created);

    let error = PostgresStore::open(&roles.url("stranger")).await.unwrap_err().to_string();
    assert!(error.contains("stranger") && error.contains("--print-roles"), "{error}");
    let error =
        migrate(&format!("{}?schema=none", roles.url("stranger")).parse::<PgConfig>().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("permission denied"), "{error}");
}
