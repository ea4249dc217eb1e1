use std::thread;
use std::time::Instant;

use crate::place::{On, PATIENCE, Place, is_frozen, on_each};
use crate::receiver::{Manners, Receiver};

/// The word under CONDITION, by `status` and by `subscription list`.
fn check_condition(place: &Place, expected: &str) {
    for args in [&["status"][..], &["subscription", "list"]] {
        let text = place.ok(args);
        let row = text.lines().find(|line| line.starts_with("out ")).unwrap_or_else(|| panic!("no row: {text}"));
        let rest = row["out".len()..].trim_start();
        assert!(rest.starts_with(&format!("{expected}  ")), "{args:?}: {row}");
    }
}

fn a_sink_that_is_down_is_named_with_its_next_try(on: On) {
    let place = Place::new(on);
    let receiver = Receiver::start(Manners::Absent);
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"out\"\nsink = {{ kind = \"http\", url = \"http://{}/\" }}\n",
            receiver.address()
        ),
    );
    let id = place.publish(&[]);
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    place.until(&["status"], |status| !status["subscriptions"][0]["report"]["breaker"].is_null());
    check_condition(&place, "sink down");
    let text = place.ok(&["status"]);
    for part in
        ["the sink is considered down (circuit open) for ", ", next try ", "by itself", "if the configuration is wrong"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let why = place.ok(&["why", &id]);
    assert!(why.contains("next try at ") && why.contains("if the configuration is wrong"), "{why}");
}

/// Nobody has to do anything about a relay that was stopped, until something waits for it.
fn without_a_relay_it_is_orphaned_once_something_waits(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    check_condition(&place, "no relay");
    place.ok(&["status", "--check"]);
    assert_eq!(place.json(&["status"])["subscriptions"][0]["orphaned"], true);
    place.publish(&[]);
    check_condition(&place, "orphaned");
    place.fails(4, &["status", "--check"]);
    place.ok(&["pause", "out"]);
    check_condition(&place, "paused");
    place.ok(&["resume", "out"]);
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    place.until(&["status"], |status| status["subscriptions"][0]["report"]["delivered"] == 1);
    check_condition(&place, "running");
}

/// An event whose time has not come is not delivered without a relay either, as `why` says.
fn a_delayed_event_without_a_relay_is_a_problem(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    let id = place.publish(&["--delay", "1h"]);
    check_condition(&place, "orphaned");
    assert_eq!(place.json(&["why", &id])["subscriptions"][0]["cause"], "no_owner");
    let text = place.fails(4, &["status", "--check"]);
    assert!(text.contains("no living instance runs it; 1 event waits"), "{text}");
    assert_eq!(place.json(&["status"])["healthy"], false);
}

fn a_dead_delivery_is_due_at_no_time(on: On) {
    let place = Place::with_file_sink(on);
    let id = place.publish(&["--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    let list = ["list", "--subscription", "out"];
    let due = place.json(&list)[0]["due_at"].as_str().unwrap().to_owned();
    let show = |command: &str| place.ok(&[command, &id]);
    assert!(place.ok(&list).contains(&due) && show("show").contains("due 2") && show("why").contains("due 2"));
    place.sql().execute("update pillarbox_delivery set state = 'dead'");
    let text = place.ok(&list);
    let row = text.lines().find(|line| line.contains(&id)).unwrap();
    assert!(row.contains("dead") && !row.contains(&due), "{row}");
    assert!(!show("show").contains("due 2") && !show("why").contains("due 2"), "{}", show("show"));
    assert_eq!(place.json(&list)[0]["due_at"], due.as_str(), "scripts get what is stored");
}

/// What stands under DEFINITION: the last column.
fn definition(place: &Place) -> String {
    let text = place.ok(&["status"]);
    let heading = text.lines().find(|line| line.starts_with("SUBSCRIPTION")).unwrap();
    let at = heading.find("DEFINITION").unwrap_or_else(|| panic!("no column: {text}"));
    let row = text.lines().find(|line| line.starts_with("out ")).unwrap_or_else(|| panic!("no row: {text}"));
    row[at..].to_owned()
}

fn the_definition_is_told_and_who_runs_another(on: On) {
    let place = Place::new(on);
    let config = |topic: &str| {
        format!(
            "[relay]\nlease_ttl = \"60s\"\n[[subscription]]\nname = \"out\"\ntopics = [\"{topic}\"]\n\
             sink = {{ kind = \"file\", path = \"out.ndjson\" }}\n"
        )
    };
    place.write("pillarbox.toml", &config("orders"));
    let first = place.start(&["run", "--listen", "off"]);
    first.wait_for("relay started");
    let reported = |instance: usize, number: i64| {
        place.until(&["status"], |status| {
            status["instances"][instance]["report"]["subscriptions"]["out"]["definition"] == number
        });
    };
    reported(0, 1);
    assert_eq!(definition(&place), "1");
    // Frozen, it lives and cannot take the other definition.
    first.signal("-STOP");
    let deadline = Instant::now() + PATIENCE;
    while !is_frozen(first.id()) {
        assert!(Instant::now() < deadline, "it is not frozen");
        thread::yield_now();
    }
    place.write("pillarbox.toml", &config("billing"));
    let second = place.start(&["run", "--listen", "off"]);
    second.wait_for("relay started");
    assert_eq!(definition(&place), "2 (instance 1: 1)");
    assert!(place.ok(&["status"]).contains("instance 1 still runs definition 1 of 'out'; the newest is 2"));
    first.signal("-CONT");
    reported(0, 2);
    assert_eq!(definition(&place), "2");
    let text = place.ok(&["status"]);
    assert!(text.contains("instance 1 runs definition 2 of 'out', which another relay brought"), "{text}");
}

on_each!(
    a_sink_that_is_down_is_named_with_its_next_try,
    without_a_relay_it_is_orphaned_once_something_waits,
    a_delayed_event_without_a_relay_is_a_problem,
    a_dead_delivery_is_due_at_no_time,
    the_definition_is_told_and_who_runs_another,
);
