//! Publishing by other clients and languages, as the guide shows it, and through PgBouncer.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pillarbox::{ErrorKind, NewEvent, Payload};
use pillarbox_postgres::{PostgresStore, migrate, publish, publish_all};
use pillarbox_testkit::postgres::Server;

use crate::fixture::{Database, connect, events};

const PAYLOADS: [&str; 6] = [
    r#"{"quote":"\"'","back":"\\ \\\\","line":"a\nb\r\n\tc","percent":"%s :x $1"}"#,
    "{\"emoji\":\"\u{1F4EE}\u{1F468}\u{200D}\u{1F469}\"}",
    r#""a\u0000b""#,
    "123456789012345678901234567890.000000000000000000000000001e400",
    " [ 1 ,\n 2 ] ",
    "null",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs an example and looks for what it has published for each payload, byte for byte.
async fn check_example(program: &Path, example: &str) {
    let database = Database::new().await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(serde_json::to_string(&PAYLOADS).unwrap().as_bytes()).unwrap();
    let mut command = Command::new(program);
    command.arg(root().join("examples").join(example)).arg(database.url()).arg(file.path());
    let output = command.output().unwrap_or_else(|error| panic!("{} cannot be run: {error}", program.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example} failed; `cargo xtask test` installs what it needs\n{said}");
    let events = events(&database.store().await).await;
    let orders: Vec<_> = events.iter().filter(|event| &*event.topic == "orders").collect();
    let payloads: Vec<_> = orders.iter().map(|event| event.payload.clone()).collect();
    assert_eq!(payloads, PAYLOADS.map(|text| Payload::Json(text.into())));
    assert!(orders.iter().all(|event| event.key.is_some() && &*event.r#type == "order.placed"));
    let reminders: Vec<_> = events.iter().filter(|event| &*event.topic == "reminders").collect();
    assert!(reminders.iter().all(|event| event.deliver_at > Some(event.created_at)));
}

/// The Python with the packages of the examples.
fn python() -> PathBuf {
    root().join("target/venv/bin/python3")
}

#[tokio::test]
async fn the_example_for_psycopg_publishes() {
    check_example(&python(), "python/publish_psycopg.py").await;
}

#[tokio::test]
async fn the_example_for_sqlalchemy_publishes() {
    check_example(&python(), "python/publish_sqlalchemy.py").await;
}

#[tokio::test]
async fn the_example_for_node_pg_publishes() {
    check_example("node".as_ref(), "node/publish_pg.mjs").await;
}

#[tokio::test]
async fn the_example_for_drizzle_publishes() {
    check_example("node".as_ref(), "node/publish_drizzle.mjs").await;
}

fn user_crates() -> PathBuf {
    root().join("tests/user-crates")
}

/// Builds and runs a small application; what it prints.
fn run_user_crate(which: &[&str], url: &str) -> String {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(user_crates()).args(["run", "--quiet", "--locked"]).args(which);
    command.env("CARGO_TARGET_DIR", root().join("target/user-crates")).env("DATABASE_URL", url);
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{which:?} failed");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Small applications with tokio-postgres, sqlx, SeaORM and Diesel, built as a user would build them.
#[tokio::test]
#[ignore = "builds some 200 crates; `cargo xtask test --full` runs it"]
async fn applications_with_other_clients_build_and_publish() {
    let database = Database::new().await;
    let clients = ["tokio-postgres", "sqlx", "sea-orm", "diesel"];
    for client in clients {
        let id: uuid::Uuid = run_user_crate(&["--package", &format!("with-{client}")], database.url()).parse().unwrap();
        let events = events(&database.store().await).await;
        let event = events.iter().find(|event| event.id == id).unwrap();
        assert_eq!(event.key.as_deref(), Some(client));
        assert_eq!(event.payload, Payload::Json(r#"{"total":42}"#.into()));
    }
    let tree = Command::new(env!("CARGO")).current_dir(user_crates()).args(["tree", "--locked"]).output().unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.contains("tokio-postgres") && !tree.contains("sqlite"), "the PostgreSQL crates bring no SQLite along");
}

/// One server connection for everybody, given to another client with each transaction.
const TRANSACTION_MODE: [(&str, &str); 2] = [("pool_mode", "transaction"), ("default_pool_size", "1")];

#[tokio::test]
async fn publishers_work_through_pgbouncer_in_transaction_mode() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let name = database.url().rsplit('/').next().unwrap();
    let bouncer = server.bouncer(&TRANSACTION_MODE).unwrap();
    let url = bouncer.url(name);
    let (mut one, mut two) = (connect(&url).await, connect(&url).await);
    for round in 0..10 {
        // Each transaction gets the one server connection anew: what the other client has prepared there must not matter.
        for client in [&mut one, &mut two] {
            let tx = client.transaction().await.unwrap();
            publish(&tx, &NewEvent::new("t", "y").key("k").json_text("{}")).await.unwrap();
            publish(&tx, &NewEvent::new("t", "y").dedup_key(format!("{round}"))).await.unwrap();
            publish_all(&tx, &[NewEvent::new("t", "y"), NewEvent::new("t", "y")]).await.unwrap();
            tx.batch_execute("select pillarbox.publish('t', 'y', key => 'k', ordered => true)").await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    let pids = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
    assert_eq!(database.number(pids).await, 1, "all through one connection");
    assert_eq!(events(&database.store().await).await.len(), 10 * 2 * 5 - 10);
}

#[tokio::test]
#[ignore = "builds some 100 crates; `cargo xtask test --full` runs it"]
async fn publishers_by_sqlx_work_through_pgbouncer_in_transaction_mode() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let name = database.url().rsplit('/').next().unwrap();
    // What sqlx asks for when it connects.
    let settings = [TRANSACTION_MODE[0], TRANSACTION_MODE[1], ("ignore_startup_parameters", "extra_float_digits")];
    let bouncer = server.bouncer(&settings).unwrap();
    run_user_crate(&["--package", "with-sqlx", "--bin", "behind_pooler"], &bouncer.url(name));
    assert_eq!(events(&database.store().await).await.len(), 10 * 2 + 10);
}

#[tokio::test]
async fn a_store_behind_pgbouncer_is_refused_at_once_with_what_to_do() {
    let server = Server::builder().start().unwrap();
    let database = Database::on(&server).await;
    let name = database.url().rsplit('/').next().unwrap();
    let silently = [TRANSACTION_MODE[0], TRANSACTION_MODE[1], ("ignore_startup_parameters", "options")];
    let session_mode = [("pool_mode", "session")];
    for settings in [&TRANSACTION_MODE[..], &silently, &session_mode] {
        let bouncer = server.bouncer(settings).unwrap();
        let refused = [
            PostgresStore::open(&bouncer.url(name)).await.map(drop),
            migrate(&bouncer.url(name).parse().unwrap()).await.map(drop),
        ];
        for error in refused.map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{settings:?}: {error}");
            let said = error.to_string();
            assert!(
                said.contains("direct connection") && said.contains("settings of a session"),
                "{settings:?}: {said}"
            );
        }
    }
}
