use std::cell::Cell;
use std::time::SystemTime;

use pillarbox::admin::Limits;
use pillarbox::limit::NAME_BYTES_MAX;
use pillarbox::{Error, ErrorKind, Headers, NewEvent, Payload, Position, Result, Timestamp};
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;

use crate::connection::{horizon, meta_number, set_meta};
use crate::doorbell::{bells_of, expect_commit};
use crate::error::{Db, DbError};
use crate::reader::id_of;

/// Publishes an event in the caller's own transaction: it is delivered if and only if that commits.
///
/// Returns the event's id, or with a `dedup_key` that was seen inside its window the id of the first event, and then
/// publishes nothing. A refused event ([`ErrorKind::Invalid`]) leaves nothing behind, and the transaction may go on.
///
/// A transaction that reads before it publishes should be `BEGIN IMMEDIATE`: SQLite fails a deferred one at once, without
/// waiting, if another connection has written since its first read.
pub fn publish(transaction: &Connection, event: &NewEvent) -> Result<Uuid> {
    let published = insert(transaction, event, None)?;
    expect_commit(transaction, published.made);
    Ok(published.id)
}

/// Publishes events in order, as [`publish`] does. After an error the caller should roll back: those before it are published.
pub fn publish_all(transaction: &Connection, events: &[NewEvent]) -> Result<Vec<Uuid>> {
    let published = events.iter().map(|event| insert(transaction, event, None)).collect::<Db<Vec<_>>>()?;
    expect_commit(transaction, published.last().and_then(|last| last.made));
    Ok(published.into_iter().map(|published| published.id).collect())
}

/// Commits the caller's transaction and at once rings the relays of this process for the events in it.
///
/// Nothing depends on it: after a plain [`Transaction::commit`] a relay finds the events by itself, which takes it a part of a
/// millisecond of a core. Events may have been published by [`publish`] or by plain inserts; a transaction without any may
/// be committed so too. After an error nothing is committed.
pub fn commit(transaction: Transaction<'_>) -> Result<()> {
    let bells = bells_of(&transaction);
    // Asked while nobody else can write. Without an answer the relays find the events by themselves.
    let horizon = if bells.is_empty() { None } else { horizon(&transaction).ok() };
    transaction.commit().map_err(DbError::from)?;
    if let Some(horizon) = horizon {
        bells.iter().for_each(|bell| bell.committed(horizon));
    }
    Ok(())
}

/// What became of one event.
pub(crate) struct Published {
    id: Uuid,
    /// Where it was inserted, if its id was made here and so is no other event's.
    pub(crate) made: Option<(Position, Uuid)>,
}

/// Inserts an event, into a stream of the journal with its version if there is one.
pub(crate) fn insert(connection: &Connection, event: &NewEvent, stream: Option<(&str, i64)>) -> Db<Published> {
    check_names(event)?;
    let now = Timestamp::now();
    if let Some(id) = find_duplicate(connection, event, now)? {
        return Ok(Published { id, made: None });
    }
    let id = event.id.unwrap_or_else(new_id);
    let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
    let text = &*id.hyphenated().encode_lower(&mut text);
    let headers = Headers::from_map(&event.headers);
    // The table's own checks look at the payload's size and form, so that it is parsed once and alike for all publishers.
    connection.prepare_cached(sql!(publish, "event"))?.execute(params![
        text,
        event.topic,
        stream.map_or(event.key.as_deref(), |(name, _)| Some(name)),
        event.r#type,
        payload_value(&event.payload),
        event.content_type,
        headers.as_json(),
        event.deliver_at.map(|at| at.0),
        now.0,
        stream.map(|(_, version)| version),
    ])?;
    let made = event.id.is_none().then(|| (connection.last_insert_rowid(), id));
    if let Some(dedup_key) = &event.dedup_key {
        let mut statement = connection.prepare_cached(sql!(publish, "dedup_put"))?;
        statement.execute(params![event.topic, event.key.as_deref().unwrap_or(""), dedup_key, text, now.0])?;
    }
    Ok(Published { id, made })
}

/// A new time-ordered id (version 7, with the part of the millisecond in `rand_a`).
///
/// The random part comes from a seed of the thread and a counter: asking the system for each id costs a sixth of the
/// insert. The process id takes part because a forked child has the same seed and counter.
fn new_id() -> Uuid {
    thread_local! {
        static SEED: Cell<(u128, u64)> = Cell::new((Uuid::new_v4().as_u128(), 0));
    }
    let (seed, counter) = SEED.get();
    SEED.set((seed, counter.wrapping_add(1)));
    let mut source = [0; 28];
    source[..16].copy_from_slice(&seed.to_ne_bytes());
    source[16..24].copy_from_slice(&counter.to_ne_bytes());
    source[24..].copy_from_slice(&std::process::id().to_ne_bytes());
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let fraction = (since.subsec_nanos() % 1_000_000) * 4096 / 1_000_000;
    let mut random = [0; 10];
    random[..2].copy_from_slice(&(fraction as u16).to_be_bytes());
    random[2..].copy_from_slice(&xxh3_128(&source).to_be_bytes()[..8]);
    uuid::Builder::from_unix_timestamp_millis(since.as_millis() as u64, &random).into_uuid()
}

/// The id of the first event with the same deduplication key, if it lies inside the window.
fn find_duplicate(connection: &Connection, event: &NewEvent, now: Timestamp) -> Db<Option<Uuid>> {
    let Some(dedup_key) = &event.dedup_key else { return Ok(None) };
    if connection.is_autocommit() {
        return Err(DbError::own(
            ErrorKind::Invalid,
            "an event with a dedup_key is published outside a transaction; begin one, best with BEGIN IMMEDIATE",
        ));
    }
    let oldest = now.0.saturating_sub(meta_number(connection, "dedup_window_ms")?);
    let mut statement = connection.prepare_cached(sql!(publish, "dedup_find"))?;
    let key = event.key.as_deref().unwrap_or("");
    let first = statement.query_row(params![event.topic, key, dedup_key, oldest], |row| row.get::<_, String>(0));
    Ok(first.optional()?.map(|id| id_of(id.as_bytes())))
}

/// The cheap half of [`NewEvent::validate`]; the other half are the table's checks.
fn check_names(event: &NewEvent) -> Result<()> {
    let names = [
        ("topic", Some(&event.topic)),
        ("type", Some(&event.r#type)),
        ("key", event.key.as_ref()),
        ("dedup_key", event.dedup_key.as_ref()),
    ];
    for (name, value) in names {
        let Some(length) = value.map(String::len) else { continue };
        if !(1..=NAME_BYTES_MAX).contains(&length) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the {name} has {length} bytes, which is not 1 to name_bytes_max = {NAME_BYTES_MAX}"),
            ));
        }
    }
    Ok(())
}

fn payload_value(payload: &Payload) -> ToSqlOutput<'_> {
    ToSqlOutput::Borrowed(match payload {
        Payload::None => ValueRef::Null,
        Payload::Json(text) => ValueRef::Text(text.as_bytes()),
        Payload::Bytes(bytes) => ValueRef::Blob(bytes),
    })
}

/// Writes limits, in the caller's transaction.
pub(crate) fn store_limits(connection: &Connection, limits: &Limits) -> Db<()> {
    let limits = limits.to_store()?;
    if let Some(bytes) = limits.payload_bytes_max {
        set_payload_limit(connection, bytes.into())?;
    }
    let times = [
        ("dedup_window_ms", limits.dedup_window_ms),
        ("retention_keep_ms", limits.retention_keep_ms),
        ("retention_dead_ms", limits.retention_dead_ms),
        ("retention_inbox_ms", limits.retention_inbox_ms),
    ];
    times.into_iter().try_for_each(|(name, time)| time.map_or(Ok(()), |time| set_meta(connection, name, time)))
}

/// Writes the limit into the table's check, in the way that SQLite's manual gives for changes of a check constraint.
fn set_payload_limit(connection: &Connection, bytes: i64) -> Db<()> {
    let check = |bytes: i64| format!("check (length(cast(payload as blob)) <= {bytes})");
    let before = check(meta_number(connection, "payload_bytes_max")?);
    let version: i64 = connection.pragma_query_value(None, "schema_version", |row| row.get(0))?;
    connection.pragma_update(None, "writable_schema", true)?;
    let changed = connection.execute(sql!(schema, "set_check"), [before, check(bytes)]);
    connection.pragma_update(None, "writable_schema", false)?;
    if changed? != 1 {
        return Err(DbError::own(ErrorKind::Schema, "the event table was changed by hand; its limit cannot be set"));
    }
    connection.pragma_update(None, "schema_version", version + 1)?;
    set_meta(connection, "payload_bytes_max", bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_ids_are_of_version_7_differ_and_follow_time() {
        let ids: Vec<Uuid> = (0..10_000).map(|_| new_id()).collect();
        assert!(ids.iter().all(|id| id.get_version_num() == 7 && id.get_variant() == uuid::Variant::RFC4122));
        assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), ids.len());
        let (seconds, _) = ids[0].get_timestamp().expect("version 7 has a time").to_unix();
        assert!((Timestamp::now().0 / 1000 - seconds as i64).abs() <= 1);
        assert!(ids[0].as_u128() >> 64 <= ids[9_999].as_u128() >> 64);
    }
}
