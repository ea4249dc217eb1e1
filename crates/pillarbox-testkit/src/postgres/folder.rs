use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::folder_guard::FolderGuard;

/// See [`FolderGuard`]. The working directory proves that the process is the one that wrote the file.
const GUARD: &str = r#"
    cat >/dev/null
    data=$1/data
    for file in "$data"/*.pid; do
        pid=$(head -n 1 "$file" 2>/dev/null)
        tries=0
        while [ -n "$pid" ] && [ "/proc/$pid/cwd" -ef "$data" ]; do
            if [ "$tries" -eq 0 ]; then kill -s QUIT "$pid"; fi
            if [ "$tries" -eq 100 ]; then kill -s KILL "$pid"; break; fi
            tries=$((tries + 1))
            sleep 0.1
        done
    done
    rm -rf "$1"
"#;

/// Who runs the server when the tests run as root, which PostgreSQL refuses to be run by.
const UNPRIVILEGED: [&str; 2] = ["postgres", "nobody"];

/// A temporary folder with a cluster in it, owned by whoever runs the server.
#[derive(Debug)]
pub(super) struct Folder {
    folder: FolderGuard,
    /// Who runs programs in it, if not we: user and group.
    user: Option<(u32, u32)>,
}

impl Folder {
    pub(super) fn new() -> Result<Folder> {
        let mut folder = Folder { folder: FolderGuard::new("pillarbox-pg-", GUARD)?, user: None };
        folder.user = folder.choose_user()?;
        folder.give(folder.path())?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn data(&self) -> PathBuf {
        self.path().join("data")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path().join("log")
    }

    /// Gives a file to whoever runs the server.
    pub(super) fn give(&self, path: &Path) -> Result<()> {
        let Some((user, group)) = self.user else { return Ok(()) };
        chown(path, Some(user), Some(group)).with_context(|| format!("cannot give away {}", path.display()))
    }

    /// A program to be run by whoever runs the server, free of what the environment says about other servers.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.env("HOME", self.path()).env("LC_ALL", "C").env("TZ", "UTC");
        command.current_dir(self.path()).process_group(0).stdin(Stdio::null());
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        command
    }

    /// Adds lines to the configuration.
    pub(super) fn configure(&self, settings: &[(String, String)]) -> Result<()> {
        let lines = settings.iter().fold(String::new(), |mut lines, (name, value)| {
            let _ = writeln!(lines, "{name} = '{}'", value.replace('\'', "''"));
            lines
        });
        self.add_to("postgresql.conf", &lines)
    }

    /// Adds text to a file of the cluster, which is made if it is not there.
    pub(super) fn add_to(&self, name: &str, text: &str) -> Result<()> {
        let path = self.data().join(name);
        let file = std::fs::OpenOptions::new().append(true).create(true).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        self.give(&path)
    }

    fn choose_user(&self) -> Result<Option<(u32, u32)>> {
        let owner = std::fs::metadata(self.path()).context("cannot look at a temporary folder")?.uid();
        if owner != 0 {
            return Ok(None);
        }
        for name in UNPRIVILEGED {
            if let (Some(user), Some(group)) = (id("-u", name), id("-g", name)) {
                return Ok(Some((user, group)));
            }
        }
        bail!("PostgreSQL refuses to run as root, and there is no user {}: make one", UNPRIVILEGED.join(" or "));
    }
}

fn id(option: &str, name: &str) -> Option<u32> {
    let output = Command::new("id").args([option, name]).output().ok().filter(|output| output.status.success())?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}
