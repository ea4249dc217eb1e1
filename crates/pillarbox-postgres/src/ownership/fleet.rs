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
    let beat = control.statement(sql!(instance, "beat")).await?;
    let lanes = control.statement(sql!(cursor, "fleet")).await?;
    let subscriptions = control.statement(sql!(subscription, "fleet")).await?;
    let instances = control.statement(sql!(instance, "fleet")).await?;
    let locks = control.statement(sql!(instance, "locks")).await?;
    let anchors = control.statement(sql!(own_anchors, "own_anchors")).await?;
    let after = control.statement(sql!(meta, "after_look")).await?;
    let (number, class) = (me.0 as i32, i64::from(class));
    let values: [&(dyn ToSql + Sync); 2] = [&number, &report];
    let commit = if durable { sql!(session, "durable") } else { sql!(session, "relaxed") };
    let ((_, before), (beaten, committed), (_, lanes, subscriptions, instances), (locks, anchors, _, after)) =
        try_join4(
            timed(control.batch_execute(commit)),
            timed(control.query_opt(&beat, &values)),
            try_join4(
                control.batch_execute(sql!(session, "begin_relaxed_snapshot")),
                control.query(&lanes, &[]),
                control.query(&subscriptions, &[]),
                control.query(&instances, &[]),
            ),
            try_join4(
                control.query(&locks, &[&class]),
                control.query(&anchors, &[&me.0]),
                control.batch_execute(sql!(session, "commit")),
                control.query_one(&after, &[]),
            ),
        )
        .await?;
    let (held, own_lock) = holders(&locks)?;
    let fleet = Fleet {
        instances: instances.iter().map(instance_view).collect::<Db<_>>()?,
        subscriptions: subscriptions.iter().map(subscription_view).collect::<Db<_>>()?,
        lanes: lanes.iter().map(lane_view).collect::<Db<_>>()?,
        time: after.try_get::<_, Time>("now")?.0,
    };
    Ok(Look {
        alive: beaten.is_some(),
        fleet,
        held,
        own_lock: own_lock.contains(&me),
        missing: anchors.iter().map(missing).collect::<Db<_>>()?,
        kept_from: after.try_get("kept_from")?,
        doorbell: after.try_get("doorbell")?,
        uncounted: after.try_get("uncounted")?,
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
        let id: i64 = row.try_get("instance")?;
        if id != i64::from(BELL) {
            held.insert(InstanceId(id));
            if row.try_get("is_own")? {
                own.insert(InstanceId(id));
            }
        }
    }
    Ok((held, own))
}

fn instance_view(row: &Row) -> Db<InstanceView> {
    let subscriptions: Vec<i64> = row.try_get("subscriptions")?;
    Ok(InstanceView {
        id: InstanceId(row.try_get::<_, i32>("id")?.into()),
        beat: row.try_get("beat")?,
        lock: Lock::Held,
        draining: serde_json::from_str::<Report>(row.try_get("report")?).is_ok_and(|report| report.draining),
        subscriptions: subscriptions.into_iter().map(SubscriptionId).collect(),
    })
}

fn lane_view(row: &Row) -> Db<LaneView> {
    let lane = LaneRef {
        subscription: SubscriptionId(row.try_get("subscription")?),
        lane: row.try_get::<_, i32>("lane")? as u32,
    };
    let owner = row.try_get::<_, Option<i64>>("owner")?.map(InstanceId);
    let takeovers = row.try_get::<_, i32>("takeovers")? as u32;
    Ok(LaneView { lane, owner, epoch: row.try_get("epoch")?, revision: row.try_get("revision")?, takeovers })
}

fn missing(row: &Row) -> Db<Missing> {
    let id: Option<Uuid> = row.try_get("anchor_id")?;
    Ok(((row.try_get("anchor_position")?, id.unwrap_or_default()), row.try_get("id")?))
}
