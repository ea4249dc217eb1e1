use pillarbox::admin::{PrunePolicy, Pruned};
use pillarbox::{Result, Timestamp};
use rusqlite::{Transaction, params};
use uuid::Uuid;

use crate::error::Db;

/// Accepts an event in the receiver's own transaction: true the first time, and then the effect belongs in the same transaction;
/// false if `consumer` has accepted this id before.
///
/// A rollback forgets that it was accepted. Begin the transaction with `BEGIN IMMEDIATE`, so that a second receiver waits for the
/// first. Ids are remembered for [`PrunePolicy::inbox`], 30 days by default. From other languages, an INSERT that changes no row says
/// that the id was accepted before:
///
/// ```sql
/// insert into pillarbox_inbox (consumer, id) values ('billing', :id) on conflict do nothing
/// ```
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("app.db");
/// # pillarbox_sqlite::migrate(&path)?;
/// # let mut connection = rusqlite::Connection::open(&path)?;
/// # connection.execute_batch("create table account (balance integer); insert into account values (0)")?;
/// # let id = uuid::Uuid::now_v7();
/// for _ in 0..2 {
///     let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
///     if pillarbox_sqlite::accept(&transaction, "billing", id)? {
///         transaction.execute("update account set balance = balance + 1", [])?;
///     }
///     transaction.commit()?;
/// }
/// let balance: i64 = connection.query_row("select balance from account", [], |row| row.get(0))?;
/// assert_eq!(balance, 1);
/// # Ok(())
/// # }
/// ```
pub fn accept(transaction: &Transaction<'_>, consumer: &str, id: Uuid) -> Result<bool> {
    Ok(insert(transaction, consumer, id)?)
}

fn insert(transaction: &Transaction<'_>, consumer: &str, id: Uuid) -> Db<bool> {
    let mut statement = transaction.prepare_cached(sql!(inbox, "accept"))?;
    Ok(statement.execute(params![consumer, id.to_string()])? == 1)
}

/// Removes a slice of what was accepted long ago.
pub(crate) fn prune(tx: &Transaction<'_>, now: Timestamp, policy: &PrunePolicy, pruned: &mut Pruned) -> Db<()> {
    let Some(age) = policy.inbox else { return Ok(()) };
    let oldest = now.0.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
    let slice = i64::try_from(policy.slice.max(1)).unwrap_or(i64::MAX);
    pruned.inbox = tx.execute(sql!(inbox, "prune"), params![oldest, slice])? as u64;
    pruned.more |= pruned.inbox as i64 == slice;
    Ok(())
}
