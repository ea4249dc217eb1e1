//! Developer commands: `cargo xtask test`, `tools`, `bench`, `schema`, `simulate`.
mod bench;
mod cargo;
mod lock_file;
mod metrics;
mod part;
mod peer;
mod postgres;
mod test;
mod tool;

use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "usage: cargo xtask COMMAND
  test [--fast | --full]   the whole check; --fast: format, lints and unit tests only; --full: with PostgreSQL 14, 17
                           and 18 too, which are downloaded, with applications of other clients, and with 100,000
                           events to every sink while its server is killed
  tools [--full]           install what `test` needs, without testing
  bench [--postgres | --queue | --sinks] [--quick] [--json] [--only NAME]
                           Pillarbox against raw SQLite, against raw PostgreSQL, its queues against others, which are
                           installed in target/peers, or its sinks against bare clients
  schema                   write the dumped schema again, after a migration was added
  simulate [FROM COUNT]    run seeds of the simulation; one seed is printed step by step";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((command, rest)) = arguments.split_first() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    // `cargo xtask simulate -- 0 1000` is what people type.
    let rest: Vec<&str> = rest.iter().map(String::as_str).filter(|argument| *argument != "--").collect();
    match run(command, &rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &str, rest: &[&str]) -> Result<()> {
    match (command, rest) {
        ("test", []) => test::whole(&[]),
        ("test", ["--full"]) => test::whole(&postgres::VERSIONS),
        ("test", ["--fast"]) => test::fast(),
        ("tools", []) => tool::provide(),
        ("tools", ["--full"]) => tool::provide().and_then(|()| postgres::provide_all()),
        ("bench", options) => bench::run_with(options),
        ("schema", []) => test::bless_schema(),
        ("simulate", seeds) => cargo::run(cargo::example("simulate", &[], seeds)),
        _ => bail!("there is no such command\n{USAGE}"),
    }
}
