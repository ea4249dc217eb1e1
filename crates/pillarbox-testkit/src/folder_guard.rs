use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A temporary folder with a server's files. It goes with the value or with the process, however that ends.
#[derive(Debug)]
pub(crate) struct FolderGuard {
    path: PathBuf,
    guard: Child,
}

impl FolderGuard {
    /// Makes one whose name begins so. `script` waits for the end of its input, which comes with the end of the test process; then it
    /// ends what still runs in the folder, `$1`, and removes it.
    pub(crate) fn new(prefix: &str, script: &str) -> Result<FolderGuard> {
        // Short, for the path of a unix socket may have no more than 107 bytes.
        let made = tempfile::Builder::new().prefix(prefix).tempdir();
        let path = made.map(TempDir::keep).context("cannot make a temporary folder for a server")?;
        let mut command = Command::new("sh");
        // Ctrl-C goes to the tests only; they end, and then this does its work.
        command.args(["-c", script, "sh"]).arg(&path).current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let guard = command.spawn().context("cannot start `sh`")?;
        Ok(FolderGuard { path, guard })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FolderGuard {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        // Only waits so that the folder is gone and nothing is left to be reaped.
        let _ = self.guard.wait();
    }
}
