use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use pillarbox::{Operator, PausedBy, Relay, Report, Sink, Subscription, SubscriptionStatus};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use super::Scope;
use crate::args::RunArgs;
use crate::config::{Config, SinkSettings};
use crate::database::Database;
use crate::exit::{Exit, Stop, chain};
use crate::http::{self, Health};
use crate::log::{Limits, Log};
use crate::patience::Patience;
use crate::recorder::Recorder;
use crate::sink;

/// A relay may be started before its database is; for this long it waits for it. A script's relay does not wait.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How often the listener learns whether the relay takes part.
const READY_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the relay until it is idle or told to stop.
pub(super) async fn run(scope: &Scope, args: &RunArgs) -> Result<Exit> {
    let database = scope.database()?;
    info!(database = database.place(), "database");
    let mut config = scope.config()?;
    if let Some(listen) = args.listen {
        config.http.listen = listen.0;
        config.http.check().map_err(Stop::usage)?;
    }
    say_destinations(&config);
    let mut signals = Signals::new()?;
    let closed = Arc::new(Notify::new());
    let patience = || Patience::new(if args.until_idle { Duration::ZERO } else { START_PATIENCE });
    let prepared = tokio::select! {
        prepared = patience().while_passing(async || prepare(&database, &config, &closed).await) => prepared?,
        name = signals.next() => return Ok(gone_before_start(name)),
    };
    let (operator, plan) = prepared;
    let health = Health::new(operator.clone(), Recorder::install()?);
    let mut background = JoinSet::new();
    if !args.until_idle {
        listen(&config, &health, &mut background).await?;
    }
    let relay = tokio::select! {
        relay = patience().while_passing(async || start(&database, &config, &plan).await) => relay?,
        name = signals.next() => return Ok(gone_before_start(name)),
    };
    info!(instance = relay.instance().0, "relay started");
    if let Err(error) = say_new(&relay, &operator).await {
        warn!(error = chain(&error), "cannot say what a new subscription will get");
    }
    let names: Vec<&str> = plan.iter().map(|(subscription, _)| subscription.name.as_str()).collect();
    let Some(report) = work(relay, signals, &closed, &health, args.until_idle).await? else { return Ok(Exit::Failed) };
    if args.until_idle {
        undelivered(&report)?;
        let all = operator.status().await?.subscriptions;
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
async fn prepare(database: &Database, config: &Config, closed: &Arc<Notify>) -> Result<(Arc<Log>, Plan)> {
    let operator = Arc::new(database.open().await?);
    store_limits(config, &operator).await?;
    let plan = plan(config, &operator, closed).await?;
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

/// What the config says of the whole log holds for whoever else works on it, without this config.
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
    health.set_ready(false);
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
        health.set_ready(relay.ready());
        tokio::time::sleep(READY_INTERVAL).await;
    }
}

/// A script that waits for everything to be delivered must learn that a sink did not take it.
fn undelivered(report: &Report) -> Result<()> {
    for (name, subscription) in &report.subscriptions {
        if let Some(breaker) = &subscription.breaker {
            let error = &breaker.error;
            return Err(Stop::with(
                Exit::Failed,
                format!("subscription '{name}' could not deliver, its sink is down: {error}; the events wait"),
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
                "subscription '{name}' was paused by its receiver{reason}; {wait}; `pillarbox resume {name}` once the \
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

/// What this relay runs: the config's subscriptions, or everything to standard output.
async fn plan(config: &Config, operator: &Log, closed: &Arc<Notify>) -> Result<Plan> {
    let source = format!("urn:pillarbox:{}", operator.status().await?.log.log_id);
    if config.subscriptions.is_empty() {
        let mut subscription = Subscription::new("stdout");
        subscription.retry = pillarbox::RetryPolicy::sink();
        subscription.workers = config.relay.workers;
        subscription.batch_size = config.relay.batch_size;
        return Ok(vec![(subscription, sink::build(&SinkSettings::stdout(), &source, closed)?)]);
    }
    let built = config.subscriptions.iter().map(|settings| {
        let sink = sink::build(&settings.sink, &source, closed);
        sink.map(|sink| (settings.engine(), sink)).with_context(|| format!("subscription '{}'", settings.name))
    });
    built.collect()
}

async fn listen(config: &Config, health: &Arc<Health>, background: &mut JoinSet<()>) -> Result<()> {
    let Some(address) = config.http.listen else { return Ok(()) };
    let listener = http::bind(address).await?;
    let bound = listener.local_addr()?;
    if bound.port() != address.port() && address.port() != 0 {
        warn!(wanted = %address, listen = %bound, "the port is taken; listening on the next free one");
    } else {
        info!(listen = %bound, "listening");
    }
    let health = health.clone();
    background.spawn(async move {
        if let Err(error) = http::serve(listener, health).await {
            error!(error = %error, "http");
        }
    });
    Ok(())
}

/// A new subscription may be about to deliver years of events: nobody should learn that from the receiver.
async fn say_new(relay: &Relay, operator: &Log) -> Result<()> {
    let created: Vec<&str> =
        relay.subscriptions().iter().filter(|view| view.created).map(|view| view.name.as_str()).collect();
    if created.is_empty() {
        return Ok(());
    }
    for subscription in operator.status().await?.subscriptions {
        if created.contains(&subscription.name.as_str()) {
            // What was delivered since the start was to be delivered at the start, too.
            let events = subscription.pending + subscription.processing + subscription.report.delivered;
            info!(subscription = subscription.name, floor = subscription.floor, events, "new subscription");
        }
    }
    Ok(())
}

/// The signals that end a relay.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
