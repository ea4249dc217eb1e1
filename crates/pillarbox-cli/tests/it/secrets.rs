//! Canaries in every secret of a config, and receivers that refuse in many ways: no canary may come out anywhere.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use crate::http::get;
use crate::place::{On, Place, on_each, stderr, stdout};
use crate::receiver::{Manners, Receiver};

/// How a canary looks in a text: as it is, in the base64 of basic authentication, and as the bytes of a decoded webhook secret.
const TRACES: [&str; 3] = ["canary", "Q0FOQVJZ", "8, 3, 64, 69, 136, 109"];

/// The lines of a text that betray a canary.
fn leaks(text: &str) -> Vec<&str> {
    let betrays = |line: &&str| TRACES.iter().any(|trace| line.contains(trace) || line.to_lowercase().contains(trace));
    text.lines().filter(betrays).collect()
}

#[test]
fn a_canary_that_is_printed_is_found() {
    for line in [
        "password CANARY-redis refused",
        "password canary-redis refused",
        "Authorization: Basic YWI6Q0FOQVJZLXVybA==",
        "Secret([8, 3, 64, 69, 136, 109, 1])",
    ] {
        assert_eq!(leaks(&format!("all is well\n{line}\nall is well\n")), [line]);
    }
    assert_eq!(leaks("redis://ab:***@h/0\nwhsec_***\n"), Vec::<&str>::new());
}

/// Subscriptions with a secret wherever one fits; `ADDRESS` is where their receivers are.
const HTTP: &str = r#"
[[subscription]]
name = "http"
[subscription.sink]
kind = "http"
url = "http://ADDRESS/hook?token=CANARY-query"
timeout = "1s"
secret = "whsec_CANARYhttpsecretAAAAAAAAAAAAAAAAAAAAAAAAAAA="
secrets = [{ file = "webhook" }]
[subscription.sink.headers]
Authorization = "Basic YWI6Q0FOQVJZLXVybA=="
X-Key = { env = "KEY" }
X-File = { file = "value" }

[[subscription]]
name = "http-binary"
sink = { kind = "http", url = "http://ADDRESS/", mode = "binary", timeout = "1s", headers = { X-Key = "CANARY-key" } }

[[subscription]]
name = "http-batched"
sink = { kind = "http", url = { file = "http_url" }, mode = "batched", timeout = "1s" }
"#;

const REDIS: &str = r#"
[[subscription]]
name = "pubsub"
sink = { kind = "redis_pubsub", url = "redis://ab:CANARY-redis@ADDRESS/0", channel = "c", timeout = "1s" }

[[subscription]]
name = "stream"
sink = { kind = "redis_stream", url = { file = "redis_url" }, stream = "s", timeout = "1s" }

[[subscription]]
name = "sentinel"
[subscription.sink]
kind = "redis_stream"
url = "redis://ab:CANARY-redis@/0"
stream = "s"
timeout = "1s"
sentinels = ["ADDRESS"]
master = "m"
sentinel_password = "CANARY-sentinel"
"#;

const POSTGRES: &str = r#"
[[subscription]]
name = "postgres"
sink = { kind = "postgres", url = "postgres://ab:CANARY-postgres@ADDRESS/d", table = "t", timeout = "1s" }

[[subscription]]
name = "chain"
[subscription.sink]
kind = "chain"
sinks = [{ kind = "postgres", url = { env = "POSTGRES_URL" }, table = "t", timeout = "1s" }, { kind = "stdout" }]
"#;

const KAFKA: &str = r#"
[[subscription]]
name = "kafka"
[subscription.sink]
kind = "kafka"
brokers = "ADDRESS"
topic = "t"
timeout = "3s"
[subscription.sink.properties]
security.protocol = "sasl_plaintext"
sasl.mechanism = "PLAIN"
sasl.username = "CANARY-user"
sasl.password = { file = "value" }
"#;

/// The subscriptions of the kinds that are in this build.
fn subscriptions(address: &str) -> String {
    let kinds = [
        (cfg!(feature = "http"), HTTP),
        (cfg!(feature = "redis"), REDIS),
        (cfg!(feature = "postgres"), POSTGRES),
        (cfg!(feature = "kafka"), KAFKA),
    ];
    let built: String = kinds.iter().filter(|(built, _)| *built).map(|(_, text)| *text).collect();
    built.replace("ADDRESS", address)
}

fn names() -> Vec<String> {
    let all = subscriptions("");
    all.lines().filter_map(|line| line.strip_prefix("name = ")).map(|name| name.trim_matches('"').to_owned()).collect()
}

/// A place with events, and a config with canaries wherever one fits.
fn place_with_canaries(on: On, address: &str) -> Place {
    let mut place = Place::new(on);
    if on == On::Postgres {
        // The server trusts everybody, and so takes any password.
        place = place.with_url(|place| place.url().replacen("postgres@", "postgres:CANARY-database@", 1));
        assert!(place.url().contains("CANARY"), "the URL has another form than this test knows");
    }
    place.write("webhook", "whsec_CANARYhttpsecretAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
    place.write("value", "CANARY-file");
    place.write("http_url", &format!("http://{address}/CANARY-path"));
    place.write("redis_url", &format!("redis://:CANARY-redis-file@{address}/0"));
    let config = format!("[http]\ntokens = [\"CANARY-token\"]\n{}", subscriptions(address));
    place.write("pillarbox.toml", &config);
    place
}

/// The binary, as talkative as it can be, with the secrets that the environment holds.
fn talkative(place: &Place, address: &str, args: &[&str]) -> Command {
    let mut command = place.command(args);
    command.env("RUST_LOG", "trace").env("KEY", "CANARY-environment");
    command.env("POSTGRES_URL", format!("postgres://ab:CANARY-chain@{address}/d"));
    command
}

/// All rows of all tables of the log, as text.
fn rows(place: &Place, on: On) -> String {
    let sql = place.sql();
    let tables = match on {
        On::Sqlite => "select name from sqlite_master where type = 'table'",
        On::Postgres => {
            "select 'pillarbox.' || relname from pg_class where relnamespace = 'pillarbox'::regnamespace and relkind = 'r'"
        }
    };
    let tables = sql.raw(tables).unwrap();
    assert!(tables.len() > 3, "{tables:?}");
    tables.iter().flatten().flatten().fold(String::new(), |mut text, table| {
        for row in sql.raw(&format!("select * from {table}")).unwrap() {
            writeln!(text, "{table}: {row:?}").unwrap();
        }
        text
    })
}

/// Every command and everything it leaves behind, against receivers with these manners.
fn no_canary_is_seen(on: On, manners: Manners) {
    let receiver = Receiver::start(manners);
    let place = place_with_canaries(on, receiver.address());
    let id = place.publish(&["--key", "k", "{\"a\":1}"]);
    place.publish(&[]);
    let mut seen = 0;
    let mut look = |what: &str, text: &str| {
        assert_eq!(leaks(text), Vec::<&str>::new(), "{what}, {manners:?}");
        assert!(!text.is_empty(), "{what} says nothing");
        seen += text.len();
    };
    let run = |args: &[&str]| {
        let output = talkative(&place, receiver.address(), args).output().unwrap();
        (output.status.code(), format!("{}{}", stdout(&output), stderr(&output)))
    };
    for (args, code) in [
        (&["config", "check"][..], 0),
        (&["config", "print"], 0),
        (&["config", "print", "--json"], 0),
        (&["doctor"], 1),
        (&["doctor", "--json"], 1),
        (&["run", "--until-idle"], 1),
    ] {
        let (ended, text) = run(args);
        look(&format!("{args:?}"), &text);
        assert_eq!(ended, Some(code), "{args:?}, {manners:?}: {text}");
        for name in names() {
            assert!(args == ["config", "check"] || text.contains(&name), "{args:?} says nothing of '{name}': {text}");
        }
    }
    relay_in_the_background(&place, &receiver, &mut look, &run, &id);
    look("the rows of the database", &rows(&place, on));
    assert!(seen > 10_000, "hardly anything was looked at");
}

/// A relay that goes on, and what it tells operators meanwhile.
fn relay_in_the_background(
    place: &Place,
    receiver: &Receiver,
    look: &mut impl FnMut(&str, &str),
    run: &impl Fn(&[&str]) -> (Option<i32>, String),
    id: &str,
) {
    let log = place.path("relay.log");
    let script = format!(
        "export RUST_LOG=trace KEY=CANARY-environment POSTGRES_URL=postgres://ab:CANARY-chain@{}/d; exec 2>relay.log",
        receiver.address()
    );
    let mut relay = place.start_after(&script, &["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    // What some refused for good does not come again.
    place.publish(&["--key", "another"]);
    // Each has said that its receiver is down, or has found fault with every event.
    place.until(&["status"], |status| {
        let told = |one: &serde_json::Value| {
            let settled = one["pending"] == 0 && one["processing"] == 0;
            !one["report"]["breaker"].is_null() || settled && (one["retrying"] != 0 || one["dead"] != 0)
        };
        status["instances"].as_array().is_some_and(|instances| !instances.is_empty())
            && status["subscriptions"].as_array().is_some_and(|all| all.iter().all(told))
    });
    let lines = fs::read_to_string(&log).unwrap();
    let listening = lines.lines().find(|line| line.contains("\"listening\"")).unwrap();
    let listening: serde_json::Value = serde_json::from_str(listening).unwrap();
    let address = listening["fields"]["listen"].as_str().unwrap();
    for path in ["/metrics", "/progressz"] {
        look(path, &get(address, path).1);
    }
    for args in [
        &["status"][..],
        &["status", "--json"],
        &["why", id],
        &["why", id, "--json"],
        &["show", id, "--json"],
        &["list", "--json"],
    ] {
        look(&format!("{args:?}"), &run(args).1);
    }
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
    let lines = fs::read_to_string(&log).unwrap();
    assert!(lines.contains("\"level\":\"TRACE\""), "the log is not as talkative as it could be");
    look("the log of the relay", &lines);
}

fn nobody_listens(on: On) {
    no_canary_is_seen(on, Manners::Absent);
}

fn connections_are_closed(on: On) {
    no_canary_is_seen(on, Manners::Closes);
}

fn the_answer_is_garbage(on: On) {
    no_canary_is_seen(on, Manners::Garbage);
}

fn the_answer_repeats_what_it_was_told(on: On) {
    no_canary_is_seen(on, Manners::Parrot);
}

on_each!(nobody_listens, connections_are_closed, the_answer_is_garbage, the_answer_repeats_what_it_was_told);
