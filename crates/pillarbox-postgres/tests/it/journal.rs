//! The journal in the application's own transaction: tokio-postgres and sqlx, isolation levels, who waits for whom.

use pillarbox::journal::{Appended, Expected};
use pillarbox::{ErrorKind, Event, NewEvent, Payload};
use pillarbox_postgres::{Schema, append, head, migrate, read};
use pillarbox_testkit::eventually;
use tokio_postgres::IsolationLevel;

use crate::fixture::{Database, events};
use crate::pools::sqlx_pool;

/// How many sessions of this database wait for a lock.
const WAITING: &str =
    "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";

fn rolled() -> NewEvent {
    NewEvent::new("games", "dice.rolled").json_text("{\"sum\":  9}")
}

fn versions(events: &[Event]) -> Vec<i64> {
    events.iter().filter_map(|event| event.stream_version).collect()
}

#[tokio::test]
async fn an_append_is_of_the_callers_transaction() {
    let database = Database::new().await;
    let mut client = database.client().await;
    let tx = client.transaction().await.unwrap();
    append(&tx, "s", Expected::New, &[rolled(), rolled()]).await.unwrap();
    assert_eq!(head(&tx, "s").await.unwrap(), 2);
    assert_eq!(versions(&read(&tx, "s", ..).await.unwrap()), [1, 2], "its own appends are seen");
    tx.rollback().await.unwrap();
    assert_eq!(head(&client, "s").await.unwrap(), 0);

    let mut tx = client.transaction().await.unwrap();
    append(&tx, "s", Expected::New, &[rolled()]).await.unwrap();
    let savepoint = tx.savepoint("again").await.unwrap();
    let conflict = append(&savepoint, "s", Expected::New, &[rolled()]).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    savepoint.rollback().await.unwrap();
    append(&tx, "s", 1, &[rolled()]).await.unwrap();
    tx.commit().await.unwrap();
    for (range, expected) in [(1..3, vec![1, 2]), (2..9, vec![2]), (3..9, vec![])] {
        assert_eq!(versions(&read(&client, "s", range).await.unwrap()), expected);
    }
}

#[tokio::test]
async fn sqlx_appends_and_reads_as_tokio_postgres_does() {
    let database = Database::new().await;
    let (client, pool) = (database.client().await, sqlx_pool(database.url(), 1));
    let events = [
        rolled().header("by", "me"),
        NewEvent::new("games", "bytes").bytes([0, 255], "image/png"),
        NewEvent::new("games", "none"),
    ];
    let mut tx = pool.begin().await.unwrap();
    let appended = append(&mut *tx, "s", Expected::New, &events).await.unwrap();
    assert_eq!(appended, Appended { first: 1, version: 3 });
    assert_eq!(head(&mut *tx, "s").await.unwrap(), 3);
    tx.commit().await.unwrap();
    let conflict = append(&mut *pool.acquire().await.unwrap(), "s", 1, &events).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    assert!(conflict.to_string().contains("PB409: stream \"s\" is at version 3, not at 1"), "{conflict}");

    let by_sqlx = read(&mut *pool.acquire().await.unwrap(), "s", ..).await.unwrap();
    assert_eq!(by_sqlx, read(&client, "s", ..).await.unwrap());
    assert_eq!(by_sqlx[0].payload, Payload::Json("{\"sum\":  9}".into()));
    assert_eq!(by_sqlx[1].payload, Payload::Bytes([0, 255].into()));
    assert_eq!(head(&mut *pool.acquire().await.unwrap(), "none").await.unwrap(), 0);
}

#[tokio::test]
async fn under_a_snapshot_a_concurrent_append_is_a_conflict_too() {
    let database = Database::new().await;
    let (mut client, other) = (database.client().await, database.client().await);
    append(&other, "old", Expected::New, &[rolled()]).await.unwrap();
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for (stream, expected) in [("old", Expected::Any), ("new", Expected::Any)] {
            let stream = format!("{stream}-{level:?}");
            if stream.starts_with("old") {
                append(&other, &stream, Expected::New, &[rolled()]).await.unwrap();
            }
            let tx = client.build_transaction().isolation_level(level).start().await.unwrap();
            tx.batch_execute("select 1 from pillarbox.stream limit 1").await.unwrap();
            append(&other, &stream, Expected::Any, &[rolled()]).await.unwrap();
            let conflict = append(&tx, &stream, expected, &[rolled()]).await.unwrap_err();
            assert_eq!(conflict.kind(), ErrorKind::Conflict, "{stream}: {conflict}");
            assert!(conflict.to_string().contains("since this one began"), "{conflict}");
            tx.rollback().await.unwrap();
        }
    }
}

#[tokio::test]
async fn an_append_waits_for_its_stream_alone() {
    let database = Database::new().await;
    let (mut client, other) = (database.client().await, database.client().await);
    let tx = client.transaction().await.unwrap();
    append(&tx, "s", Expected::New, &[rolled()]).await.unwrap();
    append(&other, "other", Expected::New, &[rolled()]).await.expect("another stream is not waited for");
    other.batch_execute("set lock_timeout = '50ms'").await.unwrap();
    for expected in [Expected::New, Expected::Any] {
        let waited = append(&other, "s", expected, &[rolled()]).await.unwrap_err();
        assert_eq!(waited.kind(), ErrorKind::Busy, "{waited}");
    }
    tx.rollback().await.unwrap();
    append(&other, "s", Expected::New, &[rolled()]).await.expect("what was rolled back is not there");
}

/// Who is beaten to a new stream appends behind the winner, or is refused.
#[tokio::test]
async fn of_two_who_begin_a_stream_at_once_the_second_finds_it() {
    let database = Database::new().await;
    for expected in [Expected::Any, Expected::New] {
        let stream = format!("{expected:?}");
        let (mut first, second) = (database.client().await, database.client().await);
        let tx = first.transaction().await.unwrap();
        append(&tx, &stream, Expected::New, &[rolled()]).await.unwrap();
        let name = stream.clone();
        let waiting = tokio::spawn(async move { append(&second, &name, expected, &[rolled()]).await });
        let waits = async || (database.number(WAITING).await > 0).then_some(());
        eventually("the second waits", waits).await;
        tx.commit().await.unwrap();
        match (expected, waiting.await.unwrap()) {
            (Expected::Any, Ok(appended)) => assert_eq!(appended.version, 2),
            (Expected::New, Err(error)) => assert_eq!(error.kind(), ErrorKind::Conflict),
            (_, other) => panic!("{expected:?}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_journal_has_its_schema() {
    let database = Database::new().await;
    let url = format!("{}?schema=orders_log", database.url());
    migrate(&url.parse().unwrap()).await.unwrap();
    let (schema, client) = (Schema::new("orders_log").unwrap(), database.client().await);
    schema.append(&client, "s", Expected::New, &[rolled()]).await.unwrap();
    assert_eq!(versions(&schema.read(&client, "s", ..).await.unwrap()), [1]);
    assert_eq!((schema.head(&client, "s").await.unwrap(), head(&client, "s").await.unwrap()), (1, 0));
    assert!(events(&database.store().await).await.is_empty());
}
