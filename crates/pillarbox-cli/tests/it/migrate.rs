use std::fs;

use crate::place::Place;

#[test]
fn check_says_whether_the_schema_is_current() {
    let place = Place::empty();
    place.fails(3, &["migrate", "--check"]);
    assert!(!place.path("app.db").exists());
    assert_eq!(place.json(&["migrate"])["created"], true);
    assert_eq!(place.json(&["migrate", "--check"])["state"], "current");
    assert_eq!(place.json(&["migrate"])["applied"].as_array().unwrap().len(), 0);
}

#[test]
fn print_needs_no_database() {
    let place = Place::empty();
    let output = place.bare(&["migrate", "--print"]).output().unwrap();
    let sql = String::from_utf8(output.stdout).unwrap();
    let connection = rusqlite::Connection::open(place.path("printed.db")).unwrap();
    connection.execute_batch(&sql).unwrap();
    connection.execute("insert into pillarbox_event (topic, type) values ('t', 'y')", []).unwrap();
    assert!(place.ok(&["migrate", "--print-roles"]).contains("no roles"));
    place.ok(&["migrate", "--doorbell", "off"]);
}

#[test]
fn a_copy_is_refused_until_it_is_declared() {
    // No relay has ever run: the subscription is made in the copies.
    let place = Place::with_file_sink();
    let old = place.publish(&[]);
    for suffix in ["", "-wal"] {
        let from = place.path(&format!("app.db{suffix}"));
        if from.exists() {
            for copy in ["fresh", "adopted"] {
                fs::copy(&from, place.path(&format!("{copy}.db{suffix}"))).unwrap();
            }
        }
    }
    let text = place.fails(3, &["run", "--until-idle", "--database", "sqlite:fresh.db"]);
    assert!(text.contains("--adopt") && text.contains("--fresh"), "{text}");
    assert!(!place.path("out.ndjson").exists(), "a copy delivered");

    place.ok(&["migrate", "--fresh", "--database", "sqlite:fresh.db"]);
    place.ok(&["run", "--until-idle", "--database", "sqlite:fresh.db"]);
    assert!(!place.path("out.ndjson").exists(), "a fresh copy delivered what is old");
    let new = place.publish(&["--database", "sqlite:fresh.db"]);
    place.ok(&["rewind", "out", "--to", "start", "--yes", "--database", "sqlite:fresh.db"]);
    place.ok(&["run", "--until-idle", "--database", "sqlite:fresh.db"]);
    let text = place.read("out.ndjson");
    assert!(text.contains(&new) && !text.contains(&old), "a fresh copy delivered {text}");

    place.ok(&["migrate", "--adopt", "--database", "sqlite:adopted.db"]);
    place.ok(&["run", "--until-idle", "--database", "sqlite:adopted.db"]);
    assert!(place.read("out.ndjson").contains(&old));
}

#[test]
fn a_newer_breaking_schema_is_refused() {
    let place = Place::new();
    let raised = "update pillarbox_meta set value = 999 where name in ('schema_version', 'breaking_version')";
    assert_eq!(place.sql().execute(raised, []).unwrap(), 2);
    place.fails(3, &["migrate", "--check"]);
    let text = place.fails(3, &["run", "--until-idle"]);
    assert!(text.contains("upgrade"), "{text}");
}

#[test]
fn fresh_on_the_log_itself_is_refused_with_what_it_would_cost() {
    let place = Place::with_file_sink();
    place.ok(&["migrate", "--fresh"]);
    place.publish(&["--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    (0..2).for_each(|_| drop(place.publish(&[])));
    let before = place.json(&["status"]);
    let text = place.fails(2, &["migrate", "--fresh"]);
    for part in ["2 undelivered events", "1 deliveries", "3 events", "--fresh --yes"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let after = place.json(&["status"]);
    assert_eq!(
        (&before["log"]["log_id"], &after["log"]["log_id"]),
        (&after["log"]["log_id"], &before["log"]["log_id"])
    );
    place.fails(2, &["migrate", "--yes"]);
    place.ok(&["migrate", "--fresh", "--yes"]);
    place.ok(&["run", "--until-idle"]);
    assert!(!place.path("out.ndjson").exists(), "what was given up was delivered");
}
