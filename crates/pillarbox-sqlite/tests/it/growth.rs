//! What statements cost as a log grows: how SQLite finds what they ask for.

use std::collections::BTreeMap;
use std::path::Path;

use rusqlite::Connection;

use crate::fixture::Database;

/// Tables that grow without end, and must be looked up in.
const GROWING: [&str; 4] = ["pillarbox_event", "pillarbox_event_kept", "pillarbox_delivery", "pillarbox_dead_range"];

/// Statements that go through a whole table or index, and why they may. Everything else has to find what it wants.
const WHOLE: [(&str, &str); 7] = [
    ("deliveries_without_event", "doctor checks every delivery"),
    ("odd_ids", "doctor checks every id"),
    ("kept_count", "counts up to a limit"),
    ("prune_kept", "retention, in slices"),
    ("risen", "the ranges that were proven dead; SQLite leaves hardly any"),
    ("reset", "empties everything"),
    ("version_id", "of what is kept aside; the log has an index"),
];

/// The ways in which a list says which rows it looks at.
const LISTED: [&str; 4] =
    ["", "and d.key = ?3", "and d.stored = 'dead'", "and d.stored in ('pending', 'processing', 'retrying')"];

/// How SQLite goes about a statement, without those lines that find something.
fn scans(connection: &Connection, sql: &str) -> Vec<String> {
    let mut statement = connection.prepare(&format!("explain query plan {sql}")).unwrap();
    let lines = statement.raw_query().mapped(|row| row.get::<_, String>(3)).collect::<Result<Vec<_>, _>>().unwrap();
    let grows = |line: &String| {
        let aliases = GROWING.iter().any(|table| line.split_whitespace().any(|word| word == *table));
        line.starts_with("SCAN ") && (aliases || is_alias(sql, line))
    };
    lines.into_iter().filter(grows).collect()
}

/// Whether a scan is of an alias of a table that grows.
fn is_alias(sql: &str, line: &str) -> bool {
    let alias = line.split_whitespace().nth(1).unwrap_or_default();
    GROWING
        .iter()
        .any(|table| sql.contains(&format!("{table} as {alias}\n")) || sql.contains(&format!("{table} as {alias} ")))
        || (sql.contains("pillarbox_delivery_state as") && alias == "d")
}

#[test]
fn no_statement_reads_a_whole_table_that_grows() {
    let database = Database::new();
    let connection = database.connect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sql");
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let variants: &[&str] = if text.contains("@rows@") { &LISTED } else { &[""] };
        for rows in variants {
            for sql in text.replace("@rows@", rows).split(";\n").filter(|sql| !sql.trim().is_empty()) {
                let scans = scans(&connection, sql);
                if !scans.is_empty() {
                    found.entry(format!("{name} {rows}").trim().to_owned()).or_insert_with(Vec::new).extend(scans);
                }
            }
        }
    }
    let allowed: BTreeMap<&str, &str> = WHOLE.into_iter().collect();
    found.retain(|name, _| !allowed.contains_key(name.as_str()));
    assert!(found.is_empty(), "{found:#?}");
}
