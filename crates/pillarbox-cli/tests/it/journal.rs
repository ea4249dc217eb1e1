//! `pillarbox journal`.

use serde_json::{Value, json};

use crate::place::{On, Place, on_each, stderr, stdout};

fn what_is_appended_is_read_and_delivered(on: On) {
    let place = Place::with_file_sink(on);
    let append = ["journal", "append", "campaign-7", "--type", "dice.rolled"];
    let at = |more: &[&str]| place.ok(&[&append[..], more].concat());
    assert_eq!(at(&["--expect", "new", "--header", "by=me", r#"{"a":  1.50}"#]), "1\n");
    assert_eq!(at(&["--content-type", "image/x", "x"]), "2\n");
    assert_eq!(at(&["--json"]), "{\"stream\":\"campaign-7\",\"version\":3}\n");
    let lines = place.pipe(&[&append[..], &["--ndjson", "--expect", "3"]].concat(), b"{\"n\": 4}\n\n{\"n\": 5}\n");
    assert_eq!(stdout(&lines), "5\n", "{}", stderr(&lines));

    let read = place.ok(&["journal", "read", "campaign-7"]);
    assert!(read.contains(r#""data":{"a":  1.50}"#), "byte for byte: {read}");
    let events: Vec<Value> = read.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.iter().map(|event| event["version"].as_i64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert_eq!((&events[0]["stream"], &events[0]["type"]), (&json!("campaign-7"), &json!("dice.rolled")));
    assert_eq!((&events[0]["topic"], &events[0]["headers"]), (&json!("journal"), &json!({"by": "me"})));
    assert_eq!((&events[1]["data_base64"], &events[4]["data"]), (&json!("eA=="), &json!({"n": 5})));
    let some = place.ok(&["journal", "read", "campaign-7", "--from", "4", "--limit", "1"]);
    assert!(some.lines().count() == 1 && some.contains("\"version\":4"), "{some}");
    assert_eq!(place.ok(&["journal", "read", "campaign-7", "--from", "9"]), "");

    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 5);
}

fn a_conflict_says_what_to_do_and_appends_nothing(on: On) {
    let place = Place::new(on);
    let append = ["journal", "append", "s", "--type", "y"];
    place.ok(&append);
    for expect in ["new", "0", "2"] {
        let said = place.fails(1, &[&append[..], &["--expect", expect]].concat());
        assert!(said.contains("PB409: stream \"s\" is at version 1, not at"), "{said}");
    }
    let said = place.fails(1, &[&append[..], &["--expect", "2", "--json"]].concat());
    let error: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(error["error"]["code"], "conflict");
    assert!(error["error"]["fix"].as_str().unwrap().contains("load the stream"), "{said}");
    let said = place.fails(1, &[&append[..], &["--topic", "other"]].concat());
    assert!(said.contains("has the topic 'journal', not 'other'"), "{said}");
    assert!(place.fails(2, &[&append[..], &["--expect", "newest"]].concat()).contains("or new"));
    let bad = place.pipe(&[&append[..], &["--ndjson"]].concat(), b"1\nx\n");
    assert!(
        bad.status.code() == Some(2) && stderr(&bad).contains("line 2: the payload is not JSON"),
        "{}",
        stderr(&bad)
    );
    let none = place.pipe(&[&append[..], &["--ndjson"]].concat(), b"\n");
    assert!(stderr(&none).contains("at least one event"), "{}", stderr(&none));
    assert_eq!(place.ok(&["journal", "read", "s"]).lines().count(), 1);
}

fn streams_are_listed(on: On) {
    let place = Place::new(on);
    for stream in ["game-1", "game-2", "order-1"] {
        place.ok(&["journal", "append", stream, "--type", "y", "--topic", "t"]);
    }
    let listed = place.json(&["journal", "streams", "--prefix", "game-"]);
    let head = |stream| json!({"stream": stream, "topic": "t", "version": 1});
    assert_eq!(listed, json!([head("game-1"), head("game-2")]));
    let rest = place.json(&["journal", "streams", "--after", "game-2"]);
    assert_eq!(rest, json!([head("order-1")]));
    let table = place.ok(&["journal", "streams", "--limit", "1"]);
    assert!(table.starts_with("STREAM") && table.contains("game-1") && !table.contains("game-2"), "{table}");
    let said = place.fails(1, &["journal", "read", "game-3"]);
    assert!(said.contains("no stream 'game-3'; see the streams by `pillarbox journal streams`"), "{said}");
}

on_each!(what_is_appended_is_read_and_delivered, a_conflict_says_what_to_do_and_appends_nothing, streams_are_listed,);
