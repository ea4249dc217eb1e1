//! The tests of the PostgreSQL store, on private servers of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod alarms;
mod bell_model;
mod beside_relays;
mod clients;
mod commits;
mod conformance;
mod cut_off;
mod doctor;
mod fixture;
mod growth;
mod home;
mod inbox;
mod journal;
mod leaves;
mod limits;
mod mutants;
mod operating;
mod order;
mod ownership;
mod pools;
mod publishing;
mod queue;
mod queue_relay;
mod reading;
mod retention;
mod rewinding;
mod roles;
mod schema;
mod stalls;
mod stress;
mod transactional;
mod waking;
mod why;
