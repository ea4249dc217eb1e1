use std::path::Path;

use anyhow::{Context, Result};

use crate::cargo::{command, root, run};
use crate::tool;

/// Where what queues are compared with is installed.
pub(crate) const FOLDER: &str = "target/peers";

/// The package with pgmq's SQL, from PyPI.
const PGMQ: &str = "pgmq==1.1.4";

/// The worker, and a Node that is new enough for it, from npm.
const GRAPHILE: [&str; 2] = ["graphile-worker@0.18.0", "node@22.23.3"];

/// Installs all of them that can be; the benchmark says which it has not measured.
pub(crate) fn provide_all() {
    for (name, provided) in [("pgmq", provide_pgmq()), ("graphile-worker", provide_graphile())] {
        if let Err(error) = provided {
            eprintln!("{name} cannot be measured: {error:#}");
        }
    }
}

/// The package's files alone; a virtual environment, since a distribution's Python may have no pip.
fn provide_pgmq() -> Result<()> {
    provide("pgmq", PGMQ, || {
        tool::provide_python()?;
        let environment = format!("{FOLDER}/python");
        let python = format!("{environment}/bin/python3");
        let package = format!("{FOLDER}/pgmq");
        run(command("python3", &["-m", "venv", "--clear", &environment]))?;
        let install = ["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", &package, PGMQ];
        run(command(&python, &install))
    })
}

fn provide_graphile() -> Result<()> {
    provide("graphile-worker", &GRAPHILE.join(" "), || {
        tool::provide_node()?;
        let install = ["install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", FOLDER];
        run(command("npm", &[&install[..], &GRAPHILE].concat()))
    })
}

/// Installs a peer, unless this version of it is there already.
fn provide(name: &str, version: &str, install: impl FnOnce() -> Result<()>) -> Result<()> {
    let folder = root().join(FOLDER);
    let installed = folder.join(format!("{name}.installed"));
    if is_installed(&installed, version) {
        return Ok(());
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    install().with_context(|| format!("{version} could not be installed into {FOLDER}"))?;
    std::fs::write(installed, version).context("cannot note what was installed")
}

fn is_installed(mark: &Path, version: &str) -> bool {
    std::fs::read_to_string(mark).is_ok_and(|installed| installed == version)
}
