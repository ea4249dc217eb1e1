use std::time::Duration;

use pillarbox::config::{Recovery, RecoveryProfile};
use pillarbox::{Mode, OnDead, RetryPolicy, Start};

use super::*;

mod sink;

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
profile = "fast"
check_interval = "1m"

[http]
listen = "127.0.0.1:7070"

[retention]
keep = "7d"
dead = "forever"
inbox = "30d"

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
    let (config, mut problems) = check(CONTRACT);
    if cfg!(not(feature = "postgres")) {
        assert!(problems.remove(0).contains("database: this build has no PostgreSQL support"));
    }
    if cfg!(feature = "kafka") {
        assert_eq!(problems, Vec::<String>::new());
    } else {
        let problem = only(&problems);
        assert!(
            problem.contains("made without the feature `kafka`: cargo build --release --features kafka"),
            "{problem}"
        );
    }
    let subscription = &config.subscriptions[0];
    assert_eq!(
        (subscription.mode, subscription.on_dead, subscription.start),
        (Mode::Stream, OnDead::Block, Start::Beginning)
    );
    assert_eq!((subscription.workers, subscription.batch_size), (2, 7));
    assert_eq!(config.relay().engine.poll_interval, Duration::from_secs(1));
    assert_eq!(config.prune_policy().keep, Some(Duration::from_secs(7 * 86_400)));
    assert_eq!(config.prune_policy().dead, None);
    assert_eq!(config.prune_policy().inbox, Some(Duration::from_secs(30 * 86_400)));
    assert_eq!(subscription.sink.text("topic"), Some("{topic}"));
}

#[test]
fn what_is_printed_is_read_again_and_hides_secrets() {
    let (config, problems) = check(CONTRACT);
    let text = toml::to_string(&config).unwrap();
    assert!(!text.contains("secret@") && text.contains("app:***@localhost"), "{text}");
    let (again, problems_again) = check(&text);
    assert_eq!(problems_again.len(), problems.len(), "{problems_again:?}");
    assert_eq!(toml::to_string(&again).unwrap(), text);
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
         [[subscription]]\nmode = \"stram\"\n",
    );
    for part in [
        "0 is outside 1 to",
        "write 5ms, 5s, 5m, 5h or 5d",
        "'soon' is not a duration",
        "must be true or false",
        "needs a name",
        "write \"stream\" or \"queue\"",
        "needs a sink",
    ] {
        assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:?}");
    }
}

fn queue(settings: &str) -> String {
    format!("[[subscription]]\nname = \"q\"\nmode = \"queue\"\n{settings}\nsink = {{ kind = \"stdout\" }}\n")
}

#[test]
fn a_queue_and_its_recovery_reach_the_engine_and_are_printed() {
    let sections = "[recovery]\nenabled = false\nprofile = \"conservative\"\ncheck_interval = \"5s\"\n\
                    [retention]\ninbox = \"forever\"\n";
    let (config, problems) =
        check(&format!("{sections}{}", queue("processing_timeout = \"1h\"\nheartbeat_timeout = \"30s\"\n")));
    assert_eq!(problems, Vec::<String>::new());
    let subscription = config.subscriptions[0].engine();
    assert_eq!(subscription.mode, Mode::Queue);
    assert_eq!(subscription.processing_timeout, Duration::from_secs(3600));
    assert_eq!(subscription.heartbeat_timeout, Some(Duration::from_secs(30)));
    let recovery =
        Recovery { enabled: false, profile: RecoveryProfile::Conservative, check_interval: Duration::from_secs(5) };
    assert_eq!(config.relay().engine.recovery, recovery);
    assert_eq!(config.prune_policy().inbox, None);
    let text = toml::to_string(&config).unwrap();
    for line in ["profile = \"conservative\"", "heartbeat_timeout = \"30s\"", "inbox = \"forever\"", "mode = \"queue\""]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    let (again, problems) = check(&text);
    assert_eq!((toml::to_string(&again).unwrap(), problems), (text, Vec::new()));
    assert!(!toml::to_string(&check(&queue("")).0).unwrap().contains("heartbeat_timeout"), "there is no default");
}

#[test]
fn recovery_is_on_and_fast_unless_the_environment_says_otherwise() {
    assert_eq!(check("").0.relay().engine.recovery, Recovery::default());
    let environment = [
        ("PILLARBOX__RECOVERY__PROFILE", "conservative"),
        ("PILLARBOX__RECOVERY__CHECK_INTERVAL", "2s"),
        ("PILLARBOX__RETENTION__INBOX", "1d"),
    ];
    let (config, problems) = check_with("[recovery]\nprofile = \"fast\"\n", &environment);
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!(config.relay().engine.recovery.profile, RecoveryProfile::Conservative);
    assert_eq!(config.relay().engine.recovery.check_interval, Duration::from_secs(2));
    assert_eq!(config.prune_policy().inbox, Some(Duration::from_secs(86_400)));
}

#[test]
fn a_relay_gives_three_signs_of_life_before_it_could_be_taken_for_dead() {
    let beat = |text: &str| check(text).0.relay().engine.beat_interval;
    assert_eq!(beat(&queue("")), Duration::from_secs(1));
    assert_eq!(beat(&queue("processing_timeout = \"1500ms\"\n")), Duration::from_millis(500));
    assert_eq!(beat("[relay]\nlease_ttl = \"300ms\"\n"), Duration::from_millis(100));
    let stream = queue("processing_timeout = \"1500ms\"\n").replace("queue", "stream");
    assert_eq!(beat(&stream), Duration::from_secs(1), "in a stream that is the time of one delivery");
}

#[test]
fn times_that_no_delivery_could_keep_to_are_refused_with_what_to_do() {
    for (text, parts) in [
        (queue("processing_timeout = \"999ms\"\n"), ["subscription 'q'", "taken to have ended; write at least \"1s\""]),
        (
            queue("processing_timeout = \"0ms\"\n").replace("queue", "stream"),
            ["processing_timeout: \"0ms\"", "cancelled before its receiver could answer; write at least \"1s\""],
        ),
        (queue("heartbeat_timeout = \"0s\"\n"), ["heartbeat_timeout: 0", "like \"30s\", or leave it out"]),
        (
            queue("heartbeat_timeout = \"30s\"\n").replace("queue", "stream"),
            ["heartbeat_timeout is for queues", "set mode = \"queue\""],
        ),
        ("[recovery]\ncheck_interval = \"0s\"\n".to_owned(), ["recovery.check_interval: \"0ms\"", "enabled = false"]),
        ("[recovery]\nprofile = \"conservativ\"\n".to_owned(), ["recovery.profile", "or \"conservative\""]),
        ("[recovery]\nprofil = \"fast\"\n".to_owned(), ["unknown key `profil`", "did you mean `profile`?"]),
        ("[retention]\ninbox = \"never\"\n".to_owned(), ["retention.inbox", "or \"forever\""]),
    ] {
        let (_, problems) = check(&text);
        let problem = only(&problems);
        assert!(parts.iter().all(|part| problem.contains(part)), "{parts:?}: {problem}");
    }
    assert_eq!(check(&queue("processing_timeout = \"1s\"\n")).1, Vec::<String>::new());
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
fn tokens_may_stand_in_the_environment() {
    let text = "[http]\nlisten = \"0.0.0.0:7070\"\n";
    let (config, problems) = check_with(text, &[("PILLARBOX__HTTP__TOKENS", "canary-1, canary-2")]);
    assert_eq!((config.http.tokens.len(), problems), (2, Vec::new()));
    assert!(!toml::to_string(&config).unwrap().contains("canary"));
    let (_, problems) = check(&format!("{text}tokens = [{{ env = \"PILLARBOX_NO_SUCH\" }}]\n"));
    assert!(only(&problems).contains("http.tokens: the environment variable PILLARBOX_NO_SUCH"), "{problems:?}");
}

#[test]
fn broken_syntax_names_its_line() {
    let (_, problems) = check("[relay]\nworkers = = 2\n");
    assert!(problems[0].starts_with("line 2: "), "{problems:?}");
}

#[test]
fn problems_come_in_the_order_of_the_file() {
    let text = "[[subscription]]\nname = \"a\"\nretry = { cap = \"1ms\" }\nsink = { kind = \"file\" }\nmode = \"stram\"\n\
                [relay]\nworkers = 0\nbatchsize = 1\n[recovery]\ncheck_interval = \"0s\"\n[rely]\n";
    let (_, problems) = check_with(text, &[("PILLARBOX__HTTP__LISTEN", "there")]);
    let places: Vec<&str> = problems.iter().map(|problem| problem.split(": ").next().unwrap()).collect();
    let lines = ["line 3", "line 4", "line 5", "line 7", "line 8", "line 10", "line 11"];
    assert_eq!(places[..7], lines, "{problems:?}");
    assert_eq!(places[7..], ["environment variable PILLARBOX__HTTP__LISTEN"], "{problems:?}");
}

#[test]
fn a_name_that_is_there_twice_is_found_whatever_else_is_wrong() {
    let one = "[[subscription]]\nname = \"a\"\nsink = { kind = \"file\" }\n";
    let (_, problems) = check(&format!("{one}{one}"));
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[1].starts_with("line 5: subscription 'a'.name: there are two"), "{problems:?}");
}

/// The engine tells the first thing that is wrong with a subscription.
#[test]
fn what_the_engine_refuses_is_found_part_by_part() {
    let text = "[[subscription]]\nname = \"a b\"\ntopics = [\"x\", \"a*b\", \"*c\"]\ntypes = [\"*d\"]\nheartbeat_timeout = \"1s\"\n\
                poll_interval = \"0s\"\nsink = { kind = \"stdout\" }\n";
    let (_, problems) = check(text);
    let found: Vec<&str> = problems.iter().map(|problem| problem.split(": ").nth(1).unwrap()).collect();
    let keys = ["name", "topics", "topics", "types", "heartbeat_timeout", "poll_interval"];
    assert_eq!(found, keys.map(|key| format!("subscription 'a b'.{key}")), "{problems:?}");
    let (_, problems) = check(&text.replace("name = \"a b\"", "").replace("[\"*d\"]", "[]"));
    assert_eq!(problems.len(), 5, "a subscription without a name has them all the same: {problems:?}");
}

#[test]
fn an_empty_topic_or_type_is_refused() {
    for key in ["topics", "types"] {
        let text = format!("[[subscription]]\nname = \"a\"\n{key} = [\"x\", \"\"]\nsink = {{ kind = \"stdout\" }}\n");
        let (_, problems) = check(&text);
        let problem = only(&problems);
        assert!(problem.contains(&format!("subscription 'a'.{key}: ")), "{problem}");
        assert!(problem.contains("an empty topic or type matches no event; remove it"), "{problem}");
    }
}

#[test]
fn what_cannot_be_read_is_not_held_against_the_rest() {
    for (settings, part) in [
        ("mode = \"queu\"\nheartbeat_timeout = \"30s\"\n", "write \"stream\" or \"queue\""),
        ("retry = { base = \"2h\", cap = \"4x\" }\n", "'4x' is not a duration"),
        ("name = 5\n", "must be a string"),
    ] {
        let name = if settings.starts_with("name") { "" } else { "name = \"a\"\n" };
        let (_, problems) = check(&format!("[[subscription]]\n{name}{settings}sink = {{ kind = \"stdout\" }}\n"));
        assert!(only(&problems).contains(part), "{problems:?}");
    }
    let (_, problems) = check(&queue("retry = { base = \"2h\" }"));
    assert!(only(&problems).contains("retry.cap: is the longest wait"), "{problems:?}");
}

#[test]
fn a_database_url_is_checked_and_not_repeated() {
    let (_, problems) = check("database = \"mysql://u:canary@h/d\"\n");
    assert!(
        only(&problems).starts_with("line 1: database: no database is known by the scheme 'mysql'"),
        "{problems:?}"
    );
    assert!(!problems[0].contains("canary"), "{problems:?}");
}

#[test]
fn a_retention_without_a_unit_is_not_taken_for_seconds() {
    let (_, problems) = check("[retention]\nkeep = 7\n");
    let expected = "line 2: retention.keep: '7' has no unit; write 7ms, 7s, 7m, 7h or 7d, or \"forever\"";
    assert_eq!(only(&problems), expected);
}

#[test]
fn whoever_sets_max_attempts_gets_no_more_unless_the_age_is_set_too() {
    let retry = |text: &str| {
        let sink = "sink = { kind = \"stdout\" }";
        let (config, problems) = check(&format!("[[subscription]]\nname = \"s\"\n{text}\n{sink}\n"));
        assert_eq!(problems, Vec::<String>::new());
        (config.subscriptions[0].retry, config.warnings())
    };
    let hour = Duration::from_secs(3600);
    assert_eq!(retry(""), (RetryPolicy::sink(), Vec::new()));
    let (three, warnings) = retry("retry = { max_attempts = 3 }");
    assert_eq!((three.max_attempts, three.min_dead_age, warnings.len()), (3, Duration::ZERO, 0));
    let (both, warnings) = retry("retry = { max_attempts = 3, min_dead_age = \"1h\" }");
    assert_eq!((both.max_attempts, both.min_dead_age), (3, hour));
    assert!(warnings[0].contains("max_attempts = 3 are used up after about 3s"), "{warnings:?}");
    let (quick, warnings) = retry("retry = { cap = \"1s\" }");
    assert_eq!((quick.min_dead_age, warnings.len()), (hour, 1), "{warnings:?}");
}
