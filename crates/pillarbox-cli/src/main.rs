//! The `pillarbox` command: the relay beside any application, and everything an operator does with a log.

mod args;
mod command;
mod config;
mod database;
mod demo;
mod exit;
mod http;
mod log;
mod logging;
mod open_files;
mod output;
mod patience;
mod recorder;
mod secret;
mod sink;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use crate::args::Args;

fn main() -> ExitCode {
    let args = Args::try_parse().unwrap_or_else(|error| exit::refuse(&error));
    let json = args.json;
    logging::start(&args);
    sink::log_panics();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = runtime.context("cannot start the runtime").and_then(|runtime| {
        let result = runtime.block_on(command::run(args));
        // A thread that is blocked on standard input must not keep the process alive.
        runtime.shutdown_background();
        result
    });
    exit::finish(result, json)
}
