use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pillarbox::admin::Limits;
use pillarbox::store::{
    ClaimEnd, ClaimRequest, Claims, Epoch, Fleet, Hello, Joined, LaneRef, LaneState, Page, PollRequest, RecoverRequest,
    Recovered, Report, Settlement, Store, StoreFeatures, Take, Wake,
};
use pillarbox::{ErrorKind, Event, Position, Result};
use rusqlite::Connection;

use crate::connection::{Purpose, open};
use crate::doorbell::{Bell, Doorbell};
use crate::error::{Db, DbError};
use crate::ownership::{LockFolder, Membership, Writer};
use crate::publish::store_limits;
use crate::reader::Reader;
use crate::witness::Keeper;
use crate::worker::Worker;
use crate::{home, migrate, ownership};

/// At least this long between two settlements, so that the one writer of the file is mostly the application.
const SETTLE_INTERVAL: Duration = Duration::from_millis(20);

/// How long a store that is dropped waits for its threads. One that waits for another writer ends by itself later.
const THREADS_END_MAX: Duration = Duration::from_secs(1);

/// Connections that are kept open for operators' next commands.
const OPERATORS_KEPT_MAX: usize = 2;

/// A log in a SQLite file. One value is one instance once it has joined; it may also only be operated on.
///
/// Reads and writes run on a thread each, so that a poll never waits for a settlement. Dropping the value without
/// [`leave`](Store::leave) is what a crash looks like to others: they take its lanes over.
pub struct SqliteStore {
    path: PathBuf,
    reader: Worker<Arc<Mutex<Reader>>>,
    /// What the reader's thread works with, for glances that need not go there.
    glance: Arc<Mutex<Reader>>,
    writer: Worker<Writer>,
    membership: Arc<Mutex<Option<Membership>>>,
    bell: Arc<Bell>,
    doorbell: Doorbell,
    barriers: Arc<AtomicU64>,
    /// Only ever used by the writer's jobs; the lock is there to make it shareable.
    witness: Arc<Mutex<Keeper>>,
    /// Connections for operators' work, which may be long and must not hold up a poll.
    operators: Arc<Mutex<Vec<Connection>>>,
}

impl SqliteStore {
    /// Opens the log at `path`. The file must be there (only [`migrate`](crate::migrate()) creates it), writable, on a
    /// local disk, with a current schema, and the log must be at home in it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::start(path.as_ref())?)
    }

    fn start(path: &Path) -> Db<Self> {
        let path = path.canonicalize().map_err(|source| {
            DbError::io(
                format!("there is no database at {}; create it with `pillarbox migrate`", path.display()),
                source,
            )
        })?;
        inspect(&path)?;
        let bell = Bell::new();
        let barriers = Arc::<AtomicU64>::default();
        let membership = Arc::<Mutex<Option<Membership>>>::default();
        let folder = LockFolder::beside(&path);
        let reader = Arc::new(Mutex::new(Reader::open(&path, bell.clone(), barriers.clone())?));
        let writer = Writer::open(&path, folder.clone(), membership.clone(), bell.clone())?;
        Ok(SqliteStore {
            glance: reader.clone(),
            reader: Worker::spawn("pillarbox-reader", reader)?,
            writer: Worker::spawn("pillarbox-writer", writer)?,
            membership,
            doorbell: Doorbell::spawn(bell.clone(), open(&path, Purpose::Read)?, folder)?,
            bell,
            barriers,
            witness: Arc::new(Mutex::new(Keeper::new(&path))),
            operators: Arc::default(),
            path,
        })
    }

    /// The file, as an absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How often what was read had to be made durable before it was returned.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(Ordering::Relaxed)
    }

    /// Changes the log's limits for all publishers.
    pub async fn set_limits(&self, limits: Limits) -> Result<()> {
        self.operate(move |desk| crate::connection::write(&desk.connection, |tx| store_limits(tx, &limits))).await
    }

    /// Runs an operator's work off the async threads, on a connection that no poll waits for.
    pub(crate) async fn operate<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Desk) -> Db<T> + Send + 'static,
    ) -> Result<T> {
        let (path, kept) = (self.path.clone(), self.operators.clone());
        let job = move || {
            let lock = || kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let connection = lock().pop();
            let connection = connection.map_or_else(|| open(&path, Purpose::Durable), Ok)?;
            let folder = LockFolder::beside(&path);
            let desk = Desk { connection, path, folder };
            let result = work(&desk);
            let mut kept = lock();
            if kept.len() < OPERATORS_KEPT_MAX {
                kept.push(desk.connection);
            }
            result
        };
        let done = tokio::task::spawn_blocking(job).await.map_err(|source| {
            pillarbox::Error::with_source(ErrorKind::Fatal, "an operator's command ended by a panic", source)
        })?;
        Ok(done?)
    }
}

/// What an operator's command works with.
pub(crate) struct Desk {
    pub(crate) connection: Connection,
    pub(crate) path: PathBuf,
    pub(crate) folder: LockFolder,
}

/// Checks every prerequisite that can be checked before anything is done.
fn inspect(path: &Path) -> Db<()> {
    home::refuse_network(path)?;
    let connection = open(path, Purpose::Durable)?;
    migrate::require(&connection)?;
    if connection.is_readonly("main")? {
        return Err(DbError::own(
            ErrorKind::Invalid,
            format!("{} is read-only; give this process write access to it and its folder", path.display()),
        ));
    }
    let mode: String = connection.query_row(sql!(connection, "journal_mode"), [], |row| row.get(0))?;
    if !mode.eq_ignore_ascii_case("wal") {
        return Err(DbError::own(
            ErrorKind::Invalid,
            format!(
                "the database is in journal mode '{mode}'; run `pillarbox migrate`, which turns on write-ahead logging"
            ),
        ));
    }
    home::check(&connection, path)
}

impl Store for SqliteStore {
    fn features(&self) -> StoreFeatures {
        StoreFeatures { lock_proves_life: true, settle_interval: SETTLE_INTERVAL }
    }

    async fn join(&self, hello: Hello) -> Result<Joined> {
        self.writer.run(move |writer| writer.join(&hello)).await
    }

    async fn observe(&self, report: &Report) -> Result<Fleet> {
        let (report, witness) = (report.clone(), self.witness.clone());
        let job = move |writer: &mut Writer| {
            // First, for it may take a disk's time: what is told of the fleet is to be news.
            lock(&witness).beat(&writer.durable, Instant::now())?;
            writer.observe(&report)
        };
        self.writer.run(job).await
    }

    async fn take(&self, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        let lanes = lanes.to_vec();
        self.writer.run(move |writer| writer.take(&lanes)).await
    }

    async fn load(&self, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        let lanes = lanes.to_vec();
        self.reader.run(move |reader| ownership::load(&lock(reader).connection, &lanes)).await
    }

    async fn poll(&self, request: &PollRequest) -> Result<Page> {
        // Two changes of thread cost more than reading the few events of a log that one is at the end of.
        let page = self.glance.try_lock().map_or(Ok(None), |mut reader| reader.glance(request))?;
        if let Some(page) = page {
            return Ok(page);
        }
        let request = request.clone();
        self.reader.run(move |reader| lock(reader).poll(&request)).await
    }

    async fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        let positions = positions.to_vec();
        self.reader.run(move |reader| lock(reader).fetch(&positions)).await
    }

    async fn settle(&self, settlement: &Settlement) -> Result<Vec<bool>> {
        let settlement = settlement.clone();
        self.writer.run(move |writer| writer.settle(&settlement)).await
    }

    async fn claim(&self, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        let requests = requests.to_vec();
        self.writer.run(move |writer| writer.claim(&requests)).await
    }

    async fn finish(&self, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        let ends = ends.to_vec();
        self.writer.run(move |writer| writer.finish(&ends)).await
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        let request = request.clone();
        self.writer.run(move |writer| writer.recover(&request)).await
    }

    async fn wait(&self, timeout: Duration) -> Result<Wake> {
        Ok(self.bell.wait(timeout).await)
    }

    async fn leave(&self) -> Result<()> {
        let witness = self.witness.clone();
        let job = move |writer: &mut Writer| {
            writer.leave()?;
            lock(&witness).keep(&writer.durable)
        };
        self.writer.run(job).await
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        // First of all the lock: nobody is to wait longer for the lanes than for a killed process.
        self.membership.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        self.reader.stop();
        self.writer.stop();
        self.doorbell.stop();
        // The last connection of all removes the write-ahead log: it must be closed before the process ends.
        let deadline = Instant::now() + THREADS_END_MAX;
        self.reader.join(deadline);
        self.writer.join(deadline);
        self.doorbell.join(deadline);
    }
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
