use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use pillarbox::admin::retention::{ExpiringHold, StoredRetention};
use pillarbox::admin::snapshot::LaneRow;
use pillarbox::admin::{PrunePolicy, Pruned, REASON_DEAD, REASON_HOLD};
use pillarbox::store::{Cursor, FormerFilters, RangeSet, SubscriptionId};
use pillarbox::{Position, Timestamp};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row, Transaction};

use super::change::{give_up, touch_lanes};
use super::risen::{self, Looked};
use super::status::backlog_row;
use super::{load_snapshot, ring};
use crate::connection::Session;
use crate::error::Db;
use crate::leaves::{self, Leaf, Removes, Upkeep};
use crate::ownership::{Events, first_since, former_filters, put_former_filters, record_progress};
use crate::queue::Keys;
use crate::types::{Time, multirange};

/// The reason recorded for positions that an open transaction could still publish when the hold was over.
pub(crate) const REASON_HOLD_OPEN: &str =
    "dropped by retention: the subscription's hold was over, and the transaction with this position had not committed";

/// How many copies of events one run looks at: those of dead events may be very many, and joining relays wait meanwhile. The next run goes
/// on from there, at once if some were not needed.
const KEPT_LOOKED_AT_MAX: i64 = 500;

/// How many positions of a leaf are counted by one statement.
const COUNTED_AT_ONCE: i64 = 1_000_000;

/// How many events are looked at by one statement that counts what a hold drops.
const LOOKED_AT_ONCE: i64 = 10_000;

/// Removes one slice of what is no longer needed: of events a whole leaf, or none. No rewind and no new subscription comes between what it reads
/// and what it removes: they share the lock that this takes on `meta`. A failure is written down for `status`: a relay tries again
/// and again, and its log may not be read.
pub(super) async fn prune(session: &mut Session, upkeep: &Upkeep, policy: &PrunePolicy) -> Db<Pruned> {
    if policy.dry_run {
        return would_prune(session, policy).await;
    }
    match prune_slice(session, upkeep, policy).await {
        // Whoever asks for more than his role may remove is told so; retention goes on.
        Err(error) if policy.unreceived && error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Err(error),
        Err(error) => Err(leaves::note_failure(session, error).await),
        pruned => pruned,
    }
}

async fn prune_slice(session: &mut Session, upkeep: &Upkeep, policy: &PrunePolicy) -> Db<Pruned> {
    let mut pruned = Pruned::default();
    let looked = risen::look(session, upkeep).await?;
    let keep = tidy(session, policy, (&looked, upkeep), &mut pruned).await?;
    if let Some(keep) = keep {
        match empty_one(session, keep, policy, &mut pruned).await {
            Err(error) if leaves::passes(&error) => {
                tracing::debug!(error = %pillarbox::Error::from(error), "a leaf is in use and is emptied later");
            }
            other => other?,
        }
    }
    session.execute(sql!(retention, "rotate_dedup"), &[]).await?;
    session.execute(sql!(retention, "add_up_aside"), &[]).await?;
    crate::inbox::prune(session, policy, &mut pruned).await?;
    if !pruned.more {
        leaves::maintain(session, upkeep, keep).await?;
    }
    Ok(pruned)
}

/// Everything but the events. Returns how long those are to be kept.
async fn tidy(
    session: &mut Session,
    policy: &PrunePolicy,
    (looked, upkeep): (&Looked, &Upkeep),
    pruned: &mut Pruned,
) -> Db<Option<Duration>> {
    let tx = session.begin().await?;
    let limits = tx.query_one(sql!(retention, "lock_limits"), &[]).await?;
    let PrunePolicy { keep, dead, .. } = policy.at_least(stored_retention(&limits)?);
    let now = limits.try_get::<_, Time>("now")?.0;
    let slice = i64::try_from(policy.slice.max(1)).unwrap_or(i64::MAX);
    let mut keys = Keys::default();
    let mut risen = 0;
    if let Some(suspects) = &looked.suspects {
        risen = risen::deliver_risen(&tx, suspects, &mut keys).await?;
    }
    if let Some(age) = dead {
        prune_dead(&tx, now.minus(age), slice, pruned, &mut keys).await?;
    }
    tx.commit().await?;
    looked.is_done(upkeep, risen);
    keys.promote_or_leave(session).await;
    // Another transaction, since cursors are locked in the order of their numbers by everybody.
    let tx = session.begin().await?;
    tx.execute(sql!(meta, "lock"), &[]).await?;
    if let Some(keep) = keep {
        if policy.held {
            expire_holds(&tx, keep, slice, pruned).await?;
        }
        tx.execute(sql!(retention, "prune_skips"), &[&Time(now.minus(keep))]).await?;
    }
    let kept_to = prune_kept(&tx, upkeep, pruned).await?;
    tx.execute(sql!(retention, "prune_progress"), &[]).await?;
    tx.execute(sql!(retention, "merge_progress"), &[&slice]).await?;
    // Last: whoever joins waits for what this locks.
    prune_former_filters(&tx).await?;
    tx.commit().await?;
    upkeep.kept_looked_at.store(kept_to, Ordering::Relaxed);
    Ok(keep)
}

/// Copies of events that no delivery needs any more, among the next of them. Where the next run goes on.
async fn prune_kept(tx: &Transaction<'_>, upkeep: &Upkeep, pruned: &mut Pruned) -> Db<Position> {
    let place: [&(dyn ToSql + Sync); 2] = [&upkeep.kept_looked_at.load(Ordering::Relaxed), &KEPT_LOOKED_AT_MAX];
    let row = tx.query_one(sql!(retention, "prune_kept"), &place).await?;
    let (looked_at, last): (i64, Option<Position>) = (row.try_get("looked_at")?, row.try_get("last")?);
    let next = last.filter(|_| looked_at == KEPT_LOOKED_AT_MAX);
    pruned.unlooked = next.is_some();
    pruned.more |= next.is_some() && row.try_get::<_, i64>("removed")? > 0;
    Ok(next.unwrap_or(0))
}

/// Former filters under which nothing was passed that is still there. One that is being changed now is left for the next time:
/// a joining relay may wait for `meta`.
async fn prune_former_filters(tx: &Transaction<'_>) -> Db<()> {
    for row in tx.query(sql!(retention, "former_filters"), &[]).await? {
        let mut formers = FormerFilters::parse(row.try_get("former_filters")?);
        if formers.prune(row.try_get("log_start")?) {
            put_former_filters(tx, SubscriptionId(row.try_get("id")?), &formers).await?;
        }
    }
    Ok(())
}

/// What the log itself demands, from the columns of `limits` and `lock_limits`.
fn stored_retention(row: &Row) -> Db<StoredRetention> {
    Ok(StoredRetention {
        keep_ms: row.try_get("retention_keep_ms")?,
        dead_ms: row.try_get("retention_dead_ms")?,
        inbox_ms: row.try_get("retention_inbox_ms")?,
    })
}

/// Empties the lowest leaf that is old enough and that every subscription has passed, if there is one.
async fn empty_one(session: &mut Session, keep: Duration, policy: &PrunePolicy, pruned: &mut Pruned) -> Db<()> {
    // Looked at and counted first, for that takes long in a large leaf and nobody is to wait for it.
    let Some((leaf, None)) = candidate(&**session, keep, pruned).await? else { return Ok(()) };
    let has_subscription = has_subscription(&**session).await?;
    if !policy.takes_events(has_subscription) {
        return Ok(());
    }
    let range: [&(dyn ToSql + Sync); 2] = [&leaf.low, &leaf.high];
    let events = count(session, &leaf).await?;
    let tx = session.begin().await?;
    tx.execute(sql!(meta, "lock"), &[]).await?;
    // Floors first, deliveries second: a lane that parks an event moves its floor in the same transaction.
    let still = candidate(&tx, keep, pruned).await?;
    if still.is_none_or(|(still, held_by)| still.name != leaf.name || held_by.is_some()) {
        return Ok(());
    }
    let kept = tx.execute(sql!(retention, "keep"), &range).await?;
    tx.execute(sql!(retention, "advance"), &range).await?;
    tx.execute(sql!(retention, "prune_dead_ranges"), &[]).await?;
    let removes = if !has_subscription { Removes::Unreceived } else { Removes::Received };
    leaves::empty_leaf_and_commit(tx, &leaf, removes).await?;
    pruned.events += events;
    pruned.kept += kept;
    pruned.more = true;
    Ok(())
}

/// Without one, no event was received.
async fn has_subscription(client: &impl GenericClient) -> Db<bool> {
    Ok(client.query_one(sql!(retention, "has_subscription"), &[]).await?.try_get(0)?)
}

/// What all slices together would remove now. What is in the way for a moment is not looked for.
async fn would_prune(session: &mut Session, policy: &PrunePolicy) -> Db<Pruned> {
    let limits = session.query_one(sql!(retention, "limits"), &[]).await?;
    let PrunePolicy { keep, dead, .. } = policy.at_least(stored_retention(&limits)?);
    let now = limits.try_get::<_, Time>("now")?.0;
    let mut pruned = Pruned::default();
    if let Some(age) = dead {
        pruned.dead =
            session.query_one(sql!(retention, "count_dead"), &[&Time(now.minus(age))]).await?.try_get::<_, i64>(0)?
                as u64;
    }
    if let Some(keep) = keep
        && policy.takes_events(has_subscription(&**session).await?)
    {
        count_leaves(session, now.minus(keep), keep, &mut pruned).await?;
        count_undelivered(session, keep, &mut pruned).await?;
    }
    Ok(pruned)
}

/// Counts what subscriptions have not received and holds that are over keep no longer. Piece by piece, since no session may keep a snapshot
/// for long.
async fn count_undelivered(session: &mut Session, keep: Duration, pruned: &mut Pruned) -> Db<()> {
    let tx = session.begin().await?;
    let snapshot = load_snapshot(&tx).await?;
    tx.rollback().await?;
    let none: Option<&str> = None;
    for subscription in &snapshot.subscriptions {
        let Some(oldest) = subscription.kept_since(keep, snapshot.now) else { continue };
        let formers = former_filters(&**session, subscription.id).await?;
        let mut floor = Some(subscription.floor());
        while let Some(above) = floor {
            let values: [&(dyn ToSql + Sync); 6] = [&above, &none, &none, &none, &none, &LOOKED_AT_ONCE];
            let rows = session.query(sql!(event, "backlog"), &values).await?;
            let lines = rows.iter().map(backlog_row).collect::<Db<Vec<_>>>()?;
            let over = lines.iter().take_while(|line| line.created_at < oldest);
            let (mut looked, mut lost) = (0, RangeSet::new());
            for line in over {
                looked += 1;
                if line.is_lost_to(subscription, &formers) {
                    lost.insert(line.position);
                }
            }
            // What has a delivery is not lost: a cursor that was cut at its limit does not count all that have one.
            if let Some(end) = lost.last() {
                for row in session.query(sql!(delivery, "positions_of"), &[&subscription.id.0, &above, &end]).await? {
                    lost.remove(row.try_get("position")?);
                }
            }
            pruned.undelivered += lost.count();
            floor = lines.last().filter(|_| looked == LOOKED_AT_ONCE).map(|line| line.position);
        }
    }
    Ok(())
}

/// Counts the events of the leaves that are old enough and that every subscription has passed, or will have when its hold is over.
async fn count_leaves(session: &Session, oldest: Timestamp, keep: Duration, pruned: &mut Pruned) -> Db<()> {
    let slowest = floor_after_holds(session, keep).await?;
    if let Some((name, floor)) = &slowest {
        let next = session.query_opt(sql!(retention, "next_time"), &[floor]).await?;
        let next = next.map(|row| row.try_get::<_, Time>("created_at")).transpose()?;
        pruned.held_by = next.filter(|next| next.0 < oldest).map(|_| name.clone());
    }
    let horizon: Position = session.query_one(sql!(event, "horizon"), &[]).await?.try_get(0)?;
    // The leaf in use goes only if it is to end here.
    let cut = leaves::cut(session, Some(keep)).await?.map(|leaf| leaf.low);
    for row in session.query(sql!(retention, "leaves_with_events"), &[]).await? {
        let (low, high, last): (Position, Position, Position) =
            (row.try_get("low")?, row.try_get("high")?, row.try_get("position")?);
        if row.try_get::<_, bool>("is_journal")? {
            continue;
        }
        if high > horizon + 1 && cut != Some(low) {
            let passed = slowest.as_ref().map_or(last, |(_, floor)| last.min(*floor));
            pruned.in_use = count_old(session, (low, passed), oldest).await?;
            return Ok(());
        }
        if row.try_get::<_, Time>("created_at")?.0 >= oldest {
            return Ok(());
        }
        if let Some((name, _)) = slowest.as_ref().filter(|(_, floor)| *floor < last) {
            pruned.held_by = Some(name.clone());
            return Ok(());
        }
        let leaf = Leaf { name: String::new(), low, high: Some(high.min(last + 1)), emptied: false, oldest: None };
        pruned.events += count(session, &leaf).await?;
    }
    Ok(())
}

/// How many events in `low..=passed` are older than `oldest`.
async fn count_old(session: &Session, (low, passed): (Position, Position), oldest: Timestamp) -> Db<u64> {
    let young = first_since(&**session, Events::Log, oldest, low - 1, passed).await?;
    let high = Some(young.unwrap_or(passed + 1));
    count(session, &Leaf { name: String::new(), low, high, emptied: false, oldest: None }).await
}

/// Who is furthest behind once the holds that are over are applied.
async fn floor_after_holds(session: &Session, keep: Duration) -> Db<Option<(String, Position)>> {
    let sql = sql!(retention, "floors");
    let mut floors = Vec::new();
    for row in session.query(sql, &[]).await? {
        let mut floor: Position = row.try_get("floor")?;
        if let Some(hold) = row.try_get::<_, Option<i64>>("hold_ms")? {
            let hold = Duration::from_millis(hold.max(0) as u64).max(keep);
            let oldest = row.try_get::<_, Time>("now")?.0.minus(hold);
            let young = sql!(retention, "first_since");
            let last = sql!(retention, "last_above");
            let young = session.query_opt(young, &[&floor, &Time(oldest)]).await?;
            floor = match young {
                Some(row) => row.try_get::<_, Position>(0)? - 1,
                None => session.query_one(last, &[&floor]).await?.try_get(0)?,
            };
        }
        floors.push((row.try_get("name")?, floor));
    }
    Ok(floors.into_iter().min_by_key(|(_, floor)| *floor))
}

/// How many events a leaf has. Counted piece by piece, since no session may keep a snapshot for long.
async fn count(session: &Session, leaf: &Leaf) -> Db<u64> {
    let high = leaf.high.unwrap_or(Position::MAX);
    let (mut low, mut events) = (leaf.low, 0);
    while low < high {
        let end = high.min(low.saturating_add(COUNTED_AT_ONCE));
        events += session.query_one(sql!(retention, "count_events"), &[&low, &end]).await?.try_get::<_, i64>(0)? as u64;
        low = end;
    }
    Ok(events)
}

/// The lowest leaf that is full and old enough, and who has not passed it.
async fn candidate(
    client: &impl GenericClient,
    keep: Duration,
    pruned: &mut Pruned,
) -> Db<Option<(Leaf, Option<String>)>> {
    let row = client.query_one(sql!(retention, "horizon"), &[]).await?;
    let (horizon, now): (Position, Timestamp) = (row.try_get("horizon")?, row.try_get::<_, Time>("now")?.0);
    let Some(row) = client.query_opt(sql!(retention, "full_leaf"), &[&horizon]).await? else {
        return Ok(None);
    };
    let newest = row.try_get::<_, Option<Time>>("newest")?.map(|time| time.0);
    if newest.is_some_and(|newest| newest >= now.minus(keep)) {
        return Ok(None);
    }
    let high: Position = row.try_get("high")?;
    let leaf =
        Leaf { name: row.try_get("name")?, low: row.try_get("low")?, high: Some(high), emptied: false, oldest: None };
    let behind = client.query_opt(sql!(retention, "furthest_behind"), &[]).await?;
    let behind = behind.filter(|row| row.get::<_, Position>("floor") < high - 1);
    pruned.held_by = behind.map(|row| row.try_get("name")).transpose()?;
    Ok(Some((leaf, pruned.held_by.clone())))
}

/// Moves subscriptions on whose hold is over for some of what they have not settled, recorded and with an alarm.
async fn expire_holds(tx: &Transaction<'_>, keep: Duration, slice: i64, pruned: &mut Pruned) -> Db<()> {
    let snapshot = load_snapshot(tx).await?;
    let mut by_number: Vec<_> = snapshot.subscriptions.iter().collect();
    by_number.sort_by_key(|subscription| subscription.id);
    for subscription in by_number {
        let Some(oldest) = subscription.kept_since(keep, snapshot.now) else { continue };
        let first = tx.query_opt(sql!(retention, "next_time"), &[&subscription.floor()]).await?;
        let first = first.map(|row| row.try_get::<_, Time>(0)).transpose()?;
        if first.is_some_and(|first| first.0 < oldest) {
            expire_hold(tx, subscription.id, keep, slice, pruned).await?;
        }
    }
    Ok(())
}

/// Gives up what a subscription has not settled of the next `slice` events, as far as its hold no longer keeps them.
async fn expire_hold(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    keep: Duration,
    slice: i64,
    pruned: &mut Pruned,
) -> Db<()> {
    // No lane moves from here on; so what the cursors say is read again.
    tx.execute(sql!(cursor, "lock_of"), &[&id.0]).await?;
    let snapshot = load_snapshot(tx).await?;
    let Some(subscription) = snapshot.subscriptions.iter().find(|subscription| subscription.id == id) else {
        return Ok(());
    };
    let formers = former_filters(tx, id).await?;
    let Some(mut hold) = ExpiringHold::new(subscription, &formers, keep, snapshot.now) else { return Ok(()) };
    // The horizon, then the writers, then the events, as in a poll: up to it, what they do not show is dead or comes from whoever
    // writes now. What is drawn later is left to the next run.
    let horizon: Position = tx.query_one(sql!(event, "horizon"), &[]).await?.try_get(0)?;
    let writers = !tx.query(sql!(event, "writers"), &[]).await?.is_empty();
    let (floor, none) = (subscription.floor(), None::<&str>);
    let rows = tx.query(sql!(event, "backlog"), &[&floor, &none, &none, &none, &none, &slice]).await?;
    let lines = rows.iter().map(backlog_row).collect::<Db<Vec<_>>>()?;
    let taken = lines.iter().take_while(|line| line.position <= horizon && hold.take(line)).count();
    let Some(end) = hold.end() else { return Ok(()) };
    let mut unknown = RangeSet::new();
    if writers {
        let dead = tx.query(sql!(dead_range, "within"), &[&(floor + 1), &end]).await?;
        let range = |row: &Row| Ok(row.try_get::<_, Position>("low")?..=row.try_get("high")?);
        let dead = dead.iter().map(range).collect::<Db<RangeSet>>()?;
        unknown = hold.unknown(&dead);
    }
    for lane in hold.lanes() {
        jump(tx, id, lane, &mut hold, end).await?;
    }
    for (ranges, reason) in [(&unknown, REASON_HOLD_OPEN), (hold.lost(), REASON_HOLD)] {
        for range in ranges.iter() {
            give_up(tx, id, range.into_inner(), reason).await?;
        }
    }
    ring(tx).await?;
    hold.log(&unknown);
    pruned.undelivered += hold.lost().count();
    pruned.more |= taken as i64 == slice;
    Ok(())
}

/// Moves a lane's floor to `end`; its owner loads it again.
async fn jump(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lane: &LaneRow,
    hold: &mut ExpiringHold<'_>,
    end: Position,
) -> Db<()> {
    let (number, floor) = (lane.lane as i32, lane.cursor.floor);
    let mut deliveries = RangeSet::new();
    for row in tx.query(sql!(delivery, "positions_within"), &[&id.0, &number, &floor, &end]).await? {
        deliveries.insert(row.try_get("position")?);
    }
    let jump = hold.jump(lane, &deliveries);
    for (epoch, ranges) in jump.records(lane.epoch) {
        record_progress(tx, id, lane.lane, epoch, ranges).await?;
    }
    let Cursor { floor, settled, .. } = &jump.cursor;
    tx.execute(sql!(cursor, "jump"), &[&id.0, &number, floor, &multirange(settled)]).await?;
    Ok(())
}

async fn prune_dead(
    tx: &Transaction<'_>,
    oldest: Timestamp,
    slice: i64,
    pruned: &mut Pruned,
    keys: &mut Keys,
) -> Db<()> {
    let rows = tx.query(sql!(retention, "dead"), &[&Time(oldest), &slice]).await?;
    let mut lanes = BTreeMap::<_, BTreeSet<u32>>::new();
    for row in &rows {
        lanes.entry(row.try_get::<_, i64>("subscription")?).or_default().insert(row.try_get::<_, i32>("lane")? as u32);
    }
    // The lanes first, as everybody does it who changes deliveries.
    for (id, lanes) in lanes {
        touch_lanes(tx, SubscriptionId(id), lanes).await?;
    }
    let column = |name| rows.iter().map(|row: &Row| row.get(name)).collect::<Vec<i64>>();
    let gone =
        tx.query(sql!(retention, "prune_dead"), &[&column("subscription"), &column("position"), &Time(oldest)]).await?;
    for row in &gone {
        let position = row.try_get("position")?;
        keys.note(row.try_get("subscription")?, row.try_get("key")?);
        give_up(tx, SubscriptionId(row.try_get("subscription")?), (position, position), REASON_DEAD).await?;
    }
    if !gone.is_empty() {
        ring(tx).await?;
    }
    pruned.dead = gone.len() as u64;
    pruned.more |= rows.len() as i64 == slice;
    Ok(())
}
