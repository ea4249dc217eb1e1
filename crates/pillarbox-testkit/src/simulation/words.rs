use std::sync::Arc;

use pillarbox::{Auditor, Cause, Event, Fate, SubscriptionAudit, SubscriptionStatus, why};

use super::{SUBSCRIPTIONS, World};

/// What people are told must be what has happened.
impl World {
    /// Never "delivered" for what no sink got, never "not wanted" for what was wanted, nothing missing that is not, and nothing
    /// that waits and is not counted.
    pub(super) fn check_words(&mut self) {
        self.run.checked += 1;
        let status = self.log.status();
        let mut wrong = Vec::new();
        for event in self.log.visible() {
            let Some(record) = self.log.show_event(event.id) else { continue };
            for (sub, name) in SUBSCRIPTIONS.iter().enumerate() {
                let Some(fate) = record.subscriptions.iter().find(|fate| fate.subscription == *name) else { continue };
                let cause = why(&record, fate, &status).cause;
                if self.is_lie(sub, &event, fate, cause, status.log.log_start) {
                    let (position, cause) = (event.position, cause.name());
                    let (wanted, arrived) = (self.wants(sub, &event), self.arrived[sub].contains(&event.id));
                    wrong.push(format!(
                        "subscription {sub}: {position} is called {cause}, wanted: {wanted}, arrived: {arrived}"
                    ));
                }
            }
        }
        for (sub, name) in SUBSCRIPTIONS.iter().enumerate() {
            wrong.extend(self.audit(sub));
            let row = status.subscriptions.iter().find(|row| row.name == *name);
            wrong.extend(row.and_then(|row| self.check_status(sub, row)));
        }
        wrong.into_iter().take(3).for_each(|text| self.violation(text));
    }

    /// Whether what `why` says of an event is not so.
    fn is_lie(&self, sub: usize, event: &Event, fate: &Fate, cause: Cause, log_start: i64) -> bool {
        let (it, wanted) = ((sub, event.id), self.wants(sub, event));
        // An attempt that was claimed or announced also counts if its process died before it had sent anything.
        let mut errors = fate.delivery.iter().flat_map(|row| &row.errors);
        let tried = self.sent_with.contains_key(&it) || errors.any(|error| error.kind == "crash");
        let paused = self.paused[sub];
        let waits_for_nobody = !wanted && fate.delivery.is_none() && fate.skipped.is_none();
        match cause {
            Cause::Delivered => !wanted || !self.arrived[sub].contains(&event.id),
            Cause::NotMatched => wanted,
            Cause::Skipped => !self.skipped.contains(&it),
            Cause::Pruned => !self.dropped.contains(&it) && event.position >= log_start,
            Cause::Dead => !tried,
            Cause::Paused => !paused || waits_for_nobody,
            Cause::RetryAt => !tried || paused,
            Cause::Delayed => event.deliver_at.is_none() || paused,
            Cause::BehindKeyHead => event.key.is_none(),
            Cause::Pending | Cause::SinkDown | Cause::FloodGuard | Cause::NoOwner | Cause::Stopped => {
                paused || waits_for_nobody
            }
            // Every subscription began with the log, no gap was closed too early, and few filters have followed each other.
            Cause::BeforeStart | Cause::InDeadRange | Cause::NotRecorded => true,
            _ => waits_for_nobody,
        }
    }

    /// What an audit against the receiver finds that is not so.
    fn audit(&self, sub: usize) -> Option<String> {
        let name = SUBSCRIPTIONS[sub];
        let auditor = Auditor::new(self.log.books()).only(name).and_then(|auditor| auditor.expect_receipts(name));
        let mut auditor = auditor.ok()?;
        let events = self.log.visible();
        events.iter().for_each(|event| auditor.event(event));
        self.arrived[sub].iter().for_each(|id| auditor.line(&id.to_string()));
        let audit = auditor.finish().subscriptions.remove(0);
        let unwanted = |event: &&Arc<Event>| {
            self.judged.get(&(sub, event.id)).is_some_and(|judgement| !judgement.wanted)
                && self.in_force[sub].filter.wants(event)
        };
        let unwanted = events.iter().filter(unwanted).count() as u64;
        let expected = events.iter().filter(|event| self.wants(sub, event)).count() as u64;
        let SubscriptionAudit { delivered, waiting, skipped, missing, .. } = audit;
        let sound = missing == 0
            && (audit.passed_unwanted, audit.expected) == (unwanted, expected)
            && delivered + waiting + skipped == expected
            && (audit.before_start, audit.not_recorded, audit.unexpected, audit.duplicates) == (0, 0, 0, 0);
        (!sound).then(|| {
            format!("subscription {sub}: of {expected} expected and {unwanted} that were not, the audit says {audit:?}")
        })
    }

    /// What the status says of a subscription that is not so.
    fn check_status(&self, sub: usize, row: &SubscriptionStatus) -> Option<String> {
        let definition = self.in_force[sub].definition.as_ref()?;
        let said = (row.paused, row.definition, row.on_dead, row.retry, &row.filter);
        let so =
            (self.paused[sub], definition.number, definition.on_dead, definition.retry, &self.in_force[sub].filter);
        if said != so {
            return Some(format!("subscription {sub}: the status says {said:?}, and it is {so:?}"));
        }
        let waits = |event: &Event| {
            let it = (sub, event.id);
            let given_up = self.skipped.contains(&it) || self.dropped.contains(&it) || self.blocked.contains(&it);
            self.wants(sub, event) && !self.arrived[sub].contains(&event.id) && !given_up
        };
        let unfinished = self.visible.values().filter(|(_, event)| waits(event)).count() as u64;
        let counted = row.pending + row.delayed + row.processing + row.retrying + row.blocked + row.dead;
        (counted < unfinished)
            .then(|| format!("subscription {sub}: the status counts {counted} events, and {unfinished} wait"))
    }

    /// What is left when everything has arrived that can is dead, or behind what is dead, and the status says so.
    pub(super) fn check_rest(&mut self) {
        for row in self.log.status().subscriptions {
            let Some(sub) = SUBSCRIPTIONS.iter().position(|name| *name == row.name) else { continue };
            let left = |(_, event): &&(u64, Arc<Event>)| {
                let it = (sub, event.id);
                let given_up = self.skipped.contains(&it) || self.dropped.contains(&it);
                self.wants(sub, event) && !self.arrived[sub].contains(&event.id) && !given_up
            };
            let left = self.visible.values().filter(left).count() as u64;
            if row.dead + row.blocked < left {
                let (dead, blocked) = (row.dead, row.blocked);
                self.violation(format!(
                    "subscription {sub}: {left} events have not arrived, and the status says {dead} dead, {blocked} blocked"
                ));
            }
        }
    }
}
