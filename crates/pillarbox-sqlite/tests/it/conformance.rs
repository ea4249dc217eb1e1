use std::collections::HashMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::store::{DeliveryRow, InstanceId, LaneWrite, Settlement, Store, Transact};
use pillarbox::{ErrorKind, NewEvent, Position, Result};
use pillarbox_sqlite::{Limits, SqliteStore, Transactional, accept, publish};
use pillarbox_testkit::store_suite::{Fixture, FixtureFeatures, Verdict, check_all};
use rusqlite::{Connection, TransactionBehavior};
use uuid::Uuid;

use crate::fixture::{Database, delivery, lane, own, take, write};

struct SqliteFixture {
    database: Database,
    /// Publishers' transactions that are open, by number.
    open: Mutex<HashMap<u64, Connection>>,
}

impl SqliteFixture {
    fn new() -> Self {
        SqliteFixture { database: Database::new(), open: Mutex::default() }
    }

    fn close(&self, transaction: u64, how: &str) {
        let connection = self.open.lock().unwrap().remove(&transaction).unwrap();
        connection.execute_batch(how).unwrap();
    }
}

impl Fixture for SqliteFixture {
    type Store = SqliteStore;
    type Operator = SqliteStore;

    /// SQLite has one writer, so that no publisher's transaction is open beside another (`concurrent_writers`) and a poll is
    /// one snapshot that nothing can happen in the middle of (`during_poll`). The power cannot be made to fail under a file
    /// (`power_loss`): that what is returned was synced first is shown in `reading`.
    fn features(&self) -> FixtureFeatures {
        FixtureFeatures {
            transactions: true,
            fail_settle: true,
            bury: true,
            fill: true,
            stored_policy: true,
            dedup: true,
            transact: true,
            inbox: true,
            ..FixtureFeatures::default()
        }
    }

    async fn open(&self) -> Result<SqliteStore> {
        SqliteStore::open(&self.database.path)
    }

    async fn operator(&self) -> Result<SqliteStore> {
        SqliteStore::open(&self.database.path)
    }

    async fn publish(&self, events: Vec<NewEvent>) -> Result<Vec<Position>> {
        let mut connection = self.database.connect();
        let tx = connection.transaction().unwrap();
        let mut positions = Vec::new();
        for event in &events {
            publish(&tx, event)?;
            positions.push(tx.last_insert_rowid());
        }
        tx.commit().unwrap();
        Ok(positions)
    }

    async fn kill(&self, store: SqliteStore) {
        drop(store);
    }

    async fn age(&self, through: Position, by: Duration) {
        self.database.execute(&format!(
            "drop trigger if exists pillarbox_event_is_never_changed;
             update pillarbox_event set created_at = created_at - {} where position <= {through}",
            by.as_millis()
        ));
    }

    async fn age_deaths(&self, by: Duration) {
        self.database.execute(&format!("update pillarbox_delivery set died_at = died_at - {}", by.as_millis()));
    }

    async fn move_floor(&self, subscription: &str, lane: u32, floor: Position) {
        self.database.execute(&format!(
            "update pillarbox_cursor set floor = {floor} where lane = {lane}
             and subscription = (select id from pillarbox_subscription where name = '{subscription}')"
        ));
    }

    async fn rows(&self) -> u64 {
        let count = |table| self.database.number(&format!("select count(*) from pillarbox_{table}")) as u64;
        ["cursor", "delivery", "progress", "subscription"].into_iter().map(count).sum()
    }

    async fn leave_gap(&self) -> Position {
        let sql = "update sqlite_sequence set seq = seq + 1 where name = 'pillarbox_event' returning seq";
        self.database.number(sql)
    }

    async fn fill(&self, position: Position) -> Uuid {
        let (id, connection) = (Uuid::now_v7(), self.database.connect());
        let sql = "insert into pillarbox_event (position, id, topic, key, type) values (?1, ?2, 't', 'a', 'y')";
        connection.execute(sql, (position, id.to_string())).unwrap();
        id
    }

    async fn allow_retention(&self, limit: Option<Duration>) {
        let limits = Limits { retention_keep: Some(limit), retention_dead: Some(limit), ..Limits::default() };
        let store = self.database.store();
        store.set_limits(limits).await.unwrap();
        // What is not named stays as it is.
        store.set_limits(Limits::default()).await.unwrap();
    }

    async fn transactional(&self, batch_size: usize, verdict: Verdict) -> Arc<dyn Transact> {
        self.database.execute("create table effect (number integer primary key, position integer not null)");
        let handler = Transactional::new(&self.database.path, move |transaction, event| {
            transaction.execute("insert into effect (position) values (?1)", [event.position])?;
            publish(transaction, &NewEvent::new("effects", "effect.happened"))?;
            verdict(&event)
        });
        Arc::new(handler.unwrap().batch_size(batch_size))
    }

    async fn effects(&self) -> Vec<Position> {
        let connection = self.database.connect();
        let mut statement = connection.prepare("select position from effect order by number").unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    async fn accept(&self, consumer: &str, id: Uuid) -> Result<bool> {
        let mut connection = self.database.connect();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let first = accept(&tx, consumer, id)?;
        tx.commit().unwrap();
        Ok(first)
    }

    async fn age_inbox(&self, but: Uuid, by: Duration) {
        let sql = format!("update pillarbox_inbox set accepted_at = accepted_at - {} where id <> ?1", by.as_millis());
        self.database.connect().execute(&sql, [but.to_string()]).unwrap();
    }

    async fn begin(&self) -> u64 {
        let connection = self.database.connect();
        connection.execute_batch("begin immediate").unwrap();
        let mut open = self.open.lock().unwrap();
        let number = open.len() as u64;
        assert!(open.insert(number, connection).is_none());
        number
    }

    async fn insert(&self, transaction: u64, event: NewEvent) -> Position {
        let open = self.open.lock().unwrap();
        publish(&open[&transaction], &event).unwrap();
        open[&transaction].last_insert_rowid()
    }

    async fn commit(&self, transaction: u64) {
        self.close(transaction, "commit");
    }

    async fn abort(&self, transaction: u64) {
        self.close(transaction, "rollback");
    }

    async fn bury(&self, instance: InstanceId) {
        self.database.execute(&format!("delete from pillarbox_instance where id = {}", instance.0));
    }

    /// Its last statements fail, after the cursor and the other deliveries were written; of a queue these are the rows.
    fn fail_next_settle(&self) {
        self.database.execute(
            "create trigger fails before delete on pillarbox_delivery
             begin select raise(abort, 'the settlement fails half way'); end;
             create trigger fails_for_a_queue after insert on pillarbox_delivery
             when (select mode from pillarbox_subscription where id = new.subscription) = 'queue'
             begin select raise(abort, 'the settlement fails half way'); end",
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_passes_the_suite() {
    let report = check_all(|| async { SqliteFixture::new() }).await;
    report.assert_sound();
    let skipped = [
        "a_late_commit_is_shown_by_a_later_scan",
        "an_aborted_event_is_never_shown",
        "a_writer_is_named_until_its_rows_are_visible",
        "starting_now_includes_what_commits_later",
        "what_one_poll_does_not_show_and_no_writer_holds_never_appears",
        "what_was_polled_survives_a_power_loss",
        "a_silent_owner_that_holds_its_lock_is_not_waited_for",
    ];
    assert_eq!(
        report.skipped, skipped,
        "only what needs several writers, the power to fail, or locks that outlive a call"
    );
}

/// Set in the second run of this test, which the system allows no large files.
const SMALL_DISK: &str = "PILLARBOX_TEST_SMALL_DISK";

/// Deliveries a settlement.
const ROWS: i64 = 100;

/// The settlement with this number: its deliveries take some hundred kilobytes.
fn settlement(write: LaneWrite, number: i64) -> LaneWrite {
    let row = |position| DeliveryRow { key: Some("k".repeat(1000).into()), ..delivery(position, "", State::Pending) };
    let put = (1..=ROWS).map(|index| row((number - 1) * ROWS + index)).collect();
    LaneWrite { put, ..write }
}

#[tokio::test]
async fn a_settlement_that_meets_a_full_disk_half_way_leaves_nothing_behind() {
    if let Some(path) = std::env::var_os(SMALL_DISK) {
        return settle_until_full(path.as_ref()).await;
    }
    let database = Database::new();
    database.execute("insert into pillarbox_event (position, topic, type) values (1000000, 't', 'y')");
    // A file that would grow beyond 2048 blocks cannot be written; ignoring the signal makes that an error.
    let script = "trap '' XFSZ; ulimit -f 2048; exec \"$0\" \"$@\"";
    let name = "conformance::a_settlement_that_meets_a_full_disk_half_way_leaves_nothing_behind";
    let mut again = Command::new("sh");
    again.args(["-c", script]).arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", name]);
    let output = again.env(SMALL_DISK, &database.path).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    let written: i64 = text.split("written: ").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    assert!(written > 0, "{text}");

    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert_eq!(state.cursor.floor, written * ROWS);
    assert_eq!(state.deliveries.len() as i64, written * ROWS, "cursor and deliveries belong together");
    let next = settlement(write(lane, epoch, (written + 1) * ROWS), written + 1);
    assert!(crate::fixture::settle(&store, next).await, "with room again it goes on");
}

async fn settle_until_full(path: &std::path::Path) {
    let store = SqliteStore::open(path).unwrap();
    let joined = crate::fixture::join(&store, [crate::fixture::one_lane("s")]).await;
    let lane = lane(joined.subscriptions[0].id);
    let epoch = take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let mut written = 0;
    let settle = async |number| {
        let lanes = vec![settlement(write(lane, epoch, number * ROWS), number)];
        store.settle(&Settlement { lanes, ..Settlement::default() }).await
    };
    let error = loop {
        match settle(written + 1).await {
            Ok(answers) => assert_eq!(answers, [true]),
            Err(error) => break error,
        }
        written += 1;
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    // It can be tried again, and says the same; what is there can be read.
    assert_eq!(settle(written + 1).await.unwrap_err().kind(), ErrorKind::Full);
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert_eq!(state.cursor.floor, written * ROWS);
    println!("written: {written}");
}
