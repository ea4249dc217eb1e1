use std::time::Duration;

use pillarbox::admin::retention::{ExpiringHold, StoredRetention};
use pillarbox::admin::snapshot::{LaneRow, Snapshot, SubscriptionRow};
use pillarbox::admin::{PrunePolicy, Pruned, REASON_DEAD, REASON_HOLD};
use pillarbox::store::{Cursor, RangeSet, SubscriptionId};
use pillarbox::{Mode, Position, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};

use super::change::{give_up, judge_again, touch_lanes};
use super::risen::deliver_risen;
use super::status::backlog_row;
use crate::connection::{meta_number, raise_queue_revision, raise_revision, set_meta};
use crate::error::Db;
use crate::ownership::{Events, first_since, former_filters, record_progress};
use crate::queue::arrange;
use crate::store::Desk;

/// Records of progress older than this are merged by the hour.
const PROGRESS_FINE_MS: i64 = 3_600_000;

/// How many copies of events one run looks at: those of dead events may be very many, and publishers wait meanwhile. The next run goes on from
/// there, at once if some were not needed.
const KEPT_LOOKED_AT_MAX: i64 = 500;

/// Removes one slice of what is no longer needed. It holds the write lock throughout: no cursor moves, no delivery appears and no
/// rewind happens between what it reads and what it removes.
pub(super) fn prune(tx: &Transaction<'_>, desk: &Desk, policy: &PrunePolicy) -> Db<Pruned> {
    let snapshot = super::load_snapshot(tx, &desk.folder)?;
    let policy = policy.at_least(StoredRetention {
        keep_ms: meta_number(tx, "retention_keep_ms")?,
        dead_ms: meta_number(tx, "retention_dead_ms")?,
        inbox_ms: meta_number(tx, "retention_inbox_ms")?,
    });
    if policy.dry_run {
        return would_prune(tx, &snapshot, &policy);
    }
    deliver_risen(tx, &snapshot)?;
    let mut pruned = Pruned::default();
    let slice = i64::try_from(policy.slice.max(1)).unwrap_or(i64::MAX);
    prune_dead(tx, &snapshot, &policy, slice, &mut pruned)?;
    if policy.takes_events(!snapshot.subscriptions.is_empty()) {
        prune_events(tx, &snapshot, &policy, slice, &mut pruned)?;
    }
    prune_kept(tx, &mut pruned)?;
    prune_dedup(tx, &snapshot, &policy, slice, &mut pruned)?;
    crate::inbox::prune(tx, snapshot.now, &policy, &mut pruned)?;
    prune_progress(tx, &snapshot, slice)?;
    Ok(pruned)
}

/// Copies of events that no delivery needs any more, among the next of them.
fn prune_kept(tx: &Transaction<'_>, pruned: &mut Pruned) -> Db<()> {
    let after: Position =
        tx.prepare_cached(sql!(retention, "kept_looked_at"))?.query_row([], |row| row.get(0)).optional()?.unwrap_or(0);
    let mut statement = tx.prepare_cached(sql!(retention, "kept_next"))?;
    let (looked_at, last): (i64, Option<Position>) =
        statement.query_row([after, KEPT_LOOKED_AT_MAX], |row| Ok((row.get("looked_at")?, row.get("last")?)))?;
    let gone = match last {
        Some(last) => tx.prepare_cached(sql!(retention, "prune_kept"))?.execute([after, last])?,
        None => 0,
    };
    let next = last.filter(|_| looked_at == KEPT_LOOKED_AT_MAX);
    if next.unwrap_or(0) != after {
        set_meta(tx, "kept_looked_at", next.unwrap_or(0))?;
    }
    pruned.unlooked = next.is_some();
    pruned.more |= next.is_some() && gone > 0;
    Ok(())
}

/// What all slices together would remove now.
fn would_prune(tx: &Transaction<'_>, snapshot: &Snapshot, policy: &PrunePolicy) -> Db<Pruned> {
    let mut pruned = Pruned::default();
    if let Some(age) = policy.dead {
        pruned.dead = tx
            .query_row(sql!(retention, "count_dead"), [snapshot.now.minus(age).0], |row| row.get::<_, i64>(0))?
            as u64;
    }
    let Some(keep) = policy.keep.filter(|_| policy.takes_events(!snapshot.subscriptions.is_empty())) else {
        return Ok(pruned);
    };
    let old = old_to(tx, snapshot.pruned_to, snapshot.now.minus(keep))?;
    let mut end = old;
    for subscription in &snapshot.subscriptions {
        let mut floor = subscription.floor();
        let formers = former_filters(tx, subscription.id)?;
        if let Some(mut hold) = ExpiringHold::new(subscription, &formers, keep, snapshot.now) {
            take_expired(tx, &mut hold, floor, i64::MAX)?;
            for lane in hold.lanes() {
                hold.keep_deliveries(&deliveries_within(tx, subscription.id, lane, hold.end())?);
            }
            pruned.undelivered += hold.lost().count();
            floor = hold.end().unwrap_or(floor);
        }
        if floor < end {
            end = floor;
            pruned.held_by = Some(subscription.name.clone());
        }
    }
    pruned.events = tx
        .query_row(sql!(retention, "count_events"), params![snapshot.pruned_to, end], |row| row.get::<_, i64>(0))?
        as u64;
    Ok(pruned)
}

/// The last position above `after` before the first event that is not older than `oldest`.
fn old_to(tx: &Transaction<'_>, after: Position, oldest: Timestamp) -> Db<Position> {
    let last = tx.query_row(sql!(event, "last"), [], |row| row.get(0))?;
    let first = first_since(tx, Events::Log, oldest, after, last)?;
    Ok(first.map_or(last, |first| first - 1))
}

/// Events that are old enough and that every subscription has passed.
fn prune_events(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    policy: &PrunePolicy,
    slice: i64,
    pruned: &mut Pruned,
) -> Db<()> {
    let Some(keep) = policy.keep else { return Ok(()) };
    let candidates = candidates(tx, snapshot, snapshot.now.minus(keep), slice)?;
    let Some(oldest_to_keep) = candidates.last().copied() else { return Ok(()) };
    if policy.held {
        for subscription in &snapshot.subscriptions {
            expire_hold(tx, subscription, (keep, snapshot.now), slice, pruned)?;
        }
    }
    // Floors first, deliveries second: a lane that parks an event moves its floor in the same transaction.
    let mut statement = tx.prepare(sql!(retention, "furthest_behind"))?;
    let mut rows = statement.query([])?;
    let mut end = oldest_to_keep;
    if let Some(row) = rows.next()? {
        let floor: Position = row.get("floor")?;
        if floor < end {
            end = floor;
            pruned.held_by = Some(row.get("name")?);
        }
    }
    if end <= snapshot.pruned_to {
        return Ok(());
    }
    // First: only what lies below may be removed.
    set_meta(tx, "pruned_to", end)?;
    let range = params![snapshot.pruned_to, end];
    pruned.kept = tx.execute(sql!(retention, "keep"), range)? as u64;
    pruned.events = tx.execute(sql!(retention, "prune_events"), range)? as u64;
    // A journal's events stay; the log then still begins with the first of them.
    let log_start: Position = tx.query_row(sql!(retention, "log_start"), [end], |row| row.get(0))?;
    set_meta(tx, "log_start", log_start)?;
    tx.execute(sql!(retention, "prune_dead_ranges"), [log_start])?;
    pruned.more |= candidates.len() as i64 == slice && pruned.held_by.is_none();
    Ok(())
}

/// The next events up to the first that is too young.
fn candidates(tx: &Transaction<'_>, snapshot: &Snapshot, oldest: Timestamp, slice: i64) -> Db<Vec<Position>> {
    let mut statement = tx.prepare_cached(sql!(retention, "candidates"))?;
    let mut rows = statement.query(params![snapshot.pruned_to, slice])?;
    let mut candidates = Vec::new();
    while let Some(row) = rows.next()?
        && row.get::<_, i64>("created_at")? < oldest.0
    {
        candidates.push(row.get("position")?);
    }
    Ok(candidates)
}

/// Gives up what a subscription has not settled of the next `slice` events, as far as its hold no longer keeps them, recorded and with an
/// alarm.
fn expire_hold(
    tx: &Transaction<'_>,
    subscription: &SubscriptionRow,
    (keep, now): (Duration, Timestamp),
    slice: i64,
    pruned: &mut Pruned,
) -> Db<()> {
    let id = subscription.id;
    let formers = former_filters(tx, id)?;
    let Some(mut hold) = ExpiringHold::new(subscription, &formers, keep, now) else { return Ok(()) };
    let taken = take_expired(tx, &mut hold, subscription.floor(), slice)?;
    let Some(end) = hold.end() else { return Ok(()) };
    for lane in hold.lanes() {
        let jump = hold.jump(lane, &deliveries_within(tx, id, lane, Some(end))?);
        for (epoch, ranges) in jump.records(lane.epoch) {
            for range in ranges.iter() {
                record_progress(tx, id, lane.lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
        let Cursor { floor, settled, .. } = &jump.cursor;
        tx.execute(sql!(cursor, "jump"), params![id.0, lane.lane, floor, settled.to_string()])?;
    }
    hold.lost().iter().try_for_each(|range| give_up(tx, id, range.into_inner(), REASON_HOLD))?;
    raise_revision(tx)?;
    hold.log(&RangeSet::new());
    pruned.undelivered += hold.lost().count();
    pruned.more |= taken == slice;
    Ok(())
}

/// The deliveries of a lane between its floor and the end.
fn deliveries_within(tx: &Transaction<'_>, id: SubscriptionId, lane: &LaneRow, end: Option<Position>) -> Db<RangeSet> {
    let within = params![id.0, lane.lane, lane.cursor.floor, end.unwrap_or(0)];
    super::books::ranges(tx, sql!(delivery, "ranges_within"), within)
}

/// Takes the next `slice` events above `floor`, as far as the hold no longer keeps them. How many.
fn take_expired(tx: &Transaction<'_>, hold: &mut ExpiringHold<'_>, floor: Position, slice: i64) -> Db<i64> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query([floor, slice])?;
    let mut taken = 0;
    while let Some(row) = rows.next()?
        && hold.take(&backlog_row(row)?)
    {
        taken += 1;
    }
    Ok(taken)
}

fn prune_dead(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    policy: &PrunePolicy,
    slice: i64,
    pruned: &mut Pruned,
) -> Db<()> {
    let Some(age) = policy.dead else { return Ok(()) };
    let mut statement = tx.prepare(sql!(retention, "dead"))?;
    let rows = statement.query_map(params![snapshot.now.minus(age).0, slice], |row| {
        Ok((SubscriptionId(row.get("subscription")?), row.get("position")?, row.get("lane")?, row.get("key")?))
    })?;
    let dead: Vec<(SubscriptionId, Position, u32, Option<String>)> = rows.collect::<Result<_, _>>()?;
    for (subscription, position, lane, key) in &dead {
        give_up(tx, *subscription, (*position, *position), REASON_DEAD)?;
        tx.prepare_cached(sql!(delivery, "remove"))?.execute(params![subscription.0, position])?;
        let is_queue = |row: &SubscriptionRow| row.id == *subscription && row.mode == Mode::Queue;
        if snapshot.subscriptions.iter().any(is_queue) {
            arrange(tx, *subscription, *position, key.as_deref())?;
        }
        touch_lanes(tx, *subscription, [*lane].into_iter())?;
    }
    if !dead.is_empty() {
        raise_revision(tx)?;
        raise_queue_revision(tx)?;
    }
    pruned.dead = dead.len() as u64;
    pruned.more |= dead.len() as i64 == slice;
    Ok(())
}

/// Deduplication keys that have left the window; never inside the one that publishers were promised.
fn prune_dedup(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    policy: &PrunePolicy,
    slice: i64,
    pruned: &mut Pruned,
) -> Db<()> {
    let promised = snapshot.now.0.saturating_sub(meta_number(tx, "dedup_window_ms")?);
    let oldest = snapshot.now.minus(policy.dedup_window).0.min(promised);
    pruned.dedup = tx.execute(sql!(retention, "prune_dedup"), params![oldest, slice])? as u64;
    pruned.more |= pruned.dedup as i64 == slice;
    Ok(())
}

/// Records of progress: those of pruned events go, old consecutive ones become one an hour.
fn prune_progress(tx: &Transaction<'_>, snapshot: &Snapshot, slice: i64) -> Db<()> {
    let log_start = meta_number(tx, "log_start")?;
    for subscription in &snapshot.subscriptions {
        judge_again(tx, subscription.id, |formers| _ = formers.prune(log_start))?;
    }
    tx.execute(sql!(retention, "prune_progress"), [log_start])?;
    let mut statement = tx.prepare(sql!(retention, "progress_groups"))?;
    let old = snapshot.now.0 - PROGRESS_FINE_MS;
    let rows = statement.query_map(params![old, PROGRESS_FINE_MS, slice], |row| {
        Ok((row.get("first")?, row.get("merged_from")?, row.get("merged_to")?, row.get("merged_end")?, row.get("ids")?))
    })?;
    let groups: Vec<(i64, i64, Position, i64, String)> = rows.collect::<Result<_, _>>()?;
    for (first, floor_from, floor_to, ended_at, others) in groups {
        tx.prepare_cached(sql!(retention, "merge_progress"))?
            .execute(params![first, floor_from, floor_to, ended_at])?;
        tx.prepare_cached(sql!(retention, "remove_merged"))?.execute(params![first, others])?;
    }
    Ok(())
}
