//! The conformance suite on every sink of this crate, and what each promises beside it.
#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]
mod chain;
#[cfg(any(feature = "http", feature = "kafka", feature = "postgres", feature = "redis"))]
mod chaos;
#[cfg(feature = "file")]
mod file;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "stdout")]
mod stdout;

#[cfg(any(feature = "file", feature = "stdout"))]
use std::path::PathBuf;

/// An example of this crate, which cargo builds with the tests and puts beside this test binary.
#[cfg(any(feature = "file", feature = "stdout"))]
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples");
    path.push(name);
    assert!(path.exists(), "{} is missing; build it with `cargo build -p pillarbox-sinks --examples`", path.display());
    path
}
