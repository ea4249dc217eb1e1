use std::time::Duration;

use anyhow::{Context, Result};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use metrics_util::MetricKindMask;
use pillarbox::admin::{PausedBy, State, Status, SubscriptionStatus};
use pillarbox::store::RecoveryCause;
use pillarbox::{Mode, metric};
use tokio::time::Instant;

/// A gauge that was not set for so long is of a subscription that is gone, and goes too. All others are set whenever they are asked for.
const GAUGE_IDLE_MAX: Duration = Duration::from_secs(60);

/// The causes for which a lane comes from another instance.
const TAKEOVER_CAUSES: [&str; 2] = ["lock", "lease"];

/// Gathers this process's metrics and writes them as Prometheus text.
#[derive(Clone)]
pub(crate) struct Recorder {
    handle: PrometheusHandle,
}

impl Recorder {
    /// One that nothing is counted by.
    #[cfg(test)]
    pub(crate) fn detached() -> Self {
        Recorder { handle: PrometheusBuilder::new().build_recorder().handle() }
    }

    /// Installs the recorder for the whole process.
    pub(crate) fn install() -> Result<Self> {
        let gauges = MetricKindMask::GAUGE;
        let recorder = PrometheusBuilder::new().idle_timeout(gauges, Some(GAUGE_IDLE_MAX)).build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).ok().context("another recorder of metrics is installed already")?;
        describe();
        Ok(Recorder { handle })
    }

    /// All metrics as text, with the figures of a status that was read at this moment, if there is one.
    pub(crate) fn render(&self, status: Option<(Instant, &Status)>) -> String {
        metrics::gauge!(metric::BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        metrics::counter!(metric::REJOINS).increment(0);
        for cause in TAKEOVER_CAUSES {
            metrics::counter!(metric::TAKEOVERS, "cause" => cause).increment(0);
        }
        if let Some((read_at, status)) = status {
            metrics::gauge!(metric::STATUS_AGE).set(read_at.elapsed().as_secs_f64());
            status.subscriptions.iter().for_each(render_subscription);
        }
        self.handle.run_upkeep();
        self.handle.render()
    }
}

/// The figures of one subscription.
fn render_subscription(subscription: &SubscriptionStatus) {
    let name = &subscription.name;
    let gauge = |metric: &'static str, value: f64| metrics::gauge!(metric, "subscription" => name.clone()).set(value);
    gauge(metric::OLDEST_AGE, subscription.oldest_age_seconds.unwrap_or(0.0));
    gauge(metric::BACKLOG, subscription.pending as f64);
    gauge(metric::BREAKER_OPEN, f64::from(u8::from(subscription.report.breaker.is_some())));
    for by in [PausedBy::Operator, PausedBy::Receiver] {
        let paused = f64::from(u8::from(subscription.paused_by == Some(by)));
        metrics::gauge!(metric::PAUSED, "subscription" => name.clone(), "by" => by.name()).set(paused);
    }
    for (state, count) in [
        (State::Delayed, subscription.delayed),
        (State::Processing, subscription.processing),
        (State::Retrying, subscription.retrying),
        (State::Blocked, subscription.blocked),
        (State::Dead, subscription.dead),
    ] {
        metrics::gauge!(metric::DELIVERIES, "subscription" => name.clone(), "state" => state.name()).set(count as f64);
    }
    // A counter that has counted nothing yet is there all the same, so that a rate over it is 0 and not absent.
    metrics::counter!(metric::DELIVERED, "subscription" => name.clone()).increment(0);
    metrics::counter!(metric::DIED, "subscription" => name.clone()).increment(0);
    if subscription.mode == Mode::Queue {
        render_queue(subscription);
    }
}

/// The figures that only queues have.
fn render_queue(subscription: &SubscriptionStatus) {
    let name = &subscription.name;
    let age = subscription.oldest_processing_seconds.unwrap_or(0.0);
    metrics::gauge!(metric::OLDEST_PROCESSING_AGE, "subscription" => name.clone()).set(age);
    metrics::counter!(metric::REFUSED, "subscription" => name.clone()).increment(0);
    for cause in [RecoveryCause::Crash, RecoveryCause::Lease, RecoveryCause::Timeout] {
        metrics::counter!(metric::RECOVERED, "subscription" => name.clone(), "cause" => cause.name()).increment(0);
    }
}

fn describe() {
    metrics::describe_counter!(metric::DELIVERED, "Events that a sink took");
    metrics::describe_counter!(metric::FAILURES, "Failed attempts");
    metrics::describe_counter!(metric::DIED, "Events that became dead");
    metrics::describe_counter!(metric::TAKEOVERS, "Lanes taken from another instance");
    metrics::describe_counter!(
        metric::PRUNED_UNDELIVERED,
        "Positions that retention removed before they were delivered"
    );
    metrics::describe_counter!(metric::REJOINS, "How often this relay has joined again under a new number");
    metrics::describe_counter!(
        metric::RECOVERED,
        "Claims of queues taken from instances that would no longer end them"
    );
    metrics::describe_counter!(metric::REFUSED, "Claims that this relay ended after they had been taken from it");
    metrics::describe_counter!(metric::STORE_ERRORS, "Failed calls to the database");
    metrics::describe_gauge!(metric::OLDEST_AGE, "The age of the oldest event not yet delivered, in seconds");
    metrics::describe_gauge!(
        metric::OLDEST_PROCESSING_AGE,
        "For how long the longest-running delivery of a queue has been worked on, in seconds"
    );
    metrics::describe_gauge!(metric::BACKLOG, "Events that wait to be delivered");
    metrics::describe_gauge!(metric::DELIVERIES, "Deliveries of the slow path");
    metrics::describe_gauge!(metric::BREAKER_OPEN, "1 while the sink is considered down");
    metrics::describe_gauge!(metric::STATUS_AGE, "The age of the gauges that were read from the database, in seconds");
    metrics::describe_gauge!(metric::BUILD_INFO, "1, with the version of this process");
    metrics::describe_gauge!(metric::PAUSED, "1 while the subscription is paused");
}
