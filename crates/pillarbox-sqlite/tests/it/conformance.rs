use std::process::Command;

use pillarbox::admin::State;
use pillarbox::store::{DeliveryRow, InstanceId, LaneWrite, Settlement, Store};
use pillarbox::{ErrorKind, NewEvent, Position, Result};
use pillarbox_sqlite::SqliteStore;
use pillarbox_testkit::store_suite::{Fixture, FixtureFeatures, check_all};

use crate::fixture::{Database, delivery, lane, own, take, write};

struct SqliteFixture(Database);

impl Fixture for SqliteFixture {
    type Store = SqliteStore;
    type Operator = SqliteStore;

    /// SQLite has one writer, so that no publisher's transaction is open beside another (`concurrent_writers`) and a poll is
    /// one snapshot that nothing can happen in the middle of (`during_poll`). The power cannot be made to fail under a file
    /// (`power_loss`): that what is returned was synced first is shown in `reading`.
    fn features(&self) -> FixtureFeatures {
        FixtureFeatures { fail_settle: true, bury: true, ..FixtureFeatures::default() }
    }

    async fn open(&self) -> Result<SqliteStore> {
        SqliteStore::open(&self.0.path)
    }

    async fn operator(&self) -> Result<SqliteStore> {
        SqliteStore::open(&self.0.path)
    }

    async fn publish(&self, events: Vec<NewEvent>) -> Result<Vec<Position>> {
        let mut connection = self.0.connect();
        let tx = connection.transaction().unwrap();
        let mut positions = Vec::new();
        for event in &events {
            pillarbox_sqlite::publish(&tx, event)?;
            positions.push(tx.last_insert_rowid());
        }
        tx.commit().unwrap();
        Ok(positions)
    }

    async fn kill(&self, store: SqliteStore) {
        drop(store);
    }

    async fn bury(&self, instance: InstanceId) {
        self.0.execute(&format!("delete from pillarbox_instance where id = {}", instance.0));
    }

    /// Its last statements fail, after the cursor and the other deliveries were written; of a queue these are the rows.
    fn fail_next_settle(&self) {
        self.0.execute(
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
    let report = check_all(|| async { SqliteFixture(Database::new()) }).await;
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
