//! Ports of the loopback interface for servers that are stopped and started again on the same one, which port 0 cannot promise.
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

/// Below what Linux gives to outgoing connections, so that none of them takes the port of something that is stopped for a while.
const PORTS: Range<u16> = 20_000..32_000;

/// How many ports a server tries before it gives up: processes that are no tests may take one between the choice and the start.
pub(crate) const PORTS_TRIED_MAX: usize = 5;

/// The files that stand for the ports of this process, locked until it ends.
static CLAIMS: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A port on which nobody listens, and which no other test takes as long as this process lives.
pub fn free_port() -> Result<u16> {
    let count = PORTS.end - PORTS.start;
    let first = u16::try_from(RandomState::new().hash_one(()) % u64::from(count)).expect("less than a u16");
    let mut ports = (0..count).map(|step| PORTS.start + (first + step) % count);
    // The claim comes first: looking whether a port is free takes it for a moment from whoever restarts there.
    ports.find(|port| claim(*port) && TcpListener::bind(("127.0.0.1", *port)).is_ok()).context("every port is taken")
}

/// Whether no other test has claimed the port. Where there are no such files, as in a folder of another user, it is only looked for.
fn claim(port: u16) -> bool {
    let folder = std::env::temp_dir().join("pillarbox-test-ports");
    let _ = std::fs::create_dir_all(&folder);
    let Ok(file) = File::create(folder.join(port.to_string())) else { return true };
    if file.try_lock().is_err() {
        return false;
    }
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    true
}

/// Starts something on a free port, and on another one if the first was taken meanwhile.
pub(crate) fn on_free_port<T>(mut start: impl FnMut(u16) -> Result<T>) -> Result<T> {
    let mut tried = 1;
    loop {
        let taken = |error: &anyhow::Error| {
            let io = error.downcast_ref::<std::io::Error>();
            io.is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
        };
        match start(free_port()?) {
            Err(error) if tried < PORTS_TRIED_MAX && taken(&error) => tried += 1,
            started => return started,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once() {
        let ports: std::collections::HashSet<u16> = (0..50).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 50);
    }

    #[test]
    fn a_port_that_was_taken_meanwhile_is_left_alone() {
        let mut taken = Vec::new();
        let listener = on_free_port(|port| {
            if taken.len() < 2 {
                taken.push(TcpListener::bind(("127.0.0.1", port)).unwrap());
            }
            Ok(TcpListener::bind(("127.0.0.1", port))?)
        });
        assert!(
            !taken.iter().any(|other| other.local_addr().unwrap() == listener.as_ref().unwrap().local_addr().unwrap())
        );
    }
}
