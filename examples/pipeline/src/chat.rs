use anyhow::Result;
use pillarbox::{Relay, RelayConfig};
use rusqlite::{Connection, TransactionBehavior};
use tokio_postgres::Client;

use crate::{Message, Sockets, postgres, sqlite};

/// A connection to the chat's database, for one who posts.
pub enum Chat {
    /// In a file.
    Sqlite(Connection),
    /// On a server.
    Postgres(Client),
}

impl Chat {
    /// Creates the tables of the chat, and Pillarbox's beside them, where they are not there: in a file, or at `postgres://…`.
    pub async fn prepare(database: &str) -> Result<()> {
        if is_url(database) { postgres::prepare(database).await } else { sqlite::prepare(database) }
    }

    /// Connects to a prepared database.
    pub async fn open(database: &str) -> Result<Self> {
        if is_url(database) {
            return Ok(Chat::Postgres(postgres::open(database).await?));
        }
        Ok(Chat::Sqlite(sqlite::open(database)?))
    }

    /// Posts messages, all of them or none, and returns them with the numbers that they got.
    pub async fn post(&mut self, conversation: &str, author: &str, bodies: &[String]) -> Result<Vec<Message>> {
        let mut messages: Vec<Message> = bodies.iter().map(|body| Message::new(conversation, author, body)).collect();
        match self {
            Chat::Sqlite(connection) => tokio::task::block_in_place(|| {
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                sqlite::post(&transaction, &mut messages)?;
                Ok::<(), anyhow::Error>(pillarbox_sqlite::commit(transaction)?)
            })?,
            Chat::Postgres(client) => {
                let transaction = client.transaction().await?;
                postgres::post(&transaction, &mut messages).await?;
                transaction.commit().await?;
            }
        }
        Ok(messages)
    }

    /// Starts the pipeline behind the messages, in this process. Any number of processes may run it at once.
    pub async fn pipeline(database: &str, sockets: &Sockets, config: RelayConfig) -> Result<Relay> {
        if is_url(database) {
            return Ok(postgres::pipeline(database, sockets.clone()).await?.config(config).start().await?);
        }
        Ok(sqlite::pipeline(database, sockets.clone())?.config(config).start().await?)
    }
}

fn is_url(database: &str) -> bool {
    database.starts_with("postgres://") || database.starts_with("postgresql://")
}
