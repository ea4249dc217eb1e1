use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pillarbox::admin::Operator;
use pillarbox::sink::{Attempt, Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::{Failure, Relay, RelayConfig, RetryPolicy, Subscription};
use pillarbox_sinks::FileSink;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{ChildStdin, Command};

use super::publisher::PAID;
use crate::command::Scope;
use crate::database::Database;
use crate::exit::Exit;

/// Gets every event.
const WAREHOUSE: &str = "warehouse";
/// Gets one type.
pub(super) const INVOICES: &str = "invoices";
/// Gets every event and refuses those of one key.
pub(super) const MAIL: &str = "mail";
/// The subscriptions of the demo.
pub(super) const SUBSCRIPTIONS: [&str; 3] = [WAREHOUSE, INVOICES, MAIL];
/// The key that one receiver cannot work with.
pub(super) const POISON_KEY: &str = "customer-13";

/// How the refused events are tried again: soon dead, so that the demo can show it.
const RETRY: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    base: Duration::from_millis(200),
    cap: Duration::from_secs(1),
    jitter: false,
    min_dead_age: Duration::ZERO,
};

/// The file that a subscription's receiver keeps.
pub(super) fn file(directory: &Path, subscription: &str) -> PathBuf {
    directory.join(format!("{subscription}.ndjson"))
}

/// One relay of the demo, in a process of its own; it works until its standard input ends.
pub(crate) async fn run(scope: &Scope, directory: &Path) -> Result<Exit> {
    let store = scope.open().await?;
    let source = format!("urn:pillarbox:{}", store.status().await?.log.log_id);
    let mut builder = Relay::builder(store).config(RelayConfig::default());
    for name in SUBSCRIPTIONS {
        let mut subscription = Subscription::new(name);
        subscription.retry = RETRY;
        if name == INVOICES {
            subscription = subscription.types([PAID]);
        }
        let inner = FileSink::new(file(directory, name), source.clone());
        let poison = (name == MAIL).then_some(POISON_KEY);
        builder = builder.subscribe(subscription, Arc::new(Receiver { inner, poison }));
    }
    let relay = builder.start().await?;
    scope.output.line(relay.instance().0.to_string())?;
    let mut rest = Vec::new();
    tokio::select! {
        result = async { tokio::io::stdin().read_to_end(&mut rest).await } => drop(result?),
        error = relay.failed() => return Err(error.into()),
    }
    relay.drain().await?;
    Ok(Exit::Done)
}

/// A relay process as the demo sees it. It ends with the demo, because its standard input does.
pub(super) struct Child {
    process: tokio::process::Child,
    input: ChildStdin,
    pub(super) instance: i64,
    pub(super) pid: u32,
}

impl Child {
    /// Starts a relay and waits until it has joined.
    pub(super) async fn start(database: &Database, directory: &Path) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut process = Command::new(program)
            .args(["--quiet", "demo-relay", "--directory"])
            .arg(directory)
            .envs([database.environment()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a relay")?;
        let pid = process.id().context("the relay ended at once")?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("the relay has no pipes");
        };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).await?;
        let instance = line.trim().parse().context("the relay did not start; its error stands above")?;
        Ok(Child { process, input, instance, pid })
    }

    /// SIGKILL: no chance to settle, release or say goodbye.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.process.start_kill().context("cannot kill the relay")
    }

    /// Ends its input and waits until it has drained.
    pub(super) async fn drain(mut self) -> Result<()> {
        drop(self.input);
        let status = self.process.wait().await?;
        if !status.success() {
            bail!("a relay ended with {status}");
        }
        Ok(())
    }
}

/// A file that refuses one key.
struct Receiver {
    inner: FileSink,
    poison: Option<&'static str>,
}

impl Receiver {
    fn refuses(&self, attempt: &Attempt) -> bool {
        self.poison.is_some() && attempt.event.key.as_deref() == self.poison
    }
}

impl Sink for Receiver {
    fn features(&self) -> SinkFeatures {
        self.inner.features()
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let refused: Vec<bool> = batch.events.iter().map(|attempt| self.refuses(attempt)).collect();
            let good = batch.events.into_iter().filter(|attempt| !self.refuses(attempt)).collect();
            let batch = Batch { events: good, ..batch };
            let mut outcomes =
                if batch.events.is_empty() { Vec::new() } else { self.inner.deliver(batch).await }.into_iter();
            // The key stops at its first failure; what comes after it was not tried.
            let mut first = true;
            let answer = |refused: bool| match refused {
                false => outcomes.next().unwrap_or(Outcome::NotTried),
                true if std::mem::take(&mut first) => {
                    Outcome::Failed(Failure::event(format!("the mail server does not know {POISON_KEY}")))
                }
                true => Outcome::NotTried,
            };
            refused.into_iter().map(answer).collect()
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}
