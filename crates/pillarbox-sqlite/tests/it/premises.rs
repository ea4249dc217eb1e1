use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use pillarbox::admin::Operator;
use pillarbox::store::{Cursor, Store};
use pillarbox::{ErrorKind, NewEvent};
use pillarbox_sqlite::{SqliteStore, adopt, fresh, migrate, publish};

use crate::fixture::{Database, events, join, one_lane, own, settle, write};

/// A copy of the database's file, complete without its write-ahead log.
fn copy(database: &Database, name: &str) -> std::path::PathBuf {
    database.connect().query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(())).unwrap();
    let copy = database.folder.path().join(name);
    std::fs::copy(&database.path, &copy).unwrap();
    copy
}

#[test]
fn a_copy_is_refused_until_it_is_adopted() {
    let database = Database::new();
    database.publish_keys(&["a"]);
    let copy = copy(&database, "copy.db");
    let error = SqliteStore::open(&copy).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign);
    assert!(error.to_string().contains("--adopt") && error.to_string().contains("--fresh"), "{error}");
    migrate(&copy).unwrap();
    assert_eq!(SqliteStore::open(&copy).unwrap_err().kind(), ErrorKind::Foreign, "migrating does not adopt");
    adopt(&copy).unwrap();
    SqliteStore::open(&copy).unwrap();
    database.store();
}

#[tokio::test]
async fn a_fresh_copy_has_a_new_identity_and_delivers_nothing_old() {
    let database = Database::new();
    database.publish_keys(&["a", "b"]);
    let store = database.store();
    join(&store, [one_lane("s")]).await;
    let before = store.status().await.unwrap();
    assert_eq!(before.subscriptions[0].pending, 2);
    let copy = copy(&database, "copy.db");
    fresh(&copy).unwrap();
    let after = SqliteStore::open(&copy).unwrap().status().await.unwrap();
    assert_ne!(after.log.log_id, before.log.log_id);
    assert_eq!(after.log.incarnation, before.log.incarnation + 1);
    assert_eq!((after.subscriptions[0].pending, after.subscriptions[0].floor, after.instances.len()), (0, 2, 0));
}

#[tokio::test]
async fn what_lay_in_a_fresh_copy_is_never_delivered_to_whomever() {
    use pillarbox::admin::Change;
    use pillarbox::{Start, Subscription};
    let database = Database::new();
    database.publish_keys(&["a", "b"]);
    let copy = copy(&database, "copy.db");
    fresh(&copy).unwrap();
    let store = SqliteStore::open(&copy).unwrap();
    store.publish(&[NewEvent::new("t", "new").key("a")]).await.unwrap();
    let starts = [Start::Beginning, Start::Position(0), Start::Time(pillarbox::Timestamp(0)), Start::Position(3)];
    let named = |(index, start): (usize, Start)| Subscription { start, ..one_lane(&format!("s{index}")) };
    join(&store, starts.into_iter().enumerate().map(named)).await;
    let floors = async || -> Vec<i64> {
        store.status().await.unwrap().subscriptions.iter().map(|subscription| subscription.floor).collect()
    };
    assert_eq!(floors().await, [2, 2, 2, 3]);
    for key in [None, Some("a".to_owned())] {
        let rewind = Change::Rewind { subscription: "s3".into(), to: Start::Beginning, key };
        let done = store.change(&rewind, false).await.unwrap();
        assert!(done.message.contains("above position 2") && done.message.contains("fresh"), "{}", done.message);
    }
    assert_eq!(floors().await, [2, 2, 2, 2]);
    let deliveries = store.books().await.unwrap().lanes.iter().map(|book| book.deliveries.count()).sum::<u64>();
    assert_eq!(deliveries, 0, "a key is not replayed from before either");
}

#[test]
fn a_moved_file_is_at_home_where_it_is() {
    let database = Database::new();
    drop(copy(&database, "unused.db"));
    let moved = database.folder.path().join("moved.db");
    std::fs::rename(&database.path, &moved).unwrap();
    SqliteStore::open(&moved).unwrap();
    SqliteStore::open(&moved).unwrap();
}

#[tokio::test]
async fn a_log_that_is_not_its_own_continuation_is_found_at_load() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "b"]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut settlement = write(lane, epoch, 2);
    settlement.cursor = Cursor { floor: 2, anchor: Some((2, ids[1])), ..Cursor::default() };
    assert!(settle(&store, settlement).await);
    store.load(&[(lane, epoch)]).await.unwrap();

    database.delete_event("position = 2");
    database.execute("insert into pillarbox_event (position, topic, type) values (2, 't', 'y')");
    let error = store.load(&[(lane, epoch)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign);
    assert!(error.to_string().contains("migrate --adopt"), "{error}");
    adopt(&database.path).unwrap();
    assert!(store.load(&[(lane, epoch + 1)]).await.unwrap()[0].is_some());
}

/// Set in the second run of this test, which is not the superuser's: he may write everything.
const READ_ONLY_FILE: &str = "PILLARBOX_TEST_READ_ONLY_FILE";

#[test]
fn a_read_only_file_is_refused() {
    let check = |path: &std::path::Path| {
        let error = SqliteStore::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("write access"), "{error}");
    };
    if let Some(path) = std::env::var_os(READ_ONLY_FILE) {
        return check(path.as_ref());
    }
    let database = Database::new();
    drop(copy(&database, "unused.db"));
    std::fs::set_permissions(&database.path, Permissions::from_mode(0o444)).unwrap();
    if File::options().write(true).open(&database.path).is_err() {
        return check(&database.path);
    }
    const NOBODY: u32 = 65_534;
    std::fs::set_permissions(database.folder.path(), Permissions::from_mode(0o777)).unwrap();
    let program = database.folder.path().join("it");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut again = Command::new(program);
    again.args(["--exact", "premises::a_read_only_file_is_refused"]).uid(NOBODY).gid(NOBODY);
    let output = again.env(READ_ONLY_FILE, &database.path).current_dir("/").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_file_that_is_no_database_is_fatal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.db");
    std::fs::write(&path, "this is not a database, but a text that is long enough to be looked at".repeat(20)).unwrap();
    assert_eq!(SqliteStore::open(&path).unwrap_err().kind(), ErrorKind::Fatal);
}

#[test]
fn a_database_without_write_ahead_log_is_refused() {
    let database = Database::new();
    database.execute("pragma journal_mode = delete");
    let error = SqliteStore::open(&database.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    migrate(&database.path).unwrap();
    database.store();
}

#[tokio::test]
async fn a_full_disk_is_said_and_loses_nothing() {
    let database = Database::new();
    let store = database.store();
    let mut connection = database.connect();
    let pages: i64 = connection.query_row("pragma page_count", [], |row| row.get(0)).unwrap();
    connection.pragma_update(None, "max_page_count", pages + 20).unwrap();
    let event = NewEvent::new("t", "y").bytes(vec![0; 10_000], "x");
    let mut committed = 0;
    let error = loop {
        let tx = connection.transaction().unwrap();
        match publish(&tx, &event) {
            Ok(_) => tx.commit().unwrap(),
            Err(error) => break error,
        }
        committed += 1;
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert!(committed > 0);
    assert_eq!(events(&store).await.len(), committed);
    connection.pragma_update(None, "max_page_count", i64::from(u32::MAX - 1)).unwrap();
    publish(&connection, &event).unwrap();
    assert_eq!(events(&store).await.len(), committed + 1);
}

#[tokio::test]
async fn a_long_reader_that_starves_the_checkpoint_is_seen() {
    let database = Database::new();
    let store = database.store();
    let reader = database.connect();
    reader.execute_batch("begin; select count(*) from pillarbox_event").unwrap();
    database.publish_keys(&["a"; 500]);
    let found = store.maintain().await.unwrap();
    assert!(found.pages_held > 0, "{found:?}");
    let checks = store.doctor().await.unwrap();
    let check = checks.iter().find(|check| check.name == "write-ahead log").unwrap();
    assert_eq!(check.level, pillarbox::admin::Level::Warning, "{check:?}");
    reader.execute_batch("rollback").unwrap();
    assert_eq!(store.maintain().await.unwrap().pages_held, 0);
}

#[tokio::test]
async fn doctor_finds_a_sound_log_sound_and_a_broken_one_broken() {
    let database = Database::new();
    database.publish_keys(&["a", "b"]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let failed = async || -> Vec<String> {
        let checks = store.doctor().await.unwrap();
        let bad = checks.into_iter().filter(|check| check.level == pillarbox::admin::Level::Failed);
        bad.inspect(|check| assert!(check.fix.is_some())).map(|check| check.name).collect()
    };
    assert!(failed().await.is_empty());
    let mut settlement = write(lane, epoch, 2);
    settlement.put.push(crate::fixture::delivery(2, "b", pillarbox::admin::State::Dead));
    assert!(settle(&store, settlement).await);
    database.delete_event("position = 2");
    database.execute("insert into pillarbox_dead_range (low, high, closed_at) values (1, 1, 0)");
    assert_eq!(failed().await, ["dead ranges", "deliveries"]);
}

#[cfg(unix)]
#[tokio::test]
async fn doctor_warns_of_a_file_that_everybody_can_read_or_write() {
    use std::os::unix::fs::PermissionsExt;
    let database = Database::new();
    let store = database.store();
    for (mode, level) in [
        (0o640, pillarbox::admin::Level::Ok),
        (0o644, pillarbox::admin::Level::Warning),
        (0o646, pillarbox::admin::Level::Warning),
    ] {
        std::fs::set_permissions(&database.path, std::fs::Permissions::from_mode(mode)).unwrap();
        let checks = store.doctor().await.unwrap();
        let check = checks.iter().find(|check| check.name == "permissions").unwrap();
        assert_eq!(check.level, level, "{mode:o}: {check:?}");
    }
}
