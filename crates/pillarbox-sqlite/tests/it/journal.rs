//! The journal in the application's own transaction, and by SQL alone.

use pillarbox::journal::Expected;
use pillarbox::{ErrorKind, NewEvent};
use pillarbox_sqlite::{append, head, publish, read};
use rusqlite::{Connection, TransactionBehavior};

use crate::fixture::Database;

const APPEND: &str =
    "insert into pillarbox_journal (stream, version, topic, type, payload) values (?1, ?2, 'games', 'y', '{}')";

fn rolled() -> NewEvent {
    NewEvent::new("games", "dice.rolled")
}

fn versions(connection: &Connection, stream: &str) -> Vec<i64> {
    read(connection, stream, ..).unwrap().iter().filter_map(|event| event.stream_version).collect()
}

#[test]
fn an_append_is_of_the_callers_transaction() {
    let database = Database::new();
    let mut connection = database.connect();
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    append(&tx, "s", Expected::New, &[rolled(), rolled()]).unwrap();
    assert_eq!((head(&tx, "s").unwrap(), versions(&tx, "s")), (2, vec![1, 2]), "its own appends are seen");
    tx.rollback().unwrap();
    assert_eq!((head(&connection, "s").unwrap(), versions(&connection, "s")), (0, vec![]));

    let tx = connection.transaction().unwrap();
    append(&tx, "s", Expected::New, &[rolled()]).unwrap();
    let conflict = append(&tx, "s", Expected::New, &[rolled()]).unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    append(&tx, "s", 1, &[rolled()]).expect("the transaction goes on after a conflict");
    tx.commit().unwrap();
    assert_eq!(versions(&connection, "s"), [1, 2]);
}

#[test]
fn a_range_of_versions_is_read() {
    let database = Database::new();
    let connection = database.connect();
    append(&connection, "s", Expected::New, &vec![rolled(); 6]).unwrap();
    let of = |events: pillarbox::Result<Vec<pillarbox::Event>>| {
        events.unwrap().iter().filter_map(|event| event.stream_version).collect::<Vec<_>>()
    };
    assert_eq!(of(read(&connection, "s", 5..)), [5, 6]);
    assert_eq!(of(read(&connection, "s", 2..4)), [2, 3]);
    assert_eq!(of(read(&connection, "s", ..=2)), [1, 2]);
    assert_eq!(of(read(&connection, "s", 7..)), [0; 0]);
}

#[test]
fn sql_alone_appends_the_next_version_and_no_other() {
    let database = Database::new();
    let connection = database.connect();
    for version in 1..=3 {
        connection.execute(APPEND, (&"s", version)).unwrap();
    }
    for version in [0, 1, 3, 5] {
        let refused = connection.execute(APPEND, (&"s", version)).unwrap_err().to_string();
        assert!(refused.contains("PB409"), "{version}: {refused}");
    }
    let refusals = [
        ("(stream, version, topic, type) values ('s', 4, 'others', 'y')", "a stream has one topic"),
        ("(stream, type) values ('s', 'y')", "needs stream, version and type"),
        ("(version, type) values (1, 'y')", "needs stream, version and type"),
        ("(stream, version, topic, type, payload) values ('s', 4, 'games', 'y', 'no JSON')", "payload_is_json"),
    ];
    for (insert, said) in refusals {
        let refused = connection.execute_batch(&format!("insert into pillarbox_journal {insert}")).unwrap_err();
        assert!(refused.to_string().contains(said), "{insert}: {refused}");
    }
    assert_eq!(versions(&connection, "s"), [1, 2, 3], "what was refused left nothing");
    assert_eq!(append(&connection, "s", 3, &[rolled()]).unwrap().version, 4, "by the library behind SQL");
    connection.execute(APPEND, (&"s", 5)).expect("and by SQL behind the library");
    let id = "00000000-0000-4000-8000-000000000007";
    let with_id = "insert into pillarbox_journal (stream, version, type, id) values ('other', 1, 'y', ?1)";
    connection.execute(with_id, [id]).unwrap();
    let event = read(&connection, "other", ..).unwrap().remove(0);
    assert_eq!((event.id.to_string(), &*event.topic), (id.to_owned(), "journal"));
    let rows = "select count(*) from pillarbox_journal where stream = 's'";
    assert_eq!(connection.query_row(rows, [], |row| row.get::<_, i64>(0)).unwrap(), 5);
}

#[test]
fn no_version_is_written_twice_past_the_journal() {
    let database = Database::new();
    let connection = database.connect();
    append(&connection, "s", Expected::New, &[rolled()]).unwrap();
    let by_hand = "insert into pillarbox_event (topic, key, type, stream_version) values ('games', 's', 'y', 1)";
    connection.execute_batch(by_hand).unwrap_err();
    publish(&connection, &rolled().key("s")).expect("an event without a version is no event of the stream");
    assert_eq!(versions(&connection, "s"), [1]);
}
