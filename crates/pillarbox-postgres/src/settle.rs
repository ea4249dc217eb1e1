use std::collections::HashMap;

use pillarbox::Position;
use pillarbox::store::{
    AttemptError, DeliveryRow, ERRORS_KEPT_MAX, LaneRef, LaneWrite, RangeSet, Settlement, SubscriptionId,
};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::connection::Session;
use crate::doorbell::announce;
use crate::error::{Db, DbError};
use crate::queue;
use crate::types::{Time, multirange};

/// How long a row of `progress` grows before another begins: how exactly `show` can say when an event was settled.
const PROGRESS_SPAN_MS: f64 = 60_000.0;

/// What a settlement led to.
pub(crate) struct Settled {
    /// Which lanes were still at their epoch.
    pub(crate) answers: Vec<bool>,
    /// There may be new rows of queues.
    pub(crate) queued: bool,
}

/// A settlement may be large and the line slow: a transaction of which something is on its way does not stand still. The instance
/// that takes the lanes over ends it.
const BEGIN: &str = sql!(session, "begin_settlement");

/// Writes a settlement of instance `me` in one transaction. All of it is sent before anything is answered: the server needs to hear
/// nothing more of a relay that is frozen or cut off meanwhile, and never holds the lanes' locks for one.
pub(crate) async fn settle(session: &Session, settlement: &Settlement, me: Option<i32>) -> Db<Settled> {
    let statements = Statements::prepare(session).await?;
    let (client, lanes) = (&**session, settlement.lanes.as_slice());
    let sent = async {
        tokio::try_join!(
            // What is polled first is sent first.
            biased;
            command(client, BEGIN),
            fence(client, &statements.lock, settlement),
            check_horizon(client, &statements, lanes),
            write_deliveries(client, &statements, lanes),
            queue::put(client, &statements.queue, lanes, me),
            write_cursors(client, &statements, lanes),
            close_dead(client, &statements, &settlement.closed),
            announce_release(client, lanes),
            command(client, sql!(session, "commit")),
        )
    };
    let (_, answers, _, _, behind, ..) = match sent.await {
        Ok(sent) => sent,
        Err(error) => {
            // Only if something could not be sent at all is there still a transaction.
            let _ = session.batch_execute(sql!(session, "rollback")).await;
            return Err(above_horizon(client, error, lanes).await);
        }
    };
    let queued = behind.is_some();
    behind.unwrap_or_default().promote_or_leave(session).await;
    Ok(Settled { answers, queued })
}

async fn command(client: &Client, sql: &str) -> Db<()> {
    Ok(client.batch_execute(sql).await?)
}

/// Which lanes are still at their epoch, and stay there until the transaction ends. One whose attempts were announced and not counted, since
/// an operator came before, is loaded again like one that is lost.
pub(crate) async fn fence(client: &Client, lock: &Statement, settlement: &Settlement) -> Db<Vec<bool>> {
    let Lanes { subscriptions, lanes, epochs } = Lanes::of(settlement.lanes.iter());
    let rows = client.query(lock, &[&subscriptions, &lanes, &epochs]).await?;
    let lane = |row: &tokio_postgres::Row| {
        let subscription = SubscriptionId(row.try_get("subscription")?);
        Ok((LaneRef { subscription, lane: row.try_get::<_, i32>("lane")? as u32 }, row.try_get("revision")?))
    };
    let held: HashMap<LaneRef, i64> = rows.iter().map(lane).collect::<Db<_>>()?;
    let may = |write: &LaneWrite| {
        let revision = held.get(&write.lane);
        revision.is_some_and(|revision| *revision == write.revision || !write.announces())
    };
    Ok(settlement.lanes.iter().map(may).collect())
}

/// The instance that should have a lane that is given back takes it at once, and not when it next looks.
async fn announce_release(client: &Client, writes: &[LaneWrite]) -> Db<()> {
    if writes.iter().any(|write| write.release) {
        announce(client, "fleet").await?;
    }
    Ok(())
}

/// Columns that say which lane is written at which epoch.
struct Lanes {
    subscriptions: Vec<i64>,
    lanes: Vec<i32>,
    epochs: Vec<i64>,
}

impl Lanes {
    fn of<'a>(writes: impl Iterator<Item = &'a LaneWrite> + Clone) -> Self {
        Lanes {
            subscriptions: writes.clone().map(|write| write.lane.subscription.0).collect(),
            lanes: writes.clone().map(|write| write.lane.lane as i32).collect(),
            epochs: writes.map(|write| write.epoch).collect(),
        }
    }
}

/// Everything that a settlement may send, prepared before its transaction begins.
pub(crate) struct Statements {
    pub(crate) lock: Statement,
    horizon: Statement,
    cursor: Statement,
    progress: Statement,
    put: Statement,
    add: Statement,
    change: Statement,
    finish: Statement,
    pub(crate) queue: Statement,
    dead: Statement,
}

impl Statements {
    pub(crate) async fn prepare(session: &Session) -> Db<Self> {
        Ok(Statements {
            lock: session.statement(sql!(cursor, "lock")).await?,
            horizon: session.statement(sql!(cursor, "check_horizon")).await?,
            cursor: session.statement(sql!(cursor, "settle")).await?,
            progress: session.statement(sql!(progress, "advance")).await?,
            put: session.statement(sql!(delivery, "put")).await?,
            add: session.statement(sql!(delivery, "add")).await?,
            change: session.statement(sql!(delivery, "change")).await?,
            finish: session.statement(sql!(delivery, "finish")).await?,
            queue: queue::put_statement(session).await?,
            dead: session.statement(sql!(dead_range, "close")).await?,
        })
    }
}

/// Written, a cursor above the horizon would skip the events that get these positions next.
pub(crate) async fn check_horizon(client: &Client, statements: &Statements, writes: &[LaneWrite]) -> Db<()> {
    client.query(&statements.horizon, &[&highest(writes)]).await?;
    Ok(())
}

/// The highest position that a settlement says was read.
fn highest(writes: &[LaneWrite]) -> Position {
    let of = |write: &LaneWrite| write.cursor.settled.last().unwrap_or(0).max(write.cursor.floor);
    writes.iter().map(of).max().unwrap_or(0)
}

/// What a failed settlement means: of its statements, only the look at the horizon divides.
async fn above_horizon(client: &Client, error: DbError, writes: &[LaneWrite]) -> DbError {
    if error.code() != Some(&SqlState::DIVISION_BY_ZERO) {
        return error;
    }
    let highest = highest(writes);
    let horizon = client.query_one(sql!(event, "horizon"), &[]).await;
    match horizon.and_then(|row| row.try_get::<_, Position>(0)) {
        Ok(horizon) => DbError::not_itself(&format!(
            "position {highest} was read, and only those up to {horizon} have been handed out"
        )),
        Err(error) => error.into(),
    }
}

pub(crate) async fn write_cursors(client: &Client, statements: &Statements, writes: &[LaneWrite]) -> Db<()> {
    if writes.is_empty() {
        return Ok(());
    }
    let Lanes { subscriptions, lanes, epochs } = Lanes::of(writes.iter());
    let floors: Vec<i64> = writes.iter().map(|write| write.cursor.floor).collect();
    let settled: Vec<String> = writes.iter().map(|write| multirange(&write.cursor.settled)).collect();
    let anchors = || writes.iter().map(|write| write.cursor.anchor);
    let anchor_positions: Vec<Option<i64>> = anchors().map(|anchor| anchor.map(|anchor| anchor.0)).collect();
    let anchor_ids: Vec<Option<Uuid>> = anchors().map(|anchor| anchor.map(|anchor| anchor.1)).collect();
    let releases: Vec<bool> = writes.iter().map(|write| write.release).collect();
    let calm: Vec<bool> = writes.iter().map(|write| write.calm).collect();
    let cursor_values: [&(dyn ToSql + Sync); 9] =
        [&subscriptions, &lanes, &epochs, &floors, &settled, &anchor_positions, &anchor_ids, &releases, &calm];
    let progress_values: [&(dyn ToSql + Sync); 5] = [&subscriptions, &lanes, &epochs, &floors, &PROGRESS_SPAN_MS];
    tokio::try_join!(
        // While the floors are as they were.
        biased;
        client.execute(&statements.progress, &progress_values),
        client.execute(&statements.cursor, &cursor_values),
    )?;
    Ok(())
}

/// Puts, then changes, then finishes. Where an operator has changed deliveries since they were loaded, only those that
/// are put now are changed: what the operator said is newer than what the attempts in flight have to say.
pub(crate) async fn write_deliveries(client: &Client, statements: &Statements, writes: &[LaneWrite]) -> Db<()> {
    let (put, change) = merged(writes);
    tokio::try_join!(
        biased;
        put_rows(client, &statements.put, &put),
        put_rows(client, &statements.add, &put),
        change_rows(client, &statements.change, &change),
        finish_rows(client, &statements.finish, writes),
    )?;
    Ok(())
}

/// A delivery as a settlement leaves it, with the errors that are new.
struct Merged<'a> {
    write: &'a LaneWrite,
    delivery: &'a DeliveryRow,
    errors: Vec<&'a AttemptError>,
}

impl Merged<'_> {
    /// Written to the delivery, in place of those that it had.
    fn errors_alone(&self) -> String {
        with_errors("[]", self.errors.iter().copied())
    }
}

/// What is put, and what is changed. Several attempts may have failed since the last settlement, the first of them perhaps as it was
/// put: they are made one row, which has the last state and all errors.
fn merged(writes: &[LaneWrite]) -> (Vec<Merged<'_>>, Vec<Merged<'_>>) {
    let (mut put, mut change): (Vec<Merged<'_>>, Vec<Merged<'_>>) = (Vec::new(), Vec::new());
    for write in writes {
        let mut places: HashMap<Position, (bool, usize)> = HashMap::new();
        for delivery in &write.put {
            places.insert(delivery.position, (true, put.len()));
            put.push(Merged { write, delivery, errors: Vec::new() });
        }
        for (delivery, error) in &write.change {
            let (is_put, place) = *places.entry(delivery.position).or_insert((false, change.len()));
            let rows = if is_put { &mut put } else { &mut change };
            if place == rows.len() {
                rows.push(Merged { write, delivery, errors: Vec::new() });
            }
            rows[place].delivery = delivery;
            rows[place].errors.extend(error);
        }
    }
    (put, change)
}

/// Inserts deliveries.
async fn put_rows(client: &Client, statement: &Statement, rows: &[Merged<'_>]) -> Db<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let Lanes { subscriptions, lanes, epochs } = Lanes::of(rows.iter().map(|row| row.write));
    let revisions: Vec<i64> = rows.iter().map(|row| row.write.revision).collect();
    let positions: Vec<i64> = rows.iter().map(|row| row.delivery.position).collect();
    let arrivals: Vec<i64> = rows.iter().map(|row| row.delivery.arrival).collect();
    let keys: Vec<Option<&str>> = rows.iter().map(|row| row.delivery.key.as_deref()).collect();
    let states: Vec<&str> = rows.iter().map(|row| row.delivery.state.name()).collect();
    let attempts: Vec<i32> = rows.iter().map(|row| row.delivery.attempts as i32).collect();
    let due_at: Vec<Time> = rows.iter().map(|row| Time(row.delivery.due_at)).collect();
    let since: Vec<Time> = rows.iter().map(|row| Time(row.delivery.since)).collect();
    let errors: Vec<String> = rows.iter().map(Merged::errors_alone).collect();
    let values: [&(dyn ToSql + Sync); 12] = [
        &subscriptions,
        &positions,
        &lanes,
        &arrivals,
        &keys,
        &states,
        &attempts,
        &due_at,
        &since,
        &errors,
        &epochs,
        &revisions,
    ];
    client.execute(statement, &values).await?;
    Ok(())
}

async fn change_rows(client: &Client, statement: &Statement, rows: &[Merged<'_>]) -> Db<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let Lanes { subscriptions, lanes, epochs } = Lanes::of(rows.iter().map(|row| row.write));
    let revisions: Vec<i64> = rows.iter().map(|row| row.write.revision).collect();
    let positions: Vec<i64> = rows.iter().map(|row| row.delivery.position).collect();
    let arrivals: Vec<i64> = rows.iter().map(|row| row.delivery.arrival).collect();
    let states: Vec<&str> = rows.iter().map(|row| row.delivery.state.name()).collect();
    let attempts: Vec<i32> = rows.iter().map(|row| row.delivery.attempts as i32).collect();
    let due_at: Vec<Time> = rows.iter().map(|row| Time(row.delivery.due_at)).collect();
    let since: Vec<Time> = rows.iter().map(|row| Time(row.delivery.since)).collect();
    let errors: Vec<Option<String>> =
        rows.iter().map(|row| (!row.errors.is_empty()).then(|| row.errors_alone())).collect();
    let kept = ERRORS_KEPT_MAX as i64;
    let values: [&(dyn ToSql + Sync); 12] = [
        &subscriptions,
        &lanes,
        &epochs,
        &revisions,
        &positions,
        &arrivals,
        &states,
        &attempts,
        &due_at,
        &since,
        &errors,
        &kept,
    ];
    client.execute(statement, &values).await?;
    Ok(())
}

async fn finish_rows(client: &Client, statement: &Statement, writes: &[LaneWrite]) -> Db<()> {
    let rows = || writes.iter().flat_map(|write| write.finish.iter().map(move |position| (write, *position)));
    if rows().next().is_none() {
        return Ok(());
    }
    let Lanes { subscriptions, lanes, epochs } = Lanes::of(rows().map(|(write, _)| write));
    let positions: Vec<Position> = rows().map(|(_, position)| position).collect();
    client.execute(statement, &[&subscriptions, &lanes, &epochs, &positions]).await?;
    Ok(())
}

/// The stored errors with some more, the oldest beyond the limit left out.
pub(crate) fn with_errors<'a>(kept: &str, more: impl IntoIterator<Item = &'a AttemptError>) -> String {
    AttemptError::to_store(AttemptError::stored(kept).into_iter().chain(more.into_iter().cloned()))
}

pub(crate) async fn close_dead(client: &Client, statements: &Statements, dead: &RangeSet) -> Db<()> {
    if dead.is_empty() {
        return Ok(());
    }
    let low: Vec<Position> = dead.iter().map(|range| *range.start()).collect();
    let high: Vec<Position> = dead.iter().map(|range| *range.end()).collect();
    client.execute(&statements.dead, &[&low, &high]).await?;
    Ok(())
}
