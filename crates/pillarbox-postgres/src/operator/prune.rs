use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pillarbox::world::{LaneRow, SubscriptionRow};
use pillarbox::{Cursor, Position, PrunePolicy, Pruned, RangeSet, SubscriptionId, Timestamp};
use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row, Transaction};

use super::change::{give_up, touch_lanes};
use super::risen::{self, Suspects};
use super::status::Line;
use super::{World, ring};
use crate::connection::Session;
use crate::error::Db;
use crate::leaves::{self, Leaf};
use crate::ownership::record_progress;
use crate::publish::FOREVER_MS;
use crate::queue::Keys;
use crate::types::{Time, multirange};

/// The reason recorded for what a subscription lost because its `hold` was over.
pub(super) const REASON_HOLD: &str = "dropped by retention: the subscription's hold was over";

/// The reason recorded for dead deliveries that retention removed.
const REASON_DEAD: &str = "dropped by retention: dead for longer than retention.dead";

/// How many positions of a leaf are counted by one statement.
const COUNTED_AT_ONCE: i64 = 1_000_000;

/// Removes one slice of what nobody needs: of events a whole leaf, or none. Nobody rewinds or subscribes between what it reads
/// and what it removes: they share the lock that this takes on `meta`. A failure is written down for `status`: a relay tries again
/// and again, and nobody may read its log.
pub(super) async fn prune(session: &mut Session, policy: &PrunePolicy) -> Db<Pruned> {
    match prune_slice(session, policy).await {
        Err(error) => Err(leaves::note_failure(session, error).await),
        pruned => pruned,
    }
}

async fn prune_slice(session: &mut Session, policy: &PrunePolicy) -> Db<Pruned> {
    let mut pruned = Pruned::default();
    let suspects = risen::look(session).await?;
    let keep = tidy(session, policy, suspects, &mut pruned).await?;
    if let Some(keep) = keep {
        match empty_one(session, keep, &mut pruned).await {
            Err(error) if leaves::passes(&error) => {
                tracing::debug!(error = %pillarbox::Error::from(error), "a leaf is in use and is emptied later");
            }
            other => other?,
        }
    }
    session.execute("select dedup_rotate()", &[]).await?;
    session.execute("select add_up_aside()", &[]).await?;
    crate::inbox::prune(session, policy, &mut pruned).await?;
    if !pruned.more {
        leaves::maintain(session, keep).await?;
    }
    Ok(pruned)
}

/// Everything but the events. Returns how long those are to be kept.
async fn tidy(
    session: &mut Session,
    policy: &PrunePolicy,
    suspects: Option<Suspects>,
    pruned: &mut Pruned,
) -> Db<Option<Duration>> {
    let tx = session.begin().await?;
    let sql = "select retention_keep_ms, retention_dead_ms, clock_timestamp() from meta for update";
    let limits = tx.query_one(sql, &[]).await?;
    let keep = at_least(policy.keep, limits.try_get(0)?);
    let dead = at_least(policy.dead, limits.try_get(1)?);
    let now = limits.try_get::<_, Time>(2)?.0;
    let slice = i64::try_from(policy.slice.max(1)).unwrap_or(i64::MAX);
    let mut keys = Keys::default();
    if let Some(suspects) = suspects {
        risen::deliver_risen(&tx, &suspects, &mut keys).await?;
    }
    if let Some(age) = dead {
        prune_dead(&tx, before(now, age), slice, pruned, &mut keys).await?;
    }
    tx.commit().await?;
    keys.promote_or_leave(session).await;
    // Another transaction, since cursors are locked in the order of their numbers by everybody.
    let tx = session.begin().await?;
    tx.execute("select from meta for update", &[]).await?;
    if let Some(keep) = keep {
        expire_holds(&tx, keep, slice, pruned).await?;
        tx.execute(include_str!("../sql/prune_skip.sql"), &[&Time(before(now, keep))]).await?;
    }
    let kept = tx.execute(include_str!("../sql/prune_kept.sql"), &[&slice]).await?;
    pruned.more |= kept as i64 == slice;
    tx.execute(include_str!("../sql/prune_progress.sql"), &[]).await?;
    tx.execute(include_str!("../sql/progress_merge.sql"), &[&slice]).await?;
    tx.commit().await?;
    Ok(keep)
}

/// What was asked for, but not less than the log's own policy; None: for ever.
pub(crate) fn at_least(asked: Option<Duration>, stored_ms: i64) -> Option<Duration> {
    let stored = Duration::from_millis(stored_ms.max(0) as u64);
    asked.filter(|_| stored_ms != FOREVER_MS).map(|asked| asked.max(stored))
}

fn before(now: Timestamp, age: Duration) -> Timestamp {
    Timestamp(now.0.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX)))
}

/// Empties the lowest leaf that is old enough and that every subscription has passed, if there is one.
async fn empty_one(session: &mut Session, keep: Duration, pruned: &mut Pruned) -> Db<()> {
    // Looked at and counted first, for that takes long in a large leaf and nobody is to wait for it.
    let Some((leaf, None)) = candidate(&**session, keep, pruned).await? else { return Ok(()) };
    let range: [&(dyn ToSql + Sync); 2] = [&leaf.low, &leaf.high];
    let events = count(session, &leaf).await?;
    let tx = session.begin().await?;
    tx.execute("select from meta for update", &[]).await?;
    // Floors first, deliveries second: a lane that parks an event moves its floor in the same transaction.
    let still = candidate(&tx, keep, pruned).await?;
    if still.is_none_or(|(still, held_by)| still.name != leaf.name || held_by.is_some()) {
        return Ok(());
    }
    let kept = tx.execute(include_str!("../sql/prune_keep.sql"), &range).await?;
    tx.execute(include_str!("../sql/prune_advance.sql"), &range).await?;
    tx.execute("delete from dead_range where high <= (select pruned_to from meta)", &[]).await?;
    leaves::empty_leaf_and_commit(tx, &leaf).await?;
    pruned.events += events;
    pruned.kept += kept;
    pruned.more = true;
    Ok(())
}

/// How many events a leaf has. Counted piece by piece, for nobody may keep a snapshot for long.
async fn count(session: &Session, leaf: &Leaf) -> Db<u64> {
    let high = leaf.high.unwrap_or(Position::MAX);
    let (mut low, mut events) = (leaf.low, 0);
    while low < high {
        let end = high.min(low.saturating_add(COUNTED_AT_ONCE));
        let sql = "select count(*) from event where position >= $1 and position < $2";
        events += session.query_one(sql, &[&low, &end]).await?.try_get::<_, i64>(0)? as u64;
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
    let sql = "select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0), clock_timestamp()";
    let row = client.query_one(sql, &[]).await?;
    let (horizon, now): (Position, Timestamp) = (row.try_get(0)?, row.try_get::<_, Time>(1)?.0);
    let Some(row) = client.query_opt(include_str!("../sql/prune_leaf.sql"), &[&horizon]).await? else {
        return Ok(None);
    };
    let newest = row.try_get::<_, Option<Time>>(3)?.map(|time| time.0);
    if newest.is_some_and(|newest| newest >= before(now, keep)) {
        return Ok(None);
    }
    let high: Position = row.try_get(2)?;
    let leaf = Leaf { name: row.try_get(0)?, low: row.try_get(1)?, high: Some(high), emptied: false, oldest: None };
    let behind = client.query_opt(include_str!("../sql/prune_floor.sql"), &[]).await?;
    let behind = behind.filter(|row| row.get::<_, Position>(1) < high - 1);
    pruned.held_by = behind.map(|row| row.try_get(0)).transpose()?;
    Ok(Some((leaf, pruned.held_by.clone())))
}

/// Moves subscriptions on whose hold is over for some of what they have not settled, recorded and with an alarm.
async fn expire_holds(tx: &Transaction<'_>, keep: Duration, slice: i64, pruned: &mut Pruned) -> Db<()> {
    let world = World::load(tx).await?;
    let mut by_number: Vec<_> = world.subscriptions.iter().collect();
    by_number.sort_by_key(|subscription| subscription.id);
    for subscription in by_number {
        let Some(hold) = subscription.hold else { continue };
        let oldest = before(world.now, hold.max(keep));
        let sql = "select created_at from event where position > $1 order by position limit 1";
        let first = tx.query_opt(sql, &[&subscription.floor()]).await?;
        let first = first.map(|row| row.try_get::<_, Time>(0)).transpose()?;
        if first.is_some_and(|first| first.0 < oldest) {
            pruned.more |= expire_hold(tx, subscription.id, oldest, slice).await?;
        }
    }
    Ok(())
}

/// Gives up what a subscription has not settled of the next `slice` events, as far as they are older than `oldest`. Whether
/// there may be more of them.
async fn expire_hold(tx: &Transaction<'_>, id: SubscriptionId, oldest: Timestamp, slice: i64) -> Db<bool> {
    // No lane moves from here on; so what the cursors say is read again.
    tx.execute("select from cursor where subscription = $1 order by lane for update", &[&id.0]).await?;
    let world = World::load(tx).await?;
    let Some(subscription) = world.subscriptions.iter().find(|subscription| subscription.id == id) else {
        return Ok(false);
    };
    let floor = subscription.floor();
    // Before the events: what they do not show may still come from whoever writes now.
    let writers = !tx.query(include_str!("../sql/writers.sql"), &[]).await?.is_empty();
    let none: Option<&str> = None;
    let rows = tx.query(include_str!("../sql/backlog.sql"), &[&floor, &none, &none, &none, &none, &slice]).await?;
    let lines = rows.iter().map(Line::of).collect::<Db<Vec<_>>>()?;
    let over: Vec<_> = lines.iter().take_while(|line| line.created_at < oldest).collect();
    let Some(end) = over.last().map(|line| line.position) else { return Ok(false) };
    let mut dropped: RangeSet = RangeSet::new();
    over.iter().filter(|line| line.awaits(subscription)).for_each(|line| dropped.insert(line.position));
    if writers {
        let mut visible = RangeSet::new();
        over.iter().for_each(|line| visible.insert(line.position));
        dropped.union(&unknown(tx, subscription, &visible, (floor + 1, end)).await?);
    }
    for range in dropped.iter() {
        give_up(tx, id, (*range.start(), *range.end()), REASON_HOLD).await?;
    }
    for lane in subscription.lanes.iter().filter(|lane| lane.cursor.floor < end) {
        jump(tx, id, lane, end).await?;
    }
    ring(tx).await?;
    if !dropped.is_empty() {
        tracing::error!(
            subscription = subscription.name,
            events = dropped.count(),
            to = end,
            "events were dropped undelivered: the subscription's hold is over"
        );
    }
    Ok(over.len() as i64 == slice)
}

/// Positions that may yet become visible: not proven dead, and not settled by every lane. They are given up by number.
async fn unknown(
    tx: &Transaction<'_>,
    subscription: &SubscriptionRow,
    visible: &RangeSet,
    (low, high): (Position, Position),
) -> Db<RangeSet> {
    let mut unknown = visible.missing(low, high);
    for row in tx.query("select low, high from dead_range where high >= $1 and low <= $2", &[&low, &high]).await? {
        unknown.remove_range(row.try_get(0)?, row.try_get(1)?);
    }
    let mut unsettled = RangeSet::new();
    for lane in &subscription.lanes {
        unsettled.union(&lane.cursor.settled.missing(lane.cursor.floor + 1, high));
    }
    unknown.subtract(&unsettled.missing(low, high));
    Ok(unknown)
}

/// Moves a lane's floor to `end`. The books say what it has settled and what it left out; its owner loads it again.
async fn jump(tx: &Transaction<'_>, id: SubscriptionId, lane: &LaneRow, end: Position) -> Db<()> {
    let Cursor { floor, settled, .. } = &lane.cursor;
    let books = [(lane.epoch, settled.within(floor + 1, end)), (0, settled.missing(floor + 1, end))];
    for (epoch, ranges) in &books {
        for range in ranges.iter() {
            record_progress(tx, id, lane.lane, *epoch, (range.start() - 1, *range.end())).await?;
        }
    }
    let mut settled = settled.clone();
    settled.remove_range(0, end);
    let sql = "update cursor set floor = $3, settled = $4::text::int8multirange, epoch = epoch + 1 \
               where subscription = $1 and lane = $2";
    tx.execute(sql, &[&id.0, &(lane.lane as i32), &end, &multirange(&settled)]).await?;
    Ok(())
}

async fn prune_dead(
    tx: &Transaction<'_>,
    oldest: Timestamp,
    slice: i64,
    pruned: &mut Pruned,
    keys: &mut Keys,
) -> Db<()> {
    let rows = tx.query(include_str!("../sql/prune_dead.sql"), &[&Time(oldest), &slice]).await?;
    let mut lanes = BTreeMap::<_, BTreeSet<u32>>::new();
    for row in &rows {
        lanes.entry(row.try_get::<_, i64>(0)?).or_default().insert(row.try_get::<_, i32>(2)? as u32);
    }
    // The lanes first, as everybody does it who changes deliveries.
    for (id, lanes) in lanes {
        touch_lanes(tx, SubscriptionId(id), lanes).await?;
    }
    let column = |index| rows.iter().map(|row: &Row| row.get(index)).collect::<Vec<i64>>();
    let sql = include_str!("../sql/prune_dead_gone.sql");
    let gone = tx.query(sql, &[&column(0), &column(1), &Time(oldest)]).await?;
    for row in &gone {
        let position = row.try_get(1)?;
        keys.note(row.try_get(0)?, row.try_get(2)?);
        give_up(tx, SubscriptionId(row.try_get(0)?), (position, position), REASON_DEAD).await?;
    }
    if !gone.is_empty() {
        ring(tx).await?;
    }
    pruned.dead = gone.len() as u64;
    pruned.more |= rows.len() as i64 == slice;
    Ok(())
}
