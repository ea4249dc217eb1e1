use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use pillarbox::NewEvent;
use rusqlite::{Connection, TransactionBehavior, params};
use serde_json::json;
use uuid::Uuid;

/// How many customers order; each is a key.
const CUSTOMERS: u64 = 40;
/// Every so many transactions one rolls back.
const ROLLBACK_EVERY: u64 = 25;
/// The pause between two transactions of a publisher.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a publisher waits for the writer's turn.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// The type that the subscription `invoices` wants.
pub(super) const PAID: &str = "order.paid";

/// What a publisher knows to be committed.
#[derive(Debug, Clone)]
pub(super) struct Published {
    pub(super) id: Uuid,
    pub(super) r#type: &'static str,
}

/// The application's own table.
pub(super) fn create_tables(path: &Path) -> Result<()> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.execute_batch(
        "create table demo_order (id integer primary key, customer text not null, cents integer not null)",
    )?;
    Ok(())
}

/// Publishes until it is told to stop; gives back what it knows to be committed.
pub(super) fn start(
    path: PathBuf,
    number: usize,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
) -> JoinHandle<Result<Vec<Published>>> {
    thread::spawn(move || {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        let mut published = Vec::new();
        let mut turn = number as u64;
        while !stop.load(Ordering::Relaxed) {
            if let Some(event) = order(&mut connection, turn)? {
                published.push(event);
                count.fetch_add(1, Ordering::Relaxed);
            }
            // Steps that share no factor with the number of customers reach every one of them.
            turn += 7;
            thread::sleep(PAUSE);
        }
        Ok(published)
    })
}

/// One order: its row and its event are committed together or not at all.
fn order(connection: &mut Connection, turn: u64) -> Result<Option<Published>> {
    let customer = format!("customer-{}", turn % CUSTOMERS);
    let kind = if turn.is_multiple_of(3) { PAID } else { "order.placed" };
    let cents = 100 + turn % 9_900;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute("insert into demo_order (customer, cents) values (?1, ?2)", params![customer, cents as i64])?;
    let order = transaction.last_insert_rowid();
    let event = NewEvent::new("orders", kind).key(&customer).json(&json!({ "order": order, "cents": cents }));
    let id = pillarbox_sqlite::publish(&transaction, &event)?;
    if turn.is_multiple_of(ROLLBACK_EVERY) {
        transaction.rollback()?;
        return Ok(None);
    }
    transaction.commit()?;
    Ok(Some(Published { id, r#type: kind }))
}
