//! For those who implement [`Operator`](crate::Operator): what commands look at, and what follows from it whatever the database.
use std::collections::HashMap;
use std::time::Duration;

use uuid::Uuid;

use crate::{
    Books, Cursor, DeliveryRecord, Epoch, Error, ErrorKind, Event, Fate, Filter, FormerFilters, InstanceId,
    InstanceStatus, KeyHash, LaneBook, Mode, OnDead, Pause, Position, RangeSet, RecoveredCount, Report, Result,
    RetryPolicy, SettledBy, State, SubscriptionId, SubscriptionReport, SubscriptionStatus, Timestamp, counted, lane_of,
};

/// What operators' commands read, in one transaction.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// The identity of the log.
    pub log_id: Uuid,
    /// Raised when the log is not the continuation of itself.
    pub incarnation: i64,
    /// The version of the schema.
    pub schema_version: i64,
    /// The time that ages are counted to.
    pub now: Timestamp,
    /// The highest position handed out.
    pub horizon: Position,
    /// The lowest position that retention has left.
    pub log_start: Position,
    /// Retention has been this far; a journal may begin below.
    pub pruned_to: Position,
    /// What lies up to here was in this copy of the log when it was declared fresh; 0: it was not.
    pub fresh_floor: Position,
    /// The shortest time for which every relay keeps events; None: they keep everything.
    pub retention_keep: Option<Duration>,
    /// When claims were last looked through.
    pub recovery_at: Option<Timestamp>,
    /// The subscriptions, in the order of their names.
    pub subscriptions: Vec<SubscriptionRow>,
    /// The instances, in the order of their numbers.
    pub instances: Vec<InstanceRow>,
}

/// A subscription with its lanes.
#[derive(Debug)]
#[allow(missing_docs, reason = "each is the field of the same name of `SubscriptionStatus` or `Subscription`")]
pub struct SubscriptionRow {
    pub id: SubscriptionId,
    pub name: String,
    pub filter: Filter,
    pub definition: i64,
    pub mode: Mode,
    pub on_dead: OnDead,
    pub hold: Option<Duration>,
    pub retry: RetryPolicy,
    pub pause: Option<Pause>,
    pub lanes: Vec<LaneRow>,
}

/// A lane as it is stored.
#[derive(Debug)]
#[allow(missing_docs, reason = "each is the field of the same name of `LaneView`")]
pub struct LaneRow {
    pub lane: u32,
    pub cursor: Cursor,
    pub owner: Option<InstanceId>,
    pub epoch: Epoch,
    pub revision: i64,
}

/// An instance, and whether it lives.
#[derive(Debug)]
#[allow(missing_docs, reason = "each is the field of the same name of `InstanceStatus`")]
pub struct InstanceRow {
    pub id: InstanceId,
    pub host: String,
    pub pid: u32,
    pub version: String,
    pub started_at: Timestamp,
    pub beat_at: Timestamp,
    pub subscriptions: Vec<SubscriptionId>,
    pub report: Report,
    pub alive: bool,
}

/// What is counted of a subscription.
#[derive(Debug, Default)]
pub struct Figures {
    /// Not settled by the cursors and due.
    pub log_pending: u64,
    /// Not settled by the cursors and not due yet.
    pub log_delayed: u64,
    /// Deliveries.
    pub by_state: HashMap<State, u64>,
    /// When the first event was published that the cursors have not settled, also one that is not due yet.
    pub unsettled_since: Option<Timestamp>,
    /// Since when the oldest event waits that is due.
    pub oldest: Option<Timestamp>,
    /// See [`SubscriptionStatus::oldest_due`].
    pub oldest_due: Option<Timestamp>,
    /// Since when the longest-running delivery of the queue is worked on.
    pub processing_since: Option<Timestamp>,
    /// See [`SubscriptionStatus::recovered`].
    pub recovered: Vec<RecoveredCount>,
}

/// A subscription that has used up this share of its hold is about to lose events.
const HOLD_NEARLY_OVER: f64 = 0.8;

/// For how long status speaks of events that a subscription has lost.
pub const LOST_SPOKEN_OF: Duration = Duration::from_secs(86_400);

/// How many of the newest records of what a subscription gave up are looked at for that.
pub const LOST_LOOKED_AT_MAX: i64 = 10_000;

/// What a subscription has lost within [`LOST_SPOKEN_OF`] because its hold was over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Whose.
    pub subscription: String,
    /// How many events.
    pub events: i64,
    /// There may be more than that.
    pub more: bool,
    /// The last of them.
    pub to: Position,
    /// When it was lost.
    pub at: Timestamp,
}

impl Lost {
    /// Says so to people.
    pub fn alarm(&self) -> String {
        let Lost { subscription: name, events, more, to, at } = self;
        let lost = if *more { format!("{events} or more events") } else { counted(*events, "event") };
        format!(
            "subscription '{name}' has lost {lost}, up to position {to}, the last at {at}, because its hold had run out; as long as \
             retention leaves them in the log, `pillarbox rewind {name} --to POSITION` replays them once its hold is longer"
        )
    }
}

/// A time as people say it.
pub fn spoken(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

impl Snapshot {
    /// Says which subscriptions are about to lose events because their hold is nearly over. Deliveries are never lost to a hold, nor
    /// are events that retention keeps.
    pub fn hold_alarms(&self, figures: &HashMap<SubscriptionId, Figures>) -> Vec<String> {
        let alarm = |row: &SubscriptionRow| {
            let keep = self.retention_keep?;
            let (hold, oldest) = (row.hold?.max(keep), figures.get(&row.id)?.unsettled_since?);
            let age = self.now.since(oldest);
            (age > hold.mul_f64(HOLD_NEARLY_OVER)).then(|| {
                format!(
                    "subscription '{}' is about to lose events: its oldest one is {} old and is kept for {} (its hold, or \
                     retention.keep if that is longer); let it catch up, or raise its hold",
                    row.name,
                    spoken(age.as_secs_f64()),
                    spoken(hold.as_secs_f64())
                )
            })
        };
        self.subscriptions.iter().filter_map(alarm).collect()
    }

    /// The subscription of this name, or which there are.
    pub fn subscription(&self, name: &str) -> Result<&SubscriptionRow> {
        let found = self.subscriptions.iter().find(|subscription| subscription.name == name);
        found.ok_or_else(|| unknown_subscription(name, self.subscriptions.iter().map(|one| one.name.as_str())))
    }

    /// Whether a living instance can run the subscription.
    pub fn is_run(&self, id: SubscriptionId) -> bool {
        self.runners(id).next().is_some()
    }

    /// The living instances that can run the subscription.
    pub fn runners(&self, id: SubscriptionId) -> impl Iterator<Item = &InstanceRow> {
        self.instances.iter().filter(move |instance| instance.alive && instance.subscriptions.contains(&id))
    }

    /// Whether this instance lives.
    pub fn is_alive(&self, id: InstanceId) -> bool {
        self.instances.iter().any(|instance| instance.alive && instance.id == id)
    }

    /// What `status` shows of all subscriptions, where an event takes `bytes_each`.
    pub fn subscription_statuses(
        &self,
        figures: &HashMap<SubscriptionId, Figures>,
        bytes_each: i64,
    ) -> Vec<SubscriptionStatus> {
        let none = Figures::default();
        let status = |row| self.subscription_status(row, figures.get(&row.id).unwrap_or(&none), bytes_each);
        self.subscriptions.iter().map(status).collect()
    }

    fn subscription_status(&self, row: &SubscriptionRow, of: &Figures, bytes_each: i64) -> SubscriptionStatus {
        let report = self.report(row);
        // What an owner has in flight is either a row in this state or not settled yet.
        let processing = of.count(State::Processing).max(report.in_flight);
        let in_flight_from_log = processing - of.count(State::Processing);
        let mut owners: Vec<_> = row.lanes.iter().filter_map(|lane| lane.owner).collect();
        let lanes_owned = owners.iter().filter(|owner| self.is_alive(**owner)).count() as u32;
        owners.sort_unstable();
        owners.dedup();
        // Two that nobody runs hold the same back; each is told of it.
        let others = self.subscriptions.iter().filter(|other| other.id != row.id && self.is_run(other.id));
        let held = others.map(SubscriptionRow::floor).min().unwrap_or(self.horizon) - row.floor();
        SubscriptionStatus {
            id: row.id,
            name: row.name.clone(),
            mode: row.mode,
            filter: row.filter.clone(),
            definition: row.definition,
            lanes: row.lanes.len() as u32,
            on_dead: row.on_dead,
            retry: row.retry,
            paused: row.pause.is_some(),
            paused_by: row.pause.as_ref().map(|pause| pause.by),
            paused_reason: row.pause.as_ref().and_then(|pause| pause.reason.clone()),
            orphaned: !self.is_run(row.id),
            pending: (of.log_pending + of.count(State::Pending)).saturating_sub(in_flight_from_log),
            delayed: of.log_delayed + of.count(State::Delayed),
            processing,
            retrying: of.count(State::Retrying),
            blocked: of.count(State::Blocked),
            dead: of.count(State::Dead),
            deliveries: of.by_state.values().sum(),
            oldest_age_seconds: of.oldest.map(|oldest| self.now.since(oldest).as_secs_f64()),
            oldest_due: of.oldest_due,
            lag: (self.horizon - row.floor()).max(0),
            lanes_owned,
            owners,
            floor: row.floor(),
            holds_bytes: held.max(0).saturating_mul(bytes_each),
            oldest_processing_seconds: of.processing_since.map(|since| self.now.since(since).as_secs_f64()),
            recovered: of.recovered.clone(),
            report,
        }
    }

    /// What the living instances say of a subscription, put together.
    fn report(&self, row: &SubscriptionRow) -> SubscriptionReport {
        let mut all = SubscriptionReport::default();
        for report in self.runners(row.id).filter_map(|instance| instance.report.subscriptions.get(&row.name)) {
            all.in_flight += report.in_flight;
            all.delivered += report.delivered;
            all.delivered_at = all.delivered_at.max(report.delivered_at);
            all.breaker = all.breaker.or_else(|| report.breaker.clone());
            all.flood_guard |= report.flood_guard;
            all.stopped = all.stopped.or_else(|| report.stopped.clone());
            all.definition = all.definition.max(report.definition);
            all.differs |= report.differs;
        }
        all
    }

    /// What became of an event for one subscription; None if that has no lanes.
    pub fn fate(&self, row: &SubscriptionRow, event: &Event, recorded: Recorded) -> Option<Fate> {
        let lane = row.lane_at(event.key_hash(), event.position)?;
        let Recorded { former_filters, settled_by, before_start, in_dead_range, delivery, skipped } = recorded;
        Some(Fate {
            subscription: row.name.clone(),
            wanted: former_filters.wants(&row.filter, event).unwrap_or(true),
            passed_under: former_filters.passed_under(event),
            lane: lane.lane,
            owner: lane.owner.map(|owner| (owner, self.is_alive(owner))),
            floor: lane.cursor.floor,
            settled: lane.has_settled(event.position),
            settled_by,
            before_start,
            in_dead_range,
            delivery,
            skipped,
        })
    }

    /// What `audit` goes by.
    pub fn books(&self, mut ledger: Ledger) -> Books {
        let mut lanes = Vec::new();
        let mut former_filters = HashMap::new();
        for row in &self.subscriptions {
            let skipped = ledger.skipped.remove(&row.id).unwrap_or_default();
            for lane in &row.lanes {
                let place = (row.id, lane.lane);
                let deliveries = ledger.deliveries.remove(&place).unwrap_or_default();
                lanes.push(row.book(
                    lane,
                    ledger.lanes.remove(&place).unwrap_or_default(),
                    deliveries,
                    skipped.clone(),
                ));
            }
            former_filters.insert(row.name.clone(), ledger.former_filters.remove(&row.id).unwrap_or_default());
        }
        Books {
            incarnation: self.incarnation,
            log_start: self.log_start,
            pruned_to: self.pruned_to,
            horizon: self.horizon,
            closed: ledger.closed,
            lanes,
            former_filters,
        }
    }

    /// The lanes of all subscriptions.
    pub fn lanes(&self) -> impl Iterator<Item = &LaneRow> {
        self.subscriptions.iter().flat_map(|subscription| &subscription.lanes)
    }

    /// What `status` shows of all instances.
    pub fn instance_statuses(&self) -> Vec<InstanceStatus> {
        let lanes = |id| self.lanes().filter(|lane| lane.owner == Some(id)).count() as u32;
        let status = |instance: &InstanceRow| InstanceStatus {
            id: instance.id,
            host: instance.host.clone(),
            pid: instance.pid,
            version: instance.version.clone(),
            started_at: instance.started_at,
            beat_at: instance.beat_at,
            alive: instance.alive,
            lanes: lanes(instance.id),
            report: instance.report.clone(),
        };
        self.instances.iter().map(status).collect()
    }
}

/// No subscription has this name, only those have theirs.
pub fn unknown_subscription<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Error {
    let names: Vec<&str> = names.into_iter().collect();
    let message = match names.is_empty() {
        true => format!(
            "no subscription is named '{name}', and none exists yet; start a relay, which creates those of its config"
        ),
        false => format!("no subscription is named '{name}'; use one of: {}", names.join(", ")),
    };
    Error::new(ErrorKind::NotFound, message)
}

impl SubscriptionRow {
    /// The lowest floor.
    pub fn floor(&self) -> Position {
        self.lanes.iter().map(|lane| lane.cursor.floor).min().unwrap_or(0)
    }

    /// The lane of an event.
    pub fn lane_of(&self, key: Option<&str>, position: Position) -> Option<&LaneRow> {
        self.lane_at(key.map(KeyHash::of), position)
    }

    pub(super) fn lane_at(&self, key: Option<KeyHash>, position: Position) -> Option<&LaneRow> {
        self.lanes.get(lane_of(key, position, self.lanes.len() as u32) as usize)
    }

    /// What `audit` goes by for a lane. `ledger`: what its settlements say; `skipped`: what was given up of the subscription.
    pub fn book(&self, lane: &LaneRow, ledger: LaneLedger, deliveries: RangeSet, skipped: RangeSet) -> LaneBook {
        let LaneLedger { mut covered, before_start } = ledger;
        // Ranges above the floor are written by settlements alone; they vouch for themselves.
        covered.union(&lane.cursor.settled);
        LaneBook {
            subscription: self.name.clone(),
            filter: self.filter.clone(),
            lanes: self.lanes.len() as u32,
            lane: lane.lane,
            floor: lane.cursor.floor,
            settled: lane.cursor.settled.clone(),
            covered,
            before_start,
            deliveries,
            skipped,
        }
    }
}

/// What a log has recorded, beside what its snapshot shows.
#[derive(Debug, Default)]
pub struct Ledger {
    /// What settlements have recorded, by lane.
    pub lanes: HashMap<(SubscriptionId, u32), LaneLedger>,
    /// The positions of deliveries, by lane.
    pub deliveries: HashMap<(SubscriptionId, u32), RangeSet>,
    /// The positions that were given up.
    pub skipped: HashMap<SubscriptionId, RangeSet>,
    /// The positions that are closed.
    pub closed: RangeSet,
    /// By which filters events were judged before.
    pub former_filters: HashMap<SubscriptionId, FormerFilters>,
}

/// What the settlements of a lane have recorded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LaneLedger {
    /// What they say they covered.
    pub covered: RangeSet,
    /// What the lane was never to deliver.
    pub before_start: RangeSet,
}

/// What a store has recorded of an event for one subscription, beside the cursors.
#[derive(Debug, Default)]
pub struct Recorded {
    /// The filters by which events were judged before.
    pub former_filters: FormerFilters,
    /// See [`Fate::settled_by`].
    pub settled_by: Option<SettledBy>,
    /// See [`Fate::before_start`].
    pub before_start: bool,
    /// See [`Fate::in_dead_range`].
    pub in_dead_range: bool,
    /// See [`Fate::delivery`].
    pub delivery: Option<DeliveryRecord>,
    /// See [`Fate::skipped`].
    pub skipped: Option<(String, Timestamp)>,
}

impl LaneRow {
    /// Whether the cursor counts this position as settled.
    pub fn has_settled(&self, position: Position) -> bool {
        position <= self.cursor.floor || self.cursor.settled.contains(position)
    }
}

impl Figures {
    fn count(&self, state: State) -> u64 {
        self.by_state.get(&state).copied().unwrap_or(0)
    }

    /// Counts an event that is neither settled nor a delivery.
    pub fn take(&mut self, created_at: Timestamp, deliver_at: Option<Timestamp>, now: Timestamp) {
        self.unsettled_since = Some(self.unsettled_since.map_or(created_at, |since| since.min(created_at)));
        if deliver_at.is_some_and(|at| at > now) {
            self.log_delayed += 1;
            return;
        }
        self.log_pending += 1;
        let since = deliver_at.map_or(created_at, |at| at.max(created_at));
        self.oldest = Some(self.oldest.map_or(since, |oldest| oldest.min(since)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(lanes: u32) -> SubscriptionRow {
        let lane = |lane| LaneRow { lane, cursor: Cursor::default(), owner: None, epoch: 1, revision: 1 };
        SubscriptionRow {
            id: SubscriptionId(1),
            name: "s".to_owned(),
            filter: Filter::default(),
            definition: 1,
            mode: Mode::Stream,
            on_dead: OnDead::Block,
            hold: None,
            retry: RetryPolicy::sink(),
            pause: None,
            lanes: (0..lanes).map(lane).collect(),
        }
    }

    #[test]
    fn times_are_short() {
        let said = [0.25, 9.9, 45.0, 600.0, 7200.0, 1e6].map(spoken);
        assert_eq!(said, ["0.2 s", "9.9 s", "45 s", "10 min", "2 h", "12 days"]);
    }

    #[test]
    fn a_hold_that_is_nearly_over_is_an_alarm() {
        const HOUR: Duration = Duration::from_secs(3600);
        let alarms = |hold: Option<Duration>, keep: Option<Duration>, age: Option<Duration>| {
            let now = Timestamp(1_000_000_000_000);
            let subscriptions = vec![SubscriptionRow { hold, ..row(1) }];
            let snapshot = Snapshot { now, horizon: 9, retention_keep: keep, subscriptions, ..Snapshot::default() };
            let since = age.map(|age| Timestamp(now.0 - age.as_millis() as i64));
            let figures = Figures { unsettled_since: since, ..Figures::default() };
            snapshot.hold_alarms(&HashMap::from([(SubscriptionId(1), figures)]))
        };
        let (nearly, not_yet) = (Some(HOUR.mul_f64(0.81)), Some(HOUR.mul_f64(0.79)));
        assert_eq!(alarms(Some(HOUR), Some(HOUR), nearly).len(), 1);
        let said = alarms(Some(HOUR), Some(Duration::ZERO), nearly).remove(0);
        assert!(said.starts_with("subscription 's' is about to lose events: its oldest one is 49 min old"), "{said}");
        for (hold, keep, age, why) in [
            (Some(HOUR), Some(HOUR), not_yet, "it is young"),
            (Some(HOUR), Some(2 * HOUR), nearly, "the log keeps it for longer"),
            (Some(HOUR), None, nearly, "the log keeps everything"),
            (None, Some(HOUR), nearly, "the subscription keeps everything"),
            (Some(HOUR), Some(HOUR), None, "everything is settled"),
        ] {
            assert_eq!(alarms(hold, keep, age), Vec::<String>::new(), "{why}");
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_that_exist() {
        let told = |names: &[&str]| unknown_subscription("x", names.iter().copied()).to_string();
        assert_eq!(told(&["a", "b"]), "no subscription is named 'x'; use one of: a, b");
        assert!(told(&[]).starts_with("no subscription is named 'x', and none exists yet; start a relay"));
    }
}
