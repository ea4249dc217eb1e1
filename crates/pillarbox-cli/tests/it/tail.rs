use serde_json::Value;

use crate::place::{On, Place, on_each, stderr, stdout};
use crate::sql::Sql;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn a_token_resumes_where_it_was_given(on: On) {
    let place = Place::new(on);
    let ids: Vec<String> = (0..6).map(|number| place.publish(&["--key", &format!("k{}", number % 2), "{}"])).collect();
    let first = lines(&place.ok(&["tail", "--from", "0", "--limit", "2"]));
    assert_eq!(first.iter().map(|line| line["id"].as_str().unwrap()).collect::<Vec<_>>(), ids[..2]);
    let token = first[1]["resumetoken"].as_str().unwrap();
    let rest = lines(&place.ok(&["tail", "--from", token, "--no-follow"]));
    assert_eq!(rest.iter().map(|line| line["id"].as_str().unwrap()).collect::<Vec<_>>(), ids[2..]);
    let last = rest[3]["resumetoken"].as_str().unwrap();
    assert_eq!(place.ok(&["tail", "--from", last, "--no-follow"]), "");
    assert_eq!(lines(&place.ok(&["tail", "--from", "0", "--no-follow", "--key", "k1"])).len(), 3);
    assert_eq!(place.ok(&["tail", "--from", "0", "--no-follow", "--topic", "other"]), "");
    assert_eq!(place.ok(&["tail", "--from", "4", "--no-follow", "--short"]).lines().count(), 2);
}

fn it_follows_what_is_published_later(on: On) {
    let place = Place::new(on);
    let mut tail = place.start(&["tail", "--from", "0", "--limit", "2"]);
    let first = place.publish(&["{}"]);
    tail.wait_for_output(&first);
    let second = place.publish(&["{}"]);
    tail.wait_for_output(&second);
    assert_eq!(tail.end(), Some(0));
}

fn a_token_of_before_a_reset_is_refused(on: On) {
    let place = Place::new(on);
    place.publish(&[]);
    let token =
        lines(&place.ok(&["tail", "--from", "0", "--limit", "1"]))[0]["resumetoken"].as_str().unwrap().to_owned();
    place.ok(&["reset", "--yes"]);
    let text = place.fails(1, &["tail", "--from", &token, "--no-follow"]);
    assert!(text.contains("incarnation"), "{text}");
    place.fails(2, &["tail", "--from", "rubbish", "--no-follow"]);
}

fn a_limit_of_nothing_is_wrong_usage_and_help_says_where_it_starts(on: On) {
    let place = Place::new(on);
    place.fails(2, &["tail", "--limit", "0"]);
    for args in [&["tail", "--help"][..], &["--help"]] {
        assert!(place.ok(args).contains("10 positions"), "{args:?}");
    }
    let ids: Vec<String> = (0..12).map(|_| place.publish(&[])).collect();
    let shown = lines(&place.ok(&["tail", "--no-follow"]));
    assert_eq!(shown.iter().map(|line| line["id"].as_str().unwrap()).collect::<Vec<_>>(), ids[2..]);
}

fn a_token_of_another_log_is_refused_and_never_overflows(on: On) {
    const MAX: i64 = i64::MAX;
    let place = Place::new(on);
    (0..3).for_each(|_| drop(place.publish(&[])));
    let incarnation = place.json(&["status"])["log"]["incarnation"].as_i64().unwrap();
    for (rest, code) in [
        ("4:".to_owned(), 1),
        ("0:2-4".to_owned(), 1),
        (format!("{}:", MAX - 1), 1),
        (format!("0:2-{}", MAX - 1), 1),
        (format!("{MAX}:"), 2),
        (format!("0:{MAX}"), 2),
        (format!("0:9{MAX}"), 2),
    ] {
        let text = place.fails(code, &["tail", "--no-follow", "--from", &format!("{incarnation}:{rest}")]);
        assert!(
            text.starts_with("error: ") && text.contains("token") && text.contains("pillarbox tail"),
            "{rest}: {text}"
        );
    }
    assert_eq!(place.ok(&["tail", "--no-follow", "--from", &format!("{incarnation}:3:")]), "");
    assert_eq!(lines(&place.ok(&["tail", "--no-follow", "--from", &format!("{incarnation}:0:2-3")])).len(), 1);
    assert_eq!(place.ok(&["tail", "--no-follow", "--from", &MAX.to_string()]), "", "a position is clamped");
}

#[test]
fn what_retention_removed_before_it_was_seen_is_said() {
    let place = Place::with_file_sink(On::Sqlite);
    (0..5).for_each(|_| drop(place.publish(&[])));
    place.ok(&["run", "--until-idle"]);
    let last = place.publish(&[]);
    assert_eq!(place.json(&["prune", "--keep", "0ms"])["events"], 5);
    let incarnation = place.json(&["status"])["log"]["incarnation"].as_i64().unwrap();
    let talk = |from: &[&str]| {
        let output = place.command(&[&["tail", "--no-follow"][..], from].concat()).output().unwrap();
        assert!(output.status.success() && stdout(&output).contains(&last), "{from:?}: {}", stderr(&output));
        stderr(&output)
    };
    let text = talk(&["--from", "0"]);
    assert!(text.contains("removed positions 1-5") && text.contains("starts at 6"), "{text}");
    assert_eq!(text.lines().count(), 1, "said once: {text}");
    let text = talk(&["--from", &format!("{incarnation}:1:3")]);
    assert!(text.contains("removed positions 2,4-5"), "{text}");
    for seen in [&[][..], &["--from", "5"], &["--from", &format!("{incarnation}:3:4-5")], &["--from", "0", "--quiet"]] {
        assert_eq!(talk(seen), "", "{seen:?}");
    }
}

on_each!(
    a_token_resumes_where_it_was_given,
    it_follows_what_is_published_later,
    a_token_of_before_a_reset_is_refused,
    a_limit_of_nothing_is_wrong_usage_and_help_says_where_it_starts,
    a_token_of_another_log_is_refused_and_never_overflows,
);

/// A transaction that has published and not ended.
fn open_writer(place: &Place, topic: &str) -> Sql {
    let writer = place.sql();
    writer.execute(&format!("begin; insert into pillarbox_event (topic, type) values ('{topic}', 'y')"));
    writer
}

#[test]
fn what_commits_late_is_printed_after_what_was_published_later() {
    let place = Place::new(On::Postgres);
    let tail = place.start(&["tail", "--from", "0"]);
    let writer = open_writer(&place, "late");
    let other = open_writer(&place, "never");
    let printed = tail.wait_for_output(&place.publish(&["{}"]));
    let token = lines(&printed)[0]["resumetoken"].as_str().unwrap().to_owned();
    other.execute("rollback");
    let again = tail.wait_for_output(&place.publish(&["{}"]));
    let later = lines(&again)[0]["resumetoken"].as_str().unwrap().to_owned();
    writer.execute("commit");
    tail.wait_for_output("\"late\"");
    for token in [token, later] {
        let resumed = place.ok(&["tail", "--from", &token, "--no-follow"]);
        assert!(resumed.contains("\"late\""), "lost by {token}: {resumed}");
    }
}

#[test]
fn a_bare_position_is_clamped_to_the_lowest_open_hole() {
    let place = Place::new(On::Postgres);
    let ids: Vec<String> = (0..3).map(|_| place.publish(&[])).collect();
    let writer = open_writer(&place, "late");
    let later: Vec<String> = (0..20).map(|_| place.publish(&[])).collect();
    let shown = place.ok(&["tail", "--from", "20", "--no-follow"]);
    assert_eq!(shown.lines().count(), 20, "all above the hole: {shown}");
    assert!(shown.contains(&later[0]) && !shown.contains(&ids[2]), "{shown}");
    let tail = place.start(&["tail"]);
    tail.wait_for_output(&later[19]);
    writer.execute("commit");
    tail.wait_for_output("\"late\"");
    assert_eq!(place.ok(&["tail", "--from", "20", "--no-follow"]).lines().count(), 4, "no hole is open any more");
    assert_eq!(place.ok(&["tail", "--no-follow"]).lines().count(), 10);
}

#[test]
fn an_idle_writer_keeps_nothing_else_from_being_printed() {
    const ABORTED: usize = 150;
    let place = Place::new(On::Postgres);
    let idle = open_writer(&place, "idle");
    let sql = place.sql();
    for _ in 0..ABORTED {
        sql.execute("begin; insert into pillarbox_event (topic, type) values ('t', 'aborted'); rollback");
        sql.execute("insert into pillarbox_event (topic, type) values ('t', 'y')");
    }
    let last = open_writer(&place, "last");
    let tail = place.start(&["tail", "--from", "0"]);
    tail.wait_for_output(&place.publish(&[]));
    // More holes are open than one read looks into: this one's turn comes all the same.
    last.execute("commit");
    tail.wait_for_output("\"last\"");
    idle.execute("commit");
    tail.wait_for_output("\"idle\"");
}
