use std::fs::read_to_string;

use crate::Result;

/// What Linux counts the times of `/proc/PID/stat` in, on every architecture that Rust knows.
const TICKS_PER_SECOND: f64 = 100.0;

/// What `/proc/PID/schedstat` counts in.
const NANOSECONDS_PER_SECOND: f64 = 1e9;

/// The processor time of a process so far, in seconds: `utime` and `stime` together, but to the nanosecond where the kernel tells it.
/// A backend works for less than a tick in many a slice.
pub(crate) fn seconds(pid: i32) -> Result<f64> {
    let precise = read_to_string(format!("/proc/{pid}/schedstat")).ok();
    let nanoseconds = precise.as_deref().and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| Ok(Stat::of(pid)?.seconds), |nanoseconds| Ok(nanoseconds / NANOSECONDS_PER_SECOND))
}

/// What `/proc/PID/stat` says of a process.
pub(crate) struct Stat {
    pub(crate) parent: i32,
    /// Its processor time so far.
    pub(crate) seconds: f64,
    /// The processor time of its children that have ended.
    pub(crate) ended_children_seconds: f64,
}

impl Stat {
    pub(crate) fn of(pid: i32) -> Result<Stat> {
        let stat = read_to_string(format!("/proc/{pid}/stat"))?;
        // The name may have blanks.
        let (_, rest) = stat.rsplit_once(')').ok_or("a process has no name")?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let [_, parent, _, _, _, _, _, _, _, _, _, utime, stime, cutime, cstime, ..] = fields[..] else {
            return Err("a process has no times".into());
        };
        let seconds = |user: &str, system: &str| -> Result<f64> {
            Ok((user.parse::<f64>()? + system.parse::<f64>()?) / TICKS_PER_SECOND)
        };
        let (own, ended) = (seconds(utime, stime)?, seconds(cutime, cstime)?);
        Ok(Stat { parent: parent.parse()?, seconds: own, ended_children_seconds: ended })
    }
}
