use std::sync::Arc;

use futures_util::future::BoxFuture;
use pillarbox::PollRequest;
use tokio_postgres::Row;

use crate::connection::Session;
use crate::error::Db;
use crate::reader::{Answers, Gathered, Reader, ScanPlan, writer_of};

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
    /// What is wanted and what is visible are read by two statements.
    WantedApart,
    /// What was read is returned without being made durable.
    NoBarrier,
    /// A settlement looks at the epoch without locking the cursor.
    FenceInSubselect,
    /// A lane is loaded before its take-over is committed.
    LoadBeforeCommit,
    /// The doorbell is let go without waiting for the writers that saw it held.
    SleepWithoutWriters,
}

/// What is called after each step of a poll, with how many are done.
pub type Hook = Arc<dyn Fn(usize) -> BoxFuture<'static, ()> + Send + Sync>;

/// What a test does to a store.
#[derive(Clone, Default)]
pub(crate) struct Laboratory {
    pub(crate) mutant: Option<Mutant>,
    pub(crate) hook: Option<Hook>,
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
    let begin = match laboratory.mutant {
        Some(Mutant::RepeatableRead) => "begin isolation level repeatable read read only",
        _ => "begin isolation level read committed read only",
    };
    session.batch_execute(begin).await?;
    let (mut horizon, mut writers, mut scans) = (0, Vec::new(), Vec::new());
    for (done, step) in steps.into_iter().enumerate() {
        match step {
            Step::Horizon => horizon = read_horizon(session, laboratory.mutant).await?,
            Step::Writers => {
                let rows: Vec<Row> = session.query(include_str!("sql/writers.sql"), &[]).await?;
                writers = rows.iter().map(|row| writer_of(row.get(0))).collect();
            }
            Step::Rows => scans = read_rows(reader, session, &plan, laboratory).await?,
        }
        if let Some(hook) = &laboratory.hook {
            hook(done + 1).await;
        }
    }
    let after = session.query_one(include_str!("sql/after_scan.sql"), &[]).await?;
    session.batch_execute("commit").await?;
    Ok(Answers {
        horizon,
        isolation: "read committed".into(),
        writers: (!request.without_writers).then_some(writers),
        scans: plan.finish(scans, horizon),
        log_start: after.get(0),
        incarnation: after.get(1),
        volatile: after.get::<_, bool>(2) && laboratory.mutant != Some(Mutant::NoBarrier),
    })
}

async fn read_horizon(session: &Session, mutant: Option<Mutant>) -> Db<i64> {
    let sql = match mutant {
        Some(Mutant::SelectLastValue) => {
            "select case when is_called then last_value else 0 end from event_position_seq"
        }
        _ => include_str!("sql/horizon.sql"),
    };
    Ok(session.query_one(sql, &[]).await?.get(0))
}

/// The broken variant reads the wanted events first, and what is visible by another statement.
async fn read_rows(
    reader: &mut Reader,
    session: &Session,
    plan: &ScanPlan<'_>,
    laboratory: &Laboratory,
) -> Db<Vec<Gathered>> {
    let first = reader.scan(session, plan).await?;
    if laboratory.mutant != Some(Mutant::WantedApart) {
        return Ok(first);
    }
    if let Some(hook) = &laboratory.hook {
        hook(BETWEEN_STATEMENTS).await;
    }
    let mut second = reader.scan(session, plan).await?;
    second.iter_mut().zip(first).for_each(|(visible, wanted)| visible.events = wanted.events);
    Ok(second)
}

/// The step that a hook is given between the two statements that should have been one.
pub const BETWEEN_STATEMENTS: usize = 100;
