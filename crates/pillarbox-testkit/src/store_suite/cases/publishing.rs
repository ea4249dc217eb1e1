use std::time::Duration;

use pillarbox::NewEvent;
use pillarbox::store::Store;

use super::{TRANSACTIONS, clock, join};
use crate::store_suite::{Case, Fixture, Outcome};

cases! {
    TRANSACTIONS:
        an_event_is_there_if_and_only_if_the_transaction_commits;
}

async fn an_event_is_there_if_and_only_if_the_transaction_commits<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let gone = fixture.begin().await;
    fixture.insert(gone, NewEvent::new("t", "gone")).await;
    fixture.abort(gone).await;
    let stays = fixture.begin().await;
    let at = fixture.insert(stays, NewEvent::new("t", "stays").key("k").header("a", "b")).await;
    ensure!(member.poll_from(0).await?.1.events.is_empty(), "not committed yet");
    fixture.commit(stays).await;

    let events = member.poll_from(0).await?.1.events;
    ensure_eq!((events.len(), events[0].position, &*events[0].r#type), (1, at, "stays"));
    ensure_eq!(events[0].headers.get("a").as_deref(), Some("b"));
    ensure_eq!(member.store.fetch(&[at]).await?[0].id, events[0].id);
    let age = clock(fixture).await?.since(events[0].created_at);
    ensure!(age < Duration::from_secs(60), "it was created {age:?} ago");
    Ok(())
}
