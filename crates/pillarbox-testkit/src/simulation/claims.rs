use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::admin::Change;
use pillarbox::engine::Input;
use pillarbox::sink::{Attempt, Outcome};
use pillarbox::store::{
    ClaimEnd, ClaimFate, ClaimId, ClaimRequest, InstanceId, RecoverRequest, RecoveryCause, Settlement,
};
use pillarbox::{Position, Result};
use uuid::Uuid;

use super::{Held, JOBS, NODES, Node, SUBSCRIPTIONS, Ticket, World};

/// What the queue promises beyond what every subscription does: never two at work on a key in the whole fleet, but where the one that
/// began first has lost its right to it.
impl World {
    pub(super) fn claim(&mut self, instance: InstanceId, requests: &[ClaimRequest]) -> Result<Input> {
        let answers = self.log.claim(instance, requests)?;
        for claimed in answers.iter().flat_map(|claims| &claims.claimed) {
            self.run.claims += 1;
            // Asked again, what was taken from it before the first answer may be claimed under the same number.
            self.expired.remove(&(instance, claimed.claim));
        }
        Ok(Input::Claimed(answers))
    }

    pub(super) fn finish_claims(&mut self, instance: InstanceId, ends: &[ClaimEnd]) -> Result<Input> {
        let ended = self.end_claims(instance, ends)?;
        self.run.refused += ended.iter().filter(|ended| !**ended).count();
        Ok(Input::Finished(ended))
    }

    /// Nobody ends a claim that is not its own any more.
    fn end_claims(&mut self, instance: InstanceId, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        let before = self.claims();
        let ended = self.log.finish(instance, ends)?;
        for (end, _) in ends.iter().zip(&ended).filter(|(_, ended)| **ended) {
            if !before.contains(&(end.position, instance, end.claim)) {
                self.violation(format!("{instance:?} ended {end:?}, which had been taken from it"));
            }
        }
        Ok(ended)
    }

    /// Whoever loses a claim because its lease is over does not work on it any more, unless it stands still itself; and nobody loses
    /// one as dead whose lock can be seen to be held.
    pub(super) fn recover(&mut self, request: &RecoverRequest) -> Result<Input> {
        let before = self.claims();
        let beats = self.log.inner().beats();
        let lives = |owner: &InstanceId| {
            let seen = request.silent.iter().find(|(silent, ..)| silent == owner).map(|(_, beat, _)| *beat);
            beats.get(owner).is_some_and(|(beat, _)| seen != Some(*beat))
        };
        let recovered = self.log.recover(request)?;
        let left = self.claims();
        self.run.recovered += before.difference(&left).count();
        for (position, owner, claim) in before.difference(&left) {
            let dead = request.ended.iter().find(|(dead, ..)| dead == owner);
            let cause = dead.map(|(_, cause, _)| *cause);
            let Some(node) = self.nodes.iter().position(|node| node.runs_as(*owner)) else { continue };
            let mut held = self.nodes[node].at_sink.values().flatten().filter(|held| !held.given_up);
            let works = held.any(|held| self.is(held, *position));
            match cause {
                Some(RecoveryCause::Lease) => {
                    self.expired.insert((*owner, *claim));
                    if works {
                        self.violation(format!("node {node} works on {position}, and its lease is over"));
                    }
                }
                Some(RecoveryCause::Crash) => {
                    self.violation(format!("node {node} lives, and {position} was recovered from it"));
                }
                None if lives(owner) => {
                    self.violation(format!("node {node} has beaten, and a sweep took {position} from it"));
                }
                _ => {}
            }
        }
        Ok(Input::Recovered(recovered))
    }

    /// A handler that settles by itself: what it does and the end of its claim are one transaction.
    pub(super) fn transact(&mut self, ticket: Ticket, attempt: &Attempt) -> Outcome {
        let (Some(claim), Some(instance)) = (attempt.claim, self.nodes[ticket.node].instance) else {
            self.violation(format!("{} came without a claim to a handler that settles", attempt.event.position));
            return Outcome::NotTried;
        };
        // What a dead process has sent is carried out or not; under another instance it would be refused anyway.
        if self.nodes[ticket.node].life != ticket.life {
            return Outcome::NotTried;
        }
        let end =
            ClaimEnd { subscription: self.ids[JOBS], position: attempt.event.position, claim, fate: ClaimFate::Done };
        match self.end_claims(instance, &[end]) {
            Ok(ended) if ended == [true] => Outcome::Delivered,
            _ => {
                self.run.refused += 1;
                Outcome::NotTried
            }
        }
    }

    /// No other handler in the fleet that still has the right to one of these keys works on it.
    pub(super) fn check_jobs(&mut self, ticket: Ticket, begun: &[Held]) {
        let claims = self.claims();
        let me = &self.nodes[ticket.node];
        let mut violations = Vec::new();
        for held in begun.iter().filter(|held| held.key.is_some()) {
            let late = held.claim.zip(me.instance).is_some_and(|(claim, me)| self.expired.contains(&(me, claim)));
            if late {
                violations.push(format!("node {} begins {held:?}, and its lease is over", ticket.node));
            }
            if !self.has_right(me, held, &claims) {
                // It was taken away while the answer was on its way.
                continue;
            }
            for (number, node) in self.nodes.iter().enumerate() {
                let current = node.at_sink.iter().filter(|((life, batch), _)| *life == node.life && batch.0 == JOBS);
                let others = current.flat_map(|(_, held)| held).filter(|other| other.key == held.key);
                let working = others.filter(|other| self.has_right(node, other, &claims));
                violations.extend(working.map(|other| {
                    format!("node {} begins {held:?} while node {number} works on {other:?}", ticket.node)
                }));
            }
        }
        violations.into_iter().for_each(|text| self.violation(text));
    }

    /// Whether what a node works on is still its own: its claim, or without a row whatever its lane has read.
    fn has_right(&self, node: &Node, held: &Held, claims: &BTreeSet<(Position, InstanceId, ClaimId)>) -> bool {
        let Some(me) = node.instance else { return false };
        if claims.iter().any(|(position, owner, _)| *position == held.position && *owner == me) {
            return true;
        }
        !self.has_had_row(held) && self.log.owns(me, held.lane, held.epoch)
    }

    fn is(&self, held: &Held, position: Position) -> bool {
        held.position == position && held.lane.subscription == self.ids[JOBS]
    }

    fn claims(&self) -> BTreeSet<(Position, InstanceId, ClaimId)> {
        self.log.claims().into_iter().map(|(_, position, owner, claim)| (position, owner, claim)).collect()
    }

    /// Whoever gives a lane back has nothing of it at a sink, but for what has a row.
    pub(super) fn check_releases(&mut self, node: usize, settlement: &Settlement) {
        for write in &settlement.lanes {
            let claimed = write.queue.iter().filter(|queued| queued.claim.is_some());
            self.rowed.extend(claimed.map(|queued| (write.lane, write.epoch, queued.delivery.position)));
        }
        let released = |held: &&Held| {
            let mut writes = settlement.lanes.iter().filter(|write| write.release);
            writes.any(|write| write.lane == held.lane && write.epoch == held.epoch)
        };
        let at_sink = self.nodes[node].at_sink.values().flatten();
        let bare = at_sink.filter(released).filter(|held| !self.has_had_row(held));
        let left: Vec<Position> = bare.map(|held| held.position).collect();
        if !left.is_empty() {
            self.violation(format!("node {node} gave a lane back with {left:?} at the sink"));
        }
    }

    fn has_had_row(&self, held: &Held) -> bool {
        held.claim.is_some() || self.rowed.contains(&(held.lane, held.epoch, held.position))
    }

    pub(super) fn recover_by_operator(&mut self) -> Change {
        let node = self.random.below(NODES as u64 + 1) as usize;
        let instance = self.nodes.get(node).and_then(|node| node.instance);
        let silent_for = Duration::from_millis([0, 300, 1_000][self.random.below(3) as usize]);
        Change::Recover { subscription: Some(SUBSCRIPTIONS[JOBS].into()), instance, silent_for }
    }

    pub(super) fn a_claimed_event(&mut self) -> Option<Uuid> {
        let claims = self.log.claims();
        let chosen = self.random.below(claims.len() as u64) as usize;
        let position = claims.get(chosen)?.1;
        Some(self.log.visible().into_iter().find(|event| event.position == position)?.id)
    }
}

impl Node {
    /// Whether it lives, has not lost its connection, and does not stand still.
    fn runs_as(&self, instance: InstanceId) -> bool {
        self.instance == Some(instance) && self.engine.is_some() && !self.ended && !self.frozen
    }
}
