use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pillarbox::sink::{Fault, Outcome, Sink};
use pillarbox::{Event, Headers, Payload};
use pillarbox_sinks::RedisConfig;
use pillarbox_testkit::proxy::Proxy;
use pillarbox_testkit::redis::Server;
use pillarbox_testkit::sink_suite::sink_event;

use super::receivers::{Subscriber, raw_entries};
use super::{deliver, deliver_one, event, event_for, own_name, positions, pubsub, refused, stream, stream_of, until};

/// Enough for a server on the same machine, and soon over.
const SHORT: Duration = Duration::from_millis(500);

#[tokio::test]
async fn an_entry_has_these_fields() {
    let server = Server::shared();
    let name = own_name();
    let headers = ["traceparent", "X-Tenant", "data", "ce_id", ""];
    let headers: BTreeMap<String, String> = headers.map(|name| (name.to_owned(), format!("of {name}"))).into();
    let full = Event { headers: Headers::from_map(&headers), ..event(1) };
    let tombstone = sink_event(2, None, Payload::None);
    assert_eq!(deliver(&stream(&server.url(), &name), [full, tombstone]).await, vec![Outcome::Delivered; 2]);
    let entries = raw_entries(server.url(), &name).await;
    let texts = |index: usize| -> Vec<(&str, &str)> {
        let text = |(name, value): &'static (String, Vec<u8>)| (name.as_str(), std::str::from_utf8(value).unwrap());
        entries[index].clone().leak().iter().map(text).collect()
    };
    assert_eq!(
        texts(0),
        [
            ("ce_specversion", "1.0"),
            ("ce_id", "00000000-0000-0001-0000-000000000001"),
            ("ce_source", "urn:pillarbox:test"),
            ("ce_type", "order.placed"),
            ("ce_subject", "k1"),
            ("ce_partitionkey", "k1"),
            ("ce_topic", "orders"),
            ("ce_time", "1970-01-01T00:00:01.000Z"),
            ("ce_sequence", "1"),
            ("ce_traceparent", "of traceparent"),
            ("ce_headers", r#"{"":"of ","ce_id":"of ce_id","data":"of data"}"#),
            ("ce_datacontenttype", "application/json"),
            ("X-Tenant", "of X-Tenant"),
            ("data", "{\"n\":1}"),
        ]
    );
    let names: Vec<&str> = texts(1).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_topic", "ce_time", "ce_sequence"]);
}

#[tokio::test]
async fn a_key_of_another_type_fails_its_event_and_no_other() {
    let server = Server::shared();
    let (good, bad) = (own_name(), own_name());
    server.cli(&["SET", &bad, "a string"]).unwrap();
    let sink = stream(&server.url(), "{topic}");
    let outcomes = deliver(&sink, [event_for(1, &good), event_for(2, &bad), event_for(3, &good)]).await;
    let [Outcome::Delivered, Outcome::Failed(failure), Outcome::Delivered] = &outcomes[..] else {
        panic!("the second alone fails: {outcomes:?}")
    };
    assert_eq!((failure.fault, failure.kind, failure.permanent), (Fault::Event, "wrong_type", false));
    assert_eq!(positions(server, &good).await, [1, 3]);
    server.cli(&["DEL", &bad]).unwrap();
    assert_eq!(deliver_one(&sink, event_for(2, &bad)).await, Outcome::Delivered);
}

#[tokio::test]
async fn where_all_events_go_to_one_key_its_wrong_type_is_the_sinks() {
    let server = Server::shared();
    let name = own_name();
    server.cli(&["SET", &name, "a string"]).unwrap();
    let sink = stream(&server.url(), &name);
    let failure = refused(&sink, event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "wrong_type"));
    let checked = sink.check().await.unwrap_err();
    assert_eq!(checked.kind, "wrong_type");
    assert!(checked.message.contains("a string lies"), "{}", checked.message);
}

#[tokio::test]
async fn an_event_without_what_the_name_needs_is_refused_for_good() {
    let sink = stream(&Server::shared().url(), "orders-{key}");
    let failure = refused(&sink, Event { key: None, ..event(1) }).await;
    assert!(failure.permanent && failure.kind == "destination", "{failure:?}");
}

#[tokio::test]
async fn maxlen_keeps_about_so_many() {
    let server = Server::shared();
    let name = own_name();
    let sink = stream(&server.url(), &name).maxlen(Some(100));
    assert_eq!(deliver(&sink, (1..=1000).map(event)).await, vec![Outcome::Delivered; 1000]);
    let kept = positions(server, &name).await;
    assert!((100..=250).contains(&kept.len()), "{} entries", kept.len());
    assert_eq!(kept.last(), Some(&1000), "the newest are kept");
}

#[tokio::test]
async fn the_database_of_the_url_is_used() {
    let server = Server::shared();
    let name = own_name();
    let sink = stream(&format!("{}/3", server.url()), &name);
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    assert_eq!(server.cli(&["-n", "3", "XLEN", &name]).unwrap(), "1");
    assert_eq!(server.cli(&["XLEN", &name]).unwrap(), "0");
    let failure = refused(&stream(&format!("{}/99", server.url()), &name), event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
    assert!(failure.message.contains("database"), "{}", failure.message);
}

#[tokio::test]
async fn a_unix_socket_will_do() {
    let server = Server::shared();
    let name = own_name();
    assert_eq!(deliver_one(&stream(&server.unix_url(), &name), event(1)).await, Outcome::Delivered);
    assert_eq!(positions(server, &name).await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_receiver_pubsub_waits_if_it_is_told_to() {
    let server = Server::shared();
    let channel = own_name();
    let (careless, careful) =
        (pubsub(&server.url(), &channel), pubsub(&server.url(), &channel).require_receivers(true));
    assert_eq!(deliver_one(&careless, event(1)).await, Outcome::Delivered, "and gone");
    let failure = refused(&careful, event(2)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "no_receivers"));
    assert_eq!(careful.check().await, Err(failure), "what is told before is what happens then");
    assert_eq!(careless.check().await, Ok(()));
    let subscriber = Subscriber::start(&server.url(), &channel);
    subscriber.until_subscribed(1).await;
    assert_eq!(careful.check().await, Ok(()));
    assert_eq!(deliver_one(&careful, event(2)).await, Outcome::Delivered);
    let messages = subscriber.received(server).await;
    assert_eq!(messages.len(), 1);
    assert!(messages[0].contains("\"sequence\":\"2\""), "{}", messages[0]);
    let one_of_several = pubsub(&server.url(), &format!("{channel}-{{type}}")).require_receivers(true);
    assert_eq!(refused(&one_of_several, event(3)).await.fault, Fault::Event);
    assert_eq!(one_of_several.check().await, Ok(()), "which channels there will be nobody knows");
}

/// Redis counts those who are subscribed to a pattern when it delivers, and not when it is asked about a channel.
#[tokio::test]
async fn a_receiver_by_pattern_is_one() {
    let server = Server::builder().start().unwrap();
    let sink = pubsub(&server.url(), "orders").require_receivers(true);
    assert_eq!(sink.check().await.unwrap_err().kind, "no_receivers");
    let client = redis::Client::open(format!("{}/?protocol=resp3", server.url())).unwrap();
    let (pushes, _pushed) = tokio::sync::mpsc::unbounded_channel();
    let config = redis::AsyncConnectionConfig::new().set_push_sender(pushes);
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    connection.psubscribe("ord*").await.unwrap();
    assert_eq!(sink.check().await, Ok(()));
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
}

#[tokio::test]
async fn nobody_there_is_the_sinks_fault_and_said_at_once() {
    let server = Server::builder().start().unwrap();
    server.kill();
    let sink = stream(&server.url(), "events");
    let outcomes = deliver(&sink, [event(1), event(2)]).await;
    for outcome in &outcomes {
        let Outcome::Failed(failure) = outcome else { panic!("{outcome:?}") };
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
        assert!(failure.message.contains(&server.address()), "{}", failure.message);
    }
    assert_eq!(sink.check().await.unwrap_err().kind, "connect");
    server.start().unwrap();
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    sink.close().await;
    let clients = || server.cli(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap().lines().count();
    until("only redis-cli itself is connected", || clients() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_makes_a_duplicate_and_loses_nothing() {
    let server = Server::builder().start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let sink = stream(&proxy.url(&server.url()), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    proxy.cut_after_bytes_from_server(0);
    let failure = refused(&sink, event(2)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "lost"), "{failure:?}");
    assert_eq!(positions(&server, "events").await, [1, 2], "it had arrived");
    let failure = refused(&sink, event(2)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"), "nothing can be sent: {failure:?}");
    proxy.resume().unwrap();
    assert_eq!(deliver_one(&sink, event(2)).await, Outcome::Delivered);
    assert_eq!(positions(&server, "events").await, [1, 2, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_ends_in_time_and_the_next_connection_works() {
    let server = Server::builder().start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let config = || RedisConfig { timeout: SHORT, ..RedisConfig::new(proxy.url(&server.url())) };
    let sink = stream_of(config(), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    proxy.stall().unwrap();
    let begun = Instant::now();
    let failure = refused(&sink, event(2)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "timeout"), "{failure:?}");
    let failure = refused(&stream_of(config(), "events"), event(3)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"), "{failure:?}");
    assert!(begun.elapsed() < 10 * SHORT, "it took {:?}", begun.elapsed());
    proxy.resume().unwrap();
    assert_eq!(deliver_one(&sink, event(2)).await, Outcome::Delivered);
    assert!(positions(&server, "events").await.contains(&2));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_batches_that_wait_for_a_connection_wait_no_longer_than_one() {
    let server = Server::builder().start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let config = RedisConfig { timeout: SHORT, ..RedisConfig::new(proxy.url(&server.url())) };
    let sink = std::sync::Arc::new(stream_of(config, "events"));
    proxy.stall().unwrap();
    let begun = Instant::now();
    let refusing = |position| {
        let sink = sink.clone();
        tokio::spawn(async move { refused(&*sink, event(position)).await })
    };
    for task in (1..=16).map(refusing).collect::<Vec<_>>() {
        assert_eq!(task.await.unwrap().kind, "connect");
    }
    assert!(begun.elapsed() < 8 * SHORT, "it took {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_costs_nothing() {
    let server = Server::builder().start().unwrap();
    let sink = stream(&server.url(), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    assert_eq!(deliver_one(&sink, event(2)).await, Outcome::Delivered);
    server.restart().unwrap();
    assert_eq!(deliver_one(&sink, event(3)).await, Outcome::Delivered);
}

#[tokio::test]
async fn a_replica_takes_nothing_until_it_is_a_master() {
    let (master, server) = (Server::builder().start().unwrap(), Server::builder().start().unwrap());
    let sink = stream(&server.url(), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    server.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).unwrap();
    let failure = refused(&sink, event(2)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "read_only"), "{failure:?}");
    assert_eq!(sink.check().await.unwrap_err().kind, "read_only");
    server.cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    assert_eq!(deliver_one(&sink, event(2)).await, Outcome::Delivered);
    assert_eq!(sink.check().await, Ok(()));
}

#[tokio::test]
async fn a_full_server_is_waited_for() {
    let server = Server::builder().setting("maxmemory", 1).start().unwrap();
    let sink = stream(&server.url(), "{topic}");
    let failure = refused(&sink, event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "out_of_memory"), "{failure:?}");
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
}

#[tokio::test]
async fn a_cluster_is_named_as_what_is_not_supported() {
    let server = Server::builder().setting("cluster-enabled", "yes").start().unwrap();
    let failure = refused(&stream(&server.url(), "{topic}"), event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "cluster"), "{failure:?}");
    assert!(failure.message.contains("not supported"), "{}", failure.message);
}

/// A server says so and closes the connection, on which other events of the batch would have been under way.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_too_large_for_the_server_fails_alone() {
    let server = Server::builder().setting("proto-max-bulk-len", "1mb").start().unwrap();
    let large =
        |position| sink_event(position, Some("large"), Payload::Bytes(vec![b'x'; 4 * 1024 * 1024].into_boxed_slice()));
    let fitting = sink_event(2, Some("fits"), Payload::Bytes(vec![b'x'; 1024 * 1024].into_boxed_slice()));
    let (streams, channels) = (stream(&server.url(), "events"), pubsub(&server.url(), "events"));
    let batch = || [event(1), large(3), large(4), event(5)];
    let sinks: [&dyn Sink; 2] = [&streams, &channels];
    for sink in sinks {
        let outcomes = deliver(sink, batch()).await;
        let [Outcome::Delivered, Outcome::Failed(third), Outcome::Failed(fourth), Outcome::Delivered] = &outcomes[..]
        else {
            panic!("the large ones alone fail: {outcomes:?}")
        };
        for failure in [third, fourth] {
            assert_eq!((failure.fault, failure.kind, failure.permanent), (Fault::Event, "too_large", true));
        }
    }
    assert_eq!(deliver_one(&streams, fitting).await, Outcome::Delivered, "what fits exactly");
    assert_eq!(positions(&server, "events").await, [1, 5, 2]);
}
