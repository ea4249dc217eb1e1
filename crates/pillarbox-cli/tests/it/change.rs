use serde_json::{Value, json};

use crate::place::{On, Place, on_each, stderr, stdout};

/// Every delivery has failed for good.
fn kill_deliveries(place: &Place) {
    let sql = place.sql();
    sql.execute(&format!("update pillarbox_delivery set state = 'dead', due_at = {}", sql.time(0)));
}

fn pause_holds_and_resume_lets_go(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out"]);
    let id = place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    assert!(!place.path("out.ndjson").exists(), "a paused subscription delivered");
    assert_eq!(place.json(&["status"])["subscriptions"][0]["paused"], true);
    place.ok(&["resume", "out"]);
    place.ok(&["run", "--until-idle"]);
    assert!(place.read("out.ndjson").contains(&id));
}

fn a_pause_says_who_and_why(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    let shown = || {
        let status = place.json(&["status"])["subscriptions"][0].clone();
        [status["paused"].clone(), status["paused_by"].clone(), status["paused_reason"].clone()]
    };
    assert_eq!(shown(), [json!(false), Value::Null, Value::Null]);
    place.ok(&["pause", "out", "--reason", "moving house"]);
    assert_eq!(shown(), [json!(true), json!("operator"), json!("moving house")]);
    assert!(place.ok(&["status", "--check"]).contains("it is paused: moving house"), "said, and healthy");
    let id = place.publish(&[]);
    assert!(place.ok(&["why", &id]).contains("an operator paused the subscription: moving house"));
    assert!(place.ok(&["subscription", "list"]).contains("out: paused by the operator: moving house"));
    place.ok(&["resume", "out"]);
    assert_eq!(shown(), [json!(false), Value::Null, Value::Null]);
}

fn paused_by_the_receiver_is_an_alarm_until_an_operator_knows(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out", "--reason", "410 Gone"]);
    place.sql().execute("update pillarbox_subscription set paused_by = 'receiver'");
    let text = place.fails(4, &["status", "--check"]);
    assert!(text.contains("paused by its receiver: 410 Gone") && text.contains("pillarbox resume out"), "{text}");
    let id = place.publish(&[]);
    assert!(place.ok(&["why", &id]).contains("paused by the receiver: 410 Gone"));
    assert!(place.ok(&["subscription", "list"]).contains("out: paused by the receiver: 410 Gone"));
    let doctor = place.command(&["doctor"]).output().unwrap();
    assert_eq!(doctor.status.code(), Some(1));
    let text = stdout(&doctor);
    assert!(text.contains("failed   subscription 'out': ") && text.contains("fix: `pillarbox resume out`"), "{text}");
    let text = place.ok(&["pause", "out"]);
    for part in
        ["already paused", "paused by its receiver, and now by you", "no longer an alarm", "the reason stays: 410 Gone"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = place.ok(&["pause", "out", "--reason", "known"]);
    assert!(text.contains("the reason is now: known (it was: 410 Gone)") && !text.contains("receiver"), "{text}");
    assert!(place.ok(&["pause", "out", "--reason", "410 Gone"]).contains("the reason is now: 410 Gone"));
    assert!(place.ok(&["status", "--check"]).contains("it is paused: 410 Gone"), "somebody knows");
}

fn rewind_asks_shows_and_replays(on: On) {
    let place = Place::with_file_sink(on);
    (0..5).for_each(|_| drop(place.publish(&["--key", "k"])));
    place.ok(&["run", "--until-idle"]);
    let text = place.fails(2, &["rewind", "out", "--to", "start"]);
    assert!(text.contains("--yes") && text.contains("--dry-run"), "{text}");
    assert_eq!(place.json(&["rewind", "out", "--to", "2", "--dry-run"])["dry_run"], true);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 5, "a dry run replayed");
    place.ok(&["rewind", "out", "--to", "2", "--yes"]);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 8);
    place.ok(&["rewind", "out", "--to", "start", "--key", "k", "--yes"]);
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 13);
    place.fails(2, &["rewind", "out", "--to", "now"]);
    let text = place.fails(2, &["rewind", "out", "--to", "foo"]);
    assert!(text.contains("write start, a position, or a time") && !text.contains("now"), "{text}");
}

fn a_rewind_says_where_the_log_ends(on: On) {
    let place = Place::with_file_sink(on);
    (0..5).for_each(|_| drop(place.publish(&["--key", "k"])));
    place.ok(&["run", "--until-idle"]);
    let dry = |to: &str| place.ok(&["rewind", "out", "--to", to, "--dry-run"]);
    for (to, end) in [
        ("start", "; the log ends at position 5, so that is 5 events at most"),
        ("2", "; the log ends at position 5, so that is 3 events at most"),
        ("4", "; the log ends at position 5, so that is 1 event at most"),
        ("2020-01-01T00:00:00Z", "; the log ends at position 5, so that is 5 events at most"),
    ] {
        assert!(dry(to).trim_end().ends_with(end), "{to}: {}", dry(to));
    }
    for to in ["5", "99"] {
        let text = dry(to);
        let nothing =
            "dry run: would change nothing: nothing to replay above position 5: 'out' has settled nothing there";
        assert!(text.starts_with(nothing), "{to}: {text}");
    }
    let text = place.ok(&["rewind", "out", "--to", "99", "--yes"]);
    assert!(text.contains("a rewind never moves forward (the log ends at position 5)"), "{text}");
    let text = place.ok(&["rewind", "out", "--to", "5", "--yes"]);
    assert!(!text.contains("the log ends"), "{text}");
    place.ok(&["run", "--until-idle"]);
    assert_eq!(place.lines("out.ndjson").len(), 5, "nothing was replayed");
}

fn a_key_with_exactly_one_dead_event_is_requeued_without_a_question(on: On) {
    let place = Place::with_file_sink(on);
    let id = place.publish(&["--key", "k", "--delay", "1h"]);
    (0..2).for_each(|_| drop(place.publish(&["--key", "other", "--delay", "1h"])));
    place.ok(&["run", "--until-idle"]);
    kill_deliveries(&place);
    place.fails(2, &["requeue", "--subscription", "out", "--key", "other"]);
    let changed = place.json(&["requeue", "--subscription", "out", "--key", "k"]);
    assert_eq!((&changed["count"], &changed["events"]), (&json!(1), &json!([id])), "{changed}");
    assert_eq!(place.json(&["status"])["subscriptions"][0]["dead"], 2, "the others stay");
}

fn one_is_told_in_the_singular(on: On) {
    let place = Place::with_file_sink(on);
    let id = place.publish(&["--key", "k", "--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    kill_deliveries(&place);
    assert!(place.ok(&["status"]).contains("subscription 'out': 1 event is dead"));
    let text = place.ok(&["requeue", "--subscription", "out", "--event", &id]);
    assert!(text.starts_with("1 delivery of 'out' is due now"), "{text}");
    place.ok(&["run", "--until-idle"]);
    let text = place.ok(&["rewind", "out", "--to", "start", "--key", "k", "--yes"]);
    assert!(text.starts_with("'out' replays 1 event of key 'k'"), "{text}");
    let text = place.ok(&["subscription", "delete", "out", "--yes"]);
    assert!(text.starts_with("'out' is deleted, with 1 delivery\n"), "{text}");
}

fn dead_events_are_listed_requeued_and_skipped(on: On) {
    let place = Place::with_file_sink(on);
    let ids: Vec<String> = (0..2).map(|_| place.publish(&["--key", "k", "--delay", "1h"])).collect();
    place.ok(&["run", "--until-idle"]);
    kill_deliveries(&place);
    let dead = place.json(&["list", "--subscription", "out", "--state", "dead"]);
    assert_eq!(dead.as_array().unwrap().len(), 2, "{dead}");
    assert_eq!((&dead[0]["id"], &dead[0]["state"]), (&ids[0].as_str().into(), &"dead".into()));
    place.fails(2, &["requeue", "--subscription", "out"]);
    place.fails(2, &["requeue", "--subscription", "out", "--all"]);
    place.fails(2, &["requeue", "--subscription", "out", "--key", "k"]);
    place.ok(&["skip", "--subscription", "out", "--event", &ids[0], "--reason", "test data"]);
    let changed = place.json(&["requeue", "--subscription", "out", "--key", "k"]);
    assert_eq!(
        (&changed["count"], &changed["dry_run"]),
        (&1.into(), &false.into()),
        "one is no more than --event: {changed}"
    );
    kill_deliveries(&place);
    let changed = place.json(&["requeue", "--subscription", "out", "--all", "--yes"]);
    assert_eq!((&changed["count"], &changed["events"][0]), (&1.into(), &ids[1].as_str().into()), "{changed}");
    place.ok(&["run", "--until-idle"]);
    let arrived = place.lines("out.ndjson");
    assert_eq!((arrived.len(), &arrived[0]["id"]), (1, &ids[1].as_str().into()));
}

fn lanes_are_changed_and_each_key_keeps_its_order(on: On) {
    let place = Place::with_file_sink(on);
    let keys = ["a", "b", "c", "d"];
    let publish = |numbers: std::ops::Range<i64>| {
        let lines: Vec<String> = numbers.map(|number| number.to_string()).collect();
        for key in keys {
            let args = ["publish", "--topic", "t", "--type", "y", "--key", key, "--ndjson"];
            let output = place.pipe(&args, lines.join("\n").as_bytes());
            assert_eq!(output.status.code(), Some(0), "{}", crate::place::stderr(&output));
        }
    };
    publish(0..10);
    place.ok(&["run", "--until-idle"]);
    let relane = ["subscription", "relane", "out", "--lanes", "3", "--yes"];
    let text = place.fails(1, &relane);
    assert!(text.contains("pause it first"), "{text}");
    place.ok(&["pause", "out"]);
    publish(10..20);
    assert_eq!(place.json(&relane)["count"], 3);
    assert_eq!(place.json(&["subscription", "list"])[0]["lanes"], 3);
    place.ok(&["resume", "out"]);
    place.ok(&["run", "--until-idle"]);
    publish(20..30);
    place.ok(&["run", "--until-idle"]);
    let arrived = place.lines("out.ndjson");
    assert_eq!(arrived.len(), 3 * 10 * keys.len(), "each once");
    for key in keys {
        let of_key = arrived.iter().filter(|event| event["subject"] == key);
        let numbers: Vec<i64> = of_key.map(|event| event["data"].as_i64().unwrap()).collect();
        assert_eq!(numbers, (0..30).collect::<Vec<_>>(), "{key}");
    }
    assert_eq!(place.json(&["audit", "--received", "out.ndjson"])["subscriptions"][0]["missing"], 0);
}

/// An event that was not read is no delivery, delayed or not.
fn the_preview_of_a_delete_tells_deliveries_from_what_was_not_read(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&["--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    (0..2).for_each(|_| drop(place.publish(&["--delay", "1h"])));
    let text = place.ok(&["subscription", "delete", "out", "--dry-run"]);
    assert!(text.contains("and 1 delivery; 2 events that it has not read yet"), "{text}");
    let text = place.ok(&["subscription", "delete", "out", "--yes"]);
    assert_eq!(text, "'out' is deleted, with 1 delivery\n");
}

fn a_blocked_event_is_not_said_to_be_due(on: On) {
    let place = Place::with_file_sink(on);
    let ids: Vec<String> = (0..2).map(|_| place.publish(&["--key", "k", "--delay", "1h"])).collect();
    place.ok(&["run", "--until-idle"]);
    kill_deliveries(&place);
    let waits = format!("waits for event {} of its key, at position 1, which is dead", ids[0]);
    for more in [&["--dry-run"][..], &[]] {
        let text = place.ok(&[&["requeue", "--subscription", "out", "--event", &ids[1]][..], more].concat());
        assert!(text.contains(&waits) && !text.contains("due now"), "{more:?}: {text}");
    }
}

fn lanes_that_are_as_many_already_stay(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    for more in [&[][..], &["--dry-run"], &["--yes"]] {
        let text = place.ok(&[&["subscription", "relane", "out", "--lanes", "8"][..], more].concat());
        assert!(text.ends_with("'out' already has 8 lanes\n"), "{more:?}: {text}");
    }
}

fn subscriptions_are_listed_renamed_and_deleted(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    let listed = place.json(&["subscription", "list"]);
    assert_eq!((&listed[0]["name"], &listed[0]["orphaned"]), (&"out".into(), &true.into()));
    place.ok(&["subscription", "rename", "out", "other"]);
    place.fails(2, &["subscription", "delete", "other"]);
    place.ok(&["subscription", "delete", "other", "--yes"]);
    assert_eq!(place.json(&["subscription", "list"]).as_array().unwrap().len(), 0);
}

#[test]
fn prune_removes_what_everybody_has_passed() {
    let place = Place::with_file_sink(On::Sqlite);
    (0..3).for_each(|_| drop(place.publish(&[])));
    place.ok(&["run", "--until-idle"]);
    place.publish(&[]);
    assert_eq!(place.json(&["prune"])["events"], 0, "it asks nothing, and the policy keeps all of them");
    let dry = place.json(&["prune", "--keep", "0ms", "--dry-run"]);
    assert_eq!(dry["dry_run"], true);
    assert_eq!((&dry["events"], &dry["unreceived"]), (&3.into(), &false.into()));
    assert!(dry["message"].as_str().unwrap().starts_with("would remove 3 events"), "{dry}");
    assert_eq!(place.json(&["status"])["log"]["events"], 4);
    assert_eq!(place.json(&["prune", "--keep", "0ms"])["events"], 3);
    assert_eq!(place.json(&["status"])["log"]["events"], 1);
}

/// What has been received is old, behind it lie so many events that nobody has.
fn a_dry_run_of_prune_counts_what_prune_removes(on: On) {
    for unreceived in [0, 1] {
        let place = Place::with_file_sink(on);
        (0..3).for_each(|_| drop(place.publish(&[])));
        place.ok(&["run", "--until-idle"]);
        (0..unreceived).for_each(|_| drop(place.publish(&[])));
        make_old(&place, on);
        let dry = place.json(&["prune", "--dry-run"]);
        assert_eq!((&dry["dry_run"], &dry["unreceived"]), (&true.into(), &false.into()), "{dry}");
        assert_eq!(place.json(&["status"])["log"]["events"], 3 + unreceived);
        let pruned = place.json(&["prune"]);
        assert_eq!(pruned["events"], dry["events"], "{unreceived}: {pruned} {dry}");
        let left = 3 + unreceived - pruned["events"].as_i64().unwrap();
        assert_eq!(place.json(&["status"])["log"]["events"], left);
        // PostgreSQL removes whole leaves, so that what nobody has received keeps its neighbours.
        assert!(left == unreceived || on == On::Postgres, "{pruned}");
        assert!(left == 0 || unreceived > 0, "{pruned}");
    }
}

/// All events were published ten days ago.
fn make_old(place: &Place, on: On) {
    place.sql().execute(match on {
        On::Sqlite => {
            "drop trigger pillarbox_event_is_never_changed; update pillarbox_event set created_at = created_at - 864000000"
        }
        On::Postgres => {
            "alter table pillarbox_event disable trigger is_never_changed; \
             update pillarbox_event set id = coalesce(id, pillarbox_event_id(position, created_at)), \
             created_at = created_at - interval '10 days'"
        }
    });
}

fn one_run_of_prune_looks_at_all_copies_of_events(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    let sql = place.sql();
    let (now, id) = match on {
        On::Sqlite => (sql.time(0), "printf('%036d', g)"),
        On::Postgres => (sql.time(0), "gen_random_uuid()"),
    };
    let numbers = "with recursive number (g) as (select 1 union all select g + 1 from number where g < 600)";
    sql.execute(&format!(
        "insert into pillarbox_event_kept (position, id, topic, type, headers, created_at)
         {numbers} select g, {id}, 't', 'y', '{{}}', {now} from number;
         insert into pillarbox_delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at)
         {numbers} select s.id, g, 0, g, 'dead', 1, {now}, {now}, {now} from pillarbox_subscription as s, number where g < 600"
    ));
    place.ok(&["prune"]);
    assert_eq!(sql.number("select count(*) from pillarbox_event_kept"), 599, "the 600th is of no delivery");
}

fn prune_needs_to_be_told_to_drop_what_a_hold_keeps_no_longer(on: On) {
    let place = Place::new(on);
    let sink = "sink = { kind = \"file\", path = \"out.ndjson\" }";
    let held = format!("[[subscription]]\nname = \"held\"\nhold = \"9d\"\ntopics = [\"orders\"]\n{sink}\n");
    place.write("pillarbox.toml", &held);
    place.ok(&["run", "--until-idle"]);
    (0..2).for_each(|_| drop(place.publish(&[])));
    place.ok(&["publish", "--topic", "other", "--type", "y"]);
    make_old(&place, on);
    let dry = place.json(&["prune", "--dry-run"]);
    assert_eq!(dry["undelivered"], 2, "the filter does not want the third: {dry}");
    let message = dry["message"].as_str().unwrap();
    assert!(message.contains("would drop 2 undelivered events by `hold`") && message.contains("--yes"), "{message}");
    let refused = place.fails(2, &["prune"]);
    assert!(refused.contains("prune would drop 2 undelivered events by `hold`, for subscriptions that"), "{refused}");
    let pending = |place: &Place| place.json(&["status"])["subscriptions"][0]["pending"].clone();
    assert_eq!(pending(&place), 2, "nothing was dropped");
    let pruned = place.json(&["prune", "--yes"]);
    assert_eq!((&pruned["undelivered"], pending(&place)), (&2.into(), 0.into()), "{pruned}");
    assert_eq!(place.json(&["prune"])["undelivered"], 0, "there is nothing more to ask for");
}

fn prune_wants_to_be_told_to_remove_what_nobody_has_received(on: On) {
    let place = Place::new(on);
    (0..3).for_each(|_| drop(place.publish(&[])));
    assert_eq!(place.json(&["prune"])["events"], 0, "what is young stays, and nothing has to be told");
    make_old(&place, on);
    let dry = place.json(&["prune", "--dry-run"]);
    assert_eq!((&dry["events"], &dry["unreceived"]), (&3.into(), &true.into()));
    assert!(dry["message"].as_str().unwrap().contains("no subscription has received"), "{dry}");
    let refused = place.fails(2, &["prune"]);
    assert!(refused.contains("3 events that no subscription has received") && refused.contains("--yes"), "{refused}");
    assert_eq!(place.json(&["status"])["log"]["events"], 3);
    assert_eq!(place.json(&["prune", "--yes"])["events"], 3);
    assert_eq!(place.json(&["status"])["log"]["events"], 0);
}

fn reset_empties_everything(on: On) {
    let place = Place::new(on);
    place.publish(&[]);
    let before = place.json(&["status"])["log"]["incarnation"].as_i64().unwrap();
    place.ok(&["reset", "--yes"]);
    let log = place.json(&["status"])["log"].clone();
    assert_eq!(log["events"], 0);
    let dry = place.ok(&["prune", "--dry-run"]);
    assert!(dry.contains("more than 7d ago (the log is empty)"), "{dry}");
    let tail = place.command(&["tail", "--from", "0", "--no-follow"]).output().unwrap();
    assert!(stderr(&tail).contains("retention or a reset has removed positions 1 "), "{}", stderr(&tail));
    assert!(log["incarnation"].as_i64().unwrap() > before);
}

fn questions_and_dry_runs_say_what_would_be_done(on: On) {
    let place = Place::with_file_sink(on);
    let id = place.publish(&["--key", "k", "--delay", "1h"]);
    place.ok(&["run", "--until-idle"]);
    place.publish(&["--key", "k"]);
    kill_deliveries(&place);
    place.ok(&["pause", "out"]);
    for (args, would) in [
        (&["requeue", "--subscription", "out", "--all"][..], "would set 1 delivery of 'out' back to due now"),
        (&["rewind", "out", "--to", "start"], "would replay the events from the start of the log on to 'out'"),
        (&["rewind", "out", "--to", "0"], "would replay the events above position 0 to 'out'"),
        (
            &["subscription", "delete", "out"],
            "would delete 'out' with its position in the log and 1 delivery; 1 event that",
        ),
        (&["subscription", "relane", "out", "--lanes", "4"], "would change the lanes of 'out' from 8 to 4"),
    ] {
        let question = place.fails(2, args);
        assert!(
            question.contains(&format!("refusing without confirmation: {would}")) && question.contains("--yes"),
            "{question}"
        );
        let dry = place.ok(&[args, &["--dry-run"]].concat());
        assert!(dry.starts_with(&format!("dry run: {would}")), "{dry}");
    }
    let skip = ["skip", "--subscription", "out", "--event", &id, "--reason", "r", "--dry-run"];
    assert!(place.ok(&skip).starts_with(&format!("dry run: would give event {id} up for 'out'")));
    assert_eq!(place.json(&["list", "--subscription", "out", "--state", "dead"]).as_array().unwrap().len(), 1);
    let text = place.ok(&["requeue", "--subscription", "out", "--key", "k", "--dry-run"]);
    assert!(text.starts_with("dry run: would set 1 delivery of 'out' back to due now"), "{text}");
    let text = place.ok(&["requeue", "--subscription", "out", "--key", "other"]);
    assert!(text.contains("nothing to requeue"), "there is nothing to ask about: {text}");
}

#[test]
fn retention_of_the_config_holds_for_those_without_it() {
    let place = Place::with_file_sink(On::Sqlite);
    let config = place.read("pillarbox.toml");
    place.write("pillarbox.toml", &format!("[retention]\nkeep = \"forever\"\n{config}"));
    place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    std::fs::remove_file(place.path("pillarbox.toml")).unwrap();
    assert_eq!(place.json(&["prune", "--keep", "0ms"])["events"], 0, "the log is kept for ever");
    place.write("pillarbox.toml", &format!("[retention]\nkeep = \"0ms\"\n{config}"));
    place.ok(&["run", "--until-idle"]);
    place.json(&["prune", "--keep", "0ms"]);
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 0, "until a config says otherwise");
}

on_each!(
    pause_holds_and_resume_lets_go,
    a_pause_says_who_and_why,
    a_dry_run_of_prune_counts_what_prune_removes,
    prune_wants_to_be_told_to_remove_what_nobody_has_received,
    one_run_of_prune_looks_at_all_copies_of_events,
    prune_needs_to_be_told_to_drop_what_a_hold_keeps_no_longer,
    a_key_with_exactly_one_dead_event_is_requeued_without_a_question,
    paused_by_the_receiver_is_an_alarm_until_an_operator_knows,
    rewind_asks_shows_and_replays,
    one_is_told_in_the_singular,
    a_rewind_says_where_the_log_ends,
    dead_events_are_listed_requeued_and_skipped,
    the_preview_of_a_delete_tells_deliveries_from_what_was_not_read,
    a_blocked_event_is_not_said_to_be_due,
    lanes_that_are_as_many_already_stay,
    subscriptions_are_listed_renamed_and_deleted,
    lanes_are_changed_and_each_key_keeps_its_order,
    reset_empties_everything,
    questions_and_dry_runs_say_what_would_be_done,
);
