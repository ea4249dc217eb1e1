use serde_json::Value;

use crate::place::Place;

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
