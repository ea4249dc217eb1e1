use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_postgres::PostgresStore;

use crate::Result;
use crate::database::migrated;
use crate::process::{Figures, cpu_seconds};
use crate::processor_time::Stat;

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
    postmaster: i32,
}

impl Processes {
    /// Those of the server that this backend belongs to.
    fn of(backend: i32) -> Result<Self> {
        Ok(Processes { postmaster: Stat::of(backend)?.parent })
    }

    /// The processor time of all of them so far, those that have ended included.
    fn seconds(&self) -> Result<f64> {
        let mut seconds = 0.0;
        for entry in std::fs::read_dir("/proc")? {
            let Ok(pid) = entry?.file_name().to_string_lossy().parse() else { continue };
            // A process may end while it is looked at.
            let Ok(stat) = Stat::of(pid) else { continue };
            if pid == self.postmaster {
                seconds += stat.seconds + stat.ended_children_seconds;
            } else if stat.parent == self.postmaster {
                seconds += stat.seconds;
            }
        }
        Ok(seconds)
    }
}
