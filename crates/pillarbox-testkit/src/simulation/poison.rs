use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use pillarbox::engine::{Action, Engine, EngineConfig, Input, Mutant};
use pillarbox::sink::{Attempt, BatchId, Outcome, SinkFeatures};
use pillarbox::store::{Hello, InstanceId, StoreFeatures};
use pillarbox::{Failure, NewEvent, Position, Subscription, Timestamp};

use super::{Random, WALL_START};
use crate::MemoryLog;

/// How long a run lasts, and when the second poison event is published, in microseconds of virtual time.
const END: u64 = 600_000_000;
const SECOND_POISON: u64 = 300_000_000;

/// Low traffic past a receiver that fails on two events, each of a key of its own, as if it were down: what was broken, empty is good.
///
/// An event of any other key is sent when it is read, or after one other event has come back: the sink is never left alone for the sake
/// of the two.
pub fn simulate_poison(seed: u64, mutant: Option<Mutant>) -> Vec<String> {
    let mut world = World::new(seed, mutant);
    world.run();
    world.violations
}

enum Step {
    Publish,
    Poison,
    Tick,
    Arrive((usize, BatchId), Vec<Attempt>),
}

struct World {
    random: Random,
    log: MemoryLog,
    instance: InstanceId,
    engine: Engine,
    now: u64,
    /// When the engine wants to be stepped next.
    tick: u64,
    sequence: u64,
    steps: BTreeMap<(u64, u64), Step>,
    poison: Vec<Position>,
    /// Calls to the sink that are under way.
    at_sink: usize,
    /// What was published and not sent: how many calls have come back since, and whether one was under way then.
    waiting: HashMap<Position, (u32, bool)>,
    taken: usize,
    violations: Vec<String>,
}

impl World {
    fn new(seed: u64, mutant: Option<Mutant>) -> Self {
        let mut random = Random(seed);
        let log = MemoryLog::new();
        log.set_time(Timestamp(WALL_START));
        let spec = Subscription {
            lanes: 2,
            workers: random.between(3, 6) as usize,
            batch_size: random.between(1, 4) as usize,
            ..Subscription::new("s")
        };
        let sink = SinkFeatures { one_receiver: random.chance(50), ..SinkFeatures::default() };
        let hello = Hello { subscriptions: vec![spec.clone()], ..Hello::default() };
        let joined = log.join(hello).expect("the log takes every instance");
        let features = StoreFeatures { lock_proves_life: true, settle_interval: Duration::from_millis(20) };
        let config = EngineConfig { seed: random.next(), mutant, ..EngineConfig::default() };
        let instance = joined.instance;
        World {
            random,
            log,
            instance,
            engine: Engine::new(config, Duration::ZERO, &joined, features, vec![(spec, sink)]),
            now: 0,
            tick: 0,
            sequence: 0,
            steps: BTreeMap::new(),
            poison: Vec::new(),
            at_sink: 0,
            waiting: HashMap::new(),
            taken: 0,
            violations: Vec::new(),
        }
    }

    fn after(&mut self, low: u64, high: u64, step: Step) {
        self.sequence += 1;
        let at = self.now + self.random.between(low, high);
        self.steps.insert((at, self.sequence), step);
    }

    fn run(&mut self) {
        self.step(Input::Tick);
        self.after(1_000_000, 2_000_000, Step::Poison);
        self.after(SECOND_POISON, SECOND_POISON, Step::Poison);
        self.after(1_000_000, 60_000_000, Step::Publish);
        while let Some(((at, _), step)) = self.steps.pop_first() {
            if at > END || !self.violations.is_empty() {
                break;
            }
            self.now = at;
            match step {
                Step::Publish => {
                    self.publish("good");
                    self.after(100_000, 20_000_000, Step::Publish);
                }
                Step::Poison => self.publish("poison"),
                Step::Tick if self.tick == at => self.step(Input::Tick),
                Step::Tick => {}
                Step::Arrive(batch, events) => self.arrive(batch, &events),
            }
        }
        if self.taken < 10 && self.violations.is_empty() {
            self.violations.push(format!("only {} events were taken", self.taken));
        }
    }

    /// An event of a key of its own; it is read at once.
    fn publish(&mut self, r#type: &str) {
        let key = format!("k{}", self.log.horizon() + 1);
        let position = self.log.publish([NewEvent::new("t", r#type).key(key)])[0];
        if r#type == "poison" {
            self.poison.push(position);
        } else {
            self.waiting.insert(position, (0, self.at_sink > 0));
        }
        self.step(Input::Rang);
        if self.waiting.get(&position) == Some(&(0, false)) {
            self.violation(format!("{position} was not sent though nothing was at the sink"));
        }
    }

    fn arrive(&mut self, batch: (usize, BatchId), events: &[Attempt]) {
        self.at_sink -= 1;
        self.waiting.values_mut().for_each(|waits| waits.0 += 1);
        let outcome = |attempt: &Attempt| match self.poison.contains(&attempt.event.position) {
            true => Outcome::Failed(Failure { kind: "server_error", ..Failure::sink("500") }),
            false => Outcome::Delivered,
        };
        let outcomes: Vec<Outcome> = events.iter().map(outcome).collect();
        self.taken += outcomes.iter().filter(|outcome| **outcome == Outcome::Delivered).count();
        self.step(Input::Delivered { batch, outcomes });
        let held: Vec<Position> = self.waiting.iter().filter(|waits| waits.1.0 > 1).map(|waits| *waits.0).collect();
        if !held.is_empty() {
            self.violation(format!("{held:?} were held back for more than one call"));
        }
    }

    fn violation(&mut self, text: String) {
        self.violations.push(format!("at {} us: {text}", self.now));
    }

    /// Steps the engine; the database answers at once.
    fn step(&mut self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            self.log.set_time(Timestamp(WALL_START + (self.now / 1000) as i64));
            let actions = self.engine.step(Duration::from_micros(self.now), input);
            actions.into_iter().for_each(|action| inputs.extend(self.act(action)));
        }
        let tick = self.engine.deadline(Duration::from_micros(self.now)).as_micros() as u64 + 1;
        if self.tick != tick {
            self.tick = tick;
            self.after(tick - self.now, tick - self.now, Step::Tick);
        }
    }

    fn act(&mut self, action: Action) -> Option<Input> {
        let answer = match action {
            Action::Observe(report) => self.log.observe(self.instance, &report).map(Input::Observed),
            Action::Take(lanes) => self.log.take(self.instance, &lanes).map(Input::Taken),
            Action::Load(lanes) => self.log.load(self.instance, &lanes).map(Input::Loaded),
            Action::Poll(request) => self.log.poll(&request).map(Input::Polled),
            Action::Fetch(positions) => self.log.fetch(&positions).map(Input::Fetched),
            Action::Settle(settlement) => self.log.settle(self.instance, &settlement).map(Input::Settled),
            Action::Deliver { batch, events } => {
                self.at_sink += 1;
                events.iter().for_each(|attempt| _ = self.waiting.remove(&attempt.event.position));
                let slow = events.iter().any(|attempt| self.poison.contains(&attempt.event.position));
                self.after(1_000, if slow { 3_000_000 } else { 50_000 }, Step::Arrive(batch, events));
                return None;
            }
            other => unreachable!("nobody asks for {other:?} here"),
        };
        Some(answer.expect("the log in memory takes every call"))
    }
}
