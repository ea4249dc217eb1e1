//! The chat on PostgreSQL.

use anyhow::Result;
use pillarbox::{Event, Failure, Relay, RelayBuilder};
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
    let finding = Transactional::new(url, |transaction, event| Box::pin(find_mentions(transaction, event)))?;
    let listing = Transactional::new(url, |transaction, event| Box::pin(list_activity(transaction, event)))?;
    let telling = Transactional::new(url, move |transaction, event| {
        let sockets = sockets.clone();
        Box::pin(async move { tell_person(transaction, event, &sockets).await })
    })?;
    let counting = Transactional::new(url, |transaction, event| Box::pin(count_message(transaction, event)))?;
    Ok(Relay::builder(PostgresStore::open(url).await?)
        .transact(stage::finding(), finding)
        .transact(stage::listing(), listing)
        .transact(stage::telling(), telling)
        .transact(stage::counting(), counting))
}

async fn find_mentions(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
    let message: Message = event.payload.json()?;
    for mention in message.mentions() {
        let Mention { person, conversation, message } = &mention;
        transaction.execute(sql::NOTE_MENTION, &[person, conversation, message]).await?;
        publish(transaction, &mention.created()).await?;
    }
    Ok(())
}

async fn list_activity(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
    let mention: Mention = event.payload.json()?;
    let Mention { person, conversation, message } = &mention;
    let row = transaction.query_one(sql::NOTE_ACTIVITY, &[person, conversation, message]).await?;
    publish(transaction, &Activity { number: row.get(0), mention }.created()).await?;
    Ok(())
}

async fn tell_person(transaction: &Transaction<'_>, event: &Event, sockets: &Sockets) -> Result<(), Failure> {
    let activity: Activity = event.payload.json()?;
    transaction.execute(sql::COUNT_BROADCAST, &[&activity.mention.person, &activity.number]).await?;
    // Last, because no rollback takes back what a socket has taken.
    sockets.send(activity)
}

async fn count_message(transaction: &Transaction<'_>, event: &Event) -> Result<(), Failure> {
    transaction.execute(sql::COUNT_MESSAGE, &[&event.key.as_deref()]).await?;
    Ok(())
}
