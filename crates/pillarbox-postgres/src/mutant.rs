use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use pillarbox::Result;
use pillarbox::store::{Epoch, LaneRef, LaneState, PollRequest, Settlement, Store, Take};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::connection::Session;
use crate::error::Db;
use crate::queue;
use crate::reader::{Answers, Gathered, Reader, ScanPlan, SeenWriter};
use crate::settle::{Statements, check_horizon, close_dead, fence, write_cursors, write_deliveries};

/// Deliberately broken variants of the store; the tests must find each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// The writers are read before the horizon.
    WritersBeforeHorizon,
    /// The rows are read before the horizon and the writers.
    RowsBeforeHorizon,
    /// The horizon is the sequence's `last_value`, which can be ahead of the truth.
    SelectLastValue,
    /// All statements of a poll see one snapshot.
    RepeatableRead,
    /// What is wanted is read by one statement, and what is visible by the next.
    WantedApart,
    /// What is visible is read by one statement, and what is wanted by the next.
    VisibleApart,
    /// What was read is returned without being made durable.
    NoBarrier,
    /// The same where the rows alone are read, in one statement, and where single events are fetched.
    NoBarrierAtAGlance,
    /// A settlement looks at the epoch without locking the cursor.
    FenceInSubselect,
    /// A lane is loaded before its take-over is committed.
    LoadBeforeCommit,
    /// A relay falls asleep without watching the writers that saw no relay asleep.
    SleepWithoutWriters,
}

/// What is called after each step of a poll with how many are done, and elsewhere with one of the numbers below.
pub type Hook = Arc<dyn Fn(usize) -> BoxFuture<'static, ()> + Send + Sync>;

/// What a hook is given between two statements of a poll that should have been one.
pub const BETWEEN_STATEMENTS: usize = 100;

/// What a hook is given in a settlement, plus how many of its steps are done.
pub const SETTLE_STEPS: usize = 200;

/// What a hook is given before lanes are taken.
pub const BEFORE_TAKE: usize = 300;

/// The advisory lock that a test holds to stop a poll in the middle of the statement that reads the horizon: after the
/// server has found the sequence's row, before it looks into it.
pub const HORIZON_GATE: i64 = 1_705_030_400;

/// What a test does to a store.
#[derive(Clone)]
pub(crate) struct Laboratory {
    mutant: Option<Mutant>,
    hook: Option<Hook>,
    /// What was loaded too early.
    loaded: Arc<Mutex<Option<Vec<Option<LaneState>>>>>,
}

impl Laboratory {
    pub(crate) fn new(mutant: Option<Mutant>, hook: Option<Hook>) -> Self {
        Laboratory { mutant, hook, loaded: Arc::default() }
    }

    /// Polls go one step at a time. A glance has a single step and stays as it is, but for its barrier.
    pub(crate) fn is_stepwise(&self) -> bool {
        self.mutant != Some(Mutant::NoBarrierAtAGlance)
    }

    async fn call(&self, step: usize) {
        if let Some(hook) = &self.hook {
            hook(step).await;
        }
    }

    /// The broken variant loads the lanes that it is about to take.
    pub(crate) async fn before_take(&self, store: &PostgresStore, lanes: &[Take]) -> Result<()> {
        if self.mutant == Some(Mutant::LoadBeforeCommit) {
            let lanes: Vec<(LaneRef, Epoch)> = lanes.iter().map(|take| (take.lane, take.expected)).collect();
            let states = store.load(&lanes).await?;
            *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Some(states);
        }
        self.call(BEFORE_TAKE).await;
        Ok(())
    }

    /// What the broken variant has loaded instead of what is asked for now.
    pub(crate) fn loaded(&self) -> Option<Vec<Option<LaneState>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The steps of a poll in the order in which they are taken.
#[derive(Debug, Clone, Copy)]
enum Step {
    Horizon,
    Writers,
    Rows,
}

/// A poll one step at a time, so that a test can let others act in between; broken, if the laboratory says so.
pub(crate) async fn ask(
    reader: &mut Reader,
    session: &Session,
    request: &PollRequest,
    laboratory: &Laboratory,
) -> Db<Answers> {
    let steps = match laboratory.mutant {
        Some(Mutant::WritersBeforeHorizon) => [Step::Writers, Step::Horizon, Step::Rows],
        Some(Mutant::RowsBeforeHorizon) => [Step::Rows, Step::Horizon, Step::Writers],
        _ => [Step::Horizon, Step::Writers, Step::Rows],
    };
    let plan = ScanPlan::new(session, request, usize::MAX).await?;
    let one_snapshot = laboratory.mutant == Some(Mutant::RepeatableRead);
    if one_snapshot {
        session.batch_execute(sql!(session, "begin_snapshot")).await?;
    }
    let (mut horizon, mut writers, mut scans) = (0, Vec::new(), Vec::new());
    for (done, step) in steps.into_iter().enumerate() {
        match step {
            Step::Horizon => horizon = read_horizon(session, laboratory.mutant).await?,
            Step::Writers => {
                let rows: Vec<Row> = session.query(sql!(event, "writers"), &[]).await?;
                writers = rows.iter().map(SeenWriter::of).collect::<Db<_>>()?;
            }
            Step::Rows => scans = read_rows(reader, session, &plan, laboratory).await?,
        }
        laboratory.call(done + 1).await;
    }
    let after = session.query_one(sql!(meta, "after_scan"), &[]).await?;
    if one_snapshot {
        session.batch_execute(sql!(session, "commit")).await?;
    }
    Ok(Answers {
        horizon,
        clock: pillarbox::Timestamp::now(),
        writers: (!request.without_writers).then_some(writers),
        scans: plan.finish(scans, horizon),
        log_start: after.get("log_start"),
        incarnation: after.get("incarnation"),
        volatile: after.get::<_, bool>("is_volatile") && laboratory.mutant != Some(Mutant::NoBarrier),
    })
}

async fn read_horizon(session: &Session, mutant: Option<Mutant>) -> Db<i64> {
    let sql = match mutant {
        Some(Mutant::SelectLastValue) => {
            sql!(event, "last_value")
        }
        _ => sql!(event, "horizon"),
    };
    let gated = format!("{sql} where pg_advisory_xact_lock_shared({HORIZON_GATE}) is not null");
    Ok(session.query_one(&gated, &[]).await?.get(0))
}

/// The broken variants read twice, and take what is wanted from one answer and what is visible from the other.
async fn read_rows(
    reader: &mut Reader,
    session: &Session,
    plan: &ScanPlan<'_>,
    laboratory: &Laboratory,
) -> Db<Vec<Gathered>> {
    let mut first = reader.scan(session, plan).await?;
    if !matches!(laboratory.mutant, Some(Mutant::WantedApart | Mutant::VisibleApart)) {
        return Ok(first);
    }
    laboratory.call(BETWEEN_STATEMENTS).await;
    let mut second = reader.scan(session, plan).await?;
    first.iter_mut().zip(&mut second).for_each(|(first, second)| std::mem::swap(&mut first.events, &mut second.events));
    Ok(if laboratory.mutant == Some(Mutant::WantedApart) { second } else { first })
}

/// A settlement one step at a time. The broken variant does not lock the cursor until it writes it, after the deliveries.
pub(crate) async fn settle(
    session: &Session,
    settlement: &Settlement,
    me: Option<i32>,
    laboratory: &Laboratory,
) -> Db<Vec<bool>> {
    let broken = laboratory.mutant == Some(Mutant::FenceInSubselect);
    let locking = sql!(cursor, "lock");
    let looking = locking.replace("for update of c", "");
    assert_ne!(looking, locking, "the fence is a lock");
    let lock = session.prepare(if broken { &looking } else { locking }).await?;
    let statements = Statements::prepare(session).await?;
    session.batch_execute(sql!(session, "begin")).await?;
    let answers = fence(session, &lock, settlement).await?;
    check_horizon(session, &statements, &settlement.lanes).await?;
    laboratory.call(SETTLE_STEPS + 1).await;
    write_deliveries(session, &statements, &settlement.lanes).await?;
    queue::put(session, &statements.queue, &settlement.lanes, me).await?;
    laboratory.call(SETTLE_STEPS + 2).await;
    write_cursors(session, &statements, &settlement.lanes).await?;
    laboratory.call(SETTLE_STEPS + 3).await;
    close_dead(session, &statements, &settlement.closed).await?;
    session.batch_execute(sql!(session, "commit")).await?;
    Ok(answers)
}
