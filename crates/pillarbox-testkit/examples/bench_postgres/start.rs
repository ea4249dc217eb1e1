use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::{Delivery, NewEvent, Relay, Subscription};
use pillarbox_postgres::{PostgresStore, publish_all};
use tokio::sync::watch;

use crate::Result;
use crate::database::migrated;
use crate::process::Figures;

/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(120);

/// So many subscriptions with so many lanes each and one event for each lane, more or less: from the start of a relay until all is
/// delivered, again for a relay that finds them made, and how long it takes to stop.
pub(crate) async fn start(url: &str, subscriptions: usize, lanes: u32) -> Result<Figures> {
    let mut client = migrated(url).await?;
    let (first, stop) = once(url, &mut client, subscriptions, lanes).await?;
    let (again, _) = once(url, &mut client, subscriptions, lanes).await?;
    Ok(Figures::default().with("first", first).with("again", again).with("stop", stop))
}

/// From start to delivery, and how long it takes to stop, in milliseconds.
async fn once(url: &str, client: &mut tokio_postgres::Client, subscriptions: usize, lanes: u32) -> Result<(f64, f64)> {
    let events: Vec<NewEvent> = (0..lanes).map(|number| NewEvent::new("t", "y").key(format!("k{number}"))).collect();
    let transaction = client.transaction().await?;
    publish_all(&transaction, &events).await?;
    transaction.commit().await?;
    let (sender, mut handled) = watch::channel(0);
    let sender = Arc::new(sender);
    let began = Instant::now();
    let mut builder = Relay::builder(PostgresStore::open(url).await?);
    for number in 0..subscriptions {
        let sender = sender.clone();
        let handler = move |_event: Delivery| {
            sender.send_modify(|handled| *handled += 1);
            std::future::ready(Ok(()))
        };
        builder = builder.handle(Subscription { lanes, ..Subscription::new(format!("s{number}")) }, handler);
    }
    let relay = builder.start().await?;
    let all = handled.wait_for(|handled| *handled >= subscriptions * events.len());
    tokio::time::timeout(PATIENCE, all).await.map_err(|_| "not everything is delivered")??;
    let started = began.elapsed();
    relay.until_idle().await?;
    let stopping = Instant::now();
    relay.drain().await?;
    Ok((started.as_secs_f64() * 1e3, stopping.elapsed().as_secs_f64() * 1e3))
}
