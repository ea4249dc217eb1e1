//! The inbox: an event id is accepted once a consumer, in the receiver's own transaction.

use pillarbox::ErrorKind;
use pillarbox_sqlite::accept;
use rusqlite::{Connection, TransactionBehavior};
use uuid::Uuid;

use crate::fixture::Database;

/// Accepts in a transaction of its own.
fn accept_alone(connection: &mut Connection, consumer: &str, id: Uuid) -> bool {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let first = accept(&tx, consumer, id).unwrap();
    tx.commit().unwrap();
    first
}

#[test]
fn an_id_is_accepted_once_a_consumer() {
    let database = Database::new();
    let mut connection = database.connect();
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    assert!(accept_alone(&mut connection, "billing", first));
    assert!(!accept_alone(&mut connection, "billing", first));
    assert!(accept_alone(&mut connection, "billing", second));
    assert!(accept_alone(&mut connection, "mailer", first), "another consumer has an inbox of its own");
    let tx = connection.transaction().unwrap();
    for consumer in ["", &"x".repeat(1025)] {
        assert_eq!(accept(&tx, consumer, first).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn plain_sql_does_the_same_however_the_id_is_written() {
    let database = Database::new();
    let (mut connection, id) = (database.connect(), Uuid::now_v7());
    let sql = "insert into pillarbox_inbox (consumer, id) values ('billing', ?1) on conflict do nothing";
    assert_eq!(connection.execute(sql, [id.to_string().to_uppercase()]).unwrap(), 1);
    assert_eq!(connection.execute(sql, [id.to_string()]).unwrap(), 0);
    assert!(!accept_alone(&mut connection, "billing", id));
    assert!(connection.execute(sql, ["no id"]).is_err());
}

#[test]
fn a_rollback_forgets() {
    let database = Database::new();
    let (mut connection, id) = (database.connect(), Uuid::now_v7());
    let tx = connection.transaction().unwrap();
    assert!(accept(&tx, "billing", id).unwrap());
    tx.rollback().unwrap();
    assert!(accept_alone(&mut connection, "billing", id));
    assert!(!accept_alone(&mut connection, "billing", id));
}

#[test]
fn of_many_at_once_one_accepts() {
    let database = Database::new();
    let ids: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    let accept_all = || {
        let mut connection = database.connect();
        ids.iter().filter(|id| accept_alone(&mut connection, "billing", **id)).count()
    };
    let accepted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(accept_all)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(accepted, ids.len());
}
