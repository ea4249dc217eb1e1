use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::place::{On, PATIENCE, Place, Running, on_each};
use crate::receiver::{Manners, Receiver};

/// The pages that probes and scrapers ask for.
const PAGES: [&str; 4] = ["/livez", "/readyz", "/progressz", "/metrics"];

/// How many events make reading the status take far longer than a page may.
const BACKLOG: usize = 200_000;

/// How many answers of a page are timed.
const ANSWERS_TIMED: usize = 20;

pub(crate) fn listen(relay: &Running) -> String {
    let address = address(relay);
    relay.wait_for("relay started");
    address
}

/// Where it listens, whether it has started or not.
pub(crate) fn address(relay: &Running) -> String {
    let line: Value = serde_json::from_str(&relay.wait_for("\"listen\"")).unwrap();
    line["fields"]["listen"].as_str().unwrap().to_owned()
}

/// The status code and the rest.
pub(crate) fn get(address: &str, path: &str) -> (u16, String) {
    ask(address, "GET", path)
}

fn ask(address: &str, method: &str, path: &str) -> (u16, String) {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    ask_by_name(stream, "localhost", method, path)
}

fn ask_by_name(mut stream: TcpStream, host: &str, method: &str, path: &str) -> (u16, String) {
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    (text[9..12].parse().unwrap(), text)
}

pub(crate) fn until(address: &str, path: &str, found: impl Fn(&(u16, String)) -> bool) -> (u16, String) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = get(address, path);
        if found(&answer) {
            return answer;
        }
        assert!(Instant::now() < deadline, "{path} still says {answer:?}");
    }
}

/// How long each of some answers of a page took, the shortest first.
fn answer_times(address: &str, path: &str) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..ANSWERS_TIMED)
        .map(|_| {
            let asked = Instant::now();
            get(address, path);
            asked.elapsed()
        })
        .collect();
    times.sort();
    times
}

/// No page waits for a database that does not answer.
pub(crate) fn assert_answers_within_a_second(address: &str) {
    for path in PAGES {
        let times = answer_times(address, path);
        assert!(times[ANSWERS_TIMED - 1] < Duration::from_secs(1), "{path}: {times:?}");
    }
}

fn pages_are_answered_within_100_ms(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out"]);
    // On an empty log reading the status takes a millisecond, and nobody would see that a page waits for it. Dead deliveries are counted as
    // they come; what takes long is to look through a backlog.
    let sql = place.sql();
    sql.execute(&format!(
        "with recursive n (g) as (select 1 union all select g + 1 from n where g < {BACKLOG}) \
         insert into pillarbox_event (topic, type, key) select 't', 'y', 'k' || g from n; \
         with recursive n (g) as (select 1 union all select g + 1 from n where g < 20000) \
         insert into pillarbox_delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at) \
         select s.id, g, 0, g, 'dead', 3, {0}, {0}, {0} from n cross join pillarbox_subscription as s",
        sql.time(1_000)
    ));
    assert_eq!(place.json(&["status"])["subscriptions"][0]["dead"], 20_000);
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = listen(&relay);
    until(&address, "/readyz", |answer| answer.0 == 200);
    for path in PAGES {
        let times = answer_times(&address, path);
        // The median: a single one may have had to wait for a busy machine.
        assert!(times[ANSWERS_TIMED / 2] < Duration::from_millis(100), "{path}: {times:?}");
    }
}

fn health_and_metrics_are_served(on: On) {
    let place = Place::with_file_sink(on);
    place.publish(&[]);
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = listen(&relay);
    assert_eq!(get(&address, "/livez").0, 200);
    assert_eq!(get(&address, "/healthz").0, 200);
    until(&address, "/readyz", |answer| answer.0 == 200);
    until(&address, "/progressz", |answer| answer.0 == 200);
    let (_, metrics) = until(&address, "/metrics", |answer| {
        let read = answer.1.contains("pillarbox_backlog{subscription=\"out\"} 0");
        read && answer.1.contains("pillarbox_delivered_total{subscription=\"out\"} 1")
    });
    for name in [
        "pillarbox_oldest_undelivered_age_seconds",
        "pillarbox_backlog",
        "pillarbox_deliveries",
        "pillarbox_status_age_seconds",
        "pillarbox_build_info{version=",
        "pillarbox_takeovers_total{cause=\"lease\"} 0",
        "pillarbox_rejoins_total 0",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    // A scraper may use any name; what is to come beside the open pages may not be reached by one that a stranger can own.
    for (path, code) in [("/livez", 200), ("/metrics", 200), ("/nothing", 421)] {
        let stream = TcpStream::connect(&address).unwrap();
        assert_eq!(ask_by_name(stream, "evil.example", "GET", path).0, code, "{path}");
    }
    for (method, path, wanted) in [("GET", "/nothing", 404), ("POST", "/nothing", 404), ("POST", "/livez", 405)] {
        let (code, text) = ask(&address, method, path);
        assert_eq!(code, wanted, "{method} {path}: {text}");
        assert!(text.contains("application/problem+json"), "{text}");
        let document: Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        assert_eq!((&document["status"], &document["type"]), (&wanted.into(), &"about:blank".into()), "{document}");
        assert!(document["title"].is_string() && document["detail"].as_str().unwrap().contains(path), "{document}");
        assert_eq!(text.to_lowercase().contains("\r\nallow: get,head\r\n"), wanted == 405, "{text}");
    }
}

fn a_relay_that_starts_on_an_old_backlog_is_never_called_stuck(on: On) {
    let place = Place::with_file_sink(on);
    // The subscription is there and orphaned, with work that has waited for an hour.
    place.ok(&["run", "--until-idle"]);
    let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    let hour_ago = hour_ago.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    let sql = place.sql();
    sql.execute(&format!(
        "insert into pillarbox_event (topic, type, created_at) values ('t', 'y', {})",
        sql.time(hour_ago)
    ));
    place.fails(4, &["status", "--check"]);
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let line: Value = serde_json::from_str(&relay.wait_for("\"listen\"")).unwrap();
    let address = line["fields"]["listen"].as_str().unwrap();
    until(address, "/metrics", |metrics| {
        let answer = get(address, "/progressz");
        assert_eq!(answer.0, 200, "{answer:?}");
        metrics.1.contains("pillarbox_delivered_total{subscription=\"out\"} 1")
    });
}

fn a_taken_port_moves_on_and_says_so(on: On) {
    let place = Place::with_file_sink(on);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let wanted = taken.local_addr().unwrap().to_string();
    let relay = place.start(&["run", "--listen", &wanted, "--log-format", "json"]);
    let line = relay.wait_for("the port is taken");
    let line: Value = serde_json::from_str(&line).unwrap();
    let address = line["fields"]["listen"].as_str().unwrap();
    assert_ne!(address, wanted);
    assert_eq!(get(address, "/livez").0, 200);
}

fn no_progress_is_503_with_the_reason(on: On) {
    let place = Place::with_file_sink(on);
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = listen(&relay);
    let id = place.publish(&["--delay", "1h"]);
    place.until_deliveries(1);
    place.sql().execute("update pillarbox_delivery set state = 'dead'");
    let (_, text) = until(&address, "/progressz", |answer| answer.0 == 503);
    assert!(text.contains("dead") && text.contains("out"), "{id}: {text}");
    assert_eq!(get(&address, "/livez").0, 200);
}

fn listening_beyond_loopback_without_tokens_is_refused(on: On) {
    let place = Place::with_file_sink(on);
    let text = place.fails(2, &["run", "--listen", "0.0.0.0:0"]);
    assert!(text.contains("tokens"), "{text}");
}

/// Half of them say nothing at all, half of them the beginning of a request, and nobody ever ends.
fn silent_connections(address: &str, count: usize) -> Vec<TcpStream> {
    let connect = |number| {
        let mut stream = TcpStream::connect(address).unwrap();
        if number % 2 == 0 {
            // It may have been closed by now.
            let _ = stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n");
        }
        stream
    };
    (0..count).map(connect).collect()
}

/// A service has 1,024 open files by default. Here fewer, so that the test stays small.
fn idle_connections_to_the_listener_do_not_stop_delivery(on: On) {
    let place = Place::new(on);
    let receiver = Receiver::start(Manners::Takes);
    place.write(
        "pillarbox.toml",
        &format!(
            "[[subscription]]\nname = \"hook\"\nsink = {{ kind = \"http\", url = \"http://{}/\" }}\n",
            receiver.address()
        ),
    );
    let relay = place.start_after("ulimit -n 128", &["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = listen(&relay);
    let mut silent = silent_connections(&address, 400);
    // The first one is closed by the relay: nobody else closes it.
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = silent[0].read(&mut [0]);
    assert!(matches!(&closed, Ok(0)) || closed.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    let lines: String = (0..200).map(|number| format!("{number}\n")).collect();
    assert!(place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], lines.as_bytes()).status.success());
    crate::ledger::until("all are delivered", || receiver.bodies().len() == 200);
    until(&address, "/readyz", |answer| answer.0 == 200);
    assert_eq!(silent.len(), 400);
}

fn a_soft_limit_of_open_files_is_raised(on: On) {
    let place = Place::with_file_sink(on);
    let relay = place.start_after("ulimit -S -n 64", &["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", relay.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft: u64 = line.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert!(soft > 64, "{line}");
}

on_each!(
    idle_connections_to_the_listener_do_not_stop_delivery,
    a_soft_limit_of_open_files_is_raised,
    health_and_metrics_are_served,
    pages_are_answered_within_100_ms,
    a_relay_that_starts_on_an_old_backlog_is_never_called_stuck,
    a_taken_port_moves_on_and_says_so,
    no_progress_is_503_with_the_reason,
    listening_beyond_loopback_without_tokens_is_refused,
);
