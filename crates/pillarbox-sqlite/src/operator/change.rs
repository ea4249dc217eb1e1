use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pillarbox::admin::plan::{Edit, Facts, KeyEvent, Lookup, Place, Target, plan};
use pillarbox::admin::snapshot::{LaneLedger, Snapshot, SubscriptionRow};
use pillarbox::admin::{Change, Changed, Pause, Selection};
use pillarbox::store::{Epoch, FormerFilters, InstanceId, KeyHash, RangeSet, RecoveryCause, SubscriptionId, lane_of};
use pillarbox::{ErrorKind, Mode, Position, Start, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};
use uuid::Uuid;

use super::{books, positions_of};
use crate::connection::{begin, raise_queue_revision, raise_revision};
use crate::error::{Db, DbError};
use crate::ownership::{Events, first_since, former_filters, put_former_filters, record_progress, start_floor};
use crate::queue::{arrange, arrange_all};
use crate::reader::{id_at, text};
use crate::recovery::recover;
use crate::store::Desk;

/// Carries out a command in one transaction; a dry run does the same and takes it back.
pub(super) fn change(desk: &Desk, change: &Change, dry_run: bool) -> Db<Changed> {
    // While others wait for the lock that this waits for, they give no signs of life either.
    let asked_at = Timestamp::now();
    let tx = begin(&desk.connection)?;
    let mut snapshot = super::load_snapshot(&tx, &desk.folder)?;
    let recovers = matches!(change, Change::Recover { .. });
    if recovers {
        snapshot.now = snapshot.now.min(asked_at);
    }
    let subject = change.subject().map(|name| snapshot.subscription(name)).transpose()?;
    let facts = look_up(&tx, &snapshot, subject, &change.lookup())?;
    let plan = plan(change, &snapshot, facts)?;
    let mut count = 0;
    for edit in &plan.edits {
        count += apply(&tx, snapshot.now, subject, edit)?;
    }
    let changed = plan.answer(count);
    let nothing = recovers && changed.count == 0;
    raise_revision(&tx)?;
    raise_queue_revision(&tx)?;
    if dry_run || nothing {
        tx.rollback()?
    } else {
        tx.commit()?
    }
    Ok(changed)
}

/// What a plan has to know beside the snapshot.
fn look_up(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    subject: Option<&SubscriptionRow>,
    lookup: &Lookup<'_>,
) -> Db<Facts> {
    let Some(row) = subject else { return Ok(Facts::Nothing) };
    Ok(match lookup {
        Lookup::Nothing => Facts::Nothing,
        Lookup::Deliveries { which, limit } => {
            let (event, positions, key) = match which {
                Selection::Event(id) => {
                    let positions = positions_of(tx, *id)?;
                    (Some(*id).filter(|_| !positions.is_empty()), Some(positions), None)
                }
                Selection::Version(stream, version) => {
                    let event = version_id(tx, stream, *version)?;
                    let positions = event.map(|id| positions_of(tx, id)).transpose()?;
                    (event, Some(positions.unwrap_or_default()), None)
                }
                Selection::Key(key) => (None, None, Some(key.as_str())),
                Selection::All => (None, None, None),
            };
            Facts::Deliveries { event, targets: targets(tx, row.id, positions.as_deref(), key, *limit)? }
        }
        Lookup::Rewind { to, key } => {
            let place = place(tx, snapshot, *to)?;
            let kept = kept_targets(tx, row.id, place.kept, *key)?;
            let events = match key {
                Some(key) => key_events(tx, row.id, key, place.position())?,
                None => Vec::new(),
            };
            Facts::Rewind { place, kept, events, former_filters: former_filters(tx, row.id)? }
        }
        Lookup::Ledger => {
            let lanes = row.lanes.iter().map(|lane| books::ledger(tx, row.id, lane.lane)).collect::<Db<_>>()?;
            let sql = "select 1 from pillarbox_delivery indexed by pillarbox_delivery_owner \
                       where owner is not null and subscription = ?1";
            Facts::Ledger { lanes, is_claimed: tx.prepare_cached(sql)?.exists([row.id.0])? }
        }
    })
}

/// The deliveries at these positions in any state, or the dead ones of a key or all, in log order.
fn targets(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    positions: Option<&[Position]>,
    key: Option<&str>,
    limit: usize,
) -> Db<Vec<Target>> {
    let positions = positions.map(|positions| serde_json::to_string(positions).expect("numbers are JSON"));
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut statement = tx.prepare_cached(include_str!("../sql/targets.sql"))?;
    let targets = statement.query_map(params![subscription.0, positions, key, limit], target)?;
    Ok(targets.collect::<Result<_, _>>()?)
}

/// Deliveries above a position whose events are only kept aside, of one key or of all.
fn kept_targets(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    above: Position,
    key: Option<&str>,
) -> Db<Vec<Target>> {
    let mut statement = tx.prepare_cached(include_str!("../sql/rewind_kept.sql"))?;
    let targets = statement.query_map(params![subscription.0, above, key], target)?;
    Ok(targets.collect::<Result<_, _>>()?)
}

fn target(row: &rusqlite::Row<'_>) -> rusqlite::Result<Target> {
    Ok(Target { position: row.get(0)?, lane: row.get(1)?, id: id_at(row, 2)?, key: row.get(3)? })
}

/// The id of an event by its version, if the stream has it.
fn version_id(tx: &Transaction<'_>, stream: &str, version: i64) -> Db<Option<Uuid>> {
    let found = tx.query_row(include_str!("../sql/version_id.sql"), params![stream, version], |row| id_at(row, 0));
    Ok(found.optional()?)
}

fn place(tx: &Transaction<'_>, snapshot: &Snapshot, to: Start) -> Db<Place> {
    let oldest_kept = match to {
        Start::Time(time) => {
            let sql = "select coalesce(max(position), 0) from pillarbox_event_kept";
            let last = tx.query_row(sql, [], |row| row.get(0))?;
            first_since(tx, Events::Kept, time, 0, last)?
        }
        Start::Beginning | Start::Position(_) | Start::Now => None,
    };
    Ok(Place::new(to, start_floor(tx, to)?, RangeSet::new(), oldest_kept, snapshot))
}

/// The events of a key above a position.
fn key_events(tx: &Transaction<'_>, id: SubscriptionId, key: &str, above: Position) -> Db<Vec<KeyEvent>> {
    let mut statement = tx.prepare_cached(include_str!("../sql/key_events.sql"))?;
    let events = statement.query_map(params![above, key, id.0], |row| {
        Ok(KeyEvent {
            position: row.get(0)?,
            id: id_at(row, 1)?,
            topic: text(row.get_ref(2)?).into(),
            r#type: text(row.get_ref(3)?).into(),
            has_delivery: row.get(4)?,
        })
    })?;
    Ok(events.collect::<Result<_, _>>()?)
}

/// Applies one edit; how many claims or deliveries it concerned, if it counts them.
fn apply(tx: &Transaction<'_>, now: Timestamp, subject: Option<&SubscriptionRow>, edit: &Edit) -> Db<u64> {
    if let Edit::Recover { subscription, instance, silent_for } = edit {
        return take_back(tx, now, *subscription, *instance, *silent_for);
    }
    let row = subject.ok_or_else(|| DbError::own(ErrorKind::Fatal, format!("{edit:?} has no subscription")))?;
    match edit {
        Edit::Recover { .. } => {}
        Edit::MakeDue(targets) => make_due(tx, row, targets)?,
        Edit::GiveUp { targets, reason } => give_up_targets(tx, row, targets, reason)?,
        Edit::Reload(lanes) => touch_lanes(tx, row.id, lanes.iter().copied())?,
        Edit::SetCursor { lane, epoch, floor, settled } => {
            let mut statement = tx.prepare_cached(include_str!("../sql/rewind_lane.sql"))?;
            expect_epoch(statement.execute(params![row.id.0, lane, floor, settled.to_string(), epoch])?)?;
        }
        Edit::Fence { lane, epoch } => {
            let sql =
                "update pillarbox_cursor set epoch = epoch + 1 where subscription = ?1 and lane = ?2 and epoch = ?3";
            expect_epoch(tx.execute(sql, params![row.id.0, lane, epoch])?)?;
        }
        Edit::ReadAgain { floor, settled } => read_again(tx, row, *floor, settled)?,
        Edit::Replay { lane, key, positions } => replay(tx, row, *lane, key, positions)?,
        Edit::Restore(positions) => take_up(tx, row.id, positions)?,
        Edit::Account { lane, epoch, positions } => books::account(tx, row.id, *lane, *epoch, positions)?,
        Edit::SetFormerFilters(formers) => put_former_filters(tx, row.id, formers)?,
        Edit::SetPause(pause) => set_pause(tx, row.id, pause.as_ref())?,
        Edit::Rename(to) => {
            tx.execute("update pillarbox_subscription set name = ?2 where id = ?1", params![row.id.0, to])?;
        }
        Edit::Delete => return Ok(delete_subscription(tx, row.id)? as u64),
        Edit::Relane { lanes, floor, epoch, revision, ledger } => {
            replace_lanes(tx, row.id, *lanes, (*floor, *epoch, *revision), ledger)?;
            return Ok(relane_deliveries(tx, row.id, *lanes)? as u64);
        }
    }
    Ok(0)
}

/// The write lock is held since the snapshot was read, so the epoch can be no other.
fn expect_epoch(changed: usize) -> Db<()> {
    match changed {
        1 => Ok(()),
        _ => Err(DbError::own(ErrorKind::Busy, "a lane has changed since it was read; try the command again")),
    }
}

fn make_due(tx: &Transaction<'_>, row: &SubscriptionRow, targets: &[Target]) -> Db<()> {
    for target in targets {
        let mut statement = tx.prepare_cached(include_str!("../sql/requeue.sql"))?;
        statement.execute(params![row.id.0, target.position, Timestamp::now().0])?;
    }
    arrange_targets(tx, row, targets)
}

fn give_up_targets(tx: &Transaction<'_>, row: &SubscriptionRow, targets: &[Target], reason: &str) -> Db<()> {
    for target in targets {
        give_up(tx, row.id, (target.position, target.position), reason)?;
        let sql = "delete from pillarbox_delivery where subscription = ?1 and position = ?2";
        tx.prepare_cached(sql)?.execute(params![row.id.0, target.position])?;
    }
    arrange_targets(tx, row, targets)
}

/// Finds out whose turn it is after deliveries of a queue were changed.
fn arrange_targets(tx: &Transaction<'_>, row: &SubscriptionRow, targets: &[Target]) -> Db<()> {
    if row.mode == Mode::Stream {
        return Ok(());
    }
    let (keyed, unkeyed): (Vec<_>, Vec<_>) = targets.iter().partition(|target| target.key.is_some());
    let keys: BTreeMap<_, _> = keyed.into_iter().map(|target| (&target.key, target)).collect();
    let mut each = keys.into_values().chain(unkeyed);
    each.try_for_each(|target| arrange(tx, row.id, target.position, target.key.as_deref()))
}

/// Takes claims from their owners; how many.
fn take_back(
    tx: &Transaction<'_>,
    now: Timestamp,
    subscription: Option<SubscriptionId>,
    instance: Option<InstanceId>,
    silent_for: Duration,
) -> Db<u64> {
    let counts = recover(tx, now, |held| {
        let meant = subscription.is_none_or(|id| id == held.subscription)
            && instance.is_none_or(|instance| instance == held.owner)
            && held.is_silent_for(silent_for, now);
        meant.then_some(RecoveryCause::Operator)
    })?;
    Ok(counts.values().sum())
}

/// Records that positions will not be delivered, and why.
pub(super) fn give_up(tx: &Transaction<'_>, id: SubscriptionId, range: (Position, Position), reason: &str) -> Db<()> {
    let mut statement = tx.prepare_cached(include_str!("../sql/give_up.sql"))?;
    statement.execute(params![id.0, range.0, range.1, reason, Timestamp::now().0])?;
    Ok(())
}

/// Tells the owners of these lanes to load their deliveries again.
pub(super) fn touch_lanes(tx: &Transaction<'_>, id: SubscriptionId, lanes: impl Iterator<Item = u32>) -> Db<()> {
    let sql = "update pillarbox_cursor set revision = revision + 1 where subscription = ?1 and lane = ?2";
    for lane in lanes.collect::<BTreeSet<_>>() {
        tx.prepare_cached(sql)?.execute(params![id.0, lane])?;
    }
    Ok(())
}

fn set_pause(tx: &Transaction<'_>, id: SubscriptionId, pause: Option<&Pause>) -> Db<()> {
    let by = pause.map(|pause| pause.by.name());
    let reason = pause.and_then(|pause| pause.reason.as_deref());
    let sql = "update pillarbox_subscription set paused = ?2, paused_by = ?3, paused_reason = ?4 where id = ?1";
    tx.execute(sql, params![id.0, pause.is_some(), by, reason])?;
    Ok(())
}

/// Forgets deliveries and records above the floor. Positions become visible in their order here, so that nothing is settled above it.
fn read_again(tx: &Transaction<'_>, row: &SubscriptionRow, floor: Position, settled: &RangeSet) -> Db<()> {
    debug_assert!(settled.is_empty(), "a place has nothing settled above its floor");
    tx.execute(include_str!("../sql/rewind_deliveries.sql"), params![row.id.0, floor])?;
    if row.mode == Mode::Queue {
        arrange_all(tx, row.id)?;
    }
    // What was covered before says nothing about the replay.
    let sql = "delete from pillarbox_progress where subscription = ?1 and floor_from >= ?2";
    tx.execute(sql, params![row.id.0, floor])?;
    let sql = "update pillarbox_progress set floor_to = ?2 where subscription = ?1 and floor_to > ?2";
    tx.execute(sql, params![row.id.0, floor])?;
    Ok(())
}

fn replay(tx: &Transaction<'_>, row: &SubscriptionRow, lane: u32, key: &str, positions: &[Position]) -> Db<()> {
    let sql = "select coalesce(max(arrival), 0) from pillarbox_delivery where subscription = ?1 and lane = ?2";
    let last: i64 = tx.query_row(sql, params![row.id.0, lane], |row| row.get(0))?;
    let now = Timestamp::now().0;
    for (arrival, position) in (last + 1..).zip(positions) {
        let mut statement = tx.prepare_cached(include_str!("../sql/rewind_key.sql"))?;
        statement.execute(params![row.id.0, position, lane, arrival, key, now])?;
    }
    match (row.mode, positions.first()) {
        (Mode::Queue, Some(first)) => arrange(tx, row.id, *first, Some(key)),
        _ => Ok(()),
    }
}

/// Takes back that positions were given up; whatever else was given up with them stays so.
fn take_up(tx: &Transaction<'_>, id: SubscriptionId, positions: &RangeSet) -> Db<()> {
    let (Some(first), Some(last)) = (positions.first(), positions.last()) else { return Ok(()) };
    let sql = "select position, position_to, reason, at from pillarbox_skip \
               where subscription = ?1 and position <= ?3 and position_to >= ?2";
    let mut statement = tx.prepare_cached(sql)?;
    let rows = statement.query_map(params![id.0, first, last], |row| {
        Ok((row.get::<_, Position>(0)?, row.get::<_, Position>(1)?, row.get::<_, String>(2)?, row.get::<_, i64>(3)?))
    })?;
    for (from, to, reason, at) in rows.collect::<Result<Vec<_>, _>>()? {
        let mut left = RangeSet::from_iter([from..=to]);
        left.subtract(positions);
        let sql = "delete from pillarbox_skip where subscription = ?1 and position = ?2";
        tx.prepare_cached(sql)?.execute(params![id.0, from])?;
        for range in left.iter() {
            let mut put = tx.prepare_cached(include_str!("../sql/give_up.sql"))?;
            put.execute(params![id.0, range.start(), range.end(), reason, at])?;
        }
    }
    Ok(())
}

/// Changes by which filters events of a subscription were judged, where there was more than one.
pub(super) fn judge_again(tx: &Transaction<'_>, id: SubscriptionId, change: impl FnOnce(&mut FormerFilters)) -> Db<()> {
    let before = former_filters(tx, id)?;
    let mut formers = before.clone();
    change(&mut formers);
    if formers != before {
        put_former_filters(tx, id, &formers)?;
    }
    Ok(())
}

/// Removes a subscription with all that belongs to it; how many deliveries went.
pub(super) fn delete_subscription(tx: &Transaction<'_>, id: SubscriptionId) -> Db<usize> {
    let deliveries = tx.execute("delete from pillarbox_delivery where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_cursor where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_progress where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_skip where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_recovery where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_subscription where id = ?1", [id.0])?;
    Ok(deliveries)
}

fn replace_lanes(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lanes: u32,
    (floor, epoch, revision): (Position, Epoch, i64),
    ledger: &LaneLedger,
) -> Db<()> {
    tx.execute("delete from pillarbox_cursor where subscription = ?1", [id.0])?;
    tx.execute("delete from pillarbox_progress where subscription = ?1", [id.0])?;
    let sql = "insert into pillarbox_cursor (subscription, lane, floor, epoch, revision) values (?1, ?2, ?3, ?4, ?5)";
    for lane in 0..lanes {
        tx.prepare_cached(sql)?.execute(params![id.0, lane, floor, epoch, revision])?;
        for (epoch, ranges) in [(0, &ledger.before_start), (epoch, &ledger.covered)] {
            for range in ranges.iter() {
                record_progress(tx, id, lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
    }
    tx.execute("update pillarbox_subscription set lanes = ?2 where id = ?1", params![id.0, lanes])?;
    Ok(())
}

/// Gives each delivery its new lane, keeping the order of arrival within each key.
fn relane_deliveries(tx: &Transaction<'_>, id: SubscriptionId, lanes: u32) -> Db<usize> {
    let sql = "select position, key from pillarbox_delivery where subscription = ?1 order by arrival, lane, position";
    let mut statement = tx.prepare(sql)?;
    let rows = statement.query_map([id.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let deliveries: Vec<(Position, Option<String>)> = rows.collect::<Result<_, _>>()?;
    let sql = "update pillarbox_delivery set lane = ?3, arrival = ?4 where subscription = ?1 and position = ?2";
    for (index, (position, key)) in deliveries.iter().enumerate() {
        let lane = lane_of(key.as_deref().map(KeyHash::of), *position, lanes);
        tx.prepare_cached(sql)?.execute(params![id.0, position, lane, index as i64 + 1])?;
    }
    Ok(deliveries.len())
}
