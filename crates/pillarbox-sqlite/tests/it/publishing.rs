use std::sync::Arc;

use pillarbox::admin::{Change, ListQuery, Operator, State};
use pillarbox::limit::{CONTENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, PAYLOAD_BYTES_MAX};
use pillarbox::testing::Capture;
use pillarbox::{ErrorKind, Mode, NewEvent, OnDead, Payload, Relay, Start, Subscription, Timestamp};
use pillarbox_sqlite::{Limits, PAYLOAD_BYTES_MAX_HIGHEST, migrate_connection, publish, testing::published};
use rusqlite::Connection;
use uuid::Uuid;

use crate::fixture::{Database, events};

#[tokio::test]
async fn a_plain_insert_gets_every_default() {
    let database = Database::new();
    database.execute(r#"insert into pillarbox_event (topic, key, type, payload) values ('t', 'k', 'y', '{"a":1}')"#);
    let event = events(&database.store()).await.remove(0);
    assert_eq!(event.payload, Payload::Json(r#"{"a":1}"#.into()));
    assert_eq!((event.id.get_version_num(), event.id.get_variant()), (7, uuid::Variant::RFC4122));
    let (seconds, nanos) = event.id.get_timestamp().unwrap().to_unix();
    let from_id = Timestamp(seconds as i64 * 1000 + i64::from(nanos) / 1_000_000);
    assert_eq!(from_id, event.created_at);
    assert!(Timestamp::now().0 - event.created_at.0 < 60_000 && event.created_at.0 <= Timestamp::now().0 + 1);
    assert!(event.headers.is_empty() && event.deliver_at.is_none());
}

#[tokio::test]
async fn payloads_arrive_as_they_were_sent_by_both_paths() {
    let texts = [
        r#"{"quote":"\"'","back":"\\ \\\\","line":"a\nb\r\n\tc"}"#,
        "{\"emoji\":\"\u{1F4EE}\u{1F468}\u{200D}\u{1F469}\"}",
        r#""a\u0000b""#,
        "123456789012345678901234567890.000000000000000000000000001e400",
        " [ 1 ,\n 2 ] ",
        "null",
        "\"\"",
    ];
    let database = Database::new();
    database.publish(&texts.map(|text| NewEvent::new("t", "y").json_text(text)));
    let connection = database.connect();
    for text in texts {
        let sql = "insert into pillarbox_event (topic, type, payload) values ('t', 'y', ?1)";
        connection.execute(sql, [text]).unwrap();
    }
    let events = events(&database.store()).await;
    let expected = texts.iter().chain(&texts).map(|text| Payload::Json((*text).into()));
    assert_eq!(events.iter().map(|event| event.payload.clone()).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}

/// Each has bytes that are no characters somewhere, and what of it that is.
const NO_TEXT: [(&str, &str); 8] = [
    ("topic", "insert into pillarbox_event (topic, type, key) values (cast(x'74ff' as text), 'y', 'a')"),
    ("type", "insert into pillarbox_event (topic, type, key) values ('t', cast(x'79ff' as text), 'b')"),
    ("key", "insert into pillarbox_event (topic, type, key) values ('t', 'y', cast(x'ff' as text))"),
    ("key", "insert into pillarbox_event (topic, type, key) values ('t', 'y', cast(x'fe' as text))"),
    ("payload", "insert into pillarbox_event (topic, type, payload) values ('t', 'y', cast(x'22ff22' as text))"),
    (
        "headers",
        "insert into pillarbox_event (topic, type, headers) values ('t', 'y', cast(x'7b2261223a22ff227d' as text))",
    ),
    (
        "content type",
        "insert into pillarbox_event (topic, type, payload, content_type) values ('t', 'y', x'00', cast(x'ff' as text))",
    ),
    ("key", "insert into pillarbox_event (topic, type, key) values ('t', 'y', cast(x'ff' as text))"),
];

/// What the error of a malformed event says.
fn no_text(what: &str) -> String {
    format!("its {what} is no text in UTF-8, which SQLite does not check")
}

#[tokio::test]
async fn text_that_is_not_utf8_is_said_and_no_two_keys_become_one() {
    let database = Database::new();
    NO_TEXT.iter().for_each(|(_, sql)| database.execute(sql));
    database.execute("insert into pillarbox_event (topic, type, key) values ('t', 'y', '\u{FFFD}')");
    let events = events(&database.store()).await;
    for ((what, _), event) in NO_TEXT.iter().zip(&events) {
        assert_eq!(event.malformed.as_deref(), Some(&*no_text(what)), "{event:?}");
        assert!(*what != "key" || event.key.is_none(), "{event:?}");
    }
    let sound = events.last().unwrap();
    assert_eq!(
        (sound.key.as_deref(), &sound.malformed),
        (Some("\u{FFFD}"), &None),
        "a mark that was published is text"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_no_text_is_dead_alone() {
    let database = Database::new();
    let good = "insert into pillarbox_event (topic, type, key) values ('t', 'y', 'good')";
    for (_, sql) in NO_TEXT {
        database.execute(&format!("{sql}; {good}"));
    }
    // So many that they would be taken for a bad deploy.
    let many = "with recursive n (n) as (select 1 union all select n + 1 from n where n < 100) \
                insert into pillarbox_event (topic, type, key, payload) \
                select 't', 'y', 'k' || n, cast(x'22ff22' as text) from n";
    database.execute(&format!("{many}; {good}"));

    let capture = Capture::new();
    let queue = Subscription { mode: Mode::Queue, ..Subscription::new("queue") };
    let stream = Subscription { on_dead: OnDead::Block, ..Subscription::new("stream") };
    let relay = Relay::builder(database.store());
    let relay = relay.subscribe(stream, Arc::new(capture.clone())).subscribe(queue, Arc::new(capture.clone()));
    let relay = relay.start().await.unwrap();
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let keys: Vec<_> = capture.events().iter().map(|event| event.key.clone().unwrap_or_default()).collect();
    assert_eq!(keys, vec!["good".into(); 2 * (NO_TEXT.len() + 1)], "nothing but what is text is sent, to each once");

    let store = database.store();
    for subscription in ["stream", "queue"] {
        let subscription = Some(subscription.to_owned());
        let rows = store.list(&ListQuery { subscription, limit: 1_000, ..ListQuery::default() }).await.unwrap();
        let dead: Vec<_> = rows.iter().filter(|row| row.state == Some(State::Dead)).collect();
        assert_eq!((dead.len(), rows.len()), (NO_TEXT.len() + 100, dead.len()), "{rows:?}");
        for ((what, _), row) in NO_TEXT.iter().zip(&dead) {
            assert!(row.error.as_deref().unwrap_or_default().contains(&no_text(what)), "{row:?}");
            assert_eq!(row.attempts, Some(1), "{row:?}");
        }
    }
    let status = store.status().await.unwrap();
    assert!(status.subscriptions.iter().all(|one| one.pending == 0), "{status:?}");
}

/// The anchor of a lane is compared by the id of its event: what cannot be read as text kept a relay from owning the lane.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_is_no_text_stops_no_relay() {
    let database = Database::new();
    let id = format!("ff{}", "61".repeat(35));
    let capture = Capture::new();
    for count in 1..=2 {
        database.execute(&format!(
            "insert into pillarbox_event (topic, type, key, id) values ('t', 'y', 'k', cast(x'{id}' as text))"
        ));
        let relay = Relay::builder(database.store()).subscribe(Subscription::new("s"), Arc::new(capture.clone()));
        let relay = relay.start().await.unwrap();
        relay.until_idle().await.unwrap();
        relay.drain().await.unwrap();
        assert_eq!(capture.events().len(), count);
    }
    let event = &capture.events()[0];
    assert_eq!((event.id, &event.malformed), (capture.events()[1].id, &None), "the same bytes, the same id");
    let to = Start::Position(0);
    let rewind = Change::Rewind { subscription: "s".into(), to, key: Some("k".into()) };
    assert_eq!(database.store().change(&rewind, false).await.unwrap().count, 2);
}

#[tokio::test]
async fn headers_and_content_types_have_limits_for_both_paths() {
    let database = Database::new();
    let connection = database.connect();
    let headers = |bytes: usize| format!("{{\"a\":\"{}\"}}", "x".repeat(bytes - 8));
    assert_eq!(headers(HEADERS_BYTES_MAX).len(), HEADERS_BYTES_MAX);
    let insert = |column: &str, value: &str| {
        connection
            .execute(&format!("insert into pillarbox_event (topic, type, {column}) values ('t', 'y', ?1)"), [value])
    };
    insert("headers", &headers(HEADERS_BYTES_MAX)).unwrap();
    let error = insert("headers", &headers(HEADERS_BYTES_MAX + 1)).unwrap_err();
    assert!(error.to_string().contains("headers_has_at_most_65536_bytes"), "{error}");
    insert("content_type", &"x".repeat(CONTENT_TYPE_BYTES_MAX)).unwrap();
    let error = insert("content_type", &"x".repeat(CONTENT_TYPE_BYTES_MAX + 1)).unwrap_err();
    assert!(error.to_string().contains("content_type_has_at_most_255_bytes"), "{error}");
    let large = NewEvent::new("t", "y").header("a", "x".repeat(HEADERS_BYTES_MAX));
    let error = publish(&connection, &large).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("headers_bytes_max"), "{error}");
    let large = NewEvent { content_type: Some("x".repeat(CONTENT_TYPE_BYTES_MAX + 1)), ..NewEvent::new("t", "y") };
    let error = publish(&connection, &large).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("content_type_bytes_max"), "{error}");
    assert_eq!(events(&database.store()).await.len(), 2);
}

#[tokio::test]
async fn the_payload_limit_holds_at_its_edge_for_plain_sql() {
    let database = Database::new();
    let connection = database.connect();
    let sql = "insert into pillarbox_event (topic, type, payload) values ('t', 'y', zeroblob(?1))";
    let error = connection.execute(sql, [PAYLOAD_BYTES_MAX as i64 + 1]).unwrap_err();
    assert!(error.to_string().contains("payload_bytes_max"), "{error}");
    connection.execute(sql, [PAYLOAD_BYTES_MAX as i64]).unwrap();
    assert_eq!(events(&database.store()).await.len(), 1);
}

#[tokio::test]
async fn the_payload_limit_can_be_set_for_everybody() {
    let database = Database::new();
    let store = database.store();
    let before = database.connect();
    let insert = |bytes: usize| {
        before.execute(
            "insert into pillarbox_event (topic, type, payload) values ('t', 'y', zeroblob(?1))",
            [bytes as i64],
        )
    };
    let limit = |bytes| store.set_limits(Limits { payload_bytes_max: Some(bytes), ..Limits::default() });
    insert(2000).unwrap();
    for bytes in [1000, 2 * PAYLOAD_BYTES_MAX, 10] {
        limit(bytes).await.unwrap();
        let event = |length| NewEvent::new("t", "y").bytes(vec![0; length], "x");
        store.publish(&[event(bytes)]).await.unwrap();
        assert_eq!(store.publish(&[event(bytes + 1)]).await.unwrap_err().kind(), ErrorKind::Invalid);
        insert(bytes).unwrap();
        insert(bytes + 1).unwrap_err();
    }
    for bytes in [0, PAYLOAD_BYTES_MAX_HIGHEST + 1] {
        assert_eq!(limit(bytes).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    let sound: String = before.query_row("pragma integrity_check", [], |row| row.get(0)).unwrap();
    assert!(!sound.contains("malformed"), "{sound}");
    assert_eq!(events(&store).await.len(), 7);
}

#[test]
fn what_no_event_may_be_is_refused_with_its_reason() {
    let database = Database::new();
    let connection = database.connect();
    let check = |event: NewEvent, reason: &str| {
        let error = publish(&connection, &event).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(reason), "{error} should speak of {reason}");
    };
    check(NewEvent::new("", "y"), "topic");
    check(NewEvent::new("t", ""), "type");
    check(NewEvent::new("t", "y").key(""), "key");
    check(NewEvent::new("t".repeat(1025), "y"), "name_bytes_max");
    check(NewEvent::new("t", "y").json_text("{not json"), "JSON");
    check(NewEvent::new("t", "y").dedup_key("d"), "transaction");
    publish(&connection, &NewEvent::new("t".repeat(1024), "y")).unwrap();
    let insert = |columns: &str, values: &str, reason: &str| {
        let sql = format!("insert into pillarbox_event (topic, type, {columns}) values ('t', 'y', {values})");
        let error = connection.execute(&sql, []).unwrap_err().to_string();
        assert!(error.contains(reason), "{error} should speak of {reason}");
    };
    insert("deliver_at", "'2026-01-01T00:00:00Z'", "deliver_at_is_integer_milliseconds_since_1970");
    insert("deliver_at", "-1", "deliver_at_is_integer_milliseconds_since_1970");
    insert("deliver_at", "253402300800000", "deliver_at_is_integer_milliseconds_since_1970");
    insert("created_at", "-1", "created_at_is_milliseconds_since_1970");
    insert("created_at", "253402300800000", "created_at_is_milliseconds_since_1970");
    check(NewEvent::new("t", "y").deliver_at(Timestamp(i64::MAX)), "deliver at");
    insert("headers", "'[]'", "headers_is_a_json_object");
    insert("headers", "'{'", "headers_is_a_json_object");
    insert("payload", "5", "payload_is_json_text_or_a_blob");
    insert("key", "''", "key_has_1_to_1024_bytes");
    insert("id", "'short'", "id_has_36_characters");
    assert_eq!(database.number("select count(*) from pillarbox_event"), 1);
    let error = connection.execute("update pillarbox_event set topic = 'other'", []).unwrap_err();
    assert!(error.to_string().contains("never changed"), "{error}");
}

#[tokio::test]
async fn a_dedup_key_publishes_once_inside_its_window() {
    let database = Database::new();
    let event = || NewEvent::new("t", "y").key("k").dedup_key("d");
    let first = database.publish(&[event(), event()]);
    assert_eq!(first[0], first[1]);
    let others = [
        NewEvent::new("u", "y").key("k").dedup_key("d"),
        NewEvent::new("t", "y").key("l").dedup_key("d"),
        NewEvent::new("t", "y").dedup_key("d"),
        NewEvent::new("t", "y").key("k").dedup_key("e"),
    ];
    assert_eq!(database.publish(&others).iter().filter(|id| **id != first[0]).count(), 4);

    let window = 86_400_000;
    let age = |age: i64| {
        let at = Timestamp::now().0 - age;
        database.execute(&format!("update pillarbox_dedup set created_at = {at} where topic = 't'"));
    };
    age(window - 60_000);
    assert_eq!(database.publish(&[event()])[0], first[0], "still inside");
    age(window + 1);
    let second = database.publish(&[event()])[0];
    assert_ne!(second, first[0], "outside: a new event");
    assert_eq!(database.publish(&[event()])[0], second, "which is now the first of its window");
    assert_eq!(events(&database.store()).await.len(), 6);
}

#[test]
fn a_refused_event_does_not_use_up_its_dedup_key() {
    let database = Database::new();
    let mut connection = database.connect();
    let tx = connection.transaction().unwrap();
    publish(&tx, &NewEvent::new("t", "y").dedup_key("d").json_text("{")).unwrap_err();
    publish(&tx, &NewEvent::new("t", "y").dedup_key("d").json_text("{}")).unwrap();
    tx.commit().unwrap();
    assert_eq!(database.number("select count(*) from pillarbox_event"), 1);
}

#[test]
fn a_test_sees_what_its_open_transaction_has_published() {
    let database = Database::new();
    database.publish_keys(&["committed"]);
    let mut connection = database.connect();
    let tx = connection.transaction().unwrap();
    assert!(published(&tx).unwrap().is_empty());
    let id = publish(&tx, &NewEvent::new("t", "y").key("open")).unwrap();
    let events = published(&tx).unwrap();
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), [id]);
    drop(tx);
    assert!(published(&connection).unwrap().is_empty());

    let memory = Connection::open_in_memory().unwrap();
    migrate_connection(&memory).unwrap();
    let own = Uuid::new_v4();
    publish(&memory, &NewEvent::new("t", "y").id(own)).unwrap();
    assert_eq!(published(&memory).unwrap()[0].id, own);
}

#[test]
fn publishing_without_a_schema_names_the_command() {
    let memory = Connection::open_in_memory().unwrap();
    let error = publish(&memory, &NewEvent::new("t", "y")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("pillarbox migrate"), "{error}");
}
