use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;

use crate::place::{On, Place, on_each, stderr, stdout};

fn a_reader_that_leaves_is_no_failure(on: On) {
    let place = Place::new(on);
    let lines: String = (0..20_000).map(|number| format!("{number}\n")).collect();
    assert!(place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], lines.as_bytes()).status.success());
    for args in [&["tail", "--from", "0"][..], &["list", "--limit", "20000"], &["run", "--stdout", "--listen", "off"]] {
        let mut child = place.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    }
}

fn a_reader_that_leaves_does_not_stop_the_publishing(on: On) {
    let place = Place::new(on);
    let args = ["publish", "--topic", "t", "--type", "y", "--ndjson"];
    for (last, code, published) in [("", 0, 20_000), ("oops\n", 1, 40_000)] {
        let mut command = place.command(&args);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Nobody reads a single id: the pipe is closed before there is one.
        drop(child.stdout.take());
        let mut stdin = child.stdin.take().unwrap();
        let lines: String = (0..20_000).map(|number| format!("{number}\n")).collect();
        stdin.write_all(format!("{lines}{last}").as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert_eq!(place.json(&["status"])["log"]["events"], published);
    }
}

fn a_pipe_gets_no_colours(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    for args in [&["status"][..], &["list"], &["doctor"], &["subscription", "list"], &["audit"]] {
        for command in [&mut place.command(args), place.command(args).env("NO_COLOR", "1")] {
            let output = command.output().unwrap();
            assert!(!stdout(&output).contains('\x1b') && !stderr(&output).contains('\x1b'), "{args:?}");
            assert!(!stdout(&output).is_empty(), "{args:?}");
        }
    }
}

/// What a command says on a terminal, to which all its streams lead.
fn on_a_terminal(place: &Place, args: &[&str]) -> String {
    let command = place.command(args);
    let spawn = "import pty, sys; pty.spawn(sys.argv[1:])";
    let mut terminal = Command::new("python3");
    terminal.args(["-c", spawn]).arg(command.get_program()).args(command.get_args());
    let output = terminal.current_dir(place.path("")).env("DATABASE_URL", place.url()).stdin(Stdio::null()).output();
    stdout(&output.unwrap())
}

fn where_terms_are_explained_is_said_on_a_terminal_and_in_the_help(on: On) {
    const EXPLAIN: &str = "`pillarbox explain WORD` says what a term means";
    let place = Place::with_file_sink(on);
    let id = place.publish(&[]);
    for args in [&["status"][..], &["why", &id], &["doctor"]] {
        assert_eq!(on_a_terminal(&place, args).matches(EXPLAIN).count(), 1, "{args:?}");
        for more in [&["--json"], &["--quiet"]] {
            assert!(!on_a_terminal(&place, &[args, more].concat()).contains("explain"), "{args:?} {more:?}");
        }
        let output = place.command(args).output().unwrap();
        assert!(!stdout(&output).contains("explain") && !stderr(&output).contains("explain"), "{args:?}");
        assert!(place.ok(&[args[0], "--help"]).contains(EXPLAIN), "{args:?}");
    }
}

/// What clears a screen, sets a title, turns the direction of text and begins lines of its own.
const HOSTILE: &str = "k\u{1b}]0;title\u{7}\u{1b}[2J\u{9b}31m\u{7f}\u{202e}\u{2028}\nFORGED  row";

/// Lines of which a terminal acts on nothing but their ends.
fn assert_acts_on_nothing(what: &str, text: &str) {
    let active = |c: char| (c.is_control() && c != '\n') || "\u{2028}\u{2029}\u{202a}\u{202d}\u{202e}".contains(c);
    assert!(!text.contains(active), "{what}: {text:?}");
    assert!(!text.lines().any(|line| line.starts_with("FORGED")), "{what}: {text}");
}

/// Publishes an event that a receiver of the subscription `store` refuses with these words; its id.
fn refused_with(place: &Place, words: &str) -> String {
    let receiver = Place::empty(On::Postgres);
    let sink = format!("{{ kind = \"postgres\", url = \"{}\", table = \"store\" }}", receiver.url());
    let own = "[[subscription]]\nname = \"store\"\nstart = \"now\"";
    place.write("store.toml", &format!("{own}\nretry = {{ max_attempts = 1 }}\nsink = {sink}\n"));
    let run = ["run", "--config", "store.toml", "--until-idle", "--listen", "off"];
    place.ok(&run);
    place.publish(&["{}"]);
    place.ok(&run);
    let refuse = format!(
        "create function refuse() returns trigger language plpgsql as $f$ begin raise exception using message = $w${words}$w$; end $f$; \
         create trigger refuse before insert on store for each row execute function refuse()"
    );
    receiver.sql().raw(&refuse).unwrap();
    let id = place.publish(&["{}"]);
    place.fails(1, &run);
    id
}

/// Whoever can publish, and every server, says something that ends on an operator's terminal.
fn what_others_say_acts_on_no_terminal(on: On) {
    let place = Place::with_file_sink(on);
    let hostile = HOSTILE;
    let payload = "{\n\t\"p\":\t\"\u{7f}\u{9b}\u{202e}\u{2028}\"}";
    let id = place.publish(&["--key", hostile, "--header", &format!("h={hostile}"), payload]);
    place.ok(&["run", "--until-idle"]);
    let refused = refused_with(&place, hostile);
    place.ok(&["pause", "out", "--reason", hostile]);
    let commands = [
        &["list"][..],
        &["list", "--subscription", "out"],
        &["show", &id],
        &["why", &id],
        &["list", "--subscription", "store"],
        &["show", &refused],
        &["why", &refused],
        &["why", &refused, "--subscription", "store", "-v"],
        &["status"],
        &["subscription", "list"],
        &["tail", "--no-follow", "--from", "0"],
        &["tail", "--no-follow", "--from", "0", "--short"],
        &["audit"],
        &["doctor"],
        &["rewind", "out", "--to", "start", "--key", hostile],
        &["why", &id, "--subscription", hostile],
        &["resume", hostile],
        &["list", "--state", hostile],
        &["run", "--stdout", "--until-idle", "--listen", "off"],
    ];
    for (args, json) in commands.iter().flat_map(|args| [(args, false), (args, true)]) {
        let mut command = place.command(args);
        let output = if json { command.arg("--json") } else { &mut command }.output().unwrap();
        for text in [stdout(&output), stderr(&output)] {
            assert_acts_on_nothing(&format!("{args:?} {json}"), &text);
        }
    }
    assert_eq!(place.json(&["list"])[0]["key"], hostile, "JSON means what it meant");
    let error = place.json(&["list", "--subscription", "store"])[0]["error"].as_str().unwrap().to_owned();
    assert!(error.contains(hostile), "what the receiver said is there: {error:?}");
    assert_eq!(place.json(&["show", &id])["payload"]["p"], "\u{7f}\u{9b}\u{202e}\u{2028}");
    for args in [&["tail", "--no-follow", "--from", "0"][..], &["run", "--stdout", "--until-idle", "--listen", "off"]] {
        let text = place.ok(args);
        let mut events = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
        let event = events.next().unwrap().unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!((&event["subject"], &event["h"]), (&hostile.into(), &hostile.into()), "{args:?}");
        assert_eq!(event["data"]["p"], "\u{7f}\u{9b}\u{202e}\u{2028}", "{args:?}");
    }
}

/// Whoever answers at the address of a database says what it likes before anybody has proven who it is.
#[test]
fn what_a_rogue_server_says_acts_on_no_terminal() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://u:p@{}/d?sslmode=disable", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let fields = format!("SFATAL\0VFATAL\0C28P01\0M{HOSTILE}\0\0");
            let length = (fields.len() as u32 + 4).to_be_bytes();
            // The other side may be gone; then the test fails by what it has said.
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(&[b"E", &length[..], fields.as_bytes()].concat());
        }
    });
    let place = Place::at(&url);
    for args in [&["status"][..], &["status", "--json"], &["doctor"], &["migrate"], &["list", "-v"]] {
        let output = place.command(args).output().unwrap();
        assert!(!output.status.success());
        assert!(stdout(&output).contains("FORGED") || stderr(&output).contains("FORGED"), "{args:?}: {output:?}");
        for text in [stdout(&output), stderr(&output)] {
            assert_acts_on_nothing(&format!("{args:?}"), &text);
        }
    }
}

/// The log has one line a record, whatever the events, the receivers and the names of files say.
fn what_others_say_acts_on_no_terminal_by_the_log(on: On) {
    let place = Place::new(on);
    let config = format!("{HOSTILE}.toml");
    // A secret that everybody can read and a sink that cannot be written: one record names this file, the other the key.
    let sink = "{ kind = \"chain\", sinks = [{ kind = \"file\", path = \"none/out\" }, { kind = \"http\", url = \"http://h\", secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\" }] }";
    place.write(&config, &format!("[[subscription]]\nname = \"out\"\nsink = {sink}\n"));
    place.publish(&["--key", HOSTILE]);
    for format in ["text", "json"] {
        let args = ["run", "-v", "--config", &config, "--listen", "off", "--log-format", format];
        let mut run = place.start(&args);
        let mut lines = vec![run.wait_for("every user of this host can read"), run.wait_for("delivery failed")];
        run.signal("-TERM");
        lines.extend(run.log_to_end());
        for line in &lines {
            assert_acts_on_nothing(format, line);
            match serde_json::from_str::<serde_json::Value>(line) {
                Ok(record) => assert!(record["level"].is_string(), "{line}"),
                Err(error) => assert!(format == "text" && line.starts_with("20"), "{error}: {line}"),
            }
        }
        if format == "json" {
            let failed: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
            assert_eq!(failed["fields"]["key"], HOSTILE, "JSON means what it meant");
        }
    }
}

fn an_empty_log_has_no_positions(on: On) {
    let place = Place::new(on);
    let text = place.ok(&["status"]);
    assert!(text.contains("0 events, no positions in use (the next one is 1)"), "{text}");
    place.publish(&[]);
    let text = place.ok(&["status"]);
    assert!(text.contains("1 event, positions 1 to 1"), "{text}");
}

fn short_lines_can_be_json(on: On) {
    let place = Place::new(on);
    let id = place.publish(&["--key", "k"]);
    let line = place.json(&["tail", "--short", "--no-follow", "--from", "0"]);
    assert_eq!((&line["id"], &line["key"], &line["position"]), (&id.as_str().into(), &"k".into(), &1.into()), "{line}");
    assert!(line["resumetoken"].is_string() && line.get("data").is_none(), "{line}");
}

#[test]
fn what_every_command_takes_has_a_heading_of_its_own() {
    let help = Place::at("sqlite:app.db").ok(&["requeue", "--help"]);
    let (own, global) = help.split_once("Global options:").unwrap();
    for option in ["--subscription", "--event", "--all", "--dry-run"] {
        assert!(own.contains(option) && !global.contains(&format!("{option} ")), "{option}: {help}");
    }
    for option in ["--database", "--config", "--json", "--log-format"] {
        assert!(global.contains(option) && !own.contains(option), "{option}: {help}");
    }
}

fn errors_are_json_where_json_is_asked_for(on: On) {
    let place = Place::new(on);
    for (code, args, name, fix) in [
        (1, &["pause", "nobody"][..], "not_found", Some("start a relay")),
        (1, &["show", "00000000-0000-7000-8000-000000000000"], "not_found", Some("look for it with `pillarbox list`")),
        (1, &["why", "00000000-0000-7000-8000-000000000000"], "not_found", Some("look for it with `pillarbox list`")),
        (2, &["publish", "--topic", "t", "--type", "y", "x"], "invalid", Some("quote it as JSON")),
        (2, &["publish", "--topic", "t", "--type", "y", ""], "invalid", Some("leave it out")),
        (
            2,
            &["publish", "--topic", "t", "--type", "y", "--delay", "-5s"],
            "usage",
            Some("write a value without a minus sign"),
        ),
        (2, &["reset"], "usage", Some("pass --yes")),
        (2, &["list", "--stat", "dead"], "usage", None),
    ] {
        let text = place.fails(code, &[args, &["--json"]].concat());
        let error: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let error = &error["error"];
        assert_eq!(error["code"], name, "{text}");
        assert!(!error["message"].as_str().unwrap().is_empty(), "{text}");
        assert!(fix.is_none_or(|fix| error["fix"].as_str().unwrap().starts_with(fix)), "{text}");
    }
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson", "--json"], b"1\nx\n");
    let error: serde_json::Value = serde_json::from_str(&stderr(&output)).unwrap();
    let error = &error["error"];
    assert_eq!((output.status.code(), &error["code"]), (Some(1), &"invalid".into()), "as for one event: {error}");
    assert!(error["fix"].as_str().unwrap().starts_with("write one JSON value per line"), "{error}");
}

fn status_has_the_fields_of_the_contract(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    let id = place.publish(&["--key", "k"]);
    let status = place.json(&["status"]);
    let one = &status["subscriptions"][0];
    for field in [
        "pending",
        "delayed",
        "processing",
        "retrying",
        "blocked",
        "dead",
        "oldest_age_seconds",
        "oldest_due",
        "lag",
        "owners",
    ] {
        assert!(one.get(field).is_some(), "{field}: {one}");
    }
    assert_eq!((&one["pending"], &one["lag"]), (&1.into(), &1.into()));
    assert_eq!((&one["condition"], &status["healthy"]), (&"orphaned".into(), &false.into()), "{status}");
    assert_eq!(place.json(&["subscription", "list"])[0]["condition"], "orphaned");
    assert!(status["problems"].is_array() && status["instances"].is_array(), "{status}");
    let listed = place.json(&["list"]);
    for field in ["id", "position", "topic", "type", "key", "created_at"] {
        assert!(listed[0].get(field).is_some(), "{field}: {listed}");
    }
    assert_eq!((&listed[0]["id"], &listed[0]["key"]), (&id.as_str().into(), &"k".into()));
    assert_eq!(place.json(&["list", "--subscription", "out", "--state", "pending"])[0]["state"], "pending");
}

fn doctor_finds_nothing_wrong_with_a_new_database(on: On) {
    let place = Place::new(on);
    let checks = place.json(&["doctor"]);
    assert!(!checks.as_array().unwrap().is_empty());
    for check in checks.as_array().unwrap() {
        assert!(check["level"] != "failed" && check.get("finding").is_some() && check.get("fix").is_some(), "{check}");
    }
}

on_each!(
    what_others_say_acts_on_no_terminal,
    what_others_say_acts_on_no_terminal_by_the_log,
    an_empty_log_has_no_positions,
    short_lines_can_be_json,
    errors_are_json_where_json_is_asked_for,
    a_reader_that_leaves_is_no_failure,
    a_reader_that_leaves_does_not_stop_the_publishing,
    a_pipe_gets_no_colours,
    where_terms_are_explained_is_said_on_a_terminal_and_in_the_help,
    status_has_the_fields_of_the_contract,
    doctor_finds_nothing_wrong_with_a_new_database,
);
