use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::{Attempt, Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::store::Epoch;
use pillarbox::{Error, ErrorKind, Failure, Result};
use pillarbox_postgres::PgConfig;
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use crate::config::{ConfigFault, DeliveryTime, SinkConfig, yes};
use crate::{Secret, config, duration};

mod append;
mod connection;
mod refusal;
mod table;

use append::{Append, unstorable};
use connection::{AGAIN_MAX, Lease, Pool};
use refusal::Refusal;
use table::Table;

pub use connection::POSTGRES_CONNECTIONS_MAX;
pub use table::TABLE_NAME_BYTES_MAX;

/// How long connecting and one batch may take, unless the configuration says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How long a statement that was in another's way waits before it is tried again; longer each time.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

/// The longest time that connecting and one batch may be given.
const POSTGRES_TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// What one statement may carry, roughly; larger batches are appended in parts.
const STATEMENT_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Where [`PostgresSink`] appends to, and what a user writes for it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PostgresSinkConfig {
    /// The database, as in `database` of the configuration.
    #[serde(deserialize_with = "config::url")]
    pub url: Secret,
    /// The table, `name` or `schema.name`. Capitals count, as if it stood in double quotes.
    pub table: String,
    /// Whether to make the table and its fence if they are not there. Default: yes.
    #[serde(default = "yes")]
    pub create: bool,
    /// How long connecting and one batch may take. Default: 30 s.
    #[serde(default = "default_timeout", with = "duration::positive")]
    pub timeout: Duration,
}

fn default_timeout() -> Duration {
    TIMEOUT
}

impl PostgresSinkConfig {
    /// The defaults for this database and table.
    pub fn new(url: impl Into<Secret>, table: impl Into<String>) -> Self {
        PostgresSinkConfig { url: url.into(), table: table.into(), create: true, timeout: TIMEOUT }
    }

    /// The SQL that makes a table of this name and its fence, for where the sink may not do so itself.
    pub fn schema_sql(table: &str) -> Result<String> {
        Ok(Table::parse(table)?.sql(include_str!("postgres/create.sql")))
    }
}

impl SinkConfig for PostgresSinkConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("url", "postgres://localhost/app"), ("table", "event_store")]
    }

    fn faults(&self) -> Vec<ConfigFault> {
        let keys = [
            ("table", Table::parse(&self.table).map(drop)),
            ("url", place(&self.url).map(drop)),
            ("timeout", check_timeout(self.timeout)),
        ];
        keys.into_iter().filter_map(|(key, check)| Some(ConfigFault::new(key, check.err()?))).collect()
    }

    fn delivery_time(&self, _batch_size: usize) -> Option<DeliveryTime> {
        let why = format!("postgres waits timeout = \"{}\" for its acknowledgements", duration::format(self.timeout));
        Some(DeliveryTime { max: self.timeout, why })
    }

    fn build(&self, source: String) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(PostgresSink::new(self.clone(), source)?))
    }
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn place(url: &Secret) -> Result<PgConfig> {
    let place: PgConfig = url.expose().parse()?;
    if url.expose().contains("?schema=") || url.expose().contains("&schema=") {
        return Err(invalid("schema= in a sink's url has no meaning; write it before the table: schema.name"));
    }
    Ok(place)
}

fn check_timeout(timeout: Duration) -> Result<()> {
    if timeout.is_zero() {
        return Err(invalid("timeout = 0 leaves no time to deliver; write a duration like 30s"));
    }
    if timeout > POSTGRES_TIMEOUT_MAX {
        return Err(invalid("timeout of a postgres sink is at most postgres_timeout_max = 1h"));
    }
    Ok(())
}

/// Appends events to a table of another PostgreSQL database: an event store.
///
/// An event is there once, however often it is delivered: its id is the primary key, and one that is there already is left as it
/// is. A batch is one statement, so all of it is committed or nothing; when an event is refused, the others of its batch are
/// appended without it, and of its key those before it.
///
/// **Fence.** Beside the table lies `<table>_fence`. With its first batch a lane's new owner writes its epoch there, and every
/// append looks there in the same statement: a relay that was stopped, replaced, and goes on later appends nothing more of that
/// lane. Events of a queue have no owner to fence; they are appended once, by their id.
///
/// `Delivered` means committed, on the disk of that server and of its synchronous standbys, if it has any. A commit whose wait for these
/// was cancelled does not count: the batch comes again, and waits again.
pub struct PostgresSink {
    source: String,
    pool: Pool,
}

impl PostgresSink {
    /// A sink for events of this `source`, a URI like `urn:pillarbox:<log_id>`. Nothing is connected to before the first batch.
    pub fn new(config: PostgresSinkConfig, source: impl Into<String>) -> Result<Self> {
        let table = Table::parse(&config.table)?;
        let place = place(&config.url)?;
        check_timeout(config.timeout)?;
        let source = source.into();
        if source.contains('\0') {
            return Err(invalid("the source has a NUL character, which PostgreSQL cannot store"));
        }
        Ok(PostgresSink { source, pool: Pool::new(place, table, config.create, config.timeout) })
    }

    async fn append_batch(&self, batch: &Batch) -> Vec<Outcome> {
        let deadline = Instant::now() + self.pool.timeout;
        let mut answers = Answers::new(&batch.events);
        let mut parts = parts_of(&batch.events);
        let mut lease = None;
        while let Some(part) = parts.pop() {
            let part = answers.still_to_try(part);
            let Some(part) = answers.up_to_unstorable(part, &mut parts) else { continue };
            match self.append(&mut lease, deadline, batch, &part).await {
                Ok(owned) => answers.appended(&part, &owned),
                Err(Refusal::Event(failure)) if part.len() == 1 => answers.fail(part[0], failure),
                // One of them is at fault; the first half goes first.
                Err(Refusal::Event(_)) => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second.to_vec(), first.to_vec()]);
                }
                Err(Refusal::Again(failure) | Refusal::Lost(failure) | Refusal::Sink(failure)) => {
                    answers.fail_all(&part, &failure);
                    break;
                }
            }
        }
        if let Some(lease) = lease {
            self.pool.give_back(lease);
        }
        answers.outcomes()
    }

    /// Appends events in one statement, tried again where that can help; the lanes that are ours. What is appended twice is there
    /// once, so that a connection which was lost while it was not used costs nothing.
    async fn append<'a>(
        &'a self,
        lease: &mut Option<Lease<'a>>,
        deadline: Instant,
        batch: &Batch,
        part: &[usize],
    ) -> std::result::Result<Lanes, Refusal> {
        let events: Vec<&Attempt> = part.iter().map(|index| &batch.events[*index]).collect();
        let lanes = lanes_of(&events);
        let statement = Append::new(batch, &self.source, &lanes, &events);
        let values = statement.values();
        let (mut lost, mut tries) = (None, 0);
        loop {
            tries += 1;
            let connection = match lease.take() {
                Some(connection) => connection,
                // Whether the statement that was lost has been carried out is not known for that.
                None => self.connect(deadline).await.map_err(|refusal| lost.take().unwrap_or(refusal))?,
            };
            let unreplicated = connection.unreplicated.count();
            let sent = connection.client.query(&connection.append, &values);
            let error = match timeout_at(deadline, sent).await {
                Ok(Ok(_)) if connection.unreplicated.count() != unreplicated => {
                    *lease = Some(connection);
                    return Err(Refusal::Sink(self.not_replicated()));
                }
                Ok(Ok(rows)) => {
                    let held: HashSet<i32> = rows.iter().map(|row| row.get(0)).collect();
                    *lease = Some(connection);
                    return Ok(lanes.into_iter().filter(|(lane, _)| held.contains(&(*lane as i32))).collect());
                }
                Ok(Err(error)) => error,
                Err(_) => return Err(Refusal::Lost(self.over_time())),
            };
            match Refusal::of(&error, &self.pool.table) {
                refusal @ Refusal::Again(_) if tries < AGAIN_MAX => {
                    tracing::debug!(?refusal, "appending again");
                    *lease = Some(connection);
                    // The other one is to be through by then.
                    tokio::time::sleep(AGAIN_AFTER * tries).await;
                }
                refusal @ Refusal::Lost(_) if connection.used => lost = Some(refusal),
                refusal @ (Refusal::Event(_) | Refusal::Again(_)) => {
                    *lease = Some(connection);
                    return Err(refusal);
                }
                refusal => return Err(refusal),
            }
        }
    }

    async fn connect(&self, deadline: Instant) -> std::result::Result<Lease<'_>, Refusal> {
        match timeout_at(deadline, self.pool.get()).await {
            Ok(connected) => connected.map_err(Refusal::Sink),
            Err(_) => Err(Refusal::Sink(self.no_connection())),
        }
    }

    fn no_connection(&self) -> Failure {
        let (place, timeout) = (self.pool.place(), self.pool.timeout);
        let message = format!("{place} gave no connection within {timeout:?}; it is tried again");
        Failure::unreachable("unreachable", message)
    }

    fn not_replicated(&self) -> Failure {
        let place = self.pool.place();
        let message = format!(
            "{place} was made to end its wait for its synchronous standbys; what was sent may not be on them, and comes again"
        );
        Failure { kind: "not_replicated", ..Failure::sink(message) }
    }

    fn over_time(&self) -> Failure {
        let (place, timeout) = (self.pool.place(), self.pool.timeout);
        let message = format!("{place} did not answer within {timeout:?}; what was sent may be there, and comes again");
        Failure::unclear("timeout", message)
    }
}

impl Sink for PostgresSink {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, one_receiver: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move { self.append_batch(&batch).await })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.pool.close())
    }

    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async move {
            let checked = tokio::time::timeout(self.pool.timeout, self.pool.check()).await;
            checked.unwrap_or_else(|_| Err(self.no_connection()))
        })
    }
}

/// Lanes with the epochs of their owners.
type Lanes = BTreeMap<u32, Epoch>;

/// Each lane with the highest epoch.
fn lanes_of(events: &[&Attempt]) -> Lanes {
    let mut lanes = Lanes::new();
    for attempt in events {
        if let Some(lane) = attempt.lane {
            let epoch = lanes.entry(lane).or_insert(attempt.epoch);
            *epoch = attempt.epoch.max(*epoch);
        }
    }
    lanes
}

/// The batch in parts that a statement can carry, the first one last.
fn parts_of(events: &[Attempt]) -> Vec<Vec<usize>> {
    let mut parts = vec![Vec::new()];
    let mut size = 0;
    for (index, attempt) in events.iter().enumerate() {
        size += attempt.event.size();
        if size > STATEMENT_BYTES_MAX && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(Vec::new());
            size = attempt.event.size();
        }
        parts.last_mut().expect("there is one").push(index);
    }
    parts.reverse();
    parts
}

/// What became of each event so far.
struct Answers<'a> {
    events: &'a [Attempt],
    outcomes: Vec<Option<Outcome>>,
    /// Keys with a failure; nothing behind it is tried.
    stopped: HashSet<&'a str>,
}

impl<'a> Answers<'a> {
    fn new(events: &'a [Attempt]) -> Self {
        Answers { events, outcomes: vec![None; events.len()], stopped: HashSet::new() }
    }

    /// Without events behind a failure of their key.
    fn still_to_try(&self, mut part: Vec<usize>) -> Vec<usize> {
        part.retain(|index| !self.is_stopped(*index));
        part
    }

    /// Cuts before an event that cannot be stored, so that it fails in its turn and not before earlier ones of its key; the rest is
    /// put back. None: nothing is left to append.
    fn up_to_unstorable(&mut self, mut part: Vec<usize>, parts: &mut Vec<Vec<usize>>) -> Option<Vec<usize>> {
        let found = part.iter().enumerate().find_map(|(at, index)| Some((at, unstorable(&self.events[*index].event)?)));
        match found {
            Some((0, what)) => {
                let message = format!("the {what} has a NUL character, which PostgreSQL cannot store");
                self.fail(part[0], Failure::unsendable("not_storable", message));
                parts.push(part.split_off(1));
                None
            }
            Some((at, _)) => {
                parts.push(part.split_off(at));
                Some(part)
            }
            None => Some(part).filter(|part| !part.is_empty()),
        }
    }

    /// The statement was committed; what it left out belongs to another relay by now.
    fn appended(&mut self, part: &[usize], owned: &Lanes) {
        for index in part {
            let attempt = &self.events[*index];
            match attempt.lane {
                Some(lane) if owned.get(&lane) != Some(&attempt.epoch) => {
                    if !self.is_stopped(*index) {
                        self.fail(*index, fenced(lane));
                    }
                }
                _ => self.outcomes[*index] = Some(Outcome::Delivered),
            }
        }
    }

    fn fail(&mut self, index: usize, failure: Failure) {
        self.outcomes[index] = Some(Outcome::Failed(failure));
        self.stopped.extend(self.events[index].event.key.as_deref());
    }

    fn fail_all(&mut self, part: &[usize], failure: &Failure) {
        for index in part {
            if !self.is_stopped(*index) {
                self.fail(*index, failure.clone());
            }
        }
    }

    fn is_stopped(&self, index: usize) -> bool {
        self.events[index].event.key.as_deref().is_some_and(|key| self.stopped.contains(key))
    }

    fn outcomes(self) -> Vec<Outcome> {
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::NotTried)).collect()
    }
}

fn fenced(lane: u32) -> Failure {
    let message = format!(
        "lane {lane} has a newer owner, which has appended already; nothing of it was written. A relay that was replaced ends \
         with this by itself"
    );
    Failure { kind: "fenced", ..Failure::sink(message) }
}
