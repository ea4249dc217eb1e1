//! What `status` says beyond the figures.

use pillarbox::admin::{Operator, PrunePolicy, State};
use pillarbox::{NewEvent, Subscription};
use pillarbox_postgres::{Limits, PostgresStore};

use crate::fixture::{Database, delivery, join, one_lane, own, settle, write};
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
async fn a_hold_that_is_nearly_over_is_an_alarm() {
    let database = Database::new().await;
    database.publish_keys(&["a"]).await;
    let store = database.store().await;
    join(&store, [Subscription { hold: Some(HOUR), ..one_lane("s") }]).await;
    assert!(store.status().await.unwrap().log.alarms.is_empty());
    database
        .execute(
            "alter table pillarbox.event disable trigger is_never_changed;
             update pillarbox.event set created_at = clock_timestamp() - interval '50 minutes'",
        )
        .await;
    let alarms = store.status().await.unwrap().log.alarms;
    assert!(alarms[0].contains("'s' is about to lose events: its oldest one is 50 min old"), "{alarms:?}");
}

#[tokio::test]
async fn what_no_hold_drops_is_no_reason_for_its_alarm() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b"]).await;
    database
        .execute(
            "alter table pillarbox.event disable trigger is_never_changed;
             update pillarbox.event set created_at = clock_timestamp() - interval '50 minutes'",
        )
        .await;
    let store = database.store().await;
    let joined = join(&store, [Subscription { hold: Some(HOUR), ..one_lane("s") }]).await;
    let alarms = async || store.status().await.unwrap().log.alarms;
    assert_eq!(alarms().await.len(), 1);
    // Nothing is dropped that is younger than what everybody keeps.
    let keep = |keep| Limits { retention_keep: Some(keep), ..Limits::default() };
    for (limits, count) in [(keep(Some(2 * HOUR)), 0), (keep(None), 0), (keep(Some(HOUR)), 1)] {
        store.set_limits(limits).await.unwrap();
        assert_eq!(alarms().await.len(), count, "{limits:?}");
    }
    let lane = crate::fixture::lane(joined.subscriptions[0].id);
    let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let mut parked = write(lane, epoch, 2);
    parked.put.push(delivery(1, "a", State::Retrying));
    assert!(settle(&store, parked).await);
    assert!(store.status().await.unwrap().subscriptions[0].oldest_age_seconds.unwrap() > 2_900.0);
    assert_eq!(alarms().await, Vec::<String>::new(), "a delivery stays, however old it is");
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
