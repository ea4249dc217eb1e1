//! The chat on PostgreSQL.

use anyhow::Result;
use pillarbox::{Delivery, Failure, Relay, RelayBuilder, with_state};
use pillarbox_postgres::{PgConfig, PostgresStore, Transactional, publish, publish_all};
use tokio_postgres::{Client, Transaction};

use crate::{Activity, Mention, Message, Sockets, sql, stage};

pub(crate) async fn prepare(url: &str) -> Result<()> {
    let config: PgConfig = url.parse()?;
    pillarbox_postgres::migrate(&config).await?;
    config.connect("chat").await?.batch_execute(sql::TABLES).await?;
    Ok(())
}

pub(crate) async fn open(url: &str) -> Result<Client> {
    Ok(url.parse::<PgConfig>()?.connect("chat").await?)
}

/// Writes messages, which get their numbers, and publishes them, in the caller's own transaction.
pub async fn post(transaction: &Transaction<'_>, messages: &mut [Message]) -> Result<()> {
    for message in messages {
        message.number = transaction.query_one(sql::NEXT_NUMBER, &[&message.conversation]).await?.get(0);
        let Message { conversation, number, author, body } = &*message;
        transaction.execute(sql::WRITE_MESSAGE, &[conversation, number, author, body]).await?;
        publish_all(transaction, &message.events()).await?;
    }
    Ok(())
}

/// The whole pipeline, not yet started.
pub(crate) async fn pipeline(url: &str, sockets: Sockets) -> Result<RelayBuilder<PostgresStore>> {
    Ok(Relay::builder(PostgresStore::open(url).await?)
        .transact(stage::finding(), Transactional::new(url, find_mentions)?)
        .transact(stage::listing(), Transactional::new(url, list_activity)?)
        .transact(stage::telling(), Transactional::new(url, with_state(sockets, tell_person))?)
        .transact(stage::counting(), Transactional::new(url, count_message)?))
}

async fn find_mentions(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    let message: Message = delivery.json()?;
    for mention in message.mentions() {
        let Mention { person, conversation, message } = &mention;
        transaction.execute(sql::NOTE_MENTION, &[person, conversation, message]).await?;
        publish(transaction, &mention.created()).await?;
    }
    Ok(())
}

async fn list_activity(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    let mention: Mention = delivery.json()?;
    let Mention { person, conversation, message } = &mention;
    let row = transaction.query_one(sql::NOTE_ACTIVITY, &[person, conversation, message]).await?;
    publish(transaction, &Activity { number: row.get(0), mention }.created()).await?;
    Ok(())
}

async fn tell_person(sockets: Sockets, transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    let activity: Activity = delivery.json()?;
    transaction.execute(sql::COUNT_BROADCAST, &[&activity.mention.person, &activity.number]).await?;
    // Last, because no rollback takes back what a socket has taken.
    sockets.send(activity)
}

async fn count_message(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    transaction.execute(sql::COUNT_MESSAGE, &[&delivery.key]).await?;
    Ok(())
}
