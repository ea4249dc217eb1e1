//! For those who implement [`Operator`](crate::Operator): what commands look at, and what follows from it whatever the database.
use std::collections::HashMap;
use std::time::Duration;

use uuid::Uuid;

use crate::{
    Changed, Check, Cursor, Epoch, Error, ErrorKind, Filter, InstanceId, InstanceStatus, KeyHash, Level, Mode, OnDead,
    Pause, Position, RecoveredCount, Report, Result, RetryPolicy, State, SubscriptionId, SubscriptionReport,
    SubscriptionStatus, Timestamp, counted, lane_of,
};

/// What operators' commands look at, in one snapshot.
#[derive(Debug)]
pub struct World {
    /// The time that ages are counted to.
    pub now: Timestamp,
    /// The highest position handed out.
    pub horizon: Position,
    /// The lowest position that retention has left.
    pub log_start: Position,
    /// Retention has been this far; a journal may begin below.
    pub pruned_to: Position,
    /// By name.
    pub subscriptions: Vec<SubscriptionRow>,
    /// By number.
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

impl World {
    /// Says which subscriptions are about to lose events because their hold is nearly over. Deliveries are never lost to a hold, nor is
    /// what the log keeps for everybody; it keeps everything if that is None.
    pub fn hold_alarms(&self, keep: Option<Duration>, figures: &HashMap<SubscriptionId, Figures>) -> Vec<String> {
        let alarm = |row: &SubscriptionRow| {
            let (hold, oldest) = (row.hold?.max(keep?), figures.get(&row.id)?.unsettled_since?);
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

    /// The subscription of this name.
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

    /// What `doctor` says of the instances: lanes of one that ended wait for a relay; a row that owns none says nothing, and goes by itself.
    pub fn check_instances(&self) -> Check {
        let owns = |id: InstanceId| {
            self.subscriptions.iter().flat_map(|subscription| &subscription.lanes).any(|lane| lane.owner == Some(id))
        };
        let (alive, ended): (Vec<_>, Vec<_>) = self.instances.iter().partition(|row| row.alive);
        let left: Vec<String> = ended.iter().filter(|row| owns(row.id)).map(|row| row.id.0.to_string()).collect();
        let check = |level, finding: String, fix: Option<&str>| Check {
            name: "instances".to_owned(),
            level,
            finding,
            fix: fix.map(str::to_owned),
        };
        if left.is_empty() {
            let gone =
                if ended.is_empty() { String::new() } else { format!("; {} ended and own nothing", ended.len()) };
            return check(Level::Ok, format!("{} alive{gone}", alive.len()), None);
        }
        let finding = format!("{} ended without leaving and own lanes", left.join(", "));
        check(Level::Warning, finding, Some("start a relay: it takes over what they left"))
    }

    /// What `status` shows of all instances.
    pub fn instance_statuses(&self) -> Vec<InstanceStatus> {
        let lanes = |id| {
            let all = self.subscriptions.iter().flat_map(|subscription| &subscription.lanes);
            all.filter(|lane| lane.owner == Some(id)).count() as u32
        };
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
    let known = if names.is_empty() { "none exist yet".into() } else { format!("there are: {}", names.join(", ")) };
    Error::new(ErrorKind::NotFound, format!("no subscription is named '{name}'; {known}"))
}

/// What is told when so many claims were taken from their owners by an operator.
pub fn tell_recovered(count: u64) -> Changed {
    let message = match count {
        0 => "nothing to recover: no matching deliveries are in progress".to_owned(),
        1 => "1 delivery was taken from the instance that worked on it; it counts as an attempt".to_owned(),
        _ => format!("{count} deliveries were taken from the instances that worked on them; each counts as an attempt"),
    };
    Changed { count, events: Vec::new(), message }
}

impl SubscriptionRow {
    /// What is told when deliveries of these events are due again.
    pub fn tell_requeued(&self, events: Vec<Uuid>) -> Changed {
        let (name, count) = (&self.name, events.len() as u64);
        let message = match count {
            0 => format!("nothing to requeue: '{name}' has no dead delivery of that kind"),
            1 => format!("1 delivery of '{name}' is due now, with attempts back to 0"),
            _ => format!("{count} deliveries of '{name}' are due now, with attempts back to 0"),
        };
        Changed { count, events, message }
    }

    /// What is told when events of a key above a position are delivered again. `note`: what else there is to say of that position.
    pub fn tell_replayed(&self, events: Vec<Uuid>, key: &str, above: Position, note: &str) -> Changed {
        let count = events.len() as u64;
        let replayed = counted(count, "event");
        let message = format!("'{}' replays {replayed} of key '{key}' above position {above}{note}", self.name);
        Changed { count, events, message }
    }

    /// What is told when it was deleted with so many deliveries.
    pub fn tell_deleted(&self, deliveries: u64) -> Changed {
        let message = format!("'{}' is deleted, with {}", self.name, counted(deliveries, "delivery"));
        Changed { count: 1, events: Vec::new(), message }
    }

    /// What is told when it has this number of lanes now, among which so many deliveries were shared out.
    pub fn tell_relaned(&self, lanes: u32, deliveries: u64) -> Changed {
        let (name, had) = (&self.name, self.lanes.len());
        let (now, moved) = (counted(lanes, "lane"), counted(deliveries, "delivery"));
        let message =
            format!("'{name}' has {now} (it had {had}), {moved} moved; resume it with `pillarbox resume {name}`");
        Changed { count: u64::from(lanes), events: Vec::new(), message }
    }

    /// What is told when this subscription is paused, or with None resumed.
    pub fn tell_paused(&self, pause: Option<&Pause>) -> Changed {
        let state = if pause.is_some() { "paused" } else { "running" };
        let changes = self.pause.is_some() != pause.is_some();
        let was = if changes { "now" } else { "already" };
        Changed { count: u64::from(changes), events: Vec::new(), message: format!("'{}' is {was} {state}", self.name) }
    }

    /// The lowest floor.
    pub fn floor(&self) -> Position {
        self.lanes.iter().map(|lane| lane.cursor.floor).min().unwrap_or(0)
    }

    /// The lane of an event.
    pub fn lane_of(&self, key: Option<&str>, position: Position) -> Option<&LaneRow> {
        self.lane_at(key.map(KeyHash::of), position)
    }

    fn lane_at(&self, key: Option<KeyHash>, position: Position) -> Option<&LaneRow> {
        self.lanes.get(lane_of(key, position, self.lanes.len() as u32) as usize)
    }

    /// Whether it wants an event and has not settled it.
    pub fn awaits(&self, position: Position, key: Option<KeyHash>, topic: &str, r#type: &str) -> bool {
        self.lane_at(key, position).is_some_and(|lane| !lane.has_settled(position))
            && self.filter.matches(topic, r#type)
    }
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
    fn one_is_told_in_the_singular() {
        let (row, id) = (row(1), Uuid::nil());
        assert_eq!(row.tell_requeued(vec![id]).message, "1 delivery of 's' is due now, with attempts back to 0");
        assert!(row.tell_requeued(vec![id; 2]).message.starts_with("2 deliveries of 's' are due now"));
        assert!(row.tell_requeued(Vec::new()).message.starts_with("nothing to requeue"));
        let replayed = row.tell_replayed(vec![id], "k", 4, " (note)");
        assert_eq!(replayed.message, "'s' replays 1 event of key 'k' above position 4 (note)");
        assert_eq!(row.tell_deleted(1).message, "'s' is deleted, with 1 delivery");
        assert!(row.tell_relaned(1, 1).message.starts_with("'s' has 1 lane (it had 1), 1 delivery moved; "));
        assert!(row.tell_relaned(4, 2).message.starts_with("'s' has 4 lanes (it had 1), 2 deliveries moved; "));
        assert!(tell_recovered(1).message.starts_with("1 delivery was taken from the instance "));
        assert!(tell_recovered(2).message.starts_with("2 deliveries were taken from the instances "));
    }

    #[test]
    fn a_hold_that_is_nearly_over_is_an_alarm() {
        const HOUR: Duration = Duration::from_secs(3600);
        let alarms = |hold: Option<Duration>, keep: Option<Duration>, age: Option<Duration>| {
            let now = Timestamp(1_000_000_000_000);
            let subscriptions = vec![SubscriptionRow { hold, ..row(1) }];
            let (log_start, pruned_to) = (1, 0);
            let world = World { now, horizon: 9, log_start, pruned_to, subscriptions, instances: Vec::new() };
            let since = age.map(|age| Timestamp(now.0 - age.as_millis() as i64));
            let figures = Figures { unsettled_since: since, ..Figures::default() };
            world.hold_alarms(keep, &HashMap::from([(SubscriptionId(1), figures)]))
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
    fn whoever_names_no_subscription_is_told_which_there_are() {
        let told = |names: &[&str]| unknown_subscription("x", names.iter().copied()).to_string();
        assert_eq!(told(&["a", "b"]), "no subscription is named 'x'; there are: a, b");
        assert_eq!(told(&[]), "no subscription is named 'x'; none exist yet");
    }
}
