use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::admin::{Change, Changed, Level, ListQuery, Operator, Selection, State};
use pillarbox::store::{DeliveryRow, Report, Store, SubscriptionReport};
use pillarbox::{ErrorKind, NewEvent, OnDead, Start, Subscription, Timestamp};
use pillarbox_postgres::PostgresStore;
use uuid::Uuid;

use crate::fixture::{Database, delivery, join, one_lane, own, poll_tail, settle, write};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) async fn change(store: &PostgresStore, change: Change) -> pillarbox::Result<Changed> {
    let dry = store.change(&change, true).await;
    let done = store.change(&change, false).await;
    match (&dry, &done) {
        (Ok(dry), Ok(done)) => {
            assert_eq!((dry.count, &dry.events), (done.count, &done.events), "a dry run says the same")
        }
        _ => assert_eq!(dry.is_err(), done.is_err()),
    }
    done
}

pub(crate) fn requeue(which: Selection, limit: usize) -> Change {
    Change::Requeue { subscription: "s".into(), which, limit }
}

pub(crate) fn rewind(to: Start, key: Option<&str>) -> Change {
    Change::Rewind { subscription: "s".into(), to, key: key.map(Into::into) }
}

/// Ends a store as a crash does, and waits until the server has noticed.
async fn gone(database: &Database, store: PostgresStore) {
    drop(store);
    let left = "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'pillarbox%'";
    while database.number(left).await > 0 {
        tokio::task::yield_now().await;
    }
}

pub(crate) async fn states(store: &PostgresStore) -> BTreeMap<i64, State> {
    let query = ListQuery { subscription: Some("s".into()), limit: 1000, ..ListQuery::default() };
    let rows = store.list(&query).await.unwrap();
    rows.into_iter().map(|row| (row.position, row.state.unwrap())).collect()
}

/// Keys a a b c a a: the first of a is dead, b retries, c is delayed, the last of a is in the log.
pub(crate) async fn mixed(database: &Database, on_dead: OnDead) -> (PostgresStore, Vec<Uuid>) {
    let ids = database.publish_keys(&["a", "a", "b", "c", "a", "a"]).await;
    let store = database.store().await;
    let joined = join(&store, [Subscription { on_dead, ..one_lane("s") }]).await;
    let lane = crate::fixture::lane(joined.subscriptions[0].id);
    let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let mut parked = write(lane, epoch, 5);
    parked.put = vec![
        delivery(1, "a", State::Dead),
        delivery(2, "a", State::Pending),
        DeliveryRow { due_at: Timestamp(7), ..delivery(3, "b", State::Retrying) },
        DeliveryRow { due_at: Timestamp::now().plus(HOUR), ..delivery(4, "c", State::Delayed) },
        delivery(5, "a", State::Pending),
    ];
    assert!(settle(&store, parked).await);
    (store, ids)
}

#[tokio::test]
async fn blocked_is_derived_from_the_keys_head() {
    use State::*;
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let expected = [Dead, Blocked, Retrying, Delayed, Blocked, Pending];
    assert_eq!(states(&store).await, (1..).zip(expected).collect());
    let shown = store.show(ids[4]).await.unwrap().unwrap();
    let record = shown.subscriptions[0].delivery.as_ref().unwrap();
    assert_eq!((record.state, record.head), (Blocked, Some((ids[0], 1, Dead))));

    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Skip).await;
    let expected = [Dead, Pending, Retrying, Delayed, Blocked, Pending];
    assert_eq!(states(&store).await, (1..).zip(expected).collect());
}

#[tokio::test]
async fn status_counts_every_state_once() {
    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Block).await;
    database
        .publish(&[
            NewEvent::new("t", "y").deliver_at(Timestamp::now().plus(Duration::from_secs(3600))),
            NewEvent::new("t", "y"),
        ])
        .await;
    let report = SubscriptionReport { in_flight: 1, delivered: 9, ..SubscriptionReport::default() };
    let report = Report { subscriptions: [("s".to_string(), report)].into(), draining: false };
    store.observe(&report).await.unwrap();
    let status = store.status().await.unwrap();
    let s = &status.subscriptions[0];
    let figures = (s.pending, s.delayed, s.processing, s.retrying, s.blocked, s.dead);
    assert_eq!(figures, (1, 2, 1, 1, 2, 1), "eight events, each counted once");
    assert_eq!((s.lag, s.floor, s.lanes_owned, s.owners.len(), s.orphaned), (3, 5, 1, 1, false));
    assert_eq!((s.oldest_due, s.report.delivered), (Some(Timestamp(7)), 9));
    assert!(s.oldest_age_seconds.unwrap() < 60.0);
    assert_eq!((status.log.events, status.log.horizon, status.instances[0].lanes), (8, 8, 1));
    assert!(status.instances[0].alive && status.log.bytes > 0);

    gone(&database, store).await;
    let status = database.store().await.status().await.unwrap();
    let s = &status.subscriptions[0];
    assert_eq!((s.pending, s.processing, s.lanes_owned, s.orphaned), (2, 0, 0, true));
    assert!(!status.instances[0].alive);
}

#[tokio::test]
async fn lists_filter_and_stay_in_log_order() {
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    database.publish(&[NewEvent::new("other.x", "y").key("z").header("correlationid", "c1")]).await;
    let list = async |query: ListQuery| -> Vec<i64> {
        let query = ListQuery { limit: if query.limit == 0 { 100 } else { query.limit }, ..query };
        store.list(&query).await.unwrap().iter().map(|row| row.position).collect()
    };
    let all = ListQuery::default;
    assert_eq!(list(all()).await, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(list(ListQuery { limit: 2, ..all() }).await, [1, 2]);
    assert_eq!(list(ListQuery { key: Some("a".into()), ..all() }).await, [1, 2, 5, 6]);
    assert_eq!(list(ListQuery { topic: Some("other.*".into()), ..all() }).await, [7]);
    assert_eq!(list(ListQuery { correlation_id: Some("c1".into()), ..all() }).await, [7]);
    assert_eq!(list(ListQuery { state: Some(State::Blocked), ..all() }).await, [2, 5]);
    assert_eq!(list(ListQuery { state: Some(State::Pending), key: Some("a".into()), ..all() }).await, [6]);
    let missing = ListQuery { subscription: Some("none".into()), ..all() };
    assert_eq!(store.list(&missing).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.show(Uuid::new_v4()).await.unwrap().is_none());
    let fate = store.show(ids[5]).await.unwrap().unwrap().subscriptions.remove(0);
    assert!(fate.wanted && !fate.settled && fate.delivery.is_none() && fate.settled_by.is_none());
    let fate = store.show(ids[0]).await.unwrap().unwrap().subscriptions.remove(0);
    assert!(fate.settled && fate.settled_by.unwrap().epoch == 1 && fate.owner.unwrap().1);
}

#[tokio::test]
async fn requeue_takes_dead_ones_in_log_order_or_one_in_any_state() {
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let revision = async || store.observe(&Default::default()).await.unwrap().lanes[0].revision;
    let before = revision().await;
    assert_eq!(change(&store, requeue(Selection::Key("b".into()), 10)).await.unwrap().count, 0);
    assert_eq!(change(&store, requeue(Selection::All, 0)).await.unwrap().count, 0);
    assert_eq!(change(&store, requeue(Selection::All, 10)).await.unwrap().events, [ids[0]]);
    assert_eq!(states(&store).await[&1], State::Pending);
    assert!(revision().await > before, "the owner loads again");
    assert_eq!(change(&store, requeue(Selection::Event(ids[2]), 10)).await.unwrap().count, 1);
    let record = store.show(ids[2]).await.unwrap().unwrap().subscriptions.remove(0).delivery.unwrap();
    assert_eq!((record.state, record.attempts), (State::Pending, 0));
    let error = change(&store, requeue(Selection::Event(ids[5]), 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = change(&store, requeue(Selection::Event(Uuid::new_v4()), 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = change(&store, requeue(Selection::Version("a".into(), 1), 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn skip_gives_one_up_and_unblocks_its_key() {
    let database = Database::new().await;
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let skip = |event, reason: &str| Change::Skip { subscription: "s".into(), event, reason: reason.into() };
    assert_eq!(change(&store, skip(ids[0], " ")).await.unwrap_err().kind(), ErrorKind::Invalid);
    let error = change(&store, skip(ids[5], "r")).await.unwrap_err();
    assert!(error.to_string().contains("nothing to skip"), "{error}");
    // Not by way of `change`: the second run would find nothing.
    store.change(&skip(ids[0], "poison"), false).await.unwrap();
    assert_eq!(states(&store).await[&2], State::Pending);
    let fate = store.show(ids[0]).await.unwrap().unwrap().subscriptions.remove(0);
    assert_eq!((fate.skipped.unwrap().0.as_str(), fate.delivery.is_none()), ("poison", true));
    assert_eq!(store.books().await.unwrap().lanes[0].skipped.to_string(), "1");
}

#[tokio::test]
async fn pause_and_resume_are_kept_in_the_database() {
    let database = Database::new().await;
    let store = database.store().await;
    join(&store, [one_lane("s")]).await;
    store.change(&Change::pause("s"), true).await.unwrap();
    assert!(!store.status().await.unwrap().subscriptions[0].paused, "a dry run");
    change(&store, Change::pause("s")).await.unwrap();
    join(&store, [one_lane("s")]).await;
    assert!(database.store().await.status().await.unwrap().subscriptions[0].paused);
    assert_eq!(change(&store, Change::Resume("s".into())).await.unwrap().count, 1);
    assert!(!store.status().await.unwrap().subscriptions[0].paused);
    assert_eq!(change(&store, Change::pause("none")).await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn delete_and_rename_are_refused_while_a_living_instance_runs_it() {
    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Block).await;
    let rename = |to: &str| Change::Rename { from: "s".into(), to: to.into() };
    for refused in [Change::Delete("s".into()), rename("r")] {
        let error = change(&store, refused).await.unwrap_err();
        assert!(error.to_string().contains("instance 1"), "{error}");
    }
    gone(&database, store).await;
    let store = database.store().await;
    assert_eq!(change(&store, rename("no spaces")).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(change(&store, rename("s")).await.unwrap_err().kind(), ErrorKind::Invalid);
    change(&store, rename("r")).await.unwrap();
    assert_eq!(store.status().await.unwrap().subscriptions[0].dead, 1, "a rename keeps everything");
    change(&store, Change::Delete("r".into())).await.unwrap();
    assert!(store.status().await.unwrap().subscriptions.is_empty());
    for table in ["cursor", "delivery", "progress", "subscription"] {
        assert_eq!(database.number(&format!("select count(*) from pillarbox.{table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn relane_needs_quiet_and_keeps_each_keys_order() {
    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Block).await;
    let relane = |lanes| Change::Relane { subscription: "s".into(), lanes };
    assert!(change(&store, relane(3)).await.unwrap_err().to_string().contains("pause"));
    change(&store, Change::pause("s")).await.unwrap();
    assert_eq!(change(&store, relane(0)).await.unwrap_err().kind(), ErrorKind::Invalid);
    let busy = SubscriptionReport { in_flight: 1, ..SubscriptionReport::default() };
    let busy = Report { subscriptions: [("s".to_string(), busy)].into(), draining: false };
    store.observe(&busy).await.unwrap();
    assert!(change(&store, relane(3)).await.unwrap_err().to_string().contains("in flight"));
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    let covered = store.books().await.unwrap().lanes[0].covered.clone();
    store.change(&relane(3), false).await.unwrap();

    assert!(!settle(&store, write(view.lane, view.epoch, 6)).await, "the old owner is fenced");
    let fleet = store.observe(&Default::default()).await.unwrap();
    assert_eq!((fleet.lanes.len(), fleet.subscriptions[0].lanes), (3, 3));
    let books = store.books().await.unwrap();
    assert!(books.lanes.iter().all(|lane| lane.covered == covered && lane.floor == 5));
    assert!(books.lanes.iter().all(|lane| lane.before_start.is_empty()));
    let mut positions = Vec::new();
    for lane in &fleet.lanes {
        let state = store.load(&[(lane.lane, lane.epoch)]).await.unwrap().remove(0).unwrap();
        for delivery in &state.deliveries {
            let expected = pillarbox::store::lane_of(delivery.key_hash(), delivery.position, 3);
            assert_eq!(expected, lane.lane.lane);
            positions.push(delivery.position);
        }
        let of_a: Vec<_> = state.deliveries.iter().filter(|d| d.key.as_deref() == Some("a")).collect();
        assert!(of_a.is_sorted_by_key(|delivery| delivery.position));
    }
    positions.sort_unstable();
    assert_eq!(positions, [1, 2, 3, 4, 5]);
    database.execute("update pillarbox.cursor set floor = 6 where lane = 1").await;
    assert!(change(&store, relane(2)).await.unwrap_err().to_string().contains("same place"));
}

#[tokio::test]
async fn relane_keeps_what_lay_before_the_start_and_a_gap_of_one_lane() {
    let database = Database::new().await;
    database.publish_keys(&["a"; 9]).await;
    let store = database.store().await;
    let wish = Subscription { lanes: 2, start: Start::Position(4), ..Subscription::new("s") };
    let id = join(&store, [wish]).await.subscriptions[0].id;
    for lane in 0..2 {
        let lane = pillarbox::store::LaneRef { subscription: id, lane };
        let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
        assert!(settle(&store, write(lane, epoch, 6)).await);
        if lane.lane == 1 {
            database.execute("update pillarbox.cursor set floor = 7 where lane = 1").await;
        }
        assert!(settle(&store, write(lane, epoch, 9)).await);
    }
    store.change(&Change::pause("s"), false).await.unwrap();
    store.change(&Change::Relane { subscription: "s".into(), lanes: 3 }, false).await.unwrap();
    let books = store.books().await.unwrap();
    let sets: Vec<_> = books.lanes.iter().map(|it| (it.before_start.to_string(), it.covered.to_string())).collect();
    assert_eq!(sets, vec![("1-4".to_owned(), "5-6,8-9".to_owned()); 3]);
}

#[tokio::test]
async fn reset_empties_everything_and_positions_go_on() {
    let database = Database::new().await;
    let (store, _) = mixed(&database, OnDead::Block).await;
    store.reset().await.unwrap();
    let status = store.status().await.unwrap();
    assert_eq!((status.log.events, status.log.log_start, status.log.incarnation), (0, 7, 2));
    assert_eq!((status.subscriptions.len(), status.subscriptions[0].dead), (1, 0), "it is being run");
    database.publish_keys(&["a"]).await;
    assert_eq!(poll_tail(&store, 6).await.events[0].position, 7);
    gone(&database, store).await;
    let store = database.store().await;
    store.reset().await.unwrap();
    assert!(store.status().await.unwrap().subscriptions.is_empty());
    let failed = store.doctor().await.unwrap().into_iter().find(|check| check.level == Level::Failed);
    assert_eq!(failed, None);
}

#[tokio::test]
async fn an_operator_publishes_in_one_transaction() {
    let database = Database::new().await;
    let store = database.store().await;
    own(&store, "s").await;
    let ids = store.publish(&[NewEvent::new("t", "y"), NewEvent::new("t", "y").dedup_key("d")]).await.unwrap();
    assert_eq!(store.publish(&[NewEvent::new("t", "y").dedup_key("d")]).await.unwrap(), [ids[1]]);
    let bad = [NewEvent::new("t", "y"), NewEvent::new("t", "y").json_text("{")];
    assert_eq!(store.publish(&bad).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.status().await.unwrap().log.events, 2);
}

#[tokio::test]
async fn a_delayed_delivery_that_is_due_counts_as_pending_though_nobody_noticed() {
    let database = Database::new().await;
    let ids = database.publish_keys(&["a", "b"]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let due_at = Timestamp(Timestamp::now().0 - 600_000);
    let mut parked = write(lane, epoch, 2);
    parked.put = vec![
        DeliveryRow { due_at, ..delivery(1, "a", State::Delayed) },
        DeliveryRow { due_at: Timestamp::now().plus(HOUR), ..delivery(2, "b", State::Delayed) },
    ];
    assert!(settle(&store, parked).await);
    let s = store.status().await.unwrap().subscriptions.remove(0);
    assert_eq!((s.pending, s.delayed, s.oldest_due), (1, 1, Some(due_at)));
    let age = s.oldest_age_seconds.unwrap();
    assert!((600.0..660.0).contains(&age), "{age} s, and it became due 600 s ago");
    assert_eq!(states(&store).await, [(1, State::Pending), (2, State::Delayed)].into());
    let shown = store.show(ids[0]).await.unwrap().unwrap();
    assert_eq!(shown.subscriptions[0].delivery.as_ref().unwrap().state, State::Pending);
}

#[tokio::test]
async fn a_large_backlog_is_estimated_for_each_subscription_from_its_own_floor() {
    let database = Database::new().await;
    let events = 3 * pillarbox_postgres::PENDING_COUNT_MAX as i64;
    let insert = format!(
        "insert into pillarbox.event (topic, type, key)
         select case n % 4 when 0 then 'wanted' else 'other' end, 'y', 'k' || n % 1000 from generate_series(1, {events}) as n"
    );
    database.execute(&insert).await;
    let store = database.store().await;
    let all = join(&store, [one_lane("all"), one_lane("some").topics(["wanted"]), one_lane("near")]).await;
    database
        .execute(&format!(
            "update pillarbox.cursor set floor = {} where subscription = {}",
            events - 10,
            all.subscriptions[2].id.0
        ))
        .await;
    let status = store.status().await.unwrap();
    let pending = |name: &str| status.subscriptions.iter().find(|s| s.name == name).unwrap().pending as i64;
    assert!((pending("all") - events).abs() <= 1, "{}", pending("all"));
    assert!((pending("some") - events / 4).abs() <= 4, "{}", pending("some"));
    assert_eq!(pending("near"), 10);
    assert_eq!(status.log.events, events, "by positions");
}

#[tokio::test]
async fn what_rises_from_the_dead_is_delivered_late() {
    let database = Database::new().await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    database.execute("select nextval('pillarbox.event_position_seq')").await;
    database.publish_keys(&["a"]).await;
    let dead = [1..=1].into_iter().collect();
    let settlement = pillarbox::store::Settlement { lanes: vec![write(lane, epoch, 2)], dead };
    assert!(store.settle(&settlement).await.unwrap()[0]);
    database
        .execute("insert into pillarbox.event (position, topic, type) overriding system value values (1, 't', 'y')")
        .await;
    store.prune(&pillarbox::admin::PrunePolicy { keep: None, ..Default::default() }).await.unwrap();
    assert_eq!(states(&store).await, [(1, State::Pending)].into());
    assert!(store.books().await.unwrap().dead.is_empty());
    assert!(store.observe(&Default::default()).await.unwrap().lanes[0].revision > 0, "the owner loads it");
}
