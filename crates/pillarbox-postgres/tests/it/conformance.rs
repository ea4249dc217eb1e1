use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::store::{InstanceId, PollRequest, Store, Transact};
use pillarbox::{Delivery, Failure, NewEvent, Position, Result, with_state};
use pillarbox_postgres::{Hook, Limits, Mutant, PostgresStore, Transactional, accept, publish};
use pillarbox_testkit::postgres::{Mode, Server};
use pillarbox_testkit::store_suite::{
    DuringPoll, Fixture, FixtureFeatures, SuiteReport, Verdict, check_all, check_named,
};
use tokio_postgres::{Client, Transaction};
use uuid::Uuid;

use crate::fixture::{Database, poll_tail, tail};

/// What a relay has open: control, waiter, reader and writer. The waiter's may be noticed later.
const STEADY_CONNECTIONS: i64 = 3;

/// A publisher's transaction that is open on a connection of its own.
type Open = Arc<Mutex<HashMap<u64, Arc<Client>>>>;

struct PostgresFixture {
    database: Database,
    open: Open,
    next: AtomicU64,
    during_poll: Arc<Mutex<Option<(usize, DuringPoll)>>>,
    /// Polls go step by step, perhaps broken, instead of in one message.
    stepwise: bool,
    mutant: Option<Mutant>,
    /// A server of its own that can be killed.
    server: Option<Arc<Server>>,
}

impl PostgresFixture {
    async fn new() -> Self {
        Self::on(Database::new().await, None, None)
    }

    async fn stepwise(mutant: Option<Mutant>) -> Self {
        PostgresFixture { stepwise: true, ..Self::on(Database::new().await, mutant, None) }
    }

    fn on(database: Database, mutant: Option<Mutant>, server: Option<Arc<Server>>) -> Self {
        let (open, during_poll) = Default::default();
        PostgresFixture {
            database,
            open,
            next: AtomicU64::new(1),
            during_poll,
            stepwise: mutant.is_some(),
            mutant,
            server,
        }
    }

    fn transaction(&self, number: u64) -> Arc<Client> {
        self.open.lock().unwrap()[&number].clone()
    }

    async fn close(&self, number: u64, how: &str) {
        let client = self.open.lock().unwrap().remove(&number).unwrap();
        client.batch_execute(how).await.unwrap();
    }

    /// Carries out what is to happen after so many steps of a poll.
    fn hook(&self) -> Hook {
        let (open, during_poll) = (self.open.clone(), self.during_poll.clone());
        Arc::new(move |done| {
            let due = during_poll.lock().unwrap().take_if(|(steps, _)| *steps == done);
            let open = open.clone();
            Box::pin(async move {
                match due.map(|(_, action)| action) {
                    Some(DuringPoll::Insert(number, event)) => {
                        let client = open.lock().unwrap()[&number].clone();
                        insert(&client, &event).await;
                    }
                    // A commit of PostgreSQL has no halves that a client could see.
                    Some(DuringPoll::Show(number)) => {
                        let client = open.lock().unwrap()[&number].clone();
                        client.batch_execute("commit; begin").await.unwrap();
                    }
                    Some(DuringPoll::Commit(number)) => {
                        let client = open.lock().unwrap().remove(&number).unwrap();
                        client.batch_execute("commit").await.unwrap();
                    }
                    None => {}
                }
            })
        })
    }
}

async fn insert(client: &Client, event: &NewEvent) -> Position {
    let id = pillarbox_postgres::publish(client, event).await.unwrap();
    client.query_one("select position from pillarbox.event_view where id = $1", &[&id]).await.unwrap().get(0)
}

/// An effect and an event that says so, and what the test decides.
async fn judged_effect(
    verdict: Verdict,
    transaction: &Transaction<'_>,
    delivery: Delivery,
) -> std::result::Result<(), Failure> {
    transaction.execute("insert into effect (position) values ($1)", &[&delivery.position]).await?;
    publish(transaction, &NewEvent::new("effects", "effect.happened")).await?;
    verdict(&delivery)
}

impl Fixture for PostgresFixture {
    type Store = PostgresStore;
    type Operator = PostgresStore;

    fn features(&self) -> FixtureFeatures {
        FixtureFeatures {
            transactions: true,
            concurrent_writers: true,
            fill: true,
            stored_policy: true,
            dedup: true,
            transact: true,
            inbox: true,
            during_poll: self.stepwise,
            power_loss: self.server.is_some(),
            fail_settle: true,
            bury: true,
            hold: true,
            whole_tables: true,
        }
    }

    async fn open(&self) -> Result<PostgresStore> {
        let store = PostgresStore::open(self.database.url()).await?;
        if self.stepwise {
            store.experiment(self.mutant, Some(self.hook())).await;
        }
        Ok(store)
    }

    async fn operator(&self) -> Result<PostgresStore> {
        PostgresStore::open(self.database.url()).await
    }

    async fn publish(&self, events: Vec<NewEvent>) -> Result<Vec<Position>> {
        let client = self.database.client().await;
        // Nothing but what the relay does makes it durable.
        client.batch_execute("set synchronous_commit = off; begin").await.unwrap();
        let mut positions = Vec::new();
        for event in &events {
            positions.push(insert(&client, event).await);
        }
        client.batch_execute("commit").await.unwrap();
        Ok(positions)
    }

    /// The server notices the end of a process by its connections, a moment later.
    async fn kill(&self, store: PostgresStore) {
        let sql = "select count(*) from pg_stat_activity
            where datname = current_database() and application_name like 'pillarbox%'";
        let (client, before) = (self.database.client().await, self.database.number(sql).await);
        drop(store);
        while client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > (before - STEADY_CONNECTIONS).max(0) {
            tokio::task::yield_now().await;
        }
    }

    async fn age(&self, through: Position, by: Duration) {
        let sql = format!(
            "do $$
            declare leaf text;
            begin
                for leaf in select name from pillarbox.leaf loop
                    execute format('update pillarbox.%I set id = coalesce(id, pillarbox.event_id(position, created_at)), '
                        'created_at = created_at - {} * interval ''1 millisecond'' where position <= {through}', leaf);
                end loop;
            end $$",
            by.as_millis()
        );
        self.database.execute(&sql).await;
    }

    async fn age_deaths(&self, by: Duration) {
        let by = by.as_millis();
        let sql = format!("update pillarbox.delivery set died_at = died_at - {by} * interval '1 millisecond'");
        self.database.execute(&sql).await;
    }

    async fn divide(&self, positions: u32) {
        self.database.execute(&format!("update pillarbox.meta set leaf_size = {positions}")).await;
        self.database.store().await.lay_leaves(None).await.unwrap();
    }

    async fn move_floor(&self, subscription: &str, lane: u32, floor: Position) {
        let sql = format!(
            "update pillarbox.cursor set floor = {floor} where lane = {lane}
             and subscription = (select id from pillarbox.subscription where name = '{subscription}')"
        );
        self.database.execute(&sql).await;
    }

    async fn rows(&self) -> u64 {
        let mut rows = 0;
        for table in ["cursor", "delivery", "progress", "subscription"] {
            rows += self.database.number(&format!("select count(*) from pillarbox.{table}")).await;
        }
        rows as u64
    }

    async fn leave_gap(&self) -> Position {
        self.database.number("select nextval('pillarbox.event_position_seq')").await
    }

    async fn fill(&self, position: Position) -> Uuid {
        let sql = "insert into pillarbox.event (position, topic, key, type) overriding system value \
             values ($1, 't', 'a', 'y') returning pillarbox.event_id(position, created_at)";
        self.database.client().await.query_one(sql, &[&position]).await.unwrap().get(0)
    }

    async fn allow_retention(&self, limit: Option<Duration>) {
        let limits = Limits { retention_keep: Some(limit), retention_dead: Some(limit), ..Limits::default() };
        let store = self.database.store().await;
        store.set_limits(limits).await.unwrap();
        // What is not named stays as it is.
        store.set_limits(Limits::default()).await.unwrap();
    }

    async fn transactional(&self, batch_size: usize, verdict: Verdict) -> Arc<dyn Transact> {
        let table = "create table effect (number bigint generated always as identity, position bigint not null)";
        self.database.execute(table).await;
        let handler = Transactional::new(self.database.url(), with_state(verdict, judged_effect));
        Arc::new(handler.unwrap().batch_size(batch_size))
    }

    async fn effects(&self) -> Vec<Position> {
        let sql = "select position from effect order by number";
        let rows = self.database.client().await.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn accept(&self, consumer: &str, id: Uuid) -> Result<bool> {
        accept(&self.database.client().await, consumer, id).await
    }

    async fn age_inbox(&self, but: Uuid, by: Duration) {
        let by = by.as_millis();
        let sql = format!(
            "update pillarbox.inbox set accepted_at = accepted_at - {by} * interval '1 millisecond' where id <> $1"
        );
        self.database.client().await.execute(&sql, &[&but]).await.unwrap();
    }

    async fn bury(&self, instance: InstanceId) {
        self.database.execute(&format!("delete from pillarbox.instance where id = {}", instance.0)).await;
    }

    async fn hold(&self, instance: InstanceId) {
        let client = self.database.client().await;
        let name = format!("pillarbox relay {} writer", instance.0);
        let sql = format!("set application_name = '{name}'; begin; select from pillarbox.cursor for update");
        client.batch_execute(&sql).await.unwrap();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.lock().unwrap().insert(number, Arc::new(client));
    }

    async fn begin(&self) -> u64 {
        let client = self.database.client().await;
        client.batch_execute("begin").await.unwrap();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.lock().unwrap().insert(number, Arc::new(client));
        number
    }

    async fn insert(&self, transaction: u64, event: NewEvent) -> Position {
        insert(&self.transaction(transaction), &event).await
    }

    async fn commit(&self, transaction: u64) {
        self.close(transaction, "commit").await;
    }

    async fn abort(&self, transaction: u64) {
        self.close(transaction, "rollback").await;
    }

    fn during_poll(&self, steps: usize, action: DuringPoll) {
        *self.during_poll.lock().unwrap() = Some((steps, action));
    }

    fn power_loss(&self) {
        let server = self.server.as_ref().expect("asked only where there is one");
        server.restart(Mode::Immediate).unwrap();
    }

    /// Its last statements fail, after the cursor and the other deliveries were written.
    fn fail_next_settle(&self) {
        let sql = "create function pillarbox.fail() returns trigger language plpgsql as
            $$ begin raise 'the settlement fails half way'; end $$;
            create trigger fails before delete on pillarbox.delivery execute function pillarbox.fail();
            create trigger queue_fails before insert on pillarbox.delivery
            for each row when (new.queued) execute function pillarbox.fail()";
        let url = self.database.url().to_owned();
        let client = async move { crate::fixture::connect(&url).await.batch_execute(sql).await.unwrap() };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(client));
    }
}

/// What has to do with the order of a poll's steps, so that it is tried step by step.
const STEPWISE: &str = "what_one_poll_does_not_show_and_no_writer_holds_never_appears";

const POWER_LOSS: &str = "what_was_polled_survives_a_power_loss";

async fn stepwise(mutant: Option<Mutant>) -> SuiteReport {
    check_named(STEPWISE, || PostgresFixture::stepwise(mutant)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_passes_the_suite() {
    let report = check_all(PostgresFixture::new).await;
    report.assert_sound();
    assert_eq!(report.skipped, [STEPWISE, POWER_LOSS], "they are tried below");
}

/// The crash case with a server whose log writer sleeps: what is not flushed by somebody's commit is lost.
async fn after_a_crash(mutant: Option<Mutant>) -> SuiteReport {
    let server = Arc::new(Server::builder().setting("wal_writer_delay", "10s").start().unwrap());
    let fixture = || async { PostgresFixture::on(Database::on(&server).await, mutant, Some(server.clone())) };
    check_named(POWER_LOSS, fixture).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_polled_survives_a_crash_of_the_server() {
    after_a_crash(None).await.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_barrier_a_crash_takes_back_what_was_polled() {
    let report = after_a_crash(Some(Mutant::NoBarrier)).await;
    assert_eq!(report.failed, [(POWER_LOSS, "{1-3} were read, {} survived".to_owned())]);
}

/// The same for the short way of a poll: what was read, and what of it is there after the crash.
async fn glance_before_a_crash(mutant: Option<Mutant>) -> [String; 2] {
    let server = Server::builder().setting("wal_writer_delay", "10s").start().unwrap();
    let database = Database::on(&server).await;
    let store = database.store().await;
    if mutant.is_some() {
        store.experiment(mutant, None).await;
    }
    // What the first poll of a session asks for, the short way takes for known.
    assert!(poll_tail(&store, 0).await.visible.is_empty());
    let publisher = database.client().await;
    // The log writer is also woken when a page of the write-ahead log is full: the events shall lie in one.
    publisher.batch_execute("select pg_switch_wal(); set synchronous_commit = off").await.unwrap();
    for _ in 0..3 {
        insert(&publisher, &NewEvent::new("t", "y")).await;
    }
    let page = store.poll(&PollRequest { without_writers: true, ..tail(0, 1_000) }).await.unwrap();
    assert!(page.writers.is_none() && page.scans[0].events.len() == 3, "{page:?}");
    server.restart(Mode::Immediate).unwrap();
    let survived = poll_tail(&database.store().await, 0).await.visible;
    [page.scans[0].visible.to_string(), survived.to_string()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_at_a_glance_survives_a_crash_of_the_server() {
    assert_eq!(glance_before_a_crash(None).await, ["1-3", "1-3"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_barrier_a_crash_takes_back_what_was_read_at_a_glance() {
    assert_eq!(glance_before_a_crash(Some(Mutant::NoBarrierAtAGlance)).await, ["1-3", ""]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poll_tells_what_it_has_not_shown_whatever_happens_between_its_steps() {
    stepwise(None).await.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poll_in_another_order_or_in_one_snapshot_fails_the_suite() {
    // A writer comes after it was looked for; a row becomes visible after the rows were read, or after the only snapshot.
    for (mutant, begun, late) in [
        (Mutant::WritersBeforeHorizon, false, 1),
        (Mutant::RowsBeforeHorizon, true, 3),
        (Mutant::RepeatableRead, true, 3),
    ] {
        let report = stepwise(Some(mutant)).await;
        let when = format!("after 1 steps (inserted before: {begun}, committed: false)");
        let how = format!("no writer was named, and {{{late}}} appeared below the horizon {late}");
        assert_eq!(report.failed, [(STEPWISE, format!("{when}: {how}"))], "{mutant:?}");
    }
}
