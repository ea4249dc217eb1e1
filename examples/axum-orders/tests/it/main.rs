//! Every order that was answered has one invoice and a confirmation, also when the service is told to stop, or killed, in the middle.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
mod program;
mod service;
