//! The inbox: an event id is accepted once a consumer, in the receiver's own transaction.

use std::time::Duration;

use pillarbox::ErrorKind;
use pillarbox::admin::{Operator, PrunePolicy};
use pillarbox_postgres::{PgConfig, PostgresStore, Schema, accept, migrate, print_roles};
use pillarbox_testkit::postgres::Server;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use crate::fixture::{Database, connect};

#[tokio::test]
async fn an_id_is_accepted_once_a_consumer() {
    let database = Database::new().await;
    let client = database.client().await;
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    assert!(accept(&client, "billing", first).await.unwrap());
    assert!(!accept(&client, "billing", first).await.unwrap());
    assert!(accept(&client, "billing", second).await.unwrap());
    assert!(accept(&client, "mailer", first).await.unwrap(), "another consumer has an inbox of its own");
    let row = client.query_one("select pillarbox.accept('billing', $1)", &[&first]).await.unwrap();
    assert!(!row.get::<_, bool>(0), "the same function for every language");
    for consumer in ["", &"x".repeat(1025)] {
        assert_eq!(accept(&client, consumer, first).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn a_rollback_forgets() {
    let database = Database::new().await;
    let (mut client, id) = (database.client().await, Uuid::now_v7());
    for (commit, expected) in [(false, true), (true, true), (true, false)] {
        let tx = client.transaction().await.unwrap();
        assert_eq!(accept(&tx, "billing", id).await.unwrap(), expected);
        if commit { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
    }
}

/// Two accept the same id at once: the second waits, and goes on if and only if the first was rolled back.
async fn check_two_at_once(commit: bool) {
    let database = Database::new().await;
    let (mut first, second, id) = (database.client().await, database.client().await, Uuid::now_v7());
    let backend: i32 = second.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let tx = first.transaction().await.unwrap();
    assert!(accept(&tx, "billing", id).await.unwrap());
    let waiting = tokio::spawn(async move { accept(&second, "billing", id).await.unwrap() });
    let waits = format!("select count(*) from pg_stat_activity where pid = {backend} and wait_event_type = 'Lock'");
    while database.number(&waits).await == 0 {
        assert!(!waiting.is_finished(), "the second did not wait");
    }
    if commit {
        tx.commit().await.unwrap()
    } else {
        tx.rollback().await.unwrap()
    }
    assert_eq!(waiting.await.unwrap(), !commit);
}

#[tokio::test]
async fn a_second_acceptor_waits_for_the_first() {
    check_two_at_once(true).await;
    check_two_at_once(false).await;
}

#[tokio::test]
async fn under_repeatable_read_a_late_acceptor_fails_and_may_try_again() {
    let database = Database::new().await;
    let (mut late, id) = (database.client().await, Uuid::now_v7());
    let tx = late.build_transaction().isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
    let tx = tx.start().await.unwrap();
    tx.execute("select 1", &[]).await.unwrap();
    assert!(accept(&database.client().await, "billing", id).await.unwrap());
    let error = tx.query("select pillarbox.accept('billing', $1)", &[&id]).await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
    tx.rollback().await.unwrap();
    assert!(!accept(&late, "billing", id).await.unwrap());
}

#[tokio::test]
async fn a_log_in_another_schema_has_its_own_inbox() {
    let database = Database::new().await;
    migrate(&format!("{}?schema=other_log", database.url()).parse::<PgConfig>().unwrap()).await.unwrap();
    let (client, id) = (database.client().await, Uuid::now_v7());
    let other = Schema::new("other_log").unwrap();
    assert!(accept(&client, "billing", id).await.unwrap());
    assert!(other.accept(&client, "billing", id).await.unwrap());
    assert!(!other.accept(&client, "billing", id).await.unwrap());
    assert!(Schema::new("x; drop").is_err());
}

#[tokio::test]
async fn a_publisher_may_accept_and_a_relay_may_forget() {
    // A server of its own, for roles belong to the whole cluster.
    let server = Server::builder().start().unwrap();
    let database = server.create_database().unwrap();
    migrate(&database.url().parse::<PgConfig>().unwrap()).await.unwrap();
    database.psql(&print_roles("pillarbox")).unwrap();
    let logins = "create role app login in role pillarbox_publisher; create role relay login in role pillarbox_relay;
        create role stranger login; grant usage on schema pillarbox to stranger";
    database.psql(logins).unwrap();
    let url = |role| server.url_as(role, database.name());
    let (app, id) = (connect(&url("app")).await, Uuid::now_v7());
    assert!(accept(&app, "billing", id).await.unwrap());
    assert!(!accept(&app, "billing", id).await.unwrap());
    for sql in ["select * from pillarbox.inbox", "delete from pillarbox.inbox"] {
        let error = app.batch_execute(sql).await.unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}");
    }
    assert!(accept(&connect(&url("stranger")).await, "billing", id).await.is_err());
    let store = PostgresStore::open(&url("relay")).await.unwrap();
    let all = PrunePolicy { inbox: Some(Duration::ZERO), ..PrunePolicy::default() };
    assert_eq!(store.prune(&all).await.unwrap().inbox, 1);
}
