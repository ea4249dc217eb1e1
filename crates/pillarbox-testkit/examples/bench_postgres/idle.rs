use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;

use crate::Result;
use crate::database::migrated;
use crate::process::{Figures, cpu_seconds};

/// The processor time of a relay that has nothing to do.
pub(crate) fn pillarbox(runtime: &tokio::runtime::Runtime, url: &str, seconds: u64) -> Result<Figures> {
    let client = runtime.block_on(migrated(url))?;
    let server = Processes::of(runtime.block_on(client.query_one("select pg_backend_pid()", &[]))?.get(0))?;
    let handler = |_event| std::future::ready(Ok(()));
    let store = runtime.block_on(PostgresStore::open(url))?;
    let relay = runtime.block_on(Relay::builder(store).handle(Subscription::new("idle"), handler).start())?;
    runtime.block_on(relay.until_idle())?;
    let (before, server_before, started) = (cpu_seconds()?, server.seconds()?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let elapsed = started.elapsed().as_secs_f64();
    let percent = (cpu_seconds()? - before) / elapsed * 100.0;
    let server_percent = (server.seconds()? - server_before) / elapsed * 100.0;
    runtime.block_on(relay.drain())?;
    Ok(Figures::default().with("percent", percent).with("server_percent", server_percent))
}

/// The processes of a server.
struct Processes {
    postmaster: u32,
}

impl Processes {
    /// Those of the server that this backend belongs to.
    fn of(backend: i32) -> Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{backend}/stat"))?;
        let (_, rest) = stat.rsplit_once(')').ok_or("the backend's stat has no name")?;
        let postmaster = rest.split_whitespace().nth(1).ok_or("the backend has no parent")?.parse()?;
        Ok(Processes { postmaster })
    }

    /// The processor time of all of them so far, those that have ended included.
    fn seconds(&self) -> Result<f64> {
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
