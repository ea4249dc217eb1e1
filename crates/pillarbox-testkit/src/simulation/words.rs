use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use pillarbox::admin::{Auditor, Cause, Fate, Status, SubscriptionAudit, SubscriptionStatus, why};
use pillarbox::store::{Definition, InstanceId, LaneRef};
use pillarbox::{Event, Mode};

use super::{Node, SUBSCRIPTIONS, World};

/// Deliberately broken variants of what people are told; the simulation must find each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BrokenWords {
    /// A sink that was down once is said to be down for ever.
    KeepsBreakers,
    /// Every lane is said to have no owner.
    ForgetsOwners,
    /// Every subscription is said to be stopped by a limit.
    InventsLimits,
    /// Nothing is said to be settled.
    ForgetsCursors,
    /// Every relay is said to go by the definition before the one that it goes by.
    LagsBehind,
    /// One event more is said to be pending than is.
    CountsOneMore,
    /// What has a row is said to be given up.
    GivesUpRows,
}

/// What people are told must be what has happened.
impl World {
    /// Never "delivered" for what no sink got, never "not wanted" for what was wanted, nothing missing that is not, and nothing
    /// that waits and is not counted.
    pub(super) fn check_words(&mut self) {
        self.run.checked += 1;
        let mut status = self.log.status();
        self.break_status(&mut status);
        let mut wrong = Vec::new();
        for mut record in self.log.show_visible() {
            record.subscriptions.iter_mut().for_each(|fate| self.break_fate(fate));
            for (sub, name) in SUBSCRIPTIONS.iter().enumerate() {
                let Some(fate) = record.subscriptions.iter().find(|fate| fate.subscription == *name) else { continue };
                let (event, cause) = (&record.event, why(&record, fate, &status).cause);
                if self.is_lie(sub, event, fate, cause, &status) {
                    let (position, cause) = (event.position, cause.name());
                    let (wanted, arrived) = (self.wants(sub, event), self.arrived[sub].contains(&event.id));
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
            let relays = self.nodes.iter().filter(|node| node.is_at_rest());
            wrong.extend(relays.clone().filter_map(|node| self.check_relay(sub, node, &status)));
            self.run.relays_checked += relays.count();
        }
        wrong.into_iter().take(3).for_each(|text| self.violation(text));
    }

    /// Whether what `why` says of an event is not so.
    fn is_lie(&self, sub: usize, event: &Event, fate: &Fate, cause: Cause, status: &Status) -> bool {
        let (it, wanted) = ((sub, event.id), self.wants(sub, event));
        // An attempt that was claimed or announced also counts if its process died before it had sent anything.
        let mut errors = fate.delivery.iter().flat_map(|row| &row.errors);
        let tried = self.sent_with.contains_key(&it) || errors.any(|error| error.kind == "crash");
        let paused = self.paused[sub];
        let waits_for_nobody = !wanted && fate.delivery.is_none() && fate.skipped.is_none();
        let given_up = self.skips.contains(&it) || self.dropped.contains(&it);
        let has_arrived = wanted && !given_up && self.arrived[sub].contains(&event.id);
        if self.done && fate.delivery.is_none() && has_arrived {
            return cause != Cause::Delivered;
        }
        match cause {
            Cause::Delivered => !wanted || !self.arrived[sub].contains(&event.id),
            Cause::NotMatched => wanted,
            Cause::Skipped => !self.skipped.contains(&it),
            Cause::Pruned => !self.dropped.contains(&it) && event.position >= status.log.log_start,
            Cause::Dead => !tried,
            Cause::Paused => !paused || waits_for_nobody,
            Cause::RetryAt => !tried || paused || self.done,
            Cause::Delayed => event.deliver_at.is_none() || paused || self.done,
            Cause::BehindKeyHead => event.key.is_none(),
            Cause::Processing => self.done || waits_for_nobody,
            _ if self.done || paused || waits_for_nobody => true,
            Cause::NoOwner => self.has_owner(sub, fate),
            Cause::Pending | Cause::SinkDown | Cause::FloodGuard | Cause::Stopped if !self.has_owner(sub, fate) => true,
            Cause::SinkDown => !self.relays().any(|node| node.trouble.may_be_down(sub)),
            Cause::FloodGuard => !self.relays().any(|node| node.trouble.may_be_flooded(sub)),
            Cause::Stopped => !self.may_be_stopped(fate, status),
            // Every subscription began with the log, no gap was closed too early, and few filters have followed each other.
            Cause::BeforeStart | Cause::InDeadRange | Cause::NotRecorded => true,
            _ => false,
        }
    }

    /// Nodes that live, have not lost their connection, and were not buried while they were silent.
    fn relays(&self) -> impl Iterator<Item = &Node> {
        let known: HashSet<InstanceId> = self.log.inner().instances.keys().copied().collect();
        let lives = move |node: &&Node| node.instance.is_some_and(|instance| known.contains(&instance));
        self.nodes.iter().filter(|node| node.engine.is_some() && !node.ended).filter(lives)
    }

    /// Whether somebody who lives can deliver an event: any relay a row of the queue, the owner of its lane everything else.
    fn has_owner(&self, sub: usize, fate: &Fate) -> bool {
        let queued = fate.delivery.is_some() && self.specs[sub].0.mode == Mode::Queue;
        let lane = LaneRef { subscription: self.ids[sub], lane: fate.lane };
        let owner = self.log.inner().lane(lane).and_then(|lane| lane.owner);
        self.relays().any(|node| queued || owner.is_some() && node.instance == owner)
    }

    /// Whether a limit that can be reached is what a subscription is said to be stopped by. Holes reach theirs in any run.
    fn may_be_stopped(&self, fate: &Fate, status: &Status) -> bool {
        let row = status.subscriptions.iter().find(|row| row.name == fate.subscription);
        let reason = row.and_then(|row| row.report.stopped.as_ref());
        reason.is_some_and(|reason| self.pressure.stops(self.healed) || reason.contains("holes are open"))
    }

    /// What an audit against the receiver finds that is not so.
    fn audit(&self, sub: usize) -> Option<String> {
        let name = SUBSCRIPTIONS[sub];
        let mut books = self.log.books();
        if self.plan.words == Some(BrokenWords::GivesUpRows) {
            books.lanes.iter_mut().for_each(|book| book.skipped.union(&book.deliveries));
        }
        let auditor = Auditor::new(books).only(name).and_then(|auditor| auditor.expect_receipts(name));
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
        let given_up = |event: &&Arc<Event>| {
            let it = (sub, event.id);
            self.wants(sub, event) && (self.skips.contains(&it) || self.dropped.contains(&it))
        };
        let sound = missing == 0
            && skipped == events.iter().filter(given_up).count() as u64
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

    /// What the status says of a relay that is not so: the definition that it goes by, and whether its own configuration says something
    /// else.
    fn check_relay(&self, sub: usize, node: &Node, status: &Status) -> Option<String> {
        let definition = self.in_force[sub].definition.as_ref()?;
        // One that was silent may have been buried, and does not know it yet.
        let relay = status.instances.iter().find(|relay| Some(relay.id) == node.instance)?;
        let report = relay.report.subscriptions.get(SUBSCRIPTIONS[sub]);
        let said = report.map(|report| (report.definition, report.differs));
        let own = Definition::of(&node.specs[sub].0, 0);
        let so = Some((definition.number, !own.says_the_same_as(definition)));
        (said != so).then(|| {
            format!("subscription {sub}: the status says of {:?} that it goes by {said:?}, and it is {so:?}", relay.id)
        })
    }

    /// How many events of each subscription are neither done nor dead nor behind a dead one.
    pub(super) fn unfinished(&self) -> [u64; SUBSCRIPTIONS.len()] {
        let mut status = self.log.status();
        self.break_status(&mut status);
        SUBSCRIPTIONS.map(|name| {
            let row = status.subscriptions.iter().find(|row| row.name == name);
            row.map_or(0, |row| row.pending + row.delayed + row.processing + row.retrying)
        })
    }

    fn break_status(&self, status: &mut Status) {
        for (name, last) in SUBSCRIPTIONS.iter().zip(&self.breakers) {
            let Some(row) = status.subscriptions.iter_mut().find(|row| row.name == *name) else { continue };
            match self.plan.words {
                Some(BrokenWords::KeepsBreakers) => row.report.breaker.clone_from(last),
                Some(BrokenWords::CountsOneMore) => row.pending += 1,
                Some(BrokenWords::InventsLimits) => row.report.stopped = Some("too much".to_owned()),
                _ => {}
            }
        }
        if self.plan.words == Some(BrokenWords::LagsBehind) {
            let reports = status.instances.iter_mut().flat_map(|relay| relay.report.subscriptions.values_mut());
            reports.for_each(|report| report.definition -= 1);
        }
    }

    fn break_fate(&self, fate: &mut Fate) {
        match self.plan.words {
            Some(BrokenWords::ForgetsOwners) => fate.owner = None,
            Some(BrokenWords::ForgetsCursors) => fate.settled = false,
            _ => {}
        }
    }

    /// What is left when everything has arrived that can is dead, or behind what is dead, and the status says so.
    pub(super) fn check_rest(&mut self) {
        self.check_streams();
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

impl World {
    /// Versions are dense, and follow each other in the order of positions and of commits.
    fn check_streams(&mut self) {
        let mut versions: BTreeMap<Box<str>, i64> = BTreeMap::new();
        for event in self.log.visible() {
            let (Some(stream), Some(version)) = (event.key.clone(), event.stream_version) else { continue };
            let before = versions.insert(stream.clone(), version).unwrap_or_default();
            if version != before + 1 {
                self.violation(format!("version {version} of {stream} comes behind version {before}"));
            }
        }
    }
}

impl Node {
    /// Whether it lives and knows what the newest started relay has brought: it was told of it by one look at the fleet, and has said so
    /// with the next.
    fn is_at_rest(&self) -> bool {
        self.engine.is_some() && !self.ended && self.looks >= 2
    }
}
