use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;
use pillarbox::sink::Fault;

const SHORT: Duration = Duration::from_millis(300);
const MODES: [HttpMode; 3] = [HttpMode::Structured, HttpMode::Binary, HttpMode::Batched];

#[tokio::test]
async fn nobody_listens_is_the_sinks_fault() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.kill();
    for mode in MODES {
        let failure = fail(&sink(HttpConfig { mode, ..config(&receiver) })).await;
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"), "{mode:?}");
        assert!(failure.message.contains(&format!("localhost:{}", receiver.port())), "{failure:?}");
    }
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_the_sinks_fault() {
    let failure = fail(&sink(HttpConfig::new("http://does-not-exist.invalid/canary".parse().unwrap()))).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
    assert!(!failure.message.contains("canary"), "{failure:?}");
}

#[tokio::test]
async fn a_receiver_that_hangs_is_unclear_after_the_timeout() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::Hang);
    for mode in MODES {
        let began = Instant::now();
        let failure = fail(&sink(HttpConfig { mode, timeout: SHORT, ..config(&receiver) })).await;
        assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "timeout"), "{mode:?}");
        assert!((SHORT..SHORT * 20).contains(&began.elapsed()), "{mode:?}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn one_event_that_makes_it_hang_does_not_hold_up_others() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|request| {
        let poison = positions(&read(request)).contains(&1);
        if poison { HttpAnswer::Hang } else { HttpAnswer::status(204) }
    });
    let sink = sink(HttpConfig { timeout: SHORT, concurrency: 1, ..config(&receiver) });
    let outcomes = deliver(&sink, [event(1, "a"), event(2, "a"), event(3, "b")]).await;
    assert!(matches!(&outcomes[0], Outcome::Failed(failure) if failure.kind == "timeout"), "{outcomes:?}");
    assert_eq!(outcomes[1..], [Outcome::NotTried, Outcome::Delivered]);
}

#[tokio::test]
async fn a_receiver_that_hangs_for_all_is_left_alone() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::Hang);
    let sink = sink(HttpConfig { timeout: SHORT, concurrency: 1, ..config(&receiver) });
    let outcomes = deliver(&sink, (1..=10).map(|position| event(position, &position.to_string()))).await;
    let unclear = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_))).count();
    assert_eq!((unclear, receiver.requests().len()), (3, 3), "{outcomes:?}");
}

#[tokio::test]
async fn an_answer_that_is_lost_makes_a_duplicate_with_the_same_id() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(config(&receiver));
    receiver.answer(|_| HttpAnswer::Close);
    let failure = fail(&sink).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "connection_lost"));
    assert_eq!(receiver.requests().len(), 1, "the sink itself does not send it again");
    receiver.answer(|_| HttpAnswer::status(204));
    assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered]);
    let requests = receiver.requests();
    assert_eq!(requests[0].header("webhook-id"), requests[1].header("webhook-id"));
}

#[tokio::test]
async fn a_connection_that_is_closed_unread_is_no_answer() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.close_unread(1);
    let sink = sink(config(&receiver));
    let failure = fail(&sink).await;
    assert_ne!(failure.fault, Fault::Event, "{failure:?}");
    assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered]);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let receiver = HttpReceiver::start().unwrap();
    receiver.answer(|_| HttpAnswer::Stall { status: 200 });
    let began = Instant::now();
    assert_eq!(deliver(&sink(config(&receiver)), [event(1, "k")]).await, [Outcome::Delivered]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_receiver_that_comes_back_is_found_again() {
    let receiver = HttpReceiver::start().unwrap();
    let sink = sink(config(&receiver));
    for round in 0..3 {
        assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered], "round {round}");
        receiver.kill();
        let failure = fail(&sink).await;
        assert_ne!(failure.fault, Fault::Event, "{failure:?}");
        receiver.restart().unwrap();
    }
    assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered]);
}

#[tokio::test]
async fn a_receiver_that_dies_in_a_batch_gets_no_more_of_it() {
    let receiver = HttpReceiver::start().unwrap();
    receiver
        .answer(|request| if positions(&read(request)) < vec![4] { HttpAnswer::status(204) } else { HttpAnswer::Hang });
    let sink = sink(HttpConfig { concurrency: 1, ..config(&receiver) });
    let task =
        tokio::spawn(
            async move { deliver(&sink, (1..=9).map(|position| event(position, &position.to_string()))).await },
        );
    receiver.until_requests(4).await;
    receiver.kill();
    let outcomes = task.await.unwrap();
    assert_eq!(outcomes[..3], [const { Outcome::Delivered }; 3]);
    let failure = |outcome: &Outcome| match outcome {
        Outcome::Failed(failure) => Some((failure.fault, failure.kind)),
        _ => None,
    };
    assert_eq!(failure(&outcomes[3]), Some((Fault::Unclear, "connection_lost")));
    assert_eq!(failure(&outcomes[4]), Some((Fault::Sink, "connect")));
    assert_eq!(outcomes[5..], [const { Outcome::NotTried }; 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_go_at_once_up_to_the_limit_and_each_in_order() {
    static UNDER_WAY_MAX: AtomicUsize = AtomicUsize::new(0);
    let receiver = HttpReceiver::start().unwrap();
    // Nothing is answered: all that are under way at once have arrived.
    receiver.answer(|_| HttpAnswer::Hang);
    let sink = Arc::new(sink(HttpConfig { concurrency: 4, timeout: Duration::from_secs(60), ..config(&receiver) }));
    let events: Vec<Event> = (0..40).map(|position| event(position, &(position % 10).to_string())).collect();
    let task = tokio::spawn({
        let (sink, events) = (sink.clone(), events.clone());
        async move { deliver(&sink, events).await }
    });
    receiver.until_requests(4).await;
    UNDER_WAY_MAX.store(receiver.requests().len(), Ordering::SeqCst);
    // Dropped at an await, as the engine does on a time-out.
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(UNDER_WAY_MAX.load(Ordering::SeqCst), 4);
    receiver.answer(|_| HttpAnswer::status(204));
    assert_eq!(deliver(&sink, events).await, vec![Outcome::Delivered; 40]);
    for key in 0..10 {
        let all = received(&receiver.accepted());
        let of_key: Vec<u64> = positions(&all).into_iter().filter(|position| position % 10 == key).collect();
        assert_eq!(of_key, [key, key + 10, key + 20, key + 30]);
    }
}
