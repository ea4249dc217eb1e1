use std::fs;

use crate::place::{On, Place, on_each, stderr, stdout};

fn check_says_whether_the_schema_is_current(on: On) {
    let place = Place::empty(on);
    place.fails(3, &["migrate", "--check"]);
    assert!(!place.path("app.db").exists());
    assert_eq!(place.json(&["migrate"])["created"], true);
    assert_eq!(place.json(&["migrate", "--check"])["state"], "current");
    assert_eq!(place.json(&["migrate"])["applied"].as_array().unwrap().len(), 0);
}

fn what_is_printed_makes_a_log(on: On) {
    let place = Place::empty(on);
    let nowhere = match on {
        On::Sqlite => "sqlite:nowhere.db",
        On::Postgres => "postgres:///",
    };
    let print = |args: &[&str]| {
        let output = place.bare(&[&["migrate", "--database", nowhere], args].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let printed = print(&["--print"]);
    assert!(!place.path("nowhere.db").exists());
    place.sql().raw(&printed).unwrap();
    place.ok(&["migrate", "--check"]);
    place.ok(&["migrate", "--doorbell", "off"]);
    let id = place.publish(&[]);
    assert!(place.ok(&["run", "--stdout", "--until-idle"]).contains(&id));
    assert!(print(&["--print-roles"]).contains(if on == On::Sqlite { "no roles" } else { "grant " }));
    place.fails(2, &["migrate", "--check", "--doorbell", "off"]);
}

#[test]
fn printing_needs_to_know_for_which_database() {
    let place = Place::empty(On::Sqlite);
    for args in [&["migrate", "--print"][..], &["migrate", "--print-roles"]] {
        let output = place.bare(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains("DATABASE_URL"), "{}", stderr(&output));
    }
}

#[test]
fn a_copy_is_refused_until_it_is_declared() {
    // No relay has ever run: the subscription is made in the copies.
    let place = Place::with_file_sink(On::Sqlite);
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

fn a_newer_breaking_schema_is_refused(on: On) {
    let place = Place::new(on);
    place.sql().execute(match on {
        On::Sqlite => "update pillarbox_meta set value = 999 where name in ('schema_version', 'breaking_version')",
        On::Postgres => "update pillarbox_meta set schema_version = 999, breaking_version = 999",
    });
    place.fails(3, &["migrate", "--check"]);
    let text = place.fails(3, &["run", "--stdout", "--until-idle"]);
    assert!(text.contains("upgrade"), "{text}");
}

fn fresh_on_the_log_itself_is_refused_with_what_it_would_cost(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["migrate", "--fresh"]);
    place.publish(&["--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    (0..2).for_each(|_| drop(place.publish(&[])));
    let before = place.json(&["status"]);
    let text = place.fails(2, &["migrate", "--fresh"]);
    for part in ["3 undelivered events and 0 dead of 'out'", "none of the 3 events", "--fresh --yes"] {
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

on_each!(
    check_says_whether_the_schema_is_current,
    what_is_printed_makes_a_log,
    a_newer_breaking_schema_is_refused,
    fresh_on_the_log_itself_is_refused_with_what_it_would_cost,
);
