use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use pillarbox::{Delivery, Relay, Subscription};
use pillarbox_postgres::PostgresStore;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client};
use uuid::Uuid;

use crate::Result;
use crate::database::{BARE_COLUMNS, connect, migrated, payload};
use crate::process::Figures;

/// 500 events a second.
const PAUSE: Duration = Duration::from_millis(2);
/// Publishers take turns, so that one slow commit does not hold the next event up.
const PUBLISHERS: usize = 8;
/// The first samples are not counted.
const WARM_UP: usize = 500;

/// Without `created_at`, whose default looks at the bell.
const INSERT: &str = "(id, topic, key, type, payload) values ($1, 'orders', $2, 'order.placed', $3::text::json)";

/// Through a relay with one handler.
pub(crate) async fn pillarbox(url: &str, samples: usize) -> Result<Figures> {
    migrated(url).await?;
    let (arrived, arrivals) = mpsc::unbounded_channel();
    let handler = move |event: Delivery| {
        // The receiver goes only after the last sample.
        let _ = arrived.send((event.id, Instant::now()));
        std::future::ready(Ok(()))
    };
    let store = PostgresStore::open(url).await?;
    let relay = Relay::builder(store).handle(Subscription::new("latency"), handler).start().await?;
    relay.until_idle().await?;
    let figures = open_loop(url, "pillarbox.event", samples, arrivals).await?;
    relay.drain().await?;
    Ok(figures)
}

/// Through a trigger that notifies at every insert, and a listener that reads what is new: fast, and not safe.
pub(crate) async fn listener(url: &str, samples: usize) -> Result<Figures> {
    let client = connect(url).await?;
    client
        .batch_execute(&format!(
            "create table bare {BARE_COLUMNS}; create index on bare (id);
        create function ring() returns trigger language plpgsql as
            $$ begin perform pg_notify('bare', ''); return null; end $$;
        create trigger ring after insert on bare for each statement execute function ring()"
        ))
        .await?;
    let (listening, mut connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let (rang, mut rings) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut messages = futures_util::stream::poll_fn(move |context| connection.poll_message(context));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(_) = message {
                let _ = rang.send(());
            }
        }
    });
    listening.batch_execute("listen bare").await?;
    let (arrived, arrivals) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let sql = "select position, id, topic, key, type, payload::text, headers::text, created_at from bare
            where position > $1 order by position limit 2000";
        let statement = listening.prepare(sql).await.expect("the table is there");
        let mut after = 0_i64;
        while rings.recv().await.is_some() {
            while rings.try_recv().is_ok() {}
            for row in listening.query(&statement, &[&after]).await.expect("the table can be read") {
                after = row.get(0);
                let _ = arrived.send((row.get::<_, Uuid>(1), Instant::now()));
            }
        }
    });
    open_loop(url, "bare", samples, arrivals).await
}

/// Publishes on a schedule, whatever becomes of it, and waits for all to arrive. Skipped ones are not waited for longer than 10 s.
async fn open_loop(
    url: &str,
    table: &str,
    samples: usize,
    mut arrivals: mpsc::UnboundedReceiver<(Uuid, Instant)>,
) -> Result<Figures> {
    let mut clients = Vec::new();
    for _ in 0..PUBLISHERS {
        let client = connect(url).await?;
        let statement = client.prepare(&format!("insert into {table} {INSERT}")).await?;
        clients.push(Arc::new((client, statement)));
    }
    let (sent, mut sendings) = mpsc::unbounded_channel();
    let began = tokio::time::Instant::now();
    let publisher = tokio::spawn(async move {
        for number in 0..WARM_UP + samples {
            tokio::time::sleep_until(began + PAUSE * number as u32).await;
            let client = clients[number % PUBLISHERS].clone();
            let (id, sent) = (Uuid::now_v7(), sent.clone());
            tokio::spawn(async move {
                let _ = sent.send((number, id, Instant::now()));
                insert(&client, id, number).await.expect("the insert goes through");
            });
        }
    });
    publisher.await?;
    let mut started = std::collections::HashMap::new();
    while let Some((number, id, at)) = sendings.recv().await {
        started.insert(id, (number, at));
    }
    let mut times = Vec::with_capacity(samples);
    let mut left = WARM_UP + samples;
    while left > 0 {
        let next = tokio::time::timeout(Duration::from_secs(10), arrivals.recv()).await;
        let Ok(Some((id, arrived))) = next else { break };
        left -= 1;
        let (number, at) = started[&id];
        if number >= WARM_UP {
            times.push(arrived.saturating_duration_since(at));
        }
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    Ok(Figures::default().with("p50", at(50)).with("p99", at(99)).with("never_arrived", left as f64))
}

async fn insert(client: &(Client, tokio_postgres::Statement), id: Uuid, number: usize) -> Result<()> {
    let key = format!("order-{}", number % 1000);
    client.0.execute(&client.1, &[&id, &key, &payload(number)]).await?;
    Ok(())
}
