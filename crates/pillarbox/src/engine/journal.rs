use super::Figures;
use super::subscriber::Subscriber;
use super::subscribers::Subscribers;
use crate::attempt_log::LineLimit;
use crate::dispatcher::Item;
use crate::{DeliveredAttempt, FailedAttempt, NextTry, Now};

/// What the engine has to say: figures, warnings, and the attempts that are logged.
#[derive(Debug)]
pub(super) struct Journal {
    figures: Figures,
    tells_deliveries: bool,
    /// Subscriptions of which failed attempts were logged lately.
    logged: Vec<usize>,
}

impl Journal {
    pub(super) fn new(warnings: Vec<String>) -> Self {
        let figures = Figures { warnings, ..Figures::default() };
        Journal { figures, tells_deliveries: false, logged: Vec::new() }
    }

    /// The figures since they were last taken, to be added to.
    pub(super) fn figures(&mut self) -> &mut Figures {
        &mut self.figures
    }

    /// Takes the figures since the last call.
    pub(super) fn take(&mut self) -> Figures {
        std::mem::take(&mut self.figures)
    }

    pub(super) fn warn(&mut self, warning: String) {
        self.figures.warnings.push(warning);
    }

    /// Whether every event that is delivered is to be named.
    pub(super) fn tell_deliveries(&mut self, tell: bool) {
        self.tells_deliveries = tell;
    }

    /// An event was delivered.
    pub(super) fn delivered(&mut self, sub: &Subscriber, item: &Item) {
        if self.tells_deliveries {
            let (subscription, event, attempt) = (sub.name.clone(), item.event.clone(), item.attempts + 1);
            self.figures.deliveries.push(DeliveredAttempt { subscription, event, attempt });
        }
    }

    /// An attempt of the subscription with this index has failed: it is logged if there have not been too many.
    pub(super) fn failed(
        &mut self,
        now: Now,
        index: usize,
        sub: &mut Subscriber,
        next: NextTry,
        attempt: impl FnOnce(&Subscriber) -> FailedAttempt,
    ) {
        if !self.logged.contains(&index) {
            self.logged.push(index);
        }
        if sub.log_limits[usize::from(next == NextTry::Never)].admits(now.mono) {
            self.figures.failed_attempts.push(attempt(sub));
        }
    }

    /// Says how many failed attempts were not logged; the last time before an instance leaves.
    pub(super) fn tell_unlogged(&mut self, now: Now, subscribers: &mut Subscribers, leaves: bool) {
        self.logged.retain(|index| {
            let sub = &mut subscribers[*index];
            let told = |limit: &mut LineLimit| if leaves { limit.close() } else { limit.tell(now.mono) };
            let count: u64 = sub.log_limits.iter_mut().filter_map(told).sum();
            if count > 0 {
                *self.figures.failed_unlogged.entry(sub.name.clone()).or_default() += count;
            }
            sub.log_limits.iter().any(LineLimit::is_counting)
        });
    }
}
