use crate::place::{On, Place, on_each, stderr};

#[test]
fn no_database_names_the_three_ways() {
    let output = Place::empty(On::Sqlite).bare(&["status"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    for way in ["--database", "DATABASE_URL", "config file"] {
        assert!(text.contains(way), "{way}: {text}");
    }
}

#[test]
fn usage_is_2() {
    let place = Place::new(On::Sqlite);
    place.fails(2, &["no-such-command"]);
    place.fails(2, &["publish", "--topic", "orders"]);
    let text = place.fails(2, &["show", "not-an-id"]);
    assert!(text.contains("uuid"), "{text}");
    let text = place.fails(2, &["list", "--state", "failed"]);
    assert!(text.contains("pending, delayed, processing, retrying, blocked, dead"), "{text}");
    let text = place.fails(2, &["status", "--database", "postgres:app"]);
    assert!(text.contains("postgres://user@host:5432/database"), "{text}");
    let text = place.fails(2, &["reset"]);
    assert!(text.contains("--yes"), "{text}");
    assert!(place.ok(&["reset", "--help"]).contains("Needed to empty it"), "it never asks");
    for args in [&["rewind", "out", "--to", "-1"][..], &["prune", "--keep", "-1d"], &["list", "--limit", "-1"]] {
        let text = place.fails(2, args);
        assert!(text.contains(&format!("{} cannot be negative", args[args.len() - 2])), "{text}");
        assert!(!text.contains("tip"), "{text}");
    }
    for command in ["list", "tail"] {
        let text = place.fails(2, &[command, "--topic", "or*ders"]);
        assert!(text.contains("a '*' may only stand at the end"), "{text}");
    }
}

fn failed_is_1(on: On) {
    let place = Place::new(on);
    let text = place.fails(1, &["show", "00000000-0000-7000-8000-000000000000"]);
    assert!(text.contains("no event"), "{text}");
    place.fails(1, &["pause", "nobody"]);
}

#[test]
fn a_missing_schema_is_3_and_names_the_command() {
    let place = Place::empty(On::Sqlite);
    for args in [&["run", "--stdout"][..], &["status"]] {
        let text = place.fails(3, args);
        assert!(text.contains("pillarbox migrate --database sqlite:app.db"), "{text}");
    }
    assert!(!place.path("app.db").exists(), "only demo and migrate create a file");
    place.write("app.db", "");
    let text = place.fails(3, &["run", "--stdout"]);
    assert!(text.contains("pillarbox migrate --database sqlite:app.db"), "{text}");
}

fn unhealthy_is_4_with_the_reason(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["status", "--check"]);
    let id = place.publish(&[]);
    let text = place.fails(4, &["status", "--check"]);
    assert!(text.contains("out"), "{id}: {text}");
}

#[test]
fn help_and_version_are_0() {
    let place = Place::empty(On::Sqlite);
    assert!(place.ok(&["--help"]).contains("Exit codes"));
    assert!(place.ok(&["--version"]).starts_with("pillarbox "));
    assert!(place.ok(&["completions", "bash"]).contains("pillarbox"));
    assert!(!place.ok(&["--help"]).contains("demo-relay"));
}

on_each!(failed_is_1, unhealthy_is_4_with_the_reason,);
