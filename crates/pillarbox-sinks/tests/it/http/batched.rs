use super::*;
use pillarbox::sink::Fault;

fn batched(receiver: &HttpReceiver) -> HttpSink {
    sink(HttpConfig { mode: HttpMode::Batched, ..config(receiver) })
}

/// Refuses a request with this status if one of its events has one of these positions.
fn refuse(receiver: &HttpReceiver, status: u16, culprits: &'static [u64]) {
    receiver.answer(move |request| {
        let refused = positions(&read(request)).iter().any(|position| culprits.contains(position));
        HttpAnswer::status(if refused { status } else { 204 })
    });
}

fn kinds(outcomes: &[Outcome]) -> Vec<&'static str> {
    let kind = |outcome: &Outcome| match outcome {
        Outcome::Delivered => "delivered",
        Outcome::Failed(failure) => failure.kind,
        Outcome::NotTried => "not tried",
    };
    outcomes.iter().map(kind).collect()
}

#[tokio::test]
async fn a_batch_is_one_request() {
    let receiver = HttpReceiver::start().unwrap();
    let outcomes = deliver(&batched(&receiver), (1..=50).map(|position| event(position, "k"))).await;
    assert_eq!(outcomes, vec![Outcome::Delivered; 50]);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!(positions(&read(&requests[0])), (1..=50).collect::<Vec<_>>());
    let id = requests[0].header("webhook-id").unwrap();
    assert!(id.starts_with("batch_"), "{id}");
    deliver(&batched(&receiver), (1..=50).map(|position| event(position, "k"))).await;
    assert_eq!(receiver.requests()[1].header("webhook-id"), Some(id), "the same events have the same id");
}

#[tokio::test]
async fn a_body_has_a_limit() {
    let receiver = HttpReceiver::start().unwrap();
    let large = || Payload::Bytes(vec![1; 300 * 1024].into());
    let events = (1..=7).map(|position| sink_event(position, Some("k"), large()));
    assert_eq!(deliver(&batched(&receiver), events).await, vec![Outcome::Delivered; 7]);
    let requests = receiver.requests();
    assert!(requests.iter().all(|request| request.body.len() <= 1024 * 1024));
    assert_eq!(requests.len(), 4, "two of 400 KiB in base64 fit");
    assert_eq!(positions(&received(&requests)), (1..=7).collect::<Vec<_>>());
}

#[tokio::test]
async fn only_the_culprits_are_refused_and_order_is_kept() {
    for status in [400, 413, 415, 422] {
        let receiver = HttpReceiver::start().unwrap();
        refuse(&receiver, status, &[3, 7]);
        let keys = ["a", "b", "a", "b", "a", "b", "c", "c"];
        let events = keys.iter().zip(1..).map(|(key, position)| event(position, key));
        let outcomes = deliver(&batched(&receiver), events).await;
        let expected =
            ["delivered", "delivered", "refused", "delivered", "not tried", "delivered", "refused", "not tried"];
        assert_eq!(kinds(&outcomes), expected, "{status}");
        assert!(matches!(&outcomes[2], Outcome::Failed(failure) if failure.permanent), "{status}");
        assert_eq!(
            positions(&received(&receiver.accepted())),
            [1, 2, 4, 6],
            "{status}: nothing behind a culprit of its key"
        );
    }
}

#[tokio::test]
async fn a_receiver_that_is_down_is_asked_once() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::status(500));
    let keys = ["a", "b", "a"];
    let outcomes = deliver(&batched(&receiver), keys.iter().zip(1..).map(|(key, position)| event(position, key))).await;
    assert_eq!(kinds(&outcomes), ["server_error", "server_error", "not tried"]);
    assert_eq!(receiver.requests().len(), 1);
}

#[tokio::test]
async fn a_receiver_that_goes_down_while_a_culprit_is_looked_for_is_left_alone() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|request| {
        let first = read(request).len() == 4;
        HttpAnswer::status(if first { 422 } else { 503 })
    });
    let outcomes = deliver(&batched(&receiver), (1..=4).map(|position| event(position, &position.to_string()))).await;
    assert_eq!(kinds(&outcomes), ["overloaded", "overloaded", "not tried", "not tried"]);
    let sink_fault = |outcome: &Outcome| matches!(outcome, Outcome::Failed(failure) if failure.fault == Fault::Sink);
    assert!(outcomes[..2].iter().all(sink_fault));
    assert_eq!(receiver.requests().len(), 2);
}
