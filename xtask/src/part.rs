use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The parts of a check, run one after the other: a failed one does not end the run.
#[derive(Default)]
pub(crate) struct Parts(Vec<Part>);

struct Part {
    name: &'static str,
    took: Duration,
    outcome: Outcome,
}

/// What became of a part.
pub(crate) enum Outcome {
    Ok,
    /// Not run, with the reason or the command that makes it possible. Never shown as ok.
    Skipped(String),
    Failed(String),
}

impl Parts {
    /// Runs a part; whether it is ok.
    pub(crate) fn run(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>) -> bool {
        self.run_or_skip(name, || work().map(|()| Outcome::Ok))
    }

    /// Runs a part that may turn out not to be possible here; whether it is ok.
    pub(crate) fn run_or_skip(&mut self, name: &'static str, work: impl FnOnce() -> Result<Outcome>) -> bool {
        eprintln!("\n=== {name}");
        let started = Instant::now();
        let outcome = work().unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
        if let Outcome::Failed(reason) = &outcome {
            eprintln!("{name}: {reason}");
        }
        let is_ok = matches!(outcome, Outcome::Ok);
        self.0.push(Part { name, took: started.elapsed(), outcome });
        is_ok
    }

    /// Notes a part that is not run.
    pub(crate) fn skip(&mut self, name: &'static str, reason: &str) {
        self.0.push(Part { name, took: Duration::ZERO, outcome: Outcome::Skipped(reason.into()) });
    }

    /// Prints the time table; fails with the names of the parts that failed.
    pub(crate) fn finish(self) -> Result<()> {
        println!("\n{}", self.table());
        let failed = |part: &&Part| matches!(part.outcome, Outcome::Failed(_));
        let failed: Vec<&str> = self.0.iter().filter(failed).map(|part| part.name).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }

    fn table(&self) -> String {
        let mut table = format!("{:<22} {:>8}  result\n", "part", "seconds");
        for part in &self.0 {
            let result = match &part.outcome {
                Outcome::Ok => "ok".into(),
                Outcome::Skipped(reason) => format!("SKIPPED ({reason})"),
                Outcome::Failed(_) => "FAILED".into(),
            };
            table += &format!("{:<22} {:>8.1}  {result}\n", part.name, part.took.as_secs_f64());
        }
        let total: Duration = self.0.iter().map(|part| part.took).sum();
        table + &format!("{:<22} {:>8.1}", "total", total.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_failed_part_fails_the_whole_and_is_named() {
        let mut parts = Parts::default();
        assert!(parts.run("first", || Ok(())));
        assert!(!parts.run("second", || Err(anyhow!("broken"))));
        assert!(parts.run("third", || Ok(())));
        assert_eq!(parts.finish().unwrap_err().to_string(), "failed: second");
    }

    #[test]
    fn a_skipped_part_is_shown_as_skipped_and_not_as_ok() {
        let mut parts = Parts::default();
        parts.skip("first", "no such tool");
        assert!(!parts.run_or_skip("second", || Ok(Outcome::Skipped("not here".into()))));
        assert!(parts.table().contains("SKIPPED (no such tool)"));
        assert!(parts.finish().is_ok());
    }
}
