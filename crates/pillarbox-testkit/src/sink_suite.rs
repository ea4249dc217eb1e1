use std::collections::BTreeMap;
use std::sync::Arc;

use pillarbox::{Attempt, Batch, BoxFuture, Event, Headers, Outcome, Payload, Sink, Timestamp};
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

/// What the suite needs of a sink under test: a receiver of its own that nothing was delivered to yet.
pub trait SinkFixture: Send + Sync {
    /// A sink that delivers to the receiver; several may be open at once.
    fn sink(&self) -> Arc<dyn Sink>;

    /// What the receiver has got so far, in order of arrival.
    fn received(&self) -> BoxFuture<'_, Vec<Received>>;
}

/// One event as a receiver got it.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    /// The event's id.
    pub id: Uuid,
    /// Its key.
    pub key: Option<String>,
    /// Its payload, byte for byte.
    pub payload: Payload,
    /// Its headers, put together again.
    pub headers: BTreeMap<String, String>,
}

impl Received {
    /// Reads a CloudEvents JSON object as `stdout` and `file` write it.
    pub fn from_cloud_event(line: &str) -> serde_json::Result<Received> {
        const ATTRIBUTES: [&str; 11] = [
            "specversion",
            "id",
            "source",
            "type",
            "subject",
            "time",
            "datacontenttype",
            "topic",
            "partitionkey",
            "sequence",
            "headers",
        ];
        let mut members: BTreeMap<String, Box<RawValue>> = serde_json::from_str(line)?;
        let payload = match (members.remove("data"), members.remove("data_base64")) {
            (Some(json), _) => Payload::Json(json.get().into()),
            (None, Some(text)) => Payload::Bytes(from_base64(&serde_json::from_str::<String>(text.get())?).into()),
            (None, None) => Payload::None,
        };
        let text = |name: &str| members.get(name).map(|value| serde_json::from_str::<String>(value.get())).transpose();
        let others = text("headers")?.map(|others| serde_json::from_str::<BTreeMap<String, String>>(&others));
        let mut headers = others.transpose()?.unwrap_or_default();
        for (name, value) in members.iter().filter(|(name, _)| !ATTRIBUTES.contains(&name.as_str())) {
            headers.insert(name.clone(), serde_json::from_str(value.get())?);
        }
        let id = serde_json::from_value(text("id")?.map_or(Value::Null, Value::String))?;
        Ok(Received { id, key: text("subject")?, payload, headers })
    }
}

/// The names and functions of all cases.
pub const SINK_CASES: &[SinkCase] = &[
    SinkCase { name: "an empty batch is answered with nothing", run: |fixture| Box::pin(empty_batch(fixture)) },
    SinkCase { name: "every event has one outcome and arrives once", run: |fixture| Box::pin(one_outcome(fixture)) },
    SinkCase { name: "events of a key arrive in order", run: |fixture| Box::pin(order(fixture)) },
    SinkCase { name: "payloads arrive as they were sent", run: |fixture| Box::pin(payloads(fixture)) },
    SinkCase { name: "no header is lost", run: |fixture| Box::pin(headers(fixture)) },
    SinkCase { name: "concurrent batches arrive whole", run: |fixture| Box::pin(concurrent(fixture)) },
    SinkCase { name: "a second delivery has the same id", run: |fixture| Box::pin(second_delivery(fixture)) },
];

/// One behaviour that every sink has.
pub struct SinkCase {
    /// What is promised.
    pub name: &'static str,
    run: fn(&dyn SinkFixture) -> BoxFuture<'_, ()>,
}

/// Runs every case, each with a fixture of its own.
///
/// # Panics
/// If the sink does not behave.
pub async fn check_sink<F: SinkFixture>(fixture: impl Fn() -> F) {
    for case in SINK_CASES {
        eprintln!("sink case: {}", case.name);
        (case.run)(&fixture()).await;
    }
}

/// An event to be delivered to a sink under test.
pub fn sink_event(position: i64, key: Option<&str>, payload: Payload) -> Event {
    Event {
        position,
        id: Uuid::from_u64_pair(1, position as u64),
        topic: "orders".into(),
        key: key.map(Into::into),
        r#type: "order.placed".into(),
        payload,
        content_type: None,
        headers: Headers::default(),
        stream_version: None,
        deliver_at: None,
        created_at: Timestamp(1_000),
    }
}

/// A batch of these events, each at its first attempt.
pub fn batch_of(events: impl IntoIterator<Item = Event>) -> Batch {
    let attempt = |event| Attempt { event: Arc::new(event), number: 1, epoch: 1, claim: None };
    Batch { subscription: "suite".into(), events: events.into_iter().map(attempt).collect() }
}

fn numbered(position: i64, key: &str) -> Event {
    sink_event(position, Some(key), Payload::Json(format!("{{\"n\":{position}}}").into()))
}

async fn deliver(sink: &dyn Sink, events: Vec<Event>) {
    let count = events.len();
    let outcomes = sink.deliver(batch_of(events)).await;
    assert_eq!(outcomes, vec![Outcome::Delivered; count]);
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
        assert_eq!(&got.payload, sent, "payload {index}");
        assert_eq!(got.key, Some(format!("key \"{index}\" 🦀\n")), "the key of payload {index}");
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
    let mut latest: BTreeMap<Option<String>, Uuid> = BTreeMap::new();
    for event in received {
        let before = latest.insert(event.key.clone(), event.id);
        assert!(before < Some(event.id), "key {:?} is out of order", event.key);
    }
}

async fn second_delivery(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    deliver(&*sink, vec![numbered(1, "k")]).await;
    deliver(&*sink, vec![numbered(1, "k")]).await;
    let received = fixture.received().await;
    assert!(received.iter().all(|event| event.id == numbered(1, "k").id), "{received:?}");
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let bits =
        |chunk: &[u8]| chunk.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - chunk.len()));
    let bytes = |chunk: &[u8]| bits(chunk).to_be_bytes()[1..chunk.len()].to_vec();
    digits.chunks(4).flat_map(bytes).collect()
}
