use pillarbox::store::{AttemptError, ClaimEnd, ClaimFate, ERRORS_KEPT_MAX};
use tokio_postgres::types::ToSql;

use super::Keys;
use crate::connection::Session;
use crate::error::Db;
use crate::types::Time;

/// What ending claims led to.
pub(crate) struct Finished {
    /// Which claims were still this instance's, in the order that was asked.
    pub(crate) ended: Vec<bool>,
    /// There are rows now that others can claim.
    pub(crate) made_ready: bool,
}

/// Ends claims of instance `me` in one statement, and lets the next of their keys be found.
pub(crate) async fn finish(session: &Session, me: i32, ends: &[ClaimEnd]) -> Db<Finished> {
    let mut finished = Finished { ended: vec![false; ends.len()], made_ready: false };
    if ends.is_empty() {
        return Ok(finished);
    }
    // In the order in which operators lock them, or two could wait for each other.
    let mut order: Vec<usize> = (0..ends.len()).collect();
    order.sort_by_key(|index| (ends[*index].subscription, ends[*index].position));
    let sorted = || order.iter().map(|index| &ends[*index]);
    let subscriptions: Vec<i64> = sorted().map(|end| end.subscription.0).collect();
    let positions: Vec<i64> = sorted().map(|end| end.position).collect();
    let claims: Vec<i64> = sorted().map(|end| end.claim.0).collect();
    let fates: Vec<&str> = sorted().map(|end| fate_name(&end.fate)).collect();
    let failed = || {
        sorted().map(|end| match &end.fate {
            ClaimFate::Failed(failed) => Some(failed),
            ClaimFate::Done | ClaimFate::Back => None,
        })
    };
    let attempts: Vec<Option<i32>> = failed().map(|failed| Some(failed?.attempts as i32)).collect();
    let due_at: Vec<Option<Time>> = failed().map(|failed| Some(Time(failed?.due_at))).collect();
    let errors: Vec<Option<String>> = failed().map(|failed| Some(json(&failed?.error))).collect();
    let kept = ERRORS_KEPT_MAX as i64;
    let values: [&(dyn ToSql + Sync); 9] =
        [&me, &subscriptions, &positions, &claims, &fates, &attempts, &due_at, &errors, &kept];
    let statement = session.statement(sql!(queue, "end")).await?;
    let mut keys = Keys::default();
    for row in session.query(&statement, &values).await? {
        let index = order[row.try_get::<_, i64>("ordinal")? as usize - 1];
        finished.ended[index] = true;
        finished.made_ready |= ends[index].fate != ClaimFate::Done;
        keys.note(row.try_get("subscription")?, row.try_get("key")?);
    }
    finished.made_ready |= keys.promote_or_leave(session).await > 0;
    Ok(finished)
}

fn fate_name(fate: &ClaimFate) -> &'static str {
    match fate {
        ClaimFate::Done => "done",
        ClaimFate::Back => "back",
        ClaimFate::Failed(failed) => failed.state.name(),
    }
}

fn json(error: &AttemptError) -> String {
    serde_json::to_string(&error.clone().storable()).expect("an error is JSON")
}
