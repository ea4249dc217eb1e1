use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::Change;
use pillarbox::sink::{Attempt, SinkFeatures};
use pillarbox::store::{Definition, LaneRef, RangeSet, Settlement, lane_of};
use pillarbox::{Event, Filter, OnDead, Position, Start, Subscription};
use uuid::Uuid;

use super::{JOBS, SOME, SUBSCRIPTIONS, World};

/// What a subscription is told to want, by the configurations of relays: more, less, something else.
const FILTERS: [&[&[&str]]; SUBSCRIPTIONS.len()] = [
    &[&[], &["a", "b"], &["b", "c.*"]],
    &[&["b", "c.*"], &["a"], &["c.*"], &[]],
    &[&["a", "c.*"], &["a"], &[], &["b", "c.*"]],
];

/// What the filter of a subscription was, as the model knows it: the one that the newest started relay brought.
#[derive(Debug, Default)]
pub(super) struct InForce {
    pub(super) filter: Filter,
    pub(super) hold: Option<Duration>,
    /// What it says, and how often that has changed; None before the first.
    pub(super) definition: Option<Definition>,
    /// What was visible when it changed last.
    changed: u64,
}

/// What the filter in force said of an event when it was settled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judgement {
    pub(super) wanted: bool,
    /// It was settled when that filter ended, and so the judgement stays, whatever becomes of the cursor.
    pub(super) sealed: bool,
}

/// Configurations that change while relays run, and what is said of events afterwards.
impl World {
    /// The configuration that a node is started with: what was deployed last, now and then something new, or what it ran before.
    pub(super) fn configure(&mut self, node: usize, rejoin: bool) -> Vec<(Subscription, SinkFeatures)> {
        let own = self.nodes[node].specs.clone();
        if rejoin && !own.is_empty() {
            return own;
        }
        if self.plan.calm || self.healed {
            return self.specs.clone();
        }
        if self.random.chance(40) {
            self.deploy();
        }
        if !own.is_empty() && self.random.chance(20) { own } else { self.specs.clone() }
    }

    /// Somebody writes another configuration.
    fn deploy(&mut self) {
        let sub = self.random.below(SUBSCRIPTIONS.len() as u64) as usize;
        let draw = self.random.below(12);
        let hold = [None, Some(300), Some(1_500)][self.random.below(3) as usize].map(Duration::from_millis);
        let timeout = Duration::from_millis(self.random.between(2_000, 4_000));
        let choice = self.random.below(FILTERS[sub].len() as u64) as usize;
        let attempts = self.random.below(4) as u32;
        let spec = &mut self.specs[sub].0;
        match draw {
            0..7 => spec.filter.topics = FILTERS[sub][choice].iter().map(|&topic| topic.to_owned()).collect(),
            7 if sub == SOME => {
                spec.on_dead = if spec.on_dead == OnDead::Skip { OnDead::Block } else { OnDead::Skip };
            }
            8 => spec.hold = hold,
            9 if sub == JOBS => spec.processing_timeout = timeout,
            // Never fewer than what the model takes for dead.
            _ => spec.retry.max_attempts = if sub == JOBS { 6 } else { 3 } + attempts,
        }
    }

    /// A relay was started: what it says counts from now on. Whether to look at what people are told once it runs.
    pub(super) fn define(&mut self, specs: &[(Subscription, SinkFeatures)]) -> bool {
        let changed = self.visible.len() as u64 + self.sequence;
        let mut changes = false;
        self.nodes.iter_mut().for_each(|node| node.looks = 0);
        for (sub, (spec, _)) in specs.iter().enumerate() {
            let says = self.number(sub, spec);
            self.run.adjusted += usize::from(says.number > 1 && self.in_force[sub].filter == spec.filter);
            self.in_force[sub].hold = spec.hold;
            self.in_force[sub].definition = Some(says);
            if self.in_force[sub].filter != spec.filter {
                (self.in_force[sub].filter, self.in_force[sub].changed) = (spec.filter.clone(), changed);
                let settled = self.judged.iter_mut().filter(|((of, _), _)| *of == sub);
                settled.for_each(|(_, judgement)| judgement.sealed = true);
                self.run.redefined += 1;
                changes = true;
            }
        }
        changes && self.random.chance(10)
    }

    /// What the newest started relay says, under a number that every change raises.
    fn number(&self, sub: usize, spec: &Subscription) -> Definition {
        let Some(before) = &self.in_force[sub].definition else { return Definition::of(spec, 1) };
        let same = Definition::of(spec, 0).says_the_same_as(before) && self.in_force[sub].hold == spec.hold;
        Definition::of(spec, before.number + i64::from(!same))
    }

    /// Whether an event is wanted by the filter that judges it: the one in force when it was settled, or that of now until then.
    pub(super) fn wants(&self, sub: usize, event: &Event) -> bool {
        let judged = self.judged.get(&(sub, event.id)).map(|judgement| judgement.wanted);
        judged.unwrap_or_else(|| self.in_force[sub].filter.wants(event))
    }

    /// Notes the filter that a node goes by when it sends events.
    pub(super) fn note_sent(&mut self, node: usize, sub: usize, events: &[Attempt]) {
        let Some(engine) = &self.nodes[node].engine else { return };
        let filter = Arc::new(engine.definition(sub).filter.clone());
        self.sent_with.extend(events.iter().map(|attempt| ((sub, attempt.event.id), filter.clone())));
    }

    /// Whether `later` may come before another event of its key: that was there when the filter changed, or whoever sent `later` had not
    /// noticed yet that the other is wanted. What it has sent comes again, after the other.
    pub(super) fn may_overtake(&self, sub: usize, later: &Event, other: &Event, shown: u64) -> bool {
        let unnoticed = self.sent_with.get(&(sub, later.id)).is_some_and(|filter| !filter.wants(other));
        shown <= self.in_force[sub].changed || unnoticed
    }

    /// What the lanes of a settlement have settled.
    pub(super) fn settled_before(&self, settlement: &Settlement) -> Vec<RangeSet> {
        let inner = self.log.inner();
        let positions = |lane: LaneRef| inner.lane(lane).map(|lane| lane.cursor.positions()).unwrap_or_default();
        settlement.lanes.iter().map(|write| positions(write.lane)).collect()
    }

    /// Events are judged by the filter in force when they are settled, whoever read them with whatever filter.
    pub(super) fn judge(&mut self, settlement: &Settlement, before: &[RangeSet], written: &[bool]) {
        for ((write, before), _) in settlement.lanes.iter().zip(before).zip(written).filter(|(_, written)| **written) {
            let Some(sub) = self.ids.iter().position(|id| *id == write.lane.subscription) else { continue };
            let after = write.cursor.positions();
            let (mut passed, mut undone) = (after.clone(), before.clone());
            passed.subtract(before);
            undone.subtract(&after);
            for event in self.events_of(sub, write.lane.lane, &passed) {
                let wanted = self.in_force[sub].filter.wants(&event);
                self.judged.entry((sub, event.id)).or_insert(Judgement { wanted, sealed: false });
            }
            // A cursor that was cut at its limit.
            for event in self.events_of(sub, write.lane.lane, &undone) {
                if self.judged.get(&(sub, event.id)).is_some_and(|judgement| !judgement.sealed) {
                    self.judged.remove(&(sub, event.id));
                }
            }
        }
    }

    fn events_of(&self, sub: usize, lane: u32, positions: &RangeSet) -> Vec<Arc<Event>> {
        let lanes = self.lane_count(sub);
        let inner = self.log.inner();
        let of_lane = |event: &&Arc<Event>| lane_of(event.key_hash(), event.position, lanes) == lane;
        let rows = positions.iter().flat_map(|range| inner.rows.range(range).map(|(_, event)| event));
        rows.filter(of_lane).cloned().collect()
    }

    /// Everything above the place is judged anew.
    pub(super) fn judge_again(&mut self, sub: usize, to: Position) {
        // What retention has removed does not come again.
        let replayed = |event: &Event| event.position > to && !self.pruned.contains(&event.id);
        let above: Vec<Uuid> =
            self.visible.values().filter(|(_, event)| replayed(event)).map(|(_, event)| event.id).collect();
        for id in above {
            self.judged.remove(&(sub, id));
            self.dropped.remove(&(sub, id));
            self.skips.remove(&(sub, id));
        }
        self.forget_jumps(sub, to);
    }

    /// An operator replays a key.
    pub(super) fn rewind_a_key(&mut self, sub: usize) {
        let key = format!("k{}", self.random.below(self.pressure.keys));
        let to = self.random.below(self.log.horizon().max(1) as u64) as Position;
        let change =
            Change::Rewind { subscription: SUBSCRIPTIONS[sub].into(), to: Start::Position(to), key: Some(key) };
        self.note(format_args!("{change:?}"));
        // A change may be refused before the first instance has made the subscriptions.
        if let Ok(changed) = self.log.change(&change, false) {
            self.run.keys_rewound += usize::from(changed.count > 0);
            self.replayed |= sub == JOBS;
            for id in changed.events {
                self.dropped.remove(&(sub, id));
                self.skips.remove(&(sub, id));
                // It is delivered again, or after all; where it was dead, later ones of its key may have been sent. A former filter that
                // wanted it stays its judge, else the filter of now becomes it.
                let sealed = self.judged.get(&(sub, id)).is_some_and(|judgement| judgement.wanted && judgement.sealed);
                self.judged.insert((sub, id), Judgement { wanted: true, sealed });
                self.requeued.insert((sub, id));
            }
        }
        self.ring();
    }
}
