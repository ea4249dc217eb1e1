use pillarbox_example_pipeline::{PEOPLE, post_at_once};

use crate::place::{Place, listen};

/// Of each of six people; every transaction has two messages, and so four events of two topics.
const TRANSACTIONS: usize = 10;

async fn check(place: Place) {
    let mut clients = place.connect(&PEOPLE);
    let relay = place.pipeline().await;
    let mut tally = post_at_once(&place.database(), TRANSACTIONS).await.unwrap();
    assert_eq!(tally.expected(), PEOPLE.len() * TRANSACTIONS * 2 * 2);
    listen(&mut tally, &mut clients).await;
    assert_eq!(place.check_all_is_done_once(relay, &mut tally, &mut clients).await, 0, "told again without a crash");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_every_mention_is_told_once_and_in_order() {
    check(Place::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgresql_every_mention_is_told_once_and_in_order() {
    check(Place::postgres().await).await;
}
