use std::path::Path;

use pillarbox::ErrorKind;
use pillarbox::store::Store;
use pillarbox_sqlite::{
    SCHEMA_VERSION, SchemaState, SqliteStore, check, dump_schema, migrate, migrate_connection, print_sql,
};
use rusqlite::Connection;
use rusqlite::config::DbConfig;

use crate::fixture::{Database, hello, join, one_lane};

/// Set PILLARBOX_BLESS=1 to write the file anew.
#[test]
fn the_committed_schema_is_what_the_migrations_make() {
    let dump = dump_schema(&Database::new().connect()).unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.sql");
    if std::env::var_os("PILLARBOX_BLESS").is_some() {
        std::fs::write(&file, &dump).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), dump, "run the tests with PILLARBOX_BLESS=1");
}

#[test]
fn the_printed_sql_makes_the_same_schema() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("by_hand.db");
    let by_hand = Connection::open(&path).unwrap();
    by_hand.execute_batch(&print_sql()).unwrap();
    assert_eq!(dump_schema(&by_hand).unwrap(), dump_schema(&Database::new().connect()).unwrap());
    assert_eq!(check(&path).unwrap(), SchemaState::Current);
    SqliteStore::open(&path).unwrap();
}

/// As the `sqlite3` shell opens a database since version 3.42.
fn defensive(path: impl AsRef<Path>) -> Connection {
    let connection = Connection::open(path).unwrap();
    assert!(connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true).unwrap());
    assert!(!connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false).unwrap());
    connection
}

#[test]
fn the_printed_sql_makes_the_same_schema_in_defensive_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("by_hand.db");
    let by_hand = defensive(&path);
    by_hand.execute_batch(&print_sql()).unwrap();
    assert_eq!(dump_schema(&by_hand).unwrap(), dump_schema(&Database::new().connect()).unwrap());
    pillarbox_sqlite::publish(&by_hand, &pillarbox::NewEvent::new("t", "y")).unwrap();
    SqliteStore::open(&path).unwrap();
}

#[test]
fn a_migration_on_a_connection_in_defensive_mode_says_what_to_do() {
    let connection = defensive(":memory:");
    let error = migrate_connection(&connection).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("SQLITE_DBCONFIG_DEFENSIVE off"), "{error}");
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, false).unwrap();
    assert!(!migrate_connection(&connection).unwrap().is_empty(), "it left nothing behind");
}

#[test]
fn migrating_again_does_nothing() {
    let database = Database::new();
    let again = migrate(&database.path).unwrap();
    assert!(!again.created && again.applied.is_empty(), "{again:?}");
    assert_eq!(check(&database.path).unwrap(), SchemaState::Current);
}

#[test]
fn a_missing_schema_or_file_is_named_and_never_created() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.db");
    assert_eq!(check(&path).unwrap(), SchemaState::Missing);
    let error = SqliteStore::open(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("pillarbox migrate"), "{error}");
    assert!(!path.exists());

    Connection::open(&path).unwrap().execute_batch("create table t (x)").unwrap();
    assert_eq!(check(&path).unwrap(), SchemaState::Missing);
    assert_eq!(SqliteStore::open(&path).unwrap_err().kind(), ErrorKind::Schema);
}

#[test]
fn a_newer_breaking_schema_is_refused_and_a_compatible_one_is_not() {
    let database = Database::new();
    let newer = SCHEMA_VERSION + 1;
    database.execute(&format!("update pillarbox_meta set value = {newer} where name = 'schema_version'"));
    assert_eq!(check(&database.path).unwrap(), SchemaState::NewerCompatible { version: newer });
    database.store();
    migrate(&database.path).unwrap();

    database.execute(&format!("update pillarbox_meta set value = {newer} where name = 'breaking_version'"));
    assert_eq!(check(&database.path).unwrap(), SchemaState::NewerBreaking { version: newer });
    for error in [SqliteStore::open(&database.path).unwrap_err(), migrate(&database.path).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Schema);
        assert!(error.to_string().contains("upgrade pillarbox"), "{error}");
    }
}

#[tokio::test]
async fn a_relay_that_joins_again_looks_at_the_schema() {
    let database = Database::new();
    let store = database.store();
    join(&store, [one_lane("s")]).await;
    let newer = SCHEMA_VERSION + 1;
    database.execute(&format!("update pillarbox_meta set value = {newer} where name = 'schema_version'"));
    join(&store, [one_lane("s")]).await;
    database.execute(&format!("update pillarbox_meta set value = {newer} where name = 'breaking_version'"));
    let error = store.join(hello([one_lane("s")])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("upgrade pillarbox"), "{error}");
}

#[test]
fn an_old_schema_asks_for_migration() {
    let database = Database::new();
    database.execute("update pillarbox_meta set value = 0 where name = 'schema_version'");
    assert_eq!(check(&database.path).unwrap(), SchemaState::Old { from: 0, to: SCHEMA_VERSION });
    assert_eq!(SqliteStore::open(&database.path).unwrap_err().kind(), ErrorKind::Schema);
}
