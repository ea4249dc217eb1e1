//! The SQLite store against real files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clients;
mod conformance;
mod fixture;
mod growth;
mod inbox;
mod journal;
mod operating;
mod order;
mod ownership;
mod premises;
mod publishing;
mod queue;
mod reading;
mod replaced;
mod retention;
mod schema;
mod transactional;
mod waking;
