use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pillarbox::store::decode::{Names, Wanted};
use pillarbox::store::{PAGE_BYTES_MAX, Page, PollRequest, Scan, ScanRequest};
use pillarbox::{Event, Headers, Payload, Position, Timestamp};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Row, RowIndex, Transaction, params};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;

use crate::connection::{Purpose, open, read};
use crate::doorbell::Bell;
use crate::error::{Db, DbError};

/// Why an event is malformed: a client may bind whatever bytes as text.
const NO_TEXT: &str = "is no text in UTF-8, which SQLite does not check";

/// What a [`Reader::glance`] reads at most: no more than some tens of microseconds' worth.
const GLANCE_ROWS_MAX: usize = 32;
const GLANCE_BYTES_MAX: usize = 64 * 1024;

/// Reads the log on its own thread and connection.
pub(crate) struct Reader {
    pub(crate) connection: Connection,
    decoder: Decoder,
    barrier: Barrier,
    bell: Arc<Bell>,
    /// The incarnation and the horizon that the last poll saw.
    seen: (i64, Position),
    /// The last poll reached the end of the log.
    caught_up: bool,
}

impl Reader {
    pub(crate) fn open(path: &Path, bell: Arc<Bell>, barriers: Arc<AtomicU64>) -> Db<Self> {
        let connection = open(path, Purpose::Read)?;
        let barrier = Barrier::new(path, barriers);
        Ok(Reader { connection, decoder: Decoder::default(), barrier, bell, seen: (0, 0), caught_up: false })
    }

    /// Horizon, writers and scans in one snapshot, which has ended when this returns.
    ///
    /// There are never writers: SQLite has one at a time and takes a rolled-back position back, so what the snapshot
    /// does not show up to its horizon never comes. A horizon that goes back is that of another state of the log, unless
    /// an operator has said so by a new incarnation.
    pub(crate) fn poll(&mut self, request: &PollRequest) -> Db<Page> {
        let page = self.read_page(request, usize::MAX, PAGE_BYTES_MAX)?;
        self.barrier.pass(highest(&page), page.horizon, &self.bell)?;
        self.polled(&page);
        Ok(page)
    }

    /// A short poll for an async caller, who must not be kept waiting: a few events at most, and none that would have to be synced
    /// first. Then, or while there is a backlog, None: ask the thread.
    pub(crate) fn glance(&mut self, request: &PollRequest) -> Db<Option<Page>> {
        if !self.caught_up {
            return Ok(None);
        }
        let page = self.read_page(request, GLANCE_ROWS_MAX, GLANCE_BYTES_MAX)?;
        let whole = |(scan, asked): (&Scan, &ScanRequest)| scan.covered_to >= asked.to.min(page.horizon);
        let cut = !page.scans.iter().zip(&request.scans).all(whole);
        if cut || !self.barrier.is_passed(highest(&page), &self.bell)? {
            return Ok(None);
        }
        self.polled(&page);
        Ok(Some(page))
    }

    fn polled(&mut self, page: &Page) {
        self.caught_up = page.scans.last().is_some_and(|scan| scan.covered_to >= page.horizon);
        // Polls run one after another, so that this one knows best.
        self.bell.polled(page.horizon);
    }

    fn read_page(&mut self, request: &PollRequest, rows_max: usize, bytes_max: usize) -> Db<Page> {
        let (decoder, seen) = (&mut self.decoder, &mut self.seen);
        read(&self.connection, |snapshot| {
            let mut statement = snapshot.prepare_cached(sql!(meta, "snapshot"))?;
            let (horizon, log_start, incarnation) = statement
                .query_row([], |row| Ok((row.get("horizon")?, row.get("log_start")?, row.get("incarnation")?)))?;
            if seen.0 == incarnation && horizon < seen.1 {
                let what =
                    format!("positions up to {} were handed out, and now only those up to {horizon} are", seen.1);
                return Err(DbError::not_itself(&what));
            }
            if seen.0 != incarnation {
                self.barrier.forget();
            }
            *seen = (incarnation, horizon);
            let mut page = Page { horizon, log_start, writers: Some(Vec::new()), ..Page::default() };
            let mut wanted = Wanted::new(&request.wanted);
            let mut room = bytes_max;
            for asked in &request.scans {
                let asked = ScanRequest { limit: asked.limit.min(rows_max), ..*asked };
                page.scans.push(scan(snapshot, &asked, horizon, decoder, &mut wanted, &mut room)?);
            }
            Ok(page)
        })
    }

    /// The events at exactly these positions, from the log or kept aside: the first ones of the request that fit a page, one at least.
    pub(crate) fn fetch(&mut self, positions: &[Position]) -> Db<Vec<Arc<Event>>> {
        let decoder = &mut self.decoder;
        let (mut events, horizon) = read(&self.connection, |snapshot| {
            let mut statement = snapshot.prepare_cached(sql!(event, "fetch"))?;
            let mut events = Vec::with_capacity(positions.len());
            let mut room = PAGE_BYTES_MAX;
            let mut seen = HashSet::new();
            for position in positions.iter().filter(|position| seen.insert(**position)) {
                let mut rows = statement.query([position])?;
                let Some(row) = rows.next()? else { continue };
                let event = decoder.event(row)?;
                if event.size() > room && !events.is_empty() {
                    break;
                }
                room = room.saturating_sub(event.size());
                events.push(Arc::new(event));
            }
            Ok((events, crate::connection::horizon(snapshot)?))
        })?;
        events.sort_unstable_by_key(|event: &Arc<Event>| event.position);
        self.barrier.pass(events.last().map(|event| &**event), horizon, &self.bell)?;
        Ok(events)
    }
}

fn not_durable(source: std::io::Error) -> DbError {
    DbError::io("the events that were read could not be made durable", source)
}

/// The event of a page that was written last.
fn highest(page: &Page) -> Option<&Event> {
    let last = page.scans.iter().filter_map(|scan| scan.events.last());
    last.max_by_key(|event| event.position).map(|event| &**event)
}

/// One stretch of the log.
fn scan(
    snapshot: &Transaction<'_>,
    asked: &ScanRequest,
    horizon: Position,
    decoder: &mut Decoder,
    wanted: &mut Wanted<'_>,
    room: &mut usize,
) -> Db<Scan> {
    let mut scan = Scan { after: asked.after, covered_to: asked.after, ..Scan::default() };
    let mut statement = snapshot.prepare_cached(sql!(event, "scan"))?;
    let limit = i64::try_from(asked.limit).unwrap_or(i64::MAX);
    let mut rows = statement.query(params![asked.after, asked.to, limit])?;
    let mut looked_at = 0;
    let mut cut = asked.limit == 0;
    while let Some(row) = rows.next()? {
        let position = row.get_ref(0)?.as_i64().map_err(rusqlite::Error::from)?;
        let names = decoder.names(row)?;
        scan.visible.insert(position);
        scan.covered_to = position;
        looked_at += 1;
        cut = looked_at == asked.limit;
        if wanted.has(&names.topic, &names.r#type) {
            let event = decoder.rest(row, position, names)?;
            let size = event.size();
            scan.events.push(Arc::new(event));
            cut |= size >= *room;
            *room = room.saturating_sub(size);
        }
        if cut {
            break;
        }
    }
    if !cut {
        scan.covered_to = asked.to.min(horizon.max(scan.covered_to)).max(asked.after);
    }
    Ok(scan)
}

/// Turns rows into events, sharing the names that come again and again.
#[derive(Default)]
pub(crate) struct Decoder {
    topics: Names,
    types: Names,
    content_types: Names,
}

impl Decoder {
    /// The event of a row with the columns of `scan` in `sql/event.sql`.
    pub(crate) fn event(&mut self, row: &Row<'_>) -> Db<Event> {
        let names = self.names(row)?;
        self.rest(row, row.get(0)?, names)
    }

    fn names(&mut self, row: &Row<'_>) -> Db<EventNames> {
        let mut no_text = None;
        let topic = self.topics.share(&marked(row.get_ref(1)?, "topic", &mut no_text));
        let r#type = self.types.share(&marked(row.get_ref(2)?, "type", &mut no_text));
        Ok(EventNames { topic, r#type, no_text })
    }

    fn rest(&mut self, row: &Row<'_>, position: Position, names: EventNames) -> Db<Event> {
        let EventNames { topic, r#type, mut no_text } = names;
        let payload = payload_of(row.get_ref(5)?, &mut no_text);
        let headers = headers_of(&marked(row.get_ref(7)?, "headers", &mut no_text));
        let content_type = match row.get_ref(6)? {
            ValueRef::Null => None,
            value => Some(self.content_types.share(&marked(value, "content type", &mut no_text))),
        };
        let key = row.get_ref(4)?;
        let whole = whole_key(key);
        if whole.is_none() && key != ValueRef::Null {
            no_text = Some("key");
        }
        Ok(Event {
            position,
            id: id_at(row, 3)?,
            topic,
            key: whole.map(Into::into),
            r#type,
            payload,
            content_type,
            headers,
            stream_version: row.get(8)?,
            deliver_at: row.get::<_, Option<i64>>(9)?.map(Timestamp),
            created_at: Timestamp(row.get(10)?),
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
fn marked<'a>(value: ValueRef<'a>, what: &'static str, no_text: &mut Option<&'static str>) -> Cow<'a, str> {
    let text = text(value);
    if matches!(text, Cow::Owned(_)) {
        *no_text = no_text.or(Some(what));
    }
    text
}

/// A text, with a mark for each piece that is no character.
pub(crate) fn text(value: ValueRef<'_>) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes(value))
}

/// A key, if all of it is characters. Else it is of no order: two keys that are not may look the same when they are marked.
pub(crate) fn whole_key(value: ValueRef<'_>) -> Option<&str> {
    if value == ValueRef::Null { None } else { std::str::from_utf8(bytes(value)).ok() }
}

/// Text or bytes as they are stored; nothing for anything else.
fn bytes(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes,
        _ => b"",
    }
}

/// The id as it was published; one derived from its bytes if it is no uuid, the same on every redelivery.
pub(crate) fn id_of(text: &[u8]) -> Uuid {
    Uuid::try_parse_ascii(text)
        .unwrap_or_else(|_| uuid::Builder::from_custom_bytes(xxh3_128(text).to_be_bytes()).into_uuid())
}

/// The id in a column, also where its bytes are no text.
pub(crate) fn id_at(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<Uuid> {
    Ok(id_of(bytes(row.get_ref(column)?)))
}

fn payload_of(value: ValueRef<'_>, no_text: &mut Option<&'static str>) -> Payload {
    match value {
        ValueRef::Text(text) => match std::str::from_utf8(text) {
            Ok(text) => Payload::Json(text.into()),
            // What is not UTF-8 cannot be JSON.
            Err(_) => {
                *no_text = no_text.or(Some("payload"));
                Payload::Bytes(text.into())
            }
        },
        ValueRef::Blob(bytes) => Payload::Bytes(bytes.into()),
        _ => Payload::None,
    }
}

fn headers_of(text: &str) -> Headers {
    if text == "{}" { Headers::default() } else { Headers::from_json(text) }
}

/// Makes what was read durable before it is delivered, whatever `synchronous` its publisher used.
///
/// A commit lives in the write-ahead log, so one fsync of that file covers all that a snapshot shows. A publisher with
/// `synchronous = off` may also have copied commits into the database file without an fsync before it started the
/// write-ahead log again; that shows in the log's header, and then the database file is synced too.
struct Barrier {
    database: PathBuf,
    wal_path: PathBuf,
    wal: Option<(File, u64)>,
    header: Option<WalHeader>,
    durable_through: Position,
    count: Arc<AtomicU64>,
}

type WalHeader = [u8; 32];

impl Barrier {
    fn new(database: &Path, count: Arc<AtomicU64>) -> Self {
        let mut wal_path = database.as_os_str().to_owned();
        wal_path.push("-wal");
        let database = database.to_owned();
        Barrier { database, wal_path: wal_path.into(), wal: None, header: None, durable_through: 0, count }
    }

    /// Positions of another incarnation say nothing about those of this one.
    fn forget(&mut self) {
        self.durable_through = 0;
    }

    /// Returns once everything up to `highest` is durable. `horizon` is that of the snapshot which showed it.
    fn pass(&mut self, highest: Option<&Event>, horizon: Position, bell: &Bell) -> Db<()> {
        if self.is_passed(highest, bell)? {
            return Ok(());
        }
        self.sync().map_err(not_durable)?;
        self.durable_through = horizon;
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Whether everything up to `highest` is known to be durable.
    fn is_passed(&mut self, highest: Option<&Event>, bell: &Bell) -> Db<bool> {
        let Some(highest) = highest.filter(|highest| highest.position > self.durable_through) else { return Ok(true) };
        // Its own commit was a barrier already, unless the log was started anew since the last one. Syncing a file that has
        // nothing new in it still flushes the disk: that would add a third to the time from commit to handler.
        let passed = bell.is_synced(highest.position, highest.id)
            && self.header.is_some()
            && self.read_header().map_err(not_durable)? == self.header;
        if passed {
            self.durable_through = highest.position;
        }
        Ok(passed)
    }

    fn sync(&mut self) -> std::io::Result<()> {
        if let Some(wal) = self.wal()? {
            wal.sync_data()?;
        }
        // Read after the sync: if the log was started anew in between, its commits were copied already.
        let header = self.read_header()?;
        if header.is_none() || header != self.header {
            database_file(&self.database)?.sync_data()?;
            self.header = header;
        }
        Ok(())
    }

    /// The header, which changes with every new start of the log; None if there is none.
    fn read_header(&mut self) -> std::io::Result<Option<WalHeader>> {
        let mut header = WalHeader::default();
        Ok(self.wal()?.and_then(|wal| wal.read_exact_at(&mut header, 0).ok()).map(|()| header))
    }

    /// This reader's own handle of the write-ahead log, opened again if the file was replaced.
    fn wal(&mut self) -> std::io::Result<Option<&File>> {
        let inode = match std::fs::metadata(&self.wal_path) {
            Ok(metadata) => metadata.ino(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.wal.as_ref().is_none_or(|(_, known)| *known != inode) {
            self.wal = Some((File::open(&self.wal_path)?, inode));
        }
        Ok(self.wal.as_ref().map(|(file, _)| file))
    }
}

/// A handle of a database file that is never closed again: closing any descriptor of it would drop the POSIX locks
/// of every SQLite connection in this process. There is at most one a database.
fn database_file(path: &Path) -> std::io::Result<Arc<File>> {
    type Files = HashMap<(u64, u64), Arc<File>>;
    static FILES: Mutex<Option<Files>> = Mutex::new(None);
    let metadata = std::fs::metadata(path)?;
    let mut files = FILES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let files = files.get_or_insert_default();
    let identity = (metadata.dev(), metadata.ino());
    if let Some(file) = files.get(&identity) {
        return Ok(file.clone());
    }
    let file = Arc::new(File::open(path)?);
    files.insert(identity, file.clone());
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_is_no_uuid_gets_the_same_one_each_time() {
        assert_eq!(id_of(b"not a uuid"), id_of(b"not a uuid"));
        assert_ne!(id_of(b"not a uuid"), id_of(b"nor is this"));
        let uuid = Uuid::now_v7();
        assert_eq!(id_of(uuid.to_string().as_bytes()), uuid);
    }
}
