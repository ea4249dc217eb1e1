use serde_json::Value;

use crate::place::{Place, stderr, stdout};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_token_resumes_where_it_was_given() {
    let place = Place::new();
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

#[test]
fn it_follows_what_is_published_later() {
    let place = Place::new();
    let mut tail = place.start(&["tail", "--from", "0", "--limit", "2"]);
    let first = place.publish(&["{}"]);
    tail.wait_for_output(&first);
    let second = place.publish(&["{}"]);
    tail.wait_for_output(&second);
    assert_eq!(tail.end(), Some(0));
}

#[test]
fn a_token_of_before_a_reset_is_refused() {
    let place = Place::new();
    place.publish(&[]);
    let token =
        lines(&place.ok(&["tail", "--from", "0", "--limit", "1"]))[0]["resumetoken"].as_str().unwrap().to_owned();
    place.ok(&["reset", "--yes"]);
    let text = place.fails(1, &["tail", "--from", &token, "--no-follow"]);
    assert!(text.contains("incarnation"), "{text}");
    place.fails(2, &["tail", "--from", "rubbish", "--no-follow"]);
}

#[test]
fn a_limit_of_nothing_is_wrong_usage_and_help_says_where_it_starts() {
    let place = Place::new();
    place.fails(2, &["tail", "--limit", "0"]);
    for args in [&["tail", "--help"][..], &["--help"]] {
        assert!(place.ok(args).contains("10 positions"), "{args:?}");
    }
    let ids: Vec<String> = (0..12).map(|_| place.publish(&[])).collect();
    let shown = lines(&place.ok(&["tail", "--no-follow"]));
    assert_eq!(shown.iter().map(|line| line["id"].as_str().unwrap()).collect::<Vec<_>>(), ids[2..]);
}

#[test]
fn a_token_of_another_log_is_refused_and_never_overflows() {
    const MAX: i64 = i64::MAX;
    let place = Place::new();
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
    let place = Place::with_file_sink();
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
