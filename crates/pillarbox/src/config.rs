pub use crate::engine::{EngineConfig, Recovery, RecoveryProfile};
