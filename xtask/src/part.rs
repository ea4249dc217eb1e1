use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The parts of a check: a failed one does not end the run.
pub(crate) struct Parts {
    began: Instant,
    parts: Vec<Part>,
}

/// A part that runs beside others, and returns what it printed.
pub(crate) type Beside = (&'static str, Box<dyn FnOnce() -> Result<String> + Send>);

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

impl Default for Parts {
    fn default() -> Self {
        Parts { began: Instant::now(), parts: Vec::new() }
    }
}

impl Parts {
    /// Runs a part, and others one after the other beside it: what waits for servers leaves the processors to what computes. What those
    /// printed is shown when all have ended.
    pub(crate) fn run_with(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>, beside: Vec<Beside>) {
        let others = std::thread::spawn(|| {
            let run = |(name, work): Beside| {
                let started = Instant::now();
                let (printed, outcome) = match work() {
                    Ok(printed) => (printed, Outcome::Ok),
                    Err(error) => (String::new(), Outcome::Failed(format!("{error:#}"))),
                };
                (printed, Part { name, took: started.elapsed(), outcome })
            };
            beside.into_iter().map(run).collect::<Vec<_>>()
        });
        self.run(name, work);
        for (printed, part) in others.join().expect("a part that cannot be run says so and does not panic") {
            eprintln!("\n=== {}", part.name);
            println!("{printed}");
            self.note(part);
        }
    }

    /// Runs a part; whether it is ok.
    pub(crate) fn run(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>) -> bool {
        self.run_or_skip(name, || work().map(|()| Outcome::Ok))
    }

    /// Runs a part that may turn out not to be possible here; whether it is ok.
    pub(crate) fn run_or_skip(&mut self, name: &'static str, work: impl FnOnce() -> Result<Outcome>) -> bool {
        eprintln!("\n=== {name}");
        let started = Instant::now();
        let outcome = work().unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
        let is_ok = matches!(outcome, Outcome::Ok);
        self.note(Part { name, took: started.elapsed(), outcome });
        is_ok
    }

    fn note(&mut self, part: Part) {
        if let Outcome::Failed(reason) = &part.outcome {
            eprintln!("{}: {reason}", part.name);
        }
        self.parts.push(part);
    }

    /// Notes a part that is not run.
    pub(crate) fn skip(&mut self, name: &'static str, reason: &str) {
        self.parts.push(Part { name, took: Duration::ZERO, outcome: Outcome::Skipped(reason.into()) });
    }

    /// Prints the time table; fails with the names of the parts that failed.
    pub(crate) fn finish(self) -> Result<()> {
        println!("\n{}", self.table());
        let failed = |part: &&Part| matches!(part.outcome, Outcome::Failed(_));
        let failed: Vec<&str> = self.parts.iter().filter(failed).map(|part| part.name).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }

    fn table(&self) -> String {
        let mut table = format!("{:<22} {:>8}  result\n", "part", "seconds");
        for part in &self.parts {
            let result = match &part.outcome {
                Outcome::Ok => "ok".into(),
                Outcome::Skipped(reason) => format!("SKIPPED ({reason})"),
                Outcome::Failed(_) => "FAILED".into(),
            };
            table += &format!("{:<22} {:>8.1}  {result}\n", part.name, part.took.as_secs_f64());
        }
        table + &format!("{:<22} {:>8.1}", "total", self.began.elapsed().as_secs_f64())
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
    fn a_part_that_fails_beside_another_fails_the_whole() {
        let mut parts = Parts::default();
        let beside: Vec<Beside> =
            vec![("second", Box::new(|| Err(anyhow!("broken")))), ("third", Box::new(|| Ok("printed".into())))];
        parts.run_with("first", || Ok(()), beside);
        assert!(parts.table().contains("third"), "{}", parts.table());
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
