use pillarbox::store::{PollRequest, ScanRequest, Store};
use pillarbox::{Filter, NewEvent, Position};
use pillarbox_sqlite::PAGE_BYTES_MAX;

use crate::fixture::{Database, one_scan, poll_tail, tail};

#[tokio::test]
async fn a_tail_scan_covers_up_to_the_horizon_or_its_limit() {
    let database = Database::new();
    let store = database.store();
    let page = store.poll(&tail(0, 10)).await.unwrap();
    assert_eq!((page.horizon, page.log_start, page.scans[0].covered_to), (0, 1, 0));

    database.publish_keys(&["a"; 10]);
    let page = store.poll(&tail(0, 4)).await.unwrap();
    assert_eq!((page.horizon, page.scans[0].covered_to, page.scans[0].events.len()), (10, 4, 4));
    let scan = poll_tail(&store, 4).await;
    assert_eq!((scan.after, scan.covered_to, scan.visible.to_string().as_str()), (4, 10, "5-10"));
    assert_eq!(scan.events.iter().map(|event| event.position).collect::<Vec<_>>(), [5, 6, 7, 8, 9, 10]);
    let scan = poll_tail(&store, 10).await;
    assert_eq!((scan.covered_to, scan.visible.is_empty()), (10, true));
}

#[tokio::test]
async fn a_gap_is_covered_and_not_visible() {
    let database = Database::new();
    database.publish_keys(&["a", "b"]);
    database.execute("insert into pillarbox_event (position, topic, type) values (9, 't', 'y')");
    let scan = poll_tail(&database.store(), 0).await;
    assert_eq!((scan.covered_to, scan.visible.to_string().as_str()), (9, "1-2,9"));
    database.delete_event("position = 9");
    let page = database.store().poll(&tail(0, 100)).await.unwrap();
    assert_eq!((page.horizon, page.scans[0].covered_to), (9, 9), "the horizon outlives its row");
}

#[tokio::test]
async fn bounded_scans_and_filters_are_answered_in_one_snapshot() {
    let database = Database::new();
    let store = database.store();
    let topics = ["orders", "billing.eu", "other"];
    database.publish(&(0..30).map(|n| NewEvent::new(topics[n % 3], "y")).collect::<Vec<_>>());
    let wanted = |topic: &str| Filter { topics: vec![topic.into()], types: Vec::new() };
    let scans = [(0, 6, 100), (10, 20, 5), (28, 99, 100), (30, 99, 100)];
    let scans = scans.map(|(after, to, limit)| ScanRequest { after, to, limit }).to_vec();
    let page = store
        .poll(&PollRequest { scans, wanted: vec![wanted("orders"), wanted("billing.*")], without_writers: true })
        .await
        .unwrap();
    let seen: Vec<_> = page.scans.iter().map(|scan| (scan.covered_to, scan.visible.to_string())).collect();
    assert_eq!(seen, [(6, "1-6".into()), (15, "11-15".into()), (30, "29-30".into()), (30, String::new())]);
    let positions: Vec<_> = page.scans[0].events.iter().map(|event| event.position).collect();
    assert_eq!(positions, [1, 2, 4, 5], "what nobody wants is only visible");

    let nobody = PollRequest { wanted: Vec::new(), ..tail(0, 100) };
    let scan = one_scan(store.poll(&nobody).await.unwrap());
    assert_eq!((scan.visible.count(), scan.events.len()), (30, 0));
}

#[tokio::test]
async fn a_page_ends_at_its_bytes_and_always_moves_on() {
    let database = Database::new();
    let store = database.store();
    let big = 1024 * 1024;
    let count = PAGE_BYTES_MAX / big + 4;
    database.publish(&(0..count).map(|_| NewEvent::new("t", "y").bytes(vec![0; big], "x")).collect::<Vec<_>>());
    let scan = poll_tail(&store, 0).await;
    assert_eq!((scan.events.len(), scan.covered_to), (PAGE_BYTES_MAX / big, (PAGE_BYTES_MAX / big) as Position));
    let scan = poll_tail(&store, scan.covered_to).await;
    assert_eq!((scan.events.len(), scan.covered_to), (4, count as Position));
}

#[tokio::test]
async fn fetch_gives_what_is_there_in_order() {
    let database = Database::new();
    database.publish_keys(&["a", "b", "c"]);
    let events = database.store().fetch(&[3, 99, 1, 3]).await.unwrap();
    assert_eq!(events.iter().map(|event| event.position).collect::<Vec<_>>(), [1, 3]);
}

#[tokio::test]
async fn what_is_returned_was_made_durable_first() {
    let database = Database::new();
    let store = database.store();
    let publisher = database.connect();
    publisher.pragma_update(None, "synchronous", "off").unwrap();
    let insert = || {
        publisher.execute("insert into pillarbox_event (topic, type) values ('t', 'y')", []).unwrap();
    };
    store.poll(&tail(0, 10)).await.unwrap();
    assert_eq!(store.barriers(), 0, "nothing was returned");
    insert();
    insert();
    store.poll(&tail(0, 1)).await.unwrap();
    assert_eq!(store.barriers(), 1);
    store.poll(&tail(1, 10)).await.unwrap();
    assert_eq!(store.barriers(), 1, "the first barrier covered its whole snapshot");
    insert();
    store.poll(&PollRequest { wanted: Vec::new(), ..tail(2, 10) }).await.unwrap();
    assert_eq!(store.barriers(), 1, "nobody wanted it");
    store.fetch(&[3]).await.unwrap();
    assert_eq!(store.barriers(), 2);
    // The log starts anew: the commits now are in the database file, which the next barrier syncs too.
    publisher.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(())).unwrap();
    insert();
    assert_eq!(poll_tail(&store, 3).await.events.len(), 1);
    assert_eq!(store.barriers(), 3);
}

#[tokio::test]
async fn data_survives_reopening() {
    let database = Database::new();
    let ids = database.publish_keys(&["a", "b"]);
    drop(database.store());
    let events = poll_tail(&database.store(), 0).await.events;
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), ids);
}

#[tokio::test]
async fn a_commit_that_was_its_own_barrier_needs_no_second_one() {
    use pillarbox_sqlite::publish;
    use std::time::Duration;
    let database = Database::new();
    let store = database.store();
    database.publish_keys(&["a"]);
    poll_tail(&store, 0).await;
    assert_eq!(store.barriers(), 1);
    let mut connection = database.connect();
    // Returns how many barriers the event took. The publisher finds a waiting relay.
    let mut check = async |synchronous: &str, after: Position| {
        connection.pragma_update(None, "synchronous", synchronous).unwrap();
        let before = store.barriers();
        let publisher = async {
            let tx = connection.transaction().unwrap();
            publish(&tx, &NewEvent::new("t", "y")).unwrap();
            tx.commit().unwrap();
        };
        let (wake, ()) = tokio::join!(store.wait(Duration::from_secs(20)), publisher);
        assert_eq!(wake.unwrap(), pillarbox::store::Wake::Rang);
        assert_eq!(poll_tail(&store, after).await.events.len(), 1);
        store.barriers() - before
    };
    assert_eq!(check("full", 1).await, 0);
    assert_eq!(check("normal", 2).await, 1);
    assert_eq!(check("off", 3).await, 1);
    assert_eq!(check("full", 4).await, 0);
    // A position that was rolled back and then used by somebody who does not sync is not taken for the first one.
    connection.pragma_update(None, "synchronous", "full").unwrap();
    let rolled_back = async {
        let tx = connection.transaction().unwrap();
        publish(&tx, &NewEvent::new("t", "y")).unwrap();
        drop(tx);
        let other = database.connect();
        other
            .execute_batch("pragma synchronous = off; insert into pillarbox_event (topic, type) values ('t', 'y')")
            .unwrap();
    };
    let before = store.barriers();
    tokio::join!(async { store.wait(Duration::from_secs(20)).await.unwrap() }, rolled_back);
    assert_eq!(poll_tail(&store, 5).await.events[0].position, 6);
    assert_eq!(store.barriers() - before, 1);
}
