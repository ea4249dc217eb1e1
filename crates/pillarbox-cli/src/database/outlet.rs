use anyhow::Result;
use pillarbox::{NewEvent, Operator};
use uuid::Uuid;

use super::Database;
use crate::log::Log;

/// Where events are published.
pub(crate) enum Outlet {
    /// An opened log.
    Log(Log),
    /// A connection, as an application has one: a role that may publish and nothing else could not open the log.
    #[cfg(feature = "postgres")]
    Postgres(Box<tokio_postgres::Client>, pillarbox_postgres::Publisher),
}

impl Database {
    pub(crate) async fn outlet(&self) -> Result<Outlet> {
        match self {
            Database::Sqlite(_) => Ok(Outlet::Log(self.open().await?)),
            #[cfg(feature = "postgres")]
            Database::Postgres(postgres) => {
                let client = postgres.config().connect("pillarbox publish").await;
                let publisher = pillarbox_postgres::Publisher::new(postgres.config().schema())?;
                Ok(Outlet::Postgres(Box::new(client.map_err(|error| self.explain(error))?), publisher))
            }
        }
    }
}

impl Outlet {
    /// Publishes events in one transaction; the ids, of the first event where one was a duplicate.
    pub(crate) async fn publish(&mut self, events: &[NewEvent]) -> pillarbox::Result<Vec<Uuid>> {
        match self {
            Outlet::Log(log) => log.publish(events).await,
            #[cfg(feature = "postgres")]
            Outlet::Postgres(client, publisher) => {
                let transaction = client.transaction().await.map_err(failed)?;
                let ids = publisher.publish_all(&transaction, events).await?;
                transaction.commit().await.map_err(failed)?;
                Ok(ids)
            }
        }
    }
}

#[cfg(feature = "postgres")]
fn failed(error: tokio_postgres::Error) -> pillarbox::Error {
    pillarbox::Error::with_source(pillarbox::ErrorKind::Unavailable, "the events could not be committed", error)
}
