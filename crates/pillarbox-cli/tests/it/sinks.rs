//! Subscriptions of several sinks through the binary: what is down delays itself alone.

use serde_json::Value;

use crate::place::{On, Place, on_each, stderr, stdout};
use crate::receiver::{Manners, Receiver};

const EVENTS: usize = 20;

/// A subscription `hook` to this address and one named `out` to a file.
fn hook_and_file(place: &Place, address: &str) {
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"hook\"\nsink = {{ kind = \"http\", url = \"http://{address}/token/x\" }}\n\
             [[subscription]]\nname = \"out\"\nsink = {{ kind = \"file\", path = \"out.ndjson\" }}\n"
        ),
    );
}

fn subscription<'a>(status: &'a Value, name: &str) -> &'a Value {
    let all = status["subscriptions"].as_array().unwrap();
    all.iter().find(|one| one["name"] == name).unwrap_or(&Value::Null)
}

fn published(place: &Place) -> Vec<String> {
    (0..EVENTS).map(|number| place.publish(&["--key", &format!("k{}", number % 4), &number.to_string()])).collect()
}

/// A receiver that is down delays its own subscription alone, is named with its error and the next try, burns no attempt, and is
/// delivered to when it comes.
fn a_receiver_that_is_down_delays_nobody_else(on: On) {
    let place = Place::new(on);
    let receiver = Receiver::start(Manners::Absent);
    hook_and_file(&place, receiver.address());
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let ids = published(&place);
    let status = place.until(&["status"], |status| {
        subscription(status, "out")["report"]["delivered"] == EVENTS
            && !subscription(status, "hook")["report"]["breaker"].is_null()
    });
    assert_eq!(place.lines("out.ndjson").len(), EVENTS, "the file waits for the webhook");
    let hook = subscription(&status, "hook");
    let breaker = &hook["report"]["breaker"];
    let origin = format!("http://{}", receiver.address());
    assert!(breaker["error"].as_str().unwrap().contains(&origin), "{breaker}");
    assert!(!breaker["error"].as_str().unwrap().contains("token"), "{breaker}");
    assert!(breaker["next_try"].is_string() || breaker["next_try"].is_number(), "{breaker}");
    assert!(place.ok(&["status"]).contains("hook"));
    let why = place.json(&["why", &ids[0], "--subscription", "hook"])["subscriptions"][0].clone();
    assert_eq!(why["cause"], "sink_down", "{why}");
    assert!(why["message"].as_str().unwrap().contains(&origin), "{why}");

    let receiver = receiver.come(Manners::Takes);
    place.until(&["status"], |status| subscription(status, "hook")["report"]["delivered"] == EVENTS);
    assert_eq!(
        place.sql().number("select coalesce(sum(attempts), 0) from pillarbox_delivery"),
        0,
        "attempts were burnt"
    );
    let received: Vec<String> = receiver
        .bodies()
        .iter()
        .map(|body| serde_json::from_str::<Value>(body).unwrap()["id"].as_str().unwrap().to_owned())
        .collect();
    for (number, id) in ids.iter().enumerate() {
        assert!(received.contains(id), "event {number} is missing");
    }
    place.write("received", &received.join("\n"));
    place.ok(&["audit", "--subscription", "hook", "--received", "received"]);
}

fn doctor_asks_every_receiver(on: On) {
    let place = Place::new(on);
    let receiver = Receiver::start(Manners::Absent);
    hook_and_file(&place, receiver.address());
    let output = place.command(&["doctor"]).output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}{}", stderr(&output));
    let place_of_hook = format!("failed   sink of 'hook': http http://{}/…: ", receiver.address());
    assert!(text.contains(&place_of_hook) && text.contains("no attempt is counted"), "{text}");
    assert!(text.contains("ok       sink of 'out': file out.ndjson: takes events"), "{text}");
    assert!(!place.path("out.ndjson").exists(), "doctor delivers nothing");

    let receiver = receiver.come(Manners::Takes);
    let checks = place.json(&["doctor"]);
    let hook = checks.as_array().unwrap().iter().find(|check| check["name"] == "sink of 'hook'").unwrap();
    assert_eq!(hook["level"], "ok", "{checks}");
    assert_eq!(receiver.bodies(), Vec::<String>::new(), "doctor delivers nothing");

    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"no/such/x\" }\n",
    );
    let output = place.command(&["doctor"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("the directory 'no/such' does not exist"), "{}", stdout(&output));
}

fn run_says_where_each_subscription_delivers_to(on: On) {
    let place = Place::new(on);
    hook_and_file(&place, "127.0.0.1:1");
    let output = place.command(&["run", "--until-idle"]).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "nothing was published: {text}");
    for (subscription, destination) in [("hook", "http://127.0.0.1:1/…"), ("out", "out.ndjson")] {
        let line = text.lines().find(|line| line.contains(&format!("subscription=\"{subscription}\" sink=")));
        let line = line.unwrap_or_else(|| panic!("no line of '{subscription}': {text}"));
        assert!(line.contains(&format!("destination=\"{destination}\"")), "{line}");
    }
    assert!(!text.contains("token"), "{text}");
}

/// The event store first, then the file: both have everything, once.
fn a_chain_delivers_to_each_of_its_sinks(on: On) {
    let place = Place::new(on);
    let store = Place::empty(On::Postgres);
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"both\"\n[subscription.sink]\nkind = \"chain\"\n[[subscription.sink.sinks]]\n\
             kind = \"postgres\"\nurl = \"{}\"\ntable = \"event_store\"\n[[subscription.sink.sinks]]\nkind = \"file\"\npath = \"out.ndjson\"\n",
            store.url()
        ),
    );
    published(&place);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), EVENTS);
    let rows = store.sql().raw("select count(*), count(distinct id) from event_store").unwrap();
    assert_eq!(rows[0], vec![Some(EVENTS.to_string()); 2]);
}

on_each!(
    a_receiver_that_is_down_delays_nobody_else,
    doctor_asks_every_receiver,
    run_says_where_each_subscription_delivers_to,
    a_chain_delivers_to_each_of_its_sinks,
);
