use std::fmt::{Debug, Write};
use std::sync::Mutex;

use super::*;
use pillarbox::sink::Fault;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event as LogEvent, Metadata, Subscriber};

#[tokio::test]
async fn a_name_with_a_private_address_is_not_connected_to() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(HttpConfig { block_private_addresses: true, ..config(&receiver) });
    let failure = fail(&sink).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "blocked_address"), "{failure:?}");
    assert!(failure.message.contains("block_private_addresses"), "{failure:?}");
    assert_eq!(sink.check().await.unwrap_err().kind, "blocked_address");
    assert_eq!(receiver.connections(), 0);
}

#[tokio::test]
async fn a_private_authority_is_trusted_when_its_file_is_given() {
    let receiver = HttpReceiver::start_tls().unwrap();
    let trusting = HttpConfig { ca_file: Some(receiver.authority().to_owned()), ..config(&receiver) };
    for mode in [HttpMode::Structured, HttpMode::Binary, HttpMode::Batched] {
        let sink = sink(HttpConfig { mode, ..trusting.clone() });
        assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered], "{mode:?}");
    }
    assert_eq!(receiver.accepted().len(), 3);
}

#[tokio::test]
async fn a_certificate_of_nobody_known_or_of_another_host_is_refused() {
    let receiver = HttpReceiver::start_tls().unwrap();
    let failure = fail(&sink(config(&receiver))).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
    assert!(failure.message.contains("certificate"), "{failure:?}");
    let other_name = format!("https://127.0.0.1:{}/", receiver.port()).parse().unwrap();
    let config = HttpConfig { ca_file: Some(receiver.authority().to_owned()), ..HttpConfig::new(other_name) };
    let failure = fail(&sink(config)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
    assert_eq!(receiver.requests(), []);
}

#[tokio::test]
async fn no_failure_shows_a_secret() {
    let receiver = HttpReceiver::start().unwrap();
    let url = receiver.url("/canary/{topic}?token=canary").parse().unwrap();
    let config = HttpConfig {
        secrets: vec!["whsec_Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5Y2FuYXJ5".into()],
        headers: vec![("Authorization".into(), "Bearer canary".into())],
        timeout: std::time::Duration::from_millis(300),
        ..HttpConfig::new(url)
    };
    let sink = sink(config);
    let payload = sink_event(1, Some("canary"), Payload::Json("\"canary\"".into()));
    let log = Log::default();
    // Of this thread, which is the one that the sink runs on.
    let logging = tracing::subscriber::set_default(log.clone());
    // Another test may have come by what these libraries log when nobody listened.
    tracing::callsite::rebuild_interest_cache();
    let mut shown = Vec::new();
    let answers = [301, 400, 401, 404, 409, 410, 429, 500].map(HttpAnswer::status);
    for answer in answers.into_iter().chain([HttpAnswer::Hang, HttpAnswer::Close]) {
        receiver.answer(move |_| answer.clone());
        shown.push(format!("{:?}", deliver(&sink, [payload.clone()]).await));
        shown.push(format!("{:?}", sink.check().await));
    }
    receiver.kill();
    shown.push(format!("{:?} {sink:?}", deliver(&sink, [payload]).await));
    drop(logging);
    shown.push(std::mem::take(&mut *log.0.lock().unwrap()));
    let shown = shown.join("\n");
    assert!(shown.contains("connecting to"), "the libraries below have been heard: {shown}");
    assert!(shown.contains("localhost"), "{shown}");
    assert!(!shown.contains("canary") && !shown.contains("Y2FuYXJ5"), "{shown}");
}

/// Everything that is logged, at any level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut self.clone());
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut self.clone());
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &LogEvent<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for Log {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        writeln!(self.0.lock().unwrap(), "{field}={value:?}").unwrap();
    }
}
