use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use pillarbox::store::{
    Cursor, Definition, Epoch, FormerFilters, InstanceId, RangeSet, SubscriptionId, SubscriptionView,
};
use pillarbox::{ErrorKind, Filter, Mode, OnDead, Position, RetryPolicy, Start, Subscription, Timestamp};
use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row};

use crate::error::{Db, DbError};
use crate::operator::prune::REASON_HOLD_OPEN;
use crate::types::{Time, multirange, range_set};

/// How far the server's clock may have been set back, or differ from the one before a failover, for a time to be found in the
/// log. The events of so long are read through for it.
const CLOCK_SET_BACK_MAX: Duration = Duration::from_secs(60);

/// A subscription as this join leaves it.
pub(super) struct Defined {
    pub(super) view: SubscriptionView,
    /// What it was before, if its filter is another now: [`fence`] comes next.
    pub(super) before: Option<Definition>,
}

/// Creates subscriptions, or gives existing ones what the newest started instance says; the lanes stay, and another mode is
/// refused. Those that only come back keep what the database has. They are in the order of their names; and there are as many
/// statements for a thousand of them as for one, unless a definition changes.
pub(super) async fn define(
    tx: &impl GenericClient,
    me: InstanceId,
    subscriptions: &[&Subscription],
    rejoin: bool,
) -> Db<Vec<Defined>> {
    let names: Vec<&str> = subscriptions.iter().map(|subscription| subscription.name.as_str()).collect();
    let there = tx.query(sql!(subscription, "known_names"), &[&names]).await?;
    let there: HashSet<String> = there.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let missing: Vec<&Subscription> = subscriptions.iter().filter(|it| !there.contains(&it.name)).copied().collect();
    // Before any row is locked: whoever waits for another to insert keeps nobody waiting but those who insert too.
    let mut created = insert(tx, me, &missing).await?;
    let mut known = by_name(tx.query(sql!(subscription, "find"), &[&names]).await?)?;
    let (mut defined, mut new) = (Vec::with_capacity(subscriptions.len()), Vec::new());
    for subscription in subscriptions {
        if let Some(row) = created.remove(&subscription.name) {
            let view = SubscriptionView { created: true, ..subscription_view(&row)? };
            new.push((view.id, view.lanes, subscription.start));
            defined.push(Defined { view, before: None });
            continue;
        }
        let row = known.remove(&subscription.name).ok_or_else(|| deleted_meanwhile(subscription))?;
        defined.push(define_known(tx, me, subscription, &row, rejoin).await?);
    }
    add_lanes(tx, &new).await?;
    Ok(defined)
}

async fn define_known(
    tx: &impl GenericClient,
    me: InstanceId,
    subscription: &Subscription,
    known: &Row,
    rejoin: bool,
) -> Db<Defined> {
    let view = subscription_view(known)?;
    refuse_mode(subscription, known.try_get("mode")?)?;
    if view.lanes != subscription.lanes {
        tracing::warn!(
            subscription = view.name,
            lanes = view.lanes,
            asked = subscription.lanes,
            "the database's number of lanes stays; change it with `pillarbox subscription relane`"
        );
    }
    let wish = Definition::of(subscription, view.definition.number);
    let hold: Option<i64> = known.try_get("hold_ms")?;
    if rejoin || (wish.says_the_same_as(&view.definition) && hold == subscription.hold.map(milliseconds)) {
        return Ok(Defined { view, before: None });
    }
    let before = Some(view.definition).filter(|before| before.filter != subscription.filter);
    Ok(Defined { view: redefine(tx, me, view.id, subscription).await?, before })
}

fn deleted_meanwhile(subscription: &Subscription) -> DbError {
    let message = format!("subscription '{}' was deleted while this relay joined; it joins again", subscription.name);
    DbError::own(ErrorKind::Busy, message)
}

/// Raises the epochs of subscriptions whose filter has changed, and keeps what their lanes had settled under the old one.
pub(super) async fn fence(tx: &impl GenericClient, defined: &[Defined]) -> Db<()> {
    let changed: Vec<(i64, &Definition)> =
        defined.iter().filter_map(|defined| Some((defined.view.id.0, defined.before.as_ref()?))).collect();
    if changed.is_empty() {
        return Ok(());
    }
    let ids: Vec<i64> = changed.iter().map(|(id, _)| *id).collect();
    let mut cursors: HashMap<i64, BTreeMap<i32, Cursor>> = HashMap::new();
    for row in tx.query(sql!(cursor, "fence_changed"), &[&ids]).await? {
        let cursor =
            Cursor { floor: row.try_get("floor")?, settled: range_set(row.try_get("settled")?)?, anchor: None };
        cursors.entry(row.try_get("subscription")?).or_default().insert(row.try_get("lane")?, cursor);
    }
    for (id, before) in changed {
        let lanes = cursors.remove(&id).unwrap_or_default();
        let row = tx.query_one(sql!(subscription, "former_filters_and_time"), &[&id]).await?;
        let mut formers = FormerFilters::parse(row.try_get("former_filters")?);
        formers.end(before, row.try_get::<_, Time>("now")?.0, lanes.values());
        put_former_filters(tx, SubscriptionId(id), &formers).await?;
    }
    Ok(())
}

/// The filters that a subscription had before.
pub(crate) async fn former_filters(tx: &impl GenericClient, id: SubscriptionId) -> Db<FormerFilters> {
    let row = tx.query_one(sql!(subscription, "former_filters"), &[&id.0]).await?;
    Ok(FormerFilters::parse(row.try_get(0)?))
}

/// Writes down by which filters events were judged.
pub(crate) async fn put_former_filters(tx: &impl GenericClient, id: SubscriptionId, formers: &FormerFilters) -> Db<()> {
    tx.execute(sql!(subscription, "set_former_filters"), &[&id.0, &formers.to_text()]).await?;
    Ok(())
}

/// Rows of a queue and deliveries of a stream are not the same: one cannot become the other.
fn refuse_mode(subscription: &Subscription, stored: &str) -> Db<()> {
    let (asked, name) = (mode_name(subscription.mode), &subscription.name);
    if asked == stored {
        return Ok(());
    }
    Err(DbError::own(
        ErrorKind::Invalid,
        format!(
            "subscription '{name}' was made with mode = \"{stored}\", which stays: say so, use another name for mode = \"{asked}\", \
             or delete it first with `pillarbox subscription delete {name}`"
        ),
    ))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Stream => "stream",
        Mode::Queue => "queue",
    }
}

fn on_dead_name(on_dead: OnDead) -> &'static str {
    if on_dead == OnDead::Skip { "skip" } else { "block" }
}

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

fn json(value: serde_json::Result<String>) -> String {
    value.expect("plain data is JSON")
}

/// Gives a subscription another definition.
async fn redefine(
    tx: &impl GenericClient,
    me: InstanceId,
    id: SubscriptionId,
    subscription: &Subscription,
) -> Db<SubscriptionView> {
    let row = tx
        .query_one(
            sql!(subscription, "redefine"),
            &[
                &id.0,
                &json(serde_json::to_string(&subscription.filter)),
                &on_dead_name(subscription.on_dead),
                &subscription.hold.map(milliseconds),
                &json(serde_json::to_string(&subscription.retry)),
                &milliseconds(subscription.processing_timeout),
                &me.0,
            ],
        )
        .await?;
    subscription_view(&row)
}

/// Records subscriptions that are not recorded yet; those that are recorded are missing from the answer.
async fn insert(tx: &impl GenericClient, me: InstanceId, new: &[&Subscription]) -> Db<HashMap<String, Row>> {
    if new.is_empty() {
        return Ok(HashMap::new());
    }
    let names: Vec<&str> = new.iter().map(|it| it.name.as_str()).collect();
    let filters: Vec<String> = new.iter().map(|it| json(serde_json::to_string(&it.filter))).collect();
    let modes: Vec<&str> = new.iter().map(|it| mode_name(it.mode)).collect();
    let lanes: Vec<i32> = new.iter().map(|it| it.lanes as i32).collect();
    let on_dead: Vec<&str> = new.iter().map(|it| on_dead_name(it.on_dead)).collect();
    let holds: Vec<Option<i64>> = new.iter().map(|it| it.hold.map(milliseconds)).collect();
    let retries: Vec<String> = new.iter().map(|it| json(serde_json::to_string(&it.retry))).collect();
    let timeouts: Vec<i64> = new.iter().map(|it| milliseconds(it.processing_timeout)).collect();
    let values: [&(dyn ToSql + Sync); 9] =
        [&names, &filters, &modes, &lanes, &on_dead, &holds, &retries, &timeouts, &me.0];
    by_name(tx.query(sql!(subscription, "define"), &values).await?)
}

fn by_name(rows: Vec<Row>) -> Db<HashMap<String, Row>> {
    rows.into_iter().map(|row| Ok((row.try_get("name")?, row))).collect()
}

/// The cursors of new lanes, with the record that what is settled in them was never asked for.
async fn add_lanes(tx: &impl GenericClient, new: &[(SubscriptionId, u32, Start)]) -> Db<()> {
    let mut starts: Vec<(Start, (Position, RangeSet))> = Vec::new();
    let (mut ids, mut lanes, mut floors, mut settled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut of, mut of_lane, mut from, mut to) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (id, count, start) in new {
        if !starts.iter().any(|(known, _)| known == start) {
            starts.push((*start, start_floor(tx, *start).await?));
        }
        let place = starts.iter().find(|(known, _)| known == start);
        let (floor, ranges) = &place.expect("found or added above").1;
        for lane in 0..*count as i32 {
            ids.push(id.0);
            lanes.push(lane);
            floors.push(*floor);
            settled.push(multirange(ranges));
            let covered = ranges.iter().map(|range| (range.start() - 1, *range.end()));
            for (low, high) in std::iter::once((0, *floor)).chain(covered) {
                of.push(id.0);
                of_lane.push(lane);
                from.push(low);
                to.push(high);
            }
        }
    }
    if !ids.is_empty() {
        tx.execute(sql!(cursor, "add_lanes"), &[&ids, &lanes, &floors, &settled]).await?;
        tx.execute(sql!(progress, "before_start"), &[&of, &of_lane, &from, &to]).await?;
    }
    Ok(())
}

/// Records that `from < position <= to` of a lane was covered.
pub(crate) async fn record_progress(
    tx: &impl GenericClient,
    id: SubscriptionId,
    lane: u32,
    epoch: Epoch,
    ranges: &RangeSet,
) -> Db<()> {
    let (from, to): (Vec<Position>, Vec<Position>) =
        ranges.iter().map(|range| (range.start() - 1, *range.end())).unzip();
    if !from.is_empty() {
        tx.execute(sql!(progress, "insert"), &[&id.0, &(lane as i32), &epoch, &from, &to]).await?;
    }
    Ok(())
}

/// The floor from which a start delivers, and what is settled above it. Whatever is still to be committed below the start
/// stays open and is delivered then: it was not there when the subscription was made.
///
/// What was in a copy when it was declared fresh is never delivered.
pub(crate) async fn start_floor(tx: &impl GenericClient, start: Start) -> Db<(Position, RangeSet)> {
    let row = tx.query_one(sql!(meta, "share_start"), &[]).await?;
    let lowest = (row.try_get::<_, Position>("log_start")? - 1).max(row.try_get("fresh_floor")?);
    let horizon: Position = tx.query_one(sql!(event, "horizon"), &[]).await?.try_get(0)?;
    let highest = match start {
        Start::Beginning => return Ok((lowest, RangeSet::new())),
        Start::Position(position) => position.min(horizon),
        Start::Now | Start::Time(_) => horizon,
    };
    let highest = highest.max(lowest);
    // After the horizon: without a writer now, whatever is not there up to it never comes.
    let known = match tx.query(sql!(event, "writers"), &[]).await?.is_empty() {
        true => None,
        false => Some(known_above(tx, lowest, highest).await?),
    };
    // After what is known: an event that is committed in between is not among it, and stays open.
    let to = match start {
        Start::Time(time) => {
            first_since(tx, Events::Log, time, lowest, horizon).await?.map_or(horizon, |first| first - 1)
        }
        _ => highest,
    };
    let Some((base, known)) = known.filter(|(base, _)| *base < to) else { return Ok((to, RangeSet::new())) };
    let mut settled = known.within(base + 1, to);
    let floor = settled.missing(base + 1, to).first().map_or(to, |hole| hole - 1);
    settled.remove_range(0, floor);
    Ok((floor, settled))
}

/// A position up to which everything is decided, and what is visible or dead above it, up to `to`.
async fn known_above(tx: &impl GenericClient, lowest: Position, to: Position) -> Db<(Position, RangeSet)> {
    let decided: Position = tx.query_one(sql!(cursor, "highest_floor"), &[]).await?.try_get(0)?;
    let mut base = decided.min(to).max(lowest);
    // A floor that was moved because a hold was over has passed what nobody knows yet.
    let open = tx.query_one(sql!(skip, "hold_open"), &[&REASON_HOLD_OPEN, &lowest, &base]).await?;
    if let Some(open) = open.try_get::<_, Option<Position>>(0)? {
        base = open - 1;
    }
    let mut known = RangeSet::new();
    let dead = sql!(dead_range, "above_within");
    for sql in [sql!(event, "visible_ranges"), dead] {
        for row in tx.query(sql, &[&base, &to]).await? {
            known.insert_range(row.try_get("low")?, row.try_get("high")?);
        }
    }
    Ok((base, known))
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
            Events::Log => "event",
            Events::Kept => "event_kept",
        }
    }
}

/// The lowest position above `lowest` and up to `highest` whose event was published at `time` or later. Positions and times rise together
/// but for [`CLOCK_SET_BACK_MAX`]: so the events are not read from the first one on, only from so much before that time.
pub(crate) async fn first_since(
    tx: &impl GenericClient,
    events: Events,
    time: Timestamp,
    lowest: Position,
    highest: Position,
) -> Db<Option<Position>> {
    let table = events.table();
    let before = Timestamp(time.0.saturating_sub(CLOCK_SET_BACK_MAX.as_millis() as i64));
    let next = tx.prepare(&sql!(event, "next_of").replace("@table@", table)).await?;
    // An event at `low` is older, or there is none below; the first one above `high` is not older, or there is none.
    let (mut low, mut high) = (lowest, highest);
    while low < high {
        let middle = low + (high - low) / 2;
        match tx.query_opt(&next, &[&middle, &Time(before)]).await? {
            Some(row) if row.try_get("is_older")? => low = row.try_get("position")?,
            _ => high = middle,
        }
    }
    let sql = sql!(event, "first_since_of").replace("@table@", table);
    let first = tx.query_opt(&sql, &[&low, &highest, &Time(time)]).await?;
    Ok(first.map(|row| row.try_get(0)).transpose()?)
}

/// Reads the columns `id`, `name`, `filter`, `lanes`, `paused`, `definition`, `on_dead`, `retry` and `processing_timeout_ms`.
pub(crate) fn subscription_view(row: &Row) -> Db<SubscriptionView> {
    Ok(SubscriptionView {
        id: SubscriptionId(row.try_get("id")?),
        name: row.try_get("name")?,
        lanes: row.try_get::<_, i32>("lanes")? as u32,
        paused: row.try_get("paused")?,
        created: false,
        definition: Definition {
            number: row.try_get("definition")?,
            filter: Filter::stored(row.try_get("filter")?),
            on_dead: if row.try_get::<_, &str>("on_dead")? == "skip" { OnDead::Skip } else { OnDead::Block },
            retry: RetryPolicy::stored(row.try_get("retry")?),
            processing_timeout: Duration::from_millis(row.try_get::<_, i64>("processing_timeout_ms")?.max(0) as u64),
        },
    })
}
