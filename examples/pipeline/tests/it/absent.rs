use pillarbox_example_pipeline::{PEOPLE, post_at_once};

use crate::place::{Place, listen, patient};

const TRANSACTIONS: usize = 5;

/// The first of them is not there, so that their news fail again and again; until they come everybody else's are done.
async fn check(place: Place) {
    let [absent, present @ ..] = PEOPLE;
    let mut clients = place.connect(&present);
    let relay = place.pipeline().await;
    let mut tally = post_at_once(&place.database(), 1).await.unwrap();
    patient("it has failed", place.sockets.wait_for(|figures| figures.refused > 0)).await;

    let owed = tally.owed(absent);
    assert!(owed > 0, "there was something to tell");
    tally.expect_all_of(post_at_once(&place.database(), TRANSACTIONS).await.unwrap());
    listen(&mut tally, &mut clients).await;
    let refused = place.sockets.wait_for(|_| true).await.refused;
    patient("it still fails", place.sockets.wait_for(|figures| figures.refused > refused)).await;
    let told = format!("select count(*) from activity where person = '{absent}' and broadcasts > 0");
    assert_eq!(place.number(&told), 0);
    assert!(tally.owed(absent) > owed, "more is waiting behind it");

    clients.push(place.sockets.connect(absent));
    listen(&mut tally, &mut clients).await;
    assert_eq!(place.check_all_is_done_once(relay, &mut tally, &mut clients).await, 0, "told again without a crash");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_somebody_who_is_absent_delays_nobody_else() {
    check(Place::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgresql_somebody_who_is_absent_delays_nobody_else() {
    check(Place::postgres().await).await;
}
