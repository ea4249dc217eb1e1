use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pillarbox::{Delivery, Failure, Mode, Subscription};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::ledger::{Ledger, until};
use crate::place::{On, Place, Running, is_frozen, on_each, stderr, stdout};
use crate::{http, survive};

/// More than a pipe holds: a relay whose standard output nobody reads blocks in the middle of such an event.
const LONG: usize = 300_000;

/// The arguments of every relay here; its address and its number are read from its log.
const RUN: [&str; 5] = ["run", "--listen", "127.0.0.1:0", "--log-format", "json"];

/// A running relay of a queue that writes to its standard output.
struct Relay {
    process: Running,
    /// Where it listens.
    address: String,
    /// Its number.
    instance: i64,
}

impl Relay {
    fn new(process: Running) -> Self {
        let fields = |line: String| serde_json::from_str::<Value>(&line).unwrap()["fields"].clone();
        let address = fields(process.wait_for("\"listen\""))["listen"].as_str().unwrap().to_owned();
        let instance = fields(process.wait_for("relay started"))["instance"].as_i64().unwrap();
        Relay { process, address, instance }
    }

    fn start(place: &Place) -> Self {
        Relay::new(place.start(&RUN))
    }

    /// One that hangs in its first long event until somebody reads its standard output.
    fn stuck(place: &Place) -> Self {
        Relay::new(place.start_unread(&RUN))
    }

    /// Waits until its metrics have this line.
    fn until_counted(&self, metric: &str) {
        http::until(&self.address, "/metrics", |(_, text)| text.lines().any(|line| line == metric));
    }
}

/// A config with the queue `jobs` to standard output.
fn write_config(place: &Place, sections: &str, settings: &str) {
    place.write(
        "pillarbox.toml",
        &format!("{sections}\n[[subscription]]\nname = \"jobs\"\nmode = \"queue\"\n{settings}\nsink = {{ kind = \"stdout\" }}\n"),
    );
}

fn place_with(on: On, sections: &str, settings: &str) -> Place {
    let place = Place::new(on);
    write_config(&place, sections, settings);
    place
}

/// Publishes an event that a relay without a reader hangs in; its id.
fn publish_long(place: &Place, more: &[&str]) -> String {
    let mut args = vec!["publish", "--topic", "t", "--type", "y", "-"];
    args.extend(more);
    let output = place.pipe(&args, format!("\"{}\"", "x".repeat(LONG)).as_bytes());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output).trim().to_owned()
}

/// Waits until exactly this event is being worked on by this instance; its row.
fn until_claimed(place: &Place, id: &str, instance: i64) -> Value {
    let rows = place.until(&["list", "--subscription", "jobs", "--state", "processing"], |rows| {
        rows.as_array().unwrap().iter().any(|row| row["id"] == id && row["claim"]["instance"] == instance)
    });
    assert_eq!(rows.as_array().unwrap().len(), 1, "{rows}");
    rows[0].clone()
}

/// How many claims were recovered, by cause.
fn recovered(place: &Place) -> Vec<(String, u64)> {
    let status = place.json(&["status"]);
    let counts = status["subscriptions"][0]["recovered"].as_array().unwrap().clone();
    counts.iter().map(|by| (by["cause"].as_str().unwrap().to_owned(), by["count"].as_u64().unwrap())).collect()
}

fn only(cause: &str) -> Vec<(String, u64)> {
    vec![(cause.to_owned(), 1)]
}

/// Waits until everything is settled: nobody works on anything and nothing waits.
fn until_done(place: &Place) {
    place.until(&["status"], |status| {
        let jobs = &status["subscriptions"][0];
        ["pending", "processing", "retrying", "blocked", "dead"].iter().all(|state| jobs[state] == 0)
    });
}

fn a_queue_delivers_to_a_file_each_key_in_order(on: On) {
    const EVENTS: usize = 300;
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nmode = \"queue\"\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
    );
    for number in 0..EVENTS {
        let key = format!("key-{}", number % 7);
        let sql =
            format!("insert into pillarbox_event (topic, key, type, payload) values ('t', '{key}', 'y', '{number}')");
        place.sql().execute(&sql);
    }
    place.ok(&["run", "--until-idle"]);
    let verdict = Ledger::new(&place, "out").verdict();
    assert_eq!(verdict.received, EVENTS);
    verdict.assert_sound(0);
    assert_eq!(place.json(&["subscription", "list"])[0]["mode"], "queue");
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
    );
    let text = place.fails(1, &["run", "--until-idle"]);
    assert!(text.contains("out") && text.contains("queue"), "a mode is fixed: {text}");
}

fn a_relay_takes_over_what_waits_behind_another(on: On) {
    const EVENTS: usize = 16;
    let place = place_with(on, "", "workers = 1\nbatch_size = 1\n");
    let mut stuck = Relay::stuck(&place);
    let other = Relay::start(&place);
    place.until(&["status"], |status| status["subscriptions"][0]["owners"].as_array().unwrap().len() == 2);
    let mut ids: HashSet<String> = (0..EVENTS).map(|_| publish_long(&place, &[])).collect();
    let held = until_only_claimed_by(&place, stuck.instance);
    // What it reads while it has been stuck for long, and nothing waits in the queue, must not stay with it either.
    place.until(&["status"], |status| {
        status["subscriptions"][0]["oldest_processing_seconds"].as_f64().is_some_and(|age| age > 3.0)
    });
    ids.extend((0..EVENTS).map(|_| publish_long(&place, &[])));
    assert_eq!(until_only_claimed_by(&place, stuck.instance), held);
    stuck.process.read_output();
    stuck.process.wait_for_output(&held);
    until_done(&place);
    let mut arrived: Vec<String> = other.process.output_lines().map(|line| id_of(&line)).collect();
    assert_eq!(arrived.len(), 2 * EVENTS - 1, "each once, and all but one by the relay that is well");
    arrived.push(held);
    assert_eq!(arrived.into_iter().collect::<HashSet<String>>(), ids);
    assert_eq!(recovered(&place), []);
}

/// Waits until one event is left, and this instance works on it; its id.
fn until_only_claimed_by(place: &Place, instance: i64) -> String {
    let rows = place.until(&["list", "--subscription", "jobs"], |rows| {
        let rows = rows.as_array().unwrap();
        rows.len() == 1 && rows[0]["claim"]["instance"] == instance
    });
    rows[0]["id"].as_str().unwrap().to_owned()
}

fn id_of(line: &str) -> String {
    serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap().to_owned()
}

fn what_a_killed_relay_worked_on_comes_back_at_once_and_counts_as_an_attempt(on: On) {
    // Neither the lease nor the time-out can be what brings it back while this test waits.
    let place = place_with(on, "[relay]\nlease_ttl = \"10m\"\n", "");
    let killed = Relay::stuck(&place);
    let id = publish_long(&place, &["--key", "k"]);
    let row = until_claimed(&place, &id, killed.instance);
    assert!(row["claim"]["since"].is_string() && row["claim"]["beat_at"].is_string(), "{row}");
    let behind = place.publish(&["--key", "k"]);
    let mut heir = Relay::stuck(&place);
    check_that_people_see_the_owner(&place, &id, killed.instance);
    killed.process.signal("-KILL");
    let row = until_claimed(&place, &id, heir.instance);
    assert_eq!(row["attempts"], 1, "{row}");
    let shown = place.json(&["show", &id]);
    let error = &shown["subscriptions"][0]["delivery"]["errors"][0];
    assert_eq!((&error["kind"], &error["attempt"]), (&"crash".into(), &1.into()), "{shown}");
    heir.process.read_output();
    heir.process.wait_for_output(&id);
    heir.process.wait_for_output(&behind);
    until_done(&place);
    assert_eq!(recovered(&place), only("crash"));
    heir.until_counted("pillarbox_recovered_total{subscription=\"jobs\",cause=\"crash\"} 1");
    heir.until_counted("pillarbox_oldest_processing_age_seconds{subscription=\"jobs\"} 0");
    let text = place.ok(&["status"]);
    assert!(text.contains("QUEUE") && text.contains("crash 1"), "{text}");
}

/// Somebody works on this event.
fn check_that_people_see_the_owner(place: &Place, id: &str, owner: i64) {
    let text = place.ok(&["list", "--subscription", "jobs", "--state", "processing"]);
    assert!(text.contains("OWNER") && text.contains("SINCE") && text.contains(id), "{text}");
    let works = format!("instance {owner} works on it since ");
    for command in ["show", "why"] {
        let text = place.ok(&[command, id]);
        assert!(text.contains(&works) && text.contains("its last sign of life was at "), "{text}");
    }
    let answer = place.json(&["why", id])["subscriptions"][0].clone();
    assert_eq!(
        (&answer["cause"], &answer["delivery"]["claim"]["instance"]),
        (&"processing".into(), &owner.into()),
        "{answer}"
    );
    let jobs = place.json(&["status"])["subscriptions"][0].clone();
    assert_eq!(jobs["processing"], 1, "{jobs}");
    assert!(jobs["oldest_processing_seconds"].as_f64().is_some_and(|age| age >= 0.0), "{jobs}");
}

async fn a_live_handler_of_three_times_the_time_out_runs_once(on: On) {
    let place = place_with(on, "[recovery]\ncheck_interval = \"200ms\"\n", "processing_timeout = \"2s\"\n");
    let calls = Arc::new(AtomicUsize::new(0));
    let gate = Arc::new(Semaphore::new(0));
    let handler = {
        let (calls, gate) = (calls.clone(), gate.clone());
        move |_: Delivery| {
            let (calls, gate) = (calls.clone(), gate.clone());
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.map_err(|closed| Failure::event(closed.to_string()))?.forget();
                Ok::<(), Failure>(())
            }
        }
    };
    let id = place.publish(&[]);
    let timeout = Duration::from_secs(2);
    let jobs = Subscription { mode: Mode::Queue, processing_timeout: timeout, ..Subscription::new("jobs") };
    let slow = survive::start(&place, jobs, handler).await;
    until_claimed(&place, &id, slow.instance().0);
    let other = Relay::start(&place);
    let status = place.until(&["status"], |status| {
        status["subscriptions"][0]["oldest_processing_seconds"].as_f64().is_some_and(|age| age > 6.0)
    });
    assert!(status["log"]["recovery_at"].is_string(), "nobody has looked: {status}");
    let row = until_claimed(&place, &id, slow.instance().0);
    assert_eq!(row["attempts"], 0, "{row}");
    gate.add_permits(1);
    until_done(&place);
    slow.drain().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(recovered(&place), []);
    assert_eq!(other.process.output_lines().count(), 0, "it ran twice");
}

/// Freezes a relay where it keeps nobody else from writing: on SQLite all who write share one lock.
fn freeze(place: &Place, process: &Running) {
    until("the relay is frozen and holds no lock", || {
        process.signal("-STOP");
        until("every thread has stopped", || is_frozen(process.id()));
        let free = !place.url().starts_with("sqlite:") || {
            let sql = place.rusqlite();
            sql.busy_timeout(Duration::from_millis(100)).unwrap();
            sql.execute_batch("begin immediate; rollback").is_ok()
        };
        if !free {
            process.signal("-CONT");
        }
        free
    });
}

fn a_frozen_relay_loses_its_event_after_the_time_out_and_cannot_settle_it_later(on: On) {
    // The lease lasts longer than this test waits, so that it is the time-out which is seen.
    let sections = "[relay]\nlease_ttl = \"10m\"\n[recovery]\ncheck_interval = \"200ms\"\n";
    let place = place_with(on, sections, "processing_timeout = \"2s\"\n");
    let mut frozen = Relay::stuck(&place);
    let id = publish_long(&place, &[]);
    until_claimed(&place, &id, frozen.instance);
    let mut heir = Relay::stuck(&place);
    freeze(&place, &frozen.process);
    let row = until_claimed(&place, &id, heir.instance);
    assert_eq!(row["attempts"], 1, "{row}");
    assert_eq!(recovered(&place), only("timeout"));
    frozen.process.signal("-CONT");
    frozen.process.read_output();
    frozen.process.wait_for_output(&id);
    frozen.until_counted("pillarbox_claims_refused_total{subscription=\"jobs\"} 1");
    let row = until_claimed(&place, &id, heir.instance);
    assert_eq!(row["attempts"], 1, "the refused settlement has changed it: {row}");
    heir.process.read_output();
    heir.process.wait_for_output(&id);
    until_done(&place);
    heir.until_counted("pillarbox_recovered_total{subscription=\"jobs\",cause=\"timeout\"} 1");
    assert_eq!(recovered(&place), only("timeout"));
}

fn with_recovery_off_only_an_operator_brings_back_what_a_dead_relay_worked_on(on: On) {
    let place =
        place_with(on, "[relay]\nlease_ttl = \"1s\"\n[recovery]\nenabled = false\ncheck_interval = \"100ms\"\n", "");
    let killed = Relay::stuck(&place);
    let id = publish_long(&place, &[]);
    until_claimed(&place, &id, killed.instance);
    let heir = Relay::start(&place);
    killed.process.signal("-KILL");
    place.until(&["status"], |status| status["subscriptions"][0]["owners"] == serde_json::json!([heir.instance]));
    let row = until_claimed(&place, &id, killed.instance);
    assert_eq!(row["attempts"], 0, "{row}");
    assert_eq!(place.json(&["recover", "--silent-for", "1h", "--yes"])["count"], 0, "it was alive a moment ago");
    assert_eq!(
        place.json(&["recover", "--instance", &heir.instance.to_string(), "--silent-for", "0s", "--yes"])["count"],
        0
    );
    let all = ["recover", "--subscription", "jobs", "--silent-for", "0s"];
    let question = place.fails(2, &all);
    assert!(question.contains("would take 1 delivery of 'jobs' from instances"), "{question}");
    assert!(question.contains("handled twice") && question.contains("--yes"), "{question}");
    let dry = place.json(&[&all[..], &["--dry-run"]].concat());
    assert_eq!((&dry["count"], &dry["dry_run"]), (&1.into(), &true.into()), "{dry}");
    until_claimed(&place, &id, killed.instance);
    let output = place.command(&[&all[..], &["--yes", "--json"]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("handled twice"), "{}", stderr(&output));
    assert_eq!(serde_json::from_str::<Value>(&stdout(&output)).unwrap()["count"], 1);
    heir.process.wait_for_output(&id);
    until_done(&place);
    assert_eq!(recovered(&place), only("operator"));
    assert_eq!(place.json(&["recover", "--yes"])["count"], 0, "there is nothing left to do");
}

fn a_conservative_relay_waits_for_the_time_out_although_the_process_is_dead(on: On) {
    let sections = "[relay]\nlease_ttl = \"1s\"\n[recovery]\nprofile = \"conservative\"\ncheck_interval = \"200ms\"\n";
    let place = place_with(on, sections, "processing_timeout = \"4s\"\n");
    let killed = Relay::stuck(&place);
    let id = publish_long(&place, &[]);
    until_claimed(&place, &id, killed.instance);
    let heir = Relay::start(&place);
    killed.process.signal("-KILL");
    // The lanes are the heir's at once; the claim is not.
    place.until(&["status"], |status| status["subscriptions"][0]["owners"] == serde_json::json!([heir.instance]));
    until_claimed(&place, &id, killed.instance);
    heir.process.wait_for_output(&id);
    until_done(&place);
    assert_eq!(recovered(&place), only("timeout"));
}

fn a_clean_stop_gives_back_what_is_not_done_and_counts_no_attempt(on: On) {
    let place = place_with(on, "[relay]\nshutdown_grace = \"1s\"\n", "");
    let mut stopped = Relay::stuck(&place);
    let id = publish_long(&place, &[]);
    until_claimed(&place, &id, stopped.instance);
    stopped.process.signal("-TERM");
    stopped.process.end();
    let rows = place.json(&["list", "--subscription", "jobs"]);
    assert_eq!((&rows[0]["id"], &rows[0]["attempts"]), (&id.as_str().into(), &0.into()), "{rows}");
    assert!(rows[0]["claim"].is_null() && rows[0]["state"] == "pending", "{rows}");
    let heir = Relay::start(&place);
    heir.process.wait_for_output(&id);
    until_done(&place);
    assert_eq!(recovered(&place), []);
}

fn recover_with_nothing_to_do_is_done(on: On) {
    let place = place_with(on, "", "");
    place.ok(&["run", "--until-idle"]);
    for args in
        [&["recover"][..], &["recover", "--yes"], &["recover", "--subscription", "jobs", "--silent-for", "0s", "--yes"]]
    {
        let changed = place.json(args);
        assert_eq!((&changed["count"], &changed["dry_run"]), (&0.into(), &false.into()), "{changed}");
    }
    let dry = place.ok(&["recover", "--dry-run"]);
    assert!(dry.starts_with("dry run: would change nothing: "), "{dry}");
    let text = place.fails(1, &["recover", "--subscription", "jbos", "--yes"]);
    assert!(text.contains("jbos"), "{text}");
    place.fails(2, &["recover", "--silent-for", "5"]);
    let text = place.ok(&["status"]);
    assert!(text.contains("QUEUE") && text.contains("recovery "), "{text}");
}

on_each!(
    a_queue_delivers_to_a_file_each_key_in_order,
    a_relay_takes_over_what_waits_behind_another,
    what_a_killed_relay_worked_on_comes_back_at_once_and_counts_as_an_attempt,
    a_frozen_relay_loses_its_event_after_the_time_out_and_cannot_settle_it_later,
    with_recovery_off_only_an_operator_brings_back_what_a_dead_relay_worked_on,
    a_conservative_relay_waits_for_the_time_out_although_the_process_is_dead,
    a_clean_stop_gives_back_what_is_not_done_and_counts_no_attempt,
    recover_with_nothing_to_do_is_done;
    a_live_handler_of_three_times_the_time_out_runs_once
);
