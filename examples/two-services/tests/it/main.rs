//! Both services are killed at random moments, and every effect happens exactly once.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
mod killing;
