mod action;
mod config;
mod delivering;
mod fetcher;
mod figures;
mod input;
mod journal;
mod member;
mod noise;
mod queue;
mod queues;
mod reader;
mod settler;
mod slot;
mod subscriber;
mod subscribers;

use std::time::Duration;

pub use self::action::Action;
pub use self::config::{EngineConfig, Mutant, Recovery, RecoveryProfile};
use self::fetcher::Fetcher;
pub use self::figures::Figures;
pub use self::input::{Call, Input};
use self::journal::Journal;
use self::member::Member;
use self::noise::Noise;
use self::queue::Queue;
use self::queues::Queues;
use self::reader::Reader;
use self::settler::Settler;
use self::subscriber::Subscriber;
use self::subscribers::Subscribers;
pub use crate::attempt_log::{DeliveredAttempt, FailedAttempt, NextTry};
use crate::work::looked_at;
#[doc(hidden)]
pub use crate::work::work;
use crate::{Definition, InstanceId, Joined, Report, SinkFeatures, StoreFeatures, Subscription, Timestamp};

/// The two clocks of a step: `mono` never jumps and measures waits; `wall` is the database's time of day, which due times are kept in.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Since the engine started.
    pub mono: Duration,
    /// The time of day by the database's clock.
    pub wall: Timestamp,
}

/// The decisions of a relay: state, time and what happened, to what is to be done. No IO, no clock, no randomness of its own.
///
/// `reader → dispatcher → workers → settler`: a poll's page is handed to the lanes ([`Engine::step`] with `Polled`), which keep
/// the books of what is settled; per subscription a dispatcher keeps each key in order; outcomes settle positions or park
/// events in the delivery table; one settlement writes all that has changed.
///
/// Each part owns its state and its calls to the store; the engine hands inputs to the parts and lets them act in a fixed order.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    /// This instance in its fleet: its lease, and the lanes that it takes, loads and gives back.
    member: Member,
    /// What is held of each subscription: lanes, dispatcher, breaker, queue.
    subscribers: Subscribers,
    /// How far the log was read, and which holes in it are closed.
    reader: Reader,
    /// The events of deliveries that are due.
    fetcher: Fetcher,
    /// The claims of all queues.
    queues: Queues,
    /// What is to be written.
    settler: Settler,
    /// What people are told.
    journal: Journal,
    noise: Noise,
    /// What this step has decided so far.
    actions: Vec<Action>,
}

/// Delayed rows made due in one step, and deliveries fetched at once.
const PROMOTE_MAX: usize = 1_000;

impl Engine {
    /// An engine that has joined, at `mono` or before. Each subscription comes with what its sink can do, in the order of the hello.
    pub fn new(
        config: EngineConfig,
        mono: Duration,
        joined: &Joined,
        features: StoreFeatures,
        subscriptions: Vec<(Subscription, SinkFeatures)>,
    ) -> Self {
        let mut warnings = Vec::new();
        let subscriber = |((spec, sink), view)| {
            let mut sub = Subscriber::new(spec, sink, view);
            warnings.extend(sub.config_drift(view));
            sub
        };
        let subscribers = subscriptions.into_iter().zip(&joined.subscriptions).map(subscriber);
        let mut subscribers = Subscribers::new(subscribers.collect());
        let mut member = Member::new(&config, mono, joined, features);
        subscribers.iter().for_each(|sub| member.beat_for(sub));
        let conservative = config.recovery.profile == RecoveryProfile::Conservative;
        for queue in subscribers.iter_mut().filter_map(|sub| sub.queue.as_mut()) {
            queue.rows_for_all |= conservative;
        }
        Engine {
            member,
            subscribers,
            reader: Reader::default(),
            fetcher: Fetcher::default(),
            queues: Queues::default(),
            settler: Settler::new(features.settle_interval),
            journal: Journal::new(warnings),
            noise: Noise::new(config.seed),
            actions: Vec::new(),
            config,
        }
    }

    /// Takes in what happened and returns what is to be done.
    pub fn step(&mut self, mono: Duration, input: Input) -> Vec<Action> {
        if let Input::Observed(fleet) = &input {
            self.member.learn_time(mono, fleet.time, self.config.mutant);
        }
        let now = self.member.now(mono);
        self.subscribers.rouse(now, &input);
        match input {
            Input::Observed(fleet) => self.observed(now, fleet),
            Input::Taken(epochs) => self.taken(epochs),
            Input::Loaded(states) => self.loaded(now, states),
            Input::Polled(page) => self.polled(now, page),
            Input::Fetched(events) => self.fetched(now, events),
            Input::Settled(written) => self.settled(now, written),
            Input::Delivered { batch, outcomes } => self.delivered(now, batch, outcomes),
            Input::Aborted { batch } => self.aborted(now, batch),
            Input::HandedBack { batch, outcomes } => self.handed_back(now, batch, outcomes),
            Input::Claimed(answers) => self.claimed(now, answers),
            Input::Finished(written) => self.finished(now, written),
            Input::Recovered(recovered) => self.recovered(now, recovered),
            Input::Rang => {
                self.rang(now);
                self.member.observe_soon();
            }
            Input::Published => self.rang(now),
            Input::CallFailed(call) => self.call_failed(now, call),
            Input::Drain => self.drain(),
            Input::Tick => {}
        }
        self.advance(now);
        std::mem::take(&mut self.actions)
    }

    /// What follows from all that is known now. Each phase uses what those before it have left, so that one step does all that can
    /// be done without an answer.
    fn advance(&mut self, now: Now) {
        if self.member.has_left() {
            return;
        }
        // First: where the lease may be over nothing below may send.
        self.expire(now);
        // Lanes that stop drop what is not at the sink, before anything of theirs takes a place or is sent.
        self.quiesce();
        // The limits count what is left then, and rule what is read below.
        self.update_stopped();
        for index in 0..self.subscribers.len() {
            if self.subscribers[index].resting {
                continue;
            }
            // What is due takes its place behind what its key has waiting, before any of that is sent.
            self.subscribers[index].promote(now);
            // What is slow gets a row, and what waits behind it: before that could be sent from memory beside its row.
            self.tend_queue(now, index);
            // Sending comes before the calls: they ask for no more than the workers and the room that it leaves.
            self.dispatch(now, index);
        }
        // The first call is the beat, which the lease lives by. Lanes that are quiet by now are loaded.
        self.call_fleet(now);
        // What is read goes by the room that is left now.
        self.call_poll(now);
        // Deliveries that are due are marked as on their way, so that the settlement below does not write them twice; they take their room
        // before claims do.
        self.call_fetch(now);
        // Claims go to workers for which nothing of this instance's own was ready.
        self.call_claim(now);
        // What was sent back above ends here.
        self.call_finish(now);
        // Whose claims to recover is known from the look at the fleet.
        self.call_recover(now);
        // Last of the calls: it writes whatever the phases above have settled, moved or given back.
        self.settle(now);
        // Only that for which all phases have left nothing to do may rest.
        self.subscribers.lay_to_rest(now, self.reader.horizon());
        // Nothing is left to be written or given back: this decides whether the drain is over.
        self.leave(now);
    }

    /// When to step with [`Input::Tick`] if nothing else happens before. Always later than now: what is due now was done by the
    /// last step, or waits for an answer.
    pub fn deadline(&self, mono: Duration) -> Duration {
        let now = self.member.now(mono);
        let mut deadline = now.mono + self.member.beat_interval();
        let mut sooner =
            |at: Option<Duration>| deadline = at.filter(|&at| at > now.mono).map_or(deadline, |at| at.min(deadline));
        self.member.deadlines(self.config.mutant).into_iter().for_each(&mut sooner);
        self.reader.deadlines(&self.config).into_iter().for_each(&mut sooner);
        self.queues.deadlines().into_iter().for_each(&mut sooner);
        sooner(self.fetcher.retry_at());
        sooner(self.settler.retry_at());
        if self.has_writes() {
            sooner(self.settler.next_at());
        }
        sooner(self.queue_deadline(now));
        sooner(Some(self.subscribers.rest_until()));
        for sub in self.subscribers.awake() {
            looked_at(sub.lanes.len());
            sooner(sub.breaker.deadline());
            sooner(sub.breaker.other_deadline());
            let due = sub.active().filter_map(|lane| lane.queues.next_due_after(now.wall)).min();
            sooner(due.map(|due| now.mono + due.since(now.wall)));
        }
        deadline
    }

    /// Until when no other instance can have taken a lane of this one for want of a sign of life; None: for ever, or nothing is its own
    /// yet. No call to a sink may outlive it.
    pub fn good_until(&self) -> Option<Duration> {
        self.member.good_until(self.config.mutant)
    }

    /// Nothing is under way and nothing can be delivered now: what is left waits for its time, for an operator or for another instance.
    pub fn is_idle(&self, mono: Duration) -> bool {
        let now = self.member.now(mono);
        let calls = [
            self.member.is_calling(),
            self.reader.is_calling(),
            self.fetcher.is_calling(),
            self.queues.is_calling(),
            self.settler.is_calling(),
        ];
        if calls.contains(&true) || !self.member.is_settled() || !self.reader.is_settled() {
            return false;
        }
        !self.has_writes() && self.subscribers.iter().all(|sub| sub.is_idle(now, self.reader.horizon()))
    }

    /// Whether nothing is left to be read now, so that only the doorbell or time can bring more.
    pub fn is_asleep(&self) -> bool {
        self.reader.is_waiting() && (self.reader.is_stuck() || !self.is_behind())
    }

    /// What the subscription with this index goes by.
    pub fn definition(&self, subscription: usize) -> &Definition {
        &self.subscribers[subscription].definition
    }

    /// How many polls have begun.
    pub fn polls(&self) -> u64 {
        self.reader.polls()
    }

    /// Whether the figures are to name every event that is delivered.
    pub fn tell_deliveries(&mut self, tell: bool) {
        self.journal.tell_deliveries(tell);
    }

    /// This instance.
    pub fn instance(&self) -> InstanceId {
        self.member.id()
    }

    /// Takes the figures since the last call.
    pub fn take_figures(&mut self) -> Figures {
        for sub in self.subscribers.iter_mut() {
            if sub.breaker.has_news() {
                self.journal.figures().sinks.insert(sub.name.clone(), sub.breaker.report());
            }
        }
        self.journal.take()
    }

    /// What this instance says of its work.
    pub fn report(&self) -> Report {
        let subscriptions = self.subscribers.iter().map(|sub| (sub.spec.name.clone(), sub.report())).collect();
        Report { subscriptions, draining: self.member.is_draining() }
    }

    /// Brings a report up to date that this engine has made.
    pub fn update_report(&mut self, report: &mut Report) {
        report.draining = self.member.is_draining();
        looked_at(self.subscribers.len());
        for sub in self.subscribers.iter_mut() {
            if sub.has_changed() {
                report.subscriptions.insert(sub.spec.name.clone(), sub.report());
            }
        }
    }

    fn rang(&mut self, now: Now) {
        self.reader.ring(now);
        for sub in self.subscribers.iter_mut() {
            let Some(queue) = &mut sub.queue else { continue };
            queue.wake(now);
            sub.resting = false;
        }
    }

    fn update_stopped(&mut self) {
        for sub in self.subscribers.awake_mut() {
            sub.stopped = sub.stop_reason(&self.config);
            sub.overfull = sub.overfull_reason();
        }
    }

    /// Nothing is this instance's any more: no lane, no claim, nothing at a sink.
    fn is_empty(&self) -> bool {
        let empty = |sub: &Subscriber| {
            let quiet = sub.queue.as_ref().is_none_or(Queue::is_quiet);
            quiet && sub.lanes().next().is_none() && sub.dispatcher.in_flight() == 0
        };
        !self.queues.has_claims() && self.subscribers.iter().all(empty)
    }

    /// Leaves once a drain is over.
    fn leave(&mut self, now: Now) {
        let draining = self.member.is_draining() && self.is_empty();
        let leaves = draining && !self.settler.is_calling() && !self.member.is_calling() && !self.member.has_loads();
        self.journal.tell_unlogged(now, &mut self.subscribers, leaves);
        if leaves {
            self.member.leave();
            self.actions.push(Action::Leave);
        }
    }

    fn call_failed(&mut self, now: Now, call: Call) {
        match call {
            Call::Observe | Call::Take | Call::Load => self.member.call_failed(now, call),
            Call::Poll => self.reader.poll_failed(now),
            Call::Fetch => self.fetch_failed(now),
            Call::Settle => self.settle_failed(now),
            Call::Claim => self.queues.claim_failed(now),
            Call::Finish => self.finish_failed(now),
            Call::Recover => self.queues.recover_failed(now),
        }
    }
}
