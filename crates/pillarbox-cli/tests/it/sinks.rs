//! Subscriptions of several sinks through the binary: what is down delays itself alone.

use std::sync::atomic::{AtomicUsize, Ordering};

use pillarbox_testkit::http_receiver::{HttpAnswer, HttpReceiver, HttpRequest};
use serde_json::Value;

use crate::place::{On, Place, on_each, stderr, stdout};
use crate::receiver::{Manners, Receiver};

const EVENTS: usize = 20;
/// Each has as many events as the others.
const KEYS: usize = 4;

/// A subscription `hook` to this address and one named `out` to a file.
fn hook_and_file(place: &Place, address: &str) {
    hook_and_file_with(place, &format!("http://{address}/token/x"), "");
}

/// The same, with further keys of the webhook's sink.
fn hook_and_file_with(place: &Place, url: &str, keys: &str) {
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"hook\"\nsink = {{ kind = \"http\", url = \"{url}\"{keys} }}\n\
             [[subscription]]\nname = \"out\"\nsink = {{ kind = \"file\", path = \"out.ndjson\" }}\n"
        ),
    );
}

fn subscription<'a>(status: &'a Value, name: &str) -> &'a Value {
    let all = status["subscriptions"].as_array().unwrap();
    all.iter().find(|one| one["name"] == name).unwrap_or(&Value::Null)
}

fn published(place: &Place) -> Vec<String> {
    (0..EVENTS).map(|number| place.publish(&["--key", &format!("k{}", number % KEYS), &number.to_string()])).collect()
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

/// A receiver that takes every request and never answers delays its own subscription alone, while its time runs and while it is taken
/// to be down, and is delivered to once it answers.
async fn a_receiver_that_never_answers_delays_nobody_else(on: On) {
    let place = Place::new(on);
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::Hang);
    hook_and_file_with(&place, &receiver.url("/"), ", timeout = \"2s\"");
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let first = place.publish(&["--key", "first", "0"]);
    receiver.until_requests(1).await;
    let mut ids = published(&place);
    let everything = |status: &Value, count: usize| subscription(status, "out")["report"]["delivered"] == count;
    place.until(&["status"], |status| everything(status, EVENTS + 1));
    assert_eq!(place.lines("out.ndjson").len(), EVENTS + 1, "the file waits for the webhook");

    let status = place.until(&["status"], |status| !subscription(status, "hook")["report"]["breaker"].is_null());
    let hook = &subscription(&status, "hook")["report"];
    assert!(hook["breaker"]["error"].as_str().unwrap().contains("2s"), "{hook}");
    assert_eq!(hook["delivered"], 0, "{hook}");
    let late = place.publish(&["--key", "late", "0"]);
    place.until(&["status"], |status| everything(status, EVENTS + 2));
    assert!(receiver.requests().iter().all(|request| request.answered.is_none()));

    receiver.answer(|_| HttpAnswer::status(204));
    place.until(&["status"], |status| subscription(status, "hook")["report"]["delivered"] == EVENTS + 2);
    ids.extend([first, late]);
    let received: Vec<String> = receiver.accepted().iter().map(|request| attribute(request, "id")).collect();
    for id in &ids {
        assert!(received.contains(id), "{id} is missing");
    }
    place.write("received", &received.join("\n"));
    place.ok(&["audit", "--subscription", "hook", "--received", "received"]);
}

/// An attribute of the event that came by this request.
fn attribute(request: &HttpRequest, name: &str) -> String {
    serde_json::from_str::<Value>(request.text()).unwrap()[name].as_str().unwrap().to_owned()
}

/// What the receiver refuses for good is dead at once and holds back its key; all others are delivered.
fn a_permanent_refusal_is_the_end_of_one_event_alone(on: On) {
    let place = Place::new(on);
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|request| {
        let refused = attribute(request, "partitionkey") == "k1";
        HttpAnswer::status(if refused { 422 } else { 204 })
    });
    hook_and_file_with(&place, &receiver.url("/"), "");
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let ids = published(&place);
    let (of_key, others) = (EVENTS / KEYS, EVENTS - EVENTS / KEYS);
    let status = place.until(&["status"], |status| {
        let hook = subscription(status, "hook");
        subscription(status, "out")["report"]["delivered"] == EVENTS
            && hook["report"]["delivered"] == others
            && hook["blocked"] == of_key - 1
    });
    let hook = subscription(&status, "hook");
    assert_eq!((&hook["dead"], &hook["retrying"]), (&1.into(), &0.into()), "{hook}");
    assert!(hook["report"]["breaker"].is_null(), "one event says nothing of the receiver: {hook}");
    let why = |id: &str| place.json(&["why", id, "--subscription", "hook"])["subscriptions"][0].clone();
    assert_eq!(why(&ids[1])["cause"], "dead");
    assert!(why(&ids[1])["message"].as_str().unwrap().contains("422"), "{}", why(&ids[1]));
    assert_eq!(why(&ids[1 + KEYS])["cause"], "behind_key_head");

    let requests = receiver.requests();
    let refused: Vec<String> =
        requests.iter().filter(|one| one.answered == Some(422)).map(|one| attribute(one, "id")).collect();
    assert_eq!(refused, [ids[1].as_str()], "tried once, and nothing behind it");
    let mut taken: Vec<String> = receiver.accepted().iter().map(|one| attribute(one, "id")).collect();
    let mut rest: Vec<String> = (0..EVENTS).filter(|number| number % KEYS != 1).map(|at| ids[at].clone()).collect();
    taken.sort_unstable();
    rest.sort_unstable();
    assert_eq!(taken, rest, "all others, once each");
}

/// An event that the receiver fails on, by a 500 and then by no answer at all, delays no event of another key: they are taken while its
/// request is still open. Neither the log nor the status says that the sink is down.
async fn an_event_that_the_receiver_fails_on_delays_no_other_key(on: On) {
    let place = Place::new(on);
    let receiver = HttpReceiver::start().unwrap();
    let is_poison = |request: &HttpRequest| attribute(request, "partitionkey") == "poison";
    let tries = AtomicUsize::new(0);
    receiver.answer(move |request| match is_poison(request) {
        true if tries.fetch_add(1, Ordering::SeqCst) > 0 => HttpAnswer::Hang,
        true => HttpAnswer::status(500),
        false => HttpAnswer::status(204),
    });
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"hook\"\nretry = {{ base = \"10ms\", cap = \"50ms\" }}\n\
             sink = {{ kind = \"http\", url = \"{}\", timeout = \"3m\" }}\n",
            receiver.url("/")
        ),
    );
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    place.publish(&["--key", "poison", "0"]);
    receiver.until_requests(2).await;
    for number in 0..3 {
        place.publish(&["--key", &format!("good{number}"), "0"]);
        receiver.until_requests(3 + number).await;
    }
    let taken: Vec<String> = receiver.accepted().iter().map(|request| attribute(request, "partitionkey")).collect();
    assert_eq!(taken, ["good0", "good1", "good2"], "in the order in which they were published");
    assert_eq!(receiver.requests().iter().filter(|request| is_poison(request)).count(), 2, "its request is open still");
    let status = place.until(&["status"], |status| subscription(status, "hook")["report"]["delivered"] == 3);
    let hook = subscription(&status, "hook");
    assert!(hook["report"]["breaker"].is_null() && hook["condition"] == "running", "{hook}");
    relay.signal("-KILL");
    let log = relay.log_to_end();
    assert!(!log.iter().any(|line| line.contains("considered down")), "{log:?}");
}

/// Every failed attempt is logged with what one needs to find the event, deliveries with `-v`; never a payload.
fn failed_attempts_and_deliveries_are_logged(on: On) {
    let place = Place::new(on);
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|request| match attribute(request, "partitionkey").as_str() {
        "good" => HttpAnswer::status(204),
        "conflict" => HttpAnswer::status(409),
        _ => HttpAnswer::status(422),
    });
    hook_and_file_with(&place, &receiver.url("/token/x"), "");
    let config = place.read("pillarbox.toml");
    place.write(
        "pillarbox.toml",
        &config.replacen("name = \"hook\"", "name = \"hook\"\nretry = { max_attempts = 3, base = \"1ms\" }", 1),
    );
    let mut relay = place.start(&["run", "--listen", "off", "-v"]);
    relay.wait_for("relay started");
    let ids = ["good", "conflict", "bad"].map(|key| place.publish(&["--key", key, "{\"secret\":\"canary\"}"]));
    place.until(&["status"], |status| subscription(status, "hook")["dead"] == 2);
    relay.signal("-TERM");
    let log = relay.log_to_end();
    let of =
        |id: &str| log.iter().filter(|line| line.contains(id) && line.contains("hook")).cloned().collect::<Vec<_>>();
    let check = |line: &str, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(line.contains(part), "no {part} in {line}"));
    };
    let good = of(&ids[0]);
    assert_eq!(good.len(), 1, "{log:#?}");
    check(&good[0], &["DEBUG", "delivered", "key=\"good\""]);
    let conflict = of(&ids[1]);
    assert_eq!(conflict.len(), 3, "{log:#?}");
    for (line, attempt) in conflict.iter().zip(1..) {
        let number = format!("attempt={attempt} max_attempts=3");
        check(line, &["WARN", "key=\"conflict\"", &number, "kind=\"http_status\"", "answered 409"]);
        check(line, &[if attempt == 3 { "the event is dead" } else { "next_try=" }]);
    }
    let bad = of(&ids[2]);
    assert_eq!(bad.len(), 1, "{log:#?}");
    check(&bad[0], &["WARN", "key=\"bad\"", "attempt=1", "the event is dead", "answered 422"]);
    let text = log.join("\n");
    assert!(!text.contains("canary") && !text.contains("token"), "{text}");
    assert!(!text.contains("hyper") && !text.contains("TRACE"), "{text}");
}

/// The trace context that an event was published with is a header of the request and an attribute of the event.
fn a_trace_goes_on_at_the_receiver(on: On) {
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const STATE: &str = "vendor=1";
    let place = Place::new(on);
    let traced = [format!("traceparent={PARENT}"), format!("tracestate={STATE}")];
    place.publish(&["--header", &traced[0], "--header", &traced[1], "{}"]);
    for mode in ["structured", "binary"] {
        let receiver = HttpReceiver::start().unwrap();
        let url = receiver.url("/");
        place.write(
            "pillarbox.toml",
            &format!(
                "[[subscription]]\nname = \"{mode}\"\nstart = \"beginning\"\n\
                 sink = {{ kind = \"http\", url = \"{url}\", mode = \"{mode}\" }}\n"
            ),
        );
        place.ok(&["run", "--until-idle"]);
        let requests = receiver.accepted();
        let [request] = &requests[..] else { panic!("{mode}: {requests:?}") };
        for (name, value) in [("traceparent", PARENT), ("tracestate", STATE)] {
            assert_eq!(request.header(name), Some(value), "{mode}");
            match mode {
                "structured" => assert_eq!(attribute(request, name), value),
                _ => assert_eq!(request.header(&format!("ce-{name}")), Some(value)),
            }
        }
    }
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
    let finding = hook["finding"].as_str().unwrap();
    assert!(finding.ends_with(": answers (501 to OPTIONS); whether it takes events is not known"), "{finding}");
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
    a_permanent_refusal_is_the_end_of_one_event_alone,
    failed_attempts_and_deliveries_are_logged,
    a_trace_goes_on_at_the_receiver,
    doctor_asks_every_receiver,
    run_says_where_each_subscription_delivers_to,
    a_chain_delivers_to_each_of_its_sinks;
    a_receiver_that_never_answers_delays_nobody_else,
    an_event_that_the_receiver_fails_on_delays_no_other_key,
);
