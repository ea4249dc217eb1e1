use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::admin::{Change, Operator, PrunePolicy, State};
use pillarbox::store::Store;
use pillarbox::{Delivery, Event, Failure, NewEvent, Relay, Start, Subscription};
use pillarbox_postgres::Limits;
use pillarbox_testkit::by_hand::prune_all;

use crate::fixture::{Database, delivery, own, poll_tail, settle, write};
use crate::retention::{age, database};

/// Everything that everybody has passed goes at once.
fn nothing_is_kept() -> PrunePolicy {
    PrunePolicy { keep: Some(Duration::ZERO), unreceived: true, ..PrunePolicy::default() }
}

const INSERT: &str = "insert into pillarbox.event (topic, key, type) values ('t', 'a', 'y')";

const TABLES: &str = "select count(*) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
    where n.nspname = 'pillarbox' and c.relkind = 'r' and c.relname ~ '^event_[0-9]+$'";

async fn publish(database: &Database, count: usize) {
    database.publish_keys(&vec!["a"; count]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_go_on_beside_an_idle_writer_while_retention_runs() {
    let database = Arc::new(database(50).await);
    publish(&database, 300).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 300)).await);
    let idle = database.client().await;
    idle.batch_execute(&format!("begin; {INSERT}")).await.unwrap();
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let database = database.clone();
        publishers.spawn(async move {
            let client = database.client().await;
            for _ in 0..50 {
                client.batch_execute(INSERT).await.unwrap();
            }
        });
    }
    let mut removed = 0;
    while !publishers.is_empty() {
        removed += prune_all(&store, &nothing_is_kept()).await.events;
        while publishers.try_join_next().transpose().unwrap().is_some() {}
    }
    // All of them have committed, and the writer is still open.
    assert_eq!(removed, 300, "the leaf that the writer uses is not in the way of the others");
    let open =
        "select count(*) from pg_stat_activity where state = 'idle in transaction' and datname = current_database()";
    assert_eq!(database.number(open).await, 1);
    assert_eq!(poll_tail(&store, 0).await.visible.count(), 400);
    idle.batch_execute("commit").await.unwrap();
    prune_all(&store, &nothing_is_kept()).await;
    let ahead = "select count(*) from pillarbox.leaf where low > 701 and high - low = 50";
    assert_eq!(database.number(ahead).await, 10, "leaves are laid once the writer is gone");
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "301-701");
}

#[tokio::test]
async fn publishing_never_fails_when_nobody_looks_after_the_leaves() {
    let database = database(10).await;
    publish(&database, 3_000).await;
    let store = database.store().await;
    assert_eq!(database.number("select count(*) from pillarbox.event").await, 3_000, "the leaves ahead grow");
    let (lane, epoch) = own(&store, "s").await;
    assert!(settle(&store, write(lane, epoch, 2_000)).await);
    let pruned = prune_all(&store, &nothing_is_kept()).await;
    assert_eq!(pruned.events, 820, "ten of 10, then 80 and 640 positions; the next one is still in use");

    // Beyond all that was foreseen.
    database.execute("select pillarbox.arrange_leaves(array[3001, 3011])").await;
    publish(&database, 100).await;
    assert_eq!(database.number("select low from pillarbox.leaf where high is null").await, 3011);
    prune_all(&store, &nothing_is_kept()).await;
    let cut = "select high from pillarbox.leaf where low = 3011";
    assert_eq!(database.number(cut).await, 3101, "it ends here from now on");
    publish(&database, 30).await;
    assert!(settle(&store, write(lane, epoch, 3_100)).await);
    assert_eq!(prune_all(&store, &nothing_is_kept()).await.events, 3_100 - 820);
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "3101-3130");
}

#[tokio::test]
async fn emptied_leaves_are_used_again_and_read_right() {
    let database = database(10).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    let tables = database.number(TABLES).await;
    for round in 1..=12 {
        publish(&database, 25).await;
        let published = round * 25;
        let floor = published - 5;
        assert!(settle(&store, write(lane, epoch, floor)).await);
        prune_all(&store, &nothing_is_kept()).await;
        let start = floor / 10 * 10 + 1;
        let page = store.poll(&crate::fixture::tail(0, 1_000)).await.unwrap();
        assert_eq!(page.log_start, start);
        assert_eq!(page.scans[0].visible.to_string(), format!("{start}-{published}"));
        let positions: Vec<_> = page.scans[0].events.iter().map(|event| event.position).collect();
        assert_eq!(positions, (start..=published).collect::<Vec<_>>());
        assert_eq!(database.number("select count(*) from pillarbox.leaf").await, database.number(TABLES).await);
    }
    assert!(database.number(TABLES).await <= tables + 8, "tables are not piled up");
    let newest = "select max(substring(name from 7)::bigint) from pillarbox.leaf";
    assert!(database.number(newest).await <= tables + 8, "nor made anew");
}

#[tokio::test]
async fn a_log_with_little_traffic_loses_its_old_events_too() {
    let database = Database::new().await;
    publish(&database, 3).await;
    age(&database, 3).await;
    let store = database.store().await;
    let policy = PrunePolicy { unreceived: true, ..PrunePolicy::default() };
    assert_eq!(prune_all(&store, &policy).await.events, 0, "the leaf is not full, but is to end here");
    publish(&database, 2).await;
    assert_eq!(prune_all(&store, &policy).await.events, 3);
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "4-5");
    assert_eq!(database.number("select high from pillarbox.leaf where low = 4").await, 10_004);
}

#[tokio::test]
async fn a_leaf_in_use_is_emptied_later() {
    let database = database(5).await;
    publish(&database, 10).await;
    let store = database.store().await;
    let dump = database.client().await;
    let first: String = dump.query_one("select name from pillarbox.leaf where low = 1", &[]).await.unwrap().get(0);
    dump.batch_execute(&format!("begin; lock table pillarbox.{first} in access share mode")).await.unwrap();
    assert_eq!(prune_all(&store, &nothing_is_kept()).await.events, 0);
    assert_eq!(poll_tail(&store, 0).await.visible.to_string(), "1-10", "and nothing else has changed");
    assert_eq!(store.poll(&crate::fixture::tail(0, 10)).await.unwrap().log_start, 1);
    dump.batch_execute("commit").await.unwrap();
    assert_eq!(prune_all(&store, &nothing_is_kept()).await.events, 10);
}

#[tokio::test]
async fn a_rewind_and_retention_exclude_each_other() {
    let database = database(5).await;
    publish(&database, 10).await;
    let store = Arc::new(database.store().await);
    let (lane, epoch) = own(&*store, "s").await;
    assert!(settle(&*store, write(lane, epoch, 10)).await);
    // A rewind that has looked at the beginning of the log and has not committed.
    let rewind = database.client().await;
    rewind
        .batch_execute("begin; select from pillarbox.meta for share; update pillarbox.cursor set floor = 0")
        .await
        .unwrap();
    let pruning = tokio::spawn({
        let store = store.clone();
        async move { prune_all(&*store, &nothing_is_kept()).await }
    });
    let waiting =
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    while database.number(waiting).await == 0 {
        tokio::task::yield_now().await;
    }
    rewind.batch_execute("commit").await.unwrap();
    let pruned = pruning.await.unwrap();
    assert_eq!((pruned.events, pruned.held_by.as_deref()), (0, Some("s")));

    assert!(settle(&*store, write(lane, epoch, 10)).await);
    assert_eq!(prune_all(&*store, &nothing_is_kept()).await.events, 10);
    let to_nothing = Change::Rewind { subscription: "s".into(), to: Start::Position(3), key: None };
    let changed = store.change(&to_nothing, false).await.unwrap();
    assert!(changed.message.contains("above position 10"), "{}", changed.message);
}

#[tokio::test]
async fn a_position_that_was_drawn_before_retention_and_used_afterwards_is_not_lost_with_its_leaf() {
    let database = database(5).await;
    publish(&database, 30).await;
    let store = database.store().await;
    for _ in 0..4 {
        let pruned = store.prune(&nothing_is_kept()).await.unwrap();
        assert_eq!((pruned.events, pruned.more), (5, true), "nobody subscribes");
    }
    let sql = "select count(*) from pillarbox.leaf where emptied";
    let emptied = database.number(sql).await;
    let client = database.client().await;
    let leaf = "select name, low from pillarbox.leaf where emptied order by low limit 1";
    let row = client.query_one(leaf, &[]).await.unwrap();
    let (name, low): (String, i64) = (row.get(0), row.get(1));
    let late = format!(
        "insert into pillarbox.{name} (position, topic, type) overriding system value values ({low}, 't', 'y')"
    );
    client.batch_execute(&late).await.unwrap();
    store.lay_leaves(None).await.unwrap();
    database.execute("select pillarbox.arrange_leaves(array[1001, 2001])").await;
    assert!(emptied > 1 && database.number(sql).await == 0, "the others are used again");
    assert_eq!(database.number(&format!("select low from pillarbox.leaf where name = '{name}'")).await, low);
    assert_eq!(poll_tail(&store, 0).await.visible.first(), Some(low));
    assert_eq!(prune_all(&store, &nothing_is_kept()).await.events, 11, "it goes with the next ones");
}

#[tokio::test]
async fn of_two_who_lay_leaves_at_once_the_second_uses_what_the_first_has_laid() {
    let database = database(5).await;
    publish(&database, 12).await;
    let (one, two) = (database.client().await, database.client().await);
    let bounds = "array(select generate_series(16, 2016, 50))";
    one.batch_execute(&format!("begin; select pillarbox.arrange_leaves({bounds})")).await.unwrap();
    let second = format!("select pillarbox.arrange_leaves({bounds})");
    let second = two.batch_execute(&second);
    let ending = async {
        let waits =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
        while database.number(waits).await == 0 {
            tokio::task::yield_now().await;
        }
        one.batch_execute("commit").await.unwrap();
    };
    let (second, ()) = tokio::join!(second, ending);
    second.unwrap();
    assert_eq!(database.number("select count(*) from pillarbox.leaf").await, database.number(TABLES).await);
    publish(&database, 60).await;

    let open = "select name from pillarbox.leaf where high is null";
    let open: String = two.query_one(open, &[]).await.unwrap().get(0);
    let without = format!(
        "begin; alter table pillarbox.event detach partition pillarbox.{open};
        delete from pillarbox.leaf where high is null; select pillarbox.arrange_leaves(array[9001])"
    );
    let gap = two.batch_execute(&without).await.unwrap_err();
    assert_eq!(gap.code().unwrap().code(), "55006", "{gap:?}");
}

#[tokio::test]
async fn leaves_are_laid_behind_a_journal_and_a_leaf_that_was_emptied_to_its_end() {
    let database = database(5).await;
    database.execute("select pillarbox.append('stream', 0, '[{\"type\": \"y\"}]')").await;
    publish(&database, 9).await;
    let store = database.store().await;
    assert_eq!(prune_all(&store, &nothing_is_kept()).await.events, 5);
    database.execute("update pillarbox.meta set leaf_size = 20").await;
    store.lay_leaves(None).await.unwrap();
    publish(&database, 30).await;
    assert_eq!(database.number("select high from pillarbox.leaf where low = 11").await, 31);
}

#[tokio::test]
async fn a_leaf_of_a_hundred_megabytes_is_cut_beside_publishers() {
    let database = Database::new().await;
    let fill = "insert into pillarbox.event (topic, type, payload_bytes)
        select 't', 'y', convert_to(repeat(md5(n::text), 30), 'UTF8') from generate_series(1, 9000) as n";
    database.execute("update pillarbox.meta set leaf_size = 1000000").await;
    let store = database.store().await;
    store.lay_leaves(None).await.unwrap();
    database.execute("alter table pillarbox.event alter payload_bytes set storage external").await;
    let leaf: String = {
        let client = database.client().await;
        client.query_one("select name from pillarbox.leaf where low = 1", &[]).await.unwrap().get(0)
    };
    database.execute(&format!("alter table pillarbox.{leaf} alter payload_bytes set storage external")).await;
    for _ in 0..9 {
        database.execute(fill).await;
    }
    let size = format!("select pg_relation_size('pillarbox.{leaf}')");
    assert!(database.number(&size).await > 64 * 1024 * 1024);
    database.execute("update pillarbox.meta set leaf_size = 1000").await;
    let high = format!("select high from pillarbox.leaf where name = '{leaf}'");
    // Where others use the machine it may be read too slowly; another session tries again at once.
    let mut tries = 0;
    while database.number(&high).await != 81_001 {
        tries += 1;
        assert!(tries <= 20, "it is never cut");
        prune_all(&database.store().await, &nothing_is_kept()).await;
    }
}

#[tokio::test]
async fn leaves_that_cannot_be_laid_are_an_alarm_and_are_laid_beside_overlapping_publishers() {
    let database = Arc::new(database(5).await);
    publish(&database, 40).await;
    let store = database.store().await;
    let alarms = async || store.status().await.unwrap().log.alarms.join("\n");
    let due = "select count(*) from pillarbox.meta where leaves_due is not null";
    let back = "update pillarbox.meta set leaves_due_since = leaves_due_since - interval '11 minutes'";
    let dump = database.client().await;
    dump.batch_execute("begin; lock table pillarbox.event in access share mode").await.unwrap();
    prune_all(&store, &nothing_is_kept()).await;
    assert_eq!(database.number(due).await, 1);
    assert!(!alarms().await.contains("leaves"), "not at once");
    database.execute(back).await;
    let said = alarms().await;
    assert!(said.contains("used the log for long") && said.contains("pillarbox prune"), "{said}");
    assert!(store.doctor().await.unwrap().iter().any(|check| check.finding.contains("used the log for long")));
    let error = store.lay_leaves(None).await.unwrap_err();
    assert_eq!(error.kind(), pillarbox::ErrorKind::Busy, "{error}");
    dump.batch_execute("commit").await.unwrap();

    // Each uses the log for longer than is waited for at first, and there is always one.
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (database, stop) = (database.clone(), stop.clone());
        publishers.spawn(async move {
            let client = database.client().await;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                client.batch_execute(&format!("begin; {INSERT}; select pg_sleep(0.22); commit")).await.unwrap();
            }
        });
    }
    let mut rounds = 0;
    while database.number(due).await > 0 {
        rounds += 1;
        assert!(rounds < 60, "they are never laid");
        prune_all(&store, &nothing_is_kept()).await;
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    publishers.join_all().await;
    assert!(!alarms().await.contains("leaves"));
    assert!(database.number("select count(*) from pillarbox.leaf where high - low = 5").await >= 5);
}

#[tokio::test]
async fn leaves_can_be_laid_after_a_limit_was_changed() {
    let database = database(5).await;
    publish(&database, 12).await;
    let store = database.store().await;
    store.set_limits(Limits { payload_bytes_max: Some(2_000), ..Limits::default() }).await.unwrap();
    prune_all(&store, &nothing_is_kept()).await;
    publish(&database, 60).await;
    prune_all(&store, &nothing_is_kept()).await;
    let large = NewEvent::new("t", "y").bytes(vec![0; 3_000], "application/octet-stream");
    let client = database.client().await;
    assert!(pillarbox_postgres::publish(&client, &large).await.is_err(), "new leaves have the limit too");
    assert!(database.number("select count(*) from pillarbox.leaf where low > 73 and high - low = 5").await >= 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_while_leaves_come_and_go_under_a_relay() {
    const WRITERS: usize = 4;
    const EVENTS: usize = 300;
    let database = Arc::new(database(20).await);
    let received = Arc::<Mutex<Vec<Arc<Event>>>>::default();
    let subscription = Subscription { lanes: 2, ..Subscription::new("s") };
    let handler = {
        let received = received.clone();
        move |event: Delivery| {
            received.lock().unwrap().push(event.event().clone());
            async { Ok::<(), Failure>(()) }
        }
    };
    let relay = Relay::builder(database.store().await).handle(subscription, handler).start().await.unwrap();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let database = database.clone();
        writers.spawn(async move {
            let mut client = database.client().await;
            let mut ids = Vec::new();
            for number in 0..EVENTS {
                let tx = client.transaction().await.unwrap();
                let event = NewEvent::new("t", "y").key(format!("{writer}"));
                let id = pillarbox_postgres::publish(&tx, &event).await.unwrap();
                match number % 7 {
                    0 => tx.rollback().await.unwrap(),
                    _ => {
                        tx.commit().await.unwrap();
                        ids.push(id);
                    }
                }
            }
            (writer, ids)
        });
    }
    let store = database.store().await;
    let mut removed = 0;
    let mut published = HashMap::new();
    while published.len() < WRITERS {
        removed += prune_all(&store, &nothing_is_kept()).await.events;
        while let Some(ended) = writers.try_join_next() {
            let (writer, ids) = ended.unwrap();
            published.insert(format!("{writer}"), ids);
        }
    }
    relay.until_idle().await.unwrap();
    // The leaf that they left behind may be a large one; it is cut, and the next ones are small again.
    removed += prune_all(&store, &nothing_is_kept()).await.events;
    let last = NewEvent::new("t", "y").key("last");
    published.insert("last".into(), database.publish(&vec![last; 25]).await);
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    removed += prune_all(&store, &nothing_is_kept()).await.events;
    let mut arrived = HashMap::<String, Vec<_>>::new();
    for event in received.lock().unwrap().iter() {
        arrived.entry(event.key.as_deref().unwrap().to_owned()).or_default().push(event.id);
    }
    assert_eq!(arrived, published, "each once, in order");
    let left = poll_tail(&store, 0).await.visible.count();
    assert_eq!(removed + left, received.lock().unwrap().len() as u64);
    assert!(left < 20, "{left} events are in the log, a leaf has 20");
    assert_eq!(
        database
            .number("select count(*) from pillarbox.dead_range where high < (select log_start from pillarbox.meta)")
            .await,
        0
    );
}

#[tokio::test]
async fn the_log_has_no_dead_rows_but_those_of_aborted_publishers() {
    let database = database(50).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    for round in 1..=10 {
        publish(&database, 20).await;
        database.execute(&format!("begin; {INSERT}; rollback")).await;
        let mut parked = write(lane, epoch, round * 21);
        parked.put = vec![delivery(round * 21 - 5, "a", State::Dead)];
        assert!(settle(&store, parked).await);
        prune_all(&store, &nothing_is_kept()).await;
    }
    // What a session has counted is told to the others when it ends at the latest.
    drop(store);
    let client = database.client().await;
    let figures = "select
            coalesce(sum(n_dead_tup) filter (where relname ~ '^event_[0-9]+$'), 0)::bigint,
            coalesce(sum(n_tup_upd + n_tup_del) filter (where relname ~ '^event_[0-9]+$'), 0)::bigint,
            coalesce(sum(n_tup_upd) filter (where relname = 'cursor'), 0)::bigint,
            coalesce(sum(n_tup_hot_upd) filter (where relname = 'cursor'), 0)::bigint
        from pg_stat_user_tables where schemaname = 'pillarbox'";
    let row = loop {
        let row = client.query_one(figures, &[]).await.unwrap();
        if row.get::<_, i64>(2) >= 10 {
            break row;
        }
        tokio::task::yield_now().await;
    };
    let [dead, changed, updates, hot] = [0, 1, 2, 3].map(|index| row.get::<_, i64>(index));
    assert!(dead <= 10 && changed == 0, "{dead} dead rows of 10 aborted ones, {changed} changes");
    assert!(hot as f64 >= 0.95 * updates as f64, "{hot} of {updates} updates of a cursor were cheap");
    assert_eq!(database.number("select count(*) from pillarbox.event_kept").await, 9, "parked below 201");
}
