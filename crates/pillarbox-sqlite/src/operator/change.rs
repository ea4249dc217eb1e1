use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pillarbox::admin::world::{InstanceRow, LaneRow, SubscriptionRow, World, tell_recovered};
use pillarbox::admin::{Change, Changed, Pause, Selection};
use pillarbox::limit::LANES_MAX;
use pillarbox::store::{FormerFilters, InstanceId, KeyHash, RangeSet, RecoveryCause, SubscriptionId, lane_of};
use pillarbox::{ErrorKind, Mode, Position, Start, Subscription, Timestamp};
use rusqlite::{OptionalExtension, Transaction, params};
use uuid::Uuid;

use super::{books, positions_of, unknown_event};
use crate::connection::{begin, meta_number, raise_queue_revision, raise_revision};
use crate::error::{Db, DbError};
use crate::ownership::{former_filters, put_former_filters, record_progress, start_floor};
use crate::queue::{arrange, arrange_all};
use crate::reader::{id_at, text};
use crate::recovery::recover;
use crate::store::Desk;

/// Carries out a command in one transaction; a dry run does the same and takes it back.
pub(super) fn change(desk: &Desk, change: &Change, dry_run: bool) -> Db<Changed> {
    // While others wait for the lock that this waits for, they give no signs of life either.
    let asked_at = Timestamp::now();
    let tx = begin(&desk.connection)?;
    let mut world = super::load_world(&tx, &desk.folder)?;
    let recovers = matches!(change, Change::Recover { .. });
    if recovers {
        world.now = world.now.min(asked_at);
    }
    let changed = apply(&tx, &world, change)?;
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

fn apply(tx: &Transaction<'_>, world: &World, change: &Change) -> Db<Changed> {
    let find = |name: &str| world.subscription(name);
    match change {
        Change::Requeue { subscription, which, limit } => requeue(tx, find(subscription)?, which, *limit),
        Change::Recover { subscription, instance, silent_for } => {
            let subscription = subscription.as_deref().map(find).transpose()?;
            take_back(tx, world, subscription, *instance, *silent_for)
        }
        Change::Skip { subscription, event, reason } => skip(tx, find(subscription)?, *event, reason),
        Change::Pause { subscription, by, reason } => {
            let row = find(subscription)?;
            let pause = Pause { by: *by, reason: reason.clone() };
            set_paused(tx, row, Some(pause.over(row.pause.clone())))
        }
        Change::Resume(name) => set_paused(tx, find(name)?, None),
        Change::Rewind { subscription, to, key: None } => rewind(tx, find(subscription)?, *to),
        Change::Rewind { subscription, to, key: Some(key) } => rewind_key(tx, find(subscription)?, *to, key),
        Change::Delete(name) => delete(tx, world, find(name)?),
        Change::Rename { from, to } => rename(tx, world, find(from)?, to),
        Change::Relane { subscription, lanes } => relane(tx, world, find(subscription)?, *lanes),
    }
}

fn invalid(message: String) -> DbError {
    DbError::own(ErrorKind::Invalid, message)
}

/// Sets a delivery back to due.
const REQUEUE: &str = include_str!("../sql/requeue.sql");

/// A delivery that a command concerns.
struct Target {
    position: Position,
    lane: u32,
    id: Uuid,
    key: Option<String>,
}

fn requeue(tx: &Transaction<'_>, row: &SubscriptionRow, which: &Selection, limit: usize) -> Db<Changed> {
    let (id, key) = match which {
        Selection::Event(id) => (Some(*id), None),
        Selection::Version(stream, version) => (Some(version_id(tx, stream, *version)?), None),
        Selection::Key(key) => (None, Some(key)),
        Selection::All => (None, None),
    };
    let targets = targets(tx, row.id, id, key.map(String::as_str), limit)?;
    if let (Some(id), true) = (id, targets.is_empty()) {
        return Err(no_delivery(tx, row, id, "requeue"));
    }
    for target in &targets {
        tx.prepare_cached(REQUEUE)?.execute(params![row.id.0, target.position, Timestamp::now().0])?;
    }
    arrange_targets(tx, row, &targets)?;
    touch_lanes(tx, row.id, targets.iter().map(|target| target.lane))?;
    Ok(row.tell_requeued(targets.into_iter().map(|target| target.id).collect()))
}

/// The deliveries of one event in whatever state, or the dead ones of a key or all, in log order.
fn targets(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    id: Option<Uuid>,
    key: Option<&str>,
    limit: usize,
) -> Db<Vec<Target>> {
    let positions = id.map(|id| positions_of(tx, id)).transpose()?;
    let positions = positions.map(|positions| serde_json::to_string(&positions).expect("numbers are JSON"));
    let mut statement = tx.prepare_cached(include_str!("../sql/targets.sql"))?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let values = params![subscription.0, positions, key, limit];
    let targets = statement.query_map(values, |row| {
        Ok(Target { position: row.get(0)?, lane: row.get(1)?, id: id_at(row, 2)?, key: row.get(3)? })
    })?;
    Ok(targets.collect::<Result<_, _>>()?)
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

/// Takes claims from their owners.
fn take_back(
    tx: &Transaction<'_>,
    world: &World,
    row: Option<&SubscriptionRow>,
    instance: Option<InstanceId>,
    silent_for: Duration,
) -> Db<Changed> {
    let counts = recover(tx, world.now, |held| {
        let meant = row.is_none_or(|row| row.id == held.subscription)
            && instance.is_none_or(|instance| instance == held.owner)
            && held.is_silent_for(silent_for, world.now);
        meant.then_some(RecoveryCause::Operator)
    })?;
    Ok(tell_recovered(counts.values().sum()))
}

fn version_id(tx: &Transaction<'_>, stream: &str, version: i64) -> Db<Uuid> {
    let found = tx.query_row(include_str!("../sql/version_id.sql"), params![stream, version], |row| id_at(row, 0));
    found.optional()?.ok_or_else(|| {
        DbError::own(ErrorKind::NotFound, format!("stream '{stream}' has no version {version} in this log"))
    })
}

/// Why a command about one event has nothing to do.
fn no_delivery(tx: &Transaction<'_>, row: &SubscriptionRow, id: Uuid, verb: &str) -> DbError {
    match positions_of(tx, id) {
        Err(error) => error,
        Ok(positions) if positions.is_empty() => unknown_event(id),
        Ok(_) => invalid(format!(
            "nothing to {verb}: event {id} has no delivery of '{}'; it was delivered, is not wanted, or was not read yet \
             (see `pillarbox why {id}`)",
            row.name
        )),
    }
}

fn skip(tx: &Transaction<'_>, row: &SubscriptionRow, event: Uuid, reason: &str) -> Db<Changed> {
    if reason.trim().is_empty() {
        return Err(invalid("a skip needs a reason; it is kept with the event".into()));
    }
    let targets = targets(tx, row.id, Some(event), None, usize::MAX)?;
    if targets.is_empty() {
        return Err(no_delivery(tx, row, event, "skip"));
    }
    for target in &targets {
        give_up(tx, row.id, (target.position, target.position), reason)?;
        let sql = "delete from pillarbox_delivery where subscription = ?1 and position = ?2";
        tx.execute(sql, params![row.id.0, target.position])?;
    }
    arrange_targets(tx, row, &targets)?;
    touch_lanes(tx, row.id, targets.iter().map(|target| target.lane))?;
    let message = format!("event {event} is given up for '{}'; its key goes on", row.name);
    Ok(Changed { count: targets.len() as u64, events: vec![event], message })
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

fn set_paused(tx: &Transaction<'_>, row: &SubscriptionRow, pause: Option<Pause>) -> Db<Changed> {
    let by = pause.as_ref().map(|pause| pause.by.name());
    let reason = pause.as_ref().and_then(|pause| pause.reason.as_deref());
    let sql = "update pillarbox_subscription set paused = ?2, paused_by = ?3, paused_reason = ?4 where id = ?1";
    tx.execute(sql, params![row.id.0, pause.is_some(), by, reason])?;
    Ok(row.tell_paused(pause.as_ref()))
}

/// Where a rewind goes to.
struct Place {
    position: Position,
    /// What was asked for, if retention has left less of the log: only copies that deliveries need lie between the two.
    kept: Position,
    /// What to say if that is not as far back as was asked for.
    note: &'static str,
}

impl Place {
    fn find(tx: &Transaction<'_>, to: Start) -> Db<Place> {
        let position = start_floor(tx, to)?;
        let lower = matches!(to, Start::Position(asked) if asked < position) || to == Start::Beginning;
        let note = match position {
            _ if !lower => "",
            position if position > 0 && position == meta_number(tx, "fresh_floor")? => {
                " (what lies before was in this copy of the log when it was declared fresh)"
            }
            _ if to == Start::Beginning => "",
            _ => " (as far back as retention has left the log)",
        };
        let kept = match to {
            Start::Beginning => 0,
            Start::Position(asked) => asked,
            Start::Now => position,
            Start::Time(time) => {
                let sql = "select min(position) - 1 from pillarbox_event_kept where created_at >= ?1";
                tx.query_row(sql, [time.0], |row| row.get::<_, Option<Position>>(0))?.unwrap_or(position)
            }
        };
        Ok(Place { position, kept: kept.min(position), note })
    }
}

/// Replays everything above the place. The raised epochs make every owner drop what it has in memory.
fn rewind(tx: &Transaction<'_>, row: &SubscriptionRow, to: Start) -> Db<Changed> {
    let Place { position: target, kept, note } = Place::find(tx, to)?;
    for lane in &row.lanes {
        let settled = lane.cursor.settled.within(0, target);
        let floor = lane.cursor.floor.min(target);
        tx.prepare_cached(include_str!("../sql/rewind_lane.sql"))?.execute(params![
            row.id.0,
            lane.lane,
            floor,
            settled.to_string()
        ])?;
    }
    replay_kept(tx, row.id, kept, None)?;
    tx.execute(include_str!("../sql/rewind_deliveries.sql"), params![row.id.0, target])?;
    if row.mode == Mode::Queue {
        arrange_all(tx, row.id)?;
    }
    take_up(tx, row.id, &RangeSet::from_iter([target + 1..=Position::MAX - 1]))?;
    judge_again(tx, row.id, |formers| formers.rewind(&RangeSet::from_iter([1..=target])))?;
    // What was covered before says nothing about the replay.
    let sql = "delete from pillarbox_progress where subscription = ?1 and floor_from >= ?2";
    tx.execute(sql, params![row.id.0, target])?;
    let sql = "update pillarbox_progress set floor_to = ?2 where subscription = ?1 and floor_to > ?2";
    tx.execute(sql, params![row.id.0, target])?;
    let message = format!("'{}' replays the events above position {target}{note}", row.name);
    Ok(Changed { count: row.lanes.len() as u64, events: Vec::new(), message })
}

/// Replays the settled events of one key as a chain of deliveries, with those that have a row; what else is not settled comes by itself.
fn rewind_key(tx: &Transaction<'_>, row: &SubscriptionRow, to: Start, key: &str) -> Db<Changed> {
    let Place { position: target, kept, note } = Place::find(tx, to)?;
    let lane = row.lane_of(Some(key), 0).ok_or_else(|| invalid(format!("'{}' has no lanes", row.name)))?;
    let sql = "select coalesce(max(arrival), 0) from pillarbox_delivery where subscription = ?1 and lane = ?2";
    let mut arrival: i64 = tx.query_row(sql, params![row.id.0, lane.lane], |row| row.get(0))?;
    // Those stand before all others of their key, as they have arrived before.
    let mut ids = replay_kept(tx, row.id, kept, Some(key))?;
    let events = key_events(tx, row, lane, key, target)?;
    let now = Timestamp::now().0;
    for event in &events {
        arrival += 1;
        let mut statement = tx.prepare_cached(include_str!("../sql/rewind_key.sql"))?;
        statement.execute(params![row.id.0, event.position, lane.lane, arrival, key, now])?;
    }
    if row.mode == Mode::Queue {
        arrange(tx, row.id, target, Some(key))?;
    }
    let positions = events.iter().map(|event| event.position..=event.position).collect();
    take_up(tx, row.id, &positions)?;
    books::replay(tx, row.id, lane, &positions)?;
    judge_again(tx, row.id, |formers| {
        let hash = Some(KeyHash::of(key));
        events.iter().for_each(|event| formers.replay(hash, event.position, &event.topic, &event.r#type));
    })?;
    touch_lanes(tx, row.id, [lane.lane].into_iter())?;
    ids.extend(events.into_iter().map(|event| event.id));
    if !ids.is_empty() {
        // A fence: what the owner puts behind deliveries that it knows would stand before those that it does not know.
        let sql = "update pillarbox_cursor set epoch = epoch + 1 where subscription = ?1 and lane = ?2";
        tx.execute(sql, params![row.id.0, lane.lane])?;
    }
    Ok(row.tell_replayed(ids, key, target, note))
}

/// Sets deliveries whose events are only kept aside back to due: what is read again does not have these. Above `kept`, of one key
/// or of all; the events.
fn replay_kept(tx: &Transaction<'_>, id: SubscriptionId, kept: Position, key: Option<&str>) -> Db<Vec<Uuid>> {
    let mut statement = tx.prepare_cached(include_str!("../sql/rewind_kept.sql"))?;
    let found =
        statement.query_map(params![id.0, kept, key], |row| Ok((row.get::<_, Position>(0)?, id_at(row, 1)?)))?;
    let mut ids = Vec::new();
    for found in found.collect::<Result<Vec<_>, _>>()? {
        tx.prepare_cached(REQUEUE)?.execute(params![id.0, found.0, Timestamp::now().0])?;
        ids.push(found.1);
    }
    Ok(ids)
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

/// The wanted events of a key above `target` that the lane has settled, or that have a row: a cursor at its limit does not count all of
/// those, and a row that kept its arrival would go before what is replayed.
fn key_events(
    tx: &Transaction<'_>,
    row: &SubscriptionRow,
    lane: &LaneRow,
    key: &str,
    target: Position,
) -> Db<Vec<Replayed>> {
    let mut statement = tx.prepare_cached(include_str!("../sql/key_events.sql"))?;
    let mut rows = statement.query(params![target, key, row.id.0])?;
    let mut events = Vec::new();
    while let Some(event) = rows.next()? {
        let position = event.get(0)?;
        let (topic, r#type) = (text(event.get_ref(2)?), text(event.get_ref(3)?));
        if (lane.has_settled(position) || event.get(4)?) && row.filter.matches(&topic, &r#type) {
            let (id, topic, r#type) = (id_at(event, 1)?, topic.into(), r#type.into());
            events.push(Replayed { position, id, topic, r#type });
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
pub(super) fn judge_again(tx: &Transaction<'_>, id: SubscriptionId, change: impl FnOnce(&mut FormerFilters)) -> Db<()> {
    let before = former_filters(tx, id)?;
    let mut formers = before.clone();
    change(&mut formers);
    if formers != before {
        put_former_filters(tx, id, &formers)?;
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

fn delete(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow) -> Db<Changed> {
    refuse_run(world, row, "deleted")?;
    Ok(row.tell_deleted(delete_subscription(tx, row.id)? as u64))
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

fn rename(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow, to: &str) -> Db<Changed> {
    refuse_run(world, row, "renamed")?;
    Subscription::new(to).validate()?;
    if world.subscriptions.iter().any(|other| other.name == to) {
        return Err(invalid(format!("there is a subscription '{to}' already; choose another name")));
    }
    tx.execute("update pillarbox_subscription set name = ?2 where id = ?1", params![row.id.0, to])?;
    let message = format!("'{}' is now '{to}'; name it so in the configuration before it is started again", row.name);
    Ok(Changed { count: 1, events: Vec::new(), message })
}

/// Changes the number of lanes. Only when nothing is between the lanes: equal floors, nothing settled above, nobody working.
fn relane(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow, lanes: u32) -> Db<Changed> {
    if lanes == 0 || lanes > LANES_MAX {
        return Err(invalid(format!("lanes = {lanes} is outside 1 to lanes_max = {LANES_MAX}")));
    }
    refuse_unquiet(tx, world, row)?;
    let floor = row.floor();
    let epoch = row.lanes.iter().map(|lane| lane.epoch).max().unwrap_or(0) + 1;
    let revision = row.lanes.iter().map(|lane| lane.revision).max().unwrap_or(0) + 1;
    let before_start = in_all(row, floor, |lane| books::before_start(tx, row.id, lane))?;
    // What lies before the start of some lanes only was covered by the others.
    let mut covered = in_all(row, floor, |lane| accounted(tx, row.id, lane))?;
    covered.subtract(&before_start);
    tx.execute("delete from pillarbox_cursor where subscription = ?1", [row.id.0])?;
    tx.execute("delete from pillarbox_progress where subscription = ?1", [row.id.0])?;
    let sql = "insert into pillarbox_cursor (subscription, lane, floor, epoch, revision) values (?1, ?2, ?3, ?4, ?5)";
    for lane in 0..lanes {
        tx.prepare_cached(sql)?.execute(params![row.id.0, lane, floor, epoch, revision])?;
        for (epoch, ranges) in [(0, &before_start), (epoch, &covered)] {
            for range in ranges.iter() {
                record_progress(tx, row.id, lane, epoch, (range.start() - 1, *range.end()))?;
            }
        }
    }
    tx.execute("update pillarbox_subscription set lanes = ?2 where id = ?1", params![row.id.0, lanes])?;
    let deliveries = relane_deliveries(tx, row.id, lanes)?;
    Ok(row.tell_relaned(lanes, deliveries as u64))
}

fn refuse_unquiet(tx: &Transaction<'_>, world: &World, row: &SubscriptionRow) -> Db<()> {
    let refuse = |why: &str| Err(invalid(format!("the lanes of '{}' cannot be changed now: {why}", row.name)));
    if row.pause.is_none() {
        return refuse("it is running; pause it first");
    }
    if row.lanes.iter().any(|lane| lane.cursor.floor != row.floor() || !lane.cursor.settled.is_empty()) {
        return refuse("its lanes are not at the same place; resume it until it is idle, pause it and try again");
    }
    let working = |id: InstanceId| {
        let instance = world.instances.iter().find(|instance| instance.alive && instance.id == id);
        let report = instance.and_then(|instance| instance.report.subscriptions.get(&row.name));
        report.is_some_and(|report| report.in_flight > 0)
    };
    if row.lanes.iter().filter_map(|lane| lane.owner).any(working) {
        return refuse("events are still in flight; wait until they are done");
    }
    let sql = "select 1 from pillarbox_delivery indexed by pillarbox_delivery_owner \
               where owner is not null and subscription = ?1";
    if tx.prepare_cached(sql)?.exists([row.id.0])? {
        return refuse(
            "deliveries are being worked on; wait until they are done, or take them back with `pillarbox recover`",
        );
    }
    Ok(())
}

/// What is in the set of every lane: a gap in one stays a gap.
fn in_all(row: &SubscriptionRow, floor: Position, set: impl Fn(u32) -> Db<RangeSet>) -> Db<RangeSet> {
    let mut all = RangeSet::new();
    all.insert_range(1, floor);
    for lane in &row.lanes {
        all.subtract(&set(lane.lane)?.missing(1, floor));
    }
    Ok(all)
}

/// What the books of a lane say was covered or never to be delivered.
fn accounted(tx: &Transaction<'_>, id: SubscriptionId, lane: u32) -> Db<RangeSet> {
    let mut accounted = books::covered(tx, id, lane)?;
    accounted.union(&books::before_start(tx, id, lane)?);
    Ok(accounted)
}

/// Gives each delivery its new lane, keeping the order of arrival within each key.
fn relane_deliveries(tx: &Transaction<'_>, id: SubscriptionId, lanes: u32) -> Db<usize> {
    let sql = "select position, key from pillarbox_delivery where subscription = ?1 order by arrival, lane, position";
    let mut statement = tx.prepare(sql)?;
    let rows = statement.query_map([id.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let deliveries: Vec<(Position, Option<String>)> = rows.collect::<Result<_, _>>()?;
    let sql = "update pillarbox_delivery set lane = ?3, arrival = ?4 where subscription = ?1 and position = ?2";
    for (index, (position, key)) in deliveries.iter().enumerate() {
        let lane = lane_of(key.as_deref().map(pillarbox::store::KeyHash::of), *position, lanes);
        tx.prepare_cached(sql)?.execute(params![id.0, position, lane, index as i64 + 1])?;
    }
    Ok(deliveries.len())
}
