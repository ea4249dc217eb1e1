use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::admin::{Change, Changed, ListQuery, Operator, PausedBy, PrunePolicy, Selection, State};
use pillarbox::engine::{EngineConfig, Input};
use pillarbox::sink::SinkFeatures;
use pillarbox::store::{
    AttemptError, Cursor, DEAD_HEADS_MAX, DeliveryRow, ERROR_BYTES_MAX, ERRORS_KEPT_MAX, Epoch, Fleet, Hello,
    InstanceId, Joined, KeyHash, LaneRef, LaneState, LaneView, LaneWrite, Lock, PAGE_BYTES_MAX, Page, PollRequest,
    RangeSet, Report, Scan, ScanRequest, Settlement, Store, Take, TakeCause, Wake, Writer, lane_of,
};
use pillarbox::{Error, ErrorKind, Event, Filter, NewEvent, OnDead, Position, Start, Subscription, Timestamp};
use uuid::Uuid;

use crate::Driver;

use super::{AT_ONCE, Case, DuringPoll, Fixture, FixtureFeatures, Outcome, Tried};

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}

macro_rules! ensure_eq {
    ($left:expr, $right:expr $(,)?) => {
        ensure_eq!($left, $right, "{}", stringify!($left))
    };
    ($left:expr, $right:expr, $($message:tt)+) => {
        match (&$left, &$right) {
            (left, right) if *left == *right => {}
            (left, right) => return Err(format!("{}: {left:?}, and not {right:?}", format!($($message)+)).into()),
        }
    };
}

macro_rules! cases {
    ($($needs:ident: $($run:ident),+ $(,)?;)+) => {
        pub(in crate::store_suite) fn all<F: Fixture>() -> Vec<Case<F>> {
            vec![$($(Case { name: stringify!($run), needs: $needs, run: |fixture| Box::pin($run(fixture)) }),+),+]
        }
    };
}

pub(super) mod definition;
pub(super) mod journal;
pub(super) mod lanes;
pub(super) mod operating;
pub(super) mod ownership;
pub(super) mod publishing;
pub(super) mod queue;
pub(super) mod retention;
pub(super) mod rewinding;
pub(super) mod transactional;
pub(super) mod why;

const NOTHING: FixtureFeatures = FixtureFeatures {
    transactions: false,
    concurrent_writers: false,
    during_poll: false,
    power_loss: false,
    fail_settle: false,
    bury: false,
    hold: false,
    fill: false,
    stored_policy: false,
    dedup: false,
    transact: false,
    inbox: false,
    whole_tables: false,
};
const TRANSACTIONS: FixtureFeatures = FixtureFeatures { transactions: true, ..NOTHING };
const WRITERS: FixtureFeatures = FixtureFeatures { concurrent_writers: true, ..TRANSACTIONS };
const DURING_POLL: FixtureFeatures = FixtureFeatures { during_poll: true, ..WRITERS };
const POWER_LOSS: FixtureFeatures = FixtureFeatures { power_loss: true, ..NOTHING };
const FAIL_SETTLE: FixtureFeatures = FixtureFeatures { fail_settle: true, ..NOTHING };
const HOLD: FixtureFeatures = FixtureFeatures { hold: true, ..NOTHING };
const BURY: FixtureFeatures = FixtureFeatures { bury: true, ..NOTHING };
const FILL: FixtureFeatures = FixtureFeatures { fill: true, ..NOTHING };
const STORED_POLICY: FixtureFeatures = FixtureFeatures { stored_policy: true, ..NOTHING };
const DEDUP: FixtureFeatures = FixtureFeatures { dedup: true, ..NOTHING };
const TRANSACT: FixtureFeatures = FixtureFeatures { transact: true, ..NOTHING };
const INBOX: FixtureFeatures = FixtureFeatures { inbox: true, ..NOTHING };

cases! {
    NOTHING:
        positions_ascend,
        a_full_page_covers_what_it_looked_at_and_no_more,
        scans_keep_to_their_stretches,
        a_filter_never_looks_like_a_hole,
        unwanted_events_are_not_returned,
        events_arrive_as_they_were_published,
        fetch_finds_exact_positions_in_order,
        large_events_are_fetched_a_page_at_a_time,
        only_one_take_wins,
        a_take_raises_the_epoch_before_it_returns,
        a_load_shows_what_was_settled_before_the_take,
        a_load_leaves_out_the_dead,
        a_load_tells_which_keys_the_dead_hold_back,
        a_load_says_when_the_dead_hold_back_too_many_keys,
        an_old_epoch_loads_nothing,
        an_old_epoch_settles_nothing,
        a_fenced_lane_does_not_keep_others_from_being_settled,
        a_put_replaces_what_is_there,
        a_change_does_not_bring_a_finished_delivery_back,
        a_change_keeps_the_last_errors,
        several_changes_of_a_delivery_in_one_settlement_all_count,
        a_finished_delivery_is_gone,
        a_cursor_with_many_ranges_comes_back,
        a_slow_sink_with_a_backlog_writes_few_ranges,
        an_anchor_that_the_log_does_not_have_is_refused,
        an_anchor_that_the_log_has_is_accepted,
        a_release_frees_the_lane,
        beats_and_held_locks_are_seen,
        a_killed_instance_holds_no_lock,
        leaving_frees_the_lanes,
        an_owner_that_has_beaten_since_keeps_its_lane,
        takeovers_are_counted_until_the_owner_is_calm,
        deliveries_outlive_their_owner_in_order_of_arrival,
        requeue_and_skip_raise_the_revision,
        an_attempt_in_flight_does_not_overwrite_a_requeue,
        a_repeated_settlement_does_not_bring_a_skipped_delivery_back,
        an_attempt_that_an_operator_came_before_is_not_announced,
        a_lane_that_is_not_there_settles_nothing,
        a_pause_is_seen,
        a_pause_says_who_and_why_until_it_is_resumed,
        a_rewind_raises_epochs_and_forgets_what_lies_above,
        another_join_keeps_the_lanes_and_takes_the_newest_filter,
        joining_again_is_a_new_instance_and_the_end_of_the_old_one,
        joining_again_brings_no_old_definition_back,
        starting_now_leaves_out_what_is_there,
        starting_at_a_position_leaves_out_what_is_below,
        what_lies_before_the_start_is_in_the_books_until_a_rewind,
        dead_for_how_long_counts_from_the_death,
        instances_have_numbers_of_their_own,
        dead_positions_are_in_the_books,
        the_books_say_what_settlements_covered,
        a_wait_notices_what_was_committed_before_it,
        a_wait_is_ended_by_a_commit,
        a_wait_ends_in_time;
    WRITERS:
        a_late_commit_is_shown_by_a_later_scan,
        an_aborted_event_is_never_shown,
        a_writer_is_named_until_its_rows_are_visible,
        starting_now_includes_what_commits_later;
    DURING_POLL:
        what_one_poll_does_not_show_and_no_writer_holds_never_appears;
    POWER_LOSS:
        what_was_polled_survives_a_power_loss;
    FAIL_SETTLE:
        a_settlement_that_fails_is_whole_or_nothing;
    BURY:
        a_buried_instance_is_told_that_it_has_ended;
}

/// A store that has joined.
struct Member<S> {
    store: S,
    joined: Joined,
}

impl<S: Store> Member<S> {
    async fn beat_of(&self, instance: InstanceId) -> Tried<i64> {
        let fleet = self.fleet().await?;
        let found = fleet.instances.iter().find(|view| view.id == instance).map(|view| view.beat);
        found.ok_or_else(|| format!("{instance:?} is not in the fleet").into())
    }

    async fn fleet(&self) -> pillarbox::Result<Fleet> {
        self.store.observe(&Report::default()).await
    }

    async fn lane(&self, lane: LaneRef) -> Tried<LaneView> {
        let fleet = self.fleet().await?;
        let found = fleet.lanes.into_iter().find(|view| view.lane == lane);
        found.ok_or_else(|| format!("{lane:?} is not in the fleet").into())
    }

    fn first_lane(&self) -> LaneRef {
        self.lane_ref(0)
    }

    fn lane_ref(&self, lane: u32) -> LaneRef {
        LaneRef { subscription: self.joined.subscriptions[0].id, lane }
    }

    /// Takes a lane for this cause at the epoch that it has.
    async fn take(&self, lane: LaneRef, cause: TakeCause) -> Tried<Epoch> {
        let expected = self.lane(lane).await?.epoch;
        let taken = self.store.take(&[Take { lane, expected, cause, beat: None }]).await?;
        taken.first().copied().flatten().ok_or_else(|| format!("{lane:?} could not be taken").into())
    }

    async fn load(&self, lane: LaneRef, epoch: Epoch) -> Tried<LaneState> {
        let loaded = self.store.load(&[(lane, epoch)]).await?.pop().flatten();
        loaded.ok_or_else(|| format!("{lane:?} has nothing to load at epoch {epoch}").into())
    }

    async fn settle(&self, write: LaneWrite) -> pillarbox::Result<bool> {
        let settlement = Settlement { lanes: vec![write], closed: RangeSet::new() };
        Ok(self.store.settle(&settlement).await? == [true])
    }

    async fn poll_from(&self, after: Position) -> pillarbox::Result<(Page, Scan)> {
        poll(&self.store, after, Position::MAX, &[Filter::default()]).await
    }
}

fn subscription() -> Subscription {
    Subscription { lanes: 2, ..Subscription::new("s") }
}

async fn join<F: Fixture>(fixture: &F) -> pillarbox::Result<Member<F::Store>> {
    join_with(fixture, subscription()).await
}

async fn join_with<F: Fixture>(fixture: &F, wish: Subscription) -> pillarbox::Result<Member<F::Store>> {
    let store = fixture.open().await?;
    let joined = store.join(hello(wish)).await?;
    Ok(Member { store, joined })
}

fn hello(wish: Subscription) -> Hello {
    Hello { host: "suite".into(), pid: 1, version: "0".into(), subscriptions: vec![wish], rejoin: false }
}

/// Joins and takes the first lane.
async fn owner<F: Fixture>(fixture: &F) -> Tried<(Member<F::Store>, LaneRef, Epoch)> {
    let member = join(fixture).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    Ok((member, lane, epoch))
}

/// One lane, so that cases can say which.
fn one_lane(name: &str) -> Subscription {
    Subscription { lanes: 1, ..Subscription::new(name) }
}

/// Joins with a single lane and takes it.
async fn owner_of_all<F: Fixture>(fixture: &F) -> Tried<(Member<F::Store>, LaneRef, Epoch)> {
    let member = join_with(fixture, one_lane("s")).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    Ok((member, lane, epoch))
}

/// Kills a store and waits until that is seen; an operator who has seen it.
async fn killed<F: Fixture>(fixture: &F, member: Member<F::Store>) -> Tried<F::Operator> {
    let id = member.joined.instance;
    fixture.kill(member.store).await;
    let operator = fixture.operator().await?;
    let deadline = Instant::now() + PATIENCE;
    while operator.status().await?.instances.iter().any(|instance| instance.id == id && instance.alive) {
        ensure!(Instant::now() < deadline, "{id:?} was killed and is called alive");
        tokio::task::yield_now().await;
    }
    Ok(operator)
}

/// Events of topic `t`, one per key.
fn of_keys(keys: &[&str]) -> Vec<NewEvent> {
    keys.iter().map(|key| NewEvent::new("t", "y").key(*key)).collect()
}

async fn ids_of<F: Fixture>(fixture: &F) -> Tried<Vec<Uuid>> {
    let all = ListQuery { limit: LIMIT, ..ListQuery::default() };
    Ok(fixture.operator().await?.list(&all).await?.iter().map(|row| row.id).collect())
}

/// A delivery that has failed once, or is to be tried now.
fn parked(position: Position, key: &str, state: State, now: Timestamp) -> DeliveryRow {
    DeliveryRow { position, key: Some(key.into()), arrival: position, state, attempts: 1, due_at: now, since: now }
}

/// The database's clock.
async fn clock<F: Fixture>(fixture: &F) -> Tried<Timestamp> {
    Ok(fixture.operator().await?.status().await?.at)
}

/// The states of the unfinished events of a subscription `s`.
async fn states<O: Operator>(operator: &O) -> Tried<BTreeMap<Position, State>> {
    let query = ListQuery { subscription: Some("s".into()), limit: LIMIT, ..ListQuery::default() };
    let rows = operator.list(&query).await?;
    Ok(rows.into_iter().filter_map(|row| Some((row.position, row.state?))).collect())
}

/// Carries out a change whose dry run must say the same.
async fn change<O: Operator>(operator: &O, change: Change) -> Tried<Changed> {
    let dry = operator.change(&change, true).await?;
    let done = operator.change(&change, false).await?;
    ensure_eq!((dry.count, dry.events), (done.count, done.events.clone()), "the dry run of {change:?}");
    Ok(done)
}

/// Why a change is refused, and its dry run too.
async fn refused<O: Operator>(operator: &O, change: Change) -> Tried<Error> {
    match (operator.change(&change, true).await, operator.change(&change, false).await) {
        (Err(_), Err(error)) => Ok(error),
        (dry, done) => Err(format!("{change:?} is not refused, but {done:?}; its dry run: {dry:?}").into()),
    }
}

fn rewind(to: Start, key: Option<&str>) -> Change {
    Change::Rewind { subscription: "s".into(), to, key: key.map(Into::into) }
}

/// Far longer than anything here takes; only a failing case waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

const HOUR: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(86_400);

const LIMIT: usize = 1000;

async fn poll<S: Store>(
    store: &S,
    after: Position,
    to: Position,
    wanted: &[Filter],
) -> pillarbox::Result<(Page, Scan)> {
    let request = PollRequest {
        scans: vec![ScanRequest { after, to, limit: LIMIT }],
        wanted: wanted.to_vec(),
        ..Default::default()
    };
    let page = store.poll(&request).await?;
    let scan = page.scans.first().cloned().unwrap_or_default();
    Ok((page, scan))
}

fn event(topic: &str, number: usize) -> NewEvent {
    NewEvent::new(topic, "t").key(first_lane_key()).json(&number)
}

/// A key of the first lane, where the cases put their deliveries.
fn first_lane_key() -> String {
    let keys = (0..).map(|number| format!("k{number}"));
    let mut fitting = keys.filter(|key| lane_of(Some(KeyHash::of(key)), 0, subscription().lanes) == 0);
    fitting.next().expect("half of all keys belong to the first of two lanes")
}

fn events(topic: &str, count: usize) -> Vec<NewEvent> {
    (0..count).map(|number| event(topic, number)).collect()
}

fn topics(topic: &str) -> Filter {
    Filter { topics: vec![topic.to_owned()], types: Vec::new() }
}

fn positions(events: &[Arc<Event>]) -> Vec<Position> {
    events.iter().map(|event| event.position).collect()
}

fn set(positions: &[Position]) -> RangeSet {
    positions.iter().map(|position| *position..=*position).collect()
}

fn delivery(position: Position, arrival: i64) -> DeliveryRow {
    DeliveryRow {
        position,
        key: Some(first_lane_key().into()),
        arrival,
        state: State::Retrying,
        attempts: 1,
        due_at: Timestamp(5_000),
        since: Timestamp(4_000),
    }
}

fn write(lane: LaneRef, epoch: Epoch, floor: Position) -> LaneWrite {
    LaneWrite {
        lane,
        epoch,
        revision: 0,
        cursor: Cursor { floor, ..Cursor::default() },
        put: Vec::new(),
        queue: Vec::new(),
        change: Vec::new(),
        finish: Vec::new(),
        calm: false,
        release: false,
    }
}

async fn positions_ascend<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let first = fixture.publish(events("a", 3)).await?;
    let second = fixture.publish(events("a", 2)).await?;
    let published = [first, second].concat();
    ensure!(published.is_sorted() && published[0] > 0, "published at {published:?}");
    let (page, scan) = member.poll_from(0).await?;
    ensure!(positions(&scan.events) == published, "{published:?} was published, {:?} read", scan.events);
    ensure!(scan.visible == set(&published), "visible: {:?}", scan.visible);
    ensure!(page.horizon >= published[4], "the horizon {} is below what is visible", page.horizon);
    ensure!(page.log_start <= published[0], "the log starts at {} with an event below", page.log_start);
    Ok(())
}

async fn a_full_page_covers_what_it_looked_at_and_no_more<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let published = fixture.publish(events("a", 7)).await?;
    let (mut after, mut read) = (0, Vec::new());
    for (page_number, expected) in [3, 3, 1].into_iter().enumerate() {
        let scan = ScanRequest { after, to: Position::MAX, limit: 3 };
        let request = PollRequest { scans: vec![scan], wanted: vec![Filter::default()], ..Default::default() };
        let page = member.store.poll(&request).await?;
        let scan = &page.scans[0];
        ensure!(scan.events.len() == expected, "page {page_number} has {} events", scan.events.len());
        let last = scan.events.last().map_or(after, |event| event.position);
        if expected == 3 {
            ensure!(scan.covered_to == last, "a full page up to {last} claims to cover {}", scan.covered_to);
        } else {
            ensure!(scan.covered_to >= page.horizon, "the last page covers only {}", scan.covered_to);
        }
        read.extend(positions(&scan.events));
        after = scan.covered_to;
    }
    ensure!(read == published, "{published:?} was published, {read:?} read");
    Ok(())
}

async fn scans_keep_to_their_stretches<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let at = fixture.publish(events("a", 6)).await?;
    let scan = |after, to| ScanRequest { after, to, limit: LIMIT };
    let scans = vec![scan(at[4], Position::MAX), scan(at[0], at[1]), scan(at[2], at[3]), scan(at[5], Position::MAX)];
    let page = member
        .store
        .poll(&PollRequest { scans: scans.clone(), wanted: vec![Filter::default()], ..Default::default() })
        .await?;
    let read: Vec<Vec<Position>> = page.scans.iter().map(|scan| positions(&scan.events)).collect();
    ensure!(read == [vec![at[5]], vec![at[1]], vec![at[3]], vec![]], "read {read:?} of {at:?}");
    for (asked, scan) in scans.iter().zip(&page.scans) {
        ensure!(scan.after == asked.after, "asked after {}, answered after {}", asked.after, scan.after);
        let covered = (asked.to.min(page.horizon)..=asked.to).contains(&scan.covered_to);
        ensure!(covered || scan.covered_to >= asked.after, "{asked:?} covered up to {}", scan.covered_to);
        ensure!(scan.covered_to <= asked.to, "{asked:?} covered up to {}", scan.covered_to);
    }
    Ok(())
}

async fn a_filter_never_looks_like_a_hole<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let published = [fixture.publish(events("a", 3)).await?, fixture.publish(events("b", 3)).await?].concat();
    for wanted in [vec![topics("a")], vec![topics("b")], Vec::new()] {
        let (_, scan) = poll(&member.store, 0, Position::MAX, &wanted).await?;
        ensure!(scan.visible == set(&published), "with {wanted:?} only {:?} is visible", scan.visible);
    }
    Ok(())
}

async fn unwanted_events_are_not_returned<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let a = fixture.publish(events("a", 2)).await?;
    let prefixed = fixture.publish(events("b.c", 2)).await?;
    fixture.publish(events("c", 2)).await?;
    let wanted = [topics("a"), topics("b.*")];
    let (_, scan) = poll(&member.store, 0, Position::MAX, &wanted).await?;
    ensure!(positions(&scan.events) == [a, prefixed].concat(), "read {:?}", scan.events);
    let (_, scan) = poll(&member.store, 0, Position::MAX, &[]).await?;
    ensure!(scan.events.is_empty(), "nothing was wanted, {:?} read", scan.events);
    let types = Filter { topics: Vec::new(), types: vec!["other".to_owned()] };
    let (_, scan) = poll(&member.store, 0, Position::MAX, &[types]).await?;
    ensure!(scan.events.is_empty(), "another type was wanted, {:?} read", scan.events);
    Ok(())
}

async fn events_arrive_as_they_were_published<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let id = Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);
    let text = "{\"q\": \"\\\" \\\\ \\n \\u0000 🦀\", \"big\": 123456789012345678901234567890}";
    let json = NewEvent::new("a", "t").key("k \"' 🦀\n").json_text(text).header("x", "\"é\n").id(id);
    let bytes = NewEvent::new("a", "t").bytes((0..=255).collect::<Vec<u8>>(), "image/png");
    let delayed = NewEvent::new("a", "t").deliver_at(Timestamp(9_999_999_999_999));
    fixture.publish(vec![json.clone(), bytes.clone(), delayed]).await?;
    let (_, scan) = member.poll_from(0).await?;
    let [first, second, third] = &scan.events[..] else {
        return Err(format!("three events were published, {} read", scan.events.len()).into());
    };
    ensure!(first.id == id, "the id is {}", first.id);
    ensure!(first.payload == json.payload, "the JSON is {:?}", first.payload);
    ensure!(first.key.as_deref() == json.key.as_deref(), "the key is {:?}", first.key);
    ensure!(first.headers.to_map() == json.headers, "the headers are {:?}", first.headers);
    ensure!(second.payload == bytes.payload, "the bytes are {:?}", second.payload);
    ensure!(second.content_type.as_deref() == Some("image/png"), "the media type is {:?}", second.content_type);
    ensure!(second.key.is_none() && second.headers.is_empty(), "key and headers came from nowhere: {second:?}");
    ensure!(third.deliver_at == Some(Timestamp(9_999_999_999_999)), "deliver_at is {:?}", third.deliver_at);
    ensure!(third.payload == pillarbox::Payload::None, "the payload is {:?}", third.payload);
    Ok(())
}

async fn fetch_finds_exact_positions_in_order<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let at = fixture.publish(events("a", 5)).await?;
    let found = member.store.fetch(&[at[3], at[0], at[4] + 100, at[2]]).await?;
    ensure!(positions(&found) == [at[0], at[2], at[3]], "found {:?}", positions(&found));
    ensure!(member.store.fetch(&[]).await?.is_empty(), "nothing was asked for, something found");
    let (_, scan) = member.poll_from(at[2] - 1).await?;
    ensure!(found[1] == scan.events[0], "fetched {:?}, polled {:?}", found[1], scan.events[0]);
    Ok(())
}

async fn large_events_are_fetched_a_page_at_a_time<F: Fixture>(fixture: &F) -> Outcome {
    const EACH: usize = 1_000_000;
    let member = join(fixture).await?;
    // Of bytes that no database can compress.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let event = |bytes: Vec<u8>| NewEvent::new("a", "t").bytes(bytes, "application/octet-stream");
    let large = (0..PAGE_BYTES_MAX / EACH + 2).map(|_| event((0..EACH).map(|_| noise()).collect())).collect();
    let at = fixture.publish(large).await?;
    // Due deliveries are asked for in any order: the page ends where the request says, not where the log does.
    for order in [at.clone(), at.iter().rev().copied().collect()] {
        let mut rest = &order[..];
        while !rest.is_empty() {
            let found = positions(&member.store.fetch(rest).await?);
            let (page, after) = rest.split_at(found.len().min(rest.len()));
            let mut page = page.to_vec();
            page.sort_unstable();
            ensure!(!found.is_empty() && page == found, "of {rest:?} it fetched {found:?}");
            ensure!(found.len() <= PAGE_BYTES_MAX / EACH, "{} events are more than fit a page", found.len());
            rest = after;
        }
    }
    Ok(())
}

async fn only_one_take_wins<F: Fixture>(fixture: &F) -> Outcome {
    let (first, second) = (join(fixture).await?, join(fixture).await?);
    let lane = first.first_lane();
    let expected = first.lane(lane).await?.epoch;
    let take = [Take { lane, expected, cause: TakeCause::Free, beat: None }];
    let (one, other) = tokio::join!(first.store.take(&take), second.store.take(&take));
    let (one, other) = (one?, other?);
    ensure!(one.len() == 1 && other.len() == 1, "not one answer each: {one:?}, {other:?}");
    let winners = [&one[0], &other[0]].into_iter().flatten().count();
    ensure!(winners == 1, "{winners} won: {one:?} and {other:?}");
    let winner = if one[0].is_some() { first.joined.instance } else { second.joined.instance };
    let view = first.lane(lane).await?;
    ensure!(view.owner == Some(winner), "{winner:?} won and {:?} is the owner", view.owner);
    Ok(())
}

async fn a_take_raises_the_epoch_before_it_returns<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let second = join(fixture).await?;
    ensure!(second.lane(lane).await?.epoch == epoch, "others do not see the epoch that the take returned");
    let raised = second.take(lane, TakeCause::Lease).await?;
    ensure!(raised > epoch, "epoch {epoch} became {raised}");
    let view = first.lane(lane).await;
    // The one whose lanes were all taken may have been buried.
    ensure!(view.is_err() || view.is_ok_and(|view| view.epoch == raised), "the first owner sees another epoch");
    let other = second.lane(second.lane_ref(1)).await?;
    ensure!(other.owner.is_none(), "the other lane was taken along: {other:?}");
    Ok(())
}

async fn a_load_shows_what_was_settled_before_the_take<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let second = join(fixture).await?;
    let seen = second.lane(lane).await?;
    let settled = LaneWrite { put: vec![delivery(at[1], 0)], ..write(lane, epoch, at[1]) };
    ensure!(first.settle(settled).await?, "the owner could not settle");
    let taken = second.store.take(&[Take { lane, expected: seen.epoch, cause: TakeCause::Lease, beat: None }]).await?;
    let Some(raised) = taken[0] else { return Err("the lane could not be taken".into()) };
    let state = second.load(lane, raised).await?;
    ensure!(state.cursor.floor == at[1], "the floor is {}, settled was {}", state.cursor.floor, at[1]);
    ensure!(state.deliveries == [delivery(at[1], 0)], "the deliveries are {:?}", state.deliveries);
    Ok(())
}

/// A lane with rows at eight positions: below the floor, four dead ones of two keys and one that is not dead, which comes after a dead
/// one of its key; above it three that are dead, of which the second is settled. Then it is loaded.
async fn loaded_with_dead<F: Fixture>(fixture: &F, on_dead: OnDead) -> Tried<(Vec<Position>, LaneState)> {
    let member = join_with(fixture, Subscription { on_dead, ..subscription() }).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let at = fixture.publish(events("a", 8)).await?;
    let row = |index: usize, key: Option<&str>, state| DeliveryRow {
        key: key.map(Into::into),
        state,
        ..delivery(at[index], index as i64 + 1)
    };
    let put = vec![
        row(0, Some("x"), State::Dead),
        row(1, Some("x"), State::Dead),
        row(2, Some("y"), State::Dead),
        row(3, None, State::Dead),
        row(4, Some("x"), State::Pending),
        row(5, Some("x"), State::Dead),
        row(6, Some("x"), State::Dead),
        row(7, Some("x"), State::Dead),
    ];
    let cursor = Cursor { floor: at[4], settled: set(&at[6..7]), ..Cursor::default() };
    ensure!(member.settle(LaneWrite { put, cursor, ..write(lane, epoch, at[4]) }).await?, "the owner could not settle");
    Ok((at, member.load(lane, epoch).await?))
}

async fn a_load_leaves_out_the_dead<F: Fixture>(fixture: &F) -> Outcome {
    let (at, state) = loaded_with_dead(fixture, OnDead::Skip).await?;
    let loaded: Vec<Position> = state.deliveries.iter().map(|delivery| delivery.position).collect();
    ensure!(
        loaded == [at[4], at[5], at[7]],
        "what is not dead and what is dead and not settled is at {:?}, loaded: {loaded:?}",
        [at[4], at[5], at[7]]
    );
    ensure!(state.last_arrival == 8, "the last arrival is {}", state.last_arrival);
    Ok(())
}

async fn a_load_tells_which_keys_the_dead_hold_back<F: Fixture>(fixture: &F) -> Outcome {
    let (at, state) = loaded_with_dead(fixture, OnDead::Block).await?;
    let loaded: Vec<Position> = state.deliveries.iter().map(|delivery| delivery.position).collect();
    let needed = [at[0], at[2], at[4], at[5], at[7]];
    ensure!(loaded == needed, "of each key the first dead one, and the rest: {needed:?}, loaded: {loaded:?}");
    ensure!(!state.dead_heads_left_out, "two keys are few");
    Ok(())
}

async fn a_load_says_when_the_dead_hold_back_too_many_keys<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let at = fixture.publish(events("a", DEAD_HEADS_MAX + 1)).await?;
    let dead = |(index, position): (usize, &Position)| DeliveryRow {
        key: Some(format!("k{index}").into()),
        state: State::Dead,
        ..delivery(*position, index as i64 + 1)
    };
    let mut dead: Vec<DeliveryRow> = at.iter().enumerate().map(dead).collect();
    for (put, left_out) in [(dead.drain(..DEAD_HEADS_MAX).collect(), false), (dead, true)] {
        let settled = LaneWrite { put, ..write(lane, epoch, at[DEAD_HEADS_MAX]) };
        ensure!(member.settle(settled).await?, "the owner could not settle");
        let state = member.load(lane, epoch).await?;
        let told = (state.deliveries.len(), state.dead_heads_left_out);
        ensure!(told == (DEAD_HEADS_MAX, left_out), "told: {told:?}");
    }
    Ok(())
}

async fn an_old_epoch_loads_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, old) = owner(fixture).await?;
    let epoch = first.take(lane, TakeCause::Free).await?;
    let other = first.take(first.lane_ref(1), TakeCause::Free).await?;
    let loaded = first.store.load(&[(lane, old), (first.lane_ref(1), other), (lane, epoch)]).await?;
    let there: Vec<bool> = loaded.iter().map(Option::is_some).collect();
    ensure!(there == [false, true, true], "loaded at an old, a current and a current epoch: {there:?}");
    Ok(())
}

async fn an_old_epoch_settles_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, old) = owner(fixture).await?;
    // The other lane stays its own, so that it lives on as an instance.
    first.take(first.lane_ref(1), TakeCause::Free).await?;
    let at = fixture.publish(events("a", 4)).await?;
    let rows = LaneWrite { put: vec![delivery(at[0], 0), delivery(at[1], 1)], ..write(lane, old, at[1]) };
    ensure!(first.settle(rows).await?, "the owner could not settle");
    let second = join(fixture).await?;
    let epoch = second.take(lane, TakeCause::Lease).await?;
    let before = second.load(lane, epoch).await?;
    let changed = DeliveryRow { attempts: 9, ..delivery(at[1], 1) };
    let stale = LaneWrite {
        put: vec![delivery(at[2], 2)],
        change: vec![(changed, None)],
        finish: vec![at[0]],
        release: true,
        ..write(lane, old, at[3])
    };
    // A store may also have told the old owner that it has ended, or have cut its connections.
    match first.settle(stale).await {
        Err(error) if matches!(error.kind(), ErrorKind::Ended | ErrorKind::Unavailable) => {}
        answer => ensure!(!answer?, "the old owner was told that it settled"),
    }
    let after = second.load(lane, epoch).await?;
    ensure!(after.cursor == before.cursor, "the cursor moved from {:?} to {:?}", before.cursor, after.cursor);
    ensure!(after.deliveries == before.deliveries, "{:?} became {:?}", before.deliveries, after.deliveries);
    ensure!(second.lane(lane).await?.owner == Some(second.joined.instance), "the new owner lost the lane");
    Ok(())
}

async fn a_fenced_lane_does_not_keep_others_from_being_settled<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, old) = owner(fixture).await?;
    let other = member.lane_ref(1);
    let other_epoch = member.take(other, TakeCause::Free).await?;
    let epoch = member.take(lane, TakeCause::Free).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let lanes = vec![write(lane, old, at[1]), write(other, other_epoch, at[1])];
    let settled = member.store.settle(&Settlement { lanes, closed: RangeSet::new() }).await?;
    ensure!(settled == [false, true], "an old and a current epoch were answered with {settled:?}");
    let floor = member.load(lane, epoch).await?.cursor.floor;
    ensure!(floor < at[0], "the fenced lane's floor is {floor}");
    let floor = member.load(other, other_epoch).await?.cursor.floor;
    ensure!(floor == at[1], "the other lane's floor is {floor}");
    Ok(())
}

async fn a_put_replaces_what_is_there<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let first = LaneWrite { put: vec![delivery(at[0], 0)], ..write(lane, epoch, 0) };
    ensure!(member.settle(first).await?, "the first put failed");
    let changed = DeliveryRow { state: State::Dead, attempts: 7, due_at: Timestamp(9_000), ..delivery(at[0], 3) };
    let second = LaneWrite { put: vec![changed.clone()], ..write(lane, epoch, 0) };
    ensure!(member.settle(second).await?, "the second put failed");
    let state = member.load(lane, epoch).await?;
    ensure!(state.deliveries == [changed], "the deliveries are {:?}", state.deliveries);
    Ok(())
}

async fn a_change_does_not_bring_a_finished_delivery_back<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let put = LaneWrite { put: vec![delivery(at[0], 0), delivery(at[1], 1)], ..write(lane, epoch, 0) };
    ensure!(member.settle(put).await?, "the put failed");
    ensure!(member.settle(LaneWrite { finish: vec![at[0]], ..write(lane, epoch, 0) }).await?, "the finish failed");
    let change = |position, arrival| (DeliveryRow { attempts: 5, ..delivery(position, arrival) }, None);
    let changes = LaneWrite { change: vec![change(at[0], 0), change(at[1], 1)], ..write(lane, epoch, 0) };
    ensure!(member.settle(changes).await?, "the change failed");
    let state = member.load(lane, epoch).await?;
    ensure!(state.deliveries == [change(at[1], 1).0], "the deliveries are {:?}", state.deliveries);
    Ok(())
}

async fn a_change_keeps_the_last_errors<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let count = ERRORS_KEPT_MAX as u32 + 2;
    for attempt in 1..=count {
        let put = if attempt == 1 { vec![delivery(at[0], 0)] } else { Vec::new() };
        let error = AttemptError { at: Timestamp(1), attempt, kind: "k".into(), message: format!("no {attempt}") };
        let change = vec![(DeliveryRow { attempts: attempt, ..delivery(at[0], 0) }, Some(error))];
        ensure!(member.settle(LaneWrite { put, change, ..write(lane, epoch, 0) }).await?, "attempt {attempt} failed");
    }
    let id = member.store.fetch(&at).await?[0].id;
    let record = fixture.operator().await?.show(id).await?.ok_or("the event is not shown")?;
    let Some(shown) = record.subscriptions.iter().find_map(|fate| fate.delivery.as_ref()) else {
        return Err("the delivery is not shown".into());
    };
    let attempts: Vec<u32> = shown.errors.iter().map(|error| error.attempt).collect();
    let expected: Vec<u32> = (count + 1 - ERRORS_KEPT_MAX as u32..=count).collect();
    ensure!(attempts == expected, "the errors of attempts {attempts:?} are kept instead of {expected:?}");
    Ok(())
}

async fn several_changes_of_a_delivery_in_one_settlement_all_count<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let change = |attempt: u32, state| {
        let error = AttemptError { at: Timestamp(1), attempt, kind: "k".into(), message: format!("no {attempt}") };
        (DeliveryRow { attempts: attempt, state, ..delivery(at[0], 0) }, Some(error))
    };
    let change = vec![change(1, State::Retrying), change(2, State::Retrying), change(3, State::Dead)];
    let put = vec![delivery(at[0], 0)];
    ensure!(member.settle(LaneWrite { put, change, ..write(lane, epoch, at[0]) }).await?, "the settlement failed");
    let row = member.load(lane, epoch).await?.deliveries.pop().ok_or("the delivery is not there")?;
    ensure!((row.attempts, row.state) == (3, State::Dead), "the last change is not what is there: {row:?}");
    let id = member.store.fetch(&at).await?[0].id;
    let record = fixture.operator().await?.show(id).await?.ok_or("the event is not shown")?;
    let shown = record.subscriptions.iter().find_map(|fate| fate.delivery.as_ref()).ok_or("no delivery is shown")?;
    let attempts: Vec<u32> = shown.errors.iter().map(|error| error.attempt).collect();
    ensure!(attempts == [1, 2, 3], "the errors of attempts {attempts:?} are kept");
    Ok(())
}

async fn a_finished_delivery_is_gone<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let put = at.iter().zip(0..).map(|(position, arrival)| delivery(*position, arrival)).collect();
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, 0) }).await?, "the put failed");
    let finish = LaneWrite { finish: vec![at[0], at[2], at[2] + 9], ..write(lane, epoch, at[0]) };
    ensure!(member.settle(finish).await?, "the finish failed");
    let left: Vec<_> = member.load(lane, epoch).await?.deliveries.iter().map(|row| row.position).collect();
    ensure!(left == [at[1]], "{left:?} are left of {at:?}");
    Ok(())
}

async fn a_cursor_with_many_ranges_comes_back<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 900)).await?;
    let settled: RangeSet = at[3..].chunks(3).map(|chunk| chunk[0]..=chunk[chunk.len() / 2]).collect();
    let anchor = Some((at[1], member.store.fetch(&at[1..2]).await?[0].id));
    let cursor = Cursor { floor: at[1], settled, anchor };
    ensure!(member.settle(LaneWrite { cursor: cursor.clone(), ..write(lane, epoch, 0) }).await?, "could not settle");
    let loaded = member.load(lane, epoch).await?.cursor;
    ensure!(loaded == cursor, "{cursor:?} was written, {loaded:?} loaded");
    Ok(())
}

async fn a_slow_sink_with_a_backlog_writes_few_ranges<F: Fixture>(fixture: &F) -> Outcome {
    let slow = Subscription { lanes: 4, workers: 4, batch_size: 1, ..Subscription::new("slow") };
    let sink = SinkFeatures { one_by_one: true, ..SinkFeatures::default() };
    let store = fixture.open().await?;
    let mut driver = Driver::start(store, EngineConfig::default(), vec![(slow, sink)]).await?;
    let keyed = |number: usize| NewEvent::new("a", "happened").key(format!("k{number}"));
    let at = fixture.publish((0..500).map(keyed).collect()).await?;
    driver.go_on(Input::Published).await?;
    let mut delivered = Vec::new();
    for turn in 0..60 {
        // They come back in any order.
        ensure!(!driver.at_sink().is_empty(), "nothing is at the sink");
        delivered.extend(driver.deliver(turn * 7 % driver.at_sink().len()).await?);
    }
    driver.pass(Duration::from_millis(200)).await?;
    let fleet = driver.store().observe(&Report::default()).await?;
    for view in fleet.lanes {
        let loaded = driver.store().load(&[(view.lane, view.epoch)]).await?.pop().flatten();
        let cursor = loaded.ok_or("a lane of its own could not be loaded")?.cursor;
        ensure!(cursor.settled.len() <= 4, "{} ranges, and 4 events at the sink: {cursor:?}", cursor.settled.len());
        let settled = |position: &Position| *position <= cursor.floor || cursor.settled.contains(*position);
        let lane = |number: usize| lane_of(Some(KeyHash::of(&format!("k{number}"))), at[number], 4);
        let own =
            at.iter().enumerate().filter(|(number, _)| lane(*number) == view.lane.lane).map(|(_, position)| position);
        let wrong: Vec<_> = own.filter(|position| settled(position) != delivered.contains(position)).collect();
        ensure!(wrong.is_empty(), "delivered and not settled, or settled and not delivered: {wrong:?} by {cursor:?}");
    }
    Ok(())
}

async fn an_anchor_that_the_log_does_not_have_is_refused<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let stranger = Uuid::from_u128(0xdead);
    for position in [at[1], at[1] + 1000] {
        let cursor = Cursor { floor: at[1], settled: RangeSet::new(), anchor: Some((position, stranger)) };
        ensure!(member.settle(LaneWrite { cursor, ..write(lane, epoch, 0) }).await?, "could not settle");
        let kind = member.store.load(&[(lane, epoch)]).await.err().map(|error| error.kind());
        ensure!(kind == Some(ErrorKind::Foreign), "an anchor at {position} of another log was loaded: {kind:?}");
        let kind = member.fleet().await.err().map(|error| error.kind());
        ensure!(kind == Some(ErrorKind::Foreign), "an owner did not notice an anchor at {position}: {kind:?}");
    }
    Ok(())
}

async fn an_anchor_that_the_log_has_is_accepted<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let anchor = Some((at[1], member.store.fetch(&at[1..]).await?[0].id));
    let cursor = Cursor { floor: at[1], settled: RangeSet::new(), anchor };
    ensure!(member.settle(LaneWrite { cursor: cursor.clone(), ..write(lane, epoch, 0) }).await?, "could not settle");
    ensure!(member.load(lane, epoch).await?.cursor == cursor, "the anchor did not come back");
    Ok(())
}

async fn a_release_frees_the_lane<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    ensure!(first.settle(LaneWrite { release: true, ..write(lane, epoch, at[0]) }).await?, "could not release");
    let second = join(fixture).await?;
    ensure!(second.lane(lane).await?.owner.is_none(), "the lane still has an owner");
    let epoch = second.take(lane, TakeCause::Free).await?;
    let state = second.load(lane, epoch).await?;
    ensure!(state.cursor.floor == at[0], "what was settled with the release is lost");
    ensure!(state.takeovers == 0, "a released lane counts as seized {} times", state.takeovers);
    Ok(())
}

async fn beats_and_held_locks_are_seen<F: Fixture>(fixture: &F) -> Outcome {
    let (first, second) = (join(fixture).await?, join(fixture).await?);
    let seen = |fleet: Fleet, id| fleet.instances.into_iter().find(|view| view.id == id);
    let id = first.joined.instance;
    let before = seen(second.fleet().await?, id).ok_or("an instance that joined is not seen")?;
    let still = seen(second.fleet().await?, id).ok_or("an instance is not seen any more")?;
    ensure!(before.beat == still.beat, "the beat rose from {} to {} by itself", before.beat, still.beat);
    first.fleet().await?;
    let after = seen(second.fleet().await?, id).ok_or("an instance is not seen any more")?;
    ensure!(after.beat > before.beat, "the beat stayed at {}", after.beat);
    ensure!(after.lock != Lock::Free, "the lock of a living instance is free");
    let runs = [first.joined.subscriptions[0].id];
    ensure!(after.subscriptions == runs, "it can run {:?} instead of {runs:?}", after.subscriptions);
    let itself = seen(second.fleet().await?, second.joined.instance);
    ensure!(itself.is_some_and(|view| view.lock != Lock::Free), "an instance does not see itself alive");
    Ok(())
}

async fn a_killed_instance_holds_no_lock<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, _) = owner(fixture).await?;
    let id = first.joined.instance;
    let second = join(fixture).await?;
    fixture.kill(first.store).await;
    let fleet = second.fleet().await?;
    let lock = fleet.instances.iter().find(|view| view.id == id).map(|view| view.lock);
    ensure!(lock == Some(Lock::Free), "the lock of a killed owner is {lock:?}");
    let epoch = second.take(lane, TakeCause::Lock).await?;
    ensure!(second.load(lane, epoch).await?.takeovers == 1, "the take-over was not counted");
    Ok(())
}

async fn leaving_frees_the_lanes<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let id = first.joined.instance;
    let second = join(fixture).await?;
    first.store.leave().await?;
    let view = second.lane(lane).await?;
    ensure!(view.owner.is_none(), "{:?} still owns the lane", view.owner);
    ensure!(view.epoch >= epoch, "the epoch fell to {}", view.epoch);
    let fleet = second.fleet().await?;
    ensure!(fleet.instances.iter().all(|view| view.id != id), "the row of the one that left is there");
    let epoch = second.take(lane, TakeCause::Free).await?;
    ensure!(second.load(lane, epoch).await?.takeovers == 0, "a clean end counts as seized");
    Ok(())
}

async fn an_owner_that_has_beaten_since_keeps_its_lane<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let second = join(fixture).await?;
    let seen = second.beat_of(first.joined.instance).await?;
    first.fleet().await?;
    let seize = |beat| [Take { lane, expected: epoch, cause: TakeCause::Lease, beat: Some(beat) }];
    let taken = second.store.take(&seize(seen)).await?;
    ensure!(taken == [None], "an owner that has beaten since was seized: {taken:?}");
    let view = second.lane(lane).await?;
    ensure!(view.owner == Some(first.joined.instance) && view.epoch == epoch, "and it lost the lane: {view:?}");
    let seen = second.beat_of(first.joined.instance).await?;
    let taken = second.store.take(&seize(seen)).await?;
    ensure!(taken[0].is_some(), "an owner that has not beaten since was not seized");
    Ok(())
}

async fn takeovers_are_counted_until_the_owner_is_calm<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, _) = owner(fixture).await?;
    let second = join(fixture).await?;
    second.take(lane, TakeCause::Lease).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let third = join(fixture).await?;
    let epoch = third.take(lane, TakeCause::Lease).await?;
    ensure!(third.load(lane, epoch).await?.takeovers == 2, "two seizures were not counted as two");
    ensure!(third.lane(lane).await?.takeovers == 2, "the fleet does not see two seizures as two");
    ensure!(third.settle(write(lane, epoch, at[0])).await?, "could not settle");
    ensure!(third.load(lane, epoch).await?.takeovers == 2, "the count fell because the floor rose");
    ensure!(third.settle(LaneWrite { calm: true, ..write(lane, epoch, at[0]) }).await?, "could not settle");
    ensure!(third.load(lane, epoch).await?.takeovers == 0, "the count did not fall though the owner is calm");
    drop(first);
    Ok(())
}

async fn deliveries_outlive_their_owner_in_order_of_arrival<F: Fixture>(fixture: &F) -> Outcome {
    let (first, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 4)).await?;
    let state = |state, arrival, position| DeliveryRow { state, ..delivery(position, arrival) };
    let rows = vec![
        state(State::Dead, 0, at[3]),
        state(State::Delayed, 1, at[0]),
        DeliveryRow { key: None, ..state(State::Pending, 2, at[2]) },
        state(State::Processing, 3, at[1]),
    ];
    let shuffled = vec![rows[2].clone(), rows[0].clone(), rows[3].clone(), rows[1].clone()];
    ensure!(first.settle(LaneWrite { put: shuffled, ..write(lane, epoch, at[3]) }).await?, "could not settle");
    let second = join(fixture).await?;
    fixture.kill(first.store).await;
    let epoch = second.take(lane, TakeCause::Lock).await?;
    let loaded = second.load(lane, epoch).await?.deliveries;
    ensure!(loaded == rows, "{rows:?} were put, {loaded:?} loaded");
    Ok(())
}

async fn requeue_and_skip_raise_the_revision<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 2)).await?;
    let dead = |position, arrival| DeliveryRow { state: State::Dead, attempts: 8, ..delivery(position, arrival) };
    let put = vec![dead(at[0], 0), dead(at[1], 1)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let operator = fixture.operator().await?;
    let ids: Vec<Uuid> = member.store.fetch(&at).await?.iter().map(|event| event.id).collect();
    let revision = member.lane(lane).await?.revision;
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::Event(ids[0]), limit: 10 };
    operator.change(&requeue, true).await?;
    ensure!(member.lane(lane).await?.revision == revision, "a dry run raised the revision");
    let changed = operator.change(&requeue, false).await?;
    ensure!(changed.count == 1 && changed.events == ids[..1], "the requeue says {changed:?}");
    let requeued = member.lane(lane).await?;
    ensure!(requeued.revision > revision, "the requeue did not raise the revision");
    ensure!(requeued.epoch == epoch, "the requeue raised the epoch");
    let row = &member.load(lane, epoch).await?.deliveries[0];
    ensure!(row.attempts == 0 && row.state != State::Dead, "it was not requeued: {row:?}");
    let skip = Change::Skip { subscription: "s".into(), event: ids[1], reason: "suite".into() };
    operator.change(&skip, false).await?;
    let skipped = member.lane(lane).await?;
    ensure!(skipped.revision > requeued.revision, "the skip did not raise the revision");
    let left: Vec<_> = member.load(lane, epoch).await?.deliveries.iter().map(|row| row.position).collect();
    ensure!(left == [at[0]], "{left:?} are left after the skip");
    let books = operator.books().await?;
    ensure!(books.lanes.iter().any(|book| book.skipped.contains(at[1])), "the skip is not in the books");
    Ok(())
}

async fn an_attempt_in_flight_does_not_overwrite_a_requeue<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let put = vec![delivery(at[0], 0), delivery(at[1], 1)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[1]) }).await?, "could not settle");
    let loaded = member.load(lane, epoch).await?.revision;
    let operator = fixture.operator().await?;
    let id = member.store.fetch(&at[..1]).await?[0].id;
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::Event(id), limit: 10 };
    operator.change(&requeue, false).await?;

    // The attempt that was under way ends meanwhile; its lane was loaded before.
    let died = |row: DeliveryRow| (DeliveryRow { state: State::Dead, attempts: 9, ..row }, None);
    let late = LaneWrite {
        revision: loaded,
        put: vec![delivery(at[0], 0), delivery(at[2], 2)],
        change: vec![died(delivery(at[0], 0)), died(delivery(at[2], 2))],
        finish: vec![at[1]],
        ..write(lane, epoch, at[2])
    };
    ensure!(member.settle(late.clone()).await?, "could not settle");
    let state = member.load(lane, epoch).await?;
    let rows: Vec<_> = state.deliveries.iter().map(|row| (row.position, row.state, row.attempts)).collect();
    let expected = [(at[0], State::Pending, 0), (at[2], State::Dead, 9)];
    ensure!(rows == expected, "{rows:?} after a late settlement, and not {expected:?}");
    ensure!(state.cursor.floor == at[2], "the cursor was not written");
    let again = LaneWrite { revision: state.revision, put: Vec::new(), finish: Vec::new(), ..late };
    ensure!(member.settle(again).await?, "could not settle");
    let row = &member.load(lane, epoch).await?.deliveries[0];
    ensure!(row.state == State::Dead, "loaded again, the owner's change was not written: {row:?}");
    Ok(())
}

async fn a_pause_is_seen<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let operator = fixture.operator().await?;
    for (change, paused) in [(Change::pause("s"), true), (Change::Resume("s".into()), false)] {
        operator.change(&change, false).await?;
        let seen = member.fleet().await?.subscriptions.iter().find(|view| view.name == "s").map(|view| view.paused);
        ensure!(seen == Some(paused), "after {change:?} paused is {seen:?}");
    }
    operator.change(&Change::pause("s"), false).await?;
    let again = join(fixture).await?;
    ensure!(again.joined.subscriptions[0].paused, "a new instance does not learn of the pause");
    let unknown = operator.change(&Change::pause("unknown"), false).await.err().map(|error| error.kind());
    ensure!(unknown == Some(ErrorKind::NotFound), "pausing what is not there: {unknown:?}");
    Ok(())
}

async fn a_pause_says_who_and_why_until_it_is_resumed<F: Fixture>(fixture: &F) -> Outcome {
    use PausedBy::{Operator, Receiver};
    join(fixture).await?;
    let operator = fixture.operator().await?;
    let pause = |by, reason: Option<&str>| Change::Pause {
        subscription: "s".into(),
        by,
        reason: reason.map(ToOwned::to_owned),
    };
    let long = "é".repeat(ERROR_BYTES_MAX);
    let steps = [
        (pause(Receiver, Some("410\0 Gone")), Some(Receiver), Some("410\u{fffd} Gone"), 1),
        (pause(Receiver, Some("said again")), Some(Receiver), Some("410\u{fffd} Gone"), 0),
        (pause(Operator, None), Some(Operator), Some("410\u{fffd} Gone"), 0),
        (pause(Operator, Some("moving")), Some(Operator), Some("moving"), 0),
        (pause(Receiver, Some("gone")), Some(Operator), Some("moving"), 0),
        (Change::Resume("s".into()), None, None, 1),
        (pause(Operator, None), Some(Operator), None, 1),
        (pause(Operator, Some(&long)), Some(Operator), Some(&long[..ERROR_BYTES_MAX]), 0),
    ];
    for (change, by, reason, count) in steps {
        let changed = operator.change(&change, false).await?.count;
        let status = operator.status().await?.subscriptions.remove(0);
        let seen = (status.paused, status.paused_by, status.paused_reason.as_deref(), changed);
        let expected = (by.is_some(), by, reason, count);
        ensure!(seen == expected, "after {change:?} {seen:?}, and not {expected:?}");
    }
    Ok(())
}

async fn a_rewind_raises_epochs_and_forgets_what_lies_above<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 4)).await?;
    let put = vec![delivery(at[0], 0), delivery(at[2], 1)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[3]) }).await?, "could not settle");
    let rewind = Change::Rewind { subscription: "s".into(), to: Start::Position(at[1]), key: None };
    fixture.operator().await?.change(&rewind, false).await?;
    let view = member.lane(lane).await?;
    ensure!(view.epoch > epoch, "the rewind did not raise the epoch");
    ensure!(!member.settle(write(lane, epoch, at[3])).await?, "a settlement from before the rewind was written");
    let epoch = member.take(lane, TakeCause::Free).await?;
    let state = member.load(lane, epoch).await?;
    let floor = state.cursor.floor;
    ensure!(floor <= at[1], "the floor is {floor} after a rewind to {}", at[1]);
    ensure!(!at[2..].iter().any(|above| state.cursor.settled.contains(*above)), "settled: {:?}", state.cursor.settled);
    ensure!(state.takeovers == 0, "taking one's own lane counts as seized");
    Ok(())
}

async fn a_repeated_settlement_does_not_bring_a_skipped_delivery_back<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(vec![event("a", 0).key(first_lane_key()), event("a", 1).key(first_lane_key())]).await?;
    let id = member.store.fetch(&at[..1]).await?[0].id;
    let unanswered = LaneWrite { put: vec![delivery(at[0], 0)], ..write(lane, epoch, at[0]) };
    ensure!(member.settle(unanswered.clone()).await?, "could not settle");
    let skip = Change::Skip { subscription: "s".into(), event: id, reason: "test".into() };
    fixture.operator().await?.change(&skip, false).await?;
    let again = LaneWrite { put: vec![delivery(at[0], 0), delivery(at[1], 1)], ..write(lane, epoch, at[1]) };
    ensure!(member.settle(again).await?, "could not settle again");
    let rows: Vec<Position> = member.load(lane, epoch).await?.deliveries.iter().map(|row| row.position).collect();
    ensure!(rows == [at[1]], "the deliveries are {rows:?} after event {} was skipped", at[0]);
    Ok(())
}

async fn an_attempt_that_an_operator_came_before_is_not_announced<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(vec![event("a", 0).key(first_lane_key())]).await?;
    let id = member.store.fetch(&at).await?[0].id;
    let put = vec![delivery(at[0], 0)];
    ensure!(member.settle(LaneWrite { put, ..write(lane, epoch, at[0]) }).await?, "could not settle");
    let requeue = Change::Requeue { subscription: "s".into(), which: Selection::Event(id), limit: 1 };
    fixture.operator().await?.change(&requeue, false).await?;
    let announced = DeliveryRow { state: State::Processing, attempts: 1, ..delivery(at[0], 0) };
    let announcement = LaneWrite { change: vec![(announced, None)], ..write(lane, epoch, at[0]) };
    ensure!(!member.settle(announcement.clone()).await?, "an attempt may begin that was not counted");
    let state = member.load(lane, epoch).await?;
    let attempts: Vec<u32> = state.deliveries.iter().map(|row| row.attempts).collect();
    ensure!(attempts == [0], "something of it was written: {attempts:?} attempts");
    let announcement = LaneWrite { revision: state.revision, ..announcement };
    ensure!(member.settle(announcement).await?, "it cannot be announced with the revision of now");
    let attempts: Vec<u32> = member.load(lane, epoch).await?.deliveries.iter().map(|row| row.attempts).collect();
    ensure!(attempts == [1], "{attempts:?} attempts were counted");
    Ok(())
}

async fn a_lane_that_is_not_there_settles_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let gone = LaneRef { lane: 77, ..lane };
    let queue = vec![pillarbox::store::Queued { delivery: delivery(at[0], 0), claim: None, error: None }];
    let writes = vec![write(lane, epoch, at[0]), LaneWrite { queue, ..write(gone, epoch, at[0]) }];
    let answers = member.store.settle(&Settlement { lanes: writes, closed: RangeSet::new() }).await?;
    ensure!(answers == [true, false], "answered {answers:?}");
    Ok(())
}

async fn another_join_keeps_the_lanes_and_takes_the_newest_filter<F: Fixture>(fixture: &F) -> Outcome {
    let first = join(fixture).await?;
    ensure!(first.joined.subscriptions[0].created, "the first join did not create the subscription");
    let wish = Subscription { lanes: 5, filter: topics("a"), ..subscription() };
    let second = join_with(fixture, wish).await?;
    let view = &second.joined.subscriptions[0];
    ensure!(view.id == first.joined.subscriptions[0].id, "the second join made another subscription");
    ensure!(!view.created && view.lanes == 2, "created: {}, lanes: {}", view.created, view.lanes);
    ensure!(view.definition.filter == topics("a"), "the filter is {:?}", view.definition.filter);
    let fleet = first.fleet().await?;
    ensure!(fleet.lanes.len() == 2, "there are {} lanes", fleet.lanes.len());
    let seen = fleet.subscriptions.iter().find(|view| view.name == "s").map(|view| &view.definition.filter);
    ensure!(seen == Some(&topics("a")), "the first instance sees the filter {seen:?}");
    Ok(())
}

async fn joining_again_is_a_new_instance_and_the_end_of_the_old_one<F: Fixture>(fixture: &F) -> Outcome {
    let (mut first, lane, _) = owner(fixture).await?;
    let second = join(fixture).await?;
    let old = first.joined.instance;
    first.joined = first.store.join(Hello { rejoin: true, ..hello(subscription()) }).await?;
    ensure!(first.joined.instance != old, "it joined again under the number that it had");
    let fleet = second.fleet().await?;
    let new = fleet.instances.iter().find(|view| view.id == first.joined.instance);
    ensure!(new.is_some_and(|view| view.lock != Lock::Free), "the new instance does not live: {new:?}");
    let owner = fleet.lanes.iter().find(|view| view.lane == lane).and_then(|view| view.owner);
    let living = |view: &&pillarbox::store::InstanceView| Some(view.id) == owner && view.lock != Lock::Free;
    let alive = fleet.instances.iter().find(living);
    ensure!(alive.is_none(), "the lane belongs to an instance that seems to live: {alive:?}");
    let epoch = first.take(lane, TakeCause::Lock).await?;
    ensure!(first.settle(write(lane, epoch, 0)).await?, "could not settle as the new instance");
    first.store.leave().await?;
    ensure!(second.lane(lane).await?.owner.is_none(), "the new instance left and still owns a lane");
    Ok(())
}

async fn joining_again_brings_no_old_definition_back<F: Fixture>(fixture: &F) -> Outcome {
    let old = Subscription { filter: topics("old"), ..subscription() };
    let first = join_with(fixture, old.clone()).await?;
    let newer = join_with(fixture, Subscription { filter: topics("new"), ..subscription() }).await?;
    let again = first.store.join(Hello { rejoin: true, ..hello(old) }).await?;
    let view = &again.subscriptions[0];
    ensure!(view.definition.filter == topics("new") && !view.created, "whoever joins again is told {view:?}");
    let fleet = newer.fleet().await?;
    let seen = fleet.subscriptions.iter().find(|view| view.name == "s").map(|view| &view.definition.filter);
    ensure!(seen == Some(&topics("new")), "the newest started instance's filter became {seen:?}");
    let other = Subscription { name: "t".into(), ..subscription() };
    let created = first.store.join(Hello { rejoin: true, ..hello(other) }).await?;
    ensure!(created.subscriptions[0].created, "what is not there was not made");
    Ok(())
}

async fn a_buried_instance_is_told_that_it_has_ended<F: Fixture>(fixture: &F) -> Outcome {
    let (mut member, lane, epoch) = owner(fixture).await?;
    fixture.bury(member.joined.instance).await;
    let kind = member.fleet().await.err().map(|error| error.kind());
    ensure!(kind == Some(ErrorKind::Ended), "a buried instance looked at the fleet: {kind:?}");
    let take = [Take { lane, expected: epoch, cause: TakeCause::Free, beat: None }];
    let kind = member.store.take(&take).await.err().map(|error| error.kind());
    ensure!(kind == Some(ErrorKind::Ended), "a buried instance took a lane: {kind:?}");
    member.joined = member.store.join(Hello { rejoin: true, ..hello(subscription()) }).await?;
    let epoch = member.take(lane, TakeCause::Lock).await?;
    ensure!(member.settle(write(lane, epoch, 0)).await?, "could not settle after joining again");
    Ok(())
}

/// The positions that a lane of a new subscription has not settled.
async fn unsettled<S: Store>(member: &Member<S>, published: &[Position]) -> Tried<Vec<Position>> {
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    let cursor = member.load(lane, epoch).await?.cursor;
    let open = |position: &Position| *position > cursor.floor && !cursor.settled.contains(*position);
    Ok(published.iter().copied().filter(open).collect())
}

async fn starting_now_leaves_out_what_is_there<F: Fixture>(fixture: &F) -> Outcome {
    let before = fixture.publish(events("a", 3)).await?;
    let now = join_with(fixture, Subscription { start: Start::Now, ..subscription() }).await?;
    let after = fixture.publish(events("a", 2)).await?;
    let open = unsettled(&now, &[before.clone(), after.clone()].concat()).await?;
    ensure!(open == after, "published {before:?}, joined, published {after:?}: {open:?} are to be delivered");
    let beginning = join_with(fixture, Subscription { name: "t".into(), ..subscription() }).await?;
    let all = [before, after].concat();
    let open = unsettled(&beginning, &all).await?;
    ensure!(open == all, "from the beginning only {open:?} of {all:?} are to be delivered");
    Ok(())
}

async fn starting_at_a_position_leaves_out_what_is_below<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(events("a", 4)).await?;
    let start = Start::Position(at[1]);
    let member = join_with(fixture, Subscription { start, ..subscription() }).await?;
    let open = unsettled(&member, &at).await?;
    ensure!(open == at[2..], "above {} only {open:?} of {at:?} are to be delivered", at[1]);
    Ok(())
}

async fn what_lies_before_the_start_is_in_the_books_until_a_rewind<F: Fixture>(fixture: &F) -> Outcome {
    let at = fixture.publish(events("a", 4)).await?;
    let member = join_with(fixture, Subscription { start: Start::Position(at[2]), ..subscription() }).await?;
    let ids: Vec<Uuid> = member.store.fetch(&at).await?.iter().map(|event| event.id).collect();
    let operator = fixture.operator().await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    ensure!(member.settle(write(lane, epoch, at[3])).await?, "could not settle");
    for (to, before) in [(None, &at[..3]), (Some(at[0]), &at[..1])] {
        if let Some(to) = to {
            let rewind = Change::Rewind { subscription: "s".into(), to: Start::Position(to), key: None };
            operator.change(&rewind, false).await?;
        }
        let books = operator.books().await?;
        for (position, id) in at.iter().zip(&ids) {
            let expected = before.contains(position);
            let book = |lane: &pillarbox::admin::LaneBook| lane.before_start.contains(*position) == expected;
            ensure!(books.lanes.iter().all(book), "rewound to {to:?}, {position} of {at:?}: {:?}", books.lanes);
            let fate = operator.show(*id).await?.and_then(|mut record| record.subscriptions.pop());
            let fate = fate.ok_or("the event is not shown")?;
            ensure!(fate.before_start == expected, "rewound to {to:?}, {position} of {at:?}: {fate:?}");
        }
    }
    Ok(())
}

async fn dead_for_how_long_counts_from_the_death<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 1)).await?;
    let operator = fixture.operator().await?;
    // Of long ago, so that whatever counts from the first failure would call it old.
    let row = delivery(at[0], 0);
    let policy = PrunePolicy { keep: None, dead: Some(Duration::from_secs(3600)), ..PrunePolicy::default() };
    ensure!(
        member.settle(LaneWrite { put: vec![row.clone()], ..write(lane, epoch, at[0]) }).await?,
        "could not settle"
    );
    for _ in 0..2 {
        let change = vec![(DeliveryRow { state: State::Dead, ..row.clone() }, None)];
        ensure!(member.settle(LaneWrite { change, ..write(lane, epoch, at[0]) }).await?, "could not settle");
        let pruned = operator.prune(&policy).await?;
        ensure!(pruned.dead == 0, "it died just now and was removed");
    }
    Ok(())
}

async fn instances_have_numbers_of_their_own<F: Fixture>(fixture: &F) -> Outcome {
    let first = join(fixture).await?;
    let log_id = first.joined.log_id;
    let mut seen = vec![first.joined.instance];
    first.store.leave().await?;
    for _ in 0..3 {
        let next = join(fixture).await?;
        ensure!(!seen.contains(&next.joined.instance), "{:?} was used before", next.joined.instance);
        ensure!(next.joined.log_id == log_id, "the log has two identities");
        seen.push(next.joined.instance);
        next.store.leave().await?;
    }
    Ok(())
}

async fn dead_positions_are_in_the_books<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    // A position must have been handed out before it can be dead.
    fixture.publish(events("a", 9)).await?;
    let dead: RangeSet = "5,7-9".parse()?;
    for part in dead.iter() {
        let settlement = Settlement { lanes: vec![write(lane, epoch, 0)], closed: [part].into_iter().collect() };
        member.store.settle(&settlement).await?;
    }
    let books = fixture.operator().await?.books().await?;
    ensure!(books.closed == dead, "the books have {:?} as closed", books.closed);
    Ok(())
}

async fn the_books_say_what_settlements_covered<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 6)).await?;
    let mut cursor = Cursor { floor: at[1], settled: set(&at[3..4]), anchor: None };
    ensure!(member.settle(LaneWrite { cursor: cursor.clone(), ..write(lane, epoch, 0) }).await?, "could not settle");
    cursor.settled = set(&at[3..5]);
    let put = vec![delivery(at[4], 0)];
    ensure!(member.settle(LaneWrite { cursor, put, ..write(lane, epoch, 0) }).await?, "could not settle");
    let books = fixture.operator().await?.books().await?;
    let book = books.lanes.iter().find(|book| book.subscription == "s" && book.lane == 0);
    let book = book.ok_or("the lane has no book")?;
    ensure!(books.lanes.len() == 2 && book.lanes == 2, "two lanes have {} books", books.lanes.len());
    ensure!(book.floor == at[1] && book.settled == set(&at[3..5]), "the book has another cursor: {book:?}");
    let accounted = |position| book.covered.contains(position) || book.deliveries.contains(position);
    let covered: Vec<_> = at.iter().copied().filter(|position| accounted(*position)).collect();
    let expected = [&at[..2], &at[3..5]].concat();
    ensure!(covered == expected, "settled were {expected:?}, the book accounts for {covered:?}");
    ensure!(book.before_start.is_empty(), "from the beginning, and {:?} lay before the start", book.before_start);
    ensure!(book.deliveries == set(&at[4..5]), "the book has {:?} as deliveries", book.deliveries);
    Ok(())
}

async fn a_wait_notices_what_was_committed_before_it<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    member.poll_from(0).await?;
    fixture.publish(events("a", 1)).await?;
    let wake = member.store.wait(AT_ONCE).await?;
    ensure!(wake != Wake::Timeout, "an event committed before the wait was not noticed");
    Ok(())
}

async fn a_wait_is_ended_by_a_commit<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let wait = async {
        // What happened before may ring too; only a wait that the new event ended counts.
        for _ in 0..LIMIT {
            let wake = member.store.wait(AT_ONCE).await?;
            let (_, scan) = member.poll_from(0).await?;
            if wake == Wake::Timeout || !scan.events.is_empty() {
                return Ok(wake);
            }
        }
        pillarbox::Result::<Wake>::Ok(Wake::Timeout)
    };
    let publish = async {
        tokio::task::yield_now().await;
        fixture.publish(events("a", 1)).await
    };
    let (wake, published) = tokio::join!(wait, publish);
    published?;
    ensure!(wake? != Wake::Timeout, "a commit did not end the wait");
    Ok(())
}

async fn a_wait_ends_in_time<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    member.poll_from(0).await?;
    let wait = member.store.wait(Duration::from_millis(1));
    ensure!(tokio::time::timeout(AT_ONCE, wait).await.is_ok(), "a wait of 1 ms took more than {AT_ONCE:?}");
    Ok(())
}

async fn a_late_commit_is_shown_by_a_later_scan<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let late = fixture.begin().await;
    let hole = fixture.insert(late, event("a", 0)).await;
    let at = fixture.publish(events("a", 2)).await?;
    let (page, scan) = member.poll_from(0).await?;
    ensure!(positions(&scan.events) == at, "{at:?} are committed, {:?} read", positions(&scan.events));
    ensure!(page.horizon >= hole, "the horizon {} leaves out the open position {hole}", page.horizon);
    ensure!(member.store.fetch(&[hole]).await?.is_empty(), "an open transaction's event was fetched");
    fixture.commit(late).await;
    let (_, scan) = poll(&member.store, hole - 1, hole, &[Filter::default()]).await?;
    ensure!(positions(&scan.events) == [hole], "the late commit at {hole} is not shown: {scan:?}");
    Ok(())
}

async fn an_aborted_event_is_never_shown<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let open = fixture.begin().await;
    let hole = fixture.insert(open, event("a", 0)).await;
    let at = fixture.publish(events("a", 1)).await?;
    fixture.abort(open).await;
    let (page, scan) = member.poll_from(0).await?;
    ensure!(positions(&scan.events) == at && scan.visible == set(&at), "read {:?} with {hole} aborted", scan.visible);
    ensure!(writers(&page).is_empty(), "nobody writes, and {:?} are named", writers(&page));
    let again = fixture.publish(events("a", 1)).await?;
    ensure!(again[0] > at[0], "position {} was drawn after {}", again[0], at[0]);
    Ok(())
}

fn writers(page: &Page) -> &[Writer] {
    page.writers.as_deref().expect("a poll that asks for the writers names them")
}

async fn a_writer_is_named_until_its_rows_are_visible<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let (first, second) = (fixture.begin().await, fixture.begin().await);
    let hole = fixture.insert(first, event("a", 0)).await;
    let (one, _) = member.poll_from(0).await?;
    ensure!(writers(&one).len() == 1, "one transaction writes, named are {:?}", writers(&one));
    fixture.insert(second, event("a", 1)).await;
    let (two, _) = member.poll_from(0).await?;
    let kept = writers(&two).contains(&writers(&one)[0]);
    ensure!(writers(&two).len() == 2 && kept, "{:?} became {:?} when another began", writers(&one), writers(&two));
    fixture.commit(first).await;
    let (left, scan) = member.poll_from(0).await?;
    ensure!(scan.visible.contains(hole), "the rows of a writer that is gone are not visible");
    ensure!(!writers(&left).contains(&writers(&one)[0]), "a writer is named after its commit");
    ensure!(writers(&left).len() == 1, "the other one is not named any more");
    fixture.abort(second).await;
    ensure!(writers(&member.poll_from(0).await?.0).is_empty(), "a writer is named after its abort");
    Ok(())
}

async fn starting_now_includes_what_commits_later<F: Fixture>(fixture: &F) -> Outcome {
    let late = fixture.begin().await;
    let hole = fixture.insert(late, event("a", 0)).await;
    let visible = fixture.publish(events("a", 2)).await?;
    let member = join_with(fixture, Subscription { start: Start::Now, ..subscription() }).await?;
    fixture.commit(late).await;
    let after = fixture.publish(events("a", 1)).await?;
    let open = unsettled(&member, &[vec![hole], visible, after.clone()].concat()).await?;
    ensure!(open == [hole, after[0]], "{hole} and {after:?} were committed after the start, {open:?} are to come");
    Ok(())
}

/// The heart of reading without loss, tried at every step of a poll: if a poll names no writer, then what it does not
/// show up to its horizon never appears; if it names some, then not once they are all gone.
async fn what_one_poll_does_not_show_and_no_writer_holds_never_appears<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    for steps in 1..=3 {
        for begun in [false, true] {
            for ending in [false, true] {
                check_grace(fixture, &member, steps, begun, ending).await.map_err(|how| {
                    format!("after {steps} steps (inserted before: {begun}, committed: {ending}): {how}")
                })?;
            }
        }
    }
    Ok(())
}

async fn check_grace<F: Fixture>(
    fixture: &F,
    member: &Member<F::Store>,
    steps: usize,
    begun: bool,
    ending: bool,
) -> Outcome {
    let transaction = fixture.begin().await;
    let hole = if begun { Some(fixture.insert(transaction, event("a", 0)).await) } else { None };
    let action = match (begun, ending) {
        (true, true) => DuringPoll::Commit(transaction),
        (true, false) => DuringPoll::Show(transaction),
        (false, _) => DuringPoll::Insert(transaction, Box::new(event("a", 0))),
    };
    fixture.during_poll(steps, action);
    let (page, scan) = member.poll_from(0).await?;
    let (second, again) = member.poll_from(0).await?;
    if !(begun && ending) {
        fixture.commit(transaction).await;
    }
    let (_, finally) = member.poll_from(0).await?;
    let appeared = |shown: &RangeSet, horizon| {
        let mut late = finally.visible.within(1, horizon);
        late.subtract(shown);
        late
    };
    if writers(&page).is_empty() {
        let late = appeared(&scan.visible, page.horizon);
        ensure!(late.is_empty(), "no writer was named, and {late:?} appeared below the horizon {}", page.horizon);
    }
    if writers(&second).iter().all(|writer| !writers(&page).contains(writer)) {
        let late = appeared(&again.visible, page.horizon);
        ensure!(late.is_empty(), "every writer had gone, and {late:?} appeared below the horizon {}", page.horizon);
    }
    let all = hole.is_none_or(|hole| finally.visible.contains(hole));
    ensure!(all, "a committed event is not visible");
    Ok(())
}

async fn what_was_polled_survives_a_power_loss<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let (_, scan) = member.poll_from(0).await?;
    ensure!(positions(&scan.events) == at, "{at:?} were published, {:?} read", scan.visible);
    fixture.power_loss();
    drop(member);
    let after = join(fixture).await?;
    let (_, again) = after.poll_from(0).await?;
    ensure!(again.events == scan.events, "{:?} were read, {:?} survived", scan.visible, again.visible);
    let next = fixture.publish(events("a", 1)).await?;
    ensure!(next[0] > at[2], "position {} was drawn again", next[0]);
    Ok(())
}

async fn a_settlement_that_fails_is_whole_or_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let (member, lane, epoch) = owner(fixture).await?;
    let at = fixture.publish(events("a", 3)).await?;
    let put = LaneWrite { put: vec![delivery(at[0], 0)], ..write(lane, epoch, at[0]) };
    ensure!(member.settle(put).await?, "could not settle");
    fixture.fail_next_settle();
    let failing = LaneWrite { put: vec![delivery(at[1], 1)], finish: vec![at[0]], ..write(lane, epoch, at[2]) };
    ensure!(member.settle(failing).await.is_err(), "the settlement did not fail");
    let state = member.load(lane, epoch).await?;
    let rows: Vec<_> = state.deliveries.iter().map(|row| row.position).collect();
    let found = (state.cursor.floor, rows);
    let whole = found == (at[2], vec![at[1]]);
    let nothing = found == (at[0], vec![at[0]]);
    ensure!(whole || nothing, "half of it was written: floor and deliveries are {found:?}");
    Ok(())
}
