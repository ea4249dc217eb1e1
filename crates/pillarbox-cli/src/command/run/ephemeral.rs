use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pillarbox::admin::{Change, Operator, Status};
use pillarbox::sink::Sink;
use pillarbox::{RetryPolicy, Subscription};
use tokio::sync::Notify;
use tracing::{info, warn};
use uuid::Uuid;

use crate::config::{Config, EPHEMERAL_PREFIX, SinkSettings};
use crate::exit::chain;
use crate::log::Log;
use crate::sink;

/// One that was killed and not removed by a later run holds retention back for no longer than this.
const HOLD: Duration = Duration::from_secs(3600);

/// A subscription that prints all events and ends with its process.
pub(super) struct Ephemeral {
    name: String,
}

impl Ephemeral {
    pub(super) fn new() -> Self {
        Ephemeral { name: format!("{EPHEMERAL_PREFIX}stdout.{}", Uuid::new_v4().simple()) }
    }

    /// What the relay is to run.
    pub(super) fn plan(
        &self,
        config: &Config,
        source: &str,
        closed: &Arc<Notify>,
    ) -> Result<(Subscription, Arc<dyn Sink>)> {
        let mut subscription = Subscription::new(&self.name);
        subscription.retry = RetryPolicy::sink();
        subscription.workers = config.relay.workers;
        subscription.batch_size = config.relay.batch_size;
        subscription.hold = Some(HOLD);
        Ok((subscription, sink::build(&SinkSettings::stdout(), source, closed)?))
    }

    /// Removes it, once no relay runs it.
    pub(super) async fn remove(&self, operator: &Log) {
        delete(operator, &self.name).await;
    }
}

/// Removes what killed processes have left: no process will run it again.
pub(super) async fn remove_left_over(operator: &Log, status: &Status) {
    let left = |name: &str| name.starts_with(EPHEMERAL_PREFIX);
    for one in status.subscriptions.iter().filter(|one| one.orphaned && left(&one.name)) {
        if delete(operator, &one.name).await {
            info!(subscription = one.name, "removed an ephemeral subscription whose process was killed");
        }
    }
}

/// A failure is no reason not to run, nor to fail: the next run tries again, and `hold` lets retention go on.
async fn delete(operator: &Log, name: &str) -> bool {
    match operator.change(&Change::Delete(name.to_owned()), false).await {
        Ok(_) => true,
        Err(error) => {
            warn!(subscription = name, error = chain(&error.into()), "an ephemeral subscription could not be removed");
            false
        }
    }
}
