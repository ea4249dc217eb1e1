use std::collections::{BTreeMap, HashSet};

use pillarbox::sink::{Outcome, Sink};
use pillarbox::{Event, Headers, Payload};
use uuid::Uuid;

use super::outage::PATIENCE;
use super::{Received, SinkCase, SinkFixture, batch_of, numbered, sink_event};

/// What every sink promises, whatever its receiver is.
pub(super) const ALL: &[SinkCase] = &[
    case("an empty batch is answered with nothing", |fixture| Box::pin(empty_batch(fixture))),
    case("every event has one outcome and arrives once", |fixture| Box::pin(one_outcome(fixture))),
    case("events of a key arrive in order", |fixture| Box::pin(order(fixture))),
    case("payloads arrive as they were sent", |fixture| Box::pin(payloads(fixture))),
    case("without a key or a payload nothing takes their place", |fixture| Box::pin(without(fixture))),
    case("every attribute arrives", |fixture| Box::pin(attributes(fixture))),
    case("no header is lost", |fixture| Box::pin(headers(fixture))),
    case("concurrent batches arrive whole", |fixture| Box::pin(concurrent(fixture))),
    case("a second delivery has the same id", |fixture| Box::pin(second_delivery(fixture))),
    case("a call that is dropped leaves the sink usable", |fixture| Box::pin(dropped_calls(fixture))),
    case("the check passes while the receiver is well", |fixture| Box::pin(check_passes(fixture))),
];

const fn case(name: &'static str, run: fn(&dyn SinkFixture) -> pillarbox::sink::BoxFuture<'_, ()>) -> SinkCase {
    SinkCase { name, needs_server: false, run }
}

async fn deliver(sink: &dyn Sink, events: Vec<Event>) {
    let count = events.len();
    let outcomes = tokio::time::timeout(PATIENCE, sink.deliver(batch_of(events))).await;
    assert_eq!(outcomes.expect("an answer in time"), vec![Outcome::Delivered; count]);
}

/// First arrivals per key must be in order of the events' numbers.
pub(super) fn assert_in_order(received: &[Received]) {
    let mut seen = HashSet::new();
    let mut latest: BTreeMap<&str, Uuid> = BTreeMap::new();
    for event in received.iter().filter(|event| seen.insert(event.id)) {
        let Some(key) = event.key.as_deref() else { continue };
        let before = latest.insert(key, event.id);
        assert!(before < Some(event.id), "key {key} is out of order: {} came after {before:?}", event.id);
    }
}

async fn empty_batch(fixture: &dyn SinkFixture) {
    deliver(&*fixture.sink(), Vec::new()).await;
    assert_eq!(fixture.received().await, []);
}

async fn one_outcome(fixture: &dyn SinkFixture) {
    let events: Vec<Event> = (1..=250).map(|position| numbered(position, &format!("k{position}"))).collect();
    let mut expected: Vec<Uuid> = events.iter().map(|event| event.id).collect();
    deliver(&*fixture.sink(), events).await;
    let mut received: Vec<Uuid> = fixture.received().await.iter().map(|received| received.id).collect();
    expected.sort_unstable();
    received.sort_unstable();
    assert_eq!(received, expected);
}

async fn order(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let keys = ["a", "b", "c"];
    let key = |position: i64| keys[position as usize % keys.len()];
    if sink.features().ordered_batch {
        deliver(&*sink, (1..=30).map(|position| numbered(position, key(position))).collect()).await;
    }
    for first in (31..=60).step_by(3) {
        deliver(&*sink, (first..first + 3).map(|position| numbered(position, key(position))).collect()).await;
    }
    let received = fixture.received().await;
    for key in keys {
        let of_key = received.iter().filter(|received| received.key.as_deref() == Some(key));
        let ids: Vec<Uuid> = of_key.map(|received| received.id).collect();
        assert!(ids.len() >= 10 && ids.is_sorted(), "key {key}: {ids:?}");
    }
}

async fn payloads(fixture: &dyn SinkFixture) {
    let json = |text: &str| Payload::Json(text.into());
    let all_bytes: Vec<u8> = (0..=255).collect();
    let payloads = [
        Payload::None,
        json("null"),
        json("\"quotes \\\" and \\\\ and \\n and \\u0000\""),
        json("\"emoji 🦀 and é and \u{2028}\""),
        json("{\"a\":1,\"a\":2,\"big\":123456789012345678901234567890.5e400}"),
        Payload::Bytes(all_bytes.into()),
        Payload::Bytes(b"{\"not\": parsed\n".to_vec().into()),
        json(&format!("\"{}\"", "x".repeat(1024 * 1024 - 2))),
    ];
    let sink = fixture.sink();
    let event = |(index, payload): (usize, &Payload)| {
        sink_event(index as i64 + 1, Some(&format!("key \"{index}\" 🦀\n")), payload.clone())
    };
    deliver(&*sink, payloads.iter().enumerate().map(event).collect()).await;
    let mut received = fixture.received().await;
    received.sort_by_key(|received| received.id);
    assert_eq!(received.len(), payloads.len());
    for ((index, sent), got) in payloads.iter().enumerate().zip(&received) {
        // Not assert_eq: a megabyte helps nobody.
        assert!(&got.payload == sent, "payload {index} came as another one of {} bytes", got.payload.len());
        assert_eq!(got.key, Some(format!("key \"{index}\" 🦀\n")), "the key of payload {index}");
    }
}

async fn without(fixture: &dyn SinkFixture) {
    let json = || Payload::Json("{\"n\":1}".into());
    let sent = [(Some("k"), Payload::None), (None, json()), (None, Payload::None)];
    let event = |(index, (key, payload)): (usize, &(Option<&str>, Payload))| {
        sink_event(index as i64 + 1, *key, payload.clone())
    };
    deliver(&*fixture.sink(), sent.iter().enumerate().map(event).collect()).await;
    let mut received = fixture.received().await;
    received.sort_by_key(|received| received.id);
    let received: Vec<_> = received.into_iter().map(|received| (received.key, received.payload)).collect();
    assert_eq!(received, sent.map(|(key, payload)| (key.map(str::to_owned), payload)));
}

async fn attributes(fixture: &dyn SinkFixture) {
    const MEDIA: &str = "application/vnd.pillarbox.order+json";
    let plain = Event { topic: "billing.eu".into(), r#type: "invoice paid é".into(), ..numbered(7, "k") };
    let typed = Event { content_type: Some(MEDIA.into()), ..numbered(8, "l") };
    deliver(&*fixture.sink(), vec![plain.clone(), typed.clone()]).await;
    let mut received = fixture.received().await;
    received.sort_by_key(|received| received.id);
    assert_eq!(received.len(), 2);
    for ((event, media), received) in [(plain, "application/json"), (typed, MEDIA)].iter().zip(&received) {
        let attribute = |name: &str| received.attributes.get(name).map(String::as_str);
        assert_eq!(attribute("topic"), Some(&*event.topic), "topic");
        assert_eq!(attribute("type"), Some(&*event.r#type), "type");
        assert_eq!(attribute("sequence"), Some(&*event.position.to_string()), "sequence");
        assert_eq!(attribute("time"), Some(&*event.created_at.to_string()), "time");
        assert_eq!(attribute("datacontenttype"), Some(*media), "datacontenttype");
        let source = attribute("source").filter(|source| !source.is_empty());
        assert!(source.is_some(), "there is no source");
        assert!(fixture.features().source.is_none_or(|expected| source == Some(expected)), "source: {source:?}");
    }
}

async fn headers(fixture: &dyn SinkFixture) {
    let names =
        ["correlationid", "traceparent", "X-Tenant", "id", "data", "with space", "🦀", "a_rather_long_header_name"];
    let headers: BTreeMap<String, String> =
        names.iter().map(|name| ((*name).to_owned(), format!("\"{name}\" \\ \n é"))).collect();
    let event = Event { headers: Headers::from_map(&headers), ..numbered(1, "k") };
    deliver(&*fixture.sink(), vec![event]).await;
    assert_eq!(fixture.received().await[0].headers, headers);
}

async fn concurrent(fixture: &dyn SinkFixture) {
    const TASKS: i64 = 8;
    const BATCHES: i64 = 10;
    const EVENTS: i64 = 20;
    let sinks = [fixture.sink(), fixture.sink()];
    let task = |task: i64| {
        let sink = sinks[task as usize % sinks.len()].clone();
        tokio::spawn(async move {
            for batch in 0..BATCHES {
                let first = (task * BATCHES + batch) * EVENTS;
                let event = |position| numbered(position, &format!("{task}/{}", position % EVENTS));
                deliver(&*sink, (first..first + EVENTS).map(event).collect()).await;
            }
        })
    };
    for task in (0..TASKS).map(task).collect::<Vec<_>>() {
        task.await.expect("every batch is delivered");
    }
    let received = fixture.received().await;
    assert_eq!(received.len() as i64, TASKS * BATCHES * EVENTS);
    assert_in_order(&received);
}

async fn second_delivery(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    deliver(&*sink, vec![numbered(1, "k")]).await;
    deliver(&*sink, vec![numbered(1, "k")]).await;
    let received = fixture.received().await;
    assert!(!received.is_empty());
    assert!(received.iter().all(|event| event.id == numbered(1, "k").id), "{received:?}");
}

/// Calls are dropped at more and more of their awaits; what they had under way comes again before anything else of its keys.
async fn dropped_calls(fixture: &dyn SinkFixture) {
    const CALLS: i64 = 12;
    const KEYS: i64 = 10;
    let sink = fixture.sink();
    for call in 0..CALLS {
        let events = || (0..KEYS).map(|key| numbered(call * KEYS + key + 1, &format!("k{key}"))).collect::<Vec<_>>();
        let given_up = async {
            for _ in 0..(1 << call) - 1 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            _ = sink.deliver(batch_of(events())) => {}
            () = given_up => {}
        }
        deliver(&*sink, events()).await;
    }
    let received = fixture.received().await;
    let ids: HashSet<Uuid> = received.iter().map(|received| received.id).collect();
    assert_eq!(ids.len() as i64, CALLS * KEYS);
    assert_in_order(&received);
}

async fn check_passes(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    for when in ["before the first delivery", "after a delivery"] {
        let checked = tokio::time::timeout(PATIENCE, sink.check()).await.expect("an answer in time");
        assert_eq!(checked, Ok(()), "{when}");
        deliver(&*sink, vec![numbered(1, "k")]).await;
    }
}
