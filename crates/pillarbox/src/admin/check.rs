use super::snapshot::{Snapshot, SubscriptionRow};
use crate::{Check, Error, InstanceId, Level, SchemaState, counted};

/// What to do about a log that is not the one that its database was made for.
const ADOPT_OR_FRESH: &str = "run `pillarbox migrate --adopt` or `--fresh`";

/// What `doctor` finds, for all stores in the same words.
impl Check {
    /// That it holds.
    pub fn ok(name: &str, finding: impl Into<String>) -> Check {
        Check { name: name.to_owned(), level: Level::Ok, finding: finding.into(), fix: None }
    }

    /// That it does not hold, or with a risk, and what to do.
    pub fn bad(name: &str, level: Level, finding: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { name: name.to_owned(), level, finding: finding.into(), fix: Some(fix.into()) }
    }

    /// `own`: the version of this build; `since`: when the schema became current, as said to people.
    pub fn schema(state: SchemaState, own: i64, since: Option<String>) -> Check {
        let name = "schema";
        let newer = |version: i64| format!("version {version} is newer than this build's {own}");
        match state {
            SchemaState::Current => {
                let since = since.map_or(String::new(), |at| format!(", since {at}"));
                Check::ok(name, format!("version {own}{since}"))
            }
            SchemaState::NewerCompatible { version } => {
                Check::bad(name, Level::Warning, format!("{}, but compatible", newer(version)), "upgrade pillarbox")
            }
            SchemaState::NewerBreaking { version } => {
                Check::bad(name, Level::Failed, newer(version), "upgrade pillarbox")
            }
            SchemaState::Missing | SchemaState::Old { .. } => {
                Check::bad(name, Level::Failed, "the schema is not current", "run `pillarbox migrate`")
            }
        }
    }

    /// Whether the log is the one that the database was made for; why not.
    pub fn home(checked: Result<(), Error>) -> Check {
        match checked {
            Ok(()) => Check::ok("home", "the log is where it belongs"),
            Err(error) => Check::bad("home", Level::Failed, error.to_string(), ADOPT_OR_FRESH),
        }
    }

    /// Whether the event at each anchor is still the one that was settled; which is not.
    pub fn anchors(checked: Result<(), Error>) -> Check {
        match checked {
            Ok(()) => Check::ok("anchors", "the last event that each lane has settled is still at its position"),
            Err(error) => Check::bad("anchors", Level::Failed, error.to_string(), ADOPT_OR_FRESH),
        }
    }

    /// `risen`: how many events lie inside a range that was closed; no subscription reads them.
    pub fn dead_ranges(risen: i64) -> Check {
        let name = "dead ranges";
        match risen {
            0 => Check::ok(name, "no event has appeared at a position that was proven empty"),
            _ => Check::bad(
                name,
                Level::Failed,
                format!("{} appeared at positions that had been closed", counted(risen, "event")),
                "let no publisher set the position; retention (`pillarbox prune`) delivers them late",
            ),
        }
    }

    /// `lost`: how many deliveries have no event.
    pub fn deliveries(lost: i64) -> Check {
        let name = "deliveries";
        match lost {
            0 => Check::ok(name, "each has its event"),
            _ => Check::bad(
                name,
                Level::Failed,
                format!("{} without an event: rows of the log were deleted by hand", counted(lost, "delivery")),
                "give them up with `pillarbox skip`, and let only `pillarbox prune` remove events",
            ),
        }
    }
}

impl Snapshot {
    /// Whether each subscription is run by a living instance.
    pub fn check_subscriptions(&self) -> Check {
        let name = "subscriptions";
        let is_orphaned = |subscription: &&SubscriptionRow| !self.is_run(subscription.id);
        let orphans = self.subscriptions.iter().filter(is_orphaned);
        let names: Vec<_> = orphans.map(|orphan| format!("'{}'", orphan.name)).collect();
        if names.is_empty() {
            return Check::ok(name, "each is run by a living instance");
        }
        let names = names.join(", ");
        Check::bad(
            name,
            Level::Warning,
            format!("no living instance runs {names}; the log keeps every event that was not delivered there"),
            "start a relay whose config names each, or run `pillarbox subscription delete NAME`",
        )
    }

    /// Whether instances have ended that still own lanes. The row of one that owns none is removed later and is no finding.
    pub fn check_instances(&self) -> Check {
        let name = "instances";
        let owns = |id: InstanceId| self.lanes().any(|lane| lane.owner == Some(id));
        let (alive, ended): (Vec<_>, Vec<_>) = self.instances.iter().partition(|row| row.alive);
        let left: Vec<String> = ended.iter().filter(|row| owns(row.id)).map(|row| row.id.0.to_string()).collect();
        if left.is_empty() {
            let gone =
                if ended.is_empty() { String::new() } else { format!("; {} ended and own nothing", ended.len()) };
            return Check::ok(name, format!("{} alive{gone}", alive.len()));
        }
        let finding = format!("{} ended without leaving and own lanes", left.join(", "));
        Check::bad(name, Level::Warning, finding, "start a relay: it takes over what they left")
    }
}
