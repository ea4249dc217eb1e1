use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use crate::Result;

/// The first argument of a process that makes one measurement.
pub(crate) const CHILD: &str = "measure";

/// Runs the program: as one measurement, or as what makes all of them.
pub(crate) fn run(child: fn(&[String]) -> Result<()>, parent: fn(&[String]) -> Result<()>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.first().map(String::as_str) {
        Some(CHILD) => child(&arguments[1..]),
        _ => parent(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a measurement found, by name.
#[derive(Default)]
pub(crate) struct Figures(BTreeMap<String, f64>);

impl Figures {
    pub(crate) fn with(mut self, name: &str, value: f64) -> Self {
        self.0.insert(name.into(), value);
        self
    }
}

impl std::ops::Index<&str> for Figures {
    type Output = f64;

    fn index(&self, name: &str) -> &f64 {
        self.0.get(name).unwrap_or(&f64::NAN)
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&self.0).expect("numbers by name are JSON"))
    }
}

/// Runs one measurement in a process of its own.
pub(crate) fn measure(name: &str, path: &Path, count: usize) -> Result<Figures> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(CHILD).arg(name).arg(path).arg(count.to_string()).stderr(Stdio::inherit());
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("the measurement '{name}' failed: {}", output.status).into());
    }
    let figures = serde_json::from_slice(&output.stdout)?;
    let figures = Figures(figures);
    eprintln!("  {name}: {figures}");
    Ok(figures)
}

/// The highest resident memory of this process, in MiB.
pub(crate) fn peak_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("/proc/self/status has no VmHWM")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// The processor time of this process so far, in seconds.
pub(crate) fn cpu_seconds() -> Result<f64> {
    /// What Linux counts `utime` and `stime` in, on every architecture that Rust knows.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, after_name) = stat.rsplit_once(')').ok_or("/proc/self/stat has no name")?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let (utime, stime): (f64, f64) = (fields[11].parse()?, fields[12].parse()?);
    Ok((utime + stime) / TICKS_PER_SECOND)
}
