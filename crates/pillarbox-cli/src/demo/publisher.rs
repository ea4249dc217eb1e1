use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use pillarbox::NewEvent;
use rusqlite::{Connection, TransactionBehavior, params};
use serde_json::json;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::ground::{self, Ground};

/// How many customers order; each is a key.
const CUSTOMERS: u64 = 40;
/// Every so many transactions one rolls back.
const ROLLBACK_EVERY: u64 = 25;
/// The pause between two transactions of a publisher.
const PAUSE: Duration = Duration::from_millis(1);
/// Between two turns; shares no factor with the number of customers, so that every one of them orders.
const STEP: u64 = 7;

/// The type that the subscription `invoices` wants.
pub(super) const PAID: &str = "order.paid";

/// What a publisher knows to be committed.
#[derive(Debug, Clone)]
pub(super) struct Published {
    pub(super) id: Uuid,
    pub(super) r#type: &'static str,
}

/// What the demo and its publishers share.
#[derive(Debug, Clone, Default)]
pub(super) struct Pace {
    pub(super) stop: Arc<AtomicBool>,
    pub(super) count: Arc<AtomicU64>,
}

impl Pace {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn note(&self, published: &mut Vec<Published>, event: Option<Published>) {
        if let Some(event) = event {
            published.push(event);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Publishes until it is told to stop; gives back what it knows to be committed.
pub(super) fn start(ground: &Ground, number: usize, pace: &Pace) -> JoinHandle<Result<Vec<Published>>> {
    let (turn, pace) = (number as u64, pace.clone());
    match ground {
        Ground::Sqlite(path) => {
            let path = path.clone();
            tokio::task::spawn_blocking(move || in_sqlite(&path, turn, &pace))
        }
        #[cfg(feature = "postgres")]
        Ground::Postgres(postgres, _) => {
            let postgres = postgres.clone();
            tokio::spawn(async move { in_postgres(&postgres, turn, &pace).await })
        }
    }
}

/// What one turn orders.
struct Order {
    customer: String,
    kind: &'static str,
    cents: i64,
    rolls_back: bool,
}

impl Order {
    fn of(turn: u64) -> Self {
        Order {
            customer: format!("customer-{}", turn % CUSTOMERS),
            kind: if turn.is_multiple_of(3) { PAID } else { "order.placed" },
            cents: (100 + turn % 9_900) as i64,
            rolls_back: turn.is_multiple_of(ROLLBACK_EVERY),
        }
    }

    fn event(&self, id: i64) -> NewEvent {
        NewEvent::new("orders", self.kind).key(&self.customer).json(&json!({ "order": id, "cents": self.cents }))
    }

    fn published(&self, id: Uuid) -> Option<Published> {
        (!self.rolls_back).then_some(Published { id, r#type: self.kind })
    }
}

fn in_sqlite(path: &Path, mut turn: u64, pace: &Pace) -> Result<Vec<Published>> {
    let mut connection = ground::open(path)?;
    let mut published = Vec::new();
    while pace.goes_on() {
        pace.note(&mut published, order_in_sqlite(&mut connection, &Order::of(turn))?);
        turn += STEP;
        thread::sleep(PAUSE);
    }
    Ok(published)
}

/// One order: its row and its event are committed together or not at all.
fn order_in_sqlite(connection: &mut Connection, order: &Order) -> Result<Option<Published>> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let insert = "insert into demo_order (customer, cents) values (?1, ?2)";
    transaction.execute(insert, params![order.customer, order.cents])?;
    let id = pillarbox_sqlite::publish(&transaction, &order.event(transaction.last_insert_rowid()))?;
    if order.rolls_back {
        transaction.rollback()?
    } else {
        transaction.commit()?
    }
    Ok(order.published(id))
}

#[cfg(feature = "postgres")]
async fn in_postgres(postgres: &crate::database::Postgres, mut turn: u64, pace: &Pace) -> Result<Vec<Published>> {
    let mut client = ground::connect(postgres).await?;
    let schema = pillarbox_postgres::Schema::new(ground::SCHEMA)?;
    let mut published = Vec::new();
    while pace.goes_on() {
        pace.note(&mut published, order_in_postgres(&mut client, &schema, &Order::of(turn)).await?);
        turn += STEP;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(published)
}

/// The same on PostgreSQL. Publishers of one customer exclude each other before they publish, as an application's would that
/// lock the row of the customer: so the order of the log is the order of the commits.
#[cfg(feature = "postgres")]
async fn order_in_postgres(
    client: &mut tokio_postgres::Client,
    schema: &pillarbox_postgres::Schema,
    order: &Order,
) -> Result<Option<Published>> {
    let transaction = client.transaction().await?;
    transaction.execute("select pg_advisory_xact_lock(hashtext($1))", &[&order.customer]).await?;
    let insert = format!("insert into {}.demo_order (customer, cents) values ($1, $2) returning id", ground::SCHEMA);
    let row = transaction.query_one(&insert, &[&order.customer, &order.cents]).await?;
    let id = schema.publish(&transaction, &order.event(row.get(0))).await?;
    if order.rolls_back {
        transaction.rollback().await?
    } else {
        transaction.commit().await?
    }
    Ok(order.published(id))
}
