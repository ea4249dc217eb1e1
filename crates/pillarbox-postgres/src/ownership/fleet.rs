use std::collections::HashSet;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::future::try_join4;
use pillarbox::Position;
use pillarbox::store::{Fleet, InstanceId, InstanceView, LaneRef, LaneView, Lock, Report, SubscriptionId};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::lanes::Missing;
use super::subscriptions::subscription_view;
use crate::connection::{BELL, Session};
use crate::error::Db;
use crate::types::Time;

/// What one look at the fleet brought.
pub(super) struct Look {
    /// This instance has a row.
    pub(super) alive: bool,
    pub(super) fleet: Fleet,
    /// The instances that hold their lock, and whether this session holds its own.
    pub(super) held: HashSet<InstanceId>,
    pub(super) own_lock: bool,
    pub(super) missing: Vec<Missing>,
    pub(super) kept_from: Position,
    pub(super) doorbell: bool,
    /// Many changes of what is dead or delayed are to be added up.
    pub(super) uncounted: bool,
    /// How long the commit took, if it was one that waits for the disk.
    pub(super) commit: Option<Duration>,
}

/// Beats, then looks at everything in one snapshot, then in a newer one at what retention has done; all in one round trip. Who
/// seizes a lane waits for a beat under way, and a beat for him: what is seen after it is the truth about its lanes.
pub(super) async fn look(control: &Session, me: InstanceId, class: i32, report: &Report, durable: bool) -> Db<Look> {
    let report = serde_json::to_string(report).expect("a report is JSON");
    let beat = control.statement(include_str!("../sql/beat.sql")).await?;
    let lanes = control.statement(include_str!("../sql/fleet_lanes.sql")).await?;
    let subscriptions = control.statement(include_str!("../sql/fleet_subscriptions.sql")).await?;
    let instances = control.statement(include_str!("../sql/fleet_instances.sql")).await?;
    let locks = control.statement(include_str!("../sql/instance_locks.sql")).await?;
    let anchors = control.statement(include_str!("../sql/own_anchors.sql")).await?;
    let after = control.statement(include_str!("../sql/after_look.sql")).await?;
    let (number, class) = (me.0 as i32, i64::from(class));
    let values: [&(dyn ToSql + Sync); 2] = [&number, &report];
    let commit = if durable { "on" } else { "off" };
    let commit = format!("set synchronous_commit = {commit}");
    let ((_, before), (beaten, committed), (_, lanes, subscriptions, instances), (locks, anchors, _, after)) =
        try_join4(
            timed(control.batch_execute(&commit)),
            timed(control.query_opt(&beat, &values)),
            try_join4(
                control.batch_execute("set synchronous_commit = off; begin isolation level repeatable read read only"),
                control.query(&lanes, &[]),
                control.query(&subscriptions, &[]),
                control.query(&instances, &[]),
            ),
            try_join4(
                control.query(&locks, &[&class]),
                control.query(&anchors, &[&me.0]),
                control.batch_execute("commit"),
                control.query_one(&after, &[]),
            ),
        )
        .await?;
    let (held, own_lock) = holders(&locks)?;
    let fleet = Fleet {
        instances: instances.iter().map(instance_view).collect::<Db<_>>()?,
        subscriptions: subscriptions.iter().map(subscription_view).collect::<Db<_>>()?,
        lanes: lanes.iter().map(lane_view).collect::<Db<_>>()?,
        time: after.try_get::<_, Time>(2)?.0,
    };
    Ok(Look {
        alive: beaten.is_some(),
        fleet,
        held,
        own_lock: own_lock.contains(&me),
        missing: anchors.iter().map(missing).collect::<Db<_>>()?,
        kept_from: after.try_get(0)?,
        doorbell: after.try_get(1)?,
        uncounted: after.try_get(3)?,
        commit: durable.then(|| committed.saturating_duration_since(before)),
    })
}

/// When an answer came.
async fn timed<T>(
    answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<(T, Instant), tokio_postgres::Error> {
    Ok((answer.await?, Instant::now()))
}

/// The instances that hold their lock, and those of them that are this session.
pub(super) fn holders(rows: &[Row]) -> Db<(HashSet<InstanceId>, HashSet<InstanceId>)> {
    let (mut held, mut own) = (HashSet::new(), HashSet::new());
    for row in rows {
        let id: i64 = row.try_get(0)?;
        if id != i64::from(BELL) {
            held.insert(InstanceId(id));
            if row.try_get(1)? {
                own.insert(InstanceId(id));
            }
        }
    }
    Ok((held, own))
}

fn instance_view(row: &Row) -> Db<InstanceView> {
    let subscriptions: Vec<i64> = row.try_get(2)?;
    Ok(InstanceView {
        id: InstanceId(row.try_get::<_, i32>(0)?.into()),
        beat: row.try_get(1)?,
        lock: Lock::Held,
        draining: serde_json::from_str::<Report>(row.try_get(3)?).is_ok_and(|report| report.draining),
        subscriptions: subscriptions.into_iter().map(SubscriptionId).collect(),
    })
}

fn lane_view(row: &Row) -> Db<LaneView> {
    let lane = LaneRef { subscription: SubscriptionId(row.try_get(0)?), lane: row.try_get::<_, i32>(1)? as u32 };
    let owner = row.try_get::<_, Option<i64>>(2)?.map(InstanceId);
    let takeovers = row.try_get::<_, i32>(5)? as u32;
    Ok(LaneView { lane, owner, epoch: row.try_get(3)?, revision: row.try_get(4)?, takeovers })
}

fn missing(row: &Row) -> Db<Missing> {
    let id: Option<Uuid> = row.try_get(1)?;
    Ok(((row.try_get(0)?, id.unwrap_or_default()), row.try_get(2)?))
}
