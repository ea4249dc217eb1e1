use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::admin::{Change, Changed, Level, ListQuery, Operator, Selection, State};
use pillarbox::store::{DeliveryRow, Report, Store, SubscriptionReport};
use pillarbox::{ErrorKind, NewEvent, OnDead, Start, Subscription, Timestamp};
use pillarbox_sqlite::SqliteStore;
use uuid::Uuid;

use crate::fixture::{Database, delivery, join, one_lane, own, poll_tail, settle, write};

const HOUR: Duration = Duration::from_secs(3600);

async fn change(store: &SqliteStore, change: Change) -> pillarbox::Result<Changed> {
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

fn requeue(which: Selection, limit: usize) -> Change {
    Change::Requeue { subscription: "s".into(), which, limit }
}

fn rewind(to: Start, key: Option<&str>) -> Change {
    Change::Rewind { subscription: "s".into(), to, key: key.map(Into::into) }
}

async fn states(store: &SqliteStore) -> BTreeMap<i64, State> {
    let query = ListQuery { subscription: Some("s".into()), limit: 1000, ..ListQuery::default() };
    let rows = store.list(&query).await.unwrap();
    rows.into_iter().map(|row| (row.position, row.state.unwrap())).collect()
}

/// Keys a a b c a a: the first of a is dead, b retries, c is delayed, the last of a is in the log.
async fn mixed(database: &Database, on_dead: OnDead) -> (SqliteStore, Vec<Uuid>) {
    let ids = database.publish_keys(&["a", "a", "b", "c", "a", "a"]);
    let store = database.store();
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
    let database = Database::new();
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let expected = [Dead, Blocked, Retrying, Delayed, Blocked, Pending];
    assert_eq!(states(&store).await, (1..).zip(expected).collect());
    let shown = store.show(ids[4]).await.unwrap().unwrap();
    let record = shown.subscriptions[0].delivery.as_ref().unwrap();
    assert_eq!((record.state, record.head), (Blocked, Some((ids[0], 1, Dead))));

    let database = Database::new();
    let (store, _) = mixed(&database, OnDead::Skip).await;
    let expected = [Dead, Pending, Retrying, Delayed, Blocked, Pending];
    assert_eq!(states(&store).await, (1..).zip(expected).collect());
}

#[tokio::test]
async fn status_counts_every_state_once() {
    let database = Database::new();
    let (store, _) = mixed(&database, OnDead::Block).await;
    database.publish(&[
        NewEvent::new("t", "y").deliver_at(Timestamp::now().plus(Duration::from_secs(3600))),
        NewEvent::new("t", "y"),
    ]);
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

    drop(store);
    let status = database.store().status().await.unwrap();
    let s = &status.subscriptions[0];
    assert_eq!((s.pending, s.processing, s.lanes_owned, s.orphaned), (2, 0, 0, true));
    assert!(!status.instances[0].alive);
}

#[tokio::test]
async fn lists_filter_and_stay_in_log_order() {
    let database = Database::new();
    let (store, ids) = mixed(&database, OnDead::Block).await;
    database.publish(&[NewEvent::new("other.x", "y").key("z").header("correlationid", "c1")]);
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
    let database = Database::new();
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
    let database = Database::new();
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
    let database = Database::new();
    let store = database.store();
    join(&store, [one_lane("s")]).await;
    store.change(&Change::pause("s"), true).await.unwrap();
    assert!(!store.status().await.unwrap().subscriptions[0].paused, "a dry run");
    change(&store, Change::pause("s")).await.unwrap();
    join(&store, [one_lane("s")]).await;
    assert!(database.store().status().await.unwrap().subscriptions[0].paused);
    assert_eq!(change(&store, Change::Resume("s".into())).await.unwrap().count, 1);
    assert!(!store.status().await.unwrap().subscriptions[0].paused);
    assert_eq!(change(&store, Change::pause("none")).await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn rewind_fences_the_owner_and_replays() {
    let database = Database::new();
    let (store, _) = mixed(&database, OnDead::Block).await;
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    change(&store, rewind(Start::Position(2), None)).await.unwrap();
    assert!(!settle(&store, write(view.lane, view.epoch, 6)).await, "the owner cannot write over it");
    let expected =
        [(1, State::Dead), (3, State::Pending), (4, State::Pending), (5, State::Pending), (6, State::Pending)];
    let expected = [(2, State::Blocked)].into_iter().chain(expected).collect();
    assert_eq!(states(&store).await, expected, "what was parked above the target comes from the log");
    let epoch = crate::fixture::take(&store, view.lane, pillarbox::store::TakeCause::Free).await.unwrap();
    assert_eq!(store.load(&[(view.lane, epoch)]).await.unwrap().remove(0).unwrap().cursor.floor, 2);
    change(&store, rewind(Start::Now, None)).await.unwrap();
    assert_eq!(store.status().await.unwrap().subscriptions[0].floor, 2, "never forwards: nothing is left out silently");
}

#[tokio::test]
async fn rewind_of_a_key_replays_its_settled_events_as_a_chain() {
    let database = Database::new();
    let (store, ids) = mixed(&database, OnDead::Block).await;
    let done = change(&store, rewind(Start::Position(1), Some("a"))).await.unwrap();
    assert_eq!(done.events, [ids[1], ids[4]], "the last one of the key was not read yet");
    let view = store.observe(&Default::default()).await.unwrap().lanes.remove(0);
    assert!(view.revision > 0);
    let state = store.load(&[(view.lane, view.epoch)]).await.unwrap().remove(0).unwrap();
    let order: Vec<_> = state.deliveries.iter().map(|delivery| delivery.position).collect();
    assert_eq!(order, [1, 3, 4, 2, 5], "fresh arrivals, in log order");
    assert!(state.cursor.floor == 5);

    database.publish(&[NewEvent::new("unwanted", "y").key("a")]);
    assert_eq!(change(&store, rewind(Start::Beginning, Some("zzz"))).await.unwrap().count, 0);
}

#[tokio::test]
async fn a_rewind_ends_what_was_given_up_above_its_place() {
    let database = Database::new();
    database.publish_keys(&["a", "b", "c", "d", "e", "f"]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 6)).await);
    database.execute(
        "insert into pillarbox_skip (subscription, position, position_to, reason, at)
         select id, 2, 5, 'range', 0 from pillarbox_subscription
         union all select id, 4, 4, 'alone', 0 from pillarbox_subscription",
    );
    let skipped = async || store.books().await.unwrap().lanes[0].skipped.to_string();
    change(&store, rewind(Start::Beginning, Some("c"))).await.unwrap();
    assert_eq!(skipped().await, "2,4-5", "of one key its own event alone");
    change(&store, rewind(Start::Position(4), None)).await.unwrap();
    assert_eq!(skipped().await, "2,4");
    change(&store, rewind(Start::Position(1), None)).await.unwrap();
    assert_eq!(skipped().await, "");
}

#[tokio::test]
async fn delete_and_rename_are_refused_while_a_living_instance_runs_it() {
    let database = Database::new();
    let (store, _) = mixed(&database, OnDead::Block).await;
    let rename = |to: &str| Change::Rename { from: "s".into(), to: to.into() };
    for refused in [Change::Delete("s".into()), rename("r")] {
        let error = change(&store, refused).await.unwrap_err();
        assert!(error.to_string().contains("instance 1"), "{error}");
    }
    drop(store);
    let store = database.store();
    assert_eq!(change(&store, rename("no spaces")).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(change(&store, rename("s")).await.unwrap_err().kind(), ErrorKind::Invalid);
    change(&store, rename("r")).await.unwrap();
    assert_eq!(store.status().await.unwrap().subscriptions[0].dead, 1, "a rename keeps everything");
    change(&store, Change::Delete("r".into())).await.unwrap();
    assert!(store.status().await.unwrap().subscriptions.is_empty());
    for table in ["cursor", "delivery", "progress", "subscription"] {
        assert_eq!(database.number(&format!("select count(*) from pillarbox_{table}")), 0, "{table}");
    }
}

#[tokio::test]
async fn relane_needs_quiet_and_keeps_each_keys_order() {
    let database = Database::new();
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
    database.execute("update pillarbox_cursor set floor = 6 where lane = 1");
    assert!(change(&store, relane(2)).await.unwrap_err().to_string().contains("same place"));
}

#[tokio::test]
async fn relane_keeps_what_lay_before_the_start_and_a_gap_of_one_lane() {
    let database = Database::new();
    database.publish_keys(&["a"; 9]);
    let store = database.store();
    let wish = Subscription { lanes: 2, start: Start::Position(4), ..Subscription::new("s") };
    let id = join(&store, [wish]).await.subscriptions[0].id;
    for lane in 0..2 {
        let lane = pillarbox::store::LaneRef { subscription: id, lane };
        let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
        assert!(settle(&store, write(lane, epoch, 6)).await);
        if lane.lane == 1 {
            database.execute("update pillarbox_cursor set floor = 7 where lane = 1");
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
    let database = Database::new();
    let (store, _) = mixed(&database, OnDead::Block).await;
    store.reset().await.unwrap();
    let status = store.status().await.unwrap();
    assert_eq!((status.log.events, status.log.log_start, status.log.incarnation), (0, 7, 2));
    assert_eq!((status.subscriptions.len(), status.subscriptions[0].dead), (1, 0), "it is being run");
    database.publish_keys(&["a"]);
    assert_eq!(poll_tail(&store, 6).await.events[0].position, 7);
    drop(store);
    let store = database.store();
    store.reset().await.unwrap();
    assert!(store.status().await.unwrap().subscriptions.is_empty());
    let failed = store.doctor().await.unwrap().into_iter().find(|check| check.level == Level::Failed);
    assert_eq!(failed, None);
}

#[tokio::test]
async fn an_operator_publishes_in_one_transaction() {
    let database = Database::new();
    let store = database.store();
    own(&store, "s").await;
    let ids = store.publish(&[NewEvent::new("t", "y"), NewEvent::new("t", "y").dedup_key("d")]).await.unwrap();
    assert_eq!(store.publish(&[NewEvent::new("t", "y").dedup_key("d")]).await.unwrap(), [ids[1]]);
    let bad = [NewEvent::new("t", "y"), NewEvent::new("t", "y").json_text("{")];
    assert_eq!(store.publish(&bad).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store.status().await.unwrap().log.events, 2);
}

#[tokio::test]
async fn a_delayed_delivery_that_is_due_counts_as_pending_though_nobody_noticed() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "b"]);
    let store = database.store();
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
async fn an_event_can_be_worked_with_whatever_its_id_looks_like() {
    let database = Database::new();
    let odd = ["0190A1B2-C3D4-7E5F-8A9B-000000000001", "0190a1B2-c3d4-7e5f-8a9b-000000000002", &"x".repeat(36)];
    for id in odd {
        database.execute(&format!("insert into pillarbox_event (id, topic, type) values ('{id}', 't', 'y')"));
    }
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let events = poll_tail(&store, 0).await.events;
    let mut parked = write(lane, epoch, 3);
    parked.put = (1..=3).map(|position| delivery(position, "a", State::Dead)).collect();
    assert!(settle(&store, parked).await);
    for (event, position) in events.iter().zip(1..) {
        assert_eq!(store.show(event.id).await.unwrap().unwrap().event.position, position);
        assert_eq!(change(&store, requeue(Selection::Event(event.id), 10)).await.unwrap().count, 1);
        let skip = Change::Skip { subscription: "s".into(), event: event.id, reason: "odd".into() };
        assert_eq!(store.change(&skip, false).await.unwrap().count, 1);
    }
    assert!(store.show(Uuid::now_v7()).await.unwrap().is_none());
}

/// Ids are found as they are written in lower or in upper case; this one only by its version.
#[tokio::test]
async fn a_version_that_the_log_has_is_not_said_to_be_missing() {
    let database = Database::new();
    database.execute(
        "insert into pillarbox_event (id, topic, key, type, stream_version)
         values ('01890a5d-AC96-774b-bcce-b302099a8057', 'journal', 'stream', 'y', 1)",
    );
    let store = database.store();
    own(&store, "s").await;
    let of_version = |version| requeue(Selection::Version("stream".into(), version), usize::MAX);
    let error = change(&store, of_version(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("01890a5d-ac96-774b-bcce-b302099a8057 has no delivery of 's'"), "{error}");
    let error = change(&store, of_version(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}
