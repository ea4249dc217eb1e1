use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use pillarbox_postgres::PgConfig;
use rusqlite::{Connection, TransactionBehavior, params};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::Client;

use crate::Message;

/// Who accepts: another consumer in the same database would have an inbox of its own.
const CONSUMER: &str = "billing";

/// Neither the invoices nor the repeated messages have a key: nothing but the inbox keeps an invoice from being written twice.
const TABLES: &str = "create table if not exists invoice (order_number bigint not null, cents bigint not null);
    create table if not exists repeated (order_number bigint not null);";

const INVOICE: &str = "insert into invoice (order_number, cents) values ($1, $2)";
const REPEATED: &str = "insert into repeated (order_number) values ($1)";

/// The receiving service, with a connection to its database.
pub enum Billing {
    /// In a file.
    Sqlite(Connection),
    /// On a server.
    Postgres(Client),
}

impl Billing {
    /// Creates the tables of billing, and Pillarbox's beside them.
    pub async fn prepare(database: &str) -> Result<()> {
        if database.starts_with("postgres://") {
            let config: PgConfig = database.parse()?;
            pillarbox_postgres::migrate(&config).await?;
            config.connect("billing").await?.batch_execute(TABLES).await?;
        } else {
            pillarbox_sqlite::migrate(database)?;
            connect(database)?.execute_batch(TABLES)?;
        }
        Ok(())
    }

    /// Connects to a prepared database: a file, or `postgres://…`.
    pub async fn open(database: &str) -> Result<Self> {
        if database.starts_with("postgres://") {
            let config: PgConfig = database.parse()?;
            return Ok(Billing::Postgres(config.connect("billing").await?));
        }
        Ok(Billing::Sqlite(connect(database)?))
    }

    /// Writes an invoice, unless this message was received before. When this returns, that is committed.
    pub async fn receive(&mut self, message: &Message) -> Result<()> {
        match self {
            Billing::Sqlite(connection) => tokio::task::block_in_place(|| receive_on_sqlite(connection, message)),
            Billing::Postgres(client) => receive_on_postgres(client, message).await,
        }
    }

    /// Serves one shop after the other, or several at once, for ever. With `crash` the process ends after its first commit, before
    /// the answer: what a crash at the worst moment is.
    pub async fn serve(database: &str, listener: TcpListener, crash: bool) -> Result<()> {
        loop {
            let (stream, _) = listener.accept().await?;
            let billing = Billing::open(database).await?;
            tokio::spawn(async move {
                if let Err(error) = billing.answer(stream, crash).await {
                    eprintln!("billing: {error:#}");
                }
            });
        }
    }

    /// Answers each line with the id, once it is committed. After an error the connection ends, and the shop sends again.
    async fn answer(mut self, mut stream: TcpStream, crash: bool) -> Result<()> {
        let (read, mut write) = stream.split();
        let mut lines = BufReader::new(read).lines();
        while let Some(line) = lines.next_line().await? {
            let message: Message = serde_json::from_str(&line).context("no message")?;
            self.receive(&message).await?;
            if crash {
                std::process::abort();
            }
            write.write_all(format!("{}\n", message.id).as_bytes()).await?;
        }
        Ok(())
    }
}

fn receive_on_sqlite(connection: &mut Connection, message: &Message) -> Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if pillarbox_sqlite::accept(&transaction, CONSUMER, message.id)? {
        transaction.execute(INVOICE, params![message.order, message.cents])?;
    } else {
        transaction.execute(REPEATED, params![message.order])?;
    }
    Ok(transaction.commit()?)
}

async fn receive_on_postgres(client: &mut Client, message: &Message) -> Result<()> {
    let transaction = client.transaction().await?;
    if pillarbox_postgres::accept(&transaction, CONSUMER, message.id).await? {
        transaction.execute(INVOICE, &[&message.order, &message.cents]).await?;
    } else {
        transaction.execute(REPEATED, &[&message.order]).await?;
    }
    Ok(transaction.commit().await?)
}

/// A connection that waits for other writers.
pub(crate) fn connect(path: impl AsRef<Path>) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    Ok(connection)
}
