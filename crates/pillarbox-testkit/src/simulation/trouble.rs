use pillarbox::engine::Input;
use pillarbox::sink::Outcome;

use super::SUBSCRIPTIONS;

/// What a node has heard of its sinks in this life, and what of it the others can know: what it knew when it made the report that the
/// database has.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    known: Known,
    /// In the report that is under way.
    under_way: Known,
    reported: Known,
}

/// By subscription.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    /// The last attempt that was answered has failed, or the sink answered for no event of a batch.
    failing: [bool; SUBSCRIPTIONS.len()],
    /// An attempt has failed.
    failed: [bool; SUBSCRIPTIONS.len()],
}

impl Trouble {
    /// Takes in what a sink has answered.
    pub(super) fn note(&mut self, input: &Input) {
        let (Input::Delivered { batch, outcomes } | Input::HandedBack { batch, outcomes }) = input else { return };
        if !outcomes.is_empty() && outcomes.iter().all(|outcome| *outcome == Outcome::NotTried) {
            self.known.failing[batch.0] = true;
        }
        for outcome in outcomes {
            match outcome {
                Outcome::Delivered => self.known.failing[batch.0] = false,
                Outcome::Failed(_) => {
                    self.known.failing[batch.0] = true;
                    self.known.failed[batch.0] = true;
                }
                Outcome::NotTried => {}
            }
        }
    }

    /// A report is made.
    pub(super) fn report(&mut self) {
        self.under_way = self.known;
    }

    /// The database has the report.
    pub(super) fn reported(&mut self) {
        self.reported = self.under_way;
    }

    /// Whether the node may have said that the sink is down.
    pub(super) fn may_be_down(&self, sub: usize) -> bool {
        self.reported.failing[sub]
    }

    /// Whether the node may have said that it suspects a bad deploy.
    pub(super) fn may_be_flooded(&self, sub: usize) -> bool {
        self.reported.failed[sub]
    }
}
