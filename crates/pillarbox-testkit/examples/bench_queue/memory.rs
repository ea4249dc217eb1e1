use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::store::Store;
use pillarbox::{Mode, NewEvent, Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use pillarbox_sqlite::SqliteStore;
use tokio::sync::watch;

use crate::Result;
use crate::database::event;
use crate::place::Place;
use crate::process::{Figures, peak_mib};

/// Between two looks at the rows.
const PAUSE: Duration = Duration::from_millis(20);
/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(120);
const FILL_BATCH: usize = 500;

/// The highest memory of a process in which `count` handlers wait at once, each with a claim in the database.
pub(crate) async fn waiting(place: &str, count: usize) -> Result<Figures> {
    Place::of(place).migrate().await?;
    match Place::of(place) {
        Place::Postgres(url) => measure(PostgresStore::open(url).await?, PostgresStore::open(url).await?, count).await,
        Place::Sqlite(path) => measure(SqliteStore::open(path)?, SqliteStore::open(path)?, count).await,
    }
}

async fn measure<S: Store + Operator>(store: S, operator: S, count: usize) -> Result<Figures> {
    let numbers: Vec<usize> = (0..count).collect();
    for batch in numbers.chunks(FILL_BATCH) {
        let events: Vec<NewEvent> = batch.iter().map(|number| NewEvent { key: None, ..event(*number) }).collect();
        operator.publish(&events).await?;
    }
    let (begun, mut has_begun) = watch::channel(0);
    let (release, released) = watch::channel(false);
    let queue = Subscription { mode: Mode::Queue, workers: count, ..Subscription::new("memory") };
    let handler = move |_event| {
        begun.send_modify(|begun| *begun += 1);
        let mut released = released.clone();
        async move {
            let _ = released.wait_for(|released| *released).await;
            Ok(())
        }
    };
    let relay = Relay::builder(store).handle(queue, handler).start().await?;
    let all_wait = async {
        has_begun.wait_for(|begun| *begun == count).await?;
        while operator.status().await?.subscriptions.iter().map(|queue| queue.processing).sum::<u64>() < count as u64 {
            tokio::time::sleep(PAUSE).await;
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    };
    tokio::time::timeout(PATIENCE, all_wait)
        .await
        .map_err(|_| format!("of {count} handlers only {} began", *has_begun.borrow()))??;
    let peak = peak_mib()?;
    release.send_replace(true);
    relay.until_idle().await?;
    relay.drain().await?;
    let handled = *has_begun.borrow();
    if handled != count {
        return Err(format!("{handled} events were handled instead of {count}").into());
    }
    Ok(Figures::default().with("peak_mib", peak).with("peak_mib_after", peak_mib()?))
}
