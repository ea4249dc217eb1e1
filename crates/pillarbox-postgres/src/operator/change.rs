use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::admin::plan::{Edit, Facts, KeyEvent, Lookup, Place, Target, plan};
use pillarbox::admin::snapshot::{LaneLedger, Snapshot, SubscriptionRow};
use pillarbox::admin::{Change, Changed, Pause, Selection};
use pillarbox::store::{Epoch, FormerFilters, InstanceId, KeyHash, RangeSet, SubscriptionId, lane_of};
use pillarbox::{ErrorKind, Mode, Position, Start};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use super::show::head;
use super::{BY_INDEX, books, load_snapshot, positions_of, ring};
use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::ownership::{Events, first_since, put_former_filters, record_progress, start_floor};
use crate::queue::{self, Keys};
use crate::types::{Text, multirange};

/// How often a command is tried when a relay was in its way.
const TRIES_MAX: usize = 3;

/// What a command about many rows looks up is read here and sent back, and until all of that has arrived the server says that the
/// transaction stands still. Such a command is ended only when that lasts for as long as a settlement's; if it is cut off, the instance that
/// takes its lanes over waits for it until then. All others are ended after the second that `SETTINGS` gives.
const LARGE: &str = "set local idle_in_transaction_session_timeout = '10s'";

/// Whether a command may be about any number of rows that are sent back and forth.
fn is_large(change: &Change) -> bool {
    match change {
        Change::Requeue { which, .. } => matches!(which, Selection::Key(_) | Selection::All),
        Change::Rewind { key, .. } => key.is_some(),
        Change::Relane { .. } => true,
        _ => false,
    }
}

/// Carries out a command in one transaction; a dry run does the same and takes it back.
pub(super) async fn change(session: &mut Session, change: &Change, dry_run: bool) -> Db<Changed> {
    let mut tries = 0;
    loop {
        tries += 1;
        match try_change(session, change, dry_run).await {
            Err(error) if error.kind() == ErrorKind::Busy && tries < TRIES_MAX => {
                tracing::debug!(error = %pillarbox::Error::from(error), "a command is tried again");
            }
            other => return other,
        }
    }
}

async fn try_change(session: &mut Session, change: &Change, dry_run: bool) -> Db<Changed> {
    let mut keys = Keys::default();
    let tx = session.begin().await?;
    tx.batch_execute(BY_INDEX).await?;
    lock(&tx, change.subject()).await?;
    if is_large(change) {
        tx.batch_execute(LARGE).await?;
    }
    let snapshot = load_snapshot(&tx).await?;
    let subject = change.subject().map(|name| snapshot.subscription(name)).transpose()?;
    let facts = look_up(&tx, &snapshot, subject, &change.lookup()).await?;
    let plan = plan(change, &snapshot, facts)?;
    let mut count = 0;
    for edit in &plan.edits {
        count += apply(&tx, subject, edit, &mut keys).await?;
    }
    ring(&tx).await?;
    if dry_run {
        tx.rollback().await?
    } else {
        tx.commit().await?
    }
    // Also after a dry run: somebody may have left it to us as long as we had the rows.
    keys.promote_or_leave(session).await;
    Ok(plan.answer(count))
}

/// Keeps retention, then joining relays, then the owners of the lanes from changing what a command looks at: in this order,
/// in which all lock them.
async fn lock(tx: &Transaction<'_>, name: Option<&str>) -> Db<()> {
    tx.query_typed(sql!(meta, "share"), &[]).await?;
    let Some(name) = name else { return Ok(()) };
    tx.query_typed(sql!(subscription, "lock"), &[(&name, Type::TEXT)]).await?;
    tx.query_typed(sql!(cursor, "lock_of_name"), &[(&name, Type::TEXT)]).await?;
    Ok(())
}

/// What a plan has to know beside the snapshot.
async fn look_up(
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
                    let positions = positions_of(tx, *id).await?;
                    (Some(*id).filter(|_| !positions.is_empty()), Some(positions), None)
                }
                Selection::Version(stream, version) => {
                    let event = version_id(tx, stream, *version).await?;
                    let positions = match event {
                        Some(id) => positions_of(tx, id).await?,
                        None => Vec::new(),
                    };
                    (event, Some(positions), None)
                }
                Selection::Key(key) => (None, None, Some(key.as_str())),
                Selection::All => (None, None, None),
            };
            let targets = targets(tx, row.id, positions, key, *limit).await?;
            let head = match targets.as_slice() {
                [only] if event.is_some() => head(tx, row.id, only.position).await?,
                _ => None,
            };
            Facts::Deliveries { event, targets, head }
        }
        Lookup::Rewind { to, key } => {
            let place = place(tx, snapshot, *to).await?;
            let events = match key {
                Some(key) => key_events(tx, row.id, key, place.position()).await?,
                None => Vec::new(),
            };
            let former_filters = former_filters(tx, row.id).await?;
            // Last: what is kept aside for a queue may end at any moment.
            let kept = tx.query(sql!(delivery, "rewind_kept"), &[&row.id.0, &place.kept, key]).await?;
            let kept = kept.iter().map(target).collect::<Db<_>>()?;
            Facts::Rewind { place, kept, events, former_filters }
        }
        Lookup::Ledger => {
            let mut ledgers = books::ledgers(tx, Some(row.id)).await?;
            let ledger = |lane: u32| ledgers.remove(&(row.id, lane)).unwrap_or_default();
            let lanes = row.lanes.iter().map(|lane| lane.lane).map(ledger).collect();
            Facts::Ledger {
                lanes,
                is_claimed: tx.query_one(sql!(queue, "is_claimed"), &[&row.id.0]).await?.try_get(0)?,
            }
        }
    })
}

/// The deliveries at these positions in any state, or the dead ones of a key or all, in log order.
async fn targets(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    positions: Option<Vec<Position>>,
    key: Option<&str>,
    limit: usize,
) -> Db<Vec<Target>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = tx.query(sql!(delivery, "targets"), &[&subscription.0, &positions, &key, &limit]).await?;
    rows.iter().map(target).collect()
}

fn target(row: &Row) -> Db<Target> {
    Ok(Target {
        position: row.try_get("position")?,
        lane: row.try_get::<_, i32>("lane")? as u32,
        id: row.try_get::<_, Option<Uuid>>("id")?.unwrap_or_default(),
        key: row.try_get::<_, Option<Text<'_>>>("key")?.map(|key| key.0.into_owned()),
    })
}

/// The id of an event by its version, if the stream has it.
async fn version_id(tx: &Transaction<'_>, stream: &str, version: i64) -> Db<Option<Uuid>> {
    let row = tx.query_opt(sql!(event, "version_id"), &[&stream, &version]).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

async fn place(tx: &Transaction<'_>, snapshot: &Snapshot, to: Start) -> Db<Place> {
    let (floor, settled) = start_floor(tx, to).await?;
    let oldest_kept = match to {
        Start::Time(time) => {
            let last = tx.query_one(sql!(event, "kept_last"), &[]).await?.try_get(0)?;
            first_since(tx, Events::Kept, time, 0, last).await?
        }
        Start::Beginning | Start::Position(_) | Start::Now => None,
    };
    Ok(Place::new(to, floor, settled, oldest_kept, snapshot))
}

/// The events of a key above a position.
async fn key_events(tx: &Transaction<'_>, id: SubscriptionId, key: &str, above: Position) -> Db<Vec<KeyEvent>> {
    let event = |row: &Row| {
        Ok(KeyEvent {
            position: row.try_get("position")?,
            id: row.try_get("id")?,
            topic: row.try_get::<_, Text<'_>>("topic")?.0.into_owned(),
            r#type: row.try_get::<_, Text<'_>>("type")?.0.into_owned(),
            has_delivery: row.try_get("has_delivery")?,
        })
    };
    tx.query(sql!(event, "key_events"), &[&above, &key, &id.0]).await?.iter().map(event).collect()
}

async fn former_filters(tx: &Transaction<'_>, id: SubscriptionId) -> Db<FormerFilters> {
    Ok(FormerFilters::parse(tx.query_one(sql!(subscription, "lock_former_filters"), &[&id.0]).await?.try_get(0)?))
}

/// Applies one edit; how many claims or deliveries it concerned, if it counts them.
async fn apply(tx: &Transaction<'_>, subject: Option<&SubscriptionRow>, edit: &Edit, keys: &mut Keys) -> Db<u64> {
    if let Edit::Recover { subscription, instance, silent_for } = edit {
        return recover(tx, *subscription, *instance, *silent_for, keys).await;
    }
    let row = subject.ok_or_else(|| DbError::own(ErrorKind::Fatal, format!("{edit:?} has no subscription")))?;
    let id = row.id.0;
    match edit {
        Edit::Recover { .. } => {}
        Edit::MakeDue(targets) => make_due(tx, row, targets, keys).await?,
        Edit::GiveUp { targets, reason } => give_up_targets(tx, row.id, targets, reason, keys).await?,
        Edit::Reload(lanes) => touch_lanes(tx, row.id, lanes.iter().copied()).await?,
        Edit::SetCursor { lane, epoch, floor, settled } => {
            let values: [&(dyn ToSql + Sync); 5] = [&id, &(*lane as i32), floor, &multirange(settled), epoch];
            expect_epoch(tx.execute(sql!(cursor, "rewind"), &values).await?)?;
        }
        Edit::Fence { lane, epoch } => {
            expect_epoch(tx.execute(sql!(cursor, "fence"), &[&id, &(*lane as i32), epoch]).await?)?;
        }
        Edit::ReadAgain { floor, settled } => read_again(tx, row.id, *floor, settled, keys).await?,
        Edit::Replay { lane, key, positions } => replay(tx, row, *lane, key, positions, keys).await?,
        // Whatever else was given up with them stays so.
        Edit::Restore(positions) => {
            tx.execute(sql!(skip, "take_up"), &[&id, &multirange(positions)]).await?;
        }
        Edit::Account { lane, epoch, positions } => books::account(tx, row.id, *lane, *epoch, positions).await?,
        Edit::SetFormerFilters(formers) => put_former_filters(tx, row.id, formers).await?,
        Edit::SetPause(pause) => set_pause(tx, row.id, pause.as_ref()).await?,
        Edit::Rename(to) => _ = tx.execute(sql!(subscription, "rename"), &[&id, to]).await?,
        Edit::Delete => return delete_subscription(tx, row.id).await,
        Edit::Relane { lanes, floor, epoch, revision, ledger } => {
            replace_lanes(tx, row.id, *lanes, (*floor, *epoch, *revision), ledger).await?;
            return relane_deliveries(tx, row.id, *lanes).await;
        }
    }
    Ok(0)
}

/// The lanes are locked since the snapshot was read, so the epoch can be no other.
fn expect_epoch(changed: u64) -> Db<()> {
    match changed {
        1 => Ok(()),
        _ => Err(DbError::own(ErrorKind::Busy, "a lane has changed since it was read; try the command again")),
    }
}

/// Takes claims from their owners; how many.
async fn recover(
    tx: &Transaction<'_>,
    subscription: Option<SubscriptionId>,
    instance: Option<InstanceId>,
    silent_for: Duration,
    keys: &mut Keys,
) -> Db<u64> {
    let recovered = queue::recover_by_operator(tx, subscription, instance, silent_for, keys).await?;
    Ok(recovered.claims.iter().map(|(.., count)| count).sum())
}

async fn make_due(tx: &Transaction<'_>, row: &SubscriptionRow, targets: &[Target], keys: &mut Keys) -> Db<()> {
    let positions: Vec<Position> = targets.iter().map(|target| target.position).collect();
    if row.mode == Mode::Queue {
        tx.execute(sql!(queue, "lock_keys"), &[&row.id.0, &positions]).await?;
        // Also of what ended meanwhile: who ended it found the rest of its key locked by this.
        targets.iter().for_each(|target| keys.note(row.id.0, target.key.clone()));
    }
    for due in tx.query(sql!(delivery, "requeue"), &[&row.id.0, &positions]).await? {
        keys.note(row.id.0, due.try_get(0)?);
    }
    Ok(())
}

async fn give_up_targets(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    targets: &[Target],
    reason: &str,
    keys: &mut Keys,
) -> Db<()> {
    for target in targets {
        give_up(tx, id, (target.position, target.position), reason).await?;
        for gone in tx.query(sql!(delivery, "remove"), &[&id.0, &target.position]).await? {
            keys.note(id.0, gone.try_get(0)?);
        }
    }
    Ok(())
}

/// Records that positions will not be delivered, and why.
pub(super) async fn give_up(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    range: (Position, Position),
    reason: &str,
) -> Db<()> {
    tx.execute(sql!(skip, "give_up"), &[&id.0, &range.0, &range.1, &reason]).await?;
    Ok(())
}

/// Tells the owners of these lanes to load their deliveries again.
pub(super) async fn touch_lanes(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lanes: impl IntoIterator<Item = u32>,
) -> Db<()> {
    let lanes: Vec<i32> = lanes.into_iter().collect::<BTreeSet<_>>().into_iter().map(|lane| lane as i32).collect();
    // In the order in which settlements lock them, or two could wait for each other.
    tx.execute(sql!(cursor, "lock_lanes"), &[&id.0, &lanes]).await?;
    tx.execute(sql!(cursor, "touch"), &[&id.0, &lanes]).await?;
    Ok(())
}

async fn set_pause(tx: &Transaction<'_>, id: SubscriptionId, pause: Option<&Pause>) -> Db<()> {
    let by = pause.map(|pause| pause.by.name());
    let reason = pause.and_then(|pause| pause.reason.as_deref());
    tx.execute(sql!(subscription, "set_pause"), &[&id.0, &pause.is_some(), &by, &reason]).await?;
    Ok(())
}

/// Forgets deliveries and records above the floor.
async fn read_again(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    floor: Position,
    settled: &RangeSet,
    keys: &mut Keys,
) -> Db<()> {
    for gone in tx.query(sql!(delivery, "rewind"), &[&id.0, &floor, &multirange(settled)]).await? {
        keys.note(id.0, gone.try_get(0)?);
    }
    // What was covered before says nothing about the replay.
    tx.execute(sql!(progress, "remove_above"), &[&id.0, &floor]).await?;
    tx.execute(sql!(progress, "cut"), &[&id.0, &floor]).await?;
    Ok(())
}

async fn replay(
    tx: &Transaction<'_>,
    row: &SubscriptionRow,
    lane: u32,
    key: &str,
    positions: &[Position],
    keys: &mut Keys,
) -> Db<()> {
    let (lane, is_queue) = (lane as i32, row.mode == Mode::Queue);
    let last: i64 = tx.query_one(sql!(delivery, "last_arrival"), &[&row.id.0, &lane]).await?.try_get(0)?;
    let values: [&(dyn ToSql + Sync); 6] = [&row.id.0, &positions, &lane, &last, &key, &is_queue];
    tx.execute(sql!(delivery, "rewind_key"), &values).await?;
    keys.note(row.id.0, is_queue.then(|| key.to_owned()));
    Ok(())
}

/// Changes by which filters events of a subscription were judged, where there was more than one.
pub(super) async fn judge_again(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    change: impl FnOnce(&mut FormerFilters),
) -> Db<()> {
    let Some(row) = tx.query_opt(sql!(subscription, "lock_former_filters"), &[&id.0]).await? else { return Ok(()) };
    let before = FormerFilters::parse(row.try_get(0)?);
    let mut formers = before.clone();
    change(&mut formers);
    if formers != before {
        put_former_filters(tx, id, &formers).await?;
    }
    Ok(())
}

/// Removes a subscription with all that belongs to it; how many deliveries went.
pub(super) async fn delete_subscription(tx: &Transaction<'_>, id: SubscriptionId) -> Db<u64> {
    let deliveries = tx.execute(sql!(subscription, "remove_deliveries"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove_cursors"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove_progress"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove_skips"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove_recovered"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove"), &[&id.0]).await?;
    Ok(deliveries)
}

async fn replace_lanes(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lanes: u32,
    (floor, epoch, revision): (Position, Epoch, i64),
    ledger: &LaneLedger,
) -> Db<()> {
    tx.execute(sql!(subscription, "remove_cursors"), &[&id.0]).await?;
    tx.execute(sql!(subscription, "remove_progress"), &[&id.0]).await?;
    tx.execute(sql!(cursor, "replace"), &[&id.0, &(lanes as i32), &floor, &epoch, &revision]).await?;
    for lane in 0..lanes {
        for (epoch, ranges) in [(0, &ledger.before_start), (epoch, &ledger.covered)] {
            record_progress(tx, id, lane, epoch, ranges).await?;
        }
    }
    tx.execute(sql!(subscription, "set_lanes"), &[&id.0, &(lanes as i32)]).await?;
    Ok(())
}

/// Gives each delivery its new lane, keeping the order of arrival within each key. In a queue that is the same for all lanes.
async fn relane_deliveries(tx: &Transaction<'_>, id: SubscriptionId, lanes: u32) -> Db<u64> {
    let rows = tx.query(sql!(delivery, "in_order_of_arrival"), &[&id.0]).await?;
    let (mut positions, mut new_lanes) = (Vec::<Position>::new(), Vec::<i32>::new());
    for row in &rows {
        let (position, key): (Position, Option<&str>) = (row.try_get("position")?, row.try_get("key")?);
        positions.push(position);
        new_lanes.push(lane_of(key.map(KeyHash::of), position, lanes) as i32);
    }
    Ok(tx.execute(sql!(delivery, "relane"), &[&id.0, &positions, &new_lanes]).await?)
}
