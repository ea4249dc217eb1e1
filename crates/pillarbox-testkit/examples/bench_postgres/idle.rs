use std::path::Path;
use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;

use crate::Result;
use crate::database::migrated;
use crate::process::{Figures, cpu_seconds};

/// The processor time of a relay that has nothing to do.
pub(crate) fn pillarbox(runtime: &tokio::runtime::Runtime, url: &str, seconds: u64) -> Result<Figures> {
    runtime.block_on(migrated(url))?;
    let handler = |_event| std::future::ready(Ok(()));
    let store = runtime.block_on(PostgresStore::open(url))?;
    let relay = runtime.block_on(Relay::builder(store).handle(Subscription::new("idle"), handler).start())?;
    runtime.block_on(relay.until_idle())?;
    let (before, started) = (cpu_seconds()?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let elapsed = started.elapsed().as_secs_f64();
    let percent = (cpu_seconds()? - before) / elapsed * 100.0;
    runtime.block_on(relay.drain())?;
    Ok(Figures::default().with("percent", percent).with("elapsed", elapsed))
}

/// The processes of a server.
pub(crate) struct Processes {
    postmaster: u32,
}

impl Processes {
    pub(crate) fn of(data: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(data.join("postmaster.pid"))?;
        let postmaster = text.lines().next().ok_or("postmaster.pid is empty")?.trim().parse()?;
        Ok(Processes { postmaster })
    }

    /// The processor time of all of them so far, those that have ended included.
    pub(crate) fn seconds(&self) -> Result<f64> {
        const TICKS_PER_SECOND: f64 = 100.0;
        let mut ticks = 0.0;
        for entry in std::fs::read_dir("/proc")? {
            let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
            // A process may end while it is looked at.
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let Some((_, rest)) = stat.rsplit_once(')') else { continue };
            let fields: Vec<&str> = rest.split_whitespace().collect();
            let number = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
            if pid == self.postmaster {
                // With the children that were waited for.
                ticks += (11..15).map(number).sum::<f64>();
            } else if number(1) as u32 == self.postmaster {
                ticks += number(11) + number(12);
            }
        }
        Ok(ticks / TICKS_PER_SECOND)
    }
}
