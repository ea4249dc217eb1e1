use serde::Serialize;

use crate::{
    ClaimRecord, DeliveryRecord, Event, EventRecord, Fate, Mode, PassedUnder, PausedBy, RetryPolicy, State, Status,
    SubscriptionStatus, Timestamp, counted,
};

/// Why an event was or was not delivered to one subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Why {
    /// The subscription's name.
    pub subscription: String,
    /// The cause, with a stable name.
    pub cause: Cause,
    /// What happened, in one sentence that names the blocker.
    pub message: String,
    /// What to do, if anything can be done.
    pub advice: Option<String>,
    /// Details about the engine: which lane settled it, and in which epoch.
    pub detail: Option<String>,
}

/// The causes that [`why`] knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// It was delivered.
    Delivered,
    /// The filter that judges it does not want it.
    NotMatched,
    /// It is before the start of the subscription.
    BeforeStart,
    /// It waits behind an earlier event of its key that is not done.
    BehindKeyHead,
    /// It failed and is retried at a known time.
    RetryAt,
    /// The sink is considered down.
    SinkDown,
    /// An operator paused the subscription, or its receiver accepts no more events.
    Paused,
    /// Most of the last keys failed, so a bad deploy is suspected.
    FloodGuard,
    /// No living instance owns its lane.
    NoOwner,
    /// It is not due yet.
    Delayed,
    /// It was given up until an operator acts.
    Dead,
    /// An operator gave it up.
    Skipped,
    /// Retention removed its range or its dead delivery, or dropped it because the subscription's `hold` had expired.
    Pruned,
    /// A limit stopped the subscription.
    Stopped,
    /// It is being delivered.
    Processing,
    /// It waits for its turn, or has been handed to the sink for the first time and is not settled yet.
    Pending,
    /// It appeared in a range that had been closed.
    InDeadRange,
    /// It was passed under a filter that is no longer recorded.
    NotRecorded,
}

impl Cause {
    /// All causes.
    pub const ALL: [Cause; 18] = [
        Cause::Delivered,
        Cause::NotMatched,
        Cause::BeforeStart,
        Cause::BehindKeyHead,
        Cause::RetryAt,
        Cause::SinkDown,
        Cause::Paused,
        Cause::FloodGuard,
        Cause::NoOwner,
        Cause::Delayed,
        Cause::Dead,
        Cause::Skipped,
        Cause::Pruned,
        Cause::Stopped,
        Cause::Processing,
        Cause::Pending,
        Cause::InDeadRange,
        Cause::NotRecorded,
    ];

    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Delivered => "delivered",
            Cause::NotMatched => "not_matched",
            Cause::BeforeStart => "before_start",
            Cause::BehindKeyHead => "behind_key_head",
            Cause::RetryAt => "retry_at",
            Cause::SinkDown => "sink_down",
            Cause::Paused => "paused",
            Cause::FloodGuard => "flood_guard",
            Cause::NoOwner => "no_owner",
            Cause::Delayed => "delayed",
            Cause::Dead => "dead",
            Cause::Skipped => "skipped",
            Cause::Pruned => "pruned",
            Cause::Stopped => "stopped",
            Cause::Processing => "processing",
            Cause::Pending => "pending",
            Cause::InDeadRange => "in_dead_range",
            Cause::NotRecorded => "not_recorded",
        }
    }
}

/// Derives from the facts why the event of `record` was or was not delivered to the subscription of `fate`.
///
/// A cause that only an operator can remove is reported before one that ends by itself: a paused subscription before a
/// retry time.
pub fn why(record: &EventRecord, fate: &Fate, status: &Status) -> Why {
    let facts = Facts {
        event: &record.event,
        fate,
        now: status.at,
        status,
        subscription: status.subscriptions.iter().find(|subscription| subscription.name == fate.subscription),
    };
    let (cause, message, advice) = facts.conclude();
    let detail = (cause == Cause::Delivered).then(|| facts.settled_by());
    Why { subscription: fate.subscription.clone(), cause, message, advice, detail }
}

struct Facts<'a> {
    event: &'a Event,
    fate: &'a Fate,
    now: Timestamp,
    status: &'a Status,
    subscription: Option<&'a SubscriptionStatus>,
}

type Conclusion = (Cause, String, Option<String>);

impl Facts<'_> {
    fn conclude(&self) -> Conclusion {
        if let Some((reason, at)) = &self.fate.skipped {
            if let Some(what) = by_retention(reason) {
                return (Cause::Pruned, format!("retention gave it up at {at}: {what}"), None);
            }
            return (Cause::Skipped, format!("an operator gave it up at {at}: {reason}"), None);
        }
        match &self.fate.delivery {
            Some(delivery) => self.of_delivery(delivery),
            None => self.of_log(),
        }
    }

    fn of_delivery(&self, delivery: &DeliveryRecord) -> Conclusion {
        if delivery.state == State::Dead {
            return self.dead(delivery);
        }
        if let Some((id, position, state)) = &delivery.head {
            let message =
                format!("it waits for event {id} of its key (position {position}), which is {}", state.name());
            return (Cause::BehindKeyHead, message, Some(format!("pillarbox why {id}")));
        }
        if delivery.state == State::Processing {
            return delivery.claim.as_ref().map_or_else(
                || (Cause::Processing, format!("it is being delivered{}", self.owner()), None),
                |claim| self.claimed(claim),
            );
        }
        let waits = delivery.due_at > self.now;
        self.paused().or_else(|| self.no_owner()).unwrap_or_else(|| match delivery.state {
            State::Delayed if waits => delayed(delivery.due_at),
            State::Retrying if waits => self.flood_guard().unwrap_or_else(|| self.retry_at(delivery)),
            _ => self.held_back().unwrap_or_else(|| self.pending()),
        })
    }

    fn of_log(&self) -> Conclusion {
        let position = self.event.position;
        let fate = self.fate;
        if !fate.wanted {
            return self.not_matched();
        }
        if fate.in_dead_range {
            let message = format!("position {position} had been closed before the event appeared there");
            return (Cause::InDeadRange, message, Some("pillarbox audit; then `pillarbox rewind` its key".to_owned()));
        }
        // Before `before_start`: no rewind brings back what the log does not hold any more.
        if position < self.status.log.log_start && (fate.before_start || !fate.settled) {
            let log_start = self.status.log.log_start;
            let message = format!("retention removed its range: the log begins at position {log_start}");
            return (Cause::Pruned, message, None);
        }
        if fate.before_start {
            let message = format!("position {position} lies before the place where the subscription began");
            return (Cause::BeforeStart, message, Some(self.rewind()));
        }
        if fate.settled {
            let unknown = fate.passed_under.as_ref().filter(|former| former.filter.is_none());
            return unknown.map_or_else(|| (Cause::Delivered, self.delivered(), None), not_recorded);
        }
        if let Some(due_at) = self.event.deliver_at.filter(|due_at| *due_at > self.now) {
            return self.paused().or_else(|| self.no_owner()).unwrap_or_else(|| delayed(due_at));
        }
        let blocker = self.paused().or_else(|| self.no_owner()).or_else(|| self.held_back());
        blocker.unwrap_or_else(|| self.pending())
    }

    fn not_matched(&self) -> Conclusion {
        let Event { topic, r#type, position, key, .. } = self.event;
        let Some(former) = &self.fate.passed_under else {
            let message = format!("the subscription's filter does not want topic '{topic}' with type '{type}'");
            return (Cause::NotMatched, message, None);
        };
        let mut message = format!(
            "the filter that was in force when it was passed (definition {}, until {}) did not want topic '{topic}' with type '{type}'",
            former.definition, former.until
        );
        let wanted_now = self.subscription.is_some_and(|row| row.filter.wants(self.event));
        let advice = wanted_now.then(|| {
            message.push_str("; the filter of now does");
            let key = key.as_ref().map(|key| format!(" --key {key}")).unwrap_or_default();
            format!("pillarbox rewind {} --to {}{key}", self.fate.subscription, position - 1)
        });
        (Cause::NotMatched, message, advice)
    }

    fn dead(&self, delivery: &DeliveryRecord) -> Conclusion {
        let message =
            format!("it was given up after {}{}", counted(delivery.attempts, "attempt"), last_error(delivery));
        let (name, id) = (&self.fate.subscription, self.event.id);
        let advice = format!("pillarbox requeue --subscription {name} --event {id}, or `skip` with a reason");
        (Cause::Dead, message, Some(advice))
    }

    fn paused(&self) -> Option<Conclusion> {
        let subscription = self.subscription.filter(|subscription| subscription.paused)?;
        let (mut message, when) = match subscription.paused_by {
            Some(PausedBy::Receiver) => {
                ("the subscription was paused by the receiver".to_owned(), ", once the receiver takes events again")
            }
            _ => ("an operator paused the subscription".to_owned(), ""),
        };
        if let Some(reason) = &subscription.paused_reason {
            message.push_str(&format!(": {reason}"));
        }
        Some((Cause::Paused, message, Some(format!("pillarbox resume {}{when}", subscription.name))))
    }

    /// The instance that works on a row of a queue, and whether it still gives signs of life.
    fn claimed(&self, claim: &ClaimRecord) -> Conclusion {
        let (instance, since) = (claim.instance.0, claim.since);
        let alive = self.status.instances.iter().any(|status| status.id == claim.instance && status.alive);
        if alive {
            return (Cause::Processing, format!("instance {instance} has been working on it since {since}"), None);
        }
        let last = claim.beat_at.map_or_else(
            || "is gone".to_owned(),
            |beat_at| format!("gave its last sign of life at {beat_at} and is not known to live"),
        );
        let message =
            format!("instance {instance} began to work on it at {since} and {last}; it comes back by recovery");
        let advice = format!("pillarbox recover --subscription {}, if recovery is off", self.fate.subscription);
        (Cause::Processing, message, Some(advice))
    }

    fn no_owner(&self) -> Option<Conclusion> {
        // Any living instance may claim a row of a queue.
        let queued = self.fate.delivery.is_some() && self.subscription.is_some_and(|row| row.mode == Mode::Queue);
        if queued && self.subscription.is_some_and(|subscription| !subscription.orphaned) {
            return None;
        }
        let lane = self.fate.lane;
        let message = match self.fate.owner {
            Some((_, true)) => return None,
            _ if self.subscription.is_some_and(|subscription| subscription.orphaned) => {
                "no living instance runs the subscription".to_owned()
            }
            Some((owner, false)) => format!("instance {}, which owns its lane {lane}, is gone", owner.0),
            None => format!("its lane {lane} has no owner"),
        };
        let advice = "start a relay whose config names the subscription; see `pillarbox status`";
        Some((Cause::NoOwner, message, Some(advice.to_owned())))
    }

    /// What holds back an event that is due and could be delivered.
    fn held_back(&self) -> Option<Conclusion> {
        self.stopped().or_else(|| self.sink_down()).or_else(|| self.flood_guard())
    }

    fn stopped(&self) -> Option<Conclusion> {
        let subscription = self.subscription?;
        let reason = subscription.report.stopped.as_ref()?;
        let advice = format!("pillarbox list --subscription {} --state dead", subscription.name);
        Some((Cause::Stopped, format!("a limit stopped the subscription: {reason}"), Some(advice)))
    }

    fn sink_down(&self) -> Option<Conclusion> {
        let breaker = self.subscription?.report.breaker.as_ref()?;
        let message = format!(
            "the sink is considered down (circuit open) since {}, next try at {}: {}",
            breaker.since, breaker.next_try, breaker.error
        );
        let advice = "delivery goes on by itself once the receiver takes events; if the configuration is wrong, change it and \
                      restart the relay";
        Some((Cause::SinkDown, message, Some(advice.to_owned())))
    }

    fn flood_guard(&self) -> Option<Conclusion> {
        let subscription = self.subscription.filter(|subscription| subscription.report.flood_guard)?;
        let delivery = self.fate.delivery.as_ref();
        let next = delivery.map(|delivery| format!("; next try at {}", delivery.due_at)).unwrap_or_default();
        let message =
            format!("most of the last keys failed, so a bad deploy is suspected and nothing becomes dead{next}");
        let advice =
            format!("fix or roll back the receiver; see `pillarbox list --subscription {}`", subscription.name);
        Some((Cause::FloodGuard, message, Some(advice)))
    }

    fn retry_at(&self, delivery: &DeliveryRecord) -> Conclusion {
        let (attempts, due_at, error) = (delivery.attempts, delivery.due_at, last_error(delivery));
        let retry = self.subscription.map_or(RetryPolicy::sink(), |subscription| subscription.retry);
        let (max, dead_at) = (retry.max_attempts, delivery.since.plus(retry.min_dead_age));
        let message = if attempts >= max && dead_at > self.now {
            let all = counted(max, "attempt");
            let verb = if max == 1 { "is" } else { "are" };
            format!(
                "{max} of {all} {verb} used up; not dead before {dead_at} because of min_dead_age; next try at {due_at}{error}"
            )
        } else {
            format!("attempt {attempts} of {max} failed; next try at {due_at}{error}")
        };
        (Cause::RetryAt, message, None)
    }

    fn pending(&self) -> Conclusion {
        let mut message = format!("it waits for its turn or is at the sink{}", self.owner());
        if let Some(subscription) = self.subscription {
            let (pending, processing) = (subscription.pending, subscription.processing);
            let (events, verb) = (counted(pending, "event"), if pending == 1 { "is" } else { "are" });
            let working = if processing == 1 { "is" } else { "are" };
            message.push_str(&format!("; {events} {verb} pending and {processing} {working} being delivered"));
        }
        let holders = &self.status.log.holders;
        if !holders.is_empty() {
            message.push_str(&format!("; held back by {}", holders.join(", ")));
        }
        (Cause::Pending, message, None)
    }

    fn owner(&self) -> String {
        let by = |owner: crate::InstanceId| format!(" by instance {} on lane {}", owner.0, self.fate.lane);
        self.fate.owner.map(|(owner, _)| by(owner)).unwrap_or_default()
    }

    /// The lane had passed it by then; a retry comes later and leaves no record.
    fn delivered(&self) -> String {
        match &self.fate.settled_by {
            Some(by) => format!(
                "it was delivered by {}, or later if it was delayed, retried or had a row in a queue",
                by.before
            ),
            None => "it was delivered, at a time that is not recorded".to_owned(),
        }
    }

    fn settled_by(&self) -> String {
        let lane = self.fate.lane;
        match &self.fate.settled_by {
            Some(by) => {
                let (epoch, after, before) = (by.epoch, by.after, by.before);
                format!("settled by lane {lane} in epoch {epoch} between {after} and {before}, or by a later retry")
            }
            None => format!("settled by lane {lane}"),
        }
    }

    fn rewind(&self) -> String {
        format!("pillarbox rewind {} --to {}", self.fate.subscription, self.event.position - 1)
    }
}

/// What retention says of what it gave up; None: it was an operator.
fn by_retention(reason: &str) -> Option<&str> {
    reason.strip_prefix("dropped by retention: ")
}

fn not_recorded(former: &PassedUnder) -> Conclusion {
    let message = format!(
        "it was passed before {} under a filter that is no longer recorded: it was delivered if that filter wanted it",
        former.until
    );
    (Cause::NotRecorded, message, None)
}

fn delayed(due_at: Timestamp) -> Conclusion {
    (Cause::Delayed, format!("it is not to be delivered before {due_at}"), None)
}

fn last_error(delivery: &DeliveryRecord) -> String {
    let last = delivery.errors.last();
    last.map(|error| format!("; last error ({}): {}", error.kind, error.message)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::{
        AttemptError, BreakerReport, Filter, Headers, InstanceId, LogStatus, OnDead, Payload, REASON_DEAD, REASON_HOLD,
        SettledBy, SubscriptionId, SubscriptionReport,
    };

    const NOW: Timestamp = Timestamp(1_000_000);
    const LATER: Timestamp = Timestamp(2_000_000);

    fn record() -> EventRecord {
        let event = Event {
            position: 50,
            id: Uuid::from_u128(5),
            topic: "orders".into(),
            key: Some("k".into()),
            r#type: "placed".into(),
            payload: Payload::None,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(0),
            malformed: None,
        };
        EventRecord { event, subscriptions: Vec::new() }
    }

    fn fate() -> Fate {
        Fate {
            subscription: "s".to_owned(),
            wanted: true,
            passed_under: None,
            lane: 3,
            owner: Some((InstanceId(7), true)),
            floor: 10,
            settled: false,
            settled_by: None,
            before_start: false,
            in_dead_range: false,
            delivery: None,
            skipped: None,
        }
    }

    fn delivery(state: State, due_at: Timestamp) -> Option<DeliveryRecord> {
        let error = AttemptError { at: NOW, attempt: 4, kind: "timeout".to_owned(), message: "no answer".to_owned() };
        Some(DeliveryRecord { state, attempts: 4, due_at, since: NOW, claim: None, errors: vec![error], head: None })
    }

    fn status() -> Status {
        let subscription = SubscriptionStatus {
            oldest_processing_seconds: None,
            recovered: Vec::new(),
            id: SubscriptionId(1),
            name: "s".to_owned(),
            mode: Mode::Stream,
            filter: Filter::default(),
            definition: 3,
            lanes: 8,
            on_dead: OnDead::Block,
            retry: RetryPolicy::sink(),
            paused: false,
            paused_by: None,
            paused_reason: None,
            orphaned: false,
            pending: 3,
            delayed: 0,
            processing: 0,
            retrying: 0,
            blocked: 0,
            dead: 0,
            deliveries: 0,
            oldest_age_seconds: None,
            oldest_due: None,
            lag: 0,
            lanes_owned: 8,
            owners: Vec::new(),
            floor: 10,
            holds_bytes: 0,
            report: SubscriptionReport::default(),
        };
        let log = LogStatus {
            recovery_at: None,
            log_id: Uuid::nil(),
            incarnation: 1,
            schema_version: 1,
            log_start: 1,
            horizon: 100,
            events: 100,
            bytes: 0,
            kept: 0,
            holders: Vec::new(),
            held_seconds: None,
            alarms: Vec::new(),
        };
        Status { at: NOW, log, subscriptions: vec![subscription], instances: Vec::new() }
    }

    /// Checks the cause and that the message or the advice names each of `parts`.
    #[track_caller]
    fn check(fate: &Fate, status: &Status, cause: Cause, parts: &[&str]) {
        let why = why(&record(), fate, status);
        assert_eq!(why.cause, cause, "{why:?}");
        let text = format!("{} {}", why.message, why.advice.as_deref().unwrap_or_default());
        parts.iter().for_each(|part| assert!(text.contains(part), "'{part}' is not in '{text}'"));
    }

    fn with_report(report: SubscriptionReport) -> Status {
        let mut status = status();
        status.subscriptions[0].report = report;
        status
    }

    #[test]
    fn delivered() {
        let by = SettledBy { epoch: 9, after: Timestamp(0), before: NOW };
        let settled = Fate { settled: true, settled_by: Some(by), ..fate() };
        check(&settled, &status(), Cause::Delivered, &["it was delivered by 1970-01-01T00:16:40.000Z, or later"]);
        let Why { message, detail, .. } = why(&record(), &settled, &status());
        assert!(!message.contains("lane") && !message.contains("epoch"), "{message}");
        let detail = detail.unwrap();
        for part in ["lane 3", "epoch 9", "1970-01-01T00:00:00.000Z", "00:16:40"] {
            assert!(detail.contains(part), "'{part}' is not in '{detail}'");
        }
        check(&Fate { settled_by: None, ..settled }, &status(), Cause::Delivered, &["not recorded"]);
        assert_eq!(why(&record(), &fate(), &status()).detail, None);
    }

    #[test]
    fn not_matched() {
        let unwanted = Fate { wanted: false, settled: true, ..fate() };
        check(&unwanted, &status(), Cause::NotMatched, &["orders", "placed"]);
    }

    #[test]
    fn what_a_former_filter_did_not_want_was_not_delivered() {
        let former = PassedUnder { definition: 2, until: NOW, filter: Some(Filter::default()) };
        let passed = Fate { passed_under: Some(former.clone()), settled: true, ..fate() };
        check(&passed, &status(), Cause::Delivered, &["it was delivered"]);
        let unwanted = Fate { wanted: false, ..passed };
        let parts =
            ["in force when it was passed", "definition 2", "orders", "the filter of now does", "--to 49 --key k"];
        check(&unwanted, &status(), Cause::NotMatched, &parts);
        let mut other = status();
        other.subscriptions[0].filter.topics = vec!["other".into()];
        let text = why(&record(), &unwanted, &other);
        assert!(text.advice.is_none() && !text.message.contains("of now"), "{text:?}");
    }

    #[test]
    fn not_recorded() {
        let former = PassedUnder { definition: 2, until: NOW, filter: None };
        let passed = Fate { passed_under: Some(former), settled: true, ..fate() };
        check(&passed, &status(), Cause::NotRecorded, &["no longer recorded", &NOW.to_string()]);
    }

    #[test]
    fn what_retention_gave_up_is_not_said_of_an_operator() {
        for (reason, what) in [(REASON_HOLD, "hold was over"), (REASON_DEAD, "retention.dead")] {
            let dropped = Fate { skipped: Some((reason.to_owned(), NOW)), ..fate() };
            check(&dropped, &status(), Cause::Pruned, &["retention gave it up at", what]);
            let text = why(&record(), &dropped, &status()).message;
            assert!(!text.contains("operator"), "{text}");
        }
    }

    #[test]
    fn before_start() {
        let before = Fate { before_start: true, settled: true, ..fate() };
        check(&before, &status(), Cause::BeforeStart, &["50", "pillarbox rewind s --to 49"]);
    }

    #[test]
    fn behind_key_head() {
        let mut behind = Fate { delivery: delivery(State::Blocked, NOW), settled: true, ..fate() };
        behind.delivery.as_mut().unwrap().head = Some((Uuid::from_u128(4), 40, State::Dead));
        let head = Uuid::from_u128(4).to_string();
        check(&behind, &status(), Cause::BehindKeyHead, &[&head, "40", "which is dead"]);
    }

    #[test]
    fn retry_at() {
        let retrying = Fate { delivery: delivery(State::Retrying, LATER), settled: true, ..fate() };
        let first = ["attempt 4 of 20 failed", &LATER.to_string(), "timeout", "no answer"];
        check(&retrying, &status(), Cause::RetryAt, &first);
        let mut impatient = status();
        let retry = &mut impatient.subscriptions[0].retry;
        *retry = RetryPolicy { min_dead_age: Duration::from_secs(60), ..retry.attempts(3) };
        let until = format!("not dead before {} because of min_dead_age", NOW.plus(Duration::from_secs(60)));
        check(&retrying, &impatient, Cause::RetryAt, &["3 of 3 attempts are used up", &until, &LATER.to_string()]);
        impatient.at = LATER;
        let later = Fate { delivery: delivery(State::Retrying, Timestamp(LATER.0 + 1)), ..fate() };
        check(&later, &impatient, Cause::RetryAt, &["attempt 4 of 3 failed"]);
    }

    #[test]
    fn sink_down() {
        let breaker = BreakerReport { since: NOW, next_try: LATER, error: "connection refused".to_owned() };
        let down = with_report(SubscriptionReport { breaker: Some(breaker), ..SubscriptionReport::default() });
        check(&fate(), &down, Cause::SinkDown, &["connection refused", &LATER.to_string()]);
        let due = Fate { delivery: delivery(State::Retrying, NOW), ..fate() };
        check(&due, &down, Cause::SinkDown, &["connection refused"]);
    }

    #[test]
    fn paused_is_named_before_what_ends_by_itself() {
        let mut paused = status();
        paused.subscriptions[0].paused = true;
        check(&fate(), &paused, Cause::Paused, &["pillarbox resume s"]);
        let retrying = Fate { delivery: delivery(State::Retrying, LATER), ..fate() };
        check(&retrying, &paused, Cause::Paused, &["pillarbox resume s"]);
        check(&Fate { settled: true, ..fate() }, &paused, Cause::Delivered, &[]);
    }

    #[test]
    fn who_paused_it_and_why_is_named() {
        let paused = |by, reason: Option<&str>| {
            let mut paused = status();
            let subscription = &mut paused.subscriptions[0];
            (subscription.paused, subscription.paused_by) = (true, Some(by));
            subscription.paused_reason = reason.map(ToOwned::to_owned);
            paused
        };
        let receiver = paused(PausedBy::Receiver, Some("410 Gone"));
        check(&fate(), &receiver, Cause::Paused, &["paused by the receiver: 410 Gone", "pillarbox resume s, once"]);
        let operator = paused(PausedBy::Operator, Some("moving"));
        check(&fate(), &operator, Cause::Paused, &["an operator paused the subscription: moving"]);
        check(&fate(), &paused(PausedBy::Operator, None), Cause::Paused, &["an operator paused the subscription"]);
    }

    #[test]
    fn flood_guard() {
        let flooded = with_report(SubscriptionReport { flood_guard: true, ..SubscriptionReport::default() });
        let retrying = Fate { delivery: delivery(State::Retrying, LATER), ..fate() };
        check(&retrying, &flooded, Cause::FloodGuard, &["bad deploy", &LATER.to_string()]);
    }

    #[test]
    fn no_owner() {
        check(&Fate { owner: None, ..fate() }, &status(), Cause::NoOwner, &["lane 3 has no owner"]);
        check(&Fate { owner: Some((InstanceId(7), false)), ..fate() }, &status(), Cause::NoOwner, &["instance 7"]);
        let mut orphaned = status();
        orphaned.subscriptions[0].orphaned = true;
        check(&Fate { owner: None, ..fate() }, &orphaned, Cause::NoOwner, &["no living instance runs"]);
    }

    #[test]
    fn delayed() {
        let parked = Fate { delivery: delivery(State::Delayed, LATER), settled: true, ..fate() };
        check(&parked, &status(), Cause::Delayed, &[&LATER.to_string()]);
        let mut unread = record();
        unread.event.deliver_at = Some(LATER);
        assert_eq!(why(&unread, &fate(), &status()).cause, Cause::Delayed);
        assert_eq!(why(&unread, &Fate { owner: None, ..fate() }, &status()).cause, Cause::NoOwner, "as of a delivery");
    }

    #[test]
    fn dead() {
        let dead = Fate { delivery: delivery(State::Dead, NOW), settled: true, ..fate() };
        let id = record().event.id.to_string();
        check(&dead, &status(), Cause::Dead, &["after 4 attempts", "no answer", "requeue --subscription s", &id]);
    }

    #[test]
    fn skipped() {
        let skipped = Fate { skipped: Some(("a test order".to_owned(), NOW)), settled: true, ..fate() };
        check(&skipped, &status(), Cause::Skipped, &["a test order", &NOW.to_string()]);
    }

    #[test]
    fn pruned() {
        let mut pruned = status();
        pruned.log.log_start = 60;
        check(&fate(), &pruned, Cause::Pruned, &["60"]);
        check(&Fate { before_start: true, settled: true, ..fate() }, &pruned, Cause::Pruned, &["60"]);
        check(&Fate { settled: true, ..fate() }, &pruned, Cause::Delivered, &[]);
    }

    #[test]
    fn stopped() {
        let reason = Some("max_parked = 1000 keys fail".to_owned());
        let stopped = with_report(SubscriptionReport { stopped: reason, ..SubscriptionReport::default() });
        check(&fate(), &stopped, Cause::Stopped, &["max_parked", "--state dead"]);
    }

    #[test]
    fn processing() {
        let processing = Fate { delivery: delivery(State::Processing, NOW), ..fate() };
        check(&processing, &status(), Cause::Processing, &["instance 7", "lane 3"]);
    }

    #[test]
    fn a_claim_names_who_works_on_it_and_what_to_do_if_that_one_is_gone() {
        let mut claimed = delivery(State::Processing, NOW);
        let claim = ClaimRecord { instance: InstanceId(9), since: NOW, beat_at: None };
        claimed.as_mut().unwrap().claim = Some(claim);
        let gone = Fate { delivery: claimed, ..fate() };
        check(&gone, &status(), Cause::Processing, &["instance 9", "is gone", "pillarbox recover --subscription s"]);
    }

    #[test]
    fn pending_names_who_holds_the_horizon() {
        let mut held = status();
        held.log.holders = vec!["pid 4711, open for 12 min".to_owned()];
        check(&fate(), &held, Cause::Pending, &["3 events", "pid 4711"]);
        let due = Fate { delivery: delivery(State::Pending, NOW), ..fate() };
        check(&due, &status(), Cause::Pending, &["its turn"]);
    }

    #[test]
    fn in_dead_range() {
        let late = Fate { in_dead_range: true, settled: true, ..fate() };
        check(&late, &status(), Cause::InDeadRange, &["50", "audit"]);
    }

    #[test]
    fn names_are_what_json_says() {
        for cause in Cause::ALL {
            assert_eq!(serde_json::to_value(cause).unwrap(), cause.name());
        }
    }
}
