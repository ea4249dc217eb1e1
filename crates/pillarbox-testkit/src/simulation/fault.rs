use std::collections::HashSet;

use pillarbox::admin::{Change, Changed, Fate, Selection, State};
use pillarbox::engine::Input;
use pillarbox::{ErrorKind, Position, Start};
use uuid::Uuid;

use super::{FAULTS_UNTIL, JOBS, NODES, SUBSCRIPTIONS, Step, Ticket, World};

impl World {
    pub(super) fn fault(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(50_000, 700_000, Step::Fault);
        let node = self.random.below(NODES as u64) as usize;
        match self.random.below(13) {
            0..2 => self.kill(node),
            2..4 => self.lose(node),
            4 => self.drain(node),
            5..8 => self.freeze(node),
            8 => {
                let sub = self.random.below(SUBSCRIPTIONS.len() as u64) as usize;
                self.sink_down[sub] = !self.sink_down[sub];
            }
            // A receiver that refuses everything for a while, like after a bad deploy.
            12 => {
                let sub = self.random.below(SUBSCRIPTIONS.len() as u64) as usize;
                self.refuses_until[sub] = self.now + self.random.between(50_000, 600_000);
            }
            9 => {
                let by = [-3_600_000, 3_600_000, -500, 500][self.random.below(4) as usize];
                self.set_clock(by);
            }
            _ if self.random.chance(30) => self.power_loss(),
            _ => self.cut(node),
        }
    }

    /// The database's clock jumps by so many milliseconds.
    pub(super) fn set_clock(&mut self, by: i64) {
        self.wall_offsets.push((self.now, self.wall_offset));
        self.wall_offset += by;
    }

    pub(super) fn kill(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) else { return };
        self.run.faults += 1;
        self.note(format_args!("kill {node}"));
        self.nodes[node].engine = None;
        self.nodes[node].frozen = false;
        self.nodes[node].at_sink.clear();
        self.log.kill(instance);
        self.after(1_000, 1_500_000, Step::Restart(node));
        self.ring();
    }

    /// The connection of a node is lost for good; it notices when it next calls.
    fn lose(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) else { return };
        self.run.faults += 1;
        self.note(format_args!("lose {node}"));
        self.nodes[node].ended = true;
        self.log.kill(instance);
        self.ring();
    }

    /// A node cannot reach the database for a while, and everything else goes on.
    fn cut(&mut self, node: usize) {
        self.run.faults += 1;
        let until = self.now + self.random.between(10_000, 2_000_000);
        self.nodes[node].cut_until = until;
        self.note(format_args!("cut {node} until {until}"));
        if let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) {
            self.hold(instance);
            self.at(until, Step::Reconnect(instance));
        }
    }

    /// A clean stop: what is at the sink is finished, the lanes are given back.
    fn drain(&mut self, node: usize) {
        self.note(format_args!("drain {node}"));
        self.nodes[node].draining = true;
        self.input(Ticket { node, life: self.nodes[node].life }, Input::Drain);
        self.after(1_000_000, 3_000_000, Step::Restart(node));
    }

    fn freeze(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) else { return };
        if self.nodes[node].frozen {
            return;
        }
        self.run.faults += 1;
        self.note(format_args!("freeze {node}"));
        self.nodes[node].frozen = true;
        self.log.freeze(instance);
        self.hold(instance);
        let ticket = Ticket { node, life: self.nodes[node].life };
        self.after(10_000, 2_500_000, Step::Thaw(ticket));
    }

    pub(super) fn thaw(&mut self, ticket: Ticket) {
        if !self.alive(ticket) || !self.nodes[ticket.node].frozen {
            return;
        }
        self.note(format_args!("thaw {}", ticket.node));
        self.nodes[ticket.node].frozen = false;
        let instance = self.nodes[ticket.node].instance.expect("a node that runs has joined");
        self.log.release(instance);
        self.log.thaw(instance);
        for news in std::mem::take(&mut self.nodes[ticket.node].held) {
            self.news(ticket, news);
        }
    }

    fn power_loss(&mut self) {
        self.note(format_args!("power loss"));
        let database_only = self.random.chance(50);
        for node in 0..NODES {
            if database_only { self.lose(node) } else { self.kill(node) }
        }
        self.open.clear();
        self.log.power_loss();
        let left: HashSet<Uuid> = self.log.visible().iter().map(|event| event.id).collect();
        let pruned = &self.pruned;
        self.visible.retain(|id, _| left.contains(id) || pruned.contains(id));
        self.by_key.values_mut().for_each(|ids| ids.retain(|id| left.contains(id) || pruned.contains(id)));
    }

    pub(super) fn operate(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(100_000, 1_500_000, Step::Operate);
        let sub = self.random.below(SUBSCRIPTIONS.len() as u64) as usize;
        match self.random.below(100) {
            0..15 => return self.rewind_a_key(sub),
            15..25 => return self.begin_relane(sub),
            _ => {}
        }
        let Some(change) = self.choose_change(sub) else { return };
        self.change(sub, &change);
        if self.random.chance(10) {
            self.check_words();
        }
        self.ring();
    }

    pub(super) fn change(&mut self, sub: usize, change: &Change) {
        self.note(format_args!("{change:?}"));
        match self.log.change(change, false) {
            Ok(changed) => self.note_changed(sub, change, &changed),
            // A change is refused before the first instance has made the subscriptions, and where somebody holds a lock.
            Err(error) => self.run.locked_out += usize::from(error.kind() == ErrorKind::Busy),
        }
    }

    fn choose_change(&mut self, sub: usize) -> Option<Change> {
        let subscription = SUBSCRIPTIONS[sub].to_owned();
        Some(match self.random.below(if sub == JOBS { 9 } else { 6 }) {
            0 => Change::pause(subscription),
            1 => Change::Resume(subscription),
            2 | 3 => Change::Requeue { subscription, which: Selection::All, limit: self.random.between(1, 5) as usize },
            4 => {
                let to = self.random.below(self.log.horizon().max(1) as u64) as Position;
                Change::Rewind { subscription, to: Start::Position(to), key: None }
            }
            6 => self.recover_by_operator(),
            7 | 8 => {
                let event = self.a_claimed_event()?;
                Change::Requeue { subscription, which: Selection::Event(event), limit: 1 }
            }
            _ => {
                let visible: Vec<Uuid> = self.log.visible().iter().map(|event| event.id).collect();
                let fates = self.log.fates(&visible, &subscription);
                let is_dead = |fate: &Fate| fate.delivery.as_ref().is_some_and(|row| row.state == State::Dead);
                let dead = fates.iter().position(|fate| fate.as_ref().is_some_and(is_dead))?;
                Change::Skip { subscription, event: visible[dead], reason: "simulated".into() }
            }
        })
    }

    /// What an operator did counts from now on.
    fn note_changed(&mut self, sub: usize, change: &Change, changed: &Changed) {
        match change {
            Change::Pause { .. } => {
                self.paused[sub] = true;
                self.run.pauses += 1;
            }
            Change::Resume(_) => self.paused[sub] = false,
            Change::Requeue { .. } => self.requeued.extend(changed.events.iter().map(|id| (sub, *id))),
            Change::Skip { event, .. } => {
                self.skipped.insert((sub, *event));
                self.skips.insert((sub, *event));
            }
            Change::Rewind { to: Start::Position(to), .. } => {
                self.rewound = true;
                self.replayed |= sub == JOBS;
                self.judge_again(sub, *to);
                self.check_floors();
            }
            _ => {}
        }
    }

    /// Somebody resumes a subscription, whether it is paused or not.
    pub(super) fn resume(&mut self, sub: usize) {
        // There is none before the first instance has made it.
        if self.log.change(&Change::Resume(SUBSCRIPTIONS[sub].into()), false).is_ok() {
            self.paused[sub] = false;
        }
    }
}
