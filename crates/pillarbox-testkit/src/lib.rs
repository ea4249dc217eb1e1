//! What Pillarbox's own tests are made of: an in-memory store with late commits, aborts and power losses, real
//! PostgreSQL servers and a proxy that fails on demand, the conformance suites of the seams, and an auditor that shares no
//! code with the engine.
mod auditor;
mod blindfold;
mod broken;
pub mod by_hand;
mod certificate;
mod drive;
mod folder_guard;
pub mod growth;
pub mod http_receiver;
pub mod loopback;
mod memory_change;
mod memory_fixture;
mod memory_journal;
mod memory_lane;
mod memory_log;
mod memory_operator;
mod memory_poll;
mod memory_queue;
mod memory_receiver;
mod memory_snapshot;
mod memory_store;
pub mod order;
mod patience;
pub mod postgres;
/// A TCP proxy that fails on demand.
pub mod proxy;
pub mod redis;
mod simulation;
pub mod sink_chaos;
/// The conformance suite of the [`Sink`](pillarbox::sink::Sink) seam.
pub mod sink_suite;
mod statements;
/// The conformance suite of the [`Store`](pillarbox::store::Store) seam.
pub mod store_suite;

pub use auditor::{Committed, UnreadableLine, Verdict};
pub use blindfold::{Blindfold, BlindfoldKnot};
pub use broken::Broken;
pub use drive::{Driver, Sent};
pub use http_receiver::{HttpAnswer, HttpReceiver, HttpRequest};
pub use memory_fixture::MemoryFixture;
pub use memory_log::{MemoryLog, MemoryOptions, Tx};
pub use memory_poll::PollSteps;
pub use memory_receiver::{BrokenSink, MemoryReceiver};
pub use memory_store::MemoryStore;
pub use patience::eventually;
pub use simulation::{BrokenShell, BrokenWords, Plan, Run, simulate, simulate_poison};
pub use statements::check_statements;
