use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::Outcome;
use pillarbox::testing::{Capture, run_handler, run_until_idle};
use pillarbox::{Event, Failure, Relay, Subscription};
use pillarbox_example_orders::{
    Mailbox, NewOrder, OrderPlaced, PLACED, Revenue, TOPIC, confirmations, connect, place_order, prepare, relay,
    revenue,
};
use pillarbox_sqlite::SqliteStore;
use pillarbox_sqlite::testing::published;
use rusqlite::TransactionBehavior::Immediate;
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(10);

/// A shop in a folder of its own.
struct Shop {
    _folder: TempDir,
    path: PathBuf,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.db");
        prepare(&path).unwrap();
        Shop { _folder: folder, path }
    }

    /// Places orders of one transaction, looks at what it has published, and commits it or not.
    fn order(&self, orders: &[(&str, i64)], commit: bool) -> Vec<Event> {
        let mut connection = connect(&self.path).unwrap();
        let transaction = connection.transaction_with_behavior(Immediate).unwrap();
        for (customer, cents) in orders {
            place_order(&transaction, &NewOrder { customer: (*customer).into(), cents: *cents }).unwrap();
        }
        let events = published(&transaction).unwrap();
        if commit { transaction.commit() } else { transaction.rollback() }.unwrap();
        events
    }

    async fn delivered(&self) -> Vec<Arc<Event>> {
        let capture = Capture::new();
        let store = SqliteStore::open(&self.path).unwrap();
        let relay = Relay::builder(store).subscribe(Subscription::new("test"), Arc::new(capture.clone()));
        run_until_idle(relay).await.unwrap();
        capture.events()
    }
}

#[tokio::test]
async fn an_open_transaction_shows_what_it_has_published() {
    let shop = Shop::new();
    shop.order(&[("grace@example.org", 1)], true);
    let events = shop.order(&[("ada@example.org", 4200)], true);
    assert_eq!(events.len(), 1, "only those of this transaction");
    assert_eq!((&*events[0].topic, &*events[0].r#type), (TOPIC, PLACED));
    assert_eq!(events[0].key.as_deref(), Some("ada@example.org"));
    let placed: OrderPlaced = events[0].payload.json().unwrap();
    assert_eq!(placed, OrderPlaced { order: 2, customer: "ada@example.org".into(), cents: 4200 });
    assert_eq!(shop.delivered().await.len(), 2);
}

#[tokio::test]
async fn a_rollback_leaves_nothing() {
    let shop = Shop::new();
    assert_eq!(shop.order(&[("ada@example.org", 1)], false).len(), 1);
    assert!(shop.order(&[], true).is_empty());
    assert!(shop.delivered().await.is_empty());
}

#[tokio::test]
async fn both_handlers_get_every_order() {
    let shop = Shop::new();
    shop.order(&[("ada@example.org", 4200), ("grace@example.org", 1999)], true);
    shop.order(&[("ada@example.org", 350)], true);
    let mailbox = Mailbox::default();
    run_until_idle(relay(&shop.path, &mailbox).unwrap()).await.unwrap();
    let to_ada: Vec<String> = mailbox.sent().into_iter().filter(|text| text.contains("ada@")).collect();
    assert_eq!(
        to_ada,
        ["to ada@example.org: thank you for order 1", "to ada@example.org: thank you for order 3"],
        "in order for each customer"
    );
    assert_eq!(mailbox.sent().len(), 3);
    assert_eq!(Revenue::new(&shop.path).cents().unwrap(), 4200 + 1999 + 350);
}

#[tokio::test]
async fn a_customer_without_an_address_is_a_permanent_failure() {
    let event = Shop::new().order(&[("nobody", 1)], false).remove(0);
    let mailbox = Mailbox::default();
    let outcome = run_handler(&confirmations(mailbox.clone()), event, TIMEOUT).await;
    let Outcome::Failed(Failure { permanent: true, message, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(message, "the customer has no mail address");
    assert!(mailbox.sent().is_empty());
}

#[tokio::test]
async fn an_order_that_comes_again_is_counted_once() {
    let shop = Shop::new();
    let event = shop.order(&[("ada@example.org", 4200)], true).remove(0);
    let handler = revenue(Revenue::new(&shop.path));
    for _ in 0..2 {
        assert_eq!(run_handler(&handler, event.clone(), TIMEOUT).await, Outcome::Delivered);
    }
    assert_eq!(Revenue::new(&shop.path).cents().unwrap(), 4200);
}
