//! What both databases are told in the same words.

pub(crate) const TABLES: &str = include_str!("sql/tables.sql");

/// Gives a conversation's next message its number. Until the transaction ends nobody else can post there, so that the order of
/// the numbers is the order in which the events are committed.
pub(crate) const NEXT_NUMBER: &str = include_str!("sql/next_number.sql");

pub(crate) const WRITE_MESSAGE: &str = include_str!("sql/write_message.sql");
pub(crate) const NOTE_MENTION: &str = include_str!("sql/note_mention.sql");

/// Two at once for one person would get the same number; the key of the events keeps them apart.
pub(crate) const NOTE_ACTIVITY: &str = include_str!("sql/note_activity.sql");

pub(crate) const COUNT_BROADCAST: &str = include_str!("sql/count_broadcast.sql");
pub(crate) const COUNT_MESSAGE: &str = include_str!("sql/count_message.sql");
