use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pillarbox::Failure;
use pillarbox::sink::Fault;
use pillarbox_postgres::{PgConfig, Unreplicated};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Row, Statement};

use super::refusal::{Refusal, cause_of, grants, repair};
use super::table::Table;

/// Connections of one sink at once; batches beyond that wait for one.
pub const POSTGRES_CONNECTIONS_MAX: usize = 16;

/// What a session is called at the server.
const APPLICATION_NAME: &str = "pillarbox sink";

/// How long a statement waits for a lock, unless the sink's time is shorter.
const LOCK_TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// How long a clean end of a connection is waited for.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends a statement whose client has gone; not every server's system can tell.
const CHECK_CLIENT: &str = "set client_connection_check_interval = '2s'";

/// How often a statement that was in another's way is tried within a call.
pub(super) const AGAIN_MAX: u32 = 3;

/// The columns of the table that are written, with their types.
const COLUMNS: &[(&str, &str)] = &[
    ("id", "uuid"),
    ("source", "text"),
    ("topic", "text"),
    ("type", "text"),
    ("key", "text"),
    ("sequence", "bigint"),
    ("stream_version", "bigint"),
    ("time", "timestamp with time zone"),
    ("content_type", "text"),
    ("data", "json"),
    ("data_bytes", "bytea"),
    ("headers", "jsonb"),
];

/// Those of the fence.
const FENCE_COLUMNS: &[(&str, &str)] = &[
    ("log_id", "uuid"),
    ("subscription", "text"),
    ("lane", "integer"),
    ("incarnation", "bigint"),
    ("subscription_id", "bigint"),
    ("epoch", "bigint"),
];

/// What must be unique, names in order.
const UNIQUE: [&str; 2] = ["id", "lane,log_id,subscription"];

/// The connections of a sink, made when they are needed.
pub(super) struct Pool {
    pub(super) config: PgConfig,
    pub(super) table: Table,
    pub(super) create: bool,
    pub(super) timeout: Duration,
    permits: Semaphore,
    idle: Mutex<Vec<Connection>>,
}

impl Pool {
    pub(super) fn new(config: PgConfig, table: Table, create: bool, timeout: Duration) -> Self {
        let permits = Semaphore::new(POSTGRES_CONNECTIONS_MAX);
        Pool { config, table, create, timeout, permits, idle: Mutex::default() }
    }

    /// A connection that is ready to append, used before if there is one.
    pub(super) async fn get(&self) -> Result<Lease<'_>, Failure> {
        let permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while let Some(connection) = idle() {
            if !connection.client.is_closed() {
                return Ok(Lease { connection, used: true, _permit: permit });
            }
        }
        let connection = Connection::open(self).await?;
        Ok(Lease { connection, used: false, _permit: permit })
    }

    /// For the next batch. A connection that is not given back is ended.
    pub(super) fn give_back(&self, lease: Lease<'_>) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(lease.connection);
    }

    /// Ends what is idle.
    pub(super) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        for connection in idle {
            connection.end().await;
        }
    }

    /// Whether a batch would be taken; writes nothing.
    pub(super) async fn check(&self) -> Result<(), Failure> {
        let session = Session::open(self).await?;
        let schema = self.table.schema();
        let asked = session.client.query_one(include_str!("place.sql"), &[&schema]).await;
        let place = asked.map_err(|error| self.failure(&error))?;
        let look = session.look(self).await?;
        let checked = if place.get("standby") {
            Err(Failure {
                kind: "read_only",
                ..Failure::sink(format!("{} is a standby; connect to the primary", self.place()))
            })
        } else if look.is_missing() && self.create {
            may_create(place.get("create"), self)
        } else {
            look.verdict(self).and_then(|()| look.privileges(self))
        };
        session.end().await;
        checked
    }

    /// The server and database, for people.
    pub(super) fn place(&self) -> String {
        self.config.place()
    }

    fn failure(&self, error: &tokio_postgres::Error) -> Failure {
        match Refusal::of(error, &self.table) {
            // No event is under way yet.
            Refusal::Lost(failure) if failure.fault == Fault::Unclear => {
                Failure::unreachable("unreachable", failure.message)
            }
            Refusal::Event(failure) | Refusal::Again(failure) | Refusal::Sink(failure) | Refusal::Lost(failure) => {
                Failure { fault: Fault::Sink, permanent: false, ..failure }
            }
        }
    }

    fn lock_timeout(&self) -> Duration {
        (self.timeout / (AGAIN_MAX + 1)).min(LOCK_TIMEOUT_MAX)
    }
}

fn may_create(may: bool, pool: &Pool) -> Result<(), Failure> {
    if may {
        return Ok(());
    }
    let message =
        format!("{} is not there and the sink's role may not create it; {}", pool.table.name(), repair(&pool.table));
    Err(Failure { kind: "denied", ..Failure::sink(message) })
}

/// A connection that is in use.
pub(super) struct Lease<'a> {
    connection: Connection,
    /// It lay idle since the last batch, and may have been lost meanwhile, which is no failure.
    pub(super) used: bool,
    _permit: SemaphorePermit<'a>,
}

impl Deref for Lease<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// A session with what it has prepared.
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) append: Statement,
    pub(super) unreplicated: Unreplicated,
    driver: Driver,
}

impl Connection {
    async fn open(pool: &Pool) -> Result<Self, Failure> {
        let session = Session::open(pool).await?;
        let mut look = session.look(pool).await?;
        if look.is_missing() && pool.create {
            session.create(pool).await?;
            look = session.look(pool).await?;
        }
        look.verdict(pool)?;
        let append = session.client.prepare(&pool.table.sql(include_str!("append.sql"))).await;
        let append = append.map_err(|error| pool.failure(&error))?;
        let Session { client, unreplicated, driver } = session;
        Ok(Connection { client, append, unreplicated, driver })
    }

    async fn end(self) {
        let Connection { client, unreplicated, driver, .. } = self;
        Session { client, unreplicated, driver }.end().await;
    }
}

/// What keeps a connection going. Dropped, it ends the connection at once: a server that stands still would keep it for ever.
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A session that has prepared nothing yet.
struct Session {
    client: Client,
    unreplicated: Unreplicated,
    driver: Driver,
}

impl Session {
    async fn open(pool: &Pool) -> Result<Self, Failure> {
        let connected = pool.config.connect_with_driver(APPLICATION_NAME).await;
        let (client, driver, unreplicated) = connected.map_err(|error| refused(pool, &error))?;
        let session = Session { client, unreplicated, driver: Driver(driver) };
        let limits = format!(
            "set lock_timeout = {}; set statement_timeout = {}; {}",
            milliseconds(pool.lock_timeout()),
            milliseconds(pool.timeout),
            include_str!("session.sql")
        );
        session.client.batch_execute(&limits).await.map_err(|error| pool.failure(&error))?;
        if let Err(error) = session.client.batch_execute(CHECK_CLIENT).await {
            tracing::debug!(%error, "the server cannot tell when a client has gone");
        }
        Ok(session)
    }

    /// Makes what is not there. Several sinks may start at once, and `if not exists` alone does not bear that.
    async fn create(&self, pool: &Pool) -> Result<(), Failure> {
        let sql = format!(
            "begin; select pg_advisory_xact_lock(hashtextextended('pillarbox sink {}', 0)); {} commit;",
            pool.table.name(),
            pool.table.sql(include_str!("create.sql"))
        );
        self.client.batch_execute(&sql).await.map_err(|error| pool.failure(&error))?;
        tracing::info!(table = pool.table.name(), place = pool.place(), "created the table of events");
        Ok(())
    }

    async fn look(&self, pool: &Pool) -> Result<Look, Failure> {
        let failure = |error| pool.failure(&error);
        let names = [pool.table.name(), pool.table.fence()];
        let found = self.client.query(include_str!("look.sql"), &[&&names[..], &&UNIQUE[..]]).await.map_err(failure)?;
        let mut relations: Vec<Relation> = found.iter().map(Relation::of).collect();
        for (relation, (name, columns)) in relations.iter_mut().zip(names.iter().zip([COLUMNS, FENCE_COLUMNS])) {
            let (wanted, types): (Vec<&str>, Vec<&str>) = columns.iter().copied().unzip();
            let rows =
                self.client.query(include_str!("columns.sql"), &[name, &wanted, &types]).await.map_err(failure)?;
            relation.differences = rows.iter().map(difference).collect();
        }
        Ok(Look { relations, names })
    }

    async fn end(self) {
        let Session { client, mut driver, .. } = self;
        drop(client);
        // Waits for the goodbye to be sent; the server ends the session either way.
        let _ = tokio::time::timeout(END_TIMEOUT, &mut driver.0).await;
    }
}

/// What there is under the names of the table and the fence.
struct Look {
    relations: Vec<Relation>,
    names: [String; 2],
}

struct Relation {
    found: bool,
    durable: bool,
    unique: bool,
    insert: bool,
    select: bool,
    update: bool,
    differences: Vec<String>,
}

impl Relation {
    fn of(row: &Row) -> Self {
        Relation {
            found: row.get("found"),
            durable: row.get("durable"),
            unique: row.get("unique"),
            insert: row.get("insert"),
            select: row.get("select"),
            update: row.get("update"),
            differences: Vec::new(),
        }
    }

    /// Why this is not what the sink needs.
    fn problem(&self) -> Option<String> {
        match self {
            Relation { found: false, .. } => Some("is not there".to_owned()),
            Relation { durable: false, .. } => Some("is not a logged table".to_owned()),
            Relation { differences, .. } if !differences.is_empty() => {
                Some(format!("has other columns ({})", differences.join(", ")))
            }
            Relation { unique: false, .. } => Some("lacks its primary key".to_owned()),
            _ => None,
        }
    }
}

impl Look {
    fn is_missing(&self) -> bool {
        self.relations.iter().any(|relation| !relation.found)
    }

    fn verdict(&self, pool: &Pool) -> Result<(), Failure> {
        for (relation, name) in self.relations.iter().zip(&self.names) {
            if let Some(problem) = relation.problem() {
                let message = format!("{name} in {} {problem}; {}", pool.place(), repair(&pool.table));
                return Err(Failure { kind: "table", ..Failure::sink(message) });
            }
        }
        Ok(())
    }

    fn privileges(&self, pool: &Pool) -> Result<(), Failure> {
        let [table, fence] = &self.relations[..] else { return Ok(()) };
        if table.insert && table.select && fence.insert && fence.select && fence.update {
            return Ok(());
        }
        let message = format!("the sink's role may not append to {}; {}", pool.table.name(), grants(&pool.table));
        Err(Failure { kind: "denied", ..Failure::sink(message) })
    }
}

fn difference(row: &Row) -> String {
    let (name, wanted, found): (&str, &str, Option<&str>) = (row.get("name"), row.get("type"), row.get("found"));
    match found {
        Some(found) => format!("{name} is {found}, not {wanted}"),
        None => format!("{name} {wanted} is missing"),
    }
}

fn milliseconds(duration: Duration) -> u128 {
    // 0 would mean no limit at all.
    duration.as_millis().clamp(1, i32::MAX as u128)
}

/// No connection was made; in the words of the server if it spoke.
fn refused(pool: &Pool, error: &pillarbox::Error) -> Failure {
    let source = std::error::Error::source(error);
    let postgres = source.and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
    match postgres {
        Some(postgres) if postgres.as_db_error().is_some() => pool.failure(postgres),
        _ => {
            let cause = source.map_or_else(|| error.to_string(), cause_of);
            let message = format!("{} cannot be reached: {cause}; it is tried again", pool.place());
            Failure::unreachable("unreachable", message)
        }
    }
}
