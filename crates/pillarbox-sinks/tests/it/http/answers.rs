use std::time::{Duration, SystemTime};

use super::*;
use pillarbox::sink::Fault;

/// What a status means, and whether the rest of the batch was sent.
async fn check(status: u16, fault: Fault, permanent: bool, kind: &str) {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(move |_| HttpAnswer::status(status));
    let sink = sink(HttpConfig { concurrency: 1, ..config(&receiver) });
    let outcomes = deliver(&sink, [event(1, "a"), event(2, "a"), event(3, "b")]).await;
    let Outcome::Failed(failure) = &outcomes[0] else { panic!("{status}: {outcomes:?}") };
    assert_eq!((failure.fault, failure.permanent, failure.kind), (fault, permanent, kind), "{status}");
    assert_eq!(outcomes[1], Outcome::NotTried, "{status}: the key stops");
    let went_on = matches!(outcomes[2], Outcome::Failed(_));
    assert_eq!(went_on, fault == Fault::Event, "{status}: a receiver that is unwell is left alone");
    assert_eq!(receiver.requests().len(), if went_on { 2 } else { 1 }, "{status}");
}

#[tokio::test]
async fn a_refused_event_is_dead_and_others_go_on() {
    for status in [400, 413, 415, 422] {
        check(status, Fault::Event, true, "refused").await;
    }
}

#[tokio::test]
async fn an_endpoint_that_is_unwell_burns_no_attempt() {
    for status in [401, 403] {
        check(status, Fault::Sink, false, "unauthorized").await;
    }
    for status in [404, 405] {
        check(status, Fault::Sink, false, "not_found").await;
    }
    for status in [500, 502, 504, 599] {
        check(status, Fault::Sink, false, "server_error").await;
    }
    for status in [408, 425, 429, 503] {
        check(status, Fault::Sink, false, "overloaded").await;
    }
}

#[tokio::test]
async fn other_refusals_are_tried_again() {
    for status in [402, 409, 418, 451] {
        check(status, Fault::Event, false, "http_status").await;
    }
}

#[tokio::test]
async fn every_success_is_one() {
    for status in [200, 201, 202, 204, 299] {
        let receiver = HttpReceiver::start().unwrap();
        receiver.answer(move |_| HttpAnswer::status(status));
        assert_eq!(deliver(&sink(config(&receiver)), [event(1, "k")]).await, [Outcome::Delivered], "{status}");
    }
}

#[tokio::test]
async fn gone_pauses() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::status(410));
    let failure = fail(&sink(config(&receiver))).await;
    assert!(failure.pause && failure.fault == Fault::Sink && failure.kind == "gone", "{failure:?}");
    let anywhere = sink(HttpConfig::new(receiver.url("/{key}").parse().unwrap()));
    let failure = fail(&anywhere).await;
    assert!(!failure.pause && failure.permanent && failure.kind == "gone", "one path of several: {failure:?}");
    receiver.answer(|_| HttpAnswer::status(404));
    let failure = fail(&anywhere).await;
    assert!(failure.fault == Fault::Event && !failure.permanent, "one path of several: {failure:?}");
}

#[tokio::test]
async fn retry_after_is_heard_as_seconds_and_as_a_date() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(config(&receiver));
    receiver.answer(|_| HttpAnswer::with_header(429, "retry-after", "17"));
    assert_eq!(fail(&sink).await.retry_after, Some(Duration::from_secs(17)));
    let at = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(100));
    receiver.answer(move |_| HttpAnswer::with_header(503, "retry-after", at.clone()));
    let wait = fail(&sink).await.retry_after.unwrap();
    assert!((Duration::from_secs(60)..=Duration::from_secs(100)).contains(&wait), "{wait:?}");
    receiver.answer(|_| HttpAnswer::status(503));
    assert_eq!(fail(&sink).await.retry_after, None);
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let (receiver, other) = (HttpReceiver::start().unwrap(), HttpReceiver::start().unwrap());
    let to = other.url("/secret-path");
    for status in [301, 302, 303, 307, 308] {
        let to = to.clone();
        receiver.answer(move |_| HttpAnswer::with_header(status, "location", to.clone()));
        let failure = fail(&sink(config(&receiver))).await;
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "redirect"));
        assert!(failure.message.contains(&format!("localhost:{}", other.port())), "{failure:?}");
        assert!(!failure.message.contains("secret-path"), "{failure:?}");
    }
    assert_eq!(other.connections(), 0);
}

#[tokio::test]
async fn what_the_receiver_writes_is_not_repeated() {
    let receiver = HttpReceiver::start().unwrap();
    for status in [400, 401, 418, 429, 500] {
        let headers = vec![("x-echo", "canary".to_owned()), ("retry-after", "canary".to_owned())];
        receiver.answer(move |_| HttpAnswer::Answer { status, headers: headers.clone(), body: b"canary".to_vec() });
        let failure = fail(&sink(config(&receiver))).await;
        assert!(!format!("{failure:?}").contains("canary"), "{failure:?}");
    }
}
