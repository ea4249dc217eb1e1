//! Real runs of the real binary, in directories of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking; helpers of tests do, too")]

mod audit;
mod change;
mod config;
mod demo;
mod exit;
mod http;
mod journal;
mod ledger;
mod migrate;
mod outage;
mod output;
mod place;
mod postgres;
mod publish;
mod queue;
mod receiver;
mod run;
mod secrets;
mod sinks;
mod sql;
mod status;
mod survive;
mod tail;
#[cfg(target_os = "linux")]
mod torture;
mod why;
