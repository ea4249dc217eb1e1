use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cargo::{cargo, command, output, root, run};
use crate::part::{Beside, Outcome, Parts};
use crate::postgres::{self, Version};
use crate::{lock_file, metrics, tool};

/// The tests kill processes at failpoints and deliver to every sink, so all parts build with them and share what is built.
const WORKSPACE: [&str; 3] =
    ["--workspace", "--features", "pillarbox-cli/failpoints,pillarbox-cli/full,pillarbox-sinks/full"];

/// The test of every store that compares the committed schema with what the migrations make.
const SCHEMA_TEST: &str = "schema::the_committed_schema_is_what_the_migrations_make";

/// What is said where the tool is missing.
const NO_CARGO_DENY: &str = "not run: cargo install --locked cargo-deny";

/// The tests of the simulation, which wait for nothing.
const SIMULATION: &str = "simulation::";

/// The tests that build applications with other clients of the databases: too long for every day.
const CLIENT_TESTS: &str = "clients::";

/// The tests that kill the servers of sinks while events are delivered to them.
const CHAOS_TESTS: &str = "chaos::";

/// How many events each of them delivers, and how many where there is time.
const CHAOS_EVENTS: (&str, &str) = ("PILLARBOX_CHAOS_EVENTS", "100000");

/// The whole check; with more versions of PostgreSQL than the one that is installed, if asked for.
pub(crate) fn whole(versions: &[Version]) -> Result<()> {
    let mut parts = Parts::default();
    parts.run("tools", tool::provide);
    parts.run("format", format);
    // Without a choice of targets: only so are the examples built as programs, which some tests start.
    if parts.run("build", || run(on_workspace(&["test", "--no-run"], &[]))) {
        // Most tests wait for servers. First of the others comes what is built: what compiles takes a lock that the tests need at their start.
        let beside: Vec<Beside> = vec![
            (
                "simulation",
                Box::new(|| expect_tests(&aside(on_workspace(&["test", "--test", "it"], &["--", SIMULATION]))?)),
            ),
            ("lints", Box::new(|| aside(lints()))),
            ("default features", Box::new(|| aside(cargo(&["check", "--package", "pillarbox-cli", "--bins"])))),
            ("docs", Box::new(|| aside(docs()))),
        ];
        let tests = ["test", "--lib", "--bins", "--tests", "--no-fail-fast"];
        parts.run_with("tests", || run(on_workspace(&tests, &["--", "--skip", SIMULATION])), beside);
        parts.run("doc tests", || run(on_workspace(&["test", "--doc", "--no-fail-fast"], &[])));
        parts.run("schema", schema);
    } else {
        for part in ["tests", "simulation", "lints", "default features", "docs", "doc tests", "schema"] {
            parts.skip(part, "the build failed");
        }
    }
    for version in versions {
        parts.run(version.part, || postgres::test(version));
    }
    if !versions.is_empty() {
        parts.run("other clients", other_clients);
        parts.run("chaos", chaos);
        parts.run("each sink alone", each_sink_alone);
    }
    parts.run("metrics documented", metrics::check);
    parts.run("dependencies", lock_file::check);
    parts.run_or_skip("cargo deny", cargo_deny);
    parts.run_or_skip("cargo deny advisories", cargo_deny_advisories);
    parts.finish()
}

/// What is worth waiting for after every change.
pub(crate) fn fast() -> Result<()> {
    let mut parts = Parts::default();
    parts.run("format", format);
    parts.run("lints", || run(lints()));
    parts.run("unit tests", || run(on_workspace(&["test", "--lib", "--bins", "--no-fail-fast"], &[])));
    parts.finish()
}

/// Writes the dumped schemas again.
pub(crate) fn bless_schema() -> Result<()> {
    tool::provide_postgres()?;
    let mut command = schema_test();
    command.env("PILLARBOX_BLESS", "1");
    expect_passed(&output(command)?)
}

fn on_workspace(before: &[&str], after: &[&str]) -> Command {
    cargo(&[before, &WORKSPACE, after].concat())
}

fn format() -> Result<()> {
    run(cargo(&["fmt", "--all", "--check"]))
}

fn lints() -> Command {
    on_workspace(&["clippy", "--all-targets"], &["--", "-D", "warnings"])
}

fn docs() -> Command {
    let mut command = on_workspace(&["doc", "--no-deps"], &[]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    command
}

/// Runs a command behind whatever else runs, and returns what it printed.
fn aside(behind: Command) -> Result<String> {
    let mut command = command("nice", &[]);
    command.arg(behind.get_program()).args(behind.get_args());
    command.envs(behind.get_envs().filter_map(|(name, value)| Some((name, value?))));
    output(command)
}

/// A filter that finds no test passes too.
fn expect_tests(printed: &str) -> Result<String> {
    if !printed.contains("test simulation::no_seed_breaks_a_promise ... ok") {
        bail!("no test of the simulation ran; was it renamed?\n{printed}");
    }
    Ok(printed.to_owned())
}

fn schema() -> Result<()> {
    expect_passed(&output(schema_test())?)
}

fn schema_test() -> Command {
    on_workspace(&["test", "--test", "it"], &["--", "--exact", SCHEMA_TEST])
}

/// Runs the ignored tests of other clients, with the installed PostgreSQL.
fn other_clients() -> Result<()> {
    for package in ["pillarbox-postgres", "pillarbox-sqlite"] {
        let printed = output(cargo(&["test", "--package", package, "--test", "it", "--", "--ignored", CLIENT_TESTS]))?;
        if printed.contains("ok. 0 passed") || !printed.contains("ok. ") {
            bail!("no ignored test of {package} begins with {CLIENT_TESTS}; was it renamed?\n{printed}");
        }
    }
    Ok(())
}

/// Delivers far more events to every sink than every day, while its server is killed.
fn chaos() -> Result<()> {
    let mut command = on_workspace(&["test", "--test", "it"], &["--", CHAOS_TESTS, "--show-output"]);
    command.env(CHAOS_EVENTS.0, CHAOS_EVENTS.1);
    let printed = output(command)?;
    let verdicts: Vec<&str> = printed.lines().filter(|line| line.contains(": committed ")).collect();
    let expected = format!(": committed {}, ", CHAOS_EVENTS.1);
    if verdicts.is_empty() || !verdicts.iter().all(|verdict| verdict.contains(&expected)) {
        bail!("the tests {CHAOS_TESTS} do not deliver {} events; were they renamed?\n{printed}", CHAOS_EVENTS.1);
    }
    verdicts.iter().for_each(|verdict| println!("{verdict}"));
    Ok(())
}

fn each_sink_alone() -> Result<()> {
    let without = ["clippy", "--package", "pillarbox-sinks", "--all-targets", "--no-default-features"];
    let lint = |features: &[&str]| run(cargo(&[&without[..], features, &["--", "-D", "warnings"]].concat()));
    lint(&[])?;
    let manifest = std::fs::read_to_string(root().join("crates/pillarbox-sinks/Cargo.toml"))?;
    let sinks = features_of_full(&manifest).context("pillarbox-sinks has no feature `full`")?;
    sinks.iter().try_for_each(|sink| lint(&["--features", sink]))
}

/// The features that `full` turns on.
fn features_of_full(manifest: &str) -> Option<Vec<&str>> {
    let line = manifest.lines().find_map(|line| line.strip_prefix("full = [")?.strip_suffix(']'))?;
    Some(line.split(',').map(|name| name.trim().trim_matches('"')).collect())
}

/// A filter that finds no test passes too; that would be a check that checks nothing.
fn expect_passed(printed: &str) -> Result<()> {
    let crates = std::fs::read_dir(root().join("crates")).context("cannot list the crates")?;
    let stores = crates.flatten().filter(|folder| folder.path().join("migrations").exists()).count();
    let passed = printed.matches("ok. 1 passed").count();
    if passed != stores {
        bail!(
            "{stores} crates have migrations, but the test {SCHEMA_TEST} ran in {passed}; was it renamed?\n{printed}"
        );
    }
    Ok(())
}

/// What needs nothing but the tool and Cargo.lock.
fn cargo_deny() -> Result<Outcome> {
    if !has_cargo_deny() {
        return Ok(Outcome::Skipped(NO_CARGO_DENY.into()));
    }
    run(command("cargo-deny", &["check", "licenses", "bans", "sources"])).map(|()| Outcome::Ok)
}

/// A part of its own: its database lies elsewhere, and a check without it must not look like one with it.
fn cargo_deny_advisories() -> Result<Outcome> {
    if !has_cargo_deny() {
        return Ok(Outcome::Skipped(NO_CARGO_DENY.into()));
    }
    if run(command("cargo-deny", &["fetch", "db"])).is_err() {
        return Ok(Outcome::Skipped("the advisory database could not be fetched".into()));
    }
    run(command("cargo-deny", &["check", "--disable-fetch", "advisories"])).map(|()| Outcome::Ok)
}

fn has_cargo_deny() -> bool {
    tool::answers(command("cargo-deny", &["--version"]))
}
