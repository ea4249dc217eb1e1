use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pillarbox::{ErrorKind, Position};
use rusqlite::Connection;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::connection::{horizon, meta_number, read, set_meta, write};
use crate::error::{Db, DbError};
use crate::home::{log_id, meta_optional};
use crate::ownership::LockFolder;

/// At least this long between two writes of a running store.
const WITNESS_INTERVAL: Duration = Duration::from_secs(3);

/// The file's name in the folder beside the database.
const FILE_NAME: &str = "home";

/// In `pillarbox_meta` once the file has been written: from then on it must be there.
const FLAG: &str = "witness";

/// What was seen of a log, kept outside the database: the file `home` in the folder of the locks.
///
/// A database that an older state of itself was written over, in place, has the original's path and inode and says
/// of itself what the original said. Only something beside it knows that the log had come further. The file is never
/// ahead of what is durable in the log, and it may lag behind: then less is noticed, and nothing is refused that is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Witness {
    log_id: Uuid,
    incarnation: i64,
    horizon: Position,
}

impl Witness {
    /// What there is to be seen of a log now.
    fn of(connection: &Connection) -> Db<Self> {
        Ok(Witness {
            log_id: log_id(connection)?,
            incarnation: meta_number(connection, "incarnation")?,
            horizon: horizon(connection)?,
        })
    }

    fn read(folder: &LockFolder) -> Db<Option<Self>> {
        let path = file(folder);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DbError::io(format!("{} cannot be read", path.display()), error)),
        };
        Self::parse(&bytes)
            .map(Some)
            .ok_or_else(|| DbError::not_itself(&format!("{} was changed by hand", path.display())))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        Some(Witness {
            log_id: value["log_id"].as_str()?.parse().ok()?,
            incarnation: value["incarnation"].as_i64()?,
            horizon: value["horizon"].as_i64()?,
        })
    }

    /// Whole or not at all, and durable when it returns.
    fn write(&self, folder: &LockFolder) -> Db<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let path = file(folder);
        let failed = |source| DbError::io(format!("{} could not be written", path.display()), source);
        let Witness { log_id, incarnation, horizon } = self;
        let content = json!({ "log_id": log_id, "incarnation": incarnation, "horizon": horizon });
        // Others may be writing it at the same time.
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let new = folder.path().join(format!("{FILE_NAME}.{}-{number}.new", std::process::id()));
        let put = || {
            std::fs::create_dir_all(folder.path())?;
            let mut file = File::create(&new)?;
            file.write_all(content.to_string().as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &path)?;
            File::open(folder.path())?.sync_all()
        };
        put().inspect_err(|_| drop(std::fs::remove_file(&new))).map_err(failed)
    }

    /// Refuses a log that is behind what was seen of it.
    fn vouch_for(&self, log: &Witness) -> Db<()> {
        if self.log_id != log.log_id {
            return Err(DbError::not_itself(&format!("log {} was here, and now log {} is", self.log_id, log.log_id)));
        }
        if self.incarnation > log.incarnation {
            let (seen, now) = (self.incarnation, log.incarnation);
            return Err(DbError::not_itself(&format!(
                "it was in incarnation {seen}, and now it is in incarnation {now}"
            )));
        }
        if self.incarnation == log.incarnation && self.horizon > log.horizon {
            let (seen, now) = (self.horizon, log.horizon);
            let what = format!("positions up to {seen} were handed out, and now only those up to {now} are");
            return Err(DbError::not_itself(&what));
        }
        Ok(())
    }
}

/// Refuses a log that is not what the witness beside it saw. One that was moved may have left it in the folder `before`.
pub(crate) fn check(connection: &Connection, folder: &LockFolder, before: Option<&LockFolder>) -> Db<()> {
    // The witness first: what it saw the log has at every later time.
    let found = Witness::read(folder)?;
    let left_behind = match (found, before) {
        (None, Some(before)) => Witness::read(before)?,
        _ => None,
    };
    let (log, written) = read(connection, |tx| Ok((Witness::of(tx)?, meta_optional::<i64>(tx, FLAG)?.is_some())))?;
    match found.or(left_behind) {
        Some(witness) => witness.vouch_for(&log)?,
        None if written => return Err(missing(&log, folder)),
        None => {}
    }
    left_behind.map_or(Ok(()), |witness| witness.write(folder))
}

fn missing(log: &Witness, folder: &LockFolder) -> DbError {
    DbError::own(
        ErrorKind::Foreign,
        format!(
            "nothing beside this database says that it is log {} as it was last: {} is missing; if you moved the \
             database, move that folder with it; otherwise run `pillarbox migrate --adopt` (it is the production log: go \
             on) or `--fresh` (it is a copy: new identity, deliver nothing old)",
            log.log_id,
            file(folder).display()
        ),
    )
}

/// Writes down what the log is now, whatever was seen before. Call it without a transaction.
pub(crate) fn renew(connection: &Connection, folder: &LockFolder) -> Db<Witness> {
    // A durable commit after those of publishers that do not sync: a power cut must not leave the log behind its witness.
    let log = write(connection, |tx| {
        let log = Witness::of(tx)?;
        set_meta(tx, "witness_horizon", log.horizon)?;
        Ok(log)
    })?;
    log.write(folder)?;
    if meta_optional::<i64>(connection, FLAG)?.is_none() {
        write(connection, |tx| set_meta(tx, FLAG, 1))?;
    }
    Ok(log)
}

/// The log need not have a witness until the next one is written. Part of what changes the log's identity.
pub(crate) fn excuse(connection: &Connection) -> Db<()> {
    connection.execute(sql!(meta, "remove"), [FLAG])?;
    Ok(())
}

/// Removes what another log has left behind that was at this place.
pub(crate) fn clear(folder: &LockFolder) -> Db<()> {
    let path = file(folder);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(DbError::io(format!("{} of another log could not be removed", path.display()), error))
        }
        _ => Ok(()),
    }
}

fn file(folder: &LockFolder) -> PathBuf {
    folder.path().join(FILE_NAME)
}

/// Keeps the witness of a running store up to date.
#[derive(Debug)]
pub(crate) struct Keeper {
    folder: LockFolder,
    written: Option<Witness>,
    looked_at: Option<Instant>,
}

impl Keeper {
    pub(crate) fn new(database: &Path) -> Self {
        Keeper { folder: LockFolder::beside(database), written: None, looked_at: None }
    }

    /// With each beat.
    pub(crate) fn beat(&mut self, connection: &Connection, now: Instant) -> Db<()> {
        if self.looked_at.is_some_and(|at| now.saturating_duration_since(at) < WITNESS_INTERVAL) {
            return Ok(());
        }
        self.looked_at = Some(now);
        self.keep(connection)
    }

    /// Writes down how far the log has come. A log that has gone back is refused; a file that cannot be written is not
    /// worth the relay's end.
    pub(crate) fn keep(&mut self, connection: &Connection) -> Db<()> {
        if self.written == Some(read(connection, |tx| Witness::of(tx))?) {
            return Ok(());
        }
        if let Some(found) = Witness::read(&self.folder)? {
            let log = read(connection, |tx| Witness::of(tx))?;
            // Another identity is an operator's doing, who may not have come to writing it down yet.
            if found.log_id == log.log_id {
                found.vouch_for(&log)?;
            }
        }
        match renew(connection, &self.folder) {
            Ok(written) => self.written = Some(written),
            Err(DbError::Own(error)) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%error, source, "a restored backup may not be recognised; trying again");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn witness(incarnation: i64, horizon: Position) -> Witness {
        Witness { log_id: Uuid::from_u128(7), incarnation, horizon }
    }

    #[test]
    fn a_log_may_be_ahead_of_its_witness_and_never_behind() {
        let seen = witness(2, 10);
        for sound in [witness(2, 10), witness(2, 11), witness(3, 4)] {
            seen.vouch_for(&sound).unwrap();
        }
        let other = Witness { log_id: Uuid::from_u128(8), ..seen };
        for strange in [witness(2, 9), witness(1, 10), witness(1, 99), other] {
            assert!(seen.vouch_for(&strange).is_err(), "{strange:?}");
        }
    }

    #[test]
    fn what_is_written_is_what_is_read_and_nothing_else_stays() {
        let place = tempfile::tempdir().unwrap();
        let folder = LockFolder::beside(&place.path().join("app.db"));
        assert_eq!(Witness::read(&folder).unwrap(), None);
        for horizon in [1, 2] {
            witness(1, horizon).write(&folder).unwrap();
            assert_eq!(Witness::read(&folder).unwrap(), Some(witness(1, horizon)));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::write(file(&folder), "{}").unwrap();
        assert!(Witness::read(&folder).is_err());
        clear(&folder).unwrap();
        clear(&folder).unwrap();
        assert_eq!(Witness::read(&folder).unwrap(), None);
    }

    #[test]
    fn a_beat_writes_at_most_once_an_interval() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("app.db");
        crate::migrate(&path).unwrap();
        let connection = crate::connection::open(&path, crate::connection::Purpose::Durable).unwrap();
        let mut keeper = Keeper::new(&path);
        let (start, moment) = (Instant::now(), Duration::from_millis(1));
        for (after, horizon) in [(Duration::ZERO, 1), (WITNESS_INTERVAL - moment, 1), (WITNESS_INTERVAL, 3)] {
            connection.execute("insert into pillarbox_event (topic, type) values ('t', 'y')", []).unwrap();
            keeper.beat(&connection, start + after).unwrap();
            assert_eq!(Witness::read(&keeper.folder).unwrap().map(|seen| seen.horizon), Some(horizon));
        }
    }
}
