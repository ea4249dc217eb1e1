//! What the roles that `migrate --print-roles` prints may do, and what they may not.

use pillarbox::admin::State;
use pillarbox::journal::Expected;
use pillarbox::store::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, LaneWrite, Queued, RecoverRequest, RecoveryCause, Store, TakeCause,
};
use pillarbox::{ErrorKind, Mode, NewEvent, Subscription};
use pillarbox_postgres::{PgConfig, PostgresStore, append, head, migrate, print_roles, publish, publish_all, read};
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
        Self::after("").await
    }

    /// With statements that are run before the schema is made.
    async fn after(sql: &str) -> Self {
        let server = Server::builder().start().unwrap();
        let database = server.create_database().unwrap();
        let name = database.name().to_owned();
        let roles = "create role owner login; create role app login; create role relay login; create role viewer login;
            create role stranger login; create role sourced login";
        server.psql("postgres", &format!("{roles}; alter database {name} owner to owner")).unwrap();
        database.psql(sql).unwrap();
        migrate(&server.url_as("owner", &name).parse::<PgConfig>().unwrap()).await.unwrap();
        database.psql(&print_roles("pillarbox")).unwrap();
        let grants =
            "grant pillarbox_publisher to app, sourced; grant pillarbox_journal to sourced; grant pillarbox_relay to relay;
             grant pillarbox_viewer to viewer";
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
async fn a_publisher_appends_and_reads_its_streams_only_with_the_role_for_that() {
    let roles = Roles::new().await;
    let events = [NewEvent::new("t", "y").json_text("1")];
    let (publisher, sourced) = (roles.client("app").await, roles.client("sourced").await);
    append(&publisher, "s", Expected::New, &events).await.unwrap();
    for denied in [head(&publisher, "s").await.map(drop), read(&publisher, "s", 1..).await.map(drop)] {
        assert_eq!(denied.unwrap_err().kind(), ErrorKind::Invalid);
    }
    let past = read(&sourced, "s", 1..).await.unwrap();
    assert_eq!(append(&sourced, "s", past.len() as i64, &events).await.unwrap().version, 2);
    assert_eq!(head(&sourced, "s").await.unwrap(), 2);
}

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
async fn grants_are_complete_where_nobody_may_call_a_function_by_default() {
    let roles = Roles::after("alter default privileges for role owner revoke execute on functions from public").await;
    refused(&roles.client("viewer").await, "select pillarbox.new_id()").await;
    let app = roles.client("app").await;
    for sql in WAYS.iter().filter(|sql| !sql.starts_with("copy")) {
        app.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
    publish(&app, &NewEvent::new("t", "y").dedup_key("e")).await.unwrap();
    publish_all(&app, &[NewEvent::new("t", "y"), NewEvent::new("t", "y")]).await.unwrap();
    app.batch_execute("select pillarbox.accept('c', gen_random_uuid())").await.unwrap();

    let handler = |_| std::future::ready(Ok::<(), pillarbox::Failure>(()));
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let relay = pillarbox::Relay::builder(store).handle(fixture::one_lane("s"), handler);
    let queue = Subscription { mode: Mode::Queue, ..fixture::one_lane("q") };
    let relay = relay.handle(queue, handler).start().await.unwrap();
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let policy = pillarbox::admin::PrunePolicy { keep: Some(std::time::Duration::ZERO), ..Default::default() };
    crate::retention::prune_all(&store, &policy).await;

    let store = PostgresStore::open(&roles.url("viewer")).await.unwrap();
    let status = pillarbox::admin::Operator::status(&store).await.unwrap();
    assert!(status.subscriptions.iter().all(|subscription| subscription.pending == 0), "{status:?}");
    let events = fixture::events(&store).await;
    assert_eq!(events.len(), 8);
    assert!(pillarbox::admin::Operator::show(&store, events[0].id).await.unwrap().is_some());
    // Without the index, which a planner that knows a small log does not use either, the check is called for each event.
    roles.client("owner").await.batch_execute("drop index pillarbox.event_id; analyze pillarbox.event").await.unwrap();
    for role in ["viewer", "relay"] {
        let store = PostgresStore::open(&roles.url(role)).await.unwrap();
        assert!(pillarbox::admin::Operator::show(&store, events[0].id).await.unwrap().is_some(), "{role}");
    }
    let query = pillarbox::admin::ListQuery { limit: 100, ..Default::default() };
    assert_eq!(pillarbox::admin::Operator::list(&store, &query).await.unwrap().len(), 8);
    let viewer = roles.client("viewer").await;
    for sql in ["select * from pillarbox.event_view", "select * from pillarbox.delivery_state"] {
        viewer.batch_execute(sql).await.unwrap();
    }
}

/// Operators of whoever may create some in a schema that is on everybody's search path, which fit the types better than PostgreSQL's own.
const HOSTILE: &str = "
    create function public.is_called() returns void language plpgsql as $$ begin raise exception 'called'; end $$;
    create function public.bits(bigint, integer) returns bigint language sql as 'select 0::bigint from public.is_called()';
    create function public.product(numeric, integer) returns numeric language sql as 'select 0::numeric from public.is_called()';
    create function public.shifted(bigint, bigint) returns bigint language sql as 'select 0::bigint from public.is_called()';
    create operator public.| (leftarg = bigint, rightarg = integer, function = public.bits);
    create operator public.& (leftarg = bigint, rightarg = integer, function = public.bits);
    create operator public.+ (leftarg = bigint, rightarg = integer, function = public.bits);
    create operator public.* (leftarg = numeric, rightarg = integer, function = public.product);
    create operator public.<< (leftarg = bigint, rightarg = bigint, function = public.shifted)";

#[tokio::test]
async fn nobodys_operators_are_called_by_who_publishes_or_reads() {
    let database = fixture::Database::new().await;
    database.execute(HOSTILE).await;
    for sql in ["select 28672::bigint | 1", "select 1.5::numeric * 1000"] {
        assert!(database.client().await.batch_execute(sql).await.is_err(), "they would be called: {sql}");
    }
    database
        .execute(
            "select pillarbox.publish('t', 'y', '{}', 'k', headers => '{\"a\": 1}', dedup_key => 'd', ordered => true);
             select pillarbox.publish('t', 'y', '{}');
             select pillarbox.publish_bytes('t', 'y', 'abc', 'text/plain');
             select pillarbox.append('s', 0, '[{\"type\": \"y\"}]');
             insert into pillarbox.event (topic, type) values ('t', 'y');
             select * from pillarbox.event_view; select * from pillarbox.delivery_state",
        )
        .await;
}

/// Whoever looks at a row writes down who it is and whether its statements are compiled.
const WATCH: &str = "
    alter role relay set jit = on; alter role relay set jit_above_cost = 0;
    create table public.seen (name text, jit text, primary key (name, jit));
    create function public.watch() returns boolean language plpgsql volatile security definer as $$
    begin
        if current_setting('transaction_read_only') = 'off' then
            insert into public.seen values (current_setting('application_name'), current_setting('jit')) on conflict do nothing;
        end if;
        return true;
    end $$;
    alter table pillarbox.meta enable row level security;
    create policy watch on pillarbox.meta using (public.watch()) with check (true);
    alter table pillarbox.delivery enable row level security;
    create policy watch on pillarbox.delivery using (public.watch()) with check (true);
    alter table pillarbox.cursor enable row level security;
    create policy watch on pillarbox.cursor using (public.watch()) with check (true);
    alter table pillarbox.instance enable row level security;
    create policy watch on pillarbox.instance using (public.watch()) with check (true)";

async fn nothing(_: &tokio_postgres::Transaction<'_>, _: pillarbox::Delivery) -> Result<(), pillarbox::Failure> {
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_session_of_ours_compiles_its_statements() {
    let roles = Roles::new().await;
    roles.server.psql(&roles.name, WATCH).unwrap();
    let url = roles.url("relay");
    let handler = |_| std::future::ready(Ok::<(), pillarbox::Failure>(()));
    let transact = pillarbox_postgres::Transactional::new(&url, nothing).unwrap();
    let queue = |name| Subscription { mode: Mode::Queue, ..fixture::one_lane(name) };
    let store = PostgresStore::open(&url).await.unwrap();
    let relay = pillarbox::Relay::builder(store).handle(fixture::one_lane("s"), handler);
    let relay = relay.transact(queue("t"), transact).start().await.unwrap();
    roles.client("app").await.batch_execute(WAYS[0]).await.unwrap();
    relay.until_idle().await.unwrap();
    let operator = PostgresStore::open(&url).await.unwrap();
    let resume = pillarbox::admin::Change::Resume("s".into());
    pillarbox::admin::Operator::change(&operator, &resume, false).await.unwrap();
    relay.drain().await.unwrap();
    let client = connect(&roles.server.url_as("postgres", &roles.name)).await;
    let seen = client.query("select name, jit from public.seen order by name, jit", &[]).await.unwrap();
    let seen: Vec<(String, String)> = seen.iter().map(|row| (row.get(0), row.get(1))).collect();
    for who in ["control", "reader", "writer", "claimer", "transaction", "operator"] {
        assert!(seen.iter().any(|(name, _)| name.ends_with(who)), "{who} was not seen: {seen:?}");
    }
    let ours = seen.iter().filter(|(name, _)| name.starts_with("pillarbox"));
    assert_eq!(ours.filter(|(_, jit)| jit != "off").collect::<Vec<_>>(), Vec::<&(String, String)>::new());
    let at_first: String = roles.client("relay").await.query_one("show jit", &[]).await.unwrap().get(0);
    assert_eq!(at_first, "on", "what the role would have");
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
    let request = ClaimRequest { subscription, limit: 1, first, suspect: false, tell: Some("".into()), again: true };
    let claims = store.claim(&[request]).await.unwrap();
    assert_eq!((claims[0].claimed.len(), claims[0].rows), (1, Some(1)));
    let dead = vec![(joined.instance, RecoveryCause::Crash, None)];
    let request = RecoverRequest { ended: dead, sweep: true, ..RecoverRequest::default() };
    assert_eq!(store.recover(&request).await.unwrap().claims.len(), 1);
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
    let policy = pillarbox::admin::PrunePolicy { keep: Some(std::time::Duration::ZERO), ..Default::default() };
    pillarbox::admin::Operator::prune(&store, &policy).await.unwrap();
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

/// The codes with which `empty_leaf` refuses a role that asks for what is received, what is not, and everything.
async fn refusals(client: &Client) -> [String; 3] {
    let mut codes = [const { String::new() }; 3];
    for (removes, code) in ["received", "unreceived", "everything"].iter().zip(&mut codes) {
        let sql = format!("set pillarbox.removes = '{removes}'; select pillarbox.empty_leaf('event_1')");
        let error = client.batch_execute(&sql).await.expect_err(removes);
        *code = error.code().unwrap().code().to_owned();
    }
    codes
}

#[tokio::test]
async fn a_relay_removes_nothing_that_was_not_received_whatever_it_sets() {
    let roles = Roles::new().await;
    let (owner, app, relay) = (roles.client("owner").await, roles.client("app").await, roles.client("relay").await);
    let refused = ["55000", "42501", "42501"];
    app.batch_execute(&format!("{0}; {0}", WAYS[0])).await.unwrap();
    assert_eq!(refusals(&relay).await, refused, "a log without subscriptions");
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let (lane, epoch) = fixture::own(&store, "s").await;
    assert!(fixture::settle(&store, fixture::write(lane, epoch, 1)).await);
    assert_eq!(refusals(&relay).await, refused, "events that were not delivered");
    assert!(fixture::settle(&store, fixture::write(lane, epoch, 2)).await);
    owner.batch_execute("update pillarbox.meta set retention_keep_ms = 3600000").await.unwrap();
    assert_eq!(refusals(&relay).await, refused, "young events");
    owner.batch_execute("update pillarbox.meta set retention_keep_ms = 0").await.unwrap();
    app.batch_execute(WAYS[4]).await.unwrap();
    assert!(fixture::settle(&store, fixture::write(lane, epoch, 3)).await);
    assert_eq!(refusals(&relay).await, refused, "events of a journal");
    assert_eq!(fixture::events(&store).await.len(), 3, "nothing has gone");
    // The owner may, and whoever is a member of it.
    roles.server.psql("postgres", "grant owner to stranger").unwrap();
    let stranger = roles.client("stranger").await;
    stranger.batch_execute("set role owner; set pillarbox.removes = 'everything'").await.unwrap();
    stranger.batch_execute("select pillarbox.empty_leaf('event_1')").await.unwrap();
    assert_eq!(fixture::events(&store).await.len(), 0);
}

#[tokio::test]
async fn a_log_without_subscriptions_is_pruned_by_its_owner_alone() {
    let roles = Roles::new().await;
    roles.client("owner").await.batch_execute("update pillarbox.meta set leaf_size = 2").await.unwrap();
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    store.lay_leaves(None).await.unwrap();
    roles.client("app").await.batch_execute(&format!("{0}; {0}; {0}", WAYS[0])).await.unwrap();
    let keep = Some(std::time::Duration::ZERO);
    let policy = pillarbox::admin::PrunePolicy { keep, unreceived: true, ..Default::default() };
    let error = pillarbox::admin::Operator::prune(&store, &policy).await.unwrap_err().to_string();
    assert!(error.contains("must be owner of schema pillarbox (owner, or a member of it)"), "{error}");
    assert!(error.contains("run it as the role that owns the schema") && !error.contains("--print-roles"), "{error}");
    assert_eq!(fixture::events(&store).await.len(), 3);
    let noted = "select count(*) from pillarbox.meta where leaves_due is not null";
    let noted: i64 = roles.client("owner").await.query_one(noted, &[]).await.unwrap().get(0);
    assert_eq!(noted, 0, "that is no failure of retention");
    // What relays do by themselves is not refused, it leaves such a log alone.
    let by_itself = pillarbox::admin::PrunePolicy { unreceived: false, ..policy };
    assert_eq!(crate::retention::prune_all(&store, &by_itself).await.events, 0);
    let store = PostgresStore::open(&roles.url("owner")).await.unwrap();
    assert_eq!(crate::retention::prune_all(&store, &policy).await.events, 2);
}

#[tokio::test]
async fn a_relay_goes_on_with_leaves_that_were_made_after_its_grants() {
    let roles = Roles::new().await;
    let (owner, app) = (roles.client("owner").await, roles.client("app").await);
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let (lane, epoch) = fixture::own(&store, "s").await;
    let policy = pillarbox::admin::PrunePolicy { keep: Some(std::time::Duration::ZERO), ..Default::default() };
    let in_use = "select count(*) from pillarbox.leaf where low = $1 and high = $2";
    // Each time the leaf in use is far too large; from the second time on it is one that no grant names.
    for (round, size) in [(1, 1_000), (2, 100), (3, 10)] {
        app.batch_execute(&format!("{0}; {0}; {0}", WAYS[0])).await.unwrap();
        owner.batch_execute(&format!("update pillarbox.meta set leaf_size = {size}")).await.unwrap();
        pillarbox::admin::Operator::prune(&store, &policy).await.unwrap();
        let (low, high): (i64, i64) = (round * 3 - 2, round * 3 + 1);
        let cut: i64 = owner.query_one(in_use, &[&low, &high]).await.unwrap().get(0);
        assert_eq!(cut, 1, "the leaf from {low} ends before {high}");
    }
    let granted =
        "select count(*) from pillarbox.leaf where has_table_privilege('relay', 'pillarbox.' || name, 'select')";
    let granted: i64 = owner.query_one(granted, &[]).await.unwrap().get(0);
    let leaves: i64 = owner.query_one("select count(*) from pillarbox.leaf", &[]).await.unwrap().get(0);
    assert!(granted < leaves, "{granted} of {leaves} leaves are named by grants");
    assert!(fixture::settle(&store, fixture::write(lane, epoch, 9)).await);
    assert_eq!(crate::retention::prune_all(&store, &policy).await.events, 9);
}

#[tokio::test]
async fn retention_that_fails_again_and_again_is_an_alarm() {
    let roles = Roles::new().await;
    let owner = roles.client("owner").await;
    owner
        .batch_execute("revoke execute on function pillarbox.arrange_leaves(bigint[]) from pillarbox_relay")
        .await
        .unwrap();
    owner.batch_execute("update pillarbox.meta set leaf_size = 10").await.unwrap();
    roles.client("app").await.batch_execute(WAYS[0]).await.unwrap();
    let store = PostgresStore::open(&roles.url("relay")).await.unwrap();
    let policy = pillarbox::admin::PrunePolicy { keep: Some(std::time::Duration::ZERO), ..Default::default() };
    let alarms = async || pillarbox::admin::Operator::status(&store).await.unwrap().log.alarms.join("\n");
    for _ in 0..2 {
        let error = pillarbox::admin::Operator::prune(&store, &policy).await.unwrap_err();
        assert!(error.to_string().contains("arrange_leaves"), "{error}");
        assert_eq!(alarms().await, "", "not at once");
    }
    let back = "update pillarbox.meta set leaves_due_since = leaves_due_since - interval '11 minutes'";
    owner.batch_execute(back).await.unwrap();
    assert!(pillarbox::admin::Operator::prune(&store, &policy).await.is_err());
    let said = alarms().await;
    assert!(said.contains("permission denied for function arrange_leaves") && said.contains("--print-roles"), "{said}");
    owner
        .batch_execute("grant execute on function pillarbox.arrange_leaves(bigint[]) to pillarbox_relay")
        .await
        .unwrap();
    pillarbox::admin::Operator::prune(&store, &policy).await.unwrap();
    assert_eq!(alarms().await, "", "it is over");
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

/// Functions of its own, by the names of those that the log's checks call.
const SHADOWS: &str = "create schema mine;
    create function mine.octet_length(text) returns integer language sql as 'select 1';
    create function mine.now() returns timestamptz language sql as $$ select 'infinity'::timestamptz $$;
    create function mine.clock_timestamp() returns timestamptz language sql as $$ select '2000-01-01'::timestamptz $$;
    create function mine.less(integer, integer) returns boolean language sql as 'select true';
    create operator mine.<= (function = mine.less, leftarg = integer, rightarg = integer);
    create operator mine.= (function = mine.less, leftarg = integer, rightarg = integer)";

#[tokio::test]
async fn a_publishers_search_path_leads_around_no_check() {
    let roles = Roles::new().await;
    roles._database.psql(&format!("{SHADOWS}; grant usage on schema mine to app")).unwrap();
    let app = roles.client("app").await;
    app.batch_execute("set search_path = mine, pg_catalog").await.unwrap();
    for (columns, values) in [
        ("topic, type, key", "'t', 'y', repeat('k', 6400)"),
        ("topic, type", "'', 'y'"),
        ("topic, type, headers", "'t', 'y', '[1, 2]'"),
        ("topic, type, payload", "'t', 'y', to_json(repeat('x', 2000000))"),
        ("topic, type, payload_bytes, content_type", "'t', 'y', 'x', repeat('x', 300)"),
    ] {
        let sql = format!("insert into pillarbox.event ({columns}) values ({values})");
        let error = app.batch_execute(&sql).await.expect_err(&sql);
        assert_eq!(error.code().map(|code| code.code()), Some("23514"), "{sql}: {error:?}");
    }
    // Somebody sleeps, so that it rings.
    let sleeper = roles.client("owner").await;
    let lock = "select pg_advisory_lock(substring(pg_get_expr(adbin, adrelid) from 'lock_shared\\((\\d+)')::integer, 0)
        from pg_attrdef where adrelid = 'pillarbox.event'::regclass";
    assert_eq!(sleeper.query(lock, &[]).await.unwrap().len(), 1);
    app.batch_execute(WAYS[0]).await.unwrap();
    let young = "select count(*) from pillarbox.event where created_at > '2020-01-01'";
    assert_eq!(sleeper.query_one(young, &[]).await.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test]
async fn what_a_member_of_the_owner_upgrades_belongs_to_the_owner_and_whoever_published_still_may() {
    let server = Server::builder().start().unwrap();
    let database = server.create_database().unwrap();
    let name = database.name();
    let roles = "create role owner login; create role member login; create role app login; grant owner to member";
    server.psql("postgres", &format!("{roles}; alter database {name} owner to owner")).unwrap();
    let owner = connect(&server.url_as("owner", name)).await;
    owner.batch_execute(&crate::schema::steps_up_to(7)).await.unwrap();
    owner
        .batch_execute(
            "grant usage on schema pillarbox to app; grant insert (topic, key, type, payload) on pillarbox.event to app;
             alter default privileges revoke execute on functions from public",
        )
        .await
        .unwrap();
    database.psql("alter default privileges for role member revoke execute on functions from public").unwrap();
    migrate(&server.url_as("member", name).parse::<PgConfig>().unwrap()).await.unwrap();
    let others =
        "select count(*) from pg_class where relnamespace = 'pillarbox'::regnamespace and relowner <> 'owner'::regrole";
    assert_eq!(owner.query_one(others, &[]).await.unwrap().get::<_, i64>(0), 0);
    owner.batch_execute(WAYS[4]).await.unwrap();
    connect(&server.url_as("app", name)).await.batch_execute(WAYS[0]).await.unwrap();
}

#[tokio::test]
async fn a_leaf_is_not_emptied_by_what_an_old_snapshot_shows() {
    let roles = Roles::new().await;
    let relay = roles.client("relay").await;
    relay.batch_execute("begin isolation level repeatable read; select 1").await.unwrap();
    let error = relay.batch_execute("select pillarbox.empty_leaf('event_1')").await.unwrap_err();
    assert_eq!(error.code().map(|code| code.code()), Some("25000"), "{error:?}");
}
