use crate::Result;
use crate::database::connect;
use crate::peer::{self, Consumer, WORKERS};
use crate::process::Figures;
use crate::queue::{SLOW, SLOW_WORKERS};
use crate::wear::Wear;

/// Makes a table as people write it by hand, with the events in it. It has no keys: the loop keeps no order.
pub(crate) async fn fill(url: &str, count: usize) -> Result<Figures> {
    let client = connect(url).await?;
    let table = "create table outbox (
        id bigint generated always as identity primary key, payload json not null,
        created_at timestamptz not null default clock_timestamp()
    )";
    client.batch_execute(table).await?;
    let insert = "insert into outbox (payload) select payload::json from unnest($1::text[]) as payload";
    peer::fill(&client, insert, "outbox", count).await?;
    Ok(Figures::default().with("events", count as f64))
}

/// The loop that most people write by hand; the handler does nothing.
pub(crate) async fn drain(url: &str, count: usize) -> Result<Figures> {
    measured(url, count, consumer()).await
}

/// The same with as many workers, and as slow a handler, as the queue.
pub(crate) async fn drain_slowly(url: &str, count: usize) -> Result<Figures> {
    measured(url, count, Consumer { handler: Some(SLOW), workers: SLOW_WORKERS, ..consumer() }).await
}

fn consumer() -> Consumer {
    Consumer {
        take: "select id, payload::text from outbox order by id limit 100 for update skip locked",
        delete: "delete from outbox where id = any ($1)",
        in_transaction: true,
        handler: None,
        workers: WORKERS,
    }
}

async fn measured(url: &str, count: usize, consumer: Consumer) -> Result<Figures> {
    let wear = Wear::begin(url).await?;
    let elapsed = consumer.drain(url, count).await?;
    wear.end(count, Figures::default().with("rate", count as f64 / elapsed.as_secs_f64())).await
}
