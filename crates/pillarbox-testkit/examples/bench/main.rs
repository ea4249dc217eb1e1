//! Pillarbox against raw SQLite on the same rows, columns and indexes: `cargo xtask bench [--quick] [--json]`.
//!
//! Every measurement runs in a process of its own, so that its peak memory is its own. Rounds are interleaved, a
//! baseline beside each measurement, and ratios are taken within a round: the machine's mood cancels out.
mod database;
mod drain;
mod idle;
mod latency;
mod process;
mod publish;
mod summary;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::latency::Commit;
use crate::summary::{Goal, Row, Rows};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How much is measured.
struct Scale {
    rounds: usize,
    events: usize,
    transactions: usize,
    batches: usize,
    samples: usize,
    idle_seconds: u64,
}

const FULL: Scale =
    Scale { rounds: 5, events: 1_000_000, transactions: 2_000, batches: 500, samples: 2_000, idle_seconds: 10 };
const QUICK: Scale =
    Scale { rounds: 2, events: 100_000, transactions: 500, batches: 200, samples: 500, idle_seconds: 5 };

/// The folder's tables are removed at the end; `--keep` is not offered because a drain leaves nothing to look at.
struct Bench<'a> {
    scale: Scale,
    only: Option<String>,
    folder: &'a Path,
}

fn main() -> ExitCode {
    process::run(child, parent)
}

/// One measurement, in a process of its own.
fn child(arguments: &[String]) -> Result<()> {
    let [name, path, count] = arguments else { return Err("a measurement takes NAME PATH COUNT".into()) };
    let (path, count) = (Path::new(path), count.parse()?);
    let figures = match name.as_str() {
        "fill" => database::fill(path, count)?,
        "drain" => drain::pillarbox(path, count)?,
        "scan" => drain::bare(path, count)?,
        "publish_one" => publish::one_by_one(path, count)?,
        "publish_batch" => publish::in_batches(path, count)?,
        "latency" => latency::pillarbox(path, count, Commit::Ringing)?,
        "latency_plain" => latency::pillarbox(path, count, Commit::Plain)?,
        "hand_over" => latency::bare(path, count)?,
        "idle" => idle::pillarbox(path, count as u64)?,
        other => return Err(format!("there is no measurement '{other}'").into()),
    };
    println!("{figures}");
    Ok(())
}

fn parent(arguments: &[String]) -> Result<()> {
    let (mut quick, mut json, mut only, mut folder) = (false, false, None, None::<PathBuf>);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            "--json" => json = true,
            "--only" => only = arguments.next().cloned(),
            "--folder" => folder = arguments.next().map(PathBuf::from),
            other => {
                return Err(format!("'{other}' is not one of --quick, --json, --only NAME, --folder PATH").into());
            }
        }
    }
    // Beside the program and not in /tmp, which is memory on many machines and knows no fsync.
    let beside = std::env::current_exe()?.parent().map(Path::to_owned).ok_or("the program has no folder")?;
    let folder = tempfile::tempdir_in(folder.unwrap_or(beside))?;
    let scale = if quick { QUICK } else { FULL };
    let bench = Bench { scale, only, folder: folder.path() };
    let rows = bench.run()?;
    if json {
        println!("{}", rows.to_json());
    } else {
        println!("{}", rows.to_table());
    }
    Ok(())
}

impl Bench<'_> {
    fn run(&self) -> Result<Rows> {
        let mut rows = Rows::default();
        let log = self.folder.join("log.db");
        if self.wants("drain") {
            eprintln!("filling a log with {} events", self.scale.events);
            process::measure("fill", &log, self.scale.events)?;
        }
        for round in 1..=self.scale.rounds {
            eprintln!("round {round} of {}", self.scale.rounds);
            if self.wants("drain") {
                self.drain(&log, &mut rows)?;
            }
            if self.wants("publish") {
                self.publish(round, &mut rows)?;
            }
            if self.wants("latency") {
                self.latency(round, &mut rows)?;
            }
            if self.wants("idle") {
                self.idle(round, &mut rows)?;
            }
        }
        Ok(rows)
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == name)
    }

    fn drain(&self, log: &Path, rows: &mut Rows) -> Result<()> {
        let bare = process::measure("scan", log, self.scale.events)?;
        let ours = process::measure("drain", log, self.scale.events)?;
        let goal = Goal::RatioAtLeast(0.5);
        rows.add(Row { name: "drain", unit: "events/s", goal }, ours["rate"], Some(bare["rate"]));
        let goal = Goal::Below(100.0);
        rows.add(Row { name: "drain, peak memory", unit: "MiB", goal }, ours["peak_mib"], Some(bare["peak_mib"]));
        Ok(())
    }

    fn publish(&self, round: usize, rows: &mut Rows) -> Result<()> {
        let goal = Goal::RatioAtLeast(0.85);
        let folder = self.folder.join(format!("publish_one_{round}"));
        let one = process::measure("publish_one", &folder, self.scale.transactions)?;
        rows.add(Row { name: "publish, one a transaction", unit: "events/s", goal }, one["rate"], Some(one["bare"]));
        let folder = self.folder.join(format!("publish_batch_{round}"));
        let batch = process::measure("publish_batch", &folder, self.scale.batches)?;
        let row = Row { name: "publish, 100 a transaction", unit: "events/s", goal };
        rows.add(row, batch["rate"], Some(batch["bare"]));
        Ok(())
    }

    fn latency(&self, round: usize, rows: &mut Rows) -> Result<()> {
        let bare = process::measure("hand_over", &self.folder.join(format!("bare_{round}.db")), self.scale.samples)?;
        let ours = process::measure("latency", &self.folder.join(format!("latency_{round}.db")), self.scale.samples)?;
        let plain = self.folder.join(format!("latency_plain_{round}.db"));
        let plain = process::measure("latency_plain", &plain, self.scale.samples)?;
        let (p50, p99) = (Goal::RatioAtMost(1.5), Goal::RatioAtMost(2.0));
        let found = [
            ("commit to handler, p50", p50, ours["p50"], bare["p50"]),
            ("commit to handler, p99", p99, ours["p99"], bare["p99"]),
            ("plain commit, p50", p50, plain["p50"], bare["p50"]),
            ("plain commit, p99", p99, plain["p99"], bare["p99"]),
        ];
        for (name, goal, ours, bare) in found {
            rows.add(Row { name, unit: "µs", goal }, ours, Some(bare));
        }
        Ok(())
    }

    fn idle(&self, round: usize, rows: &mut Rows) -> Result<()> {
        let path = self.folder.join(format!("idle_{round}.db"));
        let idle = process::measure("idle", &path, self.scale.idle_seconds as usize)?;
        rows.add(Row { name: "idle relay", unit: "% of a core", goal: Goal::Below(1.0) }, idle["percent"], None);
        Ok(())
    }
}
