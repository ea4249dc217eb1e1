use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::folder_guard::FolderGuard;

/// See [`FolderGuard`]. The working directory proves that the process is the one that wrote the file.
const GUARD: &str = r#"
    cat >/dev/null
    pid=$(cat "$1/redis.pid" 2>/dev/null)
    if [ -n "$pid" ] && [ "/proc/$pid/cwd" -ef "$1" ]; then kill -s KILL "$pid"; fi
    rm -rf "$1"
"#;

/// A temporary folder with a server's files.
#[derive(Debug)]
pub(super) struct Folder(FolderGuard);

impl Folder {
    pub(super) fn new() -> Result<Folder> {
        FolderGuard::new("pillarbox-redis-", GUARD).map(Folder)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// A program that runs in the folder and is quiet.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}
