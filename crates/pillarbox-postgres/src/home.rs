use std::sync::Arc;

use pillarbox::store::{FormerFilters, RangeSet, SubscriptionId};
use pillarbox::{ErrorKind, Position, Result};
use tokio_postgres::error::SqlState;
use tokio_postgres::{GenericClient, Transaction};
use uuid::Uuid;

use crate::connection::{PgConfig, Session};
use crate::error::{Db, DbError};
use crate::migrate;
use crate::ownership::put_former_filters;

/// The most names under which a server is remembered; the oldest is forgotten.
const NAMES_MAX: usize = 16;

/// Where a log lives. One that finds itself elsewhere is a copy or was restored, and a copy must not deliver to real receivers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Home {
    /// The identifier of the cluster. None where the role may not read it.
    system_identifier: Option<String>,
    database: String,
    database_oid: i64,
    /// A dump that is restored makes the table again, also in the same database.
    event_oid: i64,
    /// None on a standby.
    timeline: Option<i32>,
    /// Where the server says that it listens. None from its own host.
    address: Option<String>,
    port: i32,
    /// The names under which it was reached there. A copy of a cluster has the same identifier and the same timeline, and is told
    /// apart by this alone: another address or port, under another name.
    reached_as: Vec<String>,
}

/// What the comparison of where a log was with where it is says.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// It is at home, and there is nothing to write down.
    AtHome,
    /// It is at home, and what is known about that has changed.
    Changed,
    /// The server is another timeline of itself: a standby was promoted, or a backup was restored in its place.
    Promoted { from: i32, to: i32 },
    /// It is somewhere else; in what way.
    Foreign(String),
}

impl Home {
    async fn here(session: &Session) -> Db<Self> {
        let row = session.query_one(sql!(home, "here"), &[]).await?;
        let system_identifier = match row.get::<_, bool>("tells_system") {
            true => Some(session.query_one(sql!(home, "system_identifier"), &[]).await?.get(0)),
            false => None,
        };
        Ok(Home {
            system_identifier,
            database: row.get("database"),
            database_oid: row.get("database_oid"),
            event_oid: row.get("event_oid"),
            timeline: row.get("timeline"),
            address: row.get("address"),
            port: row.get("port"),
            reached_as: name_of(session.config()).into_iter().collect(),
        })
    }

    /// The home that the log remembers, and its identity.
    async fn known(client: &impl GenericClient) -> Db<(Option<Self>, Uuid)> {
        let row = client.query_one(sql!(home, "known"), &[]).await?;
        let known = row.get::<_, Option<i64>>("database_oid").map(|database_oid| Home {
            system_identifier: row.get("system_identifier"),
            database: row.get::<_, Option<String>>("database").unwrap_or_default(),
            database_oid,
            event_oid: row.get::<_, Option<i64>>("event_oid").unwrap_or_default(),
            timeline: row.get("timeline"),
            address: row.get("address"),
            port: row.get::<_, Option<i32>>("port").unwrap_or_default(),
            reached_as: row.get("reached_as"),
        });
        Ok((known, row.get("log_id")))
    }

    async fn store(&self, client: &impl GenericClient) -> Db<()> {
        let Home { system_identifier, database, database_oid, event_oid, timeline, address, port, reached_as } = self;
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 8] =
            [system_identifier, database, database_oid, event_oid, timeline, address, port, reached_as];
        client.execute(sql!(home, "put"), &values).await?;
        Ok(())
    }

    /// How a log that remembers this home stands at `here`.
    fn compare(&self, here: &Home) -> Verdict {
        let differs = |known: &Option<String>, now: &Option<String>| known.is_some() && now.is_some() && known != now;
        let place = format!("database {}", self.database);
        if differs(&self.system_identifier, &here.system_identifier) {
            return Verdict::Foreign(format!("{place} of another cluster"));
        }
        if self.database_oid != here.database_oid {
            return Verdict::Foreign(format!("{place}, and this is the database {}", here.database));
        }
        if self.event_oid != here.event_oid {
            return Verdict::Foreign(format!("{place}, in a table that was dropped since: this one came from a dump"));
        }
        let moved = self.port != here.port || differs(&self.address, &here.address);
        if moved && !here.reached_as.iter().any(|name| self.reached_as.contains(name)) {
            let address = self.address.as_deref().unwrap_or("localhost");
            return Verdict::Foreign(format!("{place} of the server at {address}:{}", self.port));
        }
        match (self.timeline, here.timeline) {
            (Some(from), Some(to)) if from != to => Verdict::Promoted { from, to },
            _ if here.clone().joined_with(self) == *self => Verdict::AtHome,
            _ => Verdict::Changed,
        }
    }

    /// What is known here, with what was known before and cannot be seen from here.
    fn joined_with(mut self, known: &Home) -> Home {
        self.system_identifier = self.system_identifier.or_else(|| known.system_identifier.clone());
        self.timeline = self.timeline.or(known.timeline);
        self.address = self.address.or_else(|| known.address.clone());
        let mut names = known.reached_as.clone();
        names.extend(self.reached_as.drain(..).filter(|name| !known.reached_as.contains(name)));
        self.reached_as = names.split_off(names.len().saturating_sub(NAMES_MAX));
        self
    }
}

/// The servers of the URL. None for a single one on this host, which every copy would be called too.
fn name_of(config: &PgConfig) -> Option<String> {
    let servers = config.servers();
    let own = servers.iter().all(|(host, _)| host.starts_with('/') || host == "localhost" || is_loopback(host));
    (servers.len() > 1 || !own).then(|| {
        let names: Vec<String> = servers.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        names.join(",")
    })
}

fn is_loopback(host: &str) -> bool {
    host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Refuses a log that is not at home, or not whole. One whose server was replaced by its standby goes on as another incarnation.
pub(crate) async fn check(session: &mut Session) -> Db<()> {
    let here = Home::here(session).await?;
    let (known, log_id) = Home::known(&**session).await?;
    let Some(known) = known else {
        return unless_forbidden(here.store(&**session).await);
    };
    match known.compare(&here) {
        Verdict::AtHome => {}
        Verdict::Changed => unless_forbidden(here.joined_with(&known).store(&**session).await)?,
        Verdict::Promoted { from, to } => {
            unless_forbidden(promoted(session, here.joined_with(&known), from, to).await)?;
        }
        Verdict::Foreign(was) => {
            let message = format!(
                "this database is a copy or a restored backup of log {log_id}, which was in {was}: run `pillarbox migrate \
                 --adopt` (it is the production log moved: go on) or `--fresh` (it is a copy: new identity, deliver nothing \
                 old)"
            );
            return Err(DbError::own(ErrorKind::Foreign, message));
        }
    }
    check_sequence(session).await
}

/// A viewer may not write down what has changed; the next relay does.
fn unless_forbidden(written: Db<()>) -> Db<()> {
    match written {
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(()),
        other => other,
    }
}

/// Refuses a log whose sequence was set back: it would hand out positions that every reader has passed.
async fn check_sequence(session: &Session) -> Db<()> {
    let row = session.query_one(sql!(home, "known_positions"), &[]).await?;
    let (known, drawn): (Position, Position) = (row.get("known"), row.get("drawn"));
    if drawn < known {
        let what = format!("positions up to {known} were handed out, and now only those up to {drawn} are");
        return Err(DbError::not_itself(&what));
    }
    Ok(())
}

/// The first one to notice raises the incarnation: positions of before may have been handed out again, to other events.
async fn promoted(session: &mut Session, here: Home, from: i32, to: i32) -> Db<()> {
    let tx = session.begin().await?;
    if let Some(row) = tx.query_opt(sql!(home, "promote"), &[&from]).await? {
        here.store(&tx).await?;
        tracing::warn!(
            from,
            to,
            incarnation = row.get::<_, i64>(0),
            "the server is on another timeline: a standby was promoted or a backup restored; what it had not got is gone \
             from the log although it may have been delivered, and positions may name other events than before"
        );
    }
    Ok(tx.commit().await?)
}

/// Gives a log that has no home yet its home here. A copy stays foreign: [`check`] refuses it.
pub(crate) async fn move_in(session: &Session) -> Db<()> {
    match Home::known(&**session).await? {
        (Some(_), _) => Ok(()),
        (None, _) => Home::here(session).await?.store(&**session).await,
    }
}

/// Declares that this is the production log, moved or restored: it goes on with what it holds.
///
/// Raises the incarnation, so that nothing outside takes a position of before for one of now, and forgets the anchors and
/// whatever is said about positions that are not there.
pub async fn adopt(config: &PgConfig) -> Result<()> {
    Ok(declare(config, async |tx, here, horizon| {
        tx.execute(sql!(home, "cut_back"), &[&horizon]).await?;
        for row in tx.query(sql!(subscription, "former_filters_of_all"), &[]).await? {
            let (mut formers, mut known) = (FormerFilters::parse(row.try_get("former_filters")?), RangeSet::new());
            known.insert_range(1, horizon);
            formers.rewind(&known);
            put_former_filters(tx, SubscriptionId(row.try_get("id")?), &formers).await?;
        }
        // A server with two addresses, reached by two names, is one home.
        let (known, _) = Home::known(tx).await?;
        known.map_or(here.clone(), |known| here.joined_with(&known)).store(tx).await
    })
    .await?)
}

/// Declares that this is a copy: it gets a new identity and delivers nothing that is in it now, to whatever subscription,
/// also one that is made later.
pub async fn fresh(config: &PgConfig) -> Result<()> {
    Ok(declare(config, async |tx, here, horizon| {
        tx.batch_execute(sql!(home, "deliver_nothing")).await?;
        tx.execute(sql!(home, "start_over"), &[&horizon]).await?;
        tx.execute(sql!(home, "new_identity"), &[&horizon]).await?;
        tx.batch_execute(sql!(home, "new_salt")).await?;
        here.store(tx).await
    })
    .await?)
}

/// Makes this place the log's home, in one transaction with what follows from that.
async fn declare(config: &PgConfig, change: impl AsyncFnOnce(&Transaction<'_>, Home, Position) -> Db<()>) -> Db<()> {
    let mut session = Session::connect(&Arc::new(config.clone()), "pillarbox migrate", None).await?;
    migrate::require(&session).await?;
    let here = Home::here(&session).await?;
    let class = config.lock_class();
    let tx = session.begin().await?;
    tx.execute(sql!(meta, "lock"), &[]).await?;
    tx.execute(sql!(cursor, "lock_all"), &[]).await?;
    let horizon = horizon(&tx).await?;
    tx.execute(sql!(home, "forget_instances"), &[&i64::from(class)]).await?;
    change(&tx, here, horizon).await?;
    Ok(tx.commit().await?)
}

/// The highest position handed out. A sequence that was set back is set right: it would hand out positions that are taken, or
/// that no leaf holds any more.
async fn horizon(tx: &Transaction<'_>) -> Db<Position> {
    let row = tx.query_one(sql!(home, "horizon"), &[]).await?;
    let (drawn, known): (Position, Position) = (row.get("drawn"), row.get("known"));
    if known > drawn {
        tx.execute(sql!(home, "set_sequence"), &[&known]).await?;
    }
    Ok(drawn.max(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(address: Option<&str>, names: &[&str]) -> Home {
        Home {
            system_identifier: Some("7".into()),
            database: "app".into(),
            database_oid: 5,
            event_oid: 6,
            timeline: Some(1),
            address: address.map(Into::into),
            port: 5432,
            reached_as: names.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn is_foreign(known: &Home, here: &Home) -> bool {
        matches!(known.compare(here), Verdict::Foreign(_))
    }

    #[test]
    fn one_server_has_many_names_and_a_name_may_lead_to_another_address() {
        let known = home(Some("10.0.0.5"), &["db:5432"]);
        assert_eq!(known.compare(&home(Some("10.0.0.5"), &["db:5432"])), Verdict::AtHome);
        assert_eq!(known.compare(&home(None, &[])), Verdict::AtHome, "from its own host");
        let alias = home(Some("10.0.0.5"), &["alias:5432"]);
        assert_eq!(known.compare(&alias), Verdict::Changed);
        let known = alias.joined_with(&known);
        assert_eq!(known.reached_as, ["db:5432", "alias:5432"]);
        for name in ["db:5432", "alias:5432"] {
            assert_eq!(known.compare(&home(Some("10.0.0.6"), &[name])), Verdict::Changed, "the server was moved");
        }
        assert!(is_foreign(&known, &home(Some("10.0.0.6"), &["staging:5432"])), "a clone");
        assert!(is_foreign(&known, &home(Some("10.0.0.6"), &[])), "a clone on this host");
    }

    #[test]
    fn another_cluster_database_or_table_is_foreign_under_any_name() {
        let known = home(Some("10.0.0.5"), &["db:5432"]);
        assert!(is_foreign(&known, &Home { system_identifier: Some("8".into()), ..known.clone() }));
        assert!(is_foreign(&known, &Home { database_oid: 50, ..known.clone() }));
        assert!(is_foreign(&known, &Home { event_oid: 60, ..known.clone() }));
        assert_eq!(known.compare(&Home { system_identifier: None, ..known.clone() }), Verdict::AtHome, "not readable");
        let promoted = Verdict::Promoted { from: 1, to: 2 };
        assert_eq!(known.compare(&Home { timeline: Some(2), ..known.clone() }), promoted);
        assert_eq!(known.compare(&Home { timeline: None, ..known.clone() }), Verdict::AtHome, "a standby cannot tell");
    }

    #[test]
    fn what_every_host_calls_itself_is_no_name() {
        let name = |url: &str| name_of(&url.parse().expect("a URL"));
        for url in ["postgres://localhost/x", "postgres://127.0.0.1:5433/x", "postgres:///x?host=/run/postgresql"] {
            assert_eq!(name(url), None, "{url}");
        }
        assert_eq!(name("postgres://db/x").as_deref(), Some("db:5432"));
        assert_eq!(name("postgres://127.0.0.1:1,127.0.0.1:2/x").as_deref(), Some("127.0.0.1:1,127.0.0.1:2"));
    }

    #[test]
    fn only_so_many_names_are_kept() {
        let mut known = home(None, &[]);
        for number in 0..=NAMES_MAX {
            known = home(None, &[&format!("db{number}:5432")]).joined_with(&known);
        }
        assert_eq!(known.reached_as.len(), NAMES_MAX);
        assert_eq!(known.reached_as[0], "db1:5432");
    }
}
