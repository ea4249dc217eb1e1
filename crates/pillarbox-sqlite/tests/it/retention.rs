use std::time::Duration;

use pillarbox::admin::{Operator, PrunePolicy, Pruned, State};
use pillarbox::store::Store;
use pillarbox::{NewEvent, Start, Subscription, Timestamp};
use pillarbox_sqlite::{Limits, SqliteStore};

use crate::fixture::{Database, delivery, events, join, one_lane, own, poll_tail, settle, write};

const DAY_MS: i64 = 86_400_000;

fn policy() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::from_secs(7 * 86_400)), unreceived: true, ..PrunePolicy::default() }
}

/// Makes the events up to `position` ten days old.
fn age(database: &Database, position: i64) {
    let at = Timestamp::now().0 - 10 * DAY_MS;
    database.execute(&format!(
        "drop trigger if exists pillarbox_event_is_never_changed;
         update pillarbox_event set created_at = {at} where position <= {position}"
    ));
}

async fn prune_all(store: &SqliteStore, policy: &PrunePolicy) -> Pruned {
    let mut all = Pruned::default();
    loop {
        let pruned = store.prune(policy).await.unwrap();
        all.events += pruned.events;
        all.kept += pruned.kept;
        all.dead += pruned.dead;
        all.undelivered += pruned.undelivered;
        all.dedup += pruned.dedup;
        if !pruned.more {
            return Pruned { held_by: pruned.held_by, ..all };
        }
    }
}

#[tokio::test]
async fn only_what_is_old_and_passed_by_all_is_removed() {
    let database = Database::new();
    database.publish_keys(&["a"; 20]);
    age(&database, 15);
    let store = database.store();
    let (lane, epoch) = own(&store, "fast").await;
    assert!(settle(&store, write(lane, epoch, 20)).await);
    let slow = Subscription { start: Start::Position(8), ..one_lane("slow") };
    let other = database.store();
    join(&other, [slow]).await;
    drop(other);

    let small = PrunePolicy { slice: 3, ..policy() };
    let pruned = prune_all(&store, &small).await;
    assert_eq!((pruned.events, pruned.held_by.as_deref()), (8, Some("slow")), "an orphaned subscription holds it");
    let page = store.poll(&crate::fixture::tail(0, 100)).await.unwrap();
    assert_eq!((page.log_start, page.horizon), (9, 20));
    store.change(&pillarbox::admin::Change::Delete("slow".into()), false).await.unwrap();
    let pruned = prune_all(&store, &small).await;
    assert_eq!((pruned.events, pruned.held_by), (7, None), "the rest is too young");
    assert_eq!(events(&store).await.iter().map(|event| event.position).collect::<Vec<_>>(), [16, 17, 18, 19, 20]);
    assert_eq!(prune_all(&store, &PrunePolicy { keep: None, ..policy() }).await.events, 0);
}

#[tokio::test]
async fn what_a_delivery_needs_is_kept_aside_as_long_as_it_needs_it() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "b", "c"]);
    age(&database, 3);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 3);
    parked.put.push(delivery(2, "b", State::Dead));
    assert!(settle(&store, parked).await);
    let pruned = prune_all(&store, &policy()).await;
    assert_eq!((pruned.events, pruned.kept), (3, 1));
    assert!(poll_tail(&store, 0).await.visible.is_empty());
    assert_eq!(store.fetch(&[1, 2, 3]).await.unwrap()[0].id, ids[1]);
    assert!(store.show(ids[1]).await.unwrap().unwrap().subscriptions[0].delivery.is_some());
    assert!(store.show(ids[0]).await.unwrap().is_none());
    assert_eq!(store.status().await.unwrap().log.kept, 1);
    assert!(store.load(&[(lane, epoch)]).await.unwrap()[0].is_some());

    let mut done = write(lane, epoch, 3);
    done.finish.push(2);
    assert!(settle(&store, done).await);
    prune_all(&store, &policy()).await;
    assert_eq!(store.status().await.unwrap().log.kept, 0);
    let joined = join(&database.store(), [one_lane("new")]).await;
    let state = store.load(&[(crate::fixture::lane(joined.subscriptions[0].id), 0)]).await.unwrap().remove(0).unwrap();
    assert_eq!(state.cursor.floor, 3, "a new subscription begins where the log does");
}

#[tokio::test]
async fn a_copy_that_nobody_needs_is_found_among_many_that_are_needed() {
    let database = Database::new();
    database.publish_keys(&["a"; 600]);
    let store = database.store();
    own(&store, "s").await;
    database.execute(
        "insert into pillarbox_event_kept select * from pillarbox_event;
         insert into pillarbox_delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at)
         select s.id, e.position, 0, e.position, 'dead', 1, 0, 0, 0
         from pillarbox_subscription as s, pillarbox_event as e where e.position < 600",
    );
    let mut kept = Vec::new();
    for _ in 0..3 {
        assert!(!store.prune(&policy()).await.unwrap().more);
        kept.push(store.status().await.unwrap().log.kept);
    }
    assert_eq!(kept, [600, 599, 599], "a run looks at a part of them, and the next one at the rest");
    database.execute("delete from pillarbox_delivery where position <= 550");
    store.prune(&policy()).await.unwrap();
    prune_all(&store, &policy()).await;
    assert_eq!(store.status().await.unwrap().log.kept, 49, "it does not stop as long as it finds some");
}

#[tokio::test]
async fn a_hold_that_is_over_gives_way_and_is_recorded() {
    let database = Database::new();
    let ids = database.publish_keys(&["a"; 4]);
    age(&database, 3);
    let store = database.store();
    let held = |days: u64| Subscription { hold: Some(Duration::from_secs(days * 86_400)), ..one_lane("s") };
    let joined = join(&store, [held(11)]).await;
    assert_eq!(prune_all(&store, &policy()).await.held_by.as_deref(), Some("s"));
    join(&store, [held(9)]).await;
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    let lane = crate::fixture::lane(joined.subscriptions[0].id);
    assert!(store.load(&[(lane, 0)]).await.unwrap()[0].is_none(), "the owner is made to load again");
    let book = store.books().await.unwrap().lanes.remove(0);
    let sets = (book.skipped.to_string(), book.before_start.to_string());
    assert_eq!((book.floor, sets), (3, ("1-3".to_owned(), "1-3".to_owned())));
    assert!(store.show(ids[3]).await.unwrap().unwrap().subscriptions[0].skipped.is_none());
}

#[tokio::test]
async fn a_hold_that_is_over_drops_only_what_was_awaited() {
    let database = Database::new();
    let topics = ["wanted", "wanted", "other", "wanted", "wanted", "wanted"];
    let ids = database.publish(&topics.map(|topic| NewEvent::new(topic, "y").key("a")));
    age(&database, 5);
    let store = database.store();
    // Another subscription keeps the events in the log, so that they can be asked about.
    let keeper = database.store();
    join(&keeper, [one_lane("keeper")]).await;
    let hold = Some(Duration::from_secs(9 * 86_400));
    let wish = Subscription { hold, ..one_lane("s").topics(["wanted"]) };
    let lane = crate::fixture::lane(join(&store, [wish]).await.subscriptions[0].id);
    let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let mut settlement = write(lane, epoch, 1);
    settlement.cursor.settled.insert(4);
    assert!(settle(&store, settlement).await);
    let would = store.prune(&PrunePolicy { dry_run: true, ..policy() }).await.unwrap();
    assert_eq!((would.undelivered, would.held_by.as_deref()), (2, Some("keeper")), "it would drop 2 and 5");
    let pruned = prune_all(&store, &policy()).await;
    assert_eq!((pruned.undelivered, pruned.held_by.as_deref()), (2, Some("keeper")));

    let books = store.books().await.unwrap();
    let book = books.lanes.iter().find(|book| book.subscription == "s").unwrap();
    assert_eq!((book.floor, book.skipped.to_string().as_str()), (5, "2,5"));
    assert_eq!((book.covered.to_string().as_str(), book.before_start.to_string().as_str()), ("1,4", "2-3,5"));
    let mut auditor = pillarbox::admin::Auditor::new(books).only("s").unwrap().expect_receipts("s").unwrap();
    events(&store).await.iter().for_each(|event| auditor.event(event));
    [0, 3].iter().for_each(|index| auditor.line(&ids[*index].to_string()));
    let audit = auditor.finish().subscriptions.remove(0);
    assert_eq!((audit.delivered, audit.skipped, audit.waiting, audit.missing), (2, 2, 1, 0), "{audit:?}");
}

#[tokio::test]
async fn journal_events_stay() {
    let database = Database::new();
    database.publish_keys(&["a"; 4]);
    database.execute("drop trigger pillarbox_event_is_never_changed");
    database.execute("update pillarbox_event set stream_version = 1 where position = 2");
    age(&database, 4);
    let store = database.store();
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    let page = store.poll(&crate::fixture::tail(0, 10)).await.unwrap();
    assert_eq!((page.log_start, page.scans[0].visible.to_string().as_str()), (2, "2"));
}

#[tokio::test]
async fn old_dead_deliveries_and_dedup_keys_go() {
    let database = Database::new();
    let event = NewEvent::new("t", "y").key("a").dedup_key("d");
    let ids = database.publish(&[event.clone(), NewEvent::new("t", "y").key("a")]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 2);
    let old = Timestamp(Timestamp::now().0 - 3 * DAY_MS);
    let failing = |position| pillarbox::store::DeliveryRow { since: old, ..delivery(position, "a", State::Retrying) };
    parked.put = vec![failing(1), failing(2)];
    assert!(settle(&store, parked).await);
    let dead = PrunePolicy { dead: Some(Duration::from_secs(2 * 86_400)), ..policy() };
    let died_at = "select died_at from pillarbox_delivery where position = 1";
    let mut first_death = None;
    // It stays dead: the second settlement does not make it younger.
    for _ in 0..2 {
        let mut died = write(lane, epoch, 2);
        died.change = vec![(pillarbox::store::DeliveryRow { state: State::Dead, ..failing(1) }, None)];
        assert!(settle(&store, died).await);
        assert_eq!(prune_all(&store, &dead).await.dead, 0, "it has failed for long, but died just now");
        assert_eq!(database.number(died_at), *first_death.get_or_insert_with(|| database.number(died_at)));
    }
    database.execute(&format!("update pillarbox_delivery set died_at = {} where position = 1", old.0));
    assert_eq!(prune_all(&store, &policy()).await.dead, 0, "for ever by default");
    assert_eq!(prune_all(&store, &dead).await.dead, 1);
    let shown = store.show(ids[0]).await.unwrap().unwrap();
    assert!(shown.subscriptions[0].skipped.as_ref().unwrap().0.contains("retention"));

    assert_eq!(prune_all(&store, &policy()).await.dedup, 0);
    database.execute(&format!("update pillarbox_dedup set created_at = {}", Timestamp::now().0 - DAY_MS - 1000));
    let short = PrunePolicy { dedup_window: Duration::ZERO, ..policy() };
    assert_eq!(prune_all(&store, &short).await.dedup, 1);
}

#[tokio::test]
async fn records_of_progress_are_merged_without_a_gap() {
    let database = Database::new();
    database.publish_keys(&["a"; 30]);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    for floor in [5, 10, 12] {
        assert!(settle(&store, write(lane, epoch, floor)).await);
        database.execute("update pillarbox_progress set started_at = 1000 * id, ended_at = 1000 * id");
    }
    database.execute("update pillarbox_cursor set floor = 20");
    assert!(settle(&store, write(lane, epoch, 30)).await);
    let covered = store.books().await.unwrap().lanes[0].covered.clone();
    let before = database.number("select count(*) from pillarbox_progress");
    prune_all(&store, &policy()).await;
    assert_eq!(store.books().await.unwrap().lanes[0].covered, covered);
    assert!(database.number("select count(*) from pillarbox_progress") < before);
}

#[tokio::test]
async fn an_event_is_not_removed_by_hand() {
    let database = Database::new();
    database.publish_keys(&["a"; 4]);
    database.execute("insert into pillarbox_event (topic, type, stream_version) values ('t', 'y', 1)");
    age(&database, 3);
    let store = database.store();
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    for position in [4, 5] {
        let sql = format!("delete from pillarbox_event where position = {position}");
        let error = database.connect().execute(&sql, []).unwrap_err();
        assert!(error.to_string().contains("only removed by retention"), "{error}");
    }
    age(&database, 5);
    assert_eq!(prune_all(&store, &policy()).await.events, 1, "the journal's stays");
    let error = database.connect().execute("delete from pillarbox_event", []).unwrap_err();
    assert!(error.to_string().contains("only removed by retention"), "{error}");
    store.reset().await.unwrap();
    assert_eq!(database.number("select count(*) from pillarbox_event"), 0);
    let error =
        database.connect().execute("insert into pillarbox_event (position, topic, type) values (0, 't', 'y')", []);
    assert!(error.unwrap_err().to_string().contains("position_is_above_0"));
}

#[tokio::test]
async fn an_event_in_a_dead_range_is_delivered_late() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    database.execute("insert into pillarbox_event (position, topic, key, type) values (9, 't', 'a', 'y')");
    let (store, other) = (database.store(), database.store());
    let (lane, epoch) = own(&store, "s").await;
    let wishes = [one_lane("behind"), one_lane("elsewhere").topics(["x"])];
    let later = Subscription { start: Start::Now, ..one_lane("later") };
    let others = join(&other, wishes.into_iter().chain([later])).await.subscriptions;
    let mut dead = pillarbox::store::RangeSet::new();
    dead.insert_range(4, 8);
    let lanes = vec![write(lane, epoch, 9)];
    store.settle(&pillarbox::store::Settlement { lanes, dead }).await.unwrap();
    let prune = async || store.prune(&policy()).await.unwrap();
    prune().await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 0);

    database.execute("insert into pillarbox_event (position, topic, key, type) values (6, 't', 'a', 'y')");
    let revision = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap().revision;
    prune().await;
    let state = store.load(&[(lane, epoch)]).await.unwrap().remove(0).unwrap();
    assert!(state.revision > revision, "the owner loads again");
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    assert_eq!(rows, [(6, State::Pending, 0)]);
    let behind = crate::fixture::lane(others[0].id);
    assert!(other.load(&[(behind, 0)]).await.unwrap()[0].is_none(), "one that has not settled it reads again");
    for untouched in &others[1..] {
        let state = other.load(&[(crate::fixture::lane(untouched.id), 0)]).await.unwrap().remove(0).unwrap();
        assert!(state.deliveries.is_empty(), "{}", untouched.name);
    }
    assert_eq!(store.books().await.unwrap().dead.to_string(), "4-5,7-8");
    prune().await;
    assert_eq!(database.number("select count(*) from pillarbox_delivery"), 1, "once");
}

#[tokio::test]
async fn what_retention_removed_between_a_journals_events_is_not_dead_and_its_deliveries_outlive_a_rewind() {
    let database = Database::new();
    database.publish_keys(&["a"; 5]);
    database.execute("drop trigger pillarbox_event_is_never_changed");
    database.execute("update pillarbox_event set stream_version = 1 where position = 2");
    age(&database, 4);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 5);
    parked.put = [2, 3, 5].map(|position| delivery(position, "a", State::Dead)).into();
    assert!(settle(&store, parked).await);
    assert_eq!(prune_all(&store, &policy()).await.events, 3);
    let mut dead = pillarbox::store::RangeSet::new();
    dead.insert_range(3, 4);
    dead.insert_range(7, 8);
    store.settle(&pillarbox::store::Settlement { dead, ..Default::default() }).await.unwrap();
    assert_eq!(store.books().await.unwrap().dead.to_string(), "7-8");

    let rewind = pillarbox::admin::Change::Rewind { subscription: "s".into(), to: Start::Beginning, key: None };
    store.change(&rewind, false).await.unwrap();
    let state = store.load(&[(lane, epoch + 1)]).await.unwrap().remove(0).unwrap();
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    assert_eq!(rows, [(3, State::Pending, 0)], "2 and 5 are read again, 3 is only kept aside");
    assert_eq!(store.fetch(&[3]).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_rewind_replays_what_retention_has_only_kept_aside() {
    for key in [Some("a"), None] {
        let database = Database::new();
        let ids = database.publish_keys(&["a", "b", "b", "a", "b", "c"]);
        age(&database, 3);
        let store = database.store();
        let (lane, epoch) = own(&store, "s").await;
        let mut parked = write(lane, epoch, 6);
        parked.put = vec![delivery(1, "a", State::Dead), delivery(2, "b", State::Dead)];
        assert!(settle(&store, parked).await);
        assert_eq!(prune_all(&store, &policy()).await.kept, 2);
        let rewind = async |to| {
            let rewind = pillarbox::admin::Change::Rewind { subscription: "s".into(), to, key: key.map(Into::into) };
            store.change(&rewind, false).await.unwrap()
        };
        let dead = |position| {
            database.number(&format!(
                "select count(*) from pillarbox_delivery where position = {position} and state = 'dead'"
            ))
        };
        rewind(Start::Position(2)).await;
        assert_eq!((dead(1), dead(2)), (1, 1), "they lie below");
        let done = rewind(Start::Beginning).await;
        assert_eq!((dead(1), dead(2)), (0, i64::from(key.is_some())), "{key:?}");
        if key.is_some() {
            assert_eq!((done.count, done.events), (2, vec![ids[0], ids[3]]));
        }
    }
}

#[tokio::test]
async fn no_call_prunes_more_than_the_stored_policy_allows() {
    let database = Database::new();
    database.publish_keys(&["a"; 3]);
    age(&database, 2);
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 3);
    parked.put.push(delivery(3, "a", State::Dead));
    assert!(settle(&store, parked).await);
    let died_at = Timestamp::now().0 - 10 * DAY_MS;
    database.execute(&format!("update pillarbox_delivery set died_at = {died_at}"));
    let days = |days: u64| Some(Some(Duration::from_secs(days * 86_400)));
    let eager = PrunePolicy { dead: Some(Duration::from_secs(1)), ..policy() };
    for (limit, events, dead) in [(days(11), 0, 0), (Some(None), 0, 0), (None, 0, 0), (days(9), 2, 1)] {
        let limits = Limits { retention_keep: limit, retention_dead: limit, ..Limits::default() };
        store.set_limits(limits).await.unwrap();
        let pruned = prune_all(&store, &eager).await;
        assert_eq!((pruned.events, pruned.dead), (events, dead), "{limit:?}");
    }
}
