use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use pillarbox::testing::{Capture, run_until_idle};
use pillarbox::{Payload, Relay, Subscription};
use pillarbox_sqlite::SqliteStore;
use rusqlite::Connection;

/// Payloads that have broken other outboxes: each is JSON text that must arrive byte for byte.
const PAYLOADS: [&str; 14] = [
    r#"{"plain": true}"#,
    r#"{"quotes": "she said \"no\", it's 'fine'; -- drop table orders"}"#,
    r#"{"backslashes": "C:\\temp\\new \\\\ \\u0041"}"#,
    "{\n  \"newlines\": \"a\\nb\\r\\nc\",\r\n\t\"tab\":\t\"\\t\"\n}",
    r#"{"emoji": "📮 👩‍👩‍👧‍👦 e\u0301 é", "escaped": "\ud83d\udcee"}"#,
    r#"{"nul": "before\u0000after"}"#,
    r#"{"huge": 1e400, "tiny": 1e-400, "negative": -0.0}"#,
    r#"{"digits": 123456789012345678901234567890.123456789012345678901234567890}"#,
    r#"{"same": 1, "same": 2, "order": {"z": 1, "a": 2}}"#,
    r#"  [1,2 , 3]  "#,
    r#""a text alone""#,
    "null",
    "-12.50",
    "{\"separators\": \"\u{2028}\u{2029}\u{feff}\"}",
];

#[tokio::test]
async fn what_python_inserts_arrives_byte_for_byte() {
    check("python3", "python/publish.py", "python_orders").await;
}

#[tokio::test]
async fn what_node_inserts_arrives_byte_for_byte() {
    let packages = examples().join("node/node_modules");
    assert!(packages.exists(), "the Node example's packages are missing: run `npm ci` in examples/node");
    check("node", "node/publish.mjs", "node_orders").await;
}

/// Runs a script that places one order a payload, then lets a relay deliver and compares.
async fn check(program: &str, script: &str, table: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (database, payloads) = (folder.path().join("app.db"), folder.path().join("payloads.json"));
    pillarbox_sqlite::migrate(&database).unwrap();
    std::fs::write(&payloads, serde_json::to_string(&PAYLOADS).unwrap()).unwrap();

    let output = Command::new(program)
        .arg(examples().join(script))
        .args([&database, &payloads])
        .output()
        .unwrap_or_else(|error| panic!("{program} cannot be run ({error}); `cargo xtask test` installs it"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let events = delivered(&database).await;
    let arrived: Vec<&str> = events.iter().map(|event| text(&event.payload)).collect();
    assert_eq!(arrived, PAYLOADS);
    let sql = format!("select group_concat(content, '|') from (select content from {table} order by id)");
    let orders: String = Connection::open(&database).unwrap().query_row(&sql, [], |row| row.get(0)).unwrap();
    assert_eq!(orders, PAYLOADS.join("|"), "each order is there with its event");
    let ids: std::collections::HashSet<_> = events.iter().map(|event| event.id).collect();
    assert_eq!(ids.len(), PAYLOADS.len(), "the table's default gives each event an id of its own");
    assert!(ids.iter().all(|id| id.get_version_num() == 7));
}

async fn delivered(database: &Path) -> Vec<Arc<pillarbox::Event>> {
    let capture = Capture::new();
    let subscription = Subscription { lanes: 1, workers: 1, ..Subscription::new("test") };
    let store = SqliteStore::open(database).unwrap();
    run_until_idle(Relay::builder(store).subscribe(subscription, Arc::new(capture.clone()))).await.unwrap();
    capture.events()
}

fn text(payload: &Payload) -> &str {
    match payload {
        Payload::Json(text) => text,
        other => panic!("{other:?} is no JSON text"),
    }
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}
