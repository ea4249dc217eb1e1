//! The tests of the PostgreSQL store, on private servers of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod alarms;
mod beside_relays;
mod clients;
mod conformance;
mod doctor;
mod fixture;
mod home;
mod leaves;
mod mutants;
mod operating;
mod order;
mod ownership;
mod publishing;
mod reading;
mod retention;
mod rewinding;
mod roles;
mod schema;
mod stalls;
mod stress;
mod waking;
mod why;
