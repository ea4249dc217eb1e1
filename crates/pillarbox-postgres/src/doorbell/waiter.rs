use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::InstanceId;
use tokio::sync::{mpsc, watch};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use crate::connection::{BELL, PgConfig, Session};
use crate::error::Db;
use crate::ownership::{Role, session_name};

/// How long after a failure another session is made.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);

/// How long the other sessions of an instance are waited for once its lock is free: a killed process loses all at once, and the
/// server ends one after the other.
const SESSIONS_END_MAX: Duration = Duration::from_millis(100);
const SESSIONS_LOOK_INTERVAL: Duration = Duration::from_millis(2);

const WAIT_FOR_LOCK: &str = "select wait_for_lock($1, $2, $3)";

/// How many cancels may come too late for what they were meant for.
const LATE_CANCELS_MAX: u32 = 2;

/// What to wait for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Orders {
    /// The instance whose end is to be told.
    pub(super) neighbour: Option<InstanceId>,
    /// Queue for the doorbell's lock, or keep it.
    pub(super) bell: bool,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// The doorbell's lock was granted.
    Granted,
    /// It is neither held nor queued for.
    Released,
    /// The session was lost, and what it held.
    Lost,
    /// The neighbour's lock is free.
    Ended(InstanceId),
}

/// Waits for locks on a session of its own, never for longer than two seconds at a time.
pub(super) struct Waiter {
    pub(super) config: Arc<PgConfig>,
    pub(super) id: InstanceId,
    pub(super) orders: watch::Receiver<Orders>,
    pub(super) news: mpsc::UnboundedSender<News>,
}

impl Waiter {
    pub(super) async fn run(mut self) {
        loop {
            // Not before there is something to wait for: a relay alone needs no such session.
            let orders = *self.orders.borrow_and_update();
            if orders == Orders::default() {
                if self.orders.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let lost = self.serve().await;
            self.tell(News::Lost);
            let Err(error) = lost else { return };
            tracing::debug!(?error, "the session that waits for locks was lost");
            tokio::time::sleep(RECONNECT_AFTER).await;
        }
    }

    /// Returns without an error when nobody gives orders any more.
    async fn serve(&mut self) -> Db<()> {
        let session = Session::connect(&self.config, &session_name(&self.config, self.id, Role::Waiter), None).await?;
        // Prepared before anything is cancelled: a cancel that comes late must not hit this.
        for sql in
            [WAIT_FOR_LOCK, include_str!("../sql/bell_release.sql"), include_str!("../sql/instance_backends.sql")]
        {
            session.statement(sql).await?;
        }
        let (mut held, mut asked, mut ended) = (false, false, None);
        while self.orders.has_changed().is_ok() {
            let orders = *self.orders.borrow_and_update();
            if orders.bell && !held {
                asked = true;
                held = self.wait_for(&session, BELL, false, |orders| orders.bell).await?;
                if held {
                    self.tell(News::Granted);
                }
            } else if !orders.bell && asked {
                // Asked for by the lock table: a cancel may have come just after the grant.
                let class = self.config.lock_class();
                let release = session.statement(include_str!("../sql/bell_release.sql")).await?;
                let values: [&(dyn ToSql + Sync); 2] = [&class, &BELL];
                uncancelled(|| session.query(&release, &values)).await?;
                (held, asked) = (false, false);
                self.tell(News::Released);
            } else if let Some(neighbour) = orders.neighbour.filter(|id| ended != Some(*id)) {
                let same = |now: &Orders| *now == orders;
                if self.wait_for(&session, neighbour.0 as i32, true, same).await? {
                    self.sessions_end(&session, neighbour).await?;
                    ended = Some(neighbour);
                    self.tell(News::Ended(neighbour));
                }
            } else if self.orders.changed().await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Whether the lock was granted before the time was over and the orders changed to what `keep` refuses.
    async fn wait_for(
        &mut self,
        session: &Session,
        number: i32,
        shared: bool,
        keep: impl Fn(&Orders) -> bool,
    ) -> Db<bool> {
        let statement = session.statement(WAIT_FOR_LOCK).await?;
        let class = self.config.lock_class();
        let values: [&(dyn ToSql + Sync); 3] = [&class, &number, &shared];
        let waiting = session.query_one(&statement, &values);
        tokio::pin!(waiting);
        let mut cancelled = false;
        let row = loop {
            tokio::select! {
                row = &mut waiting => break row,
                changed = self.orders.changed(), if !cancelled => {
                    if changed.is_err() || !keep(&self.orders.borrow()) {
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
        let statement = session.statement(include_str!("../sql/instance_backends.sql")).await?;
        let deadline = Instant::now() + SESSIONS_END_MAX;
        let values: [&(dyn ToSql + Sync); 1] = [&names];
        while !uncancelled(|| session.query(&statement, &values)).await?.is_empty() && Instant::now() < deadline {
            tokio::time::sleep(SESSIONS_LOOK_INTERVAL).await;
        }
        Ok(())
    }

    fn tell(&self, news: News) {
        // Nobody listens when the instance ends.
        let _ = self.news.send(news);
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
