mod claims;
mod definition;
mod fault;
mod node;
mod poison;
mod pressure;
mod relane;
mod retention;
mod settlement;
mod sink;
mod trouble;
mod words;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::{DeliveryRecord, Fate, State};
use pillarbox::engine::{Engine, Input, Mutant};
use pillarbox::sink::{Attempt, BatchId, SinkFeatures};
use pillarbox::store::{BreakerReport, ClaimId, InstanceId, LaneRef, StoreFeatures, SubscriptionId};
use pillarbox::{Event, Filter, Mode, NewEvent, OnDead, Position, RetryPolicy, Subscription, Timestamp};
use uuid::Uuid;

use self::definition::{InForce, Judgement};
use self::node::News;
pub use self::poison::simulate_poison;
use self::pressure::Pressure;
use self::retention::Jump;
use self::trouble::Trouble;
pub use self::words::BrokenWords;
use crate::{Broken, MemoryLog, MemoryOptions, PollSteps, Tx};

/// The whole engine on a virtual clock, over the in-memory store, with everything that can go wrong drawn from a seed: late
/// commits, aborts, crashes at every step, calls that fail before or after they happened or hang, instances that are frozen or cut off
/// for longer than their lease, some of them inside a transaction, and come back, retention, lost connections, power losses of the database, failing and dead sinks, sinks that refuse
/// everything or want nothing more, clock jumps, relays that are started with other configurations than those that run,
/// holds that are over, and operators that interfere, also with the number of lanes. What `why`, `audit` and `status` say must be what has
/// happened. Two subscriptions are streams, the third is a queue
/// with slow handlers; in every other run these settle by themselves, in one transaction with what they do. Every fourth run is under
/// pressure: hundreds of keys, bursts, slow sinks and limits that are reached.
///
/// One seed is one run, bit for bit: [`Run::trace`] is the hash of all that happened, with [`Plan::trace`].
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
    /// A broken shell around the engine.
    pub shell: Option<BrokenShell>,
    /// People are told something else than what has happened.
    pub words: Option<BrokenWords>,
    /// No faults and no operators: then nothing may arrive twice.
    pub calm: bool,
    /// Hash everything that happens: [`Run::trace`].
    pub trace: bool,
    /// Print everything that happens.
    pub print: bool,
}

/// Deliberately broken variants of what a relay does when it has ended as an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BrokenShell {
    /// The engine goes on with what it knew, under the new number.
    KeepsEngine,
    /// The calls to sinks go on.
    KeepsCalls,
}

/// What a simulation found.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The hash of everything that happened, with [`Plan::trace`].
    pub trace: u64,
    /// Broken promises; empty is good.
    pub violations: Vec<String>,
    /// Events committed and not lost to a power loss.
    pub committed: usize,
    /// Events appended to streams of a journal.
    pub appended: usize,
    /// First arrivals.
    pub arrived: usize,
    /// Further arrivals.
    pub duplicates: usize,
    /// Instances killed, frozen or cut off.
    pub faults: usize,
    /// Instances that ended and joined again.
    pub rejoins: usize,
    /// How often an instance gave up what was at its sinks since its lease might be over.
    pub aborts: usize,
    /// Lanes taken since their owner's lease was over.
    pub leases: usize,
    /// The most events that were at sinks at the same time.
    pub parallel: usize,
    /// Claims in the queue.
    pub claims: usize,
    /// Claims that were taken from their owner.
    pub recovered: usize,
    /// Ends of claims that were refused.
    pub refused: usize,
    /// Pauses that a receiver asked for.
    pub paused: usize,
    /// Events that retention removed.
    pub pruned: usize,
    /// Instances that stood still in the middle of a transaction.
    pub holding: usize,
    /// Signs of life of instances that took a receiver to be unwell since it had refused several keys.
    pub unwell: usize,
    /// Filters that a relay changed which was started.
    pub redefined: usize,
    /// Keys that an operator replayed.
    pub keys_rewound: usize,
    /// Events that a subscription lost because its hold was over.
    pub held: usize,
    /// Dead deliveries that retention removed.
    pub dead_gone: usize,
    /// Changes of the number of lanes.
    pub relaned: usize,
    /// Pauses by an operator.
    pub pauses: usize,
    /// Definitions that changed in something else than the filter.
    pub adjusted: usize,
    /// Looks at a subscription that a limit had stopped.
    pub stopped: usize,
    /// Changes, and starts of relays, that were refused since somebody held a lock.
    pub locked_out: usize,
    /// Checks of what people are told.
    pub checked: usize,
    /// Checks of which definition a relay is said to go by.
    pub relays_checked: usize,
    /// First arrivals of events that had a time to be delivered at.
    pub delayed: usize,
    /// Different keys of what was committed.
    pub keys: usize,
    /// Calls of sinks that took longer than `SLOW`.
    pub slow: usize,
}

/// The names of the subscriptions.
const SUBSCRIPTIONS: [&str; 3] = ["all", "some", "jobs"];
/// Which of them lets dead events go by, and which is a queue.
const SOME: usize = 1;
const JOBS: usize = 2;
const NODES: usize = 3;
/// Faults stop and writers end here, in microseconds of virtual time.
const FAULTS_UNTIL: u64 = 8_000_000;
/// Everything must have arrived by then.
const END: u64 = 120_000_000;
/// A call of a sink that takes longer is slow: a queue gives its event a row.
const SLOW: u64 = 50_000;
/// Events of [`World::publish`].
const PUBLISHED: usize = 6;
/// Streams of the journal.
const STREAMS: u64 = 5;
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
    Execute(Ticket, InstanceId, Box<Request>),
    Poll(Ticket, Box<PollSteps>),
    Answer(Ticket, Box<News>),
    /// A worker is held up by the event with this index.
    HoldUp(Ticket, (usize, BatchId), Vec<Attempt>, usize),
    Arrive(Ticket, (usize, BatchId), Vec<Attempt>),
    Ring(Ticket),
    Fault,
    Operate,
    Prune,
    /// An operator tries to change the number of lanes of a subscription, so often at most.
    Relane(usize, u32),
    Restart(usize),
    Thaw(Ticket),
    /// A node that was cut off can reach the database again.
    Reconnect(InstanceId),
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
    Observe(pillarbox::store::Report),
    Take(Vec<pillarbox::store::Take>),
    Load(Vec<(pillarbox::store::LaneRef, i64)>),
    Fetch(Vec<Position>),
    Settle(pillarbox::store::Settlement),
    Claim(Vec<pillarbox::store::ClaimRequest>),
    Finish(Vec<pillarbox::store::ClaimEnd>),
    Recover(pillarbox::store::RecoverRequest),
}

#[derive(Debug, Default)]
struct Node {
    life: u64,
    /// The configuration that it was started with.
    specs: Vec<(Subscription, SinkFeatures)>,
    engine: Option<Engine>,
    instance: Option<InstanceId>,
    started: u64,
    frozen: bool,
    draining: bool,
    /// Its connection is lost, and it has not noticed yet.
    ended: bool,
    /// It ended as an instance and is about to join again.
    rejoin: bool,
    /// What a broken shell has kept of the life before.
    kept: Option<Engine>,
    /// It cannot reach the database before this time.
    cut_until: u64,
    /// When the engine wants to be stepped next.
    tick: u64,
    /// What reached the node while it was frozen.
    held: Vec<News>,
    /// What is at the sinks, by life and batch, to see that no two batches hold a key.
    at_sink: BTreeMap<(u64, (usize, BatchId)), Vec<Held>>,
    /// Batches that were given up.
    aborted: HashSet<(usize, BatchId)>,
    /// Looks at the fleet that it was told of since the last definition came into force.
    looks: u32,
    trouble: Trouble,
}

/// An event at a sink.
#[derive(Debug)]
struct Held {
    position: Position,
    key: Option<Box<str>>,
    lane: LaneRef,
    epoch: i64,
    /// The claim under which it was sent.
    claim: Option<ClaimId>,
    /// Its sender has given it up, and has not been told yet that the call is over.
    given_up: bool,
}

struct World {
    plan: Plan,
    pressure: Pressure,
    /// The configuration that was deployed last.
    specs: Vec<(Subscription, SinkFeatures)>,
    /// By subscription.
    in_force: Vec<InForce>,
    /// What the filter in force when an event was settled said of it.
    judged: HashMap<(usize, Uuid), Judgement>,
    /// The filter that an event was last sent with.
    sent_with: HashMap<(usize, Uuid), Arc<Filter>>,
    random: Random,
    log: MemoryLog,
    features: StoreFeatures,
    now: u64,
    wall_offset: i64,
    /// The offsets before, each with the time when it ended.
    wall_offsets: Vec<(u64, i64)>,
    /// When events were inserted.
    inserted: HashMap<Position, u64>,
    sequence: u64,
    queue: BTreeMap<(u64, u64), Step>,
    nodes: Vec<Node>,
    open: HashSet<Tx>,
    /// The numbers of the subscriptions.
    ids: Vec<SubscriptionId>,
    /// Lanes that were taken since their owner's lease was over, with the epoch that ended so.
    seized: HashSet<(LaneRef, i64)>,
    /// Claims that were taken since their owner's lease was over.
    expired: HashSet<(InstanceId, ClaimId)>,
    /// What got a row while it was at a sink: by lane, epoch and position.
    rowed: HashSet<(LaneRef, i64, Position)>,
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
    /// What is skipped now: a rewind brings it back.
    skips: HashSet<(usize, Uuid)>,
    /// What was dead when an operator requeued it: later events of its key may have been sent.
    requeued: HashSet<(usize, Uuid)>,
    /// What was found to be dead, skipped or behind a dead one after the last fault.
    blocked: HashSet<(usize, Uuid)>,
    /// What retention has removed.
    pruned: HashSet<Uuid>,
    /// What a subscription has lost to retention: its hold was over, or it was dead for too long.
    dropped: HashSet<(usize, Uuid)>,
    /// What it has ever lost so: later events of its key may have been sent before a rewind brought it back.
    ever_dropped: HashSet<(usize, Uuid)>,
    /// What lanes have passed because a hold was over.
    jumps: Vec<Jump>,
    /// Whether a subscription is paused.
    paused: [bool; SUBSCRIPTIONS.len()],
    /// Nobody publishes until then.
    quiet_until: u64,
    sink_down: [bool; SUBSCRIPTIONS.len()],
    /// Until then the receiver refuses every event.
    refuses_until: [u64; SUBSCRIPTIONS.len()],
    floors: HashMap<(String, u32), Position>,
    rewound: bool,
    /// The queue was rewound: what arrived may come again.
    replayed: bool,
    healed: bool,
    /// Everything has arrived that can, and is settled.
    done: bool,
    /// What was last said of sinks that were down; for those who do not forget it.
    breakers: [Option<BreakerReport>; SUBSCRIPTIONS.len()],
}

/// Dead, skipped, or waiting behind a dead head: listed for an operator, so not lost.
fn is_blocked(fate: &Fate) -> bool {
    let dead_head = |row: &DeliveryRecord| row.head.as_ref().is_some_and(|head| head.2 == State::Dead);
    let is_aside = |row: &DeliveryRecord| row.state == State::Dead || (row.state == State::Blocked && dead_head(row));
    fate.skipped.is_some() || fate.delivery.as_ref().is_some_and(is_aside)
}

fn subscriptions(transactional: bool) -> Vec<(Subscription, SinkFeatures)> {
    let retry = RetryPolicy {
        max_attempts: 3,
        base: Duration::from_millis(100),
        cap: Duration::from_millis(400),
        jitter: true,
        min_dead_age: Duration::ZERO,
    };
    let [all, some, jobs] = SUBSCRIPTIONS.map(Subscription::new);
    let all = Subscription { lanes: 3, retry, workers: 3, batch_size: 4, ..all };
    let some =
        Subscription { lanes: 2, retry, workers: 2, batch_size: 3, on_dead: OnDead::Skip, ..some.topics(["b", "c.*"]) };
    let jobs = Subscription {
        mode: Mode::Queue,
        lanes: 2,
        retry: RetryPolicy { max_attempts: 6, ..retry },
        workers: 4,
        batch_size: 3,
        processing_timeout: Duration::from_secs(3),
        ..jobs.topics(["a", "c.*"])
    };
    vec![
        (all, SinkFeatures { ordered_batch: true, one_receiver: true, ..SinkFeatures::default() }),
        (some, SinkFeatures { one_by_one: true, ..SinkFeatures::default() }),
        (
            jobs,
            SinkFeatures {
                ordered_batch: !transactional,
                one_by_one: true,
                settles: transactional,
                one_receiver: !transactional,
            },
        ),
    ]
}

impl World {
    fn new(seed: u64, plan: Plan) -> Self {
        let mut random = Random(seed);
        let lock_proves_life = random.chance(30);
        let lock_visible = lock_proves_life || random.chance(70);
        let queued_keys_max = if seed.is_multiple_of(3) { 2 } else { pillarbox::store::QUEUED_KEYS_MAX };
        let options = MemoryOptions {
            lock_proves_life,
            lock_visible,
            queued_keys_max,
            broken: plan.broken,
            ..MemoryOptions::default()
        };
        let features = StoreFeatures {
            lock_proves_life: options.lock_proves_life,
            settle_interval: Duration::from_millis(random.below(20)),
        };
        let mut world = World {
            plan,
            pressure: Pressure::of(seed, plan),
            specs: subscriptions(seed % 2 == 1),
            in_force: SUBSCRIPTIONS.iter().map(|_| InForce::default()).collect(),
            judged: HashMap::new(),
            sent_with: HashMap::new(),
            random,
            log: MemoryLog::with(options),
            features,
            now: 0,
            wall_offset: 0,
            wall_offsets: Vec::new(),
            inserted: HashMap::new(),
            sequence: 0,
            queue: BTreeMap::new(),
            nodes: (0..NODES).map(|_| Node::default()).collect(),
            open: HashSet::new(),
            ids: Vec::new(),
            seized: HashSet::new(),
            expired: HashSet::new(),
            rowed: HashSet::new(),
            trace: 0xcbf2_9ce4_8422_2325,
            run: Run::default(),
            visible: HashMap::new(),
            by_key: HashMap::new(),
            arrived: vec![HashSet::new(); SUBSCRIPTIONS.len()],
            attempts: HashMap::new(),
            refused: HashMap::new(),
            skipped: HashSet::new(),
            skips: HashSet::new(),
            requeued: HashSet::new(),
            blocked: HashSet::new(),
            pruned: HashSet::new(),
            dropped: HashSet::new(),
            ever_dropped: HashSet::new(),
            jumps: Vec::new(),
            paused: [false; SUBSCRIPTIONS.len()],
            quiet_until: 0,
            sink_down: [false; SUBSCRIPTIONS.len()],
            refuses_until: [0; SUBSCRIPTIONS.len()],
            floors: HashMap::new(),
            rewound: false,
            replayed: false,
            healed: false,
            done: false,
            breakers: Default::default(),
        };
        // Now and then the application publishes for a while before the first relay is started.
        let first = if world.random.chance(6) { 1_500_000 } else { 0 };
        for node in 0..NODES {
            let at = first + world.random.below(300_000);
            world.at(at, Step::Restart(node));
        }
        (0..3).for_each(|_| world.after(0, 100_000, Step::Begin));
        if !plan.calm {
            world.after(100_000, 800_000, Step::Fault);
            world.after(100_000, 800_000, Step::Operate);
        }
        world.after(500_000, 1_500_000, Step::Prune);
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

    /// Notes what happens. To write it costs a tenth of a run, so it is written only for [`Plan::trace`] and [`Plan::print`].
    fn note(&mut self, what: fmt::Arguments<'_>) {
        if !self.plan.trace && !self.plan.print {
            return;
        }
        let text = what.to_string();
        if self.plan.print {
            println!("{:>10} {text}", self.now);
        }
        for byte in self.now.to_le_bytes().iter().chain(text.as_bytes()) {
            self.trace = (self.trace ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn violation(&mut self, text: String) {
        let text = format!("at {} us: {text}", self.now);
        self.note(format_args!("{text}"));
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
            Step::Execute(ticket, instance, request) => self.execute(ticket, instance, *request),
            Step::Poll(ticket, steps) => self.poll_step(ticket, *steps),
            Step::Answer(ticket, news) => self.news(ticket, *news),
            Step::HoldUp(ticket, batch, events, index) => self.hold_up(ticket, batch, events, index),
            Step::Arrive(ticket, batch, events) => self.arrive(ticket, batch, &events),
            Step::Fault => self.fault(),
            Step::Operate => self.operate(),
            Step::Prune => self.prune(),
            Step::Relane(sub, tries) => self.relane(sub, tries),
            Step::Reconnect(instance) => self.log.release(instance),
            Step::Thaw(ticket) => self.thaw(ticket),
            Step::Heal => self.heal(),
            Step::Check => self.look_after(),
        }
    }

    // --- publishers ---

    fn begin(&mut self) {
        if self.now < self.quiet_until {
            return self.at(self.quiet_until, Step::Begin);
        }
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
        self.insert_one(tx);
        if self.random.chance(self.pressure.burst) {
            return self.after(0, 20_000, Step::Insert(tx));
        }
        let held = if self.random.chance(8) { 2_000_000 } else { 30_000 };
        self.after(0, held, Step::End(tx));
    }

    fn insert_one(&mut self, tx: Tx) {
        let topic = ["a", "b", "c.x"][self.random.below(3) as usize];
        let mut event = NewEvent::new(topic, "happened");
        if self.random.chance(90) {
            event = event.key(format!("k{}", self.random.below(self.pressure.keys)));
        }
        if self.random.chance(5) {
            event = event.deliver_at(self.wall().plus(Duration::from_millis(self.random.below(3_000))));
        }
        // What stays where everything around it is pruned. Streams have keys of their own.
        let appends = event.deliver_at.is_none() && self.random.chance(5);
        let stream = event.clone().key(format!("s{}", self.random.below(STREAMS)));
        let appended = if appends { self.log.append_in(tx, stream) } else { None };
        self.run.appended += usize::from(appended.is_some());
        let position = appended.unwrap_or_else(|| self.log.insert(tx, event));
        self.inserted.insert(position, self.now);
        self.note(format_args!("insert {position} by {tx:?}"));
    }

    /// Some events that are committed now.
    fn publish(&mut self) {
        let tx = self.log.begin();
        self.open.insert(tx);
        (0..PUBLISHED).for_each(|_| self.insert_one(tx));
        self.end(tx);
    }

    fn end(&mut self, tx: Tx) {
        if !self.open.remove(&tx) {
            return;
        }
        if self.random.chance(15) {
            self.log.abort(tx);
            self.note(format_args!("abort {tx:?}"));
            return;
        }
        self.log.commit(tx);
        self.note(format_args!("commit {tx:?}"));
        let order = self.visible.len() as u64 + self.sequence;
        for event in self.log.visible() {
            if !self.visible.contains_key(&event.id) {
                self.note_late(&event);
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

    // --- the end ---

    /// No more faults; everything that was committed has to arrive now.
    fn heal(&mut self) {
        self.note(format_args!("heal"));
        self.healed = true;
        self.sink_down = [false; SUBSCRIPTIONS.len()];
        self.refuses_until = [0; SUBSCRIPTIONS.len()];
        if !self.plan.calm {
            // Later than any time that was set while the clock jumped, so that everything is due.
            self.set_clock(1_000 * 3_600_000 - self.wall_offset);
        }
        for node in 0..NODES {
            let ticket = Ticket { node, life: self.nodes[node].life };
            self.nodes[node].cut_until = 0;
            if let Some(instance) = self.nodes[node].instance {
                self.log.release(instance);
            }
            self.thaw(ticket);
        }
        self.lift_limits();
        self.look_after();
    }

    /// Somebody starts what has stopped and resumes what is paused: a slow drain may have ended, or a receiver may have had enough just
    /// before it was mended.
    fn look_after(&mut self) {
        (0..NODES).for_each(|node| self.at(self.now, Step::Restart(node)));
        for sub in 0..SUBSCRIPTIONS.len() {
            self.resume(sub);
        }
        self.after(500_000, 500_000, Step::Check);
    }

    fn is_done(&mut self) -> bool {
        if !self.open.is_empty() || self.unfinished() != [0; SUBSCRIPTIONS.len()] {
            return false;
        }
        (0..SUBSCRIPTIONS.len()).for_each(|sub| self.note_blocked(sub));
        (0..SUBSCRIPTIONS.len()).all(|sub| self.missing(sub).next().is_none())
    }

    /// Nobody acts on what is dead any more, so it stays so.
    fn note_blocked(&mut self, sub: usize) {
        let missing: Vec<Uuid> = self.missing(sub).map(|event| event.id).collect();
        let fates = self.log.fates(&missing, SUBSCRIPTIONS[sub]);
        let blocked = missing.into_iter().zip(fates).filter(|(_, fate)| fate.as_ref().is_some_and(is_blocked));
        self.blocked.extend(blocked.map(|(id, _)| (sub, id)));
    }

    /// What has neither arrived nor is known to be blocked for good.
    fn missing(&self, sub: usize) -> impl Iterator<Item = &Arc<Event>> {
        let missing = move |event: &&Arc<Event>| {
            self.wants(sub, event) && !self.arrived[sub].contains(&event.id) && !self.blocked.contains(&(sub, event.id))
        };
        self.visible.values().map(|entry| &entry.1).filter(missing)
    }

    fn finish(mut self) -> Run {
        let unfinished = self.unfinished();
        for (sub, count) in unfinished.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            self.violation(format!("{count} events of subscription {sub} have no end: {:?}", self.log.claims()));
        }
        for sub in 0..SUBSCRIPTIONS.len() {
            self.note_blocked(sub);
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
        self.done = self.run.violations.is_empty();
        self.check_words();
        self.check_rest();
        let closed = self.log.books().closed;
        let mut wrong: Vec<Position> =
            self.visible.values().map(|entry| entry.1.position).filter(|position| closed.contains(*position)).collect();
        wrong.sort_unstable();
        if !wrong.is_empty() {
            self.violation(format!("closed and visible: {wrong:?}"));
        }
        self.run.trace = self.trace;
        self.run.committed = self.visible.len();
        self.run.keys = self.by_key.len();
        self.run.arrived = self.arrived.iter().map(HashSet::len).sum();
        self.run
    }
}
