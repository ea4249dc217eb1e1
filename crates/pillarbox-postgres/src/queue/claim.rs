use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{try_join_all, try_join3};
use pillarbox::{
    ClaimId, ClaimRequest, Claimed, Claims, Delivery, KEYS_TOLD_MAX, SUSPECT_AFTER, State, SubscriptionId, Timestamp,
    WAITING_COUNTED,
};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::reader::Decoder;
use crate::types::Time;

/// How often a subscription's rows are looked through from the oldest on, and its keys for heads that nobody has promoted.
const WHOLE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Between two of those, how far before the oldest row that could be claimed last time is looked: a settlement may have been under way
/// for so long.
const LOOK_BACK: Duration = Duration::from_secs(1);

/// So many rows that wait are counted with every claim; where there are more, all of them are every [`COUNT_INTERVAL`].
const COUNTED_EACH_TIME: usize = 1_000;
const COUNT_INTERVAL: Duration = Duration::from_millis(100);

/// How many rows that were delayed and are due take their place with one claim; the next one finds the others.
const PLACED_MAX: i32 = 1_000;

/// After a count of a subscription's rows that took too long, none is tried for this time.
const COUNT_REST: Duration = Duration::from_secs(60);

/// How many keys are looked at at once for heads that nobody has promoted.
const MENDED_AT_ONCE: i32 = 1_000;

/// How many rows of each kind are read at once for their keys.
const KEY_ROWS_READ_MAX: i64 = 10_000;

/// Before every time.
const ALWAYS: Timestamp = Timestamp(i64::MIN);

/// Before every key, which has at least one byte.
const FIRST_KEY: &str = "";

/// Claims rows of queues, and remembers where in a queue it is.
pub(crate) struct Claiming {
    decoder: Decoder,
    places: HashMap<SubscriptionId, Place>,
    /// At most [`PLACED_MAX`]; less after a claim that took too long.
    placed_max: i32,
    /// How many rows are claimed at once at most, whatever is asked for: less after a claim that took too long, as one of large events
    /// may.
    claimed_max: i32,
    /// How many rows of each kind are read at once for their keys: at most [`KEY_ROWS_READ_MAX`].
    key_rows_max: i64,
}

impl Default for Claiming {
    fn default() -> Self {
        Claiming {
            decoder: Decoder::default(),
            places: HashMap::new(),
            placed_max: PLACED_MAX,
            claimed_max: i32::MAX,
            key_rows_max: KEY_ROWS_READ_MAX,
        }
    }
}

/// What was seen of a subscription's queue.
#[derive(Default)]
struct Place {
    /// Nothing that became ready before can be claimed, but for what [`LOOK_BACK`] says.
    ready_since: Option<Timestamp>,
    looked_at: Option<Instant>,
    /// How many rows waited, and when they were counted.
    counted: Option<(usize, Instant)>,
    /// How many rows there were, and when they were counted.
    rows: Option<(u64, Instant)>,
    /// When counting them took too long.
    count_failed: Option<Instant>,
    mended_at: Option<Instant>,
    /// The keys up to this one were looked at.
    mended_to: Option<String>,
}

/// What claiming led to.
pub(crate) struct Answer {
    pub(crate) claims: Vec<Claims>,
    /// The instance has a row.
    pub(crate) alive: bool,
}

/// What one request asks for.
struct Asked<'a> {
    request: &'a ClaimRequest,
    since: Timestamp,
    counted: usize,
}

/// What claims showed besides.
struct Gathered {
    /// Keys of rows that were not the first of their key after all.
    demoted: Keys,
    /// Since when the first row of each request was ready.
    first_ready: Vec<Option<Timestamp>>,
}

impl Claiming {
    /// Claims for instance `me`. An event needs no barrier to be durable: its row was written by a settlement after a poll that had
    /// made it so, or by a command about events that were settled, and both commits have waited for the disk.
    pub(crate) async fn claim(&mut self, session: &Session, me: i32, requests: &[ClaimRequest]) -> Db<Answer> {
        let asked: Vec<Asked<'_>> = requests.iter().map(|request| self.ask(request)).collect();
        let statement = session.statement(include_str!("../sql/claim.sql")).await?;
        let figures = session.statement(include_str!("../sql/claim_figures.sql")).await?;
        let keys = session.statement(include_str!("../sql/claim_keys.sql")).await?;
        let dense = session.statement(include_str!("../sql/claim_keys_dense.sql")).await?;
        let in_line = session.statement(include_str!("../sql/mend_keys.sql")).await?;
        let rows = session.statement(include_str!("../sql/queue_rows.sql")).await?;
        // What is sent first is answered first: the figures are of what the claims have left.
        let answers = try_join3(
            send_claims(session, &statement, me, &asked, (self.placed_max, self.claimed_max)),
            send_figures(session, &figures, me, &asked),
            try_join_all(requests.iter().map(|request| tell(session, &keys, (&dense, self.key_rows_max), request))),
        )
        .await;
        let (claimed, figures, told) = answers.inspect_err(|error| self.fell_short(error, requests))?;
        self.placed_max = (self.placed_max * 2).min(PLACED_MAX);
        self.claimed_max = self.claimed_max.saturating_mul(2);
        self.key_rows_max = (self.key_rows_max * 2).min(KEY_ROWS_READ_MAX);
        let mut claims: Vec<Claims> = told;
        let Gathered { demoted, first_ready } = self.gather(requests, &claimed, &mut claims)?;
        let mut alive = true;
        for (index, row) in figures.iter().enumerate() {
            let waiting = row.try_get::<_, i64>(0)? as usize;
            claims[index].next_due = row.try_get::<_, Option<Time>>(1)?.map(|time| time.0);
            let ready = first_ready[index].unwrap_or(row.try_get::<_, Time>(2)?.0);
            claims[index].waiting = self.note(&asked[index], claims[index].claimed.len(), waiting, ready);
            alive &= row.try_get::<_, bool>(3)?;
        }
        for (request, claims) in requests.iter().zip(&mut claims).filter(|(request, _)| request.tell.is_some()) {
            claims.rows = self.count(session, &rows, request.subscription).await?;
        }
        demoted.promote_or_leave(session).await;
        for (request, claims) in requests.iter().zip(&mut claims).filter(|(request, _)| request.limit > 0) {
            claims.waiting += self.mend(session, &in_line, request.subscription).await?;
        }
        Ok(Answer { claims, alive })
    }

    /// The server has ended a claim that took too long: the next one does less at once.
    fn fell_short(&mut self, error: &tokio_postgres::Error, requests: &[ClaimRequest]) {
        if took_too_long(error) {
            let asked = requests.iter().map(|request| request.limit).max().unwrap_or(0).min(i32::MAX as usize) as i32;
            self.placed_max = (self.placed_max / 4).max(1);
            self.claimed_max = (self.claimed_max.min(asked) / 4).max(1);
            self.key_rows_max = (self.key_rows_max / 4).max(KEYS_TOLD_MAX as i64);
        }
    }

    /// Hands what was claimed to the requests.
    fn gather(&mut self, requests: &[ClaimRequest], rows: &[Row], claims: &mut [Claims]) -> Db<Gathered> {
        let mut gathered = Gathered { demoted: Keys::default(), first_ready: vec![None; requests.len()] };
        for row in rows {
            let index = row.try_get::<_, i64>(19)? as usize - 1;
            match row.try_get::<_, Option<i64>>(12)? {
                Some(claim) => {
                    let ready = row.try_get::<_, Option<Time>>(18)?.map(|time| time.0);
                    gathered.first_ready[index] = gathered.first_ready[index].or(ready);
                    claims[index].claimed.push(self.claimed(row, ClaimId(claim))?);
                }
                None => gathered.demoted.note(requests[index].subscription.0, row.try_get(4)?),
            }
        }
        Ok(gathered)
    }

    fn ask<'a>(&self, request: &'a ClaimRequest) -> Asked<'a> {
        let place = self.places.get(&request.subscription);
        let recent = |at: Option<Instant>, interval| at.is_some_and(|at| at.elapsed() < interval);
        let since = place.filter(|place| recent(place.looked_at, WHOLE_LOOK_INTERVAL)).and_then(|it| it.ready_since);
        let known = recent(place.and_then(|place| Some(place.counted?.1)), COUNT_INTERVAL);
        let counted = if known { COUNTED_EACH_TIME } else { WAITING_COUNTED };
        Asked { request, since: since.unwrap_or(ALWAYS), counted }
    }

    /// How many rows there are, or were a while ago: so many are looked at for this in a second, and no more. None is not known: what
    /// was claimed is claimed, also where counting takes too long.
    async fn count(&mut self, session: &Session, rows: &Statement, subscription: SubscriptionId) -> Db<Option<u64>> {
        let place = self.places.entry(subscription).or_default();
        let known = place.rows.map(|(rows, _)| rows);
        let fresh = place.rows.is_some_and(|(rows, at)| at.elapsed() < pillarbox::recount_after(rows));
        if fresh || place.count_failed.is_some_and(|at| at.elapsed() < COUNT_REST) {
            return Ok(known);
        }
        match session.query_one(rows, &[&subscription.0]).await {
            Ok(row) => {
                let counted = row.try_get::<_, i64>(0)?.max(0) as u64;
                place.rows = Some((counted, Instant::now()));
                Ok(Some(counted))
            }
            Err(error) if took_too_long(&error) => {
                place.count_failed = Some(Instant::now());
                Ok(known)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes in what a claim showed; how many rows wait.
    fn note(&mut self, asked: &Asked<'_>, claimed: usize, waiting: usize, ready: Timestamp) -> usize {
        let place = self.places.entry(asked.request.subscription).or_default();
        if asked.since == ALWAYS {
            place.looked_at = Some(Instant::now());
        }
        if asked.request.limit > 0 {
            place.ready_since = Some(Timestamp(ready.0 - LOOK_BACK.as_millis() as i64));
        }
        if asked.counted == WAITING_COUNTED {
            place.counted = (waiting >= COUNTED_EACH_TIME).then(|| (waiting, Instant::now()));
        }
        match &mut place.counted {
            Some((counted, _)) if asked.counted < WAITING_COUNTED && waiting >= asked.counted => {
                *counted = counted.saturating_sub(claimed).max(waiting);
                *counted
            }
            _ => waiting,
        }
    }

    fn claimed(&mut self, row: &Row, claim: ClaimId) -> Db<Claimed> {
        let delivery = Delivery {
            position: row.try_get(0)?,
            key: row.try_get::<_, Option<&str>>(4)?.map(Into::into),
            arrival: row.try_get(13)?,
            state: State::Processing,
            attempts: row.try_get::<_, i32>(14)? as u32,
            due_at: row.try_get::<_, Time>(15)?.0,
            since: row.try_get::<_, Time>(16)?.0,
        };
        let event = match row.try_get::<_, Option<Uuid>>(3)? {
            Some(_) => Some(Arc::new(self.decoder.event(row)?)),
            None => None,
        };
        Ok(Claimed { claim, delivery, event, suspect: row.try_get::<_, i32>(17)? as u32 >= SUSPECT_AFTER })
    }

    /// Looks for heads that nobody has promoted, since whoever should have ended before; how many there were.
    async fn mend(&mut self, session: &Session, keys: &Statement, subscription: SubscriptionId) -> Db<usize> {
        let place = self.places.entry(subscription).or_default();
        if place.mended_at.is_some_and(|at| at.elapsed() < WHOLE_LOOK_INTERVAL) {
            return Ok(0);
        }
        let after = place.mended_to.take();
        let after = after.as_deref().unwrap_or(FIRST_KEY);
        place.mended_at = Some(Instant::now());
        let rows = match session.query(keys, &[&subscription.0, &after, &MENDED_AT_ONCE]).await {
            Err(error) if took_too_long(&error) => return Ok(0),
            rows => rows?,
        };
        let (mut heads, mut last) = (Keys::default(), None);
        for row in &rows {
            last = Some(row.try_get::<_, String>(0)?);
            heads.note(subscription.0, last.clone());
        }
        let promoted = heads.promote_or_leave(session).await;
        place.mended_to = last.filter(|_| rows.len() == MENDED_AT_ONCE as usize);
        Ok(promoted as usize)
    }
}

/// Whether the session's `statement_timeout` has ended a statement.
fn took_too_long(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::QUERY_CANCELED)
}

async fn send_claims(
    session: &Session,
    statement: &Statement,
    me: i32,
    asked: &[Asked<'_>],
    (placed_max, claimed_max): (i32, i32),
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let wanting = |asked: &Asked<'_>| asked.request.limit.min(i32::MAX as usize) as i32;
    let subscriptions: Vec<i64> = asked.iter().map(|asked| asked.request.subscription.0).collect();
    let firsts: Vec<i64> = asked.iter().map(|asked| asked.request.first.0).collect();
    let limits: Vec<i32> = asked.iter().map(wanting).collect();
    let suspects: Vec<bool> = asked.iter().map(|asked| asked.request.suspect).collect();
    let since: Vec<Time> = asked.iter().map(|asked| Time(asked.since)).collect();
    let again: Vec<bool> = asked.iter().map(|asked| asked.request.again).collect();
    let suspect_after = SUSPECT_AFTER as i32;
    let values: [&(dyn ToSql + Sync); 10] =
        [&me, &subscriptions, &firsts, &limits, &suspects, &since, &again, &suspect_after, &placed_max, &claimed_max];
    session.query(statement, &values).await
}

async fn send_figures(
    session: &Session,
    statement: &Statement,
    me: i32,
    asked: &[Asked<'_>],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let subscriptions: Vec<i64> = asked.iter().map(|asked| asked.request.subscription.0).collect();
    let since: Vec<Time> = asked.iter().map(|asked| Time(asked.since)).collect();
    let counted: Vec<i64> = asked.iter().map(|asked| asked.counted as i64).collect();
    session.query(statement, &[&me, &subscriptions, &since, &counted]).await
}

/// What a request wants to be told besides.
async fn tell(
    session: &Session,
    keys: &Statement,
    (dense, rows_max): (&Statement, i64),
    request: &ClaimRequest,
) -> Result<Claims, tokio_postgres::Error> {
    let Some(after) = request.tell.as_deref() else { return Ok(Claims::default()) };
    let subscription = &request.subscription.0;
    let mut rows = session.query(dense, &[subscription, &after, &rows_max]).await?;
    let all = rows.first().is_none_or(|row| row.get(1));
    if !all && rows.len() < KEYS_TOLD_MAX {
        // Some keys have very many rows: from key to key is shorter.
        rows = session.query(keys, &[subscription, &after, &(KEYS_TOLD_MAX as i32)]).await?;
    }
    let key = |row: &Row| Ok(row.try_get::<_, &str>(0)?.into());
    Ok(Claims { keys: Some(rows.iter().map(key).collect::<Result<_, tokio_postgres::Error>>()?), ..Claims::default() })
}
