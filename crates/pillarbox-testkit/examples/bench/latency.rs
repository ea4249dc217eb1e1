use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pillarbox::{Relay, Subscription};
use pillarbox_sqlite::SqliteStore;
use rusqlite::TransactionBehavior::Immediate;

use crate::Result;
use crate::database::{BARE_TABLE, bare_row, connect, event, insert_bare};
use crate::process::Figures;

/// Between two samples, so that each finds a relay (and a task) that sleeps.
const PAUSE: Duration = Duration::from_millis(3);
/// The first samples are not counted.
const WARM_UP: usize = 50;

/// How the publishing transaction is committed.
#[derive(Clone, Copy)]
pub(crate) enum Commit {
    /// [`pillarbox_sqlite::commit`], which tells the relays of the process.
    Ringing,
    /// The transaction's own: relays find it by themselves.
    Plain,
}

/// From the begin of the transaction that publishes until the handler runs.
pub(crate) fn pillarbox(path: &Path, samples: usize, commit: Commit) -> Result<Figures> {
    pillarbox_sqlite::migrate(path)?;
    let mut connection = connect(path)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (arrived, arrivals) = mpsc::channel();
    let handler = move |_event| {
        // The receiver goes only after the last sample.
        let _ = arrived.send(Instant::now());
        std::future::ready(Ok(()))
    };
    let store = SqliteStore::open(path)?;
    let relay = runtime.block_on(Relay::builder(store).handle(Subscription::new("latency"), handler).start())?;
    runtime.block_on(relay.until_idle())?;
    let figures = sample(samples, &arrivals, |number| {
        let event = event(number);
        let started = Instant::now();
        let transaction = connection.transaction_with_behavior(Immediate)?;
        pillarbox_sqlite::publish(&transaction, &event)?;
        match commit {
            Commit::Ringing => pillarbox_sqlite::commit(transaction)?,
            Commit::Plain => transaction.commit()?,
        }
        Ok((started, Instant::now()))
    })?;
    runtime.block_on(relay.drain())?;
    Ok(figures)
}

/// The same with a bare insert and a channel to a task that waits for it.
pub(crate) fn bare(path: &Path, samples: usize) -> Result<Figures> {
    let mut connection = connect(path)?;
    connection.execute_batch(BARE_TABLE)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (arrived, arrivals) = mpsc::channel();
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    runtime.spawn(async move {
        while let Some(row) = receiver.recv().await {
            let _ = arrived.send(Instant::now());
            drop(row);
        }
    });
    sample(samples, &arrivals, |number| {
        let row = bare_row(number);
        let started = Instant::now();
        let transaction = connection.transaction_with_behavior(Immediate)?;
        insert_bare(&transaction, &row)?;
        transaction.commit()?;
        let committed = Instant::now();
        sender.send(row)?;
        Ok((started, committed))
    })
}

/// Takes one sample after the other. `publish` returns when it began and when the commit had returned.
fn sample(
    samples: usize,
    arrivals: &mpsc::Receiver<Instant>,
    mut publish: impl FnMut(usize) -> Result<(Instant, Instant)>,
) -> Result<Figures> {
    let (mut whole, mut after_commit) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
    for number in 0..WARM_UP + samples {
        let (started, committed) = publish(number)?;
        let arrived = arrivals.recv_timeout(Duration::from_secs(10)).map_err(|_| "the event did not arrive in 10 s")?;
        if number >= WARM_UP {
            whole.push(arrived.saturating_duration_since(started));
            after_commit.push(arrived.saturating_duration_since(committed));
        }
        std::thread::sleep(PAUSE);
    }
    whole.sort_unstable();
    after_commit.sort_unstable();
    let at = |times: &[Duration], percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    Ok(Figures::default()
        .with("p50", at(&whole, 50))
        .with("p99", at(&whole, 99))
        .with("after_commit_p50", at(&after_commit, 50))
        .with("after_commit_p99", at(&after_commit, 99)))
}
