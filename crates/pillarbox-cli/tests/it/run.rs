use std::thread;
use std::time::{Duration, Instant};

use crate::place::{On, PATIENCE, Place, Running, on_each, stderr, stdout};
use crate::receiver::{Manners, Receiver};

/// In another folder than that of its config a relay would deliver the whole log to nobody knows where.
fn without_subscriptions_run_refuses_and_says_why(on: On) {
    let place = Place::new(on);
    place.publish(&[]);
    for part in ["no config file", "./pillarbox.toml", "--config", "[[subscription]]", "run --stdout"] {
        let text = place.fails(2, &["run", "--until-idle"]);
        assert!(text.contains(part), "{part}: {text}");
    }
    place.write("pillarbox.toml", "[relay]\nworkers = 2\n");
    let text = place.fails(2, &["run"]);
    assert!(text.contains("the config in pillarbox.toml has no [[subscription]]"), "{text}");
    assert_eq!(place.json(&["subscription", "list"]).as_array().unwrap().len(), 0);
}

fn stdout_prints_everything_and_leaves_nothing(on: On) {
    let place = Place::new(on);
    let id = place.publish(&["{\"a\":1}"]);
    let output = place.command(&["run", "--stdout", "--until-idle"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains(&id) && stdout(&output).lines().count() == 1, "{}", stdout(&output));
    assert!(
        stderr(&output).lines().next().unwrap().contains(&place.url().replace("postgres@", "")),
        "the database comes first: {}",
        stderr(&output)
    );
    let nothing = |place: &Place| assert_eq!(place.json(&["subscription", "list"]).as_array().unwrap().len(), 0);
    nothing(&place);
    let mut relay = place.start(&["run", "--stdout", "--listen", "off"]);
    relay.wait_for_output(&id);
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
    nothing(&place);
    // With a config none of its receivers gets anything.
    let place = place.file_sink();
    assert!(place.ok(&["run", "--stdout", "--until-idle"]).contains(&id));
    nothing(&place);
    assert!(!place.path("out.ndjson").exists());
}

fn what_a_killed_run_to_standard_output_leaves_is_removed_by_the_next_run(on: On) {
    let place = Place::with_file_sink(on);
    let mut relay = place.start(&["run", "--stdout", "--listen", "off"]);
    relay.wait_for("relay started");
    relay.signal("-KILL");
    relay.end();
    let left = place.until(&["subscription", "list"], |list| list[0]["orphaned"] == true);
    assert!(left[0]["name"].as_str().unwrap().starts_with("ephemeral.stdout."), "{left}");
    let output = place.command(&["run", "--until-idle"]).output().unwrap();
    assert!(stderr(&output).contains("removed an ephemeral subscription"), "{}", stderr(&output));
    let list = place.json(&["subscription", "list"]);
    let names: Vec<&str> = list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["out"]);
}

/// Closing a terminal, or `systemctl reload`, is no reason to deliver anything twice.
fn sighup_drains(on: On) {
    let place = Place::with_file_sink(on);
    // Tests that run under nohup hand an ignored SIGHUP down to the relay, which then goes on rightly.
    let mut relay = place.start_by(&["env", "--default-signal=HUP"], &["run", "--listen", "off"]);
    relay.wait_for("relay started");
    relay.signal("-HUP");
    relay.wait_for("drained");
    assert_eq!(relay.end(), Some(0));
}

fn a_relay_that_ignores_sighup_from_the_start_goes_on(on: On) {
    let place = Place::with_file_sink(on);
    let mut relay = place.start_after("trap '' HUP", &["run", "--listen", "off"]);
    relay.wait_for("relay started");
    relay.signal("-HUP");
    relay.signal("-TERM");
    let line = relay.wait_for("draining");
    assert!(line.contains("SIGTERM"), "{line}");
    assert_eq!(relay.end(), Some(0));
}

fn sigterm_drains_and_nothing_comes_again(on: On) {
    let place = Place::with_file_sink(on);
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let lines: String = (0..2_000).map(|number| format!("{number}\n")).collect();
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], lines.as_bytes());
    assert!(output.status.success());
    relay.signal("-TERM");
    relay.wait_for("drained");
    assert_eq!(relay.end(), Some(0));
    place.ok(&["run", "--until-idle"]);
    let mut ids: Vec<String> = place.lines("out.ndjson").iter().map(|line| line["id"].to_string()).collect();
    assert_eq!(ids.len(), 2_000, "redelivered or lost");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 2_000);
}

/// However many subscriptions there are, a drain waits only for what is at their sinks.
fn sigterm_drains_a_thousand_subscriptions_in_time(on: On) {
    const SUBSCRIPTIONS: usize = 1_000;
    const EVENTS: usize = 200;
    let place = Place::new(on);
    let sink = "sink = { kind = \"file\", path = \"out.ndjson\", fsync = false }";
    let one = |number| format!("[[subscription]]\nname = \"s{number}\"\nlanes = 1\n{sink}\n");
    let all: String = (0..SUBSCRIPTIONS).map(one).collect();
    place.write("pillarbox.toml", &format!("[relay]\nshutdown_grace = \"10s\"\nbatch_size = 1\n{all}"));
    let lines: String = (0..EVENTS).map(|number| format!("{number}\n")).collect();
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "--key", "k", "--ndjson"], lines.as_bytes());
    assert!(output.status.success(), "{}", stderr(&output));
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let deadline = Instant::now() + PATIENCE;
    while !place.path("out.ndjson").exists() || place.read("out.ndjson").is_empty() {
        assert!(Instant::now() < deadline, "nothing is delivered");
        thread::yield_now();
    }
    relay.signal("-TERM");
    let log = relay.log_to_end();
    assert_eq!(relay.end(), Some(0), "{log:?}");
    assert!(log.iter().any(|line| line.contains("drained")), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("took too long")), "{log:?}");
    let delivered = place.read("out.ndjson").lines().count();
    assert!(delivered < SUBSCRIPTIONS * EVENTS, "it had nothing to do any more when it was told to end");
}

fn sigint_ends_an_idle_relay_and_leaves_no_instance(on: On) {
    let place = Place::with_file_sink(on);
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    relay.signal("-INT");
    assert_eq!(relay.end(), Some(0));
    assert_eq!(place.json(&["status"])["instances"].as_array().unwrap().len(), 0);
}

fn a_running_relay_delivers_what_others_publish(on: On) {
    let place = Place::new(on);
    let relay = place.start(&["run", "--stdout", "--listen", "off"]);
    relay.wait_for("relay started");
    let id = place.publish(&["{}"]);
    relay.wait_for_output(&id);
    place.sql().execute("insert into pillarbox_event (topic, type, payload) values ('plain', 'insert', '[1]')");
    relay.wait_for_output("\"plain\"");
}

fn a_new_subscription_says_how_much_it_will_get(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&[]);
    let output = place.command(&["run", "--until-idle"]).output().unwrap();
    let text = stderr(&output);
    let line = text.lines().find(|line| line.contains("new subscription")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("subscription=\"out\"") || line.contains("subscription=out"), "{line}");
}

fn logs_can_be_json(on: On) {
    let place = Place::with_file_sink(on);
    let output = place.command(&["run", "--until-idle", "--log-format", "json"]).output().unwrap();
    for line in stderr(&output).lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    let output = place.command(&["run", "--until-idle", "--quiet"]).output().unwrap();
    assert_eq!(stderr(&output), "");
}

fn a_second_signal_stops_at_once(on: On) {
    let place = Place::with_file_sink(on);
    let held = std::fs::File::create(place.path("out.ndjson")).unwrap();
    held.lock().unwrap();
    place.publish(&[]);
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    place.until(&["status"], |status| status["subscriptions"][0]["processing"] == 1);
    relay.signal("-TERM");
    relay.wait_for("draining");
    relay.signal("-TERM");
    relay.wait_for("stopped at once");
    assert_eq!(relay.end(), Some(1));
    held.unlock().unwrap();
    // On PostgreSQL nobody has seen it end: that its lanes go on after its lease is waited for.
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 1);
}

fn until_idle_fails_when_a_sink_did_not_take_everything(on: On) {
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"no/such/directory/out.ndjson\" }\n",
    );
    place.publish(&[]);
    let text = place.fails(1, &["run", "--until-idle"]);
    assert!(text.contains("'out'") && text.contains("no/such/directory"), "{text}");
    std::fs::create_dir_all(place.path("no/such/directory")).unwrap();
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("no/such/directory/out.ndjson").len(), 1);
}

/// Nobody but the receiver knows that its subscription stands still; an operator's pause is known to who made it.
fn until_idle_fails_while_the_receiver_has_paused_what_waits(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out", "--reason", "410 Gone"]);
    place.sql().execute("update pillarbox_subscription set paused_by = 'receiver'");
    place.ok(&["run", "--until-idle"]);
    place.publish(&[]);
    let text = place.fails(1, &["run", "--until-idle"]);
    for part in ["'out'", "410 Gone", "1 event waits", "pillarbox resume out"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    place.ok(&["pause", "out"]);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["resume", "out"]);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 1);
}

/// An address that answers with 422 wants nothing of an event, and what is behind it waits for an operator.
fn until_idle_fails_when_a_sink_refused_an_event(on: On) {
    let place = Place::new(on);
    let receiver = Receiver::start(Manners::Parrot);
    let hook = |address: &str| {
        format!("[[subscription]]\nname = \"hook\"\nsink = {{ kind = \"http\", url = \"http://{address}/\" }}\n")
    };
    place.write("pillarbox.toml", &hook(receiver.address()));
    let ids: Vec<String> = (0..3).map(|_| place.publish(&["--key", "k", "{}"])).collect();
    // Nobody wants them tried again, and the second run does not: what was refused before counts all the same.
    for _ in 0..2 {
        let text = place.fails(1, &["run", "--until-idle"]);
        for part in ["'hook'", "1 dead, 2 blocked behind them", "pillarbox list --subscription hook"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    place.ok(&["pause", "hook"]);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["resume", "hook"]);
    let taker = Receiver::start(Manners::Takes);
    place.write("pillarbox.toml", &hook(taker.address()));
    place.ok(&["skip", "--subscription", "hook", "--event", &ids[0], "--reason", "not for this receiver"]);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(taker.bodies().len(), 2);
}

/// What waits for its time may; what waits for its next attempt was refused.
fn until_idle_fails_for_a_retry_and_not_for_a_delay(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&["--key", "k", "--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    place.sql().execute("update pillarbox_delivery set state = 'retrying', attempts = 1");
    place.publish(&["--key", "k"]);
    let text = place.fails(1, &["run", "--until-idle"]);
    assert!(text.contains("'out'") && text.contains("1 retrying, 1 blocked behind them"), "{text}");
}

/// Another relay's subscription is not this one's to deliver.
fn until_idle_does_not_fail_for_a_subscription_of_another_config(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out", "--reason", "410 Gone"]);
    place.sql().execute("update pillarbox_subscription set paused_by = 'receiver'");
    place.publish(&[]);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"other\"\nsink = { kind = \"file\", path = \"other.ndjson\" }\n",
    );
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("other.ndjson").len(), 1);
}

/// Far longer than a bell has to be unheard before somebody is told that it is silent (`BELL_SILENT_AFTER`, 5 s).
const BELL_HEARD_FOR: Duration = Duration::from_secs(8);

#[test]
fn nobody_is_warned_of_a_doorbell_that_rings() {
    let place = Place::with_file_sink(On::Postgres);
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < BELL_HEARD_FOR {
        place.publish(&[]);
        count += 1;
        // The next one comes when the relay has nothing more to do and falls asleep.
        crate::ledger::until("the event is delivered", || {
            place.path("out.ndjson").exists() && place.lines("out.ndjson").len() == count
        });
    }
    relay.signal("-TERM");
    let log = relay.log_to_end();
    assert!(log.iter().any(|line| line.contains("drained")), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("silent")), "{log:?}");
}

/// Publishes and waits for the delivery, until the relay says this; all that it said meanwhile.
fn publish_until_told(place: &Place, relay: &Running, text: &str) -> Vec<String> {
    let (deadline, mut log) = (Instant::now() + PATIENCE, Vec::<String>::new());
    while !log.iter().any(|line| line.contains(text)) {
        assert!(Instant::now() < deadline, "it does not say '{text}': {log:?}");
        let id = place.publish(&[]);
        crate::ledger::until("the event is delivered", || {
            place.path("out.ndjson").exists() && place.read("out.ndjson").contains(&id)
        });
        log.extend(relay.log_lines());
    }
    log
}

#[test]
fn a_doorbell_that_is_silent_is_reported_once_and_so_is_that_it_rings_again() {
    let place = Place::with_file_sink(On::Postgres);
    let config = format!("[relay]\npoll_interval = \"100ms\"\n\n{}", place.read("pillarbox.toml"));
    place.write("pillarbox.toml", &config);
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    // As a tool that compares schemas may do.
    place.sql().raw("alter table pillarbox.event alter column created_at set default clock_timestamp()").unwrap();
    let mut log = publish_until_told(&place, &relay, "the doorbell is silent");
    place.sql().raw("select pillarbox.set_doorbell(true)").unwrap();
    log.extend(publish_until_told(&place, &relay, "the doorbell rings again"));
    relay.signal("-TERM");
    log.extend(relay.log_to_end());
    for text in ["the doorbell is silent", "the doorbell rings again"] {
        assert_eq!(log.iter().filter(|line| line.contains(text)).count(), 1, "{log:?}");
    }
    let warning = log.iter().find(|line| line.contains("is silent")).unwrap();
    assert!(warning.contains("WARN") && warning.contains("`pillarbox doctor`"), "{warning}");
}

on_each!(
    without_subscriptions_run_refuses_and_says_why,
    stdout_prints_everything_and_leaves_nothing,
    what_a_killed_run_to_standard_output_leaves_is_removed_by_the_next_run,
    sighup_drains,
    a_relay_that_ignores_sighup_from_the_start_goes_on,
    sigterm_drains_and_nothing_comes_again,
    sigterm_drains_a_thousand_subscriptions_in_time,
    sigint_ends_an_idle_relay_and_leaves_no_instance,
    a_running_relay_delivers_what_others_publish,
    a_new_subscription_says_how_much_it_will_get,
    logs_can_be_json,
    a_second_signal_stops_at_once,
    until_idle_fails_when_a_sink_did_not_take_everything,
    until_idle_fails_while_the_receiver_has_paused_what_waits,
    until_idle_fails_when_a_sink_refused_an_event,
    until_idle_fails_for_a_retry_and_not_for_a_delay,
    until_idle_does_not_fail_for_a_subscription_of_another_config,
);
