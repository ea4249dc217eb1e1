use std::collections::HashMap;
use std::ops::{Index, IndexMut};
use std::time::Duration;

use super::Input;
use super::subscriber::Subscriber;
use crate::lane::Lane;
use crate::work::looked_at;
use crate::{LaneRef, Now, Position, SubscriptionId};

/// The subscriptions of an engine, and which of them rest.
#[derive(Debug)]
pub(super) struct Subscribers {
    list: Vec<Subscriber>,
    indexes: HashMap<SubscriptionId, usize>,
    /// When something is to be done for a queue that rests, at the earliest.
    rest_until: Duration,
}

impl Subscribers {
    pub(super) fn new(list: Vec<Subscriber>) -> Self {
        let indexes = list.iter().enumerate().map(|(index, sub)| (sub.id, index)).collect();
        Subscribers { list, indexes, rest_until: Duration::MAX }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Subscriber> {
        self.list.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Subscriber> {
        self.list.iter_mut()
    }

    /// The subscriptions that do not rest.
    pub(super) fn awake(&self) -> impl Iterator<Item = &Subscriber> {
        self.list.iter().filter(|sub| !sub.resting)
    }

    /// The subscriptions that do not rest.
    pub(super) fn awake_mut(&mut self) -> impl Iterator<Item = &mut Subscriber> {
        self.list.iter_mut().filter(|sub| !sub.resting)
    }

    pub(super) fn index_of(&self, subscription: SubscriptionId) -> Option<usize> {
        self.indexes.get(&subscription).copied()
    }

    pub(super) fn find(&self, subscription: SubscriptionId) -> Option<&Subscriber> {
        self.index_of(subscription).map(|index| &self.list[index])
    }

    pub(super) fn find_mut(&mut self, subscription: SubscriptionId) -> Option<&mut Subscriber> {
        self.index_of(subscription).map(|index| &mut self.list[index])
    }

    pub(super) fn lane_mut(&mut self, lane: LaneRef) -> Option<&mut Lane> {
        self.find_mut(lane.subscription)?.lanes.get_mut(lane.lane as usize)?.as_mut()
    }

    /// All lanes that are held.
    pub(super) fn lanes_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        self.list.iter_mut().flat_map(|sub| sub.lanes.iter_mut().flatten())
    }

    /// Subscriptions that rest are not looked at until an input concerns them, or the time has come to look for rows of a queue.
    pub(super) fn rouse(&mut self, now: Now, input: &Input) {
        let concerns_all = match input {
            Input::Delivered { batch, .. } | Input::Aborted { batch } | Input::HandedBack { batch, .. } => {
                self.list[batch.0].resting = false;
                false
            }
            Input::Rang | Input::Published => false,
            _ => true,
        };
        if concerns_all || now.mono >= self.rest_until {
            self.list.iter_mut().for_each(|sub| sub.resting = false);
            self.rest_until = Duration::MAX;
        }
    }

    /// Subscriptions for which nothing is to be done rest.
    pub(super) fn lay_to_rest(&mut self, now: Now, horizon: Position) {
        for sub in self.list.iter_mut().filter(|sub| !sub.resting) {
            looked_at(sub.lanes.len());
            sub.resting = sub.may_rest(now, horizon);
            if let Some(queue) = sub.queue.as_ref().filter(|_| sub.resting) {
                self.rest_until = queue.deadline(now).map_or(self.rest_until, |at| at.min(self.rest_until));
            }
        }
    }

    /// When something is to be done for a queue that rests, at the earliest.
    pub(super) fn rest_until(&self) -> Duration {
        self.rest_until
    }
}

impl Index<usize> for Subscribers {
    type Output = Subscriber;

    fn index(&self, index: usize) -> &Subscriber {
        &self.list[index]
    }
}

impl IndexMut<usize> for Subscribers {
    fn index_mut(&mut self, index: usize) -> &mut Subscriber {
        &mut self.list[index]
    }
}
