use std::collections::HashSet;
use std::sync::Arc;

use pillarbox::sink::{Batch, BoxFuture, Outcome, Sink, SinkFeatures};
use pillarbox::{Error, ErrorKind, Failure, Result};

/// Sinks of one chain, at most.
pub const CHAIN_STEPS_MAX: usize = 8;

/// Several sinks, one after the other: an event goes to the next one only when the one before has acknowledged it, and is delivered
/// when the last one has.
///
/// A crash between two of them, or a failure of a later one, repeats the earlier ones: each gets the event again with the same id.
/// So put steps that bear that first, like a table of events, where an event is there once however often it comes.
///
/// **Order.** What failed in a step holds back the later events of its key in all further steps. A chain takes several events of a
/// key in one batch only if all of its steps do.
pub struct Chain {
    steps: Vec<Step>,
}

struct Step {
    /// For people, as in `step 2 (kafka)`.
    name: String,
    sink: Arc<dyn Sink>,
}

impl Chain {
    /// A chain of named steps, in order.
    pub fn new(steps: Vec<(String, Arc<dyn Sink>)>) -> Result<Self> {
        let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
        if steps.is_empty() {
            return invalid("a chain needs at least one step".to_owned());
        }
        if steps.len() > CHAIN_STEPS_MAX {
            return invalid(format!("a chain of {} steps is longer than {CHAIN_STEPS_MAX}", steps.len()));
        }
        let name = |(at, (name, sink)): (usize, (String, Arc<dyn Sink>))| Step { name: step_name(at, &name), sink };
        let steps: Vec<Step> = steps.into_iter().enumerate().map(name).collect();
        if let Some(step) = steps.iter().find(|step| step.sink.features().settles) {
            return invalid(format!(
                "{} settles what it delivers itself, in its own transaction, and cannot be a step; give it a subscription of its own",
                step.name
            ));
        }
        Ok(Chain { steps })
    }

    async fn deliver_in_steps(&self, batch: Batch) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Delivered; batch.events.len()];
        let mut left: Vec<usize> = (0..batch.events.len()).collect();
        for step in &self.steps {
            if left.is_empty() {
                break;
            }
            let events = left.iter().map(|index| batch.events[*index].clone()).collect();
            let part = Batch { subscription: batch.subscription.clone(), origin: batch.origin, events };
            let mut answers = step.sink.deliver(part).await.into_iter();
            let mut stopped: HashSet<&str> = HashSet::new();
            left.retain(|index| {
                let key = batch.events[*index].event.key.as_deref();
                // A step that went on all the same has delivered too early; the event waits for its turn.
                let outcome = match answers.next().unwrap_or(Outcome::NotTried) {
                    _ if key.is_some_and(|key| stopped.contains(key)) => Outcome::NotTried,
                    Outcome::Failed(failure) => Outcome::Failed(step.named(failure)),
                    other => other,
                };
                let goes_on = outcome == Outcome::Delivered;
                if !goes_on {
                    stopped.extend(key);
                }
                outcomes[*index] = outcome;
                goes_on
            });
        }
        outcomes
    }
}

impl Step {
    fn named(&self, failure: Failure) -> Failure {
        Failure { message: format!("{}: {}", self.name, failure.message), ..failure }
    }
}

impl Sink for Chain {
    fn features(&self) -> SinkFeatures {
        let features: Vec<SinkFeatures> = self.steps.iter().map(|step| step.sink.features()).collect();
        SinkFeatures {
            ordered_batch: features.iter().all(|features| features.ordered_batch),
            one_by_one: features.iter().any(|features| features.one_by_one),
            settles: false,
            // A step that refuses one key after the other is unwell, and so is the chain. To wait for it once too often is better
            // than to spend the attempts of every key.
            one_receiver: features.iter().any(|features| features.one_receiver),
        }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(self.deliver_in_steps(batch))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            for step in &self.steps {
                step.sink.close().await;
            }
        })
    }

    fn check(&self) -> BoxFuture<'_, std::result::Result<(), Failure>> {
        Box::pin(async move {
            for step in &self.steps {
                step.sink.check().await.map_err(|failure| step.named(failure))?;
            }
            Ok(())
        })
    }
}

fn step_name(at: usize, name: &str) -> String {
    format!("step {} ({name})", at + 1)
}
