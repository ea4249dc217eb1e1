//! The store suite on the log in memory, and on every broken variant of it; the sink suites on a receiver in
//! memory, and on every broken variant of its sink; the PostgreSQL servers and the proxy.
#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]
mod compile_errors;
mod crowd;
mod engine;
mod growth;
mod memory;
mod postgres;
mod proxy;
mod queue_engine;
mod relay;
mod simulation;
mod sinks;
mod suite;
