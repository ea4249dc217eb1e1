//! What the engine decides about a queue, stepped by hand.
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::engine::{Action, Call, Engine, EngineConfig, FailedAttempt, Input, NextTry, work};
use pillarbox::limit::BREAKER_KEYS_MAX;
use pillarbox::sink::{Outcome, SinkFeatures};
use pillarbox::store::{
    CRASH, ClaimEnd, ClaimFate, ClaimId, ClaimRequest, Claimed, Claims, Definition, DeliveryRow, Fleet, InstanceId,
    InstanceView, Joined, KEYS_TOLD_MAX, LaneRef, LaneState, LaneView, Lock, Page, Queued, Recovered, RecoveredAttempt,
    RecoveryCause, Scan, StoreFeatures, SubscriptionId, SubscriptionView, recovered,
};
use pillarbox::{Event, Failure, Headers, Mode, Payload, Position, RetryPolicy, Subscription, Timestamp};
use uuid::Uuid;

const ME: InstanceId = InstanceId(7);
const OTHER: InstanceId = InstanceId(8);
const ID: SubscriptionId = SubscriptionId(1);
/// What the database's clock says when a test begins.
const BEGAN: Timestamp = Timestamp(1_000_000);
const HANDLER: SinkFeatures =
    SinkFeatures { ordered_batch: true, one_by_one: true, settles: false, one_receiver: false };

/// An engine with one queue of one lane. Every call is answered by hand.
struct Bench {
    engine: Engine,
    now: Duration,
    actions: Vec<Action>,
    /// The most that a step has looked at.
    most: u64,
}

fn event(position: Position, key: &str) -> Arc<Event> {
    Arc::new(Event {
        position,
        id: Uuid::from_u128(position as u128),
        topic: "t".into(),
        key: (!key.is_empty()).then(|| key.into()),
        r#type: "y".into(),
        payload: Payload::None,
        content_type: None,
        headers: Headers::default(),
        stream_version: None,
        deliver_at: None,
        created_at: Timestamp(0),
        malformed: None,
    })
}

fn fleet(owner: Option<InstanceId>, others: &[(InstanceId, Lock)]) -> Fleet {
    let view =
        |&(id, lock): &(InstanceId, Lock)| InstanceView { id, beat: 1, lock, draining: false, subscriptions: vec![ID] };
    let lane = LaneRef { subscription: ID, lane: 0 };
    Fleet {
        instances: [(ME, Lock::Held)].iter().chain(others).map(view).collect(),
        subscriptions: vec![subscription_view()],
        lanes: vec![LaneView { lane, owner, epoch: i64::from(owner.is_some()), revision: 0, takeovers: 0 }],
        time: BEGAN,
    }
}

fn subscription_view() -> SubscriptionView {
    SubscriptionView {
        id: ID,
        name: "q".into(),
        definition: Definition::default(),
        lanes: 1,
        paused: false,
        created: false,
    }
}

impl Bench {
    fn new(sink: SinkFeatures, workers: usize) -> Self {
        Bench::with(EngineConfig::default(), sink, workers)
    }

    fn with(config: EngineConfig, sink: SinkFeatures, workers: usize) -> Self {
        let joined = Joined {
            instance: ME,
            log_id: Uuid::nil(),
            incarnation: 1,
            subscriptions: vec![subscription_view()],
            time: BEGAN,
        };
        let features = StoreFeatures { lock_proves_life: true, settle_interval: Duration::ZERO };
        let queue = Subscription { mode: Mode::Queue, lanes: 1, workers, ..Subscription::new("q") };
        let engine = Engine::new(config, Duration::ZERO, &joined, features, vec![(queue, sink)]);
        let mut bench = Bench { engine, now: Duration::ZERO, actions: Vec::new(), most: 0 };
        bench.step(Input::Tick);
        bench.step(Input::Observed(fleet(None, &[])));
        bench.step(Input::Taken(vec![Some(1)]));
        bench.step(Input::Recovered(Recovered::default()));
        bench.step(Input::Loaded(vec![Some(LaneState::default())]));
        bench
    }

    /// An engine that knows that its queue has no rows.
    fn empty(sink: SinkFeatures, workers: usize) -> Self {
        let mut bench = Bench::new(sink, workers);
        bench.answer_claim(Claims { keys: Some(Vec::new()), rows: Some(0), ..Claims::default() });
        bench
    }

    /// Why the queue stands still, if a look at the fleet says so now; the look is answered.
    fn stopped(&mut self) -> Option<Option<String>> {
        let report =
            self.take(|action| if let Action::Observe(report) = action { Some(report.clone()) } else { None })?;
        self.step(Input::Observed(fleet(Some(ME), &[])));
        Some(report.subscriptions["q"].stopped.clone())
    }

    fn step(&mut self, input: Input) {
        self.step_after(Duration::from_millis(1), input);
    }

    fn step_after(&mut self, wait: Duration, input: Input) {
        self.now += wait;
        let input = match input {
            Input::Observed(fleet) => Input::Observed(Fleet { time: BEGAN.plus(self.now), ..fleet }),
            input => input,
        };
        let before = work();
        self.actions.extend(self.engine.step(self.now, input));
        self.most = self.most.max(work() - before);
    }

    fn take<T>(&mut self, pick: impl Fn(&Action) -> Option<T>) -> Option<T> {
        let index = self.actions.iter().position(|action| pick(action).is_some())?;
        pick(&self.actions.remove(index))
    }

    fn claim_request(&mut self) -> Option<ClaimRequest> {
        self.take(|action| if let Action::Claim(requests) = action { Some(requests[0].clone()) } else { None })
    }

    /// Answers so many claims, and looks at the fleet meanwhile, where these are the keys with rows; above which keys they were asked
    /// for.
    fn serve(&mut self, all: &[Box<str>], claims: usize) -> Vec<Box<str>> {
        let mut asked = Vec::new();
        for _ in 0..claims {
            if self.take(|action| matches!(action, Action::Observe(_)).then_some(())).is_some() {
                self.step(Input::Observed(fleet(Some(ME), &[])));
            }
            let mut request = self.claim_request();
            for _ in 0..100 {
                if request.is_some() {
                    break;
                }
                self.step_after(Duration::from_millis(20), Input::Tick);
                request = self.claim_request();
            }
            let after = request.expect("it asks").tell;
            let above = |after: &str| all.iter().filter(|key| ***key > *after).take(KEYS_TOLD_MAX).cloned().collect();
            self.step(Input::Claimed(vec![Claims {
                keys: after.as_deref().map(above),
                rows: Some(0),
                ..Claims::default()
            }]));
            asked.extend(after);
        }
        asked
    }

    /// Answers claims until keys are asked for, with these; what was asked for.
    fn tell(&mut self, keys: &[Box<str>]) -> ClaimRequest {
        loop {
            let rows = Some(keys.len() as u64);
            let request = self.answer_claim(Claims { keys: Some(keys.to_vec()), rows, ..Claims::default() });
            if request.tell.is_some() {
                return request;
            }
        }
    }

    /// Answers the claim under way, waiting for it to be made.
    fn answer_claim(&mut self, claims: Claims) -> ClaimRequest {
        for _ in 0..100 {
            if let Some(request) = self.claim_request() {
                self.step(Input::Claimed(vec![claims]));
                return request;
            }
            self.step_after(Duration::from_millis(20), Input::Tick);
        }
        panic!("nothing was claimed: {:?}", self.actions)
    }

    /// Shows events to the engine, all that there are.
    fn read(&mut self, events: &[Arc<Event>]) {
        let request = self
            .take(|action| if let Action::Poll(request) = action { Some(request.clone()) } else { None })
            .unwrap_or_else(|| panic!("no poll in {:?}", self.actions));
        let top = events.last().map_or(0, |event| event.position);
        let scan = |request: &pillarbox::store::ScanRequest| Scan {
            after: request.after,
            covered_to: top,
            visible: events.iter().map(|event| event.position..=event.position).collect(),
            events: events.to_vec(),
        };
        let scans = request.scans.iter().map(scan).collect();
        self.step(Input::Polled(Page { horizon: top, log_start: 1, scans, ..Page::default() }));
    }

    /// Shows the events of the next page of a log without end, whose events have these many keys in turn, if it is asked for.
    fn read_endless(&mut self, keys: i64) {
        let poll = |action: &Action| if let Action::Poll(request) = action { Some(request.clone()) } else { None };
        let Some(request) = self.take(poll) else { return };
        let scan = |request: &pillarbox::store::ScanRequest| {
            let top = request.to.min(request.after + request.limit as i64);
            let positions = request.after + 1..=top;
            let events = positions.clone().map(|position| event(position, &format!("k{}", position % keys))).collect();
            Scan { after: request.after, covered_to: top, visible: [positions].into_iter().collect(), events }
        };
        let scans = request.scans.iter().map(scan).collect();
        self.step(Input::Polled(Page { horizon: 1_000_000, log_start: 1, scans, ..Page::default() }));
    }

    /// Answers the look at the fleet under way, and waits for the next to begin.
    fn look(&mut self) {
        self.take(|action| matches!(action, Action::Observe(_)).then_some(())).expect("it looks");
        self.step(Input::Observed(fleet(Some(ME), &[])));
        self.step_after(Duration::from_secs(2), Input::Tick);
    }

    /// The next batch that is sent: its number and positions.
    fn sent(&mut self) -> Option<((usize, u64), Vec<Position>)> {
        self.take(|action| match action {
            Action::Deliver { batch, events } => {
                Some((*batch, events.iter().map(|attempt| attempt.event.position).collect()))
            }
            _ => None,
        })
    }

    fn done(&mut self, batch: (usize, u64), count: usize) {
        self.step(Input::Delivered { batch, outcomes: vec![Outcome::Delivered; count] });
    }

    /// Lets the settlement under way be written; the rows that it gives and the floor.
    fn settle(&mut self) -> Option<(Vec<Queued>, Position)> {
        let (queue, floor, lanes) = self.take(|action| match action {
            Action::Settle(settlement) => {
                let lane = &settlement.lanes[0];
                Some((lane.queue.clone(), lane.cursor.floor, settlement.lanes.len()))
            }
            _ => None,
        })?;
        self.step(Input::Settled(vec![true; lanes]));
        Some((queue, floor))
    }

    fn ends(&mut self) -> Vec<ClaimEnd> {
        self.take(|action| if let Action::Finish(ends) = action { Some(ends.clone()) } else { None })
            .unwrap_or_default()
    }
}

/// Position, state and whether it is claimed.
fn rows(queue: &[Queued]) -> Vec<(Position, State, bool)> {
    queue.iter().map(|row| (row.delivery.position, row.delivery.state, row.claim.is_some())).collect()
}

fn claimed(request: &ClaimRequest, index: i64, position: Position, key: &str, attempts: u32) -> Claimed {
    let delivery = DeliveryRow {
        position,
        key: (!key.is_empty()).then(|| key.into()),
        arrival: position,
        state: State::Processing,
        attempts,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    Claimed { claim: ClaimId(request.first.0 + index), delivery, event: Some(event(position, key)), suspect: false }
}

#[test]
fn what_is_quick_gets_no_row() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a"), event(2, "b"), event(3, "a")]);
    let (batch, positions) = bench.sent().unwrap();
    assert_eq!(positions, [1, 2, 3]);
    bench.done(batch, 3);
    let (queue, floor) = bench.settle().unwrap();
    assert_eq!((rows(&queue), floor), (vec![], 3));
}

#[test]
fn what_is_slow_gets_a_row_with_a_claim_and_what_waits_gets_one_for_everybody() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a"), event(2, "b"), event(3, "a"), event(4, "c")]);
    let (batch, positions) = bench.sent().unwrap();
    assert_eq!(positions, [1, 2, 3, 4]);
    bench.step_after(Duration::from_millis(20), Input::HandedBack { batch, outcomes: vec![Outcome::Delivered] });
    assert_eq!(bench.settle().unwrap().1, 1, "what was over before is settled");
    bench.step_after(Duration::from_millis(60), Input::Tick);
    let (queue, floor) = bench.settle().unwrap();
    assert_eq!(floor, 4, "the lane goes on");
    let given = rows(&queue);
    assert_eq!(given[0], (2, State::Processing, true), "{given:?}");
    assert!(given[1..].iter().all(|row| row.1 == State::Pending && !row.2), "{given:?}");
    assert_eq!(given.len(), 3);
    bench.done(batch, 1);
    let ends = bench.ends();
    assert_eq!((ends.len(), ends[0].position, &ends[0].fate), (1, 2, &ClaimFate::Done));
}

#[test]
fn a_key_at_work_has_its_row_before_those_behind_it() {
    let mut bench = Bench::empty(SinkFeatures { ordered_batch: false, ..HANDLER }, 2);
    bench.read(&[event(1, "a")]);
    let (slow, _) = bench.sent().unwrap();
    bench.step_after(Duration::from_millis(30), Input::Rang);
    bench.read(&[event(2, "b"), event(3, "b")]);
    let (quick, positions) = bench.sent().unwrap();
    assert_eq!(positions, [2]);
    bench.step_after(Duration::from_millis(30), Input::Tick);
    let (queue, _) = bench.settle().unwrap();
    let mut given = rows(&queue);
    assert!(given.contains(&(1, State::Processing, true)), "{given:?}");
    given.retain(|row| row.0 > 1);
    assert_eq!(given, [(2, State::Processing, true), (3, State::Pending, false)], "nobody else may work on b");
    bench.done(quick, 1);
    bench.done(slow, 1);
}

/// A receiver of events of so many keys is down for a while: how many of them get rows, and why the queue stands still at the end. The store
/// tells of all rows when it is asked to, as `count` counts them.
fn outage(bench: &mut Bench, keys: i64, count: impl Fn(usize) -> Option<u64>) -> (usize, Option<String>) {
    let (mut rows, mut stopped) = (0, None);
    for _ in 0..1_000 {
        bench.read_endless(keys);
        while let Some((batch, positions)) = bench.sent() {
            let outcomes = vec![Outcome::Failed(Failure::sink("down")); positions.len()];
            bench.step(Input::Delivered { batch, outcomes });
        }
        rows += bench.settle().map_or(0, |(queue, _)| queue.len());
        if let Some(request) = bench.claim_request() {
            let told = request.tell.is_some();
            let keys = told.then(|| (0..keys).map(|key| format!("k{key}").into()).collect());
            let next_due = (rows > 0).then(|| BEGAN.plus(Duration::from_secs(3_600)));
            let rows = if told { count(rows) } else { None };
            bench.step(Input::Claimed(vec![Claims { keys, rows, next_due, ..Claims::default() }]));
        }
        stopped = bench.stopped().unwrap_or(stopped);
        bench.step_after(Duration::from_millis(20), Input::Tick);
    }
    (rows, stopped)
}

/// While fewer than five keys are there, a receiver that is down cannot be told from a few bad keys: what these keys have makes room for
/// others, in rows. The rows are not counted while nothing can be claimed, and the limit holds all the same.
#[test]
fn an_outage_with_few_keys_moves_no_more_to_rows_than_max_blocked_and_a_window() {
    const MAX_BLOCKED: usize = 300;
    const IN_FLIGHT: usize = 100;
    for keys in 1..BREAKER_KEYS_MAX as i64 {
        let config =
            EngineConfig { in_flight: IN_FLIGHT, page_size: 50, max_blocked: MAX_BLOCKED, ..EngineConfig::default() };
        let mut bench = Bench::with(config, HANDLER, 4);
        bench.answer_claim(Claims { keys: Some(Vec::new()), rows: Some(0), ..Claims::default() });
        let (rows, stopped) = outage(&mut bench, keys, |rows| Some(rows as u64));
        assert!(rows >= MAX_BLOCKED, "{keys} keys: other keys have room, since {rows} events have rows");
        assert!(rows <= MAX_BLOCKED + IN_FLIGHT, "{keys} keys: {rows} rows");
        let stopped = stopped.expect("people are told");
        assert!(stopped.contains("max_blocked = 300"), "{stopped}");
    }
}

/// They were added up while the receiver was down. It is known that they are over when there is nothing to claim, now or later.
#[test]
fn rows_that_cannot_be_counted_stop_no_queue_when_none_is_left() {
    const MAX_BLOCKED: usize = 300;
    let config = EngineConfig { in_flight: 100, page_size: 50, max_blocked: MAX_BLOCKED, ..EngineConfig::default() };
    let mut bench = Bench::with(config, HANDLER, 4);
    bench.answer_claim(Claims { keys: Some(Vec::new()), rows: None, ..Claims::default() });
    let (_, stopped) = outage(&mut bench, 2, |_| None);
    assert!(stopped.is_some_and(|stopped| stopped.contains("max_blocked = 300")));
    let mut stopped = Some(String::new());
    for _ in 0..1_000 {
        if bench.claim_request().is_some() {
            bench.step(Input::Claimed(vec![Claims::default()]));
        }
        bench.settle();
        stopped = bench.stopped().unwrap_or(stopped);
        bench.step_after(Duration::from_millis(20), Input::Tick);
    }
    assert_eq!(stopped, None);
}

/// What got a row and has ended does not count: only what is waiting does.
#[test]
fn a_busy_queue_is_not_stopped_by_rows_that_have_ended() {
    const MAX_BLOCKED: usize = 5;
    let config = EngineConfig { max_blocked: MAX_BLOCKED, ..EngineConfig::default() };
    let mut bench = Bench::with(config, HANDLER, 4);
    bench.answer_claim(Claims { keys: Some(Vec::new()), rows: Some(0), ..Claims::default() });
    let mut rows = 0;
    for position in 1..=4 * MAX_BLOCKED as i64 {
        bench.read(&[event(position, "")]);
        let (slow, _) = bench.sent().expect("nothing holds it up");
        bench.step_after(Duration::from_millis(60), Input::Tick);
        rows += bench.settle().map_or(0, |(queue, _)| queue.len());
        bench.done(slow, 1);
        bench.ends();
        if bench.claim_request().is_some() {
            bench.step(Input::Claimed(vec![Claims::default()]));
        }
        bench.step_after(Duration::from_millis(20), Input::Rang);
    }
    assert!(rows > MAX_BLOCKED, "{rows} rows: the test shows nothing");
}

/// Settlements wait for a call that ends claims, so that none is long.
#[test]
fn claims_end_a_few_hundred_at_a_time() {
    let mut bench = Bench::new(HANDLER, 64);
    bench.answer_claim(Claims { keys: Some(Vec::new()), waiting: 10_000, rows: Some(10_000), ..Claims::default() });
    let asked = (0..100).find_map(|_| {
        bench.step_after(Duration::from_millis(20), Input::Tick);
        bench.claim_request()
    });
    let request = asked.expect("it asks for more");
    let count = request.limit;
    assert!(count > 500, "it claims {count} at once");
    let rows = (0..count as i64).map(|index| claimed(&request, index, index + 1, "", 0)).collect();
    bench.step(Input::Claimed(vec![Claims { claimed: rows, waiting: 10_000, ..Claims::default() }]));
    let mut calls = Vec::new();
    // The first batch that is over is told at once; what ends meanwhile waits.
    while let Some((batch, positions)) = bench.sent() {
        bench.done(batch, positions.len());
    }
    for ends in std::iter::from_fn(|| Some(bench.ends())).take_while(|ends: &Vec<ClaimEnd>| !ends.is_empty()) {
        calls.push(ends.len());
    }
    assert_eq!(calls.len(), 1, "one call is under way");
    for _ in 0..count {
        if calls.iter().sum::<usize>() == count {
            break;
        }
        bench.step(Input::Finished(vec![true; calls[calls.len() - 1]]));
        calls.push(bench.ends().len());
    }
    assert_eq!((calls.iter().sum::<usize>(), calls.iter().max()), (count, Some(&500)), "{calls:?}");
}

#[test]
fn a_claim_that_is_over_before_its_row_is_written_ends_after_that() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a")]);
    let (batch, _) = bench.sent().unwrap();
    bench.step_after(Duration::from_millis(60), Input::Tick);
    bench.done(batch, 1);
    assert_eq!(bench.ends(), []);
    let (queue, _) = bench.settle().unwrap();
    assert_eq!(rows(&queue), [(1, State::Processing, true)]);
    assert_eq!(bench.ends()[0].claim, queue[0].claim.unwrap());
}

#[test]
fn rows_that_could_not_be_written_are_written_again() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a"), event(2, "a")]);
    let (batch, _) = bench.sent().unwrap();
    bench.step(Input::HandedBack { batch, outcomes: Vec::new() });
    bench.step_after(Duration::from_millis(60), Input::Tick);
    bench.take(|action| matches!(action, Action::Settle(_)).then_some(())).unwrap();
    bench.step(Input::CallFailed(Call::Settle));
    bench.step_after(Duration::from_secs(6), Input::Tick);
    let given = rows(&bench.settle().unwrap().0);
    assert_eq!(given, [(1, State::Processing, true), (2, State::Pending, false)]);
}

#[test]
fn a_key_with_rows_goes_behind_them_until_they_are_known_to_be_gone() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a")]);
    let (batch, _) = bench.sent().unwrap();
    bench.step(Input::Delivered { batch, outcomes: vec![Outcome::Failed(Failure::event("no"))] });
    let (queue, _) = bench.settle().unwrap();
    assert_eq!(rows(&queue), [(1, State::Retrying, false)]);
    assert_eq!((queue[0].delivery.attempts, queue[0].error.as_ref().unwrap().message.as_str()), (1, "no"));
    bench.answer_claim(Claims::default());
    bench.step(Input::Rang);
    bench.read(&[event(2, "a"), event(3, "b")]);
    let (batch, positions) = bench.sent().unwrap();
    assert_eq!(positions, [3], "a has a row");
    bench.done(batch, 1);
    assert_eq!(rows(&bench.settle().unwrap().0), [(2, State::Pending, false)]);
    // The keys are told, and a is not among them. What was told first may have been asked for before its row was written.
    for _ in 0..2 {
        bench.tell(&[]);
        // A look at the fleet that began later shows that the lane was its own when they were.
        bench.look();
        bench.look();
    }
    bench.step(Input::Rang);
    bench.read(&[event(4, "a")]);
    assert_eq!(bench.settle().map(|settled| rows(&settled.0)).unwrap_or_default(), []);
}

#[test]
fn keys_that_are_told_in_slices_are_forgotten_when_the_last_slice_is_told() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "a")]);
    let (batch, _) = bench.sent().unwrap();
    bench.step(Input::Delivered { batch, outcomes: vec![Outcome::Failed(Failure::event("no"))] });
    assert_eq!(rows(&bench.settle().unwrap().0), [(1, State::Retrying, false)]);
    let mut all: Vec<Box<str>> = (0..KEYS_TOLD_MAX).map(|number| format!("k{number}").into()).collect();
    all.sort_unstable();
    all.push("z".into());
    let asked = bench.serve(&all, 30);
    assert!(asked.contains(&all[KEYS_TOLD_MAX - 1]), "the next slice begins where the last one ended: {asked:?}");
    bench.step(Input::Rang);
    bench.read(&[event(2, "a"), event(3, "z"), event(4, "k7")]);
    let (_, positions) = bench.sent().unwrap();
    assert_eq!(positions, [2], "a has no row any more, the others have");
    assert_eq!(rows(&bench.settle().unwrap().0), [(3, State::Pending, false), (4, State::Pending, false)]);
}

#[test]
fn no_step_looks_at_all_keys_with_rows() {
    let mut bench = Bench::empty(HANDLER, 1);
    let mut all: Vec<Box<str>> = (0..10 * KEYS_TOLD_MAX).map(|number| format!("k{number}").into()).collect();
    all.sort_unstable();
    bench.most = 0;
    let asked = bench.serve(&all, 60);
    let (begun, most) = (asked.iter().filter(|after| after.is_empty()).count(), bench.most);
    assert!(begun > 1, "all were told: {asked:?}");
    assert!(most < KEYS_TOLD_MAX as u64 + 100, "a slice at a time, not {most}");
    bench.step(Input::Rang);
    bench.read(&[event(1, "k7"), event(2, "a")]);
    assert_eq!(bench.sent().unwrap().1, [2], "k7 has a row");
}

#[test]
fn while_rows_wait_what_is_read_goes_behind_them() {
    let mut bench = Bench::new(HANDLER, 1);
    let request = bench.claim_request().unwrap();
    let answer = Claims { claimed: vec![claimed(&request, 0, 10, "x", 0)], waiting: 5, ..Claims::default() };
    bench.step(Input::Claimed(vec![answer]));
    let (batch, positions) = bench.sent().unwrap();
    assert_eq!(positions, [10]);
    bench.read(&[event(11, "a"), event(12, "")]);
    assert_eq!(rows(&bench.settle().unwrap().0), [(11, State::Pending, false), (12, State::Pending, false)]);
    bench.done(batch, 1);
    assert_eq!(bench.ends()[0].position, 10);
}

#[test]
fn what_is_read_while_all_workers_are_at_something_slow_goes_to_the_others() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.read(&[event(1, "")]);
    bench.sent().unwrap();
    bench.step_after(Duration::from_millis(60), Input::Tick);
    assert_eq!(rows(&bench.settle().unwrap().0), [(1, State::Processing, true)]);
    // Nothing waits, it is told.
    let request = bench.answer_claim(Claims { keys: None, rows: Some(1), ..Claims::default() });
    assert_eq!((request.limit, request.tell.is_some()), (0, true));
    bench.step(Input::Rang);
    bench.read(&[event(2, "")]);
    assert_eq!(rows(&bench.settle().unwrap().0), [(2, State::Pending, false)]);
}

#[test]
fn a_failed_claim_waits_for_its_next_attempt_and_a_down_sink_burns_none() {
    let mut bench = Bench::new(HANDLER, 1);
    let request = bench.claim_request().unwrap();
    let claims = vec![claimed(&request, 0, 10, "x", 2), claimed(&request, 1, 11, "y", 0)];
    bench.step(Input::Claimed(vec![Claims { claimed: claims, ..Claims::default() }]));
    let (batch, _) = bench.sent().unwrap();
    let outcomes = vec![Outcome::Failed(Failure::event("no")), Outcome::Failed(Failure::sink("down"))];
    bench.step(Input::Delivered { batch, outcomes });
    let ends = bench.ends();
    let failed = |end: &ClaimEnd| match &end.fate {
        ClaimFate::Failed(failed) => (end.position, failed.attempts, failed.state),
        fate => panic!("{fate:?}"),
    };
    // The only worker is left to other keys.
    let expected = [(10, 3, State::Retrying), (11, 0, State::Retrying)];
    assert_eq!(ends.iter().map(failed).collect::<Vec<_>>(), expected, "{ends:?}");
}

#[test]
fn a_claim_that_may_be_poison_is_kept_while_there_are_workers_for_others() {
    let mut bench = Bench::new(HANDLER, 4);
    let request = bench.claim_request().unwrap();
    let claims = vec![claimed(&request, 0, 11, "y", 0)];
    bench.step(Input::Claimed(vec![Claims { claimed: claims, ..Claims::default() }]));
    let (batch, _) = bench.sent().unwrap();
    bench.step(Input::Delivered { batch, outcomes: vec![Outcome::Failed(Failure::sink("down"))] });
    assert_eq!(bench.ends(), [], "it is tried again");
}

#[test]
fn a_claim_that_was_not_answered_is_asked_for_again_by_the_same_numbers() {
    let mut bench = Bench::new(HANDLER, 1);
    let request = bench.claim_request().unwrap();
    bench.step(Input::CallFailed(Call::Claim));
    bench.step_after(Duration::from_secs(6), Input::Tick);
    let again = bench.claim_request().unwrap();
    assert_eq!(again, ClaimRequest { again: true, ..request });
}

#[test]
fn a_drain_gives_back_what_is_not_at_work_and_waits_for_the_rest() {
    let mut bench = Bench::new(SinkFeatures { ordered_batch: false, ..HANDLER }, 1);
    let request = bench.claim_request().unwrap();
    let claims = vec![claimed(&request, 0, 10, "x", 0), claimed(&request, 1, 11, "x", 0)];
    bench.step(Input::Claimed(vec![Claims { claimed: claims, ..Claims::default() }]));
    let (batch, positions) = bench.sent().unwrap();
    assert_eq!(positions, [10]);
    bench.step(Input::Drain);
    let ends = bench.ends();
    assert_eq!((ends.len(), ends[0].position, &ends[0].fate), (1, 11, &ClaimFate::Back));
    bench.step(Input::Finished(vec![true]));
    assert!(!bench.actions.iter().any(|action| matches!(action, Action::Leave)));
    bench.done(batch, 1);
    assert_eq!(bench.ends()[0].fate, ClaimFate::Done);
    bench.step(Input::Finished(vec![true]));
    for _ in 0..5 {
        bench.settle();
        if bench.take(|action| matches!(action, Action::Observe(_)).then_some(())).is_some() {
            bench.step(Input::Observed(fleet(Some(ME), &[])));
        }
        bench.take(|action| matches!(action, Action::Poll(_)).then_some(()));
        bench.step_after(Duration::from_millis(100), Input::Tick);
    }
    assert!(bench.actions.iter().any(|action| matches!(action, Action::Leave)), "{:?}", bench.actions);
}

#[test]
fn a_handler_that_settles_by_itself_sees_rows_only_and_its_claims_are_not_ended() {
    let mut bench = Bench::empty(SinkFeatures { one_by_one: true, settles: true, ..SinkFeatures::default() }, 1);
    bench.read(&[event(1, "a")]);
    assert_eq!(bench.sent(), None);
    assert_eq!(rows(&bench.settle().unwrap().0), [(1, State::Pending, false)]);
    let request = bench.claim_request().unwrap();
    let answer = Claims { claimed: vec![claimed(&request, 0, 1, "a", 0)], ..Claims::default() };
    bench.step(Input::Claimed(vec![answer]));
    let (batch, _) = bench.sent().unwrap();
    bench.done(batch, 1);
    assert_eq!(bench.ends(), []);
}

#[test]
fn the_claims_of_an_instance_that_ended_are_recovered() {
    let mut bench = Bench::empty(HANDLER, 1);
    bench.take(|action| matches!(action, Action::Observe(_)).then_some(()));
    bench.step(Input::Observed(fleet(Some(ME), &[(OTHER, Lock::Free)])));
    let recover = |action: &Action| if let Action::Recover(request) = action { Some(request.clone()) } else { None };
    // The first one was the look through all claims at the start.
    bench.take(recover);
    let request = bench.take(recover).unwrap();
    assert_eq!((request.ended, request.sweep), (vec![(OTHER, RecoveryCause::Crash, None)], false));
    let attempt = |position, attempts| {
        let (key, state) = (Some("k".into()), State::Processing);
        let row = DeliveryRow { position, key, arrival: 1, state, attempts, due_at: BEGAN, since: BEGAN };
        RecoveredAttempt::new(ID, &row, recovered(&RetryPolicy::handler(), &row, RecoveryCause::Crash, BEGAN))
    };
    let last = RetryPolicy::handler().max_attempts;
    let attempts = vec![attempt(7, 0), attempt(8, last - 1)];
    bench.step(Input::Recovered(Recovered { claims: vec![(ID, RecoveryCause::Crash, 3)], attempts }));
    let figures = bench.engine.take_figures();
    assert_eq!(figures.recovered.iter().next(), Some((&("q".into(), "crash"), &3)));
    let told =
        |attempt: &FailedAttempt| (attempt.position, attempt.attempt, attempt.kind, attempt.key.clone(), attempt.next);
    let told: Vec<_> = figures.failed_attempts.iter().map(told).collect();
    let key = || Some(Box::from("k"));
    assert_eq!(told[0], (7, 1, CRASH, key(), NextTry::At(BEGAN)), "each is named in the log, with what becomes of it");
    assert_eq!(told[1], (8, last, CRASH, key(), NextTry::Never));
}

#[test]
fn a_key_that_fills_the_window_moves_aside_before_it_has_had_a_thousand_turns() {
    let mut bench = Bench::empty(HANDLER, 1);
    let mut turns = 0;
    let mut next = 1;
    let mut moved = false;
    while !moved {
        let page: Vec<_> = (next..next + 2_000).map(|position| event(position, "big")).collect();
        next += 2_000;
        let top = next - 1;
        if let Some(request) =
            bench.take(|action| if let Action::Poll(request) = action { Some(request.clone()) } else { None })
        {
            let scan = |request: &pillarbox::store::ScanRequest| Scan {
                after: request.after,
                covered_to: top,
                visible: [request.after + 1..=top].into_iter().collect(),
                events: page.clone(),
            };
            let scans = request.scans.iter().map(scan).collect();
            bench.step(Input::Polled(Page { horizon: 1_000_000, log_start: 1, scans, ..Page::default() }));
        }
        while let Some((batch, positions)) = bench.sent() {
            turns += positions.len();
            bench.done(batch, positions.len());
        }
        moved |= bench.settle().is_some_and(|settled| !settled.0.is_empty());
        assert!(next < 40_000, "it was never moved");
    }
    assert!(turns < 1_000, "{turns}");
}
