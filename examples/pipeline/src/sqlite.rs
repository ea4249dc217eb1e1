//! The chat on SQLite.

use std::time::Duration;

use anyhow::Result;
use pillarbox::{Delivery, Failure, Relay, RelayBuilder};
use pillarbox_sqlite::{SqliteStore, Transactional, publish, publish_all};
use rusqlite::{Connection, Transaction};

use crate::{Activity, Mention, Message, Sockets, sql, stage};

/// How long a writer waits for the others.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn prepare(path: &str) -> Result<()> {
    pillarbox_sqlite::migrate(path)?;
    Ok(open(path)?.execute_batch(sql::TABLES)?)
}

pub(crate) fn open(path: &str) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Writes messages, which get their numbers, and publishes them, in the caller's own transaction.
pub fn post(transaction: &Transaction<'_>, messages: &mut [Message]) -> Result<()> {
    for message in messages {
        message.number = transaction.query_row(sql::NEXT_NUMBER, [&message.conversation], |row| row.get(0))?;
        let Message { conversation, number, author, body } = &*message;
        transaction.execute(sql::WRITE_MESSAGE, (conversation, number, author, body))?;
        publish_all(transaction, &message.events())?;
    }
    Ok(())
}

/// The whole pipeline, not yet started.
pub(crate) fn pipeline(path: &str, sockets: Sockets) -> Result<RelayBuilder<SqliteStore>> {
    let tell_person =
        move |transaction: &Transaction<'_>, delivery: Delivery| tell_person(transaction, delivery, &sockets);
    Ok(Relay::builder(SqliteStore::open(path)?)
        .transact(stage::finding(), Transactional::new(path, find_mentions)?)
        .transact(stage::listing(), Transactional::new(path, list_activity)?)
        .transact(stage::telling(), Transactional::new(path, tell_person)?)
        .transact(stage::counting(), Transactional::new(path, count_message)?))
}

fn find_mentions(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    let message: Message = delivery.json()?;
    for mention in message.mentions() {
        transaction.execute(sql::NOTE_MENTION, (&mention.person, &mention.conversation, mention.message))?;
        publish(transaction, &mention.created())?;
    }
    Ok(())
}

fn list_activity(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    let mention: Mention = delivery.json()?;
    let values = (&mention.person, &mention.conversation, mention.message);
    let number = transaction.query_row(sql::NOTE_ACTIVITY, values, |row| row.get(0))?;
    publish(transaction, &Activity { number, mention }.created())?;
    Ok(())
}

fn tell_person(transaction: &Transaction<'_>, delivery: Delivery, sockets: &Sockets) -> Result<(), Failure> {
    let activity: Activity = delivery.json()?;
    transaction.execute(sql::COUNT_BROADCAST, (&activity.mention.person, activity.number))?;
    // Last, because no rollback takes back what a socket has taken.
    sockets.send(activity)
}

fn count_message(transaction: &Transaction<'_>, delivery: Delivery) -> Result<(), Failure> {
    transaction.execute(sql::COUNT_MESSAGE, [&delivery.key])?;
    Ok(())
}
