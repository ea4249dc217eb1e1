//! Each sink beside a bare client of the same library on the same server: `cargo xtask bench --sinks [--quick] [--json] [--only NAME]`.
//!
//! Throughput: the sink as a relay calls it, and a whole relay that drains a log of SQLite through it, beside a client that sends the
//! same messages, made before, with as many batches under way. Latency: from the return of the commit until a consumer has the event, beside the same client sending directly.
//! Rounds are interleaved and ratios are taken within a round. `--only NAME` measures one of: `http`, `redis_stream`, `redis_pubsub`,
//! `kafka`, `postgres`.
#[path = "../../../pillarbox-testkit/examples/bench/database.rs"]
#[allow(dead_code, reason = "shared with another benchmark, which uses all of it")]
mod database;
mod http;
mod kafka;
mod latency;
mod postgres;
#[path = "../../../pillarbox-testkit/examples/bench/process.rs"]
#[allow(dead_code, reason = "shared with other benchmarks, which use all of it")]
mod process;
mod redis;
#[path = "../../../pillarbox-testkit/examples/bench_queue/report.rs"]
#[allow(dead_code, reason = "shared with another benchmark, which uses all of it")]
mod report;
#[path = "../../../pillarbox-testkit/examples/bench/summary.rs"]
#[allow(dead_code, reason = "shared with other benchmarks, which use all of it")]
mod summary;
mod throughput;

use std::path::Path;
use std::process::ExitCode;

use pillarbox_testkit::postgres::{Database, Server};
use pillarbox_testkit::redis::Server as RedisServer;

use crate::process::{Figures, measure};
use crate::report::Report;
use crate::summary::{Goal, Row};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a sink's throughput should be of a bare client's, at least.
const RATIO_MIN: f64 = 0.7;

/// One sink, and what its rows are called.
struct Subject {
    name: &'static str,
    relay: &'static str,
    /// p50 and p99; None where a consumer would have to poll.
    latency: Option<(&'static str, &'static str)>,
    events: usize,
}

const SUBJECTS: [Subject; 5] = [
    Subject { name: "http", relay: "http, whole relay", latency: Some(("http, p50", "http, p99")), events: 20_000 },
    Subject {
        name: "redis_stream",
        relay: "redis_stream, whole relay",
        latency: Some(("redis_stream, p50", "redis_stream, p99")),
        events: 200_000,
    },
    Subject {
        name: "redis_pubsub",
        relay: "redis_pubsub, whole relay",
        latency: Some(("redis_pubsub, p50", "redis_pubsub, p99")),
        events: 500_000,
    },
    Subject {
        name: "kafka",
        relay: "kafka, whole relay",
        latency: Some(("kafka, p50", "kafka, p99")),
        // Enough that the half second in which a producer gets its number hardly counts.
        events: 400_000,
    },
    Subject { name: "postgres", relay: "postgres, whole relay", latency: None, events: 100_000 },
];

/// Samples of latency a round.
const SAMPLES: usize = 300;

fn main() -> ExitCode {
    process::run(child, parent)
}

/// One measurement, in a process of its own.
fn child(arguments: &[String]) -> Result<()> {
    let [name, place, count] = arguments else { return Err("a measurement takes NAME PLACE COUNT".into()) };
    let (subject, what) = name.split_once('/').ok_or("a measurement is called SINK/WHAT")?;
    let runtime = tokio::runtime::Runtime::new()?;
    let figures = runtime.block_on(figures(subject, what, place, count.parse()?))?;
    println!("{figures}");
    Ok(())
}

async fn figures(subject: &str, what: &str, place: &str, count: usize) -> Result<Figures> {
    if subject.starts_with("redis") {
        redis::clear(place).await?;
    }
    let sink = || match subject {
        "http" => http::sink(place),
        "redis_stream" => redis::stream(place),
        "redis_pubsub" => redis::pubsub(place),
        "kafka" => kafka::sink(place),
        "postgres" => postgres::sink(place),
        _ => Err(format!("there is no sink '{subject}'").into()),
    };
    let redis = if subject == "redis_stream" { redis::Kind::Stream } else { redis::Kind::PubSub };
    match (what, subject) {
        ("relay", _) => throughput::relay(sink()?, count).await,
        ("sink", _) => throughput::sink(sink()?, count).await,
        ("bare", "http") => http::bare(place, count).await,
        ("bare", "kafka") => kafka::bare(place, count).await,
        ("bare", "postgres") => postgres::bare(place, count).await,
        ("bare", _) => redis::bare(place, count, redis).await,
        ("latency", "http") => http::latency(count).await,
        ("latency", "kafka") => kafka::latency(place, count).await,
        ("latency", _) => redis::latency(place, count, redis).await,
        ("latency_bare", "http") => http::latency_bare(count).await,
        ("latency_bare", "kafka") => kafka::latency_bare(place, count).await,
        ("latency_bare", _) => redis::latency_bare(place, count, redis).await,
        _ => Err(format!("there is no measurement '{subject}/{what}'").into()),
    }
}

fn parent(arguments: &[String]) -> Result<()> {
    let (mut rounds, mut json, mut only) = (5, false, None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => rounds = 2,
            "--json" => json = true,
            "--only" => only = arguments.next().cloned(),
            other => return Err(format!("'{other}' is not one of --quick, --json, --only NAME").into()),
        }
    }
    let servers = Servers::start()?;
    let mut report = Report::default();
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for subject in SUBJECTS.iter().filter(|subject| only.as_deref().is_none_or(|only| only == subject.name)) {
            servers.round(subject, &mut report)?;
        }
    }
    println!("{}", if json { report.to_json()? } else { report.to_table() });
    Ok(())
}

/// The receivers, which both sides use.
struct Servers {
    postgres: Server,
    redis: RedisServer,
    kafka: kafka::Cluster,
    http: http::Receiver,
}

impl Servers {
    fn start() -> Result<Servers> {
        let postgres =
            Server::builder().durable().setting("shared_buffers", "1GB").setting("max_wal_size", "4GB").start()?;
        Ok(Servers {
            postgres,
            redis: RedisServer::builder().start()?,
            kafka: kafka::Cluster::start()?,
            http: http::Receiver::start()?,
        })
    }

    fn round(&self, subject: &Subject, report: &mut Report) -> Result<()> {
        let on = |what: &str, count| {
            let (place, _database) = self.place(subject.name)?;
            measure(&format!("{}/{what}", subject.name), Path::new(&place), count)
        };
        let (bare, ours) = (on("bare", subject.events)?, on("sink", subject.events)?);
        let row = Row { name: subject.name, unit: "events/s", goal: Goal::RatioAtLeast(RATIO_MIN) };
        report.add(row, ours["rate"], Some(bare["rate"]));
        let relay = on("relay", subject.events)?;
        report.tell(subject.relay, "events/s", relay["rate"], Some(bare["rate"]));
        if let Some((p50, p99)) = subject.latency {
            let (bare, ours) = (on("latency_bare", SAMPLES)?, on("latency", SAMPLES)?);
            report.tell(p50, "µs", ours["p50"], Some(bare["p50"]));
            report.tell(p99, "µs", ours["p99"], Some(bare["p99"]));
        }
        Ok(())
    }

    /// A place of its own for each measurement, on the same server.
    fn place(&self, name: &str) -> Result<(String, Option<Database>)> {
        let database = if name == "postgres" { Some(self.postgres.create_database()?) } else { None };
        let place = match name {
            "http" => self.http.url().to_owned(),
            "kafka" => self.kafka.place()?,
            "postgres" => database.as_ref().map(|database| database.url().to_owned()).unwrap_or_default(),
            _ => self.redis.url(),
        };
        Ok((place, database))
    }
}
