use std::path::Path;
use std::time::{Duration, Instant};

use pillarbox::NewEvent;
use rusqlite::TransactionBehavior::Immediate;

use crate::Result;
use crate::database::{BARE_TABLE, BareRow, bare_row, connect, event, insert_bare};
use crate::process::Figures;

const BATCH: usize = 100;
/// Transactions of one kind before the other kind has its turn.
const TURN: usize = 20;

/// One event a transaction.
pub(crate) fn one_by_one(folder: &Path, transactions: usize) -> Result<Figures> {
    in_turns(folder, transactions, 1)
}

/// A hundred events a transaction.
pub(crate) fn in_batches(folder: &Path, transactions: usize) -> Result<Figures> {
    in_turns(folder, transactions, BATCH)
}

/// Publishes and inserts by hand in turns, into a file each. The values are made beforehand for both.
fn in_turns(folder: &Path, transactions: usize, batch: usize) -> Result<Figures> {
    std::fs::create_dir_all(folder)?;
    let log = folder.join("log.db");
    pillarbox_sqlite::migrate(&log)?;
    let (mut log, mut bare) = (connect(&log)?, connect(&folder.join("bare.db"))?);
    bare.execute_batch(BARE_TABLE)?;
    let (mut ours, mut theirs) = (Duration::ZERO, Duration::ZERO);
    let mut done = 0;
    while done < transactions {
        let turn = TURN.min(transactions - done);
        let numbers = done * batch..(done + turn) * batch;
        let events: Vec<NewEvent> = numbers.clone().map(event).collect();
        let rows: Vec<BareRow> = numbers.map(bare_row).collect();

        let started = Instant::now();
        for events in events.chunks(batch) {
            let transaction = log.transaction_with_behavior(Immediate)?;
            for event in events {
                pillarbox_sqlite::publish(&transaction, event)?;
            }
            transaction.commit()?;
        }
        ours += started.elapsed();

        let started = Instant::now();
        for rows in rows.chunks(batch) {
            let transaction = bare.transaction_with_behavior(Immediate)?;
            for row in rows {
                insert_bare(&transaction, row)?;
            }
            transaction.commit()?;
        }
        theirs += started.elapsed();
        done += turn;
    }
    let rate = |elapsed: Duration| (transactions * batch) as f64 / elapsed.as_secs_f64();
    Ok(Figures::default().with("rate", rate(ours)).with("bare", rate(theirs)))
}
