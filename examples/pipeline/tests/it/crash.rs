use std::collections::VecDeque;
use std::time::Duration;

use pillarbox::RelayConfig;
use pillarbox_example_pipeline::{PEOPLE, post_at_once};

use crate::place::{Place, listen, patient};

const TRANSACTIONS: usize = 10;

/// How often a process that runs the pipeline crashes.
const CRASHES: usize = 4;

/// On PostgreSQL a relay that nobody has seen alive is replaced after this time.
const LEASE: Duration = Duration::from_secs(1);

/// So many relays run the pipeline. One is dropped, which ends it as a crash does, wherever each stage is: nothing is finished,
/// nothing is given back. Another takes its place. The first person comes after the last crash, so that there is something to do
/// until then.
async fn check(place: Place, relays: usize) {
    let [late, present @ ..] = PEOPLE;
    let mut config = RelayConfig::default();
    config.engine.lease_ttl = LEASE;
    let mut clients = place.connect(&present);
    let mut running = VecDeque::new();
    for _ in 0..relays {
        running.push_back(place.pipeline_with(config.clone()).await);
    }
    let database = place.database();
    let posting = tokio::spawn(async move { post_at_once(&database, TRANSACTIONS).await });
    let messages = PEOPLE.len() * TRANSACTIONS * 2;
    for crash in 1..=CRASHES {
        let sent = messages * crash / CRASHES;
        patient("more are told", place.sockets.wait_for(|figures| figures.sent >= sent)).await;
        drop(running.pop_front());
        running.push_back(place.pipeline_with(config.clone()).await);
    }
    let mut tally = patient("all is posted", posting).await.unwrap().unwrap();
    assert!(tally.expected() - tally.owed(late) >= messages, "there were as many to tell");
    clients.push(place.sockets.connect(late));
    listen(&mut tally, &mut clients).await;
    for beside in running.drain(1..) {
        patient("the others have ended", beside.drain()).await.unwrap();
    }
    let relay = running.pop_front().unwrap();
    place.check_all_is_done_once(relay, &mut tally, &mut clients).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_a_crash_of_the_only_process_repeats_no_effect() {
    check(Place::sqlite().await, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_a_crash_of_one_of_two_repeats_no_effect() {
    check(Place::sqlite().await, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgresql_a_crash_of_the_only_process_repeats_no_effect() {
    check(Place::postgres().await, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgresql_a_crash_of_one_of_two_repeats_no_effect() {
    check(Place::postgres().await, 2).await;
}
