use std::path::{Path, PathBuf};

use anyhow::Result;
use pillarbox::{Delivery, Event, Failure, Handler, with_state};
use rusqlite::params;

use crate::OrderPlaced;
use crate::shop::connect;

/// The revenue so far, in a table of the shop.
#[derive(Debug, Clone)]
pub struct Revenue(PathBuf);

impl Revenue {
    /// The revenue in the database at `path`.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Revenue(path.as_ref().to_owned())
    }

    /// The sum of all orders that were handled.
    pub fn cents(&self) -> Result<i64> {
        Ok(connect(&self.0)?.query_row("select coalesce(sum(cents), 0) from revenue", [], |row| row.get(0))?)
    }

    /// Delivery is at least once, so the event's id decides: an event that comes again changes nothing.
    fn add(&self, event: &Event) -> Result<(), Failure> {
        let placed: OrderPlaced = event.json()?;
        // All events need the database: if it cannot be had, that is not this event's fault.
        let connection = connect(&self.0).map_err(|error| Failure::sink(format!("{error:#}")))?;
        let sql = "insert into revenue (event, cents) values (?1, ?2) on conflict (event) do nothing";
        connection.execute(sql, params![event.id.to_string(), placed.cents])?;
        Ok(())
    }
}

/// The handler that keeps the revenue.
pub fn revenue(revenue: Revenue) -> impl Handler {
    with_state(revenue, keep)
}

/// SQLite blocks; a handler must not hold up the threads that others run on.
async fn keep(revenue: Revenue, delivery: Delivery) -> Result<(), Failure> {
    tokio::task::spawn_blocking(move || revenue.add(&delivery)).await?
}
