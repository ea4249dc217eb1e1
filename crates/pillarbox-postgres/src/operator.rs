use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use pillarbox::admin::snapshot::{InstanceRow, LaneRow, Snapshot, SubscriptionRow};
use pillarbox::admin::{
    Books, Change, Changed, Check, ClaimRecord, EventRecord, ListQuery, ListRow, Operator, Pause, PrunePolicy, Pruned,
    Status,
};
use pillarbox::store::{Cursor, InstanceId, SubscriptionId};
use pillarbox::{Mode, NewEvent, OnDead, Position, Result, RetryPolicy};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::connection::{Session, lock_class};
use crate::error::{Db, DbError};
use crate::event_id::salted_position;
use crate::ownership::parse_filter;
use crate::publish::FOREVER_MS;
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
        Ok(status::status(&read_only(&mut desk, BY_INDEX).await?).await?)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        let mut desk = self.desk().await?;
        Ok(list::list(&read_only(&mut desk, BY_INDEX).await?, query).await?)
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        let mut desk = self.desk().await?;
        Ok(show::show(&read_only(&mut desk, BY_INDEX).await?, id).await?)
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        let mut desk = self.desk().await?;
        Ok(change::change(&mut desk, change, dry_run).await?)
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        let mut desk = self.desk().await?;
        let schema = Schema::of(self.config());
        let tx = desk.begin().await?;
        let ids = schema.publish_all(&tx, events).await?;
        tx.commit().await.map_err(DbError::from)?;
        Ok(ids)
    }

    async fn books(&self) -> Result<Books> {
        let mut desk = self.desk().await?;
        Ok(books::books(&read_only(&mut desk, "").await?).await?)
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        let mut desk = self.desk().await?;
        Ok(prune::prune(&mut desk, &self.upkeep, policy).await?)
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        let mut desk = self.desk().await?;
        Ok(doctor::doctor(&mut desk).await?)
    }

    async fn reset(&self) -> Result<()> {
        let mut desk = self.desk().await?;
        Ok(reset::reset(&mut desk).await?)
    }
}

/// For what is found by an index and must not be found otherwise, whatever little the server knows of a table that has grown quickly.
pub(crate) const BY_INDEX: &str = "set local enable_seqscan = off; set local enable_bitmapscan = off; \
    set local enable_hashjoin = off; set local enable_mergejoin = off";

/// For a few rows of many, in the order of an index.
pub(crate) const IN_ORDER: &str = "set local enable_sort = off";

/// Nobody waits for who only reads, and between two statements there may be a million rows to look at.
const READS: &str = "set local idle_in_transaction_session_timeout = '10s'";

/// One snapshot for all that a command reads, with settings of its own.
async fn read_only<'a>(session: &'a mut Session, settings: &str) -> Db<Transaction<'a>> {
    let tx = session.begin().await?;
    let sql = format!("set transaction isolation level repeatable read, read only; {READS}; {settings}");
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
        tx.query_typed_one(include_str!("sql/snapshot.sql"), &[]),
        tx.query_typed(include_str!("sql/lanes.sql"), &[]),
        tx.query_typed(include_str!("sql/subscriptions.sql"), &[]),
        tx.query_typed(include_str!("sql/instances.sql"), &[]),
        tx.query_typed(include_str!("sql/living.sql"), &[]),
    )?;
    let mut lanes = group_lanes(&lanes)?;
    let mut subscriptions = subscriptions.iter().map(subscription_row).collect::<Db<Vec<_>>>()?;
    for subscription in &mut subscriptions {
        subscription.lanes = lanes.remove(&subscription.id).unwrap_or_default();
    }
    let class = i64::from(lock_class(meta.try_get("schema")?));
    let held = locks.iter().filter(|row| row.get::<_, i64>(0) == class);
    let held: HashSet<InstanceId> = held.map(|row| InstanceId(row.get(1))).collect();
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
        retention_keep: match meta.try_get("retention_keep_ms")? {
            FOREVER_MS => None,
            keep => Some(Duration::from_millis(keep.max(0) as u64)),
        },
        recovery_at: meta.try_get::<_, Option<Time>>("recovery_at")?.map(|time| time.0),
        subscriptions,
        instances: instances.iter().map(|row| instance_row(row, &held)).collect::<Db<_>>()?,
    })
}

fn group_lanes(rows: &[Row]) -> Db<BTreeMap<SubscriptionId, Vec<LaneRow>>> {
    let mut lanes = BTreeMap::<_, Vec<_>>::new();
    for row in rows {
        let anchor = row.try_get::<_, Option<Position>>(2)?.zip(row.try_get::<_, Option<Uuid>>(3)?);
        lanes.entry(SubscriptionId(row.try_get(4)?)).or_default().push(LaneRow {
            lane: row.try_get::<_, i32>(5)? as u32,
            cursor: Cursor { floor: row.try_get(0)?, settled: range_set(row.try_get(1)?)?, anchor },
            owner: row.try_get::<_, Option<i64>>(6)?.map(InstanceId),
            epoch: row.try_get(7)?,
            revision: row.try_get(8)?,
        });
    }
    Ok(lanes)
}

fn subscription_row(row: &Row) -> Db<SubscriptionRow> {
    Ok(SubscriptionRow {
        id: SubscriptionId(row.try_get(0)?),
        name: row.try_get(1)?,
        filter: parse_filter(row.try_get(2)?),
        definition: row.try_get(10)?,
        mode: if row.try_get::<_, &str>(3)? == "queue" { Mode::Queue } else { Mode::Stream },
        on_dead: if row.try_get::<_, &str>(4)? == "skip" { OnDead::Skip } else { OnDead::Block },
        hold: row.try_get::<_, Option<i64>>(5)?.map(|hold| Duration::from_millis(hold.max(0) as u64)),
        pause: Pause::stored(row.try_get(6)?, row.try_get(7)?, row.try_get(8)?),
        retry: RetryPolicy::stored(row.try_get(9)?),
        lanes: Vec::new(),
    })
}

fn instance_row(row: &Row, held: &HashSet<InstanceId>) -> Db<InstanceRow> {
    let id = InstanceId(row.try_get::<_, i32>(0)?.into());
    Ok(InstanceRow {
        id,
        host: row.try_get(1)?,
        pid: row.try_get::<_, i32>(2)? as u32,
        version: row.try_get(3)?,
        started_at: row.try_get::<_, Time>(4)?.0,
        beat_at: row.try_get::<_, Time>(5)?.0,
        subscriptions: row.try_get::<_, Vec<i64>>(6)?.into_iter().map(SubscriptionId).collect(),
        report: serde_json::from_str(row.try_get(7)?).unwrap_or_default(),
        alive: held.contains(&id),
    })
}

/// Who works on a delivery, by three columns: the owner, since when, and its last sign of life.
pub(crate) fn claim_record(row: &Row, first: usize) -> Db<Option<ClaimRecord>> {
    let owner = row.try_get::<_, Option<i32>>(first)?.zip(row.try_get::<_, Option<Time>>(first + 1)?);
    let beat_at = row.try_get::<_, Option<Time>>(first + 2)?.map(|time| time.0);
    Ok(owner.map(|(owner, since)| ClaimRecord { instance: InstanceId(owner.into()), since: since.0, beat_at }))
}

/// The positions of an event by its id, in the log or kept aside; ids are not unique.
pub(crate) async fn positions_of(tx: &Transaction<'_>, id: Uuid) -> Db<Vec<Position>> {
    let rows = tx
        .query_typed(include_str!("sql/positions_of.sql"), &[(&id, Type::UUID), (&salted_position(id), Type::INT8)])
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
