use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pillarbox::store::RangeSet;
use pillarbox::{ErrorKind, Position, Result};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use crate::connection::{Purpose, horizon, open, raise_revision, set_meta, write};
use crate::error::{Db, DbError};
use crate::ownership::{LockFolder, former_filters, put_former_filters, record_progress};
use crate::queue::arrange_all;
use crate::reader::id_of;
use crate::recovery::give_back;
use crate::witness;

/// Where a log lives. A file at another place and inode is a copy, and a copy must not deliver to real receivers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Home {
    path: String,
    inode: i64,
    device: i64,
}

impl Home {
    fn here(path: &Path) -> Db<Self> {
        let failed = |source| DbError::io(format!("the database {} cannot be looked at", path.display()), source);
        let path = path.canonicalize().map_err(failed)?;
        let metadata = std::fs::metadata(&path).map_err(failed)?;
        let path = path.to_string_lossy().into_owned();
        Ok(Home { path, inode: metadata.ino() as i64, device: metadata.dev() as i64 })
    }

    fn folder(&self) -> LockFolder {
        LockFolder::beside(Path::new(&self.path))
    }

    fn stored(connection: &Connection) -> Db<Option<Self>> {
        let number = |name| meta_optional::<i64>(connection, name);
        let path = meta_optional::<String>(connection, "home_path")?;
        Ok(match (path, number("home_inode")?, number("home_device")?) {
            (Some(path), Some(inode), Some(device)) => Some(Home { path, inode, device }),
            _ => None,
        })
    }

    fn store(&self, connection: &Connection) -> Db<()> {
        set_meta(connection, "home_path", &self.path)?;
        set_meta(connection, "home_inode", self.inode)?;
        set_meta(connection, "home_device", self.device)
    }
}

/// One value of `pillarbox_meta`, if it is there.
pub(crate) fn meta_optional<T: rusqlite::types::FromSql>(connection: &Connection, name: &str) -> Db<Option<T>> {
    let mut statement = connection.prepare_cached(sql!(meta, "get"))?;
    Ok(statement.query_row([name], |row| row.get(0)).optional()?)
}

/// The identity of the log.
pub(crate) fn log_id(connection: &Connection) -> Db<Uuid> {
    let text: String = meta_optional(connection, "log_id")?
        .ok_or_else(|| DbError::own(ErrorKind::Schema, "the log has no identity; run `pillarbox migrate`"))?;
    Ok(id_of(text.as_bytes()))
}

/// Refuses a log that is not at home. One that was moved (another path, the same file) is at home where it is now.
pub(crate) fn check(connection: &Connection, path: &Path) -> Db<()> {
    let here = Home::here(path)?;
    match Home::stored(connection)? {
        Some(stored) if stored.path == here.path && stored.inode == here.inode => {
            witness::check(connection, &here.folder(), None)
        }
        Some(stored) if stored.inode == here.inode && stored.device == here.device => {
            witness::check(connection, &here.folder(), Some(&stored.folder()))?;
            tracing::info!(from = stored.path, to = here.path, "the log was moved");
            write(connection, |tx| here.store(tx))
        }
        None => write(connection, |tx| settle_down(tx, &here)),
        Some(stored) => Err(DbError::own(
            ErrorKind::Foreign,
            format!(
                "this database is a copy or a restored backup of log {} at {}: run `pillarbox migrate --adopt` (it is the \
                 production log moved: go on) or `--fresh` (it is a copy: new identity, deliver nothing old)",
                log_id(connection)?,
                stored.path
            ),
        )),
    }
}

/// Gives a log that has no home yet its home here. A copy stays foreign: [`check`] refuses it.
pub(crate) fn move_in(connection: &Connection, path: &Path) -> Db<()> {
    match Home::stored(connection)? {
        Some(_) => Ok(()),
        None => {
            let here = Home::here(path)?;
            write(connection, |tx| settle_down(tx, &here))
        }
    }
}

/// Gives a log its first home, unless another process has done so meanwhile.
fn settle_down(tx: &rusqlite::Transaction<'_>, here: &Home) -> Db<()> {
    if Home::stored(tx)?.is_some() {
        return Ok(());
    }
    // Under the write lock: nobody works on this log before it has a home, so that what lies here is another log's.
    witness::clear(&here.folder())?;
    here.store(tx)
}

/// Declares that the log at `path` is the production log, moved or restored: it goes on with what it holds.
///
/// Raises the incarnation, so that nothing outside takes a position of before for one of now, and forgets the anchors.
pub fn adopt(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let connection = open(path, Purpose::Durable)?;
    let here = Home::here(path)?;
    write(&connection, |tx| {
        here.store(tx)?;
        witness::excuse(tx)?;
        tx.execute(sql!(meta, "raise_incarnation"), [])?;
        // A copy may have brought instance rows along whose locks are elsewhere.
        tx.execute(sql!(home, "forget_anchors"), [])?;
        forget_instances(tx, path)?;
        cut_back(tx)?;
        raise_revision(tx).map(drop)
    })?;
    Ok(witness::renew(&connection, &here.folder()).map(drop)?)
}

/// Declares that the log at `path` is a copy: it gets a new identity and delivers nothing that is in it now, to whatever
/// subscription, also one that is made later.
pub fn fresh(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let connection = open(path, Purpose::Durable)?;
    let here = Home::here(path)?;
    write(&connection, |tx| {
        here.store(tx)?;
        witness::excuse(tx)?;
        set_meta(tx, "log_id", Uuid::new_v4().to_string())?;
        tx.execute(sql!(meta, "raise_incarnation"), [])?;
        tx.execute_batch(sql!(home, "deliver_nothing"))?;
        forget_instances(tx, path)?;
        set_meta(tx, "fresh_floor", horizon(tx)?)?;
        start_over(tx)?;
        raise_revision(tx).map(drop)
    })?;
    Ok(witness::renew(&connection, &here.folder()).map(drop)?)
}

/// Forgets everything that is said about positions beyond the horizon: they will be handed out again, to other events.
/// A relay that ran on while the log was replaced underneath has written such things.
fn cut_back(tx: &rusqlite::Transaction<'_>) -> Db<()> {
    let horizon = horizon(tx)?;
    cut_cursors(tx, horizon)?;
    let statements = [
        sql!(home, "cut_deliveries"),
        sql!(home, "cut_kept"),
        sql!(home, "remove_skips"),
        sql!(home, "cut_skips"),
        sql!(home, "remove_progress_above"),
        sql!(home, "cut_progress"),
        sql!(home, "remove_dead_ranges"),
        sql!(home, "cut_dead_ranges"),
        sql!(home, "cut_meta"),
        sql!(home, "cut_log_start"),
    ];
    for sql in statements {
        tx.execute(sql, [horizon])?;
    }
    let mut statement = tx.prepare(sql!(home, "subscriptions"))?;
    let ids = statement.query_map([], |row| row.get(0).map(pillarbox::store::SubscriptionId))?;
    for id in ids.collect::<std::result::Result<Vec<_>, _>>()? {
        let (mut formers, mut known) = (former_filters(tx, id)?, RangeSet::new());
        known.insert_range(1, horizon);
        formers.rewind(&known);
        put_former_filters(tx, id, &formers)?;
    }
    let mut statement = tx.prepare(sql!(home, "queues"))?;
    let queues = statement.query_map([], |row| row.get(0).map(pillarbox::store::SubscriptionId))?;
    queues.collect::<std::result::Result<Vec<_>, _>>()?.into_iter().try_for_each(|id| arrange_all(tx, id))
}

fn cut_cursors(tx: &rusqlite::Transaction<'_>, horizon: Position) -> Db<()> {
    let mut statement = tx.prepare(sql!(home, "cursors"))?;
    let cursors = statement.query_map([], |row| {
        Ok((row.get("subscription")?, row.get("lane")?, row.get("floor")?, row.get("settled")?))
    })?;
    let cursors: Vec<(i64, u32, Position, String)> = cursors.collect::<std::result::Result<_, _>>()?;
    for (subscription, lane, floor, settled) in cursors {
        let mut settled: RangeSet = settled.parse()?;
        settled.remove_range(horizon.saturating_add(1), Position::MAX);
        let values = rusqlite::params![subscription, lane, floor.min(horizon), settled.to_string()];
        tx.execute(sql!(home, "cut_cursor"), values)?;
    }
    Ok(())
}

/// All cursors to the horizon, recorded as what lay before the start.
pub(crate) fn start_over(tx: &rusqlite::Transaction<'_>) -> Db<()> {
    let horizon = horizon(tx)?;
    tx.execute(sql!(home, "remove_progress"), [])?;
    tx.execute(sql!(home, "start_over"), [horizon])?;
    let mut statement = tx.prepare(sql!(home, "lanes"))?;
    let lanes = statement.query_map([], |row| Ok((row.get::<_, i64>("subscription")?, row.get::<_, u32>("lane")?)))?;
    for lane in lanes.collect::<std::result::Result<Vec<_>, _>>()? {
        record_progress(tx, pillarbox::store::SubscriptionId(lane.0), lane.1, 0, (0, horizon))?;
    }
    Ok(())
}

/// Removes the instances that do not live here, with their ownership.
fn forget_instances(tx: &rusqlite::Transaction<'_>, path: &Path) -> Db<()> {
    let folder = LockFolder::beside(&path.canonicalize().unwrap_or_else(|_| path.to_owned()));
    let mut statement = tx.prepare(sql!(home, "instances"))?;
    let ids = statement.query_map([], |row| row.get::<_, i64>(0))?.collect::<std::result::Result<Vec<_>, _>>()?;
    for id in
        ids.into_iter().filter(|id| folder.probe(pillarbox::store::InstanceId(*id)) != pillarbox::store::Lock::Held)
    {
        give_back(tx, pillarbox::store::InstanceId(id))?;
        tx.execute(sql!(home, "free_lanes"), [id])?;
        tx.execute(sql!(instance, "remove"), [id])?;
    }
    Ok(())
}

/// File systems on which locks or shared memory do not work between hosts.
const NETWORK_FILE_SYSTEMS: [&str; 7] = ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs"];

/// Refuses a database on a network file system: neither its locks nor its shared memory hold there.
pub(crate) fn refuse_network(path: &Path) -> Db<()> {
    match network_file_system(path) {
        None => Ok(()),
        Some(kind) => Err(DbError::own(
            ErrorKind::Invalid,
            format!(
                "{} lies on a network file system ({kind}), where SQLite's locks do not hold; move it to a local disk",
                path.display()
            ),
        )),
    }
}

/// The kind of network file system that `path` lies on, where the system tells.
pub(crate) fn network_file_system(path: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let path = path.canonicalize().ok()?;
    network_mount(&mounts, &path)
}

/// The kind of the innermost mount above `path`, if it is a network file system. See proc(5) for the format.
fn network_mount(mounts: &str, path: &Path) -> Option<String> {
    let parse = |line: &str| {
        let (mount, source) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?.replace("\\040", " ");
        Some((point, source.split(' ').next()?.to_owned()))
    };
    let above = mounts.lines().filter_map(parse).filter(|(point, _)| path.starts_with(point));
    // The last of equally long ones: it was mounted over the others.
    let (_, kind) = above.max_by_key(|(point, _)| point.len())?;
    NETWORK_FILE_SYSTEMS.contains(&kind.as_str()).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /mnt/share rw,relatime shared:5 - nfs4 server:/export rw
41 40 254:1 / /mnt/share/local\\040disk rw - xfs /dev/vdb rw
";

    #[test]
    fn the_innermost_mount_decides() {
        assert_eq!(network_mount(MOUNTS, Path::new("/var/app.db")), None);
        assert_eq!(network_mount(MOUNTS, Path::new("/mnt/share/app.db")).as_deref(), Some("nfs4"));
        assert_eq!(network_mount(MOUNTS, Path::new("/mnt/share/local disk/app.db")), None);
        assert_eq!(network_mount(MOUNTS, Path::new("/mnt/shared/app.db")), None);
    }
}
