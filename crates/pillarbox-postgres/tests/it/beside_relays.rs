//! Commands and retention beside relays at work.

use std::time::Duration;

use pillarbox::admin::{Change, Operator, PrunePolicy, Selection, State};
use pillarbox::store::{LaneWrite, Store, Wake};
use pillarbox::{OnDead, Subscription};

use crate::fixture::{Database, delivery, join, one_lane, own, settle, write};
use crate::operating::{HOUR, mixed, requeue, states};

#[tokio::test]
async fn other_relays_hear_at_once_of_a_command_and_of_a_lane_that_was_released() {
    const PATIENCE: Duration = Duration::from_secs(30);
    let database = Database::new().await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let other = database.store().await;
    join(&other, [one_lane("s")]).await;
    let quiet = async || while other.wait(Duration::from_millis(100)).await.unwrap() == Wake::Rang {};
    let rings = async || {
        let rang = async { while other.wait(PATIENCE).await.unwrap() != Wake::Rang {} };
        tokio::time::timeout(PATIENCE, rang).await.is_ok()
    };
    quiet().await;
    assert!(settle(&store, write(lane, epoch, 0)).await);
    assert_ne!(
        other.wait(Duration::from_millis(100)).await.unwrap(),
        Wake::Rang,
        "a settlement is nobody else's matter"
    );
    assert!(settle(&store, LaneWrite { release: true, ..write(lane, epoch, 0) }).await);
    assert!(rings().await, "a lane was released");
    quiet().await;
    store.change(&Change::pause("s"), false).await.unwrap();
    assert!(rings().await, "a subscription was paused");
}

/// Locks the first cursor, waits until `work` waits for it, and looks whether the second one is free: everybody takes them in
/// the same order, or two could wait for each other.
async fn check_order(database: &Database, work: impl Future<Output = ()>) {
    let mut holder = database.client().await;
    let settling = holder.transaction().await.unwrap();
    let lock = "select from pillarbox.cursor order by subscription, lane limit 1";
    settling.execute(&format!("{lock} for update"), &[]).await.unwrap();
    let look = async {
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        while database.number(waiting).await == 0 {
            tokio::task::yield_now().await;
        }
        settling.execute(&format!("{lock} offset 1 for update nowait"), &[]).await.expect("the second one is free");
        settling.commit().await.unwrap();
    };
    tokio::join!(work, look);
}

#[tokio::test]
async fn lanes_are_locked_in_their_order() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b"]).await;
    // So the rows are found in the order in which they lie, which is none.
    let name = database.url().rsplit_once('/').unwrap().1.to_owned();
    database
        .execute(&format!(
            "alter database {name} set enable_indexscan = off; alter database {name} set enable_bitmapscan = off"
        ))
        .await;
    let store = database.store().await;
    let id = join(&store, [Subscription { lanes: 2, ..Subscription::new("s") }]).await.subscriptions[0].id.0;
    database
        .execute(&format!(
            "insert into pillarbox.delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at)
             select {id}, n, n - 1, n, 'dead', 1, now(), now(), now() - interval '1 day' from generate_series(1, 2) as n;
             update pillarbox.cursor set floor = 2 where lane = 1; update pillarbox.cursor set floor = 2 where lane = 0"
        ))
        .await;
    let policy = PrunePolicy { keep: None, dead: Some(HOUR), ..PrunePolicy::default() };
    check_order(&database, async { assert_eq!(store.prune(&policy).await.unwrap().dead, 2) }).await;
}

#[tokio::test]
async fn subscriptions_whose_hold_is_over_are_locked_in_the_order_of_their_numbers() {
    let database = crate::retention::database(3).await;
    database.publish_keys(&["a"; 4]).await;
    crate::retention::age(&database, 3).await;
    let store = database.store().await;
    for name in ["z", "a"] {
        join(&store, [Subscription { hold: Some(HOUR), ..one_lane(name) }]).await;
    }
    let policy = PrunePolicy { keep: Some(HOUR), ..PrunePolicy::default() };
    check_order(&database, async { drop(store.prune(&policy).await.unwrap()) }).await;
}

#[tokio::test]
async fn a_command_waits_for_the_owners_settlement_and_the_owner_for_the_command() {
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    let mut holder = database.client().await;
    let settling = holder.transaction().await.unwrap();
    settling.execute("select from pillarbox.cursor for update", &[]).await.unwrap();
    let requeue = requeue(Selection::Event(ids[0]), 1);
    let command = store.change(&requeue, false);
    let release = async {
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        while database.number(waiting).await == 0 {
            tokio::task::yield_now().await;
        }
        settling.execute("update pillarbox.delivery set state = 'retrying'", &[]).await.unwrap();
        settling.commit().await.unwrap();
    };
    let (done, ()) = tokio::join!(command, release);
    assert_eq!(done.unwrap().count, 1);
    let mut late = write(view.lane, view.epoch, 5);
    late.revision = view.revision;
    late.change = vec![(delivery(1, "a", State::Dead), None)];
    assert!(settle(&store, late).await);
    assert_eq!(states(&store).await[&1], State::Pending, "what the owner knew of it is not written over the command");
}
