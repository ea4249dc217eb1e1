use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::{
    Books, Change, Changed, Check, EventRecord, ListQuery, ListRow, Operator, PrunePolicy, Pruned, Status,
};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::{
    ClaimEnd, ClaimRequest, Claims, Epoch, Fleet, Hello, Joined, LaneRef, LaneState, Page, PollRequest, RecoverRequest,
    Recovered, Report, Settlement, Store, StoreFeatures, Take, Wake,
};
use pillarbox::{Event, NewEvent, Position, Result};
#[cfg(feature = "postgres")]
use pillarbox_postgres::PostgresStore;
use pillarbox_sqlite::SqliteStore;
use uuid::Uuid;

/// An opened log, whichever database it is in: every command works on this one type.
#[derive(Debug)]
pub(crate) enum Log {
    Sqlite(Box<SqliteStore>),
    #[cfg(feature = "postgres")]
    Postgres(Box<PostgresStore>),
}

/// What a config says of a whole log: it holds for all other programs that work on it, without this config. None: as it is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// How long a `dedup_key` is remembered.
    pub(crate) dedup_window: Option<Duration>,
    /// How long events stay at least; `Some(None)`: for ever.
    pub(crate) retention_keep: Option<Option<Duration>>,
    /// How long dead deliveries stay at least.
    pub(crate) retention_dead: Option<Option<Duration>>,
    /// How long what inboxes have accepted stays at least.
    pub(crate) retention_inbox: Option<Option<Duration>>,
}

/// The same call on whichever store it is.
macro_rules! on_each {
    ($log:expr, $store:ident => $call:expr) => {
        match $log {
            Log::Sqlite($store) => $call,
            #[cfg(feature = "postgres")]
            Log::Postgres($store) => $call,
        }
    };
}

impl Log {
    /// Writes the limits of the log.
    pub(crate) async fn set_limits(&self, limits: Limits) -> Result<()> {
        let Limits { dedup_window, retention_keep, retention_dead, retention_inbox } = limits;
        match self {
            Log::Sqlite(store) => {
                let limits = pillarbox_sqlite::Limits {
                    dedup_window,
                    retention_keep,
                    retention_dead,
                    retention_inbox,
                    ..Default::default()
                };
                store.set_limits(limits).await
            }
            #[cfg(feature = "postgres")]
            Log::Postgres(store) => {
                let limits = pillarbox_postgres::Limits {
                    dedup_window,
                    retention_keep,
                    retention_dead,
                    retention_inbox,
                    ..Default::default()
                };
                store.set_limits(limits).await
            }
        }
    }

    /// Lays the tables of the log as retention wants them, however long publishers wait for that.
    pub(crate) async fn lay_leaves(&self, keep: Option<Duration>) -> Result<()> {
        match self {
            Log::Sqlite(_) => Ok(()),
            #[cfg(feature = "postgres")]
            Log::Postgres(store) => store.lay_leaves(keep).await,
        }
    }
}

impl Store for Log {
    fn features(&self) -> StoreFeatures {
        on_each!(self, store => store.features())
    }

    async fn join(&self, hello: Hello) -> Result<Joined> {
        on_each!(self, store => store.join(hello).await)
    }

    async fn observe(&self, report: &Report) -> Result<Fleet> {
        on_each!(self, store => store.observe(report).await)
    }

    async fn take(&self, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        on_each!(self, store => store.take(lanes).await)
    }

    async fn load(&self, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        on_each!(self, store => store.load(lanes).await)
    }

    async fn poll(&self, request: &PollRequest) -> Result<Page> {
        on_each!(self, store => store.poll(request).await)
    }

    async fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        on_each!(self, store => store.fetch(positions).await)
    }

    async fn settle(&self, settlement: &Settlement) -> Result<Vec<bool>> {
        on_each!(self, store => store.settle(settlement).await)
    }

    async fn claim(&self, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        on_each!(self, store => store.claim(requests).await)
    }

    async fn finish(&self, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        on_each!(self, store => store.finish(ends).await)
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        on_each!(self, store => store.recover(request).await)
    }

    async fn wait(&self, timeout: Duration) -> Result<Wake> {
        on_each!(self, store => store.wait(timeout).await)
    }

    async fn leave(&self) -> Result<()> {
        on_each!(self, store => store.leave().await)
    }
}

impl Operator for Log {
    async fn status(&self) -> Result<Status> {
        on_each!(self, store => store.status().await)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        on_each!(self, store => store.list(query).await)
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        on_each!(self, store => store.show(id).await)
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        on_each!(self, store => store.change(change, dry_run).await)
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        on_each!(self, store => store.publish(events).await)
    }

    async fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        on_each!(self, store => store.append(stream, expected, events).await)
    }

    async fn read_stream(&self, stream: &str, from: i64, limit: usize) -> Result<Vec<Event>> {
        on_each!(self, store => store.read_stream(stream, from, limit).await)
    }

    async fn streams(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<StreamHead>> {
        on_each!(self, store => store.streams(prefix, after, limit).await)
    }

    async fn books(&self) -> Result<Books> {
        on_each!(self, store => store.books().await)
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        on_each!(self, store => store.prune(policy).await)
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        on_each!(self, store => store.doctor().await)
    }

    async fn reset(&self) -> Result<()> {
        on_each!(self, store => store.reset().await)
    }
}
