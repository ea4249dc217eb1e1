use std::path::Path;

use pillarbox::ErrorKind;
use pillarbox::admin::Operator;
use pillarbox::store::Store;
use pillarbox_postgres::{
    PgConfig, PostgresStore, SCHEMA_VERSION, SchemaState, check, dump_schema, migrate, print_sql, set_doorbell,
};
use pillarbox_testkit::postgres::Server;
use uuid::Uuid;

use crate::fixture::{Database, connect, hello, join, one_lane};
use crate::ownership::until;
use crate::waking::ASLEEP;

fn config(url: &str) -> PgConfig {
    url.parse().unwrap()
}

/// Set PILLARBOX_BLESS=1 to write the file anew. The text of views and functions is the server's, and differs a little from
/// version to version: it is compared on the one that Debian 12 brings.
#[tokio::test]
async fn the_committed_schema_is_what_the_migrations_make() {
    const VERSION: u32 = 15;
    let dump = dump_schema(&config(Database::new().await.url())).await.unwrap();
    if Server::shared().version() != VERSION {
        assert!(dump.contains("table event partition by RANGE"), "{dump}");
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.sql");
    if std::env::var_os("PILLARBOX_BLESS").is_some() {
        std::fs::write(&file, &dump).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), dump, "run the tests with PILLARBOX_BLESS=1");
}

#[tokio::test]
async fn the_printed_sql_makes_the_same_schema() {
    let by_hand = Server::shared().create_database().unwrap();
    by_hand.psql(&print_sql("pillarbox", false)).unwrap();
    let config = config(by_hand.url());
    assert_eq!(check(&config).await.unwrap(), SchemaState::Current);
    let migrated = Database::new().await;
    assert_eq!(dump_schema(&config).await.unwrap(), dump_schema(&self::config(migrated.url())).await.unwrap());
    PostgresStore::open(by_hand.url()).await.unwrap();
}

#[tokio::test]
async fn migrating_again_does_nothing_and_several_may_migrate_at_once() {
    let database = Server::shared().create_database().unwrap();
    let config = config(database.url());
    let (first, second, third) = tokio::try_join!(migrate(&config), migrate(&config), migrate(&config)).unwrap();
    let created = [&first, &second, &third].map(|migrated| migrated.created);
    assert_eq!(created.iter().filter(|created| **created).count(), 1, "{created:?}");
    let again = migrate(&config).await.unwrap();
    assert!(!again.created && again.applied.is_empty(), "{again:?}");
    assert_eq!(check(&config).await.unwrap(), SchemaState::Current);
}

#[tokio::test]
async fn a_log_may_lie_in_another_schema_and_two_in_one_database() {
    let database = Server::shared().create_database().unwrap();
    let other = config(&format!("{}?schema=other_log", database.url()));
    migrate(&other).await.unwrap();
    assert_eq!(check(&config(database.url())).await.unwrap(), SchemaState::Missing);
    migrate(&config(database.url())).await.unwrap();
    let client = connect(database.url()).await;
    let schema = pillarbox_postgres::Schema::new("other_log").unwrap();
    schema.publish(&client, &pillarbox::NewEvent::new("t", "y").dedup_key("d")).await.unwrap();
    let sql = "select (select count(*) from pillarbox.event), (select count(*) from other_log.event)";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, 1));
    assert!(pillarbox_postgres::Schema::new("x; drop").is_err());
}

#[tokio::test]
async fn a_schema_that_is_a_word_of_sql_or_somebody_elses_is_refused() {
    let database = Server::shared().create_database().unwrap();
    let client = connect(database.url()).await;
    let reserved = "select word::text from pg_get_keywords() where catcode in ('R', 'T')";
    let rows = client.query(reserved, &[]).await.unwrap();
    let words: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert!(words.len() > 90, "{words:?}");
    let others = ["public", "pg_catalog", "pg_x", "information_schema", "Upper", "1a", ""];
    for name in words.iter().map(String::as_str).chain(others) {
        let error = format!("{}?schema={name}", database.url()).parse::<PgConfig>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name}");
        assert!(pillarbox_postgres::Schema::new(name).is_err(), "{name}");
    }
    // A word that is none everywhere.
    let values = format!("{}?schema=values", database.url());
    migrate(&config(&values)).await.unwrap();
    let schema = pillarbox_postgres::Schema::new("values").unwrap();
    schema.publish(&client, &pillarbox::NewEvent::new("t", "y").dedup_key("d")).await.unwrap();
    client.batch_execute("select values.publish('t', 'y', ordered => true, key => 'k')").await.unwrap();
    assert_eq!(crate::fixture::events(&PostgresStore::open(&values).await.unwrap()).await.len(), 2);
}

#[tokio::test]
async fn a_database_that_ends_idle_sessions_does_not_end_ours() {
    let database = Server::shared().create_database().unwrap();
    migrate(&config(database.url())).await.unwrap();
    let name = database.name();
    Server::shared().psql("postgres", &format!("alter database {name} set idle_session_timeout = '1ms'")).unwrap();
    let store = PostgresStore::open(database.url()).await.unwrap();
    for _ in 0..10 {
        pillarbox::admin::Operator::status(&store).await.unwrap();
    }
}

#[tokio::test]
async fn a_missing_schema_is_named_and_never_created() {
    let database = Server::shared().create_database().unwrap();
    assert_eq!(check(&config(database.url())).await.unwrap(), SchemaState::Missing);
    let error = PostgresStore::open(database.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("pillarbox migrate"), "{error}");
    assert_eq!(check(&config(database.url())).await.unwrap(), SchemaState::Missing);
    let missing = Server::shared().url("no_such_database");
    assert_eq!(PostgresStore::open(&missing).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_newer_breaking_schema_is_refused_and_a_compatible_one_is_not() {
    let database = Database::new().await;
    let config = config(database.url());
    let newer = SCHEMA_VERSION + 1;
    database.execute(&format!("update pillarbox.meta set schema_version = {newer}")).await;
    assert_eq!(check(&config).await.unwrap(), SchemaState::NewerCompatible { version: newer });
    database.store().await;
    migrate(&config).await.unwrap();

    database.execute(&format!("update pillarbox.meta set breaking_version = {newer}")).await;
    assert_eq!(check(&config).await.unwrap(), SchemaState::NewerBreaking { version: newer });
    for error in [PostgresStore::open(database.url()).await.unwrap_err(), migrate(&config).await.map(drop).unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::Schema);
        assert!(error.to_string().contains("upgrade pillarbox"), "{error}");
    }
}

#[tokio::test]
async fn a_relay_that_joins_again_looks_at_the_schema() {
    let database = Database::new().await;
    let store = database.store().await;
    join(&store, [one_lane("s")]).await;
    let newer = SCHEMA_VERSION + 1;
    database.execute(&format!("update pillarbox.meta set schema_version = {newer}")).await;
    join(&store, [one_lane("s")]).await;
    database.execute(&format!("update pillarbox.meta set breaking_version = {newer}")).await;
    let error = store.join(hello([one_lane("s")])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("upgrade pillarbox"), "{error}");
}

#[tokio::test]
async fn an_old_schema_asks_for_migration() {
    let database = Database::new().await;
    database.execute("update pillarbox.meta set schema_version = 0").await;
    let old = SchemaState::Old { from: 0, to: SCHEMA_VERSION };
    assert_eq!(check(&config(database.url())).await.unwrap(), old);
    assert_eq!(PostgresStore::open(database.url()).await.unwrap_err().kind(), ErrorKind::Schema);
}

#[tokio::test]
async fn the_doorbell_is_off_where_transactions_may_be_prepared_and_can_be_turned_on() {
    let database = Server::shared().create_database().unwrap();
    let config = config(database.url());
    assert!(!migrate(&config).await.unwrap().doorbell, "the shared server allows prepared transactions");
    database.psql("begin; select pillarbox.publish('t', 'y'); prepare transaction 'quiet'").unwrap();
    database.psql("commit prepared 'quiet'").unwrap();

    set_doorbell(&config, true).await.unwrap();
    assert!(migrate(&config).await.unwrap().doorbell);
    let store = PostgresStore::open(database.url()).await.unwrap();
    join(&store, [one_lane("s")]).await;
    until(&connect(database.url()).await, ASLEEP, 1).await;
    let rang = database.psql("begin; select pillarbox.publish('t', 'y'); prepare transaction 'rang'").unwrap_err();
    assert!(format!("{rang:#}").contains("PREPARE"), "{rang:#}");
    set_doorbell(&config, false).await.unwrap();
    assert!(!migrate(&config).await.unwrap().doorbell);

    let without = Server::builder().start().unwrap();
    assert!(migrate(&self::config(&without.url("postgres"))).await.unwrap().doorbell);
}

#[tokio::test]
async fn events_stay_as_they_are() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b"]).await;
    let client = database.client().await;
    for (sql, reason) in [
        ("update pillarbox.event set topic = 'other'", "never changed"),
        ("delete from pillarbox.event", "retention"),
        ("truncate pillarbox.event", "retention"),
        ("insert into pillarbox.event (position, topic, type) values (1, 't', 'y')", "position"),
    ] {
        let error = client.batch_execute(sql).await.unwrap_err();
        let said = error.as_db_error().unwrap().message();
        assert!(said.contains(reason), "{said}");
    }
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 2);
}

/// The steps up to a version, as they are printed.
pub(crate) fn steps_up_to(version: i64) -> String {
    let sql = print_sql("pillarbox", true);
    let next = sql.find(&format!("update pillarbox.meta set schema_version = {version};")).unwrap();
    let end = next + sql[next..].find('\n').unwrap();
    format!("{}\ncommit;", &sql[..end])
}

#[tokio::test]
async fn an_upgrade_leaves_the_doorbell_on_or_off() {
    for (change, on) in [("disable", false), ("enable", true), ("enable always", true)] {
        let database = Server::shared().create_database().unwrap();
        database.psql(&steps_up_to(7)).unwrap();
        database.psql(&format!("alter table only pillarbox.event {change} trigger doorbell")).unwrap();
        let migrated = migrate(&config(database.url())).await.unwrap();
        assert_eq!((migrated.applied[0].as_str(), migrated.doorbell), ("8 doorbell", on), "{change}");
    }
}

#[tokio::test]
async fn an_upgrade_keeps_ids_and_journals_and_who_may_publish() {
    let database = Server::shared().create_database().unwrap();
    database.psql(&steps_up_to(9)).unwrap();
    let role = format!("publisher_{}", std::process::id());
    let client = connect(database.url()).await;
    let old = "insert into pillarbox.event (topic, type, headers) values ('t', 'y', '{\"a\": \"b\"}') returning id";
    let old: Uuid = client.query_one(old, &[]).await.unwrap().get(0);
    client
        .batch_execute(&format!(
            "select pillarbox.append('s', 0, '[{{\"type\": \"y\"}}, {{\"type\": \"y\"}}]');
             create role {role}; grant usage on schema pillarbox to {role};
             grant insert (topic, type, payload, id, key, headers, deliver_at) on pillarbox.event to {role}"
        ))
        .await
        .unwrap();
    migrate(&config(database.url())).await.unwrap();
    let store = PostgresStore::open(database.url()).await.unwrap();
    assert_eq!(store.show(old).await.unwrap().unwrap().event.position, 1);
    let versions = "select array_agg(position order by version) from pillarbox.journal where stream = 's'";
    assert_eq!(client.query_one(versions, &[]).await.unwrap().get::<_, Vec<i64>>(0), [2, 3]);
    let publish = "select pillarbox.publish('t', 'y')";
    client.batch_execute(&format!("set role {role}")).await.unwrap();
    let new: Uuid = client.query_one(publish, &[]).await.unwrap().get(0);
    assert_eq!(store.show(new).await.unwrap().unwrap().event.position, 4);
    client.batch_execute(&format!("reset role; drop owned by {role}; drop role {role}")).await.unwrap();
}

/// Waits until somebody waits for a lock on the log.
async fn until_a_migration_waits(client: &tokio_postgres::Client) {
    let waits = "select count(*) from pg_locks where relation = 'pillarbox.event'::regclass and not granted";
    until(client, waits, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_waits_for_those_who_publish_and_ends_none_of_them() {
    let database = Server::shared().create_database().unwrap();
    database.psql(&steps_up_to(9)).unwrap();
    let (client, observer) = (connect(database.url()).await, connect(database.url()).await);
    client.batch_execute("begin; select pillarbox.append('s', 0, '[{\"type\": \"y\"}]')").await.unwrap();
    let config = config(database.url());
    let migrating = tokio::spawn(async move { migrate(&config).await });
    until_a_migration_waits(&observer).await;
    // Needs another table than the log.
    client.batch_execute("select pillarbox.publish('t', 'y', dedup_key => 'd'); commit").await.unwrap();
    migrating.await.unwrap().unwrap();
    let journal = "select count(*) from pillarbox.journal where stream = 's' and version = 1";
    assert_eq!(client.query_one(journal, &[]).await.unwrap().get::<_, i64>(0), 1);
}
