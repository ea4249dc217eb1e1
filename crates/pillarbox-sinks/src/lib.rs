//! Sinks of Pillarbox: where a subscription delivers to. One file and one feature each.
//!
//! | feature | sink | |
//! |---|---|---|
//! | `stdout` (default) | `Stdout` | CloudEvents, one JSON object a line |
//! | `file` (default) | `FileSink` | the same, appended to a file that several relays may share |
#[cfg(feature = "file")]
mod file;
#[cfg(any(feature = "file", feature = "stdout"))]
mod lines;
#[cfg(feature = "stdout")]
mod stdout;

#[cfg(feature = "file")]
pub use file::{FileSink, LOCK_WAIT_MAX, TAIL_BYTES_MAX};
#[cfg(feature = "stdout")]
pub use stdout::Stdout;
