use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cargo::{command, root, run};
use crate::postgres::BINARIES_VARIABLE;

/// The folder whose subfolders are the examples.
const EXAMPLES: &str = "examples";

/// What the Python examples need.
const PYTHON_PACKAGES: &str = "examples/python/requirements.txt";

/// Where the Python examples' packages are installed: a virtual environment, since distributions refuse another place.
const PYTHON_ENVIRONMENT: &str = "target/venv";

/// Installs one thing, if it is not there.
type Provide = fn() -> Result<()>;

/// What the tests need: servers, Python, Node, and the packages of the examples.
const TOOLS: [Provide; 9] = [
    provide_postgres,
    provide_pgbouncer,
    || provide_package("OpenSSL", &["openssl"], || answers(command("openssl", &["version"]))),
    // Debian's package starts one too, which is not used.
    || provide_package("Redis", &["redis-server"], || answers(command("redis-server", &["--version"]))),
    provide_for_kafka,
    provide_python,
    provide_node,
    provide_python_packages,
    provide_node_packages,
];

/// Installs what the tests need and is not there. What cannot be installed does not keep the rest from being installed.
pub(crate) fn provide() -> Result<()> {
    provide_each(&TOOLS)
}

fn provide_each(tools: &[Provide]) -> Result<()> {
    all(tools.iter().map(|provide| provide()))
}

/// Fails with all failures, each on a line.
pub(crate) fn all(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let failed = |result: Result<()>| result.err().map(|error| format!("{error:#}"));
    let failures: Vec<String> = results.into_iter().filter_map(failed).collect();
    match failures.as_slice() {
        [] => Ok(()),
        [one] => bail!("{one}"),
        several => bail!("{} tools are missing:\n- {}", several.len(), several.join("\n- ")),
    }
}

fn provide_pgbouncer() -> Result<()> {
    let bouncer = || answers(command("pgbouncer", &["--version"])) || Path::new("/usr/sbin/pgbouncer").exists();
    provide_package("PgBouncer", &["pgbouncer"], bouncer)
}

/// Installs Python with what makes a virtual environment, if it is not there.
pub(crate) fn provide_python() -> Result<()> {
    let python = || answers(command("python3", &["-c", "import sqlite3, venv, ensurepip"]));
    provide_package("Python with its modules sqlite3 and venv", &["python3", "python3-venv"], python)
}

/// Installs Node with npm, if they are not there.
pub(crate) fn provide_node() -> Result<()> {
    let node = || answers(command("node", &["--version"])) && answers(command("npm", &["--version"]));
    provide_package("Node with npm", &["nodejs", "npm"], node)
}

/// Installs PostgreSQL's server, if there is none. Debian's package starts one too, which is not used.
pub(crate) fn provide_postgres() -> Result<()> {
    if let Some(folder) = std::env::var_os(BINARIES_VARIABLE).filter(|folder| !folder.is_empty()) {
        let is_there = Path::new(&folder).join("initdb").exists();
        anyhow::ensure!(
            is_there,
            "{BINARIES_VARIABLE} names {folder:?}, where there is no `initdb`; set it right or not at all"
        );
        return Ok(());
    }
    provide_package("PostgreSQL's server", &["postgresql"], has_initdb)
}

/// Installs what the sink for Kafka is built with: librdkafka is compiled with the system's OpenSSL and zlib, and does not compile
/// without the headers of libcurl, even though it is not linked.
fn provide_for_kafka() -> Result<()> {
    let packages = ["g++", "make", "pkg-config", "libcurl4-openssl-dev", "libssl-dev", "zlib1g-dev"];
    let is_there = || {
        let tools = [("g++", "--version"), ("make", "--version")];
        tools.iter().all(|(tool, argument)| answers(command(tool, &[argument])))
            && answers(command("pkg-config", &["--exists", "libcurl", "openssl", "zlib"]))
    };
    provide_package("What librdkafka is built with", &packages, is_there)
}

/// Whether a command can be run and says that it is well.
pub(crate) fn answers(mut command: Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Whether there is a server where the testkit looks for one.
fn has_initdb() -> bool {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok().into_iter().flatten().flatten();
    let debian = versions.map(|version| version.path().join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    debian.chain(std::env::split_paths(&path)).any(|folder| folder.join("initdb").exists())
}

fn provide_package(what: &str, packages: &[&str], is_there: impl Fn() -> bool) -> Result<()> {
    if is_there() {
        return Ok(());
    }
    let by_hand = format!("install it by `apt-get update && apt-get install -y {}` as root", packages.join(" "));
    eprintln!("{what} is missing; installing {}", packages.join(" "));
    let install = [&["install", "-y"], packages].concat();
    // One package list may be out of reach while the one that is needed is there.
    if let Err(error) = run(apt_get(&["update"])) {
        eprintln!("{error:#}; going on with the package lists that are there");
    }
    run(apt_get(&install)).with_context(|| format!("{what} is missing and could not be installed; {by_hand}"))?;
    anyhow::ensure!(is_there(), "{what} is still missing after it was installed; {by_hand}");
    Ok(())
}

fn apt_get(arguments: &[&str]) -> Command {
    let mut command = command("apt-get", arguments);
    // Nobody may be there to answer.
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    command
}

/// A virtual environment with the packages of the Python examples, unless it is there already.
fn provide_python_packages() -> Result<()> {
    let environment = root().join(PYTHON_ENVIRONMENT);
    let installed = environment.join("installed");
    let wanted =
        std::fs::read(root().join(PYTHON_PACKAGES)).with_context(|| format!("{PYTHON_PACKAGES} is missing"))?;
    if std::fs::read(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    let python = format!("{PYTHON_ENVIRONMENT}/bin/python3");
    run(command("python3", &["-m", "venv", "--clear", PYTHON_ENVIRONMENT]))
        .and_then(|()| run(command(&python, &["-m", "pip", "install", "--quiet", "--requirement", PYTHON_PACKAGES])))
        .with_context(|| {
            format!("the packages in {PYTHON_PACKAGES} could not be installed into {PYTHON_ENVIRONMENT}")
        })?;
    std::fs::write(installed, wanted).context("cannot note what was installed")
}

/// `npm ci` in every example with packages, unless what it would install is there already.
fn provide_node_packages() -> Result<()> {
    let examples = std::fs::read_dir(root().join(EXAMPLES)).context("cannot list the examples")?;
    let folders = examples.flatten().map(|example| example.path());
    all(folders.filter(|folder| folder.join("package-lock.json").exists()).map(|folder| install_node_packages(&folder)))
}

fn install_node_packages(folder: &Path) -> Result<()> {
    let modified = |name: &str| std::fs::metadata(folder.join(name)).and_then(|metadata| metadata.modified());
    let wanted = modified("package-lock.json").context("package-lock.json has no time")?;
    if modified("node_modules/.package-lock.json").is_ok_and(|installed| installed >= wanted) {
        return Ok(());
    }
    let mut install = command("npm", &["ci", "--no-audit", "--no-fund"]);
    install.current_dir(folder);
    run(install).with_context(|| {
        format!("the packages of an example could not be installed; run `npm ci` in {}", folder.display())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn what_cannot_be_installed_keeps_nothing_from_being_installed_and_every_failure_is_told() {
        static INSTALLED: AtomicUsize = AtomicUsize::new(0);
        fn install() -> Result<()> {
            INSTALLED.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        let tools: [Provide; 4] = [|| Err(anyhow!("no a")), install, || Err(anyhow!("no b")), install];
        let error = provide_each(&tools).unwrap_err().to_string();
        assert!(error.contains("2 tools") && error.contains("no a") && error.contains("no b"), "{error}");
        assert_eq!(INSTALLED.load(Ordering::Relaxed), 2);
        assert!(provide_each(&[install]).is_ok());
    }
}
