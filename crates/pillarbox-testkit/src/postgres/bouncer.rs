use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::folder::Folder;
use super::process::{LOOK_INTERVAL, end};
use super::{SUPERUSER, Server};
use crate::loopback::{PORTS_TRIED_MAX, free_port};

/// Where Debian's package puts it, which is not on everybody's `PATH`.
const OF_DEBIAN: &str = "/usr/sbin/pgbouncer";

/// How long PgBouncer may take until it accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

const TO_DO: &str = "is it there? (`apt-get install -y pgbouncer`)";

/// A PgBouncer of this process's own in front of a server. Whoever connects is the superuser there.
#[derive(Debug)]
pub struct Bouncer {
    process: Child,
    port: u16,
    folder: Folder,
}

impl Bouncer {
    /// Where a client reaches a database by way of this PgBouncer.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{SUPERUSER}@127.0.0.1:{}/{database}", self.port)
    }

    /// The port on `127.0.0.1`.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What PgBouncer has written to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.log()).unwrap_or_default()
    }

    fn start(server: &Server, settings: &[(&str, &str)], port: u16) -> Result<Bouncer> {
        let folder = Folder::new()?;
        std::fs::create_dir(folder.data()).context("cannot make a folder for PgBouncer")?;
        folder.give(&folder.data())?;
        // The guard of the folder looks for files with this ending.
        let own = format!(
            "[databases]\n* = host=127.0.0.1 port={} user={SUPERUSER}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npidfile = {}\n",
            server.port,
            folder.data().join("pgbouncer.pid").display(),
        );
        let settings: String = settings.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
        folder.add_to("pgbouncer.ini", &(own + &settings))?;
        let log = std::fs::File::create(folder.log()).context("cannot write PgBouncer's log")?;
        let program = if Path::new(OF_DEBIAN).exists() { OF_DEBIAN } else { "pgbouncer" };
        let mut command = folder.command(Path::new(program));
        command.arg("pgbouncer.ini").current_dir(folder.data()).stdout(Stdio::null()).stderr(log);
        let process = command.spawn().with_context(|| format!("PgBouncer cannot be started; {TO_DO}"))?;
        Ok(Bouncer { process, port, folder })
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let given_up = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if let Some(status) = self.process.try_wait().context("cannot look after PgBouncer")? {
                bail!("PgBouncer ended at once: {status}; its log:\n{}", self.log());
            }
            if Instant::now() > given_up {
                bail!("PgBouncer did not accept connections in {START_TIMEOUT:?}; its log:\n{}", self.log());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

impl Server {
    /// Starts a PgBouncer in front of this server, with lines of its section `[pgbouncer]` such as `pool_mode`.
    pub fn bouncer(&self, settings: &[(&str, &str)]) -> Result<Bouncer> {
        for _ in 0..PORTS_TRIED_MAX {
            let mut bouncer = Bouncer::start(self, settings, free_port()?)?;
            match bouncer.wait_until_ready() {
                Err(_) if bouncer.log().contains("Address already in use") => {}
                ready => return ready.map(|()| bouncer),
            }
        }
        bail!("found no free port for PgBouncer in {PORTS_TRIED_MAX} tries");
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        end(&mut self.process);
    }
}
