use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::admin::retention::stored_time;
use pillarbox::admin::snapshot::{InstanceRow, LaneRow, Snapshot, SubscriptionRow};
use pillarbox::admin::{
    Books, Change, Changed, Check, ClaimRecord, EventRecord, ListQuery, ListRow, Operator, Pause, PrunePolicy, Pruned,
    Status,
};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::{InstanceId, SubscriptionId};
use pillarbox::{Event, Filter, Mode, NewEvent, OnDead, Position, Result, RetryPolicy, Timestamp};
use rusqlite::{Connection, Row};
use uuid::Uuid;

use crate::connection::{horizon, meta_number, raise_revision, read, write};
use crate::error::Db;
use crate::home::{log_id, meta_optional};
use crate::journal;
use crate::ownership::{LockFolder, cursor_of};
use crate::reader::id_of;
use crate::store::{Desk, SqliteStore};

mod books;
mod change;
mod doctor;
mod list;
mod maintain;
mod prune;
mod risen;
mod show;
mod status;

pub use maintain::{Maintained, WAL_BYTES_MAX};
pub use status::PENDING_COUNT_MAX;

impl Operator for SqliteStore {
    async fn status(&self) -> Result<Status> {
        self.operate(|desk| read(&desk.connection, |tx| status::status(tx, desk))).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        let query = query.clone();
        self.operate(move |desk| read(&desk.connection, |tx| list::list(tx, desk, &query))).await
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        self.operate(move |desk| read(&desk.connection, |tx| show::show(tx, desk, id))).await
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        let change = change.clone();
        self.operate(move |desk| change::change(desk, &change, dry_run)).await
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        let events = events.to_vec();
        self.operate(move |desk| write(&desk.connection, |tx| Ok(crate::publish_all(tx, &events)?))).await
    }

    async fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        let (stream, events) = (stream.to_owned(), events.to_vec());
        let work = move |desk: &Desk| write(&desk.connection, |tx| Ok(crate::append(tx, &stream, expected, &events)?));
        self.operate(work).await
    }

    async fn read_stream(&self, stream: &str, from: i64, limit: usize) -> Result<Vec<Event>> {
        let (stream, limit) = (stream.to_owned(), i64::try_from(limit).unwrap_or(i64::MAX));
        self.operate(move |desk| read(&desk.connection, |tx| journal::select(tx, &stream, from, i64::MAX, limit))).await
    }

    async fn streams(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<StreamHead>> {
        let (prefix, after) = (prefix.to_owned(), after.unwrap_or_default().to_owned());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.operate(move |desk| read(&desk.connection, |tx| journal::streams(tx, &prefix, &after, limit))).await
    }

    async fn books(&self) -> Result<Books> {
        self.operate(|desk| read(&desk.connection, |tx| books::books(tx, desk))).await
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        let policy = *policy;
        let pruned = self.operate(move |desk| write(&desk.connection, |tx| prune::prune(tx, desk, &policy))).await?;
        if !pruned.more {
            self.maintain().await?;
        }
        Ok(pruned)
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        self.operate(doctor::doctor).await
    }

    async fn reset(&self) -> Result<()> {
        self.operate(|desk| write(&desk.connection, |tx| reset(tx, &desk.folder))).await
    }
}

/// Empties the log. Positions go on where they were; what a living instance runs stays, with nothing to deliver.
fn reset(tx: &rusqlite::Transaction<'_>, folder: &LockFolder) -> Db<()> {
    let snapshot = load_snapshot(tx, folder)?;
    // First: only what lies below these may be removed.
    crate::connection::set_meta(tx, "log_start", snapshot.horizon + 1)?;
    crate::connection::set_meta(tx, "pruned_to", snapshot.horizon)?;
    tx.execute_batch(sql!(home, "reset"))?;
    for subscription in snapshot.subscriptions.iter().filter(|subscription| !snapshot.is_run(subscription.id)) {
        change::delete_subscription(tx, subscription.id)?;
    }
    tx.execute(sql!(meta, "raise_incarnation"), [])?;
    crate::home::start_over(tx)?;
    raise_revision(tx).map(drop)
}

/// What operators' commands look at, in one snapshot.
pub(crate) fn load_snapshot(tx: &Connection, folder: &LockFolder) -> Db<Snapshot> {
    let mut lanes = lanes(tx)?;
    let mut statement = tx.prepare_cached(sql!(subscription, "subscriptions"))?;
    let rows = statement.query_map([], subscription_row)?;
    let mut subscriptions = rows.collect::<Result<Vec<_>, _>>()?;
    for subscription in &mut subscriptions {
        subscription.lanes = lanes.remove(&subscription.id).unwrap_or_default();
    }
    let mut statement = tx.prepare_cached(sql!(instance, "instances"))?;
    let mut instances = statement.query_map([], instance_row)?.collect::<Result<Vec<_>, _>>()?;
    let now = Timestamp::now();
    for instance in &mut instances {
        instance.alive = folder.is_alive(instance.id, instance.beat_at, now);
    }
    let keep = meta_number(tx, "retention_keep_ms")?;
    Ok(Snapshot {
        log_id: log_id(tx)?,
        incarnation: meta_number(tx, "incarnation")?,
        schema_version: meta_number(tx, "schema_version")?,
        fresh_floor: meta_number(tx, "fresh_floor")?,
        retention_keep: stored_time(keep),
        recovery_at: meta_optional(tx, "recovery_at")?.map(Timestamp),
        now,
        horizon: horizon(tx)?,
        log_start: meta_number(tx, "log_start")?,
        pruned_to: meta_number(tx, "pruned_to")?,
        subscriptions,
        instances,
    })
}

fn lanes(tx: &Connection) -> Db<BTreeMap<SubscriptionId, Vec<LaneRow>>> {
    let mut statement = tx.prepare_cached(sql!(cursor, "lanes"))?;
    let mut rows = statement.query([])?;
    let mut lanes = BTreeMap::<_, Vec<_>>::new();
    while let Some(row) = rows.next()? {
        lanes.entry(SubscriptionId(row.get("subscription")?)).or_default().push(LaneRow {
            lane: row.get("lane")?,
            cursor: cursor_of(row)?,
            owner: row.get::<_, Option<i64>>("owner")?.map(InstanceId),
            epoch: row.get("epoch")?,
            revision: row.get("revision")?,
        });
    }
    Ok(lanes)
}

fn subscription_row(row: &Row<'_>) -> rusqlite::Result<SubscriptionRow> {
    Ok(SubscriptionRow {
        id: SubscriptionId(row.get("id")?),
        name: row.get("name")?,
        filter: Filter::stored(&row.get::<_, String>("filter")?),
        definition: row.get("definition")?,
        mode: if row.get::<_, String>("mode")? == "queue" { Mode::Queue } else { Mode::Stream },
        on_dead: if row.get::<_, String>("on_dead")? == "skip" { OnDead::Skip } else { OnDead::Block },
        hold: row.get::<_, Option<i64>>("hold_ms")?.map(|hold| Duration::from_millis(hold.max(0) as u64)),
        pause: Pause::stored(
            row.get("paused")?,
            row.get::<_, Option<String>>("paused_by")?.as_deref(),
            row.get("paused_reason")?,
        ),
        retry: RetryPolicy::stored(&row.get::<_, String>("retry")?),
        lanes: Vec::new(),
    })
}

fn instance_row(row: &Row<'_>) -> rusqlite::Result<InstanceRow> {
    let ids: Vec<i64> = serde_json::from_str(&row.get::<_, String>("subscriptions")?).unwrap_or_default();
    Ok(InstanceRow {
        id: InstanceId(row.get("id")?),
        host: row.get("host")?,
        pid: row.get("pid")?,
        version: row.get("version")?,
        started_at: Timestamp(row.get("started_at")?),
        beat_at: Timestamp(row.get("beat_at")?),
        subscriptions: ids.into_iter().map(SubscriptionId).collect(),
        report: serde_json::from_str(&row.get::<_, String>("report")?).unwrap_or_default(),
        alive: false,
    })
}

/// Who works on a delivery, by the columns `owner`, `claimed_at` and `beat_at`.
pub(crate) fn claim_record(row: &Row<'_>) -> rusqlite::Result<Option<ClaimRecord>> {
    let Some(owner) = row.get("owner")? else { return Ok(None) };
    Ok(Some(ClaimRecord {
        instance: InstanceId(owner),
        since: Timestamp(row.get("claimed_at")?),
        beat_at: row.get::<_, Option<i64>>("beat_at")?.map(Timestamp),
    }))
}

/// The positions of an event by its id, in the log or kept aside; ids are not unique.
pub(crate) fn positions_of(tx: &Connection, id: Uuid) -> Db<Vec<Position>> {
    let mut statement = tx.prepare_cached(sql!(event, "positions_of"))?;
    let positions = statement.query_map([id.to_string()], |row| row.get(0))?.collect::<Result<Vec<_>, _>>()?;
    if !positions.is_empty() {
        return Ok(positions);
    }
    // Somebody may have published it as a text that is written in another way or is no uuid: see `id_of`. That takes a
    // look at every id.
    let mut statement = tx.prepare_cached(sql!(event, "odd_ids"))?;
    let mut rows = statement.query([])?;
    let mut positions = Vec::new();
    while let Some(row) = rows.next()? {
        if id_of(row.get_ref("id")?.as_bytes().unwrap_or_default()) == id {
            positions.push(row.get("position")?);
        }
    }
    positions.sort_unstable();
    Ok(positions)
}
