//! What `status` says beyond the figures.

use pillarbox::admin::{Operator, PrunePolicy};
use pillarbox::{NewEvent, Subscription};
use pillarbox_postgres::PostgresStore;

use crate::fixture::{Database, join, one_lane, own};
use crate::operating::HOUR;

#[tokio::test]
async fn who_has_published_and_not_ended_is_named_with_the_command_that_ends_it() {
    let database = Database::new().await;
    let store = database.store().await;
    own(&store, "s").await;
    assert!(store.status().await.unwrap().log.holders.is_empty());

    let writer = database.client().await;
    writer.batch_execute("set application_name = 'checkout'; begin").await.unwrap();
    let pid: i32 = writer.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    pillarbox_postgres::publish(&writer, &NewEvent::new("t", "y")).await.unwrap();
    let preparer = database.client().await;
    preparer.batch_execute("begin").await.unwrap();
    pillarbox_postgres::publish(&preparer, &NewEvent::new("t", "y")).await.unwrap();
    preparer.batch_execute("prepare transaction 'it''s forgotten'").await.unwrap();
    database.publish_keys(&["a"]).await;

    let log = loop {
        let log = store.status().await.unwrap().log;
        if log.holders.len() == 2 {
            break log;
        }
    };
    let holder = |part: &str| {
        let found = log.holders.iter().find(|holder| holder.contains(part));
        found.unwrap_or_else(|| panic!("'{part}' is not in {:?}", log.holders))
    };
    let session = holder(&format!("pid {pid} (user postgres, application 'checkout', idle in transaction, for "));
    assert!(session.contains(&format!("`select pg_terminate_backend({pid})`")), "{session}");
    assert!(holder("prepared transaction").contains("`rollback prepared 'it''s forgotten'`"), "{:?}", log.holders);
    assert!(log.held_seconds.unwrap() < 60.0, "it is not unhealthy yet");
    assert!(log.alarms.iter().any(|alarm| alarm.contains("drawn and not committed: 1-2")), "{:?}", log.alarms);

    preparer.batch_execute("rollback prepared 'it''s forgotten'").await.unwrap();
    database.number(&format!("select pg_terminate_backend({pid})::int::bigint")).await;
    while !store.status().await.unwrap().log.holders.is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_is_hidden_from_a_role_is_said() {
    let database = Database::new().await;
    let role = format!("watcher_{}", std::process::id());
    let writer = database.client().await;
    writer.batch_execute("begin").await.unwrap();
    pillarbox_postgres::publish(&writer, &NewEvent::new("t", "y")).await.unwrap();
    database
        .execute(&format!(
            "create role {role} login; grant usage on schema pillarbox to {role};
             grant all on all tables in schema pillarbox to {role}; grant all on all sequences in schema pillarbox to {role}"
        ))
        .await;
    let url = database.url().replacen("postgres@", &format!("{role}@"), 1);
    let store = PostgresStore::open(&url).await.unwrap();
    let log = store.status().await.unwrap().log;
    assert!(log.holders[0].contains(&format!("`grant pg_read_all_stats to {role}`")), "{:?}", log.holders);
    assert_eq!(log.held_seconds, None, "an age that nobody can see is not 0");
    drop(store);
    database.execute(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn events_that_were_lost_to_a_hold_are_an_alarm_for_a_day() {
    let database = crate::retention::database(3).await;
    database.publish_keys(&["a"; 4]).await;
    crate::retention::age(&database, 3).await;
    let store = database.store().await;
    join(&store, [Subscription { hold: Some(HOUR), ..one_lane("s") }]).await;
    let policy = PrunePolicy { keep: Some(HOUR), ..PrunePolicy::default() };
    assert_eq!(crate::retention::prune_all(&store, &policy).await.events, 3);
    let alarms = store.status().await.unwrap().log.alarms;
    assert!(alarms.iter().any(|alarm| alarm.contains("'s' has lost 3 events, up to position 3")), "{alarms:?}");
    database.execute("update pillarbox.skip set at = at - interval '25 hours'").await;
    assert_eq!(store.status().await.unwrap().log.alarms, Vec::<String>::new());
}
