use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::engine::Input;
use pillarbox::sink::{Attempt, BatchId, Fault, Outcome};
use pillarbox::store::{LaneRef, lane_of};
use pillarbox::{Event, Failure, Position, Timestamp};
use uuid::Uuid;

use super::node::{ANSWER_MAX, News};
use super::{Held, JOBS, Random, SLOW, SOME, SUBSCRIPTIONS, Step, Ticket, World};

/// For so long a node may not know that the clock was set back: it is frozen, or cut off.
const CLOCK_UNKNOWN_MAX: u64 = 5_000_000;

/// How often an event that is told to come later is.
const LATER: u32 = 10;

impl World {
    pub(super) fn deliver(&mut self, ticket: Ticket, batch: (usize, BatchId), events: Vec<Attempt>) {
        let held: Vec<Held> = events.iter().map(|attempt| self.held(batch.0, attempt)).collect();
        if batch.0 == JOBS {
            self.check_jobs(ticket, &held)
        } else {
            self.check_keys(ticket, batch.0, &held)
        }
        if let Some(early) = events.iter().find(|attempt| self.is_early(&attempt.event)) {
            self.violation(format!("node {} sends {} before its time", ticket.node, early.event.position));
        }
        // What is claimed does not depend on its lane.
        let bare = |held: &&Held| held.claim.is_none();
        if held.iter().filter(bare).any(|held| self.seized.contains(&(held.lane, held.epoch))) {
            self.violation(format!("node {} sends what its lease does not cover any more: {held:?}", ticket.node));
        }
        self.note_sent(ticket.node, batch.0, &events);
        self.nodes[ticket.node].at_sink.insert((ticket.life, batch), held);
        let parallel = self.nodes.iter().flat_map(|node| node.at_sink.values()).map(Vec::len).sum();
        self.run.parallel = self.run.parallel.max(parallel);
        let slow = match self.random.below(100) {
            0..4 if batch.0 == JOBS => 10_000_000,
            0..20 if batch.0 == JOBS => 1_000_000,
            0..2 => 1_500_000,
            2..6 => 400_000,
            _ => self.pressure.answer_max,
        };
        // A worker that is held up by an event gives the rest of its batch back before that one arrives.
        let one_by_one = events.len() > 1 && self.specs[batch.0].1.one_by_one;
        if one_by_one && (slow > self.pressure.answer_max || self.random.chance(20)) {
            let index = self.random.below(events.len() as u64) as usize;
            return self.after(0, 20_000, Step::HoldUp(ticket, batch, events, index));
        }
        let takes = self.random.between(0, slow);
        self.run.slow += usize::from(takes > SLOW);
        self.at(self.now + takes, Step::Arrive(ticket, batch, events));
    }

    /// Whether an event was not due by the database's clock since it was inserted. Whoever has not looked at the fleet since the clock was
    /// set back does not know it yet.
    fn is_early(&self, event: &Event) -> bool {
        let since = self.inserted.get(&event.position).map_or(0, |at| at.saturating_sub(CLOCK_UNKNOWN_MAX));
        let before = self.wall_offsets.iter().filter(|(ended, _)| *ended >= since).map(|(_, offset)| *offset);
        let latest = Timestamp(self.wall().0 - self.wall_offset + before.fold(self.wall_offset, i64::max));
        event.deliver_at.is_some_and(|at| at > latest)
    }

    /// No two batches of a node hold a key, nor does one that the sink does not take in order.
    fn check_keys(&mut self, ticket: Ticket, sub: usize, held: &[Held]) {
        let ordered = self.specs[sub].1.ordered_batch;
        let keys: BTreeSet<_> = held.iter().filter_map(|held| held.key.as_ref()).collect();
        let twice = !ordered && keys.len() < held.iter().filter(|held| held.key.is_some()).count();
        let others = self.nodes[ticket.node].at_sink.iter().filter(|(other, _)| other.1.0 == sub);
        let mut others = others.flat_map(|(_, held)| held).filter_map(|held| held.key.as_ref());
        if twice || others.any(|key| keys.contains(key)) {
            self.violation(format!("node {} has a key at the sink twice: {held:?}", ticket.node));
        }
    }

    /// What came before the event that holds a worker up is over, and what comes after it is given back.
    pub(super) fn hold_up(&mut self, ticket: Ticket, batch: (usize, BatchId), mut events: Vec<Attempt>, index: usize) {
        if !self.alive(ticket) || self.nodes[ticket.node].aborted.contains(&batch) {
            return self.arrive(ticket, batch, &events);
        }
        let (outcomes, failed) = self.work(ticket, batch.0, &events[..index]);
        let slow = events.swap_remove(index);
        self.note(format_args!("hold up {ticket:?} {batch:?} {outcomes:?}"));
        if slow.event.key.as_ref().is_some_and(|key| failed.contains(key)) {
            return self.answer(ticket, News::Input(Input::Delivered { batch, outcomes }));
        }
        self.answer(ticket, News::Input(Input::HandedBack { batch, outcomes }));
        let held_up = if batch.0 == JOBS { 5_000_000 } else { 400_000 };
        // A worker's answers come in order.
        self.after(ANSWER_MAX + 1, held_up, Step::Arrive(ticket, batch, vec![slow]));
    }

    fn held(&self, sub: usize, attempt: &Attempt) -> Held {
        let event = &attempt.event;
        let of_key = || lane_of(event.key_hash(), event.position, self.lane_count(sub));
        let lane = LaneRef { subscription: self.ids[sub], lane: attempt.lane.unwrap_or_else(of_key) };
        Held {
            position: event.position,
            key: event.key.clone(),
            lane,
            epoch: attempt.epoch,
            claim: attempt.claim,
            given_up: false,
        }
    }

    /// What is at the sinks is given up; nobody knows what of it arrives.
    pub(super) fn abort(&mut self, ticket: Ticket) {
        self.run.aborts += 1;
        let at_sink = self.nodes[ticket.node].at_sink.keys();
        let batches: Vec<_> = at_sink.filter(|(life, _)| *life == ticket.life).map(|(_, batch)| *batch).collect();
        for batch in batches {
            let held = self.nodes[ticket.node].at_sink.get_mut(&(ticket.life, batch));
            held.into_iter().flatten().for_each(|held| held.given_up = true);
            self.nodes[ticket.node].aborted.insert(batch);
            self.answer(ticket, News::Input(Input::Aborted { batch }));
        }
    }

    pub(super) fn arrive(&mut self, ticket: Ticket, batch: (usize, BatchId), events: &[Attempt]) {
        // A call that was sent may arrive, wholly or in part, though its sender is gone or has given it up.
        let given_up = self.alive(ticket) && self.nodes[ticket.node].aborted.remove(&batch);
        let whole = self.alive(ticket) && !given_up;
        let count = if whole { events.len() } else { self.random.below(events.len() as u64 + 1) as usize };
        let (outcomes, _) = self.work(ticket, batch.0, &events[..count]);
        self.note(format_args!("arrive {ticket:?} {batch:?} {outcomes:?}"));
        if !given_up {
            if !whole {
                self.nodes[ticket.node].at_sink.remove(&(ticket.life, batch));
            }
            self.answer(ticket, News::Input(Input::Delivered { batch, outcomes }));
        }
    }

    /// What becomes of events one after the other, and the keys that stopped at a failure.
    fn work(&mut self, ticket: Ticket, sub: usize, events: &[Attempt]) -> (Vec<Outcome>, HashSet<Box<str>>) {
        let mut failed: HashSet<Box<str>> = HashSet::new();
        let mut outcomes = Vec::new();
        for attempt in events {
            let event = &attempt.event;
            if event.key.as_ref().is_some_and(|key| failed.contains(key)) {
                outcomes.push(Outcome::NotTried);
                continue;
            }
            let outcome = match self.outcome(sub, event) {
                Outcome::Delivered if self.specs[sub].1.settles => self.transact(ticket, attempt),
                outcome => outcome,
            };
            match &outcome {
                Outcome::Failed(failure) => {
                    failed.extend(event.key.clone());
                    if sub == SOME && !matches!(failure.fault, Fault::Sink | Fault::Neither) {
                        *self.refused.entry(event.id).or_default() += if failure.permanent { 3 } else { 1 };
                    }
                }
                Outcome::Delivered => self.arrived(sub, event),
                Outcome::NotTried => failed.extend(event.key.clone()),
            }
            outcomes.push(outcome);
        }
        (outcomes, failed)
    }

    fn outcome(&mut self, sub: usize, event: &Event) -> Outcome {
        if self.sink_down[sub] {
            // Now and then it wants nothing more, until an operator resumes the subscription.
            let gone = self.random.chance(5);
            return Outcome::Failed(if gone { Failure::gone("gone") } else { Failure::sink("down") });
        }
        if self.now < self.refuses_until[sub] {
            return Outcome::Failed(Failure::event("refuses all"));
        }
        let tries = self.attempts.entry((sub, event.id)).or_default();
        *tries += 1;
        let draw = Random(event.position as u64 * 7 + sub as u64).next() % 100;
        match draw {
            0..8 if u64::from(*tries) <= draw => Outcome::Failed(Failure::event("refused")),
            8..11 if *tries == 1 => Outcome::Failed(Failure::unclear("timeout", "no answer")),
            11 if *tries == 1 => Outcome::Failed(Failure::permanent("malformed")),
            12..14 if *tries == 1 => Outcome::NotTried,
            // More often than any policy tries it.
            14..17 if *tries <= LATER => Outcome::Failed(Failure::later(Duration::from_millis(draw * 10), "not yet")),
            _ => Outcome::Delivered,
        }
    }

    fn arrived(&mut self, sub: usize, event: &Arc<Event>) {
        if !self.arrived[sub].insert(event.id) {
            self.run.duplicates += 1;
            if self.plan.calm || self.specs[sub].1.settles && !self.replayed {
                self.violation(format!("{} came twice to subscription {sub}", event.position));
            }
            return;
        }
        self.run.delayed += usize::from(event.deliver_at.is_some());
        let Some((order, _)) = self.visible.get(&event.id).cloned() else { return };
        let Some(key) = event.key.clone() else { return };
        let earlier: Vec<(Uuid, Position)> = self.by_key[&key]
            .iter()
            .filter_map(|id| self.visible.get(id))
            // A delayed event stands outside its key's order until it is due; then it goes behind what waits.
            .filter(|(shown, other)| other.position < event.position && *shown < order && other.deliver_at.is_none())
            .filter(|(shown, other)| self.wants(sub, other) && !self.may_overtake(sub, event, other, *shown))
            .filter(|(_, other)| !self.arrived[sub].contains(&other.id))
            .map(|(_, other)| (other.id, other.position))
            .collect();
        for (id, position) in earlier {
            if !self.given_up(sub, id) {
                self.violation(format!(
                    "subscription {sub}: {} of key {key} came before {position}, which was visible earlier",
                    event.position
                ));
            }
        }
    }

    /// Whether an event may have been let go for a subscription: skipped by an operator, or dead where dead events hold
    /// nobody back.
    fn given_up(&self, sub: usize, id: Uuid) -> bool {
        if sub == SOME && self.refused.get(&id).is_some_and(|refusals| *refusals >= 3) {
            return true;
        }
        let given_up = self.skipped.contains(&(sub, id)) || self.ever_dropped.contains(&(sub, id));
        if given_up || (sub == SOME && self.requeued.contains(&(sub, id))) {
            return true;
        }
        if !self.visible.contains_key(&id) {
            return true;
        }
        let Some(fate) = self.log.fate(id, SUBSCRIPTIONS[sub]) else { return false };
        // An attempt that a crash ended is counted in the row and not by the sink; its last failure may not be written yet.
        let dead = |row: &pillarbox::admin::DeliveryRecord| {
            row.state == State::Dead || (row.attempts >= 2 && self.refused.contains_key(&id))
        };
        sub == SOME && fate.delivery.as_ref().is_some_and(dead)
    }

    /// A floor never goes back, but by an operator's rewind.
    pub(super) fn check_floors(&mut self) {
        for (lane, floor) in self.log.floors() {
            let before = self.floors.insert(lane.clone(), floor).unwrap_or(floor);
            if floor < before && !self.rewound {
                self.violation(format!("the floor of {}/{} went back from {before} to {floor}", lane.0, lane.1));
            }
        }
        self.rewound = false;
    }
}
