use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join_all, join3};
use pillarbox::Timestamp;
use pillarbox::admin::State;
use pillarbox::store::{
    ClaimId, ClaimRequest, Claimed, Claims, DeliveryRow, KEYS_TOLD_MAX, SUSPECT_AFTER, SubscriptionId, WAITING_COUNTED,
};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::reader::{Decoder, PAGE_BYTES_MAX};
use crate::types::Time;

/// How often a subscription's rows are looked through from the oldest on, and its keys for heads that were not promoted.
const WHOLE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Between two of those, how far before the oldest row that could be claimed last time is looked: a settlement may have been under way
/// for so long.
const LOOK_BACK: Duration = Duration::from_secs(1);

/// The most waiting rows that are counted with every claim. If there are more, all rows are counted every [`COUNT_INTERVAL`].
const COUNTED_EACH_TIME: usize = 1_000;
const COUNT_INTERVAL: Duration = Duration::from_millis(100);

/// How many rows that were delayed and are due take their place with one claim; the next one finds the others.
const PLACED_MAX: i32 = 1_000;

/// How long a statement of a claim takes at most; as `CLAIMER_SETUP` says.
const CLAIM_TIME: Duration = Duration::from_millis(900);

/// A claim of a single row that takes too long gets twice the time, up to this: the statements of one claim together take less than a call may.
const CLAIM_TIME_MAX: Duration = Duration::from_secs(4);

/// After a count of a subscription's rows that took too long, none is tried for this time.
const COUNT_REST: Duration = Duration::from_secs(60);

/// How many keys are looked at at once for heads that were not promoted.
const MENDED_AT_ONCE: i32 = 1_000;

/// How many rows of each kind are read at once for their keys.
const KEY_ROWS_READ_MAX: i64 = 10_000;

/// Before every time.
const ALWAYS: Timestamp = Timestamp(i64::MIN);

/// Before every key, which has at least one byte.
const FIRST_KEY: &str = "";

/// Claims rows of queues, and remembers where in a queue it is.
#[derive(Default)]
pub(crate) struct Claiming {
    decoder: Decoder,
    places: HashMap<SubscriptionId, Place>,
    /// The session has another time limit than it was made with.
    is_patient: bool,
}

/// How much of a queue is done at once: less after a statement that took too long.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// At most [`PLACED_MAX`].
    placed: i32,
    /// How many rows are claimed at once at most, whatever is asked for: those of large events may take too long.
    claimed: i32,
    /// How many rows of each kind are read at once for their keys: at most [`KEY_ROWS_READ_MAX`].
    key_rows: i64,
    /// How long a statement may take: longer after a claim of as little as possible took too long, as over a slow line.
    time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { placed: PLACED_MAX, claimed: i32::MAX, key_rows: KEY_ROWS_READ_MAX, time: CLAIM_TIME }
    }
}

impl Limits {
    /// A claim of so many rows was ended by the server: the next one does less at once.
    fn claim_less(&mut self, asked: i32) {
        if self.placed <= 1 && self.claimed <= 1 {
            self.time = (self.time * 2).min(CLAIM_TIME_MAX);
        }
        self.placed = (self.placed / 4).max(1);
        self.claimed = (self.claimed.min(asked) / 4).max(1);
    }

    /// So many rows came in time, with events of so many bytes: the next claim is for no more than fits a page.
    fn fit(&mut self, rows: usize, bytes: usize) {
        self.time = (self.time / 2).max(CLAIM_TIME);
        self.placed = (self.placed * 2).min(PLACED_MAX);
        if bytes >= PAGE_BYTES_MAX {
            self.claimed = (rows.saturating_mul(PAGE_BYTES_MAX) / bytes).clamp(1, i32::MAX as usize) as i32;
        } else if bytes < PAGE_BYTES_MAX / 2 {
            self.claimed = self.claimed.saturating_mul(2);
        }
    }

    fn tell_less(&mut self) {
        self.key_rows = (self.key_rows / 4).max(KEYS_TOLD_MAX as i64);
    }

    fn tell_more(&mut self) {
        self.key_rows = (self.key_rows * 2).min(KEY_ROWS_READ_MAX);
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
    limits: Limits,
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
    limits: Limits,
}

impl Asked<'_> {
    /// How many rows are wanted.
    fn wanted(&self) -> i32 {
        i32::try_from(self.request.limit).unwrap_or(i32::MAX)
    }
}

type Answered<T> = Result<T, tokio_postgres::Error>;

/// What the server says to one request. Its statements are transactions of their own: what one of them does counts, whatever becomes of
/// the others.
struct Said {
    claimed: Answered<Vec<Row>>,
    figures: Answered<Row>,
    keys: Answered<Option<Vec<Box<str>>>>,
}

impl Claiming {
    /// Claims for instance `me`. An event needs no barrier to be durable: its row was written by a settlement after a poll that had
    /// made it so, or by a command about events that were settled, and both commits have waited for the disk.
    ///
    /// A queue whose claim takes too long has got nothing, and keeps no other queue from what it gets.
    pub(crate) async fn claim(&mut self, session: &Session, me: i32, requests: &[ClaimRequest]) -> Db<Answer> {
        let asked: Vec<Asked<'_>> = requests.iter().map(|request| self.ask(request)).collect();
        let time = asked.iter().map(|asked| asked.limits.time).max().unwrap_or(CLAIM_TIME);
        if time > CLAIM_TIME || self.is_patient {
            session
                .batch_execute(&sql!(session, "claim_time").replace("@time@", &time.as_millis().to_string()))
                .await?;
            self.is_patient = time > CLAIM_TIME;
        }
        // Settlements wait for the lanes in which delayed rows take their places, so that none do while claims may take long.
        let places = !self.is_patient;
        let statements = Statements::prepare(session).await?;
        // All of it is sent before anything is answered.
        let said = join_all(asked.iter().map(|asked| send(session, &statements, me, asked, places))).await;
        let (mut claims, mut demoted, mut alive) = (Vec::with_capacity(asked.len()), Keys::default(), true);
        let mut failed = None;
        for (asked, said) in asked.iter().zip(said) {
            match self.hear(asked, said, &mut demoted) {
                Ok((heard, lives)) => {
                    alive &= lives;
                    claims.push(heard);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        demoted.promote_or_leave(session).await;
        // What the others have got is told when they ask again.
        failed.map_or(Ok(()), Err)?;
        for (request, claims) in requests.iter().zip(&mut claims).filter(|(request, _)| request.tell.is_some()) {
            claims.rows = self.count(session, &statements.rows, request.subscription).await?;
        }
        for (request, claims) in requests.iter().zip(&mut claims).filter(|(request, _)| request.limit > 0) {
            claims.waiting += self.mend(session, &statements.in_line, request.subscription).await?;
        }
        Ok(Answer { claims, alive })
    }

    /// Takes in what the server says to a request; and whether the instance has a row.
    fn hear(&mut self, asked: &Asked<'_>, said: Said, demoted: &mut Keys) -> Db<(Claims, bool)> {
        let place = self.places.entry(asked.request.subscription).or_default();
        let keys = in_time(said.keys)?;
        match (&keys, &asked.request.tell) {
            (None, _) => place.limits.tell_less(),
            (Some(_), Some(_)) => place.limits.tell_more(),
            (Some(_), None) => {}
        }
        let rows = match said.claimed {
            Err(error) if took_too_long(&error) => {
                place.limits.claim_less(asked.wanted());
                tracing::debug!(
                    subscription = asked.request.subscription.0,
                    "a claim took too long and was taken back; the next one does less at once"
                );
                // What was claimed the time before is not known yet.
                if asked.request.again {
                    return Err(error.into());
                }
                None
            }
            rows => Some(rows?),
        };
        let mut claims = Claims { keys: keys.flatten(), ..Claims::default() };
        let first_ready = self.gather(asked.request, rows.as_deref().unwrap_or_default(), &mut claims, demoted)?;
        if rows.is_some() {
            let events = claims.claimed.iter().filter_map(|claimed| claimed.event.as_ref());
            let bytes = events.map(|event| event.size()).sum();
            self.places.entry(asked.request.subscription).or_default().limits.fit(claims.claimed.len(), bytes);
        }
        let Some(figures) = in_time(said.figures)? else {
            claims.waiting = 1;
            return Ok((claims, true));
        };
        let waiting = figures.try_get::<_, i64>("waiting")? as usize;
        claims.next_due = figures.try_get::<_, Option<Time>>("next_due")?.map(|time| time.0);
        claims.waiting = match rows {
            Some(_) => {
                let ready = first_ready.unwrap_or(figures.try_get::<_, Time>("now")?.0);
                self.note(asked, claims.claimed.len(), waiting, ready)
            }
            // There is something that it could not get.
            None => waiting.max(1),
        };
        Ok((claims, figures.try_get("is_alive")?))
    }

    /// Hands what was claimed to the request; since when the first of it was ready. Rows that were not the first of their key after
    /// all stand for that key.
    fn gather(
        &mut self,
        request: &ClaimRequest,
        rows: &[Row],
        claims: &mut Claims,
        demoted: &mut Keys,
    ) -> Db<Option<Timestamp>> {
        let mut first_ready = None;
        for row in rows {
            match row.try_get::<_, Option<i64>>("claim")? {
                Some(claim) => {
                    first_ready = first_ready.or(row.try_get::<_, Option<Time>>("ready_at")?.map(|time| time.0));
                    claims.claimed.push(self.claimed(row, ClaimId(claim))?);
                }
                None => demoted.note(request.subscription.0, row.try_get("key")?),
            }
        }
        Ok(first_ready)
    }

    fn ask<'a>(&self, request: &'a ClaimRequest) -> Asked<'a> {
        let place = self.places.get(&request.subscription);
        let recent = |at: Option<Instant>, interval| at.is_some_and(|at| at.elapsed() < interval);
        let since = place.filter(|place| recent(place.looked_at, WHOLE_LOOK_INTERVAL)).and_then(|it| it.ready_since);
        let known = recent(place.and_then(|place| Some(place.counted?.1)), COUNT_INTERVAL);
        let counted = if known { COUNTED_EACH_TIME } else { WAITING_COUNTED };
        let limits = place.map(|place| place.limits).unwrap_or_default();
        Asked { request, since: since.unwrap_or(ALWAYS), counted, limits }
    }

    /// How many rows there are, or were a while ago: so many are looked at for this in a second, and no more. None is not known: what
    /// was claimed is claimed, also where counting takes too long.
    async fn count(&mut self, session: &Session, rows: &Statement, subscription: SubscriptionId) -> Db<Option<u64>> {
        let place = self.places.entry(subscription).or_default();
        let known = place.rows.map(|(rows, _)| rows);
        let fresh = place.rows.is_some_and(|(rows, at)| at.elapsed() < pillarbox::store::recount_after(rows));
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
        let event = match row.try_get::<_, Option<Uuid>>("id")? {
            Some(_) => Some(Arc::new(self.decoder.event(row)?)),
            None => None,
        };
        let delivery = DeliveryRow {
            position: row.try_get("position")?,
            // What is no text is nobody's key.
            key: match &event {
                Some(event) => event.key.clone().filter(|_| event.malformed.is_none()),
                None => row.try_get::<_, Option<&str>>("key")?.map(Into::into),
            },
            arrival: row.try_get("arrival")?,
            state: State::Processing,
            attempts: row.try_get::<_, i32>("attempts")? as u32,
            due_at: row.try_get::<_, Time>("due_at")?.0,
            since: row.try_get::<_, Time>("since")?.0,
        };
        Ok(Claimed { claim, delivery, event, suspect: row.try_get::<_, i32>("crashes")? as u32 >= SUSPECT_AFTER })
    }

    /// Looks for heads that were not promoted, since the instance that had to do so ended before; their number.
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

/// None: it took too long.
fn in_time<T>(answer: Answered<T>) -> Answered<Option<T>> {
    match answer {
        Err(error) if took_too_long(&error) => Ok(None),
        answer => answer.map(Some),
    }
}

struct Statements {
    claim: Statement,
    figures: Statement,
    keys: Statement,
    keys_dense: Statement,
    in_line: Statement,
    rows: Statement,
}

impl Statements {
    async fn prepare(session: &Session) -> Db<Self> {
        Ok(Statements {
            claim: session.statement(sql!(queue, "claim")).await?,
            figures: session.statement(sql!(queue, "figures")).await?,
            keys: session.statement(sql!(queue, "keys")).await?,
            keys_dense: session.statement(sql!(queue, "keys_dense")).await?,
            in_line: session.statement(sql!(queue, "keys_in_line")).await?,
            rows: session.statement(sql!(queue, "rows")).await?,
        })
    }
}

/// What is sent first is answered first: the figures are of what the claim has left.
async fn send(session: &Session, statements: &Statements, me: i32, asked: &Asked<'_>, places: bool) -> Said {
    let (claimed, figures, keys) = join3(
        send_claim(session, &statements.claim, me, asked, places),
        send_figures(session, &statements.figures, me, asked),
        tell(session, statements, asked),
    )
    .await;
    Said { claimed, figures, keys }
}

async fn send_claim(
    session: &Session,
    statement: &Statement,
    me: i32,
    asked: &Asked<'_>,
    places: bool,
) -> Answered<Vec<Row>> {
    let placed = if places { asked.limits.placed } else { 0 };
    let ClaimRequest { subscription, first, suspect, again, .. } = asked.request;
    let suspect_after = SUSPECT_AFTER as i32;
    let values: [&(dyn ToSql + Sync); 10] = [
        &me,
        &subscription.0,
        &first.0,
        &asked.wanted(),
        suspect,
        &Time(asked.since),
        again,
        &suspect_after,
        &placed,
        &asked.limits.claimed,
    ];
    session.query(statement, &values).await
}

async fn send_figures(session: &Session, statement: &Statement, me: i32, asked: &Asked<'_>) -> Answered<Row> {
    let (subscription, counted) = (asked.request.subscription.0, asked.counted as i64);
    session.query_one(statement, &[&me, &subscription, &Time(asked.since), &counted]).await
}

/// What a request wants to be told besides.
async fn tell(session: &Session, statements: &Statements, asked: &Asked<'_>) -> Answered<Option<Vec<Box<str>>>> {
    let Asked { request, limits, .. } = asked;
    let Some(after) = request.tell.as_deref() else { return Ok(None) };
    let subscription = &request.subscription.0;
    let mut rows = session.query(&statements.keys_dense, &[subscription, &after, &limits.key_rows]).await?;
    let all = rows.first().is_none_or(|row| row.get("is_all"));
    if !all && rows.len() < KEYS_TOLD_MAX {
        // Some keys have very many rows: from key to key is shorter.
        rows = session.query(&statements.keys, &[subscription, &after, &(KEYS_TOLD_MAX as i32)]).await?;
    }
    rows.iter().map(|row| Ok(row.try_get::<_, &str>(0)?.into())).collect::<Answered<_>>().map(Some)
}
