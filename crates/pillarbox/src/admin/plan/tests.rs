use std::collections::BTreeMap;

use super::*;
use crate::{Cursor, Definition, Filter, Mode, OnDead, PausedBy, Report, RetryPolicy, SubscriptionReport, Timestamp};

const OWNER: InstanceId = InstanceId(7);

fn ranges(ranges: &[(Position, Position)]) -> RangeSet {
    ranges.iter().map(|(low, high)| *low..=*high).collect()
}

/// A subscription that is paused, with a lane per floor.
fn row(name: &str, floors: &[Position]) -> SubscriptionRow {
    let lane = |(lane, floor): (u32, &Position)| LaneRow {
        lane,
        cursor: Cursor { floor: *floor, ..Cursor::default() },
        owner: None,
        epoch: 3,
        revision: 5,
    };
    SubscriptionRow {
        id: SubscriptionId(1),
        name: name.to_owned(),
        filter: Filter::default(),
        definition: 1,
        mode: Mode::Stream,
        on_dead: OnDead::Block,
        hold: None,
        retry: RetryPolicy::sink(),
        pause: Some(Pause { by: PausedBy::Operator, reason: None }),
        lanes: (0..).zip(floors).map(lane).collect(),
    }
}

fn snapshot(subscriptions: impl IntoIterator<Item = SubscriptionRow>) -> Snapshot {
    Snapshot { horizon: 9, subscriptions: subscriptions.into_iter().collect(), ..Snapshot::default() }
}

/// With a living instance that can run the subscription, and has so many of its events in flight.
fn run(mut snapshot: Snapshot, in_flight: u64) -> Snapshot {
    let report = SubscriptionReport { in_flight, ..SubscriptionReport::default() };
    snapshot.instances.push(InstanceRow {
        id: OWNER,
        host: "here".to_owned(),
        pid: 42,
        version: "0".to_owned(),
        started_at: Timestamp(0),
        beat_at: Timestamp(0),
        subscriptions: vec![SubscriptionId(1)],
        report: Report { subscriptions: BTreeMap::from([("s".to_owned(), report)]), ..Report::default() },
        alive: true,
    });
    snapshot
}

fn place(to: Start, floor: Position, snapshot: &Snapshot) -> Place {
    Place::new(to, floor, RangeSet::new(), None, snapshot)
}

fn target(position: Position, lane: u32) -> Target {
    Target { position, lane, id: Uuid::from_u128(position as u128), key: Some("k".to_owned()) }
}

fn key_event(position: Position, topic: &str, has_delivery: bool) -> KeyEvent {
    let id = Uuid::from_u128(position as u128);
    KeyEvent { position, id, topic: topic.to_owned(), r#type: "y".to_owned(), has_delivery }
}

/// What is said when no edit counts.
fn said_of(change: &Change, snapshot: &Snapshot, facts: Facts) -> String {
    plan(change, snapshot, facts).unwrap().answer(0).message
}

fn refusal(change: &Change, snapshot: &Snapshot, facts: Facts) -> String {
    plan(change, snapshot, facts).unwrap_err().to_string()
}

fn rewind_to(to: Start, key: Option<&str>) -> Change {
    Change::Rewind { subscription: "s".to_owned(), to, key: key.map(str::to_owned) }
}

fn rewind_facts(place: Place) -> Facts {
    Facts::Rewind { place, kept: Vec::new(), events: Vec::new(), former_filters: FormerFilters::default() }
}

#[test]
fn a_rewind_says_where_it_goes_and_what_keeps_it_from_going_further() {
    let retention = " (as far back as retention has left the log)";
    let fresh = " (what lies before was in this copy of the log when it was declared fresh)";
    for (to, floor, fresh_floor, note) in [
        (Start::Position(4), 4, 0, ""),
        (Start::Position(2), 4, 0, retention),
        (Start::Position(2), 4, 3, retention),
        (Start::Position(2), 4, 4, fresh),
        (Start::Position(4), 4, 4, ""),
        (Start::Beginning, 0, 0, ""),
        (Start::Beginning, 4, 0, ""),
        (Start::Beginning, 4, 4, fresh),
        (Start::Time(Timestamp(1)), 4, 4, ""),
    ] {
        let snapshot = Snapshot { fresh_floor, ..snapshot([row("s", &[9])]) };
        let said = said_of(&rewind_to(to, None), &snapshot, rewind_facts(place(to, floor, &snapshot)));
        assert_eq!(said, format!("'s' replays the events above position {floor}{note}"), "{to:?} {fresh_floor}");
    }
}

#[test]
fn a_rewind_moves_no_lane_forward_and_leaves_open_what_is_open() {
    let mut row = row("s", &[8, 2]);
    row.lanes[1].cursor.settled = ranges(&[(4, 5), (7, 8)]);
    let snapshot = snapshot([row]);
    // Position 4 may still be committed.
    let place = Place::new(Start::Position(6), 3, ranges(&[(5, 6)]), None, &snapshot);
    let kept = vec![target(1, 0)];
    let facts =
        Facts::Rewind { place, kept: kept.clone(), events: Vec::new(), former_filters: FormerFilters::default() };
    let plan = plan(&rewind_to(Start::Position(6), None), &snapshot, facts).unwrap();
    let expected = [
        Edit::SetCursor { lane: 0, epoch: 3, floor: 3, settled: ranges(&[(5, 6)]) },
        Edit::SetCursor { lane: 1, epoch: 3, floor: 2, settled: ranges(&[(5, 5)]) },
        Edit::MakeDue(kept),
        Edit::ReadAgain { floor: 3, settled: ranges(&[(5, 6)]) },
        Edit::Restore(ranges(&[(7, Position::MAX - 1)])),
    ];
    assert_eq!(plan.edits, expected);
    let changed = plan.answer(0);
    assert_eq!((changed.count, &*changed.message), (2, "'s' replays the events above position 6"));
}

#[test]
fn a_rewind_to_what_was_not_reached_says_that_nothing_is_replayed() {
    let nothing = |lanes: &[Position], asked: Position| {
        let snapshot = snapshot([row("s", lanes)]);
        let facts = rewind_facts(place(Start::Position(asked), asked, &snapshot));
        plan(&rewind_to(Start::Position(asked), None), &snapshot, facts).unwrap().answer(0)
    };
    for asked in [5, 9] {
        let changed = nothing(&[5, 3], asked);
        let said = format!(
            "nothing to replay above position {asked}: 's' has settled nothing there and goes on above position 3, since a rewind never \
             moves forward"
        );
        assert_eq!((changed.count, changed.message), (0, said));
    }
    assert_eq!(nothing(&[5, 3], 4).count, 2, "one lane has settled position 5");
    let mut ahead = row("s", &[3]);
    ahead.lanes[0].cursor.settled = ranges(&[(7, 7)]);
    let snapshot = snapshot([ahead]);
    let facts = || rewind_facts(place(Start::Position(5), 5, &snapshot));
    assert_eq!(plan(&rewind_to(Start::Position(5), None), &snapshot, facts()).unwrap().answer(0).count, 1);
    let kept = Facts::Rewind {
        place: place(Start::Position(8), 8, &snapshot),
        kept: vec![target(1, 0)],
        events: Vec::new(),
        former_filters: FormerFilters::default(),
    };
    assert_eq!(
        plan(&rewind_to(Start::Position(8), None), &snapshot, kept).unwrap().answer(0).count,
        1,
        "a copy is due"
    );
}

#[test]
fn copies_are_looked_for_from_what_was_asked_for() {
    let snapshot = snapshot([row("s", &[9])]);
    let kept = |to, oldest_kept| Place::new(to, 4, RangeSet::new(), oldest_kept, &snapshot).kept;
    assert_eq!(kept(Start::Beginning, None), 0);
    assert_eq!(kept(Start::Position(2), None), 2);
    assert_eq!(kept(Start::Position(7), None), 4);
    assert_eq!(kept(Start::Time(Timestamp(1)), Some(3)), 2);
    assert_eq!(kept(Start::Time(Timestamp(1)), None), 4);
}

#[test]
fn what_is_judged_again_is_written_down_only_if_it_differs() {
    let snapshot = snapshot([row("s", &[9])]);
    let edits = |former_filters: FormerFilters| {
        let place = place(Start::Position(4), 4, &snapshot);
        let facts = Facts::Rewind { place, kept: Vec::new(), events: Vec::new(), former_filters };
        plan(&rewind_to(Start::Position(4), None), &snapshot, facts).unwrap().edits
    };
    let is_judged = |edit: &Edit| matches!(edit, Edit::SetFormerFilters(_));
    assert!(!edits(FormerFilters::default()).iter().any(is_judged));
    let mut formers = FormerFilters::default();
    let ended =
        Definition { filter: Filter { topics: vec!["x".into()], ..Filter::default() }, ..Definition::default() };
    formers.end(&ended, Timestamp(1), [&Cursor { floor: 9, ..Cursor::default() }]);
    assert!(edits(formers).iter().any(is_judged));
}

#[test]
fn a_rewind_of_a_key_replays_what_is_settled_or_has_a_delivery_and_is_wanted() {
    let mut row = row("s", &[5]);
    row.filter.topics = vec!["t".into()];
    let snapshot = snapshot([row]);
    let events =
        vec![key_event(3, "t", false), key_event(4, "other", false), key_event(6, "t", false), key_event(7, "t", true)];
    let place = place(Start::Position(2), 2, &snapshot);
    let kept = vec![target(1, 0)];
    let facts = Facts::Rewind { place, kept: kept.clone(), events, former_filters: FormerFilters::default() };
    let plan = plan(&rewind_to(Start::Position(2), Some("k")), &snapshot, facts).unwrap();
    let replayed = ranges(&[(3, 3), (7, 7)]);
    let expected = [
        Edit::MakeDue(kept),
        Edit::Replay { lane: 0, key: "k".to_owned(), positions: vec![3, 7] },
        Edit::Restore(replayed.clone()),
        Edit::Account { lane: 0, epoch: 4, positions: replayed },
        Edit::Reload(BTreeSet::from([0])),
        Edit::Fence { lane: 0, epoch: 3 },
    ];
    assert_eq!(plan.edits, expected);
    let changed = plan.answer(0);
    assert_eq!(changed.events, [1, 3, 7].map(Uuid::from_u128));
    assert_eq!((changed.count, &*changed.message), (3, "'s' replays 3 events of key 'k' above position 2"));
}

#[test]
fn a_rewind_of_a_key_without_events_leaves_its_lane_alone() {
    let snapshot = snapshot([row("s", &[5])]);
    let facts = rewind_facts(place(Start::Position(2), 4, &snapshot));
    let plan = plan(&rewind_to(Start::Position(2), Some("k")), &snapshot, facts).unwrap();
    assert_eq!(plan.edits, [Edit::MakeDue(Vec::new())]);
    let note = "(as far back as retention has left the log)";
    let said = format!("nothing to replay above position 4 {note}: 's' has settled no event of key 'k' there");
    assert_eq!(plan.answer(0).message, said);
}

#[test]
fn lanes_are_changed_only_where_nothing_is_between_them() {
    let relane = |lanes| Change::Relane { subscription: "s".to_owned(), lanes };
    let facts = |is_claimed| Facts::Ledger { lanes: vec![LaneLedger::default(); 2], is_claimed };
    let refused = |snapshot: Snapshot, is_claimed| refusal(&relane(4), &snapshot, facts(is_claimed));
    for lanes in [0, LANES_MAX + 1] {
        let said = refusal(&relane(lanes), &snapshot([row("s", &[5, 5])]), facts(true));
        assert_eq!(said, format!("lanes = {lanes} is outside 1 to lanes_max = {LANES_MAX}"), "before all others");
    }
    // Each has what the ones after it refuse too.
    let mut worst = row("s", &[5, 6]);
    worst.lanes[0].owner = Some(OWNER);
    let mut uneven = row("s", &[5, 6]);
    uneven.lanes[0].owner = Some(OWNER);
    worst.pause = None;
    let mut above = row("s", &[5, 5]);
    above.lanes[0].owner = Some(OWNER);
    above.lanes[1].cursor.settled = ranges(&[(7, 7)]);
    let mut in_flight = row("s", &[5, 5]);
    in_flight.lanes[0].owner = Some(OWNER);
    for (row, why) in [
        (worst, "it is running; pause it first"),
        (uneven, "its lanes are not at the same place; resume it until it is idle, pause it and try again"),
        (above, "its lanes are not at the same place; resume it until it is idle, pause it and try again"),
        (in_flight, "events are still in flight; wait until they are done"),
    ] {
        let said = refused(run(snapshot([row]), 1), true);
        assert_eq!(said, format!("the lanes of 's' cannot be changed now: {why}"));
    }
    let said = refused(run(snapshot([row("s", &[5, 5])]), 1), true);
    assert!(said.ends_with("take them back with `pillarbox recover`"), "its runner owns none of its lanes: {said}");
    assert!(plan(&relane(4), &run(snapshot([row("s", &[5, 5])]), 1), facts(false)).is_ok());
}

#[test]
fn new_lanes_have_recorded_what_all_former_ones_have() {
    let snapshot = snapshot([row("s", &[9, 9])]);
    let ledger = |covered: &[_], before: &[_]| LaneLedger { covered: ranges(covered), before_start: ranges(before) };
    let lanes = vec![ledger(&[(3, 9)], &[(1, 2)]), ledger(&[(6, 8)], &[(1, 4)])];
    let change = Change::Relane { subscription: "s".to_owned(), lanes: 3 };
    let plan = plan(&change, &snapshot, Facts::Ledger { lanes, is_claimed: false }).unwrap();
    let ledger = ledger(&[(3, 4), (6, 8)], &[(1, 2)]);
    assert_eq!(plan.edits, [Edit::Relane { lanes: 3, floor: 9, epoch: 4, revision: 6, ledger }]);
}

#[test]
fn what_a_living_instance_runs_is_neither_deleted_nor_renamed() {
    let running = run(snapshot([row("s", &[9])]), 0);
    let by = "instance 7 (pid 42 on here) runs it; stop it, or take it out of its configuration";
    let delete = Change::Delete("s".to_owned());
    assert_eq!(refusal(&delete, &running, Facts::Nothing), format!("'s' cannot be deleted: {by}"));
    let rename = |to: &str| Change::Rename { from: "s".to_owned(), to: to.to_owned() };
    assert_eq!(refusal(&rename("other"), &running, Facts::Nothing), format!("'s' cannot be renamed: {by}"));

    let idle = snapshot([row("s", &[9]), SubscriptionRow { id: SubscriptionId(2), ..row("taken", &[9]) }]);
    let said = refusal(&rename("taken"), &idle, Facts::Nothing);
    assert_eq!(said, "there is a subscription 'taken' already; choose another name");
    assert!(refusal(&rename(""), &idle, Facts::Nothing).contains("a name has 1 to 128"));
    let done = plan(&rename("other"), &idle, Facts::Nothing).unwrap();
    assert_eq!(done.edits, [Edit::Rename("other".to_owned())]);
    let said = done.answer(0).message;
    assert_eq!(said, "'s' is now 'other'; name it so in the configuration before it is started again");
    assert_eq!(plan(&delete, &idle, Facts::Nothing).unwrap().edits, [Edit::Delete]);
}

#[test]
fn what_edits_count_is_told_in_the_singular_and_in_the_plural() {
    let snapshot = snapshot([row("s", &[9])]);
    let told = |change: &Change, facts: fn() -> Facts| {
        [0, 1, 2].map(|count| plan(change, &snapshot, facts()).unwrap().answer(count).message)
    };
    let recover = Change::Recover { subscription: None, instance: None, silent_for: Duration::ZERO };
    assert_eq!(
        told(&recover, || Facts::Nothing),
        [
            "nothing to recover: no matching deliveries are in progress",
            "1 delivery was taken from the instance that worked on it; it counts as an attempt",
            "2 deliveries were taken from the instances that worked on them; each counts as an attempt",
        ]
    );
    assert_eq!(
        told(&Change::Delete("s".to_owned()), || Facts::Nothing),
        ["0 deliveries", "1 delivery", "2 deliveries"].map(|went| format!("'s' is deleted, with {went}"))
    );
    let ledger = || Facts::Ledger { lanes: vec![LaneLedger::default()], is_claimed: false };
    let relane = |lanes| Change::Relane { subscription: "s".to_owned(), lanes };
    assert_eq!(
        told(&relane(3), ledger),
        ["0 deliveries", "1 delivery", "2 deliveries"]
            .map(|moved| format!("'s' has 3 lanes (it had 1), {moved} moved; resume it with `pillarbox resume s`"))
    );
    let same = plan(&relane(1), &snapshot, ledger()).unwrap();
    assert!(same.edits.is_empty());
    assert_eq!(same.answer(0).message, "'s' already has 1 lane");
}

#[test]
fn a_version_that_the_log_has_is_not_said_to_be_missing() {
    let snapshot = snapshot([row("s", &[9])]);
    let which = Selection::Version("stream".to_owned(), 2);
    let change = Change::Requeue { subscription: "s".to_owned(), which, limit: usize::MAX };
    let said = |event| refusal(&change, &snapshot, Facts::Deliveries { event, targets: Vec::new(), head: None });
    let id = Uuid::from_u128(1);
    assert!(said(Some(id)).starts_with(&format!("nothing to requeue: event {id} has no delivery of 's'")));
    assert!(said(None).starts_with("stream 'stream' has no version 2 in this log;"));
}
