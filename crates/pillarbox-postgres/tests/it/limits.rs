//! What is too large is refused by the log, in whatever language; what is there already stops nobody.

use pillarbox::{
    CONTENT_TYPE_BYTES_MAX, ErrorKind, Filter, HEADERS_BYTES_MAX, NewEvent, Operator, PAYLOAD_BYTES_MAX, Store,
};
use pillarbox_postgres::migrate;
use pillarbox_testkit::postgres::Server;

use crate::fixture::{Database, connect, one_scan, tail};

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
            "alter table pillarbox.event drop constraint event_is_well_formed;
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

#[tokio::test]
async fn no_log_begins_where_nobody_checks_text() {
    let server = Server::shared();
    let name = format!("ascii_{}", std::process::id());
    let admin = connect(&server.url("postgres")).await;
    let create = format!("create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0");
    admin.batch_execute(&create).await.unwrap();
    let url = server.url(&name);
    let refused = migrate(&url.parse().unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("SQL_ASCII") && refused.to_string().contains("encoding 'UTF8'"), "{refused}");

    admin.batch_execute(&format!("drop database {name} with (force)")).await.unwrap();
}

#[tokio::test]
async fn a_log_of_the_first_version_keeps_what_is_too_large_now() {
    let database = Database::new().await;
    let large = NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX + 1)), ..NewEvent::new("t", "y") };
    let error = database.store().await.publish(&[large]).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("content_type"), "{error}");
    let valid = "select count(*) from pg_constraint where conname = 'event_is_well_formed' and convalidated";
    assert_eq!(database.number(valid).await, 0, "what was there is not looked at");
}
