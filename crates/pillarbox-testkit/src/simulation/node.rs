use std::time::Duration;

use pillarbox::admin::{Change, PausedBy};
use pillarbox::engine::{Action, Call, Engine, EngineConfig, Input, Recovery, RecoveryProfile};
use pillarbox::store::{BreakerReport, Hello, InstanceId, LaneRef, Take, TakeCause};
use pillarbox::{ErrorKind, Result};

use super::{BrokenShell, Node, Request, SUBSCRIPTIONS, Step, Ticket, World};
use crate::PollSteps;

/// How long an answer takes at most.
pub(super) const ANSWER_MAX: u64 = 2_000;

/// What reaches a node.
#[derive(Debug)]
pub(super) enum News {
    Input(Input),
    /// It has ended as an instance.
    Ended,
}

impl World {
    pub(super) fn restart(&mut self, node: usize) {
        if self.nodes[node].engine.is_some() {
            return;
        }
        let rejoin = self.nodes[node].rejoin;
        let specs = self.configure(node, rejoin);
        if let Some(before) = self.nodes[node].instance.filter(|_| rejoin && self.random.chance(50)) {
            self.log.leave(before).expect("leaving works");
        }
        let hello =
            Hello { subscriptions: specs.iter().map(|spec| spec.0.clone()).collect(), rejoin, ..Hello::default() };
        let joined = match self.log.join(hello) {
            Ok(joined) => joined,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "the log takes every instance, if need be later: {error}");
                self.run.locked_out += 1;
                return self.after(50_000, 300_000, Step::Restart(node));
            }
        };
        self.ids = joined.subscriptions.iter().map(|view| view.id).collect();
        let check = !rejoin && self.define(&specs);
        let profile = if self.random.chance(20) { RecoveryProfile::Conservative } else { RecoveryProfile::Fast };
        let ranges_max = self.random.between(20, 200) as usize;
        let config = EngineConfig {
            lease_ttl: Duration::from_millis(600),
            beat_interval: Duration::from_millis(100),
            poll_interval: Duration::from_millis(500),
            page_size: self.random.between(1, 12) as usize,
            in_flight: self.random.between(8, 40) as usize,
            hole_scans_max: self.random.between(1, 8) as usize,
            ranges_max,
            floor_interval: Duration::from_millis(300),
            recovery: Recovery { profile, check_interval: Duration::from_secs(1), enabled: true },
            seed: self.random.next(),
            mutant: self.plan.mutant,
            ..EngineConfig::default()
        };
        let config = self.pressure.squeeze(&mut self.random, self.healed, config);
        let before = std::mem::take(&mut self.nodes[node]);
        let kept = before.kept.map(|engine| (engine, before.started));
        let is_kept = kept.is_some();
        let (engine, started) = kept
            .unwrap_or_else(|| (Engine::new(config, Duration::ZERO, &joined, self.features, specs.clone()), self.now));
        let life = before.life + 1;
        self.note(format_args!("restart {node} as {:?}", joined.instance));
        self.nodes[node] = Node {
            life,
            specs,
            engine: Some(engine),
            instance: Some(joined.instance),
            started,
            at_sink: before.at_sink,
            ..Node::default()
        };
        if check {
            self.check_words();
        }
        let ticket = Ticket { node, life };
        if is_kept {
            self.go_on(ticket);
        }
        self.input(ticket, Input::Tick);
    }

    /// A broken shell tells its old engine that everything under way has failed.
    fn go_on(&mut self, ticket: Ticket) {
        let batches: Vec<_> = std::mem::take(&mut self.nodes[ticket.node].at_sink).into_keys().collect();
        for (_, batch) in batches {
            self.input(ticket, Input::Aborted { batch });
        }
        let store = [Call::Observe, Call::Take, Call::Load, Call::Poll, Call::Fetch, Call::Settle];
        for call in store.into_iter().chain([Call::Claim, Call::Finish, Call::Recover]) {
            self.input(ticket, Input::CallFailed(call));
        }
    }

    /// The shell of a node that has ended as an instance: everything is given up, then it joins again.
    fn rejoin(&mut self, node: usize) {
        self.run.rejoins += 1;
        self.note(format_args!("rejoin {node}"));
        let broken = self.plan.shell;
        let ended = &mut self.nodes[node];
        let engine = ended.engine.take();
        ended.kept = engine.filter(|_| broken == Some(BrokenShell::KeepsEngine));
        ended.life += 1;
        ended.rejoin = !ended.draining;
        if broken.is_none() {
            ended.at_sink.clear();
        }
        let draining = ended.draining;
        self.log.kill(ended.instance.expect("a node that runs has joined"));
        if !draining {
            self.after(0, 200_000, Step::Restart(node));
        }
        self.ring();
    }

    /// For how long a node has run.
    pub(super) fn clock(&self, node: usize) -> Duration {
        Duration::from_micros(self.now - self.nodes[node].started)
    }

    pub(super) fn alive(&self, ticket: Ticket) -> bool {
        self.nodes[ticket.node].life == ticket.life && self.nodes[ticket.node].engine.is_some()
    }

    pub(super) fn input(&mut self, ticket: Ticket, input: Input) {
        self.news(ticket, News::Input(input));
    }

    pub(super) fn news(&mut self, ticket: Ticket, news: News) {
        if !self.alive(ticket) {
            return;
        }
        if self.nodes[ticket.node].frozen {
            return self.nodes[ticket.node].held.push(news);
        }
        match news {
            News::Input(input) => self.step(ticket, input),
            News::Ended => self.rejoin(ticket.node),
        }
    }

    fn step(&mut self, ticket: Ticket, input: Input) {
        let at_sink = &mut self.nodes[ticket.node].at_sink;
        match &input {
            Input::Delivered { batch, .. } | Input::Aborted { batch } => drop(at_sink.remove(&(ticket.life, *batch))),
            Input::HandedBack { batch, outcomes } => {
                at_sink.entry((ticket.life, *batch)).and_modify(|held| {
                    held.drain(..outcomes.len());
                    held.truncate(1);
                });
            }
            _ => {}
        }
        self.nodes[ticket.node].trouble.note(&input);
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
        self.note(format_args!("{} {action:?}", ticket.node));
        let instance = self.nodes[ticket.node].instance.expect("a node that runs has joined");
        let request = match action {
            Action::Observe(report) => {
                let refuses_all = |breaker: &BreakerReport| breaker.error.contains("different keys");
                let mut breakers = report.subscriptions.values().filter_map(|one| one.breaker.as_ref());
                self.run.unwell += usize::from(breakers.any(refuses_all));
                for (last, name) in self.breakers.iter_mut().zip(SUBSCRIPTIONS) {
                    let said = report.subscriptions.get(name).and_then(|one| one.breaker.clone());
                    *last = said.or(last.take());
                }
                self.nodes[ticket.node].trouble.report();
                self.run.stopped += report.subscriptions.values().filter(|one| one.stopped.is_some()).count();
                Request::Observe(report)
            }
            Action::Take(lanes) => Request::Take(lanes),
            Action::Load(lanes) => Request::Load(lanes),
            Action::Fetch(positions) => Request::Fetch(positions),
            Action::Settle(settlement) => Request::Settle(settlement),
            Action::Claim(requests) => Request::Claim(requests),
            Action::Finish(ends) => Request::Finish(ends),
            Action::Recover(request) => Request::Recover(request),
            Action::Poll(request) => {
                let steps = self.log.poll_steps(&request);
                return self.after(0, 2_000, Step::Poll(ticket, Box::new(steps)));
            }
            Action::Deliver { batch, events } => return self.deliver(ticket, batch, events),
            Action::Pause { subscription, reason } => return self.pause(ticket, subscription, reason),
            Action::Abort => return self.abort(ticket),
            Action::Leave => {
                self.nodes[ticket.node].engine = None;
                return self.log.leave(instance).expect("leaving works");
            }
        };
        self.after(0, 4_000, Step::Execute(ticket, instance, Box::new(request)));
    }

    /// A receiver wants nothing more. Nobody is told whether the call went through.
    fn pause(&mut self, ticket: Ticket, sub: usize, reason: String) {
        let cut_off = self.nodes[ticket.node].ended || self.now < self.nodes[ticket.node].cut_until;
        if cut_off || self.random.chance(10) {
            return;
        }
        let (subscription, by) = (SUBSCRIPTIONS[sub].to_owned(), PausedBy::Receiver);
        if let Ok(changed) = self.log.change(&Change::Pause { subscription, by, reason: Some(reason) }, false) {
            self.run.paused += changed.count as usize;
            self.paused[sub] = true;
        }
        self.ring();
    }

    /// What was sent before its sender died or lost its connection may still happen. Calls may fail before they happen or
    /// after; the caller cannot tell.
    pub(super) fn execute(&mut self, ticket: Ticket, instance: InstanceId, request: Request) {
        let alive = self.alive(ticket);
        let over = !alive || self.nodes[ticket.node].ended;
        let call = request.call();
        if over && self.random.chance(50) {
            return self.answer(ticket, News::Ended);
        }
        if !over && self.now < self.nodes[ticket.node].cut_until {
            return self.cut_off(ticket, call);
        }
        let fails = !self.plan.calm && !self.healed && self.random.chance(4);
        if fails && self.random.chance(50) {
            return self.answer(ticket, News::Input(Input::CallFailed(call)));
        }
        // A lane that nobody owns is asked for again; nothing is late by that.
        let is_free = |take: &pillarbox::store::Take| take.cause == pillarbox::store::TakeCause::Free;
        let may_wait =
            self.log.is_frozen(instance) || matches!(&request, Request::Take(lanes) if lanes.iter().all(is_free));
        let answer: Result<Input> = match request {
            Request::Observe(report) => {
                let answer = self.log.observe(instance, &report).map(Input::Observed);
                if alive && answer.is_ok() {
                    self.nodes[ticket.node].looks += u32::from(!fails);
                    self.nodes[ticket.node].trouble.reported();
                }
                answer
            }
            Request::Take(lanes) => {
                let epochs = self.log.take(instance, &lanes);
                epochs.inspect(|epochs| self.check_seizures(&lanes, epochs)).map(Input::Taken)
            }
            Request::Load(lanes) => self.log.load(instance, &lanes).map(Input::Loaded),
            Request::Fetch(positions) => self.log.fetch(&positions).map(Input::Fetched),
            Request::Settle(settlement) => self.settle(ticket, instance, &settlement, !fails),
            Request::Claim(requests) => self.claim(instance, &requests),
            Request::Finish(ends) => self.finish_claims(instance, &ends),
            Request::Recover(request) => self.recover(&request),
        };
        match answer {
            _ if over => self.answer(ticket, News::Ended),
            Ok(input) => self.answer(ticket, News::Input(if fails { Input::CallFailed(call) } else { input })),
            Err(error) if error.kind() == ErrorKind::Ended => self.answer(ticket, News::Ended),
            Err(error) if error.kind() == ErrorKind::Busy => {
                if !may_wait {
                    self.violation(format!("node {} waits for one that is frozen: {error}", ticket.node));
                }
                self.answer(ticket, News::Input(Input::CallFailed(call)));
            }
            Err(_) => self.kill(ticket.node),
        }
    }

    pub(super) fn answer(&mut self, ticket: Ticket, news: News) {
        self.after(0, ANSWER_MAX, Step::Answer(ticket, Box::new(news)));
    }

    /// The network is gone: a call fails at once, or hangs until it is back.
    fn cut_off(&mut self, ticket: Ticket, call: Call) {
        let until = if self.random.chance(50) { self.nodes[ticket.node].cut_until } else { self.now };
        let at = until + self.random.below(2_000);
        self.at(at, Step::Answer(ticket, Box::new(News::Input(Input::CallFailed(call)))));
    }

    pub(super) fn poll_step(&mut self, ticket: Ticket, mut steps: PollSteps) {
        if !self.alive(ticket) {
            return;
        }
        if self.nodes[ticket.node].ended {
            return self.answer(ticket, News::Ended);
        }
        if self.now < self.nodes[ticket.node].cut_until {
            return self.cut_off(ticket, Call::Poll);
        }
        match steps.step(&self.log) {
            Ok(None) => self.after(0, 2_000, Step::Poll(ticket, Box::new(steps))),
            Ok(Some(page)) => self.answer(ticket, News::Input(Input::Polled(page))),
            Err(_) => self.answer(ticket, News::Input(Input::CallFailed(Call::Poll))),
        }
    }

    /// Whoever loses a lane because its lease is over has nothing of it at a sink any more, unless it stands still itself.
    fn check_seizures(&mut self, lanes: &[Take], epochs: &[Option<i64>]) {
        let by_lease = |(take, epoch): &(&Take, &Option<i64>)| take.cause == TakeCause::Lease && epoch.is_some();
        let seized: Vec<(LaneRef, i64)> =
            lanes.iter().zip(epochs).filter(by_lease).map(|(take, _)| (take.lane, take.expected)).collect();
        for (lane, epoch) in seized {
            self.run.leases += 1;
            self.seized.insert((lane, epoch));
            let holds = |node: &Node| {
                let mut held = node.at_sink.values().flatten().filter(|held| !held.given_up);
                !node.frozen && held.any(|held| (held.lane, held.epoch) == (lane, epoch))
            };
            if let Some(node) = self.nodes.iter().position(holds) {
                self.violation(format!("node {node} has events of {lane:?} at the sink, and its lease is over"));
            }
        }
    }
}

impl Request {
    fn call(&self) -> Call {
        match self {
            Request::Observe(_) => Call::Observe,
            Request::Take(_) => Call::Take,
            Request::Load(_) => Call::Load,
            Request::Fetch(_) => Call::Fetch,
            Request::Settle(_) => Call::Settle,
            Request::Claim(_) => Call::Claim,
            Request::Finish(_) => Call::Finish,
            Request::Recover(_) => Call::Recover,
        }
    }
}
