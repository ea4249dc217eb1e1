use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pillarbox::store::{
    ClaimEnd, ClaimRequest, Claims, Epoch, Fleet, Hello, InstanceId, Joined, LaneRef, LaneState, Page, PollRequest,
    RecoverRequest, Recovered, Report, Settlement, Store, StoreFeatures, Take, Wake,
};
use pillarbox::{Error, ErrorKind, Event, Position, Result};

use crate::{Broken, MemoryLog};

/// One instance at a time on a [`MemoryLog`]. Several of them on one log are a fleet.
#[derive(Debug)]
pub struct MemoryStore {
    log: MemoryLog,
    instance: Mutex<Option<InstanceId>>,
    /// The commits that had been made when the last poll began.
    commits_seen: AtomicU64,
    /// The ends that a wait has told of.
    ends_seen: AtomicU64,
}

impl MemoryStore {
    /// A store that has not joined yet.
    pub fn new(log: &MemoryLog) -> Self {
        let ends = log.bell().borrow().ends;
        MemoryStore {
            log: log.clone(),
            instance: Mutex::new(None),
            commits_seen: AtomicU64::new(0),
            ends_seen: AtomicU64::new(ends),
        }
    }

    /// The log that it works on.
    pub fn log(&self) -> &MemoryLog {
        &self.log
    }

    /// The instance that it is, once it has joined.
    pub fn instance(&self) -> Option<InstanceId> {
        *self.instance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pends while the instance is frozen, as a stopped process would.
    async fn joined(&self) -> Result<InstanceId> {
        let instance =
            self.instance().ok_or_else(|| Error::new(ErrorKind::Invalid, "join before you use the store"))?;
        let mut bell = self.log.bell();
        while self.log.is_frozen(instance) && !self.log.is_killed(instance) {
            bell.changed().await.map_err(|gone| Error::with_source(ErrorKind::Fatal, "the log is gone", gone))?;
        }
        self.check(instance)?;
        Ok(instance)
    }

    fn check(&self, instance: InstanceId) -> Result<()> {
        if self.log.is_killed(instance) {
            return Err(Error::new(ErrorKind::Ended, "this instance was killed; join again under a new number"));
        }
        Ok(())
    }
}

impl Store for MemoryStore {
    fn features(&self) -> StoreFeatures {
        let options = self.log.options();
        StoreFeatures { lock_proves_life: options.lock_proves_life, settle_interval: options.settle_interval }
    }

    async fn join(&self, hello: Hello) -> Result<Joined> {
        let joined = self.log.join(hello)?;
        let before = self.instance.lock().unwrap_or_else(PoisonError::into_inner).replace(joined.instance);
        before.map_or(Ok(()), |before| self.log.leave(before))?;
        Ok(joined)
    }

    async fn observe(&self, report: &Report) -> Result<Fleet> {
        let instance = self.joined().await?;
        self.log.observe(instance, report)
    }

    async fn take(&self, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        let instance = self.joined().await?;
        self.log.take(instance, lanes)
    }

    async fn load(&self, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        let instance = self.joined().await?;
        self.log.load(instance, lanes)
    }

    async fn poll(&self, request: &PollRequest) -> Result<Page> {
        self.joined().await?;
        let commits = self.log.bell().borrow().commits;
        let page = self.log.poll(request)?;
        self.commits_seen.fetch_max(commits, Ordering::Relaxed);
        Ok(page)
    }

    async fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        self.joined().await?;
        self.log.fetch(positions)
    }

    async fn settle(&self, settlement: &Settlement) -> Result<Vec<bool>> {
        let instance = self.joined().await?;
        self.log.settle(instance, settlement)
    }

    async fn claim(&self, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        let instance = self.joined().await?;
        self.log.claim(instance, requests)
    }

    async fn finish(&self, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        let instance = self.joined().await?;
        self.log.finish(instance, ends)
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        self.joined().await?;
        self.log.recover(request)
    }

    async fn wait(&self, timeout: Duration) -> Result<Wake> {
        self.instance().map_or(Ok(()), |instance| self.check(instance))?;
        let mut bell = self.log.bell();
        if self.log.options().broken == Some(Broken::WaitForgetsThePast) {
            self.commits_seen.store(bell.borrow().commits, Ordering::Relaxed);
        }
        let commits_seen = self.commits_seen.load(Ordering::Relaxed);
        let ends_seen = self.ends_seen.load(Ordering::Relaxed);
        let rang = bell.wait_for(|bell| bell.commits > commits_seen || bell.ends > ends_seen);
        match tokio::time::timeout(timeout, rang).await {
            Ok(Ok(bell)) => self.ends_seen.fetch_max(bell.ends, Ordering::Relaxed),
            Ok(Err(gone)) => return Err(Error::with_source(ErrorKind::Fatal, "the log is gone", gone)),
            Err(_) => return Ok(Wake::Timeout),
        };
        Ok(Wake::Rang)
    }

    async fn leave(&self) -> Result<()> {
        let instance = self.joined().await?;
        self.log.leave(instance)
    }
}
