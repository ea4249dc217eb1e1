//! All interleavings of the doorbell: writers that look and ring, relays of which one is the keeper, that fall asleep, wake, give way, die and
//! stand still. Where nothing more happens by itself, every relay that lives knows every event that was committed.

use std::collections::HashSet;

/// A deliberately wrong doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    /// Who is writing when a relay falls asleep is not watched.
    NoLeftovers,
    /// Who is writing is read before the bell's lock is taken.
    WritersBeforeBell,
    /// The poll that is rung for comes before the bell's lock.
    PollBeforeBell,
    /// A writer looks before it has its lock on the table.
    LookBeforeTable,
    /// An awake keeper keeps what it finds to itself.
    NoPass,
    /// Who becomes the keeper, or falls asleep, passes nothing on.
    NoPassAtSleep,
    /// The end of a writer that did not ring is not passed on.
    NoPassAtEnd,
    /// A relay that wakes counts as awake only after writers have stopped to ring.
    AwakeTooLate,
}

const WRONG: [Wrong; 8] = [
    Wrong::NoLeftovers,
    Wrong::WritersBeforeBell,
    Wrong::PollBeforeBell,
    Wrong::LookBeforeTable,
    Wrong::NoPass,
    Wrong::NoPassAtSleep,
    Wrong::NoPassAtEnd,
    Wrong::AwakeTooLate,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Writer {
    Idle,
    /// Has its lock on the table, and has drawn a position.
    Writes,
    /// Has looked; whether it rings at its commit. Before its lock on the table: only where that is wrong.
    Looked {
        rings: bool,
        writes: bool,
    },
    /// Its rows can be seen, and it still has its lock.
    Visible,
    Ended,
    Aborted,
}

impl Writer {
    fn is_visible(self) -> bool {
        matches!(self, Writer::Visible | Writer::Ended)
    }

    fn has_lock(self) -> bool {
        matches!(self, Writer::Writes | Writer::Looked { writes: true, .. } | Writer::Visible)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Guest,
    /// The keeper, about to take the bell's lock.
    TakesBell,
    /// The keeper with the bell's lock, about to look who writes.
    LooksWho,
    Asleep,
    Awake,
    /// Nobody rings any more, and it does not know that it is awake: only where that is wrong.
    Wakes,
    /// Keeps what it has and does nothing, for ever: it has nothing to tell anybody.
    StandsStill,
    /// The same until its sessions are ended, as those of every relay that gives no sign of life.
    Doomed,
    Dead,
}

impl Part {
    /// Does nothing by itself.
    fn is_still(self) -> bool {
        matches!(self, Part::StandsStill | Part::Doomed | Part::Dead)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Relay {
    part: Part,
    /// The events that its last poll showed, one bit each.
    seen: u8,
    /// The writers that it watches.
    left: u8,
    rung: bool,
    /// Something is to be passed on.
    pass: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    bell: Option<usize>,
    keeper: Option<usize>,
    writers: Vec<Writer>,
    relays: Vec<Relay>,
    /// How often a relay may still wake, give way, die or stand still.
    wakes: u8,
    gives: u8,
    deaths: u8,
    stops: u8,
}

fn bits(writers: &[Writer], has: impl Fn(Writer) -> bool) -> u8 {
    writers.iter().enumerate().filter(|(_, writer)| has(**writer)).map(|(index, _)| 1 << index).sum()
}

impl State {
    fn relay(&self, index: usize, change: impl FnOnce(&mut Relay)) -> State {
        let mut next = self.clone();
        change(&mut next.relays[index]);
        next
    }

    fn writer(&self, index: usize, to: Writer) -> State {
        let mut next = self.clone();
        next.writers[index] = to;
        next
    }

    fn ring(mut self, but: Option<usize>) -> State {
        let relays = self.relays.iter_mut().enumerate().filter(|(index, _)| Some(*index) != but);
        relays.for_each(|(_, relay)| relay.rung = true);
        self
    }

    fn free(mut self, index: usize) -> State {
        self.bell = self.bell.filter(|holder| *holder != index);
        self.keeper = self.keeper.filter(|holder| *holder != index);
        self
    }

    /// What may happen next, and whether it has to in the end.
    fn next(&self, wrong: Option<Wrong>) -> Vec<(State, bool)> {
        let mut next = Vec::new();
        for (index, writer) in self.writers.iter().enumerate() {
            let rings = self.bell.is_some();
            let to = match *writer {
                Writer::Idle if wrong == Some(Wrong::LookBeforeTable) => Writer::Looked { rings, writes: false },
                Writer::Idle => Writer::Writes,
                Writer::Writes => Writer::Looked { rings, writes: true },
                Writer::Looked { rings, writes: false } => Writer::Looked { rings, writes: true },
                Writer::Looked { rings, .. } => {
                    let visible = self.writer(index, Writer::Visible);
                    next.push((if rings { visible.ring(None) } else { visible }, true));
                    Writer::Aborted
                }
                Writer::Visible => Writer::Ended,
                Writer::Ended | Writer::Aborted => continue,
            };
            next.push((self.writer(index, to), true));
        }
        for index in 0..self.relays.len() {
            self.next_of(index, wrong, &mut next);
        }
        next
    }

    fn next_of(&self, index: usize, wrong: Option<Wrong>, next: &mut Vec<(State, bool)>) {
        let relay = self.relays[index];
        let visible = bits(&self.writers, Writer::is_visible);
        let writes = bits(&self.writers, Writer::has_lock);
        let is_wrong = |what| wrong == Some(what);
        let is_doomed = relay.part == Part::Doomed;
        if relay.part != Part::Dead && (self.deaths > 0 || is_doomed) {
            let mut dead = self.relay(index, |relay| {
                *relay = Relay { part: Part::Dead, seen: 0, left: 0, rung: false, pass: false };
            });
            dead.deaths -= u8::from(!is_doomed);
            next.push((dead.free(index), is_doomed));
        }
        if relay.part.is_still() {
            return;
        }
        if self.stops > 0 {
            let mut still = self.relay(index, |relay| {
                let is_quiet = relay.part == Part::Asleep && relay.left == 0 && !relay.pass;
                relay.part = if is_quiet { Part::StandsStill } else { Part::Doomed };
            });
            still.stops -= 1;
            next.push((still, false));
        }
        if relay.rung {
            // What one that is awake finds, it passes on.
            let found = relay.part == Part::Awake && relay.seen != visible && !is_wrong(Wrong::NoPass);
            let polled = |relay: &mut Relay| {
                (relay.seen, relay.rung) = (visible, false);
                relay.pass |= found;
            };
            next.push((self.relay(index, polled), true));
        }
        if relay.pass && relay.part != Part::LooksWho {
            next.push((self.relay(index, |relay| relay.pass = false).ring(Some(index)), true));
        }
        if matches!(relay.part, Part::Asleep | Part::Awake) && self.gives > 0 {
            let mut guest = self.relay(index, |relay| (relay.part, relay.left) = (Part::Guest, 0));
            guest.gives -= 1;
            next.push((guest.free(index), false));
        }
        // It watches them also when it has woken meanwhile.
        if relay.left & !writes != 0 {
            let ended = |relay: &mut Relay| {
                (relay.left, relay.rung) = (relay.left & writes, true);
                relay.pass |= !is_wrong(Wrong::NoPassAtEnd);
            };
            next.push((self.relay(index, ended), true));
        }
        match relay.part {
            Part::Guest if self.keeper.is_none() => {
                let mut keeper = self.relay(index, |relay| relay.part = Part::TakesBell);
                keeper.keeper = Some(index);
                next.push((keeper, true));
            }
            Part::TakesBell => {
                let mut taken = self.relay(index, |relay| {
                    relay.part = Part::LooksWho;
                    if is_wrong(Wrong::WritersBeforeBell) {
                        relay.left = writes;
                    }
                });
                taken.bell = Some(index);
                // Whatever was wanted of it before, it looks first.
                if is_wrong(Wrong::WritersBeforeBell) {
                    taken.bell = None;
                } else if is_wrong(Wrong::PollBeforeBell) {
                    (taken.relays[index].seen, taken.relays[index].rung) = (visible, false);
                }
                next.push((taken, true));
            }
            Part::LooksWho => {
                let mut asleep = self.relay(index, |relay| {
                    relay.part = Part::Asleep;
                    relay.rung |= !is_wrong(Wrong::PollBeforeBell);
                    relay.pass |= !is_wrong(Wrong::NoPassAtSleep);
                    if !matches!(wrong, Some(Wrong::WritersBeforeBell | Wrong::NoLeftovers)) {
                        relay.left |= writes;
                    }
                });
                asleep.bell = Some(index);
                next.push((asleep, true));
            }
            Part::Asleep => {
                if self.wakes > 0 {
                    let part = if is_wrong(Wrong::AwakeTooLate) { Part::Wakes } else { Part::Awake };
                    let mut awake = self.relay(index, |relay| (relay.part, relay.rung) = (part, true));
                    (awake.bell, awake.wakes) = (None, awake.wakes - 1);
                    next.push((awake, false));
                }
            }
            Part::Awake => {
                if relay.seen != visible {
                    next.push((self.relay(index, |relay| relay.rung = true), true));
                }
                // As long as events move it need not.
                next.push((self.relay(index, |relay| relay.part = Part::TakesBell), false));
            }
            Part::Wakes => next.push((self.relay(index, |relay| relay.part = Part::Awake), true)),
            Part::Guest | Part::StandsStill | Part::Doomed | Part::Dead => {}
        }
    }
}

/// How many states there are, or one in which somebody waits for an event that nobody will tell of.
fn explore(start: State, wrong: Option<Wrong>) -> Result<usize, Box<State>> {
    let mut known = HashSet::from([start.clone()]);
    let mut left = vec![start];
    while let Some(state) = left.pop() {
        let next = state.next(wrong);
        if !next.iter().any(|(_, must)| *must) {
            let visible = bits(&state.writers, Writer::is_visible);
            let waits = |relay: &Relay| !relay.part.is_still() && relay.seen != visible;
            if state.relays.iter().any(waits) {
                return Err(Box::new(state));
            }
        }
        for (state, _) in next {
            if known.insert(state.clone()) {
                left.push(state);
            }
        }
    }
    Ok(known.len())
}

fn start(writers: usize, relays: usize, [wakes, gives, deaths, stops]: [u8; 4]) -> State {
    // Nobody has polled yet.
    let relay = Relay { part: Part::Guest, seen: 0, left: 0, rung: true, pass: false };
    State {
        bell: None,
        keeper: None,
        writers: vec![Writer::Idle; writers],
        relays: vec![relay; relays],
        wakes,
        gives,
        deaths,
        stops,
    }
}

/// Writers, relays, and how often a relay wakes, gives way, dies and stands still.
const WALKS: [(usize, usize, [u8; 4]); 5] =
    [(3, 1, [2, 1, 0, 0]), (2, 2, [2, 0, 1, 0]), (2, 2, [1, 1, 0, 1]), (2, 2, [0, 1, 1, 0]), (2, 3, [1, 0, 1, 0])];

#[test]
fn no_event_is_left_that_nobody_tells_of() {
    for (writers, relays, budget) in WALKS {
        match explore(start(writers, relays, budget), None) {
            Ok(states) => {
                eprintln!("{writers} writers, {relays} relays, {budget:?}: {states} states");
                assert!(states > 1_000, "it explores");
            }
            Err(state) => panic!("{writers} writers, {relays} relays, {budget:?}: {state:#?}"),
        }
    }
}

#[test]
fn each_wrong_doorbell_leaves_one() {
    for wrong in WRONG {
        let found = WALKS
            .iter()
            .any(|(writers, relays, budget)| explore(start(*writers, *relays, *budget), Some(wrong)).is_err());
        assert!(found, "{wrong:?} is not found");
    }
}
