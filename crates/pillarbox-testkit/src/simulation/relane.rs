use pillarbox::ErrorKind;
use pillarbox::admin::Change;

use super::{FAULTS_UNTIL, SUBSCRIPTIONS, Step, World};

/// How often an operator tries to change the number of lanes before they give up.
const TRIES: u32 = 12;

/// How long the application is quiet meanwhile, in microseconds.
const QUIET: u64 = 1_500_000;

impl World {
    /// An operator waits until a subscription is idle, to change its lanes.
    pub(super) fn begin_relane(&mut self, sub: usize) {
        self.quiet_until = self.now + QUIET;
        self.after(200_000, QUIET, Step::Relane(sub, TRIES));
    }

    /// Pauses the subscription and tries; as long as it is not at rest it goes on.
    pub(super) fn relane(&mut self, sub: usize, tries: u32) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        let subscription = SUBSCRIPTIONS[sub].to_owned();
        if self.log.change(&Change::pause(subscription.clone()), false).is_err() {
            return;
        }
        self.paused[sub] = true;
        let lanes = self.random.between(1, 5) as u32;
        let change = Change::Relane { subscription, lanes };
        self.note(format_args!("{change:?}"));
        let changed = self.log.change(&change, false);
        self.run.locked_out += usize::from(changed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy));
        if changed.is_ok() {
            self.run.relaned += 1;
            self.floors.retain(|(name, _), _| name != SUBSCRIPTIONS[sub]);
            self.check_words();
            // Whoever has not noticed either reads on.
            self.publish();
        }
        // An operator may leave it paused until the next try.
        if changed.is_ok() || tries <= 1 || self.random.chance(50) {
            self.resume(sub);
        }
        self.ring();
        if changed.is_err() && tries > 1 {
            self.after(50_000, 150_000, Step::Relane(sub, tries - 1));
        }
    }

    /// How many lanes a subscription has.
    pub(super) fn lane_count(&self, sub: usize) -> u32 {
        let inner = self.log.inner();
        let row = inner.subscriptions.iter().find(|row| row.name == SUBSCRIPTIONS[sub]);
        row.map_or(self.specs[sub].0.lanes, |row| row.lanes.len() as u32)
    }
}
