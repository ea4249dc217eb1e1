//! The SQLite store against real files.

mod fixture;
mod operating;
mod ownership;
mod premises;
mod publishing;
mod reading;
mod retention;
mod schema;
mod waking;
