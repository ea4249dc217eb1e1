use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::retention::time_to_store;
use pillarbox::store::InstanceId;
use pillarbox::{Event, NewEvent, Position, Relay, Result, Timestamp};
use uuid::Uuid;

use crate::memory_lane::Lane;
use crate::memory_log::SubscriptionRow;
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

    /// What a log in memory has no part for: deduplication (`dedup`), transactions that applications write in (`transact`), and an inbox
    /// (`inbox`).
    fn features(&self) -> FixtureFeatures {
        FixtureFeatures {
            concurrent_writers: true,
            during_poll: true,
            power_loss: true,
            fail_settle: true,
            bury: true,
            hold: true,
            transactions: true,
            stored_policy: true,
            fill: true,
            ..FixtureFeatures::default()
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

    async fn end(&self, relay: Relay) {
        let instance = relay.instance();
        drop(relay);
        self.log.kill(instance);
    }

    fn run_clock(&self) {
        self.log.inner().options.real_time = true;
    }

    async fn age(&self, through: Position, by: Duration) {
        for event in self.log.inner().rows.range_mut(..=through).map(|(_, event)| event) {
            let created_at = earlier(event.created_at, by);
            *event = Arc::new(Event { created_at, ..(**event).clone() });
        }
    }

    async fn age_deaths(&self, by: Duration) {
        let mut inner = self.log.inner();
        let lanes = inner.subscriptions.iter_mut().flat_map(|row| &mut row.lanes);
        for died_at in lanes.flat_map(|lane| lane.deliveries.values_mut()).filter_map(|row| row.died_at.as_mut()) {
            *died_at = earlier(*died_at, by);
        }
    }

    async fn move_floor(&self, subscription: &str, lane: u32, floor: Position) {
        self.log.tamper_cursor(subscription, lane, floor);
    }

    async fn rows(&self) -> u64 {
        let inner = self.log.inner();
        let of_lane = |lane: &Lane| 1 + lane.deliveries.len() + lane.entries.len();
        let of = |row: &SubscriptionRow| 1 + row.lanes.iter().map(of_lane).sum::<usize>();
        inner.subscriptions.iter().map(of).sum::<usize>() as u64
    }

    async fn leave_gap(&self) -> Position {
        let transaction = self.log.begin();
        let position = self.log.insert(transaction, NewEvent::new("gap", "t"));
        self.log.abort(transaction);
        position
    }

    async fn fill(&self, position: Position) -> Uuid {
        self.log.fill(position)
    }

    async fn allow_retention(&self, limit: Option<Duration>) {
        let mut inner = self.log.inner();
        inner.retention.keep_ms = time_to_store(limit);
        inner.retention.dead_ms = time_to_store(limit);
    }

    async fn bury(&self, instance: InstanceId) {
        self.log.bury(instance);
    }

    async fn hold(&self, instance: InstanceId) {
        self.log.hold(instance);
    }

    async fn pass(&self, time: Duration) {
        if self.log.options().real_time {
            tokio::time::sleep(time).await;
        }
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

fn earlier(at: Timestamp, by: Duration) -> Timestamp {
    Timestamp(at.0 - by.as_millis() as i64)
}
