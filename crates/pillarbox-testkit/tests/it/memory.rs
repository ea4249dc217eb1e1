use pillarbox::admin::{Auditor, Change};
use pillarbox::store::{
    Cursor, Epoch, Hello, LaneRef, LaneWrite, PollRequest, ScanRequest, Settlement, Store, Take, TakeCause,
};
use pillarbox::{NewEvent, Position, Start, Subscription};
use pillarbox_testkit::{MemoryLog, MemoryStore};

fn request() -> PollRequest {
    let scan = ScanRequest { after: 0, to: Position::MAX, limit: 100 };
    PollRequest { scans: vec![scan], wanted: vec![Default::default()], ..Default::default() }
}

#[test]
fn what_was_not_polled_may_vanish_and_its_position_be_drawn_again() {
    let log = MemoryLog::new();
    let polled = log.publish([NewEvent::new("a", "t")]);
    log.poll(&request()).unwrap();
    let lost = log.publish([NewEvent::new("a", "t")]);
    let lost_id = log.fetch(&lost).unwrap()[0].id;
    log.power_loss();
    assert_eq!(log.visible().iter().map(|event| event.position).collect::<Vec<_>>(), polled);
    assert_eq!(log.publish([NewEvent::new("a", "t")]), lost, "drawn again");
    assert_ne!(log.fetch(&lost).unwrap()[0].id, lost_id, "with another identity");
}

#[test]
fn a_poll_that_a_power_loss_interrupts_fails() {
    let log = MemoryLog::new();
    let mut steps = log.poll_steps(&request());
    assert!(steps.step(&log).unwrap().is_none());
    log.power_loss();
    assert!(steps.step(&log).is_err());
}

#[test]
fn the_same_steps_give_the_same_log() {
    let run = || {
        let log = MemoryLog::new();
        log.publish((0..9).map(|number| NewEvent::new("a", "t").json(&number)));
        format!("{:?} {:?}", log.visible(), log.poll(&request()).unwrap())
    };
    assert_eq!(run(), run());
}

#[tokio::test]
async fn a_frozen_store_answers_once_it_is_thawed() {
    let log = MemoryLog::new();
    let store = MemoryStore::new(&log);
    let hello = Hello { subscriptions: vec![Subscription::new("s")], ..Hello::default() };
    let instance = store.join(hello).await.unwrap().instance;
    log.freeze(instance);
    let request = request();
    let mut poll = Box::pin(store.poll(&request));
    tokio::select! {
        biased;
        _ = &mut poll => panic!("a frozen store answered"),
        () = tokio::task::yield_now() => {}
    }
    log.thaw(instance);
    poll.await.unwrap();
}

/// Settles the cursor and nothing else.
fn write(lane: LaneRef, epoch: Epoch, cursor: Cursor) -> LaneWrite {
    let (put, queue, change, finish) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    LaneWrite { lane, epoch, revision: 0, cursor, put, queue, change, finish, calm: false, release: false }
}

#[test]
fn an_audit_notices_a_cursor_moved_by_hand_and_nothing_before() {
    let log = MemoryLog::new();
    let subscription = Subscription { lanes: 1, ..Subscription::new("s") };
    let joined = log.join(Hello { subscriptions: vec![subscription], ..Hello::default() }).unwrap();
    let lane = LaneRef { subscription: joined.subscriptions[0].id, lane: 0 };
    let at = log.publish((0..9).map(|number| NewEvent::new("a", "t").key("k").json(&number)));
    let epoch = log.take(joined.instance, &[Take { lane, expected: 0, cause: TakeCause::Free, beat: None }]).unwrap()
        [0]
    .unwrap();
    let cursor = Cursor { floor: at[3], settled: [at[5]..=at[6]].into_iter().collect(), anchor: None };
    let write = write(lane, epoch, cursor);
    assert_eq!(
        log.settle(joined.instance, &Settlement { lanes: vec![write], ..Settlement::default() }).unwrap(),
        [true]
    );
    let audit = || {
        let mut auditor = Auditor::new(log.books());
        log.visible().iter().for_each(|event| auditor.event(event));
        auditor.finish().subscriptions.remove(0)
    };
    let sound = audit();
    assert_eq!((sound.expected, sound.delivered, sound.waiting, sound.missing), (9, 6, 3, 0));
    log.tamper_cursor("s", 0, at[8]);
    let missing: Vec<Position> = audit().missing_events.iter().map(|missing| missing.position).collect();
    assert_eq!(missing, [at[4], at[7], at[8]]);
}

#[test]
fn rewinding_a_key_makes_its_settled_events_deliveries_in_log_order() {
    let log = MemoryLog::new();
    let subscription = Subscription { lanes: 1, ..Subscription::new("s") };
    let joined = log.join(Hello { subscriptions: vec![subscription], ..Hello::default() }).unwrap();
    let lane = LaneRef { subscription: joined.subscriptions[0].id, lane: 0 };
    let at = log.publish(["k", "other", "k", "k"].map(|key| NewEvent::new("a", "t").key(key)));
    let epoch = log.take(joined.instance, &[Take { lane, expected: 0, cause: TakeCause::Free, beat: None }]).unwrap()
        [0]
    .unwrap();
    let cursor = Cursor { floor: at[2], ..Cursor::default() };
    let write = write(lane, epoch, cursor);
    log.settle(joined.instance, &Settlement { lanes: vec![write], ..Settlement::default() }).unwrap();
    let rewind = Change::Rewind { subscription: "s".into(), to: Start::Beginning, key: Some("k".into()) };
    assert_eq!(log.change(&rewind, false).unwrap().count, 2, "the fourth was not settled and comes by itself");
    let raised = log.status();
    assert_eq!((raised.subscriptions[0].pending, raised.subscriptions[0].blocked), (2, 1));
    let state = log.load(joined.instance, &[(lane, epoch + 1)]).unwrap().remove(0).unwrap();
    assert_eq!(state.deliveries.iter().map(|row| row.position).collect::<Vec<_>>(), [at[0], at[2]]);
}
