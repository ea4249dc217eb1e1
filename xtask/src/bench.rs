use anyhow::Result;

use crate::cargo::{example, root, run};
use crate::peer;
use crate::tool;

/// The environment variable by which the benchmark is told where the peers are installed.
const PEERS_VARIABLE: &str = "PILLARBOX_BENCH_PEERS";

/// Runs the benchmark that the options name; the other options are for it.
pub(crate) fn run_with(options: &[&str]) -> Result<()> {
    let (name, rest) = choose(options);
    let mut command = example(name, &["--release"], &rest);
    if name != SQLITE {
        tool::provide_postgres()?;
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

/// The example of the testkit, and what it is told.
fn choose<'a>(options: &[&'a str]) -> (&'static str, Vec<&'a str>) {
    let example = match options {
        _ if options.contains(&"--queue") => QUEUE,
        _ if options.contains(&"--postgres") => POSTGRES,
        _ => SQLITE,
    };
    (example, options.iter().copied().filter(|option| !["--queue", "--postgres"].contains(option)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_option_names_the_benchmark_and_the_others_are_passed_on() {
        assert_eq!(choose(&["--quick"]), (SQLITE, vec!["--quick"]));
        assert_eq!(choose(&["--postgres", "--json"]), (POSTGRES, vec!["--json"]));
        assert_eq!(choose(&["--quick", "--queue", "--only", "memory"]), (QUEUE, vec!["--quick", "--only", "memory"]));
    }
}
