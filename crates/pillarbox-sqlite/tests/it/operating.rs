use pillarbox::ErrorKind;
use pillarbox::admin::{Change, Changed, Operator, Selection, State};
use pillarbox_sqlite::SqliteStore;
use uuid::Uuid;

use crate::fixture::{Database, delivery, own, poll_tail, settle, write};

async fn change(store: &SqliteStore, change: Change) -> pillarbox::Result<Changed> {
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

fn requeue(which: Selection, limit: usize) -> Change {
    Change::Requeue { subscription: "s".into(), which, limit }
}

#[tokio::test]
async fn an_event_can_be_worked_with_whatever_its_id_looks_like() {
    let database = Database::new();
    let odd = ["0190A1B2-C3D4-7E5F-8A9B-000000000001", "0190a1B2-c3d4-7e5f-8a9b-000000000002", &"x".repeat(36)];
    for id in odd {
        database.execute(&format!("insert into pillarbox_event (id, topic, type) values ('{id}', 't', 'y')"));
    }
    let store = database.store();
    let (lane, epoch) = own(&store, "s").await;
    let events = poll_tail(&store, 0).await.events;
    let mut parked = write(lane, epoch, 3);
    parked.put = (1..=3).map(|position| delivery(position, "a", State::Dead)).collect();
    assert!(settle(&store, parked).await);
    for (event, position) in events.iter().zip(1..) {
        assert_eq!(store.show(event.id).await.unwrap().unwrap().event.position, position);
        assert_eq!(change(&store, requeue(Selection::Event(event.id), 10)).await.unwrap().count, 1);
        let skip = Change::Skip { subscription: "s".into(), event: event.id, reason: "odd".into() };
        assert_eq!(store.change(&skip, false).await.unwrap().count, 1);
    }
    assert!(store.show(Uuid::now_v7()).await.unwrap().is_none());
}

/// Ids are found as they are written in lower or in upper case; this one only by its version.
#[tokio::test]
async fn a_version_that_the_log_has_is_not_said_to_be_missing() {
    let database = Database::new();
    database.execute(
        "insert into pillarbox_event (id, topic, key, type, stream_version)
         values ('01890a5d-AC96-774b-bcce-b302099a8057', 'journal', 'stream', 'y', 1)",
    );
    let store = database.store();
    own(&store, "s").await;
    let of_version = |version| requeue(Selection::Version("stream".into(), version), usize::MAX);
    let error = change(&store, of_version(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("01890a5d-ac96-774b-bcce-b302099a8057 has no delivery of 's'"), "{error}");
    let error = change(&store, of_version(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}
