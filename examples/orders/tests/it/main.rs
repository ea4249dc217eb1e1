//! The tests that a service with Pillarbox would have, and the scripts of the other languages.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
mod scripts;
mod shop;
