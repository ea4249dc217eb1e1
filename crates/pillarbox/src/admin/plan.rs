//! What an operator's change does, decided without IO.
//!
//! A store carries out a [`Change`] in one transaction: it locks what [`Change::subject`] names, reads a [`Snapshot`], looks up what
//! [`Change::lookup`] asks for, calls [`plan()`], applies the [`Edit`]s in their order and answers with [`Plan::answer`]. Each edit
//! that moves a lane carries the epoch that the plan was made for.
use std::collections::BTreeSet;
use std::time::Duration;

use uuid::Uuid;

use super::snapshot::{InstanceRow, LaneLedger, LaneRow, Snapshot, SubscriptionRow};
use crate::{
    Change, Changed, Epoch, Error, ErrorKind, FormerFilters, InstanceId, KeyHash, LANES_MAX, Pause, Position, RangeSet,
    Result, Selection, Start, State, Subscription, SubscriptionId, counted,
};

/// What a store looks up for a change, beside the snapshot.
#[derive(Debug, Clone, PartialEq)]
pub enum Lookup<'a> {
    /// Nothing; [`Facts::Nothing`] answers it.
    Nothing,
    /// Deliveries of the subscription, in log order; [`Facts::Deliveries`] answers it.
    Deliveries {
        /// Those of one event in any state, or dead ones.
        which: Selection,
        /// At most this many.
        limit: usize,
    },
    /// What a rewind concerns; [`Facts::Rewind`] answers it.
    Rewind {
        /// Where to.
        to: Start,
        /// Only this key.
        key: Option<&'a str>,
    },
    /// What the lanes of the subscription have recorded; [`Facts::Ledger`] answers it.
    Ledger,
}

/// What a store has found for a [`Lookup`].
#[derive(Debug)]
pub enum Facts {
    /// Nothing was asked for.
    Nothing,
    /// Deliveries of the subscription.
    Deliveries {
        /// The event that is asked for, if the log has it.
        event: Option<Uuid>,
        /// Its deliveries, or the dead ones.
        targets: Vec<Target>,
        /// If the event has one delivery: the event of its key that the delivery waits for, as in [`DeliveryRecord::head`](crate::DeliveryRecord::head).
        head: Option<(Uuid, Position, State)>,
    },
    /// What a rewind concerns.
    Rewind {
        /// Where it goes to.
        place: Place,
        /// The deliveries above [`Place::kept`] whose events are not in the log but kept aside; delayed ones left out.
        kept: Vec<Target>,
        /// The events of the key above [`Place::position`]; none if the rewind concerns all keys.
        events: Vec<KeyEvent>,
        /// The filters by which the events of the subscription were judged before.
        former_filters: FormerFilters,
    },
    /// What the lanes have recorded.
    Ledger {
        /// One entry per lane.
        lanes: Vec<LaneLedger>,
        /// Whether a delivery of the subscription is claimed.
        is_claimed: bool,
    },
}

/// A delivery that a change concerns.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Its position.
    pub position: Position,
    /// Its lane.
    pub lane: u32,
    /// The event.
    pub id: Uuid,
    /// The event's key.
    pub key: Option<String>,
}

/// An event of a key that is rewound.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyEvent {
    /// Its position.
    pub position: Position,
    /// Its id.
    pub id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its type.
    pub r#type: String,
    /// Whether the subscription has a delivery of it.
    pub has_delivery: bool,
}

/// Where a rewind goes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// Everything up to here is not replayed.
    pub floor: Position,
    /// Nor is this, above the floor: between the two lie events that may still be committed below the place.
    pub settled: RangeSet,
    /// What was asked for, if retention has left less of the log: only copies that deliveries need lie between the two.
    pub kept: Position,
    note: &'static str,
}

impl Place {
    /// The place that `to` means. `oldest_kept`: the first position of the events that are kept aside and not older than
    /// the time that `to` names, if it names one.
    pub fn new(
        to: Start,
        floor: Position,
        settled: RangeSet,
        oldest_kept: Option<Position>,
        snapshot: &Snapshot,
    ) -> Self {
        let position = settled.last().unwrap_or(floor);
        let is_higher = matches!(to, Start::Position(asked) if asked < position) || to == Start::Beginning;
        let note = match position {
            _ if !is_higher => "",
            position if position > 0 && position == snapshot.fresh_floor => {
                " (what lies before was in this copy of the log when it was declared fresh)"
            }
            _ if to == Start::Beginning => "",
            _ => " (as far back as retention has left the log)",
        };
        let kept = match to {
            Start::Beginning => 0,
            Start::Position(asked) => asked,
            Start::Now => position,
            Start::Time(_) => oldest_kept.map_or(position, |oldest| oldest - 1),
        };
        Place { floor, settled, kept: kept.min(position), note }
    }

    /// The events above it are replayed.
    pub fn position(&self) -> Position {
        self.settled.last().unwrap_or(self.floor)
    }

    /// What a cursor keeps as settled: only what both say. It never moves forward, and what is open stays open.
    fn keep(&self, lane: &LaneRow) -> (Position, RangeSet) {
        let floor = lane.cursor.floor.min(self.floor);
        let mut both = lane.cursor.settled.clone();
        both.insert_range(floor + 1, lane.cursor.floor);
        let mut place = self.settled.clone();
        place.insert_range(floor + 1, self.floor);
        let last = both.last().unwrap_or(floor);
        both.subtract(&place.missing(floor + 1, last));
        (floor, both)
    }

    /// Whether some lane goes back. It does not where the lanes have settled nothing above the place.
    fn replays(&self, row: &SubscriptionRow) -> bool {
        row.lanes.iter().any(|lane| self.keep(lane) != (lane.cursor.floor, lane.cursor.settled.clone()))
    }

    /// All positions that are not replayed.
    fn passed(&self) -> RangeSet {
        let mut passed = self.settled.clone();
        passed.insert_range(1, self.floor);
        passed
    }
}

/// One step of a change, to the subscription that the change names.
#[derive(Debug, Clone, PartialEq)]
pub enum Edit {
    /// These deliveries are due now with attempts 0, and claimed by no instance. In a queue their keys have a new head then.
    MakeDue(Vec<Target>),
    /// These deliveries are removed and recorded as given up. In a queue their keys have a new head then.
    GiveUp {
        /// Which.
        targets: Vec<Target>,
        /// Why; kept.
        reason: String,
    },
    /// The owners of these lanes load their deliveries again: the revision is raised.
    Reload(BTreeSet<u32>),
    /// A lane goes back: its cursor is replaced, its anchor removed, its epoch and revision are raised.
    SetCursor {
        /// The lane.
        lane: u32,
        /// The epoch that the lane must have.
        epoch: Epoch,
        /// The new floor.
        floor: Position,
        /// The new ranges above it.
        settled: RangeSet,
    },
    /// The owner of a lane can settle nothing that it has read: the epoch is raised.
    Fence {
        /// The lane.
        lane: u32,
        /// The epoch that the lane must have.
        epoch: Epoch,
    },
    /// Deliveries above the floor whose events are in the log are removed, since these events are read again, but for `settled`; what
    /// settlements have recorded above the floor is removed. In a queue all keys have a new head then.
    ReadAgain {
        /// The floor.
        floor: Position,
        /// What is not read again above it.
        settled: RangeSet,
    },
    /// These events become deliveries of a lane, due now or at their time, behind all others of the lane; those that have a delivery
    /// get a new place, unless it is delayed. In a queue the key has a new head then.
    Replay {
        /// The lane.
        lane: u32,
        /// The key of all of them.
        key: String,
        /// Their positions, ascending.
        positions: Vec<Position>,
    },
    /// It is no longer recorded that these positions were given up.
    Restore(RangeSet),
    /// Those of these positions that the lane was never to deliver count as covered from this epoch on.
    Account {
        /// The lane.
        lane: u32,
        /// The epoch.
        epoch: Epoch,
        /// The positions.
        positions: RangeSet,
    },
    /// The filters by which events were judged before.
    SetFormerFilters(FormerFilters),
    /// The subscription is paused, or with None runs.
    SetPause(Option<Pause>),
    /// The subscription has another name.
    Rename(String),
    /// The subscription is removed with all that belongs to it; the removed deliveries are counted.
    Delete,
    /// All lanes are replaced. Each delivery moves to its new lane, and keeps its place within its key; moved deliveries are counted.
    Relane {
        /// The number of lanes.
        lanes: u32,
        /// The floor of each.
        floor: Position,
        /// The epoch of each.
        epoch: Epoch,
        /// The revision of each.
        revision: i64,
        /// What each has recorded.
        ledger: LaneLedger,
    },
    /// Claims are taken from their owners; each counts as an attempt with the cause `operator`. The claims are counted.
    Recover {
        /// Only of this subscription.
        subscription: Option<SubscriptionId>,
        /// Only those of this instance.
        instance: Option<InstanceId>,
        /// Only where the owner has given no sign of life for this long, by the database's clock.
        silent_for: Duration,
    },
}

/// What a change does and says.
#[derive(Debug)]
pub struct Plan {
    /// What it does, in this order.
    pub edits: Vec<Edit>,
    answer: Answer,
}

/// What is said once the edits are applied.
#[derive(Debug)]
enum Answer {
    Said(Changed),
    Recovered,
    Deleted { name: String },
    Relaned { name: String, had: usize, lanes: u32 },
}

impl Plan {
    fn new(edits: impl IntoIterator<Item = Edit>, answer: Answer) -> Self {
        Plan { edits: edits.into_iter().collect(), answer }
    }

    /// What people and scripts are told. `count`: how many claims or deliveries those edits concerned that say that they count.
    pub fn answer(self, count: u64) -> Changed {
        match self.answer {
            Answer::Said(changed) => changed,
            Answer::Recovered => Changed { count, events: Vec::new(), message: recovered(count) },
            Answer::Deleted { name } => said(1, format!("'{name}' is deleted, with {}", counted(count, "delivery"))),
            Answer::Relaned { name, had, lanes } => {
                let (now, moved) = (counted(lanes, "lane"), counted(count, "delivery"));
                let resume = format!("resume it with `pillarbox resume {name}`");
                said(lanes.into(), format!("'{name}' has {now} (it had {had}), {moved} moved; {resume}"))
            }
        }
    }
}

impl Change {
    /// The subscription whose lanes no settlement may change between the snapshot and the edits; None: no lane is concerned.
    pub fn subject(&self) -> Option<&str> {
        match self {
            Change::Recover { .. } => None,
            Change::Requeue { subscription, .. }
            | Change::Skip { subscription, .. }
            | Change::Rewind { subscription, .. }
            | Change::Relane { subscription, .. }
            | Change::Pause { subscription, .. }
            | Change::Resume(subscription)
            | Change::Delete(subscription)
            | Change::Rename { from: subscription, .. } => Some(subscription),
        }
    }

    /// What [`plan()`] has to know beside the snapshot.
    pub fn lookup(&self) -> Lookup<'_> {
        match self {
            Change::Requeue { which, limit, .. } => Lookup::Deliveries { which: which.clone(), limit: *limit },
            Change::Skip { event, .. } => Lookup::Deliveries { which: Selection::Event(*event), limit: usize::MAX },
            Change::Rewind { to, key, .. } => Lookup::Rewind { to: *to, key: key.as_deref() },
            Change::Relane { .. } => Lookup::Ledger,
            Change::Recover { .. }
            | Change::Pause { .. }
            | Change::Resume(_)
            | Change::Delete(_)
            | Change::Rename { .. } => Lookup::Nothing,
        }
    }
}

/// What a change does, or why it is refused.
pub fn plan(change: &Change, snapshot: &Snapshot, facts: Facts) -> Result<Plan> {
    let find = |name: &str| snapshot.subscription(name);
    match (change, facts) {
        (Change::Requeue { subscription, which, .. }, Facts::Deliveries { event, targets, head }) => {
            requeue(find(subscription)?, which, event, targets, head)
        }
        (Change::Skip { subscription, event, reason }, Facts::Deliveries { event: found, targets, .. }) => {
            skip(find(subscription)?, *event, found, targets, reason)
        }
        (Change::Rewind { subscription, key: None, .. }, Facts::Rewind { place, kept, former_filters, .. }) => {
            Ok(rewind(find(subscription)?, place, kept, former_filters))
        }
        (
            Change::Rewind { subscription, key: Some(key), .. },
            Facts::Rewind { place, kept, events, former_filters },
        ) => rewind_key(find(subscription)?, key, place, kept, events, former_filters),
        (Change::Relane { subscription, lanes }, Facts::Ledger { lanes: ledgers, is_claimed }) => {
            relane(snapshot, find(subscription)?, *lanes, &ledgers, is_claimed)
        }
        (Change::Recover { subscription, instance, silent_for }, Facts::Nothing) => {
            let subscription = subscription.as_deref().map(find).transpose()?.map(|row| row.id);
            let edit = Edit::Recover { subscription, instance: *instance, silent_for: *silent_for };
            Ok(Plan::new([edit], Answer::Recovered))
        }
        (Change::Pause { subscription, by, reason }, Facts::Nothing) => {
            let row = find(subscription)?;
            let pause = Pause { by: *by, reason: reason.clone() };
            Ok(set_pause(row, Some(pause.over(row.pause.clone()))))
        }
        (Change::Resume(name), Facts::Nothing) => Ok(set_pause(find(name)?, None)),
        (Change::Delete(name), Facts::Nothing) => delete(snapshot, find(name)?),
        (Change::Rename { from, to }, Facts::Nothing) => rename(snapshot, find(from)?, to),
        (change, facts) => {
            Err(Error::new(ErrorKind::Fatal, format!("a store has looked up {facts:?} for {change:?}; this is a bug")))
        }
    }
}

/// The refusal of an event that the log does not have.
pub fn unknown_event(id: Uuid) -> Error {
    let message = format!(
        "the log has no event {id} (it was never committed here, or retention has removed it); look for it with `pillarbox list`"
    );
    Error::new(ErrorKind::NotFound, message)
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn said(count: u64, message: String) -> Changed {
    Changed { count, events: Vec::new(), message }
}

fn recovered(count: u64) -> String {
    match count {
        0 => "nothing to recover: no matching deliveries are in progress".to_owned(),
        1 => "1 delivery was taken from the instance that worked on it; it counts as an attempt".to_owned(),
        _ => format!("{count} deliveries were taken from the instances that worked on them; each counts as an attempt"),
    }
}

fn lanes_of(targets: &[Target]) -> Edit {
    Edit::Reload(targets.iter().map(|target| target.lane).collect())
}

fn ids_of(targets: &[Target]) -> Vec<Uuid> {
    targets.iter().map(|target| target.id).collect()
}

fn requeue(
    row: &SubscriptionRow,
    which: &Selection,
    event: Option<Uuid>,
    targets: Vec<Target>,
    head: Option<(Uuid, Position, State)>,
) -> Result<Plan> {
    let is_one = matches!(which, Selection::Event(_) | Selection::Version(..));
    if targets.is_empty() && is_one {
        return Err(no_delivery(row, which, event, "requeue"));
    }
    let (name, events) = (&row.name, ids_of(&targets));
    let message = match (events.len(), head) {
        (0, _) => format!("nothing to requeue: '{name}' has no dead delivery of that kind"),
        (1, Some((head, position, state))) => format!(
            "1 delivery of '{name}' has attempts back to 0 (it waits for event {head} of its key, at position {position}, which is {})",
            state.name()
        ),
        (1, None) => format!("1 delivery of '{name}' is due now, with attempts back to 0"),
        (count, _) => format!("{count} deliveries of '{name}' are due now, with attempts back to 0"),
    };
    let reload = lanes_of(&targets);
    let changed = Changed { count: events.len() as u64, events, message };
    Ok(Plan::new([Edit::MakeDue(targets), reload], Answer::Said(changed)))
}

/// Why a command about one event has nothing to do.
fn no_delivery(row: &SubscriptionRow, which: &Selection, event: Option<Uuid>, verb: &str) -> Error {
    match (event, which) {
        (Some(id), _) => invalid(format!(
            "nothing to {verb}: event {id} has no delivery of '{}' (it was delivered or skipped, is not wanted, or was not read \
             yet); see `pillarbox why {id}`",
            row.name
        )),
        (None, Selection::Version(stream, version)) => {
            let message = format!(
                "stream '{stream}' has no version {version} in this log; look for it with `pillarbox list --key {stream}`"
            );
            Error::new(ErrorKind::NotFound, message)
        }
        (None, Selection::Event(id)) => unknown_event(*id),
        (None, Selection::Key(_) | Selection::All) => invalid(format!("nothing to {verb}")),
    }
}

fn skip(row: &SubscriptionRow, event: Uuid, found: Option<Uuid>, targets: Vec<Target>, reason: &str) -> Result<Plan> {
    if reason.trim().is_empty() {
        return Err(invalid(
            "a skip needs a reason, which is kept with the event; say why the event is given up".to_owned(),
        ));
    }
    if targets.is_empty() {
        return Err(no_delivery(row, &Selection::Event(event), found, "skip"));
    }
    let message = format!("event {event} is given up for '{}'; its key goes on", row.name);
    let (count, reload) = (targets.len() as u64, lanes_of(&targets));
    let give_up = Edit::GiveUp { targets, reason: reason.to_owned() };
    Ok(Plan::new([give_up, reload], Answer::Said(Changed { count, events: vec![event], message })))
}

fn set_pause(row: &SubscriptionRow, pause: Option<Pause>) -> Plan {
    let state = if pause.is_some() { "paused" } else { "running" };
    let changes = row.pause.is_some() != pause.is_some();
    let was = if changes { "now" } else { "already" };
    let changed = said(u64::from(changes), format!("'{}' is {was} {state}", row.name));
    Plan::new([Edit::SetPause(pause)], Answer::Said(changed))
}

/// Replays everything above the place. The raised epochs make every owner drop what it has in memory. A lane that has not reached the
/// place stays where it is.
fn rewind(row: &SubscriptionRow, place: Place, kept: Vec<Target>, former_filters: FormerFilters) -> Plan {
    let cursor = |lane: &LaneRow| {
        let (floor, settled) = place.keep(lane);
        Edit::SetCursor { lane: lane.lane, epoch: lane.epoch, floor, settled }
    };
    let replays = place.replays(row) || !kept.is_empty();
    let mut edits: Vec<Edit> = row.lanes.iter().map(cursor).collect();
    // What is read again does not have events that are only kept aside.
    edits.push(Edit::MakeDue(kept));
    let position = place.position();
    edits.push(Edit::ReadAgain { floor: place.floor, settled: place.settled.clone() });
    edits.push(Edit::Restore(RangeSet::from_iter([position + 1..=Position::MAX - 1])));
    edits.extend(judge(former_filters, |formers| formers.rewind(&place.passed())));
    let (name, floor, note) = (&row.name, row.floor(), place.note);
    let changed = match replays {
        true => said(row.lanes.len() as u64, format!("'{name}' replays the events above position {position}{note}")),
        false => said(
            0,
            format!(
                "nothing to replay above position {position}{note}: '{name}' has settled nothing there and goes on above position \
                 {floor}, since a rewind never moves forward"
            ),
        ),
    };
    Plan::new(edits, Answer::Said(changed))
}

/// Replays the settled events of one key as a chain of deliveries, with those that have one; what else is not settled comes by itself.
fn rewind_key(
    row: &SubscriptionRow,
    key: &str,
    place: Place,
    kept: Vec<Target>,
    events: Vec<KeyEvent>,
    former_filters: FormerFilters,
) -> Result<Plan> {
    let hash = Some(KeyHash::of(key));
    let lane = row.lane_at(hash, 0).ok_or_else(|| invalid(format!("'{}' has no lanes", row.name)))?;
    // A cursor at its limit does not count all that have a delivery, and one that kept its place would go before what is replayed.
    let is_replayed = |event: &KeyEvent| {
        (lane.has_settled(event.position) || event.has_delivery) && row.filter.matches(&event.topic, &event.r#type)
    };
    let events: Vec<KeyEvent> = events.into_iter().filter(is_replayed).collect();
    // Those that are kept aside stand before all others of their key, as they have arrived before.
    let mut ids = ids_of(&kept);
    ids.extend(events.iter().map(|event| event.id));
    let mut edits = vec![Edit::MakeDue(kept)];
    if !events.is_empty() {
        let positions: Vec<Position> = events.iter().map(|event| event.position).collect();
        let replayed: RangeSet = positions.iter().map(|position| *position..=*position).collect();
        edits.push(Edit::Replay { lane: lane.lane, key: key.to_owned(), positions });
        edits.push(Edit::Restore(replayed.clone()));
        edits.push(Edit::Account { lane: lane.lane, epoch: lane.epoch + 1, positions: replayed });
    }
    edits.extend(judge(former_filters, |formers| {
        events.iter().for_each(|event| formers.replay(hash, event.position, &event.topic, &event.r#type));
    }));
    if !ids.is_empty() {
        edits.push(Edit::Reload(BTreeSet::from([lane.lane])));
        // What the owner puts behind deliveries that it knows would stand before those that it does not know.
        edits.push(Edit::Fence { lane: lane.lane, epoch: lane.epoch });
    }
    let (count, position) = (ids.len() as u64, place.position());
    let (name, replayed, note) = (&row.name, counted(count, "event"), place.note);
    let message = match count {
        0 => format!(
            "nothing to replay above position {position}{note}: '{name}' has settled no event of key '{key}' there"
        ),
        _ => format!("'{name}' replays {replayed} of key '{key}' above position {position}{note}"),
    };
    Ok(Plan::new(edits, Answer::Said(Changed { count, events: ids, message })))
}

/// Changes by which filters events were judged, where there was more than one.
fn judge(former_filters: FormerFilters, change: impl FnOnce(&mut FormerFilters)) -> Option<Edit> {
    let mut formers = former_filters.clone();
    change(&mut formers);
    (formers != former_filters).then_some(Edit::SetFormerFilters(formers))
}

/// Refuses to change what a living instance runs.
fn refuse_run(snapshot: &Snapshot, row: &SubscriptionRow, verb: &str) -> Result<()> {
    match snapshot.runners(row.id).next() {
        None => Ok(()),
        Some(InstanceRow { id, host, pid, .. }) => Err(invalid(format!(
            "'{}' cannot be {verb}: instance {} (pid {pid} on {host}) runs it; stop it, or take it out of its configuration",
            row.name, id.0
        ))),
    }
}

fn delete(snapshot: &Snapshot, row: &SubscriptionRow) -> Result<Plan> {
    refuse_run(snapshot, row, "deleted")?;
    Ok(Plan::new([Edit::Delete], Answer::Deleted { name: row.name.clone() }))
}

fn rename(snapshot: &Snapshot, row: &SubscriptionRow, to: &str) -> Result<Plan> {
    refuse_run(snapshot, row, "renamed")?;
    Subscription::new(to).validate()?;
    if snapshot.subscriptions.iter().any(|other| other.name == to) {
        return Err(invalid(format!("there is a subscription '{to}' already; choose another name")));
    }
    let message = format!("'{}' is now '{to}'; name it so in the configuration before it is started again", row.name);
    Ok(Plan::new([Edit::Rename(to.to_owned())], Answer::Said(said(1, message))))
}

/// Changes the number of lanes. Only where nothing is between the lanes: equal floors, nothing settled above, nothing in flight.
fn relane(
    snapshot: &Snapshot,
    row: &SubscriptionRow,
    lanes: u32,
    ledgers: &[LaneLedger],
    is_claimed: bool,
) -> Result<Plan> {
    if lanes == 0 || lanes > LANES_MAX {
        return Err(invalid(format!("lanes = {lanes} is outside 1 to lanes_max = {LANES_MAX}")));
    }
    if row.lanes.len() == lanes as usize {
        let message = format!("'{}' already has {}", row.name, counted(lanes, "lane"));
        return Ok(Plan::new([], Answer::Said(said(0, message))));
    }
    if let Some(why) = unquiet(snapshot, row, is_claimed) {
        return Err(invalid(format!("the lanes of '{}' cannot be changed now: {why}", row.name)));
    }
    let floor = row.floor();
    let before_start = in_all(ledgers, floor, |ledger| ledger.before_start.clone());
    // What lies before the start of some lanes only was covered by the others.
    let mut covered = in_all(ledgers, floor, |ledger| {
        let mut accounted = ledger.covered.clone();
        accounted.union(&ledger.before_start);
        accounted
    });
    covered.subtract(&before_start);
    let top = |figure: fn(&LaneRow) -> i64| row.lanes.iter().map(figure).max().unwrap_or(0) + 1;
    let edit = Edit::Relane {
        lanes,
        floor,
        epoch: top(|lane| lane.epoch),
        revision: top(|lane| lane.revision),
        ledger: LaneLedger { covered, before_start },
    };
    Ok(Plan::new([edit], Answer::Relaned { name: row.name.clone(), had: row.lanes.len(), lanes }))
}

/// What keeps the lanes of a subscription from being changed.
fn unquiet(snapshot: &Snapshot, row: &SubscriptionRow, is_claimed: bool) -> Option<&'static str> {
    let is_working = |id: InstanceId| {
        let instance = snapshot.instances.iter().find(|instance| instance.alive && instance.id == id);
        let report = instance.and_then(|instance| instance.report.subscriptions.get(&row.name));
        report.is_some_and(|report| report.in_flight > 0)
    };
    if row.pause.is_none() {
        return Some("it is running; pause it first");
    }
    if row.lanes.iter().any(|lane| lane.cursor.floor != row.floor() || !lane.cursor.settled.is_empty()) {
        return Some("its lanes are not at the same place; resume it until it is idle, pause it and try again");
    }
    if row.lanes.iter().filter_map(|lane| lane.owner).any(is_working) {
        return Some("events are still in flight; wait until they are done");
    }
    is_claimed.then_some(
        "deliveries are being worked on; wait until they are done, or take them back with `pillarbox recover`",
    )
}

/// What is in the set of every lane: a gap in one stays a gap.
fn in_all(ledgers: &[LaneLedger], floor: Position, set: impl Fn(&LaneLedger) -> RangeSet) -> RangeSet {
    let mut all = RangeSet::new();
    all.insert_range(1, floor);
    ledgers.iter().for_each(|ledger| all.subtract(&set(ledger).missing(1, floor)));
    all
}

#[cfg(test)]
mod tests;
