use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use pillarbox::admin::retention::stored_time;
use pillarbox::admin::snapshot::{InstanceRow, LaneRow, Snapshot, SubscriptionRow};
use pillarbox::admin::{
    Books, Change, Changed, Check, ClaimRecord, EventRecord, ListQuery, ListRow, Operator, Pause, PrunePolicy, Pruned,
    Status,
};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::{Cursor, InstanceId, SubscriptionId};
use pillarbox::{Event, Filter, Mode, NewEvent, OnDead, Position, Result, RetryPolicy};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::connection::{Session, lock_class};
use crate::error::Db;
use crate::event_id::salted_position;
use crate::journal::{Stretch, on_client as journal};
use crate::schema::Schema;
use crate::store::PostgresStore;
use crate::types::{Time, range_set};

mod books;
mod change;
mod doctor;
mod holders;
mod list;
pub(crate) mod premises;
pub(crate) mod prune;
mod reset;
mod risen;
mod show;
mod status;

pub use status::PENDING_COUNT_MAX;

impl Operator for PostgresStore {
    async fn status(&self) -> Result<Status> {
        let mut desk = self.desk().await?;
        let done = async { status::status(&read_only(&mut desk, BY_INDEX).await?).await }.await;
        Ok(desk.explain(done)?)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        let mut desk = self.desk().await?;
        let done = async { list::list(&read_only(&mut desk, BY_INDEX).await?, query).await }.await;
        Ok(desk.explain(done)?)
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        let mut desk = self.desk().await?;
        let done = async { show::show(&read_only(&mut desk, BY_INDEX).await?, id).await }.await;
        Ok(desk.explain(done)?)
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        let mut desk = self.desk().await?;
        let done = change::change(&mut desk, change, dry_run).await;
        Ok(desk.explain(done)?)
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        let mut desk = self.desk().await?;
        let schema = Schema::of(self.config());
        let done = async {
            let tx = desk.begin().await?;
            let ids = schema.publish_all(&tx, events).await?;
            tx.commit().await?;
            Ok(ids)
        };
        let done = done.await;
        Ok(desk.explain(done)?)
    }

    async fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        let mut desk = self.desk().await?;
        let schema = Schema::of(self.config());
        let done = async {
            let tx = desk.begin().await?;
            let appended = schema.append(&tx, stream, expected, events).await?;
            tx.commit().await?;
            Ok(appended)
        };
        let done = done.await;
        Ok(desk.explain(done)?)
    }

    async fn read_stream(&self, stream: &str, from: i64, limit: usize) -> Result<Vec<Event>> {
        let mut desk = self.desk().await?;
        let (schema, limit) = (Schema::of(self.config()), i64::try_from(limit).unwrap_or(i64::MAX));
        let stretch = Stretch { stream, from, to: i64::MAX, limit };
        let done = async { journal::read(&read_only(&mut desk, BY_INDEX).await?, &schema, stretch).await }.await;
        Ok(desk.explain(done)?)
    }

    async fn streams(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<StreamHead>> {
        let mut desk = self.desk().await?;
        let (schema, limit) = (Schema::of(self.config()), i64::try_from(limit).unwrap_or(i64::MAX));
        let after = after.unwrap_or_default();
        let done = async {
            let tx = read_only(&mut desk, BY_INDEX).await?;
            journal::streams(&tx, &schema, prefix, after, limit).await
        };
        let done = done.await;
        Ok(desk.explain(done)?)
    }

    async fn books(&self) -> Result<Books> {
        let mut desk = self.desk().await?;
        let done = async { books::books(&read_only(&mut desk, "").await?).await }.await;
        Ok(desk.explain(done)?)
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        let mut desk = self.desk().await?;
        let done = prune::prune(&mut desk, &self.upkeep, policy).await;
        Ok(desk.explain(done)?)
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        let mut desk = self.desk().await?;
        let done = doctor::doctor(&mut desk).await;
        Ok(desk.explain(done)?)
    }

    async fn reset(&self) -> Result<()> {
        let mut desk = self.desk().await?;
        let done = reset::reset(&mut desk).await;
        Ok(desk.explain(done)?)
    }
}

/// For what is found by an index and must not be found otherwise, whatever little the server knows of a table that has grown quickly.
pub(crate) const BY_INDEX: &str = sql!(session, "by_index");

/// For a few rows of many, in the order of an index.
pub(crate) const IN_ORDER: &str = sql!(session, "in_order");

/// No session waits for one that only reads, and between two statements there may be a million rows to look at.
const READS: &str = sql!(session, "unhurried");

/// One snapshot for all that a command reads, with settings of its own.
async fn read_only<'a>(session: &'a mut Session, settings: &str) -> Db<Transaction<'a>> {
    let tx = session.begin().await?;
    let sql = format!("{}; {READS}; {settings}", sql!(session, "read_snapshot"));
    tx.batch_execute(&sql).await?;
    Ok(tx)
}

/// Lets sleeping relays look at what a command changed, once it is committed.
pub(crate) async fn ring(tx: &Transaction<'_>) -> Db<()> {
    crate::doorbell::announce(tx, "fleet").await
}

/// What operators' commands look at, read in one message.
pub(crate) async fn load_snapshot(tx: &Transaction<'_>) -> Db<Snapshot> {
    let (meta, lanes, subscriptions, instances, locks) = tokio::try_join!(
        tx.query_typed_one(sql!(meta, "snapshot"), &[]),
        tx.query_typed(sql!(cursor, "lanes"), &[]),
        tx.query_typed(sql!(subscription, "subscriptions"), &[]),
        tx.query_typed(sql!(instance, "instances"), &[]),
        tx.query_typed(sql!(instance, "living"), &[]),
    )?;
    let mut lanes = group_lanes(&lanes)?;
    let mut subscriptions = subscriptions.iter().map(subscription_row).collect::<Db<Vec<_>>>()?;
    for subscription in &mut subscriptions {
        subscription.lanes = lanes.remove(&subscription.id).unwrap_or_default();
    }
    let class = i64::from(lock_class(meta.try_get("schema")?));
    let held = locks.iter().filter(|row| row.get::<_, i64>("class") == class);
    let held: HashSet<InstanceId> = held.map(|row| InstanceId(row.get("number"))).collect();
    Ok(Snapshot {
        log_id: meta.try_get("log_id")?,
        incarnation: meta.try_get("incarnation")?,
        schema_version: meta.try_get::<_, i32>("schema_version")?.into(),
        // By the database's clock.
        now: meta.try_get::<_, Time>("now")?.0,
        horizon: meta.try_get("horizon")?,
        log_start: meta.try_get("log_start")?,
        pruned_to: meta.try_get("pruned_to")?,
        fresh_floor: meta.try_get("fresh_floor")?,
        retention_keep: stored_time(meta.try_get("retention_keep_ms")?),
        recovery_at: meta.try_get::<_, Option<Time>>("recovery_at")?.map(|time| time.0),
        subscriptions,
        instances: instances.iter().map(|row| instance_row(row, &held)).collect::<Db<_>>()?,
    })
}

fn group_lanes(rows: &[Row]) -> Db<BTreeMap<SubscriptionId, Vec<LaneRow>>> {
    let mut lanes = BTreeMap::<_, Vec<_>>::new();
    for row in rows {
        let anchor =
            row.try_get::<_, Option<Position>>("anchor_position")?.zip(row.try_get::<_, Option<Uuid>>("anchor_id")?);
        lanes.entry(SubscriptionId(row.try_get("subscription")?)).or_default().push(LaneRow {
            lane: row.try_get::<_, i32>("lane")? as u32,
            cursor: Cursor { floor: row.try_get("floor")?, settled: range_set(row.try_get("settled")?)?, anchor },
            owner: row.try_get::<_, Option<i64>>("owner")?.map(InstanceId),
            epoch: row.try_get("epoch")?,
            revision: row.try_get("revision")?,
        });
    }
    Ok(lanes)
}

fn subscription_row(row: &Row) -> Db<SubscriptionRow> {
    Ok(SubscriptionRow {
        id: SubscriptionId(row.try_get("id")?),
        name: row.try_get("name")?,
        filter: Filter::stored(row.try_get("filter")?),
        definition: row.try_get("definition")?,
        mode: if row.try_get::<_, &str>("mode")? == "queue" { Mode::Queue } else { Mode::Stream },
        on_dead: if row.try_get::<_, &str>("on_dead")? == "skip" { OnDead::Skip } else { OnDead::Block },
        hold: row.try_get::<_, Option<i64>>("hold_ms")?.map(|hold| Duration::from_millis(hold.max(0) as u64)),
        pause: Pause::stored(row.try_get("paused")?, row.try_get("paused_by")?, row.try_get("paused_reason")?),
        retry: RetryPolicy::stored(row.try_get("retry")?),
        lanes: Vec::new(),
    })
}

fn instance_row(row: &Row, held: &HashSet<InstanceId>) -> Db<InstanceRow> {
    let id = InstanceId(row.try_get::<_, i32>("id")?.into());
    Ok(InstanceRow {
        id,
        host: row.try_get("host")?,
        pid: row.try_get::<_, i32>("pid")? as u32,
        version: row.try_get("version")?,
        started_at: row.try_get::<_, Time>("started_at")?.0,
        beat_at: row.try_get::<_, Time>("beat_at")?.0,
        subscriptions: row.try_get::<_, Vec<i64>>("subscriptions")?.into_iter().map(SubscriptionId).collect(),
        report: serde_json::from_str(row.try_get("report")?).unwrap_or_default(),
        alive: held.contains(&id),
    })
}

/// Who works on a delivery, by the columns `owner`, `claimed_at` and `beat_at`.
pub(crate) fn claim_record(row: &Row) -> Db<Option<ClaimRecord>> {
    let owner = row.try_get::<_, Option<i32>>("owner")?.zip(row.try_get::<_, Option<Time>>("claimed_at")?);
    let beat_at = row.try_get::<_, Option<Time>>("beat_at")?.map(|time| time.0);
    Ok(owner.map(|(owner, since)| ClaimRecord { instance: InstanceId(owner.into()), since: since.0, beat_at }))
}

/// The positions of an event by its id, in the log or kept aside; ids are not unique.
pub(crate) async fn positions_of(tx: &Transaction<'_>, id: Uuid) -> Db<Vec<Position>> {
    let rows =
        tx.query_typed(sql!(event, "positions_of"), &[(&id, Type::UUID), (&salted_position(id), Type::INT8)]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
