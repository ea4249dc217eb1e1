use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The environment variable that names the folder with PostgreSQL's programs. Without it the newest version in
/// `/usr/lib/postgresql` is taken, else what is on the `PATH`.
pub const BINARIES_VARIABLE: &str = "PILLARBOX_TEST_PG_BIN";

/// Where Debian's packages put their versions.
const DEBIAN: &str = "/usr/lib/postgresql";

/// Where `cargo xtask test --full` puts the versions that it downloads.
const DOWNLOADED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/pg");

const TO_DO: &str = "install it by `apt-get install -y postgresql`, or let PILLARBOX_TEST_PG_BIN name the folder with `postgres` and `initdb`";

/// The programs of one version.
#[derive(Debug, Clone)]
pub(super) struct Binaries {
    folder: PathBuf,
    version: u32,
}

impl Binaries {
    pub(super) fn find(version: Option<u32>) -> Result<Binaries> {
        match version {
            Some(major) => {
                let found = of_version(major).with_context(|| format!("PostgreSQL {major} was not found; {TO_DO}"))?;
                Binaries::of_folder(found)
            }
            None => Binaries::of_folder(any().with_context(|| format!("PostgreSQL's server was not found; {TO_DO}"))?),
        }
    }

    /// These, or else the newest for which there is a `pg_dump`.
    pub(super) fn or_with_dump(self) -> Result<Binaries> {
        if self.client_program("pg_dump").is_ok() {
            return Ok(self);
        }
        let newest = versions_of_debian().pop();
        let newest = newest.with_context(|| format!("there is no PostgreSQL with a `pg_dump` here; {TO_DO}"))?;
        Binaries::of_folder(bin_of_debian(newest))
    }

    fn of_folder(found: PathBuf) -> Result<Binaries> {
        let asked = Command::new(found.join("postgres")).arg("--version").output();
        let printed = asked.with_context(|| format!("{} has no program `postgres`; {TO_DO}", found.display()))?.stdout;
        let printed = String::from_utf8_lossy(&printed);
        let Some(major) = major_version(&printed) else {
            bail!("{} does not say which version it is: {printed:?}", found.join("postgres").display());
        };
        Ok(Binaries { folder: found, version: major })
    }

    pub(super) fn version(&self) -> u32 {
        self.version
    }

    /// A program of the server.
    pub(super) fn path(&self, program: &str) -> PathBuf {
        self.folder.join(program)
    }

    /// A client's program: of this version, else of a newer one, which works with older servers too. The downloaded
    /// versions have none.
    pub(super) fn client_program(&self, program: &str) -> Result<PathBuf> {
        let newer = versions_of_debian().into_iter().filter(|version| *version >= self.version).map(bin_of_debian);
        let mut candidates = [self.folder.clone()].into_iter().chain(newer).map(|folder| folder.join(program));
        let found = candidates.find(|candidate| candidate.exists());
        found.with_context(|| format!("there is no {program} for PostgreSQL {}", self.version))
    }
}

fn of_version(major: u32) -> Option<PathBuf> {
    let folders = [Path::new(DEBIAN), Path::new(DOWNLOADED)].map(|parent| parent.join(major.to_string()).join("bin"));
    folders.into_iter().find(|folder| folder.join("initdb").exists())
}

fn any() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(BINARIES_VARIABLE).filter(|folder| !folder.is_empty()) {
        return Some(folder.into());
    }
    versions_of_debian().pop().map(bin_of_debian).or_else(on_path)
}

/// The versions whose server was installed by Debian's packages, the newest last.
fn versions_of_debian() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(DEBIAN) else { return Vec::new() };
    let versions = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut versions: Vec<u32> = versions.filter(|version| bin_of_debian(*version).join("initdb").exists()).collect();
    versions.sort_unstable();
    versions
}

fn bin_of_debian(version: u32) -> PathBuf {
    Path::new(DEBIAN).join(version.to_string()).join("bin")
}

fn on_path() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).find(|folder| folder.join("initdb").exists())
}

/// `postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)` is 15, `postgres (PostgreSQL) 19beta1` is 19.
fn major_version(printed: &str) -> Option<u32> {
    let number = printed.split_whitespace().nth(2)?;
    let end = number.find(|character: char| !character.is_ascii_digit()).unwrap_or(number.len());
    number[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_is_read_from_what_the_server_prints() {
        assert_eq!(major_version("postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)\n"), Some(15));
        assert_eq!(major_version("postgres (PostgreSQL) 19beta1\n"), Some(19));
        assert_eq!(major_version("no such file"), None);
    }
}
