use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::store::{
    ClaimEnd, ClaimFate, ClaimId, DeliveryRow, InstanceId, RecoverRequest, Recovered, RecoveredAttempt, RecoveryCause,
    SubscriptionId, recovered,
};
use pillarbox::{Position, RetryPolicy, Timestamp};
use rusqlite::{Row, Transaction, params};

use crate::connection::{raise_queue_revision, set_meta, write};
use crate::error::Db;
use crate::ownership::{Writer, delivery_of};
use crate::queue::end_claim;

/// A claim, with what is known of its owner.
pub(crate) struct Held {
    pub(crate) subscription: SubscriptionId,
    pub(crate) owner: InstanceId,
    claim: ClaimId,
    delivery: DeliveryRow,
    policy: String,
    timeout: Duration,
    /// How often the owner has beaten, and when last; None: it has no row any more.
    beat: Option<(i64, Timestamp)>,
}

/// How many claims were recovered, by subscription and cause.
type Counts = BTreeMap<(SubscriptionId, RecoveryCause), u64>;

/// The same, with the attempts that ended so.
type Recoveries = (Counts, Vec<RecoveredAttempt>);

impl Writer {
    /// Takes claims from those who will not end them any more.
    pub(crate) fn recover(&self, request: &RecoverRequest) -> Db<Recovered> {
        let me = self.me()?;
        let now = Timestamp::now();
        let (counts, attempts, revision) = write(&self.durable, |tx| {
            let (counts, attempts) = recover(tx, now, |held| cause(request, me, held))?;
            if request.sweep {
                set_meta(tx, "recovery_at", now.0)?;
            }
            let revision = (!counts.is_empty()).then(|| raise_queue_revision(tx)).transpose()?;
            Ok((counts, attempts, revision))
        })?;
        revision.into_iter().for_each(|revision| self.bell.filled(revision));
        let claims = counts.into_iter().map(|((subscription, cause), count)| (subscription, cause, count)).collect();
        Ok(Recovered { claims, attempts })
    }
}

/// Why a claim is recovered, if it is.
fn cause(request: &RecoverRequest, me: InstanceId, held: &Held) -> Option<RecoveryCause> {
    let named = request.ended.iter().find(|(dead, ..)| *dead == held.owner);
    if let Some((_, cause, beat)) = named {
        let lives =
            *cause == RecoveryCause::Lease && held.beat.is_some_and(|(now, _)| beat.is_some_and(|then| now != then));
        return (!lives).then_some(*cause);
    }
    match held.beat {
        _ if !request.sweep => None,
        None => Some(RecoveryCause::Crash),
        // Whoever looks lives, however long it slept.
        Some(_) if held.owner == me => None,
        Some((beat, _)) => {
            let mut silent = request.silent.iter();
            let found =
                silent.any(|(owner, seen, time)| *owner == held.owner && *seen == beat && *time >= held.timeout);
            found.then_some(RecoveryCause::Timeout)
        }
    }
}

impl Held {
    /// Whether the owner has given no sign of life for so long.
    pub(crate) fn is_silent_for(&self, time: Duration, now: Timestamp) -> bool {
        self.beat.is_none_or(|(_, at)| now.since(at) >= time)
    }

    fn of(row: &Row<'_>) -> rusqlite::Result<Held> {
        let (beat, beat_at): (Option<i64>, Option<i64>) = (row.get("beat")?, row.get("beat_at")?);
        Ok(Held {
            subscription: SubscriptionId(row.get("subscription")?),
            owner: InstanceId(row.get("owner")?),
            claim: ClaimId(row.get("claim")?),
            delivery: delivery_of(row)?,
            policy: row.get("retry")?,
            timeout: Duration::from_millis(row.get::<_, i64>("processing_timeout_ms")?.max(0) as u64),
            beat: beat.zip(beat_at.map(Timestamp)),
        })
    }
}

/// Takes the claims for which there is a cause from their owners, and counts and names them.
pub(crate) fn recover(
    tx: &Transaction<'_>,
    now: Timestamp,
    cause: impl Fn(&Held) -> Option<RecoveryCause>,
) -> Db<Recoveries> {
    let mut statement = tx.prepare_cached(sql!(queue, "held"))?;
    let claims = statement.query_map([], Held::of)?.collect::<Result<Vec<_>, _>>()?;
    let mut crashed = tx.prepare_cached(sql!(queue, "count_crash"))?;
    let (mut counts, mut attempts) = (Counts::new(), Vec::new());
    for (held, cause) in claims.iter().filter_map(|held| Some((held, cause(held)?))) {
        // A policy that cannot be read is that of functions: better too few attempts than none.
        let policy = serde_json::from_str(&held.policy).unwrap_or(RetryPolicy::handler());
        let failed = recovered(&policy, &held.delivery, cause, now);
        attempts.push(RecoveredAttempt::new(held.subscription, &held.delivery, failed.clone()));
        let fate = ClaimFate::Failed(failed);
        let position = held.delivery.position;
        end_claim(
            tx,
            held.owner,
            &ClaimEnd { subscription: held.subscription, position, claim: held.claim, fate },
            now,
        )?;
        crashed.execute(params![held.subscription.0, position])?;
        *counts.entry((held.subscription, cause)).or_default() += 1;
    }
    let mut statement = tx.prepare_cached(sql!(queue, "count_recovered"))?;
    for ((subscription, cause), count) in &counts {
        statement.execute(params![subscription.0, cause.name(), *count as i64, now.0])?;
    }
    Ok((counts, attempts))
}

/// Gives the claims of an instance back that has ended in order: no attempt is counted. Whether there were any.
pub(crate) fn give_back(tx: &Transaction<'_>, owner: InstanceId) -> Db<bool> {
    let mut statement = tx.prepare_cached(sql!(queue, "claims_of"))?;
    let rows = statement.query_map([owner.0], |row| {
        Ok((SubscriptionId(row.get("subscription")?), row.get::<_, Position>("position")?, ClaimId(row.get("claim")?)))
    })?;
    let claims = rows.collect::<Result<Vec<_>, _>>()?;
    for (subscription, position, claim) in &claims {
        let end = ClaimEnd { subscription: *subscription, position: *position, claim: *claim, fate: ClaimFate::Back };
        end_claim(tx, owner, &end, Timestamp::now())?;
    }
    Ok(!claims.is_empty())
}
