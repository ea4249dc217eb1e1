use std::time::Duration;

use pillarbox::store::InstanceId;
use pillarbox::{NewEvent, Position, Result};

use crate::store_suite::{DuringPoll, Fixture, FixtureFeatures};
use crate::{Broken, MemoryLog, MemoryOptions, MemoryStore, Tx};

/// The fixture of the store suite for a [`MemoryLog`], sound or deliberately broken.
#[derive(Debug)]
pub struct MemoryFixture {
    log: MemoryLog,
}

impl MemoryFixture {
    /// A fixture with an empty log.
    pub fn new(broken: Option<Broken>) -> Self {
        MemoryFixture { log: MemoryLog::with(MemoryOptions { broken, ..MemoryOptions::default() }) }
    }
}

impl Fixture for MemoryFixture {
    type Store = MemoryStore;
    type Operator = MemoryStore;

    fn features(&self) -> FixtureFeatures {
        FixtureFeatures {
            concurrent_writers: true,
            during_poll: true,
            power_loss: true,
            fail_settle: true,
            bury: true,
            hold: true,
            whole_tables: false,
        }
    }

    async fn open(&self) -> Result<MemoryStore> {
        Ok(MemoryStore::new(&self.log))
    }

    async fn operator(&self) -> Result<MemoryStore> {
        Ok(MemoryStore::new(&self.log))
    }

    async fn publish(&self, events: Vec<NewEvent>) -> Result<Vec<Position>> {
        Ok(self.log.publish(events))
    }

    async fn kill(&self, store: MemoryStore) {
        if let Some(instance) = store.instance() {
            self.log.kill(instance);
        }
    }

    async fn bury(&self, instance: InstanceId) {
        self.log.bury(instance);
    }

    async fn hold(&self, instance: InstanceId) {
        self.log.hold(instance);
    }

    async fn pass(&self, time: Duration) {
        self.log.set_time(self.log.time().plus(time));
    }

    async fn begin(&self) -> u64 {
        self.log.begin().0
    }

    async fn insert(&self, transaction: u64, event: NewEvent) -> Position {
        self.log.insert(Tx(transaction), event)
    }

    async fn commit(&self, transaction: u64) {
        self.log.commit(Tx(transaction));
    }

    async fn abort(&self, transaction: u64) {
        self.log.abort(Tx(transaction));
    }

    fn during_poll(&self, steps: usize, action: DuringPoll) {
        let (log, mut action) = (self.log.clone(), Some(action));
        self.log.between_poll_steps(move |done| {
            if done != steps {
                return;
            }
            match action.take() {
                Some(DuringPoll::Insert(transaction, event)) => _ = log.insert(Tx(transaction), *event),
                Some(DuringPoll::Show(transaction)) => log.show(Tx(transaction)),
                Some(DuringPoll::Commit(transaction)) => log.commit(Tx(transaction)),
                None => {}
            }
        });
    }

    fn power_loss(&self) {
        self.log.power_loss();
    }

    fn fail_next_settle(&self) {
        self.log.fail_next_settle();
    }
}
