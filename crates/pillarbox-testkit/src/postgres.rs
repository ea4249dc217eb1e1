//! Real PostgreSQL servers, private to a test process.
//!
//! A server lies in a temporary folder and listens on a free port of the loopback interface and on a unix socket. It ends,
//! and its folder goes, when the [`Server`] is dropped or when the test process ends, however that ends.
mod backup;
mod binaries;
mod bouncer;
mod client;
mod database;
mod dump;
mod folder;
mod process;

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::certificate::{self, AUTHORITY, CERTIFICATE, KEY};
use crate::loopback::{PORTS_TRIED_MAX, free_port};
use binaries::Binaries;
use folder::Folder;

pub use backup::Backup;
pub use binaries::BINARIES_VARIABLE;
pub use bouncer::Bouncer;
pub use client::connect;
pub use database::Database;
pub use dump::Dump;

/// The role that owns every cluster made here.
pub const SUPERUSER: &str = "postgres";

/// How many connections a server takes: a whole test binary's tests may share one.
const CONNECTIONS_MAX: u32 = 200;

/// How many prepared transactions the shared server takes.
const SHARED_PREPARED_TRANSACTIONS_MAX: u32 = 100;

/// How long a server may take to end before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// A PostgreSQL server of this process's own.
#[derive(Debug)]
pub struct Server {
    // Before the folder: the process must have ended when the folder goes.
    process: Mutex<Option<Child>>,
    binaries: Binaries,
    port: u16,
    tls: bool,
    folder: Folder,
}

/// How a server is told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Transactions are rolled back and everything is written out.
    Fast,
    /// As in a crash: what was not flushed is lost, and the next start recovers.
    Immediate,
}

/// What a new [`Server`] should be like.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    version: Option<u32>,
    settings: Vec<(String, String)>,
    durable: bool,
    dump: bool,
    tls: bool,
}

impl Builder {
    /// Wants this major version; without it, see [`BINARIES_VARIABLE`].
    pub fn version(mut self, major: u32) -> Builder {
        self.version = Some(major);
        self
    }

    /// A line of `postgresql.conf`; the last one for a name holds.
    pub fn setting(mut self, name: &str, value: impl ToString) -> Builder {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Really writes to disk. Without this `fsync` is off, which a stop by [`Mode::Immediate`] survives all the same: only
    /// a crash of the machine would not.
    pub fn durable(mut self) -> Builder {
        self.durable = true;
        self
    }

    /// Takes another version if there is no `pg_dump` for the one that is asked for by [`BINARIES_VARIABLE`].
    pub fn with_dump(mut self) -> Builder {
        self.dump = true;
        self
    }

    /// Offers TLS with a certificate for the name `localhost` (and not for `127.0.0.1`) of a private authority.
    pub fn tls(mut self) -> Builder {
        self.tls = true;
        self
    }

    /// Makes the cluster, which has a system identifier of its own, and starts it.
    pub fn start(self) -> Result<Server> {
        let mut binaries = Binaries::find(self.version)?;
        if self.dump {
            binaries = binaries.or_with_dump()?;
        }
        let folder = Folder::new()?;
        process::make_cluster(&binaries, &folder)?;
        if self.tls {
            certificate::make(&folder.data(), || folder.command(Path::new("openssl")))?;
        }
        folder.configure(&self.lines())?;
        Server::start_in(folder, binaries, self.tls)
    }

    fn lines(&self) -> Vec<(String, String)> {
        let mut lines: Vec<(String, String)> = vec![
            ("listen_addresses".into(), "127.0.0.1".into()),
            ("max_connections".into(), CONNECTIONS_MAX.to_string()),
            ("shared_buffers".into(), "32MB".into()),
            ("wal_keep_size".into(), backup::WAL_KEPT.into()),
            ("log_line_prefix".into(), "%m [%p] %d ".into()),
        ];
        if !self.durable {
            lines.extend(["fsync", "full_page_writes"].map(|name| (name.to_owned(), "off".to_owned())));
        }
        if self.tls {
            let tls = [("ssl", "on"), ("ssl_cert_file", CERTIFICATE), ("ssl_key_file", KEY)];
            lines.extend(tls.map(|(name, value)| (name.into(), value.into())));
        }
        lines.extend(self.settings.iter().cloned());
        lines
    }
}

impl Server {
    /// A server to be made.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The server that all tests of this process share; each takes a database of its own by
    /// [`create_database`](Server::create_database). Transactions and prepared transactions of one test are in the
    /// snapshots of all others; a test about what holds the horizon of a whole cluster needs a server of its own.
    pub fn shared() -> &'static Server {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| {
            let builder = Server::builder().setting("max_prepared_transactions", SHARED_PREPARED_TRANSACTIONS_MAX);
            builder.start().expect("the tests need a PostgreSQL server")
        })
    }

    /// Starts what lies in the folder, on a free port.
    fn start_in(folder: Folder, binaries: Binaries, tls: bool) -> Result<Server> {
        let mut server = Server { process: Mutex::new(None), binaries, port: 0, tls, folder };
        for _ in 0..PORTS_TRIED_MAX {
            server.port = free_port()?;
            match server.start() {
                Err(_) if server.log().contains("could not bind") => {}
                started => return started.map(|()| server),
            }
        }
        bail!("found no free port for PostgreSQL in {PORTS_TRIED_MAX} tries\n{}", server.log());
    }

    /// A fresh, empty database. It is dropped with the value that stands for it.
    pub fn create_database(&self) -> Result<Database> {
        Database::create(self)
    }

    /// Where a client reaches a database of this server, as the superuser and without TLS.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{SUPERUSER}@127.0.0.1:{}/{database}", self.port)
    }

    /// Like [`url`](Server::url), as another role. No role needs a password.
    pub fn url_as(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}", self.port)
    }

    /// Like [`url`](Server::url), with TLS and every check of it.
    pub fn tls_url(&self, database: &str) -> String {
        let authority = self.authority();
        let query = format!("sslmode=verify-full&sslrootcert={}", authority.display());
        format!("postgres://{SUPERUSER}@localhost:{}/{database}?{query}", self.port)
    }

    /// The certificate of the authority, for `sslrootcert`.
    pub fn authority(&self) -> PathBuf {
        assert!(self.tls, "the server was made without Builder::tls");
        self.folder.data().join(AUTHORITY)
    }

    /// The port on `127.0.0.1`; the same for as long as the server lives, restarts included.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of the unix socket.
    pub fn socket_dir(&self) -> &Path {
        self.folder.path()
    }

    /// The cluster's folder.
    pub fn data_dir(&self) -> PathBuf {
        self.folder.data()
    }

    /// The major version.
    pub fn version(&self) -> u32 {
        self.binaries.version()
    }

    /// Runs statements and returns the rows, one a line, columns parted by `|`.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String> {
        client::run(&self.url(database), sql)
    }

    /// What the server has written to its log.
    pub fn log(&self) -> String {
        // A log that is not there yet is an empty one.
        std::fs::read(self.folder.log()).map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default()
    }

    /// Starts a stopped server again: same folder, same port. Returns when it takes connections.
    pub fn start(&self) -> Result<()> {
        let mut process = self.process();
        anyhow::ensure!(process.is_none(), "the server runs already");
        let mut child = process::spawn(&self.binaries, &self.folder, self.port)?;
        if let Err(error) = process::wait_until_ready(&mut child, &self.folder) {
            process::end(&mut child);
            return Err(error.context(format!("PostgreSQL did not start; its log:\n{}", self.log())));
        }
        *process = Some(child);
        Ok(())
    }

    /// Stops the server and returns when it has ended.
    pub fn stop(&self, mode: Mode) -> Result<()> {
        let Some(mut child) = self.process().take() else {
            return Ok(());
        };
        process::signal(&child, mode)?;
        if process::wait_until_ended(&mut child, STOP_TIMEOUT) {
            return Ok(());
        }
        process::end(&mut child);
        bail!("PostgreSQL did not stop in {STOP_TIMEOUT:?} and was killed; its log:\n{}", self.log());
    }

    /// Stops and starts again.
    pub fn restart(&self, mode: Mode) -> Result<()> {
        self.stop(mode)?;
        self.start().context("the server could not be started again")
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A failure has been dealt with by killing; there is nobody to tell.
        let _ = self.stop(Mode::Immediate);
    }
}
