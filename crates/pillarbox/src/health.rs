use std::time::Duration;

use serde::Serialize;

use crate::{BreakerReport, InstanceStatus, Level, Mode, PausedBy, Status, SubscriptionStatus, Timestamp, counted};

/// Limits beyond which a delay or a backlog counts as a problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthLimits {
    /// Time without a delivery after which a subscription with work counts as stalled; also the time by which a retry
    /// may be overdue. Not applied before an instance that can run it has lived for this long. Default: 60 s.
    pub stalled_after: Duration,
    /// Time for which a lane with waiting events may have no owner. It also applies to the age of the oldest instance
    /// that could own the lane, because a starting relay takes its lanes only with its next look at the fleet. Default:
    /// 10 s.
    pub no_owner_after: Duration,
    /// Time for which a sink may be considered down. Default: 60 s.
    pub sink_down_after: Duration,
    /// Number of dead events tolerated before the subscription counts as unhealthy. Default: 0.
    pub dead_max: u64,
    /// Number of bytes that a subscription may hold back while no living instance runs it. Default: 0.
    pub orphaned_bytes_max: i64,
    /// Time for which a transaction may hold the log back. Default: 60 s.
    pub held_after: Duration,
}

impl Default for HealthLimits {
    fn default() -> Self {
        HealthLimits {
            stalled_after: Duration::from_secs(60),
            no_owner_after: Duration::from_secs(10),
            sink_down_after: Duration::from_secs(60),
            dead_max: 0,
            orphaned_bytes_max: 0,
            held_after: Duration::from_secs(60),
        }
    }
}

/// A problem of the log or of a subscription.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// The subscription; None: the problem concerns the log.
    pub subscription: Option<String>,
    /// The kind, with a stable name.
    pub kind: ProblemKind,
    /// [`Level::Failed`]: unhealthy; [`Level::Warning`]: reported only.
    pub level: Level,
    /// What was found.
    pub message: String,
    /// What to do; empty if the message says it.
    pub advice: String,
}

/// The kinds of [`Problem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// Paused by an operator, which is not unhealthy, or by its receiver, which is.
    Paused,
    /// No living instance runs the subscription.
    Orphaned,
    /// Lanes with work have no living owner.
    NoOwner,
    /// Work is due, and nothing is delivered.
    Stalled,
    /// The sink is down.
    SinkDown,
    /// A bad deploy is suspected.
    FloodGuard,
    /// A limit stopped the subscription.
    Stopped,
    /// Events are retried beyond `max_attempts`.
    TriedOn,
    /// Events were given up.
    Dead,
    /// A transaction or a reader holds the log back.
    LogHeld,
    /// The log needs attention.
    Alarm,
}

/// All problems of a status. A status with a problem of [`Level::Failed`] is unhealthy for `status --check` and
/// `/progressz`: see [`is_unhealthy`].
pub fn problems(status: &Status, limits: &HealthLimits) -> Vec<Problem> {
    let mut problems = Vec::new();
    for subscription in &status.subscriptions {
        let runner_age = runner_age(status, subscription);
        Judge { subscription, runner_age, limits, now: status.at, problems: &mut problems }.judge();
    }
    let held = status.log.held_seconds;
    let held_long = held.is_none_or(|seconds| seconds > limits.held_after.as_secs_f64());
    problems.extend(status.log.holders.iter().map(|holder| Problem {
        subscription: None,
        kind: ProblemKind::LogHeld,
        level: if held_long { Level::Failed } else { Level::Warning },
        message: format!("the log is held back by {holder}"),
        advice: "end that transaction; `pillarbox doctor` says how".to_owned(),
    }));
    problems.extend(status.log.alarms.iter().map(|alarm| Problem {
        subscription: None,
        kind: ProblemKind::Alarm,
        level: Level::Warning,
        message: alarm.clone(),
        // It says what to do itself.
        advice: String::new(),
    }));
    problems
}

/// Whether one of the problems is more than a warning.
pub fn is_unhealthy(problems: &[Problem]) -> bool {
    problems.iter().any(|problem| problem.level == Level::Failed)
}

/// Age of the oldest living instance that can run the subscription. An instance that has not reported yet counts as
/// able to.
fn runner_age(status: &Status, subscription: &SubscriptionStatus) -> Option<Duration> {
    let runs = |instance: &&InstanceStatus| {
        let reported = &instance.report.subscriptions;
        instance.alive && (reported.is_empty() || reported.contains_key(&subscription.name))
    };
    status.instances.iter().filter(runs).map(|instance| status.at.since(instance.started_at)).max()
}

struct Judge<'a> {
    subscription: &'a SubscriptionStatus,
    runner_age: Option<Duration>,
    limits: &'a HealthLimits,
    now: Timestamp,
    problems: &'a mut Vec<Problem>,
}

impl Judge<'_> {
    fn judge(&mut self) {
        let name = &self.subscription.name;
        if self.subscription.paused {
            self.judge_paused();
        } else if self.subscription.orphaned {
            self.judge_orphaned();
        } else {
            self.judge_progress();
        }
        let dead = self.subscription.dead;
        if dead > self.limits.dead_max {
            let message = format!("{} {} dead", counted(dead, "event"), if dead == 1 { "is" } else { "are" });
            self.say(
                ProblemKind::Dead,
                Level::Failed,
                message,
                format!("pillarbox list --subscription {name} --state dead"),
            );
        }
    }

    fn judge_paused(&mut self) {
        let (name, waiting) = (&self.subscription.name, wait(self.waiting()));
        let reason = self.subscription.paused_reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        if self.subscription.paused_by == Some(PausedBy::Receiver) {
            let message = format!("it was paused by its receiver{reason}; {waiting}");
            let advice = format!(
                "`pillarbox resume {name}` once the receiver takes events again, or `pillarbox pause {name}` to leave it so"
            );
            self.say(ProblemKind::Paused, Level::Failed, message, advice);
        } else {
            let message = format!("it is paused{reason}; {waiting}");
            self.say(ProblemKind::Paused, Level::Warning, message, format!("pillarbox resume {name}"));
        }
    }

    fn judge_orphaned(&mut self) {
        // Delayed events too: without a relay they are not delivered when their time comes.
        let (waiting, bytes) = (self.subscription.undelivered(), self.subscription.holds_bytes);
        if waiting == 0 && bytes <= self.limits.orphaned_bytes_max {
            return;
        }
        let name = &self.subscription.name;
        let message =
            format!("no living instance runs it; {} and {bytes} bytes of the log are held back", wait(waiting));
        let advice = format!("start a relay whose config names it, or `pillarbox subscription delete {name}`");
        self.say(ProblemKind::Orphaned, Level::Failed, message, advice);
    }

    fn judge_progress(&mut self) {
        let name = &self.subscription.name;
        let report = &self.subscription.report;
        if let Some(reason) = &report.stopped {
            let advice = format!("pillarbox list --subscription {name} --state retrying");
            self.say(ProblemKind::Stopped, Level::Failed, format!("a limit stopped it: {reason}"), advice);
        }
        if report.flood_guard {
            let message = "most of the last keys failed; nothing becomes dead until that ends".to_owned();
            self.say(ProblemKind::FloodGuard, Level::Failed, message, "fix or roll back the receiver".to_owned());
        }
        if let Some(breaker) = &report.breaker {
            self.judge_sink_down(breaker);
        }
        self.judge_retries();
        let unowned = self.subscription.lanes.saturating_sub(self.subscription.lanes_owned);
        if unowned > 0 && self.waiting() > 0 {
            let (lanes, verb) = (counted(self.subscription.lanes, "lane"), if unowned == 1 { "has" } else { "have" });
            let message = format!("{unowned} of {lanes} {verb} no living owner and events wait");
            let advice = "see `pillarbox status` for the instances; a relay takes free lanes by itself".to_owned();
            let level = if self.has_waited(self.limits.no_owner_after) { Level::Failed } else { Level::Warning };
            self.say(ProblemKind::NoOwner, level, message, advice);
        } else if report.breaker.is_none() && report.stopped.is_none() && self.is_stalled() {
            let age = self.subscription.oldest_age_seconds.unwrap_or_default();
            let message = format!(
                "{} pending, the oldest event is {age:.0} s old, and nothing was delivered for {} s",
                counted(self.subscription.pending, "event"),
                self.limits.stalled_after.as_secs()
            );
            self.say(
                ProblemKind::Stalled,
                Level::Failed,
                message,
                "pillarbox why, with the id of a pending event".to_owned(),
            );
        }
    }

    fn judge_sink_down(&mut self, breaker: &BreakerReport) {
        let BreakerReport { since, next_try, error } = breaker;
        let down = self.now.since(*since);
        let level = if down > self.limits.sink_down_after { Level::Failed } else { Level::Warning };
        let next = match next_try.since(self.now).as_secs() {
            0 => "next try now".to_owned(),
            seconds => format!("next try in {seconds} s"),
        };
        let message = format!("the sink is considered down (circuit open) for {} s, {next}: {error}", down.as_secs());
        // The error may say that the configuration is to blame, and then waiting does not help.
        let advice = "delivery goes on by itself once the receiver takes events; if the configuration is wrong, change it and \
                      restart the relay";
        self.say(ProblemKind::SinkDown, level, message, advice.to_owned());
    }

    /// Explains why events fail more often than `max_attempts` says.
    fn judge_retries(&mut self) {
        let SubscriptionStatus { name, retrying, retry, .. } = self.subscription;
        if *retrying == 0 || !retry.outlasts_attempts() {
            return;
        }
        let (max, age) = (retry.max_attempts, retry.min_dead_age);
        let (events, verb) = (counted(*retrying, "event"), if *retrying == 1 { "is" } else { "are" });
        let message = format!(
            "{events} {verb} retried, also beyond max_attempts = {max}: nothing is dead before min_dead_age = {age:?} since its first \
             failure"
        );
        let advice =
            format!("lower retry.min_dead_age, or see `pillarbox list --subscription {name} --state retrying`");
        self.say(ProblemKind::TriedOn, Level::Warning, message, advice);
    }

    /// There is work that could be done now, it has been there for long, and nothing was delivered meanwhile. A retry
    /// or a delay that lies ahead is no work.
    fn is_stalled(&self) -> bool {
        let limit = self.limits.stalled_after;
        // Handlers of a queue may take hours; how long they do is told by itself.
        if self.subscription.mode == Mode::Queue && self.subscription.processing > 0 {
            return false;
        }
        let lives = self.runner_age.is_some_and(|age| age > limit);
        let overdue = lives && self.subscription.oldest_due.is_some_and(|due_at| self.now.since(due_at) > limit);
        let delivered_at = self.subscription.report.delivered_at;
        let silent = delivered_at.is_none_or(|delivered_at| self.now.since(delivered_at) > limit);
        silent && (overdue || (self.has_waited(limit) && self.subscription.pending > 0))
    }

    /// An event has waited for longer than this, and so has a relay that could have delivered it.
    fn has_waited(&self, limit: Duration) -> bool {
        let lives = self.runner_age.is_some_and(|age| age > limit);
        lives && self.subscription.oldest_age_seconds.is_some_and(|age| age > limit.as_secs_f64())
    }

    fn waiting(&self) -> u64 {
        let it = self.subscription;
        it.pending + it.processing + it.retrying + it.blocked
    }

    fn say(&mut self, kind: ProblemKind, level: Level, message: String, advice: String) {
        let subscription = Some(self.subscription.name.clone());
        self.problems.push(Problem { subscription, kind, level, message, advice });
    }
}

/// So many events wait.
fn wait(count: u64) -> String {
    format!("{} wait{}", counted(count, "event"), if count == 1 { "s" } else { "" })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::{Filter, InstanceId, LogStatus, Mode, OnDead, Report, RetryPolicy, SubscriptionId, SubscriptionReport};

    const NOW: Timestamp = Timestamp(1_000_000);

    /// Everything delivered, all lanes owned.
    fn healthy() -> Status {
        let subscription = SubscriptionStatus {
            oldest_processing_seconds: None,
            recovered: Vec::new(),
            id: SubscriptionId(1),
            name: "s".to_owned(),
            mode: Mode::Stream,
            filter: Filter::default(),
            definition: 1,
            lanes: 8,
            on_dead: OnDead::Block,
            retry: RetryPolicy::sink(),
            paused: false,
            paused_by: None,
            paused_reason: None,
            orphaned: false,
            pending: 0,
            delayed: 5,
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
            report: SubscriptionReport { delivered_at: Some(NOW), ..SubscriptionReport::default() },
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
        let instance = InstanceStatus {
            id: InstanceId(1),
            host: "here".to_owned(),
            pid: 1,
            version: "0".to_owned(),
            started_at: ago(900),
            beat_at: NOW,
            alive: true,
            lanes: 8,
            report: Report::default(),
        };
        Status { at: NOW, log, subscriptions: vec![subscription], instances: vec![instance] }
    }

    #[track_caller]
    fn check(change: impl FnOnce(&mut SubscriptionStatus), expected: &[(ProblemKind, Level)]) {
        check_status(|status| change(&mut status.subscriptions[0]), expected);
    }

    #[track_caller]
    fn check_status(change: impl FnOnce(&mut Status), expected: &[(ProblemKind, Level)]) {
        let mut status = healthy();
        change(&mut status);
        let problems = problems(&status, &HealthLimits::default());
        let found: Vec<_> = problems.iter().map(|problem| (problem.kind, problem.level)).collect();
        assert_eq!(found, expected, "{problems:?}");
        assert_eq!(is_unhealthy(&problems), expected.iter().any(|(_, level)| *level == Level::Failed));
    }

    /// Before the limit, and after it.
    fn ago(seconds: i64) -> Timestamp {
        Timestamp(NOW.0 - seconds * 1000)
    }

    #[test]
    fn nothing_to_do_is_healthy() {
        check(|_| {}, &[]);
        check(|it| it.report.delivered_at = None, &[]);
    }

    #[test]
    fn one_dead_event_is_told_in_the_singular() {
        let told = |dead| {
            let mut status = healthy();
            status.subscriptions[0].dead = dead;
            problems(&status, &HealthLimits::default()).remove(0).message
        };
        assert_eq!([told(1), told(2)], ["1 event is dead", "2 events are dead"]);
    }

    #[test]
    fn paused_is_said_and_healthy() {
        check(|it| (it.paused, it.pending, it.lanes_owned) = (true, 9, 0), &[(ProblemKind::Paused, Level::Warning)]);
    }

    #[test]
    fn paused_by_its_receiver_is_an_alarm_that_says_why() {
        let paused = |by| {
            move |status: &mut Status| {
                let it = &mut status.subscriptions[0];
                (it.paused, it.paused_by, it.paused_reason) = (true, Some(by), Some("410 Gone".to_owned()));
            }
        };
        check_status(paused(PausedBy::Receiver), &[(ProblemKind::Paused, Level::Failed)]);
        check_status(paused(PausedBy::Operator), &[(ProblemKind::Paused, Level::Warning)]);
        for by in [PausedBy::Receiver, PausedBy::Operator] {
            let mut status = healthy();
            paused(by)(&mut status);
            let problem = problems(&status, &HealthLimits::default()).remove(0);
            assert!(problem.message.contains("410 Gone") && problem.advice.contains("resume s"), "{problem:?}");
        }
    }

    #[test]
    fn an_old_event_with_nothing_delivered_is_a_stall() {
        let stalled = |delivered, age| {
            move |it: &mut SubscriptionStatus| {
                (it.pending, it.oldest_age_seconds) = (1, Some(age));
                it.report.delivered_at = Some(ago(delivered));
            }
        };
        check(stalled(61, 61.0), &[(ProblemKind::Stalled, Level::Failed)]);
        check(stalled(59, 61.0), &[]);
        check(stalled(61, 59.0), &[]);
    }

    #[test]
    fn a_retry_is_work_only_once_it_is_due() {
        let retrying = |due_at| {
            move |it: &mut SubscriptionStatus| {
                (it.retrying, it.blocked, it.oldest_age_seconds) = (1, 4, Some(9999.0));
                (it.oldest_due, it.report.delivered_at) = (Some(due_at), Some(ago(9999)));
            }
        };
        check(retrying(ago(-60)), &[]);
        check(retrying(ago(60)), &[]);
        check(retrying(ago(61)), &[(ProblemKind::Stalled, Level::Failed)]);
    }

    #[test]
    fn an_unowned_lane_matters_only_with_work_that_has_waited() {
        let waiting = |age| {
            move |it: &mut SubscriptionStatus| {
                (it.lanes_owned, it.pending, it.oldest_age_seconds) = (7, 1, Some(age));
            }
        };
        check(|it| it.lanes_owned = 7, &[]);
        check(waiting(10.0), &[(ProblemKind::NoOwner, Level::Warning)]);
        check(waiting(10.1), &[(ProblemKind::NoOwner, Level::Failed)]);
    }

    #[test]
    fn a_relay_that_has_just_started_on_an_old_backlog_is_given_time() {
        let started = |lanes_owned, seconds| {
            move |status: &mut Status| {
                let it = &mut status.subscriptions[0];
                (it.lanes_owned, it.pending, it.oldest_age_seconds) = (lanes_owned, 9, Some(9999.0));
                it.report.delivered_at = None;
                status.instances[0].started_at = ago(seconds);
            }
        };
        check_status(started(0, 10), &[(ProblemKind::NoOwner, Level::Warning)]);
        check_status(started(0, 11), &[(ProblemKind::NoOwner, Level::Failed)]);
        check_status(started(8, 60), &[]);
        check_status(started(8, 61), &[(ProblemKind::Stalled, Level::Failed)]);
        // An instance that runs something else, or is gone, says nothing about this one.
        let of_another = |change: fn(&mut InstanceStatus)| {
            move |status: &mut Status| {
                started(0, 5)(status);
                let mut other = InstanceStatus { started_at: ago(900), ..status.instances[0].clone() };
                change(&mut other);
                status.instances.push(other);
            }
        };
        let young = [(ProblemKind::NoOwner, Level::Warning)];
        check_status(of_another(|it| it.alive = false), &young);
        check_status(of_another(|it| it.report.subscriptions = [("t".into(), Default::default())].into()), &young);
        check_status(of_another(|_| {}), &[(ProblemKind::NoOwner, Level::Failed)]);
    }

    #[test]
    fn orphaned_is_a_problem_if_it_holds_something() {
        let orphaned = |change: fn(&mut SubscriptionStatus)| {
            move |it: &mut SubscriptionStatus| {
                (it.orphaned, it.lanes_owned, it.delayed) = (true, 0, 0);
                change(it);
            }
        };
        check(orphaned(|_| {}), &[]);
        check(orphaned(|it| it.holds_bytes = 1), &[(ProblemKind::Orphaned, Level::Failed)]);
        check(orphaned(|it| it.pending = 1), &[(ProblemKind::Orphaned, Level::Failed)]);
        check(orphaned(|it| it.delayed = 1), &[(ProblemKind::Orphaned, Level::Failed)]);
    }

    #[test]
    fn a_sink_may_be_down_for_a_while() {
        let down = |since| {
            move |it: &mut SubscriptionStatus| {
                (it.pending, it.oldest_age_seconds) = (9, Some(9999.0));
                it.report.delivered_at = Some(ago(9999));
                it.report.breaker = Some(BreakerReport { since, next_try: NOW, error: "refused".to_owned() });
            }
        };
        check(down(ago(60)), &[(ProblemKind::SinkDown, Level::Warning)]);
        check(down(ago(61)), &[(ProblemKind::SinkDown, Level::Failed)]);
    }

    #[test]
    fn a_sink_that_is_down_says_when_it_is_tried_next() {
        let said = |next_try| {
            let mut status = healthy();
            let error = "HTTP 404; check the url".to_owned();
            status.subscriptions[0].report.breaker = Some(BreakerReport { since: ago(9), next_try, error });
            problems(&status, &HealthLimits::default()).remove(0)
        };
        let problem = said(ago(-12));
        assert_eq!(
            problem.message,
            "the sink is considered down (circuit open) for 9 s, next try in 12 s: HTTP 404; check the url"
        );
        assert!(problem.advice.contains("by itself") && problem.advice.contains("change it"), "{problem:?}");
        assert!(said(ago(3)).message.contains(", next try now: "), "it is overdue");
    }

    #[test]
    fn events_that_are_tried_beyond_max_attempts_are_explained() {
        let three = |min_dead_age| {
            move |it: &mut SubscriptionStatus| {
                it.retrying = 1;
                it.retry = RetryPolicy { min_dead_age, ..it.retry.attempts(3) };
            }
        };
        check(three(Duration::ZERO), &[]);
        check(three(Duration::from_secs(3600)), &[(ProblemKind::TriedOn, Level::Warning)]);
        let mut status = healthy();
        three(Duration::from_secs(3600))(&mut status.subscriptions[0]);
        let message = problems(&status, &HealthLimits::default()).remove(0).message;
        assert!(message.starts_with("1 event is retried, also beyond max_attempts = 3: "), "{message}");
    }

    #[test]
    fn limits_and_dead_events_are_named() {
        check(|it| it.report.flood_guard = true, &[(ProblemKind::FloodGuard, Level::Failed)]);
        check(|it| it.report.stopped = Some("max_parked".to_owned()), &[(ProblemKind::Stopped, Level::Failed)]);
        check(|it| it.dead = 1, &[(ProblemKind::Dead, Level::Failed)]);
    }

    #[test]
    fn who_holds_the_log_is_named() {
        let mut status = healthy();
        status.log.holders = vec!["pid 4711".to_owned()];
        let problems = problems(&status, &HealthLimits::default());
        assert!(is_unhealthy(&problems) && problems[0].message.contains("pid 4711"), "{problems:?}");
    }

    #[test]
    fn a_transaction_may_hold_the_log_for_a_while() {
        let held = |seconds| {
            move |status: &mut Status| {
                status.log.holders = vec!["pid 4711".to_owned()];
                status.log.held_seconds = Some(seconds);
            }
        };
        check_status(held(60.0), &[(ProblemKind::LogHeld, Level::Warning)]);
        check_status(held(60.1), &[(ProblemKind::LogHeld, Level::Failed)]);
        check_status(|status| status.log.alarms = vec!["no leaf".into()], &[(ProblemKind::Alarm, Level::Warning)]);
    }
}
