use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pillarbox::admin::plan::{Edit, Facts, KeyEvent, Lookup, Place, Target, plan};
use pillarbox::admin::snapshot::{LaneLedger, Snapshot, SubscriptionRow};
use pillarbox::admin::{Change, Changed, Pause, Selection};
use pillarbox::store::{Epoch, FormerFilters, InstanceId, KeyHash, RangeSet, RecoveryCause, SubscriptionId, lane_of};
use pillarbox::{ErrorKind, Mode, Position, Start, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};
use uuid::Uuid;

use super::show::head;
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
            let targets = targets(tx, row.id, positions.as_deref(), key, *limit)?;
            let head = match targets.as_slice() {
                [only] if event.is_some() => head(tx, row.id, only.position)?,
                _ => None,
            };
            Facts::Deliveries { event, targets, head }
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
            let lanes = row.lanes.iter().map(|lane| books::lane_ledger(tx, row.id, lane.lane)).collect::<Db<_>>()?;
            Facts::Ledger { lanes, is_claimed: tx.prepare_cached(sql!(queue, "is_claimed"))?.exists([row.id.0])? }
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
    let mut statement = tx.prepare_cached(sql!(delivery, "targets"))?;
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
    let mut statement = tx.prepare_cached(sql!(delivery, "rewind_kept"))?;
    let targets = statement.query_map(params![subscription.0, above, key], target)?;
    Ok(targets.collect::<Result<_, _>>()?)
}

fn target(row: &rusqlite::Row<'_>) -> rusqlite::Result<Target> {
    Ok(Target { position: row.get("position")?, lane: row.get("lane")?, id: id_at(row, "id")?, key: row.get("key")? })
}

/// The id of an event by its version, if the stream has it.
fn version_id(tx: &Transaction<'_>, stream: &str, version: i64) -> Db<Option<Uuid>> {
    let found = tx.query_row(sql!(event, "version_id"), params![stream, version], |row| id_at(row, 0));
    Ok(found.optional()?)
}

fn place(tx: &Transaction<'_>, snapshot: &Snapshot, to: Start) -> Db<Place> {
    let oldest_kept = match to {
        Start::Time(time) => {
            let last = tx.query_row(sql!(event, "kept_last"), [], |row| row.get(0))?;
            first_since(tx, Events::Kept, time, 0, last)?
        }
        Start::Beginning | Start::Position(_) | Start::Now => None,
    };
    Ok(Place::new(to, start_floor(tx, to)?, RangeSet::new(), oldest_kept, snapshot))
}

/// The events of a key above a position.
fn key_events(tx: &Transaction<'_>, id: SubscriptionId, key: &str, above: Position) -> Db<Vec<KeyEvent>> {
    let mut statement = tx.prepare_cached(sql!(event, "key_events"))?;
    let events = statement.query_map(params![above, key, id.0], |row| {
        Ok(KeyEvent {
            position: row.get("position")?,
            id: id_at(row, "id")?,
            topic: text(row.get_ref("topic")?).into(),
            r#type: text(row.get_ref("type")?).into(),
            has_delivery: row.get("has_delivery")?,
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
            let mut statement = tx.prepare_cached(sql!(cursor, "rewind"))?;
            expect_epoch(statement.execute(params![row.id.0, lane, floor, settled.to_string(), epoch])?)?;
        }
        Edit::Fence { lane, epoch } => {
            expect_epoch(tx.execute(sql!(cursor, "fence"), params![row.id.0, lane, epoch])?)?;
        }
        Edit::ReadAgain { floor, settled } => read_again(tx, row, *floor, settled)?,
        Edit::Replay { lane, key, positions } => replay(tx, row, *lane, key, positions)?,
        Edit::Restore(positions) => take_up(tx, row.id, positions)?,
        Edit::Account { lane, epoch, positions } => books::account(tx, row.id, *lane, *epoch, positions)?,
        Edit::SetFormerFilters(formers) => put_former_filters(tx, row.id, formers)?,
        Edit::SetPause(pause) => set_pause(tx, row.id, pause.as_ref())?,
        Edit::Rename(to) => {
            tx.execute(sql!(subscription, "rename"), params![row.id.0, to])?;
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
        let mut statement = tx.prepare_cached(sql!(delivery, "requeue"))?;
        statement.execute(params![row.id.0, target.position, Timestamp::now().0])?;
    }
    arrange_targets(tx, row, targets)
}

fn give_up_targets(tx: &Transaction<'_>, row: &SubscriptionRow, targets: &[Target], reason: &str) -> Db<()> {
    for target in targets {
        give_up(tx, row.id, (target.position, target.position), reason)?;
        tx.prepare_cached(sql!(delivery, "remove"))?.execute(params![row.id.0, target.position])?;
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
    let (counts, _) = recover(tx, now, |held| {
        let meant = subscription.is_none_or(|id| id == held.subscription)
            && instance.is_none_or(|instance| instance == held.owner)
            && held.is_silent_for(silent_for, now);
        meant.then_some(RecoveryCause::Operator)
    })?;
    Ok(counts.values().sum())
}

/// Records that positions will not be delivered, and why.
pub(super) fn give_up(tx: &Transaction<'_>, id: SubscriptionId, range: (Position, Position), reason: &str) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(skip, "give_up"))?;
    statement.execute(params![id.0, range.0, range.1, reason, Timestamp::now().0])?;
    Ok(())
}

/// Tells the owners of these lanes to load their deliveries again.
pub(super) fn touch_lanes(tx: &Transaction<'_>, id: SubscriptionId, lanes: impl Iterator<Item = u32>) -> Db<()> {
    let sql = sql!(cursor, "touch");
    for lane in lanes.collect::<BTreeSet<_>>() {
        tx.prepare_cached(sql)?.execute(params![id.0, lane])?;
    }
    Ok(())
}

fn set_pause(tx: &Transaction<'_>, id: SubscriptionId, pause: Option<&Pause>) -> Db<()> {
    let by = pause.map(|pause| pause.by.name());
    let reason = pause.and_then(|pause| pause.reason.as_deref());
    tx.execute(sql!(subscription, "set_pause"), params![id.0, pause.is_some(), by, reason])?;
    Ok(())
}

/// Forgets deliveries and records above the floor. Positions become visible in their order here, so that nothing is settled above it.
fn read_again(tx: &Transaction<'_>, row: &SubscriptionRow, floor: Position, settled: &RangeSet) -> Db<()> {
    debug_assert!(settled.is_empty(), "a place has nothing settled above its floor");
    tx.execute(sql!(delivery, "rewind"), params![row.id.0, floor])?;
    if row.mode == Mode::Queue {
        arrange_all(tx, row.id)?;
    }
    // What was covered before says nothing about the replay.
    tx.execute(sql!(progress, "remove_above"), params![row.id.0, floor])?;
    tx.execute(sql!(progress, "cut"), params![row.id.0, floor])?;
    Ok(())
}

fn replay(tx: &Transaction<'_>, row: &SubscriptionRow, lane: u32, key: &str, positions: &[Position]) -> Db<()> {
    let last: i64 = tx.query_row(sql!(delivery, "last_arrival"), params![row.id.0, lane], |row| row.get(0))?;
    let now = Timestamp::now().0;
    for (arrival, position) in (last + 1..).zip(positions) {
        let mut statement = tx.prepare_cached(sql!(delivery, "rewind_key"))?;
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
    let mut statement = tx.prepare_cached(sql!(skip, "within"))?;
    let rows = statement.query_map(params![id.0, first, last], |row| {
        Ok((
            row.get::<_, Position>("position")?,
            row.get::<_, Position>("position_to")?,
            row.get::<_, String>("reason")?,
            row.get::<_, i64>("at")?,
        ))
    })?;
    for (from, to, reason, at) in rows.collect::<Result<Vec<_>, _>>()? {
        let mut left = RangeSet::from_iter([from..=to]);
        left.subtract(positions);
        tx.prepare_cached(sql!(skip, "remove"))?.execute(params![id.0, from])?;
        for range in left.iter() {
            let mut put = tx.prepare_cached(sql!(skip, "give_up"))?;
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
    let deliveries = tx.execute(sql!(subscription, "remove_deliveries"), [id.0])?;
    tx.execute(sql!(subscription, "remove_cursors"), [id.0])?;
    tx.execute(sql!(subscription, "remove_progress"), [id.0])?;
    tx.execute(sql!(subscription, "remove_skips"), [id.0])?;
    tx.execute(sql!(subscription, "remove_recovered"), [id.0])?;
    tx.execute(sql!(subscription, "remove"), [id.0])?;
    Ok(deliveries)
}

fn replace_lanes(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lanes: u32,
    (floor, epoch, revision): (Position, Epoch, i64),
    ledger: &LaneLedger,
) -> Db<()> {
    tx.execute(sql!(subscription, "remove_cursors"), [id.0])?;
    tx.execute(sql!(subscription, "remove_progress"), [id.0])?;
    let sql = sql!(cursor, "replace");
    for lane in 0..lanes {
        tx.prepare_cached(sql)?.execute(params![id.0, lane, floor, epoch, revision])?;
        for (epoch, ranges) in [(0, &ledger.before_start), (epoch, &ledger.covered)] {
            for range in ranges.iter() {
                record_progress(tx, id, lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
    }
    tx.execute(sql!(subscription, "set_lanes"), params![id.0, lanes])?;
    Ok(())
}

/// Gives each delivery its new lane, keeping the order of arrival within each key.
fn relane_deliveries(tx: &Transaction<'_>, id: SubscriptionId, lanes: u32) -> Db<usize> {
    let mut statement = tx.prepare(sql!(delivery, "in_order_of_arrival"))?;
    let rows = statement.query_map([id.0], |row| Ok((row.get("position")?, row.get("key")?)))?;
    let deliveries: Vec<(Position, Option<String>)> = rows.collect::<Result<_, _>>()?;
    let sql = sql!(delivery, "relane");
    for (index, (position, key)) in deliveries.iter().enumerate() {
        let lane = lane_of(key.as_deref().map(KeyHash::of), *position, lanes);
        tx.prepare_cached(sql)?.execute(params![id.0, position, lane, index as i64 + 1])?;
    }
    Ok(deliveries.len())
}
