use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;
use std::ops::Range;

use anyhow::{Context, Result};

/// Below what Linux gives to outgoing connections, so that none of them takes the port of something that is stopped for a while.
const PORTS: Range<u16> = 20_000..32_000;

/// A port of the loopback interface on which nobody listens.
pub(crate) fn free_port() -> Result<u16> {
    let count = PORTS.end - PORTS.start;
    let first = u16::try_from(RandomState::new().hash_one(()) % u64::from(count)).expect("less than a u16");
    let mut ports = (0..count).map(|step| PORTS.start + (first + step) % count);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).context("every port is taken")
}
