use std::collections::{HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::store::{
    Cursor, DEAD_HEADS_MAX, Definition, DeliveryRow, Epoch, Fleet, FormerFilters, Hello, InstanceId, InstanceView,
    Joined, LaneRef, LaneState, LaneView, Lock, QUEUED_KEYS_MAX, Report, SubscriptionId, SubscriptionView, Take,
    tell_keys,
};
use pillarbox::{ErrorKind, Filter, Mode, OnDead, Position, RetryPolicy, Start, Subscription, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use uuid::Uuid;

use crate::connection::{Purpose, horizon, meta_number, open, raise_queue_revision, raise_revision, read, write};
use crate::doorbell::Bell;
use crate::error::{Db, DbError};
use crate::queue::RowsCounted;
use crate::queue::arrange_all;
use crate::reader::Decoder;
use crate::recovery::give_back;
use crate::{home, migrate};

/// An instance whose lock cannot be seen lives for operators as long as its last beat is not older.
const UNSEEN_ALIVE_FOR: Duration = Duration::from_secs(30);

/// An instance whose lock cannot be seen, which owns nothing and has not beaten for so long, is forgotten.
const SILENT_BURIED_AFTER: Duration = Duration::from_secs(600);

/// How far the clock may have been set back for a time to be found in the log. The events of so long are read through for it.
const CLOCK_SET_BACK_MAX: Duration = Duration::from_secs(60);

/// Writes on its own thread; its two connections differ in what a power cut may take back.
pub(crate) struct Writer {
    pub(crate) path: PathBuf,
    pub(crate) durable: Connection,
    pub(crate) relaxed: Connection,
    pub(crate) folder: LockFolder,
    pub(crate) membership: Arc<Mutex<Option<Membership>>>,
    pub(crate) bell: Arc<Bell>,
    /// The decoder of the events of claims.
    pub(crate) decoder: Decoder,
    pub(crate) rows_counted: RowsCounted,
}

/// This process as an instance. Dropping it frees the lock, which is what others take as its end.
#[derive(Debug)]
pub(crate) struct Membership {
    id: InstanceId,
    lock: File,
}

impl Writer {
    pub(crate) fn open(
        path: &Path,
        folder: LockFolder,
        membership: Arc<Mutex<Option<Membership>>>,
        bell: Arc<Bell>,
    ) -> Db<Self> {
        Ok(Writer {
            path: path.to_owned(),
            durable: open(path, Purpose::Durable)?,
            relaxed: open(path, Purpose::Relaxed)?,
            folder,
            membership,
            bell,
            decoder: Decoder::default(),
            rows_counted: RowsCounted::new(),
        })
    }

    /// Lock first, then the row: a row without a held lock is an instance that has ended. What this store was before ends with the
    /// same transaction, since only its owner can know for sure that nothing is done in its name any more.
    pub(crate) fn join(&self, hello: &Hello) -> Db<Joined> {
        hello.subscriptions.iter().try_for_each(Subscription::validate)?;
        // Somebody may have changed the schema since this store was opened.
        migrate::require(&self.durable)?;
        home::check(&self.durable, &self.path)?;
        let instance =
            InstanceId(write(&self.durable, |tx| Ok(tx.query_row(sql!(instance, "next"), [], |row| row.get(0))?))?);
        let lock = self.folder.hold(instance)?;
        let before = self.members().as_ref().map(|member| member.id);
        let joined = write(&self.durable, |tx| {
            before.map_or(Ok(()), |before| end(tx, before))?;
            let subscriptions = hello
                .subscriptions
                .iter()
                .map(|subscription| define(tx, instance, subscription, hello.rejoin))
                .collect::<Db<Vec<_>>>()?;
            enter(tx, instance, hello, &subscriptions)?;
            let log_id = home::log_id(tx)?;
            let incarnation = meta_number(tx, "incarnation")?;
            let time = Timestamp::now();
            Ok((Joined { instance, log_id, incarnation, subscriptions, time }, raise_revision(tx)?))
        });
        let (joined, revision) = joined.inspect_err(|_| self.folder.remove(instance))?;
        self.bell.raised(revision);
        self.bell.forget_claims();
        *self.members() = Some(Membership { id: instance, lock });
        before.into_iter().for_each(|before| self.folder.remove(before));
        Ok(joined)
    }

    /// Beats, and looks at the fleet.
    pub(crate) fn observe(&self, report: &Report) -> Db<Fleet> {
        let me = self.me()?;
        self.check_lock()?;
        let report = serde_json::to_string(report).expect("a report is JSON");
        let (mut fleet, revision) = write(&self.relaxed, |tx| {
            let alive =
                tx.prepare_cached(sql!(instance, "beat"))?.execute(params![me.0, Timestamp::now().0, report])?;
            if alive == 0 {
                return Err(buried(me));
            }
            check_anchors(tx, me)?;
            Ok((fleet(tx)?, meta_number(tx, "revision")?))
        })?;
        for instance in fleet.instances.iter_mut().filter(|instance| instance.id != me) {
            instance.lock = self.folder.probe(instance.id);
        }
        self.bury(&fleet)?;
        let held = fleet.instances.iter().filter(|instance| instance.lock == Lock::Held).map(|instance| instance.id);
        let neighbour = pillarbox::store::neighbour_of(me, held).and_then(|id| self.folder.open(id));
        self.bell.observed(revision, neighbour);
        Ok(fleet)
    }

    /// A held lock that no name leads to proves nothing to others: they would judge this instance by its beats alone, and
    /// so it ends before they do.
    fn check_lock(&self) -> Db<()> {
        let members = self.members();
        let Some(Membership { id, lock }) = members.as_ref() else { return Ok(()) };
        if self.folder.leads_to(*id, lock) {
            return Ok(());
        }
        Err(DbError::own(
            ErrorKind::Ended,
            format!(
                "this instance's lock file was removed ({}): others cannot see that it lives; leave the folder of the \
                 locks alone while a relay runs, and join again under a new number",
                self.folder.file(*id).display()
            ),
        ))
    }

    /// Removes what instances have left behind that ended and own neither a lane nor a claim any more. Where the lock cannot be
    /// seen, they have ended when they have not beaten for long.
    fn bury(&self, fleet: &Fleet) -> Db<()> {
        let owns = |id: InstanceId| fleet.lanes.iter().any(|lane| lane.owner == Some(id));
        let of = |lock: Lock| {
            let instances = fleet.instances.iter().filter(move |instance| instance.lock == lock && !owns(instance.id));
            instances.map(|instance| instance.id).collect::<Vec<_>>()
        };
        let (ended, unknown) = (of(Lock::Free), of(Lock::Unknown));
        if ended.is_empty() && unknown.is_empty() {
            return Ok(());
        }
        let silent_since = Timestamp::now().0 - SILENT_BURIED_AFTER.as_millis() as i64;
        let buried = write(&self.relaxed, |tx| {
            let mut statement = tx.prepare_cached(sql!(instance, "bury"))?;
            let mut buried = Vec::new();
            for (ids, beat_before) in [(&ended, i64::MAX), (&unknown, silent_since)] {
                for id in ids {
                    if statement.execute(params![id.0, beat_before])? > 0 {
                        buried.push(*id);
                    }
                }
            }
            Ok(buried)
        })?;
        // The file of one that stays is still the proof that it has ended.
        buried.into_iter().for_each(|id| self.folder.remove(id));
        Ok(())
    }

    /// Takes each lane whose epoch is still the expected one.
    pub(crate) fn take(&self, lanes: &[Take]) -> Db<Vec<Option<Epoch>>> {
        let me = self.me()?;
        let (epochs, revision) = write(&self.durable, |tx| {
            require_row(tx, me)?;
            let mut statement = tx.prepare_cached(sql!(cursor, "take"))?;
            let mut epochs = Vec::with_capacity(lanes.len());
            for take in lanes {
                let values = params![take.lane.subscription.0, take.lane.lane, take.expected, me.0, take.beat];
                epochs.push(statement.query_row(values, |row| row.get(0)).optional()?);
            }
            let taken = epochs.iter().any(Option::is_some);
            Ok((epochs, taken.then(|| raise_revision(tx)).transpose()?))
        })?;
        revision.into_iter().for_each(|revision| self.bell.raised(revision));
        Ok(epochs)
    }

    /// Ends this instance.
    pub(crate) fn leave(&self) -> Db<()> {
        let Some(me) = self.members().as_ref().map(|member| member.id) else { return Ok(()) };
        let revision = write(&self.durable, |tx| {
            end(tx, me)?;
            raise_revision(tx)
        })?;
        self.bell.raised(revision);
        self.folder.remove(me);
        self.members().take();
        Ok(())
    }

    pub(crate) fn me(&self) -> Db<InstanceId> {
        self.members().as_ref().map(|member| member.id).ok_or_else(|| {
            DbError::own(
                ErrorKind::Fatal,
                "this store is not an instance; join before observing, taking lanes or claiming",
            )
        })
    }

    fn members(&self) -> std::sync::MutexGuard<'_, Option<Membership>> {
        self.membership.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Gives all lanes and claims of an instance back and removes its row. Its epochs are over too.
fn end(tx: &Transaction<'_>, instance: InstanceId) -> Db<()> {
    if give_back(tx, instance)? {
        raise_queue_revision(tx)?;
    }
    tx.execute(sql!(cursor, "give_back"), [instance.0])?;
    tx.execute(sql!(instance, "remove"), [instance.0])?;
    Ok(())
}

/// An instance without a row was buried by another.
pub(crate) fn require_row(tx: &Connection, me: InstanceId) -> Db<()> {
    if tx.prepare_cached(sql!(instance, "exists"))?.exists([me.0])? { Ok(()) } else { Err(buried(me)) }
}

fn buried(me: InstanceId) -> DbError {
    DbError::own(
        ErrorKind::Ended,
        format!("instance {} was buried by another that found its lock free; join again under a new number", me.0),
    )
}

/// Writes the instance's row.
fn enter(tx: &Transaction<'_>, me: InstanceId, hello: &Hello, subscriptions: &[SubscriptionView]) -> Db<()> {
    let ids: Vec<i64> = subscriptions.iter().map(|subscription| subscription.id.0).collect();
    let ids = serde_json::to_string(&ids).expect("numbers are JSON");
    let now = Timestamp::now().0;
    tx.execute(sql!(instance, "enter"), params![me.0, hello.host, hello.pid, hello.version, now, ids])?;
    Ok(())
}

/// Creates a subscription, or gives an existing one what the newest started instance says; lanes stay, and another mode is
/// refused. One that joins again was not started again.
fn define(tx: &Transaction<'_>, me: InstanceId, subscription: &Subscription, rejoin: bool) -> Db<SubscriptionView> {
    let found = find(tx, &subscription.name)?;
    let stored_hold = stored_hold(tx, subscription)?;
    let milliseconds = |time: std::time::Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    if let Some(view) = &found {
        let wish = Definition::of(subscription, view.definition.number);
        let same = wish.says_the_same_as(&view.definition) && stored_hold == subscription.hold.map(milliseconds);
        if rejoin || same {
            return Ok(view.clone());
        }
    }
    let on_dead = if subscription.on_dead == OnDead::Skip { "skip" } else { "block" };
    let json = |value: serde_json::Result<String>| value.expect("plain data is JSON");
    tx.execute(
        sql!(subscription, "define"),
        params![
            subscription.name,
            json(serde_json::to_string(&subscription.filter)),
            mode_name(subscription.mode),
            subscription.lanes,
            on_dead,
            subscription.hold.map(milliseconds),
            json(serde_json::to_string(&subscription.retry)),
            milliseconds(subscription.processing_timeout),
            me.0,
            Timestamp::now().0,
        ],
    )?;
    let view = find(tx, &subscription.name)?.expect("it was written in this transaction");
    let Some(SubscriptionView { definition: before, .. }) = found else {
        let floor = start_floor(tx, subscription.start)?;
        (0..view.lanes).try_for_each(|lane| add_lane(tx, view.id, lane, floor, 0))?;
        return Ok(SubscriptionView { created: true, ..view });
    };
    if before.filter != view.definition.filter {
        fence(tx, view.id, &before)?;
    }
    if subscription.mode == Mode::Queue && before.on_dead != subscription.on_dead {
        // Dead ones block now, or do not any more.
        arrange_all(tx, view.id)?;
    }
    Ok(view)
}

/// The filter of a subscription changes: a relay that read its lanes with the old one can no longer settle. What they have settled is
/// kept with it.
fn fence(tx: &Transaction<'_>, id: SubscriptionId, before: &Definition) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(cursor, "settled"))?;
    let mut rows = statement.query([id.0])?;
    let mut cursors = Vec::new();
    while let Some(row) = rows.next()? {
        let settled = row.get::<_, String>("settled")?.parse()?;
        cursors.push(Cursor { floor: row.get("floor")?, settled, anchor: None });
    }
    let mut formers = former_filters(tx, id)?;
    formers.end(before, Timestamp::now(), &cursors);
    put_former_filters(tx, id, &formers)?;
    tx.execute(sql!(cursor, "fence_all"), [id.0])?;
    Ok(())
}

/// The filters by which the events of a subscription were judged before.
pub(crate) fn former_filters(tx: &Connection, id: SubscriptionId) -> Db<FormerFilters> {
    let text: String = tx.prepare_cached(sql!(subscription, "former_filters"))?.query_row([id.0], |row| row.get(0))?;
    Ok(FormerFilters::parse(&text))
}

/// Writes them down.
pub(crate) fn put_former_filters(tx: &Connection, id: SubscriptionId, formers: &FormerFilters) -> Db<()> {
    tx.prepare_cached(sql!(subscription, "set_former_filters"))?.execute(params![id.0, formers.to_text()])?;
    Ok(())
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Queue => "queue",
        Mode::Stream => "stream",
    }
}

/// The hold of a known subscription. Refuses another mode: what is under way in one means nothing in the other.
fn stored_hold(tx: &Transaction<'_>, subscription: &Subscription) -> Db<Option<i64>> {
    let mut statement = tx.prepare_cached(sql!(subscription, "mode_and_hold"))?;
    let stored =
        statement.query_row([&subscription.name], |row| Ok((row.get("mode")?, row.get("hold_ms")?))).optional()?;
    let Some((mode, hold)): Option<(String, Option<i64>)> = stored else { return Ok(None) };
    if mode == mode_name(subscription.mode) {
        return Ok(hold);
    }
    Err(DbError::own(
        ErrorKind::Invalid,
        format!(
            "subscription '{name}' was made with mode = \"{mode}\", and that stays; use another name, or delete it with \
             `pillarbox subscription delete {name}`",
            name = subscription.name
        ),
    ))
}

/// A lane's cursor, with the record that what lies before its floor was never asked for.
pub(crate) fn add_lane(tx: &Transaction<'_>, id: SubscriptionId, lane: u32, floor: Position, epoch: Epoch) -> Db<()> {
    tx.prepare_cached(sql!(cursor, "add"))?.execute(params![id.0, lane, floor, epoch])?;
    record_progress(tx, id, lane, 0, (0, floor))
}

/// Records that `from < position <= to` of a lane was covered.
pub(crate) fn record_progress(
    tx: &Transaction<'_>,
    id: SubscriptionId,
    lane: u32,
    epoch: Epoch,
    (from, to): (Position, Position),
) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(progress, "insert"))?;
    statement.execute(params![id.0, lane, epoch, from, to, Timestamp::now().0])?;
    Ok(())
}

/// The floor from which a start delivers. What was in a copy when it was declared fresh is never delivered.
pub(crate) fn start_floor(tx: &Transaction<'_>, start: Start) -> Db<Position> {
    let lowest = (meta_number(tx, "log_start")? - 1).max(meta_number(tx, "fresh_floor")?);
    let horizon = horizon(tx)?;
    Ok(match start {
        Start::Beginning => lowest,
        Start::Now => horizon,
        Start::Position(position) => position.min(horizon).max(lowest),
        Start::Time(time) => first_since(tx, Events::Log, time, lowest, horizon)?.map_or(horizon, |first| first - 1),
    })
}

/// Which events are looked through for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Events {
    /// Those of the log.
    Log,
    /// Those that are kept aside.
    Kept,
}

impl Events {
    fn table(self) -> &'static str {
        match self {
            Events::Log => "pillarbox_event",
            Events::Kept => "pillarbox_event_kept",
        }
    }
}

/// The lowest position above `lowest` and up to `highest` whose event was published at `time` or later. Positions and times rise together
/// but for [`CLOCK_SET_BACK_MAX`]: so the events are not read from the first one on, only from so much before that time.
pub(crate) fn first_since(
    tx: &Transaction<'_>,
    events: Events,
    time: Timestamp,
    lowest: Position,
    highest: Position,
) -> Db<Option<Position>> {
    let table = events.table();
    let before = time.0.saturating_sub(CLOCK_SET_BACK_MAX.as_millis() as i64);
    let mut next = tx.prepare_cached(&sql!(event, "next_of").replace("@table@", table))?;
    // An event at `low` is older, or there is none below; the first one above `high` is not older, or there is none.
    let (mut low, mut high) = (lowest, highest);
    while low < high {
        let middle = low + (high - low) / 2;
        let found = next
            .query_row(params![middle, before], |row| Ok((row.get("position")?, row.get("is_older")?)))
            .optional()?;
        match found {
            Some((position, true)) => low = position,
            _ => high = middle,
        }
    }
    let first = sql!(event, "first_since_of").replace("@table@", table);
    Ok(tx.prepare_cached(&first)?.query_row(params![low, highest, time.0], |row| row.get(0)).optional()?)
}

/// A subscription by its name.
pub(crate) fn find(tx: &Connection, name: &str) -> Db<Option<SubscriptionView>> {
    Ok(tx.prepare_cached(sql!(subscription, "find"))?.query_row([name], subscription_view).optional()?)
}

fn subscription_view(row: &Row<'_>) -> rusqlite::Result<SubscriptionView> {
    Ok(SubscriptionView {
        id: SubscriptionId(row.get("id")?),
        name: row.get("name")?,
        lanes: row.get("lanes")?,
        paused: row.get("paused")?,
        created: false,
        definition: Definition {
            number: row.get("definition")?,
            filter: Filter::stored(&row.get::<_, String>("filter")?),
            on_dead: if row.get::<_, String>("on_dead")? == "skip" { OnDead::Skip } else { OnDead::Block },
            retry: RetryPolicy::stored(&row.get::<_, String>("retry")?),
            processing_timeout: Duration::from_millis(row.get::<_, i64>("processing_timeout_ms")?.max(0) as u64),
        },
    })
}

/// All that is in the database of the fleet; locks are looked at afterwards.
fn fleet(tx: &Transaction<'_>) -> Db<Fleet> {
    let instances =
        tx.prepare_cached(sql!(instance, "fleet"))?.query_map([], instance_view)?.collect::<Result<_, _>>()?;
    let subscriptions =
        tx.prepare_cached(sql!(subscription, "fleet"))?.query_map([], subscription_view)?.collect::<Result<_, _>>()?;
    let lanes = tx.prepare_cached(sql!(cursor, "fleet"))?.query_map([], lane_view)?.collect::<Result<_, _>>()?;
    Ok(Fleet { instances, subscriptions, lanes, time: Timestamp::now() })
}

fn instance_view(row: &Row<'_>) -> rusqlite::Result<InstanceView> {
    let ids: Vec<i64> = serde_json::from_str(&row.get::<_, String>("subscriptions")?).unwrap_or_default();
    let subscriptions = ids.into_iter().map(SubscriptionId).collect();
    let draining = serde_json::from_str::<Report>(&row.get::<_, String>("report")?).is_ok_and(|report| report.draining);
    Ok(InstanceView {
        id: InstanceId(row.get("id")?),
        beat: row.get("beat")?,
        lock: Lock::Held,
        draining,
        subscriptions,
    })
}

fn lane_view(row: &Row<'_>) -> rusqlite::Result<LaneView> {
    Ok(LaneView {
        lane: LaneRef { subscription: SubscriptionId(row.get("subscription")?), lane: row.get("lane")? },
        owner: row.get::<_, Option<i64>>("owner")?.map(InstanceId),
        epoch: row.get("epoch")?,
        revision: row.get("revision")?,
        takeovers: row.get("takeovers")?,
    })
}

/// Loads lanes at the given epochs in one snapshot.
pub(crate) fn load(connection: &Connection, lanes: &[(LaneRef, Epoch)]) -> Db<Vec<Option<LaneState>>> {
    read(connection, |tx| {
        let pruned_to = meta_number(tx, "pruned_to")?;
        let definitions = definitions(tx, lanes)?;
        let mut states = Vec::with_capacity(lanes.len());
        for (lane, epoch) in lanes {
            let state = load_lane(tx, *lane, *epoch, pruned_to)?;
            let definition = definitions.get(&lane.subscription);
            let with = |state| Some(LaneState { definition: definition?.clone(), ..state });
            states.push(state.and_then(with));
        }
        let queues = queues(tx, lanes)?;
        let mut keys = HashMap::new();
        for id in queues.keys() {
            // Fewer statements than lanes: which lane a key is of is known here.
            let mut statement = tx.prepare_cached(sql!(queue, "keys"))?;
            let found =
                statement.query_map(params![id.0, "", QUEUED_KEYS_MAX as i64 + 1], |row| row.get::<_, String>(0))?;
            keys.insert(*id, found.map(|key| key.map(Into::into)).collect::<Result<Vec<Box<str>>, _>>()?);
        }
        tell_keys(lanes, &queues, &mut states, keys, HashSet::new());
        Ok(states)
    })
}

/// Those subscriptions of these lanes that are queues, and how many lanes they have.
fn queues(tx: &Transaction<'_>, lanes: &[(LaneRef, Epoch)]) -> Db<HashMap<SubscriptionId, u32>> {
    let sql = sql!(subscription, "lanes_of_queue");
    let mut found = HashMap::new();
    for (lane, _) in lanes {
        if !found.contains_key(&lane.subscription) {
            let count = tx.prepare_cached(sql)?.query_row([lane.subscription.0], |row| row.get(0)).optional()?;
            found.extend(count.map(|count: u32| (lane.subscription, count)));
        }
    }
    Ok(found)
}

/// The definitions of the subscriptions of these lanes.
fn definitions(tx: &Transaction<'_>, lanes: &[(LaneRef, Epoch)]) -> Db<HashMap<SubscriptionId, Arc<Definition>>> {
    let sql = sql!(subscription, "by_id");
    let mut found = HashMap::new();
    for (lane, _) in lanes {
        if found.contains_key(&lane.subscription) {
            continue;
        }
        let view = tx.prepare_cached(sql)?.query_row([lane.subscription.0], subscription_view).optional()?;
        found.extend(view.map(|view| (view.id, Arc::new(view.definition))));
    }
    Ok(found)
}

fn load_lane(tx: &Transaction<'_>, lane: LaneRef, epoch: Epoch, pruned_to: Position) -> Db<Option<LaneState>> {
    let mut statement = tx.prepare_cached(sql!(cursor, "load"))?;
    let mut rows = statement.query(params![lane.subscription.0, lane.lane, epoch])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let cursor = cursor_of(row)?;
    let (takeovers, revision) = (row.get("takeovers")?, row.get("revision")?);
    check_anchor(tx, cursor.anchor, pruned_to)?;
    let state = LaneState { cursor, takeovers, revision, ..LaneState::default() };
    let place = params![lane.subscription.0, lane.lane];
    let (is_queue, blocks): (bool, bool) = tx
        .prepare_cached(sql!(subscription, "is_queue_and_blocks"))?
        .query_row([lane.subscription.0], |row| Ok((row.get("is_queue")?, row.get("blocks")?)))?;
    if is_queue {
        return Ok(Some(state));
    }
    let last_arrival = tx
        .prepare_cached(sql!(delivery, "max_arrival"))?
        .query_row(place, |row| row.get::<_, Option<i64>>(0))?
        .unwrap_or(0);
    Ok(Some(load_deliveries(tx, lane, blocks, LaneState { last_arrival, ..state })?))
}

/// Adds the deliveries that the owner needs.
fn load_deliveries(tx: &Transaction<'_>, lane: LaneRef, blocks: bool, mut state: LaneState) -> Db<LaneState> {
    let mut statement = tx.prepare_cached(sql!(delivery, "load"))?;
    let heads_max = DEAD_HEADS_MAX as i64;
    let gaps: Vec<[Position; 2]> = state.cursor.open().iter().map(|gap| [*gap.start(), *gap.end()]).collect();
    let gaps = serde_json::to_string(&gaps).expect("numbers are JSON");
    let mut rows = statement.query(params![lane.subscription.0, lane.lane, gaps, blocks, heads_max])?;
    while let Some(row) = rows.next()? {
        if row.get::<_, i64>("number")? > heads_max {
            state.dead_heads_left_out = true;
            continue;
        }
        let delivery = delivery_of(row)?;
        // One that is not settled may be the first of its key too.
        if state.deliveries.last().is_none_or(|last| last.position != delivery.position) {
            state.deliveries.push(delivery);
        }
    }
    Ok(state)
}

/// Reads the columns `floor`, `settled`, `anchor_position` and `anchor_id`.
pub(crate) fn cursor_of(row: &Row<'_>) -> Db<Cursor> {
    Ok(Cursor { floor: row.get("floor")?, settled: row.get::<_, String>("settled")?.parse()?, anchor: anchor_of(row)? })
}

fn anchor_of(row: &Row<'_>) -> Db<Option<(Position, Uuid)>> {
    Ok(match (row.get::<_, Option<i64>>("anchor_position")?, row.get::<_, Option<String>>("anchor_id")?) {
        (Some(position), Some(id)) => Some((position, crate::reader::id_of(id.as_bytes()))),
        _ => None,
    })
}

/// Reads the columns `position`, `key`, `arrival`, `state`, `attempts`, `due_at` and `since`.
pub(crate) fn delivery_of(row: &Row<'_>) -> rusqlite::Result<DeliveryRow> {
    Ok(DeliveryRow {
        position: row.get("position")?,
        key: row.get::<_, Option<String>>("key")?.map(Into::into),
        arrival: row.get("arrival")?,
        state: State::from_name(&row.get::<_, String>("state")?).unwrap_or(State::Pending),
        attempts: row.get("attempts")?,
        due_at: Timestamp(row.get("due_at")?),
        since: Timestamp(row.get("since")?),
    })
}

/// The log may be replaced under a running instance: the anchors of its own lanes are looked at with each beat.
fn check_anchors(tx: &Transaction<'_>, me: InstanceId) -> Db<()> {
    let pruned_to = meta_number(tx, "pruned_to")?;
    let mut statement = tx.prepare_cached(sql!(cursor, "own_anchors"))?;
    let mut rows = statement.query([me.0])?;
    while let Some(row) = rows.next()? {
        check_anchor(tx, anchor_of(row)?, pruned_to)?;
    }
    Ok(())
}

/// The event at the anchor must still be the one that was settled, unless retention has passed it.
pub(crate) fn check_anchor(connection: &Connection, anchor: Option<(Position, Uuid)>, pruned_to: Position) -> Db<()> {
    let Some((position, id)) = anchor.filter(|(position, _)| *position > pruned_to) else { return Ok(()) };
    let found: Option<Uuid> = connection
        .prepare_cached(sql!(event, "id_at"))?
        .query_row([position], |row| crate::reader::id_at(row, 0))
        .optional()?;
    if found == Some(id) {
        return Ok(());
    }
    let now = found.map_or("there is none now".into(), |other| format!("event {other} is now"));
    Err(DbError::not_itself(&format!("event {id} was settled at position {position}, where {now}")))
}

/// The folder of the liveness locks beside the database.
///
/// They are `flock`s on files of their own: a descriptor of the database itself must never be closed under SQLite's
/// POSIX locks. A held lock proves that the process lives; the kernel frees it with the process.
#[derive(Debug, Clone)]
pub(crate) struct LockFolder(PathBuf);

/// Another instance's lock file, kept open to be looked at again and again.
#[derive(Debug)]
pub(crate) struct Probe(File);

impl LockFolder {
    pub(crate) fn beside(database: &Path) -> Self {
        let mut folder = database.as_os_str().to_owned();
        folder.push("-pillarbox");
        LockFolder(folder.into())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn file(&self, id: InstanceId) -> PathBuf {
        self.0.join(format!("{}.lock", id.0))
    }

    /// Takes the lock of a new instance.
    fn hold(&self, id: InstanceId) -> Db<File> {
        let path = self.file(id);
        let failed = |source| DbError::io(format!("the lock file {} could not be made", path.display()), source);
        std::fs::create_dir_all(&self.0).map_err(failed)?;
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::Error(source)) => Err(failed(source)),
            Err(TryLockError::WouldBlock) => Err(DbError::own(
                ErrorKind::Fatal,
                format!(
                    "the lock of the new instance {} is held already; is this folder shared between databases?",
                    id.0
                ),
            )),
        }
    }

    fn open(&self, id: InstanceId) -> Option<Probe> {
        File::open(self.file(id)).ok().map(Probe)
    }

    /// Whether the lock came free. Shared, so that watchers do not see each other.
    pub(crate) fn is_free(&self, probe: &Probe) -> bool {
        let free = probe.0.try_lock_shared().is_ok();
        if free {
            // An error would only keep a lock that nobody waits for.
            drop(probe.0.unlock());
        }
        free
    }

    /// Whether the file that others look at is the one that is held.
    fn leads_to(&self, id: InstanceId, lock: &File) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let held = lock.metadata().map(identity);
        matches!((std::fs::metadata(self.file(id)).map(identity), held), (Ok(named), Ok(held)) if named == held)
    }

    /// Whether an instance with a row lives, as far as an operator can tell.
    pub(crate) fn is_alive(&self, id: InstanceId, beat_at: Timestamp, now: Timestamp) -> bool {
        match self.probe(id) {
            Lock::Held => true,
            Lock::Free => false,
            Lock::Unknown => now.since(beat_at) < UNSEEN_ALIVE_FOR,
        }
    }

    /// The state of an instance's lock. A missing file proves nothing: it may have been removed, or the database was moved
    /// away from it. An instance that left has no row, so that it is not asked for.
    pub(crate) fn probe(&self, id: InstanceId) -> Lock {
        match File::open(self.file(id)) {
            Ok(file) => {
                if self.is_free(&Probe(file)) {
                    Lock::Free
                } else {
                    Lock::Held
                }
            }
            Err(_) => Lock::Unknown,
        }
    }

    fn remove(&self, id: InstanceId) {
        // A file that stays behind is harmless: numbers are never used twice.
        drop(std::fs::remove_file(self.file(id)));
    }
}
