//! The show: real processes on a real database, one of them killed, and an audit that does not trust the engine.

mod ground;
mod publisher;
mod receiver;
pub(crate) mod relay;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use pillarbox::admin::{ListQuery, Operator, State, Status, why};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use self::ground::Ground;
use self::publisher::{Pace, Published};
use self::receiver::Account;
use self::relay::{Child, MAIL, POISON_KEY, SUBSCRIPTIONS};
use crate::args::DemoArgs;
use crate::command::Scope;
use crate::exit::{Exit, Stop};
use crate::log::Log;
use crate::output::{Output, Style};

/// How many threads publish.
const PUBLISHERS: usize = 2;
/// When the relay is killed, as a share of the time.
const KILL_AT: f64 = 0.4;
/// How long the rest may take after the last event was published.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a take-over may take before the demo gives up on it.
const TAKE_OVER_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the demo looks at what it waits for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// How often it counts what is left.
const COUNT_INTERVAL: Duration = Duration::from_millis(50);

/// Runs the show; exit 0 only if nothing was lost.
pub(crate) async fn run(scope: &Scope, args: &DemoArgs) -> Result<Exit> {
    let directory = tempfile::Builder::new().prefix("pillarbox-demo-").tempdir().context("cannot make a directory")?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let ground = Ground::make(scope.database_flag()?, directory.path()).await?;
    let stage = Stage { output: scope.output, ground, directory: directory.path().to_owned() };
    let shown = tokio::select! {
        shown = stage.show(Duration::from_secs(args.seconds)) => shown,
        _ = terminate.recv() => Err(Stop::with(Exit::Failed, "ended by a signal")),
        _ = interrupt.recv() => Err(Stop::with(Exit::Failed, "ended by a signal")),
    };
    let removed = stage.ground.remove().await;
    let exit = shown?;
    removed?;
    Ok(exit)
}

struct Stage {
    output: Output,
    ground: Ground,
    directory: PathBuf,
}

impl Stage {
    async fn show(&self, time: Duration) -> Result<Exit> {
        let published = self.play(time).await?;
        let accounts = self.audit(&published).await?;
        self.finish(&published, &accounts)
    }

    /// Publishes for the given time, kills a relay on the way, and waits until everything has settled.
    async fn play(&self, time: Duration) -> Result<Vec<Published>> {
        self.tell("1", &self.ground.describe())?;
        let store = self.ground.database().open().await?;
        let mut relays = vec![self.start().await?, self.start().await?];
        let names = SUBSCRIPTIONS.join(", ");
        self.tell(
            "2",
            &format!("two relay processes (pid {}, {}) share the subscriptions {names}", relays[0].pid, relays[1].pid),
        )?;
        self.tell(
            "3",
            &format!("{PUBLISHERS} publishers write orders and their events in the same transactions; some roll back"),
        )?;
        self.tell("4", &format!("the receiver '{MAIL}' refuses every event of the key {POISON_KEY}"))?;
        let began = Instant::now();
        let pace = Pace::default();
        let stopped = StopOnDrop(pace.clone());
        let publishers: Vec<_> = (0..PUBLISHERS).map(|number| publisher::start(&self.ground, number, &pace)).collect();
        let bar = self.output.clock(time);
        watch(&bar, &pace.count, began, time.mul_f64(KILL_AT)).await;
        let victim = relays.remove(0);
        let told = self.kill(victim, relays[0].instance, pace.count.load(Ordering::Relaxed)).await?;
        bar.suspend(|| self.tell("5", &told))?;
        relays.push(self.start().await?);
        watch(&bar, &pace.count, began, time).await;
        drop(stopped);
        bar.finish_and_clear();
        let mut published = Vec::new();
        for publisher in publishers {
            published.extend(publisher.await.context("a publisher panicked")?.context("a publisher failed")?);
        }
        let seconds = began.elapsed().as_secs_f64();
        self.tell(
            "6",
            &format!("published {} events in {seconds:.1} s; waiting until all is settled", published.len()),
        )?;
        self.settle(&store).await?;
        for relay in relays {
            relay.drain().await?;
        }
        self.tell("7", "both relays drained and left; now the receivers' files are compared with what was committed")?;
        Ok(published)
    }

    async fn start(&self) -> Result<Child> {
        Child::start(&self.ground.database(), &self.directory).await
    }

    /// Kills a relay without warning and measures how long its lanes have no living owner.
    async fn kill(&self, mut victim: Child, heir: i64, published: u64) -> Result<String> {
        let before = self.ground.lanes_of(victim.instance).await?;
        let killed = Instant::now();
        victim.kill()?;
        while self.ground.lanes_of(victim.instance).await? > 0 {
            if killed.elapsed() > TAKE_OVER_TIMEOUT {
                bail!("no relay took the killed relay's lanes within {} s", TAKE_OVER_TIMEOUT.as_secs());
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let took = killed.elapsed().as_millis();
        Ok(format!(
            "kill -9 {} after {published} events: relay {heir} took its {before} lanes over in {took} ms; a new relay joins",
            victim.pid
        ))
    }

    /// Waits until nothing but the poison key is left.
    async fn settle(&self, store: &Log) -> Result<()> {
        let began = Instant::now();
        loop {
            let status = store.status().await?;
            let left: u64 =
                status.subscriptions.iter().map(|one| one.pending + one.processing + one.retrying + one.delayed).sum();
            if left == 0 {
                return Ok(());
            }
            if began.elapsed() > SETTLE_TIMEOUT {
                self.output.say(format!("{left} deliveries are still not settled; going on to the audit"));
                return Ok(());
            }
            tokio::time::sleep(COUNT_INTERVAL).await;
        }
    }

    /// Compares what each receiver got with what the publishers know to be committed.
    async fn audit(&self, published: &[Published]) -> Result<Vec<Account>> {
        let store = self.ground.database().open().await?;
        let mut accounts = Vec::new();
        for name in SUBSCRIPTIONS {
            let mut listed = Vec::new();
            for state in State::ALL {
                let query = ListQuery {
                    subscription: Some(name.to_owned()),
                    state: Some(state),
                    limit: published.len() + 1,
                    ..ListQuery::default()
                };
                listed.extend(store.list(&query).await?.into_iter().map(|row| (row.id, state)));
            }
            accounts.push(Account::of(name, &relay::file(&self.directory, name), published, &listed)?);
        }
        if let Some(text) = explain(&store, &store.status().await?).await? {
            self.tell("8", &text)?;
        }
        Ok(accounts)
    }

    fn finish(&self, published: &[Published], accounts: &[Account]) -> Result<Exit> {
        let lost: usize = accounts.iter().map(|account| account.lost).sum();
        let out_of_order: usize = accounts.iter().map(|account| account.out_of_order).sum();
        let duplicates: usize = accounts.iter().map(|account| account.duplicates).sum();
        let delivered = receiver::delivered_anywhere(accounts);
        let count = published.len();
        if self.output.json {
            self.output.json(&json!({
                "published": count, "delivered": delivered, "duplicates": duplicates, "lost": lost,
                "subscriptions": accounts,
            }))?;
        } else {
            self.output.line("")?;
            let headings =
                ["SUBSCRIPTION", "WANTED", "DELIVERED", "WAITING", "DEAD", "DUPLICATES", "OUT OF ORDER", "LOST"];
            self.output.table(&headings, accounts.iter().map(Account::row).collect())?;
            self.output.line("")?;
            for account in accounts {
                if let Some(text) = account.held_back() {
                    self.output.line(text)?;
                }
            }
            self.output
                .line(format!("published {count}, delivered {delivered}, duplicates {duplicates}, lost {lost}"))?;
        }
        Ok(if lost == 0 && out_of_order == 0 && count > 0 { Exit::Done } else { Exit::Failed })
    }

    fn tell(&self, number: &str, text: &str) -> Result<()> {
        if self.output.json {
            return Ok(());
        }
        self.output.styled(Style::Dim, &format!("[{number}]"), &format!(" {text}"))
    }
}

/// Ends the publishers however the show ends: a thread of theirs would outlive it.
struct StopOnDrop(Pace);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Moves the bar until `until` has passed since `began`.
async fn watch(bar: &ProgressBar, count: &AtomicU64, began: Instant, until: Duration) {
    while began.elapsed() < until {
        bar.set_position(began.elapsed().as_millis() as u64);
        bar.set_message(format!("{} events published", count.load(Ordering::Relaxed)));
        tokio::time::sleep(COUNT_INTERVAL.min(until.saturating_sub(began.elapsed()))).await;
    }
}

/// Why one of the poison key's later events was not delivered.
async fn explain(store: &Log, status: &Status) -> Result<Option<String>> {
    let query = ListQuery {
        subscription: Some(MAIL.to_owned()),
        key: Some(POISON_KEY.to_owned()),
        state: Some(State::Blocked),
        limit: 1,
        ..ListQuery::default()
    };
    let Some(row) = store.list(&query).await?.into_iter().next() else { return Ok(None) };
    let Some(record) = store.show(row.id).await? else { return Ok(None) };
    let fate = record.subscriptions.iter().find(|fate| fate.subscription == MAIL);
    Ok(fate.map(|fate| format!("pillarbox why {}: {}", row.id, why(&record, fate, status).message)))
}
