use std::path::Path;
use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_sqlite::SqliteStore;

use crate::Result;
use crate::process::{Figures, cpu_seconds};

/// The processor time of a relay that has nothing to do.
pub(crate) fn pillarbox(path: &Path, seconds: u64) -> Result<Figures> {
    pillarbox_sqlite::migrate(path)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let handler = |_event| std::future::ready(Ok(()));
    let store = SqliteStore::open(path)?;
    let relay = runtime.block_on(Relay::builder(store).handle(Subscription::new("idle"), handler).start())?;
    runtime.block_on(relay.until_idle())?;
    let (before, started) = (cpu_seconds()?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let percent = (cpu_seconds()? - before) / started.elapsed().as_secs_f64() * 100.0;
    runtime.block_on(relay.drain())?;
    Ok(Figures::default().with("percent", percent))
}
