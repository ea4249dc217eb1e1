use std::time::Duration;

use futures_util::{SinkExt, TryStreamExt};
use pillarbox::admin::Operator;
use pillarbox::limit::PAYLOAD_BYTES_MAX;
use pillarbox::{ErrorKind, NewEvent, Payload, Timestamp};
use pillarbox_postgres::testing::published;
use pillarbox_postgres::{
    EventSql, Limits, PAYLOAD_BYTES_MAX_HIGHEST, Parameter, PgConfig, PostgresStore, migrate, publish, publish_all,
};
use pillarbox_testkit::postgres::Server;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::fixture::{Database, connect, events};

#[tokio::test]
async fn a_plain_insert_gets_every_default() {
    let database = Database::new().await;
    let insert = r#"insert into pillarbox.event (topic, key, type, payload) values ('t', 'k', 'y', '{"a":1}')"#;
    database.execute(insert).await;
    let event = events(&database.store().await).await.remove(0);
    assert_eq!(event.payload, Payload::Json(r#"{"a":1}"#.into()));
    assert_eq!((event.id.get_version_num(), event.id.get_variant()), (7, uuid::Variant::RFC4122));
    let (seconds, nanos) = event.id.get_timestamp().unwrap().to_unix();
    let from_id = seconds as i64 * 1000 + i64::from(nanos) / 1_000_000;
    assert!((from_id - event.created_at.0).abs() < 10_000, "{from_id} {}", event.created_at.0);
    assert!((Timestamp::now().0 - event.created_at.0).abs() < 60_000);
    assert!(event.headers.is_empty() && event.deliver_at.is_none());
}

#[tokio::test]
async fn an_id_that_nobody_brought_is_the_same_wherever_it_is_told_and_leads_to_its_event() {
    let database = Database::new().await;
    let (store, client) = (database.store().await, database.client().await);
    let brought = Uuid::new_v4();
    let mut told = vec![publish(&client, &NewEvent::new("t", "y")).await.unwrap()];
    told.extend(publish_all(&client, &[NewEvent::new("t", "y"), NewEvent::new("t", "y").id(brought)]).await.unwrap());
    for sql in [
        "select pillarbox.publish('t', 'y', headers => '{\"a\": \"b\"}')",
        "select pillarbox.publish_bytes('t', 'y', '\\x00', 'x')",
        "select pillarbox.publish('t', 'y', dedup_key => 'd')",
        "insert into pillarbox.event (topic, type) values ('t', 'y') returning pillarbox.event_id(position, created_at)",
    ] {
        told.push(client.query_one(sql, &[]).await.unwrap().get(0));
    }
    database.execute("select pillarbox.append('s', 0, '[{\"type\": \"y\"}]')").await;
    let of_journal = "select id from pillarbox.event_view where stream_version = 1";
    told.push(client.query_one(of_journal, &[]).await.unwrap().get(0));

    let events = events(&store).await;
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), told);
    for event in &events {
        let shown = store.show(event.id).await.unwrap().unwrap().event;
        assert_eq!((shown.position, shown.id), (event.position, event.id));
    }
    let stored: i64 = database.number("select count(*) from pillarbox.event where id is not null").await;
    assert_eq!(stored, 2, "what was brought, and what deduplication has to know before");
    // One of another log, at the same place and time.
    database.execute("update pillarbox.meta set id_salt = id_salt # 1").await;
    assert!(store.show(told[0]).await.unwrap().is_none());
}

#[tokio::test]
async fn ids_are_made_alike_by_the_database_and_the_relay_at_any_time() {
    let database = Database::new().await;
    let times = "'infinity', '-infinity', '1969-12-31Z', '1970-01-01Z', '2026-11-18 10:00:00.001Z', \
                 '2026-11-18 10:00:00.001999Z', '9999-12-31 23:59:59.999999Z', '12000-01-01Z'";
    database
        .execute(&format!(
            "insert into pillarbox.event (topic, type, created_at) \
             select 't', 'y', at from unnest(array[{times}]::timestamptz[]) as at"
        ))
        .await;
    let rows =
        database.client().await.query("select id from pillarbox.event_view order by position", &[]).await.unwrap();
    let made: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let read: Vec<Uuid> = events(&database.store().await).await.iter().map(|event| event.id).collect();
    assert_eq!((read.len(), &read), (8, &made));
}

#[tokio::test]
async fn indexes_are_made_anew_over_events_that_are_too_large_by_now() {
    let database = Database::new().await;
    let store = database.store().await;
    let large = NewEvent::new("t", "y").bytes(vec![0; 2000], "x").id(Uuid::new_v4());
    let id = publish(&database.client().await, &large).await.unwrap();
    store.set_limits(Limits { payload_bytes_max: Some(1000), ..Limits::default() }).await.unwrap();
    database.execute("analyze pillarbox.event").await;
    for leaf in ["event_1", "event_2"] {
        database.execute(&format!("reindex table pillarbox.{leaf}")).await;
    }
    assert_eq!(store.show(id).await.unwrap().unwrap().event.position, 1);
    assert_eq!(publish(&database.client().await, &large).await.unwrap_err().kind(), ErrorKind::Invalid);
}

const TEXTS: [&str; 7] = [
    r#"{"quote":"\"'","back":"\\ \\\\","line":"a\nb\r\n\tc"}"#,
    "{\"emoji\":\"\u{1F4EE}\u{1F468}\u{200D}\u{1F469}\"}",
    r#""a\u0000b""#,
    "123456789012345678901234567890.000000000000000000000000001e400",
    " [ 1 ,\n 2 ] ",
    "null",
    "\"\"",
];

#[tokio::test]
async fn payloads_arrive_as_they_were_sent_one_by_one_in_batches_by_insert_and_by_text() {
    let database = Database::new().await;
    let client = database.client().await;
    let new = TEXTS.map(|text| NewEvent::new("t", "y").json_text(text));
    for event in &new {
        publish(&client, event).await.unwrap();
    }
    publish_all(&client, &new).await.unwrap();
    for text in TEXTS {
        let sql = "insert into pillarbox.event (topic, type, payload) values ('t', 'y', $1::text::json)";
        client.execute(sql, &[&text]).await.unwrap();
    }
    for event in &new {
        run(&client, event).await;
    }
    let events = events(&database.store().await).await;
    let expected = TEXTS.iter().cycle().take(4 * TEXTS.len()).map(|text| Payload::Json((*text).into()));
    assert_eq!(events.iter().map(|event| event.payload.clone()).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

/// Publishes by the statement for any client.
async fn run(client: &tokio_postgres::Client, event: &NewEvent) -> Uuid {
    let statement = event.to_sql().unwrap();
    let parameters = statement.parameters.iter().map(|parameter| -> &(dyn ToSql + Sync) {
        match parameter {
            Parameter::Text(text) => text,
            Parameter::Bytes(bytes) => bytes,
        }
    });
    let row = client.query_one(&statement.sql, &parameters.collect::<Vec<_>>()).await.unwrap();
    row.get::<_, &str>("id").parse().unwrap()
}

#[tokio::test]
async fn what_the_functions_are_given_arrives() {
    let database = Database::new().await;
    let client = database.client().await;
    let deep = r#"{"back": "\\ \\\\", "line": "a\nb", "emoji": "📮"}"#;
    let sql = "select pillarbox.publish(topic => $1, type => $2, payload => $3::text::jsonb, key => $4,
        headers => $5::text::jsonb, deliver_at => $6::text::timestamptz, id => $7)";
    let id = Uuid::new_v4();
    let at = "2126-01-31T12:00:00.000Z";
    let row = client.query_one(sql, &[&"t", &"y", &deep, &"k", &r#"{"a":"b"}"#, &at, &id]).await.unwrap();
    assert_eq!(row.get::<_, Uuid>(0), id);
    let sql = "select pillarbox.publish_bytes('t', 'y', $1, 'application/x')";
    let bytes: Vec<u8> = (0..=255).collect();
    client.query_one(sql, &[&bytes]).await.unwrap();
    let events = events(&database.store().await).await;
    assert_eq!((events[0].id, events[0].key.as_deref()), (id, Some("k")));
    assert_eq!(events[0].payload.json::<serde_json::Value>().unwrap(), deep.parse::<serde_json::Value>().unwrap());
    assert_eq!(events[0].headers.get("a").as_deref(), Some("b"));
    assert_eq!(events[0].deliver_at.unwrap().to_string(), at);
    assert_eq!(
        (&events[1].payload, events[1].content_type.as_deref()),
        (&Payload::Bytes(bytes.into()), Some("application/x"))
    );
}

#[tokio::test]
async fn a_batch_takes_one_statement_and_keeps_its_order() {
    let database = Database::new().await;
    let new: Vec<NewEvent> =
        (0..1000).map(|n| NewEvent::new("t", format!("y{n}")).key(format!("k{}", n % 7))).collect();
    let ids = database.publish(&new).await;
    let events = events(&database.store().await).await;
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), ids);
    assert!(
        events
            .iter()
            .zip(&new)
            .all(|(event, new)| *event.r#type == *new.r#type && event.key.as_deref() == new.key.as_deref())
    );
    assert!(publish_all(&database.client().await, &[]).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_payload_limit_holds_at_its_edge_for_plain_sql() {
    let database = Database::new().await;
    let client = database.client().await;
    let sql = "insert into pillarbox.event (topic, type, payload_bytes) values ('t', 'y', $1)";
    let error = client.execute(sql, &[&vec![0_u8; PAYLOAD_BYTES_MAX + 1]]).await.unwrap_err();
    assert!(error.as_db_error().unwrap().message().contains("payload_bytes_max"), "{error:?}");
    client.execute(sql, &[&vec![0_u8; PAYLOAD_BYTES_MAX]]).await.unwrap();
    assert_eq!(events(&database.store().await).await.len(), 1);
}

#[tokio::test]
async fn the_payload_limit_can_be_set_for_everybody() {
    let database = Database::new().await;
    let store = database.store().await;
    let client = database.client().await;
    let limit = |bytes| store.set_limits(Limits { payload_bytes_max: Some(bytes), ..Limits::default() });
    let event = |length| NewEvent::new("t", "y").bytes(vec![0; length], "x");
    publish(&client, &event(2000)).await.unwrap();
    for bytes in [1000, 2 * PAYLOAD_BYTES_MAX, 500] {
        limit(bytes).await.unwrap();
        publish(&client, &event(bytes)).await.unwrap();
        assert_eq!(publish(&client, &event(bytes + 1)).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    for bytes in [0, PAYLOAD_BYTES_MAX_HIGHEST + 1] {
        assert_eq!(limit(bytes).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(events(&store).await.len(), 4);
    // A leaf that is made later has the new limit too.
    client.batch_execute("begin; select pillarbox.make_leaf('event_99')").await.unwrap();
    let sql = "insert into pillarbox.event_99 (position, topic, type, payload_bytes) values (1, 't', 'y', $1)";
    client.execute(sql, &[&vec![0_u8; 501]]).await.unwrap_err();
}

#[tokio::test]
async fn what_no_event_may_be_is_refused_with_its_reason() {
    let database = Database::new().await;
    let client = database.client().await;
    let check = async |event: NewEvent, reason: &str| {
        for error in [
            publish(&client, &event).await.unwrap_err(),
            publish_all(&client, &[NewEvent::new("t", "y"), event]).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains(reason), "{error} should speak of {reason}");
        }
    };
    check(NewEvent::new("", "y"), "topic").await;
    check(NewEvent::new("t", ""), "type").await;
    check(NewEvent::new("t", "y").key(""), "key").await;
    check(NewEvent::new("t", "y").dedup_key(""), "dedup_key").await;
    check(NewEvent::new("t".repeat(1025), "y"), "name_bytes_max").await;
    check(NewEvent::new("t", "a\0b"), "character 0").await;
    check(NewEvent::new("t", "y").json_text("{not json"), "json").await;
    check(NewEvent::new("t", "y").header("a", "\0"), "Unicode").await;
    publish(&client, &NewEvent::new("t".repeat(1024), "y").key("k".repeat(1024))).await.unwrap();
    let insert = async |columns: &str, values: &str, reason: &str| {
        let sql = format!("insert into pillarbox.event (topic, type, {columns}) values ('t', 'y', {values})");
        let error = client.batch_execute(&sql).await.unwrap_err();
        let said = error.as_db_error().unwrap().message();
        assert!(said.contains(reason), "{said} should speak of {reason}");
    };
    insert("headers", "'[]'", "headers_is_a_json_object").await;
    insert("key", "''", "key_has_1_to_1024_bytes").await;
    insert("payload, payload_bytes", "'1', '1'", "payload_or_payload_bytes").await;
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 1);
}

/// The columns of an event, each as an SQL expression, with one that the log refuses, and the constraint that says so.
const REFUSED: [(&str, &str, &str); 12] = [
    ("topic", "''", "topic_has_1_to_1024_bytes"),
    ("topic", "repeat('é', 513)", "topic_has_1_to_1024_bytes"),
    ("type", "''", "type_has_1_to_1024_bytes"),
    ("type", "repeat('y', 1025)", "type_has_1_to_1024_bytes"),
    ("key", "''", "key_has_1_to_1024_bytes"),
    ("key", "repeat('k', 1025)", "key_has_1_to_1024_bytes"),
    ("content_type", "repeat('c', 256)", "content_type_has_at_most_255_bytes"),
    ("headers", "'[]'", "headers_is_a_json_object"),
    ("headers", "'null'", "headers_is_a_json_object"),
    ("headers", "jsonb_build_object('a', repeat('x', 65536))", "headers_has_at_most_65536_bytes"),
    ("payload", "to_json(repeat('x', 1048575))", "payload_has_at_most_payload_bytes_max_bytes"),
    ("payload_bytes", "convert_to(repeat('x', 1048577), 'utf8')", "payload_has_at_most_payload_bytes_max_bytes"),
];

/// An event whose columns are all at their limits, with one replaced.
fn event_with(column: &str, value: &str) -> impl Fn(&str) -> String {
    let replaced = (column.to_owned(), value.to_owned());
    move |asked| {
        let sound = match asked {
            "topic" => "repeat('é', 512)",
            "type" => "repeat('y', 1024)",
            "key" => "repeat('k', 1024)",
            "content_type" => "repeat('c', 255)",
            "headers" => "jsonb_build_object('a', repeat('x', 65000))",
            "payload" => "to_json(repeat('x', 1048574))",
            "payload_bytes" => "convert_to(repeat('x', 1048576), 'utf8')",
            _ => unreachable!("{asked}"),
        };
        if replaced.0 == asked { replaced.1.clone() } else { sound.to_owned() }
    }
}

/// Every way to publish by SQL that takes the column, each with its statement.
fn ways(column: &str, value: &str) -> Vec<(&'static str, String)> {
    let with = event_with(column, value);
    let payload = if matches!(column, "payload_bytes" | "content_type") { "payload_bytes" } else { "payload" };
    let columns = if payload == "payload" {
        vec!["topic", "type", "key", "headers", payload]
    } else {
        vec!["topic", "type", "key", "headers", payload, "content_type"]
    };
    let values: Vec<String> = columns.iter().map(|column| with(column)).collect();
    let (columns, values) = (columns.join(", "), values.join(", "));
    let mut ways = vec![
        ("insert", format!("insert into pillarbox.event ({columns}) values ({values})")),
        ("rows", format!("insert into pillarbox.event ({columns}) select {values} from generate_series(1, 2)")),
        ("copy", format!("copy (select {values}) to stdout;copy pillarbox.event ({columns}) from stdin")),
    ];
    let (topic, kind, key, headers) = (with("topic"), with("type"), with("key"), with("headers"));
    if payload == "payload" {
        let payload = with("payload");
        let publish = format!("select pillarbox.publish({topic}, {kind}, {payload}::jsonb, {key}, {headers})");
        ways.push(("publish", publish));
        // The stream of a journal is its key.
        let events = format!(
            "jsonb_build_array(jsonb_build_object('type', {kind}, 'payload', {payload}, 'headers', {headers}))"
        );
        ways.push(("append", format!("select pillarbox.append({key}, 0, {events}, {topic})")));
    } else {
        let (bytes, content_type) = (with("payload_bytes"), with("content_type"));
        let publish =
            format!("select pillarbox.publish_bytes({topic}, {kind}, {bytes}, {content_type}, {key}, {headers})");
        ways.push(("publish_bytes", publish));
    }
    ways
}

async fn try_way(client: &tokio_postgres::Client, statement: &str) -> Result<(), tokio_postgres::Error> {
    let Some((out, into)) = statement.strip_prefix("copy").and_then(|_| statement.split_once(";copy")) else {
        return client.batch_execute(statement).await;
    };
    let rows: Vec<_> = client.copy_out(out).await?.try_collect().await?;
    let sink = client.copy_in(&format!("copy{into}")).await?;
    let mut sink = std::pin::pin!(sink);
    for row in rows {
        sink.send(row).await?;
    }
    sink.finish().await.map(drop)
}

#[tokio::test]
async fn every_way_to_publish_refuses_the_same_and_takes_what_is_at_the_limit() {
    let database = Database::new().await;
    let client = database.client().await;
    client.batch_execute("begin").await.unwrap();
    for (column, value, constraint) in REFUSED {
        for (way, statement) in ways(column, value) {
            client.batch_execute("savepoint before").await.unwrap();
            let refused = try_way(&client, &statement).await.expect_err(&format!("{way} takes {column} = {value}"));
            let said = refused.as_db_error().unwrap_or_else(|| panic!("{way}, {column}: {refused:?}"));
            assert_eq!(said.constraint(), Some(constraint), "{way}, {column} = {value}: {said}");
            client.batch_execute("rollback to before").await.unwrap();
        }
    }
    for column in ["payload", "payload_bytes"] {
        for (way, statement) in ways(column, &event_with("", "")(column)) {
            client.batch_execute("savepoint before").await.unwrap();
            try_way(&client, &statement).await.unwrap_or_else(|error| panic!("{way}, {column}: {error:?}"));
            client.batch_execute("rollback to before").await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_dedup_key_publishes_once_inside_its_window_whoever_publishes() {
    let database = Database::new().await;
    let client = database.client().await;
    let event = || NewEvent::new("t", "y").key("k").dedup_key("d");
    let first = database.publish(&[event(), event()]).await;
    assert_eq!(first[0], first[1]);
    let others = [
        NewEvent::new("u", "y").key("k").dedup_key("d"),
        NewEvent::new("t", "y").key("l").dedup_key("d"),
        NewEvent::new("t", "y").dedup_key("d"),
        NewEvent::new("t", "y").key("k").dedup_key("e"),
        NewEvent::new("t", "y").key("k"),
    ];
    assert_eq!(database.publish(&others).await.iter().filter(|id| **id != first[0]).count(), 5);
    let by_function = "select pillarbox.publish('t', 'y', key => 'k', dedup_key => 'd')";
    assert_eq!(client.query_one(by_function, &[]).await.unwrap().get::<_, Uuid>(0), first[0]);
    assert_eq!(publish(&client, &event().id(first[0])).await.unwrap(), first[0], "also with the id of the first");
    assert_eq!(run(&client, &event()).await, first[0]);
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 6);

    let age = async |age: i64| {
        for table in 0..3 {
            let sql =
                format!("update pillarbox.dedup_{table} set created_at = clock_timestamp() - interval '{age} seconds'");
            client.batch_execute(&sql).await.unwrap();
        }
    };
    let window = 86_400;
    age(window - 60).await;
    assert_eq!(database.publish(&[event()]).await[0], first[0], "still inside");
    age(window + 1).await;
    let second = database.publish(&[event()]).await[0];
    assert_ne!(second, first[0], "outside: a new event");
    assert_eq!(database.publish(&[event()]).await[0], second, "which is now the first of its window");
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 7);
}

#[tokio::test]
async fn dedup_keys_survive_the_change_of_tables_and_old_ones_are_emptied() {
    let database = Database::new().await;
    let client = database.client().await;
    let event = || NewEvent::new("t", "y").dedup_key("d");
    let first = publish(&client, &event()).await.unwrap();
    let row = client
        .query_one("select current_table, previous_table, next_table from pillarbox.dedup_window()", &[])
        .await
        .unwrap();
    let [current, previous, next]: [String; 3] = [row.get(0), row.get(1), row.get(2)];
    // As if the window had changed since: what was the current table is the previous one.
    database
        .execute(&format!(
            "insert into pillarbox.{previous} select * from pillarbox.{current}; truncate pillarbox.{current}"
        ))
        .await;
    assert_eq!(publish(&client, &event()).await.unwrap(), first);
    database.execute(&format!("insert into pillarbox.{next} select * from pillarbox.{previous}")).await;
    database.execute("select pillarbox.dedup_rotate()").await;
    assert_eq!(database.number(&format!("select count(*) from pillarbox.{next}")).await, 1, "it still counts");
    database.execute(&format!("update pillarbox.{next} set created_at = created_at - interval '25 hours'")).await;
    database.execute("select pillarbox.dedup_rotate()").await;
    assert_eq!(database.number(&format!("select count(*) from pillarbox.{next}")).await, 0);
    assert_eq!(database.number(&format!("select count(*) from pillarbox.{previous}")).await, 1);

    // Somebody still uses the table: emptying it waits for a moment only, and makes nobody wait.
    let mut late = database.client().await;
    let tx = late.transaction().await.unwrap();
    let old = "gen_random_uuid(), now() - interval '25 hours'";
    tx.execute(&format!("insert into pillarbox.{next} values ('x', {old})"), &[]).await.unwrap();
    database.execute(&format!("insert into pillarbox.{next} values ('y', {old})")).await;
    database.execute("select pillarbox.dedup_rotate()").await;
    tx.commit().await.unwrap();
    assert_eq!(database.number(&format!("select count(*) from pillarbox.{next}")).await, 2);

    let store = database.store().await;
    for hours in [1, 1000, 24, 7, 10, 5, 3] {
        let window = Some(Duration::from_secs(hours * 3600));
        store.set_limits(Limits { dedup_window: window, ..Limits::default() }).await.unwrap();
        prune(&store).await;
        assert_eq!(publish(&client, &event()).await.unwrap(), first, "a window of {hours} h");
    }
}

async fn prune(store: &pillarbox_postgres::PostgresStore) {
    pillarbox::admin::Operator::prune(store, &pillarbox::admin::PrunePolicy::default()).await.unwrap();
}

#[tokio::test]
async fn a_change_of_the_dedup_window_waits_for_nobody_and_nobody_for_it() {
    let database = Database::new().await;
    let store = database.store().await;
    let event = |key: &str| NewEvent::new("t", "y").dedup_key(key);
    let mut open = database.client().await;
    let tx = open.transaction().await.unwrap();
    let first = publish(&tx, &event("d")).await.unwrap();
    for hours in [1, 1000, 5, 24, 3] {
        let window = Some(Duration::from_secs(hours * 3600));
        store.set_limits(Limits { dedup_window: window, ..Limits::default() }).await.unwrap();
        publish(&database.client().await, &event(&format!("{hours}"))).await.unwrap();
    }
    tx.commit().await.unwrap();
    let client = database.client().await;
    assert_eq!(publish(&client, &event("d")).await.unwrap(), first, "put there by the window of before");
    client.batch_execute("set default_transaction_isolation = 'repeatable read'").await.unwrap();
    assert_eq!(publish(&client, &event("d")).await.unwrap(), first);
    let other = publish(&client, &event("e")).await.unwrap();
    assert_eq!(publish(&client, &event("e")).await.unwrap(), other);
    let rows = "select (select count(*) from pillarbox.dedup_0) + (select count(*) from pillarbox.dedup_1)
        + (select count(*) from pillarbox.dedup_2)";
    assert_eq!(database.number(rows).await, 7, "one row a key");
}

#[tokio::test]
async fn publishers_of_one_dedup_key_wait_for_each_other() {
    let database = Database::new().await;
    let event = NewEvent::new("t", "y").dedup_key("d");
    for (isolation, commits) in [("read committed", true), ("read committed", false), ("repeatable read", true)] {
        database.execute("truncate pillarbox.dedup_0, pillarbox.dedup_1, pillarbox.dedup_2").await;
        let (mut one, mut two) = (database.client().await, database.client().await);
        let first = one.transaction().await.unwrap();
        let id = publish(&first, &event).await.unwrap();
        two.batch_execute(&format!("set default_transaction_isolation = '{isolation}'")).await.unwrap();
        let second = two.transaction().await.unwrap();
        second.execute("select 1 from pillarbox.meta", &[]).await.unwrap();
        let waiting = publish(&second, &event);
        let ending = async {
            let waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted
                and database = (select oid from pg_database where datname = current_database())";
            while database.number(waits).await == 0 {}
            if commits { first.commit().await } else { first.rollback().await }.unwrap();
        };
        let (found, ()) = tokio::join!(waiting, ending);
        match (isolation, commits) {
            ("read committed", true) => assert_eq!(found.unwrap(), id),
            ("read committed", false) => assert_ne!(found.unwrap(), id),
            _ => assert_eq!(found.unwrap_err().kind(), ErrorKind::Busy, "it cannot see the first, and may try again"),
        }
    }
}

#[tokio::test]
async fn ordered_publishers_of_a_key_exclude_each_other_before_they_get_a_position() {
    let database = Database::new().await;
    let (mut one, two) = (database.client().await, database.client().await);
    let first = one.transaction().await.unwrap();
    let sql = "select pillarbox.publish('t', $1, key => $2, ordered => true)";
    first.query_one(sql, &[&"first", &"k"]).await.unwrap();
    two.batch_execute("set lock_timeout = '50ms'").await.unwrap();
    let error = two.query_one(sql, &[&"too early", &"k"]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "55P03");
    let other_topic = "select pillarbox.publish('u', $1, key => $2, ordered => true)";
    let error = two.query_one(other_topic, &[&"too early", &"k"]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "55P03", "order is kept by key, whatever the topic");
    two.query_one(sql, &[&"other key", &"l"]).await.unwrap();
    assert_eq!(
        database.number("select last_value from pillarbox.event_position_seq").await,
        2,
        "none was drawn in vain"
    );
    first.commit().await.unwrap();
    two.query_one(sql, &[&"second", &"k"]).await.unwrap();
    let error = two.query_one(sql, &[&"y", &None::<&str>]).await.unwrap_err();
    assert!(error.as_db_error().unwrap().message().contains("needs a key"), "{error:?}");
}

#[tokio::test]
async fn appending_needs_the_expected_version_and_a_conflict_writes_nothing() {
    let database = Database::new().await;
    let client = database.client().await;
    let append = async |expected: Option<i64>, events: &str| {
        let sql = "select pillarbox.append('order-1', $1, $2::text::jsonb)";
        client.query_one(sql, &[&expected, &events]).await.map(|row| row.get::<_, i64>(0))
    };
    let two = r#"[{"type": "placed", "payload": {"n": 1}, "headers": {"a": "b"}}, {"type": "paid"}]"#;
    assert_eq!(append(Some(0), two).await.unwrap(), 2);
    for expected in [0, 1, 3] {
        let error = append(Some(expected), two).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "PB409");
        assert!(error.as_db_error().unwrap().message().contains("at version 2"), "{error:?}");
    }
    assert_eq!(append(Some(2), r#"[{"type": "sent"}]"#).await.unwrap(), 3);
    assert_eq!(append(None, r#"[{"type": "back"}]"#).await.unwrap(), 4);
    for wrong in ["[]", "{}", "null", r#"[{"kind": "x"}]"#, "[1]"] {
        append(None, wrong).await.unwrap_err();
    }
    let events = events(&database.store().await).await;
    let versions: Vec<_> = events.iter().map(|event| (event.stream_version.unwrap(), &*event.r#type)).collect();
    assert_eq!(versions, [(1, "placed"), (2, "paid"), (3, "sent"), (4, "back")]);
    assert!(events.iter().all(|event| event.key.as_deref() == Some("order-1") && &*event.topic == "journal"));
    assert_eq!(events[0].headers.get("a").as_deref(), Some("b"));
    assert_eq!((&events[0].payload, &events[1].payload), (&Payload::Json(r#"{"n": 1}"#.into()), &Payload::None));
}

#[tokio::test]
async fn of_many_appenders_at_once_one_wins_and_versions_follow_positions() {
    let database = Database::new().await;
    let append = async |at: i64| {
        let client = database.client().await;
        let mut won = 0;
        for expected in 0..10_i64 {
            let sql = "select pillarbox.append('s', $1, '[{\"type\": \"a\"}, {\"type\": \"b\"}]')";
            match client.query_one(sql, &[&(expected * 2)]).await {
                Ok(_) => won += 1,
                Err(error) => assert_eq!(error.code().unwrap().code(), "PB409", "{at}: {error:?}"),
            }
        }
        won
    };
    let won = tokio::join!(append(1), append(2), append(3), append(4));
    assert_eq!(won.0 + won.1 + won.2 + won.3, 10);
    let versions: Vec<_> =
        events(&database.store().await).await.iter().map(|event| event.stream_version.unwrap()).collect();
    assert_eq!(versions, (1..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_test_sees_what_its_open_transaction_has_published() {
    let database = Database::new().await;
    database.publish_keys(&["committed"]).await;
    let (mut client, mut other) = (database.client().await, database.client().await);
    let elsewhere = other.transaction().await.unwrap();
    publish(&elsewhere, &NewEvent::new("t", "y").key("elsewhere")).await.unwrap();
    let mut tx = client.transaction().await.unwrap();
    assert!(published(&tx).await.unwrap().is_empty());
    let mut ids = vec![publish(&tx, &NewEvent::new("t", "y").key("open")).await.unwrap()];
    database.publish_keys(&["meanwhile"]).await;
    let savepoint = tx.transaction().await.unwrap();
    ids.push(publish(&savepoint, &NewEvent::new("t", "y").key("kept")).await.unwrap());
    savepoint.commit().await.unwrap();
    let savepoint = tx.transaction().await.unwrap();
    publish(&savepoint, &NewEvent::new("t", "y").key("gone")).await.unwrap();
    savepoint.rollback().await.unwrap();
    let events = published(&tx).await.unwrap();
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), ids);
    tx.rollback().await.unwrap();
    assert!(published(&client).await.unwrap().is_empty());
}

#[tokio::test]
async fn publishing_without_a_schema_names_the_command() {
    let database = Server::shared().create_database().unwrap();
    let error = publish(&connect(database.url()).await, &NewEvent::new("t", "y")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("pillarbox migrate"), "{error}");
}

#[tokio::test]
async fn the_schema_of_a_store_is_published_into() {
    let database = Database::new().await;
    let url = format!("{}?schema=other", database.url());
    migrate(&url.parse::<PgConfig>().unwrap()).await.unwrap();
    let store = PostgresStore::open(&url).await.unwrap();
    let schema = store.schema();
    let mut client = database.client().await;
    let tx = client.transaction().await.unwrap();
    let id = schema.publish(&tx, &NewEvent::new("t", "y")).await.unwrap();
    let ids =
        schema.publish_all(&tx, &[NewEvent::new("t", "y"), NewEvent::new("t", "y").dedup_key("d")]).await.unwrap();
    tx.commit().await.unwrap();
    let there: Vec<Uuid> = events(&store).await.iter().map(|event| event.id).collect();
    assert_eq!(there, [id, ids[0], ids[1]]);
    assert!(events(&database.store().await).await.is_empty(), "the log beside it has nothing of it");
}
