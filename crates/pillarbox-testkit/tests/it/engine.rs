use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::State;
use pillarbox::engine::{Action, Engine, EngineConfig, Input};
use pillarbox::engine::{FailedAttempt, NextTry};
use pillarbox::limit::{ATTEMPTS_LOGGED_INTERVAL, BREAKER_BASE, BREAKER_KEYS_MAX, FLOOD_DEAD_MAX};
use pillarbox::sink::{BatchId, Outcome, SinkFeatures};
use pillarbox::store::{
    Cursor, Definition, DeliveryRow, Fleet, InstanceId, InstanceView, Joined, LaneRef, LaneState, LaneView, Lock, Page,
    PollRequest, Scan, StoreFeatures, SubscriptionId, SubscriptionView, Writer,
};
use pillarbox::{Event, Failure, Headers, OnDead, Position, RetryPolicy, Subscription, Timestamp};
use uuid::Uuid;

const ME: InstanceId = InstanceId(7);
const ID: SubscriptionId = SubscriptionId(1);
/// Seizures after which a lane announces every attempt.
const CAREFUL: u32 = 2;
/// What the database's clock says when a test begins.
const BEGAN: Timestamp = Timestamp(1_000_000);

/// An engine with one subscription of one lane, stepped by hand.
struct Bench {
    engine: Engine,
    now: Duration,
    /// What [`Bench::go_on`] has sent.
    at_sink: Vec<((usize, BatchId), Vec<Position>)>,
}

fn view() -> SubscriptionView {
    SubscriptionView {
        id: ID,
        name: "s".into(),
        definition: Definition::default(),
        lanes: 1,
        paused: false,
        created: false,
    }
}

/// A definition under this number that wants one topic.
fn wanting(number: i64, topic: &str) -> Definition {
    Definition { number, ..Definition::of(&Subscription::new("s").topics([topic]), 0) }
}

fn fleet(view: SubscriptionView, owner: Option<InstanceId>, epoch: i64) -> Fleet {
    let instance = InstanceView { id: ME, beat: 1, lock: Lock::Held, draining: false, subscriptions: vec![view.id] };
    let lane = LaneRef { subscription: ID, lane: 0 };
    let lanes = vec![LaneView { lane, owner, epoch, revision: 0, takeovers: 0 }];
    Fleet { instances: vec![instance], subscriptions: vec![view], lanes, time: BEGAN }
}

impl Bench {
    fn new(subscription: Subscription, view: SubscriptionView) -> Self {
        Bench::with(subscription, view, SinkFeatures::default())
    }

    fn with(subscription: Subscription, view: SubscriptionView, sink: SinkFeatures) -> Self {
        Bench::with_limits(subscription, view, sink, EngineConfig::default())
    }

    fn with_limits(
        subscription: Subscription,
        view: SubscriptionView,
        sink: SinkFeatures,
        config: EngineConfig,
    ) -> Self {
        let joined =
            Joined { instance: ME, log_id: Uuid::nil(), incarnation: 1, subscriptions: vec![view], time: BEGAN };
        let features = StoreFeatures { lock_proves_life: true, settle_interval: Duration::ZERO };
        let subscriptions = vec![(subscription, sink)];
        let engine = Engine::new(config, Duration::ZERO, &joined, features, subscriptions);
        Bench { engine, now: Duration::ZERO, at_sink: Vec::new() }
    }

    fn step(&mut self, input: Input) -> Vec<Action> {
        self.now += Duration::from_millis(100);
        let input = match input {
            Input::Observed(fleet) => Input::Observed(Fleet { time: BEGAN.plus(self.now), ..fleet }),
            input => input,
        };
        self.engine.step(self.now, input)
    }

    /// Lets time pass until something is sent.
    fn until_sent(&mut self) -> (Duration, (usize, BatchId), Vec<Position>) {
        let began = self.now;
        while self.at_sink.is_empty() && self.now - began < Duration::from_secs(600) {
            self.go_on(Input::Tick);
        }
        assert_eq!(self.at_sink.len(), 1, "batches at the sink of one worker");
        let (batch, positions) = self.at_sink.remove(0);
        (self.now - began, batch, positions)
    }

    /// One step, and those that follow when deliveries are fetched and settlements written; what else is to be done. Batches are noted.
    fn go_on(&mut self, input: Input) -> Vec<Action> {
        let (mut inputs, mut others) = (vec![input], Vec::new());
        while let Some(input) = inputs.pop() {
            for action in self.step(input) {
                match action {
                    Action::Fetch(positions) => inputs.push(Input::Fetched(events(&positions))),
                    Action::Settle(settlement) => inputs.push(Input::Settled(vec![true; settlement.lanes.len()])),
                    Action::Deliver { batch, events } => {
                        self.at_sink.push((batch, events.iter().map(|attempt| attempt.event.position).collect()));
                    }
                    other => others.push(other),
                }
            }
        }
        others
    }

    /// The sink's answer to a batch of so many events.
    fn answer(&mut self, batch: (usize, BatchId), failure: &Failure, count: usize) -> Vec<Action> {
        self.go_on(Input::Delivered { batch, outcomes: vec![Outcome::Failed(failure.clone()); count] })
    }

    fn breaker(&self) -> Option<String> {
        self.engine.report().subscriptions["s"].breaker.as_ref().map(|breaker| breaker.error.clone())
    }

    /// Takes the lane and loads this cursor; the poll that follows.
    fn own(&mut self, cursor: Cursor) -> PollRequest {
        self.own_as(LaneState { cursor, ..LaneState::default() })
    }

    fn own_as(&mut self, state: LaneState) -> PollRequest {
        self.step(Input::Tick);
        self.step(Input::Observed(fleet(view(), None, 0)));
        self.step(Input::Taken(vec![Some(1)]));
        poll(&self.step(Input::Loaded(vec![Some(state)])))
    }

    /// Lets time pass until a lane is written; whether the write says that its owner is calm.
    fn until_written(&mut self) -> bool {
        for _ in 0..100 {
            if let Some(calm) = calm(&self.step(Input::Tick)) {
                return calm;
            }
        }
        panic!("nothing was written");
    }

    fn pruned(&mut self) -> u64 {
        self.engine.take_figures().pruned.get("s").copied().unwrap_or(0)
    }
}

fn poll(actions: &[Action]) -> PollRequest {
    let polls = actions.iter().find_map(|action| if let Action::Poll(request) = action { Some(request) } else { None });
    polls.unwrap_or_else(|| panic!("no poll in {actions:?}")).clone()
}

/// The positions that are sent.
fn sent(actions: &[Action]) -> Vec<Position> {
    let events = actions.iter().flat_map(|action| match action {
        Action::Deliver { events, .. } => events.iter().map(|attempt| attempt.event.position).collect(),
        _ => Vec::new(),
    });
    events.collect()
}

fn batch(actions: &[Action]) -> Option<(usize, BatchId)> {
    actions.iter().find_map(|action| if let Action::Deliver { batch, .. } = action { Some(*batch) } else { None })
}

/// Whether a lane is written as calm, if one is written.
fn calm(actions: &[Action]) -> Option<bool> {
    actions
        .iter()
        .find_map(|action| if let Action::Settle(settlement) = action { Some(settlement.lanes[0].calm) } else { None })
}

/// Why pausing is asked for, each time.
fn pauses(actions: &[Action]) -> Vec<&str> {
    let mut reasons = Vec::new();
    for action in actions {
        if let Action::Pause { reason, .. } = action {
            reasons.push(reason.as_str());
        }
    }
    reasons
}

/// Events without a key: each counts as a key of its own.
fn events(positions: &[Position]) -> Vec<Arc<Event>> {
    let event = |&position: &Position| {
        Arc::new(Event {
            position,
            id: Uuid::from_u128(position as u128),
            topic: "t".into(),
            key: None,
            r#type: "y".into(),
            payload: pillarbox::Payload::None,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(0),
            malformed: None,
        })
    };
    positions.iter().map(event).collect()
}

fn scan(after: Position, covered_to: Position, visible: &[Position]) -> Scan {
    let shown = visible.iter().map(|&position| position..=position).collect();
    Scan { after, covered_to, visible: shown, events: events(visible) }
}

/// Somebody writes, so that nothing is dead.
fn page(log_start: Position, horizon: Position, scans: Vec<Scan>) -> Page {
    Page { horizon, writers: Some(vec![Writer(1)]), session: 1, log_start, scans, ..Page::default() }
}

#[test]
fn what_retention_kept_of_a_hole_is_delivered_and_the_rest_given_up_once_it_was_looked_for() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    let request = bench.own(Cursor { floor: 0, settled: [8..=9].into_iter().collect(), anchor: None });
    assert_eq!(request.scans.iter().map(|scan| (scan.after, scan.to)).next(), Some((0, 7)));
    let actions = bench.step(Input::Polled(page(6, 9, vec![scan(0, 2, &[]), scan(9, 9, &[])])));
    assert_eq!((sent(&actions), bench.pruned()), (vec![], 2), "3 to 5 were not looked for");
    let request = poll(&actions);
    assert_eq!((request.scans[0].after, request.scans[0].to), (2, 7));
    let actions = bench.step(Input::Polled(page(6, 9, vec![scan(2, 7, &[3]), scan(9, 9, &[])])));
    assert_eq!((sent(&actions), bench.pruned()), (vec![3], 2), "3 was kept; 4 and 5 are gone; 6 and 7 may still come");
    let request = poll(&actions);
    assert_eq!((request.scans[0].after, request.scans[0].to), (5, 7));
}

#[test]
fn what_retention_kept_is_delivered_on_the_way_up() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.own(Cursor::default());
    let actions = bench.step(Input::Polled(page(6, 7, vec![scan(0, 7, &[3, 7])])));
    assert_eq!((sent(&actions), bench.pruned()), (vec![3, 7], 4));
    let request = poll(&actions);
    assert_eq!((request.scans[0].after, request.scans[0].to), (5, 6), "6 may still come");
}

#[test]
fn a_hole_that_stays_is_looked_at_ever_less_often_until_another_appears() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.own(Cursor::default());
    // In ten seconds, with a step every tenth of one.
    let mut polls = |visible: &[Position]| {
        let last = *visible.last().unwrap();
        let shows = || Input::Polled(page(1, last, vec![scan(0, last, visible)]));
        let mut actions = bench.step(shows());
        let mut count = 0;
        for _ in 0..100 {
            count += u32::from(actions.iter().any(|action| matches!(action, Action::Poll(_))));
            let polls = actions.iter().any(|action| matches!(action, Action::Poll(_)));
            actions = bench.step(if polls { shows() } else { Input::Tick });
        }
        count
    };
    let first = polls(&[2]);
    (0..9).for_each(|_| _ = polls(&[2]));
    let later = polls(&[2]);
    assert!(later * 2 < first, "{later} after {first}");
    bench.go_on(Input::Rang);
    let mut count = 0;
    for _ in 0..20 {
        let actions = bench.step(Input::Polled(page(1, 4, vec![scan(0, 4, &[2, 4])])));
        count += u32::from(actions.iter().any(|action| matches!(action, Action::Poll(_))));
    }
    assert!(count > 0, "3 is looked for at once");
}

#[test]
fn who_is_writing_is_looked_at_every_20_ms_at_the_most_however_often_it_rings() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.own(Cursor::default());
    let (mut polls, mut looks, mut asked) = (0, 0, true);
    for _ in 0..1_000 {
        bench.now += Duration::from_millis(1);
        let shows_a_hole = || Input::Polled(page(1, 2, vec![scan(0, 2, &[2])]));
        let actions = bench.engine.step(bench.now, if asked { shows_a_hole() } else { Input::Rang });
        let request =
            actions.iter().find_map(|action| if let Action::Poll(request) = action { Some(request) } else { None });
        asked = request.is_some();
        polls += u32::from(asked);
        looks += u32::from(request.is_some_and(|request| !request.without_writers));
    }
    assert!(polls > 200, "{polls} polls for 500 rings");
    assert!((20..=50).contains(&looks), "{looks} of {polls} polls looked at the writers in a second");
}

/// A lane that was seized once, and what the poll after that shows.
fn seized(visible: &[Position], deliveries: Vec<DeliveryRow>) -> (Bench, Option<(usize, BatchId)>) {
    let subscription = Subscription { lanes: 1, workers: 4, batch_size: 1, ..Subscription::new("s") };
    let mut bench = Bench::new(subscription, view());
    bench.own_as(LaneState { takeovers: 1, deliveries, ..LaneState::default() });
    let last = visible.last().copied().unwrap_or(0);
    let actions = bench.step(Input::Polled(page(1, last, vec![scan(0, last, visible)])));
    (bench, batch(&actions))
}

fn delivered(batch: (usize, BatchId)) -> Input {
    Input::Delivered { batch, outcomes: vec![Outcome::Delivered] }
}

#[test]
fn seizures_count_until_the_lowest_event_is_over_whatever_else_gets_on() {
    let (mut bench, first) = seized(&[1, 2], Vec::new());
    let first = first.unwrap();
    let newer = (first.0, first.1 + 1);
    let calm_by_then = calm(&bench.step(delivered(newer))).unwrap_or_else(|| bench.until_written());
    assert!(!calm_by_then, "event 1 may be what killed the owner before");
    bench.step(Input::Settled(vec![true]));
    let calm_by_then = calm(&bench.step(delivered(first))).unwrap_or_else(|| bench.until_written());
    assert!(calm_by_then);
}

#[test]
fn an_owner_that_finds_nothing_is_calm_and_says_so() {
    let (mut bench, _) = seized(&[], Vec::new());
    let mut said = Vec::new();
    for _ in 0..200 {
        let mut actions = bench.step(Input::Tick);
        if actions.iter().any(|action| matches!(action, Action::Poll(_))) {
            actions = bench.step(Input::Polled(page(1, 0, vec![scan(0, 0, &[])])));
        }
        if let Some(calm) = calm(&actions) {
            said.push(calm);
            bench.step(Input::Settled(vec![true]));
        }
    }
    assert_eq!(said, [true], "once");
}

#[test]
fn seizures_count_until_what_was_due_has_come_back() {
    let due = DeliveryRow {
        position: 1,
        key: None,
        arrival: 1,
        state: State::Retrying,
        attempts: 1,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    let (mut bench, first) = seized(&[2], vec![due]);
    let calm_by_then = calm(&bench.step(delivered(first.unwrap()))).unwrap_or_else(|| bench.until_written());
    assert!(!calm_by_then, "the delivery that is due may be what killed the owner before");
}

#[test]
fn a_configuration_that_is_not_the_one_in_force_is_told_once() {
    let own = Subscription { lanes: 4, ..Subscription::new("s").topics(["own"]) };
    let mut bench = Bench::new(own, SubscriptionView { definition: wanting(0, "own"), ..view() });
    let told = bench.engine.take_figures().warnings;
    assert!(told.len() == 1 && told[0].contains("1 lanes in the database and 4"), "{told:?}");
    let mut look = |topic: &str, lanes: u32| {
        let definition = wanting(0, topic);
        bench.step(Input::Observed(fleet(SubscriptionView { definition, lanes, ..view() }, None, 0)));
        bench.engine.take_figures().warnings
    };
    assert_eq!(look("own", 1), Vec::<String>::new());
    let told = look("new", 1);
    assert!(told.len() == 1 && told[0].contains("started later") && told[0].contains("new"), "{told:?}");
    assert_eq!(look("new", 1), Vec::<String>::new(), "once");
    assert_eq!(look("newer", 1).len(), 1);
    assert_eq!(look("own", 4), Vec::<String>::new(), "its own again");
    assert_eq!(look("new", 2).len(), 2);
}

/// A lane loaded under this definition.
fn loaded_under(definition: &Definition) -> Input {
    Input::Loaded(vec![Some(LaneState { definition: Arc::new(definition.clone()), ..LaneState::default() })])
}

fn of_topic(topic: &str, mut scan: Scan) -> Scan {
    scan.events =
        scan.events.iter().map(|event| Arc::new(Event { topic: topic.into(), ..(**event).clone() })).collect();
    scan
}

#[test]
fn a_lane_is_read_with_the_filter_that_it_was_loaded_with() {
    let (old, new) = (wanting(1, "old"), wanting(2, "new"));
    let own = Subscription { lanes: 1, ..Subscription::new("s").topics(["old"]) };
    let seen = |definition: &Definition, epoch| {
        fleet(SubscriptionView { definition: definition.clone(), ..view() }, Some(ME), epoch)
    };
    let mut bench = Bench::new(own, SubscriptionView { definition: old.clone(), ..view() });
    bench.step(Input::Tick);
    bench.step(Input::Observed(seen(&old, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    let request = poll(&bench.step(loaded_under(&old)));
    assert_eq!(request.wanted, std::slice::from_ref(&old.filter));
    // Another relay changes the filter and raises the epoch. The poll under way was asked with the old one.
    let actions = bench.step(Input::Observed(seen(&new, 2)));
    assert!(actions.iter().any(|action| matches!(action, Action::Take(_))), "taken again: {actions:?}");
    let page_of = |topic| Input::Polled(page(1, 3, vec![of_topic(topic, scan(0, 3, &[1, 2, 3]))]));
    assert!(sent(&bench.step(page_of("new"))).is_empty(), "nothing of it is looked at");
    bench.step(Input::Taken(vec![Some(3)]));
    // A look that began before, and a load that did.
    bench.step(Input::Observed(seen(&old, 1)));
    let actions = bench.step(loaded_under(&old));
    assert!(actions.iter().any(|action| matches!(action, Action::Load(_))), "loaded again: {actions:?}");
    assert!(!actions.iter().any(|action| matches!(action, Action::Poll(_))), "and not read before: {actions:?}");
    let request = poll(&bench.step(loaded_under(&new)));
    assert_eq!(request.wanted, std::slice::from_ref(&new.filter), "a filter comes with the lane");
    assert_eq!(request.scans[0].after, 0, "from the floor on");
    assert_eq!(sent(&bench.step(page_of("new"))), [1, 2, 3]);
    let report = bench.engine.report();
    assert_eq!((report.subscriptions["s"].definition, report.subscriptions["s"].differs), (2, true));
}

#[test]
fn a_load_can_be_the_first_to_tell_of_a_new_filter() {
    let (old, new) = (wanting(1, "old"), wanting(2, "new"));
    let own = Subscription { lanes: 1, ..Subscription::new("s").topics(["old"]) };
    let mut bench = Bench::new(own, SubscriptionView { definition: old, ..view() });
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(SubscriptionView { definition: wanting(1, "old"), ..view() }, None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    assert_eq!(poll(&bench.step(loaded_under(&new))).wanted, [new.filter]);
}

#[test]
fn a_change_of_what_is_no_filter_reaches_a_running_relay_without_a_fence() {
    let before = Definition { number: 1, ..Definition::default() };
    let retry = RetryPolicy { max_attempts: 1, ..RetryPolicy::handler() };
    let after = Definition { number: 2, retry, ..before.clone() };
    let mut bench = Bench::new(
        Subscription { lanes: 1, ..Subscription::new("s") },
        SubscriptionView { definition: before.clone(), ..view() },
    );
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(SubscriptionView { definition: before.clone(), ..view() }, None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    bench.step(loaded_under(&before));
    let actions = bench.step(Input::Polled(page(1, 1, vec![scan(0, 1, &[1])])));
    let first = batch(&actions).unwrap();
    let actions =
        bench.step(Input::Observed(fleet(SubscriptionView { definition: after.clone(), ..view() }, Some(ME), 1)));
    assert!(!actions.iter().any(|action| matches!(action, Action::Load(_))), "what is at the sink is finished first");
    let actions = bench.step(Input::Delivered { batch: first, outcomes: vec![Outcome::Failed(Failure::event("no"))] });
    let settlement = actions.iter().find_map(|action| if let Action::Settle(it) = action { Some(it) } else { None });
    let put = &settlement.unwrap_or_else(|| panic!("nothing is written: {actions:?}")).lanes[0].put;
    assert_eq!(put[0].state, State::Dead, "by the policy of now");
    let actions = bench.step(Input::Settled(vec![true]));
    assert!(actions.iter().any(|action| matches!(action, Action::Load(loads) if loads[0].1 == 1)), "{actions:?}");
    let told = bench.engine.take_figures().warnings;
    assert!(told.len() == 1 && told[0].contains("started later says"), "{told:?}");
}

#[test]
fn an_attempt_of_this_process_that_a_new_filter_overtakes_is_no_crash() {
    let row = |state, attempts| DeliveryRow {
        position: 1,
        key: None,
        arrival: 1,
        state,
        attempts,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    let state = |row: DeliveryRow| LaneState { takeovers: CAREFUL, deliveries: vec![row], ..LaneState::default() };
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(view(), None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    bench.go_on(Input::Loaded(vec![Some(state(row(State::Retrying, 1)))]));
    // The attempt is announced, and then it is made.
    let (_, first, positions) = bench.until_sent();
    assert_eq!(positions, [1]);
    let wider = SubscriptionView { definition: wanting(1, "t"), ..view() };
    bench.go_on(Input::Observed(fleet(wider.clone(), Some(ME), 2)));
    bench.go_on(Input::Taken(vec![Some(3)]));
    let definition = Arc::new(wider.definition);
    let load =
        || Input::Loaded(vec![Some(LaneState { definition: definition.clone(), ..state(row(State::Processing, 2)) })]);
    let actions = bench.go_on(load());
    assert!(!actions.iter().any(|action| matches!(action, Action::Load(_))), "what is at the sink is waited for");
    let actions = bench.go_on(Input::Delivered { batch: first, outcomes: vec![Outcome::Delivered] });
    assert!(actions.iter().any(|action| matches!(action, Action::Load(_))), "{actions:?}");
    bench.go_on(load());
    let (waited, _, positions) = bench.until_sent();
    assert_eq!(positions, [1], "it comes again, since nobody has written that it arrived");
    assert!(waited < Duration::from_secs(1), "as if nothing had happened: {waited:?}");
    assert!(bench.engine.take_figures().failed_attempts.is_empty(), "nobody has died");
}

/// Events 1 to `last` are there; the first batch is at the sink.
fn sending(last: Position, batch_size: usize, sink: SinkFeatures) -> (Bench, (usize, BatchId)) {
    let spec = Subscription { lanes: 1, workers: 1, batch_size, ..Subscription::new("s") };
    let mut bench = Bench::with(spec, view(), sink);
    bench.own(Cursor::default());
    let all: Vec<Position> = (1..=last).collect();
    let actions = bench.step(Input::Polled(page(1, last, vec![scan(0, last, &all)])));
    assert_eq!(sent(&actions).len(), batch_size);
    (bench, batch(&actions).unwrap())
}

#[test]
fn a_receiver_that_wants_nothing_more_pauses_the_subscription_and_costs_no_attempt() {
    let gone = Failure::gone("410 Gone");
    let (mut bench, first) = sending(3, 3, SinkFeatures::default());
    let actions = bench.answer(first, &gone, 3);
    let reason = format!("410 Gone (event {})", events(&[1])[0].id);
    assert_eq!(pauses(&actions), [reason.as_str()], "asked for once a batch");
    let figures = bench.engine.take_figures();
    assert!(figures.sinks.is_empty(), "no next try is told: {:?}", figures.sinks);
    let told = figures.failed_attempts;
    let line = |failed: &FailedAttempt| (failed.position, failed.attempt, failed.kind, failed.next);
    assert_eq!(told.iter().map(line).collect::<Vec<_>>(), [1, 2, 3].map(|at| (at, 1, gone.kind, NextTry::Resumed)));
    assert!(told[0].event == Some(events(&[1])[0].id) && told[0].error == "410 Gone");
    assert_eq!(bench.breaker().as_deref(), Some("410 Gone"));
    let (waited, again, positions) = bench.until_sent();
    assert!(waited >= BREAKER_BASE - Duration::from_millis(100), "probed after {waited:?}");
    assert_eq!(positions, [1], "one event, if pausing failed");
    let actions = bench.answer(again, &gone, 1);
    assert_eq!(pauses(&actions), [reason.as_str()], "and asked for again");
    assert!(bench.engine.take_figures().sinks.is_empty());

    let paused = SubscriptionView { paused: true, ..view() };
    bench.step(Input::Observed(fleet(paused, Some(ME), 1)));
    for _ in 0..100 {
        let actions = bench.step(Input::Tick);
        assert_eq!((sent(&actions), pauses(&actions)), (vec![], vec![]), "it is paused");
        let settled = actions.iter().any(|action| matches!(action, Action::Settle(_)));
        assert!(!settled, "nothing is to be written down: {actions:?}");
    }
    let actions = bench.step(Input::Observed(fleet(view(), Some(ME), 1)));
    assert!(actions.iter().any(|action| matches!(action, Action::Load(_))), "resumed: {actions:?}");
    bench.step(Input::Loaded(vec![Some(LaneState::default())]));
    bench.go_on(Input::Polled(page(1, 3, vec![scan(0, 3, &[1, 2, 3])])));
    let (_, probe, positions) = bench.until_sent();
    assert_eq!(positions, [1]);
    bench.go_on(Input::Delivered { batch: probe, outcomes: vec![Outcome::Delivered] });
    assert_eq!(bench.until_sent().2, [2, 3]);
}

#[test]
fn failed_attempts_are_logged_up_to_a_limit_and_the_rest_is_counted() {
    let (mut bench, first) = sending(25, 25, SinkFeatures::default());
    bench.answer(first, &Failure::event("no"), 25);
    let figures = bench.engine.take_figures();
    let told: Vec<Position> = figures.failed_attempts.iter().map(|failed| failed.position).collect();
    assert_eq!(told, (1..=10).collect::<Vec<_>>());
    assert!(figures.failed_attempts.iter().all(|failed| failed.kind == "event" && failed.attempt == 1));
    assert!(figures.failed_unlogged.is_empty(), "the interval is not over: {:?}", figures.failed_unlogged);
    let began = bench.now;
    // What is retried meanwhile stays at the sink.
    let unlogged = loop {
        bench.go_on(Input::Tick);
        let figures = bench.engine.take_figures();
        assert!(figures.failed_attempts.is_empty());
        if let Some(count) = figures.failed_unlogged.get("s") {
            break *count;
        }
        assert!(bench.now - began < ATTEMPTS_LOGGED_INTERVAL * 2, "nobody says how many more there were");
    };
    assert!(bench.now - began >= ATTEMPTS_LOGGED_INTERVAL - Duration::from_millis(100));
    assert_eq!(unlogged, 15);
}

/// A lane with these rows of keys a, b, …; what the limits say of its subscription.
fn stopped(limits: EngineConfig, rows: &[(&str, u32)]) -> Option<String> {
    let spec = Subscription { lanes: 1, ..Subscription::new("s") };
    let mut bench = Bench::with_limits(spec, view(), SinkFeatures::default(), limits);
    let row = |(index, (key, attempts)): (usize, &(&str, u32))| DeliveryRow {
        position: index as Position + 1,
        key: (!key.is_empty()).then(|| (*key).into()),
        arrival: index as i64 + 1,
        state: if *attempts > 0 { State::Retrying } else { State::Pending },
        attempts: *attempts,
        due_at: BEGAN.plus(Duration::from_secs(3600)),
        since: BEGAN,
    };
    let deliveries = rows.iter().enumerate().map(row).collect();
    let cursor = Cursor { floor: rows.len() as Position, ..Cursor::default() };
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(view(), None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    bench.step(Input::Loaded(vec![Some(LaneState { cursor, deliveries, ..LaneState::default() })]));
    bench.engine.report().subscriptions["s"].stopped.clone()
}

/// Events 1 to 33 are read, of which the first 32 have so many bytes together; which are sent.
fn sent_of_bytes(bytes: usize) -> (Bench, Vec<Position>) {
    let spec = Subscription { lanes: 1, workers: 40, batch_size: 1, ..Subscription::new("s") };
    let mut bench = Bench::new(spec, view());
    bench.own(Cursor::default());
    let all: Vec<Position> = (1..=33).collect();
    let mut read = events(&all);
    let sizes = (0..32).map(|number| if number == 0 { bytes - bytes / 32 * 31 } else { bytes / 32 });
    for (event, size) in read.iter_mut().zip(sizes) {
        let payload = pillarbox::Payload::Bytes(vec![0; size - event.size()].into());
        *event = Arc::new(Event { payload, ..Event::clone(event) });
    }
    assert_eq!(read[..32].iter().map(|event| event.size()).sum::<usize>(), bytes);
    bench.go_on(Input::Polled(page(1, 33, vec![Scan { events: read, ..scan(0, 33, &all) }])));
    let sent = bench.at_sink.iter().flat_map(|(_, positions)| positions.clone()).collect();
    (bench, sent)
}

#[test]
fn no_more_is_read_once_what_is_in_memory_has_as_many_bytes_as_it_may() {
    let most = EngineConfig::default().in_flight_bytes_max;
    let all: Vec<Position> = (1..=33).collect();
    assert_eq!(sent_of_bytes(most - 1).1, all, "one byte less, and the next has a place");
    let (mut bench, sent) = sent_of_bytes(most);
    assert_eq!(sent, all[..32]);
    // A quarter has to be over before it is read on.
    for over in 1..=8 {
        let (batch, _) = bench.at_sink.remove(0);
        let actions = bench.go_on(delivered(batch));
        let polls =
            actions.iter().filter_map(|action| if let Action::Poll(request) = action { Some(request) } else { None });
        let next: Vec<Position> = polls.flat_map(|request| &request.scans).map(|scan| scan.after).collect();
        assert_eq!(next, if over < 8 { vec![] } else { vec![32] }, "after {over}");
    }
}

#[test]
fn a_limit_that_stops_a_subscription_names_a_key() {
    let parked = |max_parked| EngineConfig { max_parked, ..EngineConfig::default() };
    let says = |limits, rows: &[(&str, u32)]| stopped(limits, rows).unwrap_or_default();
    assert_eq!(stopped(parked(2), &[("a", 1), ("a", 0), ("b", 0)]), None, "one less");
    let one = says(parked(1), &[("b", 0), ("a", 1)]);
    assert!(one.starts_with("1 key is failing, as many as max_parked allows, key 'a'; "), "{one}");
    let alone = says(parked(1), &[("", 3)]);
    assert!(alone.contains("1 key is failing, as many as max_parked allows, position 1; "), "{alone}");
    let two = says(parked(2), &[("a", 1), ("b", 1)]);
    assert!(two.starts_with("2 keys are failing, as many as max_parked allows, one of them key '"), "{two}");
    let blocked = |max_blocked| EngineConfig { max_blocked, ..EngineConfig::default() };
    assert_eq!(stopped(blocked(2), &[("a", 1), ("a", 0), ("b", 1)]), None, "one less");
    let few = says(blocked(1), &[("a", 1), ("a", 0), ("b", 1)]);
    assert!(
        few.starts_with("1 delivery waits behind failing keys, as many as max_blocked allows, 1 of them "),
        "{few}"
    );
    let many = says(blocked(3), &[("a", 1), ("a", 0), ("b", 1), ("b", 0), ("b", 0), ("c", 1)]);
    let long = "3 deliveries wait behind failing keys, as many as max_blocked allows, 2 of them behind key 'b'; ";
    assert!(many.starts_with(long), "{many}");
}

#[test]
fn an_attempt_that_ended_with_its_process_is_logged_with_its_key() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    let row = DeliveryRow {
        position: 4,
        key: Some("k".into()),
        arrival: 1,
        state: State::Processing,
        attempts: 2,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    bench.own_as(LaneState { takeovers: CAREFUL, deliveries: vec![row], ..LaneState::default() });
    let told = bench.engine.take_figures().failed_attempts;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((told[0].position, told[0].key.as_deref(), told[0].attempt, told[0].kind), (4, Some("k"), 2, "crash"));
}

#[test]
fn a_receiver_that_refuses_several_keys_in_a_row_is_left_alone_and_tried_with_another() {
    let refused = Failure::permanent("422");
    let one_receiver = SinkFeatures { one_receiver: true, ..SinkFeatures::default() };
    let (mut bench, first) = sending(20, BREAKER_KEYS_MAX, one_receiver);
    bench.answer(first, &refused, BREAKER_KEYS_MAX);
    assert!(bench.at_sink.is_empty());
    assert_eq!(bench.breaker().as_deref(), Some("5 different keys failed in a row; the last: 422"));
    assert_eq!(bench.engine.take_figures().dead["s"], 5, "what it refused is its word about those events");
    let (first_wait, probe, positions) = bench.until_sent();
    assert_eq!(positions, [6]);
    bench.answer(probe, &refused, 1);
    let (second_wait, probe, positions) = bench.until_sent();
    assert_eq!(positions, [7]);
    assert!(second_wait > first_wait, "{first_wait:?}, then {second_wait:?}");
    bench.go_on(Input::Delivered { batch: probe, outcomes: vec![Outcome::Delivered] });
    assert_eq!((bench.until_sent().2, bench.breaker()), (vec![8, 9, 10, 11, 12], None), "all is well again");

    let (mut bench, first) = sending(20, BREAKER_KEYS_MAX, SinkFeatures::default());
    bench.answer(first, &refused, BREAKER_KEYS_MAX);
    assert_eq!((bench.at_sink.len(), bench.breaker()), (1, None), "several receivers");
}

#[test]
fn a_receiver_that_takes_retries_gets_them_though_it_refuses_every_first_try() {
    let refused = Failure::event("409");
    let one_receiver = SinkFeatures { one_receiver: true, ..SinkFeatures::default() };
    let (mut bench, first) = sending(200, BREAKER_KEYS_MAX, one_receiver);
    bench.answer(first, &refused, BREAKER_KEYS_MAX);
    for _ in 0..20 {
        let (_, probe, positions) = bench.until_sent();
        if positions[0] <= BREAKER_KEYS_MAX as Position {
            bench.go_on(Input::Delivered { batch: probe, outcomes: vec![Outcome::Delivered] });
            assert_eq!(bench.breaker(), None, "all is well again");
            return;
        }
        bench.answer(probe, &refused, 1);
    }
    panic!("no retry was sent");
}

#[test]
fn what_cannot_be_sent_says_nothing_of_the_receiver() {
    let unsendable = Failure::unsendable("destination", "no tenant");
    let one_receiver = SinkFeatures { one_receiver: true, ..SinkFeatures::default() };
    let (mut bench, first) = sending(20, BREAKER_KEYS_MAX, one_receiver);
    bench.answer(first, &unsendable, BREAKER_KEYS_MAX);
    assert_eq!((bench.at_sink.len(), bench.breaker()), (1, None), "the next batch goes at once");
    assert_eq!(bench.engine.take_figures().dead["s"], 5);
    let (_, batch, positions) = bench.until_sent();
    bench.answer(batch, &Failure::sink("down"), positions.len());
    let (_, probe, positions) = bench.until_sent();
    bench.answer(probe, &unsendable, positions.len());
    assert_eq!(bench.breaker().as_deref(), Some("down"), "a probe that was not sent does not close it");
    assert_eq!(bench.until_sent().2.len(), 1, "and another goes");
}

#[test]
fn an_event_whose_turn_it_is_not_comes_later_and_nobody_pays_for_it() {
    let (mut bench, first) = sending(3, 1, SinkFeatures::default());
    let (mut batch, mut early) = (first, Vec::new());
    for round in 0..20 {
        bench.answer(batch, &Failure::later(Duration::from_secs(2), "another has it"), 1);
        assert_eq!(bench.breaker(), None, "the receiver is not down");
        if round == 0 {
            // Other keys go on at once.
            while let Some((batch, positions)) = bench.at_sink.pop() {
                early.extend(positions);
                bench.go_on(Input::Delivered { batch, outcomes: vec![Outcome::Delivered] });
            }
        }
        let (waited, again, positions) = bench.until_sent();
        assert_eq!(positions, [1]);
        assert!((Duration::from_millis(1_500)..Duration::from_millis(2_500)).contains(&waited), "{waited:?}");
        batch = again;
    }
    assert_eq!(early, [2, 3]);
    let figures = bench.engine.take_figures();
    assert!(figures.dead.is_empty());
    let uncounted = |failed: &FailedAttempt| failed.attempt == 1 && matches!(failed.next, NextTry::Uncounted(_));
    assert!(figures.failed_attempts.iter().all(uncounted), "{:?}", figures.failed_attempts);
    let done = bench.go_on(Input::Delivered { batch, outcomes: vec![Outcome::Delivered] });
    assert!(!done.iter().any(|action| matches!(action, Action::Pause { .. })));
    assert_eq!(bench.engine.report().subscriptions["s"].delivered, 3);
}

#[test]
fn what_fails_behind_an_event_that_comes_again_is_not_held_against_it() {
    let ordered = SinkFeatures { ordered_batch: true, ..SinkFeatures::default() };
    for first in [Outcome::NotTried, Outcome::Failed(Failure::sink("down"))] {
        let mut bench = Bench::with(Subscription { lanes: 1, ..Subscription::new("s") }, view(), ordered);
        bench.own(Cursor::default());
        let of_key = |event: Arc<Event>| Arc::new(Event { key: Some("k".into()), ..Event::clone(&event) });
        let events = events(&[1, 2]).into_iter().map(of_key).collect();
        bench.go_on(Input::Polled(page(1, 2, vec![Scan { events, ..scan(0, 2, &[1, 2]) }])));
        let (_, batch, positions) = bench.until_sent();
        assert_eq!(positions, [1, 2]);
        let refused = Outcome::Failed(Failure::permanent("422"));
        bench.go_on(Input::Delivered { batch, outcomes: vec![first, refused] });
        assert!(bench.engine.take_figures().dead.is_empty());
        let (_, batch, positions) = bench.until_sent();
        assert_eq!(positions, [1], "the probe");
        bench.go_on(Input::Delivered { batch, outcomes: vec![Outcome::Delivered] });
        assert_eq!(bench.until_sent().2, [2]);
    }
}

#[test]
fn where_only_poison_is_left_it_is_retried_one_by_one_and_nobody_is_said_to_be_down() {
    let refused = Failure::event("422");
    let one_receiver = SinkFeatures { one_receiver: true, ..SinkFeatures::default() };
    let (mut bench, first) = sending(5, BREAKER_KEYS_MAX, one_receiver);
    bench.answer(first, &refused, BREAKER_KEYS_MAX);
    let mut retried: Vec<Position> = Vec::new();
    for round in 0..10 {
        let (_, probe, positions) = bench.until_sent();
        assert_eq!(positions.len(), 1, "round {round}: {positions:?}");
        retried.extend(positions);
        // New events are there before the last answer.
        if round == 9 {
            bench.go_on(Input::Rang);
            bench.go_on(Input::Polled(page(1, 7, vec![scan(5, 7, &[6, 7])])));
        }
        bench.answer(probe, &refused, 1);
        assert_eq!(bench.breaker(), None, "round {round}: it answers");
    }
    retried.sort_unstable();
    retried.dedup();
    assert_eq!(retried, [1, 2, 3, 4, 5], "each has its turn");
    let (_, probe, positions) = bench.until_sent();
    assert_eq!(positions, [6], "what it has not seen yet goes before retries, alone");
    bench.answer(probe, &refused, 1);
    assert_eq!(bench.breaker().as_deref(), Some("5 different keys failed in a row; the last: 422"));
}

#[test]
fn a_lane_whose_blocked_keys_are_not_all_known_stands_still_and_says_so() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(view(), None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    let due = DeliveryRow {
        position: 3,
        key: Some("k".into()),
        arrival: 1,
        state: State::Pending,
        attempts: 0,
        due_at: Timestamp(0),
        since: Timestamp(0),
    };
    let state = LaneState {
        cursor: Cursor { floor: 5, ..Cursor::default() },
        deliveries: vec![due],
        dead_heads_left_out: true,
        ..LaneState::default()
    };
    let mut actions = bench.step(Input::Loaded(vec![Some(state)]));
    actions.extend(bench.step(Input::Rang));
    let works = |action: &Action| matches!(action, Action::Poll(_) | Action::Fetch(_) | Action::Deliver { .. });
    assert!(!actions.iter().any(works), "its key may be blocked: {actions:?}");
    let stopped = bench.engine.report().subscriptions["s"].stopped.clone().unwrap_or_default();
    assert!(stopped.contains("lane 0 are held back by a dead event"), "{stopped}");
    // Somebody skips some of them: it is loaded anew.
    let mut changed = fleet(view(), Some(ME), 1);
    changed.lanes[0].revision = 1;
    let actions = bench.step(Input::Observed(changed));
    assert!(actions.iter().any(|action| matches!(action, Action::Load(_))), "{actions:?}");
}

/// What a receiver got that fails for some events and takes all others.
#[derive(Default)]
struct Poisoned {
    /// It fails for all events up to this one.
    poison: Position,
    /// How often it got one of those, and the numbers of those attempts.
    tries: Vec<u32>,
    taken: Vec<Position>,
    /// Each time that the sink was said to be down, or no longer.
    news: Vec<bool>,
    /// What the rows say of failed attempts.
    errors: Vec<String>,
}

impl Poisoned {
    /// One step and all that follow from it without time passing but for the answers.
    fn go_on(&mut self, bench: &mut Bench, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            for action in bench.step(input) {
                match action {
                    Action::Fetch(positions) => inputs.push(Input::Fetched(events(&positions))),
                    Action::Settle(settlement) => {
                        let changes = settlement.lanes.iter().flat_map(|write| &write.change);
                        self.errors.extend(changes.filter_map(|(_, error)| Some(error.as_ref()?.message.clone())));
                        inputs.push(Input::Settled(vec![true; settlement.lanes.len()]));
                    }
                    Action::Deliver { batch, events } => {
                        let outcomes = events.iter().map(|attempt| self.take(attempt.event.position, attempt.number));
                        inputs.push(Input::Delivered { batch, outcomes: outcomes.collect() });
                    }
                    _ => {}
                }
            }
        }
        let news = bench.engine.take_figures().sinks;
        self.news.extend(news.values().map(Option::is_some));
    }

    fn take(&mut self, position: Position, number: u32) -> Outcome {
        if position > self.poison {
            self.taken.push(position);
            return Outcome::Delivered;
        }
        self.tries.push(number);
        Outcome::Failed(Failure { kind: "server_error", ..Failure::sink("500") })
    }

    fn wait(&mut self, bench: &mut Bench, time: Duration) {
        let until = bench.now + time;
        while bench.now < until {
            self.go_on(bench, Input::Tick);
        }
    }

    /// An event is published and read.
    fn publish(&mut self, bench: &mut Bench, position: Position) {
        self.go_on(bench, Input::Rang);
        self.go_on(bench, Input::Polled(page(1, position, vec![scan(position - 1, position, &[position])])));
    }
}

#[test]
fn an_event_that_always_fails_delays_no_other_key_and_its_sink_is_not_said_to_be_down_each_time() {
    for workers in [1, 4] {
        let spec = Subscription { lanes: 1, workers, batch_size: 10, ..Subscription::new("s") };
        let mut bench = Bench::new(spec, view());
        let mut receiver = Poisoned { poison: 1, ..Poisoned::default() };
        bench.own(Cursor::default());
        receiver.go_on(&mut bench, Input::Polled(page(1, 1, vec![scan(0, 1, &[1])])));
        receiver.wait(&mut bench, Duration::from_secs(50));
        let alone = receiver.tries.len();
        assert!((4..10).contains(&alone) && receiver.tries.iter().all(|&number| number == 1), "{:?}", receiver.tries);
        for position in 2..12 {
            receiver.publish(&mut bench, position);
            assert_eq!(receiver.taken.last(), Some(&position), "it is sent when it is read");
            receiver.wait(&mut bench, Duration::from_secs(3));
        }
        assert_eq!(receiver.news, [true, false], "said to be down when it was alone, and well for good");
        assert!(bench.breaker().is_none());
        let counted = *receiver.tries.last().unwrap();
        assert!(counted > 1, "the failures of event 1 count: {:?}", receiver.tries);
        let tries = receiver.tries.len();
        receiver.wait(&mut bench, Duration::from_secs(24 * 3600));
        let counted_alone = *receiver.tries.last().unwrap() - counted;
        assert!(counted_alone <= 2, "alone again it pays no more: {counted_alone} of {}", receiver.tries.len() - tries);
        assert_eq!(receiver.news.len(), 2, "and nobody says that the sink is down");
        let (mut uncounted, mut counted) = (receiver.errors.clone(), receiver.errors);
        uncounted.retain(|error| error == "500 (not counted as an attempt)");
        counted.retain(|error| error == "500");
        assert!(uncounted.len() > 10, "its row says of each that it does not count: {}", uncounted.len());
        assert_eq!(counted.len(), *receiver.tries.last().unwrap() as usize - 1, "and nothing of those that do");
        receiver.errors = Vec::new();
        receiver.publish(&mut bench, 12);
        assert_eq!(receiver.taken.last(), Some(&12));
    }
}

#[test]
fn events_of_a_few_keys_that_fail_before_any_other_is_taken_delay_no_other_key_for_longer_than_a_second() {
    for (poison, wait) in [(2, 0), (2, 50), (3, 0), (3, 50), (4, 50)] {
        let spec = Subscription { lanes: 1, workers: 4, batch_size: 10, ..Subscription::new("s") };
        let mut bench = Bench::new(spec, view());
        let mut receiver = Poisoned { poison, ..Poisoned::default() };
        bench.own(Cursor::default());
        let all: Vec<Position> = (1..=poison).collect();
        receiver.go_on(&mut bench, Input::Polled(page(1, poison, vec![scan(0, poison, &all)])));
        receiver.wait(&mut bench, Duration::from_secs(wait));
        assert!(!receiver.tries.is_empty() && receiver.taken.is_empty());
        let good = poison + 1;
        let published = bench.now;
        receiver.publish(&mut bench, good);
        while receiver.taken.is_empty() {
            receiver.go_on(&mut bench, Input::Tick);
            assert!(
                bench.now - published < Duration::from_secs(2),
                "{poison} poison, after {wait} s: it waits too long"
            );
        }
        assert_eq!((&receiver.taken, bench.breaker()), (&vec![good], None));
        // From then on nobody waits at all.
        for position in good + 1..good + 10 {
            receiver.publish(&mut bench, position);
            assert_eq!(receiver.taken.last(), Some(&position), "{poison} poison: it is sent when it is read");
            receiver.wait(&mut bench, Duration::from_secs(3));
        }
    }
}

#[test]
fn a_sink_that_fails_for_several_keys_is_down_and_gets_few_probes() {
    for failure in
        [Failure::sink("503"), Failure::unclear("timeout", "no answer"), Failure::unreachable("connect", "refused")]
    {
        let (mut bench, first) = sending(200, 1, SinkFeatures::default());
        bench.answer(first, &failure, 1);
        let (mut requests, mut distinct) = (1, vec![1]);
        let began = bench.now;
        let mut early = 0;
        while bench.now - began < Duration::from_secs(180) {
            early = if bench.now - began < Duration::from_secs(10) { requests } else { early };
            for (batch, positions) in std::mem::take(&mut bench.at_sink) {
                requests += 1;
                distinct.extend(&positions);
                assert_eq!(positions.len(), 1, "one at a time");
                bench.answer(batch, &failure, 1);
            }
            bench.go_on(Input::Tick);
        }
        assert!(early <= 9, "{early} requests in 10 s");
        assert!((8..20).contains(&requests), "{requests} requests in 180 s");
        let figures = bench.engine.take_figures();
        assert!(bench.breaker().is_some() && figures.sinks.len() == 1);
        let uncounted = |failed: &FailedAttempt| failed.attempt == 1 && matches!(failed.next, NextTry::Uncounted(_));
        let told = figures.failed_attempts;
        assert!(!told.is_empty() && told.iter().all(uncounted), "no event pays for the sink: {told:?}");
        assert!(distinct.len() > 2, "each probe is another event: {distinct:?}");
        let (_, probe, positions) = bench.until_sent();
        assert_eq!(positions.len(), 1);
        bench.go_on(Input::Delivered { batch: probe, outcomes: vec![Outcome::Delivered] });
        assert_eq!((bench.at_sink.len(), bench.breaker()), (1, None), "all is well again");
    }
}

#[test]
fn an_engine_with_a_backlog_looks_at_the_fleet_when_it_is_rung_for_and_not_only_when_it_beats() {
    let mut bench = Bench::new(Subscription { lanes: 1, ..Subscription::new("s") }, view());
    bench.own(Cursor::default());
    let looks = |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Observe(_)));
    let backlog = |last: Position| Input::Polled(page(1, 1_000_000, vec![scan(last - 1, last, &[last])]));
    bench.step(backlog(1));
    bench.step(Input::Observed(fleet(view(), Some(ME), 1)));
    let actions = bench.step(backlog(2));
    assert!(!looks(&actions) && !bench.engine.is_asleep(), "it reads on, and its next beat is not due");
    assert!(looks(&bench.step(Input::Rang)));
}

#[test]
fn a_handler_that_refuses_everything_kills_few_events_however_few_keys_there_are() {
    for keys in [1, 3, 25] {
        let spec = Subscription { lanes: 1, workers: 2, on_dead: OnDead::Skip, ..Subscription::new("s") };
        let definition = Definition::of(&spec, 0);
        let mut bench = Bench::new(spec, SubscriptionView { definition, ..view() });
        bench.own(Cursor::default());
        let of_key = |event: Arc<Event>| {
            let key = format!("k{}", event.position % keys);
            Arc::new(Event { key: Some(key.into()), ..Event::clone(&event) })
        };
        let all: Vec<Position> = (1..=800).collect();
        let events: Vec<Arc<Event>> = events(&all).into_iter().map(of_key).collect();
        bench.go_on(Input::Polled(page(1, 800, vec![Scan { events, ..scan(0, 800, &all) }])));
        let mut dead = 0;
        for _ in 0..2_000 {
            for (batch, positions) in std::mem::take(&mut bench.at_sink) {
                bench.answer(batch, &Failure::permanent("a bug"), positions.len());
            }
            bench.go_on(Input::Tick);
            dead += bench.engine.take_figures().dead.get("s").copied().unwrap_or(0);
        }
        assert_eq!(dead as usize, FLOOD_DEAD_MAX, "{keys} keys");
        assert!(bench.engine.report().subscriptions["s"].flood_guard);
    }
}

fn fetched(actions: &[Action]) -> Option<Vec<Position>> {
    actions.iter().find_map(|action| if let Action::Fetch(positions) = action { Some(positions.clone()) } else { None })
}

#[test]
fn what_a_fetch_leaves_out_is_asked_for_again_and_nothing_of_its_key_overtakes_it() {
    let row = |position, key: Option<&str>, arrival| {
        let key = key.map(Into::into);
        DeliveryRow { position, key, arrival, state: State::Pending, attempts: 0, due_at: BEGAN, since: BEGAN }
    };
    let mut bench = Bench::new(Subscription { lanes: 1, workers: 4, batch_size: 10, ..Subscription::new("s") }, view());
    let deliveries =
        vec![row(7, Some("k"), 1), row(3, Some("k"), 2), row(5, Some("k"), 3), row(4, None, 4), row(6, None, 5)];
    bench.step(Input::Tick);
    bench.step(Input::Observed(fleet(view(), None, 0)));
    bench.step(Input::Taken(vec![Some(1)]));
    let cursor = Cursor { floor: 7, ..Cursor::default() };
    let mut actions = bench.step(Input::Loaded(vec![Some(LaneState { cursor, deliveries, ..LaneState::default() })]));
    let (mut taken, mut fetches) = (Vec::new(), 0);
    for _ in 0..100 {
        let mut next = Vec::new();
        // One event at a time, and 6 is not there.
        if let Some(asked) = fetched(&actions) {
            let there: Vec<Position> = asked.into_iter().filter(|position| *position != 6).take(1).collect();
            fetches += 1;
            next.extend(bench.step(Input::Fetched(events(&there))));
        }
        taken.extend(sent(&actions));
        if let Some(batch) = batch(&actions) {
            let outcomes = vec![Outcome::Delivered; sent(&actions).len()];
            next.extend(bench.step(Input::Delivered { batch, outcomes }));
        }
        next.extend(bench.step(Input::Tick));
        actions = next;
    }
    let of_key: Vec<Position> = taken.iter().copied().filter(|position| *position != 4).collect();
    assert_eq!((of_key, taken.len()), (vec![7, 3, 5], 4), "each once, in the order of its key: {taken:?}");
    let dead = bench.engine.take_figures().dead;
    assert_eq!(
        dead.values().sum::<u64>(),
        1,
        "what was left out is not taken for missing, and what is missing is dead"
    );
    assert!(fetches >= 4, "{fetches}");
}
