use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::delivering::FailedTry;
use super::slot::Slot;
use super::{Action, Engine};
use crate::breaker::{Charge, Permit};
use crate::dispatcher::Item;
use crate::lane::{ChainKey, Phase};
use crate::work::looked_at;
use crate::{Epoch, Event, Failure, KeyHash, Now, PAYLOAD_BYTES_MAX, Position};

/// The events of deliveries that are due: they are read again before they are sent.
#[derive(Debug, Default)]
pub(super) struct Fetcher {
    slot: Slot<Vec<PendingFetch>>,
}

/// A delivery whose event is being fetched.
#[derive(Debug, Clone, Copy)]
struct PendingFetch {
    sub: usize,
    lane: u32,
    epoch: Epoch,
    position: Position,
    key: Option<KeyHash>,
}

impl Fetcher {
    /// Whether a call is under way.
    pub(super) fn is_calling(&self) -> bool {
        self.slot.is_busy()
    }

    /// When a call that failed may be made again.
    pub(super) fn retry_at(&self) -> Option<Duration> {
        self.slot.retry_at()
    }

    /// Lanes that events are fetched for, with the index of their subscription.
    pub(super) fn lanes(&self) -> HashSet<(usize, u32)> {
        self.slot.in_flight().into_iter().flatten().map(|pending| (pending.sub, pending.lane)).collect()
    }
}

impl Engine {
    pub(super) fn fetched(&mut self, now: Now, events: Vec<Arc<Event>>) {
        let pending = self.fetcher.slot.succeed().unwrap_or_default();
        let events: HashMap<Position, Arc<Event>> = events.into_iter().map(|event| (event.position, event)).collect();
        let order: HashMap<Position, usize> = asked(&pending).into_iter().zip(0..).collect();
        let last_told = events.keys().filter_map(|position| order.get(position)).max().map_or(usize::MAX, |last| *last);
        // What is behind one that was not told, of its key, waits for it.
        let mut untold: HashSet<(usize, KeyHash)> = HashSet::new();
        for fetch in pending {
            let PendingFetch { sub: index, lane: number, epoch, position, key } = fetch;
            let sub = &mut self.subscribers[index];
            let Some(lane) = sub.lane_at(number, epoch) else { continue };
            if order[&position] > last_told || key.is_some_and(|key| untold.contains(&(index, key))) {
                untold.extend(key.map(|key| (index, key)));
                lane.return_delivery(position, key);
                continue;
            }
            let row = lane.queues.row(key, position).filter(|_| lane.phase == Phase::Active);
            let Some(attempts) = row.map(|row| row.attempts) else {
                lane.return_delivery(position, key);
                continue;
            };
            let Some(event) = events.get(&position) else {
                let failure = Failure::permanent("the event is neither in the log nor kept aside");
                let row = row.cloned().expect("checked above");
                let failed = self.failed(index, now, FailedTry::unread(&row, attempts + 1), &failure, Charge::Event);
                let sub = &mut self.subscribers[index];
                let on_dead = sub.definition.on_dead;
                let lane = sub.lane_at(number, epoch).expect("checked above");
                lane.fail(position, key, failed, on_dead);
                continue;
            };
            let quarantined = lane.is_quarantined();
            if quarantined {
                lane.record_attempt(position, key);
            }
            let (event, room) = (event.clone(), sub.bytes.reserve(event.size()));
            let item = Item { event, key, lane: number, epoch, attempts, parked: true, claim: None, room };
            if quarantined { sub.recorded.push(item) } else { sub.dispatcher.push(item) }
        }
    }

    /// What was to be fetched waits for its turn again.
    pub(super) fn fetch_failed(&mut self, now: Now) {
        for pending in self.fetcher.slot.fail(now).unwrap_or_default() {
            let sub = &mut self.subscribers[pending.sub];
            if let Some(lane) = sub.lane_at(pending.lane, pending.epoch) {
                lane.return_delivery(pending.position, pending.key);
            }
        }
    }

    pub(super) fn call_fetch(&mut self, now: Now) {
        if !self.fetcher.slot.is_free(now) {
            return;
        }
        let mut pending = Vec::new();
        for (index, sub) in self.subscribers.iter_mut().enumerate().filter(|(_, sub)| !sub.resting) {
            looked_at(sub.lanes.len());
            let asked_for = sub.breaker.wants_retry() && !sub.dispatcher.has_ready_retry();
            if sub.paused || (sub.breaker.permit(now) == Permit::Nothing && !asked_for) {
                continue;
            }
            // How large they are is not known before they are here.
            let bytes_left = self.config.in_flight_bytes_max.saturating_sub(sub.bytes.used());
            let limit = bytes_left.div_ceil(PAYLOAD_BYTES_MAX).min(sub.spec.batch_size * sub.spec.workers);
            let mut limit = limit.min(sub.free(&self.config)).min(if asked_for { 1 } else { usize::MAX });
            // Every lane gets its turn at being the first.
            sub.first_lane = (sub.first_lane + 1) % sub.lanes.len().max(1);
            for number in (sub.first_lane..sub.lanes.len()).chain(0..sub.first_lane) {
                let one_only = sub.holds_quarantined(number as u32);
                let dispatcher = &sub.dispatcher;
                let free = |chain| !matches!(chain, ChainKey::Key(key) if dispatcher.is_busy(key));
                let Some(lane) = sub.lanes[number].as_mut().filter(|lane| lane.phase == Phase::Active) else {
                    continue;
                };
                if limit == 0 || one_only {
                    continue;
                }
                let (lane_number, epoch) = (lane.reference.lane, lane.epoch);
                let due = lane.take_due(now.wall, limit, free);
                limit -= due.len();
                pending.extend(due.into_iter().map(|(position, key)| PendingFetch {
                    sub: index,
                    lane: lane_number,
                    epoch,
                    position,
                    key,
                }));
            }
        }
        if pending.is_empty() {
            return;
        }
        let positions = asked(&pending);
        self.fetcher.slot.begin(pending);
        self.actions.push(Action::Fetch(positions));
    }
}

/// The positions that are fetched, each once, in the order in which they are wanted.
fn asked(pending: &[PendingFetch]) -> Vec<Position> {
    let mut seen = HashSet::new();
    pending.iter().map(|pending| pending.position).filter(|position| seen.insert(*position)).collect()
}
