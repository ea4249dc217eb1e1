use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::RetryPolicy;
use pillarbox::admin::State;
use pillarbox::store::{
    DeliveryRow, Failed, InstanceId, RecoverRequest, Recovered, RecoveredAttempt, RecoveryCause, SubscriptionId,
    recovered,
};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Transaction};

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::ownership::name_endings;
use crate::settle::with_errors;
use crate::types::Time;

/// How long a recovery waits for those who end claims at that moment; what they leave then is found by the next sweep.
const END_PATIENCE: &str = sql!(session, "end_patience");

/// Takes claims from those who will not end them any more.
pub(crate) async fn recover(session: &mut Session, request: &RecoverRequest) -> Db<Recovered> {
    let owners: Vec<i32> = request.ended.iter().map(|(owner, ..)| owner.0 as i32).collect();
    let causes: Vec<&str> = request.ended.iter().map(|(_, cause, _)| cause.name()).collect();
    let beats: Vec<Option<i64>> = request.ended.iter().map(|(.., beat)| *beat).collect();
    if beats.iter().any(Option::is_some) {
        // A frozen one may be in the middle of a transaction that holds its claims.
        let end = session.statement(sql!(queue, "recover_end")).await?;
        session.query(&end, &[&owners, &beats, &name_endings(session.config())]).await?;
    }
    let silent: Vec<i32> = request.silent.iter().map(|(owner, ..)| owner.0 as i32).collect();
    let silent_beats: Vec<i64> = request.silent.iter().map(|(_, beat, _)| *beat).collect();
    let silent_ms: Vec<i64> =
        request.silent.iter().map(|(.., time)| i64::try_from(time.as_millis()).unwrap_or(i64::MAX)).collect();
    let hold = session.statement(sql!(queue, "recover_hold")).await?;
    let select = session.statement(sql!(queue, "recover")).await?;
    let mut tx = session.begin().await?;
    tx.query(&hold, &[&owners, &silent, &silent_ms]).await?;
    if !owners.is_empty() {
        wait_for_ends(&mut tx, &owners).await?;
    }
    let values: [&(dyn ToSql + Sync); 7] =
        [&owners, &causes, &beats, &request.sweep, &silent, &silent_beats, &silent_ms];
    let rows = tx.query(&select, &values).await?;
    let mut keys = Keys::default();
    let recovered = take_back(&tx, &rows, &mut keys).await?;
    if request.sweep {
        tx.execute(sql!(queue, "note_sweep"), &[]).await?;
    }
    tx.commit().await?;
    keys.promote_or_leave(session).await;
    Ok(recovered)
}

/// Waits for a moment until no claims of these owners are being ended: what they sent last may still be carried out.
async fn wait_for_ends(tx: &mut Transaction<'_>, owners: &[i32]) -> Db<()> {
    let point = tx.savepoint("ends").await?;
    point.batch_execute(END_PATIENCE).await?;
    let ended = point.query(sql!(queue, "recover_wait"), &[&owners]).await;
    // Waiting was all; the time limit goes with it.
    point.rollback().await?;
    match ended {
        Err(error) if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Takes the claims that an operator means: of a subscription, of an instance, of owners that have been silent for so long.
pub(crate) async fn recover_by_operator(
    tx: &Transaction<'_>,
    subscription: Option<SubscriptionId>,
    instance: Option<InstanceId>,
    silent_for: Duration,
    keys: &mut Keys,
) -> Db<Recovered> {
    let silent_for = i64::try_from(silent_for.as_millis()).unwrap_or(i64::MAX);
    let (subscription, instance) = (subscription.map(|id| id.0), instance.map(|id| id.0));
    let values: [&(dyn ToSql + Sync); 3] = [&subscription, &instance, &silent_for];
    let rows = tx.query(sql!(queue, "recover_by_operator"), &values).await?;
    take_back(tx, &rows, keys).await
}

/// What the rows of `recover` in `sql/queue.sql` become, written and counted. The keys of those that are dead are noted.
async fn take_back(tx: &Transaction<'_>, rows: &[Row], keys: &mut Keys) -> Db<Recovered> {
    if rows.is_empty() {
        return Ok(Recovered::default());
    }
    let mut counts: BTreeMap<(SubscriptionId, RecoveryCause), u64> = BTreeMap::new();
    let (mut subscriptions, mut positions, mut states) = (Vec::new(), Vec::new(), Vec::new());
    let (mut attempts, mut due_at, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    let mut ended = Vec::with_capacity(rows.len());
    for row in rows {
        let subscription = SubscriptionId(row.try_get("subscription")?);
        let cause = cause_of(row.try_get("cause")?);
        let delivery = delivery_of(row)?;
        let policy: RetryPolicy = serde_json::from_str(row.try_get("retry")?).unwrap_or(RetryPolicy::handler());
        let failed: Failed = recovered(&policy, &delivery, cause, row.try_get::<_, Time>("now")?.0);
        *counts.entry((subscription, cause)).or_default() += 1;
        if failed.state == State::Dead {
            keys.note(subscription.0, delivery.key.as_deref().map(Into::into));
        }
        subscriptions.push(subscription.0);
        positions.push(delivery.position);
        states.push(failed.state.name());
        attempts.push(failed.attempts as i32);
        due_at.push(Time(failed.due_at));
        errors.push(with_errors(row.try_get("errors")?, [&failed.error]));
        ended.push(RecoveredAttempt::new(subscription, &delivery, failed));
    }
    let values: [&(dyn ToSql + Sync); 6] = [&subscriptions, &positions, &states, &attempts, &due_at, &errors];
    tx.execute(sql!(queue, "take_back"), &values).await?;
    count(tx, &counts).await?;
    let claims = counts.into_iter().map(|((subscription, cause), count)| (subscription, cause, count)).collect();
    Ok(Recovered { claims, attempts: ended })
}

async fn count(tx: &Transaction<'_>, counts: &BTreeMap<(SubscriptionId, RecoveryCause), u64>) -> Db<()> {
    let subscriptions: Vec<i64> = counts.keys().map(|(subscription, _)| subscription.0).collect();
    let causes: Vec<&str> = counts.keys().map(|(_, cause)| cause.name()).collect();
    let numbers: Vec<i64> = counts.values().map(|count| *count as i64).collect();
    tx.execute(sql!(queue, "count_recovered"), &[&subscriptions, &causes, &numbers]).await?;
    Ok(())
}

fn delivery_of(row: &Row) -> Db<DeliveryRow> {
    Ok(DeliveryRow {
        position: row.try_get("position")?,
        key: row.try_get::<_, Option<&str>>("key")?.map(Into::into),
        arrival: 0,
        state: State::Processing,
        attempts: row.try_get::<_, i32>("attempts")? as u32,
        due_at: row.try_get::<_, Time>("due_at")?.0,
        since: row.try_get::<_, Time>("since")?.0,
    })
}

/// The cause of this name.
pub(crate) fn cause_of(name: &str) -> RecoveryCause {
    let others = [RecoveryCause::Lease, RecoveryCause::Timeout, RecoveryCause::Operator];
    others.into_iter().find(|cause| cause.name() == name).unwrap_or(RecoveryCause::Crash)
}
