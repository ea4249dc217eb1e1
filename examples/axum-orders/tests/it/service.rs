use pillarbox_example_axum_orders::{Mailbox, Service};
use pillarbox_testkit::postgres::Server;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::program::order;

#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_booked_and_confirmed_and_the_service_stops_when_told() {
    let database = Server::shared().create_database().unwrap();
    let mailbox = Mailbox::default();
    let service = Service::start(database.url(), mailbox.clone()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(service.serve(listener, async move { drop(stopped.await) }));
    let client = reqwest::Client::new();
    for customer in ["ada", "grace"] {
        assert_eq!(order(&client, address, customer).await.unwrap(), 201);
    }
    while mailbox.sent().len() < 2 {
        tokio::task::yield_now().await;
    }
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();
    let mut sent = mailbox.sent();
    sent.sort();
    assert!(sent[0].starts_with("to ada: invoice ") && sent[1].starts_with("to grace: invoice "), "{sent:?}");
    assert!(order(&client, address, "late").await.is_err(), "nothing listens any more");
}
