//! Pillarbox on PostgreSQL beside the raw limits of the same server: `cargo xtask bench --postgres [--quick] [--json]`.
//!
//! A private server that really writes to disk; every measurement in a process of its own. Rounds are interleaved, a baseline
//! beside each measurement, and ratios are taken within a round: the machine's mood cancels out. `--only NAME` measures one of: `drain`,
//! `publish`, `slow`, `latency`, `start`, `idle`, `takeover`, `cuts`; or a part of publishing, like `publish_awake` or `publish_awake_8`.
mod cuts;
mod database;
#[path = "../bench/distribution.rs"]
mod distribution;
mod drain;
mod idle;
mod latency;
#[path = "../bench/process.rs"]
mod process;
mod processor_time;
mod publish;
mod slow;
mod start;
#[path = "../bench/summary.rs"]
mod summary;
mod takeover;

use std::path::Path;
use std::process::ExitCode;

use pillarbox::Subscription;
use pillarbox_testkit::postgres::Server;

use crate::cuts::Way;
use crate::distribution::Distribution;
use crate::drain::Hole;
use crate::process::measure;
use crate::publish::{Comparison, beside};
use crate::summary::{Goal, Row, Rows};
use crate::takeover::Pace;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much is measured.
struct Scale {
    rounds: usize,
    events: usize,
    samples: usize,
    idle_seconds: usize,
    /// In each round.
    kills: usize,
    /// In each round, half of them by a proxy and half by SIGSTOP.
    cuts: usize,
}

const FULL: Scale = Scale { rounds: 5, events: 1_000_000, samples: 5_000, idle_seconds: 10, kills: 20, cuts: 10 };
const QUICK: Scale = Scale { rounds: 2, events: 200_000, samples: 1_500, idle_seconds: 5, kills: 5, cuts: 2 };

fn main() -> ExitCode {
    process::run(child, parent)
}

/// One measurement, in a process of its own.
fn child(arguments: &[String]) -> Result<()> {
    let [name, url, count] = arguments else { return Err("a measurement takes NAME URL COUNT".into()) };
    let count = count.parse()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let figures = match name.as_str() {
        "fill" => runtime.block_on(database::fill(url, count))?,
        "scan" => runtime.block_on(drain::bare(url, count))?,
        "drain" => runtime.block_on(drain::one(url, count))?,
        "drain_ten" => runtime.block_on(drain::ten(url, count))?,
        "slow" => runtime.block_on(slow::sink(url, count))?,
        "latency" => runtime.block_on(latency::pillarbox(url, count))?,
        "listener" => runtime.block_on(latency::listener(url, count))?,
        "idle" => idle::pillarbox(&runtime, url, count as u64)?,
        "takeover" => runtime.block_on(takeover::kills(url, count, Pace::Steady))?,
        "cuts" => runtime.block_on(cuts::cuts(url, count, Way::CutOff))?,
        "freezes" => runtime.block_on(cuts::cuts(url, count, Way::Frozen))?,
        "start_many" => runtime.block_on(start::start(url, count, Subscription::new("").lanes))?,
        "start_lanes" => runtime.block_on(start::start(url, count, 256))?,
        "takeover_busy" => runtime.block_on(takeover::kills(url, count, Pace::Flood))?,
        cuts::RELAY => return runtime.block_on(cuts::relay(url)),
        takeover::RELAY => return runtime.block_on(takeover::relay(url)),
        beside::READER => return runtime.block_on(beside::read(url)),
        beside::RELAY => return runtime.block_on(beside::relay(url)),
        beside::SLOW_RELAY => return runtime.block_on(beside::slow_relay(url)),
        other => {
            let comparison = Comparison::named(other).ok_or_else(|| format!("there is no measurement '{other}'"))?;
            runtime.block_on(comparison.measure(url, count))?
        }
    };
    println!("{figures}");
    Ok(())
}

struct Bench {
    scale: Scale,
    only: Option<String>,
    server: Server,
}

fn parent(arguments: &[String]) -> Result<()> {
    let (mut quick, mut json, mut only) = (false, false, None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            "--json" => json = true,
            "--only" => only = arguments.next().cloned(),
            other => return Err(format!("'{other}' is not one of --quick, --json, --only NAME").into()),
        }
    }
    let server = Server::builder()
        .durable()
        .setting("shared_buffers", "1GB")
        .setting("max_wal_size", "4GB")
        .setting("max_prepared_transactions", 0)
        .start()?;
    let bench = Bench { scale: if quick { QUICK } else { FULL }, only, server };
    let rows = bench.run()?;
    println!("{}", if json { rows.to_json() } else { rows.to_table() });
    Ok(())
}

impl Bench {
    fn run(&self) -> Result<Rows> {
        let mut rows = Rows::default();
        let mut taken_over = [Distribution::default(), Distribution::default()];
        let mut lost = [Distribution::default(), Distribution::default()];
        let log = self.server.create_database()?;
        if self.wants("drain") {
            eprintln!("filling a log with {} events", self.scale.events);
            self.measure("fill", log.url(), self.scale.events)?;
        }
        for round in 1..=self.scale.rounds {
            eprintln!("round {round} of {}", self.scale.rounds);
            if self.wants("drain") {
                self.drain(log.url(), &mut rows)?;
            }
            if self.wants("slow") {
                self.slow(&mut rows)?;
            }
            if self.wants("latency") {
                self.latency(&mut rows)?;
            }
            if self.wants("start") {
                self.start(&mut rows)?;
            }
            if self.wants("idle") {
                self.idle(&mut rows)?;
            }
            if self.wants("takeover") {
                self.takeover(&mut taken_over)?;
            }
            if self.wants("cuts") {
                self.cuts(&mut lost)?;
            }
        }
        self.publish(&mut rows)?;
        if self.wants("drain") {
            self.drain_holed(&mut rows)?;
        }
        if self.wants("takeover") {
            report_takeover(&taken_over, &mut rows);
        }
        if self.wants("cuts") {
            report_cuts(&lost, &mut rows);
        }
        Ok(rows)
    }

    /// Whether this was asked for, or something that it is a part of.
    fn wants(&self, name: &str) -> bool {
        let is_part = |only: &str| name.strip_prefix(only).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
        self.only.as_deref().is_none_or(is_part)
    }

    fn measure(&self, name: &str, url: &str, count: usize) -> Result<process::Figures> {
        measure(name, Path::new(url), count)
    }

    fn drain(&self, log: &str, rows: &mut Rows) -> Result<()> {
        let events = self.scale.events;
        let bare = self.measure("scan", log, events)?;
        let ours = self.measure("drain", log, events)?;
        let mut add = |name, unit, goal, value, bare| rows.add(Row { name, unit, goal }, value, bare);
        add("drain", "events/s", Goal::RatioAtLeast(0.7), ours["rate"], Some(bare["rate"]));
        add("drain, WAL", "B/event", Goal::Below(5.0), ours["wal"], None);
        add("drain, peak memory", "MiB", Goal::Below(100.0), ours["peak_mib"], Some(bare["peak_mib"]));
        add("log, dead rows", "rows", Goal::Below(0.5), ours["dead_rows"], None);
        add("cursor, updates not HOT", "% of all", Goal::Below(5.0), ours["not_hot_percent"], None);
        Ok(())
    }

    /// After all others: while a transaction is open anywhere in a cluster, PostgreSQL clears away less everywhere.
    fn drain_holed(&self, rows: &mut Rows) -> Result<()> {
        let (events, log) = (self.scale.events, self.server.create_database()?);
        // Before the events, and until the end.
        let _hole = Hole::open(log.url())?;
        eprintln!("filling another log, above an open hole");
        self.measure("fill", log.url(), events)?;
        for round in 1..=self.scale.rounds {
            eprintln!("round {round} of {}", self.scale.rounds);
            let bare = self.measure("scan", log.url(), events)?;
            let ours = self.measure("drain_ten", log.url(), events)?;
            let row = Row { name: "drain, 10 subs, open hole", unit: "events/s", goal: Goal::RatioAtLeast(0.5) };
            rows.add(row, ours["rate"], Some(bare["rate"]));
        }
        Ok(())
    }

    /// Each comparison has its rounds within one measurement: a backlog is made once for all of them.
    fn publish(&self, rows: &mut Rows) -> Result<()> {
        for comparison in Comparison::all().filter(|comparison| self.wants(&comparison.name())) {
            let database = self.server.create_database()?;
            let found = self.measure(&comparison.name(), database.url(), self.scale.rounds)?;
            comparison.report(&found, self.scale.rounds, rows);
        }
        Ok(())
    }

    /// A receiver that is slower than reading, with a backlog.
    fn slow(&self, rows: &mut Rows) -> Result<()> {
        const EVENTS: usize = 20_000;
        let database = self.server.create_database()?;
        self.measure("fill", database.url(), EVENTS)?;
        let slow = self.measure("slow", database.url(), EVENTS)?;
        rows.add(Row { name: "slow sink, WAL", unit: "B/event", goal: Goal::Below(50.0) }, slow["wal"], None);
        Ok(())
    }

    fn latency(&self, rows: &mut Rows) -> Result<()> {
        let (theirs, ours) = (self.server.create_database()?, self.server.create_database()?);
        let bare = self.measure("listener", theirs.url(), self.scale.samples)?;
        let ours = self.measure("latency", ours.url(), self.scale.samples)?;
        let mut add = |name, goal, at| rows.add(Row { name, unit: "µs", goal }, ours[at], Some(bare[at]));
        add("500 events/s, p50", Goal::RatioAtMost(1.5), "p50");
        add("500 events/s, p99", Goal::RatioAtMost(2.0), "p99");
        Ok(())
    }

    fn idle(&self, rows: &mut Rows) -> Result<()> {
        let database = self.server.create_database()?;
        let idle = self.measure("idle", database.url(), self.scale.idle_seconds)?;
        let mut add = |name, at| rows.add(Row { name, unit: "% of a core", goal: Goal::Below(1.0) }, idle[at], None);
        add("idle relay", "percent");
        add("idle server", "server_percent");
        Ok(())
    }

    fn start(&self, rows: &mut Rows) -> Result<()> {
        for (name, count, first, again, stop) in [
            ("start_many", 1_000, "start, 1,000 subs", "start again, 1,000 subs", "stop, 1,000 subs"),
            ("start_lanes", 20, "start, 20 x 256 lanes", "start again, 20 x 256 lanes", "stop, 20 x 256 lanes"),
        ] {
            let database = self.server.create_database()?;
            let found = self.measure(name, database.url(), count)?;
            let mut add = |name, at| rows.add(Row { name, unit: "ms", goal: Goal::Below(3_000.0) }, found[at], None);
            add(first, "first");
            add(again, "again");
            add(stop, "stop");
        }
        Ok(())
    }

    fn takeover(&self, taken_over: &mut [Distribution; 2]) -> Result<()> {
        for (name, taken_over) in ["takeover", "takeover_busy"].into_iter().zip(taken_over) {
            let database = self.server.create_database()?;
            taken_over.extend(&self.measure(name, database.url(), self.scale.kills)?, self.scale.kills);
        }
        Ok(())
    }

    fn cuts(&self, lost: &mut [Distribution; 2]) -> Result<()> {
        let each = self.scale.cuts / lost.len();
        for (name, lost) in ["cuts", "freezes"].into_iter().zip(lost) {
            let database = self.server.create_database()?;
            lost.extend(&self.measure(name, database.url(), each)?, each);
        }
        Ok(())
    }
}

/// The cuts of all rounds together. What is promised is the lease and a second.
fn report_cuts([cut_off, frozen]: &[Distribution; 2], rows: &mut Rows) {
    let lease = cuts::LEASE_TTL.as_secs_f64() * 1e3;
    eprintln!("cuts: {} by a proxy, {} by SIGSTOP, lease_ttl = {lease} ms", cut_off.len(), frozen.len());
    let goal = || Goal::Below(lease + 1e3);
    let mut add = |name, found: &Distribution, share| {
        rows.add(Row { name, unit: "ms", goal: goal() }, found.quantile(share), None);
    };
    add("take-over of one cut off, p50", cut_off, 0.5);
    add("take-over of one cut off, max", cut_off, 1.0);
    add("take-over of a frozen one, p50", frozen, 0.5);
    add("take-over of a frozen one, max", frozen, 1.0);
}

/// The kills of all rounds together.
fn report_takeover([calm, busy]: &[Distribution; 2], rows: &mut Rows) {
    eprintln!("take-over: {} kills in all, {} beside a flood", calm.len(), busy.len());
    rows.add(
        Row { name: "take-over beside a flood, p50", unit: "ms", goal: Goal::Below(100.0) },
        busy.quantile(0.5),
        None,
    );
    rows.add(
        Row { name: "take-over beside a flood, max", unit: "ms", goal: Goal::Below(1000.0) },
        busy.quantile(1.0),
        None,
    );
    let mut add = |name, goal, share| rows.add(Row { name, unit: "ms", goal }, calm.quantile(share), None);
    add("take-over after SIGKILL, p50", Goal::Below(100.0), 0.5);
    add("take-over after SIGKILL, p99", Goal::Below(1000.0), 0.99);
    add("take-over after SIGKILL, max", Goal::Below(1000.0), 1.0);
}
