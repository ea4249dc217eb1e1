use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::store::InstanceId;
use tokio::sync::{mpsc, watch};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use crate::connection::{PgConfig, Session};
use crate::error::Db;
use crate::ownership::{Role, session_name};

/// How long after a failure another session is made.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);

/// How long the other sessions of an instance are waited for once its lock is free: a killed process loses all at once, and the
/// server ends one after the other.
const SESSIONS_END_MAX: Duration = Duration::from_millis(100);
const SESSIONS_LOOK_INTERVAL: Duration = Duration::from_millis(2);

const WAIT_FOR_LOCK: &str = sql!(instance, "wait_for_lock");

/// How many cancels may come too late for what they were meant for.
const LATE_CANCELS_MAX: u32 = 2;

/// Waits for the end of another instance on a session of its own, never for longer than two seconds at a time.
pub(super) struct Waiter {
    pub(super) config: Arc<PgConfig>,
    pub(super) id: InstanceId,
    /// The instance whose end is to be told.
    pub(super) neighbours: watch::Receiver<Option<InstanceId>>,
    pub(super) ended: mpsc::UnboundedSender<InstanceId>,
}

impl Waiter {
    pub(super) async fn run(mut self) {
        // No session before there is something to wait for: a relay alone needs none.
        while self.neighbours.wait_for(Option::is_some).await.is_ok() {
            let Err(error) = self.serve().await else { return };
            tracing::debug!(?error, "the session that waits for locks was lost");
            tokio::time::sleep(RECONNECT_AFTER).await;
        }
    }

    /// Returns without an error when the instance leaves.
    async fn serve(&mut self) -> Db<()> {
        let session = Session::connect(&self.config, &session_name(&self.config, self.id, Role::Waiter), None).await?;
        // Prepared before anything is cancelled: a cancel that comes late must not hit this.
        for sql in [WAIT_FOR_LOCK, sql!(instance, "backends")] {
            session.statement(sql).await?;
        }
        let mut told = None;
        while self.neighbours.has_changed().is_ok() {
            let neighbour = *self.neighbours.borrow_and_update();
            if let Some(neighbour) = neighbour.filter(|id| told != Some(*id)) {
                if self.wait_for(&session, neighbour).await? {
                    self.sessions_end(&session, neighbour).await?;
                    told = Some(neighbour);
                    // Nobody listens when the instance ends.
                    let _ = self.ended.send(neighbour);
                }
            } else if self.neighbours.changed().await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Whether the neighbour's lock was granted before the time was over and another neighbour was asked for.
    async fn wait_for(&mut self, session: &Session, neighbour: InstanceId) -> Db<bool> {
        let statement = session.statement(WAIT_FOR_LOCK).await?;
        let (class, number) = (self.config.lock_class(), neighbour.0 as i32);
        let values: [&(dyn ToSql + Sync); 2] = [&class, &number];
        let waiting = session.query_one(&statement, &values);
        tokio::pin!(waiting);
        let mut cancelled = false;
        let row = loop {
            tokio::select! {
                row = &mut waiting => break row,
                changed = self.neighbours.changed(), if !cancelled => {
                    if changed.is_err() || *self.neighbours.borrow() != Some(neighbour) {
                        cancelled = true;
                        session.canceller().cancel().await?;
                    }
                }
            }
        };
        match row {
            Ok(row) => Ok(row.try_get(0)?),
            Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn sessions_end(&self, session: &Session, id: InstanceId) -> Db<()> {
        let names: Vec<String> = Role::AT_WORK.iter().map(|role| session_name(&self.config, id, *role)).collect();
        let statement = session.statement(sql!(instance, "backends")).await?;
        let deadline = Instant::now() + SESSIONS_END_MAX;
        let values: [&(dyn ToSql + Sync); 1] = [&names];
        while !uncancelled(|| session.query(&statement, &values)).await?.is_empty() && Instant::now() < deadline {
            tokio::time::sleep(SESSIONS_LOOK_INTERVAL).await;
        }
        Ok(())
    }
}

/// Asks again if the answer was cancelled: a cancel that was meant for a wait may come after its end, and then hits what is asked next.
async fn uncancelled<T, F>(ask: impl Fn() -> F) -> Result<T, tokio_postgres::Error>
where
    F: Future<Output = Result<T, tokio_postgres::Error>>,
{
    let mut left = LATE_CANCELS_MAX;
    loop {
        match ask().await {
            Err(error) if left > 0 && error.code() == Some(&SqlState::QUERY_CANCELED) => left -= 1,
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use pillarbox_testkit::postgres::Server;

    use super::*;

    #[tokio::test]
    async fn a_cancel_that_comes_late_does_not_end_the_session() {
        let database = Server::shared().create_database().unwrap();
        let (client, connection) = tokio_postgres::connect(database.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let asked = Cell::new(0);
        let sleep = "set statement_timeout = 1; select pg_sleep(60)";
        let ask = || {
            asked.set(asked.get() + 1);
            let sql = if asked.get() <= LATE_CANCELS_MAX { sleep } else { "reset statement_timeout; select 1" };
            client.batch_execute(sql)
        };
        uncancelled(ask).await.unwrap();
        assert_eq!(asked.get(), LATE_CANCELS_MAX + 1);
        let always = uncancelled(|| client.batch_execute(sleep)).await.unwrap_err();
        assert_eq!(always.code(), Some(&SqlState::QUERY_CANCELED));
    }
}
