//! Real Redis servers, private to a test process: alone, as replicas, or as sentinels.
//!
//! A server lies in a temporary folder and listens on a free port of the loopback interface. It ends, and its folder goes, when the
//! [`Server`] is dropped or when the test process ends, however that ends.
mod folder;

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::certificate::{self, AUTHORITY, CERTIFICATE, KEY};
use crate::loopback::{PORTS_TRIED_MAX, free_port};
use folder::Folder;

/// How long a server may take until it answers, or until it has ended.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// How often it is looked whether a process has got somewhere.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

const TO_DO: &str = "install it by `apt-get install -y redis-server`";

/// A Redis server of this process's own.
#[derive(Debug)]
pub struct Server {
    // Before the folder: the process must have ended when the folder goes.
    process: Mutex<Option<Child>>,
    settings: Vec<(String, String)>,
    port: u16,
    tls_port: Option<u16>,
    is_sentinel: bool,
    folder: Folder,
}

/// What a new [`Server`] should be like.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    settings: Vec<(String, String)>,
    tls: bool,
    is_sentinel: bool,
}

impl Builder {
    /// A line of `redis.conf`; the last one for a name holds, if the name can have but one.
    pub fn setting(mut self, name: &str, value: impl ToString) -> Builder {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Writes every command to disk before it is answered, so that a [`kill`](Server::kill) loses nothing that was.
    pub fn durable(self) -> Builder {
        self.setting("appendonly", "yes").setting("appendfsync", "always")
    }

    /// Offers TLS too, with a certificate for the name `localhost` (and not for `127.0.0.1`) of a private authority.
    pub fn tls(mut self) -> Builder {
        self.tls = true;
        self
    }

    /// Copies another server.
    pub fn replica_of(self, master: &Server) -> Builder {
        self.setting("replicaof", format!("127.0.0.1 {}", master.port))
    }

    /// Is a sentinel, alone in its decisions, that calls this server `name` and takes it for down after a silence this long.
    pub fn sentinel_of(mut self, name: &str, master: &Server, silence: Duration) -> Builder {
        self.is_sentinel = true;
        self.setting("sentinel monitor", format!("{name} 127.0.0.1 {} 1", master.port))
            .setting(&format!("sentinel down-after-milliseconds {name}"), silence.as_millis())
            .setting(&format!("sentinel failover-timeout {name}"), 10 * silence.as_millis())
    }

    /// Starts it.
    pub fn start(self) -> Result<Server> {
        let folder = Folder::new()?;
        if self.tls {
            certificate::make(folder.path(), || Command::new("openssl"))?;
        }
        let (settings, is_sentinel) = (self.settings, self.is_sentinel);
        let mut server = Server { process: Mutex::new(None), settings, port: 0, tls_port: None, is_sentinel, folder };
        for _ in 0..PORTS_TRIED_MAX {
            server.port = free_port()?;
            server.tls_port = self.tls.then(free_port).transpose()?;
            server.configure()?;
            match server.start() {
                Err(_) if server.log().contains("Address already in use") => {}
                started => return started.map(|()| server),
            }
        }
        bail!("found no free port for Redis in {PORTS_TRIED_MAX} tries\n{}", server.log());
    }
}

impl Server {
    /// A server to be made.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The server that all tests of this process share; each takes names of its own.
    pub fn shared() -> &'static Server {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| Server::builder().start().expect("the tests need a Redis server"))
    }

    /// Where a client reaches it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Where a client reaches it with these credentials, `user:password`.
    pub fn url_as(&self, credentials: &str) -> String {
        format!("redis://{credentials}@127.0.0.1:{}", self.port)
    }

    /// Where a client reaches it with TLS, by the name in its certificate.
    pub fn tls_url(&self) -> String {
        format!("rediss://localhost:{}", self.tls_port.expect("the server was made with Builder::tls"))
    }

    /// The certificate of the authority.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join(AUTHORITY)
    }

    /// The port on `127.0.0.1`; the same for as long as the server lives, restarts included.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where a client of this machine reaches it without a port.
    pub fn unix_url(&self) -> String {
        format!("unix://{}", self.folder.path().join("socket").display())
    }

    /// Runs a command by `redis-cli` and returns what it prints.
    pub fn cli(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("redis-cli");
        command.args(["-p", &self.port.to_string()]);
        if let Some((_, password)) = self.settings.iter().rfind(|(name, _)| name == "requirepass") {
            command.env("REDISCLI_AUTH", password);
        }
        let output = command.arg("-e").args(arguments).output().with_context(|| format!("no redis-cli; {TO_DO}"))?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "redis-cli {}: {said} {complaint}", arguments.join(" "));
        Ok(said)
    }

    /// What the server has written to its log.
    pub fn log(&self) -> String {
        // A log that is not there yet is an empty one.
        std::fs::read(self.folder.path().join("log"))
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// Starts a server that has ended again: same folder, same port. Returns when it answers.
    pub fn start(&self) -> Result<()> {
        let mut process = self.process();
        ensure!(process.is_none(), "the server runs already");
        let mut command = self.folder.command("redis-server");
        command.arg(self.configuration()).args(self.is_sentinel.then_some("--sentinel"));
        let mut child = command.spawn().with_context(|| format!("no redis-server; {TO_DO}"))?;
        if let Err(error) = self.wait_until_ready(&mut child) {
            end(&mut child);
            return Err(error.context(format!("Redis did not start; its log:\n{}", self.log())));
        }
        *process = Some(child);
        Ok(())
    }

    /// Kills it (SIGKILL): what was not on disk is lost. Returns when it has ended.
    pub fn kill(&self) {
        if let Some(mut child) = self.process().take() {
            end(&mut child);
        }
    }

    /// Kills it and starts it again.
    pub fn restart(&self) -> Result<()> {
        self.kill();
        self.start().context("Redis could not be started again")
    }

    fn wait_until_ready(&self, child: &mut Child) -> Result<()> {
        let given_up = Instant::now() + WAIT_MAX;
        while !self.answers() {
            if let Some(status) = child.try_wait().context("cannot look after the server")? {
                bail!("the server ended at once: {status}");
            }
            ensure!(Instant::now() < given_up, "the server did not answer in {WAIT_MAX:?}");
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Whether it answers, if only that a password is wanted.
    fn answers(&self) -> bool {
        let ask = || {
            let mut connection = TcpStream::connect(("127.0.0.1", self.port))?;
            connection.set_read_timeout(Some(Duration::from_secs(1)))?;
            connection.write_all(b"PING\r\n")?;
            let mut answer = [0; 7];
            connection.read_exact(&mut answer)?;
            std::io::Result::Ok(answer)
        };
        ask().is_ok_and(|answer| matches!(&answer, b"+PONG\r\n" | b"-NOAUTH"))
    }

    fn configure(&self) -> Result<()> {
        let folder = self.folder.path().display();
        let mut text = format!(
            "bind 127.0.0.1\nport {}\ndir {folder}\nlogfile log\npidfile {folder}/redis.pid\n\
             unixsocket {folder}/socket\ndaemonize no\n",
            self.port
        );
        if !self.is_sentinel {
            // A replica is in step at once, without a wait for others and without a file on disk.
            text.push_str("save \"\"\nrepl-diskless-sync-delay 0\n");
        }
        if let Some(port) = self.tls_port {
            let _ = writeln!(
                text,
                "tls-port {port}\ntls-cert-file {CERTIFICATE}\ntls-key-file {KEY}\ntls-ca-cert-file {AUTHORITY}\n\
                 tls-auth-clients no"
            );
        }
        for (name, value) in &self.settings {
            let _ = writeln!(text, "{name} {value}");
        }
        let path = self.configuration();
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn configuration(&self) -> PathBuf {
        self.folder.path().join("redis.conf")
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn end(child: &mut Child) {
    // Both fail only if it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}
