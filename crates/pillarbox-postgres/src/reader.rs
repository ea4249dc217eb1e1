use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, future};
pub(crate) use pillarbox::store::PAGE_BYTES_MAX;
use pillarbox::store::decode::{Names, Wanted};
use pillarbox::store::{Page, PollRequest, Scan, ScanRequest, Writer};
use pillarbox::{ErrorKind, Event, Filter, Headers, Payload, Position, Timestamp};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::event_id::IdSalt;
use crate::types::{DueTime, RawJson, Text, Time};

/// A writer counts as idle only after it has been so for this long.
const IDLE_MARGIN: Duration = Duration::from_secs(60);

/// Why an event cannot be delivered as it is.
const NO_TEXT: &str = "is no text in UTF-8, which a database with the encoding SQL_ASCII does not check";

/// A commit whose wait was cancelled succeeds.
const UNREPLICATED: &str =
    "the wait for the synchronous standbys was cancelled: what was read may not be on them, and is read again";

/// However large the rows lately were, a scan asks for so many at least.
const ROWS_MIN: usize = 1;

/// Reads the log.
pub(crate) struct Reader {
    pub(crate) decoder: Decoder,
    seen: Seen,
    /// The mean size of a row lately, so that a page of large ones is not read only to be thrown away.
    mean_bytes: MeanBytes,
    pub(crate) barriers: Arc<AtomicU64>,
    /// See [`IDLE_MARGIN`].
    pub(crate) idle_margin: Duration,
    #[cfg(feature = "mutants")]
    pub(crate) laboratory: Option<crate::mutant::Laboratory>,
}

impl Default for Reader {
    fn default() -> Self {
        Reader {
            decoder: Decoder::default(),
            seen: Seen::default(),
            mean_bytes: MeanBytes::default(),
            barriers: Arc::default(),
            idle_margin: IDLE_MARGIN,
            #[cfg(feature = "mutants")]
            laboratory: None,
        }
    }
}

/// What the last polls saw. All but what was shown holds for one session only: a server that crashed may have forgotten positions
/// that were not committed.
#[derive(Default)]
struct Seen {
    session: u64,
    incarnation: i64,
    horizon: Position,
    /// The highest position that was shown, which has to be there after a crash too.
    shown: Position,
    log_start: Position,
    clock: Timestamp,
    /// Transactions that were prepared, and a time by which they were.
    prepared: HashMap<Writer, Timestamp>,
}

/// What one poll read, in the order in which it was read.
pub(crate) struct Answers {
    pub(crate) horizon: Position,
    pub(crate) clock: Timestamp,
    pub(crate) writers: Option<Vec<SeenWriter>>,
    pub(crate) scans: Vec<Scan>,
    pub(crate) log_start: Position,
    pub(crate) incarnation: i64,
    /// What was read may not be on disk yet, or not on the standbys that a commit waits for.
    pub(crate) volatile: bool,
}

impl Reader {
    /// Horizon, then writers, then all scans in one statement, then what retention took: one message, in this order. Each
    /// statement is a transaction of its own and so has a new snapshot, whatever isolation level the database or a pooler sets.
    pub(crate) async fn poll(&mut self, session: &Session, request: &PollRequest) -> Db<Page> {
        let known = self.seen.session == session.number && !self.is_stepwise();
        if known && request.without_writers && request.scans.len() == 1 {
            return self.glance(session, request).await;
        }
        let Answers { horizon, clock, writers, scans, log_start, incarnation, volatile } =
            self.ask(session, request).await?;
        let seen = &self.seen;
        let before = if seen.session == session.number { seen.horizon } else { seen.shown };
        if seen.incarnation == incarnation && horizon < before {
            let what = format!("positions up to {before} were handed out, and now only those up to {horizon} are");
            return Err(DbError::not_itself(&what));
        }
        let idle = writers.as_ref().map_or_else(Vec::new, |writers| self.seen.idle(writers, self.idle_margin));
        let prepared = std::mem::take(&mut self.seen.prepared);
        let known = if self.seen.incarnation == incarnation { self.seen.shown } else { 0 };
        let shown = scans.iter().filter_map(|scan| scan.visible.last()).max().unwrap_or(0).max(known);
        self.seen = Seen { session: session.number, incarnation, horizon, shown, log_start, clock, prepared };
        if volatile && scans.iter().any(|scan| !scan.visible.is_empty()) {
            self.make_durable(session).await?;
        }
        let writers = writers.map(|writers| writers.iter().map(|writer| writer.id).collect());
        Ok(Page { horizon, writers, clock: clock.0, idle, session: session.number, log_start, scans })
    }

    /// The rows alone, in one statement: all that is needed while there is nothing to close. What is above the last one shown is
    /// left to the next poll, and so is what retention took.
    async fn glance(&mut self, session: &Session, request: &PollRequest) -> Db<Page> {
        let plan = ScanPlan::new(session, request, self.rows_max()).await?;
        let scans = self.scan(session, &plan).await?;
        let volatile = scans.iter().any(|scan| scan.volatile);
        let last = scans.iter().filter_map(|scan| scan.last()).max().unwrap_or(0);
        let horizon = self.seen.horizon.max(last);
        let scans = plan.finish(scans, horizon);
        (self.seen.horizon, self.seen.shown) = (horizon, self.seen.shown.max(last));
        if volatile && !self.forgets_barrier() {
            self.make_durable(session).await?;
        }
        let (log_start, clock) = (self.seen.log_start, self.seen.clock.0);
        Ok(Page { horizon, writers: None, clock, idle: Vec::new(), session: session.number, log_start, scans })
    }

    /// A test lets others act between the steps of a poll.
    fn is_stepwise(&self) -> bool {
        #[cfg(feature = "mutants")]
        return self.laboratory.as_ref().is_some_and(crate::mutant::Laboratory::is_stepwise);
        #[cfg(not(feature = "mutants"))]
        false
    }

    /// A test has broken the glance, and what fetches single events.
    fn forgets_barrier(&self) -> bool {
        #[cfg(feature = "mutants")]
        return self.laboratory.as_ref().is_some_and(|laboratory| !laboratory.is_stepwise());
        #[cfg(not(feature = "mutants"))]
        false
    }

    async fn ask(&mut self, session: &Session, request: &PollRequest) -> Db<Answers> {
        #[cfg(feature = "mutants")]
        if let Some(laboratory) = self.laboratory.clone().filter(crate::mutant::Laboratory::is_stepwise) {
            return crate::mutant::ask(self, session, request, &laboratory).await;
        }
        let horizon = session.statement(sql!(event, "horizon")).await?;
        let writers = session.statement(sql!(event, "writers")).await?;
        let after = session.statement(sql!(meta, "after_scan")).await?;
        let plan = ScanPlan::new(session, request, self.rows_max()).await?;
        let ask_writers = async {
            match request.without_writers {
                true => Ok(None),
                false => session.query(&writers, &[]).await.map(Some),
            }
        };
        let scans = self.scan(session, &plan);
        // Polled in this order, they travel in this order: what is sent first is answered first.
        let (horizon, writers, scans, after) =
            future::join4(session.query_one(&horizon, &[]), ask_writers, scans, session.query_one(&after, &[])).await;
        let (horizon, writers, scans, after) = (horizon?, writers?, scans?, after?);
        let position: Position = horizon.try_get("horizon")?;
        Ok(Answers {
            horizon: position,
            clock: horizon.try_get::<_, Time>("now")?.0,
            writers: writers.map(|rows| rows.iter().map(SeenWriter::of).collect::<Db<_>>()).transpose()?,
            scans: plan.finish(scans, position),
            log_start: after.get("log_start"),
            incarnation: after.get("incarnation"),
            volatile: after.get("is_volatile"),
        })
    }

    /// A commit of our own, which waits until everything before it is flushed, here and on synchronous standbys. It fails if this wait
    /// was cancelled. A message that has no reader costs no dead row.
    async fn make_durable(&self, session: &Session) -> Db<()> {
        self.barriers.fetch_add(1, Ordering::Relaxed);
        let statement = session.statement(sql!(session, "make_durable")).await?;
        let before = session.unreplicated();
        session.execute(&statement, &[]).await?;
        if session.unreplicated() != before {
            return Err(DbError::own(ErrorKind::Unavailable, UNREPLICATED));
        }
        Ok(())
    }

    fn rows_max(&self) -> usize {
        (PAGE_BYTES_MAX / self.mean_bytes.0.max(1)).max(ROWS_MIN)
    }

    /// Reads the rows of all scans as they come, keeping no more than a page may hold.
    pub(crate) async fn scan(&mut self, session: &Session, plan: &ScanPlan<'_>) -> Db<Vec<Gathered>> {
        let mut gathered: Vec<Gathered> = plan.scans.iter().map(|_| Gathered::default()).collect();
        let mut rows = std::pin::pin!(plan.send(session).await?);
        let mut wanted = Wanted::new(plan.filters);
        let mut bytes = 0;
        while let Some(row) = rows.next().await {
            let row = row?;
            // Row by row: a page that takes too long must not be asked for like that again.
            self.mean_bytes.add(row.raw_size_bytes());
            let scan = if plan.many { row.try_get::<_, i64>(12)? as usize - 1 } else { 0 };
            let into = &mut gathered[scan];
            if into.cut {
                continue;
            }
            if !plan.many && into.rows == 0 {
                into.volatile = row.try_get(12)?;
            }
            bytes += self.decoder.take(&row, &mut wanted, into)?;
            into.cut = bytes >= PAGE_BYTES_MAX;
        }
        Ok(gathered)
    }

    /// The events at exactly these positions, from the log or kept aside; of large ones as many as fit a page, in the order in which
    /// they are asked for.
    pub(crate) async fn fetch(&mut self, session: &Session, positions: &[Position]) -> Db<Vec<Arc<Event>>> {
        let statement = session.statement(sql!(event, "fetch")).await?;
        let (mut events, mut rest) = (Vec::new(), positions);
        // Those that are not there are looked for to the end.
        while events.is_empty() && !rest.is_empty() {
            let (now, later) = rest.split_at(self.fitting(session, rest).await?);
            for row in session.query(&statement, &[&now]).await? {
                self.mean_bytes.add(row.raw_size_bytes());
                events.push(Arc::new(self.decoder.event(&row)?));
            }
            rest = later;
        }
        events.sort_unstable_by_key(|event| event.position);
        // A delivery may have been committed without a flush by whoever published its event.
        if !events.is_empty() {
            let after = session.statement(sql!(meta, "after_scan")).await?;
            let volatile: bool = session.query_one(&after, &[]).await?.get("is_volatile");
            if volatile && !self.forgets_barrier() {
                self.make_durable(session).await?;
            }
        }
        Ok(events)
    }

    /// How many of these fit a page, one at least. What the server has compressed is larger than it says, so that what rows lately were
    /// counts too.
    async fn fitting(&self, session: &Session, positions: &[Position]) -> Db<usize> {
        if positions.len() <= 1 {
            return Ok(positions.len());
        }
        let statement = session.statement(sql!(event, "sizes")).await?;
        let rows = session.query(&statement, &[&positions]).await?;
        let sizes = rows.iter().map(|row| Ok((row.try_get("position")?, row.try_get::<_, i64>("bytes")? as usize)));
        let sizes = sizes.collect::<Db<HashMap<Position, usize>>>()?;
        let mut bytes = 0;
        let fits = |position: &&Position| {
            bytes += sizes.get(position).copied().unwrap_or(0);
            bytes <= PAGE_BYTES_MAX
        };
        Ok(positions.iter().take_while(fits).count().min(self.rows_max()).max(1))
    }
}

/// A mean that forgets what is long past.
struct MeanBytes(usize);

impl Default for MeanBytes {
    /// So that the first page of a log of large payloads is not the largest.
    fn default() -> Self {
        MeanBytes(4096)
    }
}

impl MeanBytes {
    /// One that fills a page by itself counts as if all were so: the next page has one row, and what comes after it shows whether more fit.
    fn add(&mut self, bytes: usize) {
        let mean = (self.0 * 63 + bytes.min(PAGE_BYTES_MAX)) / 64;
        self.0 = if bytes >= PAGE_BYTES_MAX { PAGE_BYTES_MAX } else { mean };
    }
}

/// A writer as `writers` in `sql/event.sql` shows it.
pub(crate) struct SeenWriter {
    pub(crate) id: Writer,
    prepared: bool,
    idle_since: Option<Timestamp>,
    looked_at: Timestamp,
}

impl SeenWriter {
    pub(crate) fn of(row: &Row) -> Db<Self> {
        Ok(SeenWriter {
            id: writer_of(row.try_get("virtualtransaction")?),
            prepared: row.try_get("prepared")?,
            idle_since: row.try_get::<_, Option<Time>>("idle_since")?.map(|time| time.0),
            looked_at: row.try_get::<_, Time>("looked_at")?.0,
        })
    }
}

impl Seen {
    /// Who has done nothing since when. The clock is that of the wall: only who has been idle for longer than it may be set back
    /// unseen counts.
    fn idle(&mut self, writers: &[SeenWriter], margin: Duration) -> Vec<(Writer, i64)> {
        let since = |writer: &SeenWriter| match writer.prepared {
            true => Some(self.prepared.get(&writer.id).copied().unwrap_or(writer.looked_at)),
            false => writer.idle_since,
        };
        let idle = writers.iter().filter_map(|writer| Some((writer.id, since(writer)?.plus(margin).0))).collect();
        let prepared = writers.iter().filter(|writer| writer.prepared);
        self.prepared = prepared.map(|writer| (writer.id, since(writer).unwrap_or(writer.looked_at))).collect();
        idle
    }
}

/// A transaction's name to a number; equal names to equal numbers.
pub(crate) fn writer_of(virtual_transaction: &str) -> Writer {
    Writer(xxh3_64(virtual_transaction.as_bytes()))
}

/// What is sent to the server for the scans of a request.
pub(crate) struct ScanPlan<'a> {
    filters: &'a [Filter],
    scans: Vec<ScanRequest>,
    statement: Statement,
    many: bool,
    after: Vec<i64>,
    upto: Vec<i64>,
    rows: Vec<i64>,
    all: bool,
    topics: Vec<&'a str>,
    patterns: Vec<String>,
}

impl<'a> ScanPlan<'a> {
    pub(crate) async fn new(session: &Session, request: &'a PollRequest, rows_max: usize) -> Db<Self> {
        let many = request.scans.len() != 1;
        let sql = if many { sql!(event, "scan_many") } else { sql!(scan, "scan") };
        let scans: Vec<ScanRequest> =
            request.scans.iter().map(|scan| ScanRequest { limit: scan.limit.min(rows_max), ..*scan }).collect();
        let patterns = request.wanted.iter().flat_map(|filter| &filter.topics);
        let (prefixes, topics): (Vec<&String>, Vec<&String>) = patterns.partition(|pattern| pattern.ends_with('*'));
        Ok(ScanPlan {
            filters: &request.wanted,
            statement: session.statement(sql).await?,
            many,
            after: scans.iter().map(|scan| scan.after).collect(),
            upto: scans.iter().map(|scan| scan.to).collect(),
            rows: scans.iter().map(|scan| i64::try_from(scan.limit).unwrap_or(i64::MAX)).collect(),
            scans,
            all: request.wanted.iter().any(|filter| filter.topics.is_empty()),
            topics: topics.into_iter().map(String::as_str).collect(),
            patterns: prefixes.into_iter().map(|pattern| like(pattern)).collect(),
        })
    }

    async fn send(&self, session: &Session) -> Db<tokio_postgres::RowStream> {
        let place: [&(dyn ToSql + Sync); 3] = match self.many {
            true => [&self.after, &self.upto, &self.rows],
            false => [&self.after[0], &self.upto[0], &self.rows[0]],
        };
        let [after, upto, rows] = place;
        let parameters: [&(dyn ToSql + Sync); 6] = [after, upto, rows, &self.all, &self.topics, &self.patterns];
        Ok(session.query_raw(&self.statement, parameters).await?)
    }

    /// Says how far each scan looked.
    pub(crate) fn finish(&self, gathered: Vec<Gathered>, horizon: Position) -> Vec<Scan> {
        let finish = |(asked, mut found): (&ScanRequest, Gathered)| {
            found.end_run();
            let last = found.visible.last().unwrap_or(asked.after);
            let cut = found.cut || found.rows >= asked.limit;
            let covered_to = if cut { last } else { asked.to.min(horizon.max(last)).max(asked.after) };
            // Nothing promises that a join keeps the order, though it does.
            if !found.events.is_sorted_by_key(|event| event.position) {
                found.events.sort_by_key(|event| event.position);
            }
            Scan { after: asked.after, covered_to, visible: found.visible, events: found.events }
        };
        self.scans.iter().zip(gathered).map(finish).collect()
    }
}

/// A prefix pattern in the language of LIKE.
fn like(pattern: &str) -> String {
    let prefix = pattern.strip_suffix('*').unwrap_or(pattern);
    let mut text = String::with_capacity(prefix.len() + 1);
    for c in prefix.chars() {
        if matches!(c, '%' | '_' | '\\') {
            text.push('\\');
        }
        text.push(c);
    }
    text.push('%');
    text
}

/// What one scan has shown so far.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) visible: pillarbox::store::RangeSet,
    /// The run of neighbours that is not in `visible` yet.
    run: Option<(Position, Position)>,
    pub(crate) events: Vec<Arc<Event>>,
    rows: usize,
    cut: bool,
    /// What was shown may not be on disk yet; only where one stretch alone was read.
    volatile: bool,
}

impl Gathered {
    fn saw(&mut self, position: Position) {
        self.rows += 1;
        match &mut self.run {
            Some((_, high)) if *high + 1 == position => *high = position,
            _ => {
                self.end_run();
                self.run = Some((position, position));
            }
        }
    }

    /// The highest position shown.
    fn last(&self) -> Option<Position> {
        self.run.map(|run| run.1).into_iter().chain(self.visible.last()).max()
    }

    fn end_run(&mut self) {
        if let Some((low, high)) = self.run.take() {
            self.visible.insert_range(low, high);
        }
    }
}

/// Turns rows into events, sharing the names that come again and again.
#[derive(Default)]
pub(crate) struct Decoder {
    /// Only scans show events without their ids.
    pub(crate) id_salt: Arc<IdSalt>,
    topics: Names,
    types: Names,
    content_types: Names,
}

impl Decoder {
    /// Takes a row of a scan in; the size of what is kept of it.
    fn take(&mut self, row: &Row, wanted: &mut Wanted<'_>, into: &mut Gathered) -> Db<usize> {
        let position = row.try_get(0)?;
        into.saw(position);
        let names = self.names(row)?;
        if !wanted.has(&names.topic, &names.r#type) {
            return Ok(0);
        }
        let event = self.rest(row, position, names)?;
        let size = event.size();
        into.events.push(Arc::new(event));
        Ok(size)
    }

    /// The event of a row with the columns of `sql/scan.sql`, which are read by their positions.
    pub(crate) fn event(&mut self, row: &Row) -> Db<Event> {
        let names = self.names(row)?;
        self.rest(row, row.try_get(0)?, names)
    }

    fn names(&mut self, row: &Row) -> Db<EventNames> {
        let mut no_text = None;
        let topic = self.topics.share(&marked(row.try_get(1)?, "topic", &mut no_text));
        let r#type = self.types.share(&marked(row.try_get(2)?, "type", &mut no_text));
        Ok(EventNames { topic, r#type, no_text })
    }

    fn rest(&mut self, row: &Row, position: Position, names: EventNames) -> Db<Event> {
        let EventNames { topic, r#type, mut no_text } = names;
        let payload = match row.try_get::<_, Option<RawJson<'_>>>(5)? {
            Some(RawJson(json)) => match std::str::from_utf8(json) {
                Ok(json) => Payload::Json(json.into()),
                // What is not UTF-8 cannot be JSON.
                Err(_) => {
                    no_text = no_text.or(Some("payload"));
                    Payload::Bytes(json.into())
                }
            },
            None => row.try_get::<_, Option<&[u8]>>(6)?.map_or(Payload::None, |bytes| Payload::Bytes(bytes.into())),
        };
        let headers = row.try_get::<_, Option<RawJson<'_>>>(8)?.map(|json| Text(String::from_utf8_lossy(json.0)));
        let headers =
            headers.map_or_else(Headers::default, |text| Headers::from_json(&marked(text, "headers", &mut no_text)));
        let content_type = row.try_get::<_, Option<Text<'_>>>(7)?;
        let content_type = content_type.map(|name| marked(name, "content type", &mut no_text));
        let key = row.try_get::<_, Option<Text<'_>>>(4)?;
        if matches!(&key, Some(Text(Cow::Owned(_)))) {
            no_text = Some("key");
        }
        let created_at = row.try_get::<_, Time>(11)?.0;
        Ok(Event {
            position,
            id: row.try_get::<_, Option<Uuid>>(3)?.map_or_else(|| self.id_salt.id(position, created_at), Ok)?,
            topic,
            // Of no order: what looks the same when it is marked need not be the same.
            key: key.and_then(Text::whole).map(Into::into),
            r#type,
            payload,
            content_type: content_type.map(|name| self.content_types.share(&name)),
            headers,
            stream_version: row.try_get(9)?,
            deliver_at: row.try_get::<_, Option<DueTime>>(10)?.map(|time| time.0),
            created_at,
            malformed: no_text.map(|what| format!("its {what} {NO_TEXT}").into()),
        })
    }
}

/// The names of an event, and what of it is no text.
struct EventNames {
    topic: Arc<str>,
    r#type: Arc<str>,
    no_text: Option<&'static str>,
}

/// The text, and that it is none if something in it is no character.
fn marked<'a>(text: Text<'a>, what: &'static str, no_text: &mut Option<&'static str>) -> Cow<'a, str> {
    if matches!(text.0, Cow::Owned(_)) {
        *no_text = no_text.or(Some(what));
    }
    text.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_fills_a_page_is_the_last_that_was_asked_for_with_others() {
        let mut mean = MeanBytes::default();
        (0..1000).for_each(|_| mean.add(200));
        assert!(mean.0 < 300);
        mean.add(150 << 20);
        assert_eq!(PAGE_BYTES_MAX / mean.0, 1);
        (0..64).for_each(|_| mean.add(200));
        assert!(PAGE_BYTES_MAX / mean.0 >= 2, "more are asked for again");
    }

    #[test]
    fn a_prefix_means_itself() {
        assert_eq!(like("billing.*"), "billing.%");
        assert_eq!(like("a_b%c\\*"), "a\\_b\\%c\\\\%");
        assert_eq!(like("*"), "%");
    }
}
