use std::time::Duration;

use pillarbox::admin::{Change, Operator, PrunePolicy, State};
use pillarbox::store::{RangeSet, Report, Settlement, Store};
use pillarbox::{NewEvent, Start, Subscription};
pub(crate) use pillarbox_testkit::by_hand::prune_all;

use crate::fixture::{Database, delivery, events, join, lane, one_lane, own, settle, tail, take, write};
use crate::ownership::until;

fn policy() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::from_secs(7 * 86_400)), unreceived: true, ..PrunePolicy::default() }
}

/// A database whose log has leaves of so many positions.
pub(crate) async fn database(size: i64) -> Database {
    let database = Database::new().await;
    database.execute(&format!("update pillarbox.meta set leaf_size = {size}")).await;
    database.store().await.lay_leaves(None).await.unwrap();
    database
}

/// Makes the events up to `position` ten days old.
pub(crate) async fn age(database: &Database, position: i64) {
    database
        .execute(&format!(
            "do $$
            declare leaf text;
            begin
                for leaf in select name from pillarbox.leaf loop
                    execute format('update pillarbox.%I set id = coalesce(id, pillarbox.event_id(position, created_at)), '
                        'created_at = created_at - interval ''10 days'' '
                        'where position <= {position} and created_at > now() - interval ''9 days''', leaf);
                end loop;
            end $$"
        ))
        .await;
}

#[tokio::test]
async fn a_copy_that_nobody_needs_is_found_among_many_that_are_needed() {
    let database = Database::new().await;
    database.publish_keys(&["a"; 600]).await;
    let store = database.store().await;
    own(&store, "s").await;
    database
        .execute(
            "insert into pillarbox.event_kept (position, id, topic, key, type, headers, created_at)
             select position, id, topic, key, type, headers, created_at from pillarbox.event_view;
             insert into pillarbox.delivery (subscription, position, lane, arrival, state, attempts, due_at, since, died_at)
             select s.id, e.position, 0, e.position, 'dead', 1, now(), now(), now()
             from pillarbox.subscription as s, pillarbox.event as e where e.position < 600",
        )
        .await;
    let kept = async || database.number("select count(*) from pillarbox.event_kept").await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        assert!(!store.prune(&policy()).await.unwrap().more);
        seen.push(kept().await);
    }
    assert_eq!(seen, [600, 599, 599], "a run looks at a part of them, and the next one at the rest");
    database.execute("delete from pillarbox.delivery where position <= 550").await;
    store.prune(&policy()).await.unwrap();
    prune_all(&store, &policy()).await;
    assert_eq!(kept().await, 49, "it does not stop as long as it finds some");
}

#[tokio::test]
async fn a_hold_that_is_over_names_what_an_open_transaction_may_still_bring() {
    let database = database(3).await;
    database.publish_keys(&["a"]).await;
    let (open, aborted) = (database.client().await, database.client().await);
    let insert = "insert into pillarbox.event (topic, key, type) values ('t', 'a', 'y')";
    for client in [&aborted, &open] {
        client.batch_execute(&format!("begin; {insert}")).await.unwrap();
    }
    database.publish_keys(&["a"]).await;
    aborted.batch_execute("rollback").await.unwrap();
    age(&database, 4).await;
    let store = database.store().await;
    let mut dead = RangeSet::new();
    dead.insert(2);
    store.settle(&Settlement { closed: dead, ..Settlement::default() }).await.unwrap();
    let hold = Some(Duration::from_secs(9 * 86_400));
    join(&store, [Subscription { hold, ..one_lane("s") }]).await;
    assert_eq!(prune_all(&store, &policy()).await.events, 0, "the leaf is being written to");
    let skipped = store.books().await.unwrap().lanes[0].skipped.to_string();
    assert_eq!(skipped, "1,3-4");
    open.batch_execute("commit").await.unwrap();
    age(&database, 4).await;
    assert_eq!(prune_all(&store, &policy()).await.events, 2, "the leaf ends at 3");
}

#[tokio::test]
async fn journal_leaves_stay_and_what_went_around_them_is_not_dead() {
    let database = database(2).await;
    database.publish_keys(&["a"; 2]).await;
    database.execute("select pillarbox.append('stream', 0, '[{\"type\": \"y\"}]')").await;
    database.publish_keys(&["a"; 5]).await;
    age(&database, 7).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let mut parked = write(lane, epoch, 8);
    parked.put = [3, 5, 8].map(|position| delivery(position, "a", State::Dead)).into();
    assert!(settle(&store, parked).await);
    assert_eq!(prune_all(&store, &policy()).await.events, 4);
    let page = store.poll(&tail(0, 10)).await.unwrap();
    assert_eq!((page.log_start, page.scans[0].visible.to_string().as_str()), (3, "3-4,7-8"));

    let mut dead = RangeSet::new();
    dead.insert_range(5, 6);
    dead.insert_range(11, 12);
    store.settle(&Settlement { closed: dead, ..Settlement::default() }).await.unwrap();
    assert_eq!(store.books().await.unwrap().closed.to_string(), "11-12");
    let rewind = Change::Rewind { subscription: "s".into(), to: Start::Beginning, key: None };
    store.change(&rewind, false).await.unwrap();
    let state = store.load(&[(lane, epoch + 1)]).await.unwrap().remove(0).unwrap();
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    assert_eq!(rows, [(5, State::Pending, 0)], "3 and 8 are read again, 5 is only kept aside");
    assert_eq!(store.fetch(&[5]).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_books_do_not_grow_for_ever_because_of_one_journal_event() {
    let database = database(4).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    database.execute("select pillarbox.append('stream', 0, '[{\"type\": \"y\"}, {\"type\": \"y\"}]')").await;
    let mut skipped = write(lane, epoch, 2);
    skipped.put.push(delivery(2, "a", State::Dead));
    assert!(settle(&store, skipped).await);
    let give_up = |position| Change::Skip { subscription: "s".into(), event: position, reason: "test".into() };
    let second = events(&store).await[1].id;
    store.change(&give_up(second), false).await.unwrap();
    for round in 1..=6_i64 {
        // Two events, one that nobody commits, and one that is given up.
        let ids = database.publish_keys(&["a"; 3]).await;
        database.execute("begin; insert into pillarbox.event (topic, type) values ('t', 'y'); rollback").await;
        let last = 2 + round * 4;
        let mut parked = write(lane, epoch, last);
        parked.put.push(delivery(last - 1, "a", State::Dead));
        let mut dead = RangeSet::new();
        dead.insert(last);
        let settlement = Settlement { lanes: vec![parked], closed: dead };
        assert!(store.settle(&settlement).await.unwrap()[0]);
        store.change(&give_up(ids[2]), false).await.unwrap();
        // As if each settlement had been long after the one before.
        database.execute("update pillarbox.progress set epoch = 1").await;
    }
    database.execute("update pillarbox.skip set at = now() - interval '10 days'").await;
    age(&database, 26).await;
    prune_all(&store, &policy()).await;
    assert_eq!(database.number("select log_start from pillarbox.meta").await, 1);
    assert_eq!(database.number("select pruned_to from pillarbox.meta").await, 24);
    assert_eq!(store.books().await.unwrap().closed.to_string(), "26");
    assert_eq!(store.books().await.unwrap().lanes[0].skipped.to_string(), "2,25");
    let mut auditor = pillarbox::admin::Auditor::new(store.books().await.unwrap()).only("s").unwrap();
    events(&store).await.iter().for_each(|event| auditor.event(event));
    let audit = auditor.finish().subscriptions.remove(0);
    assert_eq!((audit.missing, audit.skipped), (0, 2), "the journal's events are still accounted for: {audit:?}");
    assert!(database.number("select count(*) from pillarbox.progress").await <= 3);
}

#[tokio::test]
async fn events_in_dead_ranges_are_found_in_rotation() {
    let database = database(100_000).await;
    database.publish_keys(&["a"; 3]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    database.execute("select setval('pillarbox.event_position_seq', 30003)").await;
    assert!(settle(&store, write(lane, epoch, 30_003)).await);
    database
        .execute(
            "insert into pillarbox.dead_range (low, high) select n, n from generate_series(4, 30002, 2) as n;
            insert into pillarbox.event (position, topic, key, type) overriding system value
            values (6000, 't', 'a', 'y'), (24000, 't', 'a', 'y')",
        )
        .await;
    let delivered = async || database.number("select coalesce(min(position), 0) from pillarbox.delivery").await;
    prune_all(&store, &PrunePolicy { keep: None, ..policy() }).await;
    assert_eq!(delivered().await, 24_000, "those were the newest ten thousand ranges");
    // The relay beats meanwhile, and its connection for such work is another by then.
    store.observe(&Report::default()).await.unwrap();
    let client = database.client().await;
    let sessions = "from pg_stat_activity where datname = current_database() and application_name like '%operator'";
    client.execute(&format!("select pg_terminate_backend(pid) {sessions}"), &[]).await.unwrap();
    until(&client, &format!("select count(*) {sessions}"), 0).await;
    prune_all(&store, &PrunePolicy { keep: None, ..policy() }).await;
    assert_eq!(delivered().await, 6_000, "it goes on where it stopped");
    assert_eq!(database.number("select count(*) from pillarbox.dead_range where low in (6000, 24000)").await, 0);
    database
        .execute(
            "insert into pillarbox.event (position, topic, key, type) overriding system value values (30000, 't', 'a', 'y')",
        )
        .await;
    prune_all(&store, &PrunePolicy { keep: None, ..policy() }).await;
    assert_eq!(database.number("select count(*) from pillarbox.delivery").await, 3, "and then over again");
}

#[tokio::test]
async fn who_starts_now_gets_what_a_hold_has_passed_and_nobody_has_committed() {
    let database = database(10).await;
    database.publish_keys(&["a"]).await;
    let open = database.client().await;
    open.batch_execute("begin; insert into pillarbox.event (topic, key, type) values ('t', 'a', 'late')")
        .await
        .unwrap();
    database.publish_keys(&["a", "a"]).await;
    age(&database, 4).await;
    let store = database.store().await;
    let hold = Some(Duration::from_secs(9 * 86_400));
    let joined = join(&store, [Subscription { hold, ..one_lane("held") }]).await;
    let held = lane(joined.subscriptions[0].id);
    prune_all(&store, &policy()).await;
    let epoch = take(&store, held, pillarbox::store::TakeCause::Free).await.unwrap();
    let passed = store.load(&[(held, epoch)]).await.unwrap().remove(0).unwrap().cursor;
    assert_eq!(passed.floor, 4, "the hold was over for all of them");
    let joined = join(&store, [Subscription { start: Start::Now, ..one_lane("new") }]).await;
    let new = lane(joined.subscriptions[0].id);
    let cursor = store.load(&[(new, 0)]).await.unwrap().remove(0).unwrap().cursor;
    assert_eq!((cursor.floor, cursor.settled.to_string().as_str()), (1, "3-4"), "what is not committed yet stays open");
    open.batch_execute("commit").await.unwrap();
    let alarms = store.status().await.unwrap().log.alarms;
    assert!(alarms.iter().any(|alarm| alarm.contains("held")), "{alarms:?}");
}

#[tokio::test]
async fn a_leaf_is_emptied_only_of_what_may_go() {
    let database = database(2).await;
    database.publish_keys(&["a"; 4]).await;
    let client = database.client().await;
    let leaf: String = client.query_one("select name from pillarbox.leaf where low = 1", &[]).await.unwrap().get(0);
    let empty = async |removes: &str| {
        let sql = format!("set pillarbox.removes = '{removes}'; select pillarbox.empty_leaf('{leaf}')");
        client.batch_execute(&sql).await.map_err(|error| error.as_db_error().unwrap().message().to_owned())
    };
    let count = async || database.number("select count(*) from pillarbox.event").await;
    assert!(empty("received").await.unwrap_err().contains("nobody has received"));
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 1)).await);
    for removes in ["received", "unreceived", "everything"] {
        assert!(empty(removes).await.unwrap_err().contains("passed only those up to 1"), "{removes}");
    }
    let mut parked = write(lane, epoch, 2);
    parked.put = vec![delivery(2, "a", State::Retrying)];
    assert!(settle(&store, parked).await);
    assert!(empty("received").await.unwrap_err().contains("events that deliveries still need: 1"));
    database.execute("delete from pillarbox.delivery; update pillarbox.meta set retention_keep_ms = 3600000").await;
    assert!(empty("received").await.unwrap_err().contains("younger"));
    database.execute("update pillarbox.meta set retention_keep_ms = 9223372036854775807").await;
    assert!(empty("received").await.unwrap_err().contains("younger"));
    assert_eq!(count().await, 4);
    database.execute("update pillarbox.meta set retention_keep_ms = 0").await;
    empty("received").await.unwrap();
    assert_eq!(count().await, 2);
}

#[tokio::test]
async fn a_dry_run_says_what_the_next_run_removes() {
    let database = database(4).await;
    database.publish_keys(&["a"; 12]).await;
    age(&database, 10).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    for (floor, held_by) in [(3, Some("s")), (6, Some("s")), (12, None)] {
        assert!(settle(&store, write(lane, epoch, floor)).await);
        let dry = store.prune(&PrunePolicy { dry_run: true, ..policy() }).await.unwrap();
        let pruned = prune_all(&store, &policy()).await;
        assert_eq!(dry.events, pruned.events, "passed up to {floor}");
        assert_eq!((dry.held_by.as_deref(), pruned.held_by.as_deref()), (held_by, held_by), "passed up to {floor}");
    }
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 4);
}

#[tokio::test]
async fn old_dedup_keys_go() {
    let database = database(10).await;
    let event = NewEvent::new("t", "y").key("a").dedup_key("d");
    let ids = database.publish(std::slice::from_ref(&event)).await;
    let store = database.store().await;
    // The keys of the window before last are in the table that comes next.
    let next = "select next_table from pillarbox.dedup_window()";
    let next: String = database.client().await.query_one(next, &[]).await.unwrap().get(0);
    let insert = format!("insert into pillarbox.{next} values ('x', gen_random_uuid(), now() - interval '2 days')");
    database.execute(&insert).await;
    prune_all(&store, &policy()).await;
    assert_eq!(database.number(&format!("select count(*) from pillarbox.{next}")).await, 0);
    assert_eq!(database.publish(&[event]).await, ids[..1], "the current window is left alone");
}

#[tokio::test]
async fn records_of_progress_are_merged_without_a_gap() {
    let database = database(100).await;
    database.publish_keys(&["a"; 30]).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    for floor in [5, 10, 12] {
        assert!(settle(&store, write(lane, epoch, floor)).await);
        let sql = "update pillarbox.progress set started_at = to_timestamp(id), ended_at = to_timestamp(id)";
        database.execute(sql).await;
    }
    database.execute("update pillarbox.cursor set floor = 20").await;
    assert!(settle(&store, write(lane, epoch, 30)).await);
    let covered = store.books().await.unwrap().lanes[0].covered.clone();
    let before = database.number("select count(*) from pillarbox.progress").await;
    prune_all(&store, &policy()).await;
    assert_eq!(store.books().await.unwrap().lanes[0].covered, covered);
    assert!(database.number("select count(*) from pillarbox.progress").await < before);
}
