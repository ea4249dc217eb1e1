use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pillarbox::Failure;
use pillarbox::sink::{Batch, CloudEvents, Outcome};

/// What a line takes beside its payload, roughly; only to reserve room.
const LINE_BYTES: usize = 400;

/// A whole batch as lines.
pub(crate) fn lines_of(format: &CloudEvents, batch: &Batch) -> Vec<u8> {
    let payloads: usize = batch.events.iter().map(|attempt| attempt.event.payload.len()).sum();
    let mut lines = Vec::with_capacity(payloads + batch.events.len() * LINE_BYTES);
    batch.events.iter().for_each(|attempt| format.write_line(&attempt.event, &mut lines));
    lines
}

/// Runs blocking work that writes the whole batch or nothing of it, and answers for each event.
pub(crate) async fn deliver_whole(
    batch: &Batch,
    work: impl FnOnce(&Cancelled) -> Result<(), Failure> + Send + 'static,
) -> Vec<Outcome> {
    let cancelled = Cancelled::default();
    let guard = CancelOnDrop(cancelled.clone());
    let done = tokio::task::spawn_blocking(move || work(&cancelled)).await;
    drop(guard);
    match done {
        Ok(Ok(())) => vec![Outcome::Delivered; batch.events.len()],
        Ok(Err(failure)) => failed(batch, &failure),
        Err(ended) => failed(batch, &Failure::unclear("panic", format!("the sink ended without an answer: {ended}"))),
    }
}

/// The first event of each key failed; those behind it were not tried.
fn failed(batch: &Batch, failure: &Failure) -> Vec<Outcome> {
    let mut keys = HashSet::new();
    let outcome = |attempt: &pillarbox::sink::Attempt| match attempt.event.key.as_deref() {
        Some(key) if !keys.insert(key.to_owned()) => Outcome::NotTried,
        _ => Outcome::Failed(failure.clone()),
    };
    batch.events.iter().map(outcome).collect()
}

/// Whether the answer is no longer waited for. Blocking work outlives a dropped future; it looks here before it writes,
/// so that a batch that was given up is not written long after.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    /// A failure if so.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Failure::unclear("cancelled", "the delivery was cancelled before anything was written"));
        }
        Ok(())
    }
}

struct CancelOnDrop(Cancelled);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
