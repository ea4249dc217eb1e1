use std::sync::Arc;
use std::time::Duration;

use pillarbox::engine::{Action, Engine, EngineConfig, Input};
use pillarbox::{
    Cursor, Event, Filter, Fleet, Headers, InstanceId, InstanceView, Joined, LaneRef, LaneState, LaneView, Lock, Now,
    Page, PollRequest, Position, Scan, SinkFeatures, StoreFeatures, Subscription, SubscriptionId, SubscriptionView,
    Timestamp, Writer,
};
use uuid::Uuid;

const ME: InstanceId = InstanceId(7);
const ID: SubscriptionId = SubscriptionId(1);

/// An engine with one subscription of one lane, stepped by hand.
struct Bench {
    engine: Engine,
    now: Duration,
}

fn view() -> SubscriptionView {
    SubscriptionView { id: ID, name: "s".into(), filter: Filter::default(), lanes: 1, paused: false, created: false }
}

fn fleet(view: SubscriptionView, owner: Option<InstanceId>, epoch: i64) -> Fleet {
    let instance = InstanceView { id: ME, beat: 1, lock: Lock::Held, draining: false, subscriptions: vec![view.id] };
    let lane = LaneRef { subscription: ID, lane: 0 };
    let lanes = vec![LaneView { lane, owner, epoch, revision: 0, takeovers: 0 }];
    Fleet { instances: vec![instance], subscriptions: vec![view], lanes }
}

impl Bench {
    fn new(subscription: Subscription, view: SubscriptionView) -> Self {
        let joined = Joined { instance: ME, log_id: Uuid::nil(), subscriptions: vec![view] };
        let features = StoreFeatures { lock_proves_life: true, settle_interval: Duration::ZERO };
        let subscriptions = vec![(subscription, SinkFeatures::default())];
        Bench { engine: Engine::new(EngineConfig::default(), &joined, features, subscriptions), now: Duration::ZERO }
    }

    fn step(&mut self, input: Input) -> Vec<Action> {
        self.now += Duration::from_millis(100);
        self.engine.step(Now { mono: self.now, wall: Timestamp(1_000_000) }, input)
    }

    /// Takes the lane and loads this cursor; the poll that follows.
    fn own(&mut self, cursor: Cursor) -> PollRequest {
        self.step(Input::Tick);
        self.step(Input::Observed(fleet(view(), None, 0)));
        self.step(Input::Taken(vec![Some(1)]));
        let state = LaneState { cursor, ..LaneState::default() };
        poll(&self.step(Input::Loaded(vec![Some(state)])))
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

fn scan(after: Position, covered_to: Position, visible: &[Position]) -> Scan {
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
        })
    };
    let shown = visible.iter().map(|&position| position..=position).collect();
    Scan { after, covered_to, visible: shown, events: visible.iter().map(event).collect() }
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
fn a_configuration_that_is_not_the_one_in_force_is_told_once() {
    let own = Subscription { lanes: 4, ..Subscription::new("s").topics(["own"]) };
    let filter = |topic: &str| Filter { topics: vec![topic.into()], types: Vec::new() };
    let mut bench = Bench::new(own, SubscriptionView { filter: filter("own"), ..view() });
    let told = bench.engine.take_figures().warnings;
    assert!(told.len() == 1 && told[0].contains("1 lanes in the database and 4"), "{told:?}");
    let mut look = |topic: &str, lanes: u32| {
        bench.step(Input::Observed(fleet(SubscriptionView { filter: filter(topic), lanes, ..view() }, None, 0)));
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
