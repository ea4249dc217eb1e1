use std::time::Duration;

use pillarbox::{Mode, OnDead, Start};

use super::*;

const CONTRACT: &str = r#"
database = "postgres://app:secret@localhost/app"

[relay]
workers = 4
batch_size = 100
poll_interval = "5s"
debounce = "0ms"
lease_ttl = "10s"
shutdown_grace = "25s"

[recovery]
enabled = true
check_interval = "1m"

[http]
listen = "127.0.0.1:7070"

[retention]
keep = "7d"
dead = "forever"

[dedup]
window = "24h"

[[subscription]]
name = "orders-to-kafka"
topics = ["orders", "billing.*"]
types = []
mode = "stream"
lanes = 8
on_dead = "block"
start = "beginning"
hold = "forever"
retry = { max_attempts = 20, base = "1s", cap = "1h", jitter = true, min_dead_age = "1h" }
processing_timeout = "5m"
workers = 2
batch_size = 7
poll_interval = "1s"
sink = { kind = "kafka", brokers = "localhost:9092", topic = "{topic}" }
"#;

fn check(text: &str) -> (Config, Vec<String>) {
    check_with(text, &[])
}

fn check_with(text: &str, environment: &[(&str, &str)]) -> (Config, Vec<String>) {
    let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    let (config, problems) = read(text, environment);
    (config, problems.iter().map(ToString::to_string).collect())
}

fn only(problems: &[String]) -> &str {
    assert_eq!(problems.len(), 1, "{problems:?}");
    &problems[0]
}

#[test]
fn the_whole_config_of_the_contract_is_read() {
    let (config, problems) = check(CONTRACT);
    let problem = only(&problems);
    assert!(problem.contains("sink kind 'kafka' is not in this build; built in: stdout, file"), "{problem}");
    let subscription = &config.subscriptions[0];
    assert_eq!(
        (subscription.mode, subscription.on_dead, subscription.start),
        (Mode::Stream, OnDead::Block, Start::Beginning)
    );
    assert_eq!((subscription.workers, subscription.batch_size), (2, 7));
    assert_eq!(config.relay().engine.poll_interval, Duration::from_secs(1));
    assert_eq!(config.prune_policy().keep, Some(Duration::from_secs(7 * 86_400)));
    assert_eq!(config.prune_policy().dead, None);
    assert_eq!(subscription.sink.text("topic"), Some("{topic}"));
}

#[test]
fn what_is_printed_is_read_again_and_hides_secrets() {
    let (config, _) = check(CONTRACT);
    let text = toml::to_string(&config).unwrap();
    assert!(!text.contains("secret@") && text.contains("app:***@localhost"), "{text}");
    let (again, problems) = check(&text);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(toml::to_string(&again).unwrap(), text);
}

#[test]
fn every_sink_kind_is_known_with_its_keys() {
    for sink in [
        r#"kind = "http", url = "https://u:p@h/x", secret = "whsec""#,
        r#"kind = "redis_pubsub", url = "redis://h", channel = "c""#,
        r#"kind = "redis_stream", url = "redis://h", stream = "s""#,
        r#"kind = "nats", url = "nats://h", subject = "s""#,
        r#"kind = "rabbitmq", url = "amqp://h", exchange = "e", routing_key = "r""#,
        r#"kind = "sqs", queue_url = "https://q""#,
        r#"kind = "postgres", url = "postgres://h", table = "t""#,
        r#"kind = "websocket", room = "r""#,
    ] {
        let (config, problems) = check(&format!("[[subscription]]\nname = \"a\"\nsink = {{ {sink} }}\n"));
        assert!(only(&problems).contains("is not in this build"), "{problems:?}");
        let shown = serde_json::to_string(&config).unwrap();
        assert!(!shown.contains("whsec") && !shown.contains(":p@"), "{shown}");
    }
    let (_, problems) = check(
        "[[subscription]]\nname = \"a\"\nsink = { kind = \"chain\", sinks = [{ kind = \"stdout\" }, { kind = \"fil\" }] }\n",
    );
    assert!(problems.iter().any(|problem| problem.contains("did you mean \"file\"?")), "{problems:?}");
}

#[test]
fn unknown_keys_name_their_line_and_neighbour() {
    let (_, problems) = check("[relay]\nworkers = 2\nbatchsize = 5\n");
    assert_eq!(only(&problems), "line 3: relay.batchsize: unknown key `batchsize`; did you mean `batch_size`?");
    let (_, problems) =
        check("[[subscription]]\nname = \"a\"\non_daed = \"block\"\nsink = { kind = \"file\", paht = \"x\" }\n");
    assert!(problems.iter().any(|problem| problem.contains("did you mean `on_dead`?")), "{problems:?}");
    assert!(problems.iter().any(|problem| problem.contains("did you mean `path`?")), "{problems:?}");
    let (_, problems) = check("[rely]\nworkers = 2\n");
    assert!(only(&problems).contains("did you mean `relay`?"), "{problems:?}");
}

#[test]
fn every_problem_is_found_not_just_the_first() {
    let (_, problems) = check(
        "[relay]\nworkers = 0\npoll_interval = 5\nlease_ttl = \"soon\"\n[recovery]\nenabled = \"yes\"\n\
         [[subscription]]\nmode = \"stram\"\n[[subscription]]\nname = \"q\"\nmode = \"queue\"\nsink = { kind = \"stdout\" }\n",
    );
    for part in [
        "0 is outside 1 to",
        "write 5s or 5ms",
        "'soon' is not a duration",
        "must be true or false",
        "needs a name",
        "did you mean \"stream\"?",
        "needs a sink",
        "mode = \"queue\" is not part of this version",
    ] {
        assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:?}");
    }
}

#[test]
fn the_environment_wins_over_the_file_and_own_names_over_aliases() {
    let text = "[relay]\nworkers = 2\n";
    let (config, problems) = check_with(
        text,
        &[
            ("PILLARBOX__RELAY__WORKERS", "8"),
            ("OUTBOX_WORKER_COUNT", "3"),
            ("OUTBOX_BATCH_SIZE", "9"),
            ("OUTBOX_POLL_INTERVAL", "250ms"),
            ("PILLARBOX__RECOVERY__ENABLED", "false"),
        ],
    );
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!((config.relay.workers, config.relay.batch_size), (8, 9));
    assert_eq!(config.relay.poll_interval, Duration::from_millis(250));
    assert!(!config.recovery.enabled);
    let (_, problems) = check_with(text, &[("PILLARBOX__RELAY__WOKERS", "8")]);
    assert!(only(&problems).contains("environment variable PILLARBOX__RELAY__WOKERS"), "{problems:?}");
    assert!(only(&problems).contains("did you mean `workers`?"), "{problems:?}");
}

#[test]
fn strings_may_stand_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("path");
    std::fs::write(&secret, "out.ndjson\n").unwrap();
    let text = format!(
        "database = {{ env = \"PILLARBOX_NO_SUCH\" }}\n[[subscription]]\nname = \"a\"\nsink = {{ kind = \"file\", path = {{ file = '{}' }} }}\n",
        secret.display()
    );
    let (config, problems) = check(&text);
    assert!(only(&problems).contains("PILLARBOX_NO_SUCH is not set"), "{problems:?}");
    assert_eq!(config.subscriptions[0].sink.text("path"), Some("out.ndjson"));
    assert!(!toml::to_string(&config).unwrap().contains("out.ndjson"));
    let (_, problems) = check("database = { file = \"/no/such/file\" }\n");
    assert!(only(&problems).contains("cannot read the file /no/such/file"), "{problems:?}");
    let (_, problems) = check("database = 5\n");
    assert!(only(&problems).contains("must be a string"), "{problems:?}");
}

#[test]
fn listening_beyond_loopback_needs_tokens() {
    let (_, problems) = check("[http]\nlisten = \"0.0.0.0:7070\"\n");
    assert!(only(&problems).contains("needs tokens"), "{problems:?}");
    let (config, problems) = check("[http]\nlisten = \"0.0.0.0:7070\"\ntokens = [\"abc\"]\n");
    assert_eq!(problems, Vec::<String>::new());
    assert!(!toml::to_string(&config).unwrap().contains("abc"));
}

#[test]
fn broken_syntax_names_its_line() {
    let (_, problems) = check("[relay]\nworkers = = 2\n");
    assert!(problems[0].starts_with("line 2: "), "{problems:?}");
}
