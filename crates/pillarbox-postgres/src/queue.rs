mod claim;
mod finish;
mod put;
mod recover;

use std::collections::BTreeSet;

pub(crate) use self::claim::Claiming;
pub(crate) use self::finish::finish;
pub(crate) use self::put::{put, put_statement};
pub(crate) use self::recover::{cause_of, recover, recover_by_operator};
use crate::connection::Session;
use crate::error::Db;

/// Keys of queues that may have another head once a transaction is committed, by subscription.
#[derive(Debug, Default)]
pub(crate) struct Keys(BTreeSet<(i64, String)>);

impl Keys {
    /// Notes a key, if there is one.
    pub(crate) fn note(&mut self, subscription: i64, key: Option<String>) {
        self.0.extend(key.map(|key| (subscription, key)));
    }

    /// Lets the head of each key be found by claims; of how many it was not known. Only after the commit of what made them heads:
    /// a transaction that adds rows to a key at the same time does the same after its own commit, and the later one sees the other.
    pub(crate) async fn promote(self, session: &Session) -> Db<u64> {
        if self.0.is_empty() {
            return Ok(0);
        }
        let (subscriptions, keys): (Vec<i64>, Vec<String>) = self.0.into_iter().unzip();
        let statement = session.statement(sql!(queue, "promote")).await?;
        Ok(session.query_one(&statement, &[&subscriptions, &keys]).await?.try_get::<_, i64>(0)? as u64)
    }

    /// The same after a commit that counts whatever becomes of this: a claim finds what was left.
    pub(crate) async fn promote_or_leave(self, session: &Session) -> u64 {
        self.promote(session).await.unwrap_or_else(|error| {
            tracing::debug!(error = %pillarbox::Error::from(error), "the next events of some keys wait until a claim finds them");
            0
        })
    }
}
