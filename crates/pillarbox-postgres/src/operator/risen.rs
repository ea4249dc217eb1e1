use std::sync::atomic::Ordering;

use pillarbox::admin::BacklogRow;
use pillarbox::admin::retention::{DEAD_RANGES_LOOKED_AT_MAX, DeadLook, Late, RISEN_MAX, log_risen};
use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow};
use pillarbox::store::{FormerFilters, RangeSet};
use pillarbox::{Mode, Position};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use super::change::{judge_again, touch_lanes};
use super::status::backlog_row;
use super::{load_snapshot, ring};
use crate::connection::Session;
use crate::error::Db;
use crate::leaves::Upkeep;
use crate::queue::Keys;
use crate::types::Time;

/// Dead ranges of which some have an event: those that begin at `first` or above, and below `below`.
pub(super) struct Suspects {
    first: Position,
    below: Position,
}

/// What a run of retention has looked at.
pub(super) struct Looked {
    pub(super) suspects: Option<Suspects>,
    look: DeadLook,
    below: Position,
}

impl Looked {
    /// The next run goes on from here, unless it has to look at the same again: `risen` were found.
    pub(super) fn is_done(&self, upkeep: &Upkeep, risen: u64) {
        upkeep.dead_looked_at.store(self.look.next(self.below, risen), Ordering::Relaxed);
    }
}

/// Looks for events at positions that were closed: a premise was broken, for instance by an insert that named its
/// position. Goes on where the last run has stopped, from the newest ranges to the oldest and over again. Reads without a lock.
pub(super) async fn look(session: &Session, upkeep: &Upkeep) -> Db<Looked> {
    let below = upkeep.dead_looked_at.load(Ordering::Relaxed);
    let place = [(&below as _, Type::INT8), (&DEAD_RANGES_LOOKED_AT_MAX as _, Type::INT8)];
    let row = session.query_typed_one(sql!(dead_range, "look"), &place).await?;
    let look = DeadLook { ranges: row.try_get("ranges")?, first: row.try_get("first")? };
    let found: bool = row.try_get("found")?;
    let suspects = look.first.filter(|_| found).map(|first| Suspects { first, below });
    Ok(Looked { suspects, look, below })
}

/// The events that were found in dead ranges are delivered late, with an alarm, and are dead no more. How many there were.
pub(super) async fn deliver_risen(tx: &Transaction<'_>, suspects: &Suspects, keys: &mut Keys) -> Db<u64> {
    let Suspects { first, below } = suspects;
    let place = [(&RISEN_MAX as _, Type::INT8), (first as _, Type::INT8), (below as _, Type::INT8)];
    let rows = tx.query_typed(sql!(dead_range, "risen"), &place).await?;
    if rows.is_empty() {
        return Ok(0);
    }
    // Before the cursors, as whoever joins does.
    tx.query_typed(sql!(subscription, "lock_all"), &[]).await?;
    // Rare enough to stop every settlement for a moment; what the cursors say is read under their locks.
    tx.query_typed(sql!(cursor, "lock_all"), &[]).await?;
    let snapshot = load_snapshot(tx).await?;
    let mut risen = RangeSet::new();
    let mut lines = rows.iter().map(backlog_row).collect::<Db<Vec<_>>>()?;
    lines.sort_by_key(|line| line.position);
    for line in &lines {
        for subscription in &snapshot.subscriptions {
            deliver(tx, &snapshot, subscription, line, keys).await?;
        }
        risen.insert(line.position);
    }
    for range in risen.iter() {
        bring_back(tx, *range.start(), *range.end()).await?;
    }
    ring(tx).await?;
    log_risen(&risen);
    Ok(risen.count())
}

async fn deliver(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    subscription: &SubscriptionRow,
    line: &BacklogRow<'_>,
    keys: &mut Keys,
) -> Db<()> {
    let (lane, state, due_at) = match subscription.late(line, snapshot.now) {
        None => return Ok(()),
        Some(Late::Forget) => {
            return judge_again(tx, subscription.id, |formers| formers.forget(line.key_hash, line.position)).await;
        }
        Some(Late::ReadAgain(lane)) => {
            let place = [(&subscription.id.0 as _, Type::INT8), (&(lane.lane as i32) as _, Type::INT4)];
            tx.execute_typed(sql!(cursor, "raise_epoch"), &place).await?;
            return Ok(());
        }
        Some(Late::Deliver { lane, state, due_at }) => (lane.lane, state.name(), due_at),
    };
    let (id, number, position) = (subscription.id.0, lane as i32, line.position);
    let place = [(&id as _, Type::INT8), (&number as _, Type::INT4), (&position as _, Type::INT8)];
    if tx.query_typed_one(sql!(progress, "is_before_start"), &place).await?.try_get(0)? {
        return Ok(());
    }
    let is_queue = subscription.mode == Mode::Queue;
    let values = [
        (&id as _, Type::INT8),
        (&position as _, Type::INT8),
        (&number as _, Type::INT4),
        (&line.key as _, Type::TEXT),
        (&state as _, Type::TEXT),
        (&Time(due_at) as _, Type::TIMESTAMPTZ),
        (&is_queue as _, Type::BOOL),
    ];
    keys.note(id, line.key.filter(|_| is_queue).map(str::to_owned));
    tx.execute_typed(sql!(delivery, "put_risen"), &values).await?;
    let judge = |formers: &mut FormerFilters| {
        formers.replay(line.key_hash, position, &line.topic, &line.r#type);
    };
    judge_again(tx, subscription.id, judge).await?;
    touch_lanes(tx, subscription.id, [lane]).await
}

/// Takes `low..=high` out of the dead ranges.
async fn bring_back(tx: &Transaction<'_>, low: Position, high: Position) -> Db<()> {
    let range = [(&low as _, Type::INT8), (&high as _, Type::INT8)];
    tx.execute_typed(sql!(dead_range, "take_out"), &range).await?;
    Ok(())
}
