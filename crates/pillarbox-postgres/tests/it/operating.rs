use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::admin::{Change, Changed, ListQuery, Operator, Selection, State};
use pillarbox::store::DeliveryRow;
use pillarbox::{OnDead, Start, Subscription, Timestamp};
use pillarbox_postgres::PostgresStore;
use uuid::Uuid;

use crate::fixture::{Database, delivery, join, one_lane, settle, write};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

pub(crate) async fn change(store: &PostgresStore, change: Change) -> pillarbox::Result<Changed> {
    let dry = store.change(&change, true).await;
    let done = store.change(&change, false).await;
    match (&dry, &done) {
        (Ok(dry), Ok(done)) => {
            assert_eq!((dry.count, &dry.events), (done.count, &done.events), "a dry run says the same")
        }
        _ => assert_eq!(dry.is_err(), done.is_err()),
    }
    done
}

pub(crate) fn requeue(which: Selection, limit: usize) -> Change {
    Change::Requeue { subscription: "s".into(), which, limit }
}

pub(crate) fn rewind(to: Start, key: Option<&str>) -> Change {
    Change::Rewind { subscription: "s".into(), to, key: key.map(Into::into) }
}

pub(crate) async fn states(store: &PostgresStore) -> BTreeMap<i64, State> {
    let query = ListQuery { subscription: Some("s".into()), limit: 1000, ..ListQuery::default() };
    let rows = store.list(&query).await.unwrap();
    rows.into_iter().map(|row| (row.position, row.state.unwrap())).collect()
}

/// Keys a a b c a a: the first of a is dead, b retries, c is delayed, the last of a is in the log.
pub(crate) async fn mixed(database: &Database, on_dead: OnDead) -> (PostgresStore, Vec<Uuid>) {
    let ids = database.publish_keys(&["a", "a", "b", "c", "a", "a"]).await;
    let store = database.store().await;
    let joined = join(&store, [Subscription { on_dead, ..one_lane("s") }]).await;
    let lane = crate::fixture::lane(joined.subscriptions[0].id);
    let epoch = crate::fixture::take(&store, lane, pillarbox::store::TakeCause::Free).await.unwrap();
    let mut parked = write(lane, epoch, 5);
    parked.put = vec![
        delivery(1, "a", State::Dead),
        delivery(2, "a", State::Pending),
        DeliveryRow { due_at: Timestamp(7), ..delivery(3, "b", State::Retrying) },
        DeliveryRow { due_at: Timestamp::now().plus(HOUR), ..delivery(4, "c", State::Delayed) },
        delivery(5, "a", State::Pending),
    ];
    assert!(settle(&store, parked).await);
    (store, ids)
}

#[tokio::test]
async fn a_large_backlog_is_estimated_for_each_subscription_from_its_own_floor() {
    let database = Database::new().await;
    let events = 3 * pillarbox_postgres::PENDING_COUNT_MAX as i64;
    let insert = format!(
        "insert into pillarbox.event (topic, type, key)
         select case n % 4 when 0 then 'wanted' else 'other' end, 'y', 'k' || n % 1000 from generate_series(1, {events}) as n"
    );
    database.execute(&insert).await;
    let store = database.store().await;
    let all = join(&store, [one_lane("all"), one_lane("some").topics(["wanted"]), one_lane("near")]).await;
    database
        .execute(&format!(
            "update pillarbox.cursor set floor = {} where subscription = {}",
            events - 10,
            all.subscriptions[2].id.0
        ))
        .await;
    let status = store.status().await.unwrap();
    let pending = |name: &str| status.subscriptions.iter().find(|s| s.name == name).unwrap().pending as i64;
    assert!((pending("all") - events).abs() <= 1, "{}", pending("all"));
    assert!((pending("some") - events / 4).abs() <= 4, "{}", pending("some"));
    assert_eq!(pending("near"), 10);
    assert_eq!(status.log.events, events, "by positions");
}
