use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::args::{Args, Command, LogFormat};
use crate::output::no_color;

/// Starts logging on standard error. `PILLARBOX_LOG`, else `RUST_LOG`, else the flags decide how much.
pub(crate) fn start(args: &Args) {
    let named =
        ["PILLARBOX_LOG", "RUST_LOG"].iter().find_map(|name| std::env::var(name).ok().filter(|text| !text.is_empty()));
    let filter = named.unwrap_or_else(|| default_filter(args).to_owned());
    // A filter that cannot be read is no reason to run without a log.
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    let started = match args.log_format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal() && !no_color()).try_init(),
    };
    started.expect("nothing else sets a subscriber in this process");
}

fn default_filter(args: &Args) -> &'static str {
    let works = matches!(args.command, Command::Run(_));
    match (args.quiet, args.verbose, works) {
        (true, ..) => "error",
        (_, 0, true) => "info",
        (_, 0, false) => "warn",
        // Of Pillarbox: what its libraries say at these levels is about connections, and may hold what they send.
        (_, 1, _) => "info,pillarbox=debug",
        _ => "info,pillarbox=trace",
    }
}
