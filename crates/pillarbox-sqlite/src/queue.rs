use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use pillarbox::admin::State;
use pillarbox::store::{
    AttemptError, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, DeliveryRow, Failed, InstanceId,
    KEYS_TOLD_MAX, LaneRef, PAGE_BYTES_MAX, Queued, SUSPECT_AFTER, SubscriptionId, WAITING_COUNTED, recount_after,
};
use pillarbox::{Event, Position, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use crate::connection::{meta_number, raise_queue_revision, read, write};
use crate::error::Db;
use crate::ownership::{Writer, delivery_of, require_row};
use crate::reader::Decoder;
use crate::settle::add_error;

/// How many delayed deliveries that are due take their place with one claim; the next claim finds the others.
const DUE_AT_ONCE_MAX: i64 = 1_000;

impl Writer {
    /// Claims what is to be done next. A claim that finds nothing writes nothing, and so waits for no other connection.
    ///
    /// The events need not be made durable: a row is made of an event that a poll has returned, or by an operator's change,
    /// whose commit syncs all that was committed before.
    pub(crate) fn claim(&mut self, requests: &[ClaimRequest]) -> Db<Vec<Claims>> {
        let me = self.me()?;
        let now = Timestamp::now();
        let (found, mut revision) = read(&self.relaxed, |tx| {
            require_row(tx, me)?;
            Ok((is_anything_ready(tx, requests, now)?, meta_number(tx, "queue_revision")?))
        })?;
        let mut claimed = Vec::new();
        if found {
            let decoder = &mut self.decoder;
            (claimed, revision) = write(&self.relaxed, |tx| {
                require_row(tx, me)?;
                let mut claims = Vec::with_capacity(requests.len());
                for request in requests {
                    place_due(tx, request.subscription, now)?;
                    claims.push(claim(tx, me, request, decoder, now)?);
                }
                Ok((claims, meta_number(tx, "queue_revision")?))
            })?;
        }
        claimed.resize_with(requests.len(), Vec::new);
        // With the lock of the writers given back: counting may take longer than claiming.
        let counted = &mut self.rows_counted;
        let answers = read(&self.relaxed, |tx| {
            let answers =
                requests.iter().zip(claimed).map(|(request, claimed)| figures(tx, request, claimed, now, counted));
            answers.collect()
        })?;
        self.bell.claimed(requests, revision);
        Ok(answers)
    }

    /// Ends claims; false for what was taken away meanwhile.
    pub(crate) fn finish(&self, ends: &[ClaimEnd]) -> Db<Vec<bool>> {
        let me = self.me()?;
        let now = Timestamp::now();
        let (answers, revision) = write(&self.relaxed, |tx| {
            let answers = ends.iter().map(|end| end_claim(tx, me, end, now)).collect::<Db<Vec<_>>>()?;
            // Whoever ends a claim has room for the next of its key; whoever gives one back may not.
            let given_back = ends.iter().zip(&answers).any(|(end, written)| *written && end.fate == ClaimFate::Back);
            Ok((answers, given_back.then(|| raise_queue_revision(tx)).transpose()?))
        })?;
        revision.into_iter().for_each(|revision| self.bell.filled(revision));
        Ok(answers)
    }
}

/// Whether there may be something to claim, to be told again, or to put in its place.
fn is_anything_ready(tx: &Connection, requests: &[ClaimRequest], now: Timestamp) -> Db<bool> {
    let mut ready = tx.prepare_cached(sql!(queue, "is_ready"))?;
    let mut due = tx.prepare_cached(sql!(queue, "is_due"))?;
    for request in requests {
        let values = [request.subscription.0, now.0];
        if request.again || due.exists(values)? || (request.limit > 0 && ready.exists(values)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Delayed deliveries that are due take their place behind what their key has.
fn place_due(tx: &Transaction<'_>, subscription: SubscriptionId, now: Timestamp) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(queue, "due"))?;
    let rows = statement.query_map(params![subscription.0, now.0, DUE_AT_ONCE_MAX], |row| {
        Ok((row.get("position")?, row.get("key")?, row.get("lane")?, Timestamp(row.get("due_at")?)))
    })?;
    let due: Vec<(Position, Option<String>, u32, Timestamp)> = rows.collect::<Result<_, _>>()?;
    let mut place = tx.prepare_cached(sql!(queue, "place"))?;
    for (position, key, lane, due_at) in due {
        place.execute(params![subscription.0, position, lane])?;
        promote(tx, subscription, position, key.as_deref(), due_at)?;
    }
    Ok(())
}

/// Claims up to the limit, and no more than a page of payload; or tells what the same request has claimed before.
fn claim(
    tx: &Transaction<'_>,
    me: InstanceId,
    request: &ClaimRequest,
    decoder: &mut Decoder,
    now: Timestamp,
) -> Db<Vec<Claimed>> {
    let before = if request.again { claimed_before(tx, me, request)? } else { Vec::new() };
    let is_new = before.is_empty();
    let found = if is_new { next(tx, request, now)? } else { before };
    let mut put = tx.prepare_cached(sql!(queue, "claim"))?;
    let mut claims = Vec::with_capacity(found.len());
    let mut bytes = 0;
    for mut claimed in found {
        let (position, claim) = (claimed.delivery.position, claimed.claim.0);
        if is_new && bytes >= PAGE_BYTES_MAX {
            break;
        }
        if is_new {
            put.execute(params![request.subscription.0, position, me.0, claim, now.0])?;
        }
        claimed.event = event(tx, position, decoder)?;
        bytes += claimed.event.as_ref().map_or(0, |event| event.size());
        claims.push(claimed);
    }
    Ok(claims)
}

/// What may be claimed, in order, without the events.
fn next(tx: &Transaction<'_>, request: &ClaimRequest, now: Timestamp) -> Db<Vec<Claimed>> {
    let mut statement = tx.prepare_cached(sql!(queue, "claimable"))?;
    let mut rows = statement.query(params![request.subscription.0, now.0, SUSPECT_AFTER, request.suspect])?;
    let mut found = Vec::new();
    let mut suspects = 0;
    while found.len() < request.limit
        && let Some(row) = rows.next()?
    {
        let claimed = claimed_of(row, ClaimId(request.first.0 + found.len() as i64))?;
        suspects += usize::from(claimed.suspect);
        if !claimed.suspect || suspects == 1 {
            found.push(claimed);
        }
    }
    Ok(found)
}

/// What the same request has claimed before, without the events.
fn claimed_before(tx: &Transaction<'_>, me: InstanceId, request: &ClaimRequest) -> Db<Vec<Claimed>> {
    let end = i64::try_from(request.limit).map_or(i64::MAX, |limit| request.first.0.saturating_add(limit));
    let mut statement = tx.prepare_cached(sql!(queue, "claimed_before"))?;
    let rows = statement.query_map(params![me.0, request.subscription.0, request.first.0, end], |row| {
        claimed_of(row, ClaimId(row.get("claim")?))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// A claim of a row with the columns of a delivery, then `crashes`.
fn claimed_of(row: &Row<'_>, claim: ClaimId) -> rusqlite::Result<Claimed> {
    let delivery = DeliveryRow { state: State::Processing, ..delivery_of(row)? };
    Ok(Claimed { claim, delivery, event: None, suspect: row.get::<_, u32>("crashes")? >= SUSPECT_AFTER })
}

/// An event, from the log or kept aside.
fn event(tx: &Transaction<'_>, position: Position, decoder: &mut Decoder) -> Db<Option<Arc<Event>>> {
    let mut statement = tx.prepare_cached(sql!(event, "fetch"))?;
    let mut rows = statement.query([position])?;
    rows.next()?.map(|row| Ok(Arc::new(decoder.event(row)?))).transpose()
}

/// What is told with the claims.
fn figures(
    tx: &Connection,
    request: &ClaimRequest,
    claimed: Vec<Claimed>,
    now: Timestamp,
    counted: &mut RowsCounted,
) -> Db<Claims> {
    let subscription = request.subscription.0;
    let most = [subscription, now.0, WAITING_COUNTED as i64];
    let waiting: i64 = tx.prepare_cached(sql!(queue, "waiting"))?.query_row(most, |row| row.get(0))?;
    let next_due: Option<i64> =
        tx.prepare_cached(sql!(queue, "next_due"))?.query_row([subscription, now.0], |row| row.get(0))?;
    let (keys, rows) = match &request.tell {
        Some(after) => (Some(keys(tx, subscription, after)?), Some(rows(tx, subscription, counted)?)),
        None => (None, None),
    };
    Ok(Claims { claimed, waiting: waiting as usize, next_due: next_due.map(Timestamp), keys, rows })
}

/// The next keys with a row.
fn keys(tx: &Connection, subscription: i64, after: &str) -> Db<Vec<Box<str>>> {
    let mut statement = tx.prepare_cached(sql!(queue, "keys"))?;
    let rows =
        statement.query_map(params![subscription, after, KEYS_TOLD_MAX as i64], |row| row.get::<_, String>(0))?;
    Ok(rows.map(|key| key.map(Into::into)).collect::<Result<Vec<_>, _>>()?)
}

/// How many rows each queue had, and when they were counted.
pub(crate) type RowsCounted = HashMap<i64, (u64, Instant)>;

/// How many deliveries wait for their turn or are worked on, or did a while ago. What is dead or delayed waits for nothing of the kind,
/// however much there is of it.
fn rows(tx: &Connection, subscription: i64, counted: &mut RowsCounted) -> Db<u64> {
    if let Some((rows, at)) = counted.get(&subscription)
        && at.elapsed() < recount_after(*rows)
    {
        return Ok(*rows);
    }
    let rows = tx.prepare_cached(sql!(queue, "rows"))?.query_row([subscription], |row| row.get::<_, i64>(0))? as u64;
    counted.insert(subscription, (rows, Instant::now()));
    Ok(rows)
}

/// Ends a claim; false if it is not `owner`'s any more. Then it is the turn of whatever is the key's next.
pub(crate) fn end_claim(tx: &Transaction<'_>, owner: InstanceId, end: &ClaimEnd, now: Timestamp) -> Db<bool> {
    let (subscription, position, claim) = (end.subscription.0, end.position, end.claim.0);
    let fence = params![subscription, position, owner.0, claim];
    let key = |row: &Row<'_>| row.get::<_, Option<String>>(0);
    let ended = match &end.fate {
        ClaimFate::Done => tx.prepare_cached(sql!(queue, "end_done"))?.query_row(fence, key),
        ClaimFate::Back => {
            let values = params![subscription, position, owner.0, claim, now.0];
            tx.prepare_cached(sql!(queue, "end_back"))?.query_row(values, key)
        }
        ClaimFate::Failed(Failed { state, attempts, due_at, .. }) => {
            let values = params![subscription, position, owner.0, claim, state.name(), attempts, due_at.0, now.0];
            tx.prepare_cached(sql!(queue, "end_failed"))?.query_row(values, key)
        }
    };
    let Some(key) = ended.optional()? else { return Ok(false) };
    if let ClaimFate::Failed(failed) = &end.fate {
        add_error(tx, end.subscription, position, &failed.error)?;
    }
    promote(tx, end.subscription, position, key.as_deref(), now)?;
    Ok(true)
}

/// Makes it the turn of a key's first delivery, or of one without a key, since `now`. There is one writer at a time: a transaction that ends
/// a delivery or puts one where others are promotes in the same transaction, and nothing is ever left behind.
pub(crate) fn promote(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    position: Position,
    key: Option<&str>,
    now: Timestamp,
) -> Db<()> {
    match key {
        Some(key) => {
            let mut statement = tx.prepare_cached(sql!(queue, "promote"))?;
            statement.execute(params![subscription.0, key, now.0])?;
        }
        None => {
            let mut statement = tx.prepare_cached(sql!(queue, "promote_unkeyed"))?;
            statement.execute(params![subscription.0, position, now.0])?;
        }
    }
    Ok(())
}

/// Finds out again which delivery is next, after an operator has changed a delivery of a queue.
pub(crate) fn arrange(
    tx: &Transaction<'_>,
    subscription: SubscriptionId,
    position: Position,
    key: Option<&str>,
) -> Db<()> {
    tx.prepare_cached(sql!(queue, "unready"))?.execute(params![subscription.0, key])?;
    promote(tx, subscription, position, key, Timestamp::now())
}

/// The same for all deliveries of a queue.
pub(crate) fn arrange_all(tx: &Transaction<'_>, subscription: SubscriptionId) -> Db<()> {
    let mut statement = tx.prepare_cached(sql!(queue, "delivery_of_each_key"))?;
    let rows = statement.query_map([subscription.0], |row| Ok((row.get("position")?, row.get("key")?)))?;
    let deliveries: Vec<(Position, Option<String>)> = rows.collect::<Result<_, _>>()?;
    deliveries.iter().try_for_each(|(position, key)| arrange(tx, subscription, *position, key.as_deref()))
}

/// Writes rows that instances compete for, behind those of their keys; whether others can claim some of them now.
pub(crate) fn put_queued(tx: &Transaction<'_>, me: Option<InstanceId>, lane: LaneRef, queue: &[&Queued]) -> Db<bool> {
    if queue.is_empty() {
        return Ok(false);
    }
    let now = Timestamp::now();
    let last: i64 = tx
        .prepare_cached(sql!(delivery, "last_arrival"))?
        .query_row(params![lane.subscription.0, lane.lane], |row| row.get(0))?;
    let mut put = tx.prepare_cached(sql!(queue, "put"))?;
    let mut claimable = false;
    for (arrival, Queued { delivery, claim, error }) in (last + 1..).zip(queue) {
        let values = params![
            lane.subscription.0,
            delivery.position,
            lane.lane,
            arrival,
            delivery.key,
            delivery.state.name(),
            delivery.attempts,
            delivery.due_at.0,
            delivery.since.0,
            now.0,
            AttemptError::to_store(error.clone()),
            claim.and(me).map(|me| me.0),
            claim.map(|claim| claim.0),
        ];
        let ready_at = put.query_row(values, |row| row.get::<_, Option<i64>>(0)).optional()?.flatten();
        claimable |= ready_at.is_some_and(|ready_at| ready_at <= now.0);
    }
    Ok(claimable)
}
