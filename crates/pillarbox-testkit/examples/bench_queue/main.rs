//! Queue mode beside what people would use instead, on the same server: `cargo xtask bench --queue [--quick] [--json]`.
//!
//! A private server that really writes to disk; every measurement in a process and a database of its own. Rounds are interleaved,
//! the others beside each measurement, and ratios are taken within a round: the machine's mood cancels out. `--only NAME` measures
//! one of: `queue`, `slow`, `flood`, `aside`, `due`, `recovery`, `memory`.
mod aside;
#[path = "../bench_postgres/database.rs"]
#[allow(dead_code, reason = "shared with another benchmark, which uses all of it")]
mod database;
#[path = "../bench/distribution.rs"]
mod distribution;
mod flood;
mod graphile;
mod hand_written;
mod memory;
mod peer;
mod pgmq;
mod place;
#[path = "../bench/process.rs"]
#[allow(dead_code, reason = "shared with other benchmarks, which use all of it")]
mod process;
mod queue;
mod recovery;
mod report;
#[path = "../bench/summary.rs"]
mod summary;
mod wear;

use std::path::Path;
use std::process::ExitCode;

use pillarbox_testkit::postgres::Server;

use crate::aside::Aside;
use crate::distribution::Distribution;
use crate::process::{Figures, measure};
use crate::queue::Pace;
use crate::report::Report;
use crate::summary::{Goal, Row};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much is measured.
struct Scale {
    rounds: usize,
    events: usize,
    /// On each store.
    kills: usize,
    waiting: usize,
}

const FULL: Scale = Scale { rounds: 5, events: 100_000, kills: 20, waiting: 2_000 };
const QUICK: Scale = Scale { rounds: 2, events: 100_000, kills: 5, waiting: 2_000 };

fn main() -> ExitCode {
    process::run(child, parent)
}

/// One measurement, in a process of its own.
fn child(arguments: &[String]) -> Result<()> {
    let [name, place, count] = arguments else { return Err("a measurement takes NAME PLACE COUNT".into()) };
    let runtime = tokio::runtime::Runtime::new()?;
    if name == recovery::RELAY {
        return runtime.block_on(recovery::relay(place));
    }
    println!("{}", runtime.block_on(figures(name, place, count.parse()?))?);
    Ok(())
}

async fn figures(name: &str, place: &str, count: usize) -> Result<Figures> {
    match name {
        "log" => queue::fill(place, count).await,
        "log_keyed" => database::fill(place, count).await,
        "queue" => queue::drain(place, count, Pace::Instant).await,
        "queue_slow" => queue::drain(place, count, Pace::Slow).await,
        "queue_stalled" => queue::drain(place, count, Pace::Stalled).await,
        "hand_written_table" => hand_written::fill(place, count).await,
        "hand_written" => hand_written::drain(place, count).await,
        "hand_written_slow" => hand_written::drain_slowly(place, count).await,
        "pgmq_table" => pgmq::fill(place, count).await,
        "pgmq" => pgmq::drain(place, count).await,
        "graphile_table" => graphile::fill(place, count).await,
        "graphile" => graphile::drain(place, count),
        "flood" => flood::retries(place, count).await,
        "aside_none" => aside::drain(place, count, Aside::Nothing).await,
        "aside_dead" => aside::drain(place, count, Aside::Dead(2_000)).await,
        "aside_dead_many" => aside::drain(place, count, Aside::Dead(500_000)).await,
        "aside_delayed" => aside::drain(place, count, Aside::Delayed(1_000_000)).await,
        "due_one" => aside::due(place, count, 1).await,
        "due_pairs" => aside::due(place, count, (count / 2).max(1)).await,
        "recovery" => recovery::kills(place, count).await,
        "memory" => memory::waiting(place, count).await,
        other => Err(format!("there is no measurement '{other}'").into()),
    }
}

struct Bench<'a> {
    scale: Scale,
    only: Option<String>,
    server: Server,
    /// For databases of SQLite.
    folder: &'a Path,
}

fn parent(arguments: &[String]) -> Result<()> {
    let (mut quick, mut json, mut only, mut events) = (false, false, None, None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            "--json" => json = true,
            "--only" => only = arguments.next().cloned(),
            "--events" => events = arguments.next().map(|count| count.parse()).transpose()?,
            other => return Err(format!("'{other}' is not one of --quick, --json, --only NAME, --events COUNT").into()),
        }
    }
    let scale = if quick { QUICK } else { FULL };
    let scale = Scale { events: events.unwrap_or(scale.events), ..scale };
    let server = Server::builder()
        .durable()
        .setting("shared_buffers", "1GB")
        .setting("max_wal_size", "4GB")
        .setting("max_prepared_transactions", 0)
        .start()?;
    // Beside the program and not in /tmp, which is memory on many machines and knows no fsync.
    let beside = std::env::current_exe()?.parent().map(Path::to_owned).ok_or("the program has no folder")?;
    let folder = tempfile::tempdir_in(beside)?;
    let report = Bench { scale, only, server, folder: folder.path() }.run()?;
    println!("{}", if json { report.to_json()? } else { report.to_table() });
    Ok(())
}

impl Bench<'_> {
    fn run(&self) -> Result<Report> {
        let mut report = Report::default();
        let mut recovered = [Distribution::default(), Distribution::default()];
        for round in 1..=self.scale.rounds {
            eprintln!("round {round} of {}", self.scale.rounds);
            if self.wants("queue") {
                self.queue(&mut report)?;
            }
            if self.wants("slow") {
                self.slow(&mut report)?;
            }
            if self.wants("flood") {
                self.flood(&mut report)?;
            }
            if self.wants("aside") {
                self.aside(&mut report)?;
            }
            if self.wants("due") {
                self.due(&mut report)?;
            }
            if self.wants("recovery") {
                self.recovery(&mut recovered, round)?;
            }
            if self.wants("memory") {
                self.memory(&mut report, round)?;
            }
        }
        if self.wants("recovery") {
            report_recovery(&recovered, &mut report);
        }
        Ok(report)
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == name)
    }

    /// Fills a fresh database by one process and measures by another.
    fn filled(&self, fill: &str, name: &str) -> Result<Figures> {
        let database = self.server.create_database()?;
        measure(fill, Path::new(database.url()), self.scale.events)?;
        measure(name, Path::new(database.url()), self.scale.events)
    }

    /// The events per second of a peer, if it is installed and works.
    fn peer(&self, report: &mut Report, name: &str, installed: Result<()>, fill: &str, drain: &str) -> Option<f64> {
        let found = installed.and_then(|()| self.filled(fill, drain));
        match found {
            Ok(found) => Some(found["rate"]),
            Err(error) => {
                report.not_measured(name, error.to_string());
                None
            }
        }
    }

    fn queue(&self, report: &mut Report) -> Result<()> {
        let loop_ = self.filled("hand_written_table", "hand_written")?;
        let pgmq = self.peer(report, "pgmq", pgmq::installed(), "pgmq_table", "pgmq");
        let graphile = self.peer(report, "graphile-worker", graphile::installed(), "graphile_table", "graphile");
        let ours = self.filled("log", "queue")?;
        let keyed = self.filled("log_keyed", "queue")?;
        let best = [pgmq, graphile].into_iter().flatten().fold(loop_["rate"], f64::max);
        let row = |name| Row { name, unit: "events/s", goal: Goal::RatioAtLeast(0.95) };
        report.add(row("queue, no keys, best peer"), ours["rate"], Some(best));
        report.add(row("queue, 1,000 keys, best peer"), keyed["rate"], Some(best));
        let mut tell = |name, theirs| report.tell(name, "events/s", ours["rate"], Some(theirs));
        tell("queue, hand-written loop", loop_["rate"]);
        pgmq.into_iter().for_each(|rate| tell("queue, pgmq", rate));
        graphile.into_iter().for_each(|rate| tell("queue, graphile-worker", rate));
        report.tell("queue, start until first event", "ms", ours["first_ms"], None);
        report.tell("queue, last event until settled", "ms", ours["settled_ms"], None);
        report.tell("queue, no keys, dead tuples", "per event", ours["dead"], Some(loop_["dead"]));
        report.tell("queue, no keys, WAL", "B/event", ours["wal"], Some(loop_["wal"]));
        report.tell("queue, 1,000 keys, dead tuples", "per event", keyed["dead"], Some(loop_["dead"]));
        report.tell("queue, 1,000 keys, WAL", "B/event", keyed["wal"], Some(loop_["wal"]));
        Ok(())
    }

    fn slow(&self, report: &mut Report) -> Result<()> {
        let theirs = self.filled("hand_written_table", "hand_written_slow")?;
        let ours = self.filled("log", "queue_slow")?;
        report.tell("slow", "events/s", ours["rate"], Some(theirs["rate"]));
        report.tell("slow, rows of the queue", "per event", ours["rows"], None);
        report.tell("slow, dead tuples", "per event", ours["dead"], Some(theirs["dead"]));
        report.tell("slow, WAL", "B/event", ours["wal"], Some(theirs["wal"]));
        let rows = self.filled("log", "queue_stalled")?;
        report.tell("slow after a stall", "events/s", rows["rate"], Some(theirs["rate"]));
        report.tell("slow after a stall, rows", "per event", rows["rows"], None);
        report.tell("slow after a stall, dead tuples", "per event", rows["dead"], Some(theirs["dead"]));
        report.tell("slow after a stall, WAL", "B/event", rows["wal"], Some(theirs["wal"]));
        Ok(())
    }

    fn flood(&self, report: &mut Report) -> Result<()> {
        let found = self.filled("log", "flood")?;
        let row = Row { name: "flood, table when vacuumed", unit: "KiB", goal: Goal::RatioAtMost(2.0) };
        report.add(row, found["after"], Some(found["copy"]));
        report.tell("flood, table before vacuum", "KiB", found["before"], Some(found["copy"]));
        report.tell("flood, empty table", "KiB", found["empty"], None);
        report.tell("flood, rows at once", "rows", found["rows"], None);
        report.tell("flood", "events/s", found["rate"], None);
        Ok(())
    }

    /// A queue beside what lies in its delivery table and is not due.
    fn aside(&self, report: &mut Report) -> Result<()> {
        let measured = |name: &str| -> Result<Figures> {
            let database = self.server.create_database()?;
            measure(name, Path::new(database.url()), self.scale.events)
        };
        let none = measured("aside_none")?;
        for (name, rate, first, memory) in [
            ("aside_dead", "2,000 dead keys", "2,000 dead keys, first event", "2,000 dead keys, memory"),
            ("aside_dead_many", "500,000 dead keys", "500,000 dead keys, first event", "500,000 dead keys, memory"),
            ("aside_delayed", "1,000,000 delayed", "1,000,000 delayed, first event", "1,000,000 delayed, memory"),
        ] {
            let found = measured(name)?;
            report.add(
                Row { name: rate, unit: "events/s", goal: Goal::RatioAtLeast(0.5) },
                found["rate"],
                Some(none["rate"]),
            );
            report.tell(first, "ms", found["first_ms"], Some(none["first_ms"]));
            report.tell(memory, "MiB", found["peak_mib"], Some(none["peak_mib"]));
        }
        Ok(())
    }

    /// Delayed events that are due at once, four times as many beside a quarter of them; and another queue meanwhile.
    fn due(&self, report: &mut Report) -> Result<()> {
        let measured = |name: &str, count: usize| -> Result<Figures> {
            let database = self.server.create_database()?;
            measure(name, Path::new(database.url()), count)
        };
        let alone = measured("due_one", 0)?;
        for (name, rate, p50, p99) in [
            ("due_one", "due at once, one key", "one key due, other queue p50", "one key due, other queue p99"),
            ("due_pairs", "due at once, 2 events per key", "keys due, other queue p50", "keys due, other queue p99"),
        ] {
            let (few, many) = (measured(name, self.scale.events / 4)?, measured(name, self.scale.events)?);
            report.add(
                Row { name: rate, unit: "events/s", goal: Goal::RatioAtLeast(0.5) },
                many["rate"],
                Some(few["rate"]),
            );
            report.tell(p50, "ms", many["p50"], Some(alone["p50"]));
            report.tell(p99, "ms", many["p99"], Some(alone["p99"]));
        }
        Ok(())
    }

    fn recovery(&self, recovered: &mut [Distribution; 2], round: usize) -> Result<()> {
        let database = self.server.create_database()?;
        let file = self.folder.join(format!("recovery-{round}.db"));
        for (place, times) in [Path::new(database.url()), &file].into_iter().zip(recovered) {
            times.extend(&measure("recovery", place, self.scale.kills)?, self.scale.kills);
        }
        Ok(())
    }

    fn memory(&self, report: &mut Report, round: usize) -> Result<()> {
        let database = self.server.create_database()?;
        let file = self.folder.join(format!("memory-{round}.db"));
        let places = [("2,000 waiting, PostgreSQL", Path::new(database.url())), ("2,000 waiting, SQLite", &file)];
        for (name, place) in places {
            let found = measure("memory", place, self.scale.waiting)?;
            report.add(Row { name, unit: "MiB", goal: Goal::Below(100.0) }, found["peak_mib"], None);
        }
        Ok(())
    }
}

/// The kills of all rounds together.
fn report_recovery([postgres, sqlite]: &[Distribution; 2], report: &mut Report) {
    let mut add = |name, value| report.add(Row { name, unit: "ms", goal: Goal::Below(1000.0) }, value, None);
    add("recovery, PostgreSQL, p50", postgres.quantile(0.5));
    add("recovery, PostgreSQL, p99", postgres.quantile(0.99));
    add("recovery, SQLite, p50", sqlite.quantile(0.5));
    add("recovery, SQLite, p99", sqlite.quantile(0.99));
    report.tell("recovery, PostgreSQL, max", "ms", postgres.quantile(1.0), None);
    report.tell("recovery, SQLite, max", "ms", sqlite.quantile(1.0), None);
    report.tell("recovery, kills on each store", "kills", postgres.len() as f64, None);
}
