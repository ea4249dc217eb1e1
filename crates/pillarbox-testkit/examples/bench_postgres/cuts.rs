use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use pillarbox::RelayConfig;
use pillarbox::engine::EngineConfig;
use pillarbox_testkit::proxy::Proxy;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::Result;
use crate::database::migrated;
use crate::distribution::kill_name;
use crate::process::Figures;
use crate::takeover::{Arrival, both_deliver, deliver, first_of_others, publish, spawn};

/// The process that is frozen or cut off.
pub(crate) const RELAY: &str = "cut_relay";

/// How long an owner may be silent.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(2);

/// The moment of a cut is a random one of so long.
const MOMENTS: Duration = Duration::from_millis(1_500);

/// As long as that no lane has moved.
const QUIET: Duration = Duration::from_secs(1);

/// How a relay ceases to be heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// A proxy in front of the server stops forwarding, both ways, and closes nothing.
    CutOff,
    /// SIGSTOP.
    Frozen,
}

/// A relay that prints the key of each event.
pub(crate) async fn relay(url: &str) -> Result<()> {
    let engine = EngineConfig { lease_ttl: LEASE_TTL, ..EngineConfig::default() };
    deliver(url, RelayConfig { engine, ..RelayConfig::default() }).await
}

/// A relay with its own way to the server.
struct Victim {
    number: usize,
    child: Child,
    proxy: Proxy,
}

/// Freezes or cuts off one of two relays again and again, at random moments; from then until the other has delivered an event of a key
/// that was the lost one's.
pub(crate) async fn cuts(url: &str, count: usize, way: Way) -> Result<Figures> {
    let port = url::port(url)?;
    drop(migrated(url).await?);
    let (sender, mut arrivals) = mpsc::unbounded_channel();
    let mut relays = vec![start(url, port, 1, &sender)?, start(url, port, 2, &sender)?];
    let publisher = tokio::spawn(publish(url.to_owned()));
    let mut figures = Figures::default();
    for number in 0..count {
        let numbers: Vec<usize> = relays.iter().map(|relay| relay.number).collect();
        let owners = both_deliver(&mut arrivals, &numbers).await?;
        let owners = settled(&mut arrivals, owners).await;
        let mut victim = relays.remove(0);
        let lost = Instant::now();
        match way {
            Way::CutOff => victim.proxy.stall()?,
            Way::Frozen => stop(&victim.child).await?,
        }
        let taken_over = first_of_others(&mut arrivals, &owners, (victim.number, lost)).await?.duration_since(lost);
        figures = figures.with(&kill_name(number), taken_over.as_secs_f64() * 1e3);
        victim.child.kill().await?;
        relays.push(start(url, port, number + 3, &sender)?);
    }
    publisher.abort();
    Ok(figures)
}

fn start(url: &str, port: u16, number: usize, arrivals: &mpsc::UnboundedSender<Arrival>) -> Result<Victim> {
    let proxy = Proxy::start(port)?;
    let child = spawn(RELAY, &proxy.url(url), number, arrivals.clone())?;
    Ok(Victim { number, child, proxy })
}

async fn stop(child: &Child) -> Result<()> {
    let pid = child.id().ok_or("the relay has ended")?;
    let stopped = Command::new("kill").args(["-STOP", &pid.to_string()]).status().await?;
    if stopped.success() { Ok(()) } else { Err("the relay could not be stopped".into()) }
}

/// Who delivers what at a random moment after no lane has moved for a while.
async fn settled(
    arrivals: &mut mpsc::UnboundedReceiver<Arrival>,
    mut owners: HashMap<String, usize>,
) -> HashMap<String, usize> {
    let mut until = Instant::now() + QUIET + random_moment();
    while let Ok(Some(arrival)) = tokio::time::timeout_at(until.into(), arrivals.recv()).await {
        if owners.get(&arrival.key) != Some(&arrival.relay) {
            owners.insert(arrival.key, arrival.relay);
            until = Instant::now() + QUIET + random_moment();
        }
    }
    owners
}

fn random_moment() -> Duration {
    let random = RandomState::new().hash_one(Instant::now());
    Duration::from_nanos(random % MOMENTS.as_nanos() as u64)
}

mod url {
    use crate::Result;

    /// The port that a URL names.
    pub(super) fn port(url: &str) -> Result<u16> {
        let host = url.split("://").nth(1).unwrap_or(url).split(['/', '?']).next().unwrap_or_default();
        let port = host.rsplit(':').next().and_then(|port| port.parse().ok());
        port.ok_or_else(|| "the server's URL names no port".into())
    }
}
