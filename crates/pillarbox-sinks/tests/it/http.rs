mod answers;
mod batched;
mod faults;
mod python;
mod security;
mod signed;

use std::collections::BTreeMap;
use std::sync::Arc;

use pillarbox::sink::{BoxFuture, Outcome, Sink};
use pillarbox::{Event, Failure, Headers, Payload};
use pillarbox_sinks::{HttpConfig, HttpMode, HttpSink};
use pillarbox_testkit::sink_suite::{
    Received, ReceiverFeatures, ServerControl, SinkFixture, batch_of, check_sink, sink_event,
};
use pillarbox_testkit::{HttpAnswer, HttpReceiver, HttpRequest};
use serde_json::value::RawValue;

const SOURCE: &str = "urn:pillarbox:test";

fn config(receiver: &HttpReceiver) -> HttpConfig {
    HttpConfig::new(receiver.url("/events").parse().unwrap())
}

fn sink(config: HttpConfig) -> HttpSink {
    HttpSink::new(config, SOURCE).unwrap()
}

fn event(position: i64, key: &str) -> Event {
    sink_event(position, Some(key), Payload::Json(format!("{{\"n\":{position}}}").into()))
}

fn with_headers(event: Event, headers: &[(&str, &str)]) -> Event {
    let headers: BTreeMap<String, String> =
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Event { headers: Headers::from_map(&headers), ..event }
}

async fn deliver(sink: &HttpSink, events: impl IntoIterator<Item = Event>) -> Vec<Outcome> {
    sink.deliver(batch_of(events)).await
}

/// Delivers one event, which fails.
async fn fail(sink: &HttpSink) -> Failure {
    match deliver(sink, [event(1, "k")]).await.pop() {
        Some(Outcome::Failed(failure)) => failure,
        other => panic!("it should fail: {other:?}"),
    }
}

/// The positions of events of these ids.
fn positions(received: &[Received]) -> Vec<u64> {
    received.iter().map(|received| received.id.as_u64_pair().1).collect()
}

fn received(requests: &[HttpRequest]) -> Vec<Received> {
    requests.iter().flat_map(read).collect()
}

/// The events of a request, of whatever mode it is.
fn read(request: &HttpRequest) -> Vec<Received> {
    match request.header("content-type") {
        Some("application/cloudevents+json; charset=utf-8") => {
            vec![Received::from_cloud_event(request.text()).unwrap()]
        }
        Some("application/cloudevents-batch+json; charset=utf-8") => {
            let events: Vec<Box<RawValue>> = serde_json::from_slice(&request.body).unwrap();
            events.iter().map(|event| Received::from_cloud_event(event.get()).unwrap()).collect()
        }
        _ => vec![read_binary(request)],
    }
}

fn read_binary(request: &HttpRequest) -> Received {
    let text = |value: &[u8]| String::from_utf8(value.to_vec()).unwrap();
    let attribute = |(name, value): &(String, Vec<u8>)| {
        let name = if name == "content-type" { "datacontenttype" } else { name.strip_prefix("ce-")? };
        Some((name.to_owned(), unescape(&text(value))))
    };
    let attributes: BTreeMap<String, String> = request.headers.iter().filter_map(attribute).collect();
    let others = attributes.get("headers").map(|others| others.to_ascii_lowercase()).unwrap_or_default();
    // HTTP knows no upper case: a name that had some is among the others, as it was.
    let plain = |name: &str| name.starts_with("x-") && !others.contains(&format!("\"{name}\":"));
    let plain = request.headers.iter().filter(|(name, _)| plain(name)).map(|(name, value)| (name.clone(), text(value)));
    Received::from_binary(attributes, plain.collect::<Vec<_>>(), Some(request.body.clone())).unwrap()
}

fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            plain.push(u8::from_str_radix(&text[at + 1..at + 3], 16).unwrap());
            at += 3;
        } else {
            plain.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(plain).unwrap()
}

pub(crate) struct Fixture {
    receiver: HttpReceiver,
    mode: HttpMode,
}

impl Fixture {
    pub(crate) fn new(mode: HttpMode) -> Self {
        Fixture { receiver: HttpReceiver::start().unwrap(), mode }
    }
}

impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(sink(HttpConfig { mode: self.mode, ..config(&self.receiver) }))
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        Box::pin(async {
            let mut requests = self.receiver.accepted();
            requests.retain(|request| request.method == "POST");
            received(&requests)
        })
    }

    fn features(&self) -> ReceiverFeatures {
        ReceiverFeatures { source: Some(SOURCE), ..ReceiverFeatures::default() }
    }

    fn server(&self) -> Option<&dyn ServerControl> {
        Some(&self.receiver)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn structured_mode_conforms() {
    check_sink(|| Fixture::new(HttpMode::Structured)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn binary_mode_conforms() {
    check_sink(|| Fixture::new(HttpMode::Binary)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_mode_conforms() {
    check_sink(|| Fixture::new(HttpMode::Batched)).await;
}

#[tokio::test]
async fn a_structured_request_says_what_it_is() {
    let receiver = HttpReceiver::start().unwrap();
    let traced = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("tracestate", "a=1")];
    let sent =
        with_headers(event(7, "k"), &[&traced[..], &[("X-Tenant", "acme"), ("Authorization", "stolen")]].concat());
    let mut batch = batch_of([sent.clone()]);
    batch.events[0].number = 3;
    let config = HttpConfig { headers: vec![("Authorization".into(), "Bearer t".into())], ..config(&receiver) };
    assert_eq!(sink(config).deliver(batch).await, [Outcome::Delivered]);
    let request = &receiver.requests()[0];
    assert_eq!((request.method.as_str(), request.target.as_str()), ("POST", "/events"));
    let id = sent.id.to_string();
    for (name, value) in [
        ("content-type", "application/cloudevents+json; charset=utf-8"),
        ("webhook-id", &*id),
        ("pillarbox-subscription", "suite"),
        ("pillarbox-attempt", "3"),
        ("traceparent", traced[0].1),
        ("tracestate", "a=1"),
        ("x-tenant", "acme"),
        ("authorization", "Bearer t"),
        ("user-agent", concat!("pillarbox/", env!("CARGO_PKG_VERSION"))),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
        assert_eq!(request.headers.iter().filter(|(there, _)| there == name).count(), 1, "{name}");
    }
    assert!(request.header("webhook-timestamp").is_some());
    assert_eq!(request.header("webhook-signature"), None, "there is no secret");
    let headers = &read(request)[0].headers;
    assert_eq!(headers["X-Tenant"], "acme", "it is in the body too, where a signature covers it");
    assert_eq!(headers["Authorization"], "stolen", "nothing is dropped");
}

#[tokio::test]
async fn a_binary_request_has_attributes_and_plain_headers() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(HttpConfig { mode: HttpMode::Binary, ..config(&receiver) });
    let headers = [("x-tenant", "acme"), ("X-Upper", "u"), ("tenant", "é \"%"), ("traceparent", "00-1-2-01")];
    let bytes = Event { content_type: Some("image/png".into()), ..event(1, "k 🦀") };
    let sent = with_headers(Event { payload: Payload::Bytes(vec![0, 255, 10].into()), ..bytes }, &headers);
    assert_eq!(deliver(&sink, [sent.clone()]).await, [Outcome::Delivered]);
    let request = &receiver.requests()[0];
    for (name, value) in [
        ("content-type", "image/png"),
        ("ce-specversion", "1.0"),
        ("ce-type", "order.placed"),
        ("ce-subject", "k%20%F0%9F%A6%80"),
        ("ce-tenant", "%C3%A9%20%22%25"),
        ("ce-traceparent", "00-1-2-01"),
        ("traceparent", "00-1-2-01"),
        ("x-tenant", "acme"),
        ("x-upper", "u"),
        // Upper case would be lost otherwise.
        ("ce-headers", "{%22X-Upper%22:%22u%22}"),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    assert_eq!(request.body, [0, 255, 10]);
    assert_eq!(read(request)[0].headers, sent.headers.to_map());
}

#[tokio::test]
async fn the_url_says_where_each_event_goes() {
    let receiver = HttpReceiver::start().unwrap();
    let url = receiver.url("/{topic}/{key}?t={type}").parse().unwrap();
    let sink = sink(HttpConfig { concurrency: 1, ..HttpConfig::new(url) });
    let outcomes = deliver(&sink, [event(1, "a/b"), event(2, ".."), event(3, "c")]).await;
    assert!(matches!(&outcomes[1], Outcome::Failed(failure) if failure.permanent), "{outcomes:?}");
    let targets: Vec<String> = receiver.requests().into_iter().map(|request| request.target).collect();
    assert_eq!(targets, ["/orders/a%2Fb?t=order.placed", "/orders/c?t=order.placed"]);
}

#[tokio::test]
async fn a_connection_is_used_again_whatever_the_answer_says() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(HttpConfig { concurrency: 1, response_bytes_max: 100, ..config(&receiver) });
    let answer = |status, bytes| HttpAnswer::Answer { status, headers: Vec::new(), body: vec![b'x'; bytes] };
    receiver.answer(move |_| answer(200, 100));
    deliver(&sink, (1..=3).map(|position| event(position, "k"))).await;
    receiver.answer(move |_| answer(422, 100));
    deliver(&sink, [event(4, "k")]).await;
    assert_eq!(receiver.connections(), 1);
    receiver.answer(move |_| answer(200, 8 * 1024 * 1024));
    assert_eq!(deliver(&sink, [event(5, "k"), event(6, "k")]).await, [Outcome::Delivered, Outcome::Delivered]);
    assert_eq!(receiver.connections(), 2, "a longer answer than response_bytes_max is not read");
}

#[tokio::test]
async fn the_check_delivers_nothing() {
    let receiver = HttpReceiver::start().unwrap();
    let checked = sink(config(&receiver));
    for (status, fine) in [
        (204, true),
        (405, true),
        (501, true),
        (302, false),
        (407, false),
        (401, false),
        (403, false),
        (404, false),
        (410, false),
        (500, false),
    ] {
        receiver.answer(move |_| HttpAnswer::status(status));
        assert_eq!(checked.check().await.is_ok(), fine, "{status}");
    }
    assert!(receiver.requests().iter().all(|request| request.method == "OPTIONS"));
    let anywhere = sink(HttpConfig::new(receiver.url("/{key}").parse().unwrap()));
    receiver.answer(|_| HttpAnswer::status(404));
    assert_eq!(anywhere.check().await, Ok(()));
    let url = receiver.url("/x");
    drop(receiver);
    let failure = sink(HttpConfig::new(url.parse().unwrap())).check().await.unwrap_err();
    assert_eq!(failure.kind, "connect");
}
