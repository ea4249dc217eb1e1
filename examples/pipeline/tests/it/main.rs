//! Every mention reaches its person exactly once and in order: when many post at once, when positions are committed out of order,
//! when somebody is not there, and when processes crash.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
mod absent;
mod crash;
mod everybody;
mod guide;
mod late_commit;
mod place;
mod program;
