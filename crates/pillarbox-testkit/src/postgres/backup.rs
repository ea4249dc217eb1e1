use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::binaries::Binaries;
use super::folder::Folder;
use super::process::LOOK_INTERVAL;
use super::{Mode, Server, client};

/// How long a standby may take to replay what its primary has written, or to become a primary.
const STANDBY_TIMEOUT: Duration = Duration::from_secs(60);

/// How much of its log a server keeps for standbys that start late.
pub(super) const WAL_KEPT: &str = "256MB";

/// A copy of a whole cluster as it was at one moment.
#[derive(Debug)]
pub struct Backup {
    folder: Folder,
    binaries: Binaries,
    tls: bool,
}

impl Backup {
    /// Starts a copy of it, on a port of its own: a cluster that was cloned.
    pub fn start(&self) -> Result<Server> {
        Server::start_in(self.copied()?, self.binaries.clone(), self.tls)
    }

    fn copied(&self) -> Result<Folder> {
        let folder = Folder::new()?;
        copy(&self.folder.data(), &folder.data())?;
        Ok(folder)
    }
}

impl Server {
    /// Copies the cluster while it runs.
    pub fn backup(&self) -> Result<Backup> {
        let folder = Folder::new()?;
        let label = client::block_on(self.copy_to(&folder))?;
        // The log up to the end of the copying is in whole segments now.
        let log = folder.data().join("pg_wal");
        std::fs::remove_dir_all(&log).context("cannot remove a part of the copy")?;
        copy(&self.data_dir().join("pg_wal"), &log)?;
        for name in ["postmaster.pid", "postmaster.opts"] {
            // Written by a running server only.
            let _ = std::fs::remove_file(folder.data().join(name));
        }
        folder.add_to("backup_label", &label)?;
        Ok(Backup { folder, binaries: self.binaries.clone(), tls: self.tls })
    }

    /// Puts a backup in the place of this cluster: same port, older content.
    pub fn restore_backup(&self, backup: &Backup) -> Result<()> {
        self.stop(Mode::Fast)?;
        std::fs::remove_dir_all(self.data_dir()).context("cannot remove the cluster")?;
        copy(&backup.folder.data(), &self.data_dir())?;
        self.start().context("the restored cluster does not start")
    }

    /// A standby that follows this server. It answers queries.
    pub fn standby(&self) -> Result<Server> {
        let Backup { folder, binaries, tls } = self.backup()?;
        let primary = format!("host=127.0.0.1 port={} user={}", self.port, super::SUPERUSER);
        folder.configure(&[("primary_conninfo".into(), primary)])?;
        folder.add_to("standby.signal", "")?;
        Server::start_in(folder, binaries, tls)
    }

    /// Waits until this standby shows everything that its primary has written until now.
    pub fn wait_until_replayed(&self, primary: &Server) -> Result<()> {
        let written = primary.psql("postgres", "select pg_current_wal_flush_lsn()")?;
        let replayed = format!("select pg_last_wal_replay_lsn() >= '{written}'");
        let given_up = Instant::now() + STANDBY_TIMEOUT;
        while self.psql("postgres", &replayed)? != "t" {
            if Instant::now() > given_up {
                bail!("the standby did not replay up to {written} in {STANDBY_TIMEOUT:?}; its log:\n{}", self.log());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Makes a primary of this standby; returns when it takes writes.
    pub fn promote(&self) -> Result<()> {
        let promoted = self.psql("postgres", &format!("select pg_promote(true, {})", STANDBY_TIMEOUT.as_secs()))?;
        anyhow::ensure!(promoted == "t", "the standby was not promoted; its log:\n{}", self.log());
        Ok(())
    }

    /// Copies the files between the two calls that make this safe, which must come from one session. Returns the label.
    async fn copy_to(&self, folder: &Folder) -> Result<String> {
        // The names changed with version 15.
        let (start, stop) = match self.version() {
            ..15 => ("pg_start_backup('testkit', true, false)", "pg_stop_backup(false, false)"),
            _ => ("pg_backup_start('testkit', true)", "pg_backup_stop(false)"),
        };
        let client = super::connect(&self.url("postgres")).await?;
        client.simple_query(&format!("select {start}")).await.context("no backup could be begun")?;
        copy(&self.data_dir(), &folder.data())?;
        let stopped = client.query_one(&format!("select labelfile from {stop}"), &[]).await;
        stopped.map(|row| row.get(0)).context("the backup could not be ended")
    }
}

/// Copies a folder with its owners and rights.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let output = Command::new("cp").arg("-a").arg(from).arg(to).env("LC_ALL", "C").output().context("cannot run cp")?;
    let said = String::from_utf8_lossy(&output.stderr);
    // A running server removes files meanwhile; its log makes up for them.
    let vanished = !said.is_empty() && said.lines().all(|line| line.ends_with("No such file or directory"));
    if output.status.success() || vanished {
        return Ok(());
    }
    bail!("cannot copy {}: {said}", from.display());
}
