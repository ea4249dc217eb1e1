use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::queue::Queue;
use super::queues::ClaimIds;
use super::{EngineConfig, PROMOTE_MAX};
use crate::attempt_log::LineLimit;
use crate::breaker::{Breaker, Charge, Permit};
use crate::budget::Budget;
use crate::counted::counted;
use crate::dispatcher::{Dispatcher, Item};
use crate::flood_guard::FloodGuard;
use crate::lane::{ChainKey, Lane, Phase};
use crate::work::looked_at;
use crate::{
    DEAD_HEADS_MAX, Definition, DeliveryRow, Epoch, Event, Filter, KeyHash, Mode, Now, Position, SinkFeatures,
    Subscription, SubscriptionId, SubscriptionReport, SubscriptionView, Timestamp,
};

/// Events at the sink, delivered, the breaker's next try, the flood guard, and why it is stopped.
type Shown = (usize, u64, Option<Duration>, bool, bool, Option<String>);

/// One subscription of the engine.
#[derive(Debug)]
pub(super) struct Subscriber {
    pub(super) spec: Subscription,
    pub(super) name: Arc<str>,
    pub(super) id: SubscriptionId,
    /// What the database says of it. A lane that was loaded under another one is not read.
    pub(super) definition: Arc<Definition>,
    pub(super) lane_count: u32,
    pub(super) paused: bool,
    pub(super) lanes: Vec<Option<Lane>>,
    pub(super) dispatcher: Dispatcher,
    pub(super) breaker: Breaker,
    pub(super) flood_guard: FloodGuard,
    /// The limits of the log lines about attempts that failed, and about events that became dead.
    pub(super) log_limits: [LineLimit; 2],
    /// Events read and not yet settled in the database.
    pub(super) window: Budget,
    /// Bytes of the events that are here.
    pub(super) bytes: Budget,
    pub(super) delivered: u64,
    pub(super) delivered_at: Option<Timestamp>,
    pub(super) stopped: Option<String>,
    /// Why a lane stands still, while the others go on.
    pub(super) overfull: Option<String>,
    /// Nothing is to be done for it before an input says something of it, or time passes.
    pub(super) resting: bool,
    /// What the report says that others have, without what is costly to compare.
    shown: Option<Shown>,
    /// The lane that was first to fetch deliveries.
    pub(super) first_lane: usize,
    /// Events of lanes in quarantine whose attempt is being written down first.
    pub(super) recorded: Vec<Item>,
    /// Attempts that were recorded under an epoch which is over, and their numbers: by lane and position.
    pub(super) own_attempts: HashMap<(u32, Position), u32>,
    /// No event was fit for this permit when the dispatcher had changed so often.
    pub(super) fruitless: Option<(Permit, u64)>,
    /// Of a queue.
    pub(super) queue: Option<Queue>,
    /// Delayed deliveries that are due while an event of their key is at the sink: they take their place when that is over.
    pub(super) due_behind: HashMap<KeyHash, Vec<(u32, DeliveryRow)>>,
    /// The definition and the number of lanes that people know of: those of the configuration, or what they were last told.
    known_config: (Definition, u32),
}

impl Subscriber {
    pub(super) fn new(spec: Subscription, sink: SinkFeatures, view: &SubscriptionView) -> Self {
        Subscriber {
            name: spec.name.as_str().into(),
            id: view.id,
            definition: Arc::new(view.definition.clone()),
            lane_count: view.lanes,
            paused: view.paused,
            lanes: (0..view.lanes).map(|_| None).collect(),
            dispatcher: Dispatcher::new(spec.workers, spec.batch_size, sink.ordered_batch, sink.one_by_one),
            breaker: Breaker::new(sink.one_receiver),
            flood_guard: FloodGuard::default(),
            log_limits: Default::default(),
            window: Budget::default(),
            bytes: Budget::default(),
            delivered: 0,
            delivered_at: None,
            stopped: None,
            overfull: None,
            resting: false,
            shown: None,
            first_lane: 0,
            recorded: Vec::new(),
            own_attempts: HashMap::new(),
            fruitless: None,
            queue: (spec.mode == Mode::Queue).then(|| Queue::new(sink)),
            due_behind: HashMap::new(),
            known_config: (Definition::of(&spec, 0), spec.lanes),
            spec,
        }
    }

    /// What people are to be told, once, where the database says something else of the subscription than this relay's configuration.
    pub(super) fn config_drift(&mut self, view: &SubscriptionView) -> Vec<String> {
        let mut drifts = Vec::new();
        let (known, known_lanes) = std::mem::replace(&mut self.known_config, (view.definition.clone(), view.lanes));
        let own = Definition::of(&self.spec, 0);
        let Definition { filter, on_dead, retry, processing_timeout, .. } = &view.definition;
        if *filter != known.filter && *filter != own.filter {
            let Filter { topics, types } = filter;
            drifts.push(format!(
                "subscription '{}': a relay that was started later wants other events (topics {topics:?}, types {types:?}); this relay \
                 delivers those, and not what its own configuration says",
                self.name
            ));
        }
        let rest = |other: &Definition| {
            (other.on_dead, other.retry, other.processing_timeout) == (*on_dead, *retry, *processing_timeout)
        };
        if !rest(&known) && !rest(&own) {
            drifts.push(format!(
                "subscription '{}': a relay that was started later says on_dead = {on_dead:?}, processing_timeout = \
                 {processing_timeout:?}, {retry:?}; this relay goes by that, and not by its own configuration",
                self.name
            ));
        }
        if view.lanes != known_lanes && view.lanes != self.spec.lanes {
            drifts.push(format!(
                "subscription '{}' has {} lanes in the database and {} in this relay's configuration; the database's number counts, \
                 change it with `pillarbox subscription relane`",
                self.name, view.lanes, self.spec.lanes
            ));
        }
        drifts
    }

    /// Whether nothing is to be done for it before something happens that concerns it.
    pub(super) fn may_rest(&self, now: Now, horizon: Position) -> bool {
        let at_rest = |lane: &Lane| match lane.phase {
            Phase::Active => lane.is_done(horizon) && lane.queues.next_due().is_none(),
            phase => phase == Phase::Paused && lane.quiet && !lane.has_writes(),
        };
        let nothing_here = self.dispatcher.is_empty() && self.recorded.is_empty() && self.due_behind.is_empty();
        let unhindered = self.stopped.is_none() && self.breaker.permit(now) == Permit::All;
        let queue_rests = self.queue.as_ref().is_none_or(|queue| queue.may_rest(now, self.paused));
        queue_rests && nothing_here && unhindered && self.lanes().all(at_rest)
    }

    /// Why a limit stops it, if one does.
    pub(super) fn stop_reason(&mut self, config: &EngineConfig) -> Option<String> {
        looked_at(self.lanes.len());
        let (mut chains, mut rows, mut failing) = (0, 0, 0);
        for lane in self.lanes() {
            // Not every chain is a failing key: delayed events that are due are chains too.
            (chains, rows, failing) =
                (chains + lane.queues.chains(), rows + lane.queues.rows(), failing + lane.queues.failing());
        }
        let blocked = rows - chains.min(rows);
        if failing >= config.max_parked {
            let (verb, one) = if failing == 1 { ("is", "") } else { ("are", "one of them ") };
            let mut heads = self.lanes.iter_mut().flatten().filter_map(|lane| lane.queues.failing_head());
            let example = heads.next().map_or_else(String::new, |head| format!(", {one}{}", name(head)));
            return Some(format!(
                "{} {verb} failing, as many as max_parked allows{example}; requeue or skip some, or mend the receiver",
                counted(failing as u64, "key")
            ));
        }
        if self.queue.as_ref().is_some_and(|queue| queue.rows >= config.max_blocked as u64) {
            return Some(format!("more than max_blocked = {} deliveries wait in the queue", config.max_blocked));
        }
        if blocked >= config.max_blocked {
            let noun = if blocked == 1 { "delivery waits" } else { "deliveries wait" };
            let longest = self.lanes().filter_map(|lane| lane.queues.longest_chain()).max_by_key(|chain| chain.0);
            let example =
                longest.map_or_else(String::new, |(count, head)| format!(", {count} of them behind {}", name(head)));
            return Some(format!(
                "{blocked} {noun} behind failing keys, as many as max_blocked allows{example}; requeue or skip what holds them back, \
                 or mend the receiver"
            ));
        }
        self.lanes().any(|lane| lane.cursor.holes().len() >= config.ranges_max).then(|| {
            format!(
                "{} holes are open, as many as a lane may have: a transaction with very many events has not ended",
                config.ranges_max
            )
        })
    }

    /// What to say of a lane that stands still alone.
    pub(super) fn overfull_reason(&mut self) -> Option<String> {
        let lane = self.lanes.iter_mut().flatten().find(|lane| lane.overfull)?;
        let number = lane.reference.lane;
        let example =
            lane.queues.failing_head().map_or_else(String::new, |head| format!(", one of them {}", name(head)));
        Some(format!(
            "more than {DEAD_HEADS_MAX} keys of lane {number} are held back by a dead event{example}; requeue or skip some, or set \
             on_dead = skip"
        ))
    }

    /// What operators are told.
    pub(super) fn report(&self) -> SubscriptionReport {
        SubscriptionReport {
            in_flight: self.dispatcher.in_flight() as u64,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            breaker: self.breaker.report(),
            flood_guard: self.flood_guard.is_open(),
            stopped: self.stopped.clone().or_else(|| self.overfull.clone()),
            definition: self.definition.number,
            differs: self.differs(),
        }
    }

    /// Whether [`Subscriber::report`] says something else than when this was last asked.
    pub(super) fn has_changed(&mut self) -> bool {
        let (in_flight, down) = (self.dispatcher.in_flight(), self.breaker.is_down());
        let (next_try, flood_guard) = (self.breaker.deadline(), self.flood_guard.is_open());
        let same = self.shown.as_ref().is_some_and(|shown| {
            (shown.0, shown.1, shown.2, shown.3, shown.4) == (in_flight, self.delivered, next_try, flood_guard, down)
                && shown.5.as_ref() == self.stopped.as_ref().or(self.overfull.as_ref())
        });
        if !same {
            let stopped = self.stopped.clone().or_else(|| self.overfull.clone());
            self.shown = Some((in_flight, self.delivered, next_try, flood_guard, down, stopped));
        }
        !same
    }

    /// Takes up a definition that is newer than the one known. Lanes that were loaded under another one are loaded again: where the
    /// filter has changed, their epoch is over. Whether there was anything new.
    pub(super) fn adopt(&mut self, definition: &Definition) -> bool {
        if definition.number <= self.definition.number {
            return false;
        }
        self.definition = Arc::new(definition.clone());
        self.shown = None;
        for lane in self.lanes.iter_mut().flatten() {
            // A poll under way was asked with the old filter.
            lane.cursor.ask(false);
            if lane.definition != definition.number && matches!(lane.phase, Phase::Active | Phase::Paused) {
                lane.phase = Phase::Reloading;
            }
        }
        true
    }

    /// Whether this relay's own configuration says something else than the definition.
    pub(super) fn differs(&self) -> bool {
        !self.definition.says_the_same_as(&Definition::of(&self.spec, 0))
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    pub(super) fn active(&self) -> impl Iterator<Item = &Lane> {
        self.lanes().filter(|lane| lane.phase == Phase::Active)
    }

    pub(super) fn lane(&self, number: u32) -> Option<&Lane> {
        self.lanes.get(number as usize)?.as_ref()
    }

    /// The lane, if it is still held under that epoch.
    pub(super) fn lane_at(&mut self, number: u32, epoch: Epoch) -> Option<&mut Lane> {
        self.lanes.get_mut(number as usize)?.as_mut().filter(|lane| lane.epoch == epoch)
    }

    /// Whether a lane in quarantine has an event on its way already.
    pub(super) fn holds_quarantined(&self, number: u32) -> bool {
        let quarantined = self.lane(number).is_some_and(|lane| lane.is_quarantined());
        quarantined && (self.recorded.iter().any(|item| item.lane == number) || self.dispatcher.holds(number))
    }

    /// How many more events fit into the window.
    pub(super) fn free(&self, config: &EngineConfig) -> usize {
        let queue_is_full = self.queue.as_ref().is_some_and(Queue::is_full);
        let full = self.paused || queue_is_full || self.bytes.used() >= config.in_flight_bytes_max;
        if full { 0 } else { config.in_flight.saturating_sub(self.window.used()) }
    }

    /// Whether reading is worth a poll: a part of the window is free.
    pub(super) fn has_room(&self, config: &EngineConfig) -> bool {
        self.free(config) > config.in_flight / 4 && self.bytes.used() <= config.in_flight_bytes_max / 4 * 3
    }

    pub(super) fn is_idle(&self, now: Now, horizon: Position) -> bool {
        let lane_idle = |lane: &Lane| {
            // A hole that the last poll looked at is somebody's who has not committed.
            let looked = lane.cursor.holes().is_empty() || lane.cursor.bound() == Position::MAX;
            let read = lane.cursor.top() >= horizon && looked && lane.cursor.open_count() == 0;
            (read && lane.phase == Phase::Active && lane.queues.next_due().is_none_or(|due| due > now.wall))
                || lane.phase == Phase::Paused
        };
        let given_up = self.breaker.is_hopeless() || self.stopped.is_some();
        let quiet = self.dispatcher.in_flight() == 0 && self.recorded.is_empty();
        let queue_idle = self.paused || self.queue.as_ref().is_none_or(|queue| queue.is_idle(now));
        quiet && (given_up || (queue_idle && self.dispatcher.is_empty() && self.lanes().all(lane_idle)))
    }

    /// Takes an event that a scan showed.
    pub(super) fn admit(
        &mut self,
        now: Now,
        number: u32,
        key: Option<KeyHash>,
        event: &Arc<Event>,
        ids: &mut ClaimIds,
    ) {
        let lane = self.lanes[number as usize].as_mut().expect("the caller found the lane");
        assert!(
            event.position > lane.cursor.top() || lane.cursor.holes().contains(event.position),
            "an event is handed on once"
        );
        lane.admit(event.position);
        if lane.was_parked(event.position) {
            return lane.done(event.position, event.id);
        }
        let delayed = event.deliver_at.filter(|&at| at > now.wall);
        if let Some(queue) = &self.queue {
            let has_rows = lane.has_chain(ChainKey::of(key, event.position));
            if delayed.is_some() || lane.is_quarantined() || has_rows || queue.takes_all() {
                return self.spill(now, ids, number, event);
            }
        }
        if let Some(until) = delayed {
            return lane.delay(event, until, now.wall);
        }
        if lane.is_quarantined() || lane.has_chain(ChainKey::of(key, event.position)) {
            return lane.enqueue(event, now.wall);
        }
        let (lane, epoch) = (number, lane.epoch);
        let room = self.bytes.reserve(event.size());
        let event = event.clone();
        self.dispatcher.push(Item { event, key, lane, epoch, attempts: 0, parked: false, claim: None, room });
    }

    pub(super) fn succeed(&mut self, now: Now, item: &Item) {
        self.breaker.success(item.event.position);
        self.flood_guard.note(now.mono, item.key_id(), false);
        let Some(lane) = self.lane_at(item.lane, item.epoch) else { return };
        if item.parked {
            lane.succeed(item.event.position, item.key);
        } else {
            lane.done(item.event.position, item.event.id);
        }
    }

    /// An event of one of few keys that fail waits in memory until the sink is tried again, as long as that leaves room for other keys. Where
    /// it does not, it gets a row or gives its claim back, and no attempt is counted.
    pub(super) fn charge_in_a_crowd(&self, now: Now, config: &EngineConfig, item: &Item, charge: Charge) -> Charge {
        let few_fail = charge == Charge::Sink && self.breaker.other_deadline().is_some();
        let crowded = match item.claim {
            Some(_) => self.dispatcher.idle_workers() <= self.dispatcher.ready_len() + 1,
            None => !item.parked && !self.has_room(config),
        };
        if few_fail && crowded { Charge::Nobody(self.breaker.wait(now)) } else { charge }
    }

    /// Of the events that were not tried, those that are to be sent again before anything else of their keys. Those of a failing
    /// key go behind its head; those of a lane that is gone or leaving are dropped.
    pub(super) fn recover_untried(&mut self, now: Now, items: Vec<&Item>, stopping: bool) -> Vec<Item> {
        let mut front = Vec::new();
        for item in items {
            let position = item.event.position;
            if let Some(claim) = item.claim {
                if self.keeps_claim(claim, stopping) {
                    front.push(item.again(self.bytes.reserve(item.event.size())));
                } else {
                    self.breaker.forget(position);
                }
                continue;
            }
            let gated = &self.due_behind;
            let lane = self.lanes.get_mut(item.lane as usize).and_then(Option::as_mut);
            let Some(lane) = lane.filter(|lane| lane.epoch == item.epoch) else {
                self.breaker.forget(position);
                continue;
            };
            if item.parked {
                lane.return_delivery(position, item.key);
            } else if lane.has_chain(ChainKey::of(item.key, position))
                || item.key.is_some_and(|key| gated.contains_key(&key))
            {
                lane.enqueue(&item.event, now.wall);
            } else if lane.phase == Phase::Active {
                front.push(item.again(self.bytes.reserve(item.event.size())));
            } else {
                self.breaker.forget(position);
            }
        }
        front
    }

    /// A key of a batch that is over is no longer under way. What waits for it is sent, or goes behind the key's failing head if
    /// there is one now: after what came back from the batch itself.
    pub(super) fn release_key(&mut self, now: Now, item: &Item) {
        let Some(key) = item.key else { return };
        let delayed = self.due_behind.remove(&key).unwrap_or_default();
        let failing = self.lane_at(item.lane, item.epoch).is_some_and(|lane| lane.has_chain(ChainKey::Key(key)));
        let mut waiting = if failing || !delayed.is_empty() { self.dispatcher.extract(key) } else { Vec::new() };
        waiting.extend(self.dispatcher.release(key));
        let (mut head_is_sent, mut front) = (false, Vec::new());
        for item in waiting {
            if item.claim.is_some() {
                front.push(item);
                continue;
            }
            let position = item.event.position;
            let lane = self.lanes.get_mut(item.lane as usize).and_then(Option::as_mut);
            let Some(lane) = lane.filter(|lane| lane.epoch == item.epoch) else {
                continue;
            };
            head_is_sent |= item.parked && lane.queues.is_head(key, position);
            // A delivery is sent behind its key's head; an event of the log only if the key is not failing.
            let free = delayed.is_empty() && !lane.has_chain(ChainKey::Key(key));
            if (item.parked && head_is_sent) || (!item.parked && free) {
                front.push(item);
                continue;
            }
            if item.parked {
                lane.return_delivery(position, Some(key));
            } else {
                lane.enqueue(&item.event, now.wall);
            }
        }
        // They are older than anything of the key that is ready.
        self.dispatcher.push_front(front);
        for (number, row) in delayed {
            match self.lanes.get_mut(number as usize).and_then(Option::as_mut) {
                Some(lane) if lane.phase == Phase::Active => lane.promote(row),
                // What its key had waiting here is dropped, and comes before it when it is read again.
                Some(lane) => lane.queues.keep_delayed(row),
                None => {}
            }
        }
    }

    /// Delayed deliveries that are due take their place behind what their key has waiting.
    pub(super) fn promote(&mut self, now: Now) {
        if self.paused || self.breaker.permit(now) == Permit::Nothing {
            return;
        }
        for number in 0..self.lanes.len() {
            let Some(lane) = self.lanes[number].as_mut().filter(|lane| lane.phase == Phase::Active) else { continue };
            for row in lane.queues.take_delayed(now.wall, PROMOTE_MAX) {
                if let Some(key) = row.key_hash().filter(|&key| self.dispatcher.is_busy(key)) {
                    self.due_behind.entry(key).or_default().push((number as u32, row));
                    continue;
                }
                let key = row.key_hash().filter(|key| self.dispatcher.has_key(*key));
                let waiting = key.map(|key| self.dispatcher.extract(key)).unwrap_or_default();
                let lane = self.lanes[number].as_mut().expect("checked above");
                for item in waiting {
                    if item.parked {
                        lane.return_delivery(item.event.position, item.key);
                    } else {
                        lane.enqueue(&item.event, now.wall);
                    }
                }
                lane.promote(row);
            }
        }
    }

    /// Lanes that stop take back what they have recorded and not sent, and drop what is not at the sink.
    pub(super) fn quiesce_lanes(&mut self, numbers: Vec<u32>) {
        if numbers.is_empty() {
            return;
        }
        self.drop_waiting(&numbers.iter().copied().collect());
        for number in numbers {
            let Some(lane) = self.lanes[number as usize].as_mut() else { continue };
            lane.quiet = true;
            for row in lane.queues.interrupted() {
                if !self.dispatcher.is_at_sink(number, row.position) {
                    lane.cancel_attempt(row.position, row.key_hash());
                }
            }
        }
    }

    /// Drops what lanes have here that is not at the sink.
    fn drop_waiting(&mut self, numbers: &HashSet<u32>) {
        self.breaker.forget_lanes(numbers);
        let recorded = self.recorded.extract_if(.., |item| numbers.contains(&item.lane));
        for item in self.dispatcher.purge(numbers).into_iter().chain(recorded) {
            // It comes again to whoever has the lane then.
            self.breaker.forget(item.event.position);
        }
    }

    /// Whether a delivery is being worked on because this process has said so.
    pub(super) fn is_own_attempt(&self, number: u32, row: &DeliveryRow) -> bool {
        self.own_attempts.get(&(number, row.position)) == Some(&row.attempts)
    }

    /// Forgets a lane: it is another's now, or loaded again.
    pub(super) fn drop_lane(&mut self, number: u32) {
        self.drop_lanes([number]);
    }

    pub(super) fn drop_lanes(&mut self, numbers: impl IntoIterator<Item = u32>) {
        let mut dropped = HashSet::new();
        for number in numbers {
            let Some(lane) = self.lanes.get_mut(number as usize).and_then(Option::take) else { continue };
            dropped.insert(number);
            self.own_attempts.retain(|(of, _), _| *of != number);
            self.own_attempts.extend(lane.own_attempts().map(|(position, attempt)| ((number, position), attempt)));
            self.queue.iter_mut().for_each(|queue| queue.lane_gone(self.id, number));
        }
        if dropped.is_empty() {
            return;
        }
        self.drop_waiting(&dropped);
        self.due_behind.values_mut().for_each(|rows| rows.retain(|row| !dropped.contains(&row.0)));
    }
}

/// What people know a delivery by that holds others back.
fn name(head: &DeliveryRow) -> String {
    head.key.as_ref().map_or_else(|| format!("position {}", head.position), |key| format!("key '{key}'"))
}
