use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::{Batch, BoxFuture, Fault, Origin, Outcome, Sink};
use pillarbox::store::SubscriptionId;
use pillarbox::{Event, Failure, Headers, Payload, Timestamp};
use pillarbox_sinks::{POSTGRES_CONNECTIONS_MAX, PostgresSink, PostgresSinkConfig};
use pillarbox_testkit::eventually;
use pillarbox_testkit::postgres::{Database, Mode, Server, connect};
use pillarbox_testkit::proxy::Proxy;
use pillarbox_testkit::sink_suite::{
    ORIGIN, Received, ReceiverFeatures, ServerControl, SinkFixture, batch_of, check_sink, sink_event,
};
use tokio_postgres::Client;
use uuid::Uuid;

pub(crate) const SOURCE: &str = "urn:pillarbox:test";

/// A database with a table `events`, which the sinks make themselves.
pub(crate) struct Place {
    pub(crate) database: Database,
}

impl Place {
    pub(crate) fn new() -> Self {
        Place::on(Server::shared())
    }

    fn on(server: &Server) -> Self {
        Place { database: server.create_database().unwrap() }
    }

    /// With the table there already.
    fn with_table() -> Self {
        let place = Place::new();
        place.sql(&PostgresSinkConfig::schema_sql("events").unwrap());
        place
    }

    fn config(&self) -> PostgresSinkConfig {
        PostgresSinkConfig::new(self.database.url(), "events")
    }

    fn open(&self) -> PostgresSink {
        self.open_table("events")
    }

    pub(crate) fn open_table(&self, table: &str) -> PostgresSink {
        PostgresSink::new(PostgresSinkConfig::new(self.database.url(), table), SOURCE).unwrap()
    }

    pub(crate) fn sql(&self, sql: &str) -> String {
        self.database.psql(sql).unwrap()
    }

    /// The positions in a table, in order of arrival.
    pub(crate) fn positions_in(&self, table: &str) -> Vec<i64> {
        let rows = self.sql(&format!("select sequence from {table} order by stored"));
        rows.lines().map(|line| line.parse().unwrap()).collect()
    }

    fn positions(&self) -> Vec<i64> {
        self.positions_in("events")
    }

    pub(crate) async fn received_in(&self, table: &str) -> Vec<Received> {
        let client = connect(self.database.url()).await.unwrap();
        let exists = client.query_one("select to_regclass($1) is not null", &[&table]).await.unwrap();
        if !exists.get::<_, bool>(0) {
            return Vec::new();
        }
        let sql = format!(
            "select id, key, data::text, data_bytes, source, topic, type, sequence, content_type, \
                 to_char(time at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') as time, \
                 array(select key from jsonb_each_text(headers)) as names, \
                 array(select value from jsonb_each_text(headers)) as header_values \
             from {table} order by stored"
        );
        client.query(&sql, &[]).await.unwrap().iter().map(received).collect()
    }
}

fn received(row: &tokio_postgres::Row) -> Received {
    let payload = match (row.get::<_, Option<String>>("data"), row.get::<_, Option<Vec<u8>>>("data_bytes")) {
        (Some(text), _) => Payload::Json(text.into()),
        (None, Some(bytes)) => Payload::Bytes(bytes.into()),
        (None, None) => Payload::None,
    };
    let names: Vec<String> = row.get("names");
    let values: Vec<String> = row.get("header_values");
    let text = |name: &str| row.get::<_, Option<String>>(name);
    let mut attributes = BTreeMap::from([("sequence".to_owned(), row.get::<_, i64>("sequence").to_string())]);
    for (name, column) in [
        ("source", "source"),
        ("topic", "topic"),
        ("type", "type"),
        ("time", "time"),
        ("datacontenttype", "content_type"),
    ] {
        attributes.extend(text(column).map(|value| (name.to_owned(), value)));
    }
    let headers = names.into_iter().zip(values).collect();
    Received { id: row.get("id"), key: row.get("key"), payload, headers, attributes }
}

/// A receiver of the suite, on a server that may be killed.
pub(crate) struct Fixture {
    server: Arc<Server>,
    place: Place,
}

impl Fixture {
    /// On a server of its own.
    pub(crate) fn new() -> Self {
        Fixture::on(Arc::new(Server::builder().start().unwrap()))
    }

    fn on(server: Arc<Server>) -> Self {
        Fixture { place: Place::on(&server), server }
    }
}

impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.place.open())
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        Box::pin(self.place.received_in("events"))
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { forgets: false, source: Some(SOURCE) }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        Some(self)
    }
}

impl ServerControl for Fixture {
    fn kill(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.stop(Mode::Immediate).unwrap() })
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.server.start().unwrap() })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_postgres_sink_conforms() {
    let server = Arc::new(Server::builder().start().unwrap());
    check_sink(|| Fixture::on(server.clone())).await;
}

fn event(position: i64, key: &str) -> Event {
    sink_event(position, Some(key), Payload::Json(format!("{{\"n\":{position}}}").into()))
}

/// A batch of one lane.
fn owned(lane: u32, epoch: i64, events: impl IntoIterator<Item = Event>) -> Batch {
    let mut batch = batch_of(events);
    batch.events.iter_mut().for_each(|attempt| (attempt.lane, attempt.epoch) = (Some(lane), epoch));
    batch
}

fn from(origin: Origin, batch: Batch) -> Batch {
    Batch { origin, ..batch }
}

fn failure(outcome: &Outcome) -> &Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?} is no failure"),
    }
}

fn kinds(outcomes: &[Outcome]) -> Vec<&str> {
    let kind = |outcome: &Outcome| match outcome {
        Outcome::Delivered => "delivered",
        Outcome::NotTried => "not tried",
        Outcome::Failed(failure) => failure.kind,
    };
    outcomes.iter().map(kind).collect()
}

/// Until a session of the sink waits for a lock.
async fn until_blocked(client: &Client) {
    let sql = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' \
               and application_name like 'pillarbox%'";
    eventually("the sink waits for a lock", async || {
        let count: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (count > 0).then_some(())
    })
    .await;
}

#[test]
fn what_cannot_work_is_refused_without_connecting() {
    let refusal = |url: &str, table: &str| {
        let refused = PostgresSink::new(PostgresSinkConfig::new(url, table), SOURCE);
        refused.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refusal("postgres://a:canary@localhost/b", "store.events"), "");
    assert!(refusal("postgres://a:canary@local host:x/b", "events").contains("database URL"));
    assert!(!refusal("postgres://a:canary@local host:x/b", "events").contains("canary"));
    assert!(refusal("postgres://localhost/b?schema=x", "events").contains("schema.name"));
    assert!(refusal("postgres://localhost/b", "drop table x;").contains("schema.name"));
    let config =
        PostgresSinkConfig { timeout: Duration::ZERO, ..PostgresSinkConfig::new("postgres://localhost/b", "x") };
    assert!(!format!("{config:?}").contains("localhost"));
    assert!(PostgresSink::new(config, SOURCE).err().unwrap().to_string().contains("timeout"));
    let config = PostgresSinkConfig::new("postgres://localhost/b", "x");
    assert!(PostgresSink::new(config, "urn:\0").err().unwrap().to_string().contains("NUL"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_is_made_once_by_sinks_that_start_together() {
    let place = Place::new();
    let deliver = |number: i64| {
        let sink = place.open();
        tokio::spawn(async move { sink.deliver(batch_of([event(number, &format!("k{number}"))])).await })
    };
    for task in (0..8).map(deliver).collect::<Vec<_>>() {
        assert_eq!(task.await.unwrap(), [Outcome::Delivered]);
    }
    assert_eq!(place.positions().len(), 8);
}

#[tokio::test]
async fn a_missing_table_is_made_by_hand_where_the_sink_may_not() {
    let place = Place::new();
    place.sql("create schema store");
    let config = PostgresSinkConfig { create: false, table: "store.Order-events".to_owned(), ..place.config() };
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    let missing = sink.deliver(batch_of([event(1, "k"), event(2, "k"), event(3, "l")])).await;
    assert_eq!(kinds(&missing), ["table", "not tried", "table"]);
    assert_eq!(failure(&missing[0]).fault, Fault::Sink);
    assert!(failure(&missing[0]).message.contains("\"store\".\"Order-events\""), "{missing:?}");
    assert_eq!(sink.check().await.unwrap_err().kind, "table");
    place.sql(&PostgresSinkConfig::schema_sql("store.Order-events").unwrap());
    assert_eq!(sink.check().await, Ok(()));
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    assert_eq!(place.positions_in("store.\"Order-events\""), [1]);
}

#[tokio::test]
async fn a_table_that_is_different_is_left_alone_and_named() {
    let schema = PostgresSinkConfig::schema_sql("events").unwrap();
    for (change, said) in [
        ("alter table events drop column headers", "headers jsonb is missing"),
        ("alter table events alter column data type jsonb", "data is jsonb, not json"),
        ("alter table events drop constraint events_pkey", "primary key"),
        ("alter table events set unlogged", "not a logged table"),
        ("alter table events_fence drop column epoch", "epoch bigint is missing"),
        ("drop table events; create view events as select 1 as id", "not a logged table"),
    ] {
        let place = Place::new();
        place.sql(&format!("{schema}; {change}"));
        let sink = place.open();
        let outcomes = sink.deliver(batch_of([event(1, "k")])).await;
        assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("table", Fault::Sink), "{change}");
        assert!(failure(&outcomes[0]).message.contains(said), "{change}: {outcomes:?}");
        assert_eq!(sink.check().await.as_ref(), Err(failure(&outcomes[0])), "{change}");
    }
}

#[tokio::test]
async fn further_columns_and_a_missing_fence_are_no_hindrance() {
    let place = Place::with_table();
    place.sql(
        "alter table events add tenant text generated always as (headers ->> 'tenant') stored; drop table events_fence",
    );
    let headers = Headers::from_map(&BTreeMap::from([("tenant".to_owned(), "acme".to_owned())]));
    assert_eq!(place.open().deliver(batch_of([Event { headers, ..event(1, "k") }])).await, [Outcome::Delivered]);
    assert_eq!(place.sql("select tenant from events"), "acme");
    assert_eq!(place.sql("select count(*) from events_fence"), "1");
}

#[tokio::test]
async fn an_event_is_there_once_as_it_came_first() {
    let place = Place::new();
    let sink = place.open();
    for payload in ["1", "2"] {
        let event = Event { payload: Payload::Json(payload.into()), ..event(1, "k") };
        assert_eq!(sink.deliver(batch_of([event.clone(), event])).await, vec![Outcome::Delivered; 2]);
    }
    assert_eq!(place.sql("select data from events"), "1");
}

#[tokio::test]
async fn the_culprit_is_found_and_holds_back_its_key_alone() {
    let place = Place::with_table();
    place.sql("alter table events add constraint not_13 check (data ->> 'n' <> '13' and data ->> 'n' <> '17')");
    let sink = place.open();
    let events: Vec<Event> = (0..40).map(|position| event(position, &format!("k{}", position % 4))).collect();
    let outcomes = sink.deliver(batch_of(events)).await;
    // Both are of key k1, so of the second nothing is said.
    let expected = |position: i64| match position {
        13 => "refused",
        behind if behind > 13 && behind % 4 == 1 => "not tried",
        _ => "delivered",
    };
    assert_eq!(kinds(&outcomes), (0..40).map(expected).collect::<Vec<_>>());
    let culprit = failure(&outcomes[13]);
    assert_eq!((culprit.fault, culprit.permanent), (Fault::Event, false));
    assert!(culprit.message.contains("not_13") && !culprit.message.contains("\"n\""), "{}", culprit.message);
    let there = place.positions();
    assert_eq!(there, (0..40).filter(|position| expected(*position) == "delivered").collect::<Vec<_>>());
}

#[tokio::test]
async fn a_batch_of_which_everything_is_refused_is_answered_for_each_key() {
    let place = Place::with_table();
    place.sql("alter table events add check (false)");
    let outcomes =
        place.open().deliver(batch_of((0..10).map(|position| event(position, &format!("k{}", position % 5))))).await;
    assert_eq!(kinds(&outcomes), [["refused"; 5], ["not tried"; 5]].concat());
    assert!(place.positions().is_empty());
}

#[tokio::test]
async fn what_postgresql_cannot_store_is_permanent() {
    let place = Place::new();
    let sink = place.open();
    let json = |text: &str| Payload::Json(text.into());
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (what, bad) in [
        ("a NUL in the key", event(2, "k\0")),
        ("a NUL in the topic", Event { topic: "a\0".into(), ..event(2, "k") }),
        ("a NUL in the content type", Event { content_type: Some("a\0".into()), ..event(2, "k") }),
        ("a NUL in the payload", Event { payload: json("\"canary\0\""), ..event(2, "k") }),
        ("a NUL in a header", Event { headers: Headers::from_json("{\"a\":\"canary\\u0000\"}"), ..event(2, "k") }),
        ("no JSON", Event { payload: json("{canary"), ..event(2, "k") }),
        ("too deep a JSON", Event { payload: json(&deep), ..event(2, "k") }),
        ("a time out of range", Event { created_at: Timestamp(-300_000_000_000_000), ..event(2, "k") }),
    ] {
        let outcomes = sink.deliver(batch_of([event(1, "k"), bad, event(3, "other")])).await;
        assert_eq!(kinds(&outcomes), ["delivered", "not_storable", "delivered"], "{what}: {outcomes:?}");
        let failure = failure(&outcomes[1]);
        assert!(failure.permanent && failure.fault == Fault::Event, "{what}");
        assert!(!failure.message.contains("canary"), "{}", failure.message);
    }
    assert_eq!(place.positions(), [1, 3]);
}

#[tokio::test]
async fn an_event_that_cannot_be_stored_fails_after_those_before_it() {
    let place = Place::with_table();
    let sink = place.open();
    place.sql("alter table events add check (sequence <> 2)");
    let nul = |position| Event { topic: "\0".into(), ..event(position, "k") };
    let outcomes = sink.deliver(batch_of([event(1, "k"), event(2, "k"), nul(3), event(4, "k")])).await;
    assert_eq!(kinds(&outcomes), ["delivered", "refused", "not tried", "not tried"]);
    let outcomes = sink.deliver(batch_of([nul(3), event(4, "k"), event(5, "other")])).await;
    assert_eq!(kinds(&outcomes), ["not_storable", "not tried", "delivered"]);
}

/// A trigger that raises the code that an event has as its type, if that is one.
const RAISING: &str = "
    create sequence tries;
    create function refuse() returns trigger language plpgsql as $$ begin
        perform nextval('tries');
        if new.type ~ '^[0-9A-Z]{5}$' then
            raise exception using errcode = new.type, message = 'it says so', detail = 'canary';
        end if;
        return new;
    end $$;
    create trigger refuse before insert on events for each row execute function refuse()";

fn of_type(r#type: &str, event: Event) -> Event {
    Event { r#type: r#type.into(), ..event }
}

#[tokio::test]
async fn what_a_code_means() {
    let place = Place::with_table();
    place.sql(RAISING);
    let sink = place.open();
    for (code, kind, fault, permanent) in [
        ("P0001", "refused", Fault::Event, false),
        ("MY001", "refused", Fault::Event, false),
        ("23514", "refused", Fault::Event, false),
        ("44000", "refused", Fault::Event, false),
        ("22012", "not_storable", Fault::Event, false),
        ("22P05", "not_storable", Fault::Event, true),
        ("54000", "not_storable", Fault::Event, false),
        ("08006", "postgres", Fault::Sink, false),
        ("53200", "postgres", Fault::Sink, false),
        ("53100", "full", Fault::Sink, false),
        ("57014", "postgres", Fault::Sink, false),
        ("58030", "postgres", Fault::Sink, false),
        ("XX000", "postgres", Fault::Sink, false),
        ("25006", "read_only", Fault::Sink, false),
        ("42501", "denied", Fault::Sink, false),
        ("42P01", "table", Fault::Sink, false),
        ("42883", "table", Fault::Sink, false),
        ("40001", "busy", Fault::Sink, false),
        ("40P01", "busy", Fault::Sink, false),
        ("55P03", "busy", Fault::Sink, false),
    ] {
        let outcomes = sink.deliver(batch_of([of_type(code, event(1, "k"))])).await;
        let failure = failure(&outcomes[0]);
        assert_eq!((failure.kind, failure.fault, failure.permanent), (kind, fault, permanent), "{code}: {failure:?}");
        assert!(!failure.message.contains("canary"), "{code}: {}", failure.message);
        let quotes = failure.message.contains("it says so");
        assert_eq!(quotes, code == "P0001" || fault == Fault::Sink, "{code}: {}", failure.message);
    }
    assert!(place.positions().is_empty());
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered], "and it goes on");
}

#[tokio::test]
async fn a_failure_of_the_receiver_leaves_nothing_of_the_batch() {
    let place = Place::with_table();
    place.sql(RAISING);
    let outcomes =
        place.open().deliver(batch_of([event(1, "a"), of_type("53200", event(2, "b")), event(3, "b")])).await;
    assert_eq!(kinds(&outcomes), ["postgres", "postgres", "not tried"]);
    assert!(place.positions().is_empty());
}

#[tokio::test]
async fn what_was_in_the_way_is_tried_again_a_few_times() {
    let place = Place::with_table();
    place.sql(RAISING);
    let sink = place.open();
    sink.deliver(batch_of([of_type("40001", event(1, "k"))])).await;
    assert_eq!(place.sql("select last_value from tries"), "3");
    // The second time it goes through.
    place.sql(
        "create or replace function refuse() returns trigger language plpgsql as $$ begin
        if nextval('tries') = 4 then raise exception using errcode = '40P01'; end if;
        return new;
    end $$",
    );
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    assert_eq!(place.sql("select last_value from tries"), "5");
}

#[tokio::test]
async fn a_table_that_somebody_locks_is_not_waited_for_without_end() {
    let place = Place::with_table();
    let client = connect(place.database.url()).await.unwrap();
    client.batch_execute("begin; lock table events").await.unwrap();
    let config = PostgresSinkConfig { timeout: Duration::from_secs(4), ..place.config() };
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    let outcomes = sink.deliver(batch_of([event(1, "k")])).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("busy", Fault::Sink), "{outcomes:?}");
    client.batch_execute("commit").await.unwrap();
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
}

/// A role of this test's own; roles are the whole server's.
fn role(place: &Place, grants: &str) -> (String, String) {
    let role = format!("role_of_{}", place.database.name());
    place.sql(&format!("drop role if exists {role}; create role {role} login; {}", grants.replace("<role>", &role)));
    let url = Server::shared().url_as(&role, place.database.name());
    (role, url)
}

#[tokio::test]
async fn a_role_needs_what_the_message_says_and_no_more() {
    let place = Place::with_table();
    let (role, url) = role(&place, "");
    let sink = PostgresSink::new(PostgresSinkConfig::new(url, "events"), SOURCE).unwrap();
    let outcomes = sink.deliver(batch_of([event(1, "k")])).await;
    let failure = failure(&outcomes[0]);
    assert_eq!((failure.kind, failure.fault), ("denied", Fault::Sink));
    assert_eq!(sink.check().await.unwrap_err().kind, "denied");
    let grants = failure.message.split_once("run: ").unwrap().1.replace("<role>", &role).replace('"', "");
    place.sql(&grants);
    assert_eq!(sink.check().await, Ok(()));
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    place.sql(&format!("drop owned by {role}; drop role {role}"));
}

#[tokio::test]
async fn a_role_that_may_not_create_says_so_before_the_first_batch() {
    let place = Place::new();
    let (role, url) = role(&place, "revoke create on schema public from public");
    let sink = PostgresSink::new(PostgresSinkConfig::new(url, "events"), SOURCE).unwrap();
    let checked = sink.check().await.unwrap_err();
    assert_eq!(checked.kind, "denied");
    assert!(checked.message.contains("may not create"), "{}", checked.message);
    assert_eq!(kinds(&sink.deliver(batch_of([event(1, "k")])).await), ["denied"]);
    assert_eq!(place.sql("select to_regclass('events')"), "");
    place.sql(&format!("drop owned by {role}; drop role {role}"));
}

#[tokio::test]
async fn who_cannot_log_in_or_connect_is_told() {
    let place = Place::new();
    let server = Server::shared();
    for (url, kind) in [
        (server.url_as("nobody", place.database.name()), "login"),
        (server.url("not_there"), "database"),
        ("postgres://a:canary@127.0.0.1:1/x?connect_timeout=1".to_owned(), "unreachable"),
    ] {
        let sink = PostgresSink::new(PostgresSinkConfig::new(url, "events"), SOURCE).unwrap();
        let outcomes = sink.deliver(batch_of([event(1, "k")])).await;
        let failure = failure(&outcomes[0]);
        assert_eq!((failure.kind, failure.fault), (kind, Fault::Sink), "{failure:?}");
        assert!(!failure.message.contains("canary"), "{}", failure.message);
        assert_eq!(sink.check().await.unwrap_err().kind, kind);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_nothing_until_it_is_the_primary() {
    let primary = Server::builder().start().unwrap();
    let place = Place::on(&primary);
    assert_eq!(place.open().deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    let standby = primary.standby().unwrap();
    standby.wait_until_replayed(&primary).unwrap();
    let config = PostgresSinkConfig::new(standby.url(place.database.name()), "events");
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    let outcomes = sink.deliver(batch_of([event(2, "k")])).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("read_only", Fault::Sink), "{outcomes:?}");
    assert_eq!(sink.check().await.unwrap_err().kind, "read_only");
    standby.promote().unwrap();
    assert_eq!(sink.deliver(batch_of([event(2, "k")])).await, [Outcome::Delivered]);
    assert_eq!(sink.check().await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_already_is_delivered_when_the_standby_has_it() {
    let server = Server::builder().start().unwrap();
    let place = Place::on(&server);
    let config = PostgresSinkConfig { timeout: Duration::from_secs(2), ..place.config() };
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    let of_queue = || {
        let mut batch = batch_of([event(1, "k")]);
        batch.events[0].lane = None;
        batch
    };
    for batch in [owned(0, 1, [event(1, "k")]), of_queue()] {
        assert_eq!(sink.deliver(batch).await, [Outcome::Delivered]);
    }
    let (writes, _) = require_a_standby(&place).await;
    for batch in [owned(0, 1, [event(1, "k")]), of_queue()] {
        let outcomes = sink.deliver(batch).await;
        assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("timeout", Fault::Unclear));
    }
    writes.abort();
}

/// The commit succeeds where its wait is cancelled, and may be lost in a failover.
#[tokio::test(flavor = "multi_thread")]
async fn what_no_standby_has_is_not_delivered_when_the_wait_for_it_is_cancelled() {
    let server = Server::builder().start().unwrap();
    let place = Place::on(&server);
    let sink = Arc::new(place.open());
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    let (writes, watcher) = require_a_standby(&place).await;
    // It is there the second time, and waits all the same.
    for _ in 0..2 {
        let delivered = {
            let sink = sink.clone();
            tokio::spawn(async move { sink.deliver(batch_of([event(2, "k")])).await })
        };
        let cancel = "select count(pg_cancel_backend(pid)) from pg_stat_activity \
                      where wait_event = 'SyncRep' and application_name = 'pillarbox sink'";
        eventually("the wait of the sink is cancelled", async || {
            (watcher.query_one(cancel, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
        })
        .await;
        let outcomes = delivered.await.unwrap();
        assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("not_replicated", Fault::Sink));
    }
    assert_eq!(place.positions(), [1, 2], "it is committed here");
    writes.abort();
}

/// Makes commits wait for a standby that is never there; what goes on writing, and a session to look with.
async fn require_a_standby(place: &Place) -> (tokio::task::JoinHandle<()>, Client) {
    // The database from which this one is dropped waits for none.
    place.sql("alter database postgres set synchronous_commit = local; create table probe ()");
    place.sql("alter system set synchronous_standby_names = 'nobody'");
    place.sql("select pg_reload_conf()");
    let (writer, watcher) =
        (connect(place.database.url()).await.unwrap(), connect(place.database.url()).await.unwrap());
    let writes =
        tokio::spawn(async move { while writer.batch_execute("insert into probe default values").await.is_ok() {} });
    let waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'";
    eventually("commits wait for the standby", async || {
        (watcher.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
    })
    .await;
    (writes, watcher)
}

#[tokio::test]
async fn a_commit_is_durable_whatever_the_role_says() {
    let place = Place::with_table();
    place.sql(&format!(
        "alter database {0} set synchronous_commit = off; alter database {0} set default_transaction_read_only = on",
        place.database.name()
    ));
    let settings = "begin; set transaction read write;
        create function look() returns trigger language plpgsql as $$ begin
            if current_setting('synchronous_commit') = 'off' then raise exception 'not durable'; end if;
            return new;
        end $$;
        create trigger look before insert on events for each row execute function look(); commit";
    place.sql(settings);
    assert_eq!(place.open().deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
}

#[tokio::test]
async fn an_older_owner_appends_nothing_more() {
    let place = Place::new();
    let (old, new) = (place.open(), place.open());
    assert_eq!(old.deliver(owned(3, 7, [event(1, "k")])).await, [Outcome::Delivered]);
    assert_eq!(new.deliver(owned(3, 8, [event(2, "k")])).await, [Outcome::Delivered]);
    let outcomes = old.deliver(owned(3, 7, [event(3, "k"), event(4, "k"), event(5, "l")])).await;
    assert_eq!(kinds(&outcomes), ["fenced", "not tried", "fenced"]);
    assert_eq!(failure(&outcomes[0]).fault, Fault::Sink);
    assert!(failure(&outcomes[0]).message.contains("lane 3"), "{outcomes:?}");
    // Also what is there already: it is not this relay's to say so.
    assert_eq!(kinds(&old.deliver(owned(3, 7, [event(2, "k")])).await), ["fenced"]);
    assert_eq!(new.deliver(owned(3, 8, [event(6, "k")])).await, [Outcome::Delivered]);
    assert_eq!(place.positions(), [1, 2, 6]);
}

#[tokio::test]
async fn a_later_incarnation_and_then_a_later_subscription_count_before_the_epoch() {
    let place = Place::new();
    let sink = place.open();
    let origin = |incarnation, number| Origin { incarnation, subscription: SubscriptionId(number), ..ORIGIN };
    let mut position = 0;
    for (incarnation, number, epoch, expected) in [
        (1, 5, 9, "delivered"),
        (1, 6, 1, "delivered"),
        (1, 5, 10, "fenced"),
        (2, 1, 1, "delivered"),
        (1, 6, 99, "fenced"),
        (2, 1, 1, "delivered"),
        (2, 1, 2, "delivered"),
        (2, 1, 1, "fenced"),
    ] {
        position += 1;
        let batch = from(origin(incarnation, number), owned(0, epoch, [event(position, "k")]));
        assert_eq!(kinds(&sink.deliver(batch).await), [expected], "{incarnation} {number} {epoch}");
    }
    assert_eq!(place.positions(), [1, 2, 4, 6, 7]);
}

#[tokio::test]
async fn of_two_lanes_in_a_batch_only_the_lost_one_is_left_out() {
    let place = Place::new();
    let (old, new) = (place.open(), place.open());
    let both = |first| {
        let mut batch = owned(1, 1, (first..first + 4).map(|position| event(position, &format!("k{}", position % 2))));
        batch.events.iter_mut().for_each(|attempt| attempt.lane = Some((attempt.event.position % 2) as u32));
        batch
    };
    assert_eq!(old.deliver(both(0)).await, vec![Outcome::Delivered; 4]);
    assert_eq!(new.deliver(owned(1, 2, [event(101, "k1")])).await, [Outcome::Delivered]);
    assert_eq!(kinds(&old.deliver(both(4)).await), ["delivered", "fenced", "delivered", "not tried"]);
    assert_eq!(place.positions(), [0, 1, 2, 3, 101, 4, 6]);
}

#[tokio::test]
async fn of_two_epochs_in_a_batch_the_older_is_nobodys() {
    let place = Place::new();
    let mut batch = owned(1, 2, [event(1, "a"), event(2, "b")]);
    batch.events[0].epoch = 1;
    assert_eq!(kinds(&place.open().deliver(batch).await), ["fenced", "delivered"]);
    assert_eq!(place.positions(), [2]);
}

#[tokio::test]
async fn another_subscription_another_log_and_a_queue_are_not_fenced() {
    let place = Place::new();
    let sink = place.open();
    assert_eq!(sink.deliver(owned(0, 9, [event(1, "k")])).await, [Outcome::Delivered]);
    let other_log = Origin { log_id: Uuid::from_u128(2), ..ORIGIN };
    assert_eq!(sink.deliver(from(other_log, owned(0, 1, [event(2, "k")]))).await, [Outcome::Delivered]);
    let other_name = Batch { subscription: "other".into(), ..owned(0, 1, [event(3, "k")]) };
    assert_eq!(sink.deliver(other_name).await, [Outcome::Delivered]);
    let mut queue = owned(0, 1, [event(4, "k"), event(5, "fenced")]);
    queue.events[0].lane = None;
    assert_eq!(kinds(&sink.deliver(queue).await), ["delivered", "fenced"]);
    assert_eq!(place.positions(), [1, 2, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_of_one_owner_begin_a_lane_together() {
    let place = Place::with_table();
    let sink = Arc::new(place.open());
    for epoch in 1..=20 {
        let deliver = |worker: i64| {
            let (sink, event) = (sink.clone(), event(epoch * 100 + worker, &format!("k{worker}")));
            tokio::spawn(async move { sink.deliver(owned(0, epoch, [event])).await })
        };
        for task in (0..8).map(deliver).collect::<Vec<_>>() {
            assert_eq!(task.await.unwrap(), [Outcome::Delivered], "epoch {epoch}");
        }
    }
    assert_eq!(place.positions().len(), 160);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_waited_while_its_lane_was_lost_is_left_out() {
    for known in [true, false] {
        let place = Place::with_table();
        let sink = Arc::new(place.open());
        // With a row of its own epoch it takes the shared lock, else it raises the fence.
        sink.deliver(owned(0, if known { 5 } else { 4 }, [event(1, "k")])).await;
        let newer = connect(place.database.url()).await.unwrap();
        newer.batch_execute("begin; update events_fence set epoch = 6").await.unwrap();
        let stale = sink.clone();
        let stale = tokio::spawn(async move { stale.deliver(owned(0, 5, [event(2, "k")])).await });
        until_blocked(&connect(place.database.url()).await.unwrap()).await;
        newer.batch_execute("commit").await.unwrap();
        assert_eq!(kinds(&stale.await.unwrap()), ["fenced"], "known: {known}");
        assert_eq!(place.positions(), [1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_that_was_on_its_way_while_its_lane_was_lost_is_left_out() {
    let place = Place::with_table();
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let config = PostgresSinkConfig::new(proxy.url(place.database.url()), "events");
    let stale = Arc::new(PostgresSink::new(config, SOURCE).unwrap());
    assert_eq!(stale.deliver(owned(0, 1, [event(1, "k")])).await, [Outcome::Delivered]);
    proxy.stall().unwrap();
    let sink = stale.clone();
    let held = tokio::spawn(async move { sink.deliver(owned(0, 1, [event(3, "k")])).await });
    assert_eq!(place.open().deliver(owned(0, 2, [event(2, "k")])).await, [Outcome::Delivered]);
    proxy.resume().unwrap();
    assert_eq!(kinds(&held.await.unwrap()), ["fenced"]);
    assert_eq!(place.positions(), [1, 2]);
}

/// The other process of the test below: appends what it is told to, one line each, as an owner with epoch 1.
const CHILD_URL: &str = "PILLARBOX_TEST_STOPPED_CHILD";

#[test]
#[ignore = "no test but a process: `a_process_that_was_stopped…` starts it, stops it and lets it go on; alone it does nothing"]
fn child_that_appends_by_order() {
    let Ok(url) = std::env::var(CHILD_URL) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let sink = PostgresSink::new(PostgresSinkConfig::new(url, "events"), SOURCE).unwrap();
    for line in std::io::stdin().lines() {
        let position: i64 = line.unwrap().parse().unwrap();
        let outcomes = runtime.block_on(sink.deliver(owned(0, 1, [event(position, "k")])));
        println!("\nanswer {}", kinds(&outcomes)[0]);
    }
}

struct Frozen {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Frozen {
    fn start(url: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "postgres::child_that_appends_by_order", "--nocapture"])
            .env(CHILD_URL, url);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Frozen { child, answers }
    }

    fn order(&mut self, position: i64) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{position}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        while self.answers.read_line(&mut line).unwrap() > 0 {
            if let Some(answer) = line.trim().strip_prefix("answer ") {
                return answer.to_owned();
            }
            line.clear();
        }
        panic!("the child ended without an answer");
    }

    /// Returns when none of its threads runs any more.
    async fn stop(&self) {
        self.signal("-STOP");
        eventually("all threads stand still", async || {
            let mut threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
            let stat =
                |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The state stands behind the name, which is in brackets.
            let stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'));
            threads.all(|thread| stopped(stat(thread.unwrap()))).then_some(())
        })
        .await;
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_stopped_and_goes_on_appends_nothing_after_its_successor() {
    let place = Place::new();
    let mut frozen = Frozen::start(place.database.url());
    frozen.order(1);
    assert_eq!(frozen.answer(), "delivered");
    frozen.stop().await;
    frozen.order(2);
    assert_eq!(place.open().deliver(owned(0, 2, [event(2, "k"), event(3, "k")])).await, vec![Outcome::Delivered; 2]);
    frozen.order(9);
    frozen.signal("-CONT");
    assert_eq!((frozen.answer(), frozen.answer()), ("fenced".to_owned(), "fenced".to_owned()));
    assert_eq!(place.positions(), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_is_unclear_and_the_event_is_there_once() {
    let place = Place::with_table();
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let config = PostgresSinkConfig::new(proxy.url(place.database.url()), "events");
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    assert_eq!(sink.deliver(batch_of([event(1, "k")])).await, [Outcome::Delivered]);
    proxy.cut_after_bytes_from_server(0);
    let outcomes = sink.deliver(batch_of([event(2, "k"), event(3, "k")])).await;
    assert_eq!(kinds(&outcomes), ["connection_lost", "not tried"]);
    assert_eq!(failure(&outcomes[0]).fault, Fault::Unclear);
    assert_eq!(kinds(&sink.deliver(batch_of([event(2, "k")])).await), ["unreachable"]);
    proxy.resume().unwrap();
    assert_eq!(sink.deliver(batch_of([event(2, "k"), event(3, "k")])).await, vec![Outcome::Delivered; 2]);
    assert_eq!(place.positions(), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_lost_while_idle_costs_nothing() {
    let place = Place::with_table();
    let sink = place.open();
    for position in 1..=3 {
        assert_eq!(sink.deliver(batch_of([event(position, "k")])).await, [Outcome::Delivered]);
        place.sql(
            "select pg_terminate_backend(pid) from pg_stat_activity \
                   where datname = current_database() and application_name like 'pillarbox%'",
        );
    }
    assert_eq!(place.positions(), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_says_nothing_is_unclear_after_the_timeout() {
    let place = Place::with_table();
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let url = proxy.url(place.database.url());
    let config = PostgresSinkConfig { timeout: Duration::from_millis(500), ..PostgresSinkConfig::new(url, "events") };
    let sink = PostgresSink::new(config, SOURCE).unwrap();
    eventually("the sink has a connection", async || {
        (sink.deliver(batch_of([event(1, "k")])).await == [Outcome::Delivered]).then_some(())
    })
    .await;
    proxy.stall().unwrap();
    let outcomes = sink.deliver(batch_of([event(2, "k")])).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("timeout", Fault::Unclear));
    // No connection is left, and a new one is not made either.
    let outcomes = sink.deliver(batch_of([event(2, "k")])).await;
    assert_eq!((failure(&outcomes[0]).kind, failure(&outcomes[0]).fault), ("unreachable", Fault::Sink));
    proxy.resume().unwrap();
    eventually("it goes on", async || {
        (sink.deliver(batch_of([event(2, "k")])).await == [Outcome::Delivered]).then_some(())
    })
    .await;
    assert_eq!(place.positions(), [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_few_named_and_ended() {
    let place = Place::with_table();
    let sink = Arc::new(place.open());
    let client = connect(place.database.url()).await.unwrap();
    let count = async |name: &str| -> usize {
        let sql =
            "select count(*) from pg_stat_activity where datname = current_database() and application_name like $1";
        client.query_one(sql, &[&name]).await.unwrap().get::<_, i64>(0) as usize
    };
    assert_eq!(count("pillarbox%").await, 0, "nothing is connected to before the first batch");
    // Everybody waits here, so all connections that may be made are made.
    let holder = connect(place.database.url()).await.unwrap();
    holder.batch_execute("begin; lock table events").await.unwrap();
    let deliver = |number: i64| {
        let (sink, event) = (sink.clone(), event(number, &format!("k{number}")));
        tokio::spawn(async move { sink.deliver(batch_of([event])).await })
    };
    let tasks: Vec<_> = (0..POSTGRES_CONNECTIONS_MAX as i64 + 10).map(deliver).collect();
    eventually("all connections wait", async || (count("pillarbox%").await == POSTGRES_CONNECTIONS_MAX).then_some(()))
        .await;
    holder.batch_execute("commit").await.unwrap();
    for task in tasks {
        assert_eq!(task.await.unwrap(), [Outcome::Delivered]);
    }
    assert!(count("pillarbox%").await <= POSTGRES_CONNECTIONS_MAX);
    sink.close().await;
    eventually("all connections have ended", async || (count("pillarbox%").await == 0).then_some(())).await;
}

#[tokio::test]
async fn a_batch_too_large_for_a_statement_is_appended_in_order() {
    let place = Place::new();
    let payload = || Payload::Json(format!("\"{}\"", "x".repeat(1024 * 1024)).into());
    let events = (1..=40).map(|position| sink_event(position, Some(&format!("k{}", position % 3)), payload()));
    assert_eq!(place.open().deliver(batch_of(events)).await, vec![Outcome::Delivered; 40]);
    assert_eq!(place.positions(), (1..=40).collect::<Vec<_>>());
}

#[tokio::test]
async fn versions_of_a_journal_are_kept() {
    let place = Place::new();
    let event = Event { stream_version: Some(7), ..event(1, "stream") };
    assert_eq!(place.open().deliver(batch_of([event])).await, [Outcome::Delivered]);
    assert_eq!(place.sql("select key, stream_version from events"), "stream|7");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_is_known_when_what_is_under_way_is_through() {
    let place = Place::with_table();
    let sink = Arc::new(place.open());
    assert_eq!(sink.deliver(batch_of([event(1, "a")])).await, [Outcome::Delivered]);
    // The second append has drawn its number and waits.
    let holder = connect(place.database.url()).await.unwrap();
    let same = "insert into events (id, source, topic, type, sequence, time, headers) values ('@id@', '', '', '', 2, now(), '{}')";
    holder.batch_execute(&format!("begin; {}", same.replace("@id@", &event(2, "b").id.to_string()))).await.unwrap();
    let waiting = sink.clone();
    let waiting = tokio::spawn(async move { waiting.deliver(batch_of([event(2, "b")])).await });
    let client = connect(place.database.url()).await.unwrap();
    until_blocked(&client).await;
    let refused = client.query_one("select events_end()", &[]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "55P03", "it does not wait for ever");
    holder.batch_execute("rollback").await.unwrap();
    assert_eq!(waiting.await.unwrap(), [Outcome::Delivered]);
    let end: i64 = client.query_one("select events_end()", &[]).await.unwrap().get(0);
    assert_eq!(place.sql("select max(stored) from events"), end.to_string());
}

/// The reader of the guide: everything up to where no append can come late any more.
async fn read_on(client: &Client, after: i64) -> Vec<(i64, i64)> {
    let end: i64 = client.query_one("select events_end()", &[]).await.unwrap().get(0);
    let sql = "select stored, sequence from events where stored > $1 and stored <= $2 order by stored limit 100";
    let rows = client.query(sql, &[&after, &end]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_in_order_of_arrival_misses_nothing() {
    const WRITERS: i64 = 4;
    const BATCHES: i64 = 40;
    const EVENTS: i64 = 5;
    let place = Place::with_table();
    let sink = Arc::new(place.open());
    let write = |writer: i64| {
        let sink = sink.clone();
        tokio::spawn(async move {
            for batch in 0..BATCHES {
                let first = (writer * BATCHES + batch) * EVENTS;
                let events = (first..first + EVENTS).map(|position| event(position, &format!("k{writer}")));
                assert_eq!(sink.deliver(batch_of(events)).await, vec![Outcome::Delivered; EVENTS as usize]);
            }
        })
    };
    let writers: Vec<_> = (0..WRITERS).map(write).collect();
    let client = connect(place.database.url()).await.unwrap();
    let (mut after, mut read) = (0, Vec::new());
    while (read.len() as i64) < WRITERS * BATCHES * EVENTS {
        let rows = eventually("there is more to read", async || {
            Some(read_on(&client, after).await).filter(|rows| !rows.is_empty())
        });
        for (stored, position) in rows.await {
            after = stored;
            read.push(position);
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    for writer in 0..WRITERS {
        let of_writer = |position: &&i64| **position / (BATCHES * EVENTS) == writer;
        assert!(read.iter().filter(of_writer).is_sorted(), "the order of key k{writer}");
    }
    read.sort_unstable();
    assert_eq!(read, (0..WRITERS * BATCHES * EVENTS).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_sql_of_the_guide_works() {
    let guide = include_str!("../../../../docs/guides/sinks/postgres.md");
    let blocks: Vec<&str> = guide.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [schema, grants, index, tables, round, unfence] = blocks[..] else { panic!("{} blocks of SQL", blocks.len()) };
    assert_eq!(schema, PostgresSinkConfig::schema_sql("event_store").unwrap());
    let place = Place::new();
    place.sql(schema);
    let (role, url) = role(&place, "");
    place.sql(&grants.replace("relay", &role));
    let sink = PostgresSink::new(PostgresSinkConfig::new(url, "event_store"), SOURCE).unwrap();
    let placed = |position, customer: &str| {
        let payload = Payload::Json(format!("{{\"customer\":\"{customer}\"}}").into());
        sink_event(position, Some("order-1"), payload)
    };
    let mut read = 0;
    place.sql(&format!("{index}; {tables}"));
    for (batch, expected) in
        [([placed(1, "ada"), placed(2, "bob")], "ada|1\nbob|1"), ([placed(2, "bob"), placed(3, "ada")], "ada|2\nbob|1")]
    {
        assert_eq!(sink.deliver(batch_of(batch)).await, vec![Outcome::Delivered; 2]);
        let end: i64 = place.sql("select event_store_end()").parse().unwrap();
        place.sql(&round.replace("4200", &read.to_string()).replace("4711", &end.to_string()));
        assert_eq!(place.sql("select customer, orders from order_count order by customer"), expected);
        read = place.sql("select stored from projection").parse().unwrap();
    }
    place.sql(&unfence.replace("orders-to-store", "suite"));
    assert_eq!(place.sql("select count(*) from event_store_fence"), "0");
    place.sql(&format!("drop owned by {role}; drop role {role}"));
}

/// Two relays deliver the same events to one table at the same moment, in different order; nobody waits for ever.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_append_the_same_events_are_not_in_each_others_way() {
    let place = Place::with_table();
    let deliver = |name: &'static str, reverse: bool| {
        let sink = place.open();
        tokio::spawn(async move {
            for first in (0..500).step_by(50) {
                let mut events: Vec<Event> =
                    (first..first + 50).map(|position| event(position, &format!("k{position}"))).collect();
                if reverse {
                    events.reverse();
                }
                let batch = Batch { subscription: name.into(), ..batch_of(events) };
                assert_eq!(sink.deliver(batch).await, vec![Outcome::Delivered; 50]);
            }
        })
    };
    let tasks = [deliver("one", false), deliver("two", true)];
    for task in tasks {
        task.await.unwrap();
    }
    let mut there = place.positions();
    there.sort_unstable();
    assert_eq!(there, (0..500).collect::<Vec<_>>());
}
