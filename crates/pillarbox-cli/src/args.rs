use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use pillarbox::admin::State;
use pillarbox::journal::{Expected, JOURNAL_TOPIC};
use pillarbox::{Filter, Start, Timestamp};
use uuid::Uuid;

use crate::config::{parse_listen, parse_start};
use crate::output::EXPLAIN;

/// The heading of what every command takes.
const GLOBAL: &str = "Global options";

/// Transactional outbox: events written in your own transaction, delivered to every subscription, none lost, each
/// key in order.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 schema not current or incompatible, 4 unhealthy, 5 audit found something
/// missing. `pillarbox explain` explains the terms.
#[derive(Debug, Parser)]
#[command(name = "pillarbox", version, max_term_width = 100)]
pub(crate) struct Args {
    /// The database, like sqlite:app.db or postgres://user@host/database; else DATABASE_URL, else the config file's
    #[arg(help_heading = GLOBAL, long, global = true, value_name = "URL")]
    pub(crate) database: Option<String>,

    /// The config file; else PILLARBOX_CONFIG, else ./pillarbox.toml
    #[arg(help_heading = GLOBAL, long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print data as JSON
    #[arg(help_heading = GLOBAL, long, global = true)]
    pub(crate) json: bool,

    /// Log more: every delivery (twice: every step of the relay). `why` tells which lane settled an event
    #[arg(help_heading = GLOBAL, short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Say nothing but errors
    #[arg(help_heading = GLOBAL, short, long, global = true)]
    pub(crate) quiet: bool,

    /// How the log on standard error is written
    #[arg(help_heading = GLOBAL, long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One object per line
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Watch it work on a temporary database, or in a schema of its own by --database: publishers, two relays, one
    /// killed, and an audit at the end
    Demo(DemoArgs),
    /// Create or upgrade the schema, or say what a copied database is
    Migrate(MigrateArgs),
    /// Run the relay with all subscriptions of the config, or print all events by --stdout
    Run(RunArgs),
    /// Publish one event, or one per line of standard input, and print the ids
    Publish(PublishArgs),
    /// Append to, read and list the streams of the journal
    #[command(subcommand)]
    Journal(JournalCommand),
    /// Show subscriptions, instances and problems
    #[command(after_help = EXPLAIN)]
    Status(StatusArgs),
    /// List events or deliveries
    #[command(after_help = EXPLAIN)]
    List(ListArgs),
    /// Show one event with its deliveries and attempts
    #[command(after_help = EXPLAIN)]
    Show(ShowArgs),
    /// Say why an event has or has not been delivered
    #[command(after_help = EXPLAIN)]
    Why(WhyArgs),
    /// Set dead or waiting deliveries back to due now, in log order
    Requeue(RequeueArgs),
    /// Reclaim queue work from dead or silent processes; for a monitor of your own
    Recover(RecoverArgs),
    /// Give one delivery up and unblock its key
    Skip(SkipArgs),
    /// Stop a subscription; survives restarts
    Pause(PauseArgs),
    /// Continue a paused subscription
    Resume(NameArgs),
    /// Replay a subscription from an earlier place
    Rewind(RewindArgs),
    /// List, delete, rename or relane subscriptions
    #[command(subcommand)]
    Subscription(SubscriptionCommand),
    /// Print the log, and go on with what is published later; starts 10 positions back
    Tail(TailArgs),
    /// Prove that a range was delivered
    Audit(AuditArgs),
    /// Apply retention now
    Prune(PruneArgs),
    /// Empty everything; for tests
    Reset(ResetArgs),
    /// Check every prerequisite, each with its fix
    #[command(after_help = EXPLAIN)]
    Doctor,
    /// Check or print the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Explain a term that commands, configuration or messages use
    Explain(ExplainArgs),
    /// Print a completion script
    Completions {
        /// For which shell
        shell: Shell,
    },
    /// One relay of the demo; it works until its standard input ends
    #[command(hide = true)]
    DemoRelay {
        /// Where its subscriptions write to
        #[arg(long)]
        directory: PathBuf,
    },
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DemoArgs {
    /// How long events are published
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) seconds: u64,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ExplainArgs {
    /// The term, like lane or hold; without it all terms
    pub(crate) word: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct MigrateArgs {
    /// Only say whether the schema is current (exit 3 if not)
    #[arg(long, group = "action")]
    pub(crate) check: bool,
    /// Print the SQL, in the language of the named database, without connecting to it
    #[arg(long, group = "action")]
    pub(crate) print: bool,
    /// Print the SQL of the roles and grants
    #[arg(long, group = "action")]
    pub(crate) print_roles: bool,
    /// Let publishing wake a sleeping relay (on) or not (off)
    #[arg(long, value_enum, value_name = "on|off", conflicts_with_all = ["check", "print_roles"])]
    pub(crate) doorbell: Option<Switch>,
    /// This restored or moved database is the log itself: go on
    #[arg(long, group = "action")]
    pub(crate) adopt: bool,
    /// This is a copy: give it a new identity and deliver nothing old
    #[arg(long, group = "action")]
    pub(crate) fresh: bool,
    /// Do so although the log is at home: what it has not delivered yet is given up
    #[arg(long, requires = "fresh")]
    pub(crate) yes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RunArgs {
    /// Deliver what can be delivered now, then exit
    #[arg(long)]
    pub(crate) until_idle: bool,
    /// Print all events, from the beginning of the log, in place of the config's subscriptions; nothing of it is left at the end
    #[arg(long)]
    pub(crate) stdout: bool,
    /// Where health checks and metrics listen, or off
    #[arg(long, value_name = "ADDRESS", value_parser = Listen::parse)]
    pub(crate) listen: Option<Listen>,
}

/// An address to listen on, or none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listen(pub(crate) Option<std::net::SocketAddr>);

impl Listen {
    fn parse(text: &str) -> Result<Self, String> {
        parse_listen(text).map(Listen)
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PublishArgs {
    /// What the event is about
    #[arg(long)]
    pub(crate) topic: String,
    /// What happened
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) event_type: String,
    /// What order is kept by
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// A header; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_header)]
    pub(crate) header: Vec<(String, String)>,
    /// Deliver after this time from now
    #[arg(long, value_parser = pillarbox_sinks::duration::parse, conflicts_with = "deliver_at")]
    pub(crate) delay: Option<Duration>,
    /// Deliver at this time, like 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) deliver_at: Option<Timestamp>,
    /// Publish nothing if this was seen for the topic and key inside the window
    #[arg(long, value_name = "KEY", conflicts_with = "ndjson")]
    pub(crate) dedup_key: Option<String>,
    /// The payload is bytes of this media type
    #[arg(long, value_name = "TYPE", conflicts_with = "ndjson")]
    pub(crate) content_type: Option<String>,
    /// Publish every line of standard input, each a JSON payload
    #[arg(long, conflicts_with = "payload")]
    pub(crate) ndjson: bool,
    /// JSON, or - for standard input; nothing: an event without a payload
    #[arg(allow_negative_numbers = true)]
    pub(crate) payload: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Append one event to a stream, or every line of standard input, and print the stream's new version
    Append(AppendArgs),
    /// Print the events of a stream, one JSON object per line
    Read(ReadArgs),
    /// List streams with their versions
    Streams(StreamsArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct AppendArgs {
    /// The stream; it becomes the key of its events
    pub(crate) stream: String,
    /// What happened
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) event_type: String,
    /// The version that the stream must have, or new; else any
    #[arg(long, value_name = "VERSION", value_parser = parse_expected)]
    pub(crate) expect: Option<Expected>,
    /// The topic of the stream
    #[arg(long, default_value = JOURNAL_TOPIC)]
    pub(crate) topic: String,
    /// A header; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_header)]
    pub(crate) header: Vec<(String, String)>,
    /// The payload is bytes of this media type
    #[arg(long, value_name = "TYPE", conflicts_with = "ndjson")]
    pub(crate) content_type: Option<String>,
    /// Append every line of standard input, each a JSON payload, in one transaction
    #[arg(long, conflicts_with = "payload")]
    pub(crate) ndjson: bool,
    /// JSON, or - for standard input; nothing: an event without a payload
    #[arg(allow_negative_numbers = true)]
    pub(crate) payload: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ReadArgs {
    /// The stream
    pub(crate) stream: String,
    /// From this version on
    #[arg(long, value_name = "VERSION", default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) from: i64,
    /// At most this many
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StreamsArgs {
    /// Only streams whose names begin so
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
    /// Only streams behind this name
    #[arg(long, value_name = "STREAM")]
    pub(crate) after: Option<String>,
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StatusArgs {
    /// Exit 4 with the reason if something is unhealthy
    #[arg(long)]
    pub(crate) check: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ListArgs {
    /// As seen by this subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: Option<String>,
    /// Only in this state: pending, delayed, processing, retrying, blocked or dead
    #[arg(long, value_parser = parse_state)]
    pub(crate) state: Option<State>,
    /// Only this key
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Only this topic, or those that begin like this: billing.*
    #[arg(long, value_parser = parse_pattern)]
    pub(crate) topic: Option<String>,
    /// Only with this correlation id
    #[arg(long, value_name = "ID")]
    pub(crate) correlation_id: Option<String>,
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ShowArgs {
    /// The event's id
    #[arg(value_parser = parse_id)]
    pub(crate) id: Uuid,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct WhyArgs {
    /// The event's id
    #[arg(value_parser = parse_id)]
    pub(crate) id: Uuid,
    /// Only for this subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfirmArgs {
    /// Do it without asking
    #[arg(long)]
    pub(crate) yes: bool,
    /// Only say what would be done
    #[arg(long, conflicts_with = "yes")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ResetArgs {
    /// Needed to empty it: nothing is asked
    #[arg(long)]
    pub(crate) yes: bool,
    /// Only say what would be emptied
    #[arg(long, conflicts_with = "yes")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, ClapArgs)]
#[group(id = "which", required = true, multiple = false, args = ["event", "stream", "key", "all"])]
pub(crate) struct RequeueArgs {
    /// The subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: String,
    /// One event
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    pub(crate) event: Option<Uuid>,
    /// One version of a journal stream
    #[arg(long, requires = "version_number")]
    pub(crate) stream: Option<String>,
    /// The version
    #[arg(id = "version_number", long = "version", value_name = "N", requires = "stream")]
    pub(crate) version: Option<i64>,
    /// The dead ones of a key
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// All dead ones
    #[arg(long)]
    pub(crate) all: bool,
    /// At most this many
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    #[command(flatten)]
    pub(crate) confirm: ConfirmArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RecoverArgs {
    /// Only of this subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: Option<String>,
    /// Only what this instance works on; `pillarbox status` shows the instances
    #[arg(long, value_name = "N")]
    pub(crate) instance: Option<i64>,
    /// Only from instances that have given no sign of life for this long, by the database's clock. 0s: from all, also from those
    /// that are well and go on working
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = pillarbox_sinks::duration::parse)]
    pub(crate) silent_for: Duration,
    #[command(flatten)]
    pub(crate) confirm: ConfirmArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct SkipArgs {
    /// The subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: String,
    /// The event
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    pub(crate) event: Uuid,
    /// Why; kept with the event
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct NameArgs {
    /// The subscription
    #[arg(value_name = "SUBSCRIPTION")]
    pub(crate) name: String,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PauseArgs {
    /// The subscription
    #[arg(value_name = "SUBSCRIPTION")]
    pub(crate) name: String,
    /// Why; shown until it is resumed
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RewindArgs {
    /// The subscription
    #[arg(value_name = "SUBSCRIPTION")]
    pub(crate) name: String,
    /// Replay what lies above this position, was inserted since this time, or everything (start)
    #[arg(long, value_name = "POSITION|TIME|start", value_parser = parse_target)]
    pub(crate) to: Start,
    /// Only this key
    #[arg(long)]
    pub(crate) key: Option<String>,
    #[command(flatten)]
    pub(crate) confirm: ConfirmArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SubscriptionCommand {
    /// All subscriptions; one that no relay runs is shown as orphaned with what it holds, or as no relay if nothing waits for it
    List,
    /// Remove a subscription that no relay runs, with its deliveries
    Delete {
        #[command(flatten)]
        name: NameArgs,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Rename a subscription that no relay runs
    Rename {
        /// The old name
        from: String,
        /// The new name
        to: String,
    },
    /// Change the number of lanes of a paused and quiet subscription
    Relane {
        #[command(flatten)]
        name: NameArgs,
        /// The new number
        #[arg(long)]
        lanes: u32,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
}

#[derive(Debug, ClapArgs)]
pub(crate) struct TailArgs {
    /// Only this topic, or those that begin like this: billing.*
    #[arg(long, value_parser = parse_pattern)]
    pub(crate) topic: Option<String>,
    /// Only this key
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Begin after this resume token or position; without it, 10 positions before the end of the log
    #[arg(long, value_name = "TOKEN|POSITION")]
    pub(crate) from: Option<String>,
    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
    /// End at the end of the log
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// One short line an event in place of its CloudEvents object; with --json a short object
    #[arg(long)]
    pub(crate) short: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct AuditArgs {
    /// Only this subscription
    #[arg(long, value_name = "NAME")]
    pub(crate) subscription: Option<String>,
    /// From this position on
    #[arg(long, value_name = "POSITION")]
    pub(crate) from: Option<i64>,
    /// Up to this position
    #[arg(long, value_name = "POSITION")]
    pub(crate) to: Option<i64>,
    /// What the receiver got: ids or the file sink's lines; - for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) received: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct PruneArgs {
    /// Remove events older than this that every subscription has passed, in place of retention.keep
    #[arg(long, value_parser = pillarbox_sinks::duration::parse)]
    pub(crate) keep: Option<Duration>,
    /// Only say what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Also remove what no subscription has received, from a log without subscriptions, and drop what a `hold` that is over keeps no longer
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) yes: bool,
}

#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum ConfigCommand {
    /// List everything that is wrong (exit 1 if something is)
    Check,
    /// Print the effective config, secrets masked, as TOML
    Print,
}

/// As in the `topics` of a subscription.
fn parse_pattern(text: &str) -> Result<String, String> {
    let filter = Filter { topics: vec![text.to_owned()], types: Vec::new() };
    filter.validate().map(|()| text.to_owned()).map_err(|error| error.to_string())
}

fn parse_id(text: &str) -> Result<Uuid, String> {
    Uuid::try_parse(text).map_err(|_| {
        "an event's id is a uuid like 018f3c5e-8f7a-7c3b-9d2e-0123456789ab; look for it with `pillarbox list`"
            .to_owned()
    })
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|error: pillarbox::Error| error.to_string())
}

fn parse_state(text: &str) -> Result<State, String> {
    let names = || State::ALL.map(State::name).join(", ");
    State::from_name(text).ok_or_else(|| format!("the states are {}", names()))
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write a header as NAME=VALUE".to_owned()),
    }
}

fn parse_expected(text: &str) -> Result<Expected, String> {
    match text.parse() {
        _ if text == "new" => Ok(Expected::New),
        Ok(version @ 0..) => Ok(Expected::Version(version)),
        _ => Err("write a version, as `pillarbox journal append` printed it, or new".to_owned()),
    }
}

fn parse_target(text: &str) -> Result<Start, String> {
    match parse_start(text) {
        Ok(Start::Now) => Err("a rewind goes back; name a position, a time, or start".to_owned()),
        Ok(start) => Ok(start),
        // The words of a config, which the error of this parser names, are more.
        Err(_) => Err(format!(
            "'{text}' is not a place in the log; write start, a position, or a time like 2026-01-31T12:00:00Z"
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }
}
