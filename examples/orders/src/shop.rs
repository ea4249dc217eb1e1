use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use pillarbox::{Relay, RelayBuilder, Subscription};
use pillarbox_sqlite::SqliteStore;
use rusqlite::Connection;

use crate::{Mailbox, Revenue, TOPIC, confirmations, revenue};

/// Creates the shop's tables and Pillarbox's beside them.
pub fn prepare(path: impl AsRef<Path>) -> Result<()> {
    pillarbox_sqlite::migrate(&path)?;
    connect(path)?.execute_batch(
        "create table if not exists orders (id integer primary key, customer text not null, cents integer not null);
         create table if not exists revenue (event text primary key, cents integer not null);",
    )?;
    Ok(())
}

/// A connection of the shop; it waits for other writers.
pub fn connect(path: impl AsRef<Path>) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    Ok(connection)
}

/// The relay of this service, not yet started: one subscription a handler, so that neither waits for the other.
pub fn relay(path: impl AsRef<Path>, mailbox: &Mailbox) -> Result<RelayBuilder<SqliteStore>> {
    let store = SqliteStore::open(&path)?;
    let builder = Relay::builder(store)
        .handle(Subscription::new("confirmations").topics([TOPIC]), confirmations(mailbox.clone()))
        .handle(Subscription::new("revenue").topics([TOPIC]), revenue(Revenue::new(path)));
    Ok(builder)
}
