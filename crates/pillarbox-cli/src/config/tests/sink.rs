use super::*;

/// A subscription `a` with this sink, written on one line.
fn with_sink(sink: &str) -> (Config, Vec<String>) {
    check(&format!("[[subscription]]\nname = \"a\"\nsink = {{ {sink} }}\n"))
}

/// The one problem of this sink, which must have all of these parts.
fn refused(sink: &str, parts: &[&str]) {
    let (_, problems) = with_sink(sink);
    let problem = only(&problems);
    assert!(parts.iter().all(|part| problem.contains(part)), "{parts:?}: {problem}");
}

/// The sink is read without a problem, and what is printed of it is this.
fn printed(sink: &str, shown: serde_json::Value) {
    let (config, problems) = with_sink(sink);
    assert_eq!(problems, Vec::<String>::new());
    let sink = &config.subscriptions[0].sink;
    assert_eq!(serde_json::to_value(sink).unwrap(), shown);
    let again = toml::to_string(&config).unwrap();
    assert_eq!(again.parse::<toml::Table>().unwrap()["subscription"][0]["sink"]["kind"].as_str(), Some(sink.kind.name));
}

/// A secret of Standard Webhooks; 24 bytes.
const WHSEC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

#[test]
fn kinds_of_later_versions_are_read_and_refused_with_what_there_is() {
    for sink in [
        r#"kind = "nats", url = "nats://u:canary@h", subject = "s""#,
        r#"kind = "rabbitmq", url = "amqp://u:canary@h", exchange = "e", routing_key = "r""#,
        r#"kind = "sqs", queue_url = "https://q?token=canary""#,
        r#"kind = "websocket", room = "r""#,
    ] {
        refused(
            sink,
            &["line 3: subscription 'a'.sink: sink kind '", "a later one will have it. This build has stdout, file"],
        );
        let shown = serde_json::to_string(&with_sink(sink).0).unwrap();
        assert!(!shown.contains("canary"), "{shown}");
    }
}

#[test]
fn a_kind_needs_its_keys_and_refuses_others() {
    for (sink, part) in [
        (r#"path = "x""#, "a sink needs a kind: one of stdout, file, http, kafka"),
        (r#"kind = "fil""#, "there is no sink kind 'fil'; did you mean \"file\"?"),
        (r#"kind = "file""#, "sink kind 'file' needs `path`, for example path = \"out.ndjson\""),
        (r#"kind = "file", path = """#, "sink.path: must not be empty; for example path = \"out.ndjson\""),
        (r#"kind = "file", path = "x", fsyncs = true"#, "did you mean `fsync`?"),
        (r#"kind = "file", path = "x", fsync = "no""#, "sink.fsync: must be true or false"),
        (r#"kind = "chain""#, "sink kind 'chain' needs `sinks`, for example sinks = [{ kind"),
        (r#"kind = "chain", sinks = []"#, "sink.sinks: a chain needs at least one sink"),
    ] {
        refused(sink, &[part]);
    }
    let (_, problems) = with_sink(r#"kind = "chain", sinks = [{ kind = "stdout" }, { kind = "file", pth = "x" }]"#);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems.iter().all(|problem| problem.contains("subscription 'a'.sink.sinks[1]")), "{problems:?}");
}

#[test]
fn chains_are_nested_only_so_deep() {
    let nested = |depth: usize| {
        (0..depth)
            .fold(r#"kind = "stdout""#.to_owned(), |inner, _| format!("kind = \"chain\", sinks = [{{ {inner} }}]"))
    };
    assert_eq!(with_sink(&nested(4)).1, Vec::<String>::new());
    let (_, problems) = with_sink(&nested(5));
    assert!(only(&problems).contains("chain_depth_max = 4"), "{problems:?}");
}

#[test]
fn a_chain_tells_its_destinations_in_order() {
    let (config, problems) =
        with_sink(r#"kind = "chain", sinks = [{ kind = "file", path = "x" }, { kind = "stdout" }]"#);
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!(config.subscriptions[0].sink.destination(), "file x, then stdout");
}

#[cfg(not(feature = "http"))]
#[test]
fn a_kind_without_its_feature_says_how_to_get_it() {
    refused(r#"kind = "http", url = "https://h/x""#, &["cargo build --release --features http"]);
}

#[cfg(feature = "http")]
#[test]
fn http_is_read_whole_and_printed_without_secrets() {
    printed(
        &format!(
            r#"kind = "http", url = "https://h/x?token=canary", secret = "{WHSEC}", secrets = ["{WHSEC}"],
               headers = {{ Authorization = "Bearer canary", X-Tenant = 5 }}, mode = "binary", timeout = "5s", connect_timeout = "1s",
               concurrency = 4, response_bytes_max = 1024, block_private_addresses = true, source = "urn:x""#
        )
        .replace('\n', ""),
        serde_json::json!({
            "kind": "http", "url": "https://h/x?token=***", "secret": "***", "secrets": ["***"],
            "headers": { "Authorization": "***", "X-Tenant": "***" }, "mode": "binary", "timeout": "5s", "connect_timeout": "1s",
            "concurrency": 4, "response_bytes_max": 1024, "block_private_addresses": true, "source": "urn:x",
        }),
    );
}

/// Tokens in the paths of webhooks are common, and an `@` there is no end of a password.
#[cfg(feature = "http")]
#[test]
fn the_destination_of_a_webhook_is_its_host_alone() {
    for (url, shown) in [
        ("https://h", "https://h"),
        ("https://h:8080/hooks/canary", "https://h:8080/…"),
        ("https://h/x?to=a@b.c&token=canary", "https://h/…"),
        ("https://h/hooks/@canary", "https://h/…"),
        ("https://h?token=canary", "https://h/…"),
        ("https://u:canary@h/x", "https://u:***@h/…"),
        ("https://u:canary/x@h", "https://u/…"),
        ("https://canary@h/hooks/@canary", "https://***@h/…"),
        ("https://{topic}.h/canary", "https:///…"),
    ] {
        let (config, _) = with_sink(&format!("kind = \"http\", url = \"{url}\""));
        let sink = &config.subscriptions[0].sink;
        assert_eq!(sink.destination(), shown, "{url}");
    }
}

#[cfg(feature = "http")]
#[test]
fn http_is_checked_without_connecting() {
    for (more, parts) in [
        (r#"url = "no url""#, ["subscription 'a'.sink.url", "url"]),
        (r#"url = "ftp://h/x""#, ["subscription 'a'.sink.url", "http"]),
        (r#"url = "https://u:canary@h/x""#, ["subscription 'a'.sink.url", "Authorization"]),
        (r#"url = "https://u:canary@h/{tpoic}""#, ["subscription 'a'.sink.url", "no {tpoic}"]),
        (r#"url = "https://h", secret = "whsec_canary!""#, ["subscription 'a'.sink.secret", "whsec_"]),
        (r#"url = "https://h", headers = { "a b" = "canary" }"#, ["subscription 'a'.sink.headers", "a b"]),
        (r#"url = "https://h", headers = { a = "canary\n" }"#, ["subscription 'a'.sink.headers", "a"]),
        (r#"url = "https://h", ca_file = "/no/such/ca.pem""#, ["subscription 'a'.sink.ca_file", "/no/such/ca.pem"]),
        (r#"url = "https://h", mode = "batch""#, ["sink.mode", "or \"batched\""]),
        (r#"url = "https://h", timeout = "0s""#, ["sink.timeout", "longer than 0"]),
        (r#"url = "https://h", timeout = 5"#, ["sink.timeout", "5ms, 5s, 5m"]),
        (r#"url = "https://h", concurrency = 0"#, ["sink.concurrency", "outside 1 to 1024"]),
        (r#"url = "https://h", headers = "x""#, ["sink.headers", "a table of strings"]),
        (r#"url = "https://h", headers = { a = { env = "PILLARBOX_NO_SUCH" } }"#, ["sink.headers.a", "not set"]),
        (r#"url = "https://h", secrets = "x""#, ["sink.secrets", "a list of strings"]),
        (r#"url = "https://h", timeouts = "1s""#, ["unknown key", "did you mean `timeout`?"]),
    ] {
        let sink = format!("kind = \"http\", {more}");
        refused(&sink, &parts);
        assert!(!with_sink(&sink).1[0].contains("canary"), "{:?}", with_sink(&sink).1);
    }
}

#[cfg(feature = "http")]
#[test]
fn every_wrong_key_is_found_not_just_the_first() {
    let (_, problems) = with_sink(
        r#"kind = "http", url = "ftp://h", secrets = ["x"], headers = { "a b" = "c" }, ca_file = "/no/ca.pem", timeout = "1s""#,
    );
    assert_eq!(problems.len(), 4, "{problems:?}");
    for key in ["url", "secrets", "headers", "ca_file"] {
        let path = format!("line 3: subscription 'a'.sink.{key}: ");
        assert!(problems.iter().any(|problem| problem.starts_with(&path)), "{path}: {problems:?}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn redis_is_read_whole_and_printed_without_secrets() {
    let server = r#"url = "redis://u:canary@h/0", sentinels = ["a:1", "b:2"], master = "m", sentinel_password = "canary", timeout = "5s""#;
    printed(
        &format!(r#"kind = "redis_pubsub", {server}, channel = "c.{{topic}}", require_receivers = true"#),
        serde_json::json!({
            "kind": "redis_pubsub", "url": "redis://u:***@h/0", "channel": "c.{topic}", "require_receivers": true,
            "sentinels": ["a:1", "b:2"], "master": "m", "sentinel_password": "***", "timeout": "5s",
        }),
    );
    printed(
        &format!(r#"kind = "redis_stream", {server}, stream = "s", maxlen = 1000"#),
        serde_json::json!({
            "kind": "redis_stream", "url": "redis://u:***@h/0", "stream": "s", "maxlen": 1000,
            "sentinels": ["a:1", "b:2"], "master": "m", "sentinel_password": "***", "timeout": "5s",
        }),
    );
}

#[cfg(feature = "redis")]
#[test]
fn redis_is_checked_without_connecting() {
    for (more, parts) in [
        (r#"url = "http://u:canary@h", stream = "s""#, ["subscription 'a'.sink.url", "redis://"]),
        (r#"url = "redis://u:canary@h", stream = "{kye}""#, ["subscription 'a'.sink.stream", "no {kye}"]),
        (r#"url = "redis://h", stream = "s", maxlen = 0"#, ["sink.maxlen", "outside 1 to"]),
        (r#"url = "redis://h", stream = "s", sentinels = ["h:1"]"#, ["subscription 'a'.sink.sentinels", "master"]),
        (
            r#"url = "rediss://h", stream = "s", ca_file = "/no/ca.pem""#,
            ["subscription 'a'.sink.ca_file", "/no/ca.pem"],
        ),
        (r#"url = "redis://h""#, ["subscription 'a'.sink", "needs `stream`"]),
        (r#"url = "redis://h", stream = "s", max_len = 5"#, ["unknown key", "did you mean `maxlen`?"]),
    ] {
        let sink = format!("kind = \"redis_stream\", {more}");
        refused(&sink, &parts);
        assert!(!with_sink(&sink).1[0].contains("canary"), "{:?}", with_sink(&sink).1);
    }
}

#[cfg(feature = "redis")]
#[test]
fn keys_that_need_each_other_are_not_blamed_for_a_third() {
    let (_, problems) = with_sink(
        r#"kind = "redis_stream", url = "rediss://h", stream = "s", sentinels = ["a:1"], master = "m", ca_file = "/no/ca.pem""#,
    );
    let problem = only(&problems);
    assert!(problem.contains("sink.ca_file: ") && problem.contains("/no/ca.pem"), "{problem}");
}

#[cfg(feature = "redis")]
#[test]
fn a_password_in_the_query_of_a_socket_is_not_shown() {
    let (config, problems) =
        with_sink(r#"kind = "redis_stream", url = "unix:///run/redis.sock?user=u&pass=canary", stream = "s""#);
    assert_eq!(problems, Vec::<String>::new());
    let sink = &config.subscriptions[0].sink;
    assert_eq!(sink.destination(), "unix:///run/redis.sock?user=u&pass=*** s");
    assert!(!serde_json::to_string(&config).unwrap().contains("canary"));
    assert_eq!(sink.redactions().apply("AUTH u canary: refused"), "AUTH u ***: refused");
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_is_read_whole_and_checked_without_connecting() {
    printed(
        r#"kind = "postgres", url = "postgres://u:canary@h/d", table = "s.t", create = false, timeout = "5s""#,
        serde_json::json!({
            "kind": "postgres", "url": "postgres://u:***@h/d", "table": "s.t", "create": false, "timeout": "5s",
        }),
    );
    for (more, part) in [
        (r#"url = "mysql://u:canary@h/d", table = "t""#, "sink.url: "),
        (r#"url = "postgres://u:canary@h/d?sslmode=none", table = "t""#, "sink.url: "),
        (r#"url = "postgres://u:canary@h/d", table = "a.b.c""#, "sink.table: "),
    ] {
        let sink = format!("kind = \"postgres\", {more}");
        refused(&sink, &["subscription 'a'.", part]);
        assert!(!with_sink(&sink).1[0].contains("canary"), "{:?}", with_sink(&sink).1);
    }
}

#[cfg(feature = "kafka")]
#[test]
fn kafka_is_read_whole_and_shows_only_harmless_properties() {
    let properties = r#"{ "sasl.password" = "canary", "security.protocol" = "sasl_plaintext", "sasl.mechanism" = "PLAIN",
        sasl.username = "canary", linger.ms = 5 }"#;
    printed(
        &format!(
            r#"kind = "kafka", brokers = "a:1,b:2", topic = "{{topic}}", timeout = "5s", properties = {properties}"#
        )
        .replace('\n', ""),
        serde_json::json!({
            "kind": "kafka", "brokers": "a:1,b:2", "topic": "{topic}", "timeout": "5s",
            "properties": {
                "sasl.password": "***", "security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "***",
                "linger.ms": "5",
            },
        }),
    );
}

#[cfg(feature = "kafka")]
#[test]
fn kafka_is_checked_without_connecting() {
    for (more, parts) in [
        (r#"topic = "{tpoic}""#, ["subscription 'a'.sink.topic", "no {tpoic}"]),
        (r#"topic = "t", properties = { "no.such" = "canary" }"#, ["subscription 'a'.sink.properties", "no.such"]),
        (r#"topic = "t", properties = { "linger.ms" = "canary" }"#, ["subscription 'a'.sink.properties", "linger.ms"]),
        (r#"topic = "t", properties = { "acks" = "0" }"#, ["subscription 'a'.sink.properties", "acks"]),
    ] {
        let sink = format!("kind = \"kafka\", brokers = \"h:9092\", {more}");
        refused(&sink, &parts);
        assert!(!with_sink(&sink).1[0].contains("canary"), "{:?}", with_sink(&sink).1);
    }
}

/// What a panic or a careless log line would print.
#[test]
fn debug_shows_no_string_of_the_config() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    std::fs::write(&file, "canary").unwrap();
    let (config, _) = check(&format!(
        "database = \"postgres://u:canary@h/d\"\n[http]\ntokens = [\"canary\"]\n[[subscription]]\nname = \"a\"\n\
         sink = {{ kind = \"chain\", sinks = [{{ kind = \"file\", path = {{ file = '{}' }} }}, {{ kind = \"http\", \
         url = \"https://u:canary@h\", secret = \"canary\", headers = {{ a = \"canary\" }} }}] }}\n",
        file.display()
    ));
    assert_eq!(config.subscriptions.len(), 1);
    for text in [format!("{config:?}"), format!("{config:#?}"), serde_json::to_string(&config).unwrap()] {
        assert!(!text.contains("canary"), "{text}");
    }
}

#[cfg(feature = "http")]
#[test]
fn what_a_sink_says_is_shown_without_its_secrets() {
    let (config, _) = with_sink(
        r#"kind = "chain", sinks = [{ kind = "http", url = "https://u:canary@h", secrets = ["canary-1"], headers = { a = "abc" } }]"#,
    );
    let redactions = config.subscriptions[0].sink.redactions();
    let said = "https://u:canary@h: canary-1 is not an abc, nor is canary";
    assert_eq!(redactions.apply(said), "https://u:***@h: *** is not an abc, nor is ***");
}

/// The keys of a sink that something is wrong with, in order.
fn keys_at_fault(sink: &str) -> Vec<String> {
    let (_, problems) = with_sink(sink);
    let key = |problem: &String| {
        let place = problem.strip_prefix("line 3: subscription 'a'.sink").unwrap_or_else(|| panic!("{problem}"));
        place.split(": ").next().unwrap().trim_start_matches('.').to_owned()
    };
    problems.iter().map(key).collect()
}

#[cfg(feature = "redis")]
#[test]
fn a_key_that_is_missing_hides_no_other() {
    let (_, problems) = with_sink(r#"kind = "redis_stream", url = "localhost:6379""#);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[0].contains("needs `stream`") && problems[1].contains("sink.url: "), "{problems:?}");
}

#[cfg(feature = "http")]
#[test]
fn a_key_that_cannot_be_read_hides_no_other() {
    let sink =
        r#"kind = "http", mode = "bin", url = "http://u:canary@h/", headers = { Host = "h", "a b" = "c", Ok = "d" }"#;
    assert_eq!(keys_at_fault(sink), ["mode", "url", "headers", "headers"]);
    let (_, problems) = with_sink(sink);
    assert!(problems.iter().any(|problem| problem.contains("Authorization")), "{problems:?}");
    assert!(!problems.concat().contains("canary"), "{problems:?}");
    assert_eq!(keys_at_fault(r#"kind = "http", url = "https://h", timeout = "0s", ca_file = "/no/ca.pem""#).len(), 2);
    assert_eq!(keys_at_fault(r#"kind = "http", url = "https://h", mode = "bin", timeot = "1s""#), ["mode", "timeot"]);
}

#[cfg(feature = "http")]
#[test]
fn every_string_of_a_list_is_judged() {
    let http = |more: &str| with_sink(&format!("kind = \"http\", url = \"https://h\", {more}")).1;
    let problems = http(&format!(r#"secrets = ["x", "{WHSEC}", "whsec_!"]"#));
    let problem = only(&problems);
    assert!(
        problem.contains("sink.secrets: secret 1 of 3") && problem.contains("entries 1, 3 of this list"),
        "{problem}"
    );
    let problems = http(&format!(r#"secrets = ["{WHSEC}", "x"], mode = "bin""#));
    assert!(problems[0].contains("secret 2 of 2") && !problems[0].contains("entries"), "{problems:?}");
}

/// A URL may be in a variable that is not set where the config is checked.
#[cfg(feature = "redis")]
#[test]
fn keys_that_need_each_other_are_not_blamed_for_one_that_cannot_be_read() {
    let ca = concat!("ca_file = '", env!("CARGO_MANIFEST_DIR"), "/src/config/tests/ca.pem'");
    let stream = |more: &str| format!("kind = \"redis_stream\", stream = \"s\", {more}");
    for (more, keys) in [
        (format!(r#"url = {{ env = "PILLARBOX_NO_SUCH" }}, {ca}"#), vec!["url"]),
        (format!(r#"url = "localhost:6379", {ca}"#), vec!["url"]),
        (format!(r#"url = "redis://h", {ca}"#), vec!["ca_file"]),
        (r#"url = "redis://h", sentinels = ["a:1"], master = """#.to_owned(), vec!["master"]),
        (r#"url = "redis://h", sentinels = "a:1", master = "m""#.to_owned(), vec!["sentinels"]),
        (r#"url = "redis://h", sentinels = ["a:b:c"], master = "m""#.to_owned(), vec!["sentinels"]),
        (r#"url = "redis://h", master = "m""#.to_owned(), vec!["master"]),
        (
            r#"url = "redis://h", sentinels = "a:1", master = "m", ca_file = "/no/ca.pem""#.to_owned(),
            vec!["sentinels", "ca_file"],
        ),
    ] {
        assert_eq!(keys_at_fault(&stream(&more)), keys, "{more}");
    }
}

#[test]
fn a_chain_that_is_too_long_is_found_beside_what_is_wrong_in_it() {
    let sinks = [r#"{ kind = "file" }"#; 9].join(", ");
    let (_, problems) = with_sink(&format!("kind = \"chain\", sinks = [{sinks}]"));
    assert_eq!(problems.iter().filter(|problem| problem.contains("needs `path`")).count(), 9, "{problems:?}");
    assert!(problems.iter().any(|problem| problem.contains("sink.sinks: a chain of 9 sinks")), "{problems:?}");
    assert_eq!(problems.len(), 10, "{problems:?}");
}

/// A subscription of these settings with this sink; its problems.
fn timed(settings: &str, sink: &str) -> Vec<String> {
    check(&format!("[[subscription]]\nname = \"a\"\n{settings}\nsink = {{ {sink} }}\n")).1
}

#[cfg(feature = "http")]
#[test]
fn a_webhook_is_given_the_time_that_its_batches_may_take() {
    let http = r#"kind = "http", url = "https://h""#;
    let problems = timed("processing_timeout = \"90s\"", http);
    assert_eq!(
        only(&problems),
        "line 3: subscription 'a'.processing_timeout: processing_timeout = \"90s\" is not longer than one delivery may take, 90s: \
         http begins requests of a batch for 1m, and the last may take timeout = \"30s\". What was acknowledged by then would be \
         sent again: write processing_timeout = \"2m\" or more, or a shorter timeout for the sink"
    );
    assert_eq!(timed("processing_timeout = \"91s\"", http), Vec::<String>::new());
    assert_eq!(timed("", http), Vec::<String>::new());
    let long = |time: &str| timed("", &format!("{http}, timeout = \"{time}\""));
    assert_eq!(long("239s"), Vec::<String>::new());
    assert!(only(&long("4m")).starts_with("line 4: subscription 'a'.sink: processing_timeout = \"5m\" (the default)"));
    let queue = "mode = \"queue\"\nheartbeat_timeout = \"20s\"\nprocessing_timeout = \"10m\"";
    assert!(only(&timed(queue, http)).contains(".heartbeat_timeout: heartbeat_timeout = \"20s\""));
    // Nothing else is sent before.
    let single = |size: u32| timed(&format!("batch_size = {size}\nprocessing_timeout = \"31s\""), http);
    assert_eq!(single(1), Vec::<String>::new());
    assert!(only(&single(2)).contains("2 requests one after the other"));
}

#[cfg(feature = "http")]
#[test]
fn a_time_that_cannot_be_read_is_compared_with_nothing() {
    let problems = timed("processing_timeout = 20", r#"kind = "http", url = "https://h", timeout = "10m""#);
    assert!(only(&problems).contains("'20' has no unit"), "{problems:?}");
    let problems = timed("processing_timeout = \"80s\"", r#"kind = "http", url = "https://h", timeout = 5"#);
    assert!(only(&problems).contains("'5' has no unit"), "{problems:?}");
    let problems = timed("processing_timeout = \"80s\"", r#"kind = "http", url = "ftp://h""#);
    assert_eq!(problems.len(), 2, "{problems:?}");
}

#[test]
fn other_sinks_and_chains_are_given_their_time() {
    let refused_at = |sink: &str, time: u64| {
        let (short, long) = (timed(&format!("processing_timeout = \"{time}s\""), sink), time + 1);
        assert!(only(&short).contains("is not longer than one delivery may take"), "{short:?}");
        assert_eq!(timed(&format!("processing_timeout = \"{long}s\""), sink), Vec::<String>::new());
    };
    if cfg!(feature = "redis") {
        refused_at(r#"kind = "redis_stream", url = "redis://h", stream = "s""#, 20);
        refused_at(r#"kind = "redis_pubsub", url = "redis://h", channel = "c", timeout = "3s""#, 6);
    }
    if cfg!(feature = "postgres") {
        refused_at(r#"kind = "postgres", url = "postgres://h/d", table = "t""#, 30);
    }
    if cfg!(feature = "kafka") {
        refused_at(r#"kind = "kafka", brokers = "h:1", topic = "t", timeout = "7s""#, 7);
    }
    if cfg!(all(feature = "redis", feature = "postgres")) {
        let redis = r#"{ kind = "redis_stream", url = "redis://h", stream = "s" }"#;
        let postgres = r#"{ kind = "postgres", url = "postgres://h/d", table = "t", timeout = "5s" }"#;
        refused_at(&format!(r#"kind = "chain", sinks = [{postgres}, {{ kind = "stdout" }}, {redis}]"#), 25);
    }
    assert_eq!(timed("processing_timeout = \"1s\"", r#"kind = "file", path = "x""#), Vec::<String>::new());
}

#[cfg(feature = "kafka")]
#[test]
fn every_property_of_kafka_is_judged() {
    let properties = r#"{ "no.such" = "1", "acks" = "0", "sasl.mechanism" = "PLAIN", "sasl.username" = "u", "sasl.password" = "p" }"#;
    let sink = format!(r#"kind = "kafka", brokers = "h:9092", topic = "{{tpoic}}", properties = {properties}"#);
    assert_eq!(keys_at_fault(&sink), ["topic", "properties", "properties"], "{:?}", with_sink(&sink).1);
    assert!(with_sink(&sink).1.iter().any(|problem| problem.contains("property 'no.such'")));
}
