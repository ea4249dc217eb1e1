//! What is too large is refused by the log, in whatever language; what is there already stops nobody.

use std::sync::Arc;

use pillarbox::admin::{Level, ListQuery, Operator, State};
use pillarbox::limit::{CONTENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, PAYLOAD_BYTES_MAX};
use pillarbox::store::Store;
use pillarbox::testing::Capture;
use pillarbox::{ErrorKind, Filter, Mode, OnDead, Relay, Subscription};
use pillarbox_postgres::{PostgresStore, migrate, print_sql};
use pillarbox_testkit::postgres::Server;
use tokio_postgres::Client;

use crate::fixture::{Database, connect, one_scan, pages, tail};
use crate::schema::steps_up_to;

/// What the database says about a statement that it refuses: the constraint's name.
async fn refused(database: &Database, sql: &str) -> String {
    let error = database.client().await.batch_execute(sql).await.unwrap_err();
    let said = error.as_db_error().unwrap();
    assert!(said.message().starts_with(said.constraint().unwrap()), "{said}");
    said.constraint().unwrap().to_owned()
}

#[tokio::test]
async fn headers_and_content_types_have_limits() {
    let database = Database::new().await;
    let insert = |column: &str, value: &str| {
        format!("insert into pillarbox.event (topic, type, {column}) values ('t', 'y', {value})")
    };
    // `jsonb` takes some bytes for itself.
    let headers = |bytes: usize| format!("jsonb_build_object('a', repeat('x', {bytes}))");
    database.execute(&insert("headers", &headers(HEADERS_BYTES_MAX - 100))).await;
    let sql = insert("headers", &headers(HEADERS_BYTES_MAX + 1));
    assert_eq!(refused(&database, &sql).await, "headers_has_at_most_65536_bytes");
    let content_type = |bytes: usize| format!("repeat('x', {bytes})");
    database.execute(&insert("content_type", &content_type(CONTENT_TYPE_BYTES_MAX))).await;
    let sql = insert("content_type", &content_type(CONTENT_TYPE_BYTES_MAX + 1));
    assert_eq!(refused(&database, &sql).await, "content_type_has_at_most_255_bytes");
    let sql = format!("select pillarbox.publish('t', 'y', '{{}}', headers => {})", headers(HEADERS_BYTES_MAX));
    assert_eq!(refused(&database, &sql).await, "headers_has_at_most_65536_bytes");
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 2);
}

#[tokio::test]
async fn what_another_table_has_compressed_counts_as_what_it_is() {
    let database = Database::new().await;
    database
        .execute(&format!(
            "create table big (number integer, payload json, bytes bytea, headers jsonb);
             insert into big select n, to_json(repeat('x', n)), convert_to(repeat('x', n), 'UTF8'), jsonb_build_object('a', repeat('x', n))
             from unnest(array[{small}, {large}]) as n",
            small = HEADERS_BYTES_MAX / 2,
            large = 2 * PAYLOAD_BYTES_MAX
        ))
        .await;
    let copy = |column: &str, from: &str, which: &str| {
        format!(
            "insert into pillarbox.event (topic, type, {column}) select 't', 'y', {from} from big order by number {which} limit 1"
        )
    };
    for (column, from, constraint) in [
        ("payload", "payload", "payload_has_at_most_payload_bytes_max_bytes"),
        ("payload_bytes", "bytes", "payload_has_at_most_payload_bytes_max_bytes"),
        ("headers", "headers", "headers_has_at_most_65536_bytes"),
    ] {
        database.execute(&copy(column, from, "asc")).await;
        assert_eq!(refused(&database, &copy(column, from, "desc")).await, constraint);
    }
}

#[tokio::test]
async fn rows_that_are_larger_than_a_page_come_one_by_one() {
    const LARGE: i64 = 4;
    let database = Database::new().await;
    // As they could be published before there was a limit.
    database
        .execute(&format!(
            "drop index pillarbox.event_id;
             insert into pillarbox.event (topic, type, headers)
             select 'large', 'y', jsonb_build_object('a', repeat('x', 9 * 1024 * 1024)) from generate_series(1, {LARGE});
             insert into pillarbox.event (topic, type) select 'small', 'y' from generate_series(1, 100)"
        ))
        .await;
    let store = database.store().await;
    let mut after = 0;
    for number in 1..=LARGE {
        let scan = one_scan(store.poll(&tail(after, 1000)).await.unwrap());
        assert_eq!((scan.events.len(), scan.covered_to), (1, number), "a page ends with it");
        after = scan.covered_to;
    }
    let mut left = 100;
    while left > 0 {
        let scan = one_scan(store.poll(&tail(after, 1000)).await.unwrap());
        assert!(!scan.events.is_empty() && scan.events.iter().all(|event| &*event.topic == "small"));
        (after, left) = (scan.covered_to, left - scan.events.len());
    }
    let mut request = tail(0, 1000);
    request.wanted = vec![Filter { topics: vec!["small".into()], ..Filter::default() }];
    let reader = database.store().await;
    let scan = one_scan(reader.poll(&request).await.unwrap());
    assert_eq!((scan.events.len(), scan.covered_to), (100, 104), "what nobody wants is not read");
}

/// A database that does not check its text.
async fn unchecked(name: &str) -> (Client, String) {
    let (server, name) = (Server::shared(), format!("{name}_{}", std::process::id()));
    let admin = connect(&server.url("postgres")).await;
    let create = format!("create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0");
    admin.batch_execute(&create).await.unwrap();
    (admin, name)
}

#[tokio::test]
async fn no_log_begins_where_nobody_checks_text() {
    let (admin, name) = unchecked("ascii").await;
    let refused = migrate(&Server::shared().url(&name).parse().unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("SQL_ASCII") && refused.to_string().contains("encoding 'UTF8'"), "{refused}");

    admin.batch_execute(&format!("drop database {name} with (force)")).await.unwrap();
}

/// Each has bytes that are no characters somewhere, and what of it that is.
const NO_TEXT: [(&str, &str); 8] = [
    ("topic", "insert into pillarbox.event (topic, type, key) values (E't\\xff', 'y', 'a')"),
    ("type", "insert into pillarbox.event (topic, type, key) values ('t', E'y\\xff', 'b')"),
    ("key", "insert into pillarbox.event (topic, type, key) values ('t', 'y', E'\\xff')"),
    ("key", "insert into pillarbox.event (topic, type, key) values ('t', 'y', E'\\xfe')"),
    ("payload", "insert into pillarbox.event (topic, type, payload) values ('t', 'y', E'\"\\xff\"')"),
    ("headers", "insert into pillarbox.event (topic, type, headers) values ('t', 'y', E'{\"h\": \"\\xff\"}')"),
    (
        "content type",
        "insert into pillarbox.event (topic, type, payload_bytes, content_type) values ('t', 'y', '\\x00', E'\\xff')",
    ),
    ("key", "insert into pillarbox.event (topic, type, key) values ('t', 'y', E'\\xff')"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_no_text_is_dead_alone() {
    let (admin, name) = unchecked("ascii_log").await;
    let url = Server::shared().url(&name);
    let client = connect(&url).await;
    client.batch_execute(&print_sql("pillarbox", false)).await.unwrap();
    let good = "insert into pillarbox.event (topic, type, key) values ('t', 'y', 'good')";
    for (_, sql) in NO_TEXT {
        client.batch_execute(&format!("{sql}; {good}")).await.unwrap();
    }
    // So many that they would be taken for a bad deploy.
    let many = "insert into pillarbox.event (topic, type, key, payload) \
                select 't', 'y', 'k' || n, E'\"\\xff\"' from generate_series(1, 100) as n";
    client.batch_execute(&format!("{many}; {good}")).await.unwrap();

    let capture = Capture::new();
    let queue = Subscription { mode: Mode::Queue, ..Subscription::new("queue") };
    let stream = Subscription { on_dead: OnDead::Block, ..Subscription::new("stream") };
    let relay = Relay::builder(PostgresStore::open(&url).await.unwrap());
    let relay = relay.subscribe(stream, Arc::new(capture.clone())).subscribe(queue, Arc::new(capture.clone()));
    let relay = relay.start().await.unwrap();
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let keys: Vec<_> = capture.events().iter().map(|event| event.key.clone().unwrap_or_default()).collect();
    assert_eq!(keys, vec!["good".into(); 2 * (NO_TEXT.len() + 1)], "nothing but what is text is sent, to each once");

    let store = PostgresStore::open(&url).await.unwrap();
    for subscription in ["stream", "queue"] {
        let subscription = Some(subscription.to_owned());
        let rows = store.list(&ListQuery { subscription, limit: 1_000, ..ListQuery::default() }).await.unwrap();
        let dead: Vec<_> = rows.iter().filter(|row| row.state == Some(State::Dead)).collect();
        assert_eq!((dead.len(), rows.len()), (NO_TEXT.len() + 100, dead.len()), "{rows:?}");
        for ((what, _), row) in NO_TEXT.iter().zip(&dead) {
            let error = row.error.as_deref().unwrap_or_default();
            assert!(
                error.contains(&format!("its {what} is no text in UTF-8")) && error.contains("SQL_ASCII"),
                "{row:?}"
            );
            assert_eq!(row.attempts, Some(1), "{row:?}");
        }
    }
    let checks = store.doctor().await.unwrap();
    let check = checks.iter().find(|check| check.name == "encoding").unwrap();
    assert_eq!(check.level, Level::Failed, "{check:?}");
    assert!(
        check.finding.contains("SQL_ASCII") && check.fix.as_deref().unwrap().contains("encoding 'UTF8'"),
        "{check:?}"
    );
    admin.batch_execute(&format!("drop database {name} with (force)")).await.unwrap();
}

#[tokio::test]
async fn a_log_of_the_first_version_keeps_what_is_too_large_now() {
    let database = Server::shared().create_database().unwrap();
    database.psql(&steps_up_to(5)).unwrap();
    let large = format!("jsonb_build_object('a', repeat('x', {}))", 2 * HEADERS_BYTES_MAX);
    let insert = format!("insert into pillarbox.event (topic, type, headers) values ('t', 'y', {large})");
    database.psql(&insert).unwrap();
    migrate(&database.url().parse().unwrap()).await.unwrap();
    // Both call the check for what is there.
    database.psql("reindex table pillarbox.event").unwrap();
    database.psql("analyze pillarbox.event").unwrap();
    let store = PostgresStore::open(database.url()).await.unwrap();
    let scan = one_scan(store.poll(&tail(0, 1)).await.unwrap());
    assert!(scan.events[0].headers.as_json().len() > 2 * HEADERS_BYTES_MAX);
    let error = format!("{:?}", database.psql(&insert).unwrap_err());
    assert!(error.contains("headers_has_at_most_65536_bytes"), "{error}");
}

/// A clock that was set back during a transaction, and a role that may write the column, give an event a time before its transaction.
#[tokio::test]
async fn an_event_is_checked_whatever_its_time() {
    let database = Database::new().await;
    let insert = |time: &str| {
        format!(
            "insert into pillarbox.event (topic, type, created_at) values ('', 'y', clock_timestamp() + interval '{time}')"
        )
    };
    for time in ["-1 microsecond", "1 hour"] {
        assert_eq!(refused(&database, &insert(time)).await, "topic_has_1_to_1024_bytes", "{time}");
    }
}

/// An index is also made anew over events that a larger limit allowed, also over those whose time lies ahead.
#[tokio::test]
async fn what_a_larger_limit_allowed_can_be_indexed_anew() {
    let database = Database::new().await;
    let insert = "insert into pillarbox.event (topic, type, payload, created_at)
        values ('t', 'y', to_json(repeat('x', 5000)), clock_timestamp() + interval '1 hour')";
    database.execute(insert).await;
    database.execute("select pillarbox.set_payload_bytes_max(1000)").await;
    database.execute("reindex table pillarbox.event").await;
    let small = insert.replace("'1 hour'", "'2 hours'");
    assert_eq!(refused(&database, &small).await, "payload_has_at_most_payload_bytes_max_bytes");
}

/// The check is called for each row that is analysed or indexed.
#[tokio::test]
async fn the_check_reads_no_payload() {
    let database = Database::new().await;
    database
        .execute(
            "alter table pillarbox.event_1 alter column payload set storage external;
             insert into pillarbox.event (topic, type, payload)
             select 't', 'y', to_json(repeat('x', 100000)) from generate_series(1, 50)",
        )
        .await;
    let client = database.client().await;
    let check = "select count(*) from pillarbox.event
        where pillarbox.is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers, created_at)";
    // Once for what a session looks up before.
    pages(&client, check).await;
    let looked_at = pages(&client, check).await;
    assert!(looked_at < 50, "{looked_at} pages of 50 events, which lie in one, and their payloads in 650");
}
