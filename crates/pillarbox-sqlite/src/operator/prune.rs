use std::time::Duration;

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
use crate::publish::FOREVER_MS;
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
    let policy = PrunePolicy {
        keep: at_least(policy.keep, meta_number(tx, "retention_keep_ms")?),
        dead: at_least(policy.dead, meta_number(tx, "retention_dead_ms")?),
        inbox: at_least(policy.inbox, meta_number(tx, "retention_inbox_ms")?),
        ..*policy
    };
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
            .query_row(sql!(retention, "count_dead"), [before(snapshot.now, age)], |row| row.get::<_, i64>(0))?
            as u64;
    }
    let Some(keep) = policy.keep.filter(|_| policy.takes_events(!snapshot.subscriptions.is_empty())) else {
        return Ok(pruned);
    };
    let old = old_to(tx, snapshot.pruned_to, before(snapshot.now, keep))?;
    let mut end = old;
    for subscription in &snapshot.subscriptions {
        let mut floor = subscription.floor();
        if let Some(hold) = subscription.hold {
            let over = old_to(tx, snapshot.pruned_to, before(snapshot.now, hold))?;
            pruned.undelivered += awaited(tx, subscription, over.min(old))?.count();
            floor = floor.max(over);
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
fn old_to(tx: &Transaction<'_>, after: Position, oldest: i64) -> Db<Position> {
    let last = tx.query_row(sql!(event, "last"), [], |row| row.get(0))?;
    let first = first_since(tx, Events::Log, Timestamp(oldest), after, last)?;
    Ok(first.map_or(last, |first| first - 1))
}

/// What was asked for, but not less than the log's own policy; None: for ever.
fn at_least(asked: Option<Duration>, stored_ms: i64) -> Option<Duration> {
    let stored = Duration::from_millis(stored_ms.max(0) as u64);
    asked.filter(|_| stored_ms != FOREVER_MS).map(|asked| asked.max(stored))
}

fn before(now: Timestamp, age: Duration) -> i64 {
    now.0.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX))
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
    let candidates = candidates(tx, snapshot, before(snapshot.now, keep), slice)?;
    let Some(oldest_to_keep) = candidates.last().map(|candidate| candidate.0) else { return Ok(()) };
    if policy.held {
        pruned.undelivered = expire_holds(tx, snapshot, &candidates)?;
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

/// The next events (position, created_at) up to the first that is too young.
fn candidates(tx: &Transaction<'_>, snapshot: &Snapshot, oldest: i64, slice: i64) -> Db<Vec<(Position, i64)>> {
    let mut statement = tx.prepare_cached(sql!(retention, "candidates"))?;
    let mut rows = statement.query(params![snapshot.pruned_to, slice])?;
    let mut candidates = Vec::new();
    while let Some(row) = rows.next()? {
        let candidate = (row.get("position")?, row.get("created_at")?);
        if candidate.1 >= oldest {
            break;
        }
        candidates.push(candidate);
    }
    Ok(candidates)
}

/// Moves subscriptions on whose hold is over for some of the candidates, recorded and with an alarm. How many they did not receive.
fn expire_holds(tx: &Transaction<'_>, snapshot: &Snapshot, candidates: &[(Position, i64)]) -> Db<u64> {
    let mut undelivered = 0;
    for subscription in &snapshot.subscriptions {
        let Some(hold) = subscription.hold else { continue };
        let oldest = before(snapshot.now, hold);
        let over = candidates.iter().take_while(|(_, created_at)| *created_at < oldest).last();
        let Some(&(end, _)) = over.filter(|(position, _)| *position > subscription.floor()) else { continue };
        let dropped = awaited(tx, subscription, end)?;
        dropped.iter().try_for_each(|range| give_up(tx, subscription.id, range.into_inner(), REASON_HOLD))?;
        let lanes = subscription.lanes.iter().filter(|lane| lane.cursor.floor < end);
        let formers = former_filters(tx, subscription.id)?;
        for lane in lanes {
            jump(tx, subscription.id, lane, formers.passed_by(lane.lane, subscription.lanes.len()), end)?;
        }
        raise_revision(tx)?;
        undelivered += dropped.count();
        if !dropped.is_empty() {
            tracing::error!(
                subscription = subscription.name,
                events = dropped.count(),
                to = end,
                "events were dropped undelivered: the subscription's hold is over"
            );
        }
    }
    Ok(undelivered)
}

/// The events up to `end` that the subscription wants and has not settled.
fn awaited(tx: &Transaction<'_>, subscription: &SubscriptionRow, end: Position) -> Db<RangeSet> {
    let mut statement = tx.prepare_cached(sql!(event, "backlog"))?;
    let mut rows = statement.query(params![subscription.floor(), i64::MAX])?;
    let formers = former_filters(tx, subscription.id)?;
    let mut awaited = RangeSet::new();
    while let Some(row) = rows.next()? {
        let line = backlog_row(row)?;
        if line.position > end {
            break;
        }
        if line.is_lost_to(subscription, &formers) {
            awaited.insert(line.position);
        }
    }
    Ok(awaited)
}

/// Moves a lane's floor to `end`. The books say what it has settled, now or when a filter ended (`passed`), and what it left out; its
/// owner loads it again.
fn jump(tx: &Transaction<'_>, id: SubscriptionId, lane: &LaneRow, passed: RangeSet, end: Position) -> Db<()> {
    let Cursor { floor, settled, .. } = &lane.cursor;
    // A cursor that was cut at its limit does not count all that have a delivery.
    let mut covered = super::books::ranges(tx, sql!(delivery, "ranges_within"), params![id.0, lane.lane, floor, end])?;
    covered.union(&settled.within(floor + 1, end));
    covered.union(&passed.within(floor + 1, end));
    let left_out = covered.missing(floor + 1, end);
    let books = [(lane.epoch, covered), (0, left_out)];
    for (epoch, ranges) in &books {
        for range in ranges.iter() {
            record_progress(tx, id, lane.lane, *epoch, (range.start() - 1, *range.end()))?;
        }
    }
    let mut settled = settled.clone();
    settled.remove_range(0, end);
    tx.execute(sql!(cursor, "jump"), params![id.0, lane.lane, end, settled.to_string()])?;
    Ok(())
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
    let rows = statement.query_map(params![before(snapshot.now, age), slice], |row| {
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
    let oldest = before(snapshot.now, policy.dedup_window).min(promised);
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
