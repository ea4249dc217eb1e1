use std::fs::{File, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pillarbox_testkit::http_receiver::{HttpAnswer, HttpReceiver};
use serde_json::Value;

use crate::http;
use crate::ledger::{LANES, Ledger, until};
use crate::place::{On, Place, is_frozen, on_each};
use crate::sql::Sql;

/// Kills at random moments, of two relays that share the lanes.
fn kills(on: On) -> usize {
    match on {
        On::Sqlite => 200,
        On::Postgres => 40,
    }
}
/// At most this many lines are waited for between two kills.
const LINES_BETWEEN_MAX: u64 = 30;
/// Every so many kills come while the receiver's file is locked by somebody else, so that batches stay at the sink for long.
const HELD_UP_EVERY: usize = 20;
/// So many beats of the relay that is killed then; it settles more often than it beats.
const HELD_UP_BEATS: i64 = 2;
/// So far a publisher may be ahead of the receiver.
const BACKLOG_MAX: usize = 400;
/// The keys of the random runs.
const KEYS: u64 = 40;
/// `relay.in_flight` of all relays here: what one kill may make come again, of what did not take the slow path.
const IN_FLIGHT: usize = 60;
/// Take-overs that are looked at one by one.
fn takeovers_watched(on: On) -> usize {
    match on {
        On::Sqlite => 20,
        On::Postgres => 50,
    }
}
/// A take-over by the lease would take `lease_ttl`, 10 s by default; by the lock it must be over long before that.
const TAKEOVER_MAX: Duration = Duration::from_secs(5);

const SIGKILL: i32 = 9;

/// A current schema, and a file sink `NAME.ndjson` for each name. Small batches, so that there is much to be torn apart, and
/// short retries, so that an event whose owner was killed while it worked carefully is not waited for.
fn place(on: On, names: &[&str]) -> Place {
    let place = Place::new(on);
    let subscription = |name: &&str| {
        format!(
            "[[subscription]]\nname = \"{name}\"\nlanes = {LANES}\nbatch_size = 10\nworkers = 3\n\
             retry = {{ max_attempts = 1000, base = \"10ms\", cap = \"50ms\" }}\n\
             sink = {{ kind = \"file\", path = \"{name}.ndjson\" }}\n"
        )
    };
    let subscriptions: String = names.iter().map(subscription).collect();
    place.write("pillarbox.toml", &format!("[relay]\nin_flight = {IN_FLIGHT}\n{subscriptions}"));
    place
}

/// A killed relay that nobody has watched is replaced after its lease alone, where locks do not prove life.
fn set_lease(place: &Place, lease: &str) {
    let config = place.read("pillarbox.toml").replacen("[relay]", &format!("[relay]\nlease_ttl = \"{lease}\""), 1);
    place.write("pillarbox.toml", &config);
}

/// Makes the subscriptions queues of which every event has a row.
#[cfg(feature = "failpoints")]
fn make_queues(place: &Place) {
    let queue = "[[subscription]]\nmode = \"queue\"\nprocessing_timeout = \"1s\"";
    let config = place.read("pillarbox.toml").replace("[[subscription]]", queue);
    let recovery = "[recovery]\nprofile = \"conservative\"\ncheck_interval = \"100ms\"\n";
    place.write("pillarbox.toml", &format!("{recovery}{config}"));
}

/// A relay whose log goes to a file, to be killed.
struct Victim {
    child: Child,
}

impl Victim {
    fn start(place: &Place, failpoint: Option<String>) -> Self {
        let log = OpenOptions::new().create(true).append(true).open(place.path("relay.log")).unwrap();
        let mut command = place.command(&["run", "--listen", "off", "--log-format", "json"]);
        command.stderr(log).envs(failpoint.map(|failpoint| ("PILLARBOX_FAILPOINT", failpoint)));
        Victim { child: command.spawn().unwrap() }
    }

    /// How it ended, if it has.
    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Freezes it wherever it is, counts what it has delivered and not settled, and kills it.
    fn kill(&mut self, place: &Place, ledger: &mut Ledger) -> usize {
        assert_eq!(self.ended(), None, "the relay ended by itself: {}", place.read("relay.log"));
        self.signal("-STOP");
        until("the relay is frozen", || is_frozen(self.child.id()));
        let owners = instances(&place.sql(), self.child.id());
        // Frozen, it holds its lock: nobody takes its lanes before this is counted.
        let charge = ledger.charge(Some(&owners));
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(SIGKILL));
        assert!(charge.total() <= IN_FLIGHT, "{charge:?}");
        charge.total()
    }

    /// Ends it cleanly.
    fn terminate(&mut self, place: &Place) {
        self.signal("-TERM");
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{}", place.read("relay.log"));
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The instances that a process has, or had before its number was given to another.
fn instances(sql: &Sql, pid: u32) -> Vec<i64> {
    let rows = sql.rows(&format!("select id from pillarbox_instance where pid = {pid}"));
    rows.iter().map(|row| row[0].as_deref().unwrap().parse().unwrap()).collect()
}

/// Commits events of these keys in one transaction.
fn publish(sql: &Sql, keys: impl IntoIterator<Item = u64>) {
    let event = |key: u64| {
        format!(
            "insert into pillarbox_event (topic, key, type, payload) values ('t', 'key-{key}', 'y', '{{\"n\":1}}');"
        )
    };
    let events: String = keys.into_iter().map(event).collect();
    sql.execute(&format!("begin; {events} commit"));
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

/// The causes of all take-overs that the relays logged, with how many lanes each.
fn takeovers(place: &Place) -> Vec<(String, u64)> {
    let log = place.read("relay.log");
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let fields = lines.map(|line| line["fields"].clone()).filter(|fields| fields["message"] == "took lanes over");
    fields.map(|fields| (fields["cause"].as_str().unwrap().to_owned(), fields["count"].as_u64().unwrap())).collect()
}

/// A small generator; what it decides cannot be replayed, because the processes' own timing cannot.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % below
    }
}

fn kills_at_random_lose_nothing(on: On) {
    let place = place(on, &["out"]);
    set_lease(&place, "3s");
    let mut ledger = Ledger::new(&place, "out");
    let mut dice = Dice(now_ms() as u64 | 1);
    let arrived = Arc::new(AtomicUsize::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let publisher = thread::spawn({
        let (sql, dice, arrived, stop) = (place.sql(), Dice(dice.0 ^ 0x5bd1_e995), arrived.clone(), stop.clone());
        move || publish_until(sql, dice, &arrived, &stop)
    });
    let mut relays = [Victim::start(&place, None), Victim::start(&place, None)];
    let mut in_flight = 0;
    for kill in 0..kills(on) {
        // One in four comes at once, while the relay killed before is still on its way up.
        let lines = if dice.roll(4) == 0 { 0 } else { dice.roll(LINES_BETWEEN_MAX) as usize };
        let goal = ledger.arrivals() + lines;
        until("delivery goes on between kills", || {
            arrived.store(ledger.arrivals(), Ordering::SeqCst);
            ledger.arrivals() >= goal
        });
        let victim = &mut relays[dice.roll(2) as usize];
        let held = (kill % HELD_UP_EVERY == 0).then(|| hold_up(&place, &ledger, victim));
        in_flight += victim.kill(&place, &mut ledger);
        drop(held);
        *victim = Victim::start(&place, None);
    }
    stop.store(true, Ordering::SeqCst);
    let published = publisher.join().unwrap();
    until("everything is settled", || ledger.is_settled());
    relays.iter_mut().for_each(|relay| relay.terminate(&place));
    let verdict = ledger.verdict();
    let takeovers = takeovers(&place);
    println!("{verdict}; in flight at the kills {in_flight}; take-overs {}", takeovers.len());
    assert_eq!(verdict.committed, published);
    verdict.assert_sound(in_flight);
    let by_lock = takeovers.iter().filter(|(cause, _)| cause == "lock").count();
    // On PostgreSQL a relay that comes up after another's end can only wait for its lease.
    let expected = if on == On::Sqlite { takeovers.len() } else { 1 };
    assert!(by_lock > 0 && by_lock >= expected, "{takeovers:?}");
}

/// Locks the receiver's file once the relay owns lanes, and waits until it has had the time to settle what it could not
/// deliver.
fn hold_up(place: &Place, ledger: &Ledger, relay: &Victim) -> File {
    let sql = place.sql();
    until("the relay owns lanes", || {
        let owners = instances(&sql, relay.child.id());
        ledger.cursors().values().any(|cursor| cursor.owner.is_some_and(|owner| owners.contains(&owner)))
    });
    let held = OpenOptions::new().create(true).append(true).open(place.path("out.ndjson")).unwrap();
    held.lock().unwrap();
    let beats = || -> i64 {
        sql.number(&format!("select coalesce(max(beat), 0) from pillarbox_instance where pid = {}", relay.child.id()))
    };
    let before = beats();
    until("the relay beats while it is held up", || beats() >= before + HELD_UP_BEATS);
    held
}

/// Publishes in transactions of any size, some of which are rolled back, staying a little ahead of the receiver.
fn publish_until(sql: Sql, mut dice: Dice, arrived: &AtomicUsize, stop: &AtomicBool) -> usize {
    let mut published = 0;
    while !stop.load(Ordering::SeqCst) {
        if published > arrived.load(Ordering::SeqCst) + BACKLOG_MAX {
            // The killer unparks nobody; it only counts, and may be waiting for a relay to come up.
            thread::park_timeout(Duration::from_millis(1));
            continue;
        }
        if dice.roll(10) == 0 {
            sql.execute("begin; insert into pillarbox_event (topic, type) values ('t', 'rolled back'); rollback");
        }
        let count = 1 + dice.roll(20);
        publish(&sql, (0..count).map(|_| dice.roll(KEYS)));
        published += count as usize;
    }
    published
}

fn a_killed_relay_is_replaced_by_its_lock_and_not_by_the_lease(on: On) {
    let place = place(on, &["out"]);
    let mut ledger = Ledger::new(&place, "out");
    let sql = place.sql();
    let start = || {
        let relay = place.start(&["run", "--listen", "127.0.0.1:0", "--log-format", "json"]);
        let address = http::listen(&relay);
        (relay, address)
    };
    let mut survivor = start();
    let mut victim = start();
    let mut slowest = Duration::ZERO;
    let count = takeovers_watched(on);
    for _ in 0..count {
        until("both relays own lanes", || shares(&ledger) == [LANES as usize / 2; 2]);
        until("nothing is in flight", || ledger.is_settled());
        let owner = instances(&sql, victim.0.id());
        let of_victim = |ledger: &Ledger| -> Vec<(u32, i64)> {
            let cursors = ledger.cursors().into_iter();
            cursors
                .filter(|(_, cursor)| owner.contains(&cursor.owner.unwrap()))
                .map(|(lane, cursor)| (lane, cursor.epoch))
                .collect()
        };
        let before = of_victim(&ledger);
        assert_eq!(before.len(), LANES as usize / 2);
        let (locks, arrivals) = (taken_by_lock(&survivor.1), ledger.arrivals());
        victim.0.signal("-KILL");
        let killed = Instant::now();
        victim.0.end();
        publish(&sql, 0..KEYS);
        until("what was published after the kill arrives", || ledger.arrivals() >= arrivals + KEYS as usize);
        let took = killed.elapsed();
        assert!(took < TAKEOVER_MAX, "the take-over took {took:?}");
        slowest = slowest.max(took);
        assert_eq!(of_victim(&ledger), [], "lanes were left behind");
        let after = ledger.cursors();
        assert!(before.iter().all(|(lane, epoch)| after[lane].epoch > *epoch), "{before:?}");
        assert_eq!(taken_by_lock(&survivor.1) - locks, before.len() as u64);
        // The survivor is the next victim, so that every one has been both.
        victim = std::mem::replace(&mut survivor, start());
    }
    println!("the slowest of {count} take-overs took {slowest:?}");
    let verdict = ledger.verdict();
    verdict.assert_sound(0);
}

/// How many lanes each owner has, most first.
fn shares(ledger: &Ledger) -> Vec<usize> {
    let mut counts = std::collections::BTreeMap::<i64, usize>::new();
    let cursors = ledger.cursors();
    cursors.values().filter_map(|cursor| cursor.owner).for_each(|owner| *counts.entry(owner).or_default() += 1);
    counts.into_values().collect()
}

/// The survivor's own count of lanes that it took because a lock came free; none may have come by the lease.
fn taken_by_lock(address: &str) -> u64 {
    let (_, metrics) = http::get(address, "/metrics");
    assert!(metrics.contains("pillarbox_takeovers_total{cause=\"lease\"} 0\n"), "{metrics}");
    let line = metrics.lines().find_map(|line| line.strip_prefix("pillarbox_takeovers_total{cause=\"lock\"} "));
    line.map_or(0, |count| count.parse().unwrap())
}

/// An event that kills whoever works on it, each time a moment after newer events of its lane were settled: its attempts are counted all
/// the same until it is dead, and everything else is delivered.
fn an_event_that_kills_its_relays_is_dead_in_the_end(on: On) {
    /// Of these attempts each may take a few relays.
    const KILLS_MAX: usize = 20;
    /// How often it is looked, at most, whether the newer event was settled: a careful relay does not touch it.
    const LOOKS_MAX: usize = 100;
    let place = Place::new(on);
    let receiver = HttpReceiver::start().unwrap();
    let config = format!(
        "[relay]\nlease_ttl = \"1s\"\n[[subscription]]\nname = \"hook\"\nlanes = 1\n\
         retry = {{ max_attempts = 2, min_dead_age = \"0s\", base = \"10ms\", cap = \"50ms\" }}\nsink = {{ kind = \"http\", url = \"{}\" }}\n",
        receiver.url("/")
    );
    place.write("pillarbox.toml", &config);
    let anchor = |sql: &Sql| sql.number("select coalesce(max(anchor_position), 0) from pillarbox_cursor");
    let (reached, poison) = mpsc::channel();
    receiver.answer(move |request| {
        if !request.text().contains("poison") {
            return HttpAnswer::status(204);
        }
        // The test ends before the receiver does.
        let _ = reached.send(());
        HttpAnswer::Hang
    });
    let sql = place.sql();
    let kills_all = "insert into pillarbox_event (topic, key, type, payload) values ('t', 'poison', 'y', '{}')";
    sql.execute(kills_all);
    let is_dead = || sql.number("select count(*) from pillarbox_delivery where state = 'dead'") == 1;
    let mut kills = 0;
    let mut relay = Victim::start(&place, None);
    while !is_dead() {
        if poison.try_recv().is_err() {
            thread::park_timeout(Duration::from_millis(5));
            continue;
        }
        let before = anchor(&sql);
        publish(&sql, [1]);
        (0..LOOKS_MAX)
            .take_while(|_| anchor(&sql) == before)
            .for_each(|_| thread::park_timeout(Duration::from_millis(5)));
        kills += 1;
        assert!(kills <= KILLS_MAX, "it is not dead after {kills} kills");
        relay.child.kill().unwrap();
        assert_eq!(relay.child.wait().unwrap().signal(), Some(SIGKILL));
        relay = Victim::start(&place, None);
    }
    publish(&sql, [2]);
    let status = place.until(&["status"], |status| {
        let hook = &status["subscriptions"][0];
        hook["pending"] == 0 && hook["processing"] == 0 && hook["retrying"] == 0 && hook["lag"] == 0
    });
    assert_eq!(status["subscriptions"][0]["dead"], 1, "{status}");
    let others = receiver.accepted().iter().filter(|request| !request.text().contains("poison")).count();
    assert!(others > kills, "every other event has arrived: {others}");
    println!("dead after {kills} kills");
    relay.terminate(&place);
}

on_each!(
    kills_at_random_lose_nothing,
    a_killed_relay_is_replaced_by_its_lock_and_not_by_the_lease,
    an_event_that_kills_its_relays_is_dead_in_the_end
);

#[cfg(feature = "failpoints")]
mod failpoints {
    use std::io::Write;

    use pillarbox::sink::CLOUD_EVENT_START;
    use pillarbox::store::Failpoint;

    use super::*;
    use crate::ledger::Charge;

    /// Which time the failpoint is reached is the one that kills.
    fn counts(on: On) -> &'static [u64] {
        match on {
            On::Sqlite => &[1, 2, 5],
            On::Postgres => &[1, 5],
        }
    }
    /// How often a relay that has settled everything gets new work: where the failpoint must be reached, until it is.
    const ROUNDS_MAX: usize = 40;
    /// Where a process joins or leaves there is nothing to be reached a second time.
    const ROUNDS_ONCE: usize = 2;
    const NAMES: [&str; 2] = ["one", "two"];
    const SIGABRT: i32 = 6;
    /// A delayed event is due this soon; where the relay reads it later still, the next round has another.
    const DELAY_MS: i64 = 100;

    fn a_kill_at_every_failpoint_loses_nothing(on: On) {
        for &point in Failpoint::ALL {
            counts(on).iter().for_each(|count| check(on, point, *count));
        }
    }

    on_each!(a_kill_at_every_failpoint_loses_nothing);

    fn check(on: On, point: Failpoint, count: u64) {
        let name = format!("{}:{count}", point.name());
        let place = place(on, &NAMES);
        set_lease(&place, "1s");
        if matches!(point, Failpoint::Claimed | Failpoint::Finish | Failpoint::Finished) {
            make_queues(&place);
        }
        let sql = place.sql();
        let mut ledgers = NAMES.map(|name| Ledger::new(&place, name));
        let mut due = wave(&sql);
        let mut victim = Victim::start(&place, Some(name.clone()));
        // A process joins and leaves only once.
        let once = matches!(point, Failpoint::Joined | Failpoint::Leave);
        let rounds = if once { ROUNDS_ONCE } else { ROUNDS_MAX };
        let status = work(&place, &mut victim, &ledgers, rounds, || due = wave(&sql));
        let dies = count == 1 || !once;
        assert_eq!(status.signal() == Some(SIGABRT), dies, "{name}: {status}\n{}", place.read("relay.log"));
        let charges = ledgers.each_mut().map(|ledger| ledger.charge(None));
        let in_flight = charges.map(Charge::total);
        if !dies {
            assert_eq!((status.code(), in_flight), (Some(0), [0, 0]), "{name}: {}", place.read("relay.log"));
        }
        assert!(charges.iter().all(|charge| charge.total() <= IN_FLIGHT), "{name}: {charges:?}");
        NAMES.iter().for_each(|name| tear(&place, name));
        // At least one more line for each file, so that both torn tails are found.
        publish(&sql, 0..8);
        until("the delayed events are due", || now_ms() > due);
        let mut after = Victim::start(&place, None);
        until(&format!("{name}: everything is settled"), || ledgers.iter().all(Ledger::is_settled));
        after.terminate(&place);
        // Killed between the sink's answer and the settlement: if nothing came again here, nothing was tortured.
        assert!(point != Failpoint::Delivered || in_flight != [0, 0], "{name}");
        for (ledger, in_flight) in ledgers.iter_mut().zip(in_flight) {
            let verdict = ledger.verdict();
            assert!(verdict.is_sound() && verdict.duplicates <= in_flight, "{name}: {verdict}, in flight {in_flight}");
        }
    }

    /// Gives the relay work, until it dies at its failpoint or has had enough of it and is told to end.
    fn work(
        place: &Place,
        victim: &mut Victim,
        ledgers: &[Ledger],
        rounds: usize,
        mut wave: impl FnMut(),
    ) -> ExitStatus {
        for _ in 0..rounds {
            if let Some(status) = ended_or(victim, || ledgers.iter().all(Ledger::is_settled)) {
                return status;
            }
            // Nothing is left to be delivered, so this repeats nothing; but the lanes have to be taken and loaded anew.
            let before = epochs(ledgers);
            let horizon = place.json(&["status"])["log"]["horizon"].to_string();
            NAMES.iter().for_each(|name| drop(place.ok(&["rewind", name, "--to", &horizon, "--yes"])));
            // What the relay would read under an epoch that is over would come again.
            let taken = || epochs(ledgers).iter().zip(&before).all(|(after, before)| *after >= before + 2);
            if let Some(status) = ended_or(victim, taken) {
                return status;
            }
            wave();
        }
        ended_or(victim, || ledgers.iter().all(Ledger::is_settled)).unwrap_or_else(|| {
            victim.signal("-TERM");
            victim.child.wait().unwrap()
        })
    }

    /// Waits until the relay dies, or until `met` says that it works on.
    fn ended_or(victim: &mut Victim, met: impl Fn() -> bool) -> Option<ExitStatus> {
        let mut status = None;
        until("the relay dies or works on", || {
            status = victim.ended();
            status.is_some() || met()
        });
        status
    }

    /// The epochs of all lanes, lane by lane.
    fn epochs(ledgers: &[Ledger]) -> Vec<i64> {
        let of = |ledger: &Ledger| {
            let cursors = ledger.cursors();
            (0..LANES).map(move |lane| cursors[&lane].epoch)
        };
        ledgers.iter().flat_map(of).collect()
    }

    /// Events of several keys, in order, and two without a key that are delayed, so that the slow path has work too.
    fn wave(sql: &Sql) -> i64 {
        let due = now_ms() + DELAY_MS;
        publish(sql, (0..60).map(|number| number % 7));
        let event = format!("('t', 'delayed', {})", sql.time(due));
        sql.execute(&format!("insert into pillarbox_event (topic, type, deliver_at) values {event}, {event}"));
        due
    }

    /// What a process leaves that is killed in the middle of a write.
    fn tear(place: &Place, name: &str) {
        let path = place.path(&format!("{name}.ndjson"));
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(CLOUD_EVENT_START.as_bytes()).unwrap();
        file.write_all(b"01890a5d-ac96-774b-bcce-b302099a8057").unwrap();
    }
}
