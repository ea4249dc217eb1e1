mod ephemeral;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use pillarbox::admin::{Operator, PausedBy, SubscriptionStatus};
use pillarbox::sink::Sink;
use pillarbox::store::Report;
use pillarbox::{Relay, Subscription};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::{info, warn};

use self::ephemeral::Ephemeral;
use super::Scope;
use crate::args::RunArgs;
use crate::config::Config;
use crate::database::Database;
use crate::exit::{Exit, Stop};
use crate::http::{self, Health, Part};
use crate::log::{Limits, Log};
use crate::open_files;
use crate::patience::Patience;
use crate::recorder::Recorder;
use crate::sink;

/// A relay may be started before its database is; for this long it waits for it. A script's relay does not wait.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How often the listener learns whether the relay takes part.
const PART_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the relay until it is idle or told to stop.
pub(super) async fn run(scope: &Scope, args: &RunArgs) -> Result<Exit> {
    let database = scope.database()?;
    info!(database = database.place(), "database");
    let mut config = scope.config()?;
    if let Some(listen) = args.listen {
        config.http.listen = listen.0;
        config.http.check().map_err(Stop::usage)?;
    }
    let ephemeral = args.stdout.then(Ephemeral::new);
    refuse_nothing(scope, &config, args)?;
    if let (Some(problem), false) = (sink::into_the_log(&config, &database).into_iter().next(), args.stdout) {
        return Err(Stop::with(Exit::Failed, problem.to_string()));
    }
    if !args.stdout {
        say_destinations(&config);
    }
    let files_max = open_files::raise_limit();
    let health = Health::new(Recorder::install()?, config.relay.lease_ttl / 2);
    let mut background = JoinSet::new();
    if !args.until_idle {
        listen(&config, files_max, &health, &mut background).await?;
    }
    let mut signals = Signals::new()?;
    let closed = Arc::new(Notify::new());
    let patience = || Patience::new(if args.until_idle { Duration::ZERO } else { START_PATIENCE });
    let prepared = tokio::select! {
        prepared = patience().while_passing(async || prepare(&database, &config, ephemeral.as_ref(), &closed).await) => prepared?,
        name = signals.next() => return Ok(gone_before_start(name)),
    };
    let (operator, plan) = prepared;
    if !args.until_idle {
        let operator = operator.clone();
        background.spawn(health.clone().refresh(move || {
            let operator = operator.clone();
            async move { operator.status().await }
        }));
    }
    let relay = tokio::select! {
        relay = patience().while_passing(async || start(&database, &config, &plan).await) => relay?,
        name = signals.next() => return Ok(gone_before_start(name)),
    };
    info!(instance = relay.instance().0, "relay started");
    health.set_part(Part::of(&relay));
    let new = say_new(created(&relay), operator.clone());
    // Counting a large log takes its time, and nobody has to wait for it but a script that reads what it says.
    if args.until_idle {
        new.await
    } else {
        drop(background.spawn(new))
    }
    let names: Vec<&str> = plan.iter().map(|(subscription, _)| subscription.name.as_str()).collect();
    let Some(report) = work(relay, signals, &closed, &health, args.until_idle).await? else { return Ok(Exit::Failed) };
    let status = if args.until_idle { Some(operator.status().await) } else { None };
    if let Some(ephemeral) = &ephemeral {
        ephemeral.remove(&operator).await;
    }
    if let Some(status) = status {
        undelivered(&report)?;
        let all = status?.subscriptions;
        let own: Vec<&SubscriptionStatus> = all.iter().filter(|one| names.contains(&one.name.as_str())).collect();
        paused_by_receiver(&own)?;
        refused(&own)?;
    }
    Ok(Exit::Done)
}

/// One line a subscription, so that a log shows what this relay was told to do.
fn say_destinations(config: &Config) {
    for subscription in &config.subscriptions {
        let (kind, destination) = (subscription.sink.kind.name, subscription.sink.destination());
        info!(subscription = subscription.name, sink = kind, destination, "subscription");
    }
}

/// What a relay delivers, and to where.
type Plan = Vec<(Subscription, Arc<dyn Sink>)>;

/// What has to be read and written before a relay can start.
async fn prepare(
    database: &Database,
    config: &Config,
    ephemeral: Option<&Ephemeral>,
    closed: &Arc<Notify>,
) -> Result<(Arc<Log>, Plan)> {
    let operator = Arc::new(database.open().await?);
    store_limits(config, &operator).await?;
    let status = operator.status().await?;
    ephemeral::remove_left_over(&operator, &status).await;
    let source = format!("urn:pillarbox:{}", status.log.log_id);
    let plan = match ephemeral {
        Some(ephemeral) => vec![ephemeral.plan(config, &source, closed)?],
        None => plan(config, &source, closed)?,
    };
    Ok((operator, plan))
}

async fn start(database: &Database, config: &Config, plan: &Plan) -> Result<Relay> {
    let mut builder = Relay::builder(database.open().await?).config(config.relay());
    for (subscription, sink) in plan {
        builder = builder.subscribe(subscription.clone(), sink.clone());
    }
    builder.start().await.map_err(|error| database.explain(error))
}

fn gone_before_start(signal: &str) -> Exit {
    info!(signal, "ended before it had started");
    Exit::Done
}

/// What the config says of the whole log holds for all other programs that work on it, without this config.
async fn store_limits(config: &Config, operator: &Log) -> Result<()> {
    let (dedup, retention) = (&config.dedup, &config.retention);
    let limits = Limits {
        dedup_window: dedup.written.then_some(dedup.window),
        retention_keep: retention.keep_written.then_some(retention.keep),
        retention_dead: retention.dead_written.then_some(retention.dead),
        retention_inbox: retention.inbox_written.then_some(retention.inbox),
    };
    Ok(operator.set_limits(limits).await?)
}

/// Lets the relay work until something ends it, then ends it cleanly. None: it was stopped at once.
async fn work(
    relay: Relay,
    mut signals: Signals,
    closed: &Notify,
    health: &Health,
    until_idle: bool,
) -> Result<Option<Report>> {
    tokio::select! {
        result = relay.until_idle(), if until_idle => result?,
        () = watch(&relay, health) => {}
        name = signals.next() => info!(signal = name, "draining; a second signal stops at once"),
        () = closed.notified() => info!("standard output was closed; draining"),
        error = relay.failed() => return Err(anyhow::Error::new(error).context("the relay ended")),
    }
    health.set_part(Part::Draining);
    let report = relay.report();
    tokio::select! {
        result = relay.drain() => result.context("could not drain")?,
        _ = signals.next() => {
            warn!("stopped at once; what was in flight comes again");
            return Ok(None);
        }
    }
    info!("drained");
    Ok(Some(report))
}

/// Tells the listener whether this relay takes part: it does not while it has lost the database.
async fn watch(relay: &Relay, health: &Health) {
    loop {
        health.set_part(Part::of(relay));
        tokio::time::sleep(PART_INTERVAL).await;
    }
}

/// A script that waits for everything to be delivered must learn that a sink did not take it.
fn undelivered(report: &Report) -> Result<()> {
    for (name, subscription) in &report.subscriptions {
        if let Some(breaker) = &subscription.breaker {
            let error = &breaker.error;
            return Err(Stop::with(
                Exit::Failed,
                format!("subscription '{name}' could not deliver, its sink is down, and the events wait: {error}"),
            ));
        }
        if let Some(reason) = &subscription.stopped {
            return Err(Stop::with(Exit::Failed, format!("subscription '{name}' was stopped by a limit: {reason}")));
        }
    }
    Ok(())
}

/// Nor did a receiver take what waits since it paused its subscription, in an earlier run perhaps. What an operator paused is
/// meant to wait.
fn paused_by_receiver(own: &[&SubscriptionStatus]) -> Result<()> {
    for one in own {
        let waiting = one.pending + one.processing + one.retrying + one.blocked;
        if one.paused_by != Some(PausedBy::Receiver) || waiting == 0 {
            continue;
        }
        let name = &one.name;
        let reason = one.paused_reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let wait = if waiting == 1 { "1 event waits".to_owned() } else { format!("{waiting} events wait") };
        return Err(Stop::with(
            Exit::Failed,
            format!(
                "subscription '{name}' was paused by its receiver{reason}, and {wait}; run `pillarbox resume {name}` once the \
                 receiver takes events again"
            ),
        ));
    }
    Ok(())
}

/// Nor did a sink take what it refused, in this run or an earlier one, and what is behind that. What an operator paused is meant to
/// wait, and so is what waits for its time.
fn refused(own: &[&SubscriptionStatus]) -> Result<()> {
    let fails = |one: &&&SubscriptionStatus| one.paused_by != Some(PausedBy::Operator) && one.dead + one.retrying > 0;
    let told: Vec<String> = own.iter().filter(fails).map(|one| tell_refused(one)).collect();
    if told.is_empty() { Ok(()) } else { Err(Stop::with(Exit::Failed, told.join("; "))) }
}

fn tell_refused(one: &SubscriptionStatus) -> String {
    let name = &one.name;
    let counts = [(one.dead, "dead"), (one.retrying, "retrying"), (one.blocked, "blocked behind them")];
    let counts: Vec<String> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, state)| format!("{count} {state}")).collect();
    let counts = counts.join(", ");
    format!(
        "the sink of subscription '{name}' did not take all events: {counts}; see `pillarbox list --subscription {name}`"
    )
}

/// A relay without subscriptions would do nothing and look well, most often because it was started in another folder than that of its
/// config.
fn refuse_nothing(scope: &Scope, config: &Config, args: &RunArgs) -> Result<()> {
    if args.stdout || !config.subscriptions.is_empty() {
        return Ok(());
    }
    let why = match scope.load_config()?.file {
        Some(file) => format!("the config in {} has no [[subscription]]", file.display()),
        None => "there is no config file: ./pillarbox.toml does not exist here, and neither --config nor PILLARBOX_CONFIG names one"
            .to_owned(),
    };
    Err(Stop::usage(format!(
        "{why}, so there is nothing to deliver; add a [[subscription]] with a sink, or print all events with `pillarbox run --stdout`"
    )))
}

/// What this relay runs: the config's subscriptions.
fn plan(config: &Config, source: &str, closed: &Arc<Notify>) -> Result<Plan> {
    let built = config.subscriptions.iter().map(|settings| {
        let sink = sink::build(&settings.sink, source, closed);
        sink.map(|sink| (settings.engine(), sink)).with_context(|| format!("subscription '{}'", settings.name))
    });
    built.collect()
}

async fn listen(config: &Config, files_max: u64, health: &Arc<Health>, background: &mut JoinSet<()>) -> Result<()> {
    let Some(address) = config.http.listen else { return Ok(()) };
    let listener = http::bind(address).await?;
    let bound = listener.local_addr()?;
    if bound.port() != address.port() && address.port() != 0 {
        warn!(wanted = %address, listen = %bound, "the port is taken; listening on the next free one");
    } else {
        info!(listen = %bound, "listening");
    }
    let (health, connections_max) = (health.clone(), open_files::share(config.http.connections_max, files_max));
    background.spawn(async move {
        http::serve(listener, health, connections_max).await;
    });
    Ok(())
}

/// A new subscription may be about to deliver years of events: the log says so before the receiver does.
async fn say_new(created: Vec<String>, operator: Arc<Log>) {
    if created.is_empty() {
        return;
    }
    let status = match operator.status().await {
        Ok(status) => status,
        Err(error) => return warn!(%error, "cannot say what a new subscription will get"),
    };
    for subscription in status.subscriptions.iter().filter(|one| created.contains(&one.name)) {
        // What was delivered since the start was to be delivered at the start, too.
        let events = subscription.pending + subscription.processing + subscription.report.delivered;
        info!(subscription = subscription.name, floor = subscription.floor, events, "new subscription");
    }
}

/// The subscriptions that this relay has made.
fn created(relay: &Relay) -> Vec<String> {
    relay.subscriptions().iter().filter(|view| view.created).map(|view| view.name.clone()).collect()
}

/// The signals that end a relay.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// None: the process is to outlive the terminal, as `nohup` does.
    hangup: Option<Signal>,
}

impl Signals {
    fn new() -> Result<Self> {
        let hangup = if ignores_hangup() { None } else { Some(signal(SignalKind::hangup())?) };
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Signals { terminate, interrupt, hangup })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            () = received(self.hangup.as_mut()) => "SIGHUP",
        }
    }
}

async fn received(signal: Option<&mut Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Whether the process was started with SIGHUP ignored. Where the system does not tell, it was not.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // The lowest bit is signal 1, which is SIGHUP.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
