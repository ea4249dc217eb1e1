use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::admin::world::{InstanceRow, LaneRow, SubscriptionRow, tell_recovered};
use pillarbox::admin::{Change, Changed, Pause, Selection};
use pillarbox::store::{FormerFilters, InstanceId, KeyHash, RangeSet, SubscriptionId, lane_of};
use pillarbox::{ErrorKind, Mode, Position, Start, Subscription};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{BY_INDEX, World, books, positions_of, ring, unknown_event};
use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::ownership::{put_former_filters, start_floor};
use crate::queue::{self, Keys};
use crate::types::{Text, Time, multirange};

mod relane;

/// How often a command is tried when a relay was in its way.
const TRIES_MAX: usize = 3;

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
    lock(&tx, subject(change)).await?;
    let world = World::load(&tx).await?;
    let changed = apply(&tx, &world, change, &mut keys).await?;
    ring(&tx).await?;
    if dry_run {
        tx.rollback().await?
    } else {
        tx.commit().await?
    }
    // Also after a dry run: somebody may have left it to us as long as we had the rows.
    keys.promote_or_leave(session).await;
    Ok(changed)
}

/// The subscription that has to stand still for a command.
fn subject(change: &Change) -> Option<&str> {
    Some(match change {
        Change::Recover { .. } => return None,
        Change::Requeue { subscription, .. }
        | Change::Skip { subscription, .. }
        | Change::Rewind { subscription, .. }
        | Change::Relane { subscription, .. }
        | Change::Pause { subscription, .. }
        | Change::Resume(subscription)
        | Change::Delete(subscription)
        | Change::Rename { from: subscription, .. } => subscription,
    })
}

/// Keeps retention, then joining relays, then the owners of the lanes from changing what a command looks at: in this order,
/// which is everybody's.
async fn lock(tx: &Transaction<'_>, name: Option<&str>) -> Db<()> {
    tx.query_typed("select from meta for share", &[]).await?;
    let Some(name) = name else { return Ok(()) };
    tx.query_typed("select from subscription where name = $1 for update", &[(&name, Type::TEXT)]).await?;
    let sql = "select from cursor where subscription in (select id from subscription where name = $1) \
               order by lane for update";
    tx.query_typed(sql, &[(&name, Type::TEXT)]).await?;
    Ok(())
}

async fn apply(tx: &Transaction<'_>, world: &World, change: &Change, keys: &mut Keys) -> Db<Changed> {
    let row = |name: &str| world.subscription(name);
    match change {
        Change::Requeue { subscription, which, limit } => requeue(tx, row(subscription)?, which, *limit, keys).await,
        Change::Recover { subscription, instance, silent_for } => {
            let subscription = subscription.as_deref().map(row).transpose()?;
            recover(tx, subscription, *instance, *silent_for, keys).await
        }
        Change::Skip { subscription, event, reason } => skip(tx, row(subscription)?, *event, reason, keys).await,
        Change::Pause { subscription, by, reason } => {
            let row = row(subscription)?;
            let pause = Pause { by: *by, reason: reason.clone() };
            set_paused(tx, row, Some(pause.over(row.pause.clone()))).await
        }
        Change::Resume(name) => set_paused(tx, row(name)?, None).await,
        Change::Rewind { subscription, to, key: None } => rewind(tx, world, row(subscription)?, *to, keys).await,
        Change::Rewind { subscription, to, key: Some(key) } => {
            rewind_key(tx, world, row(subscription)?, *to, key, keys).await
        }
        Change::Delete(name) => delete(tx, world, row(name)?).await,
        Change::Rename { from, to } => rename(tx, world, row(from)?, to).await,
        Change::Relane { subscription, lanes } => relane::relane(tx, world, row(subscription)?, *lanes).await,
    }
}

fn invalid(message: String) -> DbError {
    DbError::own(ErrorKind::Invalid, message)
}

/// A delivery that a command concerns.
struct Target {
    position: Position,
    lane: u32,
    id: Uuid,
}

/// Takes claims from their owners; each counts as an attempt.
async fn recover(
    tx: &Transaction<'_>,
    row: Option<&SubscriptionRow>,
    instance: Option<InstanceId>,
    silent_for: Duration,
    keys: &mut Keys,
) -> Db<Changed> {
    let recovered = queue::recover_by_operator(tx, row.map(|row| row.id), instance, silent_for, keys).await?;
    Ok(tell_recovered(recovered.claims.iter().map(|(.., count)| count).sum()))
}

async fn requeue(
    tx: &Transaction<'_>,
    row: &SubscriptionRow,
    which: &Selection,
    limit: usize,
    keys: &mut Keys,
) -> Db<Changed> {
    let (id, key) = match which {
        Selection::Event(id) => (Some(*id), None),
        Selection::Version(stream, version) => (Some(version_id(tx, stream, *version).await?), None),
        Selection::Key(key) => (None, Some(key)),
        Selection::All => (None, None),
    };
    let targets = targets(tx, row.id, id, key.map(String::as_str), limit).await?;
    if let (Some(id), true) = (id, targets.is_empty()) {
        return Err(no_delivery(tx, row, id, "requeue").await);
    }
    let positions: Vec<Position> = targets.iter().map(|target| target.position).collect();
    make_due(tx, row, &positions, keys).await?;
    touch_lanes(tx, row.id, targets.iter().map(|target| target.lane)).await?;
    Ok(row.tell_requeued(targets.into_iter().map(|target| target.id).collect()))
}

/// Makes deliveries due now with attempts 0, and nobody's.
async fn make_due(tx: &Transaction<'_>, row: &SubscriptionRow, positions: &[Position], keys: &mut Keys) -> Db<()> {
    if row.mode == Mode::Queue {
        tx.execute(include_str!("../sql/lock_keys.sql"), &[&row.id.0, &positions]).await?;
    }
    for due in tx.query(include_str!("../sql/requeue.sql"), &[&row.id.0, &positions]).await? {
        keys.note(row.id.0, due.try_get(0)?);
    }
    Ok(())
}

/// The deliveries of one event in whatever state, or the dead ones of a key or all, in log order.
async fn targets(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    id: Option<Uuid>,
    key: Option<&str>,
    limit: usize,
) -> Db<Vec<Target>> {
    let positions = match id {
        Some(id) => Some(positions_of(tx, id).await?),
        None => None,
    };
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = tx.query(include_str!("../sql/targets.sql"), &[&subscription.0, &positions, &key, &limit]).await?;
    let target = |row: &tokio_postgres::Row| {
        let id = row.try_get::<_, Option<Uuid>>(2)?.unwrap_or_default();
        Ok(Target { position: row.try_get(0)?, lane: row.try_get::<_, i32>(1)? as u32, id })
    };
    rows.iter().map(target).collect()
}

async fn version_id(tx: &Transaction<'_>, stream: &str, version: i64) -> Db<Uuid> {
    let row = tx.query_opt(include_str!("../sql/version_id.sql"), &[&stream, &version]).await?;
    row.map(|row| row.get(0)).ok_or_else(|| {
        DbError::own(ErrorKind::NotFound, format!("stream '{stream}' has no version {version} in this log"))
    })
}

/// Why a command about one event has nothing to do.
async fn no_delivery(tx: &Transaction<'_>, row: &SubscriptionRow, id: Uuid, verb: &str) -> DbError {
    match positions_of(tx, id).await {
        Err(error) => error,
        Ok(positions) if positions.is_empty() => unknown_event(id),
        Ok(_) => invalid(format!(
            "nothing to {verb}: event {id} has no delivery of '{}'; it was delivered, is not wanted, or was not read yet \
             (see `pillarbox why {id}`)",
            row.name
        )),
    }
}

async fn skip(tx: &Transaction<'_>, row: &SubscriptionRow, event: Uuid, reason: &str, keys: &mut Keys) -> Db<Changed> {
    if reason.trim().is_empty() {
        return Err(invalid("a skip needs a reason; it is kept with the event".into()));
    }
    let targets = targets(tx, row.id, Some(event), None, usize::MAX).await?;
    if targets.is_empty() {
        return Err(no_delivery(tx, row, event, "skip").await);
    }
    for target in &targets {
        give_up(tx, row.id, (target.position, target.position), reason).await?;
        let sql = "delete from delivery where subscription = $1 and position = $2 \
                   returning case when queued then key end";
        for gone in tx.query(sql, &[&row.id.0, &target.position]).await? {
            keys.note(row.id.0, gone.try_get(0)?);
        }
    }
    touch_lanes(tx, row.id, targets.iter().map(|target| target.lane)).await?;
    let message = format!("event {event} is given up for '{}'; its key goes on", row.name);
    Ok(Changed { count: targets.len() as u64, events: vec![event], message })
}

/// Records that positions will not be delivered, and why.
pub(super) async fn give_up(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    range: (Position, Position),
    reason: &str,
) -> Db<()> {
    tx.execute(include_str!("../sql/give_up.sql"), &[&id.0, &range.0, &range.1, &reason]).await?;
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
    let sql = "select from cursor where subscription = $1 and lane = any($2) order by lane for update";
    tx.execute(sql, &[&id.0, &lanes]).await?;
    let sql = "update cursor set revision = revision + 1 where subscription = $1 and lane = any($2)";
    tx.execute(sql, &[&id.0, &lanes]).await?;
    Ok(())
}

async fn set_paused(tx: &Transaction<'_>, row: &SubscriptionRow, pause: Option<Pause>) -> Db<Changed> {
    let by = pause.as_ref().map(|pause| pause.by.name());
    let reason = pause.as_ref().and_then(|pause| pause.reason.as_deref());
    let sql = "update subscription set paused = $2, paused_by = $3, paused_reason = $4 where id = $1";
    tx.execute(sql, &[&row.id.0, &pause.is_some(), &by, &reason]).await?;
    Ok(row.tell_paused(pause.as_ref()))
}

/// Where a rewind goes to.
struct Place {
    /// What is not replayed: everything up to `floor`, and `settled` above it. Between them lie the events that may still be
    /// committed below the place.
    floor: Position,
    settled: RangeSet,
    /// The place itself.
    position: Position,
    /// What was asked for, if retention has left less of the log: only copies that deliveries need lie between the two.
    kept: Position,
    /// What to say if that is not as far back as was asked for.
    note: &'static str,
}

impl Place {
    async fn find(tx: &Transaction<'_>, world: &World, to: Start) -> Db<Place> {
        let (floor, settled) = start_floor(tx, to).await?;
        let position = settled.last().unwrap_or(floor);
        let kept = match to {
            Start::Beginning => 0,
            Start::Position(asked) => asked,
            Start::Now => position,
            Start::Time(time) => {
                let sql = "select min(position) - 1 from event_kept where created_at >= $1";
                tx.query_one(sql, &[&Time(time)]).await?.try_get::<_, Option<Position>>(0)?.unwrap_or(position)
            }
        };
        let lower = matches!(to, Start::Position(asked) if asked < position) || to == Start::Beginning;
        let note = match position {
            _ if !lower => "",
            position if position > 0 && position == world.fresh_floor => {
                " (what lies before was in this copy of the log when it was declared fresh)"
            }
            _ if to == Start::Beginning => "",
            _ => " (as far back as retention has left the log)",
        };
        Ok(Place { floor, settled, position, kept: kept.min(position), note })
    }

    /// What a lane keeps as settled: only what both say. Never forwards, and what is open stays open.
    fn keep(&self, lane: &LaneRow) -> (Position, RangeSet) {
        let floor = lane.cursor.floor.min(self.floor);
        let mut both = lane.cursor.settled.clone();
        both.insert_range(floor + 1, lane.cursor.floor);
        let mut place = self.settled.clone();
        place.insert_range(floor + 1, self.floor);
        let last = both.last().unwrap_or(floor);
        both.subtract(&place.missing(floor + 1, last));
        (floor, both)
    }
}

/// Replays everything above the place. The raised epochs make every owner drop what it has in memory.
async fn rewind(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow, to: Start, keys: &mut Keys) -> Db<Changed> {
    let place = Place::find(tx, world, to).await?;
    for lane in &row.lanes {
        let (floor, settled) = place.keep(lane);
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
            [&row.id.0, &(lane.lane as i32), &floor, &multirange(&settled)];
        tx.execute(include_str!("../sql/rewind_lane.sql"), &values).await?;
    }
    // Retention has left only the copies that deliveries need: what is read again does not have these.
    let settled = multirange(&place.settled);
    rewind_kept(tx, row, place.kept, None, keys).await?;
    let sql = include_str!("../sql/rewind_deliveries.sql");
    for gone in tx.query(sql, &[&row.id.0, &place.floor, &settled]).await? {
        keys.note(row.id.0, gone.try_get(0)?);
    }
    take_up(tx, row.id, &RangeSet::from_iter([place.position + 1..=Position::MAX - 1])).await?;
    let mut kept = place.settled.clone();
    kept.insert_range(1, place.floor);
    judge_again(tx, row.id, |formers| formers.rewind(&kept)).await?;
    // What was covered before says nothing about the replay.
    let sql = "delete from progress where subscription = $1 and floor_from >= $2";
    tx.execute(sql, &[&row.id.0, &place.floor]).await?;
    let sql = "update progress set floor_to = $2 where subscription = $1 and floor_to > $2";
    tx.execute(sql, &[&row.id.0, &place.floor]).await?;
    let Place { position, note, .. } = place;
    let message = format!("'{}' replays the events above position {position}{note}", row.name);
    Ok(Changed { count: row.lanes.len() as u64, events: Vec::new(), message })
}

/// Makes deliveries due above a position whose events are only kept aside; which events those are.
async fn rewind_kept(
    tx: &Transaction<'_>,
    row: &SubscriptionRow,
    above: Position,
    key: Option<&str>,
    keys: &mut Keys,
) -> Db<Vec<Uuid>> {
    let kept = tx.query(include_str!("../sql/rewind_kept.sql"), &[&row.id.0, &above, &key]).await?;
    let positions = kept.iter().map(|row| Ok(row.try_get(0)?)).collect::<Db<Vec<Position>>>()?;
    make_due(tx, row, &positions, keys).await?;
    kept.iter().map(|row| Ok(row.try_get(1)?)).collect()
}

/// Replays the settled events of one key as a chain of deliveries, with those that have a row; what else is not settled comes by itself.
async fn rewind_key(
    tx: &Transaction<'_>,
    world: &World,
    row: &SubscriptionRow,
    to: Start,
    key: &str,
    keys: &mut Keys,
) -> Db<Changed> {
    let Place { position: place, kept, note, .. } = Place::find(tx, world, to).await?;
    let lane = row.lane_of(Some(key), 0).ok_or_else(|| invalid(format!("'{}' has no lanes", row.name)))?;
    // Those stand before all others of their key, as they have arrived before.
    let mut ids = rewind_kept(tx, row, kept, Some(key), keys).await?;
    let events = key_events(tx, row, lane, key, place).await?;
    let positions: Vec<Position> = events.iter().map(|event| event.position).collect();
    let sql = "select coalesce(max(arrival), 0) from delivery where subscription = $1 and lane = $2 and not queued";
    let arrival: i64 = tx.query_one(sql, &[&row.id.0, &(lane.lane as i32)]).await?.try_get(0)?;
    let is_queue = row.mode == Mode::Queue;
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
        [&row.id.0, &positions, &(lane.lane as i32), &arrival, &key, &is_queue];
    tx.execute(include_str!("../sql/rewind_key.sql"), &values).await?;
    keys.note(row.id.0, is_queue.then(|| key.to_owned()));
    let replayed = positions.iter().map(|position| *position..=*position).collect();
    take_up(tx, row.id, &replayed).await?;
    books::replay(tx, row.id, lane, &replayed).await?;
    judge_again(tx, row.id, |formers| {
        let hash = Some(KeyHash::of(key));
        events.iter().for_each(|event| formers.replay(hash, event.position, &event.topic, &event.r#type));
    })
    .await?;
    touch_lanes(tx, row.id, [lane.lane]).await?;
    ids.extend(events.into_iter().map(|event| event.id));
    if !ids.is_empty() {
        // A fence: what the owner puts behind deliveries that it knows would stand before those that it does not know.
        let sql = "update cursor set epoch = epoch + 1 where subscription = $1 and lane = $2";
        tx.execute(sql, &[&row.id.0, &(lane.lane as i32)]).await?;
    }
    Ok(row.tell_replayed(ids, key, place, note))
}

/// Takes back that positions were given up, whatever else was given up with them.
async fn take_up(tx: &Transaction<'_>, id: SubscriptionId, positions: &RangeSet) -> Db<()> {
    tx.execute(include_str!("../sql/take_up.sql"), &[&id.0, &multirange(positions)]).await?;
    Ok(())
}

/// The wanted events of a key above a place that the lane has settled, or that have a row: a cursor at its limit does not count all of
/// those, and a row that kept its arrival would go before what is replayed.
async fn key_events(
    tx: &Transaction<'_>,
    row: &SubscriptionRow,
    lane: &LaneRow,
    key: &str,
    place: Position,
) -> Db<Vec<Replayed>> {
    let mut events = Vec::new();
    for event in tx.query(include_str!("../sql/key_events.sql"), &[&place, &key, &row.id.0]).await? {
        let topic = event.try_get::<_, Text<'_>>(2)?.0.into_owned();
        let r#type = event.try_get::<_, Text<'_>>(3)?.0.into_owned();
        let position = event.try_get(0)?;
        if (lane.has_settled(position) || event.try_get(4)?) && row.filter.matches(&topic, &r#type) {
            events.push(Replayed { position, id: event.try_get(1)?, topic, r#type });
        }
    }
    Ok(events)
}

/// An event that was settled and is to be delivered again.
struct Replayed {
    position: Position,
    id: Uuid,
    topic: String,
    r#type: String,
}

/// Changes by which filters events of a subscription were judged, where there was more than one.
pub(super) async fn judge_again(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    change: impl FnOnce(&mut FormerFilters),
) -> Db<()> {
    let sql = "select former_filters from subscription where id = $1 for update";
    let Some(row) = tx.query_opt(sql, &[&id.0]).await? else { return Ok(()) };
    let before = FormerFilters::parse(row.try_get(0)?);
    let mut formers = before.clone();
    change(&mut formers);
    if formers != before {
        put_former_filters(tx, id, &formers).await?;
    }
    Ok(())
}

/// Refuses to change what a living instance runs.
fn refuse_run(world: &World, row: &SubscriptionRow, verb: &str) -> Db<()> {
    match world.runners(row.id).next() {
        None => Ok(()),
        Some(InstanceRow { id, host, pid, .. }) => Err(invalid(format!(
            "'{}' cannot be {verb}: instance {} (pid {pid} on {host}) runs it; stop it, or take it out of its configuration",
            row.name, id.0
        ))),
    }
}

async fn delete(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow) -> Db<Changed> {
    refuse_run(world, row, "deleted")?;
    Ok(row.tell_deleted(delete_subscription(tx, row.id).await?))
}

/// Removes a subscription with all that belongs to it; how many deliveries went.
pub(super) async fn delete_subscription(tx: &Transaction<'_>, id: SubscriptionId) -> Db<u64> {
    let deliveries = tx.execute("delete from delivery where subscription = $1", &[&id.0]).await?;
    tx.execute("delete from cursor where subscription = $1", &[&id.0]).await?;
    tx.execute("delete from progress where subscription = $1", &[&id.0]).await?;
    tx.execute("delete from skip where subscription = $1", &[&id.0]).await?;
    tx.execute("delete from recovery where subscription = $1", &[&id.0]).await?;
    tx.execute("delete from subscription where id = $1", &[&id.0]).await?;
    Ok(deliveries)
}

async fn rename(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow, to: &str) -> Db<Changed> {
    refuse_run(world, row, "renamed")?;
    Subscription::new(to).validate()?;
    if world.subscriptions.iter().any(|other| other.name == to) {
        return Err(invalid(format!("there is a subscription '{to}' already; choose another name")));
    }
    tx.execute("update subscription set name = $2 where id = $1", &[&row.id.0, &to]).await?;
    let message = format!("'{}' is now '{to}'; name it so in the configuration before it is started again", row.name);
    Ok(Changed { count: 1, events: Vec::new(), message })
}
