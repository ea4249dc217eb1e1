use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pillarbox::sink::{Attempt, Batch, CloudEvents, Outcome, Sink};
use pillarbox::{Event, Headers, Payload, Relay, Subscription, Timestamp};
use pillarbox_sqlite::SqliteStore;
use pillarbox_testkit::sink_suite::ORIGIN;
use uuid::Uuid;

use crate::Result;
use crate::database::{event, fill};
use crate::process::Figures;

/// The CloudEvents source on both sides.
pub(crate) const SOURCE: &str = "urn:pillarbox:bench";

/// As a subscription has them by default: batches under way, and events in each.
pub(crate) const WORKERS: usize = 4;
pub(crate) const BATCH: usize = 100;

const LANES: u32 = 8;

/// From the start of a relay until all events of a log are delivered by the sink and settled.
pub(crate) async fn relay(sink: Arc<dyn Sink>, count: usize) -> Result<Figures> {
    let folder = folder()?;
    let path = folder.path().join("log.db");
    fill(&path, count)?;
    let subscription = Subscription { lanes: LANES, workers: WORKERS, batch_size: BATCH, ..Subscription::new("bench") };
    let started = Instant::now();
    let relay = Relay::builder(SqliteStore::open(&path)?).subscribe(subscription, sink).start().await?;
    relay.until_idle().await?;
    let elapsed = started.elapsed();
    let delivered = relay.report().subscriptions.values().map(|report| report.delivered).sum::<u64>();
    relay.drain().await?;
    if delivered != count as u64 {
        return Err(format!("{delivered} events were delivered instead of {count}").into());
    }
    Ok(Figures::default().with("rate", count as f64 / elapsed.as_secs_f64()))
}

/// The sink alone: it is handed batches as a relay would, with as many under way.
pub(crate) async fn sink(sink: Arc<dyn Sink>, count: usize) -> Result<Figures> {
    let attempt =
        |event: &Arc<Event>| Attempt { event: event.clone(), number: 1, lane: Some(0), epoch: 1, claim: None };
    let subscription: Arc<str> = "bench".into();
    // Kept, as the engine keeps what is under way: it is not the sink that ends them.
    let events: Vec<Arc<Event>> = events(count).map(Arc::new).collect();
    let figures = pipelined(events.iter().map(attempt).collect(), move |events| {
        let (sink, count) = (sink.clone(), events.len());
        let batch = Batch { subscription: subscription.clone(), origin: ORIGIN, events };
        async move {
            let outcomes = sink.deliver(batch).await;
            let delivered = outcomes.iter().filter(|outcome| **outcome == Outcome::Delivered).count();
            if delivered == count { Ok(()) } else { Err(format!("not delivered: {outcomes:?}").into()) }
        }
    });
    figures.await
}

/// Sends prepared messages, a batch at a time, with [`WORKERS`] batches under way.
pub(crate) async fn pipelined<M, F>(
    messages: Vec<M>,
    send: impl Fn(Vec<M>) -> F + Clone + Send + 'static,
) -> Result<Figures>
where
    M: Send + 'static,
    F: Future<Output = Result<()>> + Send,
{
    let count = messages.len();
    let mut batches = Vec::new();
    let mut messages = messages.into_iter().peekable();
    while messages.peek().is_some() {
        batches.push(std::sync::Mutex::new(messages.by_ref().take(BATCH).collect::<Vec<M>>()));
    }
    let (batches, next) = (Arc::new(batches), Arc::new(AtomicUsize::new(0)));
    let started = Instant::now();
    let worker = |_| {
        let (batches, next, send) = (batches.clone(), next.clone(), send.clone());
        tokio::spawn(async move {
            while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                let batch = std::mem::take(&mut *batch.lock().expect("nobody panics with it"));
                send(batch).await?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })
    };
    for worker in (0..WORKERS).map(worker).collect::<Vec<_>>() {
        worker.await??;
    }
    Ok(Figures::default().with("rate", count as f64 / started.elapsed().as_secs_f64()))
}

/// The events of the log, as a relay would read them.
pub(crate) fn events(count: usize) -> impl Iterator<Item = Event> {
    (0..count).map(|number| {
        let new = event(number);
        Event {
            position: number as i64 + 1,
            id: Uuid::now_v7(),
            topic: new.topic.as_str().into(),
            key: new.key.as_deref().map(Into::into),
            r#type: new.r#type.as_str().into(),
            payload: new.payload,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp::now(),
            malformed: None,
        }
    })
}

/// An event as JSON.
pub(crate) fn structured(event: &Event) -> Vec<u8> {
    let mut body = Vec::new();
    CloudEvents::new(SOURCE).write(event, &mut body);
    body
}

/// The attributes of an event, with a prefix, and its payload.
pub(crate) fn binary(event: &Event, prefix: &str) -> (Vec<(String, String)>, Vec<u8>) {
    let binary = CloudEvents::new(SOURCE).binary(event, |_| true);
    let mut fields: Vec<(String, String)> =
        binary.attributes.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)).collect();
    fields.extend(binary.content_type.map(|value| (format!("{prefix}datacontenttype"), value.into())));
    let payload = match &event.payload {
        Payload::Json(text) => text.as_bytes().to_vec(),
        Payload::Bytes(bytes) => bytes.to_vec(),
        Payload::None => Vec::new(),
    };
    (fields, payload)
}

/// Beside the program and not in /tmp, which is memory on many machines and knows no fsync.
pub(crate) fn folder() -> Result<tempfile::TempDir> {
    let beside = std::env::current_exe()?;
    Ok(tempfile::tempdir_in(beside.parent().ok_or("the program has no folder")?)?)
}
