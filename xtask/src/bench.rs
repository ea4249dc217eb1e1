use anyhow::Result;

use crate::cargo::{example, example_of, root, run};
use crate::peer;
use crate::tool;

/// The environment variable by which the benchmark is told where the peers are installed.
const PEERS_VARIABLE: &str = "PILLARBOX_BENCH_PEERS";

/// Runs the benchmark that the options name; the other options are for it.
pub(crate) fn run_with(options: &[&str]) -> Result<()> {
    let (name, rest) = choose(options);
    let mut command = match name {
        SINKS => example_of("pillarbox-sinks", name, &["--profile", "dist", "--features", "full"], &rest),
        _ => example(name, &["--profile", "dist"], &rest),
    };
    if name != SQLITE {
        tool::provide_postgres()?;
    }
    if name == SINKS {
        tool::provide()?;
    }
    if name == QUEUE {
        peer::provide_all();
        command.env(PEERS_VARIABLE, root().join(peer::FOLDER));
    }
    run(command)
}

const SQLITE: &str = "bench";
const POSTGRES: &str = "bench_postgres";
const QUEUE: &str = "bench_queue";
const SINKS: &str = "bench_sinks";

/// The options that name a benchmark.
const NAMING: [(&str, &str); 3] = [("--queue", QUEUE), ("--postgres", POSTGRES), ("--sinks", SINKS)];

/// The example, and what it is told.
fn choose<'a>(options: &[&'a str]) -> (&'static str, Vec<&'a str>) {
    let named = NAMING.iter().find(|(option, _)| options.contains(option));
    let names = |option: &&str| NAMING.iter().any(|(name, _)| name == option);
    (named.map_or(SQLITE, |(_, example)| example), options.iter().copied().filter(|option| !names(option)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_option_names_the_benchmark_and_the_others_are_passed_on() {
        assert_eq!(choose(&["--quick"]), (SQLITE, vec!["--quick"]));
        assert_eq!(choose(&["--postgres", "--json"]), (POSTGRES, vec!["--json"]));
        assert_eq!(choose(&["--sinks"]), (SINKS, vec![]));
        assert_eq!(choose(&["--quick", "--queue", "--only", "memory"]), (QUEUE, vec!["--quick", "--only", "memory"]));
    }
}
