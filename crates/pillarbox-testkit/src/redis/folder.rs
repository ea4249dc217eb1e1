use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Waits for the end of its input, which comes when the test process ends, however it ends; then kills the server that still runs in the
/// folder and removes the folder. The working directory proves that the process is the one that wrote the file.
const GUARD: &str = r#"
    cat >/dev/null
    pid=$(cat "$1/redis.pid" 2>/dev/null)
    if [ -n "$pid" ] && [ "/proc/$pid/cwd" -ef "$1" ]; then kill -s KILL "$pid"; fi
    rm -rf "$1"
"#;

/// A temporary folder with a server's files. It goes with the value or with the process.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    guard: Child,
}

impl Folder {
    pub(super) fn new() -> Result<Folder> {
        // Short, for the path of a unix socket may have no more than 107 bytes.
        let made = tempfile::Builder::new().prefix("pillarbox-redis-").tempdir();
        let path = made.map(TempDir::keep).context("cannot make a temporary folder for Redis")?;
        let mut command = Command::new("sh");
        // Ctrl-C goes to the tests only; they end, and then this does its work.
        command.args(["-c", GUARD, "sh"]).arg(&path).current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let guard = command.spawn().context("cannot start `sh`")?;
        Ok(Folder { path, guard })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A program that runs in the folder and is quiet.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.path).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        // Only waits so that the folder is gone and nothing is left to be reaped.
        let _ = self.guard.wait();
    }
}
