use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How many open files a relay asks the system for. A connection is one, too.
const FILES_WANTED: u64 = 65_536;
/// The listener may use one of so many files, so that sinks and the database always find one.
const LISTENER_SHARE: u64 = 4;

/// Raises the soft limit of open files as far as the hard limit allows; what it is then.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(FILES_WANTED);
    if wanted <= current {
        return current;
    }
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::debug!(%error, limit = current, "the limit of open files cannot be raised");
            current
        }
    }
}

/// How many connections the listener may have of those that are wanted.
pub(crate) fn share(wanted: usize, files_max: u64) -> usize {
    let share = usize::try_from(files_max / LISTENER_SHARE).unwrap_or(usize::MAX);
    wanted.min(share).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_files_are_left_for_delivery() {
        assert_eq!(share(128, 65_536), 128);
        assert_eq!(share(128, 256), 64);
        assert_eq!(share(1, 256), 1);
        assert_eq!(share(128, 2), 1);
    }
}
