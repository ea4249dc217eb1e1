use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::engine::{Action, Call, Engine, EngineConfig, Input, Mutant};
use pillarbox::{
    Attempt, BatchId, Change, Event, Failure, Hello, InstanceId, NewEvent, Now, OnDead, Outcome, Position, Result,
    RetryPolicy, Selection, SinkFeatures, Start, State, StoreFeatures, Subscription, Timestamp,
};
use uuid::Uuid;

use crate::{Broken, MemoryLog, MemoryOptions, PollSteps, Tx};

/// The whole engine on a virtual clock, over the in-memory store, with everything that can go wrong drawn from a seed: late
/// commits, aborts, crashes at every step, calls that fail before or after they happened, frozen instances that lose their
/// lease and come back, power losses of the database, failing and dead sinks, clock jumps, and operators that interfere.
///
/// One seed is one run, bit for bit: [`Run::trace`] is the hash of all that happened.
pub fn simulate(seed: u64, plan: Plan) -> Run {
    let mut world = World::new(seed, plan);
    world.run();
    world.finish()
}

/// What to simulate.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plan {
    /// A broken engine.
    pub mutant: Option<Mutant>,
    /// A broken store.
    pub broken: Option<Broken>,
    /// No faults and no operators: then nothing may arrive twice.
    pub calm: bool,
    /// Print everything that happens.
    pub print: bool,
}

/// What a simulation found.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The hash of everything that happened.
    pub trace: u64,
    /// Broken promises; empty is good.
    pub violations: Vec<String>,
    /// Events committed and not lost to a power loss.
    pub committed: usize,
    /// First arrivals.
    pub arrived: usize,
    /// Further arrivals.
    pub duplicates: usize,
    /// Instances killed or frozen.
    pub faults: usize,
    /// The most events that were at sinks at the same time.
    pub parallel: usize,
}

const NODES: usize = 3;
const KEYS: u64 = 6;
/// Faults stop and writers end here, in microseconds of virtual time.
const FAULTS_UNTIL: u64 = 8_000_000;
/// Everything must have arrived by then.
const END: u64 = 120_000_000;
const WALL_START: i64 = 1_700_000_000_000;

/// splitmix64
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Debug)]
enum Step {
    /// A publisher begins a transaction.
    Begin,
    Insert(Tx),
    End(Tx),
    Tick(Ticket),
    Execute(Ticket, Box<Request>),
    Poll(Ticket, Box<PollSteps>),
    Answer(Ticket, Box<Input>),
    Arrive(Ticket, (usize, BatchId), Vec<Attempt>),
    Ring(Ticket),
    Fault,
    Operate,
    Restart(usize),
    Thaw(Ticket),
    Heal,
    Check,
}

/// Which life of which node a step belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ticket {
    node: usize,
    life: u64,
}

#[derive(Debug)]
enum Request {
    Observe(pillarbox::Report),
    Take(Vec<pillarbox::Take>),
    Load(Vec<(pillarbox::LaneRef, i64)>),
    Fetch(Vec<Position>),
    Settle(pillarbox::Settlement),
}

#[derive(Debug, Default)]
struct Node {
    life: u64,
    engine: Option<Engine>,
    instance: Option<InstanceId>,
    started: u64,
    frozen: bool,
    /// When the engine wants to be stepped next.
    tick: u64,
    /// What reached the node while it was frozen.
    held: Vec<Input>,
    /// Keys at the sink, by subscription, to see that no two batches hold one.
    at_sink: HashMap<(usize, BatchId), Vec<Option<Box<str>>>>,
}

struct World {
    plan: Plan,
    random: Random,
    log: MemoryLog,
    features: StoreFeatures,
    now: u64,
    wall_offset: i64,
    sequence: u64,
    queue: BTreeMap<(u64, u64), Step>,
    nodes: Vec<Node>,
    open: HashSet<Tx>,
    trace: u64,
    run: Run,
    /// Committed events by id, with the order in which they became visible.
    visible: HashMap<Uuid, (u64, Arc<Event>)>,
    by_key: HashMap<Box<str>, Vec<Uuid>>,
    arrived: Vec<HashSet<Uuid>>,
    attempts: HashMap<(usize, Uuid), u32>,
    /// How often the sink of the second subscription refused an event; often enough to make it dead counts as three.
    refused: HashMap<Uuid, u32>,
    /// What an operator skipped, for good or until a rewind.
    skipped: HashSet<(usize, Uuid)>,
    sink_down: [bool; 2],
    floors: HashMap<(String, u32), Position>,
    rewound: bool,
    healed: bool,
}

fn subscriptions() -> Vec<(Subscription, SinkFeatures)> {
    let retry = RetryPolicy {
        max_attempts: 3,
        base: Duration::from_millis(100),
        cap: Duration::from_millis(400),
        jitter: true,
        min_dead_age: Duration::ZERO,
    };
    let all = Subscription { lanes: 3, retry, workers: 3, batch_size: 4, ..Subscription::new("all") };
    let some = Subscription {
        lanes: 2,
        retry,
        workers: 2,
        batch_size: 3,
        on_dead: OnDead::Skip,
        ..Subscription::new("some").topics(["b", "c.*"])
    };
    vec![
        (all, SinkFeatures { ordered_batch: true, one_by_one: false }),
        (some, SinkFeatures { ordered_batch: false, one_by_one: true }),
    ]
}

impl World {
    fn new(seed: u64, plan: Plan) -> Self {
        let mut random = Random(seed);
        let options =
            MemoryOptions { lock_proves_life: random.chance(30), broken: plan.broken, ..MemoryOptions::default() };
        let features = StoreFeatures {
            lock_proves_life: options.lock_proves_life,
            settle_interval: Duration::from_millis(random.below(20)),
        };
        let mut world = World {
            plan,
            random,
            log: MemoryLog::with(options),
            features,
            now: 0,
            wall_offset: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            nodes: (0..NODES).map(|_| Node::default()).collect(),
            open: HashSet::new(),
            trace: 0xcbf2_9ce4_8422_2325,
            run: Run::default(),
            visible: HashMap::new(),
            by_key: HashMap::new(),
            arrived: vec![HashSet::new(); 2],
            attempts: HashMap::new(),
            refused: HashMap::new(),
            skipped: HashSet::new(),
            sink_down: [false; 2],
            floors: HashMap::new(),
            rewound: false,
            healed: false,
        };
        for node in 0..NODES {
            let at = world.random.below(300_000);
            world.at(at, Step::Restart(node));
        }
        (0..3).for_each(|_| world.after(0, 100_000, Step::Begin));
        if !plan.calm {
            world.after(100_000, 800_000, Step::Fault);
            world.after(100_000, 800_000, Step::Operate);
        }
        world.at(FAULTS_UNTIL, Step::Heal);
        world
    }

    fn at(&mut self, at: u64, step: Step) {
        self.sequence += 1;
        self.queue.insert((at.max(self.now), self.sequence), step);
    }

    fn after(&mut self, low: u64, high: u64, step: Step) {
        let at = self.now + self.random.between(low, high);
        self.at(at, step);
    }

    fn note(&mut self, text: &str) {
        if self.plan.print {
            println!("{:>10} {text}", self.now);
        }
        for byte in self.now.to_le_bytes().iter().chain(text.as_bytes()) {
            self.trace = (self.trace ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn violation(&mut self, text: String) {
        let text = format!("at {} us: {text}", self.now);
        self.note(&text);
        self.run.violations.push(text);
    }

    fn wall(&self) -> Timestamp {
        Timestamp(WALL_START + self.wall_offset + (self.now / 1000) as i64)
    }

    fn run(&mut self) {
        while let Some(((at, _), step)) = self.queue.pop_first() {
            if at > END || self.run.violations.len() > 3 {
                break;
            }
            self.now = at;
            self.log.set_time(self.wall());
            if matches!(step, Step::Check) && self.is_done() {
                break;
            }
            self.take(step);
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Begin => self.begin(),
            Step::Insert(tx) => self.insert(tx),
            Step::End(tx) => self.end(tx),
            Step::Restart(node) => self.restart(node),
            Step::Tick(ticket) if self.nodes[ticket.node].tick == self.now => self.input(ticket, Input::Tick),
            Step::Tick(_) => {}
            Step::Ring(ticket) => self.input(ticket, Input::Rang),
            Step::Execute(ticket, request) => self.execute(ticket, *request),
            Step::Poll(ticket, steps) => self.poll_step(ticket, *steps),
            Step::Answer(ticket, input) => self.input(ticket, *input),
            Step::Arrive(ticket, batch, events) => self.arrive(ticket, batch, &events),
            Step::Fault => self.fault(),
            Step::Operate => self.operate(),
            Step::Thaw(ticket) => self.thaw(ticket),
            Step::Heal => self.heal(),
            Step::Check => self.after(500_000, 500_000, Step::Check),
        }
    }

    // --- publishers ---

    fn begin(&mut self) {
        let tx = self.log.begin();
        self.open.insert(tx);
        self.after(0, 5_000, Step::Insert(tx));
        if self.now < FAULTS_UNTIL {
            self.after(1_000, 150_000, Step::Begin);
        }
    }

    fn insert(&mut self, tx: Tx) {
        if !self.open.contains(&tx) {
            return;
        }
        let topic = ["a", "b", "c.x"][self.random.below(3) as usize];
        let mut event = NewEvent::new(topic, "happened");
        if self.random.chance(90) {
            event = event.key(format!("k{}", self.random.below(KEYS)));
        }
        if self.random.chance(5) {
            event = event.deliver_at(self.wall().plus(Duration::from_millis(self.random.below(3_000))));
        }
        let position = self.log.insert(tx, event);
        self.note(&format!("insert {position} by {tx:?}"));
        if self.random.chance(40) {
            return self.after(0, 20_000, Step::Insert(tx));
        }
        let held = if self.random.chance(8) { 2_000_000 } else { 30_000 };
        self.after(0, held, Step::End(tx));
    }

    fn end(&mut self, tx: Tx) {
        if !self.open.remove(&tx) {
            return;
        }
        if self.random.chance(15) {
            self.log.abort(tx);
            self.note(&format!("abort {tx:?}"));
            return;
        }
        let before: HashSet<Uuid> = self.visible.keys().copied().collect();
        self.log.commit(tx);
        self.note(&format!("commit {tx:?}"));
        let order = self.visible.len() as u64 + self.sequence;
        for event in self.log.visible() {
            if !before.contains(&event.id) {
                self.by_key.entry(event.key.clone().unwrap_or_default()).or_default().push(event.id);
                self.visible.insert(event.id, (order, event));
            }
        }
        self.ring();
    }

    fn ring(&mut self) {
        for node in 0..NODES {
            let ticket = Ticket { node, life: self.nodes[node].life };
            if !self.random.chance(5) {
                self.after(0, 3_000, Step::Ring(ticket));
            }
        }
    }

    // --- nodes ---

    fn restart(&mut self, node: usize) {
        if self.nodes[node].engine.is_some() {
            return;
        }
        let specs = subscriptions();
        let hello = Hello { subscriptions: specs.iter().map(|spec| spec.0.clone()).collect(), ..Hello::default() };
        let joined = self.log.join(hello).expect("the log takes every instance");
        let config = EngineConfig {
            lease_ttl: Duration::from_millis(600),
            beat_interval: Duration::from_millis(100),
            poll_interval: Duration::from_millis(500),
            page_size: self.random.between(1, 12) as usize,
            in_flight_max: self.random.between(8, 40) as usize,
            hole_scans_max: self.random.between(1, 8) as usize,
            ranges_max: self.random.between(20, 200) as usize,
            floor_interval: Duration::from_millis(300),
            seed: self.random.next(),
            mutant: self.plan.mutant,
            ..EngineConfig::default()
        };
        let engine = Engine::new(config, &joined, self.features, specs);
        let life = self.nodes[node].life + 1;
        self.note(&format!("restart {node} as {:?}", joined.instance));
        self.nodes[node] =
            Node { life, engine: Some(engine), instance: Some(joined.instance), started: self.now, ..Node::default() };
        self.input(Ticket { node, life }, Input::Tick);
    }

    fn clock(&self, node: usize) -> Now {
        Now { mono: Duration::from_micros(self.now - self.nodes[node].started), wall: self.wall() }
    }

    fn alive(&self, ticket: Ticket) -> bool {
        self.nodes[ticket.node].life == ticket.life && self.nodes[ticket.node].engine.is_some()
    }

    fn input(&mut self, ticket: Ticket, input: Input) {
        if !self.alive(ticket) {
            return;
        }
        if self.nodes[ticket.node].frozen {
            return self.nodes[ticket.node].held.push(input);
        }
        match &input {
            Input::Delivered { batch, .. } => drop(self.nodes[ticket.node].at_sink.remove(batch)),
            Input::HandedBack { batch, kept } => {
                self.nodes[ticket.node].at_sink.entry(*batch).and_modify(|keys| keys.truncate(*kept));
            }
            _ => {}
        }
        let now = self.clock(ticket.node);
        let engine = self.nodes[ticket.node].engine.as_mut().expect("alive");
        let actions = engine.step(now, input);
        let deadline = engine.deadline(now);
        for action in actions {
            self.act(ticket, action);
        }
        let tick = self.nodes[ticket.node].started + deadline.as_micros() as u64 + 1;
        if self.nodes[ticket.node].tick != tick {
            self.nodes[ticket.node].tick = tick;
            self.at(tick, Step::Tick(ticket));
        }
    }

    fn act(&mut self, ticket: Ticket, action: Action) {
        self.note(&format!("{} {action:?}", ticket.node));
        let request = match action {
            Action::Observe(report) => Request::Observe(report),
            Action::Take(lanes) => Request::Take(lanes),
            Action::Load(lanes) => Request::Load(lanes),
            Action::Fetch(positions) => Request::Fetch(positions),
            Action::Settle(settlement) => Request::Settle(settlement),
            Action::Poll(request) => {
                let steps = self.log.poll_steps(&request);
                return self.after(0, 2_000, Step::Poll(ticket, Box::new(steps)));
            }
            Action::Deliver { batch, events } => return self.deliver(ticket, batch, events),
            Action::Leave => {
                let node = &mut self.nodes[ticket.node];
                node.engine = None;
                return self.log.leave(node.instance.expect("a node that runs has joined")).expect("leaving works");
            }
        };
        self.after(0, 4_000, Step::Execute(ticket, Box::new(request)));
    }

    /// Calls may fail before they happen or after; the caller cannot tell.
    fn execute(&mut self, ticket: Ticket, request: Request) {
        let sent_by_dead = !self.alive(ticket);
        if sent_by_dead && self.random.chance(50) {
            return;
        }
        let Some(instance) = self.nodes[ticket.node].instance.filter(|_| !sent_by_dead) else { return };
        let call = match &request {
            Request::Observe(_) => Call::Observe,
            Request::Take(_) => Call::Take,
            Request::Load(_) => Call::Load,
            Request::Fetch(_) => Call::Fetch,
            Request::Settle(_) => Call::Settle,
        };
        let fails = !self.plan.calm && !self.healed && self.random.chance(4);
        if fails && self.random.chance(50) {
            return self.answer(ticket, Input::CallFailed(call));
        }
        let answer: Result<Input> = match request {
            Request::Observe(report) => self.log.observe(instance, &report).map(Input::Observed),
            Request::Take(lanes) => self.log.take(instance, &lanes).map(Input::Taken),
            Request::Load(lanes) => self.log.load(instance, &lanes).map(Input::Loaded),
            Request::Fetch(positions) => self.log.fetch(&positions).map(Input::Fetched),
            Request::Settle(settlement) => {
                let answer = self.log.settle(instance, &settlement).map(Input::Settled);
                self.check_floors();
                answer
            }
        };
        match answer {
            Ok(input) => self.answer(ticket, if fails { Input::CallFailed(call) } else { input }),
            // Buried by another instance: the process ends and comes back under a new number.
            Err(_) => self.kill(ticket.node),
        }
    }

    fn answer(&mut self, ticket: Ticket, input: Input) {
        self.after(0, 2_000, Step::Answer(ticket, Box::new(input)));
    }

    fn poll_step(&mut self, ticket: Ticket, mut steps: PollSteps) {
        if !self.alive(ticket) {
            return;
        }
        match steps.step(&self.log) {
            Ok(None) => self.after(0, 2_000, Step::Poll(ticket, Box::new(steps))),
            Ok(Some(page)) => self.answer(ticket, Input::Polled(page)),
            Err(_) => self.answer(ticket, Input::CallFailed(Call::Poll)),
        }
    }

    // --- sinks ---

    fn deliver(&mut self, ticket: Ticket, batch: (usize, BatchId), events: Vec<Attempt>) {
        let keys: Vec<Option<Box<str>>> = events.iter().map(|attempt| attempt.event.key.clone()).collect();
        let ordered = subscriptions()[batch.0].1.ordered_batch;
        let distinct: BTreeSet<_> = keys.iter().flatten().collect();
        let twice = !ordered && distinct.len() < keys.iter().flatten().count();
        let others = self.nodes[ticket.node].at_sink.iter().filter(|(other, _)| other.0 == batch.0);
        let held = others.flat_map(|(_, keys)| keys.iter().flatten()).any(|key| distinct.contains(key));
        if twice || held {
            self.violation(format!("node {} has a key at the sink twice: {keys:?}", ticket.node));
        }
        self.nodes[ticket.node].at_sink.insert(batch, keys);
        let parallel = self.nodes.iter().flat_map(|node| node.at_sink.values()).map(Vec::len).sum();
        self.run.parallel = self.run.parallel.max(parallel);
        let slow = if self.random.chance(5) { 400_000 } else { 10_000 };
        let mut events = events;
        // A worker that is held up by an event gives the rest of its batch back before that one arrives.
        if events.len() > 1 && self.random.chance(20) {
            let kept = self.random.between(1, events.len() as u64 - 1) as usize;
            events.truncate(kept);
            self.answer(ticket, Input::HandedBack { batch, kept });
            return self.after(4_000, 4_000 + slow, Step::Arrive(ticket, batch, events));
        }
        self.after(0, slow, Step::Arrive(ticket, batch, events));
    }

    fn arrive(&mut self, ticket: Ticket, batch: (usize, BatchId), events: &[Attempt]) {
        // A call that was sent may arrive, wholly or in part, though its sender is gone.
        let whole = self.alive(ticket);
        let count = if whole { events.len() } else { self.random.below(events.len() as u64 + 1) as usize };
        let mut failed: HashSet<Box<str>> = HashSet::new();
        let mut outcomes = Vec::new();
        for attempt in &events[..count] {
            let event = &attempt.event;
            if event.key.as_ref().is_some_and(|key| failed.contains(key)) {
                outcomes.push(Outcome::NotTried);
                continue;
            }
            let outcome = self.outcome(batch.0, event);
            match &outcome {
                Outcome::Failed(failure) => {
                    failed.extend(event.key.clone());
                    if batch.0 == 1 && failure.fault != pillarbox::Fault::Sink {
                        *self.refused.entry(event.id).or_default() += if failure.permanent { 3 } else { 1 };
                    }
                }
                Outcome::Delivered => self.arrived(batch.0, event),
                Outcome::NotTried => failed.extend(event.key.clone()),
            }
            outcomes.push(outcome);
        }
        self.note(&format!("arrive {ticket:?} {batch:?} {outcomes:?}"));
        self.answer(ticket, Input::Delivered { batch, outcomes });
    }

    fn outcome(&mut self, sub: usize, event: &Event) -> Outcome {
        if self.sink_down[sub] {
            return Outcome::Failed(Failure::sink("down"));
        }
        let tries = self.attempts.entry((sub, event.id)).or_default();
        *tries += 1;
        let draw = Random(event.position as u64 * 7 + sub as u64).next() % 100;
        match draw {
            0..8 if u64::from(*tries) <= draw => Outcome::Failed(Failure::event("refused")),
            8..11 if *tries == 1 => Outcome::Failed(Failure::unclear("timeout", "no answer")),
            11 if *tries == 1 => Outcome::Failed(Failure::permanent("malformed")),
            12..14 if *tries == 1 => Outcome::NotTried,
            _ => Outcome::Delivered,
        }
    }

    fn arrived(&mut self, sub: usize, event: &Arc<Event>) {
        if !self.arrived[sub].insert(event.id) {
            self.run.duplicates += 1;
            if self.plan.calm {
                self.violation(format!("{} came twice without any fault", event.position));
            }
            return;
        }
        let Some((order, _)) = self.visible.get(&event.id).cloned() else { return };
        let Some(key) = event.key.clone().filter(|_| event.deliver_at.is_none()) else { return };
        let wants = subscriptions().remove(sub).0.filter;
        let earlier: Vec<(Uuid, Position)> = self.by_key[&key]
            .iter()
            .filter_map(|id| self.visible.get(id))
            .filter(|(shown, other)| other.position < event.position && *shown < order && other.deliver_at.is_none())
            .filter(|(_, other)| wants.wants(other) && !self.arrived[sub].contains(&other.id))
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
        if sub == 1 && self.refused.get(&id).is_some_and(|refusals| *refusals >= 3) {
            return true;
        }
        if self.skipped.contains(&(sub, id)) {
            return true;
        }
        let Some(record) = self.log.show_event(id) else { return true };
        let Some(fate) = record.subscriptions.into_iter().find(|fate| fate.subscription == ["all", "some"][sub]) else {
            return false;
        };
        // An attempt that a crash ended is counted in the row and not by the sink; its last failure may not be written yet.
        let dead = |row: &pillarbox::DeliveryRecord| {
            row.state == State::Dead || (row.attempts >= 2 && self.refused.contains_key(&id))
        };
        sub == 1 && fate.delivery.as_ref().is_some_and(dead)
    }

    /// A floor never goes back, but by an operator's rewind.
    fn check_floors(&mut self) {
        for book in self.log.books().lanes {
            let floor = self.floors.entry((book.subscription.clone(), book.lane)).or_insert(book.floor);
            let before = *floor;
            *floor = book.floor;
            if book.floor < before && !self.rewound {
                self.violation(format!(
                    "the floor of {}/{} went back from {before} to {}",
                    book.subscription, book.lane, book.floor
                ));
            }
        }
        self.rewound = false;
    }

    // --- what goes wrong ---

    fn fault(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(50_000, 700_000, Step::Fault);
        let node = self.random.below(NODES as u64) as usize;
        match self.random.below(10) {
            0..3 => self.kill(node),
            3 => self.drain(node),
            4..7 => self.freeze(node),
            7 => {
                let sub = self.random.below(2) as usize;
                self.sink_down[sub] = !self.sink_down[sub];
            }
            8 => self.wall_offset += [-3_600_000, 3_600_000, -500, 500][self.random.below(4) as usize],
            _ if self.random.chance(30) => self.power_loss(),
            _ => {
                let ticket = Ticket { node, life: self.nodes[node].life };
                self.input(ticket, Input::Reconnected);
            }
        }
    }

    fn kill(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) else { return };
        self.run.faults += 1;
        self.note(&format!("kill {node}"));
        self.nodes[node].engine = None;
        self.nodes[node].frozen = false;
        self.nodes[node].at_sink.clear();
        self.log.kill(instance);
        self.after(1_000, 1_500_000, Step::Restart(node));
        self.ring();
    }

    /// A clean stop: what is at the sink is finished, the lanes are given back.
    fn drain(&mut self, node: usize) {
        self.note(&format!("drain {node}"));
        self.input(Ticket { node, life: self.nodes[node].life }, Input::Drain);
        self.after(1_000_000, 3_000_000, Step::Restart(node));
    }

    fn freeze(&mut self, node: usize) {
        let Some(instance) = self.nodes[node].instance.filter(|_| self.nodes[node].engine.is_some()) else { return };
        if self.nodes[node].frozen {
            return;
        }
        self.run.faults += 1;
        self.note(&format!("freeze {node}"));
        self.nodes[node].frozen = true;
        self.log.freeze(instance);
        let ticket = Ticket { node, life: self.nodes[node].life };
        self.after(10_000, 2_500_000, Step::Thaw(ticket));
    }

    fn thaw(&mut self, ticket: Ticket) {
        if !self.alive(ticket) || !self.nodes[ticket.node].frozen {
            return;
        }
        self.note(&format!("thaw {}", ticket.node));
        self.nodes[ticket.node].frozen = false;
        self.log.thaw(self.nodes[ticket.node].instance.expect("a node that runs has joined"));
        for input in std::mem::take(&mut self.nodes[ticket.node].held) {
            self.input(ticket, input);
        }
    }

    fn power_loss(&mut self) {
        self.note("power loss");
        for node in 0..NODES {
            self.kill(node);
        }
        self.open.clear();
        self.log.power_loss();
        let left: HashSet<Uuid> = self.log.visible().iter().map(|event| event.id).collect();
        self.visible.retain(|id, _| left.contains(id));
        self.by_key.values_mut().for_each(|ids| ids.retain(|id| left.contains(id)));
    }

    fn operate(&mut self) {
        if self.now >= FAULTS_UNTIL {
            return;
        }
        self.after(100_000, 1_500_000, Step::Operate);
        let subscription = ["all", "some"][self.random.below(2) as usize].to_owned();
        let change = match self.random.below(6) {
            0 => Change::Pause(subscription),
            1 => Change::Resume(subscription),
            2 | 3 => Change::Requeue { subscription, which: Selection::All, limit: self.random.between(1, 5) as usize },
            4 => {
                self.rewound = true;
                let to = self.random.below(self.log.horizon().max(1) as u64) as Position;
                Change::Rewind { subscription, to: Start::Position(to), key: None }
            }
            _ => {
                let dead = self.log.visible().into_iter().find(|event| {
                    let record = self.log.show_event(event.id).expect("just seen");
                    record.subscriptions.iter().any(|fate| {
                        fate.subscription == subscription
                            && fate.delivery.as_ref().is_some_and(|row| row.state == State::Dead)
                    })
                });
                let Some(event) = dead else { return };
                self.skipped.insert((usize::from(subscription == "some"), event.id));
                Change::Skip { subscription, event: event.id, reason: "simulated".into() }
            }
        };
        self.note(&format!("{change:?}"));
        // A change may be refused before the first instance has made the subscriptions.
        let _ = self.log.change(&change, false);
        if matches!(change, Change::Rewind { .. }) {
            self.check_floors();
        }
        self.ring();
    }

    // --- the end ---

    /// No more faults; everything that was committed has to arrive now.
    fn heal(&mut self) {
        self.note("heal");
        self.healed = true;
        self.sink_down = [false; 2];
        // Later than any time that was set while the clock jumped, so that everything is due.
        self.wall_offset = 1_000 * 3_600_000;
        for node in 0..NODES {
            let ticket = Ticket { node, life: self.nodes[node].life };
            self.thaw(ticket);
            self.at(self.now, Step::Restart(node));
        }
        for name in ["all", "some"] {
            let _ = self.log.change(&Change::Resume(name.into()), false);
        }
        self.after(500_000, 500_000, Step::Check);
    }

    fn is_done(&self) -> bool {
        let settled = |sub: usize| self.missing(sub).next().is_none();
        self.open.is_empty() && settled(0) && settled(1)
    }

    fn missing(&self, sub: usize) -> impl Iterator<Item = &Arc<Event>> {
        let filter = subscriptions().remove(sub).0.filter;
        let arrived = &self.arrived[sub];
        let waits = move |event: &&Arc<Event>| {
            filter.wants(event) && !arrived.contains(&event.id) && !self.is_blocked(sub, event)
        };
        self.visible.values().map(|entry| &entry.1).filter(waits)
    }

    /// Dead, skipped, or waiting behind a dead head: listed for an operator, so not lost.
    fn is_blocked(&self, sub: usize, event: &Event) -> bool {
        let name = ["all", "some"][sub];
        let record = self.log.show_event(event.id).expect("the event is visible");
        let Some(fate) = record.subscriptions.into_iter().find(|fate| fate.subscription == name) else { return false };
        let dead_head = |row: &pillarbox::DeliveryRecord| row.head.as_ref().is_some_and(|head| head.2 == State::Dead);
        fate.skipped.is_some()
            || fate
                .delivery
                .is_some_and(|row| row.state == State::Dead || (row.state == State::Blocked && dead_head(&row)))
    }

    fn finish(mut self) -> Run {
        for sub in 0..2 {
            let mut lost: Vec<Position> = self.missing(sub).map(|event| event.position).collect();
            lost.sort_unstable();
            if !lost.is_empty() {
                self.violation(format!("subscription {sub}: lost {lost:?}"));
            }
            let phantoms = self.arrived[sub].iter().filter(|id| !self.visible.contains_key(id)).count();
            if phantoms > 0 {
                self.violation(format!("subscription {sub}: {phantoms} events arrived that do not exist"));
            }
        }
        let dead = self.log.books().dead;
        let mut wrong: Vec<Position> =
            self.visible.values().map(|entry| entry.1.position).filter(|position| dead.contains(*position)).collect();
        wrong.sort_unstable();
        if !wrong.is_empty() {
            self.violation(format!("closed as dead and visible: {wrong:?}"));
        }
        self.run.trace = self.trace;
        self.run.committed = self.visible.len();
        self.run.arrived = self.arrived.iter().map(HashSet::len).sum();
        self.run
    }
}
