use serde_json::Value;

use crate::place::{On, Place, on_each, stderr, stdout};

fn delivered(on: On, count: usize) -> Place {
    let place = Place::with_file_sink(on);
    let lines: String = (0..count).map(|number| format!("{number}\n")).collect();
    assert!(
        place
            .pipe(&["publish", "--topic", "t", "--type", "y", "--key", "k", "--ndjson"], lines.as_bytes())
            .status
            .success()
    );
    place.ok(&["run", "--until-idle"]);
    place
}

fn audit(place: &Place, code: i32, args: &[&str]) -> Value {
    let mut all = vec!["audit", "--json"];
    all.extend(args);
    let output = place.command(&all).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{}{}", stdout(&output), stderr(&output));
    serde_json::from_str::<Value>(&stdout(&output)).unwrap()["subscriptions"][0].clone()
}

fn a_clean_round_trip_is_proven(on: On) {
    let place = delivered(on, 50);
    let books = audit(&place, 0, &[]);
    assert_eq!((&books["expected"], &books["delivered"], &books["missing"]), (&50.into(), &50.into(), &0.into()));
    let proof = audit(&place, 0, &["--received", "out.ndjson"]);
    assert_eq!((&proof["delivered"], &proof["duplicates"], &proof["out_of_order"]), (&50.into(), &0.into(), &0.into()));
}

fn a_deleted_line_is_missing(on: On) {
    let place = delivered(on, 50);
    let text = place.read("out.ndjson");
    let kept: String =
        text.lines().enumerate().filter(|(number, _)| *number != 20).map(|(_, line)| format!("{line}\n")).collect();
    place.write("cut.ndjson", &kept);
    let found = audit(&place, 5, &["--received", "cut.ndjson"]);
    assert_eq!((&found["missing"], &found["delivered"]), (&1.into(), &49.into()));
    assert_eq!(found["missing_events"][0]["position"], 21);
    let output = place.pipe(&["audit", "--received", "-", "--subscription", "out"], kept.as_bytes());
    assert_eq!(output.status.code(), Some(5));
    assert!(stdout(&output).contains("position 21"), "{}", stdout(&output));
}

fn duplicates_disorder_and_strangers_are_counted(on: On) {
    let place = delivered(on, 10);
    let mut lines: Vec<String> = place.read("out.ndjson").lines().map(str::to_owned).collect();
    lines.swap(3, 7);
    lines.push(lines[0].clone());
    lines.push("00000000-0000-7000-8000-000000000000".to_owned());
    lines.push("{\"torn".to_owned());
    place.write("odd.ndjson", &lines.join("\n"));
    let found = audit(&place, 0, &["--received", "odd.ndjson"]);
    assert_eq!((&found["duplicates"], &found["unexpected"], &found["unreadable"]), (&1.into(), &1.into(), &1.into()));
    assert!(found["out_of_order"].as_u64().unwrap() > 0, "{found}");
    let said = |file: &str| stderr(&place.command(&["audit", "--received", file]).output().unwrap());
    let text = said("odd.ndjson");
    assert!(
        text.starts_with("1 line of --received has no readable id")
            && text.contains("uuid")
            && text.contains("CloudEvents"),
        "{text}"
    );
    assert_eq!(said("out.ndjson"), "");
}

fn a_cursor_moved_by_hand_is_found(on: On) {
    let place = delivered(on, 10);
    for _ in 0..5 {
        place.publish(&["--key", "k"]);
    }
    place.sql().execute("update pillarbox_cursor set floor = 15");
    let found = audit(&place, 5, &[]);
    assert_eq!(found["missing"], 5, "{found}");
}

fn a_range_limits_what_is_expected(on: On) {
    let place = delivered(on, 10);
    assert_eq!(audit(&place, 0, &["--from", "3", "--to", "5"])["expected"], 3);
    place.fails(1, &["audit", "--subscription", "nobody"]);
}

fn what_lies_before_the_start_is_not_missing_from_a_receiver(on: On) {
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nstart = \"now\"\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
    );
    for _ in 0..3 {
        place.publish(&["--key", "k"]);
    }
    place.ok(&["run", "--until-idle"]);
    place.publish(&["--key", "k"]);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 1);
    let found = audit(&place, 0, &["--received", "out.ndjson"]);
    assert_eq!((&found["expected"], &found["delivered"], &found["before_start"]), (&1.into(), &1.into(), &3.into()));
    assert!(place.ok(&["audit"]).contains("BEFORE START"));
    // The proof is still one: what lies after the start and is not there is missing.
    place.write("empty.ndjson", "");
    let found = audit(&place, 5, &["--received", "empty.ndjson"]);
    assert_eq!((&found["missing"], &found["before_start"]), (&1.into(), &3.into()));

    place.ok(&["rewind", "out", "--to", "1", "--yes"]);
    assert_eq!(audit(&place, 0, &[])["before_start"], 1, "a rewind moves the start");
    place.ok(&["run", "--until-idle"]);
    let found = audit(&place, 0, &["--received", "out.ndjson"]);
    assert_eq!((&found["expected"], &found["delivered"], &found["duplicates"]), (&3.into(), &3.into(), &1.into()));
}

fn what_the_filter_did_not_want_is_counted_if_it_was_received(on: On) {
    let place = Place::new(on);
    let config = |topics: &str| {
        let sink = "sink = { kind = \"file\", path = \"out.ndjson\" }";
        place.write("pillarbox.toml", &format!("[[subscription]]\nname = \"out\"\ntopics = {topics}\n{sink}\n"));
        place.ok(&["run", "--until-idle"]);
    };
    let publish = |topic: &str| place.ok(&["publish", "--topic", topic, "--type", "y", "--key", "k"]);
    let strange = publish("strange");
    publish("kept");
    publish("removed");
    config("[\"kept\", \"removed\"]");
    assert_eq!(place.lines("out.ndjson").len(), 2);
    let received = |ids: &[&str]| {
        place.write("received", &format!("{}{}", place.read("out.ndjson"), ids.concat()));
        audit(&place, 0, &["--received", "received"])
    };
    assert_eq!(received(&[])["unwanted"], 0);
    let found = received(&[&strange, &strange]);
    assert_eq!((&found["unwanted"], &found["duplicates"], &found["unexpected"]), (&1.into(), &1.into(), &0.into()));

    // What was delivered under the former filter was wanted then.
    config("[\"kept\"]");
    let late = publish("removed");
    publish("kept");
    config("[\"kept\"]");
    let found = received(&[]);
    assert_eq!((&found["expected"], &found["delivered"], &found["unwanted"]), (&3.into(), &3.into(), &0.into()));
    let found = received(&[&late]);
    assert_eq!((&found["unwanted"], &found["missing"]), (&1.into(), &0.into()), "{found}");
    assert!(place.ok(&["audit", "--received", "received"]).contains("UNWANTED"));
}

fn what_waits_is_not_missing(on: On) {
    let place = delivered(on, 10);
    place.publish(&["--key", "k"]);
    let found = audit(&place, 0, &["--received", "out.ndjson"]);
    assert_eq!((&found["waiting"], &found["missing"]), (&1.into(), &0.into()));
}

fn a_range_that_ends_before_it_begins_is_refused(on: On) {
    let place = Place::with_file_sink(on);
    let text = place.fails(2, &["audit", "--from", "5", "--to", "2"]);
    assert!(text.contains("--from 5") && text.contains("--to 2"), "{text}");
}

on_each!(
    a_range_that_ends_before_it_begins_is_refused,
    a_clean_round_trip_is_proven,
    a_deleted_line_is_missing,
    duplicates_disorder_and_strangers_are_counted,
    a_cursor_moved_by_hand_is_found,
    a_range_limits_what_is_expected,
    what_lies_before_the_start_is_not_missing_from_a_receiver,
    what_the_filter_did_not_want_is_counted_if_it_was_received,
    what_waits_is_not_missing,
);
