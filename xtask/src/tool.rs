use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cargo::{command, root, run};

/// The folder of the Node example.
const NODE_EXAMPLE: &str = "examples/node";

/// Installs what the tests of the examples need and is not there: Python, Node, and the Node example's packages.
pub(crate) fn provide() -> Result<()> {
    let python = || answers(command("python3", &["-c", "import sqlite3"]));
    provide_package("Python with its sqlite3 module", &["python3"], python)?;
    let node = || answers(command("node", &["--version"])) && answers(command("npm", &["--version"]));
    provide_package("Node with npm", &["nodejs", "npm"], node)?;
    provide_node_packages()
}

/// Whether a command can be run and says that it is well.
pub(crate) fn answers(mut command: Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn provide_package(what: &str, packages: &[&str], is_there: impl Fn() -> bool) -> Result<()> {
    if is_there() {
        return Ok(());
    }
    let by_hand = format!("install it by `apt-get update && apt-get install -y {}`", packages.join(" "));
    eprintln!("{what} is missing; installing {}", packages.join(" "));
    let install = [&["install", "-y"], packages].concat();
    run(command("apt-get", &["update"]))
        .and_then(|()| run(command("apt-get", &install)))
        .with_context(|| format!("{what} is missing and could not be installed; {by_hand}"))?;
    anyhow::ensure!(is_there(), "{what} is still missing after it was installed; {by_hand}");
    Ok(())
}

/// `npm ci`, unless what it would install is there already.
fn provide_node_packages() -> Result<()> {
    let folder = root().join(NODE_EXAMPLE);
    let modified = |name: &str| std::fs::metadata(folder.join(name)).and_then(|metadata| metadata.modified());
    let wanted = modified("package-lock.json").context("examples/node/package-lock.json is missing")?;
    if modified("node_modules/.package-lock.json").is_ok_and(|installed| installed >= wanted) {
        return Ok(());
    }
    let mut install = command("npm", &["ci", "--no-audit", "--no-fund"]);
    install.current_dir(&folder);
    run(install).context("the Node example's packages could not be installed; run `npm ci` in examples/node")
}
