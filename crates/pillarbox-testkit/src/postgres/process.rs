use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::binaries::Binaries;
use super::folder::Folder;
use super::{Mode, SUPERUSER};

/// How long a server may take until it accepts connections, recovery included.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether a process has got somewhere.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// The line of `postmaster.pid` in which the server says how far it is, counted from 0.
const STATE_LINE: usize = 7;

/// `initdb`.
pub(super) fn make_cluster(binaries: &Binaries, folder: &Folder) -> Result<()> {
    let mut command = folder.command(&binaries.path("initdb"));
    command.args(["--auth", "trust", "--username", SUPERUSER, "--encoding", "UTF8", "--no-locale", "--no-sync"]);
    command.arg("--pgdata").arg(folder.data());
    run(command).map(drop).context("no cluster could be made")
}

/// Starts the server, which still has to come up.
pub(super) fn spawn(binaries: &Binaries, folder: &Folder, port: u16) -> Result<Child> {
    let log = std::fs::OpenOptions::new().append(true).create(true).open(folder.log());
    let log = log.with_context(|| format!("cannot write {}", folder.log().display()))?;
    let mut command = folder.command(&binaries.path("postgres"));
    command.arg("-D").arg(folder.data()).arg("-k").arg(folder.path()).args(["-p", &port.to_string()]);
    command.stdout(Stdio::null()).stderr(log);
    command.spawn().with_context(|| format!("cannot start {}", binaries.path("postgres").display()))
}

/// Returns when the server accepts connections.
pub(super) fn wait_until_ready(child: &mut Child, folder: &Folder) -> Result<()> {
    let given_up = Instant::now() + START_TIMEOUT;
    let pid = child.id().to_string();
    loop {
        if let Some(status) = child.try_wait().context("cannot look after the server")? {
            bail!("the server ended at once: {status}");
        }
        // The file may be missing, or that of an earlier run.
        let said = std::fs::read_to_string(folder.data().join("postmaster.pid")).unwrap_or_default();
        let mut lines = said.lines().map(str::trim);
        if lines.next() == Some(&pid) && lines.nth(STATE_LINE - 1) == Some("ready") {
            return Ok(());
        }
        if Instant::now() > given_up {
            bail!("the server did not accept connections in {START_TIMEOUT:?}");
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

pub(super) fn signal(child: &Child, mode: Mode) -> Result<()> {
    let signal = match mode {
        Mode::Fast => "INT",
        Mode::Immediate => "QUIT",
    };
    let mut command = Command::new("sh");
    command.args(["-c", r#"kill -s "$1" "$2""#, "sh", signal, &child.id().to_string()]);
    run(command).map(drop).context("the server could not be told to stop")
}

/// Whether the process ended in time.
pub(super) fn wait_until_ended(child: &mut Child, timeout: Duration) -> bool {
    let given_up = Instant::now() + timeout;
    while Instant::now() < given_up {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return true;
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    false
}

/// Kills what did not end by itself.
pub(super) fn end(child: &mut Child) {
    // Both fail only if it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

/// Runs a command to its end and returns what it printed.
pub(super) fn run(mut command: Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} failed: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}
