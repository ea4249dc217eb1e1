//! Relays and followers whose database goes away for a while, or who are away themselves: mostly on PostgreSQL.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};

use pillarbox_testkit::postgres::{Mode, Server};
use pillarbox_testkit::proxy::Proxy;

use crate::http;
use crate::ledger::{LANES, Ledger, until};
use crate::place::{Place, Running};
use crate::sql::Sql;

/// Long enough for a busy machine, and far less than the patience of the tests.
const LEASE: &str = "2s";

/// A file sink, and a short lease.
fn with_lease(place: Place) -> Place {
    let place = place.migrated().file_sink();
    let config = place.read("pillarbox.toml");
    place.write("pillarbox.toml", &format!("[relay]\nlease_ttl = \"{LEASE}\"\n{config}"));
    place
}

fn start(place: &Place) -> Running {
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    relay
}

/// Publishes one event for each of some keys.
fn publish(sql: &Sql, keys: std::ops::Range<usize>) {
    let event = |key| format!("insert into pillarbox_event (topic, key, type) values ('t', 'key-{key}', 'y');");
    sql.execute(&format!("begin; {} commit", keys.map(event).collect::<String>()));
}

#[test]
fn a_relay_waits_for_its_database_to_be_started() {
    let server = Server::builder().start().unwrap();
    let place = with_lease(Place::on(&server));
    let id = place.publish(&[]);
    server.stop(Mode::Fast).unwrap();
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("trying again");
    place.fails(1, &["run", "--until-idle"]);
    server.start().unwrap();
    relay.wait_for("relay started");
    until("the event arrives", || place.path("out.ndjson").exists() && place.read("out.ndjson").contains(&id));
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
}

#[test]
fn a_relay_that_waits_for_its_database_can_be_ended() {
    let server = Server::builder().start().unwrap();
    let place = with_lease(Place::on(&server));
    server.stop(Mode::Fast).unwrap();
    let mut relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("trying again");
    relay.signal("-TERM");
    assert_eq!(relay.end(), Some(0));
}

#[test]
fn restarts_of_the_database_lose_nothing() {
    let server = Server::builder().start().unwrap();
    let place = with_lease(Place::on(&server));
    let mut ledger = Ledger::new(&place, "out");
    let mut relays = [start(&place), start(&place)];
    for (round, mode) in [Mode::Fast, Mode::Immediate, Mode::Fast].into_iter().enumerate() {
        publish(&place.sql(), 0..20);
        until("it is delivered", || ledger.arrivals() >= 20 * (2 * round + 1));
        server.restart(mode).unwrap();
        publish(&place.sql(), 0..20);
        let mut ledger_after = Ledger::new(&place, "out");
        until("it goes on after the restart", || {
            ledger_after.arrivals() >= 20 * (2 * round + 2) && ledger_after.is_settled()
        });
        ledger = ledger_after;
    }
    for relay in &mut relays {
        relay.signal("-TERM");
        assert_eq!(relay.end(), Some(0));
    }
    let verdict = ledger.verdict();
    assert!(verdict.is_sound(), "{verdict}");
    assert_eq!(verdict.committed, 120);
}

#[test]
fn tail_goes_on_after_a_restart() {
    let server = Server::builder().start().unwrap();
    let place = Place::on(&server).migrated();
    let mut tail = place.start(&["tail", "--from", "0", "--limit", "2"]);
    tail.wait_for_output(&place.publish(&[]));
    server.stop(Mode::Fast).unwrap();
    tail.wait_for("trying again");
    server.start().unwrap();
    tail.wait_for_output(&place.publish(&[]));
    assert_eq!(tail.end(), Some(0));
}

/// Lanes as they stand, and what was settled under each epoch.
fn books(sql: &Sql) -> HashMap<(i64, i64), Vec<String>> {
    let rows = sql.rows("select lane, epoch, floor_from, floor_to, ended_at from pillarbox_progress order by id");
    let mut books = HashMap::<_, Vec<String>>::new();
    for row in rows {
        let text = |at: usize| row[at].clone().unwrap();
        let line = format!("{} {} {}", text(2), text(3), text(4));
        books.entry((text(0).parse().unwrap(), text(1).parse().unwrap())).or_default().push(line);
    }
    books
}

/// The receiver's file, locked by somebody else: whoever delivers waits.
fn hold_up(place: &Place) -> File {
    let held = OpenOptions::new().create(true).append(true).open(place.path("out.ndjson")).unwrap();
    held.lock().unwrap();
    held
}

/// The owner of every lane is this process, and nobody else.
fn owns_all(sql: &Sql, relay: &Running) -> bool {
    let owned = format!(
        "select count(*) from pillarbox_cursor where owner in (select id from pillarbox_instance where pid = {})",
        relay.id()
    );
    sql.number(&owned) == i64::from(LANES)
}

#[test]
fn a_relay_frozen_beyond_its_lease_settles_nothing_when_it_goes_on() {
    let place = with_lease(Place::empty(crate::place::On::Postgres));
    let (sql, mut ledger) = (place.sql(), Ledger::new(&place, "out"));
    let mut frozen = start(&place);
    until("it owns the lanes", || owns_all(&sql, &frozen));
    let held = hold_up(&place);
    publish(&sql, 0..100);
    let at_sink =
        "select count(*) from pillarbox_instance where (report::json #>> '{subscriptions,out,in_flight}')::int > 0";
    until("a batch is at the sink", || sql.number(at_sink) == 1);
    frozen.signal("-STOP");
    let before = ledger.cursors();
    let mut heir = start(&place);
    let line = heir.wait_for("took lanes over");
    assert!(line.contains("lease"), "{line}");
    until("the heir owns the lanes", || owns_all(&sql, &heir));
    let taken = ledger.cursors();
    assert!((0..LANES).all(|lane| taken[&lane].epoch > before[&lane].epoch), "the epochs were not raised");
    let settled_before = books(&sql);

    // The receiver takes what the frozen relay has in its hands, and that is all that it may do.
    frozen.signal("-CONT");
    held.unlock().unwrap();
    until("everything is settled", || ledger.is_settled());
    let settled = books(&sql);
    for lane in 0..LANES {
        let under = |epoch: i64| (i64::from(lane), epoch);
        let old = under(before[&lane].epoch);
        assert_eq!(settled.get(&old), settled_before.get(&old), "lane {lane} was settled under an epoch that was over");
    }
    heir.signal("-TERM");
    assert_eq!(heir.end(), Some(0));
    frozen.signal("-TERM");
    assert_eq!(frozen.end(), Some(0), "it came back under another number");
    let verdict = ledger.verdict();
    assert!(verdict.is_sound() && verdict.committed == 100, "{verdict}");
}

/// The proxy holds every byte for the whole test: what is answered is answered without the database.
#[test]
fn probes_answer_while_the_database_is_frozen() {
    let place = with_lease(Place::empty(crate::place::On::Postgres));
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let by_proxy = proxy.url(place.url());
    let args = ["run", "--listen", "127.0.0.1:0", "--log-format", "json", "--database", &by_proxy];
    let relay = place.start(&args);
    let address = http::listen(&relay);
    place.publish(&[]);
    let delivered = "pillarbox_delivered_total{subscription=\"out\"} 1";
    http::until(&address, "/metrics", |answer| answer.1.contains(delivered));
    proxy.stall().unwrap();
    http::assert_answers_within_a_second(&address);
    let (_, text) = http::until(&address, "/readyz", |answer| answer.0 == 503);
    assert!(text.contains("the database cannot be reached"), "{text}");
    http::assert_answers_within_a_second(&address);
    let (code, text) = http::get(&address, "/metrics");
    assert!(code == 200 && text.contains(delivered), "{text}");
    let (code, text) = http::get(&address, "/progressz");
    assert!(code == 503 && text.contains("the database cannot be reached"), "{text}");
    assert_eq!(http::get(&address, "/livez").0, 200);
    proxy.resume().unwrap();
    http::until(&address, "/readyz", |answer| answer.0 == 200);
}

/// Nobody can write: the relay cannot give a sign of life.
#[test]
fn probes_answer_while_the_database_is_locked() {
    let place = with_lease(Place::empty(crate::place::On::Sqlite));
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = http::listen(&relay);
    http::until(&address, "/readyz", |answer| answer.0 == 200);
    let sql = place.sql();
    sql.execute("begin immediate");
    let (_, text) = http::until(&address, "/readyz", |answer| answer.0 == 503);
    assert!(text.contains("the database cannot be reached"), "{text}");
    http::assert_answers_within_a_second(&address);
    sql.execute("rollback");
    http::until(&address, "/readyz", |answer| answer.0 == 200);
}

/// A server that is stopped refuses connections; one that was not there at the start does so from the start.
#[test]
fn a_relay_without_its_database_says_so_and_counts_on() {
    let server = Server::builder().start().unwrap();
    let place = with_lease(Place::on(&server));
    let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = http::listen(&relay);
    http::until(&address, "/readyz", |answer| answer.0 == 200);
    server.stop(Mode::Immediate).unwrap();
    let (_, text) = http::until(&address, "/readyz", |answer| answer.0 == 503);
    assert!(text.contains("the database cannot be reached"), "{text}");
    let (code, text) = http::get(&address, "/metrics");
    assert!(code == 200 && text.contains("pillarbox_rejoins_total"), "{text}");
    let other = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
    let address = http::address(&other);
    assert_eq!(http::get(&address, "/livez").0, 200);
    let (code, text) = http::get(&address, "/readyz");
    assert!(code == 503 && text.contains("has not joined yet"), "{text}");
    server.start().unwrap();
    http::until(&address, "/readyz", |answer| answer.0 == 200);
}

#[test]
fn a_relay_that_is_cut_off_is_replaced_after_its_lease_and_comes_back() {
    let place = with_lease(Place::empty(crate::place::On::Postgres));
    let (sql, mut ledger) = (place.sql(), Ledger::new(&place, "out"));
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let by_proxy = proxy.url(place.url());
    let mut cut_off = place.start(&["run", "--listen", "off", "--database", &by_proxy]);
    cut_off.wait_for("relay started");
    until("it owns the lanes", || owns_all(&sql, &cut_off));
    let mut heir = start(&place);
    // Bytes go nowhere and nobody is told: only silence can tell.
    proxy.stall().unwrap();
    publish(&sql, 0..100);
    let line = heir.wait_for("took lanes over");
    assert!(line.contains("lease"), "{line}");
    until("everything is settled", || ledger.is_settled());
    proxy.resume().unwrap();
    until("both own lanes again", || {
        let owners: std::collections::HashSet<_> = ledger.cursors().values().map(|cursor| cursor.owner).collect();
        owners.len() == 2 && !owners.contains(&None)
    });
    publish(&sql, 0..100);
    until("both deliver", || ledger.is_settled());
    for relay in [&mut cut_off, &mut heir] {
        relay.signal("-TERM");
        assert_eq!(relay.end(), Some(0));
    }
    let verdict = ledger.verdict();
    assert!(verdict.is_sound() && verdict.committed == 200, "{verdict}");
}
