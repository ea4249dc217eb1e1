use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pillarbox::{Delivery, Failure, NewEvent, Relay, RelayConfig, Subscription, with_state};
use pillarbox_postgres::{PgConfig, PostgresStore};
use pillarbox_sqlite::SqliteStore;
use rusqlite::{Connection, TransactionBehavior, params};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_postgres::Client;

use crate::Message;
use crate::billing::connect;
use crate::message::Order;

const TABLES: &str = "create table if not exists placed (order_number bigint primary key, cents bigint not null);";
const NEXT: &str = "select coalesce(max(order_number), 0) + 1 from placed";
const PLACE: &str = "insert into placed (order_number, cents) values ($1, $2)";

/// On PostgreSQL a relay that was killed is replaced after this time, if nobody else was there to see it go.
const LEASE: Duration = Duration::from_secs(1);

/// How long billing may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A receiver that was restarted is back this soon, or else it is down.
const CONNECT_PATIENCE: Duration = Duration::from_millis(500);
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// The publishing service, with a connection to its database.
pub enum Shop {
    /// In a file.
    Sqlite(Connection),
    /// On a server.
    Postgres(Client),
}

impl Shop {
    /// Creates the tables of the shop, and Pillarbox's beside them, and connects: to a file, or to `postgres://…`.
    pub async fn open(database: &str) -> Result<Self> {
        if database.starts_with("postgres://") {
            let config: PgConfig = database.parse()?;
            pillarbox_postgres::migrate(&config).await?;
            let client = config.connect("shop").await?;
            client.batch_execute(TABLES).await?;
            return Ok(Shop::Postgres(client));
        }
        pillarbox_sqlite::migrate(database)?;
        let connection = connect(database)?;
        connection.execute_batch(TABLES)?;
        Ok(Shop::Sqlite(connection))
    }

    /// Places the next order, unless there are `last` already, and publishes it in the same transaction. Its price is its number.
    pub async fn place(&mut self, last: i64) -> Result<bool> {
        match self {
            Shop::Sqlite(connection) => tokio::task::block_in_place(|| place_on_sqlite(connection, last)),
            Shop::Postgres(client) => place_on_postgres(client, last).await,
        }
    }

    /// The relay that sends what the shop publishes. What it has sent and not settled when it is killed it sends again.
    pub async fn relay(database: &str, sender: Sender) -> Result<Relay> {
        let subscription = Subscription::new("billing").topics(["orders"]);
        let handler = with_state(Arc::new(sender), send);
        let mut config = RelayConfig::default();
        config.engine.lease_ttl = LEASE;
        if database.starts_with("postgres://") {
            let builder = Relay::builder(PostgresStore::open(database).await?).config(config);
            return Ok(builder.handle(subscription, handler).start().await?);
        }
        let builder = Relay::builder(SqliteStore::open(database)?).config(config);
        Ok(builder.handle(subscription, handler).start().await?)
    }
}

async fn send(sender: Arc<Sender>, delivery: Delivery) -> Result<(), Failure> {
    sender.send(&Message::of(&delivery)?).await
}

fn event(order: i64) -> NewEvent {
    NewEvent::new("orders", "order.placed").key(order.to_string()).json(&Order { order, cents: order })
}

fn place_on_sqlite(connection: &mut Connection, last: i64) -> Result<bool> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let order: i64 = transaction.query_row(NEXT, [], |row| row.get(0))?;
    if order > last {
        return Ok(false);
    }
    transaction.execute(PLACE, params![order, order])?;
    pillarbox_sqlite::publish(&transaction, &event(order))?;
    pillarbox_sqlite::commit(transaction)?;
    Ok(true)
}

async fn place_on_postgres(client: &mut Client, last: i64) -> Result<bool> {
    let transaction = client.transaction().await?;
    let order: i64 = transaction.query_one(NEXT, &[]).await?.get(0);
    if order > last {
        return Ok(false);
    }
    transaction.execute(PLACE, &[&order, &order]).await?;
    pillarbox_postgres::publish(&transaction, &event(order)).await?;
    transaction.commit().await?;
    Ok(true)
}

/// Sends messages to billing, over a connection that is made again when it was lost.
pub struct Sender {
    address: String,
    stream: Mutex<Option<BufReader<TcpStream>>>,
}

impl Sender {
    /// To `HOST:PORT`.
    pub fn new(address: impl Into<String>) -> Self {
        Sender { address: address.into(), stream: Mutex::default() }
    }

    /// Sends a message and waits until billing has committed it. If anything goes wrong on the way nobody knows whether it has: it is
    /// sent again.
    pub async fn send(&self, message: &Message) -> Result<(), Failure> {
        let mut slot = self.stream.lock().await;
        // Taken out, so that a stream with an answer that nobody has read is never used again.
        let mut stream = match slot.take() {
            Some(stream) => stream,
            None => self.connect().await?,
        };
        let sent = tokio::time::timeout(ANSWER_TIMEOUT, exchange(&mut stream, message)).await;
        let sent = sent.unwrap_or_else(|_| anyhow::bail!("billing does not answer"));
        sent.map_err(|error| Failure::sink(format!("{error:#}")))?;
        *slot = Some(stream);
        Ok(())
    }

    async fn connect(&self) -> Result<BufReader<TcpStream>, Failure> {
        let connecting = async {
            loop {
                match TcpStream::connect(&self.address).await {
                    Ok(stream) => return BufReader::new(stream),
                    Err(_) => tokio::time::sleep(CONNECT_PAUSE).await,
                }
            }
        };
        let connected = tokio::time::timeout(CONNECT_PATIENCE, connecting).await;
        connected.map_err(|_| Failure::sink("billing is down"))
    }
}

async fn exchange(stream: &mut BufReader<TcpStream>, message: &Message) -> Result<()> {
    stream.write_all(message.line()?.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    anyhow::ensure!(answer.trim_end() == message.id.to_string(), "billing has not answered");
    Ok(())
}
