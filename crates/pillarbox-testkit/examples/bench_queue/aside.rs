use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::{Delivery, Mode, Relay, Start, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::sync::watch;
use tokio_postgres::Client;

use crate::Result;
use crate::database::{connect, fill_more, migrated};
use crate::process::{Figures, peak_mib};

/// Between two events of the other subscription.
const PAUSE: Duration = Duration::from_millis(5);
/// Nothing measured here takes that long.
const PATIENCE: Duration = Duration::from_secs(1_800);

/// What lies in the delivery table of a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Aside {
    /// Nothing.
    Nothing,
    /// Dead deliveries, each of a key of its own.
    Dead(usize),
    /// Deliveries that are due tomorrow, without a key.
    Delayed(usize),
}

fn queue(name: &str, topic: &str) -> Subscription {
    let start = Start::Now;
    Subscription { mode: Mode::Queue, lanes: 1, start, ..Subscription::new(name).topics([topic]) }
}

/// A log with two queues that have passed everything.
async fn begin(url: &str) -> Result<Client> {
    let client = migrated(url).await?;
    let handler = |_event| std::future::ready(Ok(()));
    let builder = Relay::builder(PostgresStore::open(url).await?);
    let builder = builder.handle(queue("queue", "orders*"), handler).handle(queue("other", "other"), handler);
    builder.start().await?.drain().await?;
    Ok(client)
}

/// Events that the queue has passed, and a delivery of each.
async fn park(client: &Client, count: usize, key: &str, values: &str) -> Result<()> {
    let sql = format!(
        "with inserted as (
             insert into pillarbox.event (topic, key, type, payload)
             select 'orders', {key}, 'y', '{{}}' from generate_series(1, {count}) as g
             returning position, key
         )
         insert into pillarbox.delivery
             (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, queued)
         select s.id, i.position, 0, nextval('pillarbox.delivery_arrival_seq'), i.key, {values}, true
         from inserted as i, pillarbox.subscription as s where s.name = 'queue' order by i.position;
         update pillarbox.cursor set floor = (select max(position) from pillarbox.event)"
    );
    client.batch_execute(&sql).await?;
    // As retention does from time to time.
    client.batch_execute("select pillarbox.add_up_aside()").await?;
    client.batch_execute("vacuum analyze").await?;
    Ok(())
}

/// A queue of 1,000 keys with something in its delivery table: how long after the relay's start the first event is handled, and the rate
/// from then on until `count` events are handled and settled.
pub(crate) async fn drain(url: &str, count: usize, aside: Aside) -> Result<Figures> {
    let client = begin(url).await?;
    match aside {
        Aside::Nothing => {}
        Aside::Dead(rows) => park(&client, rows, "'dead-' || g", "'dead', 3, now(), now(), now()").await?,
        Aside::Delayed(rows) => {
            park(&client, rows, "null", "'delayed', 0, now() + interval '1 day', now(), null").await?;
        }
    }
    fill_more(url, count).await?;
    let (handled, first) = (Arc::new(AtomicUsize::new(0)), Arc::new(OnceLock::new()));
    let handler = {
        let (handled, first) = (handled.clone(), first.clone());
        move |_event| {
            first.get_or_init(Instant::now);
            handled.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok(()))
        }
    };
    let started = Instant::now();
    let relay =
        Relay::builder(PostgresStore::open(url).await?).handle(queue("queue", "orders*"), handler).start().await?;
    relay.until_idle().await?;
    let elapsed = started.elapsed();
    let (handled, first) = (handled.load(Ordering::Relaxed), first.get().ok_or("nothing was handled")?);
    if handled != count {
        return Err(format!("{handled} events were handled instead of {count}").into());
    }
    let figures = Figures::default()
        .with("rate", count as f64 / elapsed.saturating_sub(first.duration_since(started)).as_secs_f64())
        .with("first_ms", first.duration_since(started).as_secs_f64() * 1e3)
        .with("peak_mib", peak_mib()?);
    relay.drain().await?;
    Ok(figures)
}

/// `count` delayed deliveries of the queue that are due at once, of as many keys as this says; from the relay's start until all are handled,
/// and how long events of the other queue take meanwhile.
pub(crate) async fn due(url: &str, count: usize, keys: usize) -> Result<Figures> {
    let client = begin(url).await?;
    if count > 0 {
        park(&client, count, &format!("'key-' || g % {keys}"), "'delayed', 0, now(), now(), null").await?;
    }
    let last = Arc::new(Mutex::new(std::collections::HashMap::new()));
    let (sender, mut handled) = watch::channel(0);
    let handler = move |event: Delivery| {
        let key = event.key.clone();
        let before = last.lock().unwrap_or_else(PoisonError::into_inner).insert(key, event.position);
        if before.is_some_and(|before| before > event.position) {
            eprintln!("{} came after {before:?} of its key", event.position);
            std::process::exit(1);
        }
        sender.send_modify(|handled| *handled += 1);
        std::future::ready(Ok(()))
    };
    let began = Instant::now();
    let latencies = Arc::new(Mutex::new(Vec::new()));
    let sent_at: Arc<Mutex<std::collections::HashMap<String, Instant>>> = Arc::default();
    let other = {
        let (latencies, sent_at) = (latencies.clone(), sent_at.clone());
        move |event: Delivery| {
            let sent =
                sent_at.lock().unwrap_or_else(PoisonError::into_inner).remove(event.key.as_deref().unwrap_or(""));
            let taken = sent.map(|sent| sent.elapsed().as_secs_f64() * 1e3);
            latencies.lock().unwrap_or_else(PoisonError::into_inner).extend(taken);
            std::future::ready(Ok(()))
        }
    };
    let builder = Relay::builder(PostgresStore::open(url).await?);
    let relay =
        builder.handle(queue("queue", "orders*"), handler).handle(queue("other", "other"), other).start().await?;
    let published = Arc::new(AtomicI64::new(0));
    let publisher = tokio::spawn(publish_other(url.to_owned(), sent_at, published.clone()));
    // Long enough to say something of the other queue also where nothing is due.
    let enough = async {
        handled.wait_for(|handled| *handled >= count).await?;
        while published.load(Ordering::Relaxed) < 200 {
            tokio::time::sleep(PAUSE).await;
        }
        Ok::<_, watch::error::RecvError>(())
    };
    tokio::time::timeout(PATIENCE, enough).await.map_err(|_| "what is due is not handled")??;
    let elapsed = began.elapsed();
    publisher.abort();
    relay.until_idle().await?;
    relay.drain().await?;
    let mut latencies = std::mem::take(&mut *latencies.lock().unwrap_or_else(PoisonError::into_inner));
    latencies.sort_by(f64::total_cmp);
    let quantile = |share: f64| latencies.get((latencies.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    Ok(Figures::default()
        .with("rate", count as f64 / elapsed.as_secs_f64())
        .with("seconds", elapsed.as_secs_f64())
        .with("p50", quantile(0.5))
        .with("p99", quantile(0.99)))
}

async fn publish_other(
    url: String,
    sent_at: Arc<Mutex<std::collections::HashMap<String, Instant>>>,
    published: Arc<AtomicI64>,
) -> Result<()> {
    let client = connect(&url).await?;
    let statement = client.prepare("insert into pillarbox.event (topic, key, type) values ('other', $1, 'y')").await?;
    let mut ticks = tokio::time::interval(PAUSE);
    for number in 0.. {
        ticks.tick().await;
        let key = format!("other-{number}");
        sent_at.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), Instant::now());
        client.execute(&statement, &[&key]).await?;
        published.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
