use std::sync::Arc;

use pillarbox::admin::State;
use pillarbox::limit::PAYLOAD_BYTES_MAX;
use pillarbox::store::{DeliveryRow, LaneWrite, PollRequest, ScanRequest, Store};
use pillarbox::testing::Capture;
use pillarbox::{ErrorKind, Filter, NewEvent, Payload, Position, Relay, Subscription};
use pillarbox_postgres::PAGE_BYTES_MAX;

use crate::fixture::{Database, delivery, events, one_lane, one_scan, own, poll_tail, settle, tail, write};

fn wanted(topic: &str) -> Filter {
    Filter { topics: vec![topic.into()], types: vec![] }
}

#[tokio::test]
async fn what_arrives_is_what_was_sent() {
    let database = Database::new().await;
    let texts = [
        r#"{"a": "back\\slash \"quote\" new\nline \u0000 nul"}"#,
        r#"  {"spaces":   1}  "#,
        "\"emoji \u{1f600} and \u{10ffff}\"",
        "12345678901234567890.123456789e400",
        r#"{"a":1,"a":2}"#,
        "null",
    ];
    let mut published: Vec<NewEvent> = texts.iter().map(|text| NewEvent::new("t", "y").json_text(*text)).collect();
    published.push(NewEvent::new("t", "y").bytes(vec![0, 255, 1], "application/octet-stream"));
    published.push(NewEvent::new("t", "y").bytes(Vec::new(), "text/plain").header("quote", "\"\\ \u{1f600}"));
    published.push(NewEvent::new("t", "y"));
    database.publish(&published).await;
    let store = database.store().await;
    let read = events(&store).await;
    assert_eq!(read.len(), published.len());
    for (sent, got) in published.iter().zip(&read) {
        assert_eq!(sent.payload, got.payload);
        assert_eq!(sent.content_type.as_deref(), got.content_type.as_deref());
        assert_eq!(sent.headers, got.headers.to_map());
    }
    let positions: Vec<Position> = read.iter().map(|event| event.position).collect();
    assert_eq!(store.fetch(&positions).await.unwrap(), read, "fetched one by one they are the same");
}

#[tokio::test]
async fn what_nobody_wants_is_visible_without_being_returned() {
    let database = Database::new().await;
    let topics = ["orders", "billing.a", "billing_b", "other", "orders2"];
    let large = |topic: &&str| NewEvent::new(*topic, "y").json_text("\"x\"");
    database.publish(&topics.iter().map(large).collect::<Vec<_>>()).await;
    let store = database.store().await;
    let request = PollRequest { wanted: vec![wanted("orders"), wanted("billing.*")], ..tail(0, 100) };
    let scan = one_scan(store.poll(&request).await.unwrap());
    assert_eq!(scan.visible.count(), 5, "a filter never looks like a hole");
    let read: Vec<&str> = scan.events.iter().map(|event| &*event.topic).collect();
    assert_eq!(read, ["orders", "billing.a"]);
    assert!(scan.events.iter().all(|event| event.payload == Payload::Json("\"x\"".into())));
    let typed = Filter { topics: vec![], types: vec!["z".into()] };
    let scan = one_scan(store.poll(&PollRequest { wanted: vec![typed], ..tail(0, 100) }).await.unwrap());
    assert_eq!((scan.visible.count(), scan.events.len()), (5, 0));
}

#[tokio::test]
async fn several_stretches_are_read_in_one_snapshot_each_with_its_limit() {
    let database = Database::new().await;
    database.publish_keys(&["a"; 20]).await;
    let store = database.store().await;
    let scans = vec![
        ScanRequest { after: 2, to: 4, limit: 10 },
        ScanRequest { after: 7, to: 12, limit: 2 },
        ScanRequest { after: 30, to: Position::MAX, limit: 10 },
        ScanRequest { after: 15, to: Position::MAX, limit: 10 },
    ];
    let page = store.poll(&PollRequest { scans, wanted: vec![Filter::default()], ..Default::default() }).await.unwrap();
    let found: Vec<(String, Position)> =
        page.scans.iter().map(|scan| (scan.visible.to_string(), scan.covered_to)).collect();
    let expected = [("3-4", 4), ("8-9", 9), ("", 30), ("16-20", 20)];
    assert_eq!(found, expected.map(|(visible, covered)| (visible.to_owned(), covered)));
}

/// Many databases are set up so; the three statements of a poll would then see one snapshot [A5].
#[tokio::test]
async fn the_isolation_level_of_the_database_has_no_say() {
    let database = Database::new().await;
    let client = database.client().await;
    let name: String = client.query_one("select current_database()", &[]).await.unwrap().get(0);
    database.execute(&format!("alter database \"{name}\" set default_transaction_isolation = 'repeatable read'")).await;
    let store = database.store().await;
    store.poll(&tail(0, 10)).await.unwrap();
    database.publish_keys(&["a"]).await;
    assert_eq!(poll_tail(&store, 0).await.events.len(), 1);
}

#[tokio::test]
async fn a_page_of_large_payloads_ends_before_it_fills_the_memory() {
    let database = Database::new().await;
    let large = format!("\"{}\"", "x".repeat(1_000_000));
    let count = 3 * PAGE_BYTES_MAX / large.len();
    for _ in 0..count {
        database.publish(&[NewEvent::new("t", "y").json_text(large.as_str())]).await;
    }
    let store = database.store().await;
    let (mut after, mut pages, mut read) = (0, 0, 0);
    loop {
        let scan = one_scan(store.poll(&tail(after, 1_000)).await.unwrap());
        if scan.events.is_empty() {
            break;
        }
        let bytes: usize = scan.events.iter().map(|event| event.payload.len()).sum();
        assert!(bytes <= PAGE_BYTES_MAX + large.len(), "{bytes} bytes in one page");
        assert_eq!(scan.visible.count() as usize, scan.events.len(), "what was cut off is not called visible");
        (after, pages, read) = (scan.covered_to, pages + 1, read + scan.events.len());
    }
    assert!(pages >= 3, "{pages} pages");
    assert_eq!(read, count);
}

#[tokio::test]
async fn only_what_may_not_be_flushed_costs_a_barrier() {
    let database = Database::new().await;
    let store = database.store().await;
    let client = database.client().await;
    client.batch_execute("set synchronous_commit = off").await.unwrap();
    pillarbox_postgres::publish(&client, &NewEvent::new("t", "y")).await.unwrap();
    poll_tail(&store, 0).await;
    assert!(store.barriers() <= 1, "at most one a page");
    let before = store.barriers();
    poll_tail(&store, 1).await;
    assert_eq!(store.barriers(), before, "an empty page needs none");
}

#[tokio::test]
async fn a_lost_connection_is_made_again_under_another_number() {
    let database = Database::new().await;
    database.publish_keys(&["a"]).await;
    let store = database.store().await;
    let first = store.poll(&tail(0, 10)).await.unwrap();
    let sql = "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity
        where datname = current_database() and application_name like 'pillarbox%reader'";
    assert_eq!(database.number(sql).await, 1);
    // The session may not know yet that it has ended.
    let again = loop {
        match store.poll(&tail(0, 10)).await {
            Ok(page) => break page,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
    };
    assert_ne!(first.session, again.session, "what writers were seen before must not be compared");
    assert_eq!(one_scan(again).events.len(), 1);
}

#[tokio::test]
async fn a_sequence_that_was_set_back_is_noticed() {
    let database = Database::new().await;
    database.publish_keys(&["a", "b", "c"]).await;
    let store = database.store().await;
    assert_eq!(store.poll(&tail(0, 10)).await.unwrap().horizon, 3);
    database.execute("select setval('pillarbox.event_position_seq', 1)").await;
    let error = store.poll(&tail(0, 10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign, "{error}");
    assert!(error.to_string().contains("--adopt"), "{error}");
}

/// Whatever the number of leaves, a page is read from those that hold it, in order, without a sort.
#[tokio::test]
async fn a_scan_reads_the_leaves_that_it_needs() {
    let database = Database::new().await;
    database.publish_keys(&["a"; 10]).await;
    let client = database.client().await;
    client.batch_execute("set search_path = pillarbox; set plan_cache_mode = force_generic_plan").await.unwrap();
    let sql = include_str!("../../src/sql/scan.sql");
    client.batch_execute(&format!("prepare scan as {sql}")).await.unwrap();
    let rows = client
        .query("explain (analyze, costs off) execute scan (5, 9223372036854775807, 3, true, '{}', '{}')", &[])
        .await
        .unwrap();
    let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    let plan = plan.join("\n");
    assert!(!plan.contains("Sort") && !plan.contains("Seq Scan"), "{plan}");
    assert!(plan.contains("Index Scan"), "{plan}");
}

#[tokio::test]
async fn large_events_are_fetched_a_page_at_a_time_in_the_order_asked_for() {
    let database = Database::new().await;
    let large = |_| NewEvent::new("t", "y").bytes(noise(PAYLOAD_BYTES_MAX), "application/x");
    database.publish(&(0..20).map(large).collect::<Vec<_>>()).await;
    let store = database.store().await;
    // Two of them are not there.
    let wanted: Vec<Position> = [98, 20, 1, 97].into_iter().chain(2..20).collect();
    let (mut rest, mut rounds) = (wanted.as_slice(), Vec::new());
    while !rest.is_empty() {
        let events = store.fetch(rest).await.unwrap();
        let bytes: usize = events.iter().map(|event| event.payload.len()).sum();
        assert!((1..=PAGE_BYTES_MAX).contains(&bytes), "{bytes} bytes at once");
        let got: Vec<Position> = events.iter().map(|event| event.position).collect();
        let last = rest.iter().rposition(|position| got.contains(position)).unwrap();
        let told: Vec<Position> = rest[..=last].iter().copied().filter(|position| *position < 90).collect();
        assert_eq!(got.len(), told.len(), "nothing before the last one is left out: {got:?} of {rest:?}");
        assert!(got.is_sorted() && told.iter().all(|position| got.contains(position)), "{got:?} of {rest:?}");
        rounds.push(got.len());
        rest = &rest[last + 1..];
    }
    assert_eq!(rounds.iter().sum::<usize>(), 20);
    assert!(rounds.len() >= 3, "{rounds:?}");
    assert_eq!(store.fetch(&[97, 98, 99]).await.unwrap(), [], "what is not there is looked for to the end");
}

/// Bytes that cannot be compressed.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_events_that_are_tried_again_all_arrive_in_the_order_of_their_keys() {
    let database = Database::new().await;
    let key = |position: Position| ["a", "b", "c"][position as usize % 3];
    let large = |at: Position| NewEvent::new("t", "y").key(key(at)).bytes(noise(PAYLOAD_BYTES_MAX), "application/x");
    database.publish(&(1..=24).map(large).collect::<Vec<_>>()).await;
    let store = database.store().await;
    let (lane, epoch) = own(&store, "s").await;
    // In each key the last one comes first.
    let row = |at: Position| DeliveryRow { arrival: 100 - at, ..delivery(at, key(at), State::Retrying) };
    assert!(settle(&store, LaneWrite { put: (1..=24).map(row).collect(), ..write(lane, epoch, 24) }).await);
    store.leave().await.unwrap();

    let capture = Capture::new();
    let stream = Subscription { batch_size: 100, ..one_lane("s") };
    let relay = Relay::builder(database.store().await).subscribe(stream, Arc::new(capture.clone()));
    let relay = relay.start().await.unwrap();
    capture.wait_for(24).await;
    relay.until_idle().await.unwrap();
    relay.drain().await.unwrap();
    let events = capture.events();
    assert_eq!(events.len(), 24, "each once");
    for key in ["a", "b", "c"] {
        let of_key = events.iter().filter(|event| event.key.as_deref() == Some(key));
        assert!(of_key.rev().map(|event| event.position).is_sorted(), "{key}");
    }
    assert_eq!(database.number("select count(*) from pillarbox.delivery").await, 0, "none is dead");
}
