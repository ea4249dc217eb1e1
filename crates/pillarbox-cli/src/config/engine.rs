use std::time::Duration;

use pillarbox::admin::PrunePolicy;
use pillarbox::config::{EngineConfig, Recovery};
use pillarbox::{Filter, Mode, RelayConfig, RetryPolicy, Subscription, Timestamp};
use pillarbox_sinks::duration;

use super::file::{Config, SubscriptionSettings};

impl Config {
    /// How the engine's relay is to work.
    pub(crate) fn relay(&self) -> RelayConfig {
        // The watchdog is the relay's, so the most impatient subscription sets it.
        let poll_interval = self.subscriptions.iter().map(|subscription| subscription.poll_interval).min();
        let default = EngineConfig::default();
        let engine = EngineConfig {
            lease_ttl: self.relay.lease_ttl,
            beat_interval: self.beat_interval(default.beat_interval),
            poll_interval: poll_interval.unwrap_or(self.relay.poll_interval),
            debounce: self.relay.debounce,
            in_flight: self.relay.in_flight,
            max_parked: self.relay.max_parked,
            max_blocked: self.relay.max_blocked,
            recovery: Recovery {
                enabled: self.recovery.enabled,
                profile: self.recovery.profile,
                check_interval: self.recovery.check_interval,
            },
            // Relays that start together must not retry together.
            seed: Timestamp::now().0 as u64 ^ u64::from(std::process::id()),
            ..default
        };
        let retention = Some(self.prune_policy());
        RelayConfig { engine, shutdown_grace: self.relay.shutdown_grace, retention, ..RelayConfig::default() }
    }

    /// How often this relay gives a sign of life: three times before another relay could take it for dead.
    fn beat_interval(&self, default: Duration) -> Duration {
        let queues = self.subscriptions.iter().filter(|subscription| subscription.mode == Mode::Queue);
        let patience = queues.map(|queue| queue.processing_timeout).chain([self.relay.lease_ttl]).min();
        patience.map_or(default, |patience| default.min(patience / 3))
    }

    /// What is allowed and may not be what was meant.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let tried_on = self.subscriptions.iter().filter(|subscription| subscription.retry.outlasts_attempts());
        let warning = |subscription: &SubscriptionSettings| {
            let RetryPolicy { max_attempts, min_dead_age, .. } = subscription.retry;
            let (age, take) = (duration::format(min_dead_age), subscription.retry.attempts_take());
            format!(
                "subscription '{}': retry.max_attempts = {max_attempts} are used up after about {take:?}, but nothing is dead before \
                 retry.min_dead_age = \"{age}\": until then failing events are tried more often than that; lower min_dead_age if you \
                 mean the attempts",
                subscription.name
            )
        };
        tried_on.map(warning).collect()
    }

    /// What retention may remove.
    pub(crate) fn prune_policy(&self) -> PrunePolicy {
        PrunePolicy {
            keep: self.retention.keep,
            dead: self.retention.dead,
            dedup_window: self.dedup.window,
            inbox: self.retention.inbox,
            ..PrunePolicy::default()
        }
    }
}

impl SubscriptionSettings {
    /// The engine's subscription.
    pub(crate) fn engine(&self) -> Subscription {
        Subscription {
            name: self.name.clone(),
            filter: Filter { topics: self.topics.clone(), types: self.types.clone() },
            mode: self.mode,
            lanes: self.lanes,
            on_dead: self.on_dead,
            start: self.start,
            hold: self.hold,
            retry: self.retry,
            processing_timeout: self.processing_timeout,
            heartbeat_timeout: self.heartbeat_timeout,
            workers: self.workers,
            batch_size: self.batch_size,
        }
    }
}
