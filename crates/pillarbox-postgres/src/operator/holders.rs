use pillarbox::admin::snapshot::{Snapshot, SubscriptionRow, spoken};
use pillarbox::store::RangeSet;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use crate::error::Db;

/// How many are named at most.
const HOLDERS_MAX: i64 = 10;

/// A transaction that has written for less is about to end and is not reported.
const HELD_SECONDS_MIN: f64 = 0.1;

/// A snapshot that is older keeps vacuum from its work for so long that it is reported.
pub(super) const SNAPSHOT_SECONDS_MAX: f64 = 300.0;

/// How many events above the lowest floor are looked through for holes.
const HOLES_LOOKED_THROUGH_MAX: i64 = 10_000;

/// How many stretches of holes are named.
const HOLES_NAMED_MAX: usize = 10;

/// A session or a prepared transaction that does not end.
pub(super) struct Holder {
    who: Who,
    user: Option<String>,
    application: Option<String>,
    state: Option<String>,
    /// Since its transaction began; None: hidden from this role.
    pub(super) seconds: Option<f64>,
    /// The role that looks.
    looks: String,
}

enum Who {
    Session(i32),
    /// Its name, as a literal.
    Prepared(String),
}

impl Holder {
    /// None: it has ended while it was looked at.
    fn of(row: &Row) -> Db<Option<Holder>> {
        let who = match (row.try_get("gid")?, row.try_get("pid")?) {
            (Some(gid), _) => Who::Prepared(gid),
            (None, Some(pid)) => Who::Session(pid),
            (None, None) => return Ok(None),
        };
        Ok(Some(Holder {
            who,
            user: row.try_get("role")?,
            application: row.try_get("application_name")?,
            state: row.try_get("state")?,
            seconds: row.try_get("seconds")?,
            looks: row.try_get("looks")?,
        }))
    }

    fn all(rows: &[Row]) -> Db<Vec<Holder>> {
        rows.iter().filter_map(|row| Holder::of(row).transpose()).collect()
    }

    /// Who it is and for how long.
    fn name(&self) -> String {
        let mut name = match &self.who {
            Who::Prepared(gid) => format!("prepared transaction {gid}"),
            Who::Session(pid) => format!("pid {pid}"),
        };
        let mut facts = Vec::new();
        facts.extend(self.user.as_ref().map(|user| format!("user {user}")));
        facts.extend(
            self.application.iter().filter(|name| !name.is_empty()).map(|name| format!("application '{name}'")),
        );
        facts.extend(self.state.clone());
        match self.seconds {
            Some(seconds) => facts.push(format!("for {}", spoken(seconds))),
            None => facts.push(format!(
                "its age and state are hidden from this role, `grant pg_read_all_stats to {}` shows them",
                self.looks
            )),
        }
        name.push_str(&format!(" ({})", facts.join(", ")));
        name
    }

    /// The command that ends it.
    pub(super) fn end(&self) -> String {
        match &self.who {
            Who::Prepared(gid) => format!("`rollback prepared {gid}` (or `commit prepared {gid}`)"),
            Who::Session(pid) => format!("`select pg_terminate_backend({pid})`"),
        }
    }

    /// That it has published and not ended.
    pub(super) fn of_floor(&self) -> String {
        format!("{}, which has published and not ended; end it with {}", self.name(), self.end())
    }

    /// That it keeps a snapshot.
    pub(super) fn of_snapshot(&self) -> String {
        format!("{} keeps vacuum from removing old rows", self.name())
    }
}

/// Who has published and not ended: no floor rises above what they may still commit.
pub(super) async fn of_floor(tx: &Transaction<'_>) -> Db<Vec<Holder>> {
    let rows = tx.query_typed(sql!(diagnosis, "holders"), &[(&HOLDERS_MAX, Type::INT8)]).await?;
    let mut holders = Holder::all(&rows)?;
    holders.retain(|holder| holder.seconds.is_none_or(|seconds| seconds >= HELD_SECONDS_MIN));
    Ok(holders)
}

/// The sessions that keep the oldest snapshots of this database for too long.
pub(super) async fn of_snapshots(tx: &Transaction<'_>) -> Db<Vec<Holder>> {
    let rows = tx.query_typed(sql!(diagnosis, "snapshot_holders"), &[(&HOLDERS_MAX, Type::INT8)]).await?;
    let mut holders = Holder::all(&rows)?;
    holders.retain(|holder| holder.seconds.is_some_and(|seconds| seconds >= SNAPSHOT_SECONDS_MAX));
    Ok(holders)
}

/// The same for `status`.
pub(super) async fn alarms(tx: &Transaction<'_>) -> Db<Vec<String>> {
    let holders = of_snapshots(tx).await?;
    Ok(holders.iter().map(|holder| format!("{}; end it with {}", holder.of_snapshot(), holder.end())).collect())
}

/// The positions that are drawn and neither visible nor closed: events that may still be committed.
pub(super) async fn holes(tx: &Transaction<'_>, snapshot: &Snapshot) -> Db<Option<String>> {
    let floors = snapshot.subscriptions.iter().map(SubscriptionRow::floor);
    let lowest = floors.min().unwrap_or(0).max(snapshot.log_start - 1);
    let from = [(&lowest as _, Type::INT8), (&HOLES_LOOKED_THROUGH_MAX as _, Type::INT8)];
    let last = sql!(event, "looked_through");
    let dead = sql!(dead_range, "above");
    let (gaps, last, dead) = tokio::try_join!(
        tx.query_typed(sql!(event, "holes"), &from),
        tx.query_typed_one(last, &from),
        tx.query_typed(dead, &from[..1]),
    )?;
    let mut holes = ranges(&gaps)?;
    if last.try_get::<_, i64>("count")? < HOLES_LOOKED_THROUGH_MAX {
        holes.insert_range(last.try_get::<_, Option<i64>>("last")?.unwrap_or(lowest) + 1, snapshot.horizon);
    }
    holes.subtract(&ranges(&dead)?);
    if holes.is_empty() {
        return Ok(None);
    }
    let named: RangeSet = holes.iter().take(HOLES_NAMED_MAX).collect();
    let more = if holes.len() > HOLES_NAMED_MAX { " and others" } else { "" };
    Ok(Some(format!("drawn and not committed: {named}{more}; no floor rises above that until it is decided")))
}

fn ranges(rows: &[Row]) -> Db<RangeSet> {
    let mut set = RangeSet::new();
    for row in rows {
        let (low, high): (i64, i64) = (row.try_get("low")?, row.try_get("high")?);
        set.insert_range(low, high);
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_hidden_is_said() {
        let mut holder = Holder {
            who: Who::Session(7),
            user: Some("app".into()),
            application: Some("shop".into()),
            state: Some("idle in transaction".into()),
            seconds: Some(45.0),
            looks: "viewer".into(),
        };
        let said = "pid 7 (user app, application 'shop', idle in transaction, for 45 s), which has published and not ended; \
                    end it with `select pg_terminate_backend(7)`";
        assert_eq!(holder.of_floor(), said);
        (holder.seconds, holder.state) = (None, None);
        assert!(holder.of_floor().contains("`grant pg_read_all_stats to viewer`"), "{}", holder.of_floor());
        holder.who = Who::Prepared("'it''s'".into());
        assert!(holder.of_floor().contains("`rollback prepared 'it''s'`"), "{}", holder.of_floor());
    }
}
